//! Builders for the tests of this module: a node `n` with GPU 0 cut into `3g.40gb` at 0 and `1g.10gb` at 4, and an
//! uncut GPU 1.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference, ResourceClaimStatus,
};
use kerf_crds::GpuNodeSpec;
use kerf_crds::gpu_node::{
    ClaimOwner, ClaimReference, Geometry, ObservedMig, Owner, Partition, Placement, Profile, WantedInstance,
};
use kerf_crds::names::DRIVER;

use crate::inventory::{ComputeInstance, Gpu, Instance, Inventory};
use crate::prepared::{DeviceKey, Prepared, PreparedDevice};

pub const NODE: &str = "n";
pub const GPU0: &str = "GPU-00000000-1";
pub const GPU1: &str = "GPU-11111111-1";
pub const DEVICE_3G: &str = "gpu-00000000-mig-9-0";
pub const DEVICE_1G: &str = "gpu-00000000-mig-19-4";

pub fn profile(name: &str, id: u32, size: u32) -> Profile {
    Profile {
        name: name.into(),
        id,
        size,
        memory_bytes: u64::from(size) * 10_000_000_000,
        multiprocessors: size * 14,
        ..Profile::default()
    }
}

pub fn instance(profile: &str, profile_id: u32, start: u32, size: u32, id: u32) -> Instance {
    Instance {
        profile: profile.into(),
        profile_id,
        placement: Placement { start, size },
        gpu_instance_id: id,
        compute_instances: vec![ComputeInstance { id: 0, full_width: true, uuid: format!("MIG-{id}") }],
        ..Instance::default()
    }
}

pub fn inventory() -> Inventory {
    let geometry = Arc::new(Geometry {
        name: "A100".into(),
        memory_slices: 8,
        multiprocessors: 98,
        profiles: vec![profile("3g.40gb", 9, 4), profile("1g.10gb", 19, 1), profile("1g.10gb+me", 20, 1)],
        ..Geometry::default()
    });
    let gpu = |uuid: &str, minor: u32, enabled: bool| Gpu {
        name: kerf_crds::names::gpu_name(uuid, 8),
        uuid: uuid.into(),
        index: minor,
        minor,
        product: "NVIDIA A100".into(),
        memory_bytes: 80_000_000_000,
        pci_address: format!("0000:0{minor}:00.0"),
        mig: ObservedMig { enabled, ..ObservedMig::default() },
        geometry: Some(geometry.clone()),
        ..Gpu::default()
    };
    let mut cut = gpu(GPU0, 0, true);
    cut.instances = vec![instance("3g.40gb", 9, 0, 4, 2), instance("1g.10gb", 19, 4, 1, 9)];
    Inventory {
        driver_version: "580.95.05".into(),
        cuda_version: "13.0".into(),
        boot_id: "boot-1".into(),
        gpus: vec![cut, gpu(GPU1, 1, false)],
        ..Inventory::default()
    }
}

pub fn reference(uid: &str) -> ClaimReference {
    ClaimReference { namespace: "ns".into(), name: format!("claim-{uid}"), uid: uid.into() }
}

/// A partition of GPU 0, or GPU 1 whole, for a claim and its pod `pod-<uid>`.
pub fn partition(uid: &str, request: &str, instance: Option<(&str, u32, u32)>) -> Partition {
    Partition {
        gpu: if instance.is_some() { GPU0.into() } else { GPU1.into() },
        instance: instance.map(|(profile, start, size)| WantedInstance {
            profile: profile.into(),
            placement: Placement { start, size },
        }),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "ns".into(),
            name: format!("claim-{uid}"),
            pod: "pod".into(),
            pod_uid: format!("pod-{uid}"),
            request: request.into(),
        }),
    }
}

pub fn spec(partitions: Vec<Partition>) -> GpuNodeSpec {
    GpuNodeSpec { partitions, ..GpuNodeSpec::default() }
}

/// A claim as the operator writes it: `devices` are (request, device).
pub fn claim(uid: &str, devices: &[(&str, &str)]) -> ResourceClaim {
    let results = devices
        .iter()
        .map(|(request, device)| DeviceRequestAllocationResult {
            request: (*request).into(),
            device: (*device).into(),
            driver: DRIVER.into(),
            pool: NODE.into(),
            ..DeviceRequestAllocationResult::default()
        })
        .collect();
    let reference = reference(uid);
    let mut claim = ResourceClaim::default();
    claim.metadata.namespace = Some(reference.namespace);
    claim.metadata.name = Some(reference.name);
    claim.metadata.uid = Some(reference.uid);
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(AllocationResult {
            devices: Some(DeviceAllocationResult { results: Some(results), config: None }),
            ..AllocationResult::default()
        }),
        reserved_for: Some(vec![
            ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".into(),
                name: "pod".into(),
                uid: format!("pod-{uid}"),
            },
            ResourceClaimConsumerReference {
                api_group: Some("kerf.dev".into()),
                resource: "gpunodes".into(),
                name: NODE.into(),
                uid: "hold".into(),
            },
        ]),
        ..ResourceClaimStatus::default()
    });
    claim
}

/// A claim that holds the 1g instance of GPU 0.
pub fn prepared_claim(uid: &str, inventory: &Inventory) -> Prepared {
    let instance = &inventory.gpus[0].instances[1];
    Prepared {
        claim: reference(uid),
        devices: vec![PreparedDevice {
            request: "r".into(),
            device: DEVICE_1G.into(),
            key: DeviceKey::instance(GPU0, instance.placement),
            uuid: instance.device().map(|device| device.uuid.clone()).unwrap_or_default(),
            cdi: vec![crate::cdi::device_id(uid, DEVICE_1G, None)],
            share: None,
        }],
        pod: None,
    }
}
