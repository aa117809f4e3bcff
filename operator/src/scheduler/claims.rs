//! Shapes of claims: the one made from a pod's annotation, allocations, and what they say.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, CapacityRequirements, DeviceAllocationResult, DeviceClaim,
    DeviceRequest, DeviceRequestAllocationResult, DeviceSelector, DeviceToleration, ExactDeviceRequest,
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::GpuNode;
use kerf_crds::device::{attribute, capacity};
use kerf_crds::gpu_node::{Gpu, Isolation, Owner, Partition, WantedInstance, WantedShare};
use kerf_crds::names;
use kerf_crds::quantity::{milli_quantity, quantity};
use kerf_crds::requests::{Asked, OriginalResources, ShareSize, expand};
use kube::ResourceExt;

use super::entries::isolation;
use crate::cache::PodInfo;
use crate::cache::quantity::milli;

/// The DeviceClass that stands for an extended resource.
pub fn class_of(resource: &str) -> String {
    match resource.strip_prefix(names::MIG_RESOURCE_PREFIX) {
        Some(profile) => kerf_crds::names::profile_class(profile),
        None => names::GPU_CLASS.to_owned(),
    }
}

/// What a request for a share says. With hardware isolation it is one for a MIG instance that has as much.
fn share(size: &ShareSize, isolation: Option<Isolation>) -> ExactDeviceRequest {
    let capacity = BTreeMap::from([
        (capacity::MEMORY.to_owned(), quantity(size.memory_bytes)),
        (capacity::COMPUTE.to_owned(), quantity(size.compute_percent.into())),
    ]);
    let driver = || DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: format!(
                "device.attributes[\"{}\"].{} == \"{}\"",
                names::DRIVER,
                attribute::ISOLATION,
                Isolation::Driver.word()
            ),
        }),
    };
    ExactDeviceRequest {
        device_class_name: match isolation {
            Some(Isolation::Hardware) => names::MIG_CLASS.to_owned(),
            _ => names::SHARE_CLASS.to_owned(),
        },
        selectors: (isolation == Some(Isolation::Driver)).then(|| vec![driver()]),
        capacity: Some(CapacityRequirements { requests: Some(capacity) }),
        ..ExactDeviceRequest::default()
    }
}

/// The claim of a pod whose extended resources the webhook has noted.
pub fn from_annotation(pod: &PodInfo, name: &str, original: &OriginalResources) -> ResourceClaim {
    let requests = expand(original)
        .requests
        .into_iter()
        .map(|request| DeviceRequest {
            name: request.name,
            exactly: Some(ExactDeviceRequest {
                allocation_mode: Some("ExactCount".into()),
                count: Some(1),
                ..match &request.asked {
                    Asked::Resource(resource) => ExactDeviceRequest {
                        device_class_name: class_of(resource),
                        ..ExactDeviceRequest::default()
                    },
                    Asked::Share(size) => share(size, original.isolation),
                }
            }),
            first_available: None,
        })
        .collect();
    ResourceClaim {
        metadata: ObjectMeta {
            namespace: Some(pod.namespace.clone()),
            name: Some(name.to_owned()),
            finalizers: Some(vec![names::CLAIM_FINALIZER.to_owned()]),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Pod".into(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                controller: Some(true),
                // True would need rights on pods/finalizers where OwnerReferencesPermissionEnforcement is on.
                block_owner_deletion: Some(false),
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(ResourceClaimSpec {
            devices: Some(DeviceClaim { requests: Some(requests), ..DeviceClaim::default() }),
        }),
        status: None,
    }
}

/// Whether the claim is the pod's by its controller reference.
pub fn belongs_to(claim: &ResourceClaim, pod: &PodInfo) -> bool {
    owner_uid(claim) == Some(&pod.uid)
}

/// UID of the claim's controller.
pub fn owner_uid(claim: &ResourceClaim) -> Option<&str> {
    let owners = claim.metadata.owner_references.iter().flatten();
    owners.filter(|owner| owner.controller.unwrap_or_default()).map(|owner| owner.uid.as_str()).next()
}

/// Whether the claim asks for what it should.
pub fn asks_for_the_same(claim: &ResourceClaim, wanted: &ResourceClaim) -> bool {
    let shape = |claim: &ResourceClaim| -> Vec<(String, Option<ExactDeviceRequest>, bool)> {
        let devices = devices(claim).cloned().unwrap_or_default();
        devices
            .requests
            .unwrap_or_default()
            .into_iter()
            .map(|request| (request.name, request.exactly, request.first_available.is_some()))
            .collect()
    };
    shape(claim) == shape(wanted)
}

/// What the claim asks for.
pub fn devices(claim: &ResourceClaim) -> Option<&DeviceClaim> {
    claim.spec.as_ref()?.devices.as_ref()
}

/// The claim's allocation, if it has one.
pub fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

/// UID of the pod that a claim with shares is reserved for: it can have no other.
pub fn sole_consumer(claim: &ResourceClaim) -> Option<&str> {
    results(allocation(claim)?).find(|result| result.share_id.is_some())?;
    let reserved = claim.status.as_ref()?.reserved_for.as_ref()?;
    reserved.iter().find(|consumer| consumer.resource == "pods").map(|consumer| consumer.uid.as_str())
}

/// Results of Kerf's driver.
pub fn results(allocation: &AllocationResult) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let all = allocation.devices.iter().filter_map(|devices| devices.results.as_ref()).flatten();
    all.filter(|result| result.driver == names::DRIVER)
}

/// The node that an allocation of Kerf's is on: its pool.
pub fn node_of(allocation: &AllocationResult) -> Option<String> {
    pool(allocation).map(str::to_owned)
}

/// See [`node_of`].
pub fn pool(allocation: &AllocationResult) -> Option<&str> {
    results(allocation).next().map(|result| result.pool.as_str())
}

/// Whether the reservation is Kerf's hold.
pub fn is_hold(consumer: &ResourceClaimConsumerReference) -> bool {
    consumer.api_group.as_deref() == Some(names::GROUP) && consumer.resource == "gpunodes"
}

/// The reservation that keeps kube-scheduler from throwing the allocation away.
pub fn hold(node: &GpuNode) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        api_group: Some(names::GROUP.into()),
        resource: "gpunodes".into(),
        name: node.name_any(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
    }
}

/// The reservation for a pod.
pub fn reservation(pod: &PodInfo) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        api_group: None,
        resource: "pods".into(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
    }
}

/// Name of the DRA device that a partition is, or is a part of; `None` if the node's report does not have its GPU or
/// profile.
pub fn device_of(node: &GpuNode, partition: &Partition) -> Option<String> {
    let status = node.status.as_ref()?;
    let gpu = status.gpus.iter().find(|gpu| gpu.uuid == partition.gpu)?;
    let carrier = match &partition.instance {
        None => gpu.name.clone(),
        Some(wanted) => {
            let profile = status.geometry_of(gpu)?.profile(&wanted.profile)?;
            names::instance_device(&gpu.name, profile.id, wanted.placement.start)
        }
    };
    Some(if partition.share.is_some() { names::share_device(&carrier) } else { carrier })
}

/// The partition that a result of an allocation stands for, owned by `owner`.
pub fn partition_of(
    node: &GpuNode,
    result: &DeviceRequestAllocationResult,
    owner: Owner,
) -> Option<Partition> {
    let status = node.status.as_ref()?;
    for gpu in &status.gpus {
        let Some(rest) = result.device.strip_prefix(&gpu.name) else { continue };
        let of_carrier = rest.strip_suffix(&names::share_device(""));
        let carrier = of_carrier.unwrap_or(rest);
        let instance = match carrier.strip_prefix("-mig-").and_then(|rest| rest.split_once('-')) {
            None if carrier.is_empty() => None,
            None => continue,
            Some((id, start)) => {
                let (id, start): (u32, u32) = (id.parse().ok()?, start.parse().ok()?);
                let profile = status.geometry_of(gpu)?.profiles.iter().find(|profile| profile.id == id)?;
                Some(WantedInstance {
                    profile: profile.name.clone(),
                    placement: kerf_crds::gpu_node::Placement { start, size: profile.size },
                })
            }
        };
        let share = match of_carrier {
            None => None,
            Some(_) => Some(share_of(gpu, instance.as_ref(), result)?),
        };
        return Some(Partition { gpu: gpu.uuid.clone(), instance, share, owner });
    }
    None
}

/// The share that a result says it is.
fn share_of(
    gpu: &Gpu,
    instance: Option<&WantedInstance>,
    result: &DeviceRequestAllocationResult,
) -> Option<WantedShare> {
    let consumed = |name: &str| milli(result.consumed_capacity.as_ref()?.get(name)?);
    Some(WantedShare {
        id: result.share_id.clone()?,
        memory_bytes: u64::try_from(consumed(capacity::MEMORY)? / 1000).ok()?,
        compute_milli: u32::try_from(consumed(capacity::COMPUTE)?).ok()?,
        isolation: isolation(gpu, instance),
    })
}

/// A device in an allocation: its request, its name, and which share of it.
pub type Given = (String, String, Option<String>);

/// What an allocation says.
pub fn given(allocation: &AllocationResult) -> BTreeSet<Given> {
    results(allocation)
        .map(|result| (result.request.clone(), result.device.clone(), result.share_id.clone()))
        .collect()
}

/// What the allocation of a placement must say.
pub fn expected<'d>(
    node: &GpuNode,
    devices: impl IntoIterator<Item = &'d Partition>,
) -> Option<BTreeSet<Given>> {
    let owned = |(request, device, share): (&str, String, Option<&str>)| {
        (request.to_owned(), device, share.map(str::to_owned))
    };
    devices.into_iter().map(|partition| expected_of(node, partition).map(owned)).collect()
}

fn expected_of<'d>(node: &GpuNode, partition: &'d Partition) -> Option<(&'d str, String, Option<&'d str>)> {
    let Owner::Claim(owner) = &partition.owner else { return None };
    let share = partition.share.as_ref().map(|share| share.id.as_str());
    Some((&owner.request, device_of(node, partition)?, share))
}

/// Whether the allocation says what is expected, as [`given`] and [`expected`] would tell; `None` if the node's report
/// does not have all of the devices.
pub fn gives<'d>(
    allocation: &AllocationResult,
    node: &GpuNode,
    devices: impl IntoIterator<Item = &'d Partition>,
) -> Option<bool> {
    let expected: Option<Vec<_>> =
        devices.into_iter().map(|partition| expected_of(node, partition)).collect();
    let expected = expected?;
    let is = |result: &DeviceRequestAllocationResult, one: &(&str, String, Option<&str>)| {
        let (request, device, share) = one;
        result.request == *request && result.device == *device && result.share_id.as_deref() == *share
    };
    let all_given = expected.iter().all(|one| results(allocation).any(|result| is(result, one)));
    Some(all_given && results(allocation).all(|result| expected.iter().any(|one| is(result, one))))
}

/// The allocation of a placement. `allocationTimestamp` must be there: kube-scheduler would add it, and cannot.
pub fn allocate<'d>(
    claim: &ResourceClaim,
    node: &GpuNode,
    devices: impl IntoIterator<Item = &'d Partition>,
    now: Timestamp,
) -> Option<AllocationResult> {
    let devices: Vec<&Partition> = devices.into_iter().collect();
    let name = node.name_any();
    let size = |id: &Option<String>| {
        let shares = devices.iter().filter_map(|partition| partition.share.as_ref());
        let share = shares.into_iter().find(|share| Some(&share.id) == id.as_ref())?;
        Some(BTreeMap::from([
            (capacity::MEMORY.to_owned(), quantity(share.memory_bytes)),
            (capacity::COMPUTE.to_owned(), milli_quantity(share.compute_milli.into())),
        ]))
    };
    let results = expected(node, devices.iter().copied())?
        .into_iter()
        .map(|(request, device, share_id)| DeviceRequestAllocationResult {
            tolerations: tolerations(claim, &request),
            request,
            driver: names::DRIVER.into(),
            pool: name.clone(),
            device,
            consumed_capacity: size(&share_id),
            share_id,
            ..DeviceRequestAllocationResult::default()
        })
        .collect();
    Some(AllocationResult {
        allocation_timestamp: Some(Time(now)),
        devices: Some(DeviceAllocationResult { config: config(claim), results: Some(results) }),
        // Exactly one term with one field: only then does the API server let the node's daemon write the claim's
        // device status with its node-bound token.
        node_selector: Some(NodeSelector {
            node_selector_terms: vec![NodeSelectorTerm {
                match_fields: Some(vec![NodeSelectorRequirement {
                    key: "metadata.name".into(),
                    operator: "In".into(),
                    values: Some(vec![name]),
                }]),
                match_expressions: None,
            }],
        }),
    })
}

/// The tolerations that the claim's request states; the taint eviction controller reads them from the allocation.
fn tolerations(claim: &ResourceClaim, request: &str) -> Option<Vec<DeviceToleration>> {
    let (main, sub) = request.split_once('/').map_or((request, None), |(main, sub)| (main, Some(sub)));
    let requests = devices(claim)?.requests.as_ref()?;
    let found = requests.iter().find(|candidate| candidate.name == main)?;
    match sub {
        None => found.exactly.as_ref()?.tolerations.clone(),
        Some(sub) => found
            .first_available
            .as_ref()?
            .iter()
            .find(|candidate| candidate.name == sub)?
            .tolerations
            .clone(),
    }
}

/// The claim's own configuration, as Kubernetes' allocator copies it.
fn config(
    claim: &ResourceClaim,
) -> Option<Vec<k8s_openapi::api::resource::v1::DeviceAllocationConfiguration>> {
    let config = devices(claim)?.config.as_ref()?;
    let copied: Vec<_> = config
        .iter()
        .map(|config| k8s_openapi::api::resource::v1::DeviceAllocationConfiguration {
            opaque: config.opaque.clone(),
            requests: config.requests.clone(),
            source: "FromClaim".into(),
        })
        .collect();
    (!copied.is_empty()).then_some(copied)
}
