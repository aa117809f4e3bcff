//! Writes policies' status and DeviceClasses.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_crds::names;
use kerf_crds::{PartitionPolicy, PartitionPolicyStatus};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use tokio::time::timeout;

use crate::scheduler::apply::{PATIENCE, Writer};

/// Writes each status that differs, if the policy has not changed meanwhile.
pub async fn policies(writer: &Writer, statuses: Vec<(Arc<PartitionPolicy>, PartitionPolicyStatus)>) {
    let api: Api<PartitionPolicy> = Api::all(writer.client.clone());
    for (policy, status) in statuses {
        if !writer.leadership.holds() {
            return;
        }
        let mut policy = PartitionPolicy::clone(&policy);
        policy.status = Some(status);
        let name = policy.name_any();
        match timeout(PATIENCE, api.replace_status(&name, &PostParams::default(), &policy)).await {
            Ok(Ok(written)) => {
                writer.memory.policy_written(&name, Instant::now());
                writer.cache.wrote_policy(written);
            }
            Ok(Err(kube::Error::Api(error))) if error.code == 409 || error.code == 404 => {}
            Ok(Err(error)) => tracing::warn!(policy = name, %error, "cannot write the policy's status"),
            Err(_) => return too_long(writer),
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
        let name = class.name_any();
        match timeout(PATIENCE, api.patch(&name, &parameters, &Patch::Apply(&class))).await {
            Ok(Ok(written)) => writer.cache.wrote_class(written),
            Ok(Err(error)) => tracing::warn!(class = name, %error, "cannot write the DeviceClass"),
            Err(_) => return too_long(writer),
        }
    }
}

/// The scheduler waits for these writes: the rest of them is left to the next cycle.
fn too_long(writer: &Writer) {
    tracing::warn!("the API server took too long; looking again");
    writer.cache.wake();
}
