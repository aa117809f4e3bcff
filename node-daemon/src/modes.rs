//! Compute modes that Kerf has changed, and what they were: the checkpoint. It is written before a mode is changed, so
//! that after a crash the old one can still be put back, and nothing that somebody else set is touched.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::inventory::ComputeMode;
use crate::ours::replace;

/// Name of the file below `--state-dir`.
const FILE: &str = "compute-modes.json";

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    /// No mode survives a reboot.
    boot_id: String,
    /// By UUID of the GPU.
    before: BTreeMap<String, ComputeMode>,
}

/// See the module's text. Cheap to clone; every change is on disk before it returns.
#[derive(Clone, Debug)]
pub struct Modes {
    path: PathBuf,
    record: Arc<Mutex<Record>>,
}

impl Modes {
    /// Reads what is left of this boot.
    pub fn load(state_dir: &Path, boot_id: &str) -> Self {
        let path = state_dir.join(FILE);
        let read = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Record>(&text).ok());
        let record = read
            .filter(|record| record.boot_id == boot_id)
            .unwrap_or_else(|| Record { boot_id: boot_id.to_owned(), ..Record::default() });
        Self { path, record: Arc::new(Mutex::new(record)) }
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the mode of a GPU was before Kerf changed it; `None`: it has not.
    pub fn before(&self, gpu: &str) -> Option<ComputeMode> {
        self.lock().before.get(gpu).copied()
    }

    /// Writes down what the mode is before Kerf changes it. What is written already stays.
    pub fn keep(&self, gpu: &str, mode: ComputeMode) -> io::Result<()> {
        self.change(|before| _ = before.entry(gpu.to_owned()).or_insert(mode))
    }

    /// Forgets a GPU whose mode is no longer Kerf's.
    pub fn forget(&self, gpu: &str) -> io::Result<()> {
        self.change(|before| _ = before.remove(gpu))
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, ComputeMode>)) -> io::Result<()> {
        let mut record = self.lock();
        let mut new = record.clone();
        change(&mut new.before);
        if new.before != record.before {
            replace(&self.path, &serde_json::to_vec_pretty(&new)?)?;
            *record = new;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_mode_was_is_known_after_a_crash_in_the_same_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        let modes = Modes::load(dir.path(), "boot-1");
        modes.keep("GPU-1", ComputeMode::DEFAULT).unwrap();
        modes.keep("GPU-1", ComputeMode::EXCLUSIVE_PROCESS).unwrap();
        let again = Modes::load(dir.path(), "boot-1");
        assert_eq!(again.before("GPU-1"), Some(ComputeMode::DEFAULT), "the first word stands");
        assert_eq!(Modes::load(dir.path(), "boot-2").before("GPU-1"), None);
        again.forget("GPU-1").unwrap();
        assert_eq!(Modes::load(dir.path(), "boot-1").before("GPU-1"), None);
    }
}
