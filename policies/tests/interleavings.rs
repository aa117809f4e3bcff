//! A thousand lives of a small cluster, each in another order: six pods, two nodes with two GPUs each, operators whose
//! caches lag, and everything that [`world`] can do to them. Places come from the real [`kerf_planner::plan`], steps
//! from the real [`kerf_planner::protocol::next`].

mod common;
mod world;

use common::{Dice, node};
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::snapshot::*;
use world::{Action, Budget, ClaimNow, Missing, PodNow, Rules, World, Write};

const PODS: usize = 6;
const PLACES: usize = 4;
const PER_NODE: usize = 2;

type Cluster<const O: usize> = World<PODS, PLACES, O>;

/// What an operator makes of its caches: GPUs with one instance each, and the pods without a place.
fn snapshot<const O: usize>(cluster: &Cluster<O>, operator: usize) -> (Snapshot, Vec<usize>) {
    let seen = cluster.operators[operator].cache.as_ref().unwrap_or(&cluster.api);
    let geometry = Geometry {
        name: "one".into(),
        memory_slices: 1,
        profiles: vec![Profile {
            name: "1g.80gb".into(),
            size: 1,
            starts: vec![0],
            max_instances: 1,
            ..Profile::default()
        }],
        ..Geometry::default()
    };
    let gpu = |place: usize| {
        let taken = seen.spec[place].is_some() || seen.report_use[place] != 0;
        let state = if taken { InstanceState::Taken } else { InstanceState::Idle };
        Gpu {
            instances: vec![Instance { profile: Some(0), start: 0, size: 1, state, exists: true }],
            ..common::gpu(&format!("GPU-{place}"), 0, &geometry)
        }
    };
    let nodes = (0..PLACES / PER_NODE).map(|n| Node {
        unschedulable: cluster.bad[n],
        ..node(&format!("n{n}"), (n * PER_NODE..(n + 1) * PER_NODE).map(gpu).collect())
    });
    let nodes = nodes.collect();
    let waits = |&pod: &usize| {
        matches!(seen.pod[pod], PodNow::Gated | PodNow::Unbound)
            && !seen.spec.contains(&Some(pod as u8))
            && !matches!(seen.claim[pod], ClaimNow::There { place: Some(_), .. })
    };
    let pods: Vec<usize> = (0..PODS).filter(waits).collect();
    let mut snapshot =
        Snapshot { geometries: vec![geometry], nodes, requests: Vec::new(), ..Snapshot::default() };
    let request = |pod: &usize| {
        common::request(&format!("p{pod}"), vec![common::want(&snapshot.geometries, "1g.80gb")])
    };
    snapshot.requests = pods.iter().map(request).collect();
    (snapshot, pods)
}

/// Whether the plan puts the pod there.
fn is_planned<const O: usize>(cluster: &Cluster<O>, operator: usize, pod: usize, place: usize) -> bool {
    let (snapshot, pods) = snapshot(cluster, operator);
    let plan = plan(&snapshot);
    assert_eq!(violations(&snapshot, &plan), Vec::<String>::new());
    plan.placements.iter().any(|p| pods[p.request] == pod && p.node * PER_NODE + p.devices[0].gpu == place)
}

fn actions<const O: usize>(cluster: &Cluster<O>, rules: &Rules) -> Vec<Action> {
    let mut actions = Vec::new();
    cluster.actions(rules, &mut actions);
    actions.retain(|action| match *action {
        Action::Decide { operator, pod, place } => {
            let (operator, pod, place) = (operator as usize, pod as usize, place as usize);
            cluster.decision(rules, operator, pod, place) != Some(Write::AddEntry)
                || is_planned(cluster, operator, pod, place)
        }
        _ => true,
    });
    actions
}

fn live<const O: usize>(seed: u64) {
    let mut dice = Dice(seed);
    let rules = Rules {
        places_per_node: PER_NODE,
        hold_at_once: dice.percent(30),
        lag: dice.percent(70),
        old_reports: dice.percent(50),
        together: false,
        missing: Missing::Nothing,
    };
    let mut some = |most: usize| dice.below(most + 1) as u8;
    let left =
        Budget { fails: some(4), cordons: 2 * some(2), deletes: some(2), forces: some(2), claims: some(1) };
    let mut cluster = Cluster::<O>::new(&rules, left);
    let mut story = Vec::new();
    for _ in 0..20_000 {
        let possible = actions(&cluster, &rules);
        let (certain, chance): (Vec<Action>, Vec<Action>) =
            possible.into_iter().partition(|a| a.is_certain());
        let over = |pod: &PodNow| matches!(pod, PodNow::Done | PodNow::Gone);
        if certain.is_empty() && cluster.api.pod.iter().all(over) {
            assert_eq!(cluster.api.spec, [None; PLACES], "seed {seed}");
            assert_eq!(cluster.users, [0; PLACES], "seed {seed}");
            return;
        }
        if certain.is_empty() && chance.is_empty() {
            // All that is left to happen is that the nodes come back.
            cluster.bad = [false; PLACES];
            continue;
        }
        if certain.is_empty() && cluster.bad == [false; PLACES] {
            let complaint = cluster.complaint(&rules);
            assert_eq!(complaint, None, "seed {seed}: {cluster:?} after {story:?}");
        }
        let action = match (certain.is_empty(), chance.is_empty()) {
            (true, _) => *dice.pick(&chance),
            (false, true) => *dice.pick(&certain),
            (false, false) => {
                let list = if dice.percent(6) { &chance } else { &certain };
                *dice.pick(list)
            }
        };
        story.push(action);
        cluster = cluster.after(&rules, action);
        assert!(cluster.is_safe(), "seed {seed}: two pods on one place in {cluster:?} after {story:?}");
        assert!(O > 1 || cluster.is_on_record(), "seed {seed}: not on record in {cluster:?} after {story:?}");
    }
    panic!("seed {seed}: no end in {cluster:?}");
}

#[test]
fn seven_hundred_lives_with_one_operator() {
    (0..700).for_each(live::<1>);
}

#[test]
fn three_hundred_lives_with_two_operators() {
    (0..300).for_each(live::<2>);
}
