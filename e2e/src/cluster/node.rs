//! A node: namespaces of its own, containerd and kubelet in them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::control_plane::Setup;
use super::pki::write_kubeconfig;
use super::process::{Namespaces, Process, output, run};
use crate::helper::{self, NodeSpec};
use crate::images::PAUSE;
use crate::wait::{Seen, eventually};

/// Called each time a node boots, before containerd and kubelet start: the place to set up simulated hardware.
pub type OnBoot = Arc<dyn Fn(&Boot) -> Result<()> + Send + Sync>;

/// What a boot callback gets. Paths are the host's.
#[derive(Clone, Debug)]
pub struct Boot {
    pub node: String,
    /// `/run/nvidia/driver` of the node. It outlives a reboot, as what is there came from a disk.
    pub driver_root: PathBuf,
    /// False after [`Node::reboot`].
    pub first: bool,
}

/// How a node differs from the others.
#[derive(Clone, Default)]
pub struct NodeOptions {
    /// Letters, digits and dashes.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub on_boot: Option<OnBoot>,
    /// Fields set over those of the harness in the KubeletConfiguration, at its top level.
    pub kubelet_config: serde_json::Map<String, Value>,
}

impl NodeOptions {
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }
}

impl fmt::Debug for NodeOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeOptions")
            .field("name", &self.name)
            .field("labels", &self.labels)
            .finish_non_exhaustive()
    }
}

/// A running node. It is a guard's part: it ends with its cluster.
pub struct Node {
    name: String,
    options: NodeOptions,
    setup: Arc<Setup>,
    dir: PathBuf,
    /// Position among the cluster's nodes: pod addresses follow from it.
    index: u16,
    kubelet_port: u16,
    boot_id: Mutex<String>,
    namespaces: Mutex<Option<Namespaces>>,
    programs: tokio::sync::Mutex<Programs>,
}

#[derive(Default)]
struct Programs {
    /// `enter` with the node's outer process below it.
    outer: Option<Process>,
    containerd: Option<Process>,
    kubelet: Option<Process>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("name", &self.name).field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// Nodes of one cluster; see [`Setup::address`].
pub(crate) const MAX_NODES: u16 = 15;
/// Pod addresses of one node.
pub(crate) const NODE_ADDRESSES: u16 = 128;

impl Node {
    /// Lays out the node's folders.
    pub(crate) fn prepare(setup: Arc<Setup>, index: u16, options: NodeOptions) -> Result<Self> {
        let name = options.name.clone();
        let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > 32 || !name.chars().all(valid) {
            bail!("the node name {name:?} is not of 1 to 32 lower-case letters, digits and dashes");
        }
        if index >= MAX_NODES {
            bail!("a cluster has at most {MAX_NODES} nodes");
        }
        let dir = setup.dir.join("n").join(&name);
        for folder in
            ["kubelet", "containerd", "kerf", "driver", "cdi", "cni", "manifests", "scratch", "proc", "run"]
        {
            fs::create_dir_all(dir.join(folder))
                .with_context(|| format!("failed to create {}", dir.display()))?;
        }
        fs::create_dir_all(setup.logs().join(&name)).context("failed to create the node's log folder")?;
        let kubelet_port = setup.port()?;
        let node = Self {
            name,
            options,
            setup,
            dir,
            index,
            kubelet_port,
            boot_id: Mutex::default(),
            namespaces: Mutex::new(None),
            programs: tokio::sync::Mutex::default(),
        };
        node.write_configuration()?;
        Ok(node)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The host's path of a path of the node, for paths below `/run`, `/var/lib/kubelet`, `/var/lib/containerd`,
    /// `/var/lib/kerf`, `/etc/cdi`, `/etc/cni/net.d`, `/etc/kubernetes/manifests`, `/var/log` and `/run/nvidia/driver`.
    ///
    /// # Errors
    /// The path is in none of them.
    pub fn host_path(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = path.as_ref();
        let path = path
            .strip_prefix("/var/run")
            .map_or_else(|_| path.to_owned(), |rest| Path::new("/run").join(rest));
        // The last match is the innermost mount.
        self.binds()
            .into_iter()
            .rev()
            .find_map(|(host, node)| path.strip_prefix(node).ok().map(|rest| host.join(rest)))
            .with_context(|| format!("{} is not in a folder that belongs to the node alone", path.display()))
    }

    /// Source and target of the node's own folders, in the order of mounting.
    fn binds(&self) -> Vec<(PathBuf, PathBuf)> {
        let own = |folder: &str| self.dir.join(folder);
        vec![
            (own("run"), "/run".into()),
            (own("driver"), "/run/nvidia/driver".into()),
            (own("kubelet"), "/var/lib/kubelet".into()),
            (own("containerd"), "/var/lib/containerd".into()),
            (own("kerf"), "/var/lib/kerf".into()),
            (own("cdi"), "/etc/cdi".into()),
            (own("cni"), "/etc/cni/net.d".into()),
            (own("manifests"), "/etc/kubernetes/manifests".into()),
            (self.log_dir(), "/var/log".into()),
            (self.setup.toolchain.cni_dir.clone(), "/opt/cni/bin".into()),
            (self.setup.toolchain.nvidia_toolkit_dir.clone(), "/usr/local/nvidia/toolkit".into()),
        ]
    }

    /// The host's path of the node's `/run/nvidia/driver`.
    pub fn driver_root(&self) -> PathBuf {
        self.dir.join("driver")
    }

    /// The id that the node's kernel reports since the last boot.
    pub fn boot_id(&self) -> String {
        self.boot_id.lock().unwrap_or_else(PoisonError::into_inner).trim().to_owned()
    }

    /// The host's path of `containerd.log`, `kubelet.log` and, in `pods/`, the logs of pods.
    pub fn log_dir(&self) -> PathBuf {
        self.setup.logs().join(&self.name)
    }

    fn cgroup(&self) -> PathBuf {
        Path::new(self.setup.dir.file_name().unwrap_or_default()).join(&self.name)
    }

    fn write_configuration(&self) -> Result<()> {
        let pki = &self.setup.pki;
        let user = pki.user(
            &format!("kubelet-{}", self.name),
            &format!("system:node:{}", self.name),
            Some("system:nodes"),
        )?;
        write_kubeconfig(&self.dir.join("kubeconfig"), &pki.kubeconfig(&self.setup.server(), &user)?)?;
        let server = pki.server(&format!("kubelet-{}-server", self.name), &[&self.name, "127.0.0.1"])?;
        let mut kubelet = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self.kubelet_port,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": pki.ca() },
            },
            "authorization": { "mode": "Webhook" },
            "tlsCertFile": server.cert,
            "tlsPrivateKeyFile": server.key,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "staticPodPath": "/etc/kubernetes/manifests",
            "volumePluginDir": "/var/lib/kubelet/volumeplugins",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": Path::new("/").join(self.cgroup()),
            "failCgroupV1": false,
            "enforceNodeAllocatable": [],
            "failSwapOn": false,
            // It would change the host's.
            "protectKernelDefaults": true,
            "makeIPTablesUtilChains": false,
            // There is no DNS; without an address each pod would get an event about that.
            "clusterDNS": [self.setup.service_address(10)],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            // The host's disk is shared with everything else on it.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": { "memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%" },
        });
        if let Some(config) = kubelet.as_object_mut() {
            config.extend(self.options.kubelet_config.clone());
        }
        fs::write(self.dir.join("kubelet.json"), serde_json::to_vec_pretty(&kubelet)?)?;

        let first = self.index * NODE_ADDRESSES;
        let addresses = json!({
            "subnet": format!("{}/21", self.setup.address(0)),
            "rangeStart": self.setup.address(first + 1),
            "rangeEnd": self.setup.address(first + NODE_ADDRESSES - 2),
            "gateway": self.setup.service_address(1),
        });
        let cni = json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [{
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    // Gone with a reboot, as the pods are.
                    "dataDir": "/run/cni",
                    "ranges": [[addresses]],
                    "routes": [{ "dst": "0.0.0.0/0" }],
                },
            }],
        });
        fs::write(self.dir.join("cni/10-pods.conflist"), cni.to_string())?;
        fs::write(self.dir.join("containerd.toml"), containerd_config())?;
        Ok(())
    }

    /// Brings the node up as far as containerd, with the given images.
    pub(crate) async fn boot(&self, first: bool, images: &[PathBuf]) -> Result<()> {
        let mut programs = self.programs.lock().await;
        helper::create_cgroups(&self.cgroup())?;
        for folder in ["nvidia/driver", "cdi", "kerf"] {
            fs::create_dir_all(self.dir.join("run").join(folder))?;
        }
        if let Some(on_boot) = self.options.on_boot.clone() {
            let boot = Boot { node: self.name.clone(), driver_root: self.driver_root(), first };
            tokio::task::spawn_blocking(move || on_boot(&boot))
                .await
                .context("the boot callback ended early")?
                .with_context(|| format!("the boot callback of {} failed", self.name))?;
        }
        let spec = self.dir.join("node.json");
        fs::write(&spec, serde_json::to_vec_pretty(&self.spec()?)?)?;
        let log = self.log_dir().join("node.log");
        fs::write(&log, "")?;
        let mut outer = Process::start(
            &self.setup.namespaces,
            &self.name,
            &log,
            &self.setup.pids(),
            &self.setup.namespaces.helper,
            |command| {
                command.arg("node").arg(&spec);
            },
        )?;
        let pid = outer.started().await?;
        eventually(Duration::from_secs(20), format!("the namespaces of {}", self.name), || {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let seen = match outer.check() {
                Ok(()) if text.contains("ready") => Seen::Yes(Ok(())),
                Ok(()) => Seen::NotYet(text),
                Err(ended) => Seen::Yes(Err(ended)),
            };
            std::future::ready(Ok(seen))
        })
        .await??;
        programs.outer = Some(outer);
        let namespaces = Namespaces { helper: self.setup.namespaces.helper.clone(), pid };
        *self.namespaces.lock().unwrap_or_else(PoisonError::into_inner) = Some(namespaces);
        programs.containerd = Some(self.start_containerd_process().await?);
        for image in images {
            self.import_image(image).await?;
        }
        Ok(())
    }

    fn spec(&self) -> Result<NodeSpec> {
        let mut proc_files = Vec::new();
        let boot_id =
            fs::read_to_string("/proc/sys/kernel/random/uuid").context("failed to make a boot id")?;
        self.boot_id.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&boot_id);
        for (file, content) in [
            ("vm/overcommit_memory", "1\n"),
            ("vm/panic_on_oom", "0\n"),
            ("kernel/panic", "10\n"),
            ("kernel/panic_on_oops", "1\n"),
            ("kernel/keys/root_maxkeys", "1000000\n"),
            ("kernel/keys/root_maxbytes", "25000000\n"),
            ("net/ipv4/ip_forward", "1\n"),
            ("kernel/random/boot_id", &boot_id),
        ] {
            let source = self.dir.join("proc").join(file.replace('/', "."));
            fs::write(&source, content)?;
            proc_files.push((source, Path::new("/proc/sys").join(file)));
        }
        Ok(NodeSpec {
            name: self.name.clone(),
            hosts: self.setup.dir.join("hosts"),
            scratch: self.dir.join("scratch"),
            binds: self.binds(),
            proc_files,
            machine_id: format!("{:0>32x}", (u32::from(self.setup.slot) << 16) + u32::from(self.index) + 1),
        })
    }

    fn inside(&self) -> Result<Namespaces> {
        let namespaces = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        namespaces.clone().with_context(|| format!("node {} is not up", self.name))
    }

    fn start_process(&self, name: &str, program: &Path, args: &[String]) -> Result<Process> {
        let path = std::env::join_paths([
            &self.setup.toolchain.containerd_dir,
            self.setup.toolchain.runc.parent().context("runc has no folder")?,
            Path::new("/usr/sbin"),
            Path::new("/usr/bin"),
            Path::new("/sbin"),
            Path::new("/bin"),
        ])?;
        let log = self.log_dir().join(format!("{name}.log"));
        Process::start(
            &self.inside()?,
            &format!("{}-{name}", self.name),
            &log,
            &self.setup.pids(),
            program,
            |command| {
                command.args(args).env("PATH", path);
            },
        )
    }

    async fn start_containerd_process(&self) -> Result<Process> {
        let program = self.setup.toolchain.containerd_dir.join("containerd");
        let config = self.dir.join("containerd.toml");
        let mut containerd = self.start_process(
            "containerd",
            &program,
            &["--config".to_owned(), config.display().to_string()],
        )?;
        let socket = self.host_path("/run/containerd/containerd.sock")?;
        eventually(Duration::from_secs(30), format!("containerd of {}", self.name), || {
            let seen = match (containerd.check(), UnixStream::connect(&socket)) {
                (Err(ended), _) => Seen::Yes(Err(ended)),
                (Ok(()), Ok(_)) => Seen::Yes(Ok(())),
                (Ok(()), Err(error)) => Seen::not_yet(format!("{}: {error}", socket.display())),
            };
            std::future::ready(Ok(seen))
        })
        .await??;
        Ok(containerd)
    }

    /// Imports a docker-archive into containerd. Content that is there already costs nothing.
    ///
    /// # Errors
    /// containerd refuses the file.
    pub async fn import_image(&self, archive: &Path) -> Result<()> {
        let ctr = self.setup.toolchain.containerd_dir.join("ctr");
        let mut command = self.inside()?.command(ctr, None);
        command.args(["-n", "k8s.io", "images", "import"]).arg(archive);
        run(command).await.map(drop).with_context(|| format!("failed to import an image on {}", self.name))
    }

    /// Starts kubelet, where it is not running. The node becomes Ready some time later.
    pub async fn start_kubelet(&self) -> Result<()> {
        let mut programs = self.programs.lock().await;
        if let Some(kubelet) = &mut programs.kubelet
            && kubelet.check().is_ok()
        {
            return Ok(());
        }
        let mut args = vec![
            format!("--config={}", self.dir.join("kubelet.json").display()),
            format!("--kubeconfig={}", self.dir.join("kubeconfig").display()),
            format!("--hostname-override={}", self.name),
            self.setup.options.feature_gates_arg(),
        ];
        if !self.options.labels.is_empty() {
            let labels: Vec<String> =
                self.options.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
            args.push(format!("--node-labels={}", labels.join(",")));
        }
        programs.kubelet = Some(self.start_process("kubelet", &self.setup.toolchain.kubelet, &args)?);
        Ok(())
    }

    /// Ends kubelet. Pods go on running.
    pub async fn stop_kubelet(&self) -> Result<()> {
        let kubelet = self.programs.lock().await.kubelet.take();
        if let Some(kubelet) = kubelet {
            kubelet.stop(Duration::from_secs(10)).await?;
        }
        Ok(())
    }

    /// Ends containerd, and starts it again. Pods go on running.
    pub async fn restart_containerd(&self) -> Result<()> {
        let mut programs = self.programs.lock().await;
        if let Some(containerd) = programs.containerd.take() {
            containerd.stop(Duration::from_secs(10)).await?;
        }
        programs.containerd = Some(self.start_containerd_process().await?);
        Ok(())
    }

    /// Pulls the plug: every process of the node is killed at once, pods included, and `/run` is emptied.
    pub async fn power_off(&self) -> Result<()> {
        let mut programs = self.programs.lock().await;
        *self.namespaces.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some(mut outer) = programs.outer.take() {
            let init = child_of(outer.started().await?);
            outer.stop(Duration::ZERO).await?;
            // PID 1 dies with its parent; it is gone when all of its namespace is.
            if let Some(init) = init {
                let path = PathBuf::from(format!("/proc/{init}"));
                eventually(Duration::from_secs(60), format!("the end of {}'s processes", self.name), || {
                    std::future::ready(Ok(Seen::when(path.exists(), |exists| !exists)))
                })
                .await?;
            }
        }
        for mut process in [programs.kubelet.take(), programs.containerd.take()].into_iter().flatten() {
            process.collect();
        }
        drop(programs);
        let (cgroup, run) = (self.cgroup(), self.dir.join("run"));
        tokio::task::spawn_blocking(move || {
            helper::remove_cgroups(&cgroup)?;
            fs::remove_dir_all(&run).and_then(|()| fs::create_dir(&run)).context("failed to empty /run")
        })
        .await
        .context("the clean-up was cancelled")?
    }

    /// Starts the node again after [`Node::power_off`]: the boot callback, containerd, kubelet.
    pub async fn power_on(&self) -> Result<()> {
        self.boot(false, &[]).await?;
        self.start_kubelet().await
    }

    /// [`Node::power_off`], then [`Node::power_on`]. The boot id that the node reports changes.
    pub async fn reboot(&self) -> Result<()> {
        self.power_off().await?;
        self.power_on().await
    }

    /// Runs a program as root in the node's namespaces.
    ///
    /// # Errors
    /// It cannot be started. A failing exit status is not an error here.
    pub async fn exec(&self, program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> Result<Output> {
        let mut command = self.inside()?.command(program, None);
        command.args(args);
        output(command).await
    }

    /// A command that will run in the node's namespaces, for callers that set its environment or streams.
    ///
    /// # Errors
    /// The node is off.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<std::process::Command> {
        Ok(self.inside()?.command(program, None))
    }

    /// Collects the exit statuses of the node's programs, which are dead or dying.
    pub(crate) fn collect(&self) {
        // Locked only where a test that has failed is still at it; then the end of this process collects them.
        let Ok(mut programs) = self.programs.try_lock() else { return };
        let Programs { outer, containerd, kubelet } = &mut *programs;
        for process in [outer, containerd, kubelet].into_iter().flatten() {
            process.collect();
        }
    }
}

/// The one child of a process, in the host's numbering.
fn child_of(parent: u32) -> Option<u32> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // pid (command) state parent …, where the command may hold anything.
        let of: u32 = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        (of == parent).then_some(pid)
    })
}

fn containerd_config() -> String {
    format!(
        r#"version = 3
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  # Machines that are containers themselves refuse to lower it.
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE}"
"#
    )
}
