//! What the driver does: changes of the state, with NVML's errors in NVML's cases. Nothing here reads or
//! writes a file; who is a client of what is handed in.

use crate::geometry;
use crate::kernel::protocol::CgroupId;
use crate::model::{Mig, Model, Profile};
use crate::procs::Clients;
use crate::state::{
    ComputeInstance, EVENT_MIG_CONFIG, Gpu, GpuInstance, MemoryAccounting, MemoryLimit, MigUuids, State,
};
use crate::{NvmlError, uuid};

/// `NVML_COMPUTEMODE_EXCLUSIVE_PROCESS`; refused on a GPU in MIG mode.
pub const EXCLUSIVE_PROCESS: u32 = 3;
/// The first driver branch with limits on the memory of cgroups, and with the third protocol of MPS.
pub const MEMORY_LIMITS_SINCE: u32 = 615;

type Result<T> = std::result::Result<T, NvmlError>;

/// The cutting rules of a GPU that is in MIG mode.
fn in_mig_mode<'a>(gpu: &Gpu, model: &'a Model) -> Result<&'a Mig> {
    let mig = model.mig.as_ref().ok_or(NvmlError::NotSupported)?;
    if gpu.mig_current { Ok(mig) } else { Err(NvmlError::NotSupported) }
}

impl State {
    fn gpu_mut(&mut self, index: usize) -> Result<&mut Gpu> {
        let gpu = self.gpus.get_mut(index).ok_or(NvmlError::InvalidArgument)?;
        if gpu.lost { Err(NvmlError::GpuIsLost) } else { Ok(gpu) }
    }

    /// Creates a GPU instance and returns its id. `placement` is `(start, size)`.
    ///
    /// NOT_SUPPORTED outside MIG mode; INVALID_ARGUMENT for an unknown profile or a placement that the profile
    /// does not have; INSUFFICIENT_RESOURCES when slices, engines or ids are taken; IN_USE while an exclusive
    /// client holds the GPU.
    pub fn create_gpu_instance(
        &mut self,
        model: &Model,
        gpu: usize,
        profile: u32,
        placement: Option<(u32, u32)>,
        made_by: u32,
    ) -> Result<u32> {
        let exclusive = self.holds.iter().any(|hold| hold.gpu == gpu && hold.exclusive);
        let nth = self.creations + 1;
        let target = self.gpu_mut(gpu)?;
        let mig = in_mig_mode(target, model)?;
        let profile = mig.profile(profile).ok_or(NvmlError::InvalidArgument)?;
        if exclusive {
            return Err(NvmlError::InUse);
        }
        let start = geometry::place(target, mig, profile, placement)?;
        let id = geometry::instance_id(target, mig, start, profile.size)?;
        target.instances.push(GpuInstance {
            id,
            profile: profile.id,
            start,
            size: profile.size,
            nth,
            made_by,
            compute: Vec::new(),
        });
        target.counts.gpu_instances_created += 1;
        self.creations = nth;
        self.event(gpu, EVENT_MIG_CONFIG, 0, Some(id), None);
        Ok(id)
    }

    /// Destroys a GPU instance: INVALID_ARGUMENT if it is not there, IN_USE while it has a compute instance or
    /// a client.
    pub fn destroy_gpu_instance(&mut self, gpu: usize, id: u32, clients: &Clients) -> Result<()> {
        let minor = self.gpu_mut(gpu)?.minor;
        let held = self.holds.iter().any(|hold| hold.gpu == gpu && hold.gpu_instance == Some(id));
        let target = self.gpu_mut(gpu)?;
        let instance = target.instance(id).ok_or(NvmlError::InvalidArgument)?;
        if !instance.compute.is_empty() || held || clients.of_gpu_instance(minor, id).next().is_some() {
            return Err(NvmlError::InUse);
        }
        target.instances.retain(|instance| instance.id != id);
        target.counts.gpu_instances_destroyed += 1;
        self.event(gpu, EVENT_MIG_CONFIG, 0, Some(id), None);
        Ok(())
    }

    /// Creates a compute instance and returns its id; errors as for [`State::create_gpu_instance`], with
    /// NOT_SUPPORTED for a known profile that this GPU instance does not offer.
    pub fn create_compute_instance(
        &mut self,
        model: &Model,
        gpu: usize,
        gpu_instance: u32,
        profile: u32,
        placement: Option<(u32, u32)>,
    ) -> Result<u32> {
        let nth = self.creations + 1;
        let fresh = self.options.mig_uuids == MigUuids::Fresh;
        let old_names = self.driver.has_old_mig_uuids();
        let target = self.gpu_mut(gpu)?;
        let mig = in_mig_mode(target, model)?;
        let gpu_uuid = target.uuid.clone();
        let instance = target.instance_mut(gpu_instance).ok_or(NvmlError::InvalidArgument)?;
        let gi_profile = mig.profile(instance.profile).ok_or(NvmlError::Unknown)?;
        let Some(profile) = gi_profile.compute_profile(profile) else {
            return Err(unoffered(mig, profile));
        };
        let (start, id) = geometry::place_compute(instance, gi_profile, profile, placement)?;
        let name = match fresh {
            true => format!("{gpu_instance}/{start}/{nth}"),
            false => format!("{gpu_instance}/{start}"),
        };
        let uuid = match old_names {
            true => format!("MIG-{gpu_uuid}/{gpu_instance}/{id}"),
            false => format!("MIG-{}", uuid::derived(&gpu_uuid, &name)),
        };
        instance.compute.push(ComputeInstance {
            id,
            profile: profile.id,
            start,
            size: profile.size,
            nth,
            uuid,
            compute_mode: 0,
        });
        target.counts.compute_instances_created += 1;
        self.creations = nth;
        self.event(gpu, EVENT_MIG_CONFIG, 0, Some(gpu_instance), Some(id));
        Ok(id)
    }

    /// Destroys a compute instance: INVALID_ARGUMENT if it is not there, IN_USE while it has a client.
    pub fn destroy_compute_instance(
        &mut self,
        gpu: usize,
        gpu_instance: u32,
        id: u32,
        clients: &Clients,
    ) -> Result<()> {
        let minor = self.gpu_mut(gpu)?.minor;
        let held = self.holds.iter().any(|hold| {
            hold.gpu == gpu
                && hold.gpu_instance == Some(gpu_instance)
                && hold.compute_instance.is_none_or(|held| held == id)
        });
        let target = self.gpu_mut(gpu)?;
        let instance = target.instance_mut(gpu_instance).ok_or(NvmlError::InvalidArgument)?;
        instance.compute_instance(id).ok_or(NvmlError::InvalidArgument)?;
        if held || clients.of_compute_instance(minor, gpu_instance, id).next().is_some() {
            return Err(NvmlError::InUse);
        }
        instance.compute.retain(|instance| instance.id != id);
        target.counts.compute_instances_destroyed += 1;
        self.event(gpu, EVENT_MIG_CONFIG, 0, Some(gpu_instance), Some(id));
        Ok(())
    }

    /// `nvmlDeviceSetMigMode`: the outer result is the call's, the inner one the activation status.
    ///
    /// A client on the GPU leaves the change pending (activation IN_USE), as does a board that cannot be reset
    /// (RESET_REQUIRED). Ampere resets the GPU, which ends its instances. What hardware does when MIG is
    /// switched off while instances exist is not documented: here it is IN_USE, the careful reading.
    pub fn set_mig_mode(
        &mut self,
        model: &Model,
        gpu: usize,
        on: bool,
        clients: &Clients,
    ) -> Result<std::result::Result<(), NvmlError>> {
        let minor = self.gpu_mut(gpu)?.minor;
        let held = self.holds.iter().any(|hold| hold.gpu == gpu);
        let target = self.gpu_mut(gpu)?;
        let mig = model.mig.as_ref().ok_or(NvmlError::NotSupported)?;
        target.mig_pending = on;
        if target.mig_current == on {
            return Ok(Ok(()));
        }
        if held || !target.instances.is_empty() || clients.of_gpu(minor).next().is_some() {
            return Ok(Err(NvmlError::InUse));
        }
        if mig.mode_change_needs_reset && target.reset_forbidden {
            return Ok(Err(NvmlError::ResetRequired));
        }
        target.apply_pending();
        self.event(gpu, EVENT_MIG_CONFIG, 0, None, None);
        Ok(Ok(()))
    }

    /// `nvmlDeviceSetComputeMode` on a GPU or, with ids, on a MIG device.
    pub fn set_compute_mode(&mut self, gpu: usize, mig_device: Option<(u32, u32)>, mode: u32) -> Result<()> {
        let target = self.gpu_mut(gpu)?;
        if mode > EXCLUSIVE_PROCESS {
            return Err(NvmlError::InvalidArgument);
        }
        let Some((gi, ci)) = mig_device else {
            if target.mig_current {
                // "If MIG is enabled on a GPU, device must be MIG device handle."
                return Err(NvmlError::NotSupported);
            }
            target.compute_mode = mode;
            return Ok(());
        };
        if mode == EXCLUSIVE_PROCESS {
            return Err(NvmlError::NotSupported);
        }
        let instance = target.instance_mut(gi).ok_or(NvmlError::InvalidArgument)?;
        let device =
            instance.compute.iter_mut().find(|device| device.id == ci).ok_or(NvmlError::InvalidArgument)?;
        device.compute_mode = mode;
        Ok(())
    }
}

/// A cgroup and the path by which the caller named it.
pub type Cgroup = (CgroupId, String);

impl State {
    /// `nvmlDeviceSetMemoryLimits_v1`. `above` are the cgroups above, nearest first: with dmem, each has the sum of the
    /// soft limits below it, and loses a cgroup's part only when its soft limit is lowered here, not with the cgroup.
    ///
    /// Soft 0 and hard `u64::MAX` clear. INVALID_ARGUMENT for soft over hard, or a limit over the GPU's memory.
    pub fn set_memory_limits(
        &mut self,
        model: &Model,
        gpu: usize,
        (cgroup, path): Cgroup,
        above: Vec<Cgroup>,
        soft: u64,
        hard: u64,
    ) -> Result<()> {
        self.can_limit_memory(gpu)?;
        let total = model.memory_total_mib << 20;
        let over = |limit: u64| limit != u64::MAX && limit > total;
        // The greatest number means the whole of the device.
        let soft = if soft == u64::MAX { total } else { soft };
        if over(hard) || over(soft) || soft > hard {
            return Err(NvmlError::InvalidArgument);
        }
        // A cgroup that was removed and made anew is another one.
        self.memory_limits
            .retain(|limit| !(limit.gpu == gpu && limit.path == path && limit.cgroup != cgroup));
        let before = self.memory_limit(gpu, cgroup).filter(|limit| limit.set).map_or(0, |limit| limit.soft);
        let dmem = self.options.memory_accounting == MemoryAccounting::Dmem;
        for (cgroup, path) in above.into_iter().filter(|_| dmem) {
            let entry = self.memory_limit_mut(gpu, cgroup, path);
            entry.soft = (entry.soft + soft).saturating_sub(before);
        }
        let entry = self.memory_limit_mut(gpu, cgroup, path);
        (entry.soft, entry.hard) = (soft, hard);
        entry.set = soft != 0 || hard != u64::MAX;
        self.memory_limits.retain(|limit| limit.set || limit.soft != 0);
        Ok(())
    }

    /// `nvmlDeviceGetMemoryLimits_v1` but for the use: NOT_FOUND, or NOT_SUPPORTED with misc, for a cgroup without any
    /// limit.
    pub fn get_memory_limits(&self, gpu: usize, cgroup: CgroupId) -> Result<&MemoryLimit> {
        self.can_limit_memory(gpu)?;
        self.memory_limit(gpu, cgroup).ok_or(match self.options.memory_accounting {
            MemoryAccounting::Misc => NvmlError::NotSupported,
            _ => NvmlError::NotFound,
        })
    }

    /// NOT_SUPPORTED for a GPU in MIG mode, for a driver before r615 and where accounting is off.
    fn can_limit_memory(&self, gpu: usize) -> Result<()> {
        let target = self.gpus.get(gpu).ok_or(NvmlError::InvalidArgument)?;
        let able = self.driver.branch() >= MEMORY_LIMITS_SINCE
            && self.options.memory_accounting != MemoryAccounting::Off
            && !target.mig_current;
        if able { Ok(()) } else { Err(NvmlError::NotSupported) }
    }

    fn memory_limit(&self, gpu: usize, cgroup: CgroupId) -> Option<&MemoryLimit> {
        self.memory_limits.iter().find(|limit| limit.gpu == gpu && limit.cgroup == cgroup)
    }

    fn memory_limit_mut(&mut self, gpu: usize, cgroup: CgroupId, path: String) -> &mut MemoryLimit {
        let found = self.memory_limits.iter().position(|limit| limit.gpu == gpu && limit.cgroup == cgroup);
        let index = found.unwrap_or_else(|| {
            let hard = u64::MAX;
            self.memory_limits.push(MemoryLimit { gpu, cgroup, path, soft: 0, hard, set: false });
            self.memory_limits.len() - 1
        });
        &mut self.memory_limits[index]
    }
}

/// The error for a compute profile that a GPU instance does not offer: NOT_SUPPORTED if some other profile of
/// the GPU knows the id, else INVALID_ARGUMENT.
fn unoffered(mig: &Mig, id: u32) -> NvmlError {
    let known = mig.profiles.iter().any(|profile: &Profile| profile.compute_profile(id).is_some());
    if known { NvmlError::NotSupported } else { NvmlError::InvalidArgument }
}

impl Gpu {
    /// Ends all instances, as a reset does.
    pub fn drop_instances(&mut self) {
        let compute: usize = self.instances.iter().map(|instance| instance.compute.len()).sum();
        self.counts.gpu_instances_destroyed += self.instances.len() as u64;
        self.counts.compute_instances_destroyed += compute as u64;
        self.instances.clear();
    }

    /// A reset: the pending mode becomes the current one, instances end, compute mode falls back.
    pub fn apply_pending(&mut self) {
        self.drop_instances();
        self.mig_current = self.mig_pending;
        self.compute_mode = 0;
        self.needs_reset = false;
    }

    /// What a reload of the kernel module does: a reset, and MIG mode is lost where it is not kept on the board.
    pub fn reload(&mut self, model: &Model) {
        if !model.mig.as_ref().is_some_and(|mig| mig.mode_persists) {
            self.mig_pending = false;
        }
        self.apply_pending();
        self.persistence = false;
    }
}
