//! Pods that ask for GPUs, as people create them: with kubectl, from manifests and from controllers.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kerf_crds::names;
use kerf_e2e::kerf::Kerf;
use kerf_e2e::{Seen, eventually};
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{has_all, kubectl, refused, test};

fn pod(namespace: &str, name: &str, limits: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": namespace },
        "spec": { "containers": [{ "name": "main", "image": "example/gpu:1", "resources": { "limits": limits } }] },
    })
}

fn mig_pod(namespace: &str, name: &str) -> Value {
    pod(namespace, name, json!({ "nvidia.com/mig-1g.10gb": 1, "cpu": "100m" }))
}

async fn stored(kerf: &Kerf, namespace: &str, name: &str) -> Result<Value> {
    Ok(serde_json::to_value(kerf.pods(namespace).get(name).await?)?)
}

fn is_gated(pod: &Value) -> bool {
    let gates = pod["spec"]["schedulingGates"].as_array();
    gates.into_iter().flatten().any(|gate| gate["name"] == names::GATE)
}

fn claim_name(pod: &Value) -> Result<String> {
    let entries = pod["spec"]["resourceClaims"].as_array();
    let entry = entries.into_iter().flatten().find(|entry| entry["name"] == names::POD_CLAIM);
    Ok(entry.and_then(|entry| entry["resourceClaimName"].as_str()).context("no claim of Kerf's")?.to_owned())
}

async fn remove(kerf: &Kerf, namespace: &str) -> Result<()> {
    Api::<Namespace>::all(kerf.client()).delete(namespace, &DeleteParams::default()).await?;
    Ok(())
}

#[test]
fn apply_twice_is_no_change_and_other_gpus_are_refused() {
    test(async |kerf| {
        let namespace = kerf.namespace("apply").await?;
        for (name, args) in [("client", &["apply"][..]), ("server", &["apply", "--server-side"][..])] {
            let manifest = mig_pod(&namespace, name);
            kubectl(kerf, args, &manifest).await.context("the first apply")?;
            let first = stored(kerf, &namespace, name).await?;
            ensure!(is_gated(&first), "not gated: {first}");
            let resources = &first["spec"]["containers"][0]["resources"];
            ensure!(resources["limits"] == json!({ "cpu": "100m" }), "limits left: {resources}");
            ensure!(resources["claims"] == json!([{ "name": "kerf", "request": "device-0" }]), "{resources}");

            kubectl(kerf, args, &manifest).await.context("the second apply")?;
            let second = stored(kerf, &namespace, name).await?;
            ensure!(
                second["spec"] == first["spec"],
                "the second apply changed {} to {}",
                first["spec"],
                second["spec"]
            );
            let difference = kubectl(kerf, &["diff"], &manifest).await.context("kubectl diff")?;
            ensure!(difference.is_empty(), "kubectl diff: {difference}");

            // What may change in a pod still may.
            let mut newer = manifest.clone();
            newer["spec"]["containers"][0]["image"] = json!("example/gpu:2");
            kubectl(kerf, args, &newer).await.context("an apply with another image")?;
            let third = stored(kerf, &namespace, name).await?;
            ensure!(third["spec"]["containers"][0]["image"] == "example/gpu:2", "the image stayed");

            newer["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] = json!(2);
            let said = refused(kerf, args, &newer).await?;
            has_all(
                &said,
                &[
                    "spec.containers[0].resources.limits[nvidia.com/mig-1g.10gb]",
                    "has 1 of it, not 2",
                    "delete the pod",
                ],
                &newer,
            )?;
        }
        remove(kerf, &namespace).await
    });
}

#[test]
fn a_dry_run_answers_the_same_and_makes_nothing() {
    test(async |kerf| {
        let namespace = kerf.namespace("dry").await?;
        let answer =
            kubectl(kerf, &["create", "--dry-run=server", "-o", "json"], &mig_pod(&namespace, "a")).await?;
        ensure!(is_gated(&serde_json::from_str(&answer)?), "not gated: {answer}");
        ensure!(kerf.pods(&namespace).get_opt("a").await?.is_none(), "a pod was made");
        remove(kerf, &namespace).await
    });
}

#[test]
fn a_copy_of_a_pod_gets_a_claim_of_its_own() {
    test(async |kerf| {
        let namespace = kerf.namespace("copy").await?;
        kubectl(kerf, &["create"], &mig_pod(&namespace, "a")).await?;
        let first = stored(kerf, &namespace, "a").await?;
        let mut copy = json!({ "apiVersion": "v1", "kind": "Pod", "spec": first["spec"] });
        copy["metadata"] =
            json!({ "name": "b", "namespace": namespace, "annotations": first["metadata"]["annotations"] });
        kubectl(kerf, &["create"], &copy).await?;
        let second = stored(kerf, &namespace, "b").await?;
        ensure!(claim_name(&first)? != claim_name(&second)?, "both have the claim {}", claim_name(&first)?);
        remove(kerf, &namespace).await
    });
}

#[test]
fn who_has_not_opted_in_or_has_opted_out_is_left_alone() {
    test(async |kerf| {
        let unmanaged = "admission-unmanaged";
        let metadata = ObjectMeta { name: Some(unmanaged.to_owned()), ..ObjectMeta::default() };
        let object = Namespace { metadata, ..Namespace::default() };
        Api::<Namespace>::all(kerf.client()).create(&PostParams::default(), &object).await?;
        let managed = kerf.namespace("optout").await?;
        let mut ignored = mig_pod(&managed, "a");
        ignored["metadata"]["labels"] = json!({ names::POD_OPT_OUT: "true" });
        // The service account of a new namespace comes a moment later.
        eventually(Duration::from_secs(30), "a pod in the unmanaged namespace", || async {
            let outcome = kubectl(kerf, &["create"], &mig_pod(unmanaged, "a")).await;
            Ok(outcome.map_or_else(Seen::not_yet, |_| Seen::Yes(())))
        })
        .await?;
        kubectl(kerf, &["create"], &ignored).await?;
        // No policy serves whole GPUs.
        kubectl(kerf, &["create"], &pod(&managed, "b", json!({ "nvidia.com/gpu": 1 }))).await?;
        kubectl(kerf, &["create"], &pod(&managed, "c", json!({ "cpu": 1 }))).await?;
        for (namespace, name) in [(unmanaged, "a"), (&managed, "a"), (&managed, "b"), (&managed, "c")] {
            let pod = stored(kerf, namespace, name).await?;
            ensure!(!is_gated(&pod) && pod["spec"]["resourceClaims"].is_null(), "{namespace}/{name}: {pod}");
        }
        remove(kerf, unmanaged).await?;
        remove(kerf, &managed).await
    });
}

#[test]
fn what_can_never_run_is_refused_with_the_remedy() {
    test(async |kerf| {
        let namespace = kerf.namespace("refused").await?;
        let edited = |edit: &dyn Fn(&mut Value)| {
            let mut pod = mig_pod(&namespace, "bad");
            edit(&mut pod["spec"]);
            pod
        };
        let limit = |count: &str| pod(&namespace, "bad", json!({ "nvidia.com/mig-1g.10gb": count }));
        let field = "spec.containers[0].resources.limits[nvidia.com/mig-1g.10gb]";
        let cases: Vec<(Value, Vec<&str>)> = vec![
            (limit("500m"), vec![field, "not a whole number"]),
            (limit("-1"), vec![field, "negative"]),
            (limit("33"), vec![field, "at most 32"]),
            (
                edited(&|spec| spec["nodeName"] = json!("node-a")),
                vec!["spec.nodeName", "kubernetes.io/hostname: node-a"],
            ),
            (
                edited(&|spec| {
                    spec["resourceClaims"] = json!([{ "name": "kerf", "resourceClaimName": "mine" }])
                }),
                vec!["spec.resourceClaims[0].name", "another name"],
            ),
            (
                edited(&|spec| {
                    let resources = &mut spec["containers"][0]["resources"];
                    resources["requests"] = json!({ "nvidia.com/mig-1g.10gb": 2 });
                }),
                vec![
                    "spec.containers[0].resources.requests[nvidia.com/mig-1g.10gb]",
                    "cannot be overcommitted",
                ],
            ),
            (
                edited(&|spec| {
                    spec["containers"][0]["resources"] =
                        json!({ "requests": { "nvidia.com/mig-1g.10gb": 1 } });
                }),
                vec!["spec.containers[0].resources.requests[nvidia.com/mig-1g.10gb]", "needs a limit"],
            ),
        ];
        for (pod, parts) in cases {
            let said = refused(kerf, &["create"], &pod).await?;
            has_all(&said, &parts, &pod)?;
        }
        // An ephemeral container gets no device, also of a pod that has some: the API server says so.
        kubectl(kerf, &["create"], &mig_pod(&namespace, "good")).await?;
        let debugged = json!({ "spec": { "ephemeralContainers": [{
            "name": "debug", "image": "example/gpu:1",
            "resources": { "limits": { "nvidia.com/mig-1g.10gb": "1" } },
        }] } });
        let pods: Api<Pod> = kerf.pods(&namespace);
        let outcome = pods
            .patch_ephemeral_containers("good", &PatchParams::default(), &Patch::Strategic(debugged))
            .await;
        match outcome {
            Ok(_) => bail!("an ephemeral container got a GPU"),
            Err(error) => {
                has_all(&error.to_string(), &["ephemeralContainers[0].resources", "Forbidden"], &"it")?
            }
        }
        remove(kerf, &namespace).await
    });
}

#[test]
fn controllers_keep_their_templates_and_make_no_extra_pods() {
    test(async |kerf| {
        let namespace = kerf.namespace("deployment").await?;
        let labels = json!({ "app": "web" });
        let manifest = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "web", "namespace": namespace },
            "spec": {
                "replicas": 2,
                "selector": { "matchLabels": labels },
                "template": { "metadata": { "labels": labels }, "spec": mig_pod(&namespace, "x")["spec"] },
            },
        });
        kubectl(kerf, &["apply"], &manifest).await?;
        kubectl(kerf, &["apply"], &manifest).await?;
        let pods: Api<Pod> = kerf.pods(&namespace);
        let two = || async {
            let pods = pods.list(&ListParams::default()).await?.items;
            let count = pods.len();
            Ok(if count == 2 { Seen::Yes(pods) } else { Seen::NotYet(format!("{count} pods")) })
        };
        let made = eventually(Duration::from_secs(60), "two pods", two).await?;
        let mut claims = Vec::new();
        for pod in &made {
            let pod = serde_json::to_value(pod)?;
            ensure!(is_gated(&pod), "not gated: {pod}");
            claims.push(claim_name(&pod)?);
        }
        ensure!(claims[0] != claims[1] && claims[0].starts_with("web-"), "{claims:?}");
        let deployments: Api<Deployment> = Api::namespaced(kerf.client(), &namespace);
        let settled = eventually(Duration::from_secs(60), "the Deployment seeing its pods", || async {
            let deployment = deployments.get("web").await?;
            let replicas = deployment.status.as_ref().and_then(|status| status.replicas);
            Ok(if replicas == Some(2) {
                Seen::Yes(deployment)
            } else {
                Seen::NotYet(format!("{replicas:?}"))
            })
        })
        .await?;
        ensure!(settled.metadata.generation == Some(1), "generation {:?}", settled.metadata.generation);
        let now = eventually(Duration::from_secs(10), "still two pods", two).await?;
        let names = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
        ensure!(names(&now) == names(&made), "pods were replaced");
        remove(kerf, &namespace).await
    });
}
