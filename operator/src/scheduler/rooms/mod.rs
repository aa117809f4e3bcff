//! Room that is made by moving others: who may be moved, what is kept for whom, and who is evicted.
//!
//! ```text
//!  1 the plan finds a room ─▶ reservations in the nodes' specs: one for the pod that waits, one for each that moves
//!  2 all of them on record ─▶ the pods are evicted, as far as disruption budgets let them go
//!  3 a place is free ──────▶ whoever it is kept for gets it: the pod that waits, or what came in place of one that moved
//! ```
//! A reservation that leads to nothing lapses. Nobody else gets its slices before; whose they are still, keeps them.

mod carry_on;
mod give;
mod offer;
mod record;
mod reserve;

pub use carry_on::{Eviction, Rooms, carry_on};
pub use give::{Kept, claim};
pub use offer::{Offer, offer};
pub use record::{Holder, Reserved, binding, is_one_of, on_record};
pub use reserve::{in_vain, reserve, told};

#[cfg(test)]
mod tests;
