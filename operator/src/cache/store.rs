//! One kind of objects, as the watch and our own writes show them.
//!
//! Own writes are visible at once: the object that the API server answered replaces the older one, so that no decision
//! is made from before the last write. Versions are compared as numbers (Kubernetes guarantees that since 1.35,
//! KEP-5504), and what the watch has gone past already is not brought back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a [`Store`] must know of an object.
pub trait Stored {
    /// Unique among its kind: `namespace/name`, or the name.
    fn key(&self) -> String;
    /// `metadata.uid`.
    fn uid(&self) -> &str;
    /// `metadata.resourceVersion`, as a number.
    fn version(&self) -> u64;
}

/// All objects of a kind.
#[derive(Debug)]
pub struct Store<T> {
    objects: BTreeMap<String, Arc<T>>,
    /// The newest version that the watch has delivered, deletions included.
    watched: u64,
    /// Objects of a listing that is under way.
    listing: Option<BTreeMap<String, Arc<T>>>,
    /// Own writes since that listing began: it may be older than they are.
    written: BTreeSet<String>,
    synced: bool,
}

impl<T> Default for Store<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), watched: 0, listing: None, written: BTreeSet::new(), synced: false }
    }
}

impl<T: Stored> Store<T> {
    /// The object of this key.
    pub fn get(&self, key: &str) -> Option<&Arc<T>> {
        self.objects.get(key)
    }

    /// All objects, by key.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.objects.values()
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Whether a first listing is complete.
    pub fn synced(&self) -> bool {
        self.synced
    }

    /// Takes an object in unless a newer state of it is known. Answers whether anything changed.
    fn put(&mut self, object: T) -> bool {
        let key = object.key();
        match self.objects.get(&key) {
            Some(known) if known.version() >= object.version() => false,
            _ => {
                self.objects.insert(key, Arc::new(object));
                true
            }
        }
    }

    /// The watch saw the object added or changed.
    pub fn watch_applied(&mut self, object: T) -> bool {
        self.watched = self.watched.max(object.version());
        self.put(object)
    }

    /// The watch saw the object deleted.
    pub fn watch_deleted(&mut self, object: &T) -> bool {
        self.watched = self.watched.max(object.version());
        let key = object.key();
        match self.objects.get(&key) {
            // Made anew by us meanwhile: the deletion is of its predecessor.
            Some(known) if known.uid() != object.uid() && known.version() > object.version() => false,
            Some(_) => {
                self.objects.remove(&key);
                true
            }
            None => false,
        }
    }

    /// A listing begins.
    pub fn listing_began(&mut self) {
        self.listing = Some(BTreeMap::new());
        self.written.clear();
    }

    /// An object of the listing.
    pub fn listed(&mut self, object: T) {
        if let Some(listing) = &mut self.listing {
            listing.insert(object.key(), Arc::new(object));
        }
    }

    /// The listing is complete: what is not in it is gone, except what we wrote while it ran.
    pub fn listing_done(&mut self) {
        let Some(listing) = self.listing.take() else { return };
        let mut old = std::mem::take(&mut self.objects);
        self.objects = listing;
        for key in std::mem::take(&mut self.written) {
            let Some(own) = old.remove(&key) else { continue };
            match self.objects.get(&key) {
                Some(listed) if listed.version() >= own.version() => {}
                _ => {
                    self.objects.insert(key, own);
                }
            }
        }
        self.watched =
            self.objects.values().map(|object| object.version()).max().unwrap_or(0).max(self.watched);
        self.synced = true;
    }

    /// The API server's answer to a write of ours.
    pub fn wrote(&mut self, object: T) -> bool {
        if object.version() <= self.watched {
            // The watch has told this already, and perhaps what came after it.
            return false;
        }
        if self.listing.is_some() {
            self.written.insert(object.key());
        }
        self.put(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Thing(&'static str, &'static str, u64);

    impl Stored for Thing {
        fn key(&self) -> String {
            self.0.into()
        }
        fn uid(&self) -> &str {
            self.1
        }
        fn version(&self) -> u64 {
            self.2
        }
    }

    fn version(store: &Store<Thing>, key: &str) -> Option<u64> {
        store.get(key).map(|thing| thing.2)
    }

    #[test]
    fn own_writes_are_seen_at_once_and_not_undone_by_an_older_watch_event() {
        let mut store = Store::default();
        assert!(store.watch_applied(Thing("a", "1", 5)));
        assert!(store.wrote(Thing("a", "1", 9)));
        assert!(!store.watch_applied(Thing("a", "1", 7)));
        assert_eq!(version(&store, "a"), Some(9));
        assert!(store.watch_applied(Thing("a", "1", 11)));
        assert_eq!(version(&store, "a"), Some(11));
    }

    #[test]
    fn a_write_whose_deletion_was_already_watched_does_not_come_back() {
        let mut store = Store::default();
        store.watch_applied(Thing("a", "1", 5));
        store.watch_deleted(&Thing("a", "1", 8));
        assert!(!store.wrote(Thing("a", "1", 7)));
        assert_eq!(version(&store, "a"), None);
    }

    #[test]
    fn the_deletion_of_a_predecessor_leaves_the_successor() {
        let mut store = Store::default();
        store.watch_applied(Thing("a", "1", 5));
        store.wrote(Thing("a", "2", 9));
        assert!(!store.watch_deleted(&Thing("a", "1", 8)));
        assert_eq!(version(&store, "a"), Some(9));
    }

    #[test]
    fn a_listing_removes_what_it_lacks_but_not_what_was_written_meanwhile() {
        let mut store = Store::default();
        store.watch_applied(Thing("old", "1", 5));
        store.listing_began();
        store.listed(Thing("kept", "2", 6));
        store.wrote(Thing("new", "3", 9));
        store.listing_done();
        assert_eq!(
            (version(&store, "old"), version(&store, "kept"), version(&store, "new")),
            (None, Some(6), Some(9))
        );
        assert!(store.synced());
    }
}
