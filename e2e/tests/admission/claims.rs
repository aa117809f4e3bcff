//! The policy `kerf-planned-taint`: no claim may tolerate the taint that keeps kube-scheduler from Kerf's devices.

use anyhow::Result;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::{has_all, kubectl, refused, test};

pub(super) fn claim(class: &str, tolerations: &Value) -> Value {
    let request = json!({ "deviceClassName": class, "tolerations": tolerations });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": "claim", "namespace": "default" },
        "spec": { "devices": { "requests": [{ "name": "a", "exactly": request }] } },
    })
}

fn alternatives(tolerations: &Value) -> Value {
    let mut object = claim("x", &json!([]));
    object["spec"]["devices"]["requests"] = json!([
        { "name": "a", "firstAvailable": [
            { "name": "x", "deviceClassName": "gpu.kerf.dev" },
            { "name": "y", "deviceClassName": "any.example", "tolerations": tolerations },
        ] },
    ]);
    object
}

fn template(tolerations: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": { "name": "template", "namespace": "default" },
        "spec": { "spec": claim("mig.kerf.dev", tolerations)["spec"] },
    })
}

#[test]
fn tolerations_that_cover_the_planned_taint_are_refused_in_every_class() {
    let refused_ones = [
        json!([{ "operator": "Exists" }]),
        json!([{ "operator": "Exists", "effect": "NoSchedule" }]),
        json!([{ "key": "other", "operator": "Exists" }, { "operator": "Exists" }]),
        json!([{ "key": "kerf.dev/planned", "operator": "Exists" }]),
        json!([{ "key": "kerf.dev/planned", "operator": "Equal", "value": "", "effect": "NoSchedule" }]),
    ];
    let allowed_ones = [
        json!([]),
        json!([{ "key": "other", "operator": "Exists" }]),
        json!([{ "key": "kerf.dev/unhealthy", "operator": "Exists" }]),
        json!([{ "operator": "Exists", "effect": "NoExecute" }]),
    ];
    test(async move |kerf| {
        let dry = ["create", "--dry-run=server"];
        for tolerations in &refused_ones {
            for object in [
                claim("gpu.kerf.dev", tolerations),
                claim("mig-1g.10gb.kerf.dev", tolerations),
                claim("any.example", tolerations),
                alternatives(tolerations),
                template(tolerations),
            ] {
                let said = refused(kerf, &dry, &object).await?;
                has_all(&said, &["kerf-planned-taint", "kerf.dev/planned"], &object)?;
            }
        }
        for tolerations in &allowed_ones {
            for object in
                [claim("mig.kerf.dev", tolerations), alternatives(tolerations), template(tolerations)]
            {
                kubectl(kerf, &dry, &object).await?;
            }
        }
        Ok(())
    });
}

#[test]
fn the_operator_is_exempt() {
    test(async |kerf| {
        let kubeconfig = kerf.cluster.kubeconfig_for_service_account("kerf-system", "operator", None).await?;
        let client = kerf.cluster.client_from(&kubeconfig).await?;
        let claims: Api<ResourceClaim> = Api::namespaced(client, "default");
        let object = claim("gpu.kerf.dev", &json!([{ "operator": "Exists" }]));
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let created: Result<_, _> = claims.create(&dry, &serde_json::from_value(object)?).await;
        created?;
        Ok(())
    });
}
