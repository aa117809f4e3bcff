//! Gangs: several requests that get their places together or not at all.

use crate::catalog::StateId;
use crate::explain;
use crate::fleet::{Fleet, Numbered, PodId};
use crate::plan::{Placement, Plan, Refusal};
use crate::rooms::placement;
use crate::snapshot::NodeIndex;

/// Places all members, or refuses all with what the first of them that found no room was told.
///
/// They are served one after the other, in their order; if that leaves somebody without room, the largest first.
pub fn serve(fleet: &mut Fleet<'_>, gang: &str, members: &[usize], plan: &mut Plan) {
    let snapshot = fleet.snapshot;
    let mut asked: Vec<(usize, Numbered<'_>)> =
        members.iter().map(|&index| (index, fleet.numbered(&snapshot.requests[index]))).collect();
    let first = match all_of(fleet, &asked) {
        Ok(placements) => return plan.placements.extend(placements),
        Err(refusal) => refusal,
    };
    asked.sort_by_key(|(_, asked)| std::cmp::Reverse(fleet.least_slices(asked.shape)));
    if let Ok(placements) = all_of(fleet, &asked) {
        return plan.placements.extend(placements);
    }
    let (refusal, placed) = first;
    let message = format!(
        "the {} pods of gang {gang} get their places together or not at all; beside {placed} of them {} {}",
        members.len(),
        snapshot.requests[refusal.request].id,
        refusal.message
    );
    plan.refusals.extend(members.iter().map(|&request| Refusal {
        request,
        message: message.clone(),
        ..refusal.clone()
    }));
}

/// All places, or the refusal of the first that has none beside so many others. In this case nothing is taken.
fn all_of(
    fleet: &mut Fleet<'_>,
    members: &[(usize, Numbered<'_>)],
) -> Result<Vec<Placement>, (Refusal, usize)> {
    let mut placements = Vec::with_capacity(members.len());
    let mut before: Vec<(NodeIndex, Vec<StateId>, PodId)> = Vec::with_capacity(members.len());
    for &(index, asked) in members {
        let Some((node, solution)) = fleet.best(asked) else {
            let refusal = explain::refusal(fleet, index, asked);
            let placed = before.len();
            while let Some((node, gpus, pod)) = before.pop() {
                fleet.undo(node, &gpus, pod, -1);
            }
            return Err((refusal, placed));
        };
        before.push((node, fleet.gpus(node).to_vec(), asked.pod));
        fleet.take(asked, node, &solution);
        placements.push(placement(index, asked.request, node, &solution));
    }
    Ok(placements)
}
