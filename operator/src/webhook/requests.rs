//! What a pod's containers ask for in extended resources that Kerf serves.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{api::core::v1::Container, apimachinery::pkg::api::resource::Quantity};
use kerf_crds::{
    names::{GPU_RESOURCE, MIG_RESOURCE_PREFIX},
    requests::{ContainerRequest, MAX_DEVICES, too_many},
};

use super::{
    denial::Denial,
    quantity::{NoCount, count},
};

/// Which extended resources Kerf serves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served {
    /// `nvidia.com/gpu` too. `None`: not known yet.
    pub(super) whole_gpus: Option<bool>,
}

impl Served {
    fn has(self, resource: &str, field: impl Fn() -> String) -> Result<bool, Denial> {
        if resource == GPU_RESOURCE {
            return self.whole_gpus.ok_or_else(|| {
                Denial::not_yet(
                    field(),
                    "Kerf's operator has just started and does not know yet whether a PartitionPolicy serves whole GPUs; \
                     create the pod again in a few seconds",
                )
            });
        }
        Ok(is_mig_resource(resource))
    }
}

/// Whether a resource stands for a MIG profile. A name that Kubernetes does not allow is none: left in place, it is
/// refused by the API server's own validation.
pub(super) fn is_mig_resource(resource: &str) -> bool {
    let Some(profile) = resource.strip_prefix(MIG_RESOURCE_PREFIX) else { return false };
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    profile.len() <= 59
        && profile.chars().all(inner)
        && profile.starts_with(|c: char| c.is_ascii_alphanumeric())
        && profile.ends_with(|c: char| c.is_ascii_alphanumeric())
}

/// What one container asks for; `path` is that of the container, `spec.containers[0]`.
///
/// # Errors
/// A quantity is no count of devices, a request has no limit or another than the limit, or policies are not known yet.
pub(super) fn of_container(
    container: &Container,
    path: &str,
    sidecar: bool,
    served: Served,
) -> Result<ContainerRequest, Denial> {
    let mut request = ContainerRequest { name: container.name.clone(), sidecar, resources: BTreeMap::new() };
    let Some(resources) = &container.resources else { return Ok(request) };
    let none = BTreeMap::new();
    let limits = resources.limits.as_ref().unwrap_or(&none);
    let requests = resources.requests.as_ref().unwrap_or(&none);
    for resource in limits.keys().chain(requests.keys()).collect::<BTreeSet<_>>() {
        let field = |list: &str| format!("{path}.resources.{list}[{resource}]");
        if !served.has(resource, || field("limits"))? {
            continue;
        }
        let Some(limit) = limits.get(resource) else {
            return Err(Denial::invalid(
                field("requests"),
                format!(
                    "an extended resource needs a limit: write it under limits as `{resource}: {}`",
                    requests[resource].0
                ),
            ));
        };
        let devices = devices(limit, || field("limits"))?;
        if let Some(request) = requests.get(resource)
            && self::devices(request, || field("requests"))? != devices
        {
            return Err(Denial::invalid(
                field("requests"),
                format!(
                    "the request of {} differs from the limit of {}: devices cannot be overcommitted; make both the \
                     same or leave the request out",
                    request.0, limit.0
                ),
            ));
        }
        request.resources.insert(resource.clone(), devices);
    }
    Ok(request)
}

fn devices(quantity: &Quantity, field: impl Fn() -> String) -> Result<u32, Denial> {
    let text = &quantity.0;
    let message = match count(text) {
        Ok(count) if count as usize <= MAX_DEVICES => return Ok(count),
        Ok(_) | Err(NoCount::Huge) => too_many(text),
        Err(NoCount::Fractional) => format!(
            "'{text}' is not a whole number: a MIG instance or GPU is handed out whole; ask for 1 of a smaller profile"
        ),
        Err(NoCount::Negative) => {
            format!("'{text}' is negative; ask for 1 or more, or leave the resource out")
        }
        Err(NoCount::Malformed) => format!("'{text}' is no quantity; write a whole number such as 1"),
    };
    Err(Denial::invalid(field(), message))
}

/// Takes the named resources out of limits and requests; maps that become empty go.
pub(super) fn strip<'a>(container: &mut Container, resources: impl IntoIterator<Item = &'a String>) {
    let Some(requirements) = &mut container.resources else { return };
    for resource in resources {
        for list in [&mut requirements.limits, &mut requirements.requests] {
            if let Some(map) = list
                && map.remove(resource).is_some()
                && map.is_empty()
            {
                *list = None;
            }
        }
    }
}

/// Whether an init container is a sidecar: it goes on running beside the app containers.
pub(super) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}
