//! Exponential back-off with jitter.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use kube::runtime::watcher::DefaultBackoff;

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);

/// Delays between tries of one thing.
#[derive(Clone, Debug)]
pub struct Backoff {
    tries: u32,
    seed: u64,
}

impl Backoff {
    /// `what` sets the jitter apart from that of others.
    pub fn new(what: &str) -> Self {
        Self { tries: 0, seed: RandomState::new().hash_one(what) }
    }

    /// The delay before the next try: doubling from 0.25 s to 30 s, each between 75 % and 125 % of that.
    pub fn pause(&mut self) -> Duration {
        let delay = FIRST.saturating_mul(1 << self.tries.min(16)).min(LONGEST);
        self.tries += 1;
        // A step of Knuth's linear congruential generator is random enough here.
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let jitter = (self.seed >> 33) as f64 / f64::from(1_u32 << 31);
        delay.mul_f64(0.75 + 0.5 * jitter)
    }
}

/// Back-off of watches: kube's own, 0.8 s to 30 s with jitter, which begins anew after two minutes without an error.
///
/// A watch that cannot list reports that it begins before each try, and kube takes that for a success: with its default
/// every node would ask an API server that is away once a second, for ever.
#[derive(Default)]
pub struct WatchBackoff(DefaultBackoff);

impl std::fmt::Debug for WatchBackoff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WatchBackoff")
    }
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
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
        let mut last = Duration::ZERO;
        for _ in 0..12 {
            last = backoff.next().unwrap();
            kube::runtime::utils::Backoff::reset(&mut backoff);
        }
        assert!(last >= Duration::from_secs(15), "{last:?}");
    }

    #[test]
    fn delays_grow_to_a_bound_and_vary() {
        let mut backoff = Backoff::new("x");
        let delays: Vec<Duration> = (0..20).map(|_| backoff.pause()).collect();
        assert!(delays[0] >= FIRST.mul_f64(0.75) && delays[0] <= FIRST.mul_f64(1.25), "{delays:?}");
        assert!(delays[3] > delays[0]);
        assert!(delays.iter().all(|delay| *delay <= LONGEST.mul_f64(1.25)), "{delays:?}");
        assert!(delays[15] != delays[16], "no jitter: {delays:?}");
    }
}
