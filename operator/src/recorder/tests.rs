use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::jiff::Timestamp;
use kerf_planner::snapshot::Snapshot;
use kube::ResourceExt;
use serde_json::json;

use super::pack::{Packer, unpack};
use super::{Planned, Shelf, hash};
use crate::cache::World;
use crate::scheduler::cycle::decide;
use crate::scheduler::memory::Memory;
use crate::scheduler::selectors::Selectors;
use crate::testing::{gated_pod, gpu, world};

/// So many nodes with two GPUs.
fn fleet(nodes: usize) -> World {
    let gpus = |node| (0..2).map(|index| gpu(&format!("GPU-{node}-{index}"), index)).collect();
    world((0..nodes).map(gpus).collect(), json!({"mode": "Dynamic"}))
}

/// The cycle of the world with one more pod, and the world after it.
fn cycle(world: World, pod: &str, resource: &str) -> (Planned, World) {
    let mut world = world.with_pod(gated_pod(pod, resource, json!({})));
    let decision = decide(&world, &Memory::default(), &Selectors::default(), Instant::now(), 1_800_000_000);
    for write in &decision.specs {
        let spec = write.spec.clone();
        world.replace_gpu_node(|node| node.spec = spec, &write.node.name_any());
    }
    (decision.planned.expect("a pod was planned for"), world)
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

#[test]
fn every_cycle_on_record_comes_back_as_it_was() {
    let shelf = Arc::new(Shelf::new(1 << 20));
    let mut packer = Packer::new(Arc::clone(&shelf));
    let mut world = fleet(8);
    let mut expected = Vec::new();
    for number in 0..5 {
        let (planned, after) = cycle(world, &format!("p{number}"), "nvidia.com/mig-3g.40gb");
        expected.push((planned.snapshot.clone(), planned.plan.clone()));
        packer.take_down(at(number), planned);
        world = after;
    }
    let list = shelf.list();
    assert_eq!(list.plans.iter().map(|entry| entry.number).collect::<Vec<_>>(), [5, 4, 3, 2, 1]);
    for (entry, (snapshot, plan)) in list.plans.iter().rev().zip(&expected) {
        let (whole, entry) = shelf.get(entry.number).unwrap();
        let found: (Snapshot, _) = unpack(&whole, &entry.body).unwrap();
        assert_eq!((&found.0, &found.1), (snapshot, plan));
        assert_eq!(entry.hash, hash(&found.0));
        assert_eq!((entry.counts.requests, entry.counts.placements), (1, 1));
    }
    // One group: a pod more is a node or two more, not the fleet.
    let (first, last) = (shelf.get(1).unwrap(), shelf.get(5).unwrap());
    assert!(Arc::ptr_eq(&first.0, &last.0));
    assert!(last.1.body.len() < first.0.len(), "{} of {}", last.1.body.len(), first.0.len());
}

#[test]
fn the_oldest_go_when_there_is_no_more_room() {
    let limit = 20_000;
    let shelf = Arc::new(Shelf::new(limit));
    let mut packer = Packer::new(Arc::clone(&shelf));
    let mut world = fleet(8);
    for number in 0..40 {
        let (planned, after) = cycle(world, &format!("p{number}"), "nvidia.com/mig-1g.10gb");
        packer.take_down(at(number), planned);
        world = after;
        assert!(shelf.list().bytes <= limit);
    }
    let list = shelf.list();
    assert_eq!(list.plans.first().map(|entry| entry.number), Some(40));
    assert!(shelf.get(1).is_none());
    let oldest = list.plans.last().unwrap().number;
    assert!((2..40).contains(&oldest), "{oldest}");
    let (whole, entry) = shelf.get(oldest).unwrap();
    assert_eq!(hash(&unpack(&whole, &entry.body).unwrap().0), entry.hash);
}

#[test]
fn the_same_refusals_again_are_counted() {
    let shelf = Arc::new(Shelf::new(1 << 20));
    let mut packer = Packer::new(Arc::clone(&shelf));
    let mut world = fleet(1);
    for second in 0..3 {
        let (planned, after) = cycle(world, "p", "nvidia.com/mig-9g.90gb");
        packer.take_down(at(second), planned);
        world = after;
    }
    let list = shelf.list();
    assert_eq!(list.plans.len(), 1);
    assert_eq!((list.plans[0].times, list.plans[0].time, list.plans[0].until), (3, at(0), at(2)));
    let (planned, _) = cycle(world, "q", "nvidia.com/mig-9g.90gb");
    packer.take_down(at(3), planned);
    assert_eq!(shelf.list().plans.len(), 2);
}
