//! Reading a claim from the API server.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

/// Reads one claim, by namespace and name; `None` if there is none. A function, so that the plugin needs no client.
pub type ClaimReader =
    Arc<dyn Fn(String, String) -> BoxFuture<'static, Result<Option<ResourceClaim>, ReadError>> + Send + Sync>;

/// The claim could not be read now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReadError(pub String);

/// A request that hangs is given up, so that it can be tried again within the time that kubelet allows.
const TIME_LIMIT: Duration = Duration::from_secs(8);

/// Reads from the API server.
pub fn from_api(client: Client) -> ClaimReader {
    Arc::new(move |namespace, name| {
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), &namespace);
        Box::pin(async move {
            match tokio::time::timeout(TIME_LIMIT, claims.get_opt(&name)).await {
                Ok(Ok(claim)) => Ok(claim),
                Ok(Err(error)) => Err(ReadError(error.to_string())),
                Err(_) => Err(ReadError(format!("no answer within {} s", TIME_LIMIT.as_secs()))),
            }
        })
    })
}
