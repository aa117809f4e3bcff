//! Which policy has a say on which GPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use kerf_crds::gpu_node::Gpu;
use kerf_crds::partition_policy::GpuSelector;
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use crate::cache::{NodeInfo, World};

/// The policies that match one GPU.
#[derive(Clone, Debug, Default)]
pub enum Match {
    /// None: the GPU is left alone.
    #[default]
    Nobody,
    /// Exactly one, which manages the GPU.
    One(Arc<PartitionPolicy>),
    /// Several: none of them does.
    Conflict(Vec<Arc<PartitionPolicy>>),
}

impl Match {
    /// The policy that manages the GPU.
    pub fn policy(&self) -> Option<&Arc<PartitionPolicy>> {
        match self {
            Match::One(policy) => Some(policy),
            Match::Nobody | Match::Conflict(_) => None,
        }
    }

    /// Every policy that matches.
    pub fn all(&self) -> &[Arc<PartitionPolicy>] {
        match self {
            Match::Nobody => &[],
            Match::One(policy) => std::slice::from_ref(policy),
            Match::Conflict(policies) => policies,
        }
    }
}

/// Who matches the GPUs of a node, by UUID.
pub type OfNode = Arc<BTreeMap<String, Match>>;

/// The same by node.
pub type Matches = BTreeMap<String, OfNode>;

/// Matches every reported GPU with every policy.
pub fn matches(world: &World) -> Matches {
    let policies: Vec<_> = world
        .policies
        .iter()
        .filter(|policy| policy.metadata.deletion_timestamp.is_none())
        .cloned()
        .collect();
    let matcher = Matcher::of(&policies);
    let of = |node: &Arc<GpuNode>| {
        let name = node.name_any();
        let found = matcher.node(node, world.nodes.get(&name).map(|node| &**node));
        (name, found)
    };
    world.gpu_nodes.iter().map(of).collect()
}

/// Policies with their selectors read.
#[derive(Debug)]
pub struct Matcher<'a>(Vec<(&'a Arc<PartitionPolicy>, Option<Selector>)>);

impl<'a> Matcher<'a> {
    /// Of those policies that are not being deleted.
    pub fn of(policies: &'a [Arc<PartitionPolicy>]) -> Self {
        // A selector that cannot be read matches nothing; the policy's status says so.
        let read = |policy: &Arc<PartitionPolicy>| Selector::try_from(policy.spec.node_selector.clone()).ok();
        Self(policies.iter().map(|policy| (policy, read(policy))).collect())
    }

    /// Matches the GPUs of a node.
    pub fn node(&self, gpu_node: &GpuNode, node: Option<&NodeInfo>) -> OfNode {
        let empty = BTreeMap::new();
        let labels = node.map_or(&empty, |node| &*node.labels);
        let here: Vec<&Arc<PartitionPolicy>> = self
            .0
            .iter()
            .filter(|(_, selector)| selector.as_ref().is_some_and(|selector| selector.matches(labels)))
            .map(|(policy, _)| *policy)
            .collect();
        let gpus = gpu_node.status.iter().flat_map(|status| &status.gpus).map(|gpu| {
            let mut matching: Vec<Arc<PartitionPolicy>> =
                here.iter().filter(|policy| selects(&policy.spec.gpus, gpu)).map(|p| Arc::clone(p)).collect();
            let matched = match matching.len() {
                0 => Match::Nobody,
                1 => Match::One(matching.remove(0)),
                _ => Match::Conflict(matching),
            };
            (gpu.uuid.clone(), matched)
        });
        Arc::new(gpus.collect())
    }
}

fn selects(selector: &GpuSelector, gpu: &Gpu) -> bool {
    let GpuSelector { products, uuids, indices } = selector;
    (products.is_empty() || products.iter().any(|pattern| pattern.matches(&gpu.product)))
        && (uuids.is_empty() || uuids.contains(&gpu.uuid))
        && (indices.is_empty() || indices.iter().any(|index| i64::from(*index) == i64::from(gpu.index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_given_conditions_of_a_gpu_selector_hold() {
        let gpu =
            Gpu { uuid: "GPU-1".into(), index: 2, product: "NVIDIA A100-SXM4-80GB".into(), ..Gpu::default() };
        let selector = |products: &[&str], uuids: &[&str], indices: &[i32]| GpuSelector {
            products: products.iter().map(|p| (*p).into()).collect(),
            uuids: uuids.iter().map(|u| (*u).into()).collect(),
            indices: indices.to_vec(),
        };
        assert!(selects(&selector(&[], &[], &[]), &gpu));
        assert!(selects(&selector(&["NVIDIA A100*"], &["GPU-1"], &[2]), &gpu));
        assert!(!selects(&selector(&["NVIDIA H100*"], &["GPU-1"], &[2]), &gpu));
        assert!(!selects(&selector(&[], &["GPU-2"], &[2]), &gpu));
        assert!(!selects(&selector(&[], &[], &[-1, 1]), &gpu));
    }
}
