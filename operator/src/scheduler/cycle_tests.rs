use kerf_crds::GpuNode;
use kerf_crds::gpu_node::ClaimOwner;
use serde_json::json;

use kube::ResourceExt;

use super::*;
use crate::cache::Stored;
use crate::scheduler::claims;
use crate::testing::{claim, claiming_pod, gated_pod, gpu, instance, node, wanted, world};

const WALL: i64 = 1_800_000_000;

fn decide_now(world: &World, memory: &Memory) -> Decision {
    decide(world, memory, &Selectors::default(), Instant::now(), WALL)
}

/// Writes what the decision tells the nodes, as the API server would.
fn commit_specs(world: &mut World, decision: &Decision) {
    for write in &decision.specs {
        let spec = write.spec.clone();
        world.replace_gpu_node(|node| node.spec = spec, &write.node.name_any());
    }
}

fn node_info(name: &str) -> crate::cache::NodeInfo {
    crate::cache::NodeInfo { version: 5, ..node(name, "8") }
}

/// A claim that the pod has, with these devices.
fn allocated(
    name: &str,
    world: &World,
    devices: &[Partition],
    pod: &PodInfo,
) -> k8s_openapi::api::resource::v1::ResourceClaim {
    let class = "mig-3g.40gb.kerf.dev";
    let mut claim = claim(name, json!({"requests": [{"name": "r", "exactly": {"deviceClassName": class}}]}));
    claim.metadata.resource_version = Some("2".into());
    let node = world.gpu_nodes.get("n0").unwrap();
    let allocation = claims::allocate(&claim, node, devices, "2026-01-01T00:00:00Z".parse().unwrap());
    let status = claim.status.get_or_insert_default();
    status.allocation = Some(allocation.unwrap());
    status.reserved_for = Some(vec![claims::reservation(pod)]);
    claim
}

fn dynamic() -> serde_json::Value {
    json!({"mode": "Dynamic"})
}

fn said<'a>(decision: &'a Decision, pod: &str) -> Option<(&'a str, &'a str)> {
    let all = decision.sentences.iter().filter(|(told, _)| told.name == pod);
    all.map(|(_, sentence)| (sentence.reason, sentence.message.as_str())).next_back()
}

fn entries(world: &World, node: &str) -> Vec<(String, u32, String)> {
    let node = world.gpu_nodes.get(node).unwrap();
    let describe = |partition: &Partition| {
        let owner = match &partition.owner {
            Owner::Claim(owner) => owner.pod.clone(),
            Owner::Policy(owner) => format!("{:?}", owner.kind),
            Owner::Reservation(_) => "reservation".to_owned(),
        };
        match &partition.instance {
            Some(instance) => (instance.profile.clone(), instance.placement.start, owner),
            None => ("whole".to_owned(), 0, owner),
        }
    };
    node.spec.partitions.iter().map(describe).collect()
}

#[test]
fn a_pod_is_committed_once_and_not_planned_again() {
    let memory = Memory::default();
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(gated_pod(
        "p",
        "nvidia.com/mig-3g.40gb",
        json!({}),
    ));
    let first = decide_now(&world, &memory);
    assert_eq!(first.specs.len(), 1);
    assert_eq!(first.specs[0].added.len(), 1);
    assert_eq!(first.specs[0].spec.gpus[0].policy, "all");
    commit_specs(&mut world, &first);
    assert_eq!(entries(&world, "n0").len(), 1);
    let second = decide_now(&world, &memory);
    assert!(second.specs.is_empty(), "{:?}", second.specs);
    assert_eq!(second.drive.len(), 1, "the claim is to be created");
    assert_eq!(said(&second, "p").unwrap().0, "Reshaping");
}

#[test]
fn all_pods_of_a_cycle_go_into_one_write_per_node() {
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic());
    for index in 0..7 {
        world = world.with_pod(gated_pod(&format!("p{index}"), "nvidia.com/mig-1g.10gb", json!({})));
    }
    let decision = decide_now(&world, &Memory::default());
    assert_eq!(decision.specs.len(), 1);
    assert_eq!(decision.specs[0].added.len(), 7);
    assert_eq!(decision.specs[0].spec.partitions.len(), 7);
}

#[test]
fn a_pod_that_is_gone_gives_its_place_back_when_nothing_uses_it() {
    let memory = Memory::default();
    let pod = gated_pod("p", "nvidia.com/mig-3g.40gb", json!({}));
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(pod.clone());
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let start = entries(&world, "n0")[0].1;
    world.put_pod(PodInfo { version: 9, ..pod }, |store, pod| store.watch_deleted(&pod));
    world.replace_gpu_node(
        |node| {
            let mut busy = instance("3g.40gb", start);
            busy.processes = 1;
            node.status.as_mut().unwrap().gpus[0].instances.push(busy);
        },
        "n0",
    );
    let waits = decide_now(&world, &memory);
    assert!(waits.specs.is_empty(), "a process still runs");
    world.replace_gpu_node(|node| node.status.as_mut().unwrap().gpus[0].instances[0].processes = 0, "n0");
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.specs[0].removed.len(), 1);
    assert!(decision.specs[0].spec.partitions.is_empty());
}

#[test]
fn other_gates_and_refusals_are_told() {
    let both = json!({"schedulingGates": [{"name": "kerf.dev/plan"}, {"name": "example.com/later"}]});
    let world = world(vec![vec![gpu("GPU-0", 0)]], dynamic())
        .with_pod(gated_pod("gated", "nvidia.com/mig-1g.10gb", both))
        .with_pod(gated_pod("odd", "nvidia.com/mig-9g.90gb", json!({})))
        .with_pod(gated_pod("elsewhere", "nvidia.com/mig-1g.10gb", json!({"nodeSelector": {"a": "b"}})));
    let decision = decide_now(&world, &Memory::default());
    let gated = said(&decision, "gated").unwrap();
    assert_eq!(gated.0, "OtherGates");
    assert!(gated.1.contains("example.com/later"), "{gated:?}");
    assert_eq!(said(&decision, "odd").unwrap().0, "NoSuchProfile");
    assert_eq!(said(&decision, "elsewhere").unwrap().0, "NodesDoNotFit");
}

#[test]
fn a_place_on_a_cordoned_node_is_given_up_only_for_a_better_one() {
    let memory = Memory::default();
    let pin = json!({"nodeSelector": {"kubernetes.io/hostname": "n0"}});
    let mut world = world(vec![vec![gpu("GPU-0", 0)], vec![gpu("GPU-1", 0)]], dynamic())
        .with_pod(gated_pod("pinned", "nvidia.com/mig-3g.40gb", pin))
        .with_pod(gated_pod("free", "nvidia.com/mig-3g.40gb", json!({})));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let home = if entries(&world, "n0").len() == 2 { "n0" } else { "n1" };
    for name in ["n0", "n1"] {
        let mut cordoned = node(name, "8");
        cordoned.version = 5;
        cordoned.unschedulable = name == home;
        world.nodes.watch_applied(cordoned);
    }
    let decision = decide_now(&world, &memory);
    let leaving: Vec<&str> =
        decision.drive.iter().filter(|key| memory.withdraws(key)).map(|key| key.pod.as_str()).collect();
    assert_eq!(leaving, ["free"]);
}

#[test]
fn a_failed_gpu_is_left_even_if_there_is_no_other() {
    let memory = Memory::default();
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(gated_pod(
        "p",
        "nvidia.com/mig-3g.40gb",
        json!({}),
    ));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    world.replace_gpu_node(
        |node| {
            node.status.as_mut().unwrap().gpus[0].unhealthy =
                Some(kerf_crds::gpu_node::Reason { reason: "Xid".into(), message: "XID 79".into() });
        },
        "n0",
    );
    let decision = decide_now(&world, &memory);
    assert!(memory.withdraws(decision.drive.first().unwrap()));
}

#[test]
fn an_instance_that_failed_before_its_pod_had_it_is_left() {
    let memory = Memory::default();
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(gated_pod(
        "p",
        "nvidia.com/mig-3g.40gb",
        json!({}),
    ));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let start = entries(&world, "n0")[0].1;
    let report = |world: &mut World, failed: &[bool]| {
        let reported = failed.iter().zip([start, 4 - start]).map(|(failed, start)| {
            let why = kerf_crds::gpu_node::Reason { reason: "Xid94".into(), message: "XID 94".into() };
            kerf_crds::gpu_node::Instance { unhealthy: failed.then_some(why), ..instance("3g.40gb", start) }
        });
        let reported = reported.collect();
        world.replace_gpu_node(|node| node.status.as_mut().unwrap().gpus[0].instances = reported, "n0");
    };
    report(&mut world, &[false, true]);
    let key = decide_now(&world, &memory).drive.first().unwrap().clone();
    assert!(!memory.withdraws(&key), "it is another that has failed");
    report(&mut world, &[true]);
    decide_now(&world, &memory);
    assert!(memory.withdraws(&key));
}

#[test]
fn kube_scheduler_may_preempt_for_a_pod_of_higher_priority() {
    let memory = Memory::default();
    let low: PodInfo = serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(json!({
        "metadata": {"name": "low", "namespace": "default", "uid": "low", "resourceVersion": "1"},
        "spec": {"nodeName": "n0", "priority": -1,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "8"}}}]},
    }))
    .unwrap()
    .into();
    let full = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(low);
    let world = full.with_pod(gated_pod("high", "nvidia.com/mig-3g.40gb", json!({})));
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.specs.len(), 1);
    assert_eq!(decision.specs[0].added.len(), 1);
    assert!(memory.holds("uid-of-high"), "held from the start, or kube-scheduler throws it away");
    let polite = crate::testing::world(vec![vec![gpu("GPU-0", 0)]], dynamic())
        .with_pod(PodInfo::clone(world.pods.get("default/low").unwrap()))
        .with_pod(gated_pod("high", "nvidia.com/mig-3g.40gb", json!({"preemptionPolicy": "Never"})));
    let decision = decide_now(&polite, &Memory::default());
    assert_eq!(said(&decision, "high").unwrap().0, "NodesDoNotFit");
}

#[test]
fn warm_instances_are_kept_and_give_way() {
    let memory = Memory::default();
    let mig = json!({"mode": "Dynamic", "warm": [{"profile": "1g.10gb", "count": 2}]});
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], mig);
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let before = entries(&world, "n0");
    assert_eq!(
        before.iter().filter(|(profile, _, owner)| profile == "1g.10gb" && owner == "Warm").count(),
        2
    );
    assert!(decide_now(&world, &memory).specs.is_empty(), "settled");
    world = world.with_pod(gated_pod("p", "nvidia.com/mig-1g.10gb", json!({})));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let owners: Vec<String> = entries(&world, "n0").into_iter().map(|(_, _, owner)| owner).collect();
    assert_eq!(owners.iter().filter(|owner| *owner == "Warm").count(), 2, "{owners:?}");
    assert_eq!(owners.iter().filter(|owner| *owner == "p").count(), 1, "{owners:?}");
    world = world.with_pod(gated_pod("q", "nvidia.com/mig-4g.40gb", json!({})));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert!(entries(&world, "n0").iter().any(|(_, _, owner)| owner == "q"));
}

#[test]
fn a_static_layout_is_made_handed_out_and_comes_back() {
    let memory = Memory::default();
    let mig = json!({"mode": "Static", "layout": [{"profile": "3g.40gb", "count": 1}, {"profile": "1g.10gb", "count": 2}]});
    let pod = gated_pod("p", "nvidia.com/mig-3g.40gb", json!({}));
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], mig).with_pod(pod.clone());
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let layout = entries(&world, "n0");
    assert_eq!(layout.len(), 3);
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let taken = entries(&world, "n0");
    assert_eq!(taken.len(), 3, "{taken:?}");
    assert!(taken.iter().any(|(profile, _, owner)| profile == "3g.40gb" && owner == "p"));
    world.put_pod(PodInfo { version: 9, ..pod }, |store, pod| store.watch_deleted(&pod));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert_eq!(entries(&world, "n0"), layout);
}

#[test]
fn two_policies_on_one_gpu_leave_it_alone_but_keep_what_pods_have() {
    let memory = Memory::default();
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(gated_pod(
        "p",
        "nvidia.com/mig-3g.40gb",
        json!({}),
    ));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let mut pod = PodInfo::clone(world.pods.get("default/p").unwrap());
    pod.version = 2;
    pod.node = Some("n0".into());
    world.put_pod(pod, |store, pod| store.watch_applied(pod));
    world.policies.watch_applied(crate::testing::policy("other", json!({})));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert_eq!(world.gpu_nodes.get("n0").unwrap().spec.gpus, []);
    assert_eq!(entries(&world, "n0").len(), 1);
}

/// A pod runs with a 3g.40gb at 4, of which there is no record.
fn running_off_the_record() -> (World, Partition) {
    let partition = Partition {
        gpu: "GPU-0".into(),
        instance: Some(wanted("3g.40gb", 4)),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "default".into(),
            name: "c".into(),
            pod: "p".into(),
            pod_uid: "uid-of-p".into(),
            request: "r".into(),
        }),
    };
    let world = world(vec![vec![gpu("GPU-0", 0)]], dynamic());
    let mut pod = claiming_pod("p", &["c"]);
    pod.node = Some("n0".into());
    let allocated = allocated("c", &world, std::slice::from_ref(&partition), &pod);
    (world.with_pod(pod).with_claim(allocated), partition)
}

#[test]
fn an_allocation_of_a_running_pod_without_a_record_is_put_on_record_again() {
    let memory = Memory::default();
    let (world, partition) = running_off_the_record();
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.specs[0].spec.partitions, [partition]);
    assert_eq!(decision.specs[0].node.key(), "n0");
}

fn bound_pod(name: &str, node: &str, priority: i32, cpu: &str) -> PodInfo {
    serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}"), "resourceVersion": "1"},
        "spec": {"nodeName": node, "priority": priority,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]},
    }))
    .unwrap()
    .into()
}

fn thirsty(name: &str) -> PodInfo {
    let container = json!([{"name": "main", "resources": {"requests": {"cpu": "5"}}}]);
    gated_pod(name, "nvidia.com/mig-1g.10gb", json!({"containers": container}))
}

#[test]
fn a_pod_whose_nodes_cpu_is_gone_is_told_so_and_leaves_for_the_only_other_place_alone() {
    let memory = Memory::default();
    let gpus = || vec![vec![gpu("GPU-0", 0)], vec![gpu("GPU-1", 0)], vec![gpu("GPU-2", 0)]];
    let mut world = world(gpus(), dynamic()).with_pod(bound_pod("elsewhere", "n2", 0, "8"));
    for name in ["a", "b"] {
        world = world.with_pod(thirsty(name));
    }
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert!(decide_now(&world, &memory).sentences.iter().all(|(_, told)| told.reason != "NodesDoNotFit"));
    for node in ["n0", "n1"] {
        world = world.with_pod(bound_pod(&format!("on-{node}"), node, 0, "4"));
    }
    let decision = decide_now(&world, &memory);
    for name in ["a", "b"] {
        let (reason, message) = said(&decision, name).unwrap();
        assert_eq!(reason, "NodesDoNotFit");
        assert!(
            message.ends_with("which cannot take the pod now: 1 node lacks cpu (needs 5, 4 free)"),
            "{message}"
        );
    }
    assert!(decision.placeless.is_empty());

    // One node is free again: room for one of them, and a pod that has just come does not push in.
    world.pods.watch_deleted(&PodInfo { version: 2, ..bound_pod("elsewhere", "n2", 0, "8") });
    let late = PodInfo { created: 1_700_000_000, ..thirsty("late") };
    let decision = decide_now(&world.with_pod(late), &memory);
    let leaving = decision.drive.iter().filter(|key| memory.withdraws(key)).count();
    assert_eq!(leaving, 1);
    assert_eq!(said(&decision, "late").unwrap().0, "NodesDoNotFit");
    assert_eq!(decision.placeless, ["uid-of-late".to_owned()].into());
}

#[test]
fn a_gpu_on_which_a_step_fails_gives_only_what_is_there() {
    let mut broken = gpu("GPU-0", 0);
    broken.mig.enabled = true;
    broken.instances = vec![instance("3g.40gb", 4)];
    broken.problem = Some(kerf_crds::gpu_node::Reason {
        reason: "INSUFFICIENT_RESOURCES".into(),
        message: "to create 2g.20gb: INSUFFICIENT_RESOURCES".into(),
    });
    let memory = Memory::default();
    let mut world = world(vec![vec![broken]], dynamic())
        .with_pod(gated_pod("reuses", "nvidia.com/mig-3g.40gb", json!({})))
        .with_pod(gated_pod("waits", "nvidia.com/mig-1g.10gb", json!({})));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert_eq!(entries(&world, "n0"), [("3g.40gb".to_owned(), 4, "reuses".to_owned())]);
    let (reason, message) = said(&decision, "waits").unwrap();
    assert_eq!(reason, "NoRoom");
    assert!(message.contains("1 GPU cannot be reshaped now (to create 2g.20gb: INSUFFICIENT"), "{message}");
}

#[test]
fn of_pods_that_a_quota_refused_the_first_of_each_kind_asks_again() {
    let (memory, now) = (Memory::default(), Instant::now());
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic());
    let refuse = |names: &[&str], now: Instant| {
        for name in names {
            memory.failed(&format!("uid-of-{name}"), pod_reason::QUOTA, "exceeded quota".into(), now);
        }
    };
    for (name, created, profile) in
        [("third", 30, "1g.10gb"), ("second", 20, "2g.20gb"), ("first", 10, "1g.10gb")]
    {
        let pod = gated_pod(name, &format!("nvidia.com/mig-{profile}"), json!({}));
        world = world.with_pod(PodInfo { created, ..pod });
        refuse(&[name], now);
    }
    let asking = |world: &World, now: Instant| -> Vec<String> {
        let decision = decide(world, &memory, &Selectors::default(), now, WALL);
        decision.quota.iter().map(|pod| pod.name.clone()).collect()
    };
    assert!(asking(&world, now).is_empty(), "each waits for its pause to end");
    world.quota_changed("other", 7);
    assert!(asking(&world, now).is_empty());
    world.quota_changed("default", 8);
    assert_eq!(asking(&world, now), ["first", "second"]);
    refuse(&["first", "second"], now);
    assert!(asking(&world, now).is_empty(), "nothing has changed since");
    let later = now + std::time::Duration::from_secs(60);
    assert_eq!(asking(&world, later), ["first", "second"]);
    refuse(&["first", "second"], later);
    assert!(asking(&world, later).is_empty(), "the third would be answered like the first");
}

#[test]
fn after_a_pod_that_a_quota_lets_through_the_next_alike_asks_once_its_claim_is_there() {
    let (memory, now) = (Memory::default(), Instant::now());
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic());
    let refuse = |name: &str, now: Instant| {
        memory.failed(&format!("uid-of-{name}"), pod_reason::QUOTA, "exceeded quota".into(), now);
    };
    let elsewhere = json!({"nodeSelector": {"kubernetes.io/hostname": "n1"}});
    for (name, created, spec) in [
        ("first", 10, json!({})),
        ("next", 20, json!({})),
        ("roomless", 30, elsewhere.clone()),
        ("like-it", 40, elsewhere),
    ] {
        let pod = gated_pod(name, "nvidia.com/mig-1g.10gb", spec);
        world = world.with_pod(PodInfo { created, ..pod });
        refuse(name, now);
    }
    let asking = |world: &mut World, now: Instant| -> Vec<String> {
        let decision = decide(world, &memory, &Selectors::default(), now, WALL);
        commit_specs(world, &decision);
        decision.quota.iter().map(|pod| pod.name.clone()).collect()
    };
    world.quota_changed("default", 8);
    assert_eq!(asking(&mut world, now), ["first", "roomless"]);
    memory.succeeded("uid-of-first");
    memory.succeeded("uid-of-roomless");
    assert!(asking(&mut world, now).is_empty(), "they are let through, and that is all");
    assert_eq!(entries(&world, "n0"), [("1g.10gb".to_owned(), 6, "first".to_owned())]);
    assert!(asking(&mut world, now).is_empty(), "the first has a place and no claim yet");
    // The quota counts a claim before the claim is seen.
    world.quota_changed("default", 9);
    assert!(asking(&mut world, now).is_empty());
    let class = json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig-1g.10gb.kerf.dev"}}]});
    let mut world = world.with_claim(claim("claim-of-first", class));
    assert_eq!(asking(&mut world, now), ["next"], "where one has no room, the one like it has none");
}

#[test]
fn a_pod_whose_instance_cannot_be_made_goes_to_the_nodes_other_gpu() {
    let memory = Memory::default();
    let mut world = world(vec![vec![gpu("GPU-0", 0), gpu("GPU-1", 1)]], dynamic()).with_pod(gated_pod(
        "p",
        "nvidia.com/mig-3g.40gb",
        json!({}),
    ));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    let partition = |world: &World| world.gpu_nodes.get("n0").unwrap().spec.partitions[0].gpu.clone();
    let first = partition(&world);
    let fail = |world: &mut World, problem: Option<kerf_crds::gpu_node::Reason>| {
        let status = |node: &mut GpuNode| {
            let gpus = &mut node.status.as_mut().unwrap().gpus;
            gpus.iter_mut().find(|gpu| gpu.uuid == first).unwrap().problem = problem;
        };
        world.replace_gpu_node(status, "n0");
    };
    let why = kerf_crds::gpu_node::Reason { reason: "UNKNOWN".into(), message: "to create: UNKNOWN".into() };
    fail(&mut world, Some(why));
    let decision = decide_now(&world, &memory);
    let key = decision.drive.first().unwrap().clone();
    assert!(memory.withdraws(&key));
    // Given up; the daemon has nothing to do there any more, and so no problem.
    memory.note_read(&key);
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.specs[0].removed, std::slice::from_ref(&key));
    commit_specs(&mut world, &decision);
    memory.removed(&key);
    fail(&mut world, None);
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert_ne!(partition(&world), first);
}

#[test]
fn a_pod_with_two_claims_is_told_one_thing_and_leaves_once() {
    let memory = Memory::default();
    let half =
        || json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig-3g.40gb.kerf.dev"}}]});
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic())
        .with_pod(claiming_pod("p", &["a", "b"]))
        .with_claim(claim("a", half()))
        .with_claim(claim("b", half()));
    let decision = decide_now(&world, &memory);
    commit_specs(&mut world, &decision);
    assert_eq!(decide_now(&world, &memory).sentences.len(), 1, "both are being made");

    let node = Arc::clone(world.gpu_nodes.get("n0").unwrap());
    let of_a = |partition: &&Partition| matches!(&partition.owner, Owner::Claim(owner) if owner.name == "a");
    let partition = node.spec.partitions.iter().find(of_a).unwrap().clone();
    let start = partition.instance.as_ref().unwrap().placement.start;
    world.replace_gpu_node(
        |node| node.status.as_mut().unwrap().gpus[0].instances.push(instance("3g.40gb", start)),
        "n0",
    );
    let pod = Arc::clone(world.pods.get("default/p").unwrap());
    let allocated = allocated("a", &world, &[partition], &pod);
    world.claims.watch_applied(allocated);
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.sentences.len(), 1, "{:?}", decision.sentences);
    assert_eq!(said(&decision, "p").unwrap().0, "Reshaping", "the claim that is not ready counts");

    let mut cordoned = node_info("n0");
    cordoned.unschedulable = true;
    world.nodes.watch_applied(cordoned);
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.sentences.len(), 1, "{:?}", decision.sentences);
    assert_eq!(said(&decision, "p").unwrap().0, "NodesDoNotFit");
}

#[test]
fn a_claim_that_two_pods_share_is_on_record_for_one_of_them() {
    let memory = Memory::default();
    let class = "mig-3g.40gb.kerf.dev";
    let shared = claim("c", json!({"requests": [{"name": "r", "exactly": {"deviceClassName": class}}]}));
    let (a, b) = (claiming_pod("a", &["c"]), claiming_pod("b", &["c"]));
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_claim(shared).with_pod(a).with_pod(b);
    let owners = |world: &World| entries(world, "n0").into_iter().map(|entry| entry.2).collect::<Vec<_>>();
    // The second waits while the first's place is new, and while it is on record.
    for _ in 0..2 {
        let decision = decide_now(&world, &memory);
        commit_specs(&mut world, &decision);
        assert_eq!(owners(&world), ["a"]);
        let (reason, message) = said(&decision, "b").expect("a sentence");
        assert_eq!(reason, pod_reason::WAITS_FOR_CLAIM);
        assert_eq!(message, "ResourceClaim \"c\", which it shares, is allocated for pod \"a\" first");
    }
    // Once it is allocated nothing is planned for the other: it goes where the claim is.
    let there = world.gpu_nodes.get("n0").unwrap().spec.partitions.clone();
    let done = allocated("c", &world, &there, &claiming_pod("a", &["c"]));
    let world = world.with_claim(done);
    let decision = decide_now(&world, &memory);
    assert!(decision.specs.is_empty(), "{:?}", decision.specs);
}

#[test]
fn the_gate_stays_while_gates_of_others_are_there_even_if_all_is_allocated() {
    let (world, partition) = running_off_the_record();
    let mut world = world;
    world.replace_gpu_node(|node| node.spec.partitions = vec![partition], "n0");
    let mut sharing = claiming_pod("q", &["c"]);
    let gates = |gates: &[&str]| gates.iter().map(|gate| (*gate).to_owned()).collect::<Vec<_>>();
    sharing.detail.as_mut().unwrap().gates = gates(&["kerf.dev/plan", "example.com/later"]);
    world = world.with_pod(sharing.clone());
    let decision = decide_now(&world, &Memory::default());
    assert!(decision.ungate.is_empty());
    assert_eq!(said(&decision, "q").unwrap().0, "OtherGates");
    sharing.version = 2;
    sharing.detail.as_mut().unwrap().gates = gates(&["kerf.dev/plan"]);
    let decision = decide_now(&world.with_pod(sharing), &Memory::default());
    assert_eq!(decision.ungate.len(), 1);
}

#[test]
fn what_is_put_on_record_again_is_not_given_to_another_in_the_same_cycle() {
    let memory = Memory::default();
    let (world, partition) = running_off_the_record();
    let mut world = world.with_pod(gated_pod("q", "nvidia.com/mig-7g.80gb", json!({})));
    let decision = decide_now(&world, &memory);
    assert_eq!(decision.specs[0].spec.partitions, [partition]);
    commit_specs(&mut world, &decision);
    let decision = decide_now(&world, &memory);
    assert_eq!(said(&decision, "q").unwrap().0, "NoRoom");
}

#[test]
fn claims_that_share_slices_are_noticed() {
    let of = |gpu: &str, profile: &str, start: u32| Partition {
        gpu: gpu.into(),
        instance: Some(wanted(profile, start)),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "default".into(),
            name: format!("{gpu}-{start}"),
            pod: "p".into(),
            pod_uid: "u".into(),
            request: "r".into(),
        }),
    };
    let whole = Partition { instance: None, ..of("GPU-0", "1g.10gb", 0) };
    let kept = Partition { owner: Owner::Reservation(Default::default()), ..of("GPU-0", "1g.10gb", 0) };
    let apart = [of("GPU-0", "2g.20gb", 0), of("GPU-0", "2g.20gb", 2), of("GPU-1", "2g.20gb", 0)];
    assert!(!claims_collide(apart.iter().chain([&kept])));
    for other in [of("GPU-0", "3g.40gb", 0), whole] {
        assert!(claims_collide(apart.iter().chain([&other])), "{other:?}");
    }
}

/// A pod that had what it was bound for in between has only just been found without.
#[test]
fn a_pod_is_stranded_since_it_last_had_what_it_was_bound_for() {
    let pod = PodInfo { node: Some("n0".into()), ..gated_pod("p", "nvidia.com/mig-3g.40gb", json!({})) };
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], dynamic()).with_pod(pod);
    let (memory, began) = (Memory::default(), Instant::now());
    let stranded = |world: &World, times: u32| {
        let now = began + times * crate::scheduler::memory::STRANDED;
        decide(world, &memory, &Selectors::default(), now, WALL).stranded.len()
    };
    assert_eq!([0, 1].map(|times| stranded(&world, times)), [0, 1]);
    let owner = ClaimOwner {
        namespace: "default".into(),
        name: "claim-of-p".into(),
        pod: "p".into(),
        pod_uid: "uid-of-p".into(),
        request: "device-0".into(),
    };
    let instance = Some(wanted("3g.40gb", 4));
    let entry = Partition { gpu: "GPU-0".into(), instance, share: None, owner: Owner::Claim(owner) };
    world.replace_gpu_node(|node| node.spec.partitions = vec![entry], "n0");
    assert_eq!(stranded(&world, 2), 0);
    world.replace_gpu_node(|node| node.spec.partitions.clear(), "n0");
    assert_eq!([3, 4].map(|times| stranded(&world, times)), [0, 1]);
}
