//! How the processes of a node share its state.
//!
//! - A reader opens `state.json` and reads it; it is only ever replaced by a rename, so what is read is whole.
//!   The open file is kept: as long as it is, its inode cannot be used again, so "same inode" means "unchanged",
//!   and an unchanged state costs one `stat`.
//! - A writer holds `flock` on `lock`, reads, changes, writes `state.json.new`, renames. A writer killed at any
//!   instruction leaves the old state or the new one, and the kernel releases the lock.
//! - The files that show the state (`/proc/driver/nvidia/capabilities`, capability nodes) are brought in step
//!   under the same lock right after the rename. `tree` says which generation they show; a writer that was
//!   killed in between is made good for by the next process that opens or changes the node.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::{Error, Model, State, tree};

/// The folder of the simulation's own files, below the driver root.
pub const STATE_DIR: &str = "var/lib/kerf-sim";
/// The state file, below the driver root.
pub const STATE_FILE: &str = "var/lib/kerf-sim/state.json";

/// The shared state of one node.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    models: BTreeMap<String, Model>,
    cache: Mutex<Option<Cached>>,
}

#[derive(Debug)]
struct Cached {
    /// Kept open so that its inode stays taken.
    _file: File,
    identity: (u64, u64),
    state: Arc<State>,
}

impl Store {
    /// Opens the node under `root`.
    pub fn open(root: &Path) -> Result<Store, Error> {
        let root = root.canonicalize().map_err(|_| Error::NoNode { root: root.to_owned() })?;
        if !root.join(STATE_FILE).exists() {
            return Err(Error::NoNode { root });
        }
        let mut store = Store { root, models: BTreeMap::new(), cache: Mutex::new(None) };
        for gpu in &store.read()?.gpus {
            if !store.models.contains_key(&gpu.model) {
                let file = store.file(&format!("models/{}.json", gpu.model));
                store.models.insert(gpu.model.clone(), Model::from_file(&file)?);
            }
        }
        Ok(store)
    }

    /// Writes the first state of a node.
    pub(crate) fn create(root: &Path, state: &State, models: &BTreeMap<String, Model>) -> Result<(), Error> {
        let folder = root.join(STATE_DIR);
        let models_folder = folder.join("models");
        std::fs::create_dir_all(&models_folder).map_err(|e| Error::io("create", &models_folder, e))?;
        for model in models.values() {
            let path = models_folder.join(format!("{}.json", model.id));
            write(&path, serde_json::to_vec_pretty(model).map_err(json("the model"))?.as_slice())?;
        }
        write(&folder.join("events"), b"")?;
        write(&folder.join("lock"), b"")?;
        write(&folder.join("state.json"), &serde_json::to_vec(state).map_err(json("the state"))?)
    }

    /// The driver root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A file of the simulation itself.
    pub fn file(&self, name: &str) -> PathBuf {
        self.root.join(STATE_DIR).join(name)
    }

    /// The model of a GPU.
    pub fn model(&self, id: &str) -> Result<&Model, Error> {
        self.models
            .get(id)
            .ok_or_else(|| Error::UnknownModel { name: id.to_owned(), known: "those of the node".into() })
    }

    /// The state as it is now.
    pub fn read(&self) -> Result<Arc<State>, Error> {
        let path = self.file("state.json");
        let fail = |e| Error::io("read", &path, e);
        let mut cache = self.cache.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let meta = std::fs::metadata(&path).map_err(fail)?;
        if let Some(cached) = &*cache
            && cached.identity == (meta.dev(), meta.ino())
        {
            return Ok(cached.state.clone());
        }
        let mut file = File::open(&path).map_err(fail)?;
        let meta = file.metadata().map_err(fail)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(fail)?;
        let state: Arc<State> = Arc::new(serde_json::from_slice(&text).map_err(json("the state"))?);
        *cache = Some(Cached { _file: file, identity: (meta.dev(), meta.ino()), state: state.clone() });
        Ok(state)
    }

    /// Changes the state under the lock. If `change` fails, nothing has changed.
    pub fn write<T, E: From<Error>>(&self, change: impl FnOnce(&mut State) -> Result<T, E>) -> Result<T, E> {
        let _lock = self.lock()?;
        let old = self.read()?;
        self.heal(&old)?;
        let mut state = (*old).clone();
        let result = change(&mut state)?;
        state.generation = old.generation + 1;
        let text = serde_json::to_vec(&state).map_err(json("the state"))?;
        let fresh = self.file("state.json.new");
        write(&fresh, &text)?;
        let path = self.file("state.json");
        std::fs::rename(&fresh, &path).map_err(|e| Error::io("replace", &path, e))?;
        tree::show_change(&self.root, &old, &state)?;
        self.mark_shown(state.generation)?;
        if state.next_event != old.next_event || lost(&state) != lost(&old) {
            // Waiters of nvmlEventSetWait watch this file, not the state, so that only events wake them.
            self.put("events", state.next_event.to_string().as_bytes())?;
        }
        Ok(result)
    }

    /// Makes good for a process that was killed between its change and the files that show it.
    pub fn heal_if_needed(&self) -> Result<(), Error> {
        if self.shown() == Some(self.read()?.generation) {
            return Ok(());
        }
        let _lock = self.lock()?;
        let state = self.read()?;
        self.heal(&state)
    }

    fn heal(&self, state: &State) -> Result<(), Error> {
        if self.shown() == Some(state.generation) {
            return Ok(());
        }
        tree::show(&self.root, state)?;
        self.mark_shown(state.generation)
    }

    fn shown(&self) -> Option<u64> {
        std::fs::read_to_string(self.file("tree")).ok()?.trim().parse().ok()
    }

    fn mark_shown(&self, generation: u64) -> Result<(), Error> {
        self.put("tree", generation.to_string().as_bytes())
    }

    /// Overwrites a file in place, so that watches on its inode see it.
    fn put(&self, name: &str, content: &[u8]) -> Result<(), Error> {
        let path = self.file(name);
        let fail = |e| Error::io("write", &path, e);
        let mut file =
            File::options().write(true).create(true).truncate(false).mode(0o666).open(&path).map_err(fail)?;
        file.seek(SeekFrom::Start(0)).map_err(fail)?;
        file.write_all(content).map_err(fail)?;
        file.set_len(content.len() as u64).map_err(fail)
    }

    /// The node's lock; released when the file is closed, also by a kill.
    fn lock(&self) -> Result<File, Error> {
        let path = self.file("lock");
        let file =
            File::options().read(true).write(true).open(&path).map_err(|e| Error::io("open", &path, e))?;
        // The standard library's lock is flock(2).
        file.lock().map_err(|e| Error::io("lock", &path, e))?;
        Ok(file)
    }

    /// Appends a line to the call log.
    pub fn log_call(&self, line: &str) {
        // A log that cannot be written must not change what the driver answers.
        let _ = File::options()
            .append(true)
            .create(true)
            .mode(0o666)
            .open(self.file("calls.log"))
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    }
}

fn lost(state: &State) -> Vec<bool> {
    state.gpus.iter().map(|gpu| gpu.lost).collect()
}

fn json(what: &'static str) -> impl Fn(serde_json::Error) -> Error {
    move |source| Error::Json { what: what.to_owned(), source }
}

/// Writes a file that every user may read.
fn write(path: &Path, content: &[u8]) -> Result<(), Error> {
    std::fs::write(path, content).map_err(|e| Error::io("write", path, e))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
        .map_err(|e| Error::io("set the mode of", path, e))
}
