//! World → [`kerf_planner::snapshot::Snapshot`], without the requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kerf_crds::conditions::{self, problem_reason};
use kerf_crds::gpu_node::{self, GpuNodeStatus, Owner, Partition, PolicyInstance, Reservation};
use kerf_crds::partition_policy::{MigMode, ModeSwitch, PlacementStrategy};
use kerf_crds::{GpuNode, PartitionPolicy};
use kerf_planner::plan::Placement;
use kerf_planner::snapshot::{
    Capability, Engines, Geometry, GeometryIndex, Gpu, Instance, InstanceState, Node, Profile, Snapshot,
    Strategy,
};
use kube::ResourceExt;

use crate::cache::{PodInfo, World};
use crate::controller::matching::{Match, Matches};

/// A snapshot and the way back from its indices.
#[derive(Debug, Default)]
pub struct Board {
    pub snapshot: Snapshot,
    /// The objects behind `snapshot.nodes`; GPUs are in the order of `status.gpus`.
    pub gpu_nodes: Vec<Arc<GpuNode>>,
    /// Per node: what pods of a lower priority than the key's would give back, for kube-scheduler's preemption.
    pub evictable: Vec<Vec<(i32, BTreeMap<String, i128>)>>,
}

impl Board {
    /// Index of a node.
    pub fn node(&self, name: &str) -> Option<usize> {
        self.gpu_nodes.binary_search_by(|node| node.name_any().as_str().cmp(name)).ok()
    }

    /// The report of a node.
    pub fn status(&self, node: usize) -> Option<&GpuNodeStatus> {
        self.gpu_nodes.get(node)?.status.as_ref()
    }

    /// The report of a GPU.
    pub fn gpu(&self, node: usize, gpu: usize) -> Option<&gpu_node::Gpu> {
        self.status(node)?.gpus.get(gpu)
    }
}

/// Takes the snapshot. `binds`: which reservations keep their slices from everybody.
pub fn take(world: &World, matches: &Matches, binds: impl Fn(&Reservation) -> bool) -> Board {
    let mut board = Board::default();
    let mut places: HashMap<&str, usize> = HashMap::new();
    // In the order of their names, which `Board::node` relies on.
    for gpu_node in world.gpu_nodes.iter() {
        board.gpu_nodes.push(Arc::clone(gpu_node));
    }
    let names: Vec<String> = board.gpu_nodes.iter().map(|node| node.name_any()).collect();
    for (index, name) in names.iter().enumerate() {
        places.insert(name, index);
        let matches = matches.get(name);
        let node = node(
            world,
            &Arc::clone(&board.gpu_nodes[index]),
            name,
            matches,
            &binds,
            &mut board.snapshot.geometries,
        );
        board.snapshot.nodes.push(node);
        board.evictable.push(Vec::new());
    }
    for pod in world.pods.iter() {
        if pod.done {
            continue;
        }
        let Some(&index) = pod.node.as_deref().and_then(|node| places.get(node)) else { continue };
        take_away(&mut board.snapshot.nodes[index].free_milli, &pod.milli);
        board.evictable[index].push((pod.priority, pod.milli.clone()));
    }
    // Pods that are not bound yet, and have a place or wait for room that is being made.
    let mut counted: BTreeSet<(&str, usize)> = BTreeSet::new();
    for (index, gpu_node) in board.gpu_nodes.iter().enumerate() {
        let name = &names[index];
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
                let milli = said.map(|said| kept_milli(world, name, said, pod));
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
    Some(gpu(gpu_node, observed, matched, &binds, geometries))
}

/// Notes on the board what has just been given to a pod.
pub fn note_given(board: &mut Board, pod: &PodInfo, placement: &Placement) {
    let node = &mut board.snapshot.nodes[placement.node];
    for device in &placement.devices {
        let gpu = &mut node.gpus[device.gpu];
        let Some(planned) = device.instance else {
            gpu.taken_whole = true;
            continue;
        };
        let geometry = gpu.geometry.and_then(|index| board.snapshot.geometries.get(index));
        let size =
            geometry.and_then(|all| all.profiles.get(planned.profile)).map_or(0, |profile| profile.size);
        let apart = |other: &Instance| {
            other.start >= planned.start + size || planned.start >= other.start + other.size
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
    for gpu in board.snapshot.nodes.iter_mut().flat_map(|node| &mut node.gpus) {
        if let Some(why) = failing.get(&gpu.uuid) {
            gpu.stuck.get_or_insert_with(|| why.clone());
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

fn node(
    world: &World,
    gpu_node: &GpuNode,
    name: &str,
    matches: Option<&BTreeMap<String, Match>>,
    binds: &impl Fn(&Reservation) -> bool,
    geometries: &mut Vec<Geometry>,
) -> Node {
    let kubernetes = world.nodes.get(name);
    let status = gpu_node.status.as_ref();
    let follows = status.is_some_and(follows);
    let nobody = Match::Nobody;
    let gpus = status.iter().flat_map(|status| &status.gpus).map(|observed| {
        let matched = matches.and_then(|all| all.get(&observed.uuid)).unwrap_or(&nobody);
        gpu(gpu_node, observed, matched, binds, geometries)
    });
    let gpus = gpus.collect();
    match kubernetes {
        Some(node) => Node {
            name: name.to_owned(),
            labels: node.labels.clone(),
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
    geometries: &mut Vec<Geometry>,
) -> Gpu {
    let counts = |partition: &&Partition| {
        partition.gpu == observed.uuid
            && !matches!(&partition.owner, Owner::Reservation(said) if !binds(said))
    };
    let partitions: Vec<&Partition> = gpu_node.spec.partitions.iter().filter(counts).collect();
    let reported = gpu_node.status.as_ref().and_then(|status| status.geometry_of(observed));
    let policy = matched.policy();
    let geometry = reported.map(convert);
    let allowed = match (&geometry, policy) {
        (Some(geometry), Some(policy)) => allowed_profiles(geometry, policy),
        _ => BTreeSet::new(),
    };
    let (mig, whole) =
        policy.map_or((Capability::No, Capability::No), |policy| capabilities(observed, policy));
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
        instances: instances(observed, &partitions, geometry.as_ref()),
        taken_whole: partitions.iter().any(|partition| partition.instance.is_none())
            || !observed.claims.is_empty()
            || (!observed.mig.enabled && observed.processes > 0),
        geometry: geometry.map(|geometry| index_of(geometries, geometry)),
    }
}

fn index_of(geometries: &mut Vec<Geometry>, geometry: Geometry) -> GeometryIndex {
    geometries.iter().position(|known| *known == geometry).unwrap_or_else(|| {
        geometries.push(geometry);
        geometries.len() - 1
    })
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

fn capabilities(observed: &gpu_node::Gpu, policy: &PartitionPolicy) -> (Capability, Capability) {
    let after_switch = if may_switch(observed, policy) { Capability::AfterSwitch } else { Capability::No };
    let (if_enabled, if_disabled) =
        if observed.mig.enabled { (Capability::Now, after_switch) } else { (after_switch, Capability::Now) };
    match policy.spec.mig.mode {
        MigMode::Dynamic => (if_enabled, if_disabled),
        MigMode::Static => (if_enabled, Capability::No),
        MigMode::Off => (Capability::No, if_disabled),
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
            _ if instance.foreign || instance.in_use() || instance.unhealthy.is_some() => {
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
    for (partition, seen) in partitions.iter().zip(seen) {
        let Some(wanted) = &partition.instance else { continue };
        if seen {
            continue;
        }
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
