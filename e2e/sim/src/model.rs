//! GPU models: what a board is, and how it can be cut. All of it is data: a file per model in `models/`, with
//! the source and the confidence of every row.
//!
//! A row whose `inferred` is true, or that names the wanted field under `inferred_fields`, is somebody's
//! reasoning by analogy, not a measurement: a test may run on it but must not assert its numbers as truth
//! about the product.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;

/// A GPU model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Model {
    /// File name without the ending, such as `a100-40`.
    pub id: String,
    /// Product name as `nvmlDeviceGetName` gives it.
    pub product: String,
    /// True when no such product exists.
    pub invented: bool,
    /// `nvmlBrandType_t`.
    pub brand: u32,
    pub architecture: Architecture,
    /// CUDA compute capability, major and minor.
    pub compute_capability: [i32; 2],
    /// Device and vendor as NVML prints them: `0x20B010DE`.
    pub pci_device_id: String,
    /// `total` of `nvmlDeviceGetMemoryInfo`, in MiB.
    pub memory_total_mib: u64,
    /// `reserved` of `nvmlDeviceGetMemoryInfo_v2`, in MiB; see [`Model::usable_mib`].
    #[serde(default)]
    pub memory_reserved_mib: Option<u64>,
    pub sm_total: u32,
    /// Absent for a GPU that cannot be cut.
    pub mig: Option<Mig>,
}

/// Architecture name and its `nvmlDeviceArchitecture_t`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Architecture {
    pub name: String,
    pub nvml: u32,
}

/// How a model can be cut.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mig {
    pub compute_slices: u32,
    /// Placement units.
    pub memory_slices: u32,
    /// The most MIG devices that can exist at once.
    pub max_devices: u32,
    /// Ampere: a change of mode resets the GPU. Later ones switch at once.
    pub mode_change_needs_reset: bool,
    /// Ampere keeps the mode in the InfoROM; later ones lose it with the kernel module.
    pub mode_persists: bool,
    pub ids: Ids,
    pub creation_order: CreationOrder,
    pub profiles: Vec<Profile>,
}

/// How GPU-instance ids are given out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ids {
    pub rule: IdRule,
    /// Boards exist whose two halves are numbered the other way round.
    pub half_swapped_boards: bool,
    pub inferred: bool,
}

/// See [`Ids`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdRule {
    /// The node number in a binary tree over the memory slices: full 0, halves 1 and 2, quarters 3 to 6.
    Tree,
    /// The lowest id that is free.
    LowestFree,
}

/// Which start a creation without placement takes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CreationOrder {
    pub inferred: bool,
    /// Size in memory slices to the starts in the order in which they are tried; ascending where absent.
    pub starts: BTreeMap<u32, Vec<u32>>,
}

/// A GPU-instance profile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Profile {
    pub name: String,
    /// `NVML_GPU_INSTANCE_PROFILE_*`, the argument of the profile query.
    #[serde(rename = "enum")]
    pub enumerator: u32,
    /// The id that creation takes; not the enumerator.
    pub id: u32,
    /// NVML's `memorySizeMB`, in MiB.
    pub memory_mib: u64,
    pub sm: u32,
    /// Compute slices.
    pub slices: u32,
    /// The most instances of this profile on an empty GPU.
    pub max: u32,
    #[serde(flatten)]
    pub engines: Engines,
    pub p2p: bool,
    pub gfx: bool,
    /// Allowed starts, in memory slices.
    pub starts: Vec<u32>,
    /// Width in memory slices.
    pub size: u32,
    /// `captured`, `documented`, `mixed`, `analogy` or `invented`.
    pub confidence: String,
    pub inferred: bool,
    #[serde(default)]
    pub inferred_fields: Vec<String>,
    /// Keys of the file's `sources`, or why there is none.
    pub source: String,
    pub compute: ComputeProfiles,
}

/// Engines of a profile. All but the copy engines are a budget of the GPU: the instances together cannot have
/// more than the full-GPU profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engines {
    /// Copy engines; not a limit.
    pub ce: u32,
    pub dec: u32,
    pub enc: u32,
    pub jpg: u32,
    pub ofa: u32,
}

impl Engines {
    /// How often `self` fits into `budget`; `None` when it asks for no limited engine.
    pub fn times_in(self, budget: Engines) -> Option<u32> {
        [(self.dec, budget.dec), (self.enc, budget.enc), (self.jpg, budget.jpg), (self.ofa, budget.ofa)]
            .into_iter()
            .filter_map(|(need, have)| have.checked_div(need))
            .min()
    }

    /// What is left of `self` after `used`.
    pub fn minus(self, used: Engines) -> Engines {
        Engines {
            ce: self.ce,
            dec: self.dec.saturating_sub(used.dec),
            enc: self.enc.saturating_sub(used.enc),
            jpg: self.jpg.saturating_sub(used.jpg),
            ofa: self.ofa.saturating_sub(used.ofa),
        }
    }

    /// The sum.
    pub fn plus(self, other: Engines) -> Engines {
        Engines {
            ce: self.ce + other.ce,
            dec: self.dec + other.dec,
            enc: self.enc + other.enc,
            jpg: self.jpg + other.jpg,
            ofa: self.ofa + other.ofa,
        }
    }
}

/// The compute-instance profiles of a GPU-instance profile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComputeProfiles {
    /// Id of the profile that takes the whole GPU instance.
    pub default_id: u32,
    pub inferred: bool,
    pub profiles: Vec<ComputeProfile>,
}

/// A compute-instance profile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComputeProfile {
    /// `NVML_COMPUTE_INSTANCE_PROFILE_*`.
    #[serde(rename = "enum")]
    pub enumerator: u32,
    pub id: u32,
    pub name: String,
    pub slices: u32,
    pub sm: u32,
    pub max: u32,
    pub starts: Vec<u32>,
    pub size: u32,
    #[serde(default)]
    pub inferred_fields: Vec<String>,
}

macro_rules! files {
    ($($id:literal)*) => {
        &[$(($id, include_str!(concat!("../models/", $id, ".json"))),)*]
    };
}

/// The model files of this repository, by id.
const FILES: &[(&str, &str)] = files! {
    "a100-40" "a100-80" "a30-24" "b200-180" "b300-269" "gb200-186" "gb300-278" "gh200-144" "gh200-96"
    "h100-80-pcie" "h100-80-sxm" "h100-94-nvl" "h20-141" "h20-96" "h200-141-nvl" "h200-141-sxm"
    "invented-5x10" "invented-nomig" "rtxpro4500-32" "rtxpro5000-48" "rtxpro6000-server"
    "rtxpro6000-workstation"
};

impl Model {
    /// What the driver keeps of a whole GPU for itself, in MiB. Where the model's file does not say, one part in 128, which
    /// is of the right order. Of an instance it keeps nothing more.
    pub fn reserved_mib(&self) -> u64 {
        self.memory_reserved_mib.unwrap_or(self.memory_total_mib / 128)
    }

    /// What programs can have of a whole GPU, in MiB.
    pub fn usable_mib(&self) -> u64 {
        self.memory_total_mib.saturating_sub(self.reserved_mib())
    }

    /// The ids of the models in this repository.
    pub fn ids() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(id, _)| *id)
    }

    /// The model with this id, or the one in the file of that path if `name` has a `/`.
    pub fn named(name: &str) -> Result<Model, Error> {
        if name.contains('/') {
            return Model::from_file(Path::new(name));
        }
        let Some((_, text)) = FILES.iter().find(|(id, _)| *id == name) else {
            return Err(Error::UnknownModel {
                name: name.to_owned(),
                known: Model::ids().collect::<Vec<_>>().join(", "),
            });
        };
        Model::parse(name, text)
    }

    /// Reads a model file.
    pub fn from_file(path: &Path) -> Result<Model, Error> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::io("read", path, source))?;
        Model::parse(&path.display().to_string(), &text)
    }

    fn parse(name: &str, text: &str) -> Result<Model, Error> {
        let model: Model = serde_json::from_str(text)
            .map_err(|source| Error::Json { what: format!("model {name}"), source })?;
        model.check().map_err(|reason| Error::BadModel { name: name.to_owned(), reason })?;
        Ok(model)
    }

    /// What every model must satisfy for the engine to make sense of it.
    fn check(&self) -> Result<(), String> {
        let Some(mig) = &self.mig else { return Ok(()) };
        if mig.full().is_none() {
            return Err("no profile has the width of the whole GPU".into());
        }
        for profile in &mig.profiles {
            let name = &profile.name;
            if profile.size == 0 || profile.starts.is_empty() {
                return Err(format!("profile {name}: a size of 0 or no start"));
            }
            if profile.starts.iter().any(|start| start + profile.size > mig.memory_slices) {
                return Err(format!("profile {name}: a placement past memory slice {}", mig.memory_slices));
            }
            if !profile.compute.profiles.iter().any(|ci| ci.id == profile.compute.default_id) {
                return Err(format!("profile {name}: no compute profile {}", profile.compute.default_id));
            }
            let same = |other: &&Profile| other.id == profile.id || other.enumerator == profile.enumerator;
            if mig.profiles.iter().filter(same).count() != 1 {
                return Err(format!("profile {name}: its id or enumerator is there twice"));
            }
        }
        Ok(())
    }
}

impl Mig {
    /// The profile of this id (not enumerator).
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// The profile of this `NVML_GPU_INSTANCE_PROFILE_*`.
    pub fn by_enumerator(&self, enumerator: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.enumerator == enumerator)
    }

    /// The profile of this name.
    pub fn by_name(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.name == name)
    }

    /// The profile that takes the whole GPU; its engines are the GPU's budget.
    pub fn full(&self) -> Option<&Profile> {
        self.profiles.iter().filter(|profile| profile.size == self.memory_slices).max_by_key(|p| p.slices)
    }

    /// What the instances may use together: the largest count of each engine that any full-width profile has.
    pub fn budget(&self) -> Engines {
        self.full().map(|profile| profile.engines).unwrap_or_default()
    }
}

impl Profile {
    /// The compute profile of this id.
    pub fn compute_profile(&self, id: u32) -> Option<&ComputeProfile> {
        self.compute.profiles.iter().find(|profile| profile.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_known_and_readable() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
        let mut found: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        found.sort();
        assert_eq!(found, Model::ids().map(str::to_owned).collect::<Vec<_>>());
        for id in Model::ids() {
            assert_eq!(Model::named(id).unwrap().id, id);
        }
    }

    #[test]
    fn an_unknown_model_is_named_with_those_there_are() {
        let error = Model::named("a100-41").unwrap_err().to_string();
        assert!(error.contains("a100-41") && error.contains("a100-40"), "{error}");
    }

    #[test]
    fn the_engine_rule_gives_every_max() {
        for id in Model::ids() {
            let Some(mig) = Model::named(id).unwrap().mig else { continue };
            for profile in &mig.profiles {
                // A greedy walk over equal widths in ascending order packs best.
                let mut end = 0;
                let mut packed = 0;
                let mut starts = profile.starts.clone();
                starts.sort();
                for start in starts {
                    if start >= end {
                        packed += 1;
                        end = start + profile.size;
                    }
                }
                let engines = profile.engines.times_in(mig.budget()).unwrap_or(u32::MAX);
                assert_eq!(packed.min(engines), profile.max, "{id} {}", profile.name);
            }
        }
    }

    #[test]
    fn inferred_rows_say_so() {
        for id in Model::ids() {
            let Some(mig) = Model::named(id).unwrap().mig else { continue };
            for profile in &mig.profiles {
                let by_analogy = matches!(profile.confidence.as_str(), "analogy" | "invented");
                assert_eq!(profile.inferred, by_analogy, "{id} {}", profile.name);
                assert!(!profile.source.is_empty(), "{id} {}", profile.name);
            }
        }
    }
}
