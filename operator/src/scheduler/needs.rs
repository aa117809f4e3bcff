//! Claims → device needs, read as Kubernetes' own allocator reads them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::resource::v1::{CapacityRequirements, DeviceConstraint, DeviceSelector, ResourceClaim};
use kerf_crds::gpu_node::Sharing;
use kerf_crds::requests::{MAX_DEVICES, too_many};
use kerf_crds::{device, names};
use kerf_planner::snapshot::{Capability, Constraint, ConstraintKind, DeviceNeed, Portion, Want};

use super::claims;
use super::filter::{Admitted, Filter};
use super::requests::{Wanted, class_is_ours, classes};
use super::selectors::Selectors;
use super::snapshot::Board;
use crate::cache::World;

/// [`MAX_DEVICES`] as a request's count is written.
const MOST: i64 = MAX_DEVICES as i64;

/// Reads claims into a request.
pub(super) struct Reader<'a> {
    pub world: &'a World,
    pub board: &'a Board,
    pub selectors: &'a Selectors,
    pub wanted: Wanted,
    /// The pod has several claims: names of requests get the claim's in front.
    pub several: bool,
    pub pinned: Option<String>,
    pub memo: &'a Memo,
}

/// Answers that are the same for every pod of a cycle.
pub type Memo = RefCell<HashMap<String, Vec<Want>>>;

/// What an `exactly` and a subrequest have in common.
pub(super) struct Ask<'a> {
    pub path: String,
    pub class: &'a str,
    pub selectors: &'a Option<Vec<DeviceSelector>>,
    pub mode: Option<&'a str>,
    pub count: Option<i64>,
    pub capacity: Option<&'a CapacityRequirements>,
}

/// What the selectors admit of a GPU, with its geometry where that matters.
type Answer = (Option<usize>, Admitted);

/// Per answer the GPUs, by node, for which it is that.
type Groups = BTreeMap<Answer, BTreeSet<(usize, usize)>>;

/// The want, with what the answer admits in addition.
fn with(mut want: Want, (geometry, admitted): &Answer, share: Option<Portion>) -> Want {
    want.whole |= admitted.whole;
    if let Some(geometry) = *geometry {
        if !admitted.profiles.is_empty() {
            want.profiles.insert(geometry, admitted.profiles.clone());
        }
        if let Some(portion) = share.filter(|_| admitted.share) {
            want.shares.insert((geometry, None), portion);
        }
        for (&profile, &compute_milli) in &admitted.in_instances {
            let of_instance = share.map(|portion| Portion { compute_milli, ..portion });
            want.shares.extend(of_instance.map(|portion| ((geometry, Some(profile)), portion)));
        }
    }
    want
}

/// GPUs for which a selector that reads no individual attribute has one answer.
#[derive(PartialEq, Eq, Hash)]
struct Kind<'a> {
    product: &'a str,
    geometry: Option<usize>,
    memory: u64,
    driver: &'a str,
    cuda: &'a str,
    sharing: Option<&'a Sharing>,
    place: Option<(usize, usize)>,
}

impl Reader<'_> {
    /// Adds what a claim asks for; an error says what about it cannot be served.
    pub fn claim(&mut self, name: &str, claim: &ResourceClaim) -> Result<(), String> {
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
        let most = |wants: &[Want]| wants.iter().map(|want| want.count).max().unwrap_or_default();
        let devices_at_most: u32 = needs.iter().map(|(.., alternatives)| most(alternatives)).sum();
        if devices_at_most as usize > MAX_DEVICES {
            return Err(format!("ResourceClaim {name:?} {}", too_many(devices_at_most)));
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
        let all = match ask.mode {
            None | Some("" | "ExactCount") => false,
            Some("All") => true,
            Some(mode) => {
                return Err(format!(
                    "{path}: allocationMode {mode:?} is unknown to Kerf; use ExactCount with a count, or All"
                ));
            }
        };
        let count = match ask.count.unwrap_or(1) {
            count @ 1..=MOST => count as u32,
            other => return Err(format!("{path}: count {other} is not between 1 and {MOST}")),
        };
        let key = format!("{:?} {:?} {count} {all} {:?}", ask.class, ask.selectors, ask.capacity);
        let known = self.memo.borrow().get(&key).cloned();
        let mut wants = match known {
            Some(wants) => wants,
            None => {
                let wants = if all { self.every(ask)? } else { self.matching(ask, count)? };
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
        let label = filter.label();
        // Where one GPU of each kind answers for all of them, and the answer is not about single GPUs.
        if !filter.individual {
            let kinds = || self.board.kinds.iter().copied();
            let groups = self.groups(&filter, kinds())?;
            let want = self.one_for_all(&filter, &groups, kinds(), count, &label);
            if let Some(want) = want.filter(|want| want.gpus.is_none()) {
                return Ok(vec![want]);
            }
        }
        let places = || self.places();
        let groups = self.groups(&filter, places())?;
        if groups.is_empty() {
            return Ok(vec![Want { count, label, ..Want::default() }]);
        }
        if let Some(want) = self.one_for_all(&filter, &groups, places(), count, &label) {
            return Ok(vec![want]);
        }
        let want = |(answer, gpus)| {
            let want = Want { count, label: label.clone(), gpus: Some(gpus), ..Want::default() };
            with(want, &answer, filter.share)
        };
        Ok(groups.into_iter().map(want).collect())
    }

    /// All GPUs of a node that the selectors admit: an alternative per number of them, over the nodes that have so many.
    /// As none can be had twice, a place for that number is one for all.
    fn every(&self, ask: &Ask<'_>) -> Result<Vec<Want>, String> {
        let Some(class) = self.world.classes.get(ask.class) else {
            return Err(format!("{}: DeviceClass {:?} does not exist", ask.path, ask.class));
        };
        let filter = Filter::new(self.selectors, class, ask)?;
        let label = filter.label();
        let mut by_node: BTreeMap<usize, BTreeSet<(usize, usize)>> = BTreeMap::new();
        for ((_, admitted), gpus) in self.groups(&filter, self.places())? {
            if admitted != (Admitted { whole: true, ..Admitted::default() }) {
                return Err(format!(
                    "{}: allocationMode All is served for whole GPUs only, and this asks for {label}: MIG instances and \
                     shares are made on demand, so there is no number that is all of them; use ExactCount with a count, or \
                     class {}",
                    ask.path,
                    names::GPU_CLASS
                ));
            }
            // One that its policy never hands out whole is no whole GPU. One that is only taken or broken is.
            let whole = |&(node, gpu): &(usize, usize)| {
                self.board.snapshot.nodes[node].gpus[gpu].whole != Capability::No
            };
            for place in gpus.into_iter().filter(whole) {
                by_node.entry(place.0).or_default().insert(place);
            }
        }
        let mut by_count: BTreeMap<usize, BTreeSet<(usize, usize)>> = BTreeMap::new();
        for gpus in by_node.into_values().filter(|gpus| gpus.len() <= MAX_DEVICES) {
            by_count.entry(gpus.len()).or_default().extend(gpus);
        }
        if by_count.is_empty() {
            return Ok(vec![Want { count: 1, label, ..Want::default() }]);
        }
        let want = |(count, gpus)| Want {
            count: count as u32,
            label: label.clone(),
            whole: true,
            gpus: Some(gpus),
            ..Want::default()
        };
        Ok(by_count.into_iter().map(want).collect())
    }

    /// All GPUs.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let nodes = self.board.snapshot.nodes.iter().enumerate();
        nodes.flat_map(|(node, contents)| (0..contents.gpus.len()).map(move |gpu| (node, gpu)))
    }

    /// Per answer of the selectors: those of these GPUs for which it is that.
    fn groups(
        &self,
        filter: &Filter<'_>,
        places: impl Iterator<Item = (usize, usize)>,
    ) -> Result<Groups, String> {
        let mut groups = Groups::new();
        let mut kinds: HashMap<Kind<'_>, Admitted> = HashMap::new();
        for place @ (node, gpu) in places {
            let (Some(status), contents) =
                (self.board.status(node), &self.board.snapshot.nodes[node].gpus[gpu])
            else {
                continue;
            };
            let Some(observed) = status.gpus.get(gpu) else { continue };
            let kind = Kind {
                product: &observed.product,
                geometry: contents.geometry,
                memory: observed.memory_bytes,
                driver: &status.driver_version,
                cuda: &status.cuda_version,
                sharing: observed.sharing.as_ref(),
                place: filter.individual.then_some(place),
            };
            let mut admitted = match kinds.get(&kind) {
                Some(answer) => answer.clone(),
                None => {
                    let answer = filter.of_gpu(status, observed)?;
                    kinds.insert(kind, answer.clone());
                    answer
                }
            };
            // Instances and shares are known by their geometry.
            if contents.geometry.is_none() {
                admitted = Admitted { whole: admitted.whole, ..Admitted::default() };
            }
            let of_geometry = admitted.of_geometry();
            if admitted.whole || of_geometry {
                let geometry = contents.geometry.filter(|_| of_geometry);
                groups.entry((geometry, admitted)).or_default().insert(place);
            }
        }
        Ok(groups)
    }

    /// One alternative over all of these GPUs, if some will do, and what is right for one of a geometry is right for all of
    /// it.
    fn one_for_all(
        &self,
        filter: &Filter<'_>,
        groups: &Groups,
        mut places: impl Iterator<Item = (usize, usize)>,
        count: u32,
        label: &str,
    ) -> Option<Want> {
        let (_, Admitted { whole, .. }) = *groups.keys().next()?;
        let mut merged: BTreeMap<usize, &Admitted> = BTreeMap::new();
        let mut alike = groups.keys().all(|(_, other)| other.whole == whole);
        for (geometry, admitted) in groups.keys() {
            let Some(geometry) = geometry else { continue };
            alike &= merged.insert(*geometry, admitted).is_none_or(|known| known == admitted);
        }
        if !alike {
            return None;
        }
        let gpus: BTreeSet<(usize, usize)> = groups.values().flatten().copied().collect();
        let of_geometry = |(node, gpu): (usize, usize)| {
            let geometry = self.board.snapshot.nodes[node].gpus[gpu].geometry;
            !whole && geometry.is_none_or(|geometry| !merged.contains_key(&geometry))
        };
        // Where geometries alone tell which GPUs will do, the list is left out.
        let told_by_geometry = places.all(|place| gpus.contains(&place) || of_geometry(place));
        let gpus = (!told_by_geometry).then_some(gpus);
        let want = Want { count, label: label.to_owned(), gpus, ..Want::default() };
        Some(groups.keys().fold(want, |want, answer| with(want, answer, filter.share)))
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
                if let Some(value) = device::attributes(status, gpu, device::Device::Gpu).get(name) {
                    values.insert((node, index), format!("{value:?}"));
                }
            }
        }
        Ok(Constraint { requests, kind, values })
    }
}
