//! Field values and readings that clients ask for in passing. There is nothing to measure: readings are those
//! of an idle, healthy board, and utilisation does not exist in MIG mode.

use kerf_sim::NvmlError;

use crate::driver::{Call, Result};
use crate::ffi::{DeviceHandle, Out};
use crate::nvml;
use crate::types::{FieldValue, Temperature, Utilization, version_of};

/// `NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED`.
const FIELD_RESETLESS_MIG: u32 = 184;
/// `NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE`.
const FIELD_MIG_QUERY_IN_ANY_MODE: u32 = 199;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`: 0 none, 1 a reset of the GPU.
const FIELD_RECOVERY_ACTION: u32 = 230;
/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED_INT: u32 = 1;

const IDLE_CELSIUS: u32 = 30;
const IDLE_MILLIWATTS: u32 = 60_000;
const LIMIT_MILLIWATTS: u32 = 400_000;

nvml! {
    /// Each value has a return code of its own.
    fn nvmlDeviceGetFieldValues(device: DeviceHandle, count: i32, values: Out<FieldValue>) on device |call| {
        let target = call.device(device)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(NvmlError::InvalidArgument)?;
        values.check()?;
        let resetless = target.model.mig.as_ref().map(|mig| !mig.mode_change_needs_reset);
        for index in 0..count {
            let slot = values.at(index);
            let mut value = slot.get()?;
            let found = match value.field_id {
                FIELD_RESETLESS_MIG | FIELD_MIG_QUERY_IN_ANY_MODE => resetless.map(u64::from),
                FIELD_RECOVERY_ACTION => Some(target.gpu.needs_reset.into()),
                _ => None,
            };
            value.timestamp = 0;
            value.latency_usec = 0;
            value.value_type = UNSIGNED_INT;
            value.nvml_return = if found.is_some() { 0 } else { NvmlError::NotSupported.code() };
            value.value = found.unwrap_or_default();
            slot.set(value)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetPersistenceMode(device: DeviceHandle, mode: Out<u32>) on device |call| {
        mode.set(call.device(device)?.gpu.persistence.into())
    }

    fn nvmlDeviceSetPersistenceMode(device: DeviceHandle, mode: u32) on device |call| {
        let target = call.whole(device)?;
        call.root()?;
        if mode > 1 {
            return Err(NvmlError::InvalidArgument);
        }
        call.store.write(|state| {
            state.gpus.get_mut(target.index).ok_or(NvmlError::InvalidArgument)?.persistence = mode == 1;
            Ok(())
        })
    }

    fn nvmlDeviceGetEccMode(device: DeviceHandle, current: Out<u32>, pending: Out<u32>) on device |call| {
        call.device(device)?;
        current.set(1)?;
        pending.set(1)
    }

    fn nvmlDeviceGetTotalEccErrors(device: DeviceHandle, _kind: u32, _counter: u32, count: Out<u64>) on device |call| {
        call.device(device)?;
        count.set(0)
    }

    fn nvmlDeviceGetTemperature(device: DeviceHandle, _sensor: u32, celsius: Out<u32>) on device |call| {
        not_in_mig_device(call, device)?;
        celsius.set(IDLE_CELSIUS)
    }

    fn nvmlDeviceGetTemperatureV(device: DeviceHandle, temperature: Out<Temperature>) on device |call| {
        not_in_mig_device(call, device)?;
        let asked = temperature.get()?;
        if asked.version != version_of::<Temperature>(1) {
            return Err(NvmlError::ArgumentVersionMismatch);
        }
        temperature.set(Temperature { celsius: IDLE_CELSIUS as i32, ..asked })
    }

    fn nvmlDeviceGetPowerUsage(device: DeviceHandle, milliwatts: Out<u32>) on device |call| {
        not_in_mig_device(call, device)?;
        milliwatts.set(IDLE_MILLIWATTS)
    }

    fn nvmlDeviceGetPowerManagementLimit(device: DeviceHandle, milliwatts: Out<u32>) on device |call| {
        not_in_mig_device(call, device)?;
        milliwatts.set(LIMIT_MILLIWATTS)
    }

    fn nvmlDeviceGetEnforcedPowerLimit(device: DeviceHandle, milliwatts: Out<u32>) on device |call| {
        not_in_mig_device(call, device)?;
        milliwatts.set(LIMIT_MILLIWATTS)
    }

    /// `NVML_PSTATE_0`.
    fn nvmlDeviceGetPerformanceState(device: DeviceHandle, state: Out<u32>) on device |call| {
        not_in_mig_device(call, device)?;
        state.set(0)
    }

    /// NOT_SUPPORTED in MIG mode, as on hardware.
    fn nvmlDeviceGetUtilizationRates(device: DeviceHandle, utilization: Out<Utilization>) on device |call| {
        let target = call.device(device)?;
        if target.gpu.mig_current {
            return Err(NvmlError::NotSupported);
        }
        utilization.set(Utilization { gpu: 0, memory: 0 })
    }

    fn nvmlDeviceGetDisplayActive(device: DeviceHandle, active: Out<u32>) on device |call| {
        call.device(device)?;
        active.set(0)
    }

    fn nvmlDeviceGetDisplayMode(device: DeviceHandle, mode: Out<u32>) on device |call| {
        call.device(device)?;
        mode.set(0)
    }
}

/// Readings of the board are not to be had by a MIG device's handle.
fn not_in_mig_device(call: &Call, device: DeviceHandle) -> Result<()> {
    if call.device(device)?.mig.is_some() { Err(NvmlError::NotSupported) } else { Ok(()) }
}
