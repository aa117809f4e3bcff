//! Room for a request that has none: which running pods to move, and where to, so that it fits.
//!
//! The fewest moves first: one, then two, up to a limit. A place is considered together with those who are in its way;
//! each of them is placed anew in the same search, on free room or in turn in place of others, until nobody is left
//! without a place. Whatever does not end with everybody placed is not done at all.

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

use crate::fleet::{Fleet, Numbered, PodId, ShapeId};
use crate::occupancy::{Device, slices};
use crate::place::Solution;
use crate::snapshot::{BudgetIndex, GpuIndex, NodeIndex};

/// Number of a [`Tenant`].
pub type TenantId = usize;

/// Somebody who has devices.
#[derive(Clone, Debug)]
pub struct Tenant<'r> {
    /// What it asked for, and would ask for again.
    pub asked: Numbered<'r>,
    /// Its node.
    pub node: NodeIndex,
    /// Its devices.
    pub place: Rc<Solution>,
    /// What a move of it costs; `None`: it is not to be moved.
    pub price: Option<u32>,
    /// The disruption budgets that it counts for.
    pub budgets: &'r [BudgetIndex],
}

/// Everybody who has devices, by GPU.
#[derive(Debug, Default)]
pub struct Tenants<'r> {
    all: BTreeMap<TenantId, Tenant<'r>>,
    on: BTreeMap<(NodeIndex, GpuIndex), Vec<TenantId>>,
    next: TenantId,
    /// How many more of each disruption budget may go.
    budgets: Vec<u32>,
}

impl<'r> Tenants<'r> {
    /// Nobody yet, under these disruption budgets.
    pub fn under(budgets: &[u32]) -> Self {
        Self { budgets: budgets.to_vec(), ..Self::default() }
    }

    /// A tenant by its number.
    pub fn get(&self, id: TenantId) -> Option<&Tenant<'r>> {
        self.all.get(&id)
    }

    /// Enters a tenant. Its devices are the fleet's to take.
    pub fn enter(&mut self, tenant: Tenant<'r>) -> TenantId {
        let id = self.next;
        self.next += 1;
        self.put(id, tenant);
        id
    }

    /// Strikes a tenant off. Its devices are the fleet's to put back.
    pub fn leave(&mut self, id: TenantId) -> Option<Tenant<'r>> {
        let tenant = self.all.remove(&id)?;
        for chosen in &tenant.place.devices {
            if let Some(there) = self.on.get_mut(&(tenant.node, chosen.gpu)) {
                there.retain(|&other| other != id);
            }
        }
        for &budget in tenant.budgets {
            if let Some(left) = self.budgets.get_mut(budget) {
                *left = left.saturating_sub(1);
            }
        }
        Some(tenant)
    }

    /// Takes back a tenant that has left.
    fn put_back(&mut self, id: TenantId, tenant: Tenant<'r>) {
        for &budget in tenant.budgets {
            if let Some(left) = self.budgets.get_mut(budget) {
                *left += 1;
            }
        }
        self.put(id, tenant);
    }

    /// Whether the disruption budgets let all of these go.
    fn may_go(&self, ids: &[TenantId]) -> bool {
        let budgets = |id: &TenantId| self.all.get(id).map_or(&[][..], |tenant| tenant.budgets);
        (0..self.budgets.len()).all(|budget| {
            let of_it = ids.iter().filter(|&id| budgets(id).contains(&budget)).count();
            of_it <= self.budgets[budget] as usize
        })
    }

    fn put(&mut self, id: TenantId, tenant: Tenant<'r>) {
        for chosen in &tenant.place.devices {
            let there = self.on.entry((tenant.node, chosen.gpu)).or_default();
            if !there.contains(&id) {
                there.push(id);
            }
        }
        self.all.insert(id, tenant);
    }

    fn on(&self, node: NodeIndex, gpu: GpuIndex) -> &[TenantId] {
        self.on.get(&(node, gpu)).map_or(&[], Vec::as_slice)
    }
}

/// With up to so many moves all chains of displacement between requests of one device are looked at.
const EXHAUSTIVE: u32 = 2;

/// However large the cluster, all of its GPUs are looked at so many times for a request.
const LOOKS: u64 = 64;

/// How far the search goes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most moves.
    pub moves: u32,
    /// Beyond two moves: most places, in turn, from which those in the way may displace others again. Places from which
    /// everybody goes to free room are all looked at.
    pub width: u32,
    /// Most GPUs looked at, over all; at least so many that all of them can be looked at [`LOOKS`] times. Counted, not timed: the same input gives the same answer on any machine.
    pub work: u64,
}

impl Limits {
    /// Finds the fewest moves nearly always, in milliseconds.
    pub const USUAL: Self = Self { moves: 4, width: 4, work: 50_000 };
}

/// A pod's new place.
#[derive(Clone, Debug)]
pub struct Move {
    /// Who is moved.
    pub tenant: TenantId,
    /// Where to.
    pub node: NodeIndex,
    /// To what.
    pub place: Rc<Solution>,
}

/// Room for a request, once everybody in the way has moved.
#[derive(Clone, Debug)]
pub struct Room {
    /// Those who move.
    pub moves: Vec<Move>,
    /// The request's node.
    pub node: NodeIndex,
    /// Its devices.
    pub place: Rc<Solution>,
}

/// What the search found.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Room.
    Found(Room),
    /// With so many moves there is none: everything was tried.
    Nothing,
    /// None was found within the set amount of work, or not everything was tried.
    GaveUp,
}

/// Searches room for a request that has no place as things are. Fleet and tenants are the same afterwards: to carry it
/// out is [`carry_out`].
pub fn make_room<'r>(
    fleet: &mut Fleet<'_>,
    tenants: &mut Tenants<'r>,
    asked: Numbered<'r>,
    limits: Limits,
) -> Outcome {
    let gpus: usize = (0..fleet.nodes()).map(|node| fleet.gpus(node).len()).sum();
    let work = limits.work.max(LOOKS * gpus as u64);
    let plain = plain(fleet, tenants, asked, limits.moves);
    let mut search = Search {
        fleet,
        tenants,
        limits,
        moves: 0,
        work,
        cut: false,
        plain,
        placed: Vec::new(),
        evicted: Vec::new(),
    };
    for moves in 1..=limits.moves {
        search.moves = moves;
        if search.place(&mut vec![(None, asked)], moves) {
            return Outcome::Found(search.room());
        }
        if search.work == 0 {
            return Outcome::GaveUp;
        }
    }
    if search.cut { Outcome::GaveUp } else { Outcome::Nothing }
}

/// Whether GPUs alone decide: those who may move have one device each, of any GPU that will do, avoid no node, and each
/// node has the resources for the request and so many of them, whoever they are.
fn plain(fleet: &Fleet<'_>, tenants: &Tenants<'_>, asked: Numbered<'_>, moves: u32) -> bool {
    let mut needs: BTreeMap<&str, i128> = BTreeMap::new();
    let movable = || tenants.all.values().filter(|tenant| tenant.price.is_some()).map(|tenant| tenant.asked);
    for (resource, &amount) in movable().chain([asked]).flat_map(|asked| &asked.request.pod.milli) {
        let most = needs.entry(resource).or_default();
        *most = amount.max(*most);
    }
    let pods = i128::from(moves) + 1;
    let enough = |node| {
        needs.iter().all(|(resource, &amount)| {
            amount == 0 || fleet.free(node, resource).is_some_and(|free| free >= amount.saturating_mul(pods))
        })
    };
    movable().all(|asked| fleet.is_single(asked.shape) && asked.request.avoid.is_empty())
        && (0..fleet.nodes()).all(enough)
}

/// Moves those who have to and takes the request's place.
pub fn carry_out<'r>(fleet: &mut Fleet<'_>, tenants: &mut Tenants<'r>, asked: Numbered<'r>, room: &Room) {
    let mut moving = Vec::new();
    for step in &room.moves {
        if let Some(tenant) = tenants.leave(step.tenant) {
            fleet.put_back(tenant.asked, tenant.node, &tenant.place);
            moving.push((step, tenant));
        }
    }
    fleet.take(asked, room.node, &room.place);
    for (step, tenant) in moving {
        fleet.take(tenant.asked, step.node, &step.place);
        let place = Rc::clone(&step.place);
        tenants.put_back(step.tenant, Tenant { node: step.node, place, ..tenant });
    }
}

/// Somebody without a place: the request (`None`) or one who gave way.
type Pending<'r> = (Option<TenantId>, Numbered<'r>);

struct Search<'s, 'a, 'r> {
    fleet: &'s mut Fleet<'a>,
    tenants: &'s mut Tenants<'r>,
    limits: Limits,
    /// Most moves at present.
    moves: u32,
    work: u64,
    /// Something was left out.
    cut: bool,
    /// See [`plain`].
    plain: bool,
    placed: Vec<(Pending<'r>, NodeIndex, Rc<Solution>)>,
    evicted: Vec<(TenantId, Tenant<'r>)>,
}

/// A place, and who is in its way.
struct Candidate {
    node: NodeIndex,
    place: Rc<Solution>,
    in_the_way: Vec<TenantId>,
    price: u32,
    /// Memory slices that have to be found elsewhere.
    slices: u32,
}

impl<'r> Search<'_, '_, 'r> {
    /// Places everybody with at most so many moves. On success `placed` has the places; fleet and tenants are as before
    /// either way.
    fn place(&mut self, pending: &mut Vec<Pending<'r>>, budget: u32) -> bool {
        let Some(one) = pending.pop() else { return true };
        // If nobody comes after, one free place is as good as another.
        let last = pending.is_empty();
        // Of GPUs in equal states one is tried, of several devices the best place of each node.
        self.cut |= !(last || self.plain && self.fleet.of_one_group(one.1));
        let free = self.fleet.places(one.1, if last { 1 } else { usize::MAX });
        self.work = self.work.saturating_sub(1 + free.len() as u64);
        for (node, place) in free {
            let before = self.fleet.gpus(node).to_vec();
            self.fleet.take(one.1, node, &place);
            self.placed.push((one, node, Rc::clone(&place)));
            let done = self.place(pending, budget);
            self.fleet.undo(node, &before, one.1.pod, -1);
            if done {
                return true;
            }
            self.placed.pop();
            if self.work == 0 {
                break;
            }
        }
        if budget > 0 && self.work > 0 {
            let mut chains = 0;
            for candidate in self.candidates(one.1, budget) {
                if (candidate.in_the_way.len() as u32) < budget {
                    chains += 1;
                    if self.moves > EXHAUSTIVE && chains > self.limits.width {
                        self.cut = true;
                        continue;
                    }
                }
                if self.displace(one, &candidate, pending, budget) {
                    return true;
                }
                if self.work == 0 {
                    break;
                }
            }
        }
        pending.push(one);
        false
    }

    /// Takes the candidate's place and places those who were in its way.
    fn displace(
        &mut self,
        one: Pending<'r>,
        candidate: &Candidate,
        pending: &mut Vec<Pending<'r>>,
        budget: u32,
    ) -> bool {
        let Candidate { node, place, in_the_way, .. } = candidate;
        let before = self.fleet.gpus(*node).to_vec();
        let (waiting, moved) = (pending.len(), self.evicted.len());
        for &id in in_the_way {
            let Some(tenant) = self.tenants.leave(id) else { continue };
            self.fleet.put_back(tenant.asked, *node, &tenant.place);
            pending.push((Some(id), tenant.asked));
            self.evicted.push((id, tenant));
        }
        // The largest is placed first.
        pending[waiting..].sort_by_key(|(_, asked)| self.fleet.least_slices(asked.shape));
        self.fleet.take(one.1, *node, place);
        self.placed.push((one, *node, Rc::clone(place)));
        let mut rest = pending.clone();
        let done = self.place(&mut rest, budget - in_the_way.len() as u32);
        pending.truncate(waiting);
        self.fleet.undo(*node, &before, one.1.pod, -1);
        for (id, tenant) in self.evicted.split_off(moved) {
            self.fleet.use_resources(tenant.asked.pod, *node, 1);
            self.tenants.put_back(id, tenant);
        }
        if !done {
            self.placed.pop();
        }
        done
    }

    /// Places that somebody would have if at most so many tenants gave way, the most promising first. Of places of a
    /// node that are alike in everything that matters only one is listed.
    fn candidates(&mut self, asked: Numbered<'r>, budget: u32) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for node in 0..self.fleet.nodes() {
            let here = if self.fleet.is_single(asked.shape) {
                self.on_one_gpu(asked, node, budget)
            } else {
                self.on_one_node(asked, node, budget)
            };
            candidates.extend(here);
        }
        candidates.retain(|candidate| {
            // If nobody else may be displaced, each of those in the way needs free room.
            let stays = (candidate.in_the_way.len() as u32) < budget || self.all_have_room(candidate);
            self.cut |= !(stays || self.plain);
            stays
        });
        candidates.sort_by_key(|c| {
            let gpu = c.place.devices.first().map_or(0, |chosen| chosen.gpu);
            (c.in_the_way.len(), c.price, c.slices, c.place.cost, self.fleet.rank_of(c.node, gpu))
        });
        candidates
    }

    /// For a request of one device: every placement of every GPU, with those whom it overlaps. Where slices are not what
    /// is short, others may have to go.
    fn on_one_gpu(&mut self, asked: Numbered<'r>, node: NodeIndex, budget: u32) -> Vec<Candidate> {
        let (mut candidates, mut short, mut seen) = (Vec::new(), false, HashSet::new());
        let lacking = !self.fleet.fits(node, asked);
        for gpu in 0..self.fleet.gpus(node).len() {
            self.work = self.work.saturating_sub(1);
            let there = self.tenants.on(node, gpu).to_vec();
            if there.is_empty() {
                short |= lacking && self.fleet.offers_any(asked, self.fleet.gpus(node)[gpu]);
                continue;
            }
            for (alternative, device) in self.fleet.devices(asked, node, gpu) {
                let in_the_way: Vec<TenantId> =
                    there.iter().copied().filter(|&id| self.overlaps(id, gpu, device)).collect();
                // The slices are free, and yet it has no place: engines are short, or the node's other resources.
                if in_the_way.is_empty()
                    && self.fleet.state(node, gpu).is_free(self.fleet.catalog.geometries(), device)
                {
                    let state = self.fleet.gpus(node)[gpu];
                    short |= lacking || self.fleet.offer(asked, state, gpu, alternative, device).is_none();
                }
                if in_the_way.is_empty() || in_the_way.len() > budget as usize {
                    continue;
                }
                let likeness = (self.fleet.gpus(node)[gpu], device, self.kinds(&in_the_way));
                if seen.contains(&likeness) && self.have_one_device(&in_the_way) {
                    continue;
                }
                match self.instead_of(asked, node, gpu, alternative, device, in_the_way) {
                    Some(candidate) => {
                        seen.insert(likeness);
                        candidates.push(candidate);
                    }
                    None => short |= lacking,
                }
            }
        }
        if short {
            candidates.extend(self.on_one_node(asked, node, budget));
        }
        candidates
    }

    /// Every set of tenants of the node. Needed for several devices, and where slices are not what is short.
    fn on_one_node(&mut self, asked: Numbered<'r>, node: NodeIndex, budget: u32) -> Vec<Candidate> {
        // Not all sets are tried, and of each only the best place.
        self.cut = true;
        let gpus = 0..self.fleet.gpus(node).len();
        let mut there: Vec<TenantId> = gpus.flat_map(|gpu| self.tenants.on(node, gpu).to_vec()).collect();
        there.sort_unstable();
        there.dedup();
        there.retain(|&id| self.tenants.get(id).is_some_and(|tenant| tenant.price.is_some()));
        let mut candidates = Vec::new();
        let mut set: Vec<usize> = Vec::new();
        // The smallest that make room.
        for size in 1..=(budget as usize).min(there.len()) {
            set.clear();
            set.extend(0..size);
            loop {
                if self.work == 0 || candidates.len() > 8 {
                    return candidates;
                }
                self.work = self.work.saturating_sub(self.fleet.gpus(node).len() as u64);
                let in_the_way = set.iter().map(|&i| there[i]).collect();
                candidates.extend(self.without(asked, node, in_the_way));
                let Some(turn) = (0..size).rev().find(|&i| set[i] < there.len() - size + i) else { break };
                set[turn] += 1;
                for i in turn + 1..size {
                    set[i] = set[i - 1] + 1;
                }
            }
            if !candidates.is_empty() {
                break;
            }
        }
        candidates
    }

    /// The candidate that has exactly this device, if it is free once these are gone and the node can take the pod.
    fn instead_of(
        &mut self,
        asked: Numbered<'r>,
        node: NodeIndex,
        gpu: GpuIndex,
        alternative: usize,
        device: Device,
        in_the_way: Vec<TenantId>,
    ) -> Option<Candidate> {
        if !self.tenants.may_go(&in_the_way) {
            return None;
        }
        let mut state = self.fleet.gpus(node)[gpu];
        let (mut price, mut slices, mut pods) = (0u32, 0, Vec::with_capacity(in_the_way.len()));
        for &id in &in_the_way {
            let tenant = self.tenants.get(id)?;
            price = price.saturating_add(tenant.price?);
            slices = self.fleet.least_slices(tenant.asked.shape).saturating_add(slices);
            pods.push(tenant.asked.pod);
            for chosen in tenant.place.devices.iter().filter(|chosen| chosen.gpu == gpu) {
                state = self.fleet.catalog.returned(state, chosen.offer.device);
            }
        }
        if !self.fleet.fits_without(node, asked, &pods) {
            return None;
        }
        let place = self.fleet.offer(asked, state, gpu, alternative, device)?;
        Some(Candidate { node, place, in_the_way, price, slices })
    }

    /// The candidate that has the node's best place once these are gone, if there is one and the node can take the pod.
    fn without(
        &mut self,
        asked: Numbered<'r>,
        node: NodeIndex,
        in_the_way: Vec<TenantId>,
    ) -> Option<Candidate> {
        if !self.tenants.may_go(&in_the_way) {
            return None;
        }
        let before = self.fleet.gpus(node).to_vec();
        let (mut price, mut slices) = (0u32, 0);
        let mut gone = Vec::new();
        for &id in &in_the_way {
            let tenant = self.tenants.get(id)?;
            let (asked, place) = (tenant.asked, Rc::clone(&tenant.place));
            price = price.saturating_add(tenant.price?);
            slices = self.fleet.least_slices(asked.shape).saturating_add(slices);
            gone.push((asked, place));
        }
        for (asked, place) in &gone {
            self.fleet.put_back(*asked, node, place);
        }
        let place = if self.fleet.fits(node, asked) { self.fleet.place_on(asked, node) } else { None };
        self.fleet.undo(node, &before, asked.pod, 0);
        for (asked, _) in &gone {
            self.fleet.use_resources(asked.pod, node, 1);
        }
        place.map(|place| Candidate { node, place, in_the_way, price, slices })
    }

    fn have_one_device(&self, tenants: &[TenantId]) -> bool {
        let one = |id: &TenantId| self.tenants.get(*id).is_some_and(|tenant| tenant.place.devices.len() == 1);
        tenants.iter().all(one)
    }

    /// Whether each of those in the way, by itself, finds free room: anywhere now, or afterwards where it was. If one has
    /// several devices, they count as if they did.
    fn all_have_room(&mut self, candidate: &Candidate) -> bool {
        let one_each = self.have_one_device(&candidate.in_the_way);
        !one_each
            || candidate.in_the_way.iter().all(|id| {
                let Some(asked) = self.tenants.get(*id).map(|tenant| tenant.asked) else { return false };
                let afterwards = candidate.place.devices.iter().map(|chosen| chosen.offer.after);
                !self.fleet.is_single(asked.shape)
                    || candidate.place.devices.len() > 1
                    || afterwards.into_iter().any(|state| self.fleet.offers_any(asked, state))
                    || self.fleet.has_room(asked)
            })
    }

    fn overlaps(&self, id: TenantId, gpu: GpuIndex, device: Device) -> bool {
        let Some(tenant) = self.tenants.get(id) else { return false };
        let geometry = self.fleet.state(tenant.node, gpu).geometry;
        let of = |device: Device| match (device.instance(), geometry) {
            (Some((profile, start)), Some(geometry)) => self.fleet.catalog.geometries()[geometry]
                .profiles
                .get(profile)
                .map_or(u64::MAX, |shape| slices(start, shape.size)),
            _ => u64::MAX,
        };
        let here = tenant.place.devices.iter().filter(|chosen| chosen.gpu == gpu);
        here.into_iter().any(|chosen| of(chosen.offer.device) & of(device) != 0)
    }

    fn kinds(&self, tenants: &[TenantId]) -> Vec<(ShapeId, PodId, Option<u32>, &'r [BudgetIndex])> {
        let of = |&id: &TenantId| {
            let tenant = self.tenants.get(id)?;
            Some((tenant.asked.shape, tenant.asked.pod, tenant.price, tenant.budgets))
        };
        let mut kinds: Vec<_> = tenants.iter().filter_map(of).collect();
        kinds.sort_unstable();
        kinds
    }

    fn room(&mut self) -> Room {
        let mut moves = Vec::new();
        let mut of_request = None;
        for ((tenant, _), node, place) in self.placed.drain(..) {
            match tenant {
                Some(tenant) => moves.push(Move { tenant, node, place }),
                None => of_request = Some((node, place)),
            }
        }
        // The last that was displaced went to free room: its place is there before the others'.
        moves.reverse();
        let (node, place) = of_request.unwrap_or_default();
        Room { moves, node, place }
    }
}
