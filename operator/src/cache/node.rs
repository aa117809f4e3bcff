//! What is kept of a Node: a node object with its list of images is tens of kilobytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kerf_planner::snapshot::Taint;

use super::store::Stored;
use super::{quantity, version_of};

/// A node.
#[derive(Clone, Debug, Default)]
pub struct NodeInfo {
    pub name: String,
    pub uid: String,
    pub version: u64,
    pub labels: Arc<BTreeMap<String, String>>,
    /// `NoSchedule` and `NoExecute` taints.
    pub taints: Vec<Taint>,
    /// Cordoned.
    pub unschedulable: bool,
    /// Condition `Ready` is True.
    pub ready: bool,
    /// Being deleted.
    pub deleting: bool,
    /// `status.allocatable`, in thousandths.
    pub allocatable: BTreeMap<String, i128>,
}

impl Stored for NodeInfo {
    fn key(&self) -> String {
        self.name.clone()
    }
    fn uid(&self) -> &str {
        &self.uid
    }
    fn version(&self) -> u64 {
        self.version
    }
}

impl From<Node> for NodeInfo {
    fn from(node: Node) -> Self {
        let spec = node.spec.unwrap_or_default();
        let status = node.status.unwrap_or_default();
        Self {
            version: version_of(&node.metadata),
            name: node.metadata.name.unwrap_or_default(),
            uid: node.metadata.uid.unwrap_or_default(),
            labels: node.metadata.labels.unwrap_or_default().into(),
            taints: spec
                .taints
                .unwrap_or_default()
                .into_iter()
                .filter(|taint| taint.effect != "PreferNoSchedule")
                .map(|taint| Taint {
                    key: taint.key,
                    value: taint.value.unwrap_or_default(),
                    effect: taint.effect,
                })
                .collect(),
            unschedulable: spec.unschedulable.unwrap_or_default(),
            ready: status
                .conditions
                .unwrap_or_default()
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            deleting: node.metadata.deletion_timestamp.is_some(),
            allocatable: status
                .allocatable
                .unwrap_or_default()
                .iter()
                .filter_map(|(name, amount)| Some((name.clone(), quantity::milli(amount)?)))
                .collect(),
        }
    }
}
