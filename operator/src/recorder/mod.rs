//! Flight recorder: what the planner was asked and what it answered, of the last cycles that had requests.
//!
//! ```text
//!  cycle ──Planned──▶ thread: [`pack`] ──▶ [`shelf`] ◀── [`serve`]: GET /debug/plans, on loopback
//! ```
//! A cycle hands over what it has no more use for, and waits for nobody. `kerf-whatif replay` plans a record again.

mod pack;
mod serve;
mod shelf;

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use k8s_openapi::jiff::Timestamp;
use kerf_planner::plan::Plan;
use kerf_planner::snapshot::Snapshot;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use serve::serve;
pub use shelf::Shelf;

use pack::Packer;

/// What is kept at most, in bytes. At 500 nodes of eight GPUs that is between 150 plans, where every node changes
/// from one to the next, and thousands.
const LIMIT: usize = 16 << 20;

/// Question and answer of a cycle.
#[derive(Debug, Default)]
pub struct Planned {
    pub snapshot: Snapshot,
    /// As planned; what a cycle makes of it may differ.
    pub plan: Plan,
}

/// A cycle on record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    /// Where it comes from, for people.
    #[serde(default)]
    pub about: String,
    /// See [`hash`].
    #[serde(default)]
    pub hash: String,
    pub snapshot: Snapshot,
    pub plan: Plan,
}

/// Tells snapshots apart: the beginning of the SHA-256 of its JSON.
pub fn hash(snapshot: &Snapshot) -> String {
    struct Write(Sha256);
    impl std::io::Write for Write {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut write = Write(Sha256::new());
    // Neither can fail: the hash takes everything, and a snapshot has no map that JSON cannot hold.
    let _ = serde_json::to_writer(std::io::BufWriter::new(&mut write), snapshot);
    write.0.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Takes cycles down, on a thread of its own, which ends with it.
#[derive(Debug)]
pub struct Recorder {
    to: SyncSender<(Timestamp, Planned)>,
    shelf: Arc<Shelf>,
}

impl Recorder {
    /// An empty one.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start() -> std::io::Result<Self> {
        // One waits while another is packed; each holds a snapshot.
        let (to, from) = sync_channel(1);
        let shelf = Arc::new(Shelf::new(LIMIT));
        let mut packer = Packer::new(Arc::clone(&shelf));
        let take_down = move || from.iter().for_each(|(time, planned)| packer.take_down(time, planned));
        std::thread::Builder::new().name("recorder".into()).spawn(take_down)?;
        Ok(Self { to, shelf })
    }

    /// What it has.
    pub fn shelf(&self) -> &Arc<Shelf> {
        &self.shelf
    }

    /// Takes a cycle down, or counts it as missed while it is busy with others.
    pub fn record(&self, planned: Planned) {
        if self.to.try_send((Timestamp::now(), planned)).is_err() {
            self.shelf.missed();
        }
    }
}

#[cfg(test)]
mod tests;
