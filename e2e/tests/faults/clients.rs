//! A GPU that a monitor holds open: left as it is with the reason, and freed where the policy lets the monitor be
//! restarted.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::kerf::{JOB, Kerf, KerfOptions, PATIENCE, alone, for_node, gpu_pod, mig, on};
use kerf_e2e::{Seen, eventually};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

/// A DaemonSet of monitors that have one GPU of each node open, but run nothing on it.
async fn monitor(kerf: &Kerf, namespace: &str, name: &str, minor: u32) -> Result<()> {
    let labels = json!({ "app": name });
    let node = format!("dev/nvidia{minor}");
    let container = json!({
        "name": "main", "image": JOB, "imagePullPolicy": "Never",
        "command": ["/usr/local/bin/kerf-sim-job"], "args": ["--monitor", "--dev", "/gpu/dev"],
        "volumeMounts": [{ "name": "gpu", "mountPath": format!("/gpu/{node}") }],
    });
    let source = json!({ "path": format!("/run/nvidia/driver/{node}"), "type": "CharDevice" });
    let set = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "terminationGracePeriodSeconds": 1, "containers": [container],
                    "volumes": [{ "name": "gpu", "hostPath": source }],
                },
            },
        },
    });
    apply_yaml(&kerf.client(), &set.to_string()).await?;
    Ok(())
}

/// The UID of a DaemonSet's only pod, once it runs and is another than `before`.
async fn running(kerf: &Kerf, namespace: &str, app: &str, before: Option<&str>) -> Result<String> {
    let of_app = ListParams::default().labels(&format!("app={app}"));
    eventually(PATIENCE, format!("a pod of {app} other than {before:?}"), || async {
        let pods = kerf.pods(namespace).list(&of_app).await?.items;
        Ok(match pods.as_slice() {
            [pod] if pod.uid().as_deref() != before => {
                let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
                let uid = pod.uid().context("a pod without a UID")?;
                if phase.as_deref() == Some("Running") {
                    Seen::Yes(uid)
                } else {
                    Seen::NotYet(format!("{phase:?}"))
                }
            }
            pods => Seen::NotYet(format!("{} pods", pods.len())),
        })
    })
    .await
}

/// The names of the pods that were evicted, from the events on them.
async fn evicted(kerf: &Kerf, namespace: &str) -> Result<Vec<String>> {
    let events: Api<Event> = Api::namespaced(kerf.client(), namespace);
    let of_pods = ListParams::default().fields("involvedObject.kind=Pod,reason=Evicted");
    let events = events.list(&of_pods).await?.items;
    Ok(events.into_iter().filter_map(|event| event.involved_object.name).collect())
}

#[test]
fn a_monitor_that_holds_a_gpu_is_restarted_where_the_policy_says_so() {
    let node = "clients-a";
    alone(KerfOptions::nodes(&[(node, "a100-80", 2)]), move |kerf| async move {
        let namespace = kerf.namespace("clients").await?;
        monitor(&kerf, &namespace, "exporter", 0).await?;
        monitor(&kerf, &namespace, "other", 1).await?;
        let exporter = running(&kerf, &namespace, "exporter", None).await?;
        let other = running(&kerf, &namespace, "other", None).await?;

        // Nobody may be restarted: both GPUs stay as they are, and the policy says why.
        let mut spec = for_node(node, json!({ "mode": "Dynamic", "modeSwitch": "WithReset" }));
        kerf.policy(node, spec.clone()).await?;
        kerf.create_pod(&namespace, &on(node, gpu_pod("waiting", &[(&mig("1g.10gb"), 1)]))).await?;
        let why = kerf.wait_policy(node, "Ready", "False", "Blocked").await?;
        for part in ["switch MIG on", "held by kerf-sim-job", "restartableClients lets nobody be restarted"] {
            ensure!(why.contains(part), "{why:?} does not say {part:?}");
        }
        // Ampere tells what it can be cut into only in MIG mode.
        kerf.wait_reason(&namespace, "waiting", "NoSuchProfile").await?;
        let sim = kerf.sim(node)?;
        ensure!(sim.state()?.gpus.iter().all(|gpu| !gpu.mig_current), "a GPU was switched while it was held");
        ensure!(running(&kerf, &namespace, "exporter", None).await? == exporter, "restarted unasked");

        // The exporter may be: its GPU is switched before its next pod comes, and serves.
        let selector = json!({ "matchLabels": { "app": "exporter" } });
        spec["reshape"] =
            json!({ "restartableClients": [{ "namespace": namespace, "podSelector": selector }] });
        kerf.policy(node, spec).await?;
        let served = kerf.wait_running(&namespace, "waiting").await?;
        running(&kerf, &namespace, "exporter", Some(&exporter)).await?;
        let gpus = sim.state()?.gpus.clone();
        ensure!(served.devices[0].gpu == gpus[0].uuid, "{served:?} is not on the GPU that was freed");

        // The other one may not, and stays in the way of its own GPU.
        let nobody = "is selected by no entry of spec.reshape.restartableClients";
        eventually(PATIENCE, "the policy saying who is in the way", || async {
            let why = kerf.wait_policy(node, "Ready", "False", "Blocked").await?;
            Ok(Seen::when(why, |why| why.contains("GPU 1") && why.contains("other-") && why.contains(nobody)))
        })
        .await?;
        ensure!(running(&kerf, &namespace, "other", None).await? == other, "restarted though nobody said so");
        ensure!(!gpus[1].mig_current, "switched while it was held");
        let evicted = evicted(&kerf, &namespace).await?;
        ensure!(evicted.len() == 1 && evicted[0].starts_with("exporter-"), "evicted: {evicted:?}");
        kerf.delete_pod(&namespace, "waiting").await
    });
}
