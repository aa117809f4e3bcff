//! Pods a second on a large cluster: Kerf, what Kerf's writes alone would take, and kube-scheduler on its own, one after the
//! other on this machine. Prints Markdown.

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use kerf_e2e::scale::floor::{self, Floor};
use kerf_e2e::scale::kerf::{Large, Size};
use kerf_e2e::scale::native;
use kerf_e2e::scale::phase::Measured;

/// Measures how many pods a second are bound on a large cluster of nodes that are played.
#[derive(Debug, Parser)]
struct Args {
    #[arg(long, default_value_t = 500)]
    nodes: usize,
    /// Pods of Kerf's, and of kube-scheduler's on whole GPUs
    #[arg(long, default_value_t = 4000)]
    pods: usize,
    /// Pods of kube-scheduler's on partitionable devices
    #[arg(long, default_value_t = 600)]
    native_pods: usize,
    /// Requests of the floor's script at a time
    #[arg(long, default_value_t = 64)]
    at_once: usize,
    /// What is run beside Kerf
    #[arg(long, value_delimiter = ',', default_value = "floor,whole,partitionable")]
    beside: Vec<Beside>,
    /// What the operator logs, and the file that its log is copied to
    #[arg(long, default_value = "info")]
    log: String,
    #[arg(long)]
    log_to: Option<std::path::PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Beside {
    Floor,
    Whole,
    Partitionable,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let size = Size { nodes: args.nodes, pods: args.pods, log: args.log.clone() };
    let mut rows: Vec<(String, Measured)> = Vec::new();
    let (before, kerf) = {
        let large = Large::start(&size).await.context("Kerf's cluster")?;
        let measured = large.measure(&size).await;
        if let Some(file) = &args.log_to {
            std::fs::write(file, large.log("operator.log")?)?;
        }
        if measured.is_err() {
            large.keep_logs();
        }
        let measured = measured?;
        large.check(args.pods).await?;
        measured
    };
    eprintln!("Kerf: {:.1} pods/s", kerf.rate());
    let mut notes = String::new();
    if args.beside.contains(&Beside::Floor) {
        let Floor { measured, sent, refused } = floor::replay(&before, &kerf, args.at_once).await?;
        eprintln!("floor: {:.1} pods/s", measured.rate());
        notes += &format!(
            "\nThe floor's script sent {sent} requests, {} at a time; {refused} were refused. Kerf is at {:.2} of it \
             ({:.2} from the first binding on).\n",
            args.at_once,
            kerf.rate() / measured.rate(),
            kerf.rate_after_first() / measured.rate_after_first(),
        );
        rows.push(("floor: Kerf's writes alone".to_owned(), measured));
    }
    if args.beside.contains(&Beside::Partitionable) {
        let like = before.gpu_nodes.first().context("there are no nodes")?;
        let measured = native::partitionable(args.nodes, args.native_pods, like).await?;
        eprintln!("partitionable devices: {:.1} pods/s", measured.rate());
        notes += &format!(
            "\nKerf is at {:.1} times kube-scheduler on partitionable devices.\n",
            kerf.rate() / measured.rate()
        );
        rows.push(("kube-scheduler, MIG from partitionable devices".to_owned(), measured));
    }
    if args.beside.contains(&Beside::Whole) {
        let measured = native::whole_gpus(args.nodes, args.pods).await?;
        eprintln!("whole GPUs: {:.1} pods/s", measured.rate());
        rows.push(("kube-scheduler, a whole GPU a pod".to_owned(), measured));
    }
    let per_pod = kerf.writes_per_pod();
    let refused = kerf.writes.iter().filter(|write| write.code >= 300).count();
    rows.insert(0, ("Kerf".to_owned(), kerf));

    println!("\n### {} nodes × 8 GPUs\n", args.nodes);
    println!("| | pods | pods/s | from the first binding on |\n|---|---|---|---|");
    for (name, row) in &rows {
        println!("| {name} | {} | {:.1} | {:.1} |", row.pods, row.rate(), row.rate_after_first());
    }
    println!("{notes}");
    println!("### Processor time a pod (ms), most memory (MB)\n");
    println!("| | {} |\n|---|{}", names(&rows).join(" | "), "---|".repeat(rows.len()));
    let mut processes: Vec<&str> = Vec::new();
    for usage in rows.iter().flat_map(|(_, row)| &row.processes) {
        if !processes.contains(&usage.name.as_str()) {
            processes.push(&usage.name);
        }
    }
    for process in processes {
        let cells: Vec<String> = rows
            .iter()
            .map(|(_, row)| {
                let usage = row.processes.iter().find(|usage| usage.name == process);
                usage.map_or_else(
                    || "–".to_owned(),
                    |usage| format!("{:.2}, {:.0}", usage.seconds * 1000.0 / row.pods as f64, usage.peak),
                )
            })
            .collect();
        println!("| {process} | {} |", cells.join(" | "));
    }
    let all: Vec<String> = rows
        .iter()
        .map(|(_, row)| {
            let seconds: f64 = row.processes.iter().map(|usage| usage.seconds).sum();
            format!("{:.2}", seconds * 1000.0 / row.pods as f64)
        })
        .collect();
    println!("| all | {} |", all.join(" | "));
    println!("\n### API writes a pod\n\n{refused} of Kerf's cluster's were refused.\n");
    println!("| writer | write | a pod |\n|---|---|---|");
    let all: f64 = per_pod.values().sum();
    for ((writer, write), count) in per_pod {
        println!("| {writer} | {write} | {count:.3} |");
    }
    println!("| all | | {all:.2} |");
    Ok(())
}

fn names(rows: &[(String, Measured)]) -> Vec<&str> {
    rows.iter().map(|(name, _)| name.as_str()).collect()
}
