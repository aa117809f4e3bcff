//! Shares: parts of a GPU or of an instance, of any size.

use std::collections::BTreeMap;

use crate::snapshot::{Capability, Carrier, Geometry, GeometryIndex, Portion, ProfileIndex};

/// All of a carrier, in the unit in which parts of it are counted.
pub const ALL: u64 = 1 << 20;

impl Portion {
    /// Whether this much is left, of `room`, beside `used`.
    pub fn fits(&self, room: &Self, used: &Self) -> bool {
        let enough = |more: u64, used: u64, all: u64| used.checked_add(more).is_some_and(|sum| sum <= all);
        enough(self.memory_bytes, used.memory_bytes, room.memory_bytes)
            && enough(self.compute_milli, used.compute_milli, room.compute_milli)
            && enough(self.clients.max(1).into(), used.clients.into(), room.clients.into())
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            compute_milli: self.compute_milli.saturating_add(other.compute_milli),
            clients: self.clients.saturating_add(other.clients.max(1)),
        }
    }

    /// What is left without the other.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_sub(other.memory_bytes),
            compute_milli: self.compute_milli.saturating_sub(other.compute_milli),
            clients: self.clients.saturating_sub(other.clients.max(1)),
        }
    }

    /// How many of this size `free` has room for.
    pub fn times(&self, free: &Self) -> u64 {
        let of = |size: u64, free: u64| free.checked_div(size).unwrap_or(u64::MAX);
        of(self.memory_bytes, free.memory_bytes)
            .min(of(self.compute_milli, free.compute_milli))
            .min(of(self.clients.max(1).into(), free.clients.into()))
    }

    /// What part of `room` can still be used by somebody who needs its resources in the proportion in which it has them:
    /// that of the scarcest, in parts of [`ALL`]. What is left of the others is of no use.
    pub fn part_of(&self, room: &Self) -> u64 {
        if self.clients == 0 { 0 } else { self.parts_of(room).into_iter().flatten().min().unwrap_or(ALL) }
    }

    /// What part of `room` a share of this size takes: that of the resource of which it takes most, in parts of [`ALL`].
    pub fn size_in(&self, room: &Self) -> u64 {
        self.parts_of(room).into_iter().flatten().max().unwrap_or(0)
    }

    /// Parts of the room's memory and compute, in parts of [`ALL`]; `None`: it has none.
    fn parts_of(&self, room: &Self) -> [Option<u64>; 2] {
        let of = |mine: u64, all: u64| {
            let part = (u128::from(mine) * u128::from(ALL)).checked_div(u128::from(all));
            part.map(|part| part.min(ALL.into()) as u64)
        };
        [of(self.memory_bytes, room.memory_bytes), of(self.compute_milli, room.compute_milli)]
    }
}

/// The shares that are wanted of a geometry, by what carries them.
pub fn on(
    wanted: &BTreeMap<(GeometryIndex, Carrier), Portion>,
    geometry: Option<GeometryIndex>,
) -> impl Iterator<Item = (Carrier, Portion)> {
    let of_it = geometry.map(|index| wanted.range((index, None)..=(index, Some(ProfileIndex::MAX))));
    of_it.into_iter().flatten().map(|(&(_, carrier), &portion)| (carrier, portion))
}

/// How much of a GPU a part of an instance is, both in parts of [`ALL`]: an instance is as much as its memory slices are.
pub fn of_gpu(geometry: &Geometry, profile: ProfileIndex, part: u64) -> u64 {
    let size = geometry.profiles.get(profile).map_or(0, |profile| profile.size);
    (part * u64::from(size)).checked_div(geometry.memory_slices.into()).unwrap_or(0)
}

/// What the shares on a GPU take of one carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Carrying {
    /// The instance, by profile and start; `None`: the GPU itself.
    pub instance: Option<(usize, u32)>,
    /// What all its shares take.
    pub used: Portion,
    /// What one of them takes, where all must be of one size.
    pub each: Option<Portion>,
    /// Whether the instance exists in the hardware.
    pub exists: bool,
}

/// Shares on a GPU, and room for more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Shares {
    /// Whether the GPU itself can carry shares, unless something else of it is taken.
    pub itself: Capability,
    /// Whether all shares of one carrier must be of one size.
    pub equal: bool,
    /// What all shares of a carrier together may take, in order.
    pub room: Vec<(Carrier, Portion)>,
    /// Carriers with shares, in order.
    pub carriers: Vec<Carrying>,
}

impl Shares {
    /// What all shares of a carrier of this kind may take.
    pub fn room(&self, carrier: Carrier) -> Option<&Portion> {
        self.room.iter().find(|(kind, _)| *kind == carrier).map(|(_, room)| room)
    }

    /// The carrier, if it carries any.
    pub fn carrier(&self, instance: Option<(usize, u32)>) -> Option<&Carrying> {
        self.carriers.iter().find(|one| one.instance == instance)
    }

    /// What the shares of the carrier take; `None`: it carries none.
    pub fn used(&self, instance: Option<(usize, u32)>) -> Option<&Portion> {
        self.carrier(instance).map(|one| &one.used)
    }

    /// Whether the GPU itself carries shares.
    pub fn on_itself(&self) -> bool {
        self.carriers.first().is_some_and(|one| one.instance.is_none())
    }

    /// Whether the carrier, which has room for nobody else's, has room for one more of this size.
    pub fn fits(&self, instance: Option<(usize, u32)>, portion: &Portion) -> bool {
        let carrier = self.carrier(instance);
        let used = carrier.map(|one| one.used).unwrap_or_default();
        let of_one_size = carrier.and_then(|one| one.each).is_none_or(|each| each == *portion);
        of_one_size
            && self.room(instance.map(|(profile, _)| profile)).is_some_and(|room| portion.fits(room, &used))
    }

    /// What is left of a carrier.
    pub fn free(&self, instance: Option<(usize, u32)>) -> Option<Portion> {
        let room = self.room(instance.map(|(profile, _)| profile))?;
        let used = self.used(instance).copied().unwrap_or_default();
        Some(Portion {
            memory_bytes: room.memory_bytes.saturating_sub(used.memory_bytes),
            compute_milli: room.compute_milli.saturating_sub(used.compute_milli),
            clients: room.clients.saturating_sub(used.clients),
        })
    }

    /// What part of a carrier is left, see [`Portion::part_of`].
    pub fn free_part(&self, instance: Option<(usize, u32)>) -> u64 {
        let room = self.room(instance.map(|(profile, _)| profile));
        room.zip(self.free(instance)).map_or(0, |(room, free)| free.part_of(room))
    }

    /// Share of the carrier that is taken, in thousandths.
    pub fn load(&self, instance: Option<(usize, u32)>) -> u32 {
        let room = self.room(instance.map(|(profile, _)| profile));
        let used = self.used(instance);
        room.zip(used).map_or(0, |(room, used)| (1000 * used.size_in(room) / ALL) as u32)
    }

    /// Takes a share, fitting or not.
    pub fn take(&mut self, instance: Option<(usize, u32)>, portion: &Portion, exists: bool) {
        match self.carriers.iter_mut().find(|one| one.instance == instance) {
            Some(one) => one.used = one.used.plus(portion),
            None => {
                let (used, each) = (Portion::default().plus(portion), self.equal.then_some(*portion));
                self.carriers.push(Carrying { instance, used, each, exists });
                self.carriers.sort_unstable();
            }
        }
    }

    /// Undoes [`Shares::take`]. Answers whether the carrier carries nothing now.
    pub fn release(&mut self, instance: Option<(usize, u32)>, portion: &Portion) -> bool {
        let Some(one) = self.carriers.iter_mut().find(|one| one.instance == instance) else { return false };
        one.used = one.used.minus(portion);
        let empty = one.used.clients == 0;
        self.carriers.retain(|one| one.used.clients > 0);
        empty
    }
}
