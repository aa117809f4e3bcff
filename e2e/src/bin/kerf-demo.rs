//! Kerf's story on a terminal: a real Kubernetes cluster, simulated GPUs, pods that come and go.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use kerf_e2e::draw;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::kerf::{Kerf, KerfOptions, gpu_container, gpu_pod, mig};
use kerf_sim::GpuSpec;
use serde_json::json;

/// Starts a Kubernetes cluster with Kerf and simulated GPUs on this machine, and shows GPUs reshaping to what pods ask for.
#[derive(Debug, Parser)]
struct Args {
    /// Leave the cluster running at the end, until Ctrl-C.
    #[arg(long)]
    keep: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = tokio::select! {
        outcome = run(&args) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    match outcome {
        Ok(()) => {
            println!("\nThe cluster and all that belonged to it are gone.");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("\nkerf-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<()> {
    println!(
        "Starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler and three kubelets with containerd …"
    );
    let mut options = KerfOptions::nodes(&[("ampere", "a100-80", 1), ("hopper", "h100-80-sxm", 1)]);
    options.nodes.push(("blackwell".to_owned(), vec![GpuSpec::new("rtxpro6000-server")]));
    let kerf = Kerf::start(options).await?;
    story(&kerf, args).await.inspect_err(|_| kerf.cluster.keep_logs())
}

async fn story(kerf: &Kerf, args: &Args) -> Result<()> {
    let namespace = kerf.namespace("demo").await?;

    say("Three GPUs, none of them cut yet. Kerf leaves them alone until a policy says otherwise.");
    show(kerf).await?;

    say("kubectl apply -f policies/samples/dynamic.yaml: every GPU may be cut to what pods ask for.");
    kerf.policy("everything", json!({ "mig": { "mode": "Dynamic", "modeSwitch": "WithReset" } })).await?;

    say("Seven pods ask for nvidia.com/mig-1g.10gb.");
    for index in 0..7 {
        create(kerf, &namespace, &format!("small-{index}"), "1g.10gb").await?;
    }
    running(kerf, &namespace, (0..7).map(|index| format!("small-{index}"))).await?;

    say("One asks for half a GPU, one for a slice of another model with other names.");
    create(kerf, &namespace, "half", "3g.40gb").await?;
    create(kerf, &namespace, "other", "2g.48gb").await?;
    running(kerf, &namespace, ["half".to_owned(), "other".to_owned()]).await?;

    say("Another wants a whole GPU's worth, and has to wait. Kerf says why:");
    create(kerf, &namespace, "large", "7g.80gb").await?;
    println!("  pod large: {}", kerf.wait_reason(&namespace, "large", "NoRoom").await?);

    say("The small ones end. Their slices merge, and the large one gets its place with nobody's help.");
    for index in 0..7 {
        kerf.delete_pod(&namespace, &format!("small-{index}")).await?;
    }
    running(kerf, &namespace, ["large".to_owned()]).await?;

    say("What each pod says it runs on:");
    for pod in ["half", "other", "large"] {
        let running = kerf.wait_running(&namespace, pod).await?;
        for device in &running.devices {
            println!(
                "  {pod}: {} on {}, slices {}..{}, {}",
                device.profile,
                running.node,
                device.start,
                device.start + device.size,
                device.uuid
            );
        }
    }
    moving(kerf, &namespace).await?;
    let kubectl = kerf.cluster.toolchain().kubectl.display().to_string();
    println!("\nTry next:");
    println!("  export KUBECONFIG={}", kerf.cluster.kubeconfig_path().display());
    for command in [
        "get partitionpolicies,gpunodes".to_owned(),
        "explain partitionpolicy.spec.mig".to_owned(),
        format!("-n {namespace} get pods -o wide"),
        format!("-n {namespace} describe pod large-again"),
        format!("-n {namespace} delete pod large-again"),
        "get resourceslices".to_owned(),
    ] {
        println!("  {kubectl} {command}");
    }
    if args.keep {
        println!("\nThe cluster stays until Ctrl-C.");
        tokio::signal::ctrl_c().await.context("failed to wait for Ctrl-C")?;
    } else {
        println!("\n(`cargo xtask demo --keep` would leave it running.)");
    }
    Ok(())
}

/// Room is made: a pod whose owner allows it is moved.
async fn moving(kerf: &Kerf, namespace: &str) -> Result<()> {
    say("The large one ends. A Deployment whose pod may be moved (kerf.dev/movable) gets half of a GPU.");
    create(kerf, namespace, "filler", "3g.40gb").await?;
    running(kerf, namespace, ["filler".to_owned()]).await?;
    kerf.delete_pod(namespace, "large").await?;
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "mover", "namespace": namespace },
        "spec": { "replicas": 1, "selector": { "matchLabels": { "app": "mover" } }, "template": {
            "metadata": { "labels": { "app": "mover" }, "annotations": { "kerf.dev/movable": "true" } },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [gpu_container("main", &[(&mig("3g.40gb"), 1)], &[])],
            },
        } },
    });
    apply_yaml(&kerf.client(), &deployment.to_string()).await?;
    rolled_out(kerf, namespace).await?;
    kerf.delete_pod(namespace, "filler").await?;
    show(kerf).await?;

    say(
        "Half of each of two GPUs is free, and a large pod waits. policies/samples/moves.yaml allows to make room:",
    );
    let moves = json!({ "maxPods": 1, "afterSeconds": 0 });
    let mig = json!({ "mode": "Dynamic", "modeSwitch": "WithReset" });
    kerf.policy("everything", json!({ "mig": mig, "reshape": { "moves": moves } })).await?;
    create(kerf, namespace, "large-again", "7g.80gb").await?;
    running(kerf, namespace, ["large-again".to_owned()]).await?;
    rolled_out(kerf, namespace).await?;
    show(kerf).await
}

async fn rolled_out(kerf: &Kerf, namespace: &str) -> Result<()> {
    let status = ["-n", namespace, "rollout", "status", "deployment", "mover", "--timeout=120s"];
    kerf.cluster.kubectl(&status).await.map(|_| ())
}

fn say(text: &str) {
    println!("\n== {text}");
}

async fn create(kerf: &Kerf, namespace: &str, name: &str, profile: &str) -> Result<()> {
    kerf.create_pod(namespace, &gpu_pod(name, &[(&mig(profile), 1)])).await?;
    Ok(())
}

/// Waits for the pods and draws the nodes as they change.
async fn running(kerf: &Kerf, namespace: &str, pods: impl IntoIterator<Item = String>) -> Result<()> {
    let pods: Vec<String> = pods.into_iter().collect();
    let all = futures::future::try_join_all(pods.iter().map(|pod| kerf.wait_running(namespace, pod)));
    tokio::pin!(all);
    let mut last = String::new();
    loop {
        tokio::select! {
            done = &mut all => {
                done?;
                // The daemon's next report shows the processes.
                tokio::time::sleep(Duration::from_secs(1)).await;
                let now = drawn(kerf).await?;
                if now != last {
                    print!("{now}");
                }
                return Ok(());
            }
            () = tokio::time::sleep(Duration::from_millis(700)) => {
                let now = drawn(kerf).await?;
                if now != last {
                    println!("{now}");
                    last = now;
                }
            }
        }
    }
}

async fn drawn(kerf: &Kerf) -> Result<String> {
    let nodes = kerf.gpu_nodes().list(&Default::default()).await?;
    Ok(nodes.iter().map(draw::node).collect())
}

async fn show(kerf: &Kerf) -> Result<()> {
    print!("{}", drawn(kerf).await?);
    Ok(())
}
