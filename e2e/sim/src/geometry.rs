//! Where instances fit, and which ids they get.

use crate::NvmlError;
use crate::model::{ComputeProfile, Engines, IdRule, Mig, Profile};
use crate::state::{Gpu, GpuInstance};

/// The width of the field of GPU-instance ids: capability minors exist for ids 0 to 14 only.
pub const MAX_GPU_INSTANCES: u32 = 15;
/// Capability minors exist for compute-instance ids 0 to 7 only.
pub const MAX_COMPUTE_INSTANCES: u32 = 8;

/// Whether two ranges `(start, size)` overlap.
fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// Engines that the instances of `gpu` have together.
fn engines_used(gpu: &Gpu, mig: &Mig) -> Engines {
    gpu.instances
        .iter()
        .filter_map(|instance| mig.profile(instance.profile))
        .fold(Engines::default(), |sum, profile| sum.plus(profile.engines))
}

fn units_free(gpu: &Gpu, start: u32, size: u32) -> bool {
    !gpu.instances.iter().any(|instance| overlap((instance.start, instance.size), (start, size)))
}

/// How many more instances of `profile` the engines allow.
fn engine_headroom(gpu: &Gpu, mig: &Mig, profile: &Profile) -> u32 {
    profile.engines.times_in(mig.budget().minus(engines_used(gpu, mig))).unwrap_or(u32::MAX)
}

/// `nvmlDeviceGetGpuInstanceRemainingCapacity`: how many more instances of `profile` fit as things are.
pub fn remaining_capacity(gpu: &Gpu, mig: &Mig, profile: &Profile) -> u32 {
    let mut starts = profile.starts.clone();
    starts.sort_unstable();
    let mut end = 0;
    let mut fitting = 0;
    for start in starts {
        if start >= end && units_free(gpu, start, profile.size) {
            fitting += 1;
            end = start + profile.size;
        }
    }
    let existing = gpu.instances.iter().filter(|instance| instance.profile == profile.id).count();
    fitting
        .min(engine_headroom(gpu, mig, profile))
        .min(profile.max.saturating_sub(u32::try_from(existing).unwrap_or(u32::MAX)))
}

/// The start of a new instance: the given one, or the first free in the model's order.
pub fn place(
    gpu: &Gpu,
    mig: &Mig,
    profile: &Profile,
    placement: Option<(u32, u32)>,
) -> Result<u32, NvmlError> {
    if let Some((start, size)) = placement
        && (size != profile.size || !profile.starts.contains(&start))
    {
        return Err(NvmlError::InvalidArgument);
    }
    if remaining_capacity(gpu, mig, profile) == 0 {
        return Err(NvmlError::InsufficientResources);
    }
    let candidates = match placement {
        Some((start, _)) => vec![start],
        None => default_starts(mig, profile),
    };
    candidates
        .into_iter()
        .find(|start| units_free(gpu, *start, profile.size))
        .ok_or(NvmlError::InsufficientResources)
}

/// The starts of `profile` in the order in which a creation without placement tries them.
fn default_starts(mig: &Mig, profile: &Profile) -> Vec<u32> {
    let mut starts = profile.starts.clone();
    starts.sort_unstable();
    if let Some(order) = mig.creation_order.starts.get(&profile.size) {
        // What the order does not name comes last, ascending.
        starts.sort_by_key(|start| order.iter().position(|entry| entry == start).unwrap_or(usize::MAX));
    }
    starts
}

/// The id of a new instance at `start`.
pub fn instance_id(gpu: &Gpu, mig: &Mig, start: u32, size: u32) -> Result<u32, NvmlError> {
    let id = match mig.ids.rule {
        IdRule::Tree => tree_id(mig.memory_slices, start, size, gpu.half_swapped),
        IdRule::LowestFree => (0..).find(|id| gpu.instance(*id).is_none()).unwrap_or(MAX_GPU_INSTANCES),
    };
    // A profile of which two can start at one node of the tree (a gap in the model) must not share an id.
    if id >= MAX_GPU_INSTANCES || gpu.instance(id).is_some() {
        return Err(NvmlError::InsufficientResources);
    }
    Ok(id)
}

/// Node number in the binary tree over the memory slices. On a half-swapped board the halves change places
/// before the count.
fn tree_id(memory_slices: u32, start: u32, size: u32, half_swapped: bool) -> u32 {
    let start = match half_swapped && size < memory_slices {
        true => (start + memory_slices / 2) % memory_slices,
        false => start,
    };
    let level = (memory_slices / size).ilog2();
    (1 << level) - 1 + start / size
}

/// How many more compute instances of `profile` fit into `instance`.
pub fn compute_remaining(instance: &GpuInstance, gi_profile: &Profile, profile: &ComputeProfile) -> u32 {
    let mut starts = profile.starts.clone();
    starts.sort_unstable();
    let mut end = 0;
    let mut fitting = 0;
    for start in starts {
        if start >= end && compute_free(instance, start, profile.size) {
            fitting += 1;
            end = start + profile.size;
        }
    }
    let used: u32 = instance
        .compute
        .iter()
        .filter_map(|ci| gi_profile.compute_profile(ci.profile))
        .map(|profile| profile.slices)
        .sum();
    fitting.min(gi_profile.slices.saturating_sub(used) / profile.slices.max(1))
}

fn compute_free(instance: &GpuInstance, start: u32, size: u32) -> bool {
    !instance.compute.iter().any(|ci| overlap((ci.start, ci.size), (start, size)))
}

/// The start and the id of a new compute instance.
pub fn place_compute(
    instance: &GpuInstance,
    gi_profile: &Profile,
    profile: &ComputeProfile,
    placement: Option<(u32, u32)>,
) -> Result<(u32, u32), NvmlError> {
    if let Some((start, size)) = placement
        && (size != profile.size || !profile.starts.contains(&start))
    {
        return Err(NvmlError::InvalidArgument);
    }
    if compute_remaining(instance, gi_profile, profile) == 0 {
        return Err(NvmlError::InsufficientResources);
    }
    let mut candidates = match placement {
        Some((start, _)) => vec![start],
        None => profile.starts.clone(),
    };
    candidates.sort_unstable();
    let start = candidates
        .into_iter()
        .find(|start| compute_free(instance, *start, profile.size))
        .ok_or(NvmlError::InsufficientResources)?;
    let id = (0..MAX_COMPUTE_INSTANCES)
        .find(|id| instance.compute_instance(*id).is_none())
        .ok_or(NvmlError::InsufficientResources)?;
    Ok((start, id))
}
