//! Memory limits by cgroup: the driver keeps them, whatever a process does.

use std::fs;
use std::path::Path;

use super::error::{Code, Failure};
use super::geometry::Known;
use super::raw::{Library, MemoryLimits};
use crate::cgroups;
use crate::inventory::Gpu;

/// Size of the limit that a driver is tried with.
const TRIAL: u64 = 256 << 20;

/// Limits a cgroup, and believes only what the driver then says is in force.
pub fn limit_memory(library: &Library, gpu: &str, cgroup: &Path, bytes: u64) -> Result<(), Failure> {
    let wanted = MemoryLimits::at_most(bytes);
    let gpu = library.gpu(gpu)?;
    gpu.set_memory_limits(cgroup, wanted)?;
    match gpu.memory_limits(cgroup)? {
        (found, _) if found == wanted => Ok(()),
        _ => Err(Failure { call: "nvmlDeviceGetMemoryLimits", code: Code::INVALID_STATE }),
    }
}

/// Limits a container's own cgroup below that of its pod, where such limits nest: CUDA in it then reports the limit as the
/// GPU's memory. Where only the nearest one counts (the driver says so by refusing to tell of a cgroup without any), it
/// would take the place of the pod's, and nothing is done.
pub fn limit_container(library: &Library, gpu: &str, cgroup: &Path, bytes: u64) -> Result<(), Failure> {
    match library.gpu(gpu)?.memory_limits(cgroup) {
        Err(failure) if failure.code == Code::NOT_SUPPORTED => Ok(()),
        _ => limit_memory(library, gpu, cgroup, bytes),
    }
}

/// The limits in force on a cgroup.
pub fn memory_limits(library: &Library, gpu: &str, cgroup: &Path) -> Result<MemoryLimits, Failure> {
    library.gpu(gpu)?.memory_limits(cgroup).map(|(limits, _)| limits)
}

/// Takes the limits of a cgroup back.
pub fn lift_memory_limit(library: &Library, gpu: &str, cgroup: &Path) -> Result<(), Failure> {
    library.gpu(gpu)?.set_memory_limits(cgroup, MemoryLimits::NONE)
}

/// What a driver can do for shares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Version of the driver.
    pub driver: String,
    /// Version of CUDA that it supports.
    pub cuda: String,
    /// It limits the memory of cgroups.
    pub limits_memory: bool,
}

/// Finds out. A driver that was found to limit memory on this GPU with MIG off is not tried again before it has gone
/// (`departures`); one that was not is at each fresh look: it takes no time, and what was missing may have come.
pub fn facts(library: &Library, gpu: &Gpu, known: &mut Known, departures: u64, cgroup_root: &Path) -> Facts {
    let versions = library.versions();
    let mut limits_memory = known.limits_memory == Some(departures);
    if !limits_memory {
        limits_memory = can_limit_memory(library, &gpu.uuid, gpu.mig.enabled, cgroup_root);
        known.limits_memory = (limits_memory && !gpu.mig.enabled).then_some(departures);
    }
    Facts { driver: versions.driver, cuda: versions.cuda, limits_memory }
}

/// Whether the driver limits memory, by trying it on a cgroup made for that, where pods have theirs: where pods' cgroups
/// are not found, no pod could be limited. A GPU in MIG mode cannot be asked: there the driver's having the function at all
/// is the answer until the mode is off.
fn can_limit_memory(library: &Library, gpu: &str, mig: bool, cgroup_root: &Path) -> bool {
    let (Ok(raw), Some(parent)) = (library.gpu(gpu), cgroups::pods_parent(cgroup_root)) else { return false };
    if mig {
        let answer = raw.memory_limits(&parent);
        return !matches!(answer, Err(Failure { code: Code::FUNCTION_NOT_FOUND, .. }));
    }
    let trial = parent.join(format!("kerf-trial-{gpu}"));
    let made = fs::create_dir(&trial);
    if made.is_err() && !trial.is_dir() {
        return false;
    }
    let answer = limit_memory(library, gpu, &trial, TRIAL);
    if let Err(failure) = &answer {
        tracing::debug!(%failure, gpu, cgroup = %trial.display(), "the driver does not limit memory by cgroup");
    }
    let _ = raw.set_memory_limits(&trial, MemoryLimits::NONE);
    if let Err(error) = fs::remove_dir(&trial) {
        tracing::warn!(cgroup = %trial.display(), "a cgroup made for a trial cannot be removed: {error}");
    }
    answer.is_ok()
}
