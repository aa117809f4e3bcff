//! One process of a tenant: starts CUDA, takes what it is told to take, says in one line how that went, and keeps it until
//! its standard input ends. Each try has processes of its own, as CUDA reads its environment once.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cuda::{Cuda, Failure};

/// Memory is taken in pieces of this size.
const PIECE: u64 = 64 << 20;

/// Blocks of the kernel that shows where it runs: several for each place on the largest GPU.
const BLOCKS: u16 = 4096;

/// How long a process may take to say how it went. Starting CUDA on eight GPUs takes seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a process is to do.
#[derive(Clone, Debug, Default, Args)]
pub struct Plan {
    /// Only looks at the device, without a context.
    #[arg(long)]
    pub look: bool,
    /// Runs a kernel, to see on how many multiprocessors.
    #[arg(long)]
    pub kernel: bool,
    /// Allocates until it has so many bytes, or is refused.
    #[arg(long, default_value_t = 0)]
    pub take: u64,
}

/// What a process said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    pub device: String,
    /// Multiprocessors that the device says it has.
    pub multiprocessors: u32,
    /// Multiprocessors that a kernel's blocks ran on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran_on: Option<u32>,
    /// Free and total memory before anything was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<(u64, u64)>,
    /// Bytes that it was granted.
    pub granted: u64,
    /// How the last allocation failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Failure>,
    /// The call that stopped it before it could do what it was to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
}

/// How a process went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Said(Said),
    /// It ended without a word, in this way.
    Ended(String),
}

/// Does it: the process's whole life.
pub fn run(plan: &Plan, library: &Path) -> Result<()> {
    let mut said = Said::default();
    // What was taken is kept by the process, not by this value.
    let cuda = act(plan, library, &mut said).map_err(|failure| said.failed = Some(failure));
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(&said)?)?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(cuda);
    Ok(())
}

fn act(plan: &Plan, library: &Path, said: &mut Said) -> Result<Cuda, Failure> {
    let cuda = Cuda::init(library)?;
    said.device = cuda.name()?;
    said.multiprocessors = cuda.multiprocessors()?;
    if plan.look {
        return Ok(cuda);
    }
    cuda.create_context()?;
    said.memory = Some(cuda.memory()?);
    if plan.kernel {
        let mut places = cuda.where_blocks_run(BLOCKS)?;
        places.sort_unstable();
        places.dedup();
        said.ran_on = u32::try_from(places.len()).ok();
    }
    while said.granted < plan.take {
        let piece = PIECE.min(plan.take - said.granted);
        match cuda.allocate(usize::try_from(piece).unwrap_or(usize::MAX)) {
            Ok(_) => said.granted += piece,
            Err(failure) => {
                said.refused = Some(failure);
                break;
            }
        }
    }
    Ok(cuda)
}

/// A change of a process's environment: set to a value, or taken away.
pub type Change<'a> = (&'a str, Option<&'a str>);

/// A process that has said how it went, and keeps what it has until this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pub outcome: Outcome,
}

impl Drop for Process {
    fn drop(&mut self) {
        // By the end of its input it would end too; a program that hangs in the driver would not.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts so many processes with the same plan and waits until each has said how it went.
pub fn start(plan: &Plan, library: &Path, changes: &[Change<'_>], count: usize) -> Result<Vec<Process>> {
    let program = std::env::current_exe().context("failed to find the running program")?;
    let mut children = Vec::new();
    for _ in 0..count {
        children.push(spawn(&program, plan, library, changes)?);
    }
    Ok(children.into_iter().map(listen).collect())
}

fn spawn(program: &PathBuf, plan: &Plan, library: &Path, changes: &[Change<'_>]) -> Result<Child> {
    let Plan { look, kernel, take } = plan;
    let mut command = Command::new(program);
    command.arg("probe").arg("--library").arg(library).args(["--take", &take.to_string()]);
    command.args(look.then_some("--look")).args(kernel.then_some("--kernel"));
    for (name, value) in changes {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().with_context(|| format!("failed to start {}", program.display()))
}

fn listen(mut child: Child) -> Process {
    let (told, line) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(output).read_line(&mut line);
            let _ = told.send(line);
        });
    }
    let outcome = match line.recv_timeout(PATIENCE) {
        Ok(line) => match serde_json::from_str(&line) {
            Ok(said) => Outcome::Said(said),
            Err(_) => Outcome::Ended(end_of(&mut child)),
        },
        Err(_) => Outcome::Ended(format!("it gave no answer within {} s", PATIENCE.as_secs())),
    };
    Process { child, outcome }
}

fn end_of(child: &mut Child) -> String {
    match child.wait() {
        Ok(status) => match status.signal() {
            Some(signal) => format!("it was ended by signal {signal}"),
            None => format!("it ended by itself ({status})"),
        },
        Err(error) => error.to_string(),
    }
}
