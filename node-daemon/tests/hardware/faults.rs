//! Errors of the driver: named, retried, and gone when they are.

use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use kerf_crds::conditions::node_reason;
use kerf_crds::gpu_node::ClaimReference;
use kerf_node_daemon::inventory::Inventory;
use kerf_node_daemon::node::GpuReport;
use kerf_node_daemon::prepared::{DeviceKey, Prepared, PreparedDevice};
use kerf_node_daemon::step::{Step, StepKind};
use kerf_sim::{GpuSpec, NodeSpec, NvmlError, Occurrence};

use crate::node::{Node, claim, eventually, managed};

fn a100(count: usize) -> Node {
    let gpus = vec![GpuSpec::new("a100-80").in_mig_mode(); count];
    Node::new(NodeSpec { log_calls: true, ..NodeSpec::new("n", gpus) })
}

#[tokio::test]
async fn a_failing_call_is_named_and_retried_until_it_works() {
    let node = a100(1);
    let mut daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let wanted = [claim(&gpu, "3g.40gb", 0, 4)];
    for (call, error) in [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", NvmlError::InsufficientResources),
        ("nvmlGpuInstanceCreateComputeInstance", NvmlError::Unknown),
    ] {
        node.sim.inject(call, error, Occurrence::Persistent, None).unwrap();
    }
    daemon.apply(1, &[managed(&gpu)], &wanted);
    let failing =
        daemon.report(&gpu.uuid, "a problem", |report| report.problem.is_some()).await.problem.unwrap();
    assert_eq!(failing.reason, "INSUFFICIENT_RESOURCES");
    for part in ["nvmlDeviceCreateGpuInstanceWithPlacement", "3g.40gb at 0:4", gpu.uuid.as_str()] {
        assert!(failing.message.contains(part), "{:?} does not name {part}", failing.message);
    }
    let note = daemon.note("the failure", |note| note.reason == "INSUFFICIENT_RESOURCES").await;
    assert!(note.warning && note.message == failing.message);
    node.sim.clear_faults().unwrap();
    daemon.settled(1, &wanted).await;
    assert_eq!(node.layout(), ["0 3g.40gb@0"]);
}

#[tokio::test]
async fn a_call_that_fails_after_its_effect_is_not_repeated() {
    for kind in Step::ALL_KINDS {
        let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("h100-80-sxm")]));
        let daemon = node.start();
        let gpu = daemon.inventory().await.gpus[0].clone();
        let mut entry = managed(&gpu);
        node.sim.inject_after(kind.nvml_call(), NvmlError::Unknown, Occurrence::Once, None).unwrap();
        let first = [claim(&gpu, "1g.10gb", 0, 1)];
        daemon.settle(1, std::slice::from_ref(&entry), &first).await;
        let second = [claim(&gpu, "3g.40gb", 0, 4)];
        daemon.settle(2, std::slice::from_ref(&entry), &second).await;
        assert_eq!(node.layout(), ["0 3g.40gb@0"], "{kind:?}");
        let counts = node.sim.counts().unwrap()[0];
        assert_eq!((counts.gpu_instances_created, counts.gpu_instances_destroyed), (2, 1), "{kind:?}");
        entry.mig = kerf_crds::gpu_node::DesiredMig::Disabled;
        daemon.apply(3, &[entry], &[]);
        daemon.until("MIG off", |inventory| !inventory.gpus[0].mig.enabled).await;
        assert!(node.layout().is_empty(), "{kind:?}");
    }
}

#[tokio::test]
async fn instances_stay_kerfs_when_the_driver_denies_mig_for_a_moment() {
    let node = a100(1);
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let first = claim(&gpu, "3g.40gb", 0, 4);
    daemon.settle(1, &[managed(&gpu)], std::slice::from_ref(&first)).await;
    let deny = || node.sim.inject("nvmlDeviceGetMigMode", NvmlError::NotSupported, Occurrence::Once, None);
    deny().unwrap();
    let second = claim(&gpu, "1g.10gb", 4, 1);
    daemon.settle(2, &[managed(&gpu)], &[first.clone(), second.clone()]).await;
    drop(daemon);
    deny().unwrap();
    let daemon = node.start();
    daemon.settle(3, &[managed(&gpu)], &[first, second]).await;
    assert_eq!(node.layout(), ["0 1g.10gb@4", "0 3g.40gb@0"]);
    let counts = node.sim.counts().unwrap()[0];
    assert_eq!((counts.gpu_instances_created, counts.gpu_instances_destroyed), (2, 0));
}

#[tokio::test]
async fn a_holder_that_blocks_a_destroy_is_named_and_keeps_nobody_else_waiting() {
    let node = a100(1);
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let entries = [managed(&gpu)];
    daemon.settle(1, &entries, &[claim(&gpu, "1g.10gb", 0, 1)]).await;
    let made = node.sim.instances().unwrap().remove(0);
    let holder = node.sim.hold(0, Some(made.gi)).unwrap();
    let (blocked, free) = (claim(&gpu, "3g.40gb", 0, 4), claim(&gpu, "3g.40gb", 4, 4));
    daemon.apply(2, &entries, &[blocked.clone(), free.clone()]);
    eventually("the other half is made", || node.layout().contains(&"0 3g.40gb@4".to_owned())).await;
    let report = daemon.report(&gpu.uuid, "IN_USE", |report| {
        report.problem.as_ref().is_some_and(|problem| problem.reason == "IN_USE")
    });
    let problem = report.await.problem.unwrap();
    assert!(problem.message.contains("1g.10gb at 0:1"), "{}", problem.message);
    drop(holder);
    daemon.settled(2, &[blocked, free]).await;
}

/// A process that has these nodes of the driver open: all that makes it a client.
fn client(node: &Node, nodes: [&str; 2]) -> std::process::Child {
    let open = |name| {
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(libc::O_PATH);
        options.open(node.sim.root().join("dev").join(name)).unwrap()
    };
    let mut command = std::process::Command::new("sleep");
    command.arg("600").stdin(open(nodes[0])).stdout(open(nodes[1])).spawn().unwrap()
}

#[tokio::test]
async fn clients_that_keep_the_mode_from_being_switched_are_reported_and_their_end_is_enough() {
    let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("a100-80")]));
    let mut program = client(&node, ["nvidia0", "nvidia-uvm"]);
    let mut monitor = client(&node, ["nvidia0", "nvidiactl"]);
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let wanted = claim(&gpu, "1g.10gb", 0, 1);
    let pids = |report: &GpuReport| report.clients.iter().map(|client| client.pid).collect::<Vec<_>>();

    // A program is seen before anything is tried; a monitor only when it is.
    daemon.apply(1, &[managed(&gpu)], std::slice::from_ref(&wanted));
    let report = daemon.report(&gpu.uuid, "InUse", |report| !report.clients.is_empty()).await;
    assert_eq!(pids(&report), [program.id()]);
    assert_eq!(report.problem.unwrap().reason, "InUse");
    program.kill().unwrap();
    program.wait().unwrap();
    let report = daemon.report(&gpu.uuid, "IN_USE", |report| pids(report) == [monitor.id()]).await;
    let problem = report.problem.unwrap();
    assert_eq!(problem.reason, "IN_USE");
    assert!(problem.message.contains("held by sleep (pid "), "{}", problem.message);
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    daemon.settled(1, std::slice::from_ref(&wanted)).await;
    let report = daemon.report(&gpu.uuid, "nobody in the way", |_| true).await;
    assert!(report.clients.is_empty());
}

#[tokio::test]
async fn every_error_of_every_call_that_changes_something_clears_when_it_is_gone() {
    let calls: std::collections::BTreeSet<&str> =
        Step::ALL_KINDS.iter().map(|kind: &StepKind| kind.nvml_call()).collect();
    for (call, errors) in kerf_sim::documented_errors() {
        if !calls.contains(call.as_str()) {
            continue;
        }
        for error in errors {
            let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("h100-80-sxm")]));
            let daemon = node.start();
            let gpu = daemon.inventory().await.gpus[0].clone();
            let entries = [managed(&gpu)];
            node.sim.inject(&call, error, Occurrence::Once, None).unwrap();
            daemon.settle(1, &entries, &[claim(&gpu, "1g.10gb", 0, 1)]).await;
            daemon.settle(2, &entries, &[claim(&gpu, "3g.40gb", 0, 4)]).await;
            assert_eq!(node.layout(), ["0 3g.40gb@0"], "{call} {error:?}");
        }
    }
}

#[tokio::test]
async fn a_lost_gpu_is_unhealthy_and_its_neighbour_is_served() {
    let node = a100(2);
    let mut daemon = node.start();
    let gpus = daemon.inventory().await.gpus.clone();
    let entries = [managed(&gpus[0]), managed(&gpus[1])];
    let first = [claim(&gpus[0], "1g.10gb", 0, 1)];
    daemon.settle(1, &entries, &first).await;
    node.sim.lose_gpu(0).unwrap();
    daemon.state.request_scan();
    let is_lost = |inventory: &Inventory| {
        let unhealthy = inventory.gpus[0].unhealthy.as_ref();
        unhealthy.is_some_and(|reason| reason.reason == node_reason::GPU_LOST)
    };
    let lost = daemon.until("a lost GPU", is_lost).await;
    assert_eq!(lost.gpus[0].instances.len(), 1, "what is known of it stays known");
    daemon.note("the loss", |note| note.reason == node_reason::GPU_LOST).await;
    let second = [claim(&gpus[1], "1g.10gb", 0, 1)];
    daemon.apply(2, &entries, &[first[0].clone(), second[0].clone()]);
    eventually("the other GPU is served", || node.layout().contains(&"1 1g.10gb@0".to_owned())).await;
    node.sim.recover_gpu(0).unwrap();
    daemon.state.request_scan();
    daemon.until("a healthy GPU", |inventory| inventory.gpus[0].unhealthy.is_none()).await;
}

/// Whether the daemon has noticed XID 79 on GPU 1.
fn off_the_bus(inventory: &Inventory) -> bool {
    inventory.gpus[1].unhealthy.as_ref().is_some_and(|why| why.reason == "Xid79")
}

#[tokio::test]
async fn an_xid_during_a_wait_that_fails_is_noticed_after_it() {
    for error in [NvmlError::OperatingSystem, NvmlError::GpuIsLost, NvmlError::Unknown] {
        let node = a100(2);
        let daemon = node.start();
        node.watches_xids(1).await;
        // The wait that is on is not met; the one after the first event is.
        node.sim.inject("nvmlEventSetWait", error, Occurrence::Times(2), None).unwrap();
        node.sim.xid(1, None, 31).unwrap();
        node.sim.xid(1, None, 79).unwrap();
        daemon.until(&format!("failed GPU after {error:?}"), off_the_bus).await;
    }
}

#[tokio::test]
async fn xids_are_noticed_though_registering_for_them_failed_at_first() {
    let node = a100(2);
    node.sim.inject("nvmlDeviceRegisterEvents", NvmlError::Unknown, Occurrence::Once, Some(1)).unwrap();
    let daemon = node.start();
    node.watches_xids(1).await;
    node.sim.xid(1, None, 79).unwrap();
    daemon.until("failed GPU", off_the_bus).await;
}

#[tokio::test]
async fn xids_are_noticed_after_waits_that_fail_for_good_and_after_a_reload_of_the_driver() {
    let node = a100(2);
    let daemon = node.start();
    node.watches_xids(1).await;
    node.sim.inject("nvmlEventSetWait", NvmlError::Unknown, Occurrence::Times(5), None).unwrap();
    node.sim.xid(0, None, 31).unwrap();
    // Another set of events; whether the wait was at fault, nobody can tell.
    node.watches_xids(1).await;
    node.sim.unload_driver().unwrap();
    node.sim.inject("nvmlDeviceGetCount", NvmlError::Uninitialized, Occurrence::Once, None).unwrap();
    daemon.state.request_scan();
    daemon.until("no driver", |inventory| inventory.unavailable.is_some()).await;
    node.sim.reload_driver().unwrap();
    node.watches_xids(1).await;
    node.sim.xid(1, None, 79).unwrap();
    daemon.until("failed GPU", off_the_bus).await;
}

#[tokio::test]
async fn the_xid_of_a_gpu_that_cannot_be_asked_any_more_names_it() {
    let node = a100(2);
    let mut daemon = node.start();
    let uuid = daemon.inventory().await.gpus[1].uuid.clone();
    node.watches_xids(1).await;
    node.sim.lose_gpu(1).unwrap();
    let note = daemon.note("the XID", |note| note.reason == "Xid79").await;
    assert!(note.message.contains(&uuid), "{}", note.message);
}

#[tokio::test]
async fn an_xid_marks_what_it_is_about() {
    let node = a100(1);
    let mut daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let wanted = [claim(&gpu, "3g.40gb", 0, 4), claim(&gpu, "3g.40gb", 4, 4)];
    daemon.settle(1, &[managed(&gpu)], &wanted).await;
    let failing = node.sim.instances().unwrap().into_iter().find(|instance| instance.start == 4).unwrap();
    node.watches_xids(0).await;
    node.sim.xid(0, Some(failing.gi), 31).unwrap();
    node.sim.xid(0, Some(failing.gi), 94).unwrap();
    let inventory = daemon
        .until("an unhealthy instance", |inventory| {
            inventory.gpus[0].instances.iter().any(|instance| instance.unhealthy.is_some())
        })
        .await;
    assert_eq!(inventory.gpus[0].unhealthy, None);
    let marked: Vec<(u32, bool)> = inventory.gpus[0]
        .instances
        .iter()
        .map(|instance| (instance.placement.start, instance.unhealthy.is_some()))
        .collect();
    assert_eq!(marked, [(0, false), (4, true)]);
    daemon.note("the XID", |note| note.reason == "Xid94").await;
}

#[tokio::test]
async fn a_failed_instance_that_nobody_uses_gives_its_slices_back() {
    let node = a100(1);
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let entries = [managed(&gpu)];
    let kept = claim(&gpu, "3g.40gb", 4, 4);
    daemon.settle(1, &entries, &[claim(&gpu, "3g.40gb", 0, 4), kept.clone()]).await;
    let (idle, used) = {
        let made = node.sim.instances().unwrap();
        let gi = |start| made.iter().find(|instance| instance.start == start).unwrap().gi;
        (gi(0), gi(4))
    };
    // One of the claims ends. While a process is still there, the instance stays.
    let process = |instance| node.sim.hold_as_process(0, Some((instance, 0)), std::process::id()).unwrap();
    let (process, user) = (process(idle), process(used));
    daemon.apply(2, &entries, std::slice::from_ref(&kept));
    node.watches_xids(0).await;
    for instance in [idle, used] {
        node.sim.xid(0, Some(instance), 94).unwrap();
    }
    let failed =
        |inventory: &Inventory| inventory.gpus[0].instances.iter().filter(|i| i.unhealthy.is_some()).count();
    daemon.until("two unhealthy instances", |inventory| failed(inventory) == 2).await;
    assert_eq!(node.layout(), ["0 3g.40gb@0", "0 3g.40gb@4"]);
    drop(process);
    let inventory = daemon.until("one instance", |inventory| inventory.gpus[0].instances.len() == 1).await;
    assert_eq!(failed(&inventory), 1, "the one that is in use stays");
    assert_eq!(inventory.gpus[0].unhealthy, None);
    // The same place again, and nothing is wrong there.
    let inventory = daemon.settle(3, &entries, &[claim(&gpu, "3g.40gb", 0, 4), kept]).await;
    assert_eq!(failed(&inventory), 1);
    assert!(inventory.gpus[0].instances[0].unhealthy.is_none());
    // The other claim's pod has not begun, or has ended.
    drop(user);
    daemon.until("two healthy instances", |i| failed(i) == 0 && i.gpus[0].instances.len() == 2).await;
}

#[tokio::test]
async fn a_failed_instance_that_cannot_be_destroyed_is_told_of_and_is_no_problem_of_its_gpu() {
    let node = a100(1);
    let mut daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let entries = [managed(&gpu)];
    daemon.settle(1, &entries, &[claim(&gpu, "1g.10gb", 0, 1)]).await;
    node.sim.inject("nvmlGpuInstanceDestroy", NvmlError::Unknown, Occurrence::Persistent, None).unwrap();
    daemon.apply(2, &entries, &[]);
    node.watches_xids(0).await;
    let failing = node.sim.instances().unwrap().remove(0).gi;
    node.sim.xid(0, Some(failing), 94).unwrap();
    daemon.note("the failure", |note| note.message.contains("destroy 1g.10gb at 0:1")).await;
    daemon.settle(3, &entries, &[claim(&gpu, "1g.10gb", 6, 1)]).await;
    // It is one as soon as the instance is in somebody's way.
    daemon.apply(4, &entries, &[claim(&gpu, "3g.40gb", 0, 4)]);
    daemon.report(&gpu.uuid, "a problem", |report| report.problem.is_some()).await;
    node.sim.clear_faults().unwrap();
    daemon.settled(4, &[claim(&gpu, "3g.40gb", 0, 4)]).await;
}

#[tokio::test]
async fn xids_that_tell_nothing_new_make_no_rounds() {
    let node = a100(2);
    let mut daemon = node.start();
    daemon.inventory().await;
    node.watches_xids(1).await;
    let rounds = || {
        let log = node.sim.call_log().unwrap();
        log.iter().filter(|line| line.contains(" nvmlDeviceGetCount ")).count()
    };
    let before = rounds();
    node.sim.xid(0, None, 48).unwrap();
    for _ in 0..20 {
        node.sim.xid(0, None, 13).unwrap();
        node.sim.xid(0, None, 48).unwrap();
    }
    node.sim.xid(1, None, 79).unwrap();
    daemon.until("failed GPU", off_the_bus).await;
    // Two failures, and what else may have been asked for meanwhile.
    assert!(rounds() - before <= 6, "{} rounds for two failures", rounds() - before);
    let mut told = Vec::new();
    while let Ok(note) = daemon.notes.try_recv() {
        told.extend((note.action == "Health").then_some(note.reason));
    }
    assert_eq!(told, ["Xid48", "Xid79"]);
}

#[tokio::test]
async fn a_failed_gpu_stays_failed_over_a_restart_of_the_daemon_until_it_is_reset() {
    let node = a100(2);
    let daemon = node.start();
    node.watches_xids(1).await;
    node.sim.xid(1, None, 48).unwrap();
    let has_failed = |inventory: &Inventory| inventory.gpus[1].unhealthy.is_some();
    daemon.until("failed GPU", has_failed).await;
    drop(daemon);
    let daemon = node.start();
    assert!(has_failed(&*daemon.inventory().await));
    drop(daemon);
    node.sim.reset_gpu(1).unwrap();
    assert!(!has_failed(&*node.start().inventory().await));
}

#[tokio::test]
async fn a_failed_gpu_that_is_not_found_for_a_moment_stays_failed() {
    let node = a100(1);
    let mut daemon = node.start();
    node.watches_xids(0).await;
    // The driver asks for no reset.
    node.sim.xid(0, None, 62).unwrap();
    let is = |inventory: &Inventory, reason: &str| {
        inventory.gpus[0].unhealthy.as_ref().is_some_and(|why| why.reason == reason)
    };
    daemon.until("failed GPU", |inventory| is(inventory, "Xid62")).await;
    node.sim.inject("nvmlDeviceGetHandleByUUID", NvmlError::NotFound, Occurrence::Once, None).unwrap();
    daemon.state.request_scan();
    daemon.note("the loss", |note| note.reason == node_reason::GPU_LOST).await;
    let found = daemon.until("found GPU", |inventory| !is(inventory, node_reason::GPU_LOST)).await;
    assert!(is(&found, "Xid62"), "{:?}", found.gpus[0].unhealthy);
}

#[tokio::test]
async fn a_gpu_that_was_changed_is_prepared_for_nobody_before_the_change_shows() {
    let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("h100-80-sxm")]));
    let daemon = node.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    node.sim.slow("nvmlDeviceGetMigMode", Duration::from_millis(300)).unwrap();
    daemon.apply(1, &[managed(&gpu)], &[]);
    eventually("MIG on", || node.sim.state().unwrap().gpus[0].mig_current).await;
    let device = PreparedDevice {
        request: "r".into(),
        device: gpu.name.clone(),
        key: DeviceKey::gpu(&gpu.uuid),
        uuid: gpu.uuid.clone(),
        cdi: vec![],
        share: None,
    };
    let claim = ClaimReference { namespace: "ns".into(), name: "c".into(), uid: "uid".into() };
    let whole = Prepared { claim, pod: None, devices: vec![device] };
    eventually("the GPU can be prepared again", || {
        let recorded = daemon.state.prepared.record(whole.clone()).is_ok();
        assert!(!recorded || daemon.state.latest().unwrap().gpus[0].mig.enabled, "prepared as it was before");
        recorded
    })
    .await;
}
