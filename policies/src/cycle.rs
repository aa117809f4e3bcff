//! One planning cycle.

use std::collections::HashMap;

use crate::explain;
use crate::fleet::Fleet;
use crate::occupancy::Device;
use crate::place::Solution;
use crate::plan::{PlacedDevice, Placement, Plan, PlannedInstance};
use crate::snapshot::{NodeIndex, Request, Snapshot};

/// Decides which request gets which devices.
///
/// Requests of higher priority are served first, those of equal priority in the snapshot's order; what one takes, the
/// next does not find. Each gets the cheapest place by [`crate::value::Cost`]; equal prices are decided by fuller (or,
/// with `Spread`, emptier) nodes and then by GPU UUID, so that names of nodes decide nothing.
pub fn plan(snapshot: &Snapshot) -> Plan {
    let mut fleet = Fleet::of(snapshot);
    let mut plan = Plan::default();
    let mut order: Vec<usize> = (0..snapshot.requests.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(snapshot.requests[index].priority));
    // Room only shrinks within a cycle: what was refused once is refused again, with the same sentence.
    let mut refused = HashMap::new();
    for index in order {
        let request = &snapshot.requests[index];
        let asked = fleet.numbered(request);
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
    plan
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
