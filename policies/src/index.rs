//! Which GPUs are in which state, in the order in which equal ones are taken.
//!
//! Nodes that no pod has told apart so far form a group; a pod that suits some nodes of a group and not others splits it.
//! So a search passes over all nodes that a selector or a taint rules out in one step.

use std::collections::{BTreeMap, BTreeSet};

use crate::catalog::StateId;
use crate::snapshot::{GpuIndex, NodeIndex};

/// Number of a group of nodes.
pub type GroupId = usize;

/// Most groups. Beyond them (pods that are each for a node of their own) nodes of a group are looked at one by one.
pub const GROUPS: usize = 64;

/// A GPU in the order in which equal ones are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat {
    /// See [`crate::fleet`]: fuller nodes first, or emptier ones.
    pub crowding: i64,
    /// Of the node, by UUID.
    pub rank: u128,
    /// The node.
    pub node: NodeIndex,
    /// The GPU.
    pub gpu: GpuIndex,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Index {
    by_state: Vec<BTreeMap<GroupId, BTreeSet<Seat>>>,
    /// By state: whether it is among `met`.
    known: Vec<bool>,
    met: Vec<StateId>,
    /// Number of states that a GPU is in.
    live: usize,
    /// Grows whenever `met` begins anew.
    epoch: u64,
}

impl Index {
    /// Enters a GPU.
    pub fn insert(&mut self, state: StateId, group: GroupId, seat: Seat) {
        let id = state as usize;
        if self.by_state.len() <= id {
            self.by_state.resize_with(id + 1, BTreeMap::new);
            self.known.resize(id + 1, false);
        }
        self.live += usize::from(self.by_state[id].is_empty());
        self.by_state[id].entry(group).or_default().insert(seat);
        if !self.known[id] {
            self.known[id] = true;
            self.met.push(state);
        }
    }

    /// Strikes a GPU off.
    pub fn remove(&mut self, state: StateId, group: GroupId, seat: Seat) {
        let Some(groups) = self.by_state.get_mut(state as usize) else { return };
        if let Some(seats) = groups.get_mut(&group) {
            seats.remove(&seat);
            if seats.is_empty() {
                groups.remove(&group);
                self.live -= usize::from(groups.is_empty());
            }
        }
    }

    /// States that GPUs have been in, in the order of their appearance, and the epoch of the list: in a new one it has
    /// begun anew, without those that no GPU is in any more.
    pub fn met(&mut self) -> (u64, &[StateId]) {
        if self.met.len() > 2 * self.live + 1024 {
            let by_state = &self.by_state;
            self.met.retain(|&state| !by_state[state as usize].is_empty());
            self.known.fill(false);
            for &state in &self.met {
                self.known[state as usize] = true;
            }
            self.epoch += 1;
        }
        (self.epoch, &self.met)
    }

    /// The first GPU in the state that is in a group and on a node that will do.
    pub fn first(
        &self,
        state: StateId,
        group: impl Fn(GroupId) -> bool,
        node: impl Fn(NodeIndex) -> bool,
    ) -> Option<Seat> {
        let groups = self.by_state.get(state as usize)?.iter().filter(|&(&id, _)| group(id));
        groups.filter_map(|(_, seats)| seats.iter().find(|seat| node(seat.node))).min().copied()
    }
}
