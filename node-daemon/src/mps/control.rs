//! Talking to a control daemon, by its own program.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use super::{Limits, Protocol, SERVER, Said};

/// An answer takes milliseconds. A control daemon that hangs answers nothing.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// What the program says when no control daemon listens in the pipe directory.
const NOT_RUNNING: &str = "Cannot find MPS control daemon";

/// Ordinal of the one device that a control daemon sees.
const DEVICE: u32 = 0;

/// Name of the socket in a pipe directory.
const SOCKET: &str = "control";

/// The one namespace of protocol 2.
pub const ALL: &str = "";

/// Why a command did not do what it was to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    #[error("the MPS control daemon is not running yet")]
    NotRunning,
    #[error("the MPS control daemon gives no answer to '{0}' within {limit} s", limit = TIME_LIMIT.as_secs())]
    Timeout(String),
    #[error("MPS refuses '{command}': {message}")]
    Refused { command: String, message: String },
    #[error("{program} cannot be run: {message}")]
    Run { program: String, message: String },
}

/// A server as its control daemon sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Server {
    /// Nobody answers, and why.
    Silent(String),
    /// Somebody is there, and gives no answer in time: the control daemon hangs, or a server that it waits for.
    Hangs(String),
    /// There is none.
    #[default]
    Absent,
    Starting,
    Ready,
    /// A client has made the GPU fault: all clients must end before it goes on.
    Fault,
    /// It has ended, as one does whose GPU is absent. Clients would run without MPS.
    Exited,
}

/// What a control daemon says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub server: Server,
    /// The servers' processes.
    pub server_pids: Vec<u32>,
    /// Limits by namespace; with protocol 2, those of the next server by [`ALL`].
    pub limits: BTreeMap<String, Said>,
    /// Clients' processes by namespace; with protocol 2 by [`ALL`].
    pub clients: BTreeMap<String, Vec<u32>>,
    /// The namespaces that have their socket; with protocol 2 [`ALL`]. Without it a client would find no MPS.
    pub sockets: BTreeSet<String>,
}

/// One control daemon.
#[derive(Clone, Debug)]
pub struct Control {
    pub program: PathBuf,
    pub pipe: PathBuf,
    pub protocol: Protocol,
}

impl Control {
    /// Everything that it says.
    pub async fn look(&self) -> Seen {
        let seen = match self.protocol {
            Protocol::V2 => self.look_v2().await,
            Protocol::V3 => self.look_v3().await,
        };
        seen.unwrap_or_else(|error| {
            let why = error.to_string();
            let server = match error {
                ControlError::Timeout(_) => Server::Hangs(why),
                _ => Server::Silent(why),
            };
            Seen { server, ..Seen::default() }
        })
    }

    async fn look_v3(&self) -> Result<Seen, ControlError> {
        let servers = self.v3(&["server", "list", CSV]).await?;
        let Some(server) = rows(&servers).find(|fields| fields[0] == SERVER) else {
            return Ok(Seen::default());
        };
        let server_pids = server.get(2).and_then(|pid| pid.parse().ok()).into_iter().collect();
        let state = match server.get(3).map(|status| status.to_ascii_lowercase()).as_deref() {
            Some("ready" | "active") => Server::Ready,
            Some("fault") => Server::Fault,
            Some("exited") => Server::Exited,
            _ => Server::Starting,
        };
        let of_server = format!("--server={SERVER}");
        let namespaces = self.v3(&["namespace", "list", &of_server, CSV]).await?;
        let limits: BTreeMap<String, Said> = rows(&namespaces)
            .filter(|fields| fields.len() > 4)
            .map(|fields| (fields[0].into(), Said { memory: fields[3].into(), percent: fields[4].into() }))
            .collect();
        let mut clients: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        let listed = self.v3(&["client", "list", "--all", CSV]).await?;
        for fields in rows(&listed).filter(|fields| fields.len() > 3 && fields[1] == SERVER) {
            if let Ok(pid) = fields[0].parse() {
                let pids = clients.entry(fields[3].into()).or_default();
                if !pids.contains(&pid) {
                    pids.push(pid);
                }
            }
        }
        let has_socket = |name: &&String| self.pipe.join(SERVER).join(name).join(SOCKET).exists();
        let sockets = limits.keys().filter(has_socket).cloned().collect();
        Ok(Seen { server: state, server_pids, limits, clients, sockets })
    }

    async fn look_v2(&self) -> Result<Seen, ControlError> {
        let percent = self.v2("get_default_active_thread_percentage").await?;
        let memory = self.v2(&format!("get_default_device_pinned_mem_limit {DEVICE}")).await?;
        let last = |text: &str| text.split_whitespace().last().unwrap_or_default().to_owned();
        let limits = BTreeMap::from([(ALL.into(), Said { memory: last(&memory), percent: last(&percent) })]);
        let server_pids = pids(&self.v2("get_server_list").await?);
        let mut server = Server::Absent;
        let mut clients = Vec::new();
        for pid in &server_pids {
            let status = self.v2(&format!("get_server_status {pid}")).await?;
            server = match last(&status).as_str() {
                "ACTIVE" => Server::Ready,
                "FAULT" => Server::Fault,
                _ => Server::Starting,
            };
            clients.extend(pids(&self.v2(&format!("get_client_list {pid}")).await?));
        }
        let clients =
            if clients.is_empty() { BTreeMap::new() } else { BTreeMap::from([(ALL.into(), clients)]) };
        let sockets = self.pipe.join(SOCKET).exists().then(|| ALL.to_owned()).into_iter().collect();
        Ok(Seen { server, server_pids, limits, clients, sockets })
    }

    /// Starts the server; the answer comes before it is up.
    pub async fn create_server(&self, device: &str) -> Result<(), ControlError> {
        match self.protocol {
            Protocol::V2 => self.v2("start_server -uid 0").await,
            Protocol::V3 => {
                self.v3(&["server", "create", SERVER, &format!("--allowed-devices={device}")]).await
            }
        }
        .map(drop)
    }

    /// Removes what is left of a server that has ended (protocol 3).
    pub async fn delete_server(&self) -> Result<(), ControlError> {
        self.v3(&["server", "delete", SERVER]).await.map(drop)
    }

    /// Makes a namespace, and sets the limits of one that is there (protocol 3).
    pub async fn set_namespace(&self, name: &str, new: bool, limits: &Limits) -> Result<(), ControlError> {
        let server = format!("--server={SERVER}");
        if new {
            self.v3(&["namespace", "create", name, &server]).await?;
        }
        let memory = format!("--pinned-memory-limit={}", limits.memory_text());
        let percent = format!("--active-thread-percentage={}", limits.percent);
        self.v3(&["namespace", "set", name, &server, &memory, &percent]).await.map(drop)
    }

    /// Removes a namespace that has no client (protocol 3).
    pub async fn delete_namespace(&self, name: &str) -> Result<(), ControlError> {
        self.v3(&["namespace", "delete", name, &format!("--server={SERVER}")]).await.map(drop)
    }

    /// Ends a client's use of the GPU.
    pub async fn terminate(&self, server_pid: Option<u32>, client: u32) -> Result<(), ControlError> {
        match (self.protocol, server_pid) {
            (Protocol::V3, _) => self.v3(&["client", "terminate", &client.to_string()]).await.map(drop),
            (Protocol::V2, Some(server)) => {
                self.v2(&format!("terminate_client {server} {client}")).await.map(drop)
            }
            (Protocol::V2, None) => Ok(()),
        }
    }

    /// A command of protocol 2, through the program's standard input. It succeeds also where MPS refuses.
    async fn v2(&self, command: &str) -> Result<String, ControlError> {
        self.run(&[], Some(command)).await
    }

    async fn v3(&self, command: &[&str]) -> Result<String, ControlError> {
        self.run(command, None).await
    }

    async fn run(&self, arguments: &[&str], input: Option<&str>) -> Result<String, ControlError> {
        let named = || input.map_or_else(|| arguments.join(" "), str::to_owned);
        let unable = |error: std::io::Error| ControlError::Run {
            program: self.program.display().to_string(),
            message: error.to_string(),
        };
        let work = async {
            let mut child = Command::new(&self.program)
                .args(arguments)
                .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe)
                .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .kill_on_drop(true)
                .spawn()?;
            if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
                // A program that has already ended says why itself.
                let _ = stdin.write_all(format!("{input}\n").as_bytes()).await;
            }
            child.wait_with_output().await
        };
        let output = match tokio::time::timeout(TIME_LIMIT, work).await {
            Err(_) => return Err(ControlError::Timeout(named())),
            Ok(output) => output.map_err(unable)?,
        };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        if text.contains(NOT_RUNNING) || errors.contains(NOT_RUNNING) {
            return Err(ControlError::NotRunning);
        }
        if output.status.success() {
            return Ok(text);
        }
        let said = errors.lines().chain(text.lines()).find(|line| !line.trim().is_empty());
        let message = said.map_or_else(|| output.status.to_string(), |line| line.trim().to_owned());
        Err(ControlError::Refused { command: named(), message })
    }
}

const CSV: &str = "--format=csv,noheader";

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter(|line| !line.trim().is_empty()).map(|line| line.split(',').map(str::trim).collect())
}

fn pids(text: &str) -> Vec<u32> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A control program that answers by a shell script.
    fn control(dir: &tempfile::TempDir, protocol: Protocol, script: &str) -> Control {
        let program = dir.path().join("control");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Control { program, pipe: dir.path().join("pipe"), protocol }
    }

    #[tokio::test]
    async fn protocol_3_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"case "$1 $2" in
"server list") echo "other,0,6,Ready,/p/other,GPU-2,0"; echo "kerf,0,7,Ready,/p/kerf,GPU-1,0" ;;
"namespace list") echo "default,kerf,Ready,,,0,/p/kerf/default"; echo "ab,kerf,Ready,8192M,30,0,/p/kerf/ab" ;;
"client list") echo "12,kerf,GPU-1,ab,train"; echo "13,other,GPU-2,x,y"; echo "12,kerf,GPU-1,ab,train" ;;
esac"#;
        std::fs::create_dir_all(dir.path().join("pipe/kerf/ab")).unwrap();
        std::fs::write(dir.path().join("pipe/kerf/ab/control"), "").unwrap();
        let seen = control(&dir, Protocol::V3, script).look().await;
        assert_eq!(seen.sockets, BTreeSet::from(["ab".to_owned()]));
        assert_eq!((seen.server, seen.server_pids), (Server::Ready, vec![7]));
        assert_eq!(seen.limits["ab"], Said { memory: "8192M".into(), percent: "30".into() });
        assert_eq!(seen.clients, BTreeMap::from([("ab".into(), vec![12])]));
    }

    #[tokio::test]
    async fn protocol_2_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"read command; case "$command" in
get_default_active*) echo 30.0 ;; get_default_device*) echo 8G ;; get_server_list) echo 7 ;;
"get_server_status 7") echo ACTIVE ;; "get_client_list 7") echo 12; echo 13 ;; esac"#;
        let seen = control(&dir, Protocol::V2, script).look().await;
        assert_eq!((seen.server, seen.server_pids), (Server::Ready, vec![7]));
        assert!(Limits { memory: 8 << 30, percent: 30 }.agree(&seen.limits[ALL]));
        assert_eq!(seen.clients[ALL], [12, 13]);
    }

    #[tokio::test]
    async fn refusals_are_told_and_silence_is_no_server() {
        let dir = tempfile::tempdir().unwrap();
        let refusing = control(&dir, Protocol::V3, "echo 'Error: no such server' >&2; exit 1");
        let error = refusing.delete_namespace("ab").await.unwrap_err().to_string();
        assert!(error.contains("namespace delete ab") && error.contains("no such server"), "{error}");
        let silent = control(&dir, Protocol::V2, "echo 'Cannot find MPS control daemon process'; exit 1");
        assert!(matches!(silent.look().await.server, Server::Silent(why) if why.contains("not running")));
        let missing = Control { program: "/nowhere".into(), ..silent };
        assert!(matches!(missing.look().await.server, Server::Silent(why) if why.contains("/nowhere")));
    }
}
