//! Structures of nvml.h (CUDA 13) that callers pass by pointer. Sizes are checked against the header's.

use crate::ffi::{DeviceHandle, GpuInstanceHandle, TextIn};

/// `NVML_STRUCT_VERSION`: size, and version in the top byte.
pub(crate) const fn version_of<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | version << 24
}

macro_rules! layout {
    ($($type:ty: $size:literal),* $(,)?) => { $(const _: () = assert!(size_of::<$type>() == $size);)* };
}

layout! {
    PciInfo: 68, PciInfoExt: 64, Memory: 24, MemoryV2: 40, Bar1Memory: 24, Attributes: 40, ProcessV1: 16, Process: 24,
    EventDataV1: 24, EventData: 32, FieldValue: 40, GiProfile: 48, GiProfileV2: 152, GiProfileV3: 152, Placement: 8,
    GiInfo: 24, CiProfile: 36, CiProfileV2: 136, CiProfileV3: 140, CiInfo: 32, AddressingMode: 8, Temperature: 12,
    UuidArgument: 52, SetMemoryLimits: 24, GetMemoryLimits: 32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PciInfo {
    pub(crate) bus_id_legacy: [u8; 16],
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
    pub(crate) pci_device_id: u32,
    pub(crate) pci_sub_system_id: u32,
    pub(crate) bus_id: [u8; 32],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PciInfoExt {
    pub(crate) version: u32,
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
    pub(crate) pci_device_id: u32,
    pub(crate) pci_sub_system_id: u32,
    pub(crate) base_class: u32,
    pub(crate) sub_class: u32,
    pub(crate) bus_id: [u8; 32],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryV2 {
    pub(crate) version: u32,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Bar1Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Utilization {
    pub(crate) gpu: u32,
    pub(crate) memory: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpegs: u32,
    pub(crate) ofas: u32,
    pub(crate) gi_slices: u32,
    pub(crate) ci_slices: u32,
    pub(crate) memory_size_mb: u64,
}

/// `nvmlSetMemoryLimits_v1_t` (nvml.h of CUDA 13.4).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SetMemoryLimits {
    /// Path of the cgroup's directory.
    pub(crate) name_space: TextIn,
    pub(crate) soft_limit: u64,
    pub(crate) hard_limit: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GetMemoryLimits {
    pub(crate) name_space: TextIn,
    pub(crate) soft_limit: u64,
    pub(crate) hard_limit: u64,
    pub(crate) current_used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProcessV1 {
    pub(crate) pid: u32,
    pub(crate) used_gpu_memory: u64,
}

/// `nvmlProcessInfo_v2_t`, also the structure of the `_v3` functions.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) used_gpu_memory: u64,
    pub(crate) gpu_instance_id: u32,
    pub(crate) compute_instance_id: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EventDataV1 {
    pub(crate) device: DeviceHandle,
    pub(crate) event_type: u64,
    pub(crate) event_data: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EventData {
    pub(crate) device: DeviceHandle,
    pub(crate) event_type: u64,
    pub(crate) event_data: u64,
    pub(crate) gpu_instance_id: u32,
    pub(crate) compute_instance_id: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct FieldValue {
    pub(crate) field_id: u32,
    pub(crate) scope_id: u32,
    pub(crate) timestamp: i64,
    pub(crate) latency_usec: i64,
    pub(crate) value_type: u32,
    pub(crate) nvml_return: u32,
    /// A union; the fields here are unsigned integers, which little-endian reads the same at every width.
    pub(crate) value: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GiProfile {
    pub(crate) id: u32,
    pub(crate) is_p2p_supported: u32,
    pub(crate) slice_count: u32,
    pub(crate) instance_count: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpegs: u32,
    pub(crate) ofas: u32,
    pub(crate) memory_size_mb: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GiProfileV2 {
    pub(crate) version: u32,
    pub(crate) id: u32,
    pub(crate) is_p2p_supported: u32,
    pub(crate) slice_count: u32,
    pub(crate) instance_count: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpegs: u32,
    pub(crate) ofas: u32,
    pub(crate) memory_size_mb: u64,
    pub(crate) name: [u8; 96],
}

/// As large as [`GiProfileV2`]: only the top byte of the version tells them apart.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GiProfileV3 {
    pub(crate) version: u32,
    pub(crate) id: u32,
    pub(crate) slice_count: u32,
    pub(crate) instance_count: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpegs: u32,
    pub(crate) ofas: u32,
    pub(crate) memory_size_mb: u64,
    pub(crate) name: [u8; 96],
    pub(crate) capabilities: u32,
}

/// `nvmlGpuInstancePlacement_t` and `nvmlComputeInstancePlacement_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Placement {
    pub(crate) start: u32,
    pub(crate) size: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GiInfo {
    pub(crate) device: DeviceHandle,
    pub(crate) id: u32,
    pub(crate) profile_id: u32,
    pub(crate) placement: Placement,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CiProfile {
    pub(crate) id: u32,
    pub(crate) slice_count: u32,
    pub(crate) instance_count: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpegs: u32,
    pub(crate) ofas: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CiProfileV2 {
    pub(crate) version: u32,
    pub(crate) profile: CiProfile,
    pub(crate) name: [u8; 96],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CiProfileV3 {
    pub(crate) version: u32,
    pub(crate) profile: CiProfile,
    pub(crate) name: [u8; 96],
    pub(crate) capabilities: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CiInfo {
    pub(crate) device: DeviceHandle,
    pub(crate) gpu_instance: GpuInstanceHandle,
    pub(crate) id: u32,
    pub(crate) profile_id: u32,
    pub(crate) placement: Placement,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AddressingMode {
    pub(crate) version: u32,
    pub(crate) value: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Temperature {
    pub(crate) version: u32,
    pub(crate) sensor: u32,
    pub(crate) celsius: i32,
}

/// `nvmlUUID_v1_t`; the value is text or 16 bytes, by type.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UuidArgument {
    pub(crate) version: u32,
    pub(crate) kind: u32,
    pub(crate) value: [u8; 41],
    pub(crate) _padding: [u8; 3],
}
