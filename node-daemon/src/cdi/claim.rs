//! The CDI spec of a claim.

use std::collections::{BTreeMap, BTreeSet};

use super::nodes::{DriverFiles, NodesError};
use super::spec::{CDI_VERSION, ContainerEdits, Device, Mount, Spec};
use crate::inventory::Inventory;
use crate::prepared::{Prepared, PreparedDevice};

/// Vendor of Kerf's CDI devices.
pub const VENDOR: &str = "kerf.dev";
/// Class of a claim's CDI devices.
pub const CLASS: &str = "claim";

/// Annotation of the spec with the claim's record (JSON of [`Prepared`]): a lost checkpoint is rebuilt from it.
pub const RECORD_ANNOTATION: &str = "kerf.dev/prepared";

/// Tells the NVIDIA Container Runtime to inject nothing by itself, against images that say `all`.
const VOID: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// Qualified CDI name of a claim's device.
pub fn device_id(claim_uid: &str, device: &str) -> String {
    format!("{VENDOR}/{CLASS}={}", device_name(claim_uid, device))
}

fn device_name(claim_uid: &str, device: &str) -> String {
    format!("{claim_uid}-{device}")
}

/// Name of the environment variable that tells a container the UUID of a request's device: `KERF_DEVICE_<REQUEST>`, in
/// capitals, with `_` for what is neither letter nor digit. For people and scripts; CUDA does not read it.
pub fn device_variable(request: &str) -> String {
    let name: String = request
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' })
        .collect();
    format!("KERF_DEVICE_{name}")
}

/// The spec for a claim whose devices all exist.
///
/// `common` is what the toolkit says every container needs; its device nodes are left out, since Kerf hands out its own
/// choice. A request with several devices has its variable numbered from the second on: `KERF_DEVICE_GPU`,
/// `KERF_DEVICE_GPU_1`.
pub fn claim_spec(
    prepared: &Prepared,
    inventory: &Inventory,
    files: &DriverFiles,
    common: &ContainerEdits,
) -> Result<Spec, NodesError> {
    let mut variables = BTreeSet::new();
    let mut devices = Vec::with_capacity(prepared.devices.len());
    for device in &prepared.devices {
        let variable = unused_variable(&device.request, &mut variables);
        devices.push(Device {
            name: device_name(&prepared.claim.uid, &device.device),
            container_edits: ContainerEdits {
                env: vec![format!("{variable}={}", device.uuid)],
                device_nodes: device_nodes(device, inventory, files)?,
                ..ContainerEdits::default()
            },
        });
    }
    let env = std::iter::once(VOID.to_owned())
        .chain(common.env.iter().filter(|line| !line.starts_with("NVIDIA_VISIBLE_DEVICES=")).cloned())
        .collect();
    Ok(Spec {
        cdi_version: CDI_VERSION.to_owned(),
        kind: format!("{VENDOR}/{CLASS}"),
        annotations: BTreeMap::from([(
            RECORD_ANNOTATION.to_owned(),
            serde_json::to_string(prepared).map_err(std::io::Error::from)?,
        )]),
        devices,
        container_edits: ContainerEdits {
            env,
            device_nodes: files.control_nodes()?,
            mounts: with_void(&common.mounts),
            hooks: common.hooks.clone(),
        },
    })
}

/// The same word as [`VOID`] for a runtime that takes its devices from mounts instead of the environment
/// (`accept-nvidia-visible-devices-as-volume-mounts`).
fn with_void(mounts: &[Mount]) -> Vec<Mount> {
    let path = "/var/run/nvidia-container-devices/void";
    let mut mounts = mounts.to_vec();
    if !mounts.iter().any(|mount| mount.container_path == path) {
        mounts.push(Mount {
            host_path: "/dev/null".to_owned(),
            container_path: path.to_owned(),
            kind: None,
            options: ["ro", "nosuid", "nodev", "bind"].map(str::to_owned).to_vec(),
        });
    }
    mounts
}

fn unused_variable(request: &str, taken: &mut BTreeSet<String>) -> String {
    let plain = device_variable(request);
    let numbered = (1..).map(|number| format!("{plain}_{number}"));
    let name =
        std::iter::once(plain.clone()).chain(numbered).find(|name| !taken.contains(name)).unwrap_or(plain);
    taken.insert(name.clone());
    name
}

fn device_nodes(
    device: &PreparedDevice,
    inventory: &Inventory,
    files: &DriverFiles,
) -> Result<Vec<super::DeviceNode>, NodesError> {
    let gone = || NodesError::Gone { device: device.device.clone(), uuid: device.uuid.clone() };
    if device.key.placement.is_none() {
        let gpu = inventory.gpu(&device.key.gpu).ok_or_else(gone)?;
        return Ok(vec![files.gpu_node(gpu.minor)?]);
    }
    let (gpu, instance) = inventory.mig_device(&device.uuid).ok_or_else(gone)?;
    let compute = instance.device().ok_or_else(gone)?;
    files.mig_nodes(gpu.minor, instance.gpu_instance_id, compute.id)
}
