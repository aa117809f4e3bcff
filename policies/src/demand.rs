//! What a node's room is worth to those who ask these days, see [`Snapshot::demand`].
//!
//! For each kind of request, so much of a node's GPUs is of use as devices of the kind could be made of; nothing, if the
//! node lacks a resource for even one of them. Where processors or memory of the node run out before the GPUs do, what the
//! GPUs have beyond counts only in part. The worth of a node is the mean over the kinds, by their weight; a place costs
//! what the node's worth falls by, and a price for what it takes of a model: the more that may ask for a model and the
//! fewer GPUs of it there are, the dearer it is to those who could go elsewhere.

use std::collections::HashMap;
use std::rc::Rc;

use crate::catalog::{Catalog, Kind, StateId, WantId};
use crate::occupancy::{Device, GpuState};
use crate::share::{self, ALL};
use crate::snapshot::{Capability, Geometry, GeometryIndex, Snapshot};

/// Of what GPUs have beyond what the node's other resources suffice for, so many tenths count, as if other pods needed
/// less of those. On the openb trace, with all ten the lists in which processors are scarce lose 3 %, with none those of
/// large jobs 0.4 %.
const BEYOND: u64 = 6;

/// A GPU of mean scarcity is priced at so many tenths of its worth. On the openb trace, where one pod in three is for
/// certain models, that gains 8 % over none; half of it 7.6 %, four times as much 7.7 %.
const PRICE: u64 = 16;

/// The worth of a node is that to the commonest kinds that make up so many hundredths of all requests.
const COMMON: u64 = 95;

/// What a GPU, or all GPUs of a node, could give for a kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usable {
    /// Devices.
    pub devices: u64,
    /// The part of a GPU that is of use, in parts of [`ALL`].
    pub part: u64,
    /// The part that one device takes.
    pub size: u64,
}

/// One kind of request, in numbers.
#[derive(Debug)]
pub struct Asked {
    /// Its alternatives, with the number of devices.
    pub wants: Vec<(WantId, u32)>,
    /// How many of them there are beside the other kinds; of a [`Demand`] in parts of [`ALL`].
    pub weight: u64,
    /// Whether a node suits it, by node.
    pub suits: Vec<bool>,
    /// Thousandths of each resource, by its number.
    pub milli: Vec<(usize, i128)>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Demand {
    kinds: Vec<Asked>,
    /// By geometry: price of a whole GPU.
    price: Vec<u64>,
    usable: HashMap<StateId, Rc<[Usable]>>,
}

impl Demand {
    /// The demand of the snapshot.
    pub fn of(snapshot: &Snapshot, catalog: &Catalog, mut kinds: Vec<Asked>) -> Self {
        let all: u64 = kinds.iter().map(|kind| kind.weight).sum();
        for kind in &mut kinds {
            kind.weight = (kind.weight * ALL).checked_div(all).unwrap_or(0);
        }
        let mut demand = Self { kinds, ..Self::default() };
        demand.price = demand.prices(snapshot, catalog);
        demand.kinds.sort_by_key(|kind| std::cmp::Reverse(kind.weight));
        let mut sum = 0;
        demand.kinds.retain(|kind| {
            let common = sum * 100 < ALL * COMMON;
            sum += kind.weight;
            common
        });
        demand
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// For each geometry, what is asked for of it as a part of what there is, beside the mean of all; in units of
    /// what a GPU is worth.
    fn prices(&self, snapshot: &Snapshot, catalog: &Catalog) -> Vec<u64> {
        let mut gpus = vec![0u64; snapshot.geometries.len()];
        let open = snapshot.nodes.iter().flat_map(|node| &node.gpus).filter(|gpu| gpu.closed.is_none());
        for gpu in open {
            if let Some(number) = gpu.geometry.and_then(|index| gpus.get_mut(index)) {
                *number += 1;
            }
        }
        let mut price = vec![0u128; gpus.len()];
        let mut asked_for = 0u128;
        for kind in &self.kinds {
            let Some(&(want, count)) = kind.wants.first() else { continue };
            let geometries = 0..snapshot.geometries.len();
            let sizes: Vec<(GeometryIndex, u64)> = geometries
                .filter_map(|geometry| Some((geometry, size_on(snapshot, geometry, catalog.kind(want))?)))
                .collect();
            let of_them: u64 = sizes.iter().map(|&(geometry, _)| gpus[geometry]).sum();
            for &(geometry, size) in &sizes {
                let size = u128::from(kind.weight) * u128::from(size) * u128::from(count);
                price[geometry] += size.checked_div(of_them.into()).unwrap_or(0);
                asked_for += (size * u128::from(gpus[geometry])).checked_div(of_them.into()).unwrap_or(0);
            }
        }
        let all: u128 = gpus.iter().copied().map(u128::from).sum();
        let worth = u128::from(catalog.worth_of_gpu()) * u128::from(PRICE) / 10;
        let beside_mean = |price: u128| (price * all * worth).checked_div(asked_for).unwrap_or(0);
        price.into_iter().map(|price| u64::try_from(beside_mean(price)).unwrap_or(u64::MAX)).collect()
    }

    /// Price of so much of a GPU.
    pub fn price(&self, geometry: Option<GeometryIndex>, part: u64) -> u64 {
        let price = geometry.and_then(|index| self.price.get(index)).copied().unwrap_or(0);
        (u128::from(price) * u128::from(part) / u128::from(ALL)) as u64
    }

    /// Worth of a node with GPUs in these states and so much left of each resource.
    pub fn worth(
        &mut self,
        catalog: &Catalog,
        node: usize,
        gpus: &[StateId],
        free: impl Fn(usize) -> i128,
    ) -> u64 {
        let of_gpus: Vec<Rc<[Usable]>> = gpus.iter().map(|&state| self.usable(catalog, state)).collect();
        let mut worth = 0u128;
        for (index, kind) in self.kinds.iter().enumerate() {
            if !kind.suits.get(node).copied().unwrap_or(false) {
                continue;
            }
            let all = of_gpus.iter().map(|usable| usable[index]).fold(Usable::default(), |all, one| Usable {
                devices: all.devices + one.devices,
                part: all.part + one.part,
                size: all.size.max(one.size),
            });
            let count = u64::from(kind.wants.first().map_or(1, |&(_, count)| count));
            let times = kind.milli.iter().map(|&(id, needs)| free(id) / needs.max(1)).min();
            let times = times.map_or(u64::MAX, |times| u64::try_from(times).unwrap_or(0));
            if all.devices < count || times == 0 {
                continue;
            }
            let sufficient = all.part.min(times.saturating_mul(count * all.size));
            let of_use = (BEYOND * all.part + (10 - BEYOND) * sufficient) / 10;
            worth += u128::from(kind.weight) * u128::from(of_use);
        }
        let in_gpus = worth * u128::from(catalog.worth_of_gpu()) / u128::from(ALL) / u128::from(ALL);
        u64::try_from(in_gpus).unwrap_or(u64::MAX)
    }

    fn usable(&mut self, catalog: &Catalog, state: StateId) -> Rc<[Usable]> {
        if let Some(known) = self.usable.get(&state) {
            return Rc::clone(known);
        }
        let of = |kind: &Asked| {
            let (geometries, state) = (catalog.geometries(), catalog.state(state));
            let wants = kind.wants.iter().map(|&(want, _)| usable(geometries, state, catalog.kind(want)));
            wants.max_by_key(|usable| usable.part).unwrap_or_default()
        };
        let usable: Rc<[Usable]> = self.kinds.iter().map(of).collect();
        self.usable.insert(state, Rc::clone(&usable));
        usable
    }
}

/// What a GPU could give for a want, altogether.
fn usable(geometries: &[Geometry], state: &GpuState, kind: &Kind) -> Usable {
    let mut best = Usable::default();
    let mut consider = |other: Usable| {
        if other.devices > 0 && other.part > best.part {
            best = other;
        }
    };
    if kind.whole && state.whole_now() != Capability::No {
        consider(Usable { devices: 1, part: ALL, size: ALL });
    }
    let Some((index, geometry)) = state.geometry.and_then(|index| Some((index, geometries.get(index)?)))
    else {
        return best;
    };
    let part_of_gpu = |part: u64, profile: usize| share::of_gpu(geometry, profile, part);
    if let Some(profiles) = kind.profiles.get(&index)
        && state.mig_now() != Capability::No
    {
        let allowed: Vec<usize> =
            profiles.iter().copied().filter(|p| state.allowed.binary_search(p).is_ok()).collect();
        let least = allowed.iter().map(|&profile| part_of_gpu(ALL, profile)).min().unwrap_or(0);
        let devices = u64::from(state.taken.room_for(geometry, &allowed));
        consider(Usable { devices, part: devices * least, size: least });
    }
    for (carrier, portion) in share::on(&kind.shares, Some(index)) {
        let Some(room) = state.shares.room(carrier) else { continue };
        let mut all = Usable { size: portion.size_in(room), ..Usable::default() };
        let instances = state.shares.carriers.iter().filter_map(|one| one.instance);
        let there: Vec<Option<(usize, u32)>> = match carrier {
            None if state.shared_now() == Capability::No => Vec::new(),
            None => vec![None],
            Some(profile) => instances.filter(|&(of, _)| of == profile).map(Some).collect(),
        };
        for instance in there {
            let times = state.shares.free(instance).map_or(0, |free| portion.times(&free));
            if times > 0 {
                let part = state.shares.free_part(instance);
                all.devices += times;
                all.part += carrier.map_or(part, |profile| part_of_gpu(part, profile));
            }
        }
        if let Some(profile) = carrier {
            all.size = part_of_gpu(all.size, profile);
            if state.mig_now() != Capability::No && state.allowed.binary_search(&profile).is_ok() {
                let more = u64::from(state.taken.room_for(geometry, &[profile]));
                all.devices += more * portion.times(room);
                all.part += more * part_of_gpu(ALL, profile);
            }
        }
        consider(all);
    }
    best
}

/// The part of a GPU that a device for the want takes; `None`: the geometry has none.
fn size_on(snapshot: &Snapshot, geometry: GeometryIndex, kind: &Kind) -> Option<u64> {
    let of = &snapshot.geometries[geometry];
    let instance = |profile: usize| Some(share::of_gpu(of, profile, ALL)).filter(|&part| part > 0);
    let profiles =
        kind.profiles.get(&geometry).into_iter().flatten().filter_map(|&profile| instance(profile));
    let shares =
        share::on(&kind.shares, Some(geometry)).filter_map(|(carrier, portion)| {
            let mut gpus = snapshot.nodes.iter().flat_map(|node| &node.gpus);
            let room = gpus.find_map(|gpu| {
                if gpu.geometry == Some(geometry) { gpu.share_room.get(&carrier) } else { None }
            })?;
            let part = portion.size_in(room);
            Some(carrier.and_then(instance).map_or(part, |size| size * part / ALL))
        });
    profiles.chain(shares).min().or(kind.whole.then_some(ALL))
}

/// The part of a GPU that a device takes.
pub fn part(geometries: &[Geometry], state: &GpuState, device: Device) -> u64 {
    let part = match device {
        Device::Whole | Device::Instance { .. } => ALL,
        Device::Share { carrier, portion } => {
            let room = state.shares.room(carrier.map(|(profile, _)| profile));
            room.map_or(ALL, |room| portion.size_in(room))
        }
    };
    state.part_of_gpu(geometries, device.instance(), part)
}
