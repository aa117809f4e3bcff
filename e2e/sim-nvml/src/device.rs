//! What a device is: names, numbers, memory, place in the machine.

use kerf_sim::NvmlError;
use kerf_sim::kernel::protocol::{Answer, Request};

use crate::driver::{Call, Result, Target};
use crate::ffi::{DeviceHandle, Out, TextOut, chars};
use crate::nvml;
use crate::types::{AddressingMode, Bar1Memory, Memory, MemoryV2, PciInfo, PciInfoExt, version_of};

const MIB: u64 = 1 << 20;
/// PCI class and subclass of a 3D controller.
const CLASS_DISPLAY: u32 = 3;
const SUBCLASS_3D: u32 = 2;

nvml! {
    fn nvmlDeviceGetName(device: DeviceHandle, name: TextOut, length: u32) on device |call| {
        name.put(&name_of(&call.device(device)?)?, length)
    }

    fn nvmlDeviceGetBrand(device: DeviceHandle, brand: Out<u32>) on device |call| {
        brand.set(call.device(device)?.model.brand)
    }

    fn nvmlDeviceGetUUID(device: DeviceHandle, uuid: TextOut, length: u32) on device |call| {
        let target = call.device(device)?;
        uuid.put(target.mig.map_or(&target.gpu.uuid, |(_, ci)| &ci.uuid), length)
    }

    fn nvmlDeviceGetSerial(device: DeviceHandle, serial: TextOut, length: u32) on device |call| {
        serial.put(&call.device(device)?.gpu.serial, length)
    }

    /// Of a MIG device, its index on its GPU: dense, in the order of GPU-instance and compute-instance ids.
    fn nvmlDeviceGetIndex(device: DeviceHandle, index: Out<u32>) on device |call| {
        let target = call.device(device)?;
        let found = match target.mig {
            None => Some(target.index),
            Some((gi, ci)) => target.gpu.mig_devices().iter().position(|(g, c)| (g.id, c.id) == (gi.id, ci.id)),
        };
        let found = found.and_then(|found| u32::try_from(found).ok()).ok_or(NvmlError::Unknown)?;
        index.set(found)
    }

    fn nvmlDeviceGetMinorNumber(device: DeviceHandle, minor: Out<u32>) on device |call| {
        minor.set(call.device(device)?.gpu.minor)
    }

    fn nvmlDeviceGetPciInfo_v3(device: DeviceHandle, pci: Out<PciInfo>) on device |call| {
        pci.set(pci_info(&call.device(device)?))
    }

    fn nvmlDeviceGetPciInfo_v2(device: DeviceHandle, pci: Out<PciInfo>) on device |call| {
        pci.set(pci_info(&call.device(device)?))
    }

    /// The first version ends before the long bus id: 36 bytes, with four reserved ones on some drivers.
    fn nvmlDeviceGetPciInfo(device: DeviceHandle, pci: Out<u8>) on device |call| {
        let info = pci_info(&call.device(device)?);
        let numbers = [info.domain, info.bus, info.device, info.pci_device_id, info.pci_sub_system_id];
        let mut bytes = info.bus_id_legacy.to_vec();
        bytes.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
        pci.set_all(&bytes)
    }

    fn nvmlDeviceGetPciInfoExt(device: DeviceHandle, pci: Out<PciInfoExt>) on device |call| {
        let target = call.device(device)?;
        if pci.get()?.version != version_of::<PciInfoExt>(1) {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        let info = pci_info(&target);
        pci.set(PciInfoExt {
            version: version_of::<PciInfoExt>(1),
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            pci_device_id: info.pci_device_id,
            pci_sub_system_id: info.pci_sub_system_id,
            base_class: CLASS_DISPLAY,
            sub_class: SUBCLASS_3D,
            bus_id: info.bus_id,
        })
    }

    fn nvmlDeviceGetMemoryInfo(device: DeviceHandle, memory: Out<Memory>) on device |call| {
        // What the driver keeps for itself counts as used.
        let target = call.device(device)?;
        let (total, reserved) = (memory_of(&target)?, reserved_of(&target));
        let used = reserved + used_of(call, &target);
        memory.set(Memory { total, free: total.saturating_sub(used), used })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: DeviceHandle, memory: Out<MemoryV2>) on device |call| {
        let target = call.device(device)?;
        if memory.get()?.version != version_of::<MemoryV2>(2) {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        let version = version_of::<MemoryV2>(2);
        let (total, reserved, used) = (memory_of(&target)?, reserved_of(&target), used_of(call, &target));
        let own = Request::OwnLimit { gpu: target.gpu.minor };
        // Inside a limited cgroup it is the limit that is shown; not for MIG.
        if target.mig.is_none()
            && let Some(Answer::Limit(Some((limit, used)))) = call.kernel(&own)
            && limit != u64::MAX
        {
            let free = limit.saturating_sub(used);
            return memory.set(MemoryV2 { version, total: limit, reserved: 0, free, used });
        }
        let free = total.saturating_sub(reserved + used);
        memory.set(MemoryV2 { version, total, reserved, free, used })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: DeviceHandle, memory: Out<Bar1Memory>) on device |call| {
        // The BAR of a data-centre GPU is the power of two over its memory.
        let total = memory_of(&call.device(device)?)?.next_power_of_two();
        memory.set(Bar1Memory { total, free: total, used: 0 })
    }

    fn nvmlDeviceGetArchitecture(device: DeviceHandle, architecture: Out<u32>) on device |call| {
        architecture.set(call.device(device)?.model.architecture.nvml)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: DeviceHandle, major: Out<i32>, minor: Out<i32>) on device |call| {
        let target = call.device(device)?;
        minor.check()?;
        major.set(target.model.compute_capability[0])?;
        minor.set(target.model.compute_capability[1])
    }

    fn nvmlDeviceGetNumGpuCores(device: DeviceHandle, cores: Out<u32>) on device |call| {
        // 64 FP32 lanes per SM on GA100, 128 on what came after.
        let model = call.device(device)?.model;
        let lanes = if model.compute_capability == [8, 0] { 64 } else { 128 };
        cores.set(model.sm_total * lanes)
    }

    /// NOT_SUPPORTED where the board's place is not known.
    fn nvmlDeviceGetNumaNodeId(device: DeviceHandle, node: Out<u32>) on device |call| {
        node.set(call.device(device)?.gpu.numa.ok_or(NvmlError::NotSupported)?)
    }

    /// All processors: the simulation knows NUMA nodes but not which processors are in them.
    fn nvmlDeviceGetCpuAffinity(device: DeviceHandle, size: u32, set: Out<u64>) on device |call| {
        call.device(device)?;
        processors(size, set)
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(device: DeviceHandle, size: u32, set: Out<u64>, _scope: u32) on device |call| {
        call.device(device)?;
        processors(size, set)
    }

    fn nvmlDeviceGetMemoryAffinity(device: DeviceHandle, size: u32, set: Out<u64>, _scope: u32) on device |call| {
        let node = call.device(device)?.gpu.numa.ok_or(NvmlError::NotSupported)?;
        bits(size, set, |bit| bit == node)
    }

    /// Neither HMM nor ATS.
    fn nvmlDeviceGetAddressingMode(device: DeviceHandle, mode: Out<AddressingMode>) on device |call| {
        call.device(device)?;
        if mode.get()?.version != version_of::<AddressingMode>(1) {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        mode.set(AddressingMode { version: version_of::<AddressingMode>(1), value: 0 })
    }

    fn nvmlDeviceGetBoardId(device: DeviceHandle, id: Out<u32>) on device |call| {
        id.set(call.device(device)?.gpu.pci.bus << 8)
    }

    fn nvmlDeviceGetMultiGpuBoard(device: DeviceHandle, several: Out<u32>) on device |call| {
        call.device(device)?;
        several.set(0)
    }

    fn nvmlDeviceGetVbiosVersion(device: DeviceHandle, version: TextOut, length: u32) on device |call| {
        call.device(device)?;
        version.put("00.00.00.00.00", length)
    }

    /// `NVML_GPU_VIRTUALIZATION_MODE_NONE`, or pass-through for a board that cannot be reset.
    fn nvmlDeviceGetVirtualizationMode(device: DeviceHandle, mode: Out<u32>) on device |call| {
        mode.set(u32::from(call.device(device)?.gpu.reset_forbidden))
    }
}

/// `NVIDIA A100-SXM4-40GB MIG 1g.5gb` for a MIG device.
fn name_of(target: &Target<'_>) -> Result<String> {
    let product = &target.model.product;
    let Some((gi, ci)) = target.mig else { return Ok(product.clone()) };
    let profile =
        target.can_mig()?.profile(gi.profile).and_then(|profile| profile.compute_profile(ci.profile));
    Ok(format!("{product} MIG {}", profile.ok_or(NvmlError::Unknown)?.name))
}

/// Bytes.
fn memory_of(target: &Target<'_>) -> Result<u64> {
    let Some((gi, _)) = target.mig else { return Ok(target.model.memory_total_mib * MIB) };
    Ok(target.can_mig()?.profile(gi.profile).ok_or(NvmlError::Unknown)?.memory_mib * MIB)
}

/// Bytes of a GPU that the driver keeps for itself.
fn reserved_of(target: &Target<'_>) -> u64 {
    if target.mig.is_some() { 0 } else { target.model.reserved_mib() * MIB }
}

/// Bytes that programs use of a GPU, or of an instance.
fn used_of(call: &Call, target: &Target<'_>) -> u64 {
    let gi = target.mig.map(|(gi, _)| gi.id);
    let uses = call.uses().unwrap_or_default();
    let here = uses.iter().filter(|used| {
        used.device.gpu == target.gpu.minor && (gi.is_none() || used.device.mig.map(|(gi, _)| gi) == gi)
    });
    here.map(|used| used.bytes).sum()
}

fn pci_info(target: &Target<'_>) -> PciInfo {
    let pci = target.gpu.pci;
    let id = target.model.pci_device_id.trim_start_matches("0x");
    PciInfo {
        bus_id_legacy: chars(&pci.short_id()),
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        pci_device_id: u32::from_str_radix(id, 16).unwrap_or_default(),
        pci_sub_system_id: 0,
        bus_id: chars(&pci.id()),
    }
}

fn processors(size: u32, set: Out<u64>) -> Result<()> {
    let count = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    bits(size, set, |bit| bit < count)
}

/// Fills a set of `size` words.
fn bits(size: u32, set: Out<u64>, member: impl Fn(u32) -> bool) -> Result<()> {
    if size == 0 {
        return Err(NvmlError::InvalidArgument);
    }
    let word =
        |word: u32| (0..64).filter(|bit| member(word * 64 + bit)).fold(0, |sum, bit| sum | 1u64 << bit);
    set.set_all(&(0..size).map(word).collect::<Vec<_>>())
}
