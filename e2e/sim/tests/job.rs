//! Programs as clients: what `kerf-sim-job` opens decides what the node sees.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kerf_sim::caps::Capability;
use kerf_sim::procs::{Client, pid_namespace, pid_seen_by};
use kerf_sim::{GpuSpec, NodeSpec, SimNode};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A node; no NVML is needed to see clients.
fn node() -> (SimNode, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("library");
    std::fs::write(&library, "").unwrap();
    let spec = NodeSpec {
        library: Some(library),
        ..NodeSpec::new("n", vec![GpuSpec::new("a100-40").in_mig_mode(), GpuSpec::new("a100-40")])
    };
    let node = SimNode::create(&folder.path().join("root"), &spec)
        .unwrap_or_else(|error| panic!("failed to make a simulated node (as root?): {error}"));
    // No namespace has this number: containers that happen to run on this machine are not ours.
    node.set_pid_namespace(Some(0)).unwrap();
    (node, folder)
}

/// A `/dev` as a container has it: only these nodes, made anew or linked from the node's.
fn dev_of(node: &SimNode, folder: &Path, names: &[String]) -> PathBuf {
    let dev = folder.join("dev");
    std::fs::create_dir_all(dev.join("nvidia-caps")).unwrap();
    for name in names {
        std::fs::hard_link(node.root().join("dev").join(name), dev.join(name)).unwrap();
    }
    dev
}

fn cap(capability: Capability) -> String {
    format!("nvidia-caps/nvidia-cap{}", capability.minor())
}

/// A running job and the line that it has printed; ends with the test.
struct Job(Child, Value);

impl Job {
    fn start(command: &mut Command) -> Job {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let report = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        Job(child, report)
    }

    fn in_dev(dev: &Path, arguments: &[&str]) -> Job {
        Job::start(Command::new(env!("CARGO_BIN_EXE_kerf-sim-job")).arg("--dev").arg(dev).args(arguments))
    }

    /// Waits for the end, but not for ever, and wants it to be a good one.
    fn end(&mut self) {
        for _ in 0..2000 {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the job goes on");
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(name).arg(self.0.id().to_string()).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_job_runs_on_what_it_sees_and_ends_on_sigterm() {
    let (node, folder) = node();
    let gi = node.create_instance(0, "3g.20gb", Some(0), true).unwrap();
    let (gi_cap, ci_cap) =
        (Capability::GpuInstance { gpu: 0, gi }, Capability::ComputeInstance { gpu: 0, gi, ci: 0 });
    let dev = dev_of(&node, folder.path(), &["nvidia0".into(), "nvidiactl".into(), cap(gi_cap), cap(ci_cap)]);

    let mut job = Job::in_dev(&dev, &[]);
    assert_eq!(job.1["mig_devices"], json!([{ "gpu": 0, "gi": gi, "ci": 0 }]));
    assert_eq!(job.1["whole_gpus"], json!([]));
    assert_eq!(job.1["nodes"].as_array().unwrap().len(), 4);
    assert!(node.clients().unwrap()[0].runs_on(0, gi, 0), "{:?}", node.clients());

    job.signal("-TERM");
    job.end();
    assert_eq!(node.clients().unwrap(), []);
}

#[test]
fn a_monitor_holds_a_handle_and_a_whole_gpu_job_the_gpu() {
    let (node, folder) = node();
    let gi = node.create_instance(0, "1g.5gb", None, true).unwrap();
    let capability = Capability::GpuInstance { gpu: 0, gi };
    let names = ["nvidia1".into(), "nvidia-uvm".into(), cap(capability)];
    let dev = dev_of(&node, folder.path(), &names);

    let monitor = Job::in_dev(&dev, &["--handle-only"]);
    let wanted = Client { pid: monitor.0.id(), capabilities: [capability].into(), ..Client::default() };
    assert_eq!(node.clients().unwrap(), [wanted]);
    drop(monitor);

    let whole = Job::in_dev(&dev, &[]);
    assert_eq!(whole.1["whole_gpus"], json!([1]));
    assert_eq!(whole.1["mig_devices"], json!([]), "a GPU instance alone is no device");
    let client = node.clients().unwrap().remove(0);
    assert!(client.whole_gpu(1) && client.computes);
    drop(whole);

    let _monitor = Job::in_dev(&dev, &["--monitor"]);
    let client = node.clients().unwrap().remove(0);
    assert!(client.whole_gpu(1) && !client.computes);
}

#[test]
fn a_job_without_a_device_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_kerf-sim-job")).arg("--dev").arg(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("no GPU and no MIG device"), "{message}");
}

#[test]
fn a_job_can_hang_and_can_end_by_itself() {
    let (node, folder) = node();
    let dev = dev_of(&node, folder.path(), &["nvidia1".into()]);
    let mut job = Job::in_dev(&dev, &["--ignore-sigterm"]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", job.0.id())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    assert_ne!(u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (libc::SIGTERM - 1), 0, "SIGTERM");
    job.signal("-TERM");
    job.signal("-INT");
    job.end();
    let mut job = Job::in_dev(&dev, &["--seconds", "0.01"]);
    job.end();
}

/// The children of a process: of `unshare --fork`, the first process of the new PID namespace.
fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
fn a_container_belongs_to_the_node_of_its_namespace_and_a_path_to_its_root() {
    let (node, folder) = node();
    let (other, _other_folder) = self::node();
    let gi = node.create_instance(0, "1g.5gb", Some(2), true).unwrap();
    let minors = [
        Capability::GpuInstance { gpu: 0, gi }.minor(),
        Capability::ComputeInstance { gpu: 0, gi, ci: 0 }.minor(),
    ];
    // What a container runtime does: a /dev of its own with nodes made anew, in a mount and a PID namespace.
    let script = format!(
        "mount -t tmpfs none /dev && mknod /dev/nvidia0 c 195 0 && mkdir /dev/nvidia-caps \
         && for m in {} {}; do mknod /dev/nvidia-caps/nvidia-cap$m c 238 $m; done && exec \"$0\"",
        minors[0], minors[1]
    );
    let container = Job::start(
        Command::new("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                &script,
            ])
            .arg(env!("CARGO_BIN_EXE_kerf-sim-job")),
    );
    assert_eq!(container.1["pid"], 1, "it is in a PID namespace of its own");
    assert_eq!(container.1["mig_devices"], json!([{ "gpu": 0, "gi": gi, "ci": 0 }]));
    let inside = children(container.0.id());
    node.set_pid_namespace(Some(pid_namespace(inside[0]).unwrap())).unwrap();
    assert_eq!(other.clients().unwrap(), []);
    let clients = node.clients().unwrap();
    assert_eq!(clients.len(), 1, "{clients:?}");
    assert!(clients[0].runs_on(0, gi, 0) && clients[0].pid != 1);
    assert_eq!(pid_seen_by(inside[0], inside[0]), Some(1));
    assert_eq!(pid_seen_by(std::process::id(), inside[0]), Some(inside[0]));
    assert_eq!(pid_seen_by(inside[0], std::process::id()), None);
    drop(container);
    // The kernel ends what was in the namespace a little later.
    for _ in 0..2000 {
        if node.clients().unwrap().is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }

    // A descriptor into another node's root is that node's.
    let dev = dev_of(&other, folder.path(), &["nvidia0".into()]);
    let _job = Job::in_dev(&other.root().join("dev"), &[]);
    assert_eq!(node.clients().unwrap(), []);
    assert_eq!(other.clients().unwrap().len(), 1);
    drop(dev);
}
