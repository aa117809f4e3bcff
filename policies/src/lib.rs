//! Kerf's decision engine: pure functions from what is known of the cluster to what should be done.
//!
//! ```text
//!   Snapshot ──▶ plan() ──▶ Plan             which partition for which request, and why not where not
//!   Observed ──▶ protocol::next() ──▶ Step   the next write that carries one placement on, or undoes it
//! ```
//!
//! No I/O, no clock, no randomness, no GPU model known by name: geometry is data. The same input gives the same
//! output on any machine.
#![forbid(unsafe_code)]

pub mod plan;
pub mod protocol;
pub mod snapshot;
