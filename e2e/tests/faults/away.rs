//! Kerf's parts away, one by one: nobody else notices, and on return everything goes on.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kerf_e2e::images::BOX;
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, for_node, gpu_pod, mig, no_overlap, on};
use kerf_e2e::{Seen, eventually, wait_pod_phase};
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;

fn plain_pod(name: &str) -> Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": { "terminationGracePeriodSeconds": 1, "containers": [
            { "name": "main", "image": BOX, "imagePullPolicy": "Never", "command": ["sleep", "3600"] } ] },
    }))?)
}

#[test]
fn an_operator_that_is_away_stops_only_new_gpu_pods() {
    alone(
        KerfOptions::nodes(&[("away-a", "h100-80-sxm", 2), ("away-b", "h100-80-sxm", 2)]),
        |kerf| async move {
            let namespace = kerf.namespace("away").await?;
            for node in ["away-a", "away-b"] {
                kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
            }
            kerf.create_pod(&namespace, &gpu_pod("before", &[(&mig("2g.20gb"), 1)])).await?;
            let before = kerf.wait_running(&namespace, "before").await?;

            kerf.stop_operator("operator", Duration::ZERO).await?;
            kerf.create_pod(&namespace, &plain_pod("plain")?)
                .await
                .context("a pod without a GPU must not depend on Kerf")?;
            wait_pod_phase(&kerf.client(), &namespace, "plain", "Running", PATIENCE).await?;
            let pods = kerf.pods(&namespace);
            let refused =
                pods.create(&PostParams::default(), &gpu_pod("during", &[(&mig("1g.10gb"), 1)])).await;
            let why = refused.err().context("a GPU pod was admitted without the webhook")?.to_string();
            ensure!(why.contains("pods.kerf.dev"), "{why}");
            // A pod that ends while nobody looks leaves nothing for long.
            pods.delete("before", &DeleteParams::default()).await?;
            eventually(PATIENCE, "the pod gone without an operator", || async {
                Ok(pods.get_opt("before").await?.map_or(Seen::Yes(()), |_| Seen::not_yet("still there")))
            })
            .await?;

            kerf.start_operator("operator").await?;
            eventually(PATIENCE, "GPU pods admitted again", || async {
                match pods.create(&PostParams::default(), &gpu_pod("after", &[(&mig("2g.20gb"), 1)])).await {
                    Ok(_) => Ok(Seen::Yes(())),
                    Err(error) => Ok(Seen::not_yet(error)),
                }
            })
            .await?;
            let after = kerf.wait_running(&namespace, "after").await?;
            ensure!(after.devices.len() == before.devices.len(), "{after:?}");
            kerf.delete_pod(&namespace, "after").await?;
            kerf.wait_no_leak(&namespace).await
        },
    );
}

#[test]
fn two_operators_at_once_give_nothing_out_twice() {
    alone(
        KerfOptions::nodes(&[("pair-a", "h100-80-sxm", 4), ("pair-b", "h100-80-sxm", 4)]),
        |kerf| async move {
            let namespace = kerf.namespace("pair").await?;
            for node in ["pair-a", "pair-b"] {
                kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
            }
            kerf.start_operator("second").await?;
            let names: Vec<String> = (0..21).map(|index| format!("p{index}")).collect();
            for (index, name) in names.iter().enumerate() {
                let profile = ["1g.10gb", "2g.20gb", "3g.40gb"][index % 3];
                kerf.create_pod(&namespace, &gpu_pod(name, &[(&mig(profile), 1)])).await?;
                if index == 14 {
                    // The leader hangs in the middle of its work, as in a long pause of its machine: the other takes over,
                    // then the first wakes up and finishes what it was about to write. (Its webhook hangs with it.)
                    let pid = kerf.operator_pid("operator").await.context("no operator runs")?;
                    signal(pid, "STOP")?;
                    eventually(2 * PATIENCE, "the second operator leading", || leader_is(&kerf, "second"))
                        .await?;
                    signal(pid, "CONT")?;
                }
            }
            let mut all = Vec::new();
            for name in &names {
                all.push(kerf.wait_running(&namespace, name).await?);
            }
            no_overlap(&all)?;
            kerf.check_operators().await?;
            for name in &names {
                kerf.delete_pod(&namespace, name).await?;
            }
            kerf.wait_no_leak(&namespace).await
        },
    );
}

async fn leader_is(kerf: &Kerf, name: &str) -> Result<Seen<()>> {
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
        Api::namespaced(kerf.client(), "kerf-system");
    let lease = leases.get("kerf-operator").await?;
    let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
    Ok(if holder.starts_with(name) { Seen::Yes(()) } else { Seen::NotYet(format!("{holder} leads")) })
}

fn signal(pid: u32, signal: &str) -> Result<()> {
    let status = std::process::Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status()?;
    ensure!(status.success(), "kill -{signal} {pid} failed");
    Ok(())
}

#[test]
fn the_api_server_away_changes_nothing_for_running_pods() {
    alone(KerfOptions::nodes(&[("api-a", "h100-80-sxm", 1)]), |kerf| async move {
        let namespace = kerf.namespace("api").await?;
        let node = "api-a";
        kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        // Its container ends every two seconds and is started again by kubelet.
        let container = kerf_e2e::kerf::gpu_container("main", &[(&mig("2g.20gb"), 1)], &["--seconds", "2"]);
        let mut pod = on(node, kerf_e2e::kerf::pod_of("restarts", vec![container]));
        if let Some(spec) = &mut pod.spec {
            spec.restart_policy = Some("Always".to_owned());
        }
        kerf.create_pod(&namespace, &pod).await?;
        let before = kerf.wait_running(&namespace, "restarts").await?;
        let counts = kerf.sim(node)?.counts()?;
        kerf.cluster.stop_apiserver().await?;
        // The container's log on the node grows by a line each time it starts.
        let starts = || -> Result<usize> {
            let logs = kerf.cluster.node(node).log_dir().join("pods");
            let mut lines = 0;
            for pod in std::fs::read_dir(&logs)?.flatten() {
                if pod.file_name().to_string_lossy().contains("restarts") {
                    lines += std::fs::read_dir(pod.path().join("main"))?.flatten().count();
                }
            }
            Ok(lines)
        };
        let first = starts()?;
        eventually(PATIENCE, "the container starting again without the API server", || async {
            Ok(Seen::when(starts()?, |now| *now > first))
        })
        .await?;
        ensure!(kerf.sim(node)?.counts()? == counts, "an instance was touched while the API server was away");
        kerf.cluster.start_apiserver().await?;
        kerf.wait_reported(node, 1).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("after", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_running(&namespace, "after").await?;
        let instances = kerf.sim(node)?.instances()?;
        let same =
            instances.iter().any(|i| i.start == before.devices[0].start && i.nth == before.devices[0].nth);
        ensure!(same, "the claimed instance was made anew: {instances:?}");
        Ok(())
    });
}

#[test]
fn daemons_rolled_out_and_kerf_removed_while_pods_run() {
    alone(KerfOptions::nodes(&[("gone-a", "h100-80-sxm", 1)]), |kerf| async move {
        let namespace = kerf.namespace("gone").await?;
        let node = "gone-a";
        kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("stays", &[(&mig("3g.40gb"), 1)]))).await?;
        let before = kerf.wait_running(&namespace, "stays").await?;
        let kubectl = async |args: &[&str]| kerf.cluster.kubectl(args).await;
        kubectl(&["-n", "kerf-system", "rollout", "restart", "daemonset"]).await?;
        kubectl(&["-n", "kerf-system", "rollout", "status", "daemonset", "--timeout=100s"]).await?;
        kerf.wait_reported(node, 1).await?;
        ensure!(
            kerf.wait_running(&namespace, "stays").await?.devices == before.devices,
            "the rollout changed the pod"
        );
        // A daemon killed the hard way comes back too.
        kubectl(&["-n", "kerf-system", "delete", "pod", "--all", "--grace-period=0", "--force"]).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("next", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_running(&namespace, "next").await?;

        kerf.stop_operator("operator", Duration::from_secs(5)).await?;
        kubectl(&["delete", "mutatingwebhookconfiguration,validatingwebhookconfiguration", "--all"]).await?;
        kubectl(&["delete", "namespace", "kerf-system", "--timeout=100s"]).await?;
        let instances = kerf.sim(node)?.instances()?;
        ensure!(instances.len() == 2, "instances went with Kerf: {instances:?}");
        let pod = wait_pod_phase(&kerf.client(), &namespace, "stays", "Running", PATIENCE).await?;
        ensure!(kerf.inspect(&pod).await?.devices == before.devices, "removing Kerf changed the pod");
        kerf.create_pod(&namespace, &plain_pod("plain")?).await?;
        wait_pod_phase(&kerf.client(), &namespace, "plain", "Running", PATIENCE).await?;
        Ok(())
    });
}

#[test]
fn a_node_that_reboots_gives_its_pods_their_instances_back() {
    alone(KerfOptions::nodes(&[("boot-a", "h100-80-sxm", 2)]), |kerf| async move {
        let namespace = kerf.namespace("boot").await?;
        let node = "boot-a";
        kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        let mut pods = Vec::new();
        for (name, profile) in [("a", "3g.40gb"), ("b", "1g.10gb")] {
            let mut pod = on(node, gpu_pod(name, &[(&mig(profile), 1)]));
            if let Some(spec) = &mut pod.spec {
                spec.restart_policy = Some("Always".to_owned());
            }
            kerf.create_pod(&namespace, &pod).await?;
            pods.push(kerf.wait_running(&namespace, name).await?);
        }
        kerf.cluster.node(node).reboot().await?;
        for before in &pods {
            let place = |running: &kerf_e2e::kerf::Running| {
                running
                    .devices
                    .iter()
                    .map(|d| (d.gpu.clone(), d.profile.clone(), d.start))
                    .collect::<Vec<_>>()
            };
            let now =
                eventually(2 * PATIENCE, format!("pod {} on its instance again", before.pod), || async {
                    Ok(match kerf.wait_running(&namespace, &before.pod).await {
                        Ok(now) if place(&now) == place(before) => Seen::Yes(now),
                        Ok(now) => Seen::NotYet(format!("{:?}", now.devices)),
                        Err(error) => Seen::NotYet(format!("{error:#}")),
                    })
                })
                .await?;
            ensure!(now.devices.len() == 1, "{now:?}");
        }
        Ok(())
    });
}
