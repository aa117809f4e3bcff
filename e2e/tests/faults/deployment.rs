//! Kerf as it ships, the operator a Deployment behind its Service: out of memory, killed and rolled out while pods run and
//! wait.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Error, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kerf_crds::conditions::pod_reason;
use kerf_e2e::images::image_from_binaries;
use kerf_e2e::install::{Overlay, apply_yaml_with, deploy_dir};
use kerf_e2e::kerf::{Kerf, KerfOptions, NAMESPACE, PATIENCE, alone, built, for_node, gpu_pod, mig, on};
use kerf_e2e::{Seen, eventually};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, PostParams};
use serde_json::json;

const WORKLOADS: [&str; 2] = ["deployment/kerf-operator", "daemonset/kerf-node-daemon"];
const NODES: [&str; 2] = ["ship-a", "ship-b"];

#[test]
fn the_shipped_deployment_loses_nothing_when_its_pods_die_and_change() {
    let mut options = KerfOptions::nodes(&NODES.map(|node| (node, "h100-80-sxm", 1)));
    options.operator = false;
    alone(options, |kerf| async move {
        install_as_shipped(&kerf).await?;
        let namespace = kerf.namespace("ship").await?;
        for node in NODES {
            kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        }
        let create = async |name: &str, node: &str, profile: &str| {
            kerf.create_pod(&namespace, &on(node, gpu_pod(name, &[(&mig(profile), 1)]))).await
        };
        create("stays", "ship-a", "3g.40gb").await?;
        create("full", "ship-b", "7g.80gb").await?;
        let before =
            (kerf.wait_running(&namespace, "stays").await?, kerf.wait_running(&namespace, "full").await?);
        for name in ["waits-1", "waits-2"] {
            kerf.create_pod(&namespace, &gpu_pod(name, &[(&mig("7g.80gb"), 1)])).await?;
            kerf.wait_reason(&namespace, name, pod_reason::NO_ROOM).await?;
        }
        let next = async |name: &str| {
            admitted(&kerf, &namespace, &on("ship-a", gpu_pod(name, &[(&mig("1g.10gb"), 1)]))).await?;
            kerf.wait_running(&namespace, name).await.with_context(|| format!("pod {name}"))?;
            kerf.delete_pod(&namespace, name).await
        };

        out_of_memory(&kerf, &leader(&kerf).await?, "kerf-operator").await?;
        next("after-the-operator").await?;
        let daemons = kerf_pods(&kerf, "kerf-node-daemon").await?;
        let daemon = daemons.iter().find(|pod| node_of(pod) == "ship-a").context("no daemon on ship-a")?;
        out_of_memory(&kerf, daemon, "kerf-node-daemon").await?;
        next("after-the-daemon").await?;
        kerf.cluster
            .kubectl(&["-n", NAMESPACE, "delete", "pod", "--all", "--grace-period=0", "--force"])
            .await?;
        next("after-all").await?;

        let old = names(&kerf).await?;
        for workload in WORKLOADS {
            kerf.cluster.kubectl(&["-n", NAMESPACE, "rollout", "restart", workload]).await?;
        }
        // There is always a replica that answers: not one pod is refused meanwhile.
        tokio::select! {
            refused = first_refusal(&kerf, &namespace) => return Err(refused),
            rolled_out = eventually(PATIENCE, "the rollout", || rolled_out(&kerf)) => rolled_out?,
        }
        next("after-the-rollout").await?;
        ensure!(names(&kerf).await?.is_disjoint(&old), "a pod of {old:?} is still there after the rollout");

        for waiting in ["waits-1", "waits-2"] {
            kerf.wait_reason(&namespace, waiting, pod_reason::NO_ROOM).await?;
        }
        for before in [before.0, before.1] {
            let now = kerf.wait_running(&namespace, &before.pod).await?;
            ensure!(now.devices == before.devices, "{before:?} became {now:?}");
            kerf.delete_pod(&namespace, &before.pod).await?;
        }
        for waiting in ["waits-1", "waits-2"] {
            kerf.wait_running(&namespace, waiting).await?;
            kerf.delete_pod(&namespace, waiting).await?;
        }
        kerf.wait_no_leak(&namespace).await
    });
}

/// What `kubectl apply -k deploy` applies, but for the images.
async fn install_as_shipped(kerf: &Kerf) -> Result<()> {
    let busybox = &kerf.cluster.toolchain().busybox;
    let mut overlay = Overlay::default().for_api_port(kerf.cluster.api_port());
    let images: [(&str, &[&str]); 2] =
        [("operator", &["kerf-operator"]), ("node-daemon", &["kerf-node-daemon", "kerf-cdi-hook"])];
    for (program, programs) in images {
        let reference = format!("kerf/{program}:shipped");
        let programs = programs.iter().map(|program| built(program)).collect::<Result<Vec<_>>>()?;
        let programs: Vec<&Path> = programs.iter().map(PathBuf::as_path).collect();
        let image = image_from_binaries(busybox, &reference, &programs)?;
        kerf.cluster.load_image(&image).await?;
        overlay = overlay.image(&format!("kerf/{program}"), &reference);
    }
    let rendered = kerf.cluster.kubectl(&["kustomize", &deploy_dir().display().to_string()]).await?;
    apply_yaml_with(&kerf.client(), &rendered, &overlay).await?;
    for workload in WORKLOADS {
        kerf.cluster.kubectl(&["-n", NAMESPACE, "rollout", "status", workload, "--timeout=100s"]).await?;
    }
    kerf.wait_admission().await
}

/// Creates a pod as soon as a webhook answers: while no operator runs, GPU pods are refused.
async fn admitted(kerf: &Kerf, namespace: &str, pod: &Pod) -> Result<()> {
    let pods = kerf.pods(namespace);
    eventually(PATIENCE, format!("pod {} admitted", pod.name_any()), || async {
        Ok(match pods.create(&PostParams::default(), pod).await {
            Ok(_) => Seen::Yes(()),
            Err(error) => Seen::not_yet(error),
        })
    })
    .await
}

async fn kerf_pods(kerf: &Kerf, name: &str) -> Result<Vec<Pod>> {
    let of = ListParams::default().labels(&format!("app.kubernetes.io/name={name}"));
    Ok(kerf.pods(NAMESPACE).list(&of).await?.items)
}

async fn names(kerf: &Kerf) -> Result<BTreeSet<String>> {
    Ok(kerf.pods(NAMESPACE).list(&ListParams::default()).await?.iter().map(|pod| pod.name_any()).collect())
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

/// The operator's pod that decides.
async fn leader(kerf: &Kerf) -> Result<Pod> {
    let leases: Api<Lease> = Api::namespaced(kerf.client(), NAMESPACE);
    let pods = kerf.pods(NAMESPACE);
    eventually(PATIENCE, "a leading operator", || async {
        let holder = leases.get("kerf-operator").await?.spec.and_then(|spec| spec.holder_identity);
        let holder = holder.unwrap_or_default();
        Ok(pods.get_opt(&holder).await?.map_or_else(|| Seen::not_yet(&holder), Seen::Yes))
    })
    .await
}

/// Whether all of Kerf's pods are those of the last rollout, and ready.
async fn rolled_out(kerf: &Kerf) -> Result<Seen<()>> {
    for workload in WORKLOADS {
        let status =
            kerf.cluster.kubectl(&["-n", NAMESPACE, "rollout", "status", workload, "--watch=false"]).await?;
        if !status.contains("successfully rolled out") {
            return Ok(Seen::NotYet(status));
        }
    }
    // A pod that ends is no part of that status.
    let pods = kerf.pods(NAMESPACE).list(&ListParams::default()).await?;
    let ending = pods.iter().find(|pod| pod.metadata.deletion_timestamp.is_some());
    Ok(ending.map_or(Seen::Yes(()), |pod| Seen::not_yet(format!("{} is ending", pod.name_any()))))
}

/// Asks for a GPU pod again and again, without creating one, until that is refused.
async fn first_refusal(kerf: &Kerf, namespace: &str) -> Error {
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let pod = gpu_pod("asked-for", &[(&mig("1g.10gb"), 1)]);
    loop {
        if let Err(error) = kerf.pods(namespace).create(&dry_run, &pod).await {
            return Error::new(error).context("a pod was refused during a rollout");
        }
    }
}

/// Fills the memory of a pod's container until the kernel kills its program, and waits until it runs again.
async fn out_of_memory(kerf: &Kerf, pod: &Pod, program: &'static str) -> Result<()> {
    let what = format!("{} out of memory", pod.name_any());
    let (pid, memory) = process_of(pod, program).context(what.clone())?;
    // Whatever else is in the cgroup, the kernel takes this one first.
    fs::write(format!("/proc/{pid}/oom_score_adj"), "1000").context(what.clone())?;
    let restarts = container(pod).map_or(0, |status| status.restart_count);
    let fill = tokio::task::spawn_blocking(move || {
        let script = format!("echo $$ > {}/cgroup.procs && exec tail /dev/zero", memory.display());
        Command::new("sh").args(["-c", &script]).status()
    });
    let pods = kerf.pods(NAMESPACE);
    let name = pod.name_any();
    eventually(PATIENCE, what.clone(), || async {
        let now = pods.get(&name).await?;
        let Some(status) = container(&now) else { return Ok(Seen::not_yet("no status")) };
        let killed = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
        let reason = killed.and_then(|state| state.reason.as_deref()).unwrap_or_default();
        let again = status.restart_count > restarts && status.ready;
        Ok(match again && reason == "OOMKilled" {
            true => Seen::Yes(()),
            false => Seen::NotYet(format!("{status:?}")),
        })
    })
    .await?;
    let filled = fill.await.context(what.clone())?.context(what.clone())?;
    ensure!(!filled.success(), "{what}: the program that filled the memory ended by itself");
    Ok(())
}

/// The process of a pod's container, in the host's numbering, and its memory cgroup.
fn process_of(pod: &Pod, program: &str) -> Result<(u32, PathBuf)> {
    let uid = pod.uid().unwrap_or_default();
    // The kernel cuts names after 15 characters.
    let comm = &program[..program.len().min(15)];
    for entry in fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let (Ok(name), Ok(cgroups)) =
            (fs::read_to_string(entry.path().join("comm")), fs::read_to_string(entry.path().join("cgroup")))
        else {
            continue;
        };
        if name.trim() != comm || !cgroups.contains(&uid) {
            continue;
        }
        // `<number>:<controllers>:<path>`, and `0::<path>` for the hierarchy of version 2.
        let memory = cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let root = match controllers {
                "memory" => "/sys/fs/cgroup/memory",
                "" => "/sys/fs/cgroup",
                _ => return None,
            };
            Some(PathBuf::from(format!("{root}{path}"))).filter(|dir| dir.join("cgroup.procs").exists())
        });
        return Ok((pid, memory.context("its memory cgroup was not found")?));
    }
    anyhow::bail!("no process {program} of pod {} runs", pod.name_any())
}
