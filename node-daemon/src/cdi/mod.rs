//! What a container sees of a claim: one CDI (Container Device Interface) spec per claim.
//!
//! ```text
//!  prepared claim + inventory ──▶ nodes: /dev and /proc of the driver ──┐
//!  nvidia-ctk cdi generate ─────▶ toolkit: libraries, programs, hooks ──┴──▶ claim: Spec ──▶ store: <cdi dir>/….json
//! ```
//!
//! The spec has one CDI device per allocated device, so that a container that names one request of the claim gets that
//! request's device and no other. What every container needs (control nodes, libraries, hooks,
//! `NVIDIA_VISIBLE_DEVICES=void`) stands in the edits that are common to the spec; the runtime applies them once.
//!
//! The specs name paths of the host: what the daemon reads under `--driver-root` and `--dev-root` is written as it is
//! under `--host-driver-root` and `--host-dev-root`.

mod claim;
mod file;
mod hook;
mod nodes;
mod spec;
mod store;
mod toolkit;

pub use claim::{CLASS, RECORD_ANNOTATION, VENDOR, claim_spec, device_id, device_variable};
pub(crate) use file::remove as remove_file;
pub use file::write_atomically;
pub use hook::HookPaths;
pub use nodes::{DriverFiles, NodesError};
pub use spec::{ContainerEdits, Device, DeviceNode, Hook, Mount, Spec};
pub use store::{CdiStore, StoredSpec};
pub use toolkit::{Toolkit, ToolkitError};
