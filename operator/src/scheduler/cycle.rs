//! One scheduling cycle: everything between looking and writing. Pure but for the pace that [`Memory`] sets.
//!
//! 1. snapshot: policies meet GPUs, nodes and pods become what the planner reads
//! 2. join: each placement on record is asked for its next step
//! 3. plan: pods for which room was made, pods without a place, and those that might leave theirs
//! 4. compose: what each node is told, in one object
//!
//! Writing it is [`super::apply`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::conditions::pod_reason;
use kerf_crds::gpu_node::{Owner, Partition};
use kerf_planner::plan::RefusalKind;

use super::decision::{Decision, Looking, NodeWrite};
use super::entries::{Changes, commit};
use super::join::join;
use super::memory::Memory;
use super::needs::Memo;
use super::placements;
use super::preempt::preempt;
use super::queue::{self, Candidate};
use super::rooms::{self, Kept};
use super::selectors::Selectors;
use super::snapshot;
use super::tell::Sentence;
use super::warm;
use crate::cache::{PodInfo, World};
use crate::controller::desired::{self, Problems};
use crate::recorder::Planned;

/// Decides. `wall` is the time in seconds since 1970, for reservations.
pub fn decide(world: &World, memory: &Memory, selectors: &Selectors, now: Instant, wall: i64) -> Decision {
    let mut decision = Decision::default();
    let mut changes = Changes::default();

    // 1. Snapshot.
    let mut views = memory.views();
    views.refresh(world);
    let views = &*views;
    let matches = Arc::clone(views.matches());
    let reserved = rooms::on_record(views);
    let bound = rooms::binding(world, memory, &reserved, wall);
    let mut board = snapshot::take(world, views, |said| rooms::is_one_of(&bound, said));
    snapshot::note_failing(&mut board, &memory.failing_gpus(now));

    // 2. Join.
    let joined = join(world, views, &board, memory, now, &mut decision, &mut changes);

    // Allocations that go back on record: the board does not know them yet, so nothing else goes to their nodes.
    for name in changes.added.keys() {
        if let Some(node) = board.node(name) {
            board.snapshot.nodes[node].ready = false;
        }
    }

    // 3. Plan.
    let memo = Memo::default();
    let looking = Looking { world, board: &board, memory, selectors, memo: &memo, now };
    let gangs = &joined.gangs;
    let mut candidates = queue::candidates(&looking, &joined.placed, joined.troubled, gangs, &mut decision);
    let mut making = rooms::carry_on(&looking, &matches, &reserved, &bound, &joined.placed, wall);
    let (mut given, mut gifts) = (BTreeSet::new(), Vec::new());
    candidates.retain(|candidate| {
        let Candidate { pod, wanted, .. } = candidate;
        // Room for one of a gang is none for all.
        if wanted.request.gang.is_some() {
            return true;
        }
        match rooms::claim(&looking, &matches, &reserved, &bound, &making, &given, candidate) {
            Kept::Nothing => true,
            Kept::Later => false,
            Kept::NotYet(node) => {
                making.expects(&pod.uid, node);
                true
            }
            Kept::Now(said, place) => {
                making.given(world, memory, &reserved, said);
                if said.controller.is_some() {
                    memory.was_moved(&pod.uid, now);
                }
                commit(&board, pod, wanted, place.node, &place.devices, &mut changes);
                given.insert(place.node);
                gifts.push((Arc::clone(pod), place));
                false
            }
        }
    });
    let mut offer = rooms::offer(&looking, &matches, &making, &candidates);
    for (pod, place) in &gifts {
        snapshot::note_given(&mut board, pod, place);
    }
    board.snapshot.requests =
        candidates.iter_mut().map(|candidate| std::mem::take(&mut candidate.wanted.request)).collect();
    for (request, waited) in board.snapshot.requests.iter_mut().zip(&offer.waited) {
        request.waited_seconds = *waited;
    }
    board.snapshot.movable = std::mem::take(&mut offer.movable);
    board.snapshot.budgets = std::mem::take(&mut offer.budgets);
    let mut plan = memory.planner().plan(&board.snapshot);
    let planned = (!board.snapshot.requests.is_empty()).then(|| plan.clone());
    let gang_of = |request: usize| board.snapshot.requests[request].gang.clone();
    let completed = plan.placements.iter().filter_map(|placement| gang_of(placement.request)).collect();
    let mut given_back = gangs.to_give_back(&completed);
    // Those of which one cannot run where its place is, and has no better one.
    let stuck = plan.refusals.iter().filter_map(|refusal| candidates[refusal.request].instead_of.as_ref());
    let stuck = stuck.filter(|troubled| troubled.gpu.is_none()).map(|troubled| &troubled.pod);
    given_back.extend(gangs.to_yield(stuck));
    for key in given_back {
        memory.give_back(&key);
        decision.drive.insert(key);
    }
    plan.placements.retain(|placement| {
        let Candidate { pod, wanted, instead_of } = &candidates[placement.request];
        match instead_of {
            Some(troubled) => {
                match &troubled.gpu {
                    Some(gpu) => memory.withdraw_from_gpu(&troubled.key, gpu, now),
                    None => memory.withdraw(&troubled.key, now),
                }
                decision.drive.insert(troubled.key.clone());
            }
            None => {
                making.settled(world, memory, &reserved, &pod.uid);
                commit(&board, pod, wanted, placement.node, &placement.devices, &mut changes);
            }
        }
        instead_of.is_none()
    });
    for room in &plan.rooms {
        let pod = &candidates[room.place.request].pod;
        let message = rooms::reserve(&board, pod, room, &offer, wall, &mut changes);
        decision.tell_placeless(pod, Sentence::waiting(pod_reason::MAKING_ROOM, message));
    }
    for pod in preempt(&board, &candidates, memory, &mut plan, &mut changes) {
        making.settled(world, memory, &reserved, &pod);
    }
    let added = changes.added.values().flatten();
    let taken: Vec<&Partition> = added.filter(|one| matches!(one.owner, Owner::Claim(_))).collect();
    making.give_way(world, memory, &reserved, &taken);
    let nodes = changes.added.keys().filter_map(|name| board.node(name)).collect();
    making.put_off(&reserved, &nodes);
    let no_room = plan.refusals.iter().filter(|refusal| refusal.kind == RefusalKind::NoRoom);
    let no_room: Vec<usize> = no_room.map(|refusal| refusal.request).collect();
    decision.quota.extend(offer.to_ask(&no_room, &candidates));
    let making_room = plan.rooms.iter().map(|room| room.place.request);
    let without =
        no_room.into_iter().chain(making_room).map(|index| candidates[index].pod.uid.as_str()).collect();
    memory.have_no_room(&without, now);
    for refusal in &plan.refusals {
        let reason = match refusal.kind {
            RefusalKind::NoSuchDevice => pod_reason::NO_SUCH_PROFILE,
            RefusalKind::NoRoom => pod_reason::NO_ROOM,
            RefusalKind::NodesDoNotFit => pod_reason::NODES_DO_NOT_FIT,
        };
        let Candidate { pod, instead_of, .. } = &candidates[refusal.request];
        if refusal.moves.is_some() {
            memory.no_room(&pod.uid, refusal.moves, now);
        }
        let sentence = match rooms::told(&board, &reserved, &making, pod) {
            Some(message) => Sentence::waiting(pod_reason::MAKING_ROOM, message),
            None => {
                let beside = gangs.beside(pod);
                Sentence::waiting(
                    reason,
                    format!("{}{beside}{}", refusal.message, rooms::in_vain(memory, pod)),
                )
            }
        };
        match instead_of {
            Some(troubled) => decision.tell_troubled(troubled),
            None => decision.tell_placeless(pod, sentence),
        }
    }

    // 4. Compose.
    let mut warm = warm::entries(world.policies.iter(), &board, &matches, &plan);
    for (view, node) in views.nodes() {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let removed = changes.removed.remove(name).unwrap_or_default();
        let added = changes.added.remove(name).unwrap_or_default();
        let warm = warm.remove(name).unwrap_or_default();
        let stays_whole = removed.is_empty() && added.is_empty() && !view.reserved;
        if stays_whole
            && let Some((of, problems)) = &*view.composed.borrow()
            && *of == warm
        {
            for (policy, said) in problems {
                decision.problems.entry(policy.clone()).or_default().extend(said.iter().cloned());
            }
            continue;
        }
        let stays = node.spec.partitions.iter().filter(|partition| match &partition.owner {
            Owner::Claim(_) => !removed.iter().any(|key| placements::owns(key, &partition.owner)),
            Owner::Reservation(said) => making.stays(said),
            Owner::Policy(_) => false,
        });
        let stays: Vec<Partition> = stays.cloned().collect();
        // The rule that never breaks, whatever went wrong above.
        let collide = claims_collide(stays.iter().chain(&added));
        let added = if collide {
            tracing::error!(
                node = name,
                ?added,
                "places that overlap with each other or with others' are not written"
            );
            changes.new.remove(name);
            Vec::new()
        } else {
            added
        };
        let claims: Vec<Partition> = stays.into_iter().chain(added).collect();
        let mut problems = Problems::new();
        let spec = desired::spec(node, &view.matches, claims, warm.clone(), &mut problems);
        for (policy, said) in &problems {
            decision.problems.entry(policy.clone()).or_default().extend(said.iter().cloned());
        }
        if spec != node.spec {
            decision.specs.push(NodeWrite {
                node: Arc::clone(node),
                spec,
                added: changes.new.remove(name).unwrap_or_default(),
                removed,
            });
        } else if stays_whole && !collide {
            *view.composed.borrow_mut() = Some((warm, problems));
        }
    }
    decision.evictions = making.evict;
    decision.sentences = one_each(std::mem::take(&mut decision.sentences));
    decision.matches = matches;
    decision.planned = planned.map(|plan| Planned { snapshot: board.snapshot, plan });
    decision
}

/// Whether two claims' entries share a slice.
fn claims_collide<'p>(entries: impl Iterator<Item = &'p Partition>) -> bool {
    let claims: Vec<&Partition> = entries.filter(|one| matches!(one.owner, Owner::Claim(_))).collect();
    claims.iter().enumerate().any(|(index, one)| {
        claims[..index].iter().any(|other| other.gpu == one.gpu && desired::collide(other, one))
    })
}

/// One sentence a pod, or those of its claims would overwrite each other in every cycle: while it waits for one of them,
/// it waits; else what was found out last.
fn one_each(sentences: Vec<(Arc<PodInfo>, Sentence)>) -> Vec<(Arc<PodInfo>, Sentence)> {
    let mut each: BTreeMap<String, (Arc<PodInfo>, Sentence)> = BTreeMap::new();
    for (pod, sentence) in sentences {
        let waits = each.get(&pod.uid).is_some_and(|(_, known)| !known.planned);
        if !(waits && sentence.planned) {
            each.insert(pod.uid.clone(), (pod, sentence));
        }
    }
    each.into_values().collect()
}

#[cfg(test)]
#[path = "cycle_tests.rs"]
mod tests;
