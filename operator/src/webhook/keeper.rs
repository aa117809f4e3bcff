//! Keeps the webhook's certificate: in a Secret that all replicas share, in the server, and in the `caBundle` of both
//! webhook configurations.
//!
//! Level-triggered: each pass looks at everything and takes at most one step. Writes of the Secret carry a precondition,
//! so of two replicas that make a certificate at once one wins and the other takes what is there.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures::{StreamExt as _, stream::select_all};
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        core::v1::Secret,
    },
};
use kerf_crds::names::OPERATOR;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt as _, watcher::watch_object},
};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_rustls::rustls::ServerConfig;
use tracing::{info, warn};

use super::{
    WebhookConfig, WebhookError,
    certificates::{CertificateError, Material, Verdict, judge},
    server::CertificateReceiver,
};

/// How often to look when nothing changes: certificates end by themselves.
const PERIOD: Duration = Duration::from_secs(3600);
/// How long API servers may take to act on a changed `caBundle`. They watch the configurations; seconds are plenty.
const TRUSTED_AFTER: Duration = Duration::from_secs(30);
/// Pauses after failing API requests.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

type CertificateSender = watch::Sender<Option<Arc<ServerConfig>>>;

pub(super) fn certificate_channel() -> (CertificateSender, CertificateReceiver) {
    watch::channel(None)
}

/// Runs until no certificate can be made at all.
pub(super) async fn run(
    client: Client,
    config: WebhookConfig,
    certificate: CertificateSender,
) -> WebhookError {
    let mut keeper = Keeper {
        secrets: Api::namespaced(client.clone(), &config.namespace),
        mutating: Api::all(client.clone()),
        validating: Api::all(client),
        names: config.names(),
        config,
        certificate,
        serving: None,
        next_trusted_since: None,
    };
    let mut changes = keeper.changes();
    let mut pause = RETRY.0;
    loop {
        let next = match keeper.pass().await {
            Ok(next) => {
                pause = RETRY.0;
                next
            }
            Err(Failure::Certificate(error)) => return error.into(),
            Err(Failure::Api { what, source }) => {
                warn!(error = %source, "failed to {what}; trying again");
                pause = (pause * 2).min(RETRY.1);
                sleep(pause).await;
                continue;
            }
        };
        // The watches never end; an hour without a change is as good as one.
        let _ = timeout(next, changes.next()).await;
    }
}

enum Failure {
    Certificate(CertificateError),
    Api { what: &'static str, source: kube::Error },
}

impl From<CertificateError> for Failure {
    fn from(error: CertificateError) -> Self {
        Self::Certificate(error)
    }
}

fn failed_to(what: &'static str) -> impl Fn(kube::Error) -> Failure {
    move |source| Failure::Api { what, source }
}

struct Keeper {
    secrets: Api<Secret>,
    mutating: Api<MutatingWebhookConfiguration>,
    validating: Api<ValidatingWebhookConfiguration>,
    names: Vec<String>,
    config: WebhookConfig,
    certificate: CertificateSender,
    /// What the server shows.
    serving: Option<Material>,
    /// Since when both configurations are known to trust the next certificate.
    next_trusted_since: Option<Instant>,
}

impl Keeper {
    /// One look at Secret and configurations, one step at most. Returns when to look again at the latest.
    async fn pass(&mut self) -> Result<Duration, Failure> {
        let secret = self.secrets.get_opt(&self.config.secret).await;
        let secret = secret.map_err(failed_to("read the webhook's Secret"))?;
        let material = Material::from_secret(secret.as_ref().and_then(|secret| secret.data.as_ref()));
        let verdict = judge(&material, &self.names, SystemTime::now())?;
        if let Verdict::Replace(next) | Verdict::Prepare(next) = verdict {
            if self.write(secret, &next).await? {
                info!(secret = %self.config.secret, "made a certificate for the webhook");
            }
            return Ok(Duration::ZERO);
        }
        self.serve(&material)?;
        let trusted = self.install(material.ca_bundle()).await?;
        let Verdict::Promote(next) = verdict else { return Ok(PERIOD) };
        if !trusted {
            self.next_trusted_since = None;
            return Ok(TRUSTED_AFTER);
        }
        let trusted_for = self.next_trusted_since.get_or_insert_with(Instant::now).elapsed();
        if trusted_for < TRUSTED_AFTER {
            return Ok(TRUSTED_AFTER - trusted_for);
        }
        self.next_trusted_since = None;
        if self.write(secret, &next).await? {
            info!(secret = %self.config.secret, "the webhook's next certificate is in use");
        }
        Ok(Duration::ZERO)
    }

    /// Puts the authorities into both configurations; `false`: not into all.
    async fn install(&self, bundle: &[u8]) -> Result<bool, Failure> {
        let mutating = |one: &MutatingWebhookConfiguration| {
            let hooks = one.webhooks.iter().flatten();
            hooks.map(|hook| (hook.name.clone(), hook.client_config.ca_bundle.clone())).collect()
        };
        let validating = |one: &ValidatingWebhookConfiguration| {
            let hooks = one.webhooks.iter().flatten();
            hooks.map(|hook| (hook.name.clone(), hook.client_config.ca_bundle.clone())).collect()
        };
        let name = &self.config.configuration;
        let mutating = install(&self.mutating, name, mutating, bundle).await?;
        Ok(install(&self.validating, name, validating, bundle).await? && mutating)
    }

    /// Writes the Secret as read, or creates it. `false`: somebody else was faster.
    async fn write(&self, secret: Option<Secret>, material: &Material) -> Result<bool, Failure> {
        let params = PostParams { field_manager: Some(OPERATOR.to_owned()), ..PostParams::default() };
        let data = Some(material.to_secret());
        let written = match secret {
            Some(secret) => {
                self.secrets.replace(&self.config.secret, &params, &Secret { data, ..secret }).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.config.secret.clone()), ..ObjectMeta::default() };
                let type_ = Some("kubernetes.io/tls".to_owned());
                self.secrets.create(&params, &Secret { metadata, data, type_, ..Secret::default() }).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(source) => Err(Failure::Api { what: "write the webhook's Secret", source }),
        }
    }

    fn serve(&mut self, material: &Material) -> Result<(), CertificateError> {
        if self.serving.as_ref() != Some(material) {
            self.certificate.send_replace(Some(Arc::new(material.server_config()?)));
            self.serving = Some(material.clone());
        }
        Ok(())
    }

    /// One item per change of the Secret or of a configuration.
    fn changes(&self) -> impl futures::Stream<Item = ()> + Send + Unpin + use<> {
        fn of<K>(api: &Api<K>, name: &str) -> futures::stream::BoxStream<'static, ()>
        where
            K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
        {
            watch_object(api.clone(), name)
                .default_backoff()
                .filter_map(async |change| change.ok().map(|_| ()))
                .boxed()
        }
        select_all([
            of(&self.secrets, &self.config.secret),
            of(&self.mutating, &self.config.configuration),
            of(&self.validating, &self.config.configuration),
        ])
    }
}

/// Puts the authorities into every webhook of a configuration. `false`: there is no such configuration.
async fn install<K>(
    api: &Api<K>,
    name: &str,
    webhooks: impl Fn(&K) -> Vec<(String, Option<ByteString>)>,
    bundle: &[u8],
) -> Result<bool, Failure>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let Some(configuration) = api.get_opt(name).await.map_err(failed_to("read a webhook configuration"))?
    else {
        warn!(kind = %K::kind(&()), name, "there is no such webhook configuration: pods are not sent to Kerf");
        return Ok(false);
    };
    let bundle = ByteString(bundle.to_vec());
    let stale: Vec<_> = webhooks(&configuration)
        .into_iter()
        .filter(|(_, installed)| installed.as_ref() != Some(&bundle))
        .map(|(name, _)| json!({ "name": name, "clientConfig": { "caBundle": bundle } }))
        .collect();
    if stale.is_empty() {
        return Ok(true);
    }
    // Strategic: the API server finds the webhooks by name, whatever else has changed in the list.
    let patch = json!({
        "metadata": { "resourceVersion": configuration.resource_version() },
        "webhooks": stale,
    });
    let params = PatchParams { field_manager: Some(OPERATOR.to_owned()), ..PatchParams::default() };
    match api.patch(name, &params, &Patch::Strategic(patch)).await {
        Ok(_) => {
            info!(kind = %K::kind(&()), name, "installed the webhook's authority");
            Ok(true)
        }
        // It changed under us, which the watch tells.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(source) => Err(Failure::Api { what: "install the webhook's authority", source }),
    }
}
