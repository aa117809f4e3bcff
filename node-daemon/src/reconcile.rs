//! All GPUs: finds the driver and the GPUs, keeps a worker for each, and starts rounds of looking at everything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kerf_crds::conditions::node_reason;
use kerf_crds::gpu_node::Reason;
use kerf_crds::names;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::events::Note;
use crate::hardware::{Driver, Failure, Identity, Library, Unavailable, Versions, Xid, watch_xids};
use crate::inventory::Inventory;
use crate::ours;
use crate::supervise::supervise;
use crate::worker::{self, Context};

/// How often everything is looked at when nothing happens: what others do to the GPUs shows after this long at most.
const ROUND: Duration = Duration::from_secs(30);

/// How soon to look for a driver that is not there.
const NO_DRIVER: Duration = Duration::from_secs(5);

/// Digits of a UUID that usually tell the GPUs of a node apart.
const SHORT_NAME: usize = 8;

/// What a round found.
struct Found {
    versions: Versions,
    gpus: Vec<(u32, String)>,
    unreadable: Vec<(u32, Failure)>,
}

/// Why a round found nothing.
#[derive(Debug, thiserror::Error)]
enum NotFound {
    #[error(transparent)]
    Driver(#[from] Unavailable),
    #[error(transparent)]
    Call(#[from] Failure),
}

/// Runs until dropped; the workers end with it.
pub async fn run(context: Context, rounds: watch::Sender<u64>) -> anyhow::Result<()> {
    let mut workers = JoinSet::new();
    let mut known: BTreeMap<String, Identity> = BTreeMap::new();
    let (xid_sender, mut xids) = mpsc::channel(64);
    spawn_xid_thread(context.driver.clone(), xid_sender)?;
    let mut node = Inventory { boot_id: ours::boot_id(), ..Inventory::default() };
    loop {
        let driver = context.driver.clone();
        let found = tokio::task::spawn_blocking(move || look_around(&driver)).await?;
        context.health.follow(context.driver.departures());
        let pause = match found {
            Ok(found) => {
                let new = name_gpus(&found.gpus, &known);
                node.unavailable = None;
                node.driver_version = found.versions.driver;
                node.cuda_version = found.versions.cuda;
                let unreadable: Vec<Reason> = found.unreadable.iter().map(unreadable).collect();
                for reason in unreadable.iter().filter(|reason| !node.unreadable.contains(reason)) {
                    tell(&context, reason);
                }
                node.unreadable = unreadable;
                for identity in new {
                    tracing::info!(gpu = %identity.uuid, name = %identity.name, index = identity.index, "found a GPU");
                    known.insert(identity.uuid.clone(), identity.clone());
                    let context = context.clone();
                    let name = format!("worker of {}", identity.name);
                    workers.spawn(supervise(name, move || worker::run(context.clone(), identity.clone())));
                }
                context.state.publish_node(node.clone(), Some(known.keys().cloned().collect()));
                ROUND
            }
            Err(error) => {
                let message = error.to_string();
                let reason = Reason { reason: node_reason::DRIVER_UNAVAILABLE.into(), message };
                if node.unavailable.as_ref() != Some(&reason) {
                    tell(&context, &reason);
                }
                node.unavailable = Some(reason);
                context.state.publish_node(node.clone(), None);
                NO_DRIVER
            }
        };
        rounds.send_modify(|round| *round += 1);
        let waited = timeout(pause, async {
            tokio::select! {
                () = context.state.scan_requested() => {}
                () = new_failure(&context, &mut xids) => {}
            }
        });
        if waited.await.is_ok() {
            // Many causes at once make one round.
            sleep(Duration::from_millis(50)).await;
        }
        while let Ok(xid) = xids.try_recv() {
            note_xid(&context, &xid);
        }
    }
}

fn look_around(driver: &Driver) -> Result<Found, NotFound> {
    let library: Arc<Library> = driver.session()?;
    let uuids = library.gpu_uuids().inspect_err(|failure| driver.note_failure(&library, failure))?;
    let mut found = Found { versions: library.versions(), gpus: Vec::new(), unreadable: Vec::new() };
    for (index, uuid) in (0..).zip(uuids) {
        match uuid {
            Ok(uuid) => found.gpus.push((index, uuid)),
            Err(failure) => {
                driver.note_failure(&library, &failure);
                found.unreadable.push((index, failure));
            }
        }
    }
    Ok(found)
}

/// Logs and sends an event.
fn tell(context: &Context, what: &Reason) {
    tracing::warn!("{}", what.message);
    let Reason { reason, message } = what.clone();
    context.notes.send(Note { warning: true, reason, action: "Look", message });
}

fn unreadable((index, failure): &(u32, Failure)) -> Reason {
    Reason {
        reason: failure.code.name().into_owned(),
        message: format!("{failure} on the GPU with index {index}"),
    }
}

/// Names for GPUs not known yet: short where that tells them apart from all others, else the whole UUID.
fn name_gpus(found: &[(u32, String)], known: &BTreeMap<String, Identity>) -> Vec<Identity> {
    let short = |uuid: &str| names::gpu_name(uuid, SHORT_NAME);
    let alike = |uuid: &String| {
        let others = found.iter().map(|(_, uuid)| uuid).chain(known.keys());
        others.filter(|other| *other != uuid).any(|other| short(other) == short(uuid))
    };
    found
        .iter()
        .filter(|(_, uuid)| !known.contains_key(uuid))
        .map(|(index, uuid)| Identity {
            name: if alike(uuid) { names::gpu_name(uuid, usize::MAX) } else { short(uuid) },
            uuid: uuid.clone(),
            index: *index,
        })
        .collect()
}

/// The library's wait for events blocks, so it has a thread of its own, which ends with the receiver.
fn spawn_xid_thread(driver: Driver, xids: mpsc::Sender<Xid>) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name("xids".into())
        .spawn(move || watch_xids(&driver, |xid| xids.blocking_send(xid).is_ok()))
        .map(drop)
}

/// Takes XIDs until one tells of a failure that was not known.
async fn new_failure(context: &Context, xids: &mut mpsc::Receiver<Xid>) {
    while let Some(xid) = xids.recv().await {
        if note_xid(context, &xid) {
            return;
        }
    }
    std::future::pending().await
}

/// Whether it tells of a failure that was not known.
fn note_xid(context: &Context, xid: &Xid) -> bool {
    // What failed before the driver went is forgotten first, so that this is not.
    context.health.follow(context.driver.departures());
    match context.health.note(xid) {
        Some(Reason { reason, message }) => {
            tracing::error!("{message}");
            context.notes.send(Note { warning: true, reason, action: "Health", message });
            true
        }
        None => {
            tracing::info!(?xid, "an XID that tells of no new failure of a device");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_unless_two_would_be_the_same() {
        let found = [(0, "GPU-11111111-a"), (1, "GPU-22222222-b"), (2, "GPU-22222222-c")]
            .map(|(index, uuid)| (index, uuid.to_owned()));
        let names: Vec<String> =
            name_gpus(&found, &BTreeMap::new()).into_iter().map(|identity| identity.name).collect();
        assert_eq!(names, ["gpu-11111111", "gpu-22222222b", "gpu-22222222c"]);
    }
}
