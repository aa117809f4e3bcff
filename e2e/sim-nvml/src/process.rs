//! Running processes and compute mode.

use kerf_sim::NvmlError;

use crate::driver::{Call, Result};
use crate::ffi::{DeviceHandle, Out};
use crate::nvml;
use crate::types::{Process, ProcessV1};

/// `NVML_VALUE_NOT_AVAILABLE`: the simulation has no memory to account.
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

    /// Nor is there an MPS server.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        none(call, device, count, infos)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, infos: Out<Process>) on device |call| {
        none(call, device, count, infos)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(device: DeviceHandle, count: Out<u32>, infos: Out<ProcessV1>) on device |call| {
        none(call, device, count, infos)
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

/// The processes of a MIG device, or of a GPU: in MIG mode those of all its instances, with their ids.
fn running(call: &Call, handle: DeviceHandle) -> Result<Vec<Process>> {
    let target = call.device(handle)?;
    let clients = call.recent_clients();
    let minor = target.gpu.minor;
    let listed = |pid, gi: Option<u32>, ci: Option<u32>| Process {
        pid,
        used_gpu_memory: NOT_AVAILABLE,
        gpu_instance_id: gi.unwrap_or(NO_INSTANCE),
        compute_instance_id: ci.unwrap_or(NO_INSTANCE),
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
        found.extend(running.map(|client| listed(client.pid, None, None)));
        let holds = call.state.holds.iter();
        let held =
            holds.filter(|hold| hold.listed && hold.gpu == target.index && hold.gpu_instance.is_none());
        found.extend(held.map(|hold| listed(hold.pid, None, None)));
    }
    Ok(found)
}
