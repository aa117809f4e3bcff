//! Proofs that requests have no place together, see [`Certificate`]: weights for which all nodes together can take less
//! than the requests weigh. A few simple choices of weights are tried. What a node can take is never put too low.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use crate::catalog::StateId;
use crate::fleet::{Fleet, Numbered};
use crate::occupancy::{Device, GpuState, Occupancy};
use crate::place::Answer;
use crate::plan::{Certificate, Scope};
use crate::snapshot::{Capability, Geometry, NodeIndex, Profile, ProfileIndex, Want};

/// Parts of a weight of one: it can be shared out equally over up to 16 needs or devices.
const PARTS: u128 = 720_720;
/// Largest weight.
const HEAVIEST: i128 = 1 << 32;
/// Most steps of the search for the best that one GPU can give.
const WORK: u32 = 20_000;
/// Most alternatives of all kinds of members together.
const WANTS: usize = u128::BITS as usize;
/// Most kinds of members that are weighed by themselves.
const KINDS: usize = 16;

/// A proof that these requests, a gang's or one alone, have no place beside the first so many placements, which the fleet
/// has taken. Whatever ends, if possible.
pub fn certificate(
    fleet: &mut Fleet<'_>,
    members: &[Numbered<'_>],
    beside: usize,
) -> Option<Arc<Certificate>> {
    // How many shares of several sizes a GPU has room for is not worked out.
    if members.iter().any(|asked| fleet.wants_shares(asked.shape)) {
        return None;
    }
    [Scope::WhateverEnds, Scope::Beside(beside)].into_iter().find_map(|scope| {
        let mut bound = Bound::of(fleet, members, scope);
        let (of_kind, room) = bound.proof()?;
        let weights = bound.kind_of.iter().map(|&kind| of_kind[kind]).collect();
        Some(Arc::new(Certificate { scope, weights, room }))
    })
}

/// Members that are alike.
struct Kind<'r> {
    asked: Numbered<'r>,
    number: u64,
    /// By need: its alternatives, numbered among those of all kinds.
    wants: Vec<Vec<usize>>,
}

/// What a node has for the members.
struct Room {
    /// For so many of each kind alone.
    copies: Vec<u64>,
    /// States of its GPUs, and for which wants each could serve.
    gpus: Vec<(StateId, u128)>,
    /// Of each resource; `None`: as much as anybody wants.
    free: Vec<Option<i128>>,
}

struct Bound<'f, 'a, 'r> {
    fleet: &'f mut Fleet<'a>,
    scope: Scope,
    /// By member.
    kind_of: Vec<usize>,
    kinds: Vec<Kind<'r>>,
    wants: Vec<&'r Want>,
    resources: Vec<&'r String>,
    /// States of the GPUs by node, if nothing was on them.
    emptied: Rc<Vec<Arc<[StateId]>>>,
    /// The most devices of a want that a GPU in the state can give.
    counts: HashMap<(StateId, usize), u128>,
    /// Whether one of a kind has no place on a node with such GPUs.
    without: HashMap<(usize, Vec<StateId>), bool>,
}

impl<'f, 'a, 'r> Bound<'f, 'a, 'r> {
    fn of(fleet: &'f mut Fleet<'a>, members: &[Numbered<'r>], scope: Scope) -> Self {
        let (mut kinds, mut wants): (Vec<Kind<'r>>, Vec<&'r Want>) = Default::default();
        let (mut kind_of, mut numbers) = (Vec::with_capacity(members.len()), HashMap::new());
        for &asked in members {
            let request = asked.request;
            let kind = *numbers.entry((asked.shape, asked.pod, &request.avoid)).or_insert_with(|| {
                let mut numbered = |want: &'r Want| {
                    wants.push(want);
                    wants.len() - 1
                };
                let of_need = request.devices.iter().map(|need| &need.alternatives);
                let wants = of_need.map(|all| all.iter().map(&mut numbered).collect()).collect();
                kinds.push(Kind { asked, number: 0, wants });
                kinds.len() - 1
            });
            kinds[kind].number += 1;
            kind_of.push(kind);
        }
        let resources: BTreeSet<&String> =
            kinds.iter().flat_map(|kind| kind.asked.request.pod.milli.keys()).collect();
        let emptied = match scope {
            Scope::WhateverEnds => fleet.emptied(),
            Scope::Beside(_) => Rc::default(),
        };
        Self {
            fleet,
            scope,
            kind_of,
            kinds,
            wants,
            resources: resources.into_iter().collect(),
            emptied,
            counts: HashMap::new(),
            without: HashMap::new(),
        }
    }

    /// Weights by kind for which the nodes can take less than all members weigh, and how much they can take.
    fn proof(&mut self) -> Option<(Vec<u64>, u128)> {
        if self.wants.len() > WANTS {
            return None;
        }
        let rooms: Vec<Room> = (0..self.fleet.nodes()).map(|node| self.room(node)).collect();
        self.choices().into_iter().find_map(|weights| {
            let weighed = self.kinds.iter().zip(&weights);
            let all: u128 = weighed.map(|(kind, &weight)| u128::from(kind.number) * u128::from(weight)).sum();
            let room = self.most(&rooms, &weights);
            (room < all).then_some((weights, room))
        })
    }

    fn room(&mut self, node: NodeIndex) -> Room {
        let states = match self.scope {
            Scope::WhateverEnds => self.emptied[node].to_vec(),
            Scope::Beside(_) => self.fleet.gpus(node).to_vec(),
        };
        let copies: Vec<u64> = (0..self.kinds.len()).map(|kind| self.copies(kind, node, &states)).collect();
        let of_some = self.kinds.iter().zip(&copies).filter(|&(_, &copies)| copies > 0);
        let open =
            of_some.flat_map(|(kind, _)| kind.wants.iter().flatten()).fold(0, |all, want| all | 1 << want);
        let gpus = states.into_iter().enumerate().map(|(gpu, state)| {
            let other = |want: &Want| want.gpus.as_ref().is_some_and(|set| !set.contains(&(node, gpu)));
            let others = self.wants.iter().enumerate().filter(|(_, want)| other(want));
            (state, open & !others.fold(0, |all, (index, _)| all | 1 << index))
        });
        let free = match self.scope {
            Scope::WhateverEnds => vec![None; self.resources.len()],
            Scope::Beside(_) => self.resources.iter().map(|name| self.fleet.free(node, name)).collect(),
        };
        Room { gpus: gpus.collect(), copies, free }
    }

    /// So many of the kind alone the node can take at most.
    fn copies(&mut self, kind: usize, node: NodeIndex, states: &[StateId]) -> u64 {
        let asked = self.kinds[kind].asked;
        let mut most = match self.scope {
            Scope::WhateverEnds => u64::from(self.fleet.could_fit(node, asked)) * u64::MAX,
            Scope::Beside(_) => self.fleet.pods(node, asked),
        };
        for need in self.kinds[kind].wants.clone() {
            if most == 0 {
                return 0;
            }
            let mut of_need = 0u64;
            for want in need {
                let named = self.wants[want].gpus.as_ref();
                let mut devices = 0u128;
                for (gpu, &state) in states.iter().enumerate() {
                    if named.is_none_or(|set| set.contains(&(node, gpu))) {
                        devices = devices.saturating_add(self.count(state, want));
                    }
                }
                let copies = devices.checked_div(self.wants[want].count.into()).unwrap_or(u128::MAX);
                of_need = of_need.saturating_add(u64::try_from(copies).unwrap_or(u64::MAX));
            }
            most = most.min(of_need);
        }
        let one_by_one = asked.request.devices.len() <= 1 && asked.request.constraints.is_empty();
        if most == 0 || one_by_one || !self.without_place(kind, node, states) { most } else { 0 }
    }

    /// Whether the node's GPUs have certainly no place for one of the kind.
    fn without_place(&mut self, kind: usize, node: NodeIndex, states: &[StateId]) -> bool {
        let asked = self.kinds[kind].asked;
        if let Scope::Beside(_) = self.scope {
            return matches!(self.fleet.answer(asked, node), Answer::Nothing);
        }
        let by_name = self.fleet.tells_apart(asked.shape);
        let key = (kind, states.to_vec());
        if let Some(&known) = self.without.get(&key).filter(|_| !by_name) {
            return known;
        }
        let without = matches!(self.fleet.answer_with(asked, node, states), Answer::Nothing);
        self.without.insert(key, without);
        without
    }

    fn count(&mut self, state: StateId, want: usize) -> u128 {
        if let Some(&known) = self.counts.get(&(state, want)) {
            return known;
        }
        let (wanted, state_now) = (self.wants[want], self.fleet.catalog.state(state));
        let profiles = state_now.geometry.and_then(|geometry| wanted.profiles.get(&geometry));
        let value = |profile| u128::from(profiles.is_some_and(|all| all.contains(&profile)));
        let count = most_of(self.fleet.catalog.geometries(), state_now, wanted.whole.into(), value);
        self.counts.insert((state, want), count);
        count
    }

    /// What all nodes together can take at most, where the kinds have these weights.
    fn most(&self, rooms: &[Room], weights: &[u64]) -> u128 {
        let values = self.values(weights);
        let mut of_gpus: HashMap<(StateId, u128), u128> = HashMap::new();
        let mut of_node = |room: &Room| {
            let here =
                || self.kinds.iter().zip(weights).zip(&room.copies).filter(|&((_, &w), &c)| w > 0 && c > 0);
            let alone = here()
                .map(|((kind, &weight), &copies)| u128::from(weight) * u128::from(copies.min(kind.number)))
                .sum();
            let shared_out = here().all(|((kind, _), _)| {
                let counts = |want: &usize| self.wants[*want].count > 0;
                !kind.wants.is_empty() && kind.wants.iter().flatten().all(counts)
            });
            let mut most: u128 = alone;
            if shared_out {
                let value = |&(state, open): &(StateId, u128)| {
                    *of_gpus.entry((state, open)).or_insert_with(|| self.value(state, open, &values))
                };
                let parts = room.gpus.iter().map(value).fold(0, u128::saturating_add);
                most = most.min(parts / PARTS);
            }
            for (name, free) in self.resources.iter().zip(&room.free) {
                let Some(free) = free else { continue };
                let per_amount = |((kind, &weight), _): ((&Kind<'_>, &u64), _)| {
                    let needs = kind.asked.request.pod.milli.get(*name).copied().unwrap_or(0);
                    let needs = u128::try_from(needs).ok().filter(|&needs| needs > 0)?;
                    let free = u128::try_from(*free).unwrap_or(0);
                    Some(free.saturating_mul(weight.into()) / needs)
                };
                // A kind that needs nothing of it: no bound.
                let bounds: Option<Vec<u128>> = here().map(per_amount).collect();
                most = most.min(bounds.map_or(u128::MAX, |all| all.into_iter().max().unwrap_or(0)));
            }
            most
        };
        rooms.iter().map(&mut of_node).fold(0, u128::saturating_add)
    }

    /// Value of a device by want, in [`PARTS`], rounded up.
    fn values(&self, weights: &[u64]) -> Vec<u128> {
        let mut values = vec![0; self.wants.len()];
        for (kind, &weight) in self.kinds.iter().zip(weights) {
            for &want in kind.wants.iter().flatten() {
                let devices = kind.wants.len() as u128 * u128::from(self.wants[want].count);
                values[want] = (PARTS * u128::from(weight)).div_ceil(devices.max(1));
            }
        }
        values
    }

    fn value(&self, state: StateId, open: u128, values: &[u128]) -> u128 {
        let state = self.fleet.catalog.state(state);
        let all = || self.wants.iter().zip(values).enumerate().filter(|(want, _)| open & 1 << want != 0);
        let whole = all().filter(|(_, (want, _))| want.whole).map(|(_, (_, &value))| value).max();
        let of_profile = |profile: ProfileIndex| {
            let it = |want: &Want| {
                state.geometry.and_then(|g| want.profiles.get(&g)).is_some_and(|all| all.contains(&profile))
            };
            all().filter(|(_, (want, _))| it(want)).map(|(_, (_, &value))| value).max().unwrap_or(0)
        };
        most_of(self.fleet.catalog.geometries(), state, whole.unwrap_or(0), of_profile)
    }

    /// Weights by kind that are tried: each member the same, by size in several measures, by resources, and of some kinds
    /// only, the largest, or one.
    fn choices(&self) -> Vec<Vec<u64>> {
        let number = self.kinds.len();
        let mut choices = vec![vec![1; number]];
        if number == 1 {
            return choices;
        }
        let slices = self.sizes(|geometry| geometry.memory_slices, |profile| profile.size);
        let most =
            |geometry: &Geometry| geometry.profiles.iter().map(|p| p.compute_slices).max().unwrap_or(1);
        choices.push(self.sizes(most, |profile| profile.compute_slices));
        choices.push(self.sizes(|_| 840, |profile| 840 / profile.max_instances.clamp(1, 840)));
        for name in &self.resources {
            let needs =
                |kind: &Kind<'_>| kind.asked.request.pod.milli.get(*name).copied().unwrap_or(0).max(0);
            let largest = self.kinds.iter().map(needs).max().unwrap_or(0);
            let unit = largest / HEAVIEST + 1;
            choices.push(self.kinds.iter().map(|kind| (needs(kind) / unit) as u64).collect());
        }
        if number <= KINDS {
            for &least in &slices {
                choices.push(slices.iter().map(|&size| u64::from(size >= least)).collect());
            }
            choices.extend((0..number).map(|one| (0..number).map(|kind| u64::from(kind == one)).collect()));
        }
        choices.push(slices);
        let mut seen = BTreeSet::new();
        choices.retain(|weights| seen.insert(weights.clone()));
        choices
    }

    /// The least of a measure that does for all needs of each kind.
    fn sizes(&self, whole: impl Fn(&Geometry) -> u32, of: impl Fn(&Profile) -> u32) -> Vec<u64> {
        let geometries = self.fleet.catalog.geometries();
        let whole = geometries.iter().map(whole).max().unwrap_or(1);
        let of_want = |&want: &usize| {
            let want = self.wants[want];
            let profiles = want.profiles.iter().flat_map(|(&geometry, profiles)| {
                profiles.iter().filter_map(move |&p| geometries.get(geometry)?.profiles.get(p))
            });
            let least = profiles.map(&of).min().unwrap_or(whole);
            u64::from(want.count).saturating_mul(least.into())
        };
        let of_need = |need: &Vec<usize>| need.iter().map(of_want).min().unwrap_or(0);
        let of_kind = |kind: &Kind<'_>| kind.wants.iter().map(of_need).fold(0, u64::saturating_add);
        self.kinds.iter().map(|kind| of_kind(kind).min(HEAVIEST as u64)).collect()
    }
}

/// The most that a GPU in the state can give, where the whole of it and instances of its profiles have these values.
fn most_of(
    geometries: &[Geometry],
    state: &GpuState,
    whole: u128,
    value: impl Fn(ProfileIndex) -> u128,
) -> u128 {
    let whole = if state.whole_now() == Capability::No { 0 } else { whole };
    let Some(geometry) = state.geometry.and_then(|index| geometries.get(index)) else { return whole };
    let mut places = Vec::new();
    for (profile, value) in state.allowed.iter().map(|&p| (p, value(p))).filter(|&(_, value)| value > 0) {
        let starts = geometry.profiles[profile].starts.iter().copied();
        let can = |&start: &u32| state.can_give(geometries, Device::Instance { profile, start });
        places.extend(starts.filter(can).map(|start| (start, profile, value)));
    }
    places.sort_unstable();
    places.dedup();
    whole.max(together(geometry, &mut state.taken.clone(), &places, &mut WORK.clone()))
}

/// The most that a choice of these places is worth; beyond so many steps no bound.
fn together(
    geometry: &Geometry,
    taken: &mut Occupancy,
    places: &[(u32, ProfileIndex, u128)],
    steps: &mut u32,
) -> u128 {
    let mut most = 0;
    for (index, &(start, profile, value)) in places.iter().enumerate() {
        let Some(left) = steps.checked_sub(1) else { return u128::MAX };
        *steps = left;
        if taken.fits(geometry, profile, start) {
            taken.take(geometry, profile, start);
            let others = together(geometry, taken, &places[index + 1..], steps);
            taken.release(geometry, profile, start);
            most = most.max(value.saturating_add(others));
        }
    }
    most
}
