//! The floor: what Kerf wrote, written again by a script that decides nothing.
//!
//! A cluster in the state that Kerf's was in gets the same requests, bodies included, as the same users, in the same order
//! for each object and for each pod with its claim, and otherwise as many at a time as the API server takes. kube-scheduler
//! binds and kwok runs the pods, as before.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource, ResourceExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::kerf::{Before, PODS};
use super::phase::{Measured, Phase};
use super::{each, fleet, native};
use crate::audit::Write;
use crate::install::{self, Overlay};
use crate::kerf::NAMESPACE;

const PATIENCE: Duration = Duration::from_secs(1800);
const QUIET: Duration = Duration::from_secs(8);
/// Stand for what only the answers to earlier requests tell.
const VERSION: &str = "<version>";
const UID: &str = "<uid>";

/// What came of a replay.
#[derive(Debug)]
pub struct Floor {
    pub measured: Measured,
    /// Requests that were sent, and those of them that were refused.
    pub sent: usize,
    pub refused: usize,
}

/// Replays the writes of Kerf's parts up to the last binding; `at_once` requests at a time.
///
/// # Errors
/// The cluster cannot be brought into that state, or the pods are not all bound.
pub async fn replay(before: &Before, kerf: &Measured, at_once: usize) -> Result<Floor> {
    let cluster = native::cluster().await?;
    let client = cluster.client();
    install_all_but_kerf(&client).await?;
    let kwok = fleet::start(&cluster, before.nodes.len(), &json!({})).await?;
    let kubeconfigs = fleet::daemons_kubeconfigs(&cluster, before.nodes.len()).await?;
    let operator = cluster.kubeconfig_for_service_account(NAMESPACE, "operator", None).await?;
    let mut known = Known::default();
    let pods = restore(&client, before, &mut known).await?;

    let requests = requests(&kerf.writes, kerf.ended, &known.uids)?;
    let sent = requests.len();
    let mut clients = HashMap::from([(None, cluster.client_from(&operator).await?)]);
    for node in &before.nodes {
        let name = node.name_any();
        let client = cluster.client_from(&kubeconfigs.join(&name)).await?;
        clients.insert(Some(name), client);
    }
    sleep(QUIET).await;
    let phase =
        Phase::begin(&cluster, &[("kwok", kwok.pid()), ("the script", Some(std::process::id()))]).await?;
    let replay = Replay::new(requests, clients, known.versions);
    let refused = replay.run(at_once).await;
    let measured = phase.bound(&cluster, pods, PATIENCE).await?;
    Ok(Floor { measured, sent, refused })
}

/// The shipped manifests without what runs and without the webhooks that nobody would answer.
async fn install_all_but_kerf(client: &Client) -> Result<()> {
    let deploy = install::deploy_dir();
    for path in
        ["crds", "00-namespace.yaml", "10-rbac.yaml", "20-device-classes.yaml", "30-admission-policies.yaml"]
    {
        install::apply_path(client, &deploy.join(path), &Overlay::default()).await?;
    }
    Ok(())
}

/// What of the old cluster is what of the new one.
#[derive(Default)]
struct Known {
    uids: HashMap<String, String>,
    /// UID and version of each object, by resource, namespace and name.
    versions: HashMap<String, (String, String)>,
}

impl Known {
    fn note<K: Resource<DynamicType = ()>>(&mut self, old: &K, new: &K) {
        let id = id(&K::plural(&()), new.meta().namespace.as_deref().unwrap_or_default(), &new.name_any());
        let uid = new.meta().uid.clone().unwrap_or_default();
        self.uids.insert(old.meta().uid.clone().unwrap_or_default(), uid.clone());
        self.versions.insert(id, (uid, new.meta().resource_version.clone().unwrap_or_default()));
    }
}

fn id(resource: &str, namespace: &str, name: &str) -> String {
    format!("{resource}/{namespace}/{name}")
}

/// Makes what there was, as the administrator. Returns the number of pods.
async fn restore(client: &Client, before: &Before, known: &mut Known) -> Result<usize> {
    let nodes: Api<Node> = Api::all(client.clone());
    let now: HashMap<String, Node> =
        nodes.list(&ListParams::default()).await?.into_iter().map(|node| (node.name_any(), node)).collect();
    for old in &before.nodes {
        known.note(old, now.get(&old.name_any()).context("a node is missing")?);
    }
    for (old, new) in
        before.classes.iter().zip(copy::<DeviceClass>(client, &before.classes, None, known).await?)
    {
        known.note(old, &new);
    }
    let policies = copy::<PartitionPolicy>(client, &before.policies, Some(PATCHED), known).await?;
    for (old, new) in before.policies.iter().zip(&policies) {
        known.note(old, new);
    }
    let gpu_nodes = copy::<GpuNode>(client, &before.gpu_nodes, Some(PATCHED), known).await?;
    for (old, new) in before.gpu_nodes.iter().zip(&gpu_nodes) {
        known.note(old, new);
    }
    let slices = copy::<ResourceSlice>(client, &before.slices, None, known).await?;
    for (old, new) in before.slices.iter().zip(&slices) {
        known.note(old, new);
    }
    fleet::namespace(client, PODS, true).await?;
    let pods = before.pods.iter().map(|pod| Ok(bare(serde_json::to_value(pod)?, known)));
    let pods = fleet::create_pods(client, PODS, pods.collect::<Result<_>>()?).await?;
    for (old, new) in before.pods.iter().zip(&pods) {
        known.note(old, new);
    }
    Ok(pods.len())
}

/// Whether the kind has its status written apart.
const PATCHED: &str = "status";

async fn copy<K>(client: &Client, old: &[K], status: Option<&str>, known: &Known) -> Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + serde::Serialize + serde::de::DeserializeOwned + std::fmt::Debug,
    K: Resource<Scope = kube::core::ClusterResourceScope>,
{
    let api: Api<K> = Api::all(client.clone());
    each(old, |object| {
        let api = api.clone();
        async move {
            let mut value = serde_json::to_value(object)?;
            let reported = value["status"].take();
            let value = bare(value, known);
            let name = object.name_any();
            let made = match api.create(&PostParams::default(), &serde_json::from_value(value)?).await {
                Err(kube::Error::Api(status)) if status.is_already_exists() => api.get(&name).await?,
                made => made.with_context(|| format!("failed to create {name}"))?,
            };
            match status {
                Some(field) if !reported.is_null() => {
                    let patch = Patch::Merge(json!({ field: translated(reported, &known.uids) }));
                    Ok(api.patch_status(&name, &PatchParams::default(), &patch).await?)
                }
                _ => Ok(made),
            }
        }
    })
    .await
}

/// An object as it may be created.
fn bare(mut value: Value, known: &Known) -> Value {
    if let Some(metadata) = value["metadata"].as_object_mut() {
        metadata.retain(|field, _| {
            ["name", "namespace", "labels", "annotations", "ownerReferences"].contains(&field.as_str())
        });
    }
    if let Some(object) = value.as_object_mut() {
        object.remove("status");
    }
    translated(value, &known.uids)
}

/// With the new cluster's UIDs.
fn translated(value: Value, uids: &HashMap<String, String>) -> Value {
    match value {
        Value::String(text) => Value::String(uids.get(&text).cloned().unwrap_or(text)),
        Value::Array(all) => all.into_iter().map(|one| translated(one, uids)).collect(),
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, one)| (name, translated(one, uids))).collect())
        }
        other => other,
    }
}

struct Request {
    /// Whose it is: a daemon's node; `None`: the operator's.
    node: Option<String>,
    method: http::Method,
    uri: String,
    content_type: &'static str,
    body: String,
    /// The object, for its version.
    object: String,
    /// What has to come in order.
    chain: String,
}

/// The requests of Kerf's parts that were successful, up to a moment.
fn requests(
    writes: &[Write],
    until: k8s_openapi::jiff::Timestamp,
    uids: &HashMap<String, String>,
) -> Result<Vec<Request>> {
    let prefix = format!("system:serviceaccount:{NAMESPACE}:");
    let mut of_kerf: Vec<&Write> = writes
        .iter()
        .filter(|write| {
            let resource = write.resource.split('/').next().unwrap_or_default();
            write.user.starts_with(&prefix)
                && write.code < 300
                && write.received <= until
                && ["pods", "resourceclaims", "gpunodes", "resourceslices", "partitionpolicies", "events"]
                    .contains(&resource)
        })
        .collect();
    of_kerf.sort_by_key(|write| write.received);
    let mut pod_of_claim: HashMap<String, String> = HashMap::new();
    of_kerf
        .into_iter()
        .map(|write| {
            let mut body = write.body.clone().with_context(|| format!("no body of {}", write.uri))?;
            let resource = write.resource.split('/').next().unwrap_or_default();
            let body_name = body["metadata"]["name"].as_str().unwrap_or_default();
            let name = if write.name.is_empty() { body_name.to_owned() } else { write.name.clone() };
            if resource == "resourceclaims"
                && let Some(owner) = body["metadata"]["ownerReferences"][0]["name"].as_str()
            {
                pod_of_claim.insert(name.clone(), owner.to_owned());
            }
            let pod = match resource {
                "pods" => Some(&name),
                "resourceclaims" => pod_of_claim.get(&name),
                _ => None,
            };
            let object = id(resource, &write.namespace, &name);
            let chain = pod.map_or_else(|| object.clone(), |pod| id("pods", &write.namespace, pod));
            let (method, content_type) = match (write.verb.as_str(), &body, write.resource.as_str()) {
                ("create", ..) => (http::Method::POST, "application/json"),
                ("update", ..) => (http::Method::PUT, "application/json"),
                ("delete", ..) => (http::Method::DELETE, "application/json"),
                // The log does not say which kind of patch it was.
                (_, Value::Array(_), _) => (http::Method::PATCH, "application/json-patch+json"),
                (_, _, "pods/status") => (http::Method::PATCH, "application/strategic-merge-patch+json"),
                _ => (http::Method::PATCH, "application/merge-patch+json"),
            };
            if let Some(metadata) = body.pointer_mut("/metadata").and_then(Value::as_object_mut)
                && write.verb != "create"
            {
                for (field, stand_in) in [("resourceVersion", VERSION), ("uid", UID)] {
                    if let Some(value) = metadata.get_mut(field) {
                        *value = json!(stand_in);
                    }
                }
            }
            let node = match write.user.strip_prefix(&prefix) {
                Some("node-daemon") => Some(node_of(write, &body)?),
                _ => None,
            };
            let body = translated(body, uids).to_string();
            Ok(Request { node, method, uri: write.uri.clone(), content_type, body, object, chain })
        })
        .collect()
}

/// A daemon writes its own node's objects.
fn node_of(write: &Write, body: &Value) -> Result<String> {
    let of_slice = body["spec"]["nodeName"].as_str();
    Ok(of_slice.map_or_else(|| write.name.clone(), str::to_owned))
}

struct Replay {
    clients: HashMap<Option<String>, Client>,
    versions: Mutex<HashMap<String, (String, String)>>,
    /// The requests of each chain that are to come.
    chains: Mutex<HashMap<String, VecDeque<(usize, Request)>>>,
    /// Number and chain of the next request of each chain that none is under way of.
    ready: Mutex<BinaryHeap<Reverse<(usize, String)>>>,
    left: AtomicUsize,
    more: Notify,
}

/// What an answer tells.
#[derive(Deserialize)]
struct Answer {
    metadata: Metadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    resource_version: String,
}

impl Replay {
    fn new(
        requests: Vec<Request>,
        clients: HashMap<Option<String>, Client>,
        versions: HashMap<String, (String, String)>,
    ) -> Arc<Self> {
        let left = AtomicUsize::new(requests.len());
        let mut chains: HashMap<String, VecDeque<(usize, Request)>> = HashMap::new();
        for (number, request) in requests.into_iter().enumerate() {
            chains.entry(request.chain.clone()).or_default().push_back((number, request));
        }
        let first = |(chain, requests): (&String, &VecDeque<(usize, Request)>)| {
            requests.front().map(|(number, _)| Reverse((*number, chain.clone())))
        };
        let ready = chains.iter().filter_map(first).collect();
        Arc::new(Self {
            clients,
            versions: Mutex::new(versions),
            chains: Mutex::new(chains),
            ready: Mutex::new(ready),
            left,
            more: Notify::new(),
        })
    }

    /// Returns how many were refused.
    async fn run(self: &Arc<Self>, at_once: usize) -> usize {
        let refused = Arc::new(AtomicUsize::new(0));
        let workers = (0..at_once).map(|_| {
            let (replay, refused) = (self.clone(), refused.clone());
            tokio::spawn(async move { replay.work(&refused).await })
        });
        futures::future::join_all(workers).await;
        refused.load(Ordering::Relaxed)
    }

    async fn work(&self, refused: &AtomicUsize) {
        loop {
            let more = self.more.notified();
            let next = lock(&self.ready).pop();
            let Some(Reverse((_, chain))) = next else {
                if self.left.load(Ordering::SeqCst) == 0 {
                    self.more.notify_waiters();
                    return;
                }
                // Others may end without a successor: look again now and then.
                let _ = tokio::time::timeout(Duration::from_millis(5), more).await;
                continue;
            };
            let request = lock(&self.chains).get_mut(&chain).and_then(VecDeque::pop_front);
            if let Some((_, request)) = request {
                if let Err(error) = self.send(&request).await
                    && refused.fetch_add(1, Ordering::Relaxed) < 5
                {
                    eprintln!("floor: {} {}: {error:#}", request.method, request.uri);
                }
                self.left.fetch_sub(1, Ordering::SeqCst);
            }
            let following =
                lock(&self.chains).get(&chain).and_then(|rest| rest.front().map(|(number, _)| *number));
            if let Some(number) = following {
                lock(&self.ready).push(Reverse((number, chain)));
                self.more.notify_one();
            }
        }
    }

    async fn send(&self, request: &Request) -> Result<()> {
        let (uid, version) = lock(&self.versions).get(&request.object).cloned().unwrap_or_default();
        let body = request.body.replacen(VERSION, &version, 1).replacen(UID, &uid, 1);
        let client = self.clients.get(&request.node).context("no client for it")?;
        let request_ = http::Request::builder()
            .method(request.method.clone())
            .uri(&request.uri)
            .header(http::header::CONTENT_TYPE, request.content_type)
            .body(body.into_bytes())?;
        let answer: Answer = client.request(request_).await?;
        let Metadata { uid, resource_version } = answer.metadata;
        lock(&self.versions).insert(request.object.clone(), (uid, resource_version));
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
