//! What is on one GPU, as far as it decides what else fits: slice masks, engine budgets, and the instances that can be
//! had. Two GPUs in equal [`GpuState`]s are interchangeable, so everything derived from one is computed once.

use crate::share::{self, Shares};
use crate::snapshot::{
    Capability, Carrier, Engines, Geometry, GeometryIndex, Gpu, Instance, InstanceState, PlacedDevice,
    Portion, Profile, ProfileIndex, Strategy,
};

/// A set of memory slices: bit `i` stands for slice `i`.
pub type Slices = u64;

/// The slices `[start, start + size)`; those beyond the 64th are left out.
pub fn slices(start: u32, size: u32) -> Slices {
    let upto = |end: u32| if end >= 64 { Slices::MAX } else { (1 << end) - 1 };
    upto(start.saturating_add(size)) & !upto(start.min(64))
}

/// Slices, engines and instance counts that are spoken for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Occupancy {
    /// Memory slices.
    pub slices: Slices,
    /// Engines.
    pub engines: Engines,
    /// Instances per profile, by index into the geometry.
    pub counts: Vec<u32>,
    /// All instances, those of unknown profiles included.
    pub instances: u32,
}

impl Occupancy {
    /// Nothing is taken.
    pub fn empty(geometry: &Geometry) -> Self {
        Self { counts: vec![0; geometry.profiles.len()], ..Self::default() }
    }

    /// Whether an instance of the profile fits at the place: a placement of its geometry, slices and engines free, not
    /// more than the GPU can have.
    pub fn fits(&self, geometry: &Geometry, profile: ProfileIndex, start: u32) -> bool {
        let Some(shape) = geometry.profiles.get(profile) else { return false };
        let within = start.checked_add(shape.size).is_some_and(|end| end <= geometry.memory_slices.min(64));
        within
            && shape.size > 0
            && shape.starts.contains(&start)
            && self.slices & slices(start, shape.size) == 0
            && self.engines_allow(geometry, shape)
            && self.count(profile) < shape.max_instances
    }

    /// Whether the profile's engines are free, and the GPU may have one more of it.
    pub fn budget_allows(&self, geometry: &Geometry, profile: ProfileIndex) -> bool {
        geometry.profiles.get(profile).is_some_and(|shape| {
            self.engines_allow(geometry, shape) && self.count(profile) < shape.max_instances
        })
    }

    fn engines_allow(&self, geometry: &Geometry, shape: &Profile) -> bool {
        let (used, more, all) = (&self.engines, &shape.engines, &geometry.engines);
        used.decoder.saturating_add(more.decoder) <= all.decoder
            && used.encoder.saturating_add(more.encoder) <= all.encoder
            && used.jpeg.saturating_add(more.jpeg) <= all.jpeg
            && used.ofa.saturating_add(more.ofa) <= all.ofa
    }

    fn count(&self, profile: ProfileIndex) -> u32 {
        self.counts.get(profile).copied().unwrap_or(0)
    }

    /// Takes an instance of the profile at the place, fitting or not.
    pub fn take(&mut self, geometry: &Geometry, profile: ProfileIndex, start: u32) {
        let Some(shape) = geometry.profiles.get(profile) else { return };
        self.slices |= slices(start, shape.size);
        self.engines.decoder = self.engines.decoder.saturating_add(shape.engines.decoder);
        self.engines.encoder = self.engines.encoder.saturating_add(shape.engines.encoder);
        self.engines.jpeg = self.engines.jpeg.saturating_add(shape.engines.jpeg);
        self.engines.ofa = self.engines.ofa.saturating_add(shape.engines.ofa);
        if let Some(count) = self.counts.get_mut(profile) {
            *count += 1;
        }
        self.instances += 1;
    }

    /// Undoes [`Occupancy::take`].
    pub fn release(&mut self, geometry: &Geometry, profile: ProfileIndex, start: u32) {
        let Some(shape) = geometry.profiles.get(profile) else { return };
        self.slices &= !slices(start, shape.size);
        self.engines.decoder = self.engines.decoder.saturating_sub(shape.engines.decoder);
        self.engines.encoder = self.engines.encoder.saturating_sub(shape.engines.encoder);
        self.engines.jpeg = self.engines.jpeg.saturating_sub(shape.engines.jpeg);
        self.engines.ofa = self.engines.ofa.saturating_sub(shape.engines.ofa);
        if let Some(count) = self.counts.get_mut(profile) {
            *count = count.saturating_sub(1);
        }
        self.instances = self.instances.saturating_sub(1);
    }

    /// The most instances of the given profiles that could still be added: never too low, and exact where slices alone
    /// decide and one profile is asked for.
    pub fn room_for(&self, geometry: &Geometry, profiles: &[ProfileIndex]) -> u32 {
        // Interval scheduling: of the placements that fit, always the one that ends first.
        let mut places: Vec<(u32, u32)> = Vec::new();
        for &profile in profiles {
            let Some(shape) = geometry.profiles.get(profile) else { continue };
            let fitting = shape.starts.iter().filter(|&&start| self.fits(geometry, profile, start));
            places.extend(fitting.map(|&start| (start + shape.size, start)));
        }
        places.sort_unstable();
        let (mut end_of_last, mut disjoint) = (0, 0u32);
        for (end, start) in places {
            if start >= end_of_last {
                disjoint += 1;
                end_of_last = end;
            }
        }
        let allowed: u32 = profiles
            .iter()
            .filter_map(|&profile| Some((profile, geometry.profiles.get(profile)?)))
            .map(|(profile, shape)| shape.max_instances.saturating_sub(self.count(profile)))
            .fold(0, u32::saturating_add);
        disjoint.min(allowed)
    }
}

/// An instance that nobody has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FreeInstance {
    /// Kept ready by a policy.
    pub warm: bool,
    /// First memory slice.
    pub start: u32,
    /// Its profile.
    pub profile: ProfileIndex,
    /// Whether it exists in the hardware.
    pub exists: bool,
}

/// A GPU without its identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuState {
    /// What it can be cut into.
    pub geometry: Option<GeometryIndex>,
    /// Whether instances can be had, unless the GPU is taken whole.
    pub mig: Capability,
    /// Whether the whole GPU can be had, unless something of it is taken.
    pub whole: Capability,
    /// Somebody has all of it.
    pub taken_whole: bool,
    /// Fill started GPUs first, or prefer the emptiest.
    pub strategy: Strategy,
    /// Instances are handed out as they are.
    pub fixed: bool,
    /// Profiles that may be handed out, in order.
    pub allowed: Vec<ProfileIndex>,
    /// What somebody has.
    pub taken: Occupancy,
    /// What nobody has.
    pub free: Vec<FreeInstance>,
    /// Shares, and room for more.
    pub shares: Shares,
}

/// A device that a GPU can give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// All of it.
    Whole,
    /// A MIG instance.
    Instance {
        /// Its profile.
        profile: ProfileIndex,
        /// First memory slice.
        start: u32,
    },
    /// A share.
    Share {
        /// The instance that carries it, by profile and start; `None`: the GPU itself.
        carrier: Option<(ProfileIndex, u32)>,
        /// What it takes.
        portion: Portion,
    },
}

impl Device {
    /// The device of a plan.
    pub fn of(placed: &PlacedDevice) -> Self {
        let instance = placed.carrier();
        match (placed.share, instance) {
            (Some(portion), carrier) => Self::Share { carrier, portion },
            (None, Some((profile, start))) => Self::Instance { profile, start },
            (None, None) => Self::Whole,
        }
    }

    /// The instance that it is, or that carries it.
    pub fn instance(self) -> Option<(ProfileIndex, u32)> {
        match self {
            Self::Whole => None,
            Self::Instance { profile, start } => Some((profile, start)),
            Self::Share { carrier, .. } => carrier,
        }
    }
}

impl GpuState {
    /// The state of the GPU if nothing was on it and it was neither closed nor stuck. What a stated layout has is free.
    pub fn emptied(gpu: &Gpu, geometries: &[Geometry]) -> Self {
        Self::of(&Gpu { closed: None, stuck: None, ..gpu.emptied() }, geometries)
    }

    /// The state of a GPU of the snapshot. One that is closed, or of which the snapshot says something impossible,
    /// gives nothing.
    pub fn of(gpu: &Gpu, geometries: &[Geometry]) -> Self {
        let geometry = gpu.geometry.and_then(|index| Some((index, geometries.get(index)?)));
        let mut state = Self {
            geometry: geometry.map(|(index, _)| index),
            mig: gpu.mig,
            whole: gpu.whole,
            taken_whole: gpu.taken_whole,
            strategy: gpu.strategy,
            fixed: gpu.fixed || gpu.stuck.is_some(),
            allowed: Vec::new(),
            taken: Occupancy::default(),
            free: Vec::new(),
            shares: Shares {
                itself: gpu.shared,
                equal: gpu.equal_shares,
                room: gpu.share_room.iter().map(|(&carrier, &room)| (carrier, room)).collect(),
                carriers: Vec::new(),
            },
        };
        for share in gpu.shares_there() {
            let it = |one: &&Instance| share.instance == one.profile.map(|profile| (profile, one.start));
            let exists = gpu.instances.iter().find(it).is_none_or(|instance| instance.exists);
            state.shares.take(share.instance, &share.portion, exists);
        }
        let taken = |state| state == InstanceState::Taken;
        if gpu.closed.is_some() {
            state.mig = Capability::No;
            state.whole = Capability::No;
            state.shares.itself = Capability::No;
            state.shares.room.clear();
        }
        if gpu.stuck.is_some() {
            for use_of in [&mut state.mig, &mut state.whole, &mut state.shares.itself] {
                if *use_of == Capability::AfterSwitch {
                    *use_of = Capability::No;
                }
            }
        }
        if gpu.instances.iter().any(|instance| taken(instance.state) && instance.exists) {
            // Instances exist, yet MIG mode is off: the report is in between, wait for the next.
            if state.mig == Capability::AfterSwitch {
                state.mig = Capability::No;
            }
        }
        let Some((_, geometry)) = geometry else {
            state.mig = Capability::No;
            state.taken.instances = gpu.instances.iter().filter(|one| taken(one.state)).count() as u32;
            return state;
        };
        state.allowed = gpu.allowed.iter().copied().filter(|&p| p < geometry.profiles.len()).collect();
        state.taken = Occupancy::empty(geometry);
        for instance in gpu.instances.iter().filter(|instance| taken(instance.state)) {
            state.taken.slices |= slices(instance.start, instance.size);
            match instance.profile.filter(|&profile| profile < geometry.profiles.len()) {
                Some(profile) => state.taken.take(geometry, profile, instance.start),
                None => state.taken.instances += 1,
            }
        }
        let nobodys = gpu.instances.iter().filter(|instance| !taken(instance.state));
        state.free = nobodys
            .filter(|instance| instance.exists || gpu.stuck.is_none())
            .filter_map(|instance| {
                Some(FreeInstance {
                    warm: instance.state == InstanceState::Warm,
                    start: instance.start,
                    profile: instance.profile?,
                    exists: instance.exists,
                })
            })
            .collect();
        state.free.sort_unstable();
        state
    }

    /// The free instance at exactly this place.
    pub fn free_at(&self, profile: ProfileIndex, start: u32) -> Option<&FreeInstance> {
        self.free.iter().find(|free| free.profile == profile && free.start == start)
    }

    /// Whether instances can be had, as far as the whole GPU matters.
    pub fn mig_now(&self) -> Capability {
        if self.taken_whole || self.shares.on_itself() { Capability::No } else { self.mig }
    }

    /// Whether the whole GPU can be had now.
    pub fn whole_now(&self) -> Capability {
        if self.is_untouched() { self.whole } else { Capability::No }
    }

    /// Whether the GPU itself can carry one more share now, if it has the room.
    pub fn shared_now(&self) -> Capability {
        if self.taken_whole || self.taken.instances > 0 { Capability::No } else { self.shares.itself }
    }

    /// Whether nobody has anything of it.
    pub fn is_untouched(&self) -> bool {
        !self.taken_whole && self.taken.instances == 0 && self.shares.carriers.is_empty()
    }

    /// Whether nobody has any of the device's slices.
    pub fn is_free(&self, geometries: &[Geometry], device: Device) -> bool {
        let size = |profile: ProfileIndex| Some(geometries.get(self.geometry?)?.profiles.get(profile)?.size);
        match device {
            Device::Whole | Device::Share { carrier: None, .. } => self.is_untouched(),
            Device::Instance { profile, start } | Device::Share { carrier: Some((profile, start)), .. } => {
                size(profile).is_some_and(|size| {
                    let others = self.taken_whole || self.shares.on_itself();
                    !others && self.taken.slices & slices(start, size) == 0
                })
            }
        }
    }

    /// Whether the GPU can give the device now.
    pub fn can_give(&self, geometries: &[Geometry], device: Device) -> bool {
        match device {
            Device::Whole => self.whole_now() != Capability::No,
            Device::Instance { profile, start } => {
                let Some(geometry) = self.geometry.and_then(|index| geometries.get(index)) else {
                    return false;
                };
                self.mig_now() != Capability::No
                    && self.allowed.binary_search(&profile).is_ok()
                    && self.taken.fits(geometry, profile, start)
                    && (!self.fixed || self.free_at(profile, start).is_some())
            }
            Device::Share { carrier: None, portion } => {
                self.shared_now() != Capability::No && self.shares.fits(None, &portion)
            }
            Device::Share { carrier: Some((profile, start)), portion } => {
                let there = self.shares.used(Some((profile, start))).is_some();
                self.mig_now() != Capability::No
                    && self.shares.fits(Some((profile, start)), &portion)
                    && (there || self.can_give(geometries, Device::Instance { profile, start }))
            }
        }
    }

    /// Whether the GPU can give any device now.
    pub fn gives(&self, geometries: &[Geometry]) -> bool {
        let Some(geometry) = self.geometry.and_then(|index| geometries.get(index)) else {
            return self.can_give(geometries, Device::Whole);
        };
        let any = |&profile: &ProfileIndex| {
            let mut starts = geometry.profiles[profile].starts.iter();
            starts.any(|&start| self.can_give(geometries, Device::Instance { profile, start }))
        };
        let one_more = |carrier: Option<(usize, u32)>| {
            let portion = self.shares.carrier(carrier).and_then(|one| one.each).unwrap_or_default();
            self.can_give(geometries, Device::Share { carrier, portion })
        };
        let more = |&(carrier, _): &(Carrier, Portion)| match carrier {
            None => one_more(None),
            Some(_) => self.shares.carriers.iter().any(|one| one_more(one.instance)),
        };
        self.can_give(geometries, Device::Whole)
            || self.allowed.iter().any(any)
            || self.shares.room.iter().any(more)
    }

    /// The state after the device was given away. Free instances that cannot stay beside it are gone.
    pub fn give(&self, geometries: &[Geometry], device: Device) -> Self {
        let mut after = self.clone();
        match (device, self.geometry.and_then(|index| geometries.get(index))) {
            (Device::Instance { profile, start }, Some(geometry)) => {
                after.in_mig_mode(true);
                after.taken.take(geometry, profile, start);
                after.free.clear();
                // Warm ones stay before idle ones, where the GPU's engines do not allow both.
                let mut standing = after.taken.clone();
                for free in self.free.iter().rev() {
                    if standing.fits(geometry, free.profile, free.start) {
                        standing.take(geometry, free.profile, free.start);
                        after.free.push(*free);
                    }
                }
                after.free.sort_unstable();
            }
            (Device::Share { carrier: Some((profile, start)), portion }, Some(_)) => {
                if self.shares.used(Some((profile, start))).is_none() {
                    after = self.give(geometries, Device::Instance { profile, start });
                }
                let exists = self.free_at(profile, start).is_some_and(|free| free.exists);
                after.shares.take(Some((profile, start)), &portion, exists);
            }
            (Device::Share { portion, .. }, _) => {
                after.in_mig_mode(false);
                after.shares.take(None, &portion, true);
                after.free.clear();
            }
            _ => {
                after.in_mig_mode(false);
                after.taken_whole = true;
                after.free.clear();
            }
        }
        after
    }

    /// MIG mode is switched, if it is the other.
    fn in_mig_mode(&mut self, on: bool) {
        let switched = |of_mode: &mut Capability| {
            if *of_mode == Capability::AfterSwitch {
                *of_mode = Capability::Now;
                return true;
            }
            false
        };
        let elsewhere = |other: &mut Capability| {
            if *other == Capability::Now {
                *other = Capability::AfterSwitch;
            }
        };
        let (mig, whole, itself) = (&mut self.mig, &mut self.whole, &mut self.shares.itself);
        if on {
            if switched(mig) {
                elsewhere(whole);
                elsewhere(itself);
            }
        } else if switched(whole) | switched(itself) {
            elsewhere(mig);
        }
    }

    /// The state after a device that was given has come back. An instance stays, as nobody's.
    pub fn take_back(&self, geometries: &[Geometry], device: Device) -> Self {
        let mut after = self.clone();
        match (device, self.geometry.and_then(|index| geometries.get(index))) {
            (Device::Instance { profile, start }, Some(geometry)) => {
                after.taken.release(geometry, profile, start);
                after.free.push(FreeInstance { warm: false, start, profile, exists: true });
                after.free.sort_unstable();
            }
            (Device::Share { carrier, portion }, _) => {
                let empty = after.shares.release(carrier, &portion);
                if let (Some((profile, start)), true) = (carrier, empty) {
                    after = after.take_back(geometries, Device::Instance { profile, start });
                }
            }
            _ => after.taken_whole = false,
        }
        after
    }

    /// How much of the GPU a part of it, or of one of its instances, is, in parts of [`share::ALL`].
    pub fn part_of_gpu(
        &self,
        geometries: &[Geometry],
        instance: Option<(ProfileIndex, u32)>,
        part: u64,
    ) -> u64 {
        match (instance, self.geometry.and_then(|index| geometries.get(index))) {
            (Some((profile, _)), Some(geometry)) => share::of_gpu(geometry, profile, part),
            _ => part,
        }
    }

    /// Memory slices that nobody has.
    pub fn free_slices(&self, geometries: &[Geometry]) -> u32 {
        let all =
            self.geometry.and_then(|index| geometries.get(index)).map_or(0, |g| g.memory_slices.min(64));
        (slices(0, all) & !self.taken.slices).count_ones()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_half_open_and_stop_at_64() {
        assert_eq!(slices(0, 8), 0xff);
        assert_eq!(slices(3, 3), 0b11_1000);
        assert_eq!(slices(0, 64), Slices::MAX);
        assert_eq!(slices(60, 30), 0xf << 60);
        assert_eq!(slices(u32::MAX, u32::MAX), 0);
    }
}
