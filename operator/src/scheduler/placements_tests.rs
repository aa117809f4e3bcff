use k8s_openapi::api::resource::v1::DeviceRequestAllocationResult;
use serde_json::json;

use super::*;
use crate::testing::{claim, claiming_pod, gated_pod, gpu, instance, wanted, world};
use kerf_crds::gpu_node::{ClaimOwner, WantedShare};
use kerf_planner::protocol::{Claim, Pod};

fn key() -> Key {
    Key {
        node: "n0".into(),
        namespace: "default".into(),
        claim: "claim-of-p".into(),
        pod: "p".into(),
        pod_uid: "uid-of-p".into(),
    }
}

fn partition() -> Partition {
    Partition {
        gpu: "GPU-0".into(),
        instance: Some(wanted("3g.40gb", 4)),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "default".into(),
            name: "claim-of-p".into(),
            pod: "p".into(),
            pod_uid: "uid-of-p".into(),
            request: "device-0".into(),
        }),
    }
}

/// A gated pod with a place on record, and its claim in this state.
fn placed(claim: impl FnOnce(&World, &PodInfo) -> Option<ResourceClaim>) -> World {
    let pod = gated_pod("p", "nvidia.com/mig-3g.40gb", json!({}));
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], json!({})).with_pod(pod.clone());
    world.replace_gpu_node(|node| node.spec.partitions = vec![partition()], "n0");
    if let Some(claim) = claim(&world, &pod) {
        world.claims.watch_applied(claim);
    }
    world
}

fn made(pod: &PodInfo) -> ResourceClaim {
    let original = pod.detail.as_ref().unwrap().original.as_ref().unwrap().as_ref().unwrap();
    claims::from_annotation(pod, "claim-of-p", original)
}

fn allocated(world: &World, pod: &PodInfo, hold: bool) -> ResourceClaim {
    let mut claim = made(pod);
    let node = world.gpu_nodes.get("n0").unwrap();
    let status = claim.status.get_or_insert_default();
    status.allocation =
        claims::allocate(&made(pod), node, &[partition()], "2026-01-01T00:00:00Z".parse().unwrap());
    status.reserved_for = Some(vec![claims::reservation(pod)]);
    if hold {
        status.reserved_for.as_mut().unwrap().push(claims::hold(node));
    }
    claim
}

fn observed(world: &World) -> Observed {
    look(world, &Memory::default(), &key()).observed
}

#[test]
fn a_claim_is_ours_by_its_owner_and_planned_by_its_devices() {
    assert_eq!(observed(&placed(|_, _| None)).claim, Claim::Absent);
    assert_eq!(observed(&placed(|_, pod| Some(made(pod)))).claim, Claim::Unallocated);
    let as_planned = |held| Claim::Allocated { as_planned: true, held, deleting: false };
    assert_eq!(observed(&placed(|world, pod| Some(allocated(world, pod, false)))).claim, as_planned(false));
    assert_eq!(observed(&placed(|world, pod| Some(allocated(world, pod, true)))).claim, as_planned(true));
    let stolen = placed(|_, pod| {
        let mut claim = made(pod);
        claim.metadata.owner_references = None;
        Some(claim)
    });
    assert_eq!(observed(&stolen).claim, Claim::Stolen);
    let elsewhere = placed(|world, pod| {
        let mut claim = allocated(world, pod, false);
        let status = claim.status.as_mut().unwrap();
        let devices = status.allocation.as_mut().unwrap().devices.as_mut().unwrap();
        devices.results.as_mut().unwrap()[0].device = "gpu-0-mig-9-0".into();
        Some(claim)
    });
    assert_eq!(
        observed(&elsewhere).claim,
        Claim::Allocated { as_planned: false, held: false, deleting: false }
    );
}

#[test]
fn a_place_is_ready_when_the_instance_is_there_and_free_for_this_claim() {
    let mut world = placed(|_, pod| Some(made(pod)));
    let ready = |world: &World| observed(world).entry.unwrap().ready;
    assert!(!ready(&world), "not made yet");
    let mut set = |change: &dyn Fn(&mut kerf_crds::gpu_node::Instance)| {
        world.replace_gpu_node(
            |node| {
                let mut there = instance("3g.40gb", 4);
                change(&mut there);
                node.status.as_mut().unwrap().gpus[0].instances = vec![there];
            },
            "n0",
        );
        let entry = observed(&world).entry.unwrap();
        (entry.ready, entry.in_use)
    };
    assert_eq!(set(&|_| {}), (true, false));
    assert_eq!(set(&|instance| instance.uuid = None), (false, false));
    assert_eq!(set(&|instance| instance.processes = 1), (false, true));
    let other = ClaimReference { namespace: "default".into(), name: "other".into(), uid: "o".into() };
    assert_eq!(set(&|instance| instance.claims.push(other.clone())), (false, true));
    let own = ClaimReference { namespace: "default".into(), name: "claim-of-p".into(), uid: String::new() };
    assert_eq!(set(&|instance| instance.claims.push(own.clone())), (true, true));
}

#[test]
fn the_pod_is_the_one_with_the_uid_and_not_its_namesake() {
    let mut world = placed(|_, pod| Some(made(pod)));
    assert_eq!(observed(&world).pod, Pod::Gated);
    let mut namesake = gated_pod("p", "nvidia.com/mig-3g.40gb", json!({}));
    namesake.uid = "another".into();
    namesake.version = 7;
    world.put_pod(namesake, |store, pod| store.watch_applied(pod));
    assert_eq!(observed(&world).pod, Pod::Gone);
}

/// What is seen of the record of pod `a`, which is over, for a claim that is allocated to this partition and reserved for
/// pod `b`. A process is left on the record's own partition.
fn of_a_pod_that_is_over(allocated: &Partition) -> Observed {
    let of = |partition: &Partition, pod: &str| {
        let owner = ClaimOwner {
            namespace: "default".into(),
            name: "c".into(),
            pod: pod.into(),
            pod_uid: format!("uid-of-{pod}"),
            request: "r".into(),
        };
        Partition { owner: Owner::Claim(owner), ..partition.clone() }
    };
    let mut records = vec![of(&partition(), "a")];
    if *allocated != partition() {
        records.push(of(allocated, "b"));
    }
    let next = claiming_pod("b", &["c"]);
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], json!({})).with_pod(next.clone());
    world.replace_gpu_node(
        |node| {
            node.spec.partitions = records;
            node.status.as_mut().unwrap().gpus[0].instances =
                vec![kerf_crds::gpu_node::Instance { processes: 1, ..instance("3g.40gb", 4) }];
        },
        "n0",
    );
    let requests =
        json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig-3g.40gb.kerf.dev"}}]});
    let mut shared = claim("c", requests);
    let node = world.gpu_nodes.get("n0").unwrap();
    let allocation =
        claims::allocate(&shared, node, &[of(allocated, "b")], "2026-01-01T00:00:00Z".parse().unwrap());
    let status = shared.status.get_or_insert_default();
    status.allocation = allocation;
    status.reserved_for = Some(vec![claims::reservation(&next)]);
    let key = Key { claim: "c".into(), pod: "a".into(), pod_uid: "uid-of-a".into(), ..key() };
    look(&world.with_claim(shared), &Memory::default(), &key).observed
}

#[test]
fn a_record_is_kept_for_another_pod_that_shares_the_claim_and_not_for_one_that_has_a_place_of_its_own() {
    assert_eq!(of_a_pod_that_is_over(&partition()).pod, Pod::Unbound);
    let elsewhere = Partition { instance: Some(wanted("3g.40gb", 0)), ..partition() };
    let seen = of_a_pod_that_is_over(&elsewhere);
    assert_eq!((&seen.pod, &seen.claim), (&Pod::Gone, &Claim::Absent));
    assert_eq!(protocol::next(&seen), protocol::Step::Wait(protocol::Waiting::Release));
}

fn result(device: &str) -> DeviceRequestAllocationResult {
    DeviceRequestAllocationResult { device: device.to_owned(), ..DeviceRequestAllocationResult::default() }
}

#[test]
fn devices_and_their_names_are_each_others_inverse() {
    let world = placed(|_, _| None);
    let node = world.gpu_nodes.get("n0").unwrap();
    let name = claims::device_of(node, &partition()).unwrap();
    assert_eq!(name, "gpu-0-mig-9-4");
    assert_eq!(claims::partition_of(node, &result(&name), partition().owner), Some(partition()));
    let whole = Partition { instance: None, ..partition() };
    assert_eq!(claims::partition_of(node, &result("gpu-0"), partition().owner), Some(whole));
    assert_eq!(claims::partition_of(node, &result("gpu-1-mig-9-4"), partition().owner), None);
    let share = WantedShare {
        id: "s".into(),
        memory_bytes: 12 << 30,
        compute_milli: 30_500,
        ..WantedShare::default()
    };
    let share = Partition { instance: None, share: Some(share), ..partition() };
    let claim = ResourceClaim::default();
    let now = "2026-01-01T00:00:00Z".parse().unwrap();
    let allocation = claims::allocate(&claim, node, std::slice::from_ref(&share), now).unwrap();
    let result = claims::results(&allocation).next().unwrap();
    assert_eq!((result.device.as_str(), result.share_id.as_deref()), ("gpu-0-share", Some("s")));
    let consumed = result.consumed_capacity.as_ref().unwrap();
    assert_eq!((consumed["memory"].0.as_str(), consumed["compute"].0.as_str()), ("12Gi", "30500m"));
    assert_eq!(claims::partition_of(node, result, share.owner.clone()), Some(share));
}

#[test]
fn of_two_records_of_one_claim_the_allocated_one_stays() {
    let pod = gated_pod("p", "nvidia.com/mig-3g.40gb", json!({}));
    let mut world =
        world(vec![vec![gpu("GPU-0", 0)], vec![gpu("GPU-0", 0)]], json!({})).with_pod(pod.clone());
    for name in ["n0", "n1"] {
        world.replace_gpu_node(|node| node.spec.partitions = vec![partition()], name);
    }
    let keys = all(&world);
    assert_eq!(superseded(&world, &keys).iter().map(|key| key.node.as_str()).collect::<Vec<_>>(), ["n1"]);
    let mut claim = made(&pod);
    let node = world.gpu_nodes.get("n1").unwrap();
    claim.status.get_or_insert_default().allocation =
        claims::allocate(&made(&pod), node, &[partition()], "2026-01-01T00:00:00Z".parse().unwrap());
    world.claims.watch_applied(claim);
    assert_eq!(superseded(&world, &keys).iter().map(|key| key.node.as_str()).collect::<Vec<_>>(), ["n0"]);
}

#[test]
fn a_pod_bound_without_an_allocation_is_stranded() {
    let mut world = placed(|_, pod| Some(made(pod)));
    let mut bound = gated_pod("p", "nvidia.com/mig-3g.40gb", json!({}));
    bound.node = Some("n0".into());
    bound.version = 7;
    world.put_pod(bound, |store, pod| store.watch_applied(pod));
    assert!(
        stranded(&world, world.pods.iter()).is_empty(),
        "it is on record, so the protocol gives it back its allocation"
    );
    world.replace_gpu_node(|node| node.spec.partitions.clear(), "n0");
    assert_eq!(stranded(&world, world.pods.iter()).len(), 1);
}
