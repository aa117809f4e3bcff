//! Carrying out one step.

use super::error::Failure;
use super::geometry;
use super::raw::{Library, RawInstance};
use crate::inventory::ComputeMode;
use crate::step::{Step, Target};

/// Carries out a step on the GPU with this UUID: one call that changes something, after calls that only look. Each is
/// safe to repeat: what is not as the step expects makes it fail with INVALID_STATE or NOT_FOUND before anything
/// changes.
pub fn act(library: &Library, uuid: &str, step: &Step) -> Result<(), Failure> {
    let gpu = library.gpu(uuid)?;
    match step {
        Step::EnableMig => gpu.set_mig_mode(true),
        Step::DisableMig => gpu.set_mig_mode(false),
        Step::DestroyComputeInstance { instance, compute_instance } => {
            gpu.destroy_compute_instance(raw(instance), *compute_instance)
        }
        Step::DestroyGpuInstance { instance } => gpu.destroy_instance(raw(instance)),
        Step::CreateGpuInstance { profile: _, profile_id, placement } => {
            gpu.create_instance(*profile_id, *placement).map(drop)
        }
        Step::CreateComputeInstance { instance } => {
            let profile = geometry::full_width(&gpu, instance.gpu_instance_id)?;
            gpu.create_compute_instance(raw(instance), profile)
        }
        Step::Nothing | Step::Blocked(_) => Ok(()),
    }
}

/// Sets who may have contexts on a GPU.
pub fn set_compute_mode(library: &Library, uuid: &str, mode: ComputeMode) -> Result<(), Failure> {
    library.gpu(uuid)?.set_compute_mode(mode.0)
}

fn raw(target: &Target) -> RawInstance {
    RawInstance { id: target.gpu_instance_id, profile_id: target.profile_id, placement: target.placement }
}
