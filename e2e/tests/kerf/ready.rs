//! When a node takes pods.

use anyhow::Result;
use kerf_crds::conditions::{node, node_reason};
use kerf_e2e::kerf::{Kerf, PATIENCE, for_node, gpu_pod, mig, on};
use kerf_e2e::{Seen, eventually};
use serde_json::json;

use crate::shared::test;

async fn wait_ready(kerf: &Kerf, name: &str, status: &str, reason: &str) -> Result<()> {
    eventually(PATIENCE, format!("GpuNode {name} with Ready {status}, {reason}"), || async {
        let conditions = kerf.gpu_nodes().get(name).await?.status.unwrap_or_default().conditions;
        let ready = conditions.into_iter().find(|condition| condition.type_ == node::READY);
        let holds = ready.as_ref().is_some_and(|ready| ready.status == status && ready.reason == reason);
        Ok(if holds { Seen::Yes(()) } else { Seen::NotYet(format!("{ready:?}")) })
    })
    .await
}

#[test]
fn a_node_takes_pods_only_while_kubelet_knows_the_plugin() {
    test("ready", |kerf, namespace| async move {
        let name = "health-a";
        kerf.policy(name, for_node(name, json!({ "mode": "Dynamic" }))).await?;
        wait_ready(kerf, name, "True", node_reason::FOLLOWING).await?;
        kerf.cluster.node(name).stop_kubelet().await?;
        wait_ready(kerf, name, "False", node_reason::NOT_REGISTERED).await?;
        kerf.create_pod(&namespace, &on(name, gpu_pod("a", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_reason(&namespace, "a", "NodesDoNotFit").await?;
        kerf.cluster.node(name).start_kubelet().await?;
        kerf.wait_running(&namespace, "a").await?;
        wait_ready(kerf, name, "True", node_reason::FOLLOWING).await?;
        kerf.delete_pod(&namespace, "a").await?;
        kerf.delete_policy(name).await
    });
}
