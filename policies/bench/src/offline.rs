//! A queue of requests planned at once, beside the optimum.

use std::collections::HashMap;
use std::fmt::Write as _;

use anyhow::{Result, ensure};
use kerf_planner::check::violations;
use kerf_planner::occupancy::Occupancy;
use kerf_planner::plan;
use kerf_planner::snapshot::{Geometry, Instance, InstanceState, ProfileIndex, Request, Snapshot};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::bounds;
use crate::numbers;
use crate::workload::{Mix, Setting};

/// GPUs of the table's runs.
pub const GPUS: usize = 200;

/// Compute slices of a GPU.
const GPU_WORK: u64 = 7;

/// GPUs of one model, some of them in part taken, and a queue.
#[derive(Debug)]
pub struct Instances {
    /// The GPUs; its requests are the kinds.
    pub snapshot: Snapshot,
    /// What is taken on them.
    pub taken: Vec<Occupancy>,
    /// The queue: kinds, of which each takes the profile of the same number.
    pub queue: Vec<ProfileIndex>,
}

impl Instances {
    /// So much of the setting's GPUs is taken, by kinds and at places that chance has chosen, and a queue of so much work
    /// as a part of the compute slices left.
    pub fn drawn(setting: &Setting, mix: &Mix, filled: f64, offered: f64, seed: u64) -> Self {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut snapshot = setting.snapshot.clone();
        let geometry = snapshot.geometries[0].clone();
        let mut taken: Vec<Occupancy> = Vec::new();
        let mut gpus: Vec<_> = snapshot.nodes.iter_mut().flat_map(|node| &mut node.gpus).collect();
        taken.resize(gpus.len(), Occupancy::empty(&geometry));
        let all = gpus.len() as u32 * geometry.memory_slices;
        let mut slices = 0;
        while f64::from(slices) < filled * f64::from(all) {
            let (gpu, profile) = (dice.random_range(0..gpus.len()), kind(&mut dice, mix));
            let shape = &geometry.profiles[profile];
            let start = shape.starts[dice.random_range(0..shape.starts.len())];
            if taken[gpu].fits(&geometry, profile, start) {
                taken[gpu].take(&geometry, profile, start);
                slices += shape.size;
                gpus[gpu].instances.push(Instance {
                    profile: Some(profile),
                    start,
                    size: shape.size,
                    state: InstanceState::Taken,
                    exists: true,
                });
            }
        }
        let mut drawn = Self { snapshot, taken, queue: Vec::new() };
        let (room, mut asked) = (drawn.free(&setting.work), 0);
        while (asked as f64) < offered * room as f64 {
            let kind = kind(&mut dice, mix);
            asked += setting.work[kind];
            drawn.queue.push(kind);
        }
        drawn
    }

    fn geometry(&self) -> &Geometry {
        &self.snapshot.geometries[0]
    }

    /// Compute slices that nobody has.
    fn free(&self, work: &[u64]) -> u64 {
        let counts = self.taken.iter().flat_map(|gpu| gpu.counts.iter().zip(work));
        let taken: u64 = counts.map(|(&count, work)| u64::from(count) * work).sum();
        GPU_WORK * self.taken.len() as u64 - taken
    }

    /// The most work of the queue's first so many that the GPUs have room for, whoever is served.
    pub fn most(&self, first: usize, work: &[u64]) -> Result<u64> {
        let mut demand = vec![0; work.len()];
        self.queue[..first].iter().for_each(|&kind| demand[kind] += 1);
        bounds::most_work(self.geometry(), &self.taken, &demand, work)
    }

    /// How many of the queue, from the first on, there is room for.
    pub fn all_fit(&self, work: &[u64]) -> Result<usize> {
        let (mut fit, mut too_many) = (0, self.queue.len() + 1);
        while too_many - fit > 1 {
            let middle = fit + (too_many - fit) / 2;
            if self.most(middle, work)? == self.queue[..middle].iter().map(|&kind| work[kind]).sum::<u64>() {
                fit = middle;
            } else {
                too_many = middle;
            }
        }
        Ok(fit)
    }

    /// Work of those of the queue's first so many that Kerf's plan places.
    pub fn planned(&self, first: usize, work: &[u64]) -> Result<u64> {
        let request = |(i, &kind): (usize, &ProfileIndex)| Request {
            id: format!("ns/pod-{i}"),
            ..self.snapshot.requests[kind].clone()
        };
        let requests = self.queue[..first].iter().enumerate().map(request).collect();
        let snapshot = Snapshot { requests, ..self.snapshot.clone() };
        let plan = plan(&snapshot);
        let wrong = violations(&snapshot, &plan);
        ensure!(wrong.is_empty(), "the plan is illegal: {wrong:?}");
        Ok(plan.placements.iter().map(|placement| work[self.queue[placement.request]]).sum())
    }
}

fn kind(dice: &mut ChaCha8Rng, mix: &Mix) -> usize {
    let mut point = dice.random::<f64>() * mix.weights.iter().sum::<f64>();
    let stop = |weight: &f64| {
        let here = point < *weight;
        point -= *weight;
        here
    };
    mix.weights.iter().position(stop).unwrap_or(mix.weights.len() - 1)
}

/// What Kerf places of queues, in percent of the optimum, by mix: of the longest that fits, and of one a third too long.
pub fn table(setting: &Setting, filled: &[f64], seeds: &[u64]) -> Result<String> {
    let gpus: usize = setting.snapshot.nodes.iter().map(|node| node.gpus.len()).sum();
    let mut table =
        "| GPUs | taken before | mix | the longest queue that fits, of the free slices | placed of it | least | optimal runs | \
        placed of a queue of 1.3 times the room |\n|---|---|---|---|---|---|---|---|"
            .to_owned();
    for &filled in filled {
        for mix in &setting.mixes {
            let (mut lengths, mut fitting, mut optimal, mut too_long) =
                (Vec::new(), Vec::new(), 0, Vec::new());
            for &seed in seeds {
                let drawn = Instances::drawn(setting, mix, filled, 1.3, seed);
                let first = drawn.all_fit(&setting.work)?;
                let (placed, most) =
                    (drawn.planned(first, &setting.work)?, drawn.most(first, &setting.work)?);
                optimal += usize::from(placed == most);
                lengths.push(100.0 * most as f64 / drawn.free(&setting.work) as f64);
                fitting.push(100.0 * placed as f64 / most as f64);
                let all = drawn.queue.len();
                let (placed, most) = (drawn.planned(all, &setting.work)?, drawn.most(all, &setting.work)?);
                too_long.push(100.0 * placed as f64 / most as f64);
            }
            let least = fitting.iter().copied().fold(f64::INFINITY, f64::min);
            _ = write!(
                table,
                "\n| {gpus} | {:.0} % | {} | {:.0} % | {} | {least:.2} | {optimal} of {} | {} |",
                100.0 * filled,
                mix.name,
                numbers::mean(&lengths).0,
                numbers::text(&fitting),
                seeds.len(),
                numbers::text(&too_long)
            );
        }
    }
    Ok(table)
}

/// [`Instances::most`] by trying everything; for a few GPUs.
pub fn most_by_trying(instances: &Instances, first: usize, work: &[u64]) -> u64 {
    type Known = HashMap<(usize, Vec<u64>), u64>;
    fn from(
        at: usize,
        taken: &[Occupancy],
        queue: &[ProfileIndex],
        geometry: &Geometry,
        work: &[u64],
        known: &mut Known,
    ) -> u64 {
        let Some(&kind) = queue.get(at) else { return 0 };
        let mut key: Vec<u64> = taken.iter().map(|gpu| gpu.slices).collect();
        key.sort_unstable();
        if let Some(&most) = known.get(&(at, key.clone())) {
            return most;
        }
        let mut most = from(at + 1, taken, queue, geometry, work, known);
        for gpu in 0..taken.len() {
            for &start in &geometry.profiles[kind].starts {
                if taken[gpu].fits(geometry, kind, start) {
                    let mut after = taken.to_vec();
                    after[gpu].take(geometry, kind, start);
                    most = most.max(work[kind] + from(at + 1, &after, queue, geometry, work, known));
                }
            }
        }
        known.insert((at, key), most);
        most
    }
    from(0, &instances.taken, &instances.queue[..first], instances.geometry(), work, &mut Known::new())
}
