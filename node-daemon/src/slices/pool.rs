//! From devices to the ResourceSlices of the node's pool. Pure.

use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kerf_crds::names::DRIVER;

use super::build::comparable;

/// The API's limit on devices with taints in one slice.
pub const MAX_DEVICES: usize = 64;

/// The API's limit on an object's name.
const MAX_NAME: usize = 253;

/// The node's pool, which has the node's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Name of the Node.
    pub node: String,
    /// UID of the Node: its slices go when it does.
    pub node_uid: String,
}

impl Pool {
    /// The slices with these devices. No device at all is one empty slice: it says that the driver is here.
    pub fn slices(&self, devices: &[Device], generation: i64) -> Vec<ResourceSlice> {
        let chunks: Vec<&[Device]> =
            if devices.is_empty() { vec![&[]] } else { devices.chunks(MAX_DEVICES).collect() };
        let count = chunks.len() as i64;
        chunks
            .into_iter()
            .enumerate()
            .map(|(index, devices)| self.slice(index, count, devices, generation))
            .collect()
    }

    fn slice(&self, index: usize, count: i64, devices: &[Device], generation: i64) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(self.name(index)),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Node".to_owned(),
                    name: self.node.clone(),
                    uid: self.node_uid.clone(),
                    controller: Some(true),
                    block_owner_deletion: None,
                }]),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: DRIVER.to_owned(),
                node_name: Some(self.node.clone()),
                pool: ResourcePool { generation, name: self.node.clone(), resource_slice_count: count },
                devices: Some(devices.to_vec()).filter(|devices| !devices.is_empty()),
                ..ResourceSliceSpec::default()
            },
        }
    }

    fn name(&self, index: usize) -> String {
        let name = format!("{}-{DRIVER}-{index}", self.node);
        if name.len() <= MAX_NAME { name } else { format!("{}-{DRIVER}-{index}", self.node_uid) }
    }
}

/// Whether the slices that the API server has are not those that it should have. Generations, versions and what the
/// server adds do not count, but all must be of one generation.
pub fn differ(live: &[&ResourceSlice], wanted: &[ResourceSlice]) -> bool {
    live.len() != wanted.len()
        || live.iter().any(|slice| slice.spec.pool.generation != live[0].spec.pool.generation)
        || wanted.iter().any(|wanted| {
            !live.iter().any(|live| live.metadata.name == wanted.metadata.name && same(live, wanted))
        })
}

fn same(live: &ResourceSlice, wanted: &ResourceSlice) -> bool {
    let spec = |slice: &ResourceSlice| ResourceSliceSpec {
        devices: Some(comparable(slice.spec.devices.as_deref().unwrap_or_default())),
        pool: ResourcePool { generation: 0, ..slice.spec.pool.clone() },
        ..slice.spec.clone()
    };
    let owners = |slice: &ResourceSlice| -> Vec<String> {
        slice.metadata.owner_references.iter().flatten().map(|owner| owner.uid.clone()).collect()
    };
    spec(live) == spec(wanted) && owners(live) == owners(wanted)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::DeviceTaint;

    use super::*;

    fn pool() -> Pool {
        Pool { node: "n".into(), node_uid: "u".into() }
    }

    fn devices(count: usize) -> Vec<Device> {
        (0..count).map(|index| Device { name: format!("d{index}"), ..Device::default() }).collect()
    }

    #[test]
    fn many_devices_are_split_and_every_slice_knows_how_many_there_are() {
        let slices = pool().slices(&devices(130), 7);
        let sizes: Vec<_> = slices.iter().map(|s| s.spec.devices.as_ref().unwrap().len()).collect();
        assert_eq!(sizes, [64, 64, 2]);
        for slice in &slices {
            assert_eq!((slice.spec.pool.generation, slice.spec.pool.resource_slice_count), (7, 3));
            assert_eq!(slice.metadata.owner_references.as_ref().unwrap()[0].uid, "u");
        }
        assert_eq!(pool().slices(&[], 1).len(), 1);
        let long = Pool { node: "n".repeat(250), node_uid: "u".into() };
        assert!(long.slices(&[], 1)[0].metadata.name.as_ref().unwrap().len() <= MAX_NAME);
    }

    #[test]
    fn only_what_matters_is_a_difference() {
        let tainted = |time_added| {
            let taint = DeviceTaint { key: "k".into(), time_added, ..DeviceTaint::default() };
            let mut devices = devices(65);
            devices[64].taints = Some(vec![taint]);
            devices
        };
        let wanted = pool().slices(&tainted(None), 1);
        // The server adds when a taint came.
        let added = serde_json::from_str("\"2026-11-30T04:30:32Z\"").unwrap();
        let live = pool().slices(&tainted(Some(added)), 4);
        let refs = |slices: &'static [ResourceSlice]| slices.iter().collect::<Vec<_>>();
        let leak = |slices: Vec<ResourceSlice>| refs(Box::leak(slices.into_boxed_slice()));
        assert!(!differ(&leak(live.clone()), &wanted), "another generation");
        assert!(differ(&leak(live[..1].to_vec()), &wanted), "one was deleted");
        assert!(differ(&[], &wanted));
        let mut edited = live.clone();
        edited[1].spec.devices.as_mut().unwrap()[0].name = "x".into();
        assert!(differ(&leak(edited), &wanted));
        let mut half = live.clone();
        half[1].spec.pool.generation = 5;
        assert!(differ(&leak(half), &wanted), "a write was interrupted");
        let mut orphan = live;
        orphan[0].metadata.owner_references = None;
        assert!(differ(&leak(orphan), &wanted), "made before the Node was made again");
    }
}
