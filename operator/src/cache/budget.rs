//! What Kerf keeps of a PodDisruptionBudget.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use super::store::Stored;
use super::{PodInfo, version_of};

/// A PodDisruptionBudget.
#[derive(Clone, Debug)]
pub struct BudgetInfo {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub version: u64,
    /// `None`: no pod. An empty selector is every pod of the namespace.
    pub selector: Option<Selector>,
    /// How many more of its pods may go now.
    pub allowed: u32,
}

impl BudgetInfo {
    /// Whether the pod counts for it.
    pub fn covers(&self, pod: &PodInfo) -> bool {
        let labels = pod.detail.as_ref().map(|detail| &detail.labels);
        self.namespace == pod.namespace
            && self.selector.as_ref().zip(labels).is_some_and(|(selector, labels)| selector.matches(labels))
    }
}

impl Stored for BudgetInfo {
    fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
    fn uid(&self) -> &str {
        &self.uid
    }
    fn version(&self) -> u64 {
        self.version
    }
}

impl From<PodDisruptionBudget> for BudgetInfo {
    fn from(budget: PodDisruptionBudget) -> Self {
        let readable = |selector: LabelSelector| Selector::try_from(selector).ok();
        // A status that answers an older spec says nothing.
        let answers = |observed: Option<i64>| observed >= budget.metadata.generation;
        let allowed = budget
            .status
            .as_ref()
            .filter(|status| answers(status.observed_generation))
            .and_then(|status| status.disruptions_allowed)
            .unwrap_or_default();
        Self {
            namespace: budget.namespace().unwrap_or_default(),
            name: budget.name_any(),
            uid: budget.uid().unwrap_or_default(),
            version: version_of(&budget.metadata),
            selector: budget.spec.and_then(|spec| spec.selector).and_then(readable),
            allowed: u32::try_from(allowed).unwrap_or_default(),
        }
    }
}
