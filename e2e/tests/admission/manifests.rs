//! The shipped manifests are complete, and what their README promises can be applied.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::install::deploy_dir;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::{has_all, kubectl, test};

fn documents(yaml: &str) -> Result<Vec<Value>> {
    let parsed = serde_yaml_ng::Deserializer::from_str(yaml).map(Value::deserialize);
    parsed.collect::<Result<_, _>>().context("failed to parse YAML")
}

#[test]
fn one_command_applies_every_file() {
    test(async |kerf| {
        let listed = fs::read_to_string(deploy_dir().join("kustomization.yaml"))?;
        let mut shipped = 0;
        for folder in ["", "crds/"] {
            for entry in fs::read_dir(deploy_dir().join(folder))?.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.ends_with(".yaml") && name != "kustomization.yaml" {
                    has_all(&listed, &[&format!("- {folder}{name}\n")], &"kustomization.yaml")?;
                    shipped += documents(&fs::read_to_string(entry.path())?)?.len();
                }
            }
        }
        let deploy = deploy_dir().display().to_string();
        let rendered = kerf.cluster.kubectl(&["kustomize", &deploy]).await?;
        let rendered = documents(&rendered)?;
        ensure!(rendered.len() == shipped, "{shipped} objects in the files, {} rendered", rendered.len());
        // Not for real, and without the webhooks: in this cluster they are reached by URL, and a merge would name both.
        let (webhooks, others): (Vec<_>, Vec<_>) = rendered
            .into_iter()
            .partition(|object| object["kind"].as_str().is_some_and(|kind| kind.contains("Webhook")));
        ensure!(webhooks.len() == 2, "{} webhook configurations", webhooks.len());
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": others });
        let args = ["apply", "--server-side", "--force-conflicts", "--dry-run=server"];
        let applied = kubectl(kerf, &args, &list).await?;
        has_all(&applied, &["daemonset.apps/kerf-node-daemon", "deployment.apps/kerf-operator"], &deploy)
    });
}

#[test]
fn the_host_driver_component_changes_the_driver_root_alone() {
    test(async |kerf| {
        let folder = kerf.cluster.dir().join("host-driver");
        fs::create_dir_all(&folder)?;
        // Kustomize wants paths relative to the file.
        let up = "../".repeat(folder.components().count());
        let deploy = fs::canonicalize(deploy_dir())?.display().to_string();
        let kustomization = json!({
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "resources": [format!("{up}{deploy}")],
            "components": [format!("{up}{deploy}/components/host-driver")],
            "images": [{ "name": "kerf/node-daemon", "newName": "registry.example/kerf", "newTag": "v1" }],
        });
        fs::write(folder.join("kustomization.yaml"), kustomization.to_string())?;
        let daemon_set = |rendered: &str| -> Result<Value> {
            let all = documents(rendered)?;
            let mut found =
                all.into_iter().find(|object| object["kind"] == "DaemonSet").context("no DaemonSet")?;
            // What a patch names comes first; the order says nothing.
            for list in ["/spec/template/spec/containers/0/env", "/spec/template/spec/volumes"] {
                let list = found.pointer_mut(list).and_then(Value::as_array_mut).context("no list")?;
                list.sort_by_key(|entry| entry["name"].to_string());
            }
            Ok(found)
        };
        let shipped = daemon_set(&kerf.cluster.kubectl(&["kustomize", &deploy]).await?)?;
        let changed =
            daemon_set(&kerf.cluster.kubectl(&["kustomize", &folder.display().to_string()]).await?)?;

        let mut expected = shipped;
        let spec = &mut expected["spec"]["template"]["spec"];
        spec["containers"][0]["image"] = json!("registry.example/kerf:v1");
        for variable in spec["containers"][0]["env"].as_array_mut().into_iter().flatten() {
            if variable["name"] == "HOST_DRIVER_ROOT" || variable["name"] == "PROC_ROOT" {
                variable["value"] = json!("/");
            }
        }
        for volume in spec["volumes"].as_array_mut().into_iter().flatten() {
            if volume["name"] == "driver-root" {
                volume["hostPath"] = json!({ "path": "/", "type": "Directory" });
            }
        }
        ensure!(changed == expected, "rendered {changed}\nexpected {expected}");
        Ok(())
    });
}
