//! The one independent judge of plans: every rule of [`crate::snapshot`] checked the plain way, sharing nothing with the
//! code that plans except the rules about nodes. Tests use it as their oracle; a program that does not trust a plan can,
//! too.

mod proof;

use std::collections::{BTreeMap, BTreeSet};

use crate::nodes;
use crate::plan::{PlacedDevice, Placement, Plan, PlannedInstance, Room};
use crate::snapshot::{
    Capability, ConstraintKind, DeviceNeed, Geometry, Gpu, GpuIndex, Instance, InstanceState, NodeIndex,
    Portion, ProfileIndex, Request, Snapshot, TakenShare, Want,
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
    proof::hold(snapshot, plan, &mut broken);
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
            let Some(node) = after.nodes.get_mut(movable.node) else { continue };
            for (resource, milli) in &movable.request.pod.milli {
                if let Some(free) = node.free_milli.get_mut(resource) {
                    *free = free.saturating_add(*milli);
                }
            }
            for device in &movable.devices {
                let Some(gpu) = node.gpus.get_mut(device.gpu) else { continue };
                if let Some(portion) = device.share {
                    let instance = device.instance.map(|held| (held.profile, held.start));
                    let share = TakenShare { instance, portion };
                    if let Some(index) = gpu.shares.iter().position(|one| *one == share) {
                        gpu.shares.remove(index);
                    }
                    if gpu.shares_there().any(|one| one.instance == instance) {
                        continue;
                    }
                }
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
    match met(snapshot, placement.node, &request.devices, &placement.devices) {
        Ok(()) => {}
        Err((Some(need), devices)) => {
            broken.push(format!("{}: {need} is not met by {devices:?}", request.id));
        }
        Err((None, devices)) => broken.push(format!("{}: got more than it wants: {devices:?}", request.id)),
    }
}

/// Needs may have one name, so it is tried with each number of devices that would do for the first of them.
fn met<'a>(
    snapshot: &Snapshot,
    node: NodeIndex,
    needs: &'a [DeviceNeed],
    devices: &'a [PlacedDevice],
) -> Result<(), (Option<&'a str>, &'a [PlacedDevice])> {
    let Some((need, others)) = needs.split_first() else {
        return if devices.is_empty() { Ok(()) } else { Err((None, devices)) };
    };
    let named = devices.iter().take_while(|device| device.request == need.name).count();
    let counts: BTreeSet<usize> = need
        .alternatives
        .iter()
        .filter(|want| {
            let count = want.count as usize;
            count <= named && devices[..count].iter().all(|device| serves(snapshot, node, want, device))
        })
        .map(|want| want.count as usize)
        .collect();
    let mut failed = Err((Some(need.name.as_str()), devices));
    for count in counts {
        failed = met(snapshot, node, others, &devices[count..]);
        if failed.is_ok() {
            break;
        }
    }
    failed
}

fn serves(snapshot: &Snapshot, node: NodeIndex, want: &Want, device: &PlacedDevice) -> bool {
    let Some(gpu) = snapshot.nodes[node].gpus.get(device.gpu) else { return false };
    let listed = want.gpus.as_ref().is_none_or(|gpus| gpus.contains(&(node, device.gpu)));
    let carrier = device.instance.map(|instance| instance.profile);
    let kind = match device.instance {
        _ if device.share.is_some() => {
            gpu.geometry.and_then(|geometry| want.shares.get(&(geometry, carrier))) == device.share.as_ref()
        }
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
            let used = used.entry(resource).or_default();
            *used = used.saturating_add(*milli);
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
    let itself = placed.iter().any(|device| device.instance.is_none());
    let whole = placed.iter().any(|device| device.instance.is_none() && device.share.is_none());
    let mode = match (whole, itself) {
        (true, _) => gpu.whole,
        (false, true) => gpu.shared,
        (false, false) => gpu.mig,
    };
    let switch = mode == Capability::AfterSwitch;
    if let Some(reason) = gpu.stuck.as_ref().filter(|_| switch) {
        wrong(format!("its MIG mode cannot be switched now: {reason}"));
    }
    let taken = || gpu.instances.iter().filter(|instance| instance.state == InstanceState::Taken);
    shares(gpu, &placed, &mut wrong);
    if whole {
        if placed.len() > 1 || taken().next().is_some() || gpu.shares_there().next().is_some() {
            wrong("handed out whole, and not alone".into());
        }
        if gpu.whole == Capability::No {
            wrong("it cannot be handed out whole".into());
        }
        return;
    }
    if itself {
        if placed.iter().any(|device| device.instance.is_some()) || taken().next().is_some() {
            wrong("it carries shares, and not only shares".into());
        }
        if gpu.shared == Capability::No {
            wrong("it cannot carry shares".into());
        }
        return;
    }
    if gpu.mig == Capability::No {
        wrong("it cannot have instances".into());
    }
    if gpu.shares_there().any(|share| share.instance.is_none()) {
        wrong("it has instances beside shares of itself".into());
    }
    if gpu.mig == Capability::AfterSwitch && taken().any(|instance| instance.exists) {
        wrong("its MIG mode is to be switched with something on it".into());
    }
    let Some(geometry) = gpu.geometry.and_then(|geometry| snapshot.geometries.get(geometry)) else {
        wrong("it has no geometry".into());
        return;
    };
    let mut spans: Vec<(u32, u32)> =
        taken().map(|instance| (instance.start, instance.start.saturating_add(instance.size))).collect();
    let first = spans.len();
    let mut profiles: Vec<ProfileIndex> = taken().filter_map(|instance| instance.profile).collect();
    // Of several shares on one instance, the instance counts once; one that is there with shares is among the taken.
    let carries = |instance: PlannedInstance| {
        gpu.shares_there().any(|share| share.instance == Some((instance.profile, instance.start)))
    };
    let mut carriers: Vec<(ProfileIndex, u32)> = Vec::new();
    for device in &placed {
        let Some(instance) = device.instance else { continue };
        if device.share.is_some() {
            if carries(instance) || carriers.contains(&(instance.profile, instance.start)) {
                continue;
            }
            carriers.push((instance.profile, instance.start));
        }
        match geometry.profiles.get(instance.profile) {
            Some(profile) if profile.starts.contains(&instance.start) => {
                spans.push((instance.start, instance.start.saturating_add(profile.size)));
                profiles.push(instance.profile);
            }
            _ => wrong(format!("no such placement: {instance:?}")),
        }
        if !gpu.allowed.contains(&instance.profile) {
            wrong(format!("the policy does not allow {instance:?}"));
        }
        free_instance(gpu, instance, &mut wrong);
    }
    // What is taken already is not the plan's doing.
    for (i, a) in spans.iter().enumerate().skip(first) {
        if a.1 > geometry.memory_slices {
            wrong(format!("{a:?} ends beyond its slices"));
        }
        for b in spans[..i].iter().filter(|b| a.0 < b.1 && b.0 < a.1) {
            wrong(format!("{b:?} and {a:?} overlap"));
        }
    }
    let of_plan = placed.iter().filter_map(|device| Some(device.instance?.profile)).collect();
    budgets(geometry, &profiles, &of_plan, &mut wrong);
}

/// On no carrier do shares take more than it has for them.
fn shares(gpu: &Gpu, placed: &[&PlacedDevice], wrong: &mut impl FnMut(String)) {
    let mut used: BTreeMap<Option<(ProfileIndex, u32)>, Vec<Portion>> = BTreeMap::new();
    let here = placed.iter().filter_map(|device| {
        Some((device.instance.map(|instance| (instance.profile, instance.start)), device.share?))
    });
    for (carrier, portion) in here {
        let before = gpu.shares_there().filter(|share| share.instance == carrier);
        let portions = used.entry(carrier).or_insert_with(|| before.map(|share| share.portion).collect());
        portions.push(portion);
    }
    let agree = |(one, other): (&&&PlacedDevice, &&&PlacedDevice)| {
        let place = |device: &PlacedDevice| device.instance.map(|held| (held.profile, held.start));
        place(one) != place(other) || one.instance == other.instance
    };
    let shares: Vec<_> = placed.iter().filter(|device| device.share.is_some()).collect();
    if !shares.iter().zip(shares.iter().skip(1)).all(agree) {
        wrong("one carrier is said to exist and not to exist".into());
    }
    for (carrier, portions) in used {
        let Some(room) = gpu.share_room.get(&carrier.map(|(profile, _)| profile)) else {
            wrong(format!("{carrier:?} may not carry shares"));
            continue;
        };
        if gpu.equal_shares && portions.last() != portions.first() {
            wrong(format!("shares of {carrier:?} are not of one size"));
        }
        let sum = |of: fn(&Portion) -> u64| portions.iter().map(|one| u128::from(of(one))).sum::<u128>();
        for (what, used, all) in [
            ("bytes", sum(|one| one.memory_bytes), room.memory_bytes),
            ("thousandths of compute", sum(|one| one.compute_milli), room.compute_milli),
            ("clients", sum(|one| one.clients.max(1).into()), room.clients.into()),
        ] {
            if used > u128::from(all) {
                wrong(format!("shares of {carrier:?} take {used} {what} of {all}"));
            }
        }
    }
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

fn budgets(
    geometry: &Geometry,
    profiles: &[ProfileIndex],
    of_plan: &BTreeSet<ProfileIndex>,
    wrong: &mut impl FnMut(String),
) {
    let used = |engine: fn(&crate::snapshot::Engines) -> u32| -> u64 {
        profiles
            .iter()
            .filter_map(|&p| geometry.profiles.get(p))
            .map(|profile| u64::from(engine(&profile.engines)))
            .sum()
    };
    let all = &geometry.engines;
    for (name, used, all) in [
        ("decoders", used(|e| e.decoder), all.decoder),
        ("encoders", used(|e| e.encoder), all.encoder),
        ("JPEG engines", used(|e| e.jpeg), all.jpeg),
        ("OFA engines", used(|e| e.ofa), all.ofa),
    ] {
        if used > all.into() {
            wrong(format!("{used} of {all} {name} used"));
        }
    }
    let of_plan = of_plan.iter().filter_map(|&index| Some((index, geometry.profiles.get(index)?)));
    for (index, profile) in of_plan {
        let number = profiles.iter().filter(|&&p| p == index).count();
        if number > profile.max_instances as usize {
            wrong(format!("{number} of {}, at most {} fit", profile.name, profile.max_instances));
        }
    }
}
