//! Nodes and node daemons, played: a Node object that is Ready, and a `GpuNode` whose status follows its spec at once.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kerf_crds::gpu_node::{
    ClaimReference, DesiredMig, Geometry, Gpu, GpuNodeStatus, Instance, ObservedMig, Owner, Profile,
};
use kerf_crds::{GpuNode, GpuNodeSpec, PartitionPolicy};
use kerf_e2e::install::{Overlay, apply_path, deploy_dir};
use kerf_e2e::{Cluster, ClusterOptions, ControlPlaneOptions};
use kerf_operator::config::Config;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A control plane without kubelets, with Kerf's API in it.
pub async fn control_plane() -> Result<Cluster> {
    // Nobody sends heartbeats for the nodes.
    let patient = ("kube-controller-manager".to_owned(), "--node-monitor-grace-period=1h".to_owned());
    let control_plane = ControlPlaneOptions { extra_args: vec![patient], ..ControlPlaneOptions::default() };
    let options = ClusterOptions { nodes: Vec::new(), control_plane, ..ClusterOptions::default() };
    let cluster = Cluster::start(options).await?;
    let client = cluster.client();
    apply_path(&client, &deploy_dir().join("crds"), &Overlay::default()).await?;
    create(&Api::<Namespace>::all(client.clone()), json!({"metadata": {"name": "kerf-system"}})).await?;
    Ok(cluster)
}

/// Creates an object from JSON.
pub async fn create<K>(api: &Api<K>, object: serde_json::Value) -> Result<K>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned + serde::Serialize,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}

/// A policy that makes instances on demand, everywhere.
pub async fn dynamic_policy(client: &Client, mig: serde_json::Value) -> Result<()> {
    let policy = json!({"apiVersion": "kerf.dev/v1alpha1", "kind": "PartitionPolicy",
        "metadata": {"name": "all"}, "spec": {"mig": mig}});
    create(&Api::<PartitionPolicy>::all(client.clone()), policy).await?;
    Ok(())
}

/// A Ready node with this much CPU.
pub async fn node(client: &Client, name: &str, cpu: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let labels = json!({"kubernetes.io/hostname": name});
    create(&nodes, json!({"metadata": {"name": name, "labels": labels}})).await?;
    let amounts = json!({"cpu": cpu, "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"});
    let status = json!({"status": {
        "capacity": amounts, "allocatable": amounts,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Played", "message": "",
            "lastHeartbeatTime": null, "lastTransitionTime": null}],
    }});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
    Ok(())
}

/// What an A100 with 80 GB can be cut into.
pub fn a100() -> Geometry {
    let profile = |name: &str, id, slices, size, starts: &[u32], max| Profile {
        name: name.into(),
        id,
        memory_bytes: u64::from(size) * 10_000_000_000,
        multiprocessors: slices * 14,
        compute_slices: slices,
        size,
        starts: starts.to_vec(),
        max_instances: max,
        ..Profile::default()
    };
    Geometry {
        name: "NVIDIA A100-SXM4-80GB".into(),
        memory_slices: 8,
        multiprocessors: 98,
        profiles: vec![
            profile("1g.10gb", 19, 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
            profile("2g.20gb", 14, 2, 2, &[0, 2, 4], 3),
            profile("3g.40gb", 9, 3, 4, &[0, 4], 2),
            profile("4g.40gb", 5, 4, 4, &[0], 1),
            profile("7g.80gb", 0, 7, 8, &[0], 1),
        ],
        ..Geometry::default()
    }
}

/// A node with GPUs whose daemon is played. Dropping it ends the daemon.
pub struct Daemon {
    task: JoinHandle<()>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Daemon {
    /// Creates the `GpuNode` and begins to follow it.
    pub async fn start(client: &Client, name: &str, gpus: u32, mig: bool) -> Result<Self> {
        let api: Api<GpuNode> = Api::all(client.clone());
        api.create(&PostParams::default(), &GpuNode::new(name, GpuNodeSpec::default())).await?;
        let mut status = GpuNodeStatus {
            gpu_count: gpus,
            driver_version: "580.95.05".into(),
            cuda_version: "13.0".into(),
            geometries: vec![a100()],
            gpus: (0..gpus)
                .map(|index| Gpu {
                    name: format!("gpu-{index}"),
                    uuid: format!("GPU-{name}-{index}"),
                    index,
                    product: a100().name,
                    geometry: Some(a100().name),
                    memory_bytes: 80_000_000_000,
                    mig: ObservedMig { enabled: mig, ..ObservedMig::default() },
                    ..Gpu::default()
                })
                .collect(),
            conditions: vec![serde_json::from_value(json!({
                "type": "Ready", "status": "True", "reason": "Following", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }))?],
            ..GpuNodeStatus::default()
        };
        let (owned, client) = (name.to_owned(), client.clone());
        let pods: Api<Pod> = Api::all(client);
        let task = tokio::spawn(async move {
            let mut told = false;
            let mut made = 0;
            loop {
                if let Ok(mut node) = api.get(&owned).await {
                    let held = holders(&pods, &owned).await.unwrap_or_default();
                    let before = status.clone();
                    follow(&node.spec, &mut status, &held, &mut made);
                    status.observed_generation = node.metadata.generation;
                    if !told || status != before {
                        node.status = Some(status.clone());
                        told = api.replace_status(&owned, &PostParams::default(), &node).await.is_ok();
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        Ok(Self { task })
    }
}

/// UIDs of the pods that run on the node: bound, not over.
async fn holders(pods: &Api<Pod>, node: &str) -> Result<HashMap<String, ()>> {
    let list = pods.list(&Default::default()).await?;
    Ok(list
        .items
        .into_iter()
        .filter(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node))
        .filter(|pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            !matches!(phase, Some("Succeeded" | "Failed"))
        })
        .filter_map(|pod| Some((pod.metadata.uid?, ())))
        .collect())
}

/// One step of a daemon that works at once.
fn follow(spec: &GpuNodeSpec, status: &mut GpuNodeStatus, running: &HashMap<String, ()>, made: &mut u32) {
    for gpu in &mut status.gpus {
        let Some(told) = spec.gpus.iter().find(|told| told.uuid == gpu.uuid) else { continue };
        match told.mig {
            DesiredMig::Enabled => gpu.mig.enabled = true,
            DesiredMig::Disabled if gpu.instances.is_empty() => gpu.mig.enabled = false,
            DesiredMig::Disabled | DesiredMig::Keep => {}
        }
        for instance in &mut gpu.instances {
            instance.claims.clear();
        }
        for wanted in spec.partitions.iter().filter(|partition| partition.gpu == gpu.uuid) {
            let Some(shape) = &wanted.instance else { continue };
            let matches = |instance: &Instance| {
                instance.placement == shape.placement && instance.profile == shape.profile
            };
            if !gpu.instances.iter().any(matches) {
                gpu.instances.retain(|instance| !instance.placement.overlaps(&shape.placement));
                *made += 1;
                gpu.instances.push(Instance {
                    profile: shape.profile.clone(),
                    placement: shape.placement,
                    gpu_instance_id: *made,
                    uuid: Some(format!("MIG-{}-{made}", gpu.uuid)),
                    ..Instance::default()
                });
            }
            if let Owner::Claim(owner) = &wanted.owner
                && running.contains_key(&owner.pod_uid)
                && let Some(instance) = gpu.instances.iter_mut().find(|instance| matches(instance))
            {
                instance.claims.push(ClaimReference {
                    namespace: owner.namespace.clone(),
                    name: owner.name.clone(),
                    uid: String::new(),
                });
            }
        }
        gpu.instances.sort_by_key(|instance| instance.placement.start);
    }
}

/// A running operator, stopped by [`Operator::stop`].
pub struct Operator {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<()>>,
}

impl Operator {
    pub fn start(client: &Client, identity: &str, port: u16) -> Result<Self> {
        let config = Config::try_parse_from([
            "kerf-operator",
            "--identity",
            identity,
            "--webhook-address",
            &format!("127.0.0.1:{port}"),
        ])?;
        let (stop, stopped) = oneshot::channel();
        let client = client.clone();
        let task = tokio::spawn(async move {
            kerf_operator::run::run_until(client, config, async {
                let _ = stopped.await;
            })
            .await
        });
        Ok(Self { stop, task })
    }

    pub async fn stop(self) -> Result<()> {
        let _ = self.stop.send(());
        self.task.await.context("the operator failed")?
    }
}
