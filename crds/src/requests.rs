//! From the extended resources that a pod asks for to the device requests of its claim.
//!
//! The webhook takes the resources out of the containers and leaves them in an annotation; the operator makes the claim
//! from that annotation. Both use [`expand`], so the request names in the pod and in the claim agree.
//!
//! Semantics are those of extended resources: app containers and sidecars each have devices of their own; init
//! containers run before the app containers and reuse theirs, so a pod needs, per resource, the larger of (all app
//! containers and sidecars together) and (each init container and the sidecars started before it).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What each container asked for: the content of the annotation [`crate::names::ORIGINAL_RESOURCES`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OriginalResources {
    /// In the order of `spec.initContainers`, sidecars included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<ContainerRequest>,
    /// In the order of `spec.containers`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<ContainerRequest>,
}

/// One container's extended resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// An init container with `restartPolicy: Always`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sidecar: bool,
    /// Resource name → count of devices.
    pub resources: BTreeMap<String, u32>,
}

/// One device of the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRequest {
    /// Name of the request in the claim, a DNS label: `device-0`.
    pub name: String,
    /// The extended resource that it stands for.
    pub resource: String,
}

/// The claim's requests and who uses which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expanded {
    /// One device each, in a fixed order.
    pub requests: Vec<DeviceRequest>,
    /// Container name → names of the requests it uses.
    pub uses: BTreeMap<String, Vec<String>>,
}

/// Gives every container its devices; see the module's text for who shares with whom.
pub fn expand(original: &OriginalResources) -> Expanded {
    let mut expanded = Expanded::default();
    let resources: std::collections::BTreeSet<&String> = original
        .init_containers
        .iter()
        .chain(&original.containers)
        .flat_map(|container| {
            container.resources.iter().filter(|(_, count)| **count > 0).map(|(name, _)| name)
        })
        .collect();
    for resource in resources {
        expand_one(original, resource, &mut expanded);
    }
    expanded
}

fn expand_one(original: &OriginalResources, resource: &str, expanded: &mut Expanded) {
    let count =
        |container: &ContainerRequest| container.resources.get(resource).copied().unwrap_or(0) as usize;
    let first = expanded.requests.len();
    let name = |index: usize| format!("device-{}", first + index);
    let mut take = |container: &ContainerRequest, range: std::ops::Range<usize>| {
        if !range.is_empty() {
            expanded.uses.entry(container.name.clone()).or_default().extend(range.map(name));
        }
    };
    // Sidecars come first and keep what they have; everything behind them is the app containers' and, before those
    // start, the plain init containers'.
    let mut sidecars = 0;
    let mut total = 0;
    for container in &original.init_containers {
        let wants = count(container);
        take(container, sidecars..sidecars + wants);
        total = total.max(sidecars + wants);
        if container.sidecar {
            sidecars += wants;
        }
    }
    let mut next = sidecars;
    for container in &original.containers {
        let wants = count(container);
        take(container, next..next + wants);
        next += wants;
    }
    total = total.max(next);
    expanded
        .requests
        .extend((0..total).map(|index| DeviceRequest { name: name(index), resource: resource.to_owned() }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(name: &str, sidecar: bool, resources: &[(&str, u32)]) -> ContainerRequest {
        ContainerRequest {
            name: name.into(),
            sidecar,
            resources: resources.iter().map(|(r, c)| ((*r).into(), *c)).collect(),
        }
    }

    #[test]
    fn app_containers_have_devices_of_their_own() {
        let expanded = expand(&OriginalResources {
            init_containers: vec![],
            containers: vec![
                container("a", false, &[("m1", 1)]),
                container("b", false, &[("m1", 2), ("m2", 1)]),
            ],
        });
        assert_eq!(expanded.requests.len(), 4);
        assert_eq!(expanded.uses["a"], ["device-0"]);
        assert_eq!(expanded.uses["b"], ["device-1", "device-2", "device-3"]);
        assert_eq!(expanded.requests[3].resource, "m2");
    }

    #[test]
    fn init_containers_reuse_what_app_containers_get() {
        let expanded = expand(&OriginalResources {
            init_containers: vec![container("i", false, &[("m", 1)])],
            containers: vec![container("a", false, &[("m", 2)])],
        });
        assert_eq!(expanded.requests.len(), 2);
        assert_eq!(expanded.uses["i"], ["device-0"]);
        assert_eq!(expanded.uses["a"], ["device-0", "device-1"]);
    }

    #[test]
    fn a_greedy_init_container_raises_the_total() {
        let expanded = expand(&OriginalResources {
            init_containers: vec![container("i", false, &[("m", 3)])],
            containers: vec![container("a", false, &[("m", 1)])],
        });
        assert_eq!(expanded.requests.len(), 3);
    }

    #[test]
    fn sidecars_add_and_are_shared_with_nobody() {
        let expanded = expand(&OriginalResources {
            init_containers: vec![
                container("early", false, &[("m", 2)]),
                container("side", true, &[("m", 1)]),
                container("late", false, &[("m", 1)]),
            ],
            containers: vec![container("a", false, &[("m", 1)])],
        });
        assert_eq!(expanded.requests.len(), 2);
        assert_eq!(expanded.uses["early"], ["device-0", "device-1"], "runs before the sidecar starts");
        assert_eq!(expanded.uses["side"], ["device-0"]);
        assert_eq!(expanded.uses["late"], ["device-1"]);
        assert_eq!(expanded.uses["a"], ["device-1"]);
    }
}
