//! Gangs: whose pods get their places, and then start, together or not at all.
//!
//! ```text
//!  1 enough pods are there ───▶ as many as lack a place are planned together, or none
//!  2 not all are on record ───▶ the rest is planned with the next cycle, or what is on record is given back
//!  3 enough are on record, have their claims and their instances ─▶ these are allocated, and their gates go
//! ```
//! Everything is found from the pods and the records of each cycle: which of the three holds is nowhere written.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use kerf_crds::conditions::pod_reason;
use kerf_planner::protocol::{self, Step, Waiting};

use super::decision::Decision;
use super::placements::{Key, Seen};
use super::queue::{Candidate, before};
use super::requests;
use super::tell::Sentence;
use crate::cache::{PodInfo, World};

/// Pods of one kind that are named one by one; the rest is only counted.
const NAMED: usize = 3;

/// How far a pod or one of its claims is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// It has no place.
    Waits,
    /// It is giving its place up.
    Leaves,
    /// Its place is on record. `ready`: so is its claim, and the instances are there.
    OnRecord { ready: bool },
    /// It may start at any moment: it is bound, or allocated and has no gate of Kerf's.
    Started,
}

/// One claim of a pod that is of a gang and not bound.
#[derive(Debug)]
pub struct Part {
    key: Key,
    stage: Stage,
    /// Present: nothing but the others of the gang is missing. What the pod is told meanwhile.
    sentence: Option<Sentence>,
}

impl Part {
    /// `troubled`: the pod would not run there as things are. `sentence`: as [`super::tell::of_placement`] has it.
    pub fn of(key: &Key, seen: &Seen, step: Step, troubled: bool, sentence: Option<&Sentence>) -> Self {
        use protocol::{Claim, Pod};
        let seen = &seen.observed;
        let stage = match (&seen.entry, &seen.claim) {
            (None, _) => Stage::Leaves,
            _ if seen.withdraw => Stage::Leaves,
            (_, Claim::Allocated { as_planned: true, deleting: false, .. }) if seen.pod != Pod::Gated => {
                Stage::Started
            }
            (_, Claim::Allocated { as_planned: true, deleting: false, .. }) => {
                Stage::OnRecord { ready: !troubled }
            }
            (Some(entry), Claim::Unallocated) => Stage::OnRecord { ready: entry.ready && !troubled },
            _ => Stage::OnRecord { ready: false },
        };
        let waits = step == Step::Wait(Waiting::Others);
        Self { key: key.clone(), stage, sentence: sentence.filter(|_| waits).cloned() }
    }

    fn waits(&self) -> Option<(Key, Sentence)> {
        Some((self.key.clone(), self.sentence.clone()?))
    }
}

#[derive(Debug)]
struct Member {
    pod: Arc<PodInfo>,
    size: u32,
    stage: Stage,
    parts: Vec<Part>,
}

/// All pods of a gang that have not ended.
#[derive(Debug, Default)]
struct Gang {
    members: Vec<Member>,
}

/// All gangs, by namespace and name.
#[derive(Debug, Default)]
pub struct Gangs(BTreeMap<String, Gang>);

/// What becomes of the pods of a gang that wait.
enum Verdict {
    Nobody(Sentence),
    /// So many of them get places together.
    Together(usize),
    /// Enough have places: any other is served for itself.
    Singly,
}

/// The gang's name everywhere: `namespace/name`.
fn id(pod: &PodInfo) -> Option<String> {
    Some(format!("{}/{}", pod.namespace, pod.gang()?.name))
}

impl Gangs {
    /// Looks at all pods. `parts`: what is on record, by the pod's UID.
    pub fn of(world: &World, mut parts: BTreeMap<String, Vec<Part>>) -> Self {
        let mut gangs: BTreeMap<String, Gang> = BTreeMap::new();
        let pods = world.of_gangs.iter().filter_map(|key| world.pods.get(key));
        for pod in pods.filter(|pod| !pod.done && !pod.deleting) {
            let (Some(id), Some(gang)) = (id(pod), pod.gang()) else { continue };
            if !requests::is_for_kerf(world, pod) {
                continue;
            }
            let parts = parts.remove(&pod.uid).unwrap_or_default();
            let stage = match parts.iter().map(|part| part.stage).min() {
                // Whatever becomes of its claim: kube-scheduler clears allocations, and Kerf writes them anew.
                _ if pod.node.is_some() || pod.let_go() => Stage::Started,
                Some(stage) => stage,
                None if !requests::all_allocated(world, pod) => Stage::Waits,
                // By another pod with which it shares its claims.
                None if pod.gated() => Stage::OnRecord { ready: true },
                None => Stage::Started,
            };
            let member = Member { pod: Arc::clone(pod), size: gang.size, stage, parts };
            gangs.entry(id).or_default().members.push(member);
        }
        Self(gangs)
    }

    /// UIDs of the pods whose gangs are complete: they may be allocated. They are driven on, and others that are ready are
    /// told whom they wait for.
    pub fn together(&self, decision: &mut Decision, may_try: impl Fn(&str) -> bool) -> HashSet<String> {
        let mut together = HashSet::new();
        for (id, gang) in &self.0 {
            let ready = gang.count(|stage| stage >= Stage::OnRecord { ready: true });
            let complete = gang.size().is_ok_and(|size| ready >= size);
            for member in &gang.members {
                let uid = &member.pod.uid;
                if complete {
                    together.insert(uid.clone());
                }
                for (key, mut sentence) in member.parts.iter().filter_map(Part::waits) {
                    if complete && may_try(uid) {
                        decision.drive.insert(key);
                        continue;
                    }
                    if sentence.reason == pod_reason::WAITS_FOR_GANG {
                        sentence.message += &format!(": {ready} of {} of gang {id} are ready", member.size);
                    }
                    decision.sentences.push((Arc::clone(&member.pod), sentence));
                }
            }
        }
        together
    }

    /// Of the candidates those to be planned for now, as one request where they get their places together. The others are
    /// told why not.
    pub fn gather(&self, candidates: &mut Vec<Candidate>, decision: &mut Decision) {
        let mut plannable: BTreeMap<String, usize> = BTreeMap::new();
        // One that has been let go and has lost its place is on its own: it had started.
        let waits = |candidate: &Candidate| candidate.instead_of.is_none() && !candidate.pod.let_go();
        for candidate in candidates.iter().filter(|candidate| waits(candidate)) {
            if let Some(id) = id(&candidate.pod) {
                *plannable.entry(id).or_default() += 1;
            }
        }
        let mut verdicts: BTreeMap<&String, Verdict> = BTreeMap::new();
        for (id, gang) in &self.0 {
            verdicts.insert(id, gang.verdict(id, plannable.get(id).copied().unwrap_or_default(), decision));
        }
        candidates.retain_mut(|candidate| {
            if !waits(candidate) {
                return true;
            }
            let Candidate { pod, wanted, .. } = candidate;
            let Some(id) = id(pod) else { return true };
            match verdicts.get_mut(&id) {
                None | Some(Verdict::Singly) => true,
                Some(Verdict::Together(0)) => {
                    let message =
                        format!("other pods of gang {id}, as many as it needs, get their places first");
                    decision.tell_placeless(pod, Sentence::waiting(pod_reason::WAITS_FOR_GANG, message));
                    false
                }
                Some(Verdict::Together(left)) => {
                    *left -= 1;
                    wanted.request.gang = Some(id);
                    true
                }
                Some(Verdict::Nobody(sentence)) => {
                    decision.tell_placeless(pod, sentence.clone());
                    false
                }
            }
        });
        // A gang whose pods disagree has none that may keep its place.
        for gang in self.0.values() {
            let Err(message) = gang.size() else { continue };
            for member in gang.members.iter().filter(|member| member.stage < Stage::Started) {
                let sentence = Sentence::waiting(pod_reason::BAD_GANG, &message);
                decision.sentences.push((Arc::clone(&member.pod), sentence));
            }
        }
    }

    /// What is on record of gangs that are not complete and that the plan has not completed.
    pub fn to_give_back(&self, completed: &BTreeSet<String>) -> Vec<Key> {
        let incomplete = |(id, gang): &(&String, &Gang)| {
            let enough = gang.size().is_ok_and(|size| gang.placed() >= size);
            // Who is leaving may find another place in a moment.
            !enough && gang.count(|stage| stage == Stage::Leaves) == 0 && !completed.contains(*id)
        };
        self.0.iter().filter(incomplete).flat_map(|(_, gang)| gang.on_record()).collect()
    }

    /// Of the gangs of these pods, which cannot start as things are, the one that is served last gives everything back: what
    /// it has may be what another lacks, and it is planned anew as a whole. One at a time, since that is seen only once its
    /// places are free.
    pub fn to_yield<'p>(&self, stuck: impl Iterator<Item = &'p Arc<PodInfo>>) -> Vec<Key> {
        if self.0.values().any(|gang| gang.count(|stage| stage == Stage::Leaves) > 0) {
            return Vec::new();
        }
        let stuck: BTreeSet<String> = stuck.filter_map(|pod| id(pod)).collect();
        let gangs = stuck.iter().filter_map(|id| self.0.get(id));
        let waiting = gangs.filter(|gang| gang.count(|stage| stage == Stage::Started) == 0);
        let first = |gang: &&Gang| {
            gang.members.iter().map(|member| Arc::clone(&member.pod)).min_by(|a, b| before(a, b))
        };
        let last =
            waiting.filter_map(|gang| Some((first(&gang)?, gang))).max_by(|(a, _), (b, _)| before(a, b));
        last.map(|(_, gang)| gang.on_record()).unwrap_or_default()
    }

    /// For a pod that is served for itself although it is of a gang: what its refusal adds.
    pub fn beside(&self, pod: &PodInfo) -> String {
        let of_gang = |id: String| {
            let gang = self.0.get(&id)?;
            let (size, placed) = (gang.size().ok()?, gang.placed());
            (placed >= size)
                .then(|| format!("; {placed} pods of its gang {id}, which needs {size}, have places"))
        };
        id(pod).and_then(of_gang).unwrap_or_default()
    }
}

impl Gang {
    fn count(&self, which: impl Fn(Stage) -> bool) -> usize {
        self.members.iter().filter(|member| which(member.stage)).count()
    }

    /// What its pods have that may not be running.
    fn on_record(&self) -> Vec<Key> {
        let on_record = self.members.iter().filter(|member| matches!(member.stage, Stage::OnRecord { .. }));
        on_record.flat_map(|member| &member.parts).map(|part| part.key.clone()).collect()
    }

    /// Pods that have a place.
    fn placed(&self) -> usize {
        self.count(|stage| stage >= Stage::OnRecord { ready: false })
    }

    /// How many must run together; an error if its pods do not agree.
    fn size(&self) -> Result<usize, String> {
        let mut by_size: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
        for member in &self.members {
            by_size.entry(member.size).or_default().push(&member.pod.name);
        }
        if let (1, Some(size)) = (by_size.len(), by_size.keys().next()) {
            return Ok(*size as usize);
        }
        let said = by_size.iter().map(|(size, pods)| {
            let more = pods.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{size} on {}{more}", pods[..pods.len().min(NAMED)].join(", "))
        });
        let said: Vec<String> = said.collect();
        let (annotation, name) = (kerf_crds::names::GANG_SIZE, self.name());
        Err(format!(
            "annotation {annotation} must be the same on all pods of gang {name}; it is {}",
            said.join("; ")
        ))
    }

    fn name(&self) -> String {
        self.members.first().and_then(|member| id(&member.pod)).unwrap_or_default()
    }

    fn verdict(&self, id: &str, plannable: usize, decision: &Decision) -> Verdict {
        let size = match self.size() {
            Ok(size) => size,
            Err(message) => return Verdict::Nobody(Sentence::waiting(pod_reason::BAD_GANG, message)),
        };
        let (there, placed) = (self.members.len(), self.placed());
        if placed >= size {
            return Verdict::Singly;
        }
        let lacks = size - placed;
        let message = if there < size {
            format!("{there} of {size} pods of gang {id} are there")
        } else if plannable < lacks {
            // One that cannot be planned has been told why.
            let mut told = decision.sentences.iter().filter(|(pod, _)| decision.placeless.contains(&pod.uid));
            let why = told.find(|(pod, _)| self::id(pod).as_deref() == Some(id));
            let why = why.map(|(pod, told)| format!("; {} is told: {}", pod.name, told.message));
            format!(
                "gang {id} lacks places for {lacks} of its {size} pods, and {plannable} can be planned for now{}",
                why.unwrap_or_default()
            )
        } else {
            return Verdict::Together(lacks);
        };
        Verdict::Nobody(Sentence::waiting(pod_reason::WAITS_FOR_GANG, message))
    }
}

#[cfg(test)]
#[path = "gangs_tests.rs"]
mod tests;
