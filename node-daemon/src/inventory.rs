//! What the hardware shows: the one in-memory picture of the node's GPUs, made by a scan and never changed afterwards.
//!
//! A scan reads everything anew; nothing in here is remembered from an earlier one, except health (an XID is an event,
//! not a state) and the verdicts of [`crate::foreign`] and [`crate::ours`].

use std::sync::Arc;

use kerf_crds::gpu_node::{Geometry, ObservedMig, Placement, Profile, Reason, Share, Sharing};
use serde::{Deserialize, Serialize};

/// The node's GPUs at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// Present: NVML cannot be used, and `gpus` is empty or what an earlier scan saw of the identity of the GPUs.
    pub unavailable: Option<Reason>,
    /// Version of the driver, e.g. `580.95.05`.
    pub driver_version: String,
    /// Version of CUDA that the driver supports, as `13.0`.
    pub cuda_version: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// In NVML's order.
    pub gpus: Vec<Gpu>,
    /// GPUs that NVML counts but cannot identify, and why; nothing else is known of them.
    pub unreadable: Vec<Reason>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpu {
    /// Its name as a DRA device, unique on the node: `gpu-3f2a9c1d`.
    pub name: String,
    /// NVML's UUID: `GPU-…`.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Minor number: the N of `/dev/nvidiaN` and of `gpuN` below `/proc/driver/nvidia/capabilities`.
    pub minor: u32,
    /// Product name, e.g. `NVIDIA A100-SXM4-80GB`.
    pub product: String,
    /// Architecture as NVML names it, e.g. `Ampere`; empty where the library does not know it.
    pub architecture: String,
    /// CUDA compute capability, e.g. `8.0`; empty where unknown.
    pub compute_capability: String,
    /// PCI address with a four-digit domain: `0000:3b:00.0`.
    pub pci_address: String,
    /// NUMA node, where known.
    pub numa_node: Option<u32>,
    /// PCIe root complex below which it is, as Linux names it: `pci0000:3a`; where known.
    pub pcie_root: Option<String>,
    /// Usable memory of the whole GPU in bytes (total less what the driver reserves).
    pub memory_bytes: u64,
    /// MIG mode.
    pub mig: ObservedMig,
    /// Whether the driver says that the GPU must be reset, or the node booted; `None` from a driver that does not tell.
    pub recovery_needed: Option<bool>,
    /// What it can be cut into; `None` if it cannot be cut, or if that cannot be read while MIG is off.
    pub geometry: Option<Arc<Geometry>>,
    /// Present: not Kerf's to manage, and why. Its devices are not published and its hardware is not touched.
    pub unmanaged: Option<Reason>,
    /// Present: it has failed, and how.
    pub unhealthy: Option<Reason>,
    /// Processes on the GPU outside any instance; with MIG off, all processes on it.
    pub processes: Vec<Process>,
    /// GPU instances, by placement.
    pub instances: Vec<Instance>,
    /// Who may have contexts on it; `None` where the driver does not tell.
    pub compute_mode: Option<ComputeMode>,
    /// What carries shares of the GPU itself.
    pub mps: MpsState,
    /// Present: it can carry shares, and so can its instances.
    pub sharing: Option<Sharing>,
    /// Its shares and those of its instances, in order of their ids, without the claims that they are prepared for.
    pub shares: Vec<Share>,
}

/// What there is of MPS on a GPU outside its instances, or on an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MpsState {
    /// Processes that its server lets in.
    pub clients: Vec<Process>,
    /// The server takes clients.
    pub up: bool,
    /// Something is there that carries shares: the pod of a server, or the compute mode that Kerf has set for one.
    pub there: bool,
}

/// `NVML_COMPUTEMODE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeMode(pub u32);

impl ComputeMode {
    /// Any process may.
    pub const DEFAULT: Self = Self(0);
    /// One process may; under MPS that is the server, so that nobody gets past it.
    pub const EXCLUSIVE_PROCESS: Self = Self(3);
}

impl std::fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => f.write_str("DEFAULT"),
            1 => f.write_str("EXCLUSIVE_THREAD"),
            2 => f.write_str("PROHIBITED"),
            3 => f.write_str("EXCLUSIVE_PROCESS"),
            other => write!(f, "{other}"),
        }
    }
}

/// One GPU instance and what is in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Instance {
    /// NVML's name of the profile: `1g.10gb+me`.
    pub profile: String,
    /// NVML's id of the profile.
    pub profile_id: u32,
    /// Memory slices that it occupies.
    pub placement: Placement,
    /// NVML's id of the GPU instance; reused after it is destroyed.
    pub gpu_instance_id: u32,
    /// Its compute instances, by id. One as wide as the GPU instance is what Kerf makes.
    pub compute_instances: Vec<ComputeInstance>,
    /// Processes on it, other than Kerf's MPS server and its clients.
    pub processes: Vec<Process>,
    /// What carries shares of it.
    pub mps: MpsState,
    /// Kerf did not make it.
    pub foreign: bool,
    /// Present: it has failed, and how.
    pub unhealthy: Option<Reason>,
}

/// One compute instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComputeInstance {
    /// NVML's id within the GPU instance.
    pub id: u32,
    /// Whether it is as wide as its GPU instance, as those that Kerf makes.
    pub full_width: bool,
    /// UUID of the MIG device that it is: `MIG-…`. Empty until the driver shows the device.
    pub uuid: String,
}

/// A process that holds a GPU or an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// In the pid namespace that NVML reports in (the host's when the daemon runs with `hostPID`).
    pub pid: u32,
    /// Command name from `/proc/<pid>/comm`; empty where it cannot be read.
    pub comm: String,
    /// UID of its pod, if it is in one.
    pub pod_uid: Option<String>,
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.comm.as_str() {
            "" => write!(f, "pid {}", self.pid),
            comm => write!(f, "{comm} (pid {})", self.pid),
        }
    }
}

impl Instance {
    /// The MIG device, if the instance is complete: exactly one compute instance, as wide as itself.
    pub fn device(&self) -> Option<&ComputeInstance> {
        match self.compute_instances.as_slice() {
            [one] if one.full_width && !one.uuid.is_empty() => Some(one),
            _ => None,
        }
    }
}

impl Gpu {
    /// The instance at exactly this place, whoever made it.
    pub fn instance_at(&self, placement: Placement) -> Option<&Instance> {
        self.instances.iter().find(|instance| instance.placement == placement)
    }

    /// The profile of an instance, where the geometry knows it.
    pub fn profile_of(&self, instance: &Instance) -> Option<&Profile> {
        self.geometry.as_ref()?.profiles.iter().find(|profile| profile.id == instance.profile_id)
    }
}

impl Inventory {
    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// The complete MIG device with this UUID and the GPU that it is on.
    pub fn mig_device(&self, uuid: &str) -> Option<(&Gpu, &Instance)> {
        self.gpus.iter().find_map(|gpu| {
            let has = |instance: &&Instance| instance.device().is_some_and(|device| device.uuid == uuid);
            gpu.instances.iter().find(has).map(|instance| (gpu, instance))
        })
    }
}
