//! The cache folder: one entry per tool and version, made elsewhere and renamed into place, so that an entry that
//! exists is complete whatever interrupted its making.

use std::env;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// `$KERF_CACHE`, else `$XDG_CACHE_HOME/kerf`, else `~/.cache/kerf`. Not necessarily there yet.
///
/// # Errors
/// None of the three is usable: no `HOME`.
pub fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = non_empty("KERF_CACHE") {
        return std::path::absolute(&dir).with_context(|| format!("KERF_CACHE={}", dir.display()));
    }
    if let Some(dir) = non_empty("XDG_CACHE_HOME") {
        return Ok(dir.join("kerf"));
    }
    let home = non_empty("HOME").context("no cache folder: set KERF_CACHE, XDG_CACHE_HOME or HOME")?;
    Ok(home.join(".cache/kerf"))
}

pub(crate) fn non_empty(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Lets one process at a time change the cache. The lock goes with the returned file, so also when the process dies.
pub(crate) fn lock(cache: &Path, progress: &dyn Fn(&str)) -> Result<File> {
    fs::create_dir_all(cache).with_context(|| format!("failed to create the cache {}", cache.display()))?;
    let path = cache.join(".lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("failed to open {}", path.display()))?;
    // Others hold it for a moment when they look, and for minutes when they build.
    for waited in 0.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("failed to lock {}", path.display()));
            }
        }
        if waited == 40 {
            progress("waiting for another process that is building the toolchain");
        }
        sleep(Duration::from_millis(50));
    }
    Ok(file)
}

/// The entry `name`, made by `make` in a folder of its own if it is not there. What an earlier, interrupted making
/// left is removed first.
pub(crate) fn entry(cache: &Path, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let path = cache.join(name);
    if path.is_dir() {
        return Ok(path);
    }
    let partial = cache.join(format!(".partial-{name}"));
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("failed to remove {}", partial.display()))?;
    }
    fs::create_dir(&partial).with_context(|| format!("failed to create {}", partial.display()))?;
    make(&partial)?;
    fs::rename(&partial, &path).with_context(|| format!("failed to rename {}", partial.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_entry_is_made_again_and_a_complete_one_is_kept() {
        let cache = tempfile::tempdir().unwrap();
        let failed = entry(cache.path(), "tool-1", |dir| {
            fs::write(dir.join("half"), "ha").unwrap();
            anyhow::bail!("interrupted")
        });
        assert!(failed.is_err());
        assert!(!cache.path().join("tool-1").exists(), "a half-made entry counts as done");

        let made = entry(cache.path(), "tool-1", |dir| Ok(fs::write(dir.join("whole"), "whole")?)).unwrap();
        assert!(made.join("whole").is_file());
        assert!(!made.join("half").exists(), "the earlier attempt's files are in the entry");

        entry(cache.path(), "tool-1", |_| anyhow::bail!("made twice")).unwrap();
    }
}
