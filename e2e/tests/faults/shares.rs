//! Shares of GPUs: every pod has what it asked for, none takes more, and it stays so when Kerf's own parts end.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kerf_crds::gpu_node::Isolation;
use kerf_crds::names::{ISOLATION, SHARE_COMPUTE, SHARE_MEMORY};
use kerf_e2e::kerf::{JOB, Kerf, KerfOptions, NAMESPACE, PATIENCE, alone, for_node, gpu_pod, mig, pod_of};
use kerf_e2e::wait::{Seen, eventually, wait_pod_phase};
use kube::Api;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

pub const GIB: u64 = 1 << 30;

/// A container that uses a share: the program's arguments say what it does there.
fn cuda(name: &str, gib: u64, percent: u32, args: &[&str]) -> Value {
    json!({
        "name": name, "image": JOB, "imagePullPolicy": "Never",
        "command": ["/usr/local/bin/kerf-sim-cuda"], "args": args,
        "resources": { "limits": { SHARE_MEMORY: format!("{gib}Gi"), SHARE_COMPUTE: percent.to_string() } },
    })
}

/// A pod that takes all the memory that it is given, and stays.
pub fn greedy(name: &str, gib: u64, percent: u32, args: &[&str]) -> Pod {
    let args = [&["--fill", "256Mi", "--keep-going"], args].concat();
    pod_of(name, vec![cuda("main", gib, percent, &args)])
}

/// What a pod's container has said so far.
pub async fn events(kerf: &Kerf, namespace: &str, pod: &str) -> Result<Vec<Value>> {
    let text = kerf.pods(namespace).logs(pod, &Default::default()).await?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Waits until all processes of a pod have been refused more, and returns what they have together.
pub async fn filled(kerf: &Kerf, namespace: &str, pod: &str, processes: usize) -> Result<u64> {
    eventually(PATIENCE, format!("pod {pod} refused more memory"), || async {
        let events = events(kerf, namespace, pod).await?;
        let refused: Vec<&Value> = events.iter().filter(|event| event["event"] == "refused").collect();
        let wrong = refused.iter().find(|event| event["error"] != "CUDA_ERROR_OUT_OF_MEMORY");
        ensure!(wrong.is_none(), "{wrong:?}");
        // The last word of each process.
        let has: BTreeMap<u64, u64> = refused
            .into_iter()
            .filter_map(|event| Some((event["pid"].as_u64()?, event["allocated"].as_u64()?)))
            .collect();
        if has.len() < processes {
            return Ok(Seen::NotYet(format!("{:?}", events.last())));
        }
        Ok(Seen::Yes(has.into_values().sum()))
    })
    .await
}

/// A pod that goes on asking for more has not got any, and has lost nothing.
pub async fn undisturbed(kerf: &Kerf, namespace: &str, pod: &str, bytes: u64) -> Result<()> {
    let asked = |events: &[Value]| events.iter().filter(|event| event["event"] == "refused").count();
    let before = asked(&events(kerf, namespace, pod).await?);
    eventually(PATIENCE, format!("pod {pod} asking again"), || async {
        let events = events(kerf, namespace, pod).await?;
        let wrong = events.iter().find(|event| event["event"] == "terminated" || event["event"] == "failed");
        ensure!(wrong.is_none(), "{wrong:?}");
        Ok(if asked(&events) > before + 1 {
            Seen::Yes(())
        } else {
            Seen::NotYet(format!("{:?}", events.last()))
        })
    })
    .await?;
    let has = filled(kerf, namespace, pod, 1).await?;
    ensure!(has == bytes, "{pod} has {has} bytes, and had {bytes}");
    Ok(())
}

/// Goes on asking for more.
pub const AGAIN: [&str; 2] = ["--again", "200"];

/// The branch of the driver that limits memory, and with which MPS has limits of their own for several tenants.
pub const LIMITS: u32 = 615;

/// A node of two GPUs: one is shared, the other is cut.
fn options(driver_branch: u32) -> KerfOptions {
    let options = KerfOptions::nodes(&[("shares", "h100-80-sxm", 2)]).quick_kubelets();
    KerfOptions { driver_branch: Some(driver_branch), ..options }
}

async fn policies(kerf: &Kerf, shares: Value) -> Result<()> {
    let mut shared = for_node("shares", json!({ "mode": "Dynamic" }));
    shared["gpus"] = json!({ "indices": [0] });
    shared["shares"] = shares;
    shared["wholeGpus"] = json!("Serve");
    kerf.policy("shared", shared).await?;
    let mut cut = for_node("shares", json!({ "mode": "Dynamic" }));
    cut["gpus"] = json!({ "indices": [1] });
    kerf.policy("cut", cut).await?;
    Ok(())
}

/// MPS servers' pods.
pub async fn servers(kerf: &Kerf) -> Result<Vec<Pod>> {
    let of = ListParams::default().labels("app.kubernetes.io/name=kerf-mps-server");
    Ok(kerf.pods(NAMESPACE).list(&of).await?.items)
}

/// Waits until no MPS server is left.
async fn no_servers(kerf: &Kerf) -> Result<()> {
    eventually(PATIENCE, "the MPS server's pod gone", || async {
        let left = servers(kerf).await?;
        Ok(if left.is_empty() { Seen::Yes(()) } else { Seen::not_yet(left[0].name_any()) })
    })
    .await
}

#[test]
fn pods_of_any_sizes_share_a_gpu_and_none_takes_more() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("shares").await?;
        policies(&kerf, json!({ "gpus": "Allow" })).await?;
        let sizes = [("a", 10, 10), ("b", 15, 20), ("c", 20, 30), ("d", 25, 40)];
        for (name, gib, percent) in sizes {
            kerf.create_pod(&namespace, &greedy(name, gib, percent, &[])).await?;
        }
        // Beside MIG on the same node.
        kerf.create_pod(&namespace, &gpu_pod("cut", &[(&mig("3g.40gb"), 1)])).await?;
        for (name, gib, percent) in sizes {
            wait_pod_phase(&kerf.client(), &namespace, name, "Running", PATIENCE).await?;
            let has = filled(&kerf, &namespace, name, 1).await?;
            ensure!(has <= gib * GIB && has + GIB > gib * GIB, "{name} has {has} bytes of {gib} GiB");
            let events = events(&kerf, &namespace, name).await?;
            let started = events.first().context("no word of it")?;
            ensure!(started["mps"] == true, "{started}");
            // Frameworks size themselves by the total: the container's own limit is there before its first instruction.
            ensure!(started["total"] == gib * GIB, "{name}: {started}");
            let multiprocessors = started["devices"][0]["sms"].as_u64().context("no count")?;
            // What MPS rounds, it rounds down.
            ensure!(multiprocessors <= u64::from(132 * percent / 100), "{name}: {started}");
        }
        kerf.wait_running(&namespace, "cut").await?;
        // All compute is given out.
        kerf.create_pod(&namespace, &greedy("late", 1, 1, &[])).await?;
        let message = kerf.wait_reason(&namespace, "late", "NoRoom").await?;
        ensure!(message.contains("a share of 1Gi and 1 %"), "{message}");

        // What is in force is on record.
        let node = kerf.gpu_nodes().get("shares").await?;
        let status = node.status.context("no report")?;
        let gpu = status.gpus.iter().find(|gpu| gpu.index == 0).context("no GPU 0")?;
        ensure!(gpu.sharing.as_ref().is_some_and(|s| s.isolation == Isolation::Driver), "{:?}", gpu.sharing);
        ensure!(
            gpu.shares.len() == 4 && gpu.shares.iter().all(|share| share.problem.is_none()),
            "{:?}",
            gpu.shares
        );
        ensure!(status.layout_summary.contains("4 shares"), "{}", status.layout_summary);
        ensure!(servers(&kerf).await?.len() == 1);

        // As Prometheus sees it, by pod: the limit, and what it has of it. The daemon looks every second.
        eventually(PATIENCE, "metrics of four shares", || async {
            let metrics = kerf.scrape("shares").await?;
            let value = |metric: &str, pod: &str| -> Option<f64> {
                let begins = format!("kerf_share_{metric}{{");
                let of_pod =
                    |line: &&str| line.starts_with(&begins) && line.contains(&format!("pod=\"{pod}\""));
                metrics.lines().find(of_pod)?.rsplit(' ').next()?.parse().ok()
            };
            let told = sizes.iter().all(|&(pod, gib, percent)| {
                let limit = (gib * GIB) as f64;
                value("memory_limit_bytes", pod) == Some(limit)
                    && value("memory_used_bytes", pod)
                        .is_some_and(|used| used <= limit && used + GIB as f64 > limit)
                    && value("compute_limit_percent", pod) == Some(percent.into())
                    && value("processes", pod) == Some(1.0)
                    && value("limits_in_force", pod) == Some(1.0)
            });
            Ok(if told { Seen::Yes(()) } else { Seen::NotYet(metrics) })
        })
        .await?;

        // A share that ends makes room; the last one leaves nothing behind.
        kerf.delete_pod(&namespace, "a").await?;
        wait_pod_phase(&kerf.client(), &namespace, "late", "Running", PATIENCE).await?;
        for name in ["b", "c", "d", "late", "cut"] {
            kerf.delete_pod(&namespace, name).await?;
        }
        kerf.wait_no_leak(&namespace).await?;
        no_servers(&kerf).await?;
        // Whoever wants all of the GPU gets it, and not for one process only.
        kerf.create_pod(&namespace, &gpu_pod("beside", &[(&mig("7g.80gb"), 1)])).await?;
        kerf.wait_running(&namespace, "beside").await?;
        kerf.create_pod(&namespace, &gpu_pod("whole", &[("nvidia.com/gpu", 1)])).await?;
        let whole = kerf.wait_running(&namespace, "whole").await?;
        ensure!(whole.whole_gpus == [0], "{:?}", whole.report);
        ensure!(kerf.sim("shares")?.compute_mode(0)? == 0, "the GPU is still for one process");
        kerf.check_operators().await
    });
}

#[test]
fn three_pods_share_a_mig_instance_beside_a_pod_with_another() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("inside").await?;
        let mut cut = for_node("shares", json!({ "mode": "Dynamic" }));
        cut["gpus"] = json!({ "indices": [0] });
        cut["shares"] = json!({ "instances": ["3g.40gb"], "isolation": "Process" });
        kerf.policy("cut", cut).await?;
        kerf.create_pod(&namespace, &gpu_pod("four", &[(&mig("4g.40gb"), 1)])).await?;
        // Percent of the whole GPU, which has 132 multiprocessors; the instance has 60 of them.
        let sizes = [("a", 10, 10), ("b", 12, 14), ("c", 14, 15)];
        for (name, gib, percent) in sizes {
            kerf.create_pod(&namespace, &greedy(name, gib, percent, &[])).await?;
        }
        kerf.wait_running(&namespace, "four").await?;
        for (name, gib, percent) in sizes {
            wait_pod_phase(&kerf.client(), &namespace, name, "Running", PATIENCE).await?;
            let has = filled(&kerf, &namespace, name, 1).await?;
            ensure!(has <= gib * GIB && has + GIB > gib * GIB, "{name} has {has} bytes of {gib} GiB");
            let events = events(&kerf, &namespace, name).await?;
            let started = events.first().context("no word of it")?;
            let device = &started["devices"][0];
            ensure!(device["uuid"].as_str().is_some_and(|uuid| uuid.starts_with("MIG-")), "{started}");
            let multiprocessors = device["sms"].as_u64().context("no count")?;
            ensure!(started["mps"] == true && multiprocessors <= u64::from(132 * percent / 100), "{started}");
        }
        let status = kerf.gpu_nodes().get("shares").await?.status.context("no report")?;
        let gpu = status.gpus.iter().find(|gpu| gpu.index == 0).context("no GPU 0")?;
        let here = |share: &kerf_crds::gpu_node::Share| {
            share.placement.is_some_and(|place| place.start == 4) && share.problem.is_none()
        };
        ensure!(gpu.shares.len() == 3 && gpu.shares.iter().all(here), "{:?}", gpu.shares);
        ensure!(servers(&kerf).await?.len() == 1, "one server for the instance");
        for (name, ..) in sizes {
            kerf.delete_pod(&namespace, name).await?;
        }
        no_servers(&kerf).await?;
        // All of the instance passes on, whoever had parts of it.
        kerf.create_pod(&namespace, &gpu_pod("three", &[(&mig("3g.40gb"), 1)])).await?;
        kerf.wait_running(&namespace, "three").await?;
        kerf.wait_running(&namespace, "four").await?;
        kerf.check_operators().await
    });
}

#[test]
fn a_noisy_neighbour_takes_nothing_of_others() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("noise").await?;
        policies(&kerf, json!({ "gpus": "Allow" })).await?;
        kerf.create_pod(&namespace, &greedy("quiet", 20, 20, &AGAIN)).await?;
        let quiet = filled(&kerf, &namespace, "quiet", 1).await?;

        // By many processes, by other variables, by none.
        let pinned = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=9=1G,0=70G";
        let tries: [(&str, usize, &[&str]); 4] = [
            ("many", 8, &["--processes", "8"]),
            ("more", 1, &["--set", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=70G"]),
            ("invalid", 1, &["--set", pinned]),
            ("percent", 1, &["--set", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"]),
        ];
        for (name, processes, args) in tries {
            kerf.create_pod(&namespace, &greedy(name, 10, 10, args)).await?;
            let has = filled(&kerf, &namespace, name, processes).await?;
            ensure!(has <= 10 * GIB, "{name} has {has} bytes of 10 GiB");
            for event in events(&kerf, &namespace, name).await?.iter().filter(|one| one["event"] == "started")
            {
                let multiprocessors = event["devices"][0]["sms"].as_u64().context("no count")?;
                ensure!(multiprocessors <= 13, "{event}");
            }
            kerf.delete_pod(&namespace, name).await?;
        }
        // Without the pipe directory it gets nothing instead of everything.
        let around = ["--unset", "CUDA_MPS_PIPE_DIRECTORY", "--allocate", "1Gi"];
        kerf.create_pod(&namespace, &pod_of("around", vec![cuda("main", 10, 10, &around)])).await?;
        wait_pod_phase(&kerf.client(), &namespace, "around", "Failed", PATIENCE).await?;
        let said = events(&kerf, &namespace, "around").await?;
        let [failed] = said.as_slice() else { anyhow::bail!("{said:?}") };
        ensure!(failed["error"] == "CUDA_ERROR_DEVICE_UNAVAILABLE", "{failed}");
        kerf.delete_pod(&namespace, "around").await?;

        // Two containers of one pod have two shares, and an init container before them no more than one.
        let init = cuda("before", 6, 10, &["--fill", "256Mi", "--keep-going", "--seconds", "0.1"]);
        let fill = ["--fill", "256Mi", "--keep-going"];
        let mut pod = pod_of("two", vec![cuda("one", 6, 10, &fill), cuda("other", 6, 10, &fill)]);
        pod.spec.as_mut().context("no spec")?.init_containers = Some(vec![serde_json::from_value(init)?]);
        kerf.create_pod(&namespace, &pod).await?;
        wait_pod_phase(&kerf.client(), &namespace, "two", "Running", PATIENCE).await?;
        let mut sum = 0;
        for container in ["one", "other"] {
            let of = kube::api::LogParams { container: Some(container.into()), ..Default::default() };
            sum += eventually(PATIENCE, format!("container {container} refused more"), || async {
                let text = kerf.pods(&namespace).logs("two", &of).await?;
                let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
                let refused = lines.into_iter().find(|event| event["event"] == "refused");
                Ok(refused.map_or_else(
                    || Seen::not_yet(&text),
                    |event| Seen::Yes(event["allocated"].as_u64().unwrap_or_default()),
                ))
            })
            .await?;
        }
        ensure!(sum <= 12 * GIB, "the two have {sum} bytes of 12 GiB");

        undisturbed(&kerf, &namespace, "quiet", quiet).await?;
        Ok(())
    });
}

/// Before MPS protocol 3 and limits of the driver: one size on a GPU, and a limit that several processes get around.
#[test]
fn where_only_mps_limits_the_sum_is_watched() {
    alone(options(580), |kerf| async move {
        let namespace = kerf.namespace("mps").await?;
        policies(&kerf, json!({ "gpus": "Allow", "isolation": "Process" })).await?;
        kerf.create_pod(&namespace, &greedy("one", 20, 25, &AGAIN)).await?;
        let has = filled(&kerf, &namespace, "one", 1).await?;
        ensure!(has <= 20 * GIB && has + GIB > 20 * GIB, "{has}");
        // Another size has no room beside it, and who wants the driver's limit none at all.
        kerf.create_pod(&namespace, &greedy("small", 10, 10, &[])).await?;
        kerf.wait_reason(&namespace, "small", "NoRoom").await?;
        let mut strict = greedy("strict", 20, 25, &[]);
        strict.annotations_mut().insert(ISOLATION.to_owned(), "driver".to_owned());
        kerf.create_pod(&namespace, &strict).await?;
        let message = kerf.wait_reason(&namespace, "strict", "NoSuchProfile").await?;
        ensure!(message.contains("a share of 20Gi and 25 %"), "{message}");
        kerf.delete_pod(&namespace, "strict").await?;

        // Each process has the limit for itself.
        kerf.create_pod(&namespace, &greedy("noisy", 20, 25, &["--processes", "3", "--seconds", "60"]))
            .await?;
        wait_pod_phase(&kerf.client(), &namespace, "noisy", "Failed", PATIENCE).await?;
        let said = events(&kerf, &namespace, "noisy").await?;
        let mut allocated: BTreeMap<u64, u64> = BTreeMap::new();
        for event in &said {
            if let (Some(pid), Some(bytes)) = (event["pid"].as_u64(), event["allocated"].as_u64()) {
                allocated.insert(pid, bytes);
            }
        }
        let most: u64 = allocated.values().sum();
        println!("the noisy pod had {} GiB of 20 before it was ended", most as f64 / GIB as f64);
        ensure!(most > 20 * GIB, "it never had more than its share: nothing was tried");
        let told = eventually(PATIENCE, "an event that says who took more", || async {
            let all: Api<k8s_openapi::api::events::v1::Event> = Api::all(kerf.client());
            let events = all.list(&ListParams::default()).await?.items;
            let notes = events.into_iter().filter(|event| {
                event.regarding.as_ref().is_some_and(|on| on.kind.as_deref() == Some("GpuNode"))
            });
            let notes: Vec<String> = notes.filter_map(|event| event.note).collect();
            let found = notes.iter().find(|note| note.contains(&format!("{namespace}/noisy")));
            Ok(found.map_or_else(|| Seen::NotYet(format!("{notes:?}")), |note| Seen::Yes(note.clone())))
        })
        .await?;
        println!("{told}");
        undisturbed(&kerf, &namespace, "one", has).await?;

        // With the last of its size gone, another size has its turn.
        for name in ["one", "noisy"] {
            kerf.delete_pod(&namespace, name).await?;
        }
        let has = filled(&kerf, &namespace, "small", 1).await?;
        ensure!(has <= 10 * GIB, "{has}");
        Ok(())
    });
}

#[test]
fn shares_live_on_without_kerf() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("alive").await?;
        policies(&kerf, json!({ "gpus": "Allow" })).await?;
        kerf.create_pod(&namespace, &greedy("runs", 20, 20, &AGAIN)).await?;
        let has = filled(&kerf, &namespace, "runs", 1).await?;
        let server = servers(&kerf).await?.pop().context("no server")?;

        // The daemon's pod is ended without grace, and comes again.
        let daemons = kerf.pods(NAMESPACE);
        let of = ListParams::default().labels("app.kubernetes.io/name=kerf-node-daemon");
        let daemon = daemons.list(&of).await?.items.pop().context("no daemon")?;
        daemons.delete(&daemon.name_any(), &DeleteParams::default().grace_period(0)).await?;
        eventually(PATIENCE, "another daemon", || async {
            let all = daemons.list(&of).await?.items;
            let ready = |pod: &Pod| {
                let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
                conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
            };
            let new = all.iter().find(|pod| pod.uid() != daemon.uid() && ready(pod));
            Ok(new.map_or_else(|| Seen::not_yet(all.len()), |_| Seen::Yes(())))
        })
        .await?;
        // It takes up the server that is there, and serves the next pod beside the first.
        kerf.create_pod(&namespace, &greedy("next", 10, 10, &[])).await?;
        let next = filled(&kerf, &namespace, "next", 1).await?;
        ensure!(next <= 10 * GIB, "{next}");
        let now = servers(&kerf).await?;
        ensure!(now.len() == 1 && now[0].uid() == server.uid(), "another server: {now:?}");
        undisturbed(&kerf, &namespace, "runs", has).await?;

        // Without a server its clients end; what is made anew has its limits.
        let api: Api<Pod> = kerf.pods(NAMESPACE);
        api.delete(&now[0].name_any(), &DeleteParams::default().grace_period(0)).await?;
        for name in ["runs", "next"] {
            wait_pod_phase(&kerf.client(), &namespace, name, "Failed", PATIENCE).await?;
            kerf.delete_pod(&namespace, name).await?;
        }
        kerf.create_pod(&namespace, &greedy("after", 10, 10, &["--processes", "2"])).await?;
        let has = filled(&kerf, &namespace, "after", 2).await?;
        ensure!(has <= 10 * GIB, "{has}");
        Ok(())
    });
}
