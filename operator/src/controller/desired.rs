//! What a node is told: the one content of `GpuNode.spec`, from policies and placements.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kerf_crds::gpu_node::{
    DesiredGpu, DesiredMig, Gpu, GpuNodeStatus, Owner, Partition, Placement, PolicyInstance, PolicyOwner,
    WantedInstance,
};
use kerf_crds::partition_policy::{MigMode, ModeSwitch};
use kerf_crds::profile::same;
use kerf_crds::{GpuNode, GpuNodeSpec, PartitionPolicy};
use kerf_planner::layout::pack_layout;
use kube::ResourceExt;

use super::matching::Match;
use crate::scheduler::snapshot::{convert, follows, may_switch};

/// No GPU has more instances: what says more is as impossible as one more.
const MOST: u32 = 64;

/// Why a stated layout cannot be had on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutProblem {
    /// Not even on an empty GPU.
    Impossible(String),
    /// Not around what is on it now.
    Blocked(String),
}

/// The static instances of one GPU, around the claims' entries, and what stands in the way of the rest.
pub fn static_layout(
    status: &GpuNodeStatus,
    gpu: &Gpu,
    policy: &PartitionPolicy,
    current: &[&Partition],
    claims: &[&Partition],
) -> (Vec<Partition>, Option<LayoutProblem>) {
    let Some(reported) = status.geometry_of(gpu) else { return (Vec::new(), None) };
    let geometry = convert(reported);
    let profile = |name: &str| geometry.profiles.iter().position(|profile| same(&profile.name, name));
    // The layout, one by one.
    let mut wanted: Vec<(usize, Option<u32>)> = Vec::new();
    for entry in &policy.spec.mig.layout {
        // An unknown profile is the policy's `ProfileNotFound`; the rest of the layout is made.
        let Some(profile) = profile(&entry.profile) else { continue };
        wanted.extend((0..entry.count.min(MOST + 1)).map(|_| (profile, entry.start)));
    }
    let counted: Vec<(usize, u32, Option<u32>)> = wanted.iter().map(|(p, start)| (*p, 1, *start)).collect();
    if pack_layout(&geometry, &counted).is_none() {
        let names: Vec<String> =
            policy.spec.mig.layout.iter().map(|e| format!("{}x {}", e.count, e.profile)).collect();
        return (
            Vec::new(),
            Some(LayoutProblem::Impossible(format!(
                "{} do not fit on one {}",
                names.join(", "),
                gpu.product
            ))),
        );
    }
    // What stays: claims wherever they are, foreign instances and those in use, then static entries that are there.
    let mut obstacles: Vec<(usize, u32)> = Vec::new();
    let mut found: Vec<(usize, u32)> = Vec::new();
    let mut used: Vec<(usize, u32)> = Vec::new();
    let mut idle: Vec<(usize, u32)> = Vec::new();
    // What the layout says of those that are idle.
    let mut said: Vec<(usize, Option<u32>)> = Vec::new();
    let mut meets = |(profile, start): (usize, u32)| {
        let exact = wanted.iter().position(|(p, s)| *p == profile && *s == Some(start));
        let any = exact.or_else(|| wanted.iter().position(|(p, s)| *p == profile && s.is_none()));
        any.map(|index| wanted.remove(index))
    };
    let placed = |partition: &Partition| {
        let instance = partition.instance.as_ref()?;
        Some((profile(&instance.profile)?, instance.placement.start))
    };
    // An instance that carries shares has an entry for each of them.
    let claimed: BTreeSet<(usize, u32)> = claims.iter().filter_map(|partition| placed(partition)).collect();
    for place in claimed {
        let kind = if meets(place).is_some() { &mut found } else { &mut obstacles };
        kind.push(place);
    }
    for instance in &gpu.instances {
        let Some(profile) = profile(&instance.profile) else { continue };
        let place = (profile, instance.placement.start);
        let taken = found.contains(&place) || obstacles.contains(&place);
        if (instance.foreign || instance.in_use()) && !taken {
            // Left over from a claim that is over: counts as the layout's if it fits, since it will be that.
            let kind = if !instance.foreign && meets(place).is_some() { &mut used } else { &mut obstacles };
            kind.push(place);
        }
    }
    let overlaps = |(profile, start): (usize, u32), others: &[(usize, u32)]| {
        let place =
            |(profile, start): (usize, u32)| Placement { start, size: geometry.profiles[profile].size };
        others.iter().any(|other| place(*other).overlaps(&place((profile, start))))
    };
    let statics = current.iter().filter(
        |partition| matches!(&partition.owner, Owner::Policy(owner) if owner.kind == PolicyInstance::Static),
    );
    let existing = statics.filter_map(|partition| placed(partition)).chain(
        // Idle instances of a right kind are kept rather than made anew elsewhere.
        gpu.instances
            .iter()
            .filter(|instance| !instance.foreign && !instance.in_use())
            .filter_map(|instance| Some((profile(&instance.profile)?, instance.placement.start))),
    );
    for place in existing.collect::<Vec<_>>() {
        let free = ![&found, &used, &idle, &obstacles].into_iter().any(|taken| overlaps(place, taken));
        if let Some(entry) = free.then(|| meets(place)).flatten() {
            idle.push(place);
            said.push(entry);
        }
    }
    let pack = |kept: &[(usize, u32)], rest: &[(usize, Option<u32>)]| {
        let stay = [&found, &used, kept, &obstacles].into_iter().flatten();
        let stay: Vec<_> = stay.map(|(p, start)| (*p, 1, Some(*start))).collect();
        let skipped = stay.len();
        let pieces: Vec<(usize, u32, Option<u32>)> =
            stay.into_iter().chain(rest.iter().map(|(p, start)| (*p, 1, *start))).collect();
        pack_layout(&geometry, &pieces).map(|places| places[skipped..].to_vec())
    };
    let (places, problem) = match pack(&idle, &wanted) {
        Some(rest) => ([used, idle, rest].concat(), None),
        None => {
            // What is idle gives way to the layout as a whole.
            let all: Vec<(usize, Option<u32>)> = said.into_iter().chain(wanted.iter().copied()).collect();
            match pack(&[], &all) {
                Some(rest) => ([used, rest].concat(), None),
                None => (
                    [used, idle].concat(),
                    Some(LayoutProblem::Blocked(format!(
                        "{} instances of the layout have no room on {} beside what is in use there",
                        wanted.len(),
                        gpu.uuid
                    ))),
                ),
            }
        }
    };
    let entries = places
        .into_iter()
        .map(|(profile, start)| Partition {
            gpu: gpu.uuid.clone(),
            instance: Some(WantedInstance {
                profile: geometry.profiles[profile].name.clone(),
                placement: Placement { start, size: geometry.profiles[profile].size },
            }),
            share: None,
            owner: Owner::Policy(PolicyOwner { name: policy.name_any(), kind: PolicyInstance::Static }),
        })
        .collect();
    (entries, problem)
}

/// Per policy: why its layout is not complete.
pub type Problems = BTreeMap<String, Vec<(String, LayoutProblem)>>;

/// The node's spec. `claims` are all entries of claims and reservations that are to be there, `warm` the warm instances.
pub fn spec(
    node: &GpuNode,
    matches: &BTreeMap<String, Match>,
    claims: Vec<Partition>,
    warm: Vec<Partition>,
    problems: &mut Problems,
) -> GpuNodeSpec {
    let Some(status) = &node.status else {
        // Nothing is known of the hardware yet: what was said before stays, claims aside.
        let policy = node.spec.partitions.iter().filter(|p| matches!(p.owner, Owner::Policy(_))).cloned();
        let partitions = claims.into_iter().chain(policy).collect();
        return GpuNodeSpec { gpus: node.spec.gpus.clone(), partitions };
    };
    let mut partitions = claims;
    let mut gpus = Vec::new();
    for gpu in &status.gpus {
        let Some(policy) = matches.get(&gpu.uuid).and_then(Match::policy) else { continue };
        if policy.spec.mig.mode == MigMode::Static {
            let current: Vec<&Partition> =
                node.spec.partitions.iter().filter(|p| p.gpu == gpu.uuid).collect();
            let claims: Vec<&Partition> = partitions.iter().filter(|p| p.gpu == gpu.uuid).collect();
            if !claims.iter().any(|partition| partition.instance.is_none()) {
                let (entries, problem) = static_layout(status, gpu, policy, &current, &claims);
                if let Some(problem) = problem {
                    problems.entry(policy.name_any()).or_default().push((node.name_any(), problem));
                }
                partitions.extend(entries);
            }
        }
    }
    for entry in warm {
        let in_the_way = partitions.iter().any(|other| other.gpu == entry.gpu && collide(other, &entry));
        if !in_the_way {
            partitions.push(entry);
        }
    }
    for gpu in &status.gpus {
        let Some(policy) = matches.get(&gpu.uuid).and_then(Match::policy) else { continue };
        gpus.push(desired_gpu(gpu, policy, &partitions));
    }
    // A GPU that has dropped out of the report is spoken of as before while it may come back to somebody: a claim is on
    // it, or the daemon does not see the hardware. Otherwise it is forgotten; should it come back, the policy tells anew.
    for known in &node.spec.gpus {
        let reported = status.gpus.iter().any(|gpu| gpu.uuid == known.uuid);
        let held = partitions.iter().any(|partition| partition.gpu == known.uuid);
        if !reported && (held || !follows(status)) {
            gpus.push(known.clone());
            let policy = node.spec.partitions.iter().filter(|partition| {
                partition.gpu == known.uuid && matches!(partition.owner, Owner::Policy(_))
            });
            partitions.extend(policy.cloned());
        }
    }
    let order = |partition: &Partition| {
        let gpu = status.gpus.iter().position(|gpu| gpu.uuid == partition.gpu);
        (
            gpu.unwrap_or(usize::MAX),
            partition.gpu.clone(),
            partition.instance.as_ref().map(|instance| instance.placement.start),
            partition.share.as_ref().map(|share| share.id.clone()),
        )
    };
    partitions.sort_by_cached_key(order);
    GpuNodeSpec { gpus, partitions }
}

/// Whether two entries for one GPU exclude each other.
pub fn collide(a: &Partition, b: &Partition) -> bool {
    let both_shares = a.share.is_some() && b.share.is_some();
    match (&a.instance, &b.instance) {
        (None, None) => !both_shares,
        (Some(one), Some(other)) => {
            one.placement.overlaps(&other.placement) && !(both_shares && one == other)
        }
        _ => true,
    }
}

fn desired_gpu(gpu: &Gpu, policy: &Arc<PartitionPolicy>, partitions: &[Partition]) -> DesiredGpu {
    let on_it = || partitions.iter().filter(|partition| partition.gpu == gpu.uuid);
    let cut = on_it().any(|partition| partition.instance.is_some());
    let whole = on_it().any(|partition| partition.instance.is_none());
    let wanted = match policy.spec.mig.mode {
        _ if cut => DesiredMig::Enabled,
        _ if whole => DesiredMig::Disabled,
        MigMode::Static => DesiredMig::Enabled,
        MigMode::Off => DesiredMig::Disabled,
        // Ampere tells what it can be cut into only while MIG is on; without that no pod can be planned onto it.
        MigMode::Dynamic if gpu.mig.capable && gpu.geometry.is_none() => DesiredMig::Enabled,
        MigMode::Dynamic => DesiredMig::Keep,
    };
    DesiredGpu {
        uuid: gpu.uuid.clone(),
        policy: policy.name_any(),
        mig: if may_switch(gpu, policy) { wanted } else { DesiredMig::Keep },
        allow_reset: policy.spec.mig.mode_switch == ModeSwitch::WithReset,
        unhealthy_effect: policy.spec.health.taint_effect,
        max_concurrent_gpus: policy.spec.reshape.max_concurrent_gpus_per_node,
    }
}

#[cfg(test)]
#[path = "desired_tests.rs"]
mod tests;
