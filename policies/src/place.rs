//! A place for one request on one node: which GPU gives which device.
//!
//! Alternatives are tried in the order in which the claim prefers them, devices cheapest first, hardest need first, with
//! backtracking. The search is complete up to [`WORK`] steps; within one device it is always complete.

use std::collections::HashSet;
use std::rc::Rc;

use crate::catalog::{Catalog, Offer, StateId};
use crate::occupancy::Device;
use crate::shape::Shape;
use crate::share;
use crate::snapshot::{
    Capability, Constraint, ConstraintKind, DeviceNeed, GpuIndex, NodeIndex, PlacedDevice, PlannedInstance,
    Want,
};
use crate::value::Cost;

/// Most steps of the search on one node. Counted, not timed: the same input gives the same plan on any machine.
pub const WORK: u32 = 20_000;

/// What a search found.
#[derive(Clone, Debug)]
pub enum Answer {
    /// A place.
    Found(Rc<Solution>),
    /// There is none.
    Nothing,
    /// None was found within a set number of steps.
    GaveUp,
}

/// A place on a node.
#[derive(Clone, Debug, Default)]
pub struct Solution {
    /// Index of the alternative taken for each need.
    pub choice: Vec<usize>,
    /// Price of all devices together.
    pub cost: Cost,
    /// The devices, in the order of the needs.
    pub devices: Vec<Chosen>,
}

/// One device of a [`Solution`].
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// Index of the need.
    pub need: usize,
    /// Index of its alternative.
    pub alternative: usize,
    /// The GPU.
    pub gpu: GpuIndex,
    /// What of it.
    pub offer: Offer,
}

impl Chosen {
    /// The device in the words of the plan.
    pub fn placed(&self, needs: &[DeviceNeed]) -> PlacedDevice {
        let need = &needs[self.need];
        PlacedDevice {
            request: need.name.clone(),
            subrequest: need.alternatives[self.alternative].subrequest.clone(),
            gpu: self.gpu,
            instance: self.offer.device.instance().map(|(profile, start)| PlannedInstance {
                profile,
                start,
                exists: self.offer.exists,
            }),
            share: match self.offer.device {
                Device::Share { portion, .. } => Some(portion),
                Device::Whole | Device::Instance { .. } => None,
            },
        }
    }
}

/// Searches a place for the request's devices on the node, in at most so many steps. Also answers how many it took.
pub fn on_node(
    catalog: &mut Catalog,
    shape: &Shape,
    node: NodeIndex,
    gpus: &[StateId],
    most: u32,
) -> (Answer, u32) {
    // Alternatives that are out of reach even alone are not combined with others.
    let possible: Vec<Vec<usize>> = shape
        .devices
        .iter()
        .map(|need| {
            let reachable = |&i: &usize| reachable(catalog, node, gpus, &need.alternatives[i]);
            (0..need.alternatives.len()).filter(reachable).collect()
        })
        .collect();
    if possible.iter().any(Vec::is_empty) {
        return (Answer::Nothing, 0);
    }
    let gpus = gpus.to_vec();
    let mut search =
        Search { catalog, shape, node, gpus, chosen: Vec::new(), dead: HashSet::new(), most, steps: 0 };
    let mut odometer = vec![0; possible.len()];
    loop {
        let choice: Vec<usize> = odometer.iter().zip(&possible).map(|(&at, list)| list[at]).collect();
        if search.solve(&choice) {
            return (Answer::Found(Rc::new(search.solution(choice))), search.steps);
        }
        if search.steps >= most {
            return (Answer::GaveUp, search.steps);
        }
        // The last need's alternatives change fastest, so the first need's preference weighs most.
        let Some(turn) = (0..odometer.len()).rev().find(|&i| odometer[i] + 1 < possible[i].len()) else {
            return (Answer::Nothing, search.steps);
        };
        odometer[turn] += 1;
        odometer[turn + 1..].fill(0);
    }
}

/// Whether the node's GPUs, were they for this want alone, might do; never wrongly false.
fn reachable(catalog: &Catalog, node: NodeIndex, gpus: &[StateId], want: &Want) -> bool {
    let geometries = catalog.geometries();
    let room = |(gpu, &id): (usize, &StateId)| {
        if want.gpus.as_ref().is_some_and(|set| !set.contains(&(node, gpu))) {
            return 0;
        }
        let state = catalog.state(id);
        let whole = u32::from(want.whole && state.whole_now() != Capability::No);
        let instances = match (state.geometry, state.mig_now()) {
            (Some(index), Capability::Now | Capability::AfterSwitch) => {
                let wanted = want.profiles.get(&index).into_iter().flatten();
                let allowed: Vec<usize> =
                    wanted.copied().filter(|profile| state.allowed.binary_search(profile).is_ok()).collect();
                state.taken.room_for(&geometries[index], &allowed)
            }
            _ => 0,
        };
        let of_shares = share::on(&want.shares, state.geometry).map(|(carrier, portion)| {
            let Some(room) = state.shares.room(carrier) else { return 0 };
            // As if all slices were free for carriers.
            let carriers = if carrier.is_some() { 64 } else { 1 };
            u32::try_from(portion.times(room)).unwrap_or(u32::MAX).saturating_mul(carriers)
        });
        whole.max(instances).max(of_shares.max().unwrap_or(0))
    };
    let total = gpus.iter().enumerate().map(room).fold(0, u32::saturating_add);
    total >= want.count
}

/// A situation from which the rest of the needs cannot be met: the number of devices still to come, the GPUs' states,
/// and for each constraint the values so far.
type DeadEnd<'a> = (usize, Vec<StateId>, Vec<Vec<&'a str>>);

struct Search<'s, 'r> {
    catalog: &'s mut Catalog,
    shape: &'r Shape,
    node: NodeIndex,
    gpus: Vec<StateId>,
    chosen: Vec<Chosen>,
    dead: HashSet<DeadEnd<'r>>,
    most: u32,
    steps: u32,
}

impl<'r> Search<'_, 'r> {
    /// Places the needs with these alternatives; on success `chosen` has the devices.
    fn solve(&mut self, choice: &[usize]) -> bool {
        let mut slots: Vec<(usize, usize)> = Vec::new();
        let mut needs: Vec<usize> = (0..choice.len()).collect();
        needs.sort_by_key(|&need| {
            std::cmp::Reverse(self.hardness(&self.shape.devices[need].alternatives[choice[need]]))
        });
        for need in needs {
            let count = self.shape.devices[need].alternatives[choice[need]].count;
            slots.extend((0..count).map(|_| (need, choice[need])));
        }
        self.chosen.clear();
        self.dead.clear();
        self.descend(&slots)
    }

    /// Largest share of a GPU that the want takes at least, in thousandths of its memory slices.
    fn hardness(&self, want: &Want) -> u32 {
        let geometries = self.catalog.geometries();
        let shares = want.profiles.iter().flat_map(|(&geometry, profiles)| {
            let geometry = geometries.get(geometry);
            profiles.iter().filter_map(move |&p| {
                let geometry = geometry?;
                geometry.profiles.get(p)?.size.saturating_mul(1000).checked_div(geometry.memory_slices)
            })
        });
        let parts = want.shares.values();
        // A share can go anywhere that has room left, so it comes last, the larger first.
        let parts = parts.map(|portion| (portion.memory_bytes >> 30).min(500) as u32);
        shares.chain(parts).min().unwrap_or(1001)
    }

    fn descend(&mut self, slots: &[(usize, usize)]) -> bool {
        let Some((&(need, alternative), rest)) = slots.split_first() else { return true };
        // A combination of alternatives that ends at its first device is a step, too.
        self.steps += 1;
        let situation = (slots.len(), self.gpus.clone(), self.values_so_far());
        if self.dead.contains(&situation) {
            return false;
        }
        for (gpu, offer) in self.candidates(need, alternative) {
            self.steps += 1;
            if self.steps >= self.most {
                return false;
            }
            let before = std::mem::replace(&mut self.gpus[gpu], offer.after);
            self.chosen.push(Chosen { need, alternative, gpu, offer });
            if self.descend(rest) {
                return true;
            }
            self.chosen.pop();
            self.gpus[gpu] = before;
        }
        self.dead.insert(situation);
        false
    }

    /// Devices for a need that break no constraint, cheapest first.
    fn candidates(&mut self, need: usize, alternative: usize) -> Vec<(GpuIndex, Offer)> {
        let want = &self.shape.devices[need].alternatives[alternative];
        let kind = self.shape.wants[need][alternative];
        // Of GPUs in equal states one will do, unless another need or a constraint tells them apart.
        let alike = !self.shape.by_name;
        let mut candidates = Vec::new();
        for gpu in 0..self.gpus.len() {
            let state = self.gpus[gpu];
            let seen = alike && self.gpus[..gpu].contains(&state);
            let other = want.gpus.as_ref().is_some_and(|set| !set.contains(&(self.node, gpu)));
            if seen || other || !self.constraints_hold(need, alternative, gpu) {
                continue;
            }
            candidates.extend(self.catalog.offers(state, kind).iter().map(|offer| (gpu, *offer)));
        }
        candidates.sort_by_key(|(gpu, offer)| (offer.cost, *gpu, offer.device));
        candidates
    }

    fn constraints_hold(&self, need: usize, alternative: usize, gpu: GpuIndex) -> bool {
        let devices = &self.shape.devices;
        self.shape.constraints.iter().filter(|c| concerns(c, &devices[need], alternative)).all(|constraint| {
            let Some(value) = constraint.values.get(&(self.node, gpu)) else { return false };
            let others = self.chosen.iter().filter(|c| concerns(constraint, &devices[c.need], c.alternative));
            let mut values = others.filter_map(|c| constraint.values.get(&(self.node, c.gpu)));
            match constraint.kind {
                ConstraintKind::Same => values.all(|other| other == value),
                ConstraintKind::Distinct => values.all(|other| other != value),
            }
        })
    }

    fn values_so_far(&self) -> Vec<Vec<&'r str>> {
        let of = |constraint: &'r Constraint| {
            let concerned = self
                .chosen
                .iter()
                .filter(|c| concerns(constraint, &self.shape.devices[c.need], c.alternative));
            let mut values: Vec<&'r str> = concerned
                .filter_map(|c| constraint.values.get(&(self.node, c.gpu)))
                .map(String::as_str)
                .collect();
            values.sort_unstable();
            values.dedup();
            values
        };
        self.shape.constraints.iter().map(of).collect()
    }

    fn solution(&self, choice: Vec<usize>) -> Solution {
        let mut devices = self.chosen.clone();
        devices.sort_by_key(|chosen| chosen.need);
        let cost = devices.iter().fold(Cost::default(), |sum, chosen| sum.plus(chosen.offer.cost));
        Solution { choice, cost, devices }
    }
}

/// Whether the constraint is about this need, by its name or by that of the alternative (`request/subrequest`).
pub fn concerns(constraint: &Constraint, need: &DeviceNeed, alternative: usize) -> bool {
    if constraint.requests.is_empty() || constraint.requests.contains(&need.name) {
        return true;
    }
    let subrequest = need.alternatives.get(alternative).and_then(|want| want.subrequest.as_ref());
    subrequest.is_some_and(|name| constraint.requests.contains(&format!("{}/{name}", need.name)))
}
