//! What a planner keeps from plan to plan changes no answer.

mod common;

use std::sync::Arc;

use common::*;
use kerf_planner::snapshot::*;
use kerf_planner::{Planner, plan};

/// Something becomes of the nodes.
fn happen(dice: &mut Dice, cluster: &mut Snapshot) {
    let (nodes, at) = (cluster.nodes.len(), dice.below(cluster.nodes.len()));
    match dice.below(12) {
        // What is on a GPU, or what its policy says of it.
        0..5 => {
            let gpus = cluster.nodes[at].gpus.len();
            if gpus > 0 {
                let gpu = dice.below(gpus);
                let uuid = cluster.nodes[at].gpus[gpu].uuid.clone();
                let other = random_gpu(dice, uuid, &cluster.geometries);
                cluster.nodes[at].gpus[gpu] = other;
            }
        }
        5 => cluster.nodes[at].ready ^= true,
        6 => _ = cluster.nodes[at].free_milli.insert("cpu".into(), dice.below(9) as i128 * 1000),
        7 => {
            _ = Arc::make_mut(&mut cluster.nodes[at].labels)
                .insert("zone".into(), (*dice.pick(&["a", "b"])).into())
        }
        8 => {
            let other =
                node(&format!("more-{nodes}"), vec![random_gpu(dice, "GPU-m".into(), &cluster.geometries)]);
            cluster.nodes.push(other);
        }
        9 if nodes > 1 => {
            cluster.nodes = (0..nodes).filter(|&n| n != at).map(|n| cluster.nodes[n].clone()).collect();
        }
        10 => cluster.geometries.push(dice.pick(geometries()).clone()),
        _ => {}
    }
}

#[test]
fn a_planner_answers_as_one_that_knows_nothing() {
    let (mut kept, mut rooms, mut refused) = (0, 0, 0);
    for seed in 0..400 {
        let mut dice = Dice(seed);
        let mut planner = Planner::default();
        let (nodes, gpus) = (1 + dice.below(4), dice.below(4));
        let mut cluster = random_cluster(&mut dice, nodes, gpus, geometries());
        for round in 0..8 {
            for _ in 0..dice.below(3) {
                happen(&mut dice, &mut cluster);
            }
            let mut snapshot = cluster.clone();
            add_pods(&mut dice, &mut snapshot);
            let answer = planner.plan(&snapshot);
            assert_eq!(answer, plan(&snapshot), "seed {seed}, round {round}");
            kept += usize::from(!answer.placements.is_empty());
            rooms += answer.rooms.len();
            refused += answer.refusals.len();
            // Some of it is carried out.
            if dice.percent(50) {
                cluster.nodes = carry_out(&snapshot, &answer).nodes;
            }
        }
    }
    assert!(kept > 500 && rooms > 20 && refused > 1000, "{kept} {rooms} {refused}");
}
