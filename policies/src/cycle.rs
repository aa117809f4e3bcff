//! One planning cycle.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::explain;
use crate::fleet::{Base, Fleet};
use crate::gang;
use crate::plan::{Plan, Refusal, RefusalKind, Scope, Verdict};
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
    Planner::default().plan(snapshot)
}

/// Plans again and again, and keeps what is known of nodes that stay as they are: the answers are those of [`plan`].
#[derive(Debug, Default)]
pub struct Planner(Option<Base>);

impl Planner {
    /// See [`plan`].
    pub fn plan(&mut self, snapshot: &Snapshot) -> Plan {
        let mut fleet = Fleet::with(snapshot, self.0.take());
        let mut plan = without_moves(&mut fleet);
        if !snapshot.movable.is_empty() {
            rooms::make(&mut fleet, &mut plan);
        }
        self.0 = Some(fleet.into_base());
        plan
    }
}

/// The fleet is afterwards as the plan leaves it.
fn without_moves(fleet: &mut Fleet<'_>) -> Plan {
    let snapshot = fleet.snapshot;
    let priority = |index: usize| std::cmp::Reverse(snapshot.requests[index].priority);
    let mut order: Vec<usize> = (0..snapshot.requests.len()).collect();
    order.sort_by_key(|&index| priority(index));
    let (mut plan, sizes) = serve(fleet, &order);
    let settled = |plan: &Plan| {
        // Another order helps none that has no place even without the others.
        let hopeful = |refusal: &Refusal| match &refusal.verdict {
            Verdict::Impossible(proof) => {
                proof.scope != Scope::WhateverEnds && proof.scope != Scope::Beside(0)
            }
            Verdict::Exhausted | Verdict::NotFound => refusal.kind != RefusalKind::NoSuchDevice,
        };
        plan.placements.is_empty() || !plan.refusals.iter().any(hopeful)
    };
    if settled(&plan) {
        return plan;
    }
    let placed: HashSet<usize> = plan.placements.iter().map(|placement| placement.request).collect();
    let in_order = order.clone();
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
    let (mut best, mut last) = (&in_order, &in_order);
    for order in [&largest_first, &placed_first] {
        if settled(&plan) {
            break;
        }
        fleet.reset();
        let (other, _) = serve(fleet, order);
        last = order;
        let still: HashSet<usize> = other.placements.iter().map(|placement| placement.request).collect();
        if placed.is_subset(&still) && other.placements.len() > plan.placements.len() {
            (plan, best) = (other, order);
        }
    }
    if !std::ptr::eq(best, last) && !snapshot.movable.is_empty() {
        fleet.reset();
        serve(fleet, best);
    }
    plan
}

/// Serves the requests one after the other, gangs where their first member is. Also answers the fewest memory slices that
/// each takes.
fn serve(fleet: &mut Fleet<'_>, order: &[usize]) -> (Plan, Vec<u32>) {
    let snapshot = fleet.snapshot;
    let mut sizes = vec![0; snapshot.requests.len()];
    let mut plan = Plan::default();
    // Room only shrinks within a cycle: what was refused once is refused again, with the same sentence.
    let mut refused = HashMap::new();
    let mut refused_gangs = HashMap::new();
    let mut gangs: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for &index in order {
        if let Some(gang) = &snapshot.requests[index].gang {
            gangs.entry(gang).or_default().push(index);
        }
    }
    let mut work = gang::WORK;
    for &index in order {
        let request = &snapshot.requests[index];
        let asked = fleet.numbered(request);
        sizes[index] = fleet.least_slices(asked.shape);
        if let Some(gang) = &request.gang {
            if let Some(members) = gangs.remove(gang.as_str()) {
                gang::serve(fleet, gang, &members, &mut refused_gangs, &mut work, &mut plan);
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
                plan.refusals.push(explain::refusal(fleet, index, asked, plan.placements.len()));
            }
        }
    }
    (plan, sizes)
}
