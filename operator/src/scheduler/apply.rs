//! Writes what a cycle decided.
//!
//! Order for a new placement: the node's spec (the commit), the claim, its allocation, the pod's gate. Every step looks
//! at the world anew (own writes included) and asks [`kerf_planner::protocol::next`]; the first that cannot go on stops,
//! and a later cycle takes it up. Every write has a precondition; a conflict means that the world has moved, and is left
//! to the next cycle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimStatus};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::conditions::pod_reason;
use kerf_crds::{GpuNode, names};
use kerf_planner::protocol::{Step, next};
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::cycle::{Decision, NodeWrite, is_driven};
use super::memory::Memory;
use super::placements::{self, Key, Seen};
use super::tell::{self, Sentence};
use super::{claims, requests};
use crate::cache::{Cache, PodInfo, World};
use crate::leader::Leadership;

/// Writes under way at the same time.
const CONCURRENCY: usize = 32;
/// Most steps of one placement in one go: create, allocate, tell, ungate, and some for the unforeseen.
const STEPS: usize = 8;
/// A write that takes longer is given up; the next cycle looks what became of it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Everything that writing needs.
#[derive(Clone)]
pub struct Writer {
    pub client: Client,
    pub cache: Cache,
    pub memory: Arc<Memory>,
    pub leadership: Leadership,
    pub events: Recorder,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

/// What became of a step.
enum Outcome {
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
        let told = decision.sentences.iter().map(|(pod, sentence)| Job::Tell(pod, sentence));
        let jobs = specs.chain(drive).chain(ungate).chain(quota).chain(stranded).chain(told);
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
                self.tell(pod, &sentence, None).await;
                if let Err(error) = self.ungate(pod).await {
                    self.failed(&pod.uid, "remove the gate", &error);
                }
            }
            Job::Quota(pod) => self.ask_quota(pod).await,
            Job::Stranded(pod) => self.stranded(pod).await,
            Job::Tell(pod, sentence) => self.tell(pod, sentence, None).await,
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

    fn look<T>(&self, of: impl FnOnce(&World) -> T) -> T {
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
                Ok(Outcome::Done) if matches!(step, Step::ReadPod | Step::ClearAllocation) => {}
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

    fn failed(&self, pod_uid: &str, what: &str, error: &kube::Error) {
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

    fn claims(&self, namespace: &str) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn create_claim(&self, key: &Key, seen: &Seen) -> kube::Result<Outcome> {
        let Some(pod) = &seen.pod else { return Ok(Outcome::Later) };
        let Some(Ok(original)) = pod.detail.as_ref().and_then(|detail| detail.original.as_ref()) else {
            return Ok(Outcome::Later);
        };
        let claim = claims::from_annotation(pod, &key.claim, original);
        let api = self.claims(&key.namespace);
        match api.create(&PostParams::default(), &claim).await {
            Ok(created) => {
                self.cache.wrote_claim(created);
                Ok(Outcome::Done)
            }
            Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {
                // Ours from before a crash, or somebody else's: its owner tells.
                let found = api.get(&key.claim).await?;
                let ours = claims::belongs_to(&found, pod) && claims::asks_for_the_same(&found, &claim);
                self.cache.wrote_claim(found);
                if ours {
                    return Ok(Outcome::Done);
                }
                self.memory.failed(
                    &key.pod_uid,
                    pod_reason::BAD_CLAIM,
                    format!(
                        "the ResourceClaim {:?} that this pod names was made by somebody else; delete it, or recreate \
                         the pod",
                        key.claim
                    ),
                    Instant::now(),
                );
                Ok(Outcome::Later)
            }
            Err(error) => {
                if matches!(&error, kube::Error::Api(status) if status.code == 403) {
                    // The place is of no use to a pod that may not have it.
                    self.memory.give_back(key);
                }
                Err(error)
            }
        }
    }

    /// Whether a claim that a quota refused would be let through now: asked without making it, and without a place.
    async fn ask_quota(&self, pod: &PodInfo) {
        let original = pod.detail.as_ref().and_then(|detail| detail.original.as_ref());
        let (Some(name), Some(Ok(original))) = (pod.own_claim(), original) else { return };
        let claim = claims::from_annotation(pod, name, original);
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        match self.claims(&pod.namespace).create(&parameters, &claim).await {
            Ok(_) => self.memory.succeeded(&pod.uid),
            Err(error) if is_conflict(&error) => self.memory.succeeded(&pod.uid),
            Err(error) => return self.failed(&pod.uid, "create the claim", &error),
        }
        self.cache.wake();
    }

    async fn allocate(&self, key: &Key, seen: &Seen, hold: bool) -> kube::Result<Outcome> {
        let (Some(claim), Some(node), Some(pod)) = (&seen.claim, &seen.node, &seen.pod) else {
            return Ok(Outcome::Later);
        };
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        // Cleared by somebody since we wrote it: by kube-scheduler, after a failed attempt.
        let thrown_away = self.memory.cleared(&uid);
        if thrown_away && !hold {
            tracing::info!(
                pod = key.pod,
                claim = key.claim,
                "kube-scheduler threw the allocation away; holding it"
            );
            self.memory.hold(&key.pod_uid);
        }
        let hold = (hold || thrown_away) && pod.node.is_none();
        let mut claim = ResourceClaim::clone(claim);
        let api = self.claims(&key.namespace);
        let finalizers = claim.metadata.finalizers.get_or_insert_default();
        if !finalizers.iter().any(|finalizer| finalizer == names::CLAIM_FINALIZER) {
            finalizers.push(names::CLAIM_FINALIZER.to_owned());
            let patch = json!({"metadata": {
                "resourceVersion": claim.metadata.resource_version,
                "finalizers": claim.metadata.finalizers,
            }});
            claim = api.patch(&key.claim, &PatchParams::default(), &Patch::Merge(&patch)).await?;
            self.cache.wrote_claim(claim.clone());
        }
        let Some(allocation) = claims::allocate(&claim, node, &seen.devices, Timestamp::now()) else {
            return Ok(Outcome::Later);
        };
        let mut consumers = vec![claims::reservation(pod)];
        if hold {
            consumers.push(claims::hold(node));
        }
        let status = claim.status.get_or_insert_default();
        status.allocation = Some(allocation);
        status.reserved_for = Some(consumers);
        let written = api.replace_status(&key.claim, &PostParams::default(), &claim).await?;
        self.memory.allocated(&uid);
        self.memory.forget_read(key);
        self.cache.wrote_claim(written);
        if !pod.gated() {
            // There is no gate to remove; the pod is told, and kube-scheduler woken by the allocation itself.
            self.tell(pod, &tell::allocated(seen), Some(&key.node)).await;
        }
        Ok(Outcome::Done)
    }

    async fn rewrite_status(
        &self,
        key: &Key,
        seen: &Seen,
        change: impl FnOnce(&mut ResourceClaimStatus),
    ) -> kube::Result<Outcome> {
        let Some(claim) = &seen.claim else { return Ok(Outcome::Later) };
        let mut claim = ResourceClaim::clone(claim);
        change(claim.status.get_or_insert_default());
        let api = self.claims(&key.namespace);
        let written = api.replace_status(&key.claim, &PostParams::default(), &claim).await?;
        self.cache.wrote_claim(written);
        Ok(Outcome::Done)
    }

    async fn ungate_after_allocation(&self, seen: &Seen) -> kube::Result<Outcome> {
        let Some(pod) = &seen.pod else { return Ok(Outcome::Later) };
        if !self.look(|world| all_allocated(world, pod)) {
            return Ok(Outcome::Later);
        }
        if !pod.other_gates().is_empty() {
            return Ok(Outcome::Later);
        }
        let node = seen.node.as_ref().map(|node| node.name_any());
        self.tell(pod, &tell::allocated(seen), node.as_deref()).await;
        self.ungate(pod).await?;
        Ok(Outcome::Done)
    }

    async fn ungate(&self, pod: &PodInfo) -> kube::Result<()> {
        let gates = pod.detail.iter().flat_map(|detail| &detail.gates);
        let Some(index) = gates.into_iter().position(|gate| gate == names::GATE) else { return Ok(()) };
        let patch: json_patch::Patch = serde_json::from_value(json!([
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": format!("/spec/schedulingGates/{index}/name"), "value": names::GATE},
            {"op": "remove", "path": format!("/spec/schedulingGates/{index}")},
        ]))
        .map_err(kube::Error::SerdeError)?;
        let patch = Patch::Json::<()>(patch);
        let written = self.pods(&pod.namespace).patch(&pod.name, &PatchParams::default(), &patch).await?;
        self.cache.wrote_pod(written);
        Ok(())
    }

    async fn read_pod(&self, key: &Key) -> kube::Result<Outcome> {
        match self.pods(&key.namespace).get_opt(&key.pod).await? {
            Some(pod) => {
                self.cache.wrote_pod(pod);
                self.memory.note_read(key);
                Ok(Outcome::Done)
            }
            // Gone; the watch tells.
            None => Ok(Outcome::Later),
        }
    }

    /// A pod that can never run where it is bound: looked at once more, live, and evicted if another will take its
    /// place.
    async fn stranded(&self, pod: &PodInfo) {
        let pods = self.pods(&pod.namespace);
        let live = match pods.get_opt(&pod.name).await {
            Ok(Some(live)) => PodInfo::from(live),
            Ok(None) => return,
            Err(error) => return self.failed(&pod.uid, "read the pod", &error),
        };
        if live.uid != pod.uid || live.done || live.deleting || live.node.is_none() {
            self.memory.not_stranded(&pod.uid);
            return;
        }
        let node = live.node.clone().unwrap_or_default();
        let message = format!("is bound to node {node}, where its partition is not, and can never run there");
        if !live.detail.as_ref().is_some_and(|detail| detail.controlled) {
            // Nothing would come in its place: people must decide.
            let message = format!("{message}; delete it and create it again");
            self.tell(&live, &Sentence::waiting(pod_reason::BAD_CLAIM, message), None).await;
            self.memory.failed(&pod.uid, pod_reason::BAD_CLAIM, "bound away".into(), Instant::now());
            return;
        }
        let parameters = EvictParams {
            delete_options: Some(DeleteParams {
                preconditions: Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None }),
                ..DeleteParams::default()
            }),
            post_options: PostParams::default(),
        };
        match pods.evict(&pod.name, &parameters).await {
            Ok(_) => {
                tracing::info!(pod = pod.id(), node, "evicted: bound away from its partition");
                self.event(&live, EventType::Warning, "Evicted", &format!("evicted: it {message}")).await;
            }
            // A disruption budget says wait.
            Err(error) => self.failed(&pod.uid, "evict the pod", &error),
        }
    }

    /// Writes the condition, and an event if the pod waits.
    async fn tell(&self, pod: &PodInfo, sentence: &Sentence, nominate: Option<&str>) {
        let now = Instant::now();
        let current = self.look(|world| world.pod(&pod.namespace, &pod.name, &pod.uid).cloned());
        let pod = current.as_deref().unwrap_or(pod);
        let nominated = pod.detail.as_ref().and_then(|detail| detail.nominated.as_deref());
        let nominate = nominate.filter(|node| nominated != Some(node) && pod.node.is_none());
        if !sentence.due(pod, &self.memory, now) && nominate.is_none() {
            return;
        }
        let patch =
            sentence.patch(pod, nominate, &Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let api = self.pods(&pod.namespace);
        match api.patch_status(&pod.name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
            Ok(written) => {
                self.memory.told(&pod.uid, now);
                self.cache.wrote_pod(written);
                if !sentence.planned {
                    self.event(pod, EventType::Normal, sentence.reason, &sentence.message).await;
                }
            }
            Err(error) if is_conflict(&error) || is_gone(&error) => {}
            Err(error) => {
                tracing::warn!(pod = pod.id(), %error, "cannot write the pod's condition");
                self.memory.told(&pod.uid, now);
            }
        }
    }

    async fn event(&self, pod: &PodInfo, type_: EventType, reason: &str, note: &str) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.to_owned()),
            action: "Plan".into(),
            secondary: None,
        };
        let reference = k8s_openapi::api::core::v1::ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..Default::default()
        };
        if let Err(error) = self.events.publish(&event, &reference).await {
            tracing::debug!(pod = pod.id(), %error, "cannot write an event");
        }
    }
}

enum Job<'a> {
    Node(&'a NodeWrite),
    Placement(&'a Key),
    Ungate(&'a PodInfo),
    Quota(&'a PodInfo),
    Stranded(&'a PodInfo),
    Tell(&'a PodInfo, &'a Sentence),
}

fn release_hold(status: &mut ResourceClaimStatus) {
    if let Some(consumers) = &mut status.reserved_for {
        consumers.retain(|consumer| !claims::is_hold(consumer));
    }
}

/// Whether every claim of the pod that is Kerf's business is allocated.
fn all_allocated(world: &World, pod: &PodInfo) -> bool {
    let claims = pod.detail.iter().flat_map(|detail| &detail.claims);
    claims.into_iter().all(|claim| {
        claim.claim.as_ref().and_then(|name| world.claim(&pod.namespace, name)).is_some_and(|claim| {
            claims::allocation(claim).is_some() || !requests::claim_is_for_kerf(world, claim)
        })
    })
}

/// Somebody has changed the object since it was looked at.
fn is_conflict(error: &kube::Error) -> bool {
    // A JSON patch whose test fails is answered with 422.
    matches!(error, kube::Error::Api(status)
        if status.code == 409 || (status.code == 422 && status.message.contains("the server rejected our request")))
}

fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}
