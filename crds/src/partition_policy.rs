//! `PartitionPolicy`: what an administrator wants done with which GPUs.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::gpu_node::Isolation;
use crate::pattern::Pattern;

/// A PartitionPolicy says which GPUs of which nodes Kerf partitions, and how: cut to fit the pods that are waiting
/// (Dynamic), kept in a stated layout (Static), or not cut at all (Off). A GPU that no policy matches, or that two
/// policies match, is left exactly as it is.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kerf.dev",
    version = "v1alpha1",
    kind = "PartitionPolicy",
    plural = "partitionpolicies",
    shortname = "pp",
    category = "kerf",
    status = "PartitionPolicyStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "A PartitionPolicy says which GPUs of which nodes Kerf partitions, and how.",
    printcolumn = r#"{"name":"Mode","type":"string","jsonPath":".spec.mig.mode"}"#,
    printcolumn = r#"{"name":"Nodes","type":"integer","jsonPath":".status.nodes"}"#,
    printcolumn = r#"{"name":"GPUs","type":"integer","jsonPath":".status.gpus"}"#,
    printcolumn = r#"{"name":"Layout","type":"string","jsonPath":".status.layoutSummary"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].reason"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct PartitionPolicySpec {
    /// The nodes whose GPUs the policy is about, by node label. Empty: every node that runs Kerf's node daemon.
    #[serde(default)]
    pub node_selector: LabelSelector,

    /// The GPUs of those nodes. Empty: all of them.
    #[serde(default)]
    pub gpus: GpuSelector,

    /// How matched GPUs are cut.
    #[serde(default)]
    pub mig: MigPolicy,

    /// Which GPUs may be shared out in parts under MPS. Left out: none.
    #[serde(default)]
    pub shares: SharesPolicy,

    /// Whether pods that ask for whole GPUs by `nvidia.com/gpu` are served from the matched GPUs. `Serve`: such pods in
    /// opted-in namespaces wait for Kerf. `Ignore`: they are left to whoever else serves that resource; claims against
    /// the DeviceClass `gpu.kerf.dev` are still served.
    #[serde(default)]
    pub whole_gpus: WholeGpus,

    /// Where new partitions go: `Pack` fills started GPUs first and keeps empty ones whole; `Spread` prefers the
    /// emptiest GPU.
    #[serde(default)]
    pub placement: PlacementStrategy,

    /// How fast GPUs are reshaped, and who may be disturbed for it.
    #[serde(default)]
    pub reshape: ReshapePolicy,

    /// What happens to pods on hardware that fails.
    #[serde(default)]
    pub health: HealthPolicy,
}

/// Which GPUs of a node. All given conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSelector {
    /// Product names as NVML gives them, as patterns (`NVIDIA A100*`). Empty: any product.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = ("self.all(p, !p.matches(r'[\\\\^$|{}\\[\\]]'))",
            "gpus.products: a pattern is a product's name with '*' and '?' as wildcards, e.g. 'NVIDIA A100*'; it is no regular expression")
    )]
    pub products: Vec<Pattern>,

    /// GPU UUIDs (`GPU-…`). Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(
        validation = ("self.all(u, u.startsWith('GPU-'))", "gpus.uuids: a GPU's UUID begins with 'GPU-', as `nvidia-smi -L` prints it")
    )]
    pub uuids: Vec<String>,

    /// NVML indices on the node, from 0. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = ("self.all(i, i >= 0 && i < 256)", "gpus.indices: an index is between 0 and 255"))]
    pub indices: Vec<i32>,
}

/// How GPUs are cut with MIG.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self.mode == 'Static' ? has(self.layout) && size(self.layout) > 0 : !has(self.layout) || size(self.layout) == 0",
        "mig.layout: state the layout with mode Static, and only then"),
    validation = ("self.mode == 'Dynamic' || !has(self.warm) || size(self.warm) == 0",
        "mig.warm: only mode Dynamic keeps warm instances; with Static, put them into mig.layout")
)]
pub struct MigPolicy {
    /// `Dynamic`: instances are made for the pods that are waiting. `Static`: each matched GPU has the stated layout.
    /// `Off`: the GPU is handed out whole, with MIG mode off where `modeSwitch` allows switching it.
    #[serde(default)]
    pub mode: MigMode,

    /// Profiles that may be made or handed out, as patterns over NVML's names (`1g.*`, `*+me`). Empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = ("self.all(p, p.matches('^[A-Za-z0-9.+*?-]+$'))",
            "mig.allowedProfiles: a pattern has letters, digits, '.', '+', '-', and '*' or '?' as wildcards, e.g. '1g.*'")
    )]
    pub allowed_profiles: Vec<Pattern>,

    /// The layout of each matched GPU, for mode Static.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub layout: Vec<LayoutEntry>,

    /// Instances to keep ready over all matched GPUs together, for mode Dynamic: as a pod takes one, another is made
    /// where there is room. Warm instances give way to pods that need their slices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = ("self.all(w, self.exists_one(v, v.profile == w.profile))", "mig.warm: name each profile once, with its count")
    )]
    pub warm: Vec<WarmInstances>,

    /// Whether MIG mode may be switched on a GPU that has no client. `Never`: GPUs are used in the mode they are in.
    /// `WithoutReset`: only where the GPU needs no reset for it (Hopper and later). `WithReset`: also where switching
    /// resets the GPU (Ampere).
    #[serde(default)]
    pub mode_switch: ModeSwitch,
}

/// How GPUs are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MigMode {
    #[default]
    Dynamic,
    Static,
    Off,
}

/// Whether MIG mode may be switched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ModeSwitch {
    /// Never: GPUs are used in the mode they are in.
    Never,
    /// Only where the GPU needs no reset for it (Hopper and later).
    #[default]
    WithoutReset,
    /// Also where switching resets the GPU (Ampere).
    WithReset,
}

/// A number of instances of one profile on each GPU, or one instance at a stated place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("!has(self.start) || self.count == 1", "mig.layout: an entry with 'start' is one instance; leave out 'count' or make it 1")
)]
pub struct LayoutEntry {
    /// NVML's name of the profile, e.g. `3g.40gb`.
    #[schemars(length(min = 1, max = 63))]
    pub profile: String,

    /// How many on each GPU.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,

    /// First memory slice of the instance. Left out: Kerf chooses the places so that the whole layout fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 63))]
    pub start: Option<u32>,
}

fn one() -> u32 {
    1
}

/// A number of instances of one profile.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmInstances {
    /// NVML's name of the profile, e.g. `1g.10gb`.
    #[schemars(length(min = 1, max = 63))]
    pub profile: String,

    /// How many free instances to keep.
    #[schemars(range(min = 0, max = 1024))]
    pub count: u32,
}

/// Shares: parts of GPUs or of MIG instances, of any size, that several pods have at the same time under MPS. Which limits
/// hold against what is said in docs/isolation.md.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("!has(self.instances) || size(self.instances) == 0 || self.isolation == 'Process'",
        "shares.instances: the shares of a MIG instance are kept from each other by MPS alone; allow that with 'isolation: Process'")
)]
pub struct SharesPolicy {
    /// Whether the matched GPUs may carry shares while they are not cut into instances.
    #[serde(default)]
    pub gpus: SharesMode,

    /// Profiles whose instances may carry shares, as patterns over NVML's names (`3g.*`), where `mig` allows them: the
    /// hardware keeps an instance from others, and MPS its shares from each other. Empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = ("self.all(p, p.matches('^[A-Za-z0-9.+*?-]+$'))",
            "shares.instances: a pattern has letters, digits, '.', '+', '-', and '*' or '?' as wildcards, e.g. '3g.*'")
    )]
    pub instances: Vec<Pattern>,

    /// The weakest isolation that is handed out on these GPUs. `Driver`: only where the GPU's driver enforces the limit on
    /// memory. `Process`: also where MPS alone does, which a process can get around.
    #[serde(default = "default_isolation")]
    pub isolation: Isolation,

    /// Most shares on one GPU or instance. MPS itself allows 48 or 60 clients.
    #[serde(default = "default_max_shares")]
    #[schemars(range(min = 1, max = 60))]
    pub max_per_gpu: u32,

    /// Memory of each GPU or instance that is not shared out, in bytes or as a quantity (`2Gi`): MPS itself and each client's context
    /// need some.
    #[serde(default = "default_memory_reserve")]
    pub memory_reserve: Quantity,

    /// How much compute the shares of one GPU or instance may have together, in percent of it. Above 100 they get in each other's
    /// way when all are busy.
    #[serde(default = "default_compute_percent")]
    #[schemars(range(min = 100, max = 1000))]
    pub compute_percent: u32,
}

/// Whether GPUs may carry shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SharesMode {
    Allow,
    #[default]
    Never,
}

fn default_isolation() -> Isolation {
    Isolation::Driver
}

fn default_max_shares() -> u32 {
    48
}

fn default_memory_reserve() -> Quantity {
    Quantity("1Gi".to_owned())
}

fn default_compute_percent() -> u32 {
    100
}

impl Default for SharesPolicy {
    fn default() -> Self {
        Self {
            gpus: SharesMode::default(),
            instances: Vec::new(),
            isolation: default_isolation(),
            max_per_gpu: default_max_shares(),
            memory_reserve: default_memory_reserve(),
            compute_percent: default_compute_percent(),
        }
    }
}

/// Whether `nvidia.com/gpu` is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WholeGpus {
    /// Kerf serves `nvidia.com/gpu` from the matched GPUs.
    Serve,
    /// Kerf leaves `nvidia.com/gpu` alone; claims against its DeviceClass `gpu.kerf.dev` are still served.
    #[default]
    Ignore,
}

/// Where new partitions go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PlacementStrategy {
    #[default]
    Pack,
    Spread,
}

/// How fast GPUs are reshaped, and what may be disturbed for it: nothing, unless it is said here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReshapePolicy {
    /// How many GPUs of one node may be reshaped at the same time. Where policies share a node, the smallest number
    /// holds for all of it.
    #[serde(default = "default_concurrent_gpus")]
    #[schemars(range(min = 1, max = 64))]
    pub max_concurrent_gpus_per_node: u32,

    /// Which running pods may be moved to make room for a pod that waits. Left out: none.
    #[serde(default)]
    pub moves: MovePolicy,

    /// Pods that may be restarted when nothing but they keeps a GPU from being as the policy says, as a monitor does that
    /// holds the GPU open while its MIG mode is to be switched. They are evicted, so disruption budgets hold. Never
    /// restarted: a pod without a controller that makes it again, one with ResourceClaims, and Kerf's own. Empty: nobody.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub restartable_clients: Vec<RestartableClients>,
}

/// Moving running pods: where a waiting pod has no room, but would have if a few others were elsewhere, these are evicted
/// and what comes in their place is given other partitions, which are kept for them. Only pods that their owner has
/// annotated `kerf.dev/movable: "true"`, that a controller makes again, whose priority is not higher than that of the
/// waiting pod, and that their PodDisruptionBudgets let go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MovePolicy {
    /// How many pods may be moved for one that waits. 0: none.
    #[serde(default)]
    #[schemars(range(min = 0, max = 4))]
    pub max_pods: u32,

    /// How long the pod must have waited, in seconds.
    #[serde(default = "default_after_seconds")]
    #[schemars(range(min = 0, max = 86400))]
    pub after_seconds: u32,
}

fn default_after_seconds() -> u32 {
    30
}

impl Default for MovePolicy {
    fn default() -> Self {
        Self { max_pods: 0, after_seconds: default_after_seconds() }
    }
}

/// Pods of one namespace, by their labels.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("(has(self.podSelector.matchLabels) && size(self.podSelector.matchLabels) > 0) || (has(self.podSelector.matchExpressions) && size(self.podSelector.matchExpressions) > 0)",
        "reshape.restartableClients: an empty podSelector would be every pod of the namespace; name the labels of those that may be restarted, e.g. 'matchLabels: {app: nvidia-dcgm-exporter}'")
)]
pub struct RestartableClients {
    /// Their namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,

    /// Their labels. Must not be empty.
    pub pod_selector: LabelSelector,
}

pub(crate) fn default_concurrent_gpus() -> u32 {
    16
}

impl Default for ReshapePolicy {
    fn default() -> Self {
        Self {
            max_concurrent_gpus_per_node: default_concurrent_gpus(),
            moves: MovePolicy::default(),
            restartable_clients: Vec::new(),
        }
    }
}

/// What happens to pods on hardware that fails (an XID that the driver does not survive, a GPU off the bus).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HealthPolicy {
    /// `NoSchedule`: running pods stay, nothing new is placed there. `NoExecute`: running pods are evicted too.
    #[serde(default)]
    pub taint_effect: TaintEffect,
}

/// Effect of the taint on devices that have failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TaintEffect {
    #[default]
    NoSchedule,
    NoExecute,
}

/// What Kerf has made of the policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PartitionPolicyStatus {
    /// The `metadata.generation` that the rest of the status answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Nodes with at least one matched GPU.
    #[serde(default)]
    pub nodes: u32,

    /// Matched GPUs, those in conflict or unmanaged included.
    #[serde(default)]
    pub gpus: u32,

    /// The instances on the matched GPUs, in one line: `2x 3g.40gb, 7x 1g.10gb, 1 whole`.
    #[serde(default)]
    pub layout_summary: String,

    /// Instances by profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layout: Vec<ProfileCount>,

    /// `Ready` and `Conflict`, with reasons from `kerf_crds::conditions`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Instances of one profile on the policy's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProfileCount {
    /// NVML's name of the profile.
    pub profile: String,
    /// Instances that exist.
    pub total: u32,
    /// Of these, owned by a claim or still in use.
    pub in_use: u32,
}
