//! `GpuNode`: one object per node with GPUs. `spec` is the operator's word to the node's daemon, and the record that
//! commits every placement; `status` is the daemon's report of the hardware.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::partition_policy::{TaintEffect, default_concurrent_gpus};

/// Wanted state of a node's GPUs. Written by the operator alone, every write with a precondition on the version that
/// the decision was made from. A placement exists exactly while its entry is here.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kerf.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gn",
    category = "kerf",
    status = "GpuNodeStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "A GpuNode is one node's GPUs: what Kerf wants of them and what they are. Written by Kerf, for people to read.",
    printcolumn = r#"{"name":"GPUs","type":"integer","jsonPath":".status.gpuCount"}"#,
    printcolumn = r#"{"name":"Layout","type":"string","jsonPath":".status.layoutSummary"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#,
    printcolumn = r#"{"name":"Degraded","type":"string","jsonPath":".status.conditions[?(@.type=='Degraded')].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {
    /// The GPUs that exactly one policy manages. A GPU that is not listed is left alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<DesiredGpu>,

    /// Every wanted partition of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<Partition>,
}

/// What a policy wants of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DesiredGpu {
    /// The GPU's UUID (`GPU-…`).
    pub uuid: String,
    /// Name of the policy that manages it.
    pub policy: String,
    /// Wanted MIG mode.
    pub mig: DesiredMig,
    /// Whether the mode may be switched where that resets the GPU.
    #[serde(default)]
    pub allow_reset: bool,
    /// Effect of the taint on this GPU's devices when they fail.
    #[serde(default)]
    pub unhealthy_effect: TaintEffect,
    /// How many GPUs of the node may be reshaped at the same time. The smallest number on the node holds.
    #[serde(default = "default_concurrent_gpus")]
    pub max_concurrent_gpus: u32,
}

/// Wanted MIG mode of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DesiredMig {
    Enabled,
    Disabled,
    /// As it is.
    #[default]
    Keep,
}

/// One wanted partition: a MIG instance at an exact place or a whole GPU, or a share of one of the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Partition {
    /// UUID of the GPU.
    pub gpu: String,
    /// The MIG instance; left out for the GPU itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<WantedInstance>,
    /// The share of it; left out for all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<WantedShare>,
    /// Whose it is.
    pub owner: Owner,
}

/// A MIG instance at an exact place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WantedInstance {
    /// NVML's name of the profile.
    pub profile: String,
    /// Memory slices that it occupies.
    pub placement: Placement,
}

/// A share of a GPU or of a MIG instance, in exact sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WantedShare {
    /// A lower-case UUID of its own: the `shareID` of its allocation.
    pub id: String,
    /// Most memory that the share's processes may have together, in bytes.
    pub memory_bytes: u64,
    /// Most of the GPU's multiprocessors that they may use: thousandths of a percent of the whole GPU's, 30 % is 30000.
    pub compute_milli: u32,
    /// Who must at least enforce the limit on memory.
    pub isolation: Isolation,
}

/// Who keeps a tenant within its limits, from the weakest on.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Isolation {
    /// MPS, for each process of the tenant by itself; a process can get around it.
    #[default]
    Process,
    /// The GPU's driver, for all processes of the tenant's pod together, whatever they do.
    Driver,
    /// The hardware: a MIG instance or a whole GPU.
    Hardware,
}

impl Isolation {
    /// As annotations and attributes have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Driver => "driver",
            Self::Hardware => "hardware",
        }
    }
}

/// `[start, start+size)` in the GPU's memory slices.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

impl Placement {
    /// Whether the two share a slice.
    pub fn overlaps(&self, other: &Placement) -> bool {
        self.start < other.start.saturating_add(other.size)
            && other.start < self.start.saturating_add(self.size)
    }
}

/// Whose a partition is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Owner {
    /// A pod's claim.
    Claim(ClaimOwner),
    /// A policy: part of its static layout, or a warm instance.
    Policy(PolicyOwner),
    /// Room that is being made for somebody.
    Reservation(Reservation),
}

/// A pod's claim. The entry is written before the claim exists, so the pod's UID identifies the placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimOwner {
    /// Namespace of claim and pod.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the claim's request that this partition serves (`request` or `request/subrequest`).
    pub request: String,
}

/// A policy's own instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyOwner {
    /// Name of the policy.
    pub name: String,
    /// Why it wants the instance.
    pub kind: PolicyInstance,
}

/// Why a policy wants an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PolicyInstance {
    /// Part of a static layout.
    Static,
    /// Kept ready; gives way to a claim that needs the slices.
    Warm,
}

/// Room that is being made by moving others. Its slices may still be theirs; nobody else gets them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reservation {
    /// The pod that waits for it; or, with `controller`, the pod that is moved: what comes in its place gets it.
    pub pod: PodReference,
    /// UID of the controller that makes a pod in place of `pod`, which is moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// The pods that are moved for `pod`. They are evicted once a reservation for each of them is on record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<PodReference>,
    /// When it lapses, RFC 3339.
    pub expires: String,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodReference {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl PodReference {
    /// `namespace/name`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The daemon's report of the node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// The `metadata.generation` of the spec that the rest of the status was made under: what is not ready yet is
    /// being worked on, or has failed with an entry in `gpus[].problem`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of GPUs.
    #[serde(default)]
    pub gpu_count: u32,
    /// All instances in one line: `2x 3g.40gb, 1 whole`.
    #[serde(default)]
    pub layout_summary: String,
    /// Version of the GPU driver.
    #[serde(default)]
    pub driver_version: String,
    /// Version of CUDA that the driver supports, as `13.1`.
    #[serde(default)]
    pub cuda_version: String,
    /// The kernel's boot id when the report was made: instances do not survive a reboot.
    #[serde(default)]
    pub boot_id: String,
    /// The GPUs, in NVML's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    /// What the GPUs can be cut into, each kind once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub geometries: Vec<Geometry>,
    /// The daemon's `Ready`, `Degraded` and `ContainerToolkit`; `SharesVerified` of the job that verifies shares on this
    /// node's hardware, where it has run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// Its name as a DRA device, unique on the node: `gpu-3f2a9c1d`.
    pub name: String,
    /// NVML's UUID: `GPU-…`.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Product name, e.g. `NVIDIA A100-SXM4-80GB`.
    pub product: String,
    /// Architecture as NVML names it, e.g. `Hopper`; empty where the driver does not tell.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub architecture: String,
    /// Name of its entry in `geometries`; left out if the GPU cannot be cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geometry: Option<String>,
    /// Memory of the whole GPU that can be used, in bytes, as NVML reports it.
    #[serde(default)]
    pub memory_bytes: u64,
    /// PCI address: `0000:3b:00.0`.
    #[serde(default)]
    pub pci_address: String,
    /// NUMA node, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// PCIe root complex below which it is, as Linux names it (`pci0000:3a`), where known: devices with the same one
    /// are near each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_root: Option<String>,
    /// MIG mode.
    #[serde(default)]
    pub mig: ObservedMig,
    /// Present: the GPU is not Kerf's to manage, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmanaged: Option<Reason>,
    /// Present: the GPU has failed, and how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<Reason>,
    /// Present: the GPU is not yet as `spec` wants it, and why: a step fails and is being retried, or something is waited
    /// for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Reason>,
    /// Who keeps the GPU from being as `spec` wants it, where no claim does: with all of these gone, it could be. One
    /// entry for each pod, and one for all processes that are in no pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clients: Vec<Client>,
    /// The claims that the whole GPU is prepared for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimReference>,
    /// Processes on the GPU outside any instance.
    #[serde(default)]
    pub processes: u32,
    /// Its MIG instances, in order of placement.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<Instance>,
    /// Present: it can carry shares, and so can its MIG instances; what its driver and MPS can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// The shares on it and on its instances, in order of their ids.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
}

/// What a GPU's driver and its MPS can do for shares.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sharing {
    /// Who enforces the limit on the memory of shares of the GPU itself. Inside MIG instances it is always `Process`.
    pub isolation: Isolation,
    /// Processes that one MPS server takes as clients. A MIG instance's takes as many fewer as its compute slices are of
    /// the GPU's.
    pub max_clients: u32,
    /// True: one server has one limit for all its clients, so the shares of a GPU or instance must be of one size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub equal_sizes: bool,
}

/// A share. Without a `problem` its limits are in force: set, read back, and found to be what is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// As in `spec.partitions[].share.id`.
    pub id: String,
    /// The MIG instance that carries it; left out if it is the GPU itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Limit on memory in force, in bytes.
    pub memory_bytes: u64,
    /// Limit on multiprocessors in force, in whole percent of its carrier's: MPS takes no fractions, so what is wanted is
    /// rounded up to it.
    pub compute_percent: u32,
    /// Who enforces the limit on memory.
    pub isolation: Isolation,
    /// The claims that it is prepared for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimReference>,
    /// Processes of its clients.
    #[serde(default)]
    pub processes: u32,
    /// Present: the limits are not in force, and why. It is not given out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Reason>,
}

/// A GPU's MIG mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObservedMig {
    /// Whether the GPU has MIG at all.
    #[serde(default)]
    pub capable: bool,
    /// Mode in force.
    pub enabled: bool,
    /// Mode that a reset would bring, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<bool>,
    /// Whether switching the mode resets the GPU.
    #[serde(default)]
    pub switch_needs_reset: bool,
}

/// A machine-readable word and a sentence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reason {
    /// CamelCase word from `kerf_crds::conditions`, or an NVML error name.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// One MIG instance: a GPU instance with one compute instance as wide as itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Instance {
    /// NVML's name of the profile.
    pub profile: String,
    /// Memory slices that it occupies.
    pub placement: Placement,
    /// NVML's id of the GPU instance; reused after it is destroyed.
    pub gpu_instance_id: u32,
    /// UUID of the MIG device (`MIG-…`); left out while there is no compute instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// True: Kerf did not make it, will not touch it, and nothing else fits on its slices.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub foreign: bool,
    /// The claims that it is prepared for: from Prepare to Unprepare.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimReference>,
    /// Processes on it.
    #[serde(default)]
    pub processes: u32,
    /// Present: the instance has failed, and how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<Reason>,
}

impl Instance {
    /// Whether a claim or a process still uses it.
    pub fn in_use(&self) -> bool {
        !self.claims.is_empty() || self.processes > 0
    }
}

impl Share {
    /// Whether a claim or a process still uses it.
    pub fn in_use(&self) -> bool {
        !self.claims.is_empty() || self.processes > 0
    }
}

/// A client of a GPU that no claim stands for, such as a monitor that holds it open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Client {
    /// UID of its pod; left out where the process is in no pod, or in one that cannot be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Name and pid of a process of it.
    pub process: String,
}

/// A claim that a device is prepared for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimReference {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// What a kind of GPU can be cut into, as its driver reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Geometry {
    /// Name by which GPUs refer to it: the product, with a number where one product has several geometries.
    pub name: String,
    /// Memory slices of the GPU: placements are counted in these.
    pub memory_slices: u32,
    /// Streaming multiprocessors that instances can have together.
    pub multiprocessors: u32,
    /// Engines of the GPU: instances share them out.
    #[serde(default)]
    pub engines: Engines,
    /// The profiles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<Profile>,
}

/// One profile of a geometry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// NVML's name, without a `MIG ` prefix: `1g.10gb+me`.
    pub name: String,
    /// NVML's id, as used for creation and shown by nvidia-smi.
    pub id: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute slices.
    pub compute_slices: u32,
    /// Memory slices: the size of each placement.
    pub size: u32,
    /// First memory slices at which it may be placed.
    pub starts: Vec<u32>,
    /// How many an empty GPU can have.
    pub max_instances: u32,
    /// Its share of the GPU's engines.
    #[serde(default)]
    pub engines: Engines,
    /// Whether graphics APIs work on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub graphics: bool,
}

/// Counts of a GPU's or a profile's engines. A GPU instance fits only if its share of the decoders, encoders, JPEG and
/// OFA engines is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Engines {
    /// Copy engines.
    #[serde(default)]
    pub copy: u32,
    /// Video decoders (NVDEC).
    #[serde(default)]
    pub decoder: u32,
    /// Video encoders (NVENC).
    #[serde(default)]
    pub encoder: u32,
    /// JPEG decoders (NVJPG).
    #[serde(default)]
    pub jpeg: u32,
    /// Optical flow accelerators (OFA).
    #[serde(default)]
    pub ofa: u32,
}

impl GpuNodeStatus {
    /// The geometry of one of this node's GPUs.
    pub fn geometry_of(&self, gpu: &Gpu) -> Option<&Geometry> {
        let name = gpu.geometry.as_ref()?;
        self.geometries.iter().find(|geometry| geometry.name == *name)
    }
}

impl Geometry {
    /// Compute of so many percent of an instance, in thousandths of a percent of the whole GPU's, rounded down.
    pub fn compute_of(&self, profile: &Profile, percent: u64) -> u64 {
        let all = u128::from(percent) * 1000 * u128::from(profile.multiprocessors);
        u64::try_from(all.checked_div(self.multiprocessors.into()).unwrap_or_default()).unwrap_or(u64::MAX)
    }

    /// How many whole percent of an instance's multiprocessors a share of it needs: MPS takes no fractions, so it is
    /// rounded up. The opposite of [`Geometry::compute_of`], whose result it takes back to the same number.
    pub fn percent_of(&self, profile: &Profile, compute_milli: u64) -> u64 {
        let part = u128::from(compute_milli) * u128::from(self.multiprocessors);
        let whole = 1000 * u128::from(profile.multiprocessors);
        if whole == 0 { u64::MAX } else { u64::try_from(part.div_ceil(whole)).unwrap_or(u64::MAX) }
    }

    /// A profile by name, in either spelling.
    pub fn profile(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| crate::profile::same(&profile.name, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percents_of_an_instance_and_of_its_gpu_are_taken_to_each_other() {
        for (part, all) in [(60, 132), (16, 132), (42, 98), (14, 108), (132, 132), (1, 142)] {
            let geometry = Geometry { multiprocessors: all, ..Geometry::default() };
            let profile = Profile { multiprocessors: part, ..Profile::default() };
            for percent in 1..=100 {
                let milli = geometry.compute_of(&profile, percent);
                assert_eq!(geometry.percent_of(&profile, milli), percent, "{part} of {all}");
                assert_eq!(geometry.percent_of(&profile, milli + 1), percent + 1, "rounded up");
            }
        }
        let nothing = Geometry::default();
        assert_eq!(nothing.percent_of(&Profile::default(), 1), u64::MAX);
        assert_eq!(nothing.compute_of(&Profile::default(), 100), 0);
    }
}
