//! From an AdmissionReview to its answer.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kerf_crds::{PartitionPolicy, partition_policy::WholeGpus, profile};
use kube::{
    Resource,
    core::{
        DynamicObject,
        admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation},
    },
};
use serde::de::DeserializeOwned;
use tracing::{debug, info};

use super::{
    View,
    denial::Denial,
    pods::{AdmissionContext, Mutation, mutate},
    policies::validate,
    update::restore,
};

/// Longest warning that kubectl shows whole.
const MAX_WARNING: usize = 256;

/// Answers a review of a pod.
pub(super) fn pod(body: &[u8], view: &dyn View) -> AdmissionReview<DynamicObject> {
    answer::<Pod>(body, |request| {
        let Some(pod) = &request.object else { return Ok(Mutation::default()) };
        match request.operation {
            Operation::Create => mutate(pod, &context(view, &request.uid)),
            Operation::Update => match &request.old_object {
                Some(old) => restore(pod, old),
                None => Ok(Mutation::default()),
            },
            Operation::Delete | Operation::Connect => Ok(Mutation::default()),
        }
    })
}

/// Answers a review of a PartitionPolicy.
pub(super) fn policy(body: &[u8], view: &dyn View) -> AdmissionReview<DynamicObject> {
    answer::<PartitionPolicy>(body, |request| {
        let Some(policy) = &request.object else { return Ok(Mutation::default()) };
        // The status is Kerf's own, and a policy that is going may be as it likes.
        if policy.metadata.deletion_timestamp.is_some() {
            return Ok(Mutation::default());
        }
        let verdict = validate(&policy.spec, &view.nodes());
        match verdict.into_result() {
            Ok(warnings) => Ok(Mutation { warnings, ..Mutation::default() }),
            Err(denial) => Err(denial),
        }
    })
}

/// What is known beside a pod.
pub(crate) fn context(view: &dyn View, request_uid: &str) -> AdmissionContext {
    let policies = view.policies();
    let serves = |policies: Vec<_>| {
        policies
            .iter()
            .any(|policy: &std::sync::Arc<PartitionPolicy>| policy.spec.whole_gpus == WholeGpus::Serve)
    };
    let nodes = view.nodes();
    let profiles = nodes
        .iter()
        .filter_map(|node| node.status.as_ref())
        .flat_map(|status| status.geometries.iter().flat_map(|geometry| &geometry.profiles));
    AdmissionContext {
        request_uid: request_uid.to_owned(),
        whole_gpus: policies.map(serves),
        known_resources: profiles
            .map(|profile| profile::resource_name(&profile.name))
            .collect::<BTreeSet<_>>(),
    }
}

fn answer<T>(
    body: &[u8],
    decide: impl FnOnce(&AdmissionRequest<T>) -> Result<Mutation, Denial>,
) -> AdmissionReview<DynamicObject>
where
    T: Resource + DeserializeOwned,
{
    let request: AdmissionRequest<T> = match read(body) {
        Ok(request) => request,
        Err(error) => return unreadable(body, &error),
    };
    let response = AdmissionResponse::from(&request);
    let what = format!(
        "{:?} of {} {}/{}",
        request.operation,
        request.kind.kind,
        request.namespace.as_deref().unwrap_or_default(),
        request.name
    );
    match decide(&request) {
        Ok(mutation) => allow(response, mutation, &what),
        Err(denial) => {
            info!(%denial, "refused {what}");
            deny(response, &denial)
        }
    }
    .into_review()
}

fn read<T>(body: &[u8]) -> Result<AdmissionRequest<T>, String>
where
    T: Resource + DeserializeOwned,
{
    let review: AdmissionReview<T> = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    review.try_into().map_err(|_| "the review has no request".to_owned())
}

fn allow(mut response: AdmissionResponse, mutation: Mutation, what: &str) -> AdmissionResponse {
    if !mutation.warnings.is_empty() {
        let shorten = |mut warning: String| {
            if let Some((end, _)) = warning.char_indices().nth(MAX_WARNING) {
                warning.truncate(end);
            }
            warning
        };
        response.warnings = Some(mutation.warnings.into_iter().map(shorten).collect());
    }
    if mutation.patch.0.is_empty() {
        return response;
    }
    debug!(operations = mutation.patch.0.len(), "changed {what}");
    let uid = response.uid.clone();
    match response.with_patch(mutation.patch) {
        Ok(response) => response,
        Err(error) => {
            let mut response = AdmissionResponse::invalid(format!("failed to write the patch: {error}"));
            response.uid = uid;
            response
        }
    }
}

fn deny(response: AdmissionResponse, denial: &Denial) -> AdmissionResponse {
    let mut response = response.deny(denial);
    response.result.code = denial.code;
    response.result.reason = if denial.code == 503 { "ServiceUnavailable" } else { "Invalid" }.to_owned();
    response
}

/// A request that this version cannot read is refused, with its UID where that can be read: without it the API server
/// would report the answer, not the request, as wrong.
fn unreadable(body: &[u8], error: &str) -> AdmissionReview<DynamicObject> {
    let mut response = AdmissionResponse::invalid(format!("Kerf cannot read the object: {error}"));
    if let Ok(request) = read::<DynamicObject>(body) {
        response.uid = request.uid;
    }
    response.into_review()
}

#[cfg(test)]
#[path = "review_tests.rs"]
mod tests;
