//! Faults at the C boundary: every documented error of every function, and death in the middle of a call.

mod common;

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use common::TestNode;
use kerf_sim::{Driver, GpuSpec, NodeSpec, NvmlError, Occurrence, SimNode, When, documented_errors};
use nvml_wrapper::Nvml;

/// The simulated library, called without any binding.
struct Raw(libloading::Library);

#[allow(unsafe_code, reason = "calls C functions by name")]
impl Raw {
    fn load(node: &SimNode) -> Raw {
        // SAFETY: the library has no initialisers.
        Raw(unsafe { libloading::Library::new(node.library()) }.unwrap())
    }

    /// Calls a function with null for every argument.
    fn call(&self, function: &str) -> u32 {
        self.call_with(function, [0; 3])
    }

    /// Calls a function with these arguments and nulls after them, under the newest name that the library has.
    fn call_with(&self, function: &str, arguments: [u64; 3]) -> u32 {
        let [a, b, c] = arguments;
        type Function = extern "C" fn(u64, u64, u64, u64, u64, u64) -> u32;
        let names =
            ["_v3", "_v2", "", "_v1"].map(|version| CString::new(format!("{function}{version}")).unwrap());
        // SAFETY: the functions take at most six integers or pointers, which the calling convention passes in
        // registers; surplus ones are ignored, and null pointers are refused.
        let symbol =
            names.iter().find_map(|name| unsafe { self.0.get::<Function>(name.as_bytes_with_nul()) }.ok());
        symbol.unwrap_or_else(|| panic!("the library has no {function}"))(a, b, c, 0, 0, 0)
    }
}

#[test]
fn every_documented_error_can_be_had_from_every_function() {
    let gpus = vec![GpuSpec::new("a100-40")];
    let driver = Driver::of_branch(615);
    let test = TestNode::of(NodeSpec { driver, ..NodeSpec::new("test", gpus) });
    let library = Raw::load(&test.node);
    let errors = documented_errors();
    for (function, errors) in &errors {
        if function.starts_with("nvmlInit") || function == "nvmlShutdown" {
            continue;
        }
        assert_eq!(library.call("nvmlInit"), 0);
        for error in errors {
            test.node.inject(function, *error, Occurrence::Once, None).unwrap();
            assert_eq!(library.call(function), error.code(), "{function}, once");
            assert!(test.node.faults().unwrap().is_empty(), "{function}: a fault is left");
            test.node.inject(function, *error, Occurrence::Persistent, None).unwrap();
            assert_eq!(library.call(function), error.code(), "{function}, persistently");
            assert_eq!(library.call(function), error.code(), "{function}, persistently, again");
            test.node.clear_faults().unwrap();
        }
        let without = library.call(function);
        assert!(without != NvmlError::Unknown.code(), "{function} with null arguments: {without}");
        assert_eq!(library.call("nvmlShutdown"), 0);
    }
    for error in &errors["nvmlInit"] {
        test.node.inject("nvmlInit", *error, Occurrence::Once, None).unwrap();
        assert_eq!(library.call("nvmlInit"), error.code());
        assert_eq!(
            library.call("nvmlDeviceGetCount"),
            NvmlError::Uninitialized.code(),
            "a failed nvmlInit counts not"
        );
    }
}

#[test]
fn a_fault_can_strike_later_on_one_gpu_and_after_the_effect() {
    let test = TestNode::new(vec![GpuSpec::new("a100-40"), GpuSpec::new("a100-40")]);
    let nvml = nvml(&test.node);
    let gpus = [nvml.device_by_index(0).unwrap(), nvml.device_by_index(1).unwrap()];

    test.node.inject("nvmlDeviceGetUUID", NvmlError::Unknown, Occurrence::Nth(3), Some(1)).unwrap();
    for _ in 0..5 {
        gpus[0].uuid().unwrap();
    }
    let results: Vec<bool> = (0..4).map(|_| gpus[1].uuid().is_ok()).collect();
    assert_eq!(results, [true, true, false, true]);

    test.node.inject_after("nvmlDeviceSetComputeMode", NvmlError::Timeout, Occurrence::Once, None).unwrap();
    let mut gpu = nvml.device_by_index(0).unwrap();
    use nvml_wrapper::enum_wrappers::device::ComputeMode::Prohibited;
    assert!(gpu.set_compute_mode(Prohibited).is_err());
    assert_eq!(gpu.compute_mode().unwrap(), Prohibited, "the call had its effect");
}

#[test]
fn an_activation_status_can_be_had_without_its_cause() {
    let test = TestNode::new(vec![GpuSpec::new("h100-80-sxm")]);
    test.node.inject_activation(NvmlError::ResetRequired, Occurrence::Once, None).unwrap();
    let nvml = nvml(&test.node);
    let gpu = nvml.device_by_index(0).unwrap();
    let _ = gpu.set_mig_mode(true);
    let mode = gpu.mig_mode().unwrap();
    assert_eq!((mode.current, mode.pending), (0, 1));
}

/// What the process that is to be killed does; not a test of its own.
#[test]
#[ignore = "run by the tests below in a process of its own"]
fn worker() {
    let Ok(root) = std::env::var("KERF_SIM_TEST_WORKER") else { return };
    let node = SimNode::open(Path::new(&root)).unwrap();
    let library = Raw::load(&node);
    assert_eq!(library.call("nvmlInit"), 0);
    let mut gpu = 0u64;
    assert_eq!(library.call_with("nvmlDeviceGetHandleByIndex", [0, &raw mut gpu as u64, 0]), 0);
    loop {
        // 19 is the 1g profile. Errors are what a worker that was killed with an instance leaves to the others.
        let mut instance = 0u64;
        if library.call_with("nvmlDeviceCreateGpuInstance", [gpu, 19, &raw mut instance as u64]) == 0 {
            library.call_with("nvmlGpuInstanceDestroy", [instance, 0, 0]);
        }
    }
}

fn start_worker(node: &SimNode) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "worker", "--ignored"])
        .env("KERF_SIM_TEST_WORKER", node.root())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// The files that show the instances agree with the state.
fn assert_shown(node: &SimNode) {
    let folder = node.root().join("proc/driver/nvidia/capabilities/gpu0/mig");
    let mut shown: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned())
        .collect();
    let mut wanted: Vec<String> = node.instances().unwrap().iter().map(|i| format!("gi{}", i.gi)).collect();
    shown.sort();
    wanted.sort();
    assert_eq!(shown, wanted);
}

#[test]
fn a_process_can_be_killed_before_and_after_the_effect_of_a_call() {
    for (when, left) in [(When::Before, 0), (When::After, 1)] {
        let test = TestNode::new(vec![GpuSpec::new("a100-40").in_mig_mode()]);
        test.node.inject_kill("nvmlDeviceCreateGpuInstance", when, Occurrence::Once, None).unwrap();
        let status = start_worker(&test.node).wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{status}");
        assert_eq!(test.node.instances().unwrap().len(), left, "{when:?}");
        assert_shown(&test.node);
    }
}

#[test]
fn kills_at_any_moment_leave_a_whole_node() {
    let test = TestNode::new(vec![GpuSpec::new("a100-40").in_mig_mode()]);
    let mut created = 0;
    for round in 0..12 {
        let mut workers = [start_worker(&test.node), start_worker(&test.node)];
        // Not a measurement: any moment will do, and different ones are wanted.
        std::thread::sleep(std::time::Duration::from_millis(60 + round * 7));
        for worker in &mut workers {
            worker.kill().unwrap();
            worker.wait().unwrap();
        }
        // Opening makes good for a process that was killed between the state and the files that show it.
        let node = SimNode::open(test.root()).unwrap();
        assert_shown(&node);
        let counts = node.counts().unwrap()[0];
        let there = node.instances().unwrap().len() as u64;
        assert_eq!(counts.gpu_instances_created - counts.gpu_instances_destroyed, there);
        created = counts.gpu_instances_created;
        for instance in node.instances().unwrap() {
            node.remove_instance(0, instance.gi).unwrap();
        }
    }
    assert!(created > 0, "the workers did nothing");
}

fn nvml(node: &SimNode) -> Nvml {
    let path = node.library();
    assert!(path.as_os_str().as_bytes().starts_with(node.root().as_os_str().as_bytes()));
    Nvml::builder().lib_path(path.as_os_str()).init().unwrap()
}
