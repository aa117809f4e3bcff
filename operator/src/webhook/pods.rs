//! A pod that is created: its GPU requests become one claim, by a name that is free to be made later.

use std::collections::{BTreeMap, BTreeSet};

use json_patch::Patch;
use k8s_openapi::api::core::v1::{
    Container, Pod, PodResourceClaim, PodSchedulingGate, PodSpec, ResourceClaim, ResourceRequirements,
};
use kerf_crds::{
    gpu_node::Isolation,
    names::{
        GATE, GPU_RESOURCE, ISOLATION, ORIGINAL_RESOURCES, POD_CLAIM, POD_OPT_OUT, SHARE_COMPUTE, SHARE_GPUS,
        SHARE_MEMORY,
    },
    requests::{ContainerRequest, MAX_DEVICES, OriginalResources, expand, too_many},
};

use crate::cache::host_access;

use super::{
    denial::Denial,
    requests::{Served, is_sidecar, of_container, strip},
};

/// Annotation of the API object that stands for a static pod.
const MIRROR_POD: &str = "kubernetes.io/config.mirror";

/// Longest part of a pod's name in its claim's name, so that the whole is a DNS label.
const BASE_LENGTH: usize = 45;

/// Hex digits of the request's UID in a claim's name: 48 random bits.
const HASH_LENGTH: usize = 12;

/// What is known beside the pod.
#[derive(Clone, Debug, Default)]
pub struct AdmissionContext {
    /// UID of the admission request: random, so a claim's name made from it cannot be guessed before.
    pub request_uid: String,
    /// Whether some policy serves `nvidia.com/gpu`; `None` while the policies have not been read.
    pub whole_gpus: Option<bool>,
    /// Extended resources of all profiles that the cluster's GPUs have (`nvidia.com/mig-1g.10gb`); empty while none is
    /// known.
    pub known_resources: BTreeSet<String>,
}

/// Changes to a pod, none if it is to stay as it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mutation {
    pub patch: Patch,
    /// For the user's terminal.
    pub warnings: Vec<String>,
}

/// Replaces the extended resources that a new pod asks for by requests of one claim, and gates it.
///
/// A pod that asks for none, has opted out or is a mirror pod stays as it is; so does one that was already changed, unless
/// another webhook has added to it since.
///
/// # Errors
/// The pod can never run as written: the answer names the field and the remedy.
pub fn mutate(pod: &Pod, context: &AdmissionContext) -> Result<Mutation, Denial> {
    let Some(spec) = pod.spec.as_ref().filter(|_| !is_left_alone(pod)) else {
        return Ok(Mutation::default());
    };
    let earlier = Earlier::read(pod)?;
    let served = Served { whole_gpus: context.whole_gpus };
    let original = OriginalResources {
        init_containers: collect(spec.init_containers.iter().flatten(), "initContainers", served, &earlier)?,
        containers: collect(spec.containers.iter(), "containers", served, &earlier)?,
        isolation: None,
    };
    let original = OriginalResources { isolation: isolation(pod, &original)?, ..original };
    let expanded = expand(&original);
    if expanded.requests.is_empty() {
        return Ok(Mutation::default());
    }
    refuse_what_cannot_be_planned(spec, &earlier, expanded.requests.len())?;
    if let Some(field) = host_access(spec)
        .filter(|_| wants_share(&original) && original.isolation != Some(Isolation::Hardware))
    {
        return Err(Denial::invalid(
            field,
            "what a share of a GPU may have cannot be kept from a pod that shares the host's processes or is privileged; \
             leave this out, or ask for a whole GPU or a MIG instance",
        ));
    }

    let mut changed = pod.clone();
    let annotation = serde_json::to_string(&original)
        .map_err(|error| Denial::invalid("spec.containers", format!("cannot be written as JSON: {error}")))?;
    changed.metadata.annotations.get_or_insert_default().insert(ORIGINAL_RESOURCES.to_owned(), annotation);
    let spec = changed.spec.get_or_insert_default();
    let requests = original.init_containers.iter().chain(&original.containers);
    let requests: BTreeMap<&str, &ContainerRequest> = requests.map(|one| (one.name.as_str(), one)).collect();
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        if let Some(request) = requests.get(container.name.as_str()) {
            let of_share = request.share.is_some().then_some([SHARE_MEMORY, SHARE_COMPUTE, SHARE_GPUS]);
            let resources = request.resources.keys().map(String::as_str);
            strip(container, resources.chain(of_share.into_iter().flatten()));
        }
        use_devices(container, expanded.uses.get(&container.name).map_or(&[], Vec::as_slice));
    }
    refer_to_claim(spec, claim_name(pod, &earlier, &context.request_uid));
    let gates = spec.scheduling_gates.get_or_insert_default();
    if !gates.iter().any(|gate| gate.name == GATE) {
        gates.push(PodSchedulingGate { name: GATE.to_owned() });
    }
    Ok(Mutation { patch: difference(pod, &changed)?, warnings: unknown_profiles(&original, context) })
}

/// The JSON patch that leads from one pod to the other.
pub(super) fn difference(from: &Pod, to: &Pod) -> Result<Patch, Denial> {
    let value = |pod: &Pod| {
        serde_json::to_value(pod)
            .map_err(|error| Denial::invalid("spec", format!("cannot be written as JSON: {error}")))
    };
    Ok(json_patch::diff(&value(from)?, &value(to)?))
}

/// Whether the pod is none of Kerf's business, whatever it asks for.
pub(super) fn is_left_alone(pod: &Pod) -> bool {
    let opted_out = pod.metadata.labels.as_ref().and_then(|labels| labels.get(POD_OPT_OUT));
    opted_out.is_some_and(|value| value == "true")
        || pod.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(MIRROR_POD))
}

/// What an earlier call has left on the pod: in the same admission (another webhook made the API server ask again), or on
/// a pod that this one was copied from.
struct Earlier {
    /// What was asked for then, by container.
    requests: BTreeMap<String, ContainerRequest>,
    claim_name: Option<String>,
    /// There is a claim entry of Kerf's name that Kerf did not make, at this path.
    clash: Option<String>,
}

impl Earlier {
    fn read(pod: &Pod) -> Result<Self, Denial> {
        let mut earlier = Self { requests: BTreeMap::new(), claim_name: None, clash: None };
        let spec = pod.spec.as_ref();
        let entries = || spec.and_then(|spec| spec.resource_claims.as_ref()).into_iter().flatten();
        let Some(index) = entries().position(|entry| entry.name == POD_CLAIM) else {
            // Without the entry an annotation is a leftover, and so would be a container's reference.
            return Ok(earlier);
        };
        let annotation = pod.metadata.annotations.as_ref().and_then(|all| all.get(ORIGINAL_RESOURCES));
        earlier.claim_name = entries().nth(index).and_then(|entry| entry.resource_claim_name.clone());
        let (Some(annotation), true) = (annotation, earlier.claim_name.is_some()) else {
            earlier.clash = Some(format!("spec.resourceClaims[{index}].name"));
            return Ok(earlier);
        };
        let original: OriginalResources = serde_json::from_str(annotation).map_err(|error| {
            Denial::invalid(
                format!("metadata.annotations[{ORIGINAL_RESOURCES}]"),
                format!(
                    "Kerf writes this annotation itself, and this is not what it writes ({error}); remove the annotation \
                     and the entry '{POD_CLAIM}' of spec.resourceClaims, and ask for GPUs in the containers' limits"
                ),
            )
        })?;
        let requests = original.init_containers.into_iter().chain(original.containers);
        earlier.requests = requests.map(|request| (request.name.clone(), request)).collect();
        Ok(earlier)
    }
}

fn wants_share(original: &OriginalResources) -> bool {
    original.init_containers.iter().chain(&original.containers).any(|one| one.share.is_some())
}

/// What the pod's annotation says of its shares.
fn isolation(pod: &Pod, original: &OriginalResources) -> Result<Option<Isolation>, Denial> {
    let text = pod.metadata.annotations.as_ref().and_then(|all| all.get(ISOLATION));
    let Some(text) = text.filter(|_| wants_share(original)) else { return Ok(None) };
    let known = [Isolation::Process, Isolation::Driver, Isolation::Hardware];
    known.into_iter().find(|isolation| isolation.word() == text).map(Some).ok_or_else(|| {
        Denial::invalid(
            format!("metadata.annotations[{ISOLATION}]"),
            format!("'{text}' is none of hardware, driver and process, from the strongest isolation to the weakest"),
        )
    })
}

/// What each container asks for, those left out that ask for nothing.
fn collect<'a>(
    containers: impl Iterator<Item = &'a Container>,
    list: &str,
    served: Served,
    earlier: &Earlier,
) -> Result<Vec<ContainerRequest>, Denial> {
    let mut all = Vec::new();
    for (index, container) in containers.enumerate() {
        let path = format!("spec.{list}[{index}]");
        let sidecar = list == "initContainers" && is_sidecar(container);
        let mut request = of_container(container, &path, sidecar, served)?;
        let asked_then = earlier.requests.get(&container.name);
        request.share = request.share.or(asked_then.and_then(|then| then.share));
        for (resource, count) in asked_then.iter().flat_map(|then| &then.resources) {
            if *count as usize > MAX_DEVICES {
                return Err(Denial::invalid(
                    format!("metadata.annotations[{ORIGINAL_RESOURCES}]"),
                    too_many(count),
                ));
            }
            request.resources.entry(resource.clone()).or_insert(*count);
        }
        if !request.is_empty() {
            all.push(request);
        }
    }
    Ok(all)
}

fn refuse_what_cannot_be_planned(spec: &PodSpec, earlier: &Earlier, devices: usize) -> Result<(), Denial> {
    if let Some(node) = spec.node_name.as_ref().filter(|node| !node.is_empty()) {
        return Err(Denial::invalid(
            "spec.nodeName",
            format!(
                "the pod is bound to '{node}' from the start, so nothing can be planned for it: remove spec.nodeName and \
                 select the node with nodeSelector `kubernetes.io/hostname: {node}`"
            ),
        ));
    }
    if devices > MAX_DEVICES {
        return Err(Denial::invalid("spec.containers", too_many(devices)));
    }
    let reference = |(list, index, container): (&str, usize, &Container)| {
        let claims = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
        let entry = claims.into_iter().flatten().position(|claim| claim.name == POD_CLAIM);
        entry.map(|entry| format!("spec.{list}[{index}].resources.claims[{entry}].name"))
    };
    let clash = earlier.clash.clone().or_else(|| {
        // A reference without an entry is the author's mistake; Kerf's own comes with the entry.
        let init = spec.init_containers.iter().flatten().enumerate().map(|(i, c)| ("initContainers", i, c));
        let apps = spec.containers.iter().enumerate().map(|(i, c)| ("containers", i, c));
        if earlier.claim_name.is_some() { None } else { init.chain(apps).find_map(reference) }
    });
    match clash {
        Some(field) => Err(Denial::invalid(
            field,
            format!(
                "'{POD_CLAIM}' is the name under which Kerf adds the claim for the pod's GPUs; give this claim another name"
            ),
        )),
        None => Ok(()),
    }
}

/// Makes the container's references to Kerf's claim exactly these requests.
fn use_devices(container: &mut Container, requests: &[String]) {
    let current = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
    let ours = current.into_iter().flatten().filter(|claim| claim.name == POD_CLAIM);
    if ours.map(|claim| claim.request.as_deref()).eq(requests.iter().map(|request| Some(request.as_str()))) {
        return;
    }
    let resources = container.resources.get_or_insert_with(ResourceRequirements::default);
    let claims = resources.claims.get_or_insert_default();
    claims.retain(|claim| claim.name != POD_CLAIM);
    claims.extend(
        requests
            .iter()
            .map(|request| ResourceClaim { name: POD_CLAIM.to_owned(), request: Some(request.clone()) }),
    );
}

fn refer_to_claim(spec: &mut PodSpec, claim_name: String) {
    let entries = spec.resource_claims.get_or_insert_default();
    match entries.iter_mut().find(|entry| entry.name == POD_CLAIM) {
        Some(entry) => entry.resource_claim_name = Some(claim_name),
        None => entries.push(PodResourceClaim {
            name: POD_CLAIM.to_owned(),
            resource_claim_name: Some(claim_name),
            resource_claim_template_name: None,
        }),
    }
}

/// `<pod's name or generateName>-kerf-<part of the request's UID>`.
///
/// The name of an earlier call in the same admission is kept. On a copy of another pod it is not: the gate of a pod that
/// was planned is gone, and a pod of another name does not fit the claim's.
fn claim_name(pod: &Pod, earlier: &Earlier, request_uid: &str) -> String {
    let metadata = &pod.metadata;
    let name = metadata.name.as_ref().filter(|name| !name.is_empty()).or(metadata.generate_name.as_ref());
    let base: String = name.map_or("pod", String::as_str).chars().take(BASE_LENGTH).collect();
    let base = base.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    let prefix = format!("{base}-kerf-");
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
    let gated = gates.into_iter().flatten().any(|gate| gate.name == GATE);
    match &earlier.claim_name {
        Some(kept) if gated && kept.starts_with(&prefix) => kept.clone(),
        _ => {
            let hash: String =
                request_uid.chars().filter(char::is_ascii_hexdigit).take(HASH_LENGTH).collect();
            format!("{prefix}{}", hash.to_ascii_lowercase())
        }
    }
}

fn unknown_profiles(original: &OriginalResources, context: &AdmissionContext) -> Vec<String> {
    if context.known_resources.is_empty() {
        return Vec::new();
    }
    let asked =
        original.init_containers.iter().chain(&original.containers).flat_map(|one| one.resources.keys());
    let asked: BTreeSet<&String> = asked.filter(|resource| *resource != GPU_RESOURCE).collect();
    let unknown = asked.into_iter().filter(|resource| !context.known_resources.contains(*resource));
    unknown
        .map(|resource| {
            format!("no GPU of this cluster has the profile of {resource} at present; the pod will wait")
        })
        .collect()
}

#[cfg(test)]
#[path = "pods_tests.rs"]
mod tests;
