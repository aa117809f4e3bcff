//! `libcuda.so.1` of a simulated node: the calls of CUDA's driver API that a program needs to see what it has of a GPU,
//! over the engine of `kerf-sim`. Numbers and signatures are those of cuda.h of CUDA 13; a function that is not here is
//! missing to its callers.
//!
//! No kernel computes anything, with one exception: one that writes `%smid` runs on the multiprocessors that the program
//! may use, block by block in turn. It must have one parameter, the address of a word for each block.

#![allow(unsafe_code, reason = "a C interface: exported names, and pointers that callers pass")]
#![allow(non_snake_case, reason = "the functions have CUDA's names")]

mod program;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::catch_unwind;

use kerf_sim::kernel::protocol::CudaError;
use program::{Program, Result, with};

/// `CUresult`.
type Code = u32;

fn answer(call: impl FnOnce() -> Result<()> + std::panic::UnwindSafe) -> Code {
    catch_unwind(call).unwrap_or(Err(CudaError::Unknown)).map_or_else(CudaError::code, |()| 0)
}

/// Writes what a call found to where its caller wants it.
fn give<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(CudaError::InvalidValue);
    }
    // SAFETY: not null, so by CUDA's contract valid for one `T`.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

fn text<'a>(from: *const c_char) -> Result<&'a str> {
    if from.is_null() {
        return Err(CudaError::InvalidValue);
    }
    // SAFETY: not null, so by CUDA's contract a C string for as long as the call goes on.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| CudaError::InvalidValue)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> Code {
    answer(|| if flags == 0 { Program::init() } else { Err(CudaError::InvalidValue) })
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(code: Code, out: *mut *const c_char) -> Code {
    answer(|| {
        let name = match code {
            0 => "CUDA_SUCCESS",
            code => CudaError::from_code(code).ok_or(CudaError::InvalidValue)?.name(),
        };
        give(out, program::c_name(name))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(out: *mut c_int, ordinal: c_int) -> Code {
    answer(|| {
        with(|program| program.device(ordinal).map(drop))?;
        give(out, ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(out: *mut c_char, length: c_int, device: c_int) -> Code {
    answer(|| {
        let name = with(|program| Ok(program.device(device)?.device.name.clone()))?;
        let length = usize::try_from(length).map_err(|_| CudaError::InvalidValue)?;
        let fits = name.len().min(length.checked_sub(1).ok_or(CudaError::InvalidValue)?);
        if out.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: the buffer has `length` bytes, of which `fits` and a NUL are written.
        unsafe {
            out.copy_from_nonoverlapping(name.as_ptr().cast(), fits);
            out.add(fits).write(0);
        }
        Ok(())
    })
}

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` alone.
#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(out: *mut c_int, attribute: c_uint, device: c_int) -> Code {
    const MULTIPROCESSOR_COUNT: c_uint = 16;
    answer(|| {
        let count = with(|program| Ok(program.device(device)?.sms))?;
        match attribute {
            MULTIPROCESSOR_COUNT => give(out, count.cast_signed()),
            _ => Err(CudaError::InvalidValue),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate_v2(out: *mut u64, _flags: c_uint, device: c_int) -> Code {
    answer(|| give(out, with(|program| program.create_context(device))?))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Code {
    // A context that was ended says so.
    answer(|| with(|program| program.memory_info().map(drop)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    answer(|| {
        let (has, of) = with(Program::memory_info)?;
        give(free, has as usize)?;
        give(total, of as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(out: *mut u64, bytes: usize) -> Code {
    answer(|| give(out, with(|program| program.allocate(bytes as u64))?))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> Code {
    answer(|| with(|program| program.free(address)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(out: *mut u8, from: u64, bytes: usize) -> Code {
    answer(|| {
        let content = with(|program| program.read(from, bytes))?;
        if out.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: the caller's buffer has `bytes` bytes, which is what was read.
        unsafe { out.copy_from_nonoverlapping(content.as_ptr(), bytes) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(out: *mut u64, image: *const c_char) -> Code {
    answer(|| give(out, with(|program| program.load(text(image)?))?))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(out: *mut u64, module: u64, name: *const c_char) -> Code {
    answer(|| give(out, with(|program| program.function(module, text(name)?))?))
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "CUDA's signature")]
extern "C" fn cuLaunchKernel(
    function: u64,
    blocks_x: c_uint,
    blocks_y: c_uint,
    blocks_z: c_uint,
    _threads_x: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared: c_uint,
    _stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Code {
    answer(|| {
        if parameters.is_null() {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: not null, so by CUDA's contract one pointer for each parameter; the kernel has one, an address.
        let address = unsafe { parameters.read().cast::<u64>().read_unaligned() };
        with(|program| program.launch(function, u64::from(blocks_x * blocks_y * blocks_z), address))
    })
}
