use std::sync::Arc;

use kerf_crds::{GpuNode, PartitionPolicySpec};
use serde_json::{Value, json};

use super::*;

struct Known(Option<Vec<Arc<PartitionPolicy>>>);

impl View for Known {
    fn policies(&self) -> Option<Vec<Arc<PartitionPolicy>>> {
        self.0.clone()
    }

    fn nodes(&self) -> Vec<Arc<GpuNode>> {
        Vec::new()
    }
}

fn review(kind: &str, operation: &str, object: Value, old: Value) -> Vec<u8> {
    let kind = json!({ "group": "", "version": "v1", "kind": kind });
    let resource = json!({ "group": "", "version": "v1", "resource": "any" });
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "0c9a8d74-9cb7-44dd-b98e-09fd62def2f4",
            "kind": kind,
            "resource": resource,
            "name": "train",
            "namespace": "team",
            "operation": operation,
            "userInfo": { "username": "anna" },
            "object": object,
            "oldObject": old,
            "dryRun": false,
        },
    });
    serde_json::to_vec(&review).unwrap()
}

fn gpu_pod(resource: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "train" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { resource: "1" } } }] },
    })
}

fn response(review: AdmissionReview<DynamicObject>) -> Value {
    let review = serde_json::to_value(review).unwrap();
    assert_eq!(review["kind"], "AdmissionReview");
    assert_eq!(review["response"]["uid"], "0c9a8d74-9cb7-44dd-b98e-09fd62def2f4");
    review["response"].clone()
}

#[test]
fn a_pod_is_answered_with_a_json_patch() {
    let review = review("Pod", "CREATE", gpu_pod("nvidia.com/mig-1g.10gb"), Value::Null);
    let response = response(pod(&review, &Known(None)));
    assert_eq!(response["allowed"], true);
    assert_eq!(response["patchType"], "JSONPatch");
}

#[test]
fn whole_gpus_follow_the_policies() {
    let review = review("Pod", "CREATE", gpu_pod("nvidia.com/gpu"), Value::Null);
    let serve = PartitionPolicySpec { whole_gpus: WholeGpus::Serve, ..PartitionPolicySpec::default() };
    let policies = vec![Arc::new(PartitionPolicy::new("p", serve))];
    assert_eq!(response(pod(&review, &Known(Some(policies))))["patchType"], "JSONPatch");
    assert_eq!(response(pod(&review, &Known(Some(Vec::new()))))["patchType"], Value::Null);
    let unknown = response(pod(&review, &Known(None)));
    assert_eq!((unknown["allowed"].clone(), unknown["status"]["code"].clone()), (json!(false), json!(503)));
}

#[test]
fn an_update_is_compared_with_what_is_stored() {
    let created = review("Pod", "CREATE", gpu_pod("nvidia.com/mig-1g.10gb"), Value::Null);
    let request: AdmissionRequest<Pod> = read(&created).unwrap();
    let mutation = mutate(request.object.as_ref().unwrap(), &context(&Known(None), &request.uid)).unwrap();
    let mut stored = serde_json::to_value(request.object.unwrap()).unwrap();
    json_patch::patch(&mut stored, &mutation.patch).unwrap();
    let mut applied = stored.clone();
    applied["spec"]["containers"][0]["resources"]["limits"] = json!({ "nvidia.com/mig-1g.10gb": "1" });
    let update = review("Pod", "UPDATE", applied, stored);
    let response = response(pod(&update, &Known(None)));
    assert_eq!(
        (response["allowed"].clone(), response["patchType"].clone()),
        (json!(true), json!("JSONPatch"))
    );
}

#[test]
fn a_refusal_names_the_field() {
    let mut bound = gpu_pod("nvidia.com/mig-1g.10gb");
    bound["spec"]["nodeName"] = json!("n1");
    let response = response(pod(&review("Pod", "CREATE", bound, Value::Null), &Known(None)));
    assert_eq!(response["allowed"], false);
    assert_eq!(response["status"]["code"], 422);
    assert!(response["status"]["message"].as_str().unwrap().starts_with("spec.nodeName: "), "{response}");
}

#[test]
fn a_policy_is_checked_until_it_is_deleted() {
    let mut policy_object = json!({
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "PartitionPolicy",
        "metadata": { "name": "p" },
        "spec": { "nodeSelector": { "matchLabels": { "bad key": "x" } } },
    });
    let review_of = |object: &Value| review("PartitionPolicy", "UPDATE", object.clone(), object.clone());
    assert_eq!(response(policy(&review_of(&policy_object), &Known(None)))["allowed"], false);
    policy_object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert_eq!(response(policy(&review_of(&policy_object), &Known(None)))["allowed"], true);
}

#[test]
fn an_object_that_cannot_be_read_is_refused_by_its_uid() {
    let broken = json!({ "metadata": {}, "spec": { "containers": "none" } });
    let response = response(pod(&review("Pod", "CREATE", broken, Value::Null), &Known(None)));
    assert_eq!(response["allowed"], false);
    assert!(response["status"]["message"].as_str().unwrap().contains("cannot read"), "{response}");
    let nothing = serde_json::to_value(pod(b"nothing", &Known(None))).unwrap();
    assert_eq!(nothing["response"]["allowed"], false);
}
