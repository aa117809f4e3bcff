//! The watches that feed the cache.

use std::fmt::Debug;

use futures::{Stream, TryStreamExt};
use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_crds::{GpuNode, PartitionPolicy};
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use super::backoff::WatchBackoff;
use super::{BudgetInfo, Cache, NodeInfo, PodInfo, Store, World, version_of};

/// Watches every kind that decisions are made from, until the set is dropped.
pub fn start(client: &Client, cache: &Cache) -> JoinSet<()> {
    let mut watches = JoinSet::new();
    watches.spawn(follow(Api::<Pod>::all(client.clone()), cache.clone(), |world, event| match event {
        watcher::Event::Apply(pod) => world.put_pod(PodInfo::from(pod), Store::watch_applied),
        watcher::Event::Delete(pod) => {
            world.put_pod(PodInfo::from(pod), |store, pod| store.watch_deleted(&pod))
        }
        watcher::Event::Init => {
            world.pods.listing_began();
            false
        }
        watcher::Event::InitApply(pod) => {
            world.pods.listed(PodInfo::from(pod));
            false
        }
        watcher::Event::InitDone => {
            world.pods.listing_done();
            world.index_all_pods();
            true
        }
    }));
    watches.spawn(follow(Api::<Node>::all(client.clone()), cache.clone(), |world, event| {
        deliver(&mut world.nodes, event, NodeInfo::from)
    }));
    watches.spawn(follow(Api::<ResourceClaim>::all(client.clone()), cache.clone(), |world, event| {
        deliver(&mut world.claims, event, |mut claim| {
            trim(&mut claim.metadata);
            claim
        })
    }));
    watches.spawn(follow(Api::<GpuNode>::all(client.clone()), cache.clone(), |world, event| {
        deliver(&mut world.gpu_nodes, event, |mut node| {
            trim(&mut node.metadata);
            node
        })
    }));
    watches.spawn(follow(Api::<PartitionPolicy>::all(client.clone()), cache.clone(), |world, event| {
        deliver(&mut world.policies, event, |mut policy| {
            trim(&mut policy.metadata);
            policy
        })
    }));
    watches.spawn(follow(Api::<DeviceClass>::all(client.clone()), cache.clone(), |world, event| {
        deliver(&mut world.classes, event, |mut class| {
            trim(&mut class.metadata);
            class
        })
    }));
    watches.spawn(follow(Api::<PodDisruptionBudget>::all(client.clone()), cache.clone(), |world, event| {
        deliver(&mut world.budgets, event, BudgetInfo::from)
    }));
    watches.spawn(follow_quotas(client.clone(), cache.clone()));
    watches
}

/// Takes out what nobody reads and what is most of a small object's size. (A PUT without `managedFields` keeps the
/// stored ones.)
pub(super) fn trim(metadata: &mut ObjectMeta) {
    metadata.managed_fields = None;
}

fn deliver<K, T: super::Stored>(
    store: &mut Store<T>,
    event: watcher::Event<K>,
    keep: impl FnOnce(K) -> T,
) -> bool {
    match event {
        watcher::Event::Apply(object) => store.watch_applied(keep(object)),
        watcher::Event::Delete(object) => store.watch_deleted(&keep(object)),
        watcher::Event::Init => {
            store.listing_began();
            false
        }
        watcher::Event::InitApply(object) => {
            store.listed(keep(object));
            false
        }
        watcher::Event::InitDone => {
            store.listing_done();
            true
        }
    }
}

async fn follow<K>(api: Api<K>, cache: Cache, deliver: impl Fn(&mut World, watcher::Event<K>) -> bool)
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    let kind = K::kind(&K::DynamicType::default()).into_owned();
    let events = watcher(api, watcher::Config::default());
    take(events, &kind, |event| cache.update(|world| deliver(world, event))).await;
}

/// Quotas are only waited for; what they say, the API server knows.
async fn follow_quotas(client: Client, cache: Cache) {
    let events = watcher(Api::<PartialObjectMeta<ResourceQuota>>::all(client), watcher::Config::default());
    take(events, "ResourceQuota", |event| {
        let (watcher::Event::Apply(quota) | watcher::Event::InitApply(quota) | watcher::Event::Delete(quota)) =
            event
        else {
            return;
        };
        let (namespace, version) = (quota.namespace().unwrap_or_default(), version_of(&quota.metadata));
        cache.update(|world| world.quota_changed(&namespace, version));
    })
    .await;
}

async fn take<E>(events: impl Stream<Item = Result<E, watcher::Error>>, kind: &str, mut with: impl FnMut(E)) {
    let mut events = std::pin::pin!(events.backoff(WatchBackoff::default()));
    loop {
        match events.try_next().await {
            Ok(Some(event)) => with(event),
            Ok(None) => return,
            // Retried with a pause by the stream itself.
            Err(error) => tracing::warn!(kind, %error, "watch failed"),
        }
    }
}
