//! Kerf's engine as a cluster of the online runs.

use kerf_planner::fleet::{Fleet, Numbered};
use kerf_planner::moves::{Limits, Outcome, Tenant, Tenants, carry_out, make_room};
use kerf_planner::snapshot::Snapshot;

use crate::online::{Cluster, Tenancy};

/// What the engine may do for a job that has no place.
#[derive(Clone, Copy, Debug)]
pub struct Moving {
    /// Most moves.
    pub moves: u32,
    /// Share of the jobs that may be moved.
    pub share: f64,
}

/// See the module.
#[derive(Debug)]
pub struct Engine<'a> {
    fleet: Fleet<'a>,
    asked: Vec<Numbered<'a>>,
    tenants: Tenants<'a>,
    moving: Moving,
    /// Places that needed so many moves, by their number.
    pub with_moves: Vec<u64>,
    /// Placements on an instance that was there already.
    pub reused: u64,
    /// All placements.
    pub placed: u64,
}

impl<'a> Engine<'a> {
    /// The snapshot's GPUs; its requests are the kinds of jobs.
    pub fn new(snapshot: &'a Snapshot, moving: Moving) -> Self {
        let mut fleet = Fleet::of(snapshot);
        let asked = snapshot.requests.iter().map(|request| fleet.numbered(request)).collect();
        Self {
            fleet,
            asked,
            tenants: Tenants::default(),
            moving,
            with_moves: vec![0; moving.moves as usize + 1],
            reused: 0,
            placed: 0,
        }
    }
}

impl Cluster for Engine<'_> {
    fn place(&mut self, kind: usize, luck: f64) -> Option<Tenancy> {
        let asked = self.asked[kind];
        let (node, place, moves) = match self.fleet.best(asked) {
            Some((node, place)) => {
                self.fleet.take(asked, node, &place);
                (node, place, 0)
            }
            None if self.moving.moves == 0 => return None,
            None => {
                let limits = Limits { moves: self.moving.moves, ..Limits::USUAL };
                let Outcome::Found(room) = make_room(&mut self.fleet, &mut self.tenants, asked, limits)
                else {
                    return None;
                };
                carry_out(&mut self.fleet, &mut self.tenants, asked, &room);
                (room.node, room.place, room.moves.len())
            }
        };
        self.with_moves[moves] += 1;
        self.placed += 1;
        self.reused += u64::from(place.devices.iter().all(|device| device.offer.exists));
        let price = (luck < self.moving.share).then_some(1);
        let id = self.tenants.enter(Tenant { asked, node, place, price, budgets: &[] });
        Some(Tenancy { first: id as u64, second: 0 })
    }

    fn end(&mut self, tenancy: Tenancy) {
        if let Some(tenant) = self.tenants.leave(tenancy.first as usize) {
            self.fleet.put_back(tenant.asked, tenant.node, &tenant.place);
        }
    }
}
