//! The state of a simulated node: one JSON document, shared by all processes of the node.

use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::kernel::protocol::CgroupId;

/// Everything that the simulated driver knows. See [`crate::Store`] for how it is shared.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Grows by one with every change.
    pub generation: u64,
    /// Name of the node; UUIDs and serial numbers that the creator left open derive from it.
    pub node: String,
    pub driver: Driver,
    pub options: Options,
    pub gpus: Vec<Gpu>,
    /// Instances of either kind created so far; see [`GpuInstance::nth`].
    pub creations: u64,
    pub faults: Vec<Fault>,
    pub delays: Vec<Delay>,
    /// Foreign clients that no process stands for.
    pub holds: Vec<Hold>,
    pub next_hold: u64,
    /// The PID namespace in which the node's containers run.
    pub pid_namespace: Option<u64>,
    /// Limits on the memory that the processes of cgroups may use.
    #[serde(default)]
    pub memory_limits: Vec<MemoryLimit>,
    /// The newest events, oldest first.
    pub events: Vec<Event>,
    pub next_event: u64,
}

/// How many events are kept; older ones are lost to a client that has not fetched them.
const EVENTS_KEPT: usize = 256;

/// The driver's versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// Such as `580.95.05`; also the suffix of the library files.
    pub version: String,
    /// Such as `13.580.95.05`.
    pub nvml: String,
    /// As NVML gives it: 13000 for CUDA 13.0.
    pub cuda: i32,
    /// False: `nvmlInit` answers DRIVER_NOT_LOADED.
    pub loaded: bool,
}

impl Driver {
    /// Whether MIG UUIDs are `MIG-GPU-<uuid>/<gi>/<ci>`, as up to R460, instead of proper UUIDs.
    pub fn has_old_mig_uuids(&self) -> bool {
        (1..470).contains(&self.branch())
    }

    /// The first number of the version, such as 580; 0 if it has none.
    pub fn branch(&self) -> u32 {
        self.version.split('.').next().and_then(|branch| branch.parse().ok()).unwrap_or(0)
    }
}

/// Behaviour in which installations differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    pub cap_nodes: CapNodes,
    pub mig_uuids: MigUuids,
    /// Profile names of NVML's structures begin with `MIG `; whether they do on hardware is not known.
    pub prefixed_names: bool,
    /// How limits on the memory of cgroups are kept, where the driver knows them.
    #[serde(default)]
    pub memory_accounting: MemoryAccounting,
    /// Append a line per NVML call to `var/lib/kerf-sim/calls.log`.
    pub log_calls: bool,
}

/// The back end of memory limits, which a real driver chooses when it loads (`RmMemacctMode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryAccounting {
    /// The kernel's controller: limits nest.
    #[default]
    Dmem,
    /// The driver's own: the nearest limited cgroup counts, and no other.
    Misc,
    Off,
}

/// A limit on the memory of a GPU for the processes of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// NVML index.
    pub gpu: usize,
    pub cgroup: CgroupId,
    /// As the caller wrote it.
    pub path: String,
    /// Guaranteed bytes. With dmem, those of the cgroups below are in it.
    pub soft: u64,
    /// `u64::MAX` is none.
    pub hard: u64,
    /// False for a cgroup that only has the sum of those below it.
    pub set: bool,
}

/// When `/dev/nvidia-caps/nvidia-cap<minor>` appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapNodes {
    /// With the first instance that needs it, and then for ever, as `nvidia-modprobe` leaves them behind.
    AtCreation,
    /// Never: what a host without `nvidia-modprobe` looks like.
    Never,
}

/// Whether an instance made anew at the same place has its old UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MigUuids {
    /// Derived from GPU, GPU instance and place, as the open kernel module does.
    Stable,
    /// New with every creation, as some older drivers are reported to do.
    Fresh,
}

/// A GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gpu {
    pub model: String,
    pub uuid: String,
    pub serial: String,
    /// Of `/dev/nvidia<minor>`; not the NVML index.
    pub minor: u32,
    pub pci: Pci,
    pub numa: Option<u32>,
    /// This board numbers its halves the other way round.
    pub half_swapped: bool,
    /// Passed through into a virtual machine that cannot reset it.
    pub reset_forbidden: bool,
    pub mig_current: bool,
    pub mig_pending: bool,
    /// `nvmlComputeMode_t`.
    pub compute_mode: u32,
    pub persistence: bool,
    /// Fallen off the bus.
    pub lost: bool,
    /// An XID has left it in need of a reset.
    pub needs_reset: bool,
    pub instances: Vec<GpuInstance>,
    pub counts: Counts,
}

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pci {
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
}

impl Pci {
    /// As NVML writes it: eight hexadecimal digits of domain.
    pub fn id(self) -> String {
        format!("{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }

    /// As the kernel and older NVML write it: four digits of domain.
    pub fn short_id(self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }

    /// Whether `text` is this address, in either form and any case.
    pub fn is(self, text: &str) -> bool {
        text.eq_ignore_ascii_case(&self.id()) || text.eq_ignore_ascii_case(&self.short_id())
    }
}

/// What has happened to the instances of a GPU since it was simulated first; never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub gpu_instances_created: u64,
    pub gpu_instances_destroyed: u64,
    pub compute_instances_created: u64,
    pub compute_instances_destroyed: u64,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    pub id: u32,
    /// Profile id, not enumerator.
    pub profile: u32,
    /// In memory slices.
    pub start: u32,
    pub size: u32,
    /// The how-manyth creation on this node made it: differs when an instance was destroyed and made anew with
    /// the same id, place and UUID.
    pub nth: u64,
    /// Process that made it.
    pub made_by: u32,
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance; with its GPU instance, a MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    pub id: u32,
    pub profile: u32,
    pub start: u32,
    pub size: u32,
    pub nth: u64,
    pub uuid: String,
    /// `nvmlComputeMode_t`.
    pub compute_mode: u32,
}

/// A call that takes longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delay {
    pub call: String,
    pub millis: u64,
}

/// A foreign client of a GPU or of one of its instances that exists without a process: what a monitoring agent
/// of the host is to a container that cannot see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub id: u64,
    /// NVML index.
    pub gpu: usize,
    /// GPU-instance id; `None` holds the GPU itself.
    pub gpu_instance: Option<u32>,
    /// The compute instance on which it runs, if it is listed as a running process there.
    pub compute_instance: Option<u32>,
    /// Listed by the running-process calls; an unlisted one only keeps a handle, as DCGM does.
    pub listed: bool,
    pub pid: u32,
    /// While it is there, no instance can be created on the GPU (a profiler, for instance).
    pub exclusive: bool,
}

/// An event for `nvmlEventSetWait`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub seq: u64,
    /// NVML index.
    pub gpu: usize,
    /// `nvmlEventType*`, one bit.
    pub kind: u64,
    /// The XID for XID events.
    pub data: u64,
    pub gpu_instance: Option<u32>,
    pub compute_instance: Option<u32>,
}

/// `nvmlEventTypeXidCriticalError`.
pub const EVENT_XID: u64 = 0x8;
/// `nvmlEventMigConfigChange`.
pub const EVENT_MIG_CONFIG: u64 = 0x100;

impl State {
    /// Records an event.
    pub fn event(
        &mut self,
        gpu: usize,
        kind: u64,
        data: u64,
        gpu_instance: Option<u32>,
        compute_instance: Option<u32>,
    ) {
        let seq = self.next_event;
        self.next_event += 1;
        self.events.push(Event { seq, gpu, kind, data, gpu_instance, compute_instance });
        let surplus = self.events.len().saturating_sub(EVENTS_KEPT);
        self.events.drain(..surplus);
    }

    /// GPU by its device minor.
    pub fn gpu_of_minor(&self, minor: u32) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.minor == minor)
    }
}

impl Gpu {
    /// The GPU instance of this id.
    pub fn instance(&self, id: u32) -> Option<&GpuInstance> {
        self.instances.iter().find(|instance| instance.id == id)
    }

    /// The GPU instance of this id.
    pub fn instance_mut(&mut self, id: u32) -> Option<&mut GpuInstance> {
        self.instances.iter_mut().find(|instance| instance.id == id)
    }

    /// The MIG devices in NVML's order: by GPU-instance id, then by compute-instance id.
    pub fn mig_devices(&self) -> Vec<(&GpuInstance, &ComputeInstance)> {
        let mut devices: Vec<_> =
            self.instances.iter().flat_map(|gi| gi.compute.iter().map(move |ci| (gi, ci))).collect();
        devices.sort_by_key(|(gi, ci)| (gi.id, ci.id));
        devices
    }
}

impl GpuInstance {
    /// The compute instance of this id.
    pub fn compute_instance(&self, id: u32) -> Option<&ComputeInstance> {
        self.compute.iter().find(|instance| instance.id == id)
    }
}
