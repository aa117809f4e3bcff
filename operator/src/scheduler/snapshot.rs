//! World → [`kerf_planner::snapshot::Snapshot`], without the requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kerf_crds::conditions::{self, problem_reason};
use kerf_crds::gpu_node::{self, GpuNodeStatus, Isolation, Owner, Partition, PolicyInstance, Reservation};
use kerf_crds::partition_policy::{MigMode, ModeSwitch, PlacementStrategy, SharesMode};
use kerf_crds::{GpuNode, PartitionPolicy};
use kerf_planner::plan::Placement;
use kerf_planner::snapshot::{
    Capability, Carrier, Engines, Geometry, GeometryIndex, Gpu, Instance, InstanceState, Node, Portion,
    Profile, Snapshot, Strategy, TakenShare,
};
use kube::ResourceExt;

use super::views::Views;
use crate::cache::{Group, NodeInfo, PodInfo, World, quantity};
use crate::controller::matching::{Match, Matches};

/// A snapshot and the way back from its indices.
#[derive(Debug, Default)]
pub struct Board {
    pub snapshot: Snapshot,
    /// The objects behind `snapshot.nodes`; GPUs are in the order of `status.gpus`.
    pub gpu_nodes: Vec<Arc<GpuNode>>,
    /// Per node: the pods that are bound there.
    pub pods: Vec<Option<Group<PodInfo>>>,
    /// Nodes of which not every record is of a pod that runs.
    pub open: Vec<usize>,
    /// One GPU of each kind.
    pub kinds: Vec<(usize, usize)>,
}

impl Board {
    /// Index of a node.
    pub fn node(&self, name: &str) -> Option<usize> {
        let name_of = |node: &Arc<GpuNode>| node.metadata.name.as_deref().unwrap_or_default().cmp(name);
        self.gpu_nodes.binary_search_by(name_of).ok()
    }

    /// The report of a node.
    pub fn status(&self, node: usize) -> Option<&GpuNodeStatus> {
        self.gpu_nodes.get(node)?.status.as_ref()
    }

    /// The report of a GPU.
    pub fn gpu(&self, node: usize, gpu: usize) -> Option<&gpu_node::Gpu> {
        self.status(node)?.gpus.get(gpu)
    }

    /// What pods of a node with a lower priority would give back, for kube-scheduler's preemption.
    pub fn evictable(&self, node: usize, priority: i32) -> impl Iterator<Item = &BTreeMap<String, i128>> {
        let pods = self.pods[node].iter().flat_map(|pods| pods.values());
        pods.filter(move |pod| !pod.done && pod.priority < priority).map(|pod| &pod.milli)
    }
}

/// Takes the snapshot. `binds`: which reservations keep their slices from everybody.
pub fn take(world: &World, views: &Views, binds: impl Fn(&Reservation) -> bool) -> Board {
    let mut board = Board::default();
    board.snapshot.geometries = views.geometries();
    let mut kinds = BTreeSet::new();
    // In the order of their names, which `Board::node` relies on.
    for (index, (view, gpu_node)) in views.nodes().enumerate() {
        board.gpu_nodes.push(Arc::clone(gpu_node));
        board.pods.push(view.pods().cloned());
        for &(kind, gpu) in &view.kinds {
            if kinds.insert(kind) {
                board.kinds.push((index, gpu));
            }
        }
        if !view.settled() {
            board.open.push(index);
        }
        board.snapshot.nodes.push(views.contents(view, &board.snapshot.geometries, &binds));
    }
    // Pods that are not bound yet, and have a place or wait for room that is being made.
    let mut counted: BTreeSet<(&str, usize)> = BTreeSet::new();
    for &index in &board.open {
        let gpu_node = &board.gpu_nodes[index];
        for partition in &gpu_node.spec.partitions {
            let (namespace, pod, uid, said) = match &partition.owner {
                Owner::Claim(owner) => (&owner.namespace, &owner.pod, &owner.pod_uid, None),
                Owner::Reservation(said) if said.controller.is_none() && binds(said) => {
                    (&said.pod.namespace, &said.pod.name, &said.pod.uid, Some(said))
                }
                Owner::Reservation(_) | Owner::Policy(_) => continue,
            };
            if !counted.insert((uid, index)) {
                continue;
            }
            let Some(pod) = world.pod(namespace, pod, uid) else { continue };
            if pod.node.is_none() && !pod.done {
                let milli = said.map(|said| kept_milli(world, &gpu_node.name_any(), said, pod));
                take_away(&mut board.snapshot.nodes[index].free_milli, milli.as_ref().unwrap_or(&pod.milli));
            }
        }
    }
    board
}

/// A GPU as it would be if these reservations were the only ones.
pub fn gpu_with(
    board: &Board,
    matches: &Matches,
    node: usize,
    index: usize,
    binds: impl Fn(&Reservation) -> bool,
    geometries: &mut Vec<Geometry>,
) -> Option<Gpu> {
    let gpu_node = &board.gpu_nodes[node];
    let observed = board.gpu(node, index)?;
    let matched = matches.get(&gpu_node.name_any())?.get(&observed.uuid)?;
    let here = geometries_of(gpu_node, geometries);
    Some(gpu(gpu_node, observed, matched, &binds, geometries, &here))
}

/// Notes on the board what has just been given to a pod.
pub fn note_given(board: &mut Board, pod: &PodInfo, placement: &Placement) {
    let node = &mut board.snapshot.nodes[placement.node];
    for device in &placement.devices {
        let gpu = &mut node.gpus[device.gpu];
        let carried = gpu.carrying().any(|carrier| Some(carrier) == device.carrier());
        if let Some(portion) = device.share {
            gpu.shares.push(TakenShare { instance: device.carrier(), portion });
        }
        let Some(planned) = device.instance.filter(|_| !carried) else {
            gpu.taken_whole |= device.instance.is_none() && device.share.is_none();
            continue;
        };
        let geometry = gpu.geometry.and_then(|index| board.snapshot.geometries.get(index));
        let size =
            geometry.and_then(|all| all.profiles.get(planned.profile)).map_or(0, |profile| profile.size);
        let apart = |other: &Instance| {
            other.start >= planned.start.saturating_add(size)
                || planned.start >= other.start.saturating_add(other.size)
        };
        gpu.instances.retain(|other| other.state == InstanceState::Taken || apart(other));
        gpu.instances.push(Instance {
            profile: Some(planned.profile),
            start: planned.start,
            size,
            state: InstanceState::Taken,
            exists: planned.exists,
        });
    }
    take_away(&mut node.free_milli, &pod.milli);
}

/// What a reservation keeps of its node's other resources for the pod that waits: what those who move will not give back.
pub fn kept_milli(world: &World, node: &str, said: &Reservation, pod: &PodInfo) -> BTreeMap<String, i128> {
    let mut milli = pod.milli.clone();
    let moved = said.moves.iter().filter_map(|moved| world.pod(&moved.namespace, &moved.name, &moved.uid));
    for moved in moved.filter(|moved| moved.node.as_deref() == Some(node) && !moved.done) {
        for (name, amount) in &moved.milli {
            if let Some(kept) = milli.get_mut(name) {
                *kept = (*kept - amount).max(0);
            }
        }
    }
    milli
}

/// Notes GPUs on which steps have failed until a moment ago, by UUID: they are given time.
pub fn note_failing(board: &mut Board, failing: &HashMap<String, String>) {
    if failing.is_empty() {
        return;
    }
    for index in 0..board.snapshot.nodes.len() {
        for gpu in 0..board.snapshot.nodes[index].gpus.len() {
            if let Some(why) = failing.get(&board.snapshot.nodes[index].gpus[gpu].uuid) {
                board.snapshot.nodes[index].gpus[gpu].stuck.get_or_insert_with(|| why.clone());
            }
        }
    }
}

/// The opposite of [`take_away`].
pub fn give_back(free: &mut BTreeMap<String, i128>, given: &BTreeMap<String, i128>) {
    for (name, amount) in given {
        if let Some(left) = free.get_mut(name) {
            *left += amount;
        }
    }
}

/// Resources that a node does not have at all are left missing.
pub fn take_away(free: &mut BTreeMap<String, i128>, taken: &BTreeMap<String, i128>) {
    for (name, amount) in taken {
        if let Some(left) = free.get_mut(name) {
            *left -= amount;
        }
    }
}

/// The planner's node, before anything is taken of its resources. `here`: numbers of its geometries, by name.
pub(super) fn node(
    kubernetes: Option<&NodeInfo>,
    gpu_node: &GpuNode,
    name: &str,
    matches: &BTreeMap<String, Match>,
    binds: &impl Fn(&Reservation) -> bool,
    geometries: &[Geometry],
    here: &BTreeMap<&str, GeometryIndex>,
) -> Node {
    let status = gpu_node.status.as_ref();
    let follows = status.is_some_and(follows);
    let nobody = Match::Nobody;
    let gpus = status.iter().flat_map(|status| &status.gpus).map(|observed| {
        let matched = matches.get(&observed.uuid).unwrap_or(&nobody);
        gpu(gpu_node, observed, matched, binds, geometries, here)
    });
    let gpus = gpus.collect();
    match kubernetes {
        Some(node) => Node {
            name: name.to_owned(),
            labels: Arc::clone(&node.labels),
            taints: node.taints.clone(),
            unschedulable: node.unschedulable,
            ready: node.ready && !node.deleting && follows,
            free_milli: node.allocatable.clone(),
            gpus,
        },
        // The report of a node that is gone.
        None => Node { name: name.to_owned(), gpus, ..Node::default() },
    }
}

fn gpu(
    gpu_node: &GpuNode,
    observed: &gpu_node::Gpu,
    matched: &Match,
    binds: &impl Fn(&Reservation) -> bool,
    geometries: &[Geometry],
    here: &BTreeMap<&str, GeometryIndex>,
) -> Gpu {
    let counts = |partition: &&Partition| {
        partition.gpu == observed.uuid
            && !matches!(&partition.owner, Owner::Reservation(said) if !binds(said))
    };
    let partitions: Vec<&Partition> = gpu_node.spec.partitions.iter().filter(counts).collect();
    let policy = matched.policy();
    let cut = observed.geometry.as_deref().and_then(|name| here.get(name)).copied();
    let geometry = cut.map(|index| &geometries[index]);
    // One that cannot be cut, as far as is known, can still be shared.
    let index = cut.or_else(|| geometries.iter().position(|known| *known == uncut(observed)));
    let allowed = match (geometry, policy) {
        (Some(geometry), Some(policy)) => allowed_profiles(geometry, policy),
        _ => BTreeSet::new(),
    };
    let (mig, whole, shared) = policy
        .map_or((Capability::No, Capability::No, Capability::No), |policy| capabilities(observed, policy));
    let reported = gpu_node.status.as_ref().and_then(|status| status.geometry_of(observed));
    let room = policy.map(|policy| share_room(observed, reported, policy, &allowed)).unwrap_or_default();
    let shares = shares(observed, &partitions, reported);
    Gpu {
        uuid: observed.uuid.clone(),
        closed: closed(observed, matched),
        stuck: observed.problem.as_ref().filter(|problem| !only_waits(problem)).map(text),
        mig: if geometry.is_some() { mig } else { Capability::No },
        whole,
        allowed,
        fixed: policy.is_some_and(|policy| policy.spec.mig.mode == MigMode::Static),
        strategy: match policy.map(|policy| policy.spec.placement).unwrap_or_default() {
            PlacementStrategy::Pack => Strategy::Pack,
            PlacementStrategy::Spread => Strategy::Spread,
        },
        instances: instances(observed, &partitions, geometry),
        taken_whole: partitions.iter().any(|one| one.instance.is_none() && one.share.is_none())
            || !observed.claims.is_empty()
            || (!observed.mig.enabled && observed.processes > 0 && shares.is_empty()),
        geometry: index,
        shared: if room.contains_key(&None) { shared } else { Capability::No },
        share_room: room,
        equal_shares: observed.sharing.as_ref().is_some_and(|sharing| sharing.equal_sizes),
        shares,
    }
}

/// What stands for the geometry of a GPU that cannot be cut.
fn uncut(observed: &gpu_node::Gpu) -> Geometry {
    Geometry { name: observed.product.clone(), ..Geometry::default() }
}

/// What all shares of one carrier may have together: of the GPU itself, and of instances of each of the allowed profiles
/// that may carry some.
fn share_room(
    observed: &gpu_node::Gpu,
    cut: Option<&gpu_node::Geometry>,
    policy: &PartitionPolicy,
    allowed: &BTreeSet<usize>,
) -> BTreeMap<Carrier, Portion> {
    let shares = &policy.spec.shares;
    // What is no quantity was refused when the policy was written: then nothing can be promised.
    let reserve =
        quantity::milli(&shares.memory_reserve).and_then(|milli| u64::try_from(milli.max(0) / 1000).ok());
    let (Some(sharing), Some(reserve)) = (&observed.sharing, reserve) else { return BTreeMap::new() };
    let room = |memory_bytes: u64, compute_milli, max_clients| Portion {
        memory_bytes: memory_bytes.saturating_sub(reserve),
        compute_milli,
        clients: shares.max_per_gpu.min(max_clients),
    };
    let itself = shares.gpus == SharesMode::Allow && sharing.isolation >= shares.isolation;
    let itself = itself.then(|| {
        (None, room(observed.memory_bytes, u64::from(shares.compute_percent) * 1000, sharing.max_clients))
    });
    let cut = cut.filter(|_| shares.isolation == Isolation::Process);
    let profiles = cut.into_iter().flat_map(|geometry| geometry.profiles.iter().enumerate());
    // Of the GPU's compute slices: its largest instance has all of them.
    let slices = profiles.clone().map(|(_, profile)| profile.compute_slices).max().unwrap_or_default();
    let carries = |name: &str| shares.instances.iter().any(|pattern| pattern.matches_profile(name));
    let instances = profiles
        .filter(|(index, profile)| allowed.contains(index) && carries(&profile.name))
        .filter_map(|(index, profile)| {
            let compute = cut?.compute_of(profile, shares.compute_percent.into());
            let clients = sharing.max_clients.saturating_mul(profile.compute_slices).checked_div(slices)?;
            Some((Some(index), room(profile.memory_bytes, compute, clients)))
        });
    itself.into_iter().chain(instances).collect()
}

/// The shares on a GPU: those on record, and those that are still in use.
fn shares(
    observed: &gpu_node::Gpu,
    partitions: &[&Partition],
    cut: Option<&gpu_node::Geometry>,
) -> Vec<TakenShare> {
    let profile = |name: &str| {
        let profiles = cut.into_iter().flat_map(|geometry| geometry.profiles.iter().enumerate());
        profiles.into_iter().find(|(_, profile)| kerf_crds::profile::same(&profile.name, name))
    };
    let taken = |instance, memory_bytes, compute_milli| TakenShare {
        instance,
        portion: Portion { memory_bytes, compute_milli, clients: 1 },
    };
    let on_record = partitions.iter().filter_map(|one| Some((one.instance.as_ref(), one.share.as_ref()?)));
    let known: BTreeSet<&str> = on_record.clone().map(|(_, share)| share.id.as_str()).collect();
    let left = observed.shares.iter().filter(|share| share.in_use() && !known.contains(share.id.as_str()));
    let on_record = on_record.filter_map(|(wanted, share)| {
        let instance = match wanted {
            None => None,
            Some(wanted) => Some((profile(&wanted.profile)?.0, wanted.placement.start)),
        };
        Some(taken(instance, share.memory_bytes, share.compute_milli.into()))
    });
    let left = left.filter_map(|share| {
        let percent = share.compute_percent.into();
        let Some(place) = share.placement else {
            return Some(taken(None, share.memory_bytes, percent * 1000));
        };
        let instance = observed.instances.iter().find(|instance| instance.placement == place)?;
        let (index, profile) = profile(&instance.profile)?;
        Some(taken(Some((index, place.start)), share.memory_bytes, cut?.compute_of(profile, percent)))
    });
    on_record.chain(left).collect()
}

/// The geometries of a node by name, each converted once for all of its GPUs.
fn geometries_of<'a>(
    gpu_node: &'a GpuNode,
    geometries: &mut Vec<Geometry>,
) -> BTreeMap<&'a str, GeometryIndex> {
    let Some(status) = &gpu_node.status else { return BTreeMap::new() };
    let mut index_of = |geometry: Geometry| {
        geometries.iter().position(|known| *known == geometry).unwrap_or_else(|| {
            geometries.push(geometry);
            geometries.len() - 1
        })
    };
    let all: Vec<GeometryIndex> = reported(status).into_iter().map(&mut index_of).collect();
    status.geometries.iter().map(|geometry| geometry.name.as_str()).zip(all).collect()
}

/// The geometries that a node reports, in their order, then what stands for those of its other GPUs that can be shared.
pub fn reported(status: &GpuNodeStatus) -> Vec<Geometry> {
    let mut all: Vec<Geometry> = status.geometries.iter().map(convert).collect();
    for uncut in all_uncut(status) {
        if !all.contains(&uncut) {
            all.push(uncut);
        }
    }
    all
}

/// What stands for the geometries of GPUs that cannot be cut and can be shared.
pub(super) fn all_uncut(status: &GpuNodeStatus) -> impl Iterator<Item = Geometry> {
    status.gpus.iter().filter(|gpu| gpu.geometry.is_none() && gpu.sharing.is_some()).map(uncut)
}

/// Whether the node's daemon sees its hardware and follows the spec.
pub fn follows(status: &GpuNodeStatus) -> bool {
    status.conditions.iter().any(|c| c.type_ == conditions::node::READY && c.status == "True")
}

/// The planner's form of a geometry.
pub fn convert(reported: &gpu_node::Geometry) -> Geometry {
    let engines = |engines: &gpu_node::Engines| Engines {
        decoder: engines.decoder,
        encoder: engines.encoder,
        jpeg: engines.jpeg,
        ofa: engines.ofa,
    };
    Geometry {
        name: reported.name.clone(),
        memory_slices: reported.memory_slices,
        engines: engines(&reported.engines),
        profiles: reported
            .profiles
            .iter()
            .map(|profile| Profile {
                name: profile.name.clone(),
                memory_bytes: profile.memory_bytes,
                multiprocessors: profile.multiprocessors,
                compute_slices: profile.compute_slices,
                size: profile.size,
                starts: profile.starts.clone(),
                max_instances: profile.max_instances,
                engines: engines(&profile.engines),
            })
            .collect(),
    }
}

/// The profiles that the policy lets be handed out, by index.
pub fn allowed_profiles(geometry: &Geometry, policy: &PartitionPolicy) -> BTreeSet<usize> {
    let patterns = &policy.spec.mig.allowed_profiles;
    let allowed = |name: &str| patterns.is_empty() || patterns.iter().any(|p| p.matches_profile(name));
    geometry.profiles.iter().enumerate().filter(|(_, p)| allowed(&p.name)).map(|(index, _)| index).collect()
}

/// Whether the policy lets the GPU's MIG mode be switched.
pub fn may_switch(observed: &gpu_node::Gpu, policy: &PartitionPolicy) -> bool {
    match policy.spec.mig.mode_switch {
        ModeSwitch::Never => false,
        ModeSwitch::WithoutReset => !observed.mig.switch_needs_reset,
        ModeSwitch::WithReset => true,
    }
}

/// Whether it can be cut, handed out whole, and shared.
fn capabilities(observed: &gpu_node::Gpu, policy: &PartitionPolicy) -> (Capability, Capability, Capability) {
    let after_switch = if may_switch(observed, policy) { Capability::AfterSwitch } else { Capability::No };
    let (if_enabled, if_disabled) =
        if observed.mig.enabled { (Capability::Now, after_switch) } else { (after_switch, Capability::Now) };
    match policy.spec.mig.mode {
        MigMode::Dynamic => (if_enabled, if_disabled, if_disabled),
        MigMode::Static => (if_enabled, Capability::No, Capability::No),
        MigMode::Off => (Capability::No, if_disabled, if_disabled),
    }
}

fn closed(observed: &gpu_node::Gpu, matched: &Match) -> Option<String> {
    match matched {
        Match::Nobody => return Some("no PartitionPolicy matches it".into()),
        Match::Conflict(policies) => {
            let names: Vec<String> = policies.iter().map(|policy| policy.name_any()).collect();
            return Some(format!("the PartitionPolicies {} all match it", names.join(", ")));
        }
        Match::One(_) => {}
    }
    let hangs = observed.problem.as_ref().filter(|problem| problem.reason == problem_reason::CALL_HANGS);
    observed.unmanaged.as_ref().or(observed.unhealthy.as_ref()).or(hangs).map(text)
}

/// Whether a GPU's problem is only that something in use stands where something else is wanted: its free slices are as
/// good as any.
fn only_waits(problem: &gpu_node::Reason) -> bool {
    [problem_reason::IN_USE, problem_reason::OVERLAP].contains(&problem.reason.as_str())
}

/// What a reason says.
pub fn text(reason: &gpu_node::Reason) -> String {
    if reason.message.is_empty() { reason.reason.clone() } else { reason.message.clone() }
}

fn instances(
    observed: &gpu_node::Gpu,
    partitions: &[&Partition],
    geometry: Option<&Geometry>,
) -> Vec<Instance> {
    let profile = |name: &str| {
        geometry?.profiles.iter().position(|profile| kerf_crds::profile::same(&profile.name, name))
    };
    let carries =
        |place| observed.shares.iter().any(|share| share.placement == Some(place) && share.in_use());
    let state = |owner: &Owner| match owner {
        Owner::Claim(_) | Owner::Reservation(_) => InstanceState::Taken,
        Owner::Policy(owner) => match owner.kind {
            PolicyInstance::Static => InstanceState::Idle,
            PolicyInstance::Warm => InstanceState::Warm,
        },
    };
    let mut all = Vec::new();
    let mut seen = vec![false; partitions.len()];
    for instance in &observed.instances {
        let is_it = |partition: &Partition| {
            partition.instance.as_ref().is_some_and(|wanted| {
                wanted.placement == instance.placement
                    && kerf_crds::profile::same(&wanted.profile, &instance.profile)
            })
        };
        let entry = partitions.iter().position(|partition| is_it(partition));
        // It may be one's and reserved for another.
        for (seen, partition) in seen.iter_mut().zip(partitions) {
            *seen |= is_it(partition);
        }
        let state = match entry {
            // A failed one that can be spared is gone from the report as soon as nobody uses it: the daemon takes it down.
            _ if instance.foreign
                || instance.in_use()
                || carries(instance.placement)
                || instance.unhealthy.is_some() =>
            {
                InstanceState::Taken
            }
            Some(entry) => state(&partitions[entry].owner),
            // On its way out: what will stand in its place is somebody's already.
            None if doomed(instance, partitions) => continue,
            None => InstanceState::Idle,
        };
        all.push(Instance {
            profile: profile(&instance.profile),
            start: instance.placement.start,
            size: instance.placement.size,
            state,
            // One without a MIG device is no use to a pod as it is.
            exists: state == InstanceState::Taken || instance.uuid.is_some(),
        });
    }
    let mut carriers: Vec<&gpu_node::WantedInstance> = Vec::new();
    for (partition, seen) in partitions.iter().zip(seen) {
        let Some(wanted) = &partition.instance else { continue };
        if seen || carriers.contains(&wanted) {
            continue;
        }
        // Each of its shares has an entry, and it is one instance.
        carriers.extend(partition.share.is_some().then_some(wanted));
        all.push(Instance {
            profile: profile(&wanted.profile),
            start: wanted.placement.start,
            size: wanted.placement.size,
            state: state(&partition.owner),
            exists: false,
        });
    }
    all
}

fn doomed(instance: &gpu_node::Instance, partitions: &[&Partition]) -> bool {
    partitions.iter().any(|partition| {
        partition.instance.as_ref().is_some_and(|wanted| wanted.placement.overlaps(&instance.placement))
            || partition.instance.is_none()
    })
}

#[cfg(test)]
#[path = "snapshot_tests.rs"]
mod tests;
