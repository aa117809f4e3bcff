use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::gpu_node::{ClaimOwner, Gpu, Instance, Owner, Partition, Sharing};
use kerf_crds::{GpuNode, names};
use serde_json::{Value, json};

use super::{Command, Policies, Trace, Try};
use crate::recorder::{Record, hash};
use crate::scheduler::claims;
use crate::testing::{gpu, gpu_node, instance, wanted};

/// What kubectl prints of a node with these GPUs.
fn node(name: &str, gpus: Vec<kerf_crds::gpu_node::Gpu>) -> Vec<Value> {
    let mut reported: GpuNode = gpu_node(name, gpus, Vec::new());
    reported.metadata.resource_version = Some("7".into());
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "uid": format!("node-{name}"), "labels": { "pool": name }, "resourceVersion": "5" },
        "status": {
            "allocatable": { "cpu": "8", "memory": "64Gi", "pods": "110" },
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    });
    vec![node, serde_json::to_value(reported).unwrap()]
}

/// A dump with these objects, and what every cluster has.
fn dump(objects: Vec<Value>) -> String {
    let class = json!({ "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": "mig.kerf.dev" }, "spec": {} });
    let daemon = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "daemon", "namespace": "kerf-system", "uid": "d" },
        "spec": { "nodeName": "a", "containers": [{ "name": "main", "resources": { "requests": { "cpu": "1" } } }] },
    });
    let items: Vec<Value> = objects.into_iter().chain([class, daemon]).collect();
    serde_yaml_ng::to_string(&json!({ "apiVersion": "v1", "kind": "List", "items": items })).unwrap()
}

fn policy(name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "kerf.dev/v1alpha1", "kind": "PartitionPolicy", "metadata": { "name": name }, "spec": spec })
}

/// Files of one test, in a folder that goes with it.
struct Files(PathBuf);

impl Files {
    fn new(test: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("kerf-whatif-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let file = self.0.join(name);
        std::fs::write(&file, text).unwrap();
        file
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Exit status and text, or the error.
fn run(command: Command) -> Result<(u8, String), String> {
    let mut text = String::new();
    let code = command.run(&mut text).map_err(|error| format!("{error:#}"))?;
    Ok((code, text))
}

fn trial(files: &Files, cluster: &str, policies: &[Value], add: &[&str]) -> Result<(u8, String), String> {
    let pods = Vec::new();
    let add = add.iter().map(|words| (*words).to_owned()).collect();
    run(Command::Try(Try { policies: on(files, cluster, policies), pods, add }))
}

/// The policies on the cluster, as files.
fn on(files: &Files, cluster: &str, policies: &[Value]) -> Policies {
    let policies = policies.iter().enumerate();
    Policies {
        cluster: files.write("cluster.yaml", cluster),
        policy: policies
            .map(|(n, policy)| files.write(&format!("policy-{n}.yaml"), &policy.to_string()))
            .collect(),
        without_policy: Vec::new(),
    }
}

#[test]
fn a_policy_that_is_tried_gives_waiting_pods_their_places() {
    let files = Files::new("places");
    let cluster = dump(node("a", vec![gpu("GPU-0", 0), gpu("GPU-1", 1)]));
    let (code, text) = trial(&files, &cluster, &[], &["3x nvidia.com/mig-3g.40gb"]).unwrap();
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("0 get a place, 3 do not"), "{text}");
    assert!(text.contains("default/whatif-1, default/whatif-2, default/whatif-3 (N"), "{text}");
    assert!(text.contains("no PartitionPolicy matches it"), "{text}");
    assert!(text.contains("2 GPUs stay as they are"), "{text}");

    let dynamic = policy("all", json!({ "mig": { "mode": "Dynamic" } }));
    let (code, text) = trial(&files, &cluster, &[dynamic], &["5x nvidia.com/mig-3g.40gb"]).unwrap();
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("all (tried): 2 GPUs on 1 nodes"), "{text}");
    assert!(text.contains("managed by all; now by no policy"), "{text}");
    assert!(text.contains("+ 3g.40gb at slice 4 is made, for pod default/whatif-"), "{text}");
    assert!(text.contains("4 get a place, 1 do not"), "{text}");
    assert!(
        text.contains("default/whatif-5 (NoRoom): needs 3g.40gb: 2 GPUs have too little memory free"),
        "{text}"
    );
}

#[test]
fn what_a_policy_does_to_instances_that_are_there_is_said() {
    let files = Files::new("instances");
    let mut there = gpu("GPU-0", 0);
    there.instances = vec![instance("1g.10gb", 0), instance("3g.40gb", 4)];
    let mut cluster = node("a", vec![there]);
    cluster.push(policy("old", json!({ "mig": { "mode": "Dynamic" } })));
    let layout = json!({ "mig": { "mode": "Static", "layout": [{ "profile": "3g.40gb", "count": 2 }] } });
    let (_, text) = trial(&files, &dump(cluster.clone()), &[policy("old", layout.clone())], &[]).unwrap();
    assert!(text.contains("= 3g.40gb at slice 4 is there, in the layout of old"), "{text}");
    assert!(text.contains("+ 3g.40gb at slice 0 is made, in the layout of old"), "{text}");
    assert!(text.contains("- 1g.10gb at slice 0 is idle and in the way: it is destroyed"), "{text}");
    // Beside the old one it is a conflict, which is said, and nothing is done.
    let (_, text) = trial(&files, &dump(cluster), &[policy("new", layout)], &[]).unwrap();
    assert!(text.contains("SharedGpu: 1 GPUs are also matched by old; they are left as they are"), "{text}");
    assert!(!text.contains("is made"), "{text}");
}

#[test]
fn what_a_policy_may_not_say_is_refused_as_at_admission() {
    let files = Files::new("refused");
    let cluster = dump(node("a", vec![gpu("GPU-0", 0)]));
    let never = policy(
        "p",
        json!({
            "gpus": { "products": ["NVIDIA A100*"] },
            "mig": { "mode": "Static", "layout": [{ "profile": "9g.90gb" }] },
        }),
    );
    let (code, text) = trial(&files, &cluster, &[never], &[]).unwrap();
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("PartitionPolicy p is refused: spec.mig.layout[0].profile"), "{text}");
    let typo =
        policy("p", json!({ "mig": { "mode": "Dynamic", "warn": [{ "profile": "1g.10gb", "count": 1 }] } }));
    let error = trial(&files, &cluster, &[typo], &[]).unwrap_err();
    assert!(error.contains("PartitionPolicy p: unknown field spec.mig.warn"), "{error}");
}

/// A pod that runs on an instance, with its claim; `node` has the entry for it.
fn running(name: &str, node: &GpuNode) -> Vec<Value> {
    let partitions: Vec<_> = node.spec.partitions.iter().filter(|one| owns(one, name)).cloned().collect();
    let original =
        json!({ "containers": [{ "name": "main", "resources": { "nvidia.com/mig-3g.40gb": 1 } }] });
    let uid = format!("uid-of-{name}");
    let owner = |uid: &str| json!([{ "apiVersion": "v1", "kind": "X", "name": name, "uid": uid, "controller": true }]);
    let class = "mig-3g.40gb.kerf.dev";
    let mut claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {
            "name": format!("claim-of-{name}"), "namespace": "default", "uid": format!("claim-{name}"),
            "resourceVersion": "2", "ownerReferences": owner(&uid),
        },
        "spec": { "devices": { "requests": [{ "name": "device-0", "exactly": { "deviceClassName": class } }] } },
    }))
    .unwrap();
    let pod = json!({
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "default", "uid": uid, "resourceVersion": "1", "ownerReferences": owner("set"),
            "annotations": { names::ORIGINAL_RESOURCES: original.to_string(), names::MOVABLE: "true" },
        },
        "spec": {
            "nodeName": "a",
            "resourceClaims": [{ "name": names::POD_CLAIM, "resourceClaimName": format!("claim-of-{name}") }],
            "containers": [{ "name": "main" }],
        },
    });
    let made = claims::allocate(&claim, node, &partitions, "2026-01-01T00:00:00Z".parse().unwrap());
    let status = claim.status.get_or_insert_default();
    status.allocation = Some(made.unwrap());
    status.reserved_for =
        Some(vec![claims::reservation(&serde_json::from_value::<Pod>(pod.clone()).unwrap().into())]);
    let mut claim = serde_json::to_value(claim).unwrap();
    claim["kind"] = json!("ResourceClaim");
    vec![pod, claim]
}

fn owns(partition: &Partition, pod: &str) -> bool {
    matches!(&partition.owner, Owner::Claim(owner) if owner.pod == pod)
}

#[test]
fn moves_are_tried_as_if_the_pod_had_waited() {
    let files = Files::new("moves");
    let mut objects = node("a", vec![gpu("GPU-0", 0), gpu("GPU-1", 1)]);
    let mut reported: GpuNode = serde_json::from_value(objects[1].clone()).unwrap();
    for (index, pod) in ["m", "n"].into_iter().enumerate() {
        let status = reported.status.as_mut().unwrap();
        status.gpus[index].instances.push(Instance { processes: 1, ..instance("3g.40gb", 4) });
        reported.spec.partitions.push(Partition {
            gpu: format!("GPU-{index}"),
            instance: Some(wanted("3g.40gb", 4)),
            share: None,
            owner: Owner::Claim(ClaimOwner {
                namespace: "default".into(),
                name: format!("claim-of-{pod}"),
                pod: pod.into(),
                pod_uid: format!("uid-of-{pod}"),
                request: "device-0".into(),
            }),
        });
    }
    objects[1] = serde_json::to_value(&reported).unwrap();
    objects.extend(running("m", &reported));
    objects.extend(running("n", &reported));
    let cluster = dump(objects);
    let with = |spec: Value| {
        trial(&files, &cluster, &[policy("all", spec)], &["1x nvidia.com/mig-7g.80gb"]).unwrap().1
    };
    let text = with(json!({}));
    assert!(
        text.contains("default/whatif-1 (NoRoom): needs 7g.80gb: 2 GPUs have too little memory free"),
        "{text}"
    );
    assert!(!text.contains("moved"), "{text}");
    let text = with(json!({ "reshape": { "moves": { "maxPods": 1, "afterSeconds": 60 } } }));
    assert!(text.contains("default/whatif-1 (MakingRoom): room is being made on node a: default/"), "{text}");
    assert!(text.contains("is moved to node a to make room for default/whatif-1"), "{text}");
    assert!(
        text.contains("3g.40gb at slice 0 is made, kept for what comes in place of pod default/"),
        "{text}"
    );
}

#[test]
fn pods_are_admitted_as_the_webhook_admits_them() {
    let files = Files::new("pods");
    let cluster = dump(node("a", vec![gpu("GPU-0", 0)]));
    let run_with = |pods: &str| {
        run(Command::Try(Try {
            policies: on(&files, &cluster, &[policy("all", json!({}))]),
            pods: vec![files.write("pods.yaml", pods)],
            add: Vec::new(),
        }))
    };
    let (_, text) = run_with(
        r#"
kind: Pod
metadata: { name: by-resource, namespace: team }
spec: { containers: [{ name: main, resources: { limits: { nvidia.com/mig-2g.20gb: 2 } } }] }
---
kind: ResourceClaimTemplate
metadata: { name: any, namespace: team }
spec: { spec: { devices: { requests: [{ name: r, exactly: { deviceClassName: mig-1g.10gb.kerf.dev } }] } } }
---
kind: Pod
metadata: { name: by-claim, namespace: team }
spec:
  nodeSelector: { pool: nowhere }
  resourceClaims: [{ name: c, resourceClaimTemplateName: any }]
  containers: [{ name: main, resources: { claims: [{ name: c }] } }]
"#,
    )
    .unwrap();
    assert!(text.contains("team/by-resource gets 2g.20gb at slice "), "{text}");
    assert!(text.contains("team/by-claim (NodesDoNotFit): needs "), "{text}");
    assert!(text.contains("1 node is not selected by the pod"), "{text}");
    let refused = r#"{"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "main",
        "resources": {"limits": {"nvidia.com/mig-2g.20gb": "500m"}}}]}}"#;
    let error = run_with(refused).unwrap_err();
    assert!(
        error.contains("pod default/p is refused")
            && error.contains("no whole number") | error.contains("not a whole number"),
        "{error}"
    );
    let error = run_with("kind: Deployment\nmetadata: { name: d }").unwrap_err();
    assert!(error.contains("Deployment d is no Pod"), "{error}");
}

#[test]
fn a_policy_that_lets_instances_carry_shares_is_tried() {
    let files = Files::new("carriers");
    let sharing = Sharing { max_clients: 48, ..Sharing::default() };
    let mut objects = node("a", vec![Gpu { sharing: Some(sharing), ..gpu("GPU-0", 0) }]);
    objects.push(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": "share.kerf.dev" },
        "spec": { "selectors": [{ "cel": { "expression": "device.attributes['gpu.kerf.dev'].type == 'share'" } }] },
    }));
    let pods: Vec<String> = ["one", "two", "three"]
        .into_iter()
        .map(|name| {
            let limits = json!({ "kerf.dev/gpu-memory": "10Gi", "kerf.dev/gpu-compute": "14" });
            json!({ "kind": "Pod", "metadata": { "name": name }, "spec": {
                "containers": [{ "name": "main", "resources": { "limits": limits } }] } })
            .to_string()
        })
        .collect();
    let shares = json!({ "instances": ["3g.*"], "isolation": "Process" });
    let (_, text) = run(Command::Try(Try {
        policies: on(&files, &dump(objects), &[policy("all", json!({ "shares": shares }))]),
        pods: vec![files.write("pods.yaml", &format!("---\n{}", pods.join("\n---\n")))],
        add: vec!["1x nvidia.com/mig-4g.40gb".into()],
    }))
    .unwrap();
    assert!(text.contains("4 get a place, 0 do not"), "{text}");
    let of_share = "+ a share of 10Gi and 14.142 % of the 3g.40gb at slice 4 is made, for pod default/";
    assert_eq!(text.matches(of_share).count(), 3, "{text}");
    assert!(text.contains("+ 4g.40gb at slice 0 is made, for pod default/whatif-"), "{text}");
}

#[test]
fn what_is_no_dump_is_an_error_that_says_why() {
    let files = Files::new("errors");
    let error = |text: &str| trial(&files, text, &[], &[]).unwrap_err();
    assert!(error("{").contains("this is no JSON"));
    assert!(error("a: [").contains("this is no YAML"));
    assert!(error("a: 1").contains("it has no kind"));
    assert!(error("kind: List\nitems: []").contains("there is no Node in the dump"));
    assert!(error("kind: List\nitems: [{kind: Pod, metadata: 5}]").contains("Pod"));
    let cluster = dump(node("a", vec![gpu("GPU-0", 0)]));
    let error = trial(&files, &cluster, &[], &["many mig-1g"]).unwrap_err();
    assert!(error.contains("is not of the form"), "{error}");
}

#[test]
fn a_record_is_planned_again_and_kept_as_a_test() {
    use super::replay::Replay;
    let files = Files::new("replay");
    let world = crate::testing::world(vec![vec![gpu("GPU-0", 0)]], json!({ "mode": "Dynamic" }))
        .with_pod(crate::testing::gated_pod("p", "nvidia.com/mig-3g.40gb", json!({})));
    let decided = crate::scheduler::cycle::decide(
        &world,
        &Default::default(),
        &Default::default(),
        std::time::Instant::now(),
        0,
    );
    let planned = decided.planned.unwrap();
    let mut record = Record {
        about: "a test".into(),
        hash: hash(&planned.snapshot),
        snapshot: planned.snapshot,
        plan: planned.plan,
    };
    let replay = |record: &Record| {
        let file = files.write("record.json", &serde_json::to_string(record).unwrap());
        run(Command::Replay(Replay { record: file, as_test: Some(files.0.clone()) })).unwrap()
    };
    let (code, text) = replay(&record);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("planned as recorded: 1 placements"), "{text}");
    let case = std::fs::read_to_string(files.0.join(format!("{}.json", record.hash))).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&case).unwrap(), record);

    let instance = record.plan.placements[0].devices[0].instance.as_mut().unwrap();
    instance.start = 1;
    let (code, text) = replay(&record);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains(
            "default/p\n  recorded: node n0: GPU-0 3g.40gb at slice 1 (to be made)\n  now:      node n0"
        ),
        "{text}"
    );
    assert!(text.contains("the recorded plan breaks a rule"), "{text}");
}

#[test]
fn a_trace_is_played_on_the_gpus_of_a_cluster_without_those_who_have_them() {
    let files = Files::new("trace");
    let mut there = gpu("GPU-0", 0);
    there.instances = vec![Instance { processes: 1, ..instance("7g.80gb", 0) }];
    let cluster = dump(node("a", vec![there]));
    let play = |trace: &str| {
        let policies = on(&files, &cluster, &[policy("all", json!({}))]);
        run(Command::Trace(Trace { trace: files.write("trace.csv", trace), policies }))
    };
    // Two fit, a third one that comes meanwhile does not, a fourth comes as the first two go.
    let half = "nvidia.com/mig-3g.40gb";
    let trace = format!(
        "arrival,duration,resource,count\n0,10,{half}\n5,10,{half},1\n6,1,{half}\n10,5,{half}\n9,1,{half},3\n"
    );
    let (code, text) = play(&trace).unwrap();
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("nvidia.com/mig-3g.40gb: 3 of 4 pods found a place (75.0 %)"), "{text}");
    assert!(text.contains("3 of nvidia.com/mig-3g.40gb: 0 of 1 pods found a place (0.0 %)"), "{text}");
    // 25 of 26 seconds of four slices, and one of twelve.
    assert!(text.contains("all: 3 of 5 pods, 86.2 % of the memory slices asked for, by time"), "{text}");
    let error = |trace: &str| play(trace).unwrap_err();
    assert!(
        error("0,x,nvidia.com/mig-3g.40gb")
            .contains("line 1: \"0,x,nvidia.com/mig-3g.40gb\" is not of the form")
    );
    assert!(error("").contains("there is no pod in the trace"));
    assert!(error("0,1,cpu").contains("cpu"));
}
