//! The placement protocol, checked in every order in which things can happen.
//!
//! The model is [`world`]: small numbers of pods, places and operators, and a budget of things that go wrong. What the
//! operators do in it is what [`kerf_planner::protocol::next`] says, so it is the code itself that is checked:
//!
//! - *safe*: no partition is ever used by two pods;
//! - *on record*: a pod that runs has its entry (with one operator; a second, paused one can take it away, and then the
//!   daemon alone keeps the partition to its pod until that is repaired);
//! - *rest*: when nothing more is certain to happen, every pod runs where its record and its allocation say, is over
//!   and has left nothing behind, or waits because there is no room;
//! - *no circles*: whatever happens, it comes to rest after finitely many steps.

mod world;

use std::collections::HashMap;

use stateright::{Checker, Model, Property};
use world::{Action, Budget, Missing, Rules, World};

#[derive(Clone)]
struct Cluster<const P: usize, const S: usize, const O: usize> {
    rules: Rules,
    left: Budget,
    /// Whether pods that run have to be on record at every moment.
    strict: bool,
}

impl<const P: usize, const S: usize, const O: usize> Model for Cluster<P, S, O> {
    type State = World<P, S, O>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        vec![World::new(&self.rules, self.left)]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Action>) {
        state.actions(&self.rules, actions);
    }

    fn next_state(&self, state: &Self::State, action: Action) -> Option<Self::State> {
        let after = state.after(&self.rules, action);
        (after != *state).then_some(after)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("safe", |_: &Self, state: &World<P, S, O>| state.is_safe()),
            Property::always("rest", |model: &Self, state: &World<P, S, O>| {
                !state.is_quiet(&model.rules) || state.complaint(&model.rules).is_none()
            }),
        ];
        // Who has started stays, whoever else is deleted or loses its node afterwards.
        if self.rules.together && self.left == (Budget { fails: self.left.fails, ..CALM }) {
            let together = |_: &Self, state: &World<P, S, O>| state.is_all_or_none();
            properties.push(Property::always("together", together));
        }
        if self.strict {
            properties
                .push(Property::always("on record", |_: &Self, state: &World<P, S, O>| state.is_on_record()));
        }
        properties
    }
}

const GOOD: Rules = Rules {
    places_per_node: 1,
    hold_at_once: false,
    lag: false,
    old_reports: false,
    together: false,
    missing: Missing::Nothing,
};
const TOGETHER: Rules = Rules { together: true, ..GOOD };
const LAG: Rules = Rules { lag: true, ..GOOD };
const OLD_REPORTS: Rules = Rules { old_reports: true, ..GOOD };
const CALM: Budget = Budget { fails: 0, cordons: 0, deletes: 0, forces: 0, claims: 0 };

/// Properties that do not hold, each with how it comes to that.
fn broken<const P: usize, const S: usize, const O: usize>(
    rules: Rules,
    left: Budget,
    strict: bool,
) -> Vec<(&'static str, Vec<Action>, String)> {
    let checker = Cluster::<P, S, O> { rules, left, strict }.checker().spawn_bfs().join();
    println!("{} states, {} steps at most", checker.unique_state_count(), checker.max_depth());
    let told = |(name, path): (&'static str, stateright::Path<World<P, S, O>, Action>)| {
        let last = path.last_state();
        let complaint = last.complaint(&rules).unwrap_or_default();
        (name, path.clone().into_actions(), format!("{complaint}, in {last:?}"))
    };
    checker.discoveries().into_iter().map(told).collect()
}

fn holds<const P: usize, const S: usize, const O: usize>(rules: Rules, left: Budget) {
    let broken = broken::<P, S, O>(rules, left, O == 1);
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn one_pod_whatever_happens() {
    let left = Budget { fails: 1, cordons: 2, deletes: 1, forces: 1, claims: 1 };
    holds::<1, 2, 1>(GOOD, left);
    holds::<1, 2, 1>(Rules { hold_at_once: true, ..GOOD }, left);
    holds::<1, 2, 1>(Rules { places_per_node: 2, ..GOOD }, left);
}

#[test]
fn two_pods_for_one_place() {
    holds::<2, 1, 1>(GOOD, Budget { fails: 1, cordons: 1, deletes: 1, forces: 1, claims: 1 });
    holds::<2, 1, 1>(
        Rules { hold_at_once: true, ..GOOD },
        Budget { cordons: 1, deletes: 1, forces: 1, ..CALM },
    );
}

#[test]
fn two_pods_on_two_nodes() {
    holds::<2, 2, 1>(GOOD, Budget { fails: 1, cordons: 1, forces: 1, ..CALM });
}

#[test]
fn caches_that_lag() {
    holds::<1, 2, 1>(LAG, Budget { fails: 1, cordons: 1, forces: 1, ..CALM });
    holds::<1, 2, 1>(LAG, Budget { cordons: 1, deletes: 1, claims: 1, ..CALM });
    holds::<2, 1, 1>(LAG, Budget { cordons: 1, forces: 1, ..CALM });
}

#[test]
fn two_operators() {
    holds::<1, 2, 2>(GOOD, Budget { cordons: 1, ..CALM });
    holds::<1, 2, 2>(GOOD, Budget { fails: 1, forces: 1, ..CALM });
    holds::<2, 1, 2>(GOOD, Budget { fails: 1, forces: 1, ..CALM });
    holds::<2, 1, 2>(GOOD, Budget { cordons: 1, ..CALM });
}

/// The gate may go before the daemon has followed the spec: Prepare waits for what it then makes.
#[test]
fn places_that_are_ready_by_an_old_report() {
    let left = Budget { fails: 1, cordons: 1, deletes: 1, forces: 1, claims: 1 };
    holds::<1, 2, 1>(OLD_REPORTS, left);
    holds::<2, 1, 1>(OLD_REPORTS, left);
    holds::<2, 2, 1>(OLD_REPORTS, Budget { fails: 1, cordons: 1, ..CALM });
    holds::<1, 2, 1>(Rules { lag: true, ..OLD_REPORTS }, Budget { fails: 1, cordons: 1, forces: 1, ..CALM });
    holds::<2, 1, 2>(OLD_REPORTS, Budget { fails: 1, forces: 1, ..CALM });
    assert_eq!(circle::<2, 1, 1>(&OLD_REPORTS, Budget { claims: 0, ..left }), None);
}

#[test]
fn pods_that_start_together() {
    holds::<2, 2, 1>(TOGETHER, Budget { fails: 1, ..CALM });
    // One place for both: none has it, and none has a claim.
    holds::<2, 1, 1>(TOGETHER, CALM);
    holds::<2, 2, 1>(TOGETHER, Budget { cordons: 1, deletes: 1, ..CALM });
    holds::<2, 2, 1>(TOGETHER, Budget { cordons: 2, ..CALM });
    assert_eq!(circle::<2, 1, 1>(&TOGETHER, Budget { cordons: 1, ..CALM }), None);
    assert_eq!(circle::<2, 2, 1>(&TOGETHER, Budget { cordons: 1, ..CALM }), None);
}

/// A run of certain steps that comes back to where it began, if there is one. Where an operator's cache is behind, only
/// the watch counts as certain: it delivers at last. Of two operators the second stops at last, since it does not hold
/// the Lease (two that never stop can undo each other's entries for ever, in an unlucky order).
fn circle<const P: usize, const S: usize, const O: usize>(rules: &Rules, left: Budget) -> Option<String> {
    let start = World::<P, S, O>::new(rules, left);
    let mut numbers = HashMap::from([(start, 0)]);
    let mut states = vec![start];
    let mut edges: Vec<Vec<(Action, usize)>> = Vec::new();
    let mut actions = Vec::new();
    while edges.len() < states.len() {
        let state = states[edges.len()];
        actions.clear();
        state.actions(rules, &mut actions);
        let stale = actions.iter().any(|action| action.is_watch());
        let mut certain = Vec::new();
        for &action in &actions {
            let after = state.after(rules, action);
            if after == state {
                continue;
            }
            let to = *numbers.entry(after).or_insert_with(|| {
                states.push(after);
                states.len() - 1
            });
            let rival = matches!(action, Action::Decide { operator: 1.., .. });
            if action.is_certain() && !rival && (!stale || action.is_watch()) {
                certain.push((action, to));
            }
        }
        edges.push(certain);
    }
    // States that lead only to ends are left out, and those that only such states lead to: a circle is left.
    let mut outgoing: Vec<usize> = edges.iter().map(Vec::len).collect();
    let mut from: Vec<Vec<usize>> = vec![Vec::new(); states.len()];
    for (state, certain) in edges.iter().enumerate() {
        certain.iter().for_each(|&(_, to)| from[to].push(state));
    }
    let mut ends: Vec<usize> = (0..states.len()).filter(|&state| outgoing[state] == 0).collect();
    while let Some(end) = ends.pop() {
        for &before in &from[end] {
            outgoing[before] -= 1;
            if outgoing[before] == 0 {
                ends.push(before);
            }
        }
    }
    let mut at = (0..states.len()).find(|&state| outgoing[state] > 0)?;
    let (mut seen, mut story) = (HashMap::new(), Vec::new());
    while !seen.contains_key(&at) {
        seen.insert(at, story.len());
        let &(action, to) = edges[at].iter().find(|&&(_, to)| outgoing[to] > 0)?;
        story.push((action, at));
        at = to;
    }
    let steps =
        story[seen[&at]..].iter().map(|&(action, state)| format!("{action:?} in {:?}\n", states[state]));
    Some(steps.collect())
}

#[test]
fn nothing_goes_round_in_circles() {
    let left = Budget { fails: 1, cordons: 1, deletes: 1, forces: 1, claims: 1 };
    assert_eq!(circle::<1, 2, 1>(&GOOD, left), None);
    assert_eq!(circle::<2, 1, 1>(&GOOD, Budget { claims: 0, ..left }), None);
    assert_eq!(circle::<1, 2, 1>(&LAG, Budget { fails: 1, cordons: 1, forces: 1, ..CALM }), None);
    assert_eq!(circle::<1, 2, 2>(&GOOD, Budget { fails: 1, ..CALM }), None);
}

/// The first property that a world without the safeguard breaks.
fn without<const P: usize, const S: usize, const O: usize>(
    missing: Missing,
    rules: Rules,
    left: Budget,
) -> Vec<&'static str> {
    let mut names: Vec<&str> = broken::<P, S, O>(Rules { missing, ..rules }, left, true)
        .into_iter()
        .map(|(name, ..)| name)
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn every_safeguard_is_needed() {
    let held = Rules { hold_at_once: true, ..GOOD };
    // A place is taken from under a pod that was bound a moment ago.
    assert_eq!(without::<1, 2, 1>(Missing::LiveRead, LAG, Budget { cordons: 1, ..CALM }), ["on record"]);
    // A pod whose bind came late runs on a place that was given up.
    assert_eq!(without::<1, 2, 1>(Missing::ClaimCheck, GOOD, Budget { cordons: 1, ..CALM }), ["on record"]);
    // After a force-delete the next pod starts beside a process that is still there.
    assert_eq!(without::<2, 1, 1>(Missing::HolderCheck, GOOD, Budget { forces: 1, ..CALM }), ["safe"]);
    // Claims stay for ever.
    assert_eq!(without::<1, 2, 1>(Missing::HoldRelease, held, Budget { forces: 1, ..CALM }), ["rest"]);
    // Two leaders give one place to two pods, and one of them runs already.
    assert_eq!(without::<2, 1, 2>(Missing::Nothing, GOOD, CALM), [""; 0]);
    assert_eq!(without::<2, 1, 2>(Missing::Preconditions, GOOD, CALM), ["on record"]);
    // Two leaders make two entries for one pod: each undoes the other's allocation, or evicts the pod where it runs.
    assert!(circle::<1, 2, 2>(&GOOD, CALM).is_none());
    assert!(circle::<1, 2, 2>(&Rules { missing: Missing::Counting, ..GOOD }, CALM).is_some());
    // One of a gang starts before the other has its place; or keeps its place while the other has none.
    assert_eq!(without::<2, 2, 1>(Missing::HoldingBack, TOGETHER, CALM), ["rest", "together"]);
    assert_eq!(without::<2, 2, 1>(Missing::GivingBack, TOGETHER, Budget { cordons: 1, ..CALM }), ["rest"]);
    // A pod waits for ever on a node where its place is not.
    assert_eq!(without::<1, 2, 1>(Missing::Eviction, GOOD, Budget { cordons: 1, ..CALM }), ["rest"]);
}
