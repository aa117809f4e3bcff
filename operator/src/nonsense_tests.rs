//! Objects that make no sense, which an API server or a daemon of another version could hand over: what cannot be read is
//! an error, and the rest is decided about. Nothing panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::{GpuNode, PartitionPolicy, names};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cache::{PodInfo, World};
use crate::controller::clients::Rounds;
use crate::controller::{classes, clients, status};
use crate::scheduler::cycle::decide;
use crate::scheduler::memory::Memory;
use crate::scheduler::selectors::Selectors;
use crate::testing::{claiming_pod, gated_pod, gpu, gpu_node, instance, policy, wanted, world};
use crate::webhook::{context, mutate, validate};

#[path = "../../policies/tests/common/nonsense.rs"]
mod nonsense;

/// Everything that a cycle works out, several times, and as if its writes had been made.
fn cycles(world: &mut World) {
    let (memory, selectors, rounds) = (Memory::default(), Selectors::default(), Rounds::default());
    for _ in 0..3 {
        let now = Instant::now();
        let decision = decide(world, &memory, &selectors, now, 1_800_000_000);
        clients::due(world, &decision.matches, &rounds, now);
        status::all(world, &decision.matches, &decision.problems, &rounds, &memory, now);
        classes::missing(world);
        for write in &decision.specs {
            let (name, spec) = (kube::ResourceExt::name_any(&*write.node), write.spec.clone());
            if world.gpu_nodes.get(&name).is_some() {
                world.replace_gpu_node(|node| node.spec = spec, &name);
            }
        }
    }
}

/// Spoils a value in a few places, again and again, and hands on what can still be read.
fn spoilt<K: DeserializeOwned>(of: &Value, mut with: impl FnMut(K)) {
    let mut seed: u64 = 1;
    let mut below = |bound: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % bound.max(1)
    };
    let (mut read, mut failed) = (0, Vec::new());
    for round in 0..300 {
        let mut value = of.clone();
        for _ in 0..1 + below(4) {
            nonsense::spoil(&mut value, &mut below);
        }
        let shown = value.to_string();
        let Ok(object) = serde_json::from_value::<K>(value) else { continue };
        read += 1;
        let done = catch_unwind(AssertUnwindSafe(|| with(object)));
        if done.is_err() {
            failed.push(format!("round {round}: {shown}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(read > 60, "only {read} could be read");
}

fn two_gpus() -> World {
    world(vec![vec![gpu("GPU-0", 0), gpu("GPU-1", 1)]], json!({ "mode": "Dynamic" }))
}

#[test]
fn pods() {
    let limits = |resource: &str, count: u32| json!({ "limits": { resource: count, "cpu": "1500m" } });
    let plain = json!({
        "metadata": { "name": "p", "namespace": "default", "uid": "u", "resourceVersion": "3" },
        "spec": {
            "priority": 5, "nodeSelector": { "kubernetes.io/hostname": "n0" },
            "tolerations": [{ "key": "team", "operator": "Exists", "effect": "NoSchedule" }],
            "initContainers": [
                { "name": "i", "resources": limits("nvidia.com/mig-1g.10gb", 2) },
                { "name": "s", "restartPolicy": "Always", "resources": limits("nvidia.com/mig-1g.10gb", 1) },
            ],
            "containers": [{ "name": "main", "resources": limits("nvidia.com/mig-2g.20gb", 1) }],
            "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
                { "matchExpressions": [{ "key": "zone", "operator": "Gt", "values": ["4"] }] },
            ] } } },
        },
    });
    spoilt::<Pod>(&plain, |pod| {
        let mut world = two_gpus();
        let Ok(mutation) = mutate(&pod, &context(&world, "0000-1111")) else { return };
        let mut value = serde_json::to_value(&pod).unwrap();
        json_patch::patch(&mut value, &mutation.patch).unwrap();
        let pod: Pod = serde_json::from_value(value).unwrap();
        world = world.with_pod(PodInfo::from(pod));
        cycles(&mut world);
    });
    // As the webhook leaves it, and then somebody else.
    let original =
        json!({ "containers": [{ "name": "main", "resources": { "nvidia.com/mig-3g.40gb": 2 } }] });
    spoilt::<Value>(&original, |original| {
        let gated = json!({
            "metadata": {
                "name": "p", "namespace": "default", "uid": "u", "resourceVersion": "3",
                "annotations": { names::ORIGINAL_RESOURCES: original.to_string() },
            },
            "spec": {
                "schedulingGates": [{ "name": names::GATE }],
                "resourceClaims": [{ "name": names::POD_CLAIM, "resourceClaimName": "c" }],
                "containers": [{ "name": "main" }],
            },
        });
        let pod: Pod = serde_json::from_value(gated).unwrap();
        cycles(&mut two_gpus().with_pod(PodInfo::from(pod)));
    });
}

#[test]
fn claims() {
    let request = |name: &str| {
        json!({ "name": name, "exactly": {
            "deviceClassName": "mig.kerf.dev", "allocationMode": "ExactCount", "count": 2,
            "selectors": [{ "cel": { "expression": "device.attributes['mig.kerf.dev'].profile.startsWith('2g')" } }],
        } })
    };
    let claim = json!({
        "metadata": { "name": "c", "namespace": "default", "uid": "c", "resourceVersion": "4" },
        "spec": { "devices": {
            "requests": [request("a"), { "name": "b", "firstAvailable": [
                { "name": "x", "deviceClassName": "mig-7g.80gb.kerf.dev" },
                { "name": "y", "deviceClassName": "gpu.kerf.dev", "count": 1 },
            ] }],
            "constraints": [{ "requests": ["a", "b/x"], "matchAttribute": "gpu.kerf.dev/parentUUID" }],
        } },
    });
    spoilt::<ResourceClaim>(&claim, |claim| {
        cycles(&mut two_gpus().with_pod(claiming_pod("p", &["c"])).with_claim(claim));
    });
}

#[test]
fn reports_of_nodes() {
    let mut with = gpu("GPU-0", 0);
    with.instances = vec![instance("1g.10gb", 0), instance("3g.40gb", 4)];
    let mut node = gpu_node("n0", vec![with, gpu("GPU-1", 1)], Vec::new());
    node.metadata.resource_version = Some("2".into());
    let owner = json!({ "policy": { "name": "all", "kind": "Warm" } });
    let mut value = serde_json::to_value(&node).unwrap();
    value["spec"]["partitions"] = json!([
        { "gpu": "GPU-0", "instance": wanted("1g.10gb", 0), "owner": owner },
        { "gpu": "GPU-1", "instance": wanted("2g.20gb", 4), "owner": { "reservation": {
            "pod": { "namespace": "default", "name": "p", "uid": "uid-of-p" }, "expires": "2100-01-01T00:00:00Z",
        } } },
    ]);
    spoilt::<GpuNode>(&value, |node| {
        let mut world = two_gpus()
            .with_pod(gated_pod("p", "nvidia.com/mig-3g.40gb", json!({})))
            .with_pod(gated_pod("q", "nvidia.com/gpu", json!({})));
        world.gpu_nodes.watch_applied(node);
        cycles(&mut world);
    });
}

#[test]
fn policies() {
    let mig = json!({ "mode": "Static", "allowedProfiles": ["*g.*"], "layout": [
        { "profile": "3g.40gb", "count": 1, "start": 4 }, { "profile": "1g.10gb", "count": 3 },
    ] });
    let spec = json!({
        "nodeSelector": { "matchLabels": { "kubernetes.io/hostname": "n0" } },
        "gpus": { "products": ["NVIDIA *"], "indices": [0, 1] },
        "mig": mig, "wholeGpus": "Serve", "reshape": { "moves": { "maxPods": 2, "afterSeconds": 0 } },
    });
    let mut whole = policy("all", spec);
    whole.metadata.resource_version = Some("9".into());
    let warm = json!({ "mode": "Dynamic", "warm": [{ "profile": "1g.10gb", "count": 3 }] });
    let mut dynamic = whole.clone();
    dynamic.spec.mig = serde_json::from_value(warm).unwrap();
    for policy in [whole, dynamic] {
        spoilt::<PartitionPolicy>(&serde_json::to_value(&policy).unwrap(), |policy| {
            let mut world = two_gpus().with_pod(gated_pod("p", "nvidia.com/mig-3g.40gb", json!({})));
            validate(&policy.spec, &world.gpu_nodes.iter().cloned().collect::<Vec<_>>());
            world.policies.watch_applied(policy);
            cycles(&mut world);
        });
    }
}
