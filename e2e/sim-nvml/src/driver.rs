//! The loaded library: which node it belongs to, whether it is initialised, and what every call goes through.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kerf_sim::fault::{Action, When};
use kerf_sim::kernel::protocol::{self, Answer, Connection, Outcome, Request, Use};
use kerf_sim::model::Mig;
use kerf_sim::procs::Clients;
use kerf_sim::state::{ComputeInstance, Gpu, GpuInstance, State};
use kerf_sim::{Model, NvmlError, Store, canonical_call};

use crate::ffi::{Device, DeviceHandle};

pub(crate) type Result<T> = std::result::Result<T, NvmlError>;

/// What `nvmlInit` has set up.
struct Loaded {
    store: Option<Arc<Store>>,
    /// Calls of `nvmlInit` not yet met by `nvmlShutdown`.
    references: u32,
    /// The clients found last, for queries in quick succession.
    clients: Option<(Instant, Arc<Clients>)>,
}

static LOADED: Mutex<Loaded> = Mutex::new(Loaded { store: None, references: 0, clients: None });

/// A query for every MIG device of a node in turn should look through `/proc` once, not 56 times.
const CLIENTS_FRESH: Duration = Duration::from_millis(50);

fn loaded() -> MutexGuard<'static, Loaded> {
    LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One NVML call: the node, and its state when the call began.
pub(crate) struct Call {
    pub(crate) store: Arc<Store>,
    pub(crate) state: Arc<State>,
}

/// Runs an NVML function: UNINITIALIZED without `nvmlInit`, then delays and faults, then `body`.
pub(crate) fn call(name: &'static str, gpu: Option<usize>, body: impl FnOnce(&Call) -> Result<()>) -> u32 {
    let store = {
        let loaded = loaded();
        if loaded.references == 0 { None } else { loaded.store.clone() }
    };
    let Some(store) = store else { return NvmlError::Uninitialized.code() };
    code(catch_unwind(AssertUnwindSafe(|| run(name, gpu, store, body))).unwrap_or(Err(NvmlError::Unknown)))
}

fn code(result: Result<()>) -> u32 {
    result.map_or_else(NvmlError::code, |()| 0)
}

/// The part of a call that `nvmlInit` has as well.
fn run(
    name: &'static str,
    gpu: Option<usize>,
    store: Arc<Store>,
    body: impl FnOnce(&Call) -> Result<()>,
) -> Result<()> {
    let state = store.read()?;
    let function = canonical_call(name);
    if let Some(delay) = state.delays.iter().find(|delay| delay.call == function) {
        std::thread::sleep(Duration::from_millis(delay.millis));
    }
    let result = meet_fault(&store, function, gpu, When::Before).and_then(|()| {
        // The delay may have let another process change the node.
        body(&Call { state: store.read()?, store: store.clone() })?;
        meet_fault(&store, function, gpu, When::After)
    });
    if state.options.log_calls {
        let gpu = gpu.map_or("-".to_owned(), |gpu| gpu.to_string());
        store.log_call(&format!("{} {name} {gpu} {}", std::process::id(), code(result)));
    }
    result
}

/// Applies the fault, if any, that waits for this call.
fn meet_fault(store: &Store, function: &str, gpu: Option<usize>, when: When) -> Result<()> {
    match take_fault(store, function, gpu, when, |action| !matches!(action, Action::Activation(_)))? {
        Some(Action::Fail(error)) => Err(error),
        Some(Action::Kill) => {
            // SAFETY: raise has no preconditions.
            unsafe { libc::raise(libc::SIGKILL) };
            Err(NvmlError::Unknown)
        }
        Some(Action::Activation(_)) | None => Ok(()),
    }
}

/// The activation status that a fault wants of this `nvmlDeviceSetMigMode`.
pub(crate) fn activation_fault(store: &Store, gpu: usize) -> Result<Option<NvmlError>> {
    let wanted = |action: Action| matches!(action, Action::Activation(_));
    match take_fault(store, "nvmlDeviceSetMigMode", Some(gpu), When::Before, wanted)? {
        Some(Action::Activation(error)) => Ok(Some(error)),
        _ => Ok(None),
    }
}

fn take_fault(
    store: &Store,
    function: &str,
    gpu: Option<usize>,
    when: When,
    wanted: impl Fn(Action) -> bool,
) -> Result<Option<Action>> {
    let state = store.read()?;
    if state.faults.is_empty() {
        return Ok(None);
    }
    let process = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let find = |state: &State| state.fault_index(function, gpu, when, process.trim(), &wanted);
    let Some(index) = find(&state) else { return Ok(None) };
    let fault = &state.faults[index];
    if fault.left.is_none() && fault.skip == 0 {
        // Nothing to count: no need to write.
        return Ok(Some(fault.action));
    }
    // Another process may have been struck instead since the state was read.
    store.write(|state| Ok::<_, NvmlError>(find(state).and_then(|index| state.strike(index))))
}

/// `nvmlInit` in all its forms.
pub(crate) fn init(name: &'static str) -> u32 {
    let result = catch_unwind(|| {
        let mut loaded = loaded();
        let store = match &loaded.store {
            Some(store) => store.clone(),
            None => Arc::new(open()?),
        };
        run(name, None, store.clone(), |call| {
            if !call.state.driver.loaded {
                return Err(NvmlError::DriverNotLoaded);
            }
            // Without the right to write, things stay as a killed process left them.
            let _ = call.store.heal_if_needed();
            Ok(())
        })?;
        loaded.store = Some(store);
        loaded.references += 1;
        Ok(())
    });
    code(result.unwrap_or(Err(NvmlError::Unknown)))
}

/// `nvmlShutdown`.
pub(crate) fn shutdown() -> u32 {
    let mut loaded = loaded();
    if loaded.references == 0 {
        return NvmlError::Uninitialized.code();
    }
    loaded.references -= 1;
    if loaded.references == 0 {
        // The next nvmlInit opens anew, as it may find another driver.
        loaded.store = None;
        loaded.clients = None;
    }
    0
}

fn open() -> Result<Store> {
    let root = own_root().or_else(|| std::env::var_os("KERF_SIM_ROOT").map(PathBuf::from));
    root.and_then(|root| Store::open(&root).ok()).ok_or(NvmlError::DriverNotLoaded)
}

/// The driver root in which this library lies.
fn own_root() -> Option<PathBuf> {
    let path = kerf_sim::library_of(own_root as *const ())?;
    path.ancestors().find(|folder| folder.join(kerf_sim::STATE_FILE).exists()).map(Path::to_owned)
}

impl Call {
    /// A GPU: INVALID_ARGUMENT if there is none, GPU_IS_LOST if it has fallen off the bus.
    pub(crate) fn gpu(&self, index: usize) -> Result<&Gpu> {
        let gpu = self.state.gpus.get(index).ok_or(NvmlError::InvalidArgument)?;
        if gpu.lost { Err(NvmlError::GpuIsLost) } else { Ok(gpu) }
    }

    /// The GPU of a handle, and the instances if it is a MIG device's.
    pub(crate) fn device(&self, handle: DeviceHandle) -> Result<Target<'_>> {
        let device = handle.device()?;
        let (index, ids) = match device {
            Device::Gpu { gpu } => (gpu, None),
            Device::Mig { gpu, gi, ci } => (gpu, Some((gi, ci))),
        };
        let gpu = self.gpu(index)?;
        let mig = match ids {
            None => None,
            Some((gi, ci)) => {
                let instance = gpu.instance(gi).ok_or(NvmlError::InvalidArgument)?;
                Some((instance, instance.compute_instance(ci).ok_or(NvmlError::InvalidArgument)?))
            }
        };
        Ok(Target { index, gpu, model: self.model(gpu)?, mig })
    }

    /// A handle that must be a GPU's; INVALID_ARGUMENT for a MIG device's.
    pub(crate) fn whole(&self, handle: DeviceHandle) -> Result<Target<'_>> {
        let target = self.device(handle)?;
        if target.mig.is_some() { Err(NvmlError::InvalidArgument) } else { Ok(target) }
    }

    /// The model of a GPU.
    pub(crate) fn model(&self, gpu: &Gpu) -> Result<&Model> {
        Ok(self.store.model(&gpu.model)?)
    }

    /// Root, or whoever may read the capability `mig/config`: NO_PERMISSION for others.
    pub(crate) fn privileged(&self) -> Result<()> {
        let path = self.store.root().join("proc/driver/nvidia/capabilities/mig/config");
        if is_root() || std::fs::File::open(path).is_ok() { Ok(()) } else { Err(NvmlError::NoPermission) }
    }

    /// Root only.
    pub(crate) fn root(&self) -> Result<()> {
        if is_root() { Ok(()) } else { Err(NvmlError::NoPermission) }
    }

    /// Who uses what now.
    pub(crate) fn clients(&self) -> Clients {
        Clients::scan(self.store.root(), self.state.pid_namespace)
    }

    /// Asks the node's kernel driver; `None` if none runs.
    pub(crate) fn kernel(&self, request: &Request) -> Option<Answer> {
        let mut connection = Connection::open(&protocol::socket(self.store.root())).ok()?;
        connection.ask::<Outcome>(request).ok()?.ok()
    }

    /// Who uses how much memory; `None` if no kernel driver runs.
    pub(crate) fn uses(&self) -> Option<Vec<Use>> {
        match self.kernel(&Request::Usage)? {
            Answer::Usage(uses) => Some(uses),
            _ => None,
        }
    }

    /// Who uses what, at most [`CLIENTS_FRESH`] old.
    pub(crate) fn recent_clients(&self) -> Arc<Clients> {
        if let Some((when, clients)) = &loaded().clients
            && when.elapsed() < CLIENTS_FRESH
        {
            return clients.clone();
        }
        let clients = Arc::new(self.clients());
        loaded().clients = Some((Instant::now(), clients.clone()));
        clients
    }
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// What a device handle refers to.
pub(crate) struct Target<'a> {
    /// NVML index of the GPU.
    pub(crate) index: usize,
    pub(crate) gpu: &'a Gpu,
    pub(crate) model: &'a Model,
    /// The instances, if the handle is a MIG device's.
    pub(crate) mig: Option<(&'a GpuInstance, &'a ComputeInstance)>,
}

impl<'a> Target<'a> {
    /// NOT_SUPPORTED for a GPU that cannot be cut.
    pub(crate) fn can_mig(&self) -> Result<&'a Mig> {
        self.model.mig.as_ref().ok_or(NvmlError::NotSupported)
    }

    /// NOT_SUPPORTED unless the GPU is in MIG mode.
    pub(crate) fn in_mig_mode(&self) -> Result<&'a Mig> {
        let mig = self.can_mig()?;
        if self.gpu.mig_current { Ok(mig) } else { Err(NvmlError::NotSupported) }
    }
}
