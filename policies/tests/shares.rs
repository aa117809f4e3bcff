//! Shares: parts of a GPU or of an instance, of exact sizes, beside instances and whole GPUs.

mod common;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::{Plan, RefusalKind};
use kerf_planner::snapshot::*;

fn legal(snapshot: &Snapshot) -> Plan {
    let plan = plan(snapshot);
    assert_eq!(violations(snapshot, &plan), Vec::<String>::new(), "{plan:?}");
    plan
}

/// A node of GPUs that may carry shares, and have instances after a switch; a 3g may carry shares, too.
fn snapshot(gpus: usize) -> Snapshot {
    let geometry = seven();
    let three = profile(&geometry, "3g.40gb");
    let one = |index: usize| Gpu {
        mig: Capability::AfterSwitch,
        whole: Capability::Now,
        shared: Capability::Now,
        share_room: [(None, all_of(80)), (Some(three), all_of(40))].into(),
        ..gpu(&format!("GPU-{index}"), 0, &geometry)
    };
    let gpus = (0..gpus).map(one).collect();
    Snapshot { nodes: vec![node("n", gpus)].into(), geometries: vec![geometry], ..Snapshot::default() }
}

fn of_gpu(gib: u64, tens: u64) -> Want {
    share(&[seven()], portion(gib, tens), |_| None)
}

fn of_3g(gib: u64, tens: u64) -> Want {
    share(&[seven()], portion(gib, tens), |geometry| Some(profile(geometry, "3g.40gb")))
}

fn ask(snapshot: &mut Snapshot, wants: Vec<Want>) {
    for want in wants {
        let id = format!("ns/p{}", snapshot.requests.len());
        snapshot.requests.push(request(&id, vec![want]));
    }
}

#[test]
fn shares_of_any_size_meet_on_one_gpu_until_it_is_full() {
    let mut snapshot = snapshot(2);
    ask(&mut snapshot, vec![of_gpu(10, 1), of_gpu(15, 2), of_gpu(20, 2), of_gpu(25, 2)]);
    let plan = legal(&snapshot);
    let gpus: Vec<_> = plan.placements.iter().map(|place| place.devices[0].gpu).collect();
    assert_eq!(gpus, [gpus[0]; 4], "one GPU does for all, the other stays whole");
    // 10 GiB are left there, and compute for one more.
    ask(&mut snapshot, vec![of_gpu(11, 1)]);
    assert_ne!(legal(&snapshot).placements[4].devices[0].gpu, gpus[0]);
    snapshot.nodes[0].gpus.truncate(1);
    let (kind, message) = refused(&legal(&snapshot));
    assert_eq!(
        (kind, message.as_str()),
        (RefusalKind::NoRoom, "needs a share: 1 GPU has too little memory free")
    );
}

#[test]
fn compute_and_clients_run_out_as_memory_does() {
    for (wants, fit) in [(vec![of_gpu(1, 3); 3], 2), (vec![of_gpu(1, 0); 10], 8)] {
        let mut snapshot = snapshot(1);
        ask(&mut snapshot, wants);
        assert_eq!(legal(&snapshot).placements.len(), fit);
    }
}

#[test]
fn a_gpu_with_shares_is_neither_whole_nor_cut_until_they_are_gone() {
    let mut snapshot = snapshot(1);
    snapshot.nodes[0].gpus[0].shares = vec![TakenShare { instance: None, portion: portion(1, 0) }];
    let instance = want(&snapshot.geometries, "1g.10gb");
    ask(&mut snapshot, vec![whole(), instance, of_3g(1, 0)]);
    assert_eq!(legal(&snapshot).placements.len(), 0);
    snapshot.nodes[0].gpus[0].shares.clear();
    assert_eq!(legal(&snapshot).placements.len(), 1);
}

#[test]
fn shares_of_an_instance_are_hard_towards_the_outside() {
    let mut snapshot = snapshot(1);
    let four = want(&snapshot.geometries, "4g.40gb");
    ask(&mut snapshot, vec![of_3g(10, 1), of_3g(10, 1), of_3g(20, 1), four]);
    let plan = legal(&snapshot);
    assert_eq!(plan.placements.len(), 4, "{plan:?}");
    let starts: Vec<_> =
        plan.placements.iter().map(|place| place.devices[0].instance.unwrap().start).collect();
    assert_eq!(starts.iter().filter(|&&start| start == 4).count(), 3, "three shares of one 3g beside the 4g");
    // The instance is full, and there is no room for another.
    ask(&mut snapshot, vec![of_3g(1, 0)]);
    assert_eq!(legal(&snapshot).placements.len(), 4);
    // Once it is there, it is said to be.
    let mut after = carry_out(&snapshot, &plan);
    after.nodes[0].gpus[0].shares.retain(|share| share.portion.memory_bytes < 20 << 30);
    ask(&mut after, vec![of_3g(20, 1)]);
    let plan = legal(&after);
    assert!(plan.placements[0].devices[0].instance.unwrap().exists, "{plan:?}");
}

#[test]
fn where_both_would_do_a_share_goes_where_the_least_is_lost() {
    let either = |gib: u64, tens: u64| {
        let (of_gpu, of_3g) = (of_gpu(gib, tens), of_3g(gib, tens));
        Want { shares: of_gpu.shares.into_iter().chain(of_3g.shares).collect(), ..of_gpu }
    };
    let place = |snapshot: &Snapshot| {
        let device = &legal(snapshot).placements[0].devices[0];
        (device.gpu, device.instance.map(|instance| instance.start))
    };
    // Nothing is started: a GPU as it is, since MIG mode is off.
    let mut snapshot = snapshot(2);
    ask(&mut snapshot, vec![either(10, 1)]);
    assert_eq!(place(&snapshot).1, None);
    // In an instance beside a 4g, rather than on the GPU that is whole.
    let geometry = snapshot.geometries[0].clone();
    let taken = |name: &str, start: u32| {
        let number = profile(&geometry, name);
        let size = geometry.profiles[number].size;
        Instance { profile: Some(number), start, size, state: InstanceState::Taken, exists: true }
    };
    let cut = &mut snapshot.nodes[0].gpus[1];
    (cut.mig, cut.whole, cut.shared) = (Capability::Now, Capability::AfterSwitch, Capability::AfterSwitch);
    cut.instances = vec![taken("4g.40gb", 0)];
    assert_eq!(place(&snapshot), (1, Some(4)));
    // Where other shares are, before an instance is made for it.
    snapshot.nodes[0].gpus[0].shares = vec![TakenShare { instance: None, portion: portion(10, 1) }];
    assert_eq!(place(&snapshot), (0, None));
    // And of several carriers with shares to the one where less is lost.
    snapshot.nodes[0].gpus[1].instances.push(taken("3g.40gb", 4));
    let three = profile(&geometry, "3g.40gb");
    snapshot.nodes[0].gpus[1].shares =
        vec![TakenShare { instance: Some((three, 4)), portion: portion(10, 1) }];
    assert_eq!(place(&snapshot), (1, Some(4)));
}

#[test]
fn of_profiles_that_would_do_the_smallest_is_made() {
    let mut snapshot = snapshot(1);
    let geometry = snapshot.geometries[0].clone();
    let gpu = &mut snapshot.nodes[0].gpus[0];
    (gpu.mig, gpu.whole, gpu.shared) = (Capability::Now, Capability::AfterSwitch, Capability::No);
    let names = ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"];
    let numbers = names.map(|name| profile(&geometry, name));
    let room = |number: usize| (Some(number), all_of(10 * u64::from(geometry.profiles[number].size)));
    gpu.share_room = numbers.into_iter().map(room).collect();
    let shares = numbers.into_iter().map(|number| ((0, Some(number)), portion(15, 1))).collect();
    ask(&mut snapshot, vec![Want { shares, ..of_gpu(15, 1) }]);
    let made = legal(&snapshot).placements[0].devices[0].instance.unwrap();
    assert_eq!(geometry.profiles[made.profile].name, "2g.20gb");
}

#[test]
fn a_share_for_which_no_carrier_is_large_enough_is_refused_for_good() {
    let mut snapshot = snapshot(2);
    ask(&mut snapshot, vec![of_gpu(81, 1)]);
    let (kind, message) = refused(&legal(&snapshot));
    assert_eq!(kind, RefusalKind::NoSuchDevice);
    assert_eq!(message, "needs a share: none of the 2 GPUs of the cluster can provide it");
}

#[test]
fn a_scarce_model_is_left_to_those_who_need_it() {
    // Both models would do for the first; the second pod is for one of them only.
    let mut snapshot = snapshot(2);
    let other = Geometry { name: "other".into(), ..seven() };
    snapshot.geometries.push(other);
    snapshot.nodes[0].gpus[1].geometry = Some(1);
    let any = share(&snapshot.geometries, all_of(80), |_| None);
    let only = Want { shares: [((0, None), any.shares[&(0, None)])].into(), ..any.clone() };
    ask(&mut snapshot, vec![any, only]);
    let demand = snapshot.requests.iter().zip([1, 1]);
    snapshot.demand = demand.map(|(request, weight)| Demand { request: request.clone(), weight }).collect();
    let gpus: Vec<_> = legal(&snapshot).placements.iter().map(|place| place.devices[0].gpu).collect();
    assert_eq!(gpus, [1, 0]);
}

#[test]
fn gpus_that_the_processors_of_their_node_do_not_suffice_for_are_given_first() {
    // Pods need four processors these days. One node has three, so its GPU is of use only to the odd small one.
    let mut snapshot = snapshot(2);
    let other = snapshot.nodes[0].gpus.split_off(1);
    snapshot.nodes.push(node("short", other));
    snapshot.nodes[1].free_milli.insert("cpu".into(), 3000);
    ask(&mut snapshot, vec![of_gpu(40, 2)]);
    snapshot.requests[0].pod.milli.insert("cpu".into(), 4000);
    snapshot.demand = vec![Demand { request: snapshot.requests[0].clone(), weight: 1 }];
    snapshot.requests[0].pod.milli.insert("cpu".into(), 2000);
    assert_eq!(legal(&snapshot).placements[0].node, 1);
    // The other way round, too, so that it is not the order of the nodes.
    snapshot.nodes.reverse();
    assert_eq!(legal(&snapshot).placements[0].node, 0);
    snapshot.nodes[0].free_milli.insert("cpu".into(), 64_000);
    snapshot.nodes[1].free_milli.insert("cpu".into(), 3000);
    assert_eq!(legal(&snapshot).placements[0].node, 1);
}

#[test]
fn where_a_server_has_one_limit_shares_of_one_size_meet() {
    let mut snapshot = snapshot(3);
    for gpu in &mut snapshot.nodes[0].gpus {
        gpu.equal_shares = true;
    }
    ask(&mut snapshot, vec![of_gpu(10, 1), of_gpu(20, 2), of_gpu(10, 1), of_gpu(20, 2), of_gpu(10, 2)]);
    let plan = legal(&snapshot);
    let gpus: Vec<_> = plan.placements.iter().map(|place| place.devices[0].gpu).collect();
    let all: std::collections::BTreeSet<usize> = gpus.iter().copied().collect();
    assert!(plan.placements.len() == 5, "{plan:?}");
    assert!(gpus[0] == gpus[2] && gpus[1] == gpus[3] && all.len() == 3, "{gpus:?}");
    ask(&mut snapshot, vec![of_gpu(5, 1)]);
    assert_eq!(refused(&legal(&snapshot)).0, RefusalKind::NoRoom);
    // One that is there counts, too.
    let mut snapshot = self::snapshot(1);
    snapshot.nodes[0].gpus[0].equal_shares = true;
    snapshot.nodes[0].gpus[0].shares = vec![TakenShare { instance: None, portion: portion(10, 1) }];
    ask(&mut snapshot, vec![of_gpu(5, 1)]);
    assert_eq!(refused(&legal(&snapshot)).0, RefusalKind::NoRoom);
}
