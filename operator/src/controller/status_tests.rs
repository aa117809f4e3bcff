use serde_json::json;

use super::*;
use crate::controller::matching;
use crate::testing::{gpu, instance, policy, world};

fn written(
    world: &World,
    problems: &Problems,
    memory: &Memory,
    now: Instant,
) -> Vec<(Arc<PartitionPolicy>, PartitionPolicyStatus)> {
    all(world, &matching::matches(world), problems, &Rounds::default(), memory, now)
}

fn said(world: &World, problems: &Problems) -> PartitionPolicyStatus {
    let mut all = written(world, problems, &Memory::default(), Instant::now());
    assert_eq!(all.len(), world.policies.len());
    all.remove(0).1
}

fn ready(status: &PartitionPolicyStatus) -> (&str, &str, &str) {
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap();
    (&ready.status, &ready.reason, &ready.message)
}

fn told(world: &mut World) {
    world.replace_gpu_node(
        |node| {
            node.spec.gpus =
                serde_json::from_value(json!([{"uuid": "GPU-0", "policy": "all", "mig": "Keep"}])).unwrap();
        },
        "n0",
    );
}

#[test]
fn an_applied_policy_says_what_there_is() {
    let mut applied = gpu("GPU-0", 0);
    applied.instances = vec![instance("3g.40gb", 0), instance("3g.40gb", 4)];
    applied.instances[1].processes = 1;
    let mut world = world(vec![vec![applied]], json!({}));
    told(&mut world);
    let status = said(&world, &Problems::new());
    assert_eq!((status.nodes, status.gpus, status.layout_summary.as_str()), (1, 1, "2x 3g.40gb"));
    assert_eq!((status.layout[0].total, status.layout[0].in_use), (2, 1));
    assert_eq!(ready(&status).0, "True");
    assert_eq!(status.observed_generation, Some(1));
}

#[test]
fn nothing_is_written_when_nothing_changed() {
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], json!({}));
    told(&mut world);
    write(&mut world);
    assert!(written(&world, &Problems::new(), &Memory::default(), Instant::now()).is_empty());
}

/// The policy says what it should.
fn write(world: &mut World) {
    let mut policy = PartitionPolicy::clone(world.policies.get("all").unwrap());
    policy.status = Some(said(world, &Problems::new()));
    policy.metadata.resource_version = Some("9".into());
    world.policies.watch_applied(policy);
}

#[test]
fn counts_are_written_after_a_while_and_conditions_at_once() {
    let mut used = gpu("GPU-0", 0);
    used.instances = vec![instance("1g.10gb", 0)];
    let mut world = world(vec![vec![used]], json!({}));
    told(&mut world);
    write(&mut world);
    let (memory, now) = (Memory::default(), Instant::now());
    memory.policy_written("all", now);
    let gpus =
        |change: fn(&mut Gpu)| move |node: &mut GpuNode| change(&mut node.status.as_mut().unwrap().gpus[0]);
    world.replace_gpu_node(gpus(|gpu| gpu.instances[0].processes = 1), "n0");
    assert!(written(&world, &Problems::new(), &memory, now).is_empty());
    let again = memory.next_moment(now).unwrap();
    assert_eq!(written(&world, &Problems::new(), &memory, again)[0].1.layout[0].in_use, 1);
    let failed = |gpu: &mut Gpu| gpu.unhealthy = Some(kerf_crds::gpu_node::Reason::default());
    world.replace_gpu_node(gpus(failed), "n0");
    assert_eq!(ready(&written(&world, &Problems::new(), &memory, now)[0].1).1, "Blocked");
}

#[test]
fn every_reason_for_not_being_ready_is_named() {
    let reason = |mut world: World, problems: Problems| {
        if !world.gpu_nodes.is_empty() {
            told(&mut world);
        }
        let status = said(&world, &problems);
        let (_, reason, message) = ready(&status);
        (reason.to_owned(), message.to_owned())
    };
    let one = |mig| world(vec![vec![gpu("GPU-0", 0)]], mig);
    assert_eq!(reason(world(vec![], json!({})), Problems::new()).0, "NoGpuMatched");
    let (why, message) = reason(one(json!({"allowedProfiles": ["9g.*"]})), Problems::new());
    assert_eq!(why, "ProfileNotFound");
    assert!(message.contains("9g.*") && message.contains("7g.80gb"), "{message}");
    let impossible = LayoutProblem::Impossible("2x 4g.40gb do not fit".into());
    let problems = Problems::from([("all".into(), vec![("n0".into(), impossible)])]);
    assert_eq!(reason(one(json!({})), problems).0, "LayoutImpossible");
    let mut unmanaged = one(json!({}));
    unmanaged.replace_gpu_node(
        |node| {
            node.status.as_mut().unwrap().gpus[0].unmanaged =
                Some(kerf_crds::gpu_node::Reason { reason: "x".into(), message: "another plugin".into() });
        },
        "n0",
    );
    let (why, message) = reason(unmanaged, Problems::new());
    assert_eq!(why, "GpuUnmanaged");
    assert!(message.contains("another plugin"), "{message}");
    let mut shared = one(json!({}));
    shared.policies.watch_applied(policy("second", json!({})));
    told(&mut shared);
    for (_, status) in written(&shared, &Problems::new(), &Memory::default(), Instant::now()) {
        assert_eq!(ready(&status).1, "SharedGpu");
        assert_eq!(status.conditions[1].type_, "Conflict");
        assert_eq!(status.conditions[1].status, "True");
    }
    let mut reshaping = one(json!({}));
    reshaping.replace_gpu_node(
        |node| {
            node.spec.partitions = vec![
                serde_json::from_value(json!({
                    "gpu": "GPU-0",
                    "instance": {"profile": "1g.10gb", "placement": {"start": 0, "size": 1}},
                    "owner": {"policy": {"name": "all", "kind": "Warm"}},
                }))
                .unwrap(),
            ];
        },
        "n0",
    );
    assert_eq!(reason(reshaping, Problems::new()).0, "Reshaping");
}
