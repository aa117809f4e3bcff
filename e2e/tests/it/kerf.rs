//! The cluster with Kerf that most tests share. Each test has nodes of its own, so that what one does to its GPUs is
//! nothing to the others; the operator is everybody's.

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Pod;
use kerf_e2e::kerf::{Kerf, KerfOptions};
use kerf_e2e::shared::runtime;
use serde_json::json;
use tokio::sync::OnceCell;

/// Name, model and number of GPUs of each node. The first word of a name is the test module that it belongs to.
const NODES: &[(&str, &str, usize)] = &[
    ("story-a100", "a100-80", 2),
    ("story-h100", "h100-80-sxm", 2),
    ("story-rtx", "rtxpro6000-server", 2),
    ("story-odd", "invented-5x10", 1),
    ("drain-a", "h100-80-sxm", 8),
    ("drain-b", "a100-80", 8),
    ("policy-a", "h100-80-sxm", 2),
    ("policy-b", "h100-80-sxm", 2),
    ("shapes-a", "h100-80-sxm", 4),
    ("unmanaged-a", "h100-80-sxm", 2),
    ("health-a", "h100-80-sxm", 2),
];

static KERF: OnceCell<Kerf> = OnceCell::const_new();

/// Runs a test with the shared cluster and a fresh namespace that Kerf handles, deleted when the test has passed.
pub(crate) fn test<F, Fut>(name: &'static str, test: F)
where
    F: FnOnce(&'static Kerf, String) -> Fut + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    let outcome = runtime().block_on(runtime().spawn(async move {
        let kerf = KERF.get_or_try_init(|| Kerf::start(KerfOptions::nodes(NODES))).await?;
        let namespace = kerf.namespace(name).await?;
        test(kerf, namespace.clone()).await?;
        delete_namespace(kerf, &namespace).await
    }));
    finish(outcome);
}

/// Runs a test with a cluster of its own.
pub(crate) fn alone<F, Fut>(options: KerfOptions, test: F)
where
    F: FnOnce(Kerf) -> Fut + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    finish(runtime().block_on(runtime().spawn(async move { test(Kerf::start(options).await?).await })));
}

fn finish(outcome: std::result::Result<Result<()>, tokio::task::JoinError>) {
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => panic!("{error:#}"),
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        Err(ended) => panic!("the test was cancelled: {ended}"),
    }
}

async fn delete_namespace(kerf: &Kerf, namespace: &str) -> Result<()> {
    let api: kube::Api<k8s_openapi::api::core::v1::Namespace> = kube::Api::all(kerf.client());
    api.delete(namespace, &Default::default()).await.context("failed to delete the namespace")?;
    kerf.wait_no_leak(namespace).await
}

/// Keeps a pod to one node.
pub(crate) fn on(node: &str, mut pod: Pod) -> Pod {
    if let Some(spec) = &mut pod.spec {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
    }
    pod
}

/// A policy's spec for one node, `mig` merged in.
pub(crate) fn for_node(node: &str, mig: serde_json::Value) -> serde_json::Value {
    json!({ "nodeSelector": { "matchLabels": { "kubernetes.io/hostname": node } }, "mig": mig })
}
