//! What is measured while pods are bound: from the audit log and from `/proc`, so that the measurement asks nothing of
//! the API server.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::jiff::Timestamp;
use tokio::time::{Instant, sleep};

use crate::audit::{self, Write};
use crate::cluster::{Cluster, Component};

/// Between two looks at the log.
const LOOK: Duration = Duration::from_millis(250);
/// What a pod's being bound causes has been written by then.
const SETTLE: Duration = Duration::from_secs(10);
/// Of `/proc/<pid>/stat`; always this, whatever the kernel's own ticks are.
const TICKS_PER_SECOND: f64 = 100.0;

/// A time in which pods are bound.
#[derive(Debug)]
pub struct Phase {
    log: PathBuf,
    read: u64,
    began: Timestamp,
    /// Name, process and its processor time at the beginning.
    processes: Vec<(String, u32, f64)>,
}

/// What came of it.
#[derive(Debug)]
pub struct Measured {
    pub pods: usize,
    /// From the beginning to the last binding.
    pub all: Duration,
    /// From the first binding to the last.
    pub after_first: Duration,
    /// When the last was bound.
    pub ended: Timestamp,
    pub processes: Vec<Usage>,
    /// All since the beginning, also those that came of the last binding.
    pub writes: Vec<Write>,
}

/// What a process took.
#[derive(Debug)]
pub struct Usage {
    pub name: String,
    /// Seconds of processor time from the beginning to the last binding.
    pub seconds: f64,
    /// Most resident memory since it was started, in MB.
    pub peak: f64,
}

impl Phase {
    /// Begins. The control plane is among the processes without being named.
    ///
    /// # Errors
    /// There is no audit log.
    pub async fn begin(cluster: &Cluster, others: &[(&str, Option<u32>)]) -> Result<Self> {
        let log = cluster.audit_log();
        let read = fs::metadata(&log).with_context(|| format!("failed to read {}", log.display()))?.len();
        let mut phase = Self { log, read, began: Timestamp::now(), processes: Vec::new() };
        for component in
            [Component::Etcd, Component::ApiServer, Component::ControllerManager, Component::Scheduler]
        {
            if let Some(pid) = cluster.pid(component).await {
                phase.add(component.name(), pid);
            }
        }
        for (name, pid) in others {
            phase.add(name, pid.with_context(|| format!("{name} has not started"))?);
        }
        Ok(phase)
    }

    /// One more process, which has just been started.
    pub fn add(&mut self, name: &str, pid: u32) {
        self.processes.push((name.to_owned(), pid, seconds(pid)));
    }

    /// Waits until so many pods have been bound.
    ///
    /// # Errors
    /// Not within the limit.
    pub async fn bound(self, cluster: &Cluster, pods: usize, limit: Duration) -> Result<Measured> {
        let mut file = File::open(&self.log)?;
        file.seek(SeekFrom::Start(self.read))?;
        let (mut count, mut rest) = (0, Vec::new());
        let deadline = Instant::now() + limit;
        while count < pods {
            if Instant::now() > deadline {
                bail!("{count} of {pods} pods were bound within {} s", limit.as_secs());
            }
            sleep(LOOK).await;
            file.read_to_end(&mut rest)?;
            let complete = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            count +=
                String::from_utf8_lossy(&rest[..complete]).lines().filter(|line| is_binding(line)).count();
            rest.drain(..complete);
        }
        let processes = self.processes.iter().map(|(name, pid, before)| Usage {
            name: name.clone(),
            seconds: seconds(*pid) - before,
            peak: peak(*pid),
        });
        let processes = processes.collect();
        sleep(SETTLE).await;
        let mut writes = cluster.audit()?;
        writes.retain(|write| write.received >= self.began);
        let bindings = writes.iter().filter(|write| write.resource == "pods/binding" && write.code < 300);
        let moments: Vec<Timestamp> = bindings.map(|write| write.answered).collect();
        let (first, last) = (moments.iter().min(), moments.iter().max());
        let (Some(first), Some(last)) = (first.copied(), last.copied()) else { bail!("nothing was bound") };
        Ok(Measured {
            pods,
            all: last.duration_since(self.began).unsigned_abs(),
            after_first: last.duration_since(first).unsigned_abs(),
            ended: last,
            processes,
            writes,
        })
    }
}

impl Measured {
    /// Pods a second, from the beginning.
    pub fn rate(&self) -> f64 {
        self.pods as f64 / self.all.as_secs_f64()
    }

    /// Pods a second, from the first binding.
    pub fn rate_after_first(&self) -> f64 {
        (self.pods - 1) as f64 / self.after_first.as_secs_f64()
    }

    /// Successful writes a pod by writer and kind (`operator`, `patch pods/status`), without the harness's and without
    /// leases, which do not depend on pods.
    pub fn writes_per_pod(&self) -> BTreeMap<(String, String), f64> {
        let mut table = BTreeMap::new();
        for (user, kinds) in audit::count(&self.writes) {
            let writer = user.rsplit(':').next().unwrap_or(&user);
            for (what, count) in kinds.into_iter().filter(|(what, _)| !what.ends_with(" leases")) {
                if writer != "admin" {
                    table.insert((writer.to_owned(), what), count as f64 / self.pods as f64);
                }
            }
        }
        table
    }
}

fn is_binding(line: &str) -> bool {
    line.contains(r#""subresource":"binding""#) && line.contains(r#""code":201"#)
}

/// Processor time of a process so far; none of one that has ended.
fn seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> =
        stat.rsplit_once(')').map_or_else(Vec::new, |(_, rest)| rest.split_whitespace().collect());
    let ticks =
        |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or_default();
    (ticks(11) + ticks(12)) / TICKS_PER_SECOND
}

fn peak(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<f64>().ok());
    kib.unwrap_or_default() * 1024.0 / 1e6
}
