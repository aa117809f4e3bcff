//! PID 1 of a namespace: collects the dead, and says that it is there.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

/// PID 1 of a cluster. It gets `/proc` of its namespace and the cluster's `/etc/hosts` (first argument), so that the
/// API server reaches kubelets by their nodes' names.
pub(crate) fn cluster(args: &[OsString]) -> Result<()> {
    die_with_parent()?;
    let hosts = args.first().context("the hosts file is missing")?;
    unshare(CloneFlags::CLONE_NEWNS).context("failed to make a mount namespace")?;
    no_propagation_out()?;
    bind(Path::new(hosts), Path::new("/etc/hosts"))?;
    proc()?;
    reap_for_ever()
}

/// Ends this process when its parent ends, however that happens.
pub(crate) fn die_with_parent() -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("failed to set the parent-death signal")
}

/// What is mounted in this namespace from here on stays in it.
pub(crate) fn no_propagation_out() -> Result<()> {
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .context("failed to make / a slave mount")
}

pub(crate) fn bind(from: &Path, to: &Path) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("failed to mount {} at {}", from.display(), to.display()))
}

pub(crate) fn proc() -> Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>).context("failed to mount /proc")
}

/// Says "ready" on standard output, then waits for children that it inherited, for ever.
pub(crate) fn reap_for_ever() -> Result<()> {
    let mut child_ended = SigSet::empty();
    child_ended.add(Signal::SIGCHLD);
    child_ended.thread_block().context("failed to block SIGCHLD")?;
    println!("ready");
    std::io::stdout().flush().context("failed to say that the namespace is ready")?;
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => {
                child_ended.wait().context("failed to wait for SIGCHLD")?;
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("failed to wait for children"),
        }
    }
}
