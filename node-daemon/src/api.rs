//! This node's GpuNode: watched, and made if it is missing.

use std::pin::pin;
use std::sync::Arc;

use anyhow::Context as _;
use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kerf_crds::{GpuNode, GpuNodeSpec};
use kube::api::PostParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};

use crate::answer::{LIMIT, within};
use crate::backoff::WatchBackoff;
use crate::node::{NodeState, SeenSpec};
use crate::ours::Ours;

/// Follows the GpuNode. While the API server is away the last spec stays in force; if the object is deleted, there is
/// no spec, nothing is changed, and an empty one is made in its place.
///
/// `recover` is called with what the API server has, before anything is changed or reported; until it succeeds, there
/// is no spec.
pub async fn follow(
    client: Client,
    state: NodeState,
    ours: Ours,
    recover: impl Fn(&GpuNode) -> std::io::Result<()>,
) -> anyhow::Result<()> {
    let nodes: Api<GpuNode> = Api::all(client);
    let own = watcher::Config::default().fields(&format!("metadata.name={}", state.node_name));
    let mut events = pin!(watcher(nodes.clone(), own).backoff(WatchBackoff::default()));
    let mut seen = false;
    let mut away = false;
    while let Some(event) = events.next().await {
        // Init comes before each try.
        if away != event.is_err() && !matches!(event, Ok(Event::Init)) {
            away = event.is_err();
            match &event {
                Ok(_) => tracing::info!("the API server is back"),
                Err(error) => {
                    tracing::warn!("the API server cannot be read, the last spec stays in force: {error}");
                }
            }
        }
        match event {
            Ok(Event::Init) => seen = false,
            Ok(Event::Apply(node) | Event::InitApply(node)) => {
                seen = true;
                ours.recover(Some(&node)).context("the checkpoint of instances cannot be written")?;
                if state.seen_spec().is_none() {
                    recover(&node).context("the records of prepared claims cannot be written")?;
                }
                take(&state, node);
            }
            Ok(Event::InitDone) if seen => {}
            Ok(Event::InitDone | Event::Delete(_)) => {
                state.spec.send_replace(None);
                ours.recover(None).context("the checkpoint of instances cannot be written")?;
                create(&nodes, &state).await?;
            }
            // Tried again by the stream, with back-off.
            Err(_) => {}
        }
    }
    anyhow::bail!("the watch of the GpuNode ended")
}

fn take(state: &NodeState, node: GpuNode) {
    let new = SeenSpec {
        uid: node.metadata.uid.unwrap_or_default(),
        generation: node.metadata.generation.unwrap_or_default(),
        spec: node.spec,
    };
    // A write of the status alone is no news.
    state.spec.send_if_modified(|old| {
        let changed = old.as_deref() != Some(&new);
        if changed {
            *old = Some(Arc::new(new));
        }
        changed
    });
}

/// Makes an empty GpuNode, owned by the Node.
async fn create(nodes: &Api<GpuNode>, state: &NodeState) -> anyhow::Result<()> {
    let mut uids = state.node_uid.subscribe();
    let uid = uids.wait_for(Option::is_some).await?.clone();
    let mut node = GpuNode::new(&state.node_name, GpuNodeSpec::default());
    node.metadata.owner_references = uid.map(|uid| {
        vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: state.node_name.clone(),
            uid,
            ..OwnerReference::default()
        }]
    });
    match within(LIMIT, nodes.create(&PostParams::default(), &node)).await {
        Ok(_) => Ok(()),
        // Somebody else was faster; the watch shows it.
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(anyhow::Error::new(error).context("failed to create the GpuNode")),
    }
}
