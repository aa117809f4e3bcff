//! What the daemon's parts share. Each value has one writer:
//!
//! ```text
//!  API watch ──▶ spec ──────┬──▶ workers ──▶ hardware ──▶ scan ──▶ inventory ──┬──▶ GpuNode.status
//!                           └──▶ plugin (Prepare) ◀───────────────────────────┼──▶ ResourceSlice
//!                                   └──▶ prepared ──▶ workers, status          └──▶ plugin
//! ```

use std::sync::Arc;

use kerf_crds::GpuNodeSpec;
use tokio::sync::{Notify, watch};

use crate::inventory::Inventory;
use crate::prepared::{PreparedClaims, PreparedStore};

/// `GpuNode.spec` as the API server last showed it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenSpec {
    /// UID of the GpuNode.
    pub uid: String,
    /// `metadata.generation` of the spec.
    pub generation: i64,
    pub spec: GpuNodeSpec,
}

/// Handle on everything that is shared. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeState(Arc<Shared>);

/// See [`NodeState`], which derefs to this.
#[derive(Debug)]
pub struct Shared {
    /// Name of the Node.
    pub node_name: String,
    /// `None` until the API server has shown it since this process started: without it no hardware is changed.
    pub spec: watch::Sender<Option<Arc<SeenSpec>>>,
    /// `None` until the first scan.
    pub inventory: watch::Sender<Option<Arc<Inventory>>>,
    /// Claims between Prepare and Unprepare.
    pub prepared: PreparedStore,
    /// UID of the Node object, for owner references; `None` until it has been read.
    pub node_uid: watch::Sender<Option<String>>,
    rescan: Notify,
}

impl std::ops::Deref for NodeState {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl NodeState {
    /// `prepared` is what an earlier process left.
    pub fn new(node_name: impl Into<String>, prepared: PreparedClaims) -> Self {
        Self(Arc::new(Shared {
            node_name: node_name.into(),
            spec: watch::Sender::new(None),
            inventory: watch::Sender::new(None),
            prepared: PreparedStore::new(prepared),
            node_uid: watch::Sender::new(None),
            rescan: Notify::new(),
        }))
    }

    /// The latest spec.
    pub fn seen_spec(&self) -> Option<Arc<SeenSpec>> {
        self.spec.borrow().clone()
    }

    /// The latest inventory.
    pub fn latest(&self) -> Option<Arc<Inventory>> {
        self.inventory.borrow().clone()
    }

    /// Asks for a scan soon; several requests before it starts are one.
    pub fn request_scan(&self) {
        self.rescan.notify_one();
    }

    /// Resolves when a scan has been asked for. For the scanner alone.
    pub async fn scan_requested(&self) {
        self.rescan.notified().await;
    }
}
