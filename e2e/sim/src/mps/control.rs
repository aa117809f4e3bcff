//! `nvidia-cuda-mps-control`: the daemon, and the program that talks to it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::config::{self, Features};
use super::log::Log;
use super::server::{ClientInfo, Limits, Order, Partition, Report, Settings, shared_memory_name};
use super::{Limit, Message, Reply, SOCKET, v2, v3};
use crate::cuda::{Driver, Place};
use crate::engine::MEMORY_LIMITS_SINCE;
use crate::kernel::protocol::{Connection, CudaError, Device, peer};

/// What the program says when there is no daemon to talk to.
const NO_DAEMON: &str = "Cannot find MPS control daemon process";
/// How often somebody who waits for a server or for clients looks again.
const LOOK: Duration = Duration::from_millis(10);

const HELP: &str =
    "usage: nvidia-cuda-mps-control [-d|-f] [-m] [-S] [-a FILE] [-p 2|3] [-q] [-v] | [COMMAND…]";

/// The command line.
#[derive(Debug, Default)]
struct Options {
    daemon: bool,
    foreground: bool,
    multiuser: bool,
    static_partitions: bool,
    apply: Option<PathBuf>,
    protocol: Option<u32>,
    quit: bool,
    words: Vec<String>,
}

/// The program.
pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match parse(&arguments) {
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(1)
        }
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(options)) if options.daemon || options.foreground => start(options, &arguments),
        Ok(Some(options)) => talk(&options),
    }
}

/// `None` if there is nothing more to do.
fn parse(arguments: &[String]) -> Result<Option<Options>, String> {
    let mut options = Options::default();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value\n{HELP}"));
        match argument.as_str() {
            "-d" | "--daemon" => options.daemon = true,
            "-f" | "--foreground" => options.foreground = true,
            "-m" | "--multiuser" | "--multiuser-server" | "-multiuser-server" => options.multiuser = true,
            "-S" | "--static-partitioning" => options.static_partitions = true,
            "-a" | "--apply" => options.apply = Some(value()?.into()),
            "-p" | "--protocol" => options.protocol = Some(protocol(value()?)?),
            "-q" | "--quit" => options.quit = true,
            "-v" | "--version" => {
                println!("simulated");
                return Ok(None);
            }
            "-h" | "--help" => {
                println!("{HELP}");
                return Ok(None);
            }
            other if other.starts_with('-') => return Err(format!("unknown option {other}\n{HELP}")),
            _ => {
                options.words = std::iter::once(argument).chain(arguments).cloned().collect();
                break;
            }
        }
    }
    // "If both the flag and the environment variable are set, the environment variable takes precedence."
    if let Ok(version) = std::env::var("CUDA_MPS_PROTOCOL_VERSION") {
        options.protocol = Some(protocol(&version)?);
    }
    Ok(Some(options))
}

fn protocol(text: &str) -> Result<u32, String> {
    match text {
        "2" => Ok(2),
        "3" => Ok(3),
        _ => Err(format!("unknown protocol version {text}\n{HELP}")),
    }
}

/// "Directories and Environment Variables": the default is `/run/nvidia-mps` for a v3 daemon of root, else
/// `/tmp/nvidia-mps`.
fn pipe_directory(protocol: u32) -> PathBuf {
    match std::env::var_os("CUDA_MPS_PIPE_DIRECTORY") {
        Some(path) => path.into(),
        None if protocol == 3 && own_uid() == 0 => "/run/nvidia-mps".into(),
        None => "/tmp/nvidia-mps".into(),
    }
}

#[allow(unsafe_code, reason = "the standard library does not tell the user")]
fn own_uid() -> u32 {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() }
}

/// Sends commands to the daemon: that of the command line, or those of the standard input.
fn talk(options: &Options) -> ExitCode {
    let places = [pipe_directory(options.protocol.unwrap_or(2)), pipe_directory(3)];
    let daemon = places.iter().find_map(|pipe| Connection::open(&pipe.join(SOCKET)).ok());
    let Some(mut daemon) = daemon else {
        println!("{NO_DAEMON}");
        return ExitCode::from(1);
    };
    let mut send = |words: Vec<String>| match daemon.ask(&Message::Command { words }) {
        Ok(Reply::Output { text, failed: false }) => {
            print!("{text}");
            Some(true)
        }
        Ok(Reply::Output { text, failed: true }) => {
            eprint!("{text}");
            Some(false)
        }
        // A daemon that ends closes the connection.
        _ => None,
    };
    let mut code = ExitCode::SUCCESS;
    let mut run = |words| {
        let result = send(words);
        if result == Some(false) {
            code = ExitCode::from(1);
        }
        let _ = std::io::stdout().flush();
        result.is_some()
    };
    if options.quit {
        run(vec!["quit".into()]);
    } else if !options.words.is_empty() {
        run(options.words.clone());
    } else {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            if !words.is_empty() && !run(words) {
                break;
            }
        }
    }
    code
}

/// Becomes the daemon; in the background, by starting itself anew in the foreground.
fn start(options: Options, arguments: &[String]) -> ExitCode {
    if options.daemon {
        return match in_background(&options, arguments) {
            Ok(code) => code,
            Err(error) => {
                eprintln!("Failed to start the daemon: {error}");
                ExitCode::from(1)
            }
        };
    }
    match Daemon::new(options) {
        Ok((daemon, listener)) => {
            daemon.listen(&listener);
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(1)
        }
    }
}

fn in_background(options: &Options, arguments: &[String]) -> std::io::Result<ExitCode> {
    let program = std::env::current_exe()?;
    let rest = arguments.iter().filter(|argument| !matches!(argument.as_str(), "-d" | "--daemon"));
    let mut child = Command::new(program)
        .arg("-f")
        .args(rest)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let pid_file = pipe_directory(options.protocol.unwrap_or(2)).join(PID_FILE);
    let ready =
        |pid: u32| std::fs::read_to_string(&pid_file).is_ok_and(|text| text.trim() == pid.to_string());
    loop {
        if ready(child.id()) {
            return Ok(ExitCode::SUCCESS);
        }
        if child.try_wait()?.is_some() {
            let mut message = String::new();
            if let Some(mut stderr) = child.stderr.take() {
                stderr.read_to_string(&mut message)?;
            }
            eprint!("{message}");
            return Ok(ExitCode::from(1));
        }
        std::thread::sleep(LOOK);
    }
}

const PID_FILE: &str = "nvidia-cuda-mps-control.pid";

/// The control daemon.
#[derive(Debug)]
pub struct Daemon {
    pub v3: bool,
    pub multiuser: bool,
    pub static_partitions: bool,
    pub pipe: PathBuf,
    log_folder: PathBuf,
    log: Log,
    /// Its own view of the devices, by `CUDA_VISIBLE_DEVICES`.
    pub devices: Vec<Device>,
    visible: Option<String>,
    pub branch: u32,
    inner: Mutex<Inner>,
}

/// What commands change.
#[derive(Debug, Default)]
pub struct Inner {
    /// Of servers to come (v2).
    pub percentage: Option<f64>,
    pub pinned: Vec<Limit>,
    pub priority: u32,
    /// Partitions, which outlive servers (v2).
    pub partitions: Vec<Partition>,
    pub partitions_made: u32,
    /// In the order of their making.
    pub servers: Vec<Arc<Server>>,
    /// No new clients are let in.
    pub closing: bool,
    pub features: Features,
}

/// A server of the daemon.
#[derive(Debug)]
pub struct Server {
    pub pid: u32,
    pub settings: Mutex<Settings>,
    state: Mutex<ServerState>,
    link: Mutex<Option<Link>>,
}

/// "architecture, Server". FAULT the server itself knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerState {
    Initializing,
    Active,
    /// It has ended.
    Exited,
}

#[derive(Debug)]
struct Link {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

/// A mutex whose holder has panicked is as good as any.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Server {
    pub fn state(&self) -> ServerState {
        *lock(&self.state)
    }

    /// Asks the server; `None` if it is gone. Waits as long as the server hangs.
    pub fn ask(&self, order: &Order) -> Option<Report> {
        let mut link = lock(&self.link);
        let link = link.as_mut()?;
        let line = serde_json::to_string(order).ok()?;
        writeln!(link.stdin, "{line}").ok()?;
        link.read()
    }

    pub fn clients(&self) -> Option<(bool, Vec<ClientInfo>)> {
        match self.ask(&Order::Clients)? {
            Report::Clients { fault, clients } => Some((fault, clients)),
            _ => None,
        }
    }

    /// Sends changed settings.
    pub fn configure(&self, change: impl FnOnce(&mut Settings)) {
        let settings = {
            let mut settings = lock(&self.settings);
            change(&mut settings);
            settings.clone()
        };
        self.ask(&Order::Configure(Box::new(settings)));
    }

    pub fn uid(&self) -> u32 {
        lock(&self.settings).uid
    }

    pub fn name(&self) -> String {
        lock(&self.settings).name.clone().unwrap_or_default()
    }

    /// Closes its input, at which it exits, and waits until it has.
    pub fn end(&self) {
        if self.state() == ServerState::Exited {
            return;
        }
        // One that hangs neither gives the link back nor hears of the end.
        match self.link.try_lock() {
            Ok(mut link) => drop(link.take()),
            Err(_) => kill(self.pid),
        }
        let end = Instant::now() + Duration::from_secs(2);
        while self.state() != ServerState::Exited {
            if Instant::now() > end {
                kill(self.pid);
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Link {
    fn read(&mut self) -> Option<Report> {
        let mut line = String::new();
        self.stdout.read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok()
    }
}

#[allow(unsafe_code, reason = "the standard library cannot signal a process by its number")]
fn kill(pid: u32) {
    // SAFETY: kill takes numbers only; the process is a child that has not been waited for.
    unsafe { libc::kill(libc::pid_t::try_from(pid).unwrap_or(0), libc::SIGKILL) };
}

impl Daemon {
    fn new(options: Options) -> Result<(Arc<Daemon>, UnixListener), String> {
        let v3 = options.protocol == Some(3);
        let driver = Driver::open(&Place::find());
        let branch = driver.as_ref().map_or(0, Driver::branch);
        // Older programs do not know the option.
        if v3 && branch < MEMORY_LIMITS_SINCE {
            return Err(format!(
                "protocol version 3 needs driver r{MEMORY_LIMITS_SINCE}, not r{branch}\n{HELP}"
            ));
        }
        if options.apply.is_some() && !v3 {
            return Err(format!("-a needs protocol version 3\n{HELP}"));
        }
        if options.multiuser && own_uid() != 0 {
            return Err("multi-user mode needs root".into());
        }
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let devices =
            driver.map_or_else(|_| Vec::new(), |driver| super::visible(driver.seen(), visible.as_deref()));
        let pipe = pipe_directory(if v3 { 3 } else { 2 });
        let log_folder: PathBuf =
            std::env::var_os("CUDA_MPS_LOG_DIRECTORY").map_or("/var/log/nvidia-mps".into(), PathBuf::from);
        let config = match &options.apply {
            None => config::Config::default(),
            Some(path) => config::Config::read(path, branch)?,
        };
        std::fs::create_dir_all(&pipe).map_err(|e| format!("failed to create {}: {e}", pipe.display()))?;
        let socket = pipe.join(SOCKET);
        if Connection::open(&socket).is_ok() {
            return Err("An instance of this daemon is already running".into());
        }
        let _ = std::fs::remove_file(&socket);
        // A socket's path has room for 107 bytes; of a longer one the daemon says no more than this.
        let listener = UnixListener::bind(&socket).map_err(|_| NO_DAEMON.to_owned())?;
        let _ = std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666));
        let log = Log::open(&log_folder, "control.log", "Control");
        log.line(&format!("Starting control daemon using socket {}", socket.display()));
        let name = if v3 { "set" } else { "set env" };
        log.line(&format!(
            "To connect CUDA applications to this daemon, {name} CUDA_MPS_PIPE_DIRECTORY={}",
            pipe.display()
        ));
        let percentage =
            std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok().and_then(|text| text.parse().ok());
        let pinned = std::env::var("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").unwrap_or_default();
        let priority = std::env::var("CUDA_MPS_CLIENT_PRIORITY").ok().and_then(|text| text.parse().ok());
        let inner = Inner {
            percentage,
            pinned: super::pinned_limits(&pinned)
                .into_iter()
                .map(|(name, bytes)| (Some(name), bytes))
                .collect(),
            priority: priority.unwrap_or(0),
            features: config.features.clone(),
            ..Inner::default()
        };
        let daemon = Arc::new(Daemon {
            v3,
            multiuser: options.multiuser,
            static_partitions: options.static_partitions,
            log_folder,
            log,
            devices,
            visible,
            branch,
            inner: Mutex::new(inner),
            pipe: pipe.clone(),
        });
        v3::apply(&daemon, config)?;
        let pid = std::process::id();
        std::fs::write(pipe.join(PID_FILE), format!("{pid}\n"))
            .map_err(|e| format!("failed to write {}: {e}", pipe.join(PID_FILE).display()))?;
        Ok((daemon, listener))
    }

    fn listen(self: &Arc<Daemon>, listener: &UnixListener) {
        for stream in listener.incoming().map_while(Result::ok) {
            let daemon = self.clone();
            std::thread::spawn(move || daemon.serve(stream));
        }
    }

    fn serve(self: &Arc<Daemon>, stream: UnixStream) {
        let Ok(peer) = peer(&stream) else { return };
        let mut connection = Connection::from(stream);
        while let Ok(Some(message)) = connection.receive() {
            let reply = match message {
                Message::Protocol => Reply::Protocol(if self.v3 { 3 } else { 2 }),
                Message::Command { words } => self.command(&peer, &words),
                Message::Client { .. } => self.client(&peer).map_or_else(Reply::Refused, Reply::Server),
                _ => Reply::Refused(CudaError::InvalidValue),
            };
            if connection.send(&reply).is_err() {
                return;
            }
        }
    }

    fn command(self: &Arc<Daemon>, peer: &libc::ucred, words: &[String]) -> Reply {
        let line = words.join(" ");
        self.log.line(&format!("Cmd:{line}"));
        // Commands are for the daemon's own user and for root.
        if peer.uid != 0 && peer.uid != own_uid() {
            return Reply::Output { text: "Permission denied\n".into(), failed: true };
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let result = if self.v3 { v3::command(self, peer.uid, &words) } else { v2::command(self, &words) };
        match result {
            Ok(text) => Reply::Output { text, failed: false },
            Err(error) => {
                self.log.line(&format!("{line}: {error}"));
                Reply::Output { text: format!("{error}\n"), failed: self.v3 }
            }
        }
    }

    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// The servers that have not ended.
    pub fn servers(&self) -> Vec<Arc<Server>> {
        let inner = self.inner();
        inner.servers.iter().filter(|server| server.state() != ServerState::Exited).cloned().collect()
    }

    /// "architecture, Server": one server at a time, for one user; another user's client waits until those of the
    /// present one have left. v3 has a server for each user.
    fn client(self: &Arc<Daemon>, peer: &libc::ucred) -> Result<String, CudaError> {
        let own = own_uid();
        if own != 0 && peer.uid != own {
            self.log.line("User did not send valid credentials");
            return Err(CudaError::NotPermitted);
        }
        let uid = if self.multiuser { own } else { peer.uid };
        loop {
            if self.inner().closing {
                return Err(CudaError::MpsServerNotReady);
            }
            let server = match self.servers().into_iter().find(|server| server.uid() == uid) {
                Some(server) => server,
                None if self.v3 => {
                    v3::server_of_user(self, uid).map_err(|_| CudaError::MpsConnectionFailed)?
                }
                None if self.make_room() => {
                    let server = self.start_server(self.settings(uid));
                    server.map_err(|_| CudaError::MpsConnectionFailed)?
                }
                None => {
                    std::thread::sleep(LOOK);
                    continue;
                }
            };
            while server.state() == ServerState::Initializing {
                std::thread::sleep(LOOK);
            }
            if server.state() == ServerState::Exited {
                return Err(CudaError::MpsConnectionFailed);
            }
            return Ok(match lock(&server.settings).name.as_ref() {
                Some(name) => format!("{name}/{SOCKET}"),
                None => format!("server.{}", server.pid),
            });
        }
    }

    /// Ends other users' servers; false while they have clients.
    fn make_room(&self) -> bool {
        for server in self.servers() {
            if server.clients().is_some_and(|(_, clients)| !clients.is_empty()) {
                return false;
            }
            server.end();
        }
        true
    }

    /// What a server of v2 is made of now: "set_default_… – if there is already a server spawned, this command will only
    /// affect the next server".
    pub fn settings(&self, uid: u32) -> Settings {
        let inner = self.inner();
        let limits = Limits {
            pinned: inner.pinned.clone(),
            percentage: inner.percentage,
            priority: Some(inner.priority),
            partitions: BTreeMap::new(),
        };
        Settings {
            name: None,
            pipe: self.pipe.clone(),
            log: self.log_folder.clone(),
            uid,
            multiuser: self.multiuser,
            visible: self.visible.clone(),
            allowed: None,
            namespaces: [("default".to_owned(), limits)].into(),
            static_partitions: self.static_partitions,
            partitions: inner.partitions.clone(),
            evicts: false,
        }
    }

    pub fn log_folder(&self) -> &Path {
        &self.log_folder
    }

    pub fn visible(&self) -> Option<String> {
        self.visible.clone()
    }

    pub fn log(&self, text: &str) {
        self.log.line(text);
    }

    /// Starts a server process. Whether it comes up is seen later, by its state.
    pub fn start_server(self: &Arc<Daemon>, settings: Settings) -> Result<Arc<Server>, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut child = Command::new(program.with_file_name("nvidia-cuda-mps-server"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("failed to start nvidia-cuda-mps-server: {e}"))?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("failed to start nvidia-cuda-mps-server: no pipes".into());
        };
        let line = serde_json::to_string(&settings).map_err(|e| e.to_string())?;
        // One that dies at once is found dead below.
        let _ = writeln!(stdin, "{line}");
        self.log.line(&format!("Starting new server {} for user {}", child.id(), settings.uid));
        let server = Arc::new(Server {
            pid: child.id(),
            settings: Mutex::new(settings),
            state: Mutex::new(ServerState::Initializing),
            link: Mutex::new(None),
        });
        self.inner().servers.push(server.clone());
        let (daemon, watched) = (self.clone(), server.clone());
        std::thread::spawn(move || {
            daemon.watch(&watched, child, Link { stdin, stdout: BufReader::new(stdout) });
        });
        Ok(server)
    }

    fn watch(&self, server: &Server, mut child: Child, mut link: Link) {
        if let Some(Report::Ready(_)) = link.read() {
            *lock(&server.link) = Some(link);
            *lock(&server.state) = ServerState::Active;
            self.log.line(&format!("Server {} is ready", server.pid));
        }
        let status = child.wait();
        let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
        // What it leaves behind when it is killed.
        let settings = lock(&server.settings).clone();
        let _ = match settings.name {
            Some(_) => std::fs::remove_dir_all(&settings.pipe),
            None => std::fs::remove_file(settings.pipe.join(format!("server.{}", server.pid))),
        };
        let shared = Path::new(super::server::SHARED_MEMORY).join(shared_memory_name(server.pid));
        let _ = std::fs::remove_file(shared);
        self.log.line(&format!("Server {} exited: {status}", server.pid));
        *lock(&server.state) = ServerState::Exited;
        lock(&server.link).take();
    }

    /// Ends all servers, and then the daemon. Without `at_once` it waits for the clients, up to the time limit
    /// (`quit -t`).
    pub fn quit(&self, at_once: bool, limit: Option<Duration>) -> ! {
        self.inner().closing = true;
        let end = limit.map(|limit| Instant::now() + limit);
        for server in self.servers() {
            while !at_once
                && end.is_none_or(|end| Instant::now() < end)
                && server.clients().is_some_and(|(_, clients)| !clients.is_empty())
            {
                std::thread::sleep(LOOK);
            }
            server.end();
        }
        let _ = std::fs::remove_file(self.pipe.join(SOCKET));
        let _ = std::fs::remove_file(self.pipe.join(PID_FILE));
        self.log.line("Exiting");
        std::process::exit(0)
    }
}
