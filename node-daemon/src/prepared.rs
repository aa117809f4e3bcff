//! The claims that devices of this node are prepared for, and the one place where Prepare and destruction meet.
//!
//! The plugin records a claim here before it answers kubelet; the workers ask here before they destroy. Both go through
//! one lock that is never held across a call into the driver, so a slow destroy delays no Prepare on other devices:
//! what is about to be destroyed is *condemned*, and Prepare of a condemned device is refused; what is prepared cannot
//! be condemned.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_crds::gpu_node::{ClaimReference, Placement, PodReference, WantedShare};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// A device as the hardware has it: a whole GPU, a place on it, or a share of one of the two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceKey {
    /// UUID of the GPU.
    pub gpu: String,
    /// Memory slices of the instance; `None` for the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Id of the share; `None` for all of the GPU or instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
}

impl DeviceKey {
    /// All of a GPU.
    pub fn gpu(uuid: &str) -> Self {
        Self { gpu: uuid.to_owned(), placement: None, share: None }
    }

    /// All of a place on a GPU.
    pub fn instance(gpu: &str, placement: Placement) -> Self {
        Self { placement: Some(placement), ..Self::gpu(gpu) }
    }

    /// A share of a GPU.
    pub fn share(gpu: &str, id: &str) -> Self {
        Self::gpu(gpu).with_share(id)
    }

    /// A share of what this is all of.
    pub fn with_share(self, id: &str) -> Self {
        Self { share: Some(id.to_owned()), ..self }
    }

    /// All of what it is a share of; itself, if it is none.
    pub fn carrier(&self) -> Self {
        Self { share: None, ..self.clone() }
    }

    /// Whether it is all of a GPU.
    pub fn is_whole(&self) -> bool {
        self.placement.is_none() && self.share.is_none()
    }

    /// Whether the two cannot be two claims'. Shares of one carrier are there to be beside each other.
    pub fn overlaps(&self, other: &DeviceKey) -> bool {
        self.gpu == other.gpu
            && match (self.placement, other.placement) {
                (Some(a), Some(b)) => a.overlaps(&b),
                _ => true,
            }
            && match (&self.share, &other.share) {
                (Some(a), Some(b)) => a == b || self.placement != other.placement,
                _ => true,
            }
    }
}

/// One device of a prepared claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreparedDevice {
    /// The claim's request: `request` or `request/subrequest`.
    pub request: String,
    /// Name of the DRA device in the ResourceSlice.
    pub device: String,
    /// Where it is.
    pub key: DeviceKey,
    /// UUID of the MIG device or of the GPU at the time of Prepare.
    pub uuid: String,
    /// Fully qualified CDI names that kubelet was given.
    #[serde(default)]
    pub cdi: Vec<String>,
    /// The share, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<WantedShare>,
}

/// A claim between Prepare and Unprepare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prepared {
    pub claim: ClaimReference,
    /// The one pod that uses the claim; known where a device is a share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodReference>,
    pub devices: Vec<PreparedDevice>,
}

/// All prepared claims by claim UID.
pub type PreparedClaims = BTreeMap<String, Prepared>;

/// Why a claim cannot be recorded as prepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("{device} is still prepared for claim {namespace}/{name} (UID {uid})", namespace = .by.namespace, name = .by.name, uid = .by.uid)]
    Held { device: String, by: ClaimReference },
    #[error("{device} is being taken down")]
    Condemned { device: String },
}

/// See the module's text. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PreparedStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Behind the lock: the devices being taken down.
    condemned: Mutex<Vec<DeviceKey>>,
    claims: watch::Sender<Arc<PreparedClaims>>,
}

impl PreparedStore {
    /// Starts from what an earlier process left, as the plugin's checkpoint has it.
    pub fn new(claims: PreparedClaims) -> Self {
        Self {
            inner: Arc::new(Inner {
                condemned: Mutex::new(Vec::new()),
                claims: watch::Sender::new(Arc::new(claims)),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<DeviceKey>> {
        // The list stays valid whatever panicked while it was held: entries are pushed and removed whole.
        self.inner.condemned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a claim. Recording the same claim again replaces its entry.
    pub fn record(&self, prepared: Prepared) -> Result<(), Refused> {
        let condemned = self.lock();
        let claims = self.snapshot();
        for device in &prepared.devices {
            if condemned.iter().any(|key| key.overlaps(&device.key)) {
                return Err(Refused::Condemned { device: device.device.clone() });
            }
            if let Some(by) = holder(&claims, &device.key, &prepared.claim.uid) {
                return Err(Refused::Held { device: device.device.clone(), by });
            }
        }
        let mut next = (*claims).clone();
        next.insert(prepared.claim.uid.clone(), prepared);
        self.inner.claims.send_replace(Arc::new(next));
        Ok(())
    }

    /// Forgets a claim; `false` if it was not there.
    pub fn remove(&self, claim_uid: &str) -> bool {
        let _guard = self.lock();
        let mut next = (*self.snapshot()).clone();
        let removed = next.remove(claim_uid).is_some();
        if removed {
            self.inner.claims.send_replace(Arc::new(next));
        }
        removed
    }

    /// What is prepared now.
    pub fn snapshot(&self) -> Arc<PreparedClaims> {
        self.inner.claims.borrow().clone()
    }

    /// Wakes on every change.
    pub fn subscribe(&self) -> watch::Receiver<Arc<PreparedClaims>> {
        self.inner.claims.subscribe()
    }

    /// The claims that hold a device overlapping this one.
    pub fn holders(&self, key: &DeviceKey) -> Vec<ClaimReference> {
        holders(&self.snapshot(), key)
    }

    /// Bars Prepare of everything that overlaps `key` until the guard is dropped; `None` if something there is
    /// prepared. `users` tells who would be disturbed: [`holders`], or one of those after it.
    pub fn condemn(
        &self,
        key: DeviceKey,
        users: fn(&PreparedClaims, &DeviceKey) -> Vec<ClaimReference>,
    ) -> Option<Condemned> {
        let mut condemned = self.lock();
        if !users(&self.snapshot(), &key).is_empty() {
            return None;
        }
        condemned.push(key.clone());
        Some(Condemned { store: self.clone(), key })
    }
}

/// The claims in `claims` that hold a device overlapping `key`.
pub fn holders(claims: &PreparedClaims, key: &DeviceKey) -> Vec<ClaimReference> {
    holding(claims, |device| device.key.overlaps(key))
}

/// The claims in `claims` that hold just this device or a share of it. On a GPU that is not in MIG mode these are the only users: an
/// instance that a claim was prepared for went with a reboot, and switching MIG on is what brings it back.
pub fn holders_of_exactly(claims: &PreparedClaims, key: &DeviceKey) -> Vec<ClaimReference> {
    let of = |device: &PreparedDevice| device.key.carrier() == key.carrier();
    holding(claims, of)
}

/// The claims in `claims` that hold all of something that overlaps this device, and not a share of it.
pub fn holders_of_whole(claims: &PreparedClaims, key: &DeviceKey) -> Vec<ClaimReference> {
    holding(claims, |device| device.key.share.is_none() && device.key.overlaps(key))
}

/// The claims in `claims` that hold shares of this device.
pub fn holders_of_shares(claims: &PreparedClaims, key: &DeviceKey) -> Vec<ClaimReference> {
    holding(claims, |device| device.key.share.is_some() && device.key.carrier() == key.carrier())
}

fn holding(claims: &PreparedClaims, holds: impl Fn(&PreparedDevice) -> bool) -> Vec<ClaimReference> {
    let holders = claims.values().filter(|prepared| prepared.devices.iter().any(&holds));
    holders.map(|prepared| prepared.claim.clone()).collect()
}

fn holder(claims: &PreparedClaims, key: &DeviceKey, but_not: &str) -> Option<ClaimReference> {
    holders(claims, key).into_iter().find(|claim| claim.uid != but_not)
}

/// While it lives, nothing overlapping is prepared.
#[derive(Debug)]
pub struct Condemned {
    store: PreparedStore,
    key: DeviceKey,
}

impl Drop for Condemned {
    fn drop(&mut self) {
        let mut condemned = self.store.lock();
        if let Some(position) = condemned.iter().position(|key| *key == self.key) {
            condemned.swap_remove(position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(start: u32, size: u32) -> DeviceKey {
        DeviceKey::instance("GPU-1", Placement { start, size })
    }

    fn claim(uid: &str, key: DeviceKey) -> Prepared {
        Prepared {
            claim: ClaimReference { namespace: "ns".into(), name: uid.into(), uid: uid.into() },
            devices: vec![PreparedDevice {
                request: "r".into(),
                device: "d".into(),
                key,
                uuid: "MIG-1".into(),
                cdi: vec![],
                share: None,
            }],
            pod: None,
        }
    }

    #[test]
    fn two_claims_never_hold_overlapping_slices() {
        let store = PreparedStore::new(PreparedClaims::new());
        store.record(claim("a", key(0, 4))).unwrap();
        store.record(claim("a", key(0, 4))).expect("the same claim again");
        let refused = store.record(claim("b", key(3, 1))).unwrap_err();
        assert!(matches!(refused, Refused::Held { by, .. } if by.uid == "a"));
        let whole = DeviceKey::gpu("GPU-1");
        assert!(
            store.record(claim("c", whole.clone())).is_err(),
            "a whole GPU overlaps each of its instances"
        );
        assert_eq!(store.holders(&whole).len(), 1);
        store.record(claim("b", key(4, 1))).unwrap();
        assert!(store.remove("a") && !store.remove("a"));
    }

    #[test]
    fn shares_are_beside_each_other_and_beside_nothing_else() {
        let store = PreparedStore::new(PreparedClaims::new());
        let share = |id| DeviceKey::share("GPU-1", id);
        store.record(claim("a", share("1"))).unwrap();
        store.record(claim("b", share("2"))).expect("another share of the GPU");
        assert!(matches!(store.record(claim("c", share("2"))), Err(Refused::Held { .. })), "the same share");
        for other in [DeviceKey::gpu("GPU-1"), key(0, 1)] {
            assert!(
                matches!(store.record(claim("c", other.clone())), Err(Refused::Held { .. })),
                "{other:?}"
            );
        }
        for (start, id) in [(4, "3"), (4, "4")] {
            store.remove("a");
            store.remove("b");
            store.record(claim(id, key(start, 4).with_share(id))).expect("shares of one instance");
        }
        for other in [key(4, 4), key(4, 1).with_share("5"), share("5")] {
            assert!(
                matches!(store.record(claim("c", other.clone())), Err(Refused::Held { .. })),
                "{other:?}"
            );
        }
        store.record(claim("d", key(0, 4))).expect("its neighbour");
        assert_eq!(holders_of_whole(&store.snapshot(), &DeviceKey::gpu("GPU-1")).len(), 1, "shares are none");
        let store = PreparedStore::new(PreparedClaims::new());
        store.record(claim("a", share("1"))).unwrap();
        store.record(claim("b", share("2"))).unwrap();
        let whole = DeviceKey::gpu("GPU-1");
        assert_eq!(holders_of_exactly(&store.snapshot(), &whole).len(), 2, "MIG cannot be switched");
        assert!(store.condemn(share("1"), holders).is_none() && store.condemn(share("3"), holders).is_some());
    }

    #[test]
    fn prepared_and_condemned_exclude_each_other() {
        let store = PreparedStore::new(PreparedClaims::new());
        let guard = store.condemn(key(0, 2), holders).expect("free");
        assert!(matches!(store.record(claim("a", key(1, 1))), Err(Refused::Condemned { .. })));
        drop(guard);
        store.record(claim("a", key(1, 1))).expect("reprieved");
        assert!(store.condemn(key(0, 2), holders).is_none());
        assert!(store.condemn(key(2, 2), holders).is_some(), "a neighbour");
    }
}
