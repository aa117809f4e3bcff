//! The test cluster itself: what later tests rely on.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kerf_e2e::images::{BOX, image_from_binaries};
use kerf_e2e::install::{Overlay, apply_yaml};
use kerf_e2e::shared::Shared;
use kerf_e2e::{Cluster, ClusterOptions, Seen, audit, eventually, wait_pod_phase};
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};

/// Two nodes, with an audit log.
static SHARED: Shared = Shared::new(|| {
    let mut options = ClusterOptions::default();
    options.control_plane.audit = true;
    options
});

const MINUTE: Duration = Duration::from_secs(60);

/// Creates a pod on a node. `spec` is merged into the pod's, whose one container runs a shell command.
async fn create_pod(
    client: &Client,
    namespace: &str,
    name: &str,
    node: &str,
    command: &str,
    spec: Value,
) -> Result<Pod> {
    let mut pod = json!({
        "metadata": { "name": name },
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": BOX,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", command],
            }],
        },
    });
    json_merge(&mut pod["spec"], spec);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    Ok(pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
}

fn json_merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                json_merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) if into.len() == from.len() => {
            into.iter_mut().zip(from).for_each(|(into, from)| json_merge(into, from));
        }
        (into, from) => *into = from,
    }
}

#[test]
fn a_pod_runs_on_each_node_with_logs_and_exec() {
    SHARED.test("pods", async |cluster, namespace| {
        for node in cluster.nodes() {
            let name = format!("on-{}", node.name());
            let command = "echo hello from $(hostname); exec sleep infinity";
            create_pod(&cluster.client(), &namespace, &name, node.name(), command, json!({})).await?;
            wait_pod_phase(&cluster.client(), &namespace, &name, "Running", MINUTE).await?;
            let logs = eventually(MINUTE, "the pod's log", || async {
                Ok(Seen::when(cluster.kubectl(&["logs", "-n", &namespace, &name]).await?, |log| {
                    !log.is_empty()
                }))
            })
            .await?;
            ensure!(logs == format!("hello from {name}\n"), "kubectl logs shows {logs:?}");
            let out =
                cluster.kubectl(&["exec", "-n", &namespace, &name, "--", "cat", "/proc/1/comm"]).await?;
            ensure!(out == "sleep\n", "kubectl exec shows {out:?}");
        }
        Ok(())
    });
}

#[test]
fn standard_paths_are_each_nodes_own() {
    SHARED.test("paths", async |cluster, namespace| {
        let paths = [
            "/var/lib/kubelet",
            "/run/kerf",
            "/var/lib/kerf",
            "/var/run/cdi",
            "/etc/cdi",
            "/run/nvidia/driver",
            "/var/log/pods",
        ];
        let touch: Vec<String> = paths.iter().map(|path| format!("touch {path}/mark-$NODE")).collect();
        let volumes: Vec<Value> = (0..)
            .zip(paths)
            .map(|(index, path)| {
                json!({
                    "name": format!("v{index}"), "hostPath": { "path": path, "type": "DirectoryOrCreate" },
                })
            })
            .collect();
        let mounts: Vec<Value> = (0..)
            .zip(paths)
            .map(|(index, path)| json!({ "name": format!("v{index}"), "mountPath": path }))
            .collect();
        for node in cluster.nodes() {
            let spec = json!({
                "volumes": volumes,
                "containers": [{
                    "volumeMounts": mounts,
                    "env": [{ "name": "NODE", "value": format!("{namespace}-{}", node.name()) }],
                }],
            });
            create_pod(&cluster.client(), &namespace, node.name(), node.name(), &touch.join(" && "), spec)
                .await?;
        }
        for node in cluster.nodes() {
            wait_pod_phase(&cluster.client(), &namespace, node.name(), "Succeeded", MINUTE).await?;
        }
        for node in cluster.nodes() {
            for path in paths {
                for other in cluster.nodes() {
                    let mark = format!("{path}/mark-{namespace}-{}", other.name());
                    let there = node.host_path(&mark)?.exists();
                    ensure!(there == (node.name() == other.name()), "{mark} on {}: {there}", node.name());
                    ensure!(!std::path::Path::new(&mark).exists(), "{mark} is on the host");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn bidirectional_mounts_reach_the_node_and_other_pods() {
    SHARED.test("mounts", async |cluster, namespace| {
        let client = cluster.client();
        let volume = |propagation: &str| {
            json!({
                "hostPID": true,
                "volumes": [{ "name": "v", "hostPath": {
                    "path": "/var/lib/kerf/shared", "type": "DirectoryOrCreate",
                } }],
                "containers": [{
                    "securityContext": { "privileged": true },
                    "volumeMounts": [{ "name": "v", "mountPath": "/shared", "mountPropagation": propagation }],
                }],
            })
        };
        let watch = "until [ -e /shared/sub/inside ]; do sleep 0.1; done";
        create_pod(&client, &namespace, "reader", "node-a", watch, volume("HostToContainer")).await?;
        wait_pod_phase(&client, &namespace, "reader", "Running", MINUTE).await?;
        let mount = "mkdir -p /shared/sub && mount -t tmpfs none /shared/sub && touch /shared/sub/inside && sleep 60";
        create_pod(&client, &namespace, "writer", "node-a", mount, volume("Bidirectional")).await?;
        wait_pod_phase(&client, &namespace, "reader", "Succeeded", MINUTE).await?;
        let node = cluster.node("node-a");
        let seen = node.exec("ls", &["/var/lib/kerf/shared/sub"]).await?;
        ensure!(seen.stdout == b"inside\n", "the node sees {seen:?}");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        ensure!(!mounts.contains(&cluster.dir().display().to_string()), "a mount came out to the host: {mounts}");
        node.exec("umount", &["/var/lib/kerf/shared/sub"]).await?;
        Ok(())
    });
}

#[test]
fn binaries_of_this_machine_run_as_pods() {
    SHARED.test("images", async |cluster, namespace| {
        let tree = std::path::Path::new("/usr/bin/env");
        let image = image_from_binaries(&cluster.toolchain().busybox, "e2e.kerf.dev/self-test:1", &[tree])?;
        cluster.load_image(&image).await?;
        let spec = json!({ "containers": [{
            "image": image.reference(),
            "command": ["/usr/local/bin/env", "--version"],
        }] });
        for node in cluster.nodes() {
            create_pod(&cluster.client(), &namespace, node.name(), node.name(), "", spec.clone()).await?;
            wait_pod_phase(&cluster.client(), &namespace, node.name(), "Succeeded", MINUTE).await?;
        }
        Ok(())
    });
}

/// As Kerf's own pods do: on the host's network, with the overlay that installs them.
#[test]
fn a_host_network_pod_reaches_the_api_server_as_its_service_account() {
    SHARED.test("in-cluster", async |cluster, namespace| {
        let kubectl = cluster.toolchain().kubectl.clone();
        let image = image_from_binaries(&cluster.toolchain().busybox, "e2e.kerf.dev/kubectl:1", &[&kubectl])?;
        cluster.load_image(&image).await?;
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": "client", "namespace": namespace },
            "spec": {
                "nodeName": "node-b",
                "hostNetwork": true,
                "restartPolicy": "Never",
                "containers": [{
                    "name": "main", "image": "registry.example/kubectl:v1", "args": ["auth", "whoami", "-o", "json"],
                }],
            },
        });
        let overlay = Overlay::default()
            .for_api_port(cluster.api_port())
            .image("registry.example/kubectl", image.reference());
        overlay.edit(&mut pod);
        apply_yaml(&cluster.client(), &pod.to_string()).await?;
        wait_pod_phase(&cluster.client(), &namespace, "client", "Succeeded", MINUTE).await?;
        let me: Value = serde_json::from_str(&cluster.kubectl(&["logs", "-n", &namespace, "client"]).await?)?;
        let info = &me["status"]["userInfo"];
        ensure!(info["username"] == format!("system:serviceaccount:{namespace}:default"), "{info}");
        ensure!(info["extra"]["authentication.kubernetes.io/node-name"][0] == "node-b", "{info}");
        Ok(())
    });
}

/// A connection to the pod is enough: its answer is not TLS, so the request is refused.
#[test]
fn the_api_server_reaches_a_webhook_behind_a_service() {
    SHARED.test("webhook", async |cluster, namespace| {
        let client = cluster.client();
        let command = "nc -l -p 8443 -e true";
        create_pod(&client, &namespace, "hook", "node-a", command, json!({})).await?;
        cluster.kubectl(&["label", "pod", "-n", &namespace, "hook", "app=hook"]).await?;
        let rules = json!([{
            "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["CREATE"],
        }]);
        let service = json!({ "namespace": namespace, "name": "hook", "path": "/" });
        let only_here = json!({ "matchLabels": { "kubernetes.io/metadata.name": namespace } });
        for object in [
            json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "hook", "namespace": namespace },
                "spec": { "selector": { "app": "hook" }, "ports": [{ "port": 443, "targetPort": 8443 }] } }),
            json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
                "metadata": { "name": namespace },
                "webhooks": [{ "name": "hook.e2e.kerf.dev", "clientConfig": { "service": service }, "rules": rules,
                    "namespaceSelector": only_here, "failurePolicy": "Fail", "sideEffects": "None",
                    "timeoutSeconds": 5, "admissionReviewVersions": ["v1"] }] }),
        ] {
            apply_yaml(&client, &object.to_string()).await?;
        }
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m", "namespace": namespace } });
        let reached = eventually(MINUTE, "the webhook's pod being reached", || async {
            let refused = apply_yaml(&client, &map.to_string()).await;
            ensure!(refused.is_err(), "the API server did without the webhook");
            let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            let phase = pods.get("hook").await?.status.and_then(|status| status.phase).unwrap_or_default();
            Ok(if phase == "Succeeded" { Seen::Yes(()) } else { Seen::not_yet(format!("{phase}, {refused:?}")) })
        })
        .await;
        cluster.kubectl(&["delete", "validatingwebhookconfiguration", &namespace]).await?;
        reached
    });
}

#[test]
fn a_service_accounts_kubeconfig_has_its_rights_only_and_its_node() {
    SHARED.test("accounts", async |cluster, namespace| {
        let account = json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "limited", "namespace": namespace },
        });
        apply_yaml(&cluster.client(), &account.to_string()).await?;
        for node in [None, Some("node-a")] {
            let kubeconfig = cluster.kubeconfig_for_service_account(&namespace, "limited", node).await?;
            let kubeconfig = kubeconfig.to_str().context("the path is not UTF-8")?;
            let me = cluster.kubectl(&["--kubeconfig", kubeconfig, "auth", "whoami", "-o", "json"]).await?;
            let me: Value = serde_json::from_str(&me)?;
            let info = &me["status"]["userInfo"];
            ensure!(info["username"] == format!("system:serviceaccount:{namespace}:limited"), "{info}");
            let bound = &info["extra"]["authentication.kubernetes.io/node-name"][0];
            ensure!(bound.as_str() == node, "bound to {bound}, not {node:?}");
            let denied = cluster.kubectl(&["--kubeconfig", kubeconfig, "get", "nodes"]).await;
            ensure!(denied.is_err_and(|error| error.to_string().contains("Forbidden")), "nodes can be read");
        }
        Ok(())
    });
}

#[test]
fn the_audit_log_counts_writes_by_user_and_resource() {
    SHARED.test("audit", async |cluster, namespace| {
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": {
            "name": "counted", "namespace": namespace,
        } });
        for _ in 0..3 {
            apply_yaml(&cluster.client(), &map.to_string()).await?;
        }
        let mut writes = cluster.audit()?;
        writes.retain(|write| write.namespace == namespace && write.name == "counted");
        let counts = audit::count(&writes);
        ensure!(counts["admin"]["patch configmaps"] == 3, "{counts:?}");
        Ok(())
    });
}

#[test]
fn crds_and_their_objects_apply_in_one_go() {
    SHARED.test("apply", async |cluster, namespace| {
        let yaml = format!(
            r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {{ name: things.{namespace}.e2e.kerf.dev }}
spec:
  group: {namespace}.e2e.kerf.dev
  scope: Namespaced
  names: {{ kind: Thing, plural: things }}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {{ openAPIV3Schema: {{ type: object, x-kubernetes-preserve-unknown-fields: true }} }}
---
apiVersion: {namespace}.e2e.kerf.dev/v1
kind: Thing
metadata: {{ name: one, namespace: {namespace} }}
"#
        );
        let applied = apply_yaml(&cluster.client(), &yaml).await?;
        ensure!(applied.len() == 2, "{applied:?}");
        cluster.kubectl(&["delete", "crd", &format!("things.{namespace}.e2e.kerf.dev")]).await?;
        Ok(())
    });
}

/// Pods, controllers and the node come back after a reboot, and outages of the control plane pass. On a cluster of its
/// own, since all of that disturbs the neighbours.
#[test]
fn a_node_reboots_and_the_control_plane_restarts() {
    kerf_e2e::shared::runtime().block_on(async {
        let cluster = Cluster::start(one_node()).await.unwrap();
        reboot(&cluster).await.unwrap();
        restarts(&cluster).await.unwrap();
        cluster.end().unwrap();
    });
}

fn one_node() -> kerf_e2e::ClusterOptions {
    kerf_e2e::ClusterOptions { nodes: vec![kerf_e2e::NodeOptions::new("solo")], ..Default::default() }
}

async fn reboot(cluster: &Cluster) -> Result<()> {
    let client = cluster.client();
    let nodes: Api<Node> = Api::all(client.clone());
    let boot_id = async || {
        let status = nodes.get("solo").await?.status.and_then(|status| status.node_info);
        anyhow::Ok(status.map(|info| info.boot_id).unwrap_or_default())
    };
    let before = boot_id().await?;
    let spec = json!({ "restartPolicy": "Always" });
    create_pod(&client, "default", "survivor", "solo", "exec sleep infinity", spec).await?;
    wait_pod_phase(&client, "default", "survivor", "Running", MINUTE).await?;
    let node = cluster.node("solo");
    std::fs::write(node.host_path("/run/kerf/volatile")?, "")?;
    std::fs::write(node.host_path("/var/lib/kerf/durable")?, "")?;

    node.reboot().await?;
    cluster.wait_node_ready("solo").await?;
    ensure!(boot_id().await? != before, "the boot id is the old one");
    ensure!(!node.host_path("/run/kerf/volatile")?.exists(), "/run outlived the reboot");
    ensure!(node.host_path("/var/lib/kerf/durable")?.exists(), "/var/lib did not outlive the reboot");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    eventually(MINUTE, "the pod's container running again", || async {
        let status = pods.get("survivor").await?.status.unwrap_or_default();
        let containers = status.container_statuses.unwrap_or_default();
        let running = |count: &i32| *count == 1 && containers.iter().all(|container| container.ready);
        Ok(Seen::when(containers.iter().map(|container| container.restart_count).sum(), running))
    })
    .await?;
    pods.delete("survivor", &DeleteParams::default()).await?;
    Ok(())
}

async fn restarts(cluster: &Cluster) -> Result<()> {
    let client = cluster.client();
    cluster.stop_apiserver().await?;
    ensure!(client.apiserver_version().await.is_err(), "the API server is still there");
    cluster.start_apiserver().await?;
    cluster.restart_scheduler().await?;
    let node = cluster.node("solo");
    node.stop_kubelet().await?;
    node.restart_containerd().await?;
    let unbound = json!({ "nodeName": null });
    create_pod(&client, "default", "late", "", "true", unbound).await?;
    node.start_kubelet().await?;
    wait_pod_phase(&client, "default", "late", "Succeeded", MINUTE).await?;
    let added = cluster.add_node(kerf_e2e::NodeOptions::new("second")).await?;
    create_pod(&client, "default", "on-second", added.name(), "true", json!({})).await?;
    wait_pod_phase(&client, "default", "on-second", "Succeeded", MINUTE).await?;
    Ok(())
}
