//! What no policy can exceed: what fits on one GPU, counted, and linear programs over it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use kerf_planner::occupancy::{Occupancy, Slices};
use kerf_planner::snapshot::{Geometry, ProfileIndex, Request, Snapshot};
use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

/// All GPUs in one piece: a job takes its price and finds a place wherever that is left.
#[derive(Clone, Debug)]
pub struct Pool {
    /// By kind of job.
    pub prices: Vec<u64>,
    /// Of all GPUs together.
    pub capacity: u64,
}

/// The prices at which the pool is as small as it can be for the mix, so that no policy has more running of it on
/// average, with however many moves. A GPU's capacity is the most that those who fit on it together pay.
pub fn pool(snapshot: &Snapshot, weights: &[f64]) -> Result<Pool> {
    /// Large enough for prices to be whole numbers.
    const CAPACITY: f64 = 1e9;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let positive = (0.0, f64::INFINITY);
    let prices: Vec<_> = weights.iter().map(|_| problem.add_var(0.0, positive)).collect();
    let mean: Vec<_> = prices.iter().copied().zip(weights.iter().copied()).collect();
    problem.add_constraint(&mean[..], ComparisonOp::Eq, weights.iter().sum());
    for (index, geometry) in snapshot.geometries.iter().enumerate() {
        let gpus = snapshot.nodes.iter().flat_map(|node| &node.gpus);
        let gpus = gpus.filter(|gpu| gpu.geometry == Some(index)).count();
        let capacity = problem.add_var(gpus as f64, positive);
        let least: Vec<Option<ProfileIndex>> =
            snapshot.requests.iter().map(|request| least(request, index, geometry)).collect();
        let profiles: Vec<ProfileIndex> =
            least.iter().flatten().copied().collect::<BTreeSet<_>>().into_iter().collect();
        // Of those who take the same profile, the one who pays most.
        let paid: Vec<_> = profiles.iter().map(|_| problem.add_var(0.0, positive)).collect();
        for (&price, profile) in prices.iter().zip(&least) {
            if let Some(at) = profile.and_then(|profile| profiles.iter().position(|&p| p == profile)) {
                problem.add_constraint([(paid[at], 1.0), (price, -1.0)], ComparisonOp::Ge, 0.0);
            }
        }
        for counts in fullest(geometry, &profiles, &Occupancy::empty(geometry)) {
            let together = paid.iter().zip(counts).map(|(&paid, count)| (paid, -f64::from(count)));
            let all: Vec<_> = together.chain([(capacity, 1.0)]).collect();
            problem.add_constraint(&all[..], ComparisonOp::Ge, 0.0);
        }
    }
    let solution = problem.solve()?.into_solution().map_err(|_| anyhow::anyhow!("no prices found"))?;
    let price = |&variable| (solution.var_value(variable) / solution.objective() * CAPACITY).round() as u64;
    Ok(Pool { prices: prices.iter().map(price).collect(), capacity: CAPACITY as u64 })
}

/// The most work that so many of each profile can do on these GPUs, whoever is placed: an integer program over what still
/// fits on a GPU, solved exactly.
pub fn most_work(geometry: &Geometry, taken: &[Occupancy], demand: &[u32], work: &[u64]) -> Result<u64> {
    let mut alike: BTreeMap<(Slices, &[u32]), (&Occupancy, u32)> = BTreeMap::new();
    for gpu in taken {
        alike.entry((gpu.slices, &gpu.counts)).or_insert((gpu, 0)).1 += 1;
    }
    let asked: Vec<ProfileIndex> = (0..demand.len()).filter(|&profile| demand[profile] > 0).collect();
    // GPUs on which the same can be added are one kind, too.
    let mut kinds: BTreeMap<BTreeSet<Vec<u32>>, u32> = BTreeMap::new();
    for (gpu, number) in alike.into_values() {
        *kinds.entry(fullest(geometry, &asked, gpu)).or_default() += number;
    }
    let mut problem = Problem::new(OptimizationDirection::Maximize);
    let placed: Vec<Variable> = asked
        .iter()
        .map(|&profile| problem.add_integer_var(work[profile] as f64, (0, demand[profile] as i32)))
        .collect();
    let mut room: Vec<Vec<(Variable, f64)>> = placed.iter().map(|&placed| vec![(placed, -1.0)]).collect();
    for (layouts, number) in kinds {
        let mut gpus = Vec::new();
        for layout in layouts {
            let times = problem.add_integer_var(0.0, (0, number as i32));
            gpus.push((times, 1.0));
            for (room, count) in room.iter_mut().zip(layout) {
                room.push((times, f64::from(count)));
            }
        }
        problem.add_constraint(&gpus[..], ComparisonOp::Le, number.into());
    }
    for room in room {
        problem.add_constraint(&room[..], ComparisonOp::Ge, 0.0);
    }
    let solution = problem.solve()?.into_solution().map_err(|_| anyhow::anyhow!("no optimum found"))?;
    Ok(solution.objective().round() as u64)
}

/// The smallest profile that will do for a request of one device on a GPU of the geometry.
pub fn least(request: &Request, index: usize, geometry: &Geometry) -> Option<ProfileIndex> {
    let wants = request.devices.first()?.alternatives.first()?;
    let profiles = wants.profiles.get(&index)?.iter().copied();
    profiles.min_by_key(|&p| (geometry.profiles[p].size, geometry.profiles[p].compute_slices, p))
}

/// All that can be added to a GPU until nothing more can: how many of each of the profiles.
pub fn fullest(geometry: &Geometry, profiles: &[ProfileIndex], taken: &Occupancy) -> BTreeSet<Vec<u32>> {
    let mut all = BTreeSet::new();
    let mut seen = std::collections::HashSet::new();
    let mut open = vec![(taken.clone(), vec![0; profiles.len()])];
    while let Some((taken, counts)) = open.pop() {
        let mut full = true;
        for (at, &profile) in profiles.iter().enumerate() {
            for &start in &geometry.profiles[profile].starts {
                if taken.fits(geometry, profile, start) {
                    full = false;
                    let (mut after, mut counts) = (taken.clone(), counts.clone());
                    after.take(geometry, profile, start);
                    counts[at] += 1;
                    if seen.insert((after.slices, counts.clone())) {
                        open.push((after, counts));
                    }
                }
            }
        }
        if full {
            all.insert(counts);
        }
    }
    let dominated = |counts: &Vec<u32>| {
        all.iter().any(|other| other != counts && other.iter().zip(counts).all(|(more, less)| more >= less))
    };
    all.iter().filter(|counts| !dominated(counts)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use kerf_planner::occupancy::slices;

    use super::*;
    use crate::workload;

    #[test]
    fn where_any_profile_fits_that_would_do_the_smallest_fits() {
        let setting = workload::three_models(3).expect("three models");
        let snapshot = &setting.snapshot;
        for request in &snapshot.requests {
            for (&index, profiles) in &request.devices[0].alternatives[0].profiles {
                let geometry = &snapshot.geometries[index];
                let Some(least) = least(request, index, geometry) else { continue };
                let places = |p: ProfileIndex| {
                    let shape = &geometry.profiles[p];
                    shape.starts.iter().map(|&start| slices(start, shape.size)).collect::<Vec<_>>()
                };
                for place in profiles.iter().flat_map(|&profile| places(profile)) {
                    assert!(places(least).iter().any(|small| small & !place == 0), "{} {index}", request.id);
                }
            }
        }
    }

    #[test]
    fn what_a_gpu_has_room_for_is_counted() {
        let geometry = crate::fleet::seven();
        let (one, two, seven) = (0, 2, 5);
        let full = fullest(&geometry, &[one, two, seven], &Occupancy::empty(&geometry));
        let expected = [[0, 0, 1], [1, 3, 0], [3, 2, 0], [5, 1, 0], [7, 0, 0]].map(Vec::from);
        assert_eq!(full, BTreeSet::from(expected));
    }
}
