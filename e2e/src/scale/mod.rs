//! Large clusters: the control plane is real, the nodes are kwok's, the daemons are a stand-in's.
//!
//! ```text
//!  fleet (Node objects, kwok) ─┬─▶ kerf   Kerf's operator and the daemons' stand-in ──audit log──▶ floor
//!                              └─▶ native kube-scheduler on its own
//!  each: Phase (who was bound when, CPU and memory of each process, writes)
//! ```

pub mod daemons;
pub mod fleet;
pub mod floor;
pub mod kerf;
pub mod native;
pub mod phase;

use anyhow::Result;
use futures::{StreamExt as _, TryStreamExt as _, stream};

/// Requests of the harness's own at a time.
const SIDE_BY_SIDE: usize = 24;

/// Profiles of the pods, in turn.
pub const MIX: [&str; 3] = ["1g.10gb", "2g.20gb", "3g.40gb"];

/// Runs a request for each, some at a time, and returns the answers in order.
///
/// # Errors
/// The first that failed.
pub async fn each<I, T, Fut>(
    items: impl IntoIterator<Item = I>,
    request: impl FnMut(I) -> Fut,
) -> Result<Vec<T>>
where
    Fut: Future<Output = Result<T>>,
{
    stream::iter(items).map(request).buffered(SIDE_BY_SIDE).try_collect().await
}
