//! Many short pods, one after the other through the same GPUs.

use anyhow::{Result, ensure};
use k8s_openapi::api::batch::v1::Job;
use kerf_e2e::kerf::{PATIENCE, gpu_container, mig};
use kerf_e2e::{Seen, eventually};
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::shared::test;

/// A Job of pods that run for half a second on one instance each.
fn job(name: &str, completions: u32, profile: &str) -> Result<Job> {
    let container: Value = gpu_container("main", &[(&mig(profile), 1)], &["--seconds", "0.5"]);
    Ok(serde_json::from_value(json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": name },
        "spec": {
            "completions": completions, "parallelism": completions, "backoffLimit": 0,
            "template": { "spec": {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
                "nodeSelector": { "test": "drain" },
                "containers": [container],
            } },
        },
    }))?)
}

#[test]
fn jobs_of_forty_pods_drain_and_leave_nothing() {
    test("drain", |kerf, namespace| async move {
        for node in ["drain-a", "drain-b"] {
            kerf.cluster.kubectl(&["label", "node", node, "test=drain", "--overwrite"]).await?;
        }
        kerf.policy(
            "drain",
            json!({
                "nodeSelector": { "matchLabels": { "test": "drain" } },
                "mig": { "mode": "Dynamic", "modeSwitch": "WithReset" },
            }),
        )
        .await?;
        let jobs: Api<Job> = Api::namespaced(kerf.client(), &namespace);
        for (name, completions, profile) in
            [("small", 24, "1g.10gb"), ("middle", 12, "2g.20gb"), ("big", 4, "7g.80gb")]
        {
            jobs.create(&PostParams::default(), &job(name, completions, profile)?).await?;
        }
        eventually(3 * PATIENCE, "all jobs complete", || async {
            let mut open = Vec::new();
            for job in jobs.list(&Default::default()).await? {
                let status = job.status.unwrap_or_default();
                ensure!(status.failed.unwrap_or(0) == 0, "a pod of job {:?} failed", job.metadata.name);
                if status.completion_time.is_none() {
                    open.push(format!("{:?}: {:?} succeeded", job.metadata.name, status.succeeded));
                }
            }
            if open.is_empty() { Ok(Seen::Yes(())) } else { Ok(Seen::NotYet(open.join(", "))) }
        })
        .await?;
        kerf.wait_no_leak(&namespace).await?;
        for node in ["drain-a", "drain-b"] {
            let instances = kerf.sim(node)?.instances()?;
            let status = kerf.gpu_nodes().get(node).await?.status.unwrap_or_default();
            let reported: usize = status.gpus.iter().map(|gpu| gpu.instances.len()).sum();
            ensure!(
                instances.len() == reported,
                "{node}: {} instances, {reported} reported",
                instances.len()
            );
            let whole = instances.iter().all(|instance| instance.compute.len() == 1);
            ensure!(whole, "{node} has an instance without its compute instance: {instances:?}");
            let foreign = status.gpus.iter().flat_map(|gpu| &gpu.instances).filter(|i| i.foreign).count();
            ensure!(foreign == 0, "{node}: Kerf does not know {foreign} instances that it made");
        }
        kerf.delete_policy("drain").await
    });
}
