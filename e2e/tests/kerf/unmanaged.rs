//! GPUs that are somebody else's, and GPUs that fail.

use anyhow::{Result, ensure};
use kerf_crds::gpu_node::Gpu;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::kerf::{Kerf, PATIENCE, for_node, gpu_pod, mig, on};
use kerf_e2e::{Seen, eventually};
use serde_json::json;

use crate::shared::test;

async fn wait_gpu(
    kerf: &Kerf,
    node: &str,
    index: usize,
    what: &str,
    condition: impl Fn(&Gpu) -> bool,
) -> Result<Gpu> {
    eventually(PATIENCE, format!("GPU {index} of {node} {what}"), || async {
        let status = kerf.gpu_nodes().get(node).await?.status.unwrap_or_default();
        Ok(match status.gpus.into_iter().nth(index) {
            Some(gpu) => Seen::when(gpu, &condition),
            None => Seen::not_yet("no such GPU"),
        })
    })
    .await
}

fn unmanaged_as(reason: &'static str) -> impl Fn(&Gpu) -> bool {
    move |gpu| gpu.unmanaged.as_ref().is_some_and(|unmanaged| unmanaged.reason == reason)
}

#[test]
fn what_somebody_else_uses_is_left_alone_with_the_reason() {
    test("unmanaged", |kerf, namespace| async move {
        let node = "unmanaged-a";
        kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;

        // An instance that Kerf did not make: its GPU is out, the other serves.
        let sim = kerf.sim(node)?;
        sim.set_mig_mode(0, true)?;
        let foreign = sim.create_instance(0, "2g.20gb", Some(0), true)?;
        let gpu = wait_gpu(kerf, node, 0, "unmanaged", unmanaged_as("ForeignInstance")).await?;
        ensure!(gpu.instances.len() == 1 && gpu.instances[0].foreign, "{:?}", gpu.instances);
        let counts = sim.counts()?[0];
        for index in 0..7 {
            kerf.create_pod(&namespace, &on(node, gpu_pod(&format!("p{index}"), &[(&mig("1g.10gb"), 1)])))
                .await?;
        }
        for index in 0..7 {
            let pod = kerf.wait_running(&namespace, &format!("p{index}")).await?;
            ensure!(pod.devices[0].gpu != gpu.uuid, "{pod:?} is on the GPU with the foreign instance");
        }
        kerf.create_pod(&namespace, &on(node, gpu_pod("eighth", &[(&mig("1g.10gb"), 1)]))).await?;
        kerf.wait_no_place(&namespace, "eighth").await?;
        let why = gpu.unmanaged.map(|unmanaged| unmanaged.message).unwrap_or_default();
        ensure!(why.contains("Kerf did not make 2g.20gb"), "{why}");
        ensure!(sim.counts()?[0] == counts, "the hardware was touched");
        let instances = sim.instances()?;
        ensure!(
            instances.iter().any(|i| i.gpu == 0 && i.gi == foreign),
            "the foreign instance is gone: {instances:?}"
        );
        sim.remove_instance(0, foreign)?;
        kerf.wait_running(&namespace, "eighth").await?;

        // Another device plugin's resources: both GPUs are out, running pods stay.
        let patch = json!({ "status": { "capacity": { "nvidia.com/gpu": "2" }, "allocatable": { "nvidia.com/gpu": "2" } } });
        let text = patch.to_string();
        kerf.cluster
            .kubectl(&["patch", "node", node, "--subresource=status", "--type=merge", "-p", &text])
            .await?;
        wait_gpu(kerf, node, 1, "unmanaged", unmanaged_as("ForeignDevicePlugin")).await?;
        kerf.wait_running(&namespace, "p0").await?;
        let patch = json!({ "status": { "capacity": { "nvidia.com/gpu": null }, "allocatable": { "nvidia.com/gpu": null } } });
        let text = patch.to_string();
        kerf.cluster
            .kubectl(&["patch", "node", node, "--subresource=status", "--type=merge", "-p", &text])
            .await?;
        wait_gpu(kerf, node, 1, "managed again", |gpu| gpu.unmanaged.is_none()).await?;

        // Another DRA driver's slice.
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": "other-driver" },
            "spec": { "driver": "gpu.nvidia.com", "nodeName": node, "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
                "devices": [{ "name": "gpu-0" }] },
        });
        apply_yaml(&kerf.client(), &slice.to_string()).await?;
        wait_gpu(kerf, node, 0, "unmanaged", unmanaged_as("ForeignDraDriver")).await?;
        kerf.cluster.kubectl(&["delete", "resourceslice", "other-driver"]).await?;
        wait_gpu(kerf, node, 0, "managed again", |gpu| gpu.unmanaged.is_none()).await?;

        // An acting mig-manager.
        for (set, unset) in [
            ("nvidia.com/mig.config=all-1g.10gb", "nvidia.com/mig.config-"),
            ("nvidia.com/mig.config.state=success", "nvidia.com/mig.config.state-"),
        ] {
            let _ = unset;
            kerf.cluster.kubectl(&["label", "node", node, set]).await?;
        }
        wait_gpu(kerf, node, 0, "unmanaged", unmanaged_as("MigManager")).await?;
        kerf.cluster
            .kubectl(&["label", "node", node, "nvidia.com/mig.config-", "nvidia.com/mig.config.state-"])
            .await?;
        wait_gpu(kerf, node, 0, "managed again", |gpu| gpu.unmanaged.is_none()).await?;
        kerf.delete_policy(node).await
    });
}

#[test]
fn a_gpu_that_fails_takes_no_new_pods_and_the_policy_says_what_becomes_of_the_old() {
    test("health", |kerf, namespace| async move {
        let node = "health-a";
        let mut spec = for_node(node, json!({ "mode": "Dynamic" }));
        kerf.policy(node, spec.clone()).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("a", &[(&mig("7g.80gb"), 1)]))).await?;
        let a = kerf.wait_running(&namespace, "a").await?;
        let status = kerf.gpu_nodes().get(node).await?.status.unwrap_or_default();
        let index = status.gpus.iter().position(|gpu| gpu.uuid == a.devices[0].gpu).unwrap_or_default();
        let sim = kerf.sim(node)?;

        // An error that the application made is no failure of the device.
        sim.xid(index, None, 31)?;
        // One of the device is: the pod stays, the device is tainted, the pod's status says so.
        sim.xid(index, None, 79)?;
        wait_gpu(kerf, node, index, "unhealthy", |gpu| {
            gpu.unhealthy.as_ref().is_some_and(|why| why.message.contains("79"))
        })
        .await?;
        eventually(PATIENCE, "the device's health in the pod's status", || async {
            let pod = kerf.pods(&namespace).get("a").await?;
            let text = serde_json::to_string(&pod.status)?;
            Ok(if text.contains("\"health\":\"Unhealthy\"") { Seen::Yes(()) } else { Seen::NotYet(text) })
        })
        .await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("b", &[(&mig("7g.80gb"), 1)]))).await?;
        let b = kerf.wait_running(&namespace, "b").await?;
        ensure!(b.devices[0].gpu != a.devices[0].gpu, "{b:?} was placed on the failed GPU");
        kerf.create_pod(&namespace, &on(node, gpu_pod("c", &[(&mig("7g.80gb"), 1)]))).await?;
        kerf.wait_no_place(&namespace, "c").await?;
        kerf.wait_running(&namespace, "a").await?;

        // A daemon that starts anew has not forgotten it. NoExecute: the pod goes.
        let daemon =
            ["--selector=app.kubernetes.io/name=kerf-node-daemon", "--field-selector=spec.nodeName=health-a"];
        kerf.cluster.kubectl(&["delete", "pod", "--namespace=kerf-system", daemon[0], daemon[1]]).await?;
        spec["health"] = json!({ "taintEffect": "NoExecute" });
        kerf.policy(node, spec).await?;
        eventually(PATIENCE, "the pod on the failed GPU evicted", || async {
            let pod = kerf.pods(&namespace).get_opt("a").await?;
            let phase = pod.as_ref().and_then(|p| p.status.as_ref()).and_then(|s| s.phase.clone());
            Ok(match phase.as_deref() {
                None | Some("Failed" | "Succeeded") => Seen::Yes(()),
                Some(phase) => Seen::not_yet(phase),
            })
        })
        .await?;
        kerf.wait_running(&namespace, "b").await?;
        for pod in ["b", "c"] {
            kerf.delete_pod(&namespace, pod).await?;
        }
        kerf.delete_policy(node).await
    });
}
