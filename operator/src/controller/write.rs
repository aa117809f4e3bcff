//! Writes policies' status and DeviceClasses.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_crds::names;
use kerf_crds::{PartitionPolicy, PartitionPolicyStatus};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};

use crate::scheduler::apply::Writer;

/// Writes each status that differs, if the policy has not changed meanwhile.
pub async fn policies(writer: &Writer, statuses: Vec<(Arc<PartitionPolicy>, PartitionPolicyStatus)>) {
    let api: Api<PartitionPolicy> = Api::all(writer.client.clone());
    for (policy, status) in statuses {
        if !writer.leadership.holds() {
            return;
        }
        let mut policy = PartitionPolicy::clone(&policy);
        policy.status = Some(status);
        match api.replace_status(&policy.name_any(), &PostParams::default(), &policy).await {
            Ok(written) => writer.cache.wrote_policy(written),
            Err(kube::Error::Api(error)) if error.code == 409 || error.code == 404 => {}
            Err(error) => {
                tracing::warn!(policy = policy.name_any(), %error, "cannot write the policy's status")
            }
        }
    }
}

/// Makes the classes as they should be, by server-side apply: what others add to them stays.
pub async fn classes(writer: &Writer, classes: Vec<DeviceClass>) {
    let api: Api<DeviceClass> = Api::all(writer.client.clone());
    let parameters = PatchParams::apply(names::OPERATOR).force();
    for class in classes {
        if !writer.leadership.holds() {
            return;
        }
        match api.patch(&class.name_any(), &parameters, &Patch::Apply(&class)).await {
            Ok(written) => writer.cache.wrote_class(written),
            Err(error) => tracing::warn!(class = class.name_any(), %error, "cannot write the DeviceClass"),
        }
    }
}
