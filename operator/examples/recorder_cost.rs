//! What the flight recorder costs at 500 nodes of eight GPUs:
//! `cargo run --release -p kerf-operator --example recorder_cost`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kerf_operator::recorder::{Planned, Recorder};
use kerf_planner::plan;
use kerf_planner::snapshot::{
    Capability, DeviceNeed, Geometry, Gpu, Instance, InstanceState, Node, PodNeeds, Profile, Request,
    Snapshot, Want,
};

const NODES: usize = 500;
const GPUS: usize = 8;
/// Pods that wait in each cycle.
const WAITING: usize = 100;

fn geometry() -> Geometry {
    let profile = |name: &str, slices, size, starts: &[u32], max| Profile {
        name: name.into(),
        memory_bytes: u64::from(size) << 33,
        multiprocessors: slices * 16,
        compute_slices: slices,
        size,
        starts: starts.to_vec(),
        max_instances: max,
        ..Profile::default()
    };
    Geometry {
        name: "NVIDIA H100 80GB HBM3".into(),
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

fn node(number: usize) -> Node {
    let gpu = |index: usize| Gpu {
        uuid: format!("GPU-{number:08x}-{:04x}-4000-8000-{:012x}", index, number * 7919 + index * 104_729),
        geometry: Some(0),
        mig: Capability::Now,
        allowed: (0..6).collect(),
        instances: (0..4)
            .map(|at| Instance {
                profile: Some(2),
                start: 2 * at,
                size: 2,
                state: if at == 3 { InstanceState::Idle } else { InstanceState::Taken },
                exists: true,
            })
            .take(3 + (number + index) % 2)
            .collect(),
        ..Gpu::default()
    };
    let labels =
        (0..40).map(|label| (format!("feature.node.kubernetes.io/cpu-{label}"), format!("{}", number % 9)));
    let free = [("cpu", 64_000), ("memory", 256 << 40), ("pods", 90_000), ("ephemeral-storage", 1 << 50)];
    Node {
        name: format!("gpu-node-{number:04}.cluster.example"),
        labels: labels.collect::<BTreeMap<_, _>>().into(),
        ready: true,
        free_milli: free.map(|(name, milli)| (name.into(), milli - number as i128)).into(),
        gpus: (0..GPUS).map(gpu).collect(),
        ..Node::default()
    }
}

fn request(number: usize) -> Request {
    let want =
        Want { count: 1, label: "2g.20gb".into(), profiles: [(0, [2].into())].into(), ..Want::default() };
    Request {
        id: format!("team-a/training-job-{number:05}-x7k2p"),
        devices: vec![DeviceNeed { name: "device-0".into(), alternatives: vec![want] }],
        pod: PodNeeds { milli: [("cpu".into(), 4000), ("pods".into(), 1000)].into(), ..PodNeeds::default() },
        ..Request::default()
    }
}

/// Memory of this process, in MiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap_or(0) >> 10
}

/// What the recorder's threads have used of a processor.
fn used() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten().map(|task| task.path());
    let of = |task: std::path::PathBuf| -> Option<u64> {
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        let nanoseconds = std::fs::read_to_string(task.join("schedstat")).ok()?;
        (name.trim() == "recorder").then(|| nanoseconds.split_whitespace().next()?.parse().ok())?
    };
    Duration::from_nanos(tasks.filter_map(of).sum())
}

/// Takes `cycles` down, of which each changes so many nodes.
fn measure(cycles: usize, changed: usize) -> std::io::Result<()> {
    let recorder = Recorder::start()?;
    let mut snapshot = Snapshot {
        geometries: vec![geometry()],
        nodes: (0..NODES).map(node).collect(),
        ..Snapshot::default()
    };
    let before = resident();
    let (mut in_cycle, thread) = (Vec::new(), used());
    for cycle in 0..cycles {
        for n in 0..changed {
            let node = &mut snapshot.nodes[(cycle * changed + n) % NODES];
            node.free_milli.entry("cpu".into()).and_modify(|free| *free -= 1);
        }
        snapshot.requests = (cycle..cycle + WAITING).map(request).collect();
        let copy = snapshot.clone();
        let planned = plan(&snapshot);
        // Of the hand-over only this is work: the rest is moved.
        let began = Instant::now();
        let answer = planned.clone();
        in_cycle.push(began.elapsed());
        recorder.record(Planned { snapshot: copy, plan: answer });
        while recorder.shelf().list().plans.first().is_none_or(|plan| plan.number <= cycle as u64) {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    in_cycle.sort();
    let list = recorder.shelf().list();
    println!(
        "{changed} of {NODES} nodes change: plan copied in {:?} (median), {:?} of a processor for the recorder's thread; {} of {cycles} kept in {} KiB; \
         resident {before} -> {} MiB",
        in_cycle[cycles / 2],
        (used() - thread) / cycles as u32,
        list.plans.len(),
        list.bytes >> 10,
        resident()
    );
    Ok(())
}

fn main() -> std::io::Result<()> {
    for changed in [0, 5, 100, 500] {
        measure(300, changed)?;
    }
    Ok(())
}
