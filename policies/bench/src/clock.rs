//! Time that does not count while others are at work on the machine.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The shortest processor time of this thread in so many runs.
pub fn shortest(runs: usize, mut run: impl FnMut()) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    let mut once = |_| {
        let started = now();
        run();
        now().saturating_sub(started)
    };
    (0..runs).map(&mut once).min().unwrap_or_default()
}
