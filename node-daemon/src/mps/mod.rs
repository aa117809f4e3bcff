//! MPS (NVIDIA's Multi-Process Service), which lets the shares of a GPU or of a MIG instance onto it side by side: one control
//! daemon with one server for each [`crate::carrier`] of shares, in a pod of its own, so that it outlives this process.
//!
//! ```text
//!  <dir>/<carrier>/config.toml   what a control daemon of protocol 3 begins with: all namespaces with their limits
//!  <dir>/<carrier>/pipe/         its pipe directory; kerf/<namespace> below it is what a container gets
//!  <dir>/<carrier>/log/          its logs
//!  <dir>/<carrier>/shm/          /dev/shm of server and clients
//! ```
//!
//! - Protocol 3 (driver 615 and later) has a namespace for each share, with limits of its own. A client picks its namespace
//!   by its pipe directory, so it gets no other one mounted.
//! - Protocol 2 has one limit for all clients of a server: shares of one size. The limits are in the control daemon's own
//!   environment: there is no moment at which a server of its runs without.

pub mod control;
pub mod pods;

use std::path::{Path, PathBuf};

use kerf_crds::gpu_node::WantedShare;

use crate::carrier::Part;

/// The server's name (protocol 3).
pub const SERVER: &str = "kerf";

/// Program of the control daemon, below the driver root; the server's is beside it.
pub const PROGRAM: &str = "usr/bin/nvidia-cuda-mps-control";

/// First driver branch with protocol 3.
const V3_SINCE: u32 = 615;

/// Bytes in an address of a Unix socket, without the NUL at its end.
const SOCKET_PATH: usize = 107;

/// How a control daemon is talked to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    #[default]
    V2,
    V3,
}

impl Protocol {
    /// By the driver's version, `615.43.02`.
    pub fn of_driver(version: &str) -> Self {
        let branch = version.split('.').next().and_then(|branch| branch.parse::<u32>().ok());
        if branch.is_some_and(|branch| branch >= V3_SINCE) { Self::V3 } else { Self::V2 }
    }

    /// What a limit on memory is counted in: it is rounded down to it, so that no sum exceeds what is there.
    pub fn unit(self) -> u64 {
        match self {
            Self::V2 => 1 << 20,
            Self::V3 => 1 << 10,
        }
    }
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::V2 => "protocol 2",
            Self::V3 => "protocol 3",
        })
    }
}

/// Clients that one server takes, by the version of CUDA: 60 since 13.1 (driver 590), before that 48, on Volta and later.
pub fn max_clients(cuda_version: &str) -> u32 {
    let mut numbers = cuda_version.split('.').map(|number| number.parse::<u32>().unwrap_or_default());
    let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    if version >= (13, 1) { 60 } else { 48 }
}

/// Limits as MPS takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limits {
    /// Bytes for each process.
    pub memory: u64,
    /// Percent of the multiprocessors of what carries them.
    pub percent: u32,
}

impl Limits {
    /// What a share comes to on a part of a GPU: memory rounded down, compute rounded up, and all of the part at most.
    pub fn of(share: &WantedShare, protocol: Protocol, part: Part) -> Self {
        let unit = protocol.unit();
        let of_part = u64::from(share.compute_milli) * u64::from(part.all);
        let percent = of_part.div_ceil(1000 * u64::from(part.own).max(1)).min(100);
        Self { memory: share.memory_bytes / unit * unit, percent: percent as u32 }
    }

    /// A whole number with the largest unit that leaves it one.
    pub fn memory_text(&self) -> String {
        let units = [(1 << 30, 'G'), (1 << 20, 'M'), (1 << 10, 'K')];
        let (size, letter) =
            units.into_iter().find(|(size, _)| self.memory.is_multiple_of(*size)).unwrap_or((1 << 10, 'K'));
        format!("{}{letter}", self.memory / size)
    }

    /// Whether MPS says that just these are in force. It may print fewer digits than it was given (`10G` for 10.5 GiB).
    pub fn agree(&self, said: &Said) -> bool {
        let memory = said.memory.trim().trim_end_matches('B');
        let digits = memory.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &memory[digits.len()..] {
            "" => Some(1),
            "K" => Some(1 << 10),
            "M" => Some(1 << 20),
            "G" => Some(1 << 30),
            _ => None,
        };
        let memory = unit.zip(digits.parse::<u64>().ok());
        let percent = said.percent.trim().trim_end_matches('%').parse::<f64>();
        memory.is_some_and(|(unit, number)| number == self.memory / unit)
            && percent.is_ok_and(|percent| percent == f64::from(self.percent))
    }
}

impl std::fmt::Display for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} and {} %", self.memory_text(), self.percent)
    }
}

/// Limits in MPS' own words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    pub memory: String,
    pub percent: String,
}

/// Name of a share's namespace: MPS takes small letters, digits and `_`.
pub fn namespace(share: &str) -> String {
    share.chars().filter(|c| *c != '-').collect()
}

/// Whether a namespace is a share's.
pub fn is_namespace(name: &str) -> bool {
    name.len() == 32 && name.chars().all(|c| c.is_ascii_hexdigit() && !c.is_ascii_uppercase())
}

/// The file that a control daemon of protocol 3 begins with.
pub fn config(device: &str, namespaces: &[(String, Limits)]) -> String {
    let mut text =
        format!("schema_version = \"1.0\"\n\n[servers.{SERVER}]\nallowed_devices = \"{device}\"\n");
    for (name, limits) in namespaces {
        text.push_str(&format!(
            "\n[servers.{SERVER}.namespaces.{name}]\npinned_memory_limit = \"{}\"\nactive_thread_percentage = \"{}\"\n",
            limits.memory_text(),
            limits.percent
        ));
    }
    text
}

/// Where the files of all carriers are, as one process sees them.
#[derive(Clone, Debug)]
pub struct Paths(PathBuf);

impl Paths {
    /// Below `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// Of the carrier with this name.
    pub fn of(&self, carrier: &str) -> CarrierPaths {
        CarrierPaths(self.0.join(carrier))
    }
}

/// Where the files of one carrier are.
#[derive(Clone, Debug)]
pub struct CarrierPaths(PathBuf);

impl CarrierPaths {
    pub fn pipe(&self) -> PathBuf {
        self.0.join("pipe")
    }

    pub fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    pub fn shm(&self) -> PathBuf {
        self.0.join("shm")
    }

    pub fn config(&self) -> PathBuf {
        self.0.join("config.toml")
    }

    /// The pipe directory that a share's processes are given.
    pub fn client_pipe(&self, protocol: Protocol, share: &str) -> PathBuf {
        match protocol {
            Protocol::V2 => self.pipe(),
            Protocol::V3 => self.pipe().join(SERVER).join(namespace(share)),
        }
    }

    /// Makes the directories. Any user may be a client.
    pub fn make(&self) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt as _;
        for (path, mode) in [(self.pipe(), 0o755), (self.log(), 0o755), (self.shm(), 0o1777)] {
            std::fs::create_dir_all(&path)?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Takes away what clients have left there, which is not for those who come after them. Links are not followed.
    pub fn clear(&self) -> std::io::Result<()> {
        for path in [self.pipe(), self.shm()] {
            match std::fs::remove_dir_all(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// By how many bytes the path of a share's socket is too long for one; 0 if it is not.
    pub fn too_long(&self) -> usize {
        let socket = self.client_pipe(Protocol::V3, &"0".repeat(32)).join("control");
        socket.as_os_str().len().saturating_sub(SOCKET_PATH)
    }
}

/// What MPS needs on this node.
#[derive(Clone, Debug)]
pub struct Mps {
    /// Directory of the driver's programs, as this process sees it.
    driver_root: PathBuf,
    /// As this process and the servers' pods see them.
    pub paths: Paths,
    pub pods: pods::ServerPods,
    /// Root of the cgroups, as this process sees it.
    pub cgroup_root: PathBuf,
}

impl Mps {
    pub fn new(driver_root: &Path, dir: &Path, cgroup_root: &Path, pods: pods::ServerPods) -> Self {
        Self {
            driver_root: driver_root.to_owned(),
            paths: Paths::new(dir),
            pods,
            cgroup_root: cgroup_root.to_owned(),
        }
    }

    /// The control daemon's program.
    pub fn program(&self) -> PathBuf {
        self.driver_root.join(PROGRAM)
    }

    /// The control daemon of the carrier with this name.
    pub fn control(&self, carrier: &str, protocol: Protocol) -> control::Control {
        control::Control { program: self.program(), pipe: self.paths.of(carrier).pipe(), protocol }
    }
}

#[cfg(test)]
mod tests {
    use kerf_crds::gpu_node::Placement;

    use super::*;

    fn share(memory_bytes: u64, compute_milli: u32) -> WantedShare {
        WantedShare { memory_bytes, compute_milli, ..WantedShare::default() }
    }

    #[test]
    fn versions_decide() {
        assert_eq!(Protocol::of_driver("580.95.05"), Protocol::V2);
        assert_eq!(Protocol::of_driver("615.43.02"), Protocol::V3);
        assert_eq!(Protocol::of_driver(""), Protocol::V2);
        assert_eq!(["12.8", "13.0", "13.1", "14.0", ""].map(max_clients), [48, 48, 60, 60, 48]);
    }

    #[test]
    fn sizes_are_rounded_as_stated_and_written_whole() {
        let limits = |bytes, milli, protocol| Limits::of(&share(bytes, milli), protocol, Part::WHOLE);
        let text = |bytes, protocol| limits(bytes, 1, protocol).memory_text();
        assert_eq!(text(10 << 30, Protocol::V2), "10G");
        assert_eq!(text((10 << 30) + 1023, Protocol::V3), "10G");
        assert_eq!(text((10 << 30) + 1024, Protocol::V3), "10485761K");
        assert_eq!(text((10 << 30) + (1 << 20) + 1024, Protocol::V2), "10241M");
        assert_eq!(
            [1, 1000, 1001, 30_000].map(|milli| limits(0, milli, Protocol::V3).percent),
            [1, 1, 2, 30]
        );
    }

    #[test]
    fn compute_is_stated_of_the_whole_gpu_and_limited_in_percent_of_the_part() {
        // 3g.40gb of an A100: 42 of 98, which is 42.857 % of it.
        let percent = |milli| Limits::of(&share(0, milli), Protocol::V3, Part { own: 42, all: 98 }).percent;
        assert_eq!([1, 10_000, 21_000, 42_000, 43_000, 100_000].map(percent), [1, 24, 49, 98, 100, 100]);
        assert_eq!(Part { own: 42, all: 98 }.most_milli(), 43_000, "whole percents, as requests have them");
        assert_eq!(Part::WHOLE.most_milli(), 100_000);
    }

    #[test]
    fn what_mps_prints_is_compared_by_its_own_digits() {
        let limits = Limits { memory: (10 << 30) + (512 << 20), percent: 30 };
        let agree = |memory: &str, percent: &str| {
            limits.agree(&Said { memory: memory.into(), percent: percent.into() })
        };
        assert!(agree("10752M", "30") && agree("10G", "30.0") && agree("11274289152", "30%"));
        for (memory, percent) in
            [("11G", "30"), ("10753M", "30"), ("10752M", "31"), ("", "30"), ("10752M", "-")]
        {
            assert!(!agree(memory, percent), "{memory} {percent}");
        }
    }

    #[test]
    fn a_socket_fits_below_the_usual_directory_whatever_the_carriers_name() {
        let longest = kerf_crds::names::gpu_name("GPU-3f2a9c1d-0000-4000-8000-000000000001", usize::MAX);
        let longest = crate::carrier::name(&longest, Some(Placement { start: 9, size: 12 }));
        assert_eq!(Paths::new("/run/kerf/mps").of(&longest).too_long(), 0);
        assert!(Paths::new("/".repeat(60)).of(&longest).too_long() > 0);
        assert!(is_namespace(&namespace("0f8fad5b-d9cb-469f-a165-70867728950e")) && !is_namespace("default"));
    }

    #[test]
    fn what_a_tenant_left_is_cleared_and_nothing_that_it_points_to() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("file"), "").unwrap();
        let paths = Paths::new(dir.path().join("mps")).of("gpu-1");
        paths.clear().expect("nothing is there yet");
        paths.make().unwrap();
        std::fs::write(paths.shm().join("secret"), "of the last tenant").unwrap();
        std::os::unix::fs::symlink(&outside, paths.shm().join("link")).unwrap();
        std::os::unix::fs::symlink(&outside, paths.pipe().join("link")).unwrap();
        std::fs::write(paths.config(), "").unwrap();
        paths.clear().unwrap();
        paths.make().unwrap();
        assert_eq!(std::fs::read_dir(paths.shm()).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(paths.pipe()).unwrap().count(), 0);
        assert!(outside.join("file").exists() && paths.config().exists());
    }

    #[test]
    fn the_file_names_every_namespace() {
        let limits = Limits { memory: 8 << 30, percent: 25 };
        let text = config("GPU-1", &[("ab".into(), limits)]);
        assert!(text.contains("allowed_devices = \"GPU-1\""));
        assert!(text.ends_with(
            "[servers.kerf.namespaces.ab]\npinned_memory_limit = \"8G\"\nactive_thread_percentage = \"25\"\n"
        ));
    }
}
