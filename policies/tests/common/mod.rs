//! Builders and random worlds for the planner's tests.
#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use kerf_planner::occupancy::Occupancy;
use kerf_planner::plan::{PlacedDevice, Placement, Plan, PlannedInstance, Refusal, RefusalKind};
use kerf_planner::snapshot::*;

/// The geometries of the simulator's models, which carry their sources; without them, a 7-slice and a 12-slice GPU.
pub fn geometries() -> &'static [Geometry] {
    static ALL: std::sync::OnceLock<Vec<Geometry>> = std::sync::OnceLock::new();
    ALL.get_or_init(read_geometries)
}

fn read_geometries() -> Vec<Geometry> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/sim/models");
    let Ok(entries) = std::fs::read_dir(folder) else { return vec![seven(), twelve()] };
    let mut files: Vec<_> = entries.map(|entry| entry.expect("model folder").path()).collect();
    files.sort();
    let json = files.iter().filter(|file| file.extension().is_some_and(|ext| ext == "json"));
    let read = |file| std::fs::read_to_string(file).expect("model file");
    let all: Vec<Geometry> =
        json.filter_map(|file| geometry(&serde_json::from_str(&read(file)).expect("JSON"))).collect();
    assert!(all.len() > 10, "only {} models", all.len());
    all
}

pub fn geometry_named(name: &str) -> Geometry {
    let all = geometries();
    all.iter().find(|geometry| geometry.name == name).unwrap_or_else(|| panic!("no model {name}")).clone()
}

fn geometry(model: &serde_json::Value) -> Option<Geometry> {
    let mig = model.get("mig")?.as_object()?;
    let number = |value: &serde_json::Value, key: &str| value[key].as_u64().unwrap_or(0) as u32;
    let profiles: Vec<Profile> = mig["profiles"]
        .as_array()?
        .iter()
        .map(|profile| Profile {
            name: profile["name"].as_str().expect("name").to_owned(),
            memory_bytes: u64::from(number(profile, "memory_mib")) << 20,
            multiprocessors: number(profile, "sm"),
            compute_slices: number(profile, "slices"),
            size: number(profile, "size"),
            starts: profile["starts"]
                .as_array()
                .expect("starts")
                .iter()
                .map(|s| s.as_u64().unwrap() as u32)
                .collect(),
            max_instances: number(profile, "max"),
            engines: Engines {
                decoder: number(profile, "dec"),
                encoder: number(profile, "enc"),
                jpeg: number(profile, "jpg"),
                ofa: number(profile, "ofa"),
            },
        })
        .collect();
    let most = |engine: fn(&Engines) -> u32| profiles.iter().map(|p| engine(&p.engines)).max().unwrap_or(0);
    let engines = Engines {
        decoder: most(|e| e.decoder),
        encoder: most(|e| e.encoder),
        jpeg: most(|e| e.jpeg),
        ofa: most(|e| e.ofa),
    };
    Some(Geometry {
        name: model["id"].as_str()?.to_owned(),
        memory_slices: mig["memory_slices"].as_u64()? as u32,
        engines,
        profiles,
    })
}

fn shape(name: &str, slices: u32, size: u32, starts: &[u32], max: u32, ofa: u32) -> Profile {
    Profile {
        name: name.into(),
        memory_bytes: u64::from(size) * (10 << 30),
        multiprocessors: slices * 14,
        compute_slices: slices,
        size,
        starts: starts.to_vec(),
        max_instances: max,
        engines: Engines { ofa, ..Engines::default() },
    }
}

/// Seven compute and eight memory slices, as large data-centre GPUs have them.
pub fn seven() -> Geometry {
    Geometry {
        name: "seven".into(),
        memory_slices: 8,
        engines: Engines { ofa: 1, ..Engines::default() },
        profiles: vec![
            shape("1g.10gb", 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7, 0),
            shape("1g.10gb+me", 1, 1, &[0, 1, 2, 3, 4, 5, 6], 1, 1),
            shape("1g.20gb", 1, 2, &[0, 2, 4, 6], 4, 0),
            shape("2g.20gb", 2, 2, &[0, 2, 4], 3, 0),
            shape("3g.40gb", 3, 4, &[0, 4], 2, 0),
            shape("4g.40gb", 4, 4, &[0], 1, 0),
            shape("7g.80gb", 7, 8, &[0], 1, 1),
        ],
    }
}

/// Four compute and twelve memory slices.
pub fn twelve() -> Geometry {
    Geometry {
        name: "twelve".into(),
        memory_slices: 12,
        engines: Engines::default(),
        profiles: vec![
            shape("1g.24gb", 1, 3, &[0, 3, 6, 9], 4, 0),
            shape("2g.48gb", 2, 6, &[0, 6], 2, 0),
            shape("4g.96gb", 4, 12, &[0], 1, 0),
        ],
    }
}

pub fn profile(geometry: &Geometry, name: &str) -> ProfileIndex {
    geometry
        .profiles
        .iter()
        .position(|p| p.name == name)
        .unwrap_or_else(|| panic!("no {name} in {}", geometry.name))
}

/// An open GPU in MIG mode, empty, everything allowed.
pub fn gpu(uuid: &str, index: GeometryIndex, geometry: &Geometry) -> Gpu {
    Gpu {
        uuid: uuid.into(),
        geometry: Some(index),
        mig: Capability::Now,
        allowed: (0..geometry.profiles.len()).collect(),
        ..Gpu::default()
    }
}

/// A ready node with room for many pods.
pub fn node(name: &str, gpus: Vec<Gpu>) -> Node {
    let free = [("cpu", 64_000), ("memory", (256 << 30) * 1000), ("pods", 110_000)];
    Node {
        name: name.into(),
        ready: true,
        free_milli: free.map(|(k, v)| (k.to_owned(), v)).into(),
        gpus,
        ..Node::default()
    }
}

/// The instance of a profile by name.
pub fn instance(geometry: &Geometry, name: &str, start: u32, state: InstanceState) -> Instance {
    let index = profile(geometry, name);
    Instance { profile: Some(index), start, size: geometry.profiles[index].size, state, exists: true }
}

/// Every profile of that name.
pub fn want(geometries: &[Geometry], name: &str) -> Want {
    let mut want = Want { count: 1, label: name.into(), ..Want::default() };
    for (index, geometry) in geometries.iter().enumerate() {
        let named: BTreeSet<usize> =
            (0..geometry.profiles.len()).filter(|&p| geometry.profiles[p].name == name).collect();
        if !named.is_empty() {
            want.profiles.insert(index, named);
        }
    }
    want
}

pub fn whole() -> Want {
    Want { count: 1, label: "a whole GPU".into(), whole: true, ..Want::default() }
}

/// A request for one of each want.
pub fn request(id: &str, wants: Vec<Want>) -> Request {
    let need = |(i, want)| DeviceNeed { name: format!("r{i}"), alternatives: vec![want] };
    Request {
        id: id.into(),
        devices: wants.into_iter().enumerate().map(need).collect(),
        pod: PodNeeds { milli: [("pods".to_owned(), 1000)].into(), ..PodNeeds::default() },
        ..Request::default()
    }
}

/// The snapshot after the plan: what was placed is taken, and the requests are gone.
pub fn carry_out(snapshot: &Snapshot, plan: &Plan) -> Snapshot {
    let mut after = snapshot.clone();
    for placement in &plan.placements {
        for device in &placement.devices {
            let gpu = &mut after.nodes[placement.node].gpus[device.gpu];
            if let Some(portion) = device.share {
                let instance = device.instance.map(|planned| (planned.profile, planned.start));
                let carries = gpu.shares.iter().any(|share| share.instance == instance);
                gpu.shares.push(TakenShare { instance, portion });
                if carries {
                    continue;
                }
            }
            match device.instance {
                None if device.share.is_some() => {
                    gpu.shared = Capability::Now;
                    gpu.instances.clear();
                }
                None => gpu.taken_whole = true,
                Some(planned) => {
                    let size = after.geometries[gpu.geometry.unwrap()].profiles[planned.profile].size;
                    let end = planned.start + size;
                    gpu.instances.retain(|other| {
                        other.state == InstanceState::Taken
                            || other.start >= end
                            || other.start + other.size <= planned.start
                    });
                    gpu.instances.push(Instance {
                        profile: Some(planned.profile),
                        start: planned.start,
                        size,
                        state: InstanceState::Taken,
                        exists: true,
                    });
                    gpu.mig = Capability::Now;
                }
            }
        }
        for (resource, milli) in &snapshot.requests[placement.request].pod.milli {
            *after.nodes[placement.node].free_milli.get_mut(resource).unwrap() -= milli;
        }
    }
    after.requests.clear();
    after
}

/// The one placement of a plan: node, GPU, instance.
pub fn only(plan: &Plan) -> (NodeIndex, GpuIndex, Option<PlannedInstance>) {
    assert_eq!(plan.placements.len(), 1, "{plan:?}");
    let placement = &plan.placements[0];
    (placement.node, placement.devices[0].gpu, placement.devices[0].instance)
}

/// A generator of numbers that is the same everywhere (splitmix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn percent(&mut self, chance: u64) -> bool {
        self.next() % 100 < chance
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// A random GPU with a random legal layout, in any of the states that a snapshot can have.
pub fn random_gpu(dice: &mut Dice, uuid: String, geometries: &[Geometry]) -> Gpu {
    let index = dice.below(geometries.len());
    let geometry = &geometries[index];
    let mut gpu = gpu(&uuid, index, geometry);
    if dice.percent(8) {
        gpu.closed = Some("unmanaged".into());
    }
    if dice.percent(8) {
        gpu.stuck = Some("INSUFFICIENT_RESOURCES".into());
    }
    if dice.percent(20) {
        gpu.mig = Capability::AfterSwitch;
        gpu.whole = Capability::Now;
        gpu.taken_whole = dice.percent(20);
    } else if dice.percent(50) {
        gpu.whole = Capability::AfterSwitch;
    }
    if dice.percent(5) {
        gpu.mig = Capability::No;
    }
    if dice.percent(15) {
        gpu.allowed.retain(|_| dice.percent(60));
    }
    gpu.strategy = if dice.percent(25) { Strategy::Spread } else { Strategy::Pack };
    gpu.fixed = dice.percent(10);
    if gpu.taken_whole {
        return gpu;
    }
    let mut there = Occupancy::empty(geometry);
    for _ in 0..dice.below(8) {
        let profile = dice.below(geometry.profiles.len());
        let shape = &geometry.profiles[profile];
        let start = *dice.pick(&shape.starts);
        if there.fits(geometry, profile, start) {
            there.take(geometry, profile, start);
            let states =
                [InstanceState::Taken, InstanceState::Taken, InstanceState::Idle, InstanceState::Warm];
            let exists = gpu.mig == Capability::Now && dice.percent(80);
            let state = *dice.pick(&states);
            gpu.instances.push(Instance { profile: Some(profile), start, size: shape.size, state, exists });
        }
    }
    gpu
}

/// What there is for shares on so much memory.
pub fn all_of(gib: u64) -> Portion {
    Portion { memory_bytes: gib << 30, compute_milli: gib * 1000, clients: 8 }
}

/// A share.
pub fn portion(gib: u64, tens: u64) -> Portion {
    Portion { memory_bytes: gib << 30, compute_milli: tens * 10_000, clients: 1 }
}

/// A share of a GPU itself, or of an instance, of any geometry.
pub fn share(geometries: &[Geometry], of: Portion, carrier: impl Fn(&Geometry) -> Carrier) -> Want {
    let shares =
        geometries.iter().enumerate().map(|(index, geometry)| ((index, carrier(geometry)), of)).collect();
    Want { count: 1, label: "a share".into(), shares, ..Want::default() }
}

pub fn random_cluster(dice: &mut Dice, nodes: usize, gpus: usize, geometries: &[Geometry]) -> Snapshot {
    // A few kinds of GPU per cluster, so that requests meet them.
    let kinds: Vec<Geometry> = (0..1 + dice.below(3)).map(|_| dice.pick(geometries).clone()).collect();
    let mut snapshot = Snapshot { geometries: kinds, ..Snapshot::default() };
    for n in 0..nodes {
        let cards = (0..gpus).map(|_| {
            let uuid = format!("GPU-{:016x}", dice.next());
            random_gpu(dice, uuid, &snapshot.geometries)
        });
        let mut node = node(&format!("n{n}"), cards.collect());
        node.ready = !dice.percent(5);
        node.unschedulable = dice.percent(5);
        node.free_milli.insert("cpu".into(), dice.below(9) as i128 * 1000);
        let zone = (*dice.pick(&["a", "b"])).to_owned();
        node.labels = BTreeMap::from([("zone".to_owned(), zone)]).into();
        if dice.percent(15) {
            node.taints.push(Taint { key: "team".into(), value: "x".into(), effect: "NoSchedule".into() });
        }
        snapshot.nodes.push(node);
    }
    snapshot
}

/// A cluster with requests, gangs among them, and pods that may be moved.
pub fn random_world(dice: &mut Dice) -> Snapshot {
    let (nodes, gpus) = (1 + dice.below(4), dice.below(4));
    let mut snapshot = random_cluster(dice, nodes, gpus, geometries());
    add_pods(dice, &mut snapshot);
    snapshot
}

/// Adds requests, gangs among them, shares, and pods that may be moved.
pub fn add_pods(dice: &mut Dice, snapshot: &mut Snapshot) {
    for id in 0..dice.below(12) {
        let needs = 1 + usize::from(dice.percent(30));
        let mut request = random_request(dice, id, needs, snapshot);
        request.waited_seconds = dice.percent(60).then(|| dice.below(100) as u64);
        request.gang = dice.percent(15).then(|| "gang".into());
        snapshot.requests.push(request);
    }
    if dice.percent(50) {
        add_shares(dice, snapshot);
    }
    for (n, node) in snapshot.nodes.iter().enumerate() {
        for (g, gpu) in node.gpus.iter().enumerate() {
            let Some(geometry) = gpu.geometry else { continue };
            let taken = |one: &&Instance| one.state == InstanceState::Taken && one.exists;
            for held in gpu.instances.iter().filter(taken) {
                let profile = held.profile.expect("a known profile");
                let name = &snapshot.geometries[geometry].profiles[profile].name;
                let wanted = want(&snapshot.geometries, name);
                let id = format!("ns/m{}", snapshot.movable.len());
                snapshot.movable.push(Movable {
                    request: request(&id, vec![wanted]),
                    node: n,
                    devices: vec![PlacedDevice {
                        request: "r0".into(),
                        subrequest: None,
                        gpu: g,
                        instance: Some(PlannedInstance { profile, start: held.start, exists: true }),
                        share: None,
                    }],
                    price: dice.below(3) as u32,
                    budgets: (0..2).filter(|_| dice.percent(20)).collect(),
                    most_moves: dice.below(4) as u32,
                    after_seconds: dice.below(50) as u64,
                });
            }
        }
    }
    snapshot.budgets = vec![1, 0];
}

/// Lets GPUs and instances carry shares, some of them with some, and has some of the requests ask for shares; some of
/// what is asked for is known before.
pub fn add_shares(dice: &mut Dice, snapshot: &mut Snapshot) {
    for gpu in snapshot.nodes.iter_mut().flat_map(|node| &mut node.gpus) {
        if dice.percent(50) {
            gpu.shared = gpu.whole;
            gpu.share_room.insert(None, all_of(80));
        }
        for (index, profile) in snapshot.geometries[gpu.geometry.unwrap()].profiles.iter().enumerate() {
            if dice.percent(30) {
                gpu.share_room.insert(Some(index), all_of(10 * u64::from(profile.size)));
            }
        }
        let unused = gpu.instances.is_empty() && !gpu.taken_whole;
        if unused && gpu.shared == Capability::Now && dice.percent(40) {
            for _ in 0..1 + dice.below(3) {
                let portion = portion(5 * (1 + dice.below(4) as u64), 1 + dice.below(3) as u64);
                gpu.shares.push(TakenShare { instance: None, portion });
            }
        }
        for instance in gpu.instances.iter().filter(|instance| instance.state == InstanceState::Taken) {
            if gpu.share_room.contains_key(&instance.profile) && dice.percent(70) {
                let instance = Some((instance.profile.unwrap(), instance.start));
                gpu.shares.push(TakenShare { instance, portion: portion(5, 1) });
            }
        }
        gpu.equal_shares = dice.percent(30);
    }
    let geometries = &snapshot.geometries;
    for request in &mut snapshot.requests {
        for want in request.devices.iter_mut().flat_map(|need| &mut need.alternatives) {
            if !dice.percent(30) {
                continue;
            }
            let of = portion(1 + dice.below(30) as u64, dice.below(5) as u64);
            let of = Portion { clients: dice.below(3) as u32, ..of };
            let (itself, profile) = (dice.percent(70), dice.next() as usize);
            want.shares = share(geometries, of, |g| (!itself).then(|| profile % g.profiles.len())).shares;
            if dice.percent(70) {
                (want.whole, want.label) = (false, "a share".into());
                want.profiles.clear();
            }
        }
    }
    if dice.percent(40) {
        for id in 0..1 + dice.below(4) {
            let known = |request: &Request| request.devices.len() == 1;
            let request =
                snapshot.requests.iter().find(|request| known(request)).filter(|_| dice.percent(50));
            let request = request.cloned().unwrap_or_else(|| random_request(dice, id, 1, snapshot));
            snapshot.demand.push(Demand { request, weight: dice.below(5) as u32 });
        }
    }
}

pub fn random_want(dice: &mut Dice, snapshot: &Snapshot) -> Want {
    let geometry = dice.pick(&snapshot.geometries);
    let mut want = if dice.percent(12) {
        whole()
    } else {
        want(&snapshot.geometries, &dice.pick(&geometry.profiles).name)
    };
    if dice.percent(15) {
        let more = self::want(&snapshot.geometries, &dice.pick(&geometry.profiles).name);
        for (geometry, profiles) in more.profiles {
            want.profiles.entry(geometry).or_default().extend(profiles);
        }
        want.label += " or more";
    }
    if dice.percent(15) {
        want.count = 2;
    }
    if dice.percent(10) {
        let all =
            snapshot.nodes.iter().enumerate().flat_map(|(n, node)| (0..node.gpus.len()).map(move |g| (n, g)));
        want.gpus = Some(all.filter(|_| dice.percent(60)).collect());
    }
    want
}

pub fn random_request(dice: &mut Dice, id: usize, needs: usize, snapshot: &Snapshot) -> Request {
    let mut request = request(&format!("ns/p{id}"), Vec::new());
    for i in 0..needs {
        let mut alternatives = vec![random_want(dice, snapshot)];
        if dice.percent(15) {
            alternatives.push(random_want(dice, snapshot));
            for (i, want) in alternatives.iter_mut().enumerate() {
                want.subrequest = Some(format!("s{i}"));
            }
        }
        request.devices.push(DeviceNeed { name: format!("r{i}"), alternatives });
    }
    if dice.percent(25) {
        let kind = if dice.percent(50) { ConstraintKind::Same } else { ConstraintKind::Distinct };
        let mut values = BTreeMap::new();
        for (n, node) in snapshot.nodes.iter().enumerate() {
            for (g, gpu) in node.gpus.iter().enumerate() {
                let numa = format!("numa{}", g % 2);
                if !dice.percent(10) {
                    values.insert((n, g), if dice.percent(50) { numa } else { gpu.uuid.clone() });
                }
            }
        }
        let mut requests = BTreeSet::new();
        if needs > 1 && dice.percent(40) {
            requests.extend(["r0".to_owned(), "r1".to_owned()]);
        }
        request.constraints.push(Constraint { requests, kind, values });
    }
    request.priority = dice.below(3) as i32;
    request.pod.milli.insert("cpu".into(), dice.below(4) as i128 * 1000);
    if dice.percent(15) {
        request.pod.node_selector.insert("zone".into(), "a".into());
    }
    if dice.percent(30) {
        let toleration = Toleration { key: "team".into(), exists: true, ..Toleration::default() };
        request.pod.tolerations.push(toleration);
    }
    if dice.percent(5) {
        request.avoid.insert(0);
    }
    request
}

/// Whether some place exists for the snapshot's only request, by trying all of them against the checker.
pub fn brute_force(snapshot: &Snapshot) -> bool {
    let request = &snapshot.requests[0];
    (0..snapshot.nodes.len()).any(|node| {
        let mut devices = Vec::new();
        try_needs(snapshot, request, node, 0, &mut devices)
    })
}

fn try_needs(
    snapshot: &Snapshot,
    request: &Request,
    node: NodeIndex,
    need: usize,
    devices: &mut Vec<PlacedDevice>,
) -> bool {
    if need == request.devices.len() {
        let placement = Placement { request: 0, node, devices: devices.clone() };
        let plan = Plan { placements: vec![placement], ..Plan::default() };
        return kerf_planner::check::violations(snapshot, &plan).is_empty();
    }
    let wants = &request.devices[need].alternatives;
    wants.iter().any(|want| try_devices(snapshot, request, node, need, want, want.count, devices))
}

fn try_devices(
    snapshot: &Snapshot,
    request: &Request,
    node: NodeIndex,
    need: usize,
    want: &Want,
    left: u32,
    devices: &mut Vec<PlacedDevice>,
) -> bool {
    if left == 0 {
        return try_needs(snapshot, request, node, need + 1, devices);
    }
    for (index, gpu) in snapshot.nodes[node].gpus.iter().enumerate() {
        let mut options = vec![None];
        if let Some(geometry) = gpu.geometry {
            for (profile, shape) in snapshot.geometries[geometry].profiles.iter().enumerate() {
                let starts = shape.starts.iter();
                options.extend(starts.map(|&start| Some(PlannedInstance { profile, start, exists: false })));
            }
        }
        let wanted = |option: &Option<PlannedInstance>| match option {
            None => want.whole,
            Some(planned) => {
                want.profiles.get(&gpu.geometry.unwrap()).is_some_and(|p| p.contains(&planned.profile))
            }
        };
        let share_of = |option: &Option<PlannedInstance>| {
            let carrier = option.map(|planned| planned.profile);
            want.shares.get(&(gpu.geometry?, carrier)).copied()
        };
        let whole = options.iter().filter(|option| wanted(option)).map(|&option| (option, None));
        let shares = options.iter().filter_map(|option| Some((*option, Some(share_of(option)?))));
        for (instance, share) in whole.chain(shares) {
            devices.push(PlacedDevice {
                request: request.devices[need].name.clone(),
                subrequest: want.subrequest.clone(),
                gpu: index,
                instance,
                share,
            });
            if try_devices(snapshot, request, node, need, want, left - 1, devices) {
                return true;
            }
            devices.pop();
        }
    }
    false
}

/// Every way to give the request devices on some node, legal or not.
fn ways(snapshot: &Snapshot, index: usize) -> Vec<Placement> {
    let request = &snapshot.requests[index];
    let mut all = Vec::new();
    for node in 0..snapshot.nodes.len() {
        let mut so_far: Vec<Vec<PlacedDevice>> = vec![Vec::new()];
        for need in &request.devices {
            let mut next = Vec::new();
            for want in &need.alternatives {
                let mut of_want = so_far.clone();
                for _ in 0..want.count {
                    let devices = devices(snapshot, node, &need.name, want);
                    let with = |before: &Vec<PlacedDevice>| -> Vec<Vec<PlacedDevice>> {
                        devices
                            .iter()
                            .map(|device| [before.as_slice(), std::slice::from_ref(device)].concat())
                            .collect()
                    };
                    of_want = of_want.iter().flat_map(with).collect();
                }
                next.extend(of_want);
            }
            so_far = next;
        }
        all.extend(so_far.into_iter().map(|devices| Placement { request: index, node, devices }));
    }
    all
}

fn devices(snapshot: &Snapshot, node: usize, need: &str, want: &Want) -> Vec<PlacedDevice> {
    let mut devices = Vec::new();
    for (index, gpu) in snapshot.nodes[node].gpus.iter().enumerate() {
        let mut device = |instance, share| {
            let (request, subrequest) = (need.to_owned(), want.subrequest.clone());
            devices.push(PlacedDevice { request, subrequest, gpu: index, instance, share });
        };
        if want.whole {
            device(None, None);
        }
        let geometry = gpu.geometry.unwrap();
        let starts = |profile: usize| snapshot.geometries[geometry].profiles[profile].starts.iter();
        for &profile in want.profiles.get(&geometry).into_iter().flatten() {
            for &start in starts(profile) {
                device(Some(PlannedInstance { profile, start, exists: false }), None);
            }
        }
        for (carrier, portion) in kerf_planner::share::on(&want.shares, Some(geometry)) {
            match carrier {
                None => device(None, Some(portion)),
                Some(profile) => starts(profile).for_each(|&start| {
                    device(Some(PlannedInstance { profile, start, exists: false }), Some(portion));
                }),
            }
        }
    }
    devices
}

/// Whether all requests have places together, by trying everything against the checker.
pub fn all_fit(snapshot: &Snapshot) -> bool {
    let legal: Vec<Vec<Placement>> = (0..snapshot.requests.len())
        .map(|index| {
            let alone = Snapshot { requests: vec![snapshot.requests[index].clone()], ..snapshot.clone() };
            let fits = |way: &Placement| {
                let placements = vec![Placement { request: 0, ..way.clone() }];
                kerf_planner::check::violations(&alone, &Plan { placements, ..Plan::default() }).is_empty()
            };
            ways(snapshot, index).into_iter().filter(fits).collect()
        })
        .collect();
    let mut prefixes: Vec<Snapshot> = Vec::new();
    for number in 1..=snapshot.requests.len() {
        prefixes.push(Snapshot { requests: snapshot.requests[..number].to_vec(), ..snapshot.clone() });
    }
    try_all(&prefixes, &legal, &mut Vec::new(), &mut HashSet::new())
}

type Situation = (BTreeSet<String>, BTreeMap<usize, i128>);

fn try_all(
    prefixes: &[Snapshot],
    legal: &[Vec<Placement>],
    placements: &mut Vec<Placement>,
    dead: &mut HashSet<(usize, Situation)>,
) -> bool {
    let at = placements.len();
    let Some(snapshot) = prefixes.get(at) else { return true };
    let places = placements.iter().flat_map(|one| one.devices.iter().map(|d| (one.node, d.gpu, d.instance)));
    let mut cpus = BTreeMap::new();
    for one in placements.iter() {
        let needs = snapshot.requests[one.request].pod.milli.get("cpu").copied().unwrap_or(0);
        *cpus.entry(one.node).or_default() += needs;
    }
    let situation = (at, (places.map(|place| format!("{place:?}")).collect(), cpus));
    if dead.contains(&situation) {
        return false;
    }
    for way in &legal[at] {
        placements.push(way.clone());
        let plan = Plan { placements: placements.clone(), ..Plan::default() };
        if kerf_planner::check::violations(snapshot, &plan).is_empty()
            && try_all(prefixes, legal, placements, dead)
        {
            return true;
        }
        placements.pop();
    }
    dead.insert(situation);
    false
}

pub fn refused(plan: &Plan) -> (RefusalKind, String) {
    let Some(Refusal { kind, message, .. }) = plan.refusals.first() else { panic!("not refused: {plan:?}") };
    (*kind, message.clone())
}
