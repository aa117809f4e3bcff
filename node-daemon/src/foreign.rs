//! Is somebody else handing out this node's GPUs? Then none of them is Kerf's to manage.
//!
//! [`verdict`] is pure; [`watch`] keeps the facts up to date from the Node, the node's ResourceSlices and the host's
//! configuration files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_crds::conditions::unmanaged_reason;
use kerf_crds::gpu_node::Reason;
use kerf_crds::names;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;

use crate::backoff::WatchBackoff;
use crate::node::NodeState;

/// NVIDIA's DRA driver for GPUs.
const NVIDIA_DRA_DRIVER: &str = "gpu.nvidia.com";

/// Prefix of the resources of NVIDIA's device plugin.
const NVIDIA_RESOURCES: &str = "nvidia.com/";

/// The label that tells mig-manager what to make, and the one in which it reports. mig-manager acts on a node that has
/// both (https://github.com/NVIDIA/mig-parted/tree/main/deployments/gpu-operator).
const MIG_MANAGER_WANTS: &str = "nvidia.com/mig.config";
const MIG_MANAGER_STATE: &str = "nvidia.com/mig.config.state";

/// How often the host's configuration files are read again.
const CONFIGURATION_INTERVAL: Duration = Duration::from_secs(60);

/// What was observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Quantities of the Node's `status.allocatable`, as written.
    pub allocatable: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// Drivers other than ours whose slices on this node list NVIDIA GPUs.
    pub gpu_drivers: Vec<String>,
    pub toolkit: Toolkit,
}

/// How the container runtime is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Toolkit {
    /// NVIDIA's runtime runs every container, not just those that ask for it.
    pub default_runtime: bool,
    /// Any container gets any GPU that it names in its environment.
    pub environment_selects_gpus: bool,
}

/// Why the node's GPUs are not Kerf's; `None` if they are.
pub fn verdict(facts: &Facts) -> Option<Reason> {
    let reason = |reason: &str, message: String| Some(Reason { reason: reason.into(), message });
    let advertised =
        facts.allocatable.iter().find(|(name, count)| name.starts_with(NVIDIA_RESOURCES) && !is_zero(count));
    if let Some((name, count)) = advertised {
        return reason(
            unmanaged_reason::FOREIGN_DEVICE_PLUGIN,
            format!(
                "a device plugin hands out this node's GPUs: {name} has {count} allocatable; remove it from this node"
            ),
        );
    }
    if let Some(driver) = facts.gpu_drivers.first() {
        return reason(
            unmanaged_reason::FOREIGN_DRA_DRIVER,
            format!(
                "the DRA driver {driver} hands out this node's GPUs: it has ResourceSlices here; remove it from this node"
            ),
        );
    }
    if let (Some(wants), Some(state)) =
        (facts.labels.get(MIG_MANAGER_WANTS), facts.labels.get(MIG_MANAGER_STATE))
    {
        return reason(
            unmanaged_reason::MIG_MANAGER,
            format!(
                "mig-manager cuts this node's GPUs: label {MIG_MANAGER_WANTS} is {wants}, {MIG_MANAGER_STATE} is {state}; remove both labels and mig-manager from this node"
            ),
        );
    }
    if facts.toolkit.default_runtime && facts.toolkit.environment_selects_gpus {
        return reason(
            unmanaged_reason::UNSAFE_TOOLKIT,
            "any container on this node can take any GPU: NVIDIA's runtime is the default one and accept-nvidia-visible-devices-envvar-when-unprivileged is true in /etc/nvidia-container-runtime/config.toml; set it to false".to_owned(),
        );
    }
    None
}

/// Counts of devices are whole numbers; anything that is not plainly zero counts as something.
fn is_zero(quantity: &str) -> bool {
    quantity.trim_start_matches('0').is_empty()
}

/// Whether a slice lists NVIDIA GPUs for somebody else.
fn lists_gpus(slice: &ResourceSlice) -> bool {
    if slice.spec.driver == names::DRIVER {
        return false;
    }
    let attributes =
        slice.spec.devices.iter().flatten().filter_map(|device| device.attributes.as_ref()).flatten();
    let says_gpu = |(name, value): (&String, &k8s_openapi::api::resource::v1::DeviceAttribute)| {
        let text = value.string.as_deref().unwrap_or_default();
        text.starts_with("GPU-")
            || text.starts_with("MIG-")
            || (name.to_ascii_lowercase().ends_with("productname") && text.contains("NVIDIA"))
    };
    slice.spec.driver == NVIDIA_DRA_DRIVER || attributes.into_iter().any(says_gpu)
}

/// Reads the host's configuration.
fn read_toolkit(host_root: &Path) -> Toolkit {
    let Ok(toolkit) = fs::read_to_string(host_root.join("etc/nvidia-container-runtime/config.toml")) else {
        return Toolkit::default();
    };
    let mut runtimes = String::new();
    for file in ["etc/containerd/config.toml", "etc/crio/crio.conf"] {
        runtimes.push_str(&fs::read_to_string(host_root.join(file)).unwrap_or_default());
        runtimes.push('\n');
    }
    for dir in ["etc/containerd/conf.d", "etc/crio/crio.conf.d"] {
        for entry in fs::read_dir(host_root.join(dir)).into_iter().flatten().flatten() {
            runtimes.push_str(&fs::read_to_string(entry.path()).unwrap_or_default());
            runtimes.push('\n');
        }
    }
    Toolkit {
        default_runtime: ["default_runtime_name", "default_runtime"].iter().any(|key| {
            values(&runtimes, key).any(|value| value.trim_matches(['"', '\'']).starts_with("nvidia"))
        }),
        // Unset is true (https://github.com/NVIDIA/nvidia-container-toolkit, internal/config).
        environment_selects_gpus: values(&toolkit, "accept-nvidia-visible-devices-envvar-when-unprivileged")
            .last()
            .is_none_or(|value| value == "true"),
    }
}

/// The values that a TOML file gives to a key, in whatever table: the keys looked for are used with one meaning only.
fn values<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let line = line.split('#').next().unwrap_or_default();
        let (name, value) = line.split_once('=')?;
        (name.trim().trim_matches('"') == key).then(|| value.trim())
    })
}

/// Keeps `verdicts` up to date, and the Node's UID in `state`. `None` there means that the facts are not all known
/// yet. While the API server is away, the last verdict stays.
pub async fn watch(
    client: Client,
    state: NodeState,
    host_root: std::path::PathBuf,
    verdicts: watch::Sender<Option<Option<Reason>>>,
) -> anyhow::Result<()> {
    let own_name = watcher::Config::default().fields(&format!("metadata.name={}", state.node_name));
    let own_slices = watcher::Config::default().fields(&format!("spec.nodeName={}", state.node_name));
    let backoff = WatchBackoff::default;
    let mut nodes = Box::pin(kube::runtime::WatchStreamExt::backoff(
        watcher(Api::<Node>::all(client.clone()), own_name),
        backoff(),
    ));
    let mut slices = Box::pin(kube::runtime::WatchStreamExt::backoff(
        watcher(Api::<ResourceSlice>::all(client), own_slices),
        backoff(),
    ));
    let mut facts = Facts::default();
    let mut drivers: BTreeMap<String, String> = BTreeMap::new();
    let (mut node_known, mut slices_known) = (false, false);
    let mut configuration = tokio::time::interval(CONFIGURATION_INTERVAL);
    loop {
        tokio::select! {
            Some(event) = nodes.next() => match event {
                Ok(Event::Apply(node) | Event::InitApply(node)) => {
                    node_known = true;
                    state.node_uid.send_if_modified(|uid| {
                        let changed = *uid != node.metadata.uid;
                        uid.clone_from(&node.metadata.uid);
                        changed
                    });
                    facts.labels = node.metadata.labels.unwrap_or_default();
                    let allocatable = node.status.and_then(|status| status.allocatable).unwrap_or_default();
                    facts.allocatable = allocatable.into_iter().map(|(name, quantity)| (name, quantity.0)).collect();
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "watch of the Node"),
            },
            Some(event) = slices.next() => match event {
                Ok(Event::Init) => drivers.clear(),
                Ok(Event::InitDone) => slices_known = true,
                Ok(Event::Apply(slice) | Event::InitApply(slice)) => {
                    let name = slice.metadata.name.clone().unwrap_or_default();
                    if lists_gpus(&slice) {
                        drivers.insert(name, slice.spec.driver);
                    } else {
                        drivers.remove(&name);
                    }
                }
                Ok(Event::Delete(slice)) => {
                    drivers.remove(&slice.metadata.name.unwrap_or_default());
                }
                Err(error) => tracing::debug!(%error, "watch of the node's ResourceSlices"),
            },
            _ = configuration.tick() => facts.toolkit = read_toolkit(&host_root),
        }
        // Between Init and InitDone the list is not whole.
        if !node_known || !slices_known {
            continue;
        }
        facts.gpu_drivers = drivers.values().cloned().collect();
        facts.gpu_drivers.dedup();
        let verdict = verdict(&facts);
        verdicts.send_if_modified(|old| {
            let changed = old.as_ref() != Some(&verdict);
            if changed && let Some(reason) = &verdict {
                tracing::warn!(reason = %reason.reason, "{}", reason.message);
            }
            *old = Some(verdict);
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceSliceSpec};

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    }

    #[test]
    fn each_reason_by_itself_and_nothing_from_what_only_looks_like_one() {
        let toolkit =
            |default_runtime, environment_selects_gpus| Toolkit { default_runtime, environment_selects_gpus };
        let cases = [
            (
                Facts { allocatable: map(&[("nvidia.com/gpu", "8")]), ..Facts::default() },
                Some("ForeignDevicePlugin"),
            ),
            (
                Facts { allocatable: map(&[("nvidia.com/mig-1g.10gb", "1")]), ..Facts::default() },
                Some("ForeignDevicePlugin"),
            ),
            (Facts { allocatable: map(&[("nvidia.com/gpu", "0"), ("cpu", "64")]), ..Facts::default() }, None),
            (
                Facts { gpu_drivers: vec!["gpu.nvidia.com".into()], ..Facts::default() },
                Some("ForeignDraDriver"),
            ),
            (
                Facts {
                    labels: map(&[
                        ("nvidia.com/mig.config", "all-1g.10gb"),
                        ("nvidia.com/mig.config.state", "success"),
                    ]),
                    ..Facts::default()
                },
                Some("MigManager"),
            ),
            (Facts { labels: map(&[("nvidia.com/mig.config", "all-disabled")]), ..Facts::default() }, None),
            (Facts { labels: map(&[("nvidia.com/mig.capable", "true")]), ..Facts::default() }, None),
            (Facts { toolkit: toolkit(true, true), ..Facts::default() }, Some("UnsafeToolkitSetting")),
            (Facts { toolkit: toolkit(false, true), ..Facts::default() }, None),
            (Facts { toolkit: toolkit(true, false), ..Facts::default() }, None),
        ];
        for (facts, expected) in cases {
            let verdict = verdict(&facts);
            assert_eq!(verdict.as_ref().map(|reason| reason.reason.as_str()), expected, "{facts:?}");
        }
    }

    fn slice(driver: &str, attribute: (&str, &str)) -> ResourceSlice {
        let value = DeviceAttribute { string: Some(attribute.1.into()), ..DeviceAttribute::default() };
        let device = Device {
            name: "d".into(),
            attributes: Some(BTreeMap::from([(attribute.0.to_owned(), value)])),
            ..Device::default()
        };
        ResourceSlice {
            spec: ResourceSliceSpec {
                driver: driver.into(),
                devices: Some(vec![device]),
                ..ResourceSliceSpec::default()
            },
            ..ResourceSlice::default()
        }
    }

    #[test]
    fn a_slice_is_judged_by_driver_and_by_what_its_devices_say() {
        assert!(lists_gpus(&slice("gpu.nvidia.com", ("type", "gpu"))));
        assert!(lists_gpus(&slice("gpu.example.com", ("uuid", "GPU-1"))));
        assert!(lists_gpus(&slice("gpu.example.com", ("example.com/productName", "NVIDIA L4"))));
        assert!(!lists_gpus(&slice(names::DRIVER, ("uuid", "GPU-1"))));
        assert!(!lists_gpus(&slice("compute-domain.nvidia.com", ("type", "channel"))));
        assert!(!lists_gpus(&slice("net.example.com", ("productName", "ConnectX"))));
    }

    #[test]
    fn the_hosts_files_say_how_containers_get_gpus() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("etc/containerd/config.toml", "default_runtime_name = \"nvidia\"\n");
        assert_eq!(read_toolkit(root.path()), Toolkit::default(), "no toolkit");
        write("etc/nvidia-container-runtime/config.toml", "disable-require = false\n");
        assert_eq!(
            verdict(&Facts { toolkit: read_toolkit(root.path()), ..Facts::default() }).unwrap().reason,
            "UnsafeToolkitSetting"
        );
        let key = "accept-nvidia-visible-devices-envvar-when-unprivileged";
        write("etc/nvidia-container-runtime/config.toml", &format!("{key} = false # safe\n"));
        assert!(!read_toolkit(root.path()).environment_selects_gpus);
        write("etc/nvidia-container-runtime/config.toml", &format!("#{key} = false\n{key} = true\n"));
        assert!(read_toolkit(root.path()).environment_selects_gpus);
        write("etc/containerd/config.toml", "  default_runtime_name = \"runc\"\n");
        assert!(!read_toolkit(root.path()).default_runtime);
        write("etc/containerd/conf.d/99-nvidia.toml", "  default_runtime_name = 'nvidia'\n");
        assert!(read_toolkit(root.path()).default_runtime);
    }
}
