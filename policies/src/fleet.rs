//! The cluster as it fills and empties: which GPU is in which state, what is left on each node, and for a request the
//! cheapest place.
//!
//! A request for one device is answered from an index of GPUs by state: the time depends on the number of distinct
//! states, not of GPUs. For one of several devices, and where the demand is known, nodes are kept in the order of their
//! prices, and each is searched once and again only after it has changed.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::rc::Rc;
use std::sync::Arc;

use crate::catalog::{Catalog, Offer, StateId, WantId};
use crate::demand::{self, Asked, Demand};
use crate::index::{GROUPS, GroupId, Index, Seat};
use crate::nodes::{self, Misfit};
use crate::occupancy::{Device, GpuState};
use crate::place::{self, Answer, Chosen, Solution};
use crate::shape::Shape;
use crate::snapshot::{
    self, Gpu, GpuIndex, Instance, InstanceState, Node, NodeIndex, PlacedDevice, PodNeeds, Request, Snapshot,
    Strategy, TakenShare, Want,
};
use crate::standings::{Entry, Standings};
use crate::value::{Cost, Likeness, Weights};

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
    pub catalog: Catalog,
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
    /// See [`Fleet::emptied`].
    emptied: Option<Rc<Vec<Arc<[StateId]>>>>,
    demand: Demand,
    /// By kind of request for one device: GPUs whose nodes could not take the pod, those of earlier requests for half,
    /// for a fourth and so on. Where they are too many, it is not the GPUs that decide, and the nodes are kept in order.
    passed_over: HashMap<(ShapeId, PodId), usize>,
    /// Of use for several devices, where there is a demand, and where other resources decide.
    standings: Standings<(ShapeId, PodId)>,
    likes: Likes,
    /// Nodes that may not be as in the snapshot.
    touched: BTreeSet<NodeIndex>,
}

/// What a fleet has of nodes alone, for the next fleet: it replaces those that have changed.
#[derive(Debug)]
pub struct Base {
    /// What it was made from.
    of: Vec<Arc<Node>>,
    catalog: Catalog,
    nodes: Vec<NodeNow>,
    index: Index,
    resources: BTreeMap<String, ResourceId>,
    likes: Likes,
}

/// Distinct lists of what decides about the weights of a node's open GPUs.
#[derive(Debug, Default)]
struct Likes {
    all: Vec<Vec<Likeness>>,
    numbers: HashMap<Vec<Likeness>, usize>,
    by_node: Vec<usize>,
}

impl Likes {
    fn number(&mut self, node: &Node) -> usize {
        let of: Vec<Likeness> = node.gpus.iter().filter_map(Likeness::of).collect();
        if let Some(&number) = self.numbers.get(&of) {
            return number;
        }
        self.all.push(of.clone());
        self.numbers.insert(of, self.all.len() - 1);
        self.all.len() - 1
    }

    fn counted(&self) -> impl Iterator<Item = (u64, &Likeness)> {
        let mut counts = vec![0; self.all.len()];
        self.by_node.iter().for_each(|&number| counts[number] += 1);
        counts.into_iter().zip(&self.all).flat_map(|(count, all)| all.iter().map(move |one| (count, one)))
    }
}

/// What has been met of states, wants and kinds of nodes is forgotten beyond so many.
const MET: usize = 1 << 16;

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
    /// See [`Fleet::emptied`].
    emptied: Option<Arc<[StateId]>>,
}

/// Most steps of the searches for a shape, over all nodes.
const WORK: u32 = 1_000_000;

/// See [`Fleet`]'s `passed_over`: about as much work as keeping the nodes in order.
const IN_VAIN: usize = 256;

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
        Self::with(snapshot, None)
    }

    /// The same, with what an earlier fleet had of nodes that are as they were.
    pub fn with(snapshot: &'a Snapshot, base: Option<Base>) -> Self {
        let now = snapshot.nodes.as_shared();
        let fits = |base: &Base| {
            base.catalog.geometries() == snapshot.geometries
                && base.of.len() == now.len()
                && base.catalog.size() + base.likes.all.len() < MET
        };
        let mut base = base.filter(fits);
        let mut likes = base.as_mut().map(|base| std::mem::take(&mut base.likes)).unwrap_or_default();
        likes.by_node.resize(now.len(), 0);
        let is_new = |&node: &NodeIndex| {
            let known = base.as_ref().map(|base| &base.of[node]);
            known.is_none_or(|known| !Arc::ptr_eq(known, &now[node]) && *known != now[node])
        };
        let mut new: Vec<NodeIndex> = (0..now.len()).filter(is_new).collect();
        for &node in &new {
            likes.by_node[node] = likes.number(&now[node]);
        }
        let weights = Weights::of(snapshot, likes.counted());
        // Where one weight is another, all states are worth something else.
        let base = base.filter(|base| *base.catalog.weights() == weights);
        if base.is_none() {
            new = (0..now.len()).collect();
        }
        let (catalog, nodes, index, resources) = match base {
            Some(base) => (base.catalog, base.nodes, base.index, base.resources),
            None => {
                let catalog = Catalog::of(&snapshot.geometries, weights);
                (catalog, Vec::with_capacity(now.len()), Index::default(), BTreeMap::new())
            }
        };
        let mut fleet = Self {
            snapshot,
            catalog,
            nodes,
            index,
            groups: 1,
            shape_numbers: HashMap::new(),
            shapes: Vec::new(),
            answers: Vec::new(),
            pod_numbers: HashMap::new(),
            pods: Vec::new(),
            selection_numbers: HashMap::new(),
            selections: Vec::new(),
            resources,
            emptied: None,
            demand: Demand::default(),
            passed_over: HashMap::new(),
            standings: Standings::new(snapshot.nodes.len()),
            likes,
            touched: BTreeSet::new(),
        };
        new.into_iter().for_each(|node| fleet.set(node));
        fleet.learn_demand();
        fleet
    }

    /// What there is of nodes alone.
    pub fn into_base(mut self) -> Base {
        self.restore();
        let Self { snapshot, catalog, nodes, index, resources, likes, .. } = self;
        Base { of: snapshot.nodes.as_shared().to_vec(), catalog, nodes, index, resources, likes }
    }

    /// As if nobody had asked for anything yet.
    pub fn reset(&mut self) {
        self.restore();
        self.groups = 1;
        self.shape_numbers.clear();
        self.shapes.clear();
        self.answers.clear();
        self.pod_numbers.clear();
        self.pods.clear();
        self.selection_numbers.clear();
        self.selections.clear();
        self.passed_over.clear();
        self.standings = Standings::new(self.nodes.len());
        self.learn_demand();
    }

    fn restore(&mut self) {
        for node in std::mem::take(&mut self.touched) {
            let emptied = self.nodes[node].emptied.take();
            self.set(node);
            self.nodes[node].emptied = emptied;
        }
    }

    /// Makes the node what it is in the snapshot. A new one is the next.
    fn set(&mut self, node: NodeIndex) {
        let gpus = 0..self.nodes.get(node).map_or(0, |now| now.gpus.len());
        gpus.for_each(|gpu| self.unseat(node, gpu));
        let now = self.node_now(&self.snapshot.nodes[node]);
        let gpus = 0..now.gpus.len();
        match self.nodes.get_mut(node) {
            Some(known) => *known = now,
            None => self.nodes.push(now),
        }
        gpus.for_each(|gpu| self.seat(node, gpu));
    }

    fn learn_demand(&mut self) {
        let snapshot = self.snapshot;
        let kinds = snapshot.demand.iter().filter_map(|demand| self.asked_for(demand)).collect();
        self.demand = Demand::of(snapshot, &self.catalog, kinds);
    }

    /// What is asked for again and again, in numbers. Of requests for several kinds of devices nothing is said.
    fn asked_for(&mut self, demand: &'a snapshot::Demand) -> Option<Asked> {
        let asked = self.numbered(&demand.request);
        let [need] = demand.request.devices.as_slice() else { return None };
        let counts = need.alternatives.iter().map(|want| want.count);
        let wants = self.shapes[asked.shape].wants[0].iter().copied().zip(counts).collect();
        let pod = &self.pods[asked.pod];
        let suits = self.selections[pod.selection].unsuitable.iter().map(Option::is_none).collect();
        let milli = pod.milli.iter().map(|&(_, id, needs)| (id, needs)).collect();
        Some(Asked { wants, weight: demand.weight.into(), suits, milli })
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
        NodeNow { gpus, free_milli, crowding, rank: rank(&node.gpus), group: 0, version: 0, emptied: None }
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
                    self.touched.insert(node);
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
        self.takes(node, asked.pod, gone) && !asked.request.avoid.contains(&node)
    }

    fn takes(&self, node: NodeIndex, pod: PodId, gone: &[PodId]) -> bool {
        let (pod, free) = (&self.pods[pod], &self.nodes[node].free_milli);
        let freed = |id: ResourceId| -> i128 {
            let of = |&pod: &PodId| self.pods[pod].milli.iter().filter(|(_, other, _)| *other == id);
            gone.iter().flat_map(of).fold(0, |sum, (_, _, needs)| needs.saturating_add(sum))
        };
        let enough = |&(_, id, needs): &(_, ResourceId, i128)| {
            free.get(id)
                .copied()
                .flatten()
                .is_some_and(|free| free >= needs || freed(id).saturating_add(free) >= needs)
        };
        let unsuitable = &self.selections[pod.selection].unsuitable[node];
        unsuitable.is_none() && pod.milli.iter().all(enough)
    }

    /// For so many such pods the node has resources, GPUs aside; 0 if it cannot take one.
    pub fn pods(&self, node: NodeIndex, asked: Numbered<'_>) -> u64 {
        if !self.fits(node, asked) {
            return 0;
        }
        let number = |&(_, id, needs): &(_, ResourceId, i128)| {
            let free = self.nodes[node].free_milli.get(id).copied().flatten().unwrap_or(0);
            u64::try_from(free / needs).unwrap_or(u64::MAX)
        };
        self.pods[asked.pod].milli.iter().map(number).min().unwrap_or(u64::MAX)
    }

    /// Whether the node could take the pod, GPUs aside, if nothing ran there and it was ready and not cordoned.
    pub fn could_fit(&self, node: NodeIndex, asked: Numbered<'_>) -> bool {
        let (pod, free) = (&self.pods[asked.pod], &self.nodes[node].free_milli);
        let passes = matches!(
            self.selections[pod.selection].unsuitable[node],
            None | Some(Misfit::NotReady | Misfit::Cordoned)
        );
        passes && pod.milli.iter().all(|&(_, id, _)| free.get(id).copied().flatten().is_some())
    }

    /// What is left of a resource, in thousandths of its unit.
    pub fn free(&self, node: NodeIndex, resource: &str) -> Option<i128> {
        let id = self.resources.get(resource)?;
        self.nodes[node].free_milli.get(*id).copied().flatten()
    }

    /// By node: the states that its GPUs would be in if nothing was on them, and they were neither closed nor stuck.
    pub fn emptied(&mut self) -> Rc<Vec<Arc<[StateId]>>> {
        if let Some(known) = &self.emptied {
            return Rc::clone(known);
        }
        let snapshot = self.snapshot;
        let mut numbers = HashMap::new();
        let mut emptied = |gpu: &'a Gpu| {
            let layout = if gpu.fixed { gpu.instances.as_slice() } else { &[] };
            let modes = (gpu.mig, gpu.whole, gpu.shared);
            let likeness = (gpu.geometry, modes, gpu.fixed, &gpu.allowed, &gpu.share_room);
            let known: &mut Vec<(&[Instance], StateId)> = numbers.entry(likeness).or_default();
            if let Some((_, id)) = known.iter().find(|(other, _)| *other == layout) {
                return *id;
            }
            let id = self.catalog.number(GpuState::emptied(gpu, &snapshot.geometries));
            known.push((layout, id));
            id
        };
        let nodes = self.nodes.iter_mut().zip(snapshot.nodes.iter());
        let all = nodes.map(|(now, node)| {
            let known = now.emptied.get_or_insert_with(|| node.gpus.iter().map(&mut emptied).collect());
            Arc::clone(known)
        });
        let all = all.collect();
        Rc::clone(self.emptied.insert(Rc::new(all)))
    }

    /// The cheapest place for the request, if there is one. Equal prices are decided by crowding, then by UUID.
    pub fn best(&mut self, asked: Numbered<'_>) -> Option<(NodeIndex, Rc<Solution>)> {
        let kind = (asked.shape, asked.pod);
        let in_vain = || self.passed_over.get(&kind).is_some_and(|&number| number > IN_VAIN);
        if self.demand.is_empty() && self.shapes[asked.shape].single && !in_vain() {
            return self.best_single(asked).map(|(node, solution)| (node, Rc::new(solution)));
        }
        for node in self.standings.stale(kind) {
            let place = if !self.takes(node, asked.pod, &[]) {
                None
            } else if self.demand.is_empty() {
                self.place_on(asked, node)
            } else {
                self.priced(asked, node).map(Rc::new)
            };
            let now = &self.nodes[node];
            let entry = place.map(|place| Entry { place, crowding: now.crowding, rank: now.rank });
            self.standings.enter(kind, node, entry);
        }
        self.standings.first(kind, |node| !asked.request.avoid.contains(&node))
    }

    /// The cheapest place on the node, resources and what is avoided aside, at the price that the demand gives it.
    fn priced(&mut self, asked: Numbered<'_>, node: NodeIndex) -> Option<Solution> {
        let before = self.worth_of(node, &self.nodes[node].gpus.clone(), None);
        let mut best: Option<Solution> = None;
        for place in self.places_on(asked, node) {
            let mut place = Solution::clone(&place);
            let mut gpus = self.nodes[node].gpus.clone();
            let mut price = 0u64;
            for chosen in &place.devices {
                let state = self.catalog.state(gpus[chosen.gpu]);
                let part = demand::part(self.catalog.geometries(), state, chosen.offer.device);
                price = price.saturating_add(self.demand.price(state.geometry, part));
                gpus[chosen.gpu] = self.catalog.given(gpus[chosen.gpu], chosen.offer.device);
            }
            let after = self.worth_of(node, &gpus, Some(asked.pod));
            place.cost.loss =
                place.cost.loss.saturating_add(price).saturating_add(before.saturating_sub(after));
            let key =
                |place: &Solution| (place.choice.clone(), place.cost, place.devices.first().map(|d| d.gpu));
            if best.as_ref().is_none_or(|best| key(&place) < key(best)) {
                best = Some(place);
            }
        }
        best
    }

    /// What the node is worth to the demand, with GPUs in these states and one more pod.
    fn worth_of(&mut self, node: NodeIndex, gpus: &[StateId], pod: Option<PodId>) -> u64 {
        let (now, pods) = (&self.nodes[node], &self.pods);
        let used = |id: ResourceId| -> i128 {
            let of_pod = pod.and_then(|pod| pods[pod].milli.iter().find(|&&(_, other, _)| other == id));
            of_pod.map_or(0, |&(_, _, needs)| needs)
        };
        let free = |id: ResourceId| now.free_milli.get(id).copied().flatten().unwrap_or(0) - used(id);
        self.demand.worth(&self.catalog, node, gpus, free)
    }

    fn best_single(&mut self, asked: Numbered<'_>) -> Option<(NodeIndex, Solution)> {
        let passed_over = Cell::new(0);
        let best = self.best_by_state(asked, &passed_over);
        if passed_over.get() > 0 {
            let number = self.passed_over.entry((asked.shape, asked.pod)).or_default();
            *number = *number / 2 + passed_over.get();
        }
        best
    }

    fn best_by_state(
        &mut self,
        asked: Numbered<'_>,
        passed_over: &Cell<usize>,
    ) -> Option<(NodeIndex, Solution)> {
        for alternative in 0..self.shapes[asked.shape].wants[0].len() {
            let want = self.shapes[asked.shape].wants[0][alternative];
            self.rank(want);
            let mut best: Option<(Cost, Seat, StateId)> = None;
            for (cost, state) in self.catalog.ranking(want) {
                if best.is_some_and(|(lowest, _, _)| lowest < cost) {
                    break;
                }
                let Some(seat) = self.first_seat(state, asked, passed_over) else { continue };
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
    fn first_seat(&self, state: StateId, asked: Numbered<'_>, passed_over: &Cell<usize>) -> Option<Seat> {
        let suits = &self.selections[self.pods[asked.pod].selection].suits;
        let fits = |node| {
            let fits = self.fits(node, asked);
            passed_over.set(passed_over.get() + usize::from(!fits));
            fits
        };
        self.index.first(state, |group| suits[group], fits)
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
                .filter_map(|(_, state)| Some((state, self.first_seat(state, asked, &Cell::new(0))?)))
                .collect();
            for (state, seat) in seats {
                let offers = self.catalog.offers(state, want);
                let of = |offer: &Offer| (seat, Rc::new(single(alternative, seat.gpu, *offer)));
                places.extend(offers.iter().map(of));
            }
        }
        // Equal prices as in `best`, whatever the numbers of states.
        let device = |place: &Solution| place.devices.first().map(|chosen| chosen.offer.device);
        places.sort_by_key(|(seat, place)| (place.choice[0], place.cost, *seat, device(place)));
        let mut places: Vec<(NodeIndex, Rc<Solution>)> =
            places.into_iter().map(|(seat, place)| (seat.node, place)).collect();
        places.truncate(most);
        places
    }

    /// Places for the request on the node: all, on GPUs in equal states one, or, for several devices, the best.
    pub fn places_on(&mut self, asked: Numbered<'_>, node: NodeIndex) -> Vec<Rc<Solution>> {
        if !self.shapes[asked.shape].single {
            return self.place_on(asked, node).into_iter().collect();
        }
        let mut places = Vec::new();
        for (alternative, &want) in self.shapes[asked.shape].wants[0].iter().enumerate() {
            for (gpu, &state) in self.nodes[node].gpus.iter().enumerate() {
                if !self.nodes[node].gpus[..gpu].contains(&state) {
                    let offers = self.catalog.offers(state, want);
                    places.extend(offers.iter().map(|offer| Rc::new(single(alternative, gpu, *offer))));
                }
            }
        }
        places
    }

    /// What is left of each resource on the node.
    pub fn resources(&self, node: NodeIndex) -> &[Option<i128>] {
        &self.nodes[node].free_milli
    }

    /// Whether a share would do for the shape.
    pub fn wants_shares(&self, shape: ShapeId) -> bool {
        let mut wants = self.shapes[shape].devices.iter().flat_map(|need| &need.alternatives);
        wants.any(|want| !want.shares.is_empty())
    }

    /// Whether the shape is one device, on any GPU that will do.
    pub fn is_single(&self, shape: ShapeId) -> bool {
        self.shapes[shape].single
    }

    /// Whether the shape tells GPUs of one kind apart.
    pub fn tells_apart(&self, shape: ShapeId) -> bool {
        self.shapes[shape].by_name
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Every device that would do for a request of one, were the GPU empty, with the alternative that it is of.
    pub fn devices(&self, asked: Numbered<'_>, node: NodeIndex, gpu: GpuIndex) -> Vec<(usize, Device)> {
        let (state, wants) = (self.nodes[node].gpus[gpu], &self.shapes[asked.shape].wants[0]);
        let of = |(alternative, &want): (usize, &WantId)| {
            self.catalog.devices(state, want).into_iter().map(move |device| (alternative, device))
        };
        wants.iter().enumerate().flat_map(of).collect()
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

    /// Whether no pod has told the nodes apart that can take this one, amounts of resources aside.
    pub fn of_one_group(&self, asked: Numbered<'_>) -> bool {
        let suits = &self.selections[self.pods[asked.pod].selection].suits;
        self.groups < GROUPS && suits.iter().filter(|&&suits| suits).count() <= 1
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

    /// The best place for the request on the node, were its GPUs in these states.
    pub fn answer_with(&mut self, asked: Numbered<'_>, node: NodeIndex, gpus: &[StateId]) -> Answer {
        let (shape, steps) = (&self.shapes[asked.shape], &mut self.answers[asked.shape].steps);
        let most = place::WORK.min(WORK - *steps);
        let (answer, more) = place::on_node(&mut self.catalog, shape, node, gpus, most);
        *steps = WORK.min(*steps + more);
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
                let held = Device::of(device);
                let there = match held {
                    Device::Whole => gpu.taken_whole,
                    Device::Instance { profile, start } => gpu.instances.iter().any(|one| {
                        let it = one.profile == Some(profile) && one.start == start;
                        it && one.exists && one.state == InstanceState::Taken
                    }),
                    Device::Share { carrier, portion } => {
                        gpu.shares.contains(&TakenShare { instance: carrier, portion })
                    }
                };
                if !there {
                    return None;
                }
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
        self.touched.insert(node);
        for &(_, id, needs) in &self.pods[pod].milli {
            if let Some(Some(free)) = self.nodes[node].free_milli.get_mut(id) {
                *free = free.saturating_sub(times * needs);
            }
        }
        self.standings.changed(node);
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

    fn change(&mut self, node: NodeIndex, change: impl FnOnce(&mut Catalog, &mut [StateId])) {
        self.touched.insert(node);
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
        self.standings.changed(node);
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
