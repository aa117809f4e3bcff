//! A recorded cycle, planned once more.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::{PlacedDevice, Placement, Plan};
use kerf_planner::snapshot::{NodeIndex, Portion, Snapshot};

use super::read;
use crate::recorder::{Record, hash};
use crate::scheduler::tell::share_text;

/// Plans a recorded cycle again, with this build, and says what is decided otherwise.
///
/// The operator that leads keeps the last cycles; they are read through its pod's loopback:
///   kubectl -n kerf-system port-forward <pod of the operator> 9444
///   curl -s localhost:9444/debug/plans          which there are
///   curl -s localhost:9444/debug/plans/7        one of them, for this command
///
/// The answer is 1 where the plan is another, or breaks a rule.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Replay {
    /// The record; `-`: standard input.
    #[arg(value_name = "FILE")]
    pub(super) record: PathBuf,
    /// Writes the record as a test case into this folder (policies/tests/recorded, of Kerf's repository).
    #[arg(long, value_name = "FOLDER")]
    pub(super) as_test: Option<PathBuf>,
}

impl Replay {
    pub(super) fn run(&self, text: &mut String) -> anyhow::Result<u8> {
        let record: Record = serde_json::from_str(&read(&self.record)?)
            .with_context(|| format!("{} is no record of a plan", self.record.display()))?;
        let Record { about, snapshot, plan: recorded, .. } = &record;
        let hash = hash(snapshot);
        let gpus: usize = snapshot.nodes.iter().map(|node| node.gpus.len()).sum();
        if !about.is_empty() {
            writeln!(text, "{about}")?;
        }
        writeln!(
            text,
            "snapshot {hash}: {} nodes, {gpus} GPUs, {} requests, {} pods that may be moved",
            snapshot.nodes.len(),
            snapshot.requests.len(),
            snapshot.movable.len()
        )?;
        let now = plan(snapshot);
        let differences = differences(snapshot, recorded, &now);
        for line in &differences {
            writeln!(text, "{line}")?;
        }
        let mut broken = 0;
        for (whose, plan) in [("the recorded plan", recorded), ("this build's plan", &now)] {
            for rule in violations(snapshot, plan) {
                broken += 1;
                writeln!(text, "{whose} breaks a rule: {rule}")?;
            }
        }
        if differences.is_empty() && broken == 0 {
            let Plan { placements, rooms, refusals } = &now;
            writeln!(
                text,
                "planned as recorded: {} placements, {} rooms, {} refusals; no rule is broken",
                placements.len(),
                rooms.len(),
                refusals.len()
            )?;
        }
        if let Some(folder) = &self.as_test {
            ensure!(folder.is_dir(), "{} is no folder", folder.display());
            let file = folder.join(format!("{hash}.json"));
            let case = Record { hash: hash.clone(), ..record.clone() };
            std::fs::write(&file, serde_json::to_string(&case)? + "\n")
                .with_context(|| format!("failed to write {}", file.display()))?;
            writeln!(text, "written: {}", file.display())?;
        }
        Ok(u8::from(!differences.is_empty() || broken > 0))
    }
}

/// What became of each request in one plan and not in the other.
fn differences(snapshot: &Snapshot, recorded: &Plan, now: &Plan) -> Vec<String> {
    let (before, after) = (answers(snapshot, recorded), answers(snapshot, now));
    let requests: std::collections::BTreeSet<&usize> = before.keys().chain(after.keys()).collect();
    let mut lines = Vec::new();
    for request in requests {
        let of = |answers: &BTreeMap<usize, String>| {
            answers.get(request).cloned().unwrap_or_else(|| "no answer".into())
        };
        let (before, after) = (of(&before), of(&after));
        if before != after {
            let id = snapshot.requests.get(*request).map_or("no such request", |request| &request.id);
            lines.push(format!("{id}\n  recorded: {before}\n  now:      {after}"));
        }
    }
    if lines.is_empty() && recorded != now {
        lines.push("the same answers, in another order".into());
    }
    lines
}

fn answers(snapshot: &Snapshot, plan: &Plan) -> BTreeMap<usize, String> {
    let mut answers = BTreeMap::new();
    for Placement { request, node, devices } in &plan.placements {
        answers.insert(*request, place(snapshot, *node, devices));
    }
    for room in &plan.rooms {
        let Placement { request, node, devices } = &room.place;
        let moves = room.moves.iter().map(|step| {
            let id = snapshot.movable.get(step.pod).map_or("no such pod", |pod| &pod.request.id);
            format!("{id} moves to {}", place(snapshot, step.node, &step.devices))
        });
        let moves = moves.collect::<Vec<_>>().join(", ");
        answers.insert(*request, format!("room on {}: {moves}", place(snapshot, *node, devices)));
    }
    for refusal in &plan.refusals {
        let moves = refusal.moves.map(|why| format!(" (moves: {why:?})")).unwrap_or_default();
        answers.insert(refusal.request, format!("{:?}: {}{moves}", refusal.kind, refusal.message));
    }
    answers
}

/// `node n0: GPU-1 2g.20gb at slice 4 (there)`.
fn place(snapshot: &Snapshot, node: NodeIndex, devices: &[PlacedDevice]) -> String {
    let contents = snapshot.nodes.get(node);
    let one = |device: &PlacedDevice| {
        let gpu = contents.and_then(|node| node.gpus.get(device.gpu));
        let uuid = gpu.map_or("no such GPU", |gpu| &gpu.uuid);
        let share = device.share.map(|portion| {
            let Portion { memory_bytes, compute_milli, .. } = portion;
            share_text(memory_bytes, u32::try_from(compute_milli).unwrap_or(u32::MAX))
        });
        let Some(instance) = device.instance else {
            return format!("{uuid} {}", share.unwrap_or_else(|| "whole".into()));
        };
        let geometry = gpu.and_then(|gpu| snapshot.geometries.get(gpu.geometry?));
        let profile = geometry.and_then(|geometry| geometry.profiles.get(instance.profile));
        let profile = profile.map_or("no such profile", |profile| &profile.name);
        let there = if instance.exists { "there" } else { "to be made" };
        let share = share.map(|share| format!("{share} of ")).unwrap_or_default();
        format!("{uuid} {share}{profile} at slice {} ({there})", instance.start)
    };
    let name = contents.map_or("no such node", |node| &node.name);
    format!("node {name}: {}", devices.iter().map(one).collect::<Vec<_>>().join(", "))
}
