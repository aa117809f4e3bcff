//! One claim's Prepare and Unprepare.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::conditions::node_reason;
use kerf_crds::gpu_node::{ClaimReference, Reason};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::authorize::{Authorized, PrepareError, authorize, claim_name, confirm};
use super::checkpoint::{Checkpoint, is_uid};
use super::limits::{LimitError, PodLimits};
use super::reader::{ClaimReader, ReadError};
use crate::cdi::{
    CdiStore, ContainerEdits, DriverFiles, NodesError, Toolkit, ToolkitError, claim_spec, device_id,
};
use crate::inventory::Inventory;
use crate::node::NodeState;
use crate::prepared::{Prepared, PreparedDevice, Refused};

/// How long Prepare waits for what may come right. kubelet gives a call 45 s, and after an error it tries again only 60
/// to 85 s later; so waiting costs less than failing, up to just below its limit.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// The claim is read again this often while it is the claim that has to change: there is no watch on claims.
const CLAIM_REREAD: Duration = Duration::from_secs(2);

/// First pause after the API server failed to answer; doubled up to [`CLAIM_REREAD`].
const FIRST_RETRY: Duration = Duration::from_millis(100);

/// Why a claim is not prepared or not taken back.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Refused(Box<PrepareError>),
    #[error("cannot read claim {claim} from the API server: {source}")]
    Read { claim: String, source: ReadError },
    #[error("{0}")]
    Store(#[from] Refused),
    #[error("the device nodes cannot be given to a container: {0}")]
    Nodes(#[from] NodesError),
    #[error("the driver's libraries are not known: {0}")]
    Toolkit(#[from] ToolkitError),
    #[error("{0}")]
    Limit(#[from] LimitError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("'{0}' is not a UID: letters, digits and '-' only")]
    NotAUid(String),
}

impl From<PrepareError> for Failure {
    fn from(error: PrepareError) -> Self {
        Self::Refused(Box::new(error))
    }
}

impl Failure {
    fn may_pass(&self) -> bool {
        match self {
            Self::Refused(error) => error.may_pass(),
            // A device is condemned while it is destroyed, and held until its holder's Unprepare.
            Self::Store(Refused::Held { .. } | Refused::Condemned { .. }) => true,
            // The instance was destroyed and made again between the scan and now, or its files are on their way.
            Self::Nodes(_) | Self::Toolkit(_) | Self::Read { .. } | Self::Limit(_) => true,
            Self::Io(_) | Self::NotAUid(_) => false,
        }
    }

    /// Whether a change of the claim can make it right.
    fn may_pass_by_the_claim(&self) -> bool {
        use PrepareError as E;
        let Self::Refused(error) = self else { return false };
        matches!(
            **error,
            E::NotAllocated(_) | E::NotPlanned { .. } | E::OtherDevice { .. } | E::NotReserved(_)
        )
    }
}

/// Everything that Prepare works with.
#[derive(Clone)]
pub struct Preparer {
    pub state: NodeState,
    pub checkpoint: Checkpoint,
    pub cdi: CdiStore,
    pub files: DriverFiles,
    pub toolkit: Arc<Toolkit>,
    pub reader: ClaimReader,
    pub locks: ClaimLocks,
    pub limits: PodLimits,
}

impl Preparer {
    /// Makes a claim's devices ready, or waits for them, `patience` at most.
    pub async fn prepare(&self, asked: &ClaimReference, patience: Duration) -> Result<Prepared, Failure> {
        if !is_uid(&asked.uid) {
            return Err(Failure::NotAUid(asked.uid.clone()));
        }
        let _turn = self.locks.lock(&asked.uid).await;
        let deadline = Instant::now() + patience;
        // Subscribed before the first look, so that no change falls between look and wait.
        let mut spec = self.state.spec.subscribe();
        let mut inventory = self.state.inventory.subscribe();
        let mut prepared = self.state.prepared.subscribe();
        let mut claim = None;
        let mut waited = false;
        loop {
            spec.borrow_and_update();
            inventory.borrow_and_update();
            prepared.borrow_and_update();
            let failure = match self.attempt(asked, &mut claim, deadline).await {
                Ok(done) => return Ok(done),
                Err(failure) if failure.may_pass() && Instant::now() < deadline => failure,
                Err(failure) => return Err(failure),
            };
            if !waited {
                tracing::info!(claim = %claim_name(asked), uid = asked.uid, "Prepare waits: {failure}");
                // Whatever is missing may be there already and not be seen yet.
                self.state.request_scan();
                waited = true;
            }
            if matches!(failure, Failure::Nodes(_) | Failure::Limit(_)) {
                // The attempt itself recorded and forgot the claim: no news to wake up for.
                prepared.borrow_and_update();
            }
            let reread = Instant::now() + CLAIM_REREAD;
            tokio::select! {
                Ok(()) = spec.changed() => {}
                Ok(()) = inventory.changed() => {}
                Ok(()) = prepared.changed() => {}
                () = sleep_until(reread.min(deadline)) => {
                    if failure.may_pass_by_the_claim() {
                        claim = None;
                    }
                }
            }
        }
    }

    /// `claim` keeps what was read between attempts.
    async fn attempt(
        &self,
        asked: &ClaimReference,
        claim: &mut Option<ResourceClaim>,
        deadline: Instant,
    ) -> Result<Prepared, Failure> {
        if claim.is_none() && !self.state.prepared.snapshot().contains_key(&asked.uid) {
            self.state.latest().ok_or(PrepareError::NotRead("the node's GPUs"))?;
            self.state.seen_spec().ok_or(PrepareError::NotRead("its node's GpuNode"))?;
            *claim = Some(self.read(asked, deadline).await?);
        }
        let (_, inventory) = self.devices(asked, claim.as_ref())?;
        let common = timeout_at(deadline, self.libraries(&inventory.driver_version))
            .await
            .map_err(|_| PrepareError::NotRead("the list of the driver's files"))??;
        // Looked at again: between this and the record nothing waits, so no worker changes a device in between.
        let known = self.state.prepared.snapshot();
        let ((devices, pod), inventory) = self.devices(asked, claim.as_ref())?;
        let record = Prepared { claim: asked.clone(), pod, devices: with_cdi(&asked.uid, devices) };
        // In memory first: from here on nobody destroys the devices or gets them for another claim.
        self.state.prepared.record(record.clone())?;
        let snapshot = || self.state.prepared.snapshot();
        let done = match self.limits.enforce(&record, &inventory, snapshot).await {
            Ok(()) => self.write(record.clone(), common).await,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = done {
            // A claim that was not prepared before is not half prepared now.
            if !known.contains_key(&asked.uid) {
                self.forget(&asked.uid).await?;
            }
            return Err(error);
        }
        self.state.request_scan();
        Ok(record)
    }

    /// The devices that the claim may have by all that is known now, the pod that it is for where that matters, and the
    /// inventory that says so.
    fn devices(
        &self,
        asked: &ClaimReference,
        claim: Option<&ResourceClaim>,
    ) -> Result<(Authorized, Arc<Inventory>), Failure> {
        let inventory = self.state.latest().ok_or(PrepareError::NotRead("the node's GPUs"))?;
        let spec = self.state.seen_spec();
        let spec = spec.as_deref().map(|seen| &seen.spec);
        let known = self.state.prepared.snapshot();
        let node = &self.state.node_name;
        let authorized = match (known.get(&asked.uid), claim) {
            (Some(record), _) => (confirm(record, node, spec, &inventory)?, record.pod.clone()),
            (None, Some(claim)) => {
                let spec = spec.ok_or(PrepareError::NotRead("its node's GpuNode"))?;
                authorize(claim, asked, node, spec, &inventory, &known)?
            }
            (None, None) => return Err(PrepareError::NotRead("the claim").into()),
        };
        Ok((authorized, inventory))
    }

    /// What the toolkit says of the driver's files; whether it can is shown on the GpuNode.
    pub async fn libraries(&self, driver_version: &str) -> Result<Arc<ContainerEdits>, ToolkitError> {
        let answer = self.toolkit.common_edits(driver_version).await;
        let trouble = match &answer {
            Ok(Some(_)) => None,
            Ok(None) => Some(Reason {
                reason: node_reason::TOOLKIT_NOT_FOUND.into(),
                message: format!(
                    "nvidia-ctk is not installed: containers get device nodes, but neither the driver's libraries nor its \
                     programs. Install the NVIDIA Container Toolkit on the node, or name the program with --nvidia-ctk \
                     (looked for {})",
                    self.toolkit.places()
                ),
            }),
            Err(error) => {
                Some(Reason { reason: node_reason::TOOLKIT_FAILED.into(), message: error.to_string() })
            }
        };
        self.state.toolkit.send_if_modified(|known| {
            let news = known.as_ref() != Some(&trouble);
            if news {
                if let Some(Reason { reason, message }) = &trouble {
                    tracing::warn!(reason, "{message}");
                }
                *known = Some(trouble);
            }
            news
        });
        Ok(answer?.unwrap_or_default())
    }

    async fn read(&self, asked: &ClaimReference, deadline: Instant) -> Result<ResourceClaim, Failure> {
        let mut pause = FIRST_RETRY;
        loop {
            let answer = timeout_at(deadline, (self.reader)(asked.namespace.clone(), asked.name.clone()));
            let source = match answer.await {
                Ok(Ok(Some(claim))) => return Ok(claim),
                Ok(Ok(None)) => return Err(PrepareError::NotFound(claim_name(asked)).into()),
                Ok(Err(source)) => source,
                Err(_) => ReadError("no answer".to_owned()),
            };
            if Instant::now() + pause >= deadline {
                return Err(Failure::Read { claim: claim_name(asked), source });
            }
            tracing::warn!(claim = %claim_name(asked), "cannot read the claim, trying again: {source}");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(CLAIM_REREAD);
        }
    }

    /// The record, then the CDI spec, both on disk when it returns.
    async fn write(&self, record: Prepared, common: Arc<ContainerEdits>) -> Result<(), Failure> {
        let this = self.clone();
        blocking(move || {
            this.checkpoint.write(&record)?;
            // The newest scan: a device's files are looked up by what it has now.
            let inventory = this.state.latest().unwrap_or_default();
            let spec = claim_spec(&record, &inventory, &this.files, &common)?;
            this.cdi.write(&record.claim.uid, &spec)?;
            Ok(())
        })
        .await
    }

    /// Takes a claim back. A claim that is not prepared is as good.
    pub async fn unprepare(&self, claim_uid: &str) -> Result<(), Failure> {
        if !is_uid(claim_uid) {
            return Err(Failure::NotAUid(claim_uid.to_owned()));
        }
        let _turn = self.locks.lock(claim_uid).await;
        self.forget(claim_uid).await?;
        self.state.request_scan();
        Ok(())
    }

    /// Limits, CDI spec, record, memory: a crash in between leaves a record, and kubelet asks again.
    async fn forget(&self, claim_uid: &str) -> Result<(), Failure> {
        let (this, uid) = (self.clone(), claim_uid.to_owned());
        let record = self.state.prepared.snapshot().get(claim_uid).cloned();
        if let Some(record) = &record {
            // Before the record goes: after a crash it is done again.
            let others = || {
                let mut others = (*self.state.prepared.snapshot()).clone();
                others.remove(claim_uid);
                Arc::new(others)
            };
            self.limits.lift(record, others).await;
        }
        blocking(move || {
            this.cdi.remove(&uid)?;
            this.checkpoint.remove(&uid)?;
            this.state.prepared.remove(&uid);
            Ok(())
        })
        .await
    }

    /// Rewrites the CDI spec of a prepared claim from what is there now; `false` if its devices are not.
    pub async fn refresh(&self, claim_uid: &str) -> Result<bool, Failure> {
        let _turn = self.locks.lock(claim_uid).await;
        let (Some(inventory), known) = (self.state.latest(), self.state.prepared.snapshot()) else {
            return Ok(false);
        };
        let Some(record) = known.get(claim_uid) else { return Ok(false) };
        let spec = self.state.seen_spec();
        let spec = spec.as_deref().map(|seen| &seen.spec);
        let Ok(devices) = confirm(record, &self.state.node_name, spec, &inventory) else { return Ok(false) };
        let record = Prepared { claim: record.claim.clone(), pod: record.pod.clone(), devices };
        let common = self.libraries(&inventory.driver_version).await?;
        self.state.prepared.record(record.clone())?;
        let this = self.clone();
        blocking(move || {
            let spec = claim_spec(&record, &inventory, &this.files, &common)?;
            this.cdi.write(&record.claim.uid, &spec)?;
            Ok(true)
        })
        .await
    }
}

fn with_cdi(claim_uid: &str, mut devices: Vec<PreparedDevice>) -> Vec<PreparedDevice> {
    for device in &mut devices {
        device.cdi = vec![device_id(claim_uid, &device.device, device.key.share.as_deref())];
    }
    devices
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(io::Error::other(format!("a file operation was interrupted: {error}")).into()),
    }
}

/// One lock per claim: its Prepare and Unprepare never run at the same time, also when kubelet gave up on a call.
#[derive(Clone, Debug, Default)]
pub struct ClaimLocks(Arc<Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>>);

impl ClaimLocks {
    async fn lock(&self, claim_uid: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody holds or waits for a lock that only this map refers to.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(claim_uid.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }
}
