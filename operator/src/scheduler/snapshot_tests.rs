use serde_json::json;

use super::*;
use crate::cache::PodInfo;
use crate::testing::{gated_pod, gpu, instance, policy, wanted, world};
use kerf_crds::gpu_node::{ClaimOwner, ClaimReference, Reason};

fn claimed(pod: &str, instance: Option<gpu_node::WantedInstance>) -> Partition {
    Partition {
        gpu: "GPU-0".into(),
        instance,
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "default".into(),
            name: format!("claim-of-{pod}"),
            pod: pod.into(),
            pod_uid: format!("uid-of-{pod}"),
            request: "device-0".into(),
        }),
    }
}

fn board(world: &World) -> Board {
    take(world, &Views::of(world), |_| true)
}

fn states(board: &Board) -> Vec<(u32, InstanceState, bool)> {
    board.snapshot.nodes[0].gpus[0].instances.iter().map(|i| (i.start, i.state, i.exists)).collect()
}

#[test]
fn instances_are_taken_idle_or_doomed_by_record_and_report() {
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], json!({}));
    world.replace_gpu_node(
        |node| {
            let mut used = instance("1g.10gb", 1);
            used.claims.push(ClaimReference::default());
            let mut foreign = instance("1g.10gb", 2);
            foreign.foreign = true;
            let mut failed = instance("1g.10gb", 3);
            failed.unhealthy = Some(Reason::default());
            node.status.as_mut().unwrap().gpus[0].instances =
                vec![instance("1g.10gb", 0), used, foreign, failed, instance("2g.20gb", 4)];
            // The idle 2g.20gb at 4 makes room for this one.
            node.spec.partitions = vec![claimed("p", Some(wanted("3g.40gb", 4)))];
        },
        "n0",
    );
    assert_eq!(
        states(&board(&world)),
        [
            (0, InstanceState::Idle, true),
            (1, InstanceState::Taken, true),
            (2, InstanceState::Taken, true),
            (3, InstanceState::Taken, true),
            (4, InstanceState::Taken, false),
        ]
    );
}

#[test]
fn an_idle_instance_without_a_mig_device_is_room_and_nothing_to_be_used_as_it_is() {
    let mut world = world(vec![vec![gpu("GPU-0", 0)]], json!({}));
    world.replace_gpu_node(
        |node| {
            let without = |start| gpu_node::Instance { uuid: None, ..instance("1g.10gb", start) };
            node.status.as_mut().unwrap().gpus[0].instances = vec![without(0), without(1)];
            node.spec.partitions = vec![claimed("p", Some(wanted("1g.10gb", 1)))];
        },
        "n0",
    );
    assert_eq!(states(&board(&world)), [(0, InstanceState::Idle, false), (1, InstanceState::Taken, true)]);
}

#[test]
fn a_nodes_room_is_less_by_bound_and_by_planned_pods_once_each() {
    let pod = gated_pod(
        "p",
        "nvidia.com/mig-1g.10gb",
        json!({"containers": [
        {"name": "main", "resources": {"requests": {"cpu": "3"}}}]}),
    );
    let bound = PodInfo { name: "b".into(), uid: "b".into(), node: Some("n0".into()), ..pod.clone() };
    let done = PodInfo { name: "d".into(), uid: "d".into(), done: true, ..bound.clone() };
    let mut world =
        world(vec![vec![gpu("GPU-0", 0)]], json!({})).with_pod(pod).with_pod(bound).with_pod(done);
    world.replace_gpu_node(
        |node| {
            let two = [wanted("1g.10gb", 0), wanted("1g.10gb", 1)];
            node.spec.partitions = two.into_iter().map(|instance| claimed("p", Some(instance))).collect();
        },
        "n0",
    );
    let board = board(&world);
    assert_eq!(board.snapshot.nodes[0].free_milli["cpu"], 8000 - 3000 - 3000);
    assert_eq!(board.snapshot.nodes[0].free_milli["pods"], 110_000 - 2000);
}

#[test]
fn a_gpu_is_closed_without_a_policy_under_two_and_when_it_is_not_kerfs() {
    let closed = |world: &World| board(world).snapshot.nodes[0].gpus[0].closed.clone();
    let mut plain = world(vec![vec![gpu("GPU-0", 0)]], json!({}));
    assert_eq!(closed(&plain), None);
    plain.policies.watch_applied(policy("second", json!({})));
    assert!(closed(&plain).unwrap().contains("all, second"));
    let mut unmanaged = world(vec![vec![gpu("GPU-0", 0)]], json!({}));
    unmanaged.replace_gpu_node(
        |node| {
            node.status.as_mut().unwrap().gpus[0].unmanaged =
                Some(Reason { reason: "MigManager".into(), message: "mig-manager acts here".into() });
        },
        "n0",
    );
    assert_eq!(closed(&unmanaged).unwrap(), "mig-manager acts here");
    let mut alone = World::default();
    alone.gpu_nodes.watch_applied(crate::testing::gpu_node("n0", vec![gpu("GPU-0", 0)], Vec::new()));
    assert!(closed(&alone).unwrap().contains("no PartitionPolicy"));
    assert!(!board(&alone).snapshot.nodes[0].ready, "there is no Node");
}

#[test]
fn a_gpu_that_only_waits_is_cut_as_any_and_one_that_fails_is_not() {
    for (reason, stuck) in [("InUse", false), ("Overlap", false), ("IN_USE", true), ("CallHangs", true)] {
        let mut world = world(vec![vec![gpu("GPU-0", 0)]], json!({}));
        world.replace_gpu_node(
            |node| {
                node.status.as_mut().unwrap().gpus[0].problem =
                    Some(Reason { reason: reason.into(), message: "why".into() });
            },
            "n0",
        );
        assert_eq!(board(&world).snapshot.nodes[0].gpus[0].stuck.is_some(), stuck, "{reason}");
    }
}

#[test]
fn mode_and_policy_say_what_a_gpu_can_become() {
    let of = |mig: serde_json::Value, enabled: bool, needs_reset: bool| {
        let mut gpu = gpu("GPU-0", 0);
        gpu.mig.enabled = enabled;
        gpu.mig.switch_needs_reset = needs_reset;
        let board = board(&world(vec![vec![gpu]], mig));
        let gpu = &board.snapshot.nodes[0].gpus[0];
        (gpu.mig, gpu.whole)
    };
    use Capability::{AfterSwitch, No, Now};
    assert_eq!(of(json!({}), true, false), (Now, AfterSwitch));
    assert_eq!(of(json!({}), false, true), (No, Now));
    assert_eq!(of(json!({"modeSwitch": "WithReset"}), false, true), (AfterSwitch, Now));
    assert_eq!(of(json!({"modeSwitch": "Never"}), true, false), (Now, No));
    assert_eq!(of(json!({"mode": "Off"}), true, false), (No, AfterSwitch));
    assert_eq!(of(json!({"mode": "Static", "layout": [{"profile": "1g.10gb"}]}), true, false), (Now, No));
}

#[test]
fn allowed_profiles_are_patterns_in_either_spelling() {
    let board = board(&world(vec![vec![gpu("GPU-0", 0)]], json!({"allowedProfiles": ["*.me", "7g*"]})));
    assert_eq!(board.snapshot.nodes[0].gpus[0].allowed, BTreeSet::from([1, 5]));
}
