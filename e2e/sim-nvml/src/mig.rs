//! MIG mode and GPU instances.

use kerf_sim::model::{Mig, Profile};
use kerf_sim::{NvmlError, geometry};

use crate::driver::{Call, Result, Target, activation_fault};
use crate::ffi::{DeviceHandle, GpuInstanceHandle, Out, chars};
use crate::nvml;
use crate::types::{GiInfo, GiProfile, GiProfileV2, GiProfileV3, Placement, version_of};

/// `NVML_GPU_INSTANCE_PROFILE_COUNT`: enumerators from here on are no profiles at all.
const PROFILE_COUNT: u32 = 0x12;

nvml! {
    fn nvmlDeviceGetMigMode(device: DeviceHandle, current: Out<u32>, pending: Out<u32>) on device |call| {
        let target = call.device(device)?;
        target.can_mig()?;
        pending.check()?;
        current.set(target.gpu.mig_current.into())?;
        pending.set(target.gpu.mig_pending.into())
    }

    fn nvmlDeviceSetMigMode(device: DeviceHandle, mode: u32, status: Out<u32>) on device |call| {
        let target = call.whole(device)?;
        status.check()?;
        target.can_mig()?;
        call.privileged()?;
        if mode > 1 {
            return Err(NvmlError::InvalidArgument);
        }
        let index = target.index;
        let activation = match activation_fault(&call.store, index)? {
            Some(error) => call.store.write(|state| {
                if let Some(gpu) = state.gpus.get_mut(index) {
                    gpu.mig_pending = mode == 1;
                }
                Ok::<_, NvmlError>(Err(error))
            })?,
            None => {
                let clients = call.clients();
                call.store.write(|state| state.set_mig_mode(target.model, index, mode == 1, &clients))?
            }
        };
        status.set(activation.map_or_else(NvmlError::code, |()| 0))
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(device: DeviceHandle, profile: u32, info: Out<GiProfile>) on device |call| {
        let target = call.whole(device)?;
        info.check()?;
        info.set(profile_v1(by_enumerator(&target, profile)?))
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(device: DeviceHandle, profile: u32, info: Out<GiProfileV2>) on device |call| {
        let target = call.whole(device)?;
        versioned_profile(call, by_enumerator(&target, profile), info)
    }

    /// By profile id instead of enumerator.
    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(device: DeviceHandle, id: u32, info: Out<GiProfileV2>) on device |call| {
        let target = call.whole(device)?;
        let profile = queryable(&target).and_then(|mig| mig.profile(id).ok_or(NvmlError::NotSupported));
        versioned_profile(call, profile, info)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(device: DeviceHandle, profile: u32, placements: Out<Placement>, count: Out<u32>) on device |call| {
        possible_placements(call, device, profile, placements, count)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(device: DeviceHandle, profile: u32, placements: Out<Placement>, count: Out<u32>) on device |call| {
        possible_placements(call, device, profile, placements, count)
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: DeviceHandle, profile: u32, count: Out<u32>) on device |call| {
        let target = call.whole(device)?;
        count.check()?;
        call.privileged()?;
        let mig = target.in_mig_mode()?;
        let profile = mig.profile(profile).ok_or(NvmlError::InvalidArgument)?;
        count.set(geometry::remaining_capacity(target.gpu, mig, profile))
    }

    fn nvmlDeviceCreateGpuInstance(device: DeviceHandle, profile: u32, instance: Out<GpuInstanceHandle>) on device |call| {
        create(call, device, profile, None, instance)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(device: DeviceHandle, profile: u32, placement: Out<Placement>, instance: Out<GpuInstanceHandle>) on device |call| {
        let placement = placement.get()?;
        create(call, device, profile, Some((placement.start, placement.size)), instance)
    }

    fn nvmlGpuInstanceDestroy(instance: GpuInstanceHandle) on instance |call| {
        let (gpu, gi) = instance.ids()?;
        call.gpu(gpu)?;
        call.privileged()?;
        let clients = call.clients();
        call.store.write(|state| state.destroy_gpu_instance(gpu, gi, &clients))
    }

    /// By profile; the array has room for the profile's maximum.
    fn nvmlDeviceGetGpuInstances(device: DeviceHandle, profile: u32, instances: Out<GpuInstanceHandle>, count: Out<u32>) on device |call| {
        let target = call.whole(device)?;
        instances.check()?;
        count.check()?;
        call.privileged()?;
        target.in_mig_mode()?.profile(profile).ok_or(NvmlError::InvalidArgument)?;
        let mut found: Vec<u32> =
            target.gpu.instances.iter().filter(|gi| gi.profile == profile).map(|gi| gi.id).collect();
        found.sort_unstable();
        let handles: Vec<_> = found.into_iter().map(|id| GpuInstanceHandle::new(target.index, id)).collect();
        instances.set_all(&handles)?;
        count.set(handles.len() as u32)
    }

    fn nvmlDeviceGetGpuInstanceById(device: DeviceHandle, id: u32, instance: Out<GpuInstanceHandle>) on device |call| {
        let target = call.whole(device)?;
        instance.check()?;
        call.privileged()?;
        target.in_mig_mode()?;
        target.gpu.instance(id).ok_or(NvmlError::NotFound)?;
        instance.set(GpuInstanceHandle::new(target.index, id))
    }

    fn nvmlGpuInstanceGetInfo(instance: GpuInstanceHandle, info: Out<GiInfo>) on instance |call| {
        let (gpu, id) = instance.ids()?;
        let gi = call.gpu(gpu)?.instance(id).ok_or(NvmlError::InvalidArgument)?;
        info.set(GiInfo {
            device: DeviceHandle::of_gpu(gpu),
            id,
            profile_id: gi.profile,
            placement: Placement { start: gi.start, size: gi.size },
        })
    }
}

/// The cutting rules, where they can be asked for: Ampere answers only in MIG mode, later ones always (field
/// 199 tells).
fn queryable<'a>(target: &Target<'a>) -> Result<&'a Mig> {
    let mig = target.can_mig()?;
    if mig.mode_change_needs_reset && !target.gpu.mig_current {
        Err(NvmlError::NotSupported)
    } else {
        Ok(mig)
    }
}

/// A known enumerator that this GPU lacks is NOT_SUPPORTED (go on), one past the last INVALID_ARGUMENT (stop).
fn by_enumerator<'a>(target: &Target<'a>, enumerator: u32) -> Result<&'a Profile> {
    if enumerator >= PROFILE_COUNT {
        return Err(NvmlError::InvalidArgument);
    }
    queryable(target)?.by_enumerator(enumerator).ok_or(NvmlError::NotSupported)
}

fn profile_v1(profile: &Profile) -> GiProfile {
    GiProfile {
        id: profile.id,
        is_p2p_supported: profile.p2p.into(),
        slice_count: profile.slices,
        instance_count: profile.max,
        multiprocessors: profile.sm,
        copy_engines: profile.engines.ce,
        decoders: profile.engines.dec,
        encoders: profile.engines.enc,
        jpegs: profile.engines.jpg,
        ofas: profile.engines.ofa,
        memory_size_mb: profile.memory_mib,
    }
}

/// Fills the structure of the version that the caller has set; others are INVALID_ARGUMENT, as documented.
fn versioned_profile(call: &Call, profile: Result<&Profile>, info: Out<GiProfileV2>) -> Result<()> {
    let v2 = version_of::<GiProfileV2>(2);
    let v3 = version_of::<GiProfileV3>(3);
    // The two structures are equally large, so reading the smaller prefix of either is within bounds.
    let version = info.cast::<u32>().get()?;
    if version != v2 && version != v3 {
        return Err(NvmlError::InvalidArgument);
    }
    let profile = profile?;
    let prefix = if call.state.options.prefixed_names { "MIG " } else { "" };
    let name = chars(&format!("{prefix}{}", profile.name));
    let common = profile_v1(profile);
    if version == v3 {
        return info.cast::<GiProfileV3>().set(GiProfileV3 {
            version,
            id: common.id,
            slice_count: common.slice_count,
            instance_count: common.instance_count,
            multiprocessors: common.multiprocessors,
            copy_engines: common.copy_engines,
            decoders: common.decoders,
            encoders: common.encoders,
            jpegs: common.jpegs,
            ofas: common.ofas,
            memory_size_mb: common.memory_size_mb,
            name,
            // Bit 0: P2P, bit 1: graphics.
            capabilities: u32::from(profile.p2p) | u32::from(profile.gfx) << 1,
        });
    }
    info.set(GiProfileV2 {
        version,
        id: common.id,
        is_p2p_supported: common.is_p2p_supported,
        slice_count: common.slice_count,
        instance_count: common.instance_count,
        multiprocessors: common.multiprocessors,
        copy_engines: common.copy_engines,
        decoders: common.decoders,
        encoders: common.encoders,
        jpegs: common.jpegs,
        ofas: common.ofas,
        memory_size_mb: common.memory_size_mb,
        name,
    })
}

/// In any mode; a null array asks for the count.
fn possible_placements(
    call: &Call,
    device: DeviceHandle,
    profile: u32,
    placements: Out<Placement>,
    count: Out<u32>,
) -> Result<()> {
    let target = call.whole(device)?;
    count.check()?;
    call.privileged()?;
    let profile = target.can_mig()?.profile(profile).ok_or(NvmlError::InvalidArgument)?;
    if !placements.is_null() {
        let all: Vec<_> =
            profile.starts.iter().map(|start| Placement { start: *start, size: profile.size }).collect();
        placements.set_all(&all)?;
    }
    count.set(profile.starts.len() as u32)
}

fn create(
    call: &Call,
    device: DeviceHandle,
    profile: u32,
    placement: Option<(u32, u32)>,
    instance: Out<GpuInstanceHandle>,
) -> Result<()> {
    let target = call.whole(device)?;
    instance.check()?;
    call.privileged()?;
    let pid = std::process::id();
    let id = call
        .store
        .write(|state| state.create_gpu_instance(target.model, target.index, profile, placement, pid))?;
    instance.set(GpuInstanceHandle::new(target.index, id))
}
