use std::sync::Arc;

use kerf_crds::gpu_node::{
    DesiredGpu, DesiredMig, Geometry, Isolation, Owner, PodReference, Profile, Sharing, WantedInstance,
};
use proptest::prelude::*;

use super::*;
use crate::inventory::{ComputeInstance, Gpu, Instance, MpsState, Process};
use crate::mps::Said;
use crate::prepared::{Prepared, PreparedDevice};

const GIB: u64 = 1 << 30;

fn id(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

fn share(number: u32, gib: u64, percent: u32) -> WantedShare {
    WantedShare {
        id: id(number),
        memory_bytes: gib * GIB,
        compute_milli: percent * 1000,
        isolation: Isolation::Process,
    }
}

fn entry() -> DesiredGpu {
    DesiredGpu {
        uuid: "GPU-1".into(),
        policy: "p".into(),
        mig: DesiredMig::Keep,
        allow_reset: false,
        unhealthy_effect: Default::default(),
        max_concurrent_gpus: 16,
    }
}

/// Where the instance is that carries shares.
const PLACE: Placement = Placement { start: 4, size: 4 };

const PROFILE: &str = "3g.40gb";

/// The instance, of 42 of the GPU's 98 multiprocessors.
fn instance() -> Instance {
    Instance {
        profile: PROFILE.into(),
        profile_id: 9,
        placement: PLACE,
        gpu_instance_id: 2,
        compute_instances: vec![ComputeInstance { id: 0, full_width: true, uuid: "MIG-1".into() }],
        ..Instance::default()
    }
}

/// A GPU, and what carries its shares or those of an instance of it, as the steps change it.
#[derive(Clone, Debug)]
struct World {
    gpu: Gpu,
    /// Of the carrier.
    placement: Option<Placement>,
    prepared: PreparedClaims,
    protocol: Protocol,
    pod: Option<ServerPod>,
    config: Option<String>,
    mps: Seen,
    before: Option<ComputeMode>,
    hangs: u32,
    outlived: bool,
    pods_made: u32,
}

impl World {
    /// Whose shares are of an instance.
    fn of_instance(protocol: Protocol) -> Self {
        let mut world = Self::new(protocol);
        world.gpu.mig.enabled = true;
        let profile = Profile {
            name: PROFILE.into(),
            id: 9,
            memory_bytes: 40 * GIB,
            multiprocessors: 42,
            ..Profile::default()
        };
        let geometry = Geometry { multiprocessors: 98, profiles: vec![profile], ..Geometry::default() };
        world.gpu.geometry = Some(Arc::new(geometry));
        world.gpu.instances = vec![instance()];
        world.placement = Some(PLACE);
        world
    }

    /// One whose shares are of the GPU, and one of an instance.
    fn both(protocol: Protocol) -> [Self; 2] {
        [Self::new(protocol), Self::of_instance(protocol)]
    }

    fn new(protocol: Protocol) -> Self {
        let sharing =
            Sharing { isolation: Isolation::Driver, max_clients: 48, equal_sizes: protocol == Protocol::V2 };
        let gpu = Gpu {
            name: "gpu-1".into(),
            uuid: "GPU-1".into(),
            memory_bytes: 80 * GIB,
            compute_mode: Some(ComputeMode::DEFAULT),
            sharing: Some(sharing),
            ..Gpu::default()
        };
        Self {
            gpu,
            placement: None,
            prepared: PreparedClaims::new(),
            protocol,
            pod: None,
            config: None,
            mps: Seen::default(),
            before: None,
            hangs: 0,
            outlived: false,
            pods_made: 0,
        }
    }

    fn due(&self, shares: &[WantedShare]) -> Due {
        let entry = entry();
        let partitions: Vec<Partition> = shares.iter().map(|share| self.partition(share)).collect();
        due(Desired { gpu: Some(&entry), partitions: &partitions }, self.observed())
    }

    fn partition(&self, share: &WantedShare) -> Partition {
        let owner = ClaimOwner {
            namespace: "ns".into(),
            name: share.id.clone(),
            pod: "pod".into(),
            pod_uid: share.id.clone(),
            request: "r".into(),
        };
        let instance = self.placement.map(|placement| WantedInstance { profile: PROFILE.into(), placement });
        Partition { gpu: "GPU-1".into(), instance, share: Some(share.clone()), owner: Owner::Claim(owner) }
    }

    fn carrier(&self) -> Carrier<'_> {
        Carrier { gpu: &self.gpu, placement: self.placement }
    }

    /// What NVML shows of it.
    fn on_it(&mut self) -> (&mut Vec<Process>, &mut MpsState) {
        match self.placement.map(|placement| self.gpu.instance_at(placement).is_some()) {
            Some(true) => {
                let instance = self.gpu.instances.iter_mut().find(|one| one.placement == PLACE).unwrap();
                (&mut instance.processes, &mut instance.mps)
            }
            _ => (&mut self.gpu.processes, &mut self.gpu.mps),
        }
    }

    /// Nobody gets past the server; inside an instance nobody sees to that.
    fn is_taken(&self) -> bool {
        self.placement.is_some() || self.gpu.compute_mode == Some(ComputeMode::EXCLUSIVE_PROCESS)
    }

    fn observed(&self) -> Observed<'_> {
        Observed {
            carrier: self.carrier(),
            prepared: &self.prepared,
            protocol: self.protocol,
            pod: self.pod.as_ref(),
            config: self.config.as_deref(),
            mps: &self.mps,
            // Forgotten where somebody else has set another mode since.
            before: self.before.filter(|_| self.gpu.compute_mode == Some(ComputeMode::EXCLUSIVE_PROCESS)),
            hangs: self.hangs,
            outlived: self.outlived,
        }
    }

    fn apply(&mut self, step: &Step) {
        let said =
            |limits: &Limits| Said { memory: limits.memory_text(), percent: limits.percent.to_string() };
        match step {
            Step::TakeComputeMode => {
                assert!(self.placement.is_none() && !self.gpu.mig.enabled);
                self.before = self.before.or(self.gpu.compute_mode);
                self.gpu.compute_mode = Some(ComputeMode::EXCLUSIVE_PROCESS);
            }
            Step::RestoreComputeMode(mode) => {
                self.gpu.compute_mode = Some(*mode);
                self.before = None;
            }
            Step::WriteConfig(text) => self.config = Some(text.clone()),
            Step::CreatePod { form, device } => {
                assert!(self.pod.is_none() && self.is_taken());
                assert_eq!(self.carrier().present().expect("it is there").uuid, device);
                self.pods_made += 1;
                let uid = self.pods_made.to_string();
                self.pod = Some(ServerPod {
                    name: "mps".into(),
                    uid,
                    form: form.to_string(),
                    device: device.clone(),
                    ..ServerPod::default()
                });
                // A control daemon that begins with a file has everything that is in it.
                let mps = match form {
                    Form::V2(limits) => {
                        Seen { limits: BTreeMap::from([(ALL.into(), said(limits))]), ..Seen::default() }
                    }
                    Form::V3 => self.begin(),
                };
                let sockets = mps.limits.keys().cloned().collect();
                self.mps = Seen { sockets, ..mps };
            }
            Step::DeletePod(_) | Step::ReplacePod(_) => (self.pod, self.mps) = (None, Seen::default()),
            Step::CreateServer { .. } => self.mps.server = Server::Ready,
            Step::DeleteServer => self.mps = Seen::default(),
            Step::CreateNamespace(name, limits) | Step::SetNamespace(name, limits) => {
                self.mps.limits.insert(name.clone(), said(limits));
                self.mps.sockets.insert(name.clone());
            }
            Step::DeleteNamespace(name) => {
                assert!(!self.mps.clients.contains_key(name));
                self.mps.limits.remove(name);
                self.mps.sockets.remove(name);
            }
        }
    }

    fn begin(&self) -> Seen {
        let mut seen = Seen { server: Server::Ready, ..Seen::default() };
        let text = self.config.as_deref().unwrap_or_default();
        let value = |line: &str| line.split('"').nth(1).unwrap_or_default().to_owned();
        let mut name = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("[servers.kerf.namespaces.") {
                name = rest.trim_end_matches(']').into();
                seen.limits.insert(name.clone(), Said::default());
            } else if let Some(said) = seen.limits.get_mut(&name) {
                if line.starts_with("pinned") {
                    said.memory = value(line);
                } else if line.starts_with("active") {
                    said.percent = value(line);
                }
            }
        }
        seen
    }

    /// Takes steps until none is left; how many.
    fn settle(&mut self, shares: &[WantedShare]) -> usize {
        for count in 0..200 {
            let Some(step) = self.due(shares).steps.into_iter().next() else { return count };
            self.apply(&step);
        }
        panic!("no end of steps: {:?}", self.due(shares));
    }

    /// Only the file is written.
    fn apply_config(&mut self, shares: &[WantedShare]) {
        while let Some(step @ Step::WriteConfig(_)) = next_step_of(self, shares) {
            self.apply(&step);
        }
    }

    /// A claim of the share, and a process in it.
    fn use_share(&mut self, share: &WantedShare, with_process: bool) {
        let device = PreparedDevice {
            request: "r".into(),
            device: "d".into(),
            key: self.carrier().key().with_share(&share.id),
            uuid: self.carrier().present().map(|present| present.uuid.to_owned()).unwrap_or_default(),
            cdi: vec![],
            share: Some(share.clone()),
        };
        let claim = ClaimReference { namespace: "ns".into(), name: share.id.clone(), uid: share.id.clone() };
        let pod = PodReference { uid: share.id.clone(), ..PodReference::default() };
        let record = Prepared { claim, pod: Some(pod), devices: vec![device] };
        self.prepared.insert(share.id.clone(), record);
        if with_process {
            let name = namespace_of(self.protocol, &share.id);
            self.mps.clients.entry(name).or_default().push(77);
            let pod_uid = Some(share.id.clone());
            self.on_it().1.clients.push(Process { pid: 77, comm: "train".into(), pod_uid });
        }
    }

    fn release(&mut self) {
        self.prepared.clear();
        self.mps.clients.clear();
        self.on_it().1.clients.clear();
    }

    fn in_force(&self, shares: &[WantedShare]) -> Vec<String> {
        let due = self.due(shares);
        due.shares.into_iter().filter(|share| share.problem.is_none()).map(|share| share.id).collect()
    }

    fn problem(&self, shares: &[WantedShare], id: &str) -> String {
        let due = self.due(shares);
        let share = due.shares.into_iter().find(|share| share.id == id).expect("reported");
        share.problem.map(|why| why.reason).unwrap_or_default()
    }
}

#[test]
fn shares_come_and_go_step_by_step() {
    let mut world = World::new(Protocol::V3);
    let (a, b) = (share(1, 10, 10), share(2, 15, 20));
    let one = [a.clone()];
    let mut seen = Vec::new();
    while let Some(step) = world.due(&one).steps.into_iter().next() {
        assert_eq!(world.in_force(&one).len(), 0, "before {step}");
        world.apply(&step);
        seen.push(step.to_string());
    }
    assert_eq!(
        seen,
        [
            "set compute mode EXCLUSIVE_PROCESS",
            "write the configuration of the MPS server",
            "make the pod of the MPS server (protocol 3)"
        ]
    );
    let report = world.due(&one).shares.remove(0);
    assert_eq!((report.memory_bytes, report.compute_percent), (10 * GIB, 10));
    assert_eq!((report.isolation, report.problem), (Isolation::Driver, None));
    // Another one comes beside it, in the server that runs; the file comes first.
    let both = [a.clone(), b.clone()];
    assert!(matches!(world.due(&both).steps[..], [Step::WriteConfig(_)]));
    assert_eq!(world.settle(&both), 2);
    assert_eq!(world.in_force(&both), [id(1), id(2)]);
    world.use_share(&b, true);
    assert_eq!(world.settle(&[]), 2, "the file, and the first one's namespace");
    assert_eq!(world.in_force(&[]), [id(2)], "in use");
    assert_eq!(world.due(&[]).blocked.unwrap().reason, problem_reason::IN_USE);
    world.release();
    assert_eq!(world.settle(&[]), 2);
    assert_eq!((world.gpu.compute_mode, &world.pod), (Some(ComputeMode::DEFAULT), &None));
    assert_eq!(world.pods_made, 1);
    assert!(!world.due(&[]).carries);
}

#[test]
fn shares_of_an_instance_come_and_go_and_its_gpu_keeps_its_compute_mode() {
    let mut world = World::of_instance(Protocol::V3);
    let wanted = [share(1, 10, 10), share(2, 20, 30)];
    let mut seen = Vec::new();
    while let Some(step) = next_step_of(&world, &wanted) {
        world.apply(&step);
        seen.push(step.to_string());
    }
    assert_eq!(
        seen,
        ["write the configuration of the MPS server", "make the pod of the MPS server (protocol 3)"]
    );
    assert!(world.config.as_ref().unwrap().contains("allowed_devices = \"MIG-1\""));
    let reports = world.due(&wanted).shares;
    assert!(reports.iter().all(|share| share.problem.is_none()), "{reports:?}");
    // 10 and 30 % of the GPU's 98 multiprocessors are 23.3 and 70 % of the instance's 42.
    assert_eq!(reports.iter().map(|share| share.compute_percent).collect::<Vec<_>>(), [24, 70]);
    for report in reports {
        assert_eq!((report.placement, report.isolation), (Some(PLACE), Isolation::Process));
    }
    world.use_share(&wanted[1], true);
    let due = world.due(&wanted);
    assert_eq!((due.shares[0].processes, due.shares[1].processes), (0, 1));
    world.settle(&[]);
    assert_eq!(world.in_force(&[]), [id(2)], "in use");
    assert_eq!(world.due(&[]).blocked.unwrap().reason, problem_reason::IN_USE);
    world.release();
    assert_eq!(world.settle(&[]), 1, "the pod");
    assert_eq!((&world.pod, world.gpu.compute_mode), (&None, Some(ComputeMode::DEFAULT)));
    assert!(!world.due(&[]).carries);
}

#[test]
fn a_share_of_an_instance_waits_for_it_and_fits_into_it() {
    type Change = fn(&mut World, &mut WantedShare);
    let cases: [(&str, Change); 8] = [
        (problem_reason::MPS_NOT_READY, |world, _| world.gpu.instances.clear()),
        (problem_reason::MPS_NOT_READY, |world, _| world.gpu.instances[0].compute_instances.clear()),
        (problem_reason::MPS_NOT_READY, |world, _| world.gpu.instances[0].profile = "4g.40gb".into()),
        (problem_reason::MIG_OFF, |world, _| {
            world.gpu.mig.enabled = false;
            world.gpu.instances.clear();
        }),
        (problem_reason::BAD_SHARE, |_, share| share.memory_bytes = 41 * GIB),
        (problem_reason::BAD_SHARE, |_, share| share.compute_milli = 43_001),
        (problem_reason::ISOLATION_UNAVAILABLE, |_, share| share.isolation = Isolation::Driver),
        ("Xid95", |world, _| {
            world.gpu.instances[0].unhealthy =
                Some(Reason { reason: "Xid95".into(), message: String::new() });
        }),
    ];
    for (reason, change) in cases {
        let (mut world, mut wanted) = (World::of_instance(Protocol::V3), share(1, 40, 43));
        let good = wanted.clone();
        change(&mut world, &mut wanted);
        assert_eq!(world.problem(std::slice::from_ref(&wanted), &id(1)), reason, "{wanted:?}");
        assert_eq!(world.due(&[wanted]).steps, [], "no server before there is what it serves");
        let mut world = World::of_instance(Protocol::V3);
        world.settle(std::slice::from_ref(&good));
        assert_eq!(world.due(&[good]).shares[0].compute_percent, 100);
    }
}

#[test]
fn what_a_claim_has_all_of_carries_no_shares() {
    for mut world in World::both(Protocol::V3) {
        let shares = [share(1, 5, 5)];
        let whole = Partition { share: None, ..world.partition(&share(9, 1, 1)) };
        let with_whole = |world: &World| {
            let partitions = [world.partition(&shares[0]), whole.clone()];
            due(Desired { gpu: Some(&entry()), partitions: &partitions }, world.observed())
        };
        let found = with_whole(&world);
        assert_eq!(found.shares[0].problem.as_ref().unwrap().reason, problem_reason::OVERLAP);
        assert!(found.steps.is_empty() && !found.carries);
        // What nobody has yet gives way; what somebody has stays, and the other claim waits.
        world.settle(&shares);
        assert!(matches!(with_whole(&world).steps[..], [Step::DeletePod(_)]));
        world.use_share(&shares[0], false);
        let found = with_whole(&world);
        assert_eq!((found.steps, &found.shares[0].problem), (vec![], &None));
        // A claim that has all of it is not disturbed.
        world.release();
        world.settle(&[]);
        world.use_share(&shares[0], false);
        let all = world.carrier().key();
        let device = &mut world.prepared.values_mut().next().unwrap().devices[0];
        (device.key, device.share) = (all, None);
        let due = world.due(&shares);
        assert!(due.steps.is_empty() && due.blocked.unwrap().reason == problem_reason::IN_USE);
    }
}

#[test]
fn an_instance_that_is_made_again_gets_another_server() {
    for protocol in [Protocol::V2, Protocol::V3] {
        let shares = [share(1, 10, 10)];
        let mut world = World::of_instance(protocol);
        world.settle(&shares);
        world.use_share(&shares[0], false);
        // Booted: its server was started anew, and finds nothing.
        world.gpu.instances.clear();
        world.mps = Seen::default();
        let step = next_step_of(&world, &shares).expect("it will not find what comes later");
        assert!(matches!(step, Step::ReplacePod(_)), "{step}");
        assert!(step.users()(&world.prepared, &world.carrier().key()).is_empty(), "whatever is prepared");
        world.apply(&step);
        let due = world.due(&shares);
        assert!(due.steps.is_empty() && due.waits && due.carries);
        assert_eq!(world.problem(&shares, &id(1)), problem_reason::MPS_NOT_READY);
        world.gpu.instances = vec![instance()];
        world.gpu.instances[0].compute_instances[0].uuid = "MIG-2".into();
        world.settle(&shares);
        assert_eq!((world.in_force(&shares), world.pods_made), (vec![id(1)], 2));
        // Under another UUID before anybody looked: what it served is not there any more.
        world.gpu.instances[0].compute_instances[0].uuid = "MIG-3".into();
        world.mps.clients.insert("other".into(), vec![9]);
        world.apply_config(&shares);
        assert!(world.due(&shares).blocked.unwrap().message.contains("pid 9"), "a client that lives");
        world.mps.clients.clear();
        assert!(matches!(next_step_of(&world, &shares), Some(Step::ReplacePod(_))));
        world.settle(&shares);
        assert_eq!((world.in_force(&shares), world.pods_made), (vec![id(1)], 3));
        assert_eq!(world.pod.as_ref().unwrap().device, "MIG-3");
    }
}

#[test]
fn what_carried_shares_goes_when_its_place_has_gone_or_the_mode_has_changed() {
    for mut world in World::both(Protocol::V3) {
        let shares = [share(1, 10, 10)];
        world.settle(&shares);
        world.gpu.mig.enabled = !world.gpu.mig.enabled;
        world.gpu.instances.clear();
        assert_eq!(world.settle(&shares), 1, "the pod; the other mode has no compute mode of Kerf's");
        assert!(world.pod.is_none() && !world.due(&shares).carries);
    }
}

#[test]
fn a_gpus_places_are_those_that_are_wanted_held_or_served() {
    let world = World::of_instance(Protocol::V3);
    let at = |start| Placement { start, size: 1 };
    let wanted = Partition {
        instance: Some(WantedInstance { profile: "1g.10gb".into(), placement: at(0) }),
        ..world.partition(&share(1, 1, 1))
    };
    let whole = Partition { share: None, ..world.partition(&share(2, 1, 1)) };
    let elsewhere = Partition { gpu: "GPU-2".into(), ..world.partition(&share(3, 1, 1)) };
    let mut held = World::of_instance(Protocol::V3);
    held.use_share(&share(4, 1, 1), false);
    held.prepared.values_mut().next().unwrap().devices[0].key.placement = Some(at(1));
    let pods = Pods::from([
        (DeviceKey::instance("GPU-1", at(2)), ServerPod::default()),
        (DeviceKey::instance("GPU-2", at(3)), ServerPod::default()),
    ]);
    let found = places("GPU-1", &[wanted, whole, elsewhere], &held.prepared, &pods);
    assert_eq!(found, BTreeSet::from([None, Some(at(0)), Some(at(1)), Some(at(2))]));
}

#[test]
fn one_size_is_carried_before_protocol_3_and_another_when_nobody_uses_it() {
    let mut world = World::new(Protocol::V2);
    let (a, b, other) = (share(1, 10, 25), share(2, 10, 25), share(3, 20, 50));
    world.settle(&[a.clone(), b.clone(), other.clone()]);
    assert_eq!(world.in_force(&[a.clone(), b.clone(), other.clone()]), [id(1), id(2)]);
    assert_eq!(world.problem(&[a.clone(), other.clone()], &id(3)), problem_reason::SIZES_DIFFER);
    world.use_share(&b, true);
    assert_eq!(world.due(std::slice::from_ref(&b)).shares[0].processes, 1);
    // The one in use sets the size.
    assert_eq!(world.problem(std::slice::from_ref(&other), &id(3)), problem_reason::SIZES_DIFFER);
    world.release();
    world.settle(std::slice::from_ref(&other));
    assert_eq!((world.in_force(std::slice::from_ref(&other)), world.pods_made), (vec![id(3)], 2));
}

#[test]
fn what_can_be_no_share_is_named() {
    let mut world = World::new(Protocol::V3);
    world.gpu.sharing.as_mut().unwrap().isolation = Isolation::Process;
    let good = share(1, 40, 30);
    let wrong = |change: fn(&mut WantedShare)| {
        let mut share = share(2, 40, 30);
        change(&mut share);
        share
    };
    for (reason, other) in [
        (problem_reason::BAD_SHARE, wrong(|share| share.id = "../x".into())),
        (problem_reason::BAD_SHARE, wrong(|share| share.memory_bytes = 0)),
        (problem_reason::BAD_SHARE, wrong(|share| share.memory_bytes = 81 * GIB)),
        (problem_reason::BAD_SHARE, wrong(|share| share.compute_milli = 0)),
        (problem_reason::BAD_SHARE, wrong(|share| share.compute_milli = 100_001)),
        (problem_reason::ISOLATION_UNAVAILABLE, wrong(|share| share.isolation = Isolation::Driver)),
        (problem_reason::OVERLAP, wrong(|share| share.memory_bytes = 41 * GIB)),
    ] {
        let shares = [good.clone(), other.clone()];
        world.settle(&shares);
        assert_eq!(world.problem(&shares, &other.id), reason, "{other:?}");
        assert_eq!(world.in_force(&shares), [id(1)], "its neighbour is carried all the same");
    }
    let entry = world.partition(&good);
    let found = due(Desired { gpu: None, partitions: &[entry] }, world.observed());
    assert_eq!(found.shares[0].problem.as_ref().unwrap().reason, problem_reason::GPU_NOT_LISTED);
    world.gpu.sharing = None;
    assert_eq!(world.problem(std::slice::from_ref(&good), &id(1)), problem_reason::SHARING_UNAVAILABLE);
    world = World::new(Protocol::V3);
    world.gpu.mig.enabled = true;
    assert_eq!(world.problem(std::slice::from_ref(&good), &id(1)), problem_reason::MIG_ON);
    assert!(!world.due(&[good]).carries, "switching MIG off comes first");
}

#[test]
fn a_gpu_in_use_is_waited_for_before_its_mode_changes() {
    let mut world = World::new(Protocol::V3);
    world.gpu.processes = vec![Process { pid: 7, comm: "train".into(), pod_uid: None }];
    let due = world.due(&[share(1, 10, 10)]);
    assert!(due.steps.is_empty());
    assert!(due.blocked.unwrap().message.contains("train (pid 7)"));
}

#[test]
fn prepared_claims_get_another_pod_when_the_driver_speaks_another_protocol() {
    for (before, after) in [(Protocol::V2, Protocol::V3), (Protocol::V3, Protocol::V2)] {
        let a = share(1, 10, 10);
        let shares = [a.clone()];
        let mut world = World::new(before);
        world.settle(&shares);
        world.use_share(&a, false);
        // The pod's control daemon is talked to in words that it does not have.
        world.protocol = after;
        world.mps = Seen { server: Server::Silent("no answer".into()), ..Seen::default() };
        world.on_it().1.clients = vec![Process { pid: 7, ..Process::default() }];
        world.apply_config(&shares);
        assert!(world.due(&shares).blocked.unwrap().message.contains("pid 7"), "a client that lives");
        world.on_it().1.clients.clear();
        let step = next_step_of(&world, &shares).unwrap();
        assert!(
            matches!(step, Step::ReplacePod(_))
                && step.users()(&world.prepared, &DeviceKey::gpu("GPU-1")).is_empty()
        );
        world.settle(&shares);
        assert_eq!(world.in_force(&shares), [id(1)], "{after:?}");
    }
    // What the pod does carry keeps it.
    let (small, large) = (share(1, 10, 25), share(2, 20, 50));
    let mut world = World::new(Protocol::V2);
    world.settle(std::slice::from_ref(&large));
    world.use_share(&small, false);
    world.use_share(&large, false);
    assert!(world.due(&[]).blocked.unwrap().message.contains(&large.id));
    world.prepared.remove(&large.id);
    world.settle(&[]);
    assert_eq!(world.in_force(&[]), [id(1)]);
}

#[test]
fn a_prepared_share_without_its_isolation_stays_where_it_is_and_has_a_problem() {
    let a = WantedShare { isolation: Isolation::Driver, ..share(1, 10, 10) };
    let mut world = World::new(Protocol::V3);
    world.settle(std::slice::from_ref(&a));
    world.use_share(&a, false);
    assert_eq!(world.in_force(&[]), [id(1)]);
    world.gpu.sharing.as_mut().unwrap().isolation = Isolation::Process;
    assert_eq!(world.problem(&[], &id(1)), problem_reason::ISOLATION_UNAVAILABLE);
    assert_eq!(world.due(&[]).steps, []);
}

#[test]
fn the_compute_mode_is_not_put_back_under_a_claim() {
    let mut world = World::new(Protocol::V3);
    world.settle(&[share(1, 10, 10)]);
    let step = next_step_of(&world, &[]).expect("the pod goes");
    world.apply(&step);
    world.use_share(&share(1, 10, 10), false);
    let device = &mut world.prepared.values_mut().next().unwrap().devices[0];
    (device.key, device.share) = (DeviceKey::gpu("GPU-1"), None);
    let due = world.due(&[]);
    assert!(due.steps.is_empty() && due.waits);
    assert_eq!(due.blocked.unwrap().reason, problem_reason::IN_USE);
    world.release();
    assert_eq!(next_step_of(&world, &[]), Some(Step::RestoreComputeMode(ComputeMode::DEFAULT)));
}

#[test]
fn a_gpu_that_is_somebody_elses_or_has_failed_keeps_what_is_used_and_nothing_else() {
    let shares = [share(1, 10, 10)];
    let why = || Some(Reason { reason: "Why".into(), message: String::new() });
    for (unmanaged, unhealthy) in [(why(), None), (None, why())] {
        let mut world = World::new(Protocol::V3);
        world.settle(&shares);
        world.use_share(&shares[0], true);
        (world.gpu.unmanaged, world.gpu.unhealthy) = (unmanaged, unhealthy);
        assert_eq!((world.due(&shares).steps, world.problem(&shares, &id(1)).as_str()), (vec![], "Why"));
        // A client stays also when nothing is prepared for it any more.
        world.prepared.clear();
        assert_eq!(world.due(&shares).steps, []);
        world.release();
        assert_eq!(world.settle(&shares), 2, "the pod, and the compute mode");
        assert_eq!((world.gpu.compute_mode, &world.pod), (Some(ComputeMode::DEFAULT), &None));
        assert_eq!(world.problem(&shares, &id(1)), "Why");
    }
}

#[test]
fn a_server_that_hangs_is_replaced_after_a_while_whoever_is_in_it() {
    let shares = [share(1, 10, 10)];
    for protocol in [Protocol::V2, Protocol::V3] {
        let mut world = World::new(protocol);
        world.settle(&shares);
        world.use_share(&shares[0], true);
        world.mps = Seen { server: Server::Hangs("no answer".into()), ..Seen::default() };
        for hangs in 1..HANGS {
            world.hangs = hangs;
            let due = world.due(&shares);
            assert!(due.steps.is_empty() && due.waits);
            assert_eq!(due.blocked.unwrap().reason, problem_reason::MPS_HANGS);
            assert_eq!(
                world.problem(&shares, &id(1)),
                problem_reason::MPS_HANGS,
                "nobody can say what holds"
            );
        }
        world.hangs = HANGS;
        let step = next_step_of(&world, &shares).unwrap();
        assert!(matches!(step, Step::ReplacePod(_)), "{step}");
        assert!(step.users()(&world.prepared, &DeviceKey::gpu("GPU-1")).is_empty(), "also while prepared");
        world.apply(&step);
        world.hangs = 0;
        world.on_it().1.clients.clear();
        world.settle(&shares);
        assert_eq!((world.in_force(&shares), world.pods_made), (vec![id(1)], 2));
    }
}

#[test]
fn a_server_that_comes_late_does_not_stay_beside_whoever_has_all_of_its_carrier() {
    let shares = [share(1, 10, 10)];
    let mut world = World::new(Protocol::V3);
    world.settle(&shares);
    world.use_share(&share(2, 10, 10), false);
    let record = world.prepared.values_mut().next().unwrap();
    (record.devices[0].key, record.devices[0].share) = (DeviceKey::gpu("GPU-1"), None);
    let step = next_step_of(&world, &[]).unwrap();
    assert!(matches!(step, Step::DeletePod(_)), "{step}");
    assert!(step.users()(&world.prepared, &DeviceKey::gpu("GPU-1")).is_empty());
    world.apply(&step);
    assert_eq!(world.due(&[]).steps, [], "the compute mode is that claim's meanwhile");
    let making = next_step_of(&World { before: None, ..world.clone() }, &shares);
    assert!(making.is_none_or(|step| !matches!(step, Step::CreatePod { .. })));
}

#[test]
fn who_comes_to_a_server_of_a_driver_that_has_gone_does_not_keep_it() {
    let shares = [share(1, 10, 10)];
    let mut world = World::new(Protocol::V2);
    world.settle(&shares);
    world.use_share(&shares[0], true);
    world.protocol = Protocol::V3;
    let file = next_step_of(&world, &shares).unwrap();
    assert!(matches!(file, Step::WriteConfig(_)), "{file}");
    world.apply(&file);
    // Nobody has seen the driver go, so the client may have run for long.
    let due = world.due(&shares);
    assert_eq!(due.steps, []);
    assert!(due.blocked.unwrap().message.contains("for protocol 2"));
    world.outlived = true;
    let step = next_step_of(&world, &shares).unwrap();
    assert!(matches!(step, Step::ReplacePod(_)), "{step}");
    world.apply(&step);
    (world.outlived, world.gpu.mps.clients) = (false, Vec::new());
    world.settle(&shares);
    assert_eq!(world.in_force(&shares), [id(1)]);
    // Another size with the same driver is no reason to end anybody.
    let mut world = World::new(Protocol::V2);
    world.settle(&shares);
    world.use_share(&shares[0], true);
    world.outlived = true;
    world.prepared.clear();
    assert_eq!(world.due(&[share(2, 20, 10)]).steps, []);
}

#[test]
fn a_process_of_a_pod_with_a_share_keeps_no_server_away() {
    let a = share(1, 10, 10);
    let shares = [a.clone()];
    let mut world = World::new(Protocol::V3);
    world.use_share(&a, false);
    let of_pod = |uid: &str| Process { pid: 7, comm: "train".into(), pod_uid: Some(uid.into()) };
    world.gpu.processes = vec![of_pod("another")];
    assert!(world.due(&shares).blocked.is_some());
    world.gpu.processes = vec![of_pod(&a.id)];
    world.settle(&shares);
    assert_eq!(world.in_force(&shares), [id(1)]);
}

#[test]
fn servers_that_end_are_made_again_whatever_is_prepared() {
    let a = share(1, 10, 10);
    let shares = [a.clone()];
    let mut world = World::new(Protocol::V3);
    world.settle(&shares);
    world.use_share(&a, false);
    world.mps.server = Server::Exited;
    assert_eq!(world.problem(&shares, &id(1)), problem_reason::MPS_NOT_READY);
    assert!(matches!(next_step_of(&world, &shares), Some(Step::ReplacePod(_))), "with limits from the start");
    world.settle(&shares);
    assert_eq!((world.in_force(&shares), world.pods_made), (vec![id(1)], 2));
    // A namespace that is lost is not made again beside clients, who would lose their server.
    world.mps.limits.clear();
    world.mps.clients.insert("other".into(), vec![9]);
    let due = world.due(&shares);
    assert!(due.steps.is_empty() && due.blocked.unwrap().message.contains("pid 9"));
    world.mps.clients.clear();
    assert!(matches!(next_step_of(&world, &shares), Some(Step::ReplacePod(_))));
    world.settle(&shares);
    assert_eq!((world.in_force(&shares), world.pods_made), (vec![id(1)], 3));
    world.pod.as_mut().unwrap().ended = true;
    let step = world.due(&shares).steps.remove(0);
    assert!(matches!(&step, Step::DeletePod(_)) && step.disturbs(&DeviceKey::gpu("GPU-1")).is_none());
    world.settle(&shares);
    assert_eq!((world.in_force(&shares), world.pods_made), (vec![id(1)], 4));
    world.prepared.clear();
    world.mps.server = Server::Exited;
    assert_eq!(world.settle(&shares), 3, "deleted, made, and its namespace");
    world.use_share(&a, false);
    world.mps.server = Server::Silent("no answer".into());
    let due = world.due(&shares);
    assert!(due.steps.is_empty() && due.waits && due.shares[0].problem.is_some());
    // What was the GPU's mode before is not what its mode is now.
    world.gpu.compute_mode = Some(ComputeMode::DEFAULT);
    assert_eq!(
        next_step_of(&world, &shares),
        Some(Step::TakeComputeMode),
        "after the driver was loaded anew"
    );
}

fn next_step_of(world: &World, shares: &[WantedShare]) -> Option<Step> {
    world.due(shares).steps.into_iter().next()
}

#[test]
fn a_namespace_that_says_something_else_is_not_in_force() {
    let shares = [share(1, 10, 10)];
    let mut world = World::new(Protocol::V3);
    world.settle(&shares);
    world.mps.sockets.clear();
    assert_eq!(world.problem(&shares, &id(1)), problem_reason::LIMITS_NOT_IN_FORCE);
    assert!(world.due(&shares).waits && world.due(&shares).steps.is_empty());
    world.mps.sockets.insert(namespace(&id(1)));
    world.mps.limits.get_mut(&namespace(&id(1))).unwrap().percent = "100".into();
    assert_eq!(world.problem(&shares, &id(1)), problem_reason::LIMITS_NOT_IN_FORCE);
    assert!(matches!(next_step_of(&world, &shares), Some(Step::SetNamespace(..))));
    world.settle(&shares);
    assert_eq!(world.in_force(&shares), [id(1)]);
}

/// Where a world may be found, whatever led there.
fn worlds() -> impl Strategy<Value = World> {
    let server = prop_oneof![
        Just(Server::Absent),
        Just(Server::Starting),
        Just(Server::Ready),
        Just(Server::Fault),
        Just(Server::Exited),
        Just(Server::Silent("why".into())),
        Just(Server::Hangs("why".into())),
    ];
    (
        any::<(bool, bool)>(),
        0u32..4,
        prop::bool::ANY,
        prop::bool::ANY,
        server,
        prop::collection::vec((1u32..6, any::<bool>()), 0..4),
    )
        .prop_map(|((v3, of_instance), mode, has_pod, other_form, server, held)| {
            let protocol = if v3 { Protocol::V3 } else { Protocol::V2 };
            let mut world = World::both(protocol)[usize::from(of_instance)].clone();
            // One size, so that protocol 2 can have prepared them together.
            let shares: Vec<(WantedShare, bool)> =
                held.into_iter().map(|(number, process)| (share(number, 5, 10), process)).collect();
            let wanted: Vec<WantedShare> = shares.iter().map(|(share, _)| share.clone()).collect();
            if has_pod || !shares.is_empty() {
                world.settle(if wanted.is_empty() { &[] } else { &wanted });
            }
            if let Some(pod) = world.pod.as_mut() {
                if other_form {
                    pod.form = "another".into();
                }
                world.hangs = if matches!(server, Server::Hangs(_)) { mode } else { 0 };
                world.outlived = mode == 3;
                // Protocol 2 lists no server that has ended.
                world.mps.server = if v3 || server != Server::Exited { server } else { Server::Absent };
            }
            for (share, process) in shares {
                world.use_share(&share, process && world.pod.is_some());
            }
            match (of_instance, mode) {
                (false, 1) => world.gpu.compute_mode = Some(ComputeMode::DEFAULT),
                (true, 1) => world.gpu.instances.clear(),
                (true, 2) => world.gpu.instances[0].compute_instances[0].uuid = "MIG-2".into(),
                (true, 3) => world.gpu.instances[0].compute_instances.clear(),
                _ => {}
            }
            world
        })
}

fn wishes() -> impl Strategy<Value = Vec<WantedShare>> {
    let size = prop_oneof![Just((5, 10)), Just((5, 10)), Just((20, 30)), Just((90, 30)), Just((5, 101))];
    prop::collection::btree_map(1u32..8, size, 0..6).prop_map(|shares| {
        shares.into_iter().map(|(number, (gib, percent))| share(number, gib, percent)).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn nothing_in_use_is_taken_down(world in worlds(), wishes in wishes()) {
        for step in world.due(&wishes).steps {
            let held: Vec<String> =
                world.prepared.values().flat_map(|p| &p.devices).filter_map(|d| d.key.share.clone()).collect();
            match &step {
                Step::CreateNamespace(name, _) => prop_assert!(held.iter().all(|id| namespace(id) != *name)),
                Step::DeletePod(pod) => prop_assert!(pod.ended || held.is_empty() && world.mps.clients.is_empty()),
                Step::ReplacePod(pod) => {
                    let ended = matches!(world.mps.server, Server::Absent | Server::Exited) || world.hangs >= HANGS;
                    let outlived = world.outlived && pod.form == "another";
                    prop_assert!(ended || outlived || world.mps.clients.is_empty());
                    let lost = held.iter().any(|id| !world.mps.limits.contains_key(&namespace(id)));
                    let other = pod.form == "another" || world.carrier().present().is_none_or(|now| now.uuid != pod.device);
                    prop_assert!(held.is_empty() || ended || lost || other);
                }
                Step::TakeComputeMode => prop_assert!(world.placement.is_none()),
                Step::RestoreComputeMode(_) => {
                    prop_assert!(held.is_empty() && world.pod.is_none() && world.placement.is_none());
                }
                Step::DeleteNamespace(name) => {
                    prop_assert!(held.iter().all(|id| namespace(id) != *name) && !world.mps.clients.contains_key(name));
                }
                Step::DeleteServer => prop_assert!(world.mps.server == Server::Exited),
                Step::CreatePod { .. } => {
                    prop_assert!(world.is_taken() && world.pod.is_none() && world.carrier().present().is_some());
                }
                _ => {}
            }
        }
    }

    #[test]
    fn with_nothing_in_the_way_everything_wanted_is_carried_and_then_everything_goes(
        mut world in worlds(), wishes in wishes(),
    ) {
        world.release();
        // Of an instance that is not there nothing is left, and then it is made.
        if world.placement.is_some() && world.carrier().present().is_none() {
            let finished = instance();
            if world.gpu.instances.is_empty() {
                world.settle(&wishes);
                prop_assert!(world.pod.is_none(), "a server outlives its instance");
            }
            world.gpu.instances = vec![finished];
        }
        let well = |world: &mut World| {
            // What only passes has passed.
            if !matches!(world.mps.server, Server::Absent | Server::Exited) {
                world.mps.server = Server::Ready;
            }
        };
        well(&mut world);
        world.settle(&wishes);
        well(&mut world);
        world.settle(&wishes);
        for share in world.due(&wishes).shares {
            let good = share.problem.as_ref().is_none_or(|why| {
                [problem_reason::BAD_SHARE, problem_reason::OVERLAP, problem_reason::SIZES_DIFFER]
                    .contains(&why.reason.as_str())
            });
            prop_assert!(good, "{share:?}");
        }
        world.settle(&[]);
        prop_assert!(world.pod.is_none() && world.observed().before.is_none());
        prop_assert_eq!(world.gpu.compute_mode, Some(ComputeMode::DEFAULT));
    }

    #[test]
    fn a_share_without_a_problem_has_just_its_limits_in_the_servers_own_words(
        world in worlds(), wishes in wishes(),
    ) {
        for share in world.due(&wishes).shares.iter().filter(|share| share.problem.is_none()) {
            let name = namespace_of(world.protocol, &share.id);
            let limits = Limits { memory: share.memory_bytes, percent: share.compute_percent };
            prop_assert!(limits.agree(&world.mps.limits[&name]));
            prop_assert_eq!(&world.mps.server, &Server::Ready);
            prop_assert!(world.is_taken());
            let serves = &world.pod.as_ref().expect("a server").device;
            prop_assert_eq!(world.carrier().present().map(|present| present.uuid), Some(serves.as_str()));
            prop_assert_eq!(share.placement, world.placement);
        }
    }

    #[test]
    fn claims_to_all_of_a_carrier_and_shares_of_it_never_meet(world in worlds(), wishes in wishes()) {
        let whole = Partition { share: None, ..world.partition(&share(9, 1, 1)) };
        let shares = wishes.iter().map(|share| world.partition(share));
        let partitions: Vec<Partition> = shares.chain([whole]).collect();
        let due = due(Desired { gpu: Some(&entry()), partitions: &partitions }, world.observed());
        for share in due.shares.iter().filter(|share| !world.prepared.contains_key(&share.id)) {
            prop_assert!(share.problem.is_some(), "{:?}", share);
        }
        if world.prepared.is_empty() {
            let builds = |step: &Step| matches!(step, Step::CreatePod { .. } | Step::TakeComputeMode);
            prop_assert!(!due.steps.iter().any(builds), "{:?}", due.steps);
        }
    }
}
