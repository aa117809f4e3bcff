//! The boundary to `libnvidia-ml.so.1`, and the daemon's only `unsafe`.
//!
//! Handles never leave this folder, and none is kept: every operation looks its device up by UUID and its instances by
//! id, since handles die with a reset, a driver reload or their instance.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use kerf_crds::gpu_node::Placement;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use super::error::{Code, Failure, failed};

type Result<T> = std::result::Result<T, Failure>;

/// Where NVML reports no instance.
const NO_INSTANCE: u32 = u32::MAX;

/// An initialised library. Shut down and closed when dropped.
pub struct Library {
    nvml: Nvml,
    /// The same library once more, for the functions that nvml-wrapper does not wrap.
    sys: sys::NvmlLib,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}

/// Calls a function of the bindings and turns its status into a `Result`.
macro_rules! call {
    ($library:expr, $symbol:ident as $name:literal ( $($argument:expr),* )) => {
        match $library.sys.$symbol.as_ref() {
            // SAFETY: the symbol was found in the library under its own name, so it has the documented signature that
            // the bindings were generated from. Handles come from the same initialised library within the same
            // operation; pointers are to live local values or to vectors of the stated length.
            Ok(function) => match unsafe { function($($argument),*) } {
                sys::nvmlReturn_enum_NVML_SUCCESS => Ok(()),
                code => Err(Failure { call: $name, code: Code(code) }),
            },
            Err(_) => Err(Failure { call: $name, code: Code::FUNCTION_NOT_FOUND }),
        }
    };
}

impl Library {
    /// Opens and initialises the library at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let nvml =
            Nvml::builder().lib_path(path.as_os_str()).init().map_err(|error| failed("nvmlInit", &error))?;
        // SAFETY: the library is already loaded in this process (it was just initialised), so this only takes another
        // reference; its initialisers do not run again.
        let sys = unsafe { sys::NvmlLib::new(path) }
            .map_err(|_| Failure { call: "nvmlInit", code: Code::LIBRARY_NOT_FOUND })?;
        Ok(Self { nvml, sys })
    }

    /// The wrapper, for what it does.
    pub fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &str) -> Result<RawGpu<'_>> {
        let device =
            self.nvml.device_by_uuid(uuid).map_err(|error| failed("nvmlDeviceGetHandleByUUID", &error))?;
        Ok(RawGpu { library: self, device })
    }

    /// The GPU with this index.
    pub fn gpu_by_index(&self, index: u32) -> Result<RawGpu<'_>> {
        let device =
            self.nvml.device_by_index(index).map_err(|error| failed("nvmlDeviceGetHandleByIndex", &error))?;
        Ok(RawGpu { library: self, device })
    }
}

/// A GPU of an initialised library.
#[derive(Debug)]
pub struct RawGpu<'l> {
    library: &'l Library,
    pub device: Device<'l>,
}

/// A profile of GPU instances, whatever version of the struct it came in.
#[derive(Clone, Debug, PartialEq)]
pub struct RawProfile {
    pub id: u32,
    pub slices: u32,
    pub instances: u32,
    pub multiprocessors: u32,
    pub copy: u32,
    pub decoder: u32,
    pub encoder: u32,
    pub jpeg: u32,
    pub ofa: u32,
    /// MiB.
    pub memory_mib: u64,
    /// Since v2.
    pub name: Option<String>,
    /// Since v3: whether graphics APIs work.
    pub graphics: Option<bool>,
}

/// A profile of compute instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawComputeProfile {
    pub id: u32,
    pub slices: u32,
    pub instances: u32,
    pub multiprocessors: u32,
}

/// A GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawInstance {
    pub id: u32,
    pub profile_id: u32,
    pub placement: Placement,
}

/// A MIG device: the GPU and compute instance that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawMigDevice {
    pub gpu_instance: u32,
    pub compute_instance: u32,
    pub uuid: String,
}

/// A process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawProcess {
    pub pid: u32,
    pub gpu_instance: Option<u32>,
    /// Bytes of the GPU's memory that it uses, where the library can tell.
    pub memory: Option<u64>,
}

/// What processes of a cgroup may have of a GPU's memory together, in bytes: `soft` of it whatever others need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    pub soft: u64,
    pub hard: u64,
}

impl MemoryLimits {
    /// None at all: as documented for `nvmlDeviceSetMemoryLimits`.
    pub const NONE: Self = Self { soft: 0, hard: u64::MAX };

    /// No more than so many bytes, and none of them guaranteed. All limits together are no more than the GPU has, so a
    /// guarantee would give nothing; but one that was set when its cgroup goes stays with the cgroups above, which have the
    /// sum of those below them, until the next boot.
    pub fn at_most(bytes: u64) -> Self {
        Self { soft: 0, hard: bytes }
    }
}

/// As the library wants it: a path, and limits in bytes.
#[repr(C)]
struct SetMemoryLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
}

/// As the library gives it.
#[repr(C)]
struct GetMemoryLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// Kinds of process lists.
#[derive(Clone, Copy, Debug)]
pub enum ProcessKind {
    Compute,
    Graphics,
    Mps,
}

impl<'l> RawGpu<'l> {
    fn handle(&self) -> sys::nvmlDevice_t {
        // SAFETY: the handle is only passed on to the library that it belongs to, while that library is borrowed.
        unsafe { self.device.handle() }
    }

    /// `NVML_DEVICE_ARCH_*`.
    pub fn architecture(&self) -> Result<u32> {
        let mut value = 0;
        call!(self.library, nvmlDeviceGetArchitecture as "nvmlDeviceGetArchitecture"(self.handle(), &mut value))?;
        Ok(value)
    }

    /// A field whose value is an unsigned integer.
    pub fn field(&self, field: u32) -> Result<u32> {
        // SAFETY: plain old data, for which all zeros is a value.
        let mut value: sys::nvmlFieldValue_t = unsafe { std::mem::zeroed() };
        value.fieldId = field;
        call!(self.library, nvmlDeviceGetFieldValues as "nvmlDeviceGetFieldValues"(self.handle(), 1, &mut value))?;
        match value.nvmlReturn {
            // SAFETY: the union was zeroed before the call, so its first four bytes are initialised whatever member
            // the library wrote; the flags asked for here are 32-bit.
            sys::nvmlReturn_enum_NVML_SUCCESS => Ok(unsafe { value.value.uiVal }),
            code => Err(Failure { call: "nvmlDeviceGetFieldValues", code: Code(code) }),
        }
    }

    /// Memory in bytes, all of it, for libraries without the newer function that tells the reserved part.
    pub fn total_memory(&self) -> Result<u64> {
        let mut memory = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
        call!(self.library, nvmlDeviceGetMemoryInfo as "nvmlDeviceGetMemoryInfo"(self.handle(), &mut memory))?;
        Ok(memory.total)
    }

    /// Current and pending MIG mode.
    pub fn mig_mode(&self) -> Result<(bool, bool)> {
        let (mut current, mut pending) = (0, 0);
        call!(self.library, nvmlDeviceGetMigMode as "nvmlDeviceGetMigMode"(self.handle(), &mut current, &mut pending))?;
        Ok((current == sys::NVML_DEVICE_MIG_ENABLE, pending == sys::NVML_DEVICE_MIG_ENABLE))
    }

    /// Switches MIG mode. The library answers SUCCESS also when only the pending mode changed; that is an error here,
    /// with the activation status as its code.
    pub fn set_mig_mode(&self, on: bool) -> Result<()> {
        let mode = if on { sys::NVML_DEVICE_MIG_ENABLE } else { sys::NVML_DEVICE_MIG_DISABLE };
        let mut activation = sys::nvmlReturn_enum_NVML_SUCCESS;
        call!(self.library, nvmlDeviceSetMigMode as "nvmlDeviceSetMigMode"(self.handle(), mode, &mut activation))?;
        match activation {
            sys::nvmlReturn_enum_NVML_SUCCESS => Ok(()),
            code => Err(Failure { call: "nvmlDeviceSetMigMode", code: Code(code) }),
        }
    }

    /// The profile behind an enumerator (`NVML_GPU_INSTANCE_PROFILE_*`), by the newest struct that the library knows.
    pub fn profile(&self, enumerator: u32) -> Result<RawProfile> {
        let newest = self.profile_v3(enumerator).or_else(|failure| match failure.code {
            Code::INVALID_ARGUMENT | Code::ARGUMENT_VERSION_MISMATCH | Code::FUNCTION_NOT_FOUND => {
                self.profile_v2(enumerator)
            }
            _ => Err(failure),
        });
        newest.or_else(|failure| match failure.code {
            Code::INVALID_ARGUMENT | Code::ARGUMENT_VERSION_MISMATCH | Code::FUNCTION_NOT_FOUND => {
                self.profile_v1(enumerator)
            }
            _ => Err(failure),
        })
    }

    fn profile_v3(&self, enumerator: u32) -> Result<RawProfile> {
        // SAFETY: plain old data, for which all zeros is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
        info.version = struct_version(size_of_val(&info), 3);
        // The function takes either struct; `version` says which (nvml.h).
        let pointer = (&raw mut info).cast::<sys::nvmlGpuInstanceProfileInfo_v2_t>();
        call!(self.library, nvmlDeviceGetGpuInstanceProfileInfoV as "nvmlDeviceGetGpuInstanceProfileInfo"(self.handle(), enumerator, pointer))?;
        Ok(RawProfile {
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
            copy: info.copyEngineCount,
            decoder: info.decoderCount,
            encoder: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: Some(text(&info.name)),
            // NVML_GPU_INSTANCE_PROFILE_CAPS_GFX
            graphics: Some(info.capabilities & 0x2 != 0),
        })
    }

    fn profile_v2(&self, enumerator: u32) -> Result<RawProfile> {
        // SAFETY: plain old data, for which all zeros is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = struct_version(size_of_val(&info), 2);
        call!(self.library, nvmlDeviceGetGpuInstanceProfileInfoV as "nvmlDeviceGetGpuInstanceProfileInfo"(self.handle(), enumerator, &mut info))?;
        Ok(RawProfile {
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
            copy: info.copyEngineCount,
            decoder: info.decoderCount,
            encoder: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: Some(text(&info.name)),
            graphics: None,
        })
    }

    fn profile_v1(&self, enumerator: u32) -> Result<RawProfile> {
        // SAFETY: plain old data, for which all zeros is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        call!(self.library, nvmlDeviceGetGpuInstanceProfileInfo as "nvmlDeviceGetGpuInstanceProfileInfo"(self.handle(), enumerator, &mut info))?;
        Ok(RawProfile {
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
            copy: info.copyEngineCount,
            decoder: info.decoderCount,
            encoder: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: None,
            graphics: None,
        })
    }

    /// Where instances of a profile may be placed.
    pub fn placements(&self, profile_id: u32) -> Result<Vec<Placement>> {
        const CALL: &str = "nvmlDeviceGetGpuInstancePossiblePlacements";
        let mut count = 0;
        call!(self.library, nvmlDeviceGetGpuInstancePossiblePlacements_v2 as "nvmlDeviceGetGpuInstancePossiblePlacements"(self.handle(), profile_id, std::ptr::null_mut(), &mut count))?;
        let mut list = vec![sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; count as usize];
        if list.is_empty() {
            return Ok(Vec::new());
        }
        let room = count;
        call!(self.library, nvmlDeviceGetGpuInstancePossiblePlacements_v2 as "nvmlDeviceGetGpuInstancePossiblePlacements"(self.handle(), profile_id, list.as_mut_ptr(), &mut count))?;
        if count > room {
            return Err(Failure { call: CALL, code: Code::INSUFFICIENT_SIZE });
        }
        list.truncate(count as usize);
        Ok(list.iter().map(|p| Placement { start: p.start, size: p.size }).collect())
    }

    /// The GPU instances of one profile, of which there can be `max`.
    pub fn instances(&self, profile_id: u32, max: u32) -> Result<Vec<RawInstance>> {
        // Room for more than the profile's maximum: the function has no way to be told how much there is.
        let mut handles = vec![std::ptr::null_mut(); (max as usize + 8).max(64)];
        let mut count = 0;
        call!(self.library, nvmlDeviceGetGpuInstances as "nvmlDeviceGetGpuInstances"(self.handle(), profile_id, handles.as_mut_ptr(), &mut count))?;
        handles.truncate(count as usize);
        handles.into_iter().map(|handle| self.instance_info(handle)).collect()
    }

    fn instance_info(&self, handle: sys::nvmlGpuInstance_t) -> Result<RawInstance> {
        // SAFETY: plain old data (a pointer and integers), for which all zeros is a value.
        let mut info: sys::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        call!(self.library, nvmlGpuInstanceGetInfo as "nvmlGpuInstanceGetInfo"(handle, &mut info))?;
        let placement = Placement { start: info.placement.start, size: info.placement.size };
        Ok(RawInstance { id: info.id, profile_id: info.profileId, placement })
    }

    fn instance_handle(&self, id: u32) -> Result<sys::nvmlGpuInstance_t> {
        let mut handle = std::ptr::null_mut();
        call!(self.library, nvmlDeviceGetGpuInstanceById as "nvmlDeviceGetGpuInstanceById"(self.handle(), id, &mut handle))?;
        Ok(handle)
    }

    /// Creates a GPU instance at exactly this place.
    pub fn create_instance(&self, profile_id: u32, placement: Placement) -> Result<RawInstance> {
        let place = sys::nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
        let mut handle = std::ptr::null_mut();
        call!(self.library, nvmlDeviceCreateGpuInstanceWithPlacement as "nvmlDeviceCreateGpuInstanceWithPlacement"(self.handle(), profile_id, &place, &mut handle))?;
        self.instance_info(handle)
    }

    /// Destroys a GPU instance, if it still is what the caller thinks: ids are given out again.
    pub fn destroy_instance(&self, expected: RawInstance) -> Result<()> {
        let handle = self.instance_handle(expected.id)?;
        self.same(handle, expected)?;
        call!(self.library, nvmlGpuInstanceDestroy as "nvmlGpuInstanceDestroy"(handle))
    }

    fn same(&self, handle: sys::nvmlGpuInstance_t, expected: RawInstance) -> Result<()> {
        match self.instance_info(handle)? {
            found if found == expected => Ok(()),
            _ => Err(Failure { call: "nvmlGpuInstanceGetInfo", code: Code::INVALID_STATE }),
        }
    }

    /// The profile of compute instances behind an enumerator (`NVML_COMPUTE_INSTANCE_PROFILE_*`) in a GPU instance.
    pub fn compute_profile(&self, instance: u32, enumerator: u32) -> Result<RawComputeProfile> {
        let handle = self.instance_handle(instance)?;
        // SAFETY: plain old data, for which all zeros is a value.
        let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        // NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED is 0 and the only one.
        call!(self.library, nvmlGpuInstanceGetComputeInstanceProfileInfo as "nvmlGpuInstanceGetComputeInstanceProfileInfo"(handle, enumerator, 0, &mut info))?;
        Ok(RawComputeProfile {
            id: info.id,
            slices: info.sliceCount,
            instances: info.instanceCount,
            multiprocessors: info.multiprocessorCount,
        })
    }

    /// The compute instances of one profile in a GPU instance: id and profile id.
    pub fn compute_instances(&self, instance: u32, profile_id: u32) -> Result<Vec<(u32, u32)>> {
        let parent = self.instance_handle(instance)?;
        // A GPU instance has at most as many compute instances as compute slices.
        let mut handles = vec![std::ptr::null_mut(); 64];
        let mut count = 0;
        call!(self.library, nvmlGpuInstanceGetComputeInstances as "nvmlGpuInstanceGetComputeInstances"(parent, profile_id, handles.as_mut_ptr(), &mut count))?;
        handles.truncate(count as usize);
        handles
            .into_iter()
            .map(|handle| {
                // SAFETY: plain old data (pointers and integers), for which all zeros is a value.
                let mut info: sys::nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
                call!(self.library, nvmlComputeInstanceGetInfo_v2 as "nvmlComputeInstanceGetInfo"(handle, &mut info))?;
                Ok((info.id, info.profileId))
            })
            .collect()
    }

    /// Creates a compute instance.
    pub fn create_compute_instance(&self, instance: RawInstance, profile_id: u32) -> Result<()> {
        let parent = self.instance_handle(instance.id)?;
        self.same(parent, instance)?;
        let mut handle = std::ptr::null_mut();
        call!(self.library, nvmlGpuInstanceCreateComputeInstance as "nvmlGpuInstanceCreateComputeInstance"(parent, profile_id, &mut handle))
    }

    /// Destroys a compute instance.
    pub fn destroy_compute_instance(&self, instance: RawInstance, compute_instance: u32) -> Result<()> {
        let parent = self.instance_handle(instance.id)?;
        self.same(parent, instance)?;
        let mut handle = std::ptr::null_mut();
        call!(self.library, nvmlGpuInstanceGetComputeInstanceById as "nvmlGpuInstanceGetComputeInstanceById"(parent, compute_instance, &mut handle))?;
        call!(self.library, nvmlComputeInstanceDestroy as "nvmlComputeInstanceDestroy"(handle))
    }

    /// `NVML_COMPUTEMODE_*`.
    pub fn compute_mode(&self) -> Result<u32> {
        let mut mode = 0;
        call!(self.library, nvmlDeviceGetComputeMode as "nvmlDeviceGetComputeMode"(self.handle(), &mut mode))?;
        Ok(mode)
    }

    /// Sets the compute mode.
    pub fn set_compute_mode(&self, mode: u32) -> Result<()> {
        call!(self.library, nvmlDeviceSetComputeMode as "nvmlDeviceSetComputeMode"(self.handle(), mode))
    }

    /// Limits the memory of the processes of a cgroup, by its directory. FUNCTION_NOT_FOUND before driver 615.
    pub fn set_memory_limits(&self, cgroup: &Path, limits: MemoryLimits) -> Result<()> {
        const CALL: &str = "nvmlDeviceSetMemoryLimits";
        let path = c_path(cgroup, CALL)?;
        let argument = SetMemoryLimits { name_space: path.as_ptr(), soft: limits.soft, hard: limits.hard };
        type Function = unsafe extern "C" fn(sys::nvmlDevice_t, *const SetMemoryLimits) -> sys::nvmlReturn_t;
        // SAFETY: the type is the function's documented one (nvml.h of CUDA 13.4), which the bindings do not have yet;
        // the path lives until the call is back.
        let code = unsafe {
            match self.library.sys.__library.get::<Function>(b"nvmlDeviceSetMemoryLimits_v1\0") {
                Ok(function) => function(self.handle(), &argument),
                Err(_) => sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
            }
        };
        status(CALL, code)
    }

    /// The limits of a cgroup, and the bytes that its processes use. NOT_FOUND, or NOT_SUPPORTED, if it has none.
    pub fn memory_limits(&self, cgroup: &Path) -> Result<(MemoryLimits, u64)> {
        const CALL: &str = "nvmlDeviceGetMemoryLimits";
        let path = c_path(cgroup, CALL)?;
        let mut argument = GetMemoryLimits { name_space: path.as_ptr(), soft: 0, hard: 0, used: 0 };
        type Function = unsafe extern "C" fn(sys::nvmlDevice_t, *mut GetMemoryLimits) -> sys::nvmlReturn_t;
        // SAFETY: as above.
        let code = unsafe {
            match self.library.sys.__library.get::<Function>(b"nvmlDeviceGetMemoryLimits_v1\0") {
                Ok(function) => function(self.handle(), &mut argument),
                Err(_) => sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
            }
        };
        status(CALL, code)?;
        Ok((MemoryLimits { soft: argument.soft, hard: argument.hard }, argument.used))
    }

    /// Every MIG device of the GPU. Positions in NVML's list shift as instances come and go, so none is remembered.
    pub fn mig_devices(&self) -> Result<Vec<RawMigDevice>> {
        let mut max = 0;
        call!(self.library, nvmlDeviceGetMaxMigDeviceCount as "nvmlDeviceGetMaxMigDeviceCount"(self.handle(), &mut max))?;
        let mut devices = Vec::new();
        for index in 0..max {
            let mut handle = std::ptr::null_mut();
            match call!(self.library, nvmlDeviceGetMigDeviceHandleByIndex as "nvmlDeviceGetMigDeviceHandleByIndex"(self.handle(), index, &mut handle))
            {
                Ok(()) => devices.push(self.mig_device(handle)?),
                Err(failure) if failure.code == Code::NOT_FOUND => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(devices)
    }

    fn mig_device(&self, handle: sys::nvmlDevice_t) -> Result<RawMigDevice> {
        let (mut gpu_instance, mut compute_instance) = (0, 0);
        call!(self.library, nvmlDeviceGetGpuInstanceId as "nvmlDeviceGetGpuInstanceId"(handle, &mut gpu_instance))?;
        call!(self.library, nvmlDeviceGetComputeInstanceId as "nvmlDeviceGetComputeInstanceId"(handle, &mut compute_instance))?;
        // Larger than NVML_DEVICE_UUID_V2_BUFFER_SIZE (96).
        let mut buffer = [0 as c_char; 128];
        call!(self.library, nvmlDeviceGetUUID as "nvmlDeviceGetUUID"(handle, buffer.as_mut_ptr(), buffer.len() as u32))?;
        Ok(RawMigDevice { gpu_instance, compute_instance, uuid: text(&buffer) })
    }

    /// Processes of one kind on the GPU and all its instances.
    pub fn processes(&self, kind: ProcessKind) -> Result<Vec<RawProcess>> {
        // SAFETY: plain old data, for which all zeros is a value.
        let empty: sys::nvmlProcessInfo_t = unsafe { std::mem::zeroed() };
        let mut room = 32;
        loop {
            let mut list = vec![empty; room];
            let mut count = room as u32;
            let answer = match kind {
                ProcessKind::Compute => {
                    call!(self.library, nvmlDeviceGetComputeRunningProcesses_v3 as "nvmlDeviceGetComputeRunningProcesses"(self.handle(), &mut count, list.as_mut_ptr()))
                }
                ProcessKind::Graphics => {
                    call!(self.library, nvmlDeviceGetGraphicsRunningProcesses_v3 as "nvmlDeviceGetGraphicsRunningProcesses"(self.handle(), &mut count, list.as_mut_ptr()))
                }
                ProcessKind::Mps => {
                    call!(self.library, nvmlDeviceGetMPSComputeRunningProcesses_v3 as "nvmlDeviceGetMPSComputeRunningProcesses"(self.handle(), &mut count, list.as_mut_ptr()))
                }
            };
            match answer {
                Ok(()) => {
                    list.truncate(count as usize);
                    let process = |info: &sys::nvmlProcessInfo_t| RawProcess {
                        pid: info.pid,
                        gpu_instance: Some(info.gpuInstanceId).filter(|id| *id != NO_INSTANCE),
                        // NVML_VALUE_NOT_AVAILABLE is the greatest number.
                        memory: Some(info.usedGpuMemory).filter(|bytes| *bytes != u64::MAX),
                    };
                    return Ok(list.iter().map(process).collect());
                }
                // More came while we asked. The bound keeps a library that answers nonsense from eating memory.
                Err(failure) if failure.code == Code::INSUFFICIENT_SIZE && room < 1 << 16 => {
                    room = (count as usize + 16).max(room * 2);
                }
                Err(failure) => return Err(failure),
            }
        }
    }
}

/// A critical XID as NVML tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// UUID of the GPU; `None` if the library names one that was not registered.
    pub gpu: Option<String>,
    pub code: u64,
    /// The GPU instance that it is about, where it is about one.
    pub gpu_instance: Option<u32>,
}

/// Waits for critical XIDs of the GPUs that the library counts.
#[derive(Debug)]
pub struct XidWatch<'l> {
    library: &'l Library,
    set: sys::nvmlEventSet_t,
    /// UUIDs of the registered GPUs by handle: one that has fallen off the bus cannot be asked for it any more.
    registered: Vec<(sys::nvmlDevice_t, String)>,
    /// Index of each GPU that is not registered, and why the last try failed.
    missing: Vec<(u32, Option<Failure>)>,
}

impl<'l> XidWatch<'l> {
    /// Registers every GPU that will.
    pub fn new(library: &'l Library) -> Result<Self> {
        let mut set = std::ptr::null_mut();
        call!(library, nvmlEventSetCreate as "nvmlEventSetCreate"(&mut set))?;
        let mut watch = Self { library, set, registered: Vec::new(), missing: Vec::new() };
        let count = library.nvml.device_count().map_err(|error| failed("nvmlDeviceGetCount", &error))?;
        watch.missing = (0..count).map(|index| (index, None)).collect();
        watch.register_missing();
        Ok(watch)
    }

    /// Tries again to register the GPUs that could not be registered. One that has no such events is given up.
    pub fn register_missing(&mut self) {
        for (index, before) in std::mem::take(&mut self.missing) {
            let Err(failure) = self.register(index) else { continue };
            if before.as_ref() != Some(&failure) {
                tracing::warn!(index, %failure, "XIDs of this GPU are not noticed");
            }
            if failure.code != Code::NOT_SUPPORTED {
                self.missing.push((index, Some(failure)));
            }
        }
    }

    fn register(&mut self, index: u32) -> Result<()> {
        let gpu = self.library.gpu_by_index(index)?;
        let uuid = gpu.device.uuid().of("nvmlDeviceGetUUID")?;
        let kinds = u64::from(sys::nvmlEventTypeXidCriticalError);
        call!(self.library, nvmlDeviceRegisterEvents as "nvmlDeviceRegisterEvents"(gpu.handle(), kinds, self.set))?;
        self.registered.push((gpu.handle(), uuid));
        Ok(())
    }

    /// The next XID, or `None` after `timeout_ms`.
    pub fn wait(&self, timeout_ms: u32) -> Result<Option<Xid>> {
        // SAFETY: plain old data (a pointer and integers), for which all zeros is a value.
        let mut data: sys::nvmlEventData_t = unsafe { std::mem::zeroed() };
        match call!(self.library, nvmlEventSetWait_v2 as "nvmlEventSetWait"(self.set, &mut data, timeout_ms))
        {
            Ok(()) => {
                let known = self.registered.iter().find(|(handle, _)| *handle == data.device);
                Ok(Some(Xid {
                    gpu: known.map(|(_, uuid)| uuid.clone()),
                    code: data.eventData,
                    gpu_instance: Some(data.gpuInstanceId).filter(|id| *id != NO_INSTANCE),
                }))
            }
            Err(failure) if failure.code == Code::TIMEOUT => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

impl Drop for XidWatch<'_> {
    fn drop(&mut self) {
        // There is nothing to be done about a failure.
        let _ = call!(self.library, nvmlEventSetFree as "nvmlEventSetFree"(self.set));
    }
}

fn status(call: &'static str, code: sys::nvmlReturn_t) -> Result<()> {
    match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => Ok(()),
        code => Err(Failure { call, code: Code(code) }),
    }
}

fn c_path(path: &Path, call: &'static str) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Failure { call, code: Code::INVALID_ARGUMENT })
}

/// `NVML_STRUCT_VERSION`.
fn struct_version(size: usize, version: u32) -> u32 {
    size as u32 | version << 24
}

/// The text up to the first NUL; the whole array if there is none.
fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().map(|c| c.cast_unsigned()).collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

/// For the functions of nvml-wrapper, whose errors do not name the call.
pub(super) trait Named<T> {
    /// Names the call.
    fn of(self, call: &'static str) -> Result<T>;
}

impl<T> Named<T> for std::result::Result<T, NvmlError> {
    fn of(self, call: &'static str) -> Result<T> {
        self.map_err(|error| failed(call, &error))
    }
}
