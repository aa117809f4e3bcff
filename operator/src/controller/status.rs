//! What policies say of themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::conditions::{policy as kind, policy_reason as reason};
use kerf_crds::gpu_node::{DesiredMig, Gpu, GpuNodeStatus, Owner};
use kerf_crds::partition_policy::{MigMode, ProfileCount};
use kerf_crds::profile::same;
use kerf_crds::{GpuNode, PartitionPolicy, PartitionPolicyStatus};
use kube::ResourceExt;

use super::clients::Rounds;
use super::desired::{LayoutProblem, Problems};
use super::matching::{Match, Matches};
use crate::cache::World;
use crate::scheduler::memory::Memory;

/// The status of every policy that must be written: at once where a condition or the generation is another, and counts
/// at [`Memory`]'s pace.
pub fn all(
    world: &World,
    matches: &Matches,
    problems: &Problems,
    rounds: &Rounds,
    memory: &Memory,
    now: Instant,
) -> Vec<(Arc<PartitionPolicy>, PartitionPolicyStatus)> {
    let mut matched: BTreeMap<String, Vec<Matched<'_>>> = BTreeMap::new();
    for node in world.gpu_nodes.iter() {
        let (Some(status), Some(here)) = (&node.status, matches.get(&node.name_any())) else { continue };
        for gpu in &status.gpus {
            let Some(found) = here.get(&gpu.uuid) else { continue };
            for policy in found.all() {
                matched.entry(policy.name_any()).or_default().push(Matched { node, status, gpu, found });
            }
        }
    }
    world
        .policies
        .iter()
        .filter_map(|policy| {
            let name = policy.name_any();
            let gpus = matched.remove(&name).unwrap_or_default();
            let status = of(policy, &gpus, problems.get(&name).map_or(&[], Vec::as_slice), rounds);
            let due = match &policy.status {
                Some(old) if *old == status => false,
                Some(old) if old.conditions == status.conditions => memory.may_write_counts(&name, now),
                _ => true,
            };
            due.then(|| (Arc::clone(policy), status))
        })
        .collect()
}

/// A GPU that a policy matches.
struct Matched<'a> {
    node: &'a Arc<GpuNode>,
    status: &'a GpuNodeStatus,
    gpu: &'a Gpu,
    found: &'a Match,
}

fn of(
    policy: &PartitionPolicy,
    gpus: &[Matched<'_>],
    problems: &[(String, LayoutProblem)],
    rounds: &Rounds,
) -> PartitionPolicyStatus {
    let generation = policy.metadata.generation;
    let nodes: BTreeSet<String> = gpus.iter().map(|gpu| gpu.node.name_any()).collect();
    let mut counts: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let (mut whole, mut shares) = (0, 0);
    for matched in gpus {
        for instance in &matched.gpu.instances {
            let count = counts.entry(&instance.profile).or_default();
            count.0 += 1;
            let owned = matched.node.spec.partitions.iter().any(|partition| {
                partition.gpu == matched.gpu.uuid
                    && matches!(partition.owner, Owner::Claim(_))
                    && partition.instance.as_ref().is_some_and(|wanted| {
                        wanted.placement == instance.placement && same(&wanted.profile, &instance.profile)
                    })
            });
            count.1 += u32::from(owned || instance.in_use());
        }
        let on_it = || matched.node.spec.partitions.iter().filter(|one| one.gpu == matched.gpu.uuid);
        whole += u32::from(on_it().any(|one| one.instance.is_none() && one.share.is_none()));
        shares += on_it().filter(|one| one.share.is_some()).count();
    }
    let mut summary: Vec<String> =
        counts.iter().map(|(profile, (total, _))| format!("{total}x {profile}")).collect();
    if whole > 0 {
        summary.push(format!("{whole} whole"));
    }
    if shares > 0 {
        summary.push(format!("{shares} shares"));
    }
    let old: &[Condition] = policy.status.as_ref().map_or(&[], |status| &status.conditions);
    let rivals: BTreeSet<String> = gpus
        .iter()
        .filter_map(|gpu| match gpu.found {
            Match::Conflict(policies) => Some(policies),
            Match::Nobody | Match::One(_) => None,
        })
        .flatten()
        .map(|rival| rival.name_any())
        .filter(|name| *name != policy.name_any())
        .collect();
    let shared = gpus.iter().filter(|gpu| matches!(gpu.found, Match::Conflict(_))).count();
    let conflict = if rivals.is_empty() {
        condition(old, kind::CONFLICT, false, reason::NO_CONFLICT, String::new(), generation)
    } else {
        let message = format!(
            "{shared} GPUs are also matched by {}; they are left as they are",
            rivals.iter().cloned().collect::<Vec<_>>().join(", ")
        );
        condition(old, kind::CONFLICT, true, reason::SHARED_GPU, message, generation)
    };
    let (ready, why, message) = readiness(policy, gpus, problems, rounds, shared);
    PartitionPolicyStatus {
        observed_generation: generation,
        nodes: nodes.len() as u32,
        gpus: gpus.len() as u32,
        layout_summary: summary.join(", "),
        layout: counts
            .iter()
            .map(|(profile, (total, in_use))| ProfileCount {
                profile: (*profile).to_owned(),
                total: *total,
                in_use: *in_use,
            })
            .collect(),
        conditions: vec![condition(old, kind::READY, ready, why, message, generation), conflict],
    }
}

fn readiness(
    policy: &PartitionPolicy,
    gpus: &[Matched<'_>],
    problems: &[(String, LayoutProblem)],
    rounds: &Rounds,
    shared: usize,
) -> (bool, &'static str, String) {
    if gpus.is_empty() {
        return (
            false,
            reason::NO_GPU_MATCHED,
            "no GPU of a node that runs Kerf's node daemon matches".into(),
        );
    }
    if shared > 0 {
        return (false, reason::SHARED_GPU, format!("{shared} GPUs are matched by another policy too"));
    }
    if let Some(message) = unknown_profiles(policy, gpus) {
        return (false, reason::PROFILE_NOT_FOUND, message);
    }
    if let Some((node, problem)) = problems.first() {
        let (why, message) = match problem {
            LayoutProblem::Impossible(message) => (reason::LAYOUT_IMPOSSIBLE, message),
            LayoutProblem::Blocked(message) => (reason::BLOCKED, message),
        };
        return (false, why, format!("node {node}: {message}{}", and_more(problems.len())));
    }
    let unmanaged: Vec<&Matched<'_>> = gpus.iter().filter(|gpu| gpu.gpu.unmanaged.is_some()).collect();
    if let Some(first) = unmanaged.first() {
        let why = first.gpu.unmanaged.as_ref().map(|why| why.message.as_str()).unwrap_or_default();
        let message = format!(
            "node {}, GPU {}: {why}{}",
            first.node.name_any(),
            first.gpu.index,
            and_more(unmanaged.len())
        );
        return (false, reason::GPU_UNMANAGED, message);
    }
    let stuck: Vec<(&Matched<'_>, &str)> = gpus
        .iter()
        .filter_map(|gpu| {
            let problem = gpu.gpu.unhealthy.as_ref().or(gpu.gpu.problem.as_ref())?;
            Some((gpu, problem.message.as_str()))
        })
        .collect();
    if let Some((first, why)) = stuck.first() {
        let node = first.node.name_any();
        let remark =
            rounds.remark(policy, &node, first.gpu).map_or_else(String::new, |said| format!("; {said}"));
        let message = format!("node {node}, GPU {}: {why}{remark}{}", first.gpu.index, and_more(stuck.len()));
        return (false, reason::BLOCKED, message);
    }
    let behind: BTreeSet<String> =
        gpus.iter().filter(|gpu| !as_wanted(gpu)).map(|gpu| gpu.node.name_any()).collect();
    if !behind.is_empty() {
        let names: Vec<String> = behind.into_iter().take(5).collect();
        return (false, reason::RESHAPING, format!("GPUs are being reshaped on {}", names.join(", ")));
    }
    (true, reason::APPLIED, format!("{} GPUs are as the policy says", gpus.len()))
}

fn and_more(number: usize) -> String {
    if number > 1 { format!(" (and {} more)", number - 1) } else { String::new() }
}

/// Whether the GPU has what its node was told, claims' own instances aside (those are told to the pods).
fn as_wanted(matched: &Matched<'_>) -> bool {
    let told = matched.node.spec.gpus.iter().find(|told| told.uuid == matched.gpu.uuid);
    let mode = match told.map(|told| told.mig) {
        None => return false,
        Some(DesiredMig::Keep) => true,
        Some(DesiredMig::Enabled) => matched.gpu.mig.enabled,
        Some(DesiredMig::Disabled) => !matched.gpu.mig.enabled,
    };
    let entries =
        matched.node.spec.partitions.iter().filter(|partition| {
            partition.gpu == matched.gpu.uuid && matches!(partition.owner, Owner::Policy(_))
        });
    mode && entries.filter_map(|partition| partition.instance.as_ref()).all(|wanted| {
        matched.gpu.instances.iter().any(|instance| {
            instance.placement == wanted.placement
                && same(&instance.profile, &wanted.profile)
                && instance.uuid.is_some()
        })
    })
}

/// Patterns and names of the policy that no matched GPU has a profile for.
fn unknown_profiles(policy: &PartitionPolicy, gpus: &[Matched<'_>]) -> Option<String> {
    let mig = &policy.spec.mig;
    if mig.mode == MigMode::Off {
        return None;
    }
    let geometries: Vec<_> = gpus.iter().filter_map(|gpu| gpu.status.geometry_of(gpu.gpu)).collect();
    if geometries.is_empty() {
        // GPUs that cannot be cut, or whose profiles cannot be read before MIG mode is on.
        return None;
    }
    let profiles: BTreeSet<&str> = geometries
        .iter()
        .flat_map(|geometry| &geometry.profiles)
        .map(|profile| profile.name.as_str())
        .collect();
    let allowed = mig.allowed_profiles.iter().map(|pattern| ("mig.allowedProfiles", pattern));
    let carriers = policy.spec.shares.instances.iter().map(|pattern| ("shares.instances", pattern));
    let mut unknown: Vec<String> = allowed
        .chain(carriers)
        .filter(|(_, pattern)| !profiles.iter().any(|profile| pattern.matches_profile(profile)))
        .map(|(field, pattern)| format!("{field}: {:?}", pattern.0))
        .collect();
    let named = |field: &str, name: &str| {
        (!profiles.iter().any(|profile| same(profile, name))).then(|| format!("{field}: {name:?}"))
    };
    unknown.extend(mig.layout.iter().filter_map(|entry| named("mig.layout", &entry.profile)));
    unknown.extend(mig.warm.iter().filter_map(|warm| named("mig.warm", &warm.profile)));
    if unknown.is_empty() {
        return None;
    }
    let known: Vec<&str> = profiles.into_iter().collect();
    Some(format!(
        "{} matches no profile of the matched GPUs, which have {}",
        unknown.join(", "),
        known.join(", ")
    ))
}

fn condition(
    old: &[Condition],
    type_: &str,
    status: bool,
    reason: &str,
    message: String,
    generation: Option<i64>,
) -> Condition {
    let status = if status { "True" } else { "False" };
    let before = old.iter().find(|condition| condition.type_ == type_ && condition.status == status);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: before
            .map_or_else(|| Time(now_in_seconds()), |before| before.last_transition_time.clone()),
    }
}

/// Kubernetes keeps whole seconds.
fn now_in_seconds() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_else(|_| Timestamp::now())
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
