//! The pure half of shares: which one change of a GPU or MIG instance that carries shares, or is to, comes next.
//!
//! [`due`] looks at which shares are wanted of one [`Carrier`] and at what is there: the GPU's compute mode, the pod of the MPS
//! server, the file that a control daemon begins with, and what the control daemon says. The worker makes one change,
//! looks again, and asks again; so a crash between any two of them needs no repair of its own. Each carrier of a GPU is
//! decided by itself; instances are made and destroyed by [`crate::step`], which leaves alone those that carry something.
//!
//! Invariants, whatever is wanted (property tests in [`tests`]):
//! - what a claim is prepared for, or a client is in, is never taken down, unless it has ended, hangs, or has outlived the
//!   driver that it was made for;
//! - no server begins before its GPU is in EXCLUSIVE_PROCESS, and the mode goes back only when no server is left; inside
//!   instances there is no such mode, and it is left alone;
//! - no server begins before its instance is there, none outlives it, and it is of the instance that is there now;
//! - what a claim has all of carries no shares;
//! - with nothing in the way, repeated steps end, and then every share that can be carried is in force, or nothing of MPS
//!   is left and the compute mode is what it was;
//! - a share has no problem only if all of it has been read back.

use std::collections::{BTreeMap, BTreeSet};

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{
    ClaimOwner, ClaimReference, Isolation, Owner, Partition, Placement, Reason, Share, WantedInstance,
    WantedShare,
};

use crate::carrier::{Carrier, Part, Present};
use crate::inventory::{ComputeMode, Process};
use crate::mps::control::{ALL, Seen, Server};
use crate::mps::pods::{Form, Pods, ServerPod};
use crate::mps::{Limits, Protocol, config, is_namespace, namespace};
use crate::prepared::{
    DeviceKey, PreparedClaims, PreparedDevice, holders, holders_of_exactly, holders_of_shares,
    holders_of_whole,
};
use crate::step::Desired;

/// At so many looks in a row a server gives no answer, and its pod is replaced. Each look takes as long as an answer may,
/// so that a node which only stalls for half a minute costs nobody anything.
const HANGS: u32 = 6;

/// What is there.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    pub carrier: Carrier<'a>,
    pub prepared: &'a PreparedClaims,
    /// What the driver's MPS speaks.
    pub protocol: Protocol,
    pub pod: Option<&'a ServerPod>,
    /// The file that the control daemon begins with.
    pub config: Option<&'a str>,
    pub mps: &'a Seen,
    /// What the compute mode was, where Kerf has changed it.
    pub before: Option<ComputeMode>,
    /// Looks in a row, this one among them, at which the control daemon gave no answer in time.
    pub hangs: u32,
    /// The pod was there when the driver was seen to go: whoever is in its server came after the next driver did.
    pub outlived: bool,
}

impl Observed<'_> {
    /// What a share comes to here.
    fn limits(&self, share: &WantedShare) -> Limits {
        let part = self.carrier.present().map_or(Part::WHOLE, |present| present.part);
        Limits::of(share, self.protocol, part)
    }

    /// Kerf has changed the compute mode, and it can be put back. In MIG mode there is none to put back.
    fn mode_before(&self) -> Option<ComputeMode> {
        self.before.filter(|_| self.carrier.is_gpu() && !self.carrier.is_gone())
    }
}

/// The places of a GPU that carry shares, are to, or still have something that did; the GPU itself always.
pub fn places(
    gpu: &str,
    partitions: &[Partition],
    prepared: &PreparedClaims,
    pods: &Pods,
) -> BTreeSet<Option<Placement>> {
    let wanted = partitions.iter().filter(|partition| partition.gpu == gpu && partition.share.is_some());
    let held = prepared.values().flat_map(|prepared| &prepared.devices).map(|device| &device.key);
    let held = held.filter(|key| key.gpu == gpu && key.share.is_some());
    let served = pods.keys().filter(|key| key.gpu == gpu);
    let places = wanted.map(place).chain(held.chain(served).map(|key| key.placement));
    places.chain([None]).collect()
}

fn place(partition: &Partition) -> Option<Placement> {
    partition.instance.as_ref().map(|instance| instance.placement)
}

/// One change of what carries shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// To let nobody past the MPS server.
    TakeComputeMode,
    /// To what it was.
    RestoreComputeMode(ComputeMode),
    /// What a control daemon begins with.
    WriteConfig(String),
    /// For the GPU or instance with this UUID.
    CreatePod {
        form: Form,
        device: String,
    },
    DeletePod(ServerPod),
    /// It serves nobody, hangs, or has outlived its driver, whatever is prepared: the pod of another form that comes instead is what prepared claims wait for.
    ReplacePod(ServerPod),
    CreateServer {
        device: String,
    },
    /// It has ended by itself.
    DeleteServer,
    CreateNamespace(String, Limits),
    SetNamespace(String, Limits),
    DeleteNamespace(String),
}

impl Step {
    /// What nobody may be using, or come to use, while the step is carried out. `None` if it disturbs nobody.
    pub fn disturbs(&self, carrier: &DeviceKey) -> Option<DeviceKey> {
        match self {
            // Its clients are gone.
            Step::DeletePod(pod) if pod.ended => None,
            // Those who have the whole GPU may have several processes.
            Step::TakeComputeMode
            | Step::RestoreComputeMode(_)
            | Step::CreatePod { .. }
            | Step::DeletePod(_)
            | Step::ReplacePod(_) => Some(carrier.clone()),
            // A namespace that is deleted is nobody's by the spec, and so is not prepared.
            _ => None,
        }
    }

    /// Who would be disturbed.
    pub fn users(&self) -> fn(&PreparedClaims, &DeviceKey) -> Vec<ClaimReference> {
        match self {
            Step::TakeComputeMode | Step::CreatePod { .. } => holders_of_whole,
            // Whoever has all of the carrier is better off without it: it has come late.
            Step::DeletePod(_) => holders_of_shares,
            Step::ReplacePod(_) => |_, _| Vec::new(),
            _ => holders,
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Step::TakeComputeMode => write!(f, "set compute mode {}", ComputeMode::EXCLUSIVE_PROCESS),
            Step::RestoreComputeMode(mode) => write!(f, "set compute mode {mode} again"),
            Step::WriteConfig(_) => f.write_str("write the configuration of the MPS server"),
            Step::CreatePod { form, .. } => write!(f, "make the pod of the MPS server ({form})"),
            Step::DeletePod(pod) => write!(f, "delete pod {} of the MPS server", pod.name),
            Step::ReplacePod(pod) => write!(f, "delete pod {} of the MPS server, for another one", pod.name),
            Step::CreateServer { .. } => f.write_str("start the MPS server"),
            Step::DeleteServer => f.write_str("remove the MPS server that has ended"),
            Step::CreateNamespace(name, limits) => write!(f, "make MPS namespace {name} with {limits}"),
            Step::SetNamespace(name, limits) => write!(f, "limit MPS namespace {name} to {limits}"),
            Step::DeleteNamespace(name) => write!(f, "delete MPS namespace {name}"),
        }
    }
}

/// What there is to do on one carrier, and what has become of its shares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// Steps that could be taken now, each whatever becomes of the others.
    pub steps: Vec<Step>,
    /// Why nothing can be done, if something should be.
    pub blocked: Option<Reason>,
    /// Everything wanted and everything prepared, in order of the ids.
    pub shares: Vec<Share>,
    /// It carries shares, is to, or still has something of what carried them.
    pub carries: bool,
    /// Something is under way that only another look can show the end of.
    pub waits: bool,
}

/// The first of the steps that are due.
pub fn next_step(desired: Desired<'_>, observed: Observed<'_>) -> Option<Step> {
    due(desired, observed).steps.into_iter().next()
}

/// See the module's text.
pub fn due(desired: Desired<'_>, observed: Observed<'_>) -> Due {
    let mut shares = requested(&desired, &observed);
    let carried: Vec<(WantedShare, Limits)> = shares
        .values()
        .filter(|share| share.prepared || share.problem.is_none())
        .map(|share| (share.wanted.clone(), observed.limits(&share.wanted)))
        .collect();
    let left = observed.pod.is_some() || observed.mode_before().is_some();
    let mut due = Due { carries: !carried.is_empty() || left, ..Due::default() };
    let way = match observed.carrier.untouchable() {
        Some(reason) if any_prepared(&observed) => Way { missing: Some(reason.clone()), ..Way::default() },
        // What Kerf has put there and nobody uses does not stay with somebody else, or on hardware that has failed.
        Some(reason) => Way { missing: Some(reason.clone()), ..tear_down(&observed) },
        None if carried.is_empty() => tear_down(&observed),
        None => match observed.carrier.present() {
            Some(present) => build_up(&observed, present, &carried),
            None => await_carrier(&observed),
        },
    };
    due.steps = way.steps;
    due.blocked = way.blocked.or_else(|| unwanted(&desired, &observed, &carried));
    due.waits = due.carries && way.waits;
    for share in shares.values_mut().filter(|share| share.problem.is_none()) {
        let limits = observed.limits(&share.wanted);
        share.problem = way.missing.clone().or_else(|| not_in_force(&observed, &share.wanted.id, &limits));
    }
    let not_yet = |share: &Requested| {
        share.problem.as_ref().is_some_and(|why| why.reason == problem_reason::LIMITS_NOT_IN_FORCE)
    };
    due.waits |= shares.values().any(not_yet);
    due.shares = shares.into_values().map(|share| share.report(&observed)).collect();
    due
}

/// A share that is wanted, or that a claim is prepared for.
#[derive(Clone, Debug)]
struct Requested {
    wanted: WantedShare,
    /// What a claim is prepared for stays in its server whatever is wrong with it.
    prepared: bool,
    problem: Option<Reason>,
}

impl Requested {
    fn report(self, observed: &Observed<'_>) -> Share {
        let Self { wanted, problem, .. } = self;
        let (limits, isolation) = (observed.limits(&wanted), observed.carrier.isolation());
        let clients = observed.mps.clients.get(&namespace_of(observed.protocol, &wanted.id));
        Share {
            placement: observed.carrier.placement,
            // The driver takes every byte, MPS does not.
            memory_bytes: match isolation {
                Isolation::Process => limits.memory,
                _ => wanted.memory_bytes,
            },
            compute_percent: limits.percent,
            isolation,
            claims: Vec::new(),
            processes: match observed.protocol {
                Protocol::V3 => clients.map_or(0, Vec::len) as u32,
                Protocol::V2 => clients_of(observed, &wanted.id),
            },
            problem,
            id: wanted.id,
        }
    }
}

/// One server's clients are told apart by the pods that its shares are prepared for.
fn clients_of(observed: &Observed<'_>, share: &str) -> u32 {
    let has = |id: &Option<String>| id.as_deref() == Some(share);
    let pod = observed.prepared.values().find_map(|prepared| {
        let pod = prepared.pod.as_ref()?;
        prepared.devices.iter().any(|device| has(&device.key.share)).then_some(&pod.uid)
    });
    let Some(pod) = pod else { return 0 };
    observed.carrier.clients().iter().filter(|process| process.pod_uid.as_ref() == Some(pod)).count() as u32
}

fn namespace_of(protocol: Protocol, share: &str) -> String {
    match protocol {
        Protocol::V2 => ALL.to_owned(),
        Protocol::V3 => namespace(share),
    }
}

/// The partitions that a carrier is, all of it or a share.
fn partitions_of<'a>(
    desired: &Desired<'a>,
    observed: &Observed<'_>,
) -> impl Iterator<Item = &'a Partition> + use<'a> {
    let key = observed.carrier.key();
    let of_carrier =
        move |partition: &&Partition| partition.gpu == key.gpu && place(partition) == key.placement;
    desired.partitions.iter().filter(of_carrier)
}

/// All shares of the carrier with what is wrong with them, by id. What is prepared comes before what is not.
fn requested(desired: &Desired<'_>, observed: &Observed<'_>) -> BTreeMap<String, Requested> {
    let mut all: BTreeMap<String, Requested> = BTreeMap::new();
    let whole = partitions_of(desired, observed).filter(|partition| partition.share.is_none());
    let mut judge = Judge {
        observed,
        listed: desired.gpu.is_some(),
        whole: whole.into_iter().find_map(|partition| match &partition.owner {
            Owner::Claim(owner) => Some(owner),
            _ => None,
        }),
        first: None,
        free: observed.carrier.present().map_or(0, |present| present.memory_bytes),
    };
    for wanted in prepared_shares(observed) {
        judge.take(wanted);
        let problem = too_little_isolation(observed, wanted);
        all.insert(wanted.id.clone(), Requested { wanted: wanted.clone(), prepared: true, problem });
    }
    let mut others: Vec<(&Partition, &WantedShare)> = partitions_of(desired, observed)
        .filter_map(|partition| Some((partition, partition.share.as_ref()?)))
        .collect();
    others.sort_by_key(|(_, share)| &share.id);
    for (partition, wanted) in others {
        if all.contains_key(&wanted.id) {
            continue;
        }
        let problem = judge.problem(partition.instance.as_ref(), wanted);
        all.insert(wanted.id.clone(), Requested { wanted: wanted.clone(), prepared: false, problem });
    }
    all
}

/// What the next share has to fit beside.
struct Judge<'a> {
    observed: &'a Observed<'a>,
    /// A policy manages the GPU.
    listed: bool,
    /// The claim that is to have all of the carrier.
    whole: Option<&'a ClaimOwner>,
    /// Limits of the first one.
    first: Option<Limits>,
    /// Bytes that nobody has yet.
    free: u64,
}

impl Judge<'_> {
    fn take(&mut self, share: &WantedShare) {
        self.first.get_or_insert(self.observed.limits(share));
        self.free = self.free.saturating_sub(share.memory_bytes);
    }

    fn problem(&mut self, instance: Option<&WantedInstance>, share: &WantedShare) -> Option<Reason> {
        let carrier = self.observed.carrier;
        let WantedShare { id, memory_bytes, compute_milli, .. } = share;
        let unit = self.observed.protocol.unit();
        if !self.listed {
            let what = format!("share {id} is wanted, but no policy manages this GPU");
            return Some(reason(problem_reason::GPU_NOT_LISTED, what));
        }
        let uuid = id.len() == 36
            && id.split('-').map(str::len).eq([8, 4, 4, 4, 12])
            && is_namespace(&namespace(id));
        if !uuid {
            let what = format!("'{id}' is no share's id: a lower-case UUID is");
            return Some(reason(problem_reason::BAD_SHARE, what));
        }
        if let Some(owner) = self.whole {
            let what = format!(
                "share {id} is wanted, but all of {carrier} is claim {}/{}'s",
                owner.namespace, owner.name
            );
            return Some(reason(problem_reason::OVERLAP, what));
        }
        let present = match there(carrier, instance) {
            Ok(present) => present,
            Err(missing) => return Some(missing),
        };
        if *memory_bytes < unit || *memory_bytes > present.memory_bytes {
            let what = format!(
                "share {id} is to have {memory_bytes} bytes of memory; on {carrier} it may be {unit} to {}",
                present.memory_bytes
            );
            return Some(reason(problem_reason::BAD_SHARE, what));
        }
        let most = present.part.most_milli();
        if !(1..=most).contains(&u64::from(*compute_milli)) {
            let what = format!(
                "share {id} is to have {compute_milli} thousandths of a percent of the GPU's multiprocessors; on {carrier} it may \
                 be 1 to {most}"
            );
            return Some(reason(problem_reason::BAD_SHARE, what));
        }
        let Some(sharing) = &carrier.gpu.sharing else {
            let what = format!(
                "{carrier} carries no shares: that takes compute capability 7.0 or newer, a compute mode that can be read, and \
                 MPS' programs in the driver's root"
            );
            return Some(reason(problem_reason::SHARING_UNAVAILABLE, what));
        };
        if let Some(problem) = too_little_isolation(self.observed, share) {
            return Some(problem);
        }
        let limits = self.observed.limits(share);
        if let Some(first) = self.first.filter(|first| sharing.equal_sizes && *first != limits) {
            let what = format!(
                "share {id} of {limits} cannot be beside those of {first}: before driver 615 an MPS server has one limit for all"
            );
            return Some(reason(problem_reason::SIZES_DIFFER, what));
        }
        if *memory_bytes > self.free {
            let what =
                format!("share {id} wants {memory_bytes} bytes of memory where {} are left", self.free);
            return Some(reason(problem_reason::OVERLAP, what));
        }
        self.take(share);
        None
    }
}

/// What the carrier has, or why it cannot carry anything now.
fn there<'a>(carrier: Carrier<'a>, wanted: Option<&WantedInstance>) -> Result<Present<'a>, Reason> {
    let mig = carrier.gpu.mig.enabled;
    let (word, why) = match wanted {
        None if mig => {
            (problem_reason::MIG_ON, "MIG mode is on, and must be off for shares of the GPU itself")
        }
        Some(_) if !mig => (problem_reason::MIG_OFF, "MIG mode is off"),
        _ => (problem_reason::MPS_NOT_READY, "it does not exist yet"),
    };
    let is_wanted = |wanted: &WantedInstance| {
        let instance = carrier.instance();
        instance.is_some_and(|instance| kerf_crds::profile::same(&instance.profile, &wanted.profile))
    };
    let present = carrier.present().filter(|_| wanted.is_none_or(is_wanted));
    present.ok_or_else(|| {
        let what = match wanted {
            Some(WantedInstance { profile, placement: Placement { start, size } }) => {
                format!("{profile} at {start}:{size} of {}", carrier.gpu.name)
            }
            None => carrier.to_string(),
        };
        reason(word, format!("{what} is to carry shares: {why}"))
    })
}

/// Nobody limits the share's memory as it was planned.
fn too_little_isolation(observed: &Observed<'_>, share: &WantedShare) -> Option<Reason> {
    let carrier = observed.carrier;
    carrier.gpu.sharing.as_ref()?;
    let there = carrier.isolation();
    (share.isolation > there).then(|| {
        let what = format!(
            "share {} wants its memory limited by {}, but on {carrier} only {} does it",
            share.id,
            share.isolation.word(),
            there.word()
        );
        reason(problem_reason::ISOLATION_UNAVAILABLE, what)
    })
}

fn reason(word: &str, message: String) -> Reason {
    Reason { reason: word.into(), message }
}

/// What leads to where things should be.
#[derive(Debug, Default)]
struct Way {
    steps: Vec<Step>,
    /// Why no share can be in force yet.
    missing: Option<Reason>,
    blocked: Option<Reason>,
    waits: bool,
}

impl Way {
    fn step(step: Step) -> Self {
        let missing = reason(problem_reason::MPS_NOT_READY, format!("still to be done: {step}"));
        Self { steps: vec![step], missing: Some(missing), ..Self::default() }
    }

    fn blocked(why: Reason) -> Self {
        Self { missing: Some(why.clone()), blocked: Some(why), waits: true, ..Self::default() }
    }

    fn wait(what: String) -> Self {
        Self { missing: Some(reason(problem_reason::MPS_NOT_READY, what)), waits: true, ..Self::default() }
    }
}

/// No share is wanted any more: the pod goes, then the compute mode is what it was.
fn tear_down(observed: &Observed<'_>) -> Way {
    let Some(pod) = observed.pod else {
        return match observed.mode_before() {
            Some(before) if is_exclusive(observed) => {
                match in_use(observed, "the compute mode cannot be what it was") {
                    Some(why) => Way::blocked(why),
                    None => Way::step(Step::RestoreComputeMode(before)),
                }
            }
            _ => Way::default(),
        };
    };
    if pod.going {
        return Way::wait(format!("pod {} of the MPS server is being deleted", pod.name));
    }
    let claims = holders_of_shares(observed.prepared, &observed.carrier.key());
    match used_by(observed, &claims, "the MPS server cannot be taken down") {
        Some(why) => Way::blocked(why),
        None => Way::step(Step::DeletePod(pod.clone())),
    }
}

/// Why what is carried cannot go though nobody wants it any more.
fn unwanted(
    desired: &Desired<'_>,
    observed: &Observed<'_>,
    carried: &[(WantedShare, Limits)],
) -> Option<Reason> {
    if carried.is_empty() || partitions_of(desired, observed).any(|partition| partition.share.is_some()) {
        return None;
    }
    in_use(observed, "what carries shares that are not wanted any more stays")
}

/// What a server has to be made for to carry shares with these limits.
fn form(protocol: Protocol, limits: Limits) -> Form {
    match protocol {
        Protocol::V3 => Form::V3,
        Protocol::V2 => Form::V2(limits),
    }
}

/// The claims whose shares this pod's server can carry. Those of another form wait for another pod, as all do after the
/// driver has come back with another protocol, or the instance under another UUID.
fn served_by(observed: &Observed<'_>, present: Present<'_>, pod: &ServerPod) -> Vec<ClaimReference> {
    let serves = |share: &WantedShare| {
        pod.device == present.uuid && form(observed.protocol, observed.limits(share)).to_string() == pod.form
    };
    let carrier = observed.carrier.key();
    let claims = observed.prepared.values().filter(|prepared| {
        let mut here = prepared.devices.iter().filter(|device| device.key.carrier() == carrier);
        here.any(|device| device.share.as_ref().is_none_or(serves))
    });
    claims.map(|prepared| prepared.claim.clone()).collect()
}

/// The claims and clients that a server's end would end.
fn in_use(observed: &Observed<'_>, what: &str) -> Option<Reason> {
    used_by(observed, &holders_of_exactly(observed.prepared, &observed.carrier.key()), what)
}

/// These claims, and the clients that there are.
fn used_by(observed: &Observed<'_>, claims: &[ClaimReference], what: &str) -> Option<Reason> {
    let claims = claims.iter().map(|claim| format!("claim {}/{}", claim.namespace, claim.name));
    let on_it = observed.carrier.clients();
    let clients = on_it.iter().map(ToString::to_string);
    let known: Vec<u32> = on_it.iter().map(|process| process.pid).collect();
    let more = observed.mps.clients.values().flatten().filter(|pid| !known.contains(pid));
    let users: Vec<String> = claims.chain(clients).chain(more.map(|pid| format!("pid {pid}"))).collect();
    (!users.is_empty())
        .then(|| reason(problem_reason::IN_USE, format!("{what}: in use by {}", users.join(", "))))
}

fn is_exclusive(observed: &Observed<'_>) -> bool {
    observed.carrier.gpu.compute_mode == Some(ComputeMode::EXCLUSIVE_PROCESS)
}

/// Shares are prepared for claims, and what carries them is not there: a reboot ends instances. They are made again by
/// themselves; a server that began without its instance does not find it later.
fn await_carrier(observed: &Observed<'_>) -> Way {
    let carrier = observed.carrier;
    let serves_nobody =
        |pod: &&ServerPod| !pod.going && carrier.is_gone() && used_by(observed, &[], "it goes").is_none();
    match observed.pod.filter(serves_nobody) {
        Some(pod) => Way::step(Step::ReplacePod(pod.clone())),
        None => Way::wait(format!("{carrier} does not exist at the moment")),
    }
}

/// Shares are wanted: compute mode, file, pod, server, namespaces, in this order.
fn build_up(observed: &Observed<'_>, present: Present<'_>, carried: &[(WantedShare, Limits)]) -> Way {
    let carrier = observed.carrier;
    // In MIG mode there is no exclusive one.
    let takes_mode = carrier.is_gpu() && !is_exclusive(observed);
    if observed.pod.is_none() || takes_mode {
        let claims = holders_of_whole(observed.prepared, &carrier.key());
        let claims = claims.iter().map(|claim| format!("claim {}/{}", claim.namespace, claim.name));
        // One of a pod with a share is there past MPS: it is ended, and must not keep its own server away till then.
        let strangers = carrier.processes().iter().filter(|process| !has_share(observed, process));
        let users: Vec<String> = claims.chain(strangers.map(ToString::to_string)).collect();
        if !users.is_empty() {
            let what = format!("{carrier} cannot carry shares: in use by {}", users.join(", "));
            return Way::blocked(reason(problem_reason::IN_USE, what));
        }
    }
    if takes_mode {
        return Way::step(Step::TakeComputeMode);
    }
    let device = present.uuid.to_owned();
    let form = form(observed.protocol, carried[0].1);
    let namespaces: Vec<(String, Limits)> =
        carried.iter().map(|(share, limits)| (namespace(&share.id), *limits)).collect();
    if observed.protocol == Protocol::V3 {
        let wanted = config(&device, &namespaces);
        if observed.config != Some(wanted.as_str()) {
            return Way::step(Step::WriteConfig(wanted));
        }
    }
    let Some(pod) = observed.pod else { return Way::step(Step::CreatePod { form, device }) };
    if pod.going {
        return Way::wait(format!("pod {} of the MPS server is being deleted", pod.name));
    }
    if pod.ended {
        return Way::step(Step::DeletePod(pod.clone()));
    }
    if pod.form != form.to_string() || pod.device != device {
        let what =
            format!("the MPS server is for {} of {}, not for {form} of {device}", pod.form, pod.device);
        // Containers that start again at once may find the old server before the new driver has been seen. They could stay
        // for good, with limits that nobody can change; they have only begun.
        let of_another_driver = observed.outlived && !pod.speaks(observed.protocol);
        return match used_by(observed, &served_by(observed, present, pod), &what) {
            Some(why) if !of_another_driver => Way::blocked(why),
            _ => Way::step(Step::ReplacePod(pod.clone())),
        };
    }
    match &observed.mps.server {
        Server::Silent(why) => {
            let trouble = pod.trouble.as_ref().map(|trouble| format!(" ({trouble})")).unwrap_or_default();
            Way::wait(format!("{why}; its pod is {}{trouble}", pod.name))
        }
        Server::Hangs(why) => {
            let why = reason(problem_reason::MPS_HANGS, format!("{why}; its pod is {}", pod.name));
            // Its clients end with it, and only they. Left alone they have limits that nobody can see or change.
            let steps = match observed.hangs {
                ..HANGS => Vec::new(),
                _ => vec![Step::ReplacePod(pod.clone())],
            };
            Way { steps, missing: Some(why.clone()), blocked: Some(why), waits: true }
        }
        // A server that is made by command has its namespaces a moment before their limits, and a client that comes in that
        // moment has none for good. One that begins with the file has all at once.
        Server::Absent | Server::Exited if observed.protocol == Protocol::V3 && any_prepared(observed) => {
            Way::step(Step::ReplacePod(pod.clone()))
        }
        Server::Absent => Way::step(Step::CreateServer { device }),
        Server::Exited => Way::step(Step::DeleteServer),
        Server::Starting => Way::wait("the MPS server is starting".to_owned()),
        Server::Fault => Way::wait(
            "a client has made the GPU fault; the MPS server goes on when all its clients have ended"
                .to_owned(),
        ),
        Server::Ready if observed.protocol == Protocol::V2 => Way::default(),
        Server::Ready => match prepared_without_namespace(observed) {
            None => Way { steps: namespace_steps(observed, &namespaces), ..Way::default() },
            Some(name) => {
                let what =
                    format!("MPS has lost namespace {name}, which only another server can have at once");
                match used_by(observed, &[], &what) {
                    Some(why) => Way { blocked: Some(why), waits: true, ..Way::default() },
                    None => Way::step(Step::ReplacePod(pod.clone())),
                }
            }
        },
    }
}

fn prepared_shares<'a>(observed: &Observed<'a>) -> impl Iterator<Item = &'a WantedShare> {
    let carrier = observed.carrier.key();
    let devices = observed.prepared.values().flat_map(|prepared| &prepared.devices);
    devices.filter(move |device| device.key.carrier() == carrier).filter_map(|device| device.share.as_ref())
}

/// Whether the process is of a pod with a prepared share of the carrier.
fn has_share(observed: &Observed<'_>, process: &Process) -> bool {
    let carrier = observed.carrier.key();
    let here = |device: &PreparedDevice| device.share.is_some() && device.key.carrier() == carrier;
    observed.prepared.values().any(|prepared| {
        let pod = prepared.pod.as_ref().map(|pod| &pod.uid);
        pod.is_some() && pod == process.pod_uid.as_ref() && prepared.devices.iter().any(here)
    })
}

fn any_prepared(observed: &Observed<'_>) -> bool {
    prepared_shares(observed).next().is_some()
}

/// A namespace that a running server lacks though the containers of its share's pod may start again at any time.
fn prepared_without_namespace(observed: &Observed<'_>) -> Option<String> {
    prepared_shares(observed)
        .map(|share| namespace(&share.id))
        .find(|name| !observed.mps.limits.contains_key(name))
}

fn namespace_steps(observed: &Observed<'_>, wanted: &[(String, Limits)]) -> Vec<Step> {
    let mut steps = Vec::new();
    for (name, limits) in wanted {
        match observed.mps.limits.get(name) {
            None => steps.push(Step::CreateNamespace(name.clone(), *limits)),
            Some(said) if !limits.agree(said) => steps.push(Step::SetNamespace(name.clone(), *limits)),
            Some(_) => {}
        }
    }
    let is_wanted = |name: &String| wanted.iter().any(|(other, _)| other == name);
    let is_used = |name: &String| observed.mps.clients.get(name).is_some_and(|clients| !clients.is_empty());
    let left =
        observed.mps.limits.keys().filter(|name| is_namespace(name) && !is_wanted(name) && !is_used(name));
    steps.extend(left.cloned().map(Step::DeleteNamespace));
    steps
}

/// Why MPS' own word is not that the share's limits are in force.
fn not_in_force(observed: &Observed<'_>, share: &str, limits: &Limits) -> Option<Reason> {
    let name = namespace_of(observed.protocol, share);
    match observed.mps.limits.get(&name) {
        Some(said) if limits.agree(said) && observed.mps.sockets.contains(&name) => None,
        Some(said) if limits.agree(said) => Some(reason(
            problem_reason::LIMITS_NOT_IN_FORCE,
            format!("MPS does not listen for clients of share {share} yet"),
        )),
        Some(said) => Some(reason(
            problem_reason::LIMITS_NOT_IN_FORCE,
            format!("MPS says {} and {} % where {limits} are wanted", said.memory, said.percent),
        )),
        None => Some(reason(
            problem_reason::LIMITS_NOT_IN_FORCE,
            format!("MPS has no namespace for share {share} yet"),
        )),
    }
}

#[cfg(test)]
mod tests;
