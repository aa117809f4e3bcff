//! This process's end of the watcher, and what a panic does to it.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::helper::{Hello, KEEP_LOGS, LOCK_FILE, remove_remains};

/// The pipe whose end ends the cluster.
pub(crate) struct LifeLine {
    pipe: Mutex<Option<ChildStdin>>,
    logs: PathBuf,
}

impl LifeLine {
    /// Has the logs outlive the cluster, and says where they are.
    pub(crate) fn keep_logs(&self) {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipe) = pipe.as_mut()
            && pipe.write_all(&[KEEP_LOGS]).and_then(|()| pipe.flush()).is_ok()
        {
            eprintln!("the logs of the test cluster are kept in {}", self.logs.display());
        }
    }
}

pub(crate) struct Watcher {
    child: Child,
    life_line: Arc<LifeLine>,
}

impl Watcher {
    pub(crate) fn start(helper: &Path, dir: &Path) -> Result<(Self, Hello)> {
        let mut child = Command::new(helper)
            .arg("watch")
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("failed to start {}", helper.display()))?;
        let life_line = Arc::new(LifeLine { pipe: Mutex::new(child.stdin.take()), logs: dir.join("logs") });
        let mut line = String::new();
        let stdout = child.stdout.take().context("the watcher has no standard output")?;
        BufReader::new(stdout).read_line(&mut line).context("failed to read from the watcher")?;
        if line.is_empty() {
            let status = child.wait().context("failed to wait for the watcher")?;
            bail!("the cluster's watcher has ended ({status}); its error is above");
        }
        let hello = serde_json::from_str(&line).context("failed to understand the watcher")?;
        keep_logs_on_panic(&life_line);
        Ok((Self { child, life_line }, hello))
    }

    pub(crate) fn life_line(&self) -> &LifeLine {
        &self.life_line
    }

    /// Ends the cluster, and returns when it is gone.
    pub(crate) fn end(&mut self) -> Result<()> {
        drop(self.life_line.pipe.lock().unwrap_or_else(PoisonError::into_inner).take());
        let status = self.child.wait().context("failed to wait for the cluster's watcher")?;
        if !status.success() {
            bail!("the cluster's watcher failed ({status}); its error is above");
        }
        Ok(())
    }
}

/// A test that fails panics; statics and other threads' guards do not see that, the panic hook does.
fn keep_logs_on_panic(life_line: &Arc<LifeLine>) {
    static LIVE: Mutex<Vec<Weak<LifeLine>>> = Mutex::new(Vec::new());
    static HOOK: Once = Once::new();
    LIVE.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(life_line));
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            before(info);
            // Not `lock`: a panic while the list is held must not wait for itself.
            if let Ok(mut live) = LIVE.try_lock() {
                live.retain(|line| line.strong_count() > 0);
                live.iter().filter_map(Weak::upgrade).for_each(|line| line.keep_logs());
            }
        }));
    });
}

/// Removes what clusters left here whose watcher was killed together with its harness.
pub(crate) fn sweep(parent: &Path) {
    // Being unable to tidy up for others is no reason to fail.
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let dir = entry.path();
        let lock_file = dir.join(LOCK_FILE);
        if !entry.file_name().to_string_lossy().starts_with("kerf-") || !lock_file.is_file() {
            continue;
        }
        // A younger one may be about to be locked.
        let old = fs::metadata(&lock_file)
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|made| made.elapsed().is_ok_and(|age| age > Duration::from_secs(60)));
        if old
            && let Ok(lock) = fs::File::open(&lock_file)
            && lock.try_lock().is_ok()
            && let Err(error) = remove_remains(&dir, false)
        {
            eprintln!("failed to remove what an earlier test cluster left: {error:#}");
        }
    }
}
