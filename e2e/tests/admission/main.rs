//! What the API server admits: policies, claims, pods, and the writes of Kerf's own parts. Everything is asked of a real
//! API server with the shipped manifests; there are no nodes but Node objects, since nothing has to run.

mod accounts;
mod certificates;
mod claims;
mod explain;
mod gangs;
mod manifests;
mod pods;
mod policies;

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::GpuNode;
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE};
use kerf_e2e::shared::run;
use kerf_e2e::{Seen, eventually};
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

static KERF: OnceCell<Kerf> = OnceCell::const_new();

/// Runs a test with the cluster that all tests here share.
fn test<F, Fut>(test: F)
where
    F: FnOnce(&'static Kerf) -> Fut + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    run(async move { test(KERF.get_or_try_init(start).await?).await });
}

/// Starts Kerf, and waits until the API server acts on its admission policies: it does a moment after they are there.
async fn start() -> Result<Kerf> {
    let kerf = Kerf::start(KerfOptions::nodes(&[])).await?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let claim: ResourceClaim =
        serde_json::from_value(claims::claim("any.example", &json!([{ "operator": "Exists" }])))?;
    let claims: Api<ResourceClaim> = Api::namespaced(kerf.client(), "default");
    let gpu_nodes: Api<GpuNode> = Api::all(accounts::daemon(&kerf, None).await?);
    let gpu_node = GpuNode::new("probe", Default::default());
    eventually(PATIENCE, "the admission policies in force", || async {
        let claim = claims.create(&dry_run, &claim).await.map(|_| "a claim");
        let node = gpu_nodes.create(&dry_run, &gpu_node).await.map(|_| "a GpuNode");
        Ok(match claim.or(node) {
            Ok(admitted) => Seen::not_yet(format!("{admitted} was admitted")),
            Err(_) => Seen::Yes(()),
        })
    })
    .await?;
    Ok(kerf)
}

/// Has kubectl do something with a manifest: `kubectl <args> -f <manifest>`. Returns its output.
async fn kubectl(kerf: &Kerf, args: &[&str], manifest: &Value) -> Result<String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let file = kerf.cluster.dir().join(format!("admission-{count}.json"));
    std::fs::write(&file, manifest.to_string()).context("failed to write a manifest")?;
    let file = file.display().to_string();
    kerf.cluster.kubectl(&[args, &["-f", &file]].concat()).await
}

/// As [`kubectl`], for what has to be refused. Returns what kubectl says.
async fn refused(kerf: &Kerf, args: &[&str], manifest: &Value) -> Result<String> {
    match kubectl(kerf, args, manifest).await {
        Ok(output) => bail!("{manifest} was not refused: {output}"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// Checks that a text has all parts.
fn has_all(text: &str, parts: &[&str], what: &dyn std::fmt::Debug) -> Result<()> {
    for part in parts {
        if !text.contains(part) {
            bail!("no '{part}' in what {what:?} was answered with:\n{text}");
        }
    }
    Ok(())
}
