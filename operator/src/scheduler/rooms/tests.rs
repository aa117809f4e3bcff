use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kerf_crds::gpu_node::{ClaimOwner, Owner, Partition, PodReference, Reservation};
use kube::ResourceExt;
use serde_json::json;

use super::reserve::PATIENCE;
use crate::cache::BudgetInfo;
use crate::cache::{PodInfo, World};
use crate::scheduler::claims;
use crate::scheduler::cycle::decide;
use crate::scheduler::decision::Decision;
use crate::scheduler::memory::Memory;
use crate::scheduler::selectors::Selectors;
use crate::scheduler::snapshot;
use crate::testing::{gated_pod, gpu, instance, policy, wanted, world};

const WALL: i64 = 1_800_000_000;
const LARGE: &str = "uid-of-large";

struct Story {
    world: World,
    memory: Memory,
    wall: i64,
}

impl Story {
    /// Two nodes of one GPU; on each a movable pod (`t0` and the younger `t1`) in one half; and `large`, which wants a whole
    /// one and has waited for a minute.
    fn begins() -> Self {
        let gpus = [0, 1].map(|index| {
            let mut used = instance("3g.40gb", 4);
            used.claims = vec![claim_reference(&format!("t{index}"))];
            vec![kerf_crds::gpu_node::Gpu { instances: vec![used], ..gpu(&format!("GPU-{index}"), 0) }]
        });
        let mut world = world(gpus.into(), json!({"mode": "Dynamic"}));
        let mut moving = policy("all", json!({"reshape": {"moves": {"maxPods": 1, "afterSeconds": 10}}}));
        moving.metadata.resource_version = Some("2".into());
        world.policies.watch_applied(moving);
        for index in 0..2 {
            let mut pod = made_by(&format!("rs-{index}"), &format!("t{index}"));
            pod.created = WALL - 1000 + index;
            pod.node = Some(format!("n{index}"));
            pod.detail.as_mut().unwrap().gates.clear();
            world = give(world, &pod, "3g.40gb", 4);
        }
        let large = gated_pod("large", "nvidia.com/mig-7g.80gb", json!({}));
        let memory = Memory::default();
        memory.have_no_room(&[LARGE].into(), Instant::now() - Duration::from_secs(60));
        memory.let_through(LARGE, Instant::now());
        Self { world: world.with_pod(large), memory, wall: WALL }
    }

    /// The same after the plan is on record.
    fn reserved() -> Self {
        let mut story = Self::begins();
        let decision = story.cycle();
        assert_eq!(decision.specs.len(), 2);
        story
    }

    fn decide(&self) -> Decision {
        decide(&self.world, &self.memory, &Selectors::default(), Instant::now(), self.wall)
    }

    /// Decides, and the nodes are told.
    fn cycle(&mut self) -> Decision {
        let decision = self.decide();
        for write in &decision.specs {
            let spec = write.spec.clone();
            self.world.replace_gpu_node(|node| node.spec = spec, &write.node.name_any());
        }
        decision
    }

    /// `3g.40gb@0 t0`, with `(…)` for what is reserved.
    fn entries(&self, node: &str) -> Vec<String> {
        let text = |partition: &Partition| {
            let whose = match &partition.owner {
                Owner::Claim(owner) => owner.pod.clone(),
                Owner::Policy(_) => "policy".into(),
                Owner::Reservation(said) if said.controller.is_some() => {
                    format!("({}'s next)", said.pod.name)
                }
                Owner::Reservation(said) => format!("({})", said.pod.name),
            };
            let instance = partition.instance.as_ref().unwrap();
            format!("{}@{} {whose}", instance.profile, instance.placement.start)
        };
        let mut all: Vec<String> =
            self.world.gpu_nodes.get(node).unwrap().spec.partitions.iter().map(text).collect();
        all.sort();
        all
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut PodInfo)) {
        let mut pod = PodInfo::clone(self.world.pods.get(&format!("default/{name}")).unwrap());
        pod.version += 1;
        change(&mut pod);
        self.world.put_pod(pod, |store, pod| store.watch_applied(pod));
    }

    /// The pod is gone, its claim too, and the instance is nobody's.
    fn gone(&mut self, name: &str, node: &str) {
        let pod = PodInfo::clone(self.world.pods.get(&format!("default/{name}")).unwrap());
        let claim = self.world.claim("default", &format!("claim-of-{name}")).unwrap().as_ref().clone();
        self.world.put_pod(PodInfo { version: 99, ..pod }, |store, pod| store.watch_deleted(&pod));
        self.world.claims.watch_deleted(&claim);
        self.world
            .replace_gpu_node(|node| node.status.as_mut().unwrap().gpus[0].instances[0].claims.clear(), node);
    }

    fn policy(&mut self, spec: serde_json::Value) {
        let mut policy = policy("all", spec);
        policy.metadata.resource_version = Some("3".into());
        self.world.policies.watch_applied(policy);
    }

    fn cordon(&mut self, name: &str) {
        let node = crate::testing::node(name, "8");
        self.world.nodes.watch_applied(crate::cache::NodeInfo { version: 9, unschedulable: true, ..node });
    }

    fn add(&mut self, pod: PodInfo) {
        self.world.put_pod(pod, |store, pod| store.watch_applied(pod));
    }
}

fn claim_reference(pod: &str) -> kerf_crds::gpu_node::ClaimReference {
    let name = format!("claim-of-{pod}");
    kerf_crds::gpu_node::ClaimReference { namespace: "default".into(), uid: format!("uid-of-{name}"), name }
}

fn budget(app: &str, allowed: u32) -> BudgetInfo {
    let budget = json!({
        "metadata": {"name": "b", "namespace": "default", "uid": "b", "resourceVersion": "1", "generation": 1},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": {"disruptionsAllowed": allowed, "observedGeneration": 1,
            "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
    });
    BudgetInfo::from(
        serde_json::from_value::<k8s_openapi::api::policy::v1::PodDisruptionBudget>(budget).unwrap(),
    )
}

fn made_by(controller: &str, name: &str) -> PodInfo {
    let mut pod = gated_pod(name, "nvidia.com/mig-3g.40gb", json!({}));
    let detail = pod.detail.as_mut().unwrap();
    detail.movable = true;
    detail.controller = Some(controller.into());
    detail.grace_seconds = 30;
    detail.labels = [("app".to_owned(), name.to_owned())].into();
    pod
}

/// The pod's entry for an instance.
fn entry_of(pod: &PodInfo, gpu: &str, profile: &str, start: u32, request: &str) -> Partition {
    Partition {
        gpu: gpu.into(),
        instance: Some(wanted(profile, start)),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "default".into(),
            name: pod.own_claim().unwrap().into(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            request: request.into(),
        }),
    }
}

/// What is kept for the next of a pod that has gone.
fn kept_for(moved: &str, gpu: &str, profile: &str, start: u32) -> Partition {
    Partition {
        gpu: gpu.into(),
        instance: Some(wanted(profile, start)),
        share: None,
        owner: Owner::Reservation(Reservation {
            pod: PodReference { namespace: "default".into(), name: moved.into(), uid: moved.into() },
            controller: Some(format!("rs-of-{moved}")),
            expires: "2100-01-01T00:00:00Z".into(),
            ..Reservation::default()
        }),
    }
}

fn next_of(moved: &str, profile: &str) -> PodInfo {
    let mut next = made_by(&format!("rs-of-{moved}"), &format!("{moved}-next"));
    let asks = gated_pod(&next.name, &format!("nvidia.com/mig-{profile}"), json!({}));
    next.detail.as_mut().unwrap().original = asks.detail.unwrap().original;
    next
}

/// The pod has the instance, and a claim that says so.
fn give(mut world: World, pod: &PodInfo, profile: &str, start: u32) -> World {
    let node = pod.node.as_deref().unwrap();
    let original = pod.detail.as_ref().unwrap().original.clone().unwrap().unwrap();
    let name = pod.own_claim().unwrap();
    let mut claim = claims::from_annotation(pod, name, &original);
    claim.metadata.uid = Some(format!("uid-of-{name}"));
    claim.metadata.resource_version = Some("2".into());
    let request = claims::devices(&claim).unwrap().requests.as_ref().unwrap()[0].name.clone();
    let gpu = world.gpu_nodes.get(node).unwrap().status.as_ref().unwrap().gpus[0].uuid.clone();
    let entry = entry_of(pod, &gpu, profile, start, &request);
    let allocation = claims::allocate(
        &claim,
        world.gpu_nodes.get(node).unwrap(),
        std::slice::from_ref(&entry),
        "2026-01-01T00:00:00Z".parse().unwrap(),
    );
    let status = claim.status.get_or_insert_default();
    status.allocation = Some(allocation.unwrap());
    status.reserved_for = Some(vec![claims::reservation(pod)]);
    world.replace_gpu_node(|node| node.spec.partitions.push(entry), node);
    world.with_claim(claim).with_pod(pod.clone())
}

fn evicted(decision: &Decision) -> Vec<&str> {
    decision.evictions.iter().map(|eviction| eviction.pod.name.as_str()).collect()
}

fn said<'a>(decision: &'a Decision, pod: &str) -> (&'a str, &'a str) {
    let (_, sentence) = decision.sentences.iter().find(|(told, _)| told.name == pod).unwrap();
    (sentence.reason, &sentence.message)
}

#[test]
fn the_younger_moves_and_everybody_gets_what_is_kept_for_them() {
    let mut story = Story::begins();
    let decision = story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@0 (t1's next)", "3g.40gb@4 t0"]);
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1", "7g.80gb@0 (large)"]);
    assert_eq!(evicted(&decision), [""; 0], "nothing is on record yet");
    let making = ("MakingRoom", "room is being made on node n1: default/t1 is moved");
    assert_eq!(said(&decision, "large"), making);

    let decision = story.cycle();
    assert!(decision.specs.is_empty());
    assert_eq!(evicted(&decision), ["t1"]);
    assert_eq!(
        (decision.evictions[0].to.as_str(), decision.evictions[0].room_for.name.as_str()),
        ("n0", "large")
    );
    assert_eq!(said(&decision, "large"), making);

    story.change("t1", |pod| pod.deleting = true);
    story.add(gated_pod("stranger", "nvidia.com/mig-3g.40gb", json!({})));
    let decision = story.cycle();
    assert_eq!(evicted(&decision), [""; 0]);
    assert_eq!(said(&decision, "stranger").0, "NoRoom", "what is kept is not a stranger's");
    story.add(made_by("rs-1", "t1-next"));
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@0 t1-next", "3g.40gb@4 t0"]);
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1", "7g.80gb@0 (large)"]);

    story.gone("t1", "n1");
    story.cycle();
    // The report and the record of the one that has gone are looked at first; then its room is given.
    story.cycle();
    assert_eq!(story.entries("n1"), ["7g.80gb@0 large"]);
    assert!(!story.memory.may_be_moved("uid-of-t1-next", Instant::now()), "it is not moved again at once");
}

/// Nothing is reserved, and nobody evicted.
fn nothing_happens(story: &mut Story, why: &str) {
    let decision = story.cycle();
    assert_eq!(evicted(&decision), [""; 0], "{why}");
    assert_eq!(story.entries("n0"), ["3g.40gb@4 t0"], "{why}");
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1"], "{why}");
}

#[test]
fn nobody_is_moved_where_the_policy_or_the_owner_does_not_say_so() {
    type Change = fn(&mut PodInfo);
    let pods: [(&str, Change); 5] = [
        ("its owner does not allow it", |pod| pod.detail.as_mut().unwrap().movable = false),
        ("nobody would make it again", |pod| pod.detail.as_mut().unwrap().controller = None),
        ("it may take days to end", |pod| pod.detail.as_mut().unwrap().grace_seconds = i64::MAX),
        ("it is the more important", |pod| pod.priority = 1),
        ("another driver's claim may tie it", |pod| {
            let other =
                crate::cache::PodClaim { name: "nic".into(), claim: Some("nic".into()), template: false };
            pod.detail.as_mut().unwrap().claims.push(other);
        }),
    ];
    for (why, change) in pods {
        let mut story = Story::begins();
        for name in ["t0", "t1"] {
            story.change(name, change);
        }
        nothing_happens(&mut story, why);
    }
    let mut story = Story::begins();
    story.policy(json!({}));
    nothing_happens(&mut story, "the policy moves nobody");
    let mut story = Story::begins();
    story.policy(json!({"mig": {"mode": "Static", "layout": [{"profile": "3g.40gb", "count": 2}]},
        "reshape": {"moves": {"maxPods": 1, "afterSeconds": 0}}}));
    story.cycle();
    assert!(story.entries("n1").iter().all(|entry| !entry.contains('(')), "{:?}", story.entries("n1"));
    let mut story = Story::begins();
    for name in ["t0", "t1"] {
        let mut claim = story.world.claim("default", &format!("claim-of-{name}")).unwrap().as_ref().clone();
        claim.metadata.owner_references = None;
        claim.metadata.resource_version = Some("3".into());
        story.world.claims.watch_applied(claim);
    }
    nothing_happens(&mut story, "their claims would outlive them");
}

#[test]
fn too_early_is_not_in_vain() {
    let mut story = Story::begins();
    story.memory = Memory::default();
    story.memory.let_through(LARGE, Instant::now());
    for waited in [0, 9] {
        story.memory.have_no_room(&[LARGE].into(), Instant::now() - Duration::from_secs(waited));
        let decision = story.decide();
        let (reason, message) = said(&decision, "large");
        assert_eq!((reason, message.contains("moving")), ("NoRoom", false), "{message}");
        nothing_happens(&mut story, "it has not waited for long enough");
        story.memory = Memory::default();
        story.memory.let_through(LARGE, Instant::now());
    }
    story.memory.have_no_room(&[LARGE].into(), Instant::now() - Duration::from_secs(11));
    story.cycle();
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1", "7g.80gb@0 (large)"]);
}

#[test]
fn a_quota_is_asked_before_anybody_is_moved() {
    let mut story = Story::begins();
    story.memory = Memory::default();
    story.memory.have_no_room(&[LARGE].into(), Instant::now() - Duration::from_secs(60));
    let decision = story.decide();
    assert_eq!(decision.quota.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(), ["large"]);
    nothing_happens(&mut story, "nobody knows whether it may have a claim");
    story.memory.failed(LARGE, "QuotaExceeded", "exceeded quota".into(), Instant::now());
    nothing_happens(&mut story, "it may not");
    story.memory.succeeded(LARGE);
    nothing_happens(&mut story, "the time under the quota does not count");
    story.memory = Memory::default();
    story.memory.have_no_room(&[LARGE].into(), Instant::now() - Duration::from_secs(60));
    story.memory.let_through(LARGE, Instant::now());
    story.cycle();
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1", "7g.80gb@0 (large)"]);
}

#[test]
fn who_would_not_go_stays_and_another_moves() {
    let mut story = Story::begins();
    story.memory.may_not_go("uid-of-t1", Instant::now());
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@4 t0", "7g.80gb@0 (large)"]);
    // The API server evicts nobody who is under two budgets.
    let mut story = Story::begins();
    for name in ["one", "two"] {
        story.world.budgets.watch_applied(BudgetInfo { name: name.into(), ..budget("t1", 1) });
    }
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@4 t0", "7g.80gb@0 (large)"]);
}

#[test]
fn a_disruption_budget_and_the_owners_price_decide_who_moves() {
    for (allowed, other) in [(0, "(t0's next)"), (1, "(t1's next)")] {
        let mut story = Story::begins();
        story.world.budgets.watch_applied(budget("t1", allowed));
        story.cycle();
        let all = [story.entries("n0"), story.entries("n1")].concat();
        assert!(all.iter().any(|entry| entry.ends_with(other)), "{allowed}: {all:?}");
    }
    let mut story = Story::begins();
    story.change("t1", |pod| pod.detail.as_mut().unwrap().deletion_cost = 1);
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@4 t0", "7g.80gb@0 (large)"]);
}

#[test]
fn while_nobody_has_gone_a_room_that_is_not_needed_or_not_possible_any_more_is_given_up() {
    type Change = fn(&mut Story);
    let changes: [(&str, Change); 7] = [
        ("who waited is gone", |s| s.change("large", |pod| pod.deleting = true)),
        ("the owners have changed their mind", |s| {
            for name in ["t0", "t1"] {
                s.change(name, |pod| pod.detail.as_mut().unwrap().movable = false);
            }
        }),
        ("the eviction was refused", |s| s.memory.no_room(LARGE, None, Instant::now())),
        ("the policy has changed", |s| s.policy(json!({"reshape": {"moves": {"maxPods": 0}}}))),
        ("there is room elsewhere", |s| {
            let mut node = crate::testing::gpu_node("n2", vec![gpu("GPU-2", 0)], Vec::new());
            node.metadata.resource_version = Some("1".into());
            s.world.gpu_nodes.watch_applied(node);
            s.world.nodes.watch_applied(crate::testing::node("n2", "8"));
        }),
        ("the node that it waits for is cordoned", |s| s.cordon("n1")),
        ("the node to which the other moves is cordoned", |s| s.cordon("n0")),
    ];
    for (why, change) in changes {
        let mut story = Story::reserved();
        change(&mut story);
        nothing_happens(&mut story, why);
    }
}

#[test]
fn what_is_only_half_on_record_or_has_lapsed_is_planned_anew_at_once() {
    type Change = fn(&mut Story);
    let changes: [(&str, Change); 3] = [
        ("one node was not told", |s| {
            let stays = |partition: &Partition| matches!(partition.owner, Owner::Claim(_));
            s.world.replace_gpu_node(|node| node.spec.partitions.retain(stays), "n0");
        }),
        ("nor was the other", |s| {
            let stays = |partition: &Partition| matches!(partition.owner, Owner::Claim(_));
            s.world.replace_gpu_node(|node| node.spec.partitions.retain(stays), "n1");
        }),
        ("it has taken too long", |s| s.wall += 1000),
    ];
    for (why, change) in changes {
        let mut story = Story::reserved();
        change(&mut story);
        let decision = story.cycle();
        assert_eq!(evicted(&decision), [""; 0], "{why}");
        assert_eq!(said(&decision, "large").0, "MakingRoom", "{why}");
        assert_eq!(story.entries("n0"), ["3g.40gb@0 (t1's next)", "3g.40gb@4 t0"], "{why}");
        assert_eq!(story.entries("n1"), ["3g.40gb@4 t1", "7g.80gb@0 (large)"], "{why}");
        assert_eq!(evicted(&story.cycle()), ["t1"], "{why}");
    }
}

#[test]
fn until_somebody_has_gone_what_is_free_is_anybodys() {
    let mut story = Story::reserved();
    story.add(gated_pod("quick", "nvidia.com/mig-3g.40gb", json!({})));
    let decision = story.cycle();
    assert_eq!(evicted(&decision), [""; 0], "the room is not the same any more");
    let all = [story.entries("n0"), story.entries("n1")].concat();
    assert!(all.contains(&"3g.40gb@0 quick".to_owned()), "{all:?}");
    assert!(all.iter().all(|entry| !entry.contains('(')), "{all:?}");
}

#[test]
fn two_who_come_at_once_do_not_get_the_same_slices() {
    // On n0 two slices are kept for the next of two who have gone; a third, with an instance, would suit both better.
    let mut story = Story::begins();
    story.change("large", |pod| pod.deleting = true);
    story.world.replace_gpu_node(
        |node| {
            node.spec
                .partitions
                .extend([kept_for("a", "GPU-0", "1g.10gb", 0), kept_for("b", "GPU-0", "1g.10gb", 1)]);
            node.status.as_mut().unwrap().gpus[0].instances.push(instance("1g.10gb", 3));
        },
        "n0",
    );
    for moved in ["a", "b"] {
        story.add(next_of(moved, "1g.10gb"));
    }
    story.cycle();
    assert_eq!(
        story.entries("n0").len(),
        3,
        "one has got its own, the other's is still kept: {:?}",
        story.entries("n0")
    );
    story.cycle();
    let entries = story.entries("n0");
    let starts: BTreeSet<&str> = entries.iter().filter_map(|entry| entry.split(' ').next()).collect();
    assert!(
        entries.len() == 3 && starts.len() == 3 && entries.iter().all(|e| !e.contains('(')),
        "{entries:?}"
    );
}

#[test]
fn whose_slices_are_kept_for_somebody_already_is_not_moved_for_another() {
    let mut story = Story::begins();
    let kept = kept_for("a", "GPU-1", "3g.40gb", 4);
    story.world.replace_gpu_node(|node| node.spec.partitions.push(kept), "n1");
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@4 t0", "7g.80gb@0 (large)"]);
}

#[test]
fn other_resources_are_kept_beyond_what_those_who_move_give_back() {
    let mut story = Story::reserved();
    let cpu = |pod: &mut PodInfo, milli: i128| {
        pod.milli.insert("cpu".into(), milli);
    };
    story.change("t1", |pod| cpu(pod, 5000));
    story.change("large", |pod| cpu(pod, 6000));
    let large = story.world.pods.get("default/large").unwrap();
    let partitions = &story.world.gpu_nodes.get("n1").unwrap().spec.partitions;
    let said = partitions.iter().find_map(|one| match &one.owner {
        Owner::Reservation(said) => Some(said),
        _ => None,
    });
    let kept = |node: &str| snapshot::kept_milli(&story.world, node, said.unwrap(), large)["cpu"];
    assert_eq!((kept("n1"), kept("n0")), (1000, 6000));
}

#[test]
fn once_somebody_has_gone_what_is_kept_for_the_next_stays_until_it_lapses() {
    let mut story = Story::reserved();
    story.change("t1", |pod| pod.deleting = true);
    story.change("large", |pod| pod.deleting = true);
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@0 (t1's next)", "3g.40gb@4 t0"]);
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1"]);
    story.wall += PATIENCE + 29;
    story.cycle();
    assert_eq!(story.entries("n0").len(), 2, "a pod may take its time to end");
    story.wall += 2;
    story.cycle();
    assert_eq!(story.entries("n0"), ["3g.40gb@4 t0"]);
}

#[test]
fn a_refusal_says_that_moving_others_would_not_help() {
    let mut story = Story::begins();
    for name in ["t0", "t1"] {
        story.change(name, |pod| pod.priority = 1);
    }
    let decision = story.cycle();
    let (reason, message) = said(&decision, "large");
    assert_eq!(reason, "NoRoom");
    assert!(
        message.ends_with("; moving others, as far as that is allowed, would not make room"),
        "{message}"
    );
    assert!(!story.memory.may_make_room(LARGE, Instant::now()));
    assert_eq!(said(&story.cycle(), "large").1, message, "also while it is not looked for again");
}

#[test]
fn who_shares_a_claim_is_not_moved() {
    let mut story = Story::begins();
    for name in ["t0", "t1"] {
        let mut claim = story.world.claim("default", &format!("claim-of-{name}")).unwrap().as_ref().clone();
        let consumers = claim.status.as_mut().unwrap().reserved_for.as_mut().unwrap();
        let mut other = consumers[0].clone();
        other.uid = "another".into();
        consumers.push(other);
        claim.metadata.resource_version = Some("3".into());
        story.world.claims.watch_applied(claim);
    }
    story.cycle();
    assert_eq!(story.entries("n1"), ["3g.40gb@4 t1"]);
}

#[test]
fn who_comes_while_another_is_given_its_place_finds_the_rest_of_the_node() {
    for with_next in [false, true] {
        let mut story = Story::begins();
        story.change("large", |pod| pod.deleting = true);
        story
            .world
            .replace_gpu_node(|node| node.spec.partitions.push(kept_for("a", "GPU-0", "1g.10gb", 0)), "n0");
        let mut filler = gated_pod("filler", "nvidia.com/mig-1g.10gb", json!({}));
        filler.detail = None;
        filler.node = Some("n1".into());
        filler.milli.insert("cpu".into(), 7950);
        story.add(filler);
        let mut p = gated_pod("p", "nvidia.com/mig-1g.10gb", json!({}));
        p.priority = 10;
        story.add(p);
        if with_next {
            story.add(next_of("a", "1g.10gb"));
        }
        story.cycle();
        let on_n1 = story.entries("n1").iter().any(|e| e.ends_with(" p"));
        assert!(!on_n1, "p sent to n1, where filler must be preempted, with_next={with_next}");
    }
}

#[test]
fn who_has_a_place_is_no_successor_even_where_it_fails() {
    let mut story = Story::begins();
    story.change("large", |pod| pod.deleting = true);
    story
        .world
        .replace_gpu_node(|node| node.spec.partitions.push(kept_for("a", "GPU-0", "3g.40gb", 0)), "n0");
    let x = made_by("rs-of-a", "x");
    let entry = entry_of(&x, "GPU-0b", "3g.40gb", 0, "main-nvidia-com-mig-3g-40gb-0");
    // same node, another GPU that fails
    story.world.replace_gpu_node(
        |node| {
            let mut other = gpu("GPU-0b", 1);
            other.problem =
                Some(kerf_crds::gpu_node::Reason { reason: "UNKNOWN".into(), message: "m".into() });
            node.status.as_mut().unwrap().gpus.push(other);
            node.spec.partitions.push(entry);
        },
        "n0",
    );
    story.add(x);
    story.cycle();
    let n = story.entries("n0").iter().filter(|e| e.ends_with(" x")).count();
    assert_eq!(n, 1, "{:?}", story.entries("n0"));
}

#[test]
fn who_has_a_place_is_no_successor_even_where_its_node_is_cordoned() {
    let mut story = Story::begins();
    story.change("large", |pod| pod.deleting = true);
    story
        .world
        .replace_gpu_node(|node| node.spec.partitions.push(kept_for("a", "GPU-0", "3g.40gb", 0)), "n0");
    let x = made_by("rs-of-a", "x");
    let entry = entry_of(&x, "GPU-1", "3g.40gb", 0, "r");
    story.world.replace_gpu_node(|node| node.spec.partitions.push(entry), "n1");
    story.cordon("n1");
    story.add(x);
    story.cycle();
    let all = [story.entries("n0"), story.entries("n1")].concat();
    assert_eq!(all.iter().filter(|e| e.ends_with(" x")).count(), 1, "{all:?}");
}

#[test]
fn nobody_is_moved_for_whom_something_is_kept_that_is_not_free_yet() {
    let mut story = Story::begins();
    story.change("large", |pod| pod.deleting = true);
    let mut node = crate::testing::gpu_node("n2", vec![gpu("GPU-2", 0)], Vec::new());
    node.metadata.resource_version = Some("1".into());
    story.world.gpu_nodes.watch_applied(node);
    story.world.nodes.watch_applied(crate::testing::node("n2", "8"));
    for (name, profile, start, node) in [
        ("b0", "3g.40gb", 0, "n0"),
        ("s", "1g.10gb", 0, "n1"),
        ("b2", "4g.40gb", 0, "n2"),
        ("b3", "1g.10gb", 4, "n2"),
    ] {
        let mut pod = gated_pod(name, &format!("nvidia.com/mig-{profile}"), json!({}));
        let detail = pod.detail.as_mut().unwrap();
        detail.movable = name == "s";
        detail.controller = Some(format!("rs-{name}"));
        detail.grace_seconds = 30;
        detail.gates.clear();
        pod.node = Some(node.into());
        story.world = give(std::mem::take(&mut story.world), &pod, profile, start);
        let mut used = instance(profile, start);
        used.claims = vec![claim_reference(name)];
        story.world.replace_gpu_node(|n| n.status.as_mut().unwrap().gpus[0].instances.push(used), node);
    }
    // t0 goes, too; a's next gets its slices.
    story.change("t0", |pod| pod.deleting = true);
    story.change("t1", |pod| pod.detail.as_mut().unwrap().movable = false);
    story
        .world
        .replace_gpu_node(|node| node.spec.partitions.push(kept_for("a", "GPU-0", "3g.40gb", 4)), "n0");
    story.add(next_of("a", "3g.40gb"));
    story.memory.have_no_room(&["uid-of-a-next"].into(), Instant::now() - Duration::from_secs(60));
    story.memory.let_through("uid-of-a-next", Instant::now());
    story.cycle();
    let second = story.cycle();
    assert_eq!(evicted(&second), [""; 0], "a place is kept for a-next already");
}

#[test]
fn no_quota_is_asked_where_nobody_may_be_moved() {
    let mut story = Story::begins();
    for name in ["t0", "t1"] {
        story.change(name, |pod| pod.detail.as_mut().unwrap().movable = false);
    }
    story.memory = Memory::default();
    for i in 0..20 {
        story.add(gated_pod(&format!("w{i}"), "nvidia.com/mig-7g.80gb", json!({})));
    }
    let waiting: Vec<String> = (0..20).map(|i| format!("uid-of-w{i}")).collect();
    let waiting = waiting.iter().map(String::as_str).collect();
    story.memory.have_no_room(&waiting, Instant::now() - Duration::from_secs(60));
    let mut asked = 0;
    for _ in 0..10 {
        let decision = story.cycle();
        asked += decision.quota.len();
        for pod in &decision.quota {
            story.memory.succeeded(&pod.uid);
            story.memory.let_through(&pod.uid, Instant::now());
        }
    }
    for i in 0..20 {
        story.memory.let_through(&format!("uid-of-w{i}"), Instant::now() - Duration::from_secs(61));
    }
    let again = story.cycle().quota.len();
    assert_eq!((asked, again), (0, 0), "nobody could be moved anyway");
}

#[test]
fn who_came_in_place_of_another_leaves_a_bad_place_like_anybody() {
    for moved in [false, true] {
        let mut story = Story::begins();
        story.change("large", |pod| pod.deleting = true);
        let x = next_of("a", "3g.40gb");
        let entry = entry_of(&x, "GPU-0", "3g.40gb", 0, "r");
        story.world.replace_gpu_node(|node| node.spec.partitions.push(entry), "n0");
        story.add(x);
        story.cordon("n0");
        if moved {
            story.memory.was_moved("uid-of-a-next", Instant::now());
        }
        story.cycle();
        let key = crate::scheduler::placements::Key {
            node: "n0".into(),
            namespace: "default".into(),
            claim: "claim-of-a-next".into(),
            pod: "a-next".into(),
            pod_uid: "uid-of-a-next".into(),
        };
        assert!(story.memory.withdraws(&key), "it should leave the cordoned node, moved={moved}");
    }
}

#[test]
fn warm_instances_stay_where_they_are_while_somebody_is_given_a_place() {
    let mut story = Story::begins();
    story.change("large", |pod| pod.deleting = true);
    story.policy(json!({"mig": {"mode": "Dynamic", "warm": [{"profile": "2g.20gb", "count": 1}]}}));
    let warm = Partition {
        gpu: "GPU-0".into(),
        instance: Some(wanted("2g.20gb", 2)),
        share: None,
        owner: Owner::Policy(kerf_crds::gpu_node::PolicyOwner {
            name: "all".into(),
            kind: kerf_crds::gpu_node::PolicyInstance::Warm,
        }),
    };
    story.world.replace_gpu_node(
        |node| {
            node.spec.partitions.extend([kept_for("a", "GPU-0", "1g.10gb", 0), warm]);
            node.status.as_mut().unwrap().gpus[0]
                .instances
                .extend([instance("1g.10gb", 0), instance("2g.20gb", 2)]);
        },
        "n0",
    );
    story.cycle();
    story.add(next_of("a", "1g.10gb"));
    story.cycle();
    let during = (story.entries("n0"), story.entries("n1"));
    assert!(during.0.iter().any(|e| e.ends_with("policy")), "{during:?}");
}

#[test]
fn a_search_in_vain_is_followed_by_a_pause_also_where_more_is_allowed_later() {
    for later in [false, true] {
        let mut story = Story::begins();
        let all = |node: &str, after: u32| {
            json!({"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": node}},
                "reshape": {"moves": {"maxPods": 1, "afterSeconds": after}}})
        };
        story.policy(all("n0", 10));
        let mut second = policy("second", all("n1", if later { 86400 } else { 10 }));
        second.metadata.resource_version = Some("4".into());
        story.world.policies.watch_applied(second);
        for name in ["t0", "t1"] {
            story.change(name, |pod| pod.priority = 1);
        }
        story.cycle();
        assert!(!story.memory.may_make_room(LARGE, Instant::now()), "no pause, later={later}");
    }
}

#[test]
fn nobody_goes_where_the_processors_are_taken_by_now() {
    let mut story = Story::begins();
    let cpu = |pod: &mut PodInfo| {
        pod.milli.insert("cpu".into(), 6000);
    };
    story.change("large", cpu);
    story.cycle();
    let mut filler = gated_pod("filler", "nvidia.com/mig-1g.10gb", json!({}));
    filler.detail = None;
    filler.node = Some("n1".into());
    filler.milli.insert("cpu".into(), 7000);
    story.add(filler);
    assert_eq!(evicted(&story.cycle()), [""; 0], "large cannot run on n1 any more");
}
