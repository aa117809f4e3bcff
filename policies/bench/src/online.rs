//! A loss system: jobs come and go, and one that finds no place is lost. What counts is the share of the work asked for
//! that is accepted.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::engine::{Engine, Moving};
use crate::numbers;
use crate::plot::Chart;
use crate::rivals::{Pooled, Rival, Rule};
use crate::workload::{Job, Mix, Setting, jobs};

/// GPUs of the runs on one model.
pub const GPUS: usize = 100;
/// Nodes of the runs on three models.
pub const NODES: usize = 24;

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
    /// A place for a job of the kind; `luck` decides whether it may be moved later.
    fn place(&mut self, kind: usize, luck: f64) -> Option<Tenancy>;
    /// The job is over.
    fn end(&mut self, tenancy: Tenancy);
}

/// What became of the jobs after the warm-up.
#[derive(Clone, Debug, Default)]
pub struct Result {
    /// Accepted, in percent of the work asked for.
    pub work: f64,
    /// Accepted jobs by kind, in percent.
    pub by_kind: Vec<f64>,
}

/// Runs the jobs, which ask for so much work each by their kind; the first fifth warms up and is not counted.
pub fn run(cluster: &mut impl Cluster, jobs: &[Job], work: &[u64]) -> Result {
    let mut running: BTreeMap<(u64, usize), Tenancy> = BTreeMap::new();
    let (mut asked, mut accepted) = (vec![0u64; work.len()], vec![0u64; work.len()]);
    for (number, job) in jobs.iter().enumerate() {
        while let Some(first) = running.first_entry()
            && f64::from_bits(first.key().0) <= job.arrives
        {
            cluster.end(first.remove());
        }
        let tenancy = cluster.place(job.kind, job.luck);
        if number >= jobs.len() / 5 {
            asked[job.kind] += 1;
            accepted[job.kind] += u64::from(tenancy.is_some());
        }
        if let Some(tenancy) = tenancy {
            // Positive numbers are in the order of their bits.
            running.insert(((job.arrives + job.stays).to_bits(), number), tenancy);
        }
    }
    let all = |counts: &[u64]| counts.iter().zip(work).map(|(n, work)| n * work).sum::<u64>() as f64;
    let share = |(&accepted, &asked): (&u64, &u64)| 100.0 * accepted as f64 / asked.max(1) as f64;
    Result {
        work: 100.0 * all(&accepted) / all(&asked),
        by_kind: accepted.iter().zip(&asked).map(share).collect(),
    }
}

fn pooled(mix: &Mix, jobs: &[Job], work: &[u64]) -> f64 {
    run(&mut Pooled::new(&mix.pool), jobs, work).work
}

/// Accepted work by policy, without moves: a table.
pub fn without_moves(
    setting: &Setting,
    rules: &[Rule],
    loads: &[f64],
    seeds: &[u64],
    number: usize,
) -> String {
    let mut table = "| mix, load |".to_owned();
    for rule in rules {
        _ = write!(table, " {} |", rule.name());
    }
    table += " **Kerf** | Kerf − best other | one pooled server | reused |\n|---|";
    table += &"---|".repeat(rules.len() + 4);
    let work = &setting.work;
    for mix in &setting.mixes {
        for &load in loads {
            let all: Vec<Vec<Job>> = seeds.iter().map(|&seed| jobs(mix, load, number, seed)).collect();
            let of = |&rule: &Rule| -> Vec<f64> {
                all.iter()
                    .map(|jobs| run(&mut Rival::new(rule, &setting.snapshot), jobs, work).work)
                    .collect()
            };
            let rivals: Vec<Vec<f64>> = rules.iter().map(of).collect();
            let (mut kerf, mut reused) = (Vec::new(), Vec::new());
            for jobs in &all {
                let mut engine = Engine::new(&setting.snapshot, Moving { moves: 0, share: 0.0 });
                kerf.push(run(&mut engine, jobs, work).work);
                reused.push(100.0 * engine.reused as f64 / engine.placed as f64);
            }
            let mean = |values: &[f64]| numbers::mean(values).0;
            let best = rivals.iter().max_by(|a, b| mean(a).total_cmp(&mean(b))).cloned().unwrap_or_default();
            let ahead = numbers::differences(&kerf, &best);
            _ = write!(table, "\n| {} {load} |", mix.name);
            for rival in &rivals {
                _ = write!(table, " {:.2} |", mean(rival));
            }
            let bound: Vec<f64> = all.iter().map(|jobs| pooled(mix, jobs, work)).collect();
            let (kerf, bound, reused) = (mean(&kerf), mean(&bound), mean(&reused));
            _ = write!(table, " **{kerf:.2}** | {} | {bound:.2} | {reused:.0} % |", numbers::text(&ahead));
        }
    }
    table
}

/// Accepted work against load, by policy, for the setting's first mix: a chart.
pub fn chart(setting: &Setting, title: &str, rules: &[Rule], seeds: &[u64], number: usize) -> String {
    let (mix, work) = (&setting.mixes[0], &setting.work);
    let loads: Vec<f64> = (6..=14).map(|tenth| f64::from(tenth) / 10.0).collect();
    let all: Vec<Vec<Vec<Job>>> =
        loads.iter().map(|&load| seeds.iter().map(|&seed| jobs(mix, load, number, seed)).collect()).collect();
    let line = |of: &dyn Fn(&[Job]) -> f64| -> Vec<(f64, f64)> {
        let mean = |runs: &Vec<Vec<Job>>| runs.iter().map(|jobs| of(jobs)).sum::<f64>() / runs.len() as f64;
        loads.iter().copied().zip(all.iter().map(mean)).collect()
    };
    let mut lines = vec![("one pooled server".to_owned(), line(&|jobs| pooled(mix, jobs, work)))];
    let kerf = |jobs: &[Job]| {
        run(&mut Engine::new(&setting.snapshot, Moving { moves: 0, share: 0.0 }), jobs, work).work
    };
    lines.push(("Kerf".to_owned(), line(&kerf)));
    for &rule in rules {
        let rival = |jobs: &[Job]| run(&mut Rival::new(rule, &setting.snapshot), jobs, work).work;
        lines.push((rule.name().to_owned(), line(&rival)));
    }
    let ticks = [loads.clone(), (4..=10).map(|ten| f64::from(10 * ten)).collect()];
    Chart { title, axes: ["load", "accepted work, %"], ticks, logarithmic: false, lines }.svg()
}

/// Accepted work with moves, by their number and by the share of jobs that may be moved: a table. What the moves gain is
/// worked out by seed, the same jobs without moves beside those with them.
pub fn with_moves(setting: &Setting, seeds: &[u64], number: usize) -> String {
    let work_of = &setting.work;
    let mut table =
        "| mix, load 1 | at most | movable | accepted work | gained by moves | moves in 100 arrivals | \
        pooled − accepted |"
            .to_owned();
    for kind in &setting.snapshot.requests {
        _ = write!(table, " {} |", kind.id);
    }
    table += "\n|---|";
    table += &"---|".repeat(6 + work_of.len());
    let mean = |values: &[f64]| numbers::mean(values).0;
    for mix in &setting.mixes {
        let all: Vec<Vec<Job>> = seeds.iter().map(|&seed| jobs(mix, 1.0, number, seed)).collect();
        let bound: Vec<f64> = all.iter().map(|jobs| pooled(mix, jobs, work_of)).collect();
        let mut without = Vec::new();
        for (moves, share) in [(0, 1.0), (1, 1.0), (2, 1.0), (4, 1.0), (2, 0.5), (2, 0.2)] {
            let (mut work, mut moved, mut by_kind) = (Vec::new(), Vec::new(), vec![0.0; work_of.len()]);
            for jobs in &all {
                let mut engine = Engine::new(&setting.snapshot, Moving { moves, share });
                let result = run(&mut engine, jobs, work_of);
                work.push(result.work);
                let moves =
                    engine.with_moves.iter().enumerate().map(|(n, times)| n as u64 * times).sum::<u64>();
                moved.push(100.0 * moves as f64 / jobs.len() as f64);
                for (sum, share) in by_kind.iter_mut().zip(result.by_kind) {
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
            for share in by_kind {
                _ = write!(table, " {share:.1} |");
            }
        }
    }
    table
}
