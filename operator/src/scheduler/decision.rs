//! What a cycle looks at, and what comes out of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kerf_crds::{GpuNode, GpuNodeSpec};

use super::memory::Memory;
use super::needs::Memo;
use super::placements::Key;
use super::rooms::Eviction;
use super::selectors::Selectors;
use super::snapshot::Board;
use super::tell::Sentence;
use super::trouble::Troubled;
use crate::cache::{PodInfo, World};
use crate::controller::desired::Problems;
use crate::controller::matching::Matches;
use crate::recorder::Planned;

/// What a cycle wants written.
#[derive(Debug, Default)]
pub struct Decision {
    /// Nodes whose spec changes, and the placements that the change makes.
    pub specs: Vec<NodeWrite>,
    /// Placements whose next step is a write to something else.
    pub drive: BTreeSet<Key>,
    /// Pods whose claims are all allocated, with others before them, and that still have Kerf's gate and no other.
    pub ungate: Vec<Arc<PodInfo>>,
    /// Pods whose claim a quota refused a while ago.
    pub quota: Vec<Arc<PodInfo>>,
    /// Pods bound where they can never run.
    pub stranded: Vec<Arc<PodInfo>>,
    /// Pods that are moved to make room for others.
    pub evictions: Vec<Eviction>,
    /// What pods are told, once each.
    pub sentences: Vec<(Arc<PodInfo>, Sentence)>,
    /// UIDs of those of them that have no place: a node that was nominated for one keeps room for nobody.
    pub placeless: BTreeSet<String>,
    /// For the policies' status.
    pub matches: Arc<Matches>,
    /// See [`Problems`].
    pub problems: Problems,
    /// What the planner was asked and what it answered, if it was asked for anybody.
    pub planned: Option<Planned>,
}

impl Decision {
    /// Tells a pod without a place why.
    pub fn tell_placeless(&mut self, pod: &Arc<PodInfo>, sentence: Sentence) {
        self.placeless.insert(pod.uid.clone());
        self.sentences.push((Arc::clone(pod), sentence));
    }

    /// Tells a pod why it cannot use its place.
    pub fn tell_troubled(&mut self, troubled: &Troubled) {
        let sentence = troubled.sentence.clone();
        self.sentences.extend(sentence.map(|sentence| (Arc::clone(&troubled.pod), sentence)));
    }
}

/// What a cycle looks at.
#[derive(Debug)]
pub struct Looking<'a> {
    pub world: &'a World,
    pub board: &'a Board,
    pub memory: &'a Memory,
    pub selectors: &'a Selectors,
    pub memo: &'a Memo,
    pub now: Instant,
}

/// A node's new spec.
#[derive(Debug)]
pub struct NodeWrite {
    pub node: Arc<GpuNode>,
    pub spec: GpuNodeSpec,
    /// Placements that come to be with it.
    pub added: Vec<Key>,
    /// Placements that end with it.
    pub removed: Vec<Key>,
}
