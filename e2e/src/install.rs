//! Applies manifests, as shipped but for what a test cluster has to change in them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::discovery::{ApiResource, Scope, pinned_kind};
use kube::{Client, Error};
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::wait::{Seen, eventually};

/// The manager of the fields that the harness applies.
const FIELD_MANAGER: &str = "kerf-e2e";
/// How long a kind may take to be served after its CustomResourceDefinition was applied.
const NEW_KIND: Duration = Duration::from_secs(20);

/// The folder of the manifests that ship.
pub fn deploy_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// What a test cluster changes in shipped manifests.
#[derive(Clone, Debug, Default)]
pub struct Overlay {
    /// Set in every container of pods on the host's network, replacing a variable of that name.
    pub env: BTreeMap<String, String>,
    /// Appended to the arguments of the container of that name.
    pub args: BTreeMap<String, Vec<String>>,
    /// Image references replaced, by the one in the manifest without its tag.
    pub images: BTreeMap<String, String>,
}

impl Overlay {
    /// Leads pods on the host's network to the API server at this port of loopback. Others reach it as everywhere.
    #[must_use]
    pub fn for_api_port(mut self, port: u16) -> Self {
        self.env.insert("KUBERNETES_SERVICE_HOST".to_owned(), "127.0.0.1".to_owned());
        self.env.insert("KUBERNETES_SERVICE_PORT".to_owned(), port.to_string());
        self
    }

    /// Uses `image` wherever the manifests name `repository`.
    #[must_use]
    pub fn image(mut self, repository: &str, image: &str) -> Self {
        self.images.insert(repository.to_owned(), image.to_owned());
        self
    }

    /// Changes one object. Objects without a pod template stay as they are.
    pub fn edit(&self, object: &mut Value) {
        let template = match object["kind"].as_str() {
            Some("Pod") => "/spec",
            Some("PodTemplate") => "/template/spec",
            Some("DaemonSet" | "Deployment" | "StatefulSet" | "Job" | "ReplicaSet") => "/spec/template/spec",
            Some("CronJob") => "/spec/jobTemplate/spec/template/spec",
            _ => return,
        };
        let Some(spec) = object.pointer_mut(template) else { return };
        let on_host = spec["hostNetwork"] == true;
        for list in ["initContainers", "containers"] {
            for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                self.edit_container(container, on_host);
            }
        }
    }

    fn edit_container(&self, container: &mut Value, on_host: bool) {
        let image = container["image"].as_str().unwrap_or_default();
        if let Some(replacement) = self.images.get(repository(image)) {
            container["image"] = json!(replacement);
            container["imagePullPolicy"] = json!("Never");
        }
        if let Some(args) = container["name"].as_str().and_then(|name| self.args.get(name)) {
            let all = container["args"].as_array().into_iter().flatten().cloned();
            container["args"] = all.chain(args.iter().map(|arg| json!(arg))).collect();
        }
        if on_host && !self.env.is_empty() {
            let kept = container["env"].as_array().into_iter().flatten();
            let kept =
                kept.filter(|entry| !entry["name"].as_str().is_some_and(|name| self.env.contains_key(name)));
            let ours = self.env.iter().map(|(name, value)| json!({ "name": name, "value": value }));
            container["env"] = kept.cloned().chain(ours).collect();
        }
    }
}

/// An image reference without tag and digest.
fn repository(image: &str) -> &str {
    let image = image.split_once('@').map_or(image, |(name, _)| name);
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    }
}

/// Applies each document of a YAML text by server-side apply, in order.
///
/// # Errors
/// The text is no YAML, a kind is not served (also not some time after its definition was applied), or the API server
/// refuses an object; the message names the object.
pub async fn apply_yaml(client: &Client, yaml: &str) -> Result<Vec<DynamicObject>> {
    apply_yaml_with(client, yaml, &Overlay::default()).await
}

/// [`apply_yaml`] with changes.
///
/// # Errors
/// As there.
pub async fn apply_yaml_with(client: &Client, yaml: &str, overlay: &Overlay) -> Result<Vec<DynamicObject>> {
    let mut applied = Vec::new();
    for mut document in documents(yaml)? {
        overlay.edit(&mut document);
        applied.push(apply(client, document).await?);
    }
    Ok(applied)
}

/// [`apply_yaml_with`] for a file, or for every `.yaml` file of a folder in the order of their names.
///
/// # Errors
/// As there, or a file cannot be read.
pub async fn apply_path(client: &Client, path: &Path, overlay: &Overlay) -> Result<Vec<DynamicObject>> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        let entries = fs::read_dir(path).with_context(|| format!("failed to read {}", path.display()))?;
        files = entries.flatten().map(|entry| entry.path()).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
        files.sort();
    }
    let mut applied = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("failed to read {}", file.display()))?;
        let objects = apply_yaml_with(client, &text, overlay).await;
        applied.extend(objects.with_context(|| format!("failed to apply {}", file.display()))?);
    }
    Ok(applied)
}

/// The documents of a YAML text that are not empty; the items of a List one by one.
fn documents(yaml: &str) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(yaml) {
        let value = Value::deserialize(document).context("failed to parse YAML")?;
        match (&value["kind"], &value["items"]) {
            (Value::String(kind), Value::Array(items)) if kind == "List" => all.extend(items.iter().cloned()),
            _ if value.is_null() => {}
            _ => all.push(value),
        }
    }
    Ok(all)
}

async fn apply(client: &Client, object: Value) -> Result<DynamicObject> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (api_version, kind, name, namespace) =
        (text("/apiVersion"), text("/kind"), text("/metadata/name"), text("/metadata/namespace"));
    if api_version.is_empty() || kind.is_empty() || name.is_empty() {
        bail!("a document without apiVersion, kind or metadata.name: {object}");
    }
    let what = format!("{kind} {namespace}/{name}");
    let gvk = match api_version.split_once('/') {
        Some((group, version)) => GroupVersionKind::gvk(group, version, &kind),
        None => GroupVersionKind::gvk("", &api_version, &kind),
    };
    let (resource, scope) =
        find_kind(client, &gvk).await.with_context(|| format!("failed to apply {what}"))?;
    let api: Api<DynamicObject> = match (scope, namespace.as_str()) {
        (Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
        (Scope::Namespaced, "") => Api::namespaced_with(client.clone(), "default", &resource),
        (Scope::Namespaced, namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
    };
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let applied = eventually(NEW_KIND, format!("{what} applied"), || async {
        match api.patch(&name, &params, &Patch::Apply(&object)).await {
            Ok(applied) => Ok(Seen::Yes(Ok(applied))),
            // The kind is known but not served yet.
            Err(Error::Api(status)) if status.code == 404 && status.reason != "NotFound" => {
                Ok(Seen::NotYet(status.message))
            }
            Err(error) => Ok(Seen::Yes(Err(error))),
        }
    })
    .await?;
    applied.with_context(|| format!("failed to apply {what}"))
}

async fn find_kind(client: &Client, gvk: &GroupVersionKind) -> Result<(ApiResource, Scope)> {
    eventually(
        NEW_KIND,
        format!("the kind {}/{} {} being served", gvk.group, gvk.version, gvk.kind),
        || async {
            match pinned_kind(client, gvk).await {
                Ok((resource, capabilities)) => Ok(Seen::Yes((resource, capabilities.scope))),
                Err(error) => Ok(Seen::not_yet(error)),
            }
        },
    )
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_changes_image_env_and_args_and_nothing_else() {
        let mut object = json!({
            "kind": "DaemonSet",
            "spec": { "template": { "spec": {
                "hostNetwork": true,
                "containers": [{
                    "name": "daemon",
                    "image": "registry.example:5000/kerf/node-daemon:v1",
                    "args": ["--one"],
                    "env": [
                        { "name": "KUBERNETES_SERVICE_HOST", "value": "old" },
                        { "name": "OTHER", "value": "kept" },
                    ],
                }],
            } } },
        });
        let mut overlay =
            Overlay::default().for_api_port(7).image("registry.example:5000/kerf/node-daemon", "local:1");
        overlay.args.insert("daemon".to_owned(), vec!["--two".to_owned()]);
        overlay.edit(&mut object);
        let container = &object["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(container["image"], "local:1");
        assert_eq!(container["imagePullPolicy"], "Never");
        assert_eq!(container["args"], json!(["--one", "--two"]));
        assert_eq!(
            container["env"],
            json!([
                { "name": "OTHER", "value": "kept" },
                { "name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1" },
                { "name": "KUBERNETES_SERVICE_PORT", "value": "7" },
            ])
        );
        let mut elsewhere =
            json!({ "kind": "Pod", "spec": { "containers": [{ "name": "x", "image": "y" }] } });
        let before = elsewhere.clone();
        overlay.edit(&mut elsewhere);
        assert_eq!(elsewhere, before, "a pod with a network of its own");
        let mut service = json!({ "kind": "Service", "spec": { "containers": [{ "image": "x" }] } });
        let before = service.clone();
        overlay.edit(&mut service);
        assert_eq!(service, before);
    }

    #[test]
    fn documents_are_split_and_empty_ones_left_out() {
        let all =
            documents("# only a comment\n---\nkind: A\n---\nkind: List\nitems: [{kind: B}, {kind: C}]\n")
                .unwrap();
        let kinds: Vec<_> = all.iter().map(|value| value["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["A", "B", "C"]);
    }
}
