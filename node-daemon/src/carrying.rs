//! What a worker knows of one carrier of shares from one look to the next: which steps failed, and when what serves it may be
//! replaced. It says which of the steps that are due may be taken now.

use std::time::Duration;

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::Reason;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::failed::{Failed, had_no_effect};
use crate::keeper::View;
use crate::shares::{Due, Step};

/// After a server was replaced that hung, the next one on the carrier that hangs is left alone for so long.
const HUNG_AGAIN: Duration = Duration::from_secs(600);

/// See the module's text.
#[derive(Debug, Default)]
pub struct Carrying {
    pub failed: Vec<Failed<Step>>,
    /// The step that was carried out last.
    taken: Option<Step>,
    /// The server's pod whose control daemon hangs, by its UID, and at how many looks in a row.
    hangs: Option<(String, u32)>,
    /// The server's pod, by its UID, and how often the driver had gone when it was first seen.
    since: Option<(String, u64)>,
    /// When a server's pod may be replaced again: one that never becomes well is not replaced all the time.
    replaced: Option<(Backoff, Instant)>,
    /// When one was replaced that hung.
    hung: Option<Instant>,
}

/// What comes of a look.
#[derive(Debug)]
pub struct Review {
    /// What may be done now.
    pub ready: Option<Step>,
    /// Why a step fails.
    pub problem: Option<Reason>,
    /// That a step has no effect.
    pub no_effect: Option<Reason>,
    /// When a step may be tried that is put off.
    pub again: Option<Instant>,
}

impl Carrying {
    /// Notes on a look what only several of them show: see [`View::count_hangs`] and [`View::follow_driver`].
    pub fn follow(&mut self, view: &mut View, departures: u64) {
        self.hangs = view.count_hangs(self.hangs.take());
        self.since = view.follow_driver(self.since.take(), departures);
    }

    /// It could not be looked at: what hangs is counted anew.
    pub fn not_seen(&mut self) {
        self.hangs = None;
    }

    /// What of `due` may be done now; and a share that waits for a step which fails says so.
    pub fn review(&mut self, carrier: &str, view: &View, due: &mut Due) -> Review {
        self.failed.retain(|failed| due.steps.contains(&failed.step));
        if let Some(step) = self.taken.take().filter(|step| due.steps.contains(step)) {
            had_no_effect(carrier, &mut self.failed, step);
        }
        let failing = |no_effect| {
            let failed = self.failed.iter().find(|failed| failed.no_effect == no_effect);
            failed.map(|failed| failed.reason.clone())
        };
        let (problem, no_effect) = (failing(false), failing(true));
        if let Some(failing) = &problem {
            let not_ready = |reason: &&mut Reason| reason.reason == problem_reason::MPS_NOT_READY;
            for why in due.shares.iter_mut().filter_map(|share| share.problem.as_mut()).filter(not_ready) {
                *why = failing.clone();
            }
        }
        if due.steps.is_empty() && !due.waits {
            self.replaced = None;
        }
        let now = Instant::now();
        let of = |step: &Step| self.failed.iter().find(|failed| failed.step == *step);
        let again = self.replaced.as_ref().map(|(_, again)| *again).filter(|again| *again > now);
        // Whoever can make a server hang is not to end its neighbours every other minute.
        let hung = self.hung.filter(|at| view.hangs() && at.elapsed() < HUNG_AGAIN).is_some();
        let paced = |step: &Step| (again.is_some() || hung) && matches!(step, Step::ReplacePod(_));
        let ready =
            due.steps.iter().find(|step| !paced(step) && of(step).is_none_or(|f| f.again <= now)).cloned();
        let tries = self.failed.iter().map(|failed| failed.again).chain(again);
        let again = tries.filter(|again| *again > now).min();
        Review { ready, problem, no_effect, again }
    }

    /// A step is about to be taken.
    pub fn begin(&mut self, carrier: &str, view: &View, step: &Step) {
        if let Step::ReplacePod(_) = step {
            if view.hangs() {
                self.hung = Some(Instant::now());
            }
            let mut backoff =
                self.replaced.take().map_or_else(|| Backoff::new(carrier), |(backoff, _)| backoff);
            let again = Instant::now() + backoff.pause();
            self.replaced = Some((backoff, again));
        }
    }

    /// A step succeeded.
    pub fn done(&mut self, step: Step) {
        self.taken = Some(step);
    }
}
