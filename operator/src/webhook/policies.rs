//! Whether a PartitionPolicy can work: what the schema of the CustomResourceDefinition cannot say.
//!
//! Refused is what can never work on the GPUs that the policy names by product, as far as their geometry is known. What
//! depends on nodes that may still come is at most a warning here; the controller's conditions say it as things change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kerf_crds::{
    GpuNode, PartitionPolicySpec,
    gpu_node::{Geometry, Isolation},
    partition_policy::{LayoutEntry, MigMode, MigPolicy, SharesMode},
    profile,
};
use kerf_planner::layout::pack_layout;

use super::{denial::Denial, quantity::count, selector};
use crate::scheduler::snapshot::convert;

/// What there is to say of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub denials: Vec<Denial>,
    pub warnings: Vec<String>,
}

impl Verdict {
    /// All denials as one, or the warnings.
    ///
    /// # Errors
    /// There is a denial. The first one's field stands for all.
    pub fn into_result(self) -> Result<Vec<String>, Denial> {
        let mut denials = self.denials.into_iter();
        let Some(mut first) = denials.next() else { return Ok(self.warnings) };
        for denial in denials {
            first.message.push_str(&format!("; {denial}"));
        }
        Err(first)
    }
}

/// Checks a policy against itself and against the GPUs that are known.
pub fn validate(spec: &PartitionPolicySpec, nodes: &[Arc<GpuNode>]) -> Verdict {
    let mut verdict = Verdict::default();
    verdict.denials.extend(selector::check(&spec.node_selector, "spec.nodeSelector"));
    for (index, clients) in spec.reshape.restartable_clients.iter().enumerate() {
        let path = format!("spec.reshape.restartableClients[{index}].podSelector");
        verdict.denials.extend(selector::check(&clients.pod_selector, &path));
    }
    forbidden_profiles(&spec.mig, &mut verdict.denials);
    check_shares(spec, &mut verdict.denials);
    let models = Models::of(spec, nodes);
    models.check_profiles(&spec.mig, &mut verdict);
    models.check_layout(&spec.mig, &mut verdict);
    verdict
}

fn check_shares(spec: &PartitionPolicySpec, denials: &mut Vec<Denial>) {
    let (shares, field) = (&spec.shares, |name: &str| format!("spec.shares.{name}"));
    if shares.gpus == SharesMode::Allow && spec.mig.mode == MigMode::Static {
        denials.push(Denial::invalid(
            field("gpus"),
            "GPUs of a static layout are always cut, so they carry no shares; take mode Dynamic or Off, or Never here",
        ));
    }
    if !shares.instances.is_empty() && spec.mig.mode == MigMode::Off {
        denials.push(Denial::invalid(
            field("instances"),
            "with mig.mode Off there are no instances to carry shares; take mode Dynamic or Static, or leave this out",
        ));
    }
    if shares.isolation == Isolation::Hardware {
        denials.push(Denial::invalid(
            field("isolation"),
            "a share is never isolated by hardware; take Driver or Process, or MIG instances instead of shares",
        ));
    }
    let reserve = &shares.memory_reserve.0;
    if let Err(error) = count(reserve) {
        denials.push(Denial::invalid(
            field("memoryReserve"),
            format!("'{reserve}' is no number of bytes ({error:?}); write a quantity such as 1Gi"),
        ));
    }
}

/// Instances of profiles that the policy itself does not allow.
fn forbidden_profiles(mig: &MigPolicy, denials: &mut Vec<Denial>) {
    if mig.allowed_profiles.is_empty() {
        return;
    }
    for (field, profile) in wanted_profiles(mig) {
        if !mig.allowed_profiles.iter().any(|pattern| pattern.matches_profile(profile)) {
            let allowed: Vec<&str> = mig.allowed_profiles.iter().map(|pattern| pattern.0.as_str()).collect();
            denials.push(Denial::invalid(
                field,
                format!(
                    "'{profile}' is not among spec.mig.allowedProfiles ({}); add it there or take another profile",
                    allowed.join(", ")
                ),
            ));
        }
    }
}

/// Every profile that the policy wants instances of, with the field that says so.
fn wanted_profiles(mig: &MigPolicy) -> impl Iterator<Item = (String, &str)> {
    let layout = mig.layout.iter().enumerate();
    let layout =
        layout.map(|(index, entry)| (format!("spec.mig.layout[{index}].profile"), entry.profile.as_str()));
    let warm = mig.warm.iter().enumerate();
    layout
        .chain(warm.map(|(index, entry)| (format!("spec.mig.warm[{index}].profile"), entry.profile.as_str())))
}

/// The models that the policy is about, as far as they are known: geometry by product, each pair once.
struct Models<'a> {
    /// The policy names products, so that nothing else will ever match.
    named: bool,
    geometries: BTreeMap<(&'a str, &'a str), &'a Geometry>,
}

impl<'a> Models<'a> {
    fn of(spec: &PartitionPolicySpec, nodes: &'a [Arc<GpuNode>]) -> Self {
        let products = &spec.gpus.products;
        let mut geometries = BTreeMap::new();
        for status in nodes.iter().filter_map(|node| node.status.as_ref()) {
            for gpu in &status.gpus {
                let matches =
                    products.is_empty() || products.iter().any(|product| product.matches(&gpu.product));
                if let Some(geometry) = status.geometry_of(gpu).filter(|_| matches) {
                    geometries.insert((gpu.product.as_str(), geometry.name.as_str()), geometry);
                }
            }
        }
        Self { named: !products.is_empty(), geometries }
    }

    /// Something is wrong on some of the models: a denial where they are named and none is left, else a warning.
    fn report(&self, field: String, wrong_on: usize, message: String, verdict: &mut Verdict) {
        if self.named && wrong_on == self.geometries.len() {
            verdict.denials.push(Denial::invalid(field, message));
        } else if wrong_on > 0 {
            verdict.warnings.push(format!("{field}: {message}"));
        }
    }

    fn check_profiles(&self, mig: &MigPolicy, verdict: &mut Verdict) {
        if self.geometries.is_empty() {
            return;
        }
        for (field, wanted) in wanted_profiles(mig) {
            let without: Vec<_> =
                self.geometries.iter().filter(|(_, geometry)| geometry.profile(wanted).is_none()).collect();
            let products: BTreeSet<&str> = without.iter().map(|((product, _), _)| *product).collect();
            let exist: BTreeSet<&str> = without
                .iter()
                .flat_map(|(_, geometry)| &geometry.profiles)
                .map(|one| one.name.as_str())
                .collect();
            let message = format!(
                "{} has no profile '{wanted}'; its profiles are {}",
                join(products, " or "),
                join(exist, ", ")
            );
            self.report(field, without.len(), message, verdict);
        }
        for (index, pattern) in mig.allowed_profiles.iter().enumerate() {
            let mut profiles = self.geometries.values().flat_map(|geometry| &geometry.profiles);
            if !profiles.any(|one| pattern.matches_profile(&one.name)) {
                let exist = self.geometries.values().flat_map(|geometry| &geometry.profiles);
                let exist: BTreeSet<&str> = exist.map(|one| one.name.as_str()).collect();
                verdict.warnings.push(format!(
                    "spec.mig.allowedProfiles[{index}]: '{}' matches no profile of the GPUs known so far ({})",
                    pattern.0,
                    join(exist, ", ")
                ));
            }
        }
    }

    fn check_layout(&self, mig: &MigPolicy, verdict: &mut Verdict) {
        if mig.mode != MigMode::Static || self.geometries.is_empty() {
            return;
        }
        let mut wrong: Vec<String> = Vec::new();
        for ((product, _), geometry) in &self.geometries {
            // A profile that is not there has been said.
            if mig.layout.iter().any(|entry| geometry.profile(&entry.profile).is_none()) {
                continue;
            }
            if let Err(reason) =
                bad_start(geometry, &mig.layout).map_or_else(|| pack(geometry, &mig.layout), Err)
            {
                wrong.push(format!("impossible on {product}: {reason}"));
            }
        }
        self.report("spec.mig.layout".to_owned(), wrong.len(), wrong.join("; "), verdict);
    }
}

/// The first entry whose stated place is none of its profile's.
fn bad_start(geometry: &Geometry, layout: &[LayoutEntry]) -> Option<String> {
    layout.iter().enumerate().find_map(|(index, entry)| {
        let (start, one) = (entry.start?, geometry.profile(&entry.profile)?);
        let starts = one.starts.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        (!one.starts.contains(&start)).then(|| {
            format!("entry {index}: {} cannot start at memory slice {start}, only at {starts}", entry.profile)
        })
    })
}

/// Whether an empty GPU can have all instances at once.
fn pack(geometry: &Geometry, layout: &[LayoutEntry]) -> Result<(), String> {
    let model = convert(geometry);
    let index = |entry: &LayoutEntry| {
        geometry.profiles.iter().position(|one| profile::same(&one.name, &entry.profile))
    };
    let wanted: Vec<_> =
        layout.iter().filter_map(|entry| Some((index(entry)?, entry.count, entry.start))).collect();
    if pack_layout(&model, &wanted).is_some() {
        return Ok(());
    }
    let slices =
        |entry: &LayoutEntry| Some(geometry.profile(&entry.profile)?.size.saturating_mul(entry.count));
    let needed: u32 = layout.iter().filter_map(slices).fold(0, u32::saturating_add);
    if needed > geometry.memory_slices {
        return Err(format!("it needs {needed} memory slices, and the GPU has {}", geometry.memory_slices));
    }
    Err("its instances cannot be placed together: places, compute slices or engines run out; take fewer or smaller \
         profiles, or leave out 'start'"
        .to_owned())
}

fn join<'a>(items: impl IntoIterator<Item = &'a str>, separator: &str) -> String {
    items.into_iter().collect::<Vec<_>>().join(separator)
}

#[cfg(test)]
#[path = "policies_tests.rs"]
mod tests;
