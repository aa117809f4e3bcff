//! What `kubectl get … -o yaml` prints → what the operator's watches would have put into its cache.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kerf_crds::PartitionPolicy;
use kube::ResourceExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cache::{BudgetInfo, NodeInfo, PodInfo, Store, Stored, World};

/// An object of any kind.
#[derive(Debug)]
pub struct Object {
    pub kind: String,
    /// `kind namespace/name`, for messages.
    pub name: String,
    pub value: Value,
}

impl Object {
    /// As the type of its kind.
    ///
    /// # Errors
    /// It does not have that shape.
    pub fn into<K: DeserializeOwned>(self) -> anyhow::Result<K> {
        serde_json::from_value(self.value).with_context(|| self.name)
    }
}

/// The objects of a text: YAML documents or JSON, Lists taken apart.
///
/// # Errors
/// It is neither, or something in it is no object.
pub fn objects(text: &str) -> anyhow::Result<Vec<Object>> {
    let mut all = Vec::new();
    if text.trim_start().starts_with('{') {
        take_apart(serde_json::from_str(text).context("this is no JSON")?, &mut all)?;
        return Ok(all);
    }
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = Value::deserialize(document).context("this is no YAML")?;
        if !value.is_null() {
            take_apart(value, &mut all)?;
        }
    }
    Ok(all)
}

fn take_apart(mut value: Value, all: &mut Vec<Object>) -> anyhow::Result<()> {
    let Some(kind) = value["kind"].as_str().map(str::to_owned) else {
        let shown: String = value.to_string().chars().take(60).collect();
        bail!("{shown} is no object of Kubernetes: it has no kind");
    };
    if let (true, Some(items)) = (kind.ends_with("List"), value.get_mut("items").map(Value::take)) {
        let Value::Array(items) = items else { bail!("the items of a {kind} are no list") };
        // Lists of one kind leave it out of their items.
        let of_items = kind.trim_end_matches("List");
        for mut item in items {
            if item["kind"].is_null() && !of_items.is_empty() && item.is_object() {
                item["kind"] = of_items.into();
            }
            take_apart(item, all)?;
        }
        return Ok(());
    }
    let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let name = match text("/metadata/namespace") {
        "" => format!("{kind} {}", text("/metadata/name")),
        namespace => format!("{kind} {namespace}/{}", text("/metadata/name")),
    };
    all.push(Object { kind, name, value });
    Ok(())
}

/// A policy of a file.
///
/// # Errors
/// It is something else, or has a field that policies do not have.
pub fn policy(object: Object) -> anyhow::Result<PartitionPolicy> {
    ensure!(object.kind == "PartitionPolicy", "{} is no PartitionPolicy", object.name);
    let name = object.name.clone();
    let spec = object.value.get("spec").cloned().unwrap_or_default();
    let policy: PartitionPolicy = object.into()?;
    ensure!(policy.metadata.name.is_some(), "a PartitionPolicy without metadata.name");
    let known = serde_json::to_value(&policy.spec)?;
    if let Some(unknown) = unknown_field(&spec, &known, "spec") {
        bail!("{name}: unknown field {unknown} (see `kubectl explain partitionpolicy.spec`)");
    }
    Ok(policy)
}

/// The first field that is written and was not read. What is empty may be left out of what was read.
fn unknown_field(written: &Value, read: &Value, path: &str) -> Option<String> {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => written.iter().find_map(|(key, value)| {
            let path = format!("{path}.{key}");
            match read.get(key) {
                Some(read) => unknown_field(value, read, &path),
                None if is_empty(value) => None,
                None => Some(path),
            }
        }),
        (Value::Array(written), Value::Array(read)) => {
            written.iter().zip(read).enumerate().find_map(|(index, (written, read))| {
                unknown_field(written, read, &format!("{path}[{index}]"))
            })
        }
        _ => None,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// A cluster as its dump shows it.
#[derive(Debug, Default)]
pub struct Cluster {
    pub world: World,
    /// Values of PriorityClasses, and the one of pods that name none.
    pub priorities: BTreeMap<String, i32>,
    pub default_priority: i32,
}

impl Cluster {
    /// Reads it. Kinds that no decision is made from are left out.
    ///
    /// # Errors
    /// An object does not have the shape of its kind, or a kind is missing that every cluster with Kerf has.
    pub fn read(objects: Vec<Object>) -> anyhow::Result<Self> {
        let mut cluster = Self::default();
        let Self { world, priorities, default_priority } = &mut cluster;
        world.pods.listing_began();
        world.nodes.listing_began();
        world.claims.listing_began();
        world.gpu_nodes.listing_began();
        world.policies.listing_began();
        world.classes.listing_began();
        world.budgets.listing_began();
        for object in objects {
            match object.kind.as_str() {
                "Pod" => world.pods.listed(PodInfo::from(object.into::<Pod>()?)),
                "Node" => world.nodes.listed(NodeInfo::from(object.into::<Node>()?)),
                "ResourceClaim" => world.claims.listed(object.into()?),
                "GpuNode" => world.gpu_nodes.listed(object.into()?),
                "PartitionPolicy" => world.policies.listed(object.into()?),
                "DeviceClass" => world.classes.listed(object.into()?),
                "PodDisruptionBudget" => {
                    world.budgets.listed(BudgetInfo::from(object.into::<PodDisruptionBudget>()?));
                }
                "PriorityClass" => {
                    let class: PriorityClass = object.into()?;
                    let value = class.value.unwrap_or_default();
                    if class.global_default == Some(true) {
                        *default_priority = value;
                    }
                    priorities.insert(class.name_any(), value);
                }
                _ => {}
            }
        }
        world.pods.listing_done();
        world.nodes.listing_done();
        world.claims.listing_done();
        world.gpu_nodes.listing_done();
        world.policies.listing_done();
        world.classes.listing_done();
        world.budgets.listing_done();
        world.index_all_pods();
        let missing = [
            ("Node", world.nodes.is_empty()),
            ("GpuNode", world.gpu_nodes.is_empty()),
            ("DeviceClass", world.classes.is_empty()),
            ("Pod", world.pods.is_empty()),
        ];
        if let Some((kind, _)) = missing.into_iter().find(|(_, missing)| *missing) {
            bail!("there is no {kind} in the dump; `kerf-whatif try --help` has the command that takes one");
        }
        Ok(cluster)
    }

    /// Takes a policy out.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn remove_policy(&mut self, name: &str) -> anyhow::Result<()> {
        let policies = &mut self.world.policies;
        let Some(policy) = policies.get(name).cloned() else {
            bail!("there is no PartitionPolicy {name} in the dump")
        };
        policies.watch_deleted(&policy);
        Ok(())
    }

    /// Puts a policy in, or in place of the one of its name. Answers its name.
    pub fn put_policy(&mut self, mut policy: PartitionPolicy) -> String {
        let name = policy.name_any();
        let old = self.world.policies.get(&name);
        let (version, generation) =
            old.map_or((0, 0), |old| (old.version(), old.metadata.generation.unwrap_or(0)));
        policy.metadata.resource_version = Some((version + 1).to_string());
        policy.metadata.generation = Some(generation + 1);
        policy.metadata.deletion_timestamp = None;
        policy.status = old.and_then(|old| old.status.clone());
        self.world.policies.watch_applied(policy);
        name
    }

    /// Puts a pod in.
    pub fn put_pod(&mut self, pod: PodInfo) {
        self.world.put_pod(pod, Store::watch_applied);
    }
}
