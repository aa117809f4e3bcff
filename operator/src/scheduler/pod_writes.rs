//! Writes to pods: the gate, the condition, events.

use std::time::Instant;

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::names;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::apply::{Outcome, Writer, is_conflict, is_gone};
use super::placements::{Key, Seen};
use super::requests::all_allocated;
use super::tell::{self, Nominate, Sentence};
use crate::cache::PodInfo;

impl Writer {
    pub(super) fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(super) async fn ungate_after_allocation(&self, seen: &Seen) -> kube::Result<Outcome> {
        let Some(pod) = &seen.pod else { return Ok(Outcome::Later) };
        if !self.look(|world| all_allocated(world, pod)) {
            return Ok(Outcome::Later);
        }
        if !pod.other_gates().is_empty() {
            return Ok(Outcome::Later);
        }
        let node = seen.node.as_ref().map(|node| node.name_any());
        self.tell(pod, &tell::allocated(seen), node.as_deref().map_or(Nominate::AsIs, Nominate::Node)).await;
        self.ungate(pod).await?;
        Ok(Outcome::Done)
    }

    pub(super) async fn ungate(&self, pod: &PodInfo) -> kube::Result<()> {
        let gates = pod.detail.iter().flat_map(|detail| &detail.gates);
        let Some(index) = gates.into_iter().position(|gate| gate == names::GATE) else { return Ok(()) };
        let patch: json_patch::Patch = serde_json::from_value(json!([
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": format!("/spec/schedulingGates/{index}/name"), "value": names::GATE},
            {"op": "remove", "path": format!("/spec/schedulingGates/{index}")},
        ]))
        .map_err(kube::Error::SerdeError)?;
        let patch = Patch::Json::<()>(patch);
        let written = self.pods(&pod.namespace).patch(&pod.name, &PatchParams::default(), &patch).await?;
        self.cache.wrote_pod(written);
        Ok(())
    }

    pub(super) async fn read_pod(&self, key: &Key) -> kube::Result<Outcome> {
        match self.pods(&key.namespace).get_opt(&key.pod).await? {
            Some(pod) => {
                self.cache.wrote_pod(pod);
                self.memory.note_read(key);
                Ok(Outcome::Done)
            }
            // Gone; the watch tells.
            None => Ok(Outcome::Later),
        }
    }

    /// Writes the condition, and an event if the pod waits.
    pub(super) async fn tell(&self, pod: &PodInfo, sentence: &Sentence, nominate: Nominate<'_>) {
        let now = Instant::now();
        let current = self.look(|world| world.pod(&pod.namespace, &pod.name, &pod.uid).cloned());
        let pod = current.as_deref().unwrap_or(pod);
        let nominated = pod.detail.as_ref().and_then(|detail| detail.nominated.as_deref());
        let nominate = nominate.change(nominated).filter(|_| pod.node.is_none());
        if !sentence.due(pod, &self.memory, now) && nominate.is_none() {
            return;
        }
        let patch =
            sentence.patch(pod, nominate, &Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let api = self.pods(&pod.namespace);
        match api.patch_status(&pod.name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
            Ok(written) => {
                self.memory.told(&pod.uid, now);
                self.cache.wrote_pod(written);
                if !sentence.planned {
                    self.event(pod, EventType::Normal, sentence.reason, &sentence.message).await;
                }
            }
            Err(error) if is_conflict(&error) || is_gone(&error) => {}
            Err(error) => {
                tracing::warn!(pod = pod.id(), %error, "cannot write the pod's condition");
                self.memory.told(&pod.uid, now);
            }
        }
    }

    pub(super) async fn event(&self, pod: &PodInfo, type_: EventType, reason: &str, note: &str) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.to_owned()),
            action: "Plan".into(),
            secondary: None,
        };
        let reference = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..Default::default()
        };
        if let Err(error) = self.events.publish(&event, &reference).await {
            tracing::debug!(pod = pod.id(), %error, "cannot write an event");
        }
    }
}
