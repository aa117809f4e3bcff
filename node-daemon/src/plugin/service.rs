//! kubelet's calls: the claims of one pod together, each answered by itself.

use std::collections::HashMap;
use std::future::Future;
use std::time::{Duration, Instant};

use futures::future::join_all;
use kerf_crds::gpu_node::ClaimReference;
use tonic::{Request, Response, Status};

use super::authorize::claim_name;
use super::prepare::{Failure, Preparer};
use super::proto::dra::dra_plugin_server::DraPlugin;
use super::proto::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use crate::prepared::Prepared;

/// Answers kubelet on the service socket.
#[derive(Clone)]
pub struct DraService {
    pub preparer: Preparer,
    /// See [`super::prepare::PATIENCE`].
    pub patience: Duration,
}

#[tonic::async_trait]
impl DraPlugin for DraService {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let answers = request.into_inner().claims.into_iter().map(|claim| async {
            let claim = reference(claim);
            let (this, asked, began) = (self.clone(), claim.clone(), Instant::now());
            let result =
                to_the_end(async move { this.preparer.prepare(&asked, this.patience).await }).await;
            self.preparer.state.metrics.prepare(result.is_ok(), began.elapsed());
            let answer = match result {
                Ok(prepared) => {
                    tracing::info!(claim = %claim_name(&claim), uid = claim.uid, devices = %devices(&prepared), "prepared");
                    NodePrepareResourceResponse { devices: self.answer(prepared), error: String::new() }
                }
                Err(error) => {
                    tracing::warn!(claim = %claim_name(&claim), uid = claim.uid, "not prepared: {error}");
                    NodePrepareResourceResponse { devices: Vec::new(), error }
                }
            };
            (claim.uid, answer)
        });
        let claims: HashMap<_, _> = join_all(answers).await.into_iter().collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let answers = request.into_inner().claims.into_iter().map(|claim| async {
            let claim = reference(claim);
            let (this, uid) = (self.clone(), claim.uid.clone());
            let error = match to_the_end(async move { this.preparer.unprepare(&uid).await }).await {
                Ok(()) => {
                    tracing::info!(claim = %claim_name(&claim), uid = claim.uid, "unprepared");
                    String::new()
                }
                Err(error) => {
                    tracing::warn!(claim = %claim_name(&claim), uid = claim.uid, "not unprepared: {error}");
                    error
                }
            };
            (claim.uid, NodeUnprepareResourceResponse { error })
        });
        let claims: HashMap<_, _> = join_all(answers).await.into_iter().collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

impl DraService {
    fn answer(&self, prepared: Prepared) -> Vec<Device> {
        prepared
            .devices
            .into_iter()
            .map(|device| Device {
                // A record restored from GpuNode.status may not know its request: the device is then everybody's.
                request_names: Some(device.request)
                    .filter(|request| !request.is_empty())
                    .into_iter()
                    .collect(),
                pool_name: self.preparer.state.node_name.clone(),
                device_name: device.device,
                cdi_device_ids: device.cdi,
                share_id: device.share.map(|share| share.id),
            })
            .collect()
    }
}

/// Runs in a task of its own: a call that kubelet gives up on is dropped, and must not stop between two writes.
async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, String> {
    match tokio::spawn(work).await {
        Ok(result) => result.map_err(|failure| failure.to_string()),
        Err(error) => Err(format!("the call was interrupted: {error}")),
    }
}

fn reference(claim: Claim) -> ClaimReference {
    ClaimReference { namespace: claim.namespace, name: claim.name, uid: claim.uid }
}

fn devices(prepared: &Prepared) -> String {
    let devices: Vec<_> =
        prepared.devices.iter().map(|device| format!("{} ({})", device.device, device.uuid)).collect();
    devices.join(", ")
}
