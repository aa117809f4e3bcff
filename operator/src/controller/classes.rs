//! DeviceClasses: one per kind of device, and one per profile that some GPU has reported, with the extended resource
//! that stands for it, so that ResourceQuotas on `nvidia.com/mig-…` count claims of Kerf's too.
//!
//! A class that is there stays when the last GPU with its profile goes: claims may name it.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CELDeviceSelector, DeviceClass, DeviceClassSpec, DeviceSelector};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_crds::device::attribute;
use kerf_crds::names;
use kerf_crds::partition_policy::WholeGpus;
use kerf_crds::profile;

use crate::cache::World;

/// Classes that are missing, or not as they should be.
pub fn missing(world: &World) -> Vec<DeviceClass> {
    let wanted = wanted(world);
    wanted
        .into_iter()
        .filter(|class| {
            let there = class.metadata.name.as_deref().and_then(|name| world.classes.get(name));
            let spec = |class: &DeviceClass| {
                class.spec.clone().map(|spec| (spec.extended_resource_name, spec.selectors))
            };
            there.is_none_or(|there| spec(there) != spec(class))
        })
        .collect()
}

fn wanted(world: &World) -> Vec<DeviceClass> {
    // `nvidia.com/gpu` is Kerf's to count only while some policy serves it: with the name on the class, kube-scheduler
    // takes plain pods that ask for it for Kerf's, where no device plugin has it.
    let serves = world.policies.iter().any(|policy| policy.spec.whole_gpus == WholeGpus::Serve);
    let mut classes = BTreeMap::from([
        (
            names::GPU_CLASS.to_owned(),
            class(
                names::GPU_CLASS.to_owned(),
                selector(&[(attribute::TYPE, "gpu")]),
                serves.then(|| names::GPU_RESOURCE.to_owned()),
            ),
        ),
        (
            names::MIG_CLASS.to_owned(),
            class(names::MIG_CLASS.to_owned(), selector(&[(attribute::TYPE, "mig")]), None),
        ),
        (
            names::SHARE_CLASS.to_owned(),
            class(names::SHARE_CLASS.to_owned(), selector(&[(attribute::TYPE, "share")]), None),
        ),
    ]);
    let reported = world.gpu_nodes.iter().filter_map(|node| node.status.as_ref());
    for found in reported.flat_map(|status| &status.geometries).flat_map(|geometry| &geometry.profiles) {
        let name = names::profile_class(&found.name);
        classes.entry(name.clone()).or_insert_with(|| {
            class(
                name,
                selector(&[(attribute::TYPE, "mig"), (attribute::PROFILE, &found.name)]),
                Some(profile::resource_name(&found.name)),
            )
        });
    }
    classes.into_values().collect()
}

fn selector(attributes: &[(&str, &str)]) -> String {
    let mut expression = format!("device.driver == {:?}", names::DRIVER);
    for (name, value) in attributes {
        expression.push_str(&format!(" && device.attributes[{:?}].{name} == {value:?}", names::DRIVER));
    }
    expression
}

fn class(name: String, expression: String, resource: Option<String>) -> DeviceClass {
    DeviceClass {
        metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
        spec: Some(DeviceClassSpec {
            selectors: Some(vec![DeviceSelector { cel: Some(CELDeviceSelector { expression }) }]),
            extended_resource_name: resource,
            ..DeviceClassSpec::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kerf_crds::gpu_node::{Geometry, GpuNodeStatus, Profile};
    use kerf_crds::{GpuNode, PartitionPolicy, PartitionPolicySpec};

    fn names_of(classes: &[DeviceClass]) -> Vec<(&str, Option<&str>)> {
        classes
            .iter()
            .map(|class| {
                (
                    class.metadata.name.as_deref().unwrap(),
                    class.spec.as_ref().unwrap().extended_resource_name.as_deref(),
                )
            })
            .collect()
    }

    #[test]
    fn every_reported_profile_has_a_class_and_what_is_right_is_left_alone() {
        let mut world = World::default();
        let mut node = GpuNode::new("n", Default::default());
        node.status = Some(GpuNodeStatus {
            geometries: vec![Geometry {
                profiles: vec![Profile { name: "1g.10gb+me".into(), ..Profile::default() }],
                ..Geometry::default()
            }],
            ..GpuNodeStatus::default()
        });
        world.gpu_nodes.watch_applied(node);
        let first = missing(&world);
        assert_eq!(
            names_of(&first),
            [
                ("gpu.kerf.dev", None),
                ("mig-1g.10gb.me.kerf.dev", Some("nvidia.com/mig-1g.10gb.me")),
                ("mig.kerf.dev", None),
                ("share.kerf.dev", None)
            ]
        );
        for class in first {
            world.classes.watch_applied(class);
        }
        assert!(missing(&world).is_empty());
        let serve = PartitionPolicySpec { whole_gpus: WholeGpus::Serve, ..Default::default() };
        world.policies.watch_applied(PartitionPolicy::new("p", serve));
        assert_eq!(names_of(&missing(&world)), [("gpu.kerf.dev", Some("nvidia.com/gpu"))]);
    }
}
