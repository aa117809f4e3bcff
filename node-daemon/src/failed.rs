//! Steps that failed, and when they may be tried again.

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::Reason;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::events::{Note, Notes};
use crate::hardware::Code;
use crate::inventory::Process;

/// A step that failed.
#[derive(Debug)]
pub struct Failed<S> {
    pub step: S,
    backoff: Backoff,
    pub again: Instant,
    pub code: Option<Code>,
    pub reason: Reason,
    /// Who keeps it from succeeding, where that is known and it is no claim.
    pub clients: Vec<Process>,
    /// It succeeded, and is still to be done: what it was to bring about may only take its time.
    pub no_effect: bool,
}

/// Why and by whom a step failed.
#[derive(Clone, Debug)]
pub struct Why {
    pub code: Option<Code>,
    pub reason: Reason,
    pub clients: Vec<Process>,
}

impl From<Reason> for Why {
    fn from(reason: Reason) -> Self {
        Self { code: None, reason, clients: Vec::new() }
    }
}

/// Notes that a step failed, and when to try it again; what is new of it is told.
pub fn fail<S: PartialEq>(notes: &Notes, gpu: &str, list: &mut Vec<Failed<S>>, step: S, why: Why) {
    let Why { code, reason, clients } = why;
    tracing::warn!(gpu, reason = %reason.reason, "failed {}", reason.message);
    let known = list.iter_mut().find(|failed| failed.step == step);
    if known.as_ref().is_none_or(|known| known.reason != reason) {
        let Reason { reason, message } = reason.clone();
        notes.send(Note { warning: true, reason, action: "Reshape", message });
    }
    match known {
        Some(failed) => {
            failed.again = Instant::now() + failed.backoff.pause();
            (failed.code, failed.reason, failed.clients) = (code, reason, clients);
            failed.no_effect = false;
        }
        None => {
            let mut backoff = Backoff::new(gpu);
            let again = Instant::now() + backoff.pause();
            list.push(Failed { step, backoff, again, code, reason, clients, no_effect: false });
        }
    }
}

/// Notes that a step succeeded and is still to be done, and when to take it again.
pub fn had_no_effect<S: PartialEq + std::fmt::Display>(gpu: &str, list: &mut Vec<Failed<S>>, step: S) {
    let known = list.iter().position(|failed| failed.step == step);
    let mut backoff = known.map_or_else(|| Backoff::new(gpu), |known| list.swap_remove(known).backoff);
    let again = Instant::now() + backoff.pause();
    let message = format!("to {step} of {gpu} succeeds, and has no effect");
    tracing::debug!(gpu, "{message}");
    let reason = Reason { reason: problem_reason::MPS_NOT_READY.into(), message };
    list.push(Failed { step, backoff, again, code: None, reason, clients: Vec::new(), no_effect: true });
}
