//! What the planner answers.

use crate::snapshot::{GpuIndex, NodeIndex, ProfileIndex};

/// Answer to a [`crate::snapshot::Snapshot`]: each of its requests is in exactly one of the two lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Requests with a place, in the order in which they were placed.
    pub placements: Vec<Placement>,
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

/// One device of a placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedDevice {
    /// Name of the claim's request.
    pub request: String,
    /// Name of the subrequest, where there is one.
    pub subrequest: Option<String>,
    /// GPU on the placement's node.
    pub gpu: GpuIndex,
    /// The instance; `None`: the whole GPU.
    pub instance: Option<PlannedInstance>,
}

/// A MIG instance at an exact place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedInstance {
    /// Profile, by index into the GPU's geometry.
    pub profile: ProfileIndex,
    /// First memory slice.
    pub start: u32,
    /// Whether it exists already.
    pub exists: bool,
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
