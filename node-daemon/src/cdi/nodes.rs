//! The driver's device nodes, as the daemon finds them and as the host names them.
//!
//! A MIG device needs, beside the GPU's own node, two capability nodes: one for the GPU instance, one for the compute
//! instance. Their minor numbers are in `/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<I>/…access`; the nodes are
//! normally made by nvidia-modprobe when a program of the driver first asks for one, and here where that has not
//! happened yet.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::hook::HookPaths;
use super::spec::DeviceNode;
use crate::config::Config;

/// Nodes that every CUDA program opens. `nvidia-modeset` is for displays and is not handed out.
const CONTROL_NODES: [&str; 3] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"];

/// Name of the capability nodes' driver in `/proc/devices`.
const CAPS_DRIVER: &str = "nvidia-caps";

/// Why a device's nodes cannot be given to a container.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    #[error("{path} is missing: the driver makes it (nvidia-modprobe) when it is loaded on this node")]
    Missing { path: PathBuf },
    #[error("{path} has no line 'DeviceFileMinor: <number>'")]
    NoMinor { path: PathBuf },
    #[error("{path} lists no character device '{CAPS_DRIVER}': the driver is not loaded, or knows no MIG")]
    NoMajor { path: PathBuf },
    #[error("{device} ({uuid}) is not on this node any more")]
    Gone { device: String, uuid: String },
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Where the driver's files are.
#[derive(Clone, Debug)]
pub struct DriverFiles {
    /// Directory that has `dev`, as the daemon sees it.
    pub dev_root: PathBuf,
    /// The same as the host sees it.
    pub host_dev_root: PathBuf,
    /// Directory that has `proc`.
    pub proc_root: PathBuf,
    /// Files of MPS servers, as the host sees them.
    pub mps: crate::mps::Paths,
    /// What containers' hooks are, as the host sees them.
    pub hook: HookPaths,
}

impl From<&Config> for DriverFiles {
    fn from(config: &Config) -> Self {
        Self {
            dev_root: config.dev_root().to_owned(),
            host_dev_root: config.host_dev_root().to_owned(),
            proc_root: config.proc_root.clone(),
            mps: crate::mps::Paths::new(config.host_mps_dir()),
            hook: HookPaths::new(config.host_state_dir()),
        }
    }
}

impl DriverFiles {
    /// The control nodes that exist. `nvidia-uvm-tools` may be missing; without the others nothing runs.
    pub fn control_nodes(&self) -> Result<Vec<DeviceNode>, NodesError> {
        let mut nodes = Vec::new();
        for name in CONTROL_NODES {
            match self.existing(name) {
                Ok(node) => nodes.push(node),
                Err(NodesError::Missing { .. }) if name == "nvidia-uvm-tools" => {}
                Err(error) => return Err(error),
            }
        }
        Ok(nodes)
    }

    /// The node of a whole GPU: `/dev/nvidia<minor>`.
    pub fn gpu_node(&self, minor: u32) -> Result<DeviceNode, NodesError> {
        self.existing(&format!("nvidia{minor}"))
    }

    /// The nodes of a MIG device: the GPU's, the GPU instance's and the compute instance's capability. Makes the
    /// capability nodes where they are missing.
    pub fn mig_nodes(
        &self,
        gpu_minor: u32,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<Vec<DeviceNode>, NodesError> {
        let instance = self
            .proc_root
            .join(format!("proc/driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gpu_instance}"));
        let mut nodes = vec![self.gpu_node(gpu_minor)?];
        for access in [instance.join("access"), instance.join(format!("ci{compute_instance}/access"))] {
            nodes.push(self.capability_node(&access)?);
        }
        Ok(nodes)
    }

    fn capability_node(&self, access: &Path) -> Result<DeviceNode, NodesError> {
        let text = read(access)?;
        let minor = field(&text, "DeviceFileMinor")
            .and_then(|value| value.parse().ok())
            .ok_or_else(|| NodesError::NoMinor { path: access.to_owned() })?;
        let mode = field(&text, "DeviceFileMode").and_then(|value| value.parse().ok()).unwrap_or(0o444);
        let name = format!("nvidia-caps/nvidia-cap{minor}");
        self.make_if_missing(&name, minor, mode)?;
        Ok(self.node(&name))
    }

    fn make_if_missing(&self, name: &str, minor: u64, mode: u32) -> Result<(), NodesError> {
        let path = self.dev_root.join("dev").join(name);
        let devices = self.proc_root.join("proc/devices");
        let major = major_of(&read(&devices)?, CAPS_DRIVER)
            .ok_or_else(|| NodesError::NoMajor { path: devices.clone() })?;
        let device = makedev(major, minor);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.file_type().is_char_device() && found.rdev() == device => return Ok(()),
            // The major is dynamic: a node from before the driver was reloaded opens something else.
            Ok(_) => super::file::remove(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(super::file::with_path("look at", &path, error).into()),
        }
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)
                .map_err(|error| super::file::with_path("make", directory, error))?;
        }
        let permissions = Mode::from_bits_truncate(mode & 0o777);
        match mknod(&path, SFlag::S_IFCHR, permissions, device) {
            // nvidia-modprobe was faster.
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(error) => {
                return Err(super::file::with_path("make device node", &path, error.into()).into());
            }
        }
        // The process's umask must not take away what the driver grants.
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(permissions.bits());
        fs::set_permissions(&path, permissions)
            .map_err(|error| super::file::with_path("set the mode of", &path, error))?;
        Ok(())
    }

    fn existing(&self, name: &str) -> Result<DeviceNode, NodesError> {
        let path = self.dev_root.join("dev").join(name);
        if !path.exists() {
            return Err(NodesError::Missing { path });
        }
        Ok(self.node(name))
    }

    fn node(&self, name: &str) -> DeviceNode {
        let path = format!("/dev/{name}");
        let host_path = self.host_dev_root.join("dev").join(name).to_string_lossy().into_owned();
        DeviceNode {
            host_path: (host_path != path).then_some(host_path),
            path,
            permissions: Some("rw".to_owned()),
        }
    }
}

fn read(path: &Path) -> Result<String, NodesError> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(NodesError::Missing { path: path.to_owned() })
        }
        Err(error) => Err(super::file::with_path("read", path, error).into()),
        Ok(text) => Ok(text),
    }
}

/// The value of a `Name: value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The major number of a character device's driver in the text of `/proc/devices`.
fn major_of(devices: &str, driver: &str) -> Option<u64> {
    devices
        .lines()
        .take_while(|line| !line.starts_with("Block devices"))
        .filter_map(|line| line.trim().split_once(' '))
        .find(|(_, name)| *name == driver)
        .and_then(|(major, _)| major.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver() -> (tempfile::TempDir, DriverFiles) {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for node in ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset"] {
            write(&format!("dev/{node}"), "");
        }
        write(
            "proc/devices",
            "Character devices:\n195 nvidia\n238 nvidia-caps\n\nBlock devices:\n9 nvidia-caps\n",
        );
        let gi = "proc/driver/nvidia/capabilities/gpu0/mig/gi2";
        write(&format!("{gi}/access"), "DeviceFileMinor: 21\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        write(&format!("{gi}/ci0/access"), "DeviceFileMinor: 22\nDeviceFileMode: 292\n");
        let files = DriverFiles {
            dev_root: root.path().to_owned(),
            host_dev_root: "/run/nvidia/driver".into(),
            proc_root: root.path().to_owned(),
            mps: crate::mps::Paths::new("/run/kerf/mps"),
            hook: HookPaths::new("/var/lib/kerf"),
        };
        (root, files)
    }

    #[test]
    fn control_nodes_are_those_for_compute() {
        let (_root, files) = driver();
        let nodes = files.control_nodes().unwrap();
        let paths: Vec<_> = nodes.iter().map(|node| node.path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidiactl", "/dev/nvidia-uvm"], "tools are optional, displays are not ours");
        assert_eq!(nodes[0].host_path.as_deref(), Some("/run/nvidia/driver/dev/nvidiactl"));
    }

    #[test]
    fn a_missing_instance_or_node_is_named() {
        let (root, files) = driver();
        let error = files.mig_nodes(0, 3, 0).unwrap_err().to_string();
        assert!(error.contains("gpu0/mig/gi3/access"), "{error}");
        let error = files.gpu_node(7).unwrap_err().to_string();
        assert!(error.contains("dev/nvidia7"), "{error}");
        fs::remove_file(root.path().join("dev/nvidiactl")).unwrap();
        assert!(files.control_nodes().is_err());
        fs::write(root.path().join("proc/driver/nvidia/capabilities/gpu0/mig/gi2/access"), "x").unwrap();
        assert!(matches!(files.mig_nodes(0, 2, 0), Err(NodesError::NoMinor { .. })));
    }

    #[test]
    fn capability_nodes_are_made_with_the_drivers_numbers() {
        let (root, files) = driver();
        match files.mig_nodes(0, 2, 0) {
            Ok(nodes) => {
                let paths: Vec<_> = nodes.iter().map(|node| node.path.as_str()).collect();
                assert_eq!(
                    paths,
                    ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
                );
                let made = fs::metadata(root.path().join("dev/nvidia-caps/nvidia-cap22")).unwrap();
                assert_eq!(made.rdev(), makedev(238, 22));
                assert_eq!(made.mode() & 0o777, 0o444);
                files.mig_nodes(0, 2, 0).expect("they are there already");
            }
            // Device nodes need root; without it the error must say which node.
            Err(error) => assert!(error.to_string().contains("nvidia-cap21"), "{error}"),
        }
    }

    #[test]
    fn majors_are_those_of_character_devices() {
        assert_eq!(major_of("Character devices:\n  1 mem\n238 nvidia-caps\n", "nvidia-caps"), Some(238));
        assert_eq!(
            major_of("Character devices:\n  1 mem\n\nBlock devices:\n9 nvidia-caps\n", "nvidia-caps"),
            None
        );
        assert_eq!(major_of("238 nvidia-caps-imex-channels\n", "nvidia-caps"), None);
    }
}
