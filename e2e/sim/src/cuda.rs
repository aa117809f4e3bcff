//! What the CUDA library does in a program: finds GPUs, connects to MPS or goes without, keeps the limits that are kept
//! in the process.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::caps::Capability;
use crate::kernel::protocol::{Answer, Connection, CudaError, Device, FaultAction, Outcome, Request, SOCKET};
use crate::mps::{self, Message, OfferedDevice, Reply, Welcome};
use crate::tree::{CAPS_MAJOR, MAX_GPU_MINOR, NVIDIA_MAJOR};

/// A device node of the driver.
#[derive(Clone, Debug)]
pub struct Node {
    pub path: PathBuf,
    pub major: u32,
    pub minor: u32,
}

impl Node {
    /// The GPU's minor, if it is a GPU's node.
    pub fn gpu(&self) -> Option<u32> {
        (self.major == NVIDIA_MAJOR && self.minor <= MAX_GPU_MINOR).then_some(self.minor)
    }

    pub fn capability(&self) -> Option<Capability> {
        (self.major == CAPS_MAJOR).then(|| Capability::of_minor(self.minor)).flatten()
    }

    /// Opens it by `O_PATH`: there is no driver behind it that could open it in earnest.
    pub fn open(&self) -> std::io::Result<File> {
        File::options().read(true).custom_flags(libc::O_PATH).open(&self.path)
    }
}

/// The driver's device nodes in `dev`.
pub fn nodes(dev: &Path) -> Vec<Node> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        entries.filter_map(Result::ok).map(|entry| entry.path()).collect()
    };
    let mut paths = list(dev);
    paths.extend(list(&dev.join("nvidia-caps")));
    paths.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvidia")));
    paths.sort();
    paths
        .into_iter()
        .filter_map(|path| {
            let meta = std::fs::metadata(&path).ok()?;
            let device = meta.rdev();
            let node = Node { path, major: libc::major(device), minor: libc::minor(device) };
            meta.file_type().is_char_device().then_some(node)
        })
        .collect()
}

/// Where a program finds the driver.
#[derive(Clone, Debug)]
pub struct Place {
    pub socket: PathBuf,
    pub dev: PathBuf,
}

impl Place {
    /// Of the running program.
    pub fn find() -> Place {
        Place::of(std::env::current_exe().ok().as_deref())
    }

    /// Of the node in whose driver root a file lies, or that `KERF_SIM_ROOT` names; else what a container has.
    pub fn of(file: Option<&Path>) -> Place {
        let above = file.into_iter().flat_map(Path::ancestors);
        let own = above.map(Path::to_owned).find(|folder| folder.join(crate::STATE_FILE).exists());
        let root = std::env::var_os("KERF_SIM_ROOT").map(PathBuf::from).or(own).unwrap_or_else(|| "/".into());
        Place { socket: root.join(SOCKET), dev: root.join("dev") }
    }
}

/// A connection to the kernel driver.
#[derive(Debug)]
pub struct Driver {
    connection: Connection,
    nodes: Vec<Node>,
    seen: Vec<Device>,
    open: Vec<File>,
    version: String,
}

impl Driver {
    /// CUDA_ERROR_NO_DEVICE without a driver.
    pub fn open(place: &Place) -> Result<Driver, CudaError> {
        let connection = Connection::open(&place.socket).map_err(|_| CudaError::NoDevice)?;
        let nodes = nodes(&place.dev);
        let gpus = nodes.iter().filter_map(Node::gpu).collect();
        let capabilities =
            nodes.iter().filter(|node| node.capability().is_some()).map(|node| node.minor).collect();
        let mut driver =
            Driver { connection, nodes, seen: Vec::new(), open: Vec::new(), version: String::new() };
        if let Answer::Devices(seen) = driver.ask(&Request::Devices { gpus, capabilities })? {
            driver.seen = seen;
        }
        if let Answer::Version(version) = driver.ask(&Request::Version)? {
            driver.version = version;
        }
        Ok(driver)
    }

    /// The devices whose nodes are there.
    pub fn seen(&self) -> &[Device] {
        &self.seen
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    /// The first number of the driver's version.
    pub fn branch(&self) -> u32 {
        self.version.split('.').next().and_then(|branch| branch.parse().ok()).unwrap_or(0)
    }

    /// Opens the nodes of these devices, and those that all need.
    pub fn take(&mut self, devices: &[Device]) -> Result<(), CudaError> {
        let wanted = |node: &Node| match (node.gpu(), node.capability()) {
            (Some(minor), _) => devices.iter().any(|device| device.id.gpu == minor),
            (None, Some(capability)) => devices.iter().any(|device| {
                let (gpu, mig) = (device.id.gpu, device.id.mig);
                mig.is_some_and(|(gi, ci)| {
                    capability == Capability::GpuInstance { gpu, gi }
                        || capability == Capability::ComputeInstance { gpu, gi, ci }
                })
            }),
            (None, None) => true,
        };
        for node in self.nodes.iter().filter(|node| wanted(node)) {
            self.open.push(node.open().map_err(|_| CudaError::NoDevice)?);
        }
        Ok(())
    }

    pub fn ask(&mut self, request: &Request) -> Outcome {
        self.connection.ask(request).unwrap_or(Err(CudaError::Deinitialized))
    }

    /// The fault that waits for a step of an MPS program.
    pub fn fault(&mut self, step: &str) -> Option<FaultAction> {
        match self.ask(&Request::Fault { step: step.to_owned() }) {
            Ok(Answer::Fault(action)) => action,
            _ => None,
        }
    }
}

/// CUDA in a program, initialised.
#[derive(Debug)]
pub struct Cuda {
    driver: Driver,
    server: Option<(Connection, Welcome)>,
    devices: Vec<Usable>,
}

/// A device that the program sees.
#[derive(Debug)]
pub struct Usable {
    pub device: Device,
    /// SMs that its kernels can run on.
    pub sms: u32,
    /// Bytes that this process may have under MPS.
    pub pinned: Option<u64>,
    context: Option<u64>,
    used: u64,
}

impl Cuda {
    /// `cuInit`. "architecture, Client Attach/Detach": if the connection to the control daemon fails, the program runs as
    /// it would without MPS.
    pub fn init(place: &Place) -> Result<Cuda, CudaError> {
        let mut driver = Driver::open(place)?;
        let variable = |name: &str| std::env::var(name).ok();
        let names = variable("CUDA_VISIBLE_DEVICES");
        let pipe = variable("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
        let server = connect(Path::new(&pipe))?;
        let devices: Vec<Usable> = match &server {
            None => {
                let seen = mps::visible(driver.seen(), names.as_deref());
                seen.into_iter().map(|device| Usable::new(device.sms, None, device)).collect()
            }
            Some((_, welcome)) => {
                // Devices have the server's numbers ("appendix-environment-variables, CUDA_VISIBLE_DEVICES").
                let offered = |device: &Device| welcome.devices.iter().find(|offer| offer.device == *device);
                let served: Vec<Device> = welcome.devices.iter().map(|offer| offer.device.clone()).collect();
                let seen = mps::visible(&served, names.as_deref());
                let seen: Vec<Device> =
                    seen.into_iter().filter(|device| driver.seen().contains(device)).collect();
                let offers: Vec<&OfferedDevice> = seen.iter().filter_map(offered).collect();
                limited(&offers, welcome, &seen)
            }
        };
        if devices.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let taken: Vec<Device> = devices.iter().map(|usable| usable.device.clone()).collect();
        driver.take(&taken)?;
        Ok(Cuda { driver, server, devices })
    }

    /// Whether it runs under MPS.
    pub fn under_mps(&self) -> bool {
        self.server.is_some()
    }

    pub fn devices(&self) -> &[Usable] {
        &self.devices
    }

    /// The context on a device, made at first use: `cuCtxCreate`.
    pub fn context(&mut self, device: usize) -> Result<u64, CudaError> {
        let usable = self.devices.get(device).ok_or(CudaError::InvalidDevice)?;
        if let Some(context) = usable.context {
            return Ok(context);
        }
        let connections =
            std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().and_then(|text| text.parse().ok());
        let request = Request::Context {
            device: usable.device.id,
            ticket: self.server.as_ref().map(|(_, welcome)| welcome.ticket.clone()),
            connections: connections.unwrap_or(2),
        };
        match self.driver.ask(&request)? {
            Answer::Context(context) => {
                self.devices[device].context = Some(context);
                Ok(context)
            }
            _ => Err(CudaError::Unknown),
        }
    }

    /// `cuMemAlloc`.
    pub fn allocate(&mut self, device: usize, bytes: u64) -> Result<(), CudaError> {
        let context = self.context(device)?;
        let usable = &self.devices[device];
        let id = usable.device.id;
        if usable.pinned.is_some_and(|limit| bytes > limit.saturating_sub(usable.used)) {
            // Whoever was ended hears of that first.
            self.driver.ask(&Request::MemoryInfo { context })?;
            return Err(CudaError::OutOfMemory);
        }
        let request = Request::Allocate { context, bytes };
        let mut outcome = self.driver.ask(&request);
        // "mpsv3-memory-partitioning, MPS Pressure Handling and Eviction": retries with bounded back-off.
        for attempt in 0..8 {
            if outcome.as_ref().err() != Some(&CudaError::OutOfMemory) || !self.press(id) {
                break;
            }
            std::thread::sleep(Duration::from_millis(attempt));
            outcome = self.driver.ask(&request);
        }
        outcome?;
        self.devices[device].used += bytes;
        Ok(())
    }

    /// Asks the MPS server to end somebody who borrows; whether it did.
    fn press(&mut self, device: crate::kernel::protocol::DeviceId) -> bool {
        match &mut self.server {
            Some((connection, welcome)) if welcome.evicts => {
                matches!(connection.ask(&Message::Pressure { device }), Ok(Reply::Evicted(true)))
            }
            _ => false,
        }
    }

    /// `cuMemFree`.
    pub fn free(&mut self, device: usize, bytes: u64) -> Result<(), CudaError> {
        let context = self.context(device)?;
        self.driver.ask(&Request::Free { context, bytes })?;
        self.devices[device].used -= bytes;
        Ok(())
    }

    /// `cuMemGetInfo`: free and total. Under a pinned limit, what is left of it is free, but the whole GPU is the total.
    pub fn memory_info(&mut self, device: usize) -> Result<(u64, u64), CudaError> {
        let context = self.context(device)?;
        let Answer::Memory { free, total } = self.driver.ask(&Request::MemoryInfo { context })? else {
            return Err(CudaError::Unknown);
        };
        let usable = &self.devices[device];
        let left = usable.pinned.map_or(u64::MAX, |limit| limit.saturating_sub(usable.used));
        Ok((free.min(left), total))
    }

    /// A kernel that makes the GPU fault; without MPS it is the program's own end alone.
    pub fn fault(&mut self, device: usize) -> Result<(), CudaError> {
        self.context(device)?;
        let id = self.devices[device].device.id;
        if let Some((connection, _)) = &mut self.server {
            let _ = connection.ask::<Reply>(&Message::Fault { device: id });
        }
        Err(CudaError::LaunchFailed)
    }
}

impl Usable {
    fn new(sms: u32, pinned: Option<u64>, device: Device) -> Usable {
        Usable { device, sms, pinned, context: None, used: 0 }
    }
}

/// Connects to MPS as far as it is there: `None` if nobody listens in the pipe directory.
fn connect(pipe: &Path) -> Result<Option<(Connection, Welcome)>, CudaError> {
    let hello = Message::Client {
        partition: std::env::var("CUDA_MPS_SM_PARTITION").ok(),
        percentage_set: std::env::var_os("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").is_some(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
    };
    let failed = |_| CudaError::MpsConnectionFailed;
    let Ok(mut connection) = Connection::open(&pipe.join(mps::SOCKET)) else { return Ok(None) };
    let mut reply = connection.ask(&hello).map_err(failed)?;
    if let Reply::Server(socket) = &reply {
        connection = Connection::open(&pipe.join(socket)).map_err(failed)?;
        reply = connection.ask(&hello).map_err(failed)?;
    }
    match reply {
        Reply::Welcome(welcome) => {
            if let Some((name, content)) = welcome.shared_memory.split_once(' ') {
                let path = Path::new(mps::server::SHARED_MEMORY).join(name);
                let shared = std::fs::read_to_string(path).is_ok_and(|found| found == content);
                if !shared {
                    return Err(CudaError::MpsConnectionFailed);
                }
            }
            Ok(Some((connection, *welcome)))
        }
        Reply::Refused(error) => Err(error),
        _ => Err(CudaError::MpsConnectionFailed),
    }
}

/// Devices under MPS with the limits of server and environment.
///
/// The environment can only tighten them — but if one of its entries names a device that the program does not see, no
/// pinned limit holds at all, not even the server's ("Per-GPU compute and memory limits with MPS", see the README).
fn limited(offers: &[&OfferedDevice], welcome: &Welcome, seen: &[Device]) -> Vec<Usable> {
    let own = std::env::var("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").unwrap_or_default();
    let own: Vec<(Option<usize>, u64)> =
        mps::pinned_limits(&own).into_iter().map(|(name, bytes)| (mps::find(seen, &name), bytes)).collect();
    let dropped = own.iter().any(|(device, _)| device.is_none());
    let percentage: Option<f64> =
        std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok().and_then(|text| text.parse().ok());
    let percentage = match (welcome.percentage, percentage) {
        (Some(server), _) if welcome.percentage_overrides => server,
        (server, own) => server.unwrap_or(100.0).min(own.filter(|own| *own > 0.0).unwrap_or(100.0)),
    };
    offers
        .iter()
        .enumerate()
        .map(|(index, offer)| {
            let bounds = own.iter().filter(|(device, _)| *device == Some(index)).map(|(_, bytes)| *bytes);
            let pinned = bounds.chain(offer.pinned).min().filter(|_| !dropped);
            let sms = mps::sms(offer.device.sms, percentage);
            Usable::new(offer.partition_sms.unwrap_or(sms), pinned, offer.device.clone())
        })
        .collect()
}

/// The GPUs and capabilities among nodes.
pub fn sights(nodes: &[Node]) -> (BTreeSet<u32>, BTreeSet<Capability>) {
    (nodes.iter().filter_map(Node::gpu).collect(), nodes.iter().filter_map(Node::capability).collect())
}
