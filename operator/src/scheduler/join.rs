//! Every placement on record that has one before it is asked for its next step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kerf_planner::protocol::{self, Step, Waiting, next};

use super::decision::Decision;
use super::entries::Changes;
use super::gangs::{Gangs, Part};
use super::memory::Memory;
use super::placements::{self, Here};
use super::snapshot::Board;
use super::tell;
use super::trouble::{self, Trouble, Troubled};
use super::views::Views;
use crate::cache::World;

/// What looking at all placements has shown.
#[derive(Debug, Default)]
pub struct Joined {
    /// UIDs of pods that have a place and are not bound.
    pub placed: BTreeSet<String>,
    /// Places that would be left for better ones.
    pub troubled: Vec<Troubled>,
    pub gangs: Gangs,
}

/// Looks at all placements but those of nodes where all run; what is to be written goes into `decision` and `changes`.
pub fn join(
    world: &World,
    views: &Views,
    board: &Board,
    memory: &Memory,
    now: Instant,
    decision: &mut Decision,
    changes: &mut Changes,
) -> Joined {
    let mut joined = Joined::default();
    let (keys, looked_at) = views.to_look_at(world);
    memory.set_superseded(placements::superseded(world, &keys));
    let mut lost: BTreeSet<String> = BTreeSet::new();
    let mut parts: BTreeMap<String, Vec<Part>> = BTreeMap::new();
    let mut here = ("", Here::default());
    for key in &keys {
        if here.0 != key.node {
            here = (&key.node, Here::of(world, &key.node));
        }
        let mut seen = placements::look_at(world, here.1, memory, key);
        // Until all of its gang have been looked at.
        seen.observed.held_back = seen.pod.as_deref().is_some_and(placements::waits_for_gang);
        if matches!(seen.observed.claim, protocol::Claim::Allocated { .. }) {
            memory.forget_read(key);
            seen.observed.pod_read_live = false;
        }
        let waiting = matches!(seen.observed.pod, protocol::Pod::Gated | protocol::Pod::Unbound);
        if !seen.devices.is_empty() && waiting {
            joined.placed.insert(key.pod_uid.clone());
        }
        let mut trouble = None;
        if waiting && !seen.devices.is_empty() && !seen.observed.withdraw && !seen.observed.superseded {
            trouble = trouble::of(board, &seen, key);
            if trouble == Some(Trouble::Hopeless) {
                memory.withdraw(key, now);
                seen.observed.withdraw = true;
            }
        }
        let step = next(&seen.observed);
        if step == Step::EvictPod {
            lost.insert(key.pod_uid.clone());
        }
        match step {
            Step::Wait(_) => {}
            Step::RemoveEntry => changes.removed.entry(key.node.clone()).or_default().push(key.clone()),
            Step::RestoreEntry => {
                if let (Some(node), Some(claim)) = (&seen.node, &seen.claim)
                    && let Some(entries) = placements::restore(node, claim, key)
                {
                    changes.added.entry(key.node.clone()).or_default().extend(entries);
                }
            }
            _ if memory.may_try(&key.pod_uid, now) => {
                decision.drive.insert(key.clone());
            }
            _ => {}
        }
        let Some(pod) = &seen.pod else { continue };
        if waiting && !seen.observed.superseded {
            let sentence = tell::of_placement(&seen, step, memory.trouble(&pod.uid), trouble.as_ref());
            if pod.gang().is_some() {
                let part = Part::of(key, &seen, step, trouble.is_some(), sentence.as_ref());
                parts.entry(pod.uid.clone()).or_default().push(part);
            }
            let gpu = match trouble {
                None if step == Step::Wait(Waiting::Others) => continue,
                None | Some(Trouble::Hopeless) => {
                    decision.sentences.extend(sentence.map(|sentence| (Arc::clone(pod), sentence)));
                    continue;
                }
                Some(Trouble::Node(_)) => None,
                Some(Trouble::Gpu(gpu)) => Some(gpu),
            };
            joined.troubled.push(Troubled { key: key.clone(), pod: Arc::clone(pod), sentence, gpu });
        } else if tell::still_waits(&seen) {
            decision.sentences.push((Arc::clone(pod), tell::allocated(&seen)));
        }
    }
    // A pod's claims are on one node, all or none.
    let leaving: BTreeSet<&str> =
        keys.iter().filter(|key| memory.withdraws(key)).map(|key| key.pod_uid.as_str()).collect();
    // It is asked about once, and sooner for a node that cannot take it than for a GPU that fails.
    joined.troubled.retain(|troubled| !leaving.contains(troubled.key.pod_uid.as_str()));
    joined.troubled.sort_by(|a, b| (&a.pod.uid, a.gpu.is_some()).cmp(&(&b.pod.uid, b.gpu.is_some())));
    joined.troubled.dedup_by(|next, kept| next.pod.uid == kept.pod.uid);
    for key in keys.iter().filter(|key| joined.placed.contains(&key.pod_uid) && !memory.withdraws(key)) {
        if leaving.contains(key.pod_uid.as_str()) {
            memory.withdraw(key, now);
            decision.drive.insert(key.clone());
        }
    }
    joined.gangs = Gangs::of(world, parts);
    let together = joined.gangs.together(decision, |pod_uid| memory.may_try(pod_uid, now));
    memory.set_together(together);
    let bound = looked_at.iter().filter_map(|view| view.pods()).flat_map(|pods| pods.values());
    for pod in placements::stranded(world, bound.filter(|pod| pod.detail.is_some())) {
        lost.insert(pod.uid.clone());
        if memory.stranded(&pod.uid, now) {
            decision.stranded.push(pod);
        }
    }
    memory.only_stranded(&lost);
    joined
}
