//! A simulated node with the daemon's hardware half on it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kerf_crds::gpu_node::{
    ClaimOwner, DesiredGpu, DesiredMig, Owner, Partition, Placement, Reason, WantedInstance,
};
use kerf_crds::{GpuNode, GpuNodeSpec};
use kerf_node_daemon::events::{Note, Notes};
use kerf_node_daemon::hardware::Driver;
use kerf_node_daemon::health::Health;
use kerf_node_daemon::inventory::{Gpu, Inventory};
use kerf_node_daemon::modes::Modes;
use kerf_node_daemon::mps::Mps;
use kerf_node_daemon::mps::pods::ServerPods;
use kerf_node_daemon::node::{GpuReport, NodeState, SeenSpec};
use kerf_node_daemon::ours::Ours;
use kerf_node_daemon::pace::Pace;
use kerf_node_daemon::plugin::PodLimits;
use kerf_node_daemon::prepared::PreparedClaims;
use kerf_node_daemon::worker::Context;
use kerf_node_daemon::{reconcile, tenants};
use kerf_sim::{NodeSpec, SimNode};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// How long anything may take before a test gives up. Nothing is measured by it.
const PATIENCE: Duration = Duration::from_secs(120);

/// A node: the simulated driver in a directory, and what the daemon keeps beside it.
pub struct Node {
    pub dir: tempfile::TempDir,
    pub sim: SimNode,
    registrations_seen: AtomicUsize,
}

/// A daemon running on a node; dropped like a killed process.
pub struct Daemon {
    pub state: NodeState,
    pub verdicts: watch::Sender<Option<Option<Reason>>>,
    pub notes: mpsc::Receiver<Note>,
    pub limits: PodLimits,
    tasks: Vec<JoinHandle<anyhow::Result<()>>>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Node {
    pub fn new(spec: NodeSpec) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let sim =
            SimNode::create(&dir.path().join("root"), &spec).expect("makes a simulated node (needs root)");
        Self { dir, sim, registrations_seen: AtomicUsize::new(0) }
    }

    pub fn state_dir(&self) -> std::path::PathBuf {
        self.dir.path().join("state")
    }

    /// Starts a daemon that finds no GpuNode.
    pub fn start(&self) -> Daemon {
        self.start_with(None)
    }

    /// Starts a daemon that finds this GpuNode.
    pub fn start_with(&self, known: Option<&GpuNode>) -> Daemon {
        start(self.sim.root(), &self.state_dir(), known)
    }

    /// Waits until a daemon has asked for a GPU's XIDs since this was last called. The node must log calls.
    pub async fn watches_xids(&self, gpu: usize) {
        let registered = format!(" nvmlDeviceRegisterEvents {gpu} 0");
        let seen = &self.registrations_seen;
        eventually("the GPU's XIDs are watched", || {
            let log = self.sim.call_log().unwrap();
            let count = log.iter().filter(|line| line.ends_with(&registered)).count();
            seen.swap(count, Ordering::Relaxed) < count
        })
        .await;
    }

    /// Which instances there are, as `gpu profile@start`, in order.
    pub fn layout(&self) -> Vec<String> {
        let mut layout: Vec<String> = self
            .sim
            .instances()
            .unwrap()
            .iter()
            .map(|i| {
                format!(
                    "{} {}@{}{}",
                    i.gpu,
                    i.profile,
                    i.start,
                    if i.compute.len() == 1 { "" } else { " half" }
                )
            })
            .collect();
        layout.sort();
        layout
    }
}

pub fn start(root: &Path, state_dir: &Path, known: Option<&GpuNode>) -> Daemon {
    start_with_pods(root, state_dir, known, no_pods(), root)
}

/// With pods of MPS servers.
pub fn start_with_pods(
    root: &Path,
    state_dir: &Path,
    known: Option<&GpuNode>,
    pods: ServerPods,
    cgroup_root: &Path,
) -> Daemon {
    let state = NodeState::new("node", PreparedClaims::new());
    let (notes, receiver) = Notes::channel();
    let (verdicts, verdict) = watch::channel(Some(None));
    let (rounds, round) = watch::channel(0);
    let ours = Ours::load(state_dir, "boot");
    ours.recover(known).unwrap();
    let context = Context {
        state: state.clone(),
        driver: Driver::new(root),
        ours,
        health: Health::load(state_dir, "boot"),
        notes,
        verdicts: verdict,
        pace: Pace::default(),
        rounds: round,
        proc_root: Arc::from(root),
        mps: Mps::new(root, &state_dir.join("mps"), cgroup_root, pods),
        modes: Modes::load(state_dir, "boot"),
    };
    let limits = PodLimits::new(context.driver.clone(), cgroup_root);
    let tasks = vec![
        tokio::spawn(tenants::run(context.clone(), limits.clone())),
        tokio::spawn(reconcile::run(context, rounds)),
    ];
    Daemon { state, verdicts, notes: receiver, limits, tasks }
}

/// No pod is there, and none can be made.
fn no_pods() -> ServerPods {
    let (_, seen) = watch::channel(Some(Default::default()));
    ServerPods { seen, write: Arc::new(|_| Box::pin(async { anyhow::bail!("there is no API server") })) }
}

impl Daemon {
    /// The first inventory.
    pub async fn inventory(&self) -> Arc<Inventory> {
        self.until("a first inventory", |_| true).await
    }

    /// Waits for an inventory that is as said.
    pub async fn until(&self, what: &str, holds: impl Fn(&Inventory) -> bool) -> Arc<Inventory> {
        let mut inventories = self.state.inventory.subscribe();
        let found = tokio::time::timeout(
            PATIENCE,
            inventories.wait_for(|inventory| inventory.as_ref().is_some_and(|inventory| holds(inventory))),
        );
        match found.await {
            Ok(Ok(found)) => found.clone().unwrap(),
            _ => panic!("no {what}: {:#?}", self.state.latest()),
        }
    }

    /// Waits until a GPU's report is as said.
    pub async fn report(&self, uuid: &str, what: &str, holds: impl Fn(&GpuReport) -> bool) -> GpuReport {
        let mut reports = self.state.reports.subscribe();
        let found = reports.wait_for(|reports| reports.get(uuid).is_some_and(&holds));
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(Ok(reports)) => reports[uuid].clone(),
            _ => panic!("no report of {uuid} with {what}: {:#?}", self.state.reports.borrow()),
        }
    }

    /// Puts a spec in force.
    pub fn apply(&self, generation: i64, gpus: &[DesiredGpu], partitions: &[Partition]) {
        let spec = GpuNodeSpec { gpus: gpus.to_vec(), partitions: partitions.to_vec() };
        self.state.spec.send_replace(Some(Arc::new(SeenSpec { uid: "u".into(), generation, spec })));
    }

    /// Puts a spec in force and waits until all that it wants is there.
    pub async fn settle(
        &self,
        generation: i64,
        gpus: &[DesiredGpu],
        partitions: &[Partition],
    ) -> Arc<Inventory> {
        self.apply(generation, gpus, partitions);
        self.settled(generation, partitions).await
    }

    /// Waits until all that is wanted is there and reported under this generation.
    pub async fn settled(&self, generation: i64, partitions: &[Partition]) -> Arc<Inventory> {
        let inventory =
            self.until("inventory with all partitions", |inventory| has_all(inventory, partitions)).await;
        for gpu in &inventory.gpus {
            self.report(&gpu.uuid, "the generation and no problem", |report| {
                report.generation == Some(generation) && report.problem.is_none()
            })
            .await;
        }
        self.state.latest().unwrap()
    }

    /// The next event that is as said.
    pub async fn note(&mut self, what: &str, holds: impl Fn(&Note) -> bool) -> Note {
        let found = async {
            while let Some(note) = self.notes.recv().await {
                if holds(&note) {
                    return note;
                }
            }
            panic!("the events ended");
        };
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(note) => note,
            Err(_) => panic!("no event: {what}"),
        }
    }
}

fn has_all(inventory: &Inventory, partitions: &[Partition]) -> bool {
    partitions.iter().all(|partition| {
        let (Some(gpu), Some(wanted)) = (inventory.gpu(&partition.gpu), &partition.instance) else {
            return false;
        };
        gpu.instance_at(wanted.placement)
            .is_some_and(|instance| instance.profile == wanted.profile && instance.device().is_some())
    })
}

/// A GPU under a policy that wants MIG on and allows a reset.
pub fn managed(gpu: &Gpu) -> DesiredGpu {
    DesiredGpu {
        uuid: gpu.uuid.clone(),
        policy: "p".into(),
        mig: DesiredMig::Enabled,
        allow_reset: true,
        unhealthy_effect: Default::default(),
        max_concurrent_gpus: 16,
    }
}

/// A claim's partition.
pub fn claim(gpu: &Gpu, profile: &str, start: u32, size: u32) -> Partition {
    Partition {
        gpu: gpu.uuid.clone(),
        instance: Some(WantedInstance { profile: profile.into(), placement: Placement { start, size } }),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "ns".into(),
            name: format!("{profile}-{start}"),
            pod: "pod".into(),
            pod_uid: "uid".into(),
            request: "r".into(),
        }),
    }
}

/// Polls what no watch tells.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
