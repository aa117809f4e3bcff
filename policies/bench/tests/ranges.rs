//! Keeps the packing from getting worse unnoticed: accepted work and moves of short runs stay within the ranges of
//! `ranges.json`. The runs are the same on any machine; a tolerance leaves room for changes that only reshuffle.

use kerf_planner_bench::engine::{Engine, Moving};
use kerf_planner_bench::online::{GPUS, NODES, run};
use kerf_planner_bench::workload::{jobs, one_model, three_models};

/// Of each range: runs, and jobs of a run.
const SEEDS: u64 = 4;
const JOBS: usize = 6000;

#[derive(serde::Deserialize)]
struct Ranges {
    tolerance_points: f64,
    tolerance_moves: f64,
    runs: Vec<Range>,
}

#[derive(serde::Deserialize)]
struct Range {
    /// GPU models of the cluster: 1 or 3.
    models: u32,
    mix: String,
    load: f64,
    moves: u32,
    /// Accepted work in percent.
    work: f64,
    /// Moves in 100 arrivals.
    moved: f64,
}

#[test]
fn accepted_work_and_moves_are_in_range() {
    let ranges: Ranges = serde_json::from_str(include_str!("ranges.json")).expect("ranges.json");
    let (one, three) = (one_model(GPUS), three_models(NODES).expect("three models"));
    let mut off = Vec::new();
    for range in &ranges.runs {
        let setting = if range.models == 1 { &one } else { &three };
        let mix = setting.mixes.iter().find(|mix| mix.name == range.mix);
        let mix = mix.unwrap_or_else(|| panic!("no mix {}", range.mix));
        let (mut work, mut moved) = (0.0, 0.0);
        for seed in 1..=SEEDS {
            let jobs = jobs(mix, range.load, JOBS, seed);
            let mut engine = Engine::new(&setting.snapshot, Moving { moves: range.moves, share: 1.0 });
            work += run(&mut engine, &jobs, &setting.work).work / SEEDS as f64;
            let moves = engine.with_moves.iter().enumerate().map(|(n, times)| n as u64 * times).sum::<u64>();
            moved += 100.0 * moves as f64 / (JOBS as u64 * SEEDS) as f64;
        }
        let line = format!(
            "{} model(s), {} {} moves {}: work {work:.2}, moved {moved:.2}",
            range.models, range.mix, range.load, range.moves
        );
        println!("{line}");
        if (work - range.work).abs() > ranges.tolerance_points
            || (moved - range.moved).abs() > ranges.tolerance_moves
        {
            off.push(format!("{line}, expected {} and {}", range.work, range.moved));
        }
    }
    assert!(off.is_empty(), "out of range:\n{}", off.join("\n"));
}
