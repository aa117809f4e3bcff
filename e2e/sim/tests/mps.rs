//! GPU memory, MPS and limits, by the programs that a node has: each rule that a tenant or an administrator can meet.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kerf_sim::{
    Driver, Fault, GpuSpec, MemoryAccounting, NodeSpec, NvmlError, Occurrence, SimNode, When, fault::Action,
};
use serde_json::Value;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
/// Of an A100 with 80 GB: 81920 MiB but for what the driver keeps.
const USABLE: u64 = (81_920 - 640) << 20;

/// A node with a running kernel, and a control daemon's directories.
struct Node {
    node: SimNode,
    folder: TempDir,
}

impl Node {
    fn new(branch: u32) -> Node {
        Node::of(NodeSpec { driver: Driver::of_branch(branch), ..NodeSpec::uniform("n", "a100-80", 1) })
    }

    fn of(spec: NodeSpec) -> Node {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::Builder::new().prefix("kerf-mps").tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let library = folder.path().join("library");
        std::fs::write(&library, "").unwrap();
        let spec = NodeSpec { library: Some(library), ..spec };
        let node = SimNode::create(&folder.path().join("root"), &spec)
            .unwrap_or_else(|error| panic!("failed to make a simulated node (as root?): {error}"));
        // No namespace has this number: containers that happen to run on this machine are not ours.
        node.set_pid_namespace(Some(0)).unwrap();
        node.run_kernel().unwrap();
        Node { node, folder }
    }

    fn pipe(&self) -> PathBuf {
        self.folder.path().join("pipe")
    }

    fn logs(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn uuid(&self) -> String {
        self.node.state().unwrap().gpus[0].uuid.clone()
    }

    /// The control program of the node, with the directories set.
    fn control(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.node.root().join("usr/bin/nvidia-cuda-mps-control"));
        command
            .args(arguments)
            .env("CUDA_MPS_PIPE_DIRECTORY", self.pipe())
            .env("CUDA_MPS_LOG_DIRECTORY", self.logs())
            .stdin(Stdio::null());
        command
    }

    /// Starts a daemon in the background; it ends with the guard.
    fn daemon(&self, arguments: &[&str]) -> Daemon<'_> {
        let output = self.control(&[&["-d"], arguments].concat()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        Daemon(self)
    }

    /// Runs a command and wants it to succeed.
    #[track_caller]
    fn mps(&self, words: &str) -> String {
        let output = self.control(&words.split(' ').collect::<Vec<_>>()).output().unwrap();
        assert!(output.status.success(), "{words}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs a command and wants it to fail.
    #[track_caller]
    fn refused(&self, words: &str) -> String {
        let output = self.control(&words.split(' ').collect::<Vec<_>>()).output().unwrap();
        assert!(!output.status.success(), "{words} was accepted");
        text(&output.stderr)
    }

    fn client(&self, pipe: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kerf-sim-cuda"));
        command
            .args(arguments)
            .env("KERF_SIM_ROOT", self.node.root())
            .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
            .stdin(Stdio::null());
        if !arguments.contains(&"--seconds") {
            // One that should be ended and is not ends a test all the same.
            command.args(["--seconds", "30"]);
        }
        command
    }

    /// Starts a client in a pipe directory, which reports its start.
    #[track_caller]
    fn start(&self, pipe: &Path, arguments: &[&str]) -> Program {
        Program::start(&mut self.client(pipe, arguments))
    }

    /// Runs a client to its end: exit status and events.
    fn run(&self, pipe: &Path, arguments: &[&str]) -> (i32, Vec<Value>) {
        ended(&self.client(pipe, arguments).output().unwrap())
    }

    /// A pipe directory in which nobody listens.
    fn nowhere(&self) -> PathBuf {
        self.folder.path().join("nowhere")
    }

    /// The pid of the only server, once it is ready.
    fn server(&self) -> u32 {
        eventually(|| self.mps("get_server_list").trim().parse().ok())
    }

    fn wait_ready(&self, server: &str) {
        eventually(|| (self.mps(&format!("server get {server} status")) == "Ready\n").then_some(()));
    }
}

struct Daemon<'a>(&'a Node);

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(self.0.pipe().join("nvidia-cuda-mps-control.pid"));
        if let Ok(pid) = pid {
            let _ = Command::new("kill").args(["-9", pid.trim()]).status();
        }
    }
}

/// A running client.
struct Program {
    child: Child,
    lines: BufReader<ChildStdout>,
    /// Its first event.
    first: Value,
}

impl Program {
    #[track_caller]
    fn start(command: &mut Command) -> Program {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut program = Program { child, lines, first: Value::Null };
        program.first = program.next();
        program
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn granted(mut self) -> Program {
        let event = self.next();
        assert_eq!(event["event"], "granted", "{event}");
        self
    }

    fn status(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ended(output: &Output) -> (i32, Vec<Value>) {
    let events = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code().unwrap(), events)
}

fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(Instant::now() < end, "it does not come about"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

const ONE: &[&str] = &["--allocate", "1Gi", "--seconds", "0"];

// Without MPS.

#[test]
fn memory_is_the_gpus_and_comes_back_with_its_process() {
    let node = Node::new(580);
    let first = node.start(&node.nowhere(), &["--allocate", "60Gi"]).granted();
    assert_eq!(first.first["mps"], false);
    assert_eq!(first.first["free"], USABLE);
    assert_eq!(first.first["total"], 81_920u64 << 20);
    let (status, events) = node.run(&node.nowhere(), &["--allocate", "19Gi", "--allocate", "1Gi"]);
    assert_eq!(status, 4);
    assert_eq!(events[1]["event"], "granted");
    assert_eq!(events[2]["error"], "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(
        node.run(&node.nowhere(), &["--processes", "2", "--allocate", "10Gi", "--seconds", "0.5"]).0,
        4
    );
    drop(first);
    let all = USABLE.to_string();
    eventually(|| (node.run(&node.nowhere(), &["--allocate", &all, "--seconds", "0"]).0 == 0).then_some(()));
}

#[test]
fn compute_modes_let_in_whom_they_say() {
    let node = Node::new(580);
    let modes = |mode| {
        let path = node.node.root().to_owned();
        let node = SimNode::open(&path).unwrap();
        node.set_compute_mode(0, mode).unwrap();
    };
    modes(2);
    let (status, events) = node.run(&node.nowhere(), ONE);
    assert_eq!((status, &events[0]["error"]), (3, &"CUDA_ERROR_DEVICE_UNAVAILABLE".into()));
    modes(3);
    let only = node.start(&node.nowhere(), &[]);
    assert_eq!(node.run(&node.nowhere(), ONE).0, 3, "another process has the GPU");
    drop(only);
    eventually(|| (node.run(&node.nowhere(), ONE).0 == 0).then_some(()));
}

#[test]
fn a_node_without_a_kernel_has_no_cuda() {
    let node = Node::new(580);
    let mut program = node.start(&node.nowhere(), &[]);
    node.node.stop_kernel();
    assert_eq!(program.next()["event"], "terminated");
    assert_eq!(node.run(&node.nowhere(), ONE).1[0]["error"], "CUDA_ERROR_NO_DEVICE");
    node.node.run_kernel().unwrap();
    assert_eq!(node.run(&node.nowhere(), ONE).0, 0);
}

// The second protocol.

#[test]
fn a_daemon_is_found_by_its_pipe_directory() {
    let node = Node::new(580);
    let output = node.control(&["get_server_list"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "Cannot find MPS control daemon process\n");
    let _daemon = node.daemon(&[]);
    let again = node.control(&["-d"]).output().unwrap();
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("An instance of this daemon is already running"));
    assert_eq!(node.mps("get_server_list"), "", "servers come with clients");
    assert_eq!(node.mps("get_default_active_thread_percentage"), "100.0\n");
    // By the standard input, as the documentation shows it.
    let mut echo = node.control(&[]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut echo.stdin.take().unwrap(), b"start_server -uid 0\nquit\n").unwrap();
    assert!(echo.wait_with_output().unwrap().status.success());
    eventually(|| (!node.pipe().join("control").exists()).then_some(()));
    let log = std::fs::read_to_string(node.logs().join("control.log")).unwrap();
    assert!(log.contains("Starting control daemon using socket") && log.contains("for user 0"), "{log}");
    assert!(std::fs::read_to_string(node.logs().join("server.log")).unwrap().contains("Starting server"));
    // A socket's path has an end.
    let long = node.folder.path().join("x".repeat(108));
    let output = node.control(&["-d"]).env("CUDA_MPS_PIPE_DIRECTORY", long).output().unwrap();
    assert!(text(&output.stderr).contains("Cannot find MPS control daemon process"));
}

#[test]
fn defaults_reach_the_next_server_and_its_own_limits_the_next_client() {
    let node = Node::new(595);
    let _daemon = node.daemon(&[]);
    node.mps("set_default_device_pinned_mem_limit 0 1536M");
    node.mps("set_default_active_thread_percentage 50");
    assert_eq!(node.mps("get_default_device_pinned_mem_limit 0"), "1G\n", "printed rounded down");
    let client = node.start(&node.pipe(), &[]);
    assert_eq!((&client.first["mps"], &client.first["devices"][0]["sms"]), (&true.into(), &54.into()));
    assert_eq!(client.first["free"], 1536u64 << 20);
    assert_eq!(client.first["total"], 81_920u64 << 20, "the whole GPU is the total");
    let server = node.server();

    node.mps("set_default_device_pinned_mem_limit 0 8G");
    assert_eq!(node.start(&node.pipe(), &[]).first["free"], 1536u64 << 20, "the server is the old one");
    node.mps(&format!("set_device_pinned_mem_limit {server} 0 3G"));
    node.mps(&format!("set_active_thread_percentage {server} 25"));
    let other = node.start(&node.pipe(), &[]);
    assert_eq!((&other.first["free"], &other.first["devices"][0]["sms"]), (&(3 * GIB).into(), &26.into()));
    assert!(node.mps("set_default_device_pinned_mem_limit 0 lots").starts_with("Invalid limit"));
    assert_eq!(node.mps("get_device_pinned_mem_limit 1 0"), "Server 1 not found\n", "with exit status 0");
    let list = node.mps(&format!("get_client_list {server}"));
    assert!(list.contains(&client.child.id().to_string()), "{list}");
    assert!(node.mps("ps").contains("kerf-sim-cuda"));
    assert_eq!(node.mps(&format!("get_server_status {server}")), "ACTIVE\n");

    // Limits are each process's own.
    drop((client, other));
    let both =
        node.run(&node.pipe(), &["--processes", "2", "--fill", "1Gi", "--keep-going", "--seconds", "0"]);
    assert_eq!(both.1.iter().filter(|event| event["event"] == "granted").count(), 6);
}

#[test]
fn the_environment_tightens_limits_and_a_wrong_entry_drops_them() {
    let node = Node::new(580);
    let _daemon = node.daemon(&[]);
    node.mps("set_default_device_pinned_mem_limit 0 2G");
    node.mps("set_default_active_thread_percentage 50");
    let free = |limit: &str| {
        let variable = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={limit}");
        node.start(&node.pipe(), &["--set", &variable]).first["free"].clone()
    };
    assert_eq!(free("0=1G"), GIB);
    assert_eq!(free("0=4G"), 2 * GIB);
    assert_eq!(free("GPU-00000000=1G"), USABLE, "no pinned limit at all");
    assert_eq!(free("0=1G,1=1G"), USABLE);
    let sms = |percentage: &str| {
        let variable = format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}");
        node.start(&node.pipe(), &["--set", &variable]).first["devices"][0]["sms"].clone()
    };
    assert_eq!((sms("10"), sms("90")), (10.into(), 54.into()));
}

#[test]
fn whoever_avoids_mps_gets_all_in_default_mode_and_nothing_in_exclusive_mode() {
    let node = Node::new(580);
    let _daemon = node.daemon(&[]);
    node.mps("set_default_device_pinned_mem_limit 0 1G");
    let tenant = node.start(&node.pipe(), &[]);
    let wrong = ["--unset", "CUDA_MPS_PIPE_DIRECTORY", "--allocate", "70Gi", "--seconds", "0"];
    assert_eq!(node.run(&node.pipe(), &wrong).0, 0);
    node.node.set_compute_mode(0, 3).unwrap();
    let (status, events) = node.run(&node.pipe(), &wrong);
    assert_eq!((status, &events[0]["error"]), (3, &"CUDA_ERROR_DEVICE_UNAVAILABLE".into()));
    let other = node.start(&node.pipe(), &["--allocate", "1Gi"]).granted();
    drop((tenant, other));
}

#[test]
fn a_killed_server_ends_its_clients_and_the_next_client_has_a_new_one() {
    let node = Node::new(580);
    let _daemon = node.daemon(&[]);
    let mut client = node.start(&node.pipe(), &["--allocate", "1Gi"]).granted();
    let server = node.server();
    Command::new("kill").args(["-9", &server.to_string()]).status().unwrap();
    assert_eq!(client.next()["error"], "CUDA_ERROR_MPS_RPC_FAILURE");
    assert_eq!(client.status(), Some(5));
    let next = eventually(|| {
        let program = Program::start(&mut node.client(&node.pipe(), &[]));
        (program.first["event"] == "started").then_some(program)
    });
    assert_ne!(node.server(), server);
    assert_eq!(next.first["mps"], true);

    // One that hangs holds up new clients; those that it has go on.
    let mut old = node.start(&node.pipe(), &["--fill", "64Mi", "--seconds", "30"]);
    Command::new("kill").args(["-STOP", &node.server().to_string()]).status().unwrap();
    assert_eq!(old.next()["event"], "granted");
    let mut new = node.client(&node.pipe(), &[]).stdout(Stdio::null()).spawn().unwrap();
    for _ in 0..20 {
        assert_eq!(old.next()["event"], "granted");
    }
    assert!(new.try_wait().unwrap().is_none());
    new.kill().unwrap();
    new.wait().unwrap();
    let hanging = node.server();
    node.mps(&format!("shutdown_server {hanging} -f"));
    assert_eq!(eventually(|| Some(node.mps("get_server_list")).filter(String::is_empty)), "");
}

#[test]
fn a_terminated_client_has_lost_its_work_and_no_other_has() {
    let node = Node::new(580);
    let _daemon = node.daemon(&[]);
    let mut client = node.start(&node.pipe(), &["--allocate", "1Gi"]).granted();
    let other = node.start(&node.pipe(), &["--allocate", "1Gi"]).granted();
    let server = node.server();
    assert_eq!(node.mps(&format!("terminate_client {server} {}", client.child.id())), "");
    assert_eq!(client.next()["error"], "CUDA_ERROR_MPS_CLIENT_TERMINATED");
    assert_eq!(node.mps(&format!("terminate_client {server} 1")), "Client 1 not found\n");
    assert_eq!(node.start(&node.pipe(), &[]).first["free"], USABLE - GIB);
    drop(other);
}

#[test]
fn a_fault_is_every_clients_and_only_one_partitions() {
    let node = Node::new(610);
    let _daemon = node.daemon(&["-S"]);
    let mut bystander = node.start(&node.pipe(), &[]);
    let signal = |name: &str| {
        let pid = bystander.child.id().to_string();
        Command::new("kill").args([name, &pid]).status().unwrap();
    };
    signal("-STOP");
    assert_eq!(node.run(&node.pipe(), &["--fault"]).1[1]["error"], "CUDA_ERROR_LAUNCH_FAILED");
    let server = node.server();
    assert_eq!(node.mps(&format!("get_server_status {server}")), "FAULT\n");
    assert_eq!(node.run(&node.pipe(), ONE).1[0]["error"], "CUDA_ERROR_MPS_SERVER_NOT_READY");
    signal("-CONT");
    assert_eq!(bystander.next()["error"], "CUDA_ERROR_LAUNCH_FAILED");
    bystander.status();
    eventually(|| (node.mps(&format!("get_server_status {server}")) == "ACTIVE\n").then_some(()));

    let created = node.mps(&format!("sm_partition add {} 7", node.uuid()));
    let id = created.strip_prefix("Partition ").and_then(|rest| rest.strip_suffix(" created\n")).unwrap();
    let partition = format!("CUDA_MPS_SM_PARTITION={id}");
    let own = node.start(&node.pipe(), &["--set", &partition]);
    assert_eq!(own.first["devices"][0]["sms"], 28);
    let rest = node.start(&node.pipe(), &[]);
    assert_eq!(rest.first["devices"][0]["sms"], 80);
    assert_eq!(node.run(&node.pipe(), &["--set", &partition, "--fault"]).0, 5);
    drop(own);
    assert_eq!(node.run(&node.pipe(), ONE).0, 0, "the server goes on");
    assert!(node.mps(&format!("sm_partition add {} 21", node.uuid())).starts_with("Not enough free chunks"));
    assert!(node.mps("lspart").contains("20     7"), "{}", node.mps("lspart"));
    assert_eq!(node.run(&node.pipe(), &["--set", "CUDA_MPS_SM_PARTITION=GPU/x"]).0, 3);
    drop(rest);
    let (device, name) = id.split_once('/').unwrap();
    assert_eq!(node.mps(&format!("sm_partition rm {device} {name}")), "");
}

#[test]
fn clients_are_limited_in_number_by_driver_and_connections() {
    for (branch, clients) in [(580, 48), (595, 60)] {
        let node = Node::new(branch);
        let _daemon = node.daemon(&[]);
        let many = clients.to_string();
        let mut command = node.client(&node.pipe(), &["--processes", &many]);
        let mut all = Program::start(&mut command);
        for _ in 1..clients {
            assert_eq!(all.next()["event"], "started");
        }
        let (status, events) = node.run(&node.pipe(), ONE);
        assert_eq!((status, &events[0]["error"]), (3, &"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED".into()));
        Command::new("kill").arg(all.child.id().to_string()).status().unwrap();
        all.status();
        let half = ["--set", "CUDA_DEVICE_MAX_CONNECTIONS=60"];
        eventually(|| {
            let first = Program::start(&mut node.client(&node.pipe(), &half));
            let started = first.first["event"] == "started";
            let second = node.run(&node.pipe(), &[&half, ONE].concat());
            (started && (second.0 == 3) == (branch == 580)).then_some(())
        });
    }
}

#[test]
fn servers_that_crash_refuse_or_are_slow() {
    let node = Node::new(580);
    let _daemon = node.daemon(&[]);
    for action in [Action::Kill, Action::Fail(NvmlError::Unknown)] {
        node.node.add_fault(Fault::new("mps-server-start", action, When::Before, Occurrence::Once)).unwrap();
        assert_eq!(node.run(&node.pipe(), ONE).1[0]["error"], "CUDA_ERROR_MPS_CONNECTION_FAILED");
    }
    node.node.slow("mps-server-start", Duration::from_millis(300)).unwrap();
    let waiting = node.client(&node.pipe(), ONE).stdout(Stdio::null()).spawn().unwrap();
    let server = node.server();
    assert_eq!(node.mps(&format!("get_server_status {server}")), "INITIALIZING\n");
    assert!(waiting.wait_with_output().unwrap().status.success());
    let refuse = Action::Fail(NvmlError::Unknown);
    node.node.add_fault(Fault::new("mps-client-connect", refuse, When::Before, Occurrence::Once)).unwrap();
    assert_eq!(node.run(&node.pipe(), ONE).1[0]["error"], "CUDA_ERROR_MPS_SERVER_NOT_READY");
    assert_eq!(node.run(&node.pipe(), ONE).0, 0);
}

#[test]
fn server_and_client_need_shared_memory_and_sight_of_each_other() {
    let node = Node::new(580);
    let daemon = node.daemon(&[]);
    let client = node.client(&node.pipe(), ONE);
    let mut apart = Command::new("unshare");
    apart.args(["--mount", "--propagation", "private", "sh", "-c"]);
    apart
        .arg("mount -t tmpfs none /dev/shm && exec \"$0\" \"$@\"")
        .arg(client.get_program())
        .args(client.get_args());
    apart.envs(client.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let (status, events) = ended(&apart.output().unwrap());
    assert_eq!((status, &events[0]["error"]), (3, &"CUDA_ERROR_MPS_CONNECTION_FAILED".into()));
    assert_eq!(node.run(&node.pipe(), ONE).0, 0);
    node.mps("quit");
    drop(daemon);

    let inner = node.control(&["-f"]);
    let mut outer = Command::new("unshare");
    outer.args(["--pid", "--fork", "--kill-child"]).arg(inner.get_program()).args(inner.get_args());
    outer.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut daemon = outer.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually(|| node.pipe().join("control").exists().then_some(()));
    let (status, events) = node.run(&node.pipe(), ONE);
    assert_eq!((status, &events[0]["error"]), (3, &"CUDA_ERROR_MPS_CONNECTION_FAILED".into()));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

/// A user who is not root, and may run the client.
const NOBODY: u32 = 65_534;

/// The client as that user runs it, from a place where it may.
fn nobody(node: &Node, pipe: &Path) -> Command {
    let program = node.folder.path().join("kerf-sim-cuda");
    // Once: a program that runs cannot be written.
    if !program.exists() {
        std::fs::copy(env!("CARGO_BIN_EXE_kerf-sim-cuda"), &program).unwrap();
    }
    let mut command = Command::new(&program);
    command
        .env("KERF_SIM_ROOT", node.node.root())
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .args(ONE)
        .current_dir("/")
        .uid(NOBODY);
    command
}

#[test]
fn another_users_client_waits_for_a_server_of_its_own_or_shares_roots() {
    let node = Node::new(580);
    let nobody = || {
        let mut command = nobody(&node, &node.pipe());
        command.stdout(Stdio::piped());
        command
    };
    let daemon = node.daemon(&[]);
    let root = node.start(&node.pipe(), &[]);
    let first = node.server();
    let mut waiting = nobody().spawn().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(waiting.try_wait().unwrap().is_none(), "root's client is there");
    drop(root);
    assert!(waiting.wait().unwrap().success());
    assert_ne!(node.server(), first);
    drop(daemon);

    let _daemon = node.daemon(&["-m"]);
    let root = node.start(&node.pipe(), &[]);
    assert_eq!(ended(&nobody().output().unwrap()).0, 0);
    drop(root);
}

#[test]
fn a_mig_instance_has_a_daemon_of_its_own() {
    let gpu = GpuSpec::new("a100-80").in_mig_mode();
    let node = Node::of(NodeSpec::new("n", vec![gpu]));
    node.node.create_instance(0, "3g.40gb", Some(0), true).unwrap();
    node.node.create_instance(0, "4g.40gb", Some(0), true).unwrap_err();
    node.node.create_instance(0, "3g.40gb", Some(4), true).unwrap();
    let uuid = node.node.instances().unwrap()[0].compute[0].1.clone();
    let output = node.control(&["-d"]).env("CUDA_VISIBLE_DEVICES", &uuid).output().unwrap();
    assert!(output.status.success());
    let _daemon = Daemon(&node);
    node.mps(&format!("set_default_device_pinned_mem_limit {uuid} 12G"));
    let client = node.start(&node.pipe(), &[]);
    assert_eq!(client.first["devices"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&client.first["devices"][0]["uuid"], &client.first["devices"][0]["sms"]),
        (&uuid.into(), &42.into())
    );
    assert_eq!(client.first["free"], 12 * GIB);
    // 48 clients of a GPU are 20 of three of its seven slices.
    let mut all = Program::start(&mut node.client(&node.pipe(), &["--processes", "19"]));
    for _ in 1..19 {
        assert_eq!(all.next()["event"], "started");
    }
    assert_eq!(node.run(&node.pipe(), ONE).1[0]["error"], "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED");
    Command::new("kill").arg(all.child.id().to_string()).status().unwrap();
    all.status();
    // Hard towards the outside, cooperative inside.
    let wrong = ["--set", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=7=1G", "--fill", "1Gi", "--keep-going"];
    let mut greedy = node.start(&node.pipe(), &wrong);
    let refused = eventually(|| Some(greedy.next()).filter(|event| event["event"] == "refused"));
    assert!(refused["allocated"].as_u64().unwrap() <= 40 * GIB, "{refused}");
    let outside =
        ["--unset", "CUDA_MPS_PIPE_DIRECTORY", "--device", "1", "--allocate", "30Gi", "--seconds", "0"];
    assert_eq!(node.run(&node.pipe(), &outside).0, 0);
}

// The third protocol.

#[test]
fn the_third_protocol_needs_its_driver() {
    let node = Node::new(610);
    let output = node.control(&["-d", "-p", "3"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let node = Node::new(615);
    let output = node.control(&["-d", "-p", "2"]).env("CUDA_MPS_PROTOCOL_VERSION", "3").output().unwrap();
    assert!(output.status.success(), "the variable takes precedence: {}", text(&output.stderr));
    let _daemon = Daemon(&node);
    // The program follows the daemon's protocol.
    assert!(node.mps("server list").starts_with("NAME"));
    assert!(!node.refused("get_server_list now").is_empty());
    node.mps("-q");
    assert!(!node.pipe().join("control").exists());
}

#[test]
fn namespaces_have_their_limits_and_no_others() {
    let node = Node::new(615);
    let config = node.folder.path().join("mps.toml");
    std::fs::write(
        &config,
        format!(
            "[servers.gpu0]\nallowed_devices = \"{}\"\npinned_memory_limit = \"1G\"\nuid = 0\n\
             [servers.gpu0.namespaces.pod_a]\npinned_memory_limit = \"8G\"\nactive_thread_percentage = \"30\"\n\
             [servers.gpu0.namespaces.pod_b]\n[features.memacct]\nenabled = true\n",
            node.uuid()
        ),
    )
    .unwrap();
    let _daemon = node.daemon(&["-p", "3", "-a", config.to_str().unwrap()]);
    node.wait_ready("gpu0");
    let row = node.mps("server list --format=csv,noheader");
    let pid = node.mps("server get gpu0 pid");
    let pipe = node.pipe();
    let server_pipe = pipe.join("gpu0");
    assert_eq!(row, format!("gpu0,0,{},Ready,{},{},-\n", pid.trim(), server_pipe.display(), node.uuid()));
    let a = node.start(&server_pipe.join("pod_a"), &[]);
    assert_eq!((&a.first["free"], &a.first["devices"][0]["sms"]), (&(8 * GIB).into(), &32.into()));
    // "that value overrides the client-process-level setting"
    let own = ["--set", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10"];
    assert_eq!(node.start(&server_pipe.join("pod_a"), &own).first["devices"][0]["sms"], 32);
    assert_eq!(node.start(&server_pipe.join("pod_b"), &own).first["devices"][0]["sms"], 10);
    assert_eq!(node.start(&server_pipe.join("pod_b"), &[]).first["free"], USABLE, "nothing is inherited");
    assert_eq!(
        node.start(&server_pipe, &[]).first["free"],
        GIB,
        "the server's own are the default namespace's"
    );
    let clients = node.mps("client list --all --format=csv,noheader");
    assert!(clients.starts_with(&format!("{},gpu0,0,pod_a,", a.child.id())), "{clients}");

    node.mps("namespace create pod_c --server=gpu0");
    assert!(node.refused("namespace set pod_c --server=gpu0").contains("at least one"));
    node.mps("namespace set pod_c --server=gpu0 --pinned-memory-limit=4096M --active-thread-percentage=25");
    let row = node.mps("namespace list pod_c --server=gpu0 --format=csv,noheader");
    assert_eq!(row, format!("pod_c,gpu0,Ready,4G,25,0,{}\n", server_pipe.join("pod_c").display()));
    assert_eq!(node.mps("namespace get pod_c gpu0 pinned-memory-limit"), "4G\n");
    assert_eq!(node.start(&server_pipe.join("pod_c"), &[]).first["free"], 4 * GIB);
    assert!(node.refused("namespace delete pod_a --server=gpu0").contains("active clients"));
    node.mps("namespace delete pod_a --server=gpu0 --force");
    eventually(|| (!server_pipe.join("pod_a").exists()).then_some(()));
    assert!(node.refused("namespace create Pod-D --server=gpu0").contains("lowercase"));
    assert!(node.refused("server delete gpu0").contains("active clients"));
    node.mps(&format!("client terminate {}", a.child.id()));
    node.mps("server delete gpu0 --force");
    assert_eq!(node.mps("server list --format=csv,noheader"), "");
}

#[test]
fn a_server_for_an_absent_gpu_is_accepted_and_its_clients_run_without_limits() {
    let node = Node::new(615);
    let _daemon = node.daemon(&["-p", "3"]);
    node.mps("server create wrong --allowed-devices=GPU-00000000-1111");
    node.mps("namespace create pod --server=wrong");
    node.mps("namespace set pod --server=wrong --pinned-memory-limit=1G");
    eventually(|| (node.mps("server get wrong status") == "Exited\n").then_some(()));
    let log = std::fs::read_to_string(node.logs().join("wrong/server.log")).unwrap();
    assert!(log.contains("there is no device GPU-00000000-1111"), "{log}");
    let client = node.start(&node.pipe().join("wrong/pod"), &[]);
    assert_eq!((&client.first["mps"], &client.first["free"]), (&false.into(), &USABLE.into()));
}

#[test]
fn a_file_with_a_wrong_key_stops_the_daemon() {
    let node = Node::new(615);
    let config = node.folder.path().join("mps.toml");
    for wrong in [
        "[servers.a]\nmemory = \"1G\"\n",
        "[servers.a]\npinned_memory_limit = \"lots\"\n",
        "[servers.A]\n",
        "[servers.a.namespaces.b]\nuid = 1\n",
        "[[servers.a.namespaces.b.devices]]\nuuid = \"GPU-1\"\nsm_partition = \"p\"\n",
        "[[servers.a.devices]]\nuuid = \"UUID\"\n[[servers.a.devices.sm_partitions]]\nname = \"p\"\nchunks = 28\n",
    ] {
        std::fs::write(&config, wrong.replace("UUID", &node.uuid())).unwrap();
        let output = node.control(&["-d", "-p", "3", "-a", config.to_str().unwrap()]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{wrong}");
        assert!(text(&output.stderr).contains("configuration error"), "{wrong}: {}", text(&output.stderr));
    }
}

#[test]
fn partitions_reserve_sms() {
    let node = Node::new(615);
    let uuid = node.uuid();
    let _daemon = node.daemon(&["-p", "3"]);
    node.mps("server create s");
    node.wait_ready("s");
    let created = node.mps(&format!("sm-partition create large --server=s --device={uuid} --chunks=4"));
    let (said, variable) = created.trim().split_once('\n').unwrap();
    assert_eq!(said, format!("SM partition 'large' created on device {uuid} (sm-count=16)"));
    let pipe = node.pipe().join("s");
    let own = node.start(&pipe, &["--set", variable]);
    assert_eq!(own.first["devices"][0]["sms"], 16);
    assert_eq!(node.start(&pipe, &[]).first["devices"][0]["sms"], 92);
    let list = node.mps("sm-partition list --server=s --all --format=csv,noheader");
    assert!(list.contains(&format!("s,{uuid},large,4,16,false,created,")), "{list}");
    assert!(list.contains(&format!("s,{uuid},-,23,92,-,unallocated,-")), "{list}");
    assert!(
        node.refused("sm-partition create b --server=s --device=0 --chunks=1").contains("active clients")
    );
    drop(own);
    eventually(|| {
        let words = ["sm-partition", "create", "b", "--server=s", "--device=0", "--chunks=24"];
        let output = node.control(&words).output().unwrap();
        text(&output.stderr).contains("has 27 chunks").then_some(())
    });
    node.mps(&format!("sm-partition delete large --server=s --device={uuid}"));
}

#[test]
fn another_user_is_not_permitted_on_a_named_server() {
    let node = Node::new(615);
    let nobody = || ended(&nobody(&node, &node.pipe().join("s")).output().unwrap());
    let daemon = node.daemon(&["-p", "3"]);
    node.mps("server create s");
    node.wait_ready("s");
    assert_eq!(nobody().1[0]["error"], "CUDA_ERROR_NOT_PERMITTED");
    node.mps("-q");
    drop(daemon);
    let _daemon = node.daemon(&["-p", "3", "-m"]);
    assert!(node.refused("server create t --uid=1000").contains("multiuser"));
    node.mps("server create s");
    node.wait_ready("s");
    assert_eq!(nobody().0, 0);
}

// Limits of cgroups.

/// A cgroup that is removed with the test.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Cgroup {
        let path = PathBuf::from(format!("/sys/fs/cgroup/memory/kerf-mps-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Cgroup(path)
    }

    fn below(&self, name: &str) -> Cgroup {
        let path = self.0.join(name);
        std::fs::create_dir(&path).unwrap();
        Cgroup(path)
    }

    /// The command, run in the cgroup.
    fn command(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0);
        shell.arg(command.get_program()).args(command.get_args());
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdin(Stdio::null());
        shell
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last process may be on its way out.
        for _ in 0..100 {
            match std::fs::remove_dir(&self.0) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                _ => return,
            }
        }
    }
}

fn with_accounting(accounting: MemoryAccounting) -> Node {
    let driver = Driver::of_branch(615);
    Node::of(NodeSpec { driver, memory_accounting: accounting, ..NodeSpec::uniform("n", "a100-80", 1) })
}

#[test]
fn a_cgroups_hard_limit_holds_whatever_the_process_does() {
    let node = with_accounting(MemoryAccounting::Dmem);
    let pod = Cgroup::new("pod");
    let container = pod.below("container");
    node.node.set_memory_limits(0, &pod.0, 2 * GIB, 2 * GIB).unwrap();
    let run = |arguments: &[&str]| {
        ended(&container.command(&node.client(&node.nowhere(), arguments)).output().unwrap())
    };
    let (status, events) = run(&["--allocate", "2Gi", "--allocate", "1Mi"]);
    assert_eq!((status, &events[1]["event"]), (4, &"granted".into()));
    assert_eq!(events[0]["total"], 81_920u64 << 20, "a parent's limit is not shown");
    let (_, events) = run(&["--processes", "8", "--fill", "256Mi", "--keep-going", "--seconds", "1"]);
    assert_eq!(events.iter().filter(|event| event["event"] == "granted").count(), 8);

    node.node.set_memory_limits(0, &container.0, 0, GIB).unwrap();
    let (_, events) = run(&["--fill", "512Mi"]);
    assert_eq!((&events[0]["total"], events.len()), (&GIB.into(), 4), "its own is, and both hold");
    assert!(node.run(&node.nowhere(), &["--allocate", "70Gi", "--seconds", "0"]).0 == 0, "others are free");
}

#[test]
fn dmem_limits_nest_and_misc_limits_do_not() {
    for (accounting, granted) in [(MemoryAccounting::Dmem, 0), (MemoryAccounting::Misc, 2)] {
        let node = with_accounting(accounting);
        let pod = Cgroup::new(&format!("{accounting:?}"));
        let container = pod.below("container");
        node.node.set_memory_limits(0, &pod.0, 0, GIB).unwrap();
        node.node.set_memory_limits(0, &container.0, 0, 3 * GIB).unwrap();
        let mut client = container.command(&node.client(&node.nowhere(), &["--fill", "1536Mi"]));
        let (_, events) = ended(&client.output().unwrap());
        assert_eq!(
            events.iter().filter(|event| event["event"] == "granted").count(),
            granted,
            "{accounting:?}"
        );
    }
}

#[test]
fn a_cgroup_that_goes_with_its_soft_limit_leaves_it_to_its_parents() {
    let node = with_accounting(MemoryAccounting::Dmem);
    let pods = Cgroup::new("pods");
    let limits = || -> Vec<(u64, bool)> {
        node.node.state().unwrap().memory_limits.iter().map(|limit| (limit.soft, limit.set)).collect()
    };
    let pod = pods.below("a");
    node.node.set_memory_limits(0, &pod.0, 2 * GIB, 4 * GIB).unwrap();
    assert_eq!(limits(), [(2 * GIB, false), (2 * GIB, true)]);
    node.node.set_memory_limits(0, &pod.0, 0, u64::MAX).unwrap();
    assert_eq!(limits(), []);
    node.node.set_memory_limits(0, &pod.0, 2 * GIB, 4 * GIB).unwrap();
    drop(pod);
    let again = pods.below("a");
    node.node.set_memory_limits(0, &again.0, GIB, GIB).unwrap();
    assert_eq!(limits(), [(3 * GIB, false), (GIB, true)], "the first one's is still there");
}

#[test]
fn who_borrows_is_ended_for_who_does_not() {
    let node = with_accounting(MemoryAccounting::Dmem);
    let _daemon = node.daemon(&["-p", "3"]);
    node.mps("server create s");
    node.wait_ready("s");
    let pipe = node.pipe().join("s");
    let (a, b) = (Cgroup::new("a"), Cgroup::new("b"));
    for pod in [&a, &b] {
        node.node.set_memory_limits(0, &pod.0, 40 * GIB, 75 * GIB).unwrap();
    }
    let mut borrower = Program::start(&mut a.command(&node.client(&pipe, &["--allocate", "60Gi"]))).granted();
    let owner = ["--allocate", "39Gi", "--seconds", "0"];
    assert_eq!(ended(&b.command(&node.client(&pipe, &owner)).output().unwrap()).0, 0);
    assert_eq!(borrower.next()["error"], "CUDA_ERROR_MPS_CLIENT_TERMINATED");
    // Who is over its own soft limit ends nobody.
    let _other = Program::start(&mut a.command(&node.client(&pipe, &["--allocate", "60Gi"]))).granted();
    node.node.set_memory_limits(0, &b.0, 10 * GIB, 75 * GIB).unwrap();
    let greedy = ["--allocate", "19Gi", "--allocate", "1Gi"];
    assert_eq!(ended(&b.command(&node.client(&pipe, &greedy)).output().unwrap()).0, 4);
}
