//! What Prometheus is told. Counters are counted where things happen ([`Metrics`], in [`NodeState`]); everything else is
//! written anew for each scrape from what the daemon knows, so that what has ended is in no answer any more.

mod serve;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kerf_crds::gpu_node::Placement;
use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::inventory::Instance;
use crate::node::NodeState;
use crate::prepared::DeviceKey;
use crate::{shares, step};

pub use serve::{Address, serve};

/// kubelet gives a call up after 45 s, and the plugin waits for up to 40 s.
const PREPARE_SECONDS: [f64; 11] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 40.0];

/// What pods have of a carrier is asked about every second while it has shares; when it was not for so long, it is not known.
const KNOWN: Duration = Duration::from_secs(15);

/// Counters, from the start of the process, and what else no other part keeps. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    steps: Family<StepLabels, Counter>,
    prepares: Family<PrepareLabels, Histogram, fn() -> Histogram>,
    ended: Family<EndedLabels, Counter>,
    used: Arc<Mutex<BTreeMap<DeviceKey, Used>>>,
}

/// Memory of a carrier of shares.
#[derive(Debug)]
struct Used {
    at: Instant,
    /// Bytes by pod's UID.
    pods: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StepLabels {
    step: String,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PrepareLabels {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndedLabels {
    gpu: String,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct GpuLabels {
    gpu: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ModeLabels {
    gpu: String,
    mode: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PlaceLabels {
    gpu: String,
    placement: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ShareLabels {
    gpu: String,
    /// `start:size` of its instance; empty for a share of the GPU itself.
    placement: String,
    share: String,
    namespace: String,
    pod: String,
    claim: String,
    isolation: &'static str,
}

type Gauges<L> = Family<L, Gauge<u64, AtomicU64>>;

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            steps: Family::default(),
            prepares: Family::new_with_constructor(|| Histogram::new(PREPARE_SECONDS)),
            ended: Family::default(),
            used: Arc::default(),
        };
        // An increase from nothing is none for Prometheus, but one from 0 is.
        for result in ["prepared", "failed"] {
            drop(metrics.prepares.get_or_create(&PrepareLabels { result }));
        }
        metrics
    }
}

impl Metrics {
    /// A step of a GPU's worker was carried out or failed.
    pub fn mig_step(&self, step: &step::Step, done: bool) {
        if let Some(kind) = step.kind() {
            self.step(format!("{kind:?}"), done);
        }
    }

    /// The same of what carries shares.
    pub fn share_step(&self, step: &shares::Step, done: bool) {
        let name = match step {
            shares::Step::TakeComputeMode => "TakeComputeMode",
            shares::Step::RestoreComputeMode(_) => "RestoreComputeMode",
            shares::Step::WriteConfig(_) => "WriteConfig",
            shares::Step::CreatePod { .. } => "CreatePod",
            shares::Step::DeletePod(_) => "DeletePod",
            shares::Step::ReplacePod(_) => "ReplacePod",
            shares::Step::CreateServer { .. } => "CreateServer",
            shares::Step::DeleteServer => "DeleteServer",
            shares::Step::CreateNamespace(..) => "CreateNamespace",
            shares::Step::SetNamespace(..) => "SetNamespace",
            shares::Step::DeleteNamespace(_) => "DeleteNamespace",
        };
        self.step(name.to_owned(), done);
    }

    fn step(&self, step: String, done: bool) {
        let count =
            |result, by| self.steps.get_or_create(&StepLabels { step: step.clone(), result }).inc_by(by);
        count("done", u64::from(done));
        count("failed", u64::from(!done));
    }

    /// Prepare of one claim was answered.
    pub fn prepare(&self, prepared: bool, took: Duration) {
        let result = if prepared { "prepared" } else { "failed" };
        self.prepares.get_or_create(&PrepareLabels { result }).observe(took.as_secs_f64());
    }

    /// A process is ended that has more than its share: more memory, or the GPU past MPS.
    pub fn ended(&self, gpu: &str, past_mps: bool) {
        let count = |reason, by| {
            self.ended.get_or_create(&EndedLabels { gpu: gpu.to_owned(), reason }).inc_by(by);
        };
        count("memory", u64::from(!past_mps));
        count("past_mps", u64::from(past_mps));
    }

    /// What pods with shares have of a carrier, in bytes, by UID.
    pub fn uses(&self, carrier: &DeviceKey, pods: BTreeMap<String, u64>) {
        let used = Used { at: Instant::now(), pods };
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(carrier.clone(), used);
    }

    /// `None` where that is not known.
    fn used(&self, carrier: &DeviceKey, pod: &str) -> Option<u64> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let known = used.get(carrier).filter(|used| used.at.elapsed() < KNOWN)?;
        Some(known.pods.get(pod).copied().unwrap_or_default())
    }
}

/// Everything in Prometheus' text format.
pub fn scrape(state: &NodeState) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::with_prefix("kerf");
    gpus(state, &mut registry);
    shares(state, &mut registry);
    let Metrics { steps, prepares, ended, used: _ } = &state.metrics;
    registry.register(
        "steps",
        "Changes of a GPU or of what carries its shares since the daemon started, by kind of step and by result \
         (done, failed)",
        steps.clone(),
    );
    registry.register_with_unit(
        "claim_prepare",
        "Time from kubelet's Prepare of a claim to the answer, by result (prepared, failed)",
        Unit::Seconds,
        prepares.clone(),
    );
    registry.register(
        "clients_ended",
        "Processes of pods that were ended since the daemon started, by GPU and by reason: the pod had more memory than its \
         shares (memory), or the process was on the GPU past MPS (past_mps)",
        ended.clone(),
    );
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry)?;
    Ok(text)
}

/// A place, as labels have it.
fn text(placement: Option<Placement>) -> String {
    placement.map(|Placement { start, size }| format!("{start}:{size}")).unwrap_or_default()
}

fn gpus(state: &NodeState, registry: &mut Registry) {
    let [memory, shares, server] = [(); 3].map(|()| Gauges::<GpuLabels>::default());
    let of_instance = Gauges::<PlaceLabels>::default();
    let mode = Gauges::<ModeLabels>::default();
    let inventory = state.latest();
    for gpu in inventory.iter().flat_map(|inventory| &inventory.gpus) {
        let labels = GpuLabels { gpu: gpu.uuid.clone() };
        memory.get_or_create(&labels).set(gpu.memory_bytes);
        shares.get_or_create(&labels).set(gpu.shares.len() as u64);
        let carries = |placement| gpu.shares.iter().any(|share| share.placement == placement);
        if gpu.mps.up || carries(None) {
            server.get_or_create(&labels).set(u64::from(gpu.mps.up));
        }
        for Instance { placement, mps, .. } in &gpu.instances {
            if mps.up || carries(Some(*placement)) {
                let labels = PlaceLabels { gpu: gpu.uuid.clone(), placement: text(Some(*placement)) };
                of_instance.get_or_create(&labels).set(u64::from(mps.up));
            }
        }
        if let Some(compute_mode) = gpu.compute_mode {
            let labels = ModeLabels { gpu: gpu.uuid.clone(), mode: compute_mode.to_string() };
            mode.get_or_create(&labels).set(1);
        }
    }
    registry.register_with_unit(
        "gpu_memory_usable",
        "Memory of the GPU less what the driver keeps for itself",
        Unit::Bytes,
        memory,
    );
    registry.register("gpu_shares", "Shares that the GPU has or is to have, given out or not", shares);
    registry.register(
        "gpu_mps_server_up",
        "Whether the MPS server of a GPU with shares takes clients",
        server,
    );
    registry.register(
        "mig_mps_server_up",
        "Whether the MPS server of a MIG instance with shares takes clients, by the instance's place (start:size)",
        of_instance,
    );
    registry.register("gpu_compute_mode", "1 for the compute mode that the GPU is in", mode);
}

fn shares(state: &NodeState, registry: &mut Registry) {
    let [limit, used, compute, processes, in_force] = [(); 5].map(|()| Gauges::<ShareLabels>::default());
    let prepared = state.prepared.snapshot();
    if let Some(inventory) = state.latest() {
        for record in prepared.values() {
            for device in &record.devices {
                let (gpu, Some(wanted)) = (&device.key.gpu, &device.share) else { continue };
                let shares = inventory.gpu(gpu).map(|gpu| &gpu.shares);
                let Some(share) = shares.into_iter().flatten().find(|share| share.id == wanted.id) else {
                    continue;
                };
                let pod = record.pod.as_ref();
                let labels = ShareLabels {
                    gpu: gpu.clone(),
                    placement: text(share.placement),
                    share: share.id.clone(),
                    namespace: record.claim.namespace.clone(),
                    pod: pod.map(|pod| pod.name.clone()).unwrap_or_default(),
                    claim: record.claim.name.clone(),
                    isolation: share.isolation.word(),
                };
                limit.get_or_create(&labels).set(share.memory_bytes);
                compute.get_or_create(&labels).set(share.compute_percent.into());
                processes.get_or_create(&labels).set(share.processes.into());
                in_force.get_or_create(&labels).set(share.problem.is_none().into());
                if let Some(bytes) = pod.and_then(|pod| state.metrics.used(&device.key.carrier(), &pod.uid)) {
                    used.get_or_create(&labels).set(bytes);
                }
            }
        }
    }
    registry.register_with_unit(
        "share_memory_limit",
        "Limit on the memory of a share that is given out",
        Unit::Bytes,
        limit,
    );
    registry.register_with_unit(
        "share_memory_used",
        "Memory of the GPU or MIG instance that NVML counts for all processes of the share's pod; the driver does not tell \
         the shares of one pod there apart, so each of them has the sum",
        Unit::Bytes,
        used,
    );
    registry.register(
        "share_compute_limit_percent",
        "Limit on the multiprocessors of a share, in percent of those of its GPU or MIG instance",
        compute,
    );
    registry.register(
        "share_processes",
        "Clients that the MPS server has in a share; before driver 615, those of the share's pod",
        processes,
    );
    registry.register(
        "share_limits_in_force",
        "Whether MPS, asked, confirmed the limits of the share when the daemon last looked",
        in_force,
    );
}
