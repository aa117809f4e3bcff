//! Events on pods.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, Recorder, Reporter};

/// Texts whose repetitions are counted on one event.
const REMEMBERED: usize = 1024;

/// Publishes events.
#[derive(Clone)]
pub struct Events {
    client: Client,
    reporter: Reporter,
    /// A recorder takes what has the same pod and reason for a repetition and keeps the first text, so each text has its
    /// own.
    recorders: Arc<Mutex<HashMap<String, Recorder>>>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// In the name of `reporter`.
    pub fn new(client: Client, reporter: Reporter) -> Self {
        Self { client, reporter, recorders: Arc::default() }
    }

    /// Publishes an event on an object.
    pub async fn publish(&self, event: &Event, on: &ObjectReference) -> kube::Result<()> {
        let recorder = {
            let mut recorders = self.recorders.lock().unwrap_or_else(PoisonError::into_inner);
            of_text(&mut recorders, event.note.as_deref().unwrap_or_default(), || {
                Recorder::new(self.client.clone(), self.reporter.clone())
            })
        };
        recorder.publish(event, on).await
    }
}

fn of_text<T: Clone>(all: &mut HashMap<String, T>, text: &str, make: impl FnOnce() -> T) -> T {
    if all.len() >= REMEMBERED && !all.contains_key(text) {
        all.clear();
    }
    all.entry(text.to_owned()).or_insert_with(make).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_is_counted_by_itself_and_not_too_many_are_remembered() {
        let mut all = HashMap::new();
        assert_eq!(of_text(&mut all, "a", || 1), 1);
        assert_eq!(of_text(&mut all, "b", || 2), 2);
        assert_eq!(of_text(&mut all, "a", || 3), 1);
        for index in 0..2 * REMEMBERED {
            of_text(&mut all, &index.to_string(), || 4);
            assert!(all.len() <= REMEMBERED);
        }
        assert_eq!(of_text(&mut all, "a", || 5), 5);
    }
}
