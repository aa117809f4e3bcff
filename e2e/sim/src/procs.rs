//! Who uses which GPU.
//!
//! A process is a client of the simulated driver exactly while it has a device node open. There is no driver
//! behind the nodes, so clients open them with `O_PATH`; such descriptors count. Found are the processes that
//! the caller's `/proc` shows, as on hardware, where a client in another PID namespace has no pid for the
//! caller.
//!
//! | open | the process is |
//! |---|---|
//! | `nvidia<G>` and a compute instance's capability | running on that MIG device; listed |
//! | capabilities of an instance, but not `nvidia<G>` | holding a handle to the instance, as a monitor does; blocks its destruction, not listed |
//! | `nvidia<G>` and no capability of G | a client of the whole GPU; blocks a change of MIG mode. Listed there if the GPU is not in MIG mode and it has `nvidia-uvm` open too, which every program that computes opens and a monitor does not |
//!
//! Which node does a descriptor belong to, when several are simulated on one host? A path outside of `/dev`
//! (`/some/root/dev/nvidia0`) belongs to the root in which the very same inode lies. A path in `/dev` was made
//! for a container and says nothing: it counts by its device number, if the process is in the node's PID
//! namespace ([`crate::SimNode::set_pid_namespace`]) or one below it. A node without one counts the containers of
//! all.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::caps::Capability;
use crate::tree::{CAPS_MAJOR, MAX_GPU_MINOR, NVIDIA_MAJOR, UVM_MAJOR};

/// One process and what it has open of the simulated driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Client {
    pub pid: u32,
    /// Device minors of the GPUs whose node it has open.
    pub gpus: BTreeSet<u32>,
    /// Capabilities that it has open.
    pub capabilities: BTreeSet<Capability>,
    /// Whether it has `nvidia-uvm` open.
    pub computes: bool,
}

impl Client {
    /// Whether it is a running process of this MIG device.
    pub fn runs_on(&self, gpu: u32, gi: u32, ci: u32) -> bool {
        self.gpus.contains(&gpu) && self.capabilities.contains(&Capability::ComputeInstance { gpu, gi, ci })
    }

    /// Whether it uses the GPU as a whole.
    pub fn whole_gpu(&self, minor: u32) -> bool {
        self.gpus.contains(&minor)
            && !self.capabilities.iter().any(|capability| gpu_of(*capability) == Some(minor))
    }
}

fn gpu_of(capability: Capability) -> Option<u32> {
    match capability {
        Capability::Config | Capability::Monitor => None,
        Capability::GpuInstance { gpu, .. } | Capability::ComputeInstance { gpu, .. } => Some(gpu),
    }
}

/// All clients at one moment.
#[derive(Clone, Debug, Default)]
pub struct Clients(pub Vec<Client>);

impl Clients {
    /// No clients, for a caller that knows.
    pub fn none() -> Clients {
        Clients::default()
    }

    /// Looks through `/proc` for clients of the node under `root`, whose containers are in `namespace`.
    pub fn scan(root: &Path, namespace: Option<u64>) -> Clients {
        let Ok(entries) = std::fs::read_dir("/proc") else { return Clients::none() };
        let clients = entries
            .filter_map(Result::ok)
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter_map(|pid| client(root, namespace, pid))
            .collect();
        Clients(clients)
    }

    /// Those with any handle to the GPU or to an instance of it.
    pub fn of_gpu(&self, minor: u32) -> impl Iterator<Item = &Client> {
        self.0.iter().filter(move |client| {
            client.gpus.contains(&minor) || client.capabilities.iter().any(|cap| gpu_of(*cap) == Some(minor))
        })
    }

    /// Those with a handle to the GPU instance or to a compute instance in it.
    pub fn of_gpu_instance(&self, minor: u32, id: u32) -> impl Iterator<Item = &Client> {
        self.0.iter().filter(move |client| {
            client.capabilities.iter().any(|capability| match *capability {
                Capability::GpuInstance { gpu, gi } | Capability::ComputeInstance { gpu, gi, .. } => {
                    gpu == minor && gi == id
                }
                Capability::Config | Capability::Monitor => false,
            })
        })
    }

    /// Those with a handle to the compute instance.
    pub fn of_compute_instance(&self, minor: u32, gi: u32, ci: u32) -> impl Iterator<Item = &Client> {
        let wanted = Capability::ComputeInstance { gpu: minor, gi, ci };
        self.0.iter().filter(move |client| client.capabilities.contains(&wanted))
    }
}

/// What the process has open; `None` if nothing, or if it ended meanwhile.
fn client(root: &Path, namespace: Option<u64>, pid: u32) -> Option<Client> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let mut client = Client { pid, ..Client::default() };
    for entry in std::fs::read_dir(&folder).ok()?.filter_map(Result::ok) {
        let path = entry.path();
        // Most descriptors are ruled out by their name alone, which costs much less than a look at the file.
        let Ok(target) = std::fs::read_link(&path) else { continue };
        let Some(node) = Node::of_path(&target) else { continue };
        let Ok(meta) = std::fs::metadata(&path) else { continue };
        if !meta.file_type().is_char_device() {
            continue;
        }
        let ours = match node.in_root {
            Some(relative) => same_file(&meta, &root.join(relative)),
            None => namespace.is_none_or(|namespace| is_within(pid, namespace)),
        };
        if !ours {
            continue;
        }
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        if major == NVIDIA_MAJOR && minor <= MAX_GPU_MINOR {
            client.gpus.insert(minor);
        } else if (major, minor) == (UVM_MAJOR, 0) {
            client.computes = true;
        } else if major == CAPS_MAJOR
            && let Some(capability) = Capability::of_minor(minor)
        {
            client.capabilities.insert(capability);
        }
    }
    let found = !client.gpus.is_empty() || !client.capabilities.is_empty();
    found.then_some(client)
}

fn same_file(meta: &std::fs::Metadata, path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|ours| (ours.dev(), ours.ino()) == (meta.dev(), meta.ino()))
}

/// The PID namespace of a process, by the number of its file.
pub fn pid_namespace(pid: u32) -> std::io::Result<u64> {
    Ok(std::fs::metadata(format!("/proc/{pid}/ns/pid"))?.ino())
}

/// The number by which the process `seer` knows a process (both in this process's numbering); `None` if it cannot see it.
pub fn pid_seen_by(seer: u32, pid: u32) -> Option<u32> {
    if !is_within(pid, pid_namespace(seer).ok()?) {
        return None;
    }
    // The numbers in each namespace from this process's own down to the process's.
    let numbers = |pid: u32| -> Option<Vec<u32>> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        line.split_whitespace().map(|number| number.parse().ok()).collect()
    };
    numbers(pid)?.get(numbers(seer)?.len() - 1).copied()
}

/// Whether a process is in the PID namespace or in one below it.
fn is_within(pid: u32, namespace: u64) -> bool {
    let mut current = File::open(format!("/proc/{pid}/ns/pid")).ok();
    while let Some(file) = current {
        if file.metadata().is_ok_and(|meta| meta.ino() == namespace) {
            return true;
        }
        current = parent(&file);
    }
    false
}

/// The namespace above; `None` at the top, which is what the caller may see.
#[allow(unsafe_code, reason = "the standard library has no way to ask for it")]
fn parent(namespace: &File) -> Option<File> {
    const NS_GET_PARENT: libc::c_ulong = 0xb702;
    // SAFETY: the descriptor is open; the new one that comes back is owned by the file at once.
    unsafe {
        let descriptor = libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT);
        (descriptor >= 0).then(|| File::from_raw_fd(descriptor))
    }
}

struct Node {
    /// The part from `dev/` on, if something stands before it.
    in_root: Option<PathBuf>,
}

impl Node {
    /// Takes a path apart if it can be one of our device nodes.
    fn of_path(path: &Path) -> Option<Node> {
        const MARK: &[u8] = b"/dev/nvidia";
        let bytes = path.as_os_str().as_bytes();
        let bytes = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
        let at = bytes.windows(MARK.len()).rposition(|window| window == MARK)?;
        let relative = Path::new(OsStr::from_bytes(&bytes[at + 1..])).to_owned();
        Some(Node { in_root: (at > 0).then_some(relative) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(gpus: &[u32], capabilities: &[Capability]) -> Client {
        Client {
            pid: 7,
            gpus: gpus.iter().copied().collect(),
            capabilities: capabilities.iter().copied().collect(),
            computes: false,
        }
    }

    #[test]
    fn what_is_open_says_what_a_process_is() {
        let gi = Capability::GpuInstance { gpu: 1, gi: 2 };
        let ci = Capability::ComputeInstance { gpu: 1, gi: 2, ci: 0 };
        assert!(client(&[1], &[gi, ci]).runs_on(1, 2, 0));
        assert!(!client(&[1], &[gi, ci]).whole_gpu(1));
        assert!(!client(&[], &[gi, ci]).runs_on(1, 2, 0));
        assert!(client(&[1], &[Capability::Config]).whole_gpu(1));
        assert!(client(&[0, 1], &[gi, ci]).whole_gpu(0));

        let clients = Clients(vec![client(&[], &[gi])]);
        assert_eq!(clients.of_gpu_instance(1, 2).count(), 1);
        assert_eq!(clients.of_gpu_instance(1, 3).count(), 0);
        assert_eq!(clients.of_compute_instance(1, 2, 0).count(), 0);
        assert_eq!(clients.of_gpu(1).count(), 1);
    }

    #[test]
    fn paths_of_containers_and_of_roots_are_told_apart() {
        assert!(Node::of_path(Path::new("/dev/nvidia0")).unwrap().in_root.is_none());
        assert!(Node::of_path(Path::new("/dev/nvidia-caps/nvidia-cap3")).unwrap().in_root.is_none());
        let node = Node::of_path(Path::new("/tmp/a/dev/nvidia-caps/nvidia-cap3 (deleted)")).unwrap();
        assert_eq!(node.in_root.unwrap(), Path::new("dev/nvidia-caps/nvidia-cap3"));
        assert!(Node::of_path(Path::new("/dev/null")).is_none());
    }
}
