//! XIDs: which mean a failed device, and waiting for them.

use std::time::Duration;

use super::raw::{Xid, XidWatch};
use super::{Driver, Failure};

/// XIDs that come from what an application did, not from the device: 13 graphics engine exception, 31 memory page
/// fault, 43 GPU stopped processing, 45 preemptive cleanup, 68 video processor exception, 109 context switch timeout
/// (https://docs.nvidia.com/deploy/xid-errors/; the same list is passed over by
/// https://github.com/NVIDIA/k8s-device-plugin/blob/main/internal/rm/health.go).
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// How long one wait may last, and so how late a new session, or a GPU that could not be registered, is seen to.
const WAIT_MS: u32 = 5_000;

/// How long to wait before a new try after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// After so many failures in a row the set of events itself is taken for broken. Until then it is kept: what happens
/// meanwhile waits in it, and would be lost with it.
const BROKEN: u32 = 3;

/// Whether an XID means that the device has failed.
pub fn is_device_failure(code: u64) -> bool {
    !APPLICATION_XIDS.contains(&code)
}

/// Reports XIDs for as long as `report` returns `true`, over driver reloads. Blocks: for a thread of its own.
pub fn watch_xids(driver: &Driver, report: impl Fn(Xid) -> bool) {
    let mut told = None;
    loop {
        let watched = match driver.session() {
            Ok(library) => watch_session(driver, &library, &report),
            Err(_) => Ok(Ended::NoSession),
        };
        match watched {
            Ok(Ended::NotWanted) => return,
            Ok(Ended::NewSession) => {}
            Ok(Ended::NoSession) => std::thread::sleep(RETRY),
            Err(failure) => {
                if told.as_ref() != Some(&failure) {
                    tracing::warn!(%failure, "XIDs that happen just now are not noticed");
                    told = Some(failure);
                }
                std::thread::sleep(RETRY);
            }
        }
    }
}

/// Why a watch ended.
enum Ended {
    /// Nobody listens any more.
    NotWanted,
    /// The library has been initialised anew.
    NewSession,
    /// There is no driver.
    NoSession,
}

fn watch_session(
    driver: &Driver,
    library: &std::sync::Arc<super::Library>,
    report: &impl Fn(Xid) -> bool,
) -> Result<Ended, Failure> {
    let note = |failure: &Failure| driver.note_failure(library, failure);
    let mut watch = XidWatch::new(library).inspect_err(note)?;
    let mut failures = 0;
    loop {
        let current = driver.is_current(library);
        // A set that is about to go is emptied first.
        match watch.wait(if current { WAIT_MS } else { 0 }).inspect_err(note) {
            Ok(None) if !current => return Ok(Ended::NewSession),
            Ok(xid) => {
                failures = 0;
                if xid.is_some_and(|xid| !report(xid)) {
                    return Ok(Ended::NotWanted);
                }
            }
            Err(failure) if failure.driver_is_gone() || failures == BROKEN => return Err(failure),
            Err(failure) => {
                tracing::debug!(%failure, "the wait for XIDs failed");
                failures += 1;
                std::thread::sleep(RETRY);
            }
        }
        watch.register_missing();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_applications_fault_is_not_the_devices() {
        for code in APPLICATION_XIDS {
            assert!(!is_device_failure(code), "{code}");
        }
        // Double-bit ECC error, fallen off the bus, uncontained ECC error, GSP timeout.
        for code in [48, 79, 95, 119] {
            assert!(is_device_failure(code), "{code}");
        }
    }
}
