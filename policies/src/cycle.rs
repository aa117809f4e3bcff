//! One planning cycle.

use std::collections::{HashMap, HashSet};

use crate::explain;
use crate::fleet::Fleet;
use crate::occupancy::Device;
use crate::place::Solution;
use crate::plan::{PlacedDevice, Placement, Plan, PlannedInstance, RefusalKind};
use crate::snapshot::{NodeIndex, Request, Snapshot};

/// Decides which request gets which devices.
///
/// Requests of higher priority are served first, those of equal priority in the snapshot's order; what one takes, the
/// next does not find. Each gets the cheapest place by [`crate::value::Cost`]; equal prices are decided by fuller (or,
/// with `Spread`, emptier) nodes and then by GPU UUID, so that names of nodes decide nothing.
///
/// Where that leaves somebody without room, the largest of equal priority are served first, by way of trial: it counts
/// if all who had a place have one still, and others, too.
pub fn plan(snapshot: &Snapshot) -> Plan {
    let priority = |index: usize| std::cmp::Reverse(snapshot.requests[index].priority);
    let mut order: Vec<usize> = (0..snapshot.requests.len()).collect();
    order.sort_by_key(|&index| priority(index));
    let (plan, sizes) = serve(snapshot, &order);
    if plan.placements.is_empty() || !plan.refusals.iter().any(|refusal| refusal.kind == RefusalKind::NoRoom)
    {
        return plan;
    }
    order.sort_by_key(|&index| (priority(index), std::cmp::Reverse(sizes[index])));
    let (other, _) = serve(snapshot, &order);
    let placed: HashSet<usize> = other.placements.iter().map(|placement| placement.request).collect();
    let all_still = plan.placements.iter().all(|placement| placed.contains(&placement.request));
    if all_still && other.placements.len() > plan.placements.len() { other } else { plan }
}

/// Serves the requests one after the other. Also answers the fewest memory slices that each takes.
fn serve(snapshot: &Snapshot, order: &[usize]) -> (Plan, Vec<u32>) {
    let mut fleet = Fleet::of(snapshot);
    let mut sizes = vec![0; snapshot.requests.len()];
    let mut plan = Plan::default();
    // Room only shrinks within a cycle: what was refused once is refused again, with the same sentence.
    let mut refused = HashMap::new();
    for &index in order {
        let request = &snapshot.requests[index];
        let asked = fleet.numbered(request);
        sizes[index] = fleet.least_slices(asked.shape);
        let key = (asked.shape, asked.pod, &request.avoid);
        if let Some(&earlier) = refused.get(&key) {
            let refusal = &plan.refusals[earlier];
            plan.refusals
                .push(crate::plan::Refusal { request: index, ..crate::plan::Refusal::clone(refusal) });
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
    (plan, sizes)
}

fn placement(index: usize, request: &Request, node: NodeIndex, solution: &Solution) -> Placement {
    let placed = |chosen: &crate::place::Chosen| {
        let need = &request.devices[chosen.need];
        PlacedDevice {
            request: need.name.clone(),
            subrequest: need.alternatives[chosen.alternative].subrequest.clone(),
            gpu: chosen.gpu,
            instance: match chosen.offer.device {
                Device::Whole => None,
                Device::Instance { profile, start } => {
                    Some(PlannedInstance { profile, start, exists: chosen.offer.exists })
                }
            },
        }
    };
    Placement { request: index, node, devices: solution.devices.iter().map(placed).collect() }
}
