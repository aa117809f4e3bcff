//! One planning cycle, snapshot to plan, on a large cluster.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::snapshot::{DeviceNeed, PodNeeds, Request, Snapshot};

use crate::clock;
use crate::fleet::{large, need, pod, seven};

/// Nodes of eight GPUs, and requests at once.
pub const SIZES: [(usize, usize); 4] = [(500, 4_000), (500, 12_000), (2_000, 8_000), (10_000, 8_000)];

/// Of each size; the shortest counts.
const RUNS: usize = 5;

/// Requests for 1g, 2g and 3g instances; one in twenty for two devices, one in four for a zone.
fn snapshot(nodes: usize, requests: usize) -> Snapshot {
    let geometry = seven();
    let device = |i: usize, d: usize| {
        let slices = 1 + ((i + d) % 3) as u32;
        // Of the two profiles with one compute slice the smaller.
        let fitting = |p: &kerf_planner::snapshot::Profile| p.compute_slices == slices && p.name != "1g.20gb";
        DeviceNeed { name: format!("gpu{d}"), ..need(std::slice::from_ref(&geometry), &fitting) }
    };
    let request = |i: usize| Request {
        id: format!("ns/pod-{i}"),
        devices: (0..1 + usize::from(i.is_multiple_of(20))).map(|d| device(i, d)).collect(),
        pod: PodNeeds {
            node_selector: i
                .is_multiple_of(4)
                .then(|| ("zone".to_owned(), "a".to_owned()))
                .into_iter()
                .collect(),
            ..pod(1)
        },
        ..Request::default()
    };
    let requests = (0..requests).map(request).collect();
    Snapshot { requests, ..large(nodes, std::slice::from_ref(&geometry)) }
}

/// Time of a cycle by nodes and requests: a table. Every plan is checked.
pub fn table(sizes: &[(usize, usize)]) -> Result<String> {
    let mut table = "| nodes × 8 GPUs | requests | placed | time |\n|---|---|---|---|".to_owned();
    for &(nodes, requests) in sizes {
        let snapshot = snapshot(nodes, requests);
        let least = clock::shortest(RUNS, || drop(plan(&snapshot)));
        let plan = plan(&snapshot);
        let wrong = violations(&snapshot, &plan);
        ensure!(wrong.is_empty(), "the plan for {nodes} nodes is illegal: {wrong:?}");
        let placed = plan.placements.len();
        _ = write!(table, "\n| {nodes} | {requests} | {placed} | {least:.1?} |");
    }
    Ok(table)
}
