//! Writes to claims: creation, allocation, clearing.

use std::time::Instant;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimStatus};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::conditions::pod_reason;
use kerf_crds::names;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::json;

use super::apply::{Outcome, Writer, is_conflict};
use super::claims;
use super::placements::{Key, Seen};
use super::tell::{self, Nominate};
use crate::cache::PodInfo;

impl Writer {
    pub(super) fn claims(&self, namespace: &str) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(super) async fn create_claim(&self, key: &Key, seen: &Seen) -> kube::Result<Outcome> {
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

    /// Deletes a claim that is not allocated. kube-controller-manager takes the finalizer out.
    pub(super) async fn delete_claim(&self, key: &Key, seen: &Seen) -> kube::Result<Outcome> {
        let Some(claim) = &seen.claim else { return Ok(Outcome::Later) };
        let preconditions = Preconditions {
            uid: claim.metadata.uid.clone(),
            resource_version: claim.metadata.resource_version.clone(),
        };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match self.claims(&key.namespace).delete(&key.claim, &parameters).await?.left() {
            Some(deleting) => {
                self.cache.wrote_claim(deleting);
                Ok(Outcome::Done)
            }
            // Gone at once: the watch tells.
            None => Ok(Outcome::Later),
        }
    }

    /// Whether a claim that a quota refused would be let through now: asked without making it, and without a place.
    pub(super) async fn ask_quota(&self, pod: &PodInfo) {
        let original = pod.detail.as_ref().and_then(|detail| detail.original.as_ref());
        let (Some(name), Some(Ok(original))) = (pod.own_claim(), original) else { return };
        let claim = claims::from_annotation(pod, name, original);
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        match self.claims(&pod.namespace).create(&parameters, &claim).await {
            Ok(_) => {}
            Err(error) if is_conflict(&error) => {}
            Err(error) => return self.failed(&pod.uid, "create the claim", &error),
        }
        self.memory.succeeded(&pod.uid);
        self.memory.let_through(&pod.uid, Instant::now());
        self.cache.wake();
    }

    pub(super) async fn allocate(&self, key: &Key, seen: &Seen, hold: bool) -> kube::Result<Outcome> {
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
        let Some(allocation) = claims::allocate(&claim, node, seen.devices(), Timestamp::now()) else {
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
            self.tell(pod, &tell::allocated(seen), Nominate::Node(&key.node)).await;
        }
        Ok(Outcome::Done)
    }

    pub(super) async fn rewrite_status(
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
}

/// Takes the hold out.
pub(super) fn release_hold(status: &mut ResourceClaimStatus) {
    if let Some(consumers) = &mut status.reserved_for {
        consumers.retain(|consumer| !claims::is_hold(consumer));
    }
}
