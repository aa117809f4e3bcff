//! Whether the daemon is alive: a socket that answers while its event loop turns.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;

/// How long the daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

const ANSWER: &[u8] = b"alive\n";

fn socket(state_dir: &Path) -> PathBuf {
    state_dir.join("health.sock")
}

/// Answers probes.
pub async fn serve(state_dir: &Path) -> anyhow::Result<()> {
    let path = socket(state_dir);
    // Left by an earlier process.
    let _ = std::fs::remove_file(&path);
    let listener =
        UnixListener::bind(&path).with_context(|| format!("failed to listen on {}", path.display()))?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let _ = stream.write_all(ANSWER).await;
    }
}

/// Asks the daemon that keeps its state in `state_dir`.
pub fn ask(state_dir: &Path) -> anyhow::Result<()> {
    let path = socket(state_dir);
    let mut stream = std::os::unix::net::UnixStream::connect(&path)
        .with_context(|| format!("failed to connect to {}", path.display()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).context("the daemon does not answer")?;
    anyhow::ensure!(answer == ANSWER, "the daemon answers {answer:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_daemon_that_serves_is_alive_and_one_that_does_not_is_not() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ask(dir.path()).is_err());
        let path = dir.path().to_owned();
        let server = tokio::spawn(async move { serve(&path).await });
        while !socket(dir.path()).exists() {
            tokio::task::yield_now().await;
        }
        let path = dir.path().to_owned();
        tokio::task::spawn_blocking(move || ask(&path)).await.unwrap().unwrap();
        server.abort();
        let _ = server.await;
        assert!(ask(dir.path()).is_err());
    }
}
