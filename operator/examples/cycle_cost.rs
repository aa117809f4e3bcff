//! What a cycle costs: `cargo run --release -p kerf-operator --example cycle_cost [nodes…]`.
//!
//! Nodes of eight GPUs, two bound pods with a partition on each of them, ten other pods on each node, and twenty pods that
//! wait. *snapshot*: all that is worked out of nodes, and the planner's view of the cluster, with nothing kept of an earlier
//! one; *another policy*: where only the policy is another; both in processor time. *anew*: a cycle that knows nothing of an
//! earlier one. *changed*: one node's report has changed since the last; *no room*: there is none for those who wait, which is
//! proven anew each time; *room*: there is. *the rest*: what policies say of themselves, classes and clients, which take a
//! twentieth of the time at most.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::gpu_node::{
    ClaimOwner, ClaimReference, Geometry, Gpu, GpuNodeStatus, Instance, ObservedMig, Owner, Partition,
    Placement, Profile, WantedInstance,
};
use kerf_crds::{GpuNode, GpuNodeSpec, PartitionPolicy, names};
use kerf_operator::cache::{NodeInfo, PodInfo, World};
use kerf_operator::controller::{classes, clients, status};
use kerf_operator::scheduler::claims;
use kerf_operator::scheduler::cycle::decide;
use kerf_operator::scheduler::memory::Memory;
use kerf_operator::scheduler::selectors::Selectors;
use kerf_operator::scheduler::snapshot;
use kerf_operator::scheduler::views::Views;
use serde_json::json;

const GPUS: usize = 8;
/// Pods of others on each node.
const OTHERS: usize = 10;
const WAITING: usize = 20;
const WALL: i64 = 1_800_000_000;

fn read<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).expect("an object of this kind")
}

fn geometry() -> Geometry {
    let profile = |name: &str, id, slices, size: u32, starts: &[u32], max| Profile {
        name: name.into(),
        id,
        memory_bytes: u64::from(size) << 33,
        multiprocessors: slices * 16,
        compute_slices: slices,
        size,
        starts: starts.to_vec(),
        max_instances: max,
        ..Profile::default()
    };
    Geometry {
        name: "H100".into(),
        memory_slices: 8,
        multiprocessors: 132,
        profiles: vec![
            profile("1g.10gb", 19, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
            profile("1g.20gb", 15, 1, 2, &[0, 2, 4, 6], 4),
            profile("2g.20gb", 14, 2, 2, &[0, 2, 4], 3),
            profile("3g.40gb", 9, 3, 4, &[0, 4], 2),
            profile("4g.40gb", 5, 4, 4, &[0], 1),
            profile("7g.80gb", 0, 7, 8, &[0], 1),
        ],
        ..Geometry::default()
    }
}

/// A pod that waits, or is bound.
fn pod(name: &str, profile: &str, node: Option<&str>) -> PodInfo {
    let resource = format!("nvidia.com/mig-{profile}");
    let original = json!({"containers": [{"name": "main", "resources": {resource: 1}}]});
    let gates = if node.is_some() { json!([]) } else { json!([{"name": names::GATE}]) };
    let pod: Pod = read(json!({
        "metadata": {"name": name, "namespace": "team", "uid": format!("uid-of-{name}"), "resourceVersion": "1",
            "annotations": {names::ORIGINAL_RESOURCES: original.to_string()}},
        "spec": {
            "nodeName": node,
            "schedulingGates": gates,
            "resourceClaims": [{"name": names::POD_CLAIM, "resourceClaimName": format!("claim-of-{name}")}],
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}],
        },
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }},
    }));
    pod.into()
}

/// Adds a node with everything on it. Half of each GPU is taken, in quarters or in one piece; the rest is too small for
/// those who wait.
fn add_node(world: &mut World, number: usize) {
    let name = format!("gpu-node-{number:05}");
    let labels: serde_json::Map<_, _> = (0..40)
        .map(|label| (format!("feature.example/cpu-{label}"), json!(format!("{}", number % 9))))
        .collect();
    let node: Node = read(json!({
        "metadata": {"name": name, "labels": labels, "uid": name, "resourceVersion": "1"},
        "status": {"allocatable": {"cpu": "128", "memory": "1Ti", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}]},
    }));
    world.nodes.watch_applied(NodeInfo::from(node));
    let mut gpus = Vec::new();
    let mut partitions = Vec::new();
    let mut pods = Vec::new();
    for index in 0..GPUS {
        let uuid = format!("GPU-{:08x}-{index:04x}-4000-8000-{number:012x}", number * 7919 + index * 104_729);
        let mut instances = Vec::new();
        for (at, start) in [0, 4].into_iter().enumerate() {
            let (profile, size) =
                if (number + index + at).is_multiple_of(3) { ("2g.20gb", 2) } else { ("3g.40gb", 4) };
            let placement = Placement { start, size };
            let pod = format!("pod-{number}-{index}-{at}");
            instances.push(Instance {
                profile: profile.into(),
                placement,
                uuid: Some(format!("MIG-{number}-{index}-{at}")),
                claims: vec![ClaimReference {
                    namespace: "team".into(),
                    name: format!("claim-of-{pod}"),
                    uid: format!("uid-of-claim-of-{pod}"),
                }],
                ..Instance::default()
            });
            partitions.push(Partition {
                gpu: uuid.clone(),
                instance: Some(WantedInstance { profile: profile.into(), placement }),
                share: None,
                owner: Owner::Claim(ClaimOwner {
                    namespace: "team".into(),
                    name: format!("claim-of-{pod}"),
                    pod: pod.clone(),
                    pod_uid: format!("uid-of-{pod}"),
                    request: "main-0".into(),
                }),
            });
            pods.push((pod, profile));
        }
        gpus.push(Gpu {
            name: format!("gpu-{index}"),
            uuid,
            index: index as u32,
            product: "NVIDIA H100 80GB HBM3".into(),
            geometry: Some("H100".into()),
            memory_bytes: 80 << 30,
            mig: ObservedMig { enabled: true, capable: true, ..ObservedMig::default() },
            instances,
            ..Gpu::default()
        });
    }
    let mut gpu_node = GpuNode::new(&name, GpuNodeSpec { gpus: Vec::new(), partitions });
    gpu_node.metadata.uid = Some(format!("uid-of-{name}"));
    gpu_node.metadata.resource_version = Some("1".into());
    gpu_node.status = Some(GpuNodeStatus {
        gpu_count: GPUS as u32,
        gpus,
        geometries: vec![geometry()],
        driver_version: "580.95.05".into(),
        conditions: read(json!([{"type": "Ready", "status": "True", "reason": "Following",
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}])),
        ..GpuNodeStatus::default()
    });
    for (partition, (pod_name, profile)) in gpu_node.spec.partitions.iter().zip(&pods) {
        let pod = pod(pod_name, profile, Some(&name));
        let Some(Ok(original)) = pod.detail.as_ref().and_then(|detail| detail.original.as_ref()) else {
            continue;
        };
        let mut claim: ResourceClaim =
            claims::from_annotation(&pod, &format!("claim-of-{pod_name}"), original);
        claim.metadata.uid = Some(format!("uid-of-claim-of-{pod_name}"));
        claim.metadata.resource_version = Some("1".into());
        let time = "2026-01-01T00:00:00Z".parse().expect("a time");
        claim.status = Some(k8s_openapi::api::resource::v1::ResourceClaimStatus {
            allocation: claims::allocate(&claim, &gpu_node, std::slice::from_ref(partition), time),
            reserved_for: Some(vec![claims::reservation(&pod)]),
            ..Default::default()
        });
        world.claims.watch_applied(claim);
        world.put_pod(pod, |store, pod| store.watch_applied(pod));
    }
    for other in 0..OTHERS {
        let pod: Pod = read(json!({
            "metadata": {"name": format!("agent-{number}-{other}"), "namespace": "kube-system", "resourceVersion": "1",
                "uid": format!("agent-{number}-{other}")},
            "spec": {"nodeName": name, "containers": [{"name": "main", "resources": {"requests": {"cpu": "50m"}}}]},
        }));
        world.put_pod(pod.into(), |store, pod| store.watch_applied(pod));
    }
    world.gpu_nodes.watch_applied(gpu_node);
}

/// Takes down what a first cycle writes.
fn settle(world: &mut World, memory: &Memory, selectors: &Selectors) {
    for _ in 0..4 {
        let decision = decide(world, memory, selectors, Instant::now(), WALL);
        if decision.specs.is_empty() {
            return;
        }
        for write in decision.specs {
            let mut node = GpuNode::clone(&write.node);
            node.spec = write.spec;
            next_version(&mut node);
            world.gpu_nodes.watch_applied(node);
        }
    }
    panic!("every cycle writes something");
}

fn next_version(node: &mut GpuNode) {
    let version: u64 = node.metadata.resource_version.as_deref().unwrap_or("0").parse().unwrap_or(0);
    node.metadata.resource_version = Some((version + 1).to_string());
}

/// Counts what is allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator is counted with")]
// SAFETY: everything is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocated() -> usize {
    ALLOCATED.load(Ordering::Relaxed)
}

fn median(mut of: Vec<Duration>) -> f64 {
    of.sort();
    of[of.len() / 2].as_secs_f64() * 1e3
}

/// A policy over all GPUs.
fn policy(placement: &str, version: u64) -> PartitionPolicy {
    let spec = json!({"mig": {"mode": "Dynamic"}, "placement": placement});
    let mut policy = PartitionPolicy::new("all", read(spec));
    policy.metadata.resource_version = Some(version.to_string());
    policy
}

/// Snapshots made from nothing, and where the policy is another: how long each takes, and what one keeps.
fn snapshots(world: &mut World) -> (Vec<Duration>, Vec<Duration>, usize) {
    let (mut anew, mut after_policy, mut kept) = (Vec::new(), Vec::new(), 0);
    for round in 0..3 {
        let before = allocated();
        let now = processor_time();
        let mut views = Views::of(world);
        let board = snapshot::take(world, &views, |_| false);
        anew.push(processor_time() - now);
        kept = allocated() - before;
        drop(board);
        for (at, placement) in [(1, "Spread"), (2, "Pack")] {
            world.policies.watch_applied(policy(placement, 2 * round + at));
            let now = processor_time();
            views.refresh(world);
            snapshot::take(world, &views, |_| false);
            after_policy.push(processor_time() - now);
        }
    }
    (anew, after_policy, kept)
}

/// What this thread has had of a processor, to some milliseconds: others may be at work on the machine.
fn processor_time() -> Duration {
    let read = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(read.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or_default())
}

/// One cycle: deciding, and the rest.
fn cycle(world: &World, memory: &Memory, selectors: &Selectors, rounds: &clients::Rounds) -> [Duration; 2] {
    let now = Instant::now();
    let decision = decide(world, memory, selectors, now, WALL);
    let decided = now.elapsed();
    memory.forget_what_is_over(world);
    let (matches, problems) = (&decision.matches, &decision.problems);
    clients::due(world, matches, rounds, now);
    status::all(world, matches, problems, rounds, memory, now);
    classes::missing(world);
    [decided, now.elapsed() - decided]
}

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|size| size.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![500, 2000, 10_000] } else { sizes };
    println!(
        "Milliseconds, medians: of 3 snapshots and cycles anew, 6 after another policy, 30 other cycles. Kept: bytes a GPU."
    );
    println!(
        "| nodes | snapshot | snapshot, another policy | anew, no room | changed, no room | changed, room | the rest | world, MiB | kept by the snapshot | kept by cycles |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for nodes in sizes {
        let (selectors, rounds) = (Selectors::default(), clients::Rounds::default());
        let empty = allocated();
        let mut world = World::default();
        world.policies.watch_applied(policy("Pack", 0));
        (0..nodes).for_each(|number| add_node(&mut world, number));
        for class in classes::missing(&world) {
            world.classes.watch_applied(class);
        }
        settle(&mut world, &Memory::default(), &selectors);
        let wait = |world: &mut World, profile: &str, version: u64| {
            for number in 0..WAITING {
                let pod = PodInfo { version, ..pod(&format!("waits-{number}"), profile, None) };
                world.put_pod(pod, |store, pod| store.watch_applied(pod));
            }
        };
        wait(&mut world, "7g.80gb", 1);
        let of_world = allocated() - empty;
        let (snapshot, after_policy, kept_by_snapshot) = snapshots(&mut world);
        let anew: Vec<_> = (0..3).map(|_| cycle(&world, &Memory::default(), &selectors, &rounds)).collect();
        let memory = Memory::default();
        cycle(&world, &memory, &selectors, &rounds);
        let kept = allocated() - empty - of_world;
        let after_changes = |world: &mut World| -> Vec<[Duration; 2]> {
            let changed = (0..30).map(|round| {
                let name = format!("gpu-node-{:05}", (round * 97) % nodes);
                let mut node = GpuNode::clone(world.gpu_nodes.get(&name).expect("the node"));
                next_version(&mut node);
                if let Some(status) = &mut node.status {
                    status.gpus[round % GPUS].instances[0].processes += 1;
                }
                world.gpu_nodes.watch_applied(node);
                cycle(world, &memory, &selectors, &rounds)
            });
            changed.collect()
        };
        let no_room = after_changes(&mut world);
        wait(&mut world, "1g.10gb", 2);
        let room = after_changes(&mut world);
        let all = |of: &[[Duration; 2]], which: usize| median(of.iter().map(|both| both[which]).collect());
        println!(
            "| {nodes} | {:.0} | {:.0} | {:.0} | {:.1} | {:.1} | {:.1} | {} | {} | {} |",
            median(snapshot),
            median(after_policy),
            all(&anew, 0),
            all(&no_room, 0),
            all(&room, 0),
            all(&no_room, 1),
            of_world >> 20,
            kept_by_snapshot / (nodes * GPUS),
            kept / (nodes * GPUS)
        );
    }
}
