use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

use super::*;

fn context() -> AdmissionContext {
    AdmissionContext {
        request_uid: "0C9A8D74-9cb7-44dd-b98e-09fd62def2f4".to_owned(),
        whole_gpus: Some(false),
        known_resources: BTreeSet::new(),
    }
}

fn pod(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

/// A pod of one container with these limits, and requests as the API server defaults them.
fn simple(limits: Value) -> Pod {
    pod(json!({
        "metadata": { "name": "train" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": limits, "requests": limits } }] },
    }))
}

/// The pod as the API server stores it.
fn mutated(pod: &Pod, context: &AdmissionContext) -> Pod {
    let mutation = mutate(pod, context).unwrap();
    let mut value = serde_json::to_value(pod).unwrap();
    json_patch::patch(&mut value, &mutation.patch).unwrap();
    serde_json::from_value(value).unwrap()
}

fn claims(pod: &Pod, container: &str) -> Vec<String> {
    let spec = pod.spec.as_ref().unwrap();
    let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
    let resources = all.find(|one| one.name == container).unwrap().resources.clone().unwrap_or_default();
    let claims = resources.claims.unwrap_or_default();
    claims.into_iter().map(|claim| format!("{}/{}", claim.name, claim.request.unwrap_or_default())).collect()
}

fn claim_name_of(pod: &Pod) -> String {
    let entries = pod.spec.clone().unwrap().resource_claims.unwrap();
    entries.into_iter().find(|entry| entry.name == POD_CLAIM).unwrap().resource_claim_name.unwrap()
}

fn denial(pod: &Pod) -> Denial {
    mutate(pod, &context()).unwrap_err()
}

#[test]
fn a_mig_request_becomes_a_gated_claim_reference() {
    let before = simple(json!({ "nvidia.com/mig-1g.10gb.me": "2", "cpu": "500m" }));
    let after = mutated(&before, &context());
    assert_eq!(
        serde_json::to_value(after).unwrap(),
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "train",
                "annotations": {
                    "kerf.dev/original-resources":
                        "{\"containers\":[{\"name\":\"main\",\"resources\":{\"nvidia.com/mig-1g.10gb.me\":2}}]}",
                },
            },
            "spec": {
                "containers": [{
                    "name": "main",
                    "resources": {
                        "limits": { "cpu": "500m" },
                        "requests": { "cpu": "500m" },
                        "claims": [
                            { "name": "kerf", "request": "device-0" },
                            { "name": "kerf", "request": "device-1" },
                        ],
                    },
                }],
                "resourceClaims": [{ "name": "kerf", "resourceClaimName": "train-kerf-0c9a8d749cb7" }],
                "schedulingGates": [{ "name": "kerf.dev/plan" }],
            },
        })
    );
}

#[test]
fn a_pod_that_asks_for_nothing_stays_as_it_is() {
    for pod in [
        simple(json!({ "cpu": "1" })),
        simple(json!({ "nvidia.com/mig-1g.10gb": "0" })),
        simple(json!({ "nvidia.com/gpu": "1" })),
        simple(json!({ "amd.com/gpu": "1" })),
        // Not a resource name: the API server refuses it, if it is left in place.
        simple(json!({ "nvidia.com/mig-": "1" })),
        Pod::default(),
    ] {
        assert_eq!(mutate(&pod, &context()).unwrap(), Mutation::default(), "{pod:?}");
    }
}

#[test]
fn opted_out_and_mirror_pods_stay_as_they_are() {
    let mut opted_out = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    opted_out.metadata.labels = Some([(POD_OPT_OUT.to_owned(), "true".to_owned())].into());
    let mut mirror = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    mirror.metadata.annotations = Some([(MIRROR_POD.to_owned(), "x".to_owned())].into());
    mirror.spec.as_mut().unwrap().node_name = Some("n".to_owned());
    for pod in [opted_out, mirror] {
        assert_eq!(mutate(&pod, &context()).unwrap(), Mutation::default());
    }
}

#[test]
fn whole_gpus_are_taken_only_where_a_policy_says_so() {
    let both = simple(json!({ "nvidia.com/gpu": "1", "nvidia.com/mig-1g.10gb": "1" }));
    let limits = |pod: &Pod| {
        let containers = &pod.spec.as_ref().unwrap().containers;
        containers[0].resources.clone().unwrap().limits.unwrap_or_default()
    };
    let left = mutated(&both, &context());
    assert_eq!(limits(&left).keys().collect::<Vec<_>>(), ["nvidia.com/gpu"]);
    let served = AdmissionContext { whole_gpus: Some(true), ..context() };
    let taken = mutated(&both, &served);
    assert!(limits(&taken).is_empty());
    assert_eq!(claims(&taken, "main"), ["kerf/device-0", "kerf/device-1"]);
    let unknown = AdmissionContext { whole_gpus: None, ..context() };
    assert_eq!(mutate(&both, &unknown).unwrap_err().code, 503);
    // Not asked, not needed.
    assert!(mutate(&simple(json!({ "nvidia.com/mig-1g.10gb": "1" })), &unknown).is_ok());
}

#[test]
fn every_kind_of_container_is_served() {
    let one = json!({ "limits": { "nvidia.com/mig-1g.10gb": "1" } });
    let before = pod(json!({
        "metadata": { "generateName": "web-6d4cf56db6-" },
        "spec": {
            "initContainers": [
                { "name": "fetch", "resources": one },
                { "name": "proxy", "restartPolicy": "Always", "resources": one },
                { "name": "plain" },
            ],
            "containers": [
                { "name": "a", "resources": one },
                { "name": "b", "resources": { "claims": [{ "name": "mine" }], "limits": { "nvidia.com/mig-2g.20gb": "1" } } },
            ],
            "resourceClaims": [{ "name": "mine", "resourceClaimName": "mine" }],
        },
    }));
    let after = mutated(&before, &context());
    assert_eq!(claims(&after, "fetch"), ["kerf/device-0"]);
    assert_eq!(claims(&after, "proxy"), ["kerf/device-0"]);
    assert_eq!(claims(&after, "plain"), Vec::<String>::new());
    assert_eq!(claims(&after, "a"), ["kerf/device-1"]);
    assert_eq!(claims(&after, "b"), ["mine/", "kerf/device-2"]);
    assert_eq!(claim_name_of(&after), "web-6d4cf56db6-kerf-0c9a8d749cb7");
    assert_eq!(after.spec.unwrap().resource_claims.unwrap().len(), 2);
}

#[test]
fn asked_again_it_changes_nothing() {
    let before = simple(json!({ "nvidia.com/mig-1g.10gb": "2", "nvidia.com/mig-2g.20gb": "1", "cpu": "1" }));
    let once = mutated(&before, &context());
    let again = AdmissionContext { request_uid: "ffffffff-0000".to_owned(), ..context() };
    assert_eq!(mutate(&once, &again).unwrap().patch, Patch::default());
}

#[test]
fn a_container_that_another_webhook_added_since_gets_its_devices() {
    let mut once = mutated(&simple(json!({ "nvidia.com/mig-2g.20gb": "1" })), &context());
    let added = simple(json!({ "nvidia.com/mig-1g.10gb": "1" })).spec.unwrap().containers.remove(0);
    once.spec.as_mut().unwrap().containers.push(Container { name: "added".to_owned(), ..added });
    let again = AdmissionContext { request_uid: "ffffffff-0000".to_owned(), ..context() };
    let twice = mutated(&once, &again);
    // Requests are in the order of the resources' names, so the first container's changes too.
    assert_eq!(claims(&twice, "added"), ["kerf/device-0"]);
    assert_eq!(claims(&twice, "main"), ["kerf/device-1"]);
    assert_eq!(claim_name_of(&twice), claim_name_of(&once));
    let original: OriginalResources =
        serde_json::from_str(&twice.metadata.annotations.unwrap()[ORIGINAL_RESOURCES]).unwrap();
    assert_eq!(expand(&original).requests.len(), 2);
}

#[test]
fn a_copy_of_a_pod_gets_a_claim_of_its_own() {
    let other = AdmissionContext { request_uid: "ffffffff-ffff-ffff".to_owned(), ..context() };
    // A copy of a pod that was running: its gate is gone.
    let mut copy = mutated(&simple(json!({ "nvidia.com/mig-1g.10gb": "1" })), &context());
    copy.spec.as_mut().unwrap().scheduling_gates = None;
    let copied = mutated(&copy, &other);
    assert_eq!(claim_name_of(&copied), "train-kerf-ffffffffffff");
    assert_eq!(copied.spec.unwrap().scheduling_gates.unwrap().len(), 1);
    // A copy of one that waits, under another name.
    let mut copy = mutated(&simple(json!({ "nvidia.com/mig-1g.10gb": "1" })), &context());
    copy.metadata.name = Some("train-2".to_owned());
    assert_eq!(claim_name_of(&mutated(&copy, &other)), "train-2-kerf-ffffffffffff");
}

#[test]
fn a_leftover_annotation_counts_for_nothing() {
    let mut before = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    before.metadata.annotations = Some([(ORIGINAL_RESOURCES.to_owned(), "nonsense".to_owned())].into());
    assert_eq!(claims(&mutated(&before, &context()), "main"), ["kerf/device-0"]);
}

#[test]
fn claim_names_are_dns_labels() {
    for (name, expected) in [
        ("a".repeat(253), format!("{}-kerf-0c9a8d749cb7", "a".repeat(45))),
        (format!("{}.-x", "a".repeat(43)), format!("{}-kerf-0c9a8d749cb7", "a".repeat(43))),
        ("x.y".to_owned(), "x.y-kerf-0c9a8d749cb7".to_owned()),
        (String::new(), "pod-kerf-0c9a8d749cb7".to_owned()),
    ] {
        let mut before = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
        before.metadata.name = (!name.is_empty()).then_some(name);
        let claim = claim_name_of(&mutated(&before, &context()));
        assert_eq!(claim, expected);
        assert!(claim.len() <= 63);
    }
}

#[test]
fn bad_counts_name_the_field_and_the_remedy() {
    for (count, remedy) in [
        ("500m", "whole number"),
        ("-1", "negative"),
        ("33", "at most 32"),
        ("4294967296", "at most 32"),
        ("x", "no quantity"),
    ] {
        let denial = denial(&simple(json!({ "nvidia.com/mig-1g.10gb": count })));
        assert_eq!(denial.field, "spec.containers[0].resources.limits[nvidia.com/mig-1g.10gb]");
        assert!(denial.message.contains(remedy), "{denial}");
        assert_eq!(denial.code, 422);
    }
}

#[test]
fn a_request_without_its_limit_or_unlike_it_is_refused() {
    let mut only_request = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    only_request.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap().limits = None;
    let refused = denial(&only_request);
    assert_eq!(refused.field, "spec.containers[0].resources.requests[nvidia.com/mig-1g.10gb]");
    assert!(refused.message.contains("needs a limit"), "{refused}");

    let mut unlike = simple(json!({ "nvidia.com/mig-1g.10gb": "2" }));
    let requests = Some([("nvidia.com/mig-1g.10gb".to_owned(), Quantity("1".to_owned()))].into());
    unlike.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap().requests = requests;
    let refused = denial(&unlike);
    assert_eq!(refused.field, "spec.containers[0].resources.requests[nvidia.com/mig-1g.10gb]");
    assert!(refused.message.contains("differs"), "{refused}");

    // The same number in another spelling is no difference.
    let mut spelled = simple(json!({ "nvidia.com/mig-1g.10gb": "2" }));
    let requests = Some([("nvidia.com/mig-1g.10gb".to_owned(), Quantity("2000m".to_owned()))].into());
    spelled.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap().requests = requests;
    assert_eq!(claims(&mutated(&spelled, &context()), "main").len(), 2);
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let mut bound = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    bound.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
    assert_eq!(denial(&bound).field, "spec.nodeName");

    let twenty = json!({ "limits": { "nvidia.com/mig-1g.10gb": "20" } });
    let many = pod(json!({
        "metadata": { "name": "many" },
        "spec": { "containers": [{ "name": "a", "resources": twenty }, { "name": "b", "resources": twenty }] },
    }));
    let refused = denial(&many);
    assert_eq!(refused.field, "spec.containers");
    assert!(refused.message.contains("40 devices"), "{refused}");
}

#[test]
fn a_claim_of_the_users_by_kerfs_name_is_refused() {
    let mut entry = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    entry.spec.as_mut().unwrap().resource_claims =
        Some(vec![PodResourceClaim { name: POD_CLAIM.to_owned(), ..PodResourceClaim::default() }]);
    assert_eq!(denial(&entry).field, "spec.resourceClaims[0].name");

    let mut reference = simple(json!({ "nvidia.com/mig-1g.10gb": "1" }));
    reference.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap().claims =
        Some(vec![ResourceClaim { name: POD_CLAIM.to_owned(), request: None }]);
    assert_eq!(denial(&reference).field, "spec.containers[0].resources.claims[0].name");

    // Without a GPU request the name is the user's own.
    let mut own = simple(json!({ "cpu": "1" }));
    own.spec.as_mut().unwrap().resource_claims =
        Some(vec![PodResourceClaim { name: POD_CLAIM.to_owned(), ..PodResourceClaim::default() }]);
    assert_eq!(mutate(&own, &context()).unwrap(), Mutation::default());
}

#[test]
fn a_forged_annotation_is_refused() {
    for forged in
        ["nonsense", r#"{"containers":[{"name":"main","resources":{"nvidia.com/mig-1g.10gb":4000000000}}]}"#]
    {
        let mut copy = mutated(&simple(json!({ "nvidia.com/mig-1g.10gb": "1" })), &context());
        copy.metadata.annotations = Some([(ORIGINAL_RESOURCES.to_owned(), forged.to_owned())].into());
        assert_eq!(denial(&copy).field, "metadata.annotations[kerf.dev/original-resources]");
    }
}

#[test]
fn a_profile_that_no_gpu_has_is_warned_of() {
    let known = ["nvidia.com/mig-1g.10gb".to_owned()].into();
    let context = AdmissionContext { known_resources: known, ..context() };
    let mutation = mutate(&simple(json!({ "nvidia.com/mig-9g.90gb": "1" })), &context).unwrap();
    assert_eq!(mutation.warnings.len(), 1);
    assert!(mutation.warnings[0].contains("nvidia.com/mig-9g.90gb"), "{:?}", mutation.warnings);
    let mutation = mutate(&simple(json!({ "nvidia.com/mig-1g.10gb": "1" })), &context).unwrap();
    assert_eq!(mutation.warnings, Vec::<String>::new());
}

fn annotated(mut pod: Pod, name: &str, value: &str) -> Pod {
    pod.metadata.annotations.get_or_insert_default().insert(name.to_owned(), value.to_owned());
    pod
}

#[test]
fn a_share_is_noted_in_bytes_and_percent() {
    let before = simple(json!({ SHARE_MEMORY: "12Gi", SHARE_COMPUTE: "30", SHARE_GPUS: "1", "cpu": "1" }));
    let after = mutated(&annotated(before, ISOLATION, "driver"), &context());
    let original: Value =
        serde_json::from_str(&after.metadata.annotations.clone().unwrap()[ORIGINAL_RESOURCES]).unwrap();
    assert_eq!(
        original,
        json!({
            "containers": [{ "name": "main", "share": { "memoryBytes": 12u64 << 30, "computePercent": 30 } }],
            "isolation": "Driver",
        })
    );
    assert_eq!(claims(&after, "main"), ["kerf/device-0"]);
    let resources = after.spec.clone().unwrap().containers[0].resources.clone().unwrap();
    assert_eq!(resources.limits.unwrap().into_keys().collect::<Vec<_>>(), ["cpu"]);
    assert_eq!(mutate(&after, &context()).unwrap(), Mutation::default(), "asked again, it changes nothing");
}

#[test]
fn shares_that_cannot_be_are_refused_with_the_remedy() {
    for (limits, field, remedy) in [
        (json!({ SHARE_MEMORY: "12Gi" }), SHARE_MEMORY, "add `kerf.dev/gpu-compute: 30`"),
        (json!({ SHARE_COMPUTE: "30" }), SHARE_COMPUTE, "add `kerf.dev/gpu-memory: 12Gi`"),
        (json!({ SHARE_GPUS: "2" }), SHARE_GPUS, "add `kerf.dev/gpu-memory: 12Gi`"),
        (json!({ SHARE_MEMORY: "12", SHARE_COMPUTE: "30" }), SHARE_MEMORY, "write `12Gi` for 12 GiB"),
        (json!({ SHARE_MEMORY: "0", SHARE_COMPUTE: "30" }), SHARE_MEMORY, "write `12Gi`"),
        (json!({ SHARE_MEMORY: "-1Gi", SHARE_COMPUTE: "30" }), SHARE_MEMORY, "negative"),
        (json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "0" }), SHARE_COMPUTE, "between 1 and 100"),
        (json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "101" }), SHARE_COMPUTE, "between 1 and 100"),
        (json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "0.5" }), SHARE_COMPUTE, "not a whole number"),
        (json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "30%" }), SHARE_COMPUTE, "no quantity"),
        (json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "30", SHARE_GPUS: "0" }), SHARE_GPUS, "Leave it out"),
        (
            json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "30", SHARE_GPUS: "2" }),
            SHARE_GPUS,
            "find one MPS server only",
        ),
    ] {
        let denial = denial(&simple(limits));
        assert_eq!(denial.field, format!("spec.containers[0].resources.limits[{field}]"));
        assert!(denial.message.contains(remedy), "{denial:?}");
    }
    for (spec, field) in [
        (json!({ "hostPID": true }), "spec.hostPID"),
        (json!({ "hostIPC": true }), "spec.hostIPC"),
        (
            json!({ "initContainers": [{ "name": "i", "securityContext": { "privileged": true } }] }),
            "spec.initContainers[0].securityContext.privileged",
        ),
    ] {
        let mut with =
            serde_json::to_value(simple(json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "30" }))).unwrap();
        with["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        assert_eq!(denial(&pod(with.clone())).field, field);
        let hardware = annotated(pod(with), ISOLATION, "hardware");
        assert!(mutate(&hardware, &context()).is_ok(), "MIG keeps it apart");
    }
    let whole = annotated(simple(json!({ SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "30" })), ISOLATION, "strong");
    assert_eq!(denial(&whole).field, format!("metadata.annotations[{ISOLATION}]"));
    let burst = pod(json!({
        "metadata": { "name": "train" },
        "spec": { "containers": [{ "name": "main", "resources": {
            "limits": { SHARE_MEMORY: "2Gi", SHARE_COMPUTE: "30" }, "requests": { SHARE_MEMORY: "1Gi", SHARE_COMPUTE: "30" },
        } }] },
    }));
    assert!(denial(&burst).message.contains("a share is all of its limit"));
}
