//! Kerf on a large cluster.

use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::json;
use tokio::time::sleep;

use super::phase::{Measured, Phase};
use super::{MIX, daemons, fleet};
use crate::cluster::Program;
use crate::kerf::{Kerf, KerfOptions, NAMESPACE, built};
use crate::wait::{Seen, eventually};

/// The pods' namespace.
pub const PODS: &str = "scale";
/// How long a step of the preparation may take.
const PATIENCE: Duration = Duration::from_secs(1800);
/// What has been begun is written by then; a new generation alone is reported after five seconds.
const QUIET: Duration = Duration::from_secs(8);

/// How large.
#[derive(Clone, Debug)]
pub struct Size {
    pub nodes: usize,
    pub pods: usize,
    /// What the operator logs.
    pub log: String,
}

/// The cluster as it was when the measurement began.
#[derive(Debug)]
pub struct Before {
    pub nodes: Vec<Node>,
    pub gpu_nodes: Vec<GpuNode>,
    pub policies: Vec<PartitionPolicy>,
    pub classes: Vec<DeviceClass>,
    pub slices: Vec<ResourceSlice>,
    pub pods: Vec<Pod>,
}

/// A large cluster with Kerf on it, which is measured once.
#[derive(Debug)]
pub struct Large {
    kerf: Kerf,
    kwok: Program,
    daemons: Program,
}

impl Large {
    /// Starts it, and returns when all GPUs are reported and managed.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn start(size: &Size) -> Result<Self> {
        let mut options = KerfOptions::nodes(&[]);
        options.operator_log.clone_from(&size.log);
        options.control_plane = fleet::control_plane();
        let kerf = Kerf::start(options).await?;
        let client = kerf.client();
        // Its pods would do nothing on nodes that are played.
        Api::<DaemonSet>::namespaced(client.clone(), NAMESPACE)
            .delete("kerf-node-daemon", &DeleteParams::default())
            .await?;
        let kwok = fleet::start(&kerf.cluster, size.nodes, &json!({})).await?;
        let kubeconfigs = fleet::daemons_kubeconfigs(&kerf.cluster, size.nodes).await?;
        let state = kerf.cluster.dir().join("daemons-state");
        let kubelet = kerf.cluster.kubeconfig_path();
        let daemons = kerf.cluster.start_program("daemons", &built(daemons::PROGRAM)?, |command| {
            command.arg("--kubeconfigs").arg(kubeconfigs).arg("--kubelet").arg(kubelet);
            command.arg("--state").arg(state);
        })?;
        let mut large = Self { kerf, kwok, daemons };
        let policy =
            json!({ "nodeSelector": { "matchLabels": { "pool": "gpu" } }, "mig": { "mode": "Dynamic" } });
        large.kerf.policy("default", policy).await?;
        let outcome = large.managed(size.nodes).await;
        large.daemons.check()?;
        outcome?;
        Ok(large)
    }

    async fn managed(&self, nodes: usize) -> Result<()> {
        let api: Api<GpuNode> = Api::all(self.kerf.client());
        eventually(PATIENCE, format!("the GPUs of {nodes} nodes managed"), || async {
            sleep(Duration::from_secs(1)).await;
            let all = api.list(&Default::default()).await?;
            let done = all.iter().filter(|node| {
                let status = node.status.as_ref();
                !node.spec.gpus.is_empty()
                    && status.is_some_and(|status| {
                        status.gpus.len() == node.spec.gpus.len()
                            && status.observed_generation == node.metadata.generation
                    })
            });
            Ok(Seen::when(done.count(), |done| *done == nodes))
        })
        .await
        .map(drop)
    }

    /// Has pods of the mix placed that were there before the operator was started.
    ///
    /// # Errors
    /// They are not all bound.
    pub async fn measure(&self, size: &Size) -> Result<(Before, Measured)> {
        let (kerf, client) = (&self.kerf, self.kerf.client());
        // Only its webhook is needed until then: somebody else holds the lease.
        kerf.stop_operator("operator", Duration::from_secs(30)).await?;
        let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.000000Z").to_string();
        let held = json!({ "spec": { "holderIdentity": "nobody", "leaseDurationSeconds": 36000, "renewTime": now } });
        leases.patch("kerf-operator", &PatchParams::default(), &Patch::Merge(held)).await?;
        kerf.start_operator("operator").await?;
        kerf.wait_admission().await?;
        fleet::namespace(&client, PODS, true).await?;
        let pods = (0..size.pods).map(|number| {
            let profile = MIX[number % MIX.len()];
            let resource = crate::kerf::mig(profile);
            fleet::pod(
                &format!("{}-{number}", &profile[..2]),
                json!({}),
                json!({ "limits": { resource: "1" } }),
            )
        });
        fleet::create_pods(&client, PODS, pods.collect()).await?;
        kerf.stop_operator("operator", Duration::from_secs(30)).await?;
        leases.delete("kerf-operator", &DeleteParams::default()).await?;
        sleep(QUIET).await;
        let before = self.before().await?;
        let others = [("kwok", self.kwok.pid()), ("daemons (stand-in)", self.daemons.pid())];
        let mut phase = Phase::begin(&kerf.cluster, &others).await?;
        kerf.start_operator("operator").await?;
        let operator = eventually(PATIENCE, "the operator's process", || async {
            Ok(kerf.operator_pid("operator").await.map_or_else(|| Seen::not_yet("none"), Seen::Yes))
        })
        .await?;
        phase.add("kerf-operator", operator);
        let measured = phase.bound(&kerf.cluster, size.pods, PATIENCE).await?;
        kerf.check_operators().await?;
        Ok((before, measured))
    }

    async fn before(&self) -> Result<Before> {
        let client = self.kerf.client();
        let all = Default::default();
        Ok(Before {
            nodes: Api::all(client.clone()).list(&all).await?.items,
            gpu_nodes: Api::all(client.clone()).list(&all).await?.items,
            policies: Api::all(client.clone()).list(&all).await?.items,
            classes: Api::all(client.clone()).list(&all).await?.items,
            slices: Api::all(client.clone()).list(&all).await?.items,
            pods: Api::namespaced(client.clone(), PODS).list(&all).await?.items,
        })
    }

    /// Checks that no slice of any GPU is promised twice, and that every pod has its claim's place on its node.
    ///
    /// # Errors
    /// Says which.
    pub async fn check(&self, pods: usize) -> Result<()> {
        let nodes: Api<GpuNode> = Api::all(self.kerf.client());
        let mut owned = 0;
        for node in nodes.list(&Default::default()).await? {
            let entries = &node.spec.partitions;
            owned += entries.len();
            for (index, one) in entries.iter().enumerate() {
                let overlaps = |other: &&kerf_crds::gpu_node::Partition| {
                    other.gpu == one.gpu
                        && match (&other.instance, &one.instance) {
                            (Some(a), Some(b)) => a.placement.overlaps(&b.placement),
                            _ => true,
                        }
                };
                if let Some(other) = entries[..index].iter().find(overlaps) {
                    anyhow::bail!("{}: {one:?} and {other:?} overlap", node.name_any());
                }
            }
        }
        anyhow::ensure!(owned == pods, "{owned} entries for {pods} pods");
        Ok(())
    }

    /// Has the logs outlive the cluster.
    pub fn keep_logs(&self) {
        self.kerf.cluster.keep_logs();
    }

    /// The folder of the logs.
    ///
    /// # Errors
    /// There is none.
    pub fn log(&self, name: &str) -> Result<String> {
        let file = self.kerf.cluster.log_dir().join(name);
        std::fs::read_to_string(&file).with_context(|| format!("failed to read {}", file.display()))
    }
}
