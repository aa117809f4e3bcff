//! Whether the proofs that a plan carries hold, see [`Certificate`]: what each node can take is worked out anew, by trying
//! all that fits on each GPU, and added up.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::nodes;
use crate::plan::{Certificate, Placement, Plan, Scope, Verdict};
use crate::shared::Shared;
use crate::snapshot::{
    Capability, ConstraintKind, Engines, Geometry, Gpu, GpuIndex, Instance, InstanceState, Node, NodeIndex,
    ProfileIndex, Request, Snapshot, TakenShare, Want,
};

/// Parts of a weight of one, see [`Certificate`]: any number that is divisible by many.
const PARTS: u128 = 720_720;
/// Most steps for a GPU, and for one request on a node. A proof that takes more is not accepted.
const WORK: u32 = 1_000_000;

/// Adds a sentence for each proof that does not hold.
pub fn hold(snapshot: &Snapshot, plan: &Plan, broken: &mut Vec<String>) {
    let mut checked: BTreeMap<&str, &Arc<Certificate>> = BTreeMap::new();
    for refusal in &plan.refusals {
        let Verdict::Impossible(proof) = &refusal.verdict else { continue };
        let Some(request) = snapshot.requests.get(refusal.request) else { continue };
        let members: Vec<&Request> = match &request.gang {
            None => vec![request],
            Some(gang) => {
                if checked.insert(gang, proof).is_some_and(|other| Arc::ptr_eq(other, proof)) {
                    continue;
                }
                snapshot.requests.iter().filter(|other| other.gang == request.gang).collect()
            }
        };
        if let Err(wrong) = holds(snapshot, &plan.placements, &members, proof) {
            broken.push(format!("{}: that it is impossible is not proven: {wrong}", request.id));
        }
    }
}

fn holds(
    snapshot: &Snapshot,
    placements: &[Placement],
    members: &[&Request],
    proof: &Certificate,
) -> Result<(), String> {
    if proof.weights.len() != members.len() {
        return Err(format!("{} weights for {} members", proof.weights.len(), members.len()));
    }
    let shares = |request: &&&Request| {
        request.devices.iter().flat_map(|need| &need.alternatives).any(|want| !want.shares.is_empty())
    };
    if let Some(request) = members.iter().find(shares) {
        return Err(format!("{} asks for shares, of which nothing can be proven", request.id));
    }
    let all: u128 = proof.weights.iter().map(|&weight| u128::from(weight)).sum();
    if proof.room >= all {
        return Err(format!("the members weigh {all}, and there is room for {}", proof.room));
    }
    let nodes = match proof.scope {
        Scope::WhateverEnds => snapshot.nodes.iter().map(emptied).collect(),
        Scope::Beside(first) => match placements.get(..first) {
            Some(before) => beside(snapshot, before),
            None => return Err(format!("the plan has no {first} placements")),
        },
    };
    let mut kinds: Vec<Kind<'_>> = Vec::new();
    for (&request, &weight) in members.iter().zip(&proof.weights) {
        let alike = |kind: &&mut Kind<'_>| {
            let other = kind.request;
            kind.weight == u128::from(weight)
                && other.devices == request.devices
                && other.constraints == request.constraints
                && other.pod == request.pod
                && other.avoid == request.avoid
        };
        match kinds.iter_mut().find(alike) {
            Some(kind) => kind.number += 1,
            None => kinds.push(Kind { request, weight: weight.into(), number: 1 }),
        }
    }
    kinds.retain(|kind| kind.weight > 0);
    let mut room = 0u128;
    for (index, node) in nodes.iter().enumerate() {
        let here = Here { snapshot, index, node, whatever_ends: proof.scope == Scope::WhateverEnds };
        room = here.most(&kinds).saturating_add(room);
        if room > proof.room {
            return Err(format!("the first {} nodes have room for {room}, not {}", index + 1, proof.room));
        }
    }
    Ok(())
}

/// The node if nothing ran on it and nothing was wrong with it.
fn emptied(node: &Node) -> Node {
    let mut node = Node { ready: true, unschedulable: false, ..node.clone() };
    for gpu in &mut node.gpus {
        (gpu.closed, gpu.stuck, gpu.taken_whole) = (None, None, false);
        gpu.shares.clear();
        gpu.instances.retain(|_| gpu.fixed);
        gpu.instances.iter_mut().for_each(|instance| instance.state = InstanceState::Idle);
    }
    node
}

/// The nodes once these are placed.
fn beside(snapshot: &Snapshot, placements: &[Placement]) -> Shared<Node> {
    let mut nodes = snapshot.nodes.clone();
    for placement in placements {
        let (Some(node), Some(request)) =
            (nodes.get_mut(placement.node), snapshot.requests.get(placement.request))
        else {
            continue;
        };
        for (resource, needs) in &request.pod.milli {
            if let Some(free) = node.free_milli.get_mut(resource) {
                *free = free.saturating_sub(*needs.max(&0));
            }
        }
        for device in &placement.devices {
            let Some(gpu) = node.gpus.get_mut(device.gpu) else { continue };
            if let Some(portion) = device.share {
                let instance = device.instance.map(|planned| (planned.profile, planned.start));
                let carries = gpu.shares.iter().any(|share| share.instance == instance);
                gpu.shares.push(TakenShare { instance, portion });
                if carries || instance.is_none() {
                    continue;
                }
            }
            let Some(planned) = device.instance else {
                gpu.taken_whole = true;
                continue;
            };
            gpu.mig = Capability::Now;
            let geometry = gpu.geometry.and_then(|geometry| snapshot.geometries.get(geometry));
            let Some(shape) = geometry.and_then(|geometry| geometry.profiles.get(planned.profile)) else {
                continue;
            };
            let end = planned.start.saturating_add(shape.size);
            gpu.instances.retain(|one| {
                let beyond = one.start >= end || one.start.saturating_add(one.size) <= planned.start;
                one.state == InstanceState::Taken || beyond
            });
            gpu.instances.push(Instance {
                profile: Some(planned.profile),
                start: planned.start,
                size: shape.size,
                state: InstanceState::Taken,
                exists: true,
            });
        }
    }
    nodes
}

/// Members that are alike.
struct Kind<'r> {
    request: &'r Request,
    weight: u128,
    number: u128,
}

/// A node, as it is for the proof.
struct Here<'s> {
    snapshot: &'s Snapshot,
    index: NodeIndex,
    node: &'s Node,
    whatever_ends: bool,
}

impl Here<'_> {
    /// The most that it can take.
    fn most(&self, kinds: &[Kind<'_>]) -> u128 {
        let copies: Vec<u128> = kinds.iter().map(|kind| self.copies(kind.request).min(kind.number)).collect();
        let here: Vec<(&Kind<'_>, u128)> =
            kinds.iter().zip(copies).filter(|&(_, copies)| copies > 0).collect();
        let alone = here.iter().map(|(kind, copies)| kind.weight * copies).sum::<u128>();
        let by_devices = self.by_devices(&here);
        alone.min(by_devices).min(self.by_resources(&here))
    }

    /// By the devices of each GPU, between which weights are shared out.
    fn by_devices(&self, here: &[(&Kind<'_>, u128)]) -> u128 {
        let mut worth: Vec<(&Want, u128)> = Vec::new();
        for (kind, _) in here {
            let needs = &kind.request.devices;
            for want in needs.iter().flat_map(|need| &need.alternatives) {
                let devices = needs.len() as u128 * u128::from(want.count);
                if devices == 0 {
                    return u128::MAX;
                }
                worth.push((want, (PARTS * kind.weight).div_ceil(devices)));
            }
            if needs.is_empty() {
                return u128::MAX;
            }
        }
        let of_gpu = |(index, gpu)| {
            let mine = || worth.iter().filter(|(want, _)| self.listed(want, index));
            let whole = mine().filter(|(want, _)| want.whole).map(|&(_, worth)| worth).max().unwrap_or(0);
            let of_profile = |geometry, profile| {
                let it = |want: &Want| want.profiles.get(&geometry).is_some_and(|p| p.contains(&profile));
                mine().filter(|(want, _)| it(want)).map(|&(_, worth)| worth).max().unwrap_or(0)
            };
            Card::of(self.snapshot, gpu).most(whole, of_profile)
        };
        self.node.gpus.iter().enumerate().map(of_gpu).fold(0, u128::saturating_add) / PARTS
    }

    /// By each resource that all of them need.
    fn by_resources(&self, here: &[(&Kind<'_>, u128)]) -> u128 {
        if self.whatever_ends {
            return u128::MAX;
        }
        let by = |(resource, &free): (&String, &i128)| {
            let free = u128::try_from(free).unwrap_or(0);
            let most = |(kind, _): &(&Kind<'_>, u128)| {
                let needs = kind.request.pod.milli.get(resource).copied().unwrap_or(0);
                u128::try_from(needs)
                    .ok()
                    .filter(|&needs| needs > 0)
                    .map(|needs| free.saturating_mul(kind.weight) / needs)
            };
            let each: Option<Vec<u128>> = here.iter().map(most).collect();
            each.map_or(u128::MAX, |each| each.into_iter().max().unwrap_or(0))
        };
        self.node.free_milli.iter().map(by).min().unwrap_or(u128::MAX)
    }

    /// How many such requests it can take at most, if they are all that there is.
    fn copies(&self, request: &Request) -> u128 {
        let avoided = !self.whatever_ends && request.avoid.contains(&self.index);
        if avoided || nodes::unsuitable(self.node, &request.pod).is_some() {
            return 0;
        }
        let mut most = u128::MAX;
        for (resource, &needs) in request.pod.milli.iter().filter(|&(_, &needs)| needs > 0) {
            let Some(&free) = self.node.free_milli.get(resource) else { return 0 };
            if !self.whatever_ends {
                most = most.min(u128::try_from(free / needs).unwrap_or(0));
            }
        }
        for need in &request.devices {
            let of = |want: &Want| self.devices(want).checked_div(want.count.into()).unwrap_or(u128::MAX);
            most = most.min(need.alternatives.iter().map(of).fold(0, u128::saturating_add));
        }
        let together = request.devices.len() > 1 || !request.constraints.is_empty();
        if most > 0 && together && !self.has_place(request) { 0 } else { most }
    }

    /// How many devices of a want it can give, if they are all that is asked for.
    fn devices(&self, want: &Want) -> u128 {
        let of_gpu = |(index, gpu)| {
            if !self.listed(want, index) {
                return 0;
            }
            let wanted = |geometry, profile| {
                u128::from(want.profiles.get(&geometry).is_some_and(|profiles| profiles.contains(&profile)))
            };
            Card::of(self.snapshot, gpu).most(want.whole.into(), wanted)
        };
        self.node.gpus.iter().enumerate().map(of_gpu).fold(0, u128::saturating_add)
    }

    fn listed(&self, want: &Want, gpu: GpuIndex) -> bool {
        want.gpus.as_ref().is_none_or(|gpus| gpus.contains(&(self.index, gpu)))
    }

    /// Whether one such request has a place, by trying all; true also if that takes too long.
    fn has_place(&self, request: &Request) -> bool {
        let cards = self.node.gpus.iter().map(|gpu| Card::of(self.snapshot, gpu)).collect();
        Trial { here: self, request, cards, chosen: Vec::new(), steps: WORK }.from(0)
    }
}

/// A GPU: what is on it, and what can be.
#[derive(Clone, PartialEq)]
struct Card<'s> {
    index: usize,
    geometry: Option<&'s Geometry>,
    whole: bool,
    /// Profiles, starts and ends of the instances that it could have.
    places: Vec<(ProfileIndex, u32, u32)>,
    /// Starts and ends of what is taken, with the profile.
    taken: Vec<(Option<ProfileIndex>, u32, u32)>,
}

impl<'s> Card<'s> {
    fn of(snapshot: &'s Snapshot, gpu: &Gpu) -> Self {
        let index = gpu.geometry.unwrap_or(usize::MAX);
        let geometry = snapshot.geometries.get(index);
        let mut card = Self { index, geometry, whole: false, places: Vec::new(), taken: Vec::new() };
        let shared = gpu.shares.iter().any(|share| share.instance.is_none());
        if gpu.closed.is_some() || gpu.taken_whole || shared {
            return card;
        }
        let there = gpu.instances.iter().filter(|instance| instance.state == InstanceState::Taken);
        let span = |one: &Instance| {
            let shape = one.profile.and_then(|profile| geometry?.profiles.get(profile));
            let size = one.size.max(shape.map_or(0, |shape| shape.size));
            (one.profile, one.start, one.start.saturating_add(size))
        };
        card.taken = there.map(span).collect();
        let can = |how: Capability| match how {
            Capability::No => false,
            Capability::Now => true,
            Capability::AfterSwitch => gpu.stuck.is_none(),
        };
        card.whole = can(gpu.whole) && card.taken.is_empty();
        let made = gpu.instances.iter().any(|one| one.state == InstanceState::Taken && one.exists);
        if !can(gpu.mig) || gpu.mig == Capability::AfterSwitch && made {
            return card;
        }
        let profiles = geometry.map_or(&[][..], |geometry| &geometry.profiles);
        for (profile, shape) in
            profiles.iter().enumerate().filter(|(profile, _)| gpu.allowed.contains(profile))
        {
            for &start in &shape.starts {
                let mut free = gpu.instances.iter().filter(|one| one.state != InstanceState::Taken);
                let it = |one: &Instance| one.profile == Some(profile) && one.start == start;
                let as_it_is = gpu.fixed || gpu.stuck.is_some();
                if !as_it_is || free.any(|one| it(one) && (one.exists || gpu.stuck.is_none())) {
                    card.places.push((profile, start, start.saturating_add(shape.size)));
                }
            }
        }
        card
    }

    /// The most that it can give, where the whole of it and instances of a geometry's profiles are worth this.
    fn most(&self, whole: u128, worth: impl Fn(usize, ProfileIndex) -> u128) -> u128 {
        let worth = |profile| worth(self.index, profile);
        let places: Vec<_> =
            self.places.iter().copied().filter(|&(profile, ..)| worth(profile) > 0).collect();
        let whole = if self.whole { whole } else { 0 };
        whole.max(self.of_instances(&places, &worth, &mut self.taken.clone(), &mut WORK.clone()))
    }

    fn of_instances(
        &self,
        places: &[(ProfileIndex, u32, u32)],
        worth: &impl Fn(ProfileIndex) -> u128,
        taken: &mut Vec<(Option<ProfileIndex>, u32, u32)>,
        steps: &mut u32,
    ) -> u128 {
        let mut most = 0;
        for (at, &place) in places.iter().enumerate() {
            if *steps == 0 {
                return u128::MAX;
            }
            *steps -= 1;
            if self.fits(taken, place) {
                taken.push((Some(place.0), place.1, place.2));
                let others = self.of_instances(&places[at + 1..], worth, taken, steps);
                taken.pop();
                most = most.max(worth(place.0).saturating_add(others));
            }
        }
        most
    }

    fn fits(
        &self,
        taken: &[(Option<ProfileIndex>, u32, u32)],
        (profile, start, end): (ProfileIndex, u32, u32),
    ) -> bool {
        let Some(geometry) = self.geometry else { return false };
        let Some(shape) = geometry.profiles.get(profile) else { return false };
        if start == end
            || end > geometry.memory_slices.min(64)
            || taken.iter().any(|&(_, a, b)| start < b && a < end)
        {
            return false;
        }
        let of = |engine: fn(&Engines) -> u32| {
            let there = taken.iter().filter_map(|&(profile, ..)| geometry.profiles.get(profile?));
            let used: u64 = there.map(|shape| u64::from(engine(&shape.engines))).sum();
            used + u64::from(engine(&shape.engines)) <= engine(&geometry.engines).into()
        };
        let alike = taken.iter().filter(|&&(other, ..)| other == Some(profile)).count();
        alike < shape.max_instances as usize
            && of(|e| e.decoder)
            && of(|e| e.encoder)
            && of(|e| e.jpeg)
            && of(|e| e.ofa)
    }
}

/// The search for a place of one request on a node.
struct Trial<'t, 's> {
    here: &'t Here<'s>,
    request: &'t Request,
    cards: Vec<Card<'s>>,
    /// Need, alternative and GPU of each device.
    chosen: Vec<(usize, usize, GpuIndex)>,
    steps: u32,
}

impl Trial<'_, '_> {
    fn from(&mut self, need: usize) -> bool {
        let request = self.request;
        let Some(all) = request.devices.get(need) else { return true };
        all.alternatives.iter().enumerate().any(|(index, want)| self.devices(need, index, want, want.count))
    }

    fn devices(&mut self, need: usize, alternative: usize, want: &Want, left: u32) -> bool {
        if left == 0 {
            return self.from(need + 1);
        }
        for gpu in 0..self.cards.len() {
            self.chosen.push((need, alternative, gpu));
            let named = !self.request.constraints.is_empty()
                || self.request.devices.iter().flat_map(|n| &n.alternatives).any(|want| want.gpus.is_some());
            let seen = !named && self.cards[..gpu].contains(&self.cards[gpu]);
            if !seen && self.here.listed(want, gpu) && self.constraints_hold() {
                let before = self.cards[gpu].clone();
                let wanted = |profile: ProfileIndex| {
                    want.profiles.get(&before.index).is_some_and(|profiles| profiles.contains(&profile))
                };
                let whole = want.whole && before.whole && before.taken.is_empty();
                let fitting = before
                    .places
                    .iter()
                    .filter(|&&place| wanted(place.0) && before.fits(&before.taken, place));
                let whole = whole.then_some((None, 0, u32::MAX));
                for taken in whole.into_iter().chain(fitting.map(|&(profile, a, b)| (Some(profile), a, b))) {
                    self.steps = self.steps.saturating_sub(1);
                    self.cards[gpu].taken.push(taken);
                    self.cards[gpu].taken.sort_unstable();
                    self.cards[gpu].whole = false;
                    let done = self.steps == 0 || self.devices(need, alternative, want, left - 1);
                    self.cards[gpu] = before.clone();
                    if done {
                        return true;
                    }
                }
            }
            self.chosen.pop();
        }
        false
    }

    /// For what is chosen so far.
    fn constraints_hold(&self) -> bool {
        self.request.constraints.iter().all(|constraint| {
            let concerned = self.chosen.iter().filter(|&&(need, alternative, _)| {
                let need = &self.request.devices[need];
                let sub = need.alternatives[alternative].subrequest.as_ref();
                constraint.requests.is_empty()
                    || constraint.requests.contains(&need.name)
                    || sub.is_some_and(|sub| constraint.requests.contains(&format!("{}/{sub}", need.name)))
            });
            let values: Vec<Option<&String>> =
                concerned.map(|&(_, _, gpu)| constraint.values.get(&(self.here.index, gpu))).collect();
            let mut different = values.clone();
            different.sort();
            different.dedup();
            !values.contains(&None)
                && match constraint.kind {
                    ConstraintKind::Same => different.len() <= 1,
                    ConstraintKind::Distinct => different.len() == values.len(),
                }
        })
    }
}
