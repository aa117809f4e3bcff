//! Stands in for the node daemons of a large cluster, all in one process.
//!
//! What a daemon reads and writes is the daemon's own code here, once for each node, as that node's service account: the
//! watches, `GpuNode.status`, the ResourceSlices, what the next step on a GPU is, whether a claim may have its devices. Only
//! the GPUs are not there: a step is done as soon as it is named, on a copy of what the daemon saw of one simulated GPU.
//! Nor is kubelet, so a claim is prepared when the pod is bound, and no files are written for containers.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kerf_crds::gpu_node::ClaimReference;
use kerf_crds::names;
use kerf_node_daemon::hardware::{self, Driver, Identity, Known};
use kerf_node_daemon::inventory::{ComputeInstance, Gpu, Instance, Inventory, Process};
use kerf_node_daemon::node::{GpuReport, Kubelet, NodeState};
use kerf_node_daemon::ours::Ours;
use kerf_node_daemon::plugin::{authorize, from_api};
use kerf_node_daemon::prepared::{DeviceKey, Prepared, PreparedClaims, holders};
use kerf_node_daemon::step::{Desired, Observed, Step, due_steps};
use kerf_node_daemon::{api, foreign, slices, status};
use kerf_sim::{GpuSpec, NodeSpec, SimNode};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config, ResourceExt as _};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval_at, timeout};

/// The program that runs this.
pub const PROGRAM: &str = "kerf-e2e-daemons";
/// As the daemon's rounds of looking at everything: what nothing tells of, such as processes, shows after this long.
const ROUND: Duration = Duration::from_secs(30);
/// kubelet's patience with Prepare.
const PREPARE: Duration = Duration::from_secs(45);

/// What the stand-in is started with.
#[derive(Debug, clap::Parser)]
pub struct Args {
    /// Folder of the nodes' kubeconfig files, each named after its node
    #[arg(long)]
    pub kubeconfigs: std::path::PathBuf,
    /// Kubeconfig of somebody who may watch pods
    #[arg(long)]
    pub kubelet: std::path::PathBuf,
    /// Folder for the daemons' state
    #[arg(long)]
    pub state: std::path::PathBuf,
    /// Model of all GPUs, as the simulator names it
    #[arg(long, default_value = "h100-80-sxm")]
    pub model: String,
    /// GPUs of a node
    #[arg(long, default_value_t = 8)]
    pub gpus: usize,
}

/// Runs until it is killed.
///
/// # Errors
/// A part of a daemon ended.
pub async fn run(args: Args) -> Result<()> {
    let template = template(&args.state.join("template"), &args.model, args.gpus)?;
    let mut files: Vec<_> = std::fs::read_dir(&args.kubeconfigs)
        .with_context(|| format!("failed to read {}", args.kubeconfigs.display()))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    let mut parts: JoinSet<Result<()>> = JoinSet::new();
    let mut nodes = HashMap::new();
    for (number, file) in files.iter().enumerate() {
        let name = file.file_name().and_then(|name| name.to_str()).context("a name that is no text")?;
        let daemon =
            Daemon { client: client(file).await?, state: NodeState::new(name, PreparedClaims::new()) };
        let state_dir = args.state.join(name);
        std::fs::create_dir_all(&state_dir)?;
        daemon.start(&mut parts, inventory_of(&template, number), &state_dir);
        nodes.insert(name.to_owned(), daemon);
    }
    parts.spawn(kubelets(client(&args.kubelet).await?, nodes));
    match parts.join_next().await {
        Some(ended) => ended?.context("a part of a daemon failed"),
        None => Ok(()),
    }?;
    bail!("a part of a daemon ended")
}

async fn client(file: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(file)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// What a daemon sees of a node with these GPUs, in MIG mode and empty.
fn template(dir: &Path, model: &str, gpus: usize) -> Result<Inventory> {
    let spec = NodeSpec::new("template", vec![GpuSpec::new(model).in_mig_mode(); gpus]);
    SimNode::create(dir, &spec)?;
    let driver = Driver::new(dir);
    let library = driver.session()?;
    let versions = library.versions();
    let mut inventory = Inventory {
        driver_version: versions.driver,
        cuda_version: versions.cuda,
        boot_id: kerf_node_daemon::ours::boot_id(),
        ..Inventory::default()
    };
    for (index, uuid) in (0..).zip(library.gpu_uuids()?) {
        let identity = Identity { uuid: uuid?, name: String::new(), index };
        inventory.gpus.push(hardware::observe(&library, &identity, &mut Known::default(), true)?);
    }
    Ok(inventory)
}

/// The same GPUs with UUIDs of their own.
fn inventory_of(template: &Inventory, node: usize) -> Inventory {
    let mut inventory = template.clone();
    for (index, gpu) in inventory.gpus.iter_mut().enumerate() {
        gpu.uuid = format!("GPU-{node:05x}{index:03x}-0000-4000-8000-000000000000");
        gpu.name = names::gpu_name(&gpu.uuid, 8);
    }
    inventory
}

#[derive(Clone)]
struct Daemon {
    client: Client,
    state: NodeState,
}

impl Daemon {
    fn start(&self, parts: &mut JoinSet<Result<()>>, inventory: Inventory, state_dir: &Path) {
        let (client, state) = (&self.client, &self.state);
        state.kubelet.send_replace(Kubelet::Registered);
        state.toolkit.send_replace(Some(None));
        let ours = Ours::load(state_dir, &inventory.boot_id);
        parts.spawn(api::follow(client.clone(), state.clone(), ours, |_| Ok(())));
        let (verdicts, _) = watch::channel(None);
        parts.spawn(foreign::watch(client.clone(), state.clone(), state_dir.to_owned(), verdicts));
        parts.spawn(status::write(client.clone(), state.clone()));
        let (publisher, publishing) = (client.clone(), state.clone());
        parts.spawn(async move {
            slices::run(publishing, publisher).await;
            Ok(())
        });
        parts.spawn(gpus(state.clone(), inventory));
    }

    /// What kubelet has the daemon do for a pod that was bound here.
    async fn prepare(self, namespace: String, claim: String) -> Result<()> {
        let read = from_api(self.client);
        let found = read(namespace.clone(), claim.clone()).await?.context("the claim is gone")?;
        let asked = ClaimReference { namespace, name: claim, uid: found.uid().unwrap_or_default() };
        let mut spec = self.state.spec.subscribe();
        let mut inventory = self.state.inventory.subscribe();
        loop {
            spec.mark_unchanged();
            inventory.mark_unchanged();
            if let (Some(spec), Some(inventory)) = (self.state.seen_spec(), self.state.latest()) {
                let prepared = self.state.prepared.snapshot();
                let node = &self.state.node_name;
                match authorize(&found, &asked, node, &spec.spec, &inventory, &prepared) {
                    Ok((devices, pod)) => {
                        self.state.prepared.record(Prepared { claim: asked, pod, devices })?;
                        return Ok(());
                    }
                    Err(error) if error.may_pass() => {}
                    Err(error) => return Err(error.into()),
                }
            }
            tokio::select! {
                _ = spec.changed() => {}
                _ = inventory.changed() => {}
            }
        }
    }
}

/// The hardware of one node, and the workers on it.
async fn gpus(state: NodeState, mut inventory: Inventory) -> Result<()> {
    let mut specs = state.spec.subscribe();
    let mut prepared = state.prepared.subscribe();
    // Daemons were not all started at the same moment.
    let phase = inventory.gpus.first().map_or(0, |gpu| gpu.uuid.bytes().map(u64::from).sum::<u64>() * 7919);
    let first = tokio::time::Instant::now() + Duration::from_millis(phase % ROUND.as_millis() as u64);
    let mut rounds = interval_at(first, ROUND);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        specs.mark_unchanged();
        prepared.mark_unchanged();
        let claims = state.prepared.snapshot();
        if let Some(seen) = state.seen_spec() {
            for gpu in &mut inventory.gpus {
                let desired = Desired {
                    gpu: seen.spec.gpus.iter().find(|desired| desired.uuid == gpu.uuid),
                    partitions: &seen.spec.partitions,
                };
                loop {
                    let observed =
                        Observed { gpu, prepared: &claims, passed_over: &[], short_of_resources: false };
                    let Some(step) = due_steps(desired, observed).steps.into_iter().next() else { break };
                    take(gpu, &step)?;
                }
            }
            state.reports.send_if_modified(|reports| {
                let mut changed = false;
                for gpu in &inventory.gpus {
                    let new = GpuReport {
                        uid: seen.uid.clone(),
                        generation: Some(seen.generation),
                        ..GpuReport::default()
                    };
                    changed |= reports.insert(gpu.uuid.clone(), new.clone()) != Some(new);
                }
                changed
            });
        }
        state.inventory.send_if_modified(|known| {
            let changed = known.as_deref() != Some(&inventory);
            if changed {
                *known = Some(Arc::new(inventory.clone()));
            }
            changed
        });
        tokio::select! {
            _ = specs.changed() => {}
            _ = prepared.changed() => {}
            _ = rounds.tick() => {
                for gpu in &mut inventory.gpus {
                    run_processes(gpu, &claims);
                }
            }
        }
    }
}

/// Each claim's container runs one process.
fn run_processes(gpu: &mut Gpu, claims: &PreparedClaims) {
    for instance in &mut gpu.instances {
        let key = DeviceKey::instance(&gpu.uuid, instance.placement);
        let count = holders(claims, &key).len();
        instance.processes = vec![Process { pid: 1, ..Process::default() }; count];
    }
}

/// Does to the GPU what a step would have its driver do.
fn take(gpu: &mut Gpu, step: &Step) -> Result<()> {
    match step {
        Step::EnableMig => gpu.mig.enabled = true,
        Step::DisableMig => gpu.mig.enabled = false,
        Step::CreateGpuInstance { profile, profile_id, placement } => {
            let taken = |id: &u32| gpu.instances.iter().any(|instance| instance.gpu_instance_id == *id);
            let id = (1..).find(|id| !taken(id)).context("no id is free")?;
            gpu.instances.push(Instance {
                profile: profile.clone(),
                profile_id: *profile_id,
                placement: *placement,
                gpu_instance_id: id,
                ..Instance::default()
            });
            gpu.instances.sort_by_key(|instance| instance.placement);
        }
        Step::CreateComputeInstance { instance: target } => {
            let uuid = format!(
                "MIG-{}-{:04x}-5000-8000-{:012x}",
                &gpu.uuid[4..12],
                target.profile_id,
                target.gpu_instance_id
            );
            let instance = find(gpu, target.gpu_instance_id)?;
            instance.compute_instances = vec![ComputeInstance { id: 0, full_width: true, uuid }];
        }
        Step::DestroyComputeInstance { instance: target, .. } => {
            find(gpu, target.gpu_instance_id)?.compute_instances.clear();
        }
        Step::DestroyGpuInstance { instance: target } => {
            gpu.instances.retain(|instance| instance.gpu_instance_id != target.gpu_instance_id);
        }
        Step::Nothing | Step::Blocked(_) => {}
    }
    Ok(())
}

fn find(gpu: &mut Gpu, id: u32) -> Result<&mut Instance> {
    let found = gpu.instances.iter_mut().find(|instance| instance.gpu_instance_id == id);
    found.with_context(|| format!("{} has no GPU instance {id}", gpu.uuid))
}

/// What kubelets tell the daemons, from one watch. Pods do not end here.
async fn kubelets(client: Client, nodes: HashMap<String, Daemon>) -> Result<()> {
    let bound = watcher::Config::default().fields("spec.nodeName!=");
    let mut events = std::pin::pin!(watcher(Api::<Pod>::all(client), bound));
    let mut known = HashSet::new();
    while let Some(event) = events.try_next().await? {
        let (Event::Apply(pod) | Event::InitApply(pod)) = event else { continue };
        let (uid, namespace) = (pod.uid().unwrap_or_default(), pod.namespace().unwrap_or_default());
        let Some(spec) = pod.spec else { continue };
        let Some(daemon) = spec.node_name.and_then(|node| nodes.get(&node)) else { continue };
        if !known.insert(uid) {
            continue;
        }
        for claim in spec.resource_claims.into_iter().flatten().filter_map(|one| one.resource_claim_name) {
            let (daemon, namespace) = (daemon.clone(), namespace.clone());
            tokio::spawn(async move {
                let id = format!("{namespace}/{claim}");
                match timeout(PREPARE, daemon.prepare(namespace, claim)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!("Prepare of {id}: {error:#}"),
                    Err(_) => tracing::warn!("Prepare of {id}: too late"),
                }
            });
        }
    }
    bail!("the watch of the pods ended")
}
