//! Verifies on a machine with a GPU what no simulation can prove: that the limits of a share hold. It tries, from inside a
//! share, what docs/isolation.md says that a tenant may try, and prints that page's table with what it found.
//!
//! ```text
//!  job: GpuNode ─▶ cluster: the pod's own share      check: one try after the other ─▶ probe: processes, as a tenant's
//!          ▲                                           │                                  │ dlopen
//!          └──── condition SharesVerified ◀── tries: what the outcomes show               ▼
//!                                              (pure)                                  libcuda.so.1
//! ```
//!
//! Exit status 0: all that is promised holds; 1: something does not; 2: something could not be tried, or the result not
//! written.

mod beside;
mod check;
mod cluster;
mod cuda;
mod probe;
mod tries;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::gpu_node::Isolation;

use crate::beside::Beside;
use crate::check::Check;
use crate::tries::{Report, Share};

/// Verifies on real hardware that the limits of shares hold
#[derive(Parser)]
#[command(name = "kerf-hardware")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// The driver's CUDA library
    #[arg(long, global = true, default_value = "libcuda.so.1")]
    library: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// In a pod with a share of Kerf's: prints the table, and writes the condition SharesVerified of the node's GpuNode
    Job {
        #[arg(long, env = "NODE_NAME")]
        node: String,
        #[arg(long, env = "POD_UID")]
        pod_uid: String,
        /// Folder in common with the second container
        #[arg(long)]
        beside: Option<PathBuf>,
    },
    /// The second container of the pod, with the same share
    Beside {
        #[arg(long)]
        folder: PathBuf,
    },
    /// Anywhere inside limits that somebody else has set: prints the table
    Check {
        /// The limit on memory, such as 8Gi
        #[arg(long, value_parser = bytes)]
        memory: u64,
        /// The limit on multiprocessors, in percent of the GPU's
        #[arg(long)]
        percent: u32,
        /// Who limits memory: driver or process
        #[arg(long, value_parser = isolation)]
        isolation: Isolation,
        /// Folder in common with a second container
        #[arg(long)]
        beside: Option<PathBuf>,
    },
    #[command(hide = true)]
    Probe(probe::Plan),
}

/// Something could not be tried.
const NOT_TRIED: u8 = 2;

fn main() -> ExitCode {
    run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("kerf-hardware: {error:#}");
        ExitCode::from(NOT_TRIED)
    })
}

fn run(Cli { command, library }: Cli) -> Result<ExitCode> {
    match command {
        Command::Probe(plan) => probe::run(&plan, &library).map(|()| ExitCode::SUCCESS),
        Command::Beside { folder } => beside::serve(&folder, &library).map(|()| ExitCode::SUCCESS),
        Command::Check { memory, percent, isolation, beside } => {
            let share = Share { memory, percent, isolation };
            let beside = beside.as_deref().map(Beside::new);
            let report = check::run(&Check { share: &share, library: &library, beside, subject: None })?;
            print!("{}", report.table());
            Ok(code(&report))
        }
        Command::Job { node, pod_uid, beside } => {
            // Whatever happens here, the second container is to end.
            let beside = beside.as_deref().map(Beside::new);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(job(&node, &pod_uid, beside, &library))
        }
    }
}

async fn job(node: &str, pod_uid: &str, beside: Option<Beside>, library: &Path) -> Result<ExitCode> {
    let nodes = cluster::nodes().await?;
    let found = nodes.get(node).await.with_context(|| format!("failed to read GpuNode {node}"))?;
    let outcome = cluster::share_of(&found, pod_uid).and_then(|(share, subject)| {
        check::run(&Check { share: &share, library, beside, subject: Some(subject) })
    });
    match &outcome {
        Ok(report) => print!("{}", report.table()),
        Err(error) => eprintln!("nothing could be tried: {error:#}"),
    }
    let condition = cluster::result(&outcome, found.status.as_ref(), Timestamp::now());
    println!("\n{} {}: {}", condition.type_, condition.status, condition.message);
    cluster::write(&nodes, node, &condition).await?;
    Ok(outcome.as_ref().map_or(ExitCode::from(NOT_TRIED), code))
}

fn code(report: &Report) -> ExitCode {
    match report.holds() {
        Some(true) => ExitCode::SUCCESS,
        Some(false) => ExitCode::from(1),
        None => ExitCode::from(NOT_TRIED),
    }
}

/// A number of bytes, with or without a binary suffix.
fn bytes(text: &str) -> Result<u64, String> {
    let (number, suffix) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor = match suffix {
        "" => 1,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return Err(format!("{text}: what follows the number is neither Mi nor Gi")),
    };
    let value: u64 = number.parse().map_err(|error| format!("{text}: {error}"))?;
    value.checked_mul(factor).ok_or_else(|| format!("{text} is too much"))
}

fn isolation(text: &str) -> Result<Isolation, String> {
    [Isolation::Process, Isolation::Driver]
        .into_iter()
        .find(|isolation| isolation.word() == text)
        .ok_or_else(|| format!("{text} is neither driver nor process"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_have_a_binary_suffix() {
        assert_eq!(["8Gi", "512Mi", "7"].map(bytes), [Ok(8 << 30), Ok(512 << 20), Ok(7)]);
        for wrong in ["8GB", "Gi", "", "99999999999Gi"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
