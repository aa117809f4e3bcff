//! Who holds a device that the driver says is in use. NVML lists processes that compute; a monitor that only keeps a
//! device node open is found by its open files.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::linux::fs::MetadataExt as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::inventory::Process;

/// Device major of `/dev/nvidia<N>` (Documentation/admin-guide/devices.txt of Linux).
const GPU_MAJOR: u32 = 195;

/// A device node by its numbers.
type Node = (u32, u32);

/// Processes other than this one that have a node of the GPU open, or, with `instance`, a capability of that GPU
/// instance. Needs the host's PID namespace to see all.
pub fn holders(proc_root: &Path, gpu_minor: u32, instance: Option<u32>) -> Vec<Process> {
    let nodes: BTreeSet<Node> = match instance {
        None => BTreeSet::from([(GPU_MAJOR, gpu_minor)]),
        Some(id) => capability_nodes(proc_root, gpu_minor, id),
    };
    if nodes.is_empty() {
        return Vec::new();
    }
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let own = std::process::id();
    let mut holders: Vec<Process> = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own && has_open(*pid, &nodes))
        .map(process)
        .collect();
    holders.sort_by_key(|process| process.pid);
    holders
}

/// What `/proc` says of a process.
pub fn process(pid: u32) -> Process {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    Process { pid, comm: comm(pid), pod_uid: pod_of(&cgroups) }
}

/// The UID of the pod whose cgroup is named in a `/proc/<pid>/cgroup`: kubelet names it `pod<UID>` with the cgroupfs
/// driver, and `kubepods-burstable-pod<UID>.slice` with `_` for `-` with systemd's.
fn pod_of(cgroups: &str) -> Option<String> {
    cgroups.split(['/', '\n']).find_map(|name| {
        let (_, uid) = name.strip_suffix(".slice").unwrap_or(name).rsplit_once("pod")?;
        let uid = uid.replace('_', "-");
        let is_uuid = uid.len() == 36 && uid.chars().all(|c| c == '-' || c.is_ascii_hexdigit());
        is_uuid.then_some(uid)
    })
}

/// Resolves when none of these processes is left; never where that cannot be told.
pub async fn ended(processes: &[Process]) {
    // All at once, so that no pid can pass on to another process while another one is waited for.
    let running: Vec<Result<OwnedFd, Errno>> =
        processes.iter().filter_map(|process| open(process.pid)).collect();
    for process in running {
        #[allow(deprecated, reason = "sound for an OwnedFd; what replaces it is unsafe")]
        let end = process.ok().and_then(|fd| AsyncFd::with_interest(fd, Interest::READABLE).ok());
        let ended = match &end {
            Some(end) => end.readable().await.is_ok(),
            None => false,
        };
        if !ended {
            std::future::pending::<()>().await;
        }
    }
}

/// A descriptor that becomes readable when the process ends; `None` if it has.
fn open(pid: u32) -> Option<Result<OwnedFd, Errno>> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL);
    match pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Err(Errno::SRCH) => None,
        opened => Some(opened),
    }
}

/// Name of a process; empty if it is gone.
pub fn comm(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).map(|comm| comm.trim_end().to_owned()).unwrap_or_default()
}

fn has_open(pid: u32, nodes: &BTreeSet<Node>) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    files.flatten().filter_map(|file| fs::metadata(file.path()).ok()).any(|metadata| {
        let number = metadata.st_rdev();
        number != 0 && nodes.contains(&(libc::major(number), libc::minor(number)))
    })
}

/// The nodes of a GPU instance and all its compute instances, from the driver's capability files.
fn capability_nodes(proc_root: &Path, gpu_minor: u32, instance: u32) -> BTreeSet<Node> {
    let Some(major) = capability_major(proc_root) else { return BTreeSet::new() };
    let dir =
        proc_root.join("proc/driver/nvidia/capabilities").join(format!("gpu{gpu_minor}/mig/gi{instance}"));
    let below = fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path().join("access"));
    std::iter::once(dir.join("access"))
        .chain(below)
        .filter_map(|file| minor_of(&fs::read_to_string(file).ok()?))
        .map(|minor| (major, minor))
        .collect()
}

/// The line `DeviceFileMinor: 30` of a capability file.
fn minor_of(text: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
}

/// The line `238 nvidia-caps` of `/proc/devices`.
fn capability_major(proc_root: &Path) -> Option<u32> {
    let text = fs::read_to_string(proc_root.join("proc/devices")).ok()?;
    text.lines().find_map(|line| line.trim().strip_suffix("nvidia-caps")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_files_name_the_nodes() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("proc/driver/nvidia/capabilities/gpu1/mig/gi3");
        fs::create_dir_all(dir.join("ci0")).unwrap();
        fs::write(root.path().join("proc/devices"), "Character devices:\n195 nvidia\n238 nvidia-caps\n")
            .unwrap();
        let text = |minor| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        fs::write(dir.join("access"), text(165)).unwrap();
        fs::write(dir.join("ci0/access"), text(166)).unwrap();
        assert_eq!(capability_nodes(root.path(), 1, 3), BTreeSet::from([(238, 165), (238, 166)]));
        assert_eq!(capability_nodes(root.path(), 1, 4), BTreeSet::new());
    }

    #[test]
    fn a_pod_is_known_by_its_cgroup() {
        let pod = |cgroups| pod_of(cgroups);
        let uid = Some("0f8fad5b-d9cb-469f-a165-70867728950e".to_owned());
        let systemd = "0::/kubepods.slice/kubepods-burstable.slice/\
            kubepods-burstable-pod0f8fad5b_d9cb_469f_a165_70867728950e.slice/cri-containerd-11ab.scope\n";
        assert_eq!(pod(systemd), uid);
        assert_eq!(pod("0::/kubepods/besteffort/pod0f8fad5b-d9cb-469f-a165-70867728950e/11ab\n"), uid);
        // As seen from a cgroup namespace; and with the hierarchies of version 1.
        assert_eq!(pod("0::/../../pod0f8fad5b-d9cb-469f-a165-70867728950e/11ab\n"), uid);
        let both =
            "5:devices:/a/kubepods/pod0f8fad5b-d9cb-469f-a165-70867728950e/1\n0::/system.slice/x.service\n";
        assert_eq!(pod(both), uid);
        assert_eq!(pod("0::/system.slice/nvidia-persistenced.service\n"), None);
        assert_eq!(
            pod("0::/kubepods/burstable/pod3b0c44298fc1c149afbf4c8996fb9242/1\n"),
            None,
            "a static pod"
        );
        assert_eq!(pod(""), None);
    }

    #[tokio::test]
    async fn the_end_of_processes_is_noticed() {
        let mut children: Vec<_> =
            (0..2).map(|_| std::process::Command::new("sleep").arg("600").spawn().unwrap()).collect();
        let processes: Vec<Process> = children.iter().map(|child| process(child.id())).collect();
        let mut all = Box::pin(ended(&processes));
        assert!(futures::poll!(&mut all).is_pending());
        children[0].kill().unwrap();
        ended(&processes[..1]).await;
        assert!(futures::poll!(&mut all).is_pending(), "the other one goes on");
        children[1].kill().unwrap();
        all.await;
        for mut child in children {
            child.wait().unwrap();
        }
        ended(&processes).await;
    }

    #[test]
    fn a_process_that_has_a_node_open_is_found() {
        let null = fs::File::open("/dev/null").unwrap();
        let number = null.metadata().unwrap().st_rdev();
        let node = (libc::major(number), libc::minor(number));
        assert!(has_open(std::process::id(), &BTreeSet::from([node])));
        assert!(!has_open(std::process::id(), &BTreeSet::from([(GPU_MAJOR, 250)])));
    }
}
