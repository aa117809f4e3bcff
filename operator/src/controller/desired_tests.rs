use serde_json::json;

use super::*;
use crate::testing::{gpu, gpu_node, instance, policy, wanted};
use kerf_crds::gpu_node::{ClaimOwner, ClaimReference, WantedShare};

fn claimed(profile: &str, start: u32) -> Partition {
    Partition {
        gpu: "GPU-0".into(),
        instance: Some(wanted(profile, start)),
        share: None,
        owner: Owner::Claim(ClaimOwner {
            namespace: "default".into(),
            name: "c".into(),
            pod: "p".into(),
            pod_uid: "u".into(),
            request: "r".into(),
        }),
    }
}

fn layout(
    mig: serde_json::Value,
    instances: Vec<kerf_crds::gpu_node::Instance>,
    claims: &[Partition],
) -> (Vec<(String, u32)>, Option<LayoutProblem>) {
    let mut gpu = gpu("GPU-0", 0);
    gpu.instances = instances;
    let node = gpu_node("n", vec![gpu.clone()], Vec::new());
    let claims: Vec<&Partition> = claims.iter().collect();
    let (entries, problem) =
        static_layout(node.status.as_ref().unwrap(), &gpu, &policy("p", json!({"mig": mig})), &[], &claims);
    let shape = |entry: Partition| {
        let instance = entry.instance.unwrap();
        (instance.profile, instance.placement.start)
    };
    (entries.into_iter().map(shape).collect(), problem)
}

fn of(entries: &[(&str, u32)]) -> serde_json::Value {
    let entries: Vec<_> =
        entries.iter().map(|(profile, count)| json!({"profile": profile, "count": count})).collect();
    json!({"mode": "Static", "layout": entries})
}

#[test]
fn a_claim_counts_as_the_layouts_instance() {
    let (entries, problem) = layout(of(&[("3g.40gb", 2)]), vec![], &[claimed("3g.40gb", 4)]);
    assert_eq!((entries, problem), (vec![("3g.40gb".into(), 0)], None));
}

#[test]
fn an_instance_with_several_shares_is_one_of_the_layouts() {
    let share = |id: &str| Partition {
        share: Some(WantedShare { id: id.into(), ..WantedShare::default() }),
        ..claimed("3g.40gb", 4)
    };
    let stated = json!({"mode": "Static", "layout": [{"profile": "3g.40gb", "count": 2}]});
    let (entries, problem) = layout(stated, Vec::new(), &[share("a"), share("b")]);
    assert_eq!((entries, problem), (vec![("3g.40gb".into(), 0)], None));
}

#[test]
fn idle_instances_of_the_right_kind_stay_where_they_are() {
    let (entries, _) = layout(of(&[("1g.10gb", 1)]), vec![instance("1g.10gb", 5)], &[]);
    assert_eq!(entries, [("1g.10gb".into(), 5)]);
}

#[test]
fn what_is_in_the_way_and_in_use_blocks_and_what_is_idle_does_not() {
    let mut used = instance("1g.10gb", 0);
    used.claims.push(ClaimReference::default());
    let (entries, problem) = layout(of(&[("7g.80gb", 1)]), vec![used], &[]);
    assert_eq!(entries, []);
    assert!(matches!(problem, Some(LayoutProblem::Blocked(_))), "{problem:?}");
    let (entries, problem) = layout(of(&[("7g.80gb", 1)]), vec![instance("1g.10gb", 0)], &[]);
    assert_eq!((entries, problem), (vec![("7g.80gb".into(), 0)], None));
}

#[test]
fn idle_instances_of_the_layout_move_if_it_would_not_fit_otherwise() {
    let (entries, problem) = layout(of(&[("1g.10gb", 1), ("4g.40gb", 1)]), vec![instance("1g.10gb", 2)], &[]);
    assert_eq!(problem, None);
    assert!(entries.contains(&("4g.40gb".into(), 0)), "{entries:?}");
    assert_eq!(entries.len(), 2);
}

#[test]
fn idle_instances_that_move_keep_to_the_places_that_the_layout_states() {
    let mig = json!({"mode": "Static", "layout": [
        {"profile": "1g.10gb", "count": 1, "start": 6},
        {"profile": "1g.10gb", "count": 1},
        {"profile": "4g.40gb", "count": 1},
    ]});
    let (entries, problem) = layout(mig, vec![instance("1g.10gb", 2), instance("1g.10gb", 6)], &[]);
    assert_eq!(problem, None);
    let places: Vec<(&str, u32)> =
        entries.iter().map(|(profile, start)| (profile.as_str(), *start)).collect();
    assert_eq!(places.len(), 3);
    assert!(places.contains(&("1g.10gb", 6)) && places.contains(&("4g.40gb", 0)), "{places:?}");
}

#[test]
fn instances_of_the_layout_that_are_in_use_stay_when_idle_ones_move() {
    let mut used = instance("1g.10gb", 4);
    used.processes = 1;
    let mig = of(&[("1g.10gb", 2), ("4g.40gb", 1)]);
    let (entries, problem) = layout(mig, vec![used, instance("1g.10gb", 0)], &[]);
    assert_eq!(problem, None);
    let places: Vec<(&str, u32)> =
        entries.iter().map(|(profile, start)| (profile.as_str(), *start)).collect();
    assert_eq!(places, [("1g.10gb", 4), ("1g.10gb", 5), ("4g.40gb", 0)]);
}

#[test]
fn a_layout_that_no_gpu_can_have_is_impossible() {
    let (entries, problem) = layout(of(&[("4g.40gb", 2)]), vec![], &[]);
    assert_eq!(entries, []);
    assert!(matches!(problem, Some(LayoutProblem::Impossible(_))), "{problem:?}");
}

#[test]
fn mig_mode_is_switched_when_something_needs_it() {
    let of = |mig: serde_json::Value, partitions: Vec<Partition>, needs_reset: bool| {
        let mut gpu = gpu("GPU-0", 0);
        gpu.mig.switch_needs_reset = needs_reset;
        desired_gpu(&gpu, &Arc::new(policy("p", json!({"mig": mig}))), &partitions).mig
    };
    let whole = || Partition { instance: None, ..claimed("7g.80gb", 0) };
    assert_eq!(of(json!({}), vec![], false), DesiredMig::Keep);
    assert_eq!(of(json!({}), vec![claimed("7g.80gb", 0)], false), DesiredMig::Enabled);
    assert_eq!(of(json!({}), vec![whole()], false), DesiredMig::Disabled);
    assert_eq!(of(json!({}), vec![whole()], true), DesiredMig::Keep);
    assert_eq!(of(json!({"modeSwitch": "WithReset"}), vec![whole()], true), DesiredMig::Disabled);
    assert_eq!(of(json!({"modeSwitch": "Never"}), vec![whole()], false), DesiredMig::Keep);
    assert_eq!(of(json!({"mode": "Off"}), vec![], false), DesiredMig::Disabled);
}

/// What a node is told whose one GPU has dropped out of its report.
fn without_its_gpu(claims: Vec<Partition>, ready: &str) -> (GpuNodeSpec, GpuNodeSpec) {
    let warm = PolicyOwner { name: "p".into(), kind: PolicyInstance::Warm };
    let warm = Partition { owner: Owner::Policy(warm), ..claimed("1g.10gb", 4) };
    let partitions = claims.iter().cloned().chain([warm]).collect();
    let mut node = gpu_node("n", Vec::new(), partitions);
    node.spec.gpus = vec![desired_gpu(&gpu("GPU-0", 0), &Arc::new(policy("p", json!({}))), &[])];
    node.status.as_mut().unwrap().conditions[0].status = ready.into();
    (spec(&node, &BTreeMap::new(), claims, Vec::new(), &mut Problems::new()), node.spec)
}

#[test]
fn a_gpu_out_of_the_report_is_spoken_of_as_before_while_somebody_may_want_it_back() {
    for (claims, ready) in [(vec![claimed("1g.10gb", 0)], "True"), (Vec::new(), "False")] {
        let (after, before) = without_its_gpu(claims, ready);
        assert_eq!(after, before, "Ready is {ready}");
    }
}

#[test]
fn a_gpu_that_is_there_no_more_is_forgotten_when_no_claim_is_on_it() {
    assert_eq!(without_its_gpu(Vec::new(), "True").0, GpuNodeSpec::default());
}

#[test]
fn the_node_is_told_how_many_gpus_to_reshape_at_once() {
    let of = |spec| desired_gpu(&gpu("GPU-0", 0), &Arc::new(policy("p", spec)), &[]).max_concurrent_gpus;
    assert_eq!(of(json!({"reshape": {"maxConcurrentGpusPerNode": 2}})), 2);
    assert_eq!(of(json!({})), 16);
}
