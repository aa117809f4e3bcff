//! Puts the operator together: watches, webhook and election in every replica, decisions where the lease is.

use std::sync::Arc;

use anyhow::Context;
use kerf_crds::names;
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::Client;
use kube::runtime::events::Reporter;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::cache::{self, Cache, World};
use crate::config::Config;
use crate::leader::Election;
use crate::recorder::{self, Recorder};
use crate::scheduler::{self, apply::Writer, events::Events};
use crate::webhook::{self, View};

/// Runs until SIGTERM or SIGINT, or until something fails that cannot be retried.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("failed to find the API server")?;
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    run_until(client, config, stop).await
}

/// Runs until `signal` resolves, or until something fails that cannot be retried.
pub async fn run_until(
    client: Client,
    config: Config,
    signal: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let cache = Cache::default();
    let mut watches = cache::watch::start(&client, &cache);
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        // An error means that the sender is gone, which is a stop too.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };

    let election = Election::new(&client, &config.namespace, &config.lease_name, config.identity());
    let leadership = election.leadership();
    let wake = cache.clone();
    let election = tokio::spawn(election.run(until(stopped.clone()), move || wake.wake()));

    let view: Arc<dyn View> = Arc::new(cache.clone());
    let mut webhook =
        tokio::spawn(webhook::serve(client.clone(), config.webhook(), view, until(stopped.clone())));

    let reporter = Reporter { controller: names::OPERATOR.into(), instance: Some(config.identity()) };
    let writer = Writer {
        events: Events::new(client.clone(), reporter),
        memory: Arc::default(),
        client,
        cache,
        leadership,
    };
    let recorder = Recorder::start().context("failed to start the recorder")?;
    tokio::spawn(recorder::serve(config.debug_port, Arc::clone(recorder.shelf()), until(stopped.clone())));
    let mut scheduler = tokio::spawn(scheduler::run(writer, recorder, until(stopped)));

    let ended = tokio::select! {
        () = signal => Ok(()),
        ended = &mut webhook => match ended {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(anyhow::Error::new(error).context("the webhook ended")),
            Err(error) => Err(anyhow::Error::new(error).context("the webhook failed")),
        },
        ended = &mut scheduler => ended.context("the scheduler failed"),
        ended = watches.join_next() => Err(match ended {
            Some(Err(error)) => anyhow::Error::new(error).context("a watch failed"),
            _ => anyhow::anyhow!("a watch ended"),
        }),
    };
    // Everything that writes ends before the lease is given back.
    let _ = stop.send(true);
    if !scheduler.is_finished() {
        let _ = scheduler.await;
    }
    let _ = election.await;
    ended
}

impl View for World {
    fn policies(&self) -> Option<Vec<Arc<PartitionPolicy>>> {
        self.policies.synced().then(|| self.policies.iter().cloned().collect())
    }

    fn nodes(&self) -> Vec<Arc<GpuNode>> {
        self.gpu_nodes.iter().cloned().collect()
    }
}

impl View for Cache {
    fn policies(&self) -> Option<Vec<Arc<PartitionPolicy>>> {
        self.read().policies()
    }

    fn nodes(&self) -> Vec<Arc<GpuNode>> {
        self.read().nodes()
    }
}
