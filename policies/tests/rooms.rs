//! Who is moved for whom: what the owners, the policy and the disruption budgets allow, and nothing else.

mod common;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::{NoMoves, Plan, PlannedInstance};
use kerf_planner::snapshot::*;

/// A running pod with one instance of the profile.
fn running(snapshot: &mut Snapshot, id: &str, gpu: GpuIndex, name: &str, start: u32) -> Movable {
    let (wanted, profile) = (want(&snapshot.geometries, name), profile(&snapshot.geometries[0], name));
    let held = instance(&snapshot.geometries[0], name, start, InstanceState::Taken);
    snapshot.nodes[0].gpus[gpu].instances.push(held);
    Movable {
        request: request(id, vec![wanted]),
        node: 0,
        devices: vec![PlacedDevice {
            request: "r0".into(),
            subrequest: None,
            gpu,
            instance: Some(PlannedInstance { profile, start, exists: true }),
            share: None,
        }],
        price: 1,
        most_moves: 4,
        ..Movable::default()
    }
}

/// Two GPUs, a 3g on each, and somebody who wants a 7g.
fn two_halves() -> Snapshot {
    let geometry = geometry_named("a100-80");
    let gpus = (0..2).map(|i| gpu(&format!("GPU-{i}"), 0, &geometry)).collect();
    let mut snapshot =
        Snapshot { geometries: vec![geometry], nodes: vec![node("n0", gpus)].into(), ..Snapshot::default() };
    for gpu in 0..2 {
        let pod = running(&mut snapshot, &format!("ns/t{gpu}"), gpu, "3g.40gb", 4);
        snapshot.movable.push(pod);
    }
    let wanted = want(&snapshot.geometries, "7g.80gb");
    snapshot.requests = vec![Request { waited_seconds: Some(30), ..request("ns/large", vec![wanted]) }];
    snapshot
}

fn legal(snapshot: &Snapshot) -> Plan {
    let plan = plan(snapshot);
    assert_eq!(violations(snapshot, &plan), Vec::<String>::new(), "{plan:?}");
    plan
}

/// Those who move.
fn moved(snapshot: &Snapshot) -> Vec<usize> {
    let plan = legal(snapshot);
    plan.rooms.iter().flat_map(|room| room.moves.iter().map(|step| step.pod)).collect()
}

#[test]
fn the_cheaper_of_two_moves_and_has_a_place_beside_the_other() {
    let mut snapshot = two_halves();
    snapshot.movable[0].price = 5;
    let plan = legal(&snapshot);
    let [room] = plan.rooms.as_slice() else { panic!("{plan:?}") };
    assert_eq!(room.place.devices[0].gpu, 1);
    let [step] = room.moves.as_slice() else { panic!("{plan:?}") };
    let start = step.devices[0].instance.expect("an instance").start;
    assert_eq!((step.pod, step.node, step.devices[0].gpu, start), (1, 0, 0, 0));
    assert!(plan.refusals.is_empty());
}

#[test]
fn nobody_moves_who_may_not() {
    type Change = fn(&mut Snapshot);
    let not: [(&str, Change); 7] = [
        ("nobody is movable", |s| s.movable.clear()),
        ("not for this request", |s| s.requests[0].waited_seconds = None),
        ("not yet", |s| s.movable.iter_mut().for_each(|pod| pod.after_seconds = 31)),
        ("the policy moves nobody", |s| s.movable.iter_mut().for_each(|pod| pod.most_moves = 0)),
        ("both have the higher priority", |s| s.movable.iter_mut().for_each(|p| p.request.priority = 1)),
        ("the budget is used up", |s| {
            s.budgets = vec![0];
            s.movable.iter_mut().for_each(|pod| pod.budgets = vec![0]);
        }),
        ("nothing would be free for it", |s| {
            let [a, b] = [0, 1].map(|gpu| instance(&s.geometries[0], "4g.40gb", gpu, InstanceState::Taken));
            s.nodes[0].gpus[0].instances.push(Instance { start: 0, ..a });
            s.nodes[0].gpus[1].instances.push(Instance { start: 0, ..b });
        }),
    ];
    assert_eq!(moved(&two_halves()).len(), 1);
    for (why, change) in not {
        let mut snapshot = two_halves();
        change(&mut snapshot);
        assert_eq!(moved(&snapshot), Vec::<usize>::new(), "{why}");
    }
    let mut one = two_halves();
    one.budgets = vec![0];
    one.movable[1].budgets = vec![0];
    assert_eq!(moved(&one), [0], "the other is in no budget");
    let mut one = two_halves();
    one.movable[0].request.priority = 1;
    assert_eq!(moved(&one), [1], "the other has the same priority");
}

#[test]
fn two_of_one_budget_do_not_move_together_where_only_one_may() {
    // A 7g needs both 3g's of a GPU to go to the halves of two others.
    let with = |allowed: u32| {
        let geometry = geometry_named("a100-80");
        let gpus = (0..3).map(|i| gpu(&format!("GPU-{i}"), 0, &geometry)).collect();
        let mut snapshot = Snapshot {
            geometries: vec![geometry],
            nodes: vec![node("n0", gpus)].into(),
            ..Snapshot::default()
        };
        for (index, (gpu, start)) in [(0, 0), (0, 4)].into_iter().enumerate() {
            let pod = running(&mut snapshot, &format!("ns/t{index}"), gpu, "3g.40gb", start);
            snapshot.movable.push(Movable { budgets: vec![0], ..pod });
        }
        for gpu in 1..3 {
            running(&mut snapshot, &format!("ns/fixed{gpu}"), gpu, "3g.40gb", 0);
        }
        snapshot.budgets = vec![allowed];
        let wanted = want(&snapshot.geometries, "7g.80gb");
        snapshot.requests = vec![Request { waited_seconds: Some(0), ..request("ns/large", vec![wanted]) }];
        snapshot
    };
    assert_eq!(moved(&with(2)).len(), 2);
    assert_eq!(moved(&with(1)).len(), 0);
    let mut one_at_a_time = with(2);
    one_at_a_time.movable.iter_mut().for_each(|pod| pod.most_moves = 1);
    assert_eq!(moved(&one_at_a_time).len(), 0);
}

#[test]
fn a_refusal_says_whether_moves_were_looked_for() {
    let mut snapshot = two_halves();
    snapshot.movable.iter_mut().for_each(|pod| pod.request.priority = 1);
    // Its like is answered with it.
    let second = Request { id: "ns/second".into(), ..snapshot.requests[0].clone() };
    snapshot.requests.push(second);
    let plan = legal(&snapshot);
    assert_eq!(
        plan.refusals.iter().map(|refusal| refusal.moves).collect::<Vec<_>>(),
        [Some(NoMoves::Useless); 2]
    );
    snapshot.movable[0].request.priority = 0;
    snapshot.movable[0].after_seconds = 31;
    assert_eq!(legal(&snapshot).refusals[0].moves, Some(NoMoves::TooEarly));
    snapshot.requests[0].waited_seconds = None;
    snapshot.requests.truncate(1);
    assert_eq!(legal(&snapshot).refusals[0].moves, None);
}

/// What was placed is running, and some of it may be moved.
fn with_running(dice: &mut Dice, snapshot: &Snapshot, plan: &Plan) -> Snapshot {
    let mut after = carry_out(snapshot, plan);
    after.budgets = (0..2).map(|_| dice.below(3) as u32).collect();
    for placement in &plan.placements {
        if dice.percent(20) {
            continue;
        }
        after.movable.push(Movable {
            request: snapshot.requests[placement.request].clone(),
            node: placement.node,
            devices: placement.devices.clone(),
            price: dice.below(5) as u32,
            budgets: if dice.percent(30) { vec![dice.below(2)] } else { vec![] },
            most_moves: dice.below(5) as u32,
            after_seconds: dice.below(3) as u64,
        });
    }
    // Some of the others have ended: holes.
    let stay: Vec<&Movable> = after.movable.iter().collect();
    let held = |n: usize, g: usize, start: u32| {
        stay.iter().any(|pod| {
            pod.node == n
                && pod.devices.iter().any(|d| d.gpu == g && d.instance.is_some_and(|i| i.start == start))
        })
    };
    let mut nodes = after.nodes.clone();
    for (n, node) in nodes.iter_mut().enumerate() {
        for (g, gpu) in node.gpus.iter_mut().enumerate() {
            gpu.instances.retain(|one| held(n, g, one.start) || !dice.percent(50));
        }
    }
    after.nodes = nodes;
    after
}

/// In any cluster, whatever is moved: the end is legal, and so are those who move.
#[test]
fn rooms_are_legal() {
    let mut found = 0;
    for seed in 0..500u64 {
        let mut dice = Dice(seed);
        let mut snapshot = random_cluster(&mut dice, 3, 3, geometries());
        snapshot.requests = (0..30).map(|i| random_request(&mut dice, i, 1, &snapshot)).collect();
        let filled = plan(&snapshot);
        let mut next = with_running(&mut dice, &snapshot, &filled);
        let mut requests = Vec::new();
        for i in 100..112 {
            let needs = 1 + dice.below(5) / 4;
            let request = random_request(&mut dice, i, needs, &next);
            let waited_seconds = dice.percent(90).then_some(2);
            requests.push(Request { waited_seconds, priority: 1 + dice.below(2) as i32, ..request });
        }
        next.requests = requests;
        let plan = plan(&next);
        let broken = violations(&next, &plan);
        assert!(broken.is_empty(), "seed {seed}: {broken:?}\n{plan:?}");
        assert_eq!(plan, kerf_planner::plan(&next), "seed {seed}");
        found += plan.rooms.len();
    }
    // Else it would prove nothing.
    assert!(found > 10, "{found}");
}

/// The cluster once these have gone, and the request and they ask anew.
fn without(snapshot: &Snapshot, request: usize, gone: &[usize]) -> Snapshot {
    let mut after = snapshot.clone();
    after.requests = vec![snapshot.requests[request].clone()];
    for &pod in gone {
        let movable = &snapshot.movable[pod];
        after.requests.push(movable.request.clone());
        let node = &mut after.nodes[movable.node];
        for (resource, milli) in &movable.request.pod.milli {
            *node.free_milli.get_mut(resource).unwrap() += milli;
        }
        for device in &movable.devices {
            let gpu = &mut node.gpus[device.gpu];
            match device.instance {
                None => gpu.taken_whole = false,
                Some(held) => {
                    let here =
                        |one: &&mut Instance| one.profile == Some(held.profile) && one.start == held.start;
                    gpu.instances.iter_mut().find(here).unwrap().state = InstanceState::Idle;
                }
            }
        }
    }
    after
}

/// Whether the request has a place once one or two others have moved, by trying everything.
fn moves_help(snapshot: &Snapshot, request: usize) -> bool {
    let (waited, priority) = (snapshot.requests[request].waited_seconds, snapshot.requests[request].priority);
    let may = |pod: &usize| {
        let movable = &snapshot.movable[*pod];
        movable.request.priority <= priority && waited.is_some_and(|waited| waited >= movable.after_seconds)
    };
    let all: Vec<usize> = (0..snapshot.movable.len()).filter(may).collect();
    let pairs = all.iter().flat_map(|&a| all.iter().filter(move |&&b| a < b).map(move |&b| vec![a, b]));
    all.iter().map(|&a| vec![a]).chain(pairs).any(|gone| {
        let budget = |(budget, &allowed): (usize, &u32)| {
            let of_it = gone.iter().filter(|&&pod| snapshot.movable[pod].budgets.contains(&budget));
            of_it.count() <= allowed as usize
        };
        gone.iter().all(|&pod| snapshot.movable[pod].most_moves as usize >= gone.len())
            && snapshot.budgets.iter().enumerate().all(budget)
            && all_fit(&without(snapshot, request, &gone))
    })
}

/// One of two that move fits beside either of two free halves, the other only beside the first, where processors are
/// left. Which half is tried for which is no proof.
#[test]
fn where_processors_decide_it_is_not_said_that_no_moves_help() {
    for cpus in [[1, 30], [30, 1]] {
        let geometry = geometry_named("a100-80");
        let one = |n: usize| node(&format!("n{n}"), vec![gpu(&format!("GPU-{n}"), 0, &geometry)]);
        let mut snapshot =
            Snapshot { nodes: (0..3).map(one).collect(), geometries: vec![geometry], ..Snapshot::default() };
        for (pod, start) in [(0, 0), (1, 4)] {
            let mut pod = Movable {
                most_moves: 2,
                ..running(&mut snapshot, &format!("ns/{pod}"), 0, "3g.40gb", start)
            };
            pod.request.pod.milli.insert("cpu".into(), 1000 * cpus[start as usize / 4]);
            snapshot.movable.push(pod);
        }
        for node in [1, 2] {
            let half = instance(&snapshot.geometries[0], "3g.40gb", 0, InstanceState::Taken);
            snapshot.nodes[node].gpus[0].instances.push(half);
        }
        snapshot.nodes[2].free_milli.insert("cpu".into(), 2_000);
        let wanted = want(&snapshot.geometries, "7g.80gb");
        snapshot.requests = vec![Request { waited_seconds: Some(0), ..request("ns/large", vec![wanted]) }];
        assert!(moves_help(&snapshot, 0));
        let plan = legal(&snapshot);
        assert!(!plan.rooms.is_empty() || plan.refusals[0].moves == Some(NoMoves::NotFound), "{plan:?}");
    }
}

/// That no moves make room is said only if none do.
#[test]
fn useless_is_what_trying_everything_finds_useless() {
    let mut said = 0;
    for seed in 0..600u64 {
        let mut dice = Dice(seed);
        let mut snapshot = random_cluster(&mut dice, 2, 2, geometries());
        // So that moves decide: little else is wrong with nodes and GPUs.
        snapshot.nodes.iter_mut().for_each(|node| (node.ready, node.unschedulable) = (true, false));
        let needs = 1 + dice.below(6) / 5;
        snapshot.requests = (0..8).map(|i| random_request(&mut dice, i, needs, &snapshot)).collect();
        let filled = plan(&snapshot);
        let mut next = with_running(&mut dice, &snapshot, &filled);
        next.movable.iter_mut().for_each(|pod| pod.most_moves = pod.most_moves.min(2));
        let request = random_request(&mut dice, 100, needs, &next);
        next.requests = vec![Request { waited_seconds: Some(2), priority: 2, ..request }];
        let plan = legal(&next);
        if plan.refusals.first().is_some_and(|refusal| refusal.moves == Some(NoMoves::Useless)) {
            said += 1;
            assert!(!moves_help(&next, 0), "seed {seed}: {plan:?}");
        }
    }
    println!("{said} times useless");
    assert!(said > 30, "{said}");
}
