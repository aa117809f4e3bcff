//! One scheduling cycle: everything between looking and writing. Pure but for the pace that [`Memory`] sets.
//!
//! 1. snapshot: policies meet GPUs, nodes and pods become what the planner reads
//! 2. join: each placement on record is asked for its next step
//! 3. plan: pods without a place
//! 4. compose: what each node is told, in one object
//!
//! Writing it is [`super::apply`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::conditions::pod_reason;
use kerf_crds::gpu_node::{
    ClaimOwner, Owner, Partition, Placement, PolicyInstance, PolicyOwner, WantedInstance,
};
use kerf_crds::partition_policy::MigMode;
use kerf_crds::{GpuNode, GpuNodeSpec};
use kerf_planner::layout::{WarmWish, warm};
use kerf_planner::nodes::unsuitable;
use kerf_planner::plan::{PlacedDevice, Plan, RefusalKind};
use kerf_planner::protocol::{self, Step, next};
use kerf_planner::snapshot::Snapshot;
use kube::ResourceExt;

use super::memory::Memory;
use super::placements::{self, Key, Seen};
use super::requests::{self, Asks, Memo, Wanted};
use super::selectors::Selectors;
use super::snapshot::{self, Board};
use super::tell::{self, Sentence};
use crate::cache::{PodInfo, World, pod::seconds};
use crate::controller::desired::{self, Problems};
use crate::controller::matching::{self, Match, Matches};

/// How many pods kube-scheduler may be asked to preempt for in one cycle.
const PREEMPTIONS: usize = 1;

/// What a cycle wants written.
#[derive(Debug, Default)]
pub struct Decision {
    /// Nodes whose spec changes, and the placements that the change makes.
    pub specs: Vec<NodeWrite>,
    /// Placements whose next step is a write to something else.
    pub drive: BTreeSet<Key>,
    /// Pods whose claims are all allocated, with others before them, and that still have Kerf's gate.
    pub ungate: Vec<Arc<PodInfo>>,
    /// Pods whose claim a quota refused a while ago.
    pub quota: Vec<Arc<PodInfo>>,
    /// Pods bound where they can never run.
    pub stranded: Vec<Arc<PodInfo>>,
    /// What pods are told.
    pub sentences: Vec<(Arc<PodInfo>, Sentence)>,
    /// For the policies' status.
    pub matches: Matches,
    /// See [`Problems`].
    pub problems: Problems,
}

/// A node's new spec.
#[derive(Debug)]
pub struct NodeWrite {
    pub node: Arc<GpuNode>,
    pub spec: GpuNodeSpec,
    /// Placements that come to be with it.
    pub added: Vec<Key>,
    /// Placements that end with it.
    pub removed: Vec<Key>,
}

/// Changes to the entries of nodes, by node.
#[derive(Debug, Default)]
struct Changes {
    added: BTreeMap<String, Vec<Partition>>,
    new: BTreeMap<String, Vec<Key>>,
    removed: BTreeMap<String, Vec<Key>>,
}

/// Decides. `wall` is the time in seconds since 1970, for reservations.
pub fn decide(world: &World, memory: &Memory, selectors: &Selectors, now: Instant, wall: i64) -> Decision {
    let mut decision = Decision::default();
    let mut changes = Changes::default();

    // 1. Snapshot.
    let matches = matching::matches(world);
    let mut board = snapshot::take(world, &matches);

    // 2. Join.
    let keys = placements::all(world);
    memory.set_superseded(placements::superseded(world, &keys));
    let mut troubled: Vec<(Key, Arc<PodInfo>)> = Vec::new();
    let mut placed: BTreeSet<String> = BTreeSet::new();
    let mut lost: BTreeSet<String> = BTreeSet::new();
    for key in &keys {
        let mut seen = placements::look(world, memory, key);
        if matches!(seen.observed.claim, protocol::Claim::Allocated { .. }) {
            memory.forget_read(key);
            seen.observed.pod_read_live = false;
        }
        let waiting = matches!(seen.observed.pod, protocol::Pod::Gated | protocol::Pod::Unbound);
        if !seen.devices.is_empty() && waiting {
            placed.insert(key.pod_uid.clone());
        }
        if waiting && !seen.devices.is_empty() && !seen.observed.withdraw && !seen.observed.superseded {
            match trouble(&board, &seen, key) {
                Some(Trouble::Hopeless) => {
                    memory.withdraw(key, now);
                    seen.observed.withdraw = true;
                }
                Some(Trouble::BetterElsewhere) if memory.calm(&key.pod_uid, now) => {
                    troubled.extend(seen.pod.clone().map(|pod| (key.clone(), pod)));
                }
                _ => {}
            }
        }
        let step = next(&seen.observed);
        if step == Step::EvictPod {
            lost.insert(key.pod_uid.clone());
        }
        match step {
            Step::Wait(_) => {}
            Step::RemoveEntry => changes.removed.entry(key.node.clone()).or_default().push(key.clone()),
            Step::RestoreEntry => {
                if let (Some(node), Some(claim)) = (&seen.node, &seen.claim)
                    && let Some(entries) = placements::restore(node, claim, key)
                {
                    changes.added.entry(key.node.clone()).or_default().extend(entries);
                }
            }
            _ if memory.may_try(&key.pod_uid, now) => {
                decision.drive.insert(key.clone());
            }
            _ => {}
        }
        if waiting
            && !seen.observed.superseded
            && let Some(pod) = &seen.pod
        {
            let sentence = tell::of_placement(&seen, step, memory.trouble(&pod.uid));
            decision.sentences.extend(sentence.map(|sentence| (Arc::clone(pod), sentence)));
        }
    }
    // A pod's claims are on one node, all or none.
    let leaving: BTreeSet<&str> =
        keys.iter().filter(|key| memory.withdraws(key)).map(|key| key.pod_uid.as_str()).collect();
    for key in keys.iter().filter(|key| placed.contains(&key.pod_uid) && !memory.withdraws(key)) {
        if leaving.contains(key.pod_uid.as_str()) {
            memory.withdraw(key, now);
            decision.drive.insert(key.clone());
        }
    }
    for pod in placements::stranded(world) {
        lost.insert(pod.uid.clone());
        if memory.stranded(&pod.uid, now) {
            decision.stranded.push(pod);
        }
    }
    for key in keys.iter().filter(|key| !lost.contains(&key.pod_uid)) {
        memory.not_stranded(&key.pod_uid);
    }

    // 3. Plan.
    let memo = Memo::default();
    let mut wanted = ask(world, &board, memory, selectors, &memo, now, &placed, &mut decision);
    board.snapshot.requests =
        wanted.iter_mut().map(|(_, wanted)| std::mem::take(&mut wanted.request)).collect();
    let mut plan = kerf_planner::plan(&board.snapshot);
    for placement in &plan.placements {
        let (pod, wanted) = &wanted[placement.request];
        commit(&board, pod, wanted, placement.node, &placement.devices, &mut changes);
    }
    preempt(&board, &wanted, memory, &mut plan, &mut changes);
    for refusal in &plan.refusals {
        let (pod, _) = &wanted[refusal.request];
        let reason = match refusal.kind {
            RefusalKind::NoSuchDevice => pod_reason::NO_SUCH_PROFILE,
            RefusalKind::NoRoom => pod_reason::NO_ROOM,
            RefusalKind::NodesDoNotFit => pod_reason::NODES_DO_NOT_FIT,
        };
        decision.sentences.push((Arc::clone(pod), Sentence::waiting(reason, refusal.message.clone())));
    }
    for key in elsewhere(world, &board, selectors, &memo, &troubled) {
        memory.withdraw(&key, now);
        decision.drive.insert(key);
    }

    // 4. Compose.
    let warm = warm_entries(&board, &matches, &plan);
    for node in &board.gpu_nodes {
        let name = node.name_any();
        let removed = changes.removed.remove(&name).unwrap_or_default();
        let added = changes.added.remove(&name).unwrap_or_default();
        let stays = node.spec.partitions.iter().filter(|partition| match &partition.owner {
            Owner::Claim(_) => !removed.iter().any(|key| placements::owns(key, &partition.owner)),
            Owner::Reservation(reservation) => seconds(&reservation.expires).is_some_and(|end| end > wall),
            Owner::Policy(_) => false,
        });
        let claims: Vec<Partition> = stays.cloned().chain(added).collect();
        let nothing = BTreeMap::new();
        let spec = desired::spec(
            node,
            matches.get(&name).unwrap_or(&nothing),
            claims,
            warm.get(&name).cloned().unwrap_or_default(),
            &mut decision.problems,
        );
        if spec != node.spec {
            decision.specs.push(NodeWrite {
                node: Arc::clone(node),
                spec,
                added: changes.new.remove(&name).unwrap_or_default(),
                removed,
            });
        }
    }
    decision.matches = matches;
    decision
}

/// Why a place that is not used yet should be given up.
enum Trouble {
    /// It can come to nothing.
    Hopeless,
    /// It cannot be used as things are; whether there is a better one must be seen.
    BetterElsewhere,
}

fn trouble(board: &Board, seen: &Seen, key: &Key) -> Option<Trouble> {
    let pod = seen.pod.as_ref()?;
    let detail = pod.detail.as_ref()?;
    let Some(index) = board.node(&key.node) else { return Some(Trouble::Hopeless) };
    let node = &board.snapshot.nodes[index];
    let status = board.status(index)?;
    for device in &seen.devices {
        let Some(gpu) = status.gpus.iter().position(|gpu| gpu.uuid == device.gpu) else {
            return Some(Trouble::Hopeless);
        };
        if node.gpus[gpu].closed.is_some() {
            let passes = status.gpus[gpu].problem.is_some()
                && status.gpus[gpu].unhealthy.is_none()
                && status.gpus[gpu].unmanaged.is_none();
            return Some(if passes { Trouble::BetterElsewhere } else { Trouble::Hopeless });
        }
    }
    let short = pod
        .milli
        .iter()
        .any(|(name, amount)| *amount > 0 && node.free_milli.get(name).is_none_or(|left| *left < 0));
    (short || unsuitable(node, &detail.needs).is_some()).then_some(Trouble::BetterElsewhere)
}

/// Reads what every pod without a place asks for, and tells those that cannot be planned why.
#[allow(clippy::too_many_arguments)]
fn ask(
    world: &World,
    board: &Board,
    memory: &Memory,
    selectors: &Selectors,
    memo: &Memo,
    now: Instant,
    placed: &BTreeSet<String>,
    decision: &mut Decision,
) -> Vec<(Arc<PodInfo>, Box<Wanted>)> {
    let mut wanted: Vec<(Arc<PodInfo>, Box<Wanted>)> = Vec::new();
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    for pod in pods.filter(|pod| pod.node.is_none() && !pod.done && !pod.deleting) {
        if placed.contains(&pod.uid) {
            continue;
        }
        let sentence = match requests::read(world, board, selectors, memo, pod) {
            Asks::Nothing => continue,
            Asks::Allocated => {
                if pod.gated() && memory.may_try(&pod.uid, now) {
                    decision.ungate.push(Arc::clone(pod));
                }
                continue;
            }
            Asks::Cannot(reason, message) => Sentence::waiting(reason, message),
            Asks::For(mut request) => {
                let others = pod.other_gates();
                if !others.is_empty() {
                    let message = format!(
                        "waits for the scheduling gates of others to be removed: {}",
                        others.join(", ")
                    );
                    Sentence::waiting(pod_reason::OTHER_GATES, message)
                } else if let Some((reason, message)) = memory.trouble(&pod.uid)
                    && (reason == pod_reason::QUOTA || !memory.may_try(&pod.uid, now))
                {
                    if reason == pod_reason::QUOTA && memory.may_try(&pod.uid, now) {
                        decision.quota.push(Arc::clone(pod));
                    }
                    Sentence::waiting(reason, message)
                } else {
                    let avoided = memory.avoided(&pod.uid, now);
                    request.request.avoid = avoided.iter().filter_map(|name| board.node(name)).collect();
                    wanted.push((Arc::clone(pod), request));
                    continue;
                }
            }
        };
        decision.sentences.push((Arc::clone(pod), sentence));
    }
    wanted.sort_by(|(a, _), (b, _)| {
        b.priority.cmp(&a.priority).then(a.created.cmp(&b.created)).then_with(|| a.id().cmp(&b.id()))
    });
    wanted
}

/// Makes a placement's entries.
fn commit(
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
    for device in devices {
        let Some((claim, request)) = wanted.parts.get(&device.request) else { return };
        let Some(entry) = entry(board, node, device, pod, claim, request) else { return };
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
    Some(Partition {
        gpu: gpu.uuid.clone(),
        instance,
        owner: Owner::Claim(ClaimOwner {
            namespace: pod.namespace.clone(),
            name: claim.to_owned(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            request: match &device.subrequest {
                Some(subrequest) => format!("{request}/{subrequest}"),
                None => request.to_owned(),
            },
        }),
    })
}

/// Pods that would fit if kube-scheduler preempted for them get their place too, held from the start: it preempts only
/// for a pod whose claim is allocated.
fn preempt(
    board: &Board,
    wanted: &[(Arc<PodInfo>, Box<Wanted>)],
    memory: &Memory,
    plan: &mut Plan,
    changes: &mut Changes,
) {
    let mut done = 0;
    let mut index = 0;
    while index < plan.refusals.len() && done < PREEMPTIONS {
        let refusal = &plan.refusals[index];
        let (pod, request) = &wanted[refusal.request];
        index += 1;
        let may = pod.detail.as_ref().is_some_and(|detail| detail.preempts);
        if refusal.kind != RefusalKind::NodesDoNotFit || !may {
            continue;
        }
        let lower = |milli: &(i32, BTreeMap<String, i128>)| milli.0 < pod.priority;
        if !board.evictable.iter().flatten().any(lower) {
            continue;
        }
        let mut snapshot = Snapshot {
            geometries: board.snapshot.geometries.clone(),
            nodes: board.snapshot.nodes.clone(),
            requests: vec![board.snapshot.requests[refusal.request].clone()],
        };
        // Only where the pods of this plan have not taken GPUs already.
        let taken: BTreeSet<usize> = plan.placements.iter().map(|placement| placement.node).collect();
        for (node, pods) in board.evictable.iter().enumerate() {
            for (_, milli) in pods.iter().filter(|pod| lower(pod)) {
                for (name, amount) in milli {
                    if let Some(free) = snapshot.nodes[node].free_milli.get_mut(name) {
                        *free += amount;
                    }
                }
            }
            if taken.contains(&node) {
                snapshot.nodes[node].ready = false;
            }
        }
        if let Some(placement) = kerf_planner::plan(&snapshot).placements.first() {
            memory.hold(&pod.uid);
            commit(board, pod, request, placement.node, &placement.devices, changes);
            index -= 1;
            plan.refusals.remove(index);
            done += 1;
        }
    }
}

/// Which of the troubled placements have a better place elsewhere.
fn elsewhere(
    world: &World,
    board: &Board,
    selectors: &Selectors,
    memo: &Memo,
    troubled: &[(Key, Arc<PodInfo>)],
) -> BTreeSet<Key> {
    let mut better = BTreeSet::new();
    for (key, pod) in troubled {
        // All of the pod's claims are asked for anew, as if none had a place.
        let fresh = requests::read_afresh(world, board, selectors, memo, pod);
        let Asks::For(mut wanted) = fresh else { continue };
        wanted.request.avoid = board.node(&key.node).into_iter().collect();
        let snapshot = Snapshot {
            geometries: board.snapshot.geometries.clone(),
            nodes: board.snapshot.nodes.clone(),
            requests: vec![wanted.request],
        };
        if !kerf_planner::plan(&snapshot).placements.is_empty() {
            better.insert(key.clone());
        }
    }
    better
}

/// The warm instances of every policy, by node.
fn warm_entries(board: &Board, matches: &Matches, plan: &Plan) -> BTreeMap<String, Vec<Partition>> {
    let mut wishes = Vec::new();
    let mut owners = Vec::new();
    let mut policies = BTreeMap::new();
    for (node, gpu_node) in board.gpu_nodes.iter().enumerate() {
        let name = gpu_node.name_any();
        for (gpu, state) in board.snapshot.nodes[node].gpus.iter().enumerate() {
            let policy = matches.get(&name).and_then(|all| all.get(&state.uuid)).and_then(Match::policy);
            if let Some(policy) = policy
                && policy.spec.mig.mode == MigMode::Dynamic
                && !policy.spec.mig.warm.is_empty()
                && state.closed.is_none()
            {
                let (_, gpus): &mut (_, BTreeSet<(usize, usize)>) = policies
                    .entry(policy.name_any())
                    .or_insert_with(|| (Arc::clone(policy), BTreeSet::new()));
                gpus.insert((node, gpu));
            }
        }
    }
    for (name, (policy, gpus)) in policies {
        for warm in policy.spec.mig.warm.iter().filter(|warm| warm.count > 0) {
            let profiles: BTreeMap<usize, usize> = board
                .snapshot
                .geometries
                .iter()
                .enumerate()
                .filter_map(|(index, geometry)| {
                    let found = |p: &kerf_planner::snapshot::Profile| {
                        kerf_crds::profile::same(&p.name, &warm.profile)
                    };
                    Some((index, geometry.profiles.iter().position(found)?))
                })
                .collect();
            wishes.push(WarmWish { profiles, count: warm.count, gpus: gpus.clone() });
            owners.push(name.clone());
        }
    }
    let mut entries: BTreeMap<String, Vec<Partition>> = BTreeMap::new();
    if wishes.is_empty() {
        return entries;
    }
    for place in warm(&board.snapshot, plan, &wishes) {
        let gpu = &board.snapshot.nodes[place.node].gpus[place.gpu];
        let Some(geometry) = gpu.geometry else { continue };
        let profile = &board.snapshot.geometries[geometry].profiles[place.profile];
        entries.entry(board.gpu_nodes[place.node].name_any()).or_default().push(Partition {
            gpu: gpu.uuid.clone(),
            instance: Some(WantedInstance {
                profile: profile.name.clone(),
                placement: Placement { start: place.start, size: profile.size },
            }),
            owner: Owner::Policy(PolicyOwner {
                name: owners[place.wish].clone(),
                kind: PolicyInstance::Warm,
            }),
        });
    }
    entries
}

/// Whether a placement's next step is one that [`super::apply`] makes by itself.
pub fn is_driven(step: Step) -> bool {
    !matches!(step, Step::Wait(_) | Step::RemoveEntry | Step::RestoreEntry)
}

#[cfg(test)]
#[path = "cycle_tests.rs"]
mod tests;
