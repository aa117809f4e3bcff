//! The operator makes the webhook's certificate, and repairs whatever happens to it.

use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::Secret;
use kerf_e2e::kerf::{Kerf, NAMESPACE, PATIENCE};
use kerf_e2e::{Seen, eventually};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::test;

const SECRET: &str = "kerf-webhook-certificate";

/// The authorities in the Secret, once every webhook has them too.
async fn wait_installed(kerf: &Kerf, before: Option<&ByteString>) -> Result<ByteString> {
    let secrets: Api<Secret> = Api::namespaced(kerf.client(), NAMESPACE);
    let mutating: Api<MutatingWebhookConfiguration> = Api::all(kerf.client());
    let validating: Api<ValidatingWebhookConfiguration> = Api::all(kerf.client());
    eventually(PATIENCE, "the webhook's authority in Secret and configurations", || async {
        let Some(secret) = secrets.get_opt(SECRET).await? else { return Ok(Seen::not_yet("no Secret")) };
        let authority = secret.data.and_then(|data| data.get("ca.crt").cloned()).context("no ca.crt")?;
        if before == Some(&authority) {
            return Ok(Seen::not_yet("the old authority"));
        }
        let (mutating, validating) = (mutating.get("kerf").await?, validating.get("kerf").await?);
        let mutating = mutating.webhooks.into_iter().flatten().map(|hook| hook.client_config.ca_bundle);
        let validating = validating.webhooks.into_iter().flatten().map(|hook| hook.client_config.ca_bundle);
        let installed: Vec<_> = mutating.chain(validating).collect();
        let everywhere = installed.iter().all(|bundle| bundle.as_ref() == Some(&authority));
        Ok(if everywhere {
            Seen::Yes(authority)
        } else {
            Seen::NotYet(format!("{} webhooks", installed.len()))
        })
    })
    .await
}

#[test]
fn a_lost_bundle_and_a_lost_secret_come_back() {
    test(async |kerf| {
        let first = wait_installed(kerf, None).await?;

        let mutating: Api<MutatingWebhookConfiguration> = Api::all(kerf.client());
        let wiped = json!({ "webhooks": [{ "name": "applied-pods.kerf.dev", "clientConfig": { "caBundle": null } }] });
        mutating.patch("kerf", &PatchParams::default(), &Patch::Strategic(wiped)).await?;
        wait_installed(kerf, None).await?;

        let secrets: Api<Secret> = Api::namespaced(kerf.client(), NAMESPACE);
        secrets.delete(SECRET, &DeleteParams::default()).await?;
        wait_installed(kerf, Some(&first)).await?;
        // The server shows the new certificate, and the API server trusts it.
        let namespace = kerf.namespace("certificate").await?;
        let pod = kerf_e2e::kerf::gpu_pod("a", &[("nvidia.com/mig-1g.10gb", 1)]);
        eventually(Duration::from_secs(30), "admission with the new certificate", || async {
            Ok(match kerf.create_pod(&namespace, &pod).await {
                Ok(_) => Seen::Yes(()),
                Err(error) => Seen::NotYet(format!("{error:#}")),
            })
        })
        .await
    });
}
