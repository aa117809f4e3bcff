//! Decisions per second: place and release of one request on a nearly full fleet of several models.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use kerf_planner::fleet::{Fleet, Numbered};
use kerf_planner::moves::{Tenant, Tenants};
use kerf_planner::snapshot::{Geometry, PodNeeds, Profile, Request, Snapshot};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::fleet::{large, need, pod};

/// Nodes of eight GPUs.
pub const NODES: [usize; 3] = [125, 1_250, 12_500];
/// Decisions that are measured.
const DECISIONS: usize = 100_000;
/// Refusals that are measured.
const REFUSALS: usize = 1_000;

/// Requests by need: memory and multiprocessors, whatever the model; one in four for a zone.
fn requests(geometries: &[Geometry]) -> Vec<Request> {
    let mut requests = Vec::new();
    for (gib, multiprocessors) in [(9, 14), (19, 14), (19, 28), (39, 42), (39, 56), (78, 98)] {
        for zone in [None, None, None, Some("a")] {
            let fitting = |profile: &Profile| {
                profile.memory_bytes >= gib << 30 && profile.multiprocessors >= multiprocessors
            };
            let selector = zone.map(|zone| ("zone".to_owned(), zone.to_owned()));
            requests.push(Request {
                id: format!("{gib}-{multiprocessors}-{zone:?}"),
                devices: vec![need(geometries, &fitting)],
                pod: PodNeeds { node_selector: selector.into_iter().collect(), ..pod(2) },
                ..Request::default()
            });
        }
    }
    requests
}

/// Time per decision by the number of nodes, eight GPUs each: a table.
pub fn table(nodes: &[usize], geometries: &[Geometry]) -> String {
    let mut table = "| GPUs | built from nothing | placed and released: mean | p99 | refused: mean | p99 | decisions/s |\n\
        |---|---|---|---|---|---|---|"
        .to_owned();
    for &nodes in nodes {
        let mut snapshot = large(nodes, geometries);
        snapshot.requests = requests(geometries);
        _ = write!(table, "\n{}", row(&snapshot));
    }
    table
}

/// What was measured on a fleet: time to build it, and of each decision and refusal.
struct Measured {
    built: Duration,
    placed: Vec<Duration>,
    refused: Vec<Duration>,
}

fn measured<'a>(snapshot: &'a Snapshot) -> Measured {
    let started = Instant::now();
    let mut fleet = Fleet::of(snapshot);
    let built = started.elapsed();
    let asked: Vec<Numbered<'a>> = snapshot.requests.iter().map(|request| fleet.numbered(request)).collect();
    let mut dice = ChaCha8Rng::seed_from_u64(1);
    let (mut tenants, mut ids) = (Tenants::default(), Vec::new());
    let enter = |tenants: &mut Tenants<'a>, asked, node, place| {
        tenants.enter(Tenant { asked, node, place, price: None, budgets: &[] })
    };
    // Full; what is refused now is measured, too.
    let mut without = Vec::new();
    while without.len() < REFUSALS {
        let asked = asked[dice.random_range(0..asked.len())];
        let started = Instant::now();
        match fleet.best(asked) {
            Some((node, place)) => {
                fleet.take(asked, node, &place);
                ids.push(enter(&mut tenants, asked, node, place));
            }
            None => without.push(started.elapsed()),
        }
    }
    // A tenth of it empty, at random; then each decision places one, and another, any, is released.
    let mut release = |tenants: &mut Tenants<'a>, ids: &mut Vec<usize>, fleet: &mut Fleet<'a>| {
        if let Some(tenant) = tenants.leave(ids.swap_remove(dice.random_range(0..ids.len()))) {
            let started = Instant::now();
            fleet.put_back(tenant.asked, tenant.node, &tenant.place);
            return started.elapsed();
        }
        Duration::ZERO
    };
    for _ in 0..ids.len() / 10 {
        release(&mut tenants, &mut ids, &mut fleet);
    }
    let mut dice = ChaCha8Rng::seed_from_u64(2);
    let mut placed = Vec::with_capacity(DECISIONS);
    for _ in 0..DECISIONS {
        let request = &snapshot.requests[dice.random_range(0..asked.len())];
        let started = Instant::now();
        let asked = fleet.numbered(request);
        match fleet.best(asked) {
            Some((node, place)) => {
                fleet.take(asked, node, &place);
                let took = started.elapsed();
                ids.push(enter(&mut tenants, asked, node, place));
                placed.push(took + release(&mut tenants, &mut ids, &mut fleet));
            }
            None => without.push(started.elapsed()),
        }
    }
    Measured { built, placed, refused: without }
}

fn row(snapshot: &Snapshot) -> String {
    let Measured { built, mut placed, mut refused } = measured(snapshot);
    let all: Duration = placed.iter().sum();
    let gpus: usize = snapshot.nodes.iter().map(|node| node.gpus.len()).sum();
    format!(
        "| {gpus} | {built:.1?} | {} | {} | {:.0} |",
        times(&mut placed),
        times(&mut refused),
        placed.len() as f64 / all.as_secs_f64()
    )
}

/// Milliseconds of a decision on average by the number of GPUs, for the chart.
pub fn line(nodes: &[usize], geometries: &[Geometry]) -> Vec<(f64, f64)> {
    let point = |&nodes: &usize| {
        let mut snapshot = large(nodes, geometries);
        snapshot.requests = requests(geometries);
        let placed = measured(&snapshot).placed;
        (8.0 * nodes as f64, 1e3 * placed.iter().sum::<Duration>().as_secs_f64() / placed.len().max(1) as f64)
    };
    nodes.iter().map(point).collect()
}

/// `mean | p99`
fn times(all: &mut [Duration]) -> String {
    if all.is_empty() {
        return "– | –".into();
    }
    all.sort_unstable();
    let mean = all.iter().sum::<Duration>() / all.len() as u32;
    format!("{mean:.1?} ({}) | {:.1?}", all.len(), all[all.len() * 99 / 100])
}
