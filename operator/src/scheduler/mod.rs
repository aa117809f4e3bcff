//! The scheduler: allocates ahead of kube-scheduler, which binds.
//!
//! ```text
//!  World ─▶ matching ─▶ snapshot ─▶ requests ─▶ kerf_planner::plan ─┐
//!     └───▶ placements (join) ─▶ protocol::next ────────────────────┴▶ Decision ─▶ apply ─▶ API server
//! ```
//! | file | |
//! |---|---|
//! | `cycle`, `decision` | one cycle: the order of the things below; what comes out |
//! | `views` | what is worked out of each node alone, kept from cycle to cycle |
//! | `snapshot` | the planner's view of the cluster |
//! | `placements`, `join` | what is on record, seen together with claims, pods and reports; its next step |
//! | `trouble` | places that do not work out |
//! | `queue`, `requests`, `needs`, `filter`, `selectors` | who is planned for, and what each asks for, down to CEL |
//! | `entries`, `preempt`, `warm` | what goes into nodes' specs: placements, also where kube-scheduler must preempt; warm instances |
//! | `rooms` | room that is made by moving others |
//! | `gangs` | pods that get their places together or not at all |
//! | `tell` | what pods are told |
//! | `apply`, `claim_writes`, `pod_writes`, `events`, `evictions`, `claims` | the writes |
//! | `memory` | the pace |

pub mod apply;
mod claim_writes;
pub mod claims;
pub mod cycle;
pub mod decision;
pub mod entries;
pub mod events;
mod evictions;
mod filter;
pub mod gangs;
pub mod join;
pub mod memory;
pub mod needs;
pub mod placements;
mod pod_writes;
pub mod preempt;
pub mod queue;
pub mod requests;
pub mod rooms;
pub mod selectors;
#[cfg(test)]
mod shares_tests;
pub mod snapshot;
pub mod tell;
pub mod trouble;
pub mod views;
pub mod warm;

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;

use crate::controller;
use crate::recorder::Recorder;
use apply::Writer;
use selectors::Selectors;

/// Least time between the beginnings of two cycles: changes that come together are planned together.
const COALESCE: Duration = Duration::from_millis(10);
/// Deciding takes one part in so many of the time at most: where a cycle takes longer, more changes are planned together,
/// and the processors are left to those who carry the decisions out.
const SHARE: u32 = 4;
/// Yet changes never wait for longer than this.
const REST: Duration = Duration::from_secs(1);
/// What policies and classes are to say is worked out in one part in so many of the time at most.
const TOLD: u32 = 20;
/// A new leader looks on for so long: the watches of pods and of nodes are not in step with each other, and a record of
/// the former leader's must not be taken for one whose pod is gone.
const SETTLE: Duration = Duration::from_millis(500);
/// A cycle comes at least this often, for what only time changes (reservations that lapse).
const IDLE: Duration = Duration::from_secs(10);

/// Runs cycles until `stop` resolves. Does nothing while another leads.
pub async fn run(writer: Writer, recorder: Recorder, stop: impl Future<Output = ()>) {
    let selectors = Selectors::default();
    let rounds = controller::clients::Rounds::default();
    let mut stop = std::pin::pin!(stop);
    let mut pause = IDLE;
    let mut led_since = None;
    let mut tell_again = Instant::now();
    loop {
        tokio::select! {
            () = writer.cache.changed() => {}
            () = tokio::time::sleep(pause) => {}
            () = &mut stop => return,
        }
        let began = Instant::now();
        if !writer.leadership.holds() {
            pause = IDLE;
            led_since = None;
            continue;
        }
        let led_for = began.duration_since(*led_since.get_or_insert(began));
        if let Some(rest) = SETTLE.checked_sub(led_for) {
            pause = rest;
            continue;
        }
        let mut told = false;
        let (mut decision, clients, policies, classes) = {
            let world = writer.cache.read();
            if !world.synced() {
                pause = IDLE;
                continue;
            }
            let wall = Timestamp::now().as_second();
            let decision = cycle::decide(&world, &writer.memory, &selectors, began, wall);
            writer.memory.forget_what_is_over(&world);
            let decided = Instant::now();
            if decided < tell_again {
                (decision, Vec::new(), Vec::new(), Vec::new())
            } else {
                let (matches, problems) = (&decision.matches, &decision.problems);
                let clients = controller::clients::due(&world, matches, &rounds, began);
                let policies =
                    controller::status::all(&world, matches, problems, &rounds, &writer.memory, began);
                let classes = controller::classes::missing(&world);
                told = true;
                tell_again = Instant::now() + TOLD * decided.elapsed();
                (decision, clients, policies, classes)
            }
        };
        let took = began.elapsed();
        tracing::debug!(?took, nodes = decision.specs.len(), drive = decision.drive.len(), "cycle");
        if let Some(planned) = decision.planned.take() {
            recorder.record(planned);
        }
        futures::join!(
            writer.apply(&decision),
            controller::write::classes(&writer, classes),
            controller::write::policies(&writer, policies),
            controller::clients::restart(&writer, &rounds, clients),
        );
        let next = writer.memory.next_moment(Instant::now());
        let next = if told { next } else { Some(next.map_or(tell_again, |at| at.min(tell_again))) };
        pause = next.map_or(IDLE, |at| at.saturating_duration_since(Instant::now())).min(IDLE);
        if let Some(rest) = COALESCE.max(SHARE * took).min(took + REST).checked_sub(began.elapsed()) {
            tokio::select! {
                () = tokio::time::sleep(rest) => {}
                () = &mut stop => return,
            }
        }
    }
}
