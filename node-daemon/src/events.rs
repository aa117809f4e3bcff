//! Events on the node's GpuNode object.

use std::collections::HashMap;

use kerf_crds::{GpuNode, names};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _};
use tokio::sync::mpsc;

use crate::answer::{LIMIT, within};
use crate::node::NodeState;

/// Something that people should see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub warning: bool,
    /// CamelCase word.
    pub reason: String,
    /// What was being done, in a word: `Reshape`, `Health`.
    pub action: &'static str,
    pub message: String,
}

/// Where notes go. Never blocks; with the API server away, notes beyond a bound are dropped.
#[derive(Clone, Debug)]
pub struct Notes(mpsc::Sender<Note>);

/// Notes that wait while the API server is away.
const WAITING: usize = 64;

/// Texts whose repetitions are counted on one event.
const REMEMBERED: usize = 64;

/// Kubernetes refuses longer ones.
const MAX_MESSAGE: usize = 1024;

impl Notes {
    /// The two ends.
    pub fn channel() -> (Notes, mpsc::Receiver<Note>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Notes(sender), receiver)
    }

    /// Hands a note over.
    pub fn send(&self, note: Note) {
        if self.0.try_send(note).is_err() {
            tracing::debug!("an event was dropped: the API server does not take them fast enough");
        }
    }
}

/// Publishes notes as they come.
pub async fn publish(
    client: Client,
    state: NodeState,
    notes: &mut mpsc::Receiver<Note>,
) -> anyhow::Result<()> {
    let reporter = Reporter {
        controller: format!("{}/{}", kerf_crds::names::GROUP, names::NODE_DAEMON),
        instance: Some(state.node_name.clone()),
    };
    // A recorder counts what has the same reason and action as a repetition, and keeps the first text: the same error of
    // another call or another GPU would never be seen.
    let mut recorders: HashMap<String, Recorder> = HashMap::new();
    while let Some(note) = notes.recv().await {
        let mut node = GpuNode::new(&state.node_name, Default::default());
        node.metadata.uid = state.seen_spec().map(|seen| seen.uid.clone());
        let mut message = note.message;
        if message.len() > MAX_MESSAGE {
            message.truncate(message.floor_char_boundary(MAX_MESSAGE - 4));
            message.push('…');
        }
        if recorders.len() >= REMEMBERED && !recorders.contains_key(&message) {
            recorders.clear();
        }
        let recorder = recorders
            .entry(message.clone())
            .or_insert_with(|| Recorder::new(client.clone(), reporter.clone()));
        let event = Event {
            type_: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason,
            note: Some(message),
            action: note.action.to_owned(),
            secondary: None,
        };
        if let Err(error) = within(LIMIT, recorder.publish(&event, &node.object_ref(&()))).await {
            tracing::debug!(%error, "an event could not be published");
        }
    }
    Ok(())
}
