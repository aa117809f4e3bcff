//! One cluster for all tests of a program: they run side by side, each in a namespace of its own.

use std::panic::resume_unwind;
use std::sync::{LazyLock, OnceLock};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams};
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

use crate::cluster::{Cluster, ClusterOptions};

/// The runtime of all tests of this program. A client belongs to the runtime that it was made in, so the shared cluster
/// cannot live in that of a single test.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => panic!("failed to start the tests' runtime: {error}"),
    });
    &RUNTIME
}

/// Runs a test to its end. An error fails it; the panic hook keeps the logs of the clusters.
///
/// # Panics
/// The test failed.
pub fn run(test: impl Future<Output = Result<()>> + Send + 'static) {
    match runtime().block_on(runtime().spawn(test)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => panic!("{error:#}"),
        Err(ended) if ended.is_panic() => resume_unwind(ended.into_panic()),
        Err(ended) => panic!("the test was cancelled: {ended}"),
    }
}

/// A shared cluster, started by the first test that asks for it and ended by the end of the program. A program may have
/// several, as statics, for tests that need differing options.
#[derive(Debug)]
pub struct Shared {
    options: fn() -> ClusterOptions,
    cluster: OnceCell<Cluster>,
    // What went wrong with the first start; it would go wrong again, minutes later.
    failed: OnceLock<String>,
}

impl Shared {
    pub const fn new(options: fn() -> ClusterOptions) -> Self {
        Self { options, cluster: OnceCell::const_new(), failed: OnceLock::new() }
    }

    /// The cluster.
    ///
    /// # Errors
    /// It did not start, now or when it was first asked for.
    pub async fn get(&'static self) -> Result<&'static Cluster> {
        self.cluster
            .get_or_try_init(|| async {
                if let Some(error) = self.failed.get() {
                    anyhow::bail!("the shared cluster did not start: {error}");
                }
                Cluster::start((self.options)()).await.inspect_err(|error| {
                    let _ = self.failed.set(format!("{error:#}"));
                })
            })
            .await
    }

    /// Runs a test with the cluster and a fresh namespace, which is deleted when the test has passed. An error fails the
    /// test, with the logs of the cluster kept.
    pub fn test<F, Fut>(&'static self, name: &str, test: F)
    where
        F: FnOnce(&'static Cluster, String) -> Fut + Send + 'static,
        Fut: Future<Output = Result<()>> + Send,
    {
        let name = name.to_owned();
        run(async move {
            let cluster = self.get().await?;
            let namespaces: Api<Namespace> = Api::all(cluster.client());
            let metadata = ObjectMeta { generate_name: Some(format!("{name}-")), ..ObjectMeta::default() };
            let namespace = Namespace { metadata, ..Namespace::default() };
            let created = namespaces.create(&PostParams::default(), &namespace).await;
            let namespace = created.context("failed to create the test's namespace")?.metadata.name;
            let namespace = namespace.context("the API server made no name")?;
            test(cluster, namespace.clone()).await?;
            namespaces
                .delete(&namespace, &DeleteParams::default())
                .await
                .context("failed to delete the namespace")?;
            anyhow::Ok(())
        });
    }
}
