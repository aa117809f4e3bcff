//! What is on record, in a bounded number of bytes: the oldest goes first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

/// A group is closed when it has this share of all the bytes there are: it goes as a whole.
const SHARE: usize = 4;

/// How many of what a cycle had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub requests: usize,
    pub placements: usize,
    pub rooms: usize,
    pub refusals: usize,
}

/// A cycle, or several one after the other that gave nobody anything for the same reasons.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// From 1 on, in the order of time.
    pub number: u64,
    /// Of the first.
    pub time: Timestamp,
    /// Of the last.
    pub until: Timestamp,
    /// How many.
    pub times: u64,
    /// Of the first one's snapshot.
    pub hash: String,
    #[serde(flatten)]
    pub counts: Counts,
    /// What it has besides its group's [`super::pack::Whole`].
    #[serde(skip)]
    pub body: Arc<[u8]>,
}

#[derive(Debug)]
struct Group {
    whole: Arc<[u8]>,
    entries: Vec<Entry>,
    bytes: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Shelf {
    limit: usize,
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    groups: VecDeque<Group>,
    bytes: usize,
    newest: u64,
    missed: u64,
}

/// What there is.
#[derive(Debug, Serialize)]
pub struct List {
    /// Cycles that came while others were being taken down.
    pub missed: u64,
    /// What all of it takes.
    pub bytes: usize,
    /// Newest first.
    pub plans: Vec<Entry>,
}

impl Shelf {
    pub fn new(limit: usize) -> Self {
        Self { limit, contents: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A cycle was not taken down.
    pub(super) fn missed(&self) {
        self.lock().missed += 1;
    }

    /// The newest entry has happened once more; answers whether there is one.
    pub(super) fn once_more(&self, time: Timestamp) -> bool {
        let mut contents = self.lock();
        let newest = contents.groups.back_mut().and_then(|group| group.entries.last_mut());
        newest.is_some_and(|entry| {
            (entry.times, entry.until) = (entry.times + 1, time);
            true
        })
    }

    /// Whether the next entry is to begin a group.
    pub(super) fn wants_whole(&self) -> bool {
        self.lock().groups.back().is_none_or(|group| group.bytes > self.limit / SHARE)
    }

    /// Adds an entry, in a group of its own where `whole` is given.
    pub(super) fn put(&self, whole: Option<Arc<[u8]>>, mut entry: Entry) {
        let mut contents = self.lock();
        contents.newest += 1;
        entry.number = contents.newest;
        let mut more = entry.body.len() + size_of::<Entry>();
        match (whole, contents.groups.back_mut()) {
            (None, Some(group)) => {
                group.bytes += more;
                group.entries.push(entry);
            }
            (None, None) => return,
            (Some(whole), _) => {
                more += whole.len();
                contents.groups.push_back(Group { whole, entries: vec![entry], bytes: more });
            }
        }
        contents.bytes += more;
        while contents.bytes > self.limit
            && let Some(oldest) = contents.groups.pop_front()
        {
            contents.bytes -= oldest.bytes;
        }
    }

    /// All entries.
    pub fn list(&self) -> List {
        let contents = self.lock();
        let entries = contents.groups.iter().flat_map(|group| &group.entries);
        let mut plans: Vec<Entry> = entries.cloned().collect();
        plans.reverse();
        List { missed: contents.missed, bytes: contents.bytes, plans }
    }

    /// An entry with its group's [`super::pack::Whole`].
    pub fn get(&self, number: u64) -> Option<(Arc<[u8]>, Entry)> {
        let contents = self.lock();
        contents.groups.iter().find_map(|group| {
            let entry = group.entries.iter().find(|entry| entry.number == number)?;
            Some((Arc::clone(&group.whole), entry.clone()))
        })
    }
}
