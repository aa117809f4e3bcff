//! Cycle → entry on the shelf: the nodes of a first one whole, of those after it what differs from that.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kerf_planner::plan::Plan;
use kerf_planner::shared::Shared;
use kerf_planner::snapshot::{Demand, Geometry, Movable, Node, Request, Snapshot};
use serde::{Deserialize, Serialize};

use super::shelf::{Counts, Entry, Shelf};
use super::{Planned, hash};

/// Where more than this share of the nodes differs, they are taken down whole.
const SHARE: usize = 4;

/// What all entries of a group differ from.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Whole {
    pub geometries: Vec<Geometry>,
    pub nodes: Shared<Node>,
}

/// What one entry has besides.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Rest {
    /// Nodes that are otherwise, by index.
    pub nodes: Vec<(usize, Node)>,
    pub requests: Vec<Request>,
    pub movable: Vec<Movable>,
    pub budgets: Vec<u32>,
    pub demand: Vec<Demand>,
    pub plan: Plan,
}

/// See the module.
#[derive(Debug)]
pub struct Packer {
    shelf: Arc<Shelf>,
    /// What the entries of the newest group differ from.
    whole: Whole,
    /// The last answer, and whose requests it was about.
    last: (Plan, Vec<String>),
}

impl Packer {
    pub fn new(shelf: Arc<Shelf>) -> Self {
        Self { shelf, whole: Whole::default(), last: Default::default() }
    }

    /// Puts a cycle on the shelf. The same refusals once more are only counted.
    pub fn take_down(&mut self, time: Timestamp, planned: Planned) {
        let Planned { snapshot, plan } = planned;
        let answer = (plan, snapshot.requests.iter().map(|request| request.id.clone()).collect());
        let gives_nothing = answer.0.placements.is_empty() && answer.0.rooms.is_empty();
        if gives_nothing && answer == self.last && self.shelf.once_more(time) {
            return;
        }
        let counts = Counts {
            requests: snapshot.requests.len(),
            placements: answer.0.placements.len(),
            rooms: answer.0.rooms.len(),
            refusals: answer.0.refusals.len(),
        };
        let hash = hash(&snapshot);
        let Snapshot { geometries, nodes, requests, movable, budgets, demand } = snapshot;
        let (whole, nodes) = match self.difference(&geometries, &nodes) {
            Some(differ) if !self.shelf.wants_whole() => {
                let differing = nodes.iter().enumerate().filter(|(index, _)| differ[*index]);
                (None, differing.map(|(index, node)| (index, node.clone())).collect())
            }
            _ => {
                self.whole = Whole { geometries, nodes };
                (Some(pack(&self.whole)), Vec::new())
            }
        };
        let rest = Rest { nodes, requests, movable, budgets, demand, plan: answer.0 };
        let body = pack(&rest);
        self.last = (rest.plan, answer.1);
        self.shelf.put(whole, Entry { number: 0, time, until: time, times: 1, hash, counts, body });
    }

    /// Which nodes differ; `None` where most do.
    fn difference(&self, geometries: &[Geometry], nodes: &Shared<Node>) -> Option<Vec<bool>> {
        if self.whole.geometries != geometries || self.whole.nodes.len() != nodes.len() {
            return None;
        }
        let pairs = self.whole.nodes.as_shared().iter().zip(nodes.as_shared());
        let differ: Vec<bool> = pairs.map(|(old, new)| !Arc::ptr_eq(old, new) && old != new).collect();
        (differ.iter().filter(|differs| **differs).count() * SHARE <= nodes.len()).then_some(differ)
    }
}

/// The snapshot and the plan of an entry.
///
/// # Errors
/// They cannot be read.
pub fn unpack(whole: &[u8], rest: &[u8]) -> anyhow::Result<(Snapshot, Plan)> {
    let read = |packed: &[u8]| lz4_flex::decompress_size_prepended(packed);
    let Whole { geometries, mut nodes } = serde_json::from_slice(&read(whole)?)?;
    let Rest { nodes: differ, requests, movable, budgets, demand, plan } =
        serde_json::from_slice(&read(rest)?)?;
    for (index, node) in differ {
        if let Some(place) = nodes.get_mut(index) {
            *place = node;
        }
    }
    Ok((Snapshot { geometries, nodes, requests, movable, budgets, demand }, plan))
}

fn pack(value: &impl Serialize) -> Arc<[u8]> {
    // Cannot fail: no map has keys that JSON cannot hold.
    let json = serde_json::to_vec(value).unwrap_or_default();
    lz4_flex::compress_prepend_size(&json).into()
}
