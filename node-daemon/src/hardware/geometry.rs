//! What a GPU can be cut into, as its driver tells it. No number of any product is in here.

use std::collections::BTreeMap;

use kerf_crds::gpu_node::{Engines, Geometry, Profile};

use super::error::{Code, Failure};
use super::raw::{RawGpu, RawProfile};

/// Enumerators of GPU-instance profiles (`NVML_GPU_INSTANCE_PROFILE_COUNT` in nvml.h of CUDA 13). Newer drivers may
/// have more: the search goes on until the library says INVALID_ARGUMENT behind this.
const KNOWN_ENUMERATORS: u32 = 0x12;
/// An end to the search for a library that never says so.
const LAST_ENUMERATOR: u32 = 64;
/// Enumerators of compute-instance profiles (`NVML_COMPUTE_INSTANCE_PROFILE_COUNT` is 9); same rule.
const KNOWN_COMPUTE_ENUMERATORS: u32 = 9;

/// What is known of one GPU beyond a single observation.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Whether it has MIG: once seen, an answer of "not supported" is an error.
    pub mig_capable: bool,
    /// Its profiles; `None` until they could be read.
    pub geometry: Option<std::sync::Arc<Geometry>>,
    /// How often the driver had gone when it was found to limit memory by cgroup.
    pub limits_memory: Option<u64>,
    /// GPU-instance profile id → id of the compute-instance profile as wide as the instance.
    pub full_width: BTreeMap<u32, u32>,
}

/// Reads the whole geometry. `None`: the GPU has no profiles, or does not tell them while MIG is off.
///
/// The engine budget of the GPU is that of its largest profile (most compute slices, then most memory): an instance of
/// it is the whole GPU, so what it has is what there is to share out.
pub(super) fn discover(
    gpu: &RawGpu<'_>,
    product: &str,
    total_memory: u64,
) -> Result<Option<Geometry>, Failure> {
    let mut profiles = Vec::new();
    for enumerator in 0..LAST_ENUMERATOR {
        match gpu.profile(enumerator) {
            Ok(raw) => {
                let placements = match gpu.placements(raw.id) {
                    Ok(placements) => placements,
                    // Ampere with MIG off may tell its profiles but not their places.
                    Err(failure) if failure.code == Code::NOT_SUPPORTED => return Ok(None),
                    Err(failure) => return Err(failure),
                };
                profiles.extend(profile(enumerator, raw, &placements, total_memory));
            }
            Err(failure) => match failure.code {
                Code::INVALID_ARGUMENT if enumerator >= KNOWN_ENUMERATORS => break,
                // Not this GPU's, or not yet this driver's.
                Code::NOT_SUPPORTED | Code::INVALID_ARGUMENT | Code::NOT_FOUND => {}
                _ => return Err(failure),
            },
        }
    }
    Ok(assemble(product, profiles))
}

fn assemble(product: &str, mut profiles: Vec<Profile>) -> Option<Geometry> {
    // Two enumerators may stand for one profile.
    profiles.sort_by_key(|profile| profile.id);
    profiles.dedup_by_key(|profile| profile.id);
    let whole = profiles.iter().max_by_key(|profile| (profile.compute_slices, profile.memory_bytes))?;
    let (engines, multiprocessors) = (whole.engines, whole.multiprocessors);
    let end = |profile: &Profile| profile.starts.iter().map(|start| start + profile.size).max();
    let memory_slices = profiles.iter().filter_map(end).max()?;
    profiles.sort_by(|a, b| (a.compute_slices, a.size, &a.name).cmp(&(b.compute_slices, b.size, &b.name)));
    Some(Geometry { name: product.to_owned(), memory_slices, multiprocessors, engines, profiles })
}

fn profile(
    enumerator: u32,
    raw: RawProfile,
    placements: &[kerf_crds::gpu_node::Placement],
    total_memory: u64,
) -> Option<Profile> {
    let size = placements.first()?.size;
    let mut starts: Vec<u32> = placements.iter().map(|placement| placement.start).collect();
    starts.sort_unstable();
    let name = match raw.name.as_deref() {
        None | Some("") => derived_name(enumerator, &raw, total_memory),
        Some(name) => name.strip_prefix("MIG ").unwrap_or(name).to_owned(),
    };
    Some(Profile {
        name,
        id: raw.id,
        memory_bytes: raw.memory_mib << 20,
        multiprocessors: raw.multiprocessors,
        compute_slices: raw.slices,
        size,
        starts,
        max_instances: raw.instances,
        engines: Engines {
            copy: raw.copy,
            decoder: raw.decoder,
            encoder: raw.encoder,
            jpeg: raw.jpeg,
            ofa: raw.ofa,
        },
        graphics: raw.graphics.unwrap_or(is_graphics(enumerator)),
    })
}

/// `1_SLICE_GFX`, `2_SLICE_GFX`, `4_SLICE_GFX`, `3_SLICE_GFX`.
fn is_graphics(enumerator: u32) -> bool {
    matches!(enumerator, 0xA..=0xC | 0x11)
}

/// A profile's name for drivers that do not tell it (before R510 or so), by NVIDIA's own rule: slices, memory as the
/// part of the GPU's memory rounded up to eighths, and the kind of profile
/// (https://github.com/NVIDIA/go-nvlib/blob/main/pkg/nvlib/device/mig_profile.go).
fn derived_name(enumerator: u32, raw: &RawProfile, total_memory: u64) -> String {
    let total_gib = total_memory.div_ceil(1 << 30);
    let fraction = (raw.memory_mib << 20) as f64 / total_memory.max(1) as f64;
    let gib = ((fraction * 8.0).ceil() / 8.0 * total_gib as f64).round();
    let kind = match enumerator {
        // 1_SLICE_REV1, 2_SLICE_REV1
        7 | 8 => "+me",
        // 1_SLICE_NO_ME, 2_SLICE_NO_ME
        0xD | 0xE => "-me",
        // 1_SLICE_ALL_ME, 2_SLICE_ALL_ME
        0xF | 0x10 => "+me.all",
        gfx if is_graphics(gfx) => "+gfx",
        _ => "",
    };
    format!("{}g.{gib}gb{kind}", raw.slices)
}

/// The compute-instance profile as wide as the GPU instance: the one with most multiprocessors. Its enumerator differs
/// by GPU-instance profile (on the 1g with double memory it is `1_SLICE_REV1`), so all are asked.
pub(super) fn full_width(gpu: &RawGpu<'_>, instance: u32) -> Result<u32, Failure> {
    let (mut best, mut refused) = (None, None);
    for enumerator in 0..LAST_ENUMERATOR {
        match gpu.compute_profile(instance, enumerator) {
            Ok(found) => {
                let rank = (found.multiprocessors, found.slices, std::cmp::Reverse(found.instances));
                if best.is_none_or(|(best_rank, _)| rank > best_rank) {
                    best = Some((rank, found.id));
                }
            }
            Err(failure) => match failure.code {
                Code::INVALID_ARGUMENT if enumerator >= KNOWN_COMPUTE_ENUMERATORS => break,
                Code::NOT_SUPPORTED | Code::INVALID_ARGUMENT => refused = refused.or(Some(failure)),
                _ => return Err(failure),
            },
        }
    }
    match (best, refused) {
        (Some((_, id)), _) => Ok(id),
        // None of them is there: the first refusal says why, those behind the last enumerator do not.
        (None, Some(failure)) => Err(failure),
        (None, None) => unreachable!("an enumerator is found or refused"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(slices: u32, memory_mib: u64) -> RawProfile {
        RawProfile {
            id: 19,
            slices,
            instances: 7,
            multiprocessors: 14,
            copy: 1,
            decoder: 0,
            encoder: 0,
            jpeg: 0,
            ofa: 0,
            memory_mib,
            name: None,
            graphics: None,
        }
    }

    #[test]
    fn names_of_old_drivers_follow_nvidias_rule() {
        // Memory of A100-SXM4-80GB and A100-SXM4-40GB as nvidia-smi prints them: 81920 and 40960 MiB.
        for (enumerator, slices, mib, total_mib, name) in [
            (0, 1, 9728, 81920, "1g.10gb"),
            (7, 1, 9728, 81920, "1g.10gb+me"),
            (9, 1, 19968, 81920, "1g.20gb"),
            (2, 3, 40192, 81920, "3g.40gb"),
            (4, 7, 80640, 81920, "7g.80gb"),
            (0, 1, 4864, 40960, "1g.5gb"),
            (0xD, 1, 4864, 40960, "1g.5gb-me"),
            (0xF, 1, 4864, 40960, "1g.5gb+me.all"),
            (0xA, 1, 4864, 40960, "1g.5gb+gfx"),
        ] {
            assert_eq!(derived_name(enumerator, &raw(slices, mib), total_mib << 20), name);
        }
    }

    #[test]
    fn the_engine_budget_is_the_largest_profiles_and_units_end_where_placements_end() {
        let make = |id, compute_slices, size, starts: &[u32], decoder| Profile {
            name: format!("{compute_slices}g"),
            id,
            compute_slices,
            size,
            starts: starts.to_vec(),
            multiprocessors: compute_slices * 14,
            engines: Engines { decoder, ..Engines::default() },
            ..Profile::default()
        };
        let geometry =
            assemble("P", vec![make(0, 7, 8, &[0], 5), make(19, 1, 1, &[0, 6], 0), make(0, 7, 8, &[0], 5)])
                .unwrap();
        assert_eq!(geometry.engines.decoder, 5);
        assert_eq!((geometry.memory_slices, geometry.multiprocessors), (8, 98));
        assert_eq!(geometry.profiles.len(), 2, "one entry for each id");
        assert_eq!(assemble("P", vec![]), None);
    }
}
