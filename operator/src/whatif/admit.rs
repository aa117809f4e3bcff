//! Pods that are not there yet, as the API server with Kerf's webhook would take them in.

use std::collections::BTreeMap;

use anyhow::{Context, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaimStatus};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::{Timestamp, ToSpan};
use kube::ResourceExt;
use serde_json::json;
use std::fmt::Write;

use super::dump::{Cluster, Object};
use crate::cache::PodInfo;
use crate::webhook::{context, mutate};

/// Most pods of one `--add`.
const MOST: u32 = 100_000;

/// See the module.
#[derive(Debug, Default)]
pub struct Pods {
    pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
    templates: BTreeMap<(String, String), ResourceClaimTemplate>,
}

impl Pods {
    /// Takes an object of a file.
    ///
    /// # Errors
    /// It is no pod, and nothing that pods name.
    pub fn take(&mut self, object: Object) -> anyhow::Result<()> {
        match object.kind.as_str() {
            "Pod" => self.pods.push(object.into()?),
            "ResourceClaim" => {
                let mut claim: ResourceClaim = object.into()?;
                claim.metadata.namespace.get_or_insert_with(|| "default".into());
                self.claims.push(claim);
            }
            "ResourceClaimTemplate" => {
                let template: ResourceClaimTemplate = object.into()?;
                let namespace = template.namespace().unwrap_or_else(|| "default".into());
                self.templates.insert((namespace, template.name_any()), template);
            }
            kind => bail!(
                "{} is no Pod: of a {kind}, write the pods that it would make (with the ResourceClaims or \
                 ResourceClaimTemplates that they name)",
                object.name
            ),
        }
        Ok(())
    }

    /// Adds what `4x nvidia.com/mig-2g.20gb` says.
    ///
    /// # Errors
    /// It says nothing of this form.
    pub fn add(&mut self, words: &str) -> anyhow::Result<()> {
        let read = || {
            let (number, resource) = words.trim().split_once(['x', ' '])?;
            let number: u32 = number.trim().parse().ok()?;
            let resource = resource.trim_start_matches(['x', ' ']).trim();
            (number > 0 && number <= MOST && resource.contains('/')).then_some((number, resource))
        };
        let (number, resource) =
            read().ok_or_else(|| anyhow!("{words:?} is not of the form \"4x nvidia.com/mig-2g.20gb\""))?;
        (0..number).try_for_each(|_| self.push(resource, 1))
    }

    /// Adds a pod of one container with so many of a resource.
    ///
    /// # Errors
    /// Never.
    pub fn push(&mut self, resource: &str, count: u32) -> anyhow::Result<()> {
        let pod = json!({
            "metadata": { "name": format!("whatif-{}", self.pods.len() + 1) },
            "spec": { "containers": [{ "name": "main", "resources": { "limits": { resource: count.to_string() } } }] },
        });
        self.pods.push(serde_json::from_value(pod)?);
        Ok(())
    }

    /// Puts all of them into the cluster, and answers their names. Warnings of the webhook go into `text`.
    ///
    /// # Errors
    /// A pod is refused, or there is one of its name.
    pub fn admit(self, cluster: &mut Cluster, text: &mut String) -> anyhow::Result<Vec<String>> {
        for claim in self.claims {
            cluster.world.claims.watch_applied(claim);
        }
        let now = Timestamp::now();
        let mut ids = Vec::new();
        for (index, mut pod) in self.pods.into_iter().enumerate() {
            let number = index + 1;
            let made = format!("{}{number}", pod.metadata.generate_name.as_deref().unwrap_or("whatif-"));
            let name = pod.metadata.name.get_or_insert(made).clone();
            let namespace = pod.metadata.namespace.get_or_insert_with(|| "default".into()).clone();
            let id = format!("{namespace}/{name}");
            ensure!(cluster.world.pods.get(&id).is_none(), "there is a pod {id} already");
            // One after the other, as they are served.
            pod.metadata.creation_timestamp = Some(Time(now + (index as i64).seconds()));
            pod.metadata.uid = Some(format!("whatif-{number}"));
            pod.metadata.resource_version = Some("1".into());
            let spec = pod.spec.get_or_insert_default();
            if spec.priority.is_none() {
                spec.priority = Some(match spec.priority_class_name.as_deref() {
                    None | Some("") => cluster.default_priority,
                    Some(class) => *cluster.priorities.get(class).with_context(|| {
                        format!("pod {id}: there is no PriorityClass {class} in the dump")
                    })?,
                });
            }
            self::claims(&mut pod, &id, &self.templates, cluster)?;
            // As the digits of a UID: the claim's name is made from it.
            let mutation = mutate(&pod, &context(&cluster.world, &format!("{number:012x}")))
                .map_err(|denial| anyhow!("pod {id} is refused: {denial}"))?;
            for warning in mutation.warnings {
                let _ = writeln!(text, "Warning: pod {id}: {warning}");
            }
            let mut value = serde_json::to_value(&pod)?;
            json_patch::patch(&mut value, &mutation.patch)?;
            cluster.put_pod(PodInfo::from(serde_json::from_value::<Pod>(value)?));
            ids.push(id);
        }
        Ok(ids)
    }
}

/// Makes the pod's claims from their templates, as kube-controller-manager does.
fn claims(
    pod: &mut Pod,
    id: &str,
    templates: &BTreeMap<(String, String), ResourceClaimTemplate>,
    cluster: &mut Cluster,
) -> anyhow::Result<()> {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let uid = pod.uid().unwrap_or_default();
    let mut made = Vec::new();
    for entry in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
        let Some(from) = &entry.resource_claim_template_name else { continue };
        let template = templates.get(&(namespace.clone(), from.clone())).with_context(|| {
            format!("pod {id}: the ResourceClaimTemplate {from} is not among the files of --pods")
        })?;
        let claim = format!("{name}-{}", entry.name);
        let owner = OwnerReference {
            api_version: "v1".into(),
            kind: "Pod".into(),
            name: name.clone(),
            uid: uid.clone(),
            controller: Some(true),
            ..OwnerReference::default()
        };
        cluster.world.claims.watch_applied(ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(namespace.clone()),
                name: Some(claim.clone()),
                uid: Some(format!("{uid}-{}", entry.name)),
                resource_version: Some("1".into()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: template.spec.as_ref().and_then(|template| template.spec.clone()),
            status: None,
        });
        made.push(PodResourceClaimStatus { name: entry.name.clone(), resource_claim_name: Some(claim) });
    }
    pod.status.get_or_insert_default().resource_claim_statuses = Some(made);
    Ok(())
}
