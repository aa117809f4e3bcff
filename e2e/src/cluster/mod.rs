//! A real Kubernetes cluster on this machine, as a guard object.
//!
//! Control plane and kubelets are the real programs. Each node is a mount, PID, UTS and IPC namespace in the host's
//! network namespace: the paths that Kubernetes, containerd, CDI, the GPU driver and Kerf use in production are each
//! node's own, so manifests with `hostPath` volumes work unmodified on several nodes of one machine. Everything listens
//! on loopback.

mod control_plane;
mod node;
mod pki;
mod process;
mod program;
mod service;
mod watcher;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node as NodeObject, ServiceAccount};
use kerf_toolchain::Toolchain;
use kube::api::{Api, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use nix::sys::inotify::{InitFlags, Inotify};
use tokio::task::JoinHandle;

use crate::audit::{self, Write};
use crate::helper;
use crate::images::{self, Archive};
use crate::wait::{Seen, eventually};
use control_plane::{Setup, grace, next_port};
use pki::{Pki, write_kubeconfig};
use process::{Namespaces, Process};
use watcher::{Watcher, sweep};

pub use control_plane::{Component, ControlPlaneOptions};
pub use node::{Boot, Node, NodeOptions, OnBoot};
pub use program::Program;

/// What a cluster is started with. The default has two nodes, `node-a` and `node-b`.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    pub nodes: Vec<NodeOptions>,
    pub control_plane: ControlPlaneOptions,
    /// Where the cluster's folder is made. The default is the system's folder for temporary files.
    pub parent_dir: PathBuf,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            nodes: vec![NodeOptions::new("node-a"), NodeOptions::new("node-b")],
            control_plane: ControlPlaneOptions::default(),
            parent_dir: std::env::temp_dir(),
        }
    }
}

/// A running cluster. When the guard is dropped, or the process that holds it ends in whatever way, all of the cluster
/// ends: processes, mounts, cgroups, network namespaces and its folder. After a panic the logs stay.
pub struct Cluster {
    setup: Arc<Setup>,
    client: Client,
    components: tokio::sync::Mutex<HashMap<Component, Process>>,
    nodes: RwLock<BTreeMap<String, Arc<Node>>>,
    /// Imported into every node, also those that are added later.
    images: Mutex<Vec<PathBuf>>,
    service: JoinHandle<()>,
    /// The last field: it is dropped when nothing else is left to do.
    watcher: Watcher,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("dir", &self.setup.dir).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Starts a cluster, and returns when all its nodes are Ready and pods can be created.
    ///
    /// # Errors
    /// This is not root, a program is missing and cannot be built, or something did not come up; in the last case the
    /// logs are kept and the message says where.
    pub async fn start(options: ClusterOptions) -> Result<Self> {
        require_root()?;
        require_inotify(options.nodes.len())?;
        let toolchain =
            tokio::task::spawn_blocking(|| Toolchain::ensure(&|line| eprintln!("toolchain: {line}")))
                .await
                .context("the toolchain's installation was cancelled")??;
        let parent = std::path::absolute(&options.parent_dir).context("the parent folder")?;
        check_parent(&parent)?;
        sweep(&parent);
        let dir = tempfile::Builder::new()
            .prefix("kerf-")
            .rand_bytes(6)
            .tempdir_in(&parent)
            .with_context(|| format!("failed to create a folder in {}", parent.display()))?;
        for folder in ["logs", "pids", "images", "n"] {
            fs::create_dir(dir.path().join(folder))?;
        }
        let names = options.nodes.iter().map(|node| node.name.clone());
        let spare = (b'a'..=b'p').map(|letter| format!("node-{}", char::from(letter)));
        write_hosts(&dir.path().join("hosts"), names.chain(spare))?;
        let helper = helper::find()?;
        let (watcher, hello) = Watcher::start(&helper, dir.path())?;
        // From here on the watcher removes it.
        let dir = dir.keep();
        let started =
            Self::start_watched(options, toolchain, dir, Namespaces { helper, pid: hello.init }, hello.slot);
        match started.await {
            Ok((setup, client, components, nodes, images)) => Ok(Self {
                service: tokio::spawn(service::serve(setup.service_address(1), setup.api_port)),
                setup,
                client,
                components: tokio::sync::Mutex::new(components),
                nodes: RwLock::new(nodes),
                images: Mutex::new(images),
                watcher,
            }),
            Err(error) => {
                let mut watcher = watcher;
                watcher.life_line().keep_logs();
                watcher.end()?;
                Err(error)
            }
        }
    }

    async fn start_watched(
        options: ClusterOptions,
        toolchain: Toolchain,
        dir: PathBuf,
        namespaces: Namespaces,
        slot: u16,
    ) -> Result<(Arc<Setup>, Client, HashMap<Component, Process>, BTreeMap<String, Arc<Node>>, Vec<PathBuf>)>
    {
        let next = Mutex::new(0);
        let port = || next_port(slot, &next);
        let (etcd_ports, api_port) = ((port()?, port()?), port()?);
        let setup = Arc::new(Setup {
            pki: Pki::new(&dir.join("pki"))?,
            dir,
            namespaces,
            toolchain,
            options: options.control_plane,
            slot,
            etcd_ports,
            api_port,
            next_port: next,
        });
        setup.prepare()?;
        let mut components = HashMap::new();
        components.insert(Component::Etcd, setup.start(Component::Etcd)?);
        components.insert(Component::ApiServer, setup.start(Component::ApiServer)?);
        let images = images::base(&setup.toolchain.busybox, &setup.dir.join("images"))?;
        let mut nodes = BTreeMap::new();
        for (index, node) in (0..).zip(options.nodes) {
            let node = Arc::new(Node::prepare(setup.clone(), index, node)?);
            if nodes.insert(node.name().to_owned(), node.clone()).is_some() {
                bail!("two nodes are called {}", node.name());
            }
        }
        // containerd needs no API server.
        let booting = futures::future::try_join_all(nodes.values().map(|node| node.boot(true, &images)));
        let client = client_from(&setup.kubeconfig("admin")).await?;
        let api = async {
            wait_api_server(&client, &mut components).await?;
            for component in [Component::ControllerManager, Component::Scheduler] {
                components.insert(component, setup.start(component)?);
            }
            anyhow::Ok(components)
        };
        let (_, components) = tokio::try_join!(booting, api)?;
        futures::future::try_join_all(nodes.values().map(|node| node.start_kubelet())).await?;
        for node in nodes.values() {
            wait_node_ready(&client, node).await?;
        }
        // Pods are refused without it.
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
        eventually(Duration::from_secs(30), "the default service account", || async {
            Ok(accounts.get_opt("default").await?.map_or_else(|| Seen::not_yet("none"), Seen::Yes))
        })
        .await?;
        Ok((setup, client, components, nodes, images))
    }

    /// A client of the API server as `system:masters`.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The cluster's folder, which is gone when the cluster is.
    pub fn dir(&self) -> &Path {
        &self.setup.dir
    }

    /// Logs of every component, kubelet and pod.
    pub fn log_dir(&self) -> PathBuf {
        self.setup.logs()
    }

    /// `https://127.0.0.1:<port>`
    pub fn server(&self) -> String {
        self.setup.server()
    }

    /// The port of the API server on loopback.
    pub fn api_port(&self) -> u16 {
        self.setup.api_port
    }

    /// A TCP port that nothing listens on and no other cluster uses.
    ///
    /// # Errors
    /// None of the cluster's ports is free.
    pub fn free_port(&self) -> Result<u16> {
        self.setup.port()
    }

    /// A kubeconfig file of the user `admin`, in the group `system:masters`.
    pub fn kubeconfig_path(&self) -> PathBuf {
        self.setup.kubeconfig("admin")
    }

    /// The programs that the cluster runs, kubectl among them.
    pub fn toolchain(&self) -> &Toolchain {
        &self.setup.toolchain
    }

    /// Runs kubectl as admin, and returns its standard output.
    ///
    /// # Errors
    /// It fails; the message holds its output.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let mut command = std::process::Command::new(&self.setup.toolchain.kubectl);
        command.arg("--kubeconfig").arg(self.kubeconfig_path()).args(args);
        command.env("HOME", &self.setup.dir);
        process::run(command).await
    }

    /// A kubeconfig file for a service account, with a token from TokenRequest that lasts for hours. With a node, the
    /// token is bound to its Node object, as that of a pod there would be.
    ///
    /// # Errors
    /// The account or the node does not exist.
    pub async fn kubeconfig_for_service_account(
        &self,
        namespace: &str,
        name: &str,
        node: Option<&str>,
    ) -> Result<PathBuf> {
        let bound_object_ref = match node {
            None => None,
            Some(node) => {
                let nodes: Api<NodeObject> = Api::all(self.client());
                let object = nodes.get(node).await.with_context(|| format!("failed to read node {node}"))?;
                Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Node".to_owned()),
                    name: Some(node.to_owned()),
                    uid: object.metadata.uid,
                })
            }
        };
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                bound_object_ref,
                expiration_seconds: Some(12 * 3600),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), namespace);
        let response = accounts
            .create_token_request(name, &PostParams::default(), &request)
            .await
            .with_context(|| format!("failed to get a token for service account {namespace}/{name}"))?;
        let token = response.status.and_then(|status| status.token);
        let token = token.context("the API server answered without a token")?;
        let path = self.setup.kubeconfig(&format!("{namespace}-{name}-{}", node.unwrap_or("any")));
        write_kubeconfig(&path, &self.setup.pki.kubeconfig_for_token(&self.setup.server(), &token))?;
        Ok(path)
    }

    /// A client that uses such a kubeconfig file.
    ///
    /// # Errors
    /// The file is no kubeconfig.
    pub async fn client_from(&self, kubeconfig: &Path) -> Result<Client> {
        client_from(kubeconfig).await
    }

    /// The node of that name.
    ///
    /// # Panics
    /// There is none: a mistake in the test.
    pub fn node(&self, name: &str) -> Arc<Node> {
        let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        match nodes.get(name) {
            Some(node) => node.clone(),
            None => panic!("the cluster has no node {name}; it has {:?}", nodes.keys().collect::<Vec<_>>()),
        }
    }

    /// All nodes, by name.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Adds a node, and returns when it is Ready.
    ///
    /// # Errors
    /// The name is taken, or the node does not come up.
    pub async fn add_node(&self, options: NodeOptions) -> Result<Arc<Node>> {
        let node = {
            let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
            if nodes.contains_key(&options.name) {
                bail!("the cluster already has a node {}", options.name);
            }
            let index = u16::try_from(nodes.len()).context("too many nodes")?;
            let node = Arc::new(Node::prepare(self.setup.clone(), index, options)?);
            nodes.insert(node.name().to_owned(), node.clone());
            let spare = (b'a'..=b'p').map(|letter| format!("node-{}", char::from(letter)));
            write_hosts(&self.setup.dir.join("hosts"), nodes.keys().cloned().chain(spare))?;
            node
        };
        let images = self.images.lock().unwrap_or_else(PoisonError::into_inner).clone();
        node.boot(true, &images).await?;
        node.start_kubelet().await?;
        wait_node_ready(&self.client, &node).await?;
        Ok(node)
    }

    /// Waits until a node is Ready, and says so since its last boot.
    ///
    /// # Errors
    /// It is not within a minute.
    pub async fn wait_node_ready(&self, name: &str) -> Result<()> {
        wait_node_ready(&self.client, &self.node(name)).await
    }

    /// Imports an image into every node, and into those that are added later.
    ///
    /// # Errors
    /// The archive cannot be written, or containerd refuses it.
    pub async fn load_image(&self, image: &Archive) -> Result<()> {
        let path = image.write(&self.setup.dir.join("images"))?;
        let nodes = self.nodes();
        futures::future::try_join_all(nodes.iter().map(|node| node.import_image(&path))).await?;
        self.images.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        Ok(())
    }

    /// Ends a program of the control plane.
    pub async fn stop(&self, component: Component) -> Result<()> {
        let process = self.components.lock().await.remove(&component);
        if let Some(process) = process {
            process.stop(grace(component)).await?;
        }
        Ok(())
    }

    /// Starts a program of the control plane that was stopped. Returns, for the API server, when it answers.
    pub async fn start_component(&self, component: Component) -> Result<()> {
        let mut components = self.components.lock().await;
        if components.contains_key(&component) {
            bail!("{} is running", component.name());
        }
        components.insert(component, self.setup.start(component)?);
        if component == Component::ApiServer {
            wait_api_server(&self.client, &mut components).await?;
        }
        Ok(())
    }

    /// Takes the API server away.
    pub async fn stop_apiserver(&self) -> Result<()> {
        self.stop(Component::ApiServer).await
    }

    /// Brings the API server back, and returns when it answers.
    pub async fn start_apiserver(&self) -> Result<()> {
        self.start_component(Component::ApiServer).await
    }

    /// Ends kube-scheduler, and starts it again.
    pub async fn restart_scheduler(&self) -> Result<()> {
        self.stop(Component::Scheduler).await?;
        self.start_component(Component::Scheduler).await
    }

    /// The process id of a program of the control plane.
    pub async fn pid(&self, component: Component) -> Option<u32> {
        self.components.lock().await.get(&component).and_then(Process::pid)
    }

    /// The write requests that the API server has answered since it started. The cluster must have been started with
    /// [`ControlPlaneOptions::audit`].
    ///
    /// # Errors
    /// There is no audit log.
    pub fn audit(&self) -> Result<Vec<Write>> {
        audit::read(&self.setup.audit_log())
    }

    /// The file that [`Self::audit`] reads.
    pub fn audit_log(&self) -> PathBuf {
        self.setup.audit_log()
    }

    /// Has the logs outlive the cluster, as after a panic.
    pub fn keep_logs(&self) {
        self.watcher.life_line().keep_logs();
    }

    /// Ends the cluster, and returns when nothing of it is left. Dropping it does the same, but can only print an error.
    ///
    /// # Errors
    /// Something could not be removed.
    pub fn end(mut self) -> Result<()> {
        self.watcher.end()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.service.abort();
        if let Err(error) = self.watcher.end() {
            eprintln!("the test cluster did not end cleanly: {error:#}");
        }
        for process in self.components.get_mut().values_mut() {
            process.collect();
        }
        for node in self.nodes() {
            node.collect();
        }
    }
}

fn require_root() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "the test cluster needs root: its nodes are mount and PID namespaces with cgroups and overlay mounts of \
             their own; run the command with sudo"
        );
    }
    Ok(())
}

/// A kubelet that gets no inotify instance says so in its log and never registers: this finds out beforehand.
fn require_inotify(nodes: usize) -> Result<()> {
    // Counted on running clusters: kubelet 7, containerd 2, the node daemon 1; API server and kube-scheduler 4.
    let needed = 10 * nodes + 4;
    let mut held = Vec::new();
    for _ in 0..needed {
        match Inotify::init(InitFlags::IN_CLOEXEC) {
            Ok(instance) => held.push(instance),
            Err(error) => {
                let limit = fs::read_to_string("/proc/sys/fs/inotify/max_user_instances").unwrap_or_default();
                bail!(
                    "a cluster of {nodes} nodes needs {needed} inotify instances, and only {} are free ({error}); of \
                     root's {} (sysctl fs.inotify.max_user_instances), other programs hold the rest: end other \
                     clusters, or raise the limit",
                    held.len(),
                    limit.trim()
                );
            }
        }
    }
    Ok(())
}

/// A node's own folders cover these, so the cluster's folder cannot be in them.
fn check_parent(parent: &Path) -> Result<()> {
    for covered in
        ["/etc", "/opt", "/run", "/usr/local", "/var/lib", "/var/log", "/var/run", "/dev/shm", "/proc"]
    {
        if parent.starts_with(covered) {
            bail!(
                "{} is in {covered}, which nodes have as their own; set TMPDIR to another folder",
                parent.display()
            );
        }
    }
    if parent.as_os_str().len() > 40 {
        bail!(
            "{} is too long for the paths of sockets below it; set TMPDIR to a shorter one",
            parent.display()
        );
    }
    Ok(())
}

/// Written in place, since the file is mounted over `/etc/hosts` in the cluster's namespaces.
fn write_hosts(path: &Path, names: impl Iterator<Item = String>) -> Result<()> {
    let mut names: Vec<String> = names.collect();
    names.sort();
    names.dedup();
    let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for name in names {
        text += &format!("127.0.0.1 {name}\n");
    }
    fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
}

async fn client_from(kubeconfig: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).context("failed to read a kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .context("failed to understand a kubeconfig")?;
    Client::try_from(config).context("failed to make a client")
}

async fn wait_api_server(client: &Client, components: &mut HashMap<Component, Process>) -> Result<()> {
    let components = Mutex::new(components);
    eventually(Duration::from_secs(60), "the API server's readiness", || async {
        let alive = {
            let mut components = components.lock().unwrap_or_else(PoisonError::into_inner);
            components.values_mut().try_for_each(Process::check)
        };
        if let Err(ended) = alive {
            return Ok(Seen::Yes(Err(ended)));
        }
        let request = http::Request::get("/readyz").body(Vec::new()).context("failed to make a request")?;
        Ok(match client.request_text(request).await?.as_str() {
            "ok" => Seen::Yes(Ok(())),
            other => Seen::not_yet(other),
        })
    })
    .await?
}

async fn wait_node_ready(client: &Client, node: &Node) -> Result<()> {
    let (name, boot_id) = (node.name(), node.boot_id());
    let nodes: Api<NodeObject> = Api::all(client.clone());
    eventually(Duration::from_secs(300), format!("node {name} Ready"), || async {
        let Some(node) = nodes.get_opt(name).await? else { return Ok(Seen::not_yet("no Node object")) };
        let status = node.status.unwrap_or_default();
        let reported = status.node_info.map(|info| info.boot_id).unwrap_or_default();
        let ready = status.conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
        let taints: Vec<String> =
            node.spec.and_then(|spec| spec.taints).into_iter().flatten().map(|taint| taint.key).collect();
        let unready = taints.iter().any(|key| key.starts_with("node.kubernetes.io/not-ready"));
        Ok(match ready {
            Some(ready) if ready.status == "True" && !unready && reported == boot_id => Seen::Yes(()),
            Some(ready) => Seen::not_yet(format!(
                "Ready={} ({}), taints {taints:?}, boot id {reported} (now {boot_id})",
                ready.status,
                ready.message.unwrap_or_default()
            )),
            None => Seen::not_yet("no condition Ready"),
        })
    })
    .await
}
