//! The process is killed in every call that a step makes, before and after its effect; the next one ends where an
//! undisturbed one would.
//!
//! The daemon that is killed is this test program, started again with a node to work on.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use kerf_crds::gpu_node::{DesiredMig, Partition};
use kerf_node_daemon::inventory::Gpu;
use kerf_node_daemon::step::Step;
use kerf_sim::{GpuSpec, NodeSpec, Occurrence, When};

use crate::node::{Node, claim, managed, start};

const NODE: &str = "KERF_TEST_CRASHING_NODE";
const STAGE: &str = "KERF_TEST_CRASHING_STAGE";

/// A life with every kind of step in it: stage by stage, which partitions are wanted, and whether MIG is.
fn stage(number: usize, gpu: &Gpu) -> (DesiredMig, Vec<Partition>) {
    match number {
        0 => (DesiredMig::Enabled, vec![claim(gpu, "1g.10gb", 0, 1), claim(gpu, "1g.10gb", 6, 1)]),
        1 => (DesiredMig::Enabled, vec![claim(gpu, "3g.40gb", 0, 4), claim(gpu, "1g.10gb", 6, 1)]),
        _ => (DesiredMig::Disabled, vec![]),
    }
}

const STAGES: usize = 3;

/// The daemon's part of the test: brings the node to a stage and ends.
#[tokio::test]
#[ignore = "run by the other test in a process of its own"]
async fn process() {
    let dir = PathBuf::from(std::env::var_os(NODE).expect("a node"));
    let number: usize = std::env::var(STAGE).unwrap().parse().unwrap();
    let daemon = start(&dir.join("root"), &dir.join("state"), None);
    let gpu = daemon.inventory().await.gpus[0].clone();
    let (mig, partitions) = stage(number, &gpu);
    let mut entry = managed(&gpu);
    entry.mig = mig;
    daemon.settle(1, &[entry], &partitions).await;
    daemon.until("the mode", |inventory| inventory.gpus[0].mig.enabled == (mig == DesiredMig::Enabled)).await;
}

fn run_process(node: &Node, stage: usize) -> bool {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::process", "--ignored", "--test-threads=1"])
        .env(NODE, node.dir.path())
        .env(STAGE, stage.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    status.success()
}

#[test]
fn killed_in_any_step_the_next_process_ends_where_an_undisturbed_one_would() {
    let mut killed = 0;
    for kind in Step::ALL_KINDS {
        for when in [When::Before, When::After] {
            let node = Node::new(NodeSpec::new("n", vec![GpuSpec::new("h100-80-sxm")]));
            node.sim.inject_kill(kind.nvml_call(), when, Occurrence::Once, None).unwrap();
            let mut died = false;
            let mut kept = None;
            for stage in 0..STAGES {
                if !run_process(&node, stage) {
                    assert!(!died, "{kind:?} {when:?}: died twice");
                    died = true;
                    assert!(run_process(&node, stage), "{kind:?} {when:?}: stage {stage} is not reached");
                }
                let expected: &[&str] = match stage {
                    0 => &["0 1g.10gb@0", "0 1g.10gb@6"],
                    1 => &["0 1g.10gb@6", "0 3g.40gb@0"],
                    _ => &[],
                };
                assert_eq!(node.layout(), expected, "{kind:?} {when:?}: stage {stage}");
                let neighbour =
                    node.sim.instances().unwrap().into_iter().find(|instance| instance.start == 6);
                if stage == 1 {
                    assert_eq!(neighbour, kept, "{kind:?} {when:?}: the neighbour was touched");
                }
                kept = neighbour;
            }
            assert!(died, "{kind:?} {when:?}: no step of this kind was taken");
            killed += 1;
        }
    }
    assert_eq!(killed, 2 * Step::ALL_KINDS.len());
}
