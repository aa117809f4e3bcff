//! What a leader remembers from cycle to cycle. All of it may be lost at any moment: it spares writes and sets the
//! pace, and everything that correctness rests on is in the API server.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kerf_planner::Planner;
use kerf_planner::plan::NoMoves;

use super::placements::Key;
use super::trouble::FailingGpu;
use super::views::Views;
use crate::cache::{Stored, World};

/// First pause after a failure; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Time for a watch to tell what a conflicting write has just met.
const CATCH_UP: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long a place that was given up is avoided, and a pod is not moved again; doubled each time.
const CALM: Duration = Duration::from_secs(5);
/// Longest time without another withdrawal.
const LONGEST_CALM: Duration = Duration::from_secs(300);
/// What an API server has answered counts for so long.
const STILL_TRUE: Duration = Duration::from_secs(60);
/// Counts in a policy's status are not rewritten more often than this: they change with every pod.
const COUNTS: Duration = Duration::from_secs(5);
/// So much of what is over may be remembered in any case.
const MANY: usize = 1024;
/// A pod is found stranded for this long before it is evicted, so that watches of pods and claims can catch up.
pub const STRANDED: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug, Default)]
pub struct Memory {
    inner: Mutex<Inner>,
    views: Mutex<Views>,
    planner: Mutex<Planner>,
}

#[derive(Debug, Default)]
struct Inner {
    pods: HashMap<String, PodMemory>,
    withdrawing: HashSet<Key>,
    read_live: HashSet<Key>,
    superseded: HashSet<Key>,
    /// UIDs of pods whose gangs are complete.
    together: HashSet<String>,
    /// UIDs of claims that this process has allocated.
    allocated: HashSet<String>,
    /// GPUs on which steps fail, by UUID.
    gpus: HashMap<String, FailingGpuMemory>,
    /// Newest version of a quota that was asked about, by namespace.
    quotas: HashMap<String, u64>,
    /// Until when the counts of a policy's status stay as they are, by name.
    policies: HashMap<String, Instant>,
    /// What is over is looked for once so much is known.
    pruned_at: usize,
}

#[derive(Debug)]
struct FailingGpuMemory {
    times: u32,
    until: Instant,
    why: String,
}

#[derive(Debug, Default)]
struct PodMemory {
    hold: bool,
    withdrawals: u32,
    calm_until: Option<Instant>,
    avoid: Vec<(String, Instant)>,
    failures: u32,
    retry_at: Option<Instant>,
    trouble: Option<(&'static str, String)>,
    stranded_since: Option<Instant>,
    told_at: Option<Instant>,
    /// Since when it has been without room.
    waits_since: Option<Instant>,
    /// When a quota would have let it have its claim.
    let_through: Option<Instant>,
    /// It was evicted, which the watch may not have told yet.
    evicted: bool,
    /// Until when it is not moved to make room for others.
    stays_until: Option<Instant>,
    /// How often its eviction was refused.
    refusals: u32,
    /// Until when nobody is moved for it, after how many times in vain, and why.
    no_moves: Option<(Instant, u32, Option<NoMoves>)>,
}

/// The pause after so many others, each twice as long as the one before.
pub fn doubled(first: Duration, times: u32, longest: Duration) -> Duration {
    first.saturating_mul(1u32.checked_shl(times).unwrap_or(u32::MAX)).min(longest)
}

impl Inner {
    fn withdraw(&mut self, key: &Key, now: Instant, avoid: bool) {
        if self.withdrawing.insert(key.clone()) {
            self.read_live.remove(key);
            let pod = self.pods.entry(key.pod_uid.clone()).or_default();
            let calm = doubled(CALM, pod.withdrawals, LONGEST_CALM);
            pod.withdrawals += 1;
            pod.calm_until = Some(now + calm);
            if avoid {
                pod.avoid.push((key.node.clone(), now + calm));
            }
            pod.hold = false;
        }
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was worked out of nodes.
    pub fn views(&self) -> MutexGuard<'_, Views> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was worked out of the planner's nodes.
    pub fn planner(&self) -> MutexGuard<'_, Planner> {
        self.planner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the placement is being given up.
    pub fn withdraws(&self, key: &Key) -> bool {
        self.lock().withdrawing.contains(key)
    }

    /// Begins to give a placement up. The pod stays out of that node, and is not moved again, for a while.
    pub fn withdraw(&self, key: &Key, now: Instant) {
        self.lock().withdraw(key, now, true);
    }

    /// The same because of a GPU: for a while nothing is made on it, for any pod, and the node's others are as good as
    /// before.
    pub fn withdraw_from_gpu(&self, key: &Key, gpu: &FailingGpu, now: Instant) {
        let mut inner = self.lock();
        inner.withdraw(key, now, false);
        let times = inner.gpus.get(&gpu.uuid).map_or(0, |known| known.times);
        let until = now + doubled(CALM, times, LONGEST_CALM);
        inner
            .gpus
            .insert(gpu.uuid.clone(), FailingGpuMemory { times: times + 1, until, why: gpu.why.clone() });
    }

    /// GPUs on which nothing is to be made now, and why.
    pub fn failing_gpus(&self, now: Instant) -> HashMap<String, String> {
        let mut inner = self.lock();
        inner.gpus.retain(|_, gpu| gpu.until + LONGEST_CALM > now);
        let failing = inner.gpus.iter().filter(|(_, gpu)| gpu.until > now);
        failing.map(|(uuid, gpu)| (uuid.clone(), gpu.why.clone())).collect()
    }

    /// Begins to give a placement up that the pod may not have (its claim was refused, its gang is not complete): nothing
    /// is wrong with the node.
    pub fn give_back(&self, key: &Key) {
        self.lock().withdrawing.insert(key.clone());
    }

    /// The placement's record is gone.
    pub fn removed(&self, key: &Key) {
        let mut inner = self.lock();
        inner.withdrawing.remove(key);
        inner.read_live.remove(key);
    }

    /// Notes the records that do not count beside another of the same claim.
    pub fn set_superseded(&self, keys: HashSet<Key>) {
        self.lock().superseded = keys;
    }

    /// See [`Memory::set_superseded`].
    pub fn superseded(&self, key: &Key) -> bool {
        self.lock().superseded.contains(key)
    }

    /// Notes the pods of gangs of which enough are ready to start.
    pub fn set_together(&self, pod_uids: HashSet<String>) {
        self.lock().together = pod_uids;
    }

    /// See [`Memory::set_together`].
    pub fn together(&self, pod_uid: &str) -> bool {
        self.lock().together.contains(pod_uid)
    }

    /// Whether the pod may be moved now.
    pub fn calm(&self, pod_uid: &str, now: Instant) -> bool {
        self.lock().pods.get(pod_uid).and_then(|pod| pod.calm_until).is_none_or(|until| until <= now)
    }

    /// Nodes that the pod avoids.
    pub fn avoided(&self, pod_uid: &str, now: Instant) -> Vec<String> {
        let inner = self.lock();
        let avoided = inner.pods.get(pod_uid).into_iter().flat_map(|pod| &pod.avoid);
        avoided.filter(|(_, until)| *until > now).map(|(node, _)| node.clone()).collect()
    }

    /// Whether the allocation is to be held against kube-scheduler.
    pub fn holds(&self, pod_uid: &str) -> bool {
        self.lock().pods.get(pod_uid).is_some_and(|pod| pod.hold)
    }

    /// Holds the pod's next allocation.
    pub fn hold(&self, pod_uid: &str) {
        self.lock().pods.entry(pod_uid.to_owned()).or_default().hold = true;
    }

    /// We have allocated this claim.
    pub fn allocated(&self, claim_uid: &str) {
        self.lock().allocated.insert(claim_uid.to_owned());
    }

    /// The claim's allocation was cleared by us; answers whether we had made it.
    pub fn cleared(&self, claim_uid: &str) -> bool {
        self.lock().allocated.remove(claim_uid)
    }

    /// The pod was read from the API server after the allocation was seen cleared.
    pub fn note_read(&self, key: &Key) {
        self.lock().read_live.insert(key.clone());
    }

    /// See [`Memory::note_read`].
    pub fn read_live(&self, key: &Key) -> bool {
        self.lock().read_live.contains(key)
    }

    /// The allocation is there (again): an earlier read of the pod proves nothing.
    pub fn forget_read(&self, key: &Key) {
        self.lock().read_live.remove(key);
    }

    /// A step for the pod failed; it is tried again after a pause.
    pub fn failed(&self, pod_uid: &str, reason: &'static str, message: String, now: Instant) {
        let mut inner = self.lock();
        let pod = inner.pods.entry(pod_uid.to_owned()).or_default();
        pod.retry_at = Some(now + doubled(FIRST_PAUSE, pod.failures, LONGEST_PAUSE));
        pod.failures += 1;
        pod.trouble = Some((reason, message));
    }

    /// A write met a newer version of its object: looked at again as soon as the watch has told it.
    pub fn overtaken(&self, pod_uid: &str, now: Instant) {
        self.lock().pods.entry(pod_uid.to_owned()).or_default().retry_at = Some(now + CATCH_UP);
    }

    /// A step for the pod succeeded.
    pub fn succeeded(&self, pod_uid: &str) {
        if let Some(pod) = self.lock().pods.get_mut(pod_uid) {
            pod.failures = 0;
            pod.retry_at = None;
            pod.trouble = None;
        }
    }

    /// Whether the pod's next step may be tried.
    pub fn may_try(&self, pod_uid: &str, now: Instant) -> bool {
        self.lock().pods.get(pod_uid).and_then(|pod| pod.retry_at).is_none_or(|at| at <= now)
    }

    /// The reason for the pause may be gone.
    pub fn end_pause(&self, pod_uid: &str) {
        if let Some(pod) = self.lock().pods.get_mut(pod_uid) {
            pod.retry_at = None;
        }
    }

    /// Notes the newest version of a namespace's quotas; answers whether it is news.
    pub fn quota_changed(&self, namespace: &str, version: u64) -> bool {
        self.lock().quotas.insert(namespace.to_owned(), version) != Some(version)
    }

    /// What went wrong with the pod last, until something succeeds.
    pub fn trouble(&self, pod_uid: &str) -> Option<(&'static str, String)> {
        self.lock().pods.get(pod_uid)?.trouble.clone()
    }

    /// Notes that the pod is stranded; answers whether it has been for long enough.
    pub fn stranded(&self, pod_uid: &str, now: Instant) -> bool {
        let mut inner = self.lock();
        let since = *inner.pods.entry(pod_uid.to_owned()).or_default().stranded_since.get_or_insert(now);
        now.duration_since(since) >= STRANDED
    }

    /// No other pods than these are.
    pub fn only_stranded(&self, pod_uids: &BTreeSet<String>) {
        let mut inner = self.lock();
        let others = inner.pods.iter_mut().filter(|(uid, _)| !pod_uids.contains(*uid));
        others.for_each(|(_, pod)| pod.stranded_since = None);
    }

    /// The pod is not stranded.
    pub fn not_stranded(&self, pod_uid: &str) {
        if let Some(pod) = self.lock().pods.get_mut(pod_uid) {
            pod.stranded_since = None;
        }
    }

    /// When the pod's condition was last written.
    pub fn told_at(&self, pod_uid: &str) -> Option<Instant> {
        self.lock().pods.get(pod_uid)?.told_at
    }

    /// The pod's condition was written.
    pub fn told(&self, pod_uid: &str, now: Instant) {
        self.lock().pods.entry(pod_uid.to_owned()).or_default().told_at = Some(now);
    }

    /// Room was not found by moving others (or a disruption budget refused: `None`): looked for again after a while.
    pub fn no_room(&self, pod_uid: &str, why: Option<NoMoves>, now: Instant) {
        let mut inner = self.lock();
        let pod = inner.pods.entry(pod_uid.to_owned()).or_default();
        let times = pod.no_moves.map_or(0, |(_, times, _)| times);
        // What is only too early is soon otherwise.
        let next = if why == Some(NoMoves::TooEarly) { times } else { times + 1 };
        pod.no_moves = Some((now + doubled(CALM, times, LONGEST_CALM), next, why));
    }

    /// Whether others may be moved for the pod now, as far as earlier attempts tell.
    pub fn may_make_room(&self, pod_uid: &str, now: Instant) -> bool {
        let inner = self.lock();
        inner.pods.get(pod_uid).and_then(|pod| pod.no_moves).is_none_or(|(until, ..)| until <= now)
    }

    /// Why the last search for room by moving others was in vain.
    pub fn in_vain(&self, pod_uid: &str) -> Option<NoMoves> {
        self.lock().pods.get(pod_uid)?.no_moves?.2
    }

    /// These pods have no room; all others have, or something else is in their way.
    pub fn have_no_room(&self, pod_uids: &BTreeSet<&str>, now: Instant) {
        let mut inner = self.lock();
        for (uid, pod) in &mut inner.pods {
            if !pod_uids.contains(uid.as_str()) {
                (pod.waits_since, pod.no_moves) = (None, None);
            }
        }
        for uid in pod_uids {
            inner.pods.entry((*uid).to_owned()).or_default().waits_since.get_or_insert(now);
        }
    }

    /// For how long the pod has had no room.
    pub fn waited(&self, pod_uid: &str, now: Instant) -> Option<Duration> {
        Some(now.saturating_duration_since(self.lock().pods.get(pod_uid)?.waits_since?))
    }

    /// A quota would let the pod have its claim.
    pub fn let_through(&self, pod_uid: &str, now: Instant) {
        self.lock().pods.entry(pod_uid.to_owned()).or_default().let_through = Some(now);
    }

    /// Whether a quota would have let the pod have its claim a moment ago.
    pub fn was_let_through(&self, pod_uid: &str, now: Instant) -> bool {
        let at = self.lock().pods.get(pod_uid).and_then(|pod| pod.let_through);
        at.is_some_and(|at| now.saturating_duration_since(at) < STILL_TRUE)
    }

    /// The pod was evicted.
    pub fn evicted(&self, pod_uid: &str) {
        self.lock().pods.entry(pod_uid.to_owned()).or_default().evicted = true;
    }

    /// See [`Memory::evicted`].
    pub fn was_evicted(&self, pod_uid: &str) -> bool {
        self.lock().pods.get(pod_uid).is_some_and(|pod| pod.evicted)
    }

    /// The pod could not be evicted: it stays for a while, longer each time.
    pub fn may_not_go(&self, pod_uid: &str, now: Instant) {
        let mut inner = self.lock();
        let pod = inner.pods.entry(pod_uid.to_owned()).or_default();
        pod.stays_until = Some(now + doubled(CALM, pod.refusals, LONGEST_CALM));
        pod.refusals += 1;
    }

    /// Whether the pod may be moved to make room for others now.
    pub fn may_be_moved(&self, pod_uid: &str, now: Instant) -> bool {
        self.lock().pods.get(pod_uid).and_then(|pod| pod.stays_until).is_none_or(|until| until <= now)
    }

    /// The pod has come in place of one that was moved: it stays for a while.
    pub fn was_moved(&self, pod_uid: &str, now: Instant) {
        self.lock().pods.entry(pod_uid.to_owned()).or_default().stays_until = Some(now + LONGEST_CALM);
    }

    /// The policy's status was written.
    pub fn policy_written(&self, name: &str, now: Instant) {
        let mut inner = self.lock();
        inner.policies.retain(|_, until| *until > now);
        inner.policies.insert(name.to_owned(), now + COUNTS);
    }

    /// Whether the policy's status may be written only because its counts have changed.
    pub fn may_write_counts(&self, name: &str, now: Instant) -> bool {
        self.lock().policies.get(name).is_none_or(|until| *until <= now)
    }

    /// The earliest moment at which something that waits now may go on.
    pub fn next_moment(&self, now: Instant) -> Option<Instant> {
        let inner = self.lock();
        let moments = inner.pods.values().flat_map(|pod| {
            let stranded = pod.stranded_since.map(|since| since + STRANDED);
            [pod.retry_at, pod.calm_until, pod.stays_until, stranded, pod.no_moves.map(|(until, ..)| until)]
        });
        let gpus = inner.gpus.values().map(|gpu| gpu.until);
        let policies = inner.policies.values().copied();
        moments.flatten().chain(gpus).chain(policies).filter(|moment| *moment > now).min()
    }

    /// Forgets pods and placements that are over, once there may be as many of them as others.
    pub fn forget_what_is_over(&self, world: &World) {
        let mut inner = self.lock();
        let known =
            inner.pods.len() + inner.allocated.len() + inner.withdrawing.len() + inner.read_live.len();
        if known <= inner.pruned_at {
            return;
        }
        let pods = world.interesting.iter().filter_map(|key| Some(world.pods.get(key)?.uid.as_str()));
        let pods: HashSet<&str> = pods.collect();
        let claims: HashSet<&str> = world.claims.iter().map(|claim| claim.uid()).collect();
        let (pod_lives, claim_lives) = (|uid: &str| pods.contains(uid), |uid: &str| claims.contains(uid));
        inner.pods.retain(|uid, _| pod_lives(uid));
        inner.withdrawing.retain(|key| pod_lives(&key.pod_uid));
        inner.read_live.retain(|key| pod_lives(&key.pod_uid));
        inner.allocated.retain(|uid| claim_lives(uid));
        let left = inner.pods.len() + inner.allocated.len() + inner.withdrawing.len() + inner.read_live.len();
        inner.pruned_at = 2 * left + MANY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(node: &str) -> Key {
        Key {
            node: node.into(),
            namespace: "n".into(),
            claim: "c".into(),
            pod: "p".into(),
            pod_uid: "u".into(),
        }
    }

    #[test]
    fn a_withdrawn_pod_avoids_the_node_and_rests_longer_each_time() {
        let (memory, now) = (Memory::default(), Instant::now());
        memory.withdraw(&key("a"), now);
        assert!(memory.withdraws(&key("a")));
        assert_eq!(memory.avoided("u", now), ["a"]);
        assert!(!memory.calm("u", now));
        assert!(memory.calm("u", now + CALM));
        memory.removed(&key("a"));
        memory.withdraw(&key("b"), now + CALM);
        assert!(!memory.calm("u", now + CALM + CALM));
        assert!(memory.calm("u", now + 3 * CALM));
    }

    #[test]
    fn failures_pause_and_success_ends_the_pause() {
        let (memory, now) = (Memory::default(), Instant::now());
        memory.failed("u", "Retrying", "x".into(), now);
        assert!(!memory.may_try("u", now));
        assert!(memory.may_try("u", now + FIRST_PAUSE));
        memory.failed("u", "Retrying", "x".into(), now);
        assert!(!memory.may_try("u", now + FIRST_PAUSE));
        assert_eq!(memory.next_moment(now), Some(now + 2 * FIRST_PAUSE));
        memory.succeeded("u");
        assert!(memory.may_try("u", now));
        assert_eq!(memory.trouble("u"), None);
    }

    #[test]
    fn the_wait_for_room_begins_anew_after_a_place() {
        let (memory, then) = (Memory::default(), Instant::now());
        memory.have_no_room(&["u", "v"].into(), then);
        memory.no_room("u", Some(NoMoves::Useless), then);
        let now = then + LONGEST_CALM;
        memory.have_no_room(&["v"].into(), now);
        assert_eq!((memory.waited("u", now), memory.waited("v", now)), (None, Some(LONGEST_CALM)));
        assert!(memory.may_make_room("u", then));
        memory.have_no_room(&["u"].into(), now);
        assert_eq!(memory.waited("u", now), Some(Duration::ZERO));
    }
}
