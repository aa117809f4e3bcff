//! End-to-end tests on real clusters. One program, so that they share clusters: most run side by side, each in its own
//! namespace of [`SHARED`]; those that break things start their own.

mod admission;
mod away;
mod cluster;
mod crash;
mod drain;
mod errors;
mod guard;
mod kerf;
mod policy;
mod shapes;
mod story;
mod unmanaged;

use kerf_e2e::ClusterOptions;
use kerf_e2e::shared::Shared;

/// Two nodes, with an audit log.
pub(crate) static SHARED: Shared = Shared::new(|| {
    let mut options = ClusterOptions::default();
    options.control_plane.audit = true;
    options
});
