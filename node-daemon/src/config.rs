//! The daemon's command line.

use std::path::PathBuf;

use crate::metrics;

/// Flags of `kerf-node-daemon`; each can be set by the environment variable shown in `--help`.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "kerf-node-daemon", version, about)]
pub struct Config {
    /// Name of the Node that the daemon runs on.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,

    /// Directory under which the driver's libraries and programs lie, as seen by the daemon.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// The same directory as the host sees it: the paths that CDI specs name.
    #[arg(long, env = "HOST_DRIVER_ROOT", default_value = "/")]
    pub host_driver_root: PathBuf,

    /// Directory whose `dev` has the device nodes, as seen by the daemon. Default: the driver root.
    #[arg(long, env = "DEV_ROOT")]
    pub dev_root: Option<PathBuf>,

    /// The same directory as the host sees it. Default: the host's driver root.
    #[arg(long, env = "HOST_DEV_ROOT")]
    pub host_dev_root: Option<PathBuf>,

    /// Directory whose `proc/driver/nvidia` has the driver's capability files.
    #[arg(long, env = "PROC_ROOT", default_value = "/")]
    pub proc_root: PathBuf,

    /// Root of the host's file system as seen by the daemon, for the container runtime's configuration.
    #[arg(long, env = "HOST_ROOT", default_value = "/")]
    pub host_root: PathBuf,

    /// Where the daemon keeps its checkpoints; must survive restarts of the pod.
    #[arg(long, env = "STATE_DIR", default_value = "/var/lib/kerf")]
    pub state_dir: PathBuf,

    /// The same directory as the host sees it: containers' hooks lie there. Default: the same path.
    #[arg(long, env = "HOST_STATE_DIR")]
    pub host_state_dir: Option<PathBuf>,

    /// Where CDI specs are written for the container runtime.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// kubelet's directory of plugins; the plugin's socket goes below it.
    #[arg(long, env = "KUBELET_PLUGINS_DIR", default_value = "/var/lib/kubelet/plugins")]
    pub kubelet_plugins_dir: PathBuf,

    /// Where kubelet looks for plugins that register.
    #[arg(long, env = "KUBELET_REGISTRY_DIR", default_value = "/var/lib/kubelet/plugins_registry")]
    pub kubelet_registry_dir: PathBuf,

    /// Directory for the pipes and files of MPS servers, as seen by the daemon and by the servers' pods: one that a reboot
    /// empties.
    #[arg(long, env = "MPS_DIR", default_value = "/run/kerf/mps")]
    pub mps_dir: PathBuf,

    /// The same directory as the host sees it. Default: the same path.
    #[arg(long, env = "HOST_MPS_DIR")]
    pub host_mps_dir: Option<PathBuf>,

    /// Root of the host's cgroups, as seen by the daemon.
    #[arg(long, env = "CGROUP_ROOT", default_value = "/sys/fs/cgroup")]
    pub cgroup_root: PathBuf,

    /// Kerf's own namespace, in which the pods of MPS servers are.
    #[arg(long, env = "POD_NAMESPACE", default_value = "kerf-system")]
    pub namespace: String,

    /// `nvidia-ctk` of the NVIDIA Container Toolkit, as seen by the daemon. If it is not given or not there, the usual
    /// places under the host root are searched. Without the toolkit containers get device nodes, but neither the
    /// driver's libraries nor its programs, and the GpuNode's condition ContainerToolkit is False.
    #[arg(long, env = "NVIDIA_CTK")]
    pub nvidia_ctk: Option<PathBuf>,

    /// Where metrics are served over HTTP, at /metrics: ip:port, or :port for all addresses of the node. Empty: nowhere.
    #[arg(long, env = "METRICS_ADDRESS", default_value = "")]
    pub metrics_address: metrics::Address,

    /// Log lines as JSON instead of text.
    #[arg(long, env = "LOG_JSON")]
    pub log_json: bool,

    /// What to log, in the syntax of `RUST_LOG`. (The client's own lines repeat each failed try.)
    #[arg(long, env = "LOG", default_value = "info,kube_client::client::builder=off")]
    pub log: String,

    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What to do instead of running.
#[derive(Clone, Copy, Debug, clap::Subcommand)]
pub enum Command {
    /// Succeeds if the daemon of this node is alive; for an exec probe.
    Health,
}

impl Config {
    /// See [`Config::dev_root`].
    pub fn dev_root(&self) -> &std::path::Path {
        self.dev_root.as_deref().unwrap_or(&self.driver_root)
    }

    /// See [`Config::host_state_dir`].
    pub fn host_state_dir(&self) -> &std::path::Path {
        self.host_state_dir.as_deref().unwrap_or(&self.state_dir)
    }

    /// See [`Config::host_mps_dir`].
    pub fn host_mps_dir(&self) -> &std::path::Path {
        self.host_mps_dir.as_deref().unwrap_or(&self.mps_dir)
    }

    /// See [`Config::host_dev_root`].
    pub fn host_dev_root(&self) -> &std::path::Path {
        self.host_dev_root.as_deref().unwrap_or(&self.host_driver_root)
    }
}
