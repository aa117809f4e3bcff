//! Whether a claim may have the devices that its allocation names. Pure: everything it looks at is an argument.
//!
//! Kubernetes does not check this: kubelet prepares whatever claim a pod has, also one that is allocated on another
//! node, and the API server lets one device stand in two claims. The record of who may have what is `GpuNode.spec`.
//!
//! It says which claim. Which of the pods that share the claim, kubelet checks against the claim's `reservedFor`: the pod
//! that the entry names is the one that it was made for, and may be over while another of them starts.

use k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult, ResourceClaim, ResourceClaimConsumerReference,
};
use kerf_crds::GpuNodeSpec;
use kerf_crds::gpu_node::{
    ClaimOwner, ClaimReference, Owner, Partition, PodReference, Reason, WantedInstance, WantedShare,
};
use kerf_crds::names::{DRIVER, instance_device, share_device};

use crate::inventory::{Gpu, Instance, Inventory, Process};
use crate::prepared::{DeviceKey, Prepared, PreparedClaims, PreparedDevice, holders};

/// Why a claim is not prepared. Each says what is wrong, where, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    #[error("claim {0} does not exist; a pod that uses it must be created anew, with a claim that does")]
    NotFound(String),
    #[error(
        "claim {claim} has UID {found}, not {asked}: it was deleted and made again under the same name; the pod must be created anew"
    )]
    OtherUid { claim: String, found: String, asked: String },
    #[error("claim {0} is not allocated; Kerf's operator allocates it once the pod's partitions are planned")]
    NotAllocated(String),
    #[error(
        "claim {claim}, request '{request}': the allocation names pool '{pool}', but this is node '{node}', which has only pool '{node}'; the pod must run on the node that its claim is allocated on"
    )]
    OtherNode { claim: String, request: String, pool: String, node: String },
    #[error(
        "GpuNode '{node}' has no partition for claim {claim}, request '{request}'; only what is written in its spec is handed out"
    )]
    NotPlanned { claim: String, request: String, node: String },
    #[error(
        "claim {claim}, request '{request}': the allocation names device '{device}', but GpuNode '{node}' plans {planned} for it"
    )]
    OtherDevice { claim: String, request: String, device: String, node: String, planned: String },
    #[error(
        "claim {0} is allocated, but reserved for no pod; kube-scheduler or Kerf's operator reserves it for the pods that use it"
    )]
    NotReserved(String),
    #[error(
        "claim {claim} has a share, and is reserved for {pods} pods; a share's limit is on its one pod, so each pod needs a claim of its own (a ResourceClaimTemplate makes them)"
    )]
    SharedShare { claim: String, pods: usize },
    #[error(
        "claim {claim}, request '{request}' has {count} shares; a process talks to one MPS server at a time, so a container can use one share: make a request of each, for a container of its own"
    )]
    SeveralShares { claim: String, request: String, count: usize },
    #[error("{device}: share {share} of {gpu} is not in force: {why}")]
    NotInForce { device: String, share: String, gpu: String, why: String },
    #[error("{device}: no GPU {gpu} on this node")]
    NoSuchGpu { device: String, gpu: String },
    #[error("{device}: GPU {gpu} is not managed by Kerf: {} ({})", .why.message, .why.reason)]
    Unmanaged { device: String, gpu: String, why: Reason },
    #[error("{device}: the hardware has failed: {} ({})", .why.message, .why.reason)]
    Unhealthy { device: String, why: Reason },
    #[error("{device}: NVML is not available on this node: {} ({})", .why.message, .why.reason)]
    Unavailable { device: String, why: Reason },
    #[error(
        "{device}: the instance at this place was not made by Kerf, which does not hand out what is not its own"
    )]
    Foreign { device: String },
    #[error("{device}: {why}")]
    NotThere { device: String, why: String },
    #[error("{device} is still prepared for claim {}/{} (UID {}); it passes on after that claim's Unprepare", .by.namespace, .by.name, .by.uid)]
    Held { device: String, by: ClaimReference },
    #[error("{device} is still used by {processes}; it passes on when no process is on it")]
    InUse { device: String, processes: String },
    #[error(
        "{device}: {uuid} still has what carried its shares; it passes on when its MPS server has gone and, of a whole GPU, the compute mode is what it was"
    )]
    CarriesShares { device: String, uuid: String },
    #[error("{device}: GpuNode '{node}' now plans its place for claim {other}")]
    PassedOn { device: String, node: String, other: String },
    #[error("this daemon has not read {0} yet")]
    NotRead(&'static str),
}

impl PrepareError {
    /// Whether it can come right by itself within the time that kubelet waits: the API server's word is on its way
    /// (spec and claim are written one after the other and seen in any order), or the hardware's state is changing.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::NotAllocated(_)
            | Self::NotPlanned { .. }
            | Self::OtherDevice { .. }
            | Self::NotReserved(_)
            | Self::Unavailable { .. }
            | Self::NotThere { .. }
            | Self::NotInForce { .. }
            | Self::Held { .. }
            | Self::InUse { .. }
            | Self::CarriesShares { .. }
            | Self::PassedOn { .. }
            | Self::NotRead(_) => true,
            Self::NotFound(_)
            | Self::OtherUid { .. }
            | Self::OtherNode { .. }
            | Self::SharedShare { .. }
            | Self::SeveralShares { .. }
            | Self::NoSuchGpu { .. }
            | Self::Unmanaged { .. }
            | Self::Unhealthy { .. }
            | Self::Foreign { .. } => false,
        }
    }
}

/// The devices of a claim, and the one pod that it is for where it has a share.
pub type Authorized = (Vec<PreparedDevice>, Option<PodReference>);

/// The devices of `claim`, all of them there and free, or why not.
///
/// `asked` is the claim that kubelet asks for; `node` this node's name, which is also its pool's; `prepared` the claims
/// that hold devices now. The `cdi` names of the result are left empty.
pub fn authorize(
    claim: &ResourceClaim,
    asked: &ClaimReference,
    node: &str,
    spec: &GpuNodeSpec,
    inventory: &Inventory,
    prepared: &PreparedClaims,
) -> Result<Authorized, PrepareError> {
    let name = claim_name(asked);
    let found = claim.metadata.uid.as_deref().unwrap_or_default();
    if found != asked.uid {
        return Err(PrepareError::OtherUid {
            claim: name,
            found: found.to_owned(),
            asked: asked.uid.clone(),
        });
    }
    let ours: Vec<_> = results(claim).filter(|result| result.driver == DRIVER).collect();
    if ours.is_empty() {
        return Err(PrepareError::NotAllocated(name));
    }
    if !is_reserved_for_pods(claim) {
        return Err(PrepareError::NotReserved(name));
    }
    let pod = pod_of_shares(claim, &name, asked, &ours)?;
    let devices = ours
        .into_iter()
        .map(|result| {
            if result.pool != node {
                return Err(PrepareError::OtherNode {
                    claim: name.clone(),
                    request: result.request.clone(),
                    pool: result.pool.clone(),
                    node: node.to_owned(),
                });
            }
            let partition = planned(asked, result, node, spec, inventory)?;
            let device = present(partition, &result.device, inventory)?;
            device.free(&result.device, &asked.uid, prepared)?;
            Ok(device.into_prepared(&result.request, &result.device))
        })
        .collect::<Result<_, _>>()?;
    Ok((devices, pod))
}

/// The pod whose shares the claim has; `None` if it has none.
fn pod_of_shares(
    claim: &ResourceClaim,
    name: &str,
    asked: &ClaimReference,
    ours: &[&DeviceRequestAllocationResult],
) -> Result<Option<PodReference>, PrepareError> {
    let shares: Vec<_> = ours.iter().filter(|result| result.share_id.is_some()).collect();
    for share in &shares {
        let count = shares.iter().filter(|other| other.request == share.request).count();
        if count > 1 {
            let request = share.request.clone();
            return Err(PrepareError::SeveralShares { claim: name.to_owned(), request, count });
        }
    }
    match pods(claim).collect::<Vec<_>>().as_slice() {
        _ if shares.is_empty() => Ok(None),
        [pod] => Ok(Some(PodReference {
            namespace: asked.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        })),
        pods => Err(PrepareError::SharedShare { claim: name.to_owned(), pods: pods.len() }),
    }
}

/// Whether the devices of a claim that is prepared already are still there; the result has their present UUIDs, which a
/// reboot may have changed.
pub fn confirm(
    record: &Prepared,
    node: &str,
    spec: Option<&GpuNodeSpec>,
    inventory: &Inventory,
) -> Result<Vec<PreparedDevice>, PrepareError> {
    record.devices.iter().map(|device| confirm_one(record, device, node, spec, inventory)).collect()
}

fn confirm_one(
    record: &Prepared,
    device: &PreparedDevice,
    node: &str,
    spec: Option<&GpuNodeSpec>,
    inventory: &Inventory,
) -> Result<PreparedDevice, PrepareError> {
    // While a claim is prepared nothing else is made in its place, but a reboot empties all places.
    let other = spec.and_then(|spec| owner_of(spec, &device.key, &record.claim));
    if let Some(other) = other {
        return Err(PrepareError::PassedOn {
            device: device.device.clone(),
            node: node.to_owned(),
            other: format!("{}/{}", other.namespace, other.name),
        });
    }
    let gpu = gpu_of(inventory, &device.key.gpu, &device.device)?;
    let carrier = match device.key.placement {
        None => whole(gpu, &device.device)?,
        Some(placement) => {
            let instance = gpu.instance_at(placement).filter(|instance| {
                let name = instance_device(&gpu.name, instance.profile_id, placement.start);
                device.device == if device.share.is_some() { share_device(&name) } else { name }
            });
            complete(gpu, instance, &device.device)?
        }
    };
    let found = match &device.share {
        None => carrier,
        Some(wanted) => share(carrier, wanted, &device.device)?,
    };
    if found.foreign() && found.uuid() != device.uuid {
        return Err(PrepareError::Foreign { device: device.device.clone() });
    }
    Ok(PreparedDevice { uuid: found.uuid().to_owned(), ..device.clone() })
}

/// The claim, other than `own`, that the spec gives a place overlapping `key` to.
fn owner_of<'a>(spec: &'a GpuNodeSpec, key: &DeviceKey, own: &ClaimReference) -> Option<&'a ClaimOwner> {
    spec.partitions.iter().find_map(|partition| match &partition.owner {
        Owner::Claim(owner)
            if (&owner.namespace, &owner.name) != (&own.namespace, &own.name)
                && key_of(partition).overlaps(key) =>
        {
            Some(owner)
        }
        _ => None,
    })
}

fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    allocation
        .and_then(|allocation| allocation.devices.as_ref())
        .and_then(|devices| devices.results.as_ref())
        .into_iter()
        .flatten()
}

/// Not by the operator's hold alone.
fn is_reserved_for_pods(claim: &ResourceClaim) -> bool {
    pods(claim).next().is_some()
}

/// The pods that the claim is reserved for.
fn pods(claim: &ResourceClaim) -> impl Iterator<Item = &ResourceClaimConsumerReference> {
    let reserved = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
    reserved.into_iter().flatten().filter(|consumer| {
        consumer.resource == "pods" && consumer.api_group.as_deref().unwrap_or_default().is_empty()
    })
}

/// The spec's entry for one result of the allocation.
fn planned<'a>(
    asked: &ClaimReference,
    result: &DeviceRequestAllocationResult,
    node: &str,
    spec: &'a GpuNodeSpec,
    inventory: &Inventory,
) -> Result<&'a Partition, PrepareError> {
    let of_claim = |owner: &ClaimOwner| {
        (&owner.namespace, &owner.name, &owner.request) == (&asked.namespace, &asked.name, &result.request)
    };
    let mine: Vec<&Partition> = spec
        .partitions
        .iter()
        .filter(|partition| matches!(&partition.owner, Owner::Claim(owner) if of_claim(owner)))
        .collect();
    if mine.is_empty() {
        return Err(PrepareError::NotPlanned {
            claim: claim_name(asked),
            request: result.request.clone(),
            node: node.to_owned(),
        });
    }
    let with_share = |name: &str, share: Option<&String>| match share {
        Some(id) => format!("{name} (share {id})"),
        None => name.to_owned(),
    };
    let names: Vec<String> = mine
        .iter()
        .map(|partition| {
            with_share(&planned_name(partition, inventory), partition.share.as_ref().map(|share| &share.id))
        })
        .collect();
    let allocated = with_share(&result.device, result.share_id.as_ref());
    let Some(index) = names.iter().position(|name| *name == allocated) else {
        return Err(PrepareError::OtherDevice {
            claim: claim_name(asked),
            request: result.request.clone(),
            device: allocated,
            node: node.to_owned(),
            planned: names.join(", "),
        });
    };
    Ok(mine[index])
}

/// The name under which a partition's device is allocated; in words where the GPU or the profile is unknown here.
fn planned_name(partition: &Partition, inventory: &Inventory) -> String {
    let Some(gpu) = inventory.gpu(&partition.gpu) else {
        return format!("a device on {}, which this node does not have", partition.gpu);
    };
    let or_share = |carrier: String| match partition.share {
        Some(_) => share_device(&carrier),
        None => carrier,
    };
    let Some(wanted) = &partition.instance else { return or_share(gpu.name.clone()) };
    let known = gpu.geometry.as_ref().and_then(|geometry| geometry.profile(&wanted.profile)).map(|p| p.id);
    // Where the geometry cannot be read at the moment, an instance that is there knows its profile's id.
    let there = || {
        let instance = gpu.instance_at(wanted.placement)?;
        kerf_crds::profile::same(&instance.profile, &wanted.profile).then_some(instance.profile_id)
    };
    match known.or_else(there) {
        Some(id) => or_share(instance_device(&gpu.name, id, wanted.placement.start)),
        None => format!("profile {} on {}, which does not offer it", wanted.profile, gpu.name),
    }
}

/// A device that exists, whole and healthy.
enum Present<'a> {
    Whole(&'a Gpu),
    Instance(&'a Gpu, &'a Instance, &'a str),
    /// A share of one of the others.
    Share(Box<Present<'a>>, WantedShare),
}

fn present<'a>(
    partition: &Partition,
    device: &str,
    inventory: &'a Inventory,
) -> Result<Present<'a>, PrepareError> {
    let gpu = gpu_of(inventory, &partition.gpu, device)?;
    if let Some(why) = &gpu.unmanaged {
        return Err(PrepareError::Unmanaged {
            device: device.to_owned(),
            gpu: gpu.uuid.clone(),
            why: why.clone(),
        });
    }
    let carrier = match &partition.instance {
        None => whole(gpu, device)?,
        Some(wanted) => planned_instance(gpu, wanted, device)?,
    };
    match &partition.share {
        None => Ok(carrier),
        Some(wanted) => share(carrier, wanted, device),
    }
}

fn planned_instance<'a>(
    gpu: &'a Gpu,
    wanted: &WantedInstance,
    device: &str,
) -> Result<Present<'a>, PrepareError> {
    let instance = gpu.instance_at(wanted.placement);
    if instance.is_some_and(|instance| instance.foreign) {
        return Err(PrepareError::Foreign { device: device.to_owned() });
    }
    let fitting = instance.filter(|instance| kerf_crds::profile::same(&instance.profile, &wanted.profile));
    complete(gpu, fitting, device)
}

fn gpu_of<'a>(inventory: &'a Inventory, uuid: &str, device: &str) -> Result<&'a Gpu, PrepareError> {
    if let Some(why) = &inventory.unavailable {
        return Err(PrepareError::Unavailable { device: device.to_owned(), why: why.clone() });
    }
    let gpu = inventory
        .gpu(uuid)
        .ok_or_else(|| PrepareError::NoSuchGpu { device: device.to_owned(), gpu: uuid.to_owned() })?;
    match &gpu.unhealthy {
        Some(why) => Err(PrepareError::Unhealthy { device: device.to_owned(), why: why.clone() }),
        None => Ok(gpu),
    }
}

fn whole<'a>(gpu: &'a Gpu, device: &str) -> Result<Present<'a>, PrepareError> {
    if gpu.mig.enabled {
        let why = format!(
            "GPU {} is in MIG mode, in which it cannot be used whole; it is not switched yet",
            gpu.uuid
        );
        return Err(PrepareError::NotThere { device: device.to_owned(), why });
    }
    Ok(Present::Whole(gpu))
}

/// A share whose limits have been read back.
fn share<'a>(carrier: Present<'a>, wanted: &WantedShare, device: &str) -> Result<Present<'a>, PrepareError> {
    let (gpu, placement) = (carrier.gpu(), carrier.key().placement);
    let found = gpu.shares.iter().find(|share| share.id == wanted.id && share.placement == placement);
    let why = match found {
        None => "the daemon has not come to it yet".to_owned(),
        Some(share) => match &share.problem {
            None => return Ok(Present::Share(Box::new(carrier), wanted.clone())),
            Some(why) => format!("{} ({})", why.message, why.reason),
        },
    };
    Err(PrepareError::NotInForce {
        device: device.to_owned(),
        share: wanted.id.clone(),
        gpu: gpu.uuid.clone(),
        why,
    })
}

fn complete<'a>(
    gpu: &'a Gpu,
    instance: Option<&'a Instance>,
    device: &str,
) -> Result<Present<'a>, PrepareError> {
    let not_there = |why: &str| PrepareError::NotThere {
        device: device.to_owned(),
        why: format!("{why} on GPU {}; the daemon makes it from GpuNode.spec", gpu.uuid),
    };
    let instance = instance.ok_or_else(|| not_there("the instance does not exist yet"))?;
    if let Some(why) = &instance.unhealthy {
        return Err(PrepareError::Unhealthy { device: device.to_owned(), why: why.clone() });
    }
    let compute = instance.device().ok_or_else(|| not_there("the compute instance does not exist yet"))?;
    Ok(Present::Instance(gpu, instance, &compute.uuid))
}

impl<'a> Present<'a> {
    fn gpu(&self) -> &'a Gpu {
        match self {
            Self::Whole(gpu) | Self::Instance(gpu, ..) => gpu,
            Self::Share(carrier, _) => carrier.gpu(),
        }
    }

    fn key(&self) -> DeviceKey {
        match self {
            Self::Whole(gpu) => DeviceKey::gpu(&gpu.uuid),
            Self::Instance(gpu, instance, _) => DeviceKey::instance(&gpu.uuid, instance.placement),
            Self::Share(carrier, share) => carrier.key().with_share(&share.id),
        }
    }

    fn uuid(&self) -> &str {
        match self {
            Self::Whole(gpu) => &gpu.uuid,
            Self::Instance(_, _, uuid) => uuid,
            Self::Share(carrier, _) => carrier.uuid(),
        }
    }

    fn foreign(&self) -> bool {
        match self {
            Self::Whole(_) => false,
            Self::Instance(_, instance, _) => instance.foreign,
            Self::Share(carrier, _) => carrier.foreign(),
        }
    }

    fn processes(&self) -> &[Process] {
        match self {
            Self::Whole(gpu) => &gpu.processes,
            Self::Instance(_, instance, _) => &instance.processes,
            // Clients of the other shares, and none of this one before it is given out.
            Self::Share(..) => &[],
        }
    }

    /// Something is left there that carries shares: nobody can have all of it.
    fn carries_shares(&self) -> bool {
        match self {
            Self::Whole(gpu) => gpu.mps.there,
            Self::Instance(_, instance, _) => instance.mps.there || !instance.mps.clients.is_empty(),
            Self::Share(..) => false,
        }
    }

    /// Nobody but the claim has it.
    fn free(&self, device: &str, claim_uid: &str, prepared: &PreparedClaims) -> Result<(), PrepareError> {
        if let Some(by) = holders(prepared, &self.key()).into_iter().find(|by| by.uid != claim_uid) {
            return Err(PrepareError::Held { device: device.to_owned(), by });
        }
        if !self.processes().is_empty() {
            let processes: Vec<_> = self.processes().iter().map(ToString::to_string).collect();
            return Err(PrepareError::InUse { device: device.to_owned(), processes: processes.join(", ") });
        }
        if self.carries_shares() {
            let uuid = self.uuid().to_owned();
            return Err(PrepareError::CarriesShares { device: device.to_owned(), uuid });
        }
        Ok(())
    }

    fn into_prepared(self, request: &str, device: &str) -> PreparedDevice {
        PreparedDevice {
            request: request.to_owned(),
            device: device.to_owned(),
            key: self.key(),
            uuid: self.uuid().to_owned(),
            cdi: Vec::new(),
            share: match self {
                Self::Share(_, share) => Some(share),
                _ => None,
            },
        }
    }
}

fn key_of(partition: &Partition) -> DeviceKey {
    DeviceKey {
        gpu: partition.gpu.clone(),
        placement: partition.instance.as_ref().map(|wanted| wanted.placement),
        share: partition.share.as_ref().map(|share| share.id.clone()),
    }
}

pub(super) fn claim_name(claim: &ClaimReference) -> String {
    format!("{}/{}", claim.namespace, claim.name)
}

#[cfg(test)]
mod tests;
