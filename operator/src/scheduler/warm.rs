//! Warm instances: what policies want ready for nobody in particular.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kerf_crds::PartitionPolicy;
use kerf_crds::gpu_node::{Owner, Partition, Placement, PolicyInstance, PolicyOwner, WantedInstance};
use kerf_crds::partition_policy::MigMode;
use kerf_planner::layout::{WarmWish, warm};
use kerf_planner::plan::Plan;
use kube::ResourceExt;

use super::snapshot::Board;
use crate::controller::matching::{Match, Matches};

/// The warm instances of every policy, by node.
/// `all`: every policy.
pub fn entries<'p>(
    all: impl Iterator<Item = &'p Arc<PartitionPolicy>>,
    board: &Board,
    matches: &Matches,
    plan: &Plan,
) -> BTreeMap<String, Vec<Partition>> {
    let mut wishes = Vec::new();
    let mut owners = Vec::new();
    let mut policies = BTreeMap::new();
    let mut all = all;
    if all.all(|policy| policy.spec.mig.warm.is_empty()) {
        return BTreeMap::new();
    }
    for (node, gpu_node) in board.gpu_nodes.iter().enumerate() {
        let name = gpu_node.name_any();
        for (gpu, state) in board.snapshot.nodes[node].gpus.iter().enumerate() {
            let policy = matches.get(&name).and_then(|all| all.get(&state.uuid)).and_then(Match::policy);
            if let Some(policy) = policy
                && policy.spec.mig.mode == MigMode::Dynamic
                && !policy.spec.mig.warm.is_empty()
                && state.closed.is_none()
            {
                let (_, gpus): &mut (_, BTreeSet<(usize, usize)>) = policies
                    .entry(policy.name_any())
                    .or_insert_with(|| (Arc::clone(policy), BTreeSet::new()));
                gpus.insert((node, gpu));
            }
        }
    }
    for (name, (policy, gpus)) in policies {
        for warm in policy.spec.mig.warm.iter().filter(|warm| warm.count > 0) {
            let profiles: BTreeMap<usize, usize> = board
                .snapshot
                .geometries
                .iter()
                .enumerate()
                .filter_map(|(index, geometry)| {
                    let found = |p: &kerf_planner::snapshot::Profile| {
                        kerf_crds::profile::same(&p.name, &warm.profile)
                    };
                    Some((index, geometry.profiles.iter().position(found)?))
                })
                .collect();
            wishes.push(WarmWish { profiles, count: warm.count, gpus: gpus.clone() });
            owners.push(name.clone());
        }
    }
    let mut entries: BTreeMap<String, Vec<Partition>> = BTreeMap::new();
    if wishes.is_empty() {
        return entries;
    }
    for place in warm(&board.snapshot, plan, &wishes) {
        let gpu = &board.snapshot.nodes[place.node].gpus[place.gpu];
        let Some(geometry) = gpu.geometry else { continue };
        let profile = &board.snapshot.geometries[geometry].profiles[place.profile];
        entries.entry(board.gpu_nodes[place.node].name_any()).or_default().push(Partition {
            gpu: gpu.uuid.clone(),
            instance: Some(WantedInstance {
                profile: profile.name.clone(),
                placement: Placement { start: place.start, size: profile.size },
            }),
            share: None,
            owner: Owner::Policy(PolicyOwner {
                name: owners[place.wish].clone(),
                kind: PolicyInstance::Warm,
            }),
        });
    }
    entries
}
