//! Who may be moved, and for whom.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::gpu_node::{ClaimOwner, Owner, Partition};
use kerf_crds::partition_policy::MigMode;
use kerf_crds::profile::same;
use kerf_planner::snapshot::{Movable, NodeIndex, PlacedDevice, PlannedInstance};

use super::super::claims;
use super::super::decision::Looking;
use super::super::queue::{Candidate, alike};
use super::super::requests::{self, Asks, Wanted};
use super::super::snapshot::Board;
use super::carry_on::Rooms;
use super::record::is_movable;
use crate::cache::PodInfo;
use crate::controller::desired::collide;
use crate::controller::matching::{Match, Matches};

/// Most rooms that are being made at the same time.
const AT_ONCE: usize = 4;
/// For so many pods that wait a cycle asks whether a quota would let them have a claim at all.
const ASKED: usize = 4;

/// Who may be moved, and for whom.
pub fn offer(looking: &Looking<'_>, matches: &Matches, rooms: &Rooms, candidates: &[Candidate]) -> Offer {
    let Looking { world, memory, now, .. } = looking;
    let mut offer = Offer::default();
    if world.policies.iter().all(|policy| policy.spec.reshape.moves.max_pods == 0) {
        return offer;
    }
    let policies = matches.values().flat_map(|gpus| gpus.values()).filter_map(Match::policy);
    let moves = policies.map(|policy| &policy.spec.reshape.moves).filter(|moves| moves.max_pods > 0);
    let Some(soonest) = moves.map(|moves| moves.after_seconds).min() else { return offer };
    // A room that is only planned is not on the board.
    if rooms.making >= AT_ONCE || !rooms.planned.is_empty() {
        return offer;
    }
    for candidate in candidates {
        let pod = &candidate.pod;
        let waited = memory.waited(&pod.uid, *now).map(|waited| waited.as_secs());
        let waited = waited.filter(|&waited| {
            waited >= u64::from(soonest)
                && candidate.instead_of.is_none()
                && candidate.wanted.request.gang.is_none()
                && !rooms.concerned.contains(&pod.uid)
                && memory.may_make_room(&pod.uid, *now)
        });
        // Nobody is moved for a pod whose claim a quota will refuse.
        let has_claim = |name| world.claim(&pod.namespace, name).is_some();
        let sure = pod.own_claim().is_none_or(has_claim) || memory.was_let_through(&pod.uid, *now);
        offer.unsure.push(waited.is_some() && !sure);
        offer.waited.push(waited.filter(|_| sure));
    }
    if offer.waited.iter().all(Option::is_none) && !offer.unsure.contains(&true) {
        return offer;
    }
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    let may = |pod: &&Arc<PodInfo>| {
        !rooms.concerned.contains(&pod.uid)
            && !memory.was_evicted(&pod.uid)
            && memory.may_be_moved(&pod.uid, *now)
    };
    // Whose slices are kept for somebody already is not asked to go for another.
    let is_overlapped = |pod: &PodInfo| {
        let node = pod.node.as_deref().and_then(|name| world.gpu_nodes.get(name));
        let entries = || node.iter().flat_map(|node| &node.spec.partitions);
        let its = |one: &Partition| matches!(&one.owner, Owner::Claim(owner) if owner.pod_uid == pod.uid);
        let kept = |one: &&Partition| matches!(&one.owner, Owner::Reservation(said) if rooms.stays(said));
        entries()
            .filter(kept)
            .any(|kept| entries().any(|one| its(one) && one.gpu == kept.gpu && collide(one, kept)))
    };
    for pod in pods.filter(may).filter(|pod| !is_overlapped(pod)) {
        if let Some(movable) = movable(looking, matches, pod) {
            offer.movable.push(movable);
            offer.pods.push(Arc::clone(pod));
        }
    }
    // The price: who is the less important, the cheaper to its owner, the younger, goes first.
    let worth = |pod: &PodInfo| {
        let cost = pod.detail.as_ref().map_or(0, |detail| detail.deletion_cost);
        (pod.priority, cost, -pod.created)
    };
    let ranks: BTreeSet<_> = offer.pods.iter().map(|pod| worth(pod)).collect();
    let ranks: BTreeMap<_, u32> = ranks.into_iter().zip(1..).collect();
    for (movable, pod) in offer.movable.iter_mut().zip(&offer.pods) {
        movable.price = ranks.get(&worth(pod)).copied().unwrap_or(u32::MAX);
    }
    offer.budgets = world.budgets.iter().map(|budget| budget.allowed).collect();
    offer
}

/// See [`offer`].
#[derive(Debug, Default)]
pub struct Offer {
    pub movable: Vec<Movable>,
    /// Whose they are, in the same order.
    pub pods: Vec<Arc<PodInfo>>,
    pub budgets: Vec<u32>,
    /// By candidate.
    pub waited: Vec<Option<u64>>,
    /// By candidate: somebody might be moved for it, if a quota lets it have its claim.
    unsure: Vec<bool>,
}

impl Offer {
    /// Of the refused those of which it is to be asked whether a quota would let them through: one of a kind.
    pub fn to_ask(&self, refused: &[usize], candidates: &[Candidate]) -> Vec<Arc<PodInfo>> {
        let mut kinds: Vec<Arc<PodInfo>> = Vec::new();
        let unsure = |index: &&usize| self.unsure.get(**index).is_some_and(|unsure| *unsure);
        for index in refused.iter().filter(unsure).filter(|_| !self.pods.is_empty()) {
            let pod = &candidates[*index].pod;
            if kinds.len() < ASKED && !kinds.iter().any(|known| alike(known, pod)) {
                kinds.push(Arc::clone(pod));
            }
        }
        kinds
    }
}

/// The pod as one that may be moved, if it may.
pub(super) fn movable(looking: &Looking<'_>, matches: &Matches, pod: &PodInfo) -> Option<Movable> {
    let Looking { world, board, selectors, memo, .. } = looking;
    let name = pod.node.as_deref().filter(|_| is_movable(pod))?;
    let node = board.node(name)?;
    let Asks::For(wanted) = requests::read_afresh(world, board, selectors, memo, pod) else { return None };
    // Claims that outlive it would keep what comes in its place where it is; other drivers' may, too.
    let is_its_own =
        |claim: &String| world.claim(&pod.namespace, claim).is_some_and(|claim| is_alone(claim, pod));
    let claims: BTreeSet<&String> = wanted.parts.values().map(|(claim, _)| claim).collect();
    let all = pod.detail.as_ref().map_or(0, |detail| detail.claims.len());
    if claims.len() != all || !claims.into_iter().all(is_its_own) {
        return None;
    }
    let devices = devices(board, node, pod, &wanted)?;
    let (mut most_moves, mut after_seconds) = (u32::MAX, 0);
    for device in &devices {
        let uuid = &board.snapshot.nodes[node].gpus[device.gpu].uuid;
        let policy = matches.get(name)?.get(uuid)?.policy()?;
        // A stated layout is not for moving about in.
        if policy.spec.mig.mode == MigMode::Static {
            return None;
        }
        let moves = &policy.spec.reshape.moves;
        most_moves = most_moves.min(moves.max_pods);
        after_seconds = after_seconds.max(moves.after_seconds.into());
    }
    let budgets = world.budgets.iter().enumerate().filter(|(_, budget)| budget.covers(pod));
    let budgets: Vec<usize> = budgets.map(|(index, _)| index).collect();
    // The API server evicts nobody who is under two.
    if budgets.len() > 1 {
        return None;
    }
    Some(Movable { request: wanted.request, node, devices, price: 0, budgets, most_moves, after_seconds })
}

/// Whether the claim is this pod's alone, and goes with it.
fn is_alone(claim: &ResourceClaim, pod: &PodInfo) -> bool {
    if claims::owner_uid(claim) != Some(&pod.uid) {
        return false;
    }
    let consumers = claim.status.iter().filter_map(|status| status.reserved_for.as_ref()).flatten();
    let mut pods = consumers.filter(|consumer| consumer.resource == "pods");
    pods.next().is_some_and(|consumer| consumer.uid == pod.uid) && pods.next().is_none()
}

/// What the pod has, in the order of its needs; `None` if it is not to be moved: shares stay where they are.
fn devices(board: &Board, node: NodeIndex, pod: &PodInfo, wanted: &Wanted) -> Option<Vec<PlacedDevice>> {
    let mut devices = Vec::new();
    let contents = &board.snapshot.nodes[node];
    for need in &wanted.request.devices {
        let (claim, request) = wanted.parts.get(&need.name)?;
        let of_need = |owner: &ClaimOwner| {
            let (main, sub) = owner
                .request
                .split_once('/')
                .map_or((owner.request.as_str(), None), |(main, sub)| (main, Some(sub)));
            let its = owner.pod_uid == pod.uid && owner.name == *claim && main == request;
            its.then(|| sub.map(str::to_owned))
        };
        for partition in &board.gpu_nodes[node].spec.partitions {
            let Owner::Claim(owner) = &partition.owner else { continue };
            let Some(subrequest) = of_need(owner) else { continue };
            if partition.share.is_some() {
                return None;
            }
            let gpu = contents.gpus.iter().position(|gpu| gpu.uuid == partition.gpu)?;
            let instance = match &partition.instance {
                None => None,
                Some(held) => {
                    let profiles = &board.snapshot.geometries[contents.gpus[gpu].geometry?].profiles;
                    let profile = profiles.iter().position(|profile| same(&profile.name, &held.profile))?;
                    Some(PlannedInstance { profile, start: held.placement.start, exists: true })
                }
            };
            let request = need.name.clone();
            devices.push(PlacedDevice { request, subrequest, gpu, instance, share: None });
        }
    }
    Some(devices)
}
