//! The prepared claims on disk: one file per claim, so that claims of different pods are written side by side and a
//! damaged file costs one of them at most.
//!
//! A lost or damaged record is restored from the claim's CDI spec, which carries a copy; what is in neither is restored
//! from `GpuNode.status`, see [`super::claims_in_status`].

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cdi::{CdiStore, write_atomically};
use crate::prepared::{Prepared, PreparedClaims};

/// Directory below the state directory.
const DIRECTORY: &str = "prepared";

/// The records on disk. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    boot_id: String,
}

/// What [`Checkpoint::open`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// What was prepared when the last process ended.
    pub claims: PreparedClaims,
    /// Claims may be missing in `claims`: there was no checkpoint at all (also at the very first start), or a damaged
    /// record without a CDI spec. [`super::claims_in_status`] says what `GpuNode.status` knows of them.
    pub lost: bool,
}

/// A file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    /// The kernel's boot id when it was written; empty: unknown.
    #[serde(default)]
    boot_id: String,
    prepared: Prepared,
}

impl Checkpoint {
    /// Opens the records below `state_dir`, and restores from the CDI specs those that are lost. `boot_id` is the
    /// kernel's at present.
    pub fn open(
        state_dir: impl Into<PathBuf>,
        boot_id: impl Into<String>,
        cdi: &CdiStore,
    ) -> io::Result<(Self, Recovered)> {
        let checkpoint = Self { directory: state_dir.into().join(DIRECTORY), boot_id: boot_id.into() };
        let existed = checkpoint.directory.is_dir();
        let (mut claims, damaged) = checkpoint.read()?;
        let mut lost = !existed;
        for spec in cdi.list()? {
            if let Some(record) = spec.record
                && !claims.contains_key(&spec.claim_uid)
            {
                tracing::warn!(claim = %record.claim.name, uid = spec.claim_uid, "restored the lost record of a prepared claim from its CDI spec");
                checkpoint.write_with(&record, String::new())?;
                claims.insert(spec.claim_uid, record);
            }
        }
        for uid in damaged.iter().filter(|uid| !claims.contains_key(*uid)) {
            tracing::warn!(uid, directory = %checkpoint.directory.display(), "the record of a prepared claim is damaged, and it has no CDI spec");
            lost = true;
        }
        fs::create_dir_all(&checkpoint.directory)
            .map_err(|error| named("make", &checkpoint.directory, error))?;
        Ok((checkpoint, Recovered { claims, lost }))
    }

    /// Writes a claim's record; it is on disk when this returns.
    pub fn write(&self, prepared: &Prepared) -> io::Result<()> {
        self.write_with(prepared, self.boot_id.clone())
    }

    /// Writes the record of a claim that was prepared at an unknown time.
    pub(super) fn restore(&self, prepared: &Prepared) -> io::Result<()> {
        self.write_with(prepared, String::new())
    }

    fn write_with(&self, prepared: &Prepared, boot_id: String) -> io::Result<()> {
        let record = Record { boot_id, prepared: prepared.clone() };
        write_atomically(&self.path(&prepared.claim.uid)?, &serde_json::to_vec(&record)?)
    }

    /// Removes a claim's record.
    pub fn remove(&self, claim_uid: &str) -> io::Result<()> {
        crate::cdi::remove_file(&self.path(claim_uid)?)
    }

    /// UIDs of the claims that were last prepared before the present boot: no container of that time runs any more. Those
    /// of which nobody knows when are not among them.
    pub fn from_earlier_boots(&self) -> io::Result<Vec<String>> {
        let (records, _) = self.records()?;
        Ok(records
            .into_iter()
            .filter(|(_, record)| !record.boot_id.is_empty() && record.boot_id != self.boot_id)
            .map(|(uid, _)| uid)
            .collect())
    }

    fn read(&self) -> io::Result<(PreparedClaims, Vec<String>)> {
        let (records, damaged) = self.records()?;
        Ok((records.into_iter().map(|(uid, record)| (uid, record.prepared)).collect(), damaged))
    }

    /// The records by claim UID, and the UIDs of those that cannot be read.
    fn records(&self) -> io::Result<(BTreeMap<String, Record>, Vec<String>)> {
        let mut records = BTreeMap::new();
        let mut damaged = Vec::new();
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((records, damaged)),
            Err(error) => return Err(named("list", &self.directory, error)),
            Ok(entries) => entries,
        };
        for entry in entries {
            let entry = entry.map_err(|error| named("list", &self.directory, error))?;
            let name = entry.file_name();
            let Some(uid) = name.to_str().and_then(|name| name.strip_suffix(".json")) else { continue };
            let content = fs::read(entry.path()).map_err(|error| named("read", &entry.path(), error))?;
            match serde_json::from_slice::<Record>(&content) {
                Ok(record) if record.prepared.claim.uid == uid => {
                    records.insert(uid.to_owned(), record);
                }
                _ => damaged.push(uid.to_owned()),
            }
        }
        Ok((records, damaged))
    }

    fn path(&self, claim_uid: &str) -> io::Result<PathBuf> {
        if !is_uid(claim_uid) {
            let message = format!("'{claim_uid}' is not a UID: letters, digits and '-' only");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        Ok(self.directory.join(format!("{claim_uid}.json")))
    }
}

/// Whether it can stand in a file's name. UIDs come from kubelet; the API server makes them, but nothing says how.
pub(super) fn is_uid(text: &str) -> bool {
    (1..=128).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

fn named(what: &str, path: &std::path::Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kerf_crds::gpu_node::ClaimReference;

    use super::*;
    use crate::cdi::{RECORD_ANNOTATION, Spec};

    fn prepared(uid: &str) -> Prepared {
        let claim = ClaimReference { namespace: "ns".into(), name: "c".into(), uid: uid.into() };
        Prepared { claim, pod: None, devices: vec![] }
    }

    fn spec(prepared: &Prepared) -> Spec {
        let record = serde_json::to_string(prepared).unwrap();
        Spec { annotations: BTreeMap::from([(RECORD_ANNOTATION.into(), record)]), ..Spec::default() }
    }

    #[test]
    fn records_survive_and_torn_ones_come_back_from_the_cdi_spec() {
        let directory = tempfile::tempdir().unwrap();
        let cdi = CdiStore::new(directory.path().join("cdi"));
        let open = || Checkpoint::open(directory.path(), "boot-1", &cdi).unwrap();

        let (checkpoint, first) = open();
        assert_eq!(first, Recovered { claims: PreparedClaims::new(), lost: true }, "the very first start");
        for uid in ["a", "b"] {
            checkpoint.write(&prepared(uid)).unwrap();
            cdi.write(uid, &spec(&prepared(uid))).unwrap();
        }
        assert_eq!(open().1.claims.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert!(!open().1.lost);

        fs::write(directory.path().join("prepared/a.json"), b"{\"bootId\":\"bo").unwrap();
        let (_, torn) = open();
        assert_eq!(torn.claims["a"], prepared("a"));
        assert!(!torn.lost);

        fs::write(directory.path().join("prepared/b.json"), b"").unwrap();
        cdi.remove("b").unwrap();
        let (checkpoint, torn) = open();
        assert!(torn.lost && !torn.claims.contains_key("b"), "nothing is left of b");

        fs::remove_dir_all(directory.path().join("prepared")).unwrap();
        let (_, gone) = open();
        assert!(gone.lost && gone.claims.contains_key("a"));
        checkpoint.remove("a").unwrap();
        checkpoint.remove("a").expect("idempotent");
    }

    #[test]
    fn records_of_another_boot_are_known() {
        let directory = tempfile::tempdir().unwrap();
        let cdi = CdiStore::new(directory.path().join("cdi"));
        let (before, _) = Checkpoint::open(directory.path(), "boot-1", &cdi).unwrap();
        before.write(&prepared("a")).unwrap();
        let (after, _) = Checkpoint::open(directory.path(), "boot-2", &cdi).unwrap();
        after.write(&prepared("b")).unwrap();
        after.restore(&prepared("c")).unwrap();
        assert_eq!(after.from_earlier_boots().unwrap(), ["a"]);
    }

    #[test]
    fn a_uid_cannot_leave_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let (checkpoint, _) =
            Checkpoint::open(directory.path(), "b", &CdiStore::new(directory.path().join("cdi"))).unwrap();
        assert!(checkpoint.write(&prepared("../../etc/x")).is_err());
        assert!(checkpoint.remove("").is_err());
    }
}
