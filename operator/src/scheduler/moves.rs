//! Room that is made by moving others: who may be moved, what is kept for whom, and who is evicted.
//!
//! ```text
//!  1 the plan finds a room ─▶ reservations in the nodes' specs: one for the pod that waits, one for each that moves
//!  2 all of them on record ─▶ the pods are evicted, as far as disruption budgets let them go
//!  3 a place is free ──────▶ whoever it is kept for gets it: the pod that waits, or what came in place of one that moved
//! ```
//! A reservation that leads to nothing lapses. Nobody else gets its slices before; whose they are still, keeps them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kerf_crds::gpu_node::{ClaimOwner, Owner, Partition, PodReference, Reservation};
use kerf_crds::partition_policy::MigMode;
use kerf_crds::profile::same;
use kerf_planner::nodes::unsuitable;
use kerf_planner::plan::{NoMoves, Placement, Room};
use kerf_planner::snapshot::{Movable, Node, NodeIndex, PlacedDevice, PlannedInstance, Request, Snapshot};
use kube::ResourceExt;

use super::claims;
use super::cycle::Looking;
use super::entries::{self, Changes};
use super::memory::Memory;
use super::queue::Candidate;
use super::requests::{self, Asks, Wanted};
use super::snapshot::{self, Board, give_back};
use crate::cache::{PodDetail, PodInfo, World, pod::seconds};
use crate::controller::desired::collide;
use crate::controller::matching::{Match, Matches};

/// Most rooms that are being made at the same time.
const AT_ONCE: usize = 4;
/// A reservation stands for so long beyond the time that the pods which move may take to end.
const PATIENCE: i64 = 300;
/// A pod that may take longer to end, in seconds, is not moved: its new room would be kept from everybody as long.
const LONGEST_GRACE: i64 = 3600;
/// For so many pods that wait a cycle asks whether a quota would let them have a claim at all.
const ASKED: usize = 4;

/// Whose a reservation is: the UID of the pod that waits, or of the one in whose place another comes.
pub type Holder = (String, bool);

fn holder(said: &Reservation) -> Holder {
    (said.pod.uid.clone(), said.controller.is_some())
}

/// The entries of one reservation.
#[derive(Debug)]
pub struct Reserved<'a> {
    said: &'a Reservation,
    node: NodeIndex,
    entries: Vec<&'a Partition>,
}

impl Reserved<'_> {
    fn key(&self) -> Holder {
        holder(self.said)
    }
}

/// Every reservation on record.
pub fn on_record(world: &World) -> Vec<Reserved<'_>> {
    let mut all: Vec<Reserved<'_>> = Vec::new();
    // In the order of the board's nodes.
    for (node, gpu_node) in world.gpu_nodes.iter().enumerate() {
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
pub fn binding(world: &World, memory: &Memory, wall: i64) -> BTreeSet<Holder> {
    let all = on_record(world);
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

fn stands(said: &Reservation, wall: i64) -> bool {
    seconds(&said.expires).is_some_and(|end| end > wall)
}

/// Whether the pod that waits for a room still does, as far as it tells.
fn waits(world: &World, said: &Reservation) -> bool {
    pod(world, &said.pod).is_some_and(|pod| is_open(pod) && pod.node.is_none())
}

fn has_gone(world: &World, memory: &Memory, moved: &PodReference) -> bool {
    memory.was_evicted(&moved.uid) || pod(world, moved).is_none_or(|pod| !is_open(pod))
}

fn pod<'w>(world: &'w World, reference: &PodReference) -> Option<&'w Arc<PodInfo>> {
    world.pod(&reference.namespace, &reference.name, &reference.uid)
}

fn is_open(pod: &PodInfo) -> bool {
    !pod.done && !pod.deleting
}

fn is_movable(pod: &PodInfo) -> bool {
    let may = |detail: &PodDetail| {
        detail.movable && detail.controller.is_some() && detail.grace_seconds <= LONGEST_GRACE
    };
    pod.detail.as_deref().is_some_and(may) && pod.node.is_some() && is_open(pod)
}

/// What becomes of rooms.
#[derive(Debug, Default)]
pub struct Rooms {
    /// Reservations that stay.
    stay: BTreeSet<Holder>,
    /// Those for which nobody has gone yet: UIDs of the pods that wait.
    planned: BTreeSet<String>,
    /// Who is to be evicted now, and for whom.
    pub evict: Vec<Eviction>,
    /// UIDs of the pods that wait for room which is being made, and of those that are moved for them.
    concerned: BTreeSet<String>,
    making: usize,
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
    pub fn give_way(&mut self, world: &World, memory: &Memory, all: &[Reserved<'_>], taken: &[Partition]) {
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
        let waiting = pod(world, &said.pod);
        let possible = waiting.is_some_and(|pod| suits(board, reserved, pod));
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
        let planned = !bound.contains(&reserved.key());
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
        evict.retain(|one| memory.may_try(&one.pod.uid, *now) && memory.calm(&one.pod.uid, *now));
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

/// What a candidate gets of what is kept for it.
#[derive(Debug)]
pub enum Kept<'r> {
    /// Nothing, or not yet.
    Nothing,
    /// Something, in a later cycle: the node's room is being given to another now.
    Later,
    /// This.
    Now(&'r Reservation, Placement),
}

/// What is kept for the candidate, if all of it is free now. `given`: nodes that others have got something of.
pub fn claim<'r>(
    looking: &Looking<'_>,
    matches: &Matches,
    all: &[Reserved<'r>],
    bound: &BTreeSet<Holder>,
    rooms: &Rooms,
    given: &BTreeSet<NodeIndex>,
    candidate: &Candidate,
) -> Kept<'r> {
    let pod = &candidate.pod;
    let controller = pod.detail.as_ref().and_then(|detail| detail.controller.as_ref());
    let is_for_it = |said: &Reservation| match &said.controller {
        None => said.pod.uid == pod.uid,
        Some(of_moved) => controller == Some(of_moved) && said.pod.uid != pod.uid,
    };
    let mut found = Kept::Nothing;
    for reserved in all.iter().filter(|one| is_for_it(one.said)) {
        let key = reserved.key();
        if !bound.contains(&key) || !rooms.stay.contains(&key) {
            continue;
        }
        // While the one that moves is there, what its controller makes is made for another reason.
        if reserved.said.controller.is_some() && !has_gone(looking.world, looking.memory, &reserved.said.pod)
        {
            continue;
        }
        if given.contains(&reserved.node) {
            found = Kept::Later;
        } else if let Some(placement) =
            try_place(looking, matches, reserved, bound, pod, &candidate.wanted.request)
        {
            return Kept::Now(reserved.said, placement);
        }
    }
    found
}

/// A place on the reservation's GPUs, were it not there; everything else is as it is.
fn try_place(
    looking: &Looking<'_>,
    matches: &Matches,
    reserved: &Reserved<'_>,
    bound: &BTreeSet<Holder>,
    pod: &PodInfo,
    request: &Request,
) -> Option<Placement> {
    let board = looking.board;
    let mut node = board.snapshot.nodes[reserved.node].clone();
    let mut geometries = board.snapshot.geometries.clone();
    let binds = |said: &Reservation| holder(said) != reserved.key() && bound.contains(&holder(said));
    for (index, gpu) in node.gpus.iter_mut().enumerate() {
        if reserved.entries.iter().any(|entry| entry.gpu == gpu.uuid) {
            let stuck = gpu.stuck.take();
            *gpu = snapshot::gpu_with(board, matches, reserved.node, index, binds, &mut geometries)?;
            gpu.stuck = stuck;
        } else {
            gpu.closed = Some("not reserved".into());
        }
    }
    if reserved.said.controller.is_none() {
        give_back(&mut node.free_milli, &snapshot::kept_milli(looking.world, &node.name, reserved.said, pod));
    }
    let mut nodes = vec![Node::default(); board.snapshot.nodes.len()];
    nodes[reserved.node] = node;
    let snapshot = Snapshot { geometries, nodes, requests: vec![request.clone()], ..Snapshot::default() };
    kerf_planner::plan(&snapshot).placements.pop()
}

/// Who may be moved, and for whom.
pub fn offer(looking: &Looking<'_>, matches: &Matches, rooms: &Rooms, candidates: &[Candidate]) -> Offer {
    let Looking { world, memory, now, .. } = looking;
    let mut offer = Offer::default();
    let policies = matches.values().flat_map(|gpus| gpus.values()).filter_map(Match::policy);
    let moves = policies.map(|policy| &policy.spec.reshape.moves).filter(|moves| moves.max_pods > 0);
    let Some(soonest) = moves.map(|moves| moves.after_seconds).min() else { return offer };
    // A room that is only planned is not on the board.
    if rooms.making >= AT_ONCE || !rooms.planned.is_empty() {
        return offer;
    }
    for candidate in candidates {
        let pod = &candidate.pod;
        let waited = memory.waited(&pod.uid, *now).map(|waited| waited.as_secs());
        let waited = waited.filter(|&waited| {
            waited >= u64::from(soonest)
                && candidate.instead_of.is_none()
                && !rooms.concerned.contains(&pod.uid)
                && memory.may_make_room(&pod.uid, *now)
        });
        // Nobody is moved for a pod whose claim a quota will refuse.
        let has_claim = |name| world.claim(&pod.namespace, name).is_some();
        let sure = pod.own_claim().is_none_or(has_claim) || memory.was_let_through(&pod.uid, *now);
        offer.unsure.push(waited.is_some() && !sure);
        offer.waited.push(waited.filter(|_| sure));
    }
    if offer.waited.iter().all(Option::is_none) {
        return offer;
    }
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    let may = |pod: &&Arc<PodInfo>| {
        !rooms.concerned.contains(&pod.uid) && !memory.was_evicted(&pod.uid) && memory.calm(&pod.uid, *now)
    };
    // Whose slices are kept for somebody already is not asked to go for another.
    let is_overlapped = |pod: &PodInfo| {
        let node = pod.node.as_deref().and_then(|name| world.gpu_nodes.get(name));
        let entries = || node.iter().flat_map(|node| &node.spec.partitions);
        let its = |one: &Partition| matches!(&one.owner, Owner::Claim(owner) if owner.pod_uid == pod.uid);
        let kept = |one: &&Partition| matches!(&one.owner, Owner::Reservation(said) if rooms.stays(said));
        entries()
            .filter(kept)
            .any(|kept| entries().any(|one| its(one) && one.gpu == kept.gpu && collide(one, kept)))
    };
    for pod in pods.filter(may).filter(|pod| !is_overlapped(pod)) {
        if let Some(movable) = movable(looking, matches, pod) {
            offer.movable.push(movable);
            offer.pods.push(Arc::clone(pod));
        }
    }
    // The price: who is the less important, the cheaper to its owner, the younger, goes first.
    let worth = |pod: &PodInfo| {
        let cost = pod.detail.as_ref().map_or(0, |detail| detail.deletion_cost);
        (pod.priority, cost, -pod.created)
    };
    let ranks: BTreeSet<_> = offer.pods.iter().map(|pod| worth(pod)).collect();
    let ranks: BTreeMap<_, u32> = ranks.into_iter().zip(1..).collect();
    for (movable, pod) in offer.movable.iter_mut().zip(&offer.pods) {
        movable.price = ranks.get(&worth(pod)).copied().unwrap_or(u32::MAX);
    }
    offer.budgets = world.budgets.iter().map(|budget| budget.allowed).collect();
    offer
}

/// See [`offer`].
#[derive(Debug, Default)]
pub struct Offer {
    pub movable: Vec<Movable>,
    /// Whose they are, in the same order.
    pub pods: Vec<Arc<PodInfo>>,
    pub budgets: Vec<u32>,
    /// By candidate.
    pub waited: Vec<Option<u64>>,
    /// By candidate: somebody might be moved for it, if a quota lets it have its claim.
    unsure: Vec<bool>,
}

impl Offer {
    /// Of the refused those of which it is to be asked whether a quota would let them through.
    pub fn to_ask<'c>(
        &self,
        refused: impl Iterator<Item = usize>,
        candidates: &'c [Candidate],
    ) -> Vec<&'c Arc<PodInfo>> {
        let unsure = refused.filter(|&index| self.unsure.get(index).is_some_and(|unsure| *unsure));
        unsure.take(ASKED).map(|index| &candidates[index].pod).collect()
    }
}

fn movable(looking: &Looking<'_>, matches: &Matches, pod: &PodInfo) -> Option<Movable> {
    let Looking { world, board, selectors, memo, .. } = looking;
    let name = pod.node.as_deref().filter(|_| is_movable(pod))?;
    let node = board.node(name)?;
    let Asks::For(wanted) = requests::read_afresh(world, board, selectors, memo, pod) else { return None };
    // Claims that outlive it would keep what comes in its place where it is; other drivers' may, too.
    let is_its_own =
        |claim: &String| world.claim(&pod.namespace, claim).is_some_and(|claim| is_alone(claim, pod));
    let claims: BTreeSet<&String> = wanted.parts.values().map(|(claim, _)| claim).collect();
    let all = pod.detail.as_ref().map_or(0, |detail| detail.claims.len());
    if claims.len() != all || !claims.into_iter().all(is_its_own) {
        return None;
    }
    let devices = devices(board, node, pod, &wanted)?;
    let (mut most_moves, mut after_seconds) = (u32::MAX, 0);
    for device in &devices {
        let uuid = &board.snapshot.nodes[node].gpus[device.gpu].uuid;
        let policy = matches.get(name)?.get(uuid)?.policy()?;
        // A stated layout is not for moving about in.
        if policy.spec.mig.mode == MigMode::Static {
            return None;
        }
        let moves = &policy.spec.reshape.moves;
        most_moves = most_moves.min(moves.max_pods);
        after_seconds = after_seconds.max(moves.after_seconds.into());
    }
    let budgets = world.budgets.iter().enumerate().filter(|(_, budget)| budget.covers(pod));
    let budgets: Vec<usize> = budgets.map(|(index, _)| index).collect();
    // The API server evicts nobody who is under two.
    if budgets.len() > 1 {
        return None;
    }
    Some(Movable { request: wanted.request, node, devices, price: 0, budgets, most_moves, after_seconds })
}

/// Whether the claim is this pod's alone, and goes with it.
fn is_alone(claim: &ResourceClaim, pod: &PodInfo) -> bool {
    if claims::owner_uid(claim) != Some(&pod.uid) {
        return false;
    }
    let consumers = claim.status.iter().filter_map(|status| status.reserved_for.as_ref()).flatten();
    let mut pods = consumers.filter(|consumer| consumer.resource == "pods");
    pods.next().is_some_and(|consumer| consumer.uid == pod.uid) && pods.next().is_none()
}

/// What the pod has, in the order of its needs.
fn devices(board: &Board, node: NodeIndex, pod: &PodInfo, wanted: &Wanted) -> Option<Vec<PlacedDevice>> {
    let mut devices = Vec::new();
    let contents = &board.snapshot.nodes[node];
    for need in &wanted.request.devices {
        let (claim, request) = wanted.parts.get(&need.name)?;
        let of_need = |owner: &ClaimOwner| {
            let (main, sub) = owner
                .request
                .split_once('/')
                .map_or((owner.request.as_str(), None), |(main, sub)| (main, Some(sub)));
            let its = owner.pod_uid == pod.uid && owner.name == *claim && main == request;
            its.then(|| sub.map(str::to_owned))
        };
        for partition in &board.gpu_nodes[node].spec.partitions {
            let Owner::Claim(owner) = &partition.owner else { continue };
            let Some(subrequest) = of_need(owner) else { continue };
            let gpu = contents.gpus.iter().position(|gpu| gpu.uuid == partition.gpu)?;
            let instance = match &partition.instance {
                None => None,
                Some(held) => {
                    let profiles = &board.snapshot.geometries[contents.gpus[gpu].geometry?].profiles;
                    let profile = profiles.iter().position(|profile| same(&profile.name, &held.profile))?;
                    Some(PlannedInstance { profile, start: held.placement.start, exists: true })
                }
            };
            devices.push(PlacedDevice { request: need.name.clone(), subrequest, gpu, instance });
        }
    }
    Some(devices)
}

/// Puts a room on record. Answers what the pod that waits is told.
pub fn reserve(
    board: &Board,
    waiting: &PodInfo,
    room: &Room,
    offer: &Offer,
    wall: i64,
    changes: &mut Changes,
) -> String {
    let moved: Vec<&Arc<PodInfo>> = room.moves.iter().map(|step| &offer.pods[step.pod]).collect();
    let grace = moved.iter().filter_map(|pod| Some(pod.detail.as_ref()?.grace_seconds)).max();
    let end = Timestamp::from_second(wall + grace.unwrap_or_default() + PATIENCE).unwrap_or(Timestamp::MAX);
    let expires = end.to_string();
    let reservation = Reservation {
        pod: reference(waiting),
        controller: None,
        moves: moved.iter().map(|pod| reference(pod)).collect(),
        expires: expires.clone(),
    };
    let mut keep = |node: NodeIndex, devices: &[PlacedDevice], said: &Reservation| {
        let owner = Owner::Reservation(said.clone());
        let entries =
            devices.iter().filter_map(|device| entries::partition(board, node, device, owner.clone()));
        changes.added.entry(board.gpu_nodes[node].name_any()).or_default().extend(entries);
    };
    keep(room.place.node, &room.place.devices, &reservation);
    for (step, pod) in room.moves.iter().zip(&moved) {
        let said = Reservation {
            pod: reference(pod),
            controller: pod.detail.as_ref().and_then(|detail| detail.controller.clone()),
            moves: Vec::new(),
            expires: expires.clone(),
        };
        keep(step.node, &step.devices, &said);
    }
    let to = board.gpu_nodes[room.place.node].name_any();
    sentence(&to, &moved.iter().map(|pod| pod.id()).collect::<Vec<_>>())
}

/// What a pod is told while room is made for it.
pub fn told(board: &Board, all: &[Reserved<'_>], rooms: &Rooms, pod: &PodInfo) -> Option<String> {
    let its = |one: &&Reserved<'_>| one.key() == (pod.uid.clone(), false) && rooms.stay.contains(&one.key());
    let reserved = all.iter().find(its)?;
    let moved: Vec<String> =
        reserved.said.moves.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
    Some(sentence(&board.gpu_nodes[reserved.node].name_any(), &moved))
}

fn sentence(node: &str, moved: &[String]) -> String {
    let verb = if moved.len() == 1 { "is" } else { "are" };
    format!("room is being made on node {node}: {} {verb} moved", moved.join(", "))
}

fn reference(pod: &PodInfo) -> PodReference {
    PodReference { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
}

/// What a refusal adds if moving others was looked into.
pub fn in_vain(memory: &Memory, pod: &PodInfo) -> &'static str {
    match memory.in_vain(&pod.uid) {
        None => "",
        Some(NoMoves::Useless) => "; moving others, as far as that is allowed, would not make room",
        Some(NoMoves::NotFound) => {
            "; no way to make room by moving others was found within the set amount of work"
        }
    }
}

#[cfg(test)]
#[path = "moves_tests.rs"]
mod tests;
