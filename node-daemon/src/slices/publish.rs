//! Writes the slices, and watches that they stay as written.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_crds::names::{DRIVER, NODE_DAEMON};
use kube::api::{DeleteParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::time::Instant;

use super::build::build;
use super::pool::{Pool, differ};
use crate::answer::{LIMIT, within};
use crate::backoff::WatchBackoff;
use crate::node::NodeState;

/// Changes within this time are one write: making the instances of a pod is several steps, and pods come in bursts.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Pause after a write that failed; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Publishes the node's slices for as long as it is polled. Needs the rights to list, watch, create, update and delete
/// resourceslices.
pub async fn run(state: NodeState, client: Client) {
    let slices: Api<ResourceSlice> = Api::all(client);
    let own = format!("spec.driver={DRIVER},spec.nodeName={}", state.node_name);
    let events =
        watcher(slices.clone(), watcher::Config::default().fields(&own)).backoff(WatchBackoff::default());
    Publisher { state, slices, live: BTreeMap::new(), listed: false, listing: BTreeMap::new() }
        .run(events)
        .await;
}

struct Publisher {
    state: NodeState,
    slices: Api<ResourceSlice>,
    /// The driver's slices of this node as the API server last showed them, by name.
    live: BTreeMap<String, ResourceSlice>,
    /// Whether `live` is complete.
    listed: bool,
    /// A list under way.
    listing: BTreeMap<String, ResourceSlice>,
}

impl Publisher {
    async fn run(mut self, events: impl Stream<Item = watcher::Result<Event<ResourceSlice>>>) {
        let mut events = std::pin::pin!(events);
        let mut spec = self.state.spec.subscribe();
        let mut inventory = self.state.inventory.subscribe();
        let mut node_uid = self.state.node_uid.subscribe();
        let soon = || Instant::now() + DEBOUNCE;
        let mut due = Some(soon());
        let mut pause = FIRST_PAUSE;
        loop {
            let wake = due.unwrap_or_else(Instant::now);
            tokio::select! {
                event = events.next() => {
                    let news = match event {
                        Some(Ok(event)) => self.see(event),
                        Some(Err(error)) => {
                            tracing::debug!("the watch on ResourceSlices was interrupted: {error}");
                            false
                        }
                        None => return,
                    };
                    if news {
                        due.get_or_insert_with(soon);
                    }
                }
                Ok(()) = spec.changed() => { due.get_or_insert_with(soon); }
                Ok(()) = inventory.changed() => { due.get_or_insert_with(soon); }
                Ok(()) = node_uid.changed() => { due.get_or_insert_with(soon); }
                () = tokio::time::sleep_until(wake), if due.is_some() => {
                    due = None;
                    match self.publish().await {
                        Ok(()) => pause = FIRST_PAUSE,
                        Err(error) => {
                            tracing::warn!("cannot write the node's ResourceSlices, trying again in {} s: {error}", pause.as_secs());
                            due = Some(Instant::now() + pause);
                            pause = (pause * 2).min(LONGEST_PAUSE);
                        }
                    }
                }
            }
        }
    }

    /// Takes note of what the API server shows; whether that may call for a write.
    fn see(&mut self, event: Event<ResourceSlice>) -> bool {
        let name = |slice: &ResourceSlice| slice.metadata.name.clone().unwrap_or_default();
        match event {
            Event::Init => {
                self.listing.clear();
                false
            }
            Event::InitApply(slice) => {
                self.listing.insert(name(&slice), slice);
                false
            }
            Event::InitDone => {
                self.live = std::mem::take(&mut self.listing);
                self.listed = true;
                true
            }
            Event::Apply(slice) => {
                let version = slice.metadata.resource_version.clone();
                let old = self.live.insert(name(&slice), slice);
                // The echo of a write of ours is no news.
                old.is_none_or(|old| old.metadata.resource_version != version)
            }
            Event::Delete(slice) => {
                // A deletion that is older than what was written since is no news either.
                let name = name(&slice);
                let same = self.live.get(&name).is_some_and(|live| live.metadata.uid == slice.metadata.uid);
                if same {
                    self.live.remove(&name);
                }
                same
            }
        }
    }

    /// One comparison, and the writes that it calls for. Before everything is known there is nothing to compare; a
    /// change that makes it known comes here again.
    async fn publish(&mut self) -> kube::Result<()> {
        let (Some(inventory), Some(seen)) = (self.state.latest(), self.state.seen_spec()) else {
            return Ok(());
        };
        let Some(node_uid) = self.state.node_uid.borrow().clone() else { return Ok(()) };
        // What the devices are is not known for the moment: the slices stay as they are.
        if !self.listed || inventory.unavailable.is_some() {
            return Ok(());
        }
        let pool = Pool { node: self.state.node_name.clone(), node_uid };
        let devices = build(&inventory, &seen.spec);
        let live: Vec<&ResourceSlice> = self.live.values().collect();
        let newest = live.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
        let wanted = pool.slices(&devices, newest + 1);
        if !differ(&live, &wanted) {
            return Ok(());
        }
        let surplus: Vec<String> = self
            .live
            .keys()
            .filter(|name| !wanted.iter().any(|wanted| wanted.metadata.name.as_ref() == Some(*name)))
            .cloned()
            .collect();
        let parameters = PostParams { field_manager: Some(NODE_DAEMON.to_owned()), ..PostParams::default() };
        for slice in wanted {
            self.put(slice, &parameters).await?;
        }
        for name in surplus {
            match within(LIMIT, self.slices.delete(&name, &DeleteParams::default())).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => return Err(error),
            }
            self.live.remove(&name);
        }
        tracing::debug!(devices = devices.len(), generation = newest + 1, "published the node's devices");
        Ok(())
    }

    async fn put(&mut self, mut slice: ResourceSlice, parameters: &PostParams) -> kube::Result<()> {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let written = match self.live.get(&name) {
            Some(live) => {
                slice.metadata.resource_version.clone_from(&live.metadata.resource_version);
                within(LIMIT, self.slices.replace(&name, parameters, &slice)).await
            }
            None => within(LIMIT, self.slices.create(parameters, &slice)).await,
        };
        match written {
            Ok(slice) => {
                self.live.insert(name, slice);
                Ok(())
            }
            Err(error) => {
                // Deleted, made or edited by somebody meanwhile: look before the next try, the watch may be behind.
                match within(LIMIT, self.slices.get_opt(&name)).await? {
                    Some(slice) => _ = self.live.insert(name, slice),
                    None => _ = self.live.remove(&name),
                }
                Err(error)
            }
        }
    }
}
