use kerf_crds::conditions::pod_reason;
use kerf_planner::snapshot::Want;
use serde_json::{Value, json};

use super::*;
use crate::scheduler::snapshot;
use crate::scheduler::views::Views;
use crate::testing::{claim, claiming_pod, gated_pod, gpu, world};

fn asks(world: &World, pod: &str) -> Asks {
    let board = snapshot::take(world, &Views::of(world), |_| true);
    let pod = world.pods.get(&format!("default/{pod}")).unwrap();
    read(world, &board, &Selectors::default(), &Memo::default(), pod)
}

fn two_gpus() -> World {
    world(vec![vec![gpu("GPU-0", 0), gpu("GPU-1", 1)]], json!({"mode": "Dynamic"}))
}

fn for_claim(devices: Value) -> Asks {
    let world = two_gpus().with_claim(claim("c", devices)).with_pod(claiming_pod("p", &["c"]));
    asks(&world, "p")
}

fn wanted(asks: Asks) -> Wanted {
    match asks {
        Asks::For(wanted) => *wanted,
        other => panic!("{other:?}"),
    }
}

fn refused(asks: Asks) -> String {
    match asks {
        Asks::Cannot(reason, message) => {
            assert_eq!(reason, pod_reason::BAD_CLAIM);
            message
        }
        other => panic!("{other:?}"),
    }
}

fn profiles(want: &Want) -> Vec<usize> {
    want.profiles.values().flatten().copied().collect()
}

#[test]
fn the_webhooks_annotation_becomes_a_request() {
    let world = two_gpus().with_pod(gated_pod("p", "nvidia.com/mig-1g.10gb.me", json!({})));
    let wanted = wanted(asks(&world, "p"));
    assert_eq!(wanted.request.devices.len(), 1);
    assert_eq!(profiles(&wanted.request.devices[0].alternatives[0]), [1], "1g.10gb+me and nothing else");
    assert!(!wanted.request.devices[0].alternatives[0].whole);
    assert_eq!(wanted.parts["device-0"], ("claim-of-p".to_owned(), "device-0".to_owned()));
    assert_eq!(wanted.request.pod.milli["cpu"], 100);
}

#[test]
fn a_profile_that_nobody_has_is_asked_for_and_refused_by_the_planner() {
    let world = two_gpus().with_pod(gated_pod("p", "nvidia.com/mig-9g.90gb", json!({})));
    assert!(profiles(&wanted(asks(&world, "p")).request.devices[0].alternatives[0]).is_empty());
}

#[test]
fn a_selector_on_capacity_picks_the_profiles_that_are_large_enough() {
    let expression = "device.capacity['gpu.kerf.dev'].memory.compareTo(quantity('16Gi')) >= 0 && \
                      device.capacity['gpu.kerf.dev'].memory.compareTo(quantity('32Gi')) <= 0";
    let wanted = wanted(for_claim(json!({"requests": [{"name": "r", "exactly": {
        "deviceClassName": "mig.kerf.dev", "selectors": [{"cel": {"expression": expression}}], "count": 2,
    }}]})));
    let want = &wanted.request.devices[0].alternatives[0];
    assert_eq!((profiles(want), want.count), (vec![2, 3, 4], 2));
    assert_eq!(want.gpus, None);
}

#[test]
fn a_capacity_request_is_a_lower_bound() {
    let wanted = wanted(for_claim(json!({"requests": [{"name": "r", "exactly": {
        "deviceClassName": "mig.kerf.dev", "capacity": {"requests": {"memory": "33Gi"}},
    }}]})));
    assert_eq!(profiles(&wanted.request.devices[0].alternatives[0]), [5]);
}

#[test]
fn a_selector_on_one_gpu_keeps_to_that_gpu() {
    let wanted = wanted(for_claim(json!({"requests": [{"name": "r", "exactly": {
        "deviceClassName": "gpu.kerf.dev",
        "selectors": [{"cel": {"expression": "device.attributes['gpu.kerf.dev'].uuid == 'GPU-1'"}}],
    }}]})));
    let want = &wanted.request.devices[0].alternatives[0];
    assert!(want.whole);
    assert_eq!(want.gpus, Some(BTreeSet::from([(0, 1)])));
}

#[test]
fn alternatives_keep_their_order_and_names() {
    let wanted = wanted(for_claim(json!({"requests": [{"name": "r", "firstAvailable": [
        {"name": "big", "deviceClassName": "mig-7g.80gb.kerf.dev"},
        {"name": "small", "deviceClassName": "mig-1g.10gb.kerf.dev", "count": 3},
    ]}]})));
    let alternatives = &wanted.request.devices[0].alternatives;
    assert_eq!(alternatives[0].subrequest.as_deref(), Some("big"));
    assert_eq!((alternatives[1].subrequest.as_deref(), alternatives[1].count), (Some("small"), 3));
}

#[test]
fn constraints_compare_what_is_the_same_on_a_whole_gpu() {
    let devices = |attribute: &str| {
        json!({
            "requests": [
                {"name": "a", "exactly": {"deviceClassName": "mig.kerf.dev"}},
                {"name": "b", "exactly": {"deviceClassName": "mig.kerf.dev"}},
            ],
            "constraints": [{"requests": ["a", "b"], "matchAttribute": attribute}],
        })
    };
    let wanted = wanted(for_claim(devices("gpu.kerf.dev/parentUUID")));
    let constraint = &wanted.request.constraints[0];
    assert_eq!(constraint.requests, BTreeSet::from(["a".into(), "b".into()]));
    assert_ne!(constraint.values[&(0, 0)], constraint.values[&(0, 1)]);
    assert!(refused(for_claim(devices("gpu.kerf.dev/profile"))).contains("parentUUID"));
}

#[test]
fn what_cannot_be_served_is_said_with_a_remedy() {
    let exactly = |extra: Value| {
        let mut request = json!({"deviceClassName": "mig.kerf.dev"});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        for_claim(json!({"requests": [{"name": "r", "exactly": request}]}))
    };
    assert!(refused(exactly(json!({"allocationMode": "All"}))).contains("whole GPUs only"));
    assert!(refused(exactly(json!({"allocationMode": "Some"}))).contains("ExactCount"));
    assert!(refused(exactly(json!({"adminAccess": true}))).contains("adminAccess"));
    assert!(
        refused(exactly(json!({"selectors": [{"cel": {"expression": "nonsense("}}]}))).contains("nonsense(")
    );
    let mixed = json!({"requests": [
        {"name": "r", "exactly": {"deviceClassName": "mig.kerf.dev"}},
        {"name": "n", "exactly": {"deviceClassName": "nic.example.com"}},
    ]});
    assert!(refused(for_claim(mixed)).contains("nic.example.com"));
}

#[test]
fn claims_of_others_are_none_of_kerfs_business() {
    let devices = json!({"requests": [{"name": "n", "exactly": {"deviceClassName": "nic.example.com"}}]});
    assert!(matches!(for_claim(devices), Asks::Nothing));
}

#[test]
fn a_pod_with_a_shared_claim_goes_where_the_claim_is() {
    let mut shared =
        claim("shared", json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig.kerf.dev"}}]}));
    shared.status = serde_json::from_value(json!({"allocation": {"devices": {"results": [
        {"request": "r", "driver": "gpu.kerf.dev", "pool": "n0", "device": "gpu-0-mig-19-0"},
    ]}}}))
    .unwrap();
    let own =
        claim("own", json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig.kerf.dev"}}]}));
    let world =
        two_gpus().with_claim(shared).with_claim(own).with_pod(claiming_pod("both", &["shared", "own"]));
    let wanted = wanted(asks(&world, "both"));
    assert_eq!(wanted.request.pod.affinity[0][0].values, ["n0"]);
    assert_eq!(wanted.request.devices.len(), 1);
    let world = world.with_pod(claiming_pod("only", &["shared"]));
    assert!(matches!(asks(&world, "only"), Asks::Allocated));
}

#[test]
fn two_claims_with_the_same_request_names_stay_apart() {
    let devices = json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig.kerf.dev"}}]});
    let world = two_gpus()
        .with_claim(claim("x", devices.clone()))
        .with_claim(claim("y", devices))
        .with_pod(claiming_pod("p", &["x", "y"]));
    let wanted = wanted(asks(&world, "p"));
    assert_eq!(wanted.parts["x/r"], ("x".to_owned(), "r".to_owned()));
    assert_eq!(wanted.parts["y/r"], ("y".to_owned(), "r".to_owned()));
}

#[test]
fn a_claim_for_more_devices_than_an_allocation_holds_is_refused() {
    let ask = |b: i64| {
        let exactly = |count: i64| json!({"deviceClassName": "mig-1g.10gb.kerf.dev", "count": count});
        let requests =
            [json!({"name": "a", "exactly": exactly(20)}), json!({"name": "b", "exactly": exactly(b)})];
        for_claim(json!({"requests": requests}))
    };
    wanted(ask(12));
    let message = refused(ask(13));
    assert!(message.contains("asks for 33 devices") && message.contains("at most 32"), "{message}");
}

#[test]
fn all_gpus_are_those_of_one_node_and_none_may_be_taken() {
    let all = json!({"requests": [{"name": "r", "exactly": {
        "deviceClassName": "gpu.kerf.dev", "allocationMode": "All",
    }}]});
    let placed = |busy: &[&str]| {
        let gpu = |uuid: &str, index| {
            let mut gpu = gpu(uuid, index);
            gpu.mig.enabled = false;
            gpu.processes = u32::from(busy.contains(&uuid));
            gpu
        };
        let nodes = vec![
            vec![gpu("GPU-0", 0), gpu("GPU-1", 1), gpu("GPU-2", 2)],
            vec![gpu("GPU-3", 0), gpu("GPU-4", 1)],
        ];
        let world = world(nodes, json!({"mode": "Dynamic"}))
            .with_claim(claim("c", all.clone()))
            .with_pod(claiming_pod("p", &["c"]));
        let mut snapshot = snapshot::take(&world, &Views::of(&world), |_| true).snapshot;
        snapshot.requests.push(wanted(asks(&world, "p")).request);
        let plan = kerf_planner::plan(&snapshot);
        plan.placements.first().map(|placement| {
            (placement.node, placement.devices.iter().map(|device| device.gpu).collect::<BTreeSet<_>>())
        })
    };
    assert_eq!(placed(&[]), Some((1, [0, 1].into())));
    assert_eq!(placed(&["GPU-4"]), Some((0, [0, 1, 2].into())));
    assert_eq!(placed(&["GPU-0", "GPU-4"]), None);
}

#[test]
fn a_gpu_that_is_unhealthy_is_still_one_of_all() {
    let mut broken = gpu("GPU-1", 1);
    broken.unhealthy =
        serde_json::from_value(json!({"reason": "Xid", "message": "fell off the bus"})).unwrap();
    let all = json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.kerf.dev", "allocationMode": "All"}}]});
    let world = world(vec![vec![gpu("GPU-0", 0), broken]], json!({"mode": "Dynamic"}))
        .with_claim(claim("c", all))
        .with_pod(claiming_pod("p", &["c"]));
    let mut snapshot = snapshot::take(&world, &Views::of(&world), |_| true).snapshot;
    snapshot.requests.push(wanted(asks(&world, "p")).request);
    assert_eq!(snapshot.requests[0].devices[0].alternatives[0].count, 2);
    assert!(kerf_planner::plan(&snapshot).placements.is_empty());
}
