//! The handle by which tests and harnesses make a simulated node and act on it from outside, as the world does
//! on hardware: reboots, faults, foreign clients, broken boards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::fault::{Action, Fault, Occurrence, When, canonical_call};
use crate::procs::{Client, Clients};
use crate::state::{
    CapNodes, Counts, Delay, EVENT_XID, Gpu, Hold, MemoryAccounting, MigUuids, Options, Pci, State,
};
use crate::{Error, Model, NvmlError, Store, caps, kernel, tree, uuid};

/// Of the XIDs after which a GPU must be reset, those that every driver knows: double-bit ECC error, off the bus,
/// uncontained ECC error, GSP timeout.
const RESET_XIDS: [u64; 4] = [48, 79, 95, 119];

pub use crate::state::Driver;

/// What a new node consists of.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    /// UUIDs and serial numbers that the GPUs leave open derive from it: two nodes of one cluster need two
    /// names.
    pub name: String,
    pub gpus: Vec<GpuSpec>,
    pub driver: Driver,
    pub cap_nodes: CapNodes,
    pub mig_uuids: MigUuids,
    /// Let profile names in NVML's structures begin with `MIG `.
    pub prefixed_names: bool,
    pub log_calls: bool,
    pub memory_accounting: MemoryAccounting,
    /// The built `libnvidia-ml.so.1`; found by [`nvml_library`] if `None`.
    pub library: Option<PathBuf>,
}

/// A GPU of a new node.
#[derive(Clone, Debug, Default)]
pub struct GpuSpec {
    /// Id of a model in this repository (`a100-40`), or the path of a model file (with a `/`).
    pub model: String,
    /// `GPU-…`; derived from the serial number if `None`.
    pub uuid: Option<String>,
    /// Derived from the node's name and the GPU's place if `None`.
    pub serial: Option<String>,
    pub numa: Option<u32>,
    /// Of `/dev/nvidia<minor>`; the index if `None`.
    pub minor: Option<u32>,
    /// A board that numbers its halves the other way round.
    pub half_swapped: bool,
    /// A board that cannot be reset (passed through into a virtual machine).
    pub reset_forbidden: bool,
    /// In MIG mode from the start.
    pub mig: bool,
}

impl GpuSpec {
    /// A GPU of this model with nothing special about it.
    pub fn new(model: &str) -> GpuSpec {
        GpuSpec { model: model.to_owned(), ..GpuSpec::default() }
    }

    /// The same, in MIG mode from the start.
    pub fn in_mig_mode(self) -> GpuSpec {
        GpuSpec { mig: true, ..self }
    }
}

impl NodeSpec {
    /// `count` GPUs of one model under a current driver.
    pub fn uniform(name: &str, model: &str, count: usize) -> NodeSpec {
        NodeSpec::new(name, vec![GpuSpec::new(model); count])
    }

    /// These GPUs under a current driver.
    pub fn new(name: &str, gpus: Vec<GpuSpec>) -> NodeSpec {
        NodeSpec {
            name: name.to_owned(),
            gpus,
            driver: Driver::default(),
            cap_nodes: CapNodes::AtCreation,
            mig_uuids: MigUuids::Stable,
            prefixed_names: false,
            log_calls: false,
            memory_accounting: MemoryAccounting::default(),
            library: None,
        }
    }

    /// The first state of such a node, and the models that it names: what [`SimNode::create`] writes, for those
    /// who want the rules without files.
    pub fn state(&self) -> Result<(State, BTreeMap<String, Model>), Error> {
        if self.gpus.is_empty() || self.gpus.len() > caps::MAX_GPUS as usize {
            return Err(Error::GpuCount { count: self.gpus.len(), max: caps::MAX_GPUS });
        }
        let mut models = BTreeMap::new();
        let mut gpus = Vec::new();
        for (index, gpu) in self.gpus.iter().enumerate() {
            let model = Model::named(&gpu.model)?;
            gpus.push(new_gpu(&self.name, index, gpu, &model)?);
            models.insert(model.id.clone(), model);
        }
        let state = State {
            generation: 1,
            node: self.name.clone(),
            driver: self.driver.clone(),
            options: Options {
                cap_nodes: self.cap_nodes,
                mig_uuids: self.mig_uuids,
                prefixed_names: self.prefixed_names,
                log_calls: self.log_calls,
                memory_accounting: self.memory_accounting,
            },
            gpus,
            creations: 0,
            faults: Vec::new(),
            delays: Vec::new(),
            holds: Vec::new(),
            next_hold: 1,
            pid_namespace: None,
            memory_limits: Vec::new(),
            events: Vec::new(),
            next_event: 1,
        };
        Ok((state, models))
    }
}

impl Driver {
    /// A driver of this branch, such as 615.
    pub fn of_branch(branch: u32) -> Driver {
        let cuda = match branch {
            0..580 => 12_000,
            580..590 => 13_000,
            590..615 => 13_010,
            _ => 13_040,
        };
        let version = format!("{branch}.43.02");
        Driver { nvml: format!("{}.{version}", cuda / 1000), version, cuda, loaded: true }
    }
}

impl Default for Driver {
    fn default() -> Driver {
        Driver { version: "580.95.05".into(), nvml: "13.580.95.05".into(), cuda: 13000, loaded: true }
    }
}

/// An instance as the hardware has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// NVML index.
    pub gpu: usize,
    pub gpu_uuid: String,
    /// Device minor of the GPU.
    pub gpu_minor: u32,
    /// GPU-instance id.
    pub gi: u32,
    /// Name of the GPU-instance profile.
    pub profile: String,
    /// In memory slices.
    pub start: u32,
    pub size: u32,
    /// The how-manyth creation on the node: differs from an earlier instance at the same place.
    pub nth: u64,
    /// Compute-instance id and MIG UUID of each compute instance.
    pub compute: Vec<(u32, String)>,
}

/// A simulated node.
#[derive(Clone, Debug)]
pub struct SimNode {
    store: Arc<Store>,
}

impl SimNode {
    /// Makes a node under `driver_root`, which may exist but not hold a node. Needs root (device nodes).
    pub fn create(driver_root: &Path, spec: &NodeSpec) -> Result<SimNode, Error> {
        if driver_root.join(crate::STATE_FILE).exists() {
            return Err(Error::Exists { root: driver_root.to_owned() });
        }
        let (state, models) = spec.state()?;
        let library = match &spec.library {
            Some(path) => path.clone(),
            None => nvml_library()?,
        };
        std::fs::create_dir_all(driver_root).map_err(|e| Error::io("create", driver_root, e))?;
        tree::install(driver_root, &state, |gpu| models[&gpu.model].clone(), &library)?;
        // The state comes last: a folder with a state is a complete node.
        Store::create(driver_root, &state, &models)?;
        SimNode::open(driver_root)
    }

    /// Opens the node under `driver_root`.
    pub fn open(driver_root: &Path) -> Result<SimNode, Error> {
        let store = Store::open(driver_root)?;
        store.heal_if_needed()?;
        Ok(SimNode { store: Arc::new(store) })
    }

    /// The driver root, with symbolic links resolved.
    pub fn root(&self) -> &Path {
        self.store.root()
    }

    /// The library that NVML clients load.
    pub fn library(&self) -> PathBuf {
        self.root().join(tree::LIBRARIES).join("libnvidia-ml.so.1")
    }

    /// The state as it is now.
    pub fn state(&self) -> Result<Arc<State>, Error> {
        self.store.read()
    }

    /// The model of a GPU.
    pub fn model(&self, gpu: usize) -> Result<&Model, Error> {
        let state = self.state()?;
        self.store.model(&gpu_at(&state, gpu)?.model)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, Error>) -> Result<T, Error> {
        self.store.write(change)
    }

    /// Says in which PID namespace the node's containers run ([`crate::procs::pid_namespace`] of any process in
    /// it): device nodes that a runtime made count only for processes in it or below. Several nodes on one host need
    /// this.
    pub fn set_pid_namespace(&self, namespace: Option<u64>) -> Result<(), Error> {
        self.change(|state| {
            state.pid_namespace = namespace;
            Ok(())
        })
    }

    /// Starts the kernel driver ([`kernel`]), in place of one that this process runs for the node: without it nothing
    /// can use GPUs by CUDA, and used memory is not known. It goes on until this process ends; a reboot needs a
    /// new one.
    pub fn run_kernel(&self) -> Result<(), Error> {
        kernel::run(self.store.clone())
    }

    /// Ends what [`SimNode::run_kernel`] started; programs lose their contexts.
    pub fn stop_kernel(&self) {
        kernel::stop(self.root());
    }

    /// `nvmlDeviceSetComputeMode` of a whole GPU.
    pub fn set_compute_mode(&self, gpu: usize, mode: u32) -> Result<(), Error> {
        self.change(|state| Ok(state.set_compute_mode(gpu, None, mode)?))
    }

    /// `nvmlDeviceGetComputeMode` of a whole GPU.
    pub fn compute_mode(&self, gpu: usize) -> Result<u32, Error> {
        Ok(gpu_at(&*self.state()?, gpu)?.compute_mode)
    }

    /// `nvmlDeviceSetMemoryLimits_v1` as root calls it.
    pub fn set_memory_limits(&self, gpu: usize, cgroup: &Path, soft: u64, hard: u64) -> Result<(), Error> {
        Ok(kernel::set_memory_limits(&self.store, gpu, &cgroup.to_string_lossy(), soft, hard)?)
    }

    // What happens to the machine.

    /// A reboot: instances, holds and capability nodes are gone, lost GPUs are back, MIG mode is kept by boards
    /// that keep it. The node's processes are not this library's to end.
    pub fn reboot(&self) -> Result<(), Error> {
        tree::forget_nodes(self.root())?;
        self.change(|state| {
            state.holds.clear();
            state.gpus.iter_mut().for_each(|gpu| gpu.lost = false);
            self.reload_all(state)
        })
    }

    /// The kernel modules unloaded and loaded again: as a reboot, but device nodes stay.
    pub fn reload_driver(&self) -> Result<(), Error> {
        self.change(|state| {
            state.holds.clear();
            state.driver.loaded = true;
            self.reload_all(state)
        })
    }

    fn reload_all(&self, state: &mut State) -> Result<(), Error> {
        state.memory_limits.clear();
        for gpu in &mut state.gpus {
            let model = self.store.model(&gpu.model)?;
            gpu.reload(model);
        }
        Ok(())
    }

    /// Another version of the driver is installed and loaded. Who has the library open keeps the old one.
    pub fn upgrade_driver(&self, driver: Driver) -> Result<(), Error> {
        let library = nvml_library()?;
        self.change(|state| {
            state.driver = driver;
            state.holds.clear();
            tree::libraries(self.root(), &state.driver, &library)?;
            tree::version(self.root(), &state.driver)?;
            self.reload_all(state)
        })
    }

    /// Unloads the driver: `nvmlInit` answers DRIVER_NOT_LOADED until [`SimNode::reload_driver`].
    pub fn unload_driver(&self) -> Result<(), Error> {
        self.change(|state| {
            state.driver.loaded = false;
            Ok(())
        })
    }

    /// Resets one GPU: instances end and a pending MIG mode comes into force.
    pub fn reset_gpu(&self, gpu: usize) -> Result<(), Error> {
        self.change(|state| {
            gpu_at_mut(state, gpu)?.apply_pending();
            Ok(())
        })
    }

    /// The GPU falls off the bus: XID 79, then GPU_IS_LOST for every call on it.
    pub fn lose_gpu(&self, gpu: usize) -> Result<(), Error> {
        self.change(|state| {
            gpu_at_mut(state, gpu)?.lost = true;
            state.event(gpu, EVENT_XID, 79, None, None);
            Ok(())
        })
    }

    /// The GPU is back, reset.
    pub fn recover_gpu(&self, gpu: usize) -> Result<(), Error> {
        self.change(|state| {
            let target = gpu_at_mut(state, gpu)?;
            target.lost = false;
            target.apply_pending();
            Ok(())
        })
    }

    /// An XID error of the GPU or of one of its GPU instances.
    pub fn xid(&self, gpu: usize, gpu_instance: Option<u32>, code: u64) -> Result<(), Error> {
        self.change(|state| {
            gpu_at_mut(state, gpu)?.needs_reset |= RESET_XIDS.contains(&code);
            state.event(gpu, EVENT_XID, code, gpu_instance, None);
            Ok(())
        })
    }

    // Faults.

    /// Lets calls of the NVML function `call` fail with `error`, before they have had any effect. The version
    /// suffix is not part of the name: `nvmlDeviceGetCount` also hits `nvmlDeviceGetCount_v2`.
    pub fn inject(
        &self,
        call: &str,
        error: NvmlError,
        occurrence: Occurrence,
        gpu: Option<usize>,
    ) -> Result<(), Error> {
        self.add_fault(Fault { gpu, ..Fault::new(call, Action::Fail(error), When::Before, occurrence) })
    }

    /// As [`SimNode::inject`], but the call has had its effect before it fails.
    pub fn inject_after(
        &self,
        call: &str,
        error: NvmlError,
        occurrence: Occurrence,
        gpu: Option<usize>,
    ) -> Result<(), Error> {
        self.add_fault(Fault { gpu, ..Fault::new(call, Action::Fail(error), When::After, occurrence) })
    }

    /// Lets `nvmlDeviceSetMigMode` answer success with this activation status; the change stays pending.
    pub fn inject_activation(
        &self,
        error: NvmlError,
        occurrence: Occurrence,
        gpu: Option<usize>,
    ) -> Result<(), Error> {
        self.add_fault(Fault {
            gpu,
            ..Fault::new("nvmlDeviceSetMigMode", Action::Activation(error), When::Before, occurrence)
        })
    }

    /// Kills the calling process (SIGKILL) in a call of `call`, before or after its effect.
    pub fn inject_kill(
        &self,
        call: &str,
        when: When,
        occurrence: Occurrence,
        gpu: Option<usize>,
    ) -> Result<(), Error> {
        self.add_fault(Fault { gpu, ..Fault::new(call, Action::Kill, when, occurrence) })
    }

    /// Adds any fault.
    pub fn add_fault(&self, fault: Fault) -> Result<(), Error> {
        self.change(|state| {
            state.faults.push(fault);
            Ok(())
        })
    }

    /// Faults that have not struck for the last time.
    pub fn faults(&self) -> Result<Vec<Fault>, Error> {
        Ok(self.state()?.faults.clone())
    }

    /// Ends all faults and delays.
    pub fn clear_faults(&self) -> Result<(), Error> {
        self.change(|state| {
            state.faults.clear();
            state.delays.clear();
            Ok(())
        })
    }

    /// Makes each call of `call` take this much longer.
    pub fn slow(&self, call: &str, delay: Duration) -> Result<(), Error> {
        let call = canonical_call(call).to_owned();
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.change(|state| {
            state.delays.retain(|existing| existing.call != call);
            state.delays.push(Delay { call, millis });
            Ok(())
        })
    }

    // Foreign clients and leftovers.

    /// A monitor's handle to the GPU (`gpu_instance` is `None`) or to an instance: blocks its destruction, is
    /// listed nowhere. Ends with the guard.
    pub fn hold(&self, gpu: usize, gpu_instance: Option<u32>) -> Result<HoldGuard, Error> {
        self.add_hold(Hold {
            id: 0,
            gpu,
            gpu_instance,
            compute_instance: None,
            listed: false,
            pid: std::process::id(),
            exclusive: false,
        })
    }

    /// A process that NVML lists as running, on a MIG device `(gi, ci)` or on the whole GPU. Ends with the guard.
    pub fn hold_as_process(
        &self,
        gpu: usize,
        mig_device: Option<(u32, u32)>,
        pid: u32,
    ) -> Result<HoldGuard, Error> {
        self.add_hold(Hold {
            id: 0,
            gpu,
            gpu_instance: mig_device.map(|(gi, _)| gi),
            compute_instance: mig_device.map(|(_, ci)| ci),
            listed: true,
            pid,
            exclusive: false,
        })
    }

    /// A client such as a profiler, while which no instance can be created on the GPU. Ends with the guard.
    pub fn hold_exclusively(&self, gpu: usize) -> Result<HoldGuard, Error> {
        self.add_hold(Hold {
            id: 0,
            gpu,
            gpu_instance: None,
            compute_instance: None,
            listed: false,
            pid: std::process::id(),
            exclusive: true,
        })
    }

    /// Records a foreign client; `id` is given out. It ends with the guard, or, if the guard is kept from
    /// dropping by [`HoldGuard::keep`], with [`SimNode::release`].
    pub fn add_hold(&self, hold: Hold) -> Result<HoldGuard, Error> {
        let id = self.change(|state| {
            gpu_at(state, hold.gpu)?;
            let id = state.next_hold;
            state.next_hold += 1;
            state.holds.push(Hold { id, ..hold });
            Ok(id)
        })?;
        Ok(HoldGuard { node: self.clone(), id: Some(id) })
    }

    /// Ends a recorded foreign client.
    pub fn release(&self, id: u64) -> Result<(), Error> {
        self.change(|state| {
            state.holds.retain(|hold| hold.id != id);
            Ok(())
        })
    }

    /// Creates a GPU instance as somebody else would, and its full compute instance too if `compute`. Returns
    /// the GPU-instance id.
    pub fn create_instance(
        &self,
        gpu: usize,
        profile: &str,
        start: Option<u32>,
        compute: bool,
    ) -> Result<u32, Error> {
        self.change(|state| {
            let model = self.store.model(&gpu_at(state, gpu)?.model)?;
            let profile = model
                .mig
                .as_ref()
                .and_then(|mig| mig.by_name(profile))
                .ok_or(Error::Nvml(NvmlError::InvalidArgument))?;
            let placement = start.map(|start| (start, profile.size));
            let id = state.create_gpu_instance(model, gpu, profile.id, placement, std::process::id())?;
            if compute {
                state.create_compute_instance(model, gpu, id, profile.compute.default_id, None)?;
            }
            Ok(id)
        })
    }

    /// A GPU instance without its compute instance, as a crash in between leaves it. Returns its id.
    pub fn orphan_gpu_instance(&self, gpu: usize, profile: &str, start: Option<u32>) -> Result<u32, Error> {
        self.create_instance(gpu, profile, start, false)
    }

    /// Destroys a GPU instance with all that is in it, clients or not: a foreign hand, not a driver call.
    pub fn remove_instance(&self, gpu: usize, id: u32) -> Result<(), Error> {
        self.change(|state| {
            let none = Clients::none();
            state.holds.retain(|hold| hold.gpu != gpu || hold.gpu_instance != Some(id));
            let target = gpu_at(state, gpu)?;
            let instance = target.instance(id).ok_or(Error::NoInstance { gpu, id })?;
            for compute in instance.compute.iter().map(|compute| compute.id).collect::<Vec<_>>() {
                state.destroy_compute_instance(gpu, id, compute, &none)?;
            }
            Ok(state.destroy_gpu_instance(gpu, id, &none)?)
        })
    }

    /// Sets MIG mode on a GPU directly, clients or not; instances end as by a reset.
    pub fn set_mig_mode(&self, gpu: usize, on: bool) -> Result<(), Error> {
        self.change(|state| {
            let target = gpu_at_mut(state, gpu)?;
            target.mig_pending = on;
            target.apply_pending();
            Ok(())
        })
    }

    // Inspection.

    /// All instances, by GPU and start.
    pub fn instances(&self) -> Result<Vec<Instance>, Error> {
        let state = self.state()?;
        let mut all = Vec::new();
        for (index, gpu) in state.gpus.iter().enumerate() {
            let mig = self.store.model(&gpu.model)?.mig.as_ref();
            let mut instances: Vec<_> = gpu.instances.iter().collect();
            instances.sort_by_key(|instance| instance.start);
            all.extend(instances.into_iter().map(|instance| Instance {
                gpu: index,
                gpu_uuid: gpu.uuid.clone(),
                gpu_minor: gpu.minor,
                gi: instance.id,
                profile:
                    mig.and_then(|mig| mig.profile(instance.profile)).map_or_else(
                        || format!("profile {}", instance.profile),
                        |profile| profile.name.clone(),
                    ),
                start: instance.start,
                size: instance.size,
                nth: instance.nth,
                compute: instance.compute.iter().map(|compute| (compute.id, compute.uuid.clone())).collect(),
            }));
        }
        Ok(all)
    }

    /// Creations and destructions so far, per GPU.
    pub fn counts(&self) -> Result<Vec<Counts>, Error> {
        Ok(self.state()?.gpus.iter().map(|gpu| gpu.counts).collect())
    }

    /// The processes that have device nodes of this node open, as this process's `/proc` shows them.
    pub fn clients(&self) -> Result<Vec<Client>, Error> {
        Ok(Clients::scan(self.root(), self.state()?.pid_namespace).0)
    }

    /// The call log, a line per NVML call: `pid function gpu code`. Empty unless the node logs calls.
    pub fn call_log(&self) -> Result<Vec<String>, Error> {
        let path = self.store.file("calls.log");
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(Error::io("read", &path, error)),
        }
    }
}

/// Keeps a recorded foreign client alive.
#[derive(Debug)]
pub struct HoldGuard {
    node: SimNode,
    id: Option<u64>,
}

impl HoldGuard {
    /// Leaves the client there after the guard is gone; returns its id for [`SimNode::release`].
    pub fn keep(mut self) -> u64 {
        self.id.take().unwrap_or_default()
    }
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // The node may be gone by now, which also ends the client.
            let _ = self.node.release(id);
        }
    }
}

/// The built `libnvidia-ml.so.1`: the file that `KERF_SIM_NVML` names, or the one that the build put beside the
/// running executable.
pub fn nvml_library() -> Result<PathBuf, Error> {
    const FILE: &str = "libkerf_sim_nvml.so";
    if let Some(path) = std::env::var_os("KERF_SIM_NVML") {
        let path = PathBuf::from(path);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(Error::NoLibrary { tried: path.display().to_string() })
        };
    }
    let folder = build_folder();
    let tried = [folder.join(FILE), folder.join("deps").join(FILE)].map(|path| path.display().to_string());
    built_library(FILE).ok_or(Error::NoLibrary { tried: tried.join(", ") })
}

/// A library that the build put beside the running executable. Executables lie in target/<profile>/, tests in its deps/; so
/// does the library, by how it was asked for.
pub(crate) fn built_library(file: &str) -> Option<PathBuf> {
    let folder = build_folder();
    [folder.join(file), folder.join("deps").join(file)]
        .into_iter()
        .filter(|path| path.is_file())
        .max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok())
}

fn build_folder() -> PathBuf {
    let executable = std::env::current_exe().unwrap_or_default();
    let folder = executable.parent().unwrap_or(Path::new("/"));
    if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder }.to_owned()
}

/// A program of this package, if it is built.
pub(crate) fn built(name: &str) -> Option<PathBuf> {
    let path = build_folder().join(name);
    path.is_file().then_some(path)
}

fn gpu_at(state: &State, index: usize) -> Result<&Gpu, Error> {
    state.gpus.get(index).ok_or(Error::NoGpu { index, count: state.gpus.len() })
}

fn gpu_at_mut(state: &mut State, index: usize) -> Result<&mut Gpu, Error> {
    let count = state.gpus.len();
    state.gpus.get_mut(index).ok_or(Error::NoGpu { index, count })
}

fn new_gpu(node: &str, index: usize, spec: &GpuSpec, model: &Model) -> Result<Gpu, Error> {
    let mig = model.mig.as_ref();
    if spec.half_swapped && !mig.is_some_and(|mig| mig.ids.half_swapped_boards) {
        return Err(Error::NotSwappable { index, model: model.id.clone() });
    }
    if spec.mig && mig.is_none() {
        return Err(Error::Nvml(NvmlError::NotSupported));
    }
    // A serial number has 13 digits.
    let serial = spec.serial.clone().unwrap_or_else(|| {
        let digits = uuid::derived(node, &format!("serial {index}"));
        let number = u64::from_str_radix(&digits[..8], 16).unwrap_or_default();
        format!("16{number:011}")
    });
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    Ok(Gpu {
        model: model.id.clone(),
        uuid: spec.uuid.clone().unwrap_or_else(|| format!("GPU-{}", uuid::derived(&serial, "gpu"))),
        serial,
        minor: spec.minor.unwrap_or(index),
        pci: Pci { domain: 0, bus: 7 + 7 * index, device: 0 },
        numa: spec.numa,
        half_swapped: spec.half_swapped,
        reset_forbidden: spec.reset_forbidden,
        mig_current: spec.mig,
        mig_pending: spec.mig,
        compute_mode: 0,
        persistence: false,
        lost: false,
        needs_reset: false,
        instances: Vec::new(),
        counts: Counts::default(),
    })
}
