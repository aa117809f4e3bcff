//! Pods from creation to binding.

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kerf_crds::{GpuNode, PartitionPolicy, names};
use kerf_e2e::{Component, Seen, eventually};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::played::{Daemon, Operator, control_plane, create, dynamic_policy, node};

const SOON: Duration = Duration::from_secs(30);

/// A pod as the webhook leaves it.
fn gated(name: &str, resource: &str, cpu: &str) -> Value {
    let original = json!({"containers": [{"name": "main", "resources": {resource: 1}}]});
    json!({
        "metadata": {"name": name, "annotations": {names::ORIGINAL_RESOURCES: original.to_string()}},
        "spec": {
            "schedulingGates": [{"name": names::GATE}],
            "resourceClaims": [{"name": names::POD_CLAIM, "resourceClaimName": format!("claim-of-{name}")}],
            "containers": [{"name": "main", "image": "none", "resources": {
                "requests": {"cpu": cpu},
                "claims": [{"name": names::POD_CLAIM}],
            }}],
        },
    })
}

fn pods(client: &Client) -> Api<Pod> {
    Api::namespaced(client.clone(), "default")
}

async fn bound(client: &Client, name: &str) -> Result<String> {
    let pods = pods(client);
    eventually(SOON, &format!("pod {name} is bound"), || async {
        let pod = pods.get(name).await?;
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        Ok(match node {
            Some(node) => Seen::Yes(node),
            None => Seen::not_yet(format!("{:?}", pod.status.and_then(|status| status.conditions))),
        })
    })
    .await
}

async fn condition(client: &Client, name: &str, reason: &str) -> Result<String> {
    let pods = pods(client);
    eventually(SOON, &format!("pod {name} says {reason}"), || async {
        let pod = pods.get(name).await?;
        let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        let said = conditions.into_iter().find(|c| c.type_ == kerf_crds::conditions::pod::PLANNED);
        Ok(match said {
            Some(said) if said.reason.as_deref() == Some(reason) => {
                Seen::Yes(said.message.unwrap_or_default())
            }
            other => Seen::not_yet(format!("{other:?}")),
        })
    })
    .await
}

async fn partitions(client: &Client, node: &str) -> Result<usize> {
    Ok(Api::<GpuNode>::all(client.clone()).get(node).await?.spec.partitions.len())
}

#[test]
fn pods_are_allocated_ahead_bound_and_their_places_come_back() -> Result<()> {
    kerf_e2e::shared::runtime().block_on(async {
        let cluster = control_plane().await?;
        let client = cluster.client();
        node(&client, "n1", "8").await?;
        node(&client, "n2", "8").await?;
        let _n1 = Daemon::start(&client, "n1", 1, true).await?;
        let _n2 = Daemon::start(&client, "n2", 1, false).await?;
        dynamic_policy(&client, json!({"mode": "Dynamic"})).await?;
        let operator = Operator::start(&client, "first", cluster.free_port()?)?;

        // Two halves, on one GPU or two; then no room for a whole one more than there are.
        for name in ["a", "b", "c"] {
            create(&pods(&client), gated(name, "nvidia.com/mig-3g.40gb", "100m")).await?;
        }
        for name in ["a", "b", "c"] {
            bound(&client, name).await?;
        }
        let policies: Api<PartitionPolicy> = Api::all(client.clone());
        eventually(SOON, "the policy is applied", || async {
            let status = policies.get("all").await?.status.unwrap_or_default();
            Ok(if status.layout_summary == "3x 3g.40gb" && status.gpus == 2 && status.nodes == 2 {
                Seen::Yes(())
            } else {
                Seen::not_yet(format!("{status:?}"))
            })
        })
        .await?;
        create(&pods(&client), gated("big", "nvidia.com/mig-7g.80gb", "100m")).await?;
        let message = condition(&client, "big", "NoRoom").await?;
        assert!(message.contains("7g.80gb"), "{message}");
        create(&pods(&client), gated("odd", "nvidia.com/mig-9g.90gb", "100m")).await?;
        condition(&client, "odd", "NoSuchProfile").await?;

        // The pod alone on its GPU ends, and the big one comes by itself.
        for name in ["a", "b", "c"] {
            pods(&client)
                .delete(name, &DeleteParams { grace_period_seconds: Some(0), ..Default::default() })
                .await?;
        }
        bound(&client, "big").await?;
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
        eventually(SOON, "claims and records of the ended pods are gone", || async {
            let claims = claims.list(&Default::default()).await?.items.len();
            let entries = partitions(&client, "n1").await? + partitions(&client, "n2").await?;
            Ok(if (claims, entries) == (1, 1) {
                Seen::Yes(())
            } else {
                Seen::not_yet(format!("{claims} {entries}"))
            })
        })
        .await?;
        let classes: Api<DeviceClass> = Api::all(client.clone());
        let class = classes.get("mig-1g.10gb.kerf.dev").await?;
        assert_eq!(
            class.spec.and_then(|spec| spec.extended_resource_name).as_deref(),
            Some("nvidia.com/mig-1g.10gb")
        );
        operator.stop().await?;

        // Another takes over where the first stopped.
        pods(&client)
            .delete("big", &DeleteParams { grace_period_seconds: Some(0), ..Default::default() })
            .await?;
        create(&pods(&client), gated("late", "nvidia.com/mig-2g.20gb", "100m")).await?;
        let operator = Operator::start(&client, "second", cluster.free_port()?)?;
        bound(&client, "late").await?;
        operator.stop().await?;
        cluster.end()
    })
}

/// A pod that refers to a claim of its user; it has no gate.
fn claiming(name: &str, claim: &str, cpu: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
            "containers": [{"name": "main", "image": "none", "resources": {
                "requests": {"cpu": cpu}, "claims": [{"name": "gpu"}],
            }}],
        },
    })
}

fn claim(name: &str, profile: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [
        {"name": "mig", "exactly": {"deviceClassName": "mig.kerf.dev", "selectors": [
            {"cel": {"expression": format!("device.attributes['gpu.kerf.dev'].profile == '{profile}'")}},
        ]}},
    ]}}})
}

async fn delete_pod(client: &Client, name: &str) -> Result<()> {
    let parameters = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    pods(client).delete(name, &parameters).await?;
    Ok(())
}

async fn set_cordon(client: &Client, node: &str, cordoned: bool) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = json!({"spec": {"unschedulable": cordoned}});
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

/// Where a claim is allocated.
async fn pool(client: &Client, claim: &str) -> Result<Option<String>> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
    let status = claims.get(claim).await?.status;
    let devices = status.and_then(|status| status.allocation).and_then(|allocation| allocation.devices);
    Ok(devices
        .and_then(|devices| devices.results)
        .and_then(|mut results| results.pop())
        .map(|result| result.pool))
}

/// The kinds of what a claim is reserved for.
async fn consumers(client: &Client, claim: &str) -> Result<Vec<String>> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
    let status = claims.get(claim).await?.status;
    let consumers = status.and_then(|status| status.reserved_for).unwrap_or_default();
    Ok(consumers.into_iter().map(|consumer| consumer.resource).collect())
}

#[test]
fn claims_of_users_quotas_and_places_that_do_not_work_out() -> Result<()> {
    kerf_e2e::shared::runtime().block_on(async {
        let cluster = control_plane().await?;
        let client = cluster.client();
        node(&client, "n1", "4").await?;
        let _n1 = Daemon::start(&client, "n1", 1, true).await?;
        dynamic_policy(&client, json!({"mode": "Dynamic"})).await?;
        // Two operators: one decides.
        let first = Operator::start(&client, "first", cluster.free_port()?)?;
        let second = Operator::start(&client, "second", cluster.free_port()?)?;

        // A user's claim, in use by two pods one after the other, both without a gate.
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
        create(&claims, claim("shared", "2g.20gb")).await?;
        create(&pods(&client), claiming("u1", "shared", "100m")).await?;
        bound(&client, "u1").await?;
        create(&pods(&client), claiming("u2", "shared", "100m")).await?;
        bound(&client, "u2").await?;
        assert_eq!(partitions(&client, "n1").await?, 1);
        delete_pod(&client, "u1").await?;
        delete_pod(&client, "u2").await?;
        eventually(SOON, "the shared claim's place is free", || async {
            Ok(if partitions(&client, "n1").await? == 0 { Seen::Yes(()) } else { Seen::not_yet("on record") })
        })
        .await?;
        create(&pods(&client), claiming("u3", "shared", "100m")).await?;
        bound(&client, "u3").await?;
        delete_pod(&client, "u3").await?;

        // A quota on the extended resource counts the operator's claims.
        let quotas: Api<ResourceQuota> = Api::namespaced(client.clone(), "default");
        let hard = json!({"requests.nvidia.com/mig-1g.10gb": "1"});
        create(&quotas, json!({"metadata": {"name": "q"}, "spec": {"hard": hard}})).await?;
        eventually(SOON, "the quota is counted", || async {
            let status = quotas.get("q").await?.status.and_then(|status| status.used);
            Ok(status.map_or_else(|| Seen::not_yet("not yet"), Seen::Yes))
        })
        .await?;
        create(&pods(&client), gated("within", "nvidia.com/mig-1g.10gb", "100m")).await?;
        bound(&client, "within").await?;
        create(&pods(&client), gated("beyond", "nvidia.com/mig-1g.10gb", "100m")).await?;
        let message = condition(&client, "beyond", "QuotaExceeded").await?;
        assert!(message.contains("exceeded quota"), "{message}");
        delete_pod(&client, "within").await?;
        bound(&client, "beyond").await?;
        delete_pod(&client, "beyond").await?;

        // No CPU anywhere; then a node that has some.
        create(&pods(&client), gated("thirsty", "nvidia.com/mig-3g.40gb", "6")).await?;
        condition(&client, "thirsty", "NodesDoNotFit").await?;
        node(&client, "n2", "8").await?;
        let _n2 = Daemon::start(&client, "n2", 1, true).await?;
        assert_eq!(bound(&client, "thirsty").await?, "n2");
        delete_pod(&client, "thirsty").await?;

        // A place on a node that is cordoned before kube-scheduler binds: another is found.
        create(&pods(&client), with_gate(gated("moved", "nvidia.com/mig-3g.40gb", "100m"))).await?;
        condition(&client, "moved", "OtherGates").await?;
        cluster.stop(Component::Scheduler).await?;
        remove_other_gate(&client, "moved").await?;
        condition(&client, "moved", "Allocated").await?;
        let home = pool(&client, "claim-of-moved").await?.unwrap_or_default();
        set_cordon(&client, &home, true).await?;
        eventually(SOON, "the claim is allocated elsewhere", || async {
            Ok(match pool(&client, "claim-of-moved").await? {
                Some(pool) if pool != home => Seen::Yes(()),
                other => Seen::not_yet(format!("{other:?}")),
            })
        })
        .await?;
        cluster.start_component(Component::Scheduler).await?;
        assert_ne!(bound(&client, "moved").await?, home);
        set_cordon(&client, &home, false).await?;

        // The node's CPU goes just before kube-scheduler looks, and there is no other: it throws the allocation away,
        // gets it again under a hold, and binds when there is room; then the hold is released.
        delete_pod(&client, "moved").await?;
        let mut filler = gated("filler", "nvidia.com/mig-7g.80gb", "100m");
        filler["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "n2"});
        create(&pods(&client), filler).await?;
        bound(&client, "filler").await?;
        cluster.stop(Component::Scheduler).await?;
        create(&pods(&client), gated("patient", "nvidia.com/mig-1g.10gb", "3")).await?;
        condition(&client, "patient", "Allocated").await?;
        let blocker = json!({"metadata": {"name": "blocker"}, "spec": {"nodeName": "n1", "containers": [
            {"name": "main", "image": "none", "resources": {"requests": {"cpu": "3"}}}]}});
        create(&pods(&client), blocker).await?;
        cluster.start_component(Component::Scheduler).await?;
        eventually(SOON, "the allocation is held", || async {
            let consumers = consumers(&client, "claim-of-patient").await?;
            Ok(if consumers.len() == 2 { Seen::Yes(()) } else { Seen::not_yet(format!("{consumers:?}")) })
        })
        .await?;
        delete_pod(&client, "blocker").await?;
        bound(&client, "patient").await?;
        eventually(SOON, "the hold is released", || async {
            let consumers = consumers(&client, "claim-of-patient").await?;
            Ok(if consumers == ["pods"] { Seen::Yes(()) } else { Seen::not_yet(format!("{consumers:?}")) })
        })
        .await?;
        delete_pod(&client, "patient").await?;

        first.stop().await?;
        create(&pods(&client), gated("after", "nvidia.com/mig-1g.10gb", "100m")).await?;
        bound(&client, "after").await?;
        second.stop().await?;
        cluster.end()
    })
}

fn with_gate(mut pod: Value) -> Value {
    pod["spec"]["schedulingGates"] = json!([{"name": "example.com/later"}, {"name": names::GATE}]);
    pod
}

async fn remove_other_gate(client: &Client, name: &str) -> Result<()> {
    let patch = json!({"spec": {"schedulingGates": [
        {"name": "example.com/later", "$patch": "delete"},
    ]}});
    pods(client).patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await?;
    Ok(())
}
