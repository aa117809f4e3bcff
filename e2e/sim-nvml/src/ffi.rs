//! What crosses the C boundary: out-pointers, strings and handles. The only place that touches raw memory.
//!
//! NVML's contract makes the rest sound: a pointer is null or points to what the signature says, for the length
//! that the call says, for the duration of the call.

use std::ffi::{CStr, c_char};

use kerf_sim::NvmlError;

type Result<T> = std::result::Result<T, NvmlError>;

/// A pointer at which the caller wants one `T`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// INVALID_ARGUMENT for a null pointer.
    pub(crate) fn check(self) -> Result<()> {
        if self.0.is_null() { Err(NvmlError::InvalidArgument) } else { Ok(()) }
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn set(self, value: T) -> Result<()> {
        self.check()?;
        // SAFETY: not null, so by the module's contract valid for one `T`.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    pub(crate) fn get(self) -> Result<T> {
        self.check()?;
        // SAFETY: as in `set`; the types of nvml.h are plain data, for which any bytes are a value.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The same place seen as another structure of the same family.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Fills an array; the caller has checked that it is long enough.
    pub(crate) fn set_all(self, values: &[T]) -> Result<()> {
        for (index, value) in values.iter().enumerate() {
            self.check()?;
            // SAFETY: the array has room for `values` by the module's contract.
            unsafe { self.0.add(index).write_unaligned(*value) };
        }
        Ok(())
    }

    /// The element at `index` of an array.
    pub(crate) fn at(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }
}

/// A buffer for a string; its length is a separate argument.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct TextOut(*mut c_char);

impl TextOut {
    /// Writes `text` and a NUL; INSUFFICIENT_SIZE if `length` is too small.
    pub(crate) fn put(self, text: &str, length: u32) -> Result<()> {
        if self.0.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        if text.len() >= length as usize {
            return Err(NvmlError::InsufficientSize);
        }
        // SAFETY: the buffer has `length` bytes, and text and NUL fit.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
            self.0.add(text.len()).write(0);
        }
        Ok(())
    }
}

/// A C string from the caller.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct TextIn(*const c_char);

impl TextIn {
    pub(crate) fn get(&self) -> Result<&str> {
        if self.0.is_null() {
            return Err(NvmlError::InvalidArgument);
        }
        // SAFETY: a C string by the module's contract, alive for the call and so for `self`.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| NvmlError::InvalidArgument)
    }
}

/// Fills a fixed array of characters, cut to leave room for the NUL.
pub(crate) fn chars<const N: usize>(text: &str) -> [u8; N] {
    let mut array = [0; N];
    let length = text.len().min(N - 1);
    array[..length].copy_from_slice(&text.as_bytes()[..length]);
    array
}

/// What a handle refers to. A handle is no pointer but these numbers, packed and tagged by kind: it can be kept
/// over the end of the instance, and then refers to nothing, or to what has the same ids by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packed {
    kind: u8,
    gpu: u8,
    gi: u8,
    ci: u8,
}

const MARK: u64 = 0x6b73;
const GPU: u8 = 1;
const MIG_DEVICE: u8 = 2;
const GPU_INSTANCE: u8 = 3;
const COMPUTE_INSTANCE: u8 = 4;

impl Packed {
    fn pack(kind: u8, gpu: usize, gi: u32, ci: u32) -> u64 {
        // The counts are far below 256: 32 GPUs, 15 GPU instances, 8 compute instances.
        MARK << 48
            | u64::from(kind) << 40
            | (gpu as u64 & 0xff) << 16
            | u64::from(gi & 0xff) << 8
            | u64::from(ci & 0xff)
    }

    fn read(raw: u64) -> Option<Packed> {
        let byte = |shift: u32| (raw >> shift) as u8;
        (raw >> 48 == MARK).then(|| Packed { kind: byte(40), gpu: byte(16), gi: byte(8), ci: byte(0) })
    }
}

/// A GPU or a MIG device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Gpu { gpu: usize },
    Mig { gpu: usize, gi: u32, ci: u32 },
}

/// `nvmlDevice_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceHandle(u64);

impl DeviceHandle {
    pub(crate) fn of_gpu(gpu: usize) -> DeviceHandle {
        DeviceHandle(Packed::pack(GPU, gpu, 0, 0))
    }

    pub(crate) fn of_mig_device(gpu: usize, gi: u32, ci: u32) -> DeviceHandle {
        DeviceHandle(Packed::pack(MIG_DEVICE, gpu, gi, ci))
    }

    pub(crate) fn device(self) -> Result<Device> {
        match Packed::read(self.0) {
            Some(Packed { kind: GPU, gpu, .. }) => Ok(Device::Gpu { gpu: gpu.into() }),
            Some(Packed { kind: MIG_DEVICE, gpu, gi, ci }) => {
                Ok(Device::Mig { gpu: gpu.into(), gi: gi.into(), ci: ci.into() })
            }
            _ => Err(NvmlError::InvalidArgument),
        }
    }

    /// The GPU that the handle is on.
    pub(crate) fn gpu(self) -> Option<usize> {
        self.device().ok().map(|device| match device {
            Device::Gpu { gpu } | Device::Mig { gpu, .. } => gpu,
        })
    }
}

/// `nvmlGpuInstance_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct GpuInstanceHandle(u64);

impl GpuInstanceHandle {
    pub(crate) fn new(gpu: usize, gi: u32) -> GpuInstanceHandle {
        GpuInstanceHandle(Packed::pack(GPU_INSTANCE, gpu, gi, 0))
    }

    /// GPU and GPU-instance id.
    pub(crate) fn ids(self) -> Result<(usize, u32)> {
        match Packed::read(self.0) {
            Some(Packed { kind: GPU_INSTANCE, gpu, gi, .. }) => Ok((gpu.into(), gi.into())),
            _ => Err(NvmlError::InvalidArgument),
        }
    }

    pub(crate) fn gpu(self) -> Option<usize> {
        self.ids().ok().map(|(gpu, _)| gpu)
    }
}

/// `nvmlComputeInstance_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct ComputeInstanceHandle(u64);

impl ComputeInstanceHandle {
    pub(crate) fn new(gpu: usize, gi: u32, ci: u32) -> ComputeInstanceHandle {
        ComputeInstanceHandle(Packed::pack(COMPUTE_INSTANCE, gpu, gi, ci))
    }

    /// GPU, GPU-instance id and compute-instance id.
    pub(crate) fn ids(self) -> Result<(usize, u32, u32)> {
        match Packed::read(self.0) {
            Some(Packed { kind: COMPUTE_INSTANCE, gpu, gi, ci }) => Ok((gpu.into(), gi.into(), ci.into())),
            _ => Err(NvmlError::InvalidArgument),
        }
    }

    pub(crate) fn gpu(self) -> Option<usize> {
        self.ids().ok().map(|(gpu, ..)| gpu)
    }
}
