//! Gangs: several requests that get their places together or not at all.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use crate::bound;
use crate::catalog::StateId;
use crate::explain;
use crate::fleet::{Fleet, Numbered, PodId, ShapeId};
use crate::place::Solution;
use crate::plan::{Placement, Plan, Refusal, Verdict};
use crate::rooms::placement;
use crate::snapshot::NodeIndex;

/// Most GPUs looked at in the searches for all gangs of a plan. Counted, not timed: the same input gives the same plan on
/// any machine.
pub const WORK: u64 = 100_000;

/// Most members of a gang for which all ways are tried.
const SEARCHED: usize = 128;

/// What was found out about gangs without places, by their members in order.
pub type Refused<'a> = HashMap<Vec<(ShapeId, PodId, &'a BTreeSet<NodeIndex>)>, NoPlace>;

/// See [`Refused`].
#[derive(Clone, Debug)]
pub struct NoPlace {
    /// Of one member, beside the others.
    refusal: Refusal,
    /// Which it is.
    member: usize,
    /// So many of the others had a place.
    placed: usize,
}

/// Places all members, or refuses all with what the first of them that found no room was told.
///
/// They are served one after the other, in their order; if that leaves somebody without room, the largest first; and then
/// all ways are tried, as far as a set amount of work goes.
pub fn serve<'a>(
    fleet: &mut Fleet<'a>,
    gang: &str,
    members: &[usize],
    refused: &mut Refused<'a>,
    work: &mut u64,
    plan: &mut Plan,
) {
    let snapshot = fleet.snapshot;
    let asked: Vec<(usize, Numbered<'a>)> =
        members.iter().map(|&index| (index, fleet.numbered(&snapshot.requests[index]))).collect();
    let likeness = asked.iter().map(|(_, one)| (one.shape, one.pod, &one.request.avoid)).collect();
    // Room only shrinks within a cycle. The weights of a proof are for this order.
    let alike = members.is_sorted();
    let no_place = match refused.get(&likeness).filter(|_| alike) {
        Some(known) => known.clone(),
        None => match places(fleet, &asked, plan.placements.len(), work) {
            Ok(placements) => return plan.placements.extend(placements),
            Err(no_place) => {
                if alike {
                    refused.insert(likeness, no_place.clone());
                }
                no_place
            }
        },
    };
    let NoPlace { refusal, member, placed } = no_place;
    let verdict = explain::verdict_text(&refusal.verdict);
    let message = match members.len() {
        1 => format!("the one pod that gang {gang} lacks {}; {verdict}", refusal.message),
        all => format!(
            "the {all} pods of gang {gang} get their places together or not at all; beside {placed} of them {} {}; {verdict}",
            snapshot.requests[members[member]].id, refusal.message
        ),
    };
    plan.refusals.extend(members.iter().map(|&request| Refusal {
        request,
        message: message.clone(),
        ..refusal.clone()
    }));
}

fn places<'a>(
    fleet: &mut Fleet<'a>,
    members: &[(usize, Numbered<'a>)],
    beside: usize,
    work: &mut u64,
) -> Result<Vec<Placement>, NoPlace> {
    let (taken, without) = one_after_the_other(fleet, members);
    let Some(member) = without else { return Ok(placements(taken)) };
    let mut refusal = explain::without_proof(fleet, members[member].0, members[member].1);
    let placed = taken.len();
    leave(fleet, taken);
    let mut in_order = members.to_vec();
    in_order.sort_by_key(|&(index, _)| index);
    let in_order: Vec<Numbered<'a>> = in_order.into_iter().map(|(_, asked)| asked).collect();
    refusal.verdict = match bound::certificate(fleet, &in_order, beside) {
        Some(proof) => Verdict::Impossible(proof),
        None => {
            let mut largest_first = members.to_vec();
            largest_first
                .sort_by_key(|(_, one)| (Reverse(fleet.least_slices(one.shape)), one.shape, one.pod));
            let (taken, without) = one_after_the_other(fleet, &largest_first);
            if without.is_none() {
                return Ok(placements(taken));
            }
            leave(fleet, taken);
            if members.len() > SEARCHED {
                return Err(NoPlace {
                    refusal: Refusal { verdict: Verdict::NotFound, ..refusal },
                    member,
                    placed,
                });
            }
            let mut search =
                Search { fleet, dead: HashSet::new(), taken: Vec::new(), work: *work, cut: false };
            let found = search.place(&largest_first);
            *work = search.work;
            if found {
                return Ok(placements(search.taken));
            }
            if search.cut || search.work == 0 { Verdict::NotFound } else { Verdict::Exhausted }
        }
    };
    Err(NoPlace { refusal, member, placed })
}

/// A place that is taken, and what its node's GPUs were before.
struct Taken<'a> {
    index: usize,
    asked: Numbered<'a>,
    node: NodeIndex,
    place: Rc<Solution>,
    before: Vec<StateId>,
}

fn placements(taken: Vec<Taken<'_>>) -> Vec<Placement> {
    taken.iter().map(|one| placement(one.index, one.asked.request, one.node, &one.place)).collect()
}

fn take<'a>(
    fleet: &mut Fleet<'_>,
    member: (usize, Numbered<'a>),
    node: NodeIndex,
    place: Rc<Solution>,
) -> Taken<'a> {
    let (index, asked) = member;
    let before = fleet.gpus(node).to_vec();
    fleet.take(asked, node, &place);
    Taken { index, asked, node, place, before }
}

fn leave(fleet: &mut Fleet<'_>, mut taken: Vec<Taken<'_>>) {
    while let Some(one) = taken.pop() {
        fleet.undo(one.node, &one.before, one.asked.pod, -1);
    }
}

/// The cheapest place for each, beside those before it; and the first that has none.
fn one_after_the_other<'a>(
    fleet: &mut Fleet<'_>,
    members: &[(usize, Numbered<'a>)],
) -> (Vec<Taken<'a>>, Option<usize>) {
    let mut taken = Vec::with_capacity(members.len());
    for (at, &member) in members.iter().enumerate() {
        let Some((node, place)) = fleet.best(member.1) else { return (taken, Some(at)) };
        taken.push(take(fleet, member, node, place));
    }
    (taken, None)
}

/// Every choice of places.
struct Search<'f, 'a> {
    fleet: &'f mut Fleet<'a>,
    /// Situations from which the rest cannot be placed: how many are left, and what is left on the nodes.
    dead: HashSet<(usize, Vec<NodeNow>)>,
    taken: Vec<Taken<'a>>,
    work: u64,
    /// Something was left out.
    cut: bool,
}

/// States of its GPUs, and what is left of its resources.
type NodeNow = (Vec<StateId>, Vec<Option<i128>>);

impl<'a> Search<'_, 'a> {
    /// Places all of these; if not, the fleet is as before.
    fn place(&mut self, members: &[(usize, Numbered<'a>)]) -> bool {
        let Some((&member, rest)) = members.split_first() else { return true };
        let situation = || {
            let fleet = &*self.fleet;
            (0..fleet.nodes()).map(|node| (fleet.gpus(node).to_vec(), fleet.resources(node).to_vec()))
        };
        let situation = (members.len(), situation().collect());
        if self.dead.contains(&situation) {
            return false;
        }
        let mut places = Vec::new();
        for node in 0..self.fleet.nodes() {
            self.work = self.work.saturating_sub(1 + self.fleet.gpus(node).len() as u64);
            if self.fleet.fits(node, member.1) {
                places.extend(self.fleet.places_on(member.1, node).into_iter().map(|place| (node, place)));
            }
        }
        // Of a request for several devices only the best place on each node is known.
        self.cut |= !self.fleet.is_single(member.1.shape);
        places.sort_by_key(|(node, place)| (place.choice.clone(), place.cost, self.fleet.rank_of(*node, 0)));
        for (node, place) in places {
            if self.work == 0 {
                return false;
            }
            let one = take(self.fleet, member, node, place);
            self.taken.push(one);
            if self.place(rest) {
                return true;
            }
            leave(self.fleet, self.taken.pop().into_iter().collect());
        }
        self.dead.insert(situation);
        false
    }
}
