//! MPS: control daemon, servers, and what they tell their clients. Section names are those of NVIDIA's documentation
//! of MPS, release 615 (<https://docs.nvidia.com/deploy/mps/>), except where another one is given.

pub mod config;
pub mod control;
mod log;
pub mod server;
pub mod v2;
pub mod v3;
mod values;

pub use values::{Limit, find, pinned_limits, sms, visible};

use serde::{Deserialize, Serialize};

use crate::kernel::protocol::{CudaError, Device, DeviceId};

/// Connections of all clients of a device together. "Clients": 16 before Volta; 48 since; 60 since r590, each with the
/// default of two connections; fewer clients if they ask for more. "The maximum number of clients (48) is lowered
/// proportionally to the Compute Instance size" (MIG User Guide, CUDA Concurrency Mechanisms): `part` of so many compute
/// slices.
pub fn connections(driver_branch: u32, capability: i32, part: (u32, u32)) -> u32 {
    let clients = match (capability, driver_branch) {
        (i32::MIN..7, _) => 16,
        (_, 0..590) => 48,
        _ => 60,
    };
    2 * (clients * part.0 / part.1.max(1)).max(1)
}

/// The socket in each pipe directory.
pub const SOCKET: &str = "control";

/// What is said on a `control` socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// A person or a program that manages: a command line, by words.
    Command { words: Vec<String> },
    /// Which protocol the daemon speaks.
    Protocol,
    /// A CUDA program that begins.
    Client { partition: Option<String>, percentage_set: bool, command: String },
    /// Of a connected client: it lacks memory.
    Pressure { device: DeviceId },
    /// Of a connected client: it has made the GPU fault.
    Fault { device: DeviceId },
}

/// What comes back.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Output {
        text: String,
        failed: bool,
    },
    Protocol(u32),
    /// The server to connect to, by its socket's name in the pipe directory.
    Server(String),
    Welcome(Box<Welcome>),
    Refused(CudaError),
    Evicted(bool),
    Done,
}

/// What a server tells its client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// Lets it into the GPUs; see [`crate::kernel`].
    pub ticket: String,
    pub devices: Vec<OfferedDevice>,
    /// Percentage of the SMs.
    pub percentage: Option<f64>,
    /// The percentage holds whatever the client's environment says (v3), instead of only bounding it (v2).
    pub percentage_overrides: bool,
    /// A file in `/dev/shm` that server and client share.
    pub shared_memory: String,
    /// Whether the server can end those who borrow memory.
    pub evicts: bool,
}

/// A device of a server, with what its client may have of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OfferedDevice {
    pub device: Device,
    /// Bytes of pinned memory for each client process.
    pub pinned: Option<u64>,
    /// SMs of the client's partition.
    pub partition_sms: Option<u32>,
}
