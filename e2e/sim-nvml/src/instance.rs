//! Compute instances, and the MIG devices that they are.

use kerf_sim::model::{Mig, Profile};
use kerf_sim::state::{Gpu, GpuInstance};
use kerf_sim::{NvmlError, geometry};

use crate::driver::{Call, Result};
use crate::ffi::{ComputeInstanceHandle, DeviceHandle, GpuInstanceHandle, Out, chars};
use crate::nvml;
use crate::types::{Attributes, CiInfo, CiProfile, CiProfileV2, CiProfileV3, Placement, version_of};

/// `NVML_COMPUTE_INSTANCE_PROFILE_COUNT`.
const PROFILE_COUNT: u32 = 9;
/// `NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT`: there is only "shared".
const ENGINE_PROFILE_COUNT: u32 = 1;

nvml! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(instance: GpuInstanceHandle, profile: u32, engines: u32, info: Out<CiProfile>) on instance |call| {
        info.check()?;
        info.set(profile_info(&call.gpu_instance(instance)?, profile, engines)?.0)
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance: GpuInstanceHandle, profile: u32, engines: u32, info: Out<CiProfileV2>) on instance |call| {
        let place = call.gpu_instance(instance)?;
        let version = info.cast::<u32>().get()?;
        let (v2, v3) = (version_of::<CiProfileV2>(2), version_of::<CiProfileV3>(3));
        if version != v2 && version != v3 {
            return Err(NvmlError::InvalidArgument);
        }
        let (profile, name) = profile_info(&place, profile, engines)?;
        let prefix = if call.state.options.prefixed_names { "MIG " } else { "" };
        let name = chars(&format!("{prefix}{name}"));
        if version == v3 {
            // Bit 0: graphics.
            let capabilities = place.profile.gfx.into();
            return info.cast::<CiProfileV3>().set(CiProfileV3 { version, profile, name, capabilities });
        }
        info.set(CiProfileV2 { version, profile, name })
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance: GpuInstanceHandle, profile: u32, count: Out<u32>) on instance |call| {
        count.check()?;
        let place = call.gpu_instance(instance)?;
        call.privileged()?;
        let profile = place.compute_profile(profile)?;
        count.set(geometry::compute_remaining(place.instance, place.profile, profile))
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance: GpuInstanceHandle, profile: u32, placements: Out<Placement>, count: Out<u32>) on instance |call| {
        count.check()?;
        let place = call.gpu_instance(instance)?;
        call.privileged()?;
        let profile = place.compute_profile(profile)?;
        if !placements.is_null() {
            let all: Vec<_> =
                profile.starts.iter().map(|start| Placement { start: *start, size: profile.size }).collect();
            placements.set_all(&all)?;
        }
        count.set(profile.starts.len() as u32)
    }

    fn nvmlGpuInstanceCreateComputeInstance(instance: GpuInstanceHandle, profile: u32, compute: Out<ComputeInstanceHandle>) on instance |call| {
        create(call, instance, profile, None, compute)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance: GpuInstanceHandle, profile: u32, placement: Out<Placement>, compute: Out<ComputeInstanceHandle>) on instance |call| {
        let placement = placement.get()?;
        create(call, instance, profile, Some((placement.start, placement.size)), compute)
    }

    fn nvmlComputeInstanceDestroy(compute: ComputeInstanceHandle) on compute |call| {
        let (gpu, gi, ci) = compute.ids()?;
        call.gpu(gpu)?;
        call.privileged()?;
        let clients = call.clients();
        call.store.write(|state| state.destroy_compute_instance(gpu, gi, ci, &clients))
    }

    fn nvmlGpuInstanceGetComputeInstances(instance: GpuInstanceHandle, profile: u32, compute: Out<ComputeInstanceHandle>, count: Out<u32>) on instance |call| {
        compute.check()?;
        count.check()?;
        let place = call.gpu_instance(instance)?;
        call.privileged()?;
        place.compute_profile(profile)?;
        let mut found: Vec<u32> =
            place.instance.compute.iter().filter(|ci| ci.profile == profile).map(|ci| ci.id).collect();
        found.sort_unstable();
        let handle = |ci| ComputeInstanceHandle::new(place.index, place.instance.id, ci);
        let handles: Vec<_> = found.into_iter().map(handle).collect();
        compute.set_all(&handles)?;
        count.set(handles.len() as u32)
    }

    fn nvmlGpuInstanceGetComputeInstanceById(instance: GpuInstanceHandle, id: u32, compute: Out<ComputeInstanceHandle>) on instance |call| {
        compute.check()?;
        let place = call.gpu_instance(instance)?;
        call.privileged()?;
        place.instance.compute_instance(id).ok_or(NvmlError::NotFound)?;
        compute.set(ComputeInstanceHandle::new(place.index, place.instance.id, id))
    }

    fn nvmlComputeInstanceGetInfo_v2(compute: ComputeInstanceHandle, info: Out<CiInfo>) on compute |call| {
        info.set(compute_info(call, compute)?)
    }

    /// The first version ends before the placement, at 24 bytes.
    fn nvmlComputeInstanceGetInfo(compute: ComputeInstanceHandle, info: Out<CiInfoV1>) on compute |call| {
        let CiInfo { device, gpu_instance, id, profile_id, placement: _ } = compute_info(call, compute)?;
        info.set(CiInfoV1 { device, gpu_instance, id, profile_id })
    }

    fn nvmlDeviceIsMigDeviceHandle(device: DeviceHandle, is: Out<u32>) on device |call| {
        is.set(call.device(device)?.mig.is_some().into())
    }

    fn nvmlDeviceGetGpuInstanceId(device: DeviceHandle, id: Out<u32>) on device |call| {
        id.set(call.device(device)?.mig.ok_or(NvmlError::NotSupported)?.0.id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: DeviceHandle, id: Out<u32>) on device |call| {
        id.set(call.device(device)?.mig.ok_or(NvmlError::NotSupported)?.1.id)
    }

    /// 0 where MIG is off or not there; no error.
    fn nvmlDeviceGetMaxMigDeviceCount(device: DeviceHandle, count: Out<u32>) on device |call| {
        count.set(call.whole(device)?.in_mig_mode().map_or(0, |mig| mig.max_devices))
    }

    /// Dense, by GPU-instance id, then compute-instance id; NOT_FOUND past the last.
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: DeviceHandle, index: u32, mig_device: Out<DeviceHandle>) on device |call| {
        let target = call.whole(device)?;
        mig_device.check()?;
        let mig = target.in_mig_mode()?;
        let devices = target.gpu.mig_devices();
        let Some((gi, ci)) = devices.get(index as usize) else {
            // More compute instances than devices in the header's sense may exist, so the index decides last.
            return Err(if index < mig.max_devices { NvmlError::NotFound } else { NvmlError::InvalidArgument });
        };
        mig_device.set(DeviceHandle::of_mig_device(target.index, gi.id, ci.id))
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig_device: DeviceHandle, device: Out<DeviceHandle>) on mig_device |call| {
        let target = call.device(mig_device)?;
        if target.mig.is_none() {
            return Err(NvmlError::InvalidArgument);
        }
        device.set(DeviceHandle::of_gpu(target.index))
    }

    fn nvmlDeviceGetAttributes_v2(device: DeviceHandle, attributes: Out<Attributes>) on device |call| {
        attributes.set(attributes_of(call, device)?)
    }

    fn nvmlDeviceGetAttributes(device: DeviceHandle, attributes: Out<Attributes>) on device |call| {
        attributes.set(attributes_of(call, device)?)
    }
}

/// `nvmlComputeInstanceInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CiInfoV1 {
    device: DeviceHandle,
    gpu_instance: GpuInstanceHandle,
    id: u32,
    profile_id: u32,
}

/// A GPU instance with what its handle stands for.
struct Place<'a> {
    index: usize,
    gpu: &'a Gpu,
    mig: &'a Mig,
    instance: &'a GpuInstance,
    profile: &'a Profile,
}

impl Call {
    fn gpu_instance(&self, handle: GpuInstanceHandle) -> Result<Place<'_>> {
        let (index, id) = handle.ids()?;
        let gpu = self.gpu(index)?;
        let mig = self.model(gpu)?.mig.as_ref().ok_or(NvmlError::InvalidArgument)?;
        let instance = gpu.instance(id).ok_or(NvmlError::InvalidArgument)?;
        let profile = mig.profile(instance.profile).ok_or(NvmlError::Unknown)?;
        Ok(Place { index, gpu, mig, instance, profile })
    }
}

impl<'a> Place<'a> {
    /// A profile by id: NOT_SUPPORTED if only other GPU instances offer it, INVALID_ARGUMENT if none does.
    fn compute_profile(&self, id: u32) -> Result<&'a kerf_sim::model::ComputeProfile> {
        let known = || self.mig.profiles.iter().any(|profile| profile.compute_profile(id).is_some());
        self.profile
            .compute_profile(id)
            .ok_or_else(|| if known() { NvmlError::NotSupported } else { NvmlError::InvalidArgument })
    }
}

/// A compute profile by enumerator, and its name. The engines are those of the GPU instance, shared.
fn profile_info<'a>(place: &Place<'a>, enumerator: u32, engine_profile: u32) -> Result<(CiProfile, &'a str)> {
    if enumerator >= PROFILE_COUNT || engine_profile >= ENGINE_PROFILE_COUNT {
        return Err(NvmlError::InvalidArgument);
    }
    let mut profiles = place.profile.compute.profiles.iter();
    let profile = profiles.find(|profile| profile.enumerator == enumerator).ok_or(NvmlError::NotSupported)?;
    let engines = place.profile.engines;
    let info = CiProfile {
        id: profile.id,
        slice_count: profile.slices,
        instance_count: profile.max,
        multiprocessors: profile.sm,
        copy_engines: engines.ce,
        decoders: engines.dec,
        encoders: engines.enc,
        jpegs: engines.jpg,
        ofas: engines.ofa,
    };
    Ok((info, &profile.name))
}

fn create(
    call: &Call,
    instance: GpuInstanceHandle,
    profile: u32,
    placement: Option<(u32, u32)>,
    compute: Out<ComputeInstanceHandle>,
) -> Result<()> {
    compute.check()?;
    let place = call.gpu_instance(instance)?;
    call.privileged()?;
    let (index, gi) = (place.index, place.instance.id);
    let model = call.model(place.gpu)?;
    let id = call.store.write(|state| state.create_compute_instance(model, index, gi, profile, placement))?;
    compute.set(ComputeInstanceHandle::new(index, gi, id))
}

fn compute_info(call: &Call, handle: ComputeInstanceHandle) -> Result<CiInfo> {
    let (gpu, gi, id) = handle.ids()?;
    let instance = call.gpu(gpu)?.instance(gi).ok_or(NvmlError::InvalidArgument)?;
    let compute = instance.compute_instance(id).ok_or(NvmlError::InvalidArgument)?;
    Ok(CiInfo {
        device: DeviceHandle::of_gpu(gpu),
        gpu_instance: GpuInstanceHandle::new(gpu, gi),
        id,
        profile_id: compute.profile,
        placement: Placement { start: compute.start, size: compute.size },
    })
}

/// Of MIG devices only; NOT_SUPPORTED for a GPU.
fn attributes_of(call: &Call, device: DeviceHandle) -> Result<Attributes> {
    let target = call.device(device)?;
    let (gi, ci) = target.mig.ok_or(NvmlError::NotSupported)?;
    let profile = target.can_mig()?.profile(gi.profile).ok_or(NvmlError::Unknown)?;
    let compute = profile.compute_profile(ci.profile).ok_or(NvmlError::Unknown)?;
    Ok(Attributes {
        multiprocessors: compute.sm,
        copy_engines: profile.engines.ce,
        decoders: profile.engines.dec,
        encoders: profile.engines.enc,
        jpegs: profile.engines.jpg,
        ofas: profile.engines.ofa,
        gi_slices: profile.slices,
        ci_slices: compute.slices,
        memory_size_mb: profile.memory_mib,
    })
}
