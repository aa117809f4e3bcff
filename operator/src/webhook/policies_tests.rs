use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kerf_crds::{
    gpu_node::{Gpu, GpuNodeStatus, Profile},
    partition_policy::{RestartableClients, WarmInstances},
    pattern::Pattern,
};

use super::*;

/// Geometry of an A100 80GB as nvidia-smi lists it: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
fn a100() -> Geometry {
    let profile = |name: &str, size: u32, compute_slices: u32, starts: &[u32]| Profile {
        name: name.to_owned(),
        size,
        compute_slices,
        multiprocessors: 14 * compute_slices,
        starts: starts.to_vec(),
        max_instances: starts.len() as u32,
        ..Profile::default()
    };
    Geometry {
        name: "a100".to_owned(),
        memory_slices: 8,
        multiprocessors: 98,
        profiles: vec![
            profile("1g.10gb", 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("2g.20gb", 2, 2, &[0, 2, 4]),
            profile("3g.40gb", 4, 3, &[0, 4]),
            profile("4g.40gb", 4, 4, &[0]),
            profile("7g.80gb", 8, 7, &[0]),
        ],
        ..Geometry::default()
    }
}

fn other() -> Geometry {
    Geometry {
        name: "other".to_owned(),
        memory_slices: 4,
        multiprocessors: 4,
        profiles: vec![Profile {
            name: "1g.6gb".to_owned(),
            size: 1,
            compute_slices: 1,
            multiprocessors: 1,
            starts: vec![0, 1, 2, 3],
            max_instances: 4,
            ..Profile::default()
        }],
        ..Geometry::default()
    }
}

fn nodes() -> Vec<Arc<GpuNode>> {
    let gpu = |product: &str, geometry: &str| Gpu {
        product: product.to_owned(),
        geometry: Some(geometry.to_owned()),
        ..Gpu::default()
    };
    let status = GpuNodeStatus {
        gpus: vec![gpu("NVIDIA A100-SXM4-80GB", "a100"), gpu("NVIDIA Other", "other")],
        geometries: vec![a100(), other()],
        ..GpuNodeStatus::default()
    };
    vec![Arc::new(GpuNode { status: Some(status), ..GpuNode::default() })]
}

fn policy(products: &[&str], mig: MigPolicy) -> PartitionPolicySpec {
    let mut spec = PartitionPolicySpec { mig, ..PartitionPolicySpec::default() };
    spec.gpus.products = products.iter().map(|product| Pattern::from(*product)).collect();
    spec
}

fn layout(entries: &[(&str, u32, Option<u32>)]) -> MigPolicy {
    let entry = |(profile, count, start): &(&str, u32, Option<u32>)| LayoutEntry {
        profile: (*profile).to_owned(),
        count: *count,
        start: *start,
    };
    MigPolicy { mode: MigMode::Static, layout: entries.iter().map(entry).collect(), ..MigPolicy::default() }
}

fn fields(verdict: &Verdict) -> Vec<&str> {
    verdict.denials.iter().map(|denial| denial.field.as_str()).collect()
}

#[test]
fn a_policy_that_can_work_passes_without_a_word() {
    for spec in [
        PartitionPolicySpec::default(),
        policy(
            &["NVIDIA A100*"],
            layout(&[("3g.40gb", 1, Some(4)), ("2g.20gb", 1, None), ("1g.10gb", 2, None)]),
        ),
        policy(&["NVIDIA A100*"], layout(&[("1g.10gb", 7, None)])),
    ] {
        assert_eq!(validate(&spec, &nodes()), Verdict::default(), "{spec:?}");
    }
}

#[test]
fn layouts_that_no_named_model_can_have_are_refused() {
    for impossible in [
        &[("7g.80gb", 2, None)][..],
        &[("1g.10gb", 8, None)],
        &[("4g.40gb", 2, None)],
        &[("7g.80gb", 1, None), ("1g.10gb", 1, None)],
        &[("3g.40gb", 1, Some(0)), ("2g.20gb", 1, Some(2))],
        &[("3g.40gb", 1, Some(2))],
        // 3 + 3 leaves compute slices, but no memory slice.
        &[("3g.40gb", 2, None), ("1g.10gb", 1, None)],
    ] {
        let verdict = validate(&policy(&["NVIDIA A100-SXM4-80GB"], layout(impossible)), &nodes());
        assert_eq!(fields(&verdict), ["spec.mig.layout"], "{impossible:?}");
        assert!(verdict.denials[0].message.contains("NVIDIA A100-SXM4-80GB"), "{verdict:?}");
    }
}

#[test]
fn where_models_are_not_named_it_is_a_warning() {
    let verdict = validate(&policy(&[], layout(&[("1g.10gb", 8, None)])), &nodes());
    assert_eq!(fields(&verdict), Vec::<&str>::new());
    assert!(!verdict.warnings.is_empty());
    // Named, but none is known yet.
    let spec = policy(&["NVIDIA B200"], layout(&[("1g.10gb", 60, None)]));
    assert_eq!(validate(&spec, &nodes()), Verdict::default());
}

#[test]
fn an_unknown_profile_lists_those_that_exist() {
    let verdict =
        validate(&policy(&["NVIDIA A100*"], layout(&[("1g.10gb", 1, None), ("5g.50gb", 1, None)])), &nodes());
    assert_eq!(fields(&verdict), ["spec.mig.layout[1].profile"]);
    assert!(
        verdict.denials[0].message.contains("1g.10gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"),
        "{verdict:?}"
    );
    // On one of two models it is a warning.
    let verdict = validate(&policy(&["*"], layout(&[("1g.6gb", 4, None)])), &nodes());
    assert_eq!(fields(&verdict), Vec::<&str>::new());
    assert_eq!(verdict.warnings.len(), 1, "{verdict:?}");
    let warm = vec![WarmInstances { profile: "9g.9gb".to_owned(), count: 1 }];
    let verdict = validate(&policy(&["*"], MigPolicy { warm, ..MigPolicy::default() }), &nodes());
    assert_eq!(fields(&verdict), ["spec.mig.warm[0].profile"]);
}

#[test]
fn profiles_that_the_policy_forbids_itself_are_refused() {
    let mig = MigPolicy {
        allowed_profiles: vec!["2g.*".into()],
        ..layout(&[("2g.20gb", 1, None), ("1g.10gb", 1, None)])
    };
    let verdict = validate(&policy(&[], mig), &[]);
    assert_eq!(fields(&verdict), ["spec.mig.layout[1].profile"]);
}

#[test]
fn a_pattern_that_matches_nothing_yet_is_a_warning() {
    let mig = MigPolicy { allowed_profiles: vec!["1g.*".into(), "8g.*".into()], ..MigPolicy::default() };
    let verdict = validate(&policy(&[], mig), &nodes());
    assert_eq!(fields(&verdict), Vec::<&str>::new());
    assert_eq!(verdict.warnings.len(), 1, "{verdict:?}");
    assert!(verdict.warnings[0].starts_with("spec.mig.allowedProfiles[1]"), "{verdict:?}");
}

#[test]
fn selectors_are_checked() {
    let bad = LabelSelector {
        match_labels: Some(BTreeMap::from([("a b".to_owned(), "x".to_owned())])),
        match_expressions: None,
    };
    let mut spec = PartitionPolicySpec { node_selector: bad.clone(), ..PartitionPolicySpec::default() };
    spec.reshape.restartable_clients =
        vec![RestartableClients { namespace: "monitoring".to_owned(), pod_selector: bad }];
    assert_eq!(
        fields(&validate(&spec, &[])),
        [
            "spec.nodeSelector.matchLabels[a b]",
            "spec.reshape.restartableClients[0].podSelector.matchLabels[a b]"
        ]
    );
}

#[test]
fn shares_that_can_never_be_are_refused() {
    let of = |shares: serde_json::Value, mode| {
        let shares = serde_json::from_value(shares).unwrap();
        let layout =
            if mode == MigMode::Static { layout(&[("7g.80gb", 1, None)]).layout } else { Vec::new() };
        let mig = MigPolicy { mode, layout, ..MigPolicy::default() };
        validate(&PartitionPolicySpec { shares, ..policy(&[], mig) }, &nodes()).denials
    };
    let field = |shares, mode| of(shares, mode).into_iter().map(|denial| denial.field).collect::<Vec<_>>();
    let allow = serde_json::json!({"gpus": "Allow", "memoryReserve": "512Mi", "isolation": "Process"});
    assert!(field(allow.clone(), MigMode::Dynamic).is_empty());
    assert!(field(allow.clone(), MigMode::Off).is_empty());
    assert_eq!(field(allow, MigMode::Static), ["spec.shares.gpus"]);
    let inside = serde_json::json!({"instances": ["3g.*"], "isolation": "Process"});
    assert!(field(inside.clone(), MigMode::Dynamic).is_empty());
    assert!(field(inside.clone(), MigMode::Static).is_empty());
    assert_eq!(field(inside, MigMode::Off), ["spec.shares.instances"]);
    let nonsense = serde_json::json!({"memoryReserve": "some", "isolation": "Hardware"});
    assert_eq!(field(nonsense, MigMode::Dynamic), ["spec.shares.isolation", "spec.shares.memoryReserve"]);
}
