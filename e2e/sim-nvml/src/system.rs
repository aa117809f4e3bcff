//! Library and system: initialisation, versions, counting and finding devices.

use kerf_sim::NvmlError;

use crate::driver;
use crate::ffi::{DeviceHandle, Out, TextIn, TextOut};
use crate::nvml;
use crate::types::{UuidArgument, version_of};

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    driver::init("nvmlInit_v2")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> u32 {
    driver::init("nvmlInit")
}

/// All flags ask for less than a full initialisation, which is none here anyway.
#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: u32) -> u32 {
    driver::init("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    driver::shutdown()
}

/// Works without initialisation; the strings live for ever.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: u32) -> *const std::ffi::c_char {
    use std::collections::BTreeMap;
    use std::ffi::{CStr, CString};
    use std::sync::LazyLock;
    static TEXTS: LazyLock<BTreeMap<u32, CString>> = LazyLock::new(|| {
        let texts = NvmlError::ALL.iter().map(|error| (error.code(), error.text()));
        texts.filter_map(|(code, text)| Some((code, CString::new(text).ok()?))).collect()
    });
    const SUCCESS: &CStr = c"Success";
    const OTHER: &CStr = c"Unknown Error";
    match code {
        0 => SUCCESS.as_ptr(),
        _ => TEXTS.get(&code).map_or(OTHER.as_ptr(), |text| text.as_ptr()),
    }
}

nvml! {
    fn nvmlSystemGetDriverVersion(version: TextOut, length: u32) |call| {
        version.put(&call.state.driver.version, length)
    }

    fn nvmlSystemGetNVMLVersion(version: TextOut, length: u32) |call| {
        version.put(&call.state.driver.nvml, length)
    }

    fn nvmlSystemGetCudaDriverVersion(version: Out<i32>) |call| {
        version.set(call.state.driver.cuda)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<i32>) |call| {
        version.set(call.state.driver.cuda)
    }

    fn nvmlSystemGetProcessName(pid: u32, name: TextOut, length: u32) |_call| {
        let path = format!("/proc/{pid}/cmdline");
        let line = std::fs::read(path).map_err(|_| NvmlError::NotFound)?;
        let text = String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
        // A name that is too long is cut, not refused.
        let end = text.floor_char_boundary((length as usize).saturating_sub(1));
        name.put(&text[..end], length)
    }

    fn nvmlDeviceGetCount_v2(count: Out<u32>) |call| {
        count.set(u32::try_from(call.state.gpus.len()).unwrap_or(u32::MAX))
    }

    fn nvmlDeviceGetCount(count: Out<u32>) |call| {
        count.set(u32::try_from(call.state.gpus.len()).unwrap_or(u32::MAX))
    }

    fn nvmlGetExcludedDeviceCount(count: Out<u32>) |_call| {
        count.set(0)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: Out<DeviceHandle>) |call| {
        by_index(call, index, device)
    }

    fn nvmlDeviceGetHandleByIndex(index: u32, device: Out<DeviceHandle>) |call| {
        by_index(call, index, device)
    }

    /// Finds GPUs and MIG devices.
    fn nvmlDeviceGetHandleByUUID(uuid: TextIn, device: Out<DeviceHandle>) |call| {
        device.check()?;
        device.set(by_uuid(call, uuid.get()?)?)
    }

    fn nvmlDeviceGetHandleByUUIDV(uuid: Out<UuidArgument>, device: Out<DeviceHandle>) |call| {
        device.check()?;
        let argument = uuid.get()?;
        if argument.version != version_of::<UuidArgument>(1) {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        // 1 is text; the binary form would need the bytes of the product's own UUIDs.
        if argument.kind != 1 {
            return Err(NvmlError::InvalidArgument);
        }
        let text = argument.value.split(|byte| *byte == 0).next().unwrap_or_default();
        device.set(by_uuid(call, std::str::from_utf8(text).map_err(|_| NvmlError::InvalidArgument)?)?)
    }

    fn nvmlDeviceGetHandleBySerial(serial: TextIn, device: Out<DeviceHandle>) |call| {
        device.check()?;
        let serial = serial.get()?;
        let index = call.state.gpus.iter().position(|gpu| gpu.serial == serial).ok_or(NvmlError::NotFound)?;
        call.gpu(index)?;
        device.set(DeviceHandle::of_gpu(index))
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: TextIn, device: Out<DeviceHandle>) |call| {
        by_bus_id(call, bus_id, device)
    }

    fn nvmlDeviceGetHandleByPciBusId(bus_id: TextIn, device: Out<DeviceHandle>) |call| {
        by_bus_id(call, bus_id, device)
    }
}

fn by_index(call: &driver::Call, index: u32, device: Out<DeviceHandle>) -> driver::Result<()> {
    device.check()?;
    let index = index as usize;
    call.gpu(index)?;
    device.set(DeviceHandle::of_gpu(index))
}

fn by_bus_id(call: &driver::Call, bus_id: TextIn, device: Out<DeviceHandle>) -> driver::Result<()> {
    device.check()?;
    let bus_id = bus_id.get()?;
    let index = call.state.gpus.iter().position(|gpu| gpu.pci.is(bus_id)).ok_or(NvmlError::NotFound)?;
    call.gpu(index)?;
    device.set(DeviceHandle::of_gpu(index))
}

fn by_uuid(call: &driver::Call, uuid: &str) -> driver::Result<DeviceHandle> {
    for (index, gpu) in call.state.gpus.iter().enumerate() {
        if gpu.uuid == uuid {
            call.gpu(index)?;
            return Ok(DeviceHandle::of_gpu(index));
        }
        for (gi, ci) in gpu.mig_devices() {
            if ci.uuid == uuid {
                call.gpu(index)?;
                return Ok(DeviceHandle::of_mig_device(index, gi.id, ci.id));
            }
        }
    }
    Err(NvmlError::NotFound)
}
