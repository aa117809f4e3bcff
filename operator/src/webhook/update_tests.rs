use serde_json::{Value, json};

use super::*;

/// A pod as the API server stores it after admission, with the resources that a later update brings back.
fn stored(back: Value) -> Pod {
    let mut resources = json!({ "claims": [{ "name": "kerf", "request": "device-0" }] });
    for (key, value) in back.as_object().unwrap() {
        resources[key] = value.clone();
    }
    serde_json::from_value(json!({
        "metadata": {
            "name": "train",
            "annotations": {
                ORIGINAL_RESOURCES: r#"{"containers":[{"name":"main","resources":{"nvidia.com/mig-1g.10gb":1}}]}"#,
            },
        },
        "spec": {
            "containers": [{ "name": "main", "resources": resources }, { "name": "plain" }],
            "resourceClaims": [{ "name": POD_CLAIM, "resourceClaimName": "train-kerf-0" }],
        },
    }))
    .unwrap()
}

fn restored(new: &Pod, old: &Pod) -> Pod {
    let mut value = serde_json::to_value(new).unwrap();
    json_patch::patch(&mut value, &restore(new, old).unwrap().patch).unwrap();
    serde_json::from_value(value).unwrap()
}

#[test]
fn what_apply_brings_back_is_taken_out_again() {
    let old = stored(json!({}));
    let limits = json!({ "nvidia.com/mig-1g.10gb": "1" });
    for new in [
        stored(json!({ "limits": limits, "requests": limits })),
        stored(json!({ "limits": { "nvidia.com/mig-1g.10gb": "1000m" } })),
        old.clone(),
    ] {
        assert_eq!(restored(&new, &old), old);
    }
}

#[test]
fn other_changes_of_the_same_update_stay() {
    let old = stored(json!({}));
    let mut new = stored(json!({ "limits": { "nvidia.com/mig-1g.10gb": "1", "cpu": "1" } }));
    new.spec.as_mut().unwrap().containers[1].image = Some("new".to_owned());
    let restored = restored(&new, &old);
    let containers = restored.spec.unwrap().containers;
    assert_eq!(containers[1].image.as_deref(), Some("new"));
    assert_eq!(containers[0].resources.as_ref().unwrap().limits.as_ref().unwrap().len(), 1);
}

#[test]
fn other_gpus_than_at_creation_are_refused() {
    let old = stored(json!({}));
    for (limits, field) in [
        (
            json!({ "nvidia.com/mig-1g.10gb": "2" }),
            "spec.containers[0].resources.limits[nvidia.com/mig-1g.10gb]",
        ),
        (
            json!({ "nvidia.com/mig-2g.20gb": "1" }),
            "spec.containers[0].resources.limits[nvidia.com/mig-2g.20gb]",
        ),
    ] {
        let denial = restore(&stored(json!({ "limits": limits })), &old).unwrap_err();
        assert_eq!(denial.field, field);
        assert!(denial.message.contains("delete the pod"), "{denial}");
    }
}

#[test]
fn pods_that_are_not_kerfs_stay_as_they_are() {
    let new = stored(json!({ "limits": { "nvidia.com/mig-2g.20gb": "1" } }));
    let mut old = stored(json!({}));
    old.metadata.annotations = None;
    assert_eq!(restore(&new, &old).unwrap(), Mutation::default());
}
