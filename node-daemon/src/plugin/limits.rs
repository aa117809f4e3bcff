//! Limits on the memory of pods with shares, where the driver keeps them: in force on the pod's cgroup before any process
//! of the pod exists, since kubelet makes the cgroup first and starts nothing before Prepare has answered.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kerf_crds::gpu_node::Isolation;

use crate::carrier::Carrier;
use crate::cgroups;
use crate::hardware::{self, Code, Driver, MemoryLimits};
use crate::inventory::Inventory;
use crate::prepared::{DeviceKey, Prepared, PreparedClaims, PreparedDevice};
use crate::worker::blocking;

/// Why a limit is not in force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    #[error("pod {pod} has no cgroup below {root} (--cgroup-root), so its memory on {gpu} cannot be limited", root = .root.display())]
    NoCgroup { pod: String, root: PathBuf, gpu: String },
    #[error(
        "claim {claim} has a share of {gpu}, but it is not known which pod it is for, so its memory cannot be limited; the pod must be created anew"
    )]
    NoPod { claim: String, gpu: String },
    #[error("claim {claim} has a share of {gpu} whose memory {} is to limit, but there only {} does it", .wanted.word(), .there.word())]
    TooLittle { claim: String, gpu: String, wanted: Isolation, there: Isolation },
    #[error("memory of pod {pod} on {gpu} is not limited to {bytes} bytes: {why}")]
    Driver { pod: String, gpu: String, bytes: u64, why: String },
}

/// The way to limits. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PodLimits {
    driver: Driver,
    cgroup_root: Arc<Path>,
    /// One limit at a time: what is set is the sum of what was prepared last.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl PodLimits {
    pub fn new(driver: Driver, cgroup_root: &Path) -> Self {
        Self { driver, cgroup_root: Arc::from(cgroup_root), turn: Arc::default() }
    }

    /// Limits the claim's pod, on each GPU that limits memory, to the sum of its shares there. `prepared` tells what is
    /// prepared by then.
    pub async fn enforce(
        &self,
        record: &Prepared,
        inventory: &Inventory,
        prepared: impl Fn() -> Arc<PreparedClaims>,
    ) -> Result<(), LimitError> {
        can_be_limited(record, inventory)?;
        let Some(pod) = &record.pod else { return Ok(()) };
        let _turn = self.turn.lock().await;
        for (gpu, bytes) in limited(record, inventory, &prepared()) {
            let (driver, root, name, uid) =
                (self.driver.clone(), self.cgroup_root.clone(), pod.id(), pod.uid.clone());
            blocking(move || {
                let Some(cgroup) = cgroups::of_pod(&root, &uid) else {
                    return Err(LimitError::NoCgroup { pod: name, root: root.to_path_buf(), gpu });
                };
                let failed = |why: String| LimitError::Driver { pod: name, gpu: gpu.clone(), bytes, why };
                let library = match driver.session() {
                    Ok(library) => library,
                    Err(error) => return Err(failed(error.to_string())),
                };
                hardware::limit_memory(&library, &gpu, &cgroup, bytes)
                    .inspect_err(|failure| driver.note_failure(&library, failure))
                    .map_err(|failure| failed(format!("{failure} for {}", cgroup.display())))
            })
            .await?;
        }
        Ok(())
    }

    /// Limits the container of a process to a share of its pod, where the driver can do so below the pod's own limit.
    pub async fn limit_container(
        &self,
        record: &Prepared,
        device: &PreparedDevice,
        pid: u32,
    ) -> Result<(), LimitError> {
        let (Some(pod), Some(share)) = (&record.pod, &device.share) else { return Ok(()) };
        let _turn = self.turn.lock().await;
        let (driver, root, uid) = (self.driver.clone(), self.cgroup_root.clone(), pod.uid.clone());
        let (gpu, bytes) = (device.key.gpu.clone(), share.memory_bytes);
        let limited = blocking(move || {
            let of_pod = cgroups::of_pod(&root, &uid);
            let Some(cgroup) = of_pod.and_then(|top| cgroups::of_process(&top, pid)) else {
                return Err(format!("process {pid} is in no cgroup of the pod"));
            };
            let library = driver.session().map_err(|error| error.to_string())?;
            hardware::limit_container(&library, &gpu, &cgroup, bytes)
                .inspect_err(|failure| driver.note_failure(&library, failure))
                .map_err(|failure| format!("{failure} for {}", cgroup.display()))
        })
        .await;
        let gpu = device.key.gpu.clone();
        limited.map_err(|why| LimitError::Driver { pod: pod.id(), gpu, bytes, why })
    }

    /// Whether the driver still says what was set for the claim's pod; also if it says nothing at all. Never where it
    /// could not be set now.
    pub(crate) async fn holds(
        &self,
        record: &Prepared,
        inventory: &Inventory,
        prepared: &PreparedClaims,
    ) -> bool {
        if can_be_limited(record, inventory).is_err() {
            return false;
        }
        let Some(pod) = &record.pod else { return true };
        let _turn = self.turn.lock().await;
        for (gpu, bytes) in limited(record, inventory, prepared) {
            let (driver, root, uid) = (self.driver.clone(), self.cgroup_root.clone(), pod.uid.clone());
            let lost = blocking(move || {
                let (Some(cgroup), Ok(library)) = (cgroups::of_pod(&root, &uid), driver.session()) else {
                    return false;
                };
                match hardware::memory_limits(&library, &gpu, &cgroup) {
                    Ok(limits) => limits != MemoryLimits::at_most(bytes),
                    Err(failure) => matches!(failure.code, Code::NOT_FOUND | Code::NOT_SUPPORTED),
                }
            })
            .await;
            if lost {
                return false;
            }
        }
        true
    }

    /// Takes a claim's part of its pod's limits back; `prepared` does not have the claim any more. What cannot be taken
    /// back goes with the cgroup.
    pub async fn lift(&self, record: &Prepared, prepared: impl Fn() -> Arc<PreparedClaims>) {
        let Some(pod) = &record.pod else { return };
        let _turn = self.turn.lock().await;
        let left = shares_of(&prepared(), &pod.uid);
        // The driver's limits do not reach into instances.
        let of_gpus = record.devices.iter().filter(|device| device.share.is_some());
        let of_gpus = of_gpus.filter(|device| device.key.placement.is_none());
        for carrier in of_gpus.map(|device| device.key.carrier()) {
            let left = left.get(&carrier).copied();
            let gpu = carrier.gpu;
            let (driver, root, uid) = (self.driver.clone(), self.cgroup_root.clone(), pod.uid.clone());
            let name = pod.id();
            blocking(move || {
                let (Some(cgroup), Ok(library)) = (cgroups::of_pod(&root, &uid), driver.session()) else {
                    return;
                };
                let answer = match left {
                    Some(bytes) => hardware::limit_memory(&library, &gpu, &cgroup, bytes),
                    None => hardware::lift_memory_limit(&library, &gpu, &cgroup),
                };
                match answer {
                    Err(failure)
                        if !matches!(failure.code, Code::FUNCTION_NOT_FOUND | Code::NOT_SUPPORTED) =>
                    {
                        tracing::warn!(
                            pod = name,
                            gpu,
                            "the limit on a pod's memory cannot be taken back: {failure}"
                        );
                    }
                    _ => {}
                }
            })
            .await;
        }
    }
}

/// Whether each share of the claim can get the isolation that it was planned with.
fn can_be_limited(record: &Prepared, inventory: &Inventory) -> Result<(), LimitError> {
    for device in &record.devices {
        let Some(share) = &device.share else { continue };
        let claim = || format!("{}/{}", record.claim.namespace, record.claim.name);
        let gpu = &device.key.gpu;
        if record.pod.is_none() {
            return Err(LimitError::NoPod { claim: claim(), gpu: gpu.clone() });
        }
        let there = isolation(inventory, &device.key);
        if share.isolation > there {
            let (wanted, gpu) = (share.isolation, gpu.clone());
            return Err(LimitError::TooLittle { claim: claim(), gpu, wanted, there });
        }
    }
    Ok(())
}

/// Who limits the memory of a share.
fn isolation(inventory: &Inventory, share: &DeviceKey) -> Isolation {
    let gpu = inventory.gpu(&share.gpu);
    gpu.map(|gpu| Carrier { gpu, placement: share.placement }.isolation()).unwrap_or_default()
}

/// The GPUs of which the claim has a share and whose driver limits memory, and what the claim's pod may have of each.
fn limited(record: &Prepared, inventory: &Inventory, prepared: &PreparedClaims) -> Vec<(String, u64)> {
    let Some(pod) = &record.pod else { return Vec::new() };
    let by_driver = |carrier: &DeviceKey| {
        let mut mine = record.devices.iter().filter(|device| device.share.is_some());
        mine.any(|device| device.key.carrier() == *carrier)
            && isolation(inventory, carrier) >= Isolation::Driver
    };
    let all = shares_of(prepared, &pod.uid).into_iter().filter(|(carrier, _)| by_driver(carrier));
    all.map(|(carrier, bytes)| (carrier.gpu, bytes)).collect()
}

/// Bytes of a pod's shares by carrier.
pub(crate) fn shares_of(prepared: &PreparedClaims, pod: &str) -> BTreeMap<DeviceKey, u64> {
    let mut sums = BTreeMap::new();
    let of_pod = prepared.values().filter(|record| record.pod.as_ref().is_some_and(|other| other.uid == pod));
    for device in of_pod.flat_map(|record| &record.devices) {
        if let Some(share) = &device.share {
            *sums.entry(device.key.carrier()).or_default() += share.memory_bytes;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use kerf_crds::gpu_node::{ClaimReference, PodReference, Sharing, WantedShare};

    use super::*;
    use crate::inventory::Gpu;
    use crate::prepared::{DeviceKey, PreparedDevice};

    #[tokio::test]
    async fn a_share_that_nobody_would_limit_as_planned_is_an_error() {
        let record = |isolation, pod: Option<PodReference>| Prepared {
            claim: ClaimReference { namespace: "ns".into(), name: "c".into(), uid: "u".into() },
            pod,
            devices: vec![PreparedDevice {
                request: "r".into(),
                device: "d".into(),
                key: DeviceKey::share("GPU-1", "s"),
                uuid: "GPU-1".into(),
                cdi: vec![],
                share: Some(WantedShare { isolation, ..WantedShare::default() }),
            }],
        };
        let with = |isolation: Option<Isolation>| Inventory {
            gpus: vec![Gpu {
                uuid: "GPU-1".into(),
                sharing: isolation.map(|isolation| Sharing {
                    isolation,
                    max_clients: 48,
                    equal_sizes: false,
                }),
                ..Gpu::default()
            }],
            ..Inventory::default()
        };
        let folder = tempfile::tempdir().unwrap();
        let limits = PodLimits::new(Driver::new(folder.path()), folder.path());
        let pod = || Some(PodReference { uid: "p".into(), ..PodReference::default() });
        let enforce = async |record: Prepared, inventory: Inventory| {
            let error = limits.enforce(&record, &inventory, Arc::default).await.err();
            assert_eq!(error.is_none(), limits.holds(&record, &inventory, &PreparedClaims::new()).await);
            error
        };
        for too_little in [with(Some(Isolation::Process)), with(None), Inventory::default()] {
            let error = enforce(record(Isolation::Driver, pod()), too_little).await.unwrap();
            assert!(matches!(error, LimitError::TooLittle { .. }), "{error}");
        }
        let error = enforce(record(Isolation::Process, None), with(Some(Isolation::Process))).await.unwrap();
        assert!(matches!(error, LimitError::NoPod { .. }), "{error}");
        assert_eq!(enforce(record(Isolation::Process, pod()), with(Some(Isolation::Process))).await, None);
    }
}
