//! Pods without a place, and pods that might leave theirs for a better one, in the order in which they are served.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::conditions::pod_reason;

use super::decision::{Decision, Looking};
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
    decision: &mut Decision,
) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    let mut refused = Vec::new();
    let world = looking.world;
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    let open = |pod: &&Arc<PodInfo>| pod.node.is_none() && !pod.done && !pod.deleting;
    let (with_place, without): (Vec<_>, Vec<_>) =
        pods.filter(open).partition(|pod| placed.contains(&pod.uid));
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
    let placeless = all.iter().map(|candidate| &candidate.pod);
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
    all
}

/// Who is served first.
fn before(a: &PodInfo, b: &PodInfo) -> Ordering {
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
    for pod in let_through.filter(lacks_claim) {
        is_new(&pod);
    }
    for pod in refused {
        // Until it is this one's turn, which may be later.
        if changed.contains(pod.namespace.as_str()) {
            memory.end_pause(&pod.uid);
        }
        if is_new(&pod) && memory.may_try(&pod.uid, *now) {
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
    let mut wanted = match asks {
        Asks::Nothing => return Read::Nothing,
        Asks::Allocated => {
            if pod.gated() && may_try(*now) {
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
