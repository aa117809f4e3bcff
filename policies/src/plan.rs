//! What the planner answers.

use crate::snapshot::NodeIndex;

pub use crate::snapshot::{PlacedDevice, PlannedInstance};

/// Answer to a [`crate::snapshot::Snapshot`]: each of its requests is in exactly one of the three lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Requests with a place, in the order in which they were placed.
    pub placements: Vec<Placement>,
    /// Requests that have one once others have moved. At most one in a plan: what becomes of it decides about the next.
    pub rooms: Vec<Room>,
    /// Requests without one, and why.
    pub refusals: Vec<Refusal>,
}

/// A place for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Index into the snapshot's requests.
    pub request: usize,
    /// The node.
    pub node: NodeIndex,
    /// Its devices, in the order of the request's needs.
    pub devices: Vec<PlacedDevice>,
}

/// Room for a request, once others have moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// The request's place. Some of it is still somebody's.
    pub place: Placement,
    /// Those who move.
    pub moves: Vec<Move>,
}

/// A pod's new place, free now or after other moves of the same plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Index into the snapshot's movable pods.
    pub pod: usize,
    /// The node.
    pub node: NodeIndex,
    /// Its devices, in the order of the request's needs.
    pub devices: Vec<PlacedDevice>,
}

/// Why a request has no place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Index into the snapshot's requests.
    pub request: usize,
    /// The kind of reason.
    pub kind: RefusalKind,
    /// One sentence for people, with the evidence: "needs 3g.40gb: 4 GPUs have the memory free, none in one piece".
    pub message: String,
    /// Present: moving others was looked into.
    pub moves: Option<NoMoves>,
}

/// Why nobody is moved for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoMoves {
    /// No moves that are allowed make room.
    Useless,
    /// None now; some pods may be moved only for a request that has waited for longer.
    TooEarly,
    /// None were found within a set amount of work, or not everything was tried.
    NotFound,
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// No managed GPU of the cluster could ever serve it.
    NoSuchDevice,
    /// GPUs could, but not now.
    NoRoom,
    /// GPUs could now, but their nodes cannot take the pod.
    NodesDoNotFit,
}
