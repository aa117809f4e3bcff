//! Pods without a place, and pods that might leave theirs for a better one, in the order in which they are served.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::conditions::pod_reason;

use super::cycle::{Decision, Looking};
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
    let mut all = Vec::new();
    let mut refused = Vec::new();
    let world = looking.world;
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    let open = |pod: &&Arc<PodInfo>| pod.node.is_none() && !pod.done && !pod.deleting;
    for pod in pods.filter(open).filter(|pod| !placed.contains(&pod.uid)) {
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
    ask_quotas(looking, refused, decision);
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

/// A quota answers all pods that want the same alike: of those that it has refused, the first asks for them, when the
/// quota has changed and from time to time; and the next after this one was let through.
fn ask_quotas(looking: &Looking<'_>, mut refused: Vec<Arc<PodInfo>>, decision: &mut Decision) {
    let quotas = looking.world.quotas.iter();
    let changed: BTreeSet<&str> = quotas
        .filter(|(namespace, version)| looking.memory.quota_changed(namespace, **version))
        .map(|(namespace, _)| namespace.as_str())
        .collect();
    refused.sort_by(|a, b| before(a, b));
    let mut asked = BTreeSet::new();
    for pod in refused {
        let first = asked.insert((pod.namespace.clone(), requests::resources(&pod)));
        let due = changed.contains(pod.namespace.as_str()) || looking.memory.may_try(&pod.uid, looking.now);
        if first && due {
            decision.quota.push(pod);
        }
    }
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
