//! Prints the tables of docs/benchmarks.md on the decision engine: `cargo xtask bench engine`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Parser;
use kerf_planner_bench::online::{GPUS, NODES};
use kerf_planner_bench::rivals::Rule;
use kerf_planner_bench::workload::{LOADS, one_model, three_models};
use kerf_planner_bench::{cycle, fleet, gangs, offline, online, openb, speed};

/// Measure the decision engine beside other policies and bounds, and print the tables of docs/benchmarks.md
#[derive(Parser)]
struct Arguments {
    /// Jobs of each run; the first fifth warms up
    #[arg(long, default_value_t = 60_000)]
    jobs: usize,
    /// Runs of each cell, with seeds counted from --first-seed
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// Print only this table: online, mixed, moves, offline, cycle, gangs or speed
    #[arg(long)]
    table: Option<String>,
    /// Print the table of shares on the openb trace instead, with its files (openb_node_list_gpu_node.csv and
    /// openb_pod_list_….csv) in this folder
    #[arg(long)]
    openb: Option<PathBuf>,
    /// Draw the charts into this folder instead
    #[arg(long)]
    charts: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let seeds: Vec<u64> = (arguments.first_seed..).take(arguments.seeds as usize).collect();
    if let Some(folder) = arguments.charts {
        return charts(&folder, &seeds, arguments.jobs);
    }
    if let Some(folder) = arguments.openb {
        println!("{}", openb::table(&folder, &seeds)?);
        return Ok(());
    }
    let wanted = |table: &str| arguments.table.as_deref().is_none_or(|only| only == table);
    let jobs = arguments.jobs;
    if wanted("online") {
        println!("{}", online::without_moves(&one_model(GPUS), Rule::ON_ONE_MODEL, &LOADS, &seeds, jobs));
    }
    if wanted("mixed") {
        println!("{}", online::without_moves(&three_models(NODES)?, &Rule::ALL, &LOADS, &seeds, jobs));
    }
    if wanted("moves") {
        println!("{}", online::with_moves(&one_model(GPUS), &seeds, jobs));
    }
    if wanted("offline") {
        println!("{}", offline::table(&one_model(offline::GPUS), &[0.0, 0.5], &seeds)?);
    }
    if wanted("cycle") {
        println!("{}", cycle::table(&cycle::SIZES)?);
    }
    if wanted("gangs") {
        println!("{}", gangs::table(&gangs::NODES)?);
    }
    if wanted("speed") {
        println!("{}", speed::table(&speed::NODES, &fleet::mixed()?));
    }
    Ok(())
}

fn charts(folder: &Path, seeds: &[u64], jobs: usize) -> Result<()> {
    let one = [Rule::BestFitBestStart, Rule::Hami, Rule::BestFit, Rule::FirstFit, Rule::Spread];
    let three = [Rule::LeastGiven, Rule::FirstFit, Rule::BestFitBestStart, Rule::Hami, Rule::Spread];
    let on_one = online::chart(&one_model(GPUS), "One model, uniform mix", &one, seeds, jobs);
    let on_three = online::chart(&three_models(NODES)?, "Three models, uniform mix", &three, seeds, jobs);
    let time = gangs::chart(&gangs::NODES, &speed::NODES, &fleet::mixed()?)?;
    let all = [
        ("accepted-one-model.svg", on_one),
        ("accepted-three-models.svg", on_three),
        ("time-by-gpus.svg", time),
    ];
    for (name, chart) in all {
        let path = folder.join(name);
        std::fs::write(&path, chart).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
