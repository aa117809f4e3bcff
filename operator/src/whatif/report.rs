//! What would happen, in words.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use kerf_crds::PartitionPolicy;
use kerf_crds::gpu_node::{DesiredMig, Gpu, Owner, Partition, PolicyInstance};
use kerf_crds::profile::same;
use kube::ResourceExt;

use super::simulate::{Outcome, waiting};
use crate::cache::{PodInfo, World};
use crate::controller::matching::Match;
use crate::scheduler::tell::{self, share_text};
use crate::webhook::validate;

/// Says what the webhook says of a policy. Answers whether it refuses it.
pub fn verdict(policy: &PartitionPolicy, world: &World, text: &mut String) -> bool {
    let nodes: Vec<_> = world.gpu_nodes.iter().cloned().collect();
    let verdict = validate(&policy.spec, &nodes);
    let name = policy.name_any();
    for denial in &verdict.denials {
        let _ = writeln!(text, "PartitionPolicy {name} is refused: {denial}");
    }
    for warning in &verdict.warnings {
        let _ = writeln!(text, "Warning: PartitionPolicy {name}: {warning}");
    }
    !verdict.denials.is_empty()
}

/// Says what would become of policies, GPUs and pods.
pub fn outcome(world: &World, outcome: &Outcome, tried: &[String], text: &mut String) {
    let _ = policies(world, outcome, tried, text);
    let _ = gpus(world, outcome, text);
    let _ = pods(world, outcome, text);
}

fn policies(world: &World, outcome: &Outcome, tried: &[String], text: &mut String) -> std::fmt::Result {
    writeln!(text, "Policies")?;
    for policy in world.policies.iter() {
        let name = policy.name_any();
        let mark = if tried.contains(&name) { " (tried)" } else { "" };
        let Some(status) = outcome.policies.get(&name).or(policy.status.as_ref()) else { continue };
        writeln!(text, "  {name}{mark}: {} GPUs on {} nodes", status.gpus, status.nodes)?;
        for condition in &status.conditions {
            // What is as it should be needs no words.
            if (condition.type_ == "Conflict") == (condition.status == "True") {
                writeln!(text, "    {}: {}", condition.reason, condition.message)?;
            }
        }
    }
    Ok(())
}

fn gpus(world: &World, outcome: &Outcome, text: &mut String) -> std::fmt::Result {
    writeln!(text, "GPUs")?;
    let mut same_as_now = 0;
    for node in world.gpu_nodes.iter() {
        let name = node.name_any();
        let Some(status) = &node.status else { continue };
        let before = outcome.before.get(&name);
        for gpu in &status.gpus {
            let of = |partitions: &[Partition]| -> Vec<Partition> {
                partitions.iter().filter(|partition| partition.gpu == gpu.uuid).cloned().collect()
            };
            let told = before.map(|spec| of(&spec.partitions)).unwrap_or_default();
            let wanted = of(&node.spec.partitions);
            let mut lines = Vec::new();
            let policy = |gpus: &[kerf_crds::gpu_node::DesiredGpu]| {
                gpus.iter().find(|one| one.uuid == gpu.uuid).map(|one| one.policy.clone())
            };
            let (was, is) = (before.and_then(|spec| policy(&spec.gpus)), policy(&node.spec.gpus));
            if was != is {
                let of = |name: &Option<String>| name.clone().unwrap_or_else(|| "no policy".into());
                let matched = outcome.matches.get(&name).and_then(|all| all.get(&gpu.uuid));
                let conflict =
                    if matches!(matched, Some(Match::Conflict(_))) { ", as several match it" } else { "" };
                lines.push(format!("managed by {}{conflict}; now by {}", of(&is), of(&was)));
            }
            let mode = node.spec.gpus.iter().find(|one| one.uuid == gpu.uuid).map(|one| one.mig);
            match (mode, gpu.mig.enabled) {
                (Some(DesiredMig::Enabled), false) => lines.push("MIG mode is switched on".into()),
                (Some(DesiredMig::Disabled), true) => lines.push("MIG mode is switched off".into()),
                _ => {}
            }
            lines.extend(wanted.iter().filter(|one| !told.contains(one)).map(|one| change(gpu, one)));
            lines
                .extend(told.iter().filter(|one| !wanted.contains(one)).filter_map(|one| ends(one, &wanted)));
            lines.extend(in_the_way(gpu, &wanted, mode));
            if lines.is_empty() {
                same_as_now += 1;
                continue;
            }
            writeln!(text, "  node {name}, GPU {} ({}, {})", gpu.index, gpu.product, gpu.uuid)?;
            for line in lines {
                writeln!(text, "    {line}")?;
            }
        }
    }
    writeln!(text, "  {same_as_now} GPUs stay as they are")
}

/// `2g.20gb at slice 4`.
fn what(partition: &Partition) -> String {
    let share = partition.share.as_ref().map(|share| share_text(share.memory_bytes, share.compute_milli));
    match (&partition.instance, share) {
        (Some(wanted), None) => format!("{} at slice {}", wanted.profile, wanted.placement.start),
        (Some(wanted), Some(share)) => {
            format!("{share} of the {} at slice {}", wanted.profile, wanted.placement.start)
        }
        (None, Some(share)) => share,
        (None, None) => "the whole GPU".into(),
    }
}

fn whose(owner: &Owner) -> String {
    match owner {
        Owner::Claim(owner) => format!("for pod {}/{}", owner.namespace, owner.pod),
        Owner::Policy(owner) if owner.kind == PolicyInstance::Warm => format!("kept warm by {}", owner.name),
        Owner::Policy(owner) => format!("in the layout of {}", owner.name),
        Owner::Reservation(said) if said.controller.is_some() => {
            format!("kept for what comes in place of pod {}", said.pod.id())
        }
        Owner::Reservation(said) => format!("kept for pod {}", said.pod.id()),
    }
}

fn change(gpu: &Gpu, partition: &Partition) -> String {
    let of_share =
        partition.share.as_ref().is_none_or(|wanted| gpu.shares.iter().any(|one| one.id == wanted.id));
    let exists = of_share
        && partition.instance.as_ref().is_none_or(|wanted| {
            gpu.instances.iter().any(|one| {
                one.placement == wanted.placement && same(&one.profile, &wanted.profile) && one.uuid.is_some()
            })
        });
    let (mark, made) = if exists { ('=', "is there") } else { ('+', "is made") };
    format!("{mark} {} {made}, {}", what(partition), whose(&partition.owner))
}

/// An entry that is no more, unless its slices are somebody else's: that one's line says so.
fn ends(partition: &Partition, wanted: &[Partition]) -> Option<String> {
    let id = |one: &Partition| one.share.as_ref().map(|share| share.id.clone());
    let same_place = |other: &&Partition| other.instance == partition.instance && id(other) == id(partition);
    wanted
        .iter()
        .find(same_place)
        .is_none()
        .then(|| format!("  {} is no longer {}", what(partition), whose(&partition.owner)))
}

/// Instances that make way.
fn in_the_way(gpu: &Gpu, wanted: &[Partition], mode: Option<DesiredMig>) -> Vec<String> {
    let goes = |one: &&kerf_crds::gpu_node::Instance| {
        let off = mode == Some(DesiredMig::Disabled);
        let overlapped = wanted.iter().filter_map(|partition| partition.instance.as_ref()).any(|wanted| {
            let it = wanted.placement == one.placement && same(&wanted.profile, &one.profile);
            !it && wanted.placement.overlaps(&one.placement)
        });
        off || overlapped
    };
    let line = |one: &kerf_crds::gpu_node::Instance| {
        let what = format!("{} at slice {}", one.profile, one.placement.start);
        if one.foreign || one.in_use() {
            format!("! {what} is in the way, and in use: it is waited for")
        } else {
            format!("- {what} is idle and in the way: it is destroyed")
        }
    };
    gpu.instances.iter().filter(goes).map(line).collect()
}

fn pods(world: &World, outcome: &Outcome, text: &mut String) -> std::fmt::Result {
    let (mut placed, mut without) = (Vec::new(), Vec::new());
    for pod in waiting(world) {
        if let Some(places) = outcome.places.get(&pod.uid) {
            let node = places.first().map(|(key, _)| key.node.as_str()).unwrap_or_default();
            let devices: Vec<String> = places.iter().map(|(_, seen)| tell::list(seen)).collect();
            let had = outcome
                .before
                .values()
                .flat_map(|spec| &spec.partitions)
                .any(|one| matches!(&one.owner, Owner::Claim(owner) if owner.pod_uid == pod.uid));
            let verb = if had { "has" } else { "gets" };
            placed.push(format!("  {} {verb} {} on node {node}", pod.id(), devices.join(", ")));
        } else if let Some(sentence) = outcome.sentences.get(&pod.uid).filter(|sentence| !sentence.planned) {
            without.push((pod, sentence));
        }
    }
    writeln!(text, "Pods that wait: {} get a place, {} do not", placed.len(), without.len())?;
    placed.iter().try_for_each(|line| writeln!(text, "{line}"))?;
    for (reason, message, names) in together(&without) {
        writeln!(text, "  {names} ({reason}): {message}")?;
    }
    for eviction in &outcome.evictions {
        let (pod, room_for) = (eviction.pod.id(), eviction.room_for.id());
        writeln!(text, "  {pod} is moved to node {} to make room for {room_for}", eviction.to)?;
    }
    let stranded: BTreeSet<&String> = outcome.stranded.iter().collect();
    stranded
        .iter()
        .try_for_each(|pod| writeln!(text, "  {pod} is evicted: it can never run where it is bound"))
}

/// Pods that are told the same are named together.
fn together<'a>(
    all: &[(&'a std::sync::Arc<PodInfo>, &'a tell::Sentence)],
) -> Vec<(&'a str, &'a str, String)> {
    let mut groups: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for (pod, sentence) in all {
        groups.entry((sentence.reason, &sentence.message)).or_default().push(pod.id());
    }
    groups.into_iter().map(|((reason, message), pods)| (reason, message, pods.join(", "))).collect()
}
