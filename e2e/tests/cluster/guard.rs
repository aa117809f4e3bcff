//! A cluster ends with the process that holds it, however that ends, and nothing of it stays on the machine.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::images::BOX;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::shared::runtime;
use kerf_e2e::{Cluster, ClusterOptions, NodeOptions, Seen, eventually, wait_pod_phase};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const MINUTE: Duration = Duration::from_secs(60);
/// Set for the process that [`harness`] is run in: how it is to end.
const ENDING: &str = "KERF_E2E_GUARD_ENDING";

/// Holds a cluster with a running pod until it is killed, or panics. Run by the tests below in a process of its own.
#[test]
#[ignore = "run by the other tests of this module"]
fn harness() {
    let Ok(ending) = std::env::var(ENDING) else { return };
    runtime().block_on(async {
        let options = ClusterOptions { nodes: vec![NodeOptions::new("solo")], ..ClusterOptions::default() };
        let cluster = Cluster::start(options).await.unwrap();
        let pod = format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: held}}, spec: {{nodeName: solo, containers: [{{name: main, \
             image: '{BOX}', imagePullPolicy: Never, command: [sleep, infinity]}}]}}}}"
        );
        apply_yaml(&cluster.client(), &pod).await.unwrap();
        wait_pod_phase(&cluster.client(), "default", "held", "Running", MINUTE).await.unwrap();
        println!("\nholding {}", cluster.dir().display());
        assert_ne!(ending, "panic", "the panic that was asked for");
        std::future::pending::<()>().await;
    });
}

/// A harness in a process of its own, and its cluster's folder.
fn start_harness(ending: &str) -> Result<(Child, PathBuf)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["guard::harness", "--exact", "--ignored", "--nocapture"])
        .env(ENDING, ending)
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("no standard output")?;
    for line in BufReader::new(stdout).lines() {
        if let Some(dir) = line?.strip_prefix("holding ") {
            return Ok((child, dir.into()));
        }
    }
    anyhow::bail!("the harness ended without a cluster: {}", child.wait()?)
}

/// Everything on this machine that belongs to a cluster, but for its folder.
fn remains(dir: &Path) -> Result<Vec<String>> {
    let id = dir.file_name().and_then(|name| name.to_str()).context("the folder has no name")?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())
    {
        let path = entry.path();
        // The process may end while it is looked at.
        let text =
            |file: &str| fs::read(path.join(file)).map(|text| String::from_utf8_lossy(&text).into_owned());
        for file in ["cmdline", "cgroup", "mountinfo"] {
            if text(file).is_ok_and(|text| text.contains(id)) {
                found.push(format!("process {}: {}", path.display(), text("cmdline").unwrap_or_default()));
                break;
            }
        }
    }
    for entry in fs::read_dir("/sys/fs/cgroup")?.flatten().map(|entry| entry.path().join(id)) {
        if entry.exists() {
            found.push(format!("cgroup {}", entry.display()));
        }
    }
    Ok(found)
}

/// Whether the host's ends of the pods' network interfaces are there: they all have the first address of the node's pods.
fn has_interfaces(subnet: &str) -> Result<bool> {
    let (network, _) = subnet.split_once('/').context("no subnet")?;
    let gateway: Ipv4Addr = (u32::from(network.parse::<Ipv4Addr>()?) + 1).into();
    let gateway = gateway.to_string();
    Ok(fs::read_to_string("/proc/net/fib_trie")?.split_whitespace().any(|word| word == gateway))
}

fn ends_by(signal: Option<Signal>) -> Result<PathBuf> {
    let (mut child, dir) = start_harness(if signal.is_some() { "signal" } else { "panic" })?;
    let mut subnet = None;
    if let Some(signal) = signal {
        ensure!(remains(&dir)?.len() > 8, "the search for remains is blind: {:?}", remains(&dir)?);
        let cni: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.join("n/solo/cni/10-pods.conflist"))?)?;
        let range =
            cni["plugins"][0]["ipam"]["ranges"][0][0]["subnet"].as_str().context("no subnet")?.to_owned();
        ensure!(has_interfaces(&range)?, "the search for interfaces is blind");
        subnet = Some(range);
        kill(Pid::from_raw(child.id().cast_signed()), signal)?;
    }
    let status = child.wait()?;
    ensure!(!status.success(), "the harness ended well: {status}");
    runtime().block_on(eventually(MINUTE, "nothing of the cluster is left", || async {
        let mut found = remains(&dir)?;
        if let Some(subnet) = &subnet
            && has_interfaces(subnet)?
        {
            found.push(format!("interfaces of {subnet}"));
        }
        Ok(Seen::when(found, Vec::is_empty))
    }))?;
    Ok(dir)
}

/// The watcher of a cluster.
fn watcher(dir: &Path) -> Result<Pid> {
    let command = format!("\0watch\0{}\0", dir.display());
    for entry in fs::read_dir("/proc")?.flatten() {
        if fs::read_to_string(entry.path().join("cmdline")).is_ok_and(|line| line.ends_with(&command)) {
            return Ok(Pid::from_raw(entry.file_name().to_string_lossy().parse()?));
        }
    }
    anyhow::bail!("no watcher of {} is there", dir.display())
}

fn folder_goes(dir: &Path) -> Result<()> {
    runtime().block_on(eventually(MINUTE, format!("{} removed", dir.display()), || async {
        Ok(Seen::when(dir.exists(), |exists| !exists))
    }))?;
    Ok(())
}

#[test]
fn a_cluster_ends_with_a_killed_harness() {
    let dir = ends_by(Some(Signal::SIGKILL)).unwrap();
    folder_goes(&dir).unwrap();
}

#[test]
fn a_cluster_ends_with_ctrl_c() {
    let dir = ends_by(Some(Signal::SIGINT)).unwrap();
    folder_goes(&dir).unwrap();
}

#[test]
fn a_panic_ends_the_cluster_and_keeps_its_logs() {
    let dir = ends_by(None).unwrap();
    runtime()
        .block_on(eventually(MINUTE, "only the logs are left", || async {
            let names = fs::read_dir(&dir)?.flatten().map(|entry| entry.file_name());
            Ok(Seen::when(names.collect::<Vec<_>>(), |names| *names == ["logs"]))
        }))
        .unwrap();
    for log in ["kube-apiserver.log", "solo/kubelet.log", "solo/containerd.log"] {
        let log = dir.join("logs").join(log);
        assert!(fs::metadata(&log).is_ok_and(|metadata| metadata.len() > 0), "{} is missing", log.display());
    }
    fs::remove_dir_all(&dir).unwrap();
}

/// With its watcher killed too, a cluster's processes still end; its folder and cgroups go when the next one starts.
#[test]
fn the_next_cluster_removes_what_a_killed_watcher_left() {
    let (mut child, dir) = start_harness("signal").unwrap();
    kill(watcher(&dir).unwrap(), Signal::SIGKILL).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let processes_gone = eventually(MINUTE, "no process of the cluster is left", || async {
        let mut found = remains(&dir)?;
        found.retain(|what| what.starts_with("process"));
        Ok(Seen::when(found, Vec::is_empty))
    });
    runtime().block_on(processes_gone).unwrap();
    assert!(dir.exists() && !remains(&dir).unwrap().is_empty(), "there is nothing left to remove");
    let hour_ago = std::time::SystemTime::now() - 60 * MINUTE;
    fs::File::open(dir.join(".kerf-e2e-cluster")).unwrap().set_modified(hour_ago).unwrap();

    let (mut next, next_dir) = start_harness("signal").unwrap();
    assert_eq!(remains(&dir).unwrap(), Vec::<String>::new());
    assert!(!dir.exists(), "{} is still there", dir.display());
    next.kill().unwrap();
    next.wait().unwrap();
    folder_goes(&next_dir).unwrap();
}

#[test]
fn without_root_the_error_says_so() {
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(std::env::current_exe().unwrap())
        .args(["guard::harness", "--exact", "--ignored", "--nocapture"])
        .env(ENDING, "at once")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("needs root"), "{output:?}");
}
