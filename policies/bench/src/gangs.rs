//! Batches of which all or nothing is wanted, or more is wanted than there is: how long it takes to say so.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, ensure};
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::{Plan, Scope, Verdict};
use kerf_planner::snapshot::{
    Capability, DeviceNeed, Geometry, Instance, InstanceState, Request, Snapshot, Want,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::clock;
use crate::fleet::{large, pod, seven};
use crate::plot::Chart;
use crate::speed;

/// Nodes of eight GPUs.
pub const NODES: [usize; 4] = [125, 250, 1_000, 4_000];

/// Of each; the shortest counts.
const RUNS: usize = 7;

/// A batch: its name, a short one if it is in the chart, whether the GPUs are fragmented, and the requests on so many nodes.
struct Case {
    name: &'static str,
    short: &'static str,
    fragmented: bool,
    requests: fn(usize) -> Vec<Request>,
}

const CASES: [Case; 8] = [
    Case {
        name: "a gang of 10 pods × 8 GPUs; 9 nodes are free",
        short: "refused: 10 pods × 8 GPUs",
        fragmented: true,
        requests: |_| gang("g", 10, &whole(8)),
    },
    Case {
        name: "100 such gangs",
        short: "",
        fragmented: true,
        requests: |_| (0..100).flat_map(|g| gang(&format!("g{g}"), 10, &whole(8))).collect(),
    },
    Case {
        name: "a gang of pods × 8 GPUs, one more than there are nodes",
        short: "refused: too many × 8 GPUs",
        fragmented: true,
        requests: |nodes| gang("g", nodes + 1, &whole(8)),
    },
    Case {
        name: "a gang of instances of four sizes, 32 for each node, more than there is room for",
        short: "refused: instances of four sizes",
        fragmented: true,
        requests: |nodes| {
            let sizes = ["3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"].map(instance);
            sizes.iter().flat_map(|size| gang("g", 8 * nodes, size)).collect()
        },
    },
    Case {
        name: "a gang of pods of 80 processors, one for each node, and of 25, one more; a node has 128",
        short: "refused: processors decide",
        fragmented: false,
        requests: |nodes| {
            let mut both = gang("g", 2 * nodes + 1, &whole(1));
            for (i, one) in both.iter_mut().enumerate() {
                one.pod = pod(if i < nodes { 80 } else { 25 });
            }
            both
        },
    },
    Case {
        name: "a gang for half of the cluster, one GPU each",
        short: "placed: half of it × 1 GPU",
        fragmented: false,
        requests: |nodes| gang("g", 4 * nodes, &whole(1)),
    },
    Case {
        name: "a gang for half of the cluster, 8 GPUs each",
        short: "placed: half of it × 8 GPUs",
        fragmented: false,
        requests: |nodes| gang("g", nodes / 2, &whole(8)),
    },
    Case {
        name: "8 pods of one GPU for each node, in no gang",
        short: "placed: all of it × 1 GPU",
        fragmented: false,
        requests: |nodes| {
            let alone = |one| Request { gang: None, ..one };
            gang("g", 8 * nodes, &whole(1)).into_iter().map(alone).collect()
        },
    },
];

fn whole(count: u32) -> Want {
    Want { count, label: "a whole GPU".into(), whole: true, ..Want::default() }
}

fn instance(name: &'static str) -> Want {
    let named = (0..seven().profiles.len()).filter(|&p| seven().profiles[p].name == name).collect();
    Want { count: 1, label: name.into(), profiles: [(0, named)].into(), ..Want::default() }
}

fn gang(name: &str, members: usize, want: &Want) -> Vec<Request> {
    let member = |i: usize| Request {
        id: format!("ns/{name}-{i}"),
        devices: vec![DeviceNeed { name: "gpu".into(), alternatives: vec![want.clone()] }],
        pod: pod(1),
        gang: Some(format!("ns/{name}")),
        ..Request::default()
    };
    (0..members).map(member).collect()
}

/// GPUs that may be had whole, on nodes that all pods may go to. Fragmented: on all nodes but nine a third of the GPUs have
/// an instance or two.
fn cluster(nodes: usize, fragmented: bool) -> Snapshot {
    let geometry = seven();
    let mut snapshot = large(nodes, std::slice::from_ref(&geometry));
    let mut dice = ChaCha8Rng::seed_from_u64(1);
    for (n, node) in snapshot.nodes.iter_mut().enumerate() {
        node.taints.clear();
        for (g, gpu) in node.gpus.iter_mut().enumerate() {
            gpu.whole = Capability::AfterSwitch;
            let used =
                fragmented && n % nodes.div_ceil(9) != 0 && (g == n % 8 || dice.random_range(0..4) == 0);
            for half in 0..2 {
                if !used || half == 1 && dice.random_range(0..2) == 0 {
                    continue;
                }
                let profile = dice.random_range(0..3);
                let (size, start) = (geometry.profiles[profile].size, 4 * half);
                let state = InstanceState::Taken;
                gpu.instances.push(Instance { profile: Some(profile), start, size, state, exists: true });
            }
        }
    }
    snapshot
}

/// The shortest time of some runs, and the plan, which is checked.
fn measured(case: &Case, nodes: usize) -> Result<(Duration, Plan)> {
    let snapshot = Snapshot { requests: (case.requests)(nodes), ..cluster(nodes, case.fragmented) };
    let least = clock::shortest(RUNS, || drop(plan(&snapshot)));
    let plan = plan(&snapshot);
    let wrong = violations(&snapshot, &plan);
    ensure!(wrong.is_empty(), "{}: the plan for {nodes} nodes is illegal: {wrong:?}", case.name);
    Ok((least, plan))
}

fn answer(plan: &Plan) -> String {
    let Some(refusal) = plan.refusals.first() else { return format!("{} placed", plan.placements.len()) };
    match &refusal.verdict {
        Verdict::Impossible(proof) if proof.scope == Scope::WhateverEnds => {
            "impossible, whatever ends".into()
        }
        Verdict::Impossible(_) => "impossible now".into(),
        Verdict::Exhausted => "everything tried".into(),
        Verdict::NotFound => "not found".into(),
    }
}

/// Times and answers by the number of nodes: a table.
pub fn table(nodes: &[usize]) -> Result<String> {
    let mut table = "| batch | nodes × 8 GPUs | answer | time |\n|---|---|---|---|".to_owned();
    for case in &CASES {
        for &nodes in nodes {
            let (least, plan) = measured(case, nodes)?;
            _ = write!(table, "\n| {} | {nodes} | {} | {least:.1?} |", case.name, answer(&plan));
        }
    }
    Ok(table)
}

/// Time by the number of GPUs, of the batches and of one decision: a chart.
pub fn chart(nodes: &[usize], nodes_of_one: &[usize], geometries: &[Geometry]) -> Result<String> {
    let line = |case: &Case| {
        let point = |&nodes: &usize| {
            let (least, _) = measured(case, nodes)?;
            Ok((8.0 * nodes as f64, 1e3 * least.as_secs_f64()))
        };
        Ok((case.short.to_owned(), nodes.iter().map(point).collect::<Result<_>>()?))
    };
    let mut lines =
        CASES.iter().filter(|case| !case.short.is_empty()).map(line).collect::<Result<Vec<_>>>()?;
    lines.push(("one decision".into(), speed::line(nodes_of_one, geometries)));
    let ticks = [vec![1e3, 1e4, 1e5], vec![1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3, 1e4]];
    let (title, axes) = ("Time against GPUs", ["GPUs", "milliseconds"]);
    Ok(Chart { title, axes, ticks, logarithmic: true, lines }.svg())
}
