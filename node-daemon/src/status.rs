//! `GpuNode.status`: put together from what the parts know, written when it changes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::conditions::{node as condition, node_reason};
use kerf_crds::gpu_node::{self as api, Geometry, GpuNodeStatus, Reason};
use kerf_crds::{GpuNode, names};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::answer::{LIMIT, within};
use crate::backoff::Backoff;
use crate::inventory::{Gpu, Instance, Inventory, Process};
use crate::node::{GpuReport, Kubelet, NodeState, SeenSpec};
use crate::prepared::{DeviceKey, PreparedClaims, PreparedDevice, holders_of_whole};

/// Changes that come within this time of each other are one write.
const DEBOUNCE: Duration = Duration::from_millis(20);

/// A new generation alone is written after this time; sooner with whatever else there is to say.
const GENERATION: Duration = Duration::from_secs(5);

/// How often the status is written though nothing changed here, in case somebody else changed it.
const REFRESH: Duration = Duration::from_secs(600);

/// What a status is made from.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    pub spec: Option<&'a SeenSpec>,
    pub inventory: &'a Inventory,
    pub reports: &'a BTreeMap<String, GpuReport>,
    pub prepared: &'a PreparedClaims,
    pub kubelet: &'a Kubelet,
    /// As in [`crate::node::Shared::toolkit`].
    pub toolkit: Option<&'a Option<Reason>>,
}

/// Puts the status together. `before` is where unchanged conditions keep their time of transition from.
pub fn build(parts: Parts<'_>, before: &[Condition], now: Timestamp) -> GpuNodeStatus {
    let Parts { spec, inventory, reports, prepared, .. } = parts;
    let (geometries, geometry_names) = name_geometries(inventory);
    let gpus: Vec<api::Gpu> = inventory
        .gpus
        .iter()
        .zip(geometry_names)
        .map(|(gpu, geometry)| report_gpu(gpu, geometry, reports.get(&gpu.uuid), prepared))
        .collect();
    let observed_generation = observed_generation(spec, inventory, reports);
    let conditions = conditions(parts, &gpus, observed_generation, before, now);
    GpuNodeStatus {
        observed_generation,
        gpu_count: gpus.len() as u32,
        layout_summary: layout_summary(inventory),
        driver_version: inventory.driver_version.clone(),
        cuda_version: inventory.cuda_version.clone(),
        boot_id: inventory.boot_id.clone(),
        gpus,
        geometries,
        conditions,
    }
}

/// The oldest generation that any worker last decided under: from then on none acts on an older one.
fn observed_generation(
    spec: Option<&SeenSpec>,
    inventory: &Inventory,
    reports: &BTreeMap<String, GpuReport>,
) -> Option<i64> {
    let spec = spec?;
    inventory.gpus.iter().try_fold(spec.generation, |oldest, gpu| {
        let report = reports.get(&gpu.uuid).filter(|report| report.uid == spec.uid)?;
        Some(oldest.min(report.generation?))
    })
}

fn report_gpu(
    gpu: &Gpu,
    geometry: Option<String>,
    report: Option<&GpuReport>,
    prepared: &PreparedClaims,
) -> api::Gpu {
    let of_whole = |device: &PreparedDevice| device.key.gpu == gpu.uuid && device.key.is_whole();
    let claims = prepared.values().filter(|entry| entry.devices.iter().any(of_whole));
    api::Gpu {
        name: gpu.name.clone(),
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        product: gpu.product.clone(),
        architecture: gpu.architecture.clone(),
        geometry,
        memory_bytes: gpu.memory_bytes,
        pci_address: gpu.pci_address.clone(),
        numa_node: gpu.numa_node,
        pcie_root: gpu.pcie_root.clone(),
        mig: gpu.mig,
        unmanaged: gpu.unmanaged.clone(),
        unhealthy: gpu.unhealthy.clone(),
        problem: report.and_then(|report| report.problem.clone()),
        clients: clients(report.map_or(&[], |report| &report.clients)),
        claims: claims.map(|entry| entry.claim.clone()).collect(),
        // An MPS server is one of them until the compute mode is what it was: nobody is to get the whole GPU before.
        processes: gpu.processes.len() as u32 + u32::from(gpu.mps.there),
        instances: gpu.instances.iter().map(|instance| report_instance(gpu, instance, prepared)).collect(),
        sharing: gpu.sharing.clone(),
        shares: gpu.shares.iter().map(|share| report_share(gpu, share, prepared)).collect(),
    }
}

/// One for each pod, and one for all that are in none.
fn clients(processes: &[Process]) -> Vec<api::Client> {
    let first_of_each: BTreeMap<&Option<String>, &Process> =
        processes.iter().rev().map(|process| (&process.pod_uid, process)).collect();
    first_of_each
        .into_iter()
        .map(|(pod_uid, process)| api::Client { pod_uid: pod_uid.clone(), process: process.to_string() })
        .collect()
}

fn report_share(gpu: &Gpu, share: &api::Share, prepared: &PreparedClaims) -> api::Share {
    let of_share =
        |device: &PreparedDevice| device.key.gpu == gpu.uuid && device.key.share.as_ref() == Some(&share.id);
    let claims = prepared.values().filter(|entry| entry.devices.iter().any(of_share));
    api::Share { claims: claims.map(|entry| entry.claim.clone()).collect(), ..share.clone() }
}

fn report_instance(gpu: &Gpu, instance: &Instance, prepared: &PreparedClaims) -> api::Instance {
    let key = DeviceKey::instance(&gpu.uuid, instance.placement);
    api::Instance {
        profile: instance.profile.clone(),
        placement: instance.placement,
        gpu_instance_id: instance.gpu_instance_id,
        uuid: instance.device().map(|device| device.uuid.clone()),
        foreign: instance.foreign,
        // Those of shares are with the shares.
        claims: holders_of_whole(prepared, &key),
        // As of a GPU: nobody is to get all of it before the MPS server has gone.
        processes: instance.processes.len() as u32 + u32::from(instance.mps.there),
        unhealthy: instance.unhealthy.clone(),
    }
}

/// Each geometry once, named after the product, numbered where a product has several; and each GPU's name of its own.
fn name_geometries(inventory: &Inventory) -> (Vec<Geometry>, Vec<Option<String>>) {
    let mut geometries: Vec<Geometry> = Vec::new();
    let mut of_gpu = Vec::new();
    for gpu in &inventory.gpus {
        let Some(geometry) = gpu.geometry.as_deref() else {
            of_gpu.push(None);
            continue;
        };
        let same_but_name = |known: &&Geometry| {
            let named = Geometry { name: known.name.clone(), ..geometry.clone() };
            product_of(&known.name) == geometry.name && **known == named
        };
        if let Some(known) = geometries.iter().find(same_but_name) {
            of_gpu.push(Some(known.name.clone()));
            continue;
        }
        let others = geometries.iter().filter(|known| product_of(&known.name) == geometry.name).count();
        let name = match others {
            0 => geometry.name.clone(),
            others => format!("{}{NUMBER}{}", geometry.name, others + 1),
        };
        of_gpu.push(Some(name.clone()));
        geometries.push(Geometry { name, ..geometry.clone() });
    }
    (geometries, of_gpu)
}

/// Between a product and its number.
const NUMBER: &str = " #";

fn product_of(name: &str) -> &str {
    name.split_once(NUMBER).map_or(name, |(product, _)| product)
}

/// `2x 3g.40gb, 7x 1g.10gb, 3 shares, 1 whole`: instances by name of profile, largest first, then shares, then GPUs that
/// are neither cut nor shared.
fn layout_summary(inventory: &Inventory) -> String {
    let mut counts: BTreeMap<(std::cmp::Reverse<u32>, &str), u32> = BTreeMap::new();
    for instance in inventory.gpus.iter().flat_map(|gpu| &gpu.instances) {
        *counts
            .entry((std::cmp::Reverse(instance.placement.size), instance.profile.as_str()))
            .or_default() += 1;
    }
    let mut parts: Vec<String> =
        counts.iter().map(|((_, profile), count)| format!("{count}x {profile}")).collect();
    let shares: usize = inventory.gpus.iter().map(|gpu| gpu.shares.len()).sum();
    match shares {
        0 => {}
        1 => parts.push("1 share".to_owned()),
        shares => parts.push(format!("{shares} shares")),
    }
    let whole = inventory.gpus.iter().filter(|gpu| !gpu.mig.enabled && gpu.shares.is_empty()).count();
    if whole > 0 {
        parts.push(format!("{whole} whole"));
    }
    parts.join(", ")
}

fn conditions(
    Parts { inventory, kubelet, toolkit, .. }: Parts<'_>,
    gpus: &[api::Gpu],
    observed_generation: Option<i64>,
    before: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let not_registered = |why: String| (false, node_reason::NOT_REGISTERED.to_owned(), why);
    let ready = match (&inventory.unavailable, kubelet) {
        (Some(reason), _) => (false, reason.reason.clone(), reason.message.clone()),
        (None, Kubelet::Registered) => (true, node_reason::FOLLOWING.to_owned(), String::new()),
        (None, Kubelet::Unheard) => not_registered(format!(
            "kubelet has not registered the plugin {} yet; it looks for its socket in --kubelet-registry-dir",
            names::DRIVER
        )),
        (None, Kubelet::Refused(error)) => {
            not_registered(format!("kubelet refused to register the plugin {}: {error}", names::DRIVER))
        }
    };
    let lost = gpus.iter().find_map(|gpu| gpu.unhealthy.as_ref()).or(inventory.unreadable.first());
    // What merely waits, for a process to end say, is no failure.
    let failed = gpus.iter().filter_map(|gpu| gpu.problem.as_ref()).find(|problem| {
        problem.reason.chars().all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit())
            || [
                kerf_crds::conditions::problem_reason::CHECKPOINT_FAILED,
                kerf_crds::conditions::problem_reason::CALL_HANGS,
                kerf_crds::conditions::problem_reason::POD_FAILED,
                kerf_crds::conditions::problem_reason::MPS_HANGS,
            ]
            .contains(&problem.reason.as_str())
    });
    let degraded = match (lost, failed) {
        (Some(reason), _) => {
            (true, node_reason::GPU_LOST.to_owned(), format!("{}: {}", reason.reason, reason.message))
        }
        (None, Some(problem)) => {
            (true, node_reason::STEP_FAILED.to_owned(), format!("{}: {}", problem.reason, problem.message))
        }
        (None, None) => (false, node_reason::HEALTHY.to_owned(), String::new()),
    };
    let make = |type_: &str, (holds, reason, message): (bool, String, String)| {
        let status = if holds { "True" } else { "False" };
        let unchanged = before.iter().find(|old| old.type_ == type_ && old.status == status);
        Condition {
            type_: type_.into(),
            status: status.into(),
            reason,
            message,
            observed_generation,
            last_transition_time: unchanged.map_or(Time(now), |old| old.last_transition_time.clone()),
        }
    };
    let toolkit = toolkit.map(|trouble| match trouble {
        None => (true, node_reason::TOOLKIT_FOUND.to_owned(), String::new()),
        Some(Reason { reason, message }) => (false, reason.clone(), message.clone()),
    });
    let mut conditions = vec![make(condition::READY, ready), make(condition::DEGRADED, degraded)];
    conditions.extend(toolkit.map(|toolkit| make(condition::CONTAINER_TOOLKIT, toolkit)));
    conditions
}

/// Writes the status for as long as it runs. A write that fails is tried again with what is true by then.
pub async fn write(client: Client, state: NodeState) -> anyhow::Result<()> {
    let nodes: Api<GpuNode> = Api::all(client);
    let mut specs = state.spec.subscribe();
    let mut inventories = state.inventory.subscribe();
    let mut reports = state.reports.subscribe();
    let mut prepared = state.prepared.subscribe();
    let mut kubelet = state.kubelet.subscribe();
    let mut toolkit = state.toolkit.subscribe();
    let mut written: Option<(String, GpuNodeStatus)> = None;
    let mut backoff = Backoff::new(&state.node_name);
    // When a new generation alone is to be written.
    let mut due: Option<Instant> = None;
    loop {
        specs.mark_unchanged();
        inventories.mark_unchanged();
        reports.mark_unchanged();
        prepared.mark_unchanged();
        kubelet.mark_unchanged();
        toolkit.mark_unchanged();
        let mut refresh = REFRESH;
        if let (Some(seen), Some(inventory)) = (state.seen_spec(), state.latest()) {
            let claims = state.prepared.snapshot();
            let known = state.reports.borrow().clone();
            let (heard, libraries) = (state.kubelet.borrow().clone(), state.toolkit.borrow().clone());
            let parts = Parts {
                spec: Some(&seen),
                inventory: &inventory,
                reports: &known,
                prepared: &claims,
                kubelet: &heard,
                toolkit: libraries.as_ref(),
            };
            let before = written.as_ref().map(|(_, status)| status.conditions.clone());
            let before = match before {
                Some(before) => before,
                None => current_conditions(&nodes, &state.node_name).await,
            };
            let status = build(parts, &before, Timestamp::now());
            let old = written.as_ref().filter(|(uid, _)| *uid == seen.uid).map(|(_, old)| old);
            let now = Instant::now();
            let at = write_at(old, &status, &mut due, now);
            if let Some(pause) =
                at.map(|at| at.saturating_duration_since(now)).filter(|pause| !pause.is_zero())
            {
                refresh = pause;
            } else if at.is_some() {
                match patch(&nodes, &state.node_name, &status).await {
                    Ok(()) => {
                        backoff = Backoff::new(&state.node_name);
                        written = Some((seen.uid.clone(), status));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "the status could not be written");
                        written = None;
                        refresh = backoff.pause();
                    }
                }
            }
        }
        let changed = timeout(refresh, async {
            tokio::select! {
                _ = specs.changed() => {}
                _ = inventories.changed() => {}
                _ = reports.changed() => {}
                _ = prepared.changed() => {}
                _ = kubelet.changed() => {}
                _ = toolkit.changed() => {}
            }
        });
        match changed.await {
            Ok(()) => sleep(DEBOUNCE).await,
            Err(_) if refresh == REFRESH => written = written.map(|(_, status)| (String::new(), status)),
            Err(_) => {}
        }
    }
}

/// When the status is to be written, if it is. `due`: when a new generation alone is.
fn write_at(
    old: Option<&GpuNodeStatus>,
    status: &GpuNodeStatus,
    due: &mut Option<Instant>,
    now: Instant,
) -> Option<Instant> {
    match old {
        Some(old) if old == status => {
            *due = None;
            None
        }
        Some(old) if *old == under(status, old) => Some(*due.get_or_insert(now + GENERATION)),
        _ => {
            *due = None;
            Some(now)
        }
    }
}

/// The status as if it answered the same generation as the other.
fn under(status: &GpuNodeStatus, other: &GpuNodeStatus) -> GpuNodeStatus {
    let mut status = GpuNodeStatus { observed_generation: other.observed_generation, ..status.clone() };
    for (condition, other) in status.conditions.iter_mut().zip(&other.conditions) {
        condition.observed_generation = other.observed_generation;
    }
    status
}

async fn current_conditions(nodes: &Api<GpuNode>, name: &str) -> Vec<Condition> {
    match within(LIMIT, nodes.get_opt(name)).await {
        Ok(Some(node)) => node.status.map(|status| status.conditions).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Server-side apply: what the daemon wrote before and no longer says goes, what others wrote stays, as the conditions of
/// the job that verifies shares.
async fn patch(nodes: &Api<GpuNode>, name: &str, status: &GpuNodeStatus) -> Result<(), kube::Error> {
    let params = PatchParams::apply(names::NODE_DAEMON).force();
    within(LIMIT, nodes.patch_status(name, &params, &Patch::Apply(applied(name, status)))).await.map(drop)
}

fn applied(name: &str, status: &GpuNodeStatus) -> serde_json::Value {
    json!({
        "apiVersion": GpuNode::api_version(&()), "kind": GpuNode::kind(&()),
        "metadata": { "name": name }, "status": status,
    })
}

#[cfg(test)]
mod tests;
