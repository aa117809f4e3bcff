//! Writes what a cycle decided.
//!
//! Order for a new placement: the node's spec (the commit), the claim, its allocation, the pod's gate. Every step looks
//! at the world anew (own writes included) and asks [`kerf_planner::protocol::next`]; the first that cannot go on stops,
//! and a later cycle takes it up. Every write has a precondition; a conflict means that the world has moved, and is left
//! to the next cycle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kerf_crds::GpuNode;
use kerf_crds::conditions::pod_reason;
use kerf_planner::protocol::{Step, next};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};

use super::claim_writes::release_hold;
use super::decision::{Decision, NodeWrite};
use super::events::Events;
use super::memory::Memory;
use super::placements::{self, Key, Seen};
use super::rooms::Eviction;
use super::tell::{Nominate, Sentence};
use crate::cache::{Cache, PodInfo, World};
use crate::leader::Leadership;

/// Writes under way at the same time.
const CONCURRENCY: usize = 32;
/// Most steps of one placement in one go: create, allocate, tell, ungate, and some for the unforeseen.
const STEPS: usize = 8;
/// A write that takes longer is given up; the next cycle looks what became of it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Everything that writing needs.
#[derive(Clone)]
pub struct Writer {
    pub client: Client,
    pub cache: Cache,
    pub memory: Arc<Memory>,
    pub leadership: Leadership,
    pub events: Events,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

/// What became of a step.
pub(super) enum Outcome {
    /// Done; the placement can be looked at again at once.
    Done,
    /// Not now.
    Later,
}

impl Writer {
    /// Writes a decision: nodes and their placements side by side.
    pub async fn apply(&self, decision: &Decision) {
        let specs = decision.specs.iter().map(Job::Node);
        let drive = decision.drive.iter().map(Job::Placement);
        let ungate = decision.ungate.iter().map(|pod| Job::Ungate(pod));
        let quota = decision.quota.iter().map(|pod| Job::Quota(pod));
        let stranded = decision.stranded.iter().map(|pod| Job::Stranded(pod));
        let evictions = decision.evictions.iter().map(Job::Evict);
        let told = decision.sentences.iter().map(|(pod, sentence)| {
            let placeless = decision.placeless.contains(&pod.uid);
            Job::Tell(pod, sentence, if placeless { Nominate::Nobody } else { Nominate::AsIs })
        });
        let jobs = specs.chain(drive).chain(ungate).chain(quota).chain(stranded).chain(evictions).chain(told);
        futures::stream::iter(jobs)
            .for_each_concurrent(CONCURRENCY, |job| async move {
                if tokio::time::timeout(PATIENCE, self.job(job)).await.is_err() {
                    tracing::warn!("the API server took too long; looking again");
                    self.cache.wake();
                }
            })
            .await;
    }

    async fn job(&self, job: Job<'_>) {
        if !self.leadership.holds() {
            return;
        }
        match job {
            Job::Node(write) => self.node(write).await,
            Job::Placement(key) => self.drive(key).await,
            Job::Ungate(pod) => {
                let message = "its claims, which it shares with other pods, are allocated".to_owned();
                let sentence = Sentence { planned: true, reason: pod_reason::ALLOCATED, message };
                self.tell(pod, &sentence, Nominate::AsIs).await;
                if let Err(error) = self.ungate(pod).await {
                    self.failed(&pod.uid, "remove the gate", &error);
                }
            }
            Job::Quota(pod) => self.ask_quota(pod).await,
            Job::Stranded(pod) => self.stranded(pod).await,
            Job::Evict(eviction) => self.move_away(eviction).await,
            Job::Tell(pod, sentence, nominate) => self.tell(pod, sentence, nominate).await,
        }
    }

    /// The commit: the node's spec, if nobody has changed the object since it was looked at.
    async fn node(&self, write: &NodeWrite) {
        let name = write.node.name_any();
        let mut object = GpuNode::clone(&write.node);
        object.spec = write.spec.clone();
        object.status = None;
        let api: Api<GpuNode> = Api::all(self.client.clone());
        match api.replace(&name, &PostParams::default(), &object).await {
            Ok(written) => {
                tracing::info!(
                    node = name,
                    added = write.added.len(),
                    removed = write.removed.len(),
                    "node told"
                );
                self.cache.wrote_gpu_node(written);
                for key in &write.removed {
                    self.memory.removed(key);
                }
                futures::stream::iter(&write.added)
                    .for_each_concurrent(CONCURRENCY, |key| self.drive(key))
                    .await;
            }
            Err(error) if is_conflict(&error) => {
                // The daemon's report came in between: decided anew from it.
                tracing::debug!(node = name, "the node's object has changed; planning again");
                self.refresh_gpu_node(&api, &name).await;
            }
            Err(error) => {
                tracing::warn!(node = name, %error, "cannot write the node's spec");
                tokio::time::sleep(Duration::from_millis(500)).await;
                self.cache.wake();
            }
        }
    }

    async fn refresh_gpu_node(&self, api: &Api<GpuNode>, name: &str) {
        // Without this the next cycle could come before the watch and conflict again.
        match api.get_opt(name).await {
            Ok(Some(node)) => self.cache.wrote_gpu_node(node),
            Ok(None) => {}
            Err(error) => tracing::debug!(node = name, %error, "cannot read the node's object"),
        }
        self.cache.wake();
    }

    pub(super) fn look<T>(&self, of: impl FnOnce(&World) -> T) -> T {
        of(&self.cache.read())
    }

    /// Carries a placement on as far as it goes.
    async fn drive(&self, key: &Key) {
        for _ in 0..STEPS {
            if !self.leadership.holds() {
                return;
            }
            let seen = self.look(|world| placements::look(world, &self.memory, key));
            let step = next(&seen.observed);
            if !is_driven(step) {
                if step == Step::RemoveEntry {
                    self.cache.wake();
                }
                return;
            }
            match self.step(key, &seen, step).await {
                // Giving a place up is no success: what led to it still stands.
                Ok(Outcome::Done)
                    if matches!(step, Step::ReadPod | Step::ClearAllocation | Step::DeleteClaim) => {}
                Ok(Outcome::Done) => self.memory.succeeded(&key.pod_uid),
                Ok(Outcome::Later) => return,
                Err(error) if is_conflict(&error) || is_gone(&error) => {
                    // Somebody was faster; the watch tells what they did.
                    tracing::debug!(?key, ?step, %error, "overtaken");
                    self.memory.overtaken(&key.pod_uid, Instant::now());
                    return;
                }
                Err(error) => {
                    self.failed(&key.pod_uid, &format!("{step:?}"), &error);
                    return;
                }
            }
        }
        self.cache.wake();
    }

    pub(super) fn failed(&self, pod_uid: &str, what: &str, error: &kube::Error) {
        tracing::warn!(pod_uid, what, %error, "a step failed");
        let (reason, message) = match error {
            kube::Error::Api(status) if status.code == 403 && status.message.contains("exceeded quota") => {
                (pod_reason::QUOTA, status.message.clone())
            }
            kube::Error::Api(status) => (pod_reason::RETRYING, format!("{what} failed: {}", status.message)),
            other => (pod_reason::RETRYING, format!("{what} failed: {other}")),
        };
        self.memory.failed(pod_uid, reason, message, Instant::now());
        self.cache.wake();
    }

    async fn step(&self, key: &Key, seen: &Seen, step: Step) -> kube::Result<Outcome> {
        tracing::debug!(pod = key.pod, claim = key.claim, node = key.node, ?step, "step");
        match step {
            Step::Wait(_) | Step::RemoveEntry | Step::RestoreEntry => Ok(Outcome::Later),
            Step::CreateClaim => self.create_claim(key, seen).await,
            Step::Allocate { hold } => self.allocate(key, seen, hold).await,
            Step::Ungate => self.ungate_after_allocation(seen).await,
            Step::ReleaseHold => self.rewrite_status(key, seen, release_hold).await,
            Step::ClearAllocation => {
                if let Some(uid) = seen.claim.as_ref().and_then(|claim| claim.metadata.uid.as_ref()) {
                    self.memory.cleared(uid);
                }
                self.rewrite_status(key, seen, |status| {
                    status.allocation = None;
                    status.reserved_for = None;
                    status.devices = None;
                })
                .await
            }
            Step::DeleteClaim => self.delete_claim(key, seen).await,
            Step::ReadPod => self.read_pod(key).await,
            Step::EvictPod => {
                // Watches of pods and claims are not in step with each other: what looks lost may just be over.
                if let Some(pod) = &seen.pod
                    && self.memory.stranded(&pod.uid, Instant::now())
                {
                    self.stranded(pod).await;
                }
                Ok(Outcome::Later)
            }
        }
    }
}

/// Whether a placement's next step is one that [`Writer::drive`] makes by itself.
fn is_driven(step: Step) -> bool {
    !matches!(step, Step::Wait(_) | Step::RemoveEntry | Step::RestoreEntry)
}

enum Job<'a> {
    Node(&'a NodeWrite),
    Placement(&'a Key),
    Ungate(&'a PodInfo),
    Quota(&'a PodInfo),
    Stranded(&'a PodInfo),
    Evict(&'a Eviction),
    Tell(&'a PodInfo, &'a Sentence, Nominate<'static>),
}

/// Somebody has changed the object since it was looked at.
pub(super) fn is_conflict(error: &kube::Error) -> bool {
    // A JSON patch whose test fails is answered with 422.
    matches!(error, kube::Error::Api(status)
        if status.code == 409 || (status.code == 422 && status.message.contains("the server rejected our request")))
}

/// The object is not there any more.
pub(super) fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}
