//! Why a request has no place: one sentence with the evidence in numbers, so that it can be checked with kubectl.

use std::collections::{BTreeMap, BTreeSet};

use crate::bound;
use crate::fleet::{Fleet, Numbered};
use crate::nodes::Misfit;
use crate::occupancy::{Device, GpuState, Occupancy, slices};
use crate::place::Answer;
use crate::plan::{Certificate, Refusal, RefusalKind, Scope, Verdict};
use crate::share;
use crate::snapshot::{Capability, Carrier, DeviceNeed, Geometry, Gpu, GpuIndex, NodeIndex, Portion, Want};

/// Reasons of one kind that are listed one by one; the rest is only counted.
const LISTED: usize = 3;

/// What keeps a GPU from serving a need, the most hopeful first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Obstacle {
    /// None.
    Room,
    /// Enough memory slices are free, but no placement is.
    InPieces,
    /// A placement is free, but not the engines, or there are as many as a GPU can have.
    Engines,
    /// Too few memory slices are free, or too little room for shares.
    Full,
    /// A whole GPU is wanted and something is in use on it, or instances are wanted and it is used whole.
    InUse,
    /// The stated layout has no free one.
    Layout,
    /// MIG mode is the other, and may not be switched.
    Mode,
    /// The policy does not allow the profile.
    Policy,
    /// Nothing can be made on it now, see [`Gpu::stuck`].
    Stuck,
    /// Closed, see [`Gpu::closed`].
    Closed,
    /// The GPU is of the wrong kind.
    Unable,
}

/// The refusal of a request for which [`Fleet::best`] found nothing beside so many placements.
pub fn refusal(fleet: &mut Fleet<'_>, index: usize, asked: Numbered<'_>, beside: usize) -> Refusal {
    let mut refusal = without_proof(fleet, index, asked);
    if let Some(proof) = bound::certificate(fleet, &[asked], beside) {
        if proof.scope == Scope::WhateverEnds && refusal.kind != RefusalKind::NoSuchDevice {
            refusal.message += "; no node could take it even if all that runs ended";
        }
        refusal.verdict = Verdict::Impossible(proof);
    }
    refusal
}

/// What is known of a gang that has no place, for people.
pub fn verdict_text(verdict: &Verdict) -> String {
    let alike = |proof: &Certificate| proof.weights.iter().all(|&weight| weight == 1);
    match verdict {
        Verdict::Impossible(proof) if proof.scope == Scope::WhateverEnds => match alike(proof) {
            true => format!("there is room for at most {} of them even if all that runs ended", proof.room),
            false => "there is no room for all of them even if all that runs ended".into(),
        },
        Verdict::Impossible(proof) if alike(proof) => {
            format!("there is room for at most {} of them now, however they are placed", proof.room)
        }
        Verdict::Impossible(_) | Verdict::Exhausted => {
            "there is no room for all of them now, however they are placed".into()
        }
        Verdict::NotFound => "no other way to place them was found within a set amount of work".into(),
    }
}

/// The refusal, as far as it is known without a proof by a bound.
pub fn without_proof(fleet: &mut Fleet<'_>, index: usize, asked: Numbered<'_>) -> Refusal {
    let snapshot = fleet.snapshot;
    let request = asked.request;
    let refuse =
        |kind, message| Refusal { request: index, kind, message, verdict: Verdict::Exhausted, moves: None };
    for need in &request.devices {
        let gpus = obstacles(fleet, need);
        if !gpus.iter().any(|&(_, _, obstacle)| obstacle == Obstacle::Room) {
            let (kind, evidence) = without_room(fleet, &gpus);
            return refuse(kind, format!("needs {}: {evidence}", need_text(need)));
        }
    }
    let wanted = request.devices.iter().map(need_text).collect::<Vec<_>>().join(" and ");
    let (mut with_room, mut gave_up) = (Vec::new(), 0);
    for node in 0..snapshot.nodes.len() {
        match fleet.answer(asked, node) {
            Answer::Found(_) => with_room.push(node),
            Answer::GaveUp => gave_up += 1,
            Answer::Nothing => {}
        }
    }
    if with_room.is_empty() {
        let mut gpus = BTreeSet::new();
        for need in &request.devices {
            let open =
                obstacles(fleet, need).into_iter().filter(|&(_, _, obstacle)| obstacle == Obstacle::Room);
            gpus.extend(open.map(|(node, gpu, _)| (node, gpu)));
        }
        let conditions = if request.constraints.is_empty() { "" } else { " and as its constraints ask" };
        let mut evidence = format!("{} room for one of them, no node for all", have(gpus.len(), "GPU"));
        if gave_up > 0 {
            evidence += &format!(
                "; on {} the search was given up after a set amount of work",
                count(gave_up, "node")
            );
        }
        let message = format!("needs {wanted} on one node{conditions}: {evidence}");
        return Refusal { verdict: verdict(gave_up), ..refuse(RefusalKind::NoRoom, message) };
    }
    let mut gpus = BTreeSet::new();
    for need in &request.devices {
        let open = obstacles(fleet, need).into_iter();
        let here = open.filter(|(node, _, obstacle)| *obstacle == Obstacle::Room && with_room.contains(node));
        gpus.extend(here.map(|(node, gpu, _)| (node, gpu)));
    }
    let misfits = with_room.iter().filter_map(|&node| fleet.misfit(node, asked)).collect::<Vec<_>>();
    let their = if with_room.len() == 1 { "the node does not fit" } else { "the nodes do not fit" };
    let message =
        format!("needs {wanted}: {} room, but {their}: {}", have(gpus.len(), "GPU"), misfit_text(&misfits));
    Refusal { verdict: verdict(gave_up), ..refuse(RefusalKind::NodesDoNotFit, message) }
}

/// Where the search was given up on so many nodes.
fn verdict(gave_up: usize) -> Verdict {
    if gave_up > 0 { Verdict::NotFound } else { Verdict::Exhausted }
}

/// What keeps each GPU of the cluster from serving the need, by the most hopeful of its alternatives.
fn obstacles(fleet: &Fleet<'_>, need: &DeviceNeed) -> Vec<(NodeIndex, GpuIndex, Obstacle)> {
    let snapshot = fleet.snapshot;
    let mut all = Vec::new();
    for (node, contents) in snapshot.nodes.iter().enumerate() {
        for (index, gpu) in contents.gpus.iter().enumerate() {
            let state = fleet.state(node, index);
            let of = |want: &Want| {
                let other = want.gpus.as_ref().is_some_and(|set| !set.contains(&(node, index)));
                if other { Obstacle::Unable } else { obstacle(fleet, gpu, state, want) }
            };
            let best = need.alternatives.iter().map(of).min().unwrap_or(Obstacle::Unable);
            all.push((node, index, best));
        }
    }
    all
}

fn obstacle(fleet: &Fleet<'_>, gpu: &Gpu, state: &GpuState, want: &Want) -> Obstacle {
    let geometries = &fleet.snapshot.geometries;
    let as_whole = || {
        if gpu.closed.is_some() {
            Obstacle::Closed
        } else if state.whole_now() != Capability::No {
            Obstacle::Room
        } else if gpu.whole == Capability::AfterSwitch && gpu.stuck.is_some() {
            Obstacle::Stuck
        } else if gpu.whole == Capability::No {
            Obstacle::Mode
        } else {
            Obstacle::InUse
        }
    };
    let cut = || {
        let index = state.geometry?;
        let geometry = geometries.get(index)?;
        let wanted: Vec<usize> =
            want.profiles.get(&index)?.iter().copied().filter(|&p| p < geometry.profiles.len()).collect();
        (!wanted.is_empty())
            .then(|| wanted.into_iter().map(|p| instance_obstacle(fleet, gpu, state, geometry, p)).min())?
    };
    let whole = if want.whole { as_whole() } else { Obstacle::Unable };
    whole.min(cut().unwrap_or(Obstacle::Unable)).min(share_obstacle(fleet, gpu, state, want))
}

fn share_obstacle(fleet: &Fleet<'_>, gpu: &Gpu, state: &GpuState, want: &Want) -> Obstacle {
    let geometries = &fleet.snapshot.geometries;
    let of = |(carrier, portion): (Carrier, Portion)| {
        if gpu.closed.is_some() {
            return Obstacle::Closed;
        }
        let Some(room) = state.shares.room(carrier) else { return Obstacle::Policy };
        if !portion.fits(room, &Portion::default()) {
            return Obstacle::Unable;
        }
        let can = |carrier| state.can_give(geometries, Device::Share { carrier, portion });
        let Some(profile) = carrier else {
            return match state.shared_now() {
                _ if can(None) => Obstacle::Room,
                Capability::No if gpu.shared == Capability::No => Obstacle::Mode,
                Capability::No if state.shares.itself == Capability::No => Obstacle::Stuck,
                Capability::No => Obstacle::InUse,
                Capability::Now | Capability::AfterSwitch => Obstacle::Full,
            };
        };
        let geometry = state.geometry.and_then(|index| geometries.get(index));
        let Some(geometry) = geometry.filter(|geometry| profile < geometry.profiles.len()) else {
            return Obstacle::Unable;
        };
        if geometry.profiles[profile].starts.iter().any(|&start| can(Some((profile, start)))) {
            return Obstacle::Room;
        }
        // Room for a new instance would have been room for the share.
        instance_obstacle(fleet, gpu, state, geometry, profile)
    };
    share::on(&want.shares, state.geometry).map(of).min().unwrap_or(Obstacle::Unable)
}

fn instance_obstacle(
    fleet: &Fleet<'_>,
    gpu: &Gpu,
    state: &GpuState,
    geometry: &Geometry,
    profile: usize,
) -> Obstacle {
    if gpu.closed.is_some() {
        return Obstacle::Closed;
    }
    if !state.allowed.contains(&profile) {
        return Obstacle::Policy;
    }
    if state.mig_now() == Capability::No && gpu.mig == Capability::AfterSwitch && gpu.stuck.is_some() {
        return Obstacle::Stuck;
    }
    if state.mig_now() == Capability::No {
        return if gpu.mig == Capability::No { Obstacle::Mode } else { Obstacle::InUse };
    }
    let shape = &geometry.profiles[profile];
    let can = |&start: &u32| state.can_give(&fleet.snapshot.geometries, Device::Instance { profile, start });
    if shape.starts.iter().any(can) {
        return Obstacle::Room;
    }
    if gpu.stuck.is_some() {
        return Obstacle::Stuck;
    }
    if state.fixed {
        return Obstacle::Layout;
    }
    // Slices that no placement of the profile uses do not count as room for it.
    let of_use = shape.starts.iter().fold(0, |mask, &start| mask | slices(start, shape.size));
    if (of_use & !state.taken.slices).count_ones() < shape.size {
        return Obstacle::Full;
    }
    let slices_only = Occupancy { slices: state.taken.slices, ..Occupancy::empty(geometry) };
    let free = shape.starts.iter().any(|&start| slices_only.fits(geometry, profile, start));
    if free { Obstacle::Engines } else { Obstacle::InPieces }
}

/// Kind and evidence where no GPU has room for a need.
fn without_room(fleet: &Fleet<'_>, gpus: &[(NodeIndex, GpuIndex, Obstacle)]) -> (RefusalKind, String) {
    let number = |which: Obstacle| gpus.iter().filter(|(_, _, obstacle)| *obstacle == which).count();
    if number(Obstacle::Unable) == gpus.len() {
        let managed = match gpus.len() {
            0 => "the cluster has no GPU that Kerf knows of".to_owned(),
            1 => "the only GPU of the cluster cannot provide it".to_owned(),
            all => format!("none of the {all} GPUs of the cluster can provide it"),
        };
        return (RefusalKind::NoSuchDevice, managed);
    }
    let mut parts = Vec::new();
    let mut part = |which: Obstacle, one: &str, many: &str| match number(which) {
        0 => {}
        1 => parts.push(format!("1 GPU {one}")),
        n => parts.push(format!("{n} GPUs {many}")),
    };
    part(
        Obstacle::InPieces,
        "has the memory free, but not in one piece",
        "have the memory free, none in one piece",
    );
    part(
        Obstacle::Engines,
        "has the memory free, but not the engines",
        "have the memory free, but not the engines",
    );
    part(Obstacle::Full, "has too little memory free", "have too little memory free");
    part(Obstacle::InUse, "is in use", "are in use");
    part(Obstacle::Layout, "has none free in its stated layout", "have none free in their stated layouts");
    part(
        Obstacle::Mode,
        "is in the other MIG mode, and may not be switched",
        "are in the other MIG mode, and may not be switched",
    );
    part(Obstacle::Policy, "has a policy that does not allow it", "have policies that do not allow it");
    let reasons = |which: Obstacle, reason: fn(&Gpu) -> Option<&str>| -> Vec<&str> {
        let these = gpus.iter().filter(|(_, _, obstacle)| *obstacle == which);
        these.filter_map(|&(node, gpu, _)| reason(&fleet.snapshot.nodes[node].gpus[gpu])).collect()
    };
    let stuck = reasons(Obstacle::Stuck, |gpu| gpu.stuck.as_deref());
    if !stuck.is_empty() {
        parts.push(format!("{} cannot be reshaped now ({})", count(stuck.len(), "GPU"), tally(&stuck)));
    }
    let closed = reasons(Obstacle::Closed, |gpu| gpu.closed.as_deref());
    if !closed.is_empty() {
        let are = if closed.len() == 1 { "is" } else { "are" };
        parts.push(format!("{} {are} closed ({})", count(closed.len(), "GPU"), tally(&closed)));
    }
    let passes = [Obstacle::Stuck, Obstacle::Closed];
    let waits = gpus.iter().any(|(_, _, obstacle)| *obstacle < Obstacle::Mode || passes.contains(obstacle));
    let kind = if waits { RefusalKind::NoRoom } else { RefusalKind::NoSuchDevice };
    (kind, parts.join(", "))
}

/// `1 node lacks cpu (needs 2, 1.5 free), 2 nodes are cordoned`.
pub fn misfit_text(misfits: &[Misfit]) -> String {
    let mut groups: BTreeMap<(u8, String), (usize, Option<i128>, i128)> = BTreeMap::new();
    for misfit in misfits {
        let (order, key, free, needs) = match misfit {
            Misfit::Lacks { resource, needs, free } => (0, resource.clone(), *free, *needs),
            Misfit::Cordoned => (1, String::new(), None, 0),
            Misfit::Taint(taint) => (2, taint.clone(), None, 0),
            Misfit::NotSelected => (3, String::new(), None, 0),
            Misfit::NotReady => (4, String::new(), None, 0),
            Misfit::Avoided => (5, String::new(), None, 0),
        };
        let group = groups.entry((order, key)).or_insert((0, None, needs));
        group.0 += 1;
        group.1 = group.1.max(free);
    }
    let text = |((order, key), (number, free, needs)): ((u8, String), (usize, Option<i128>, i128))| {
        let nodes = count(number, "node");
        let one = number == 1;
        match order {
            0 => {
                let most = if one { "" } else { "at most " };
                let free =
                    free.map_or("none there".into(), |free| format!("{most}{} free", quantity(&key, free)));
                let lack = if one { "lacks" } else { "lack" };
                format!("{nodes} {lack} {key} (needs {}, {free})", quantity(&key, needs))
            }
            1 => format!("{nodes} {} cordoned", if one { "is" } else { "are" }),
            2 => format!("{nodes} {} the taint {key}", if one { "has" } else { "have" }),
            3 => format!("{nodes} {} not selected by the pod", if one { "is" } else { "are" }),
            4 => format!("{nodes} {} not ready", if one { "is" } else { "are" }),
            _ => format!("{nodes} could not run it a moment ago"),
        }
    };
    groups.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// `3g.40gb`, `2 of 1g.10gb`, `1g.10gb or 2g.20gb`.
fn need_text(need: &DeviceNeed) -> String {
    let one = |want: &Want| match want.count {
        1 => want.label.clone(),
        n => format!("{n} of {}", want.label),
    };
    match need.alternatives.as_slice() {
        [] => "a device that no class describes".into(),
        wants => wants.iter().map(one).collect::<Vec<_>>().join(" or "),
    }
}

/// `2 unmanaged, 1 lost`, the most frequent first.
fn tally(reasons: &[&str]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in reasons {
        *counts.entry(reason).or_default() += 1;
    }
    if let (1, Some(reason)) = (counts.len(), reasons.first()) {
        return (*reason).to_owned();
    }
    let mut sorted: Vec<(&str, usize)> = counts.into_iter().collect();
    sorted.sort_by_key(|&(reason, number)| (std::cmp::Reverse(number), reason));
    let rest: usize = sorted.iter().skip(LISTED).map(|(_, number)| number).sum();
    let mut text = sorted.iter().take(LISTED).map(|(reason, n)| format!("{n}: {reason}")).collect::<Vec<_>>();
    if rest > 0 {
        text.push(format!("{rest}: other reasons"));
    }
    text.join("; ")
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

fn have(number: usize, what: &str) -> String {
    format!("{} {}", count(number, what), if number == 1 { "has" } else { "have" })
}

/// An amount in thousandths, as people write it: `1.5`, `16Gi`.
fn quantity(resource: &str, milli: i128) -> String {
    let bytes = resource == "memory" || resource == "ephemeral-storage" || resource.starts_with("hugepages-");
    let (mut amount, mut unit) = (milli, "");
    if bytes {
        for (shift, name) in [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")] {
            if milli >= 1000 << shift {
                (amount, unit) = (milli >> shift, name);
                break;
            }
        }
    }
    let (whole, rest) = (amount / 1000, (amount % 1000).abs());
    let sign = if amount < 0 && whole == 0 { "-" } else { "" };
    let fraction = format!("{rest:03}");
    match fraction.trim_end_matches('0') {
        "" => format!("{sign}{whole}{unit}"),
        digits => format!("{sign}{whole}.{digits}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_as_people_write_them() {
        assert_eq!(quantity("cpu", 1500), "1.5");
        assert_eq!(quantity("cpu", 4000), "4");
        assert_eq!(quantity("cpu", -250), "-0.25");
        assert_eq!(quantity("memory", (16 * 1000) << 30), "16Gi");
        assert_eq!(quantity("memory", (1000 * 1536) << 20), "1.5Gi");
        assert_eq!(quantity("pods", 0), "0");
    }

    #[test]
    fn many_reasons_are_counted() {
        let reasons = ["lost", "other", "lost", "a", "b", "c"];
        assert_eq!(tally(&reasons), "2: lost; 1: a; 1: b; 2: other reasons");
        assert_eq!(tally(&["lost", "lost"]), "lost");
    }
}
