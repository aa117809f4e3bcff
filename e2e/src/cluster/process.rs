//! Programs that run in the namespaces of a cluster or node, as children of this process.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How to get into a set of namespaces.
#[derive(Clone, Debug)]
pub(crate) struct Namespaces {
    pub(crate) helper: PathBuf,
    /// A process (in the host's numbering) that has them.
    pub(crate) pid: u32,
}

impl Namespaces {
    /// A command that runs `program` inside. What it starts is killed when this process, or the cluster, ends.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>, pid_to: Option<&Path>) -> Command {
        let mut command = Command::new(&self.helper);
        command.arg("enter").arg(self.pid.to_string());
        if let Some(file) = pid_to {
            command.arg("--pid-to").arg(file);
        }
        command.arg("--").arg(program);
        // Not in the terminal's foreground group: Ctrl-C is for the harness, and the watcher does the rest.
        command.process_group(0).stdin(Stdio::null());
        command
    }
}

/// A program that was started to stay.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    log: PathBuf,
    pid_file: PathBuf,
    child: Child,
}

impl Process {
    /// Starts a program whose output is appended to `log`. `pids` is a folder for a file with its process id.
    pub(crate) fn start(
        namespaces: &Namespaces,
        name: &str,
        log: &Path,
        pids: &Path,
        program: &Path,
        set_up: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let pid_file = pids.join(name);
        let _ = fs::remove_file(&pid_file);
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("failed to open {}", log.display()))?;
        let mut command = namespaces.command(program, Some(&pid_file));
        set_up(&mut command);
        let child = command
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("failed to start {name}"))?;
        Ok(Self { name: name.to_owned(), log: log.to_owned(), pid_file, child })
    }

    /// The program's process id in the host's numbering, once it has started.
    pub(crate) fn pid(&self) -> Option<u32> {
        fs::read_to_string(&self.pid_file).ok()?.trim().parse().ok()
    }

    /// The program's process id in the host's numbering; waits for its start, which takes milliseconds.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) async fn started(&mut self) -> Result<u32> {
        let limit = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(pid) = self.pid() {
                return Ok(pid);
            }
            self.check()?;
            if Instant::now() > limit {
                bail!("{} did not start; its log is {}", self.name, self.log.display());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Fails if the program has ended.
    ///
    /// # Errors
    /// See above; the message has its exit status and the end of its log.
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait().context("failed to look after a process")? {
            bail!(
                "{} has ended ({status}); the end of {}:\n{}",
                self.name,
                self.log.display(),
                end_of(&self.log)
            );
        }
        Ok(())
    }

    /// Ends the program: SIGTERM and, after the grace, SIGKILL; with no grace, SIGKILL at once. Returns when it is dead.
    ///
    /// # Errors
    /// It cannot be signalled.
    pub(crate) async fn stop(mut self, grace: Duration) -> Result<ExitStatus> {
        let pid = match self.started().await {
            Ok(pid) => pid,
            // It has ended already.
            Err(error) => match self.child.try_wait()? {
                Some(status) => return Ok(status),
                None => return Err(error),
            },
        };
        let kill_at = Instant::now() + grace;
        let mut signal = if grace.is_zero() { Signal::SIGKILL } else { Signal::SIGTERM };
        self.signal(pid, signal)?;
        loop {
            if let Some(status) = self.child.try_wait().context("failed to look after a process")? {
                return Ok(status);
            }
            if signal == Signal::SIGTERM && Instant::now() > kill_at {
                signal = Signal::SIGKILL;
                self.signal(pid, signal)?;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn signal(&mut self, pid: u32, signal: Signal) -> Result<()> {
        // While `enter` lives the program does, or it is a zombie that `enter` has yet to collect: the id is its own.
        if self.child.try_wait()?.is_none() {
            match kill(Pid::from_raw(pid.cast_signed()), signal) {
                Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
                Err(error) => return Err(error).with_context(|| format!("failed to end {}", self.name)),
            }
        }
        Ok(())
    }

    /// Collects the exit status of a program that is known to be dead.
    pub(crate) fn collect(&mut self) {
        // Nothing is lost with the status of a process that was killed with its cluster.
        let _ = self.child.wait();
    }
}

/// The last lines of a log.
pub(crate) fn end_of(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Runs a command to its end, off the async threads.
pub(crate) async fn output(mut command: Command) -> Result<Output> {
    let what = format!("{command:?}");
    tokio::task::spawn_blocking(move || command.output())
        .await
        .context("the wait for a command was cancelled")?
        .with_context(|| format!("failed to run {what}"))
}

/// Runs a command to its end; an error with its output if it fails.
pub(crate) async fn run(command: Command) -> Result<String> {
    let what = format!("{command:?}");
    let output = output(command).await?;
    if !output.status.success() {
        bail!(
            "{what} failed ({}):\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
