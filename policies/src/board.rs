//! The cluster as planning goes on: every placement is taken into account by the next. Equal GPU states, node contents
//! and request shapes are numbered, and what was worked out for one of a kind is looked up for the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use crate::nodes::{self, Misfit};
use crate::occupancy::{Device, GpuState};
use crate::place::{self, Answer, Solution};
use crate::snapshot::{
    Capability, Constraint, DeviceNeed, GeometryIndex, GpuIndex, NodeIndex, PodNeeds, ProfileIndex, Request,
    Snapshot, Strategy, Want,
};
use crate::value::{Cost, Least, Weights};

/// Number of a distinct [`GpuState`].
pub type StateId = u32;
/// Number of a distinct list of GPU states of a node.
pub type ContentId = u32;
/// Number of distinct device needs and constraints.
pub type ShapeId = usize;
/// Number of distinct [`PodNeeds`].
pub type PodId = usize;

/// Something that a GPU in some state can give for a want.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// The device.
    pub device: Device,
    /// Whether it exists.
    pub exists: bool,
    /// The GPU's state afterwards.
    pub after: StateId,
    /// Its price.
    pub cost: Cost,
}

/// See the module.
pub struct Board<'a> {
    /// What the board was made from.
    pub snapshot: &'a Snapshot,
    weights: Weights,
    states: Vec<GpuState>,
    state_ids: HashMap<GpuState, StateId>,
    worths: Vec<u64>,
    moves: HashMap<(StateId, WantKey<'a>), Rc<[Move]>>,
    contents: HashMap<Vec<StateId>, ContentId>,
    nodes: Vec<NodeNow>,
    /// Place of each GPU in the order of UUIDs, the last tie-break: names of nodes play no part.
    ranks: Vec<Vec<usize>>,
    shapes: HashMap<(&'a [DeviceNeed], &'a [Constraint]), ShapeId>,
    pods: HashMap<&'a PodNeeds, PodId>,
    unsuitable: Vec<Rc<[Option<Misfit>]>>,
    answers: HashMap<(ShapeId, ContentId, Option<NodeIndex>), Answer>,
}

/// The part of a want that decides what a GPU can give for it.
type WantKey<'a> = (&'a BTreeMap<GeometryIndex, BTreeSet<ProfileIndex>>, bool);

struct NodeNow {
    gpus: Vec<StateId>,
    content: ContentId,
    free_milli: BTreeMap<String, i128>,
}

/// A node's best place, and what decides between equal prices.
struct Bid {
    node: NodeIndex,
    solution: Rc<Solution>,
    tie: (i64, usize),
}

impl<'a> Board<'a> {
    /// The cluster of the snapshot.
    pub fn new(snapshot: &'a Snapshot) -> Self {
        let mut board = Self {
            snapshot,
            weights: Weights::of(snapshot),
            states: Vec::new(),
            state_ids: HashMap::new(),
            worths: Vec::new(),
            moves: HashMap::new(),
            contents: HashMap::new(),
            nodes: Vec::new(),
            ranks: ranks(snapshot),
            shapes: HashMap::new(),
            pods: HashMap::new(),
            unsuitable: Vec::new(),
            answers: HashMap::new(),
        };
        for node in &snapshot.nodes {
            let states = node.gpus.iter().map(|gpu| GpuState::of(gpu, &snapshot.geometries));
            let gpus: Vec<StateId> = states.map(|state| board.number(state)).collect();
            let content = board.content(&gpus);
            board.nodes.push(NodeNow { gpus, content, free_milli: node.free_milli.clone() });
        }
        board
    }

    /// A state by its number.
    pub fn state(&self, id: StateId) -> &GpuState {
        &self.states[id as usize]
    }

    /// The states of a node's GPUs.
    pub fn gpus(&self, node: NodeIndex) -> &[StateId] {
        &self.nodes[node].gpus
    }

    fn number(&mut self, state: GpuState) -> StateId {
        if let Some(&id) = self.state_ids.get(&state) {
            return id;
        }
        let id = self.states.len() as StateId;
        self.worths.push(self.weights.worth(&self.snapshot.geometries, &state));
        self.states.push(state.clone());
        self.state_ids.insert(state, id);
        id
    }

    fn content(&mut self, gpus: &[StateId]) -> ContentId {
        if let Some(&id) = self.contents.get(gpus) {
            return id;
        }
        let id = self.contents.len() as ContentId;
        self.contents.insert(gpus.to_vec(), id);
        id
    }

    /// Number of what the request wants of GPUs.
    pub fn shape(&mut self, request: &'a Request) -> ShapeId {
        let next = self.shapes.len();
        *self.shapes.entry((&request.devices, &request.constraints)).or_insert(next)
    }

    /// Number of what the pod needs of its node.
    pub fn pod(&mut self, pod: &'a PodNeeds) -> PodId {
        if let Some(&id) = self.pods.get(pod) {
            return id;
        }
        self.unsuitable.push(self.snapshot.nodes.iter().map(|node| nodes::unsuitable(node, pod)).collect());
        self.pods.insert(pod, self.unsuitable.len() - 1);
        self.unsuitable.len() - 1
    }

    /// Why the node cannot take the pod, GPUs aside.
    pub fn misfit(&self, node: NodeIndex, request: &Request, pod: PodId) -> Option<Misfit> {
        if request.avoid.contains(&node) {
            return Some(Misfit::Avoided);
        }
        let unsuitable = self.unsuitable[pod][node].clone();
        unsuitable.or_else(|| nodes::lacking(&self.nodes[node].free_milli, &request.pod))
    }

    fn fits(&self, node: NodeIndex, request: &Request, pod: PodId) -> bool {
        self.unsuitable[pod][node].is_none()
            && !request.avoid.contains(&node)
            && nodes::lacking(&self.nodes[node].free_milli, &request.pod).is_none()
    }

    /// What a GPU in the state can give for the want, cheapest first.
    pub fn moves(&mut self, state: StateId, want: &'a Want) -> Rc<[Move]> {
        let key = (state, (&want.profiles, want.whole));
        if let Some(moves) = self.moves.get(&key) {
            return Rc::clone(moves);
        }
        let moves: Rc<[Move]> = self.work_out_moves(state, want).into();
        self.moves.insert(key, Rc::clone(&moves));
        moves
    }

    fn work_out_moves(&mut self, id: StateId, want: &Want) -> Vec<Move> {
        let geometries = &self.snapshot.geometries;
        let before = self.states[id as usize].clone();
        let least = Least::of(want, geometries);
        let mut devices = Vec::new();
        if want.whole {
            devices.push(Device::Whole);
        }
        if let Some(index) = before.geometry
            && let Some(profiles) = want.profiles.get(&index)
        {
            for &profile in profiles {
                let starts = geometries[index].profiles.get(profile).map_or(&[][..], |p| &p.starts);
                devices.extend(starts.iter().map(|&start| Device::Instance { profile, start }));
            }
        }
        devices.retain(|&device| before.can_give(geometries, device));
        let mut moves: Vec<Move> = Vec::new();
        for device in devices {
            let after = before.give(geometries, device);
            let (reused, switch) = match device {
                Device::Whole => (None, before.whole == Capability::AfterSwitch),
                Device::Instance { profile, start } => {
                    (before.free_at(profile, start), before.mig == Capability::AfterSwitch)
                }
            };
            let exists = match device {
                Device::Whole => !switch,
                Device::Instance { .. } => !switch && reused.is_some_and(|free| free.exists),
            };
            let warm = |state: &GpuState| state.free.iter().filter(|free| free.warm).count() as u32;
            let warm_used = u32::from(reused.is_some_and(|free| free.warm));
            let spread = before.strategy == Strategy::Spread;
            let slices = before.geometry.map_or(0, |g| geometries[g].memory_slices);
            let taken = slices.saturating_sub(before.free_slices(geometries));
            let (warm_before, left) = (warm(&before), after.free_slices(geometries));
            let warm_lost = (warm_before - warm(&after)).saturating_sub(warm_used);
            let after = self.number(after);
            let cost = Cost {
                warm_lost,
                waste: least.waste(geometries, before.geometry, device),
                waits: u32::from(!exists),
                switches: u32::from(switch),
                warm_used,
                load: if spread { (1000 * taken).checked_div(slices).unwrap_or(0) } else { 0 },
                loss: self.worths[id as usize].saturating_sub(self.worths[after as usize]),
                left: if spread { 0 } else { left },
            };
            moves.push(Move { device, exists, after, cost });
        }
        moves.sort_by_key(|m| (m.cost, m.device));
        moves
    }

    /// The best place for the request, if there is one.
    pub fn best(
        &mut self,
        request: &'a Request,
        shape: ShapeId,
        pod: PodId,
    ) -> Option<(NodeIndex, Rc<Solution>)> {
        let mut best: Option<Bid> = None;
        for node in 0..self.nodes.len() {
            if !self.fits(node, request, pod) {
                continue;
            }
            let Answer::Found(solution) = self.answer(request, shape, node) else { continue };
            let tie = (self.crowding(node), self.rank(node, &solution));
            let better = best.as_ref().is_none_or(|other| {
                (&solution.choice, solution.cost, tie)
                    < (&other.solution.choice, other.solution.cost, other.tie)
            });
            if better {
                best = Some(Bid { node, solution, tie });
            }
        }
        best.map(|bid| (bid.node, bid.solution))
    }

    /// The best place for the request on a node whose other resources are left aside.
    pub fn answer(&mut self, request: &'a Request, shape: ShapeId, node: NodeIndex) -> Answer {
        // Where GPUs of one kind are told apart, what holds for a node need not hold for another like it.
        let by_name = !request.constraints.is_empty()
            || request.devices.iter().flat_map(|need| &need.alternatives).any(|want| want.gpus.is_some());
        let key = (shape, self.nodes[node].content, by_name.then_some(node));
        if let Some(answer) = self.answers.get(&key) {
            return answer.clone();
        }
        let answer = place::on_node(self, request, node);
        self.answers.insert(key, answer.clone());
        answer
    }

    /// With `Pack` fuller nodes come first, with `Spread` emptier ones: free slices, and their negative.
    fn crowding(&self, node: NodeIndex) -> i64 {
        let signed = |&id: &StateId| {
            let state = self.state(id);
            let free = i64::from(state.free_slices(&self.snapshot.geometries));
            if state.strategy == Strategy::Spread { -free } else { free }
        };
        self.nodes[node].gpus.iter().map(signed).sum()
    }

    fn rank(&self, node: NodeIndex, solution: &Solution) -> usize {
        let ranks = &self.ranks[node];
        solution
            .devices
            .first()
            .map_or_else(|| ranks.iter().copied().min().unwrap_or(usize::MAX), |d| ranks[d.gpu])
    }

    /// Place of the GPU in the order of UUIDs.
    pub fn rank_of(&self, node: NodeIndex, gpu: GpuIndex) -> usize {
        self.ranks[node][gpu]
    }

    /// Worth of a GPU in the state, see [`Weights`].
    pub fn worth_of(&self, state: &GpuState) -> u64 {
        self.weights.worth(&self.snapshot.geometries, state)
    }

    /// Takes the place.
    pub fn take(&mut self, request: &Request, node: NodeIndex, solution: &Solution) {
        for device in &solution.devices {
            self.give(node, device.gpu, device.device);
        }
        let now = &mut self.nodes[node];
        for (resource, needs) in &request.pod.milli {
            if let Some(free) = now.free_milli.get_mut(resource) {
                *free = free.saturating_sub(*needs);
            }
        }
    }

    /// Gives a device away.
    pub fn give(&mut self, node: NodeIndex, gpu: GpuIndex, device: Device) {
        let id = self.nodes[node].gpus[gpu];
        let after = self.states[id as usize].give(&self.snapshot.geometries, device);
        self.nodes[node].gpus[gpu] = self.number(after);
        let gpus = std::mem::take(&mut self.nodes[node].gpus);
        self.nodes[node].content = self.content(&gpus);
        self.nodes[node].gpus = gpus;
    }
}

fn ranks(snapshot: &Snapshot) -> Vec<Vec<usize>> {
    let mut ranks: Vec<Vec<usize>> = snapshot.nodes.iter().map(|node| vec![0; node.gpus.len()]).collect();
    let places = snapshot.nodes.iter().enumerate();
    let mut order: Vec<(&str, NodeIndex, GpuIndex)> = places
        .flat_map(|(n, node)| node.gpus.iter().enumerate().map(move |(g, gpu)| (gpu.uuid.as_str(), n, g)))
        .collect();
    order.sort_unstable();
    for (rank, (_, node, gpu)) in order.into_iter().enumerate() {
        ranks[node][gpu] = rank;
    }
    ranks
}

impl std::fmt::Debug for Board<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Board").field("nodes", &self.nodes.len()).field("states", &self.states.len()).finish()
    }
}
