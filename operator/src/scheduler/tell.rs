//! What pods are told: Kerf's own condition, and an event when the sentence changes.
//!
//! A pod whose claim is missing gets neither condition nor event from Kubernetes, so every pod that Kerf handles carries
//! Kerf's own from the first moment.

use std::time::{Duration, Instant};

use kerf_crds::conditions::{pod::PLANNED, pod_reason};
use kerf_crds::gpu_node::Partition;
use kerf_crds::quantity::quantity;
use kerf_planner::misfit_text;
use kerf_planner::protocol::{self, Claim, Step, Waiting};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::memory::Memory;
use super::placements::Seen;
use super::trouble::Trouble;
use crate::cache::PodInfo;

/// A sentence whose numbers change is not rewritten more often than this.
const SAME_REASON: Duration = Duration::from_secs(2);

/// Kubernetes allows 32 KiB in a condition, and so much in an event.
const LONGEST: usize = 1024;

/// What a pod is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence {
    /// Status of the condition: whether the pod has its place.
    pub planned: bool,
    /// From [`pod_reason`].
    pub reason: &'static str,
    pub message: String,
}

impl Sentence {
    /// The pod has no place, or not yet.
    pub fn waiting(reason: &'static str, message: impl Into<String>) -> Self {
        let mut message: String = message.into();
        if message.len() > LONGEST {
            message.truncate(message.floor_char_boundary(LONGEST - '…'.len_utf8()));
            message.push('…');
        }
        Self { planned: false, reason, message }
    }

    /// Whether the pod says something else now.
    pub fn differs(&self, pod: &PodInfo) -> bool {
        let said = pod.detail.as_ref().and_then(|detail| detail.planned.as_ref());
        said.is_none_or(|(status, reason, message)| {
            (status == "True") != self.planned || *reason != self.reason || *message != self.message
        })
    }

    /// Whether it is to be written now: a new reason at once, new numbers after a while.
    pub fn due(&self, pod: &PodInfo, memory: &Memory, now: Instant) -> bool {
        if !self.differs(pod) {
            return false;
        }
        let said = pod.detail.as_ref().and_then(|detail| detail.planned.as_ref());
        let new_reason = said.is_none_or(|(_, reason, _)| *reason != self.reason);
        new_reason || memory.told_at(&pod.uid).is_none_or(|at| now.duration_since(at) >= SAME_REASON)
    }

    /// The patch of pods/status that says it, with a change of the nominated node if there is one.
    pub fn patch(&self, pod: &PodInfo, nominate: Option<Value>, now: &str) -> Value {
        let mut condition = json!({
            "type": PLANNED,
            "status": if self.planned { "True" } else { "False" },
            "reason": self.reason,
            "message": self.message,
        });
        let said = pod.detail.as_ref().and_then(|detail| detail.planned.as_ref());
        if said.is_none_or(|(status, ..)| (status == "True") != self.planned) {
            condition["lastTransitionTime"] = json!(now);
        }
        let mut status = json!({"conditions": [condition]});
        if let Some(node) = nominate {
            status["nominatedNodeName"] = node;
        }
        // The UID makes it fail on another pod of the same name.
        json!({"metadata": {"uid": pod.uid}, "status": status})
    }
}

/// What `status.nominatedNodeName` should be: kube-scheduler looks there first, and keeps the pod's CPU free there.
#[derive(Clone, Copy, Debug)]
pub enum Nominate<'a> {
    /// What it is.
    AsIs,
    /// The node of the pod's place.
    Node(&'a str),
    /// No node: the pod has no place.
    Nobody,
}

impl Nominate<'_> {
    /// The field's new value, if it changes.
    pub fn change(self, now: Option<&str>) -> Option<Value> {
        match self {
            Self::Node(node) if now != Some(node) => Some(json!(node)),
            Self::Nobody if now.is_some() => Some(Value::Null),
            _ => None,
        }
    }
}

/// What a pod with a place on record is told.
pub fn of_placement(
    seen: &Seen,
    step: Step,
    failure: Option<(&'static str, String)>,
    trouble: Option<&Trouble>,
) -> Option<Sentence> {
    let node = seen.node.as_ref()?;
    let name = node.name_any();
    if let Some((reason, message)) = failure {
        return Some(Sentence::waiting(reason, message));
    }
    if seen.observed.withdraw {
        let gang = seen.pod.as_ref().and_then(|pod| pod.gang());
        let who = gang.map_or_else(|| "it".into(), |gang| format!("it or another pod of gang {}", gang.name));
        return Some(Sentence::waiting(
            pod_reason::RESHAPING,
            format!("gives up its place on node {name}, where {who} cannot run now"),
        ));
    }
    if let Some(Trouble::Node(misfit)) = trouble {
        let why = misfit_text(std::slice::from_ref(misfit));
        let message = format!("has {} on node {name}, which cannot take the pod now: {why}", list(seen));
        return Some(Sentence::waiting(pod_reason::NODES_DO_NOT_FIT, message));
    }
    match (&seen.observed.claim, step) {
        // Whom it waits for is added where all of them are known.
        (_, Step::Wait(Waiting::Others)) => {
            let message = format!("has {} on node {name} and waits for other pods", list(seen));
            Some(Sentence::waiting(pod_reason::WAITS_FOR_GANG, message))
        }
        (Claim::Allocated { as_planned: true, .. }, _) => Some(allocated(seen)),
        (Claim::Stolen, _) => Some(Sentence::waiting(
            pod_reason::BAD_CLAIM,
            format!(
                "the ResourceClaim {:?} that this pod names was made by somebody else; delete it, or recreate the pod",
                seen.claim.as_ref().map(|claim| claim.name_any()).unwrap_or_default()
            ),
        )),
        (Claim::Deleting, _) => Some(Sentence::waiting(
            pod_reason::BAD_CLAIM,
            "its ResourceClaim is being deleted; recreate the pod".to_owned(),
        )),
        (Claim::Absent, Step::Wait(Waiting::ClaimConflict)) => {
            Some(Sentence::waiting(pod_reason::BAD_CLAIM, "its ResourceClaim does not exist".to_owned()))
        }
        // What is ready is allocated within the same cycle; there is nothing to tell.
        (_, Step::Allocate { .. }) => None,
        _ if seen.observed.entry.as_ref().is_some_and(|entry| entry.ready) => None,
        _ => Some(making(seen)),
    }
}

/// The pod has its place.
pub fn allocated(seen: &Seen) -> Sentence {
    let name = seen.node.as_ref().map(|node| node.name_any()).unwrap_or_default();
    Sentence {
        planned: true,
        reason: pod_reason::ALLOCATED,
        message: format!("has {} on node {name}", list(seen)),
    }
}

/// Whether the pod is bound where its place is, and yet its condition says that it waits: kube-scheduler was faster.
pub fn still_waits(seen: &Seen) -> bool {
    let said = seen.pod.as_ref().and_then(|pod| pod.detail.as_ref()?.planned.as_ref());
    seen.observed.pod == protocol::Pod::Bound { here: true }
        && matches!(seen.observed.claim, Claim::Allocated { as_planned: true, .. })
        && said.is_some_and(|(status, ..)| status != "True")
}

fn making(seen: &Seen) -> Sentence {
    let name = seen.node.as_ref().map(|node| node.name_any()).unwrap_or_default();
    let status = seen.node.as_ref().and_then(|node| node.status.as_ref());
    let problem = seen.devices().find_map(|device| {
        let gpu = status?.gpus.iter().find(|gpu| gpu.uuid == device.gpu)?;
        let of_share = device.share.as_ref().and_then(|wanted| {
            gpu.shares.iter().find(|share| share.id == wanted.id).and_then(|share| share.problem.as_ref())
        });
        Some((gpu.index, of_share.or(gpu.problem.as_ref())?))
    });
    match problem {
        Some((index, problem)) => Sentence::waiting(
            pod_reason::RETRYING,
            format!("node {name} cannot make {} yet: GPU {index}: {}", list(seen), problem.message),
        ),
        None => Sentence::waiting(pod_reason::RESHAPING, format!("node {name} is making {}", list(seen))),
    }
}

/// How large a share is, for people.
pub fn share_text(memory_bytes: u64, compute_milli: u32) -> String {
    format!("a share of {} and {} %", quantity(memory_bytes).0, f64::from(compute_milli) / 1000.0)
}

/// The devices of a place, with their GPUs.
pub fn list(seen: &Seen) -> String {
    let status = seen.node.as_ref().and_then(|node| node.status.as_ref());
    let one = |device: &Partition| {
        let gpu = status.and_then(|status| status.gpus.iter().find(|gpu| gpu.uuid == device.gpu));
        let gpu = gpu.map_or_else(|| device.gpu.clone(), |gpu| format!("GPU {}", gpu.index));
        match (&device.instance, &device.share) {
            (None, None) => format!("the whole of {gpu}"),
            (Some(instance), None) => {
                format!("{} at slice {} of {gpu}", instance.profile, instance.placement.start)
            }
            (None, Some(share)) => {
                format!("{} of {gpu}", share_text(share.memory_bytes, share.compute_milli))
            }
            (Some(instance), Some(share)) => format!(
                "{} of the {} at slice {} of {gpu}",
                share_text(share.memory_bytes, share.compute_milli),
                instance.profile,
                instance.placement.start
            ),
        }
    };
    seen.devices().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::PodDetail;

    fn pod(said: Option<(&str, &str, &str)>) -> PodInfo {
        PodInfo {
            uid: "u".into(),
            detail: Some(Box::new(PodDetail {
                planned: said.map(|(s, r, m)| (s.into(), r.into(), m.into())),
                ..PodDetail::default()
            })),
            ..PodInfo::default()
        }
    }

    #[test]
    fn a_long_sentence_is_cut_to_what_an_event_takes() {
        assert_eq!(Sentence::waiting(pod_reason::RETRYING, "a".repeat(LONGEST)).message.len(), LONGEST);
        let cut = Sentence::waiting(pod_reason::RETRYING, "a".repeat(LONGEST + 1)).message;
        assert!(cut.len() <= LONGEST && cut.ends_with('…'), "{}", cut.len());
    }

    #[test]
    fn a_node_is_nominated_once_and_none_without_a_place() {
        assert_eq!(Nominate::Node("a").change(None), Some(json!("a")));
        assert_eq!(Nominate::Node("a").change(Some("a")), None);
        assert_eq!(Nominate::Nobody.change(Some("a")), Some(Value::Null));
        assert_eq!(Nominate::Nobody.change(None), None);
        assert_eq!(Nominate::AsIs.change(Some("a")), None);
    }

    #[test]
    fn a_new_reason_is_written_at_once_and_new_numbers_after_a_while() {
        let (memory, now) = (Memory::default(), Instant::now());
        let sentence = Sentence::waiting(pod_reason::NO_ROOM, "4 GPUs");
        assert!(sentence.due(&pod(None), &memory, now));
        memory.told("u", now);
        assert!(!sentence.due(&pod(Some(("False", "NoRoom", "4 GPUs"))), &memory, now));
        assert!(!sentence.due(&pod(Some(("False", "NoRoom", "3 GPUs"))), &memory, now));
        assert!(sentence.due(&pod(Some(("False", "NoRoom", "3 GPUs"))), &memory, now + SAME_REASON));
        assert!(sentence.due(&pod(Some(("False", "NodesDoNotFit", "x"))), &memory, now));
    }
}
