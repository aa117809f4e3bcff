//! The cluster in memory: what the watches and our own writes have shown.
//!
//! ```text
//!  API server ──watch──▶ Cache ◀──answers to own writes── scheduler, controller
//!                          └──▶ World, read by each cycle; a change wakes the next one
//! ```

mod backoff;
pub mod budget;
pub mod node;
pub mod pod;
pub mod quantity;
pub mod store;
pub mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_crds::conditions::pod_reason;
use kerf_crds::{GpuNode, PartitionPolicy};
use tokio::sync::Notify;

pub use budget::BudgetInfo;
pub use node::NodeInfo;
pub use pod::{PodClaim, PodDetail, PodInfo, host_access};
pub use store::{Group, Store, Stored};

use crate::scheduler::claims;

/// Everything that decisions are made from.
#[derive(Debug, Default)]
pub struct World {
    pub pods: Store<PodInfo>,
    pub nodes: Store<NodeInfo>,
    pub claims: Store<ResourceClaim>,
    pub gpu_nodes: Store<GpuNode>,
    pub policies: Store<PartitionPolicy>,
    pub classes: Store<DeviceClass>,
    pub budgets: Store<BudgetInfo>,
    /// Newest version of a ResourceQuota, by namespace.
    pub quotas: BTreeMap<String, u64>,
    /// Keys of the pods that Kerf may have to do with, so that a cycle does not go over all pods of the cluster.
    pub interesting: BTreeSet<String>,
    /// Keys of those of them that are of gangs.
    pub of_gangs: BTreeSet<String>,
}

impl World {
    /// Whether every kind has been listed.
    pub fn synced(&self) -> bool {
        self.pods.synced()
            && self.nodes.synced()
            && self.claims.synced()
            && self.gpu_nodes.synced()
            && self.policies.synced()
            && self.classes.synced()
            && self.budgets.synced()
    }

    /// The pod with this name, if it still is the one with this UID.
    pub fn pod(&self, namespace: &str, name: &str, uid: &str) -> Option<&Arc<PodInfo>> {
        self.pods.get(&format!("{namespace}/{name}")).filter(|pod| pod.uid == uid)
    }

    /// The pods of a namespace that Kerf may have to do with.
    pub fn interesting_in(&self, namespace: &str) -> impl Iterator<Item = &Arc<PodInfo>> {
        let prefix = format!("{namespace}/");
        let keys = self.interesting.range(prefix.clone()..);
        keys.take_while(move |key| key.starts_with(&prefix)).filter_map(|key| self.pods.get(key))
    }

    /// Notes that a quota of the namespace has changed; answers whether a pod waits for that.
    pub(crate) fn quota_changed(&mut self, namespace: &str, version: u64) -> bool {
        let newest = self.quotas.entry(namespace.to_owned()).or_default();
        *newest = version.max(*newest);
        self.interesting_in(namespace).any(|pod| {
            let said = pod.detail.as_ref().and_then(|detail| detail.planned.as_ref());
            said.is_some_and(|(_, reason, _)| reason == pod_reason::QUOTA)
        })
    }

    /// The claim of this name.
    pub fn claim(&self, namespace: &str, name: &str) -> Option<&Arc<ResourceClaim>> {
        self.claims.get(&format!("{namespace}/{name}"))
    }
}

/// The shared [`World`].
#[derive(Clone, Debug, Default)]
pub struct Cache {
    world: Arc<RwLock<World>>,
    changed: Arc<Notify>,
}

impl Cache {
    /// The world as it is now. Watches wait while the guard lives.
    pub fn read(&self) -> RwLockReadGuard<'_, World> {
        self.world.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, World> {
        self.world.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Changes the world; wakes the cycle if `change` says that something is new.
    pub fn update(&self, change: impl FnOnce(&mut World) -> bool) {
        if change(&mut self.write()) {
            self.changed.notify_one();
        }
    }

    /// Wakes the cycle although nothing changed.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Resolves when the world has changed since the last time.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Notes the API server's answer to a write of ours.
    pub fn wrote_pod(&self, pod: Pod) {
        self.update(|world| world.put_pod(PodInfo::from(pod), Store::wrote));
    }

    /// See [`Cache::wrote_pod`].
    pub fn wrote_claim(&self, mut claim: ResourceClaim) {
        watch::trim(&mut claim.metadata);
        self.update(|world| world.claims.wrote(claim));
    }

    /// See [`Cache::wrote_pod`].
    pub fn wrote_gpu_node(&self, mut node: GpuNode) {
        watch::trim(&mut node.metadata);
        self.update(|world| world.gpu_nodes.wrote(node));
    }

    /// See [`Cache::wrote_pod`].
    pub fn wrote_policy(&self, mut policy: PartitionPolicy) {
        watch::trim(&mut policy.metadata);
        self.update(|world| world.policies.wrote(policy));
    }

    /// See [`Cache::wrote_pod`].
    pub fn wrote_class(&self, mut class: DeviceClass) {
        watch::trim(&mut class.metadata);
        self.update(|world| world.classes.wrote(class));
    }
}

impl World {
    /// Takes a pod in by one of the store's ways and keeps the index.
    pub fn put_pod(&mut self, pod: PodInfo, way: impl FnOnce(&mut Store<PodInfo>, PodInfo) -> bool) -> bool {
        let key = pod.key();
        let changed = way(&mut self.pods, pod);
        self.index_pod(&key);
        changed
    }

    fn index_pod(&mut self, key: &str) {
        let detail = self.pods.get(key).and_then(|pod| pod.detail.as_ref());
        let of_gang = detail.is_some_and(|detail| detail.gang.is_some());
        for (index, is_in) in [(&mut self.interesting, detail.is_some()), (&mut self.of_gangs, of_gang)] {
            if is_in {
                index.insert(key.to_owned());
            } else {
                index.remove(key);
            }
        }
    }

    pub(crate) fn index_all_pods(&mut self) {
        let detailed = self.pods.iter().filter_map(|pod| Some((pod.key(), pod.detail.as_ref()?)));
        let of_gangs: Vec<(String, bool)> =
            detailed.map(|(key, detail)| (key, detail.gang.is_some())).collect();
        self.of_gangs = of_gangs.iter().filter(|(_, of_gang)| *of_gang).map(|(key, _)| key.clone()).collect();
        self.interesting = of_gangs.into_iter().map(|(key, _)| key).collect();
    }

    /// Pods of a node that Kerf may have to do with.
    pub fn interesting_on(&self, node: &str) -> impl Iterator<Item = &Arc<PodInfo>> {
        let pods = self.pods.of(node).into_iter().flat_map(|group| group.values());
        pods.filter(|pod| pod.detail.is_some())
    }

    /// Pods that are bound nowhere and that Kerf may have to do with.
    pub fn unbound(&self) -> impl Iterator<Item = &Arc<PodInfo>> {
        self.interesting_on(PodInfo::NOWHERE)
    }
}

/// `metadata.resourceVersion` as a number; 0 if it is none.
pub fn version_of(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
}

macro_rules! stored {
    ($($kind:ty $(, $group:expr)?;)*) => {$(
        impl Stored for $kind {
            fn key(&self) -> String {
                let name = self.metadata.name.as_deref().unwrap_or_default();
                match &self.metadata.namespace {
                    Some(namespace) => format!("{namespace}/{name}"),
                    None => name.to_owned(),
                }
            }
            fn uid(&self) -> &str {
                self.metadata.uid.as_deref().unwrap_or_default()
            }
            fn version(&self) -> u64 {
                version_of(&self.metadata)
            }
            $(fn group(&self) -> Option<&str> {
                let group: fn(&Self) -> Option<&str> = $group;
                group(self)
            })?
        }
    )*};
}

stored! {
    ResourceClaim, |claim| claims::pool(claims::allocation(claim)?);
    GpuNode;
    PartitionPolicy;
    DeviceClass;
}
