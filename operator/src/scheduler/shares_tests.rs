//! Shares of GPUs, from the pod to the allocation.

use std::collections::BTreeSet;
use std::time::Instant;

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{ClaimReference, DesiredMig, Isolation, Owner, Partition, Share};
use kerf_crds::names::DRIVER;
use serde_json::json;

use super::cycle::decide;
use super::decision::Decision;
use super::memory::Memory;
use super::selectors::Selectors;
use super::trouble::{self, Trouble};
use super::views::Views;
use super::{claims, placements, snapshot};
use crate::cache::World;
use crate::testing::{claim, claiming_pod, gated_pod, policy, sharing_gpu, sharing_pod, world};

fn decide_now(world: &World) -> Decision {
    decide(world, &Memory::default(), &Selectors::default(), Instant::now(), 0)
}

/// One node with such GPUs, which may be shared by this policy.
fn sharing(gpus: u32, shares: serde_json::Value) -> World {
    let gpus = (0..gpus).map(|index| sharing_gpu(&format!("GPU-{index}"), index)).collect();
    let mut world = world(vec![gpus], json!({"mode": "Dynamic"}));
    world.policies.watch_applied({
        let mut policy = policy("all", json!({"mig": {"mode": "Dynamic"}, "shares": shares}));
        policy.metadata.resource_version = Some("2".into());
        policy
    });
    world
}

fn allowed() -> serde_json::Value {
    json!({"gpus": "Allow"})
}

/// Writes what was decided of the only node.
fn commit(world: &mut World) -> Decision {
    let decision = decide_now(world);
    for write in &decision.specs {
        world.replace_gpu_node(|node| node.spec = write.spec.clone(), "n0");
    }
    decision
}

fn entries(world: &World) -> Vec<Partition> {
    world.gpu_nodes.get("n0").unwrap().spec.partitions.clone()
}

fn said(decision: &Decision, pod: &str) -> String {
    let of_pod = decision.sentences.iter().find(|(told, _)| told.name == pod);
    of_pod.map(|(_, sentence)| format!("{}: {}", sentence.reason, sentence.message)).unwrap_or_default()
}

#[test]
fn pods_of_any_sizes_meet_on_one_gpu_and_the_last_is_told_why_it_waits() {
    let mut world = sharing(1, allowed());
    for (name, gib, percent) in [("a", 10, 10), ("b", 15, 20), ("c", 20, 30), ("d", 25, 40)] {
        world = world.with_pod(sharing_pod(name, gib, percent));
    }
    commit(&mut world);
    let shares: Vec<_> = entries(&world).into_iter().map(|entry| entry.share.unwrap()).collect();
    let ids: BTreeSet<&str> = shares.iter().map(|share| share.id.as_str()).collect();
    assert_eq!(ids.len(), 4, "{shares:?}");
    assert!(ids.iter().all(|id| id.len() == 36 && id.to_lowercase() == **id));
    let mut sizes: Vec<_> =
        shares.iter().map(|share| (share.memory_bytes >> 30, share.compute_milli)).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [(10, 10_000), (15, 20_000), (20, 30_000), (25, 40_000)]);
    assert!(shares.iter().all(|share| share.isolation == Isolation::Driver));
    assert_eq!(world.gpu_nodes.get("n0").unwrap().spec.gpus[0].mig, DesiredMig::Disabled);
    // All compute is given out.
    let world = world.with_pod(sharing_pod("e", 1, 1));
    let decision = decide_now(&world);
    assert!(decision.specs.is_empty());
    assert!(
        said(&decision, "e").starts_with("NoRoom: needs a share of 1Gi and 1 %"),
        "{}",
        said(&decision, "e")
    );
    // A share does not leave a whole GPU, nor one to cut.
    let world = world.with_pod(gated_pod("whole", "nvidia.com/gpu", json!({}))).with_pod(gated_pod(
        "cut",
        "nvidia.com/mig-1g.10gb",
        json!({}),
    ));
    assert!(decide_now(&world).specs.is_empty());
}

#[test]
fn only_what_policy_and_driver_allow_is_shared_out() {
    let asks = |world: World| {
        let mut world = world.with_pod(sharing_pod("a", 10, 10));
        let decision = commit(&mut world);
        (entries(&world).len(), said(&decision, "a"))
    };
    assert_eq!(asks(sharing(1, json!({}))).0, 0, "no policy says so");
    let weak = |shares| {
        let mut world = sharing(1, shares);
        let process = |node: &mut kerf_crds::GpuNode| {
            let gpu = &mut node.status.as_mut().unwrap().gpus[0];
            gpu.sharing.as_mut().unwrap().isolation = Isolation::Process;
        };
        world.replace_gpu_node(process, "n0");
        world
    };
    assert_eq!(asks(weak(allowed())).0, 0, "by default only what the driver enforces");
    assert_eq!(asks(weak(json!({"gpus": "Allow", "isolation": "Process"}))).0, 1);
    // 80 GiB less the reserve.
    let of_size = |gib| {
        let mut world = sharing(1, allowed()).with_pod(sharing_pod("a", gib, 10));
        commit(&mut world);
        entries(&world).len()
    };
    assert_eq!((of_size(79), of_size(80)), (1, 0));
    let mut no_programs = sharing(1, allowed());
    no_programs.replace_gpu_node(|node| node.status.as_mut().unwrap().gpus[0].sharing = None, "n0");
    assert_eq!(asks(no_programs).0, 0);
}

#[test]
fn a_share_is_allocated_once_its_limits_are_in_force() {
    let mut world = sharing(1, allowed()).with_pod(sharing_pod("a", 10, 10));
    commit(&mut world);
    let share = entries(&world)[0].share.clone().unwrap();
    let key = placements::all(&world).into_iter().next().unwrap();
    let ready = |world: &World| {
        let seen = placements::look(world, &Memory::default(), &key);
        seen.observed.entry.map(|entry| (entry.ready, entry.in_use))
    };
    assert_eq!(ready(&world), Some((false, false)));
    let report = |problem: Option<&str>, claims: usize| {
        let share = Share {
            id: share.id.clone(),
            memory_bytes: share.memory_bytes,
            compute_percent: 10,
            isolation: Isolation::Driver,
            claims: vec![ClaimReference::default(); claims],
            problem: problem
                .map(|message| kerf_crds::gpu_node::Reason { reason: "x".into(), message: message.into() }),
            ..Share::default()
        };
        move |node: &mut kerf_crds::GpuNode| node.status.as_mut().unwrap().gpus[0].shares = vec![share]
    };
    world.replace_gpu_node(report(Some("the MPS server does not start"), 0), "n0");
    assert_eq!(ready(&world), Some((false, false)));
    let told = said(&decide_now(&world), "a");
    assert!(told.contains("the MPS server does not start"), "{told}");
    let lasting = problem_reason::ISOLATION_UNAVAILABLE;
    world.replace_gpu_node(
        |node| {
            report(Some("the driver has no limits now"), 0)(node);
            node.status.as_mut().unwrap().gpus[0].shares[0].problem.as_mut().unwrap().reason = lasting.into();
        },
        "n0",
    );
    let seen = placements::look(&world, &Memory::default(), &key);
    let board = snapshot::take(&world, &Views::of(&world), |_| true);
    assert!(matches!(trouble::of(&board, &seen, &key), Some(Trouble::Gpu(_))), "there may be a better place");
    world.replace_gpu_node(report(None, 0), "n0");
    assert_eq!(ready(&world), Some((true, false)));
    // With its pod gone, it stays on record while it is prepared for a claim, and takes its room.
    world.replace_gpu_node(report(None, 1), "n0");
    assert!(ready(&world).unwrap().1);
    world.replace_gpu_node(|node| node.spec.partitions.clear(), "n0");
    let world = world.with_pod(sharing_pod("large", 75, 10));
    assert!(decide_now(&world).specs.iter().all(|write| {
        write
            .spec
            .partitions
            .iter()
            .all(|entry| !matches!(&entry.owner, Owner::Claim(owner) if owner.pod == "large"))
    }));
}

#[test]
fn claims_of_users_ask_by_capacity() {
    let devices = |capacity| {
        json!({"requests": [{"name": "r", "exactly": {
            "deviceClassName": "share.kerf.dev", "capacity": {"requests": capacity},
        }}]})
    };
    let asked = |capacity| {
        let mut world = sharing(1, allowed())
            .with_claim(claim("c", devices(capacity)))
            .with_pod(claiming_pod("p", &["c"]));
        let decision = commit(&mut world);
        (entries(&world), said(&decision, "p"))
    };
    let (there, _) = asked(json!({"memory": "12Gi", "compute": "12500m"}));
    let share = there[0].share.as_ref().unwrap();
    assert_eq!((share.memory_bytes, share.compute_milli), (12 << 30, 13_000), "MPS takes whole percents");
    let (there, told) = asked(json!({"memory": "12Gi"}));
    assert!(
        there.is_empty() && told.contains("capacity.requests with memory in bytes and compute"),
        "{told}"
    );
}

#[test]
fn a_share_is_for_one_pod() {
    let mut shared = claim(
        "c",
        json!({"requests": [{"name": "r", "exactly": {
            "deviceClassName": "share.kerf.dev", "capacity": {"requests": {"memory": "12Gi", "compute": "10"}},
        }}]}),
    );
    shared.status = serde_json::from_value(json!({
        "allocation": {"devices": {"results": [
            {"request": "r", "driver": DRIVER, "pool": "n0", "device": "gpu-0-share", "shareID": "s"},
        ]}},
        "reservedFor": [{"resource": "pods", "name": "first", "uid": "uid-of-first"}],
    }))
    .unwrap();
    assert_eq!(claims::sole_consumer(&shared), Some("uid-of-first"));
    let world = sharing(1, allowed()).with_claim(shared).with_pod(claiming_pod("second", &["c"]));
    let told = said(&decide_now(&world), "second");
    assert!(told.starts_with("BadClaim") && told.contains("a claim of its own"), "{told}");
}

#[test]
fn a_pod_that_has_the_hosts_processes_gets_no_share() {
    let devices = json!({"requests": [{"name": "r", "exactly": {
        "deviceClassName": "share.kerf.dev", "capacity": {"requests": {"memory": "12Gi", "compute": "10"}},
    }}]});
    let mut pod = claiming_pod("p", &["c"]);
    pod.detail.as_mut().unwrap().host_access = Some("spec.hostPID".into());
    let world = sharing(1, allowed()).with_claim(claim("c", devices)).with_pod(pod);
    let told = said(&decide_now(&world), "p");
    assert!(told.starts_with("BadClaim: spec.hostPID"), "{told}");
}

/// One GPU in MIG mode whose instances of 3g may carry shares; the GPU itself may not.
fn sharing_instances(reserve: &str) -> World {
    let shares = json!({"instances": ["3g.*"], "isolation": "Process", "memoryReserve": reserve});
    let mut world = sharing(1, shares);
    world.replace_gpu_node(
        |node| {
            let gpu = &mut node.status.as_mut().unwrap().gpus[0];
            gpu.mig.enabled = true;
            gpu.sharing.as_mut().unwrap().isolation = Isolation::Process;
        },
        "n0",
    );
    world
}

fn places(world: &World) -> Vec<String> {
    let text = |entry: &Partition| {
        let Owner::Claim(owner) = &entry.owner else { return "not a pod's".to_owned() };
        let instance = entry.instance.as_ref();
        let at = instance.map(|wanted| format!("{}@{}", wanted.profile, wanted.placement.start));
        let share = entry.share.as_ref().map(|share| format!(" {} milli", share.compute_milli));
        format!("{} {}{}", owner.pod, at.unwrap_or_default(), share.unwrap_or_default())
    };
    let mut all: Vec<String> = entries(world).iter().map(text).collect();
    all.sort();
    all
}

#[test]
fn shares_meet_in_an_instance_that_is_made_for_them_beside_one_that_is_a_pods_alone() {
    let mut world = sharing_instances("1Gi");
    // An instance of 3g has 32 GiB here and 42 of 98 multiprocessors, 42.857 % of the GPU.
    for (name, gib, percent) in [("a", 8, 10), ("b", 10, 15), ("c", 12, 17)] {
        world = world.with_pod(sharing_pod(name, gib, percent));
    }
    world = world.with_pod(gated_pod("whole", "nvidia.com/mig-4g.40gb", json!({})));
    commit(&mut world);
    // 24, 35 and 40 % of the instance, in thousandths of a percent of the GPU.
    let there = ["a 3g.40gb@4 10285 milli", "b 3g.40gb@4 15000 milli", "c 3g.40gb@4 17142 milli"];
    assert_eq!(places(&world), [&there[..], &["whole 4g.40gb@0"]].concat());
    assert!(
        entries(&world)
            .iter()
            .filter_map(|entry| entry.share.as_ref())
            .all(|share| { share.isolation == Isolation::Process && share.id.len() == 36 })
    );
    assert_eq!(world.gpu_nodes.get("n0").unwrap().spec.gpus[0].mig, DesiredMig::Enabled);
    // Of the instance's memory 1 GiB is left beside the reserve, and of its compute 1 % of it.
    world = world.with_pod(sharing_pod("late", 1, 1));
    let told = said(&decide_now(&world), "late");
    assert!(told.starts_with("NoRoom: needs a share of 1Gi and 1 %"), "{told}");
    // As an allocation says it, and back.
    let node = world.gpu_nodes.get("n0").unwrap().clone();
    for entry in entries(&world) {
        let claim = claim("c", json!({}));
        let devices = [entry.clone()];
        let allocation = claims::allocate(&claim, &node, &devices, k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
        let allocation = allocation.unwrap();
        let result = claims::results(&allocation).next().unwrap();
        let device = if entry.share.is_some() { "gpu-0-mig-9-4-share" } else { "gpu-0-mig-5-0" };
        assert_eq!(result.device, device);
        assert_eq!(claims::partition_of(&node, result, entry.owner.clone()), Some(entry));
    }
}

#[test]
fn an_instance_is_one_pods_or_carries_shares() {
    // What exists and is free carries shares; what is a pod's does not.
    let mut world = sharing_instances("0").with_pod(gated_pod("whole", "nvidia.com/mig-3g.40gb", json!({})));
    commit(&mut world);
    for name in ["a", "b"] {
        world = world.with_pod(sharing_pod(name, 16, 20));
    }
    commit(&mut world);
    let start = |pod: &str| places(&world).iter().find(|place| place.starts_with(pod)).unwrap().clone();
    assert_eq!(start("a ").split(' ').nth(1), start("b ").split(' ').nth(1));
    assert_ne!(start("a ").split(' ').nth(1), start("whole").split(' ').nth(1));
    let world = world.with_pod(gated_pod("second", "nvidia.com/mig-3g.40gb", json!({})));
    assert!(decide_now(&world).specs.is_empty(), "the other one carries shares");
}

#[test]
fn whoever_demands_the_driver_gets_no_share_of_an_instance() {
    let mut pod = sharing_pod("p", 10, 10);
    if let Some(Ok(original)) = pod.detail.as_mut().and_then(|detail| detail.original.as_mut()) {
        original.isolation = Some(Isolation::Driver);
    }
    let mut world = sharing_instances("1Gi").with_pod(pod);
    commit(&mut world);
    assert!(places(&world).is_empty(), "{:?}", places(&world));
    // Nor is there any where the policy does not name the profile.
    let mut none = sharing_instances("1Gi").with_pod(sharing_pod("p", 10, 10));
    let mut policy = policy(
        "all",
        json!({"mig": {"mode": "Dynamic"},
        "shares": {"instances": ["7g.*"], "isolation": "Process"}}),
    );
    policy.metadata.resource_version = Some("3".into());
    none.policies.watch_applied(policy);
    commit(&mut none);
    assert_eq!(places(&none), ["p 7g.80gb@0 10000 milli"]);
}

#[test]
fn what_is_left_of_shares_in_an_instance_keeps_it_from_others() {
    let mut world = sharing_instances("0");
    world.replace_gpu_node(
        |node| {
            let gpu = &mut node.status.as_mut().unwrap().gpus[0];
            gpu.instances = vec![crate::testing::instance("3g.40gb", 0)];
            gpu.shares = vec![Share {
                id: "left".into(),
                placement: Some(gpu.instances[0].placement),
                memory_bytes: 22 << 30,
                compute_percent: 50,
                processes: 1,
                ..Share::default()
            }];
        },
        "n0",
    );
    let mut world = world.with_pod(gated_pod("whole", "nvidia.com/mig-4g.40gb", json!({})));
    commit(&mut world);
    assert!(places(&world).is_empty(), "its only place is in use");
    for (name, gib) in [("fits", 10), ("large", 11)] {
        world = world.with_pod(sharing_pod(name, gib, 10));
        commit(&mut world);
    }
    assert_eq!(
        places(&world),
        ["fits 3g.40gb@0 10285 milli", "large 3g.40gb@4 10285 milli"],
        "10 GiB of it are free"
    );
}
