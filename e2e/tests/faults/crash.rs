//! Killed at every step, before and after its effect: the end is as if nothing had happened.
//!
//! The fault points are those of the step types themselves: a step that is added without one does not compile here.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::Method;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, for_node, gpu_pod, mig, on};
use kerf_e2e::proxy::{Matching, Proxy, Side};
use kerf_e2e::{Component, Seen, eventually};
use kerf_node_daemon::step::{Step as DaemonStep, StepKind};
use kerf_planner::protocol::{Step, Waiting};
use kerf_sim::{Occurrence, When};
use kube::api::{Api, ListParams};
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
        Step::Allocate { hold } => {
            let body = if hold { "gpunodes" } else { "allocationTimestamp" };
            write(Method::PUT, "/resourceclaims/", "/status", Some(body))
        }
        Step::Ungate => write(Method::PATCH, "/pods/", "", Some("schedulingGates")),
        Step::ReleaseHold | Step::ClearAllocation => write(Method::PUT, "/resourceclaims/", "/status", None),
        Step::RemoveEntry | Step::RestoreEntry => write(Method::PUT, "/gpunodes/", "", None),
        Step::EvictPod => write(Method::POST, "/pods/", "/eviction", None),
        Step::DeleteClaim => write(Method::DELETE, "/resourceclaims/", "", None),
    }
}

/// Every step that a pod which simply runs and ends takes its operator through.
const PLAIN: [Step; 5] =
    [Step::RestoreEntry, Step::CreateClaim, Step::Allocate { hold: false }, Step::Ungate, Step::RemoveEntry];
/// Those of a pod whose place does not work out.
const TROUBLED: [Step; 3] = [Step::ClearAllocation, Step::Allocate { hold: true }, Step::ReleaseHold];
/// Writes nothing, only repairs what no single fault brings about, or is a gang's; checked by the model and in process.
const ELSEWHERE: [Step; 4] = [Step::Wait(Waiting::Plan), Step::ReadPod, Step::EvictPod, Step::DeleteClaim];

/// Fails to compile when a step is added: put it into one of the lists above.
fn list_of(step: Step) -> &'static [Step] {
    match step {
        Step::RestoreEntry
        | Step::CreateClaim
        | Step::Allocate { hold: false }
        | Step::Ungate
        | Step::RemoveEntry => &PLAIN,
        Step::ClearAllocation | Step::Allocate { hold: true } | Step::ReleaseHold => &TROUBLED,
        Step::Wait(_) | Step::ReadPod | Step::EvictPod | Step::DeleteClaim => &ELSEWHERE,
    }
}

/// Kills the operator as soon as the proxy has stopped a write, and starts another.
pub(crate) async fn kill_when_stopped(kerf: &Kerf, proxy: &mut Proxy, at: &str) -> Result<()> {
    tokio::time::timeout(PATIENCE, proxy.stopped())
        .await
        .with_context(|| format!("{at}: the operator never wrote it"))?
        .context("the proxy has ended")?;
    kerf.stop_operator("operator", Duration::ZERO).await?;
    kerf.start_operator_through("operator", Some(&proxy.url())).await
}

pub(crate) async fn proxied(kerf: &Kerf) -> Result<Proxy> {
    let kubeconfig = kerf.cluster.kubeconfig_for_service_account("kerf-system", "operator", None).await?;
    let proxy = Proxy::start(kerf.cluster.client_from(&kubeconfig).await?).await?;
    kerf.start_operator_through("operator", Some(&proxy.url())).await?;
    kerf.wait_admission().await?;
    Ok(proxy)
}

/// Creates a pod; while the operator restarts, its webhook is away for a moment.
pub(crate) async fn create(kerf: &Kerf, namespace: &str, pod: &Pod) -> Result<()> {
    eventually(PATIENCE, "the pod admitted", || async {
        match kerf.create_pod(namespace, pod).await {
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
        create(&kerf, &namespace, &on(node, gpu_pod("first", &[(&mig("1g.10gb"), 1)]))).await?;
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
                let profile = mig(["2g.20gb", "3g.40gb"][index % 2]);
                create(&kerf, &namespace, &on(node, gpu_pod(&name, &[(&profile, 1)]))).await?;
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

/// For each step of `TROUBLED`, on both sides: the operator dies there, and the pod runs in the end.
#[test]
fn the_operator_killed_while_a_place_does_not_work_out() {
    let mut options = KerfOptions::nodes(&[("hold-a", "h100-80-sxm", 1), ("hold-b", "h100-80-sxm", 1)]);
    options.operator = false;
    alone(options, |kerf| async move {
        let mut proxy = proxied(&kerf).await?;
        let namespace = kerf.namespace("hold").await?;
        for node in ["hold-a", "hold-b"] {
            kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        }
        for side in [Side::Before, Side::After] {
            let at = format!("{side:?} {:?}", Step::ClearAllocation);
            withdrawn(&kerf, &mut proxy, &namespace, side).await.context(at)?;
        }
        // From here on there is no other place: what kube-scheduler refuses is held.
        kerf.create_pod(&namespace, &on("hold-b", gpu_pod("full", &[(&mig("7g.80gb"), 1)]))).await?;
        kerf.wait_running(&namespace, "full").await?;
        for step in TROUBLED.into_iter().filter(|step| *step != Step::ClearAllocation) {
            ensure!(list_of(step).contains(&step), "{step:?}");
            for side in [Side::Before, Side::After] {
                held(&kerf, &mut proxy, &namespace, step, side)
                    .await
                    .with_context(|| format!("{side:?} {step:?}"))?;
            }
        }
        kerf.delete_pod(&namespace, "full").await?;
        kerf.wait_no_leak(&namespace).await
    });
}

/// The node of a place is cordoned, and there is another.
async fn withdrawn(kerf: &Kerf, proxy: &mut Proxy, namespace: &str, side: Side) -> Result<()> {
    let name = format!("withdrawn-{side:?}").to_lowercase();
    kerf.cluster.kubectl(&["cordon", "hold-b"]).await?;
    place(kerf, namespace, &name).await?;
    let write = write_of(Step::ClearAllocation).context("it writes nothing")?;
    proxy.stop_next(write, side);
    kerf.cluster.kubectl(&["uncordon", "hold-b"]).await?;
    kerf.cluster.kubectl(&["cordon", "hold-a"]).await?;
    let stopped =
        tokio::time::timeout(PATIENCE, proxy.stopped()).await.context("the operator never wrote it")?;
    stopped.context("the proxy has ended")?;
    // Nobody else clears: kube-scheduler is away.
    let allocated = consumers(kerf, namespace, &name).await?.is_some();
    ensure!(allocated == (side == Side::Before), "what was stopped is another write: allocated: {allocated}");
    kerf.stop_operator("operator", Duration::ZERO).await?;
    kerf.start_operator_through("operator", Some(&proxy.url())).await?;
    kerf.cluster.start_component(Component::Scheduler).await?;
    let running = kerf.wait_running(namespace, &name).await?;
    ensure!(running.node == "hold-b", "{running:?}");
    kerf.cluster.kubectl(&["uncordon", "hold-a"]).await?;
    kerf.delete_pod(namespace, &name).await?;
    kerf.wait_no_leak(namespace).await
}

/// The node of a place is cordoned, and there is no other.
async fn held(kerf: &Kerf, proxy: &mut Proxy, namespace: &str, step: Step, side: Side) -> Result<()> {
    let name = format!("held-{}-{side:?}", if step == Step::ReleaseHold { "released" } else { "allocated" });
    let name = name.to_lowercase();
    let write = write_of(step).context("it writes nothing")?;
    place(kerf, namespace, &name).await?;
    kerf.cluster.kubectl(&["cordon", "hold-a"]).await?;
    let is_held =
        |kinds: &Option<Vec<String>>| *kinds == Some(vec!["pods".to_owned(), "gpunodes".to_owned()]);
    if step != Step::ReleaseHold {
        proxy.stop_next(write.clone(), side);
    }
    kerf.cluster.start_component(Component::Scheduler).await?;
    if step != Step::ReleaseHold {
        kill_when_stopped(kerf, proxy, "the hold").await?;
    }
    eventually(PATIENCE, "the allocation held", || async {
        Ok(Seen::when(consumers(kerf, namespace, &name).await?, is_held))
    })
    .await?;
    if step == Step::ReleaseHold {
        proxy.stop_next(write, side);
    }
    kerf.cluster.kubectl(&["uncordon", "hold-a"]).await?;
    if step == Step::ReleaseHold {
        kill_when_stopped(kerf, proxy, "the release").await?;
    }
    let running = kerf.wait_running(namespace, &name).await?;
    ensure!(running.node == "hold-a", "{running:?}");
    eventually(PATIENCE, "the hold released", || async {
        let kinds = consumers(kerf, namespace, &name).await?;
        Ok(Seen::when(kinds, |kinds| *kinds == Some(vec!["pods".to_owned()])))
    })
    .await?;
    kerf.delete_pod(namespace, &name).await?;
    // The pod that fills the other GPU stays.
    eventually(PATIENCE, "the place free", || async {
        let partitions = kerf.gpu_nodes().get("hold-a").await?.spec.partitions;
        Ok(Seen::when(partitions.len(), |number| *number == 0))
    })
    .await?;
    Ok(())
}

/// Creates a pod, and waits until it is placed and its gate removed, while nobody binds.
async fn place(kerf: &Kerf, namespace: &str, name: &str) -> Result<()> {
    kerf.cluster.stop(Component::Scheduler).await?;
    create(kerf, namespace, &gpu_pod(name, &[(&mig("2g.20gb"), 1)])).await?;
    eventually(PATIENCE, format!("the gate of {name} removed"), || async {
        let pod = kerf.pods(namespace).get(name).await?;
        let gates = pod.spec.and_then(|spec| spec.scheduling_gates).unwrap_or_default();
        Ok(Seen::when(gates.len(), |gates| *gates == 0))
    })
    .await?;
    Ok(())
}

/// What the pod's claim is reserved for, by kind; `None` while it is not allocated.
async fn consumers(kerf: &Kerf, namespace: &str, pod: &str) -> Result<Option<Vec<String>>> {
    let claims: Api<ResourceClaim> = Api::namespaced(kerf.client(), namespace);
    let claims = claims.list(&ListParams::default()).await?.items;
    let of_pod = |claim: &&ResourceClaim| {
        claim.metadata.owner_references.iter().flatten().any(|owner| owner.name == pod)
    };
    let status = claims.iter().find(of_pod).and_then(|claim| claim.status.clone()).unwrap_or_default();
    let reserved = status.reserved_for.unwrap_or_default();
    Ok(status.allocation.map(|_| reserved.into_iter().map(|consumer| consumer.resource).collect()))
}
