//! A simulated NVIDIA driver, at the driver's own boundary: `libnvidia-ml.so.1` and the files that a driver
//! installation has. What uses it cannot tell, except that no kernel computes anything.
//!
//! ```text
//!  test or harness                      any NVML client (daemon, nvidia-ctk, pynvml)
//!       │ SimNode                            │ dlopen <driver root>/usr/lib/…/libnvidia-ml.so.1
//!       ▼                                    ▼        (package kerf-sim-nvml, finds its root by its own path)
//!  ┌─────────────────────────  engine: changes of the state, NVML's errors  ─────────────────────────┐
//!  │ geometry: placements, ids, budgets        procs: who has which device node open                 │
//!  └──────────────────────────────────────────────┬──────────────────────────────────────────────────┘
//!                                                 ▼
//!        store: <driver root>/var/lib/kerf-sim/state.json, flock + rename
//!        tree:  <driver root>/{usr,dev,proc}: libraries, device nodes, capabilities
//!
//!  CUDA programs (cuda; by package kerf-sim-libcuda, the libcuda.so.1 of the driver root),
//!  MPS control daemons and servers (mps) ──▶ kernel: contexts, memory, who may have how much
//! ```
//!
//! Invariants:
//! - Every process of a node sees one state; a process killed at any instruction leaves it whole.
//! - Models are data ([`Model`]); no number of a product is in the code.
//! - The simulation opens no device node of its own accord, so a GPU that nobody uses has no client.

pub mod caps;
pub mod cuda;
mod documented;
mod elf;
pub mod engine;
mod error;
pub mod fault;
pub mod geometry;
pub mod kernel;
mod loaded;
pub mod model;
pub mod mps;
mod node;
pub mod procs;
mod ret;
pub mod signals;
pub mod state;
mod store;
pub mod tree;
mod uuid;

pub use documented::documented_errors;
pub use error::Error;
pub use fault::{Fault, Occurrence, When, canonical_call};
pub use loaded::library_of;
pub use model::Model;
pub use node::{Driver, GpuSpec, HoldGuard, Instance, NodeSpec, SimNode, nvml_library};
pub use ret::NvmlError;
pub use state::{CapNodes, MemoryAccounting, MigUuids, State};
pub use store::{STATE_DIR, STATE_FILE, Store};
