//! Pods of a gang start together or not at all, also when the operator dies between the writes that put them on record.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::Method;
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kerf_crds::gpu_node::Owner;
use kerf_crds::names::{GANG, GANG_SIZE};
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, gpu_pod, mig, no_overlap, on};
use kerf_e2e::proxy::{Matching, Proxy, Side};
use kerf_e2e::{Seen, eventually};
use kerf_sim::{NvmlError, Occurrence};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::crash::{create, proxied};

#[test]
fn a_gang_starts_together_or_not_at_all() {
    // Room for three, on two nodes, so that it takes two writes to put them on record.
    let mut options = KerfOptions::nodes(&[("gangs-a", "h100-80-sxm", 2), ("gangs-b", "h100-80-sxm", 1)]);
    options.operator = false;
    alone(options, |kerf| async move {
        let mut proxy = proxied(&kerf).await?;
        let namespace = kerf.namespace("gangs").await?;
        kerf.policy("gangs", json!({ "mig": { "mode": "Dynamic" } })).await?;
        waits_for_pods_and_for_room(&kerf, &namespace).await?;
        waits_for_its_last_instance(&kerf, &namespace).await?;
        for rest_stays in [true, false] {
            killed_between_the_writes(&kerf, &mut proxy, &namespace, rest_stays)
                .await
                .with_context(|| format!("killed between the writes; the rest stays: {rest_stays}"))?;
        }
        under_one_quota(&kerf).await
    });
}

fn member(gang: &str, index: usize) -> Pod {
    member_with(gang, index, "7g.80gb")
}

fn member_with(gang: &str, index: usize, profile: &str) -> Pod {
    let mut pod = gpu_pod(&format!("{gang}-{index}"), &[(&mig(profile), 1)]);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(GANG.to_owned(), gang.to_owned());
    annotations.insert(GANG_SIZE.to_owned(), "3".to_owned());
    pod
}

/// Pods of the gang that are on record.
async fn on_record(kerf: &Kerf, gang: &str) -> Result<Vec<String>> {
    let nodes = kerf.gpu_nodes().list(&ListParams::default()).await?;
    let entries = nodes.items.iter().flat_map(|node| &node.spec.partitions);
    let owners = entries.filter_map(|one| match &one.owner {
        Owner::Claim(owner) => Some(owner.pod.clone()),
        Owner::Policy(_) | Owner::Reservation(_) => None,
    });
    Ok(owners.filter(|pod| pod.starts_with(gang)).collect())
}

/// None of the gang's pods has lost its gate.
async fn all_wait(kerf: &Kerf, namespace: &str, gang: &str) -> Result<()> {
    for pod in kerf.pods(namespace).list(&ListParams::default()).await? {
        let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref()).map_or(0, Vec::len);
        ensure!(gates == 1 || !pod.name_any().starts_with(gang), "{} has lost its gate", pod.name_any());
    }
    Ok(())
}

async fn two_are_there(kerf: &Kerf, namespace: &str, gang: &str, pod: &str) -> Result<()> {
    let message = format!("2 of 3 pods of gang {namespace}/{gang} are there");
    let expected = Some(("False".to_owned(), "WaitsForGang".to_owned(), message));
    eventually(PATIENCE, format!("{pod} told {expected:?}"), || async {
        let said = kerf.planned(namespace, pod).await?;
        Ok(Seen::when(said, |said| *said == expected))
    })
    .await?;
    Ok(())
}

/// All three pods of the gang run, and are then deleted.
async fn all_run(kerf: &Kerf, namespace: &str, gang: &str) -> Result<()> {
    let pods = kerf.pods(namespace).list(&ListParams::default()).await?;
    let members: Vec<String> =
        pods.iter().map(|pod| pod.name_any()).filter(|pod| pod.starts_with(gang)).collect();
    ensure!(members.len() == 3, "{members:?}");
    let mut running = Vec::new();
    for pod in &members {
        running.push(kerf.wait_running(namespace, pod).await?);
    }
    no_overlap(&running)?;
    for pod in &members {
        kerf.delete_pod(namespace, pod).await?;
    }
    kerf.wait_no_leak(namespace).await
}

/// All are on record; on one node the instances are there from earlier, on the other it cannot be made.
async fn waits_for_its_last_instance(kerf: &Kerf, namespace: &str) -> Result<()> {
    let gang = "slow";
    create(kerf, namespace, &on("gangs-b", gpu_pod("cuts-it", &[(&mig("1g.10gb"), 1)]))).await?;
    kerf.wait_running(namespace, "cuts-it").await?;
    kerf.delete_pod(namespace, "cuts-it").await?;
    kerf.wait_no_leak(namespace).await?;
    let sim = kerf.sim("gangs-b")?;
    let call = "nvmlDeviceCreateGpuInstanceWithPlacement";
    sim.inject(call, NvmlError::InsufficientResources, Occurrence::Persistent, None)?;
    for index in 0..3 {
        create(kerf, namespace, &member(gang, index)).await?;
    }
    eventually(PATIENCE, "two of three told that they wait for the third", || async {
        let mut said = Vec::new();
        for index in 0..3 {
            said.extend(kerf.planned(namespace, &format!("{gang}-{index}")).await?);
        }
        let end = format!("and waits for other pods: 2 of 3 of gang {namespace}/{gang} are ready");
        let wait = |said: &&(String, String, String)| said.1 == "WaitsForGang" && said.2.ends_with(&end);
        Ok(Seen::when(said, |said| said.iter().filter(wait).count() == 2))
    })
    .await?;
    all_wait(kerf, namespace, gang).await?;
    sim.clear_faults()?;
    all_run(kerf, namespace, gang).await
}

async fn waits_for_pods_and_for_room(kerf: &Kerf, namespace: &str) -> Result<()> {
    let gang = "calm";
    create(kerf, namespace, &gpu_pod("in-the-way", &[(&mig("1g.10gb"), 1)])).await?;
    kerf.wait_running(namespace, "in-the-way").await?;
    for index in 0..2 {
        create(kerf, namespace, &member(gang, index)).await?;
    }
    for index in 0..2 {
        two_are_there(kerf, namespace, gang, &format!("{gang}-{index}")).await?;
    }
    create(kerf, namespace, &member(gang, 2)).await?;
    for index in 0..3 {
        let said = kerf.wait_reason(namespace, &format!("{gang}-{index}"), "NoRoom").await?;
        let start = format!(
            "the 3 pods of gang {namespace}/{gang} get their places together or not at all; beside 2 of"
        );
        ensure!(said.starts_with(&start), "{said}");
    }
    ensure!(on_record(kerf, gang).await?.is_empty(), "some are on record");
    all_wait(kerf, namespace, gang).await?;
    kerf.delete_pod(namespace, "in-the-way").await?;
    all_run(kerf, namespace, gang).await
}

/// One node knows of its part of the gang and the other does not when the operator dies. If a pod of the rest is gone when
/// the next one comes, what is on record is given back; else it is completed.
async fn killed_between_the_writes(
    kerf: &Kerf,
    proxy: &mut Proxy,
    namespace: &str,
    rest_stays: bool,
) -> Result<()> {
    let gang = if rest_stays { "completed" } else { "returned" };
    for index in 0..2 {
        create(kerf, namespace, &member(gang, index)).await?;
    }
    let write = Matching { method: Method::PUT, path: "/gpunodes/", ends_with: "", body: Some(gang) };
    proxy.stop_next(write, Side::Before);
    create(kerf, namespace, &member(gang, 2)).await?;
    tokio::time::timeout(PATIENCE, proxy.stopped())
        .await
        .context("the operator never wrote it")?
        .context("the proxy has ended")?;
    let known = eventually(PATIENCE, "one node told and the other not", || async {
        Ok(Seen::when(on_record(kerf, gang).await?, |pods| !pods.is_empty()))
    })
    .await?;
    ensure!(known.len() < 3, "all of {known:?} are on record");
    all_wait(kerf, namespace, gang).await?;
    kerf.stop_operator("operator", Duration::ZERO).await?;
    if rest_stays {
        kerf.start_operator_through("operator", Some(&proxy.url())).await?;
        return all_run(kerf, namespace, gang).await;
    }
    let mut members: Vec<String> = (0..3).map(|index| format!("{gang}-{index}")).collect();
    let off = members.iter().position(|pod| !known.contains(pod)).context("all are on record")?;
    kerf.delete_pod(namespace, &members.remove(off)).await?;
    kerf.start_operator_through("operator", Some(&proxy.url())).await?;
    for pod in &members {
        two_are_there(kerf, namespace, gang, pod).await?;
    }
    eventually(PATIENCE, "nothing on record", || async {
        Ok(Seen::when(on_record(kerf, gang).await?, Vec::is_empty))
    })
    .await?;
    all_wait(kerf, namespace, gang).await?;
    create(kerf, namespace, &member(gang, 3)).await?;
    all_run(kerf, namespace, gang).await
}

/// A quota lets through four claims, and two gangs of three want one each for every pod: they do not keep each other's.
async fn under_one_quota(kerf: &Kerf) -> Result<()> {
    let namespace = kerf.namespace("gang-quota").await?;
    let quota: ResourceQuota = serde_json::from_value(json!({
        "metadata": { "name": "four" },
        "spec": { "hard": { "mig-1g.10gb.kerf.dev.deviceclass.resource.k8s.io/devices": "4" } },
    }))?;
    let quotas: Api<ResourceQuota> = Api::namespaced(kerf.client(), &namespace);
    quotas.create(&PostParams::default(), &quota).await?;
    eventually(PATIENCE, "the quota counted", || async {
        let status = quotas.get("four").await?.status.and_then(|status| status.hard);
        Ok(Seen::when(status, Option::is_some))
    })
    .await?;
    for index in 0..3 {
        for gang in ["left", "right"] {
            create(kerf, &namespace, &member_with(gang, index, "1g.10gb")).await?;
        }
    }
    let runs = |pods: &[Pod], gang: &str| {
        let phase = |pod: &&Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        pods.iter().filter(|pod| pod.name_any().starts_with(gang)).filter(phase).count()
    };
    let first = eventually(PATIENCE, "one of two gangs running", || async {
        let pods = kerf.pods(&namespace).list(&ListParams::default()).await?.items;
        let (left, right) = (runs(&pods, "left"), runs(&pods, "right"));
        ensure!(left == 0 || right == 0, "{left} of the one and {right} of the other run");
        Ok(match (left, right) {
            (3, _) => Seen::Yes("left"),
            (_, 3) => Seen::Yes("right"),
            _ => Seen::NotYet(format!("{left} and {right} run")),
        })
    })
    .await?;
    let second = if first == "left" { "right" } else { "left" };
    eventually(PATIENCE, "the other told of the quota", || async {
        let mut said = Vec::new();
        for index in 0..3 {
            said.extend(kerf.planned(&namespace, &format!("{second}-{index}")).await?);
        }
        Ok(Seen::when(said, |said| said.iter().any(|(_, reason, _)| reason == "QuotaExceeded")))
    })
    .await?;
    for index in 0..3 {
        kerf.delete_pod(&namespace, &format!("{first}-{index}")).await?;
    }
    all_run(kerf, &namespace, second).await
}
