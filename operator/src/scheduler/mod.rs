//! The scheduler: allocates ahead of kube-scheduler, which binds.
//!
//! ```text
//!  World ─▶ matching ─▶ snapshot ─▶ requests ─▶ kerf_planner::plan ─┐
//!     └───▶ placements (join) ─▶ protocol::next ────────────────────┴▶ Decision ─▶ apply ─▶ API server
//! ```
//! | file | |
//! |---|---|
//! | `cycle`, `decision` | one cycle: the order of the things below; what comes out |
//! | `snapshot` | the planner's view of the cluster |
//! | `placements`, `join` | what is on record, seen together with claims, pods and reports; its next step |
//! | `trouble` | places that do not work out |
//! | `queue`, `requests`, `needs`, `filter`, `selectors` | who is planned for, and what each asks for, down to CEL |
//! | `entries`, `preempt`, `warm` | what goes into nodes' specs: placements, also where kube-scheduler must preempt; warm instances |
//! | `rooms` | room that is made by moving others |
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
pub mod snapshot;
pub mod tell;
pub mod trouble;
pub mod warm;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;

use crate::cache::Stored;
use crate::controller;
use apply::Writer;
use selectors::Selectors;

/// Least time between the beginnings of two cycles: changes that come together are planned together.
const COALESCE: Duration = Duration::from_millis(10);
/// A new leader looks on for so long: the watches of pods and of nodes are not in step with each other, and a record of
/// the former leader's must not be taken for one whose pod is gone.
const SETTLE: Duration = Duration::from_millis(500);
/// A cycle comes at least this often, for what only time changes (reservations that lapse).
const IDLE: Duration = Duration::from_secs(10);

/// Runs cycles until `stop` resolves. Does nothing while another leads.
pub async fn run(writer: Writer, stop: impl Future<Output = ()>) {
    let selectors = Selectors::default();
    let rounds = controller::clients::Rounds::default();
    let mut stop = std::pin::pin!(stop);
    let mut pause = IDLE;
    let mut led_since = None;
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
        let (decision, clients, policies, classes) = {
            let world = writer.cache.read();
            if !world.synced() {
                pause = IDLE;
                continue;
            }
            let wall = Timestamp::now().as_second();
            let decision = cycle::decide(&world, &writer.memory, &selectors, began, wall);
            let pods = world.interesting.iter().filter_map(|key| Some(world.pods.get(key)?.uid.as_str()));
            let pods: HashSet<&str> = pods.collect();
            let claims: HashSet<&str> = world.claims.iter().map(|claim| claim.uid()).collect();
            writer.memory.prune(|uid| pods.contains(uid), |uid| claims.contains(uid));
            let (matches, problems) = (&decision.matches, &decision.problems);
            let clients = controller::clients::due(&world, matches, &rounds, began);
            let policies = controller::status::all(&world, matches, problems, &rounds, &writer.memory, began);
            let classes = controller::classes::missing(&world);
            (decision, clients, policies, classes)
        };
        tracing::debug!(took = ?began.elapsed(), nodes = decision.specs.len(), drive = decision.drive.len(), "cycle");
        futures::join!(
            writer.apply(&decision),
            controller::write::classes(&writer, classes),
            controller::write::policies(&writer, policies),
            controller::clients::restart(&writer, &rounds, clients),
        );
        let next = writer.memory.next_moment(Instant::now());
        pause = next.map_or(IDLE, |at| at.saturating_duration_since(Instant::now())).min(IDLE);
        if let Some(rest) = COALESCE.checked_sub(began.elapsed()) {
            tokio::time::sleep(rest).await;
        }
    }
}
