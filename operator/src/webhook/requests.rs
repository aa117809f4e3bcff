//! What a pod's containers ask for in extended resources that Kerf serves.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{api::core::v1::Container, apimachinery::pkg::api::resource::Quantity};
use kerf_crds::{
    names::{GPU_RESOURCE, MIG_RESOURCE_PREFIX, SHARE_COMPUTE, SHARE_GPUS, SHARE_MEMORY},
    requests::{ContainerRequest, LEAST_SHARE_MEMORY, MAX_DEVICES, ShareSize, too_many},
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
        Ok(is_mig_resource(resource) || is_of_share(resource))
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

/// Whether a resource says something of a share.
pub(super) fn is_of_share(resource: &str) -> bool {
    [SHARE_MEMORY, SHARE_COMPUTE, SHARE_GPUS].contains(&resource)
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
    let mut request =
        ContainerRequest { name: container.name.clone(), sidecar, resources: BTreeMap::new(), share: None };
    let mut of_share: BTreeMap<&str, (&Quantity, String)> = BTreeMap::new();
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
        if is_of_share(resource) {
            if requests.get(resource).is_some_and(|request| count(&request.0) != count(&limit.0)) {
                return Err(Denial::invalid(
                    field("requests"),
                    format!(
                        "the request of {} differs from the limit of {}: a share is all of its limit; make both the same \
                         or leave the request out",
                        requests[resource].0, limit.0
                    ),
                ));
            }
            of_share.insert(resource, (limit, field("limits")));
            continue;
        }
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
    request.share = share(&of_share, path)?;
    Ok(request)
}

/// The share that a container's limits ask for, if any.
fn share(limits: &BTreeMap<&str, (&Quantity, String)>, path: &str) -> Result<Option<ShareSize>, Denial> {
    let Some((_, field)) = limits.values().next() else { return Ok(None) };
    let number = |resource: &str, example: &str| {
        let Some((quantity, field)) = limits.get(resource) else {
            return Err(Denial::invalid(
                field.clone(),
                format!(
                    "a share of a GPU needs memory and compute: add `{resource}: {example}` to {path}.resources.limits"
                ),
            ));
        };
        let text = &quantity.0;
        count(text).map_err(|error| {
            let what = match error {
                NoCount::Malformed => "no quantity",
                NoCount::Negative => "negative",
                NoCount::Fractional => "not a whole number",
                NoCount::Huge => "more than any GPU has",
            };
            Denial::invalid(field.clone(), format!("'{text}' is {what}; write a number such as {example}"))
        })
    };
    let invalid = |resource: &str, message: String| {
        let field = limits.get(resource).map_or(field, |(_, field)| field);
        Err(Denial::invalid(field.clone(), message))
    };
    let gpus = if limits.contains_key(SHARE_GPUS) { number(SHARE_GPUS, "1")? } else { 1 };
    let (memory_bytes, compute) = (number(SHARE_MEMORY, "12Gi")?, number(SHARE_COMPUTE, "30")?);
    if gpus != 1 {
        return invalid(
            SHARE_GPUS,
            format!(
                "a container can have a share of one GPU, not of {gpus}: its processes find one MPS server only, and each \
                 GPU has its own. Leave it out, or give other containers or pods shares of their own"
            ),
        );
    }
    if memory_bytes < LEAST_SHARE_MEMORY {
        return invalid(
            SHARE_MEMORY,
            format!(
                "{memory_bytes} bytes are too few for a CUDA context; the unit is bytes: write `12Gi` for 12 GiB (the least \
                 is {}Mi)",
                LEAST_SHARE_MEMORY >> 20
            ),
        );
    }
    if !(1..=100).contains(&compute) {
        return invalid(
            SHARE_COMPUTE,
            format!("{compute} is not between 1 and 100: the unit is percent of one GPU's multiprocessors"),
        );
    }
    Ok(Some(ShareSize { memory_bytes, compute_percent: compute as u32 }))
}

fn devices(quantity: &Quantity, field: impl Fn() -> String) -> Result<u32, Denial> {
    let text = &quantity.0;
    let message = match count(text) {
        Ok(count) if count <= MAX_DEVICES as u64 => return Ok(count as u32),
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
pub(super) fn strip<'a>(container: &mut Container, resources: impl IntoIterator<Item = &'a str>) {
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
