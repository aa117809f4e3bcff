//! Brings records, CDI specs and hardware together after a start, a reboot or a change of driver.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use kerf_crds::gpu_node::{
    ClaimOwner, ClaimReference, Gpu, Instance, Owner, Placement, PodReference, Share, WantedShare,
};
use kerf_crds::names::{DRIVER, instance_device, share_device};
use kerf_crds::{GpuNodeSpec, GpuNodeStatus};

use super::authorize::{claim_name, confirm};
use super::checkpoint::Checkpoint;
use super::prepare::{Failure, Preparer};
use crate::inventory::Inventory;
use crate::node::{Kubelet, NodeState};
use crate::prepared::{DeviceKey, Prepared, PreparedClaims, PreparedDevice};

/// How often a toolkit that is missing is looked for.
const TOOLKIT_AGAIN: Duration = Duration::from_secs(60);

/// First look for claims that nobody takes back: kubelet, which takes back most of them itself, comes first.
const STALE_FIRST: Duration = Duration::from_secs(120);
/// Further looks. In this time a kubelet that knows a claim takes it back: it ends the containers of pods that are gone
/// from the API server, and looks for claims without pods every minute.
const STALE_AGAIN: Duration = Duration::from_secs(600);

/// The prepared claims that the last report knew of: what is left when both checkpoint and CDI specs are lost. The
/// request of a device is found in the spec; where it is not there any more it is empty, which kubelet takes for all.
pub fn claims_in_status(spec: &GpuNodeSpec, status: &GpuNodeStatus) -> PreparedClaims {
    let mut claims = PreparedClaims::new();
    for gpu in &status.gpus {
        let mut add = |claim: &ClaimReference, key: DeviceKey, device: String, uuid: String| {
            let request = request_of(spec, claim, &key);
            let cdi = vec![crate::cdi::device_id(&claim.uid, &device, key.share.as_deref())];
            let record = claims.entry(claim.uid.clone()).or_insert_with(|| Prepared {
                claim: claim.clone(),
                pod: None,
                devices: Vec::new(),
            });
            let share = gpu.shares.iter().find(|share| Some(&share.id) == key.share.as_ref()).map(|share| {
                record.pod = record.pod.take().or_else(|| pod_of(spec, claim, &key));
                // What is in force, where what was wanted is not to be found any more.
                wanted_share(spec, &share.id).unwrap_or_else(|| WantedShare {
                    id: share.id.clone(),
                    memory_bytes: share.memory_bytes,
                    compute_milli: of_whole_gpu(status, gpu, share),
                    isolation: share.isolation,
                })
            });
            record.devices.push(PreparedDevice { request, device, key, uuid, cdi, share });
        };
        for claim in &gpu.claims {
            let key = DeviceKey::gpu(&gpu.uuid);
            add(claim, key, gpu.name.clone(), gpu.uuid.clone());
        }
        for share in &gpu.shares {
            let instance = share.placement.map(|placement| instance_at(gpu, placement));
            let (carrier, device, uuid) = match instance {
                None => (DeviceKey::gpu(&gpu.uuid), gpu.name.clone(), gpu.uuid.clone()),
                Some(Some(instance)) => (
                    DeviceKey::instance(&gpu.uuid, instance.placement),
                    device_name(status, gpu, instance),
                    instance.uuid.clone().unwrap_or_default(),
                ),
                // Reported without its instance: there is nothing that it could be prepared on.
                Some(None) => continue,
            };
            for claim in &share.claims {
                add(claim, carrier.clone().with_share(&share.id), share_device(&device), uuid.clone());
            }
        }
        for instance in &gpu.instances {
            for claim in &instance.claims {
                let key = DeviceKey::instance(&gpu.uuid, instance.placement);
                let device = device_name(status, gpu, instance);
                add(claim, key, device, instance.uuid.clone().unwrap_or_default());
            }
        }
    }
    claims
}

fn instance_at(gpu: &Gpu, placement: Placement) -> Option<&Instance> {
    gpu.instances.iter().find(|instance| instance.placement == placement)
}

/// The compute of a reported share, which is in percent of its carrier's, in thousandths of a percent of the whole GPU's.
fn of_whole_gpu(status: &GpuNodeStatus, gpu: &Gpu, share: &Share) -> u32 {
    let percent = u64::from(share.compute_percent);
    let of_instance = || {
        let (instance, geometry) = (instance_at(gpu, share.placement?)?, status.geometry_of(gpu)?);
        Some(geometry.compute_of(geometry.profile(&instance.profile)?, percent))
    };
    u32::try_from(of_instance().unwrap_or(percent * 1000)).unwrap_or(u32::MAX).max(1)
}

fn device_name(status: &GpuNodeStatus, gpu: &Gpu, instance: &Instance) -> String {
    match status.geometry_of(gpu).and_then(|geometry| geometry.profile(&instance.profile)) {
        Some(profile) => instance_device(&gpu.name, profile.id, instance.placement.start),
        // A report whose geometry could not be read: the record still keeps others off, and Unprepare still ends it.
        None => format!("{}-mig-{}", gpu.name, instance.placement.start),
    }
}

fn request_of(spec: &GpuNodeSpec, claim: &ClaimReference, key: &DeviceKey) -> String {
    owner_of(spec, claim, key).map(|owner| owner.request.clone()).unwrap_or_default()
}

fn pod_of(spec: &GpuNodeSpec, claim: &ClaimReference, key: &DeviceKey) -> Option<PodReference> {
    owner_of(spec, claim, key).map(|owner| PodReference {
        namespace: owner.namespace.clone(),
        name: owner.pod.clone(),
        uid: owner.pod_uid.clone(),
    })
}

fn wanted_share(spec: &GpuNodeSpec, id: &str) -> Option<WantedShare> {
    spec.partitions
        .iter()
        .filter_map(|partition| partition.share.as_ref())
        .find(|share| share.id == id)
        .cloned()
}

/// What the spec says of a claim and a device of its.
fn owner_of<'a>(spec: &'a GpuNodeSpec, claim: &ClaimReference, key: &DeviceKey) -> Option<&'a ClaimOwner> {
    spec.partitions.iter().find_map(|partition| match &partition.owner {
        Owner::Claim(owner)
            if (&owner.namespace, &owner.name) == (&claim.namespace, &claim.name)
                && partition.gpu == key.gpu
                && partition.instance.as_ref().map(|wanted| wanted.placement) == key.placement
                && partition.share.as_ref().map(|share| &share.id) == key.share.as_ref() =>
        {
            Some(owner)
        }
        _ => None,
    })
}

/// Puts claims that only the last report knew of back into checkpoint and memory; returns how many. To be called when
/// [`super::Recovered::lost`] says so, before a new report is written and before [`NodeState::spec`] is first set: from
/// then on places pass on.
pub fn restore(state: &NodeState, checkpoint: &Checkpoint, claims: PreparedClaims) -> io::Result<usize> {
    let known = state.prepared.snapshot();
    let mut restored = 0;
    for (uid, prepared) in claims.into_iter().filter(|(uid, _)| !known.contains_key(uid)) {
        checkpoint.restore(&prepared)?;
        match state.prepared.record(prepared.clone()) {
            Ok(()) => {
                tracing::warn!(claim = %claim_name(&prepared.claim), uid, "restored the lost record of a prepared claim from GpuNode.status");
                restored += 1;
            }
            Err(refused) => {
                tracing::warn!(claim = %claim_name(&prepared.claim), uid, "GpuNode.status lists a claim that is not restored: {refused}");
                checkpoint.remove(&uid)?;
            }
        }
    }
    Ok(restored)
}

impl Preparer {
    /// Removes CDI specs of claims that are not prepared. Call it when records that were lost have been restored.
    pub(super) fn remove_orphans(&self) -> io::Result<()> {
        let known = self.state.prepared.snapshot();
        for spec in self.cdi.list()?.into_iter().filter(|spec| !known.contains_key(&spec.claim_uid)) {
            tracing::info!(uid = spec.claim_uid, "removing the CDI spec of a claim that is not prepared");
            self.cdi.remove(&spec.claim_uid)?;
        }
        Ok(())
    }

    /// Keeps the CDI specs of prepared claims true, as instances get new UUIDs and the driver new versions: a container
    /// that restarts gets its devices without kubelet asking again.
    pub(super) async fn keep_specs(&self) {
        let mut inventory = self.state.inventory.subscribe();
        let mut done = BTreeSet::new();
        let mut driver = String::new();
        loop {
            let seen = inventory.borrow_and_update().clone();
            if let Some(seen) = seen.filter(|seen| seen.unavailable.is_none()) {
                if driver != seen.driver_version {
                    done.clear();
                    driver.clone_from(&seen.driver_version);
                }
                // Known before the first pod comes, which then does not wait for it. An error shows on the GpuNode.
                let _ = self.libraries(&driver).await;
                let known = self.state.prepared.snapshot();
                done.retain(|uid| known.contains_key(uid));
                for (uid, record) in known.iter() {
                    if done.contains(uid) && !self.changed(record, &seen) {
                        continue;
                    }
                    match self.refresh(uid).await {
                        Ok(true) => _ = done.insert(uid.clone()),
                        Ok(false) => {}
                        Err(error) => {
                            tracing::warn!(claim = %claim_name(&record.claim), uid, "cannot renew the claim's CDI spec: {error}");
                        }
                    }
                }
            }
            tokio::select! {
                changed = inventory.changed() => if changed.is_err() { return },
                // A toolkit that is missing may come without any other change.
                () = tokio::time::sleep(TOOLKIT_AGAIN) => {}
            }
        }
    }

    fn changed(&self, record: &Prepared, inventory: &Inventory) -> bool {
        confirm(record, &self.state.node_name, None, inventory).is_ok_and(|devices| devices != record.devices)
    }

    /// Takes back claims that are gone from the API server and that kubelet has not taken back: its own state was lost,
    /// as when a node leaves the cluster and joins again.
    pub(super) async fn release_stale(&self) {
        tokio::time::sleep(STALE_FIRST).await;
        let mut suspects = BTreeSet::new();
        loop {
            suspects = self.look_for_stale(&suspects).await;
            tokio::time::sleep(STALE_AGAIN).await;
        }
    }

    /// One look. A claim is taken back if the API server says that it has no device here, no process is on its devices,
    /// and it was last prepared before the present boot, as nothing of that time runs any more; or if all that was so at
    /// the last look too, which `suspects` says, and kubelet was there both times. Returns the next look's suspects.
    pub(super) async fn look_for_stale(&self, suspects: &BTreeSet<String>) -> BTreeSet<String> {
        let of_earlier_boots = self.checkpoint.from_earlier_boots().unwrap_or_else(|error| {
            tracing::warn!("cannot look for claims from before the last boot: {error}");
            Vec::new()
        });
        let mut next = BTreeSet::new();
        for (uid, record) in self.state.prepared.snapshot().iter() {
            // Most claims are in use, and the API server need not be asked for them.
            if self.used(record) || !self.is_gone(record).await {
                continue;
            }
            let kubelet_is_there = *self.state.kubelet.borrow() == Kubelet::Registered;
            if of_earlier_boots.contains(uid) || kubelet_is_there && suspects.contains(uid) {
                self.take_back(record).await;
            } else if kubelet_is_there {
                next.insert(uid.clone());
            }
        }
        next
    }

    /// Whether the API server says that the claim is no more, or has no device here.
    async fn is_gone(&self, record: &Prepared) -> bool {
        let ClaimReference { namespace, name, uid } = &record.claim;
        let claim = match (self.reader)(namespace.clone(), name.clone()).await {
            Ok(claim) => claim.filter(|claim| claim.metadata.uid.as_ref() == Some(uid)),
            Err(error) => {
                tracing::warn!(claim = %claim_name(&record.claim), uid, "cannot see whether the claim is still there: {error}");
                return false;
            }
        };
        let results = claim.and_then(|claim| claim.status?.allocation?.devices?.results).unwrap_or_default();
        !results.iter().any(|result| result.driver == DRIVER && result.pool == self.state.node_name)
    }

    async fn take_back(&self, record: &Prepared) {
        let (claim, uid) = (claim_name(&record.claim), &record.claim.uid);
        tracing::info!(%claim, uid, "taking back a claim that is gone");
        if let Err(error) = self.unprepare(uid).await {
            tracing::warn!(%claim, uid, "cannot take the claim back: {error}");
        }
    }

    /// Whether a process is on one of the claim's devices, or nobody knows.
    fn used(&self, record: &Prepared) -> bool {
        let Some(inventory) = self.state.latest().filter(|seen| seen.unavailable.is_none()) else {
            return true;
        };
        record.devices.iter().any(|device| {
            let Some(gpu) = inventory.gpu(&device.key.gpu) else { return false };
            if let Some(id) = &device.key.share {
                return gpu.shares.iter().any(|share| share.id == *id && share.processes > 0);
            }
            match device.key.placement {
                None => !gpu.processes.is_empty(),
                Some(placement) => gpu.instances.iter().any(|instance| {
                    instance.placement.overlaps(&placement) && !instance.processes.is_empty()
                }),
            }
        })
    }
}

/// A look at damaged state never ends the daemon.
pub(super) fn tell(result: Result<(), impl Into<Failure>>, what: &str) {
    if let Err(error) = result {
        tracing::error!("{what}: {}", error.into());
    }
}
