//! Kerf's chores, each a subcommand of `cargo xtask`.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use clap::{Parser, Subcommand};
use kerf_toolchain::Toolchain;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Kerf's chores")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run Kerf on a cluster of this machine with simulated GPUs, and show GPUs reshape (needs root)
    Demo {
        /// Leave the cluster running at the end, until Enter or Ctrl-C
        #[arg(long)]
        keep: bool,
        /// Passed on to the demo
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Run all tests, those on real clusters included (needs root)
    Test {
        /// As for `cargo test`: only tests whose names contain one of these
        filters: Vec<String>,
    },
    /// Measure, and print the tables of docs/benchmarks.md
    Bench {
        what: Bench,
        /// Passed on to the measurement; `--help` is among them
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Build or install the programs of the test cluster, and print where they are
    Toolchain,
    /// Write the generated CRD manifests anew
    Generate,
    /// Everything that continuous integration checks
    Ci,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Bench {
    /// From a pod's creation to its container: times, API writes, memory, wake-ups; needs root
    Path,
    /// Pods a second on 500 nodes that are played, beside kube-scheduler alone and Kerf's bare writes; needs root
    Cluster,
    /// The decision engine beside other policies and bounds: accepted work, moves, decisions per second
    Engine,
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Demo { keep, args } => demo(keep, &args),
        Task::Test { filters } => test(&filters),
        Task::Bench { what: Bench::Path, args } => bench_on_cluster("kerf-bench-path", &args),
        Task::Bench { what: Bench::Cluster, args } => bench_on_cluster("kerf-bench-cluster", &args),
        Task::Bench { what: Bench::Engine, args } => bench_engine(&args),
        Task::Toolchain => toolchain(),
        Task::Generate => generate(),
        Task::Ci => ci(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demo(keep: bool, args: &[String]) -> Result<()> {
    needs_root("The demo")?;
    install_toolchain()?;
    step("building Kerf");
    run(cargo().args(["build", "--workspace", "--bins", "--lib"]))?;
    let mut demo = cargo();
    // Without a package: the features of the build above, else dependencies would be built once more.
    demo.args(["run", "--quiet", "--bin", "kerf-demo", "--"]);
    if keep {
        demo.arg("--keep");
    }
    run(demo.args(args))
}

fn test(filters: &[String]) -> Result<()> {
    needs_root("The test suite")?;
    install_toolchain()?;
    step("building the workspace");
    // Test clusters run programs of all packages, which `cargo test` alone would not all build.
    run(cargo().args(["build", "--workspace", "--bins", "--lib", "--examples"]))?;
    step("running the tests");
    // Each test of `faults` has a cluster of its own: more at a time would take too much memory and inotify instances.
    let mut tests = cargo();
    tests.args(["test", "--workspace", "--no-fail-fast", "--", "--test-threads=3"]);
    run(tests.args(filters))
}

fn bench_engine(args: &[String]) -> Result<()> {
    run(cargo().args(["run", "--release", "--package", "kerf-planner-bench", "--"]).args(args))
}

fn bench_on_cluster(program: &str, args: &[String]) -> Result<()> {
    needs_root("The measurement")?;
    install_toolchain()?;
    step("building Kerf, optimised");
    run(cargo().args(["build", "--release", "--workspace", "--bins", "--lib"]))?;
    step("measuring");
    run(cargo().args(["run", "--release", "--quiet", "--bin", program, "--"]).args(args))
}

fn toolchain() -> Result<()> {
    let toolchain = install_toolchain()?;
    println!("{toolchain:#?}");
    Ok(())
}

fn generate() -> Result<()> {
    run(cargo().args(["run", "--quiet", "-p", "kerf-crds", "--example", "generate"]))
}

fn ci() -> Result<()> {
    step("checking the format");
    run(cargo().args(["fmt", "--all", "--check"]))?;
    step("checking the lints");
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    step("checking licences, sources and bans of dependencies");
    let deny = kerf_toolchain::cargo_deny(&|line| step(&format!("toolchain: {line}")))?;
    run(Command::new(deny).current_dir(root()).args(["check", "licenses", "bans", "sources"]))?;
    test(&[])
}

/// Says why root is needed, and stops before anything has begun if this is not root.
fn needs_root(what: &str) -> Result<()> {
    let why = format!(
        "{what} starts real Kubernetes nodes as namespaces of this machine, which takes root: mounts, PID namespaces, \
         cgroups, containers. Everything is in one temporary folder and is removed at the end."
    );
    if !nix::unistd::geteuid().is_root() {
        bail!("{why}\nRun it with sudo: sudo -E env \"PATH=$PATH\" cargo xtask …");
    }
    step(&why);
    Ok(())
}

fn install_toolchain() -> Result<Toolchain> {
    Toolchain::ensure(&|line| step(&format!("toolchain: {line}")))
}

fn step(text: &str) {
    // Standard error, as cargo does, and a closed one is no reason to stop.
    let _ = writeln!(std::io::stderr(), "xtask: {text}");
}

fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("failed to run {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed ({status})");
    }
    Ok(())
}
