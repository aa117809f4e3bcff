//! The simulated hardware for people: makes a node, shows it, breaks it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use kerf_sim::signals::Signals;
use kerf_sim::{GpuSpec, Model, NodeSpec, NvmlError, Occurrence, SimNode};

/// Simulated NVIDIA hardware below a driver root.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The driver root of the node.
    #[arg(long, env = "KERF_SIM_ROOT", global = true)]
    root: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the GPU models.
    Models,
    /// Makes a node (needs root, for device nodes).
    Create {
        /// Name of the node; serial numbers and UUIDs derive from it.
        #[arg(long, default_value = "node")]
        name: String,
        /// Starts with all GPUs in MIG mode.
        #[arg(long)]
        mig: bool,
        /// The GPUs: a model id or the path of a model file, with `:COUNT` for several (`a100-40:8`).
        #[arg(required = true)]
        gpus: Vec<String>,
    },
    /// Shows GPUs, instances, clients and faults.
    Show {
        /// The whole state as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Lets an NVML function fail.
    Fault {
        /// Name without version suffix, such as `nvmlDeviceCreateGpuInstanceWithPlacement`.
        call: String,
        /// Name or number of the error, such as `IN_USE`.
        error: String,
        /// Only calls on this GPU.
        #[arg(long)]
        gpu: Option<usize>,
        /// Strikes so often; without it, until `clear`.
        #[arg(long)]
        times: Option<u32>,
        /// The call has its effect before it fails.
        #[arg(long)]
        after: bool,
    },
    /// Makes an NVML function slow.
    Slow { call: String, millis: u64 },
    /// Ends all faults and delays.
    Clear,
    /// Runs the kernel driver, which CUDA programs need, until SIGTERM.
    Kernel,
    /// Reboots the machine as far as the GPUs are concerned.
    Reboot,
    /// Unloads and loads the driver.
    ReloadDriver,
    /// Reports an XID error.
    Xid {
        gpu: usize,
        code: u64,
        #[arg(long)]
        gi: Option<u32>,
    },
    /// Lets a GPU fall off the bus.
    Lose { gpu: usize },
    /// Brings a lost GPU back.
    Recover { gpu: usize },
    /// Leaves a GPU instance without a compute instance.
    Orphan {
        gpu: usize,
        profile: String,
        #[arg(long)]
        start: Option<u32>,
    },
    /// Keeps a monitor's handle to a GPU or to an instance; prints its number.
    Hold {
        gpu: usize,
        #[arg(long)]
        gi: Option<u32>,
    },
    /// Ends what `hold` began.
    Release { hold: u64 },
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kerf-sim: {error}");
            ExitCode::from(1)
        }
    }
}

fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    if matches!(args.command, Command::Models) {
        return models();
    }
    let root = args.root.ok_or("which node? give --root DIR or set KERF_SIM_ROOT")?;
    if let Command::Create { name, mig, gpus } = args.command {
        let mut specs = Vec::new();
        for gpu in &gpus {
            let (model, count) = match gpu.rsplit_once(':') {
                Some((model, count)) => {
                    (model, count.parse().map_err(|_| format!("{gpu}: {count} is no count"))?)
                }
                None => (gpu.as_str(), 1),
            };
            specs.extend(vec![GpuSpec { mig, ..GpuSpec::new(model) }; count]);
        }
        let node = SimNode::create(&root, &NodeSpec::new(&name, specs))?;
        println!("{}", node.library().display());
        return Ok(());
    }
    let node = SimNode::open(&root)?;
    match args.command {
        Command::Models | Command::Create { .. } => {}
        Command::Show { json: true } => println!("{}", serde_json::to_string_pretty(&*node.state()?)?),
        Command::Show { json: false } => show(&node)?,
        Command::Fault { call, error, gpu, times, after } => {
            let error =
                error.parse().ok().and_then(NvmlError::from_code).or_else(|| NvmlError::from_name(&error));
            let names = || NvmlError::ALL.iter().map(|e| e.name()).collect::<Vec<_>>().join(", ");
            let error = error.ok_or_else(|| format!("no such NVML error; known are {}", names()))?;
            let occurrence = times.map_or(Occurrence::Persistent, Occurrence::Times);
            match after {
                true => node.inject_after(&call, error, occurrence, gpu)?,
                false => node.inject(&call, error, occurrence, gpu)?,
            }
        }
        Command::Slow { call, millis } => node.slow(&call, Duration::from_millis(millis))?,
        Command::Clear => node.clear_faults()?,
        Command::Kernel => {
            let signals = Signals::install(false)?;
            node.run_kernel()?;
            signals.wait(None);
            node.stop_kernel();
        }
        Command::Reboot => node.reboot()?,
        Command::ReloadDriver => node.reload_driver()?,
        Command::Xid { gpu, code, gi } => node.xid(gpu, gi, code)?,
        Command::Lose { gpu } => node.lose_gpu(gpu)?,
        Command::Recover { gpu } => node.recover_gpu(gpu)?,
        Command::Orphan { gpu, profile, start } => {
            println!("GPU instance {}", node.orphan_gpu_instance(gpu, &profile, start)?);
        }
        Command::Hold { gpu, gi } => println!("{}", node.hold(gpu, gi)?.keep()),
        Command::Release { hold } => node.release(hold)?,
    }
    Ok(())
}

fn models() -> Result<(), Box<dyn std::error::Error>> {
    for id in Model::ids() {
        let model = Model::named(id)?;
        let profiles = model.mig.as_ref().map(|mig| {
            let inferred = mig.profiles.iter().filter(|profile| profile.inferred).count();
            let names: Vec<_> = mig.profiles.iter().map(|profile| profile.name.as_str()).collect();
            let note = if inferred > 0 { format!("  ({inferred} rows inferred)") } else { String::new() };
            format!("{}{note}", names.join(" "))
        });
        println!("{id:24} {:50} {}", model.product, profiles.unwrap_or_else(|| "no MIG".into()));
    }
    Ok(())
}

fn show(node: &SimNode) -> Result<(), Box<dyn std::error::Error>> {
    let state = node.state()?;
    println!("node {}, driver {}", state.node, state.driver.version);
    let instances = node.instances()?;
    for (index, gpu) in state.gpus.iter().enumerate() {
        let on = |on: bool| if on { "on" } else { "off" };
        let lost = if gpu.lost { ", LOST" } else { "" };
        let mode = match gpu.mig_current == gpu.mig_pending {
            true => on(gpu.mig_current).to_owned(),
            false => format!("{} (pending {})", on(gpu.mig_current), on(gpu.mig_pending)),
        };
        println!("GPU {index} {} {} MIG {mode}{lost}", gpu.model, gpu.uuid);
        for instance in instances.iter().filter(|instance| instance.gpu == index) {
            let place = format!("{}:{}", instance.start, instance.size);
            let uuids: Vec<_> = instance.compute.iter().map(|(_, uuid)| uuid.as_str()).collect();
            println!("  GI {:2} {:>5} {:16} {}", instance.gi, place, instance.profile, uuids.join(" "));
        }
    }
    for client in node.clients()? {
        println!("process {}: GPUs {:?}, capabilities {:?}", client.pid, client.gpus, client.capabilities);
    }
    for hold in &state.holds {
        println!("hold {}: GPU {} GI {:?}", hold.id, hold.gpu, hold.gpu_instance);
    }
    for fault in &state.faults {
        println!("fault {}: {:?} {:?}, left {:?}", fault.call, fault.when, fault.action, fault.left);
    }
    Ok(())
}
