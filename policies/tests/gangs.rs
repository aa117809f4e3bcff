//! Gangs: together or not at all, and found wherever trying everything finds a way, as far as one GPU model goes.

mod common;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::{Plan, RefusalKind};
use kerf_planner::snapshot::*;

fn legal(snapshot: &Snapshot) -> Plan {
    let plan = plan(snapshot);
    assert_eq!(violations(snapshot, &plan), Vec::<String>::new(), "{plan:?}");
    plan
}

/// Empty A100s, two on a node, and a gang that asks for these profiles.
fn gang(gpus: usize, profiles: &[&str]) -> Snapshot {
    let geometry = geometry_named("a100-80");
    let mut snapshot = Snapshot { geometries: vec![geometry.clone()], ..Snapshot::default() };
    for first in (0..gpus).step_by(2) {
        let here = (first..gpus.min(first + 2)).map(|i| gpu(&format!("GPU-{i}"), 0, &geometry)).collect();
        snapshot.nodes.push(node(&format!("n{first}"), here));
    }
    let member = |(i, name): (usize, &&str)| Request {
        gang: Some("ns/g".into()),
        ..request(&format!("ns/g-{i}"), vec![want(&snapshot.geometries, name)])
    };
    snapshot.requests = profiles.iter().enumerate().map(member).collect();
    snapshot
}

#[test]
fn all_or_none() {
    assert_eq!(legal(&gang(3, &["7g.80gb"; 3])).placements.len(), 3);
    let plan = legal(&gang(2, &["7g.80gb"; 3]));
    assert_eq!((plan.placements.len(), plan.refusals.len()), (0, 3));
    let message = &plan.refusals[2].message;
    assert!(
        message.starts_with("the 3 pods of gang ns/g get their places together or not at all; beside 2 of them ns/g-2 needs 7g.80gb"),
        "{message}"
    );
    assert_eq!(plan.refusals[0].kind, RefusalKind::NoRoom);
    let message = &legal(&gang(0, &["7g.80gb"])).refusals[0].message;
    assert!(message.starts_with("the one pod that gang ns/g lacks needs 7g.80gb: "), "{message}");
}

#[test]
fn what_a_gang_does_not_get_others_do() {
    let mut snapshot = gang(2, &["7g.80gb"; 3]);
    let alone = request("ns/alone", vec![want(&snapshot.geometries, "7g.80gb")]);
    snapshot.requests.push(alone);
    let plan = legal(&snapshot);
    assert_eq!(plan.placements.iter().map(|placement| placement.request).collect::<Vec<_>>(), [3]);
}

#[test]
fn the_largest_first_where_their_order_does_not_do() {
    // In this order 1g's and 3g's leave no 4g.
    let profiles = ["3g.40gb", "1g.10gb", "3g.40gb", "4g.40gb", "2g.20gb", "1g.10gb"];
    assert_eq!(legal(&gang(2, &profiles)).placements.len(), 6);
}

#[test]
fn a_gang_comes_where_its_most_important_member_does() {
    let mut snapshot = gang(2, &["7g.80gb"; 2]);
    let alone = request("ns/alone", vec![want(&snapshot.geometries, "7g.80gb")]);
    snapshot.requests.insert(0, Request { priority: 1, ..alone });
    assert_eq!(legal(&snapshot).placements.len(), 1, "the first takes one of two GPUs");
    snapshot.requests[2].priority = 2;
    let placed: Vec<usize> = legal(&snapshot).placements.iter().map(|placement| placement.request).collect();
    assert_eq!(placed, [2, 1]);
}

#[test]
fn random_gangs_are_legal_and_some_are_placed() {
    let (mut placed, mut refused) = (0, 0);
    for seed in 0..300u64 {
        let mut dice = Dice(seed);
        let mut snapshot = random_cluster(&mut dice, 3, 3, geometries());
        let mut requests = Vec::new();
        for i in 0..14 {
            let needs = 1 + dice.below(5) / 4;
            let gang = dice.percent(60).then(|| format!("g{}", dice.below(3)));
            requests.push(Request { gang, ..random_request(&mut dice, i, needs, &snapshot) });
        }
        snapshot.requests = requests;
        if seed % 2 == 1 {
            add_shares(&mut dice, &mut snapshot);
        }
        let plan = legal(&snapshot);
        let in_gang = |request: usize| snapshot.requests[request].gang.is_some();
        placed += plan.placements.iter().filter(|placement| in_gang(placement.request)).count();
        refused += plan.refusals.iter().filter(|refusal| in_gang(refusal.request)).count();
    }
    assert!(placed > 100 && refused > 100, "{placed} placed, {refused} refused");
}

/// Whatever is refused as a gang leaves the cluster as it was: whoever comes after it finds what they would find
/// without it.
#[test]
fn a_refused_gang_takes_nothing() {
    for seed in 0..200u64 {
        let mut dice = Dice(seed);
        let mut snapshot = random_cluster(&mut dice, 2, 3, geometries());
        let mut member = |i| random_request(&mut dice, i, 1, &snapshot);
        let mut requests: Vec<Request> = (0..8).map(&mut member).collect();
        requests.iter_mut().for_each(|request| request.priority = 0);
        let (gang, others) = requests.split_at_mut(4);
        gang.iter_mut().for_each(|request| request.gang = Some("g".into()));
        let (gang, others) = (gang.to_vec(), others.to_vec());
        snapshot.requests = gang.into_iter().chain(others.clone()).collect();
        let with = legal(&snapshot);
        if with.placements.iter().any(|placement| placement.request < 4) {
            continue;
        }
        snapshot.requests = others;
        let without = legal(&snapshot);
        let places = |plan: &Plan, skip: usize| -> Vec<_> {
            plan.placements.iter().map(|p| (p.request - skip, p.node, p.devices.clone())).collect()
        };
        assert_eq!(places(&with, 4), places(&without, 0), "seed {seed}");
    }
}
