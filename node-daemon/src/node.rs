//! What the daemon's parts share. Each value has one writer:
//!
//! ```text
//!  API watch ──▶ spec ──────┬──▶ workers ──▶ hardware ──▶ scan ──▶ inventory ──┬──▶ GpuNode.status
//!                           └──▶ plugin (Prepare) ◀───────────────────────────┼──▶ ResourceSlice
//!                                   └──▶ prepared ──▶ workers, status          └──▶ plugin
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kerf_crds::GpuNodeSpec;
use kerf_crds::gpu_node::Reason;
use tokio::sync::{Notify, watch};

use crate::inventory::{Gpu, Inventory, Process};
use crate::metrics::Metrics;
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

/// What a GPU's worker has made of the spec.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuReport {
    /// UID of the GpuNode whose spec it was: generations of another one count from 1 again.
    pub uid: String,
    /// Generation of the spec that the worker last decided under; `None` before the first.
    pub generation: Option<i64>,
    /// Why the GPU is not as the spec wants it.
    pub problem: Option<Reason>,
    /// Who alone keeps it from that, where it is no claim.
    pub clients: Vec<Process>,
}

/// kubelet's word on the plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kubelet {
    /// It has not been heard of since this process or kubelet started.
    #[default]
    Unheard,
    Registered,
    /// kubelet's own words.
    Refused(String),
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
    /// Reports of the GPUs' workers, by UUID.
    pub reports: watch::Sender<BTreeMap<String, GpuReport>>,
    /// Claims between Prepare and Unprepare.
    pub prepared: PreparedStore,
    /// Whether kubelet knows the plugin.
    pub kubelet: watch::Sender<Kubelet>,
    /// What keeps the driver's libraries out of containers, if anything; `None` until it was looked into.
    pub toolkit: watch::Sender<Option<Option<Reason>>>,
    /// UID of the Node object, for owner references; `None` until it has been read.
    pub node_uid: watch::Sender<Option<String>>,
    /// Counts what happens.
    pub metrics: Metrics,
    looks: Mutex<Looks>,
    rescan: Notify,
}

/// What the inventory is put together from.
#[derive(Debug, Default)]
struct Looks {
    /// UUIDs of all GPUs that there are; `None` until they were counted.
    expected: Option<BTreeSet<String>>,
    /// Everything but the GPUs.
    node: Inventory,
    gpus: BTreeMap<String, Gpu>,
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
            reports: watch::Sender::default(),
            prepared: PreparedStore::new(prepared),
            kubelet: watch::Sender::default(),
            toolkit: watch::Sender::new(None),
            node_uid: watch::Sender::new(None),
            metrics: Metrics::default(),
            looks: Mutex::default(),
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

    /// Publishes what is known of the node as a whole: all but the GPUs, and which GPUs there are (`None`: as before).
    pub(crate) fn publish_node(&self, node: Inventory, gpus: Option<BTreeSet<String>>) {
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        looks.node = node;
        if gpus.is_some() {
            looks.expected = gpus;
        }
        self.put_together(&looks);
    }

    /// Publishes a look at one GPU.
    pub(crate) fn publish_gpu(&self, gpu: Gpu) {
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        looks.gpus.insert(gpu.uuid.clone(), gpu);
        self.put_together(&looks);
    }

    /// No first inventory is shown before every GPU was looked at: one that is missing from it is not there.
    fn put_together(&self, looks: &Looks) {
        let complete = match &looks.expected {
            Some(expected) => expected.iter().all(|uuid| looks.gpus.contains_key(uuid)),
            None => looks.node.unavailable.is_some(),
        };
        // The first look at a GPU that was found since may hang, and what becomes of the others is to be seen.
        let shown = self.inventory.borrow().as_ref().map_or(0, |shown| shown.gpus.len());
        let only_shown_before = shown > 0 && shown == looks.gpus.len();
        if !complete && !only_shown_before {
            return;
        }
        let mut gpus: Vec<Gpu> = looks.gpus.values().cloned().collect();
        gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        let inventory = Inventory { gpus, ..looks.node.clone() };
        self.inventory.send_if_modified(|old| {
            let changed = old.as_deref() != Some(&inventory);
            if changed {
                *old = Some(Arc::new(inventory));
            }
            changed
        });
    }

    /// [`NodeState::request_scan`] on a condition.
    pub(crate) fn request_scan_if(&self, condition: bool) {
        if condition {
            self.request_scan();
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_looked_at_yet_holds_back_the_first_inventory_and_no_later_one() {
        let state = NodeState::new("n", PreparedClaims::new());
        let expect = |uuids: &[&str]| {
            let uuids = uuids.iter().map(ToString::to_string).collect();
            state.publish_node(Inventory::default(), Some(uuids));
        };
        let look = |uuid: &str, index| {
            state.publish_gpu(Gpu { uuid: uuid.into(), index, ..Gpu::default() });
        };
        let shown = || {
            let shown = state.latest()?;
            Some(shown.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.index)).collect::<Vec<_>>())
        };
        expect(&["a", "b"]);
        look("a", 0);
        assert_eq!(shown(), None);
        look("b", 1);
        expect(&["a", "b", "c"]);
        look("b", 2);
        assert_eq!(shown().unwrap(), [("a".into(), 0), ("b".into(), 2)]);
        look("c", 1);
        assert_eq!(shown().unwrap().len(), 3);
    }
}
