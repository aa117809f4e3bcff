//! A pod that is updated: `kubectl apply` of the manifest that it was created from brings the extended resources back,
//! which Kerf took out at creation. A pod's resources cannot change afterwards, so they are taken out again.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use kerf_crds::{
    names::{ORIGINAL_RESOURCES, POD_CLAIM, SHARE_COMPUTE, SHARE_GPUS, SHARE_MEMORY},
    requests::{ContainerRequest, OriginalResources},
};

use super::{
    denial::Denial,
    pods::{Mutation, difference, is_left_alone},
    quantity::count,
    requests::{is_mig_resource, is_of_share, strip},
};

/// Takes out what the pod asked for at creation, where an update has put it back with the same counts.
///
/// # Errors
/// The update asks for other GPUs than the pod has had since its creation.
pub fn restore(new: &Pod, old: &Pod) -> Result<Mutation, Denial> {
    let Some(original) = original(old).filter(|_| !is_left_alone(old)) else {
        return Ok(Mutation::default());
    };
    let mut changed = new.clone();
    let Some(spec) = &mut changed.spec else { return Ok(Mutation::default()) };
    for (list, containers) in [
        ("initContainers", spec.init_containers.get_or_insert_default()),
        ("containers", &mut spec.containers),
    ] {
        for (index, container) in containers.iter_mut().enumerate() {
            let asked = original.get(&container.name);
            let returned = returned(container, asked, &format!("spec.{list}[{index}]"))?;
            strip(container, returned.iter().map(String::as_str));
        }
    }
    if new.spec.as_ref().is_some_and(|spec| spec.init_containers.is_none()) {
        spec.init_containers = None;
    }
    Ok(Mutation { patch: difference(new, &changed)?, warnings: Vec::new() })
}

/// What a pod that Kerf handles asked for, by container and resource.
fn original(pod: &Pod) -> Option<BTreeMap<String, BTreeMap<String, u64>>> {
    let entries = pod.spec.as_ref()?.resource_claims.as_ref()?;
    entries.iter().find(|entry| entry.name == POD_CLAIM)?;
    let annotation = pod.metadata.annotations.as_ref()?.get(ORIGINAL_RESOURCES)?;
    let original: OriginalResources = serde_json::from_str(annotation).ok()?;
    let requests = original.init_containers.into_iter().chain(original.containers);
    let limits = |request: &ContainerRequest| {
        let devices = request.resources.iter().map(|(name, count)| (name.clone(), u64::from(*count)));
        let of_share = request.share.iter().flat_map(|size| {
            [
                (SHARE_MEMORY.to_owned(), size.memory_bytes),
                (SHARE_COMPUTE.to_owned(), size.compute_percent.into()),
                (SHARE_GPUS.to_owned(), 1),
            ]
        });
        devices.chain(of_share).collect()
    };
    Some(requests.map(|request| (request.name.clone(), limits(&request))).collect())
}

/// The container's extended resources that stand for devices of the pod's claim.
fn returned(
    container: &Container,
    asked: Option<&BTreeMap<String, u64>>,
    path: &str,
) -> Result<Vec<String>, Denial> {
    let mut returned = Vec::new();
    let Some(resources) = &container.resources else { return Ok(returned) };
    for (list, map) in [("limits", &resources.limits), ("requests", &resources.requests)] {
        for (resource, quantity) in map.iter().flatten() {
            let before = asked.and_then(|asked| asked.get(resource));
            if before.is_none() && !is_mig_resource(resource) && !is_of_share(resource) {
                continue;
            }
            if before.is_none_or(|before| count(&quantity.0) != Ok(*before)) {
                return Err(Denial::invalid(
                    format!("{path}.resources.{list}[{resource}]"),
                    format!(
                        "a pod's GPUs cannot change after its creation: this container has {} of it, not {}; delete the \
                         pod and create it again",
                        before.copied().unwrap_or(0),
                        quantity.0
                    ),
                ));
            }
            returned.push(resource.clone());
        }
    }
    Ok(returned)
}

#[cfg(test)]
#[path = "update_tests.rs"]
mod tests;
