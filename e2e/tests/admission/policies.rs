//! Policies that cannot work are refused with the field and the remedy.

use anyhow::{Context as _, Result, ensure};
use kerf_crds::{GpuNode, GpuNodeStatus, PartitionPolicy};
use kerf_e2e::kerf::{Kerf, repository};
use kerf_e2e::{Seen, eventually};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{has_all, kubectl, refused, test};

fn policy(name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "kerf.dev/v1alpha1", "kind": "PartitionPolicy", "metadata": { "name": name }, "spec": spec })
}

#[test]
fn the_samples_are_accepted() {
    test(|kerf| async move {
        let samples = repository("policies/samples");
        let all = samples.to_str().context("a path that is text")?;
        let said = kerf.cluster.kubectl(&["apply", "--dry-run=server", "-f", all]).await?;
        let number = std::fs::read_dir(&samples)?.count();
        ensure!(said.lines().count() == number, "{number} samples, and the API server says:\n{said}");
        Ok(())
    });
}

#[test]
fn what_the_schema_forbids() {
    let layout = json!([{ "profile": "1g.10gb" }]);
    let cases: Vec<(Value, &[&str])> = vec![
        (json!({ "mig": { "mod": "Static" } }), &["unknown field \"spec.mig.mod\""]),
        (json!({ "gpu": {} }), &["unknown field \"spec.gpu\""]),
        (json!({ "mig": { "mode": "Sometimes" } }), &["spec.mig.mode", "\"Dynamic\", \"Static\", \"Off\""]),
        (json!({ "mig": { "mode": "Static" } }), &["mig.layout: state the layout with mode Static"]),
        (
            json!({ "mig": { "mode": "Static", "layout": [] } }),
            &["mig.layout: state the layout with mode Static"],
        ),
        (
            json!({ "mig": { "layout": layout } }),
            &["mig.layout: state the layout with mode Static, and only then"],
        ),
        (
            json!({ "mig": { "mode": "Static", "layout": [{}] } }),
            &["spec.mig.layout[0].profile", "Required value"],
        ),
        (
            json!({ "mig": { "mode": "Static", "layout": [{ "profile": "1g.10gb", "count": 0 }] } }),
            &["spec.mig.layout[0].count", "greater than or equal to 1"],
        ),
        (
            json!({ "mig": { "mode": "Static", "layout": [{ "profile": "1g.10gb", "count": -2 }] } }),
            &["spec.mig.layout[0].count", "greater than or equal to 1"],
        ),
        (
            json!({ "mig": { "mode": "Static", "layout": [{ "profile": "1g.10gb", "count": 65 }] } }),
            &["spec.mig.layout[0].count", "less than or equal to 64"],
        ),
        (
            json!({ "mig": { "mode": "Static", "layout": [{ "profile": "1g.10gb", "count": 2, "start": 0 }] } }),
            &["an entry with 'start' is one instance"],
        ),
        (
            json!({ "mig": { "mode": "Static", "layout": layout, "warm": [{ "profile": "1g.10gb", "count": 1 }] } }),
            &["mig.warm: only mode Dynamic keeps warm instances"],
        ),
        (
            json!({ "mig": { "warm": [{ "profile": "1g.10gb", "count": -1 }] } }),
            &["spec.mig.warm[0].count", "greater than or equal to 0"],
        ),
        (
            json!({ "mig": { "warm": [{ "profile": "1g.10gb", "count": 1 }, { "profile": "1g.10gb", "count": 2 }] } }),
            &["mig.warm: name each profile once"],
        ),
        (json!({ "mig": { "allowedProfiles": ["^1g"] } }), &["mig.allowedProfiles: a pattern has letters"]),
        (json!({ "mig": { "allowedProfiles": [""] } }), &["spec.mig.allowedProfiles[0]", "at least 1 chars"]),
        (
            json!({ "mig": { "allowedProfiles": [7] } }),
            &["spec.mig.allowedProfiles[0]", "must be of type string"],
        ),
        (json!({ "mig": { "modeSwitch": true } }), &["spec.mig.modeSwitch"]),
        (json!({ "gpus": { "products": ["^NVIDIA.*$"] } }), &["gpus.products", "no regular expression"]),
        (json!({ "gpus": { "products": ["NVIDIA [AH]100"] } }), &["gpus.products", "no regular expression"]),
        (json!({ "gpus": { "products": ["NVIDIA\\A100"] } }), &["gpus.products", "no regular expression"]),
        (json!({ "gpus": { "uuids": ["MIG-1"] } }), &["gpus.uuids: a GPU's UUID begins with 'GPU-'"]),
        (json!({ "gpus": { "indices": [-1] } }), &["gpus.indices: an index is between 0 and 255"]),
        (json!({ "wholeGpus": "Yes" }), &["spec.wholeGpus", "\"Serve\", \"Ignore\""]),
        (json!({ "placement": "Random" }), &["spec.placement", "\"Pack\", \"Spread\""]),
        (
            json!({ "reshape": { "maxConcurrentGpusPerNode": 0 } }),
            &["spec.reshape.maxConcurrentGpusPerNode", "greater than or equal to 1"],
        ),
        (
            json!({ "reshape": { "restartableClients": [{ "namespace": "monitoring", "podSelector": {} }] } }),
            &["reshape.restartableClients: an empty podSelector", "name the labels"],
        ),
        (
            json!({ "reshape": { "restartableClients": [{ "podSelector": { "matchLabels": { "app": "a" } } }] } }),
            &["spec.reshape.restartableClients[0].namespace", "Required value"],
        ),
        (
            json!({ "shares": { "instances": ["^3g"], "isolation": "Process" } }),
            &["shares.instances: a pattern has letters"],
        ),
        (
            json!({ "shares": { "instances": [""], "isolation": "Process" } }),
            &["spec.shares.instances[0]", "at least 1 chars"],
        ),
        // Driver, as isolation is left out.
        (json!({ "shares": { "instances": ["3g.*"] } }), &["shares.instances", "isolation: Process"]),
        (
            json!({ "shares": { "gpus": "Allow", "instances": ["3g.*"], "isolation": "Driver" } }),
            &["shares.instances", "isolation: Process"],
        ),
        (
            json!({ "health": { "taintEffect": "Evict" } }),
            &["spec.health.taintEffect", "\"NoSchedule\", \"NoExecute\""],
        ),
    ];
    test(async |kerf| {
        for (spec, parts) in cases {
            let said = refused(kerf, &["create"], &policy("bad", spec.clone())).await?;
            has_all(&said, parts, &spec)?;
        }
        let said = refused(
            kerf,
            &["create"],
            &json!({
                "apiVersion": "kerf.dev/v1alpha1", "kind": "PartitionPolicy", "metadata": { "name": "bad" },
            }),
        )
        .await?;
        has_all(&said, &["spec", "Required value"], &"no spec")
    });
}

/// A node whose GPU can be cut as an A100 with 80 GB can, in the profiles that the tests name.
async fn a100(kerf: &Kerf) -> Result<()> {
    let profile = |name: &str, id: u32, size: u32, compute: u32, starts: &[u32]| {
        json!({
            "name": name, "id": id, "memoryBytes": u64::from(size) * 10_000_000_000, "multiprocessors": compute * 14,
            "computeSlices": compute, "size": size, "starts": starts, "maxInstances": starts.len(),
        })
    };
    let status: GpuNodeStatus = serde_json::from_value(json!({
        "gpuCount": 1,
        "gpus": [{
            "name": "gpu-0", "uuid": "GPU-0", "index": 0, "product": "NVIDIA A100-SXM4-80GB", "geometry": "a100",
        }],
        "geometries": [{
            "name": "a100", "memorySlices": 8, "multiprocessors": 98,
            "profiles": [
                profile("1g.10gb", 19, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
                profile("2g.20gb", 14, 2, 2, &[0, 2, 4]),
                profile("3g.40gb", 9, 4, 3, &[0, 4]),
                profile("7g.80gb", 0, 8, 7, &[0]),
            ],
        }],
    }))?;
    let nodes = kerf.gpu_nodes();
    nodes.create(&PostParams::default(), &GpuNode::new("model", Default::default())).await?;
    let patch = Patch::Merge(json!({ "status": status }));
    nodes.patch_status("model", &PatchParams::default(), &patch).await.context("failed to report a GPU")?;
    Ok(())
}

#[test]
fn what_only_kerf_can_know() {
    let selector = |requirement: Value| json!({ "nodeSelector": { "matchExpressions": [requirement] } });
    let on_a100 = |layout: Value| json!({ "gpus": { "products": ["NVIDIA A100*"] }, "mig": { "mode": "Static", "layout": layout } });
    let cases: Vec<(Value, &[&str])> = vec![
        (
            selector(json!({ "key": "pool", "operator": "Is", "values": ["a"] })),
            &["spec.nodeSelector.matchExpressions[0].operator", "In, NotIn, Exists and DoesNotExist"],
        ),
        (
            selector(json!({ "key": "pool", "operator": "In" })),
            &["spec.nodeSelector.matchExpressions[0].values", "needs at least one value"],
        ),
        (
            json!({ "nodeSelector": { "matchLabels": { "pool": "a*" } } }),
            &["spec.nodeSelector.matchLabels[pool]", "wildcards"],
        ),
        (
            json!({ "mig": { "mode": "Static", "allowedProfiles": ["1g.*"], "layout": [{ "profile": "7g.80gb" }] } }),
            &["spec.mig.layout[0].profile", "not among spec.mig.allowedProfiles (1g.*)"],
        ),
        (
            json!({ "mig": { "mode": "Off" }, "shares": { "instances": ["3g.*"], "isolation": "Process" } }),
            &[
                "spec.shares.instances",
                "with mig.mode Off there are no instances",
                "take mode Dynamic or Static",
            ],
        ),
        (
            on_a100(json!([{ "profile": "1g.10gb", "count": 8 }])),
            &["spec.mig.layout", "impossible on NVIDIA A100-SXM4-80GB"],
        ),
        (
            on_a100(json!([{ "profile": "7g.80gb" }, { "profile": "1g.10gb" }])),
            &["spec.mig.layout", "needs 9 memory slices, and the GPU has 8"],
        ),
        (
            on_a100(json!([{ "profile": "3g.40gb", "start": 2 }])),
            &["spec.mig.layout", "3g.40gb cannot start at memory slice 2, only at 0, 4"],
        ),
        (
            on_a100(json!([{ "profile": "1g.5gb" }])),
            &["spec.mig.layout[0].profile", "its profiles are 1g.10gb, 2g.20gb, 3g.40gb, 7g.80gb"],
        ),
    ];
    test(async move |kerf| {
        a100(kerf).await?;
        // The operator hears of the node a moment later.
        eventually(kerf_e2e::kerf::PATIENCE, "the operator knowing the model", || async {
            let unknown = policy("known", on_a100(json!([{ "profile": "none" }])));
            let outcome = kubectl(kerf, &["create", "--dry-run=server"], &unknown).await;
            Ok(outcome.map_or_else(|_| Seen::Yes(()), Seen::not_yet))
        })
        .await?;
        for (spec, parts) in cases {
            let said = refused(kerf, &["create", "--dry-run=server"], &policy("bad", spec.clone())).await?;
            has_all(&said, parts, &spec)?;
        }
        // The same layouts pass where nothing says that they are for this model.
        let unnamed = json!({ "gpus": { "products": ["NVIDIA B200"] }, "mig": { "mode": "Static", "layout": [{ "profile": "1g.23gb", "count": 7 }] } });
        kubectl(kerf, &["create", "--dry-run=server"], &policy("good", unnamed)).await?;
        let good =
            on_a100(json!([{ "profile": "3g.40gb", "start": 4 }, { "profile": "1g.10gb", "count": 4 }]));
        kubectl(kerf, &["create", "--dry-run=server"], &policy("good", good)).await?;
        // What may still come true is let through, with a warning.
        let shares = |allowed: &[&str], pattern: &str| {
            let mig = json!({ "allowedProfiles": allowed });
            json!({ "mig": mig, "shares": { "instances": [pattern], "isolation": "Process" } })
        };
        kubectl(kerf, &["create", "--dry-run=server"], &policy("good", shares(&["3g.40gb"], "3g.*"))).await?;
        kubectl(kerf, &["create", "--dry-run=server"], &policy("none", shares(&["1g.*"], "3g.*"))).await?;
        Ok(())
    });
}

#[test]
fn a_small_policy_has_its_defaults_written_out() {
    test(async |kerf| {
        let small = json!({ "nodeSelector": { "matchLabels": { "no": "node" } } });
        kubectl(kerf, &["create"], &policy("small", small)).await?;
        let stored = Api::<PartitionPolicy>::all(kerf.client()).get("small").await?;
        let stored = serde_json::to_value(stored.spec)?;
        for (field, value) in [
            ("/mig/mode", json!("Dynamic")),
            ("/mig/modeSwitch", json!("WithoutReset")),
            ("/wholeGpus", json!("Ignore")),
            ("/placement", json!("Pack")),
            ("/reshape/maxConcurrentGpusPerNode", json!(16)),
            ("/health/taintEffect", json!("NoSchedule")),
        ] {
            ensure!(stored.pointer(field) == Some(&value), "{field} is {:?}", stored.pointer(field));
        }
        kerf.delete_policy("small").await
    });
}
