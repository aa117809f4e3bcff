//! The boundary to `libcuda.so.1`, and the only `unsafe`: the driver API, loaded by name as every CUDA program does.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

use serde::{Deserialize, Serialize};

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSOR_COUNT: c_uint = 16;

/// CUDA's error for memory that is not there, or not allowed.
pub const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub call: String,
    /// CUDA's name of the error, such as `CUDA_ERROR_OUT_OF_MEMORY`; for what is not CUDA's, a sentence.
    pub error: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.call, self.error)
    }
}

type Result<T> = std::result::Result<T, Failure>;

/// The library, initialised, with its first device.
#[derive(Debug)]
pub struct Cuda {
    library: libloading::Library,
    device: c_int,
}

/// Calls a function of the library by its name and signature in cuda.h.
macro_rules! call {
    ($cuda:expr, $name:literal ( $($argument:expr => $type:ty),* )) => {{
        // SAFETY: the symbol is looked up under its own name, so it has the signature of cuda.h. Pointers are to live
        // local values, or to buffers of the stated length.
        unsafe {
            match $cuda.library.get::<unsafe extern "C" fn($($type),*) -> c_uint>($name.as_bytes()) {
                Ok(function) => match function($($argument),*) {
                    0 => Ok(()),
                    code => Err(Failure { call: $name.to_owned(), error: $cuda.name_of(code) }),
                },
                Err(error) => Err(Failure { call: $name.to_owned(), error: error.to_string() }),
            }
        }
    }};
}

impl Cuda {
    /// Loads and initialises the library, and takes the first device. There is no context yet.
    pub fn init(library: &Path) -> Result<Self> {
        // SAFETY: the driver's library is made to be loaded; its initialisers have no preconditions.
        let library = unsafe { libloading::Library::new(library) }
            .map_err(|error| Failure { call: "dlopen".into(), error: error.to_string() })?;
        let mut cuda = Self { library, device: 0 };
        call!(cuda, "cuInit"(0 => c_uint))?;
        let mut device = 0;
        call!(cuda, "cuDeviceGet"(&raw mut device => *mut c_int, 0 => c_int))?;
        cuda.device = device;
        Ok(cuda)
    }

    fn name_of(&self, code: c_uint) -> String {
        let mut name: *const c_char = null();
        // SAFETY: as in `call`; what comes back is null or a string of the library's, which stays loaded.
        unsafe {
            type Function = unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint;
            match self.library.get::<Function>(b"cuGetErrorName") {
                Ok(function) if function(code, &raw mut name) == 0 && !name.is_null() => {
                    CStr::from_ptr(name).to_string_lossy().into_owned()
                }
                _ => format!("error {code}"),
            }
        }
    }

    pub fn name(&self) -> Result<String> {
        let mut name = [0 as c_char; 128];
        let length = c_int::try_from(name.len()).unwrap_or(c_int::MAX);
        call!(self, "cuDeviceGetName"(name.as_mut_ptr() => *mut c_char, length => c_int, self.device => c_int))?;
        let bytes: Vec<u8> =
            name.iter().map(|char| char.cast_unsigned()).take_while(|byte| *byte != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Multiprocessors that the device says it has: under MPS, those that this program may use.
    pub fn multiprocessors(&self) -> Result<u32> {
        let mut count = 0;
        call!(self, "cuDeviceGetAttribute"(
            &raw mut count => *mut c_int, MULTIPROCESSOR_COUNT => c_uint, self.device => c_int
        ))?;
        Ok(count.unsigned_abs())
    }

    /// Makes a context, which is this thread's from now on. It ends with the process.
    pub fn create_context(&self) -> Result<()> {
        let mut context: *mut c_void = null_mut();
        call!(self, "cuCtxCreate_v2"(&raw mut context => *mut *mut c_void, 0 => c_uint, self.device => c_int))
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0usize, 0usize);
        call!(self, "cuMemGetInfo_v2"(&raw mut free => *mut usize, &raw mut total => *mut usize))?;
        Ok((free as u64, total as u64))
    }

    /// Allocates bytes; returns their address.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        call!(self, "cuMemAlloc_v2"(&raw mut address => *mut u64, bytes => usize))?;
        Ok(address)
    }

    /// Frees what was allocated at an address.
    pub fn free(&self, address: u64) -> Result<()> {
        call!(self, "cuMemFree_v2"(address => u64))
    }

    /// Runs a kernel that keeps all multiprocessors busy that it gets, and returns on which each of its blocks ran.
    pub fn where_blocks_run(&self, blocks: u16) -> Result<Vec<u32>> {
        const THREADS: c_uint = 1024;
        let text = |text: &str| {
            CString::new(text).map_err(|error| Failure { call: "kernel".into(), error: error.to_string() })
        };
        let (ptx, entry) = (text(include_str!("where.ptx"))?, text("where_it_runs")?);
        let (mut module, mut function): (*mut c_void, *mut c_void) = (null_mut(), null_mut());
        call!(self, "cuModuleLoadData"(&raw mut module => *mut *mut c_void, ptx.as_ptr() => *const c_char))?;
        call!(self, "cuModuleGetFunction"(
            &raw mut function => *mut *mut c_void, module => *mut c_void, entry.as_ptr() => *const c_char
        ))?;
        let mut found = vec![u32::MAX; usize::from(blocks)];
        let bytes = size_of_val(found.as_slice());
        let mut address = self.allocate(bytes)?;
        let mut parameters: [*mut c_void; 1] = [(&raw mut address).cast()];
        call!(self, "cuLaunchKernel"(
            function => *mut c_void,
            c_uint::from(blocks) => c_uint, 1 => c_uint, 1 => c_uint,
            THREADS => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, null_mut() => *mut c_void,
            parameters.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void
        ))?;
        call!(self, "cuCtxSynchronize"())?;
        call!(self, "cuMemcpyDtoH_v2"(
            found.as_mut_ptr().cast() => *mut c_void, address => u64, bytes => usize
        ))?;
        self.free(address)?;
        Ok(found)
    }
}
