//! What a tenant may try, as docs/isolation.md lists it, and what the outcome of each try shows. Reads no file, starts
//! nothing.

use kerf_crds::gpu_node::Isolation;

use crate::cuda::OUT_OF_MEMORY;
use crate::probe::{Outcome, Said};

/// The page with the table that is verified.
const PAGE: &str = include_str!("../../../docs/isolation.md");

/// A line of the table that can be tried from inside a share without harm to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Try {
    OneProcess,
    SeveralProcesses,
    LimitSetHigher,
    LimitDropped,
    NoPipe,
    Percentage,
    SecondContainer,
}

impl Try {
    pub const ALL: [Try; 7] = [
        Try::OneProcess,
        Try::SeveralProcesses,
        Try::LimitSetHigher,
        Try::LimitDropped,
        Try::NoPipe,
        Try::Percentage,
        Try::SecondContainer,
    ];

    /// The first cell of its line.
    pub fn title(self) -> &'static str {
        match self {
            Try::OneProcess => "to allocate more, by one process",
            Try::SeveralProcesses => "to allocate more, by several processes",
            Try::LimitSetHigher => "`CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` set higher",
            Try::LimitDropped => {
                "the same with an entry for a GPU that it cannot see, which drops every limit of MPS"
            }
            Try::NoPipe => "no `CUDA_MPS_PIPE_DIRECTORY`",
            Try::Percentage => "`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100`",
            Try::SecondContainer => "a second container, an init container",
        }
    }

    /// Whether Kerf says that it comes to nothing.
    pub fn is_promised(self, isolation: Isolation) -> bool {
        match self {
            Try::OneProcess | Try::LimitSetHigher | Try::NoPipe | Try::Percentage => true,
            Try::SeveralProcesses | Try::LimitDropped | Try::SecondContainer => {
                isolation >= Isolation::Driver
            }
        }
    }
}

/// Why a line of the table is not tried.
fn why_not(title: &str) -> &'static str {
    match title {
        title if title.starts_with("the same while no MPS server runs") => {
            "ending the server ends everybody's processes"
        }
        title if title.starts_with("more processes than MPS takes") => "neighbours would be refused",
        title if title.starts_with("to speak to the control daemon") => {
            "it could change what neighbours have"
        }
        title if title.starts_with("ten processes") => {
            "neighbours would be slowed down, and nothing is promised"
        }
        _ => "nothing is promised",
    }
}

/// The share that is tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pub memory: u64,
    /// Of the whole GPU's multiprocessors.
    pub percent: u32,
    pub isolation: Isolation,
}

/// What a try showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The limit holds.
    Verified,
    /// It does not.
    NotEnforced,
    NotTried,
}

/// What a try showed, and by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub found: Found,
    pub evidence: String,
}

impl Finding {
    fn verified(evidence: String) -> Self {
        Self { found: Found::Verified, evidence }
    }

    fn not_enforced(evidence: String) -> Self {
        Self { found: Found::NotEnforced, evidence }
    }

    pub fn not_tried(evidence: impl Into<String>) -> Self {
        Self { found: Found::NotTried, evidence: evidence.into() }
    }
}

/// What processes show that tried together to have more than `limit` bytes.
///
/// A refusal shows a limit only if most of the limit was granted before: else there may be no memory at all.
pub fn memory(outcomes: &[Outcome], limit: u64) -> Finding {
    let said: Vec<&Said> = outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            Outcome::Said(said) => Some(said),
            Outcome::Ended(_) => None,
        })
        .collect();
    let granted: u64 = said.iter().map(|said| said.granted).sum();
    let has = format!("{} of {}", gib(granted), gib(limit));
    if granted > limit {
        return Finding::not_enforced(format!("got {has}"));
    }
    for outcome in outcomes {
        let trouble = match outcome {
            Outcome::Ended(how) => Some(format!("a process gave no account: {how}")),
            Outcome::Said(said) => match (&said.failed, &said.refused) {
                (Some(failure), _) => Some(failure.to_string()),
                (None, Some(refused)) if refused.error != OUT_OF_MEMORY => {
                    Some(format!("after {has}, {refused}"))
                }
                _ => None,
            },
        };
        if let Some(trouble) = trouble {
            return Finding::not_tried(trouble);
        }
    }
    let Some(refused) = said.iter().find_map(|said| said.refused.as_ref()) else {
        return Finding::not_tried(format!("got {has}, and nobody asked for more"));
    };
    if granted < limit / 4 {
        return Finding::not_tried(format!("only {has} was there to be had; something else has the memory"));
    }
    Finding::verified(format!("got {has}, then {}", refused.error))
}

/// What processes show that tried to get past MPS.
pub fn past_mps(outcomes: &[Outcome]) -> Finding {
    let mut errors: Vec<String> = Vec::new();
    for outcome in outcomes {
        match outcome {
            Outcome::Said(Said { failed: Some(failure), .. }) => errors.push(failure.to_string()),
            Outcome::Said(said) => {
                return Finding::not_enforced(format!(
                    "got the GPU with {} multiprocessors and {}",
                    said.multiprocessors,
                    gib(said.granted)
                ));
            }
            // It had the GPU until somebody ended it, or hangs.
            Outcome::Ended(how) => return Finding::not_tried(format!("a process gave no account: {how}")),
        }
    }
    errors.dedup();
    Finding::verified(format!("no GPU: {}", errors.join(", ")))
}

/// What a process shows that asked for all multiprocessors of a GPU that has `all`.
pub fn compute(outcome: &Outcome, all: Option<u32>, percent: u32) -> Finding {
    let said = match outcome {
        Outcome::Said(Said { failed: Some(failure), .. }) => return Finding::not_tried(failure.to_string()),
        Outcome::Ended(how) => return Finding::not_tried(format!("a process gave no account: {how}")),
        Outcome::Said(said) => said,
    };
    let (Some(ran_on), Some(all)) = (said.ran_on, all.filter(|all| *all > 0)) else {
        return Finding::not_tried("the GPU's number of multiprocessors is not known");
    };
    let ceiling = u64::from(all) * u64::from(percent) / 100;
    let evidence = format!(
        "a kernel ran on {ran_on} multiprocessors of {all}, where {percent} % is {ceiling}; the device says that it has {}",
        said.multiprocessors
    );
    // MPS gives pairs. That it rounds to them, whichever way, takes nothing of anybody.
    match u64::from(ran_on) > ceiling.next_multiple_of(2) {
        true => Finding::not_enforced(evidence),
        false => Finding::verified(evidence),
    }
}

/// `7.94 GiB`.
pub fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// What became of all tries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// GPU, driver, share: in one line.
    pub subject: String,
    pub isolation: Isolation,
    pub findings: Vec<(Try, Finding)>,
    /// Free and total memory that a program was shown at its start.
    pub shown: Option<(u64, u64)>,
    pub memory: u64,
}

impl Report {
    /// Whether all that is promised holds: not, if any of it does not; not known, if any of it could not be tried.
    pub fn holds(&self) -> Option<bool> {
        let promised = || {
            let promised = |attempt: &&(Try, Finding)| attempt.0.is_promised(self.isolation);
            self.findings.iter().filter(promised)
        };
        if promised().any(|(_, finding)| finding.found == Found::NotEnforced) {
            return Some(false);
        }
        let all = Try::ALL.iter().filter(|attempt| attempt.is_promised(self.isolation));
        let tried = |attempt: &Try| {
            promised().any(|(other, finding)| other == attempt && finding.found == Found::Verified)
        };
        all.into_iter().all(tried).then_some(true)
    }

    /// The table of docs/isolation.md with what was found on this hardware.
    pub fn table(&self) -> String {
        let column = column(self.isolation);
        let mut out = format!("{}\n\n", self.subject);
        for (number, cells) in page_table().enumerate() {
            let says = column.and_then(|column| cells.get(column));
            let (Some(title), Some(says)) = (cells.first(), says) else { continue };
            let found = match number {
                0 => "on this hardware".to_owned(),
                1 => "---".to_owned(),
                _ => self.cell(title),
            };
            out.push_str(&format!("| {title} | {says} | {found} |\n"));
        }
        if let Some((free, total)) = self.shown {
            out.push_str(&format!(
                "\nA program with a share of {} is shown {} of memory, {} of them free.\n",
                gib(self.memory),
                gib(total),
                gib(free)
            ));
        }
        out
    }

    fn cell(&self, title: &str) -> String {
        let Some((attempt, finding)) = self.findings.iter().find(|(attempt, _)| attempt.title() == title)
        else {
            return format!("could not be tried: {}", why_not(title));
        };
        let word = match (finding.found, attempt.is_promised(self.isolation)) {
            (Found::Verified, true) => "verified",
            (Found::Verified, false) => "holds, which is not promised",
            (Found::NotEnforced, true) => "**not enforced**",
            (Found::NotEnforced, false) => "not enforced, as said",
            (Found::NotTried, _) => "could not be tried",
        };
        format!("{word}: {}", finding.evidence)
    }

    /// In one paragraph: what was found, by what.
    pub fn summary(&self) -> String {
        let of = |found: Found| {
            let all = self.findings.iter().filter(|(_, finding)| finding.found == found);
            let all: Vec<String> =
                all.map(|(attempt, finding)| format!("{} ({})", attempt.title(), finding.evidence)).collect();
            all.join("; ")
        };
        let mut text = self.subject.clone();
        for (found, words) in [
            (Found::NotEnforced, "Not enforced"),
            (Found::NotTried, "Could not be tried"),
            (Found::Verified, "Verified"),
        ] {
            let all = of(found);
            if !all.is_empty() {
                text.push_str(&format!(". {words}: {all}"));
            }
        }
        text
    }
}

/// Which cell of each line is about this isolation.
fn column(isolation: Isolation) -> Option<usize> {
    let head = format!("`{}`", isolation.word());
    page_table().next()?.iter().position(|cell| *cell == head)
}

/// The lines of the page's table of tries, by cells.
fn page_table() -> impl Iterator<Item = Vec<String>> {
    let table = PAGE.lines().skip_while(|line| !line.starts_with("| tries |"));
    table.take_while(|line| line.starts_with('|')).map(|line| {
        let cells = line.trim_matches('|').split('|');
        cells.map(|cell| cell.trim().replace(" ¹", "").replace('¹', "")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Failure;

    const GIB: u64 = 1 << 30;

    fn failure(error: &str) -> Option<Failure> {
        Some(Failure { call: "cuMemAlloc_v2".into(), error: error.into() })
    }

    fn took(granted: u64, refused: Option<&str>) -> Outcome {
        Outcome::Said(Said { granted, refused: refused.and_then(failure), ..Said::default() })
    }

    fn stopped(error: &str) -> Outcome {
        Outcome::Said(Said { failed: failure(error), ..Said::default() })
    }

    fn found(finding: &Finding) -> (Found, &str) {
        (finding.found, &finding.evidence)
    }

    #[test]
    fn every_try_is_a_line_of_the_page() {
        for attempt in Try::ALL {
            let lines = page_table().filter(|cells| cells[0] == attempt.title()).collect::<Vec<_>>();
            let [line] = lines.as_slice() else { panic!("{}: {lines:?}", attempt.title()) };
            for isolation in [Isolation::Driver, Isolation::Process] {
                let says = &line[column(isolation).unwrap()];
                let promises = ["refused", "no GPU", "no more than its ceiling", "each has a share"]
                    .iter()
                    .any(|word| says.starts_with(word));
                let sum = attempt != Try::SecondContainer || says.contains("the pod's sum counts");
                assert_eq!(attempt.is_promised(isolation), promises && sum, "{}: {says}", attempt.title());
            }
        }
    }

    #[test]
    fn a_refusal_shows_a_limit_only_where_there_was_memory_to_have() {
        let oom = Some(OUT_OF_MEMORY);
        let one = memory(&[took(8 * GIB - 1, oom)], 8 * GIB);
        assert_eq!(found(&one), (Found::Verified, "got 8.00 GiB of 8.00 GiB, then CUDA_ERROR_OUT_OF_MEMORY"));
        let sum = memory(&[took(3 * GIB, oom), took(GIB, oom), took(2 * GIB, None)], 8 * GIB);
        assert_eq!(found(&sum), (Found::Verified, "got 6.00 GiB of 8.00 GiB, then CUDA_ERROR_OUT_OF_MEMORY"));
        let more = memory(&[took(5 * GIB, oom), took(4 * GIB, None)], 8 * GIB);
        assert_eq!(found(&more), (Found::NotEnforced, "got 9.00 GiB of 8.00 GiB"));
        for (outcomes, why) in [
            (vec![took(GIB, oom)], "something else has the memory"),
            (vec![took(7 * GIB, None)], "nobody asked for more"),
            (vec![took(7 * GIB, Some("CUDA_ERROR_LAUNCH_FAILED"))], "CUDA_ERROR_LAUNCH_FAILED"),
            (vec![stopped("CUDA_ERROR_NO_DEVICE")], "CUDA_ERROR_NO_DEVICE"),
            (vec![took(7 * GIB, oom), Outcome::Ended("it was ended by signal 9".into())], "signal 9"),
        ] {
            let finding = memory(&outcomes, 8 * GIB);
            assert!(finding.found == Found::NotTried && finding.evidence.contains(why), "{finding:?}");
        }
        // Whoever was ended had more before, if the others have more without it.
        let ended = [took(9 * GIB, None), Outcome::Ended("x".into())];
        assert_eq!(memory(&ended, 8 * GIB).found, Found::NotEnforced);
    }

    #[test]
    fn past_mps_there_is_no_gpu_at_all() {
        let refused = || stopped("CUDA_ERROR_DEVICE_UNAVAILABLE");
        let finding = past_mps(&[refused(), refused()]);
        assert_eq!(
            found(&finding),
            (Found::Verified, "no GPU: cuMemAlloc_v2: CUDA_ERROR_DEVICE_UNAVAILABLE")
        );
        assert_eq!(past_mps(&[refused(), took(0, None)]).found, Found::NotEnforced);
        assert_eq!(past_mps(&[refused(), Outcome::Ended("x".into())]).found, Found::NotTried);
    }

    #[test]
    fn a_ceiling_is_what_a_kernel_runs_on() {
        let ran = |on, multiprocessors| {
            Outcome::Said(Said { ran_on: Some(on), multiprocessors, ..Said::default() })
        };
        assert_eq!(compute(&ran(33, 132), Some(132), 25).found, Found::Verified, "whatever the device says");
        assert_eq!(compute(&ran(34, 34), Some(132), 25).found, Found::Verified, "33, rounded to a pair");
        assert_eq!(compute(&ran(35, 33), Some(132), 25).found, Found::NotEnforced);
        assert_eq!(compute(&ran(47, 47), Some(188), 25).found, Found::Verified);
        assert_eq!(compute(&ran(48, 48), Some(188), 24).found, Found::NotEnforced, "45.12 is 45");
        assert_eq!(compute(&ran(33, 33), None, 25).found, Found::NotTried);
        assert_eq!(compute(&stopped("CUDA_ERROR_INVALID_PTX"), Some(132), 25).found, Found::NotTried);
    }

    fn report(isolation: Isolation, findings: Vec<(Try, Finding)>) -> Report {
        let shown = Some((8 * GIB, 80 * GIB));
        Report { subject: "a GPU".into(), isolation, findings, shown, memory: 8 * GIB }
    }

    #[test]
    fn the_result_is_of_what_is_promised() {
        let all = |isolation, of: fn(Try) -> Found| {
            let finding = |attempt| (attempt, Finding { found: of(attempt), evidence: "e".into() });
            report(isolation, Try::ALL.map(finding).to_vec())
        };
        assert_eq!(all(Isolation::Driver, |_| Found::Verified).holds(), Some(true));
        let several = |attempt| match attempt {
            Try::SeveralProcesses => Found::NotEnforced,
            _ => Found::Verified,
        };
        assert_eq!(all(Isolation::Driver, several).holds(), Some(false));
        assert_eq!(all(Isolation::Process, several).holds(), Some(true), "nobody said that it holds");
        let percentage = |attempt| match attempt {
            Try::Percentage => Found::NotTried,
            _ => Found::Verified,
        };
        assert_eq!(all(Isolation::Driver, percentage).holds(), None);
        let mut without = all(Isolation::Driver, |_| Found::Verified);
        without.findings.pop();
        assert_eq!(without.holds(), None, "what is left out is not tried");
        assert_eq!(report(Isolation::Driver, Vec::new()).holds(), None);
    }

    #[test]
    fn the_table_is_that_of_the_page() {
        let findings = vec![
            (Try::OneProcess, Finding::verified("got it".into())),
            (Try::SeveralProcesses, Finding::not_enforced("all got it".into())),
        ];
        let table = report(Isolation::Driver, findings.clone()).table();
        assert!(
            table.starts_with("a GPU\n\n| tries | `driver` | on this hardware |\n|---|---|---|\n")
                || table
                    .starts_with("a GPU\n\n| tries | `driver` | on this hardware |\n| --- | --- | --- |\n"),
            "{table}"
        );
        for line in [
            "| to allocate more, by one process | refused | verified: got it |",
            "| to allocate more, by several processes | refused: the sum counts | **not enforced**: all got it |",
            "| memory bandwidth, caches, PCIe | not limited | could not be tried: nothing is promised |",
            "A program with a share of 8.00 GiB is shown 80.00 GiB of memory, 8.00 GiB of them free.",
        ] {
            assert!(table.lines().any(|other| other == line), "{line} is not in\n{table}");
        }
        let table = report(Isolation::Process, findings).table();
        assert!(
            table.contains("| `process` |") && table.contains("not enforced, as said: all got it"),
            "{table}"
        );
    }

    #[test]
    fn the_summary_begins_with_what_is_worst() {
        let findings = vec![
            (Try::OneProcess, Finding::verified("got it".into())),
            (Try::NoPipe, Finding::not_enforced("all of it".into())),
        ];
        assert_eq!(
            report(Isolation::Driver, findings).summary(),
            "a GPU. Not enforced: no `CUDA_MPS_PIPE_DIRECTORY` (all of it). Verified: to allocate more, by one process \
             (got it)"
        );
    }
}
