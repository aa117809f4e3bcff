//! One GPU's worker: look, decide, act, look again. It is the only one that looks at its GPU and the only one that
//! changes it, so what it publishes is in order and what it decides on is its own last look.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kerf_crds::conditions::{node_reason, problem_reason, unmanaged_reason};
use kerf_crds::gpu_node::{ClaimReference, DesiredGpu, Partition, Placement, Reason, Share};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::carrier::Carrier;
use crate::carrying::{Carrying, Review};
use crate::events::{Note, Notes};
use crate::failed::{Failed, Why, fail};
use crate::hardware::{self, Code, Driver, Facts, Failure, Identity, Known};
use crate::health::Health;
use crate::holders;
use crate::inventory::{Gpu, Process};
use crate::keeper::{self, View, Views};
use crate::modes::Modes;
use crate::mps::Mps;
use crate::mps::pods::Pods;
use crate::node::{GpuReport, NodeState, SeenSpec};
use crate::ours::Ours;
use crate::pace::Pace;
use crate::prepared::{Condemned, DeviceKey};
use crate::shares;
use crate::step::{Desired, Due, Observed, Step, due_steps};

/// How soon to look again while something is waited for that only a look can show: processes that end.
pub(crate) const WAITING: Duration = Duration::from_secs(1);

/// How soon to look again at a GPU that carries shares: a server that has ended shows in no other way.
const CARRYING: Duration = Duration::from_secs(5);

/// What blocks for less than this is not reported: a claim that has just ended still holds its slices for a moment.
const PASSING: Duration = Duration::from_secs(5);

/// Tries that follow each other because clients have ended are this far apart: some come and go all the time.
const BETWEEN_CLIENTS: Duration = Duration::from_millis(250);

/// A call that has not come back for this long is reported.
const HANGS: Duration = Duration::from_secs(30);

/// How soon to look again at a GPU that cannot be read.
const UNREADABLE: Duration = Duration::from_secs(5);

/// Rounds come sooner than this.
const FAR: Duration = Duration::from_secs(3600);

/// The call that failed if there is no driver.
const NO_SESSION: &str = "nvmlInit";

/// What the workers share.
#[derive(Clone, Debug)]
pub struct Context {
    pub state: NodeState,
    pub driver: Driver,
    pub ours: Ours,
    pub health: Health,
    pub notes: Notes,
    /// Is somebody else handing out the GPUs? See [`crate::foreign`].
    pub verdicts: watch::Receiver<Option<Option<Reason>>>,
    pub pace: Pace,
    /// Counts rounds of looking at everything.
    pub rounds: watch::Receiver<u64>,
    /// Where the driver's `/proc` files are.
    pub proc_root: Arc<std::path::Path>,
    /// What carries shares.
    pub mps: Mps,
    pub modes: Modes,
}

/// The part of the world that concerns one GPU; while it stays the same there is nothing to decide.
#[derive(Clone, Debug, Default, PartialEq)]
struct Concern {
    desired: Option<DesiredGpu>,
    partitions: Vec<Partition>,
    holders: Vec<ClaimReference>,
    verdict: Option<Option<Reason>>,
    round: u64,
    /// The pods of its MPS servers; `None` until the pods are known.
    pods: Option<Pods>,
}

impl Concern {
    fn desired(&self) -> Desired<'_> {
        Desired { gpu: self.desired.as_ref(), partitions: &self.partitions }
    }
}

/// What is due on one carrier of shares.
#[derive(Debug)]
struct Carried {
    placement: Option<Placement>,
    view: View,
    due: shares::Due,
    review: Review,
}

#[derive(Debug)]
struct Worker {
    context: Context,
    identity: Arc<Identity>,
    known: Known,
    last: Option<Gpu>,
    /// Why the last look failed; `None` if it did not.
    unseen: Option<Failure>,
    failed: Vec<Failed<Step>>,
    /// What is known of what carries shares, by place.
    carrying: BTreeMap<Option<Placement>, Carrying>,
    /// By what the GPU is blocked, since when, and whether that was told in an event.
    blocked: Option<(String, Instant, bool)>,
    /// Who alone is in the way, where that is no claim.
    clients: Vec<Process>,
    /// What the last step disturbed: barred from Prepare until everybody can see what became of it.
    condemned: Option<Condemned>,
}

/// Runs one GPU's worker until it is dropped.
pub async fn run(context: Context, identity: Identity) -> anyhow::Result<()> {
    let mut worker = Worker {
        context,
        identity: Arc::new(identity),
        known: Known::default(),
        last: None,
        unseen: None,
        failed: Vec::new(),
        carrying: BTreeMap::new(),
        blocked: None,
        clients: Vec::new(),
        condemned: None,
    };
    let mut seen_round = None;
    loop {
        let (concern, spec) = worker.concern();
        // A change made by nobody but us needs no new geometry.
        let afresh = seen_round.replace(concern.round) != Some(concern.round);
        let wait = worker.round(&concern, spec, afresh).await;
        if let Some(until) = wait {
            worker.wait(&concern, until).await;
        }
    }
}

impl Worker {
    /// The latest concern, and the spec that it was taken from.
    fn concern(&self) -> (Concern, Option<Arc<SeenSpec>>) {
        let uuid = &self.identity.uuid;
        let seen = self.context.state.seen_spec();
        let spec = seen.as_ref().map(|seen| &seen.spec);
        let whole = DeviceKey::gpu(uuid);
        let concern = Concern {
            desired: spec.and_then(|spec| spec.gpus.iter().find(|gpu| gpu.uuid == *uuid)).cloned(),
            partitions: spec
                .into_iter()
                .flat_map(|spec| &spec.partitions)
                .filter(|partition| partition.gpu == *uuid)
                .cloned()
                .collect(),
            holders: self.context.state.prepared.holders(&whole),
            verdict: self.context.verdicts.borrow().clone(),
            round: *self.context.rounds.borrow(),
            pods: self.context.mps.pods.seen.borrow().as_ref().map(|pods| {
                let own = pods.iter().filter(|(carrier, _)| carrier.gpu == *uuid);
                own.map(|(carrier, pod)| (carrier.clone(), pod.clone())).collect()
            }),
        };
        (concern, seen)
    }

    /// Looks, decides, acts once. Returns until when there is nothing to do unless something changes; `None`: go on at
    /// once.
    async fn round(
        &mut self,
        concern: &Concern,
        spec: Option<Arc<SeenSpec>>,
        afresh: bool,
    ) -> Option<Instant> {
        let (mut gpu, facts) = match self.look(afresh).await {
            Ok(found) => found,
            Err(failure) => {
                self.carrying.values_mut().for_each(Carrying::not_seen);
                return Some(self.not_seen(spec.as_deref(), failure));
            }
        };
        // A GPU that can be read again may have another driver, whose files containers need.
        self.context.state.request_scan_if(self.unseen.take().is_some());
        if let Err(error) = self.context.ours.judge(&mut gpu) {
            tracing::warn!(gpu = %gpu.uuid, %error, "the checkpoint of instances cannot be written");
        }
        self.context.health.mark(&mut gpu);
        gpu.unmanaged = unmanaged(&gpu, concern);
        let prepared = self.context.state.prepared.snapshot();
        let pods = concern.pods.clone().unwrap_or_default();
        let places = shares::places(&gpu.uuid, &concern.partitions, &prepared, &pods);
        let views = keeper::look(&self.context, &mut gpu, &facts, places, &pods).await;
        let lingering = gpu.instances.iter().any(|instance| {
            let key = DeviceKey::instance(&gpu.uuid, instance.placement);
            !instance.foreign
                && !instance.processes.is_empty()
                && self.context.state.prepared.holders(&key).is_empty()
        });
        let rest = if lingering { Instant::now() + WAITING } else { far_future() };
        if !self.context.ours.is_known() {
            // Nobody must take what is foreign for ours, or the other way round.
            return Some(rest);
        }
        let (Some(spec), true) = (spec, concern.verdict.is_some()) else {
            // Without a live spec nothing is changed.
            self.publish(gpu);
            return Some(rest);
        };
        let mut carried = self.carried(&gpu, views, concern);
        gpu.shares = carried.iter_mut().flat_map(|one| std::mem::take(&mut one.due.shares)).collect();
        gpu.shares.sort_by(|one, other| one.id.cmp(&other.id));
        if concern.pods.is_none() {
            gpu.shares.iter_mut().for_each(say_pods_are_unknown);
            carried.clear();
        }
        // A GPU that carries shares itself, or is to, is not cut meanwhile.
        let carries = |one: &Carried| one.placement.is_none() && one.due.carries;
        let Due { steps: due, needed, blocked } = match !gpu.mig.enabled && carried.iter().any(carries) {
            true => Due::default(),
            false => self.due(&gpu, concern),
        };
        self.failed.retain(|failed| due.contains(&failed.step));
        // What fails to be tidied up is in nobody's way: the rest of the GPU is as good as before.
        let failing = self.failed.iter().find(|failed| due[..needed].contains(&failed.step));
        let of_shares = || carried.iter().find_map(|one| one.review.problem.clone());
        let problem = failing.map(|failed| failed.reason.clone()).or_else(of_shares);
        self.clients = failing.map(|failed| failed.clients.clone()).unwrap_or_default();
        let (not_allowed, blocked): (Option<Reason>, Option<Reason>) = match blocked {
            Some(why) if why.reason == unmanaged_reason::MODE_SWITCH_NOT_ALLOWED => (Some(why), None),
            blocked => (None, blocked),
        };
        if not_allowed.is_some() {
            gpu.unmanaged = not_allowed;
        }
        let blocked = blocked.or_else(|| carried.iter().find_map(|one| one.due.blocked.clone()));
        if problem.is_none()
            && concern.holders.is_empty()
            && blocked.as_ref().is_some_and(|reason| reason.reason == problem_reason::IN_USE)
        {
            self.clients = everybody(&gpu);
        }
        self.publish(gpu.clone());
        let mut waits = blocked.is_some() || carried.iter().any(|one| one.due.waits);
        let no_effect = carried.iter().find_map(|one| one.review.no_effect.clone());
        let lasting = self.lasting(blocked.or(no_effect));
        self.report(&spec, problem.or(lasting));
        for one in &carried {
            if let Some(step) = &one.review.ready {
                match self.take_for_shares(step.clone(), &gpu, one, concern, &spec).await {
                    true => return None,
                    false => waits = true,
                }
            }
        }
        let now = Instant::now();
        let ready = due.into_iter().find(|step| {
            // Before the pods are known, nobody knows what a server may still have to do with.
            let known = concern.pods.is_some() || step.disturbs(&gpu.uuid).is_none();
            known && self.failed.iter().all(|f| f.step != *step || f.again <= now)
        });
        if let Some(step) = ready {
            return self.take(step, concern, &spec).await;
        }
        let tries = self.failed.iter().map(|failed| failed.again);
        let tries = tries.chain(carried.iter().filter_map(|one| one.review.again));
        // What could be tried now and was not waits for something else.
        let next_try = tries.filter(|again| *again > now).min();
        let look = match waits {
            true => now + WAITING,
            false if carried.iter().any(|one| one.due.carries) => now + CARRYING,
            false => far_future(),
        };
        Some(rest.min(next_try.unwrap_or_else(far_future)).min(look))
    }

    /// What is due on each carrier.
    fn carried(&mut self, gpu: &Gpu, views: Views, concern: &Concern) -> Vec<Carried> {
        let prepared = self.context.state.prepared.snapshot();
        let departures = self.context.driver.departures();
        self.carrying.retain(|placement, _| views.contains_key(placement));
        let due = |(placement, mut view): (Option<Placement>, View)| {
            let carrier = Carrier { gpu, placement };
            let known = self.carrying.entry(placement).or_default();
            known.follow(&mut view, departures);
            let mut due = shares::due(concern.desired(), view.observed(carrier, &prepared));
            let review = known.review(&carrier.to_string(), &view, &mut due);
            Carried { placement, view, due, review }
        };
        views.into_iter().map(due).collect()
    }

    /// Takes one step, if its ground still is what it was decided on; `false`: it would disturb a claim that the decision did
    /// not see, or does not count.
    async fn take_for_shares(
        &mut self,
        step: shares::Step,
        gpu: &Gpu,
        carried: &Carried,
        concern: &Concern,
        spec: &SeenSpec,
    ) -> bool {
        let Carried { placement, view, .. } = carried;
        let carrier = Carrier { gpu, placement: *placement };
        let condemned = match step.disturbs(&carrier.key()) {
            None => None,
            Some(key) => match self.context.state.prepared.condemn(key, step.users()) {
                Some(condemned) => Some(condemned),
                None => return false,
            },
        };
        if self.concern().0 != *concern {
            return true;
        }
        self.condemned = condemned;
        self.carrying.entry(*placement).or_default().begin(&carrier.to_string(), view, &step);
        tracing::info!(gpu = %gpu.uuid, generation = spec.generation, "{step} ({carrier})");
        let result = keeper::act(&self.context, carrier, view.protocol, &step).await;
        self.context.state.metrics.share_step(&step, result.is_ok());
        let known = self.carrying.entry(*placement).or_default();
        match result {
            Ok(()) => known.done(step),
            Err(reason) => {
                fail(&self.context.notes, &gpu.uuid, &mut known.failed, step, reason.into());
            }
        }
        true
    }

    /// What blocks, once it has done so for a while.
    fn lasting(&mut self, blocked: Option<Reason>) -> Option<Reason> {
        let Some(reason) = blocked else {
            self.blocked = None;
            return None;
        };
        let (since, told) = match self.blocked.take() {
            Some((word, since, told)) if word == reason.reason => (since, told),
            _ => (Instant::now(), false),
        };
        let lasts = since.elapsed() >= PASSING;
        if lasts && !told {
            self.note(true, &reason.reason, "Reshape", reason.message.clone());
        }
        self.blocked = Some((reason.reason.clone(), since, lasts));
        lasts.then_some(reason)
    }

    fn due(&self, gpu: &Gpu, concern: &Concern) -> Due {
        let prepared = self.context.state.prepared.snapshot();
        let short_of_resources =
            self.failed.iter().any(|failed| failed.code == Some(Code::INSUFFICIENT_RESOURCES));
        due_steps(
            concern.desired(),
            Observed { gpu, prepared: &prepared, passed_over: &[], short_of_resources },
        )
    }

    async fn look(&mut self, afresh: bool) -> Result<(Gpu, Facts), Failure> {
        let cgroup_root = self.context.mps.cgroup_root.clone();
        let driver = self.context.driver.clone();
        let identity = self.identity.clone();
        let mut known = std::mem::take(&mut self.known);
        let (result, known) = blocking(move || {
            let result = match driver.session() {
                Ok(library) => hardware::observe(&library, &identity, &mut known, afresh)
                    .map(|gpu| {
                        let departures = driver.departures();
                        let facts = hardware::facts(&library, &gpu, &mut known, departures, &cgroup_root);
                        (gpu, facts)
                    })
                    .inspect_err(|failure| driver.note_failure(&library, failure)),
                Err(_) => Err(no_session()),
            };
            (result, known)
        })
        .await;
        self.known = known;
        result
    }

    /// Reports that a look failed, keeping what the last one saw.
    fn not_seen(&mut self, spec: Option<&SeenSpec>, failure: Failure) -> Instant {
        let news = self.unseen.as_ref() != Some(&failure);
        self.unseen = Some(failure.clone());
        self.clients.clear();
        self.context.state.request_scan_if(news);
        if failure.call == NO_SESSION {
            // The node's trouble, not this GPU's: the next round comes when there is a driver.
            return far_future();
        }
        let gone = failure.code == Code::GPU_IS_LOST
            || failure.call == "nvmlDeviceGetHandleByUUID"
                && matches!(failure.code, Code::GPU_NOT_FOUND | Code::NOT_FOUND);
        let name = if gone { node_reason::GPU_LOST.into() } else { failure.code.name().into_owned() };
        let reason = Reason { reason: name, message: format!("{failure} on {}", self.identity.uuid) };
        if news {
            tracing::warn!("{}", reason.message);
            self.note(true, &reason.reason, "Look", reason.message.clone());
        }
        // One that is only not found may come back without a reset.
        if failure.code == Code::GPU_IS_LOST {
            self.context.health.note_loss(&self.identity.uuid);
        }
        if gone || self.last.is_none() {
            let mut gpu = self.last.clone().unwrap_or_else(|| Gpu {
                name: self.identity.name.clone(),
                uuid: self.identity.uuid.clone(),
                index: self.identity.index,
                ..Gpu::default()
            });
            gpu.unhealthy = Some(reason.clone());
            self.context.state.publish_gpu(gpu);
            self.condemned = None;
        }
        if let Some(spec) = spec {
            self.report(spec, Some(reason).filter(|_| !gone));
        }
        Instant::now() + if gone { FAR } else { UNREADABLE }
    }

    /// Takes one step, if its ground still is what it was decided on.
    async fn take(&mut self, step: Step, concern: &Concern, spec: &Arc<SeenSpec>) -> Option<Instant> {
        let uuid = self.identity.uuid.clone();
        // What happens to the GPU while others are changed is to be seen.
        let turn = timeout(WAITING, self.context.pace.turn(&self.context.state)).await;
        let Ok(_turn) = turn else { return None };
        let condemned = match step.disturbs(&uuid) {
            None => None,
            Some(key) => match self.context.state.prepared.condemn(key, step.users()) {
                Some(condemned) => Some(condemned),
                // Prepared since the decision.
                None => return None,
            },
        };
        if self.concern().0 != *concern {
            return None;
        }
        self.condemned = condemned;
        if let Err(error) = self.context.ours.intend(&uuid, &step) {
            let message =
                format!("the checkpoint of instances cannot be written, so nothing is created: {error}");
            let reason = Reason { reason: problem_reason::CHECKPOINT_FAILED.into(), message };
            fail(&self.context.notes, &uuid, &mut self.failed, step, reason.into());
            return None;
        }
        tracing::info!(gpu = %uuid, generation = spec.generation, "{step}");
        let started = Instant::now();
        let driver = self.context.driver.clone();
        let acted = step.clone();
        let on = uuid.clone();
        let mut call = Box::pin(blocking(move || {
            let library = driver.session().map_err(|_| no_session())?;
            hardware::act(&library, &on, &acted).inspect_err(|failure| driver.note_failure(&library, failure))
        }));
        let result = match timeout(HANGS, &mut call).await {
            Ok(result) => result,
            Err(_) => {
                let message = format!("to {step} on {uuid} takes more than {} s", HANGS.as_secs());
                tracing::warn!("{message}");
                self.note(true, problem_reason::CALL_HANGS, "Reshape", message.clone());
                self.clients.clear();
                self.report(spec, Some(Reason { reason: problem_reason::CALL_HANGS.into(), message }));
                call.await
            }
        };
        self.context.state.metrics.mig_step(&step, result.is_ok());
        match result {
            Ok(()) => {
                tracing::info!(gpu = %uuid, milliseconds = started.elapsed().as_millis() as u64, "done: {step}");
                self.failed.retain(|failed| failed.step != step);
            }
            Err(failure) => {
                let (message, clients) = self.explain(&step, &failure).await;
                let reason = Reason { reason: failure.code.name().into_owned(), message };
                let why = Why { code: Some(failure.code), reason, clients };
                fail(&self.context.notes, &uuid, &mut self.failed, step, why);
            }
        }
        None
    }

    /// What failed, on what, and, if something is in use, by whom; and those of them without whom it would succeed.
    async fn explain(&self, step: &Step, failure: &Failure) -> (String, Vec<Process>) {
        let uuid = &self.identity.uuid;
        let mut message = format!("to {step} on {uuid}: {failure}");
        let instance = match step {
            Step::DestroyComputeInstance { instance, .. } | Step::DestroyGpuInstance { instance } => {
                Some(instance.gpu_instance_id)
            }
            Step::CreateComputeInstance { .. } | Step::Nothing | Step::Blocked(_) => {
                return (message, Vec::new());
            }
            _ => None,
        };
        if failure.code == Code::IN_USE
            && let Some(minor) = self.last.as_ref().map(|gpu| gpu.minor)
        {
            let proc_root = self.context.proc_root.clone();
            let holders = blocking(move || holders::holders(&proc_root, minor, instance)).await;
            let names: Vec<String> = holders.iter().take(8).map(ToString::to_string).collect();
            match names.is_empty() {
                true => message.push_str("; no process with it open was found"),
                false => message.push_str(&format!("; held by {}", names.join(", "))),
            }
            // Who has the GPU open while an instance is made may be anybody on it.
            if step.disturbs(uuid).is_some() {
                return (message, holders);
            }
        }
        (message, Vec::new())
    }

    fn note(&self, warning: bool, reason: &str, action: &'static str, message: String) {
        self.context.notes.send(Note { warning, reason: reason.into(), action, message });
    }

    fn report(&self, spec: &SeenSpec, problem: Option<Reason>) {
        self.context.state.reports.send_if_modified(|reports| {
            let report = reports.entry(self.identity.uuid.clone()).or_default();
            let clients = if problem.is_some() { self.clients.clone() } else { Vec::new() };
            let new =
                GpuReport { uid: spec.uid.clone(), generation: Some(spec.generation), problem, clients };
            let changed = *report != new;
            *report = new;
            changed
        });
    }

    fn publish(&mut self, gpu: Gpu) {
        self.last = Some(gpu.clone());
        self.context.state.publish_gpu(gpu);
        self.condemned = None;
    }

    /// Waits for a change of what concerns this GPU, or for the end of the last client that made a step fail (so that the
    /// next try comes before the next client), or until then. A new generation that leaves this GPU as it is only moves
    /// the report on.
    async fn wait(&mut self, concern: &Concern, until: Instant) {
        let mut specs = self.context.state.spec.subscribe();
        let mut prepared = self.context.state.prepared.subscribe();
        let mut rounds = self.context.rounds.clone();
        let mut verdicts = self.context.verdicts.clone();
        let mut pods = self.context.mps.pods.seen.clone();
        let in_the_way = self.failed.iter().find(|failed| !failed.clients.is_empty());
        let clients = in_the_way.map(|failed| failed.clients.clone()).unwrap_or_default();
        let mut free = std::pin::pin!(async {
            if clients.is_empty() {
                std::future::pending::<()>().await;
            }
            tokio::join!(sleep(BETWEEN_CLIENTS), holders::ended(&clients));
        });
        loop {
            // Marked as seen before they are compared, so that no change falls between.
            specs.mark_unchanged();
            prepared.mark_unchanged();
            rounds.mark_unchanged();
            verdicts.mark_unchanged();
            pods.mark_unchanged();
            let (now, spec) = self.concern();
            // What was seen before it was known what is ours has not been published.
            let unpublished = self.last.is_none() && self.unseen.is_none() && self.context.ours.is_known();
            if now != *concern || unpublished {
                return;
            }
            if let Some(spec) = spec
                && concern.verdict.is_some()
                && self.context.ours.is_known()
            {
                let report = self.context.state.reports.borrow().get(&self.identity.uuid).cloned();
                match report {
                    Some(report) => self.report(&spec, report.problem),
                    // The first spec, and nothing decided under it yet.
                    None if self.unseen.is_none() => return,
                    None => {}
                }
            }
            tokio::select! {
                _ = specs.changed() => {}
                _ = prepared.changed() => {}
                changed = rounds.changed() => if changed.is_err() { std::future::pending::<()>().await },
                Ok(()) = pods.changed() => {}
                changed = verdicts.changed() => if changed.is_err() { std::future::pending::<()>().await },
                () = &mut free => {
                    for failed in self.failed.iter_mut().filter(|failed| failed.clients == clients) {
                        failed.again = Instant::now();
                    }
                    return;
                }
                () = sleep_until(until) => return,
            }
        }
    }
}

/// What can be said of a share before the pods of MPS servers are known.
fn say_pods_are_unknown(share: &mut Share) {
    let message = "the API server has not said yet which pods of MPS servers there are".to_owned();
    share.problem = Some(Reason { reason: problem_reason::MPS_NOT_READY.into(), message });
}

/// All processes on the GPU and its instances, but for MPS servers of Kerf's.
fn everybody(gpu: &Gpu) -> Vec<Process> {
    let of_instances =
        gpu.instances.iter().flat_map(|instance| instance.processes.iter().chain(&instance.mps.clients));
    gpu.processes.iter().chain(&gpu.mps.clients).chain(of_instances).cloned().collect()
}

/// Why a GPU is not Kerf's, the node's reason before the GPU's own.
fn unmanaged(gpu: &Gpu, concern: &Concern) -> Option<Reason> {
    if let Some(Some(reason)) = &concern.verdict {
        return Some(reason.clone());
    }
    let foreign: Vec<String> = gpu
        .instances
        .iter()
        .filter(|instance| instance.foreign)
        .map(|instance| {
            let (start, size) = (instance.placement.start, instance.placement.size);
            format!("{} at {start}:{size} (GPU instance {})", instance.profile, instance.gpu_instance_id)
        })
        .collect();
    (!foreign.is_empty()).then(|| Reason {
        reason: unmanaged_reason::FOREIGN_INSTANCE.into(),
        message: format!("Kerf did not make {}; destroy it to let Kerf manage this GPU", foreign.join(", ")),
    })
}

fn far_future() -> Instant {
    Instant::now() + FAR
}

pub(crate) fn no_session() -> Failure {
    Failure { call: NO_SESSION, code: Code::UNINITIALIZED }
}

/// Runs a blocking call. A panic in it goes on here.
pub(crate) async fn blocking<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(call).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Cancelled: the runtime ends, and so does whoever waits for this.
            Err(_) => std::future::pending().await,
        },
    }
}
