//! From the hardware to devices. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity, DeviceTaint};
use kerf_crds::device::{self, Value, attributes, capacities};
use kerf_crds::gpu_node;
use kerf_crds::names::{PLANNED_TAINT, UNHEALTHY_TAINT, instance_device, share_device};
use kerf_crds::partition_policy::TaintEffect;
use kerf_crds::quantity::quantity;
use kerf_crds::{GpuNodeSpec, GpuNodeStatus};

use crate::inventory::{Gpu, Inventory};

/// The API's limit on the text of an attribute.
const MAX_TEXT: usize = 64;

/// The devices of the GPUs that a policy manages, in order of GPU and place: a GPU that is not cut, otherwise each of Kerf's
/// instances; and each once more as what its shares are parts of, if it can carry any. Each has the taint that keeps
/// kube-scheduler's own allocator away.
pub fn build(inventory: &Inventory, spec: &GpuNodeSpec) -> Vec<Device> {
    if inventory.unavailable.is_some() {
        return Vec::new();
    }
    let status = GpuNodeStatus {
        driver_version: inventory.driver_version.clone(),
        cuda_version: inventory.cuda_version.clone(),
        ..GpuNodeStatus::default()
    };
    let mut devices = Vec::new();
    for gpu in inventory.gpus.iter().filter(|gpu| gpu.unmanaged.is_none()) {
        let Some(desired) = spec.gpus.iter().find(|desired| desired.uuid == gpu.uuid) else { continue };
        let described = described(gpu);
        let device = |name: String, kind: device::Device<'_>, unhealthy: bool| Device {
            name,
            attributes: Some(
                attributes(&status, &described, kind)
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), attribute(value)))
                    .collect(),
            ),
            capacity: Some(
                capacities(&described, kind)
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), capacity(value)))
                    .collect(),
            ),
            taints: Some(taints(unhealthy.then_some(desired.unhealthy_effect))),
            ..Device::default()
        };
        let shared = |carrier: &str, kind: device::Device<'_>, unhealthy: bool| Device {
            allow_multiple_allocations: Some(true),
            ..device(share_device(carrier), kind, unhealthy)
        };
        if gpu.instances.is_empty() {
            devices.push(device(gpu.name.clone(), device::Device::Gpu, gpu.unhealthy.is_some()));
        }
        if gpu.sharing.is_some() && !gpu.mig.enabled {
            devices.push(shared(&gpu.name, device::Device::Share, gpu.unhealthy.is_some()));
        }
        for instance in gpu.instances.iter().filter(|instance| !instance.foreign) {
            // Without its compute instance it is still being made; without its profile nothing is known of it.
            let (Some(compute), Some(profile), Some(geometry)) =
                (instance.device(), gpu.profile_of(instance), gpu.geometry.as_deref())
            else {
                continue;
            };
            let name = instance_device(&gpu.name, instance.profile_id, instance.placement.start);
            let unhealthy = gpu.unhealthy.is_some() || instance.unhealthy.is_some();
            let kind = device::Device::Instance(geometry, profile, Some(&compute.uuid));
            devices.push(device(name.clone(), kind, unhealthy));
            if gpu.sharing.is_some() {
                let kind = device::Device::InstanceShare(geometry, profile, Some(&compute.uuid));
                devices.push(shared(&name, kind, unhealthy));
            }
        }
    }
    devices
}

/// What [`attributes`] reads of a GPU.
fn described(gpu: &Gpu) -> gpu_node::Gpu {
    gpu_node::Gpu {
        name: gpu.name.clone(),
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        product: gpu.product.clone(),
        architecture: gpu.architecture.clone(),
        memory_bytes: gpu.memory_bytes,
        pci_address: gpu.pci_address.clone(),
        numa_node: gpu.numa_node,
        pcie_root: gpu.pcie_root.clone(),
        sharing: gpu.sharing.clone(),
        ..gpu_node::Gpu::default()
    }
}

fn taints(unhealthy: Option<TaintEffect>) -> Vec<DeviceTaint> {
    let taint = |key: &str, effect: &str| DeviceTaint {
        key: key.to_owned(),
        effect: effect.to_owned(),
        ..DeviceTaint::default()
    };
    let mut taints = vec![taint(PLANNED_TAINT, "NoSchedule")];
    taints.extend(unhealthy.map(|effect| {
        let effect = match effect {
            TaintEffect::NoSchedule => "NoSchedule",
            TaintEffect::NoExecute => "NoExecute",
        };
        taint(UNHEALTHY_TAINT, effect)
    }));
    taints
}

fn attribute(value: Value) -> DeviceAttribute {
    match value {
        Value::String(text) => {
            DeviceAttribute { string: Some(shortened(text)), ..DeviceAttribute::default() }
        }
        Value::Int(int) => DeviceAttribute { int: Some(int), ..DeviceAttribute::default() },
        Value::Bool(bool) => DeviceAttribute { bool: Some(bool), ..DeviceAttribute::default() },
        Value::Version(version) => DeviceAttribute { version: Some(version), ..DeviceAttribute::default() },
    }
}

fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_TEXT));
    text
}

fn capacity(value: u64) -> DeviceCapacity {
    DeviceCapacity { value: quantity(value), ..DeviceCapacity::default() }
}

/// Devices as they are compared: without what the API server adds.
pub(super) fn comparable(devices: &[Device]) -> Vec<Device> {
    devices
        .iter()
        .cloned()
        .map(|mut device| {
            for taint in device.taints.iter_mut().flatten() {
                taint.time_added = None;
            }
            // An empty map is left out on the wire.
            device.attributes = device.attributes.filter(|map: &BTreeMap<_, _>| !map.is_empty());
            device.capacity = device.capacity.filter(|map| !map.is_empty());
            device
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use kerf_crds::gpu_node::{DesiredGpu, DesiredMig, Reason};

    use super::*;
    use crate::plugin::testing::{DEVICE_1G, DEVICE_3G, GPU0, GPU1, inventory};

    fn managed(effect: TaintEffect) -> GpuNodeSpec {
        let gpu = |uuid: &str| DesiredGpu {
            uuid: uuid.into(),
            policy: "p".into(),
            mig: DesiredMig::Keep,
            allow_reset: false,
            unhealthy_effect: effect,
            max_concurrent_gpus: 16,
        };
        GpuNodeSpec { gpus: vec![gpu(GPU0), gpu(GPU1)], partitions: vec![] }
    }

    fn names(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn what_exists_is_listed_and_tainted() {
        let mut inventory = inventory();
        inventory.gpus[0].architecture = "Ampere".into();
        inventory.gpus[0].pcie_root = Some("pci0000:00".into());
        let devices = build(&inventory, &managed(TaintEffect::NoExecute));
        assert_eq!(names(&devices), [DEVICE_3G, DEVICE_1G, "gpu-11111111"]);
        for device in &devices {
            let taints = device.taints.as_ref().unwrap();
            assert_eq!(taints.len(), 1);
            assert_eq!((taints[0].key.as_str(), taints[0].effect.as_str()), (PLANNED_TAINT, "NoSchedule"));
        }
        let attributes = devices[1].attributes.as_ref().unwrap();
        assert_eq!(attributes["type"].string.as_deref(), Some("mig"));
        assert_eq!(attributes["uuid"].string.as_deref(), Some("MIG-9"));
        assert_eq!(attributes["parentUUID"].string.as_deref(), Some(GPU0));
        assert_eq!(attributes["architecture"].string.as_deref(), Some("Ampere"));
        assert_eq!(attributes["resource.kubernetes.io/pcieRoot"].string.as_deref(), Some("pci0000:00"));
        assert_eq!(attributes["profile"].string.as_deref(), Some("1g.10gb"));
        assert_eq!(attributes["driverVersion"].version.as_deref(), Some("580.95.5"));
        let capacity = devices[1].capacity.as_ref().unwrap();
        assert_eq!(capacity["memory"].value.0, "9765625Ki");
        assert_eq!(capacity["multiprocessors"].value.0, "14");
        assert_eq!(devices[2].attributes.as_ref().unwrap()["type"].string.as_deref(), Some("gpu"));
    }

    #[test]
    fn what_can_carry_shares_is_listed_for_them_too() {
        let mut inventory = inventory();
        let sharing = gpu_node::Sharing { isolation: gpu_node::Isolation::Driver, ..Default::default() };
        for gpu in &mut inventory.gpus {
            gpu.sharing = Some(sharing.clone());
        }
        let devices = build(&inventory, &managed(TaintEffect::NoExecute));
        let of_3g = format!("{DEVICE_3G}-share");
        let of_1g = format!("{DEVICE_1G}-share");
        assert_eq!(
            names(&devices),
            [DEVICE_3G, &of_3g, DEVICE_1G, &of_1g, "gpu-11111111", "gpu-11111111-share"]
        );
        let share = &devices[1];
        assert_eq!(share.allow_multiple_allocations, Some(true));
        let attributes = share.attributes.as_ref().unwrap();
        let word = |name: &str| attributes[name].string.as_deref();
        assert_eq!(
            ["type", "isolation", "profile", "uuid", "parentUUID"].map(word),
            [Some("share"), Some("process"), Some("3g.40gb"), Some("MIG-2"), Some(GPU0)]
        );
        let capacity = share.capacity.as_ref().unwrap();
        assert_eq!(capacity["memory"].value.0, "39062500Ki");
        assert_eq!(capacity["compute"].value.0, "57", "percent of the whole GPU's, rounded down");
        let share = &devices[5];
        assert_eq!(share.allow_multiple_allocations, Some(true));
        assert_eq!(devices[4].allow_multiple_allocations, None);
        let attributes = share.attributes.as_ref().unwrap();
        assert_eq!(attributes["type"].string.as_deref(), Some("share"));
        assert_eq!(attributes["isolation"].string.as_deref(), Some("driver"));
        let capacity = share.capacity.as_ref().unwrap();
        assert_eq!(
            (capacity["memory"].value.0.as_str(), capacity["compute"].value.0.as_str()),
            ("78125000Ki", "100")
        );
    }

    #[test]
    fn what_is_not_kerfs_is_not_listed() {
        let mut inventory = inventory();
        assert!(build(&inventory, &GpuNodeSpec::default()).is_empty(), "no policy manages the GPUs");
        inventory.gpus[0].instances[0].foreign = true;
        inventory.gpus[0].instances[1].compute_instances.clear();
        inventory.gpus[1].unmanaged = Some(Reason::default());
        assert!(build(&inventory, &managed(TaintEffect::NoSchedule)).is_empty());
    }

    #[test]
    fn what_failed_has_the_taint_of_its_policy() {
        let mut inventory = inventory();
        inventory.gpus[0].instances[1].unhealthy = Some(Reason::default());
        let devices = build(&inventory, &managed(TaintEffect::NoExecute));
        assert_eq!(devices[0].taints.as_ref().unwrap().len(), 1, "the neighbour is well");
        let taint = &devices[1].taints.as_ref().unwrap()[1];
        assert_eq!((taint.key.as_str(), taint.effect.as_str()), (UNHEALTHY_TAINT, "NoExecute"));
        inventory.gpus[0].unhealthy = Some(Reason::default());
        assert_eq!(build(&inventory, &managed(TaintEffect::NoSchedule))[0].taints.as_ref().unwrap().len(), 2);
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(shortened("ä".repeat(40)).len(), 64);
    }
}
