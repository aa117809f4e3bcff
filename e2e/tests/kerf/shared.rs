//! The cluster with Kerf that most tests share. Each test has nodes of its own, so that what one does to its GPUs is
//! nothing to the others; the operator is everybody's.

use anyhow::{Context as _, Result};
use kerf_e2e::kerf::{Kerf, KerfOptions};
use kerf_e2e::shared::run;
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
    run(async move {
        let kerf = KERF.get_or_try_init(|| Kerf::start(KerfOptions::nodes(NODES))).await?;
        let namespace = kerf.namespace(name).await?;
        test(kerf, namespace.clone()).await?;
        delete_namespace(kerf, &namespace).await
    });
}

async fn delete_namespace(kerf: &Kerf, namespace: &str) -> Result<()> {
    let api: kube::Api<k8s_openapi::api::core::v1::Namespace> = kube::Api::all(kerf.client());
    api.delete(namespace, &Default::default()).await.context("failed to delete the namespace")?;
    kerf.wait_no_leak(namespace).await
}
