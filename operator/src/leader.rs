//! Leader election with a Lease: only its holder writes decisions.
//!
//! As in client-go: a lease has expired when its record has not changed for its duration by *our* monotonic clock, so
//! clocks of different machines are never compared. A holder that cannot renew stops writing before others may start.
//! Two writers at once would still be harmless (every commit carries a precondition), only wasteful.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};

/// How long a lease is good after its last renewal.
const DURATION: Duration = Duration::from_secs(15);
/// The holder stops writing when it could not renew for this long; less than [`DURATION`], which others wait.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Pause between two tries to acquire or renew.
const RETRY: Duration = Duration::from_secs(2);

/// Whether this process leads; cheap to clone and to ask.
#[derive(Clone, Debug, Default)]
pub struct Leadership {
    until: Arc<Mutex<Option<Instant>>>,
}

impl Leadership {
    /// Asked before every write.
    pub fn holds(&self) -> bool {
        self.until
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .is_some_and(|until| Instant::now() < until)
    }

    fn set(&self, until: Option<Instant>) {
        *self.until.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = until;
    }

    /// Leads without a lease, for processes that are alone by construction.
    pub fn always() -> Self {
        let leadership = Self::default();
        leadership.set(Some(Instant::now() + Duration::from_secs(u32::MAX.into())));
        leadership
    }
}

/// The election.
#[derive(Debug)]
pub struct Election {
    leases: Api<Lease>,
    name: String,
    identity: String,
    leadership: Leadership,
    /// The record as last seen, and since when it has been like that.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    /// An election for the lease `namespace/name`; `identity` must be this process's alone.
    pub fn new(client: &Client, namespace: &str, name: &str, identity: String) -> Self {
        Self {
            leases: Api::namespaced(client.clone(), namespace),
            name: name.to_owned(),
            identity,
            leadership: Leadership::default(),
            seen: None,
        }
    }

    /// What this election says.
    pub fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Acquires and renews until `stop` resolves, then gives the lease back. `changed` is called when leading begins.
    pub async fn run(mut self, stop: impl Future<Output = ()>, changed: impl Fn()) {
        let mut stop = std::pin::pin!(stop);
        let mut led = false;
        loop {
            let asked = Instant::now();
            match tokio::time::timeout(RENEW_DEADLINE / 2, self.acquire_or_renew()).await {
                Ok(Ok(true)) => {
                    self.leadership.set(Some(asked + RENEW_DEADLINE));
                    if !led {
                        tracing::info!(lease = self.name, identity = self.identity, "leading");
                        changed();
                    }
                    led = true;
                }
                Ok(Ok(false)) => {
                    if led {
                        tracing::warn!(lease = self.name, "lost the lease");
                    }
                    self.leadership.set(None);
                    led = false;
                }
                // Unknown: what was promised to us lasts until its deadline.
                Ok(Err(error)) => tracing::warn!(lease = self.name, %error, "cannot renew the lease"),
                Err(_) => tracing::warn!(lease = self.name, "the API server does not answer"),
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = &mut stop => break,
            }
        }
        self.leadership.set(None);
        if led && let Err(error) = self.release().await {
            tracing::warn!(lease = self.name, %error, "cannot give the lease back; it expires by itself");
        }
    }

    /// Whether the lease is ours now.
    async fn acquire_or_renew(&mut self) -> kube::Result<bool> {
        let now = MicroTime(Timestamp::now());
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.record(now, None)),
            };
            return won(self.leases.create(&PostParams::default(), &lease).await);
        };
        let record = lease.spec.clone().unwrap_or_default();
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != record) {
            self.seen = Some((record.clone(), Instant::now()));
        }
        let holder = record.holder_identity.as_deref().unwrap_or_default();
        let duration = Duration::from_secs(
            record.lease_duration_seconds.and_then(|seconds| seconds.try_into().ok()).unwrap_or_default(),
        );
        let unchanged = self.seen.as_ref().map_or(Duration::ZERO, |(_, since)| since.elapsed());
        if !holder.is_empty() && holder != self.identity && unchanged < duration {
            return Ok(false);
        }
        lease.spec = Some(self.record(now, Some(&record)));
        won(self.leases.replace(&self.name, &PostParams::default(), &lease).await)
    }

    fn record(&self, now: MicroTime, old: Option<&LeaseSpec>) -> LeaseSpec {
        let ours = old.is_some_and(|old| old.holder_identity.as_deref() == Some(&self.identity));
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(DURATION.as_secs() as i32),
            acquire_time: if ours { old.and_then(|old| old.acquire_time.clone()) } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(
                old.map_or(0, |old| old.lease_transitions.unwrap_or_default() + i32::from(!ours)),
            ),
            ..LeaseSpec::default()
        }
    }

    async fn release(&self) -> kube::Result<()> {
        let mut lease = self.leases.get(&self.name).await?;
        if let Some(spec) = &mut lease.spec
            && spec.holder_identity.as_deref() == Some(&self.identity)
        {
            spec.holder_identity = None;
            won(self.leases.replace(&self.name, &PostParams::default(), &lease).await)?;
        }
        Ok(())
    }
}

/// A conflict means that another was faster.
fn won(answer: kube::Result<Lease>) -> kube::Result<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
