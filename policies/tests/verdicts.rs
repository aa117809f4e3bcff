//! How sure a refusal is: what is said to be impossible is, by trying everything; and what is impossible is mostly
//! proven.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::occupancy::Occupancy;
use kerf_planner::plan;
use kerf_planner::plan::{Certificate, Plan, RefusalKind, Scope, Verdict};
use kerf_planner::snapshot::*;

fn legal(snapshot: &Snapshot) -> Plan {
    let plan = plan(snapshot);
    assert_eq!(violations(snapshot, &plan), Vec::<String>::new(), "{plan:?}");
    plan
}

fn proof(plan: &Plan) -> &Certificate {
    match plan.refusals.first().map(|refusal| &refusal.verdict) {
        Some(Verdict::Impossible(proof)) => proof,
        other => panic!("{other:?}: {plan:?}"),
    }
}

/// So many nodes of so many empty A100s, which may be handed out whole.
fn cluster(nodes: usize, gpus: usize) -> Snapshot {
    let geometry = geometry_named("a100-80");
    let card = |n, g| Gpu { whole: Capability::AfterSwitch, ..gpu(&format!("GPU-{n}-{g}"), 0, &geometry) };
    let nodes = (0..nodes).map(|n| node(&format!("n{n}"), (0..gpus).map(|g| card(n, g)).collect())).collect();
    Snapshot { nodes, geometries: vec![geometry], ..Snapshot::default() }
}

fn gang_of(snapshot: &mut Snapshot, members: impl IntoIterator<Item = (Want, i128)>) {
    for (i, (want, cpus)) in members.into_iter().enumerate() {
        let mut member = Request { gang: Some("ns/g".into()), ..request(&format!("ns/g-{i}"), vec![want]) };
        member.pod.milli.insert("cpu".into(), 1000 * cpus);
        snapshot.requests.push(member);
    }
}

fn take(snapshot: &mut Snapshot, node: usize, gpu: usize, name: &str, start: u32) {
    let held = instance(&snapshot.geometries[0], name, start, InstanceState::Taken);
    snapshot.nodes[node].gpus[gpu].instances.push(held);
}

#[test]
fn pods_of_whole_nodes_among_fragments() {
    let eight = || (Want { count: 8, ..whole() }, 1);
    let mut snapshot = cluster(12, 8);
    gang_of(&mut snapshot, (0..10).map(|_| eight()));
    assert_eq!(legal(&snapshot).placements.len(), 10);
    // One instance on each of three nodes: 93 GPUs are free for 80, but only nine nodes are.
    for node in 0..3 {
        take(&mut snapshot, node, node, "1g.10gb", 0);
    }
    let plan = legal(&snapshot);
    assert_eq!((proof(&plan).scope, proof(&plan).room), (Scope::Beside(0), 9));
    assert_eq!(plan.refusals.len(), 10);
    let message = &plan.refusals[0].message;
    assert!(
        message.ends_with("; there is room for at most 9 of them now, however they are placed"),
        "{message}"
    );
    // Three more than there are nodes.
    gang_of(&mut snapshot, (0..3).map(|_| eight()));
    let plan = legal(&snapshot);
    assert_eq!((proof(&plan).scope, proof(&plan).room), (Scope::WhateverEnds, 12));
    let message = &plan.refusals[0].message;
    assert!(
        message.ends_with("; there is room for at most 12 of them even if all that runs ended"),
        "{message}"
    );
}

#[test]
fn simple_cases_are_proven() {
    let geometries = [geometry_named("a100-80")];
    let want = |name| (want(&geometries, name), 1);
    let with_cpus = |name, cpus| (self::want(&geometries, name), cpus);
    let larger = [vec![want("1g.10gb"); 2], vec![want("4g.40gb"); 5]];
    let three = [vec![want("2g.20gb"); 3], vec![want("3g.40gb"); 3], vec![want("7g.80gb"); 2]];
    // The last of each has no place beside the others.
    let cases: [(&str, Vec<(Want, i128)>); 7] = [
        ("equal instances", vec![want("3g.40gb"); 9]),
        ("one of each GPU", vec![want("1g.10gb+me"); 5]),
        ("two sizes", [vec![want("4g.40gb"); 3], vec![want("3g.40gb"); 6]].concat()),
        ("the larger alone", larger.concat()),
        ("three sizes", three.concat()),
        ("processors, equal", vec![with_cpus("1g.10gb", 22); 5]),
        (
            "processors, different",
            [vec![with_cpus("2g.20gb", 40); 2], vec![with_cpus("1g.10gb", 24); 3]].concat(),
        ),
    ];
    for (case, members) in cases {
        let mut snapshot = cluster(2, 2);
        snapshot.nodes.iter_mut().for_each(|node| _ = node.free_milli.insert("cpu".into(), 64_000));
        gang_of(&mut snapshot, members.clone());
        let plan = legal(&snapshot);
        let scope = if case.starts_with("processors") { Scope::Beside(0) } else { Scope::WhateverEnds };
        assert_eq!(proof(&plan).scope, scope, "{case}");
        snapshot.requests.pop();
        assert!(legal(&snapshot).refusals.is_empty(), "{case}");
    }
}

#[test]
fn beside_what_the_plan_places_before() {
    let mut snapshot = cluster(1, 2);
    let first = request("ns/first", vec![want(&snapshot.geometries, "7g.80gb")]);
    let whole = (want(&snapshot.geometries, "7g.80gb"), 1);
    gang_of(&mut snapshot, vec![whole; 2]);
    snapshot.requests.insert(0, Request { priority: 1, ..first });
    assert_eq!(proof(&legal(&snapshot)).scope, Scope::Beside(1));
}

#[test]
fn a_request_alone_is_told_that_it_never_fits() {
    let mut snapshot = cluster(3, 4);
    take(&mut snapshot, 0, 0, "1g.10gb", 0);
    snapshot.requests = vec![request("ns/p", vec![Want { count: 8, ..whole() }])];
    let plan = legal(&snapshot);
    assert_eq!((proof(&plan).scope, plan.refusals[0].kind), (Scope::WhateverEnds, RefusalKind::NoRoom));
    let message = &plan.refusals[0].message;
    assert!(message.ends_with("; no node could take it even if all that runs ended"), "{message}");
    snapshot.requests[0].devices[0].alternatives[0].count = 4;
    snapshot.nodes = vec![snapshot.nodes[0].clone()].into();
    assert_eq!(proof(&legal(&snapshot)).scope, Scope::Beside(0));
}

#[test]
fn a_proof_that_does_not_hold_is_found_out() {
    let mut snapshot = cluster(2, 2);
    take(&mut snapshot, 0, 0, "1g.10gb", 0);
    let whole = (want(&snapshot.geometries, "7g.80gb"), 1);
    gang_of(&mut snapshot, vec![whole; 4]);
    let plan = legal(&snapshot);
    let with = |change: &dyn Fn(&mut Certificate)| {
        let mut changed = proof(&plan).clone();
        change(&mut changed);
        let verdict = Verdict::Impossible(Arc::new(changed));
        let mut plan = plan.clone();
        plan.refusals.iter_mut().for_each(|refusal| refusal.verdict = verdict.clone());
        violations(&snapshot, &plan)
    };
    assert_eq!(with(&|_| ()), Vec::<String>::new());
    type Change = fn(&mut Certificate);
    let changes: [(&str, Change); 6] = [
        ("whatever ends there is room for four", |proof| proof.scope = Scope::WhateverEnds),
        ("not so many placements", |proof| proof.scope = Scope::Beside(1)),
        ("too little room", |proof| proof.room = 2),
        ("room for all", |proof| proof.room = 4),
        ("a weight too few", |proof| _ = proof.weights.pop()),
        ("weightless", |proof| proof.weights.fill(0)),
    ];
    for (what, change) in changes {
        assert_eq!(with(&change).len(), 1, "{what}");
    }
}

/// Nothing runs, nothing is closed, and processors are no matter.
fn emptied(snapshot: &Snapshot) -> Snapshot {
    let mut emptied = snapshot.clone();
    for node in &mut emptied.nodes {
        (node.ready, node.unschedulable) = (true, false);
        node.free_milli.values_mut().for_each(|free| *free = 1 << 80);
        for gpu in &mut node.gpus {
            (gpu.closed, gpu.stuck, gpu.taken_whole) = (None, None, false);
            gpu.instances.retain(|_| gpu.fixed);
            gpu.instances.iter_mut().for_each(|instance| instance.state = InstanceState::Idle);
        }
    }
    emptied.requests.iter_mut().for_each(|request| request.avoid.clear());
    emptied
}

/// GPUs of one model, some of it taken, and a gang that asks for most of what is free.
fn tight_gang(dice: &mut Dice, sizes: &[(usize, usize)], most: usize) -> Snapshot {
    let geometry = geometry_named(["a100-80", "h100-80-sxm", "rtxpro6000-server"][dice.below(3)]);
    let (nodes, gpus) = *dice.pick(sizes);
    let card = |n, g| gpu(&format!("GPU-{n}-{g}"), 0, &geometry);
    let nodes = (0..nodes).map(|n| node(&format!("n{n}"), (0..gpus).map(|g| card(n, g)).collect())).collect();
    let mut snapshot = Snapshot { nodes, geometries: vec![geometry.clone()], ..Snapshot::default() };
    let mut free = 0;
    for gpu in snapshot.nodes.iter_mut().flat_map(|node| &mut node.gpus) {
        let mut there = Occupancy::empty(&geometry);
        for _ in 0..dice.below(3) {
            let profile = dice.below(geometry.profiles.len());
            let start = *dice.pick(&geometry.profiles[profile].starts);
            if there.fits(&geometry, profile, start) {
                there.take(&geometry, profile, start);
                let held = instance(&geometry, &geometry.profiles[profile].name, start, InstanceState::Taken);
                gpu.instances.push(held);
            }
        }
        free += geometry.memory_slices.saturating_sub(there.slices.count_ones());
    }
    let kinds: Vec<usize> = (0..1 + dice.below(3)).map(|_| dice.below(geometry.profiles.len())).collect();
    let mut asked = free * (60 + dice.below(40) as u32) / 100;
    let cpus = dice.percent(30);
    while asked > 0 && snapshot.requests.len() < most {
        let kind = dice.below(kinds.len());
        let profile = &geometry.profiles[kinds[kind]];
        let wanted = want(&snapshot.geometries, &profile.name);
        let mut member = Request {
            gang: Some("g".into()),
            ..request(&format!("g-{}", snapshot.requests.len()), vec![wanted])
        };
        if cpus {
            member.pod.milli.insert("cpu".into(), [40_000, 24_000, 16_000][kind]);
        }
        snapshot.requests.push(member);
        asked = asked.saturating_sub(profile.size);
    }
    snapshot
}

/// A small cluster and a gang for it, of which most members are of few kinds.
fn random_gang(dice: &mut Dice, simple: bool) -> Snapshot {
    let (nodes, gpus) = (1 + dice.below(2), 1 + dice.below(2));
    let mut snapshot = random_cluster(dice, nodes, gpus, geometries());
    if simple {
        for gpu in snapshot.nodes.iter_mut().flat_map(|node| &mut node.gpus) {
            (gpu.closed, gpu.stuck, gpu.fixed) = (None, None, false);
        }
        snapshot.nodes.iter_mut().for_each(|node| node.ready = true);
    }
    let kinds: Vec<Request> = (0..1 + dice.below(3))
        .map(|kind| match simple {
            true => {
                let mut one = request("", vec![random_want(dice, &snapshot)]);
                one.devices[0].alternatives[0].count = 1;
                one
            }
            false => {
                let needs = 1 + dice.below(5) / 4;
                random_request(dice, kind, needs, &snapshot)
            }
        })
        .collect();
    for i in 0..2 + dice.below(4) {
        let (id, gang) = (format!("ns/g-{i}"), Some("ns/g".into()));
        snapshot.requests.push(Request { id, gang, priority: 0, ..dice.pick(&kinds).clone() });
    }
    snapshot
}

/// What can become of a gang.
const ANSWERS: [&str; 7] = [
    "placed",
    "proven, whatever ends",
    "proven for now",
    "everything tried",
    "not found, impossible",
    "not found, possible",
    "not found",
];

/// How many gangs were placed, and what was said of the others. Beside trying everything, as far as that is asked for.
fn counts(gangs: &dyn Fn(&mut Dice) -> Snapshot, seeds: u64, try_all: bool) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    let mut count = |what| *counts.entry(what).or_default() += 1;
    for seed in 0..seeds {
        let snapshot = gangs(&mut Dice(seed));
        let plan = legal(&snapshot);
        let Some(refusal) = plan.refusals.first() else {
            count("placed");
            continue;
        };
        let possible = try_all && all_fit(&snapshot);
        match &refusal.verdict {
            Verdict::NotFound if !try_all => count("not found"),
            Verdict::NotFound if possible => count("not found, possible"),
            Verdict::NotFound => count("not found, impossible"),
            verdict => assert!(!possible, "seed {seed}: {verdict:?}"),
        }
        match &refusal.verdict {
            Verdict::Exhausted => count("everything tried"),
            Verdict::Impossible(proof) if proof.scope == Scope::WhateverEnds => {
                count("proven, whatever ends");
                assert!(!try_all || !all_fit(&emptied(&snapshot)), "seed {seed}");
            }
            Verdict::Impossible(_) => count("proven for now"),
            Verdict::NotFound => {}
        }
    }
    counts
}

/// What is said of random gangs stays as it was when `verdicts.json` was written. They are the same on any machine; a
/// tolerance leaves room for changes that only reshuffle.
#[test]
fn impossible_is_what_trying_everything_finds_impossible() {
    let file: serde_json::Value = serde_json::from_str(include_str!("verdicts.json")).expect("verdicts.json");
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or_else(|| panic!("no number: {value}"));
    let mut off = Vec::new();
    for range in file["ranges"].as_array().expect("ranges") {
        let (seeds, try_all) = (number(&range["number"]), range["everything tried beside"] == true);
        let small = [(1, 1), (1, 2), (2, 1)];
        let counts = match range["gangs"].as_str().expect("gangs") {
            "one model, 1 or 2 GPUs" => counts(&|dice| tight_gang(dice, &small, 6), seeds, try_all),
            "one model, 3 to 12 GPUs" => {
                counts(&|dice| tight_gang(dice, &[(3, 1), (2, 2), (1, 4), (3, 4)], 60), seeds, try_all)
            }
            "any models, one instance each" => counts(&|dice| random_gang(dice, true), seeds, try_all),
            "any models, anything" => counts(&|dice| random_gang(dice, false), seeds, try_all),
            other => panic!("no gangs {other}"),
        };
        println!("{}: {counts:?}", range["gangs"]);
        for what in ANSWERS {
            let now = counts.get(what).copied().unwrap_or(0);
            if now.abs_diff(number(&range[what])) > number(&file["tolerance"]) {
                off.push(format!("{} {what}: {now}, expected {}", range["gangs"], range[what]));
            }
        }
    }
    assert!(off.is_empty(), "out of range:\n{}", off.join("\n"));
}
