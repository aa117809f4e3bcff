//! `kubectl explain` and `kubectl get` are for people.

use anyhow::ensure;

use super::{has_all, test};

#[test]
fn fields_explain_themselves() {
    let cases: [(&str, &[&str]); 4] = [
        (
            "partitionpolicy.spec",
            &["nodeSelector", "The nodes whose GPUs the policy is about", "enum: Serve, Ignore"],
        ),
        ("partitionpolicy.spec.mig", &["allowedProfiles", "enum: Dynamic, Static, Off", "WithReset"]),
        ("gpunode.spec.partitions.owner", &["claim", "policy", "reservation"]),
        ("gpunode.status.gpus.instances", &["uuid", "MIG device"]),
    ];
    test(async move |kerf| {
        for (field, parts) in cases {
            let text = kerf.cluster.kubectl(&["explain", field, "--api-version=kerf.dev/v1alpha1"]).await?;
            has_all(&text, parts, &field)?;
            ensure!(!text.contains("[`"), "{field} shows marks of the source:\n{text}");
        }
        let columns =
            kerf.cluster.kubectl(&["get", "crd", "partitionpolicies.kerf.dev", "-o", "json"]).await?;
        has_all(&columns, &[".status.layoutSummary", "\"pp\""], &"the definition")
    });
}
