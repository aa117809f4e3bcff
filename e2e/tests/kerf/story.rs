//! A user's first day: pods ask for MIG slices, GPUs reshape under them, neighbours never notice.

use anyhow::{Result, ensure};
use kerf_e2e::kerf::{Kerf, Running, for_node, gpu_pod, mig, no_overlap, on};
use serde_json::json;

use crate::shared::test;

/// Fills one GPU of the node with small instances, then mixes, then takes it whole.
async fn fill_mix_whole(kerf: &Kerf, namespace: &str, node: &str, story: &Story) -> Result<()> {
    let policy =
        kerf.policy(node, for_node(node, json!({ "mode": "Dynamic", "modeSwitch": "WithReset" }))).await?;
    ensure!(policy.spec.mig.mode == kerf_crds::partition_policy::MigMode::Dynamic);
    let mut seen: Vec<Running> = Vec::new();
    for round in story.rounds {
        let mut pods = Vec::new();
        for (index, profile) in round.iter().enumerate() {
            let name = format!("p{}-{index}", seen.len());
            let pod = on(node, gpu_pod(&name, &[(&mig(profile), 1)]));
            kerf.create_pod(namespace, &pod).await?;
            pods.push((name, *profile));
        }
        let mut running = Vec::new();
        for (name, profile) in &pods {
            let pod = kerf.wait_running(namespace, name).await?;
            ensure!(pod.devices.len() == 1, "{name} sees {:?}", pod.devices);
            ensure!(
                pod.devices[0].profile == *profile,
                "{name} asked for {profile} and has {:?}",
                pod.devices[0]
            );
            ensure!(pod.report.nvidia_visible_devices.as_deref() == Some("void"), "{name}: {:?}", pod.report);
            running.push(pod);
        }
        no_overlap(&running)?;
        // Every neighbour is what it was: the same instance, not one of the same name.
        for before in &running {
            let now = kerf.wait_running(namespace, &before.pod).await?;
            ensure!(
                now.devices == before.devices,
                "{} moved from {:?} to {:?}",
                before.pod,
                before.devices,
                now.devices
            );
        }
        for (name, _) in &pods {
            kerf.delete_pod(namespace, name).await?;
        }
        seen.extend(running);
    }
    kerf.wait_no_leak(namespace).await?;
    kerf.delete_policy(node).await
}

struct Story {
    rounds: &'static [&'static [&'static str]],
}

#[test]
fn an_a100_is_cut_into_seven_then_mixed_then_whole() {
    const ROUNDS: &[&[&str]] = &[
        &["1g.10gb"; 7],
        &["2g.20gb", "3g.40gb", "1g.10gb", "1g.10gb"],
        &["4g.40gb", "3g.40gb"],
        &["7g.80gb"],
    ];
    test("a100", |kerf, namespace| async move {
        fill_mix_whole(kerf, &namespace, "story-a100", &Story { rounds: ROUNDS }).await
    });
}

#[test]
fn an_h100_is_cut_into_seven_then_mixed_then_whole() {
    const ROUNDS: &[&[&str]] = &[
        &["1g.10gb"; 7],
        &["1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb"],
        &["4g.40gb", "2g.20gb", "1g.10gb"],
        &["7g.80gb", "7g.80gb"],
    ];
    test("h100", |kerf, namespace| async move {
        fill_mix_whole(kerf, &namespace, "story-h100", &Story { rounds: ROUNDS }).await
    });
}

#[test]
fn an_rtx_pro_6000_has_other_slices_and_engines_and_needs_no_code_of_its_own() {
    const ROUNDS: &[&[&str]] = &[
        &["1g.24gb", "1g.24gb+gfx", "1g.24gb-me", "1g.24gb+me"],
        &["2g.48gb", "1g.24gb+me.all", "1g.24gb-me"],
        &["4g.96gb", "4g.96gb+gfx"],
    ];
    test("rtx", |kerf, namespace| async move {
        fill_mix_whole(kerf, &namespace, "story-rtx", &Story { rounds: ROUNDS }).await
    });
}

#[test]
fn a_gpu_that_nobody_has_heard_of_works() {
    const ROUNDS: &[&[&str]] =
        &[&["1g.9gb+vis", "1g.9gb", "1g.9gb"], &["1g.22gb", "1g.22gb"], &["q3-tall", "1g.9gb"], &["5g.88gb"]];
    test("odd", |kerf, namespace| async move {
        fill_mix_whole(kerf, &namespace, "story-odd", &Story { rounds: ROUNDS }).await
    });
}
