//! Kerf's decision engine: pure functions from what is known of the cluster to what should be done.
//!
//! ```text
//!   Snapshot ──▶ plan() ──▶ Plan             which partition for which request, and why not where not
//!   Observed ──▶ protocol::next() ──▶ Step   the next write that carries one placement on, or undoes it
//! ```
//!
//! | module | answers |
//! |---|---|
//! | [`snapshot`], [`plan`](mod@plan) | the shapes of question and answer |
//! | `cycle`, `gang`, `fleet`, `place` | who is served in which order; several together or not at all; the cluster as it fills; a place on one node |
//! | `shape` | what a request wants of GPUs |
//! | `catalog`, `index` | what a GPU in some state can give, and at which price; which GPUs are in which state |
//! | [`occupancy`], [`share`], `value` | what fits on a GPU; parts of it of any size; what its room is worth |
//! | `demand`, `standings` | what a node's room is worth to those who ask these days; nodes by price, for each kind |
//! | `rooms`, [`moves`] | for whom others are moved, and who; the fewest moves so that a request fits |
//! | [`layout`] | static layouts, warm instances |
//! | `nodes`, `explain` | whether a node can take a pod; why a request has no place |
//! | `bound` | proofs that there is none |
//! | [`check`] | whether a plan is legal, worked out the plain way |
//! | [`protocol`] | how a placement becomes a bound pod |
//!
//! No I/O, no clock, no randomness, no GPU model known by name: geometry is data. The same input gives the same
//! output on any machine.
#![forbid(unsafe_code)]

mod bound;
pub mod catalog;
pub mod check;
mod cycle;
mod demand;
mod explain;
pub mod fleet;
mod gang;
mod index;
pub mod layout;
pub mod moves;
pub mod nodes;
pub mod occupancy;
pub mod place;
pub mod plan;
pub mod protocol;
mod rooms;
mod shape;
pub mod share;
pub mod shared;
pub mod snapshot;
mod standings;
pub mod value;

pub use cycle::{Planner, plan};
pub use explain::misfit_text;
