//! The inside of a node: a mount, PID, UTS and IPC namespace in which each path that Kubernetes and Kerf use in
//! production is the node's own.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::sethostname;
use serde::{Deserialize, Serialize};

use super::init::{bind, die_with_parent, no_propagation_out, proc, reap_for_ever};

/// Folders of the host that a node sees as a copy on write, so that mount points can be made in them.
const COPIED: [&str; 4] = ["/etc", "/opt", "/usr/local", "/var/lib"];

/// What a node's namespace is made of. The folders are there before it starts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NodeSpec {
    pub(crate) name: String,
    /// The cluster's `hosts` file.
    pub(crate) hosts: PathBuf,
    /// An empty folder for the copies on write.
    pub(crate) scratch: PathBuf,
    /// Source and target of each folder, in the order of mounting. `/run` comes first.
    pub(crate) binds: Vec<(PathBuf, PathBuf)>,
    /// Files of `/proc` that the node sees with other content: what kubelet and the CNI plugins would set on the host,
    /// as if it were set already, and the boot id, which changes with a reboot.
    pub(crate) proc_files: Vec<(PathBuf, PathBuf)>,
    pub(crate) machine_id: String,
}

/// `node <spec file>`: makes the namespaces and starts their PID 1. This process stays outside the PID namespace, and is
/// where `enter` finds the namespaces.
pub(crate) fn main(args: &[OsString]) -> Result<()> {
    let spec = args.first().context("the node's description is missing")?;
    let own = std::env::current_exe().context("failed to find the running program")?;
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWPID,
    )
    .context("failed to make the node's namespaces")?;
    let status = Command::new(own)
        .arg("node-init")
        .arg(spec)
        .stdin(Stdio::null())
        .status()
        .context("failed to start the node's PID 1")?;
    bail!("the node's PID 1 ended ({status})")
}

/// `node-init <spec file>`: PID 1 of the node.
pub(crate) fn init(args: &[OsString]) -> Result<()> {
    die_with_parent()?;
    let path = Path::new(args.first().context("the node's description is missing")?);
    let spec: NodeSpec = serde_json::from_slice(
        &fs::read(path).with_context(|| format!("failed to read {}", path.display()))?,
    )
    .with_context(|| format!("failed to parse {}", path.display()))?;
    sethostname(&spec.name).context("failed to set the host name")?;
    no_propagation_out()?;
    // Pods that ask for Bidirectional mount propagation need a shared mount.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SHARED, None::<&str>)
        .context("failed to make / a shared mount")?;
    copy_on_write(&spec.scratch)?;
    for (from, to) in &spec.binds {
        bind_folder(from, to)?;
    }
    if !Path::new("/var/run").is_symlink() {
        bind_folder(Path::new("/run"), Path::new("/var/run"))?;
    }
    for name in ["hosts", "machine-id", "hostname"] {
        let path = Path::new("/etc").join(name);
        if path.is_symlink() {
            fs::remove_file(&path)?;
        }
        fs::write(&path, "").with_context(|| format!("failed to write {}", path.display()))?;
    }
    fs::write("/etc/machine-id", format!("{}\n", spec.machine_id))
        .context("failed to write the machine id")?;
    fs::write("/etc/hostname", format!("{}\n", spec.name)).context("failed to write the host name")?;
    bind(&spec.hosts, Path::new("/etc/hosts"))?;
    proc()?;
    for (from, to) in &spec.proc_files {
        if to.exists() {
            bind(from, to)?;
        }
    }
    tmpfs(Path::new("/dev/shm"), "mode=1777")?;
    reap_for_ever()
}

/// Puts a copy on write over each folder of [`COPIED`]. The changes are in memory, and gone with the namespace.
fn copy_on_write(scratch: &Path) -> Result<()> {
    tmpfs(scratch, "mode=0755")?;
    for (index, folder) in COPIED.iter().enumerate() {
        let (upper, work) = (scratch.join(format!("upper{index}")), scratch.join(format!("work{index}")));
        fs::create_dir(&upper)?;
        fs::create_dir(&work)?;
        if !Path::new(folder).is_dir() {
            bail!("this machine has no folder {folder}, which a node needs");
        }
        let options = format!("lowerdir={folder},upperdir={},workdir={}", upper.display(), work.display());
        mount(Some("overlay"), *folder, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .with_context(|| format!("failed to mount an overlay at {folder}"))?;
    }
    Ok(())
}

/// Mounts a folder, making the target where it is missing. The mount starts a peer group of its own: else what is
/// mounted below one of the two paths would appear below the other.
fn bind_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("failed to create {}", to.display()))?;
    bind(from, to)?;
    for propagation in [MsFlags::MS_PRIVATE, MsFlags::MS_SHARED] {
        mount(None::<&str>, to, None::<&str>, propagation, None::<&str>)
            .with_context(|| format!("failed to set the mount propagation of {}", to.display()))?;
    }
    Ok(())
}

fn tmpfs(at: &Path, options: &str) -> Result<()> {
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options))
        .with_context(|| format!("failed to mount a tmpfs at {}", at.display()))
}
