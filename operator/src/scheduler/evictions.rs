//! Evictions: of pods that are bound where they can never run, away from their partition, and of pods that are moved.
//! Disruption budgets hold.

use std::time::Instant;

use kerf_crds::conditions::pod_reason;
use kube::api::{DeleteParams, EvictParams, PostParams, Preconditions};
use kube::runtime::events::EventType;

use super::apply::{Writer, is_gone};
use super::rooms::Eviction;
use super::tell::{Nominate, Sentence};
use crate::cache::PodInfo;

impl Writer {
    /// A pod that can never run where it is bound: looked at once more, live, and evicted if another will take its
    /// place.
    pub(super) async fn stranded(&self, pod: &PodInfo) {
        let pods = self.pods(&pod.namespace);
        let live = match pods.get_opt(&pod.name).await {
            Ok(Some(live)) => PodInfo::from(live),
            Ok(None) => return,
            Err(error) => return self.failed(&pod.uid, "read the pod", &error),
        };
        if live.uid != pod.uid || live.done || live.deleting || live.node.is_none() {
            self.memory.not_stranded(&pod.uid);
            return;
        }
        let node = live.node.clone().unwrap_or_default();
        let message = format!("is bound to node {node}, where its partition is not, and can never run there");
        if live.detail.as_ref().is_none_or(|detail| detail.controller.is_none()) {
            // Nothing would come in its place: people must decide.
            let message = format!("{message}; delete it and create it again");
            self.tell(&live, &Sentence::waiting(pod_reason::BAD_CLAIM, message), Nominate::AsIs).await;
            self.memory.failed(&pod.uid, pod_reason::BAD_CLAIM, "bound away".into(), Instant::now());
            return;
        }
        match self.evict(&pod.namespace, &pod.name, &pod.uid).await {
            Ok(()) => {
                tracing::info!(pod = pod.id(), node, "evicted: bound away from its partition");
                self.event(&live, EventType::Warning, "Evicted", &format!("evicted: it {message}")).await;
            }
            // A disruption budget says wait.
            Err(error) => self.failed(&pod.uid, "evict the pod", &error),
        }
    }

    /// Moves a pod: what its controller makes in its place has a place already.
    pub(super) async fn move_away(&self, eviction: &Eviction) {
        let Eviction { pod, room_for, to } = eviction;
        let room_for = room_for.id();
        match self.evict(&pod.namespace, &pod.name, &pod.uid).await {
            Ok(()) => {
                tracing::info!(pod = pod.id(), room_for, to, "evicted: it is moved");
                self.memory.evicted(&pod.uid);
                let message = format!(
                    "evicted to make room for {room_for}; for the pod that comes in its place, room is kept on node {to}"
                );
                self.event(pod, EventType::Normal, "Moved", &message).await;
            }
            Err(error) if is_gone(&error) => {}
            // By a disruption budget, say: others may move instead.
            Err(error) => {
                tracing::info!(pod = pod.id(), room_for, %error, "not moved");
                self.memory.may_not_go(&pod.uid, Instant::now());
                self.memory.no_room(&eviction.room_for.uid, None, Instant::now());
            }
        }
    }

    /// Evicts the pod of this UID.
    pub(crate) async fn evict(&self, namespace: &str, name: &str, uid: &str) -> kube::Result<()> {
        let parameters = EvictParams {
            delete_options: Some(DeleteParams {
                preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
                ..DeleteParams::default()
            }),
            post_options: PostParams::default(),
        };
        self.pods(namespace).evict(name, &parameters).await.map(drop)
    }
}
