//! Kerf on a test cluster: simulated GPUs in its nodes, images of the workspace's programs, the shipped manifests, and
//! the operator as a process under its own service account.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kerf_crds::{GpuNode, PartitionPolicy};
use kerf_sim::{Driver, GpuSpec, NodeSpec, SimNode};
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::{Client, ResourceExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::cluster::{Cluster, ClusterOptions, ControlPlaneOptions, NodeOptions, Program};
use crate::images;
use crate::install::{self, Overlay};
use crate::shared;
use crate::wait::{Seen, eventually, wait_pod_phase};

/// Image with the GPU program that test pods run, and busybox.
pub const JOB: &str = "e2e.kerf.dev/job:1";
/// Kerf's namespace.
pub const NAMESPACE: &str = "kerf-system";
/// How long something may take on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What Kerf is started on.
#[derive(Clone, Debug)]
pub struct KerfOptions {
    /// Name and GPUs of each node.
    pub nodes: Vec<(String, Vec<GpuSpec>)>,
    pub control_plane: ControlPlaneOptions,
    /// Whether to start an operator.
    pub operator: bool,
    /// Whether nodes write a log of NVML calls.
    pub log_calls: bool,
    /// Branch of the nodes' driver, such as 615; `None`: the simulation's usual one.
    pub driver_branch: Option<u32>,
    /// What operators log, in the syntax of `RUST_LOG`.
    pub operator_log: String,
    /// As in [`NodeOptions::kubelet_config`], for every node.
    pub kubelet_config: serde_json::Map<String, Value>,
}

impl KerfOptions {
    /// Nodes with `count` GPUs of one model each.
    pub fn nodes(nodes: &[(&str, &str, usize)]) -> Self {
        let gpus = |model: &str, count| vec![GpuSpec::new(model); count];
        Self {
            nodes: nodes
                .iter()
                .map(|(name, model, count)| ((*name).to_owned(), gpus(model, *count)))
                .collect(),
            control_plane: ControlPlaneOptions { audit: true, ..ControlPlaneOptions::default() },
            operator: true,
            log_calls: false,
            driver_branch: None,
            operator_log: "info,kerf_operator=debug".to_owned(),
            kubelet_config: serde_json::Map::new(),
        }
    }

    /// Kubelets that start a container again at once, however often it ends, and that soon ask again for what a pod
    /// needs: a pod whose DRA driver was not registered is looked at again after one to one and a half of kubelet's sync
    /// periods, which are a minute by default.
    pub fn quick_kubelets(mut self) -> Self {
        let period = json!({ "maxContainerRestartPeriod": "1s" });
        self.kubelet_config.insert("crashLoopBackOff".to_owned(), period);
        self.kubelet_config.insert("syncFrequency".to_owned(), json!("2s"));
        self
    }
}

/// A cluster with Kerf on it.
#[derive(Debug)]
pub struct Kerf {
    pub cluster: Cluster,
    webhook_port: u16,
    debug_port: u16,
    operator_log: String,
    operators: tokio::sync::Mutex<BTreeMap<String, Program>>,
    started: AtomicU32,
}

impl Kerf {
    /// Starts the cluster, installs Kerf and waits until every node has reported its GPUs and, where there is an
    /// operator, until it admits pods.
    ///
    /// # Errors
    /// Something did not come up; the message says what.
    pub async fn start(options: KerfOptions) -> Result<Self> {
        let (log_calls, driver_branch) = (options.log_calls, options.driver_branch);
        let nodes = options.nodes.iter().map(|(name, gpus)| {
            let mut spec = NodeSpec { log_calls, ..NodeSpec::new(name, gpus.clone()) };
            if let Some(branch) = driver_branch {
                spec.driver = Driver::of_branch(branch);
            }
            let mut node = NodeOptions::new(name.clone());
            node.kubelet_config = options.kubelet_config.clone();
            node.on_boot = Some(Arc::new(move |boot| {
                let sim = if boot.first {
                    SimNode::create(&boot.driver_root, &spec)?
                } else {
                    let sim = SimNode::open(&boot.driver_root)?;
                    sim.reboot()?;
                    sim
                };
                Ok(sim.run_kernel()?)
            }));
            node
        });
        let cluster = Cluster::start(ClusterOptions {
            nodes: nodes.collect(),
            control_plane: options.control_plane.clone(),
            ..ClusterOptions::default()
        })
        .await?;
        let (webhook_port, debug_port) = (cluster.free_port()?, cluster.free_port()?);
        let kerf = Self {
            cluster,
            webhook_port,
            debug_port,
            operator_log: options.operator_log.clone(),
            operators: tokio::sync::Mutex::default(),
            started: AtomicU32::new(0),
        };
        kerf.bring_up(&options).await.inspect_err(|_| kerf.cluster.keep_logs())?;
        Ok(kerf)
    }

    async fn bring_up(&self, options: &KerfOptions) -> Result<()> {
        self.load_images().await?;
        self.install().await?;
        if options.operator {
            self.start_operator("operator").await?;
        }
        for (name, gpus) in &options.nodes {
            self.wait_reported(name, gpus.len()).await?;
        }
        if options.operator {
            self.wait_admission().await?;
        }
        Ok(())
    }

    async fn load_images(&self) -> Result<()> {
        let busybox = self.cluster.toolchain().busybox.clone();
        let images: [(&str, &[&str]); 2] = [
            (DAEMON_IMAGE, &["kerf-node-daemon", "kerf-cdi-hook"]),
            (JOB, &["kerf-sim-job", "kerf-sim-cuda"]),
        ];
        for (reference, programs) in images {
            let programs = programs.iter().map(|program| built(program)).collect::<Result<Vec<_>>>()?;
            let programs: Vec<&Path> = programs.iter().map(PathBuf::as_path).collect();
            let image = images::image_from_binaries(&busybox, reference, &programs)?;
            self.cluster.load_image(&image).await?;
        }
        Ok(())
    }

    async fn install(&self) -> Result<()> {
        let client = self.cluster.client();
        let deploy = install::deploy_dir();
        let mut overlay =
            Overlay::default().for_api_port(self.cluster.api_port()).image("kerf/node-daemon", DAEMON_IMAGE);
        // All nodes have one network.
        overlay.env.insert("METRICS_ADDRESS".to_owned(), "127.0.0.1:0".to_owned());
        install::apply_path(&client, &deploy.join("crds"), &Overlay::default()).await?;
        let mut files: Vec<PathBuf> = std::fs::read_dir(&deploy)
            .context("failed to read deploy/")?
            .flatten()
            .map(|e| e.path())
            .collect();
        files.retain(|file| {
            file.extension().is_some_and(|extension| extension == "yaml")
                && file.file_stem().is_some_and(|stem| stem != "kustomization")
        });
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file)
                .with_context(|| format!("failed to read {}", file.display()))?;
            let text = self.adapt(&text)?;
            install::apply_yaml_with(&client, &text, &overlay)
                .await
                .with_context(|| format!("failed to apply {}", file.display()))?;
        }
        Ok(())
    }

    /// The shipped manifests as this cluster can take them: without a service network the API server reaches the
    /// webhook by URL, and the operator runs beside the cluster rather than in it.
    fn adapt(&self, yaml: &str) -> Result<String> {
        let mut out = Vec::new();
        for document in serde_yaml_ng::Deserializer::from_str(yaml) {
            let mut value = Value::deserialize(document).context("failed to parse a manifest")?;
            match value["kind"].as_str() {
                Some("Deployment") => continue,
                Some("MutatingWebhookConfiguration" | "ValidatingWebhookConfiguration") => {
                    for webhook in value["webhooks"].as_array_mut().into_iter().flatten() {
                        let path = webhook
                            .pointer("/clientConfig/service/path")
                            .and_then(Value::as_str)
                            .unwrap_or("/");
                        let url = format!("https://127.0.0.1:{}{path}", self.webhook_port);
                        webhook["clientConfig"] = json!({ "url": url });
                    }
                }
                _ => {}
            }
            if !value.is_null() {
                out.push(serde_yaml_ng::to_string(&value)?);
            }
        }
        Ok(out.join("---\n"))
    }

    /// Where the first operator's last plans can be read.
    pub fn debug_port(&self) -> u16 {
        self.debug_port
    }

    /// Starts an operator under its service account. The first has the webhook's port, others one of their own.
    ///
    /// # Errors
    /// One of that name runs already, or it cannot be started.
    pub async fn start_operator(&self, name: &str) -> Result<()> {
        self.start_operator_through(name, None).await
    }

    /// [`Self::start_operator`], with another address for the API server.
    ///
    /// # Errors
    /// As there.
    pub async fn start_operator_through(&self, name: &str, server: Option<&str>) -> Result<()> {
        let mut operators = self.operators.lock().await;
        if operators.contains_key(name) {
            bail!("the operator {name} runs already");
        }
        let (port, debug_port) = match operators.is_empty() {
            true => (self.webhook_port, self.debug_port),
            false => (self.cluster.free_port()?, self.cluster.free_port()?),
        };
        let mut kubeconfig = self.cluster.kubeconfig_for_service_account(NAMESPACE, "operator", None).await?;
        if let Some(server) = server {
            kubeconfig = kubeconfig_with_server(&kubeconfig, server)?;
        }
        let count = self.started.fetch_add(1, Ordering::Relaxed);
        let program = self.cluster.start_program(name, &built("kerf-operator")?, |command| {
            command
                .env("KUBECONFIG", &kubeconfig)
                .env("POD_NAMESPACE", NAMESPACE)
                .env("POD_NAME", format!("{name}-{count}"))
                .env("WEBHOOK_ADDRESS", format!("127.0.0.1:{port}"))
                .env("WEBHOOK_NAMES", "127.0.0.1")
                .env("DEBUG_PORT", debug_port.to_string())
                .env("RUST_LOG", &self.operator_log)
                .env("RUST_BACKTRACE", "1");
        })?;
        operators.insert(name.to_owned(), program);
        Ok(())
    }

    /// Ends an operator: with no grace, by SIGKILL.
    ///
    /// # Errors
    /// None of that name runs.
    pub async fn stop_operator(&self, name: &str, grace: Duration) -> Result<()> {
        let program = self.operators.lock().await.remove(name);
        program.with_context(|| format!("no operator {name} runs"))?.stop(grace).await?;
        Ok(())
    }

    /// Fails if an operator that was started has ended by itself.
    ///
    /// # Errors
    /// See above; the message has the end of its log.
    pub async fn check_operators(&self) -> Result<()> {
        for program in self.operators.lock().await.values_mut() {
            program.check()?;
        }
        Ok(())
    }

    /// The operators' process ids in the host's numbering.
    pub async fn operator_pid(&self, name: &str) -> Option<u32> {
        self.operators.lock().await.get(name).and_then(Program::pid)
    }

    pub fn client(&self) -> Client {
        self.cluster.client()
    }

    /// The simulated driver of a node.
    ///
    /// # Errors
    /// The node has none.
    pub fn sim(&self, node: &str) -> Result<SimNode> {
        Ok(SimNode::open(&self.cluster.node(node).driver_root())?)
    }

    /// A new namespace whose pods Kerf handles.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        let labels = BTreeMap::from([(kerf_crds::names::NAMESPACE_OPT_IN.to_owned(), "true".to_owned())]);
        let metadata = ObjectMeta {
            generate_name: Some(format!("{prefix}-")),
            labels: Some(labels),
            ..ObjectMeta::default()
        };
        let api: Api<Namespace> = Api::all(self.client());
        let namespace = api
            .create(&PostParams::default(), &Namespace { metadata, ..Namespace::default() })
            .await
            .context("failed to create a namespace")?;
        let name = namespace.name_any();
        // Pods are refused until the default service account is there.
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> = Api::namespaced(self.client(), &name);
        eventually(PATIENCE, format!("the default service account of {name}"), || async {
            Ok(accounts.get_opt("default").await?.map_or_else(|| Seen::not_yet("none"), |_| Seen::Yes(())))
        })
        .await?;
        Ok(name)
    }

    /// Creates or replaces a policy.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn policy(&self, name: &str, spec: Value) -> Result<PartitionPolicy> {
        let yaml = json!({
            "apiVersion": "kerf.dev/v1alpha1", "kind": "PartitionPolicy", "metadata": { "name": name }, "spec": spec,
        });
        install::apply_yaml(&self.client(), &yaml.to_string()).await?;
        Ok(Api::<PartitionPolicy>::all(self.client()).get(name).await?)
    }

    /// Deletes a policy.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn delete_policy(&self, name: &str) -> Result<()> {
        Api::<PartitionPolicy>::all(self.client()).delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    pub fn gpu_nodes(&self) -> Api<GpuNode> {
        Api::all(self.client())
    }

    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client(), namespace)
    }

    /// Waits until the node's daemon has reported so many GPUs and is ready.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn wait_reported(&self, node: &str, gpus: usize) -> Result<()> {
        let api = self.gpu_nodes();
        eventually(PATIENCE, format!("GpuNode {node} reporting {gpus} GPUs"), || async {
            let Some(found) = api.get_opt(node).await? else { return Ok(Seen::not_yet("no GpuNode")) };
            let status = found.status.unwrap_or_default();
            let ready = status.conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True");
            if status.gpus.len() == gpus && ready {
                return Ok(Seen::Yes(()));
            }
            Ok(Seen::NotYet(format!("{} GPUs, conditions {:?}", status.gpus.len(), status.conditions)))
        })
        .await
    }

    /// Waits until the API server reaches the webhook for pods and for policies.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn wait_admission(&self) -> Result<()> {
        let namespace = self.namespace("admission").await?;
        let pods = self.pods(&namespace);
        let pod = gpu_pod("probe", &[("nvidia.com/mig-none", 1)]);
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let policies: Api<PartitionPolicy> = Api::all(self.client());
        let policy = PartitionPolicy::new("probe", kerf_crds::PartitionPolicySpec::default());
        let outcome = eventually(PATIENCE, "the webhook answering", || async {
            self.check_operators().await?;
            policies.create(&dry_run, &policy).await?;
            match pods.create(&dry_run, &pod).await {
                Ok(pod) if is_gated(&pod) => Ok(Seen::Yes(())),
                Ok(_) => Ok(Seen::not_yet("the pod was left as it is")),
                Err(error) => Ok(Seen::not_yet(error)),
            }
        })
        .await;
        Api::<Namespace>::all(self.client()).delete(&namespace, &DeleteParams::default()).await?;
        outcome
    }

    /// Creates a pod.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn create_pod(&self, namespace: &str, pod: &Pod) -> Result<Pod> {
        let created = self.pods(namespace).create(&PostParams::default(), pod).await;
        created.with_context(|| format!("failed to create pod {namespace}/{}", pod.name_any()))
    }

    /// Waits until a pod runs and its GPU program has reported, and checks that what it runs on is what was planned and
    /// what its environment says.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn wait_running(&self, namespace: &str, pod: &str) -> Result<Running> {
        let pod = wait_pod_phase(&self.client(), namespace, pod, "Running", PATIENCE).await?;
        self.inspect(&pod).await
    }

    /// What a running pod's first container runs on, checked against `GpuNode.spec` and the hardware.
    ///
    /// # Errors
    /// It is something else.
    pub async fn inspect(&self, pod: &Pod) -> Result<Running> {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let node =
            pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("the pod is not bound")?;
        let report: JobReport =
            eventually(PATIENCE, format!("the report of pod {namespace}/{name}"), || async {
                let text = self.pods(&namespace).logs(&name, &Default::default()).await?;
                let line = text.lines().find(|line| line.starts_with('{'));
                Ok(line.map_or_else(
                    || Seen::not_yet(&text),
                    |line| serde_json::from_str(line).map_or_else(Seen::not_yet, Seen::Yes),
                ))
            })
            .await?;
        let sim = self.sim(&node)?;
        let instances = sim.instances()?;
        let found = self.gpu_nodes().get(&node).await?;
        let uid = pod.uid().unwrap_or_default();
        let mut planned: Vec<(String, String, u32)> = Vec::new();
        for partition in &found.spec.partitions {
            if let (Some(instance), kerf_crds::gpu_node::Owner::Claim(owner)) =
                (&partition.instance, &partition.owner)
                && owner.pod_uid == uid
            {
                planned.push((partition.gpu.clone(), instance.profile.clone(), instance.placement.start));
            }
        }
        planned.sort();
        let mut devices = Vec::new();
        for device in &report.mig_devices {
            let instance =
                instances.iter().find(|i| i.gpu_minor == device.gpu && i.gi == device.gi).with_context(
                    || format!("pod {namespace}/{name} runs on {device:?}, which does not exist"),
                )?;
            let uuid = instance.compute.iter().find(|(id, _)| *id == device.ci).map(|(_, uuid)| uuid.clone());
            devices.push(RunningDevice {
                gpu: instance.gpu_uuid.clone(),
                profile: instance.profile.clone(),
                start: instance.start,
                size: instance.size,
                uuid: uuid.unwrap_or_default(),
                nth: instance.nth,
            });
        }
        devices.sort();
        let actual: Vec<_> = devices.iter().map(|d| (d.gpu.clone(), d.profile.clone(), d.start)).collect();
        if actual != planned && report.whole_gpus.is_empty() && pod_containers(pod) == 1 {
            bail!("pod {namespace}/{name} runs on {actual:?}, but GpuNode {node} plans {planned:?}");
        }
        Ok(Running { pod: name, node, devices, whole_gpus: report.whole_gpus.clone(), report })
    }

    /// Deletes a pod and waits until it is gone.
    ///
    /// # Errors
    /// It does not go.
    pub async fn delete_pod(&self, namespace: &str, name: &str) -> Result<()> {
        let api = self.pods(namespace);
        api.delete(name, &DeleteParams::default()).await?;
        eventually(PATIENCE, format!("pod {namespace}/{name} gone"), || async {
            Ok(api
                .get_opt(name)
                .await?
                .map_or(Seen::Yes(()), |pod| Seen::not_yet(crate::wait::describe(&pod))))
        })
        .await
    }

    /// Waits until nothing of any claim is left: no claim owned by a pod of the namespace, no entry for one in any
    /// `GpuNode.spec`, nothing prepared in any status, no CDI file.
    ///
    /// # Errors
    /// Something is left; the message says what.
    pub async fn wait_no_leak(&self, namespace: &str) -> Result<()> {
        let claims: Api<k8s_openapi::api::resource::v1::ResourceClaim> =
            Api::namespaced(self.client(), namespace);
        eventually(PATIENCE, format!("nothing left of namespace {namespace}"), || async {
            let mut left: Vec<String> = Vec::new();
            for claim in claims.list(&Default::default()).await? {
                if claim.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "Pod") {
                    left.push(format!("claim {}", claim.name_any()));
                }
            }
            for node in self.gpu_nodes().list(&Default::default()).await? {
                for partition in &node.spec.partitions {
                    if let kerf_crds::gpu_node::Owner::Claim(owner) = &partition.owner
                        && owner.namespace == namespace
                    {
                        left.push(format!("an entry in GpuNode {} for {}", node.name_any(), owner.pod));
                    }
                }
                for gpu in node.status.iter().flat_map(|status| &status.gpus) {
                    let of_instances = gpu.instances.iter().flat_map(|instance| &instance.claims);
                    let of_shares = gpu.shares.iter().flat_map(|share| &share.claims);
                    let all = gpu.claims.iter().chain(of_instances).chain(of_shares);
                    for claim in all.filter(|claim| claim.namespace == namespace) {
                        left.push(format!("{} prepared on {}", claim.name, node.name_any()));
                    }
                }
            }
            for node in self.cluster.nodes() {
                let cdi = node.host_path("/var/run/cdi")?;
                for entry in std::fs::read_dir(&cdi).into_iter().flatten().flatten() {
                    let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                    if text.contains(&format!("{namespace}/")) {
                        left.push(format!("{} on {}", entry.path().display(), node.name()));
                    }
                }
            }
            if left.is_empty() { Ok(Seen::Yes(())) } else { Ok(Seen::NotYet(left.join(", "))) }
        })
        .await
    }

    /// What the node's daemon answers to Prometheus.
    ///
    /// # Errors
    /// It does not say where its metrics are, or does not answer there.
    pub async fn scrape(&self, node: &str) -> Result<String> {
        let of = ListParams::default()
            .labels("app.kubernetes.io/name=kerf-node-daemon")
            .fields(&format!("spec.nodeName={node},status.phase=Running"));
        let daemons = self.pods(NAMESPACE);
        let daemon = daemons.list(&of).await?.items.pop().with_context(|| format!("no daemon on {node}"))?;
        let log = daemons.logs(&daemon.name_any(), &Default::default()).await?;
        let line = log.lines().rfind(|line| line.contains("metrics are at /metrics"));
        let port =
            line.and_then(|line| line.split("127.0.0.1:").nth(1)).map(str::trim).context(log.clone())?;
        let mut stream = tokio::net::TcpStream::connect(format!("127.0.0.1:{port}")).await?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
        anyhow::ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
        Ok(body.to_owned())
    }

    /// Kerf's condition on a pod: status, reason, message.
    ///
    /// # Errors
    /// The pod cannot be read.
    pub async fn planned(&self, namespace: &str, pod: &str) -> Result<Option<(String, String, String)>> {
        let pod = self.pods(namespace).get(pod).await?;
        let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        let ours = conditions.into_iter().find(|c| c.type_ == kerf_crds::conditions::pod::PLANNED);
        Ok(ours.map(|c| (c.status, c.reason.unwrap_or_default(), c.message.unwrap_or_default())))
    }

    /// Waits until Kerf's condition on a pod has that reason, and returns its message.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn wait_reason(&self, namespace: &str, pod: &str, reason: &str) -> Result<String> {
        eventually(PATIENCE, format!("pod {namespace}/{pod} saying {reason}"), || async {
            Ok(match self.planned(namespace, pod).await? {
                Some((_, found, message)) if found == reason => Seen::Yes(message),
                other => Seen::NotYet(format!("{other:?}")),
            })
        })
        .await
    }

    /// Waits until Kerf says of a pod that there is no place for it, and returns the sentence. Which of the two reasons it is
    /// depends on whether GPUs of other nodes have room, so on what other tests do.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn wait_no_place(&self, namespace: &str, pod: &str) -> Result<String> {
        eventually(PATIENCE, format!("pod {namespace}/{pod} told that there is no place"), || async {
            Ok(match self.planned(namespace, pod).await? {
                Some((_, reason, message)) if reason == "NoRoom" || reason == "NodesDoNotFit" => {
                    Seen::Yes(message)
                }
                other => Seen::NotYet(format!("{other:?}")),
            })
        })
        .await
    }

    /// Waits until a policy's condition has that status and reason, and returns its message.
    ///
    /// # Errors
    /// It does not come to that.
    pub async fn wait_policy(&self, policy: &str, kind: &str, status: &str, reason: &str) -> Result<String> {
        let api: Api<PartitionPolicy> = Api::all(self.client());
        eventually(PATIENCE, format!("policy {policy}: {kind}={status} {reason}"), || async {
            let found = api.get(policy).await?;
            let generation = found.metadata.generation;
            let now = found.status.unwrap_or_default();
            let current = now.observed_generation == generation;
            let hit =
                now.conditions.iter().find(|c| c.type_ == kind && c.status == status && c.reason == reason);
            Ok(match hit {
                Some(condition) if current => Seen::Yes(condition.message.clone()),
                _ => Seen::NotYet(format!(
                    "observed {:?} of {generation:?}, {:?}",
                    now.observed_generation, now.conditions
                )),
            })
        })
        .await
    }
}

/// A copy of a kubeconfig file with another address for the API server.
fn kubeconfig_with_server(file: &Path, server: &str) -> Result<PathBuf> {
    let text = std::fs::read_to_string(file).with_context(|| format!("failed to read {}", file.display()))?;
    let mut config: Value = serde_yaml_ng::from_str(&text).with_context(|| format!("{}", file.display()))?;
    for cluster in config["clusters"].as_array_mut().into_iter().flatten() {
        cluster["cluster"] = json!({ "server": server });
    }
    let copy = file.with_extension("proxied");
    std::fs::write(&copy, config.to_string())
        .with_context(|| format!("failed to write {}", copy.display()))?;
    Ok(copy)
}

const DAEMON_IMAGE: &str = "kerf/node-daemon:e2e";

/// A program of the workspace, beside the running one or in the folder above it (a test's executable is in `deps/`).
///
/// # Errors
/// It was not built.
pub fn built(program: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find the running program")?;
    let mut places = own.ancestors().skip(1).take(3).map(|dir| dir.join(program));
    places
        .find(|path| path.is_file())
        .with_context(|| format!("{program} was not built; run `cargo build --workspace --bins` first"))
}

/// What a pod runs on, seen from inside and outside.
#[derive(Clone, Debug)]
pub struct Running {
    pub pod: String,
    pub node: String,
    /// In order of GPU, profile and place.
    pub devices: Vec<RunningDevice>,
    /// Minors.
    pub whole_gpus: Vec<u32>,
    pub report: JobReport,
}

/// A MIG device that a pod runs on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningDevice {
    /// UUID.
    pub gpu: String,
    pub profile: String,
    pub start: u32,
    pub size: u32,
    /// UUID of the MIG device.
    pub uuid: String,
    /// The how-manieth creation on its GPU made it: another number is another instance, whatever its UUID.
    pub nth: u64,
}

/// The line that `kerf-sim-job` prints.
#[derive(Clone, Debug, Deserialize)]
pub struct JobReport {
    pub mig_devices: Vec<MigDevice>,
    pub whole_gpus: Vec<u32>,
    pub nodes: Vec<String>,
    pub nvidia_visible_devices: Option<String>,
}

/// Device minor, GPU instance and compute instance.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct MigDevice {
    pub gpu: u32,
    pub gi: u32,
    pub ci: u32,
}

fn pod_containers(pod: &Pod) -> usize {
    pod.spec.as_ref().map_or(0, |spec| spec.containers.len())
}

fn is_gated(pod: &Pod) -> bool {
    pod.spec
        .iter()
        .flat_map(|spec| spec.scheduling_gates.iter().flatten())
        .any(|gate| gate.name == kerf_crds::names::GATE)
}

/// A container that runs the GPU program.
pub fn gpu_container(name: &str, resources: &[(&str, u32)], args: &[&str]) -> Value {
    let limits: serde_json::Map<String, Value> =
        resources.iter().map(|(name, count)| ((*name).to_owned(), json!(count.to_string()))).collect();
    json!({
        "name": name, "image": JOB, "imagePullPolicy": "Never",
        "command": ["/usr/local/bin/kerf-sim-job"], "args": args,
        "resources": { "limits": limits },
    })
}

/// A pod of one container that uses GPUs until it is deleted.
///
/// # Panics
/// Never: the JSON is a pod's.
pub fn gpu_pod(name: &str, resources: &[(&str, u32)]) -> Pod {
    pod_of(name, vec![gpu_container("main", resources, &[])])
}

/// A pod of these containers.
///
/// # Panics
/// The containers are no containers: a mistake in the test.
pub fn pod_of(name: &str, containers: Vec<Value>) -> Pod {
    serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "containers": containers, "terminationGracePeriodSeconds": 1, "restartPolicy": "Never" },
    }))
    .unwrap_or_else(|error| panic!("not a pod: {error}"))
}

/// `nvidia.com/mig-<profile>`.
pub fn mig(profile: &str) -> String {
    kerf_crds::profile::resource_name(profile)
}

/// The path of a file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Runs a test with a cluster of its own, whose logs stay if it fails.
pub fn alone<F, Fut>(options: KerfOptions, test: F)
where
    F: FnOnce(Arc<Kerf>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    shared::run(async move {
        let kerf = Arc::new(Kerf::start(options).await?);
        test(Arc::clone(&kerf)).await.inspect_err(|_| kerf.cluster.keep_logs())
    });
}

/// Keeps a pod to one node.
pub fn on(node: &str, mut pod: Pod) -> Pod {
    if let Some(spec) = &mut pod.spec {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
    }
    pod
}

/// A policy's spec for one node.
pub fn for_node(node: &str, mig: Value) -> Value {
    json!({ "nodeSelector": { "matchLabels": { "kubernetes.io/hostname": node } }, "mig": mig })
}

/// Checks that no slice is in two pods.
///
/// # Errors
/// Names the two that overlap.
pub fn no_overlap(pods: &[Running]) -> Result<()> {
    let all: Vec<_> =
        pods.iter().flat_map(|pod| pod.devices.iter().map(move |device| (&pod.pod, device))).collect();
    for (i, (a_pod, a)) in all.iter().enumerate() {
        for (b_pod, b) in &all[i + 1..] {
            if a.gpu == b.gpu && a.start < b.start + b.size && b.start < a.start + a.size {
                bail!("{a_pod} on {a:?} and {b_pod} on {b:?} overlap");
            }
        }
    }
    Ok(())
}
