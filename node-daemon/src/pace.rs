//! How many GPUs of the node are changed at the same time.

use kerf_crds::GpuNodeSpec;
use tokio::sync::watch;

use crate::node::NodeState;

/// Counts the GPUs that are being changed. Cheap to clone; all clones count together.
#[derive(Clone, Debug, Default)]
pub struct Pace(watch::Sender<u32>);

impl Pace {
    /// Waits until there are fewer than the spec allows, and counts one more until the turn is dropped.
    pub async fn turn(&self, state: &NodeState) -> Turn {
        let mut specs = state.spec.subscribe();
        let mut changing = self.0.subscribe();
        loop {
            // Marked as seen before they are looked at, so that no change falls between.
            changing.mark_unchanged();
            let limit = specs.borrow_and_update().as_ref().map_or(1, |seen| limit(&seen.spec));
            let taken = self.0.send_if_modified(|count| {
                let free = *count < limit;
                *count += u32::from(free);
                free
            });
            if taken {
                return Turn(self.clone());
            }
            tokio::select! {
                _ = changing.changed() => {}
                _ = specs.changed() => {}
            }
        }
    }
}

/// The smallest number of those that the node's GPUs have from their policies; one is always allowed.
fn limit(spec: &GpuNodeSpec) -> u32 {
    spec.gpus.iter().map(|gpu| gpu.max_concurrent_gpus).min().unwrap_or(1).max(1)
}

/// One GPU that is being changed.
#[derive(Debug)]
pub struct Turn(Pace);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt as _;
    use kerf_crds::gpu_node::{DesiredGpu, DesiredMig};

    use super::*;
    use crate::node::SeenSpec;
    use crate::prepared::PreparedClaims;

    #[test]
    fn the_smallest_number_holds_and_a_new_one_at_once() {
        let state = NodeState::new("n", PreparedClaims::new());
        let allow = |numbers: &[u32]| {
            let gpu = |max: &u32| DesiredGpu {
                uuid: String::new(),
                policy: String::new(),
                mig: DesiredMig::Keep,
                allow_reset: false,
                unhealthy_effect: Default::default(),
                max_concurrent_gpus: *max,
            };
            let spec = GpuNodeSpec { gpus: numbers.iter().map(gpu).collect(), ..GpuNodeSpec::default() };
            state.spec.send_replace(Some(Arc::new(SeenSpec { spec, ..SeenSpec::default() })));
        };
        let pace = Pace::default();
        allow(&[3, 2]);
        let first = pace.turn(&state).now_or_never().expect("one of two");
        let _second = pace.turn(&state).now_or_never().expect("two of two");
        let mut third = Box::pin(pace.turn(&state));
        assert!(third.as_mut().now_or_never().is_none());
        allow(&[3]);
        let _third = third.now_or_never().expect("three of three");
        allow(&[1]);
        let mut fourth = Box::pin(pace.turn(&state));
        drop(first);
        assert!(fourth.as_mut().now_or_never().is_none(), "two are still being changed");
    }
}
