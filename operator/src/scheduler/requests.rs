//! What a pod asks of Kerf: which of its claims are to be served, and how.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, DeviceSelector, ResourceClaim};
use kerf_crds::conditions::pod_reason;
use kerf_crds::names;
use kerf_planner::snapshot::{NodeRequirement, Operator, Request};

use super::claims;
use super::needs::{Memo, Reader};
use super::selectors::Selectors;
use super::snapshot::Board;
use crate::cache::{PodInfo, World};

/// What a pod asks of Kerf.
#[derive(Debug)]
pub enum Asks {
    /// Nothing.
    Nothing,
    /// It cannot be planned yet, or never: the reason and a sentence.
    Cannot(&'static str, String),
    /// All its claims are allocated.
    Allocated,
    /// Devices.
    For(Box<Wanted>),
}

/// A pod's request and whose claims it is made of.
#[derive(Debug, Default)]
pub struct Wanted {
    /// What the planner is asked.
    pub request: Request,
    /// Device need's name → claim and the name of the request in it.
    pub parts: BTreeMap<String, (String, String)>,
}

/// Whether the class is about Kerf's devices: one of Kerf's own, or one whose selectors name Kerf's driver.
pub fn class_is_ours(world: &World, name: &str) -> bool {
    if name == names::GPU_CLASS || name == names::MIG_CLASS || name.ends_with(".kerf.dev") {
        return true;
    }
    world.classes.get(name).is_some_and(|class| {
        expressions(class_selectors(class)).any(|expression| expression.contains(names::DRIVER))
    })
}

/// The class's selectors.
pub(super) fn class_selectors(class: &DeviceClass) -> Option<&Vec<DeviceSelector>> {
    class.spec.as_ref()?.selectors.as_ref()
}

/// The CEL expressions of selectors.
pub(super) fn expressions(selectors: Option<&Vec<DeviceSelector>>) -> impl Iterator<Item = &str> {
    selectors.into_iter().flatten().filter_map(|selector| Some(selector.cel.as_ref()?.expression.as_str()))
}

/// Names of all classes that a claim mentions.
pub(super) fn classes(devices: &DeviceClaim) -> impl Iterator<Item = &str> {
    devices.requests.iter().flatten().flat_map(|request| {
        let exactly = request.exactly.iter().map(|exactly| exactly.device_class_name.as_str());
        let available = request.first_available.iter().flatten().map(|sub| sub.device_class_name.as_str());
        exactly.chain(available)
    })
}

/// Whether the claim asks for any of Kerf's devices.
pub fn claim_is_for_kerf(world: &World, claim: &ResourceClaim) -> bool {
    claims::devices(claim).is_some_and(|devices| classes(devices).any(|class| class_is_ours(world, class)))
}

/// Whether the pod asks for any of Kerf's devices, as far as its claims exist.
pub fn is_for_kerf(world: &World, pod: &PodInfo) -> bool {
    let claims = pod.detail.iter().flat_map(|detail| &detail.claims).filter_map(|claim| claim.claim.as_ref());
    let found = || claims.filter_map(|name| world.claim(&pod.namespace, name));
    pod.gated() || pod.own_claim().is_some() || found().any(|claim| claim_is_for_kerf(world, claim))
}

/// Whether every claim of the pod that is Kerf's business is allocated.
pub fn all_allocated(world: &World, pod: &PodInfo) -> bool {
    let claims = pod.detail.iter().flat_map(|detail| &detail.claims);
    claims.into_iter().all(|claim| {
        claim
            .claim
            .as_ref()
            .and_then(|name| world.claim(&pod.namespace, name))
            .is_some_and(|claim| claims::allocation(claim).is_some() || !claim_is_for_kerf(world, claim))
    })
}

/// Reads what the pod asks for.
pub fn read(world: &World, board: &Board, selectors: &Selectors, memo: &Memo, pod: &PodInfo) -> Asks {
    read_with(world, board, selectors, memo, pod, false)
}

/// The same as if none of the pod's claims were allocated: to see whether there is a better place.
pub fn read_afresh(world: &World, board: &Board, selectors: &Selectors, memo: &Memo, pod: &PodInfo) -> Asks {
    read_with(world, board, selectors, memo, pod, true)
}

fn read_with(
    world: &World,
    board: &Board,
    selectors: &Selectors,
    memo: &Memo,
    pod: &PodInfo,
    afresh: bool,
) -> Asks {
    let Some(detail) = &pod.detail else { return Asks::Nothing };
    let bad = |message: String| Asks::Cannot(pod_reason::BAD_CLAIM, message);
    let mut reader =
        Reader { world, board, selectors, wanted: Wanted::default(), several: false, pinned: None, memo };
    let mut ours = false;
    let mut asked = false;
    // Claims to read: those that exist, and the one that will be made from the annotation.
    let mut claims: Vec<(String, Arc<ResourceClaim>)> = Vec::new();
    let mut missing = Vec::new();
    let made_here = pod.own_claim();
    if let Some(original) = &detail.original {
        ours = true;
        match (original, made_here) {
            (Err(error), _) => return bad(error.clone()),
            (Ok(_), None) => {
                return bad(format!(
                    "the annotation {} is there, but no entry {:?} in spec.resourceClaims names a claim",
                    names::ORIGINAL_RESOURCES,
                    names::POD_CLAIM
                ));
            }
            (Ok(original), Some(name)) => {
                let allocated = world.claim(&pod.namespace, name).is_some_and(|claim| {
                    claims::belongs_to(claim, pod) && claims::allocation(claim).is_some()
                });
                if !allocated || afresh {
                    claims.push((name.to_owned(), Arc::new(claims::from_annotation(pod, name, original))));
                }
                asked = true;
            }
        }
    }
    let mut read: BTreeSet<&str> = BTreeSet::new();
    for claim in &detail.claims {
        if claim.claim.is_some() && claim.claim.as_deref() == made_here {
            continue;
        }
        let Some(name) = &claim.claim else {
            missing.push(format!("the claim for {:?} is not made from its template yet", claim.name));
            continue;
        };
        if !read.insert(name) {
            continue;
        }
        match world.claim(&pod.namespace, name) {
            None => missing.push(format!("ResourceClaim {name:?} does not exist")),
            Some(found) if claim_is_for_kerf(world, found) => {
                ours = true;
                asked = true;
                if let Some(other) = claims::sole_consumer(found).filter(|uid| *uid != pod.uid) {
                    return bad(format!(
                        "ResourceClaim {name:?} is a share of a GPU and already another pod's (UID {other}): kubelet lets \
                         Kerf limit only one pod of a claim; give each pod a claim of its own"
                    ));
                }
                if let Some(allocation) = claims::allocation(found).filter(|_| !afresh) {
                    // Shared with a pod that was first: this one has to go where it is.
                    reader.pinned = claims::node_of(allocation).or(reader.pinned);
                } else if found.metadata.deletion_timestamp.is_some() {
                    return Asks::Cannot(
                        pod_reason::BAD_CLAIM,
                        format!("ResourceClaim {name:?} is being deleted"),
                    );
                } else {
                    claims.push((name.clone(), Arc::clone(found)));
                }
            }
            Some(_) => {}
        }
    }
    if !ours && !pod.gated() {
        return Asks::Nothing;
    }
    if !asked && missing.is_empty() {
        return bad(format!(
            "the gate {} is on the pod, but nothing in it asks Kerf for devices",
            names::GATE
        ));
    }
    if let Some(missing) = missing.into_iter().next() {
        return Asks::Cannot(pod_reason::BAD_CLAIM, missing);
    }
    if claims.is_empty() {
        return Asks::Allocated;
    }
    reader.several = claims.len() > 1;
    for (name, claim) in &claims {
        if let Err(message) = reader.claim(name, claim) {
            return bad(message);
        }
    }
    let mut wanted = reader.wanted;
    let asks_for_share =
        wanted.request.devices.iter().flat_map(|need| &need.alternatives).any(|want| !want.shares.is_empty());
    if let Some(field) = detail.host_access.as_ref().filter(|_| asks_for_share) {
        return bad(format!(
            "{field}: what a share of a GPU may have cannot be kept from such a pod; leave this out, or ask for a whole GPU or \
             a MIG instance"
        ));
    }
    wanted.request.id = pod.id();
    wanted.request.priority = pod.priority;
    wanted.request.pod = detail.needs.clone();
    wanted.request.pod.milli = pod.milli.clone();
    if let Some(node) = reader.pinned {
        pin(&mut wanted.request, &node);
    }
    Asks::For(Box::new(wanted))
}

/// Requires the node in every alternative of the affinity.
fn pin(request: &mut Request, node: &str) {
    let requirement = NodeRequirement {
        key: NodeRequirement::NAME.into(),
        operator: Operator::In,
        values: vec![node.to_owned()],
    };
    if request.pod.affinity.is_empty() {
        request.pod.affinity.push(Vec::new());
    }
    for term in &mut request.pod.affinity {
        term.push(requirement.clone());
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
