//! Contexts and memory: who may be on a GPU, what is left of it, who has to go. Reads no file.

use std::collections::BTreeMap;

use super::protocol::{CgroupId, CudaError, DeviceId, Use};
use crate::engine::EXCLUSIVE_PROCESS;
use crate::state::{MemoryAccounting, MemoryLimit};

type Result<T> = std::result::Result<T, CudaError>;

/// `NVML_COMPUTEMODE_PROHIBITED`.
const PROHIBITED: u32 = 2;

/// What the driver knows of a device and its limits when it is asked.
#[derive(Clone, Debug)]
pub struct Surroundings<'a> {
    /// What programs can have of the device's memory, in bytes.
    pub usable: u64,
    /// What a program outside any limit is told to be the total.
    pub total: u64,
    /// `nvmlComputeMode_t` of the GPU.
    pub compute_mode: u32,
    /// Connections of all MPS clients of the device together; see [`crate::mps::connections`].
    pub connections: u32,
    pub accounting: MemoryAccounting,
    /// Limits on this GPU.
    pub limits: &'a [&'a MemoryLimit],
}

/// Everything that programs have of the driver.
#[derive(Debug, Default)]
pub struct Accounts {
    contexts: BTreeMap<u64, Context>,
    /// Clients of MPS servers, by ticket.
    tickets: BTreeMap<String, Ticket>,
    last: u64,
}

#[derive(Debug)]
struct Context {
    /// The connection that ends it.
    connection: u64,
    pid: u32,
    device: DeviceId,
    /// Of an MPS client.
    ticket: Option<String>,
    connections: u32,
    bytes: u64,
    /// Cgroups of the process when it was charged last.
    cgroups: Vec<Vec<CgroupId>>,
}

#[derive(Debug)]
struct Ticket {
    /// The connection of its MPS server.
    server: u64,
    ended: Option<CudaError>,
}

/// A process that asks.
#[derive(Clone, Debug)]
pub struct Asker {
    pub connection: u64,
    pub pid: u32,
    pub cgroups: Vec<Vec<CgroupId>>,
}

impl Accounts {
    /// Makes a context.
    ///
    /// In exclusive mode one process may have contexts, which then is the MPS server, whose clients are let in by
    /// their tickets; CUDA_ERROR_DEVICE_UNAVAILABLE for others (cuda.h, on `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`).
    pub fn open(
        &mut self,
        asker: &Asker,
        device: DeviceId,
        ticket: Option<String>,
        connections: u32,
        around: &Surroundings<'_>,
    ) -> Result<u64> {
        if around.compute_mode == PROHIBITED {
            return Err(CudaError::DeviceUnavailable);
        }
        let on_device = || self.contexts.values().filter(|context| context.device == device);
        if let Some(ticket) = &ticket {
            let server = self.ticket(ticket)?.server;
            if !on_device().any(|context| context.connection == server) {
                return Err(CudaError::InvalidDevice);
            }
            let clients = on_device().filter(|context| context.ticket.is_some());
            let taken: u32 = clients.map(|context| context.connections).sum();
            let (max, needed) = (around.connections, connections.max(2));
            if taken + needed > max {
                // With the default of 2 it is the clients that are too many, else their connections.
                return Err(match needed {
                    2 => CudaError::MpsMaxClientsReached,
                    _ => CudaError::MpsMaxConnectionsReached,
                });
            }
        } else if matches!(around.compute_mode, 1 | EXCLUSIVE_PROCESS) {
            let mut others = on_device().filter(|context| context.ticket.is_none());
            if others.any(|context| context.pid != asker.pid) {
                return Err(CudaError::DeviceUnavailable);
            }
        }
        self.last += 1;
        let context = Context {
            connection: asker.connection,
            pid: asker.pid,
            device,
            ticket,
            connections: connections.max(2),
            bytes: 0,
            cgroups: asker.cgroups.clone(),
        };
        self.contexts.insert(self.last, context);
        Ok(self.last)
    }

    /// Charges memory to a context: not more than the device has, nor than its cgroups may have.
    pub fn allocate(&mut self, asker: &Asker, id: u64, bytes: u64, around: &Surroundings<'_>) -> Result<()> {
        let device = self.context(asker, id)?.device;
        let used = self.used(device);
        if bytes > around.usable.saturating_sub(used) {
            return Err(CudaError::OutOfMemory);
        }
        for limit in enforced(&asker.cgroups, around) {
            let used = self.used_by(device.gpu, limit.cgroup, around);
            if limit.hard != u64::MAX && bytes > limit.hard.saturating_sub(used) {
                return Err(CudaError::OutOfMemory);
            }
        }
        if let Some(context) = self.contexts.get_mut(&id) {
            context.bytes += bytes;
            context.cgroups = asker.cgroups.clone();
        }
        Ok(())
    }

    pub fn free(&mut self, asker: &Asker, id: u64, bytes: u64) -> Result<()> {
        self.context(asker, id)?;
        let context = self.contexts.get_mut(&id).ok_or(CudaError::InvalidValue)?;
        context.bytes = context.bytes.checked_sub(bytes).ok_or(CudaError::InvalidValue)?;
        Ok(())
    }

    /// Free and total as `cuMemGetInfo` gives them: inside a limited cgroup, of the limit.
    ///
    /// With dmem only the process's own cgroup counts: a limit on a parent is enforced, but not shown.
    pub fn memory_info(&self, asker: &Asker, id: u64, around: &Surroundings<'_>) -> Result<(u64, u64)> {
        let device = self.context(asker, id)?.device;
        let free = around.usable.saturating_sub(self.used(device));
        Ok(match shown(&asker.cgroups, around) {
            Some(limit) if limit.hard != u64::MAX => {
                let used = self.used_by(device.gpu, limit.cgroup, around);
                (free.min(limit.hard.saturating_sub(used)), limit.hard)
            }
            _ => (free, around.total),
        })
    }

    /// Gives out a ticket for a client of the MPS server that asks.
    pub fn admit(&mut self, server: u64, ticket: String) {
        self.tickets.insert(ticket, Ticket { server, ended: None });
    }

    /// The contexts of an MPS client answer `error` from now on, and their memory is free.
    pub fn revoke(&mut self, server: u64, ticket: &str, error: CudaError) {
        if let Some(entry) = self.tickets.get_mut(ticket)
            && entry.server == server
        {
            entry.ended = entry.ended.or(Some(error));
            self.contexts.retain(|_, context| context.ticket.as_deref() != Some(ticket));
        }
    }

    /// Ends the client of this MPS server that borrows most on the device, for the sake of one that does not.
    ///
    /// "mpsv3-memory-partitioning, MPS Pressure Handling and Eviction": the requester must be within its own soft
    /// limit, the victim over its own, and the requester is never the victim.
    pub fn evict(
        &mut self,
        server: u64,
        device: DeviceId,
        requester: &str,
        around: &Surroundings<'_>,
    ) -> bool {
        let over = |context: &Context| {
            let limit = nearest(&context.cgroups, around)?;
            let used = self.used_by(device.gpu, limit.cgroup, around);
            used.checked_sub(limit.soft).filter(|over| *over > 0)
        };
        let clients = || {
            self.contexts.values().filter(|context| {
                context.device == device
                    && context
                        .ticket
                        .as_ref()
                        .is_some_and(|ticket| self.tickets.get(ticket).is_some_and(|t| t.server == server))
            })
        };
        let within = clients().any(|context| {
            context.ticket.as_deref() == Some(requester)
                && nearest(&context.cgroups, around).is_some()
                && over(context).is_none()
        });
        let victim = clients()
            .filter(|context| context.ticket.as_deref() != Some(requester) && context.bytes > 0)
            .filter_map(|context| Some((over(context)?, context.bytes, context.ticket.clone()?)))
            .max();
        match victim {
            Some((_, _, ticket)) if within => {
                self.revoke(server, &ticket, CudaError::MpsClientTerminated);
                true
            }
            _ => false,
        }
    }

    /// A connection has ended, and what hangs on it: its contexts and ticket; if it was an MPS server's, its clients'
    /// contexts.
    pub fn close(&mut self, connection: u64, ticket: Option<&str>) {
        if let Some(ticket) = ticket {
            self.tickets.remove(ticket);
        }
        self.contexts.retain(|_, context| context.connection != connection);
        let orphans: Vec<String> = self
            .tickets
            .iter()
            .filter(|(_, ticket)| ticket.server == connection)
            .map(|(name, _)| name.clone())
            .collect();
        for ticket in orphans {
            self.revoke(connection, &ticket, CudaError::MpsRpcFailure);
        }
    }

    /// Bytes in use of a device's memory, which compute instances of one GPU instance share.
    pub fn used(&self, device: DeviceId) -> u64 {
        let memory = |device: DeviceId| (device.gpu, device.mig.map(|(gi, _)| gi));
        let same = |context: &&Context| memory(context.device) == memory(device);
        self.contexts.values().filter(same).map(|context| context.bytes).sum()
    }

    /// Bytes charged to a cgroup on a GPU. With dmem, the children's count; with misc, those of processes whose
    /// nearest limited cgroup it is.
    pub fn used_by(&self, gpu: u32, cgroup: CgroupId, around: &Surroundings<'_>) -> u64 {
        let charged = |context: &&Context| {
            context.device.gpu == gpu
                && match around.accounting {
                    MemoryAccounting::Misc => {
                        nearest(&context.cgroups, around).is_some_and(|limit| limit.cgroup == cgroup)
                    }
                    _ => context.cgroups.iter().flatten().any(|own| *own == cgroup),
                }
        };
        self.contexts.values().filter(charged).map(|context| context.bytes).sum()
    }

    /// Memory by process and device.
    pub fn uses(&self) -> Vec<Use> {
        let mut all: BTreeMap<(u32, DeviceId, bool), u64> = BTreeMap::new();
        for context in self.contexts.values() {
            *all.entry((context.pid, context.device, context.ticket.is_some())).or_default() += context.bytes;
        }
        all.into_iter()
            .map(|((pid, device, mps_client), bytes)| Use { pid, device, bytes, mps_client })
            .collect()
    }

    fn ticket(&self, name: &str) -> Result<&Ticket> {
        let ticket = self.tickets.get(name).ok_or(CudaError::NotPermitted)?;
        ticket.ended.map_or(Ok(ticket), Err)
    }

    fn context(&self, asker: &Asker, id: u64) -> Result<&Context> {
        match self.contexts.get(&id) {
            Some(context) if context.connection == asker.connection => Ok(context),
            _ => Err(CudaError::InvalidValue),
        }
    }

    pub fn device_of(&self, connection: u64, id: u64) -> Result<DeviceId> {
        match self.contexts.get(&id) {
            Some(context) if context.connection == connection => Ok(context.device),
            _ => Err(CudaError::InvalidValue),
        }
    }

    /// The error that this client's calls answer since it was ended.
    pub fn ended(&self, ticket: &str) -> Option<CudaError> {
        self.tickets.get(ticket).and_then(|ticket| ticket.ended)
    }
}

/// The limits that an allocation by a process in these cgroups must keep: with dmem those of all of them, with misc
/// the nearest ("misc: nearest limited ancestor; limits do not nest").
fn enforced<'a>(cgroups: &[Vec<CgroupId>], around: &Surroundings<'a>) -> Vec<&'a MemoryLimit> {
    match around.accounting {
        MemoryAccounting::Off => Vec::new(),
        MemoryAccounting::Misc => nearest(cgroups, around).into_iter().collect(),
        MemoryAccounting::Dmem => {
            let inside = |limit: &MemoryLimit| cgroups.iter().flatten().any(|own| *own == limit.cgroup);
            around.limits.iter().copied().filter(|limit| inside(limit)).collect()
        }
    }
}

/// The nearest cgroup of a process that has a limit of its own.
fn nearest<'a>(cgroups: &[Vec<CgroupId>], around: &Surroundings<'a>) -> Option<&'a MemoryLimit> {
    let limited =
        |own: &CgroupId| around.limits.iter().copied().find(|limit| limit.set && limit.cgroup == *own);
    cgroups.iter().find_map(|hierarchy| hierarchy.iter().find_map(limited))
}

/// The limit that a process in these cgroups is told of.
pub fn shown<'a>(cgroups: &[Vec<CgroupId>], around: &Surroundings<'a>) -> Option<&'a MemoryLimit> {
    match around.accounting {
        MemoryAccounting::Off => None,
        MemoryAccounting::Misc => nearest(cgroups, around),
        MemoryAccounting::Dmem => {
            let own = |limit: &&MemoryLimit| {
                limit.set && cgroups.iter().any(|hierarchy| hierarchy.first() == Some(&limit.cgroup))
            };
            around.limits.iter().copied().find(own)
        }
    }
}
