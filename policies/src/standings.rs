//! For each kind of request the nodes that have a place for it, cheapest first, kept up to date as nodes change: a
//! request costs as much work as nodes have changed since the last one of its kind.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::rc::Rc;

use crate::place::Solution;
use crate::snapshot::NodeIndex;
use crate::value::Cost;

/// Most nodes that are kept in order, over all kinds.
const MOST: usize = 1 << 20;

/// A node's place in the order: alternatives, price, and what decides between equal prices.
type Standing = (Vec<usize>, Cost, i64, u128, NodeIndex);

/// See the module.
#[derive(Debug)]
pub struct Standings<K> {
    nodes: usize,
    /// Nodes that changed, in order.
    changes: Vec<NodeIndex>,
    kinds: HashMap<K, Kind>,
}

#[derive(Debug, Default)]
struct Kind {
    /// So many of the changes are in.
    seen: usize,
    order: BTreeSet<Standing>,
    /// By node.
    at: Vec<Option<(Standing, Rc<Solution>)>>,
}

/// A place on a node, and what decides between equal prices.
#[derive(Debug)]
pub struct Entry {
    /// The place.
    pub place: Rc<Solution>,
    /// Fuller nodes first, or emptier ones.
    pub crowding: i64,
    /// Then by UUID.
    pub rank: u128,
}

impl<K: Copy + Eq + Hash> Standings<K> {
    /// Nothing is known of so many nodes.
    pub fn new(nodes: usize) -> Self {
        Self { nodes, changes: Vec::new(), kinds: HashMap::new() }
    }

    /// The node is not what it was.
    pub fn changed(&mut self, node: NodeIndex) {
        if self.kinds.is_empty() {
            return;
        }
        self.changes.push(node);
        // What has not been asked for since is worked out anew when it is.
        if self.changes.len() > 4 * self.nodes + 1024 {
            self.changes.clear();
            self.kinds.clear();
        }
    }

    /// Nodes whose place for the kind has to be worked out again.
    pub fn stale(&mut self, kind: K) -> Vec<NodeIndex> {
        if self.kinds.len() >= MOST / self.nodes.max(1) && !self.kinds.contains_key(&kind) {
            self.kinds.clear();
        }
        let (nodes, changes) = (self.nodes, self.changes.len());
        let Some(known) = self.kinds.get_mut(&kind) else {
            let new = Kind { seen: changes, order: BTreeSet::new(), at: vec![None; nodes] };
            self.kinds.insert(kind, new);
            return (0..nodes).collect();
        };
        let mut stale = self.changes[known.seen..].to_vec();
        known.seen = changes;
        stale.sort_unstable();
        stale.dedup();
        stale
    }

    /// The node's place for the kind, now.
    pub fn enter(&mut self, kind: K, node: NodeIndex, entry: Option<Entry>) {
        let Some(known) = self.kinds.get_mut(&kind) else { return };
        if let Some((before, _)) = known.at[node].take() {
            known.order.remove(&before);
        }
        if let Some(Entry { place, crowding, rank }) = entry {
            let standing = (place.choice.clone(), place.cost, crowding, rank, node);
            known.order.insert(standing.clone());
            known.at[node] = Some((standing, place));
        }
    }

    /// The cheapest place for the kind on a node that will do.
    pub fn first(&self, kind: K, will_do: impl Fn(NodeIndex) -> bool) -> Option<(NodeIndex, Rc<Solution>)> {
        let known = self.kinds.get(&kind)?;
        let node = known.order.iter().map(|standing| standing.4).find(|&node| will_do(node))?;
        known.at[node].as_ref().map(|(_, place)| (node, Rc::clone(place)))
    }
}
