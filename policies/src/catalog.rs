//! GPU states and wants, each kind numbered once, and what a GPU in a state can give for a want: worked out for one of a
//! kind, looked up for the others.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::occupancy::{Device, GpuState};
use crate::share;
use crate::snapshot::{Capability, Carrier, Geometry, GeometryIndex, Portion, ProfileIndex, Strategy, Want};
use crate::value::{Cost, Least, Weights};

/// Number of a distinct [`GpuState`].
pub type StateId = u32;
/// Number of what a [`Want`] asks of a single GPU.
pub type WantId = u32;

/// Something that a GPU in some state can give for a want.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// The device.
    pub device: Device,
    /// Whether it exists.
    pub exists: bool,
    /// The GPU's state afterwards.
    pub after: StateId,
    /// Its price.
    pub cost: Cost,
}

/// The part of a want that decides what a GPU can give for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// See [`Want::profiles`].
    pub profiles: BTreeMap<GeometryIndex, BTreeSet<ProfileIndex>>,
    /// See [`Want::whole`].
    pub whole: bool,
    /// See [`Want::shares`].
    pub shares: BTreeMap<(GeometryIndex, Carrier), Portion>,
}

impl Kind {
    /// Every device that would do, whether the GPU can give it now or not.
    fn devices(&self, geometries: &[Geometry], gpu: &GpuState) -> Vec<Device> {
        let mut devices = Vec::new();
        if self.whole {
            devices.push(Device::Whole);
        }
        let Some((index, geometry)) = gpu.geometry.and_then(|index| Some((index, geometries.get(index)?)))
        else {
            return devices;
        };
        let starts = |profile: ProfileIndex| geometry.profiles.get(profile).map_or(&[][..], |p| &p.starts);
        for &profile in self.profiles.get(&index).into_iter().flatten() {
            devices.extend(starts(profile).iter().map(|&start| Device::Instance { profile, start }));
        }
        for (carrier, portion) in share::on(&self.shares, Some(index)) {
            match carrier {
                None => devices.push(Device::Share { carrier: None, portion }),
                Some(profile) => {
                    let of = |&start: &u32| Device::Share { carrier: Some((profile, start)), portion };
                    devices.extend(starts(profile).iter().map(of));
                }
            }
        }
        devices
    }
}

struct State {
    state: Arc<GpuState>,
    worth: u64,
    free_slices: u32,
    /// Whether it can give anything at all, once somebody has asked.
    gives: OnceCell<bool>,
}

/// See the module.
pub struct Catalog {
    geometries: Arc<[Geometry]>,
    weights: Weights,
    states: Vec<State>,
    numbers: HashMap<Arc<GpuState>, StateId>,
    wants: Vec<(Kind, Least)>,
    want_numbers: HashMap<Kind, WantId>,
    offers: HashMap<(StateId, WantId), Arc<[Offer]>>,
    /// By want: the states that can give it, cheapest first.
    rankings: Vec<Ranking>,
    given: HashMap<(StateId, Device), StateId>,
    returned: HashMap<(StateId, Device), StateId>,
}

#[derive(Default)]
struct Ranking {
    epoch: u64,
    /// So many of the states met are in.
    seen: usize,
    cheapest: BTreeSet<(Cost, StateId)>,
}

impl Catalog {
    /// Nothing is numbered yet.
    pub fn of(geometries: &[Geometry], weights: Weights) -> Self {
        Self {
            geometries: geometries.into(),
            weights,
            states: Vec::new(),
            numbers: HashMap::new(),
            wants: Vec::new(),
            want_numbers: HashMap::new(),
            offers: HashMap::new(),
            rankings: Vec::new(),
            given: HashMap::new(),
            returned: HashMap::new(),
        }
    }

    /// The geometries that states and wants refer to.
    pub fn geometries(&self) -> &[Geometry] {
        &self.geometries
    }

    /// See [`Weights`].
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Number of states and of wants that have been met.
    pub fn size(&self) -> usize {
        self.states.len() + self.wants.len()
    }

    /// A state by its number.
    pub fn state(&self, id: StateId) -> &GpuState {
        &self.states[id as usize].state
    }

    /// Memory slices that nobody has, in the state.
    pub fn free_slices(&self, id: StateId) -> u32 {
        self.states[id as usize].free_slices
    }

    /// Whether a GPU in the state can give anything at all.
    pub fn gives(&self, id: StateId) -> bool {
        let State { gives, state, .. } = &self.states[id as usize];
        *gives.get_or_init(|| state.gives(&self.geometries))
    }

    /// What the want asks of one GPU.
    pub fn kind(&self, want: WantId) -> &Kind {
        &self.wants[want as usize].0
    }

    /// What a GPU is worth to those who ask for shares, see [`Weights`].
    pub fn worth_of_gpu(&self) -> u64 {
        self.weights.shares
    }

    /// Worth of a GPU in the state, see [`Weights`].
    pub fn worth(&self, state: &GpuState) -> u64 {
        self.weights.worth(&self.geometries, state)
    }

    /// Number of the state.
    pub fn number(&mut self, state: GpuState) -> StateId {
        if let Some(&id) = self.numbers.get(&state) {
            return id;
        }
        let id = self.states.len() as StateId;
        let state = Arc::new(state);
        self.states.push(State {
            worth: self.weights.worth(&self.geometries, &state),
            free_slices: state.free_slices(&self.geometries),
            gives: OnceCell::new(),
            state: Arc::clone(&state),
        });
        self.numbers.insert(state, id);
        id
    }

    /// Number of what the want asks of one GPU.
    pub fn want(&mut self, want: &Want) -> WantId {
        let kind = Kind { profiles: want.profiles.clone(), whole: want.whole, shares: want.shares.clone() };
        if let Some(&id) = self.want_numbers.get(&kind) {
            return id;
        }
        let id = self.wants.len() as WantId;
        self.wants.push((kind.clone(), Least::of(want, &self.geometries)));
        self.rankings.push(Ranking::default());
        self.want_numbers.insert(kind, id);
        id
    }

    /// Every device that would do for the want, whether a GPU in the state can give it now or not.
    pub fn devices(&self, state: StateId, want: WantId) -> Vec<Device> {
        self.kind(want).devices(&self.geometries, self.state(state))
    }

    /// What a GPU in the state can give for the want, cheapest first.
    pub fn offers(&mut self, state: StateId, want: WantId) -> Arc<[Offer]> {
        if let Some(offers) = self.offers.get(&(state, want)) {
            return Arc::clone(offers);
        }
        let offers: Arc<[Offer]> = self.work_out_offers(state, want).into();
        self.offers.insert((state, want), Arc::clone(&offers));
        offers
    }

    /// Brings [`Catalog::ranking`] up to date: `met` are the states that GPUs have been in, a list that only grows within
    /// an epoch.
    pub fn rank(&mut self, want: WantId, epoch: u64, met: &[StateId]) {
        let ranking = &mut self.rankings[want as usize];
        if ranking.epoch != epoch {
            *ranking = Ranking { epoch, ..Ranking::default() };
        }
        let seen = ranking.seen;
        for &id in &met[seen..] {
            if let Some(best) = self.offers(id, want).first() {
                self.rankings[want as usize].cheapest.insert((best.cost, id));
            }
        }
        self.rankings[want as usize].seen = met.len();
    }

    /// States that can give something for the want, with the price of the best, cheapest first. Those that no GPU is in
    /// at the moment are among them.
    pub fn ranking(&self, want: WantId) -> impl Iterator<Item = (Cost, StateId)> + '_ {
        self.rankings[want as usize].cheapest.iter().copied()
    }

    /// The state after a device was given away.
    pub fn given(&mut self, state: StateId, device: Device) -> StateId {
        if let Some(&after) = self.given.get(&(state, device)) {
            return after;
        }
        let after = self.state(state).give(&self.geometries, device);
        let after = self.number(after);
        self.given.insert((state, device), after);
        after
    }

    /// The state after a device has come back. An instance stays, as nobody's.
    pub fn returned(&mut self, state: StateId, device: Device) -> StateId {
        if let Some(&after) = self.returned.get(&(state, device)) {
            return after;
        }
        let after = self.state(state).take_back(&self.geometries, device);
        let after = self.number(after);
        self.returned.insert((state, device), after);
        after
    }

    fn work_out_offers(&mut self, id: StateId, want: WantId) -> Vec<Offer> {
        let geometries = &*Arc::clone(&self.geometries);
        let before = Arc::clone(&self.states[id as usize].state);
        let (kind, least) = &self.wants[want as usize];
        let least = *least;
        let devices = kind.devices(geometries, &before);
        let had = devices.into_iter().filter(|&device| before.can_give(geometries, device));
        let mut offers: Vec<Offer> = had.map(|device| self.offer(id, &before, device, least)).collect();
        offers.sort_by_key(|offer| (offer.cost, offer.device));
        offers
    }

    fn offer(&mut self, id: StateId, before: &GpuState, device: Device, least: Least) -> Offer {
        let geometries = &*Arc::clone(&self.geometries);
        let switch = match device {
            Device::Whole => before.whole,
            Device::Share { carrier: None, .. } => before.shares.itself,
            Device::Instance { .. } | Device::Share { carrier: Some(_), .. } => before.mig,
        } == Capability::AfterSwitch;
        let reused = device.instance().and_then(|(profile, start)| before.free_at(profile, start));
        let carries = match device {
            Device::Share { carrier, .. } => before.shares.carrier(carrier).is_some_and(|one| one.exists),
            Device::Whole | Device::Instance { .. } => false,
        };
        let exists = match device {
            Device::Whole | Device::Share { carrier: None, .. } => !switch,
            _ => carries || (!switch && reused.is_some_and(|free| free.exists)),
        };
        let after = self.given(id, device);
        let warm = |state: &GpuState| state.free.iter().filter(|free| free.warm).count() as u32;
        let share = matches!(device, Device::Share { .. });
        let warm_used = u32::from(!share && reused.is_some_and(|free| free.warm));
        let warm_lost = (warm(before) - warm(self.state(after))).saturating_sub(warm_used);
        let spread = before.strategy == Strategy::Spread;
        let slices = before.geometry.map_or(0, |g| geometries[g].memory_slices.min(64));
        let taken = slices.saturating_sub(self.free_slices(id));
        let load = match device {
            Device::Share { carrier, .. } => before.shares.load(carrier),
            Device::Whole | Device::Instance { .. } => (1000 * taken).checked_div(slices).unwrap_or(0),
        };
        let worth = |id: StateId| self.states[id as usize].worth;
        let cost = Cost {
            warm_lost,
            waste: least.waste(geometries, before.geometry, device),
            switches: u32::from(switch),
            not_warm: u32::from(!share && !reused.is_some_and(|free| free.warm && free.exists)),
            load: if spread { load } else { 0 },
            loss: (worth(id).saturating_sub(worth(after)))
                .saturating_add(if exists { 0 } else { self.weights.reshape })
                .saturating_add(if spread {
                    0
                } else {
                    self.weights.left(geometries, self.state(after), device)
                }),
            left: if spread { 0 } else { self.free_slices(after) },
        };
        Offer { device, exists, after, cost }
    }
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (states, wants) = (self.states.len(), self.wants.len());
        f.debug_struct("Catalog").field("states", &states).field("wants", &wants).finish()
    }
}
