//! One daemon at a time works on a node.
//!
//! A pod that is deleted by force is gone from the API server while its process still runs, so that its successor comes up
//! beside it. What one of the two prepared the other would not know of, and would clear away.

use std::fs::{File, TryLockError};
use std::path::Path;

use anyhow::Context as _;

/// Held until the process ends: the kernel gives it back then, whatever ended the process.
#[derive(Debug)]
#[must_use]
pub struct Alone {
    _lock: File,
}

/// Waits until no other process has the state in `state_dir`.
pub async fn wait(state_dir: &Path) -> anyhow::Result<Alone> {
    let path = state_dir.join("lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("failed to open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => return Ok(Alone { _lock: file }),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("failed to lock {}", path.display()));
        }
    }
    tracing::warn!(
        "another daemon still works on this node and holds {}: waiting for its end",
        path.display()
    );
    let name = path.display().to_string();
    // A thread of its own: a process that is told to end does not wait for it, and it is in nobody's way.
    let (done, locked) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("lock".to_owned()).spawn(move || {
        let _ = done.send(file.lock().map(|()| Alone { _lock: file }));
    })?;
    locked
        .await
        .context("the thread that waits for the lock ended")?
        .with_context(|| format!("failed to lock {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_second_waits_for_the_end_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = wait(dir.path()).await.unwrap();
        let path = dir.path().to_owned();
        let second = tokio::spawn(async move { wait(&path).await.unwrap() });
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        assert!(!second.is_finished(), "two daemons at once");
        drop(first);
        let second = second.await.unwrap();
        assert!(File::open(dir.path().join("lock")).unwrap().try_lock().is_err());
        drop(second);
    }
}
