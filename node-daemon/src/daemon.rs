//! The daemon put together from its parts.

use std::sync::Arc;

use anyhow::Context as _;
use kerf_crds::GpuNode;
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::cdi::{CdiStore, HookPaths};
use crate::config::Config;
use crate::events::{self, Notes};
use crate::hardware::Driver;
use crate::health::Health;
use crate::modes::Modes;
use crate::mps::Mps;
use crate::node::NodeState;
use crate::ours::{self, Ours};
use crate::pace::Pace;
use crate::plugin::{Plugin, PodLimits};
use crate::supervise::supervise;
use crate::worker::Context;
use crate::{alone, api, foreign, metrics, mps, plugin, probe, reconcile, slices, status, tenants};

/// Runs until SIGTERM or SIGINT. What was begun is finished by the next process.
pub async fn run(config: Config) -> anyhow::Result<()> {
    std::fs::create_dir_all(&config.state_dir)
        .with_context(|| format!("failed to make {}", config.state_dir.display()))?;
    // Until the process ends, and with it the last call into the driver.
    std::mem::forget(alone::wait(&config.state_dir).await?);
    let config = Arc::new(config);
    let client = client().await?;
    let boot_id = ours::boot_id();
    let (checkpoint, recovered) =
        plugin::Checkpoint::open(&config.state_dir, &boot_id, &CdiStore::new(&config.cdi_dir))
            .context("failed to read the records of prepared claims")?;
    let state = NodeState::new(&config.node_name, recovered.claims);
    let (notes, receiver) = Notes::channel();
    let (verdicts, verdict) = watch::channel(None);
    let (rounds, round) = watch::channel(0);
    let (pods, seen_pods) = mps::pods::in_api(&client, &config.namespace, &state);
    let context = Context {
        state: state.clone(),
        driver: Driver::new(&config.driver_root),
        ours: Ours::load(&config.state_dir, &boot_id),
        health: Health::load(&config.state_dir, &boot_id),
        notes,
        verdicts: verdict,
        pace: Pace::default(),
        rounds: round,
        proc_root: Arc::from(config.proc_root.as_path()),
        mps: Mps::new(&config.driver_root, &config.mps_dir, &config.cgroup_root, pods),
        modes: Modes::load(&config.state_dir, &boot_id),
    };
    let (stopping, stop) = watch::channel(false);
    let receiver = Arc::new(tokio::sync::Mutex::new(receiver));

    let mut parts = JoinSet::new();
    macro_rules! part {
        ($name:literal, $start:expr) => {
            parts.spawn(supervise($name.to_owned(), $start));
        };
    }
    part!("watch of the GpuNode", {
        let (client, state, ours) = (client.clone(), state.clone(), context.ours.clone());
        let (checkpoint, lost) = (checkpoint.clone(), recovered.lost);
        move || {
            let (state_then, checkpoint) = (state.clone(), checkpoint.clone());
            let recover = move |node: &GpuNode| match lost {
                true => restore_claims(&state_then, &checkpoint, node),
                false => Ok(()),
            };
            api::follow(client.clone(), state.clone(), ours.clone(), recover)
        }
    });
    part!("watch for others", {
        let (client, state, root) = (client.clone(), state.clone(), config.host_root.clone());
        move || foreign::watch(client.clone(), state.clone(), root.clone(), verdicts.clone())
    });
    part!("watch of the MPS servers' pods", {
        let (client, config) = (client.clone(), config.clone());
        move || {
            let (namespace, node) = (config.namespace.clone(), config.node_name.clone());
            mps::pods::follow(client.clone(), namespace, node, seen_pods.clone())
        }
    });
    let limits = PodLimits::new(context.driver.clone(), &config.cgroup_root);
    let hook = HookPaths::new(&config.state_dir);
    hook.install()?;
    part!("containers' hooks", {
        let (hook, state, limits) = (hook.clone(), state.clone(), limits.clone());
        move || {
            let (hook, state, limits) = (hook.clone(), state.clone(), limits.clone());
            async move { Ok(plugin::hook::serve(&hook, state, limits).await?) }
        }
    });
    if !config.metrics_address.is_empty() {
        part!("metrics", {
            let (config, state) = (config.clone(), state.clone());
            move || {
                let (config, state) = (config.clone(), state.clone());
                async move { metrics::serve(&config.metrics_address, state).await }
            }
        });
    }
    part!("watch of the shares", {
        let (context, limits) = (context.clone(), limits.clone());
        move || tenants::run(context.clone(), limits.clone())
    });
    part!("hardware", move || reconcile::run(context.clone(), rounds.clone()));
    part!("status", {
        let (client, state) = (client.clone(), state.clone());
        move || status::write(client.clone(), state.clone())
    });
    part!("events", {
        let (client, state) = (client.clone(), state.clone());
        move || {
            let (client, state, receiver) = (client.clone(), state.clone(), receiver.clone());
            async move { events::publish(client, state, &mut *receiver.lock().await).await }
        }
    });
    part!("slices", {
        let (client, state) = (client.clone(), state.clone());
        move || {
            let (client, state) = (client.clone(), state.clone());
            async move {
                slices::run(state, client).await;
                Ok(())
            }
        }
    });
    part!("plugin", {
        let (client, state, config, stop) = (client.clone(), state.clone(), config.clone(), stop.clone());
        move || {
            let reader = plugin::from_api(client.clone());
            let plugin = Plugin::new(&config, state.clone(), checkpoint.clone(), reader, limits.clone());
            let stop = stop.clone();
            async move { Ok(plugin.run(stop).await?) }
        }
    });
    part!("probe", {
        let config = config.clone();
        move || {
            let config = config.clone();
            async move { probe::serve(&config.state_dir).await }
        }
    });

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("ending");
    stopping.send_replace(true);
    parts.shutdown().await;
    Ok(())
}

/// Takes up the claims that only the last report still knows of.
fn restore_claims(state: &NodeState, checkpoint: &plugin::Checkpoint, node: &GpuNode) -> std::io::Result<()> {
    let Some(status) = &node.status else { return Ok(()) };
    plugin::restore(state, checkpoint, plugin::claims_in_status(&node.spec, status)).map(drop)
}

/// A client of the API server by the usual ways: service account, or kubeconfig.
async fn client() -> anyhow::Result<Client> {
    // Named, since a build may have more than one. An error means that there is one already.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let config = kube::Config::infer().await.context("failed to find the API server")?;
    Ok(Client::try_from(config)?)
}
