//! NVIDIA's container toolkit as a client: it must find GPUs, MIG devices, libraries and capability nodes.

mod common;

use std::path::Path;
use std::process::Command;

use common::{TestNode, toolchain};
use kerf_sim::GpuSpec;
use kerf_sim::caps::Capability;
use serde_json::Value;

#[test]
fn a_cdi_spec_has_the_capability_nodes_of_each_mig_device() {
    let test = TestNode::new(vec![
        GpuSpec { minor: Some(3), ..GpuSpec::new("a100-40").in_mig_mode() },
        GpuSpec { minor: Some(0), ..GpuSpec::new("h100-80-sxm") },
    ]);
    let big = test.node.create_instance(0, "3g.20gb", Some(4), true).unwrap();
    let small = test.node.create_instance(0, "1g.5gb", Some(1), true).unwrap();
    let instances = test.node.instances().unwrap();
    test.node.run_kernel().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let spec = generate(&test, &folder.path().join("nvidia.json"));

    let root = test.root().to_str().unwrap();
    for (gi, start) in [(big, 4), (small, 1)] {
        let instance = instances.iter().find(|instance| instance.start == start).unwrap();
        let (ci, uuid) = &instance.compute[0];
        let mut nodes = device_nodes(&spec, uuid);
        let cap = |capability: Capability| format!("/dev/nvidia-caps/nvidia-cap{}", capability.minor());
        let mut wanted = vec![
            "/dev/nvidia3".to_owned(),
            cap(Capability::GpuInstance { gpu: 3, gi }),
            cap(Capability::ComputeInstance { gpu: 3, gi, ci: *ci }),
        ];
        nodes.sort();
        wanted.sort();
        assert_eq!(nodes, wanted, "MIG device {uuid}");
    }
    // The other GPU is whole.
    let gpus = test.node.state().unwrap();
    assert_eq!(device_nodes(&spec, &gpus.gpus[1].uuid), ["/dev/nvidia0"]);

    // What all devices share: control nodes and libraries, from this root.
    let text = spec["containerEdits"].to_string();
    for path in ["/dev/nvidiactl", "/dev/nvidia-uvm", "libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05"] {
        assert!(text.contains(path), "{path} is not in {text}");
    }
    assert!(text.contains(&format!("{root}/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05")), "{text}");

    // The kernel driver's socket comes with them.
    let socket = format!("{root}/run/nvidia-persistenced/socket");
    let mounts = spec["containerEdits"]["mounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["hostPath"] == socket.as_str());
    assert_eq!(mount.unwrap()["containerPath"], "/run/nvidia-persistenced/socket");

    // And it lists them by every name.
    let output = Command::new(toolchain("nvidia-toolkit", "nvidia-ctk"))
        .args(["cdi", "list", "--spec-dir"])
        .arg(folder.path())
        .output()
        .unwrap();
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    for name in ["nvidia.com/gpu=0:0", "nvidia.com/gpu=0:1", "nvidia.com/gpu=1", "nvidia.com/gpu=all"] {
        assert!(listed.lines().any(|line| line == name), "{name} is not in:\n{listed}");
    }
    for (_, uuid) in instances.iter().flat_map(|instance| &instance.compute) {
        assert!(listed.contains(uuid), "{uuid} is not in:\n{listed}");
    }
}

fn generate(test: &TestNode, file: &Path) -> Value {
    // It reads the table of capability minors from /proc/driver of its own mount namespace, whatever the driver
    // root, so it gets one in which the node's lies there.
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg("mount --bind \"$DRIVER_ROOT/proc/driver\" /proc/driver && exec \"$0\" \"$@\"")
        .arg(toolchain("nvidia-toolkit", "nvidia-ctk"))
        .args(["cdi", "generate", "--nvidia-cdi-hook-path", "/usr/bin/nvidia-cdi-hook", "--driver-root"])
        .arg(test.root())
        .arg("--dev-root")
        .arg(test.root())
        .arg("--output")
        .arg(file)
        .env("DRIVER_ROOT", test.root())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "nvidia-ctk failed:\n{errors}");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// The device nodes, as the container sees them, of the device with this name.
fn device_nodes(spec: &Value, name: &str) -> Vec<String> {
    let devices = spec["devices"].as_array().unwrap();
    let device = devices.iter().find(|device| device["name"] == name);
    let device = device.unwrap_or_else(|| panic!("no device {name} in {devices:?}"));
    device["containerEdits"]["deviceNodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["path"].as_str().unwrap().to_owned())
        .collect()
}
