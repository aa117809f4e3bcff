//! Pods without a place, and pods that might leave theirs for a better one, in the order in which they are served.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::conditions::pod_reason;
use kerf_crds::gpu_node::Owner;

use super::claims;
use super::decision::{Decision, Looking};
use super::gangs::Gangs;
use super::placements::held_back;
use super::requests::{self, Asks, Wanted};
use super::tell::Sentence;
use super::trouble::{self, Troubled};
use crate::cache::PodInfo;

/// A pod to be planned for.
#[derive(Debug)]
pub struct Candidate {
    pub pod: Arc<PodInfo>,
    pub wanted: Box<Wanted>,
    /// The place that it has, and leaves if there is another.
    pub instead_of: Option<Troubled>,
}

/// Reads what every pod asks for, and tells those that cannot be planned why.
pub fn candidates(
    looking: &Looking<'_>,
    placed: &BTreeSet<String>,
    troubled: Vec<Troubled>,
    gangs: &Gangs,
    decision: &mut Decision,
) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    let mut refused = Vec::new();
    let world = looking.world;
    let open = |pod: &&Arc<PodInfo>| !pod.done && !pod.deleting;
    let (with_place, without): (Vec<_>, Vec<_>) =
        world.unbound().filter(open).partition(|pod| placed.contains(&pod.uid));
    for pod in without {
        match read(looking, pod, decision) {
            Read::For(wanted) => {
                all.push(Candidate { pod: Arc::clone(pod), wanted, instead_of: None });
            }
            Read::Told(sentence) => decision.tell_placeless(pod, sentence),
            Read::Refused(sentence) => {
                refused.push(Arc::clone(pod));
                decision.tell_placeless(pod, sentence);
            }
            Read::Nothing => {}
        }
    }
    let not_refused = |pod: &&Arc<PodInfo>| {
        looking.memory.trouble(&pod.uid).is_none_or(|(reason, _)| reason != pod_reason::QUOTA)
    };
    // One of a gang may have to wait until others of it are let through, too.
    let placeless = all.iter().map(|candidate| &candidate.pod).filter(|pod| pod.gang().is_none());
    let let_through = placeless.chain(with_place.into_iter().filter(not_refused)).cloned();
    ask_quotas(looking, let_through, refused, decision);
    for troubled in troubled {
        match trouble::ask_afresh(looking, &troubled) {
            Some(wanted) => {
                all.push(Candidate { pod: Arc::clone(&troubled.pod), wanted, instead_of: Some(troubled) })
            }
            None => decision.tell_troubled(&troubled),
        }
    }
    all.sort_by(|a, b| before(&a.pod, &b.pod));
    one_pod_for_each_claim(looking, &mut all, decision);
    gangs.gather(&mut all, decision);
    all
}

/// A claim that several pods share is allocated for one of them: for whom it is on record, or for the first. The others
/// go where it is once it is allocated.
fn one_pod_for_each_claim(looking: &Looking<'_>, all: &mut Vec<Candidate>, decision: &mut Decision) {
    let mut first: BTreeMap<(String, String), (String, String)> = BTreeMap::new();
    // Where all run, what is on record is allocated, and is there for those who ask for it only if it is shared.
    let allocated = all.iter().filter(|one| one.instead_of.is_none()).flat_map(|one| {
        let claims =
            one.wanted.parts.values().filter_map(|(name, _)| looking.world.claim(&one.pod.namespace, name));
        claims.filter_map(|claim| looking.board.node(claims::pool(claims::allocation(claim)?)?))
    });
    let nodes: BTreeSet<usize> = looking.board.open.iter().copied().chain(allocated).collect();
    let on_record = nodes.iter().flat_map(|&node| &looking.board.gpu_nodes[node].spec.partitions);
    for partition in on_record {
        if let Owner::Claim(owner) = &partition.owner {
            let claim = (owner.namespace.clone(), owner.name.clone());
            first.insert(claim, (owner.pod_uid.clone(), owner.pod.clone()));
        }
    }
    all.retain(|Candidate { pod, wanted, instead_of }| {
        if instead_of.is_some() {
            return true;
        }
        let claims = || wanted.parts.values().map(|(claim, _)| (pod.namespace.clone(), claim.clone()));
        let others = |claim: (String, String)| {
            let (uid, other) = first.get(&claim)?;
            (*uid != pod.uid).then(|| (claim.1, other.clone()))
        };
        if let Some((claim, other)) = claims().find_map(others) {
            let sentence = if pod.gang().is_some() {
                let message = format!(
                    "shares ResourceClaim {claim:?} with pod {other:?}; a pod of a gang needs claims of its own, or ones that \
                     are allocated"
                );
                Sentence::waiting(pod_reason::BAD_GANG, message)
            } else {
                let message =
                    format!("ResourceClaim {claim:?}, which it shares, is allocated for pod {other:?} first");
                Sentence::waiting(pod_reason::WAITS_FOR_CLAIM, message)
            };
            decision.tell_placeless(pod, sentence);
            return false;
        }
        first.extend(claims().map(|claim| (claim, (pod.uid.clone(), pod.name.clone()))));
        true
    });
}

/// Who is served first.
pub(super) fn before(a: &PodInfo, b: &PodInfo) -> Ordering {
    b.priority.cmp(&a.priority).then(a.created.cmp(&b.created)).then_with(|| a.id().cmp(&b.id()))
}

/// A quota answers all pods that are alike alike: of those that it has refused, the first asks for them, when the quota
/// has changed and from time to time; and the next once the claim of this one is there. One that is let through and finds
/// no room keeps those like it from asking: they would find none either.
fn ask_quotas(
    looking: &Looking<'_>,
    let_through: impl Iterator<Item = Arc<PodInfo>>,
    mut refused: Vec<Arc<PodInfo>>,
    decision: &mut Decision,
) {
    let Looking { world, memory, now, .. } = looking;
    let quotas = world.quotas.iter();
    let changed: BTreeSet<&str> = quotas
        .filter(|(namespace, version)| memory.quota_changed(namespace, **version))
        .map(|(namespace, _)| namespace.as_str())
        .collect();
    refused.sort_by(|a, b| before(a, b));
    let mut kinds: Vec<Arc<PodInfo>> = Vec::new();
    let mut is_new = |pod: &Arc<PodInfo>| {
        let new = !kinds.iter().any(|known| alike(known, pod));
        if new {
            kinds.push(Arc::clone(pod));
        }
        new
    };
    let lacks_claim =
        |pod: &Arc<PodInfo>| pod.own_claim().is_some_and(|name| world.claim(&pod.namespace, name).is_none());
    // A gang needs several claims of what two may need: by namespace, the one whose turn it is.
    let mut turns: BTreeMap<String, String> = BTreeMap::new();
    let mut has_turn = |pod: &PodInfo| {
        let Some(gang) = pod.gang() else { return true };
        let turn = turns.entry(pod.namespace.clone()).or_insert_with(|| gang.name.clone());
        *turn == gang.name
    };
    for pod in let_through.filter(lacks_claim) {
        has_turn(&pod);
        is_new(&pod);
    }
    for pod in refused {
        // Until it is this one's turn, which may be later.
        if changed.contains(pod.namespace.as_str()) {
            memory.end_pause(&pod.uid);
        }
        let may_try = memory.may_try(&pod.uid, *now);
        // A gang that pauses, since it may need more than there is, leaves its turn to others.
        if pod.gang().is_some() && !(may_try && has_turn(&pod)) {
            continue;
        }
        if is_new(&pod) && may_try {
            decision.quota.push(pod);
        }
    }
}

/// Whether a quota and the nodes answer both pods alike.
pub(super) fn alike(a: &PodInfo, b: &PodInfo) -> bool {
    let (Some(of_a), Some(of_b)) = (&a.detail, &b.detail) else { return false };
    (&a.namespace, a.priority, &a.milli) == (&b.namespace, b.priority, &b.milli)
        && (&of_a.original, &of_a.needs) == (&of_b.original, &of_b.needs)
}

enum Read {
    Nothing,
    Told(Sentence),
    /// By a quota.
    Refused(Sentence),
    For(Box<Wanted>),
}

fn read(looking: &Looking<'_>, pod: &Arc<PodInfo>, decision: &mut Decision) -> Read {
    let Looking { world, board, memory, selectors, memo, now } = looking;
    let may_try = |now: Instant| memory.may_try(&pod.uid, now);
    let asks = requests::read(world, board, selectors, memo, pod);
    // Kerf acts once its own gate is the only one left: until then others may change the pod.
    let acts = matches!(asks, Asks::For(_)) || matches!(asks, Asks::Allocated) && pod.gated();
    let others = pod.other_gates();
    if acts && !others.is_empty() {
        let others = others.join(", ");
        let message = format!("waits for the scheduling gates of others to be removed: {others}");
        return Read::Told(Sentence::waiting(pod_reason::OTHER_GATES, message));
    }
    if let Some(Err(message)) = pod.detail.as_ref().and_then(|detail| detail.gang.as_ref())
        && acts
    {
        return Read::Told(Sentence::waiting(pod_reason::BAD_GANG, message));
    }
    let mut wanted = match asks {
        Asks::Nothing => return Read::Nothing,
        Asks::Allocated => {
            if pod.gated() && !held_back(memory, pod) && may_try(*now) {
                decision.ungate.push(Arc::clone(pod));
            }
            return Read::Nothing;
        }
        Asks::Cannot(reason, message) => return Read::Told(Sentence::waiting(reason, message)),
        Asks::For(wanted) => wanted,
    };
    match memory.trouble(&pod.uid) {
        Some((reason, message)) if reason == pod_reason::QUOTA => {
            return Read::Refused(Sentence::waiting(reason, message));
        }
        Some((reason, message)) if !may_try(*now) => return Read::Told(Sentence::waiting(reason, message)),
        _ => {}
    }
    let avoided = memory.avoided(&pod.uid, *now);
    wanted.request.avoid = avoided.iter().filter_map(|name| board.node(name)).collect();
    Read::For(wanted)
}
