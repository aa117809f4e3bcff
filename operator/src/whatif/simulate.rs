//! Decides again and again, each time as if the last decision had been written, until there is nothing left to write.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kerf_crds::{GpuNode, GpuNodeSpec, PartitionPolicyStatus};
use kube::ResourceExt;

use crate::cache::{PodInfo, Stored, World};
use crate::controller::clients::Rounds;
use crate::controller::matching::{Matches, matches};
use crate::controller::{classes, status};
use crate::scheduler::cycle::decide;
use crate::scheduler::memory::{Memory, STRANDED};
use crate::scheduler::placements::{self, Key, Seen};
use crate::scheduler::rooms::Eviction;
use crate::scheduler::selectors::Selectors;
use crate::scheduler::tell::Sentence;

/// Decisions after which it is not looked any further. A room takes two, everything else one.
const MOST: usize = 16;

/// What would happen.
#[derive(Debug, Default)]
pub struct Outcome {
    pub matches: Matches,
    /// What nodes are told at present.
    pub before: BTreeMap<String, GpuNodeSpec>,
    /// What pods would be told, by UID.
    pub sentences: BTreeMap<String, Sentence>,
    /// Places of pods that are not bound yet, by UID.
    pub places: BTreeMap<String, Vec<(Key, Seen)>>,
    /// Pods that would be moved.
    pub evictions: Vec<Eviction>,
    /// Pods that are bound where they can never run, and would be evicted.
    pub stranded: Vec<String>,
    /// Status of policies, as far as it would change.
    pub policies: BTreeMap<String, PartitionPolicyStatus>,
}

/// Lets the operator decide. The nodes' specs in `world` are afterwards what it would have told them.
pub fn run(world: &mut World) -> Outcome {
    let (memory, selectors) = (Memory::default(), Selectors::default());
    let (mut now, mut wall) = (Instant::now(), Timestamp::now().as_second());
    add_classes(world);
    let mut outcome = Outcome {
        matches: matches(world),
        before: world.gpu_nodes.iter().map(|node| (node.name_any(), node.spec.clone())).collect(),
        ..Outcome::default()
    };
    let moves = world.policies.iter().map(|policy| u64::from(policy.spec.reshape.moves.after_seconds));
    let wait = moves.max().unwrap_or(0).max(STRANDED.as_secs()) + 1;
    let mut waited = false;
    for _ in 0..MOST {
        let mut decision = decide(world, &memory, &selectors, now, wall);
        let changes = std::mem::take(&mut decision.specs);
        for change in &changes {
            let mut node = GpuNode::clone(&change.node);
            node.spec = change.spec.clone();
            node.metadata.resource_version = Some((node.version() + 1).to_string());
            world.gpu_nodes.watch_applied(node);
        }
        for eviction in std::mem::take(&mut decision.evictions) {
            if !outcome.evictions.iter().any(|known| known.pod.uid == eviction.pod.uid) {
                outcome.evictions.push(eviction);
            }
        }
        outcome.stranded = decision.stranded.iter().map(|pod| pod.id()).collect();
        let said = std::mem::take(&mut decision.sentences);
        outcome.sentences = said.into_iter().map(|(pod, sentence)| (pod.uid.clone(), sentence)).collect();
        let told =
            status::all(world, &decision.matches, &decision.problems, &Rounds::default(), &memory, now);
        outcome.policies = told.into_iter().map(|(policy, status)| (policy.name_any(), status)).collect();
        // Quotas are not looked at: they let everybody through.
        let mut news = !changes.is_empty();
        for pod in &decision.quota {
            news |= !memory.was_let_through(&pod.uid, now);
            memory.let_through(&pod.uid, now);
        }
        if news {
            continue;
        }
        if std::mem::replace(&mut waited, true) {
            break;
        }
        now += Duration::from_secs(wait);
        wall += wait as i64;
    }
    for key in placements::all(world) {
        let seen = placements::look(world, &memory, &key);
        let waits = seen.pod.as_ref().is_some_and(|pod| pod.node.is_none() && !pod.done && !pod.deleting);
        if waits && !seen.devices.is_empty() && !seen.observed.withdraw {
            outcome.places.entry(key.pod_uid.clone()).or_default().push((key, seen));
        }
    }
    outcome
}

/// Makes the DeviceClasses that the operator would make.
pub fn add_classes(world: &mut World) {
    for mut class in classes::missing(world) {
        let old = world.classes.get(&class.name_any());
        class.metadata.resource_version = Some((old.map_or(0, |old| old.version()) + 1).to_string());
        world.classes.watch_applied(class);
    }
}

/// Pods that are not bound yet.
pub fn waiting(world: &World) -> impl Iterator<Item = &Arc<PodInfo>> {
    let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
    pods.filter(|pod| pod.node.is_none() && !pod.done && !pod.deleting)
}
