//! One planning cycle.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::explain;
use crate::fleet::Fleet;
use crate::gang;
use crate::plan::{Plan, Refusal, RefusalKind};
use crate::rooms::{self, placement};
use crate::snapshot::Snapshot;

/// Decides which request gets which devices.
///
/// Requests of higher priority are served first, those of equal priority in the snapshot's order; what one takes, the
/// next does not find. Each gets the cheapest place by [`crate::value::Cost`]; equal prices are decided by fuller (or,
/// with `Spread`, emptier) nodes and then by GPU UUID, so that names of nodes decide nothing.
///
/// Where that leaves somebody without room, two other orders are tried: of equal priority the largest first, and those who
/// have a place, the largest first, before the others. One counts if all who had a place have one still, and more others.
///
/// For those who still have none, room is looked for by moving others, see [`crate::snapshot::Movable`].
pub fn plan(snapshot: &Snapshot) -> Plan {
    let (mut plan, mut fleet) = without_moves(snapshot);
    if !snapshot.movable.is_empty() {
        rooms::make(&mut fleet, &mut plan);
    }
    plan
}

fn without_moves(snapshot: &Snapshot) -> (Plan, Fleet<'_>) {
    let priority = |index: usize| std::cmp::Reverse(snapshot.requests[index].priority);
    let mut order: Vec<usize> = (0..snapshot.requests.len()).collect();
    order.sort_by_key(|&index| priority(index));
    let (mut plan, mut fleet, sizes) = serve(snapshot, &order);
    let settled = |plan: &Plan| {
        let hopeful = |refusal: &Refusal| refusal.kind != RefusalKind::NoSuchDevice;
        plan.placements.is_empty() || !plan.refusals.iter().any(hopeful)
    };
    if settled(&plan) {
        return (plan, fleet);
    }
    let placed: HashSet<usize> = plan.placements.iter().map(|placement| placement.request).collect();
    let largest_first = {
        let mut order = order.clone();
        order.sort_by_key(|&index| (priority(index), std::cmp::Reverse(sizes[index])));
        order
    };
    // Those who had none afterwards, in their order: room is what is left for them.
    let placed_first = {
        let size = |index: &usize| std::cmp::Reverse(if placed.contains(index) { sizes[*index] } else { 0 });
        order.sort_by_key(|index| (priority(*index), !placed.contains(index), size(index)));
        order
    };
    for order in [largest_first, placed_first] {
        if settled(&plan) {
            break;
        }
        let (other, other_fleet, _) = serve(snapshot, &order);
        let still: HashSet<usize> = other.placements.iter().map(|placement| placement.request).collect();
        if placed.is_subset(&still) && other.placements.len() > plan.placements.len() {
            (plan, fleet) = (other, other_fleet);
        }
    }
    (plan, fleet)
}

/// Serves the requests one after the other, gangs where their first member is. Also answers the fewest memory slices that
/// each takes.
fn serve<'a>(snapshot: &'a Snapshot, order: &[usize]) -> (Plan, Fleet<'a>, Vec<u32>) {
    let mut fleet = Fleet::of(snapshot);
    let mut sizes = vec![0; snapshot.requests.len()];
    let mut plan = Plan::default();
    // Room only shrinks within a cycle: what was refused once is refused again, with the same sentence.
    let mut refused = HashMap::new();
    let mut gangs: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for &index in order {
        if let Some(gang) = &snapshot.requests[index].gang {
            gangs.entry(gang).or_default().push(index);
        }
    }
    for &index in order {
        let request = &snapshot.requests[index];
        let asked = fleet.numbered(request);
        sizes[index] = fleet.least_slices(asked.shape);
        if let Some(gang) = &request.gang {
            if let Some(members) = gangs.remove(gang.as_str()) {
                gang::serve(&mut fleet, gang, &members, &mut plan);
            }
            continue;
        }
        let key = (asked.shape, asked.pod, &request.avoid);
        if let Some(&earlier) = refused.get(&key) {
            let refusal: &Refusal = &plan.refusals[earlier];
            plan.refusals.push(Refusal { request: index, ..refusal.clone() });
            continue;
        }
        match fleet.best(asked) {
            Some((node, solution)) => {
                fleet.take(asked, node, &solution);
                plan.placements.push(placement(index, request, node, &solution));
            }
            None => {
                refused.insert(key, plan.refusals.len());
                plan.refusals.push(explain::refusal(&mut fleet, index, asked));
            }
        }
    }
    (plan, fleet, sizes)
}
