//! A CUDA program for containers on a simulated node: connects to MPS or goes without, allocates memory, stays. It can
//! be as greedy as a tenant can be.
//!
//! Prints a line of JSON per event: `started`, `failed`, `granted`, `refused`, `terminated`. Exit status 3: CUDA could not
//! be started; 4: an allocation was refused; 5: its contexts were ended.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::Parser;
use kerf_sim::cuda::{Cuda, Place};
use kerf_sim::kernel::protocol::CudaError;
use kerf_sim::signals::Signals;
use serde_json::{Value, json};

/// Allocates GPU memory by CUDA.
#[derive(Parser)]
struct Args {
    /// The device, as CUDA counts.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Allocates so much, such as `512Mi`, `12Gi` or a number of bytes; several times, one after the other.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    allocate: Vec<u64>,
    /// Then allocates pieces of this size until one is refused.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    fill: Option<u64>,
    /// Tries again so many milliseconds after `--fill` was refused, for ever.
    #[arg(long, value_name = "MILLIS", requires = "fill")]
    again: Option<u64>,
    /// Goes on when an allocation is refused.
    #[arg(long)]
    keep_going: bool,
    /// Then makes the GPU fault.
    #[arg(long)]
    fault: bool,
    /// So many processes do the same.
    #[arg(long, default_value_t = 1)]
    processes: u32,
    /// Sets a variable before CUDA starts.
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Takes a variable away before CUDA starts.
    #[arg(long, value_name = "NAME")]
    unset: Vec<String>,
    /// Ends so many seconds after its allocations; without it, at SIGTERM.
    #[arg(long)]
    seconds: Option<f64>,
    /// Is one of the processes.
    #[arg(long, hide = true)]
    worker: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = if args.worker { work(&args) } else { start(&args) };
    result.unwrap_or_else(|message| {
        eprintln!("kerf-sim-cuda: {message}");
        ExitCode::from(1)
    })
}

fn size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        _ => return Err(format!("{text}: {unit} is not Ki, Mi or Gi")),
    };
    number.parse::<u64>().map(|number| number << shift).map_err(|e| format!("{text}: {e}"))
}

/// Starts the workers with the wanted environment; a single one takes this process's place.
fn start(args: &Args) -> Result<ExitCode, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let command = || {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg("--worker");
        args.unset.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.envs(args.set.iter().map(|pair| pair.split_once('=').unwrap_or((pair, ""))));
        command
    };
    if args.processes == 1 {
        return Err(format!("failed to start anew: {}", command().exec()));
    }
    let signals = Signals::install(false)?;
    let workers = (0..args.processes).map(|_| command().spawn()).collect::<Result<Vec<_>, _>>();
    let mut workers = workers.map_err(|e| format!("failed to start a worker: {e}"))?;
    let mut worst = 0;
    while !workers.is_empty() {
        if signals.wait(Some(0.02)) {
            // They block the signal as this process does, and are not told of it by anybody else.
            for worker in &mut workers {
                let _ = worker.kill();
            }
        }
        let mut running = Vec::new();
        for mut worker in workers {
            match worker.try_wait().map_err(|e| e.to_string())? {
                Some(status) => worst = worst.max(status.code().unwrap_or(0)),
                None => running.push(worker),
            }
        }
        workers = running;
    }
    Ok(ExitCode::from(u8::try_from(worst).unwrap_or(1)))
}

const FAILED: u8 = 3;
const REFUSED: u8 = 4;
const TERMINATED: u8 = 5;
/// How often a program that only waits makes a call, by which it finds that it was ended.
const CALL_SECONDS: f64 = 0.05;

fn say(event: &str, mut what: Value) {
    what["event"] = event.into();
    what["pid"] = std::process::id().into();
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{what}").and_then(|()| out.flush());
}

fn work(args: &Args) -> Result<ExitCode, String> {
    let signals = Signals::install(false)?;
    let mut program = match Program::start(args.device) {
        Ok(program) => program,
        Err(error) => {
            say("failed", json!({ "error": error.name() }));
            return Ok(ExitCode::from(FAILED));
        }
    };
    match run(args, &mut program, signals) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(CudaError::OutOfMemory) => Ok(ExitCode::from(REFUSED)),
        Err(error) => {
            say("terminated", json!({ "error": error.name(), "allocated": program.allocated }));
            Ok(ExitCode::from(TERMINATED))
        }
    }
}

fn run(args: &Args, program: &mut Program, signals: Signals) -> Result<(), CudaError> {
    for bytes in &args.allocate {
        program.allocate(*bytes, args.keep_going)?;
    }
    while let Some(bytes) = args.fill {
        if !program.allocate(bytes, true)? {
            match args.again {
                Some(millis) if !signals.wait(Some(millis as f64 / 1000.0)) => continue,
                Some(_) => return Ok(()),
                None if args.keep_going => break,
                None => return Err(CudaError::OutOfMemory),
            }
        }
    }
    if args.fault {
        program.cuda.fault(args.device)?;
    }
    let mut left = args.seconds.unwrap_or(f64::INFINITY);
    while left > 0.0 && !signals.wait(Some(left.min(CALL_SECONDS))) {
        left -= CALL_SECONDS;
        program.cuda.memory_info(program.device)?;
    }
    Ok(())
}

struct Program {
    cuda: Cuda,
    device: usize,
    allocated: u64,
}

impl Program {
    fn start(device: usize) -> Result<Program, CudaError> {
        let mut cuda = Cuda::init(&Place::find())?;
        let (free, total) = cuda.memory_info(device)?;
        let devices: Vec<Value> = cuda
            .devices()
            .iter()
            .map(|usable| json!({ "uuid": usable.device.uuid, "sms": usable.sms, "pinned": usable.pinned }))
            .collect();
        let mps = cuda.under_mps();
        say("started", json!({ "mps": mps, "devices": devices, "free": free, "total": total }));
        Ok(Program { cuda, device, allocated: 0 })
    }

    /// Whether it was granted. A refusal is an error unless the program is to go on.
    fn allocate(&mut self, bytes: u64, keep_going: bool) -> Result<bool, CudaError> {
        let outcome = self.cuda.allocate(self.device, bytes);
        if outcome.is_ok() {
            self.allocated += bytes;
        }
        let report = |cuda: &mut Cuda, device, allocated| {
            let (free, total) = cuda.memory_info(device)?;
            Ok(json!({ "bytes": bytes, "allocated": allocated, "free": free, "total": total }))
        };
        let what: Result<Value, CudaError> = report(&mut self.cuda, self.device, self.allocated);
        match outcome {
            Ok(()) => say("granted", what?),
            Err(CudaError::OutOfMemory) => {
                let mut what = what?;
                what["error"] = CudaError::OutOfMemory.name().into();
                say("refused", what);
                if !keep_going {
                    return Err(CudaError::OutOfMemory);
                }
            }
            Err(error) => return Err(error),
        }
        Ok(outcome.is_ok())
    }
}
