//! Places on record that cannot be used as things are: given up at once where they can come to nothing, left for a better
//! one if there is one, and else explained.

use std::sync::Arc;

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{self, Partition};
use kerf_planner::nodes::{Misfit, lacking, unsuitable};
use kerf_planner::snapshot::PodNeeds;

use super::decision::Looking;
use super::placements::{Key, Seen};
use super::requests::{self, Asks, Wanted};
use super::snapshot::{self, Board};
use super::tell::Sentence;
use crate::cache::PodInfo;

/// What is wrong with a place that is not used yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It can come to nothing.
    Hopeless,
    /// Its node cannot take the pod as things are.
    Node(Misfit),
    /// A GPU of it cannot provide it as things are.
    Gpu(FailingGpu),
}

/// A GPU on which a step fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailingGpu {
    pub uuid: String,
    pub why: String,
}

/// A place that may be left for a better one.
#[derive(Debug)]
pub struct Troubled {
    pub key: Key,
    pub pod: Arc<PodInfo>,
    /// What the pod is told if there is none.
    pub sentence: Option<Sentence>,
    /// Present: it is this GPU that is left, and not the node.
    pub gpu: Option<FailingGpu>,
}

/// What is wrong with a place, if anything.
pub fn of(board: &Board, seen: &Seen, key: &Key) -> Option<Trouble> {
    let pod = seen.pod.as_ref()?;
    let detail = pod.detail.as_ref()?;
    let Some(index) = board.node(&key.node) else { return Some(Trouble::Hopeless) };
    let node = &board.snapshot.nodes[index];
    let status = board.status(index)?;
    let ready = seen.observed.entry.as_ref().is_some_and(|entry| entry.ready);
    for device in seen.devices() {
        let Some(gpu) = status.gpus.iter().position(|gpu| gpu.uuid == device.gpu) else {
            return Some(Trouble::Hopeless);
        };
        let observed = &status.gpus[gpu];
        if instance_failed(observed, device) {
            return Some(Trouble::Hopeless);
        }
        let failing = share_failed(observed, device)
            .or(observed.problem.as_ref())
            .map(|problem| FailingGpu { uuid: device.gpu.clone(), why: snapshot::text(problem) });
        let closed = node.gpus[gpu].closed.is_some();
        match failing {
            Some(_) if closed && (observed.unhealthy.is_some() || observed.unmanaged.is_some()) => {
                return Some(Trouble::Hopeless);
            }
            Some(failing) if closed || !ready => return Some(Trouble::Gpu(failing)),
            None if closed => return Some(Trouble::Hopeless),
            _ => {}
        }
    }
    let mut free = node.free_milli.clone();
    // The pod itself is counted already.
    snapshot::give_back(&mut free, &pod.milli);
    let needs = PodNeeds { milli: pod.milli.clone(), ..PodNeeds::default() };
    unsuitable(node, &detail.needs).or_else(|| lacking(&free, &needs)).map(Trouble::Node)
}

/// Whether the instance is there and has failed: its end is what ends that.
fn instance_failed(gpu: &gpu_node::Gpu, device: &Partition) -> bool {
    device.instance.as_ref().is_some_and(|wanted| {
        gpu.instances.iter().any(|instance| {
            instance.placement == wanted.placement
                && kerf_crds::profile::same(&instance.profile, &wanted.profile)
                && instance.unhealthy.is_some()
        })
    })
}

/// Why the share cannot come into force there, if it cannot.
fn share_failed<'a>(gpu: &'a gpu_node::Gpu, device: &Partition) -> Option<&'a gpu_node::Reason> {
    const LASTING: [&str; 5] = [
        problem_reason::BAD_SHARE,
        problem_reason::ISOLATION_UNAVAILABLE,
        problem_reason::SHARING_UNAVAILABLE,
        problem_reason::SIZES_DIFFER,
        problem_reason::POD_FAILED,
    ];
    let wanted = device.share.as_ref()?;
    let problem = gpu.shares.iter().find(|share| share.id == wanted.id)?.problem.as_ref()?;
    LASTING.contains(&problem.reason.as_str()).then_some(problem)
}

/// What the pod would ask for if it had no place, and did not want this one. `None` while it is not to be moved.
pub fn ask_afresh(looking: &Looking<'_>, troubled: &Troubled) -> Option<Box<Wanted>> {
    let Looking { world, board, memory, selectors, memo, now } = looking;
    if !memory.calm(&troubled.pod.uid, *now) {
        return None;
    }
    // All of the pod's claims, as if none had a place.
    let Asks::For(mut wanted) = requests::read_afresh(world, board, selectors, memo, &troubled.pod) else {
        return None;
    };
    if troubled.gpu.is_none() {
        wanted.request.avoid = board.node(&troubled.key.node).into_iter().collect();
    }
    Some(wanted)
}
