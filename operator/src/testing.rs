//! A small cluster in memory, for tests.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kerf_crds::gpu_node::{
    Geometry, Gpu, GpuNodeStatus, Instance, Isolation, ObservedMig, Partition, Placement, Profile, Sharing,
    WantedInstance,
};
use kerf_crds::{GpuNode, GpuNodeSpec, PartitionPolicy, names};
use serde_json::{Value, json};

use crate::cache::{NodeInfo, PodInfo, World};
use crate::controller::classes;

/// What an A100 with 80 GB can be cut into, engines left out.
pub fn a100() -> Geometry {
    let profile = |name: &str, id, slices, size, starts: &[u32], max| Profile {
        name: name.into(),
        id,
        memory_bytes: u64::from(size) << 33,
        multiprocessors: slices * 14,
        compute_slices: slices,
        size,
        starts: starts.to_vec(),
        max_instances: max,
        ..Profile::default()
    };
    Geometry {
        name: "A100".into(),
        memory_slices: 8,
        multiprocessors: 98,
        profiles: vec![
            profile("1g.10gb", 19, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
            profile("1g.10gb+me", 20, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 1),
            profile("2g.20gb", 14, 2, 2, &[0, 2, 4], 3),
            profile("3g.40gb", 9, 3, 4, &[0, 4], 2),
            profile("4g.40gb", 5, 4, 4, &[0], 1),
            profile("7g.80gb", 0, 7, 8, &[0], 1),
        ],
        ..Geometry::default()
    }
}

/// A GPU in MIG mode with nothing on it.
pub fn gpu(uuid: &str, index: u32) -> Gpu {
    Gpu {
        name: format!("gpu-{index}"),
        uuid: uuid.into(),
        index,
        product: "NVIDIA A100".into(),
        geometry: Some("A100".into()),
        memory_bytes: 80 << 30,
        mig: ObservedMig { enabled: true, ..ObservedMig::default() },
        ..Gpu::default()
    }
}

/// An instance that exists, free.
pub fn instance(profile: &str, start: u32) -> Instance {
    let geometry = a100();
    Instance {
        profile: profile.into(),
        placement: Placement { start, size: geometry.profile(profile).map_or(1, |profile| profile.size) },
        uuid: Some(format!("MIG-{profile}-{start}")),
        ..Instance::default()
    }
}

/// The shape of [`instance`].
pub fn wanted(profile: &str, start: u32) -> WantedInstance {
    let instance = instance(profile, start);
    WantedInstance { profile: instance.profile, placement: instance.placement }
}

/// A node's object whose daemon follows.
pub fn gpu_node(name: &str, gpus: Vec<Gpu>, partitions: Vec<Partition>) -> GpuNode {
    let mut node = GpuNode::new(name, GpuNodeSpec { gpus: Vec::new(), partitions });
    node.metadata.uid = Some(format!("uid-of-{name}"));
    node.status = Some(GpuNodeStatus {
        gpu_count: gpus.len() as u32,
        gpus,
        geometries: vec![a100()],
        driver_version: "580.95.05".into(),
        conditions: serde_json::from_value(json!([{"type": "Ready", "status": "True", "reason": "Following",
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]))
        .unwrap(),
        ..GpuNodeStatus::default()
    });
    node
}

/// A Ready node.
pub fn node(name: &str, cpu: &str) -> NodeInfo {
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}, "resourceVersion": "1"},
        "status": {
            "allocatable": {"cpu": cpu, "memory": "64Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
    .unwrap();
    node.into()
}

/// A policy of this spec, over every GPU.
pub fn policy(name: &str, spec: Value) -> PartitionPolicy {
    let mut policy = PartitionPolicy::new(name, serde_json::from_value(spec).unwrap());
    policy.metadata.generation = Some(1);
    policy
}

/// A GPU that is not cut and can carry shares, whose limits its driver enforces.
pub fn sharing_gpu(uuid: &str, index: u32) -> Gpu {
    Gpu {
        mig: ObservedMig::default(),
        sharing: Some(Sharing { isolation: Isolation::Driver, max_clients: 60, equal_sizes: false }),
        ..gpu(uuid, index)
    }
}

/// A gated pod with a share of this size, in GiB and percent.
pub fn sharing_pod(name: &str, gib: u64, percent: u32) -> PodInfo {
    let share = json!({"memoryBytes": gib << 30, "computePercent": percent});
    pod_with(name, json!({"containers": [{"name": "main", "share": share}]}), json!({}))
}

/// A gated pod as the webhook leaves it; `spec` is merged over its spec.
pub fn gated_pod(name: &str, resource: &str, spec: Value) -> PodInfo {
    pod_with(name, json!({"containers": [{"name": "main", "resources": {resource: 1}}]}), spec)
}

fn pod_with(name: &str, original: Value, spec: Value) -> PodInfo {
    let mut pod = json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}"), "resourceVersion": "1",
            "annotations": {names::ORIGINAL_RESOURCES: original.to_string()}},
        "spec": {
            "schedulingGates": [{"name": names::GATE}],
            "resourceClaims": [{"name": names::POD_CLAIM, "resourceClaimName": format!("claim-of-{name}")}],
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "100m"}}}],
        },
    });
    merge(&mut pod["spec"], spec);
    serde_json::from_value::<Pod>(pod).unwrap().into()
}

/// A pod that refers to claims of its user.
pub fn claiming_pod(name: &str, claims: &[&str]) -> PodInfo {
    let claims: Vec<Value> =
        claims.iter().map(|claim| json!({"name": claim, "resourceClaimName": claim})).collect();
    let pod = json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}"), "resourceVersion": "1"},
        "spec": {"resourceClaims": claims, "containers": [{"name": "main"}]},
    });
    serde_json::from_value::<Pod>(pod).unwrap().into()
}

/// A user's claim with this `spec.devices`.
pub fn claim(name: &str, devices: Value) -> ResourceClaim {
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}"), "resourceVersion": "1"},
        "spec": {"devices": devices},
    }))
    .unwrap()
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// A world with one node for each list of GPUs (`n0`, `n1`, …), a policy and the classes of its profiles.
pub fn world(nodes: Vec<Vec<Gpu>>, mig: Value) -> World {
    let mut world = World::default();
    for (index, gpus) in nodes.into_iter().enumerate() {
        let name = format!("n{index}");
        world.nodes.watch_applied(node(&name, "8"));
        world.gpu_nodes.watch_applied(gpu_node(&name, gpus, Vec::new()));
    }
    world.policies.watch_applied(policy("all", json!({"mig": mig})));
    add_classes(&mut world);
    world
}

/// Adds the classes that the controller would make.
pub fn add_classes(world: &mut World) {
    let missing: Vec<DeviceClass> = classes::missing(world);
    for class in missing {
        world.classes.watch_applied(class);
    }
}

impl World {
    /// Adds a pod.
    pub fn with_pod(mut self, pod: PodInfo) -> Self {
        self.put_pod(pod, |store, pod| store.watch_applied(pod));
        self
    }

    /// Adds a claim.
    pub fn with_claim(mut self, claim: ResourceClaim) -> Self {
        self.claims.watch_applied(claim);
        self
    }

    /// Replaces a node's object, as if a newer version had come.
    pub fn replace_gpu_node(&mut self, change: impl FnOnce(&mut GpuNode), name: &str) {
        let mut node = GpuNode::clone(self.gpu_nodes.get(name).unwrap());
        let version = crate::cache::version_of(&node.metadata) + 1;
        node.metadata.resource_version = Some(version.to_string());
        change(&mut node);
        assert!(self.gpu_nodes.watch_applied(node));
    }
}
