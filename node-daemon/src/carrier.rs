//! What carries shares: a GPU that is not cut, or one MIG instance. Each has an MPS server of its own, in a pod of its own,
//! and files of its own.

use kerf_crds::gpu_node::{Isolation, Placement, Reason};

use crate::inventory::{Gpu, Instance, MpsState, Process};
use crate::prepared::DeviceKey;

/// A place that carries shares, is to, or did: all of a GPU, or the place of an instance, which need not be there.
#[derive(Clone, Copy, Debug)]
pub struct Carrier<'a> {
    pub gpu: &'a Gpu,
    /// `None`: the GPU itself.
    pub placement: Option<Placement>,
}

/// So many of all the multiprocessors of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub own: u32,
    pub all: u32,
}

impl Part {
    pub const WHOLE: Self = Self { own: 1, all: 1 };

    /// The most that a share of it can have: thousandths of a percent of the whole GPU, in whole percents, rounded up.
    pub fn most_milli(self) -> u64 {
        (100 * u64::from(self.own)).div_ceil(u64::from(self.all).max(1)) * 1000
    }
}

/// What an existing carrier has.
#[derive(Clone, Copy, Debug)]
pub struct Present<'a> {
    /// Its name for CUDA: `GPU-…` or `MIG-…`.
    pub uuid: &'a str,
    /// Memory that can be used.
    pub memory_bytes: u64,
    pub part: Part,
}

impl<'a> Carrier<'a> {
    pub fn key(&self) -> DeviceKey {
        DeviceKey { placement: self.placement, ..DeviceKey::gpu(&self.gpu.uuid) }
    }

    pub fn name(&self) -> String {
        name(&self.gpu.name, self.placement)
    }

    pub fn is_gpu(&self) -> bool {
        self.placement.is_none()
    }

    /// The instance, finished or not.
    pub fn instance(&self) -> Option<&'a Instance> {
        self.gpu.instance_at(self.placement?)
    }

    /// `None`: it cannot be used now.
    pub fn present(&self) -> Option<Present<'a>> {
        let gpu = self.gpu;
        if self.is_gpu() {
            let whole = Present { uuid: &gpu.uuid, memory_bytes: gpu.memory_bytes, part: Part::WHOLE };
            return (!gpu.mig.enabled).then_some(whole);
        }
        let instance = self.instance()?;
        let (profile, geometry) = (gpu.profile_of(instance)?, gpu.geometry.as_deref()?);
        Some(Present {
            uuid: &instance.device()?.uuid,
            memory_bytes: profile.memory_bytes,
            part: Part { own: profile.multiprocessors, all: geometry.multiprocessors },
        })
    }

    /// Nothing of it is there: no process can be on it.
    pub fn is_gone(&self) -> bool {
        match self.is_gpu() {
            true => self.gpu.mig.enabled,
            false => self.instance().is_none(),
        }
    }

    /// Who limits the memory of its shares: the driver's limits do not reach into instances.
    pub fn isolation(&self) -> Isolation {
        let of_gpu = self.gpu.sharing.as_ref().map(|sharing| sharing.isolation).unwrap_or_default();
        if self.is_gpu() { of_gpu } else { Isolation::Process }
    }

    /// Why it is not to be touched: somebody else's, or failed.
    pub fn untouchable(&self) -> Option<&'a Reason> {
        let of_instance = self.instance().and_then(|instance| instance.unhealthy.as_ref());
        self.gpu.unmanaged.as_ref().or(self.gpu.unhealthy.as_ref()).or(of_instance)
    }

    /// Processes on it, other than Kerf's MPS server and its clients.
    pub fn processes(&self) -> &'a [Process] {
        match self.placement {
            None => &self.gpu.processes,
            Some(_) => self.instance().map_or(&[], |instance| &instance.processes),
        }
    }

    /// Processes that its MPS server lets in.
    pub fn clients(&self) -> &'a [Process] {
        self.mps().map_or(&[], |mps| &mps.clients)
    }

    /// Its MPS server takes clients.
    pub fn is_served(&self) -> bool {
        self.mps().is_some_and(|mps| mps.up)
    }

    fn mps(&self) -> Option<&'a MpsState> {
        match self.placement {
            None => Some(&self.gpu.mps),
            Some(_) => self.instance().map(|instance| &instance.mps),
        }
    }
}

/// Names pod and directory. Sockets lie in the directory, and their paths are short: it has the place of an instance, and not
/// all of its name as a DRA device.
pub fn name(gpu: &str, placement: Option<Placement>) -> String {
    match placement {
        None => gpu.to_owned(),
        Some(Placement { start, size }) => format!("{gpu}-{start}-{size}"),
    }
}

impl std::fmt::Display for Carrier<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = &self.gpu.name;
        match (self.placement, self.instance()) {
            (None, _) => f.write_str(name),
            (Some(Placement { start, size }), Some(instance)) => {
                write!(f, "{} at {start}:{size} of {name}", instance.profile)
            }
            (Some(Placement { start, size }), None) => write!(f, "the instance at {start}:{size} of {name}"),
        }
    }
}
