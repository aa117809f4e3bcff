//! What a GPU's room is worth, and so what a placement costs.
//!
//! The worth of a GPU is the number of placements that it could still serve, each weighted by its size and by how rare
//! its kind is. Two demands are assumed for every profile name, each for as much of a GPU as one instance takes: one
//! that any model serves, shared out over all the places that the open GPUs of the cluster have for the name, and one
//! for each model that has it, shared out over the places on that model. A whole GPU counts as one more kind. Hence a
//! start that spoils fewer and smaller placements costs less, an empty GPU costs more than a started one (it still
//! serves its largest profile), and a scarce model costs more than a common one.

use std::collections::BTreeMap;

use crate::occupancy::{Device, GpuState};
use crate::snapshot::{Capability, Geometry, GeometryIndex, Profile, Snapshot, Want};

/// Worth of all places together of a kind that takes the whole GPU.
const WHOLE: u64 = 1 << 40;

/// Making an instance rather than reusing one costs a fourth of what one GPU is worth to those who want it whole. Much
/// less, and instances are remade that would do as they are; much more, and what is there decides the packing: from half
/// of this to twice as much, as many jobs find a place as if making were free, and five in six of them an instance that
/// is there.
const RESHAPE: u64 = 4;

/// Weight of each place, by kind.
#[derive(Debug, Default)]
pub struct Weights {
    /// By geometry and profile.
    place: Vec<Vec<u64>>,
    /// A whole GPU.
    whole: u64,
    /// Price of an instance that does not exist yet.
    pub reshape: u64,
}

impl Weights {
    /// Weights by what the open GPUs of the snapshot could serve if they were empty.
    pub fn of(snapshot: &Snapshot) -> Self {
        let mut places: BTreeMap<&str, u64> = BTreeMap::new();
        let mut gpus = vec![0u64; snapshot.geometries.len()];
        let mut whole = 0u64;
        for gpu in snapshot.nodes.iter().flat_map(|node| &node.gpus).filter(|gpu| gpu.closed.is_none()) {
            whole += u64::from(gpu.whole != Capability::No);
            let Some((index, geometry)) = gpu.geometry.and_then(|i| Some((i, snapshot.geometries.get(i)?)))
            else {
                continue;
            };
            gpus[index] += 1;
            for profile in gpu.allowed.iter().filter_map(|&index| geometry.profiles.get(index)) {
                *places.entry(&profile.name).or_default() += profile.starts.len() as u64;
            }
        }
        let of_geometry = |(geometry, gpus): (&Geometry, &u64)| {
            let weight = |profile: &Profile| {
                let demand = WHOLE / u64::from(geometry.memory_slices.max(1)) * u64::from(profile.size);
                let of_any_model = places.get(profile.name.as_str()).copied().unwrap_or(0);
                demand / of_any_model.max(1) + demand / (gpus * profile.starts.len() as u64).max(1)
            };
            geometry.profiles.iter().map(weight).collect()
        };
        let place = snapshot.geometries.iter().zip(&gpus).map(of_geometry).collect();
        let all = gpus.iter().sum::<u64>().max(1);
        Self { place, whole: WHOLE / whole.max(1), reshape: WHOLE / all / RESHAPE }
    }

    /// Worth of a GPU in this state.
    pub fn worth(&self, geometries: &[Geometry], state: &GpuState) -> u64 {
        let mut worth = if state.whole_now() == Capability::No { 0 } else { self.whole };
        let (Some(index), true) = (state.geometry, state.mig_now() != Capability::No) else { return worth };
        let Some(geometry) = geometries.get(index) else { return worth };
        for &profile in &state.allowed {
            let fitting = |&&start: &&u32| state.can_give(geometries, Device::Instance { profile, start });
            let places = geometry.profiles[profile].starts.iter().filter(fitting).count() as u64;
            worth += places * self.place[index][profile];
        }
        worth
    }
}

/// Price of a placement; the fields are compared in their order, and the lowest wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Warm instances that it destroys.
    pub warm_lost: u32,
    /// Doublings of memory and of multiprocessors beyond the smallest device that would do.
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

/// The smallest device that satisfies a want, to measure waste by.
#[derive(Clone, Copy, Debug, Default)]
pub struct Least {
    memory: u64,
    multiprocessors: u32,
}

impl Least {
    /// Least memory and least multiprocessors over all profiles that the want names.
    pub fn of(want: &Want, geometries: &[Geometry]) -> Self {
        let profiles = || {
            want.profiles.iter().flat_map(|(&geometry, profiles)| {
                profiles.iter().filter_map(move |&p| geometries.get(geometry)?.profiles.get(p))
            })
        };
        Self {
            memory: profiles().map(|p| p.memory_bytes).min().unwrap_or(0),
            multiprocessors: profiles().map(|p| p.multiprocessors).min().unwrap_or(0),
        }
    }

    /// Waste of a device, see [`Cost::waste`]. A whole GPU counts as the largest profile of its geometry.
    pub fn waste(&self, geometries: &[Geometry], geometry: Option<GeometryIndex>, device: Device) -> u32 {
        let profiles = geometry.and_then(|index| geometries.get(index)).map_or(&[][..], |g| &g.profiles);
        let (memory, multiprocessors) = match device {
            Device::Instance { profile, .. } => {
                profiles.get(profile).map_or((0, 0), |p| (p.memory_bytes, p.multiprocessors))
            }
            Device::Whole => (
                profiles.iter().map(|p| p.memory_bytes).max().unwrap_or(self.memory.saturating_mul(1 << 16)),
                profiles.iter().map(|p| p.multiprocessors).max().unwrap_or(0),
            ),
        };
        let doublings =
            |has: u64, least: u64| has.checked_div(least).and_then(u64::checked_ilog2).unwrap_or(0);
        doublings(memory, self.memory) + doublings(multiprocessors.into(), self.multiprocessors.into())
    }
}
