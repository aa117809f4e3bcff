use std::time::{Duration, Instant};

use kerf_crds::conditions::pod;
use kerf_crds::gpu_node::{PodReference, Reservation};
use serde_json::json;

use super::*;
use crate::scheduler::cycle::decide;
use crate::scheduler::decision::Decision;
use crate::scheduler::selectors::Selectors;
use crate::testing;

const WALL: i64 = 1_800_000_000;

/// A cluster to which things happen.
struct Story {
    world: World,
    version: u64,
    state: u64,
    pods: usize,
    wall: i64,
}

impl Story {
    fn new(seed: u64) -> Self {
        let nodes = (0..4).map(|n| (0..2).map(|g| testing::gpu(&format!("GPU-{n}-{g}"), g)).collect());
        let world = testing::world(nodes.collect(), json!({"mode": "Dynamic"}));
        Self { world, version: 100, state: seed, pods: 0, wall: WALL }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % bound.max(1)
    }

    fn next(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn name(&mut self) -> String {
        format!("n{}", self.below(4))
    }

    fn pick<T>(&mut self, from: Vec<T>) -> Option<T> {
        let index = self.below(from.len());
        from.into_iter().nth(index)
    }

    fn put(&mut self, mut pod: PodInfo) {
        pod.version = self.next();
        self.world.put_pod(pod, |store, pod| store.watch_applied(pod));
    }

    fn some_pod(&mut self, which: impl Fn(&PodInfo) -> bool) -> Option<PodInfo> {
        let pods = self.world.pods.iter().filter(|pod| which(pod)).map(|pod| PodInfo::clone(pod)).collect();
        self.pick(pods)
    }

    fn change_node(&mut self, change: impl FnOnce(&mut Self, &mut GpuNode)) {
        let name = self.name();
        let Some(node) = self.world.gpu_nodes.get(&name) else { return };
        let mut node = GpuNode::clone(node);
        change(self, &mut node);
        node.metadata.resource_version = Some(self.next().to_string());
        self.world.gpu_nodes.watch_applied(node);
    }

    fn put_claim(&mut self, mut claim: ResourceClaim) {
        claim.metadata.resource_version = Some(self.next().to_string());
        self.world.claims.watch_applied(claim);
    }

    /// Writes of the operator, as far as they get.
    fn carry_out(&mut self, decision: &Decision) {
        for write in &decision.specs {
            if self.below(4) > 0 {
                let mut node = GpuNode::clone(&write.node);
                node.spec = write.spec.clone();
                node.metadata.resource_version = Some(self.next().to_string());
                self.world.gpu_nodes.watch_applied(node);
            }
        }
        for key in placements::all(&self.world) {
            if self.below(3) == 0 {
                continue;
            }
            let seen = placements::look(&self.world, &Memory::default(), &key);
            let pod = seen.pod.as_deref();
            match (next(&seen.observed), seen.claim.clone(), pod) {
                (Step::CreateClaim, _, Some(pod)) => {
                    let Some(Ok(original)) = pod.detail.as_ref().and_then(|detail| detail.original.as_ref())
                    else {
                        continue;
                    };
                    let mut claim = claims::from_annotation(pod, &key.claim, original);
                    claim.metadata.uid = Some(format!("claim-{}", key.pod_uid));
                    self.put_claim(claim);
                }
                (Step::Allocate { .. }, Some(claim), Some(pod)) => {
                    let (mut claim, node) = (ResourceClaim::clone(&claim), seen.node.as_ref().unwrap());
                    let now = k8s_openapi::jiff::Timestamp::from_second(WALL).unwrap();
                    let status = k8s_openapi::api::resource::v1::ResourceClaimStatus {
                        allocation: claims::allocate(&claim, node, seen.devices(), now),
                        reserved_for: Some(vec![claims::reservation(pod)]),
                        ..Default::default()
                    };
                    claim.status = Some(status);
                    self.put_claim(claim);
                }
                (Step::ClearAllocation, Some(claim), _) => {
                    self.put_claim(ResourceClaim { status: None, ..ResourceClaim::clone(&claim) });
                }
                (Step::Ungate, _, Some(pod)) => {
                    let mut pod = pod.clone();
                    pod.detail.as_mut().unwrap().gates.clear();
                    self.put(pod);
                }
                (Step::Wait(Waiting::Bind), _, Some(pod)) => {
                    let mut pod = pod.clone();
                    pod.node = Some(key.node.clone());
                    if self.below(2) == 0 {
                        let said = ("False".to_owned(), pod::PLANNED.to_owned(), String::new());
                        pod.detail.as_mut().unwrap().planned = Some(said);
                    }
                    self.put(pod);
                }
                _ => {}
            }
        }
    }

    /// Something that others do.
    fn happen(&mut self) {
        match self.below(24) {
            0..4 => {
                let (number, which) = (self.pods, self.below(4));
                self.pods += 1;
                let profile = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"][which];
                self.put(testing::gated_pod(
                    &format!("p{number}"),
                    &format!("nvidia.com/mig-{profile}"),
                    json!({}),
                ));
            }
            // The daemon makes what it is told.
            4..9 => self.change_node(|story, node| {
                let wanted = node.spec.partitions.clone();
                let Some(status) = &mut node.status else { return };
                for gpu in &mut status.gpus {
                    let here = wanted
                        .iter()
                        .filter(|one| one.gpu == gpu.uuid)
                        .filter_map(|one| one.instance.as_ref());
                    gpu.instances =
                        here.map(|one| testing::instance(&one.profile, one.placement.start)).collect();
                    if story.below(8) == 0 {
                        gpu.instances.iter_mut().for_each(|one| one.processes = 1);
                    }
                }
            }),
            9 => {
                if let Some(mut pod) = self.some_pod(|pod| pod.node.is_some() && !pod.done) {
                    (pod.done, pod.deleting) = if self.below(2) == 0 { (true, false) } else { (false, true) };
                    self.put(pod);
                }
            }
            10 => {
                if let Some(mut pod) = self.some_pod(|_| true) {
                    pod.version = self.next();
                    self.world.put_pod(pod, |store, pod| store.watch_deleted(&pod));
                }
            }
            // Somebody else's pod comes, or one goes elsewhere than was planned.
            11 => {
                let (number, node) = (self.pods, self.name());
                self.pods += 1;
                let milli = [("cpu".to_owned(), 500), ("pods".to_owned(), 1000)].into();
                let name = format!("other{number}");
                let pod =
                    PodInfo { uid: name.clone(), name, namespace: "x".into(), milli, ..PodInfo::default() };
                self.put(PodInfo { node: Some(node), ..pod });
            }
            12 => {
                let node = self.name();
                if let Some(mut pod) = self.some_pod(|pod| pod.node.is_none() && !pod.gated()) {
                    pod.node = Some(node);
                    self.put(pod);
                }
            }
            13 => {
                let claims = self.world.claims.iter().map(|claim| ResourceClaim::clone(claim)).collect();
                let Some(mut claim) = self.pick(claims) else { return };
                if self.below(2) == 0 {
                    claim.metadata.resource_version = Some(self.next().to_string());
                    self.world.claims.watch_deleted(&claim);
                } else {
                    self.put_claim(ResourceClaim { status: None, ..claim });
                }
            }
            14 => {
                let mode = ["Dynamic", "Off", "Static"][self.below(3)];
                let layout =
                    if mode == "Static" { json!([{"profile": "3g.40gb", "count": 2}]) } else { json!([]) };
                let warm =
                    if mode == "Dynamic" { json!([{"profile": "1g.10gb", "count": 2}]) } else { json!([]) };
                let labels =
                    if self.below(2) == 0 { json!({}) } else { json!({"kubernetes.io/hostname": "n1"}) };
                let spec = json!({"mig": {"mode": mode, "layout": layout, "warm": warm},
                    "nodeSelector": {"matchLabels": labels}});
                let mut policy = testing::policy(["all", "more"][self.below(2)], spec);
                policy.metadata.resource_version = Some(self.next().to_string());
                if self.below(4) == 0 {
                    self.world.policies.watch_deleted(&policy);
                } else {
                    self.world.policies.watch_applied(policy);
                }
            }
            15 => {
                let name = self.name();
                let Some(node) = self.world.nodes.get(&name) else { return };
                let mut node = NodeInfo::clone(node);
                node.version = self.next();
                match self.below(4) {
                    0 => node.unschedulable = !node.unschedulable,
                    1 => node.ready = !node.ready,
                    2 => drop(Arc::make_mut(&mut node.labels).remove("kubernetes.io/hostname")),
                    _ => {
                        self.world.nodes.watch_deleted(&node);
                        return;
                    }
                }
                self.world.nodes.watch_applied(node);
            }
            16 => {
                let (name, version) = (self.name(), self.next());
                let mut node = testing::node(&name, "8");
                if self.world.nodes.get(&name).is_none() {
                    node = NodeInfo { version, ..node };
                    self.world.nodes.watch_applied(node);
                }
            }
            17 => self.change_node(|story, node| {
                let Some(status) = &mut node.status else { return };
                let gpu = story.below(status.gpus.len());
                let why = kerf_crds::gpu_node::Reason { reason: "Xid".into(), message: "Xid 79".into() };
                match (story.below(4), status.gpus.get_mut(gpu)) {
                    (3, Some(gpu)) => {
                        // One that cannot be cut any more, and can be shared, or the other way round.
                        gpu.sharing = gpu.geometry.take().map(|_| Default::default());
                        if gpu.sharing.is_none() {
                            gpu.geometry = Some("A100".into());
                        }
                    }
                    (0, Some(gpu)) => gpu.unhealthy = Some(why),
                    (1, Some(gpu)) => gpu.unhealthy = None,
                    // Another geometry is met first.
                    (_, Some(gpu)) => {
                        gpu.geometry = Some("B".into());
                        status.geometries =
                            vec![kerf_crds::gpu_node::Geometry { name: "B".into(), ..testing::a100() }];
                    }
                    _ => {}
                }
            }),
            // A room.
            18 => {
                let waiting = self.some_pod(|pod| pod.gated());
                let moved = self.some_pod(|pod| pod.detail.is_some() && pod.node.is_some());
                let reference =
                    |pod: PodInfo| PodReference { namespace: pod.namespace, name: pod.name, uid: pod.uid };
                let (Some(waiting), Some(moved)) = (waiting.map(reference), moved.map(reference)) else {
                    return;
                };
                let end = self.wall + self.below(40) as i64;
                self.change_node(|story, node| {
                    let said = Reservation {
                        pod: waiting,
                        controller: None,
                        moves: vec![moved],
                        expires: k8s_openapi::jiff::Timestamp::from_second(end).unwrap().to_string(),
                    };
                    let gpus: Vec<String> = node
                        .status
                        .iter()
                        .flat_map(|status| &status.gpus)
                        .map(|gpu| gpu.uuid.clone())
                        .collect();
                    let Some(gpu) = story.pick(gpus) else { return };
                    let instance = Some(testing::wanted("3g.40gb", 4));
                    let entry = Partition { gpu, instance, share: None, owner: Owner::Reservation(said) };
                    let free = |one: &Partition| !crate::controller::desired::collide(one, &entry);
                    if node.spec.partitions.iter().filter(|one| one.gpu == entry.gpu).all(free) {
                        node.spec.partitions.push(entry);
                    }
                });
            }
            19 => self.wall += 10,
            20 => {
                let name = self.name();
                if let Some(node) = self.world.gpu_nodes.get(&name) {
                    let mut node = GpuNode::clone(node);
                    node.metadata.resource_version = Some(self.next().to_string());
                    self.world.gpu_nodes.watch_deleted(&node);
                } else {
                    let gpus = (0..2).map(|g| testing::gpu(&format!("GPU-{name}-{g}"), g)).collect();
                    let mut node = testing::gpu_node(&name, gpus, Vec::new());
                    node.metadata.resource_version = Some(self.next().to_string());
                    self.world.gpu_nodes.watch_applied(node);
                }
            }
            21 => {
                let all = self.world.classes.iter().map(|class| (**class).clone()).collect();
                if let Some(mut class) = self.pick(all) {
                    class.metadata.resource_version = Some(self.next().to_string());
                    class.metadata.labels = Some([("changed".to_owned(), self.next().to_string())].into());
                    self.world.classes.watch_applied(class);
                }
            }
            // Nothing: what is under way goes on.
            _ => {}
        }
    }
}

/// Everything that a decision says.
fn shown(decision: &Decision) -> String {
    let Decision {
        specs,
        drive,
        ungate,
        quota,
        stranded,
        evictions,
        sentences,
        placeless,
        matches,
        problems,
        planned,
    } = decision;
    let specs: Vec<_> =
        specs.iter().map(|write| (&write.node.metadata, &write.spec, &write.added, &write.removed)).collect();
    let matched = |gpus: &OfNode| -> Vec<(String, Vec<String>)> {
        let names = |found: &crate::controller::matching::Match| {
            found.all().iter().map(|policy| format!("{:?}", (&policy.metadata.name, &policy.spec))).collect()
        };
        gpus.iter().map(|(uuid, found)| (uuid.clone(), names(found))).collect()
    };
    let matches: Vec<_> = matches.iter().map(|(node, gpus)| (node, matched(gpus))).collect();
    format!(
        "{specs:?}\n{drive:?}\n{ungate:?}\n{quota:?}\n{stranded:?}\n{evictions:?}\n{sentences:?}\n{placeless:?}\n\
         {matches:?}\n{problems:?}\n{planned:?}"
    )
}

#[test]
fn what_is_kept_decides_as_what_is_made_anew() {
    let (mut kept, mut settled, mut rooms) = (0, 0, 0);
    for seed in 0..40 {
        let mut story = Story::new(seed);
        let (selectors, began) = (Selectors::default(), Instant::now());
        let (keeps, forgets) = (Memory::default(), Memory::default());
        for round in 0..60 {
            for _ in 0..1 + story.below(2) {
                story.happen();
            }
            let now = began + Duration::from_secs(round);
            let mut known: Vec<Option<Arc<Node>>> = Vec::new();
            known.extend(keeps.views().all().iter().map(|view| view.contents.clone()));
            let decision = decide(&story.world, &keeps, &selectors, now, story.wall);
            (*forgets.views(), *forgets.planner()) = Default::default();
            let anew = decide(&story.world, &forgets, &selectors, now, story.wall);
            let (a, b) = (shown(&decision), shown(&anew));
            if a != b {
                let differ = a.lines().zip(b.lines()).find(|(a, b)| a != b);
                panic!("seed {seed}, round {round}: {differ:?}");
            }
            for (view, before) in keeps.views().all().iter().zip(&known) {
                kept += usize::from(before.is_some() && same(view.contents.as_ref(), before.as_ref()));
                settled += usize::from(view.settled && !view.keys().is_empty());
                rooms += usize::from(view.reserved);
            }
            story.carry_out(&decision);
        }
    }
    // It was worth looking at.
    assert!(kept > 2000 && settled > 150 && rooms > 50, "{kept} {settled} {rooms}");
}

#[test]
fn only_what_has_changed_is_made_again() {
    let mut story = Story::new(1);
    let mut views = Views::of(&story.world);
    let contents = |views: &Views| -> Vec<Arc<Node>> {
        views.all().iter().filter_map(|view| view.contents.clone()).collect()
    };
    let before = contents(&views);
    story.change_node(|_, node| node.spec.partitions.clear());
    let mut policy = PartitionPolicy::clone(story.world.policies.get("all").unwrap());
    policy.status = Some(Default::default());
    policy.metadata.resource_version = Some(story.next().to_string());
    story.world.policies.watch_applied(policy);
    views.refresh(&story.world);
    let after = contents(&views);
    let same = before.iter().zip(&after).filter(|(a, b)| Arc::ptr_eq(a, b)).count();
    assert_eq!((before.len(), after.len(), same), (4, 4, 3));
}

/// Which of two records counts is seen only if both are looked at, also where the pod of one runs.
#[test]
fn a_second_record_of_a_pod_that_runs_is_looked_at_with_the_first() {
    let mut story = Story::new(1);
    let memory = Memory::default();
    story.put(testing::gated_pod("p", "nvidia.com/mig-3g.40gb", json!({})));
    for _ in 0..40 {
        let decision = decide(&story.world, &memory, &Selectors::default(), Instant::now(), WALL);
        story.carry_out(&decision);
        for name in ["n0", "n1", "n2", "n3"] {
            let make = |node: &mut GpuNode| {
                for gpu in &mut node.status.as_mut().unwrap().gpus {
                    let here = node.spec.partitions.iter().filter(|one| one.gpu == gpu.uuid);
                    let wanted = here.filter_map(|one| one.instance.as_ref());
                    gpu.instances =
                        wanted.map(|one| testing::instance(&one.profile, one.placement.start)).collect();
                }
            };
            story.world.replace_gpu_node(make, name);
        }
        // What pods are told is not carried out.
        if let Some(mut pod) = story.some_pod(|pod| pod.node.is_some()) {
            pod.detail.as_mut().unwrap().planned = None;
            story.put(pod);
        }
    }
    let mut views = Views::of(&story.world);
    let keys = placements::all(&story.world);
    assert_eq!(keys.len(), 1);
    assert!(views.to_look_at(&story.world).0.is_empty(), "it runs");
    let key = keys.first().unwrap().clone();
    let entries = placements::devices_of(story.world.gpu_nodes.get(&key.node).unwrap(), &key);
    let other = if key.node == "n0" { "n1" } else { "n0" };
    let add = |node: &mut GpuNode| {
        let gpu = node.status.as_ref().unwrap().gpus[0].uuid.clone();
        let moved = entries.into_iter().map(|entry| Partition { gpu: gpu.clone(), ..entry });
        node.spec.partitions.extend(moved);
    };
    story.world.replace_gpu_node(add, other);
    views.refresh(&story.world);
    assert_eq!(views.to_look_at(&story.world).0, placements::all(&story.world));
    assert_eq!(placements::all(&story.world).len(), 2);
}
