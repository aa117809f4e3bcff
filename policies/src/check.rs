//! The one independent judge of plans: every rule of [`crate::snapshot`] checked the plain way, sharing nothing with the
//! code that plans except the rules about nodes. Tests use it as their oracle; a program that does not trust a plan can,
//! too.

use std::collections::BTreeMap;

use crate::nodes;
use crate::plan::{PlacedDevice, Placement, Plan, PlannedInstance, Room};
use crate::snapshot::{
    Capability, ConstraintKind, Geometry, Gpu, GpuIndex, Instance, InstanceState, NodeIndex, ProfileIndex,
    Request, Snapshot, Want,
};

/// Every rule that the plan breaks, a sentence each. Empty: the plan is legal.
pub fn violations(snapshot: &Snapshot, plan: &Plan) -> Vec<String> {
    let mut broken = Vec::new();
    answers(snapshot, plan, &mut broken);
    for room in &plan.rooms {
        may_move(snapshot, room, &mut broken);
    }
    let (after, places) = moved(snapshot, plan);
    legal(&after, &places, &mut broken);
    broken
}

/// Who is moved may be moved, and for this request.
fn may_move(snapshot: &Snapshot, room: &Room, broken: &mut Vec<String>) {
    let Some(request) = snapshot.requests.get(room.place.request) else { return };
    let mut wrong = |what: String| broken.push(format!("{}: {what}", request.id));
    let pods: Vec<usize> = room.moves.iter().map(|step| step.pod).collect();
    for (index, &pod) in pods.iter().enumerate() {
        let Some(movable) = snapshot.movable.get(pod) else {
            wrong(format!("there is no movable pod {pod}"));
            continue;
        };
        let id = &movable.request.id;
        if pods[..index].contains(&pod) {
            wrong(format!("{id} is moved twice"));
        }
        if movable.request.priority > request.priority {
            wrong(format!("{id}, which is moved, has the higher priority"));
        }
        if pods.len() > movable.most_moves as usize {
            wrong(format!("{id} is one of {} moves, at most {} are allowed", pods.len(), movable.most_moves));
        }
        if request.waited_seconds.is_none_or(|waited| waited < movable.after_seconds) {
            wrong(format!("{id} is moved before {} seconds", movable.after_seconds));
        }
    }
    if pods.is_empty() {
        wrong("room without moves".into());
    }
    for (budget, &allowed) in snapshot.budgets.iter().enumerate() {
        let of_it = |pod: &&usize| snapshot.movable.get(**pod).is_some_and(|m| m.budgets.contains(&budget));
        let number = pods.iter().filter(of_it).count();
        if number > allowed as usize {
            wrong(format!("{number} of disruption budget {budget} are moved, {allowed} are allowed"));
        }
    }
}

/// The cluster without those who move, as if they asked anew; and all places.
fn moved(snapshot: &Snapshot, plan: &Plan) -> (Snapshot, Vec<Placement>) {
    let mut after = snapshot.clone();
    let mut places = plan.placements.clone();
    for room in &plan.rooms {
        places.push(room.place.clone());
        for step in &room.moves {
            let Some(movable) = snapshot.movable.get(step.pod) else { continue };
            let node = &mut after.nodes[movable.node];
            for (resource, milli) in &movable.request.pod.milli {
                if let Some(free) = node.free_milli.get_mut(resource) {
                    *free += milli;
                }
            }
            for device in &movable.devices {
                let gpu = &mut node.gpus[device.gpu];
                match device.instance {
                    None => gpu.taken_whole = false,
                    Some(held) => {
                        let here = |one: &&mut Instance| {
                            one.profile == Some(held.profile) && one.start == held.start
                        };
                        if let Some(instance) = gpu.instances.iter_mut().find(here) {
                            instance.state = InstanceState::Idle;
                        }
                    }
                }
            }
            let request = after.requests.len();
            after.requests.push(movable.request.clone());
            places.push(Placement { request, node: step.node, devices: step.devices.clone() });
        }
    }
    (after, places)
}

fn legal(snapshot: &Snapshot, places: &[Placement], broken: &mut Vec<String>) {
    for placement in places {
        let Some(request) = snapshot.requests.get(placement.request) else { continue };
        if snapshot.nodes.get(placement.node).is_none() {
            broken.push(format!("{}: there is no node {}", request.id, placement.node));
            continue;
        }
        node_takes(snapshot, request, placement, broken);
        needs_met(snapshot, request, placement, broken);
        constraints_met(request, placement, broken);
    }
    for (n, node) in snapshot.nodes.iter().enumerate() {
        resources(snapshot, places, n, broken);
        for g in 0..node.gpus.len() {
            gpu(snapshot, places, n, g, broken);
        }
    }
}

fn answers(snapshot: &Snapshot, plan: &Plan, broken: &mut Vec<String>) {
    let mut answered: BTreeMap<usize, u32> = BTreeMap::new();
    let placed = plan.placements.iter().map(|placement| placement.request);
    let with_room = plan.rooms.iter().map(|room| room.place.request);
    for request in placed.chain(with_room).chain(plan.refusals.iter().map(|refusal| refusal.request)) {
        *answered.entry(request).or_default() += 1;
    }
    for request in 0..snapshot.requests.len() {
        match answered.remove(&request).unwrap_or(0) {
            1 => {}
            times => broken.push(format!("request {request} is answered {times} times")),
        }
    }
    broken.extend(answered.keys().map(|request| format!("there is no request {request}")));
    let placed: Vec<usize> = plan.placements.iter().map(|placement| placement.request).collect();
    let mut gangs: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (index, request) in snapshot.requests.iter().enumerate() {
        if let Some(gang) = &request.gang {
            let (members, with_place) = gangs.entry(gang).or_default();
            *members += 1;
            *with_place += usize::from(placed.contains(&index));
        }
    }
    for (gang, (members, with_place)) in
        gangs.into_iter().filter(|(_, (all, placed))| ![0, *all].contains(placed))
    {
        broken.push(format!("{with_place} of the {members} members of gang {gang} are placed"));
    }
}

fn node_takes(snapshot: &Snapshot, request: &Request, placement: &Placement, broken: &mut Vec<String>) {
    let node = &snapshot.nodes[placement.node];
    if let Some(misfit) = nodes::unsuitable(node, &request.pod) {
        broken.push(format!("{}: {} cannot take it: {misfit:?}", request.id, node.name));
    }
    if request.avoid.contains(&placement.node) {
        broken.push(format!("{}: {} was to be avoided", request.id, node.name));
    }
}

/// The devices serve the needs one after the other, each by one of its alternatives.
fn needs_met(snapshot: &Snapshot, request: &Request, placement: &Placement, broken: &mut Vec<String>) {
    let mut devices = placement.devices.as_slice();
    for need in &request.devices {
        let named = devices.iter().take_while(|device| device.request == need.name).count();
        let serves = |want: &&Want| {
            let count = want.count as usize;
            count <= named
                && devices[..count].iter().all(|device| serves(snapshot, placement.node, want, device))
        };
        match need.alternatives.iter().find(serves) {
            Some(want) => devices = &devices[want.count as usize..],
            None => {
                broken.push(format!("{}: {} is not met by {devices:?}", request.id, need.name));
                return;
            }
        }
    }
    if !devices.is_empty() {
        broken.push(format!("{}: got more than it wants: {devices:?}", request.id));
    }
}

fn serves(snapshot: &Snapshot, node: NodeIndex, want: &Want, device: &PlacedDevice) -> bool {
    let Some(gpu) = snapshot.nodes[node].gpus.get(device.gpu) else { return false };
    let listed = want.gpus.as_ref().is_none_or(|gpus| gpus.contains(&(node, device.gpu)));
    let kind = match device.instance {
        None => want.whole,
        Some(instance) => gpu
            .geometry
            .and_then(|geometry| want.profiles.get(&geometry))
            .is_some_and(|profiles| profiles.contains(&instance.profile)),
    };
    listed && kind && want.subrequest == device.subrequest
}

fn constraints_met(request: &Request, placement: &Placement, broken: &mut Vec<String>) {
    for (index, constraint) in request.constraints.iter().enumerate() {
        let concerned = placement.devices.iter().filter(|device| {
            let full = device.subrequest.as_ref().map(|sub| format!("{}/{sub}", device.request));
            constraint.requests.is_empty()
                || constraint.requests.contains(&device.request)
                || full.is_some_and(|full| constraint.requests.contains(&full))
        });
        let values: Vec<Option<&String>> =
            concerned.map(|device| constraint.values.get(&(placement.node, device.gpu))).collect();
        let mut different = values.clone();
        different.sort();
        different.dedup();
        let holds = !values.contains(&None)
            && match constraint.kind {
                ConstraintKind::Same => different.len() <= 1,
                ConstraintKind::Distinct => different.len() == values.len(),
            };
        if !holds {
            broken.push(format!("{}: constraint {index} does not hold for {values:?}", request.id));
        }
    }
}

fn resources(snapshot: &Snapshot, places: &[Placement], node: NodeIndex, broken: &mut Vec<String>) {
    let mut used: BTreeMap<&str, i128> = BTreeMap::new();
    for placement in places.iter().filter(|placement| placement.node == node) {
        let Some(request) = snapshot.requests.get(placement.request) else { continue };
        for (resource, milli) in &request.pod.milli {
            *used.entry(resource).or_default() += milli;
        }
    }
    let node = &snapshot.nodes[node];
    for (resource, used) in used.into_iter().filter(|&(_, used)| used > 0) {
        let free = node.free_milli.get(resource).copied().unwrap_or(0);
        if used > free {
            broken.push(format!("{}: {used} of {free} thousandths of {resource} used", node.name));
        }
    }
}

/// What is placed on one GPU fits together with what is taken there.
fn gpu(
    snapshot: &Snapshot,
    places: &[Placement],
    node: NodeIndex,
    index: GpuIndex,
    broken: &mut Vec<String>,
) {
    let gpu = &snapshot.nodes[node].gpus[index];
    let here = places.iter().filter(|placement| placement.node == node);
    let placed: Vec<&PlacedDevice> =
        here.flat_map(|placement| &placement.devices).filter(|device| device.gpu == index).collect();
    if placed.is_empty() {
        return;
    }
    let mut wrong =
        |what: String| broken.push(format!("{} on {}: {what}", gpu.uuid, snapshot.nodes[node].name));
    if let Some(reason) = &gpu.closed {
        wrong(format!("it is closed: {reason}"));
    }
    if gpu.taken_whole {
        wrong("it is somebody's as a whole".into());
    }
    let whole = placed.iter().any(|device| device.instance.is_none());
    let switch = if whole { gpu.whole } else { gpu.mig } == Capability::AfterSwitch;
    if let Some(reason) = gpu.stuck.as_ref().filter(|_| switch) {
        wrong(format!("its MIG mode cannot be switched now: {reason}"));
    }
    let taken = || gpu.instances.iter().filter(|instance| instance.state == InstanceState::Taken);
    if whole {
        if placed.len() > 1 || taken().next().is_some() {
            wrong("handed out whole, and not alone".into());
        }
        if gpu.whole == Capability::No {
            wrong("it cannot be handed out whole".into());
        }
        return;
    }
    if gpu.mig == Capability::No {
        wrong("it cannot have instances".into());
    }
    if gpu.mig == Capability::AfterSwitch && taken().any(|instance| instance.exists) {
        wrong("its MIG mode is to be switched with something on it".into());
    }
    let Some(geometry) = gpu.geometry.and_then(|geometry| snapshot.geometries.get(geometry)) else {
        wrong("it has no geometry".into());
        return;
    };
    let mut spans: Vec<(u32, u32)> =
        taken().map(|instance| (instance.start, instance.start + instance.size)).collect();
    let mut profiles: Vec<ProfileIndex> = taken().filter_map(|instance| instance.profile).collect();
    for instance in placed.iter().filter_map(|device| device.instance) {
        match geometry.profiles.get(instance.profile) {
            Some(profile) if profile.starts.contains(&instance.start) => {
                spans.push((instance.start, instance.start + profile.size));
                profiles.push(instance.profile);
            }
            _ => wrong(format!("no such placement: {instance:?}")),
        }
        if !gpu.allowed.contains(&instance.profile) {
            wrong(format!("the policy does not allow {instance:?}"));
        }
        free_instance(gpu, instance, &mut wrong);
    }
    for (i, a) in spans.iter().enumerate() {
        if a.1 > geometry.memory_slices {
            wrong(format!("{a:?} ends beyond its slices"));
        }
        for b in spans[i + 1..].iter().filter(|b| a.0 < b.1 && b.0 < a.1) {
            wrong(format!("{a:?} and {b:?} overlap"));
        }
    }
    budgets(geometry, &profiles, &mut wrong);
}

/// An instance is said to exist exactly if it does, and a stated layout is kept.
fn free_instance(gpu: &Gpu, planned: PlannedInstance, wrong: &mut impl FnMut(String)) {
    let there = gpu.instances.iter().find(|instance| {
        instance.state != InstanceState::Taken
            && instance.profile == Some(planned.profile)
            && instance.start == planned.start
    });
    if planned.exists && !there.is_some_and(|instance| instance.exists) {
        wrong(format!("{planned:?} does not exist"));
    }
    if let Some(reason) = &gpu.stuck
        && !there.is_some_and(|instance| instance.exists)
    {
        wrong(format!("nothing can be made on it: {reason}"));
    }
    if gpu.fixed && there.is_none() {
        wrong(format!("{planned:?} is not in its stated layout"));
    }
}

fn budgets(geometry: &Geometry, profiles: &[ProfileIndex], wrong: &mut impl FnMut(String)) {
    let used = |engine: fn(&crate::snapshot::Engines) -> u32| -> u32 {
        profiles
            .iter()
            .filter_map(|&p| geometry.profiles.get(p))
            .map(|profile| engine(&profile.engines))
            .sum()
    };
    let all = &geometry.engines;
    for (name, used, all) in [
        ("decoders", used(|e| e.decoder), all.decoder),
        ("encoders", used(|e| e.encoder), all.encoder),
        ("JPEG engines", used(|e| e.jpeg), all.jpeg),
        ("OFA engines", used(|e| e.ofa), all.ofa),
    ] {
        if used > all {
            wrong(format!("{used} of {all} {name} used"));
        }
    }
    for (index, profile) in geometry.profiles.iter().enumerate() {
        let number = profiles.iter().filter(|&&p| p == index).count();
        if number > profile.max_instances as usize {
            wrong(format!("{number} of {}, at most {} fit", profile.name, profile.max_instances));
        }
    }
}
