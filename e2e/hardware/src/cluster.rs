//! In a cluster: the share that the job's pod has, by its `GpuNode`, and the result as a condition there.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::conditions::{node as condition, node_reason};
use kerf_crds::gpu_node::{GpuNodeStatus, Owner};
use kerf_crds::{GpuNode, names};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use serde_json::json;

use crate::tries::{Report, Share};

/// Connects as the pod's service account.
pub async fn nodes() -> Result<Api<GpuNode>> {
    Ok(Api::all(Client::try_default().await.context("failed to connect to the API server")?))
}

/// The share of a pod, as it is in force, and its GPU and driver in words.
pub fn share_of(node: &GpuNode, pod_uid: &str) -> Result<(Share, String)> {
    let own = |owner: &Owner| matches!(owner, Owner::Claim(claim) if claim.pod_uid == pod_uid);
    let entry = node.spec.partitions.iter().find(|entry| entry.share.is_some() && own(&entry.owner));
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let (gpu, wanted) = entry
        .and_then(|entry| Some((&entry.gpu, entry.share.as_ref()?)))
        .with_context(|| format!("GpuNode {name} has no share for the pod with UID {pod_uid}"))?;
    let status = node.status.as_ref().with_context(|| format!("GpuNode {name} has no status"))?;
    let gpu = status
        .gpus
        .iter()
        .find(|other| other.uuid == *gpu)
        .with_context(|| format!("GpuNode {name} reports no GPU {gpu}"))?;
    let share = gpu
        .shares
        .iter()
        .find(|share| share.id == wanted.id)
        .with_context(|| format!("GpuNode {name} reports no share {}", wanted.id))?;
    // There is another compute mode there, so other things hold.
    ensure!(share.placement.is_none(), "shares of MIG instances are not among what this job can verify");
    let subject = format!("{} ({}), driver {}", gpu.uuid, gpu.product, status.driver_version);
    let share =
        Share { memory: share.memory_bytes, percent: share.compute_percent, isolation: share.isolation };
    Ok((share, subject))
}

/// The condition that says what was found. It keeps the time of one of the same status.
pub fn result(outcome: &Result<Report>, before: Option<&GpuNodeStatus>, now: Timestamp) -> Condition {
    let (status, reason, message) = match outcome {
        Err(error) => ("Unknown", node_reason::NOT_TRIED, format!("{error:#}")),
        Ok(report) => match report.holds() {
            Some(true) => ("True", node_reason::VERIFIED, report.summary()),
            Some(false) => ("False", node_reason::NOT_ENFORCED, report.summary()),
            None => ("Unknown", node_reason::NOT_TRIED, report.summary()),
        },
    };
    let same = |old: &&Condition| old.type_ == condition::SHARES_VERIFIED && old.status == status;
    let old = before.iter().flat_map(|status| &status.conditions).find(same);
    Condition {
        type_: condition::SHARES_VERIFIED.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: None,
        last_transition_time: old.map_or(Time(now), |old| old.last_transition_time.clone()),
    }
}

/// Writes the condition, and nothing else of the status.
pub async fn write(nodes: &Api<GpuNode>, node: &str, condition: &Condition) -> Result<()> {
    let patch = json!({
        "apiVersion": GpuNode::api_version(&()), "kind": GpuNode::kind(&()),
        "metadata": { "name": node }, "status": { "conditions": [condition] },
    });
    let params = PatchParams::apply(names::HARDWARE).force();
    let done = nodes.patch_status(node, &params, &Patch::Apply(patch)).await;
    done.map(drop).with_context(|| {
        format!("failed to write the condition {} of GpuNode {node}", condition::SHARES_VERIFIED)
    })
}

#[cfg(test)]
mod tests {
    use kerf_crds::gpu_node::{Isolation, Placement};

    use super::*;
    use crate::tries::{Finding, Found, Try};

    fn node() -> GpuNode {
        let wanted = json!({ "id": "s", "memoryBytes": 4, "computeMilli": 25000, "isolation": "Process" });
        let owner = |uid: &str| {
            let claim = json!({ "namespace": "n", "name": "c", "pod": "p", "podUid": uid, "request": "r" });
            json!({ "claim": claim })
        };
        let share = json!({ "id": "s", "memoryBytes": 4, "computePercent": 25, "isolation": "Driver" });
        let gpu = json!({
            "name": "gpu-0", "uuid": "GPU-1", "index": 0, "product": "NVIDIA X", "mig": { "enabled": false },
            "shares": [share],
        });
        let spec = json!({ "partitions": [
            { "gpu": "GPU-0", "owner": owner("own") },
            { "gpu": "GPU-0", "share": { "id": "t", "memoryBytes": 4, "computeMilli": 1, "isolation": "Driver" }, "owner": owner("other") },
            { "gpu": "GPU-1", "share": wanted, "owner": owner("own") },
        ] });
        serde_json::from_value(json!({
            "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n" }, "spec": spec,
            "status": { "driverVersion": "615.1", "gpus": [gpu] },
        }))
        .unwrap()
    }

    #[test]
    fn a_pod_finds_its_own_share_as_it_is_in_force() {
        let (share, subject) = share_of(&node(), "own").unwrap();
        assert_eq!(share, Share { memory: 4, percent: 25, isolation: Isolation::Driver });
        assert_eq!(subject, "GPU-1 (NVIDIA X), driver 615.1");
        let error = share_of(&node(), "nobody").unwrap_err().to_string();
        assert_eq!(error, "GpuNode n has no share for the pod with UID nobody");
        assert!(share_of(&node(), "other").unwrap_err().to_string().contains("no GPU GPU-0"));
        let mut of_instance = node();
        of_instance.status.as_mut().unwrap().gpus[0].shares[0].placement =
            Some(Placement { start: 0, size: 4 });
        assert!(share_of(&of_instance, "own").unwrap_err().to_string().contains("MIG instances"));
    }

    #[test]
    fn the_condition_says_what_was_found_and_keeps_its_time() {
        let of = |found| {
            let finding = |attempt| (attempt, Finding { found, evidence: "e".into() });
            Ok(Report {
                subject: "driver 615.1".into(),
                isolation: Isolation::Driver,
                findings: Try::ALL.map(finding).to_vec(),
                shown: None,
                memory: 4,
            })
        };
        let (then, now) = ("2026-01-01T00:00:00Z".parse().unwrap(), "2026-01-02T00:00:00Z".parse().unwrap());
        let first = result(&of(Found::Verified), None, then);
        assert_eq!((first.status.as_str(), first.reason.as_str()), ("True", node_reason::VERIFIED));
        assert!(first.message.starts_with("driver 615.1. Verified: "), "{}", first.message);
        let before = GpuNodeStatus { conditions: vec![first], ..GpuNodeStatus::default() };
        assert_eq!(result(&of(Found::Verified), Some(&before), now).last_transition_time.0, then);
        let failed = result(&of(Found::NotEnforced), Some(&before), now);
        assert_eq!((failed.status.as_str(), failed.reason.as_str()), ("False", node_reason::NOT_ENFORCED));
        assert_eq!(failed.last_transition_time.0, now);
        for unknown in [of(Found::NotTried), Err(anyhow::anyhow!("no libcuda.so.1"))] {
            let unknown = result(&unknown, Some(&before), now);
            assert_eq!(
                (unknown.status.as_str(), unknown.reason.as_str()),
                ("Unknown", node_reason::NOT_TRIED)
            );
        }
    }
}
