//! Shares whose MPS server goes with its node, with its driver, or hangs: whoever runs afterwards has its limits, and nobody
//! has run without.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kerf_crds::gpu_node::{Gpu, Isolation};
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, for_node};
use kerf_e2e::wait::{Seen, eventually, wait_pod_phase};
use kerf_sim::engine::EXCLUSIVE_PROCESS;
use kerf_sim::kernel::protocol::{Answer, Connection, Outcome, Request, Use, socket};
use kerf_sim::state::MemoryLimit;
use kerf_sim::{Driver, NvmlError, Occurrence, SimNode};
use kube::ResourceExt as _;
use serde_json::json;

use crate::shares::{AGAIN, GIB, LIMITS, events, filled, greedy, servers, undisturbed};

const NODE: &str = "shares";

/// What NVML may count of a process beside what it allocates.
const CONTEXT: u64 = GIB / 2;

fn options(driver_branch: u32) -> KerfOptions {
    let options = KerfOptions::nodes(&[(NODE, "h100-80-sxm", 2)]).quick_kubelets();
    KerfOptions { driver_branch: Some(driver_branch), ..options }
}

async fn policy(kerf: &Kerf, isolation: &str) -> Result<()> {
    let mut spec = for_node(NODE, json!({ "mode": "Off" }));
    spec["shares"] = json!({ "gpus": "Allow", "isolation": isolation });
    kerf.policy("shared", spec).await?;
    Ok(())
}

/// A pod that goes on asking for more, and whose container is started again whenever it ends.
fn lasting(name: &str, gib: u64, percent: u32) -> Pod {
    let mut pod = greedy(name, gib, percent, &AGAIN);
    if let Some(spec) = &mut pod.spec {
        spec.restart_policy = Some("Always".to_owned());
    }
    pod
}

/// Whoever has memory of a GPU now, by the simulated kernel itself; nobody while it does not run.
fn uses(sim: &SimNode) -> Vec<Use> {
    let ask = || Connection::open(&socket(sim.root()))?.ask::<Outcome>(&Request::Usage);
    match ask() {
        Ok(Ok(Answer::Usage(uses))) => uses,
        _ => Vec::new(),
    }
}

fn cgroup(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
}

/// Looks all the time, from outside, whether programs of these pods run without their limits.
struct Watch {
    stop: Arc<AtomicBool>,
    /// How often programs of each pod were found, by its UID.
    seen: Arc<Mutex<BTreeMap<String, u64>>>,
    looks: std::thread::JoinHandle<Result<()>>,
}

impl Watch {
    /// `pods`: bytes by UID.
    fn start(sim: SimNode, pods: BTreeMap<String, u64>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(pods.keys().map(|uid| (uid.clone(), 0)).collect()));
        let (stopped, count) = (stop.clone(), seen.clone());
        let looks = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let found = look(&sim, &pods)?;
                let mut count: MutexGuard<'_, BTreeMap<String, u64>> =
                    count.lock().unwrap_or_else(PoisonError::into_inner);
                for uid in found {
                    *count.entry(uid).or_default() += 1;
                }
                drop(count);
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(())
        });
        Self { stop, seen, looks }
    }

    fn counts(&self) -> BTreeMap<String, u64> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until a program of each pod has been seen for a while, or until the watch has ended because one was without
    /// its limits.
    async fn goes_on(&self) -> Result<()> {
        let before = self.counts();
        eventually(PATIENCE, "programs in shares seen", || async {
            let now = self.counts();
            let all = before.iter().all(|(uid, before)| now[uid] >= before + 100);
            Ok(if all || self.looks.is_finished() { Seen::Yes(()) } else { Seen::NotYet(format!("{now:?}")) })
        })
        .await
    }

    /// Fails if any ran without its limits.
    fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.looks.join().unwrap_or_else(|_| bail!("the watch failed"))
    }
}

/// Programs of these pods that run, by the pods' UIDs; an error if one runs without its limits.
fn look(sim: &SimNode, pods: &BTreeMap<String, u64>) -> Result<Vec<String>> {
    let uses = uses(sim);
    let of_pods: Vec<(Use, String)> =
        uses.into_iter().filter_map(|usage| Some((usage, cgroup(usage.pid)?))).collect();
    let state = sim.state()?;
    let mut seen = Vec::new();
    for (uid, bytes) in pods {
        let name = format!("pod{uid}");
        // What was true of one that has ended meanwhile may not be so any more.
        let mine = of_pods.iter().filter(|(usage, text)| text.contains(&name) && cgroup(usage.pid).is_some());
        let mine: Vec<&Use> = mine.map(|(usage, _)| usage).collect();
        let Some(first) = mine.first() else { continue };
        seen.extend(mine.iter().map(|_| uid.clone()));
        let gpu = state.gpu_of_minor(first.device.gpu).context("no such GPU")?;
        let mode = state.gpus[gpu].compute_mode;
        ensure!(mine.iter().all(|usage| usage.mps_client), "{name} is past MPS: {mine:?}");
        ensure!(mode == EXCLUSIVE_PROCESS, "{name} runs in compute mode {mode}");
        let sum: u64 = mine.iter().map(|usage| usage.bytes).sum();
        ensure!(sum <= bytes + CONTEXT * mine.len() as u64, "{name} has {sum} bytes of {bytes}");
        if state.driver.branch() >= LIMITS {
            let limited = state.memory_limits.iter().any(|limit| {
                limit.set && limit.gpu == gpu && limit.hard == *bytes && limit.path.contains(&name)
            });
            ensure!(limited, "the driver does not limit {name}: {:?}", state.memory_limits);
        }
    }
    Ok(seen)
}

/// Starts these pods, and watches them from then on.
async fn started(kerf: &Kerf, namespace: &str, pods: &[(&str, u64, u32)]) -> Result<Watch> {
    let mut watched = BTreeMap::new();
    for (name, gib, percent) in pods {
        let pod = kerf.create_pod(namespace, &lasting(name, *gib, *percent)).await?;
        watched.insert(pod.uid().context("no UID")?, gib * GIB);
        filled(kerf, namespace, name, 1).await?;
    }
    let watch = Watch::start(kerf.sim(NODE)?, watched);
    watch.goes_on().await?;
    Ok(watch)
}

async fn container(kerf: &Kerf, namespace: &str, pod: &str) -> Result<Option<String>> {
    let status = kerf.pods(namespace).get(pod).await?.status.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let running = containers.into_iter().find(|one| one.state.as_ref().is_some_and(|s| s.running.is_some()));
    Ok(running.and_then(|running| running.container_id))
}

/// The container that each of these pods runs in.
async fn containers<'a>(
    kerf: &Kerf,
    namespace: &str,
    pods: &[(&'a str, u64, u32)],
) -> Result<BTreeMap<&'a str, Option<String>>> {
    let mut all = BTreeMap::new();
    for (name, ..) in pods {
        all.insert(*name, container(kerf, namespace, name).await?);
    }
    Ok(all)
}

/// The GPUs that carry shares, each of them in force.
async fn in_force(kerf: &Kerf, shares: usize) -> Result<Vec<Gpu>> {
    eventually(PATIENCE, format!("{shares} shares in force"), || async {
        let gpus = kerf.gpu_nodes().get(NODE).await?.status.unwrap_or_default().gpus;
        let all: Vec<_> = gpus.iter().flat_map(|gpu| &gpu.shares).collect();
        let good = all.len() == shares && all.iter().all(|share| share.problem.is_none());
        let all = format!("{all:?}");
        let carrying: Vec<Gpu> = gpus.into_iter().filter(|gpu| !gpu.shares.is_empty()).collect();
        Ok(if good { Seen::Yes(carrying) } else { Seen::NotYet(all) })
    })
    .await
}

/// Each pod runs in another container than before, with just its own; none was ever seen with more.
async fn back(
    kerf: &Kerf,
    namespace: &str,
    watch: Watch,
    before: &BTreeMap<&str, Option<String>>,
    pods: &[(&str, u64, u32)],
) -> Result<()> {
    for (name, gib, percent) in pods {
        eventually(2 * PATIENCE, format!("pod {name} running again"), || async {
            let now = container(kerf, namespace, name).await?;
            Ok(if now.is_some() && now != before[name] {
                Seen::Yes(())
            } else {
                Seen::not_yet(format!("{now:?}"))
            })
        })
        .await?;
        let has = filled(kerf, namespace, name, 1).await?;
        ensure!(has <= gib * GIB && has + GIB > gib * GIB, "{name} has {has} bytes of {gib} GiB");
        for event in events(kerf, namespace, name).await?.iter().filter(|event| event["event"] == "started") {
            let multiprocessors = event["devices"][0]["sms"].as_u64().context("no count")?;
            ensure!(event["mps"] == true && multiprocessors <= u64::from(132 * percent / 100), "{event}");
        }
    }
    in_force(kerf, pods.len()).await?;
    watch.goes_on().await?;
    watch.end()
}

/// Who does not wait for a server comes before it.
fn slow_servers(kerf: &Kerf) -> Result<()> {
    Ok(kerf.sim(NODE)?.slow("mps-server-start", Duration::from_secs(5))?)
}

/// With its pods gone, a node has nothing left of shares.
async fn nothing_left(kerf: &Kerf, namespace: &str, pods: &[&str]) -> Result<()> {
    for name in pods {
        kerf.delete_pod(namespace, name).await?;
    }
    kerf.wait_no_leak(namespace).await?;
    eventually(PATIENCE, "nothing left of shares", || async {
        let state = kerf.sim(NODE)?.state()?;
        let modes: Vec<u32> = state.gpus.iter().map(|gpu| gpu.compute_mode).collect();
        let pods = servers(kerf).await?.len();
        // A container's own limit goes with its cgroup.
        let there = |limit: &&MemoryLimit| {
            Path::new(&limit.path.replacen("/host-cgroup", "/sys/fs/cgroup", 1)).exists()
        };
        let limits: Vec<_> = state.memory_limits.iter().filter(there).collect();
        let left = format!("{pods} servers, compute modes {modes:?}, limits {limits:?}");
        let gone = pods == 0 && modes.iter().all(|mode| *mode == 0) && limits.is_empty();
        Ok(if gone { Seen::Yes(()) } else { Seen::NotYet(left) })
    })
    .await
}

#[test]
fn a_node_that_reboots_gives_its_pods_their_shares_back() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("boot").await?;
        policy(&kerf, "Driver").await?;
        let pods = [("a", 10, 10), ("b", 20, 30)];
        let watch = started(&kerf, &namespace, &pods).await?;
        let before = containers(&kerf, &namespace, &pods).await?;
        slow_servers(&kerf)?;
        kerf.cluster.node(NODE).reboot().await?;
        back(&kerf, &namespace, watch, &before, &pods).await?;
        nothing_left(&kerf, &namespace, &["a", "b"]).await
    });
}

#[test]
fn a_node_that_boots_with_the_next_driver_carries_its_shares_on() {
    alone(options(580), |kerf| async move {
        let namespace = kerf.namespace("upgrade").await?;
        policy(&kerf, "Process").await?;
        let pods = [("a", 20, 25), ("b", 20, 25)];
        let watch = started(&kerf, &namespace, &pods).await?;
        let before = containers(&kerf, &namespace, &pods).await?;
        slow_servers(&kerf)?;
        let node = kerf.cluster.node(NODE);
        node.power_off().await?;
        kerf.sim(NODE)?.upgrade_driver(Driver::of_branch(LIMITS))?;
        node.power_on().await?;
        back(&kerf, &namespace, watch, &before, &pods).await?;
        let gpus = in_force(&kerf, 2).await?;
        ensure!(
            gpus[0].shares.iter().all(|share| share.isolation == Isolation::Driver),
            "{:?}",
            gpus[0].shares
        );
        // Now another size has room beside them.
        kerf.create_pod(&namespace, &greedy("small", 5, 5, &[])).await?;
        let has = filled(&kerf, &namespace, "small", 1).await?;
        ensure!(has <= 5 * GIB, "{has}");
        nothing_left(&kerf, &namespace, &["a", "b", "small"]).await
    });
}

/// The modules go only when nobody has the GPUs, so everybody is ended first; containers are started again by kubelet
/// without asking anybody, before the daemon has set anything.
#[test]
fn a_driver_that_is_replaced_while_its_node_runs_limits_who_runs_on() {
    alone(options(580), |kerf| async move {
        let namespace = kerf.namespace("anew").await?;
        policy(&kerf, "Process").await?;
        let pods = [("a", 20, 25), ("b", 20, 25)];
        started(&kerf, &namespace, &pods).await?.end()?;
        let sim = kerf.sim(NODE)?;
        sim.unload_driver()?;
        // Who has the library open hears of it from each call.
        let error = NvmlError::DriverNotLoaded;
        sim.inject("nvmlDeviceGetHandleByUUID", error, Occurrence::Persistent, None)?;
        for usage in uses(&sim) {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(usage.pid)?);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
        }
        eventually(PATIENCE, "nobody on the GPUs", || async {
            let uses = uses(&sim);
            Ok(if uses.is_empty() { Seen::Yes(()) } else { Seen::NotYet(format!("{uses:?}")) })
        })
        .await?;
        eventually(PATIENCE, "the daemon without a driver", || async {
            let conditions = kerf.gpu_nodes().get(NODE).await?.status.unwrap_or_default().conditions;
            let gone = conditions.iter().any(|one| one.type_ == "Ready" && one.status == "False");
            Ok(if gone { Seen::Yes(()) } else { Seen::NotYet(format!("{conditions:?}")) })
        })
        .await?;
        sim.clear_faults()?;
        sim.upgrade_driver(Driver::of_branch(LIMITS))?;
        let mut watched = BTreeMap::new();
        for (name, gib, _) in pods {
            watched.insert(kerf.pods(&namespace).get(name).await?.uid().context("no UID")?, gib * GIB);
        }
        // One that gets past MPS before there is a server is ended; then both have their limits, and keep them.
        eventually(PATIENCE, "both programs limited", || async {
            let seen = look(&sim, &watched)?;
            Ok(if seen.len() == 2 { Seen::Yes(()) } else { Seen::NotYet(format!("{seen:?}")) })
        })
        .await?;
        in_force(&kerf, 2).await?;
        let watch = Watch::start(kerf.sim(NODE)?, watched);
        watch.goes_on().await?;
        watch.end()?;
        nothing_left(&kerf, &namespace, &["a", "b"]).await
    });
}

#[test]
fn a_server_that_hangs_ends_with_its_own_clients_and_no_others() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("hangs").await?;
        policy(&kerf, "Driver").await?;
        // One GPU cannot have both.
        for name in ["a", "b"] {
            kerf.create_pod(&namespace, &greedy(name, 50, 60, &AGAIN)).await?;
            filled(&kerf, &namespace, name, 1).await?;
        }
        let has = filled(&kerf, &namespace, "b", 1).await?;
        let said = events(&kerf, &namespace, "a").await?;
        let gpu = said[0]["devices"][0]["uuid"].as_str().context("no GPU")?.to_owned();
        let pods = servers(&kerf).await?;
        ensure!(pods.len() == 2, "{pods:?}");
        let pid = server_process(&kerf, &gpu)?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGSTOP)?;
        eventually(PATIENCE, "the GPU's problem", || async {
            let status = kerf.gpu_nodes().get(NODE).await?.status.context("no report")?;
            let of = |gpu: &Gpu| (gpu.uuid.clone(), gpu.problem.clone().map(|problem| problem.reason));
            let problems: Vec<_> = status.gpus.iter().map(of).collect();
            let told = problems
                .iter()
                .all(|(uuid, problem)| problem.as_deref() == (*uuid == gpu).then_some("MpsHangs"));
            Ok(if told { Seen::Yes(()) } else { Seen::NotYet(format!("{problems:?}")) })
        })
        .await?;
        wait_pod_phase(&kerf.client(), &namespace, "a", "Failed", PATIENCE).await?;
        undisturbed(&kerf, &namespace, "b", has).await?;
        let old: Vec<Option<String>> = pods.iter().map(Pod::uid).collect();
        let now = eventually(PATIENCE, "another server", || async {
            let now: Vec<_> = servers(&kerf).await?.iter().map(Pod::uid).collect();
            let new = now.iter().filter(|uid| !old.contains(uid)).count();
            Ok(if now.len() == 2 && new == 1 { Seen::Yes(now) } else { Seen::NotYet(format!("{now:?}")) })
        })
        .await?;
        kerf.delete_pod(&namespace, "a").await?;
        kerf.create_pod(&namespace, &greedy("c", 50, 60, &[])).await?;
        let c = filled(&kerf, &namespace, "c", 1).await?;
        ensure!(c <= 50 * GIB, "{c}");
        ensure!(now.len() == 2, "{now:?}");
        undisturbed(&kerf, &namespace, "b", has).await?;
        nothing_left(&kerf, &namespace, &["b", "c"]).await
    });
}

/// The MPS server of a GPU, by the host's numbering.
fn server_process(kerf: &Kerf, gpu: &str) -> Result<i32> {
    let cluster = kerf.cluster.dir().file_name().context("no name")?.to_string_lossy().into_owned();
    let is_it = |pid: &i32| {
        let of = |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let has = |text: Vec<u8>, word: &str| String::from_utf8_lossy(&text).contains(word);
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        program.ends_with("nvidia-cuda-mps-server")
            && has(of("cgroup"), &cluster)
            && has(of("environ"), &format!("CUDA_VISIBLE_DEVICES={gpu}"))
    };
    let all = std::fs::read_dir("/proc")?.flatten();
    let mut pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(is_it).with_context(|| format!("{gpu} has no server"))
}
