//! Admission webhook: turns what pods ask for into a claim that Kerf will allocate, and refuses policies that can never
//! work.
//!
//! ```text
//!  API server ──TLS──▶ server ──▶ review ──▶ pods      pod created      ──▶ patch | denial
//!                                       ├──▶ update    pod applied again ──▶ patch | denial
//!                                       └──▶ policies  PartitionPolicy   ──▶ warnings | denial
//!  keeper ──▶ Secret (certificate), caBundle of the two webhook configurations ──▶ server (reload)
//! ```
//!
//! What decides is pure; nothing is created here (`sideEffects: None`), so a dry run answers the same. Every replica of
//! the operator serves, the leader or not.

mod certificates;
mod denial;
mod keeper;
mod pods;
mod policies;
mod quantity;
mod requests;
mod review;
mod selector;
mod server;
mod update;

use std::{fmt, net::SocketAddr, sync::Arc};

use futures::FutureExt as _;
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::{Client, runtime::reflector::Store};
use thiserror::Error;

pub use denial::Denial;
pub use pods::{AdmissionContext, Mutation, mutate};
pub use policies::{Verdict, validate};
pub(crate) use review::context;
pub use update::restore;

/// Where the webhook listens, and the names of its objects in the API server.
#[derive(Clone, Debug)]
pub struct WebhookConfig {
    /// Address of the HTTPS server.
    pub listen: SocketAddr,
    /// Kerf's namespace: the certificate's Secret and the Service are here.
    pub namespace: String,
    /// Name of the Secret that holds the certificate.
    pub secret: String,
    /// Name of the Service through which the API server reaches the webhook.
    pub service: String,
    /// Further names and IP addresses at which an API server may reach it (`clientConfig.url`): loopback, for one that
    /// shares the operator's host.
    pub extra_names: Vec<String>,
    /// Name of both the Mutating- and the ValidatingWebhookConfiguration.
    pub configuration: String,
}

impl Default for WebhookConfig {
    /// As in the shipped manifests.
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 9443)),
            namespace: "kerf-system".to_owned(),
            secret: "kerf-webhook-certificate".to_owned(),
            service: "kerf-webhook".to_owned(),
            extra_names: ["localhost", "127.0.0.1"].map(str::to_owned).to_vec(),
            configuration: "kerf".to_owned(),
        }
    }
}

impl WebhookConfig {
    /// All names on the certificate.
    fn names(&self) -> Vec<String> {
        let service = format!("{}.{}.svc", self.service, self.namespace);
        std::iter::once(service).chain(self.extra_names.iter().cloned()).collect()
    }
}

/// What the webhook knows of the cluster.
pub trait View: Send + Sync + 'static {
    /// All policies, or `None` while they have not been read yet.
    fn policies(&self) -> Option<Vec<Arc<PartitionPolicy>>>;
    /// All nodes known so far.
    fn nodes(&self) -> Vec<Arc<GpuNode>>;
}

/// A [`View`] of kube-runtime's reflector stores.
#[derive(Clone)]
pub struct Stores {
    pub policies: Store<PartitionPolicy>,
    pub nodes: Store<GpuNode>,
}

impl fmt::Debug for Stores {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Stores")
    }
}

impl View for Stores {
    fn policies(&self) -> Option<Vec<Arc<PartitionPolicy>>> {
        self.policies.wait_until_ready().now_or_never()?.ok()?;
        Some(self.policies.state())
    }

    fn nodes(&self) -> Vec<Arc<GpuNode>> {
        self.nodes.state()
    }
}

/// Why the webhook ended.
#[derive(Debug, Error)]
pub enum WebhookError {
    #[error("failed to listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("failed to make the webhook's certificate: {0}")]
    Certificate(#[from] certificates::CertificateError),
    #[error("failed to serve admission requests: {0}")]
    Serve(std::io::Error),
}

/// Serves admission requests until `shutdown` resolves, and keeps certificate and `caBundle` in order meanwhile.
///
/// Listens at once, but answers no handshake before there is a certificate, for which the API server is asked again and
/// again.
///
/// # Errors
/// The address cannot be listened on, or no certificate can be made. Failing API requests are retried and logged.
pub async fn serve(
    client: Client,
    config: WebhookConfig,
    view: Arc<dyn View>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), WebhookError> {
    let listener = server::bind(config.listen).await?;
    let (certificate, follow) = keeper::certificate_channel();
    tokio::select! {
        served = server::run(listener, follow, view, shutdown) => served,
        failed = keeper::run(client, config, certificate) => Err(failed),
    }
}
