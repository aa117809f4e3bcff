//! Snapshots that say nonsense: indices of what is not there, instances over one another, amounts beyond all bounds. No
//! plan breaks a rule, and nothing panics.

mod common;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::{Move, Placement, Room};
use kerf_planner::snapshot::*;

/// A number that is mostly small, and sometimes far beyond what is there.
fn odd(dice: &mut Dice, bound: usize) -> usize {
    match dice.below(12) {
        0 => *dice.pick(&[u32::MAX as usize, 63, 64, 65, 255, 1 << 20]),
        _ => dice.below(bound),
    }
}

fn odd32(dice: &mut Dice, bound: usize) -> u32 {
    u32::try_from(odd(dice, bound)).unwrap_or(u32::MAX)
}

fn amount(dice: &mut Dice) -> i128 {
    match dice.below(10) {
        0 => *dice.pick(&[i128::MAX, i128::MIN, -1, 0]),
        _ => dice.below(20_000) as i128,
    }
}

fn odd_geometry(dice: &mut Dice) -> Geometry {
    let engines = |dice: &mut Dice| Engines {
        decoder: odd32(dice, 4),
        encoder: odd32(dice, 4),
        jpeg: odd32(dice, 4),
        ofa: odd32(dice, 4),
    };
    let profile = |dice: &mut Dice, p: usize| Profile {
        name: format!("p{}", p / 2),
        memory_bytes: *dice.pick(&[0, 1, 5 << 30, u64::MAX]),
        multiprocessors: odd32(dice, 100),
        compute_slices: odd32(dice, 8),
        size: odd32(dice, 9),
        starts: (0..dice.below(6)).map(|_| odd32(dice, 8)).collect(),
        max_instances: odd32(dice, 8),
        engines: if dice.percent(70) { Engines::default() } else { engines(dice) },
    };
    let profiles = (0..dice.below(5)).map(|p| profile(dice, p)).collect();
    Geometry { name: "odd".into(), memory_slices: odd32(dice, 9), engines: engines(dice), profiles }
}

fn odd_portion(dice: &mut Dice) -> Portion {
    Portion {
        memory_bytes: *dice.pick(&[0, 1, 5 << 30, 40 << 30, u64::MAX]),
        compute_milli: *dice.pick(&[0, 1, 10_000, 100_000, u64::MAX]),
        clients: odd32(dice, 4),
    }
}

fn odd_carrier(dice: &mut Dice) -> Option<(usize, u32)> {
    dice.percent(50).then(|| (odd(dice, 5), odd32(dice, 8)))
}

fn odd_gpu(dice: &mut Dice, uuid: String) -> Gpu {
    let capability =
        |dice: &mut Dice| *dice.pick(&[Capability::No, Capability::Now, Capability::AfterSwitch]);
    let instance = |dice: &mut Dice| Instance {
        profile: (!dice.percent(20)).then(|| odd(dice, 5)),
        start: odd32(dice, 8),
        size: odd32(dice, 9),
        state: *dice.pick(&[InstanceState::Idle, InstanceState::Warm, InstanceState::Taken]),
        exists: dice.percent(60),
    };
    Gpu {
        uuid: if dice.percent(10) { String::new() } else { uuid },
        geometry: (!dice.percent(15)).then(|| odd(dice, 3)),
        closed: dice.percent(10).then(|| "closed".into()),
        stuck: dice.percent(10).then(|| "stuck".into()),
        mig: capability(dice),
        whole: capability(dice),
        allowed: (0..dice.below(6)).map(|_| odd(dice, 5)).collect(),
        fixed: dice.percent(15),
        strategy: if dice.percent(30) { Strategy::Spread } else { Strategy::Pack },
        instances: (0..dice.below(4)).map(|_| instance(dice)).collect(),
        taken_whole: dice.percent(10),
        shared: capability(dice),
        equal_shares: dice.percent(30),
        share_room: (0..dice.below(4))
            .map(|_| (odd_carrier(dice).map(|(profile, _)| profile), odd_portion(dice)))
            .collect(),
        shares: (0..dice.below(5).saturating_sub(2))
            .map(|_| TakenShare { instance: odd_carrier(dice), portion: odd_portion(dice) })
            .collect(),
    }
}

fn odd_want(dice: &mut Dice) -> Want {
    let profiles = |dice: &mut Dice| (0..1 + dice.below(3)).map(|_| odd(dice, 5)).collect();
    Want {
        subrequest: dice.percent(20).then(|| "s".into()),
        count: if dice.percent(85) { dice.below(3) as u32 } else { odd32(dice, 3) },
        label: "odd".into(),
        profiles: (0..dice.below(3)).map(|_| (odd(dice, 3), profiles(dice))).collect(),
        whole: dice.percent(40),
        shares: (0..dice.below(6).saturating_sub(3))
            .map(|_| ((odd(dice, 3), odd_carrier(dice).map(|(profile, _)| profile)), odd_portion(dice)))
            .collect(),
        gpus: dice.percent(20).then(|| (0..4).map(|_| (odd(dice, 3), odd(dice, 3))).collect()),
    }
}

fn odd_request(dice: &mut Dice, id: usize) -> Request {
    let need = |dice: &mut Dice, n: usize| DeviceNeed {
        name: format!("r{}", n / 2),
        alternatives: (0..dice.below(3)).map(|_| odd_want(dice)).collect(),
    };
    let constraint = |dice: &mut Dice| Constraint {
        requests: (0..dice.below(2)).map(|_| "r0".to_owned()).collect(),
        kind: if dice.percent(50) { ConstraintKind::Same } else { ConstraintKind::Distinct },
        values: (0..5).map(|_| ((odd(dice, 3), odd(dice, 3)), dice.below(2).to_string())).collect(),
    };
    Request {
        id: if dice.percent(10) { "twice".into() } else { format!("p{id}") },
        priority: *dice.pick(&[0, 0, 1, i32::MAX, i32::MIN]),
        devices: (0..if dice.percent(80) { 1 } else { dice.below(4) }).map(|n| need(dice, n)).collect(),
        constraints: (0..usize::from(dice.percent(15))).map(|_| constraint(dice)).collect(),
        pod: PodNeeds {
            milli: (0..dice.below(3))
                .map(|_| ((*dice.pick(&["cpu", "x", ""])).to_owned(), amount(dice)))
                .collect(),
            ..PodNeeds::default()
        },
        avoid: (0..usize::from(dice.percent(10))).map(|_| odd(dice, 3)).collect(),
        gang: dice.percent(30).then(|| (*dice.pick(&["a", "b", ""])).to_owned()),
        waited_seconds: dice.percent(80).then(|| *dice.pick(&[0, 5, u64::MAX])),
    }
}

fn odd_device(dice: &mut Dice) -> PlacedDevice {
    let planned = |dice: &mut Dice| PlannedInstance {
        profile: odd(dice, 5),
        start: odd32(dice, 8),
        exists: dice.percent(70),
    };
    PlacedDevice {
        request: "r0".into(),
        subrequest: dice.percent(10).then(|| "s".into()),
        gpu: odd(dice, 3),
        instance: (!dice.percent(30)).then(|| planned(dice)),
        share: dice.percent(20).then(|| odd_portion(dice)),
    }
}

fn odd_snapshot(dice: &mut Dice) -> Snapshot {
    let node = |dice: &mut Dice, n: usize| Node {
        name: format!("n{n}"),
        ready: dice.percent(90),
        free_milli: (0..dice.below(3))
            .map(|_| ((*dice.pick(&["cpu", "x", ""])).to_owned(), amount(dice)))
            .collect(),
        gpus: (0..dice.below(4)).map(|g| odd_gpu(dice, format!("GPU-{n}-{g}"))).collect(),
        ..Node::default()
    };
    let movable = |dice: &mut Dice, id: usize| Movable {
        request: odd_request(dice, 100 + id),
        node: odd(dice, 3),
        devices: (0..dice.below(3)).map(|_| odd_device(dice)).collect(),
        price: odd32(dice, 5),
        budgets: (0..dice.below(2)).map(|_| odd(dice, 2)).collect(),
        most_moves: odd32(dice, 4),
        after_seconds: *dice.pick(&[0, 5, u64::MAX]),
    };
    Snapshot {
        geometries: (0..dice.below(4)).map(|_| odd_geometry(dice)).collect(),
        nodes: (0..dice.below(4)).map(|n| node(dice, n)).collect(),
        requests: (0..dice.below(7)).map(|id| odd_request(dice, id)).collect(),
        movable: (0..dice.below(4)).map(|id| movable(dice, id)).collect(),
        budgets: (0..dice.below(3)).map(|_| odd32(dice, 3)).collect(),
        demand: (0..dice.below(5).saturating_sub(2))
            .map(|id| Demand { request: odd_request(dice, id), weight: odd32(dice, 9) })
            .collect(),
    }
}

fn odd_placement(dice: &mut Dice) -> Placement {
    let devices = (0..dice.below(3)).map(|_| odd_device(dice)).collect();
    Placement { request: odd(dice, 6), node: odd(dice, 3), devices }
}

#[test]
fn plans_are_legal_and_plans_of_nonsense_are_judged() {
    for seed in 0..10_000 {
        let mut dice = Dice(seed);
        let snapshot = odd_snapshot(&mut dice);
        let mut plan = plan(&snapshot);
        assert_eq!(violations(&snapshot, &plan), Vec::<String>::new(), "seed {seed}: {plan:?}");
        plan.placements.extend((0..dice.below(3)).map(|_| odd_placement(&mut dice)));
        if dice.percent(50) {
            let place = odd_placement(&mut dice);
            let step = |_| {
                let Placement { node, devices, .. } = odd_placement(&mut dice);
                Move { pod: odd(&mut dice, 4), node, devices }
            };
            let moves = (0..2).map(step).collect();
            plan.rooms.push(Room { place, moves });
            assert_ne!(violations(&snapshot, &plan), Vec::<String>::new(), "seed {seed}: {plan:?}");
        }
    }
}
