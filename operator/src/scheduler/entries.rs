//! What a placement adds to its node's spec.

use std::collections::{BTreeMap, BTreeSet};

use kerf_crds::gpu_node::{
    ClaimOwner, Gpu, Isolation, Owner, Partition, Placement, WantedInstance, WantedShare,
};
use kerf_planner::plan::PlacedDevice;
use kube::ResourceExt;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::placements::Key;
use super::requests::Wanted;
use super::snapshot::Board;
use crate::cache::PodInfo;

/// Changes to the entries of nodes, by node.
#[derive(Debug, Default)]
pub struct Changes {
    pub added: BTreeMap<String, Vec<Partition>>,
    /// Placements that come to be.
    pub new: BTreeMap<String, Vec<Key>>,
    pub removed: BTreeMap<String, Vec<Key>>,
}

/// Makes a placement's entries.
pub fn commit(
    board: &Board,
    pod: &PodInfo,
    wanted: &Wanted,
    node: usize,
    devices: &[PlacedDevice],
    changes: &mut Changes,
) {
    let name = board.gpu_nodes[node].name_any();
    let mut entries = Vec::new();
    let mut keys: BTreeSet<Key> = BTreeSet::new();
    for (index, device) in devices.iter().enumerate() {
        let Some((claim, request)) = wanted.parts.get(&device.request) else { return };
        let Some(mut entry) = entry(board, node, device, pod, claim, request) else { return };
        if let Some(share) = &mut entry.share {
            share.id = share_id(&entry.owner, &entry.gpu, index);
        }
        entries.push(entry);
        keys.insert(Key {
            node: name.clone(),
            namespace: pod.namespace.clone(),
            claim: claim.clone(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
        });
    }
    changes.added.entry(name.clone()).or_default().extend(entries);
    changes.new.entry(name).or_default().extend(keys);
}

fn entry(
    board: &Board,
    node: usize,
    device: &PlacedDevice,
    pod: &PodInfo,
    claim: &str,
    request: &str,
) -> Option<Partition> {
    let owner = Owner::Claim(ClaimOwner {
        namespace: pod.namespace.clone(),
        name: claim.to_owned(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        request: match &device.subrequest {
            Some(subrequest) => format!("{request}/{subrequest}"),
            None => request.to_owned(),
        },
    });
    partition(board, node, device, owner)
}

/// A device as an entry.
pub fn partition(board: &Board, node: usize, device: &PlacedDevice, owner: Owner) -> Option<Partition> {
    let gpu = board.snapshot.nodes[node].gpus.get(device.gpu)?;
    let instance = match &device.instance {
        None => None,
        Some(planned) => {
            let profile = board.snapshot.geometries[gpu.geometry?].profiles.get(planned.profile)?;
            Some(WantedInstance {
                profile: profile.name.clone(),
                placement: Placement { start: planned.start, size: profile.size },
            })
        }
    };
    let share = device.share.map(|portion| WantedShare {
        id: String::new(),
        memory_bytes: portion.memory_bytes,
        compute_milli: u32::try_from(portion.compute_milli).unwrap_or(u32::MAX),
        isolation: board
            .gpu(node, device.gpu)
            .map(|gpu| isolation(gpu, instance.as_ref()))
            .unwrap_or_default(),
    });
    Some(Partition { gpu: gpu.uuid.clone(), instance, share, owner })
}

/// Who limits the memory of a share of the GPU, or of an instance on it.
pub fn isolation(gpu: &Gpu, instance: Option<&WantedInstance>) -> Isolation {
    let of_gpu = gpu.sharing.as_ref().filter(|_| instance.is_none());
    of_gpu.map(|sharing| sharing.isolation).unwrap_or(Isolation::Process)
}

/// The share's id: the same for the same place, and no other's.
fn share_id(owner: &Owner, gpu: &str, index: usize) -> String {
    let name = match owner {
        Owner::Claim(owner) => format!("{} {} {} {gpu} {index}", owner.pod_uid, owner.name, owner.request),
        Owner::Policy(_) | Owner::Reservation(_) => String::new(),
    };
    let hash: [u8; 32] = Sha256::digest(name).into();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    Uuid::new_v8(bytes).to_string()
}
