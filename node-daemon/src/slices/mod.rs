//! The node's ResourceSlices: which devices exist now, for people, selectors, device taints and other schedulers.
//!
//! ```text
//!  inventory, spec ──▶ build: devices ──▶ pool: ResourceSlices ──▶ publish ──▶ API server
//!                                                 own slices, watched ──▲          │
//!                                                                       └──────────┘
//! ```
//!
//! Nothing waits for them: claims are allocated from `GpuNode`, and a claim on a device that no slice lists binds and
//! runs. They cost every watcher of the cluster something, so they are written late, together, and only when something
//! changed; and again whenever somebody else deleted or edited them, as kubelet does at each of its starts.

mod build;
mod pool;
mod publish;

pub use build::build;
pub use pool::{MAX_DEVICES, Pool, differ};
pub use publish::run;
