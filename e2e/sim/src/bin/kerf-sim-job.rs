//! A program that uses GPUs, for containers on a simulated node: it does with the device nodes in its `/dev`
//! what a CUDA program does, opens them and keeps them open.
//!
//! Prints one line of JSON (what it runs on, its environment, what it sees), then stays until its time is up or
//! SIGTERM. Exit status 3: there is no GPU for it.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kerf_sim::caps::Capability;
use kerf_sim::cuda;
use kerf_sim::signals::Signals;
use kerf_sim::tree::{CAPS_MAJOR, NVIDIA_MAJOR};
use serde::Serialize;

/// Runs on the GPUs in /dev as a CUDA program would.
#[derive(Parser)]
struct Args {
    /// Ends by itself after so many seconds; without it, never.
    #[arg(long)]
    seconds: Option<f64>,
    /// Goes on after SIGTERM, as a program that hangs does.
    #[arg(long)]
    ignore_sigterm: bool,
    /// Opens only the capability nodes of instances, not the GPU: a monitor with a handle, not a program.
    #[arg(long)]
    handle_only: bool,
    /// Opens only the GPUs, neither `nvidia-uvm` nor capabilities: a monitor of whole GPUs, not a program.
    #[arg(long, conflicts_with = "handle_only")]
    monitor: bool,
    /// Runs without a GPU instead of exiting with status 3.
    #[arg(long)]
    allow_none: bool,
    /// Where device nodes lie.
    #[arg(long, default_value = "/dev")]
    dev: PathBuf,
}

/// The line that is printed.
#[derive(Serialize)]
struct Report {
    pid: u32,
    hostname: String,
    /// GPU, GPU instance and compute instance of each MIG device, from the capability minors.
    mig_devices: Vec<MigDevice>,
    /// Device minors of the GPUs without a visible instance: used as a whole.
    whole_gpus: Vec<u32>,
    /// All device nodes of the driver in sight.
    nodes: Vec<String>,
    nvidia_visible_devices: Option<String>,
    cuda_visible_devices: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct MigDevice {
    /// Device minor.
    gpu: u32,
    gi: u32,
    ci: u32,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(code) => code,
        Err(message) => {
            eprintln!("kerf-sim-job: {message}");
            ExitCode::from(1)
        }
    }
}

fn run(args: &Args) -> Result<ExitCode, String> {
    let nodes = cuda::nodes(&args.dev);
    let (gpus, capabilities) = cuda::sights(&nodes);
    let mig_devices: Vec<MigDevice> = capabilities
        .iter()
        .filter_map(|capability| match *capability {
            Capability::ComputeInstance { gpu, gi, ci } => Some(MigDevice { gpu, gi, ci }),
            _ => None,
        })
        // Without the GPU's node, or the GPU instance's capability, CUDA sees no device.
        .filter(|device| gpus.contains(&device.gpu))
        .filter(|device| capabilities.contains(&Capability::GpuInstance { gpu: device.gpu, gi: device.gi }))
        .collect();
    let whole_gpus: Vec<u32> =
        gpus.iter().copied().filter(|gpu| !capabilities.iter().any(|c| gpu_of(*c) == Some(*gpu))).collect();
    let report = Report {
        pid: std::process::id(),
        hostname: std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned(),
        nodes: nodes.iter().map(|node| node.path.display().to_string()).collect(),
        nvidia_visible_devices: std::env::var("NVIDIA_VISIBLE_DEVICES").ok(),
        cuda_visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
        mig_devices,
        whole_gpus,
    };
    let line = serde_json::to_string(&report).map_err(|e| format!("failed to write the report: {e}"))?;
    if report.mig_devices.is_empty() && report.whole_gpus.is_empty() && !args.allow_none && !args.handle_only
    {
        eprintln!("kerf-sim-job: no GPU and no MIG device in {}: {line}", args.dev.display());
        return Ok(ExitCode::from(3));
    }

    // Signals before the line: whoever has read it may send one.
    let signals = Signals::install(args.ignore_sigterm)?;
    let _open: Vec<File> = nodes
        .iter()
        .filter(|node| !args.handle_only || node.major == CAPS_MAJOR)
        .filter(|node| !args.monitor || node.major == NVIDIA_MAJOR)
        .map(|node| node.open().map_err(|e| format!("failed to open {}: {e}", node.path.display())))
        .collect::<Result<_, _>>()?;
    println!("{line}");
    std::io::stdout().flush().map_err(|e| format!("failed to write the report: {e}"))?;
    signals.wait(args.seconds);
    Ok(ExitCode::SUCCESS)
}

fn gpu_of(capability: Capability) -> Option<u32> {
    match capability {
        Capability::GpuInstance { gpu, .. } | Capability::ComputeInstance { gpu, .. } => Some(gpu),
        Capability::Config | Capability::Monitor => None,
    }
}
