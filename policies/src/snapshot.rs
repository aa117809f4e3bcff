//! What the planner is told: GPUs and what is on them, nodes and what they have left, requests in the order in which
//! they are to be served.
//!
//! Written down, a field that is left out has its default, so that an old record can still be read; a field that is not
//! known is an error, as what it says would be left out of account.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::shared::Shared;

/// Index into [`Snapshot::geometries`].
pub type GeometryIndex = usize;
/// Index into [`Geometry::profiles`].
pub type ProfileIndex = usize;
/// Index into [`Snapshot::nodes`].
pub type NodeIndex = usize;
/// Index into [`Node::gpus`].
pub type GpuIndex = usize;
/// Index into [`Snapshot::budgets`].
pub type BudgetIndex = usize;

/// The cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Snapshot {
    /// What GPUs can be cut into; GPUs refer to these by index. At most 64 memory slices each.
    pub geometries: Vec<Geometry>,
    /// Nodes with GPUs that Kerf manages or could manage.
    pub nodes: Shared<Node>,
    /// Unplaced requests, first to be served first.
    pub requests: Vec<Request>,
    /// Running pods that may be moved for a request that has no room otherwise.
    pub movable: Vec<Movable>,
    /// How many more pods each disruption budget lets go now.
    pub budgets: Vec<u32>,
    /// What is asked for these days, to judge what room is worth. Empty: nothing is known, all sizes count alike.
    pub demand: Vec<Demand>,
}

/// Requests of one kind that come again and again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Demand {
    /// One of them.
    pub request: Request,
    /// How many of them there are, beside the other kinds.
    pub weight: u32,
}

/// What a kind of GPU can be cut into.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Geometry {
    /// Name, for messages.
    pub name: String,
    /// Memory slices; at most 64.
    pub memory_slices: u32,
    /// Engines that instances share out.
    pub engines: Engines,
    /// Profiles, in any order.
    pub profiles: Vec<Profile>,
}

/// One profile of a geometry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Profile {
    /// NVML's name.
    pub name: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute slices.
    pub compute_slices: u32,
    /// Memory slices.
    pub size: u32,
    /// First memory slices at which it may be placed.
    pub starts: Vec<u32>,
    /// How many an empty GPU can have.
    pub max_instances: u32,
    /// Engines that one instance takes.
    pub engines: Engines,
}

/// Part of a GPU: what a share takes, or what there is for shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Portion {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Compute, in any unit that is one for all of a geometry, such as thousandths of a percent of the whole GPU's.
    pub compute_milli: u64,
    /// MPS clients. A share has at least one.
    pub clients: u32,
}

/// What shares are cut from: an instance of the profile, or, without one, a GPU that is not cut into instances.
pub type Carrier = Option<ProfileIndex>;

/// A share that is somebody's, reserved, or still in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakenShare {
    /// The instance that carries it, by profile and start; `None`: the GPU itself.
    pub instance: Option<(ProfileIndex, u32)>,
    /// What it takes.
    pub portion: Portion,
}

/// Counts of engines that are shared out between instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Engines {
    pub decoder: u32,
    pub encoder: u32,
    pub jpeg: u32,
    pub ofa: u32,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// Name.
    pub name: String,
    /// Labels, for selectors and affinity; shared with whoever else keeps them.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Taints that keep pods away (NoSchedule and NoExecute).
    pub taints: Vec<Taint>,
    /// Cordoned.
    pub unschedulable: bool,
    /// Ready, and its daemon follows the spec.
    pub ready: bool,
    /// What is left of each resource after every pod bound or planned here, in thousandths of the resource's unit
    /// (`cpu`, `memory`, `pods`, `ephemeral-storage`, extended resources). A missing resource is not there at all.
    pub free_milli: BTreeMap<String, i128>,
    /// GPUs.
    pub gpus: Vec<Gpu>,
}

/// A node's taint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Taint {
    pub key: String,
    pub value: String,
    /// `NoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpu {
    /// UUID.
    pub uuid: String,
    /// What it can be cut into, if at all.
    pub geometry: Option<GeometryIndex>,
    /// Present: nothing may be placed on it, and why (unmanaged, unhealthy, in conflict, no policy).
    pub closed: Option<String>,
    /// Present: nothing can be made, destroyed or switched on it now, and why. What exists is handed out.
    pub stuck: Option<String>,
    /// Whether instances can be had: MIG mode is on, or may be switched on while the GPU is empty. A taken instance
    /// that does not exist yet does not stand in the way of a switch: it is what the switch is for.
    pub mig: Capability,
    /// Whether the GPU can be handed out whole: MIG mode is off, or may be switched off while the GPU is empty.
    pub whole: Capability,
    /// Profiles that the policy allows on it, to be made and to be handed out, by index into its geometry.
    pub allowed: BTreeSet<ProfileIndex>,
    /// The layout is stated: instances are handed out as they are, none is made and none destroyed.
    pub fixed: bool,
    /// Fill started GPUs first, or prefer the emptiest.
    pub strategy: Strategy,
    /// What is on it, or is to be.
    pub instances: Vec<Instance>,
    /// The whole GPU is somebody's, or still in use by somebody.
    pub taken_whole: bool,
    /// Whether it can carry shares itself: MIG mode is off, or may be switched off while the GPU is empty.
    pub shared: Capability,
    /// What all shares of a carrier together may take. What is missing carries none.
    #[serde(with = "pairs")]
    pub share_room: BTreeMap<Carrier, Portion>,
    /// All shares of one carrier must be of one size: MPS before protocol 3 has one limit for all clients of a server.
    pub equal_shares: bool,
    /// Shares on it. The instances that carry some are among `instances`, taken; one whose instance is not does not count.
    pub shares: Vec<TakenShare>,
}

impl Gpu {
    /// The GPU if nobody had anything of it. What a stated layout has stays, as nobody's.
    #[must_use]
    pub fn emptied(&self) -> Self {
        let free = |instance: &Instance| Instance { state: InstanceState::Idle, ..instance.clone() };
        let instances = if self.fixed { self.instances.iter().map(free).collect() } else { Vec::new() };
        Self { instances, shares: Vec::new(), taken_whole: false, ..self.clone() }
    }

    /// The instances that carry shares, by profile and start.
    pub fn carrying(&self) -> impl Iterator<Item = (ProfileIndex, u32)> {
        self.shares_there().filter_map(|share| share.instance)
    }

    /// The shares that count.
    pub fn shares_there(&self) -> impl Iterator<Item = &TakenShare> {
        let taken = |(profile, start): (ProfileIndex, u32)| {
            let it = |one: &Instance| one.profile == Some(profile) && one.start == start;
            self.instances.iter().any(|one| one.state == InstanceState::Taken && it(one))
        };
        self.shares.iter().filter(move |share| share.instance.is_none_or(taken))
    }
}

/// Whether a use of the GPU is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Capability {
    /// Not, in its mode.
    #[default]
    No,
    /// At once.
    Now,
    /// After a switch of MIG mode, which needs the GPU empty.
    AfterSwitch,
}

/// See [`Gpu::strategy`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Strategy {
    #[default]
    Pack,
    Spread,
}

/// A MIG instance that exists or is planned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    /// Profile, by index into the GPU's geometry; `None` for one whose profile the geometry does not have.
    pub profile: Option<ProfileIndex>,
    /// Memory slices `[start, start + size)`.
    pub start: u32,
    /// See `start`.
    pub size: u32,
    /// Whether and for whom it can be had.
    pub state: InstanceState,
    /// Whether it exists in the hardware (else it is only planned).
    pub exists: bool,
}

/// Whether an instance can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InstanceState {
    /// Nobody's: to be reused, or destroyed where it is in the way.
    Idle,
    /// Kept ready by a policy: as `Idle`, but used only for its own profile as long as other room is left.
    Warm,
    /// Somebody's, reserved, foreign, or still in use after its owner has gone.
    Taken,
}

/// One pod's need for devices, all of them on one node and all or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// `namespace/pod`, unique in the snapshot.
    pub id: String,
    /// Higher is served first; equal ones in the snapshot's order.
    pub priority: i32,
    /// What it asks for.
    pub devices: Vec<DeviceNeed>,
    /// Conditions over several of its devices.
    pub constraints: Vec<Constraint>,
    /// What else the pod needs of a node.
    pub pod: PodNeeds,
    /// Nodes that are out of the question although the snapshot would allow them (a place withdrawn a moment ago).
    pub avoid: BTreeSet<NodeIndex>,
    /// Requests of one gang get their places together or not at all.
    pub gang: Option<String>,
    /// For how long it has waited; `None`: nobody is to be moved for it now.
    pub waited_seconds: Option<u64>,
}

/// One request of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceNeed {
    /// Name of the request in the claim.
    pub name: String,
    /// Alternatives, best first: the first that fits is taken (`firstAvailable`).
    pub alternatives: Vec<Want>,
}

/// One way to satisfy a [`DeviceNeed`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Want {
    /// Name of the subrequest, where the claim lists alternatives.
    pub subrequest: Option<String>,
    /// Number of devices, all of this kind.
    pub count: u32,
    /// What people call it, for messages: `3g.40gb`, `a whole GPU`.
    pub label: String,
    /// MIG profiles that will do, by geometry.
    pub profiles: BTreeMap<GeometryIndex, BTreeSet<ProfileIndex>>,
    /// Whether a whole GPU will do.
    pub whole: bool,
    /// Shares that will do, by geometry and by what carries them.
    #[serde(with = "pairs")]
    pub shares: BTreeMap<(GeometryIndex, Carrier), Portion>,
    /// The GPUs that will do (or whose instances will), where the claim's selectors tell GPUs of one kind apart;
    /// `None`: any.
    pub gpus: Option<BTreeSet<(NodeIndex, GpuIndex)>>,
}

/// A condition over several devices of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constraint {
    /// Names of the device needs that it is about; empty: all.
    pub requests: BTreeSet<String>,
    /// The devices' GPUs must have the same value, or all different ones.
    pub kind: ConstraintKind,
    /// The value of each GPU; one without a value satisfies nothing.
    #[serde(with = "pairs")]
    pub values: BTreeMap<(NodeIndex, GpuIndex), String>,
}

/// See [`Constraint::kind`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ConstraintKind {
    #[default]
    Same,
    Distinct,
}

/// One device of a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedDevice {
    /// Name of the claim's request.
    pub request: String,
    /// Name of the subrequest, where there is one.
    pub subrequest: Option<String>,
    /// GPU on the placement's node.
    pub gpu: GpuIndex,
    /// The instance; `None`: the GPU itself.
    pub instance: Option<PlannedInstance>,
    /// A share of it; `None`: all of it.
    pub share: Option<Portion>,
}

impl PlacedDevice {
    /// The instance by profile and start.
    pub fn carrier(&self) -> Option<(ProfileIndex, u32)> {
        self.instance.map(|planned| (planned.profile, planned.start))
    }
}

/// A MIG instance at an exact place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedInstance {
    /// Profile, by index into the GPU's geometry.
    pub profile: ProfileIndex,
    /// First memory slice.
    pub start: u32,
    /// Whether it exists already.
    pub exists: bool,
}

/// A running pod that may be moved: another comes in its place and asks for the same again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Movable {
    /// What it asked for.
    pub request: Request,
    /// Its node.
    pub node: NodeIndex,
    /// Its devices, in the order of the request's needs.
    pub devices: Vec<PlacedDevice>,
    /// What a move of it costs. Of plans with equally many moves the cheaper is preferred.
    pub price: u32,
    /// The disruption budgets that it counts for.
    pub budgets: Vec<BudgetIndex>,
    /// It may be moved by a plan of at most so many moves.
    pub most_moves: u32,
    /// It may be moved for a request that has waited for so long.
    pub after_seconds: u64,
}

/// What a pod needs of its node, besides GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PodNeeds {
    /// Requests in thousandths of the unit, `pods: 1000` included.
    pub milli: BTreeMap<String, i128>,
    /// `spec.nodeSelector`.
    pub node_selector: BTreeMap<String, String>,
    /// Required node affinity: terms are alternatives, the requirements of a term all hold. Empty: no condition.
    pub affinity: Vec<Vec<NodeRequirement>>,
    /// Tolerations.
    pub tolerations: Vec<Toleration>,
}

/// A requirement on a node's label, or on its name where `key` is [`NodeRequirement::NAME`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeRequirement {
    pub key: String,
    pub operator: Operator,
    pub values: Vec<String>,
}

impl NodeRequirement {
    /// Stands for the field `metadata.name`.
    pub const NAME: &'static str = "metadata.name";
}

/// Operators of node selectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operator {
    #[default]
    In,
    NotIn,
    Exists,
    DoesNotExist,
    Gt,
    Lt,
}

/// A pod's toleration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Toleration {
    /// Empty with `exists`: every key.
    pub key: String,
    /// `Exists` rather than `Equal`.
    pub exists: bool,
    pub value: String,
    /// Empty: every effect.
    pub effect: String,
}

/// A map whose keys JSON cannot have, as a list of pairs.
mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        map: &BTreeMap<K, V>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(map)
    }

    pub fn deserialize<'de, K, V, D>(from: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(Vec::<(K, V)>::deserialize(from)?.into_iter().collect())
    }
}
