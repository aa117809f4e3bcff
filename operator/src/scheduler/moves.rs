//! Room that is made by moving others: who may be moved, what is kept for whom, and who is evicted.
//!
//! ```text
//!  1 the plan finds a room ─▶ reservations in the nodes' specs: one for the pod that waits, one for each that moves
//!  2 all of them on record ─▶ the pods are evicted, as far as disruption budgets let them go
//!  3 a place is free ──────▶ whoever it is kept for gets it: the pod that waits, or what came in place of one that moved
//! ```
//! A reservation that leads to nothing lapses. Nobody else gets its slices before; whose they are still, keeps them.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kerf_crds::gpu_node::{ClaimOwner, Owner, Partition, PodReference, Reservation};
use kerf_crds::partition_policy::MigMode;
use kerf_crds::profile::same;
use kerf_planner::plan::{NoMoves, Placement, Room};
use kerf_planner::snapshot::{Movable, Node, NodeIndex, PlacedDevice, PlannedInstance, Request, Snapshot};
use kube::ResourceExt;

use super::cycle::Looking;
use super::entries::{self, Changes};
use super::memory::Memory;
use super::queue::Candidate;
use super::requests::{self, Asks, Wanted};
use super::snapshot::{self, Board, give_back};
use crate::cache::{PodInfo, World, pod::seconds};
use crate::controller::matching::{Match, Matches};

/// Most rooms that are being made at the same time.
const AT_ONCE: usize = 4;
/// A reservation stands for so long beyond the time that the pods which move may take to end.
const PATIENCE: i64 = 300;

/// The entries of one reservation.
#[derive(Debug)]
pub struct Reserved<'a> {
    pub said: &'a Reservation,
    node: NodeIndex,
    /// UUIDs.
    gpus: BTreeSet<&'a str>,
}

impl Reserved<'_> {
    fn key(&self) -> Holder {
        holder(self.said)
    }
}

/// Whose a reservation is: the UID of the pod that waits, or of the one in whose place another comes.
type Holder = (String, bool);

fn holder(said: &Reservation) -> Holder {
    (said.pod.uid.clone(), said.controller.is_some())
}

/// What is to be done for rooms.
#[derive(Debug, Default)]
pub struct Rooms {
    /// Reservations that stay.
    stay: BTreeSet<Holder>,
    /// Who is to be evicted now, and for whom.
    pub evict: Vec<Eviction>,
    /// UIDs of the pods that wait for room which is being made, and of those that are moved for them.
    concerned: BTreeSet<String>,
    making: usize,
}

impl Rooms {
    /// Whether the reservation stays.
    pub fn stays(&self, said: &Reservation) -> bool {
        self.stay.contains(&holder(said))
    }

    /// The pod has a place: nobody who is still there is moved for it any more.
    pub fn settled(&mut self, world: &World, all: &[Reserved<'_>], pod_uid: &str) {
        for reserved in all.iter().filter(|one| one.key() == (pod_uid.to_owned(), false)) {
            self.stay.remove(&reserved.key());
            for moved in
                reserved.said.moves.iter().filter(|moved| pod(world, moved).is_some_and(|pod| is_open(pod)))
            {
                self.stay.remove(&(moved.uid.clone(), true));
            }
        }
        self.evict.retain(|eviction| eviction.room_for.uid != pod_uid);
    }

    /// What was kept has been given to whom it was kept for.
    pub fn given(&mut self, world: &World, all: &[Reserved<'_>], said: &Reservation) {
        match said.controller {
            None => self.settled(world, all, &said.pod.uid),
            Some(_) => {
                self.stay.remove(&holder(said));
            }
        }
    }
}

/// A pod that is moved.
#[derive(Clone, Debug)]
pub struct Eviction {
    pub pod: Arc<PodInfo>,
    pub room_for: PodReference,
    /// The node on which a place is kept for what comes in its place.
    pub to: String,
}

/// Every reservation on record.
pub fn on_record(world: &World) -> Vec<Reserved<'_>> {
    let mut all: Vec<Reserved<'_>> = Vec::new();
    // In the order of the board's nodes.
    for (node, gpu_node) in world.gpu_nodes.iter().enumerate() {
        for partition in &gpu_node.spec.partitions {
            let Owner::Reservation(said) = &partition.owner else { continue };
            let same = |other: &&mut Reserved<'_>| other.node == node && other.said == said;
            match all.iter_mut().find(same) {
                Some(known) => {
                    known.gpus.insert(&partition.gpu);
                }
                None => all.push(Reserved { said, node, gpus: [partition.gpu.as_str()].into() }),
            }
        }
    }
    all
}

/// Which reservations stay, and who is evicted for them. `placed`: UIDs of pods that have their place.
pub fn carry_on(looking: &Looking<'_>, all: &[Reserved<'_>], placed: &BTreeSet<String>, wall: i64) -> Rooms {
    let Looking { world, board, memory, now, .. } = looking;
    let mut rooms = Rooms::default();
    let stands = |said: &Reservation| seconds(&said.expires).is_some_and(|end| end > wall);
    let waiting = |reserved: &&Reserved<'_>| reserved.said.controller.is_none() && stands(reserved.said);
    for reserved in all.iter().filter(waiting) {
        let said = reserved.said;
        let waits = pod(world, &said.pod).is_some_and(|pod| is_open(pod) && pod.node.is_none());
        if !waits || placed.contains(&said.pod.uid) {
            continue;
        }
        let still_there: Vec<&Arc<PodInfo>> =
            said.moves.iter().filter_map(|moved| pod(world, moved)).filter(|pod| is_open(pod)).collect();
        // For each that has not gone yet: where something is kept for what comes in its place.
        let mut evict = Vec::new();
        for pod in &still_there {
            let of_it = |other: &&Reserved<'_>| holder(other.said) == (pod.uid.clone(), true);
            let Some(kept) = all.iter().find(of_it).filter(|kept| stands(kept.said)) else { continue };
            if is_movable(pod) {
                let to = board.gpu_nodes[kept.node].name_any();
                evict.push(Eviction { pod: Arc::clone(pod), room_for: said.pod.clone(), to });
            }
        }
        let nobody_has_gone = still_there.len() == said.moves.len();
        // Not all on record, somebody may not be moved any more, or a budget has refused: while nobody has gone, nothing is
        // lost by looking anew.
        if nobody_has_gone && (evict.len() < still_there.len() || !memory.may_make_room(&said.pod.uid, *now))
        {
            continue;
        }
        rooms.making += 1;
        rooms.stay.insert(reserved.key());
        rooms.concerned.insert(said.pod.uid.clone());
        for pod in still_there {
            rooms.stay.insert((pod.uid.clone(), true));
            rooms.concerned.insert(pod.uid.clone());
        }
        evict.retain(|eviction| memory.may_try(&eviction.pod.uid, *now));
        rooms.evict.extend(evict);
    }
    // What is kept for somebody who has gone is kept whatever becomes of the room.
    for reserved in all.iter().filter(|reserved| reserved.said.controller.is_some() && stands(reserved.said))
    {
        if pod(world, &reserved.said.pod).is_none_or(|pod| !is_open(pod)) {
            rooms.stay.insert(reserved.key());
        }
    }
    rooms
}

fn pod<'w>(world: &'w World, reference: &PodReference) -> Option<&'w Arc<PodInfo>> {
    world.pod(&reference.namespace, &reference.name, &reference.uid)
}

fn is_open(pod: &PodInfo) -> bool {
    !pod.done && !pod.deleting
}

fn is_movable(pod: &PodInfo) -> bool {
    pod.detail.as_ref().is_some_and(|detail| detail.movable && detail.controller.is_some())
        && pod.node.is_some()
        && is_open(pod)
}

/// The devices for a candidate of what is kept for it, if all of it is free now.
pub fn claim<'r>(
    looking: &Looking<'_>,
    matches: &Matches,
    all: &'r [Reserved<'_>],
    rooms: &Rooms,
    candidate: &Candidate,
) -> Option<(&'r Reservation, Placement)> {
    let (pod, detail) = (&candidate.pod, candidate.pod.detail.as_ref()?);
    let is_for_it = |said: &Reservation| match &said.controller {
        None => said.pod.uid == pod.uid,
        Some(controller) => {
            // While the one that moves is there, what its controller makes is made for another reason.
            detail.controller.as_ref() == Some(controller)
                && self::pod(looking.world, &said.pod).is_none_or(|moved| !is_open(moved))
        }
    };
    let mut kept = all.iter().filter(|one| rooms.stay.contains(&one.key()) && is_for_it(one.said));
    kept.find_map(|reserved| {
        let placement = try_place(looking, matches, reserved, pod, &candidate.wanted.request)?;
        Some((reserved.said, placement))
    })
}

/// A place on the reservation's GPUs, were it not there; everything else is as it is.
fn try_place(
    looking: &Looking<'_>,
    matches: &Matches,
    reserved: &Reserved<'_>,
    pod: &PodInfo,
    request: &Request,
) -> Option<Placement> {
    let board = looking.board;
    let mut node = board.snapshot.nodes[reserved.node].clone();
    let mut geometries = board.snapshot.geometries.clone();
    let others = |partition: &Partition| !matches!(&partition.owner, Owner::Reservation(said) if holder(said) == reserved.key());
    for (index, gpu) in node.gpus.iter_mut().enumerate() {
        if reserved.gpus.contains(gpu.uuid.as_str()) {
            let stuck = gpu.stuck.take();
            *gpu = snapshot::gpu_with(board, matches, reserved.node, index, others, &mut geometries)?;
            gpu.stuck = stuck;
        } else {
            gpu.closed = Some("not reserved".into());
        }
    }
    if reserved.said.controller.is_none() {
        give_back(&mut node.free_milli, &pod.milli);
    }
    let mut nodes = vec![Node::default(); board.snapshot.nodes.len()];
    nodes[reserved.node] = node;
    let snapshot = Snapshot { geometries, nodes, requests: vec![request.clone()], ..Snapshot::default() };
    kerf_planner::plan(&snapshot).placements.pop()
}

/// Tells the planner who may be moved, and for whom.
pub fn offer(
    looking: &Looking<'_>,
    matches: &Matches,
    rooms: &Rooms,
    candidates: &[Candidate],
    wall: i64,
) -> Offer {
    let Looking { world, memory, now, .. } = looking;
    let mut offer = Offer::default();
    let any_may = matches.values().flat_map(|gpus| gpus.values()).filter_map(Match::policy);
    if rooms.making >= AT_ONCE || !any_may.clone().any(|policy| policy.spec.reshape.moves.max_pods > 0) {
        return offer;
    }
    for candidate in candidates {
        let waits = candidate.instead_of.is_none()
            && !rooms.concerned.contains(&candidate.pod.uid)
            && memory.may_make_room(&candidate.pod.uid, *now);
        let waited = u64::try_from(wall - candidate.pod.created).unwrap_or_default();
        offer.waited.push(waits.then_some(waited));
    }
    if offer.waited.iter().all(Option::is_none) {
        return offer;
    }
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    let may = |pod: &&Arc<PodInfo>| {
        is_movable(pod) && !rooms.concerned.contains(&pod.uid) && memory.calm(&pod.uid, *now)
    };
    for pod in pods.filter(may) {
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
    for (movable, pod) in offer.movable.iter_mut().zip(&offer.pods) {
        movable.price = 1 + ranks.range(..worth(pod)).count() as u32;
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
}

fn movable(looking: &Looking<'_>, matches: &Matches, pod: &PodInfo) -> Option<Movable> {
    let Looking { world, board, selectors, memo, .. } = looking;
    let name = pod.node.as_deref()?;
    let node = board.node(name)?;
    let Asks::For(wanted) = requests::read_afresh(world, board, selectors, memo, pod) else { return None };
    let is_its_own =
        |claim: &String| world.claim(&pod.namespace, claim).is_some_and(|claim| is_alone(claim, pod));
    if !wanted.parts.values().all(|(claim, _)| is_its_own(claim)) {
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
    let budgets = budgets.map(|(index, _)| index).collect();
    Some(Movable { request: wanted.request, node, devices, price: 0, budgets, most_moves, after_seconds })
}

/// Whether the claim is this pod's alone: if it is shared, others would lose their place with it.
fn is_alone(claim: &ResourceClaim, pod: &PodInfo) -> bool {
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
