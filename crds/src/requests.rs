//! From the extended resources that a pod asks for to the device requests of its claim.
//!
//! The webhook takes the resources out of the containers and leaves them in an annotation; the operator makes the claim
//! from that annotation. Both use [`expand`], so the request names in the pod and in the claim agree.
//!
//! Semantics are those of extended resources: app containers and sidecars each have devices of their own; init
//! containers run before the app containers and reuse theirs, so a pod needs, per resource, the larger of (all app
//! containers and sidecars together) and (each init container and the sidecars started before it). Shares of one size are
//! like one resource.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::gpu_node::Isolation;

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
    /// The weakest isolation that the pod accepts for its shares; left out: what policies accept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<Isolation>,
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
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, u32>,
    /// Its share of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<ShareSize>,
}

/// The least memory of a share: a CUDA context alone takes more.
pub const LEAST_SHARE_MEMORY: u64 = 64 << 20;

/// How large a share is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareSize {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Compute, in percent of the GPU's multiprocessors.
    pub compute_percent: u32,
}

/// What a device is to be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Asked {
    /// What the extended resource stands for.
    Resource(String),
    Share(ShareSize),
}

impl ContainerRequest {
    /// What it asks for, with the number of devices of each kind.
    pub fn asked(&self) -> impl Iterator<Item = (Asked, u32)> {
        let resources = self.resources.iter().map(|(name, count)| (Asked::Resource(name.clone()), *count));
        let share = self.share.iter().map(|size| (Asked::Share(*size), 1));
        resources.chain(share).filter(|(_, count)| *count > 0)
    }

    /// Whether it asks for nothing.
    pub fn is_empty(&self) -> bool {
        self.resources.is_empty() && self.share.is_none()
    }
}

/// One device of the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRequest {
    /// Name of the request in the claim, a DNS label: `device-0`.
    pub name: String,
    /// What it is to be.
    pub asked: Asked,
}

/// The claim's requests and who uses which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expanded {
    /// One device each, in a fixed order.
    pub requests: Vec<DeviceRequest>,
    /// Container name → names of the requests it uses.
    pub uses: BTreeMap<String, Vec<String>>,
}

/// Devices that one claim can hold: `AllocationResultsMaxSize` of `resource.k8s.io/v1`.
pub const MAX_DEVICES: usize = 32;

/// Says that a pod or claim asks for more than fits into one claim.
pub fn too_many(asked: impl std::fmt::Display) -> String {
    format!(
        "asks for {asked} devices, but a claim holds at most {MAX_DEVICES}: ask for fewer and larger profiles, or spread \
         the work over several pods"
    )
}

/// Reads the annotation. Where the webhook does not look, users can write what they like into it; what passes here is
/// safe to [`expand`].
///
/// # Errors
/// It is not what the webhook writes, or asks for more devices than a claim holds.
pub fn parse(annotation: &str) -> Result<OriginalResources, String> {
    let original: OriginalResources = serde_json::from_str(annotation).map_err(|error| error.to_string())?;
    // The most of one container, and the number of resources, are never more than the whole.
    let mut asked: u64 = 0;
    let mut resources = BTreeSet::new();
    for container in original.init_containers.iter().chain(&original.containers) {
        asked = asked.max(container.asked().map(|(_, count)| u64::from(count)).sum());
        resources.extend(container.asked().map(|(asked, _)| asked));
    }
    asked = asked.max(resources.len() as u64);
    if asked <= MAX_DEVICES as u64 {
        asked = expand(&original).requests.len() as u64;
    }
    if asked > MAX_DEVICES as u64 { Err(too_many(asked)) } else { Ok(original) }
}

/// Gives every container its devices; see the module's text for who shares with whom.
pub fn expand(original: &OriginalResources) -> Expanded {
    let mut expanded = Expanded::default();
    let containers = original.init_containers.iter().chain(&original.containers);
    let kinds: BTreeSet<Asked> =
        containers.flat_map(|container| container.asked().map(|(asked, _)| asked)).collect();
    for kind in kinds {
        expand_one(original, &kind, &mut expanded);
    }
    expanded
}

fn expand_one(original: &OriginalResources, kind: &Asked, expanded: &mut Expanded) {
    let count = |container: &ContainerRequest| {
        container.asked().filter(|(asked, _)| asked == kind).map(|(_, count)| count as usize).sum::<usize>()
    };
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
        .extend((0..total).map(|index| DeviceRequest { name: name(index), asked: kind.clone() }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(name: &str, sidecar: bool, resources: &[(&str, u32)]) -> ContainerRequest {
        ContainerRequest {
            name: name.into(),
            sidecar,
            resources: resources.iter().map(|(r, c)| ((*r).into(), *c)).collect(),
            share: None,
        }
    }

    #[test]
    fn an_annotation_is_not_expanded_beyond_what_a_claim_holds() {
        let of = |counts: &[u32]| {
            let name = |index: usize| format!("c{index}");
            let containers =
                counts.iter().enumerate().map(|(i, n)| container(&name(i), false, &[("m", *n)])).collect();
            parse(
                &serde_json::to_string(&OriginalResources { containers, ..OriginalResources::default() })
                    .unwrap(),
            )
        };
        assert!(of(&[16, 16]).is_ok());
        assert!(of(&[16, 17]).unwrap_err().starts_with("asks for 33 devices"));
        assert!(of(&[u32::MAX, u32::MAX]).unwrap_err().starts_with("asks for 4294967295 devices"));
        let many = (0..33).map(|i| (format!("m{i}"), 1)).collect();
        let all = ContainerRequest { name: "c".into(), sidecar: false, resources: many, share: None };
        let all = OriginalResources { init_containers: vec![all], ..OriginalResources::default() };
        assert!(parse(&serde_json::to_string(&all).unwrap()).is_err());
        assert!(parse("{").is_err());
    }

    #[test]
    fn app_containers_have_devices_of_their_own() {
        let expanded = expand(&OriginalResources {
            containers: vec![
                container("a", false, &[("m1", 1)]),
                container("b", false, &[("m1", 2), ("m2", 1)]),
            ],
            ..OriginalResources::default()
        });
        assert_eq!(expanded.requests.len(), 4);
        assert_eq!(expanded.uses["a"], ["device-0"]);
        assert_eq!(expanded.uses["b"], ["device-1", "device-2", "device-3"]);
        assert_eq!(expanded.requests[3].asked, Asked::Resource("m2".into()));
    }

    #[test]
    fn init_containers_reuse_what_app_containers_get() {
        let expanded = expand(&OriginalResources {
            init_containers: vec![container("i", false, &[("m", 1)])],
            containers: vec![container("a", false, &[("m", 2)])],
            ..OriginalResources::default()
        });
        assert_eq!(expanded.requests.len(), 2);
        assert_eq!(expanded.uses["i"], ["device-0"]);
        assert_eq!(expanded.uses["a"], ["device-0", "device-1"]);
    }

    #[test]
    fn shares_of_one_size_are_like_one_resource() {
        let share = |name: &str, memory_bytes| ContainerRequest {
            share: Some(ShareSize { memory_bytes, compute_percent: 30 }),
            ..container(name, false, &[])
        };
        let expanded = expand(&OriginalResources {
            init_containers: vec![share("i", 5)],
            containers: vec![share("a", 5), share("b", 5), share("c", 7), container("d", false, &[("m", 1)])],
            ..OriginalResources::default()
        });
        assert_eq!(expanded.uses["i"], expanded.uses["a"]);
        assert_ne!(expanded.uses["a"], expanded.uses["b"]);
        let of_c = expanded.requests.iter().find(|request| request.name == expanded.uses["c"][0]).unwrap();
        assert_eq!(of_c.asked, Asked::Share(ShareSize { memory_bytes: 7, compute_percent: 30 }));
        assert_eq!(expanded.requests.len(), 4);
    }

    #[test]
    fn a_greedy_init_container_raises_the_total() {
        let expanded = expand(&OriginalResources {
            init_containers: vec![container("i", false, &[("m", 3)])],
            containers: vec![container("a", false, &[("m", 1)])],
            ..OriginalResources::default()
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
            ..OriginalResources::default()
        });
        assert_eq!(expanded.requests.len(), 2);
        assert_eq!(expanded.uses["early"], ["device-0", "device-1"], "runs before the sidecar starts");
        assert_eq!(expanded.uses["side"], ["device-0"]);
        assert_eq!(expanded.uses["late"], ["device-1"]);
        assert_eq!(expanded.uses["a"], ["device-1"]);
    }
}
