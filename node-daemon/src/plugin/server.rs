//! The plugin as a whole.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kerf_crds::names::DRIVER;
use tokio::sync::watch;
use tonic::transport::Server;

use super::checkpoint::Checkpoint;
use super::health::HealthService;
use super::limits::PodLimits;
use super::prepare::{ClaimLocks, PATIENCE, Preparer};
use super::proto::dra::dra_plugin_server::DraPluginServer;
use super::proto::health::dra_resource_health_server::DraResourceHealthServer;
use super::proto::registration::registration_server::RegistrationServer;
use super::reader::ClaimReader;
use super::reconcile::tell;
use super::registration::RegistrationService;
use super::service::DraService;
use super::socket::serve;
use crate::cdi::{CdiStore, DriverFiles, Toolkit};
use crate::config::Config;
use crate::node::NodeState;

/// Name of the registration socket; kubelet takes any.
///
/// The `@` is needed: kubelet's gRPC client sends the socket's whole path, percent-encoded, as the request's authority,
/// and the HTTP library below tonic refuses percent signs in an authority anywhere but in front of an `@`. (The service
/// socket is dialled by `unix:`, for which the authority is `localhost`.)
pub(super) const REGISTRATION_SOCKET: &str = "kerf@gpu.kerf.dev-reg.sock";

/// kubelet's DRA plugin of this node.
pub struct Plugin {
    preparer: Preparer,
    patience: Duration,
    service_socket: PathBuf,
    registration_socket: PathBuf,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin").field("service_socket", &self.service_socket).finish_non_exhaustive()
    }
}

impl Plugin {
    /// `checkpoint` is the one that `state`'s prepared claims were recovered from.
    pub fn new(
        config: &Config,
        state: NodeState,
        checkpoint: Checkpoint,
        reader: ClaimReader,
        limits: PodLimits,
    ) -> Self {
        Self {
            preparer: Preparer {
                state,
                checkpoint,
                cdi: CdiStore::new(&config.cdi_dir),
                files: DriverFiles::from(config),
                toolkit: Arc::new(Toolkit::new(config)),
                reader,
                locks: ClaimLocks::default(),
                limits,
            },
            patience: PATIENCE,
            service_socket: config.kubelet_plugins_dir.join(DRIVER).join("dra.sock"),
            registration_socket: config.kubelet_registry_dir.join(REGISTRATION_SOCKET),
        }
    }

    /// How long Prepare waits for what may come right.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Serves kubelet and keeps the CDI specs true, until `stop` becomes true. An error means that a socket cannot be
    /// served; the sockets' files are left in place, so that kubelet keeps the registration over a restart.
    pub async fn run(self, stop: watch::Receiver<bool>) -> io::Result<()> {
        let upkeep = upkeep(self.preparer.clone());
        let service = DraService { preparer: self.preparer.clone(), patience: self.patience };
        let health = HealthService::new(self.preparer.state.clone());
        let registration =
            RegistrationService { state: self.preparer.state.clone(), endpoint: self.service_socket.clone() };
        let serving = serve(
            self.service_socket,
            || {
                Server::builder()
                    .add_service(DraPluginServer::new(service.clone()))
                    .add_service(DraResourceHealthServer::new(health.clone()))
            },
            stop.clone(),
        );
        let registering = async {
            // kubelet connects to the endpoint as soon as it finds the registration.
            tokio::task::yield_now().await;
            let router = || Server::builder().add_service(RegistrationServer::new(registration.clone()));
            serve(self.registration_socket, router, stop.clone()).await
        };
        tokio::select! {
            result = async { tokio::try_join!(serving, registering) } => result.map(|_| ()),
            () = async { upkeep.await; std::future::pending().await } => Ok(()),
        }
    }
}

/// What is to be done beside answering kubelet.
async fn upkeep(preparer: Preparer) {
    let mut spec = preparer.state.spec.subscribe();
    let orphans = async {
        // By then lost records have been restored; see `reconcile::restore`.
        if spec.wait_for(Option::is_some).await.is_ok() {
            tell(preparer.remove_orphans(), "cannot remove CDI specs of claims that are not prepared");
        }
    };
    tokio::join!(orphans, preparer.keep_specs(), preparer.release_stale());
}

#[cfg(test)]
mod tests {
    use tonic::codegen::http::uri::Authority;

    use super::*;

    #[test]
    fn the_authority_that_kubelet_sends_is_one() {
        // As grpc-go 1.83 encodes the target of a connection that has no scheme.
        let sent = |name: &str| format!("%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2F{name}");
        assert!(sent(REGISTRATION_SOCKET).parse::<Authority>().is_ok());
        assert!(REGISTRATION_SOCKET.ends_with(&format!("{DRIVER}-reg.sock")));
        assert!(sent("gpu.kerf.dev-reg.sock").parse::<Authority>().is_err(), "the usual name will do now");
    }
}
