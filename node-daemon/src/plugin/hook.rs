//! The socket at which the hook of containers with shares ([`crate::cdi::HookPaths`]) asks for a container's limit. The limit
//! on the pod is what holds; a container's own is there for CUDA to report it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::limits::PodLimits;
use super::socket::bind;
use crate::cdi::HookPaths;
use crate::node::NodeState;

/// A line of three words is far shorter.
const LINE: u64 = 1024;

/// Who asks, asks at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers hooks until dropped.
pub async fn serve(paths: &HookPaths, state: NodeState, limits: PodLimits) -> io::Result<()> {
    let listener = bind(&paths.socket())?;
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
