//! The cluster as it fills and empties: which GPU is in which state, what is left on each node, and for a request the
//! cheapest place.
//!
//! A request for one device is answered from an index of GPUs by state: the time depends on the number of distinct
//! states, not of GPUs. For one of several devices each node is searched once and again only after it has changed.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::rc::Rc;

use crate::catalog::{Catalog, Offer, StateId, WantId};
use crate::index::{GROUPS, GroupId, Index, Seat};
use crate::nodes::{self, Misfit};
use crate::occupancy::{Device, GpuState};
use crate::place::{self, Answer, Chosen, Solution};
use crate::shape::Shape;
use crate::snapshot::{
    Gpu, GpuIndex, Instance, InstanceState, Node, NodeIndex, PlacedDevice, PlannedInstance, PodNeeds,
    Request, Snapshot, Strategy, Want,
};
use crate::value::Cost;

/// Number of distinct device needs and constraints.
pub type ShapeId = usize;
/// Number of distinct [`PodNeeds`].
pub type PodId = usize;
/// Number of a distinct choice of nodes.
type SelectionId = usize;
/// Number of the name of a resource.
type ResourceId = usize;

/// A request of which the parts are numbered.
#[derive(Clone, Copy, Debug)]
pub struct Numbered<'r> {
    /// The request itself.
    pub request: &'r Request,
    /// Its devices and constraints.
    pub shape: ShapeId,
    /// What its pod needs of a node.
    pub pod: PodId,
}

/// See the module.
#[derive(Debug)]
pub struct Fleet<'a> {
    /// What the fleet was made from; its requests play no part.
    pub snapshot: &'a Snapshot,
    /// What GPUs can give.
    pub catalog: Catalog<'a>,
    nodes: Vec<NodeNow>,
    /// The GPUs that can give anything.
    index: Index,
    /// Number of groups of nodes, see [`crate::index`].
    groups: usize,
    /// By hash of devices and constraints.
    shape_numbers: HashMap<u64, Vec<ShapeId>>,
    shapes: Vec<Rc<Shape>>,
    /// By shape.
    answers: Vec<Answers>,
    pod_numbers: HashMap<PodNeeds, PodId>,
    pods: Vec<Pod>,
    /// By what pods ask of nodes, amounts aside.
    selection_numbers: HashMap<PodNeeds, SelectionId>,
    selections: Vec<Selection>,
    resources: BTreeMap<String, ResourceId>,
}

#[derive(Debug)]
struct NodeNow {
    gpus: Vec<StateId>,
    /// By resource; `None`: the node has no such resource.
    free_milli: Vec<Option<i128>>,
    /// With `Pack` fuller nodes come first, with `Spread` emptier ones.
    crowding: i64,
    /// The beginning of the smallest UUID: the last tie-break, in which names of nodes play no part.
    rank: u128,
    /// Nodes that no pod has told apart so far are of one group.
    group: GroupId,
    /// Grows whenever a GPU changes.
    version: u32,
}

/// Most steps of the searches for a shape, over all nodes.
const WORK: u32 = 1_000_000;

/// What was worked out for a shape.
#[derive(Debug, Default)]
struct Answers {
    /// Steps that it took.
    steps: u32,
    /// By node: the version for which it was worked out, and the answer.
    by_node: Vec<Option<(u32, Answer)>>,
    /// By the states of a node's GPUs.
    like: HashMap<Vec<StateId>, Answer>,
}

/// Which nodes suit a pod, amounts of resources aside.
#[derive(Debug)]
struct Selection {
    /// By node.
    unsuitable: Vec<Option<Misfit>>,
    /// By group: whether any of its nodes suits.
    suits: Vec<bool>,
}

#[derive(Debug)]
struct Pod {
    selection: SelectionId,
    /// By name of the resource.
    milli: Vec<(String, ResourceId, i128)>,
}

impl<'a> Fleet<'a> {
    /// The cluster of the snapshot.
    pub fn of(snapshot: &'a Snapshot) -> Self {
        let mut fleet = Self {
            snapshot,
            catalog: Catalog::of(snapshot),
            nodes: Vec::with_capacity(snapshot.nodes.len()),
            index: Index::default(),
            groups: 1,
            shape_numbers: HashMap::new(),
            shapes: Vec::new(),
            answers: Vec::new(),
            pod_numbers: HashMap::new(),
            pods: Vec::new(),
            selection_numbers: HashMap::new(),
            selections: Vec::new(),
            resources: BTreeMap::new(),
        };
        for (index, node) in snapshot.nodes.iter().enumerate() {
            let now = fleet.node_now(node);
            fleet.nodes.push(now);
            for gpu in 0..node.gpus.len() {
                fleet.seat(index, gpu);
            }
        }
        fleet
    }

    fn node_now(&mut self, node: &Node) -> NodeNow {
        let states = node.gpus.iter().map(|gpu| GpuState::of(gpu, &self.snapshot.geometries));
        let gpus: Vec<StateId> = states.map(|state| self.catalog.number(state)).collect();
        let mut free_milli = Vec::new();
        for (resource, &free) in &node.free_milli {
            let id = self.resource(resource);
            free_milli.resize(free_milli.len().max(id + 1), None);
            free_milli[id] = Some(free);
        }
        let crowding = self.crowding(&gpus);
        NodeNow { gpus, free_milli, crowding, rank: rank(&node.gpus), group: 0, version: 0 }
    }

    fn resource(&mut self, name: &str) -> ResourceId {
        if let Some(&id) = self.resources.get(name) {
            return id;
        }
        self.resources.insert(name.to_owned(), self.resources.len());
        self.resources.len() - 1
    }

    /// Free slices, and their negative where emptier nodes come first, to four: a smaller difference is not worth the
    /// changes of the index.
    fn crowding(&self, gpus: &[StateId]) -> i64 {
        let signed = |&id: &StateId| {
            let free = i64::from(self.catalog.free_slices(id));
            if self.catalog.state(id).strategy == Strategy::Spread { -free } else { free }
        };
        gpus.iter().map(signed).sum::<i64>() >> 2
    }

    /// Enters a GPU of the node into the index, as it is now.
    fn seat(&mut self, node: NodeIndex, gpu: GpuIndex) {
        let now = &self.nodes[node];
        let state = now.gpus[gpu];
        if self.catalog.gives(state) {
            self.index.insert(state, now.group, Seat { crowding: now.crowding, rank: now.rank, node, gpu });
        }
    }

    fn unseat(&mut self, node: NodeIndex, gpu: GpuIndex) {
        let now = &self.nodes[node];
        let state = now.gpus[gpu];
        if self.catalog.gives(state) {
            self.index.remove(state, now.group, Seat { crowding: now.crowding, rank: now.rank, node, gpu });
        }
    }

    /// The states of a node's GPUs.
    pub fn gpus(&self, node: NodeIndex) -> &[StateId] {
        &self.nodes[node].gpus
    }

    /// A GPU's state.
    pub fn state(&self, node: NodeIndex, gpu: GpuIndex) -> &GpuState {
        self.catalog.state(self.nodes[node].gpus[gpu])
    }

    /// Place of a GPU in the order that decides between equal ones.
    pub fn rank_of(&self, node: NodeIndex, gpu: GpuIndex) -> (u128, NodeIndex, GpuIndex) {
        (self.nodes[node].rank, node, gpu)
    }

    /// The request with the numbers of its parts.
    pub fn numbered<'r>(&mut self, request: &'r Request) -> Numbered<'r> {
        Numbered { request, shape: self.shape_of(request), pod: self.pod_of(&request.pod) }
    }

    fn shape_of(&mut self, request: &Request) -> ShapeId {
        let mut hasher = DefaultHasher::new();
        (&request.devices, &request.constraints).hash(&mut hasher);
        let hash = hasher.finish();
        let same = |&&id: &&ShapeId| {
            let shape = &self.shapes[id];
            shape.devices == request.devices && shape.constraints == request.constraints
        };
        if let Some(&id) = self.shape_numbers.get(&hash).into_iter().flatten().find(same) {
            return id;
        }
        let shape = Shape::of(&request.devices, &request.constraints, &mut self.catalog);
        self.shapes.push(Rc::new(shape));
        self.answers.push(Answers::default());
        self.shape_numbers.entry(hash).or_default().push(self.shapes.len() - 1);
        self.shapes.len() - 1
    }

    fn pod_of(&mut self, pod: &PodNeeds) -> PodId {
        if let Some(&id) = self.pod_numbers.get(pod) {
            return id;
        }
        let selection = self.selection_of(pod);
        let needed = pod.milli.iter().filter(|&(_, &needs)| needs > 0);
        let milli = needed.map(|(name, &needs)| (name.clone(), self.resource(name), needs)).collect();
        self.pods.push(Pod { selection, milli });
        self.pod_numbers.insert(pod.clone(), self.pods.len() - 1);
        self.pods.len() - 1
    }

    fn selection_of(&mut self, pod: &PodNeeds) -> SelectionId {
        let amounts_aside = PodNeeds { milli: BTreeMap::new(), ..pod.clone() };
        if let Some(&id) = self.selection_numbers.get(&amounts_aside) {
            return id;
        }
        let unsuitable: Vec<Option<Misfit>> =
            self.snapshot.nodes.iter().map(|node| nodes::unsuitable(node, pod)).collect();
        let suits = self.tell_apart(&unsuitable);
        self.selections.push(Selection { unsuitable, suits });
        self.selection_numbers.insert(amounts_aside, self.selections.len() - 1);
        self.selections.len() - 1
    }

    /// Splits the groups of which some nodes suit and others do not. Answers which groups suit.
    fn tell_apart(&mut self, unsuitable: &[Option<Misfit>]) -> Vec<bool> {
        // Whether there are nodes that suit, and nodes that do not.
        let mut kinds = vec![(false, false); self.groups];
        for (now, misfit) in self.nodes.iter().zip(unsuitable) {
            let (suits, not) = &mut kinds[now.group];
            *suits |= misfit.is_none();
            *not |= misfit.is_some();
        }
        let mut suits: Vec<bool> = kinds.iter().map(|&(suits, _)| suits).collect();
        for (group, &kind) in kinds.iter().enumerate() {
            if kind != (true, true) || self.groups == GROUPS {
                continue;
            }
            for (node, misfit) in unsuitable.iter().enumerate() {
                if self.nodes[node].group == group && misfit.is_some() {
                    let gpus = 0..self.nodes[node].gpus.len();
                    gpus.clone().for_each(|gpu| self.unseat(node, gpu));
                    self.nodes[node].group = self.groups;
                    gpus.for_each(|gpu| self.seat(node, gpu));
                }
            }
            self.groups += 1;
            suits.push(false);
            for selection in &mut self.selections {
                selection.suits.push(selection.suits[group]);
            }
        }
        suits
    }

    /// Why the node cannot take the pod, GPUs aside.
    pub fn misfit(&self, node: NodeIndex, asked: Numbered<'_>) -> Option<Misfit> {
        if asked.request.avoid.contains(&node) {
            return Some(Misfit::Avoided);
        }
        let pod = &self.pods[asked.pod];
        let lacking = |(name, id, needs): &(String, ResourceId, i128)| {
            let free = self.nodes[node].free_milli.get(*id).copied().flatten();
            nodes::lacks(name, free, *needs)
        };
        self.selections[pod.selection].unsuitable[node].clone().or_else(|| pod.milli.iter().find_map(lacking))
    }

    /// Whether the node can take the pod, GPUs aside.
    pub fn fits(&self, node: NodeIndex, asked: Numbered<'_>) -> bool {
        self.fits_without(node, asked, &[])
    }

    /// Whether the node could take the pod, GPUs aside, if pods like these left it.
    pub fn fits_without(&self, node: NodeIndex, asked: Numbered<'_>, gone: &[PodId]) -> bool {
        let (pod, free) = (&self.pods[asked.pod], &self.nodes[node].free_milli);
        let freed = |id: ResourceId| -> i128 {
            let of = |&pod: &PodId| self.pods[pod].milli.iter().filter(|(_, other, _)| *other == id);
            gone.iter().flat_map(of).map(|(_, _, needs)| needs).sum()
        };
        let enough = |&(_, id, needs): &(_, ResourceId, i128)| {
            free.get(id).copied().flatten().is_some_and(|free| free >= needs || free + freed(id) >= needs)
        };
        let unsuitable = &self.selections[pod.selection].unsuitable[node];
        unsuitable.is_none() && pod.milli.iter().all(enough) && !asked.request.avoid.contains(&node)
    }

    /// The cheapest place for the request, if there is one. Equal prices are decided by crowding, then by UUID.
    pub fn best(&mut self, asked: Numbered<'_>) -> Option<(NodeIndex, Rc<Solution>)> {
        if self.shapes[asked.shape].single {
            return self.best_single(asked).map(|(node, solution)| (node, Rc::new(solution)));
        }
        let mut best: Option<(NodeIndex, Rc<Solution>)> = None;
        for node in 0..self.nodes.len() {
            if !self.fits(node, asked) {
                continue;
            }
            let Some(solution) = self.place_on(asked, node) else { continue };
            let now = |node: NodeIndex| (self.nodes[node].crowding, self.nodes[node].rank, node);
            let better = best.as_ref().is_none_or(|(other, than)| {
                (&solution.choice, solution.cost, now(node)) < (&than.choice, than.cost, now(*other))
            });
            if better {
                best = Some((node, solution));
            }
        }
        best
    }

    fn best_single(&mut self, asked: Numbered<'_>) -> Option<(NodeIndex, Solution)> {
        for alternative in 0..self.shapes[asked.shape].wants[0].len() {
            let want = self.shapes[asked.shape].wants[0][alternative];
            self.rank(want);
            let mut best: Option<(Cost, Seat, StateId)> = None;
            for (cost, state) in self.catalog.ranking(want) {
                if best.is_some_and(|(lowest, _, _)| lowest < cost) {
                    break;
                }
                let Some(seat) = self.first_seat(state, asked) else { continue };
                if best.is_none_or(|(_, other, _)| seat < other) {
                    best = Some((cost, seat, state));
                }
            }
            let Some((_, seat, state)) = best else { continue };
            let offer = self.catalog.offers(state, want)[0];
            return Some((seat.node, single(alternative, seat.gpu, offer)));
        }
        None
    }

    fn rank(&mut self, want: WantId) {
        let (epoch, met) = self.index.met();
        self.catalog.rank(want, epoch, met);
    }

    /// The first GPU in the state whose node can take the pod.
    fn first_seat(&self, state: StateId, asked: Numbered<'_>) -> Option<Seat> {
        let suits = &self.selections[self.pods[asked.pod].selection].suits;
        self.index.first(state, |group| suits[group], |node| self.fits(node, asked))
    }

    /// Up to `most` places for the request, cheapest first; of places on GPUs in equal states only one. For several
    /// devices only the best is listed.
    pub fn places(&mut self, asked: Numbered<'_>, most: usize) -> Vec<(NodeIndex, Rc<Solution>)> {
        if most == 1 || !self.shapes[asked.shape].single {
            return self.best(asked).into_iter().collect();
        }
        let mut places = Vec::new();
        for alternative in 0..self.shapes[asked.shape].wants[0].len() {
            let want = self.shapes[asked.shape].wants[0][alternative];
            self.rank(want);
            let seats: Vec<(StateId, Seat)> = self
                .catalog
                .ranking(want)
                .filter_map(|(_, state)| Some((state, self.first_seat(state, asked)?)))
                .collect();
            for (state, seat) in seats {
                let offers = self.catalog.offers(state, want);
                let of = |offer: &Offer| (seat.node, Rc::new(single(alternative, seat.gpu, *offer)));
                places.extend(offers.iter().map(of));
            }
        }
        places.sort_by_key(|(_, place)| (place.choice[0], place.cost));
        places.truncate(most);
        places
    }

    /// Whether the shape is one device, on any GPU that will do.
    pub fn is_single(&self, shape: ShapeId) -> bool {
        self.shapes[shape].single
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Every device that would do for a request of one, were the GPU empty, with the alternative that it is of.
    pub fn devices(&self, asked: Numbered<'_>, node: NodeIndex, gpu: GpuIndex) -> Vec<(usize, Device)> {
        let state = self.state(node, gpu);
        let mut devices = Vec::new();
        for (alternative, want) in asked.request.devices[0].alternatives.iter().enumerate() {
            if want.whole {
                devices.push((alternative, Device::Whole));
            }
            let Some(index) = state.geometry else { continue };
            for &profile in want.profiles.get(&index).into_iter().flatten() {
                let starts =
                    self.catalog.geometries()[index].profiles.get(profile).map_or(&[][..], |p| &p.starts);
                devices
                    .extend(starts.iter().map(|&start| (alternative, Device::Instance { profile, start })));
            }
        }
        devices
    }

    /// The place that has exactly this device, if the GPU, in this state, can give it.
    pub fn offer(
        &mut self,
        asked: Numbered<'_>,
        state: StateId,
        gpu: GpuIndex,
        alternative: usize,
        device: Device,
    ) -> Option<Rc<Solution>> {
        let want = self.shapes[asked.shape].wants[0][alternative];
        let offers = self.catalog.offers(state, want);
        let offer = offers.iter().find(|offer| offer.device == device)?;
        Some(Rc::new(single(alternative, gpu, *offer)))
    }

    /// Whether a GPU in the state has something for a request of one device.
    pub fn offers_any(&mut self, asked: Numbered<'_>, state: StateId) -> bool {
        let alternatives = 0..self.shapes[asked.shape].wants[0].len();
        alternatives.into_iter().any(|alternative| {
            let want = self.shapes[asked.shape].wants[0][alternative];
            !self.catalog.offers(state, want).is_empty()
        })
    }

    /// Whether a request of one device has a place.
    pub fn has_room(&mut self, asked: Numbered<'_>) -> bool {
        self.best_single(asked).is_some()
    }

    /// The best place on the node.
    pub fn place_on(&mut self, asked: Numbered<'_>, node: NodeIndex) -> Option<Rc<Solution>> {
        match self.answer(asked, node) {
            Answer::Found(solution) => Some(solution),
            Answer::Nothing | Answer::GaveUp => None,
        }
    }

    /// The fewest memory slices that a request of the shape takes.
    pub fn least_slices(&self, shape: ShapeId) -> u32 {
        self.shapes[shape].least_slices
    }

    /// The best place for the request on a node whose other resources are left aside.
    pub fn answer(&mut self, asked: Numbered<'_>, node: NodeIndex) -> Answer {
        let now = &self.nodes[node];
        let (shape, answers) = (&self.shapes[asked.shape], &mut self.answers[asked.shape]);
        answers.by_node.resize(self.nodes.len(), None);
        if let Some((version, answer)) = &answers.by_node[node]
            && *version == now.version
        {
            return answer.clone();
        }
        let known = if shape.by_name { None } else { answers.like.get(&now.gpus).cloned() };
        let most = place::WORK.min(WORK - answers.steps);
        let answer = known.unwrap_or_else(|| {
            let (answer, steps) = place::on_node(&mut self.catalog, shape, node, &now.gpus, most);
            answers.steps = WORK.min(answers.steps + steps);
            answer
        });
        answers.by_node[node] = Some((now.version, answer.clone()));
        if !shape.by_name {
            answers.like.insert(now.gpus.clone(), answer.clone());
        }
        answer
    }

    /// The place of somebody who has these devices; `None` if they are not all somebody's and there, or do not serve the
    /// request's needs.
    pub fn held(&self, asked: Numbered<'_>, node: NodeIndex, devices: &[PlacedDevice]) -> Option<Solution> {
        let contents = self.snapshot.nodes.get(node)?;
        let mut place = Solution::default();
        let mut rest = devices;
        for (need, wanted) in asked.request.devices.iter().enumerate() {
            let first = rest.first().filter(|device| device.request == wanted.name)?;
            let chosen = |want: &Want| want.subrequest == first.subrequest;
            let alternative = wanted.alternatives.iter().position(chosen)?;
            let count = wanted.alternatives[alternative].count as usize;
            let (these, others) = rest.split_at_checked(count)?;
            for device in these {
                let gpu = contents.gpus.get(device.gpu)?;
                let held = match device.instance {
                    None => gpu.taken_whole.then_some(Device::Whole)?,
                    Some(PlannedInstance { profile, start, .. }) => {
                        let it = |one: &&Instance| one.profile == Some(profile) && one.start == start;
                        let there = gpu.instances.iter().find(it)?;
                        let held = there.exists && there.state == InstanceState::Taken;
                        held.then_some(Device::Instance { profile, start })?
                    }
                };
                let after = self.nodes[node].gpus[device.gpu];
                let offer = Offer { device: held, exists: true, after, cost: Cost::default() };
                place.devices.push(Chosen { need, alternative, gpu: device.gpu, offer });
            }
            place.choice.push(alternative);
            rest = others;
        }
        rest.is_empty().then_some(place)
    }

    /// Takes the place.
    pub fn take(&mut self, asked: Numbered<'_>, node: NodeIndex, solution: &Solution) {
        self.change(node, |catalog, gpus| {
            for chosen in &solution.devices {
                gpus[chosen.gpu] = catalog.given(gpus[chosen.gpu], chosen.offer.device);
            }
        });
        self.use_resources(asked.pod, node, 1);
    }

    /// Gives back what [`Fleet::take`] took.
    pub fn put_back(&mut self, asked: Numbered<'_>, node: NodeIndex, solution: &Solution) {
        self.change(node, |catalog, gpus| {
            for chosen in &solution.devices {
                gpus[chosen.gpu] = catalog.returned(gpus[chosen.gpu], chosen.offer.device);
            }
        });
        self.use_resources(asked.pod, node, -1);
    }

    /// Counts a pod's needs as used, `times` times; negative: as free again.
    pub fn use_resources(&mut self, pod: PodId, node: NodeIndex, times: i128) {
        for &(_, id, needs) in &self.pods[pod].milli {
            if let Some(Some(free)) = self.nodes[node].free_milli.get_mut(id) {
                *free = free.saturating_sub(times * needs);
            }
        }
    }

    /// Sets the node's GPUs back to these states, and a pod's needs as used `times` times more.
    pub fn undo(&mut self, node: NodeIndex, gpus: &[StateId], pod: PodId, times: i128) {
        self.change(node, |_, now| now.copy_from_slice(gpus));
        self.use_resources(pod, node, times);
    }

    /// Gives a device away.
    pub fn give(&mut self, node: NodeIndex, gpu: GpuIndex, device: Device) {
        self.change(node, |catalog, gpus| gpus[gpu] = catalog.given(gpus[gpu], device));
    }

    fn change(&mut self, node: NodeIndex, change: impl FnOnce(&mut Catalog<'a>, &mut [StateId])) {
        let before = self.nodes[node].gpus.clone();
        let mut after = before.clone();
        change(&mut self.catalog, &mut after);
        let crowding = self.crowding(&after);
        // The others stay where they are, unless the node's place in the order changes.
        let all = crowding != self.nodes[node].crowding;
        let changed: Vec<GpuIndex> =
            (0..before.len()).filter(|&gpu| all || before[gpu] != after[gpu]).collect();
        changed.iter().for_each(|&gpu| self.unseat(node, gpu));
        let now = &mut self.nodes[node];
        (now.gpus, now.crowding) = (after, crowding);
        now.version += 1;
        changed.iter().for_each(|&gpu| self.seat(node, gpu));
    }
}

fn single(alternative: usize, gpu: GpuIndex, offer: Offer) -> Solution {
    let devices = vec![Chosen { need: 0, alternative, gpu, offer }];
    Solution { choice: vec![alternative], cost: offer.cost, devices }
}

/// The first 16 bytes of the node's smallest UUID, as a number in the same order.
fn rank(gpus: &[Gpu]) -> u128 {
    let first = |gpu: &Gpu| {
        let mut bytes = [0; 16];
        for (byte, of_uuid) in bytes.iter_mut().zip(gpu.uuid.bytes()) {
            *byte = of_uuid;
        }
        u128::from_be_bytes(bytes)
    };
    gpus.iter().map(first).min().unwrap_or(u128::MAX)
}
