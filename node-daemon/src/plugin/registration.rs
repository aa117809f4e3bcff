//! Tells kubelet which driver this is and where its services are.

use std::path::PathBuf;

use kerf_crds::names::DRIVER;
use tonic::{Request, Response, Status};

use super::proto::registration::registration_server::Registration;
use super::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use crate::node::{Kubelet, NodeState};

/// Kind of plugin, as kubelet's registration knows it.
const TYPE: &str = "DRAPlugin";

/// Services at the endpoint, in kubelet's own names.
const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1.DRAResourceHealth"];

/// Answers kubelet on the registration socket.
#[derive(Clone, Debug)]
pub struct RegistrationService {
    pub state: NodeState,
    /// The service socket.
    pub endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: TYPE.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = status.into_inner();
        self.state.kubelet.send_replace(if status.plugin_registered {
            tracing::info!("registered with kubelet");
            Kubelet::Registered
        } else {
            tracing::error!(
                error = status.error,
                "kubelet refused the registration; pods with claims do not start here"
            );
            Kubelet::Refused(status.error)
        });
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
