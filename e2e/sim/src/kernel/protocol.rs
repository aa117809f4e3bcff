//! What programs ask the simulated kernel driver, a line of JSON each way. It stands for the ioctls of the real one,
//! which nobody outside NVIDIA's libraries makes.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Below the driver root. It is where `nvidia-persistenced` listens, because the container toolkit looks for that
/// socket and mounts it into every container with GPUs.
pub const SOCKET: &str = "run/nvidia-persistenced/socket";

macro_rules! errors {
    ($($variant:ident = $name:literal $code:literal;)*) => {
        /// What a CUDA call answers (`CUresult`), by cuda.h's names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum CudaError { $(#[serde(rename = $name)] $variant,)* }

        impl CudaError {
            pub const fn name(self) -> &'static str {
                match self { $(CudaError::$variant => $name,)* }
            }

            /// cuda.h's number.
            pub const fn code(self) -> u32 {
                match self { $(CudaError::$variant => $code,)* }
            }

            pub fn from_code(code: u32) -> Option<CudaError> {
                match code { $($code => Some(CudaError::$variant),)* _ => None }
            }
        }
    };
}

errors! {
    InvalidValue = "CUDA_ERROR_INVALID_VALUE" 1;
    OutOfMemory = "CUDA_ERROR_OUT_OF_MEMORY" 2;
    NotInitialized = "CUDA_ERROR_NOT_INITIALIZED" 3;
    Deinitialized = "CUDA_ERROR_DEINITIALIZED" 4;
    DeviceUnavailable = "CUDA_ERROR_DEVICE_UNAVAILABLE" 46;
    NoDevice = "CUDA_ERROR_NO_DEVICE" 100;
    InvalidDevice = "CUDA_ERROR_INVALID_DEVICE" 101;
    InvalidContext = "CUDA_ERROR_INVALID_CONTEXT" 201;
    InvalidPtx = "CUDA_ERROR_INVALID_PTX" 218;
    InvalidHandle = "CUDA_ERROR_INVALID_HANDLE" 400;
    NotFound = "CUDA_ERROR_NOT_FOUND" 500;
    LaunchFailed = "CUDA_ERROR_LAUNCH_FAILED" 719;
    NotPermitted = "CUDA_ERROR_NOT_PERMITTED" 800;
    MpsConnectionFailed = "CUDA_ERROR_MPS_CONNECTION_FAILED" 805;
    MpsRpcFailure = "CUDA_ERROR_MPS_RPC_FAILURE" 806;
    MpsServerNotReady = "CUDA_ERROR_MPS_SERVER_NOT_READY" 807;
    MpsMaxClientsReached = "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED" 808;
    MpsMaxConnectionsReached = "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED" 809;
    MpsClientTerminated = "CUDA_ERROR_MPS_CLIENT_TERMINATED" 810;
    Unknown = "CUDA_ERROR_UNKNOWN" 999;
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::error::Error for CudaError {}

/// A GPU by its device minor, or a MIG device on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceId {
    pub gpu: u32,
    /// GPU instance and compute instance.
    pub mig: Option<(u32, u32)>,
}

/// A device as CUDA shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub id: DeviceId,
    pub uuid: String,
    pub name: String,
    pub pci: String,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Major number of the compute capability.
    pub capability: i32,
}

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The devices behind these device minors and capability minors, in the order of enumeration.
    Devices {
        gpus: Vec<u32>,
        capabilities: Vec<u32>,
    },
    /// The driver's version.
    Version,
    /// Makes a context. `ticket` is what an MPS server has given to its client.
    Context {
        device: DeviceId,
        ticket: Option<String>,
        connections: u32,
    },
    Allocate {
        context: u64,
        bytes: u64,
    },
    Free {
        context: u64,
        bytes: u64,
    },
    MemoryInfo {
        context: u64,
    },
    /// Of an MPS server: it admits one more client.
    Admit,
    /// Of an MPS server: a client's contexts answer this error from now on.
    Revoke {
        ticket: String,
        error: CudaError,
    },
    /// Of an MPS server: the client lacks memory on the device; whoever borrows is to be ended.
    Evict {
        device: DeviceId,
        ticket: String,
    },
    /// The fault, if any, that waits for this step of an MPS program.
    Fault {
        step: String,
    },
    /// Who uses how much memory; process ids are those of the asker's namespace.
    Usage,
    /// The memory in use by processes of a cgroup.
    CgroupUsage {
        gpu: u32,
        cgroup: CgroupId,
    },
    /// The limit and the use of the asker's own cgroup on a GPU.
    OwnLimit {
        gpu: u32,
    },
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Done,
    Devices(Vec<Device>),
    Version(String),
    Context(u64),
    Memory {
        free: u64,
        total: u64,
    },
    Ticket(String),
    /// Whether somebody was ended.
    Evicted(bool),
    Fault(Option<FaultAction>),
    Usage(Vec<Use>),
    Bytes(u64),
    Limit(Option<(u64, u64)>),
}

/// What an MPS program is to do at a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultAction {
    Fail,
    Kill,
}

/// Memory that a process uses on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    pub pid: u32,
    pub device: DeviceId,
    pub bytes: u64,
    /// It is a client of an MPS server.
    pub mps_client: bool,
}

/// A cgroup, by its directory: the same whatever mount leads to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CgroupId {
    pub device: u64,
    pub inode: u64,
}

/// What a request comes to.
pub type Outcome = Result<Answer, CudaError>;

/// A line-wise connection between two simulated programs.
#[derive(Debug)]
pub struct Connection {
    reader: BufReader<UnixStream>,
}

impl Connection {
    pub fn open(path: &Path) -> std::io::Result<Connection> {
        Ok(Connection::from(UnixStream::connect(path)?))
    }

    pub fn send(&mut self, message: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.reader.get_mut().write_all(&line)
    }

    /// `None` at the end.
    pub fn receive<T: DeserializeOwned>(&mut self) -> std::io::Result<Option<T>> {
        let mut line = String::new();
        match self.reader.read_line(&mut line)? {
            0 => Ok(None),
            _ => Ok(Some(serde_json::from_str(&line)?)),
        }
    }

    pub fn ask<T: DeserializeOwned>(&mut self, message: &impl Serialize) -> std::io::Result<T> {
        self.send(message)?;
        self.receive()?.ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
    }

    pub fn stream(&self) -> &UnixStream {
        self.reader.get_ref()
    }
}

impl From<UnixStream> for Connection {
    fn from(stream: UnixStream) -> Connection {
        Connection { reader: BufReader::new(stream) }
    }
}

/// The kernel driver's socket of the node under this root.
pub fn socket(root: &Path) -> PathBuf {
    root.join(SOCKET)
}

/// Process, user and group at the other end.
#[allow(unsafe_code, reason = "the standard library has no stable way to ask for it")]
pub fn peer(stream: &UnixStream) -> std::io::Result<libc::ucred> {
    use std::os::fd::AsRawFd;
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the structure and its length live through the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(peer) } else { Err(std::io::Error::last_os_error()) }
}
