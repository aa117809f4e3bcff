use super::*;
use crate::inventory::ComputeInstance;
use crate::plugin::testing::*;

/// A claim that is all right, and what a case makes wrong of it.
struct Case {
    claim: ResourceClaim,
    spec: GpuNodeSpec,
    inventory: Inventory,
    prepared: PreparedClaims,
}

fn good() -> Case {
    Case {
        claim: claim("u", &[("r", DEVICE_1G)]),
        spec: spec(vec![partition("u", "r", Some(("1g.10gb", 4, 1)))]),
        inventory: inventory(),
        prepared: PreparedClaims::new(),
    }
}

impl Case {
    fn authorize(&self) -> Result<Vec<PreparedDevice>, PrepareError> {
        self.with_pod().map(|(devices, _)| devices)
    }

    fn with_pod(&self) -> Result<(Vec<PreparedDevice>, Option<PodReference>), PrepareError> {
        authorize(&self.claim, &reference("u"), NODE, &self.spec, &self.inventory, &self.prepared)
    }

    fn result(&mut self) -> &mut DeviceRequestAllocationResult {
        let allocation = self.claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
        &mut allocation.devices.as_mut().unwrap().results.as_mut().unwrap()[0]
    }

    fn owner(&mut self) -> &mut ClaimOwner {
        match &mut self.spec.partitions[0].owner {
            Owner::Claim(owner) => owner,
            _ => unreachable!("the builder makes claims"),
        }
    }

    fn instance(&mut self) -> &mut Instance {
        &mut self.inventory.gpus[0].instances[1]
    }
}

fn why(reason: &str, message: &str) -> Reason {
    Reason { reason: reason.into(), message: message.into() }
}

#[test]
fn what_the_spec_plans_is_handed_out() {
    let devices = good().authorize().unwrap();
    assert_eq!(devices, prepared_claim("u", &inventory()).devices.map_cdi_away());

    let mut several = good();
    several.claim = claim("u", &[("a", DEVICE_1G), ("b", DEVICE_3G), ("whole", "gpu-11111111")]);
    several.spec = spec(vec![
        partition("u", "whole", None),
        partition("u", "b", Some(("3g.40gb", 0, 4))),
        partition("u", "a", Some(("1g.10gb", 4, 1))),
    ]);
    let devices = several.authorize().unwrap();
    let found: Vec<_> = devices.iter().map(|d| (d.request.as_str(), d.uuid.as_str())).collect();
    assert_eq!(found, [("a", "MIG-9"), ("b", "MIG-2"), ("whole", GPU1)]);
    assert_eq!(devices[2].key.placement, None);
}

trait MapCdiAway {
    fn map_cdi_away(self) -> Vec<PreparedDevice>;
}

impl MapCdiAway for Vec<PreparedDevice> {
    fn map_cdi_away(mut self) -> Vec<PreparedDevice> {
        self.iter_mut().for_each(|device| device.cdi.clear());
        self
    }
}

#[test]
fn a_shared_claim_is_for_any_pod_that_it_is_reserved_for() {
    let mut case = good();
    case.owner().pod_uid = "one that is over".into();
    assert_eq!(case.authorize().map(|devices| devices.len()), Ok(1));
}

#[test]
fn two_devices_of_one_request_are_told_apart_by_name() {
    let mut case = good();
    case.inventory.gpus[0].instances.push(instance("1g.10gb", 19, 5, 1, 10));
    case.claim = claim("u", &[("r", "gpu-00000000-mig-19-5"), ("r", DEVICE_1G)]);
    case.spec = spec(vec![
        partition("u", "r", Some(("1g.10gb", 4, 1))),
        partition("u", "r", Some(("1g.10gb", 5, 1))),
    ]);
    let devices = case.authorize().unwrap();
    assert_eq!((devices[0].uuid.as_str(), devices[1].uuid.as_str()), ("MIG-10", "MIG-9"));
}

#[test]
fn other_drivers_results_are_not_ours_to_judge() {
    let mut case = good();
    let mut other = case.result().clone();
    other.driver = "nic.example.com".into();
    other.pool = "elsewhere".into();
    let allocation = case.claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
    allocation.devices.as_mut().unwrap().results.as_mut().unwrap().push(other);
    assert_eq!(case.authorize().unwrap().len(), 1);
}

/// What is wrong, whether waiting may help, and words that the message must have: what, where, what would be right.
#[test]
fn everything_else_is_refused_with_the_reason() {
    type Break = fn(&mut Case);
    let cases: &[(&str, Break, bool, &[&str])] = &[
        (
            "another claim of the same name",
            |c| c.claim.metadata.uid = Some("new".into()),
            false,
            &["ns/claim-u", "UID new", "created anew"],
        ),
        (
            "not allocated",
            |c| c.claim.status.as_mut().unwrap().allocation = None,
            true,
            &["ns/claim-u", "not allocated"],
        ),
        ("no status at all", |c| c.claim.status = None, true, &["not allocated"]),
        (
            "allocated by another driver only",
            |c| c.result().driver = "gpu.example.com".into(),
            true,
            &["not allocated"],
        ),
        ("another node", |c| c.result().pool = "m".into(), false, &["pool 'm'", "node 'n'"]),
        (
            "not in the spec",
            |c| c.spec.partitions.clear(),
            true,
            &["GpuNode 'n' has no partition", "request 'r'"],
        ),
        ("another namespace", |c| c.owner().namespace = "other".into(), true, &["has no partition"]),
        ("another claim", |c| c.owner().name = "other".into(), true, &["has no partition"]),
        ("another request", |c| c.owner().request = "other".into(), true, &["has no partition"]),
        (
            "another device",
            |c| c.result().device = DEVICE_3G.into(),
            true,
            &["names device 'gpu-00000000-mig-9-0'", "plans gpu-00000000-mig-19-4"],
        ),
        (
            "a device name of another profile at the same place",
            |c| c.result().device = "gpu-00000000-mig-20-4".into(),
            true,
            &["plans gpu-00000000-mig-19-4"],
        ),
        (
            "only held, reserved for no pod",
            |c| _ = c.claim.status.as_mut().unwrap().reserved_for.as_mut().unwrap().remove(0),
            true,
            &["ns/claim-u", "reserved for no pod"],
        ),
        (
            "a GPU that is not there",
            |c| {
                c.spec.partitions[0].gpu = "GPU-9".into();
            },
            true,
            &["GPU-9, which this node does not have"],
        ),
        (
            "a profile that is not there",
            |c| c.spec.partitions[0].instance.as_mut().unwrap().profile = "9g.1gb".into(),
            true,
            &["9g.1gb", "does not offer"],
        ),
        (
            "unmanaged",
            |c| c.inventory.gpus[0].unmanaged = Some(why("MigManager", "an acting mig-manager")),
            false,
            &["not managed by Kerf", "an acting mig-manager"],
        ),
        (
            "lost GPU",
            |c| c.inventory.gpus[0].unhealthy = Some(why("GpuLost", "fell off the bus")),
            false,
            &["failed", "fell off the bus", DEVICE_1G],
        ),
        (
            "failed instance",
            |c| c.instance().unhealthy = Some(why("Xid94", "contained error")),
            false,
            &["failed", "contained error"],
        ),
        (
            "NVML away",
            |c| c.inventory.unavailable = Some(why("DriverUnavailable", "no library")),
            true,
            &["NVML is not available", "no library"],
        ),
        ("foreign", |c| c.instance().foreign = true, false, &["not made by Kerf"]),
        ("not made yet", |c| _ = c.inventory.gpus[0].instances.pop(), true, &["does not exist yet", GPU0]),
        (
            "another profile in its place",
            |c| c.instance().profile = "1g.10gb+me".into(),
            true,
            &["does not exist yet"],
        ),
        (
            "no compute instance yet",
            |c| c.instance().compute_instances.clear(),
            true,
            &["compute instance does not exist yet"],
        ),
        (
            "two compute instances",
            |c| c.instance().compute_instances.push(ComputeInstance::default()),
            true,
            &["compute instance"],
        ),
        (
            "prepared for another claim",
            |c| {
                let held = prepared_claim("v", &c.inventory);
                c.prepared.insert("v".into(), held);
            },
            true,
            &["still prepared for claim ns/claim-v (UID v)", "Unprepare"],
        ),
        (
            "a whole GPU is prepared for another claim",
            |c| {
                let mut held = prepared_claim("v", &c.inventory);
                held.devices[0].key.placement = None;
                c.prepared.insert("v".into(), held);
            },
            true,
            &["still prepared for claim ns/claim-v"],
        ),
        (
            "a process of somebody",
            |c| {
                c.instance().processes =
                    vec![Process { pid: 77, comm: "python".into(), ..Process::default() }]
            },
            true,
            &["still used by python (pid 77)"],
        ),
    ];
    for (what, break_it, may_pass, words) in cases {
        let mut case = good();
        break_it(&mut case);
        let error = case.authorize().expect_err(what);
        let message = error.to_string();
        assert_eq!(error.may_pass(), *may_pass, "{what}: {message}");
        for word in *words {
            assert!(message.contains(word), "{what}: '{word}' is not in: {message}");
        }
    }
}

#[test]
fn a_whole_gpu_must_be_out_of_mig_mode() {
    let mut case = good();
    case.claim = claim("u", &[("r", "gpu-11111111")]);
    case.spec = spec(vec![partition("u", "r", None)]);
    assert!(case.authorize().is_ok());
    case.inventory.gpus[1].mig.enabled = true;
    let error = case.authorize().unwrap_err();
    assert!(error.may_pass() && error.to_string().contains("MIG mode"), "{error}");
}

#[test]
fn one_bad_device_refuses_the_claim() {
    let mut case = good();
    case.claim = claim("u", &[("r", DEVICE_1G), ("s", DEVICE_3G)]);
    assert!(matches!(case.authorize(), Err(PrepareError::NotPlanned { request, .. }) if request == "s"));
}

#[test]
fn a_prepared_claim_needs_no_plan_but_its_devices() {
    let mut inventory = inventory();
    let record = prepared_claim("u", &inventory);
    let confirmed =
        |spec: Option<&GpuNodeSpec>, inventory: &Inventory| confirm(&record, NODE, spec, inventory);
    // Its own processes are on it, the spec is not known or has forgotten it: it stays prepared.
    inventory.gpus[0].instances[1].processes = vec![Process::default()];
    assert_eq!(confirmed(None, &inventory).unwrap(), record.devices);
    assert_eq!(confirmed(Some(&spec(vec![])), &inventory).unwrap(), record.devices);
    let own = spec(vec![partition("u", "r", Some(("1g.10gb", 4, 1)))]);
    assert_eq!(confirmed(Some(&own), &inventory).unwrap(), record.devices);

    // Rebuilt after a reboot, under another UUID.
    inventory.gpus[0].instances[1].compute_instances[0].uuid = "MIG-new".into();
    assert_eq!(confirmed(None, &inventory).unwrap()[0].uuid, "MIG-new");
    inventory.gpus[0].instances[1].foreign = true;
    assert!(matches!(confirmed(None, &inventory), Err(PrepareError::Foreign { .. })));

    // Not rebuilt yet; another profile in the place.
    inventory.gpus[0].instances[1].profile_id = 20;
    assert!(confirmed(None, &inventory).unwrap_err().may_pass());
    inventory.gpus[0].instances.pop();
    assert!(confirmed(None, &inventory).unwrap_err().may_pass());

    // The place was given to somebody else while the node was down.
    let passed_on = spec(vec![partition("v", "r", Some(("3g.40gb", 4, 4)))]);
    let error = confirmed(Some(&passed_on), &inventory).unwrap_err();
    assert!(error.to_string().contains("ns/claim-v"), "{error}");
}

const SHARE: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

/// A claim with a share of GPU 1 that is in force.
fn shared() -> Case {
    let share =
        WantedShare { id: SHARE.into(), memory_bytes: 8 << 30, compute_milli: 30_000, ..Default::default() };
    let mut case = good();
    case.claim = claim("u", &[("r", "gpu-11111111-share")]);
    case.result().share_id = Some(SHARE.into());
    case.spec = spec(vec![Partition { share: Some(share), ..partition("u", "r", None) }]);
    let in_force = kerf_crds::gpu_node::Share { id: SHARE.into(), ..Default::default() };
    case.inventory.gpus[1].shares = vec![in_force];
    case
}

#[test]
fn a_share_in_force_is_handed_out_beside_others_of_its_gpu() {
    let mut case = shared();
    let other = Prepared {
        claim: reference("other"),
        pod: None,
        devices: vec![PreparedDevice {
            key: DeviceKey::share(GPU1, "other"),
            ..case.authorize().unwrap().remove(0)
        }],
    };
    case.prepared.insert("other".into(), other);
    // Clients of the other share.
    case.inventory.gpus[1].processes = vec![Process { pid: 7, ..Process::default() }];
    let (devices, pod) = case.with_pod().unwrap();
    assert_eq!(devices[0].key, DeviceKey::share(GPU1, SHARE));
    assert_eq!(devices[0].share.as_ref().unwrap().memory_bytes, 8 << 30);
    assert_eq!(pod.unwrap().uid, "pod-u");
    let record = Prepared { claim: reference("u"), pod: None, devices };
    assert!(confirm(&record, NODE, Some(&case.spec), &case.inventory).is_ok());
}

#[test]
fn a_share_is_refused_that_is_not_in_force_or_not_one_pods() {
    type Change = fn(&mut Case);
    let cases: [(&str, bool, Change); 7] = [
        ("OtherDevice", true, |case| case.result().share_id = Some("another".into())),
        ("OtherDevice", true, |case| case.result().share_id = None),
        ("NotInForce", true, |case| case.inventory.gpus[1].shares.clear()),
        ("NotInForce", true, |case| {
            case.inventory.gpus[1].shares[0].problem = Some(why("MpsNotReady", "starting"));
        }),
        ("NotThere", true, |case| case.inventory.gpus[1].mig.enabled = true),
        ("SharedShare", false, |case| {
            let reserved = case.claim.status.as_mut().unwrap().reserved_for.as_mut().unwrap();
            let mut second = reserved[0].clone();
            second.name = "second".into();
            reserved.push(second);
        }),
        ("SeveralShares", false, |case| {
            let allocation = case.claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
            let results = allocation.devices.as_mut().unwrap().results.as_mut().unwrap();
            let mut second = results[0].clone();
            second.device = "gpu-00000000-share".into();
            results.push(second);
        }),
    ];
    for (what, passes, change) in cases {
        let mut case = shared();
        change(&mut case);
        let error = case.authorize().expect_err(what);
        assert!(format!("{error:?}").starts_with(what), "{error:?} is not {what}");
        assert_eq!(error.may_pass(), passes, "{error}");
    }
}

#[test]
fn a_whole_gpu_waits_until_nothing_is_left_of_what_carried_its_shares() {
    let mut case = good();
    case.claim = claim("u", &[("r", "gpu-11111111")]);
    case.spec = spec(vec![partition("u", "r", None)]);
    case.inventory.gpus[1].mps.there = true;
    let error = case.authorize().unwrap_err();
    assert!(matches!(error, PrepareError::CarriesShares { .. }) && error.may_pass(), "{error}");
    case.inventory.gpus[1].mps.there = false;
    assert_eq!(case.authorize().unwrap().len(), 1);
    let mut beside = shared();
    beside.inventory.gpus[1].mps.there = true;
    assert!(beside.authorize().is_ok(), "its shares do not wait");
}

/// A claim with a share of the 1g instance of GPU 0 that is in force.
fn shared_instance() -> Case {
    let mut case = shared();
    let device = format!("{DEVICE_1G}-share");
    case.result().device = device;
    let share = case.spec.partitions[0].share.take();
    case.spec = spec(vec![Partition { share, ..partition("u", "r", Some(("1g.10gb", 4, 1))) }]);
    let mut in_force = case.inventory.gpus[1].shares.remove(0);
    in_force.placement = Some(case.instance().placement);
    case.inventory.gpus[0].shares = vec![in_force];
    case.instance().mps.there = true;
    case
}

#[test]
fn a_share_of_an_instance_is_handed_out_beside_others_of_it() {
    let mut case = shared_instance();
    let key = DeviceKey::instance(GPU0, case.instance().placement);
    let other = Prepared {
        claim: reference("other"),
        pod: None,
        devices: vec![PreparedDevice {
            key: key.clone().with_share("other"),
            ..case.authorize().unwrap().remove(0)
        }],
    };
    case.prepared.insert("other".into(), other);
    case.instance().mps.clients = vec![Process { pid: 7, ..Process::default() }];
    let (devices, pod) = case.with_pod().unwrap();
    assert_eq!((&devices[0].key, devices[0].uuid.as_str()), (&key.clone().with_share(SHARE), "MIG-9"));
    assert_eq!(pod.unwrap().uid, "pod-u");
    // Made again by a reboot: the record follows.
    let record = Prepared { claim: reference("u"), pod: None, devices };
    case.instance().compute_instances[0].uuid = "MIG-new".into();
    let confirmed = confirm(&record, NODE, Some(&case.spec), &case.inventory).unwrap();
    assert_eq!((confirmed[0].uuid.as_str(), confirmed[0].share.is_some()), ("MIG-new", true));
    case.inventory.gpus[0].shares[0].problem = Some(why("MpsNotReady", "starting"));
    let error = confirm(&record, NODE, Some(&case.spec), &case.inventory).unwrap_err();
    assert!(matches!(error, PrepareError::NotInForce { .. }), "{error}");
}

#[test]
fn a_share_of_an_instance_is_refused_that_is_not_in_force_there() {
    type Change = fn(&mut Case);
    let cases: [(&str, bool, Change); 7] = [
        ("NotInForce", true, |case| case.inventory.gpus[0].shares.clear()),
        ("NotInForce", true, |case| case.inventory.gpus[0].shares[0].placement = None),
        ("NotThere", true, |case| case.inventory.gpus[0].instances.truncate(1)),
        ("NotThere", true, |case| case.instance().compute_instances.clear()),
        ("Unhealthy", false, |case| case.instance().unhealthy = Some(why("Xid95", "contained"))),
        ("OtherDevice", true, |case| case.result().device = DEVICE_1G.into()),
        ("Held", true, |case| {
            let all = prepared_claim("other", &inventory());
            case.prepared.insert("other".into(), all);
        }),
    ];
    for (what, passes, change) in cases {
        let mut case = shared_instance();
        change(&mut case);
        let error = case.authorize().expect_err(what);
        assert!(format!("{error:?}").starts_with(what), "{error:?} is not {what}");
        assert_eq!(error.may_pass(), passes, "{error}");
    }
}

#[test]
fn all_of_an_instance_waits_until_nothing_is_left_of_what_carried_its_shares() {
    let mut case = good();
    case.instance().mps.there = true;
    let error = case.authorize().unwrap_err();
    assert!(matches!(&error, PrepareError::CarriesShares { uuid, .. } if uuid == "MIG-9"), "{error}");
    assert!(error.may_pass());
    case.instance().mps.there = false;
    case.instance().mps.clients = vec![Process { pid: 7, ..Process::default() }];
    assert!(case.authorize().is_err());
    case.instance().mps.clients.clear();
    assert_eq!(case.authorize().unwrap().len(), 1);
}
