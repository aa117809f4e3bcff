//! The OCI hook of containers with shares: its program on the host, and the socket at which it asks for a container's
//! limit. The limit on the pod is what holds; a container's own is there for CUDA to report it.
//!
//! Containers name the program by its path and are started again without anybody's leave, so it stays when the daemon
//! goes, and a new version takes its place at once.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::limits::PodLimits;
use crate::cdi::write_program_atomically;
use crate::node::NodeState;

/// Name of the program, here and beside the daemon's own.
const PROGRAM: &str = "kerf-cdi-hook";

/// A line of three words is far shorter.
const LINE: u64 = 1024;

/// Who asks, asks at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where program and socket are, in one directory, as one process sees it.
#[derive(Clone, Debug)]
pub struct HookPaths(PathBuf);

impl HookPaths {
    /// In `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    pub fn program(&self) -> PathBuf {
        self.0.join("bin").join(PROGRAM)
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("hook.sock")
    }

    /// Puts the program there that lies beside the daemon's own.
    pub fn install(&self) -> io::Result<()> {
        let own = std::env::current_exe()?.with_file_name(PROGRAM);
        self.install_from(&own)
    }

    fn install_from(&self, program: &Path) -> io::Result<()> {
        let content = std::fs::read(program).map_err(|error| {
            io::Error::new(error.kind(), format!("the hook of containers, {}: {error}", program.display()))
        })?;
        let place = self.program();
        let is_it = |file: std::fs::Metadata| file.permissions().mode() & 0o777 == 0o755;
        let there = std::fs::read(&place).is_ok_and(|there| there == content);
        if there && std::fs::metadata(&place).is_ok_and(is_it) {
            return Ok(());
        }
        write_program_atomically(&place, &content)
    }
}

/// Answers hooks until dropped.
pub async fn serve(paths: &HookPaths, state: NodeState, limits: PodLimits) -> io::Result<()> {
    let path = paths.socket();
    // Left by an earlier process.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    // Container runtimes run as root, and nobody else has business here.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let asked = Arc::new((state, limits));
    loop {
        let (stream, _) = listener.accept().await?;
        let asked = asked.clone();
        tokio::spawn(async move {
            let answer = tokio::time::timeout(PATIENCE, answer(stream, &asked.0, &asked.1)).await;
            if let Ok(Err(error)) = answer {
                tracing::debug!("a container's hook went away: {error}");
            }
        });
    }
}

async fn answer(mut stream: UnixStream, state: &NodeState, limits: &PodLimits) -> io::Result<()> {
    let (reader, mut writer) = stream.split();
    let mut line = String::new();
    BufReader::new(reader.take(LINE)).read_line(&mut line).await?;
    let answer = match limit(line.trim(), state, limits).await {
        Ok(()) => "ok".to_owned(),
        Err(why) => {
            tracing::warn!("a container's memory is limited by its pod's limit alone: {why}");
            why
        }
    };
    writer.write_all(format!("{answer}\n").as_bytes()).await
}

/// `line`: UID of a claim, its CDI device, and the pid of the container that got it.
async fn limit(line: &str, state: &NodeState, limits: &PodLimits) -> Result<(), String> {
    let words: Vec<&str> = line.split(' ').collect();
    let [claim, device, pid] = words.as_slice() else {
        return Err(format!("'{line}' is not a claim's UID, a device and a pid"));
    };
    let pid = pid.parse().map_err(|_| format!("'{pid}' is no pid"))?;
    let prepared = state.prepared.snapshot();
    let record = prepared.get(*claim).ok_or_else(|| format!("no claim with UID {claim} is prepared"))?;
    let device =
        record.devices.iter().find(|one| one.cdi.iter().any(|id| id.ends_with(&format!("={device}"))));
    let device = device.ok_or_else(|| format!("claim {claim} has no device {}", words[1]))?;
    limits.limit_container(record, device, pid).await.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Driver;
    use crate::prepared::PreparedClaims;

    #[test]
    fn the_program_is_put_where_containers_find_it_and_replaced_by_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let paths = HookPaths::new(dir.path().join("state"));
        let own = dir.path().join("own");
        let error = paths.install_from(&own).unwrap_err().to_string();
        assert!(error.contains("own"), "{error}");
        for content in ["one", "two", "two"] {
            std::fs::write(&own, content).unwrap();
            paths.install_from(&own).unwrap();
            assert_eq!(std::fs::read_to_string(paths.program()).unwrap(), content);
            assert_eq!(std::fs::metadata(paths.program()).unwrap().permissions().mode() & 0o777, 0o755);
        }
    }

    #[tokio::test]
    async fn nonsense_gets_an_answer() {
        let dir = tempfile::tempdir().unwrap();
        let paths = HookPaths::new(dir.path());
        let state = NodeState::new("n", PreparedClaims::new());
        let limits = PodLimits::new(Driver::new(dir.path()), dir.path());
        let socket = paths.socket();
        let server = tokio::spawn(async move { serve(&paths, state, limits).await });
        while !socket.exists() {
            tokio::task::yield_now().await;
        }
        for (line, word) in [
            ("", "is not a claim's UID"),
            ("a b c d", "is not a claim's UID"),
            ("a b -1", "no pid"),
            ("a b 1", "no claim with UID a"),
        ] {
            let mut stream = UnixStream::connect(&socket).await.unwrap();
            stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.contains(word), "{line}: {answer}");
        }
        server.abort();
    }
}
