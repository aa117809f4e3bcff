//! The watcher: holds a cluster's namespace, and ends the cluster when its harness does.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::setsid;
use serde::{Deserialize, Serialize};

use super::cgroup;

/// Clusters that can run on a machine at once; each slot has ports and pod addresses of its own.
const SLOTS: u16 = 64;
/// What the harness writes to have the logs outlive the cluster.
pub(crate) const KEEP_LOGS: u8 = b'k';
/// Locked by the watcher for as long as the folder is its to remove.
pub(crate) const LOCK_FILE: &str = ".kerf-e2e-cluster";

/// What the watcher says when the cluster's namespace is there: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// A process whose `pid_for_children`, like its other namespaces, is the cluster's.
    pub(crate) init: u32,
    /// Below [`SLOTS`], held by no other cluster of this machine.
    pub(crate) slot: u16,
}

/// `watch <cluster folder>`: standard input is the harness's life line.
pub(crate) fn main(args: &[OsString]) -> Result<()> {
    let dir = Path::new(args.first().context("the cluster's folder is missing")?);
    // Ctrl-C goes to the harness; what that means for the cluster is known when the life line ends.
    setsid().context("failed to start a session")?;
    let mut harmless = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        harmless.add(signal);
    }
    harmless.thread_block().context("failed to block signals")?;
    let lock = File::create(dir.join(LOCK_FILE)).context("failed to create the lock file")?;
    lock.try_lock().context("failed to lock the cluster's folder")?;
    let mut keep_logs = false;
    let outcome = hold(dir, &mut keep_logs);
    let removed = remove_remains(dir, keep_logs || outcome.is_err());
    outcome.and(removed)
}

/// Starts the namespace, waits for the end of standard input, and ends the namespace.
fn hold(dir: &Path, keep_logs: &mut bool) -> Result<()> {
    let (slot, _reserved) = reserve_slot()?;
    unshare(CloneFlags::CLONE_NEWPID).context("failed to make a PID namespace; is this root?")?;
    let mut init = Command::new(std::env::current_exe().context("failed to find the running program")?)
        .arg("cluster-init")
        .arg(dir.join("hosts"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("failed to start the cluster's PID 1")?;
    let mut line = String::new();
    if let Some(stdout) = init.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).context("failed to read from the cluster's PID 1")?;
    }
    if line.trim() != "ready" {
        let status = init.wait().context("failed to wait for the cluster's PID 1")?;
        bail!("the cluster's PID 1 did not come up ({status})");
    }
    let hello = serde_json::to_string(&Hello { init: init.id(), slot })?;
    let mut out = io::stdout();
    // If nobody listens any more, the end of standard input is next.
    let _ = writeln!(out, "{hello}").and_then(|()| out.flush());

    let mut byte = [0];
    loop {
        match io::stdin().read(&mut byte) {
            Ok(0) => break,
            Ok(_) => *keep_logs |= byte[0] == KEEP_LOGS,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    end(&mut init, dir)
}

/// Kills PID 1 of the namespace, and with it everything in it. Returns when all of it is dead.
fn end(init: &mut Child, dir: &Path) -> Result<()> {
    let limit = Duration::from_secs(60);
    let begun = Instant::now();
    init.kill().context("failed to kill the cluster's PID 1")?;
    while init.try_wait().context("failed to wait for the cluster's PID 1")?.is_none() {
        if begun.elapsed() > limit {
            bail!("processes of the cluster are still there {} s after SIGKILL", limit.as_secs());
        }
        cgroup::thaw(Path::new(cgroup_of(dir)?));
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Removes what a cluster whose processes are dead left on the machine: cgroups, and its folder or all of it but the
/// logs.
pub(crate) fn remove_remains(dir: &Path, keep_logs: bool) -> Result<()> {
    let cgroups = cgroup::remove(Path::new(cgroup_of(dir)?));
    if keep_logs {
        for entry in fs::read_dir(dir).with_context(|| format!("failed to read {}", dir.display()))? {
            let path = entry?.path();
            if path.file_name().is_none_or(|name| name != "logs") {
                remove(&path)?;
            }
        }
    } else {
        remove(dir)?;
    }
    cgroups
}

fn remove(path: &Path) -> Result<()> {
    let removed =
        if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.with_context(|| format!("failed to remove {}", path.display()))
}

/// The cgroup of a cluster is named as its folder.
fn cgroup_of(dir: &Path) -> Result<&str> {
    dir.file_name()
        .and_then(|name| name.to_str())
        .filter(|name| name.starts_with("kerf-"))
        .with_context(|| format!("{} is not a cluster's folder", dir.display()))
}

/// A slot and the socket that holds it. The name is in the abstract namespace of Unix sockets, so it is as wide as what
/// it protects (the network namespace), it leaves no file, and it goes with the process.
fn reserve_slot() -> Result<(u16, UnixListener)> {
    let first = (std::process::id() % u32::from(SLOTS)) as u16;
    for step in 0..SLOTS {
        let slot = (first + step) % SLOTS;
        let address = SocketAddr::from_abstract_name(format!("kerf-e2e-slot-{slot}"))?;
        match UnixListener::bind_addr(&address) {
            Ok(socket) => return Ok((slot, socket)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error).context("failed to reserve ports and addresses"),
        }
    }
    bail!("{SLOTS} clusters are running on this machine; end some of them first")
}
