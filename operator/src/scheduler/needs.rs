//! Claims → device needs, read as Kubernetes' own allocator reads them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::resource::v1::{CapacityRequirements, DeviceConstraint, DeviceSelector, ResourceClaim};
use kerf_crds::requests::{MAX_DEVICES, too_many};
use kerf_crds::{device, names};
use kerf_planner::snapshot::{Constraint, ConstraintKind, DeviceNeed, Want};

use super::claims;
use super::filter::Filter;
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
            count @ 1..=MOST => count as u32,
            other => return Err(format!("{path}: count {other} is not between 1 and {MOST}")),
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
