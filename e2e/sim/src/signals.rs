//! How the programs of the simulation end.

use std::time::{Duration, Instant};

/// SIGTERM and SIGINT, blocked and waited for.
#[derive(Clone, Copy, Debug)]
pub struct Signals {
    set: libc::sigset_t,
}

#[allow(unsafe_code, reason = "the standard library has no way to wait for a signal")]
impl Signals {
    pub fn install(ignore_sigterm: bool) -> Result<Signals, String> {
        // SAFETY: sigemptyset initialises the set before anything reads it; all pointers live through the calls.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGINT);
            if ignore_sigterm {
                // As process 1 of a container, a program without a handler ignores it anyway.
                libc::signal(libc::SIGTERM, libc::SIG_IGN);
            } else {
                libc::sigaddset(&mut set, libc::SIGTERM);
            }
            match libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) {
                0 => Ok(Signals { set }),
                _ => Err(format!("failed to block signals: {}", std::io::Error::last_os_error())),
            }
        }
    }

    /// Returns at a signal (true) or after `seconds`.
    pub fn wait(&self, seconds: Option<f64>) -> bool {
        let end = seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e9)));
        loop {
            let left = match end {
                Some(end) => end.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            let timeout = libc::timespec {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(3600),
                tv_nsec: libc::c_long::from(left.subsec_nanos()),
            };
            // SAFETY: the set and the timeout live through the call; a null siginfo is allowed.
            let signal = unsafe { libc::sigtimedwait(&self.set, std::ptr::null_mut(), &timeout) };
            if signal > 0 || end.is_some_and(|end| Instant::now() >= end) {
                return signal > 0;
            }
        }
    }
}
