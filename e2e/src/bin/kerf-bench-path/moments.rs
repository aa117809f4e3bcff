//! When what happened to a pod, as a client of the API server sees it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::GpuNode;
use kerf_crds::gpu_node::Owner;
use kube::api::{Api, WatchEvent, WatchParams};
use kube::{Client, ResourceExt as _};
use tokio::sync::mpsc;

/// Moments in the life of a pod, in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    Committed,
    Ready,
    Allocated,
    Ungated,
    Bound,
    Started,
}

/// Since the pod's creation.
pub type Times = BTreeMap<Moment, Duration>;

/// What the watches see, by the pod's UID.
pub struct Moments(mpsc::UnboundedReceiver<(String, Moment, Instant)>);

impl Moments {
    pub fn watch(client: &Client, namespace: &str) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let see = move |pod: &str, moment| drop(sender.send((pod.to_owned(), moment, Instant::now())));
        each(Api::namespaced(client.clone(), namespace), {
            let see = see.clone();
            move |pod: Pod| {
                let uid = pod.uid().unwrap_or_default();
                let spec = pod.spec.unwrap_or_default();
                if spec.scheduling_gates.unwrap_or_default().is_empty() {
                    see(&uid, Moment::Ungated);
                }
                if spec.node_name.is_some() {
                    see(&uid, Moment::Bound);
                }
                let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
                if statuses.iter().any(|status| status.started == Some(true)) {
                    see(&uid, Moment::Started);
                }
            }
        });
        each(Api::namespaced(client.clone(), namespace), {
            let see = see.clone();
            move |claim: ResourceClaim| {
                let allocated = claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
                for owner in claim.metadata.owner_references.iter().flatten().filter(|_| allocated) {
                    see(&owner.uid, Moment::Allocated);
                }
            }
        });
        each(Api::all(client.clone()), move |node: GpuNode| {
            let gpus = node.status.map(|status| status.gpus).unwrap_or_default();
            for partition in &node.spec.partitions {
                let Owner::Claim(owner) = &partition.owner else { continue };
                see(&owner.pod_uid, Moment::Committed);
                let mut on_gpu = gpus.iter().filter(|gpu| gpu.uuid == partition.gpu);
                let ready = match (&partition.instance, &partition.share) {
                    (_, Some(wanted)) => on_gpu
                        .flat_map(|gpu| &gpu.shares)
                        .any(|share| share.id == wanted.id && share.problem.is_none()),
                    (Some(wanted), None) => on_gpu.flat_map(|gpu| &gpu.instances).any(|instance| {
                        instance.uuid.is_some()
                            && instance.placement == wanted.placement
                            && instance.profile == wanted.profile
                    }),
                    (None, None) => on_gpu.next().is_some(),
                };
                if ready {
                    see(&owner.pod_uid, Moment::Ready);
                }
            }
        });
        Self(receiver)
    }

    /// Waits until the pod has started, and returns when it reached which moment.
    pub async fn until_started(&mut self, uid: &str, created: Instant) -> Result<Times> {
        let mut seen = Times::new();
        let limit = tokio::time::sleep(Duration::from_secs(120));
        tokio::pin!(limit);
        while !seen.contains_key(&Moment::Started) {
            tokio::select! {
                moment = self.0.recv() => {
                    let (pod, moment, at) = moment.context("the watches have ended")?;
                    if pod == uid {
                        seen.entry(moment).or_insert(at - created);
                    }
                }
                () = &mut limit => bail!("the pod did not start; seen {seen:?}"),
            }
        }
        Ok(seen)
    }

    /// Waits until so many pods have reached a moment since then; returns when, first and last.
    pub async fn until_all(
        &mut self,
        pods: usize,
        until: Moment,
        since: Instant,
    ) -> Result<(Instant, Instant)> {
        let mut seen = BTreeMap::new();
        let limit = tokio::time::sleep(Duration::from_secs(600));
        tokio::pin!(limit);
        while seen.len() < pods {
            tokio::select! {
                moment = self.0.recv() => {
                    let (pod, moment, at) = moment.context("the watches have ended")?;
                    if moment == until && at >= since {
                        seen.entry(pod).or_insert(at);
                    }
                }
                () = &mut limit => bail!("only {} of {pods} pods reached {until:?}", seen.len()),
            }
        }
        let first = seen.values().min().context("no pods")?;
        Ok((*first, *seen.values().max().context("no pods")?))
    }
}

/// Calls `each` with every change of every object, for as long as the program runs.
fn each<K>(api: Api<K>, each: impl Fn(K) + Send + 'static)
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
