//! `nvidia-cuda-mps-server`: holds contexts on its devices and lets clients into them. The control daemon starts it, and
//! tells it by its standard input what to do.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use super::log::Log;
use super::values::{chunk, find, visible};
use super::{Limit, Message, OfferedDevice, Reply, SOCKET, Welcome};
use crate::cuda::{Driver, Place};
use crate::kernel::protocol::{Answer, Connection, CudaError, Device, FaultAction, Request, peer};

/// What a server is to be. The control daemon sends it anew when it changes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Of a named server (v3).
    pub name: Option<String>,
    /// Where its sockets go.
    pub pipe: PathBuf,
    pub log: PathBuf,
    pub uid: u32,
    pub multiuser: bool,
    /// `CUDA_VISIBLE_DEVICES` of the control daemon.
    pub visible: Option<String>,
    /// Names of the devices that it serves; all if `None`.
    pub allowed: Option<Vec<String>>,
    pub namespaces: BTreeMap<String, Limits>,
    /// Whether SMs are given by partition (v2, `-S`).
    pub static_partitions: bool,
    pub partitions: Vec<Partition>,
    /// Whether memory pressure ends those who borrow.
    pub evicts: bool,
}

/// Limits of the clients of a namespace; v2 has `default` only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Of several for one device, the last holds.
    pub pinned: Vec<Limit>,
    pub percentage: Option<f64>,
    pub priority: Option<u32>,
    /// Partition by device UUID.
    pub partitions: BTreeMap<String, String>,
}

/// A part of a device's SMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    pub name: String,
    /// UUID.
    pub device: String,
    pub chunks: u32,
    pub include_remainder: bool,
    pub id: String,
}

impl Partition {
    pub fn sms(&self, device: &Device) -> u32 {
        let chunk = chunk(device.capability);
        self.chunks * chunk + if self.include_remainder { device.sms % chunk } else { 0 }
    }
}

/// What the control daemon wants.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    Configure(Box<Settings>),
    Clients,
    Terminate { pid: u32 },
}

/// What the server answers; `Ready` comes first and unasked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    Ready(Vec<Device>),
    Done,
    Clients { fault: bool, clients: Vec<ClientInfo> },
    NoSuchClient,
}

/// A connected client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientInfo {
    pub pid: u32,
    /// Given by the server.
    pub number: u64,
    /// Inode of its PID namespace.
    pub linux_ns: u64,
    pub namespace: String,
    pub command: String,
    /// Id of its partition.
    pub partition: Option<String>,
}

struct Server {
    log: Log,
    shared_memory: String,
    devices: Vec<Device>,
    driver: Mutex<Driver>,
    branch: u32,
    inner: Mutex<Inner>,
}

struct Inner {
    settings: Settings,
    clients: BTreeMap<u64, (ClientInfo, String)>,
    next: u64,
    /// A client has made the GPU fault, and not all clients have left since.
    fault: bool,
}

/// The program.
pub fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|argument| argument == "-v") {
        println!("simulated");
        return ExitCode::SUCCESS;
    }
    let mut lines = std::io::stdin().lock().lines();
    let settings = lines.next().and_then(Result::ok).and_then(|line| serde_json::from_str(&line).ok());
    let Some(settings): Option<Settings> = settings else {
        eprintln!("nvidia-cuda-mps-server is started by nvidia-cuda-mps-control");
        return ExitCode::from(1);
    };
    let log = Log::open(&settings.log, "server.log", "Server");
    let server = match Server::start(settings, log) {
        Ok(server) => Arc::new(server),
        Err(log) => {
            log.0.line(&log.1);
            return ExitCode::from(1);
        }
    };
    server.serve_namespaces();
    let report = |report: &Report| {
        let line = serde_json::to_string(report).unwrap_or_default();
        let _ = writeln!(std::io::stdout(), "{line}");
    };
    server.log.line("Active Threads Percentage set to the namespaces'; server is ready");
    report(&Report::Ready(server.devices.clone()));
    for line in lines.map_while(Result::ok) {
        let Ok(order) = serde_json::from_str(&line) else { continue };
        report(&server.obey(order));
    }
    server.log.line("Control daemon is gone or wants an end: exiting");
    server.clean();
    ExitCode::SUCCESS
}

impl Server {
    /// Makes contexts on all devices; whoever cannot says why in its log and exits.
    fn start(settings: Settings, log: Log) -> Result<Server, Box<(Log, String)>> {
        log.line(&format!("Starting server for user {}", settings.uid));
        match Server::set_up(&settings) {
            Ok((driver, devices, branch)) => {
                let shared_memory = share_memory();
                let inner = Inner { settings, clients: BTreeMap::new(), next: 0, fault: false };
                let (driver, inner) = (Mutex::new(driver), Mutex::new(inner));
                Ok(Server { log, shared_memory, devices, driver, branch, inner })
            }
            Err(error) => Err(Box::new((log, format!("Failed to start : {error}")))),
        }
    }

    fn set_up(settings: &Settings) -> Result<(Driver, Vec<Device>, u32), String> {
        let mut driver = Driver::open(&Place::find()).map_err(|e| e.to_string())?;
        match driver.fault("mps-server-start") {
            Some(FaultAction::Kill) => kill_self(),
            Some(FaultAction::Fail) => return Err("a fault was injected".into()),
            None => {}
        }
        let mut devices = visible(driver.seen(), settings.visible.as_deref());
        if let Some(names) = &settings.allowed {
            let chosen = names.iter().map(|name| {
                let found = find(&devices, name).ok_or_else(|| format!("there is no device {name}"))?;
                Ok(devices[found].clone())
            });
            devices = chosen.collect::<Result<_, String>>()?;
        }
        if devices.is_empty() {
            return Err(CudaError::NoDevice.to_string());
        }
        driver.take(&devices).map_err(|e| e.to_string())?;
        for device in &devices {
            let request = Request::Context { device: device.id, ticket: None, connections: 2 };
            driver.ask(&request).map_err(|e| format!("no context on {}: {e}", device.uuid))?;
        }
        let branch = driver.branch();
        Ok((driver, devices, branch))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn ask(&self, request: &Request) -> Result<Answer, CudaError> {
        self.driver.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).ask(request)
    }

    /// Makes the sockets that should be there: of v2 one beside the daemon's; of v3 the server's and one per
    /// namespace ("mpsv3-namespaces, Namespace Routing").
    fn serve_namespaces(self: &Arc<Server>) {
        let settings = self.inner().settings.clone();
        if settings.name.is_none() {
            self.listen(&settings.pipe.join(format!("server.{}", std::process::id())), "default");
        } else {
            self.listen(&settings.pipe.join(SOCKET), "default");
            for namespace in settings.namespaces.keys() {
                self.listen(&settings.pipe.join(namespace).join(SOCKET), namespace);
            }
        }
        become_user(settings.uid);
    }

    fn listen(self: &Arc<Server>, path: &Path, namespace: &str) {
        if path.exists() {
            return;
        }
        if let Some(folder) = path.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        let listener = match UnixListener::bind(path) {
            Ok(listener) => listener,
            Err(error) => return self.log.line(&format!("Failed to listen on {}: {error}", path.display())),
        };
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666));
        let (server, namespace) = (self.clone(), namespace.to_owned());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (server, namespace) = (server.clone(), namespace.clone());
                std::thread::spawn(move || server.serve(stream, &namespace));
            }
        });
    }

    fn serve(&self, stream: UnixStream, namespace: &str) {
        let peer = peer(&stream);
        let mut connection = Connection::from(stream);
        let Ok(Some(Message::Client { partition, percentage_set, command })) = connection.receive() else {
            return;
        };
        let welcome = peer
            .map_err(|_| CudaError::MpsConnectionFailed)
            .and_then(|peer| self.admit(&peer, namespace, partition, percentage_set, command));
        let (number, welcome) = match welcome {
            Ok(welcome) => welcome,
            Err(error) => {
                self.log.line(&format!("Client refused: {error}"));
                let _ = connection.send(&Reply::Refused(error));
                return;
            }
        };
        let ticket = welcome.ticket.clone();
        let mut sent = connection.send(&Reply::Welcome(Box::new(welcome)));
        while sent.is_ok()
            && let Ok(Some(message)) = connection.receive()
        {
            let reply = match message {
                Message::Pressure { device } => {
                    let request = Request::Evict { device, ticket: ticket.clone() };
                    let evicted = matches!(self.ask(&request), Ok(Answer::Evicted(true)));
                    self.log
                        .line(&format!("Eviction requested: {}", if evicted { "done" } else { "no victim" }));
                    Reply::Evicted(evicted)
                }
                Message::Fault { .. } => {
                    self.fault(number);
                    Reply::Done
                }
                _ => Reply::Refused(CudaError::InvalidValue),
            };
            sent = connection.send(&reply);
        }
        let _ = self.ask(&Request::Revoke { ticket, error: CudaError::Deinitialized });
        let mut inner = self.inner();
        inner.clients.remove(&number);
        inner.fault &= !inner.clients.is_empty();
        self.log.line(&format!("Client {number} disconnected"));
    }

    fn admit(
        &self,
        peer: &libc::ucred,
        namespace: &str,
        partition: Option<String>,
        percentage_set: bool,
        command: String,
    ) -> Result<(u64, Welcome), CudaError> {
        // A process that the server's PID namespace does not show has no credentials here.
        let pid =
            u32::try_from(peer.pid).ok().filter(|pid| *pid > 0).ok_or(CudaError::MpsConnectionFailed)?;
        let fault = self.driver.lock().unwrap_or_else(|e| e.into_inner()).fault("mps-client-connect");
        if fault.is_some() {
            return Err(CudaError::MpsServerNotReady);
        }
        let mut inner = self.inner();
        if peer.uid != inner.settings.uid && !inner.settings.multiuser {
            return Err(CudaError::NotPermitted);
        }
        // "architecture, Server": in the FAULT state new clients are refused.
        if inner.fault {
            return Err(CudaError::MpsServerNotReady);
        }
        let settings = &inner.settings;
        let limits = settings.namespaces.get(namespace).cloned().unwrap_or_default();
        let partition = self.partition(settings, partition.as_deref())?;
        if settings.static_partitions && percentage_set {
            return Err(CudaError::InvalidValue);
        }
        let devices = self.devices.iter().enumerate().map(|(index, device)| {
            let pinned =
                limits.pinned.iter().rev().find(|(name, _)| {
                    name.as_ref().is_none_or(|name| find(&self.devices, name) == Some(index))
                });
            OfferedDevice {
                device: device.clone(),
                pinned: pinned.map(|(_, bytes)| *bytes),
                partition_sms: self.partition_sms(settings, &limits, partition, device),
            }
        });
        let devices: Vec<OfferedDevice> = devices.collect();
        if devices.iter().any(|device| device.partition_sms == Some(0)) {
            return Err(CudaError::DeviceUnavailable);
        }
        let Ok(Answer::Ticket(ticket)) = self.ask(&Request::Admit) else {
            return Err(CudaError::MpsRpcFailure);
        };
        let info = ClientInfo {
            pid,
            number: inner.next,
            linux_ns: std::fs::metadata(format!("/proc/{pid}/ns/pid")).map_or(0, |meta| meta.ino()),
            namespace: namespace.to_owned(),
            command,
            partition: partition.map(|partition| partition.id.clone()),
        };
        let welcome = Welcome {
            ticket: ticket.clone(),
            devices,
            percentage: limits.percentage,
            percentage_overrides: settings.name.is_some(),
            shared_memory: self.shared_memory.clone(),
            evicts: settings.evicts,
        };
        let number = inner.next;
        inner.next += 1;
        inner.clients.insert(number, (info, ticket));
        self.log.line(&format!("Client {number} connected: process {pid}, namespace {namespace}"));
        Ok((number, welcome))
    }

    /// The partition that `CUDA_MPS_SM_PARTITION` names, as `<device UUID>/<id>`.
    fn partition<'a>(
        &self,
        settings: &'a Settings,
        wanted: Option<&str>,
    ) -> Result<Option<&'a Partition>, CudaError> {
        let Some(wanted) = wanted else { return Ok(None) };
        let (device, id) = wanted.split_once('/').ok_or(CudaError::InvalidValue)?;
        let device = find(&self.devices, device).ok_or(CudaError::InvalidValue)?;
        let found = settings
            .partitions
            .iter()
            .find(|partition| partition.id == id && find(&self.devices, &partition.device) == Some(device));
        found.map(Some).ok_or(CudaError::InvalidValue)
    }

    /// SMs of the client's partition on a device; without one, what no partition has.
    fn partition_sms(
        &self,
        settings: &Settings,
        limits: &Limits,
        partition: Option<&Partition>,
        device: &Device,
    ) -> Option<u32> {
        let mut here = settings.partitions.iter().filter(|partition| partition.device == device.uuid);
        let of_namespace = limits.partitions.get(&device.uuid);
        let own = match of_namespace {
            Some(name) => here.clone().find(|partition| partition.name == *name),
            None => partition.filter(|partition| partition.device == device.uuid),
        };
        if let Some(own) = own {
            return Some(own.sms(device));
        }
        here.clone().next()?;
        Some(device.sms.saturating_sub(here.by_ref().map(|partition| partition.sms(device)).sum()))
    }

    /// A fatal fault is reported to all clients, and new ones are refused until they have left ("when-to-use-mps,
    /// Memory Protection and Error Containment"). Since r610 a fault in a partition is that client's alone
    /// ("common-tasks, Using Static SM Partitioning").
    fn fault(&self, number: u64) {
        let mut inner = self.inner();
        let own = inner.clients.get(&number).is_some_and(|(info, _)| info.partition.is_some());
        let contained = own && self.branch >= 610;
        inner.fault |= !contained;
        let clients = inner.clients.iter().filter(|(other, _)| !contained || **other == number);
        for (_, (_, ticket)) in clients {
            let request = Request::Revoke { ticket: ticket.clone(), error: CudaError::LaunchFailed };
            let _ = self.ask(&request);
        }
        self.log.line("A client's fatal fault was reported");
    }

    fn obey(self: &Arc<Server>, order: Order) -> Report {
        match order {
            Order::Configure(settings) => {
                let gone = |inner: &Inner, name: &String| {
                    inner.settings.namespaces.contains_key(name) && !settings.namespaces.contains_key(name)
                };
                let mut inner = self.inner();
                let removed: Vec<String> =
                    inner.settings.namespaces.keys().filter(|name| gone(&inner, name)).cloned().collect();
                inner.settings = *settings;
                let pipe = inner.settings.pipe.clone();
                drop(inner);
                for name in removed {
                    let _ = std::fs::remove_dir_all(pipe.join(name));
                }
                self.serve_namespaces();
                Report::Done
            }
            Order::Clients => {
                let inner = self.inner();
                let clients = inner.clients.values().map(|(info, _)| info.clone()).collect();
                Report::Clients { fault: inner.fault, clients }
            }
            Order::Terminate { pid } => {
                let inner = self.inner();
                let mut found = false;
                for (info, ticket) in inner.clients.values().filter(|(info, _)| info.pid == pid) {
                    found = true;
                    let error = CudaError::MpsClientTerminated;
                    let _ = self.ask(&Request::Revoke { ticket: ticket.clone(), error });
                    self.log.line(&format!("Client {} terminated", info.number));
                }
                if found { Report::Done } else { Report::NoSuchClient }
            }
        }
    }

    fn clean(&self) {
        if let Some((name, _)) = self.shared_memory.split_once(' ') {
            let _ = std::fs::remove_file(Path::new(SHARED_MEMORY).join(name));
        }
    }
}

/// Where server and clients share memory.
pub const SHARED_MEMORY: &str = "/dev/shm";

/// The name of a server's file there.
pub fn shared_memory_name(pid: u32) -> String {
    format!("cuda.shm.mps.{pid}")
}

/// Makes a file by which a client shows that it shares `/dev/shm` with the server: name and content. Empty where
/// there is none.
fn share_memory() -> String {
    let name = shared_memory_name(std::process::id());
    let content = crate::uuid::derived(&format!("{:?}", std::time::SystemTime::now()), &name);
    let path = Path::new(SHARED_MEMORY).join(&name);
    match std::fs::write(&path, &content) {
        Ok(()) => format!("{name} {content}"),
        Err(_) => String::new(),
    }
}

#[allow(unsafe_code, reason = "the standard library cannot change the user of a running process")]
fn become_user(uid: u32) {
    // SAFETY: both calls take numbers only.
    unsafe {
        if libc::geteuid() == 0 && uid != 0 && libc::setuid(uid) != 0 {
            std::process::exit(1);
        }
    }
}

#[allow(unsafe_code, reason = "the standard library cannot raise a signal")]
fn kill_self() {
    // SAFETY: raise has no preconditions.
    unsafe { libc::raise(libc::SIGKILL) };
}
