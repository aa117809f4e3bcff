//! Nodes that are played by kwok: they are Ready, renew their leases, and run what is bound to them at once.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::each;
use crate::cluster::{Cluster, ControlPlaneOptions, Program};
use crate::install::apply_yaml;
use crate::wait::{Seen, eventually};

/// Nodes and pods as kwok is to play them.
const STAGES: &str = include_str!("stages.yaml");
/// How long kwok may take with all nodes.
const PATIENCE: Duration = Duration::from_secs(180);

/// The name of a node, by number.
pub fn node_name(number: usize) -> String {
    format!("fleet-{number:04}")
}

/// The control plane's options, the same for everything that is compared.
pub fn control_plane() -> ControlPlaneOptions {
    // Nodes that are late with their lease because the machine is busy are not to be taken for dead.
    let patient = ("kube-controller-manager".to_owned(), "--node-monitor-grace-period=10m".to_owned());
    // In one file, in megabytes.
    let whole = ("kube-apiserver".to_owned(), "--audit-log-maxsize=100000".to_owned());
    ControlPlaneOptions {
        audit: true,
        audit_bodies: true,
        extra_args: vec![patient, whole],
        ..ControlPlaneOptions::default()
    }
}

/// Starts kwok on a cluster, makes so many nodes, and waits until they are Ready. `extended`: what they have besides
/// processors and memory.
///
/// # Errors
/// It does not come to that.
pub async fn start(cluster: &Cluster, count: usize, extended: &Value) -> Result<Program> {
    let client = cluster.client();
    let account = json!([
        { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "kwok", "namespace": "kube-system" } },
        { "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": "kwok" },
          "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin" },
          "subjects": [{ "kind": "ServiceAccount", "name": "kwok", "namespace": "kube-system" }] },
    ]);
    apply_yaml(&client, &json!({ "kind": "List", "items": account }).to_string()).await?;
    let kubeconfig = cluster.kubeconfig_for_service_account("kube-system", "kwok", None).await?;
    let program =
        tokio::task::spawn_blocking(|| kerf_toolchain::kwok(&|line| eprintln!("toolchain: {line}")))
            .await
            .context("the build of kwok was cancelled")??;
    let stages = cluster.dir().join("stages.yaml");
    fs::write(&stages, STAGES).with_context(|| format!("failed to write {}", stages.display()))?;
    let program = cluster.start_program("kwok", &program, |command| {
        command.arg("--kubeconfig").arg(&kubeconfig).arg("--config").arg(&stages).args([
            "--manage-all-nodes=true",
            // As kubelet's, which renews it four times as often.
            "--node-lease-duration-seconds=40",
        ]);
    })?;
    let nodes: Api<Node> = Api::all(client);
    each(0..count, |number| {
        let nodes = nodes.clone();
        let node = node(&node_name(number), extended);
        async move {
            let node = serde_json::from_value(node)?;
            nodes.create(&PostParams::default(), &node).await.context("failed to create a node")
        }
    })
    .await?;
    eventually(PATIENCE, format!("{count} nodes Ready"), || async {
        let all = nodes.list(&Default::default()).await?;
        let ready = all.iter().filter(|node| is_ready(node)).count();
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(Seen::when(ready, |ready| *ready == count))
    })
    .await?;
    Ok(program)
}

fn node(name: &str, extended: &Value) -> Value {
    let mut has = json!({ "cpu": "128", "memory": "1Ti", "pods": "110" });
    for (resource, count) in extended.as_object().into_iter().flatten() {
        has[resource] = count.clone();
    }
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "pool": "gpu" } },
        "status": { "capacity": has, "allocatable": has },
    })
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True");
    let tainted = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).count();
    ready && tainted == 0
}

/// A namespace with its default service account, without which pods are refused.
///
/// # Errors
/// The API server refuses.
pub async fn namespace(client: &Client, name: &str, managed: bool) -> Result<()> {
    let mut metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    if managed {
        let opt_in = (kerf_crds::names::NAMESPACE_OPT_IN.to_owned(), "true".to_owned());
        metadata.labels = Some([opt_in].into());
    }
    let namespace = Namespace { metadata, ..Namespace::default() };
    Api::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), name);
    eventually(PATIENCE, format!("the default service account of {name}"), || async {
        Ok(accounts.get_opt("default").await?.map_or_else(|| Seen::not_yet("none"), |_| Seen::Yes(())))
    })
    .await
}

/// A pod that asks for nothing but what is merged into its spec and its container.
pub fn pod(name: &str, spec: Value, resources: Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{ "name": "main", "image": "none", "resources": resources }],
        },
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        pod["spec"][field] = value.clone();
    }
    pod
}

/// Creates pods, some at a time, in order.
///
/// # Errors
/// The API server refuses one.
pub async fn create_pods(client: &Client, namespace: &str, pods: Vec<Value>) -> Result<Vec<Pod>> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    each(pods, |pod| {
        let api = api.clone();
        async move {
            let pod: Pod = serde_json::from_value(pod)?;
            let created = api.create(&PostParams::default(), &pod).await;
            created.with_context(|| format!("failed to create pod {}", pod.name_any()))
        }
    })
    .await
}

/// Kubeconfig files of the daemons of all nodes, in a folder of their own, named after the nodes.
///
/// # Errors
/// The API server gives no tokens.
pub async fn daemons_kubeconfigs(cluster: &Cluster, count: usize) -> Result<PathBuf> {
    let folder = cluster.dir().join("daemons");
    fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
    each(0..count, |number| {
        let folder = &folder;
        async move {
            let name = node_name(number);
            let file = cluster
                .kubeconfig_for_service_account(crate::kerf::NAMESPACE, "node-daemon", Some(&name))
                .await?;
            fs::rename(&file, folder.join(&name))
                .with_context(|| format!("failed to move {}", file.display()))
        }
    })
    .await?;
    Ok(folder)
}
