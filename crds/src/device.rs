//! What a device says of itself: the attributes and capacities that a node's ResourceSlice lists and that selectors of
//! claims and DeviceClasses read.
//!
//! One list for both sides: the node daemon publishes it for devices that exist, the operator evaluates selectors
//! against it for instances that it could have made. What is only known once an instance exists is `None` there.

use std::collections::BTreeMap;

use crate::gpu_node::{Geometry, Gpu, GpuNodeStatus, Isolation, Profile};

/// A device on a GPU.
#[derive(Clone, Copy, Debug)]
pub enum Device<'a> {
    /// The whole of it.
    Gpu,
    /// An instance of one of the geometry's profiles, with the UUID of its MIG device where it exists.
    Instance(&'a Geometry, &'a Profile, Option<&'a str>),
    /// What shares of the GPU are parts of.
    Share,
    /// What shares of an instance are parts of; as for the instance.
    InstanceShare(&'a Geometry, &'a Profile, Option<&'a str>),
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    String(String),
    Int(i64),
    Bool(bool),
    /// A semantic version, `major.minor.patch`.
    Version(String),
}

/// Names of attributes. Those without a domain are in the driver's, `gpu.kerf.dev`.
pub mod attribute {
    /// `gpu`, `mig` or `share`.
    pub const TYPE: &str = "type";
    /// Who enforces the limit on a share's memory: `driver` or `process`; shares only.
    pub const ISOLATION: &str = "isolation";
    /// UUID of the GPU, or of the MIG device (known once the instance exists).
    pub const UUID: &str = "uuid";
    /// UUID of the GPU that an instance is on; of a whole GPU its own.
    pub const PARENT_UUID: &str = "parentUUID";
    /// NVML's index of the GPU.
    pub const INDEX: &str = "index";
    /// Product name of the GPU.
    pub const PRODUCT: &str = "productName";
    /// Architecture of the GPU, e.g. `Hopper`, where known.
    pub const ARCHITECTURE: &str = "architecture";
    /// NVML's name of the profile; instances and what their shares are parts of.
    pub const PROFILE: &str = "profile";
    /// Version of the GPU driver.
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// Version of CUDA that the driver supports.
    pub const CUDA_VERSION: &str = "cudaDriverVersion";
    /// NUMA node of the GPU, where known.
    pub const NUMA_NODE: &str = "numaNode";
    /// Kubernetes' own name for the PCI address (`k8s.io/dynamic-resource-allocation/deviceattribute`).
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// Kubernetes' own name for the PCIe root complex (as above): a claim can demand the same one for a GPU and a NIC.
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
}

/// Names of capacities.
pub mod capacity {
    /// Memory in bytes.
    pub const MEMORY: &str = "memory";
    /// Streaming multiprocessors; instances and what their shares are parts of.
    pub const MULTIPROCESSORS: &str = "multiprocessors";
    /// Percent of the whole GPU's multiprocessors, rounded down.
    pub const COMPUTE: &str = "compute";
}

/// Attributes that are the same for every device on one GPU: those that constraints can compare.
pub const GPU_ATTRIBUTES: [&str; 9] = [
    attribute::PARENT_UUID,
    attribute::INDEX,
    attribute::PRODUCT,
    attribute::ARCHITECTURE,
    attribute::DRIVER_VERSION,
    attribute::CUDA_VERSION,
    attribute::NUMA_NODE,
    attribute::PCI_BUS_ID,
    attribute::PCIE_ROOT,
];

/// The attributes of a device.
pub fn attributes(status: &GpuNodeStatus, gpu: &Gpu, device: Device<'_>) -> BTreeMap<&'static str, Value> {
    let text = |text: &str| Value::String(text.to_owned());
    let kind = match device {
        Device::Gpu => "gpu",
        Device::Instance(..) => "mig",
        Device::Share | Device::InstanceShare(..) => "share",
    };
    let mut all = BTreeMap::from([
        (attribute::TYPE, text(kind)),
        (attribute::PARENT_UUID, text(&gpu.uuid)),
        (attribute::INDEX, Value::Int(gpu.index.into())),
        (attribute::PRODUCT, text(&gpu.product)),
    ]);
    match device {
        Device::Gpu => {
            all.insert(attribute::UUID, text(&gpu.uuid));
        }
        Device::Instance(_, profile, uuid) | Device::InstanceShare(_, profile, uuid) => {
            all.insert(attribute::PROFILE, text(&profile.name));
            if let Some(uuid) = uuid {
                all.insert(attribute::UUID, text(uuid));
            }
        }
        Device::Share => {}
    }
    let isolation = match device {
        Device::Gpu | Device::Instance(..) => None,
        Device::Share => Some(gpu.sharing.as_ref().map(|sharing| sharing.isolation).unwrap_or_default()),
        // The driver's limits do not reach into instances.
        Device::InstanceShare(..) => Some(Isolation::Process),
    };
    if let Some(isolation) = isolation {
        all.insert(attribute::ISOLATION, text(isolation.word()));
    }
    if let Some(version) = semantic_version(&status.driver_version) {
        all.insert(attribute::DRIVER_VERSION, Value::Version(version));
    }
    if let Some(version) = semantic_version(&status.cuda_version) {
        all.insert(attribute::CUDA_VERSION, Value::Version(version));
    }
    if let Some(node) = gpu.numa_node {
        all.insert(attribute::NUMA_NODE, Value::Int(node.into()));
    }
    if !gpu.pci_address.is_empty() {
        all.insert(attribute::PCI_BUS_ID, text(&gpu.pci_address));
    }
    if !gpu.architecture.is_empty() {
        all.insert(attribute::ARCHITECTURE, text(&gpu.architecture));
    }
    if let Some(root) = &gpu.pcie_root {
        all.insert(attribute::PCIE_ROOT, text(root));
    }
    all
}

/// The capacities of a device: bytes, counts or percent.
pub fn capacities(gpu: &Gpu, device: Device<'_>) -> BTreeMap<&'static str, u64> {
    match device {
        Device::Gpu | Device::Share => {
            BTreeMap::from([(capacity::MEMORY, gpu.memory_bytes), (capacity::COMPUTE, 100)])
        }
        Device::Instance(geometry, profile, _) | Device::InstanceShare(geometry, profile, _) => {
            let multiprocessors = u64::from(profile.multiprocessors);
            let of_all = (100 * multiprocessors).checked_div(geometry.multiprocessors.into());
            BTreeMap::from([
                (capacity::MEMORY, profile.memory_bytes),
                (capacity::MULTIPROCESSORS, multiprocessors),
                (capacity::COMPUTE, of_all.unwrap_or_default()),
            ])
        }
    }
}

/// `580.95.05` → `580.95.5`, `13.1` → `13.1.0`: Kubernetes wants semantic versions, without leading zeros. `None` if
/// the text is no dotted version of at most three numbers.
pub fn semantic_version(text: &str) -> Option<String> {
    let mut numbers: Vec<u64> = text.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    if numbers.len() > 3 {
        return None;
    }
    numbers.resize(3, 0);
    Some(format!("{}.{}.{}", numbers[0], numbers[1], numbers[2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_become_semantic() {
        assert_eq!(semantic_version("580.95.05").as_deref(), Some("580.95.5"));
        assert_eq!(semantic_version("13.1").as_deref(), Some("13.1.0"));
        assert_eq!(semantic_version(""), None);
        assert_eq!(semantic_version("1.2.3.4"), None);
    }
}
