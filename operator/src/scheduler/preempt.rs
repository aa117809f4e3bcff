//! Places for pods that fit only once kube-scheduler has preempted others.

use std::collections::BTreeSet;

use kerf_planner::plan::{Plan, RefusalKind};
use kerf_planner::snapshot::Snapshot;

use super::entries::{Changes, commit};
use super::memory::Memory;
use super::queue::Candidate;
use super::snapshot::{Board, give_back};

/// How many pods kube-scheduler may be asked to preempt for in one cycle.
const PREEMPTIONS: usize = 1;

/// Pods that would fit if kube-scheduler preempted for them get their place too, held from the start: it preempts only
/// for a pod whose claim is allocated. Answers their UIDs.
pub fn preempt(
    board: &Board,
    candidates: &[Candidate],
    memory: &Memory,
    plan: &mut Plan,
    changes: &mut Changes,
) -> Vec<String> {
    let mut placed = Vec::new();
    let mut index = 0;
    while index < plan.refusals.len() && placed.len() < PREEMPTIONS {
        let refusal = &plan.refusals[index];
        let Candidate { pod, wanted, instead_of } = &candidates[refusal.request];
        index += 1;
        let may = pod.detail.as_ref().is_some_and(|detail| detail.preempts);
        // Room for one of a gang is none for all.
        let of_gang = board.snapshot.requests[refusal.request].gang.is_some();
        if refusal.kind != RefusalKind::NodesDoNotFit || !may || instead_of.is_some() || of_gang {
            continue;
        }
        let evictable = |node| board.evictable(node, pod.priority);
        if (0..board.gpu_nodes.len()).all(|node| evictable(node).next().is_none()) {
            continue;
        }
        let mut snapshot = Snapshot {
            geometries: board.snapshot.geometries.clone(),
            nodes: board.snapshot.nodes.clone(),
            requests: vec![board.snapshot.requests[refusal.request].clone()],
            ..Snapshot::default()
        };
        // Only where the pods of this plan have not taken GPUs already.
        let taken: BTreeSet<usize> = plan.placements.iter().map(|placement| placement.node).collect();
        for node in 0..board.gpu_nodes.len() {
            for milli in evictable(node) {
                give_back(&mut snapshot.nodes[node].free_milli, milli);
            }
            if taken.contains(&node) {
                snapshot.nodes[node].ready = false;
            }
        }
        if let Some(placement) = kerf_planner::plan(&snapshot).placements.first() {
            memory.hold(&pod.uid);
            commit(board, pod, wanted, placement.node, &placement.devices, changes);
            index -= 1;
            plan.refusals.remove(index);
            placed.push(pod.uid.clone());
        }
    }
    placed
}
