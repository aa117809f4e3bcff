//! Waiting for what a cluster will do, with an answer to "what did you see instead?".

use std::fmt::{Debug, Display};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use tokio::time::{Instant, sleep, timeout};

/// The pause between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// What one look at the cluster shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    /// It has happened.
    Yes(T),
    /// Not yet, and this is there instead. It becomes part of the error.
    NotYet(String),
}

impl<T> Seen<T> {
    /// For a look that finds something other than what is waited for.
    pub fn not_yet(instead: impl Display) -> Self {
        Self::NotYet(instead.to_string())
    }

    /// `Yes` with the observed value where it satisfies the condition, else `NotYet` with its `Debug` form.
    pub fn when(value: T, condition: impl FnOnce(&T) -> bool) -> Self
    where
        T: Debug,
    {
        if condition(&value) { Self::Yes(value) } else { Self::NotYet(format!("{value:?}")) }
    }
}

/// Looks again and again until `look` says yes. An error of a look counts as "not yet": an API server that restarts
/// is no reason to give up.
///
/// # Errors
/// The limit has passed; the message says what was waited for and what the last look saw.
pub async fn eventually<T, F, Fut>(limit: Duration, what: impl Display, mut look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Seen<T>>>,
{
    let end = Instant::now() + limit;
    let mut last = "nothing, the first look did not end".to_owned();
    loop {
        match timeout(limit, look()).await {
            Ok(Ok(Seen::Yes(value))) => return Ok(value),
            Ok(Ok(Seen::NotYet(instead))) => last = instead,
            Ok(Err(error)) => last = format!("an error: {error:#}"),
            Err(_) => {}
        }
        if Instant::now() >= end {
            bail!("{what}: not within {} s; last seen: {last}", limit.as_secs_f32());
        }
        sleep(INTERVAL).await;
    }
}

/// Waits until a pod is in the given phase, such as `Running`. Gives up at once where the pod has ended in another.
///
/// # Errors
/// The limit has passed, or the pod has ended; the message holds the pod's conditions and container states, and its
/// events.
pub async fn wait_pod_phase(
    client: &Client,
    namespace: &str,
    name: &str,
    phase: &str,
    limit: Duration,
) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let outcome = eventually(limit, format!("pod {namespace}/{name} {phase}"), || async {
        let Some(pod) = pods.get_opt(name).await? else { return Ok(Seen::not_yet("no such pod")) };
        let now = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
        if now == phase {
            return Ok(Seen::Yes(Ok(pod)));
        }
        if now == "Succeeded" || now == "Failed" {
            return Ok(Seen::Yes(Err(anyhow!("pod {namespace}/{name} has ended: {}", describe(&pod)))));
        }
        Ok(Seen::NotYet(describe(&pod)))
    })
    .await
    .and_then(|ended| ended);
    match outcome {
        Ok(pod) => Ok(pod),
        Err(error) => Err(error.context(events_of(client, namespace, name).await)),
    }
}

/// One line on a pod's phase, conditions that do not hold, and containers.
pub fn describe(pod: &Pod) -> String {
    let Some(status) = &pod.status else { return "no status".to_owned() };
    let mut parts = vec![status.phase.clone().unwrap_or_default()];
    parts.extend(status.reason.clone());
    parts.extend(status.message.clone());
    for condition in status.conditions.iter().flatten().filter(|condition| condition.status != "True") {
        parts.push(format!(
            "{}={} {} {}",
            condition.type_,
            condition.status,
            condition.reason.as_deref().unwrap_or_default(),
            condition.message.as_deref().unwrap_or_default()
        ));
    }
    for container in status.init_container_statuses.iter().chain(&status.container_statuses).flatten() {
        if let Some(state) = &container.state {
            parts.push(format!("{}: {}", container.name, serde_json::to_string(state).unwrap_or_default()));
        }
    }
    parts.join("; ")
}

async fn events_of(client: &Client, namespace: &str, name: &str) -> String {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let of_pod = ListParams::default().fields(&format!("involvedObject.name={name}"));
    match events.list(&of_pod).await {
        Ok(list) => {
            let lines: Vec<String> = list
                .items
                .iter()
                .map(|event| {
                    let text = event.message.as_deref().unwrap_or_default();
                    format!("  {}: {text}", event.reason.clone().unwrap_or_else(|| event.name_any()))
                })
                .collect();
            format!("events of pod {namespace}/{name}:\n{}", lines.join("\n"))
        }
        Err(error) => format!("the events of pod {namespace}/{name} cannot be read: {error}"),
    }
}
