//! The OCI hook (`createRuntime`) of containers with a share of a GPU: asks the node daemon to limit the container's own
//! cgroup, so that CUDA in it reports the limit as the GPU's memory. The limit on the pod is in force without it, so it
//! never keeps a container from starting: whatever goes wrong is said on standard error, and the exit status is 0.
//!
//! ```text
//! kerf-cdi-hook <socket> <UID of the claim> <CDI device>   < the container's OCI state
//! ```
//!
//! It lies on the host and outlives the daemon. Nothing but the standard library and a JSON reader, so that it can be
//! linked statically and runs whatever C library the host has.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The daemon may be starting anew; a container is not kept waiting longer than this.
const PATIENCE: Duration = Duration::from_secs(5);

const BETWEEN_TRIES: Duration = Duration::from_millis(100);

fn main() {
    if let Err(why) = run() {
        eprintln!("kerf-cdi-hook: {why}; CUDA will report the whole GPU's memory, of which less can be had");
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, claim, device] = arguments.as_slice() else {
        return Err("usage: kerf-cdi-hook <socket> <claim> <device>".to_owned());
    };
    let mut state = String::new();
    std::io::stdin().read_to_string(&mut state).map_err(|e| format!("no OCI state: {e}"))?;
    let state: serde_json::Value = serde_json::from_str(&state).map_err(|e| format!("bad OCI state: {e}"))?;
    let pid = state["pid"].as_u64().ok_or("the OCI state has no pid")?;
    let end = Instant::now() + PATIENCE;
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= end => {
                return Err(format!("cannot connect to {socket}: {error}"));
            }
            Err(_) => std::thread::sleep(BETWEEN_TRIES),
        }
    };
    let mut answer = String::new();
    stream
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
        .and_then(|()| stream.write_all(format!("{claim} {device} {pid}\n").as_bytes()))
        .and_then(|()| stream.read_to_string(&mut answer).map(drop))
        .map_err(|error| format!("the node daemon does not answer: {error}"))?;
    match answer.trim() {
        "ok" => Ok(()),
        why => Err(why.to_owned()),
    }
}
