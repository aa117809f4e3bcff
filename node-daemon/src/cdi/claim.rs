//! The CDI spec of a claim.

use std::collections::{BTreeMap, BTreeSet};

use kerf_crds::gpu_node::Isolation;

use super::nodes::{DriverFiles, NodesError};
use super::spec::{CDI_VERSION, ContainerEdits, Device, Mount, Spec};
use crate::carrier::{self, Carrier};
use crate::inventory::Inventory;
use crate::mps::Protocol;
use crate::prepared::{Prepared, PreparedDevice};

/// Vendor of Kerf's CDI devices.
pub const VENDOR: &str = "kerf.dev";
/// Class of a claim's CDI devices.
pub const CLASS: &str = "claim";

/// Annotation of the spec with the claim's record (JSON of [`Prepared`]): a lost checkpoint is rebuilt from it.
pub const RECORD_ANNOTATION: &str = "kerf.dev/prepared";

/// Tells the NVIDIA Container Runtime to inject nothing by itself, against images that say `all`.
const VOID: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// Where a container finds the pipe directory of its share.
const MPS_PIPE: &str = "/run/kerf/mps";

/// Qualified CDI name of a claim's device, or of its share of one.
pub fn device_id(claim_uid: &str, device: &str, share: Option<&str>) -> String {
    format!("{VENDOR}/{CLASS}={}", device_name(claim_uid, device, share))
}

/// A claim may have several shares of one device.
fn device_name(claim_uid: &str, device: &str, share: Option<&str>) -> String {
    match share {
        Some(share) => format!("{claim_uid}-{device}-{share}"),
        None => format!("{claim_uid}-{device}"),
    }
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
        let mut container_edits = ContainerEdits {
            env: vec![format!("{variable}={}", device.uuid)],
            device_nodes: device_nodes(device, inventory, files)?,
            ..ContainerEdits::default()
        };
        let name = device_name(&prepared.claim.uid, &device.device, device.key.share.as_deref());
        if let Some(share) = &device.share {
            container_edits.env.push(format!("CUDA_MPS_PIPE_DIRECTORY={MPS_PIPE}"));
            container_edits.mounts = mps_mounts(device, &share.id, inventory, files)?;
            let carrier =
                inventory.gpu(&device.key.gpu).map(|gpu| Carrier { gpu, placement: device.key.placement });
            if carrier.is_some_and(|carrier| carrier.isolation() >= Isolation::Driver) {
                container_edits.hooks.push(files.hook.limit(&prepared.claim.uid, &name));
            }
        }
        devices.push(Device { name, container_edits });
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

/// The share's own pipe directory, and the shared memory of its MPS server.
fn mps_mounts(
    device: &PreparedDevice,
    share: &str,
    inventory: &Inventory,
    files: &DriverFiles,
) -> Result<Vec<Mount>, NodesError> {
    let gone = || NodesError::Gone { device: device.device.clone(), uuid: device.uuid.clone() };
    let gpu = inventory.gpu(&device.key.gpu).ok_or_else(gone)?;
    let paths = files.mps.of(&carrier::name(&gpu.name, device.key.placement));
    let pipe = paths.client_pipe(Protocol::of_driver(&inventory.driver_version), share);
    let mount = |host: std::path::PathBuf, container: &str| Mount {
        host_path: host.to_string_lossy().into_owned(),
        container_path: container.to_owned(),
        kind: None,
        options: ["rw", "nosuid", "nodev", "bind"].map(str::to_owned).to_vec(),
    };
    Ok(vec![mount(pipe, MPS_PIPE), mount(paths.shm(), "/dev/shm")])
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cdi::{CdiStore, DeviceNode, Hook};
    use crate::plugin::testing::{DEVICE_1G, DEVICE_3G, GPU1, inventory, prepared_claim};
    use crate::prepared::DeviceKey;

    fn driver() -> (tempfile::TempDir, DriverFiles) {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for node in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"] {
            write(&format!("dev/{node}"), "");
        }
        write("proc/devices", "Character devices:\n238 nvidia-caps\n");
        for (instance, minor) in [("gi9", 84), ("gi2", 21)] {
            let folder = format!("proc/driver/nvidia/capabilities/gpu0/mig/{instance}");
            write(&format!("{folder}/access"), &format!("DeviceFileMinor: {minor}\n"));
            write(&format!("{folder}/ci0/access"), &format!("DeviceFileMinor: {}\n", minor + 1));
        }
        let files = DriverFiles {
            dev_root: root.path().to_owned(),
            host_dev_root: "/".into(),
            proc_root: root.path().to_owned(),
            mps: crate::mps::Paths::new("/run/kerf/mps"),
            hook: crate::cdi::HookPaths::new("/var/lib/kerf"),
        };
        (root, files)
    }

    /// A claim with requests `a`, the 1g and 3g instances of GPU 0, and `b/big`, the whole of GPU 1.
    fn three_devices() -> Prepared {
        let inventory = inventory();
        let mut prepared = prepared_claim("0f-uid", &inventory);
        prepared.devices[0].request = "a".into();
        let mut second = prepared.devices[0].clone();
        second.device = DEVICE_3G.into();
        second.key.placement = Some(inventory.gpus[0].instances[0].placement);
        second.uuid = "MIG-2".into();
        let mut whole = second.clone();
        whole.request = "b/big".into();
        whole.device = "gpu-11111111".into();
        whole.key = DeviceKey::gpu(GPU1);
        whole.uuid = GPU1.into();
        prepared.devices.extend([second, whole]);
        prepared
    }

    fn common() -> ContainerEdits {
        ContainerEdits {
            env: vec!["NVIDIA_VISIBLE_DEVICES=all".into(), "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib".into()],
            device_nodes: vec![DeviceNode { path: "/dev/nvidia-modeset".into(), ..DeviceNode::default() }],
            mounts: vec![Mount {
                host_path: "/d/libcuda.so.1".into(),
                container_path: "/usr/lib/libcuda.so.1".into(),
                kind: None,
                options: vec!["ro".into(), "bind".into()],
            }],
            hooks: vec![Hook {
                hook_name: "createContainer".into(),
                path: "/usr/bin/nvidia-cdi-hook".into(),
                args: vec!["nvidia-cdi-hook".into(), "update-ldcache".into()],
                ..Hook::default()
            }],
        }
    }

    fn paths(edits: &ContainerEdits) -> Vec<&str> {
        edits.device_nodes.iter().map(|node| node.path.as_str()).collect()
    }

    #[test]
    fn each_request_gets_its_own_device_and_nothing_else() {
        let (_root, files) = driver();
        let prepared = three_devices();
        let spec =
            claim_spec(&prepared, &inventory(), &files, &common()).expect("run as root: makes device nodes");
        let of = |index: usize| &spec.devices[index].container_edits;
        assert_eq!(spec.devices[0].name, format!("0f-uid-{DEVICE_1G}"));
        assert_eq!(device_id("0f-uid", DEVICE_1G, None), format!("kerf.dev/claim=0f-uid-{DEVICE_1G}"));
        assert_eq!(
            paths(of(0)),
            ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap84", "/dev/nvidia-caps/nvidia-cap85"]
        );
        assert_eq!(
            paths(of(1)),
            ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
        );
        assert_eq!(paths(of(2)), ["/dev/nvidia1"]);
        assert_eq!(of(0).env, ["KERF_DEVICE_A=MIG-9"]);
        assert_eq!(of(1).env, ["KERF_DEVICE_A_1=MIG-2"], "the second device of the request");
        assert_eq!(of(2).env, [format!("KERF_DEVICE_B_BIG={GPU1}")]);
    }

    #[test]
    fn a_share_gets_its_own_pipe_directory_and_the_servers_shared_memory() {
        let (_root, files) = driver();
        let mut inventory = inventory();
        let mut prepared = prepared_claim("0f-uid", &inventory);
        let device = &mut prepared.devices[0];
        let id = "0f8fad5b-d9cb-469f-a165-70867728950e";
        device.key = DeviceKey::share(GPU1, id);
        device.share = Some(kerf_crds::gpu_node::WantedShare { id: id.into(), ..Default::default() });
        for (driver, pipe) in [
            ("615.43.02", "gpu-11111111/pipe/kerf/0f8fad5bd9cb469fa16570867728950e"),
            ("580.95.05", "gpu-11111111/pipe"),
        ] {
            inventory.driver_version = driver.into();
            let spec = claim_spec(&prepared, &inventory, &files, &common()).expect("run as root");
            let edits = &spec.devices[0].container_edits;
            assert_eq!(paths(edits), ["/dev/nvidia1"]);
            assert!(
                edits.env.contains(&"CUDA_MPS_PIPE_DIRECTORY=/run/kerf/mps".to_owned()),
                "{:?}",
                edits.env
            );
            let mounts: Vec<_> =
                edits.mounts.iter().map(|m| (m.host_path.as_str(), m.container_path.as_str())).collect();
            let pipe = format!("/run/kerf/mps/{pipe}");
            let shm = "/run/kerf/mps/gpu-11111111/shm";
            assert_eq!(mounts, [(pipe.as_str(), "/run/kerf/mps"), (shm, "/dev/shm")]);
            assert!(spec.devices[0].name.ends_with(id));
            assert_eq!(edits.hooks, [], "nobody limits the memory of cgroups");
        }
        inventory.gpus[1].sharing =
            Some(kerf_crds::gpu_node::Sharing { isolation: Isolation::Driver, ..Default::default() });
        let spec = claim_spec(&prepared, &inventory, &files, &common()).expect("run as root");
        let hook = &spec.devices[0].container_edits.hooks[0];
        assert_eq!((hook.hook_name.as_str(), &hook.path), ("createRuntime", &hook.args[0]));
        let asks = ["/var/lib/kerf/hook.sock", "0f-uid", &spec.devices[0].name];
        assert_eq!(hook.args[1..], asks, "what it asks the daemon");
    }

    #[test]
    fn a_share_of_an_instance_gets_the_instances_nodes_and_the_pipe_directory_of_its_server() {
        let (_root, files) = driver();
        let mut inventory = inventory();
        inventory.gpus[0].sharing =
            Some(kerf_crds::gpu_node::Sharing { isolation: Isolation::Driver, ..Default::default() });
        let mut prepared = prepared_claim("0f-uid", &inventory);
        let device = &mut prepared.devices[0];
        let id = "0f8fad5b-d9cb-469f-a165-70867728950e";
        device.key = device.key.clone().with_share(id);
        device.share = Some(kerf_crds::gpu_node::WantedShare { id: id.into(), ..Default::default() });
        let spec = claim_spec(&prepared, &inventory, &files, &common()).expect("run as root");
        let edits = &spec.devices[0].container_edits;
        assert_eq!(
            paths(edits),
            ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap84", "/dev/nvidia-caps/nvidia-cap85"]
        );
        assert_eq!(edits.env, ["KERF_DEVICE_R=MIG-9", "CUDA_MPS_PIPE_DIRECTORY=/run/kerf/mps"]);
        assert_eq!(edits.hooks, [], "the driver's limits do not reach into instances");
        let hosts: Vec<_> = edits.mounts.iter().map(|mount| mount.host_path.as_str()).collect();
        assert_eq!(hosts, ["/run/kerf/mps/gpu-00000000-4-1/pipe", "/run/kerf/mps/gpu-00000000-4-1/shm"]);
    }

    #[test]
    fn common_edits_void_the_images_wishes_and_leave_displays_out() {
        let (_root, files) = driver();
        let spec = claim_spec(&three_devices(), &inventory(), &files, &common()).expect("run as root");
        let edits = &spec.container_edits;
        assert_eq!(edits.env, ["NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib"]);
        assert_eq!(paths(edits), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]);
        assert_eq!(edits.hooks, common().hooks);
        assert_eq!(edits.mounts.len(), 2, "the library, and the word void");
    }

    #[test]
    fn the_file_names_each_device_and_carries_the_record() {
        let (root, files) = driver();
        let prepared = three_devices();
        let spec = claim_spec(&prepared, &inventory(), &files, &common()).expect("run as root");
        let store = CdiStore::new(root.path().join("cdi"));
        store.write("0f-uid", &spec).unwrap();
        let path = store.path("0f-uid");
        assert!(path.ends_with("cdi/gpu.kerf.dev-claim_0f-uid.json"));
        // Whether a runtime takes it is for the end-to-end tests to say: containerd refuses a file that is not valid.
        let read: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read["kind"], format!("{VENDOR}/{CLASS}"));
        assert_eq!(read["devices"].as_array().map(Vec::len), Some(3));

        fs::write(root.path().join("cdi/other.json"), "{}").unwrap();
        let listed = store.list().unwrap();
        assert_eq!(listed.len(), 1, "other vendors' files are not ours");
        assert_eq!(listed[0].record, Some(prepared));
        store.remove("0f-uid").unwrap();
        store.remove("0f-uid").expect("idempotent");
    }

    #[test]
    fn a_device_that_is_gone_is_named() {
        let (_root, files) = driver();
        let mut inventory = inventory();
        inventory.gpus[0].instances.clear();
        let error = claim_spec(&three_devices(), &inventory, &files, &common()).unwrap_err().to_string();
        assert!(error.contains(DEVICE_1G) && error.contains("MIG-9"), "{error}");
    }
}
