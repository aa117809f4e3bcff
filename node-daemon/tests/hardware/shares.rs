//! Shares against the simulated driver and the simulated MPS, whose programs run as they would in their pods.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{
    ClaimOwner, ClaimReference, DesiredGpu, DesiredMig, Isolation, Owner, Partition, Placement, PodReference,
    Reason, Share, WantedInstance, WantedShare,
};
use kerf_node_daemon::inventory::{ComputeMode, Gpu, Instance};
use kerf_node_daemon::metrics;
use kerf_node_daemon::mps::pods::{NewServer, Order, Pods, ServerPod, ServerPods, Writer};
use kerf_node_daemon::node::GpuReport;
use kerf_node_daemon::plugin::LimitError;
use kerf_node_daemon::prepared::{DeviceKey, Prepared, PreparedDevice};
use kerf_sim::{Driver, GpuSpec, MemoryAccounting, MigUuids, NodeSpec};
use nix::sys::signal::Signal;
use tokio::sync::watch;

use crate::node::{Daemon, Node, eventually, managed, start_with_pods};

const GIB: u64 = 1 << 30;

/// A node whose kernel runs, and the part of kubelet that runs the pods of MPS servers on it.
struct Shared {
    node: Node,
    servers: Servers,
    cgroups: Cgroups,
}

/// kubelet and API server for pods of MPS servers.
#[derive(Clone)]
struct Servers {
    seen: watch::Sender<Option<Pods>>,
    running: Arc<Running>,
    made: Arc<Mutex<u32>>,
    program: PathBuf,
}

/// A tree of cgroups as kubelet has it.
struct Cgroups(PathBuf);

impl Drop for Cgroups {
    fn drop(&mut self) {
        let pods = self.0.join("kubepods");
        for pod in std::fs::read_dir(&pods).into_iter().flatten().flatten() {
            let _ = std::fs::remove_dir(pod.path());
        }
        let _ = std::fs::remove_dir(pods);
        let _ = std::fs::remove_dir(&self.0);
    }
}

impl Cgroups {
    fn new() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Any hierarchy will do; this one exists with either version.
        let root = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].into_iter().map(PathBuf::from);
        let root = root.into_iter().find(|path| path.join("cgroup.procs").exists()).expect("cgroups");
        let own = root.join(format!("kerf-shares-{}-{number}", std::process::id()));
        std::fs::create_dir_all(own.join("kubepods")).expect("makes cgroups (needs root)");
        Self(own)
    }

    fn pod(&self, uid: &str) -> PathBuf {
        let pod = self.0.join(format!("kubepods/pod{uid}"));
        std::fs::create_dir_all(&pod).unwrap();
        pod
    }
}

/// What runs, by carrier; with the test, all of it ends.
#[derive(Default)]
struct Running(Mutex<BTreeMap<DeviceKey, (NewServer, Child)>>);

impl Running {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DeviceKey, (NewServer, Child)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for (_, (_, child)) in std::mem::take(&mut *self.lock()) {
            stop(child);
        }
    }
}

/// As the end of a container is: nothing in it is left.
fn stop(mut child: Child) {
    let group = nix::unistd::Pid::from_raw(child.id() as i32);
    let _ = nix::sys::signal::killpg(group, Signal::SIGKILL);
    let _ = child.wait();
}

impl Servers {
    fn spawn(&self, new: &NewServer) -> Child {
        use std::os::unix::process::CommandExt as _;
        // As the PodTemplate's command does first.
        let pipe = new.environment.iter().find(|(name, _)| *name == "CUDA_MPS_PIPE_DIRECTORY").unwrap();
        Command::new("find").args([&pipe.1, "-type", "s", "-delete"]).status().unwrap();
        // Nothing outlives the test, even one that is killed: the control daemon ends with the thread that started it, which
        // lives as long as the test's runtime, and the server with the control daemon.
        Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(&self.program)
            .args(&new.arguments)
            .env_remove("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
            .envs(new.environment.iter().cloned())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn order(&self, order: Order) {
        match order {
            Order::Create(new) => {
                let child = self.spawn(&new);
                let mut made = self.made.lock().unwrap();
                *made += 1;
                let pod = ServerPod {
                    name: format!("mps-{}", new.name),
                    device: new.device.clone(),
                    uid: made.to_string(),
                    form: new.form.clone(),
                    ..ServerPod::default()
                };
                self.seen
                    .send_modify(|pods| _ = pods.get_or_insert_default().insert(new.carrier.clone(), pod));
                self.running.lock().insert(new.carrier.clone(), (new, child));
            }
            Order::Delete(pod) => {
                let carrier = self.seen.borrow().as_ref().and_then(|pods| {
                    pods.iter().find(|(_, known)| known.uid == pod.uid).map(|(carrier, _)| carrier.clone())
                });
                let Some(carrier) = carrier else { return };
                if let Some((_, child)) = self.running.lock().remove(&carrier) {
                    stop(child);
                }
                self.seen.send_modify(|pods| _ = pods.get_or_insert_default().remove(&carrier));
            }
        }
    }

    /// Kills everything in a container, which is then started again.
    fn crash(&self, carrier: &DeviceKey) {
        let new = self.pause(carrier);
        self.resume(new);
    }

    /// Kills everything in a container, which does not start again before it is resumed.
    fn pause(&self, carrier: &DeviceKey) -> NewServer {
        let (new, child) = self.running.lock().remove(carrier).expect("runs");
        stop(child);
        new
    }

    fn resume(&self, new: NewServer) {
        let child = self.spawn(&new);
        self.running.lock().insert(new.carrier.clone(), (new, child));
    }

    fn made(&self) -> u32 {
        *self.made.lock().unwrap()
    }
}

impl Shared {
    fn new(branch: u32) -> Self {
        Self::with_accounting(branch, MemoryAccounting::default())
    }

    fn with_accounting(branch: u32, memory_accounting: MemoryAccounting) -> Self {
        let driver = Driver::of_branch(branch);
        let gpus = vec![GpuSpec::new("a100-80")];
        let mig_uuids = MigUuids::Fresh;
        let spec = NodeSpec { driver, memory_accounting, mig_uuids, ..NodeSpec::new("n", gpus) };
        let node = Node::new(spec);
        // No namespace has this number: containers that happen to run on this machine are not the node's.
        node.sim.set_pid_namespace(Some(0)).unwrap();
        node.sim.run_kernel().unwrap();
        let servers = Servers {
            seen: watch::Sender::new(Some(Pods::new())),
            running: Arc::default(),
            made: Arc::default(),
            program: node.sim.root().join("usr/bin/nvidia-cuda-mps-control"),
        };
        assert!(
            servers.program.exists(),
            "build the simulated programs first: cargo build -p kerf-sim --bins"
        );
        Self { node, servers, cgroups: Cgroups::new() }
    }

    fn start(&self) -> Daemon {
        let servers = self.servers.clone();
        let write: Writer = Arc::new(move |order| {
            let servers = servers.clone();
            Box::pin(async move {
                servers.order(order);
                Ok(())
            })
        });
        let pods = ServerPods { seen: self.servers.seen.subscribe(), write };
        start_with_pods(self.node.sim.root(), &self.node.state_dir(), None, pods, &self.cgroups.0)
    }

    fn mode(&self) -> u32 {
        self.node.sim.state().unwrap().gpus[0].compute_mode
    }

    /// A program of CUDA in a share.
    fn program(&self, gpu: &Gpu, share: Option<&WantedShare>, arguments: &[&str]) -> Command {
        self.program_on(&gpu.name, share, arguments)
    }

    /// The same in a share of what has this name.
    fn program_on(&self, carrier: &str, share: Option<&WantedShare>, arguments: &[&str]) -> Command {
        let program = self.node.sim.root().join("usr/bin/nvidia-cuda-mps-control");
        // Beside the programs that were built with it.
        let built = std::env::current_exe().unwrap();
        let folder = built.parent().and_then(|deps| deps.parent()).expect("target directory");
        assert!(program.exists());
        let pipe = self.node.state_dir().join("mps").join(carrier).join("pipe");
        let pipe = match share {
            Some(share) if self.is_v3() => pipe.join("kerf").join(share.id.replace('-', "")),
            Some(_) => pipe,
            None => self.node.dir.path().join("nowhere"),
        };
        let mut command = Command::new(folder.join("kerf-sim-cuda"));
        command
            .args(arguments)
            .env("KERF_SIM_ROOT", self.node.sim.root())
            .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    fn is_v3(&self) -> bool {
        self.node.sim.state().unwrap().driver.branch() >= 615
    }

    /// Runs a program to its end: its exit status, and its events.
    fn run(&self, gpu: &Gpu, share: Option<&WantedShare>, arguments: &[&str]) -> (Option<i32>, String) {
        self.run_on(&gpu.name, share, arguments)
    }

    fn run_on(
        &self,
        carrier: &str,
        share: Option<&WantedShare>,
        arguments: &[&str],
    ) -> (Option<i32>, String) {
        let output = self.program_on(carrier, share, arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn share(number: u32, gib: u64, percent: u32) -> WantedShare {
    WantedShare {
        id: format!("00000000-0000-4000-8000-{number:012}"),
        memory_bytes: gib * GIB,
        compute_milli: percent * 1000,
        isolation: Isolation::Process,
    }
}

fn partition(gpu: &Gpu, share: &WantedShare) -> Partition {
    let owner = ClaimOwner {
        namespace: "ns".into(),
        name: share.id.clone(),
        pod: "pod".into(),
        pod_uid: share.id.clone(),
        request: "r".into(),
    };
    Partition {
        gpu: gpu.uuid.clone(),
        instance: None,
        share: Some(share.clone()),
        owner: Owner::Claim(owner),
    }
}

fn off(gpu: &Gpu) -> DesiredGpu {
    DesiredGpu { mig: DesiredMig::Disabled, ..managed(gpu) }
}

fn in_force(gpu: &Gpu) -> Vec<&str> {
    gpu.shares.iter().filter(|share| share.problem.is_none()).map(|share| share.id.as_str()).collect()
}

fn find<'a>(gpu: &'a Gpu, wanted: &WantedShare) -> &'a Share {
    gpu.shares.iter().find(|share| share.id == wanted.id).expect("reported")
}

/// Wants these shares, and waits until just these are in force.
async fn settle(daemon: &Daemon, generation: i64, gpu: &Gpu, shares: &[&WantedShare]) -> Gpu {
    let partitions: Vec<Partition> = shares.iter().map(|share| partition(gpu, share)).collect();
    daemon.apply(generation, &[off(gpu)], &partitions);
    all_in_force(daemon, shares).await
}

async fn all_in_force(daemon: &Daemon, shares: &[&WantedShare]) -> Gpu {
    let mut ids: Vec<&str> = shares.iter().map(|share| share.id.as_str()).collect();
    ids.sort_unstable();
    let inventory =
        daemon.until("all shares in force", |inventory| in_force(&inventory.gpus[0]) == ids).await;
    inventory.gpus[0].clone()
}

/// As Prepare does. The pod has the share's id.
async fn prepare(daemon: &Daemon, gpu: &Gpu, share: &WantedShare) -> Result<Prepared, LimitError> {
    prepare_for(daemon, gpu, share, &share.id).await
}

async fn prepare_for(
    daemon: &Daemon,
    gpu: &Gpu,
    share: &WantedShare,
    pod: &str,
) -> Result<Prepared, LimitError> {
    prepare_on(daemon, DeviceKey::gpu(&gpu.uuid), share, pod).await
}

async fn prepare_on(
    daemon: &Daemon,
    carrier: DeviceKey,
    share: &WantedShare,
    pod: &str,
) -> Result<Prepared, LimitError> {
    let device = PreparedDevice {
        request: "r".into(),
        device: "d".into(),
        uuid: carrier.gpu.clone(),
        key: carrier.with_share(&share.id),
        cdi: vec![],
        share: Some(share.clone()),
    };
    let claim = ClaimReference { namespace: "ns".into(), name: share.id.clone(), uid: share.id.clone() };
    let pod = PodReference { namespace: "ns".into(), name: "pod".into(), uid: pod.into() };
    let record = Prepared { claim, pod: Some(pod), devices: vec![device] };
    daemon.state.prepared.record(record.clone()).unwrap();
    let inventory = daemon.state.latest().unwrap();
    daemon.limits.enforce(&record, &inventory, || daemon.state.prepared.snapshot()).await.map(|()| record)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_of_any_size_are_each_limited_and_leave_nothing_behind() {
    let shared = Shared::new(615);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let sharing = gpu.sharing.clone().expect("can carry shares");
    assert_eq!((sharing.isolation, sharing.max_clients, sharing.equal_sizes), (Isolation::Driver, 60, false));
    let (a, b) = (share(1, 10, 25), share(2, 20, 50));
    let seen = settle(&daemon, 1, &gpu, &[&a, &b]).await;
    assert_eq!(find(&seen, &b).compute_percent, 50);
    assert_eq!(shared.mode(), ComputeMode::EXCLUSIVE_PROCESS.0);

    // Each gets its own and no more; who avoids the pipe directory gets nothing.
    let allocate = |share, size| shared.run(&gpu, share, &["--allocate", size, "--seconds", "0"]);
    assert_eq!(allocate(Some(&a), "9Gi").0, Some(0), "{}", allocate(Some(&a), "9Gi").1);
    let (status, events) = allocate(Some(&a), "11Gi");
    assert_eq!(status, Some(4), "{events}");
    assert_eq!(allocate(Some(&b), "11Gi").0, Some(0));
    assert_eq!(allocate(None, "1Gi").0, Some(3));

    // A program in a share is seen, and its share stays when nobody wants it any more, until it has ended.
    let mut program = Guard(shared.program(&gpu, Some(&b), &["--allocate", "1Gi"]).spawn().unwrap());
    shared.cgroups.pod(&b.id);
    prepare(&daemon, &gpu, &b).await.unwrap();
    let inventory = daemon.until("a client", |seen| find(&seen.gpus[0], &b).processes == 1).await;
    assert!(inventory.gpus[0].processes.is_empty(), "{:?}", inventory.gpus[0].processes);
    daemon.apply(2, &[off(&gpu)], &[]);
    daemon.until("only what is in use", |seen| in_force(&seen.gpus[0]) == [b.id.as_str()]).await;
    let report = daemon.report(&gpu.uuid, "a problem", |report| report.problem.is_some()).await;
    assert_eq!(report.problem.unwrap().reason, problem_reason::IN_USE);
    assert!(program.0.try_wait().unwrap().is_none(), "it runs on");
    daemon.state.prepared.remove(&b.id);
    program.0.kill().unwrap();
    program.0.wait().unwrap();
    daemon.until("no share", |seen| seen.gpus[0].shares.is_empty()).await;
    eventually("the mode is what it was", || shared.mode() == ComputeMode::DEFAULT.0).await;
    assert!(shared.servers.running.lock().is_empty());
    assert_eq!(shared.servers.made(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_outlive_the_daemon_and_a_server_that_is_killed_has_them_at_once() {
    let shared = Shared::new(615);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let (a, b) = (share(1, 10, 25), share(2, 20, 50));
    settle(&daemon, 1, &gpu, &[&a, &b]).await;
    let mut program = Guard(shared.program(&gpu, Some(&b), &["--allocate", "1Gi"]).spawn().unwrap());
    eventually("a client", || {
        !shared.run_control(&gpu, &["client", "list", "--all", "--format=csv,noheader"]).is_empty()
    })
    .await;
    drop(daemon);
    assert!(program.0.try_wait().unwrap().is_none());
    // Nobody is there to give a server its namespaces again.
    shared.servers.crash(&DeviceKey::gpu(&gpu.uuid));
    eventually("the program was told", || program.0.try_wait().unwrap().is_some()).await;
    // Who comes before the server gets past it.
    eventually("a server", || shared.run_control(&gpu, &["server", "get", "kerf", "status"]) == "Ready\n")
        .await;
    eventually("the limits hold", || {
        let run = |size| shared.run(&gpu, Some(&a), &["--allocate", size, "--seconds", "0"]).0;
        run("9Gi") == Some(0) && run("11Gi") == Some(4)
    })
    .await;
    // The next daemon takes over what is there.
    let daemon = shared.start();
    settle(&daemon, 1, &gpu, &[&a, &b]).await;
    assert_eq!(shared.servers.made(), 1);
    // A server that is killed alone is not started again by its control daemon.
    let server = shared.run_control(&gpu, &["server", "get", "kerf", "pid"]);
    let pid = nix::unistd::Pid::from_raw(server.trim().parse().unwrap());
    nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    eventually("another server", || {
        let now = shared.run_control(&gpu, &["server", "get", "kerf", "pid"]);
        !now.is_empty() && now != server
    })
    .await;
    all_in_force(&daemon, &[&a, &b]).await;
    daemon.apply(2, &[off(&gpu)], &[]);
    eventually("the mode is what it was", || shared.mode() == ComputeMode::DEFAULT.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_protocol_3_shares_are_of_one_size_and_no_server_is_without_limits() {
    let shared = Shared::new(580);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let sharing = gpu.sharing.clone().expect("can carry shares");
    assert_eq!((sharing.isolation, sharing.max_clients, sharing.equal_sizes), (Isolation::Process, 48, true));
    let (a, b, other) = (share(1, 10, 25), share(2, 10, 25), share(3, 20, 50));
    let wanted: Vec<Partition> = [&a, &b, &other].map(|share| partition(&gpu, share)).to_vec();
    daemon.apply(1, &[off(&gpu)], &wanted);
    let seen = all_in_force(&daemon, &[&a, &b]).await;
    assert_eq!(find(&seen, &other).problem.as_ref().unwrap().reason, problem_reason::SIZES_DIFFER);
    assert_eq!(shared.run(&gpu, Some(&a), &["--allocate", "11Gi", "--seconds", "0"]).0, Some(4));
    shared.servers.crash(&DeviceKey::gpu(&gpu.uuid));
    eventually("the limits hold", || {
        let run = |size| shared.run(&gpu, Some(&a), &["--allocate", size, "--seconds", "0"]).0;
        eprintln!(
            "{:?} {:?} {}",
            shared.run(&gpu, Some(&a), &["--allocate", "9Gi", "--seconds", "0"]),
            std::fs::read_to_string(
                shared.node.state_dir().join("mps").join(&gpu.name).join("log/control.log")
            )
            .unwrap_or_default()
            .lines()
            .rev()
            .take(4)
            .collect::<Vec<_>>(),
            shared.run_control(&gpu, &["server", "list"])
        );
        run("9Gi") == Some(0) && run("11Gi") == Some(4)
    })
    .await;
    // Another size takes another pod, once nobody is in this one.
    settle(&daemon, 2, &gpu, &[&other]).await;
    assert_eq!(shared.servers.made(), 2);
    assert_eq!(shared.run(&gpu, Some(&other), &["--allocate", "19Gi", "--seconds", "0"]).0, Some(0));
    let strict = WantedShare { isolation: Isolation::Driver, ..share(4, 20, 50) };
    daemon.apply(3, &[off(&gpu)], &[partition(&gpu, &strict)]);
    let seen =
        daemon.until("the other share", |seen| seen.gpus[0].shares.iter().any(|s| s.id == strict.id)).await;
    let problem = find(&seen.gpus[0], &strict).problem.clone();
    assert_eq!(problem.unwrap().reason, problem_reason::ISOLATION_UNAVAILABLE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_is_replaced() {
    hang(615, |shared, gpu| {
        shared.run_control(gpu, &["server", "get", "kerf", "pid"]).trim().parse().unwrap()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_control_daemon_that_hangs_is_replaced() {
    hang(580, |shared, gpu| shared.servers.running.lock()[&DeviceKey::gpu(&gpu.uuid)].1.id()).await;
}

/// What is found so is stopped while a program is in a share.
async fn hang(branch: u32, find: impl Fn(&Shared, &Gpu) -> u32) {
    let shared = Shared::new(branch);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let (a, b) = (share(1, 10, 25), share(2, 10, 25));
    settle(&daemon, 1, &gpu, &[&a, &b]).await;
    let pod = shared.cgroups.pod(&a.id);
    prepare(&daemon, &gpu, &a).await.unwrap();
    let program = shared.program(&gpu, Some(&a), &["--allocate", "1Gi"]);
    let mut program = Guard(in_cgroup(&pod, &program).spawn().unwrap());
    daemon.until("a client", |seen| seen.gpus[0].shares.iter().any(|share| share.processes == 1)).await;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(find(&shared, &gpu)).unwrap());
    nix::sys::signal::kill(pid, Signal::SIGSTOP).unwrap();
    // Meanwhile nothing is said to be in force that nobody can read.
    let hangs =
        |share: &Share| share.problem.as_ref().is_some_and(|why| why.reason == problem_reason::MPS_HANGS);
    daemon.until("the word of it", |seen| seen.gpus[0].shares.iter().all(hangs)).await;
    let hangs = |report: &GpuReport| {
        report.problem.as_ref().is_some_and(|why| why.reason == problem_reason::MPS_HANGS)
    };
    daemon.report(&gpu.uuid, "the word of it", hangs).await;
    eventually("another server", || shared.servers.made() == 2).await;
    eventually("the client has ended", || program.0.try_wait().unwrap().is_some()).await;
    all_in_force(&daemon, &[&a, &b]).await;
    assert_eq!(shared.run(&gpu, Some(&a), &["--allocate", "11Gi", "--seconds", "0"]).0, Some(4));
    daemon.report(&gpu.uuid, "no problem", |report| report.problem.is_none()).await;
    assert_eq!(shared.servers.made(), 2, "replaced once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_succeeds_without_effect_is_not_taken_again_at_once() {
    let shared = Shared::new(615);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let (a, b) = (share(1, 10, 25), share(2, 20, 50));
    settle(&daemon, 1, &gpu, &[&a]).await;
    // From now on limits are taken, and forgotten.
    let program = &shared.servers.program;
    let beside = |name: &str| program.with_extension(name);
    std::fs::rename(program, beside("real")).unwrap();
    std::fs::write(beside("idle"), "").unwrap();
    let script = r#"#!/bin/sh
if [ "$1 $2" = "namespace set" ] && [ -e "$0.idle" ]; then echo >> "$0.tries"; exit 0; fi
exec "$0.real" "$@"
"#;
    std::fs::write(beside("new"), script).unwrap();
    std::fs::set_permissions(beside("new"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::rename(beside("new"), program).unwrap();
    daemon.apply(2, &[off(&gpu)], &[&a, &b].map(|share| partition(&gpu, share)));
    let report = daemon.report(&gpu.uuid, "a problem", |report| report.problem.is_some()).await;
    let problem = report.problem.unwrap();
    assert!(problem.message.contains("has no effect"), "{problem:?}");
    assert_eq!(problem.reason, problem_reason::MPS_NOT_READY);
    let tries = std::fs::read_to_string(beside("tries")).unwrap().lines().count();
    assert!(tries < 20, "tried {tries} times");
    std::fs::remove_file(beside("idle")).unwrap();
    all_in_force(&daemon, &[&a, &b]).await;
    daemon.report(&gpu.uuid, "no problem", |report| report.problem.is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_somebody_else_hands_out_keeps_no_server_that_nobody_uses() {
    let shared = Shared::new(615);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let a = share(1, 10, 25);
    settle(&daemon, 1, &gpu, &[&a]).await;
    let why = Reason { reason: "ForeignDevicePlugin".into(), message: "a device plugin".into() };
    daemon.verdicts.send_replace(Some(Some(why)));
    eventually("nothing is left", || {
        shared.servers.running.lock().is_empty() && shared.mode() == ComputeMode::DEFAULT.0
    })
    .await;
    let seen = daemon.until("the GPU let go", |seen| !seen.gpus[0].mps.there).await;
    assert!(in_force(&seen.gpus[0]).is_empty());
    daemon.verdicts.send_replace(Some(None));
    all_in_force(&daemon, &[&a]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_goes_from_instances_to_shares_and_back() {
    let shared = Shared::new(615);
    shared.node.sim.reload_driver().unwrap();
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let instance = crate::node::claim(&gpu, "3g.40gb", 0, 4);
    daemon.settle(1, &[managed(&gpu)], std::slice::from_ref(&instance)).await;
    let a = share(1, 10, 25);
    settle(&daemon, 2, &gpu, &[&a]).await;
    assert!(shared.node.layout().is_empty());
    daemon.settle(3, &[managed(&gpu)], std::slice::from_ref(&instance)).await;
    assert_eq!((shared.node.layout(), shared.mode()), (vec!["0 3g.40gb@0".to_owned()], 0));
    let done = |step| sample(&daemon, &[&format!("kerf_steps_total{{step=\"{step}\",result=\"done\"}}")]);
    assert_eq!((done("CreateGpuInstance"), done("CreatePod")), (Some(2.0), Some(1.0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_whose_limits_would_reach_no_pod_is_not_counted_on() {
    let shared = Shared::new(615);
    std::fs::remove_dir(shared.cgroups.0.join("kubepods")).unwrap();
    let daemon = shared.start();
    let sharing = daemon.inventory().await.gpus[0].sharing.clone().expect("can carry shares");
    assert_eq!(sharing.isolation, Isolation::Process);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_driver_limits_a_pods_memory_whatever_its_processes_do() {
    let shared = Shared::new(615);
    let mut daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let (a, b) = (share(1, 10, 25), share(2, 20, 50));
    settle(&daemon, 1, &gpu, &[&a, &b]).await;
    let error = prepare(&daemon, &gpu, &a).await.unwrap_err();
    assert!(matches!(&error, LimitError::NoCgroup { .. }), "{error}");
    daemon.state.prepared.remove(&a.id);

    let pod = shared.cgroups.pod(&a.id);
    let first = prepare(&daemon, &gpu, &a).await.unwrap();
    let limit = || {
        let state = shared.node.sim.state().unwrap();
        state.memory_limits.iter().find(|limit| limit.set).map(|limit| (limit.soft, limit.hard))
    };
    assert_eq!(limit(), Some((0, 10 * GIB)));
    // By MPS each process could have 10 GiB.
    let several = ["--processes", "3", "--allocate", "4Gi", "--seconds", "1", "--keep-going"];
    let output = in_cgroup(&pod, &shared.program(&gpu, Some(&a), &several)).output().unwrap();
    let events = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(events.matches("\"granted\"").count(), 2, "{events}");

    let above = |pod: &Path| {
        let state = shared.node.sim.state().unwrap();
        let pod = pod.to_string_lossy();
        let above = state.memory_limits.iter().filter(|limit| *limit.path != *pod);
        above.map(|limit| limit.soft).collect::<Vec<_>>()
    };
    assert!(above(&pod).is_empty(), "guaranteed for good if the cgroup goes first: {:?}", above(&pod));

    // Two claims of one pod have what both have together.
    let second = prepare_for(&daemon, &gpu, &b, &a.id).await.unwrap();
    assert_eq!(limit(), Some((0, 30 * GIB)));
    shared.node.sim.reload_driver().unwrap();
    let note = daemon.note("the limit is back", |note| note.reason == "LimitLost").await;
    assert!(note.message.contains("set again"), "{}", note.message);
    eventually("the limit is back", || limit() == Some((0, 30 * GIB))).await;
    for (record, left) in [(second, Some((0, 10 * GIB))), (first, None)] {
        daemon.state.prepared.remove(&record.claim.uid);
        daemon.limits.lift(&record, || daemon.state.prepared.snapshot()).await;
        assert_eq!(limit(), left);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_sees_its_share_where_limits_nest_and_none_is_lost_where_they_do_not() {
    for (accounting, seen) in [(MemoryAccounting::Dmem, 10 * GIB), (MemoryAccounting::Misc, 30 * GIB)] {
        let shared = Shared::with_accounting(615, accounting);
        let daemon = shared.start();
        let gpu = daemon.inventory().await.gpus[0].clone();
        let (a, b) = (share(1, 10, 25), share(2, 20, 50));
        settle(&daemon, 1, &gpu, &[&a, &b]).await;
        let pod = shared.cgroups.pod(&a.id);
        let first = prepare(&daemon, &gpu, &a).await.unwrap();
        prepare_for(&daemon, &gpu, &b, &a.id).await.unwrap();
        // As a runtime has made it when it calls the hook, the first instruction still to come.
        let container = pod.join("container");
        std::fs::create_dir(&container).unwrap();
        let waiting = Guard(in_cgroup(&container, Command::new("sleep").arg("60")).spawn().unwrap());
        let limit = || daemon.limits.limit_container(&first, &first.devices[0], waiting.0.id());
        let processes = || std::fs::read_to_string(container.join("cgroup.procs")).unwrap();
        eventually("the process is in its cgroup", || !processes().is_empty()).await;
        limit().await.unwrap();
        limit().await.expect("as good again");
        let run = ["--allocate", "1Gi", "--seconds", "0"];
        let output = in_cgroup(&container, &shared.program(&gpu, Some(&a), &run)).output().unwrap();
        let events = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(events.contains(&format!("\"total\":{seen}")), "{accounting:?}: {events}");
        let error = daemon.limits.limit_container(&first, &first.devices[0], 1).await.unwrap_err();
        assert!(error.to_string().contains("process 1 is in no cgroup of the pod"), "{error}");
        drop(waiting);
    }
}

/// The thread that waits for XIDs has the last driver's library for as long as it waits.
#[test]
fn the_next_drivers_library_is_loaded_while_a_call_is_in_the_last_ones() {
    use kerf_node_daemon::hardware::{self, Code, Failure};

    let shared = Shared::new(580);
    let sim = &shared.node.sim;
    let uuid = sim.state().unwrap().gpus[0].uuid.clone();
    let driver = hardware::Driver::new(sim.root());
    let last = driver.session().unwrap();
    let limits = |library: &_| hardware::memory_limits(library, &uuid, &shared.cgroups.0).unwrap_err().code;
    assert_eq!(limits(&last), Code::FUNCTION_NOT_FOUND);
    sim.unload_driver().unwrap();
    driver.note_failure(&last, &Failure { call: "nvmlDeviceGetCount", code: Code::DRIVER_NOT_LOADED });
    assert!(driver.session().is_err());
    sim.upgrade_driver(Driver::of_branch(615)).unwrap();
    assert_eq!(limits(&driver.session().unwrap()), Code::NOT_FOUND, "it has the function");
    drop(last);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_driver_what_a_pod_has_too_much_is_ended_and_nothing_else() {
    let shared = Shared::new(580);
    let mut daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let (a, b) = (share(1, 10, 25), share(2, 10, 25));
    settle(&daemon, 1, &gpu, &[&a, &b]).await;
    let (pod, other) = (shared.cgroups.pod(&a.id), shared.cgroups.pod(&b.id));
    prepare(&daemon, &gpu, &a).await.unwrap();
    prepare(&daemon, &gpu, &b).await.unwrap();
    let start = |pod: &Path, share: Option<&WantedShare>, size: &str| {
        Guard(in_cgroup(pod, &shared.program(&gpu, share, &["--allocate", size])).spawn().unwrap())
    };
    let mut neighbour = start(&other, Some(&b), "9Gi");
    let mut small = start(&pod, Some(&a), "4Gi");
    let mut large = start(&pod, Some(&a), "9Gi");
    let note = daemon.note("the end", |note| note.reason == "ShareExceeded").await;
    assert!(
        note.message.contains("ns/pod") && note.message.contains(&large.0.id().to_string()),
        "{}",
        note.message
    );
    eventually("the largest has ended", || large.0.try_wait().unwrap().is_some()).await;
    assert!(small.0.try_wait().unwrap().is_none() && neighbour.0.try_wait().unwrap().is_none());
    let ended = format!("kerf_clients_ended_total{{gpu=\"{}\",reason=\"memory\"}}", gpu.uuid);
    assert_eq!(sample(&daemon, &[&ended]), Some(1.0));
    // The neighbour's 9 GiB and its context; what is left of the other pod.
    for (share, gib) in [(&b, 9), (&a, 4)] {
        eventually("the memory used is told", || {
            let used = sample(&daemon, &["kerf_share_memory_used_bytes", &share.id]);
            used.is_some_and(|used| (gib * GIB..(gib + 1) * GIB).contains(&(used as u64)))
        })
        .await;
    }

    // While no server runs, a process gets past MPS. It does not stay, and the server comes back.
    let paused = shared.servers.pause(&DeviceKey::gpu(&gpu.uuid));
    drop((small, neighbour));
    let mut past = start(&pod, None, "30Gi");
    loop {
        // The killed server may still hold the GPU: then CUDA does not start.
        let status = past.0.wait().unwrap();
        if status.code() != Some(3) {
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{status}");
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        past = start(&pod, None, "30Gi");
    }
    daemon.note("the end of who was past MPS", |note| note.message.contains("past MPS")).await;
    shared.servers.resume(paused);
    all_in_force(&daemon, &[&a, &b]).await;
}

/// Where the 3g.40gb is beside a 4g.40gb.
const PLACE: Placement = Placement { start: 4, size: 4 };

fn of_instance(gpu: &Gpu, share: &WantedShare) -> Partition {
    let instance = WantedInstance { profile: "3g.40gb".into(), placement: PLACE };
    Partition { instance: Some(instance), ..partition(gpu, share) }
}

fn instance_at(gpu: &Gpu, placement: Placement) -> &Instance {
    gpu.instances.iter().find(|instance| instance.placement == placement).expect("the instance")
}

fn uuid_at(gpu: &Gpu, placement: Placement) -> String {
    instance_at(gpu, placement).device().expect("finished").uuid.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_shares_run_in_one_instance_beside_a_claim_to_another() {
    let shared = Shared::new(615);
    let daemon = shared.start();
    let gpu = daemon.inventory().await.gpus[0].clone();
    let four = crate::node::claim(&gpu, "4g.40gb", 0, 4);
    let all = [share(1, 10, 10), share(2, 12, 14), share(3, 15, 18)];
    let three = [&all[0], &all[1], &all[2]];
    let wanted: Vec<Partition> =
        three.iter().map(|share| of_instance(&gpu, share)).chain([four.clone()]).collect();
    daemon.apply(1, &[managed(&gpu)], &wanted);
    let seen = all_in_force(&daemon, &three).await;
    assert_eq!(shared.node.layout(), ["0 3g.40gb@4", "0 4g.40gb@0"]);
    // Percent of the whole GPU's 98 multiprocessors become percent of the instance's 42.
    let percents = three.map(|share| find(&seen, share).compute_percent);
    assert_eq!(percents, [24, 33, 42]);
    for share in three.map(|share| find(&seen, share)) {
        assert_eq!((share.placement, share.isolation), (Some(PLACE), Isolation::Process));
    }
    assert_eq!(seen.sharing.as_ref().unwrap().isolation, Isolation::Driver, "of the GPU itself");
    assert_eq!(shared.mode(), ComputeMode::DEFAULT.0);
    let carrier = format!("{}-4-4", gpu.name);
    let (mig, mig_of_four) = (uuid_at(&seen, PLACE), uuid_at(&seen, Placement { start: 0, size: 4 }));

    // Each gets its own of this instance, and no more.
    let run = |share, size| shared.run_on(&carrier, Some(share), &["--allocate", size, "--seconds", "0"]);
    let (status, events) = run(three[0], "9Gi");
    assert_eq!(status, Some(0), "{events}");
    assert!(events.contains(&mig) && events.contains("\"sms\":10"), "24 % of 42, in pairs: {events}");
    assert_eq!(run(three[0], "11Gi").0, Some(4));
    assert_eq!(run(three[2], "14Gi").0, Some(0));

    let place = DeviceKey::instance(&gpu.uuid, PLACE);
    let mut programs = Vec::new();
    for share in three {
        let pod = shared.cgroups.pod(&share.id);
        prepare_on(&daemon, place.clone(), share, &share.id).await.unwrap();
        let program = shared.program_on(&carrier, Some(share), &["--allocate", "9Gi"]);
        programs.push(Guard(in_cgroup(&pod, &program).spawn().unwrap()));
    }
    assert!(shared.node.sim.state().unwrap().memory_limits.is_empty(), "the driver's do not reach in there");
    // NVML is asked a moment before MPS.
    let one_each = |gpu: &Gpu| {
        three.iter().all(|share| find(gpu, share).processes == 1)
            && instance_at(gpu, PLACE).mps.clients.len() == 3
    };
    let inventory = daemon.until("a client in each", |seen| one_each(&seen.gpus[0])).await;
    let instance = instance_at(&inventory.gpus[0], PLACE);
    assert!(instance.processes.is_empty() && instance.mps.there, "{instance:?}");
    eventually("the memory used is told", || {
        let words = ["kerf_share_memory_used_bytes", "placement=\"4:4\"", &all[1].id];
        sample(&daemon, &words).is_some_and(|used| (9 * GIB..10 * GIB).contains(&(used as u64)))
    })
    .await;
    // The other instance is nobody's but its claim's, and no matter of MPS.
    let mut other = shared.program_on(&carrier, None, &["--allocate", "30Gi", "--seconds", "0"]);
    assert_eq!(other.env("CUDA_VISIBLE_DEVICES", &mig_of_four).output().unwrap().status.code(), Some(0));

    // The daemon is killed; nobody notices.
    drop(daemon);
    assert_eq!(run(three[0], "11Gi").0, Some(4));
    let mut daemon = shared.start();
    daemon.apply(1, &[managed(&gpu)], &wanted);
    all_in_force(&daemon, &three).await;
    for share in three {
        prepare_on(&daemon, place.clone(), share, &share.id).await.unwrap();
    }
    assert!(programs.iter_mut().all(|program| program.0.try_wait().unwrap().is_none()));
    assert_eq!(shared.servers.made(), 1);

    // No compute mode keeps a process out that avoids MPS: it gets all of the instance until the daemon sees it.
    let mut past = shared.program_on(&carrier, None, &["--allocate", "1Gi"]);
    past.env("CUDA_VISIBLE_DEVICES", &mig);
    let mut past = Guard(in_cgroup(&shared.cgroups.pod(&all[1].id), &past).spawn().unwrap());
    let note = daemon.note("the end of who was past MPS", |note| note.message.contains("past MPS")).await;
    assert!(note.message.contains(&past.0.id().to_string()), "{}", note.message);
    eventually("it has ended", || past.0.try_wait().unwrap().is_some()).await;
    // Nor does the driver count a pod's processes together: the daemon does.
    let more = shared.program_on(&carrier, Some(three[0]), &["--allocate", "8Gi"]);
    let more = Guard(in_cgroup(&shared.cgroups.pod(&all[0].id), &more).spawn().unwrap());
    let note = daemon.note("the end of the largest", |note| note.reason == "ShareExceeded").await;
    assert!(note.message.contains(&programs[0].0.id().to_string()), "{}", note.message);
    eventually("the largest has ended", || programs[0].0.try_wait().unwrap().is_some()).await;
    assert!(programs[1..].iter_mut().all(|program| program.0.try_wait().unwrap().is_none()));

    // Nobody wants them any more: what is used stays, and then nothing is left of what carried them.
    let gone = crate::node::claim(&gpu, "1g.10gb", 4, 1);
    daemon.apply(2, &[managed(&gpu)], &[four.clone(), gone.clone()]);
    let report = daemon.report(&gpu.uuid, "a problem", |report| report.problem.is_some()).await;
    assert_eq!(report.problem.unwrap().reason, problem_reason::IN_USE);
    assert!(programs[1].0.try_wait().unwrap().is_none() && shared.servers.made() == 1);
    drop((programs, more));
    for share in three {
        daemon.state.prepared.remove(&share.id);
    }
    daemon.settled(2, &[four, gone]).await;
    assert_eq!(shared.node.layout(), ["0 1g.10gb@4", "0 4g.40gb@0"]);
    assert!(shared.servers.running.lock().is_empty());
    assert!(daemon.state.latest().unwrap().gpus[0].shares.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_with_shares_is_found_again_after_a_boot_under_another_uuid() {
    for branch in [580, 615] {
        let shared = Shared::new(branch);
        let daemon = shared.start();
        let gpu = daemon.inventory().await.gpus[0].clone();
        let (a, b) = (share(1, 10, 10), share(2, 10, 10));
        let wanted = [of_instance(&gpu, &a), of_instance(&gpu, &b)];
        daemon.apply(1, &[managed(&gpu)], &wanted);
        let before = uuid_at(&all_in_force(&daemon, &[&a, &b]).await, PLACE);
        drop(daemon);
        let place = DeviceKey::instance(&gpu.uuid, PLACE);
        shared.node.sim.reboot().unwrap();
        shared.node.sim.run_kernel().unwrap();
        // kubelet starts the containers of the pods that it knows.
        shared.servers.crash(&place);
        let daemon = shared.start();
        daemon.inventory().await;
        shared.cgroups.pod(&a.id);
        prepare_on(&daemon, place, &a, &a.id).await.unwrap();
        daemon.apply(1, &[managed(&gpu)], &wanted);
        let seen = all_in_force(&daemon, &[&a, &b]).await;
        assert_ne!(uuid_at(&seen, PLACE), before);
        assert_eq!(shared.servers.made(), 2, "of the instance that is there");
        let carrier = format!("{}-4-4", gpu.name);
        let run = |size| shared.run_on(&carrier, Some(&a), &["--allocate", size, "--seconds", "0"]).0;
        assert_eq!((run("9Gi"), run("11Gi")), (Some(0), Some(4)), "{branch}");
        daemon.state.prepared.remove(&a.id);
        let off = DesiredGpu { mig: DesiredMig::Disabled, ..managed(&gpu) };
        daemon.apply(2, &[off], &[]);
        daemon.until("MIG is off", |seen| !seen.gpus[0].mig.enabled).await;
        assert!(shared.servers.running.lock().is_empty());
    }
}

/// The value of the one series with these words in it.
fn sample(daemon: &Daemon, words: &[&str]) -> Option<f64> {
    let text = metrics::scrape(&daemon.state).unwrap();
    let line =
        text.lines().find(|line| !line.starts_with('#') && words.iter().all(|word| line.contains(word)))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// The command, run in a cgroup.
fn in_cgroup(cgroup: &Path, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(cgroup).arg(command.get_program());
    shell.args(command.get_args()).stdin(Stdio::null()).stderr(Stdio::null());
    for (name, value) in command.get_envs() {
        shell.env(name, value.unwrap());
    }
    shell
}

struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Shared {
    fn run_control(&self, gpu: &Gpu, words: &[&str]) -> String {
        let output = Command::new(&self.servers.program)
            .args(words)
            .env("CUDA_MPS_PIPE_DIRECTORY", self.node.state_dir().join("mps").join(&gpu.name).join("pipe"))
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}
