//! Room by moves, for requests that a cycle leaves without a place: for whom it is looked for, and who may be moved for
//! them. The search is [`crate::moves`]'.

use std::collections::{BTreeSet, HashMap};

use crate::fleet::Fleet;
use crate::moves::{self, Limits, Outcome, Tenant, Tenants};
use crate::place::Solution;
use crate::plan::{Move, NoMoves, PlacedDevice, Placement, Plan, RefusalKind, Room, Scope, Verdict};
use crate::snapshot::{Movable, NodeIndex, Request};

/// For so many kinds of requests room is looked for in one cycle; the others' turn comes in later ones.
const SEARCHES: usize = 2;

/// Turns the first refusal for which moves make room into that room.
pub fn make(fleet: &mut Fleet<'_>, plan: &mut Plan) {
    let snapshot = fleet.snapshot;
    // What is not found for one is not found for another of its kind.
    let mut looked_for = HashMap::new();
    for index in 0..plan.refusals.len() {
        let refusal = &plan.refusals[index];
        let request = &snapshot.requests[refusal.request];
        let never =
            matches!(&refusal.verdict, Verdict::Impossible(proof) if proof.scope == Scope::WhateverEnds);
        // Room for one of a gang is none for all.
        let may = refusal.kind == RefusalKind::NoRoom && !never && request.gang.is_none();
        let Some(waited) = request.waited_seconds.filter(|_| may) else { continue };
        let asked = fleet.numbered(request);
        let kind = (asked.shape, asked.pod, &request.avoid, request.priority);
        let known = looked_for.get(&kind).copied();
        if known.is_none() && looked_for.len() == SEARCHES {
            continue;
        }
        let found = known.map_or_else(|| search(fleet, refusal.request, request, waited), Err);
        match found {
            Ok(room) => {
                plan.refusals.remove(index);
                plan.rooms.push(room);
                return;
            }
            Err(why) => {
                looked_for.insert(kind, why);
                plan.refusals[index].moves = Some(why);
            }
        }
    }
}

fn search(fleet: &mut Fleet<'_>, index: usize, request: &Request, waited: u64) -> Result<Room, NoMoves> {
    let snapshot = fleet.snapshot;
    let may = |pod: &Movable| pod.request.priority <= request.priority && pod.after_seconds <= waited;
    let movable = || snapshot.movable.iter().enumerate().filter(|(_, pod)| may(pod));
    let limits: BTreeSet<u32> = movable().map(|(_, pod)| pod.most_moves).filter(|&most| most > 0).collect();
    // Those who may not be moved yet do not count, and those who never may for this one.
    let later = |pod: &Movable| pod.request.priority <= request.priority && pod.after_seconds > waited;
    let too_early = snapshot.movable.iter().any(later);
    let mut outcome = if too_early { NoMoves::TooEarly } else { NoMoves::Useless };
    for most in limits {
        let mut tenants = Tenants::under(&snapshot.budgets);
        // By number of the tenant: whose it is.
        let mut pods = Vec::new();
        for (pod, movable) in movable().filter(|(_, pod)| pod.most_moves >= most) {
            let asked = fleet.numbered(&movable.request);
            let Some(place) = fleet.held(asked, movable.node, &movable.devices) else {
                // It could be moved, but it is not known from where.
                outcome = NoMoves::NotFound;
                continue;
            };
            let (node, price, budgets) = (movable.node, Some(movable.price), movable.budgets.as_slice());
            tenants.enter(Tenant { asked, node, place: place.into(), price, budgets });
            pods.push(pod);
        }
        let asked = fleet.numbered(request);
        // More than all there are cannot move.
        let most = most.min(pods.len() as u32);
        match moves::make_room(fleet, &mut tenants, asked, Limits { moves: most, ..Limits::USUAL }) {
            Outcome::Found(room) => {
                let moved = |step: &moves::Move| {
                    let pod = pods[step.tenant];
                    let devices = devices(&snapshot.movable[pod].request, &step.place);
                    Move { pod, node: step.node, devices }
                };
                let moves = room.moves.iter().map(moved).collect();
                return Ok(Room { place: placement(index, request, room.node, &room.place), moves });
            }
            Outcome::Nothing => {}
            Outcome::GaveUp => outcome = NoMoves::NotFound,
        }
    }
    Err(outcome)
}

/// The place of a request.
pub fn placement(index: usize, request: &Request, node: NodeIndex, solution: &Solution) -> Placement {
    Placement { request: index, node, devices: devices(request, solution) }
}

fn devices(request: &Request, solution: &Solution) -> Vec<PlacedDevice> {
    solution.devices.iter().map(|chosen| chosen.placed(&request.devices)).collect()
}
