//! NVML: finding the library, keeping it initialised, reading GPUs and carrying out steps on them.
//!
//! All calls block and may take seconds; callers run them on blocking threads. The library is thread-safe, so GPUs are
//! worked on side by side.

mod act;
mod error;
mod geometry;
mod health;
mod limits;
mod observe;
mod raw;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use act::{act, set_compute_mode};
pub use error::{Code, Failure};
pub use geometry::Known;
pub use health::{is_device_failure, watch_xids};
pub use limits::{Facts, facts, lift_memory_limit, limit_container, limit_memory, memory_limits};
pub use observe::{Identity, ProcessMemory, memory_by_process, observe};
pub use raw::{Library, MemoryLimits, Xid};

use raw::Named as _;

/// Where the library lies below the driver root, by distribution and architecture.
const LIBRARY_DIRS: [&str; 8] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "home/kubernetes/bin/nvidia/lib64",
];

const LIBRARY: &str = "libnvidia-ml.so.1";

/// The way to the driver. Cheap to clone; all clones share one session.
#[derive(Clone, Debug)]
pub struct Driver {
    root: Arc<Path>,
    /// Held while the library is initialised, which can take seconds.
    session: Arc<Mutex<Session>>,
    /// How often the driver went away.
    departures: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Session {
    library: Option<Arc<Library>>,
    /// When the library was last initialised anew to find a lost GPU.
    searched: Option<Instant>,
}

/// A lost GPU rarely comes back without a reboot, and initialising anew disturbs the work on the others.
const SEARCH_INTERVAL: Duration = Duration::from_secs(300);

/// Why there is no session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    #[error("no {LIBRARY} below {root}: is the NVIDIA driver installed there, and --driver-root right?", root = .0.display())]
    NoLibrary(PathBuf),
    #[error("{library}: {failure}", library = .library.display())]
    Init { library: PathBuf, failure: Failure },
}

/// What all GPUs share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// The driver's, e.g. `580.95.05`.
    pub driver: String,
    /// Of CUDA, e.g. `13.0`.
    pub cuda: String,
}

impl Driver {
    /// Nothing is opened until the first [`Driver::session`].
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: Arc::from(root.into()), session: Arc::default(), departures: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The initialised library; opened and initialised if it is not. Blocks.
    pub fn session(&self) -> Result<Arc<Library>, Unavailable> {
        let mut session = self.lock();
        if let Some(library) = session.library.as_ref() {
            return Ok(library.clone());
        }
        let path = find_library(&self.root).ok_or_else(|| Unavailable::NoLibrary(self.root.to_path_buf()))?;
        // By the name that has the version: the loader takes the same name for the same library, and the last driver's is
        // still there while a call in it has not come back.
        let of_version = path.canonicalize().unwrap_or_else(|_| path.clone());
        let library =
            Library::open(&of_version).map_err(|failure| Unavailable::Init { library: path, failure })?;
        let library = Arc::new(library);
        session.library = Some(library.clone());
        Ok(library)
    }

    /// Whether `library` is the session in force.
    pub fn is_current(&self, library: &Arc<Library>) -> bool {
        self.lock().library.as_ref().is_some_and(|current| Arc::ptr_eq(current, library))
    }

    /// How often the driver was found gone. Loading it anew resets the GPUs.
    pub fn departures(&self) -> u64 {
        self.departures.load(Ordering::Relaxed)
    }

    /// Gives the session up if a failure in it says that it is of no more use: the next [`Driver::session`] initialises
    /// anew. The library is shut down when the last call in it has come back.
    pub fn note_failure(&self, library: &Arc<Library>, failure: &Failure) {
        let mut session = self.lock();
        if !session.library.as_ref().is_some_and(|current| Arc::ptr_eq(current, library)) {
            return;
        }
        if failure.driver_is_gone() {
            self.departures.fetch_add(1, Ordering::Relaxed);
            session.library = None;
        } else if failure.gpu_is_gone() && session.searched.is_none_or(|at| at.elapsed() >= SEARCH_INTERVAL) {
            session.searched = Some(Instant::now());
            session.library = None;
        }
    }
}

fn find_library(root: &Path) -> Option<PathBuf> {
    LIBRARY_DIRS.iter().map(|dir| root.join(dir).join(LIBRARY)).find(|path| path.exists())
}

impl Library {
    /// Versions of driver and CUDA; a part that cannot be read is empty.
    pub fn versions(&self) -> Versions {
        let cuda = self.nvml().sys_cuda_driver_version().map(|version| {
            let major = nvml_wrapper::cuda_driver_version_major(version);
            let minor = nvml_wrapper::cuda_driver_version_minor(version);
            format!("{major}.{minor}")
        });
        Versions {
            driver: self.nvml().sys_driver_version().unwrap_or_default(),
            cuda: cuda.unwrap_or_default(),
        }
    }

    /// UUID of each GPU, in NVML's order, or what it answered instead.
    pub fn gpu_uuids(&self) -> Result<Vec<Result<String, Failure>>, Failure> {
        let count = self.nvml().device_count().of("nvmlDeviceGetCount")?;
        let uuid = |index| self.gpu_by_index(index).and_then(|gpu| gpu.device.uuid().of("nvmlDeviceGetUUID"));
        Ok((0..count).map(uuid).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_in_any_usual_place_below_the_root_and_nowhere_else() {
        let root = tempfile::tempdir().unwrap();
        let driver = Driver::new(root.path());
        assert_eq!(driver.session().unwrap_err(), Unavailable::NoLibrary(root.path().to_path_buf()));
        for dir in LIBRARY_DIRS {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join(dir);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(LIBRARY), "not a library").unwrap();
            assert_eq!(find_library(root.path()), Some(dir.join(LIBRARY)));
            let error = Driver::new(root.path()).session().unwrap_err();
            assert!(error.to_string().contains("LIBRARY_NOT_FOUND"), "{error}");
        }
    }
}
