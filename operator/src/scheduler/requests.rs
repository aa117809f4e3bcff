//! Pod → [`Request`]: what the pod's claims ask of Kerf, read as Kubernetes' own allocator reads them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClaim, DeviceClass, DeviceConstraint, DeviceSelector, ResourceClaim,
};
use kerf_crds::conditions::pod_reason;
use kerf_crds::device;
use kerf_crds::gpu_node::{Gpu, GpuNodeStatus};
use kerf_crds::names;
use kerf_planner::snapshot::{
    Constraint, ConstraintKind, DeviceNeed, NodeRequirement, Operator, Request, Want,
};
use kube::ResourceExt;

use super::claims;
use super::selectors::{Device, Selectors};
use super::snapshot::Board;
use crate::cache::{PodInfo, World, quantity};

/// What a pod asks of Kerf.
#[derive(Debug)]
pub enum Asks {
    /// Nothing.
    Nothing,
    /// It cannot be planned yet, or never: the reason and a sentence.
    Cannot(&'static str, String),
    /// All its claims are allocated.
    Allocated,
    /// Devices.
    For(Box<Wanted>),
}

/// A pod's request and whose claims it is made of.
#[derive(Debug, Default)]
pub struct Wanted {
    /// What the planner is asked.
    pub request: Request,
    /// Device need's name → claim and the name of the request in it.
    pub parts: BTreeMap<String, (String, String)>,
}

/// Whether the class is about Kerf's devices: one of Kerf's own, or one whose selectors name Kerf's driver.
pub fn class_is_ours(world: &World, name: &str) -> bool {
    if name == names::GPU_CLASS || name == names::MIG_CLASS || name.ends_with(".kerf.dev") {
        return true;
    }
    world.classes.get(name).is_some_and(|class| {
        expressions(class_selectors(class)).any(|expression| expression.contains(names::DRIVER))
    })
}

fn class_selectors(class: &DeviceClass) -> Option<&Vec<DeviceSelector>> {
    class.spec.as_ref()?.selectors.as_ref()
}

fn expressions(selectors: Option<&Vec<DeviceSelector>>) -> impl Iterator<Item = &str> {
    selectors.into_iter().flatten().filter_map(|selector| Some(selector.cel.as_ref()?.expression.as_str()))
}

/// Names of all classes that a claim mentions.
fn classes(devices: &DeviceClaim) -> impl Iterator<Item = &str> {
    devices.requests.iter().flatten().flat_map(|request| {
        let exactly = request.exactly.iter().map(|exactly| exactly.device_class_name.as_str());
        let available = request.first_available.iter().flatten().map(|sub| sub.device_class_name.as_str());
        exactly.chain(available)
    })
}

/// Whether the claim asks for any of Kerf's devices.
pub fn claim_is_for_kerf(world: &World, claim: &ResourceClaim) -> bool {
    claims::devices(claim).is_some_and(|devices| classes(devices).any(|class| class_is_ours(world, class)))
}

/// Reads what the pod asks for.
pub fn read(world: &World, board: &Board, selectors: &Selectors, memo: &Memo, pod: &PodInfo) -> Asks {
    read_with(world, board, selectors, memo, pod, false)
}

/// The same as if none of the pod's claims were allocated: to see whether there is a better place.
pub fn read_afresh(world: &World, board: &Board, selectors: &Selectors, memo: &Memo, pod: &PodInfo) -> Asks {
    read_with(world, board, selectors, memo, pod, true)
}

fn read_with(
    world: &World,
    board: &Board,
    selectors: &Selectors,
    memo: &Memo,
    pod: &PodInfo,
    afresh: bool,
) -> Asks {
    let Some(detail) = &pod.detail else { return Asks::Nothing };
    let bad = |message: String| Asks::Cannot(pod_reason::BAD_CLAIM, message);
    let mut reader =
        Reader { world, board, selectors, wanted: Wanted::default(), several: false, pinned: None, memo };
    let mut ours = false;
    let mut asked = false;
    // Claims to read: those that exist, and the one that will be made from the annotation.
    let mut claims: Vec<(String, Arc<ResourceClaim>)> = Vec::new();
    let mut missing = Vec::new();
    let made_here = pod.own_claim();
    if let Some(original) = &detail.original {
        ours = true;
        match (original, made_here) {
            (Err(error), _) => return bad(error.clone()),
            (Ok(_), None) => {
                return bad(format!(
                    "the annotation {} is there, but no entry {:?} in spec.resourceClaims names a claim",
                    names::ORIGINAL_RESOURCES,
                    names::POD_CLAIM
                ));
            }
            (Ok(original), Some(name)) => {
                let allocated = world.claim(&pod.namespace, name).is_some_and(|claim| {
                    claims::belongs_to(claim, pod) && claims::allocation(claim).is_some()
                });
                if !allocated || afresh {
                    claims.push((name.to_owned(), Arc::new(claims::from_annotation(pod, name, original))));
                }
                asked = true;
            }
        }
    }
    let mut read: BTreeSet<&str> = BTreeSet::new();
    for claim in &detail.claims {
        if claim.claim.is_some() && claim.claim.as_deref() == made_here {
            continue;
        }
        let Some(name) = &claim.claim else {
            missing.push(format!("the claim for {:?} is not made from its template yet", claim.name));
            continue;
        };
        if !read.insert(name) {
            continue;
        }
        match world.claim(&pod.namespace, name) {
            None => missing.push(format!("ResourceClaim {name:?} does not exist")),
            Some(found) if claim_is_for_kerf(world, found) => {
                ours = true;
                asked = true;
                if let Some(allocation) = claims::allocation(found).filter(|_| !afresh) {
                    // Shared with a pod that was first: this one has to go where it is.
                    reader.pinned = claims::node_of(allocation).or(reader.pinned);
                } else if found.metadata.deletion_timestamp.is_some() {
                    return Asks::Cannot(
                        pod_reason::BAD_CLAIM,
                        format!("ResourceClaim {name:?} is being deleted"),
                    );
                } else {
                    claims.push((name.clone(), Arc::clone(found)));
                }
            }
            Some(_) => {}
        }
    }
    if !ours && !pod.gated() {
        return Asks::Nothing;
    }
    if !asked && missing.is_empty() {
        return bad(format!(
            "the gate {} is on the pod, but nothing in it asks Kerf for devices",
            names::GATE
        ));
    }
    if let Some(missing) = missing.into_iter().next() {
        return Asks::Cannot(pod_reason::BAD_CLAIM, missing);
    }
    if claims.is_empty() {
        return Asks::Allocated;
    }
    reader.several = claims.len() > 1;
    for (name, claim) in &claims {
        if let Err(message) = reader.claim(name, claim) {
            return bad(message);
        }
    }
    let mut wanted = reader.wanted;
    wanted.request.id = pod.id();
    wanted.request.priority = pod.priority;
    wanted.request.pod = detail.needs.clone();
    wanted.request.pod.milli = pod.milli.clone();
    if let Some(node) = reader.pinned {
        pin(&mut wanted.request, &node);
    }
    Asks::For(Box::new(wanted))
}

/// Requires the node in every alternative of the affinity.
fn pin(request: &mut Request, node: &str) {
    let requirement = NodeRequirement {
        key: NodeRequirement::NAME.into(),
        operator: Operator::In,
        values: vec![node.to_owned()],
    };
    if request.pod.affinity.is_empty() {
        request.pod.affinity.push(Vec::new());
    }
    for term in &mut request.pod.affinity {
        term.push(requirement.clone());
    }
}

struct Reader<'a> {
    world: &'a World,
    board: &'a Board,
    selectors: &'a Selectors,
    wanted: Wanted,
    /// The pod has several claims: names of requests get the claim's in front.
    several: bool,
    pinned: Option<String>,
    memo: &'a Memo,
}

/// Answers that are the same for every pod of a cycle.
pub type Memo = RefCell<HashMap<String, Vec<Want>>>;

/// What an `exactly` and a subrequest have in common.
struct Ask<'a> {
    path: String,
    class: &'a str,
    selectors: &'a Option<Vec<DeviceSelector>>,
    mode: Option<&'a str>,
    count: Option<i64>,
    capacity: Option<&'a CapacityRequirements>,
}

/// What the selectors say of a GPU: profiles by geometry, and whether the whole of it will do.
type Answer = (BTreeMap<usize, BTreeSet<usize>>, bool);

/// GPUs for which a selector that reads no individual attribute has one answer.
#[derive(PartialEq, Eq, Hash)]
struct Kind<'a> {
    product: &'a str,
    geometry: Option<usize>,
    memory: u64,
    driver: &'a str,
    cuda: &'a str,
    place: Option<(usize, usize)>,
}

impl Reader<'_> {
    fn claim(&mut self, name: &str, claim: &ResourceClaim) -> Result<(), String> {
        let Some(devices) = claims::devices(claim) else { return Ok(()) };
        if let Some(foreign) = classes(devices).find(|class| !class_is_ours(self.world, class)) {
            return Err(format!(
                "ResourceClaim {name:?} mixes Kerf's devices with those of DeviceClass {foreign:?}; put them into a \
                 claim of their own"
            ));
        }
        let full = |request: &str| {
            if self.several { format!("{name}/{request}") } else { request.to_owned() }
        };
        let mut needs = Vec::new();
        for request in devices.requests.iter().flatten() {
            let path = format!("ResourceClaim {name:?}, request {:?}", request.name);
            let mut alternatives = Vec::new();
            if let Some(exactly) = &request.exactly {
                if exactly.admin_access.unwrap_or_default() {
                    return Err(format!("{path}: adminAccess is not served by Kerf"));
                }
                alternatives.extend(self.wants(
                    &Ask {
                        path: path.clone(),
                        class: &exactly.device_class_name,
                        selectors: &exactly.selectors,
                        mode: exactly.allocation_mode.as_deref(),
                        count: exactly.count,
                        capacity: exactly.capacity.as_ref(),
                    },
                    None,
                )?);
            }
            for sub in request.first_available.iter().flatten() {
                alternatives.extend(self.wants(
                    &Ask {
                        path: format!("{path}, alternative {:?}", sub.name),
                        class: &sub.device_class_name,
                        selectors: &sub.selectors,
                        mode: sub.allocation_mode.as_deref(),
                        count: sub.count,
                        capacity: sub.capacity.as_ref(),
                    },
                    Some(&sub.name),
                )?);
            }
            if alternatives.is_empty() {
                return Err(format!("{path}: neither exactly nor firstAvailable is given"));
            }
            needs.push((full(&request.name), request.name.clone(), alternatives));
        }
        let known: BTreeSet<String> = needs.iter().map(|(full, ..)| full.clone()).collect();
        for constraint in devices.constraints.iter().flatten() {
            let constraint = self.constraint(name, constraint, &full, &known)?;
            self.wanted.request.constraints.push(constraint);
        }
        for (full, request, alternatives) in needs {
            self.wanted.parts.insert(full.clone(), (name.to_owned(), request));
            self.wanted.request.devices.push(DeviceNeed { name: full, alternatives });
        }
        Ok(())
    }

    /// The ways to satisfy one request: one [`Want`] per set of GPUs that the selectors treat alike.
    fn wants(&self, ask: &Ask<'_>, subrequest: Option<&str>) -> Result<Vec<Want>, String> {
        let path = &ask.path;
        match ask.mode {
            None | Some("" | "ExactCount") => {}
            Some(mode) => {
                return Err(format!(
                    "{path}: allocationMode {mode:?} is not served by Kerf, whose devices are made on demand; use \
                     ExactCount with a count"
                ));
            }
        }
        let count = match ask.count.unwrap_or(1) {
            count @ 1..=128 => count as u32,
            other => return Err(format!("{path}: count {other} is not between 1 and 128")),
        };
        let key = format!("{:?} {:?} {count} {:?}", ask.class, ask.selectors, ask.capacity);
        let known = self.memo.borrow().get(&key).cloned();
        let mut wants = match known {
            Some(wants) => wants,
            None => {
                let wants = self.matching(ask, count)?;
                self.memo.borrow_mut().insert(key, wants.clone());
                wants
            }
        };
        for want in &mut wants {
            want.subrequest = subrequest.map(str::to_owned);
        }
        Ok(wants)
    }

    fn matching(&self, ask: &Ask<'_>, count: u32) -> Result<Vec<Want>, String> {
        let Some(class) = self.world.classes.get(ask.class) else {
            return match ask.class.strip_prefix("mig-").and_then(|rest| rest.strip_suffix(".kerf.dev")) {
                // Classes are made for profiles that some GPU has reported.
                Some(profile) => Ok(vec![Want { count, label: profile.to_owned(), ..Want::default() }]),
                None => Err(format!("{}: DeviceClass {:?} does not exist", ask.path, ask.class)),
            };
        };
        let filter = Filter::new(self.selectors, class, ask)?;
        // Per answer of the selectors: the GPUs for which it is that.
        let mut groups: BTreeMap<Answer, BTreeSet<(usize, usize)>> = BTreeMap::new();
        let mut kinds: HashMap<Kind<'_>, (bool, BTreeSet<usize>)> = HashMap::new();
        let mut total = 0;
        for (node_index, node) in self.board.snapshot.nodes.iter().enumerate() {
            let Some(status) = self.board.status(node_index) else { continue };
            for (gpu_index, (gpu, observed)) in node.gpus.iter().zip(&status.gpus).enumerate() {
                let place = (node_index, gpu_index);
                total += 1;
                let kind = Kind {
                    product: &observed.product,
                    geometry: gpu.geometry,
                    memory: observed.memory_bytes,
                    driver: &status.driver_version,
                    cuda: &status.cuda_version,
                    place: filter.individual.then_some(place),
                };
                let (whole, profiles) = match kinds.get(&kind) {
                    Some(answer) => answer.clone(),
                    None => {
                        let answer = filter.of_gpu(status, observed)?;
                        kinds.insert(kind, answer.clone());
                        answer
                    }
                };
                let by_geometry = match gpu.geometry {
                    Some(geometry) if !profiles.is_empty() => BTreeMap::from([(geometry, profiles)]),
                    _ => BTreeMap::new(),
                };
                if whole || !by_geometry.is_empty() {
                    groups.entry((by_geometry, whole)).or_default().insert(place);
                }
            }
        }
        let label = filter.label();
        if groups.is_empty() {
            return Ok(vec![Want { count, label, ..Want::default() }]);
        }
        // One alternative over all GPUs, if what is right for one of a geometry is right for all of it.
        let mut merged: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut alike = groups.keys().all(|(_, whole)| Some(whole) == groups.keys().next().map(|(_, w)| w));
        for (profiles, _) in groups.keys() {
            for (geometry, set) in profiles {
                alike &= merged.insert(*geometry, set.clone()).is_none_or(|known| known == *set);
            }
        }
        if alike {
            let gpus: BTreeSet<(usize, usize)> = groups.values().flatten().copied().collect();
            let whole = groups.keys().any(|(_, whole)| *whole);
            // Where geometries alone tell which GPUs will do, the list is left out.
            let told_by_geometry = gpus.len() == total
                || !whole
                    && self.board.snapshot.nodes.iter().enumerate().all(|(node, n)| {
                        n.gpus.iter().enumerate().all(|(index, gpu)| {
                            gpus.contains(&(node, index))
                                || gpu.geometry.is_none_or(|geometry| !merged.contains_key(&geometry))
                        })
                    });
            return Ok(vec![Want {
                subrequest: None,
                count,
                label,
                profiles: merged,
                whole,
                gpus: (!told_by_geometry).then_some(gpus),
            }]);
        }
        Ok(groups
            .into_iter()
            .map(|((profiles, whole), gpus)| Want {
                subrequest: None,
                count,
                label: label.clone(),
                profiles,
                whole,
                gpus: Some(gpus),
            })
            .collect())
    }

    fn constraint(
        &self,
        claim: &str,
        constraint: &DeviceConstraint,
        full: &impl Fn(&str) -> String,
        known: &BTreeSet<String>,
    ) -> Result<Constraint, String> {
        let (kind, attribute) = match (&constraint.match_attribute, &constraint.distinct_attribute) {
            (Some(attribute), None) => (ConstraintKind::Same, attribute),
            (None, Some(attribute)) => (ConstraintKind::Distinct, attribute),
            _ => {
                return Err(format!(
                    "ResourceClaim {claim:?}: a constraint must have matchAttribute or distinctAttribute"
                ));
            }
        };
        let own = attribute.strip_prefix(names::DRIVER).and_then(|rest| rest.strip_prefix('/'));
        let name = own.unwrap_or(attribute);
        let Some(name) = device::GPU_ATTRIBUTES.into_iter().find(|known| *known == name) else {
            let all: Vec<String> = device::GPU_ATTRIBUTES
                .iter()
                .map(|name| {
                    if name.contains('/') { (*name).to_owned() } else { format!("{}/{name}", names::DRIVER) }
                })
                .collect();
            return Err(format!(
                "ResourceClaim {claim:?}: a constraint on {attribute:?} is not served by Kerf; it can compare {}",
                all.join(", ")
            ));
        };
        let mut requests = BTreeSet::new();
        for request in constraint.requests.iter().flatten() {
            let (main, sub) =
                request.split_once('/').map_or((request.as_str(), None), |(main, sub)| (main, Some(sub)));
            let mut name = full(main);
            if !known.contains(&name) {
                return Err(format!(
                    "ResourceClaim {claim:?}: a constraint names the unknown request {request:?}"
                ));
            }
            if let Some(sub) = sub {
                name = format!("{name}/{sub}");
            }
            requests.insert(name);
        }
        if requests.is_empty() && self.several {
            // "All requests" means all of this claim.
            requests = known.clone();
        }
        let mut values = BTreeMap::new();
        for (node, gpu_node) in self.board.gpu_nodes.iter().enumerate() {
            let Some(status) = &gpu_node.status else { continue };
            for (index, gpu) in status.gpus.iter().enumerate() {
                if let Some(value) = device::attributes(status, gpu, None).get(name) {
                    values.insert((node, index), format!("{value:?}"));
                }
            }
        }
        Ok(Constraint { requests, kind, values })
    }
}

/// The selectors of a request and its class together.
struct Filter<'a> {
    selectors: &'a Selectors,
    path: &'a str,
    expressions: Vec<&'a str>,
    capacity: Vec<(&'a str, i128)>,
    /// Some expression tells GPUs of one kind apart.
    individual: bool,
    class: &'a DeviceClass,
    own: usize,
}

impl<'a> Filter<'a> {
    fn new(selectors: &'a Selectors, class: &'a DeviceClass, ask: &'a Ask<'a>) -> Result<Self, String> {
        let of_class: Vec<&str> = expressions(class_selectors(class)).collect();
        let of_request: Vec<&str> = expressions(ask.selectors.as_ref()).collect();
        let own = of_request.len();
        let expressions: Vec<&str> = of_class.into_iter().chain(of_request).collect();
        let mut capacity = Vec::new();
        for (name, amount) in ask.capacity.iter().filter_map(|c| c.requests.as_ref()).flatten() {
            let amount = quantity::milli(amount)
                .ok_or_else(|| format!("{}: capacity {name:?}: {:?} is no quantity", ask.path, amount.0))?;
            let name = name.strip_prefix(names::DRIVER).and_then(|n| n.strip_prefix('/')).unwrap_or(name);
            capacity.push((name, amount));
        }
        Ok(Self {
            selectors,
            path: &ask.path,
            individual: expressions.iter().any(|expression| Selectors::tells_gpus_apart(expression)),
            expressions,
            capacity,
            class,
            own,
        })
    }

    /// Whether the whole GPU will do, and which profiles on it, by index.
    fn of_gpu(&self, status: &GpuNodeStatus, gpu: &Gpu) -> Result<(bool, BTreeSet<usize>), String> {
        let whole = self.admits(&Device {
            attributes: device::attributes(status, gpu, None),
            capacities: device::capacities(gpu, None),
        })?;
        let mut profiles = BTreeSet::new();
        for (index, profile) in status.geometry_of(gpu).iter().flat_map(|g| &g.profiles).enumerate() {
            let device = Device {
                attributes: device::attributes(status, gpu, Some((profile, None))),
                capacities: device::capacities(gpu, Some(profile)),
            };
            if self.admits(&device)? {
                profiles.insert(index);
            }
        }
        Ok((whole, profiles))
    }

    fn admits(&self, device: &Device) -> Result<bool, String> {
        let room = self.capacity.iter().all(|(name, amount)| {
            device.capacities.get(name).is_some_and(|there| i128::from(*there) * 1000 >= *amount)
        });
        if !room {
            return Ok(false);
        }
        for expression in &self.expressions {
            if !self
                .selectors
                .matches(expression, device)
                .map_err(|message| format!("{}: {message}", self.path))?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What people call it.
    fn label(&self) -> String {
        let class = self.class.name_any();
        let base = match class.as_str() {
            names::GPU_CLASS => "a whole GPU".to_owned(),
            names::MIG_CLASS => "a MIG instance".to_owned(),
            other => match other.strip_prefix("mig-").and_then(|rest| rest.strip_suffix(".kerf.dev")) {
                Some(profile) => profile.to_owned(),
                None => format!("a device of class {other}"),
            },
        };
        if self.own > 0 || !self.capacity.is_empty() { format!("{base} (with selectors)") } else { base }
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
