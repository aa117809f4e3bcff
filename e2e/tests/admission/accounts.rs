//! What Kerf's own service accounts may do, and nothing else: RBAC, and the policy `kerf-node-daemon` for what RBAC
//! cannot say.

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_crds::GpuNode;
use kerf_e2e::kerf::{Kerf, NAMESPACE};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use serde_json::{Value, json};

use super::test;

/// Account, verb, `group/resource[/subresource]`, `[namespace:]name`, and whether it may.
const RIGHTS: &[(&str, &str, &str, &str, bool)] = &[
    // The operator decides and writes decisions.
    ("operator", "watch", "/pods", "", true),
    ("operator", "patch", "/pods", "", true),
    ("operator", "patch", "/pods/status", "", true),
    ("operator", "create", "/pods/eviction", "", true),
    ("operator", "create", "resource.k8s.io/resourceclaims", "", true),
    ("operator", "update", "resource.k8s.io/resourceclaims/status", "", true),
    ("operator", "update", "resource.k8s.io/resourceclaims/binding", "", true),
    ("operator", "create", "resource.k8s.io/deviceclasses", "", true),
    ("operator", "update", "kerf.dev/gpunodes", "", true),
    ("operator", "update", "kerf.dev/partitionpolicies/status", "", true),
    ("operator", "update", "coordination.k8s.io/leases", "kerf-system:kerf-operator", true),
    ("operator", "update", "/secrets", "kerf-system:kerf-webhook-certificate", true),
    ("operator", "patch", "admissionregistration.k8s.io/mutatingwebhookconfigurations", "kerf", true),
    // It deletes no pod, binds none, and reads no secret but its own.
    ("operator", "delete", "/pods", "", false),
    ("operator", "create", "/pods", "", false),
    ("operator", "create", "/pods/binding", "", false),
    ("operator", "create", "/pods/exec", "", false),
    ("operator", "list", "/secrets", "kerf-system:", false),
    ("operator", "get", "/secrets", "kerf-system:another", false),
    ("operator", "get", "/secrets", "default:kerf-webhook-certificate", false),
    ("operator", "create", "/secrets", "default:", false),
    ("operator", "delete", "/secrets", "kerf-system:kerf-webhook-certificate", false),
    ("operator", "update", "coordination.k8s.io/leases", "kube-system:kerf-operator", false),
    ("operator", "update", "coordination.k8s.io/leases", "kerf-system:another", false),
    ("operator", "delete", "resource.k8s.io/resourceclaims", "", true),
    ("operator", "delete", "resource.k8s.io/deviceclasses", "", false),
    ("operator", "patch", "/nodes", "", false),
    ("operator", "update", "kerf.dev/partitionpolicies", "", false),
    ("operator", "update", "kerf.dev/gpunodes/status", "", false),
    ("operator", "create", "resource.k8s.io/resourceslices", "", false),
    ("operator", "patch", "admissionregistration.k8s.io/mutatingwebhookconfigurations", "another", false),
    (
        "operator",
        "patch",
        "admissionregistration.k8s.io/validatingadmissionpolicies",
        "kerf-node-daemon",
        false,
    ),
    ("operator", "create", "rbac.authorization.k8s.io/clusterrolebindings", "", false),
    // The daemon reports. It writes neither specs nor allocations, and has to do with no pod outside Kerf's namespace, where
    // those of MPS servers are.
    ("node-daemon", "create", "resource.k8s.io/resourceslices", "", true),
    ("node-daemon", "get", "resource.k8s.io/resourceclaims", "", true),
    ("node-daemon", "create", "kerf.dev/gpunodes", "", true),
    ("node-daemon", "update", "kerf.dev/gpunodes/status", "", true),
    ("node-daemon", "watch", "/nodes", "", true),
    ("node-daemon", "update", "kerf.dev/gpunodes", "", false),
    ("node-daemon", "patch", "kerf.dev/gpunodes", "", false),
    ("node-daemon", "delete", "kerf.dev/gpunodes", "", false),
    ("node-daemon", "update", "resource.k8s.io/resourceclaims/status", "", false),
    ("node-daemon", "patch", "resource.k8s.io/resourceclaims/status", "", false),
    ("node-daemon", "associated-node:update", "resource.k8s.io/resourceclaims/driver", "gpu.kerf.dev", false),
    ("node-daemon", "update", "resource.k8s.io/resourceclaims/binding", "", false),
    ("node-daemon", "list", "resource.k8s.io/resourceclaims", "", false),
    ("node-daemon", "create", "resource.k8s.io/resourceclaims", "", false),
    ("node-daemon", "list", "/pods", "", false),
    ("node-daemon", "create", "/pods", "default:", false),
    ("node-daemon", "watch", "/pods", "kerf-system:", true),
    ("node-daemon", "create", "/pods", "kerf-system:", true),
    ("node-daemon", "delete", "/pods", "kerf-system:", true),
    ("node-daemon", "patch", "/pods", "kerf-system:", false),
    ("node-daemon", "create", "/pods/exec", "kerf-system:", false),
    ("node-daemon", "get", "/podtemplates", "kerf-system:mps-server", true),
    ("node-daemon", "update", "/podtemplates", "kerf-system:mps-server", false),
    ("node-daemon", "list", "/secrets", "", false),
    ("node-daemon", "get", "/secrets", "kerf-system:kerf-webhook-certificate", false),
    ("node-daemon", "patch", "/nodes", "", false),
    ("node-daemon", "update", "kerf.dev/partitionpolicies", "", false),
];

#[test]
fn rights_are_what_is_needed_and_no_more() {
    test(async |kerf| {
        let api: Api<SubjectAccessReview> = Api::all(kerf.client());
        let mut wrong = Vec::new();
        for (account, verb, resource, object, expected) in RIGHTS {
            let mut parts = resource.split('/').map(str::to_owned);
            let (namespace, name) =
                object.split_once(':').map_or((None, *object), |(ns, name)| (Some(ns), name));
            let attributes = ResourceAttributes {
                verb: Some((*verb).to_owned()),
                group: parts.next(),
                resource: parts.next(),
                subresource: parts.next(),
                namespace: namespace.map(str::to_owned),
                name: (!name.is_empty()).then(|| name.to_owned()),
                ..ResourceAttributes::default()
            };
            let review = SubjectAccessReview {
                spec: SubjectAccessReviewSpec {
                    user: Some(format!("system:serviceaccount:{NAMESPACE}:{account}")),
                    groups: Some(vec![
                        "system:serviceaccounts".to_owned(),
                        "system:authenticated".to_owned(),
                    ]),
                    resource_attributes: Some(attributes),
                    ..SubjectAccessReviewSpec::default()
                },
                ..SubjectAccessReview::default()
            };
            let answer =
                api.create(&PostParams::default(), &review).await.context("failed to ask for a right")?;
            if answer.status.context("no answer")?.allowed != *expected {
                wrong.push(format!("{account}: {verb} {resource} {object} should be allowed: {expected}"));
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    });
}

/// The node daemon of a node, or with a token that is bound to none.
pub(super) async fn daemon(kerf: &Kerf, node: Option<&str>) -> Result<Client> {
    if let Some(node) = node {
        let nodes: Api<Node> = Api::all(kerf.client());
        if nodes.get_opt(node).await?.is_none() {
            let object = serde_json::from_value(json!({ "metadata": { "name": node } }))?;
            nodes.create(&PostParams::default(), &object).await?;
        }
    }
    let kubeconfig = kerf.cluster.kubeconfig_for_service_account(NAMESPACE, "node-daemon", node).await?;
    kerf.cluster.client_from(&kubeconfig).await
}

/// Fails unless the API server refuses with 403 and these words.
fn forbidden<T>(what: &str, outcome: std::result::Result<T, Error>, words: &str) -> Result<()> {
    match outcome {
        Ok(_) => bail!("{what} was not refused"),
        Err(Error::Api(status)) if status.code == 403 && status.message.contains(words) => Ok(()),
        Err(error) => bail!("{what} was answered without 403 and '{words}': {error}"),
    }
}

fn gpu_node(name: &str, spec: Value) -> Result<GpuNode> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": name }, "spec": spec,
    }))?)
}

fn slice(name: &str, pool: &str, driver: &str, place: Value) -> Result<ResourceSlice> {
    let mut spec = json!({
        "driver": driver,
        "pool": { "name": pool, "generation": 1, "resourceSliceCount": 1 },
        "devices": [{ "name": "gpu-0" }],
    });
    for (key, value) in place.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
    Ok(serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec }))?)
}

#[test]
fn a_daemon_writes_only_its_own_gpu_node() {
    test(async |kerf| {
        let (own, other) = ("account-own", "account-other");
        let post = PostParams::default();
        let nodes: Api<GpuNode> = Api::all(daemon(kerf, Some(own)).await?);
        daemon(kerf, Some(other)).await?;
        kerf.gpu_nodes().create(&post, &gpu_node(other, json!({}))?).await?;

        let pod = json!({ "namespace": "a", "name": "b", "uid": "c" });
        let owner = json!({ "reservation": { "pod": pod, "expires": "2030-01-01T00:00:00Z" } });
        let filled = json!({ "partitions": [{ "gpu": "GPU-0", "owner": owner }] });
        forbidden("a GpuNode with a spec", nodes.create(&post, &gpu_node(own, filled)?).await, "empty spec")?;
        let another = gpu_node("account-third", json!({}))?;
        forbidden(
            "another node's GpuNode",
            nodes.create(&post, &another).await,
            "only the objects of its own node",
        )?;
        nodes.create(&post, &gpu_node(own, json!({}))?).await.context("its own GpuNode")?;

        let patch = |value: Value| Patch::Merge(value);
        let (params, status) = (PatchParams::default(), json!({ "status": { "gpuCount": 1 } }));
        nodes.patch_status(own, &params, &patch(status.clone())).await.context("its own status")?;
        let outcome = nodes.patch_status(other, &params, &patch(status.clone())).await;
        forbidden("another node's status", outcome, "only the objects of its own node")?;
        let outcome = nodes.patch(own, &params, &patch(json!({ "spec": { "gpus": [] } }))).await;
        forbidden("its own spec", outcome, "cannot patch resource")?;
        let outcome = nodes.delete(own, &DeleteParams::default()).await;
        forbidden("deleting its own GpuNode", outcome, "cannot delete resource")?;

        // The spec cannot be smuggled in through the status.
        let both = json!({ "spec": { "gpus": [{ "uuid": "GPU-0", "policy": "p", "mig": "Keep" }] }, "status": { "gpuCount": 2 } });
        nodes.patch_status(own, &params, &patch(both)).await?;
        let stored = kerf.gpu_nodes().get(own).await?;
        ensure!(stored.spec.gpus.is_empty(), "the spec was changed through the status");

        let unbound: Api<GpuNode> = Api::all(daemon(kerf, None).await?);
        let outcome = unbound.patch_status(own, &params, &patch(status)).await;
        forbidden("a token of no node", outcome, "bound to a node")?;
        for name in [own, other] {
            kerf.gpu_nodes().delete(name, &DeleteParams::default()).await?;
        }
        Ok(())
    });
}

#[test]
fn a_daemon_writes_only_its_own_slices() {
    test(async |kerf| {
        let (own, other, driver) = ("slices-own", "slices-other", "gpu.kerf.dev");
        let post = PostParams::default();
        let slices: Api<ResourceSlice> = Api::all(daemon(kerf, Some(own)).await?);
        let others: Api<ResourceSlice> = Api::all(daemon(kerf, Some(other)).await?);
        let at = |node: &str| json!({ "nodeName": node });
        others
            .create(&post, &slice("slices-b", other, driver, at(other))?)
            .await
            .context("the other's own slice")?;
        slices.create(&post, &slice("slices-a", own, driver, at(own))?).await.context("its own slice")?;

        for (what, name, pool, driver, place, words) in [
            (
                "a slice of another node",
                "slices-c",
                other,
                driver,
                at(other),
                "only the objects of its own node",
            ),
            ("a slice of all nodes", "slices-c", own, driver, json!({ "allNodes": true }), "not of no node"),
            ("a slice of another driver", "slices-c", own, "gpu.nvidia.com", at(own), "driver gpu.kerf.dev"),
            ("a slice of another's pool", "slices-c", other, driver, at(own), "only slices of the pool"),
        ] {
            forbidden(what, slices.create(&post, &slice(name, pool, driver, place)?).await, words)?;
        }
        let renewed = Patch::Merge(json!({ "spec": { "pool": { "generation": 2 } } }));
        let outcome = slices.patch("slices-b", &PatchParams::default(), &renewed).await;
        forbidden("changing another's slice", outcome, "only the objects of its own node")?;
        let outcome = slices.delete("slices-b", &DeleteParams::default()).await;
        forbidden("deleting another's slice", outcome, "only the objects of its own node")?;
        slices
            .patch("slices-a", &PatchParams::default(), &renewed)
            .await
            .context("changing its own slice")?;
        slices.delete("slices-a", &DeleteParams::default()).await.context("deleting its own slice")?;
        others.delete("slices-b", &DeleteParams::default()).await.context("deleting the other's slice")?;
        Ok(())
    });
}

/// A pod as the daemon makes it for an MPS server.
fn mps_server(node: &str) -> Value {
    json!({
        "metadata": { "name": format!("mps-{node}"), "labels": { "app.kubernetes.io/name": "kerf-mps-server" } },
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": false,
            "containers": [{ "name": "mps", "image": "i", "env": [{ "name": "KERF_GPU", "value": "gpu-0" }] }],
            "volumes": [{ "name": "mps", "hostPath": { "path": "/run/kerf/mps" } }],
        },
    })
}

#[test]
fn a_daemon_makes_pods_of_mps_servers_on_its_own_node_and_no_others() {
    test(async |kerf| {
        let (own, other) = ("mps-own", "mps-other");
        let pods: Api<Pod> = Api::namespaced(daemon(kerf, Some(own)).await?, NAMESPACE);
        let others: Api<Pod> = Api::namespaced(daemon(kerf, Some(other)).await?, NAMESPACE);
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let pod = |value: &Value| -> Result<Pod> { Ok(serde_json::from_value(value.clone())?) };
        let labels = json!({ "app.kubernetes.io/name": "kerf-operator" });
        let secret = json!([{ "name": "s", "secret": { "secretName": "kerf-webhook-certificate" } }]);
        let variable = json!([{
            "name": "S", "valueFrom": { "secretKeyRef": { "name": "kerf-webhook-certificate", "key": "tls.key" } },
        }]);
        for (what, path, value, words) in [
            ("a pod on another node", "/spec/nodeName", json!(other), "its own node"),
            ("a pod that looks like the operator's", "/metadata/labels", labels, "pods of MPS servers"),
            ("a pod with a token", "/spec/automountServiceAccountToken", json!(true), "no service account"),
            ("a pod with a secret", "/spec/volumes", secret, "hostPath and emptyDir only"),
            ("a pod with a secret's value", "/spec/containers/0/env", variable, "from no Secret"),
        ] {
            let mut wrong = mps_server(own);
            *wrong.pointer_mut(path).context("no such field")? = value;
            forbidden(what, pods.create(&dry, &pod(&wrong)?).await, words)?;
        }
        let mut as_operator = mps_server(own);
        as_operator["spec"]["serviceAccountName"] = json!("operator");
        let outcome = pods.create(&dry, &pod(&as_operator)?).await;
        forbidden("a pod of the operator's account", outcome, "no service account")?;
        others.create(&PostParams::default(), &pod(&mps_server(other))?).await.context("the other's own")?;
        let name = format!("mps-{other}");
        let outcome = pods.delete(&name, &DeleteParams::default()).await;
        forbidden("deleting another's pod", outcome, "its own node")?;
        pods.create(&dry, &pod(&mps_server(own))?).await.context("its own")?;
        others.delete(&name, &DeleteParams::default().grace_period(0)).await.context("deleting its own")?;
        Ok(())
    });
}
