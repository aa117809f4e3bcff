//! What an administrator would expect of a plan, told by example on an A100 80GB and others.

mod common;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::layout::{WarmWish, pack_layout, warm};
use kerf_planner::plan;
use kerf_planner::plan::{Plan, RefusalKind};
use kerf_planner::snapshot::*;

fn a100() -> Geometry {
    geometry_named("a100-80")
}

/// One node with `count` empty GPUs, `GPU-0` and so on.
fn cluster(geometry: &Geometry, count: usize) -> Snapshot {
    let gpus = (0..count).map(|i| gpu(&format!("GPU-{i}"), 0, geometry)).collect();
    Snapshot {
        geometries: vec![geometry.clone()],
        nodes: vec![node("n0", gpus)].into(),
        requests: vec![],
        ..Snapshot::default()
    }
}

fn asking(mut snapshot: Snapshot, profiles: &[&str]) -> Snapshot {
    let ask =
        |(i, name): (usize, &&str)| request(&format!("ns/p{i}"), vec![want(&snapshot.geometries, name)]);
    snapshot.requests = profiles.iter().enumerate().map(ask).collect();
    snapshot
}

fn legal_plan(snapshot: &Snapshot) -> Plan {
    let plan = plan(snapshot);
    assert_eq!(violations(snapshot, &plan), Vec::<String>::new());
    plan
}

/// `0:1g.10gb@6` for each device: GPU, profile, start.
fn places(snapshot: &Snapshot, plan: &Plan) -> Vec<String> {
    let devices = plan.placements.iter().flat_map(|p| p.devices.iter().map(move |d| (p.node, d)));
    devices
        .map(|(node, device)| {
            let geometry = snapshot.nodes[node].gpus[device.gpu].geometry;
            match device.instance {
                None => format!("{}:whole", device.gpu),
                Some(at) => {
                    let name = &snapshot.geometries[geometry.unwrap()].profiles[at.profile].name;
                    format!("{}:{name}@{}", device.gpu, at.start)
                }
            }
        })
        .collect()
}

#[test]
fn the_first_small_instance_goes_where_it_spoils_least() {
    let snapshot = asking(cluster(&a100(), 2), &["1g.10gb"; 3]);
    // Slice 6 serves neither 2g nor 4g; 4 and 5 leave the left half to a 4g.
    assert_eq!(places(&snapshot, &legal_plan(&snapshot)), ["0:1g.10gb@6", "0:1g.10gb@4", "0:1g.10gb@5"]);
}

#[test]
fn mixes_fill_a_gpu_before_the_next_is_started() {
    let snapshot = asking(cluster(&a100(), 2), &["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]);
    let plan = legal_plan(&snapshot);
    assert!(plan.placements.iter().all(|p| p.devices[0].gpu == 0), "{:?}", places(&snapshot, &plan));
    let snapshot = asking(cluster(&a100(), 1), &["1g.10gb", "4g.40gb", "2g.20gb"]);
    assert_eq!(places(&snapshot, &legal_plan(&snapshot)).len(), 3);
}

#[test]
fn seven_small_ones_end_and_a_large_one_fits() {
    for name in ["a100-80", "h100-80-sxm"] {
        let geometry = geometry_named(name);
        let full = asking(cluster(&geometry, 1), &["1g.10gb"; 7]);
        let plan = legal_plan(&full);
        assert_eq!(plan.placements.len(), 7);
        let mut after = carry_out(&full, &plan);
        after.requests = vec![request("ns/large", vec![want(&after.geometries, "7g.80gb")])];
        assert_eq!(refused(&self::plan(&after)).0, RefusalKind::NoRoom);
        // The pods are gone; the instances are still there and nobody's.
        for instance in &mut after.nodes[0].gpus[0].instances {
            instance.state = InstanceState::Idle;
        }
        assert_eq!(places(&after, &legal_plan(&after)), ["0:7g.80gb@0"]);
    }
}

#[test]
fn an_instance_that_exists_is_reused_unless_it_spoils_too_much() {
    let geometry = a100();
    let mut snapshot = asking(cluster(&geometry, 2), &["1g.10gb"; 2]);
    let at = |start| vec![instance(&geometry, "1g.10gb", start, InstanceState::Idle)];
    snapshot.nodes[0].gpus[1].instances = at(5);
    let plan = legal_plan(&snapshot);
    assert_eq!(places(&snapshot, &plan)[0], "1:1g.10gb@5");
    assert!(plan.placements[0].devices[0].instance.unwrap().exists);
    assert!(!plan.placements[1].devices[0].instance.unwrap().exists);
    // There it would be in the way of a 4g, a 3g and a 2g.
    snapshot.nodes[0].gpus[1].instances = at(2);
    assert_eq!(places(&snapshot, &legal_plan(&snapshot))[0], "0:1g.10gb@6");
}

#[test]
fn warm_instances_serve_their_profile_and_give_way_last() {
    let geometry = a100();
    let mut snapshot = asking(cluster(&geometry, 2), &["1g.10gb", "7g.80gb", "7g.80gb"]);
    snapshot.nodes[0].gpus[0].instances = vec![
        instance(&geometry, "1g.10gb", 0, InstanceState::Warm),
        instance(&geometry, "1g.10gb", 1, InstanceState::Idle),
    ];
    let plan = legal_plan(&snapshot);
    // The idle one can be kept warm in its stead.
    assert_eq!(places(&snapshot, &plan), ["0:1g.10gb@0", "1:7g.80gb@0"]);
    snapshot.requests.remove(0);
    // The empty GPU first; then the warm one is destroyed, since there is no other room.
    assert_eq!(places(&snapshot, &legal_plan(&snapshot)), ["1:7g.80gb@0", "0:7g.80gb@0"]);
}

#[test]
fn a_gpu_on_which_a_step_fails_gives_only_what_exists() {
    let geometry = a100();
    let mut snapshot = asking(cluster(&geometry, 1), &["3g.40gb", "3g.40gb"]);
    let gpu = &mut snapshot.nodes[0].gpus[0];
    gpu.stuck = Some("INSUFFICIENT_RESOURCES".into());
    gpu.instances = vec![
        instance(&geometry, "3g.40gb", 0, InstanceState::Idle),
        Instance { exists: false, ..instance(&geometry, "1g.10gb", 4, InstanceState::Taken) },
    ];
    let plan = legal_plan(&snapshot);
    assert_eq!(places(&snapshot, &plan), ["0:3g.40gb@0"]);
    let stuck = "needs 3g.40gb: 1 GPU cannot be reshaped now (INSUFFICIENT_RESOURCES)";
    assert_eq!(refused(&plan), (RefusalKind::NoRoom, stuck.to_owned()));
    let gpu = &mut snapshot.nodes[0].gpus[0];
    (gpu.mig, gpu.instances) = (Capability::AfterSwitch, Vec::new());
    assert_eq!(refused(&legal_plan(&snapshot)).1, stuck);
}

#[test]
fn a_stated_layout_is_handed_out_as_it_is() {
    let geometry = a100();
    let mut snapshot = asking(cluster(&geometry, 1), &["3g.40gb", "3g.40gb", "1g.10gb"]);
    snapshot.nodes[0].gpus[0].fixed = true;
    snapshot.nodes[0].gpus[0].instances = vec![
        instance(&geometry, "3g.40gb", 0, InstanceState::Idle),
        instance(&geometry, "3g.40gb", 4, InstanceState::Taken),
    ];
    let plan = legal_plan(&snapshot);
    assert_eq!(places(&snapshot, &plan), ["0:3g.40gb@0"]);
    let messages: Vec<&str> = plan.refusals.iter().map(|r| r.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "needs 3g.40gb: 1 GPU has none free in its stated layout",
            "needs 1g.10gb: 1 GPU has none free in its stated layout; \
             no node could take it even if all that runs ended"
        ]
    );
}

#[test]
fn scarce_models_and_whole_gpus_are_kept() {
    let (common, scarce) = (a100(), geometry_named("h100-80-sxm"));
    let mut snapshot = cluster(&common, 4);
    snapshot.geometries.push(scarce.clone());
    snapshot.nodes.push(node("rare", vec![gpu("GPU-00", 1, &scarce)]));
    snapshot.nodes.reverse();
    let snapshot = asking(snapshot, &["1g.20gb", "3g.40gb"]);
    let plan = legal_plan(&snapshot);
    assert!(plan.placements.iter().all(|p| p.node == 1), "{plan:?}");

    let mut mixed = cluster(&common, 2);
    mixed.nodes[0].gpus[0].whole = Capability::AfterSwitch;
    mixed.nodes[0].gpus[1].mig = Capability::AfterSwitch;
    mixed.nodes[0].gpus[1].whole = Capability::Now;
    mixed.requests =
        vec![request("ns/w", vec![whole()]), request("ns/i", vec![want(&mixed.geometries, "1g.10gb")])];
    assert_eq!(places(&mixed, &legal_plan(&mixed)), ["1:whole", "0:1g.10gb@6"]);
}

#[test]
fn a_switch_of_mode_needs_an_empty_gpu_and_is_made_once() {
    let mut snapshot = asking(cluster(&a100(), 1), &["3g.40gb", "3g.40gb"]);
    snapshot.nodes[0].gpus[0].mig = Capability::AfterSwitch;
    assert_eq!(places(&snapshot, &legal_plan(&snapshot)).len(), 2);
    snapshot.nodes[0].gpus[0].taken_whole = true;
    assert_eq!(refused(&plan(&snapshot)).1, "needs 3g.40gb: 1 GPU is in use");
    let mut cut = cluster(&a100(), 1);
    cut.nodes[0].gpus[0].whole = Capability::AfterSwitch;
    cut.requests = vec![request("ns/w", vec![whole()])];
    assert_eq!(places(&cut, &legal_plan(&cut)), ["0:whole"]);
    cut.nodes[0].gpus[0].instances = vec![instance(&a100(), "1g.10gb", 0, InstanceState::Taken)];
    assert_eq!(refused(&plan(&cut)).1, "needs a whole GPU: 1 GPU is in use");
}

#[test]
fn spread_prefers_the_emptiest() {
    let mut snapshot = asking(cluster(&a100(), 3), &["1g.10gb"; 3]);
    for gpu in &mut snapshot.nodes[0].gpus {
        gpu.strategy = Strategy::Spread;
    }
    let mut gpus: Vec<usize> = legal_plan(&snapshot).placements.iter().map(|p| p.devices[0].gpu).collect();
    gpus.sort();
    assert_eq!(gpus, [0, 1, 2]);
}

#[test]
fn higher_priorities_are_served_first_and_equal_ones_in_order() {
    let mut snapshot = asking(cluster(&a100(), 1), &["7g.80gb"; 3]);
    snapshot.requests[2].priority = 10;
    let plan = plan(&snapshot);
    assert_eq!(plan.placements.iter().map(|p| p.request).collect::<Vec<_>>(), [2]);
    assert_eq!(plan.refusals.iter().map(|r| r.request).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn the_first_alternative_that_fits_is_taken() {
    let mut snapshot = cluster(&a100(), 1);
    let alternatives = ["7g.80gb", "3g.40gb", "1g.10gb"]
        .map(|name| Want { subrequest: Some(format!("as-{name}")), ..want(&snapshot.geometries, name) });
    let mut one = request("ns/p", vec![]);
    one.devices = vec![DeviceNeed { name: "gpu".into(), alternatives: alternatives.to_vec() }];
    snapshot.requests = vec![one.clone(), one.clone(), one];
    snapshot.nodes[0].gpus[0].instances = vec![instance(&a100(), "1g.10gb", 0, InstanceState::Taken)];
    let plan = legal_plan(&snapshot);
    let taken: Vec<_> = plan.placements.iter().map(|p| p.devices[0].subrequest.as_deref().unwrap()).collect();
    assert_eq!(taken, ["as-3g.40gb", "as-1g.10gb", "as-1g.10gb"]);
}

#[test]
fn several_devices_go_together_or_not_at_all() {
    let geometry = a100();
    let mut snapshot = cluster(&geometry, 1);
    snapshot.nodes.push(node("n1", vec![gpu("GPU-9", 0, &geometry)]));
    let wants = ["4g.40gb", "2g.20gb", "1g.10gb"].map(|name| want(&snapshot.geometries, name));
    snapshot.requests = vec![request("ns/a", wants.to_vec()), request("ns/b", wants.to_vec())];
    let plan = legal_plan(&snapshot);
    assert_eq!(plan.placements.len(), 2);
    assert_ne!(plan.placements[0].node, plan.placements[1].node);

    let two = vec![want(&snapshot.geometries, "4g.40gb"); 2];
    snapshot.requests = vec![request("ns/c", two)];
    let (kind, message) = refused(&self::plan(&snapshot));
    assert_eq!(kind, RefusalKind::NoRoom);
    assert_eq!(
        message,
        "needs 4g.40gb and 4g.40gb on one node: 2 GPUs have room for one of them, no node for all; \
         no node could take it even if all that runs ended"
    );
}

#[test]
fn constraints_hold_over_gpus() {
    let geometry = a100();
    let mut snapshot = cluster(&geometry, 2);
    let uuid = |gpu: usize| ((0, gpu), format!("GPU-{gpu}"));
    let mut one = request("ns/p", vec![want(&snapshot.geometries, "1g.10gb"); 2]);
    for (kind, gpus) in [(ConstraintKind::Same, 1), (ConstraintKind::Distinct, 2)] {
        one.constraints = vec![Constraint { requests: [].into(), kind, values: [uuid(0), uuid(1)].into() }];
        snapshot.requests = vec![one.clone()];
        let plan = legal_plan(&snapshot);
        let mut used: Vec<usize> = plan.placements[0].devices.iter().map(|d| d.gpu).collect();
        used.dedup();
        assert_eq!(used.len(), gpus, "{kind:?}");
    }
    one.constraints[0].values.remove(&(0, 1));
    snapshot.requests = vec![one];
    assert_eq!(
        refused(&plan(&snapshot)).1,
        "needs 1g.10gb and 1g.10gb on one node and as its constraints ask: \
         2 GPUs have room for one of them, no node for all; no node could take it even if all that runs ended"
    );
}

#[test]
fn refusals_say_what_is_missing() {
    let geometry = a100();
    let mut snapshot = asking(cluster(&geometry, 5), &["3g.40gb"]);
    for (i, gpu) in snapshot.nodes[0].gpus.iter_mut().enumerate() {
        gpu.instances = match i {
            0..4 => vec![
                instance(&geometry, "1g.10gb", 1, InstanceState::Taken),
                instance(&geometry, "1g.10gb", 5, InstanceState::Taken),
            ],
            _ => vec![instance(&geometry, "7g.80gb", 0, InstanceState::Taken)],
        };
    }
    let message = |snapshot: &Snapshot| refused(&plan(snapshot)).1;
    assert_eq!(
        message(&snapshot),
        "needs 3g.40gb: 4 GPUs have the memory free, none in one piece, 1 GPU has too little memory free"
    );
    snapshot.nodes[0].gpus[0].closed = Some("XID 79".into());
    snapshot.nodes[0].gpus[1].allowed.clear();
    snapshot.nodes[0].gpus[2].mig = Capability::No;
    assert_eq!(
        message(&snapshot),
        "needs 3g.40gb: 1 GPU has the memory free, but not in one piece, 1 GPU has too little memory free, \
         1 GPU is in the other MIG mode, and may not be switched, 1 GPU has a policy that does not allow it, \
         1 GPU is closed (XID 79)"
    );
    // Another OFA engine there is not, and slice 7 is of no use to a 1g.
    let mut engines = asking(cluster(&geometry, 1), &["1g.10gb+me"]);
    engines.nodes[0].gpus[0].instances = vec![instance(&geometry, "1g.10gb+me", 0, InstanceState::Taken)];
    assert_eq!(message(&engines), "needs 1g.10gb+me: 1 GPU has the memory free, but not the engines");
    let mut full = asking(cluster(&geometry, 1), &["1g.10gb"; 7]);
    full = carry_out(&full, &plan(&full));
    assert_eq!(message(&asking(full, &["1g.10gb"])), "needs 1g.10gb: 1 GPU has too little memory free");

    let nothing = asking(cluster(&geometry, 2), &["9g.999gb"]);
    let refusal = refused(&plan(&nothing));
    assert_eq!(refusal.0, RefusalKind::NoSuchDevice);
    assert_eq!(refusal.1, "needs 9g.999gb: none of the 2 GPUs of the cluster can provide it");
    let empty = Snapshot { requests: nothing.requests, ..Snapshot::default() };
    assert_eq!(message(&empty), "needs 9g.999gb: the cluster has no GPU that Kerf knows of");
    let mut forbidden = asking(cluster(&geometry, 1), &["1g.10gb"]);
    forbidden.nodes[0].gpus[0].allowed = [profile(&geometry, "7g.80gb")].into();
    let refusal = refused(&plan(&forbidden));
    assert_eq!(refusal.0, RefusalKind::NoSuchDevice);
    assert_eq!(refusal.1, "needs 1g.10gb: 1 GPU has a policy that does not allow it");
}

#[test]
fn refusals_say_which_nodes_do_not_fit() {
    let geometry = a100();
    let mut snapshot = asking(cluster(&geometry, 1), &["1g.10gb"]);
    snapshot.requests[0].pod.milli.insert("cpu".into(), 4000);
    snapshot.nodes[0].free_milli.insert("cpu".into(), 1500);
    let message = |snapshot: &Snapshot| refused(&plan(snapshot));
    let (kind, text) = message(&snapshot);
    assert_eq!(kind, RefusalKind::NodesDoNotFit);
    assert_eq!(
        text,
        "needs 1g.10gb: 1 GPU has room, but the node does not fit: 1 node lacks cpu (needs 4, 1.5 free)"
    );
    let mut tainted = node("n1", vec![gpu("GPU-8", 0, &geometry)]);
    tainted.taints = vec![Taint { key: "team".into(), value: "x".into(), effect: "NoSchedule".into() }];
    let cordoned = Node { unschedulable: true, ..node("n2", vec![gpu("GPU-9", 0, &geometry)]) };
    snapshot.nodes.push(tainted);
    snapshot.nodes.push(cordoned);
    assert_eq!(
        message(&snapshot).1,
        "needs 1g.10gb: 3 GPUs have room, but the nodes do not fit: 1 node lacks cpu (needs 4, 1.5 free), \
         1 node is cordoned, 1 node has the taint team=x:NoSchedule"
    );
}

#[test]
fn static_layouts_are_packed_exactly() {
    let geometry = a100();
    let of = |name| profile(&geometry, name);
    let starts = |wanted: &[(usize, u32, Option<u32>)]| {
        pack_layout(&geometry, wanted)
            .map(|places| places.iter().map(|&(_, start)| start).collect::<Vec<_>>())
    };
    assert_eq!(
        starts(&[(of("1g.10gb"), 2, None), (of("2g.20gb"), 1, None), (of("3g.40gb"), 1, None)]),
        Some(vec![2, 3, 0, 4])
    );
    assert_eq!(starts(&[(of("3g.40gb"), 3, None)]), None);
    assert_eq!(starts(&[(of("3g.40gb"), 2, None)]), Some(vec![0, 4]));
    // A stated start pushes the others aside.
    assert_eq!(starts(&[(of("3g.40gb"), 1, None), (of("1g.10gb"), 1, Some(2))]), Some(vec![4, 2]));
    assert_eq!(starts(&[(of("4g.40gb"), 1, Some(4))]), None);
    assert_eq!(starts(&[(of("1g.10gb+me"), 2, None)]), None);
    assert_eq!(starts(&[(of("1g.10gb"), u32::MAX, None)]), None);
    assert_eq!(starts(&[]), Some(vec![]));
}

#[test]
fn warm_instances_stay_where_they_are_and_disturb_nothing() {
    let geometry = a100();
    let mut snapshot = cluster(&geometry, 2);
    let small = profile(&geometry, "1g.10gb");
    snapshot.nodes[0].gpus[0].instances = vec![
        instance(&geometry, "3g.40gb", 0, InstanceState::Taken),
        instance(&geometry, "1g.10gb", 4, InstanceState::Warm),
        instance(&geometry, "1g.10gb", 6, InstanceState::Idle),
    ];
    let wish = |count| WarmWish { profiles: [(0, small)].into(), count, gpus: [(0, 0), (0, 1)].into() };
    let starts = |snapshot: &Snapshot, count| -> Vec<(usize, u32, bool)> {
        warm(snapshot, &plan(snapshot), &[wish(count)]).iter().map(|p| (p.gpu, p.start, p.exists)).collect()
    };
    assert_eq!(starts(&snapshot, 1), [(0, 4, true)]);
    assert_eq!(starts(&snapshot, 3), [(0, 4, true), (0, 6, true), (0, 5, false)]);
    // All of the second GPU as well, and no more than there is room for.
    assert_eq!(starts(&snapshot, 100).len(), 10);
    // A pod that takes the warm one in the same cycle has it, and another is made.
    let busy = asking(snapshot.clone(), &["1g.10gb", "1g.10gb"]);
    assert_eq!(starts(&busy, 1), [(0, 5, false)]);
    snapshot.nodes[0].unschedulable = true;
    assert_eq!(starts(&snapshot, 1), []);
}

#[test]
fn gpus_in_equal_states_are_told_apart_if_a_later_need_is_for_one_of_them() {
    let mut snapshot = cluster(&a100(), 2);
    for gpu in &mut snapshot.nodes[0].gpus {
        gpu.whole = Capability::Now;
    }
    let first = Want { gpus: Some([(0, 0)].into()), ..whole() };
    snapshot.requests = vec![request("ns/p", vec![whole(), first])];
    assert_eq!(places(&snapshot, &legal_plan(&snapshot)), ["1:whole", "0:whole"]);
}

#[test]
fn many_alternatives_that_cannot_be_met_are_given_up() {
    let mut snapshot = cluster(&a100(), 8);
    let alternatives = vec![want(&snapshot.geometries, "1g.10gb"); 8];
    let need = |i: usize| DeviceNeed { name: format!("r{i}"), alternatives: alternatives.clone() };
    // No GPU has a value for the constraint: a thousand million combinations, none of which has a first device.
    snapshot.requests = vec![Request {
        devices: (0..10).map(need).collect(),
        constraints: vec![Constraint::default()],
        ..request("ns/p", vec![])
    }];
    let refusal = refused(&legal_plan(&snapshot)).1;
    assert!(refusal.contains("given up after a set amount of work"), "{refusal}");
}
