//! How long a pod waits for its instance and where the time goes, what it costs the API server, and what Kerf's
//! processes weigh. Real Kubernetes, simulated GPUs that answer at once. Prints Markdown.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::GpuNode;
use kerf_crds::gpu_node::Owner;
use kerf_e2e::kerf::{Kerf, KerfOptions, gpu_pod, mig};
use kerf_e2e::{Seen, audit, eventually};
use kube::api::{Api, WatchEvent, WatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::mpsc;

/// Measures the path from a pod's creation to its start.
#[derive(Debug, Parser)]
struct Args {
    /// Pods created one after the other, each measured.
    #[arg(long, default_value_t = 60)]
    pods: usize,
    /// Further pods, run in batches, before the second look at memory.
    #[arg(long, default_value_t = 200)]
    burst: usize,
}

/// Moments in the life of a pod, in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Created,
    Committed,
    InstanceReady,
    Allocated,
    Ungated,
    Bound,
    Started,
}

const MOMENTS: [(Moment, &str); 6] = [
    (Moment::Committed, "placement committed in GpuNode.spec"),
    (Moment::InstanceReady, "instance ready in GpuNode.status"),
    (Moment::Allocated, "claim allocated"),
    (Moment::Ungated, "gate removed"),
    (Moment::Bound, "bound by kube-scheduler"),
    (Moment::Started, "container started by kubelet"),
];

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let kerf =
        Kerf::start(KerfOptions::nodes(&[("bench-a", "h100-80-sxm", 8), ("bench-b", "h100-80-sxm", 8)]))
            .await?;
    let namespace = kerf.namespace("bench").await?;
    kerf.policy("bench", json!({ "mig": { "mode": "Dynamic" } })).await?;
    let (sender, mut moments) = mpsc::unbounded_channel();
    watch_pods(kerf.client(), namespace.clone(), sender.clone());
    watch_claims(kerf.client(), namespace.clone(), sender.clone());
    watch_nodes(kerf.client(), sender);

    // The first pod switches MIG on and is not counted.
    one(&kerf, &namespace, "warm-up", "1g.10gb", &mut moments).await?;
    let idle = memory(&kerf).await?;
    let before = kerf.cluster.audit()?.len();
    let mut measured: Vec<BTreeMap<Moment, Duration>> = Vec::new();
    for index in 0..args.pods {
        // Another profile each time, so that the instance has to be made.
        let profile = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"][index % 4];
        measured.push(one(&kerf, &namespace, &format!("p{index}"), profile, &mut moments).await?);
    }
    let writes = kerf.cluster.audit()?.split_off(before);
    burst(&kerf, &namespace, args.burst).await?;
    let after = memory(&kerf).await?;

    println!("### From pod to container\n");
    println!(
        "{} pods one after the other, 2 nodes × 8 simulated H100, hardware that answers at once. Milliseconds since the pod was created (median, p99) and since the moment before (median).\n",
        args.pods
    );
    println!("| moment | median | p99 | step |\n|---|---|---|---|");
    let mut last = 0.0;
    for (moment, name) in MOMENTS {
        let mut all: Vec<f64> =
            measured.iter().filter_map(|pod| pod.get(&moment)).map(|at| at.as_secs_f64() * 1000.0).collect();
        all.sort_by(f64::total_cmp);
        let (median, p99) = (quantile(&all, 0.5), quantile(&all, 0.99));
        println!("| {name} | {median:.0} | {p99:.0} | {:.0} |", median - last);
        last = median;
    }
    println!("\n### API writes per pod\n\n| writer | write | per pod |\n|---|---|---|");
    for (user, kinds) in audit::count(&writes) {
        let user = user.rsplit(':').next().unwrap_or_default().to_owned();
        for (kind, count) in kinds {
            let per_pod = count as f64 / args.pods as f64;
            if per_pod >= 0.05 {
                println!("| {user} | {kind} | {per_pod:.2} |");
            }
        }
    }
    println!(
        "\n### Memory\n\n| process | idle, MiB | after {} pods, MiB |\n|---|---|---|",
        args.pods + args.burst
    );
    for (name, before) in idle {
        let now = after.get(&name).copied().unwrap_or_default();
        println!("| {name} | {before:.1} | {now:.1} |");
    }
    Ok(())
}

/// Runs one pod from creation to its end and returns when what happened, since its creation.
async fn one(
    kerf: &Kerf,
    namespace: &str,
    name: &str,
    profile: &str,
    moments: &mut mpsc::UnboundedReceiver<(String, Moment, Instant)>,
) -> Result<BTreeMap<Moment, Duration>> {
    while moments.try_recv().is_ok() {}
    let pod = gpu_pod(name, &[(&mig(profile), 1)]);
    let start = Instant::now();
    let created = kerf.create_pod(namespace, &pod).await?;
    let uid = created.uid().unwrap_or_default();
    let mut seen = BTreeMap::new();
    let limit = tokio::time::sleep(Duration::from_secs(60));
    tokio::pin!(limit);
    while !seen.contains_key(&Moment::Started) {
        tokio::select! {
            moment = moments.recv() => {
                let (pod, moment, at) = moment.context("the watches have ended")?;
                if pod == uid {
                    seen.entry(moment).or_insert(at - start);
                }
            }
            () = &mut limit => anyhow::bail!("pod {name} did not start; seen {seen:?}"),
        }
    }
    kerf.delete_pod(namespace, name).await?;
    kerf.wait_no_leak(namespace).await?;
    Ok(seen)
}

/// Many pods at once, until all have ended.
async fn burst(kerf: &Kerf, namespace: &str, pods: usize) -> Result<()> {
    let api = kerf.pods(namespace);
    for index in 0..pods {
        let args = ["--seconds", "0.2"];
        let profile = ["1g.10gb", "2g.20gb", "3g.40gb"][index % 3];
        let container = kerf_e2e::kerf::gpu_container("main", &[(&mig(profile), 1)], &args);
        kerf.create_pod(namespace, &kerf_e2e::kerf::pod_of(&format!("b{index}"), vec![container])).await?;
    }
    eventually(Duration::from_secs(1800), format!("{pods} pods done"), || async {
        let list = api.list_metadata(&Default::default()).await?.items.len();
        let done =
            api.list(&kube::api::ListParams::default().fields("status.phase=Succeeded")).await?.items.len();
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(if done >= pods { Seen::Yes(()) } else { Seen::NotYet(format!("{done} of {list} done")) })
    })
    .await?;
    api.delete_collection(&Default::default(), &Default::default()).await?;
    kerf.wait_no_leak(namespace).await
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    let index = ((sorted.len() as f64 * q).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

/// Resident memory of operator and daemons, in MiB.
async fn memory(kerf: &Kerf) -> Result<BTreeMap<String, f64>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(status) = std::fs::read_to_string(entry.path().join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1).map(str::to_owned)
        };
        let Some(name) = field("Name:") else { continue };
        let resident = field("VmRSS:").and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() / 1024.0;
        let pid = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("kerf-operator")
            && kerf.operator_pid("operator").await.map(|p| p.to_string()) == Some(pid.clone())
        {
            all.insert("operator".to_owned(), resident);
        } else if name.starts_with("kerf-node-daem") {
            all.insert(format!("node daemon, process {}", all.len()), resident);
        }
    }
    Ok(all)
}

fn watch_pods(client: Client, namespace: String, moments: mpsc::UnboundedSender<(String, Moment, Instant)>) {
    let api: Api<Pod> = Api::namespaced(client, &namespace);
    watch(api, move |pod| {
        let uid = pod.uid().unwrap_or_default();
        let spec = pod.spec.unwrap_or_default();
        let mut reached = vec![Moment::Created];
        if spec.scheduling_gates.unwrap_or_default().is_empty() {
            reached.push(Moment::Ungated);
        }
        if spec.node_name.is_some() {
            reached.push(Moment::Bound);
        }
        let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        if statuses.iter().any(|status| status.started == Some(true)) {
            reached.push(Moment::Started);
        }
        for moment in reached {
            let _ = moments.send((uid.clone(), moment, Instant::now()));
        }
    });
}

fn watch_claims(
    client: Client,
    namespace: String,
    moments: mpsc::UnboundedSender<(String, Moment, Instant)>,
) {
    let api: Api<ResourceClaim> = Api::namespaced(client, &namespace);
    watch(api, move |claim| {
        let allocated = claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
        for owner in claim.metadata.owner_references.iter().flatten().filter(|_| allocated) {
            let _ = moments.send((owner.uid.clone(), Moment::Allocated, Instant::now()));
        }
    });
}

fn watch_nodes(client: Client, moments: mpsc::UnboundedSender<(String, Moment, Instant)>) {
    let api: Api<GpuNode> = Api::all(client);
    watch(api, move |node| {
        let gpus = node.status.map(|status| status.gpus).unwrap_or_default();
        for partition in &node.spec.partitions {
            let Owner::Claim(owner) = &partition.owner else { continue };
            let _ = moments.send((owner.pod_uid.clone(), Moment::Committed, Instant::now()));
            let made =
                gpus.iter().filter(|gpu| gpu.uuid == partition.gpu).flat_map(|gpu| &gpu.instances).any(|i| {
                    i.uuid.is_some()
                        && partition
                            .instance
                            .as_ref()
                            .is_some_and(|w| w.placement == i.placement && w.profile == i.profile)
                });
            if made {
                let _ = moments.send((owner.pod_uid.clone(), Moment::InstanceReady, Instant::now()));
            }
        }
    });
}

/// Calls `each` with every change of every object, for as long as the program runs.
fn watch<K>(api: Api<K>, each: impl Fn(K) + Send + Sync + 'static)
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    tokio::spawn(async move {
        loop {
            let Ok(stream) = api.watch(&WatchParams::default().timeout(280), "0").await else { continue };
            let mut stream = std::pin::pin!(stream);
            while let Some(Ok(event)) = stream.next().await {
                if let WatchEvent::Added(object) | WatchEvent::Modified(object) = event {
                    each(object);
                }
            }
        }
    });
}
