//! Plans are legal, complete, and the same everywhere.

mod common;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::fleet::Fleet;
use kerf_planner::plan;
use kerf_planner::snapshot::*;
use proptest::prelude::*;

fn world(seed: u64, nodes: usize, gpus: usize, requests: usize) -> Snapshot {
    let mut dice = Dice(seed);
    let mut snapshot = random_cluster(&mut dice, nodes, gpus, geometries());
    for id in 0..requests {
        let needs = 1 + usize::from(dice.percent(30)) + usize::from(dice.percent(10));
        let request = random_request(&mut dice, id, needs, &snapshot);
        snapshot.requests.push(request);
    }
    if dice.percent(60) {
        add_shares(&mut dice, &mut snapshot);
    }
    snapshot
}

/// The plan with GPUs' UUIDs for indices and without sentences.
fn by_uuid(snapshot: &Snapshot) -> Vec<String> {
    let plan = plan(snapshot);
    let place = |p: &kerf_planner::plan::Placement| {
        let devices =
            p.devices.iter().map(|d| (&snapshot.nodes[p.node].gpus[d.gpu].uuid, d.instance, d.share));
        format!("{} {:?}", snapshot.requests[p.request].id, devices.collect::<Vec<_>>())
    };
    plan.placements.iter().map(place).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_are_legal(seed: u64, nodes in 1usize..6, gpus in 0usize..5, requests in 0usize..25) {
        let snapshot = world(seed, nodes, gpus, requests);
        let plan = plan(&snapshot);
        prop_assert_eq!(violations(&snapshot, &plan), Vec::<String>::new());
    }

    #[test]
    fn a_request_is_placed_exactly_if_there_is_a_place(seed: u64, nodes in 1usize..3, gpus in 1usize..3) {
        let snapshot = world(seed, nodes, gpus, 1);
        let devices: u32 = snapshot.requests[0].devices.iter().map(|d| d.alternatives[0].count).sum();
        prop_assume!(devices <= 3);
        let placed = !plan(&snapshot).placements.is_empty();
        prop_assert_eq!(placed, brute_force(&snapshot), "{:?}", plan(&snapshot));
    }

    #[test]
    fn names_and_their_order_decide_nothing(seed: u64, nodes in 2usize..6, gpus in 1usize..4, requests in 1usize..15) {
        let before = world(seed, nodes, gpus, requests);
        let mut after = before.clone();
        // Names backwards, and nodes in the order of their new names: everything that names a node by index follows.
        after.nodes.reverse();
        for (n, node) in after.nodes.iter_mut().enumerate() {
            node.name = format!("other{n}");
        }
        let moved = |node: usize| nodes - 1 - node;
        let demand = after.demand.iter_mut().map(|demand| &mut demand.request);
        for request in after.requests.iter_mut().chain(demand) {
            request.avoid = request.avoid.iter().map(|&node| moved(node)).collect();
            for constraint in &mut request.constraints {
                let values = std::mem::take(&mut constraint.values).into_iter();
                constraint.values = values.map(|((node, gpu), value)| ((moved(node), gpu), value)).collect();
            }
            for want in request.devices.iter_mut().flat_map(|need| &mut need.alternatives) {
                want.gpus = want.gpus.as_ref().map(|set| set.iter().map(|&(n, g)| (moved(n), g)).collect());
            }
        }
        prop_assert_eq!(by_uuid(&before), by_uuid(&after));
    }

    #[test]
    fn an_empty_node_more_hinders_no_request(seed: u64, nodes in 1usize..4, gpus in 1usize..4) {
        let mut snapshot = world(seed, nodes, gpus, 1);
        let placed = !plan(&snapshot).placements.is_empty();
        let geometry = snapshot.geometries[0].clone();
        snapshot.nodes.push(node("new", vec![gpu("GPU-new", 0, &geometry)]));
        prop_assert!(!placed || !plan(&snapshot).placements.is_empty());
    }

    #[test]
    fn an_empty_node_more_hinders_none_of_many_equal_requests(seed: u64, nodes in 1usize..4, gpus in 1usize..4) {
        let mut snapshot = world(seed, nodes, gpus, 1);
        let mut one = snapshot.requests[0].clone();
        // Of one profile each: with a choice of sizes, more room may well lead to fewer, larger devices.
        one.devices.truncate(1);
        one.devices[0].alternatives.truncate(1);
        let want = &one.devices[0].alternatives[0];
        prop_assume!(!want.whole && want.profiles.values().all(|profiles| profiles.len() == 1));
        snapshot.requests = (0..12).map(|i| Request { id: format!("p{i}"), ..one.clone() }).collect();
        let before = plan(&snapshot).placements.len();
        let geometry = snapshot.geometries[0].clone();
        snapshot.nodes.push(node("new", vec![gpu("GPU-new", 0, &geometry)]));
        prop_assert!(plan(&snapshot).placements.len() >= before);
    }

    #[test]
    fn the_same_question_has_the_same_answer(seed: u64, nodes in 1usize..5, gpus in 1usize..4, requests in 0usize..20) {
        prop_assert_eq!(plan(&world(seed, nodes, gpus, requests)), plan(&world(seed, nodes, gpus, requests)));
    }

    #[test]
    fn what_is_placed_stays_placed(seed: u64, nodes in 1usize..5, gpus in 1usize..4, requests in 0usize..20) {
        // What is refused in a cycle is refused by the next one, too: nothing came free.
        let snapshot = world(seed, nodes, gpus, requests);
        let first = plan(&snapshot);
        let mut later = carry_out(&snapshot, &first);
        later.requests = first.refusals.iter().map(|refusal| snapshot.requests[refusal.request].clone()).collect();
        prop_assert_eq!(plan(&later).placements, vec![]);
    }

    #[test]
    fn what_is_kept_of_nodes_answers_as_a_look_at_all_of_them(seed: u64, nodes in 1usize..6, requests in 1usize..12) {
        let snapshot = world(seed, nodes, 3, requests);
        let mut dice = Dice(seed);
        let mut fleet = Fleet::of(&snapshot);
        // Each step is a request by its index, and whether its place is given back.
        let mut steps: Vec<(usize, usize, std::rc::Rc<kerf_planner::place::Solution>, bool)> = Vec::new();
        let mut there = Vec::new();
        for (index, request) in snapshot.requests.iter().chain(&snapshot.requests).enumerate() {
            let asked = fleet.numbered(request);
            let best = fleet.best(asked);
            let mut fresh = Fleet::of(&snapshot);
            for (which, node, place, back) in &steps {
                let asked = fresh.numbered(&snapshot.requests[*which]);
                if *back { fresh.put_back(asked, *node, place) } else { fresh.take(asked, *node, place) }
            }
            let asked_anew = fresh.numbered(request);
            let anew = fresh.best(asked_anew);
            let told = |best: &Option<(usize, std::rc::Rc<kerf_planner::place::Solution>)>| {
                best.as_ref().map(|(node, place)| (*node, place.choice.clone(), place.cost))
            };
            prop_assert_eq!(told(&best), told(&anew));
            let which = index % snapshot.requests.len();
            if let Some((node, place)) = best {
                fleet.take(asked, node, &place);
                steps.push((which, node, place.clone(), false));
                there.push((which, node, place));
            }
            if dice.percent(40) && !there.is_empty() {
                let (which, node, place) = there.swap_remove(dice.below(there.len()));
                let asked = fleet.numbered(&snapshot.requests[which]);
                fleet.put_back(asked, node, &place);
                steps.push((which, node, place, true));
            }
        }
    }

    #[test]
    fn the_index_finds_the_price_that_a_look_at_every_node_finds(seed: u64, nodes in 1usize..6, gpus in 1usize..5, requests in 1usize..25) {
        let snapshot = Snapshot { demand: Vec::new(), ..world(seed, nodes, gpus, requests) };
        let mut fleet = Fleet::of(&snapshot);
        let mut dice = Dice(seed);
        let mut placed = Vec::new();
        for request in &snapshot.requests {
            let asked = fleet.numbered(request);
            let mut by_node = Vec::new();
            for node in 0..fleet.nodes() {
                if fleet.fits(node, asked) {
                    by_node.extend(fleet.place_on(asked, node));
                }
            }
            let plain = by_node.iter().map(|place| (place.choice.clone(), place.cost)).min();
            // Asked again and again, the answer stays, however it is found.
            let best = fleet.best(asked);
            for _ in 0..6 {
                let again = fleet.best(asked);
                let place = |best: &Option<(usize, std::rc::Rc<kerf_planner::place::Solution>)>| {
                    best.as_ref().map(|(node, place)| format!("{node} {place:?}"))
                };
                prop_assert_eq!(place(&again), place(&best));
            }
            prop_assert_eq!(best.as_ref().map(|(_, place)| (place.choice.clone(), place.cost)), plain);
            if let Some((node, place)) = best {
                fleet.take(asked, node, &place);
                placed.push((asked, node, place));
            }
            // The fleet empties, too.
            if dice.percent(30) && !placed.is_empty() {
                let (asked, node, place) = placed.swap_remove(dice.below(placed.len()));
                fleet.put_back(asked, node, &place);
            }
        }
        // Everybody gone, all that was free is free again.
        for (asked, node, place) in placed {
            fleet.put_back(asked, node, &place);
        }
        let before = Fleet::of(&snapshot);
        for node in 0..fleet.nodes() {
            for gpu in 0..fleet.gpus(node).len() {
                prop_assert_eq!(&fleet.state(node, gpu).taken, &before.state(node, gpu).taken);
                prop_assert_eq!(fleet.state(node, gpu).taken_whole, before.state(node, gpu).taken_whole);
            }
        }
    }
}
