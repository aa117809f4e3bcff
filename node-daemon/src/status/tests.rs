use std::sync::Arc;

use kerf_crds::gpu_node::{ClaimReference, Engines, ObservedMig, Placement, Profile};

use super::*;
use crate::inventory::ComputeInstance;
use crate::prepared::Prepared;

fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

fn geometry(product: &str, profiles: u32) -> Arc<Geometry> {
    let profile = |id| Profile {
        name: format!("{id}g.{id}0gb+me.all"),
        id,
        memory_bytes: 99_999_999_999,
        multiprocessors: 188,
        compute_slices: 4,
        size: 1,
        starts: (0..12).collect(),
        max_instances: 12,
        engines: Engines { copy: 16, decoder: 7, encoder: 7, jpeg: 7, ofa: 1 },
        graphics: true,
    };
    Arc::new(Geometry {
        name: product.into(),
        memory_slices: 12,
        multiprocessors: 188,
        engines: Engines::default(),
        profiles: (0..profiles).map(profile).collect(),
    })
}

/// A GPU of which every slice is an instance, each with a process.
fn full(index: u32, geometry: &Arc<Geometry>, instances: u32) -> Gpu {
    let instance = |start| Instance {
        profile: "1g.24gb+me.all".into(),
        profile_id: 1,
        placement: Placement { start, size: 1 },
        gpu_instance_id: start,
        compute_instances: vec![ComputeInstance {
            id: 0,
            full_width: true,
            uuid: format!("MIG-5e8f3f0c-38a1-5b0e-9c4f-{index:06}{start:06}"),
        }],
        processes: vec![Default::default()],
        ..Instance::default()
    };
    Gpu {
        name: format!("gpu-{index:08}"),
        uuid: format!("GPU-{index:08}-0000-4000-8000-000000000001"),
        index,
        product: "NVIDIA RTX PRO 6000 Blackwell Server Edition".into(),
        pci_address: "0000:3b:00.0".into(),
        numa_node: Some(1),
        memory_bytes: 99_999_999_999,
        mig: ObservedMig { capable: true, enabled: true, ..ObservedMig::default() },
        geometry: Some(geometry.clone()),
        instances: (0..instances).map(instance).collect(),
        ..Gpu::default()
    }
}

fn inventory(gpus: Vec<Gpu>) -> Inventory {
    Inventory { gpus, driver_version: "580.95.05".into(), ..Inventory::default() }
}

/// With kubelet content and the toolkit found.
fn parts<'a>(
    spec: &'a SeenSpec,
    inventory: &'a Inventory,
    reports: &'a BTreeMap<String, GpuReport>,
    prepared: &'a PreparedClaims,
) -> Parts<'a> {
    let (kubelet, toolkit) = (&Kubelet::Registered, Some(&None));
    Parts { spec: Some(spec), inventory, reports, prepared, kubelet, toolkit }
}

fn built(inventory: &Inventory, reports: &BTreeMap<String, GpuReport>) -> GpuNodeStatus {
    let spec = SeenSpec { generation: 7, ..SeenSpec::default() };
    let prepared = PreparedClaims::new();
    build(parts(&spec, inventory, reports, &prepared), &[], now())
}

fn reports(gpus: &[Gpu], generations: &[Option<i64>]) -> BTreeMap<String, GpuReport> {
    let report = |(gpu, generation): (&Gpu, &Option<i64>)| {
        (gpu.uuid.clone(), GpuReport { generation: *generation, ..GpuReport::default() })
    };
    gpus.iter().zip(generations).map(report).collect()
}

#[test]
fn sixteen_gpus_fully_cut_stay_small() {
    let geometry = geometry("P", 18);
    let gpus: Vec<Gpu> = (0..16).map(|index| full(index, &geometry, 7)).collect();
    let mut prepared = PreparedClaims::new();
    for gpu in &gpus {
        for instance in &gpu.instances {
            let uid = format!("11111111-2222-3333-4444-{:06}{:06}", gpu.index, instance.gpu_instance_id);
            let claim = ClaimReference {
                namespace: "a-namespace-of-a-team".into(),
                name: format!("training-run-with-a-name-{uid}"),
                uid: uid.clone(),
            };
            let key = DeviceKey::instance(&gpu.uuid, instance.placement);
            let (request, device, uuid) = ("r".into(), "d".into(), "u".into());
            let devices = vec![PreparedDevice { request, device, key, uuid, cdi: vec![], share: None }];
            prepared.insert(uid, Prepared { claim, pod: None, devices });
        }
    }
    let inventory = inventory(gpus);
    let spec = SeenSpec::default();
    let reports = BTreeMap::new();
    let parts = parts(&spec, &inventory, &reports, &prepared);
    let status = build(parts, &[], now());
    assert_eq!(status.gpus.iter().map(|gpu| gpu.instances.len()).sum::<usize>(), 112);
    assert!(status.gpus[3].instances[5].in_use());
    let size = serde_json::to_vec(&status).unwrap().len();
    assert!(size < 64 << 10, "{size} bytes");
    assert_eq!(status.geometries.len(), 1);
}

#[test]
fn clients_are_one_for_each_pod_and_one_for_all_others() {
    let gpu = full(0, &geometry("P", 1), 0);
    let process = |pid, comm: &str, pod: Option<&str>| Process {
        pid,
        comm: comm.into(),
        pod_uid: pod.map(str::to_owned),
    };
    let clients = vec![
        process(5, "dcgm", Some("b")),
        process(6, "nvidia-persiste", None),
        process(7, "dcgm", Some("b")),
        process(8, "", None),
        process(9, "smi", Some("a")),
    ];
    let report = GpuReport { clients, ..GpuReport::default() };
    let status = built(&inventory(vec![gpu.clone()]), &[(gpu.uuid, report)].into());
    let clients: Vec<(Option<&str>, &str)> = status.gpus[0]
        .clients
        .iter()
        .map(|client| (client.pod_uid.as_deref(), client.process.as_str()))
        .collect();
    let expected =
        [(None, "nvidia-persiste (pid 6)"), (Some("a"), "smi (pid 9)"), (Some("b"), "dcgm (pid 5)")];
    assert_eq!(clients, expected);
}

#[test]
fn what_carried_shares_counts_as_a_process_until_it_has_gone() {
    let mut gpu = Gpu::default();
    gpu.mps.there = true;
    let processes =
        |gpu: &Gpu| built(&inventory(vec![gpu.clone()]), &BTreeMap::new()).gpus.remove(0).processes;
    assert_eq!(processes(&gpu), 1, "or the operator would give the whole GPU away");
    gpu.mps.there = false;
    assert_eq!(processes(&gpu), 0);
    let mut gpu = full(0, &geometry("P", 1), 1);
    gpu.instances[0].processes.clear();
    gpu.instances[0].mps.there = true;
    let instance = built(&inventory(vec![gpu]), &BTreeMap::new()).gpus.remove(0).instances.remove(0);
    assert_eq!(instance.processes, 1, "and all of an instance");
}

#[test]
fn claims_of_shares_are_not_their_instances() {
    let gpu = full(0, &geometry("P", 1), 2);
    let of = |uid: &str, key: DeviceKey| Prepared {
        claim: ClaimReference { uid: uid.into(), ..ClaimReference::default() },
        pod: None,
        devices: vec![PreparedDevice {
            request: "r".into(),
            device: "d".into(),
            key,
            uuid: String::new(),
            cdi: vec![],
            share: None,
        }],
    };
    let at = |start| DeviceKey::instance(&gpu.uuid, Placement { start, size: 1 });
    let prepared = PreparedClaims::from([
        ("share".to_owned(), of("share", at(0).with_share("a"))),
        ("whole".to_owned(), of("whole", at(1))),
    ]);
    let share =
        api::Share { id: "a".into(), placement: Some(Placement { start: 0, size: 1 }), ..Default::default() };
    let inventory = inventory(vec![Gpu { shares: vec![share], ..gpu.clone() }]);
    let (spec, reports) = (SeenSpec::default(), BTreeMap::new());
    let gpu = build(parts(&spec, &inventory, &reports, &prepared), &[], now()).gpus.remove(0);
    let uids = |claims: &[ClaimReference]| claims.iter().map(|claim| claim.uid.clone()).collect::<Vec<_>>();
    assert_eq!(uids(&gpu.instances[0].claims), [""; 0]);
    assert_eq!(uids(&gpu.instances[1].claims), ["whole"]);
    assert_eq!(uids(&gpu.shares[0].claims), ["share"]);
}

#[test]
fn the_generation_is_the_oldest_that_a_worker_decided_under() {
    let geometry = geometry("P", 1);
    let gpus = vec![full(0, &geometry, 1), full(1, &geometry, 1)];
    let inventory = inventory(gpus.clone());
    for (generations, expected) in [
        ([Some(7), Some(7)], Some(7)),
        ([Some(7), Some(6)], Some(6)),
        ([Some(7), None], None),
        // A worker that is ahead of what this status shows as seen cannot be: the spec is read first.
        ([Some(8), Some(9)], Some(7)),
    ] {
        let status = built(&inventory, &reports(&gpus, &generations));
        assert_eq!(status.observed_generation, expected, "{generations:?}");
    }
    assert_eq!(
        built(&Inventory::default(), &BTreeMap::new()).observed_generation,
        Some(7),
        "a node without GPUs"
    );
}

#[test]
fn a_new_generation_alone_is_written_late_and_with_the_next_news() {
    let gpus = vec![full(0, &geometry("P", 1), 1)];
    let of = |generation, number| {
        let inventory = inventory(vec![full(0, &geometry("P", 1), number)]);
        let reports = reports(&gpus, &[Some(generation)]);
        let spec = SeenSpec { generation, ..SeenSpec::default() };
        build(parts(&spec, &inventory, &reports, &PreparedClaims::default()), &[], now())
    };
    let (mut due, at) = (None, Instant::now());
    let later = at + GENERATION / 2;
    assert_eq!(write_at(None, &of(7, 1), &mut due, at), Some(at), "the first");
    assert_eq!(write_at(Some(&of(7, 1)), &of(7, 1), &mut due, at), None);
    assert_eq!(write_at(Some(&of(7, 1)), &of(8, 1), &mut due, at), Some(at + GENERATION));
    assert_eq!(
        write_at(Some(&of(7, 1)), &of(9, 1), &mut due, later),
        Some(at + GENERATION),
        "not put off again"
    );
    assert_eq!(write_at(Some(&of(7, 1)), &of(9, 2), &mut due, later), Some(later));
    assert_eq!(write_at(Some(&of(9, 2)), &of(10, 2), &mut due, later), Some(later + GENERATION));
}

#[test]
fn geometries_are_stored_once_and_named_by_product() {
    let (a, again, other, b) = (geometry("A", 2), geometry("A", 2), geometry("A", 3), geometry("B", 2));
    let gpus =
        [&a, &again, &other, &b].into_iter().zip(0..).map(|(geometry, index)| full(index, geometry, 0));
    let mut gpus: Vec<Gpu> = gpus.collect();
    gpus.push(Gpu { geometry: None, ..full(9, &a, 0) });
    let status = built(&inventory(gpus), &BTreeMap::new());
    let names: Vec<&str> = status.geometries.iter().map(|geometry| geometry.name.as_str()).collect();
    assert_eq!(names, ["A", "A #2", "B"]);
    let of_gpus: Vec<Option<&str>> = status.gpus.iter().map(|gpu| gpu.geometry.as_deref()).collect();
    assert_eq!(of_gpus, [Some("A"), Some("A"), Some("A #2"), Some("B"), None]);
    assert_eq!(status.geometry_of(&status.gpus[2]).unwrap().profiles.len(), 3);
}

#[test]
fn the_layout_is_one_line() {
    let geometry = geometry("A", 1);
    let mut cut = full(0, &geometry, 3);
    cut.instances[2].profile = "3g.40gb".into();
    cut.instances[2].placement.size = 4;
    let whole = Gpu { mig: ObservedMig::default(), ..full(1, &geometry, 0) };
    let status = built(&inventory(vec![cut, whole]), &BTreeMap::new());
    assert_eq!(status.layout_summary, "1x 3g.40gb, 2x 1g.24gb+me.all, 1 whole");
}

#[test]
fn conditions_say_what_fails_and_keep_their_time() {
    let geometry = geometry("A", 1);
    let gpus = vec![full(0, &geometry, 1)];
    let find = |status: &GpuNodeStatus, type_: &str| {
        status.conditions.iter().find(|condition| condition.type_ == type_).cloned().unwrap()
    };
    let mut reports = reports(&gpus, &[Some(7)]);
    let healthy = built(&inventory(gpus.clone()), &reports);
    assert_eq!(find(&healthy, condition::READY).status, "True");
    assert_eq!(find(&healthy, condition::DEGRADED).status, "False");

    let problem = |reason: &str| Some(Reason { reason: reason.into(), message: "m".into() });
    reports.values_mut().next().unwrap().problem = problem("InUse");
    let waiting = built(&inventory(gpus.clone()), &reports);
    assert_eq!(find(&waiting, condition::DEGRADED).status, "False", "to wait is no failure");
    assert_eq!(waiting.gpus[0].problem.as_ref().unwrap().reason, "InUse");

    reports.values_mut().next().unwrap().problem = problem("INSUFFICIENT_RESOURCES");
    let spec = SeenSpec { generation: 8, ..SeenSpec::default() };
    let (inventory, prepared) = (inventory(gpus), PreparedClaims::new());
    let parts = parts(&spec, &inventory, &reports, &prepared);
    let later: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
    let failing = build(parts, &healthy.conditions, later);
    let degraded = find(&failing, condition::DEGRADED);
    assert_eq!((degraded.status.as_str(), degraded.reason.as_str()), ("True", node_reason::STEP_FAILED));
    assert!(degraded.message.contains("INSUFFICIENT_RESOURCES"));
    assert_eq!(degraded.last_transition_time.0, later);
    assert_eq!(find(&failing, condition::READY).last_transition_time.0, now(), "unchanged since");

    let away = Inventory { unavailable: problem(node_reason::DRIVER_UNAVAILABLE), ..Inventory::default() };
    let ready = find(&built(&away, &BTreeMap::new()), condition::READY);
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", node_reason::DRIVER_UNAVAILABLE));
}

#[test]
fn ready_waits_for_kubelet_and_a_missing_toolkit_has_a_condition() {
    let geometry = geometry("A", 1);
    let gpus = vec![full(0, &geometry, 1)];
    let (spec, prepared) = (SeenSpec { generation: 7, ..SeenSpec::default() }, PreparedClaims::new());
    let (inventory, reports) = (inventory(gpus.clone()), reports(&gpus, &[Some(7)]));
    let whole = parts(&spec, &inventory, &reports, &prepared);
    let find = |parts: Parts<'_>, type_: &str| {
        let conditions = build(parts, &[], now()).conditions;
        let found = conditions.into_iter().find(|condition| condition.type_ == type_);
        found.map(|found| (found.status, found.reason, found.message))
    };
    for (kubelet, part) in [
        (Kubelet::Unheard, "has not registered the plugin gpu.kerf.dev"),
        (Kubelet::Refused("no such version".into()), "no such version"),
    ] {
        let (status, reason, message) = find(Parts { kubelet: &kubelet, ..whole }, condition::READY).unwrap();
        assert_eq!((status.as_str(), reason.as_str()), ("False", node_reason::NOT_REGISTERED));
        assert!(message.contains(part), "{message}");
    }
    let missing = Reason { reason: node_reason::TOOLKIT_NOT_FOUND.into(), message: "install it".into() };
    assert_eq!(
        find(Parts { toolkit: Some(&Some(missing)), ..whole }, condition::CONTAINER_TOOLKIT),
        Some(("False".into(), node_reason::TOOLKIT_NOT_FOUND.into(), "install it".into()))
    );
    assert_eq!(find(whole, condition::CONTAINER_TOOLKIT).unwrap().0, "True");
    assert_eq!(find(Parts { toolkit: None, ..whole }, condition::CONTAINER_TOOLKIT), None, "not known yet");
}

#[test]
fn shares_are_reported_with_their_claims() {
    let share = |id: &str| api::Share { id: id.into(), memory_bytes: 1, ..Default::default() };
    let mut gpu = full(0, &geometry("P", 1), 0);
    gpu.mig.enabled = false;
    gpu.shares = vec![share("a"), share("b")];
    let claim = ClaimReference { namespace: "ns".into(), name: "c".into(), uid: "u".into() };
    let device = PreparedDevice {
        request: "r".into(),
        device: "d".into(),
        key: DeviceKey::share(&gpu.uuid, "b"),
        uuid: gpu.uuid.clone(),
        cdi: vec![],
        share: None,
    };
    let record = Prepared { claim: claim.clone(), pod: None, devices: vec![device] };
    let prepared = PreparedClaims::from([("u".to_owned(), record)]);
    let inventory = inventory(vec![gpu, Gpu { uuid: "whole".into(), ..Gpu::default() }]);
    let (spec, reports) = (SeenSpec::default(), BTreeMap::new());
    let status = build(parts(&spec, &inventory, &reports, &prepared), &[], now());
    assert_eq!(status.layout_summary, "2 shares, 1 whole");
    let found = &status.gpus[0];
    assert!(found.claims.is_empty(), "nobody has all of it");
    assert_eq!((found.shares[0].claims.len(), found.shares[1].claims.as_slice()), (0, [claim].as_slice()));
}
