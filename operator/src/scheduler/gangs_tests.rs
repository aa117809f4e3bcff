use std::time::Instant;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::gpu_node::{Gpu, Owner};
use kerf_planner::protocol::next;
use kube::ResourceExt;
use serde_json::json;

use super::*;
use crate::scheduler::claims;
use crate::scheduler::cycle::decide;
use crate::scheduler::memory::Memory;
use crate::scheduler::placements::{self, look};
use crate::scheduler::selectors::Selectors;
use crate::testing::{claim, claiming_pod, gated_pod, gpu, instance, world};

/// Nodes of one GPU each, of which every pod here takes a whole one.
struct Story {
    world: World,
    memory: Memory,
}

impl Story {
    fn on(nodes: usize) -> Self {
        let gpus: Vec<Vec<Gpu>> = (0..nodes).map(|index| vec![gpu(&format!("GPU-{index}"), 0)]).collect();
        Self { world: world(gpus, json!({"mode": "Dynamic"})), memory: Memory::default() }
    }

    fn with(nodes: usize, pods: &[&str], size: u32) -> Self {
        let mut story = Self::on(nodes);
        for pod in pods {
            story.add(pod, size);
        }
        story
    }

    /// A pod of the gang `g`, created after those before it.
    fn add(&mut self, name: &str, size: u32) {
        self.add_to("g", name, size);
    }

    fn add_to(&mut self, gang: &str, name: &str, size: u32) {
        let mut pod = gated_pod(name, "nvidia.com/mig-7g.80gb", json!({}));
        pod.created = self.world.pods.len() as i64;
        pod.detail.as_mut().unwrap().gang = Some(Ok(kerf_crds::gang::Gang { name: gang.into(), size }));
        self.put(pod);
    }

    fn put(&mut self, pod: PodInfo) {
        self.world.put_pod(pod, |store, pod| store.watch_applied(pod));
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut PodInfo)) {
        let mut pod = PodInfo::clone(self.world.pods.get(&format!("default/{name}")).unwrap());
        pod.version += 1;
        change(&mut pod);
        self.put(pod);
    }

    fn delete(&mut self, name: &str) {
        let pod = PodInfo::clone(self.world.pods.get(&format!("default/{name}")).unwrap());
        self.world.put_pod(PodInfo { version: 99, ..pod }, |store, pod| store.watch_deleted(&pod));
    }

    fn decide(&self) -> Decision {
        decide(&self.world, &self.memory, &Selectors::default(), Instant::now(), 1_800_000_000)
    }

    /// Another leader takes over, who remembers nothing.
    fn takes_over(&mut self) {
        self.memory = Memory::default();
    }

    /// Decides, and of the nodes' specs so many are written before something comes in between.
    fn cycle_with(&mut self, writes: usize) -> Decision {
        let decision = self.decide();
        for write in decision.specs.iter().take(writes) {
            let spec = write.spec.clone();
            self.world.replace_gpu_node(|node| node.spec = spec, &write.node.name_any());
            for key in &write.removed {
                self.memory.removed(key);
            }
        }
        decision
    }

    fn cycle(&mut self) -> Decision {
        self.cycle_with(usize::MAX)
    }

    /// Pods that are on record, each once.
    fn on_record(&self) -> Vec<String> {
        let partitions = self.world.gpu_nodes.iter().flat_map(|node| &node.spec.partitions);
        let owner = |owner: &Owner| match owner {
            Owner::Claim(owner) => Some(owner.pod.clone()),
            Owner::Policy(_) | Owner::Reservation(_) => None,
        };
        let mut pods: Vec<String> = partitions.filter_map(|partition| owner(&partition.owner)).collect();
        pods.sort();
        pods
    }

    fn key(&self, pod: &str) -> Key {
        placements::all(&self.world).into_iter().find(|key| key.pod == pod).unwrap()
    }

    fn step(&self, pod: &str) -> Step {
        next(&look(&self.world, &self.memory, &self.key(pod)).observed)
    }

    fn claim(&mut self, pod: &str) {
        let pod = Arc::clone(self.world.pods.get(&format!("default/{pod}")).unwrap());
        let original = pod.detail.as_ref().unwrap().original.as_ref().unwrap().as_ref().unwrap();
        let claim = claims::from_annotation(&pod, pod.own_claim().unwrap(), original);
        self.world.claims.watch_applied(claim);
    }

    fn delete_claim(&mut self, name: &str) {
        let mut claim = ResourceClaim::clone(self.world.claim("default", name).unwrap());
        claim.metadata.resource_version = Some("99".into());
        assert!(self.world.claims.watch_deleted(&claim));
    }

    /// The pod's instance is there.
    fn make(&mut self, pod: &str) {
        let node = self.key(pod).node;
        let made = instance("7g.80gb", 0);
        self.world
            .replace_gpu_node(|node| node.status.as_mut().unwrap().gpus[0].instances = vec![made], &node);
    }

    fn allocate(&mut self, pod: &str) {
        let key = self.key(pod);
        let info = Arc::clone(self.world.pods.get(&format!("default/{pod}")).unwrap());
        let node = Arc::clone(self.world.gpu_nodes.get(&key.node).unwrap());
        let devices = placements::devices_of(&node, &key);
        self.change_claim(&key.claim, |claim| {
            let allocation =
                claims::allocate(claim, &node, &devices, "2026-01-01T00:00:00Z".parse().unwrap());
            let status = claim.status.get_or_insert_default();
            status.allocation = allocation;
            status.reserved_for = Some(vec![claims::reservation(&info)]);
        });
    }

    fn change_claim(&mut self, name: &str, change: impl FnOnce(&mut ResourceClaim)) {
        let mut claim = ResourceClaim::clone(self.world.claim("default", name).unwrap());
        let version = crate::cache::version_of(&claim.metadata) + 1;
        claim.metadata.resource_version = Some(version.to_string());
        change(&mut claim);
        assert!(self.world.claims.watch_applied(claim));
    }

    /// The pod is allocated, and bound.
    fn run(&mut self, pod: &str) {
        let node = self.key(pod).node;
        self.claim(pod);
        self.make(pod);
        self.allocate(pod);
        self.change(pod, |pod| {
            pod.node = Some(node);
            pod.detail.as_mut().unwrap().gates.clear();
        });
    }

    /// Takes the placement's next steps, as the operator does in one go. Answers how many pods have started with them.
    fn drive(&mut self, key: &Key) -> usize {
        for _ in 0..8 {
            if !placements::all(&self.world).contains(key) {
                return 0;
            }
            let step = next(&look(&self.world, &self.memory, key).observed);
            match step {
                Step::CreateClaim => self.claim(&key.pod),
                Step::ReadPod => self.memory.note_read(key),
                Step::DeleteClaim => self.delete_claim(&key.claim),
                Step::ClearAllocation => self.change_claim(&key.claim, |claim| claim.status = None),
                Step::Allocate { .. } | Step::Ungate => {
                    let alive = self.on_record().into_iter().filter(|pod| {
                        let pod = self.world.pods.get(&format!("default/{pod}"));
                        pod.is_some_and(|pod| !self.memory.withdraws(&self.key(&pod.name)))
                    });
                    assert!(alive.count() >= 3, "{step:?} of {}", key.pod);
                    if step == Step::Ungate {
                        self.change(&key.pod, |pod| pod.detail.as_mut().unwrap().gates.clear());
                        return 1;
                    }
                    self.allocate(&key.pod);
                }
                _ => return 0,
            }
        }
        0
    }

    /// Steps of placements that are given up, as far as the removal of their records.
    fn give_back(&mut self) -> Vec<String> {
        let decision = self.cycle();
        let leaving: Vec<Key> =
            decision.drive.iter().filter(|key| self.memory.withdraws(key)).cloned().collect();
        for key in &leaving {
            assert_eq!(self.step(&key.pod), Step::ReadPod);
            self.memory.note_read(key);
        }
        self.cycle();
        leaving.into_iter().map(|key| key.pod).collect()
    }
}

/// Small and the same everywhere.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

fn said<'a>(decision: &'a Decision, pod: &str) -> (&'a str, &'a str) {
    let mut all = decision.sentences.iter().filter(|(told, _)| told.name == pod);
    let (_, sentence) = all.next_back().unwrap_or_else(|| panic!("{pod} is told nothing"));
    (sentence.reason, sentence.message.as_str())
}

#[test]
fn until_enough_pods_are_there_none_is_planned() {
    let mut story = Story::with(4, &["a", "b"], 3);
    story.put(gated_pod("alone", "nvidia.com/mig-7g.80gb", json!({})));
    let decision = story.cycle();
    assert_eq!(story.on_record(), ["alone"]);
    for pod in ["a", "b"] {
        assert_eq!(said(&decision, pod), ("WaitsForGang", "2 of 3 pods of gang default/g are there"));
    }
    assert!(decision.placeless.contains("uid-of-a"));
    story.add("c", 3);
    story.cycle();
    assert_eq!(story.on_record(), ["a", "alone", "b", "c"]);
}

#[test]
fn a_gang_without_room_for_all_takes_nothing_and_keeps_nobody_from_going_on() {
    let mut story = Story::with(2, &["a", "b", "c"], 3);
    let decision = story.cycle();
    assert!(story.on_record().is_empty());
    for pod in ["a", "b", "c"] {
        let (reason, message) = said(&decision, pod);
        assert_eq!(reason, "NoRoom");
        let start = "the 3 pods of gang default/g get their places together or not at all; beside 2 of them default/c";
        assert!(message.starts_with(start), "{message}");
    }
    let late = PodInfo { created: 99, ..gated_pod("late", "nvidia.com/mig-7g.80gb", json!({})) };
    story.put(late);
    story.cycle();
    assert_eq!(story.on_record(), ["late"]);
}

#[test]
fn pods_that_disagree_about_the_size_are_named() {
    let mut story = Story::with(4, &["a", "b"], 2);
    story.cycle();
    story.add("c", 3);
    let decision = story.decide();
    for pod in ["a", "b", "c"] {
        let (reason, message) = said(&decision, pod);
        assert_eq!(reason, "BadGang");
        assert!(message.ends_with("all pods of gang default/g; it is 2 on a, b; 3 on c"), "{message}");
    }
    assert_eq!(story.give_back(), ["a", "b"], "what was on record is given back");
    assert!(story.on_record().is_empty());
    story.delete("c");
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b"]);
}

#[test]
fn an_annotation_that_cannot_be_read_is_told() {
    let mut story = Story::with(1, &["a"], 1);
    story.change("a", |pod| pod.detail.as_mut().unwrap().gang = Some(Err("annotation x".into())));
    let decision = story.cycle();
    assert_eq!(said(&decision, "a"), ("BadGang", "annotation x"));
    assert!(story.on_record().is_empty());
}

#[test]
fn none_is_allocated_before_enough_are_ready() {
    let mut story = Story::with(3, &["a", "b", "c"], 3);
    story.cycle();
    for pod in ["a", "b", "c"] {
        assert_eq!(story.step(pod), Step::CreateClaim);
        story.claim(pod);
    }
    story.make("a");
    story.make("b");
    for taken_over in [false, true] {
        if taken_over {
            story.takes_over();
        }
        let decision = story.cycle();
        assert!(decision.drive.is_empty(), "{:?}", decision.drive);
        for pod in ["a", "b"] {
            assert_eq!(story.step(pod), Step::Wait(Waiting::Others));
            let (reason, message) = said(&decision, pod);
            assert_eq!(reason, "WaitsForGang");
            let end = "and waits for other pods: 2 of 3 of gang default/g are ready";
            assert!(
                message.starts_with("has 7g.80gb at slice 0 of GPU 0 on node n") && message.ends_with(end),
                "{message}"
            );
        }
        assert_eq!(story.step("c"), Step::Wait(Waiting::Instances));
        assert_eq!(said(&decision, "c").0, "Reshaping");
    }
    story.make("c");
    let decision = story.cycle();
    assert_eq!(decision.drive.len(), 3);
    for pod in ["a", "b", "c"] {
        assert_eq!(story.step(pod), Step::Allocate { hold: false });
        assert!(
            decision.sentences.iter().all(|(told, _)| told.name != pod),
            "it is told once it is allocated"
        );
    }
    // The operator dies when one is allocated.
    story.allocate("a");
    story.takes_over();
    assert_eq!(story.step("a"), Step::Wait(Waiting::Others));
    let decision = story.cycle();
    assert_eq!(decision.drive.len(), 3);
    assert_eq!(story.step("a"), Step::Ungate);
    assert_eq!(story.step("b"), Step::Allocate { hold: false });
    // One goes, and none has lost its gate.
    story.delete("c");
    assert!(story.cycle().drive.iter().all(|key| story.memory.withdraws(key)));
    assert_eq!(story.step("a"), Step::ClearAllocation);
}

#[test]
fn one_that_cannot_run_where_its_place_is_and_has_no_better_one_takes_the_others_back() {
    let mut story = Story::with(2, &["a", "b"], 2);
    story.cycle();
    for pod in ["a", "b"] {
        story.claim(pod);
        story.make(pod);
    }
    let mut cordoned = crate::testing::node(&story.key("b").node, "8");
    (cordoned.version, cordoned.unschedulable) = (9, true);
    story.world.nodes.watch_applied(cordoned);
    let decision = story.cycle();
    assert_eq!(decision.drive.len(), 2);
    assert_eq!(said(&decision, "b").0, "NodesDoNotFit");
    for pod in ["a", "b"] {
        story.memory.note_read(&story.key(pod));
        assert_eq!(story.step(pod), Step::DeleteClaim, "it counts for no quota meanwhile");
    }
}

#[test]
fn what_only_some_of_the_writes_put_on_record_is_completed() {
    let mut story = Story::with(3, &["a", "b", "c"], 3);
    story.cycle_with(1);
    let first = story.on_record();
    assert_eq!(first.len(), 1);
    story.claim(&first[0]);
    story.make(&first[0]);
    story.takes_over();
    let decision = story.cycle_with(1);
    assert_eq!(story.step(&first[0]), Step::Wait(Waiting::Others));
    assert!(decision.drive.is_empty(), "{:?}", decision.drive);
    assert_eq!(story.on_record().len(), 2);
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b", "c"]);
}

#[test]
fn what_is_on_record_without_the_rest_is_given_back_if_the_rest_has_no_room() {
    let mut story = Story::with(3, &["a", "b", "c"], 3);
    story.cycle_with(1);
    let first = story.on_record();
    story.takes_over();
    let free = story.world.gpu_nodes.iter().find(|node| node.spec.partitions.is_empty()).unwrap().name_any();
    story.world.replace_gpu_node(|node| node.status.as_mut().unwrap().conditions.clear(), &free);
    assert_eq!(story.give_back(), first);
    assert!(story.on_record().is_empty());
    let decision = story.cycle();
    assert!(story.on_record().is_empty());
    assert_eq!(said(&decision, "a").0, said(&decision, "c").0);
}

#[test]
fn what_is_on_record_is_given_back_if_one_goes_before_it_is_allocated() {
    for terminating in [false, true] {
        let mut story = Story::with(3, &["a", "b", "c"], 3);
        story.cycle();
        if terminating {
            story.change("b", |pod| pod.deleting = true);
        } else {
            story.delete("b");
        }
        story.takes_over();
        assert_eq!(story.give_back(), ["a", "c"]);
        assert_eq!(story.on_record(), if terminating { vec!["b"] } else { vec![] });
        let decision = story.cycle();
        assert_eq!(said(&decision, "a"), ("WaitsForGang", "2 of 3 pods of gang default/g are there"));
    }
}

#[test]
fn nothing_is_given_back_while_one_looks_for_another_place() {
    let mut story = Story::with(3, &["a", "b"], 2);
    story.cycle();
    let key = story.key("a");
    let lost = key.node.clone();
    story.world.replace_gpu_node(
        |node| {
            node.status.as_mut().unwrap().gpus[0].unhealthy =
                Some(kerf_crds::gpu_node::Reason { reason: "Xid".into(), message: "XID 79".into() });
        },
        &lost,
    );
    assert_eq!(story.give_back(), ["a"]);
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b"]);
    assert_ne!(story.key("a").node, lost);
}

#[test]
fn of_more_pods_than_needed_the_first_get_their_places_together_and_the_others_after_them() {
    let mut story = Story::with(3, &["d", "a", "c", "b"], 2);
    let decision = story.cycle();
    assert_eq!(story.on_record(), ["a", "d"], "in the order of their creation");
    for pod in ["b", "c"] {
        let message = "other pods of gang default/g, as many as it needs, get their places first";
        assert_eq!(said(&decision, pod), ("WaitsForGang", message));
    }
    let decision = story.cycle();
    assert_eq!(story.on_record(), ["a", "c", "d"]);
    let (reason, message) = said(&decision, "b");
    assert_eq!(reason, "NoRoom");
    assert!(message.ends_with("; 2 pods of its gang default/g, which needs 2, have places"), "{message}");
}

#[test]
fn one_that_comes_in_place_of_a_failed_one_is_served_alone() {
    let mut story = Story::with(4, &["a", "b", "c"], 3);
    story.cycle();
    for pod in ["a", "b", "c"] {
        story.run(pod);
    }
    assert!(story.cycle().drive.is_empty());
    story.change("b", |pod| pod.done = true);
    story.cycle();
    story.add("b2", 3);
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b2", "c"]);
    story.claim("b2");
    story.make("b2");
    let decision = story.cycle();
    assert!(decision.drive.contains(&story.key("b2")));
    assert_eq!(story.step("b2"), Step::Allocate { hold: false });
    // Of two that are gone both have to come.
    for pod in ["a", "b2"] {
        story.delete(pod);
    }
    story.cycle();
    story.add("a2", 3);
    let decision = story.cycle();
    assert_eq!(said(&decision, "a2"), ("WaitsForGang", "2 of 3 pods of gang default/g are there"));
}

#[test]
fn the_pods_of_an_earlier_gang_of_that_name_do_not_count_while_they_end() {
    let mut story = Story::with(4, &["a", "b", "c"], 3);
    story.cycle();
    for pod in ["a", "b", "c"] {
        story.run(pod);
        story.change(pod, |pod| pod.deleting = true);
    }
    story.add("a2", 3);
    let decision = story.cycle();
    assert_eq!(said(&decision, "a2"), ("WaitsForGang", "1 of 3 pods of gang default/g are there"));
    assert_eq!(story.on_record(), ["a", "b", "c"]);
}

#[test]
fn one_that_cannot_be_planned_keeps_the_others_waiting_and_is_named() {
    let mut story = Story::with(3, &["a", "b", "c"], 3);
    story.change("b", |pod| pod.detail.as_mut().unwrap().gates.push("example.com/later".into()));
    let decision = story.cycle();
    assert!(story.on_record().is_empty());
    let (reason, message) = said(&decision, "a");
    assert_eq!(reason, "WaitsForGang");
    let expected = "gang default/g lacks places for 3 of its 3 pods, and 2 can be planned for now; b is told: waits for the \
                    scheduling gates of others to be removed: example.com/later";
    assert_eq!(message, expected);
    assert_eq!(said(&decision, "b").0, "OtherGates");
}

#[test]
fn pods_of_a_gang_that_a_quota_refused_ask_one_after_the_other_although_they_are_alike() {
    let mut story = Story::with(3, &["a", "b", "c"], 3);
    let now = Instant::now();
    for pod in ["a", "b", "c"] {
        story.memory.failed(&format!("uid-of-{pod}"), pod_reason::QUOTA, "exceeded quota".into(), now);
    }
    story.world.quota_changed("default", 8);
    for pod in ["a", "b", "c"] {
        let asks: Vec<String> = story.cycle().quota.iter().map(|pod| pod.name.clone()).collect();
        assert_eq!(asks, [pod]);
        assert!(story.on_record().is_empty());
        story.memory.succeeded(&format!("uid-of-{pod}"));
        // As a change of the quota does.
        story.memory.end_pause("uid-of-b");
        story.memory.end_pause("uid-of-c");
    }
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b", "c"]);
}

#[test]
fn pods_with_claims_of_their_users_have_no_gate_and_are_allocated_together() {
    let mut story = Story::on(2);
    let whole = json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig-7g.80gb.kerf.dev"}}]});
    for name in ["a", "b"] {
        let mut pod = claiming_pod(name, &[&format!("of-{name}")]);
        pod.detail.as_mut().unwrap().gang = Some(Ok(kerf_crds::gang::Gang { name: "g".into(), size: 2 }));
        story.put(pod);
        if name == "a" {
            story.cycle();
            assert!(story.on_record().is_empty());
        }
        story.world.claims.watch_applied(claim(&format!("of-{name}"), whole.clone()));
    }
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b"]);
    story.make("a");
    assert!(story.cycle().drive.is_empty());
    assert_eq!(story.step("a"), Step::Wait(Waiting::Others));
    story.make("b");
    assert_eq!(story.cycle().drive.len(), 2);
    // Without a gate one that is allocated may be running: it keeps its place whatever becomes of the others.
    story.allocate("a");
    story.delete("b");
    story.cycle();
    assert_eq!(story.step("a"), Step::Wait(Waiting::Bind));
}

#[test]
fn kube_scheduler_is_not_asked_to_preempt_for_one_of_a_gang() {
    let low = |node: &str| -> PodInfo {
        serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(json!({
            "metadata": {"name": format!("low-{node}"), "namespace": "default", "uid": node, "resourceVersion": "1"},
            "spec": {"nodeName": node, "priority": -1,
                "containers": [{"name": "main", "resources": {"requests": {"cpu": "8"}}}]},
        }))
        .unwrap()
        .into()
    };
    let mut story = Story::with(2, &["a", "b"], 2);
    story.put(low("n0"));
    story.put(low("n1"));
    let decision = story.cycle();
    assert_eq!(said(&decision, "a").0, "NodesDoNotFit");
    assert!(story.on_record().is_empty());
    story.put(gated_pod("alone", "nvidia.com/mig-7g.80gb", json!({})));
    story.cycle();
    assert_eq!(story.on_record(), ["alone"]);
}

#[test]
fn a_pod_that_was_let_go_and_has_lost_its_place_is_served_alone() {
    let mut story = Story::with(1, &["a"], 2);
    story.cycle();
    assert!(story.on_record().is_empty());
    story.claim("a");
    story.change("a", |pod| pod.detail.as_mut().unwrap().gates.clear());
    story.cycle();
    assert_eq!(story.on_record(), ["a"]);
}

/// A quota lets two of the four claims of two gangs through.
#[test]
fn of_two_gangs_under_one_quota_one_gets_all_of_its_claims() {
    for alike in [true, false] {
        let mut story = Story::on(4);
        for (gang, pods) in [("g", ["a", "b"]), ("h", ["c", "d"])] {
            pods.iter().for_each(|pod| story.add_to(gang, pod, 2));
        }
        if !alike {
            story.change("d", |pod| _ = pod.milli.insert("cpu".into(), 250));
        }
        let mut version = 1;
        for _ in 0..40 {
            let decision = story.cycle();
            let added = decision.specs.iter().flat_map(|write| &write.added);
            let mut keys: Vec<Key> = added.chain(&decision.drive).cloned().collect();
            // The gangs by turns.
            keys.sort_by_key(|key| ["a", "c", "b", "d"].iter().position(|pod| *pod == key.pod));
            for key in keys {
                for _ in 0..4 {
                    if !placements::all(&story.world).contains(&key) {
                        break;
                    }
                    match story.step(&key.pod) {
                        Step::CreateClaim if story.world.claims.len() < 2 => story.claim(&key.pod),
                        Step::CreateClaim => {
                            let message = "exceeded quota".to_owned();
                            story.memory.failed(&key.pod_uid, pod_reason::QUOTA, message, Instant::now());
                            story.memory.give_back(&key);
                            break;
                        }
                        Step::ReadPod => story.memory.note_read(&key),
                        Step::DeleteClaim => {
                            story.delete_claim(&key.claim);
                            version += 1;
                            story.world.quota_changed("default", version);
                        }
                        _ => break,
                    }
                }
            }
            for pod in &decision.quota {
                if story.world.claims.len() < 2 {
                    story.memory.succeeded(&pod.uid);
                    story.memory.let_through(&pod.uid, Instant::now());
                }
            }
            for pod in ["a", "b", "c", "d"] {
                story.memory.end_pause(&format!("uid-of-{pod}"));
            }
        }
        let claims: Vec<String> = story.world.claims.iter().map(|claim| claim.name_any()).collect();
        assert_eq!(claims, ["claim-of-a", "claim-of-b"], "alike: {alike}");
        assert_eq!(story.on_record(), ["a", "b"]);
    }
}

/// Each of two gangs has a place on a node that was cordoned, and the other holds what it lacks.
#[test]
fn of_two_gangs_that_keep_each_others_room_one_yields() {
    let mut story = Story::on(4);
    for (gang, pods) in [("g", ["a", "b"]), ("h", ["c", "d"])] {
        pods.iter().for_each(|pod| story.add_to(gang, pod, 2));
    }
    story.cycle();
    assert_eq!(story.on_record(), ["a", "b", "c", "d"]);
    for pod in ["b", "d"] {
        let name = story.key(pod).node;
        let mut node = crate::cache::NodeInfo::clone(story.world.nodes.get(&name).unwrap());
        (node.version, node.unschedulable) = (node.version + 1, true);
        story.world.nodes.watch_applied(node);
    }
    let mut kept = Vec::new();
    for _ in 0..12 {
        for key in &story.cycle().drive {
            if story.memory.withdraws(key) {
                story.memory.note_read(key);
            }
        }
        kept = story.on_record();
    }
    assert_eq!(kept, ["a", "b"], "the first has moved to what the second had");
    for pod in ["a", "b"] {
        assert!(!story.world.nodes.get(&story.key(pod).node).unwrap().unschedulable);
    }
}

/// Whatever comes in between, none starts before enough have their places, and in the end those of a gang that is not
/// complete have none.
#[test]
fn nothing_is_left_half() {
    let mut started = 0;
    for seed in 0..40 {
        let mut dice = Dice(seed);
        let mut story = Story::with(4, &["a", "b", "c"], 3);
        let mut next_name = 0;
        for _ in 0..40 {
            match dice.below(10) {
                0 => story.takes_over(),
                1 if story.world.pods.len() < 5 => {
                    story.add(&format!("x{next_name}"), 3);
                    next_name += 1;
                }
                2 => {
                    let pods: Vec<String> = story.world.pods.iter().map(|pod| pod.name.clone()).collect();
                    if !pods.is_empty() {
                        story.delete(&pods[dice.below(pods.len())]);
                    }
                }
                _ => {
                    let writes = dice.below(3);
                    let decision = story.cycle_with(writes);
                    let added = decision.specs.iter().take(writes).flat_map(|write| &write.added);
                    // The operator may die between any two writes.
                    for key in added.chain(&decision.drive).take(dice.below(5)) {
                        started += story.drive(key);
                    }
                }
            }
            for pod in story.on_record() {
                if dice.below(2) == 0 {
                    story.make(&pod);
                }
            }
        }
        for _ in 0..30 {
            let decision = story.cycle();
            for key in &decision.drive {
                story.drive(key);
            }
            story.on_record().iter().for_each(|pod| story.make(pod));
        }
        let alive = story.world.pods.len();
        let running = story.world.pods.iter().filter(|pod| !pod.gated()).count();
        let on_record = story.on_record();
        let expected = if alive >= 3 { alive.min(4) } else { running };
        assert_eq!(on_record.len(), expected, "seed {seed}: {on_record:?} of {alive}, {running} running");
    }
    assert!(started > 40, "{started}");
}

#[test]
fn a_pod_that_was_let_go_keeps_its_place_when_another_ends() {
    let mut story = Story::with(3, &["a", "b", "c"], 3);
    story.cycle();
    for name in ["a", "b", "c"] {
        story.claim(name);
        story.make(name);
    }
    story.cycle();
    for name in ["a", "b", "c"] {
        story.allocate(name);
        story.change(name, |pod| pod.detail.as_mut().unwrap().gates.clear());
    }
    for name in ["a", "b"] {
        let node = story.key(name).node;
        story.change(name, |pod| pod.node = Some(node));
    }
    story.cycle();
    // One ends, and kube-scheduler throws the allocation of another away, as it does.
    story.change("a", |pod| pod.done = true);
    let claim = story.key("c").claim;
    story.change_claim(&claim, |claim| claim.status = None);
    story.cycle();
    story.give_back();
    story.cycle();
    assert!(story.on_record().contains(&"c".to_owned()), "{:?}", story.on_record());
    assert!(matches!(story.step("c"), Step::Allocate { .. }), "{:?}", story.step("c"));
}

#[test]
fn pods_of_a_gang_that_share_a_claim_are_told_so() {
    let mut story = Story::on(2);
    let whole = json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "mig-7g.80gb.kerf.dev"}}]});
    story.world.claims.watch_applied(claim("shared", whole));
    for name in ["a", "b"] {
        let mut pod = claiming_pod(name, &["shared"]);
        pod.detail.as_mut().unwrap().gang = Some(Ok(kerf_crds::gang::Gang { name: "g".into(), size: 2 }));
        story.put(pod);
    }
    let decision = story.cycle();
    let (reason, message) = said(&decision, "b");
    assert_eq!(reason, pod_reason::BAD_GANG);
    assert!(message.starts_with("shares ResourceClaim \"shared\" with pod \"a\""), "{message}");
    assert!(story.on_record().is_empty());
}
