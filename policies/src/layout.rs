//! Layouts that a policy states: a static layout on an empty GPU, and instances to keep warm.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::fleet::Fleet;
use crate::occupancy::{Device, Occupancy};
use crate::plan::Plan;
use crate::snapshot::{Capability, Geometry, GeometryIndex, GpuIndex, NodeIndex, ProfileIndex, Snapshot};

/// Most steps of [`pack_layout`]; the layouts of today's GPUs need a few dozen.
const WORK: u32 = 1_000_000;

/// Places for a whole static layout on an empty GPU, or `None` if it cannot be had. `wanted` lists profile, number, and
/// the first memory slice where it is stated; the answer has the instances in the same order.
///
/// The search is exact, unless a geometry with dozens of slices makes it longer than a million steps: then the answer is
/// `None` as well.
pub fn pack_layout(
    geometry: &Geometry,
    wanted: &[(ProfileIndex, u32, Option<u32>)],
) -> Option<Vec<(ProfileIndex, u32)>> {
    let total = wanted.iter().map(|&(_, count, _)| count).fold(0, u32::saturating_add);
    if total > geometry.memory_slices.min(64) || wanted.iter().any(|&(p, ..)| p >= geometry.profiles.len()) {
        return None;
    }
    let mut pieces: Vec<(ProfileIndex, Option<u32>)> = Vec::new();
    for &(profile, count, start) in wanted {
        pieces.extend((0..count).map(|_| (profile, start)));
    }
    // Stated places first, then large before small; equal ones side by side, so that their order is tried once.
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|&i| {
        let (profile, start) = pieces[i];
        (start.is_none(), std::cmp::Reverse(geometry.profiles[profile].size), profile)
    });
    let mut places = vec![0; pieces.len()];
    let mut search = Packing { geometry, pieces: &pieces, order: &order, dead: HashSet::new(), steps: 0 };
    search
        .descend(0, Occupancy::empty(geometry), &mut places)
        .then(|| pieces.iter().zip(&places).map(|(&(profile, _), &start)| (profile, start)).collect())
}

struct Packing<'a> {
    geometry: &'a Geometry,
    pieces: &'a [(ProfileIndex, Option<u32>)],
    order: &'a [usize],
    dead: HashSet<(usize, Occupancy)>,
    steps: u32,
}

impl Packing<'_> {
    fn descend(&mut self, depth: usize, taken: Occupancy, places: &mut [u32]) -> bool {
        let Some(&piece) = self.order.get(depth) else { return true };
        let key = (depth, taken);
        if self.dead.contains(&key) {
            return false;
        }
        let (profile, stated) = self.pieces[piece];
        let mut starts = match stated {
            Some(start) => vec![start],
            None => self.geometry.profiles[profile].starts.clone(),
        };
        starts.sort_unstable();
        for start in starts {
            self.steps += 1;
            if self.steps > WORK {
                return false;
            }
            if key.1.fits(self.geometry, profile, start) {
                let mut after = key.1.clone();
                after.take(self.geometry, profile, start);
                places[piece] = start;
                if self.descend(depth + 1, after, places) {
                    return true;
                }
            }
        }
        self.dead.insert(key);
        false
    }
}

/// Instances of one profile to keep ready.
#[derive(Clone, Debug, Default)]
pub struct WarmWish {
    /// The profile, by geometry.
    pub profiles: BTreeMap<GeometryIndex, ProfileIndex>,
    /// How many free ones.
    pub count: u32,
    /// The GPUs on which they may be.
    pub gpus: BTreeSet<(NodeIndex, GpuIndex)>,
}

/// A place for a warm instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmPlace {
    /// Index of the wish.
    pub wish: usize,
    /// The node.
    pub node: NodeIndex,
    /// The GPU.
    pub gpu: GpuIndex,
    /// The profile, by index into the GPU's geometry.
    pub profile: ProfileIndex,
    /// First memory slice.
    pub start: u32,
    /// Whether it exists.
    pub exists: bool,
}

/// Where the warm instances are to be, all of them, once the plan is carried out: first those that are there stay, then
/// idle instances are kept, then new ones are made where they cost the least room. Nothing that somebody has is
/// touched, no MIG mode is switched, and no warm instance gives way to another. Where room is short there are fewer.
pub fn warm(snapshot: &Snapshot, plan: &Plan, wishes: &[WarmWish]) -> Vec<WarmPlace> {
    let mut fleet = Fleet::of(snapshot);
    for placement in &plan.placements {
        for device in &placement.devices {
            fleet.give(placement.node, device.gpu, Device::of(device));
        }
    }
    let mut places = Vec::new();
    let mut missing: Vec<u32> = wishes.iter().map(|wish| wish.count).collect();
    for keep_warm in [true, false] {
        for (index, wish) in wishes.iter().enumerate() {
            let mut found = free_instances(&fleet, wish, keep_warm);
            found.truncate(missing[index] as usize);
            for (node, gpu, profile, start, exists) in found {
                fleet.give(node, gpu, Device::Instance { profile, start });
                missing[index] -= 1;
                places.push(WarmPlace { wish: index, node, gpu, profile, start, exists });
            }
        }
    }
    for (index, wish) in wishes.iter().enumerate() {
        while missing[index] > 0 {
            let Some((node, gpu, profile, start)) = cheapest(&fleet, wish) else { break };
            fleet.give(node, gpu, Device::Instance { profile, start });
            missing[index] -= 1;
            places.push(WarmPlace { wish: index, node, gpu, profile, start, exists: false });
        }
    }
    places
}

/// GPUs of a wish on which something can be had or made, with the profile there.
fn usable<'b>(
    fleet: &'b Fleet<'_>,
    wish: &'b WarmWish,
) -> impl Iterator<Item = (NodeIndex, GpuIndex, ProfileIndex)> + 'b {
    wish.gpus.iter().filter_map(move |&(node, gpu)| {
        let contents = fleet.snapshot.nodes.get(node)?;
        let state = fleet.catalog.state(*fleet.gpus(node).get(gpu)?);
        let profile = *wish.profiles.get(&state.geometry?)?;
        (contents.ready && !contents.unschedulable && state.mig_now() == Capability::Now)
            .then_some((node, gpu, profile))
    })
}

fn free_instances(
    fleet: &Fleet<'_>,
    wish: &WarmWish,
    warm: bool,
) -> Vec<(NodeIndex, GpuIndex, ProfileIndex, u32, bool)> {
    let geometries = &fleet.snapshot.geometries;
    let mut found = Vec::new();
    for (node, gpu, profile) in usable(fleet, wish) {
        // One after the other, as if taken: what the engines do not allow together is not kept together.
        let mut state = fleet.state(node, gpu).clone();
        for free in state.free.clone().iter().filter(|free| free.warm == warm && free.profile == profile) {
            let device = Device::Instance { profile, start: free.start };
            if state.can_give(geometries, device) {
                state = state.give(geometries, device);
                found.push((node, gpu, profile, free.start, free.exists));
            }
        }
    }
    found.sort_by_key(|&(node, gpu, _, start, exists)| (!exists, fleet.rank_of(node, gpu), start));
    found
}

fn cheapest(fleet: &Fleet<'_>, wish: &WarmWish) -> Option<(NodeIndex, GpuIndex, ProfileIndex, u32)> {
    let geometries = &fleet.snapshot.geometries;
    let mut best = None;
    for (node, gpu, profile) in usable(fleet, wish) {
        let state = fleet.state(node, gpu);
        let Some(geometry) = state.geometry.and_then(|index| geometries.get(index)) else { continue };
        for &start in &geometry.profiles[profile].starts {
            let device = Device::Instance { profile, start };
            if state.fixed || !state.can_give(geometries, device) {
                continue;
            }
            let after = state.give(geometries, device);
            let warm =
                |state: &crate::occupancy::GpuState| state.free.iter().filter(|free| free.warm).count();
            if warm(&after) < warm(state) {
                continue;
            }
            let idle_lost = state.free.len() - after.free.len();
            let loss = fleet.catalog.worth(state).saturating_sub(fleet.catalog.worth(&after));
            let price = (idle_lost, loss, after.free_slices(geometries), fleet.rank_of(node, gpu), start);
            if best.as_ref().is_none_or(|(lowest, _)| price < *lowest) {
                best = Some((price, (node, gpu, profile, start)));
            }
        }
    }
    best.map(|(_, place)| place)
}
