//! One look at one GPU.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kerf_crds::gpu_node::ObservedMig;
use nvml_wrapper_sys::bindings::field_id;

use super::error::{Code, Failure};
use super::geometry::{self, Known};
use super::raw::{Library, Named as _, ProcessKind, RawGpu, RawInstance, RawMigDevice, RawProcess};
use crate::holders;
use crate::inventory::{ComputeInstance, ComputeMode, Gpu, Instance, MpsState, Process};

/// First architecture on which MIG mode is switched without a reset: `NVML_DEVICE_ARCH_HOPPER`.
const ARCH_HOPPER: u32 = 9;

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, which the bindings do not have, and `NVML_GPU_RECOVERY_ACTION_NONE`.
const GPU_RECOVERY_ACTION: u32 = 230;
const RECOVERY_ACTION_NONE: u32 = 0;

/// How a GPU is found again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub uuid: String,
    /// Its name as a DRA device.
    pub name: String,
    /// NVML's index when it was found.
    pub index: u32,
}

/// Looks at a GPU: all or nothing, so that what is missing from the result is not there. `known` is what earlier looks
/// found out; with `afresh` the geometry is read again. Foreign marks, health and management are left to the caller.
pub fn observe(
    library: &Library,
    identity: &Identity,
    known: &mut Known,
    afresh: bool,
) -> Result<Gpu, Failure> {
    let raw = library.gpu(&identity.uuid)?;
    let mut gpu = fixed_part(&raw, identity)?;
    gpu.mig = mig_mode(&raw, known)?;
    if afresh || known.geometry.is_none() {
        refresh_geometry(&raw, &gpu, known)?;
    }
    gpu.geometry = known.geometry.clone();
    let (processes, mps_clients) = processes(&raw)?;
    gpu.mps.clients = named(mps_clients.iter().filter(|process| process.gpu_instance.is_none()));
    if gpu.mig.enabled {
        gpu.instances = instances(&raw, known, &processes, &mps_clients)?;
    }
    let known_instance = |id: u32| gpu.instances.iter().any(|instance| instance.gpu_instance_id == id);
    gpu.processes =
        named(processes.iter().filter(|process| !process.gpu_instance.is_some_and(known_instance)));
    Ok(gpu)
}

fn fixed_part(raw: &RawGpu<'_>, identity: &Identity) -> Result<Gpu, Failure> {
    let device = &raw.device;
    let pci = device.pci_info().of("nvmlDeviceGetPciInfo")?;
    let pci_address = short_pci_address(&pci.bus_id);
    Ok(Gpu {
        name: identity.name.clone(),
        uuid: identity.uuid.clone(),
        index: device.index().of("nvmlDeviceGetIndex")?,
        minor: device.minor_number().of("nvmlDeviceGetMinorNumber")?,
        product: device.name().of("nvmlDeviceGetName")?,
        architecture: raw.architecture().map(architecture_name).unwrap_or_default(),
        compute_capability: device
            .cuda_compute_capability()
            .map(|capability| format!("{}.{}", capability.major, capability.minor))
            .unwrap_or_default(),
        numa_node: numa_node(raw, &pci_address),
        pcie_root: pcie_root(Path::new("/sys"), &pci_address),
        pci_address,
        memory_bytes: match device.memory_info() {
            Ok(memory) => memory.total.saturating_sub(memory.reserved),
            Err(_) => raw.total_memory()?,
        },
        compute_mode: raw.compute_mode().map(ComputeMode).ok(),
        recovery_needed: raw.field(GPU_RECOVERY_ACTION).ok().map(|action| action != RECOVERY_ACTION_NONE),
        ..Gpu::default()
    })
}

/// NVML's own answer, or else the kernel's.
fn numa_node(raw: &RawGpu<'_>, pci_address: &str) -> Option<u32> {
    raw.device.numa_node_id().ok().or_else(|| {
        let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci_address}/numa_node")).ok()?;
        // -1 where the machine has no NUMA.
        text.trim().parse().ok()
    })
}

/// The kernel links each PCI device to its place in the tree: `/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0`.
fn pcie_root(sys: &Path, pci_address: &str) -> Option<String> {
    let place = std::fs::canonicalize(sys.join("bus/pci/devices").join(pci_address)).ok()?;
    let mut names = place.iter().filter_map(|name| name.to_str());
    names.find(|name| name.starts_with("pci") && name.contains(':')).map(str::to_owned)
}

/// NVML writes the domain with eight digits and in capitals, Linux with four and in small letters.
fn short_pci_address(bus_id: &str) -> String {
    let small = bus_id.to_ascii_lowercase();
    match small.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[4..])
        }
        _ => small,
    }
}

/// `NVML_DEVICE_ARCH_*`.
fn architecture_name(number: u32) -> String {
    let name = match number {
        2 => "Kepler",
        3 => "Maxwell",
        4 => "Pascal",
        5 => "Volta",
        6 => "Turing",
        7 => "Ampere",
        8 => "Ada",
        9 => "Hopper",
        10 => "Blackwell",
        _ => "",
    };
    name.to_owned()
}

fn mig_mode(raw: &RawGpu<'_>, known: &mut Known) -> Result<ObservedMig, Failure> {
    let (current, pending) = match raw.mig_mode() {
        Ok(modes) => modes,
        // A GPU without MIG.
        Err(failure)
            if matches!(failure.code, Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND)
                && !known.mig_capable =>
        {
            return Ok(ObservedMig::default());
        }
        Err(failure) => return Err(failure),
    };
    known.mig_capable = true;
    // The driver's own word, or else the architecture's. Where neither is known, the careful answer.
    let resetless = match raw.field(field_id::NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED) {
        Ok(flag) => flag != 0,
        Err(_) => {
            raw.architecture().is_ok_and(|architecture| (ARCH_HOPPER..u32::MAX).contains(&architecture))
        }
    };
    Ok(ObservedMig {
        capable: true,
        enabled: current,
        pending: (pending != current).then_some(pending),
        switch_needs_reset: !resetless,
    })
}

/// Profiles do not disappear from a GPU: a library that suddenly tells fewer is not believed.
fn refresh_geometry(raw: &RawGpu<'_>, gpu: &Gpu, known: &mut Known) -> Result<(), Failure> {
    let total = raw.device.memory_info().map(|memory| memory.total).or_else(|_| raw.total_memory())?;
    let found = match geometry::discover(raw, &gpu.product, total) {
        Ok(found) => found,
        Err(_) if known.geometry.is_some() => return Ok(()),
        Err(failure) => return Err(failure),
    };
    let had = known.geometry.as_ref().map_or(0, |geometry| geometry.profiles.len());
    match found {
        Some(found) if found.profiles.len() >= had => {
            if known.geometry.as_deref() != Some(&found) {
                known.geometry = Some(Arc::new(found));
            }
            Ok(())
        }
        None if gpu.mig.enabled && known.geometry.is_none() => {
            Err(Failure { call: "nvmlDeviceGetGpuInstanceProfileInfo", code: Code::NOT_SUPPORTED })
        }
        _ => Ok(()),
    }
}

fn instances(
    raw: &RawGpu<'_>,
    known: &mut Known,
    processes: &[RawProcess],
    mps_clients: &[RawProcess],
) -> Result<Vec<Instance>, Failure> {
    let Some(geometry) = known.geometry.clone() else { return Ok(Vec::new()) };
    let devices = raw.mig_devices()?;
    let mut instances = Vec::new();
    for profile in &geometry.profiles {
        let found = match raw.instances(profile.id, profile.max_instances) {
            Ok(found) => found,
            Err(failure) if failure.code == Code::NOT_FOUND => Vec::new(),
            Err(failure) => return Err(failure),
        };
        for instance in found.into_iter().filter(|instance| instance.profile_id == profile.id) {
            let compute_instances = compute_instances(raw, &instance, known, &devices)?;
            let on_it = |all: &[RawProcess]| {
                named(all.iter().filter(|process| process.gpu_instance == Some(instance.id)))
            };
            instances.push(Instance {
                profile: profile.name.clone(),
                profile_id: instance.profile_id,
                placement: instance.placement,
                gpu_instance_id: instance.id,
                compute_instances,
                processes: on_it(processes),
                mps: MpsState { clients: on_it(mps_clients), ..MpsState::default() },
                ..Instance::default()
            });
        }
    }
    instances.sort_by_key(|instance| (instance.placement, instance.gpu_instance_id));
    Ok(instances)
}

fn compute_instances(
    raw: &RawGpu<'_>,
    instance: &RawInstance,
    known: &mut Known,
    devices: &[RawMigDevice],
) -> Result<Vec<ComputeInstance>, Failure> {
    let full_width = match known.full_width.get(&instance.profile_id) {
        Some(id) => *id,
        None => {
            let id = geometry::full_width(raw, instance.id)?;
            known.full_width.insert(instance.profile_id, id);
            id
        }
    };
    let full = raw.compute_instances(instance.id, full_width)?;
    let mut list: Vec<ComputeInstance> = devices
        .iter()
        .filter(|device| device.gpu_instance == instance.id)
        .map(|device| ComputeInstance {
            id: device.compute_instance,
            full_width: full.iter().any(|(id, _)| *id == device.compute_instance),
            uuid: device.uuid.clone(),
        })
        .collect();
    // A compute instance without a MIG device yet: seen all the same, so that it is not made twice.
    for (id, _) in full {
        if list.iter().all(|known| known.id != id) {
            list.push(ComputeInstance { id, full_width: true, uuid: String::new() });
        }
    }
    list.sort_by_key(|compute_instance| compute_instance.id);
    Ok(list)
}

/// All processes on the GPU and its instances, each pid once for each place, but for those that an MPS server lets in; and
/// these. A kind of list that the library does not have holds nobody.
fn processes(raw: &RawGpu<'_>) -> Result<(Vec<RawProcess>, Vec<RawProcess>), Failure> {
    let mut all = listed(raw, ProcessKind::Compute)?;
    all.extend(listed(raw, ProcessKind::Graphics)?);
    let clients = listed(raw, ProcessKind::Mps)?;
    let place = |process: &RawProcess| (process.gpu_instance, process.pid);
    // The library may have them in both lists.
    all.retain(|process| clients.iter().all(|client| place(client) != place(process)));
    all.sort_unstable_by_key(place);
    all.dedup_by_key(|process| place(process));
    Ok((all, clients))
}

fn listed(raw: &RawGpu<'_>, kind: ProcessKind) -> Result<Vec<RawProcess>, Failure> {
    match raw.processes(kind) {
        Err(failure) if matches!(failure.code, Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND) => {
            Ok(Vec::new())
        }
        answer => answer,
    }
}

/// A process and the bytes of memory that it has of a GPU, or of a GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    pub pid: u32,
    /// NVML's id of the GPU instance; `None`: outside any.
    pub gpu_instance: Option<u32>,
    pub bytes: u64,
    /// An MPS server let it in.
    pub mps: bool,
}

/// The processes with a compute context on a GPU and its instances. One that is in both of NVML's lists has the same memory
/// in both.
pub fn memory_by_process(library: &Library, uuid: &str) -> Result<Vec<ProcessMemory>, Failure> {
    let raw = library.gpu(uuid)?;
    let mut all: BTreeMap<(Option<u32>, u32), ProcessMemory> = BTreeMap::new();
    for (kind, by_mps) in [(ProcessKind::Compute, false), (ProcessKind::Mps, true)] {
        for process in listed(&raw, kind)? {
            let RawProcess { pid, gpu_instance, .. } = process;
            let new = ProcessMemory { pid, gpu_instance, bytes: 0, mps: by_mps };
            let entry = all.entry((gpu_instance, pid)).or_insert(new);
            entry.bytes = entry.bytes.max(process.memory.unwrap_or_default());
            entry.mps |= by_mps;
        }
    }
    Ok(all.into_values().collect())
}

fn named<'a>(processes: impl Iterator<Item = &'a RawProcess>) -> Vec<Process> {
    processes.map(|process| holders::process(process.pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_written_as_linux_writes_them() {
        assert_eq!(short_pci_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(short_pci_address("0000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(short_pci_address("00010000:3B:00.0"), "00010000:3b:00.0");
    }

    #[test]
    fn the_pcie_root_is_read_off_the_kernels_tree() {
        let sys = tempfile::tempdir().unwrap();
        let place = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0";
        std::fs::create_dir_all(sys.path().join(place)).unwrap();
        let links = sys.path().join("bus/pci/devices");
        std::fs::create_dir_all(&links).unwrap();
        std::os::unix::fs::symlink(sys.path().join(place), links.join("0000:3b:00.0")).unwrap();
        assert_eq!(pcie_root(sys.path(), "0000:3b:00.0").as_deref(), Some("pci0000:3a"));
        assert_eq!(pcie_root(sys.path(), "0000:3c:00.0"), None);
    }
}
