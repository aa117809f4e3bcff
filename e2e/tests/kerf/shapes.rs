//! The shapes that pods come in, and the ways in which they go.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::kerf::{JobReport, Kerf, PATIENCE, for_node, gpu_container, gpu_pod, mig, on, pod_of};
use kerf_e2e::{Seen, eventually, wait_pod_phase};
use kube::api::{Api, DeleteParams, LogParams, PostParams};
use serde_json::{Value, json};

use crate::shared::test;

const NODE: &str = "shapes-a";

/// What a container's program saw.
async fn report(kerf: &Kerf, namespace: &str, pod: &str, container: &str) -> Result<JobReport> {
    let params = LogParams { container: Some(container.to_owned()), ..LogParams::default() };
    let pods = kerf.pods(namespace);
    eventually(PATIENCE, format!("the report of {pod}/{container}"), || async {
        let text = pods.logs(pod, &params).await?;
        let line = text.lines().find(|line| line.starts_with('{'));
        Ok(line.map_or_else(
            || Seen::not_yet(&text),
            |line| serde_json::from_str(line).map_or_else(Seen::not_yet, Seen::Yes),
        ))
    })
    .await
}

/// The devices of a container, as something to compare.
async fn devices(
    kerf: &Kerf,
    namespace: &str,
    pod: &str,
    container: &str,
) -> Result<BTreeSet<(u32, u32, u32)>> {
    let report = report(kerf, namespace, pod, container).await?;
    Ok(report.mig_devices.iter().map(|device| (device.gpu, device.gi, device.ci)).collect())
}

fn with_init(mut pod: Pod, init: Vec<Value>) -> Result<Pod> {
    if let Some(spec) = &mut pod.spec {
        spec.init_containers = Some(serde_json::from_value(json!(init))?);
    }
    Ok(pod)
}

#[test]
fn pods_of_every_shape_get_what_each_container_asked_for() {
    test("shapes", |kerf, namespace| async move {
        let mut spec = for_node(NODE, json!({ "mode": "Dynamic" }));
        spec["wholeGpus"] = json!("Serve");
        kerf.policy(NODE, spec).await?;
        several_containers(kerf, &namespace).await?;
        init_containers_and_sidecars(kerf, &namespace).await?;
        whole_gpu_beside_mig(kerf, &namespace).await?;
        controllers(kerf, &namespace).await?;
        users_own_claim(kerf, &namespace).await?;
        all_gpus(kerf, &namespace).await?;
        shared_claim(kerf, &namespace).await?;
        apply_twice(kerf, &namespace).await?;
        quota(kerf).await?;
        deletion(kerf, &namespace).await?;
        force_delete(kerf, &namespace).await?;
        kerf.delete_policy(NODE).await
    });
}

async fn several_containers(kerf: &Kerf, namespace: &str) -> Result<()> {
    let pod = pod_of(
        "several",
        vec![
            gpu_container("a", &[(&mig("1g.10gb"), 1)], &[]),
            gpu_container("b", &[(&mig("1g.10gb"), 1), (&mig("2g.20gb"), 1)], &[]),
            gpu_container("none", &[], &["--allow-none"]),
        ],
    );
    kerf.create_pod(namespace, &on(NODE, pod)).await?;
    wait_pod_phase(&kerf.client(), namespace, "several", "Running", PATIENCE).await?;
    let a = devices(kerf, namespace, "several", "a").await?;
    let b = devices(kerf, namespace, "several", "b").await?;
    ensure!(a.len() == 1 && b.len() == 2 && a.is_disjoint(&b), "a has {a:?}, b has {b:?}");
    let none = report(kerf, namespace, "several", "none").await?;
    ensure!(none.nodes.is_empty(), "a container that asked for nothing sees {:?}", none.nodes);
    kerf.delete_pod(namespace, "several").await
}

async fn init_containers_and_sidecars(kerf: &Kerf, namespace: &str) -> Result<()> {
    let mut sidecar = gpu_container("side", &[(&mig("1g.10gb"), 1)], &[]);
    sidecar["restartPolicy"] = json!("Always");
    let init = gpu_container("init", &[(&mig("1g.10gb"), 1)], &["--seconds", "0.1"]);
    let pod = pod_of("inits", vec![gpu_container("main", &[(&mig("1g.10gb"), 1)], &[])]);
    kerf.create_pod(namespace, &with_init(on(NODE, pod), vec![sidecar, init])?).await?;
    wait_pod_phase(&kerf.client(), namespace, "inits", "Running", PATIENCE).await?;
    let main = devices(kerf, namespace, "inits", "main").await?;
    let side = devices(kerf, namespace, "inits", "side").await?;
    let init = devices(kerf, namespace, "inits", "init").await?;
    ensure!(main.len() == 1 && side.len() == 1 && main.is_disjoint(&side), "main {main:?}, sidecar {side:?}");
    ensure!(init == main, "the init container had {init:?}, not what the app container reuses: {main:?}");
    kerf.delete_pod(namespace, "inits").await
}

async fn whole_gpu_beside_mig(kerf: &Kerf, namespace: &str) -> Result<()> {
    kerf.create_pod(namespace, &on(NODE, gpu_pod("slice", &[(&mig("3g.40gb"), 1)]))).await?;
    let slice = kerf.wait_running(namespace, "slice").await?;
    kerf.create_pod(namespace, &on(NODE, gpu_pod("whole", &[("nvidia.com/gpu", 1)]))).await?;
    let whole = kerf.wait_running(namespace, "whole").await?;
    ensure!(whole.whole_gpus.len() == 1 && whole.devices.is_empty(), "{whole:?}");
    let of_slice: Vec<u32> = slice.report.mig_devices.iter().map(|device| device.gpu).collect();
    ensure!(!of_slice.contains(&whole.whole_gpus[0]), "the whole GPU is the one with the slice");
    kerf.delete_pod(namespace, "whole").await?;
    kerf.delete_pod(namespace, "slice").await
}

async fn controllers(kerf: &Kerf, namespace: &str) -> Result<()> {
    let template = |name: &str| {
        json!({
            "metadata": { "labels": { "app": name } },
            "spec": {
                "terminationGracePeriodSeconds": 1, "nodeSelector": { "kubernetes.io/hostname": NODE },
                "containers": [gpu_container("main", &[(&mig("1g.20gb"), 1)], &[])],
            },
        })
    };
    let meta = |name: &str| json!({ "name": name, "namespace": namespace });
    let selector = |name: &str| json!({ "matchLabels": { "app": name } });
    let deployment = json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta("deploy"),
        "spec": { "replicas": 2, "selector": selector("deploy"), "template": template("deploy") } });
    let stateful = json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta("stateful"),
        "spec": { "replicas": 2, "serviceName": "none", "selector": selector("stateful"), "template": template("stateful") } });
    for object in [&deployment, &stateful] {
        apply_yaml(&kerf.client(), &object.to_string()).await?;
    }
    for (kind, name) in [("deployment", "deploy"), ("statefulset", "stateful")] {
        kerf.cluster
            .kubectl(&["-n", namespace, "rollout", "status", kind, name, "--timeout=120s"])
            .await
            .with_context(|| format!("{kind} {name} did not become ready"))?;
    }
    let pods = kerf.pods(namespace).list(&Default::default()).await?;
    ensure!(pods.items.len() == 4, "{} pods for 4 replicas: somebody fights", pods.items.len());
    for (kind, name) in [("deployment", "deploy"), ("statefulset", "stateful")] {
        kerf.cluster.kubectl(&["-n", namespace, "delete", kind, name, "--cascade=foreground"]).await?;
    }
    kerf.wait_no_leak(namespace).await
}

/// A pod that uses a claim of its user.
fn claiming(name: &str, claim: &str) -> Result<Pod> {
    let mut container = gpu_container("main", &[], &[]);
    container["resources"] = json!({ "claims": [{ "name": "gpus" }] });
    let mut pod = on(NODE, pod_of(name, vec![container]));
    if let Some(spec) = &mut pod.spec {
        spec.resource_claims =
            Some(serde_json::from_value(json!([{ "name": "gpus", "resourceClaimName": claim }]))?);
    }
    Ok(pod)
}

/// A claim written by hand: any profile of at least 30 GiB, two on the same GPU.
async fn users_own_claim(kerf: &Kerf, namespace: &str) -> Result<()> {
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": "by-need", "namespace": namespace },
        "spec": { "devices": {
            "requests": [{ "name": "pair", "exactly": {
                "deviceClassName": "mig.kerf.dev", "allocationMode": "ExactCount", "count": 2,
                "selectors": [{ "cel": { "expression":
                    "device.capacity['gpu.kerf.dev'].memory.compareTo(quantity('30Gi')) >= 0 && device.attributes['gpu.kerf.dev'].productName.startsWith('NVIDIA H100')"
                } }],
            } }],
            "constraints": [{ "requests": ["pair"], "matchAttribute": "gpu.kerf.dev/parentUUID" }],
        } },
    });
    apply_yaml(&kerf.client(), &claim.to_string()).await?;
    let mut pod = claiming("claimed", "by-need")?;
    kerf.create_pod(namespace, &pod).await?;
    let running = kerf.wait_running(namespace, "claimed").await?;
    ensure!(running.devices.len() == 2, "{:?}", running.devices);
    ensure!(running.devices[0].gpu == running.devices[1].gpu, "not on the same GPU: {:?}", running.devices);
    ensure!(running.devices.iter().all(|device| device.size >= 4), "too small: {:?}", running.devices);
    kerf.delete_pod(namespace, "claimed").await?;
    // The claim is the user's: it stays, and serves the next pod.
    let claims: Api<ResourceClaim> = Api::namespaced(kerf.client(), namespace);
    eventually(PATIENCE, "the claim free again", || async {
        let status = claims.get("by-need").await?.status.unwrap_or_default();
        Ok(Seen::when(status, |status| status.allocation.is_none() && status.reserved_for.is_none()))
    })
    .await?;
    if let Some(name) = &mut pod.metadata.name {
        *name = "claimed-again".to_owned();
    }
    kerf.create_pod(namespace, &pod).await?;
    kerf.wait_running(namespace, "claimed-again").await?;
    kerf.delete_pod(namespace, "claimed-again").await?;
    claims.delete("by-need", &DeleteParams::default()).await?;
    Ok(())
}

/// A claim for all GPUs of a node: none of them may be another's, and afterwards all are its own.
async fn all_gpus(kerf: &Kerf, namespace: &str) -> Result<()> {
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": "all", "namespace": namespace },
        "spec": { "devices": { "requests": [
            { "name": "gpus", "exactly": { "deviceClassName": "gpu.kerf.dev", "allocationMode": "All" } },
        ] } },
    });
    apply_yaml(&kerf.client(), &claim.to_string()).await?;
    kerf.create_pod(namespace, &on(NODE, gpu_pod("in-the-way", &[(&mig("1g.10gb"), 1)]))).await?;
    kerf.wait_running(namespace, "in-the-way").await?;
    kerf.create_pod(namespace, &claiming("all", "all")?).await?;
    kerf.wait_reason(namespace, "all", "NoRoom").await?;
    kerf.delete_pod(namespace, "in-the-way").await?;
    let running = kerf.wait_running(namespace, "all").await?;
    ensure!(running.whole_gpus.len() == 4, "all of 4 GPUs are {:?}", running.whole_gpus);
    kerf.delete_pod(namespace, "all").await?;
    let claims: Api<ResourceClaim> = Api::namespaced(kerf.client(), namespace);
    claims.delete("all", &DeleteParams::default()).await?;
    Ok(())
}

/// Two pods share a claim. The one that it was planned for ends while the other is bound and not yet prepared, as it
/// waits for a volume.
async fn shared_claim(kerf: &Kerf, namespace: &str) -> Result<()> {
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": "shared", "namespace": namespace },
        "spec": { "devices": { "requests": [
            { "name": "one", "exactly": { "deviceClassName": "mig-1g.10gb.kerf.dev" } },
        ] } },
    });
    apply_yaml(&kerf.client(), &claim.to_string()).await?;
    kerf.create_pod(namespace, &claiming("sharing-first", "shared")?).await?;
    kerf.wait_running(namespace, "sharing-first").await?;
    let of_first = devices(kerf, namespace, "sharing-first", "main").await?;
    let mut second = claiming("sharing-second", "shared")?;
    if let Some(spec) = &mut second.spec {
        let volume = json!([{ "name": "late", "configMap": { "name": "late" } }]);
        spec.volumes = Some(serde_json::from_value(volume)?);
        let mount = json!([{ "name": "late", "mountPath": "/late" }]);
        spec.containers[0].volume_mounts = Some(serde_json::from_value(mount)?);
    }
    kerf.create_pod(namespace, &second).await?;
    let claims: Api<ResourceClaim> = Api::namespaced(kerf.client(), namespace);
    let reserved_for = |pods: &'static [&'static str]| {
        let claims = &claims;
        eventually(PATIENCE, format!("the claim reserved for {pods:?}"), move || async move {
            let reserved = claims.get("shared").await?.status.unwrap_or_default().reserved_for;
            let names: Vec<String> = reserved.unwrap_or_default().into_iter().map(|pod| pod.name).collect();
            Ok(Seen::when(names, |names| names == pods))
        })
    };
    reserved_for(&["sharing-first", "sharing-second"]).await?;
    kerf.delete_pod(namespace, "sharing-first").await?;
    reserved_for(&["sharing-second"]).await?;
    eventually(PATIENCE, "the claim out of use", || async {
        let gpus = kerf.gpu_nodes().get(NODE).await?.status.unwrap_or_default().gpus;
        let held = gpus.iter().flat_map(|gpu| &gpu.instances).any(|instance| instance.in_use());
        Ok(if held { Seen::not_yet("an instance is in use") } else { Seen::Yes(()) })
    })
    .await?;
    let late = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "late", "namespace": namespace } });
    apply_yaml(&kerf.client(), &late.to_string()).await?;
    wait_pod_phase(&kerf.client(), namespace, "sharing-second", "Running", PATIENCE).await?;
    let of_second = devices(kerf, namespace, "sharing-second", "main").await?;
    ensure!(of_first == of_second, "the first had {of_first:?}, the second {of_second:?}");
    kerf.delete_pod(namespace, "sharing-second").await?;
    claims.delete("shared", &DeleteParams::default()).await?;
    kerf.wait_no_leak(namespace).await
}

async fn apply_twice(kerf: &Kerf, namespace: &str) -> Result<()> {
    let mut pod = serde_json::to_value(on(NODE, gpu_pod("twice", &[(&mig("1g.10gb"), 1)])))?;
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    let file = kerf.cluster.dir().join(format!("{namespace}.json"));
    std::fs::write(&file, pod.to_string())?;
    let file = file.display().to_string();
    for _ in 0..2 {
        kerf.cluster.kubectl(&["-n", namespace, "apply", "-f", &file]).await.context("kubectl apply")?;
        kerf.wait_running(namespace, "twice").await?;
    }
    kerf.cluster
        .kubectl(&["-n", namespace, "apply", "--server-side", "--force-conflicts", "-f", &file])
        .await?;
    kerf.delete_pod(namespace, "twice").await
}

/// A ResourceQuota on a profile's name counts, and its refusal reaches the pod.
async fn quota(kerf: &Kerf) -> Result<()> {
    let namespace = &kerf.namespace("quota").await?;
    let resource = format!("requests.{}", mig("1g.10gb"));
    let quota = json!({ "apiVersion": "v1", "kind": "ResourceQuota", "metadata": { "name": "one", "namespace": namespace },
        "spec": { "hard": { resource: "1" } } });
    apply_yaml(&kerf.client(), &quota.to_string()).await?;
    let quotas: Api<k8s_openapi::api::core::v1::ResourceQuota> = Api::namespaced(kerf.client(), namespace);
    eventually(PATIENCE, "the quota being counted", || async {
        let status = quotas.get("one").await?.status.unwrap_or_default();
        Ok(Seen::when(status, |status| status.used.is_some()))
    })
    .await?;
    for name in ["first", "second"] {
        kerf.create_pod(namespace, &on(NODE, gpu_pod(name, &[(&mig("1g.10gb"), 1)]))).await?;
        if name == "first" {
            kerf.wait_running(namespace, name).await?;
        }
    }
    let why = kerf.wait_reason(namespace, "second", "QuotaExceeded").await?;
    ensure!(why.contains("exceeded quota"), "{why}");
    kerf.delete_pod(namespace, "first").await?;
    kerf.wait_running(namespace, "second").await?;
    kerf.cluster.kubectl(&["delete", "namespace", namespace, "--timeout=100s"]).await?;
    kerf.wait_no_leak(namespace).await
}

/// Deleted before the plan, while instances are made, while it starts, while it runs, and with its namespace.
async fn deletion(kerf: &Kerf, namespace: &str) -> Result<()> {
    for (index, pause) in [0_u64, 5, 20, 50, 100, 200, 400, 800].into_iter().enumerate() {
        let name = format!("gone-{index}");
        kerf.create_pod(namespace, &on(NODE, gpu_pod(&name, &[(&mig("2g.20gb"), 1)]))).await?;
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
        kerf.delete_pod(namespace, &name).await?;
    }
    kerf.wait_no_leak(namespace).await?;
    let other = kerf.namespace("gone").await?;
    for name in ["a", "b"] {
        kerf.create_pod(&other, &on(NODE, gpu_pod(name, &[(&mig("3g.40gb"), 1)]))).await?;
    }
    kerf.wait_running(&other, "a").await?;
    kerf.cluster.kubectl(&["delete", "namespace", &other, "--timeout=100s"]).await?;
    kerf.wait_no_leak(&other).await
}

/// The API server forgets a force-deleted pod at once; its process lives on for a while, and so does its slice.
async fn force_delete(kerf: &Kerf, namespace: &str) -> Result<()> {
    let mut pod =
        pod_of("stubborn", vec![gpu_container("main", &[(&mig("7g.80gb"), 1)], &["--ignore-sigterm"])]);
    if let Some(spec) = &mut pod.spec {
        spec.termination_grace_period_seconds = Some(3);
    }
    // As many as the node has GPUs, so that the next one has to wait for this one's slices.
    for index in 1..4 {
        let name = format!("filler-{index}");
        kerf.create_pod(namespace, &on(NODE, gpu_pod(&name, &[(&mig("7g.80gb"), 1)]))).await?;
        kerf.wait_running(namespace, &name).await?;
    }
    kerf.create_pod(namespace, &on(NODE, pod)).await?;
    let first = kerf.wait_running(namespace, "stubborn").await?;
    let next = on(NODE, gpu_pod("next", &[(&mig("7g.80gb"), 1)]));
    kerf.create_pod(namespace, &next).await?;
    kerf.wait_no_place(namespace, "next").await?;
    kerf.pods(namespace).delete("stubborn", &DeleteParams::default().grace_period(0)).await?;
    let sim = kerf.sim(NODE)?;
    let second = eventually(PATIENCE, "the next pod on the freed slices", || async {
        let pod = kerf.pods(namespace).get("next").await?;
        let running = pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        // The old process, while it lives, must be alone on its instance.
        let old_lives = sim.clients()?.len();
        if running { Ok(Seen::Yes(pod)) } else { Ok(Seen::NotYet(format!("{old_lives} clients"))) }
    })
    .await?;
    let second = kerf.inspect(&second).await?;
    ensure!(second.devices[0].uuid == first.devices[0].uuid || second.devices.len() == 1, "{second:?}");
    for name in ["next", "filler-1", "filler-2", "filler-3"] {
        kerf.delete_pod(namespace, name).await?;
    }
    kerf.wait_no_leak(namespace).await
}

#[test]
fn what_cannot_be_served_is_refused_with_a_clear_answer() {
    test("refused", |kerf, namespace| async move {
        let pods = kerf.pods(&namespace);
        let mut bound = gpu_pod("bound", &[(&mig("1g.10gb"), 1)]);
        if let Some(spec) = &mut bound.spec {
            spec.node_name = Some(NODE.to_owned());
        }
        let error = pods
            .create(&PostParams::default(), &bound)
            .await
            .err()
            .context("a pod with nodeName was admitted")?;
        ensure!(error.to_string().contains("nodeName"), "{error}");
        let many = gpu_pod("many", &[(&mig("1g.10gb"), 33)]);
        let error =
            pods.create(&PostParams::default(), &many).await.err().context("33 devices were admitted")?;
        ensure!(error.to_string().contains("32"), "{error}");
        kerf.create_pod(&namespace, &gpu_pod("unknown", &[(&mig("9g.99gb"), 1)])).await?;
        let why = kerf.wait_reason(&namespace, "unknown", "NoSuchProfile").await?;
        ensure!(why.contains("9g.99gb"), "{why}");
        Ok(())
    });
}
