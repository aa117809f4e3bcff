//! Runs a program in the namespaces of a cluster or of one of its nodes.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns};

use super::init::die_with_parent;

/// `enter <pid> [--pid-to <file>] -- <program> <arg>…`: takes the namespaces from `/proc/<pid>`, runs the program with
/// this process's standard streams and environment, and ends as it ends (128 + n after signal n). The program's process
/// id, as seen from here, is written to the file. When this process ends first, the program is killed.
pub(crate) fn main(args: &[OsString]) -> ExitCode {
    match run(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{} enter: {error:#}", super::PROGRAM);
            ExitCode::from(125)
        }
    }
}

fn run(args: &[OsString]) -> Result<u8> {
    let usage = "expected: <pid> [--pid-to <file>] -- <program> <arg>…";
    let separator = args.iter().position(|arg| arg == "--").context(usage)?;
    let (options, command) = (&args[..separator], &args[separator + 1..]);
    let pid = options.first().and_then(|pid| pid.to_str()).context(usage)?;
    let pid_to = match &options[1..] {
        [] => None,
        [flag, file] if flag == "--pid-to" => Some(file),
        _ => anyhow::bail!(usage),
    };
    if command.is_empty() {
        anyhow::bail!(usage);
    }

    // Both are looked up before the first namespace is entered, since entering changes what /proc shows.
    let own = std::env::current_exe().context("failed to find the running program")?;
    let mut namespaces = Vec::new();
    for (name, kind) in [
        ("pid_for_children", CloneFlags::CLONE_NEWPID),
        ("uts", CloneFlags::CLONE_NEWUTS),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ] {
        let path = format!("/proc/{pid}/ns/{name}");
        namespaces.push((File::open(&path).with_context(|| format!("{path}: has it ended?"))?, kind, path));
    }
    let mut pid_file = pid_to
        .map(|path| File::create(path).with_context(|| format!("failed to create {}", path.display())))
        .transpose()?;
    for (namespace, kind, path) in &namespaces {
        setns(namespace.as_fd(), *kind).with_context(|| format!("failed to enter {path}"))?;
    }
    drop(namespaces);

    let mut child = Command::new(own)
        .arg("bound")
        .args(command)
        .current_dir("/")
        .spawn()
        .with_context(|| format!("failed to start a process in the namespaces of {pid}"))?;
    if let Some(file) = &mut pid_file {
        writeln!(file, "{}", child.id()).context("failed to write the process id")?;
    }
    drop(pid_file);
    let status = child.wait().context("failed to wait for the program")?;
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    Ok(u8::try_from(code).unwrap_or(u8::MAX))
}

/// `bound <program> <arg>…`: becomes the program, and is killed when its parent ends.
pub(crate) fn bound(args: &[OsString]) -> Result<()> {
    die_with_parent()?;
    let (program, args) = args.split_first().context("the program is missing")?;
    Err(Command::new(program).args(args).exec())
        .with_context(|| format!("failed to run {}", program.display()))
}
