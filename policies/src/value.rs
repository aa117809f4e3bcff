//! What a GPU's room is worth, and so what a placement costs.
//!
//! The worth of a GPU is the number of placements that it could still serve, each weighted by its size and by how rare
//! its kind is. Two demands are assumed for every profile name, each for as much of a GPU as one instance takes: one
//! that any model serves, shared out over all the places that the open GPUs of the cluster have for the name, and one
//! for each model that has it, shared out over the places on that model. A whole GPU counts as one more kind. Hence a
//! start that spoils fewer and smaller placements costs less, an empty GPU costs more than a started one (it still
//! serves its largest profile), and a scarce model costs more than a common one.

use std::collections::{BTreeMap, BTreeSet};

use crate::occupancy::{Device, GpuState};
use crate::share;
use crate::snapshot::{Capability, Geometry, GeometryIndex, Gpu, Profile, ProfileIndex, Snapshot, Want};

/// Worth of all places together of a kind that takes the whole GPU.
const WHOLE: u64 = 1 << 40;

/// Making an instance rather than reusing one costs a fourth of what one GPU is worth to those who want it whole. Much
/// less, and instances are remade that would do as they are; much more, and what is there decides the packing: from half
/// of this to twice as much, as many jobs find a place as if making were free, and five in six of them an instance that
/// is there.
const RESHAPE: u64 = 4;

/// Sizes of shares that are assumed to be asked for, as parts of what carries them.
const SIZES: [u64; 4] = [share::ALL / 8, share::ALL / 4, share::ALL / 2, share::ALL];

/// Where the demand is known, what is assumed counts so many times less.
const ASSUMED: u64 = 16;

/// What is left of a carrier costs a tenth of what as much of a GPU is worth: of several carriers on which as little is
/// spoilt the fullest is taken.
const LEFT: u64 = 10;

/// What decides about the weights of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Likeness {
    /// See [`Gpu::geometry`].
    pub geometry: Option<GeometryIndex>,
    /// Whether it can be handed out whole, now or after a switch.
    pub whole: bool,
    /// See [`Gpu::allowed`].
    pub allowed: BTreeSet<ProfileIndex>,
}

impl Likeness {
    /// Of an open GPU.
    pub fn of(gpu: &Gpu) -> Option<Self> {
        let whole = gpu.whole != Capability::No;
        gpu.closed.is_none().then(|| Self { geometry: gpu.geometry, whole, allowed: gpu.allowed.clone() })
    }
}

/// Weight of each place, by kind.
#[derive(Debug, PartialEq, Eq)]
pub struct Weights {
    /// By geometry and profile.
    place: Vec<Vec<u64>>,
    /// A whole GPU.
    whole: u64,
    /// Price of an instance that does not exist yet.
    pub reshape: u64,
    /// A whole GPU, or all of an instance as a part of one, to those who ask for shares.
    pub shares: u64,
    /// What is assumed to be asked for counts so many times less.
    assumed: u64,
}

impl Weights {
    /// Weights by what these open GPUs could serve if they were empty: so many of each likeness.
    pub fn of<'l>(snapshot: &Snapshot, open: impl Iterator<Item = (u64, &'l Likeness)>) -> Self {
        let mut places: BTreeMap<&str, u64> = BTreeMap::new();
        let mut gpus = vec![0u64; snapshot.geometries.len()];
        let mut whole = 0u64;
        for (number, gpu) in open {
            whole += u64::from(gpu.whole) * number;
            let Some((index, geometry)) = gpu.geometry.and_then(|i| Some((i, snapshot.geometries.get(i)?)))
            else {
                continue;
            };
            gpus[index] += number;
            for profile in gpu.allowed.iter().filter_map(|&index| geometry.profiles.get(index)) {
                *places.entry(&profile.name).or_default() += number * profile.starts.len() as u64;
            }
        }
        let of_geometry = |(geometry, gpus): (&Geometry, &u64)| {
            let weight = |profile: &Profile| {
                let slice = WHOLE / u64::from(geometry.memory_slices.max(1));
                let demand = slice.saturating_mul(profile.size.into());
                let of_any_model = places.get(profile.name.as_str()).copied().unwrap_or(0);
                (demand / of_any_model.max(1))
                    .saturating_add(demand / (gpus * profile.starts.len() as u64).max(1))
            };
            geometry.profiles.iter().map(weight).collect()
        };
        let place = snapshot.geometries.iter().zip(&gpus).map(of_geometry).collect();
        let all = gpus.iter().sum::<u64>().max(1);
        let assumed = if snapshot.demand.is_empty() { 1 } else { ASSUMED };
        let (whole, reshape) = (WHOLE / whole.max(1), WHOLE / all / RESHAPE);
        Self { place, whole, reshape, shares: WHOLE / all, assumed }
    }

    /// Worth of a GPU in this state.
    pub fn worth(&self, geometries: &[Geometry], state: &GpuState) -> u64 {
        let mut worth = if state.whole_now() == Capability::No { 0 } else { self.whole };
        worth += self.worth_to_shares(geometries, state);
        let (Some(index), true) = (state.geometry, state.mig_now() != Capability::No) else { return worth };
        let Some(geometry) = geometries.get(index) else { return worth };
        for &profile in &state.allowed {
            let fitting = |&&start: &&u32| state.can_give(geometries, Device::Instance { profile, start });
            let places = geometry.profiles[profile].starts.iter().filter(fitting).count() as u64;
            worth = worth.saturating_add(places.saturating_mul(self.place[index][profile]));
        }
        worth
    }
}

impl Weights {
    /// What the room on carriers that are there is worth to those who ask for shares: for each size as much as there is
    /// room for, if one fits.
    fn worth_to_shares(&self, geometries: &[Geometry], state: &GpuState) -> u64 {
        let itself = (state.shared_now() != Capability::No).then_some(None);
        let instances = state.shares.carriers.iter().filter_map(|one| one.instance).map(Some);
        let of = |carrier: Option<(ProfileIndex, u32)>| {
            let free = state.shares.free_part(carrier);
            let fitting = SIZES.iter().filter(|&&size| size <= free).count() as u64;
            let part = free * fitting / SIZES.len() as u64 / self.assumed;
            self.shares_of(geometries, state, carrier, part)
        };
        itself.into_iter().chain(instances).map(of).sum()
    }

    /// Price of what is left of a carrier after a share of it was given.
    pub fn left(&self, geometries: &[Geometry], after: &GpuState, device: Device) -> u64 {
        let Device::Share { carrier, .. } = device else { return 0 };
        self.shares_of(geometries, after, carrier, after.shares.free_part(carrier)) / LEFT
    }

    /// Worth of a part of a carrier, an instance being worth as much as its part of the GPU's memory slices.
    fn shares_of(
        &self,
        geometries: &[Geometry],
        state: &GpuState,
        carrier: Option<(ProfileIndex, u32)>,
        part: u64,
    ) -> u64 {
        let part = state.part_of_gpu(geometries, carrier, part);
        (u128::from(self.shares) * u128::from(part) / u128::from(share::ALL)) as u64
    }
}

/// Price of a placement; the fields are compared in their order, and the lowest wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Warm instances that it destroys.
    pub warm_lost: u32,
    /// Quarters of a doubling of memory beyond the smallest device that would do.
    pub waste: u32,
    /// Switches of MIG mode.
    pub switches: u32,
    /// Devices that are no warm instances: those that a policy keeps ready are used first, as is their purpose.
    pub not_warm: u32,
    /// With `Spread`: share of the memory slices already taken on the GPUs, in thousandths.
    pub load: u32,
    /// Worth lost, see [`Weights`], and the price of making what does not exist.
    pub loss: u64,
    /// With `Pack`: memory slices left on the GPUs.
    pub left: u32,
}

impl Cost {
    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            warm_lost: self.warm_lost + other.warm_lost,
            waste: self.waste + other.waste,
            switches: self.switches + other.switches,
            not_warm: self.not_warm + other.not_warm,
            load: self.load + other.load,
            loss: self.loss.saturating_add(other.loss),
            left: self.left + other.left,
        }
    }
}

/// The least memory of a device that satisfies a want, in bytes, to measure waste by.
#[derive(Clone, Copy, Debug, Default)]
pub struct Least(u64);

impl Least {
    /// Least memory over all profiles that the want names.
    pub fn of(want: &Want, geometries: &[Geometry]) -> Self {
        let profiles = want.profiles.iter().flat_map(|(&geometry, profiles)| {
            profiles.iter().filter_map(move |&p| geometries.get(geometry)?.profiles.get(p))
        });
        Self(profiles.map(|profile| profile.memory_bytes).min().unwrap_or(0))
    }

    /// Waste of a device, see [`Cost::waste`]. A whole GPU counts as the largest profile of its geometry.
    pub fn waste(&self, geometries: &[Geometry], geometry: Option<GeometryIndex>, device: Device) -> u32 {
        let profiles = geometry.and_then(|index| geometries.get(index)).map_or(&[][..], |g| &g.profiles);
        let memory = match device {
            // A share is as large as what was asked for.
            Device::Share { .. } => return 0,
            Device::Instance { profile, .. } => profiles.get(profile).map_or(0, |p| p.memory_bytes),
            Device::Whole => {
                profiles.iter().map(|p| p.memory_bytes).max().unwrap_or(self.0.saturating_mul(1 << 16))
            }
        };
        // The logarithm of the ratio's fourth power, in 256ths to the fourth.
        let ratio = (u128::from(memory) << 8).checked_div(u128::from(self.0)).unwrap_or(1 << 8);
        ratio.min(1 << 24).pow(4).checked_ilog2().map_or(0, |power| power.saturating_sub(32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waste_is_counted_in_quarters_of_a_doubling() {
        let memory = [10, 11, 12, 15, 20, 40, 80];
        let profile = |gib: u64| Profile { memory_bytes: gib << 30, ..Profile::default() };
        let geometry = Geometry { profiles: memory.map(profile).into(), ..Geometry::default() };
        let want = Want { profiles: [(0, (0..7).collect())].into(), ..Want::default() };
        let geometries = [geometry];
        let least = Least::of(&want, &geometries);
        let of = |profile| least.waste(&geometries, Some(0), Device::Instance { profile, start: 0 });
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(of), [0, 0, 1, 2, 4, 8, 12]);
        assert_eq!(least.waste(&geometries, Some(0), Device::Whole), 12);
        assert_eq!(least.waste(&geometries, None, Device::Whole), 64);
        assert_eq!(Least::of(&Want::default(), &geometries).waste(&geometries, None, Device::Whole), 0);
    }
}
