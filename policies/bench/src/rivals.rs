//! Other policies, made anew from their descriptions. They see what is on each GPU and answer with a GPU and a start; on
//! each model they take the smallest profile that will do.

use std::collections::HashMap;

use kerf_planner::occupancy::{Occupancy, slices};
use kerf_planner::snapshot::{Geometry, GeometryIndex, ProfileIndex, Snapshot};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::bounds::{Pool, least};
use crate::online::{Cluster, Tenancy};

/// How a rival chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The emptiest GPU, lowest start: DAS and other "least allocated" scores.
    Spread,
    /// Any place.
    Random,
    /// The first GPU, lowest start.
    FirstFit,
    /// The GPU that has least left afterwards, lowest start.
    BestFit,
    /// As best-fit; 1g and 3g from the highest start down, others from the lowest up: HAMi.
    Hami,
    /// As best-fit, the start that spoils the fewest placements.
    BestFitBestStart,
    /// GPU and start that spoil the fewest placements, then best-fit.
    FewestSpoilt,
    /// The least memory given, then best-fit and the start that spoils the fewest placements.
    LeastGiven,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Spread,
        Self::Random,
        Self::FirstFit,
        Self::BestFit,
        Self::Hami,
        Self::BestFitBestStart,
        Self::FewestSpoilt,
        Self::LeastGiven,
    ];
    /// Those that differ where all GPUs are of one model: all but the last.
    pub const ON_ONE_MODEL: &[Self] = Self::ALL.split_at(Self::ALL.len() - 1).0;

    fn counts_spoilt(self) -> bool {
        matches!(self, Self::BestFitBestStart | Self::FewestSpoilt | Self::LeastGiven)
    }

    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spread => "spread (DAS)",
            Self::Random => "random",
            Self::FirstFit => "first-fit",
            Self::BestFit => "best-fit",
            Self::Hami => "best-fit, HAMi's starts",
            Self::BestFitBestStart => "best-fit, best start",
            Self::FewestSpoilt => "fewest spoilt + best-fit",
            Self::LeastGiven => "least given, best-fit, best start",
        }
    }
}

/// Compared in their order; the lowest wins.
type Score = (i64, i64, i64);

/// GPUs under a rule.
#[derive(Debug)]
pub struct Rival<'a> {
    rule: Rule,
    geometries: &'a [Geometry],
    gpus: Vec<(GeometryIndex, Occupancy)>,
    /// The profile that a job takes, by its kind and the geometry.
    profiles: Vec<Vec<Option<ProfileIndex>>>,
    /// Placements that jobs could have, by geometry and slices taken.
    placements: HashMap<(GeometryIndex, u64), i64>,
    dice: ChaCha8Rng,
}

impl<'a> Rival<'a> {
    /// The GPUs of the snapshot, empty; its requests are the kinds of jobs.
    pub fn new(rule: Rule, snapshot: &'a Snapshot) -> Self {
        let gpus = snapshot.nodes.iter().flat_map(|node| &node.gpus);
        let of_kind = |request| {
            let geometries = snapshot.geometries.iter().enumerate();
            geometries.map(|(index, geometry)| least(request, index, geometry)).collect()
        };
        Self {
            rule,
            geometries: &snapshot.geometries,
            gpus: gpus
                .filter_map(|gpu| {
                    Some((gpu.geometry?, Occupancy::empty(&snapshot.geometries[gpu.geometry?])))
                })
                .collect(),
            profiles: snapshot.requests.iter().map(of_kind).collect(),
            placements: HashMap::new(),
            dice: ChaCha8Rng::seed_from_u64(7),
        }
    }

    fn placements(&mut self, index: GeometryIndex, taken: u64) -> i64 {
        let (geometry, profiles) = (&self.geometries[index], &self.profiles);
        *self.placements.entry((index, taken)).or_insert_with(|| {
            let mut asked: Vec<ProfileIndex> = profiles.iter().filter_map(|by| by[index]).collect();
            asked.sort_unstable();
            asked.dedup();
            let places = asked.into_iter().flat_map(|profile| {
                let shape = &geometry.profiles[profile];
                shape.starts.iter().map(|&start| slices(start, shape.size))
            });
            places.filter(|place| taken & place == 0).count() as i64
        })
    }
}

impl Cluster for Rival<'_> {
    fn place(&mut self, kind: usize, _luck: f64) -> Option<Tenancy> {
        let mut best: Option<(Score, usize, ProfileIndex, u32)> = None;
        for gpu in 0..self.gpus.len() {
            let index = self.gpus[gpu].0;
            let Some(profile) = self.profiles[kind][index] else { continue };
            let geometry = &self.geometries[index];
            let shape = &geometry.profiles[profile];
            let all = i64::from(geometry.memory_slices);
            for &at in &shape.starts {
                let taken = &self.gpus[gpu].1;
                if !taken.fits(geometry, profile, at) {
                    continue;
                }
                let before = taken.slices;
                // In thousandths of the GPU, since models differ.
                let free = 1000 * (all - i64::from(before.count_ones())) / all;
                let left = free - 1000 * i64::from(shape.size) / all;
                let spoilt = if self.rule.counts_spoilt() {
                    self.placements(index, before) - self.placements(index, before | slices(at, shape.size))
                } else {
                    0
                };
                let (number, start) = (gpu as i64, i64::from(at));
                let from_the_top = matches!(shape.compute_slices, 1 | 3);
                let score = match self.rule {
                    Rule::Spread => (-free, start, number),
                    Rule::Random => (self.dice.random::<i64>(), 0, 0),
                    Rule::FirstFit => (number, start, 0),
                    Rule::BestFit => (left, start, number),
                    Rule::Hami => (left, if from_the_top { -start } else { start }, number),
                    Rule::BestFitBestStart => (left, spoilt, number),
                    Rule::FewestSpoilt => (spoilt, left, number),
                    Rule::LeastGiven => ((shape.memory_bytes >> 30) as i64, left, spoilt),
                };
                if best.is_none_or(|(lowest, ..)| score < lowest) {
                    best = Some((score, gpu, profile, at));
                }
            }
        }
        let (_, gpu, profile, start) = best?;
        let (index, taken) = &mut self.gpus[gpu];
        taken.take(&self.geometries[*index], profile, start);
        Some(Tenancy { first: gpu as u64, second: (profile as u64) << 32 | u64::from(start) })
    }

    fn end(&mut self, tenancy: Tenancy) {
        let (index, taken) = &mut self.gpus[tenancy.first as usize];
        let (profile, start) = ((tenancy.second >> 32) as usize, tenancy.second as u32);
        taken.release(&self.geometries[*index], profile, start);
    }
}

/// One server in place of all GPUs, which takes whatever it has room for: what is lost to GPUs being apart is the
/// distance to it. A bound only for those who refuse nothing that fits.
#[derive(Debug)]
pub struct Pooled<'a> {
    pool: &'a Pool,
    left: u64,
}

impl<'a> Pooled<'a> {
    /// Empty.
    pub fn new(pool: &'a Pool) -> Self {
        Self { pool, left: pool.capacity }
    }
}

impl Cluster for Pooled<'_> {
    fn place(&mut self, kind: usize, _luck: f64) -> Option<Tenancy> {
        let price = self.pool.prices[kind];
        self.left = self.left.checked_sub(price)?;
        Some(Tenancy { first: price, second: 0 })
    }

    fn end(&mut self, tenancy: Tenancy) {
        self.left += tenancy.first;
    }
}
