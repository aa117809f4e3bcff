//! What is on record, and whom it binds.

use std::collections::BTreeSet;
use std::sync::Arc;

use kerf_crds::gpu_node::{Owner, Partition, PodReference, Reservation};
use kerf_planner::snapshot::NodeIndex;

use super::super::memory::Memory;
use super::super::views::Views;
use crate::cache::{PodDetail, PodInfo, World, pod::seconds};

/// A pod that may take longer to end, in seconds, is not moved: its new room would be kept from everybody as long.
const LONGEST_GRACE: i64 = 3600;

/// Whose a reservation is: the UID of the pod that waits, or of the one in whose place another comes.
pub type Holder = (String, bool);

pub(super) fn holder(said: &Reservation) -> Holder {
    (said.pod.uid.clone(), said.controller.is_some())
}

/// The entries of one reservation.
#[derive(Debug)]
pub struct Reserved<'a> {
    pub said: &'a Reservation,
    pub node: NodeIndex,
    pub entries: Vec<&'a Partition>,
}

impl Reserved<'_> {
    pub fn key(&self) -> Holder {
        holder(self.said)
    }
}

/// Every reservation on record.
pub fn on_record(views: &Views) -> Vec<Reserved<'_>> {
    let mut all: Vec<Reserved<'_>> = Vec::new();
    // In the order of the board's nodes.
    for (node, (_, gpu_node)) in views.nodes().enumerate().filter(|(_, (view, _))| view.reserved) {
        for partition in &gpu_node.spec.partitions {
            let Owner::Reservation(said) = &partition.owner else { continue };
            match all.iter_mut().find(|other| other.node == node && other.said == said) {
                Some(known) => known.entries.push(partition),
                None => all.push(Reserved { said, node, entries: vec![partition] }),
            }
        }
    }
    all
}

/// What is kept from everybody else: that for which somebody has been moved. Before, a room is only a plan.
pub fn binding(world: &World, memory: &Memory, all: &[Reserved<'_>], wall: i64) -> BTreeSet<Holder> {
    let mut binding = BTreeSet::new();
    for said in all.iter().map(|one| one.said).filter(|said| stands(said, wall)) {
        if said.controller.is_some() {
            if has_gone(world, memory, &said.pod) {
                binding.insert(holder(said));
            }
        } else if waits(world, said) && said.moves.iter().any(|moved| has_gone(world, memory, moved)) {
            binding.insert(holder(said));
            binding.extend(said.moves.iter().map(|moved| (moved.uid.clone(), true)));
        }
    }
    binding
}

/// Whether a reservation is one of these.
pub fn is_one_of(these: &BTreeSet<Holder>, said: &Reservation) -> bool {
    these.contains(&holder(said))
}

pub(super) fn stands(said: &Reservation, wall: i64) -> bool {
    seconds(&said.expires).is_some_and(|end| end > wall)
}

/// Whether the pod that waits for a room still does, as far as it tells.
pub(super) fn waits(world: &World, said: &Reservation) -> bool {
    pod(world, &said.pod).is_some_and(|pod| is_open(pod) && pod.node.is_none())
}

pub(super) fn has_gone(world: &World, memory: &Memory, moved: &PodReference) -> bool {
    memory.was_evicted(&moved.uid) || pod(world, moved).is_none_or(|pod| !is_open(pod))
}

pub(super) fn pod<'w>(world: &'w World, reference: &PodReference) -> Option<&'w Arc<PodInfo>> {
    world.pod(&reference.namespace, &reference.name, &reference.uid)
}

pub(super) fn is_open(pod: &PodInfo) -> bool {
    !pod.done && !pod.deleting
}

pub(super) fn is_movable(pod: &PodInfo) -> bool {
    let may = |detail: &PodDetail| {
        detail.movable && detail.controller.is_some() && detail.grace_seconds <= LONGEST_GRACE
    };
    pod.detail.as_deref().is_some_and(may) && pod.node.is_some() && is_open(pod)
}
