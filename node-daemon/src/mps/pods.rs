//! The pods of MPS servers: one for each carrier of shares, made from the PodTemplate `mps-server` in Kerf's
//! namespace, where administrators can see and change it. They are found again by their labels, whoever made them.
//!
//! A pod is owned by its Node: it goes when the Node does, and neither with the daemon nor with Kerf's objects; and a
//! drain takes it for one that is made again, as it is.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{EnvVar, Pod, PodTemplate, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kerf_crds::gpu_node::Placement;
use kerf_crds::names::{MPS_DEVICE, MPS_FORM, MPS_GPU, MPS_PLACEMENT, MPS_SERVER};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;

use super::{CarrierPaths, Protocol};
use crate::answer::{LIMIT, within};
use crate::backoff::WatchBackoff;
use crate::node::NodeState;
use crate::prepared::DeviceKey;

/// Label of every pod of an MPS server, by which admission knows them too.
const NAME_LABEL: &str = "app.kubernetes.io/name";

/// The API's limit on an object's name.
const MAX_NAME: usize = 253;

/// A server's pod that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerPod {
    pub name: String,
    pub uid: String,
    /// UUID of the GPU or MIG instance that it serves.
    pub device: String,
    /// What it was made for: see [`NewServer::form`].
    pub form: String,
    /// It is being deleted.
    pub going: bool,
    /// Why it will not run any more, or does not yet.
    pub trouble: Option<String>,
    /// It has ended for good, as an evicted pod has.
    pub ended: bool,
}

impl ServerPod {
    /// Whether its control daemon was made to be talked to like this.
    pub fn speaks(&self, protocol: Protocol) -> bool {
        self.form.starts_with(&protocol.to_string())
    }
}

/// A server's pod that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewServer {
    pub carrier: DeviceKey,
    /// The carrier's name.
    pub name: String,
    /// Its UUID.
    pub device: String,
    /// What cannot be changed without another pod, in words.
    pub form: String,
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
}

impl NewServer {
    /// With the limits of all clients, for protocol 2.
    pub fn new(carrier: DeviceKey, name: &str, device: &str, paths: &CarrierPaths, server: &Form) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut environment = vec![
            ("KERF_GPU", name.to_owned()),
            ("CUDA_VISIBLE_DEVICES", device.to_owned()),
            ("CUDA_MPS_PIPE_DIRECTORY", text(&paths.pipe())),
            ("CUDA_MPS_LOG_DIRECTORY", text(&paths.log())),
        ];
        let arguments: Vec<String> = match server {
            Form::V3 => ["-f", "-p", "3", "-m", "-a"]
                .map(str::to_owned)
                .into_iter()
                .chain([text(&paths.config())])
                .collect(),
            Form::V2(limits) => {
                environment.push(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={}", limits.memory_text())));
                environment.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", limits.percent.to_string()));
                ["-f", "-m"].map(str::to_owned).to_vec()
            }
        };
        let (name, device) = (name.to_owned(), device.to_owned());
        Self { carrier, name, device, form: server.to_string(), arguments, environment }
    }
}

/// What a control daemon is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One limit for all clients.
    V2(super::Limits),
    /// Limits in namespaces.
    V3,
}

impl Form {
    pub fn protocol(&self) -> Protocol {
        match self {
            Self::V2(_) => Protocol::V2,
            Self::V3 => Protocol::V3,
        }
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::V2(limits) => write!(f, "{}, {limits}", self.protocol()),
            Self::V3 => self.protocol().fmt(f),
        }
    }
}

/// Something to be done about a server's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    Create(NewServer),
    Delete(ServerPod),
}

/// Carries an order out; as good if it was already. A function, so that nobody but this module needs a client.
pub type Writer = Arc<dyn Fn(Order) -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync>;

/// The servers' pods of this node by carrier.
pub type Pods = BTreeMap<DeviceKey, ServerPod>;

/// What is known of the servers' pods, and the way to change them. Cheap to clone.
#[derive(Clone)]
pub struct ServerPods {
    /// `None` until they have been listed: nothing is decided before.
    pub seen: watch::Receiver<Option<Pods>>,
    pub write: Writer,
}

impl std::fmt::Debug for ServerPods {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerPods").field("seen", &self.seen).finish_non_exhaustive()
    }
}

/// Pods in the API server; [`follow`] keeps `seen` true.
pub fn in_api(
    client: &Client,
    namespace: &str,
    state: &NodeState,
) -> (ServerPods, watch::Sender<Option<Pods>>) {
    let (sender, seen) = watch::channel(None);
    let (client, namespace, state) = (client.clone(), namespace.to_owned(), state.clone());
    let write: Writer = Arc::new(move |order| {
        let (client, namespace, state) = (client.clone(), namespace.clone(), state.clone());
        Box::pin(async move {
            let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            match order {
                Order::Create(new) => create(&client, &pods, &namespace, &state, &new).await,
                Order::Delete(pod) => delete(&pods, &pod).await,
            }
        })
    });
    (ServerPods { seen, write }, sender)
}

async fn create(
    client: &Client,
    pods: &Api<Pod>,
    namespace: &str,
    state: &NodeState,
    new: &NewServer,
) -> anyhow::Result<()> {
    let templates: Api<PodTemplate> = Api::namespaced(client.clone(), namespace);
    let template = within(LIMIT, templates.get(MPS_SERVER))
        .await
        .with_context(|| format!("the PodTemplate {namespace}/{MPS_SERVER} cannot be read"))?;
    let uid = state.node_uid.borrow().clone().context("the Node has not been read yet")?;
    let pod = build(template.template.unwrap_or_default(), new, &state.node_name, uid)
        .with_context(|| format!("the PodTemplate {namespace}/{MPS_SERVER} will not do"))?;
    match within(LIMIT, pods.create(&PostParams::default(), &pod)).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        answer => answer.map(drop).context("the pod of the MPS server cannot be made"),
    }
}

async fn delete(pods: &Api<Pod>, pod: &ServerPod) -> anyhow::Result<()> {
    let only_it = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
    let parameters = DeleteParams { preconditions: Some(only_it), ..DeleteParams::default() };
    match within(LIMIT, pods.delete(&pod.name, &parameters)).await {
        // Gone, or another one.
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        answer => answer.map(drop).context("the pod of the MPS server cannot be deleted"),
    }
}

/// The pod that the template comes to.
fn build(template: PodTemplateSpec, new: &NewServer, node: &str, node_uid: String) -> anyhow::Result<Pod> {
    let mut spec = template.spec.context("it has no spec")?;
    let container = spec.containers.first_mut().context("it has no container")?;
    container.args = Some(new.arguments.clone());
    let environment = container.env.get_or_insert_default();
    for (name, value) in new.environment.iter().cloned() {
        let known = environment.iter().position(|variable| variable.name == name);
        match known {
            Some(index) => environment[index] = variable(name, value),
            // First, so that others can refer to it.
            None => environment.insert(0, variable(name, value)),
        }
    }
    spec.node_name = Some(node.to_owned());
    spec.restart_policy = Some("Always".to_owned());
    let metadata = template.metadata.unwrap_or_default();
    let mut labels = metadata.labels.unwrap_or_default();
    labels.insert(NAME_LABEL.to_owned(), label().to_owned());
    let mut annotations = metadata.annotations.unwrap_or_default();
    annotations.insert(MPS_GPU.to_owned(), new.carrier.gpu.clone());
    if let Some(Placement { start, size }) = new.carrier.placement {
        annotations.insert(MPS_PLACEMENT.to_owned(), format!("{start}:{size}"));
    }
    annotations.insert(MPS_DEVICE.to_owned(), new.device.clone());
    annotations.insert(MPS_FORM.to_owned(), new.form.clone());
    Ok(Pod {
        metadata: ObjectMeta {
            name: Some(name(node, &node_uid, &new.name)),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.to_owned(),
                uid: node_uid,
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    })
}

fn variable(name: &str, value: String) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value), value_from: None }
}

fn label() -> &'static str {
    "kerf-mps-server"
}

/// The same for the same carrier, so that there is one at most.
fn name(node: &str, node_uid: &str, carrier: &str) -> String {
    let name = format!("mps-{node}-{carrier}");
    if name.len() <= MAX_NAME { name } else { format!("mps-{node_uid}-{carrier}") }
}

/// Follows the node's servers' pods for as long as it is polled.
pub async fn follow(
    client: Client,
    namespace: String,
    node: String,
    seen: watch::Sender<Option<Pods>>,
) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let own = watcher::Config::default()
        .labels(&format!("{NAME_LABEL}={}", label()))
        .fields(&format!("spec.nodeName={node}"));
    let mut events = std::pin::pin!(watcher(pods, own).backoff(WatchBackoff::default()));
    let mut listing = Pods::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listing.clear(),
            Ok(Event::InitApply(pod)) => listing.extend(read(&pod)),
            Ok(Event::InitDone) => _ = seen.send_replace(Some(std::mem::take(&mut listing))),
            Ok(Event::Apply(pod)) => {
                let Some((carrier, pod)) = read(&pod) else { continue };
                seen.send_if_modified(|known| {
                    let known = known.get_or_insert_default();
                    let news = known.get(&carrier) != Some(&pod);
                    known.insert(carrier, pod);
                    news
                });
            }
            Ok(Event::Delete(pod)) => {
                let Some((carrier, pod)) = read(&pod) else { continue };
                seen.send_if_modified(|known| {
                    let same = |known: &ServerPod| known.uid == pod.uid;
                    let Some(known) = known else { return false };
                    known.get(&carrier).is_some_and(same) && known.remove(&carrier).is_some()
                });
            }
            // Tried again by the stream, with back-off; what was last seen stays.
            Err(error) => tracing::debug!("the watch on the MPS servers' pods was interrupted: {error}"),
        }
    }
    anyhow::bail!("the watch on the MPS servers' pods ended")
}

/// The carrier and its server's pod.
fn read(pod: &Pod) -> Option<(DeviceKey, ServerPod)> {
    let annotation = |name: &str| pod.metadata.annotations.as_ref()?.get(name).cloned();
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or_default();
    let ended = matches!(phase, "Failed" | "Succeeded");
    let of_pod = status.and_then(|status| status.message.clone().or_else(|| status.reason.clone()));
    let waiting = status.into_iter().flat_map(|status| status.container_statuses.iter().flatten()).find_map(
        |container| {
            let waiting = container.state.as_ref()?.waiting.as_ref()?;
            let words = [waiting.reason.clone(), waiting.message.clone()];
            Some(words.into_iter().flatten().collect::<Vec<_>>().join(": "))
        },
    );
    let gpu = annotation(MPS_GPU)?;
    let placement = match annotation(MPS_PLACEMENT) {
        None => None,
        Some(text) => Some(placement(&text)?),
    };
    Some((
        DeviceKey { placement, ..DeviceKey::gpu(&gpu) },
        ServerPod {
            device: annotation(MPS_DEVICE).unwrap_or_default(),
            name: pod.metadata.name.clone()?,
            uid: pod.metadata.uid.clone()?,
            form: annotation(MPS_FORM).unwrap_or_default(),
            going: pod.metadata.deletion_timestamp.is_some(),
            trouble: waiting.or(of_pod),
            ended,
        },
    ))
}

/// `start:size`.
fn placement(text: &str) -> Option<Placement> {
    let (start, size) = text.split_once(':')?;
    Some(Placement { start: start.parse().ok()?, size: size.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mps::{Limits, Paths};

    fn template() -> PodTemplateSpec {
        serde_json::from_value(serde_json::json!({
            "metadata": { "labels": { "team": "infra" } },
            "spec": { "containers": [{
                "name": "mps", "image": "i",
                "env": [{ "name": "CUDA_VISIBLE_DEVICES", "value": "0" }, { "name": "MINE", "value": "1" }],
            }] },
        }))
        .unwrap()
    }

    fn made(form: &Form) -> Pod {
        made_for(DeviceKey::gpu("GPU-1"), "gpu-1", "GPU-1", form)
    }

    fn made_for(carrier: DeviceKey, name: &str, device: &str, form: &Form) -> Pod {
        let new = NewServer::new(carrier, name, device, &Paths::new("/run/kerf/mps").of(name), form);
        build(template(), &new, "n", "uid".into()).unwrap()
    }

    fn environment(pod: &Pod) -> BTreeMap<String, String> {
        let variables = pod.spec.as_ref().unwrap().containers[0].env.iter().flatten();
        variables.map(|variable| (variable.name.clone(), variable.value.clone().unwrap())).collect()
    }

    #[test]
    fn the_template_is_filled_in_and_read_back() {
        let mut pod = made(&Form::V3);
        let spec = pod.spec.as_ref().unwrap();
        let arguments = spec.containers[0].args.as_ref().unwrap().join(" ");
        assert_eq!(arguments, "-f -p 3 -m -a /run/kerf/mps/gpu-1/config.toml");
        assert_eq!(spec.node_name.as_deref(), Some("n"));
        let environment = environment(&pod);
        assert_eq!(environment["CUDA_VISIBLE_DEVICES"], "GPU-1");
        assert_eq!(environment["CUDA_MPS_PIPE_DIRECTORY"], "/run/kerf/mps/gpu-1/pipe");
        assert_eq!(environment["MINE"], "1");
        assert!(!environment.contains_key("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
        let labels = pod.metadata.labels.as_ref().unwrap();
        assert_eq!((labels["team"].as_str(), labels[NAME_LABEL].as_str()), ("infra", "kerf-mps-server"));
        pod.metadata.uid = Some("u".into());
        let (carrier, found) = read(&pod).unwrap();
        assert_eq!((carrier, found.form.as_str()), (DeviceKey::gpu("GPU-1"), "protocol 3"));
        assert_eq!((found.name.as_str(), found.device.as_str()), ("mps-n-gpu-1", "GPU-1"));
    }

    #[test]
    fn the_pod_of_an_instance_sees_only_that_and_is_found_by_its_place() {
        let place = DeviceKey::instance("GPU-1", Placement { start: 4, size: 4 });
        let mut pod = made_for(place.clone(), "gpu-1-4-4", "MIG-7", &Form::V3);
        let environment = environment(&pod);
        assert_eq!(environment["CUDA_VISIBLE_DEVICES"], "MIG-7");
        assert_eq!(environment["CUDA_MPS_PIPE_DIRECTORY"], "/run/kerf/mps/gpu-1-4-4/pipe");
        assert_eq!(environment["KERF_GPU"], "gpu-1-4-4", "the template's name of the directory");
        pod.metadata.uid = Some("u".into());
        let (carrier, found) = read(&pod).unwrap();
        assert_eq!((carrier, found.device.as_str()), (place, "MIG-7"));
        pod.metadata.annotations.as_mut().unwrap().insert(MPS_PLACEMENT.into(), "four".into());
        assert_eq!(read(&pod), None, "not taken for the GPU's");
    }

    #[test]
    fn protocol_2_has_its_limits_in_the_environment() {
        let pod = made(&Form::V2(Limits { memory: 8 << 30, percent: 30 }));
        let environment = environment(&pod);
        assert_eq!(environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "0=8G");
        assert_eq!(environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "30");
        assert_eq!(pod.metadata.annotations.unwrap()[MPS_FORM], "protocol 2, 8G and 30 %");
    }

    #[test]
    fn a_template_without_a_container_is_named() {
        let new = NewServer::new(DeviceKey::gpu("G"), "g", "G", &Paths::new("/m").of("g"), &Form::V3);
        let empty = PodTemplateSpec { spec: Some(Default::default()), ..PodTemplateSpec::default() };
        assert!(build(empty, &new, "n", "u".into()).unwrap_err().to_string().contains("no container"));
    }
}
