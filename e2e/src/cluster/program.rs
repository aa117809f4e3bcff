//! Programs of a test's own beside the control plane: an operator as a process, to be stopped and killed at will.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::Result;

use super::Cluster;
use super::process::Process;

/// A program that ends with its cluster at the latest.
#[derive(Debug)]
pub struct Program(Process);

impl Program {
    /// Its process id in the host's numbering, once it has started.
    pub fn pid(&self) -> Option<u32> {
        self.0.pid()
    }

    /// An error with the end of its log if it has ended.
    ///
    /// # Errors
    /// See above.
    pub fn check(&mut self) -> Result<()> {
        self.0.check()
    }

    /// SIGTERM and, after the grace, SIGKILL; with no grace, SIGKILL at once.
    ///
    /// # Errors
    /// It cannot be ended.
    pub async fn stop(self, grace: Duration) -> Result<ExitStatus> {
        self.0.stop(grace).await
    }
}

impl Cluster {
    /// Starts a program in the cluster's namespaces, its output in the log of that name.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_program(
        &self,
        name: &str,
        program: &Path,
        set_up: impl FnOnce(&mut Command),
    ) -> Result<Program> {
        let log = self.setup.logs().join(format!("{name}.log"));
        Process::start(&self.setup.namespaces, name, &log, &self.setup.pids(), program, set_up).map(Program)
    }
}
