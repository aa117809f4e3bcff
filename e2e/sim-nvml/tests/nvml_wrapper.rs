//! The Rust binding (nvml-wrapper) as a client, on a model that no product has: what holds there is in no table.

mod common;

use common::TestNode;
use kerf_sim::{Driver, GpuSpec, MigUuids, Model, NodeSpec};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

fn open(test: &TestNode) -> Nvml {
    Nvml::builder().lib_path(test.node.library().as_os_str()).init().unwrap()
}

#[test]
fn an_invented_model_is_discovered_like_any_other() {
    let test = TestNode::new(vec![GpuSpec::new("invented-5x10").in_mig_mode()]);
    let nvml = open(&test);
    let gpu = nvml.device_by_index(0).unwrap();
    assert_eq!(gpu.name().unwrap(), "Imaginary Q5");
    assert_eq!(gpu.mig_device_count().unwrap(), 5);
    let model = Model::named("invented-5x10").unwrap();
    let profiles = model.mig.unwrap().profiles;
    let mut seen = Vec::new();
    for enumerator in 0..0x12 {
        match gpu.profile_info(enumerator) {
            Ok(info) => seen.push((info.id, info.slice_count, info.instance_count, info.memory_size_mb)),
            Err(NvmlError::NotSupported) => {}
            Err(error) => panic!("profile {enumerator}: {error}"),
        }
    }
    let mut wanted: Vec<_> = profiles.iter().map(|p| (p.id, p.slices, p.max, p.memory_mib)).collect();
    seen.sort();
    wanted.sort();
    assert_eq!(seen, wanted);
    assert!(matches!(gpu.profile_info(0x12), Err(NvmlError::InvalidArg)));
}

#[test]
fn mig_devices_of_mixed_models_are_found_by_uuid_and_lead_back_to_their_gpu() {
    let test = TestNode::new(vec![
        GpuSpec { half_swapped: true, ..GpuSpec::new("a100-80").in_mig_mode() },
        GpuSpec::new("invented-5x10").in_mig_mode(),
    ]);
    assert_eq!(test.node.create_instance(0, "3g.40gb", Some(0), true).unwrap(), 2, "halves are swapped");
    test.node.create_instance(1, "q2-wide", Some(7), true).unwrap();
    let nvml = open(&test);
    for instance in test.node.instances().unwrap() {
        let device = nvml.device_by_uuid(instance.compute[0].1.as_str()).unwrap();
        assert!(device.mig_is_mig_device_handle().unwrap());
        assert_eq!(device.mig_parent_device().unwrap().uuid().unwrap(), instance.gpu_uuid);
        assert!(device.name().unwrap().ends_with(&format!("MIG {}", instance.profile)));
        assert_eq!(device.index().unwrap(), 0);
        assert!(device.running_compute_processes().unwrap().is_empty());
    }
}

#[test]
fn an_old_driver_has_uuids_of_the_old_form() {
    let driver = Driver { version: "460.106.00".into(), ..Driver::default() };
    let gpus = vec![GpuSpec::new("a100-40").in_mig_mode()];
    let test = TestNode::of(NodeSpec { driver, ..NodeSpec::new("n", gpus) });
    let gi = test.node.create_instance(0, "1g.5gb", None, true).unwrap();
    let instance = test.node.instances().unwrap().remove(0);
    assert_eq!(instance.compute[0].1, format!("MIG-{}/{gi}/0", instance.gpu_uuid));
    let nvml = open(&test);
    assert!(nvml.device_by_uuid(instance.compute[0].1.as_str()).unwrap().mig_is_mig_device_handle().unwrap());
}

#[test]
fn a_uuid_can_stay_or_change_when_an_instance_is_made_anew() {
    for (uuids, stays) in [(MigUuids::Stable, true), (MigUuids::Fresh, false)] {
        let gpus = vec![GpuSpec::new("a30-24").in_mig_mode()];
        let test = TestNode::of(NodeSpec { mig_uuids: uuids, ..NodeSpec::new("n", gpus) });
        let make = || {
            let gi = test.node.create_instance(0, "1g.6gb", Some(2), true).unwrap();
            let instance = test.node.instances().unwrap().remove(0);
            test.node.remove_instance(0, gi).unwrap();
            instance
        };
        let (first, second) = (make(), make());
        assert_eq!(first.compute[0].1 == second.compute[0].1, stays, "{uuids:?}");
        assert_ne!(first.nth, second.nth, "the node can tell them apart");
    }
}
