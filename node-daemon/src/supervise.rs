//! A part that fails is started again, not the process.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;

/// After this long without a failure, the next one counts as the first.
const GOOD: Duration = Duration::from_secs(60);

/// Runs a part for ever, starting it again when it ends or panics.
pub async fn supervise<F: Future<Output = anyhow::Result<()>>>(name: String, start: impl Fn() -> F) {
    let mut backoff = Backoff::new(&name);
    loop {
        let started = Instant::now();
        match AssertUnwindSafe(start()).catch_unwind().await {
            Ok(Ok(())) => tracing::warn!("{name} ended"),
            Ok(Err(error)) => tracing::warn!("{name} failed: {error:#}"),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(ToString::to_string);
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                tracing::error!("{name} panicked: {text}");
            }
        }
        if started.elapsed() > GOOD {
            backoff = Backoff::new(&name);
        }
        sleep(backoff.pause()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_part_that_fails_or_panics_is_started_again() {
        let starts = AtomicU32::new(0);
        let part = || async {
            match starts.fetch_add(1, Ordering::Relaxed) {
                0 => anyhow::bail!("broken"),
                1 => panic!("worse"),
                2 => Ok(()),
                _ => std::future::pending().await,
            }
        };
        let enough = async {
            while starts.load(Ordering::Relaxed) < 4 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = supervise("part".into(), part) => unreachable!("supervision ended"),
            () = enough => {}
        }
    }
}
