//! One scheduling cycle: everything between looking and writing. Pure but for the pace that [`Memory`] sets.
//!
//! 1. snapshot: policies meet GPUs, nodes and pods become what the planner reads
//! 2. join: each placement on record is asked for its next step
//! 3. plan: pods without a place, and those that might leave theirs
//! 4. compose: what each node is told, in one object
//!
//! Writing it is [`super::apply`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::conditions::pod_reason;
use kerf_crds::gpu_node::{Owner, Partition};
use kerf_crds::{GpuNode, GpuNodeSpec};
use kerf_planner::plan::RefusalKind;
use kerf_planner::protocol::Step;
use kube::ResourceExt;

use super::entries::{Changes, commit};
use super::join::join;
use super::memory::Memory;
use super::needs::Memo;
use super::placements::{self, Key};
use super::preempt::preempt;
use super::queue::{self, Candidate};
use super::selectors::Selectors;
use super::snapshot::{self, Board};
use super::tell::Sentence;
use super::trouble::Troubled;
use super::warm;
use crate::cache::{PodInfo, World, pod::seconds};
use crate::controller::desired::{self, Problems};
use crate::controller::matching::{self, Matches};

/// What a cycle wants written.
#[derive(Debug, Default)]
pub struct Decision {
    /// Nodes whose spec changes, and the placements that the change makes.
    pub specs: Vec<NodeWrite>,
    /// Placements whose next step is a write to something else.
    pub drive: BTreeSet<Key>,
    /// Pods whose claims are all allocated, with others before them, and that still have Kerf's gate and no other.
    pub ungate: Vec<Arc<PodInfo>>,
    /// Pods whose claim a quota refused a while ago.
    pub quota: Vec<Arc<PodInfo>>,
    /// Pods bound where they can never run.
    pub stranded: Vec<Arc<PodInfo>>,
    /// What pods are told, once each.
    pub sentences: Vec<(Arc<PodInfo>, Sentence)>,
    /// UIDs of those of them that have no place: a node that was nominated for one keeps room for nobody.
    pub placeless: BTreeSet<String>,
    /// For the policies' status.
    pub matches: Matches,
    /// See [`Problems`].
    pub problems: Problems,
}

impl Decision {
    /// Tells a pod without a place why.
    pub fn tell_placeless(&mut self, pod: &Arc<PodInfo>, sentence: Sentence) {
        self.placeless.insert(pod.uid.clone());
        self.sentences.push((Arc::clone(pod), sentence));
    }

    /// Tells a pod why it cannot use its place.
    pub fn tell_troubled(&mut self, troubled: &Troubled) {
        let sentence = troubled.sentence.clone();
        self.sentences.extend(sentence.map(|sentence| (Arc::clone(&troubled.pod), sentence)));
    }
}

/// What a cycle looks at.
#[derive(Debug)]
pub struct Looking<'a> {
    pub world: &'a World,
    pub board: &'a Board,
    pub memory: &'a Memory,
    pub selectors: &'a Selectors,
    pub memo: &'a Memo,
    pub now: Instant,
}

/// A node's new spec.
#[derive(Debug)]
pub struct NodeWrite {
    pub node: Arc<GpuNode>,
    pub spec: GpuNodeSpec,
    /// Placements that come to be with it.
    pub added: Vec<Key>,
    /// Placements that end with it.
    pub removed: Vec<Key>,
}

/// Decides. `wall` is the time in seconds since 1970, for reservations.
pub fn decide(world: &World, memory: &Memory, selectors: &Selectors, now: Instant, wall: i64) -> Decision {
    let mut decision = Decision::default();
    let mut changes = Changes::default();

    // 1. Snapshot.
    let matches = matching::matches(world);
    let mut board = snapshot::take(world, &matches);
    snapshot::note_failing(&mut board, &memory.failing_gpus(now));

    // 2. Join.
    let joined = join(world, &board, memory, now, &mut decision, &mut changes);

    // Allocations that go back on record: the board does not know them yet, so nothing else goes to their nodes.
    for name in changes.added.keys() {
        if let Some(node) = board.node(name) {
            board.snapshot.nodes[node].ready = false;
        }
    }

    // 3. Plan.
    let memo = Memo::default();
    let looking = Looking { world, board: &board, memory, selectors, memo: &memo, now };
    let mut candidates = queue::candidates(&looking, &joined.placed, joined.troubled, &mut decision);
    board.snapshot.requests =
        candidates.iter_mut().map(|candidate| std::mem::take(&mut candidate.wanted.request)).collect();
    let mut plan = kerf_planner::plan(&board.snapshot);
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
            None => commit(&board, pod, wanted, placement.node, &placement.devices, &mut changes),
        }
        instead_of.is_none()
    });
    preempt(&board, &candidates, memory, &mut plan, &mut changes);
    for refusal in &plan.refusals {
        let reason = match refusal.kind {
            RefusalKind::NoSuchDevice => pod_reason::NO_SUCH_PROFILE,
            RefusalKind::NoRoom => pod_reason::NO_ROOM,
            RefusalKind::NodesDoNotFit => pod_reason::NODES_DO_NOT_FIT,
        };
        let candidate = &candidates[refusal.request];
        match &candidate.instead_of {
            Some(troubled) => decision.tell_troubled(troubled),
            None => {
                decision.tell_placeless(&candidate.pod, Sentence::waiting(reason, refusal.message.clone()))
            }
        }
    }

    // 4. Compose.
    let warm = warm::entries(&board, &matches, &plan);
    for node in &board.gpu_nodes {
        let name = node.name_any();
        let removed = changes.removed.remove(&name).unwrap_or_default();
        let added = changes.added.remove(&name).unwrap_or_default();
        let stays = node.spec.partitions.iter().filter(|partition| match &partition.owner {
            Owner::Claim(_) => !removed.iter().any(|key| placements::owns(key, &partition.owner)),
            Owner::Reservation(reservation) => seconds(&reservation.expires).is_some_and(|end| end > wall),
            Owner::Policy(_) => false,
        });
        let claims: Vec<Partition> = stays.cloned().chain(added).collect();
        let nothing = BTreeMap::new();
        let spec = desired::spec(
            node,
            matches.get(&name).unwrap_or(&nothing),
            claims,
            warm.get(&name).cloned().unwrap_or_default(),
            &mut decision.problems,
        );
        if spec != node.spec {
            decision.specs.push(NodeWrite {
                node: Arc::clone(node),
                spec,
                added: changes.new.remove(&name).unwrap_or_default(),
                removed,
            });
        }
    }
    decision.sentences = one_each(std::mem::take(&mut decision.sentences));
    decision.matches = matches;
    decision
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

/// Whether a placement's next step is one that [`super::apply`] makes by itself.
pub fn is_driven(step: Step) -> bool {
    !matches!(step, Step::Wait(_) | Step::RemoveEntry | Step::RestoreEntry)
}

#[cfg(test)]
#[path = "cycle_tests.rs"]
mod tests;
