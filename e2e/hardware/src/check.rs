//! Makes the tries, one after the other, each by processes of its own that take little more than the share.

use std::path::Path;

use anyhow::Result;

use crate::beside::Beside;
use crate::probe::{Change, Outcome, Plan, Process, Said, start};
use crate::tries::{Finding, Found, Report, Share, Try, compute, gib, memory, past_mps};

/// How much more than what it may have a process asks for. Where a limit fails, neighbours lose no more than that, and
/// eight processes together as much as the share once more.
const MORE: u64 = 256 << 20;

/// How many processes are several: as many as share their limit in the table's line.
const SEVERAL: u64 = 8;

const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
const LIMIT: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// What is tried, where.
#[derive(Debug)]
pub struct Check<'a> {
    pub share: &'a Share,
    pub library: &'a Path,
    /// The other container with the same share.
    pub beside: Option<Beside>,
    /// GPU and driver, where somebody else knows them.
    pub subject: Option<String>,
}

/// Makes all tries.
pub fn run(check: &Check<'_>) -> Result<Report> {
    let share = check.share;
    let first = check.outcomes(&check.take(share.memory + MORE), &[], 1)?;
    let said = match first.first() {
        Some(Outcome::Said(said)) => Some(said),
        _ => None,
    };
    let device = said.map(|said| said.device.clone()).filter(|name| !name.is_empty());
    let on = check.subject.clone().or(device).unwrap_or_else(|| "no GPU".to_owned());
    let mut report = Report {
        subject: format!(
            "{on}, a share of {} and {} %, isolation {}",
            gib(share.memory),
            share.percent,
            share.isolation.word()
        ),
        isolation: share.isolation,
        findings: vec![(Try::OneProcess, memory(&first, share.memory))],
        shown: said.and_then(|said| said.memory),
        memory: share.memory,
    };
    // Where nothing starts at all, that something else does not start either shows nothing.
    let starts = report.findings.iter().any(|(_, finding)| finding.found != Found::NotTried);
    for attempt in Try::ALL.into_iter().skip(1) {
        let finding = match starts {
            true => check.attempt(attempt)?,
            false => Finding::not_tried("the first try showed nothing"),
        };
        report.findings.push((attempt, finding));
    }
    Ok(report)
}

impl Check<'_> {
    fn take(&self, bytes: u64) -> Plan {
        Plan { take: bytes, ..Plan::default() }
    }

    fn outcomes(&self, plan: &Plan, changes: &[Change<'_>], count: u64) -> Result<Vec<Outcome>> {
        let count = usize::try_from(count).unwrap_or(1);
        // All of them keep what they have until the last has spoken.
        let processes: Vec<Process> = start(plan, self.library, changes, count)?;
        Ok(processes.iter().map(|process| process.outcome.clone()).collect())
    }

    fn attempt(&self, attempt: Try) -> Result<Finding> {
        let limit = self.share.memory;
        let one = self.take(limit + MORE);
        let higher = format!("0={}M", (2 * limit) >> 20);
        Ok(match attempt {
            Try::OneProcess => memory(&self.outcomes(&one, &[], 1)?, limit),
            Try::SeveralProcesses => {
                let each = self.take(2 * limit / SEVERAL);
                memory(&self.outcomes(&each, &[], SEVERAL)?, limit)
            }
            Try::LimitSetHigher => memory(&self.outcomes(&one, &[(LIMIT, Some(&higher))], 1)?, limit),
            Try::LimitDropped => {
                // No container sees so many GPUs.
                let invalid = format!("63=1G,{higher}");
                memory(&self.outcomes(&one, &[(LIMIT, Some(&invalid))], 1)?, limit)
            }
            Try::NoPipe => {
                let little = self.take(MORE);
                let mut outcomes = self.outcomes(&little, &[(PIPE, None)], 1)?;
                outcomes.extend(self.outcomes(&little, &[(PIPE, Some("/nonexistent"))], 1)?);
                past_mps(&outcomes)
            }
            Try::Percentage => {
                // A program outside MPS may count the multiprocessors, as long as it makes no context.
                let look = Plan { look: true, ..Plan::default() };
                let all = match self.outcomes(&look, &[(PIPE, None)], 1)?.pop() {
                    Some(Outcome::Said(Said { failed: None, multiprocessors, .. })) => Some(multiprocessors),
                    _ => None,
                };
                let kernel = Plan { kernel: true, ..Plan::default() };
                let ran = self.outcomes(&kernel, &[(PERCENTAGE, Some("100"))], 1)?.pop();
                ran.map_or_else(
                    || Finding::not_tried("no process was started"),
                    |ran| compute(&ran, all, self.share.percent),
                )
            }
            Try::SecondContainer => {
                let Some(beside) = &self.beside else {
                    return Ok(Finding::not_tried("there is no second container"));
                };
                let held = match beside.hold(limit / 2) {
                    Ok(Outcome::Said(said)) if said.failed.is_none() => said.granted,
                    Ok(other) => {
                        return Ok(Finding::not_tried(format!(
                            "the second container has nothing: {other:?}"
                        )));
                    }
                    Err(error) => return Ok(Finding::not_tried(format!("{error:#}"))),
                };
                let mine = memory(&self.outcomes(&one, &[], 1)?, limit.saturating_sub(held));
                Finding {
                    evidence: format!("the other has {}, this one {}", gib(held), mine.evidence),
                    ..mine
                }
            }
        })
    }
}
