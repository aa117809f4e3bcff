//! The join of commit records with claims, pods and reports: what [`kerf_planner::protocol::next`] is asked.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::GpuNode;
use kerf_crds::gpu_node::{ClaimReference, GpuNodeStatus, Owner, Partition};
use kerf_planner::protocol::{self, Observed};
use kube::ResourceExt;

use super::claims;
use super::memory::Memory;
use super::requests;
use crate::cache::{Group, PodInfo, World};

/// Which placement: a pod's claim on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub node: String,
    pub namespace: String,
    pub claim: String,
    pub pod: String,
    pub pod_uid: String,
}

/// Every placement of which there is a commit record or an allocation.
pub fn all(world: &World) -> BTreeSet<Key> {
    let nodes = world.gpu_nodes.iter().flat_map(|node| {
        let name = node.name_any();
        of_node(&name, Some(node), world.claims.of(&name))
    });
    let elsewhere = world.claims.groups().filter(|(name, _)| world.gpu_nodes.get(name).is_none());
    nodes.chain(elsewhere.flat_map(|(name, claims)| of_node(name, None, Some(claims)))).collect()
}

/// Those on a node. `claims`: what is allocated there.
pub fn of_node(name: &str, node: Option<&GpuNode>, claims: Option<&Group<ResourceClaim>>) -> Vec<Key> {
    let mut keys = Vec::new();
    all_on_node(name, node, claims, |key| {
        keys.push(key.clone());
        true
    });
    keys
}

/// Whether this holds for all of those on a node.
pub fn all_on_node(
    name: &str,
    node: Option<&GpuNode>,
    claims: Option<&Group<ResourceClaim>>,
    mut holds: impl FnMut(&Key) -> bool,
) -> bool {
    // One for all of them: there are many, and few are kept.
    let mut key = Key { node: name.to_owned(), ..Key::default() };
    let mut holds_for = |namespace: &str, claim: &str, pod: &str, uid: &str| {
        let parts = [
            (&mut key.namespace, namespace),
            (&mut key.claim, claim),
            (&mut key.pod, pod),
            (&mut key.pod_uid, uid),
        ];
        for (part, of) in parts {
            part.clear();
            part.push_str(of);
        }
        holds(&key)
    };
    let mut recorded: BTreeSet<(&str, &str)> = BTreeSet::new();
    for partition in node.into_iter().flat_map(|node| &node.spec.partitions) {
        let Owner::Claim(owner) = &partition.owner else { continue };
        recorded.insert((&owner.namespace, &owner.name));
        if !holds_for(&owner.namespace, &owner.name, &owner.pod, &owner.pod_uid) {
            return false;
        }
    }
    // Allocated by Kerf's driver, without a record.
    claims.into_iter().flat_map(|claims| claims.values()).all(|claim| {
        let metadata = &claim.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let name = metadata.name.as_deref().unwrap_or_default();
        let mut reserved = claim.status.iter().filter_map(|status| status.reserved_for.as_ref()).flatten();
        let consumer = reserved.find(|consumer| consumer.resource == "pods");
        let (pod, uid) = consumer.map_or(("", ""), |consumer| (&consumer.name, &consumer.uid));
        recorded.contains(&(namespace, name)) || holds_for(namespace, name, pod, uid)
    })
}

/// A placement and the objects that it was read from.
#[derive(Clone, Debug)]
pub struct Seen {
    pub observed: Observed,
    pub pod: Option<Arc<PodInfo>>,
    pub claim: Option<Arc<ResourceClaim>>,
    pub node: Option<Arc<GpuNode>>,
    /// The entries of the commit record, by index.
    pub devices: Vec<usize>,
}

impl Seen {
    /// The entries of the commit record.
    pub fn devices(&self) -> impl Iterator<Item = &Partition> + Clone {
        let all = self.node.as_deref().map_or(&[][..], |node| &node.spec.partitions);
        self.devices.iter().filter_map(|&index| all.get(index))
    }
}

/// What there is of a node: most of what is looked at on it is found here, and not among all pods and claims.
#[derive(Clone, Copy, Debug, Default)]
pub struct Here<'w> {
    pub node: Option<&'w Arc<GpuNode>>,
    /// Pods bound there.
    pub pods: Option<&'w Group<PodInfo>>,
    /// Claims allocated there.
    pub claims: Option<&'w Group<ResourceClaim>>,
}

impl<'w> Here<'w> {
    /// What there is of the node of this name.
    pub fn of(world: &'w World, name: &str) -> Self {
        Self { node: world.gpu_nodes.get(name), pods: world.pods.of(name), claims: world.claims.of(name) }
    }

    fn claim(&self, world: &'w World, key: &Key) -> Option<&'w Arc<ResourceClaim>> {
        let id = [&key.namespace, "/", &key.claim].concat();
        self.claims.and_then(|claims| claims.get(&id)).or_else(|| world.claims.get(&id))
    }

    fn pod(&self, world: &'w World, key: &Key) -> Option<&'w Arc<PodInfo>> {
        let id = [&key.namespace, "/", &key.pod].concat();
        let pod = self.pods.and_then(|pods| pods.get(&id)).or_else(|| world.pods.get(&id));
        pod.filter(|pod| pod.uid == key.pod_uid)
    }
}

/// Looks at one placement.
pub fn look(world: &World, memory: &Memory, key: &Key) -> Seen {
    look_at(world, Here::of(world, &key.node), memory, key)
}

/// The same. `here`: what there is of its node.
pub fn look_at(world: &World, here: Here<'_>, memory: &Memory, key: &Key) -> Seen {
    let node = here.node.cloned();
    let entries = node.as_deref().map_or(&[][..], |node| &node.spec.partitions);
    let devices: Vec<usize> = (0..entries.len()).filter(|&index| owns(key, &entries[index].owner)).collect();
    let there = || devices.iter().map(|&index| &entries[index]);
    let claim = here.claim(world, key).cloned();
    let as_planned = is_as_planned(claim.as_deref(), node.as_deref(), key, there());
    let pod = consumer(world, here, key, claim.as_deref().filter(|_| as_planned || devices.is_empty()));
    let ours = pod.as_deref().map_or_else(
        || claim.as_deref().is_some_and(|claim| claims::owner_uid(claim) == Some(&key.pod_uid)),
        |pod| pod.own_claim() == Some(&key.claim),
    );
    let pod_state = match pod.as_deref() {
        None => protocol::Pod::Gone,
        Some(pod) if pod.done => protocol::Pod::Done,
        Some(pod) => match &pod.node {
            Some(node) => protocol::Pod::Bound { here: *node == key.node },
            None if pod.gated() => protocol::Pod::Gated,
            None => protocol::Pod::Unbound,
        },
    };
    let claim_state = claim_state(claim.as_deref(), pod.as_deref(), key, as_planned, ours, &pod_state);
    let reference = ClaimReference {
        namespace: key.namespace.clone(),
        name: key.claim.clone(),
        uid: claim.as_deref().and_then(|claim| claim.metadata.uid.clone()).unwrap_or_default(),
    };
    let entry = (!devices.is_empty()).then(|| {
        let status = node.as_deref().and_then(|node| node.status.as_ref());
        protocol::Entry {
            ready: status.is_some_and(|status| there().all(|device| ready(status, device, &reference))),
            in_use: status.is_some_and(|status| there().any(|device| in_use(status, device))),
        }
    });
    let observed = Observed {
        pod: pod_state,
        claim: claim_state,
        entry,
        claim_is_ours: ours,
        withdraw: memory.withdraws(key),
        hold: memory.holds(&key.pod_uid),
        pod_read_live: memory.read_live(key),
        superseded: memory.superseded(key),
        held_back: pod.as_ref().is_some_and(|pod| held_back(memory, pod)),
        place_taken: devices.is_empty() && place_taken(node.as_deref(), claim.as_deref(), key),
    };
    Seen { observed, pod, claim, node, devices }
}

/// Whether the pod starts only together with others.
pub fn waits_for_gang(pod: &PodInfo) -> bool {
    pod.gang().is_some() && !pod.let_go()
}

/// Whether it has to wait for others of its gang.
pub fn held_back(memory: &Memory, pod: &PodInfo) -> bool {
    waits_for_gang(pod) && !memory.together(&pod.uid)
}

/// The entries of a placement.
pub fn devices_of(node: &GpuNode, key: &Key) -> Vec<Partition> {
    let all = node.spec.partitions.iter();
    all.filter(|partition| owns(key, &partition.owner)).cloned().collect()
}

/// Whether the entry is of this placement.
pub fn owns(key: &Key, owner: &Owner) -> bool {
    matches!(owner, Owner::Claim(owner)
        if owner.pod_uid == key.pod_uid && owner.name == key.claim && owner.namespace == key.namespace)
}

/// Whether the claim is allocated to exactly the entries of the placement.
fn is_as_planned<'d>(
    claim: Option<&ResourceClaim>,
    node: Option<&GpuNode>,
    key: &Key,
    devices: impl Iterator<Item = &'d Partition> + Clone,
) -> bool {
    let Some(allocation) = claim.and_then(claims::allocation) else { return false };
    claims::pool(allocation) == Some(&key.node)
        && node.and_then(|node| claims::gives(allocation, node, devices.clone())).unwrap_or_else(|| {
            // The GPU is out of the report: nothing says that the allocation is another.
            claims::given(allocation).len() == devices.count()
        })
}

/// The pod for which the placement is kept: the one that it was made for, or, if that is over, another that shares the
/// claim. `claim` only if its allocation is this placement's: a pod that has got another place with it is none of it.
fn consumer(world: &World, here: Here<'_>, key: &Key, claim: Option<&ResourceClaim>) -> Option<Arc<PodInfo>> {
    let first = here.pod(world, key);
    if first.is_some_and(|pod| !pod.done) {
        return first.cloned();
    }
    let reserved = claim.and_then(|claim| claim.status.as_ref()?.reserved_for.as_ref());
    let others = reserved.into_iter().flatten().filter(|consumer| consumer.resource == "pods");
    let alive = others
        .filter_map(|consumer| world.pod(&key.namespace, &consumer.name, &consumer.uid))
        .find(|pod| !pod.done);
    alive.or(first).cloned()
}

fn claim_state(
    claim: Option<&ResourceClaim>,
    pod: Option<&PodInfo>,
    key: &Key,
    as_planned: bool,
    ours: bool,
    pod_state: &protocol::Pod,
) -> protocol::Claim {
    let Some(claim) = claim else { return protocol::Claim::Absent };
    if ours {
        let stolen = match pod {
            Some(pod) => !claims::belongs_to(claim, pod),
            None => claims::owner_uid(claim) != Some(&key.pod_uid),
        };
        if stolen {
            return protocol::Claim::Stolen;
        }
    }
    if claims::allocation(claim).is_none() {
        return if claim.metadata.deletion_timestamp.is_some() {
            protocol::Claim::Deleting
        } else {
            protocol::Claim::Unallocated
        };
    }
    let consumers = claim.status.iter().filter_map(|status| status.reserved_for.as_ref()).flatten();
    let mut held = false;
    let mut reserved_for_us = false;
    for consumer in consumers {
        held |= claims::is_hold(consumer);
        reserved_for_us |= pod.is_some_and(|pod| pod.uid == consumer.uid) || consumer.uid == key.pod_uid;
    }
    // The claim has passed on: the pod of this record is over and the allocation is of the next one.
    if matches!(pod_state, protocol::Pod::Gone | protocol::Pod::Done) && !(reserved_for_us || as_planned) {
        return protocol::Claim::Absent;
    }
    protocol::Claim::Allocated { as_planned, held, deleting: claim.metadata.deletion_timestamp.is_some() }
}

/// Whether the device exists, is healthy and free for the claim. The report may have been made under an older spec: why
/// that does no harm is said in docs/decisions/0001.
fn ready(status: &GpuNodeStatus, device: &Partition, claim: &ClaimReference) -> bool {
    let Some(gpu) = status.gpus.iter().find(|gpu| gpu.uuid == device.gpu) else { return false };
    if gpu.unhealthy.is_some() || gpu.unmanaged.is_some() {
        return false;
    }
    let free = |claims: &[ClaimReference], processes: u32| {
        claims.iter().all(|held| held == claim) && (processes == 0 || !claims.is_empty())
    };
    let instance = device.instance.as_ref().map(|wanted| {
        gpu.instances.iter().find(|instance| {
            instance.placement == wanted.placement
                && kerf_crds::profile::same(&instance.profile, &wanted.profile)
                && instance.uuid.is_some()
                && !instance.foreign
                && instance.unhealthy.is_none()
        })
    });
    let carrier_is_there = match instance {
        None => !gpu.mig.enabled && gpu.instances.is_empty(),
        Some(found) => gpu.mig.enabled && found.is_some(),
    };
    let placement = device.instance.as_ref().map(|wanted| wanted.placement);
    carrier_is_there
        && match (&device.share, instance.flatten()) {
            // The same share may have been elsewhere on the GPU before.
            (Some(wanted), _) => gpu.shares.iter().any(|share| {
                share.id == wanted.id
                    && share.placement == placement
                    && share.problem.is_none()
                    && share.claims.iter().all(|held| held == claim)
            }),
            (None, None) => free(&gpu.claims, gpu.processes),
            (None, Some(instance)) => {
                let carries = gpu.shares.iter().any(|share| share.placement == placement);
                free(&instance.claims, instance.processes) && !carries
            }
        }
}

/// Whether the device is prepared for a claim, or has processes.
fn in_use(status: &GpuNodeStatus, device: &Partition) -> bool {
    let Some(gpu) = status.gpus.iter().find(|gpu| gpu.uuid == device.gpu) else { return false };
    if let Some(wanted) = &device.share {
        return gpu.shares.iter().any(|share| share.id == wanted.id && share.in_use());
    }
    match &device.instance {
        None => !gpu.claims.is_empty() || (!gpu.mig.enabled && gpu.processes > 0),
        Some(wanted) => {
            gpu.instances.iter().any(|instance| instance.placement == wanted.placement && instance.in_use())
        }
    }
}

/// Of these pods those bound somewhere although their claims for Kerf's devices are neither allocated nor on record: they
/// can never run there.
pub fn stranded<'w>(world: &World, pods: impl Iterator<Item = &'w Arc<PodInfo>>) -> Vec<Arc<PodInfo>> {
    let mut stranded = Vec::new();
    let mut recorded: Option<BTreeSet<String>> = None;
    for pod in pods.filter(|pod| pod.node.is_some() && !pod.done && !pod.deleting) {
        let claims = pod.detail.iter().flat_map(|detail| &detail.claims);
        let mut lacks = |name: &String| {
            let key = format!("{}/{name}", pod.namespace);
            let lacks = match world.claims.get(&key) {
                Some(claim) => {
                    claims::allocation(claim).is_none() && requests::claim_is_for_kerf(world, claim)
                }
                None => pod.own_claim() == Some(name),
            };
            lacks && !recorded.get_or_insert_with(|| all_recorded(world)).contains(&key)
        };
        if claims.filter_map(|claim| claim.claim.as_ref()).any(&mut lacks) {
            stranded.push(Arc::clone(pod));
        }
    }
    stranded
}

/// Every claim that is on record.
fn all_recorded(world: &World) -> BTreeSet<String> {
    let entries = world.gpu_nodes.iter().flat_map(|node| &node.spec.partitions);
    let claims = entries.filter_map(|partition| match &partition.owner {
        Owner::Claim(owner) => Some(format!("{}/{}", owner.namespace, owner.name)),
        Owner::Policy(_) | Owner::Reservation(_) => None,
    });
    claims.collect()
}

/// Records that must go because the same claim of the same pod is on record on another node too, which can only come of
/// two writers: [`protocol::counts`] says which stays.
pub fn superseded(world: &World, keys: &BTreeSet<Key>) -> HashSet<Key> {
    let mut by_claim: BTreeMap<(&str, &str, &str), Vec<&Key>> = BTreeMap::new();
    for key in keys {
        by_claim.entry((&key.namespace, &key.claim, &key.pod_uid)).or_default().push(key);
    }
    let mut gone = HashSet::new();
    for ((namespace, name, uid), keys) in by_claim {
        if keys.len() < 2 {
            continue;
        }
        type Place = (String, BTreeSet<claims::Given>);
        let place = |key: &Key| -> Option<(String, Place)> {
            let node = world.gpu_nodes.get(&key.node)?;
            let devices = devices_of(node, key);
            let there = claims::expected(node, &devices).filter(|_| !devices.is_empty())?;
            Some((key.node.clone(), (key.node.clone(), there)))
        };
        let (keys, entries): (Vec<&Key>, Vec<(String, Place)>) =
            keys.into_iter().filter_map(|key| Some((key, place(key)?))).unzip();
        let bound =
            keys.first().and_then(|key| world.pod(namespace, &key.pod, uid)).and_then(|pod| pod.node.clone());
        let allocated = world.claim(namespace, name).and_then(|claim| {
            let allocation = claims::allocation(claim)?;
            Some((claims::node_of(allocation)?, claims::given(allocation)))
        });
        let stays = protocol::counts(&entries, bound.as_ref(), allocated.as_ref());
        gone.extend(
            keys.into_iter()
                .enumerate()
                .filter(|(index, _)| Some(*index) != stays)
                .map(|(_, key)| key.clone()),
        );
    }
    gone
}

/// Whether some device of an allocation without a record is another's by now.
fn place_taken(node: Option<&GpuNode>, claim: Option<&ResourceClaim>, key: &Key) -> bool {
    let (Some(node), Some(claim)) = (node, claim) else { return false };
    let Some(devices) = restore(node, claim, key) else { return false };
    // What is reserved may be somebody's still.
    let others = node.spec.partitions.iter().filter(|partition| matches!(partition.owner, Owner::Claim(_)));
    others.into_iter().any(|other| {
        devices
            .iter()
            .any(|device| device.gpu == other.gpu && crate::controller::desired::collide(device, other))
    })
}

/// The entries that an allocation without a record stands for.
pub fn restore(node: &GpuNode, claim: &ResourceClaim, key: &Key) -> Option<Vec<Partition>> {
    let allocation = claims::allocation(claim)?;
    let owner = |request: &str| {
        Owner::Claim(kerf_crds::gpu_node::ClaimOwner {
            namespace: key.namespace.clone(),
            name: key.claim.clone(),
            pod: key.pod.clone(),
            pod_uid: key.pod_uid.clone(),
            request: request.to_owned(),
        })
    };
    claims::results(allocation)
        .map(|result| claims::partition_of(node, result, owner(&result.request)))
        .collect()
}

#[cfg(test)]
#[path = "placements_tests.rs"]
mod tests;
