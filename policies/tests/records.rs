//! Snapshots and plans written down: they come back the same, and what is read that makes no sense is an error or a plan,
//! never a panic. Recorded cases are planned as they were.

mod common;
#[path = "common/nonsense.rs"]
mod nonsense;

use common::*;
use kerf_planner::check::violations;
use kerf_planner::plan;
use kerf_planner::plan::Plan;
use kerf_planner::snapshot::*;
use proptest::prelude::*;
use serde::Deserialize;

fn read(text: &str) -> Result<Snapshot, serde_json::Error> {
    serde_json::from_str(text)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_down_comes_back_and_is_planned_the_same(seed: u64) {
        let snapshot = random_world(&mut Dice(seed));
        let text = serde_json::to_string(&snapshot).expect("JSON");
        let again = read(&text).expect("a snapshot");
        prop_assert_eq!(&again, &snapshot);
        let planned = plan(&snapshot);
        prop_assert_eq!(&plan(&again), &planned);
        let text = serde_json::to_string(&planned).expect("JSON");
        prop_assert_eq!(serde_json::from_str::<Plan>(&text).expect("a plan"), planned);
    }

    #[test]
    fn text_that_was_cut_or_garbled_is_an_error_and_no_panic(seed: u64, at: usize, byte: u8) {
        let text = serde_json::to_string(&random_world(&mut Dice(seed))).expect("JSON");
        let mut bytes = text.into_bytes();
        let at = at % bytes.len();
        prop_assert!(serde_json::from_slice::<Snapshot>(&bytes[..at]).is_err());
        bytes[at] = byte;
        // Another digit is another snapshot.
        if let Ok(snapshot) = serde_json::from_slice::<Snapshot>(&bytes) {
            violations(&snapshot, &plan(&snapshot));
        }
    }
}

#[test]
fn a_snapshot_that_makes_no_sense_is_planned_without_a_panic() {
    let mut planned = 0;
    for seed in 0..6000 {
        let mut dice = Dice(seed);
        let mut value = serde_json::to_value(random_world(&mut Dice(dice.next()))).expect("JSON");
        let recorded = plan(&serde_json::from_value(value.clone()).expect("a snapshot"));
        for _ in 0..1 + dice.below(6) {
            nonsense::spoil(&mut value, &mut |bound| dice.below(bound));
        }
        let Ok(mut snapshot) = serde_json::from_value::<Snapshot>(value) else { continue };
        // Amounts that JSON's numbers do not reach.
        let extreme = [i128::MAX, i128::MIN, i128::MAX / 2, -1];
        let amounts = snapshot.nodes.iter_mut().flat_map(|node| node.free_milli.values_mut());
        amounts.filter(|_| dice.percent(5)).for_each(|amount| *amount = extreme[seed as usize % 4]);
        let requests =
            snapshot.requests.iter_mut().chain(snapshot.movable.iter_mut().map(|one| &mut one.request));
        let amounts = requests.flat_map(|request| request.pod.milli.values_mut());
        amounts.filter(|_| dice.percent(5)).for_each(|amount| *amount = extreme[seed as usize % 3]);
        planned += 1;
        let text = format!("seed {seed}");
        let outcome = std::panic::catch_unwind(|| {
            violations(&snapshot, &plan(&snapshot));
            // The checker reads plans from elsewhere, too.
            violations(&snapshot, &recorded);
        });
        assert!(outcome.is_ok(), "{text}");
    }
    assert!(planned > 2000, "only {planned} were snapshots");
}

/// What `kerf-whatif replay --as-test` writes.
#[derive(Deserialize)]
struct Case {
    snapshot: Snapshot,
    plan: Plan,
}

#[test]
fn what_was_recorded_is_planned_as_it_was() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let mut cases = 0;
    for file in std::fs::read_dir(folder).expect("a folder") {
        let file = file.expect("a file").path();
        let text = std::fs::read_to_string(&file).expect("text");
        let case: Case =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let planned = plan(&case.snapshot);
        assert_eq!(planned, case.plan, "{}", file.display());
        assert_eq!(violations(&case.snapshot, &planned), Vec::<String>::new(), "{}", file.display());
        cases += 1;
    }
    assert!(cases > 0);
}
