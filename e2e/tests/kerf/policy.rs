//! Policies: static layouts, warm instances, edits while pods run, conflicts, and what cannot work.

use anyhow::{Result, ensure};
use kerf_crds::gpu_node::{Owner, PolicyInstance};
use kerf_e2e::kerf::{Kerf, PATIENCE, for_node, gpu_pod, mig, on};
use kerf_e2e::{Seen, eventually};
use serde_json::json;

use crate::shared::test;

/// Waits until the node's instances are, by profile and sorted, exactly these.
async fn wait_layout(kerf: &Kerf, node: &str, expected: &[&str]) -> Result<()> {
    let mut expected: Vec<String> = expected.iter().map(|profile| (*profile).to_owned()).collect();
    expected.sort();
    let sim = kerf.sim(node)?;
    eventually(PATIENCE, format!("{node} cut into {expected:?}"), || async {
        let mut found: Vec<String> = sim.instances()?.into_iter().map(|instance| instance.profile).collect();
        found.sort();
        Ok(Seen::when(found, |found| *found == expected))
    })
    .await?;
    Ok(())
}

#[test]
fn static_warm_edited_conflicting_and_deleted_policies() {
    test("policy", |kerf, namespace| async move {
        let node = "policy-a";

        // A static layout is made on every matched GPU, and pods take its instances.
        let layout = json!([{ "profile": "3g.40gb", "count": 1 }, { "profile": "1g.10gb", "count": 3 }]);
        kerf.policy(node, for_node(node, json!({ "mode": "Static", "layout": layout }))).await?;
        let one_gpu = ["3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb"];
        wait_layout(kerf, node, &[one_gpu, one_gpu].concat()).await?;
        kerf.wait_policy(node, "Ready", "True", "Applied").await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("a", &[(&mig("3g.40gb"), 1)]))).await?;
        let a = kerf.wait_running(&namespace, "a").await?;
        let counts = kerf.sim(node)?.counts()?;
        ensure!(counts.iter().map(|c| c.gpu_instances_created).sum::<u64>() == 8, "not reused: {counts:?}");

        // What the layout does not have is refused with the reason, not made.
        kerf.create_pod(&namespace, &on(node, gpu_pod("never", &[(&mig("7g.80gb"), 1)]))).await?;
        let why = kerf.wait_no_place(&namespace, "never").await?;
        ensure!(why.contains("7g.80gb"), "{why}");
        kerf.delete_pod(&namespace, "never").await?;

        // An edit while a pod runs: its instance stays as it is, all else changes.
        let layout = json!([{ "profile": "2g.20gb", "count": 1 }]);
        kerf.policy(node, for_node(node, json!({ "mode": "Static", "layout": layout }))).await?;
        eventually(PATIENCE, "the new layout beside the running pod", || async {
            let found: Vec<String> = kerf.sim(node)?.instances()?.into_iter().map(|i| i.profile).collect();
            let two = found.iter().filter(|p| *p == "2g.20gb").count();
            Ok(Seen::when(found, |_| two == 2))
        })
        .await?;
        let now = kerf.wait_running(&namespace, "a").await?;
        ensure!(
            now.devices == a.devices,
            "the pod's instance changed from {:?} to {:?}",
            a.devices,
            now.devices
        );

        // Warm instances are kept, taken and replaced; they give way to what needs their slices.
        kerf.delete_pod(&namespace, "a").await?;
        let warm = json!({ "mode": "Dynamic", "warm": [{ "profile": "1g.10gb", "count": 2 }] });
        kerf.policy(node, for_node(node, warm)).await?;
        eventually(PATIENCE, "two warm instances", || warm_count(kerf, node, 2)).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("b", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_running(&namespace, "b").await?;
        eventually(PATIENCE, "the warm instance replaced", || warm_count(kerf, node, 2)).await?;
        for name in ["c", "d"] {
            kerf.create_pod(&namespace, &on(node, gpu_pod(name, &[(&mig("3g.40gb"), 1)]))).await?;
            kerf.wait_running(&namespace, name).await?;
        }

        // A deleted policy leaves running pods alone, and serves no new ones.
        kerf.delete_policy(node).await?;
        eventually(PATIENCE, "the policy's own entries gone", || warm_count(kerf, node, 0)).await?;
        kerf.wait_running(&namespace, "b").await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("e", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_no_place(&namespace, "e").await?;
        Ok(())
    });
}

async fn warm_count(kerf: &Kerf, node: &str, expected: usize) -> Result<Seen<usize>> {
    let spec = kerf.gpu_nodes().get(node).await?.spec;
    let warm = |owner: &Owner| matches!(owner, Owner::Policy(p) if p.kind == PolicyInstance::Warm);
    let count = spec.partitions.iter().filter(|partition| warm(&partition.owner)).count();
    Ok(Seen::when(count, |count| *count == expected))
}

#[test]
fn two_policies_on_one_gpu_conflict_and_the_gpu_is_left_as_it_is() {
    test("conflict", |kerf, namespace| async move {
        let node = "policy-b";
        kerf.policy("conflict-1", for_node(node, json!({ "mode": "Dynamic" }))).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("a", &[(&mig("2g.20gb"), 1)]))).await?;
        let a = kerf.wait_running(&namespace, "a").await?;
        let layout = json!([{ "profile": "7g.80gb" }]);
        kerf.policy("conflict-2", for_node(node, json!({ "mode": "Static", "layout": layout }))).await?;
        for (policy, other) in [("conflict-1", "conflict-2"), ("conflict-2", "conflict-1")] {
            let why = kerf.wait_policy(policy, "Conflict", "True", "SharedGpu").await?;
            ensure!(why.contains(other) && why.contains("left as they are"), "{policy}: {why}");
        }
        let counts = kerf.sim(node)?.counts()?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("b", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_no_place(&namespace, "b").await?;
        ensure!(kerf.sim(node)?.counts()? == counts, "the hardware was touched");
        let now = kerf.wait_running(&namespace, "a").await?;
        ensure!(now.devices == a.devices, "{:?}", now.devices);
        // One of them goes: the other serves again.
        kerf.delete_policy("conflict-2").await?;
        kerf.wait_policy("conflict-1", "Conflict", "False", "NoConflict").await?;
        kerf.wait_running(&namespace, "b").await?;
        kerf.delete_policy("conflict-1").await
    });
}

#[test]
fn what_depends_on_nodes_becomes_a_condition() {
    test("conditions", |kerf, _namespace| async move {
        kerf.policy("nowhere", for_node("no-such-node", json!({ "mode": "Dynamic" }))).await?;
        kerf.wait_policy("nowhere", "Ready", "False", "NoGpuMatched").await?;
        kerf.delete_policy("nowhere").await?;
        // The nodes of this test module are busy; a policy on a GPU index that the node lacks touches nothing.
        let mut spec = for_node("policy-a", json!({ "mode": "Dynamic", "allowedProfiles": ["9g.*"] }));
        spec["gpus"] = json!({ "indices": [9] });
        kerf.policy("no-profile", spec).await?;
        kerf.wait_policy("no-profile", "Ready", "False", "NoGpuMatched").await?;
        kerf.delete_policy("no-profile").await
    });
}
