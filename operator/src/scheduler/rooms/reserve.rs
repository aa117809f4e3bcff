//! A room is put on record, and what pods that wait for one are told.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kerf_crds::gpu_node::{Owner, PodReference, Reservation};
use kerf_planner::plan::{NoMoves, Room};
use kerf_planner::snapshot::{NodeIndex, PlacedDevice};
use kube::ResourceExt;

use super::super::entries::{self, Changes};
use super::super::memory::Memory;
use super::super::snapshot::Board;
use super::carry_on::Rooms;
use super::offer::Offer;
use super::record::Reserved;
use crate::cache::PodInfo;

/// A reservation stands for so long beyond the time that the pods which move may take to end, in seconds.
pub(super) const PATIENCE: i64 = 300;

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
    if let Some(&node) = rooms.expected.get(&pod.uid) {
        let node = board.gpu_nodes[node].name_any();
        return Some(format!("a place is kept for it on node {node}, and not free yet"));
    }
    let its = |one: &&Reserved<'_>| one.key() == (pod.uid.clone(), false) && rooms.stay.contains(&one.key());
    let reserved = all.iter().find(its)?;
    let moved: Vec<String> = reserved.said.moves.iter().map(PodReference::id).collect();
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
        None | Some(NoMoves::TooEarly) => "",
        Some(NoMoves::Useless) => "; moving others, as far as that is allowed, would not make room",
        Some(NoMoves::NotFound) => {
            "; no way to make room by moving others was found within the set amount of work"
        }
    }
}
