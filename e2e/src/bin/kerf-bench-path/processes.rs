//! What Kerf's processes weigh and how often they wake up, as the kernel counts it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use kerf_e2e::kerf::{Kerf, built};
use kerf_e2e::{Seen, eventually};

/// A process, by its folder in `/proc`.
#[derive(Clone, Debug)]
pub struct Process(PathBuf);

/// MiB.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub resident: f64,
    /// The part of it that is backed by no file: heap and stacks.
    pub anonymous: f64,
}

impl Process {
    pub fn new(pid: u32) -> Self {
        Self(Path::new("/proc").join(pid.to_string()))
    }

    /// The daemon of a node of this cluster.
    pub fn daemon(kerf: &Kerf, node: &str) -> Result<Self> {
        let cluster = kerf.cluster.dir().file_name().context("the cluster's folder has no name")?;
        let cgroup = format!("/{}/{node}/", cluster.to_string_lossy());
        // The kernel cuts names after 15 characters.
        find(|dir| text(dir, "comm").trim() == "kerf-node-daemo" && text(dir, "cgroup").contains(&cgroup))
            .with_context(|| format!("no daemon runs on {node}"))
    }

    /// The program that daemons are compared with, in a node, with that node's driver.
    pub async fn baseline(kerf: &Kerf, node: &str) -> Result<Self> {
        let mut command = kerf.cluster.node(node).command(built("kerf-bench-idle")?)?;
        let library = format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH);
        // It ends with the cluster.
        let parent = command.arg(Path::new("/run/nvidia/driver").join(library)).spawn()?.id();
        eventually(kerf_e2e::kerf::PATIENCE, "kerf-bench-idle waiting", || async {
            let child = find(|dir| {
                text(dir, "comm").trim() == "kerf-bench-idle"
                    && text(dir, "status").lines().any(|line| line == format!("PPid:\t{parent}"))
            });
            let loaded = |child: &Self| text(&child.0, "maps").contains("libnvidia-ml");
            Ok(child.filter(loaded).map_or_else(|| Seen::not_yet("no such process"), Seen::Yes))
        })
        .await
    }

    pub fn memory(&self) -> Result<Memory> {
        let text = text(&self.0, "smaps_rollup");
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<f64>().ok().map(|kib| kib / 1024.0)
        };
        let memory = (field("Rss:"), field("Anonymous:"));
        let (Some(resident), Some(anonymous)) = memory else {
            anyhow::bail!("{} has no memory: the process has ended", self.0.display())
        };
        Ok(Memory { resident, anonymous })
    }

    /// How often its threads have waited for something and gone on.
    pub fn wake_ups(&self) -> u64 {
        let count = |task: PathBuf| {
            let status = text(&task, "status");
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
            line.trim().parse::<u64>().ok()
        };
        let tasks = fs::read_dir(self.0.join("task")).into_iter().flatten().flatten();
        tasks.filter_map(|task| count(task.path())).sum()
    }
}

fn find(is_it: impl Fn(&Path) -> bool) -> Option<Process> {
    let all = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path());
    all.into_iter().find(|dir| is_it(dir)).map(Process)
}

fn text(dir: &Path, file: &str) -> String {
    fs::read_to_string(dir.join(file)).unwrap_or_default()
}
