//! Jobs of a loss system: they come at random, stay as long as chance has it, and one that finds no place is gone.

use kerf_planner::snapshot::Snapshot;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::bounds::{self, Pool};
use crate::fleet;

/// Offered work as a part of what the GPUs have.
pub const LOADS: [f64; 3] = [0.85, 1.0, 1.2];

/// GPUs, the kinds of jobs that come to them, and how often each comes.
#[derive(Debug)]
pub struct Setting {
    /// The GPUs; its requests are the kinds of jobs.
    pub snapshot: Snapshot,
    /// Work that a job of each kind asks for.
    pub work: Vec<u64>,
    /// Mixes of the kinds.
    pub mixes: Vec<Mix>,
}

/// How often each kind is asked for.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Name.
    pub name: &'static str,
    /// Relative frequency by kind.
    pub weights: Vec<f64>,
    /// The GPUs in one piece; load 1 is what it can do.
    pub pool: Pool,
}

/// GPUs of one model, 7 compute and 8 memory slices, and jobs for its profiles. Work and load are compute slices.
pub fn one_model(gpus: usize) -> Setting {
    let mixes: [(&str, [f64; 6]); 5] = [
        ("uniform", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("small", [0.30, 0.25, 0.20, 0.10, 0.10, 0.05]),
        ("big", [0.05, 0.10, 0.10, 0.20, 0.25, 0.30]),
        ("bimodal", [0.30, 0.15, 0.05, 0.05, 0.15, 0.30]),
        // The engine was tuned on the other four.
        ("middle (not tuned on)", [0.05, 0.10, 0.35, 0.35, 0.10, 0.05]),
    ];
    let geometry = fleet::seven();
    let work: Vec<u64> = geometry.profiles.iter().map(|p| p.compute_slices.into()).collect();
    let pool = Pool { prices: work.clone(), capacity: 7 * gpus as u64 };
    let mix = |(name, weights): (_, [f64; 6])| Mix { name, weights: weights.to_vec(), pool: pool.clone() };
    Setting { snapshot: fleet::online(gpus), work, mixes: mixes.into_iter().map(mix).collect() }
}

/// Least memory in GiB and least multiprocessors of the kinds of jobs on several models.
const NEEDS: [(u64, u32); 8] =
    [(9, 14), (19, 14), (19, 28), (22, 40), (39, 42), (39, 56), (46, 90), (78, 98)];

/// Nodes of four GPUs, A100, H100 and RTX PRO 6000 in turn, and jobs that need memory and multiprocessors, whatever the
/// model. Work is what a job needs, as a part of what the cluster has: the mean of both.
pub fn three_models(nodes: usize) -> anyhow::Result<Setting> {
    let mixes: [(&str, [f64; 8]); 4] = [
        ("uniform", [1.0; 8]),
        ("small", [0.25, 0.20, 0.15, 0.15, 0.10, 0.05, 0.05, 0.05]),
        ("big", [0.05, 0.05, 0.10, 0.10, 0.15, 0.20, 0.15, 0.20]),
        // Two kinds that take a quarter and a half of an RTX PRO 6000 and twice as much of the others.
        ("lopsided", [0.10, 0.05, 0.05, 0.30, 0.05, 0.05, 0.30, 0.10]),
    ];
    let snapshot = fleet::by_need(nodes, &fleet::mixed()?, &NEEDS);
    let (mut memory, mut multiprocessors) = (0, 0);
    for gpu in snapshot.nodes.iter().flat_map(|node| &node.gpus) {
        let profiles = gpu.geometry.map_or(&[][..], |geometry| &snapshot.geometries[geometry].profiles);
        memory += profiles.iter().map(|p| p.memory_bytes).max().unwrap_or(0);
        multiprocessors += profiles.iter().map(|p| u64::from(p.multiprocessors)).max().unwrap_or(0);
    }
    let share = |part: u64, of: u64| part as f64 / of as f64;
    let work = |(gib, sm): (u64, u32)| {
        (1e6 * (share(gib << 30, memory) + share(sm.into(), multiprocessors)) / 2.0).round() as u64
    };
    let mut setting = Setting { work: NEEDS.into_iter().map(work).collect(), mixes: Vec::new(), snapshot };
    for (name, weights) in mixes {
        let pool = bounds::pool(&setting.snapshot, &weights)?;
        setting.mixes.push(Mix { name, weights: weights.to_vec(), pool });
    }
    Ok(setting)
}

/// A job. Times in mean service times.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// When it comes.
    pub arrives: f64,
    /// How long it stays, if it finds a place.
    pub stays: f64,
    /// Index into the setting's requests.
    pub kind: usize,
    /// Uniform in `[0, 1)`: whether it may be moved, for any share of those that may.
    pub luck: f64,
}

/// Poisson arrivals with exponential service times that offer `load` of what the mix's pool can do.
pub fn jobs(mix: &Mix, load: f64, number: usize, seed: u64) -> Vec<Job> {
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let total: f64 = mix.weights.iter().sum();
    let priced = mix.weights.iter().zip(&mix.pool.prices);
    let mean: f64 = priced.map(|(weight, &price)| weight / total * price as f64).sum();
    let rate = load * mix.pool.capacity as f64 / mean;
    let mut now = 0.0;
    let mut job = || {
        now += exponential(&mut dice) / rate;
        let mut point = dice.random::<f64>() * total;
        let stop = |weight: &f64| {
            let here = point < *weight;
            point -= *weight;
            here
        };
        let kind = mix.weights.iter().position(stop).unwrap_or(mix.weights.len() - 1);
        Job { arrives: now, stays: exponential(&mut dice), kind, luck: dice.random() }
    };
    (0..number).map(|_| job()).collect()
}

fn exponential(dice: &mut ChaCha8Rng) -> f64 {
    -(1.0 - dice.random::<f64>()).ln()
}
