//! Jobs of a loss system: they come at random, stay as long as chance has it, and one that finds no place is gone.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Profiles of the online workload, in the order of a mix's weights.
pub const PROFILES: [&str; 6] = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"];
/// Compute slices of each, which is the work that a job asks for.
pub const WORK: [u32; 6] = [1, 1, 2, 3, 4, 7];
/// Compute slices of a GPU.
pub const GPU_WORK: u32 = 7;
/// Offered work as a part of what the GPUs have.
pub const LOADS: [f64; 3] = [0.85, 1.0, 1.2];

/// How often each profile is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Name.
    pub name: &'static str,
    /// Relative frequency by profile.
    pub weights: [f64; 6],
}

/// The four mixes that the engine was tuned on, and a fifth that it was not.
pub const MIXES: [Mix; 5] = [
    Mix { name: "uniform", weights: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0] },
    Mix { name: "small", weights: [0.30, 0.25, 0.20, 0.10, 0.10, 0.05] },
    Mix { name: "big", weights: [0.05, 0.10, 0.10, 0.20, 0.25, 0.30] },
    Mix { name: "bimodal", weights: [0.30, 0.15, 0.05, 0.05, 0.15, 0.30] },
    Mix { name: "middle (not tuned on)", weights: [0.05, 0.10, 0.35, 0.35, 0.10, 0.05] },
];

/// A job. Times in mean service times.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// When it comes.
    pub arrives: f64,
    /// How long it stays, if it finds a place.
    pub stays: f64,
    /// Index into [`PROFILES`].
    pub profile: usize,
    /// Uniform in `[0, 1)`: whether it may be moved, for any share of those that may.
    pub luck: f64,
}

/// Poisson arrivals with exponential service times that offer `load` of the work that so many GPUs can do.
pub fn jobs(mix: &Mix, load: f64, gpus: usize, number: usize, seed: u64) -> Vec<Job> {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let total: f64 = mix.weights.iter().sum();
    let mean: f64 = mix.weights.iter().zip(WORK).map(|(weight, work)| weight / total * f64::from(work)).sum();
    let rate = load * f64::from(GPU_WORK) * gpus as f64 / mean;
    let mut now = 0.0;
    let mut job = || {
        now += exponential(&mut dice) / rate;
        let mut point = dice.random::<f64>() * total;
        let stop = |weight: &&f64| {
            let here = point < **weight;
            point -= **weight;
            here
        };
        let profile =
            mix.weights.iter().collect::<Vec<_>>().iter().position(stop).unwrap_or(PROFILES.len() - 1);
        Job { arrives: now, stays: exponential(&mut dice), profile, luck: dice.random() }
    };
    (0..number).map(|_| job()).collect()
}

fn exponential(dice: &mut ChaCha8Rng) -> f64 {
    -(1.0 - dice.random::<f64>()).ln()
}
