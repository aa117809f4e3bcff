"""The whole life of an instance."""

import ctypes
import os
import time

from pynvml import *

from world import ROOT, Client, capability_node, expect, gpu_processes, raw, world



class ProfileInfoV3(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t, which pynvml does not have."""

    _fields_ = (
        [("version", ctypes.c_uint), ("id", ctypes.c_uint), ("sliceCount", ctypes.c_uint)]
        + [("instanceCount", ctypes.c_uint), ("multiprocessorCount", ctypes.c_uint)]
        + [(f"{engine}Count", ctypes.c_uint) for engine in ("copyEngine", "decoder", "encoder", "jpeg", "ofa")]
        + [("memorySizeMB", ctypes.c_ulonglong), ("name", ctypes.c_char * 96), ("capabilities", ctypes.c_uint)]
    )


nvmlInit()
nvmlInit()
nvmlShutdown()  # counted: still initialised

assert nvmlSystemGetDriverVersion() == "580.95.05"
assert nvmlSystemGetNVMLVersion() == "13.580.95.05"
assert nvmlSystemGetCudaDriverVersion() == 13000
assert nvmlDeviceGetCount() == 2

# Discovery and identity: every way to find a device finds the same one.
gpu = nvmlDeviceGetHandleByIndex(0)
uuid = nvmlDeviceGetUUID(gpu)
pci = nvmlDeviceGetPciInfo(gpu)
assert uuid.startswith("GPU-") and len(uuid) == 40
for other in (
    nvmlDeviceGetHandleByUUID(uuid),
    nvmlDeviceGetHandleBySerial(nvmlDeviceGetSerial(gpu)),
    nvmlDeviceGetHandleByPciBusId(pci.busId),
    nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy),
):
    assert nvmlDeviceGetIndex(other) == 0
assert nvmlDeviceGetName(gpu) == "NVIDIA H100 80GB HBM3"
assert pci.pciDeviceId == 0x233010DE and pci.busId == "00000000:07:00.0" and pci.busIdLegacy == "0000:07:00.0", pci
assert nvmlDeviceGetMinorNumber(gpu) == 4, "the minor is not the index"
assert nvmlDeviceGetArchitecture(gpu) == NVML_DEVICE_ARCH_HOPPER
assert nvmlDeviceGetCudaComputeCapability(gpu) == (9, 0)
assert nvmlDeviceGetBrand(gpu) == NVML_BRAND_NVIDIA
assert nvmlDeviceGetNumaNodeId(gpu) == 1
assert nvmlDeviceGetMemoryInfo(gpu).total == 81559 << 20
assert nvmlDeviceGetMemoryInfo(gpu, version=nvmlMemory_v2).total == 81559 << 20
assert nvmlDeviceGetComputeMode(gpu) == NVML_COMPUTEMODE_DEFAULT
values = nvmlDeviceGetFieldValues(gpu, [184, 199, 82])
assert [(v.nvmlReturn, v.value.uiVal) for v in values] == [(0, 1), (0, 1), (NVML_ERROR_NOT_SUPPORTED, 0)]

# MIG mode: Hopper switches at once, without a reset.
assert nvmlDeviceGetMigMode(gpu) == [0, 0]
assert nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
assert nvmlDeviceSetMigMode(gpu, NVML_DEVICE_MIG_ENABLE) == NVML_SUCCESS
assert nvmlDeviceGetMigMode(gpu) == [1, 1]
assert nvmlDeviceGetMaxMigDeviceCount(gpu) == 7

# Profiles, in all versions of the structure.
info = nvmlDeviceGetGpuInstanceProfileInfo(gpu, NVML_GPU_INSTANCE_PROFILE_3_SLICE, version=2)
assert (info.id, info.sliceCount, info.instanceCount, info.multiprocessorCount) == (9, 3, 2, 60)
assert (info.memorySizeMB, info.decoderCount, info.ofaCount, info.isP2pSupported) == (40448, 3, 0, 0)
assert info.name == "3g.40gb", info.name
info = nvmlDeviceGetGpuInstanceProfileInfo(gpu, NVML_GPU_INSTANCE_PROFILE_3_SLICE, version=1)
assert (info.id, info.sliceCount, info.memorySizeMB) == (9, 3, 40448)
for by, number in (("", NVML_GPU_INSTANCE_PROFILE_3_SLICE), ("ById", 9)):
    info = ProfileInfoV3(version=3 << 24 | ctypes.sizeof(ProfileInfoV3))
    assert raw(f"nvmlDeviceGetGpuInstanceProfileInfo{by}V", gpu, number, ctypes.byref(info)) == 0
    assert (info.id, info.sliceCount, info.instanceCount, info.memorySizeMB, info.name) == (9, 3, 2, 40448, b"3g.40gb")
    assert info.capabilities == 0

count = ctypes.c_uint()
nvmlDeviceGetGpuInstancePossiblePlacements(gpu, 9, None, ctypes.byref(count))
places = (c_nvmlGpuInstancePlacement_t * count.value)()
nvmlDeviceGetGpuInstancePossiblePlacements(gpu, 9, places, ctypes.byref(count))
assert [(p.start, p.size) for p in places] == [(0, 4), (4, 4)]
assert nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 9) == 2
assert nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == 7

# A GPU instance at an exact place, and its compute instance.
want = c_nvmlGpuInstancePlacement_t(0, 4)
gi = nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, ctypes.byref(want))
info = nvmlGpuInstanceGetInfo(gi)
assert (info.id, info.profileId, info.placement.start, info.placement.size) == (1, 9, 0, 4)
assert nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 9) == 1
assert nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == 3
access = f"{ROOT}/proc/driver/nvidia/capabilities/gpu4/mig/gi1"
assert os.path.exists(f"{access}/access") and not os.path.exists(f"{access}/ci0")
assert os.path.exists(capability_node(ROOT, "gpu4/gi1/access"))
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetMigDeviceHandleByIndex, gpu, 0)

profile = nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE, 0)
assert (profile.id, profile.sliceCount, profile.multiprocessorCount) == (2, 3, 60)
assert profile.name == "3g.40gb", profile.name
assert nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, 0) == 3
ci = nvmlGpuInstanceCreateComputeInstance(gi, 2)
info = nvmlComputeInstanceGetInfo(ci)
assert (info.id, info.profileId, info.placement.start, info.placement.size) == (0, 2, 0, 4)
assert nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, 0) == 0
text = open(f"{access}/ci0/access").read()
minor = os.path.basename(capability_node(ROOT, "gpu4/gi1/ci0/access")).removeprefix("nvidia-cap")
assert text == f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n", text

# The MIG device that it is.
mig = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
mig_uuid = nvmlDeviceGetUUID(mig)
assert mig_uuid.startswith("MIG-") and len(mig_uuid) == 40 and mig_uuid[18] == "5"
assert nvmlDeviceGetName(mig) == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
assert nvmlDeviceIsMigDeviceHandle(mig) and not nvmlDeviceIsMigDeviceHandle(gpu)
assert (nvmlDeviceGetGpuInstanceId(mig), nvmlDeviceGetComputeInstanceId(mig)) == (1, 0)
assert nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)) == uuid
assert nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID(mig_uuid)) == mig_uuid
assert nvmlDeviceGetMemoryInfo(mig).total == 40448 << 20
attributes = nvmlDeviceGetAttributes(mig)
assert (attributes.multiprocessorCount, attributes.gpuInstanceSliceCount) == (60, 3)
assert (attributes.computeInstanceSliceCount, attributes.memorySizeMB) == (3, 40448)

# Indexes are dense and sorted by id: a new instance can come before an older one.
others = []
for start in (6, 4):
    other = nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 19, ctypes.byref(c_nvmlGpuInstancePlacement_t(start, 1)))
    others.append((other, nvmlGpuInstanceCreateComputeInstance(other, 0)))
devices = [nvmlDeviceGetMigDeviceHandleByIndex(gpu, index) for index in range(3)]
assert [nvmlDeviceGetGpuInstanceId(device) for device in devices] == [1, 11, 13]
assert [nvmlDeviceGetIndex(device) for device in devices] == [0, 1, 2]
for other, other_ci in others:
    nvmlComputeInstanceDestroy(other_ci)
    nvmlGpuInstanceDestroy(other)

# A program on it is seen on it, and only there; it keeps the instance from being destroyed.
nodes = [capability_node(ROOT, f"gpu4/gi1/{name}access") for name in ("", "ci0/")]
with Client(f"{ROOT}/dev/nvidia4", *nodes) as job:
    assert gpu_processes(mig) == [(job.pid, 1, 0)]
    assert gpu_processes(gpu) == [(job.pid, 1, 0)]
    assert gpu_processes(nvmlDeviceGetHandleByIndex(1)) == []
    expect(NVML_ERROR_IN_USE, nvmlComputeInstanceDestroy, ci)
time.sleep(0.1)  # a list of processes may be 50 ms old
assert gpu_processes(mig) == []

# Events: what happens after the registration, in order.
events = nvmlEventSetCreate()
nvmlDeviceRegisterEvents(gpu, nvmlEventTypeXidCriticalError, events)
expect(NVML_ERROR_TIMEOUT, nvmlEventSetWait_v2, events, 1)
world("xid", gpu=0, gi=1, code=31)
event = nvmlEventSetWait_v2(events, 5000)
assert (event.eventType, event.eventData) == (nvmlEventTypeXidCriticalError, 31)
assert event.gpuInstanceId == 1 and nvmlDeviceGetIndex(event.device) == 0
world("xid_soon", gpu=0, code=48)  # while we wait
event = nvmlEventSetWait_v2(events, 60000)
assert event.eventData == 48 and event.gpuInstanceId == 0xFFFFFFFF
nvmlEventSetFree(events)

# The end. The same place made anew has the same UUID, and the nodes of what is gone stay behind.
expect(NVML_ERROR_IN_USE, nvmlGpuInstanceDestroy, gi)
nvmlComputeInstanceDestroy(ci)
assert not os.path.exists(f"{access}/ci0") and os.path.exists(f"{access}/access")
nvmlGpuInstanceDestroy(gi)
assert not os.path.exists(access) and os.path.exists(capability_node(ROOT, "gpu4/gi1/access"))
gi = nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, ctypes.byref(want))
nvmlGpuInstanceCreateComputeInstance(gi, 2)
assert nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)) == mig_uuid

# A reboot ends instances; Hopper loses the mode, Ampere keeps it.
ampere = nvmlDeviceGetHandleByIndex(1)
assert nvmlDeviceSetMigMode(ampere, 1) == NVML_SUCCESS
nvmlDeviceCreateGpuInstance(ampere, 0)
world("reboot")
assert nvmlDeviceGetMigMode(gpu) == [0, 0] and nvmlDeviceGetMigMode(ampere) == [1, 1]
expect(NVML_ERROR_NOT_FOUND, nvmlDeviceGetGpuInstanceById, ampere, 0)

nvmlShutdown()
expect(NVML_ERROR_UNINITIALIZED, nvmlDeviceGetCount)
