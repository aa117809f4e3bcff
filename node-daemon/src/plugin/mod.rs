//! kubelet's DRA plugin: makes the claims of a pod ready before its containers start, and takes them back after.
//!
//! ```text
//!  kubelet ─▶ <registry>/kerf@gpu.kerf.dev-reg.sock ─▶ registration
//!          ─▶ <plugins>/gpu.kerf.dev/dra.sock ───────▶ service ─▶ prepare ─▶ authorize (pure) ─▶ prepared ─▶ checkpoint ─▶ CDI
//!                                                    │                   claim ▲ API, spec ▲, inventory ▲
//!                                                    └───▶ health ◀── inventory
//! ```
//!
//! Invariants:
//! - A claim is written down ([`crate::prepared`], then [`Checkpoint`], then its CDI spec) before kubelet hears that it
//!   is prepared, and forgotten in the opposite order. So whatever a crash leaves, a device in a container's hands is in
//!   at least one of the three, and [`Checkpoint::open`] restores the others from it.
//! - What is prepared stays prepared without the API server; only a claim's first Prepare reads it there.
//! - A claim is forgotten at kubelet's Unprepare. What a kubelet that lost its state leaves behind is taken back when the
//!   API server has said twice, ten minutes apart, that the claim is gone, and both times a kubelet was registered (one
//!   that knew the claim would have taken it back) and no process was on its devices. For what was prepared before the
//!   node booted once is enough. An API server that does not answer says nothing.
//! - Kubernetes checks neither node nor double use: [`authorize()`] does.

mod authorize;
mod checkpoint;
mod health;
pub(crate) mod hook;
mod limits;
mod prepare;
mod proto;
mod reader;
mod reconcile;
mod registration;
mod server;
mod service;
mod socket;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use authorize::{PrepareError, authorize, confirm};
pub use checkpoint::{Checkpoint, Recovered};
pub(crate) use limits::shares_of;
pub use limits::{LimitError, PodLimits};
pub use reader::{ClaimReader, ReadError, from_api};
pub use reconcile::{claims_in_status, restore};
pub use server::Plugin;
