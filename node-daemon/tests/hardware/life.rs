//! The ordinary course of things.

use kerf_crds::conditions::unmanaged_reason;
use kerf_crds::gpu_node::{ClaimReference, DesiredMig, Reason};
use kerf_node_daemon::prepared::{DeviceKey, Prepared, PreparedDevice};
use kerf_sim::{GpuSpec, NodeSpec};

use crate::node::{Node, claim, eventually, managed};

fn a100() -> Node {
    Node::new(NodeSpec::new("n", vec![GpuSpec::new("a100-80").in_mig_mode()]))
}

#[tokio::test]
async fn models_nobody_has_heard_of_are_discovered_like_any_other() {
    let models = ["a100-80", "h100-80-sxm", "a30-24", "rtxpro6000-server", "invented-5x10"];
    let mut gpus: Vec<GpuSpec> = models.iter().map(|model| GpuSpec::new(model).in_mig_mode()).collect();
    gpus.extend(["invented-nomig", "h100-80-sxm", "a100-80"].map(GpuSpec::new));
    let node = Node::new(NodeSpec::new("n", gpus));
    let daemon = node.start();
    let inventory = daemon.inventory().await;
    assert_eq!(inventory.gpus.len(), models.len() + 3);
    for (index, gpu) in inventory.gpus.iter().enumerate().take(models.len()) {
        let model = node.sim.model(index).unwrap();
        assert_eq!((gpu.index, gpu.mig.enabled), (index as u32, true));
        let geometry = gpu.geometry.as_ref().unwrap_or_else(|| panic!("no geometry of {}", gpu.product));
        let mut names: Vec<&str> = geometry.profiles.iter().map(|profile| profile.name.as_str()).collect();
        let profiles = &model.mig.as_ref().unwrap().profiles;
        let mut expected: Vec<&str> = profiles.iter().map(|profile| profile.name.as_str()).collect();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected, "{}", gpu.product);
    }
    // With MIG off, Hopper tells what it can be cut into; Ampere does not, and it is not guessed.
    let [.., without, hopper, ampere] = inventory.gpus.as_slice() else { panic!("too few GPUs") };
    assert!(without.geometry.is_none() && !without.mig.enabled);
    assert!(hopper.geometry.is_some() && !hopper.mig.enabled);
    assert!(ampere.geometry.is_none() && !ampere.mig.enabled);
}

#[tokio::test]
async fn a_spec_becomes_instances_at_exactly_these_places() {
    let node = Node::new(NodeSpec::new(
        "n",
        vec![GpuSpec::new("a100-80"), GpuSpec::new("h100-80-sxm"), GpuSpec::new("rtxpro6000-server")],
    ));
    let daemon = node.start();
    let gpus = daemon.inventory().await.gpus.clone();
    let wanted = [
        claim(&gpus[0], "1g.10gb+me", 0, 1),
        claim(&gpus[0], "2g.20gb", 2, 2),
        claim(&gpus[0], "3g.40gb", 4, 4),
        claim(&gpus[1], "1g.20gb", 6, 2),
        claim(&gpus[2], "1g.24gb+me.all", 9, 3),
    ];
    let entries: Vec<_> = gpus.iter().map(managed).collect();
    let inventory = daemon.settle(1, &entries, &wanted).await;
    assert_eq!(
        node.layout(),
        ["0 1g.10gb+me@0", "0 2g.20gb@2", "0 3g.40gb@4", "1 1g.20gb@6", "2 1g.24gb+me.all@9"]
    );
    for made in node.sim.instances().unwrap() {
        let seen = inventory.mig_device(&made.compute[0].1).expect("the UUID that the hardware has");
        assert_eq!((seen.1.gpu_instance_id, seen.1.foreign), (made.gi, false));
    }
    assert!(inventory.gpus.iter().all(|gpu| gpu.mig.enabled && gpu.unmanaged.is_none()));
}

#[tokio::test]
async fn reshaping_touches_no_neighbour_and_reuses_what_fits() {
    let node = a100();
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let entries = [managed(&gpu)];
    let ones: Vec<_> = (0..7).map(|start| claim(&gpu, "1g.10gb", start, 1)).collect();
    daemon.settle(1, &entries, &ones).await;
    let before = node.sim.instances().unwrap();
    // The first four end; a 4g takes their slices beside the three that stay.
    let mut wanted = ones[4..].to_vec();
    wanted.push(claim(&gpu, "4g.40gb", 0, 4));
    daemon.settle(2, &entries, &wanted).await;
    let after = node.sim.instances().unwrap();
    for old in before.iter().filter(|old| old.start >= 4) {
        assert!(after.contains(old), "{old:?} was made anew or is gone");
    }
    let counts = node.sim.counts().unwrap()[0];
    assert_eq!((counts.gpu_instances_created, counts.gpu_instances_destroyed), (8, 4));
    // All end; nothing is destroyed before something needs the slices, and what fits is used again.
    daemon.settle(3, &entries, &[]).await;
    daemon.settle(4, &entries, &[claim(&gpu, "4g.40gb", 0, 4)]).await;
    let counts = node.sim.counts().unwrap()[0];
    assert_eq!((counts.gpu_instances_created, counts.gpu_instances_destroyed), (8, 4));
    daemon.settle(5, &entries, &[claim(&gpu, "7g.80gb", 0, 8)]).await;
    assert_eq!(node.layout(), ["0 7g.80gb@0"]);
}

#[tokio::test]
async fn slices_pass_on_only_when_claim_and_process_are_gone() {
    let node = a100();
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let entries = [managed(&gpu)];
    let small = claim(&gpu, "1g.10gb", 0, 1);
    daemon.settle(1, &entries, std::slice::from_ref(&small)).await;
    let made = node.sim.instances().unwrap().remove(0);
    let key = DeviceKey::instance(&gpu.uuid, small.instance.as_ref().unwrap().placement);
    let reference = ClaimReference { namespace: "ns".into(), name: "c".into(), uid: "uid".into() };
    let device = PreparedDevice {
        request: "r".into(),
        device: "d".into(),
        key,
        uuid: made.compute[0].1.clone(),
        cdi: vec![],
        share: None,
    };
    daemon.state.prepared.record(Prepared { claim: reference, pod: None, devices: vec![device] }).unwrap();
    let process =
        node.sim.hold_as_process(0, Some((made.gi, made.compute[0].0)), std::process::id()).unwrap();
    let large = claim(&gpu, "3g.40gb", 0, 4);
    daemon.apply(2, &entries, std::slice::from_ref(&large));
    let blocked = daemon.report(&gpu.uuid, "a problem", |report| report.problem.is_some()).await;
    let problem = blocked.problem.unwrap();
    assert!(problem.message.contains("claim ns/c"), "{}", problem.message);
    assert_eq!(blocked.clients, [], "a claim is in the way, and so no client alone");
    daemon.state.prepared.remove("uid");
    let pid = format!("(pid {})", std::process::id());
    let names_only_the_process = |report: &kerf_node_daemon::node::GpuReport| {
        let message = report.problem.as_ref().map(|problem| problem.message.as_str()).unwrap_or_default();
        message.contains(&pid) && !message.contains("ns/c") && !report.clients.is_empty()
    };
    daemon.report(&gpu.uuid, "the process alone", names_only_the_process).await;
    assert_eq!(node.layout(), ["0 1g.10gb@0"]);
    drop(process);
    daemon.settled(2, std::slice::from_ref(&large)).await;
    assert_eq!(node.layout(), ["0 3g.40gb@0"]);
}

#[tokio::test]
async fn what_others_made_is_reported_and_left_alone() {
    let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("a100-80").in_mig_mode(); 2]));
    node.sim.create_instance(0, "2g.20gb", Some(0), true).unwrap();
    let daemon = node.start();
    let gpus = daemon.inventory().await.gpus.clone();
    let unmanaged = gpus[0].unmanaged.clone().expect("a foreign instance makes the GPU unmanaged");
    assert_eq!(unmanaged.reason, unmanaged_reason::FOREIGN_INSTANCE);
    assert!(gpus[0].instances[0].foreign && gpus[1].unmanaged.is_none());
    let wanted = [claim(&gpus[0], "3g.40gb", 0, 4), claim(&gpus[1], "3g.40gb", 0, 4)];
    daemon.apply(1, &[managed(&gpus[0]), managed(&gpus[1])], &wanted);
    daemon.settled(1, &wanted[1..]).await;
    assert_eq!(node.layout(), ["0 2g.20gb@0", "1 3g.40gb@0"]);
    // Once it is gone, the GPU is managed.
    let id = gpus[0].instances[0].gpu_instance_id;
    node.sim.remove_instance(0, id).unwrap();
    daemon.state.request_scan();
    daemon.settled(1, &wanted).await;
}

#[tokio::test]
async fn nothing_is_changed_while_somebody_else_hands_out_the_gpus_or_nobody_knows() {
    let node = a100();
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let wanted = [claim(&gpu, "3g.40gb", 0, 4)];
    let reason = Reason { reason: unmanaged_reason::FOREIGN_DEVICE_PLUGIN.into(), message: "m".into() };
    daemon.verdicts.send_replace(None);
    daemon.apply(1, &[managed(&gpu)], &wanted);
    daemon.verdicts.send_replace(Some(Some(reason)));
    daemon.until("an unmanaged GPU", |inventory| inventory.gpus[0].unmanaged.is_some()).await;
    daemon.report(&gpu.uuid, "generation 1", |report| report.generation == Some(1)).await;
    assert!(node.layout().is_empty());
    daemon.verdicts.send_replace(Some(None));
    daemon.settled(1, &wanted).await;
}

#[tokio::test]
async fn mode_is_switched_where_the_policy_allows_it() {
    let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("a100-80"), GpuSpec::new("h100-80-sxm")]));
    let daemon = node.start();
    let gpus = daemon.inventory().await.gpus.clone();
    assert!(gpus[0].mig.switch_needs_reset && !gpus[1].mig.switch_needs_reset);
    let mut entries = [managed(&gpus[0]), managed(&gpus[1])];
    for entry in &mut entries {
        entry.allow_reset = false;
    }
    daemon.apply(1, &entries, &[]);
    let inventory = daemon.until("MIG on the H100", |inventory| inventory.gpus[1].mig.enabled).await;
    assert!(!inventory.gpus[0].mig.enabled);
    daemon
        .until("the A100 unmanaged", |inventory| {
            let unmanaged = inventory.gpus[0].unmanaged.as_ref();
            unmanaged.is_some_and(|reason| reason.reason == unmanaged_reason::MODE_SWITCH_NOT_ALLOWED)
        })
        .await;
    entries[0].allow_reset = true;
    daemon.apply(2, &entries, &[]);
    daemon.until("MIG on both", |inventory| inventory.gpus.iter().all(|gpu| gpu.mig.enabled)).await;
    daemon.settle(3, &entries, &[claim(&gpus[1], "3g.40gb", 0, 4)]).await;
    for entry in &mut entries {
        entry.mig = DesiredMig::Disabled;
    }
    daemon.apply(4, &entries, &[]);
    daemon.until("MIG off", |inventory| inventory.gpus.iter().all(|gpu| !gpu.mig.enabled)).await;
}

#[tokio::test]
async fn without_a_spec_nothing_happens_and_after_a_reboot_everything_is_made_again() {
    let node = a100();
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let wanted = [claim(&gpu, "3g.40gb", 4, 4)];
    daemon.settle(1, &[managed(&gpu)], &wanted).await;
    drop(daemon);
    node.sim.reboot().unwrap();
    let daemon = node.start();
    daemon.inventory().await;
    assert!(node.layout().is_empty(), "no spec has been seen");
    daemon.settle(1, &[managed(&gpu)], &wanted).await;
    assert_eq!(node.layout(), ["0 3g.40gb@4"]);
}

#[tokio::test]
async fn a_driver_that_comes_late_goes_and_comes_back_is_followed() {
    let node = a100();
    node.sim.unload_driver().unwrap();
    let daemon = node.start();
    daemon.until("no driver", |inventory| inventory.unavailable.is_some()).await;
    node.sim.reload_driver().unwrap();
    let found = daemon
        .until("a GPU", |inventory| !inventory.gpus.is_empty() && inventory.unavailable.is_none())
        .await;
    let gpu = found.gpus[0].clone();
    let wanted = [claim(&gpu, "1g.10gb", 3, 1)];
    daemon.settle(1, &[managed(&gpu)], &wanted).await;
    node.sim.reload_driver().unwrap();
    daemon.state.request_scan();
    eventually("made again", || node.layout() == ["0 1g.10gb@3"]).await;
    daemon.settled(1, &wanted).await;
}
