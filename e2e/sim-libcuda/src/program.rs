//! What the library keeps for the program that has loaded it: one context, allocations, modules.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::sync::Mutex;

use kerf_sim::cuda::{Cuda, Place, Usable};
use kerf_sim::kernel::protocol::CudaError;

pub(crate) type Result<T> = std::result::Result<T, CudaError>;

static PROGRAM: Mutex<Option<Program>> = Mutex::new(None);

/// Names that were given out: they are the caller's for ever.
static NAMES: Mutex<BTreeMap<&'static str, CString>> = Mutex::new(BTreeMap::new());

/// Where device addresses begin. They mean nothing but themselves.
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;

#[derive(Debug)]
pub(crate) struct Program {
    cuda: Cuda,
    /// The device of the current context. The real library has one for each thread.
    current: Option<usize>,
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
    modules: Vec<String>,
}

#[derive(Debug)]
struct Allocation {
    device: usize,
    bytes: u64,
    /// What a kernel has written from its beginning on.
    content: Vec<u8>,
}

/// Calls something of an initialised program; CUDA_ERROR_NOT_INITIALIZED without `cuInit`.
pub(crate) fn with<T>(call: impl FnOnce(&mut Program) -> Result<T>) -> Result<T> {
    let mut program = PROGRAM.lock().map_err(|_| CudaError::Unknown)?;
    call(program.as_mut().ok_or(CudaError::NotInitialized)?)
}

/// A name as a C string that stays.
pub(crate) fn c_name(name: &'static str) -> *const c_char {
    let mut names = NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    names.entry(name).or_insert_with(|| CString::new(name).unwrap_or_default()).as_ptr()
}

impl Program {
    /// `cuInit`: again, it does nothing.
    pub(crate) fn init() -> Result<()> {
        let mut program = PROGRAM.lock().map_err(|_| CudaError::Unknown)?;
        if program.is_none() {
            let place = Place::of(kerf_sim::library_of(Program::init as *const ()).as_deref());
            *program = Some(Program {
                cuda: Cuda::init(&place)?,
                current: None,
                allocations: BTreeMap::new(),
                next: FIRST_ADDRESS,
                modules: Vec::new(),
            });
        }
        Ok(())
    }

    pub(crate) fn device(&self, ordinal: c_int) -> Result<&Usable> {
        let index = usize::try_from(ordinal).map_err(|_| CudaError::InvalidDevice)?;
        self.cuda.devices().get(index).ok_or(CudaError::InvalidDevice)
    }

    pub(crate) fn create_context(&mut self, ordinal: c_int) -> Result<u64> {
        self.device(ordinal)?;
        let device = usize::try_from(ordinal).map_err(|_| CudaError::InvalidDevice)?;
        let context = self.cuda.context(device)?;
        self.current = Some(device);
        Ok(context)
    }

    fn current(&self) -> Result<usize> {
        self.current.ok_or(CudaError::InvalidContext)
    }

    pub(crate) fn memory_info(&mut self) -> Result<(u64, u64)> {
        let device = self.current()?;
        self.cuda.memory_info(device)
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64> {
        let device = self.current()?;
        if bytes == 0 {
            return Err(CudaError::InvalidValue);
        }
        self.cuda.allocate(device, bytes)?;
        let address = self.next;
        self.next += bytes.next_multiple_of(512);
        self.allocations.insert(address, Allocation { device, bytes, content: Vec::new() });
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<()> {
        let gone = self.allocations.remove(&address).ok_or(CudaError::InvalidValue)?;
        self.cuda.free(gone.device, gone.bytes)
    }

    pub(crate) fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>> {
        let allocation = self.allocations.get(&address).ok_or(CudaError::InvalidValue)?;
        if bytes as u64 > allocation.bytes {
            return Err(CudaError::InvalidValue);
        }
        let mut content = allocation.content.clone();
        content.resize(bytes, 0);
        Ok(content)
    }

    /// Modules are PTX; what is not the kind of kernel that can be played is refused as PTX that cannot be compiled.
    pub(crate) fn load(&mut self, ptx: &str) -> Result<u64> {
        self.current()?;
        if !(ptx.contains(".version") && ptx.contains("%smid")) {
            return Err(CudaError::InvalidPtx);
        }
        self.modules.push(ptx.to_owned());
        Ok(self.modules.len() as u64)
    }

    /// A function is known by its module: there is one in each.
    pub(crate) fn function(&self, module: u64, name: &str) -> Result<u64> {
        let ptx = module.checked_sub(1).and_then(|index| self.modules.get(usize::try_from(index).ok()?));
        let ptx = ptx.ok_or(CudaError::InvalidHandle)?;
        if ptx.contains(&format!(".entry {name}(")) { Ok(module) } else { Err(CudaError::NotFound) }
    }

    pub(crate) fn launch(&mut self, function: u64, blocks: u64, address: u64) -> Result<()> {
        let device = self.current()?;
        if function == 0 || function > self.modules.len() as u64 {
            return Err(CudaError::InvalidHandle);
        }
        let multiprocessors = u64::from(self.cuda.devices()[device].sms.max(1));
        // Whoever was ended hears of it.
        self.cuda.memory_info(device)?;
        let out = self.allocations.get_mut(&address).ok_or(CudaError::InvalidValue)?;
        if blocks * 4 > out.bytes {
            return Err(CudaError::LaunchFailed);
        }
        let runs_on = |block: u64| ((block % multiprocessors) as u32).to_ne_bytes();
        out.content = (0..blocks).flat_map(runs_on).collect();
        Ok(())
    }
}
