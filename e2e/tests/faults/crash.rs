//! Killed at every step, before and after its effect: the end is as if nothing had happened.
//!
//! The fault points are those of the step types themselves: a step that is added without one does not compile here.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::Method;
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, for_node, gpu_pod, mig, on};
use kerf_e2e::proxy::{Matching, Proxy, Side};
use kerf_e2e::{Component, Seen, eventually};
use kerf_node_daemon::step::{Step as DaemonStep, StepKind};
use kerf_planner::protocol::{Step, Waiting};
use kerf_sim::{Occurrence, When};
use serde_json::json;

#[test]
fn the_daemon_killed_at_every_change_of_the_hardware() {
    alone(KerfOptions::nodes(&[("crash-a", "h100-80-sxm", 1)]).quick_kubelets(), |kerf| async move {
        let namespace = kerf.namespace("crash").await?;
        let node = "crash-a";
        let mut spec = for_node(node, json!({ "mode": "Dynamic" }));
        spec["wholeGpus"] = json!("Serve");
        kerf.policy(node, spec).await?;
        // Once without a fault, so that each round finds what a round leaves.
        round(&kerf, &namespace, node, "start", None).await?;
        for kind in DaemonStep::ALL_KINDS {
            for when in [When::Before, When::After] {
                let name = format!("{when:?}-{kind:?}").to_lowercase();
                round(&kerf, &namespace, node, &name, Some((kind, when)))
                    .await
                    .with_context(|| format!("killed {when:?} {} of {kind:?}", kind.nvml_call()))?;
            }
        }
        Ok(())
    });
}

/// The first of three pods needs the GPU whole, the second cut, the third cut otherwise: between them every kind of step
/// is taken. The daemon is killed at one of them.
async fn round(
    kerf: &Kerf,
    namespace: &str,
    node: &str,
    name: &str,
    kill: Option<(StepKind, When)>,
) -> Result<()> {
    let sim = kerf.sim(node)?;
    let pods = ["nvidia.com/gpu".to_owned(), mig("3g.40gb"), mig("7g.80gb")];
    for (index, resource) in pods.iter().enumerate() {
        if let Some((kind, when)) = kill
            && index == taken_for(kind)
        {
            sim.inject_kill(kind.nvml_call(), when, Occurrence::Once, None)?;
        }
        let pod = format!("{name}-{index}");
        kerf.create_pod(namespace, &on(node, gpu_pod(&pod, &[(resource, 1)]))).await?;
        let running = kerf.wait_running(namespace, &pod).await?;
        let (instances, whole) = if index == 0 { (0, 1) } else { (1, 0) };
        ensure!(
            running.devices.len() == instances && running.whole_gpus.len() == whole,
            "{pod} runs on {:?} and {:?}",
            running.devices,
            running.whole_gpus
        );
        kerf.delete_pod(namespace, &pod).await?;
    }
    ensure!(sim.faults()?.is_empty(), "the daemon was never killed there");
    kerf.wait_no_leak(namespace).await?;
    let instances = sim.instances()?;
    let status = kerf.gpu_nodes().get(node).await?.status.unwrap_or_default();
    let foreign = status.gpus.iter().flat_map(|gpu| &gpu.instances).any(|instance| instance.foreign);
    ensure!(!foreign && instances.len() <= 1, "{instances:?}, of which some foreign: {foreign}");
    Ok(())
}

/// Which pod of a [`round`] has a kind of step taken. Fails to compile when a kind is added.
fn taken_for(kind: StepKind) -> usize {
    match kind {
        StepKind::DisableMig => 0,
        StepKind::EnableMig | StepKind::CreateGpuInstance | StepKind::CreateComputeInstance => 1,
        StepKind::DestroyComputeInstance | StepKind::DestroyGpuInstance => 2,
    }
}

/// The write that a step of the protocol is; `None` for one that writes nothing.
fn write_of(step: Step) -> Option<Matching> {
    let write = |method, path, ends_with, body| Some(Matching { method, path, ends_with, body });
    match step {
        Step::Wait(_) | Step::ReadPod => None,
        Step::CreateClaim => write(Method::POST, "/resourceclaims", "/resourceclaims", None),
        Step::Allocate { .. } => {
            write(Method::PUT, "/resourceclaims/", "/status", Some("allocationTimestamp"))
        }
        Step::Ungate => write(Method::PATCH, "/pods/", "", Some("schedulingGates")),
        Step::ReleaseHold | Step::ClearAllocation => write(Method::PUT, "/resourceclaims/", "/status", None),
        Step::RemoveEntry | Step::RestoreEntry => write(Method::PUT, "/gpunodes/", "", None),
        Step::EvictPod => write(Method::POST, "/pods/", "/eviction", None),
    }
}

/// Every step that a pod which simply runs and ends takes its operator through.
const PLAIN: [Step; 5] =
    [Step::RestoreEntry, Step::CreateClaim, Step::Allocate { hold: false }, Step::Ungate, Step::RemoveEntry];
/// Those of a pod whose place does not work out.
const TROUBLED: [Step; 3] = [Step::ClearAllocation, Step::Allocate { hold: true }, Step::ReleaseHold];
/// Writes nothing, or only repairs what no single fault brings about; checked by the model and in process.
const ELSEWHERE: [Step; 3] = [Step::Wait(Waiting::Plan), Step::ReadPod, Step::EvictPod];

/// Fails to compile when a step is added: put it into one of the lists above.
fn list_of(step: Step) -> &'static [Step] {
    match step {
        Step::RestoreEntry
        | Step::CreateClaim
        | Step::Allocate { hold: false }
        | Step::Ungate
        | Step::RemoveEntry => &PLAIN,
        Step::ClearAllocation | Step::Allocate { hold: true } | Step::ReleaseHold => &TROUBLED,
        Step::Wait(_) | Step::ReadPod | Step::EvictPod => &ELSEWHERE,
    }
}

/// Kills the operator as soon as the proxy has stopped a write, and starts another.
async fn kill_when_stopped(kerf: &Kerf, proxy: &mut Proxy, at: &str) -> Result<()> {
    tokio::time::timeout(PATIENCE, proxy.stopped())
        .await
        .with_context(|| format!("{at}: the operator never wrote it"))?
        .context("the proxy has ended")?;
    kerf.stop_operator("operator", Duration::ZERO).await?;
    kerf.start_operator_through("operator", Some(&proxy.url())).await
}

async fn proxied(kerf: &Kerf) -> Result<Proxy> {
    let kubeconfig = kerf.cluster.kubeconfig_for_service_account("kerf-system", "operator", None).await?;
    let proxy = Proxy::start(kerf.cluster.client_from(&kubeconfig).await?).await?;
    kerf.start_operator_through("operator", Some(&proxy.url())).await?;
    kerf.wait_admission().await?;
    Ok(proxy)
}

/// Creates a pod; while the operator restarts, its webhook is away for a moment.
async fn create(kerf: &Kerf, namespace: &str, node: &str, name: &str, profile: &str) -> Result<()> {
    let pod = on(node, gpu_pod(name, &[(&mig(profile), 1)]));
    eventually(PATIENCE, format!("pod {name} admitted"), || async {
        match kerf.create_pod(namespace, &pod).await {
            Ok(_) => Ok(Seen::Yes(())),
            Err(error) if format!("{error:#}").contains("already exists") => Ok(Seen::Yes(())),
            Err(error) => Ok(Seen::NotYet(format!("{error:#}"))),
        }
    })
    .await
}

#[test]
fn the_operator_killed_at_every_write_of_a_pods_life() {
    let mut options = KerfOptions::nodes(&[("write-a", "h100-80-sxm", 1)]);
    options.operator = false;
    alone(options, |kerf| async move {
        let mut proxy = proxied(&kerf).await?;
        let namespace = kerf.namespace("write").await?;
        let node = "write-a";
        kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        create(&kerf, &namespace, node, "first", "1g.10gb").await?;
        kerf.wait_running(&namespace, "first").await?;
        kerf.delete_pod(&namespace, "first").await?;
        kerf.wait_no_leak(&namespace).await?;
        for (index, step) in PLAIN.into_iter().enumerate() {
            ensure!(list_of(step).contains(&step), "{step:?}");
            for side in [Side::Before, Side::After] {
                let name = format!("p{index}-{side:?}").to_lowercase();
                let at = format!("{side:?} {step:?}");
                let write = write_of(step).with_context(|| format!("{step:?} writes nothing"))?;
                // The entry is taken out when the pod ends; all else is written while it comes to life.
                let at_the_end = step == Step::RemoveEntry;
                if !at_the_end {
                    proxy.stop_next(write.clone(), side);
                }
                create(&kerf, &namespace, node, &name, ["2g.20gb", "3g.40gb"][index % 2]).await?;
                if !at_the_end {
                    kill_when_stopped(&kerf, &mut proxy, &at).await?;
                }
                kerf.wait_running(&namespace, &name).await.with_context(|| at.clone())?;
                if at_the_end {
                    proxy.stop_next(write, side);
                }
                kerf.delete_pod(&namespace, &name).await?;
                if at_the_end {
                    kill_when_stopped(&kerf, &mut proxy, &at).await?;
                }
                kerf.wait_no_leak(&namespace).await.with_context(|| at.clone())?;
            }
        }
        Ok(())
    });
}

#[test]
#[ignore = "has not passed yet"]
fn the_operator_killed_while_a_place_does_not_work_out() {
    let mut options = KerfOptions::nodes(&[("hold-a", "h100-80-sxm", 1), ("hold-b", "h100-80-sxm", 1)]);
    options.operator = false;
    alone(options, |kerf| async move {
        let mut proxy = proxied(&kerf).await?;
        let namespace = kerf.namespace("hold").await?;
        for node in ["hold-a", "hold-b"] {
            kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        }
        for (index, step) in TROUBLED.into_iter().enumerate() {
            ensure!(list_of(step).contains(&step), "{step:?}");
            for side in [Side::Before, Side::After] {
                let at = format!("{side:?} {step:?}");
                let name = format!("p{index}-{side:?}").to_lowercase();
                // The pod is placed and its gate removed while nobody binds; then its node is cordoned.
                kerf.cluster.stop(Component::Scheduler).await?;
                create(&kerf, &namespace, "hold-a", &name, "2g.20gb").await?;
                eventually(PATIENCE, format!("{at}: the gate removed"), || async {
                    let pod = kerf.pods(&namespace).get(&name).await?;
                    let gates = pod.spec.and_then(|spec| spec.scheduling_gates).unwrap_or_default();
                    Ok(Seen::when(gates.len(), |gates| *gates == 0))
                })
                .await?;
                kerf.cluster.kubectl(&["cordon", "hold-a"]).await?;
                if let Some(write) = write_of(step) {
                    proxy.stop_next(write, side);
                }
                kerf.cluster.start_component(Component::Scheduler).await?;
                // Whether this write comes depends on who is first, the scheduler's refusal or the operator's look at
                // the node; where it comes, the operator dies there.
                if tokio::time::timeout(Duration::from_secs(5), proxy.stopped()).await.is_ok() {
                    kerf.stop_operator("operator", Duration::ZERO).await?;
                    kerf.start_operator_through("operator", Some(&proxy.url())).await?;
                } else {
                    proxy.forget();
                }
                kerf.cluster.kubectl(&["uncordon", "hold-a"]).await?;
                kerf.wait_running(&namespace, &name).await.with_context(|| at.clone())?;
                kerf.delete_pod(&namespace, &name).await?;
                kerf.wait_no_leak(&namespace).await.with_context(|| at.clone())?;
            }
        }
        Ok(())
    });
}
