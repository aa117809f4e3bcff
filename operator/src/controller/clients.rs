//! Restarts pods that hold a GPU open, where a policy lets them be restarted and nothing but they keeps the GPU from
//! being as it says.
//!
//! The daemon reports who is in the way ([`kerf_crds::gpu_node::Gpu::clients`]). [`due`] finds the nodes with such GPUs,
//! [`choose`] the pods to evict: all clients of a GPU, or none, as one that stays would keep the GPU as it is. A DaemonSet
//! makes its pod again within seconds; the daemon tries again at the moment when the last client has ended, and where
//! the new one was faster, the next round comes after a pause that grows.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kerf_crds::gpu_node::{Client, Gpu};
use kerf_crds::partition_policy::RestartableClients;
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::api::ListParams;
use kube::core::{Selector, SelectorExt};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource, ResourceExt};
use tokio::time::timeout;

use super::matching::{Match, Matches};
use crate::cache::World;
use crate::scheduler::apply::{PATIENCE, Writer};
use crate::scheduler::memory::doubled;
use crate::scheduler::snapshot::follows;

/// How soon a node is looked at again where nobody could be evicted, since pods and their labels change; doubled while
/// nothing does.
const LOOK: Duration = Duration::from_secs(10);
/// Longest time between two looks.
const LONGEST_LOOK: Duration = Duration::from_secs(300);
/// Pause of a node after its first round of evictions; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
/// Longest pause. A node without a round for as long after it begins anew.
const LONGEST_PAUSE: Duration = Duration::from_secs(1800);
/// Nodes that are looked at in one cycle: a new policy may concern all of the cluster's at once.
const AT_ONCE: usize = 8;

/// What became of the last rounds, by node. May be lost at any moment: it sets the pace, and what policies say.
#[derive(Debug, Default)]
pub struct Rounds(Mutex<HashMap<String, Round>>);

#[derive(Debug)]
struct Round {
    /// How many in succession have evicted somebody, or tried.
    times: u32,
    /// How many looks in succession have found the same, and nobody to evict.
    looks: u32,
    until: Instant,
    /// By GPU.
    said: BTreeMap<String, String>,
}

impl Rounds {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Round>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rests(&self, node: &str, now: Instant) -> bool {
        self.lock().get(node).is_some_and(|round| round.until > now)
    }

    /// Notes that a node is being looked at.
    fn begin(&self, node: &str, now: Instant) {
        let mut rounds = self.lock();
        rounds.retain(|_, round| round.until + LONGEST_PAUSE > now);
        let new = || Round { times: 0, looks: 0, until: now, said: BTreeMap::new() };
        let round = rounds.entry(node.to_owned()).or_insert_with(new);
        round.until = now + LOOK;
    }

    /// Notes what came of it; answers whether there is anything new to say.
    fn end(&self, node: &str, evicts: bool, said: BTreeMap<String, String>, now: Instant) -> bool {
        let mut rounds = self.lock();
        let Some(round) = rounds.get_mut(node) else { return false };
        let new = round.said != said;
        if evicts {
            round.until = now + doubled(FIRST_PAUSE, round.times, LONGEST_PAUSE);
            (round.times, round.looks) = (round.times + 1, 0);
        } else {
            round.looks = if new { 0 } else { round.looks + 1 };
            round.until = now + doubled(LOOK, round.looks, LONGEST_LOOK);
            // Somebody else has kept it as it is for so long that what was evicted before is another matter.
            if round.until >= now + LONGEST_LOOK {
                round.times = 0;
            }
        }
        round.said = said;
        new
    }

    /// What there is to say of a GPU's clients besides the daemon's own words.
    pub fn remark(&self, policy: &PartitionPolicy, node: &str, gpu: &Gpu) -> Option<String> {
        if gpu.clients.is_empty() {
            return None;
        }
        if policy.spec.reshape.restartable_clients.is_empty() {
            return Some("spec.reshape.restartableClients lets nobody be restarted for it".into());
        }
        self.lock().get(node)?.said.get(&gpu.uuid).cloned()
    }
}

/// A node where clients are in the way.
#[derive(Debug)]
pub struct Due {
    node: Arc<GpuNode>,
    gpus: Vec<Held>,
}

/// A GPU that nothing but clients keeps from being as its policy says.
#[derive(Debug)]
struct Held {
    uuid: String,
    index: u32,
    clients: Vec<Client>,
    policy: Arc<PartitionPolicy>,
}

/// The nodes to look at now.
pub fn due(world: &World, matches: &Matches, rounds: &Rounds, now: Instant) -> Vec<Due> {
    let held = |gpu: &Gpu, found: Option<&Match>| {
        let policy = found?.policy()?;
        let concerns = !gpu.clients.is_empty()
            && !policy.spec.reshape.restartable_clients.is_empty()
            && gpu.unmanaged.is_none()
            && gpu.unhealthy.is_none();
        concerns.then(|| Held {
            uuid: gpu.uuid.clone(),
            index: gpu.index,
            clients: gpu.clients.clone(),
            policy: Arc::clone(policy),
        })
    };
    let nodes = world.gpu_nodes.iter().filter_map(|node| {
        let name = node.name_any();
        let (status, here) = (node.status.as_ref()?, matches.get(&name)?);
        // What is in the way of an older spec may be in nobody's way.
        let current = follows(status) && status.observed_generation == node.metadata.generation;
        let gpus: Vec<Held> = status.gpus.iter().filter_map(|gpu| held(gpu, here.get(&gpu.uuid))).collect();
        // A kubelet that is away would end nothing.
        let ready = world.nodes.get(&name).is_some_and(|node| node.ready);
        let look = current && ready && !gpus.is_empty() && !rounds.rests(&name, now);
        look.then(|| Due { node: Arc::clone(node), gpus })
    });
    nodes.take(AT_ONCE).collect()
}

/// Whom to evict for which GPU, each once, and what to say of the GPUs.
#[derive(Debug, Default)]
struct Choice<'a> {
    evict: Vec<(&'a Pod, &'a Held)>,
    said: BTreeMap<String, String>,
}

/// Chooses among the node's pods.
fn choose<'a>(gpus: &'a [Held], pods: &'a [Pod]) -> Choice<'a> {
    let mut choice = Choice::default();
    for gpu in gpus {
        let mut clients: Vec<&Client> = gpu.clients.iter().collect();
        clients.sort_by_key(|client| client.pod_uid.is_some());
        let judged: Result<Vec<&Pod>, String> =
            clients.into_iter().map(|client| judge(client, pods, &gpu.policy)).collect();
        let said = match judged {
            Ok(all) => {
                let names: Vec<String> = all.iter().map(|pod| id(pod)).collect();
                // One that is on its way out is waited for.
                for pod in all.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
                    if !choice.evict.iter().any(|(other, _)| other.uid() == pod.uid()) {
                        choice.evict.push((pod, gpu));
                    }
                }
                format!("restarted for it: pod {}", names.join(", "))
            }
            Err(why) => format!("nobody is restarted for it: {why}"),
        };
        choice.said.insert(gpu.uuid.clone(), said);
    }
    choice
}

/// The pod of a client, if it may be restarted; else why not.
fn judge<'a>(client: &Client, pods: &'a [Pod], policy: &PartitionPolicy) -> Result<&'a Pod, String> {
    let process = &client.process;
    let Some(uid) = &client.pod_uid else {
        return Err(format!("{process} is in no pod that Kerf can restart"));
    };
    let Some(pod) = pods.iter().find(|pod| pod.metadata.uid.as_ref() == Some(uid)) else {
        return Err(format!("the pod of {process} is not on the node any more"));
    };
    let why_not = if !policy.spec.reshape.restartable_clients.iter().any(|clients| selects(clients, pod)) {
        "is selected by no entry of spec.reshape.restartableClients"
    } else if pod.labels().get("app.kubernetes.io/part-of").is_some_and(|part_of| part_of == "kerf") {
        "is Kerf's own"
    } else if pod.spec.iter().any(|spec| spec.resource_claims.iter().flatten().next().is_some()) {
        "has ResourceClaims"
    } else if !pod
        .owner_references()
        .iter()
        .any(|owner| owner.controller == Some(true) && owner.kind != "Node")
    {
        "has no controller that would make it again"
    } else {
        return Ok(pod);
    };
    Err(format!("pod {} {why_not}", id(pod)))
}

fn selects(RestartableClients { namespace, pod_selector }: &RestartableClients, pod: &Pod) -> bool {
    pod.namespace().as_ref() == Some(namespace)
        // One that cannot be read selects nobody; the webhook lets none in.
        && Selector::try_from(pod_selector.clone()).is_ok_and(|selector| selector.matches(pod.labels()))
}

fn id(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// Looks at these nodes, and evicts whom it finds.
pub async fn restart(writer: &Writer, rounds: &Rounds, due: Vec<Due>) {
    futures::stream::iter(due)
        .for_each_concurrent(AT_ONCE, |due| async move {
            if timeout(PATIENCE, round(writer, rounds, &due)).await.is_err() {
                tracing::warn!(node = due.node.name_any(), "the API server took too long; looking again");
            }
        })
        .await;
}

async fn round(writer: &Writer, rounds: &Rounds, due: &Due) {
    let node = due.node.name_any();
    rounds.begin(&node, Instant::now());
    // A client without a pod decides alone.
    let hopeless = |gpu: &Held| gpu.clients.iter().any(|client| client.pod_uid.is_none());
    let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods = if due.gpus.iter().all(hopeless) {
        Vec::new()
    } else {
        match Api::<Pod>::all(writer.client.clone()).list(&on_node).await {
            Ok(pods) => pods.items,
            Err(error) => return tracing::warn!(node, %error, "cannot list the node's pods"),
        }
    };
    let Choice { evict: chosen, mut said } = choose(&due.gpus, &pods);
    for (pod, gpu) in &chosen {
        if !writer.leadership.holds() {
            return;
        }
        let (namespace, uid) = (pod.namespace().unwrap_or_default(), pod.uid().unwrap_or_default());
        match writer.evict(&namespace, &pod.name_any(), &uid).await {
            Ok(()) => tell(writer, &due.node, pod, gpu).await,
            // Gone, or another of the same name.
            Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
            // A disruption budget, for instance. The others would be evicted in vain.
            Err(error) => {
                tracing::info!(pod = id(pod), %error, "cannot evict a client of a GPU");
                let error = match error {
                    kube::Error::Api(status) => status.message,
                    other => other.to_string(),
                };
                said.insert(gpu.uuid.clone(), format!("pod {} cannot be restarted for it: {error}", id(pod)));
                break;
            }
        }
    }
    let new = rounds.end(&node, !chosen.is_empty(), said, Instant::now());
    if new || !chosen.is_empty() {
        // The policies have something to say, and other nodes may be due.
        writer.cache.wake();
    }
}

/// Says it on the pod, for its owner, and on the node's object.
async fn tell(writer: &Writer, node: &GpuNode, pod: &Pod, gpu: &Held) {
    let why = format!(
        "to free GPU {} of node {}, which it holds open, as PartitionPolicy {} lets it be restarted",
        gpu.index,
        node.name_any(),
        gpu.policy.name_any()
    );
    tracing::info!(pod = id(pod), node = node.name_any(), gpu = gpu.uuid, "evicted a client of a GPU");
    event(writer, &pod.object_ref(&()), format!("evicted {why}")).await;
    event(writer, &node.object_ref(&()), format!("evicted pod {} {why}", id(pod))).await;
}

async fn event(writer: &Writer, on: &ObjectReference, note: String) {
    let event = Event {
        type_: EventType::Normal,
        reason: "Evicted".into(),
        note: Some(note),
        action: "Restart".into(),
        secondary: None,
    };
    if let Err(error) = writer.events.publish(&event, on).await {
        tracing::debug!(%error, "cannot write an event");
    }
}

#[cfg(test)]
#[path = "clients_tests.rs"]
mod tests;
