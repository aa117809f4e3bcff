//! The simulated kernel driver of a node: what a real one does for programs that open its device nodes. It keeps the
//! contexts and the memory of processes for as long as they are connected, refuses what the GPU, its compute mode or
//! a cgroup's limit does not allow, and tells NVML who uses how much.
//!
//! It is a thread of the process that simulates the node ([`crate::SimNode::run_kernel`]), listening in the driver
//! root. It knows its clients by the socket's credentials, so it must see their process ids: it belongs into the PID
//! namespace of the host or of the node. Without it NVML works as it does, and programs of CUDA find no driver.

mod accounts;
pub mod cgroups;
pub mod protocol;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use self::accounts::{Accounts, Asker, Surroundings, shown};
use self::protocol::{Answer, Connection, CudaError, Device, DeviceId, FaultAction, Outcome, Request, Use};
use crate::caps::Capability;
use crate::fault::{Action, When};
use crate::state::{Gpu, MemoryAccounting, MemoryLimit, State};
use crate::{Error, Model, NvmlError, Store, mps, procs};

const MIB: u64 = 1 << 20;

/// The step whose fault lets limits of cgroups be set and read, and not enforced.
const LIMITS: &str = "memory-limits";

/// The kernels that run in this process, by driver root.
static RUNNING: Mutex<BTreeMap<PathBuf, Arc<Kernel>>> = Mutex::new(BTreeMap::new());

/// The driver of one node.
#[derive(Debug)]
struct Kernel {
    store: Arc<Store>,
    accounts: Mutex<Accounts>,
    /// Of every open connection, so that the end of the kernel ends them.
    connections: Mutex<BTreeMap<u64, UnixStream>>,
    next: AtomicU64,
    stopped: AtomicBool,
}

/// Starts the kernel of a node, in place of one that runs in this process.
pub(crate) fn run(store: Arc<Store>) -> Result<(), Error> {
    let root = store.root().to_owned();
    stop(&root);
    let path = protocol::socket(&root);
    let folder = path.parent().unwrap_or(&root);
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io("remove", &path, error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&path).map_err(|e| Error::io("listen on", &path, e))?;
    // Every user may use GPUs.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))
        .map_err(|e| Error::io("set the mode of", &path, e))?;
    let kernel = Arc::new(Kernel {
        store,
        accounts: Mutex::default(),
        connections: Mutex::default(),
        next: AtomicU64::new(1),
        stopped: AtomicBool::new(false),
    });
    lock(&RUNNING).insert(root, kernel.clone());
    std::thread::spawn(move || kernel.listen(&listener));
    Ok(())
}

/// Ends the kernel of a node, and with it every context.
pub(crate) fn stop(root: &Path) {
    let Some(kernel) = lock(&RUNNING).remove(root) else { return };
    kernel.stopped.store(true, Ordering::SeqCst);
    for stream in lock(&kernel.connections).values() {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    // Wakes the listener, which finds that it is to end.
    let _ = UnixStream::connect(protocol::socket(root));
    let _ = std::fs::remove_file(protocol::socket(root));
}

/// `nvmlDeviceSetMemoryLimits_v1` on the GPU at this index, for the cgroup of this directory: OPERATING_SYSTEM if it
/// cannot be opened, NOT_FOUND with dmem if it has no files of the controller, which here every cgroup has.
pub fn set_memory_limits(
    store: &Store,
    gpu: usize,
    path: &str,
    soft: u64,
    hard: u64,
) -> Result<(), NvmlError> {
    let folder = Path::new(path);
    let cgroup = cgroups::id(folder).map_err(|_| NvmlError::OperatingSystem)?;
    let above = cgroups::above(folder);
    let above = above.iter().filter_map(|path| Some((cgroups::id(path).ok()?, path.display().to_string())));
    let above: Vec<_> = above.collect();
    store.write(|state| {
        if state.options.memory_accounting == MemoryAccounting::Dmem && !cgroups::is_cgroup(folder) {
            return Err(NvmlError::NotFound);
        }
        let target = state.gpus.get(gpu).ok_or(NvmlError::InvalidArgument)?;
        let model = store.model(&target.model)?;
        state.set_memory_limits(model, gpu, (cgroup, path.to_owned()), above, soft, hard)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Kernel {
    fn listen(self: &Arc<Kernel>, listener: &UnixListener) {
        for stream in listener.incoming() {
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            let Ok(stream) = stream else { continue };
            let kernel = self.clone();
            std::thread::spawn(move || kernel.serve(stream));
        }
    }

    fn serve(&self, stream: UnixStream) {
        let Ok(peer) = protocol::peer(&stream) else { return };
        let Ok(pid) = u32::try_from(peer.pid) else { return };
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        if let Ok(copy) = stream.try_clone() {
            lock(&self.connections).insert(number, copy);
        }
        let mut client = Client { number, pid, ticket: None };
        let mut connection = Connection::from(stream);
        while !self.stopped.load(Ordering::SeqCst)
            && let Ok(Some(request)) = connection.receive()
        {
            let outcome = self.answer(&mut client, request);
            if connection.send(&outcome).is_err() {
                break;
            }
        }
        lock(&self.accounts).close(number, client.ticket.as_deref());
        lock(&self.connections).remove(&number);
    }

    fn answer(&self, client: &mut Client, request: Request) -> Outcome {
        let state = self.store.read().map_err(|_| CudaError::Unknown)?;
        if let Some(ticket) = &client.ticket
            && let Some(error) = lock(&self.accounts).ended(ticket)
        {
            return Err(error);
        }
        match request {
            Request::Devices { gpus, capabilities } => {
                Ok(Answer::Devices(self.devices(&state, &gpus, &capabilities)?))
            }
            Request::Version => Ok(Answer::Version(state.driver.version.clone())),
            Request::Context { device, ticket, connections } => {
                client.ticket = client.ticket.take().or_else(|| ticket.clone());
                let asker = client.asker();
                self.around(&state, device, |around| {
                    lock(&self.accounts).open(&asker, device, ticket, connections, around)
                })
                .map(Answer::Context)
            }
            Request::Allocate { context, bytes } => {
                let asker = client.asker();
                self.around(&state, self.device_of(client, context)?, |around| {
                    lock(&self.accounts).allocate(&asker, context, bytes, around)
                })
                .map(|()| Answer::Done)
            }
            Request::Free { context, bytes } => {
                lock(&self.accounts).free(&client.asker(), context, bytes).map(|()| Answer::Done)
            }
            Request::MemoryInfo { context } => {
                let asker = client.asker();
                self.around(&state, self.device_of(client, context)?, |around| {
                    lock(&self.accounts).memory_info(&asker, context, around)
                })
                .map(|(free, total)| Answer::Memory { free, total })
            }
            Request::Admit => {
                let ticket = format!("{}-{}", client.number, self.next.fetch_add(1, Ordering::SeqCst));
                // Nobody is to guess it.
                let ticket = crate::uuid::derived(&random(), &ticket);
                lock(&self.accounts).admit(client.number, ticket.clone());
                Ok(Answer::Ticket(ticket))
            }
            Request::Revoke { ticket, error } => {
                lock(&self.accounts).revoke(client.number, &ticket, error);
                Ok(Answer::Done)
            }
            Request::Evict { device, ticket } => self
                .around(&state, device, |around| {
                    Ok(lock(&self.accounts).evict(client.number, device, &ticket, around))
                })
                .map(Answer::Evicted),
            Request::Fault { step } => Ok(Answer::Fault(self.fault(&state, client.pid, &step))),
            Request::Usage => Ok(Answer::Usage(self.usage(client.pid))),
            Request::CgroupUsage { gpu, cgroup } => self
                .around(&state, DeviceId { gpu, mig: None }, |around| {
                    Ok(lock(&self.accounts).used_by(gpu, cgroup, around))
                })
                .map(Answer::Bytes),
            Request::OwnLimit { gpu } => self
                .around(&state, DeviceId { gpu, mig: None }, |around| {
                    let accounts = lock(&self.accounts);
                    let limit = shown(&cgroups::of_process(client.pid), around);
                    Ok(limit.map(|limit| (limit.hard, accounts.used_by(gpu, limit.cgroup, around))))
                })
                .map(Answer::Limit),
        }
    }

    fn device_of(&self, client: &Client, context: u64) -> Result<DeviceId, CudaError> {
        lock(&self.accounts).device_of(client.number, context)
    }

    /// Calls `then` with what is known of a device now.
    fn around<T>(
        &self,
        state: &State,
        device: DeviceId,
        then: impl FnOnce(&Surroundings<'_>) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let index = state.gpu_of_minor(device.gpu).ok_or(CudaError::InvalidDevice)?;
        let gpu = &state.gpus[index];
        let model = self.store.model(&gpu.model).map_err(|_| CudaError::Unknown)?;
        if gpu.lost || !state.driver.loaded {
            return Err(CudaError::Unknown);
        }
        let (total, usable) = memory(gpu, model, device).ok_or(CudaError::InvalidDevice)?;
        // MIG is not supported: limits do not reach into instances. And a driver may keep limits without holding to them.
        let ignored = state.faults.iter().any(|fault| fault.call == LIMITS);
        let none = gpu.mig_current || device.mig.is_some() || ignored;
        let limits: Vec<&MemoryLimit> =
            state.memory_limits.iter().filter(|limit| !none && limit.gpu == index).collect();
        then(&Surroundings {
            usable,
            total,
            compute_mode: if device.mig.is_some() { 0 } else { gpu.compute_mode },
            connections: mps::connections(
                state.driver.branch(),
                model.compute_capability[0],
                compute_slices(gpu, model, device),
            ),
            accounting: state.options.memory_accounting,
            limits: &limits,
        })
    }

    /// What CUDA enumerates for a program that sees these nodes: GPUs in the order of their PCI addresses, those in
    /// MIG mode by their devices.
    fn devices(&self, state: &State, minors: &[u32], capabilities: &[u32]) -> Result<Vec<Device>, CudaError> {
        let capabilities: Vec<Capability> =
            capabilities.iter().filter_map(|minor| Capability::of_minor(*minor)).collect();
        let mut devices = Vec::new();
        for gpu in state.gpus.iter().filter(|gpu| minors.contains(&gpu.minor) && !gpu.lost) {
            let model = self.store.model(&gpu.model).map_err(|_| CudaError::Unknown)?;
            let device = |mig, uuid: &str, name, sms| Device {
                id: DeviceId { gpu: gpu.minor, mig },
                uuid: uuid.to_owned(),
                name,
                pci: gpu.pci.id(),
                sms,
                capability: model.compute_capability[0],
            };
            if !gpu.mig_current {
                devices.push(device(None, &gpu.uuid, model.product.clone(), model.sm_total));
                continue;
            }
            for (gi, ci) in gpu.mig_devices() {
                let sees = [
                    Capability::GpuInstance { gpu: gpu.minor, gi: gi.id },
                    Capability::ComputeInstance { gpu: gpu.minor, gi: gi.id, ci: ci.id },
                ];
                let profile = model.mig.as_ref().and_then(|mig| mig.profile(gi.profile));
                let compute = profile.and_then(|profile| profile.compute_profile(ci.profile));
                if let Some(compute) = compute
                    && sees.iter().all(|needed| capabilities.contains(needed))
                {
                    let name = format!("{} MIG {}", model.product, compute.name);
                    devices.push(device(Some((gi.id, ci.id)), &ci.uuid, name, compute.sm));
                }
            }
        }
        Ok(devices)
    }

    fn fault(&self, state: &State, pid: u32, step: &str) -> Option<FaultAction> {
        if let Some(delay) = state.delays.iter().find(|delay| delay.call == step) {
            std::thread::sleep(Duration::from_millis(delay.millis));
        }
        let process = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let find = |state: &State| state.fault_index(step, None, When::Before, process.trim(), |_| true);
        find(state)?;
        let strike = |state: &mut State| Ok::<_, Error>(find(state).and_then(|index| state.strike(index)));
        Some(match self.store.write(strike).ok()?? {
            Action::Kill => FaultAction::Kill,
            Action::Fail(_) | Action::Activation(_) => FaultAction::Fail,
        })
    }

    /// Processes that the asker can see, by the numbers that it knows them by.
    fn usage(&self, asker: u32) -> Vec<Use> {
        let uses = lock(&self.accounts).uses();
        uses.into_iter()
            .filter_map(|usage| Some(Use { pid: procs::pid_seen_by(asker, usage.pid)?, ..usage }))
            .collect()
    }
}

/// A program that is connected.
#[derive(Debug)]
struct Client {
    number: u64,
    pid: u32,
    /// It is a client of an MPS server.
    ticket: Option<String>,
}

impl Client {
    fn asker(&self) -> Asker {
        Asker { connection: self.number, pid: self.pid, cgroups: cgroups::of_process(self.pid) }
    }
}

/// Total and usable bytes of a device; `None` if there is no such device.
fn memory(gpu: &Gpu, model: &Model, device: DeviceId) -> Option<(u64, u64)> {
    let Some((gi, ci)) = device.mig else {
        return (!gpu.mig_current).then(|| (model.memory_total_mib * MIB, model.usable_mib() * MIB));
    };
    let instance = gpu.instance(gi)?;
    instance.compute_instance(ci)?;
    let bytes = model.mig.as_ref()?.profile(instance.profile)?.memory_mib * MIB;
    Some((bytes, bytes))
}

/// How many compute slices a device has, of how many.
fn compute_slices(gpu: &Gpu, model: &Model, device: DeviceId) -> (u32, u32) {
    let of_instance = || {
        let (gi, ci) = device.mig?;
        let (instance, mig) = (gpu.instance(gi)?, model.mig.as_ref()?);
        let profile = instance.compute_instance(ci)?.profile;
        Some((mig.profile(instance.profile)?.compute_profile(profile)?.slices, mig.compute_slices))
    };
    of_instance().unwrap_or((1, 1))
}

/// Something that no two calls have in common.
fn random() -> String {
    let mut bytes = [0; 16];
    let read = std::fs::File::open("/dev/urandom")
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut bytes));
    match read {
        Ok(()) => format!("{bytes:?}"),
        Err(_) => format!("{:?}", std::time::SystemTime::now()),
    }
}
