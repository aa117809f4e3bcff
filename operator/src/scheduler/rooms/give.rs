//! What was kept is given to whom it was kept for.

use std::collections::BTreeSet;
use std::sync::Arc;

use kerf_crds::gpu_node::Reservation;
use kerf_planner::plan::Placement;
use kerf_planner::shared::Shared;
use kerf_planner::snapshot::{Node, NodeIndex, Request, Snapshot};

use super::super::decision::Looking;
use super::super::queue::Candidate;
use super::super::snapshot::{self, give_back};
use super::carry_on::Rooms;
use super::record::{Holder, Reserved, has_gone, holder};
use crate::cache::PodInfo;
use crate::controller::matching::Matches;

/// What a candidate gets of what is kept for it.
#[derive(Debug)]
pub enum Kept<'r> {
    /// Nothing.
    Nothing,
    /// Something on this node that is not free yet.
    NotYet(NodeIndex),
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
    // One that leaves its place for a better one is no successor.
    if candidate.instead_of.is_some() {
        return Kept::Nothing;
    }
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
        } else if matches!(found, Kept::Nothing) {
            found = Kept::NotYet(reserved.node);
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
    let mut nodes: Shared<Node> =
        std::iter::repeat_n(Arc::new(Node::default()), board.snapshot.nodes.len()).collect();
    nodes[reserved.node] = node;
    let snapshot = Snapshot { geometries, nodes, requests: vec![request.clone()], ..Snapshot::default() };
    kerf_planner::plan(&snapshot).placements.pop()
}
