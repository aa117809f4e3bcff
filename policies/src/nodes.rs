//! Whether a node can take a pod, by the rules of kube-scheduler that matter here: readiness, cordon, taints,
//! selectors, required affinity and what is left of its resources.

use std::collections::BTreeMap;

use crate::snapshot::{Node, NodeRequirement, Operator, PodNeeds, Taint, Toleration};

/// Why a node cannot take a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Misfit {
    /// Not ready, or its daemon does not follow the spec.
    NotReady,
    /// Cordoned.
    Cordoned,
    /// A taint that the pod does not tolerate: `key=value:effect`.
    Taint(String),
    /// The pod's node selector or affinity is for other nodes.
    NotSelected,
    /// A place there was given up a moment ago.
    Avoided,
    /// Too little of a resource.
    Lacks {
        /// The resource.
        resource: String,
        /// What the pod needs, in thousandths of the unit.
        needs: i128,
        /// What is free; `None`: the node has no such resource.
        free: Option<i128>,
    },
}

const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Why the node cannot take the pod, whatever else runs there.
pub fn unsuitable(node: &Node, pod: &PodNeeds) -> Option<Misfit> {
    if !node.ready {
        return Some(Misfit::NotReady);
    }
    let cordon = Taint { key: UNSCHEDULABLE.into(), value: String::new(), effect: "NoSchedule".into() };
    if node.unschedulable && !tolerated(&cordon, &pod.tolerations) {
        return Some(Misfit::Cordoned);
    }
    let keeps_away = |taint: &&Taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && !tolerated(taint, &pod.tolerations)
    };
    if let Some(taint) = node.taints.iter().find(keeps_away) {
        return Some(Misfit::Taint(match taint.value.as_str() {
            "" => format!("{}:{}", taint.key, taint.effect),
            value => format!("{}={value}:{}", taint.key, taint.effect),
        }));
    }
    let selected = pod.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
    let affine = pod.affinity.is_empty() || pod.affinity.iter().any(|term| holds(term, node));
    (!selected || !affine).then_some(Misfit::NotSelected)
}

/// The first resource, by name, of which too little is left.
pub fn lacking(free: &BTreeMap<String, i128>, pod: &PodNeeds) -> Option<Misfit> {
    let needed = pod.milli.iter().filter(|&(_, &needs)| needs > 0);
    needed.into_iter().find_map(|(resource, &needs)| lacks(resource, free.get(resource).copied(), needs))
}

/// Whether too little of a resource is left. `free` and `needs` in thousandths of its unit; without `free` the node has
/// no such resource.
pub fn lacks(resource: &str, free: Option<i128>, needs: i128) -> Option<Misfit> {
    free.is_none_or(|free| free < needs).then(|| Misfit::Lacks { resource: resource.to_owned(), needs, free })
}

fn tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| {
        let effect = toleration.effect.is_empty() || toleration.effect == taint.effect;
        let key = toleration.key == taint.key || (toleration.key.is_empty() && toleration.exists);
        effect && key && (toleration.exists || toleration.value == taint.value)
    })
}

/// Whether every requirement of the term holds; an empty term selects no node.
fn holds(term: &[NodeRequirement], node: &Node) -> bool {
    !term.is_empty() && term.iter().all(|requirement| meets(requirement, node))
}

fn meets(requirement: &NodeRequirement, node: &Node) -> bool {
    let value = match requirement.key.as_str() {
        NodeRequirement::NAME => Some(&node.name),
        key => node.labels.get(key),
    };
    let listed = |value: &String| requirement.values.contains(value);
    let compare = |holds: fn(i64, i64) -> bool| match (value, requirement.values.as_slice()) {
        (Some(value), [bound]) => match (value.parse(), bound.parse()) {
            (Ok(value), Ok(bound)) => holds(value, bound),
            _ => false,
        },
        _ => false,
    };
    match requirement.operator {
        Operator::In => value.is_some_and(listed),
        Operator::NotIn => !value.is_some_and(listed),
        Operator::Exists => value.is_some(),
        Operator::DoesNotExist => value.is_none(),
        Operator::Gt => compare(|value, bound| value > bound),
        Operator::Lt => compare(|value, bound| value < bound),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Node {
        let labels = [("zone", "a"), ("cores", "64")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        Node { name: "n1".into(), labels: BTreeMap::from(labels).into(), ready: true, ..Node::default() }
    }

    fn needs(key: &str, operator: Operator, values: &[&str]) -> PodNeeds {
        let values = values.iter().map(|&v| v.to_owned()).collect();
        PodNeeds {
            affinity: vec![vec![NodeRequirement { key: key.into(), operator, values }]],
            ..PodNeeds::default()
        }
    }

    #[test]
    fn affinity_follows_the_operators_of_node_selectors() {
        let fits =
            |key, operator, values: &[&str]| unsuitable(&node(), &needs(key, operator, values)).is_none();
        assert!(fits("zone", Operator::In, &["a", "b"]));
        assert!(!fits("zone", Operator::NotIn, &["a"]));
        assert!(fits("absent", Operator::NotIn, &["a"]));
        assert!(fits("zone", Operator::Exists, &[]));
        assert!(!fits("zone", Operator::DoesNotExist, &[]));
        assert!(fits("cores", Operator::Gt, &["63"]));
        assert!(!fits("cores", Operator::Gt, &["64"]));
        assert!(!fits("zone", Operator::Lt, &["64"]));
        assert!(fits(NodeRequirement::NAME, Operator::In, &["n1"]));
        assert!(!fits(NodeRequirement::NAME, Operator::In, &["n2"]));
        let empty_term = PodNeeds { affinity: vec![vec![]], ..PodNeeds::default() };
        assert_eq!(unsuitable(&node(), &empty_term), Some(Misfit::NotSelected));
    }

    #[test]
    fn taints_and_cordon_yield_to_tolerations() {
        let taint = Taint { key: "team".into(), value: "x".into(), effect: "NoSchedule".into() };
        let soft = Taint { effect: "PreferNoSchedule".into(), ..taint.clone() };
        let tainted = Node { taints: vec![soft, taint], unschedulable: true, ..node() };
        let tolerating = |tolerations: &[Toleration]| {
            unsuitable(&tainted, &PodNeeds { tolerations: tolerations.to_vec(), ..PodNeeds::default() })
        };
        let cordon = Toleration {
            key: UNSCHEDULABLE.into(),
            exists: true,
            effect: "NoSchedule".into(),
            ..Default::default()
        };
        let other_value = Toleration { key: "team".into(), value: "y".into(), ..Default::default() };
        let equal = Toleration { value: "x".into(), ..other_value.clone() };
        let all = Toleration { exists: true, ..Default::default() };
        assert_eq!(tolerating(&[]), Some(Misfit::Cordoned));
        assert_eq!(
            tolerating(&[cordon.clone(), other_value]),
            Some(Misfit::Taint("team=x:NoSchedule".into()))
        );
        assert_eq!(tolerating(&[cordon, equal]), None);
        assert_eq!(tolerating(&[all]), None);
    }

    #[test]
    fn the_first_short_resource_is_named() {
        let free = [("cpu".to_owned(), 1500), ("pods".to_owned(), 1000)].into();
        let pod = |list: &[(&str, i128)]| PodNeeds {
            milli: list.iter().map(|&(k, v)| (k.to_owned(), v)).collect(),
            ..PodNeeds::default()
        };
        assert_eq!(lacking(&free, &pod(&[("cpu", 1500), ("pods", 1000), ("memory", 0)])), None);
        let short = Misfit::Lacks { resource: "cpu".into(), needs: 1501, free: Some(1500) };
        assert_eq!(lacking(&free, &pod(&[("cpu", 1501), ("memory", 1)])), Some(short));
        let absent = Misfit::Lacks { resource: "memory".into(), needs: 1, free: None };
        assert_eq!(lacking(&free, &pod(&[("memory", 1)])), Some(absent));
    }
}
