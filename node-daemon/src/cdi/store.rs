//! The directory that the container runtime reads CDI specs from.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kerf_crds::names::DRIVER;

use super::claim::{CLASS, RECORD_ANNOTATION};
use super::file::{remove, with_path, write_atomically};
use super::spec::Spec;
use crate::prepared::Prepared;

/// Kerf's specs in the CDI directory. Other files there are left alone.
#[derive(Clone, Debug)]
pub struct CdiStore {
    directory: PathBuf,
}

/// A spec found in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSpec {
    /// UID of the claim, from the file's name.
    pub claim_uid: String,
    /// The file's content; `None` if it is no CDI spec.
    pub spec: Option<Spec>,
    /// The claim's record as of when the spec was written; `None` if it cannot be read.
    pub record: Option<Prepared>,
}

impl CdiStore {
    /// Works on `directory`, which is made at the first write.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// The file of a claim's spec.
    pub fn path(&self, claim_uid: &str) -> PathBuf {
        self.directory.join(format!("{}{claim_uid}.json", prefix()))
    }

    /// Writes a claim's spec, unless the file says just that already.
    pub fn write(&self, claim_uid: &str, spec: &Spec) -> io::Result<()> {
        let path = self.path(claim_uid);
        if read(&path).is_some_and(|found| found == *spec) {
            return Ok(());
        }
        write_atomically(&path, &serde_json::to_vec_pretty(spec)?)
    }

    /// Removes a claim's spec.
    pub fn remove(&self, claim_uid: &str) -> io::Result<()> {
        remove(&self.path(claim_uid))
    }

    /// All of Kerf's specs.
    pub fn list(&self) -> io::Result<Vec<StoredSpec>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(with_path("list", &self.directory, error)),
            Ok(entries) => entries,
        };
        let mut found = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(|error| with_path("list", &self.directory, error))?;
            let name = entry.file_name();
            let uid = name.to_str().and_then(|name| name.strip_prefix(&prefix())?.strip_suffix(".json"));
            if let Some(uid) = uid {
                let spec = read(&entry.path());
                let record = spec.as_ref().and_then(record_of).filter(|record| record.claim.uid == uid);
                found.insert(uid.to_owned(), StoredSpec { claim_uid: uid.to_owned(), spec, record });
            }
        }
        Ok(found.into_values().collect())
    }
}

/// Vendors name their files so that two of them never write the same one.
fn prefix() -> String {
    format!("{DRIVER}-{CLASS}_")
}

fn read(path: &Path) -> Option<Spec> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn record_of(spec: &Spec) -> Option<Prepared> {
    serde_json::from_str(spec.annotations.get(RECORD_ANNOTATION)?).ok()
}
