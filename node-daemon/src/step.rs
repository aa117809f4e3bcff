//! The pure half: which one change of a GPU comes next.
//!
//! [`next_step`] looks at what is wanted of one GPU and at what is there, and names one change, or none. The worker
//! makes that change, looks again, and asks again; so a crash between any two of them needs no repair of its own.
//!
//! Invariants, whatever is wanted (property tests in [`tests`]):
//! - nothing in use, nothing that carries shares, nothing foreign and nothing wanted is destroyed (a warm instance that stands in a claim's way is
//!   not wanted, nor is a failed one);
//! - nothing is created over something that exists;
//! - with nothing in use, repeated steps end, and then every wanted partition that can exist does;
//! - idle instances that are in nobody's way stay, for reuse; those of no use go, and failed ones, as their end ends the
//!   failure and frees the slices. Where the driver asks for a reset of the GPU, only that does.

use kerf_crds::conditions::{problem_reason, unmanaged_reason};
use kerf_crds::gpu_node::{
    ClaimReference, DesiredGpu, DesiredMig, Engines, Geometry, Owner, Partition, Placement, PolicyInstance,
    Profile, Reason,
};

use crate::hardware::{Code, Failure};
use crate::inventory::{Gpu, Instance};
use crate::prepared::{DeviceKey, PreparedClaims, holders, holders_of_exactly};

/// What is wanted of one GPU.
#[derive(Clone, Copy, Debug)]
pub struct Desired<'a> {
    /// The GPU's entry in the spec; `None`: no policy manages it.
    pub gpu: Option<&'a DesiredGpu>,
    /// All of the node's partitions; those of other GPUs are passed over.
    pub partitions: &'a [Partition],
}

/// What there is to do on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// All steps that could be taken now, in order: what [`next_step`] names, and what it names when that is passed over.
    pub steps: Vec<Step>,
    /// So many of them, the first ones, are for something that is wanted; the others only tidy up.
    pub needed: usize,
    /// Why something is blocked, if something is and nothing more can be done for what is wanted.
    pub blocked: Option<Reason>,
}

/// See [`Due`].
pub fn due_steps(desired: Desired<'_>, observed: Observed<'_>) -> Due {
    let mut due = Due::default();
    loop {
        let (step, tidies) = decide(desired, Observed { passed_over: &due.steps, ..observed });
        match step {
            Step::Nothing => return due,
            Step::Blocked(reason) => return Due { blocked: Some(reason), ..due },
            step => due.steps.push(step),
        }
        if !tidies {
            due.needed = due.steps.len();
        }
    }
}

/// What is there.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    pub gpu: &'a Gpu,
    pub prepared: &'a PreparedClaims,
    /// Steps that are not to be named: another one that is due comes instead. (They failed and wait for their turn.)
    pub passed_over: &'a [Step],
    /// The driver has just refused a creation for want of resources that the geometry does not show: idle instances
    /// anywhere on the GPU count as being in the way.
    pub short_of_resources: bool,
}

/// One change of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    EnableMig,
    DisableMig,
    /// Of an instance that is to be destroyed.
    DestroyComputeInstance {
        instance: Target,
        compute_instance: u32,
    },
    /// Has no compute instance any more.
    DestroyGpuInstance {
        instance: Target,
    },
    CreateGpuInstance {
        profile: String,
        profile_id: u32,
        placement: Placement,
    },
    /// As wide as its GPU instance.
    CreateComputeInstance {
        instance: Target,
    },
    /// Everything that is wanted is there.
    Nothing,
    /// Something that is wanted is not there, and nothing can be done about it now.
    Blocked(Reason),
}

/// The GPU instance that a step is about, as it was observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub profile: String,
    pub profile_id: u32,
    pub placement: Placement,
    pub gpu_instance_id: u32,
}

/// The kinds of steps that change something: the fault points of a crash test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepKind {
    EnableMig,
    DisableMig,
    DestroyComputeInstance,
    DestroyGpuInstance,
    CreateGpuInstance,
    CreateComputeInstance,
}

impl StepKind {
    /// The NVML function whose effect the step is, without version suffix. A step has no other effect on hardware.
    pub fn nvml_call(self) -> &'static str {
        match self {
            StepKind::EnableMig | StepKind::DisableMig => "nvmlDeviceSetMigMode",
            StepKind::DestroyComputeInstance => "nvmlComputeInstanceDestroy",
            StepKind::DestroyGpuInstance => "nvmlGpuInstanceDestroy",
            StepKind::CreateGpuInstance => "nvmlDeviceCreateGpuInstanceWithPlacement",
            StepKind::CreateComputeInstance => "nvmlGpuInstanceCreateComputeInstance",
        }
    }
}

impl Step {
    /// Every kind of step that changes something.
    pub const ALL_KINDS: [StepKind; 6] = [
        StepKind::EnableMig,
        StepKind::DisableMig,
        StepKind::DestroyComputeInstance,
        StepKind::DestroyGpuInstance,
        StepKind::CreateGpuInstance,
        StepKind::CreateComputeInstance,
    ];

    /// `None` for a step that changes nothing.
    pub fn kind(&self) -> Option<StepKind> {
        match self {
            Step::EnableMig => Some(StepKind::EnableMig),
            Step::DisableMig => Some(StepKind::DisableMig),
            Step::DestroyComputeInstance { .. } => Some(StepKind::DestroyComputeInstance),
            Step::DestroyGpuInstance { .. } => Some(StepKind::DestroyGpuInstance),
            Step::CreateGpuInstance { .. } => Some(StepKind::CreateGpuInstance),
            Step::CreateComputeInstance { .. } => Some(StepKind::CreateComputeInstance),
            Step::Nothing | Step::Blocked(_) => None,
        }
    }

    /// The hardware that nobody may be using while the step is carried out; `None` if it disturbs nothing.
    pub fn disturbs(&self, gpu: &str) -> Option<DeviceKey> {
        let placement = match self {
            Step::EnableMig | Step::DisableMig => None,
            Step::DestroyComputeInstance { instance, .. } | Step::DestroyGpuInstance { instance } => {
                Some(instance.placement)
            }
            _ => return None,
        };
        Some(DeviceKey { placement, ..DeviceKey::gpu(gpu) })
    }

    /// Who uses the hardware that the step disturbs.
    pub fn users(&self) -> fn(&PreparedClaims, &DeviceKey) -> Vec<ClaimReference> {
        if *self == Step::EnableMig { holders_of_exactly } else { holders }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Step::EnableMig => f.write_str("switch MIG on"),
            Step::DisableMig => f.write_str("switch MIG off"),
            Step::DestroyComputeInstance { instance, compute_instance } => {
                write!(f, "destroy compute instance {compute_instance} of {instance}")
            }
            Step::DestroyGpuInstance { instance } => write!(f, "destroy {instance}"),
            Step::CreateGpuInstance { profile, placement, .. } => {
                write!(f, "create {profile} at {}:{}", placement.start, placement.size)
            }
            Step::CreateComputeInstance { instance } => {
                write!(f, "create the compute instance of {instance}")
            }
            Step::Nothing => f.write_str("nothing"),
            Step::Blocked(reason) => write!(f, "blocked: {}", reason.message),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Target { profile, placement, gpu_instance_id, .. } = self;
        write!(f, "{profile} at {}:{} (GPU instance {gpu_instance_id})", placement.start, placement.size)
    }
}

fn blocked(reason: &str, message: String) -> Step {
    Step::Blocked(Reason { reason: reason.into(), message })
}

/// See the module's text.
pub fn next_step(desired: Desired<'_>, observed: Observed<'_>) -> Step {
    decide(desired, observed).0
}

/// The next step, and whether it only tidies up: nothing that is wanted needs it.
fn decide(desired: Desired<'_>, observed: Observed<'_>) -> (Step, bool) {
    let gpu = observed.gpu;
    let needed = |step| (step, false);
    // Not ours to touch, or past touching: each is reported where it was found.
    if gpu.unmanaged.is_some() || gpu.unhealthy.is_some() {
        return needed(Step::Nothing);
    }
    let wanted = Wanted::on(gpu, desired.partitions);
    let Some(entry) = desired.gpu else {
        let missing = wanted.iter().find(|wanted| gpu.instance_at(wanted.placement).is_none());
        return needed(match missing {
            Some(wanted) => blocked(
                problem_reason::GPU_NOT_LISTED,
                format!("{wanted} is wanted, but no policy manages this GPU"),
            ),
            None => Step::Nothing,
        });
    };
    if let Some(step) = mode_step(entry, &wanted, &observed) {
        return needed(if observed.passed_over.contains(&step) { Step::Nothing } else { step });
    }
    if !gpu.mig.enabled {
        return needed(match wanted.first() {
            Some(wanted) => blocked(
                problem_reason::MIG_OFF,
                format!("{wanted} is wanted, but MIG mode is off and policy {} keeps it so", entry.policy),
            ),
            None => Step::Nothing,
        });
    }
    let Some(geometry) = gpu.geometry.as_deref() else { return needed(Step::Nothing) };
    let plan = Planner { observed, wanted: &wanted, geometry };
    plan.next()
}

/// A wanted MIG instance.
#[derive(Clone, Debug)]
struct Wanted {
    profile: String,
    placement: Placement,
    /// Somebody's; else a policy's.
    claimed: bool,
    /// Kept ready for nobody in particular.
    warm: bool,
    /// A hole: kept free, not filled.
    hole: bool,
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}:{}", self.profile, self.placement.start, self.placement.size)
    }
}

impl Wanted {
    /// The wanted instances of a GPU, each place once, claims' before static ones before warm ones.
    fn on(gpu: &Gpu, partitions: &[Partition]) -> Vec<Wanted> {
        let mut list: Vec<Wanted> = partitions
            .iter()
            .filter(|partition| partition.gpu == gpu.uuid)
            .filter_map(|partition| {
                let instance = partition.instance.as_ref()?;
                Some(Wanted {
                    profile: instance.profile.clone(),
                    placement: instance.placement,
                    claimed: matches!(&partition.owner, Owner::Claim(_)),
                    warm: matches!(&partition.owner, Owner::Policy(owner) if owner.kind == PolicyInstance::Warm),
                    hole: matches!(&partition.owner, Owner::Reservation(_)),
                })
            })
            .collect();
        list.sort_by_key(|wanted| (wanted.warm, wanted.hole, !wanted.claimed, wanted.placement));
        let mut unique: Vec<Wanted> = Vec::new();
        for wanted in list {
            let again = |other: &Wanted| {
                other.placement == wanted.placement
                    && kerf_crds::profile::same(&other.profile, &wanted.profile)
            };
            if !unique.iter().any(again) {
                unique.push(wanted);
            }
        }
        // A warm instance gives way.
        let firm: Vec<Placement> =
            unique.iter().filter(|wanted| !wanted.warm).map(|wanted| wanted.placement).collect();
        unique.retain(|wanted| {
            !wanted.warm || !firm.iter().any(|placement| placement.overlaps(&wanted.placement))
        });
        unique
    }

    fn is(&self, instance: &Instance) -> bool {
        instance.placement == self.placement && kerf_crds::profile::same(&instance.profile, &self.profile)
    }
}

/// The step that MIG mode needs, if any.
fn mode_step(entry: &DesiredGpu, wanted: &[Wanted], observed: &Observed<'_>) -> Option<Step> {
    let gpu = observed.gpu;
    let on = match entry.mig {
        DesiredMig::Keep => return None,
        DesiredMig::Enabled => true,
        DesiredMig::Disabled => false,
    };
    // A change that somebody left pending the other way is only reported: calling it back is not ours.
    if gpu.mig.enabled == on {
        return None;
    }
    if gpu.mig.switch_needs_reset && !entry.allow_reset {
        let word = if on { "on" } else { "off" };
        return Some(blocked(
            unmanaged_reason::MODE_SWITCH_NOT_ALLOWED,
            format!(
                "policy {} wants MIG {word}, switching it resets this GPU, and the policy does not allow that",
                entry.policy
            ),
        ));
    }
    if !on && let Some(wanted) = wanted.iter().find(|wanted| !wanted.hole) {
        return Some(blocked(
            problem_reason::OVERLAP,
            format!("policy {} wants MIG off, but {wanted} is wanted too", entry.policy),
        ));
    }
    let whole = DeviceKey::gpu(&gpu.uuid);
    let step = if on { Step::EnableMig } else { Step::DisableMig };
    let claims = step.users()(observed.prepared, &whole);
    if !claims.is_empty() || !gpu.processes.is_empty() {
        return Some(in_use("MIG mode cannot be switched", &claims, &gpu.processes));
    }
    if let Some(instance) = gpu.instances.iter().find(|instance| !instance.processes.is_empty()) {
        return Some(in_use("MIG mode cannot be switched", &[], &instance.processes));
    }
    // The claims on record are seen to; this is what they leave behind.
    if gpu.mps.there && on {
        return Some(carries("MIG mode cannot be switched", "the GPU"));
    }
    if let Some(instance) = gpu.instances.iter().find(|instance| carries_shares(instance)) {
        return Some(carries("MIG mode cannot be switched", &target(instance).to_string()));
    }
    if let Some(instance) = gpu.instances.iter().find(|instance| instance.foreign) {
        return Some(blocked(
            problem_reason::OVERLAP,
            format!("MIG mode cannot be switched: Kerf did not make {}", target(instance)),
        ));
    }
    match gpu.instances.first() {
        Some(instance) => Some(take_down(instance)),
        None => Some(step),
    }
}

fn in_use(what: &str, claims: &[ClaimReference], processes: &[crate::inventory::Process]) -> Step {
    let claims = claims.iter().map(|claim| format!("claim {}/{}", claim.namespace, claim.name));
    let holders: Vec<String> = claims.chain(processes.iter().map(ToString::to_string)).collect();
    blocked(problem_reason::IN_USE, format!("{what}: in use by {}", holders.join(", ")))
}

/// An MPS server is there, or somebody is in it.
fn carries_shares(instance: &Instance) -> bool {
    instance.mps.there || !instance.mps.clients.is_empty()
}

fn carries(what: &str, carrier: &str) -> Step {
    blocked(problem_reason::IN_USE, format!("{what}: the MPS server of {carrier} is still there"))
}

fn target(instance: &Instance) -> Target {
    Target {
        profile: instance.profile.clone(),
        profile_id: instance.profile_id,
        placement: instance.placement,
        gpu_instance_id: instance.gpu_instance_id,
    }
}

fn take_down(instance: &Instance) -> Step {
    match instance.compute_instances.first() {
        Some(compute_instance) => {
            Step::DestroyComputeInstance { instance: target(instance), compute_instance: compute_instance.id }
        }
        None => Step::DestroyGpuInstance { instance: target(instance) },
    }
}

/// Whether it has its compute instance, and NVML's list of MIG devices leaves it out: no pod can use it.
fn lacks_device(instance: &Instance) -> bool {
    matches!(instance.compute_instances.as_slice(), [one] if one.full_width && one.uuid.is_empty())
}

struct Planner<'a> {
    observed: Observed<'a>,
    wanted: &'a [Wanted],
    geometry: &'a Geometry,
}

impl Planner<'_> {
    /// See [`decide`].
    fn next(&self) -> (Step, bool) {
        let mut first_blocked = None;
        for wanted in self.wanted.iter().filter(|wanted| !wanted.hole) {
            match self.toward(wanted) {
                Step::Nothing => {}
                step @ Step::Blocked(_) => {
                    first_blocked.get_or_insert(step);
                }
                step if self.observed.passed_over.contains(&step) => {}
                step => return (step, false),
            }
        }
        match self.leftover() {
            Some(step) => (step, true),
            None => (first_blocked.unwrap_or(Step::Nothing), false),
        }
    }

    /// An instance that nobody wants and nobody could use: without compute instance, left by a crash between two steps;
    /// without MIG device; or failed.
    fn leftover(&self) -> Option<Step> {
        let gpu = self.observed.gpu;
        gpu.instances
            .iter()
            .filter(|instance| {
                self.removable(instance, false)
                    && (instance.compute_instances.is_empty()
                        || lacks_device(instance)
                        || self.failed(instance))
            })
            .map(take_down)
            .find(|step| !self.observed.passed_over.contains(step))
    }

    fn toward(&self, wanted: &Wanted) -> Step {
        let gpu = self.observed.gpu;
        if let Some(instance) = gpu.instances.iter().find(|instance| wanted.is(instance)) {
            // Whoever waits for it cannot use it; a claim for which it is prepared keeps it.
            if self.failed(instance) && self.unused(instance) {
                return take_down(instance);
            }
            return match instance.compute_instances.as_slice() {
                _ if instance.foreign => Step::Nothing,
                [] => Step::CreateComputeInstance { instance: target(instance) },
                _ if lacks_device(instance) => self.without_device(instance),
                _ => Step::Nothing,
            };
        }
        let Some(profile) = self.geometry.profile(&wanted.profile) else {
            return blocked(
                problem_reason::PROFILE_NOT_FOUND,
                format!("{wanted} is wanted, but this GPU has no profile of that name"),
            );
        };
        if profile.size != wanted.placement.size || !profile.starts.contains(&wanted.placement.start) {
            return blocked(
                problem_reason::PLACEMENT_IMPOSSIBLE,
                format!(
                    "{wanted} is wanted, but {} has size {} and may start at {:?}",
                    profile.name, profile.size, profile.starts
                ),
            );
        }
        if let Some(other) = self.rival(wanted) {
            return blocked(problem_reason::OVERLAP, format!("{wanted} and {other} are both wanted"));
        }
        self.make(wanted, profile)
    }

    fn without_device(&self, instance: &Instance) -> Step {
        let failure = Failure { call: "nvmlDeviceGetMigDeviceHandleByIndex", code: Code::NOT_FOUND };
        let gpu = &self.observed.gpu.uuid;
        let message = format!("{failure} for {} on {gpu}, which has its compute instance", target(instance));
        blocked(&failure.code.name(), message)
    }

    /// Another wanted instance on the same slices. Warm ones have already given way.
    fn rival(&self, wanted: &Wanted) -> Option<&Wanted> {
        self.wanted.iter().find(|other| {
            !std::ptr::eq(*other, wanted) && !other.hole && other.placement.overlaps(&wanted.placement)
        })
    }

    fn make(&self, wanted: &Wanted, profile: &Profile) -> Step {
        let gpu = self.observed.gpu;
        let firm = !wanted.warm;
        // Nothing is taken down that would make no room in the end.
        if !self.engines_suffice(profile, |instance| !self.removable(instance, firm)) {
            return blocked(
                problem_reason::ENGINES_TAKEN,
                format!(
                    "{wanted} is wanted, but the engines that it needs are with instances that must stay"
                ),
            );
        }
        let mut in_the_way =
            gpu.instances.iter().filter(|instance| instance.placement.overlaps(&wanted.placement)).peekable();
        if in_the_way.peek().is_some() {
            return self.clear(wanted, in_the_way);
        }
        if !self.engines_suffice(profile, |_| true) {
            let holds_some = |instance: &&Instance| {
                let engines = gpu.profile_of(instance).map(|held| held.engines).unwrap_or_default();
                shares(engines, profile.engines) && self.removable(instance, firm)
            };
            if let Some(idle) = gpu.instances.iter().find(holds_some) {
                return take_down(idle);
            }
        }
        // Warm instances stay here, or they would be made again while this still fails.
        if self.observed.short_of_resources
            && let Some(idle) = gpu.instances.iter().find(|instance| self.removable(instance, false))
        {
            return take_down(idle);
        }
        Step::CreateGpuInstance {
            profile: profile.name.clone(),
            profile_id: profile.id,
            placement: wanted.placement,
        }
    }

    /// The step that makes the slices of `wanted` free: nothing is taken down unless all of them can be.
    fn clear<'i>(&self, wanted: &Wanted, in_the_way: impl Iterator<Item = &'i Instance>) -> Step {
        let obstacles: Vec<&Instance> = in_the_way.collect();
        match obstacles.iter().find(|instance| !self.removable(instance, !wanted.warm)) {
            None => take_down(obstacles[0]),
            Some(instance) => {
                let claims = holders(self.observed.prepared, &self.key(instance));
                let what = format!("{wanted} has to wait for {}", target(instance));
                if claims.is_empty() && carries_shares(instance) {
                    return carries(&what, "it");
                }
                match claims.is_empty() && instance.processes.is_empty() {
                    true => {
                        blocked(problem_reason::OVERLAP, format!("{what}, which is wanted or not Kerf's"))
                    }
                    false => in_use(&what, &claims, &instance.processes),
                }
            }
        }
    }

    fn key(&self, instance: &Instance) -> DeviceKey {
        DeviceKey::instance(&self.observed.gpu.uuid, instance.placement)
    }

    /// Whether an instance may be destroyed: ours, idle and not wanted. A `firm` need also overrides the warm ones.
    fn removable(&self, instance: &Instance, firm: bool) -> bool {
        let wanted =
            self.wanted.iter().any(|wanted| !wanted.hole && wanted.is(instance) && !(firm && wanted.warm));
        !wanted && self.unused(instance)
    }

    /// Ours and idle.
    fn unused(&self, instance: &Instance) -> bool {
        !instance.foreign
            && instance.processes.is_empty()
            && !carries_shares(instance)
            && holders(self.observed.prepared, &self.key(instance)).is_empty()
    }

    /// Whether it has failed, and its end would end that.
    fn failed(&self, instance: &Instance) -> bool {
        instance.unhealthy.is_some() && self.observed.gpu.recovery_needed != Some(true)
    }

    /// Whether the engines that GPU instances share out suffice for one more of this profile beside the instances that
    /// `stays` says. Copy engines are shared between instances and limit nothing.
    fn engines_suffice(&self, profile: &Profile, stays: impl Fn(&Instance) -> bool) -> bool {
        let gpu = self.observed.gpu;
        let staying = gpu.instances.iter().filter(|instance| stays(instance));
        let held = staying.filter_map(|instance| gpu.profile_of(instance)).map(|profile| profile.engines);
        let Engines { copy: _, decoder, encoder, jpeg, ofa } = held.fold(profile.engines, add);
        let (needs, budget) = (profile.engines, self.geometry.engines);
        // An engine that the profile has none of is no matter of its.
        (needs.decoder == 0 || decoder <= budget.decoder)
            && (needs.encoder == 0 || encoder <= budget.encoder)
            && (needs.jpeg == 0 || jpeg <= budget.jpeg)
            && (needs.ofa == 0 || ofa <= budget.ofa)
    }
}

/// Whether both have engines of one kind.
fn shares(a: Engines, b: Engines) -> bool {
    a.decoder > 0 && b.decoder > 0
        || a.encoder > 0 && b.encoder > 0
        || a.jpeg > 0 && b.jpeg > 0
        || a.ofa > 0 && b.ofa > 0
}

fn add(a: Engines, b: Engines) -> Engines {
    Engines {
        copy: a.copy + b.copy,
        decoder: a.decoder + b.decoder,
        encoder: a.encoder + b.encoder,
        jpeg: a.jpeg + b.jpeg,
        ofa: a.ofa + b.ofa,
    }
}

#[cfg(test)]
mod tests;
