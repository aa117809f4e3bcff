//! Pods are moved to make room for another, on real kubelets: whose owner allows it and whose disruption budget lets it
//! go, nobody else; and with the operator killed at each write of it.

use anyhow::{Context as _, Result, ensure};
use axum::http::Method;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, Running, alone, gpu_container, gpu_pod, mig};
use kerf_e2e::proxy::{Matching, Proxy, Side};
use kerf_e2e::{Seen, eventually};
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::json;

use crate::crash::{create, kill_when_stopped, proxied};

#[test]
fn a_pod_that_may_be_moved_makes_room_and_comes_back_elsewhere() {
    let mut options = KerfOptions::nodes(&[("moves-a", "h100-80-sxm", 1), ("moves-b", "h100-80-sxm", 1)]);
    options.operator = false;
    alone(options, |kerf| async move {
        let mut proxy = proxied(&kerf).await?;
        let namespace = kerf.namespace("moves").await?;
        let moves = json!({ "maxPods": 1, "afterSeconds": 0 });
        kerf.policy("moves", json!({ "mig": { "mode": "Dynamic" }, "reshape": { "moves": moves } })).await?;
        undisturbed(&kerf, &namespace).await?;
        for (what, write) in writes() {
            for side in [Side::Before, Side::After] {
                let name = format!("{what}-{side:?}").to_lowercase();
                interrupted(&kerf, &mut proxy, &namespace, &name, write.clone(), side)
                    .await
                    .with_context(|| format!("{side:?} {what}"))?;
            }
        }
        Ok(())
    });
}

/// The writes that a move is made of, besides those of every pod's life.
fn writes() -> [(&'static str, Matching); 2] {
    let write = |method, path, ends_with, body| Matching { method, path, ends_with, body };
    [
        ("reserve", write(Method::PUT, "/gpunodes/", "", Some("reservation"))),
        ("evict", write(Method::POST, "/pods/", "/eviction", None)),
    ]
}

/// A budget that lets nobody go is kept; once it lets one go, room is made.
async fn undisturbed(kerf: &Kerf, namespace: &str) -> Result<()> {
    let scattered = Scattered::arrange(kerf, namespace, "calm").await?;
    scattered.budget(kerf, 0).await?;
    create(kerf, namespace, &gpu_pod("calm-large", &[(&mig("7g.80gb"), 1)])).await?;
    eventually(PATIENCE, "moves looked into, and found useless", || async {
        let said = kerf.planned(namespace, "calm-large").await?;
        Ok(Seen::when(said, |said| {
            said.as_ref().is_some_and(|(_, reason, message)| {
                reason == "NoRoom"
                    && message.contains("moving others, as far as that is allowed, would not make room")
            })
        }))
    })
    .await?;
    let still = kerf.pods(namespace).get(&scattered.mover.pod).await?;
    ensure!(still.metadata.deletion_timestamp.is_none(), "evicted against its budget");
    scattered.budget(kerf, 1).await?;
    scattered.resolved(kerf, "calm-large").await?;
    let events = kerf.cluster.kubectl(&["-n", namespace, "get", "events", "-o", "wide"]).await?;
    let told = format!("evicted to make room for {namespace}/calm-large");
    ensure!(events.contains(&told), "no event tells the pod why it was moved:\n{events}");
    scattered.clear(kerf, "calm-large").await
}

/// The operator dies at the write; the next one ends what it began.
async fn interrupted(
    kerf: &Kerf,
    proxy: &mut Proxy,
    namespace: &str,
    name: &str,
    write: Matching,
    side: Side,
) -> Result<()> {
    let scattered = Scattered::arrange(kerf, namespace, name).await?;
    proxy.stop_next(write, side);
    let large = format!("{name}-large");
    create(kerf, namespace, &gpu_pod(&large, &[(&mig("7g.80gb"), 1)])).await?;
    kill_when_stopped(kerf, proxy, name).await?;
    scattered.resolved(kerf, &large).await?;
    scattered.clear(kerf, &large).await
}

/// On each of two GPUs one half is used: by a pod that may be moved, and by one whose owner has not said so.
struct Scattered {
    namespace: String,
    name: String,
    mover: Running,
    stays: Running,
}

impl Scattered {
    async fn arrange(kerf: &Kerf, namespace: &str, name: &str) -> Result<Self> {
        let block = |which: &str| format!("{name}-block-{which}");
        let mut halves = Vec::new();
        for (which, movable) in [("mover", true), ("stays", false)] {
            create(kerf, namespace, &gpu_pod(&block(which), &[(&mig("4g.40gb"), 1)])).await?;
            let beside = kerf.wait_running(namespace, &block(which)).await?;
            apply_yaml(&kerf.client(), &deployment(namespace, &format!("{name}-{which}"), movable)).await?;
            let half = only_pod(kerf, namespace, &format!("{name}-{which}"), None).await?;
            ensure!(half.node == beside.node, "{half:?} is not beside {beside:?}");
            halves.push(half);
        }
        for which in ["mover", "stays"] {
            kerf.delete_pod(namespace, &block(which)).await?;
        }
        let [mover, stays] = halves.try_into().map_err(|_| anyhow::anyhow!("two halves"))?;
        Ok(Self { namespace: namespace.into(), name: name.into(), mover, stays })
    }

    async fn budget(&self, kerf: &Kerf, may_go: u32) -> Result<()> {
        let budget = json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
            "metadata": { "name": "budget", "namespace": self.namespace },
            "spec": { "maxUnavailable": may_go, "selector": { "matchLabels": { "app": format!("{}-mover", self.name) } } },
        });
        apply_yaml(&kerf.client(), &budget.to_string()).await?;
        Ok(())
    }

    /// The large pod has the GPU of the one that was moved, this one's next has the other's free half, and the other never
    /// noticed.
    async fn resolved(&self, kerf: &Kerf, large: &str) -> Result<()> {
        let large = kerf.wait_running(&self.namespace, large).await?;
        ensure!(large.devices.len() == 1 && large.devices[0].profile == "7g.80gb", "{large:?}");
        ensure!(large.node == self.mover.node, "{large:?} is not where {:?} was", self.mover);
        let app = format!("{}-mover", self.name);
        let next = only_pod(kerf, &self.namespace, &app, Some(&self.mover.pod)).await?;
        ensure!(next.devices.len() == 1 && next.devices[0].profile == "3g.40gb", "{next:?}");
        ensure!(next.node == self.stays.node, "{next:?} is not beside {:?}", self.stays);
        let stays = only_pod(kerf, &self.namespace, &format!("{}-stays", self.name), None).await?;
        ensure!(
            (&stays.pod, &stays.devices) == (&self.stays.pod, &self.stays.devices),
            "{stays:?} was {:?}",
            self.stays
        );
        eventually(PATIENCE, "no reservation left", || async {
            let nodes = kerf.gpu_nodes().list(&ListParams::default()).await?;
            let left: Vec<String> = nodes
                .items
                .iter()
                .flat_map(|node| &node.spec.partitions)
                .filter(|partition| matches!(partition.owner, kerf_crds::gpu_node::Owner::Reservation(_)))
                .map(|partition| format!("{partition:?}"))
                .collect();
            Ok(Seen::when(left, Vec::is_empty))
        })
        .await?;
        Ok(())
    }

    async fn clear(&self, kerf: &Kerf, large: &str) -> Result<()> {
        for which in ["mover", "stays"] {
            let name = format!("{}-{which}", self.name);
            let delete = ["-n", &self.namespace, "delete", "deployment", &name, "--cascade=foreground"];
            kerf.cluster.kubectl(&delete).await?;
        }
        kerf.delete_pod(&self.namespace, large).await?;
        kerf.wait_no_leak(&self.namespace).await
    }
}

fn deployment(namespace: &str, name: &str, movable: bool) -> String {
    let annotations = if movable { json!({ "kerf.dev/movable": "true" }) } else { json!({}) };
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "replicas": 1, "selector": { "matchLabels": { "app": name } },
            "template": {
                "metadata": { "labels": { "app": name }, "annotations": annotations },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [gpu_container("main", &[(&mig("3g.40gb"), 1)], &[])],
                },
            },
        },
    })
    .to_string()
}

/// The one pod of the Deployment that is not on its way out, once it runs.
async fn only_pod(kerf: &Kerf, namespace: &str, app: &str, other_than: Option<&str>) -> Result<Running> {
    let name = eventually(PATIENCE, format!("a pod of {app}"), || async {
        let pods = kerf.pods(namespace).list(&ListParams::default().labels(&format!("app={app}"))).await?;
        let there = pods.items.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let names: Vec<String> = there.map(|pod| pod.name_any()).collect();
        Ok(match names.as_slice() {
            [name] if Some(name.as_str()) != other_than => Seen::Yes(name.clone()),
            _ => Seen::not_yet(format!("{names:?}")),
        })
    })
    .await?;
    kerf.wait_running(namespace, &name).await
}
