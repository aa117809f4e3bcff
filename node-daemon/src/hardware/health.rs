//! XIDs: which mean a failed device, and waiting for them.

use std::time::Duration;

use super::raw::{Xid, XidWatch};
use super::{Driver, Failure};

/// XIDs that come from what an application did, not from the device: 13 graphics engine exception, 31 memory page
/// fault, 43 GPU stopped processing, 45 preemptive cleanup, 68 video processor exception, 109 context switch timeout
/// (https://docs.nvidia.com/deploy/xid-errors/; the same list is passed over by
/// https://github.com/NVIDIA/k8s-device-plugin/blob/main/internal/rm/health.go).
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// How long one wait may last: the only cost of a longer one is a later notice of a new session.
const WAIT_MS: u32 = 60_000;

/// How long to wait before a new try when there is no driver or it reports no events.
const RETRY: Duration = Duration::from_secs(10);

/// Whether an XID means that the device has failed.
pub fn is_device_failure(code: u64) -> bool {
    !APPLICATION_XIDS.contains(&code)
}

/// Reports XIDs for as long as `report` returns `true`, over driver reloads. Blocks: for a thread of its own.
pub fn watch_xids(driver: &Driver, report: impl Fn(Xid) -> bool) {
    loop {
        let watched = match driver.session() {
            Ok(library) => watch_session(driver, &library, &report).inspect_err(|failure| {
                tracing::debug!(%failure, "XIDs cannot be watched");
                driver.note_failure(&library, failure);
            }),
            Err(_) => Ok(Ended::NoSession),
        };
        match watched {
            Ok(Ended::NotWanted) => return,
            Ok(Ended::NewSession) => {}
            Ok(Ended::NoSession) | Err(_) => std::thread::sleep(RETRY),
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
    let watch = XidWatch::new(library)?;
    while driver.is_current(library) {
        if let Some(xid) = watch.wait(WAIT_MS)?
            && !report(xid)
        {
            return Ok(Ended::NotWanted);
        }
    }
    Ok(Ended::NewSession)
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
