//! The command-line tool, as a person uses it.

use std::path::Path;
use std::process::{Command, Output};

fn kerf_sim(root: &Path, arguments: &[&str]) -> Output {
    // No NVML client takes part, so any file will do for the library.
    Command::new(env!("CARGO_BIN_EXE_kerf-sim"))
        .env("KERF_SIM_NVML", env!("CARGO_BIN_EXE_kerf-sim"))
        .env("KERF_SIM_ROOT", root)
        .args(arguments)
        .output()
        .unwrap()
}

#[track_caller]
fn ok(root: &Path, arguments: &[&str]) -> String {
    let output = kerf_sim(root, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(root: &Path, arguments: &[&str]) -> String {
    let output = kerf_sim(root, arguments);
    assert!(!output.status.success(), "{arguments:?} was accepted");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_node_is_made_shown_and_broken() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    assert!(refused(&root, &["show"]).contains("kerf-sim create"));
    assert!(refused(&root, &["create", "a100-41"]).contains("a100-40"));
    ok(&root, &["create", "--name", "n1", "--mig", "a100-40:2", "h100-80-sxm"]);
    assert!(refused(&root, &["create", "a100-40"]).contains("already"));

    assert!(ok(&root, &["orphan", "0", "3g.20gb", "--start", "4"]).contains("GPU instance 2"));
    ok(&root, &["fault", "nvmlGpuInstanceDestroy", "in_use", "--times", "2"]);
    assert!(refused(&root, &["fault", "nvmlGpuInstanceDestroy", "no_such"]).contains("IN_USE"));
    let hold = ok(&root, &["hold", "0", "--gi", "2"]);
    ok(&root, &["lose", "1"]);
    let shown = ok(&root, &["show"]);
    for part in ["GPU 0 a100-40", "GI  2", "3g.20gb", "LOST", "fault nvmlGpuInstanceDestroy", "hold 1"] {
        assert!(shown.contains(part), "{part} is not in:\n{shown}");
    }
    ok(&root, &["release", hold.trim()]);
    ok(&root, &["clear"]);
    ok(&root, &["reboot"]);
    let shown = ok(&root, &["show"]);
    for part in ["GI ", "LOST", "fault", "hold"] {
        assert!(!shown.contains(part), "{part} is still in:\n{shown}");
    }
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines[1].ends_with("MIG on") && lines[3].ends_with("MIG off"), "Ampere keeps the mode:\n{shown}");
}
