//! Pods that come and go, by a file, on a cluster's GPUs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use kerf_planner::fleet::Fleet;
use kube::ResourceExt;

use super::{Policies, admit, read, simulate};
use crate::cache::World;
use crate::scheduler::needs::Memo;
use crate::scheduler::requests::{self, Asks};
use crate::scheduler::selectors::Selectors;
use crate::scheduler::snapshot::{self, Board, give_back};
use crate::scheduler::views::Views;

/// Lets pods come and go on the GPUs of a dump, and counts those that find a place the moment they come.
///
/// The GPUs are as the policies have them and the dump reports them, but without the pods that have any of them; a pod that
/// finds no place is lost. The lines of the trace, a heading or not:
///   arrival,duration,resource,count
///   0,3600,nvidia.com/mig-2g.20gb,1
/// Times are in seconds; the count is 1 where it is left out, and all of a pod's devices are on one node.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Trace {
    /// The trace; `-`: standard input.
    #[arg(value_name = "FILE")]
    pub(super) trace: PathBuf,
    #[command(flatten)]
    pub(super) policies: Policies,
}

/// A pod of the trace.
#[derive(Debug)]
struct Job {
    arrives: f64,
    stays: f64,
    /// Index of what it asks for.
    kind: usize,
}

/// A resource, and how many of it.
type Kind = (String, u32);

impl Trace {
    pub(super) fn run(&self, text: &mut String) -> anyhow::Result<u8> {
        let (jobs, kinds) = parse(&read(&self.trace)?).with_context(|| self.trace.display().to_string())?;
        let Some((mut cluster, _)) = self.policies.read(text)? else { return Ok(1) };
        simulate::add_classes(&mut cluster.world);
        let mut pods = admit::Pods::default();
        for (resource, count) in &kinds {
            pods.push(resource, *count)?;
        }
        let names = pods.admit(&mut cluster, text)?;
        let mut board = empty(&cluster.world);
        let (selectors, memo) = (Selectors::default(), Memo::default());
        for (name, (resource, _)) in names.iter().zip(&kinds) {
            let pod = cluster.world.pods.get(name).with_context(|| format!("no pod {name}"))?;
            match requests::read(&cluster.world, &board, &selectors, &memo, pod) {
                Asks::For(wanted) => board.snapshot.requests.push(wanted.request),
                Asks::Cannot(_, why) => bail!("{resource}: {why}"),
                Asks::Nothing | Asks::Allocated => bail!("{resource} is nothing that Kerf serves"),
            }
        }
        let counts = play(&board, &jobs);
        table(&kinds, &counts, text)?;
        Ok(0)
    }
}

/// The cluster's GPUs without those who have them.
fn empty(world: &World) -> Board {
    let mut board = snapshot::take(world, &Views::of(world), |_| false);
    for (node, of_node) in board.snapshot.nodes.iter_mut().zip(&board.gpu_nodes) {
        let name = of_node.name_any();
        let pods = world.interesting.iter().filter_map(|key| world.pods.get(key));
        for pod in pods.filter(|pod| !pod.done && pod.node.as_ref() == Some(&name)) {
            give_back(&mut node.free_milli, &pod.milli);
        }
        node.gpus.iter_mut().for_each(|gpu| *gpu = gpu.emptied());
    }
    board
}

/// Asked and accepted: pods, and slices times seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    pods: [u64; 2],
    work: [f64; 2],
}

fn play(board: &Board, jobs: &[Job]) -> Vec<Count> {
    let mut fleet = Fleet::of(&board.snapshot);
    let asked: Vec<_> = board.snapshot.requests.iter().map(|request| fleet.numbered(request)).collect();
    let mut counts = vec![Count::default(); asked.len()];
    let mut running = BTreeMap::new();
    for (number, job) in jobs.iter().enumerate() {
        // Positive numbers are in the order of their bits.
        while let Some(first) = running.first_entry()
            && *first.key() <= (job.arrives.to_bits(), usize::MAX)
        {
            let (kind, node, place): (usize, _, std::rc::Rc<_>) = first.remove();
            fleet.put_back(asked[kind], node, &place);
        }
        let this = asked[job.kind];
        let work = f64::from(fleet.least_slices(this.shape)) * job.stays;
        let place = fleet.best(this);
        let count = &mut counts[job.kind];
        (count.pods[0], count.work[0]) = (count.pods[0] + 1, count.work[0] + work);
        if let Some((node, place)) = place {
            (count.pods[1], count.work[1]) = (count.pods[1] + 1, count.work[1] + work);
            fleet.take(this, node, &place);
            running.insert(((job.arrives + job.stays).to_bits(), number), (job.kind, node, place));
        }
    }
    counts
}

fn table(kinds: &[Kind], counts: &[Count], text: &mut String) -> std::fmt::Result {
    let share = |[asked, accepted]: [f64; 2]| if asked > 0.0 { 100.0 * accepted / asked } else { 100.0 };
    let mut all = Count::default();
    for ((resource, count), of) in kinds.iter().zip(counts) {
        let [asked, accepted] = of.pods;
        let percent = share([asked as f64, accepted as f64]);
        let times = if *count == 1 { String::new() } else { format!("{count} of ") };
        writeln!(text, "{times}{resource}: {accepted} of {asked} pods found a place ({percent:.1} %)")?;
        for at in 0..2 {
            all.pods[at] += of.pods[at];
            all.work[at] += of.work[at];
        }
    }
    let [asked, accepted] = all.pods;
    writeln!(
        text,
        "all: {accepted} of {asked} pods, {:.1} % of the memory slices asked for, by time",
        share(all.work)
    )
}

fn parse(text: &str) -> anyhow::Result<(Vec<Job>, Vec<Kind>)> {
    let (mut jobs, mut kinds) = (Vec::new(), Vec::<Kind>::new());
    for (index, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        if line.trim().is_empty() || line.starts_with('#') || (index == 0 && fields[0] == "arrival") {
            continue;
        }
        let wrong =
            || anyhow!("line {}: {line:?} is not of the form arrival,duration,resource,count", index + 1);
        let (resource, count) = match fields.as_slice() {
            [_, _, resource] => (*resource, 1),
            [_, _, resource, count] => {
                (*resource, count.parse().ok().filter(|count| *count > 0).ok_or_else(wrong)?)
            }
            _ => return Err(wrong()),
        };
        let seconds = |field: &str| field.parse().ok().filter(|time: &f64| time.is_finite() && *time >= 0.0);
        let (arrives, stays) = seconds(fields[0]).zip(seconds(fields[1])).ok_or_else(wrong)?;
        let kind = (resource.to_owned(), count);
        let known = kinds.iter().position(|other| *other == kind);
        jobs.push(Job {
            // Not -0.0, whose bits are a large number.
            arrives: arrives.abs(),
            stays: stays.abs(),
            kind: known.unwrap_or(kinds.len()),
        });
        if known.is_none() {
            kinds.push(kind);
        }
    }
    ensure!(!jobs.is_empty(), "there is no pod in the trace");
    jobs.sort_by(|a, b| a.arrives.total_cmp(&b.arrives));
    Ok((jobs, kinds))
}
