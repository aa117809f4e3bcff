//! How long a pod takes to its container and what of that is Kerf's, what it costs the API server, and what Kerf's
//! processes weigh. Real Kubernetes, simulated GPUs that answer at once. Prints Markdown.
//!
//! Each round runs the same pod once of each kind, in turn first: without a GPU, on a MIG instance that is there, on one
//! that has to be made in place of another, on a share of a GPU that has others, and on the first share of a GPU. The
//! first is the bound: what is more than that is Kerf's.

mod moments;
mod processes;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;
use k8s_openapi::api::core::v1::Pod;
use kerf_crds::names::{SHARE_COMPUTE, SHARE_MEMORY};
use kerf_e2e::audit::{self, Write};
use kerf_e2e::kerf::{JOB, Kerf, KerfOptions, NAMESPACE, for_node, mig, on};
use kerf_e2e::{Seen, eventually};
use kube::ResourceExt as _;
use kube::api::ListParams;
use serde_json::json;

use moments::{Moment, Moments, Times};
use processes::{Memory, Process};

/// Measures the path from a pod's creation to its start.
#[derive(Debug, Parser)]
struct Args {
    /// Rounds of a pod of each kind; with none, only memory is looked at.
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// GPU pods in all before the second look at memory; those that the rounds leave over run many at a time.
    #[arg(long, default_value_t = 1000)]
    pods: usize,
    /// How often as many as the rounds leave over are run, each time with a look at memory: does it go on growing?
    #[arg(long, default_value_t = 1)]
    bursts: usize,
    /// Seconds of looking on while nothing happens.
    #[arg(long, default_value_t = 120)]
    idle: u64,
    /// Shares on the node of eight GPUs before the last look at memory, at most 384.
    #[arg(long, default_value_t = 384)]
    shares: usize,
}

/// A kind of pod. The name begins that of its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Plain,
    Ready,
    Made,
    Shared,
    First,
}

const KINDS: [Kind; 5] = [Kind::Plain, Kind::Ready, Kind::Made, Kind::Shared, Kind::First];

/// What a pod of the kind [`Kind::Shared`] or [`Kind::First`] asks for: 48 of them are on one GPU.
const SHARE: [(&str, &str); 2] = [(SHARE_MEMORY, "1Gi"), (SHARE_COMPUTE, "2")];

/// The branch of the driver that limits memory.
const LIMITS: u32 = 615;

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Ready => "ready",
            Self::Made => "made",
            Self::Shared => "shared",
            Self::First => "first",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Plain => "no GPU",
            Self::Ready => "instance there",
            Self::Made => "instance made",
            Self::Shared => "share beside others",
            Self::First => "first share of its GPU",
        }
    }

    /// Of its node.
    fn gpus(self) -> usize {
        if matches!(self, Self::Ready | Self::Shared) { 8 } else { 1 }
    }

    /// The node of its pods: what is written there is theirs.
    fn node(self) -> &'static str {
        match self {
            Self::Plain => "bench-plain",
            Self::Ready => "bench-ready",
            Self::Made => "bench-made",
            Self::Shared => "bench-shared",
            Self::First => "bench-first",
        }
    }

    /// What the pod of a round asks for. Of two profiles in turn on one GPU, each has to go for the other.
    fn limits(self, round: usize) -> Vec<(String, String)> {
        let one = |profile| vec![(mig(profile), "1".to_owned())];
        match self {
            Self::Plain => Vec::new(),
            Self::Ready => one("1g.10gb"),
            Self::Made => one(["7g.80gb", "3g.40gb"][round % 2]),
            Self::Shared | Self::First => share(),
        }
    }
}

fn share() -> Vec<(String, String)> {
    SHARE.map(|(name, quantity)| (name.to_owned(), quantity.to_owned())).to_vec()
}

impl Args {
    /// Pods without a GPU say nothing about memory.
    fn kinds(&self) -> &'static [Kind] {
        if self.rounds == 0 { &KINDS[1..] } else { &KINDS }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let nodes = args.kinds().iter().map(|kind| (kind.node(), "h100-80-sxm", kind.gpus()));
    let mut options = KerfOptions::nodes(&nodes.collect::<Vec<_>>());
    // Of its own accord kubelet takes 110.
    options.kubelet_config.insert("maxPods".to_owned(), json!(500));
    let kerf = Kerf::start(KerfOptions { driver_branch: Some(LIMITS), ..options }).await?;
    let measured = measure(&kerf, &args).await;
    if measured.is_err() {
        kerf.cluster.keep_logs();
    }
    measured
}

async fn measure(kerf: &Kerf, args: &Args) -> Result<()> {
    let namespace = kerf.namespace("bench").await?;
    let layout = json!({ "mode": "Static", "layout": [{ "profile": "1g.10gb", "count": 7 }] });
    for (kind, mig) in [(Kind::Ready, layout), (Kind::Made, json!({ "mode": "Dynamic" }))] {
        kerf.policy(kind.node(), for_node(kind.node(), mig)).await?;
    }
    for kind in [Kind::Shared, Kind::First] {
        let mut policy = for_node(kind.node(), json!({ "mode": "Dynamic" }));
        policy["shares"] = json!({ "gpus": "Allow" });
        kerf.policy(kind.node(), policy).await?;
    }
    let sim = kerf.sim(Kind::Ready.node())?;
    eventually(kerf_e2e::kerf::PATIENCE, "56 instances", || async {
        Ok(Seen::when(sim.instances()?.len(), |count| *count == 56))
    })
    .await?;
    let mut moments = Moments::watch(&kerf.client(), &namespace);
    // Beside which others get theirs.
    let standing = kerf.namespace("standing").await?;
    kerf.create_pod(&standing, &on(Kind::Shared.node(), pod("standing", share(), SLEEP)?)).await?;
    eventually(kerf_e2e::kerf::PATIENCE, "a share that stays", || async {
        Ok(Seen::when(servers_on(kerf, Kind::Shared.node()).await?, |servers| *servers == 1))
    })
    .await?;
    // The first pods switch MIG on and fill caches; they are not counted.
    for kind in args.kinds() {
        one(kerf, &namespace, *kind, "first", 1, &mut moments).await?;
    }

    let processes = [
        (
            "operator".to_owned(),
            Process::new(kerf.operator_pid("operator").await.context("no operator runs")?),
        ),
        ("node daemon, 8 GPUs, 56 instances".to_owned(), Process::daemon(kerf, Kind::Ready.node())?),
        (
            "NVML initialised and nothing else, 8 GPUs".to_owned(),
            Process::baseline(kerf, Kind::Ready.node()).await?,
        ),
        ("node daemon, 1 GPU".to_owned(), Process::daemon(kerf, Kind::Made.node())?),
        ("node daemon, 8 GPUs that carry shares".to_owned(), Process::daemon(kerf, Kind::Shared.node())?),
    ];
    let (idle, wake_ups) = watch_idle(&processes, args.idle).await?;

    let before = kerf.cluster.audit()?.len();
    let mut measured: BTreeMap<Kind, Vec<Times>> = BTreeMap::new();
    for round in 0..args.rounds {
        for turn in 0..KINDS.len() {
            let kind = KINDS[(round + turn) % KINDS.len()];
            let times = one(kerf, &namespace, kind, &round.to_string(), round, &mut moments).await?;
            measured.entry(kind).or_default().push(times);
        }
    }
    if args.rounds > 0 {
        print_times(&measured);
        print_writes(&kerf.cluster.audit()?.split_off(before), args.rounds);
    }
    let in_burst = args.pods.saturating_sub(2 * args.rounds);
    let mut looks = vec![("idle".to_owned(), idle)];
    for number in 0..args.bursts {
        burst(kerf, &namespace, in_burst).await?;
        let pods = args.pods + number * in_burst;
        looks.push((format!("after {pods} GPU pods"), memory(&processes)?));
    }

    if args.shares > 0 {
        kerf.delete_pod(&standing, "standing").await?;
        kerf.wait_no_leak(&standing).await?;
        many_shares(kerf, &namespace, args.shares, &mut moments).await?;
        looks.push((format!("with {} shares", args.shares), memory(&processes)?));
    }

    println!("\n### Memory and wake-ups\n");
    println!("Resident MiB (of which anonymous); wake-ups: voluntary context switches of all threads.\n");
    let titles: Vec<&str> = looks.iter().map(|(title, _)| title.as_str()).collect();
    println!("| process | {} | idle wake-ups a minute |", titles.join(" | "));
    println!("|---|{}---|", "---|".repeat(looks.len()));
    for (index, (name, _)) in processes.iter().enumerate() {
        let cell = |memory: Memory| format!("{:.1} ({:.1})", memory.resident, memory.anonymous);
        let cells: Vec<String> = looks.iter().map(|(_, look)| cell(look[index])).collect();
        println!("| {name} | {} | {:.0} |", cells.join(" | "), wake_ups[index]);
    }
    Ok(())
}

/// Memory at the end of a time in which nothing happens, and wake-ups a minute in it.
async fn watch_idle(processes: &[(String, Process)], seconds: u64) -> Result<(Vec<Memory>, Vec<f64>)> {
    // What the first pods caused has to end first.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let before: Vec<u64> = processes.iter().map(|(_, process)| process.wake_ups()).collect();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let counts = processes.iter().zip(before).map(|((_, process), before)| process.wake_ups() - before);
    let a_minute = counts.map(|count| count as f64 * 60.0 / seconds as f64).collect();
    Ok((memory(processes)?, a_minute))
}

fn memory(processes: &[(String, Process)]) -> Result<Vec<Memory>> {
    processes.iter().map(|(name, process)| process.memory().with_context(|| name.clone())).collect()
}

/// Runs one pod from creation to its end.
async fn one(
    kerf: &Kerf,
    namespace: &str,
    kind: Kind,
    name: &str,
    round: usize,
    moments: &mut Moments,
) -> Result<Times> {
    let name = format!("{}-{name}", kind.name());
    let limits = kind.limits(round);
    let gpu = !limits.is_empty();
    let pod = on(kind.node(), pod(&name, limits, SLEEP)?);
    let start = Instant::now();
    let uid = kerf.create_pod(namespace, &pod).await?.uid().unwrap_or_default();
    let times = moments.until_started(&uid, start).await.with_context(|| format!("pod {name}"))?;
    kerf.delete_pod(namespace, &name).await?;
    if gpu {
        kerf.wait_no_leak(namespace).await?;
    }
    if kind == Kind::First {
        // Or the next would not be the first one.
        eventually(kerf_e2e::kerf::PATIENCE, "no MPS server left", || async {
            Ok(Seen::when(servers_on(kerf, kind.node()).await?, |servers| *servers == 0))
        })
        .await?;
    }
    Ok(times)
}

/// Pods of MPS servers on a node.
async fn servers_on(kerf: &Kerf, node: &str) -> Result<usize> {
    let of = ListParams::default()
        .labels("app.kubernetes.io/name=kerf-mps-server")
        .fields(&format!("spec.nodeName={node}"));
    Ok(kerf.pods(NAMESPACE).list_metadata(&of).await?.items.len())
}

/// Until it is told to end.
const SLEEP: &str = "trap 'exit 0' TERM; sleep 3600 & wait";

fn pod(name: &str, limits: Vec<(String, String)>, script: &str) -> Result<Pod> {
    let limits: BTreeMap<String, String> = limits.into_iter().collect();
    let container = json!({
        "name": "main", "image": JOB, "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "resources": { "limits": limits },
    });
    Ok(serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": { "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container] },
    }))?)
}

/// As many shares as a node carries, all asked for at once.
async fn many_shares(kerf: &Kerf, namespace: &str, shares: usize, moments: &mut Moments) -> Result<()> {
    let start = Instant::now();
    for index in 0..shares {
        let pod = pod(&format!("many-{index}"), share(), SLEEP)?;
        kerf.create_pod(namespace, &on(Kind::Shared.node(), pod)).await?;
    }
    let created = start.elapsed();
    let (first, last) = moments.until_all(shares, Moment::Ready, start).await?;
    println!("\n### Many shares at once\n");
    println!(
        "{shares} pods that were created in {:.1} s on one node with eight GPUs and no MPS server: the first share was in force \
         after {:.1} s, the last after {:.1} s: {:.0} shares a second from the first creation on.",
        created.as_secs_f64(),
        (first - start).as_secs_f64(),
        (last - start).as_secs_f64(),
        shares as f64 / (last - start).as_secs_f64(),
    );
    // What they caused has to end first.
    tokio::time::sleep(Duration::from_secs(20)).await;
    Ok(())
}

/// Many pods at once, until all have ended.
async fn burst(kerf: &Kerf, namespace: &str, pods: usize) -> Result<()> {
    for index in 0..pods {
        kerf.create_pod(namespace, &pod(&format!("burst-{index}"), Kind::Ready.limits(index), "sleep 0.2")?)
            .await?;
    }
    let api = kerf.pods(namespace);
    eventually(Duration::from_secs(1800), format!("{pods} pods done"), || async {
        let done =
            api.list_metadata(&ListParams::default().fields("status.phase=Succeeded")).await?.items.len();
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(Seen::when(done, |done| *done >= pods))
    })
    .await?;
    api.delete_collection(&Default::default(), &Default::default()).await?;
    kerf.wait_no_leak(namespace).await
}

fn print_times(measured: &BTreeMap<Kind, Vec<Times>>) {
    let rounds = measured.values().map(Vec::len).min().unwrap_or_default();
    println!("### From pod to container\n");
    println!("Milliseconds since the pod's creation was asked for, median / p99 of {rounds} pods each.\n");
    let titles: Vec<&str> = KINDS.iter().map(|kind| kind.title()).collect();
    println!("| moment | {} |\n|---|{}", titles.join(" | "), "---|".repeat(KINDS.len()));
    for (moment, name) in [
        (Moment::Committed, "placement committed in GpuNode.spec"),
        (Moment::Ready, "instance or share ready in GpuNode.status"),
        (Moment::Allocated, "claim allocated"),
        (Moment::Ungated, "gate removed"),
        (Moment::Bound, "bound by kube-scheduler"),
        (Moment::Started, "container started by kubelet"),
    ] {
        row(name, KINDS.iter().map(|kind| column(measured, *kind, |times| times.get(&moment).copied())));
    }
    println!(
        "\nSteps of the same pods, and what a GPU adds to them: the differences are within each round.\n"
    );
    println!("| step | {} |\n|---|{}", titles.join(" | "), "---|".repeat(KINDS.len()));
    let step = |from: Option<Moment>, to: Moment| {
        move |times: &Times| {
            let from = from.map_or(Some(Duration::ZERO), |from| times.get(&from).copied());
            Some(times.get(&to)?.saturating_sub(from?))
        }
    };
    for (name, from, to) in [
        ("to the gate's removal: API server, Kerf", None, Moment::Ungated),
        ("to the binding: kube-scheduler", Some(Moment::Ungated), Moment::Bound),
        ("to the start: kubelet, with Kerf's Prepare", Some(Moment::Bound), Moment::Started),
    ] {
        row(name, KINDS.iter().map(|kind| column(measured, *kind, step(from, to))));
    }
    let added = |kind: Kind| {
        let pairs =
            measured.get(&kind).into_iter().flatten().zip(measured.get(&Kind::Plain).into_iter().flatten());
        let started = |times: &Times| times.get(&Moment::Started).map(Duration::as_secs_f64);
        sorted(pairs.filter_map(|(gpu, plain)| Some((started(gpu)? - started(plain)?) * 1000.0)))
    };
    row(
        "whole way, added to the pod without a GPU",
        KINDS.iter().map(|kind| match kind {
            Kind::Plain => Vec::new(),
            kind => added(*kind),
        }),
    );
}

fn column(
    measured: &BTreeMap<Kind, Vec<Times>>,
    kind: Kind,
    time: impl Fn(&Times) -> Option<Duration>,
) -> Vec<f64> {
    sorted(measured.get(&kind).into_iter().flatten().filter_map(time).map(|time| time.as_secs_f64() * 1000.0))
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all
}

fn row(name: &str, columns: impl Iterator<Item = Vec<f64>>) {
    let cells: Vec<String> = columns
        .map(|all| match all.is_empty() {
            true => "–".to_owned(),
            false => format!("{:.0} / {:.0}", quantile(&all, 0.5), quantile(&all, 0.99)),
        })
        .collect();
    println!("| {name} | {} |", cells.join(" | "));
}

/// Of sorted values, at least one.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// Writes by pods' kind: an object belongs to it by its name, as claims and events begin with their pod's, or by its node.
fn print_writes(writes: &[Write], rounds: usize) {
    let mut table: BTreeMap<(String, String), [usize; KINDS.len()]> = BTreeMap::new();
    for (column, kind) in KINDS.into_iter().enumerate() {
        let of_kind = |write: &&Write| {
            // Kept up whatever pods do, and the harness's own.
            let elsewhere =
                write.resource.starts_with("nodes") || write.resource == "leases" || write.user == "admin";
            let own =
                write.name.starts_with(&format!("{}-", kind.name())) || write.name.starts_with(kind.node());
            own && !elsewhere
        };
        let of_kind: Vec<Write> = writes.iter().filter(of_kind).cloned().collect();
        for (user, kinds) in audit::count(&of_kind) {
            let user = if user.starts_with("system:node:") {
                "kubelet"
            } else {
                user.rsplit(':').next().unwrap_or(&user)
            };
            for (what, count) in kinds {
                table.entry((user.to_owned(), what)).or_default()[column] += count;
            }
        }
    }
    println!("\n### API writes per pod\n");
    let line = "---|".repeat(KINDS.len());
    println!("| writer | write | {} |\n|---|---|{line}", KINDS.map(Kind::title).join(" | "));
    let per_pod = |counts: [usize; KINDS.len()]| {
        counts.map(|count| format!("{:.2}", count as f64 / rounds as f64)).join(" | ")
    };
    let mut all = [0; KINDS.len()];
    for ((user, what), counts) in table {
        println!("| {user} | {what} | {} |", per_pod(counts));
        all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    println!("| all | | {} |", per_pod(all));
}
