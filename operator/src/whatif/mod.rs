//! `kerf-whatif`: what Kerf would do, without doing it, and what it did, once more. By the same code that decides in the
//! operator; nothing is asked of a cluster, and nothing is written to one.
//!
//! ```text
//!  try     dump ─▶ [`dump`] ─▶ World ─▶ [`simulate`]: cycle::decide until nothing changes ─▶ [`report`]
//!  trace   dump ─▶ World ─▶ snapshot ─▶ kerf_planner::fleet
//!  replay  record ─▶ kerf_planner::plan ─▶ differences, broken rules
//! ```

mod admit;
mod dump;
mod replay;
mod report;
mod simulate;
mod trace;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Parser};

pub use replay::Replay;
pub use trace::Trace;

/// What Kerf would do with a policy or with pods, and whether it would decide again as it did. Reads files only.
#[derive(Debug, Parser)]
#[command(name = "kerf-whatif", version)]
pub enum Command {
    Try(Try),
    Replay(Replay),
    Trace(Trace),
}

/// Tries policies and pods on a dump of a cluster, and says what would become of GPUs and waiting pods.
///
/// The dump:
///   kubectl get nodes,gpunodes,partitionpolicies,deviceclasses,resourceclaims,pods,priorityclasses,poddisruptionbudgets -A -o yaml
///
/// Answered is what is decided at once, and after the longest `reshape.moves.afterSeconds` of the policies, as if nothing
/// else happened: GPUs reshape as they are told, and nobody comes or goes. Quotas and the schema of PartitionPolicy are the
/// API server's to check (`kubectl apply --dry-run=server`), and which clients of a GPU are restarted is not looked at.
///
/// The answer is 1 where a policy would be refused.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Try {
    #[command(flatten)]
    policies: Policies,
    /// Pods that wait as well, as their owner writes them, and the ResourceClaims or ResourceClaimTemplates that they name.
    #[arg(long, value_name = "FILE")]
    pods: Vec<PathBuf>,
    /// Further waiting pods, of one container each: `4x nvidia.com/mig-2g.20gb`.
    #[arg(long, value_name = "NUMBERx RESOURCE")]
    add: Vec<String>,
}

/// A cluster, and the policies that are tried on it.
#[derive(Debug, Args)]
pub struct Policies {
    /// The dump, YAML or JSON; `-`: standard input.
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// PartitionPolicies, each instead of the one of its name in the dump, if there is one.
    #[arg(long, value_name = "FILE")]
    policy: Vec<PathBuf>,
    /// A PartitionPolicy of the dump that is not to be there.
    #[arg(long, value_name = "NAME")]
    without_policy: Vec<String>,
}

impl Command {
    /// Runs it. `text` is what there is to say, of which some is there also if it fails; the answer is the exit status.
    ///
    /// # Errors
    /// A file cannot be read, or does not hold what it should.
    pub fn run(&self, text: &mut String) -> anyhow::Result<u8> {
        match self {
            Self::Try(this) => this.run(text),
            Self::Replay(this) => this.run(text),
            Self::Trace(this) => this.run(text),
        }
    }
}

impl Try {
    fn run(&self, text: &mut String) -> anyhow::Result<u8> {
        let Some((mut cluster, policies)) = self.policies.read(text)? else { return Ok(1) };
        let mut pods = admit::Pods::default();
        for object in objects(&self.pods)? {
            pods.take(object)?;
        }
        for words in &self.add {
            pods.add(words)?;
        }
        pods.admit(&mut cluster, text)?;
        let outcome = simulate::run(&mut cluster.world);
        report::outcome(&cluster.world, &outcome, &policies, text);
        Ok(0)
    }
}

impl Policies {
    /// The cluster with the policies, and the names of those that are tried; nothing where one is refused.
    fn read(&self, text: &mut String) -> anyhow::Result<Option<(dump::Cluster, Vec<String>)>> {
        let mut cluster = dump::Cluster::read(objects(std::slice::from_ref(&self.cluster))?)
            .with_context(|| self.cluster.display().to_string())?;
        for name in &self.without_policy {
            cluster.remove_policy(name)?;
        }
        let mut refused = false;
        let mut names = Vec::new();
        for object in objects(&self.policy)? {
            let policy = dump::policy(object)?;
            refused |= report::verdict(&policy, &cluster.world, text);
            names.push(cluster.put_policy(policy));
        }
        Ok((!refused).then_some((cluster, names)))
    }
}

/// The objects of some files.
fn objects(files: &[PathBuf]) -> anyhow::Result<Vec<dump::Object>> {
    let mut all = Vec::new();
    for file in files {
        all.extend(dump::objects(&read(file)?).with_context(|| file.display().to_string())?);
    }
    Ok(all)
}

/// The text of a file; `-` is standard input.
fn read(file: &Path) -> anyhow::Result<String> {
    if file == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("failed to read standard input");
    }
    std::fs::read_to_string(file).with_context(|| format!("failed to read {}", file.display()))
}

#[cfg(test)]
mod tests;
