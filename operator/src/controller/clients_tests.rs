use serde_json::{Value, json};

use super::*;
use crate::controller::matching;
use crate::testing::{gpu, policy, world};

/// A pod of a DaemonSet; `change` is merged over it.
fn pod(name: &str, change: Value) -> Pod {
    let mut pod = json!({
        "metadata": {"name": name, "namespace": "monitoring", "uid": format!("uid-of-{name}"),
            "labels": {"app": "exporter"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "exporter", "uid": "d",
                "controller": true}]},
        "spec": {"containers": []},
    });
    json_patch::merge(&mut pod, &change);
    serde_json::from_value(pod).unwrap()
}

fn client(pod: Option<&str>) -> Client {
    Client { pod_uid: pod.map(|pod| format!("uid-of-{pod}")), process: "dcgm-exporter (pid 7)".into() }
}

fn spec() -> Value {
    let selector = json!({"matchLabels": {"app": "exporter"}});
    json!({"reshape": {"restartableClients": [{"namespace": "monitoring", "podSelector": selector}]}})
}

fn held(index: u32, clients: &[Option<&str>]) -> Held {
    Held {
        uuid: format!("GPU-{index}"),
        index,
        clients: clients.iter().map(|pod| client(*pod)).collect(),
        policy: Arc::new(policy("p", spec())),
    }
}

fn evicted(choice: &Choice<'_>) -> Vec<(String, u32)> {
    choice.evict.iter().map(|(pod, gpu)| (pod.name_any(), gpu.index)).collect()
}

#[test]
fn a_pod_that_holds_several_gpus_is_evicted_once() {
    let gpus = [held(0, &[Some("a")]), held(1, &[Some("a"), Some("b")])];
    let pods = [pod("a", json!({})), pod("b", json!({})), pod("on-no-gpu", json!({}))];
    let choice = choose(&gpus, &pods);
    assert_eq!(evicted(&choice), [("a".into(), 0), ("b".into(), 1)]);
    assert_eq!(choice.said["GPU-1"], "restarted for it: pod monitoring/a, monitoring/b");
}

#[test]
fn one_client_that_stays_keeps_the_others() {
    let other = json!({"metadata": {"labels": {"app": "training"}}});
    let elsewhere = json!({"metadata": {"namespace": "team-a"}});
    let kerfs = json!({"metadata": {"labels": {"app.kubernetes.io/part-of": "kerf"}}});
    let claims = json!({"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}});
    let alone = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Job", "name": "j", "uid": "j"}]}});
    let of_node = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n",
        "controller": true}]}});
    for (change, why) in [
        (other, "pod monitoring/b is selected by no entry of spec.reshape.restartableClients"),
        (elsewhere, "pod team-a/b is selected by no entry"),
        (kerfs, "is Kerf's own"),
        (claims, "has ResourceClaims"),
        (alone, "has no controller"),
        (of_node, "has no controller"),
    ] {
        let gpus = [held(0, &[Some("a"), Some("b")])];
        let pods = [pod("a", json!({})), pod("b", change)];
        let choice = choose(&gpus, &pods);
        assert_eq!(evicted(&choice), [], "{why}");
        assert!(choice.said["GPU-0"].starts_with("nobody is restarted for it: "), "{:?}", choice.said);
        assert!(choice.said["GPU-0"].contains(why), "{:?} instead of {why}", choice.said);
    }
    let pods = [pod("a", json!({}))];
    for (stays, why) in [(None, "is in no pod"), (Some("gone"), "is not on the node any more")] {
        let gpus = [held(0, &[Some("a"), stays]), held(1, &[Some("a")])];
        let choice = choose(&gpus, &pods);
        assert_eq!(evicted(&choice), [("a".into(), 1)], "the other GPU has nobody else");
        assert!(choice.said["GPU-0"].contains(why), "{:?}", choice.said);
    }
}

#[test]
fn a_pod_that_is_ending_is_waited_for() {
    let ending = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    let gpus = [held(0, &[Some("a"), Some("b")])];
    let pods = [pod("a", ending), pod("b", json!({}))];
    assert_eq!(evicted(&choose(&gpus, &pods)), [("b".into(), 0)]);
}

/// One node with one GPU that a client holds, under a policy that lets it be restarted.
fn in_the_way(change: impl FnOnce(&mut World, &mut Gpu)) -> World {
    let mut held = gpu("GPU-0", 0);
    held.clients = vec![client(Some("a"))];
    let mut world = world(Vec::new(), json!({}));
    let mut policy = policy("all", spec());
    policy.metadata.resource_version = Some("2".into());
    world.policies.watch_applied(policy);
    change(&mut world, &mut held);
    world.nodes.watch_applied(crate::testing::node("n0", "8"));
    world.gpu_nodes.watch_applied(crate::testing::gpu_node("n0", vec![held], Vec::new()));
    world
}

fn looks_at(world: &World, rounds: &Rounds, now: Instant) -> usize {
    due(world, &matching::matches(world), rounds, now).len()
}

#[test]
fn only_a_gpu_that_is_kerfs_to_change_and_that_a_client_holds_is_looked_at() {
    let (rounds, now) = (Rounds::default(), Instant::now());
    assert_eq!(looks_at(&in_the_way(|_, _| {}), &rounds, now), 1);
    let reason = || Some(kerf_crds::gpu_node::Reason::default());
    let not: [fn(&mut World, &mut Gpu); 3] = [
        |_, gpu| gpu.clients.clear(),
        |world, _| {
            let mut other = policy("other", json!({}));
            other.metadata.resource_version = Some("3".into());
            world.policies.watch_applied(other);
        },
        |world, _| {
            let mut nobody = policy("all", json!({}));
            nobody.metadata.resource_version = Some("3".into());
            world.policies.watch_applied(nobody);
        },
    ];
    for change in not {
        assert_eq!(looks_at(&in_the_way(change), &rounds, now), 0);
    }
    assert_eq!(looks_at(&in_the_way(|_, gpu| gpu.unmanaged = reason()), &rounds, now), 0);
    assert_eq!(looks_at(&in_the_way(|_, gpu| gpu.unhealthy = reason()), &rounds, now), 0);
    let mut stale = in_the_way(|_, _| {});
    stale.replace_gpu_node(|node| node.metadata.generation = Some(2), "n0");
    assert_eq!(looks_at(&stale, &rounds, now), 0, "the report answers an older spec");
}

#[test]
fn rounds_come_with_pauses_that_grow() {
    let (world, rounds, start) = (in_the_way(|_, _| {}), Rounds::default(), Instant::now());
    rounds.begin("n0", start);
    let why = BTreeMap::from([("GPU-0".to_owned(), "not selected".to_owned())]);
    assert!(rounds.end("n0", false, why, start));
    assert_eq!(looks_at(&world, &rounds, start), 0);
    assert_eq!(looks_at(&world, &rounds, start + LOOK), 1, "nobody was evicted");
    let mut now = start + LOOK;
    for pause in [60, 120, 240, 480, 960, 1800, 1800].map(Duration::from_secs) {
        rounds.begin("n0", now);
        rounds.end("n0", true, BTreeMap::new(), now);
        assert_eq!(looks_at(&world, &rounds, now + pause - Duration::from_secs(1)), 0, "{pause:?}");
        assert_eq!(looks_at(&world, &rounds, now + pause), 1, "{pause:?}");
        now += pause;
    }
    now += LONGEST_PAUSE;
    rounds.begin("n0", now);
    rounds.end("n0", true, BTreeMap::new(), now);
    assert_eq!(looks_at(&world, &rounds, now + FIRST_PAUSE), 1, "it begins anew");
    // Where nobody can be evicted, it is looked at less and less often, until something changes.
    let said = || BTreeMap::from([("GPU-0".to_owned(), "in no pod".to_owned())]);
    rounds.begin("n0", now);
    assert!(rounds.end("n0", false, said(), now));
    for pause in [20, 40, 80, 160, 300, 300].map(Duration::from_secs) {
        rounds.begin("n0", now);
        assert!(!rounds.end("n0", false, said(), now), "nothing new to say");
        assert_eq!(looks_at(&world, &rounds, now + pause - Duration::from_secs(1)), 0, "{pause:?}");
        assert_eq!(looks_at(&world, &rounds, now + pause), 1, "{pause:?}");
        now += pause;
    }
    rounds.begin("n0", now);
    assert!(rounds.end("n0", false, BTreeMap::new(), now));
    assert_eq!(looks_at(&world, &rounds, now + LOOK), 1);
}

#[test]
fn policies_say_what_became_of_it() {
    let world = in_the_way(|_, _| {});
    let gpu = &world.gpu_nodes.get("n0").unwrap().status.as_ref().unwrap().gpus[0];
    let (rounds, now) = (Rounds::default(), Instant::now());
    let nobody = rounds.remark(&policy("p", json!({})), "n0", gpu).unwrap();
    assert!(nobody.contains("spec.reshape.restartableClients lets nobody be restarted"), "{nobody}");
    let allows = policy("p", spec());
    assert_eq!(rounds.remark(&allows, "n0", gpu), None);
    rounds.begin("n0", now);
    rounds.end("n0", true, [("GPU-0".to_owned(), "restarted".to_owned())].into(), now);
    assert_eq!(rounds.remark(&allows, "n0", gpu).as_deref(), Some("restarted"));
    assert_eq!(rounds.remark(&allows, "n0", &Gpu { clients: Vec::new(), ..gpu.clone() }), None);
}
