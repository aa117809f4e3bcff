//! Back-off of watches.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(500);
/// Short: pods wait for the operator to notice that the API server is back.
const LONGEST: Duration = Duration::from_secs(8);
/// Without an error for this long it begins anew.
const FORGET: Duration = Duration::from_secs(60);

/// Doubles the pause with each error. A watch that cannot list reports that it begins before each try, and kube takes
/// that for a success; so success is told by time alone.
#[derive(Debug, Default)]
pub(super) struct WatchBackoff {
    errors: u32,
    last: Option<Instant>,
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        if self.last.is_some_and(|last| last.elapsed() > FORGET) {
            self.errors = 0;
        }
        self.last = Some(Instant::now());
        let pause = FIRST.saturating_mul(1 << self.errors.min(8)).min(LONGEST);
        self.errors += 1;
        Some(pause)
    }
}

impl kube::runtime::utils::Backoff for WatchBackoff {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_only_begins_has_not_succeeded() {
        let mut backoff = WatchBackoff::default();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pauses.extend(backoff.next());
            kube::runtime::utils::Backoff::reset(&mut backoff);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 16].map(|halves| halves * FIRST));
    }
}
