//! What pods cost the API server, on a small copy of the cluster of `cargo xtask bench cluster`. Only counted, never timed.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use kerf_e2e::scale::kerf::{Large, Size};
use kerf_e2e::shared::run;
use serde::Deserialize;

#[derive(Deserialize)]
struct Ranges {
    nodes: usize,
    pods: usize,
    /// By writer and kind: what was seen, the least and the most.
    writes: BTreeMap<String, BTreeMap<String, (f64, f64, f64)>>,
}

#[test]
fn writes_per_pod_are_in_range() {
    run(async {
        let ranges: Ranges = serde_json::from_str(include_str!("writes.json")).context("writes.json")?;
        let size = Size { nodes: ranges.nodes, pods: ranges.pods, log: "info".to_owned() };
        let large = Large::start(&size).await?;
        let (_, measured) = large.measure(&size).await?;
        large.check(size.pods).await?;
        in_range(&ranges, &measured.writes_per_pod())
    });
}

fn in_range(ranges: &Ranges, writes: &BTreeMap<(String, String), f64>) -> Result<()> {
    let mut off = Vec::new();
    for ((writer, kind), count) in writes {
        println!("{writer} {kind}: {count:.2}");
        match ranges.writes.get(writer).and_then(|kinds| kinds.get(kind)) {
            Some((_, least, most)) if (*least..=*most).contains(count) => {}
            Some((_, least, most)) => off.push(format!("{writer} {kind}: {count:.2}, not {least} to {most}")),
            None => off.push(format!("{writer} {kind}: {count:.2}, which nobody knows of")),
        }
    }
    for (writer, kinds) in &ranges.writes {
        for (kind, (_, least, _)) in kinds {
            if *least > 0.0 && !writes.contains_key(&(writer.clone(), kind.clone())) {
                off.push(format!("{writer} {kind}: none, not at least {least}"));
            }
        }
    }
    if !off.is_empty() {
        bail!(
            "writes a pod that are out of range; if that is right, change writes.json:\n{}",
            off.join("\n")
        );
    }
    Ok(())
}
