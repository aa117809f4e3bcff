"""Every error in the case in which NVML has it."""

import ctypes
import os
import sys
import time

import pynvml
from pynvml import *

from world import ROOT, Client, capability_node, expect, raw, world


def place(start, size):
    return ctypes.byref(c_nvmlGpuInstancePlacement_t(start, size))


def set_mode(device, mode):
    return nvmlDeviceSetMigMode(device, mode)


# UNINITIALIZED, DRIVER_NOT_LOADED.
pynvml._LoadNvmlLibrary()
expect(NVML_ERROR_UNINITIALIZED, nvmlDeviceGetCount)
expect(NVML_ERROR_UNINITIALIZED, nvmlShutdown)
world("unload_driver")
expect(NVML_ERROR_DRIVER_NOT_LOADED, nvmlInit)
world("reload_driver")
nvmlInit()
assert nvmlErrorString(NVML_ERROR_IN_USE) == "In use by another client"

hopper, ampere, no_mig, through = (nvmlDeviceGetHandleByIndex(i) for i in range(4))

# INVALID_ARGUMENT, NOT_FOUND, INSUFFICIENT_SIZE on the way to a device.
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetHandleByIndex, 4)
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetHandleByUUID, "GPU-00000000-0000-0000-0000-000000000000")
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetHandleByPciBusId, "0000:ff:00.0")
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetHandleBySerial, "0")
buffer = ctypes.create_string_buffer(8)
assert raw("nvmlDeviceGetUUID", hopper, buffer, ctypes.c_uint(8)) == NVML_ERROR_INSUFFICIENT_SIZE
assert raw("nvmlDeviceGetUUID", hopper, None, ctypes.c_uint(8)) == NVML_ERROR_INVALID_ARGUMENT
assert raw("nvmlDeviceGetName", ctypes.c_void_p(0), buffer, ctypes.c_uint(8)) == NVML_ERROR_INVALID_ARGUMENT
assert raw("nvmlDeviceGetName", ctypes.c_void_p(0xDEAD), buffer, ctypes.c_uint(8)) == NVML_ERROR_INVALID_ARGUMENT

# ARGUMENT_VERSION_MISMATCH; the profile structures have INVALID_ARGUMENT instead.
memory = c_nvmlMemory_v2_t()
memory.version = 0x7000028
assert raw("nvmlDeviceGetMemoryInfo_v2", hopper, ctypes.byref(memory)) == NVML_ERROR_ARGUMENT_VERSION_MISMATCH
info = c_nvmlGpuInstanceProfileInfo_v2_t()
info.version = 0
assert raw("nvmlDeviceGetGpuInstanceProfileInfoV", hopper, 0, ctypes.byref(info)) == NVML_ERROR_INVALID_ARGUMENT

# FUNCTION_NOT_FOUND, as with an older driver.
expect(NVML_ERROR_FUNCTION_NOT_FOUND, nvmlDeviceGetFanSpeed, hopper)

# NOT_SUPPORTED: a GPU without MIG, and MIG that is off.
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetMigMode, no_mig)
expect(NVML_ERROR_NOT_SUPPORTED, set_mode, no_mig, 1)
assert nvmlDeviceGetMaxMigDeviceCount(no_mig) == 0
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceCreateGpuInstance, hopper, 19)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetGpuInstanceById, hopper, 0)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetGpuInstanceRemainingCapacity, hopper, 19)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetAttributes, hopper)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetGpuInstanceId, hopper)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetNumaNodeId, no_mig)
# Profiles can be asked for with MIG off on Hopper, not on Ampere; placements on both.
assert nvmlDeviceGetGpuInstanceProfileInfo(hopper, 0, version=2).id == 19
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetGpuInstanceProfileInfo, ampere, 0)
count = ctypes.c_uint()
nvmlDeviceGetGpuInstancePossiblePlacements(ampere, 19, None, ctypes.byref(count))
assert count.value == 7

# IN_USE: Ampere cannot be reset under a client; the change stays pending and is made good for by the next call.
with Client(f"{ROOT}/dev/nvidia1"):
    assert set_mode(ampere, 1) == NVML_ERROR_IN_USE
    assert nvmlDeviceGetMigMode(ampere) == [0, 1]
assert set_mode(ampere, 1) == NVML_SUCCESS
# RESET_REQUIRED: a passed-through board, until the machine reboots.
assert set_mode(through, 1) == NVML_ERROR_RESET_REQUIRED
assert nvmlDeviceGetMigMode(through) == [0, 1]
world("reboot")
assert nvmlDeviceGetMigMode(through) == [1, 1]
assert nvmlDeviceGetMigMode(ampere) == [1, 1]
assert set_mode(hopper, 1) == NVML_SUCCESS
expect(NVML_ERROR_INVALID_ARGUMENT, set_mode, hopper, 2)

# Enumeration: an enumerator that the GPU lacks (go on), one past the last (stop).
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceGetGpuInstanceProfileInfo, hopper, NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetGpuInstanceProfileInfo, hopper, 0x12)

# Creation: INVALID_ARGUMENT and INSUFFICIENT_RESOURCES.
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceCreateGpuInstance, hopper, 77)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceCreateGpuInstanceWithPlacement, hopper, 9, place(2, 4))
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceCreateGpuInstanceWithPlacement, hopper, 9, place(0, 3))
media = nvmlDeviceCreateGpuInstance(hopper, 20)
expect(NVML_ERROR_INSUFFICIENT_RESOURCES, nvmlDeviceCreateGpuInstance, hopper, 20)  # the one OFA engine is taken
start = nvmlGpuInstanceGetInfo(media).placement.start
expect(NVML_ERROR_INSUFFICIENT_RESOURCES, nvmlDeviceCreateGpuInstanceWithPlacement, hopper, 19, place(start, 1))
expect(NVML_ERROR_INSUFFICIENT_RESOURCES, nvmlDeviceCreateGpuInstance, hopper, 0)
hold = world("hold_exclusively", gpu=0)
expect(NVML_ERROR_IN_USE, nvmlDeviceCreateGpuInstance, hopper, 19)
world("release", id=hold)

# Compute instances.
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlGpuInstanceCreateComputeInstance, media, 99)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlGpuInstanceCreateComputeInstance, media, 2)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlGpuInstanceGetComputeInstanceProfileInfo, media, 2, 0)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlGpuInstanceGetComputeInstanceProfileInfo, media, 9, 0)
compute = nvmlGpuInstanceCreateComputeInstance(media, 0)
expect(NVML_ERROR_INSUFFICIENT_RESOURCES, nvmlGpuInstanceCreateComputeInstance, media, 0)
expect(NVML_ERROR_NOT_FOUND, nvmlGpuInstanceGetComputeInstanceById, media, 1)
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetGpuInstanceById, hopper, 0)
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetMigDeviceHandleByIndex, hopper, 1)

# IN_USE: a compute instance in it; a monitor's handle to it, which no list shows; a switch of mode.
expect(NVML_ERROR_IN_USE, nvmlGpuInstanceDestroy, media)
gi = nvmlGpuInstanceGetInfo(media).id
mig = nvmlDeviceGetMigDeviceHandleByIndex(hopper, 0)
with Client(capability_node(ROOT, f"gpu0/gi{gi}/access")):
    nvmlComputeInstanceDestroy(compute)
    expect(NVML_ERROR_IN_USE, nvmlGpuInstanceDestroy, media)
    assert nvmlDeviceGetComputeRunningProcesses(hopper) == []
assert set_mode(hopper, 0) == NVML_ERROR_IN_USE

# Modes: none for a GPU in MIG mode, no EXCLUSIVE_PROCESS for a MIG device.
compute = nvmlGpuInstanceCreateComputeInstance(media, 0)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceSetComputeMode, hopper, NVML_COMPUTEMODE_PROHIBITED)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceSetComputeMode, mig, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
nvmlDeviceSetComputeMode(no_mig, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
assert nvmlDeviceGetComputeMode(no_mig) == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

# Who has a GPU open without nvidia-uvm is a monitor, which no list shows.
with Client(f"{ROOT}/dev/nvidia2"):
    time.sleep(0.1)  # a list of processes may be 50 ms old
    assert nvmlDeviceGetComputeRunningProcesses(no_mig) == []

# INSUFFICIENT_SIZE: more processes than the caller has room for.
with Client(f"{ROOT}/dev/nvidia2", f"{ROOT}/dev/nvidia-uvm"):
    time.sleep(0.1)  # a list of processes may be 50 ms old
    count = ctypes.c_uint(0)
    result = raw("nvmlDeviceGetComputeRunningProcesses_v3", no_mig, ctypes.byref(count), None)
    assert (result, count.value) == (NVML_ERROR_INSUFFICIENT_SIZE, 1)

# A handle outlives its instance and then stands for nothing.
nvmlComputeInstanceDestroy(compute)
nvmlGpuInstanceDestroy(media)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlGpuInstanceGetInfo, media)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlComputeInstanceGetInfo, compute)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetUUID, mig)
expect(NVML_ERROR_INVALID_ARGUMENT, nvmlGpuInstanceDestroy, media)

# GPU_IS_LOST: an XID first, then the error, from every call on that GPU and from no other.
events = nvmlEventSetCreate()
nvmlDeviceRegisterEvents(ampere, nvmlEventTypeXidCriticalError, events)
expect(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceRegisterEvents, ampere, nvmlEventTypeClock, events)
world("lose", gpu=1)
assert nvmlEventSetWait_v2(events, 5000).eventData == 79
expect(NVML_ERROR_GPU_IS_LOST, nvmlEventSetWait_v2, events, 5000)
expect(NVML_ERROR_TIMEOUT, nvmlEventSetWait_v2, events, 1)
expect(NVML_ERROR_GPU_IS_LOST, nvmlDeviceGetUUID, ampere)
expect(NVML_ERROR_GPU_IS_LOST, nvmlDeviceGetHandleByIndex, 1)
expect(NVML_ERROR_GPU_IS_LOST, nvmlDeviceCreateGpuInstance, ampere, 19)
assert nvmlDeviceGetCount() == 4 and nvmlDeviceGetUUID(hopper)
world("recover", gpu=1)
assert nvmlDeviceGetUUID(ampere)

# What a fault says, an NVML client sees: every code that there is, once, and then no more.
for code in world("codes"):
    world("inject", call="nvmlDeviceGetUUID", code=code)
    expect(code, nvmlDeviceGetUUID, hopper)
    assert nvmlDeviceGetUUID(hopper)

# NO_PERMISSION: another user, unless the capability mig/config is readable to it.
config = f"{ROOT}/proc/driver/nvidia/capabilities/mig/config"
if os.fork() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        expect(NVML_ERROR_NO_PERMISSION, nvmlDeviceCreateGpuInstance, hopper, 19)
        expect(NVML_ERROR_NO_PERMISSION, set_mode, hopper, 0)
        expect(NVML_ERROR_NO_PERMISSION, nvmlDeviceGetGpuInstanceById, hopper, 0)
        expect(NVML_ERROR_NO_PERMISSION, nvmlDeviceSetComputeMode, no_mig, 0)
        assert nvmlDeviceGetGpuInstanceProfileInfo(hopper, 0, version=2).id == 19  # needs no right
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)
assert os.wait()[1] == 0
os.chown(config, 65534, 65534)
if os.fork() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetGpuInstanceById, hopper, 0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)
assert os.wait()[1] == 0
