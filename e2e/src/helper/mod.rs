//! The program `kerf-e2e-helper`, which makes a cluster something that ends as a whole.
//!
//! ```text
//! harness (test, demo)
//!  │ pipe: its end is the signal to end everything, whatever ended the harness
//!  ├── watch ──── cluster-init   PID 1 of the cluster's PID namespace: when it dies, the kernel ends all of it
//!  │                ┊ ┊
//!  ├── enter ───────┘ └── etcd, kube-apiserver, …            children of `enter`, in the cluster's namespace
//!  └── enter ──────────── node ── node-init                  PID 1 of a node's PID and mount namespace
//!                                   ┊
//!                     enter ────────┘── containerd, kubelet, their shims and pods
//! ```
//! Nothing is ended by name or by a recorded process id: the watcher ends its own child, and the kernel the rest. No
//! mount is made outside the namespaces, so none can stay behind; cgroups and the cluster's folder are the watcher's
//! to remove.

mod cgroup;
mod enter;
mod init;
mod node;
mod watch;

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};

pub(crate) use cgroup::{create as create_cgroups, remove as remove_cgroups};
pub(crate) use node::NodeSpec;
pub(crate) use watch::{Hello, KEEP_LOGS, LOCK_FILE, remove_remains};

/// The file name of the program.
pub(crate) const PROGRAM: &str = "kerf-e2e-helper";

/// Runs the subcommand that the arguments name.
pub fn main() -> ExitCode {
    let mut args = env::args_os().skip(1);
    let command = args.next().and_then(|arg| arg.into_string().ok()).unwrap_or_default();
    let args: Vec<_> = args.collect();
    let done = match command.as_str() {
        "watch" => watch::main(&args),
        "cluster-init" => init::cluster(&args),
        "enter" => return enter::main(&args),
        "bound" => enter::bound(&args),
        "node" => node::main(&args),
        "node-init" => node::init(&args),
        _ => Err(anyhow::anyhow!("{PROGRAM} is run by Kerf's test cluster, not by hand")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{PROGRAM} {command}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Finds the program: `$KERF_E2E_HELPER`, else beside the running program or in the folder above it (a test's
/// executable is in `deps/`).
pub(crate) fn find() -> Result<PathBuf> {
    if let Some(path) = env::var_os("KERF_E2E_HELPER").map(PathBuf::from) {
        if !path.is_file() {
            bail!("KERF_E2E_HELPER={} is not a file", path.display());
        }
        return std::path::absolute(&path).context("KERF_E2E_HELPER");
    }
    let own = env::current_exe().context("failed to find the running program")?;
    own.ancestors().skip(1).take(3).map(|dir| dir.join(PROGRAM)).find(|path| path.is_file()).with_context(
        || format!("{PROGRAM} is not beside {}; run `cargo build -p kerf-e2e --bins` first", own.display()),
    )
}
