//! Room made by moving: legal, minimal, and nothing changed where none is found.

mod common;

use std::rc::Rc;

use common::*;
use kerf_planner::fleet::{Fleet, Numbered};
use kerf_planner::moves::{Limits, Outcome, Tenant, TenantId, Tenants, carry_out, make_room};
use kerf_planner::occupancy::{Device, slices};
use kerf_planner::snapshot::*;
use proptest::prelude::*;

const UNBOUNDED: Limits = Limits { moves: 4, width: u32::MAX, work: 20_000_000 };

/// Requests for each profile of the only geometry, and a cluster of empty GPUs, two on a node.
fn world(geometry: &Geometry, gpus: usize) -> Snapshot {
    let mut snapshot = Snapshot { geometries: vec![geometry.clone()], ..Snapshot::default() };
    for first in (0..gpus).step_by(2) {
        let here = (first..gpus.min(first + 2)).map(|i| gpu(&format!("GPU-{i}"), 0, geometry)).collect();
        snapshot.nodes.push(node(&format!("n{first}"), here));
    }
    let one = |name: &str| request(name, vec![want(&snapshot.geometries, name)]);
    snapshot.requests = geometry.profiles.iter().map(|profile| one(&profile.name)).collect();
    snapshot
}

/// A fleet filled at random, with holes.
fn filled<'a>(
    snapshot: &'a Snapshot,
    dice: &mut Dice,
    movable: u64,
) -> (Fleet<'a>, Tenants<'a>, Vec<TenantId>) {
    let (mut fleet, mut tenants, mut ids) = (Fleet::of(snapshot), Tenants::default(), Vec::new());
    for _ in 0..14 * snapshot.nodes.len() {
        let asked = fleet.numbered(&snapshot.requests[dice.below(snapshot.requests.len())]);
        // Any place, not the best: holes are what this is about.
        let places = fleet.places(asked, usize::MAX);
        if places.is_empty() {
            continue;
        }
        let (node, place) = places[dice.below(places.len())].clone();
        fleet.take(asked, node, &place);
        let price = dice.percent(movable).then(|| 1 + dice.below(3) as u32);
        ids.push(tenants.enter(Tenant { asked, node, place, price, budgets: &[] }));
    }
    ids.retain(|&id| {
        let stays = !dice.percent(45);
        if !stays {
            let tenant = tenants.leave(id).expect("a tenant");
            fleet.put_back(tenant.asked, tenant.node, &tenant.place);
        }
        stays
    });
    (fleet, tenants, ids)
}

/// Profile, GPU (by node and index) and slices of everybody.
type Occupants = Vec<(ProfileIndex, (NodeIndex, GpuIndex), u64, bool)>;

fn occupants(tenants: &Tenants<'_>, ids: &[TenantId], geometry: &Geometry) -> Occupants {
    let of = |&id: &TenantId| {
        let tenant = tenants.get(id).expect("a tenant");
        let [chosen] = tenant.place.devices.as_slice() else { panic!("one device each") };
        let Device::Instance { profile, start } = chosen.offer.device else { panic!("instances only") };
        let taken = slices(start, geometry.profiles[profile].size);
        (profile, (tenant.node, chosen.gpu), taken, tenant.price.is_some())
    };
    ids.iter().map(of).collect()
}

/// Whether the pieces fit into what the masks leave free, found the plain way.
fn packs(geometry: &Geometry, masks: &mut [u64], pieces: &[ProfileIndex]) -> bool {
    let Some((&piece, rest)) = pieces.split_first() else { return true };
    let shape = &geometry.profiles[piece];
    for gpu in 0..masks.len() {
        for &start in &shape.starts {
            let mask = slices(start, shape.size);
            if masks[gpu] & mask == 0 {
                masks[gpu] |= mask;
                let done = packs(geometry, masks, rest);
                masks[gpu] &= !mask;
                if done {
                    return true;
                }
            }
        }
    }
    false
}

/// The fewest tenants that have to move so that the piece fits, up to four: every set of them is tried.
fn fewest(
    geometry: &Geometry,
    gpus: &[(NodeIndex, GpuIndex)],
    there: &Occupants,
    piece: ProfileIndex,
) -> Option<usize> {
    let movable: Vec<usize> = (0..there.len()).filter(|&i| there[i].3).collect();
    (0..=4usize.min(movable.len())).find(|&size| {
        sets(&movable, size).into_iter().any(|set| {
            let mut masks = vec![0u64; gpus.len()];
            for (i, (_, gpu, taken, _)) in there.iter().enumerate() {
                if !set.contains(&i) {
                    masks[gpus.iter().position(|other| other == gpu).expect("a GPU")] |= taken;
                }
            }
            let mut pieces: Vec<ProfileIndex> = set.iter().map(|&i| there[i].0).chain([piece]).collect();
            pieces.sort_by_key(|&p| std::cmp::Reverse(geometry.profiles[p].size));
            packs(geometry, &mut masks, &pieces)
        })
    })
}

fn sets(of: &[usize], size: usize) -> Vec<Vec<usize>> {
    let Some((&first, rest)) = of.split_first() else {
        return if size == 0 { vec![vec![]] } else { vec![] };
    };
    if size == 0 {
        return vec![vec![]];
    }
    let with = sets(rest, size - 1).into_iter().map(|mut set| {
        set.push(first);
        set
    });
    with.chain(sets(rest, size)).collect()
}

/// Geometries where slices alone decide, as the oracle assumes.
fn plain() -> [Geometry; 3] {
    let without = |mut geometry: Geometry| {
        geometry.profiles.retain(|profile| profile.engines == Engines::default() || profile.size == 8);
        geometry
    };
    [without(seven()), twelve(), Geometry { name: "six".into(), memory_slices: 6, ..twelve_halved() }]
}

fn twelve_halved() -> Geometry {
    let mut geometry = twelve();
    geometry.profiles.truncate(2);
    for profile in &mut geometry.profiles {
        profile.starts.retain(|&start| start < 6);
        profile.max_instances = 6 / profile.size;
    }
    geometry
}

/// What one search came to, and the fewest moves there could be.
struct Trial {
    outcome: Outcome,
    fewest: Option<usize>,
}

fn trial(seed: u64, gpus: usize, movable: u64, limits: Limits) -> Result<Option<Trial>, TestCaseError> {
    let mut dice = Dice(seed);
    let geometry = plain()[dice.below(3)].clone();
    let snapshot = world(&geometry, gpus);
    let (mut fleet, mut tenants, ids) = filled(&snapshot, &mut dice, movable);
    let wanted = dice.below(snapshot.requests.len());
    let asked: Numbered<'_> = fleet.numbered(&snapshot.requests[wanted]);
    if fleet.best(asked).is_some() {
        return Ok(None);
    }
    let there = occupants(&tenants, &ids, &geometry);
    let all: Vec<(NodeIndex, GpuIndex)> =
        (0..fleet.nodes()).flat_map(|n| (0..fleet.gpus(n).len()).map(move |g| (n, g))).collect();
    let before: Vec<Vec<u32>> = (0..fleet.nodes()).map(|node| fleet.gpus(node).to_vec()).collect();
    let outcome = make_room(&mut fleet, &mut tenants, asked, limits);
    for (node, gpus) in before.iter().enumerate() {
        prop_assert_eq!(fleet.gpus(node), gpus.as_slice(), "the search changed the fleet");
    }
    prop_assert_eq!(&occupants(&tenants, &ids, &geometry), &there, "the search changed the tenants");
    if let Outcome::Found(room) = &outcome {
        carry_out(&mut fleet, &mut tenants, asked, room);
        let place = Rc::clone(&room.place);
        let newcomer = tenants.enter(Tenant { asked, node: room.node, place, price: None, budgets: &[] });
        let after = occupants(&tenants, &[ids.as_slice(), &[newcomer]].concat(), &geometry);
        for (i, one) in after.iter().enumerate() {
            for other in &after[i + 1..] {
                prop_assert!(one.1 != other.1 || one.2 & other.2 == 0, "{one:?} and {other:?} overlap");
            }
        }
        let mut moved = 0;
        for (old, new) in there.iter().zip(&after) {
            prop_assert_eq!(old.0, new.0, "a profile changed");
            if old != new {
                prop_assert!(old.3, "one that may not be moved was");
                moved += 1;
            }
        }
        prop_assert!(moved <= room.moves.len() && room.moves.len() <= limits.moves as usize);
    }
    Ok(Some(Trial { outcome, fewest: fewest(&geometry, &all, &there, wanted) }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn without_bounds_the_fewest_moves_are_found(seed: u64, gpus in 1usize..4, movable in 30u64..101) {
        let Some(trial) = trial(seed, gpus, movable, UNBOUNDED)? else { return Ok(()) };
        match trial.outcome {
            Outcome::Found(room) => prop_assert_eq!(Some(room.moves.len()), trial.fewest),
            Outcome::Nothing => prop_assert_eq!(trial.fewest, None),
            Outcome::GaveUp => prop_assert!(false, "gave up without bounds"),
        }
    }
}

/// Places one of each profile, in this order, and says how many would have to move for one more.
fn after(snapshot: &Snapshot, before: &[&str], then: &str) -> Option<usize> {
    let (mut fleet, mut tenants) = (Fleet::of(snapshot), Tenants::default());
    let named = |name: &str| snapshot.requests.iter().find(|request| request.id == name).expect("a profile");
    for name in before {
        let asked = fleet.numbered(named(name));
        let (node, place) = fleet.best(asked).expect("room");
        fleet.take(asked, node, &place);
        tenants.enter(Tenant { asked, node, place, price: Some(1), budgets: &[] });
    }
    let asked = fleet.numbered(named(then));
    assert!(fleet.best(asked).is_none(), "{then} has a place as it is");
    match make_room(&mut fleet, &mut tenants, asked, Limits::USUAL) {
        Outcome::Found(room) => {
            carry_out(&mut fleet, &mut tenants, asked, &room);
            Some(room.moves.len())
        }
        Outcome::Nothing | Outcome::GaveUp => None,
    }
}

/// Two nodes with a GPU each. The first pod could do with either and has slice 6 of the first; then comes one for the
/// first node only, and for slices 0 to 3, which are free.
fn beside(geometry: &Geometry, first: &str, then: &str, cpus: [i128; 2]) -> Option<usize> {
    let mut snapshot = world(geometry, 1);
    snapshot.nodes[0].free_milli.insert("cpu".into(), 2000);
    let mut second = snapshot.nodes[0].clone();
    (second.name, second.gpus[0].uuid) = ("n1".into(), "GPU-1".into());
    snapshot.nodes.push(second);
    let only_there = Request {
        id: "only there".into(),
        avoid: [1].into(),
        ..request("", vec![want(&snapshot.geometries, then)])
    };
    snapshot.requests.push(only_there);
    for request in &mut snapshot.requests {
        let cpus = if request.id == first { cpus[0] } else { cpus[1] };
        request.pod.milli.insert("cpu".into(), cpus);
    }
    after(&snapshot, &[first], "only there")
}

#[test]
fn what_is_short_may_be_an_engine() {
    let mut geometry = seven();
    let four = profile(&geometry, "4g.40gb");
    geometry.profiles[four].engines.ofa = 1;
    assert_eq!(beside(&geometry, "1g.10gb+me", "4g.40gb", [0, 0]), Some(1));
}

#[test]
fn what_is_short_may_be_the_nodes_processors() {
    assert_eq!(beside(&seven(), "1g.10gb", "4g.40gb", [1000, 2000]), Some(1));
}

#[test]
fn what_is_short_may_be_processors_where_another_gpu_is_empty() {
    // On the first node one pod has all processors; the GPU beside it is empty.
    let geometry = seven();
    let mut snapshot = world(&geometry, 2);
    let mut second = snapshot.nodes[0].clone();
    second.name = "n1".into();
    for (i, gpu) in second.gpus.iter_mut().enumerate() {
        gpu.uuid = format!("GPU-{}", 2 + i);
    }
    snapshot.nodes.push(second);
    for node in &mut snapshot.nodes {
        node.free_milli.insert("cpu".into(), 4000);
    }
    snapshot.nodes[0].gpus[1].allowed = [profile(&geometry, "4g.40gb")].into();
    snapshot.nodes[0].gpus[0].allowed.remove(&profile(&geometry, "4g.40gb"));
    for request in &mut snapshot.requests {
        request.pod.milli.insert("cpu".into(), 4000);
    }
    let here = Request {
        id: "here".into(),
        avoid: [1].into(),
        ..request("", vec![want(&snapshot.geometries, "4g.40gb")])
    };
    snapshot.requests.push(Request {
        pod: PodNeeds { milli: [("cpu".to_owned(), 1000)].into(), ..PodNeeds::default() },
        ..here
    });
    assert_eq!(after(&snapshot, &["1g.10gb"], "here"), Some(1));
}

#[test]
fn with_the_usual_bounds_nearly_always_the_fewest_moves_are_found() {
    let (mut solvable, mut best, mut worse) = (0, 0, Vec::new());
    for seed in 0..6000 {
        let Some(trial) = trial(seed, 3, 80, Limits::USUAL).expect("a legal plan") else { continue };
        let Some(fewest) = trial.fewest else { continue };
        solvable += 1;
        match trial.outcome {
            Outcome::Found(room) if room.moves.len() == fewest => best += 1,
            Outcome::Found(room) if room.moves.len() == fewest + 1 => {}
            other => worse.push((seed, fewest, other)),
        }
    }
    println!("{best} of {solvable} with the fewest moves");
    assert!(solvable > 300, "only {solvable} cases could be solved");
    assert!(best * 100 >= solvable * 95, "{best} of {solvable}");
    assert!(worse.is_empty(), "{} of {solvable}: {worse:?}", worse.len());
}
