//! Running processes, their memory and its limits, and compute mode.

use std::path::Path;

use kerf_sim::NvmlError;
use kerf_sim::kernel::protocol::{Answer, DeviceId, Request, Use};
use kerf_sim::kernel::{self, cgroups};

use crate::driver::{Call, Result};
use crate::ffi::{DeviceHandle, Out};
use crate::nvml;
use crate::types::{GetMemoryLimits, Process, ProcessV1, SetMemoryLimits};

/// `NVML_VALUE_NOT_AVAILABLE`: no kernel driver runs that would account memory.
const NOT_AVAILABLE: u64 = u64::MAX;
/// The id of an instance where there is none.
const NO_INSTANCE: u32 = u32::MAX;

nvml! {
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        give(&running(call, device)?, count, infos)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        give(&running(call, device)?, count, infos)
    }

    fn nvmlDeviceGetComputeRunningProcesses(device: DeviceHandle, count: Out<u32>, infos: Out<ProcessV1>) on device |call| {
        let short = |process: &Process| ProcessV1 { pid: process.pid, used_gpu_memory: process.used_gpu_memory };
        give(&running(call, device)?.iter().map(short).collect::<Vec<_>>(), count, infos)
    }

    /// Nothing draws in the simulation.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        none(call, device, count, infos)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        none(call, device, count, infos)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(device: DeviceHandle, count: Out<u32>, infos: Out<ProcessV1>) on device |call| {
        none(call, device, count, infos)
    }

    /// The clients of MPS servers. The servers are in the list of running processes, "rather than any of the client
    /// processes" (MPS documentation, common-tasks, nvidia-cuda-mps-server).
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        give(&mps_clients(call, device)?, count, infos)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        give(&mps_clients(call, device)?, count, infos)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(device: DeviceHandle, count: Out<u32>, infos: Out<ProcessV1>) on device |call| {
        let short = |process: &Process| ProcessV1 { pid: process.pid, used_gpu_memory: process.used_gpu_memory };
        give(&mps_clients(call, device)?.iter().map(short).collect::<Vec<_>>(), count, infos)
    }

    /// Root only; the cgroup is opened by the caller's path.
    fn nvmlDeviceSetMemoryLimits_v1(device: DeviceHandle, limits: Out<SetMemoryLimits>) on device |call| {
        let target = call.device(device)?;
        let limits = limits.get()?;
        call.root()?;
        if target.mig.is_some() {
            return Err(NvmlError::NotSupported);
        }
        let path = limits.name_space.get()?;
        kernel::set_memory_limits(&call.store, target.index, path, limits.soft_limit, limits.hard_limit)
    }

    fn nvmlDeviceGetMemoryLimits_v1(device: DeviceHandle, limits: Out<GetMemoryLimits>) on device |call| {
        let target = call.device(device)?;
        let asked = limits.get()?;
        if target.mig.is_some() {
            return Err(NvmlError::NotSupported);
        }
        let path = Path::new(asked.name_space.get()?);
        let cgroup = cgroups::id(path).map_err(|_| NvmlError::OperatingSystem)?;
        let found = call.state.get_memory_limits(target.index, cgroup)?;
        let current_used = match call.kernel(&Request::CgroupUsage { gpu: target.gpu.minor, cgroup }) {
            Some(Answer::Bytes(bytes)) => bytes,
            _ => 0,
        };
        limits.set(GetMemoryLimits { soft_limit: found.soft, hard_limit: found.hard, current_used, ..asked })
    }

    fn nvmlDeviceGetComputeMode(device: DeviceHandle, mode: Out<u32>) on device |call| {
        let target = call.device(device)?;
        mode.set(target.mig.map_or(target.gpu.compute_mode, |(_, ci)| ci.compute_mode))
    }

    fn nvmlDeviceSetComputeMode(device: DeviceHandle, mode: u32) on device |call| {
        let target = call.device(device)?;
        call.root()?;
        let ids = target.mig.map(|(gi, ci)| (gi.id, ci.id));
        call.store.write(|state| state.set_compute_mode(target.index, ids, mode))
    }
}

fn none<T: Copy>(call: &Call, device: DeviceHandle, count: Out<u32>, infos: Out<T>) -> Result<()> {
    call.device(device)?;
    give(&[], count, infos)
}

/// The count goes in as the array's length and comes out as what there is; INSUFFICIENT_SIZE if that is more.
fn give<T: Copy>(all: &[T], count: Out<u32>, infos: Out<T>) -> Result<()> {
    let room = count.get()? as usize;
    count.set(all.len() as u32)?;
    if all.len() > room {
        return Err(NvmlError::InsufficientSize);
    }
    infos.set_all(all)
}

/// What the kernel driver says of a process on a device.
fn use_of(uses: &[Use], pid: u32, gpu: u32, mig: Option<(u32, u32)>) -> impl Iterator<Item = &Use> {
    uses.iter().filter(move |used| used.pid == pid && used.device == DeviceId { gpu, mig })
}

/// As [`running`], of the clients of MPS servers.
fn mps_clients(call: &Call, handle: DeviceHandle) -> Result<Vec<Process>> {
    let target = call.device(handle)?;
    let own = |used: &&Use| {
        let same = match target.mig {
            Some((gi, ci)) => used.device.mig == Some((gi.id, ci.id)),
            None => true,
        };
        used.mps_client && used.device.gpu == target.gpu.minor && same
    };
    let uses = call.uses().unwrap_or_default();
    let clients = uses.iter().filter(own).map(|used| Process {
        pid: used.pid,
        used_gpu_memory: used.bytes,
        gpu_instance_id: used.device.mig.map_or(NO_INSTANCE, |(gi, _)| gi),
        compute_instance_id: used.device.mig.map_or(NO_INSTANCE, |(_, ci)| ci),
    });
    Ok(clients.collect())
}

/// The processes of a MIG device, or of a GPU: in MIG mode those of all its instances, with their ids.
fn running(call: &Call, handle: DeviceHandle) -> Result<Vec<Process>> {
    let target = call.device(handle)?;
    let clients = call.recent_clients();
    let minor = target.gpu.minor;
    let uses = call.uses();
    let listed = |pid, gi: Option<u32>, ci: Option<u32>| Process {
        pid,
        used_gpu_memory: uses
            .as_ref()
            .map_or(NOT_AVAILABLE, |uses| use_of(uses, pid, minor, gi.zip(ci)).map(|used| used.bytes).sum()),
        gpu_instance_id: gi.unwrap_or(NO_INSTANCE),
        compute_instance_id: ci.unwrap_or(NO_INSTANCE),
    };
    let mps_client = |pid, mig| {
        let uses = uses.as_deref().unwrap_or_default();
        use_of(uses, pid, minor, mig).any(|used| used.mps_client)
    };
    let devices = match target.mig {
        Some(device) => vec![device],
        None if target.gpu.mig_current => {
            call.privileged()?;
            target.gpu.mig_devices()
        }
        None => Vec::new(),
    };
    let mut found = Vec::new();
    for (gi, ci) in devices {
        let running = clients.0.iter().filter(|client| client.runs_on(minor, gi.id, ci.id));
        let running = running.filter(|client| !mps_client(client.pid, Some((gi.id, ci.id))));
        found.extend(running.map(|client| listed(client.pid, Some(gi.id), Some(ci.id))));
        let held = call.state.holds.iter().filter(|hold| {
            hold.listed
                && hold.gpu == target.index
                && hold.gpu_instance == Some(gi.id)
                && hold.compute_instance == Some(ci.id)
        });
        found.extend(held.map(|hold| listed(hold.pid, Some(gi.id), Some(ci.id))));
    }
    if target.mig.is_none() && !target.gpu.mig_current {
        let running = clients.0.iter().filter(|client| client.computes && client.whole_gpu(minor));
        let running = running.filter(|client| !mps_client(client.pid, None));
        found.extend(running.map(|client| listed(client.pid, None, None)));
        let holds = call.state.holds.iter();
        let held =
            holds.filter(|hold| hold.listed && hold.gpu == target.index && hold.gpu_instance.is_none());
        found.extend(held.map(|hold| listed(hold.pid, None, None)));
    }
    Ok(found)
}
