//! Plans for a large, nearly full cluster and says how long it took: `cargo run --release -p kerf-planner --example
//! large [NODES] [REQUESTS]`, 500 nodes with eight 7-slice GPUs each and 4,000 requests if left out.

use std::time::Instant;

use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::snapshot::*;

fn geometry() -> Geometry {
    let profile = |name: &str, slices, size, starts: &[u32], max_instances| Profile {
        name: name.into(),
        memory_bytes: u64::from(size) << 33,
        multiprocessors: 14 * slices,
        compute_slices: slices,
        size,
        starts: starts.to_vec(),
        max_instances,
        engines: Engines::default(),
    };
    Geometry {
        name: "seven slices".into(),
        memory_slices: 8,
        profiles: vec![
            profile("1g.10gb", 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
            profile("1g.20gb", 1, 2, &[0, 2, 4, 6], 4),
            profile("2g.20gb", 2, 2, &[0, 2, 4], 3),
            profile("3g.40gb", 3, 4, &[0, 4], 2),
            profile("4g.40gb", 4, 4, &[0], 1),
            profile("7g.80gb", 7, 8, &[0], 1),
        ],
        ..Geometry::default()
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let (nodes, requests) = (arguments.next().unwrap_or(500), arguments.next().unwrap_or(4000));
    let geometry = geometry();
    let node = |n: usize| Node {
        name: format!("node-{n:05}"),
        ready: true,
        taints: n
            .is_multiple_of(10)
            .then(|| Taint { key: "team".into(), value: "x".into(), effect: "NoSchedule".into() })
            .into_iter()
            .collect(),
        labels: [("zone".to_owned(), ["a", "b", "c"][n % 3].to_owned())].into(),
        free_milli: [("cpu", 64_000), ("memory", 512 << 40), ("pods", 110_000)]
            .map(|(k, v)| (k.to_owned(), v))
            .into(),
        gpus: (0..8)
            .map(|g| Gpu {
                uuid: format!("GPU-{n:08}-{g}"),
                geometry: Some(0),
                mig: Capability::Now,
                allowed: (0..geometry.profiles.len()).collect(),
                ..Gpu::default()
            })
            .collect(),
        ..Node::default()
    };
    let want = |i: usize| {
        let profile = [0, 2, 3][i % 3];
        Want {
            count: 1,
            label: geometry.profiles[profile].name.clone(),
            profiles: [(0, [profile].into())].into(),
            ..Want::default()
        }
    };
    let request = |i: usize| Request {
        id: format!("ns/pod-{i}"),
        devices: (0..1 + usize::from(i.is_multiple_of(20)))
            .map(|d| DeviceNeed { name: format!("gpu{d}"), alternatives: vec![want(i + d)] })
            .collect(),
        pod: PodNeeds {
            milli: [("cpu".to_owned(), 1000 + (i % 7) as i128), ("pods".to_owned(), 1000)].into(),
            node_selector: i
                .is_multiple_of(4)
                .then(|| ("zone".to_owned(), "a".to_owned()))
                .into_iter()
                .collect(),
            ..PodNeeds::default()
        },
        ..Request::default()
    };
    let snapshot = Snapshot {
        geometries: vec![geometry.clone()],
        nodes: (0..nodes).map(node).collect(),
        requests: (0..requests).map(request).collect(),
        ..Snapshot::default()
    };
    let started = Instant::now();
    let plan = plan(&snapshot);
    println!(
        "{nodes} nodes, {requests} requests: {} placed, {} refused, {:.2?}",
        plan.placements.len(),
        plan.refusals.len(),
        started.elapsed()
    );
    assert_eq!(violations(&snapshot, &plan), Vec::<String>::new());
}
