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
    /// Under what [`Store::of`] finds it: the node that it is about.
    fn group(&self) -> Option<&str> {
        None
    }
}

/// Objects of one group, by key. The same as long as none of them has changed.
pub type Group<T> = Arc<BTreeMap<String, Arc<T>>>;

/// All objects of a kind.
#[derive(Debug)]
pub struct Store<T> {
    objects: BTreeMap<String, Arc<T>>,
    /// The objects by [`Stored::group`].
    groups: BTreeMap<String, Group<T>>,
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
        Self {
            objects: BTreeMap::new(),
            groups: BTreeMap::new(),
            watched: 0,
            listing: None,
            written: BTreeSet::new(),
            synced: false,
        }
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

    /// The objects of a group, if there are any.
    pub fn of(&self, group: &str) -> Option<&Group<T>> {
        self.groups.get(group)
    }

    /// All groups, by name.
    pub fn groups(&self) -> impl Iterator<Item = (&String, &Group<T>)> {
        self.groups.iter()
    }

    fn insert(&mut self, key: String, object: Arc<T>) {
        self.remove(&key);
        if let Some(name) = object.group() {
            let group = self.groups.entry(name.to_owned()).or_default();
            Arc::make_mut(group).insert(key.clone(), Arc::clone(&object));
        }
        self.objects.insert(key, object);
    }

    fn remove(&mut self, key: &str) {
        let Some(object) = self.objects.remove(key) else { return };
        let Some(name) = object.group() else { return };
        if let Some(group) = self.groups.get_mut(name) {
            let objects = Arc::make_mut(group);
            objects.remove(key);
            if objects.is_empty() {
                self.groups.remove(name);
            }
        }
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
                self.insert(key, Arc::new(object));
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
                self.remove(&key);
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
        let written = std::mem::take(&mut self.written);
        let gone = |key: &&String| !listing.contains_key(*key) && !written.contains(*key);
        let gone: Vec<String> = self.objects.keys().filter(gone).cloned().collect();
        gone.iter().for_each(|key| self.remove(key));
        for (key, listed) in listing {
            let same = |known: &Arc<T>| known.uid() == listed.uid() && known.version() == listed.version();
            let newer = |known: &Arc<T>| written.contains(&key) && known.version() > listed.version();
            // What has not changed stays the same object: what was made of it still holds.
            if !self.objects.get(&key).is_some_and(|known| same(known) || newer(known)) {
                self.insert(key, listed);
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
    fn groups_have_what_the_store_has_and_stay_as_they_are_while_nothing_changes() {
        #[derive(Debug)]
        struct On(&'static str, u64, Option<&'static str>);
        impl Stored for On {
            fn key(&self) -> String {
                self.0.into()
            }
            fn uid(&self) -> &str {
                self.0
            }
            fn version(&self) -> u64 {
                self.1
            }
            fn group(&self) -> Option<&str> {
                self.2
            }
        }
        let mut store = Store::default();
        let keys = |store: &Store<On>, group| -> Vec<String> {
            store.of(group).into_iter().flat_map(|group| group.keys().cloned()).collect()
        };
        store.watch_applied(On("a", 1, Some("n")));
        store.watch_applied(On("b", 2, Some("n")));
        store.watch_applied(On("c", 3, None));
        let before = Arc::clone(store.of("n").unwrap());
        store.watch_applied(On("b", 2, Some("m")));
        store.watch_applied(On("c", 4, None));
        assert!(Arc::ptr_eq(&before, store.of("n").unwrap()));
        store.watch_applied(On("b", 5, Some("m")));
        assert_eq!((keys(&store, "n"), keys(&store, "m")), (vec!["a".to_owned()], vec!["b".to_owned()]));
        assert_eq!(before.len(), 2, "who holds the group as it was keeps it");
        let m = Arc::clone(store.of("m").unwrap());
        store.listing_began();
        store.listed(On("b", 5, Some("m")));
        store.listing_done();
        assert!(store.of("n").is_none());
        assert!(Arc::ptr_eq(&m, store.of("m").unwrap()), "listed as it is known");
        store.watch_deleted(&On("b", 6, Some("m")));
        assert_eq!(store.groups().count(), 0);
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
