//! Other policies, made anew from their descriptions. They see the slices of each GPU and answer with a GPU and a start.

use kerf_planner::occupancy::slices;
use kerf_planner::snapshot::Geometry;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

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
    /// The fullest GPU, lowest start.
    BestFit,
    /// The fullest GPU; 1g and 3g from the highest start down, others from the lowest up: HAMi.
    Hami,
    /// The fullest GPU, the start that spoils the fewest placements.
    BestFitBestStart,
    /// GPU and start that spoil the fewest placements, then the fullest GPU.
    FewestSpoilt,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Spread,
        Self::Random,
        Self::FirstFit,
        Self::BestFit,
        Self::Hami,
        Self::BestFitBestStart,
        Self::FewestSpoilt,
    ];

    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spread => "spread",
            Self::Random => "random",
            Self::FirstFit => "first-fit",
            Self::BestFit => "best-fit",
            Self::Hami => "best-fit, HAMi's starts",
            Self::BestFitBestStart => "best-fit, best start",
            Self::FewestSpoilt => "fewest spoilt + best-fit",
        }
    }
}

/// GPUs of one geometry under a rule.
#[derive(Debug)]
pub struct Rival {
    rule: Rule,
    geometry: Geometry,
    taken: Vec<u64>,
    dice: ChaCha8Rng,
}

impl Rival {
    /// So many empty GPUs.
    pub fn new(rule: Rule, geometry: &Geometry, gpus: usize) -> Self {
        let dice = ChaCha8Rng::seed_from_u64(7);
        Self { rule, geometry: geometry.clone(), taken: vec![0; gpus], dice }
    }

    fn placements(&self, taken: u64) -> i64 {
        let shapes = self.geometry.profiles.iter();
        shapes
            .map(|p| p.starts.iter().filter(|&&start| taken & slices(start, p.size) == 0).count() as i64)
            .sum()
    }
}

impl Cluster for Rival {
    fn place(&mut self, profile: usize, _luck: f64) -> Option<Tenancy> {
        let shape = &self.geometry.profiles[profile];
        let mut best: Option<((i64, i64, i64), usize, u64)> = None;
        for gpu in 0..self.taken.len() {
            let taken = self.taken[gpu];
            let full = -i64::from(taken.count_ones());
            for &start in &shape.starts {
                let mask = slices(start, shape.size);
                if taken & mask != 0 {
                    continue;
                }
                let spoilt = self.placements(taken) - self.placements(taken | mask);
                let (number, start) = (gpu as i64, i64::from(start));
                let from_the_top = matches!(shape.compute_slices, 1 | 3);
                let score = match self.rule {
                    Rule::Spread => (-full, start, number),
                    Rule::Random => (self.dice.random::<i64>(), 0, 0),
                    Rule::FirstFit => (number, start, 0),
                    Rule::BestFit => (full, start, number),
                    Rule::Hami => (full, if from_the_top { -start } else { start }, number),
                    Rule::BestFitBestStart => (full, spoilt, number),
                    Rule::FewestSpoilt => (spoilt, full, number),
                };
                if best.is_none_or(|(lowest, _, _)| score < lowest) {
                    best = Some((score, gpu, mask));
                }
            }
        }
        let (_, gpu, mask) = best?;
        self.taken[gpu] |= mask;
        Some(Tenancy { first: gpu as u64, second: mask })
    }

    fn end(&mut self, tenancy: Tenancy) {
        self.taken[tenancy.first as usize] &= !tenancy.second;
    }
}

/// One server with the compute slices of all GPUs, which takes whatever it has room for: what is lost to GPUs being apart
/// is the distance to it. A bound only for those who refuse nothing that fits.
#[derive(Debug)]
pub struct Pooled {
    /// Compute slices left.
    pub left: u32,
}

impl Cluster for Pooled {
    fn place(&mut self, profile: usize, _luck: f64) -> Option<Tenancy> {
        let work = crate::workload::WORK[profile];
        self.left = self.left.checked_sub(work)?;
        Some(Tenancy { first: work.into(), second: 0 })
    }

    fn end(&mut self, tenancy: Tenancy) {
        self.left += tenancy.first as u32;
    }
}
