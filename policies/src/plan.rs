//! What the planner answers.

use serde::{Deserialize, Serialize};
use std::sync::Arc;

use crate::snapshot::NodeIndex;

pub use crate::snapshot::{PlacedDevice, PlannedInstance};

/// Answer to a [`crate::snapshot::Snapshot`]: each of its requests is in exactly one of the three lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Requests with a place, in the order in which they were placed.
    pub placements: Vec<Placement>,
    /// Requests that have one once others have moved. At most one in a plan: what becomes of it decides about the next.
    pub rooms: Vec<Room>,
    /// Requests without one, and why.
    pub refusals: Vec<Refusal>,
}

/// A place for one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Index into the snapshot's requests.
    pub request: usize,
    /// The node.
    pub node: NodeIndex,
    /// Its devices, in the order of the request's needs.
    pub devices: Vec<PlacedDevice>,
}

/// Room for a request, once others have moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Room {
    /// The request's place. Some of it is still somebody's.
    pub place: Placement,
    /// Those who move.
    pub moves: Vec<Move>,
}

/// A pod's new place, free now or after other moves of the same plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// Index into the snapshot's movable pods.
    pub pod: usize,
    /// The node.
    pub node: NodeIndex,
    /// Its devices, in the order of the request's needs.
    pub devices: Vec<PlacedDevice>,
}

/// Why a request has no place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// Index into the snapshot's requests.
    pub request: usize,
    /// The kind of reason.
    pub kind: RefusalKind,
    /// One sentence for people, with the evidence: "needs 3g.40gb: 4 GPUs have the memory free, none in one piece".
    pub message: String,
    /// How sure it is that there is no place.
    pub verdict: Verdict,
    /// Present: moving others was looked into.
    pub moves: Option<NoMoves>,
}

/// How sure a refusal is, for what the cluster has left when the request's (or its gang's) turn comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// There is no place, which [`crate::check`] can verify.
    Impossible(Arc<Certificate>),
    /// There is no place: everything was tried.
    Exhausted,
    /// None was found within a set amount of work. There may be one.
    NotFound,
}

/// A proof that a request, or all members of a gang together, have no place: each of them weighs something, and all nodes
/// together can take less than all of them weigh.
///
/// A node can take no more than the least of these:
/// - the weight of as many of each kind of member as it could take of that kind alone;
/// - the weight of the devices that its GPUs could give them, where a member's weight is shared out equally over its
///   needs, and a need's over its devices;
/// - for each resource that all kinds need that weigh something, what is free of it times the most weight for an amount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    /// What is taken for granted.
    pub scope: Scope,
    /// Weights of the gang's members, in the order of the snapshot; of a request in no gang one.
    pub weights: Vec<u64>,
    /// So much the nodes can take at most. Less than the sum of the weights.
    pub room: u128,
}

/// What a [`Certificate`] takes for granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// GPUs and policies, labels and taints: even if all that runs ended, and whatever is closed, stuck, cordoned or not
    /// ready now was as it should be.
    WhateverEnds,
    /// The snapshot, and that the first so many placements of the plan are carried out.
    Beside(usize),
}

/// Why nobody is moved for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoMoves {
    /// No moves that are allowed make room, so many as are allowed together: everything was tried.
    Useless,
    /// None now; some pods may be moved only for a request that has waited for longer.
    TooEarly,
    /// None were found within a set amount of work, or not everything was tried.
    NotFound,
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// No managed GPU of the cluster could ever serve it.
    NoSuchDevice,
    /// GPUs could, but not now.
    NoRoom,
    /// GPUs could now, but their nodes cannot take the pod.
    NodesDoNotFit,
}
