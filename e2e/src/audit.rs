//! What was written through the API server, read from its audit log.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

/// A write request that has been answered.
#[derive(Clone, Debug)]
pub struct Write {
    /// Such as `system:serviceaccount:kerf-system:kerf-operator`, `system:kube-scheduler`, `system:node:node-a`.
    pub user: String,
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// The plural name, with the subresource where there is one: `pods`, `pods/status`.
    pub resource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    /// Empty where the API server made the name.
    pub name: String,
    /// The HTTP status of the answer.
    pub code: u16,
    /// When the request came, and when it was answered.
    pub received: Timestamp,
    pub answered: Timestamp,
    /// Path and query.
    pub uri: String,
    /// What was sent, where the log holds it. Of a patch, the patch.
    pub body: Option<Value>,
}

/// Reads an audit log in JSON lines. A last line that is still being written is left out.
pub(crate) fn read(path: &Path) -> Result<Vec<Write>> {
    let text = fs::read_to_string(path).with_context(|| {
        format!("failed to read {}; was the cluster started with `audit`?", path.display())
    })?;
    let mut writes = Vec::new();
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let event: Event = serde_json::from_str(line)
            .with_context(|| format!("{} holds an unknown line", path.display()))?;
        let (Some(object), Some(answer)) = (event.object_ref, event.response_status) else { continue };
        if event.stage != "ResponseComplete" {
            continue;
        }
        writes.push(Write {
            user: event.user.username,
            verb: event.verb,
            resource: match object.subresource.as_str() {
                "" => object.resource,
                subresource => format!("{}/{subresource}", object.resource),
            },
            namespace: object.namespace,
            name: object.name,
            code: answer.code,
            received: event.request_received_timestamp.0,
            answered: event.stage_timestamp.0,
            uri: event.request_uri,
            body: event.request_object,
        });
    }
    Ok(writes)
}

/// The number of successful writes by user, then by verb and resource (`patch pods/status`).
pub fn count(writes: &[Write]) -> BTreeMap<String, BTreeMap<String, usize>> {
    let mut counts: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    for write in writes.iter().filter(|write| write.code < 300) {
        *counts
            .entry(write.user.clone())
            .or_default()
            .entry(format!("{} {}", write.verb, write.resource))
            .or_default() += 1;
    }
    counts
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    stage: String,
    verb: String,
    user: User,
    object_ref: Option<ObjectRef>,
    response_status: Option<Status>,
    #[serde(rename = "requestURI")]
    request_uri: String,
    request_received_timestamp: MicroTime,
    stage_timestamp: MicroTime,
    request_object: Option<Value>,
}

#[derive(Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct ObjectRef {
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
}
