//! A loss system: jobs come and go, and one that finds no place is lost. What counts is the share of the work asked for
//! that is accepted.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::engine::{Engine, Moving};
use crate::fleet;
use crate::numbers;
use crate::rivals::{Pooled, Rival, Rule};
use crate::workload::{GPU_WORK, Job, Mix, PROFILES, WORK, jobs};

/// GPUs of the online runs.
pub const GPUS: usize = 100;

/// What a cluster needs to know to end a job.
#[derive(Clone, Copy, Debug)]
pub struct Tenancy {
    /// The cluster's own.
    pub first: u64,
    /// The cluster's own.
    pub second: u64,
}

/// Something that takes jobs.
pub trait Cluster {
    /// A place for a job of the profile; `luck` decides whether it may be moved later.
    fn place(&mut self, profile: usize, luck: f64) -> Option<Tenancy>;
    /// The job is over.
    fn end(&mut self, tenancy: Tenancy);
}

/// What became of the jobs after the warm-up.
#[derive(Clone, Debug, Default)]
pub struct Result {
    /// Accepted, in percent of the work asked for.
    pub work: f64,
    /// Accepted jobs by profile, in percent.
    pub by_profile: [f64; 6],
}

/// Runs the jobs; the first fifth warms up and is not counted.
pub fn run(cluster: &mut impl Cluster, jobs: &[Job]) -> Result {
    let mut running: BTreeMap<(u64, usize), Tenancy> = BTreeMap::new();
    let (mut asked, mut accepted) = ([0u64; 6], [0u64; 6]);
    for (number, job) in jobs.iter().enumerate() {
        while let Some(first) = running.first_entry()
            && f64::from_bits(first.key().0) <= job.arrives
        {
            cluster.end(first.remove());
        }
        let tenancy = cluster.place(job.profile, job.luck);
        if number >= jobs.len() / 5 {
            asked[job.profile] += 1;
            accepted[job.profile] += u64::from(tenancy.is_some());
        }
        if let Some(tenancy) = tenancy {
            // Positive numbers are in the order of their bits.
            running.insert(((job.arrives + job.stays).to_bits(), number), tenancy);
        }
    }
    let work =
        |counts: &[u64; 6]| counts.iter().zip(WORK).map(|(n, work)| n * u64::from(work)).sum::<u64>() as f64;
    let share = |p: usize| 100.0 * accepted[p] as f64 / asked[p].max(1) as f64;
    Result { work: 100.0 * work(&accepted) / work(&asked), by_profile: std::array::from_fn(share) }
}

fn pooled(jobs: &[Job]) -> f64 {
    run(&mut Pooled { left: GPU_WORK * GPUS as u32 }, jobs).work
}

/// Accepted work by policy, without moves: a table.
pub fn without_moves(mixes: &[Mix], loads: &[f64], seeds: &[u64], number: usize) -> String {
    let (geometry, snapshot) = (fleet::seven(), fleet::online(GPUS));
    let mut table = "| mix, load |".to_owned();
    for rule in Rule::ALL {
        _ = write!(table, " {} |", rule.name());
    }
    table += " **Kerf** | Kerf − best other | one pooled server | reused |\n|---|";
    table += &"---|".repeat(Rule::ALL.len() + 4);
    for mix in mixes {
        for &load in loads {
            let all: Vec<Vec<Job>> = seeds.iter().map(|&seed| jobs(mix, load, GPUS, number, seed)).collect();
            let of = |rule| -> Vec<f64> {
                all.iter().map(|jobs| run(&mut Rival::new(rule, &geometry, GPUS), jobs).work).collect()
            };
            let rivals: Vec<Vec<f64>> = Rule::ALL.into_iter().map(of).collect();
            let (mut kerf, mut reused) = (Vec::new(), Vec::new());
            for jobs in &all {
                let mut engine = Engine::new(&snapshot, Moving { moves: 0, share: 0.0 });
                kerf.push(run(&mut engine, jobs).work);
                reused.push(100.0 * engine.reused as f64 / engine.placed as f64);
            }
            let mean = |values: &[f64]| numbers::mean(values).0;
            let best = rivals.iter().max_by(|a, b| mean(a).total_cmp(&mean(b))).cloned().unwrap_or_default();
            let ahead = numbers::differences(&kerf, &best);
            _ = write!(table, "\n| {} {load} |", mix.name);
            for rival in &rivals {
                _ = write!(table, " {:.2} |", mean(rival));
            }
            let bound: Vec<f64> = all.iter().map(|jobs| pooled(jobs)).collect();
            let (kerf, bound, reused) = (mean(&kerf), mean(&bound), mean(&reused));
            _ = write!(table, " **{kerf:.2}** | {} | {bound:.2} | {reused:.0} % |", numbers::text(&ahead));
        }
    }
    table
}

/// Accepted work with moves, by their number and by the share of jobs that may be moved: a table. What the moves gain is
/// worked out by seed, the same jobs without moves beside those with them.
pub fn with_moves(mixes: &[Mix], seeds: &[u64], number: usize) -> String {
    let snapshot = fleet::online(GPUS);
    let mut table =
        "| mix, load 1 | at most | movable | accepted work | gained by moves | moves in 100 arrivals | \
        pooled − accepted |"
            .to_owned();
    for name in PROFILES {
        _ = write!(table, " {name} |");
    }
    table += "\n|---|";
    table += &"---|".repeat(6 + PROFILES.len());
    let mean = |values: &[f64]| numbers::mean(values).0;
    for mix in mixes {
        let all: Vec<Vec<Job>> = seeds.iter().map(|&seed| jobs(mix, 1.0, GPUS, number, seed)).collect();
        let bound: Vec<f64> = all.iter().map(|jobs| pooled(jobs)).collect();
        let mut without = Vec::new();
        for (moves, share) in [(0, 1.0), (1, 1.0), (2, 1.0), (4, 1.0), (2, 0.5), (2, 0.2)] {
            let (mut work, mut moved, mut by_profile) = (Vec::new(), Vec::new(), [0.0; 6]);
            for jobs in &all {
                let mut engine = Engine::new(&snapshot, Moving { moves, share });
                let result = run(&mut engine, jobs);
                work.push(result.work);
                let moves =
                    engine.with_moves.iter().enumerate().map(|(n, times)| n as u64 * times).sum::<u64>();
                moved.push(100.0 * moves as f64 / jobs.len() as f64);
                for (sum, share) in by_profile.iter_mut().zip(result.by_profile) {
                    *sum += share / all.len() as f64;
                }
            }
            let movable = if moves == 0 { "–".to_owned() } else { format!("{:.0} %", 100.0 * share) };
            let gained = if moves == 0 {
                without.clone_from(&work);
                "–".to_owned()
            } else {
                numbers::text(&numbers::differences(&work, &without))
            };
            _ = write!(
                table,
                "\n| {} | {moves} | {movable} | {:.2} | {gained} | {:.1} | {} |",
                mix.name,
                mean(&work),
                mean(&moved),
                numbers::text(&numbers::differences(&bound, &work)),
            );
            for share in by_profile {
                _ = write!(table, " {share:.1} |");
            }
        }
    }
    table
}
