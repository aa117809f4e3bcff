//! A list whose elements are shared with its copies, until one of them changes.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// See the module. An element that is changed is copied first, if it is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared<T>(Vec<Arc<T>>);

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Shared<T> {
    /// The elements as they are shared.
    pub fn as_shared(&self) -> &[Arc<T>] {
        &self.0
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The element, if there is one.
    pub fn get(&self, index: usize) -> Option<&T> {
        self.0.get(index).map(|one| &**one)
    }

    /// All elements.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + ExactSizeIterator {
        self.0.iter().map(|one| &**one)
    }

    /// Adds one at the end.
    pub fn push(&mut self, one: impl Into<Arc<T>>) {
        self.0.push(one.into());
    }

    /// Turns the order about.
    pub fn reverse(&mut self) {
        self.0.reverse();
    }
}

impl<T: Clone> Shared<T> {
    /// The element, to be changed.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.0.get_mut(index).map(Arc::make_mut)
    }

    /// All elements, to be changed: where only some are, their indices are cheaper.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(Arc::make_mut)
    }
}

impl<T> Index<usize> for Shared<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        &self.0[index]
    }
}

impl<T: Clone> IndexMut<usize> for Shared<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        Arc::make_mut(&mut self.0[index])
    }
}

impl<T> FromIterator<T> for Shared<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        Self(all.into_iter().map(Arc::new).collect())
    }
}

impl<T> FromIterator<Arc<T>> for Shared<T> {
    fn from_iter<I: IntoIterator<Item = Arc<T>>>(all: I) -> Self {
        Self(all.into_iter().collect())
    }
}

impl<T> From<Vec<T>> for Shared<T> {
    fn from(all: Vec<T>) -> Self {
        all.into_iter().collect()
    }
}

impl<'a, T: Clone> IntoIterator for &'a mut Shared<T> {
    type Item = &'a mut T;
    type IntoIter = std::iter::Map<std::slice::IterMut<'a, Arc<T>>, fn(&'a mut Arc<T>) -> &'a mut T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut().map(Arc::make_mut)
    }
}

impl<T: Serialize> Serialize for Shared<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Shared<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::from)
    }
}
