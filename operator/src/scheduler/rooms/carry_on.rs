//! Rooms that are being made: which go on, who is evicted for them, and which are given up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kerf_crds::gpu_node::{Partition, PodReference, Reservation};
use kerf_planner::nodes::{lacking, unsuitable};
use kerf_planner::snapshot::{NodeIndex, PodNeeds};
use kube::ResourceExt;

use super::super::decision::Looking;
use super::super::memory::Memory;
use super::super::snapshot::{self, Board};
use super::offer::movable;
use super::record::{Holder, Reserved, has_gone, holder, pod, stands, waits};
use crate::cache::{PodInfo, World};
use crate::controller::desired::collide;
use crate::controller::matching::Matches;

/// What becomes of rooms.
#[derive(Debug, Default)]
pub struct Rooms {
    /// Reservations that stay.
    pub(super) stay: BTreeSet<Holder>,
    /// Those for which nobody has gone yet: UIDs of the pods that wait.
    pub(super) planned: BTreeSet<String>,
    /// Who is to be evicted now, and for whom.
    pub evict: Vec<Eviction>,
    /// UIDs of the pods that wait for room which is being made, and of those that are moved for them.
    pub(super) concerned: BTreeSet<String>,
    pub(super) making: usize,
    /// UIDs of pods for which something is kept that is not free yet, and the node.
    pub(super) expected: BTreeMap<String, NodeIndex>,
}

/// A pod that is moved.
#[derive(Clone, Debug)]
pub struct Eviction {
    pub pod: Arc<PodInfo>,
    pub room_for: PodReference,
    /// The node on which a place is kept for what comes in its place.
    pub to: String,
}

impl Rooms {
    /// Something is kept for the pod that is not free yet: nobody else is moved for it.
    pub fn expects(&mut self, pod_uid: &str, node: NodeIndex) {
        self.concerned.insert(pod_uid.to_owned());
        self.expected.insert(pod_uid.to_owned(), node);
    }

    /// Something has been placed on these nodes in this cycle: whether they have processors left for those who wait for
    /// room there is seen in the next.
    pub fn put_off(&mut self, all: &[Reserved<'_>], nodes: &BTreeSet<NodeIndex>) {
        let concerns = |uid: &str| all.iter().any(|one| one.said.pod.uid == uid && nodes.contains(&one.node));
        self.evict.retain(|one| !concerns(&one.room_for.uid) && !concerns(&one.pod.uid));
    }

    /// Whether the reservation stays.
    pub fn stays(&self, said: &Reservation) -> bool {
        self.stay.contains(&holder(said))
    }

    /// The pod has a place, or shall not have this one: nobody who is still there is moved for it.
    pub fn settled(&mut self, world: &World, memory: &Memory, all: &[Reserved<'_>], pod_uid: &str) {
        for reserved in all.iter().filter(|one| one.key() == (pod_uid.to_owned(), false)) {
            self.stay.remove(&reserved.key());
            for moved in &reserved.said.moves {
                if !has_gone(world, memory, moved) {
                    self.stay.remove(&(moved.uid.clone(), true));
                }
            }
        }
        self.evict.retain(|eviction| eviction.room_for.uid != pod_uid);
    }

    /// What was kept has been given to whom it was kept for.
    pub fn given(&mut self, world: &World, memory: &Memory, all: &[Reserved<'_>], said: &Reservation) {
        match said.controller {
            None => self.settled(world, memory, all, &said.pod.uid),
            Some(_) => {
                self.stay.remove(&holder(said));
            }
        }
    }

    /// Others have got these places now: a room that is only planned gives way.
    pub fn give_way(&mut self, world: &World, memory: &Memory, all: &[Reserved<'_>], taken: &[&Partition]) {
        let in_the_way =
            |one: &Partition| taken.iter().any(|other| other.gpu == one.gpu && collide(other, one));
        for uid in std::mem::take(&mut self.planned) {
            let of_room = |one: &&Reserved<'_>| match one.said.controller {
                None => one.said.pod.uid == uid,
                Some(_) => all.iter().any(|room| {
                    room.key() == (uid.clone(), false) && room.said.moves.contains(&one.said.pod)
                }),
            };
            if all.iter().filter(of_room).flat_map(|one| &one.entries).any(|entry| in_the_way(entry)) {
                self.settled(world, memory, all, &uid);
            }
        }
    }
}

/// Which reservations stay, and who is evicted for them. `placed`: UIDs of pods that have their place.
pub fn carry_on(
    looking: &Looking<'_>,
    matches: &Matches,
    all: &[Reserved<'_>],
    bound: &BTreeSet<Holder>,
    placed: &BTreeSet<String>,
    wall: i64,
) -> Rooms {
    let Looking { world, board, memory, now, .. } = looking;
    let mut rooms = Rooms::default();
    for reserved in all {
        let said = reserved.said;
        if said.controller.is_some() {
            // What is kept for somebody who has gone is kept whatever becomes of the room.
            if stands(said, wall) && has_gone(world, memory, &said.pod) {
                rooms.stay.insert(reserved.key());
            }
            continue;
        }
        if !stands(said, wall) || !waits(world, said) || placed.contains(&said.pod.uid) {
            continue;
        }
        let still_there: Vec<&Arc<PodInfo>> = said
            .moves
            .iter()
            .filter(|moved| !has_gone(world, memory, moved))
            .filter_map(|moved| pod(world, moved))
            .collect();
        let planned = !bound.contains(&reserved.key());
        let node = &board.snapshot.nodes[reserved.node];
        // What is bound is kept already.
        let has_room = |pod: &PodInfo| {
            let milli = snapshot::kept_milli(world, &node.name, said, pod);
            !planned || lacking(&node.free_milli, &PodNeeds { milli, ..PodNeeds::default() }).is_none()
        };
        let possible = pod(world, &said.pod).is_some_and(|pod| suits(board, reserved, pod) && has_room(pod));
        let mut evict: Vec<Eviction> = Vec::new();
        for pod in still_there.iter().filter(|_| possible) {
            let of_it =
                |other: &&Reserved<'_>| other.key() == (pod.uid.clone(), true) && stands(other.said, wall);
            let Some(kept) = all.iter().find(of_it).filter(|kept| suits(board, kept, pod)) else { continue };
            let allowed = movable(looking, matches, pod).map_or(0, |movable| movable.most_moves);
            if allowed as usize >= said.moves.len() {
                let to = board.gpu_nodes[kept.node].name_any();
                evict.push(Eviction { pod: Arc::clone(pod), room_for: said.pod.clone(), to });
            }
        }
        // Not all on record, not possible or not allowed any more, or refused by a disruption budget: as long as nobody
        // has gone, nothing is lost by looking anew.
        if planned && (evict.len() < said.moves.len() || !memory.may_make_room(&said.pod.uid, *now)) {
            continue;
        }
        if planned {
            rooms.planned.insert(said.pod.uid.clone());
        }
        rooms.making += 1;
        rooms.stay.insert(reserved.key());
        rooms.concerned.insert(said.pod.uid.clone());
        for pod in still_there {
            rooms.stay.insert((pod.uid.clone(), true));
            rooms.concerned.insert(pod.uid.clone());
        }
        evict.retain(|one| memory.may_be_moved(&one.pod.uid, *now));
        rooms.evict.extend(evict);
    }
    rooms
}

/// Whether what is reserved could still be the pod's, once it is free.
fn suits(board: &Board, reserved: &Reserved<'_>, pod: &PodInfo) -> bool {
    let node = &board.snapshot.nodes[reserved.node];
    let usable = |entry: &&Partition| {
        node.gpus.iter().any(|gpu| gpu.uuid == entry.gpu && gpu.closed.is_none() && gpu.stuck.is_none())
    };
    let needs = pod.detail.as_ref().map(|detail| &detail.needs);
    reserved.entries.iter().all(usable) && needs.is_some_and(|needs| unsuitable(node, needs).is_none())
}
