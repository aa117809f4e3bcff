use std::sync::Arc;

use kerf_crds::gpu_node::{ClaimOwner, ObservedMig, PolicyOwner, Reservation, WantedInstance, WantedShare};
use proptest::prelude::*;

use super::*;
use crate::inventory::{ComputeInstance, Process};
use crate::prepared::{Prepared, PreparedDevice};

/// The shape of an A100: 8 memory slices, one OFA engine that only `+me` and the whole GPU have.
fn geometry() -> Arc<Geometry> {
    let profile = |name: &str, id, compute_slices, size, starts: &[u32], (decoder, ofa)| Profile {
        name: name.into(),
        id,
        compute_slices,
        multiprocessors: compute_slices * 14,
        memory_bytes: u64::from(size) * 9_961_472_000,
        size,
        starts: starts.to_vec(),
        max_instances: if ofa > 0 { 1 } else { starts.len() as u32 },
        engines: Engines { copy: compute_slices, decoder, ofa, ..Engines::default() },
        graphics: false,
    };
    Arc::new(Geometry {
        name: "A".into(),
        memory_slices: 8,
        multiprocessors: 98,
        engines: Engines { copy: 7, decoder: 5, ofa: 1, ..Engines::default() },
        profiles: vec![
            profile("1g.10gb", 19, 1, 1, &[0, 1, 2, 3, 4, 5, 6], (0, 0)),
            profile("1g.10gb+me", 20, 1, 1, &[0, 1, 2, 3, 4, 5, 6], (1, 1)),
            profile("1g.20gb", 15, 1, 2, &[0, 2, 4, 6], (1, 0)),
            profile("2g.20gb", 14, 2, 2, &[0, 2, 4], (1, 0)),
            profile("3g.40gb", 9, 3, 4, &[0, 4], (2, 0)),
            profile("4g.40gb", 5, 4, 4, &[0], (2, 0)),
            profile("7g.80gb", 0, 7, 8, &[0], (5, 1)),
        ],
    })
}

fn gpu() -> Gpu {
    Gpu {
        name: "gpu-1".into(),
        uuid: "GPU-1".into(),
        mig: ObservedMig { capable: true, enabled: true, pending: None, switch_needs_reset: true },
        geometry: Some(geometry()),
        ..Gpu::default()
    }
}

fn entry() -> DesiredGpu {
    DesiredGpu {
        uuid: "GPU-1".into(),
        policy: "p".into(),
        mig: DesiredMig::Enabled,
        allow_reset: false,
        unhealthy_effect: Default::default(),
        max_concurrent_gpus: 16,
    }
}

fn place(profile: &str, start: u32) -> WantedInstance {
    let size = geometry().profile(profile).map_or(1, |profile| profile.size);
    WantedInstance { profile: profile.into(), placement: Placement { start, size } }
}

fn claim(profile: &str, start: u32) -> Partition {
    let owner = ClaimOwner {
        namespace: "ns".into(),
        name: format!("{profile}-{start}"),
        pod: "pod".into(),
        pod_uid: "uid".into(),
        request: "r".into(),
    };
    Partition {
        gpu: "GPU-1".into(),
        instance: Some(place(profile, start)),
        share: None,
        owner: Owner::Claim(owner),
    }
}

fn of_policy(profile: &str, start: u32, kind: PolicyInstance) -> Partition {
    let owner = Owner::Policy(PolicyOwner { name: "p".into(), kind });
    Partition { owner, ..claim(profile, start) }
}

fn warm(profile: &str, start: u32) -> Partition {
    of_policy(profile, start, PolicyInstance::Warm)
}

fn hole(profile: &str, start: u32) -> Partition {
    let reservation = Reservation { expires: "2030-01-01T00:00:00Z".into(), ..Reservation::default() };
    Partition { owner: Owner::Reservation(reservation), ..claim(profile, start) }
}

fn instance(profile: &str, start: u32) -> Instance {
    let WantedInstance { profile, placement } = place(profile, start);
    Instance {
        profile_id: geometry().profile(&profile).unwrap().id,
        profile,
        placement,
        gpu_instance_id: placement.start * 10 + placement.size,
        compute_instances: vec![ComputeInstance { id: 0, full_width: true, uuid: "MIG-1".into() }],
        ..Instance::default()
    }
}

fn with(instances: Vec<Instance>) -> Gpu {
    Gpu { instances, ..gpu() }
}

fn running(instance: Instance) -> Instance {
    Instance { processes: vec![Process { pid: 7, comm: "train".into(), ..Process::default() }], ..instance }
}

/// With an MPS server for shares of it.
fn carrying(mut instance: Instance) -> Instance {
    instance.mps.there = true;
    instance
}

fn half(instance: Instance) -> Instance {
    Instance { compute_instances: vec![], ..instance }
}

fn without_device(mut instance: Instance) -> Instance {
    instance.compute_instances[0].uuid.clear();
    instance
}

fn failed(instance: Instance) -> Instance {
    let why = Reason { reason: "Xid94".into(), message: "contained error".into() };
    Instance { unhealthy: Some(why), ..instance }
}

fn foreign(instance: Instance) -> Instance {
    Instance { foreign: true, ..instance }
}

fn prepared(places: &[(&str, u32)]) -> PreparedClaims {
    let device = |(profile, start): &(&str, u32)| PreparedDevice {
        request: "r".into(),
        device: "d".into(),
        key: DeviceKey::instance("GPU-1", place(profile, *start).placement),
        uuid: "MIG-1".into(),
        cdi: vec![],
        share: None,
    };
    let claim = ClaimReference { namespace: "ns".into(), name: "held".into(), uid: "u".into() };
    match places {
        [] => PreparedClaims::new(),
        places => {
            [("u".to_owned(), Prepared { claim, pod: None, devices: places.iter().map(device).collect() })]
                .into()
        }
    }
}

fn step_on(gpu: &Gpu, entry: &DesiredGpu, partitions: &[Partition], prepared: &PreparedClaims) -> Step {
    next_step(
        Desired { gpu: Some(entry), partitions },
        Observed { gpu, prepared, passed_over: &[], short_of_resources: false },
    )
}

/// With nothing prepared and MIG wanted on.
fn step(gpu: &Gpu, partitions: &[Partition]) -> Step {
    step_on(gpu, &entry(), partitions, &PreparedClaims::new())
}

fn create(profile: &str, start: u32) -> Step {
    let WantedInstance { profile, placement } = place(profile, start);
    Step::CreateGpuInstance { profile_id: geometry().profile(&profile).unwrap().id, profile, placement }
}

fn destroy_compute(profile: &str, start: u32) -> Step {
    Step::DestroyComputeInstance { instance: target(&instance(profile, start)), compute_instance: 0 }
}

fn destroy(profile: &str, start: u32) -> Step {
    Step::DestroyGpuInstance { instance: target(&instance(profile, start)) }
}

fn assert_blocked(step: Step, reason: &str, said: &str) {
    match step {
        Step::Blocked(blocked) => {
            assert_eq!(blocked.reason, reason, "{}", blocked.message);
            assert!(blocked.message.contains(said), "{:?} does not say {said:?}", blocked.message);
        }
        other => panic!("{other:?} instead of being blocked by {reason}"),
    }
}

#[test]
fn an_instance_is_made_in_two_steps_and_then_left_alone() {
    let wanted = [claim("3g.40gb", 4)];
    assert_eq!(step(&gpu(), &wanted), create("3g.40gb", 4));
    let made = half(instance("3g.40gb", 4));
    assert_eq!(
        step(&with(vec![made.clone()]), &wanted),
        Step::CreateComputeInstance { instance: target(&made) }
    );
    assert_eq!(step(&with(vec![instance("3g.40gb", 4)]), &wanted), Step::Nothing);
}

#[test]
fn both_spellings_of_a_profile_mean_it() {
    let wanted = [Partition { instance: Some(place("1g.10gb.me", 2)), ..claim("1g.10gb", 0) }];
    assert_eq!(step(&gpu(), &wanted), create("1g.10gb+me", 2));
    assert_eq!(step(&with(vec![instance("1g.10gb+me", 2)]), &wanted), Step::Nothing);
}

#[test]
fn idle_instances_stay_until_they_are_in_the_way() {
    let idle = with(vec![instance("1g.10gb", 0), instance("1g.10gb", 6)]);
    assert_eq!(step(&idle, &[]), Step::Nothing);
    assert_eq!(step(&idle, &[claim("3g.40gb", 0)]), destroy_compute("1g.10gb", 0));
    let halfway = with(vec![half(instance("1g.10gb", 0)), instance("1g.10gb", 6)]);
    assert_eq!(step(&halfway, &[claim("3g.40gb", 0)]), destroy("1g.10gb", 0));
    assert_eq!(step(&with(vec![instance("1g.10gb", 6)]), &[claim("3g.40gb", 0)]), create("3g.40gb", 0));
}

#[test]
fn what_is_in_use_is_waited_for_and_named() {
    let busy = with(vec![running(instance("1g.10gb", 1))]);
    assert_blocked(step(&busy, &[claim("3g.40gb", 0)]), problem_reason::IN_USE, "train (pid 7)");
    let held = prepared(&[("1g.10gb", 1)]);
    let idle = with(vec![instance("1g.10gb", 0), instance("1g.10gb", 1)]);
    let blocked = step_on(&idle, &entry(), &[claim("3g.40gb", 0)], &held);
    // Nor is the idle neighbour taken down: that would make no room.
    assert_blocked(blocked, problem_reason::IN_USE, "claim ns/held");
}

#[test]
fn what_carries_shares_stays_until_its_server_and_its_clients_have_gone() {
    let other = [claim("1g.10gb", 1)];
    let mut carrier = carrying(instance("3g.40gb", 0));
    assert_blocked(step(&with(vec![carrier.clone()]), &other), problem_reason::IN_USE, "MPS server");
    carrier.mps.there = false;
    carrier.mps.clients = vec![Process { pid: 7, ..Process::default() }];
    assert_blocked(step(&with(vec![carrier.clone()]), &other), problem_reason::IN_USE, "MPS server");
    carrier.mps.clients.clear();
    assert_eq!(step(&with(vec![carrier]), &other), destroy_compute("3g.40gb", 0));
}

#[test]
fn shares_want_their_instance_once_and_each_as_much_as_a_claim_to_all_of_it() {
    let share = |id: &str| Partition {
        share: Some(WantedShare { id: id.into(), ..WantedShare::default() }),
        ..claim("3g.40gb", 4)
    };
    let wanted = [share("a"), share("b"), warm("1g.10gb", 4)];
    assert_eq!(step(&gpu(), &wanted), create("3g.40gb", 4));
    assert_eq!(step(&with(vec![instance("3g.40gb", 4)]), &wanted), Step::Nothing);
}

#[test]
fn one_that_waits_keeps_nobody_else_waiting() {
    let busy = with(vec![running(instance("1g.10gb", 1))]);
    assert_eq!(step(&busy, &[claim("3g.40gb", 0), claim("3g.40gb", 4)]), create("3g.40gb", 4));
    let failing = [create("3g.40gb", 0)];
    let observed =
        Observed { passed_over: &failing, gpu: &gpu(), prepared: &prepared(&[]), short_of_resources: false };
    let wanted = [claim("3g.40gb", 0), claim("3g.40gb", 4)];
    assert_eq!(
        next_step(Desired { gpu: Some(&entry()), partitions: &wanted }, observed),
        create("3g.40gb", 4)
    );
}

#[test]
fn all_due_steps_are_found() {
    let wanted = [claim("3g.40gb", 0), claim("2g.20gb", 4), claim("9g", 6)];
    let (gpu, prepared) = (gpu(), prepared(&[]));
    let observed = Observed { passed_over: &[], gpu: &gpu, prepared: &prepared, short_of_resources: false };
    let due = due_steps(Desired { gpu: Some(&entry()), partitions: &wanted }, observed);
    assert_eq!(due.steps, [create("3g.40gb", 0), create("2g.20gb", 4)]);
    assert_eq!(due.needed, 2);
    assert_eq!(due.blocked.unwrap().reason, problem_reason::PROFILE_NOT_FOUND);
}

#[test]
fn steps_that_only_tidy_up_come_last_and_count_as_nobodys() {
    let gpu = with(vec![failed(instance("1g.10gb", 0)), half(instance("1g.10gb", 6))]);
    let (wanted, prepared) = ([claim("1g.10gb", 2), claim("1g.10gb+me", 6)], prepared(&[]));
    let observed = Observed { passed_over: &[], gpu: &gpu, prepared: &prepared, short_of_resources: false };
    let due = due_steps(Desired { gpu: Some(&entry()), partitions: &wanted }, observed);
    // The last one is in the way.
    assert_eq!(due.steps, [create("1g.10gb", 2), destroy("1g.10gb", 6), destroy_compute("1g.10gb", 0)]);
    assert_eq!((due.needed, due.blocked), (2, None));
}

#[test]
fn engines_limit_what_fits() {
    let idle = with(vec![instance("1g.10gb+me", 0)]);
    assert_eq!(step(&idle, &[claim("1g.10gb+me", 6)]), destroy_compute("1g.10gb+me", 0), "the only OFA");
    let busy = with(vec![running(instance("1g.10gb+me", 0))]);
    assert_blocked(
        step(&busy, &[claim("1g.10gb+me", 6)]),
        problem_reason::ENGINES_TAKEN,
        "1g.10gb+me at 6:1",
    );
    assert_eq!(step(&busy, &[claim("1g.10gb", 6)]), create("1g.10gb", 6));
}

/// Found by the property below: the warm instance was taken down for nothing and made again, without end.
#[test]
fn nothing_is_taken_down_for_what_cannot_be_made_anyway() {
    let decoders = with(vec![running(instance("1g.10gb+me", 1)), instance("1g.20gb", 2)]);
    let wanted = [warm("1g.20gb", 2), claim("1g.10gb+me", 0)];
    assert_blocked(step(&decoders, &wanted), problem_reason::ENGINES_TAKEN, "1g.10gb+me at 0:1");
    let in_the_way = with(vec![running(instance("1g.10gb+me", 1)), instance("1g.10gb", 6)]);
    assert_blocked(step(&in_the_way, &[claim("1g.10gb+me", 6)]), problem_reason::ENGINES_TAKEN, "at 6:1");
}

#[test]
fn a_refusal_that_the_geometry_does_not_explain_takes_idle_instances_down() {
    let (gpu, prepared) = (with(vec![instance("1g.10gb", 6)]), prepared(&[]));
    let observed = Observed { passed_over: &[], gpu: &gpu, prepared: &prepared, short_of_resources: true };
    let wanted = [claim("3g.40gb", 0)];
    let desired = Desired { gpu: Some(&entry()), partitions: &wanted };
    assert_eq!(next_step(desired, observed), destroy_compute("1g.10gb", 6));
    // A warm one stays: it would be made again and again while the refusals last.
    let wanted = [claim("3g.40gb", 0), warm("1g.10gb", 6)];
    assert_eq!(next_step(Desired { partitions: &wanted, ..desired }, observed), create("3g.40gb", 0));
}

#[test]
fn warm_instances_give_way_to_claims_and_to_nobody_else() {
    let there = with(vec![instance("3g.40gb", 4)]);
    assert_eq!(step(&there, &[warm("3g.40gb", 4), claim("1g.10gb", 5)]), destroy_compute("3g.40gb", 4));
    assert_eq!(step(&gpu(), &[warm("3g.40gb", 4), claim("1g.10gb", 5)]), create("1g.10gb", 5));
    let me = with(vec![instance("1g.10gb+me", 0)]);
    assert_eq!(step(&me, &[warm("1g.10gb+me", 0), claim("1g.10gb+me", 6)]), destroy_compute("1g.10gb+me", 0));
    let fixed = of_policy("1g.10gb+me", 0, PolicyInstance::Static);
    assert_blocked(step(&me, &[fixed, claim("1g.10gb+me", 6)]), problem_reason::ENGINES_TAKEN, "must stay");
    assert_blocked(
        step(&me, &[warm("1g.10gb+me", 0), warm("1g.10gb+me", 6)]),
        problem_reason::ENGINES_TAKEN,
        "",
    );
    assert_eq!(step(&with(vec![instance("1g.10gb", 0)]), &[warm("1g.10gb", 0)]), Step::Nothing);
}

#[test]
fn a_hole_is_not_filled_and_warm_instances_stay_out_of_it() {
    assert_eq!(step(&gpu(), &[hole("3g.40gb", 0)]), Step::Nothing);
    assert_eq!(step(&gpu(), &[hole("3g.40gb", 0), warm("1g.10gb", 0)]), Step::Nothing);
}

#[test]
fn two_claims_on_one_slice_are_refused_even_if_wanted() {
    let wanted = [claim("3g.40gb", 0), claim("1g.10gb", 3)];
    assert_blocked(step(&gpu(), &wanted), problem_reason::OVERLAP, "are both wanted");
    assert_eq!(step(&with(vec![instance("1g.10gb", 3)]), &wanted[1..]), Step::Nothing);
    assert_blocked(
        step(&with(vec![instance("1g.10gb", 3)]), &wanted),
        problem_reason::OVERLAP,
        "3g.40gb at 0:4",
    );
}

#[test]
fn impossible_wishes_name_what_would_be_possible() {
    assert_blocked(step(&gpu(), &[claim("5g.50gb", 0)]), problem_reason::PROFILE_NOT_FOUND, "5g.50gb");
    assert_blocked(
        step(&gpu(), &[claim("3g.40gb", 2)]),
        problem_reason::PLACEMENT_IMPOSSIBLE,
        "start at [0, 4]",
    );
}

#[test]
fn a_half_made_instance_is_finished_if_wanted_and_else_removed() {
    let left = with(vec![half(instance("2g.20gb", 2))]);
    assert_eq!(step(&left, &[]), destroy("2g.20gb", 2));
    let made = half(instance("2g.20gb", 2));
    assert_eq!(step(&left, &[claim("2g.20gb", 2)]), Step::CreateComputeInstance { instance: target(&made) });
    assert_eq!(step(&with(vec![foreign(made)]), &[]), Step::Nothing);
}

#[test]
fn a_failed_instance_that_nobody_uses_is_taken_down_and_made_anew_if_it_is_wanted() {
    let whole = with(vec![instance("1g.10gb", 0), failed(instance("2g.20gb", 2))]);
    let half_gone = with(vec![failed(half(instance("2g.20gb", 2)))]);
    assert_eq!(step(&whole, &[]), destroy_compute("2g.20gb", 2));
    assert_eq!(step(&half_gone, &[]), destroy("2g.20gb", 2));
    let of_policies =
        [PolicyInstance::Static, PolicyInstance::Warm].map(|kind| of_policy("2g.20gb", 2, kind));
    // The claim's pod was given it, perhaps, and has not begun.
    for wanted in of_policies.into_iter().chain([claim("2g.20gb", 2)]) {
        let wanted = [wanted];
        assert_eq!(step(&whole, &wanted), destroy_compute("2g.20gb", 2));
        assert_eq!(step(&half_gone, &wanted), destroy("2g.20gb", 2));
        assert_eq!(step(&gpu(), &wanted), create("2g.20gb", 2));
    }
}

#[test]
fn a_failed_instance_stays_while_somebody_has_it_or_only_a_reset_would_help() {
    let alone = |instance| with(vec![instance]);
    let idle = failed(instance("2g.20gb", 2));
    let both = [of_policy("2g.20gb", 2, PolicyInstance::Static), claim("2g.20gb", 2)];
    let held = prepared(&[("2g.20gb", 2)]);
    for wanted in [&[][..], &both[..1], &both[1..], &both] {
        assert_eq!(step_on(&alone(idle.clone()), &entry(), wanted, &held), Step::Nothing);
        assert_eq!(step(&alone(running(idle.clone())), wanted), Step::Nothing);
        assert_eq!(step(&alone(foreign(idle.clone())), wanted), Step::Nothing);
        let reset_asked = Gpu { recovery_needed: Some(true), ..alone(idle.clone()) };
        assert_eq!(step(&reset_asked, wanted), Step::Nothing);
    }
}

#[test]
fn an_instance_that_the_driver_shows_no_device_of_is_waited_for_and_named_or_taken_down_if_nobody_wants_it() {
    let unseen = without_device(instance("2g.20gb", 2));
    let gpu = with(vec![unseen.clone()]);
    for wanted in [claim("2g.20gb", 2), warm("2g.20gb", 2)] {
        let named = "nvmlDeviceGetMigDeviceHandleByIndex";
        assert_blocked(step(&gpu, std::slice::from_ref(&wanted)), "NOT_FOUND", named);
        assert_blocked(step(&gpu, &[wanted]), "NOT_FOUND", "2g.20gb at 2:2 (GPU instance 22) on GPU-1");
    }
    for wanted in [&[][..], &[claim("3g.40gb", 0)], &[claim("3g.40gb", 4)]] {
        let others = with(vec![unseen.clone(), instance("3g.40gb", 4)]);
        assert_eq!(step(&others, wanted), destroy_compute("2g.20gb", 2));
    }
    assert_eq!(
        step_on(&gpu, &entry(), &[], &prepared(&[("2g.20gb", 2)])),
        Step::Nothing,
        "a claim is prepared"
    );
    assert_eq!(step(&with(vec![foreign(unseen)]), &[]), Step::Nothing);
}

#[test]
fn a_gpu_that_is_not_ours_or_has_failed_is_left_as_it_is() {
    let reason = Some(Reason { reason: "X".into(), message: "x".into() });
    let wanted = [claim("3g.40gb", 0)];
    assert_eq!(step(&Gpu { unmanaged: reason.clone(), ..gpu() }, &wanted), Step::Nothing);
    assert_eq!(step(&Gpu { unhealthy: reason, ..gpu() }, &wanted), Step::Nothing);
    let prepared = PreparedClaims::new();
    let gpu = gpu();
    let observed = Observed { gpu: &gpu, prepared: &prepared, passed_over: &[], short_of_resources: false };
    let unlisted = next_step(Desired { gpu: None, partitions: &wanted }, observed);
    assert_blocked(unlisted, problem_reason::GPU_NOT_LISTED, "no policy");
    assert_eq!(next_step(Desired { gpu: None, partitions: &[] }, observed), Step::Nothing);
}

#[test]
fn mode_is_switched_only_where_allowed_and_nobody_is_disturbed() {
    let mode = |enabled, switch_needs_reset| ObservedMig {
        capable: true,
        enabled,
        pending: None,
        switch_needs_reset,
    };
    let off = |reset| Gpu { mig: mode(false, reset), ..gpu() };
    let (none, allowed) = (PreparedClaims::new(), DesiredGpu { allow_reset: true, ..entry() });
    assert_eq!(step(&off(false), &[]), Step::EnableMig);
    assert_blocked(step(&off(true), &[]), unmanaged_reason::MODE_SWITCH_NOT_ALLOWED, "resets this GPU");
    assert_eq!(step_on(&off(true), &allowed, &[], &none), Step::EnableMig);
    let busy =
        Gpu { processes: vec![Process { pid: 9, comm: "dcgm".into(), ..Process::default() }], ..off(false) };
    assert_blocked(step(&busy, &[]), problem_reason::IN_USE, "dcgm (pid 9)");
    let mut whole = prepared(&[("1g.10gb", 0)]);
    whole.get_mut("u").unwrap().devices[0].key.placement = None;
    assert_blocked(step_on(&off(false), &entry(), &[], &whole), problem_reason::IN_USE, "ns/held");
    // After a reboot: the instance is gone with MIG mode, its claim is not, and waits for both.
    let rebooted = prepared(&[("1g.10gb", 0)]);
    assert_eq!(step_on(&off(false), &entry(), &[claim("1g.10gb", 0)], &rebooted), Step::EnableMig);
    let keep = DesiredGpu { mig: DesiredMig::Keep, ..entry() };
    assert_eq!(step_on(&off(false), &keep, &[], &none), Step::Nothing);
    assert_blocked(
        step_on(&off(false), &keep, &[claim("3g.40gb", 0)], &none),
        problem_reason::MIG_OFF,
        "policy p",
    );
}

#[test]
fn mode_is_switched_off_when_the_last_instance_is_gone() {
    let disabled = DesiredGpu { mig: DesiredMig::Disabled, allow_reset: true, ..entry() };
    let none = PreparedClaims::new();
    assert_eq!(step_on(&gpu(), &disabled, &[], &none), Step::DisableMig);
    let idle = with(vec![instance("3g.40gb", 0)]);
    assert_eq!(step_on(&idle, &disabled, &[], &none), destroy_compute("3g.40gb", 0));
    let one_busy = with(vec![instance("3g.40gb", 0), running(instance("1g.10gb", 5))]);
    assert_blocked(step_on(&one_busy, &disabled, &[], &none), problem_reason::IN_USE, "train");
    let shared = with(vec![carrying(instance("3g.40gb", 0))]);
    assert_blocked(step_on(&shared, &disabled, &[], &none), problem_reason::IN_USE, "MPS server");
    let mut whole = Gpu { mig: ObservedMig { enabled: false, ..gpu().mig }, ..gpu() };
    let enabled = DesiredGpu { mig: DesiredMig::Enabled, ..disabled.clone() };
    assert_eq!(step_on(&whole, &enabled, &[], &none), Step::EnableMig);
    whole.mps.there = true;
    assert_blocked(step_on(&whole, &enabled, &[], &none), problem_reason::IN_USE, "MPS server");
    assert_blocked(
        step_on(&idle, &disabled, &[claim("3g.40gb", 0)], &none),
        problem_reason::OVERLAP,
        "wants MIG off",
    );
}

#[test]
fn kinds_and_steps_are_the_same_set() {
    let target = target(&instance("3g.40gb", 0));
    let all = [
        Step::EnableMig,
        Step::DisableMig,
        destroy_compute("3g.40gb", 0),
        destroy("3g.40gb", 0),
        create("3g.40gb", 0),
        Step::CreateComputeInstance { instance: target },
    ];
    let kinds: Vec<StepKind> = all.iter().filter_map(Step::kind).collect();
    assert_eq!(kinds, Step::ALL_KINDS);
    assert_eq!(Step::Nothing.kind(), None);
}

// ---- properties ----

/// An instance without anything on it can be imagined anywhere; whether all of them fit together does not matter to
/// the invariants, except that placements do not overlap.
fn any_place() -> impl Strategy<Value = WantedInstance> {
    let geometry = geometry();
    let places: Vec<WantedInstance> = geometry
        .profiles
        .iter()
        .flat_map(|profile| {
            profile.starts.iter().map(|start| WantedInstance {
                profile: profile.name.clone(),
                placement: Placement { start: *start, size: profile.size },
            })
        })
        .collect();
    prop::sample::select(places)
}

#[derive(Clone, Debug)]
struct World {
    gpu: Gpu,
    prepared: PreparedClaims,
    partitions: Vec<Partition>,
    entry: DesiredGpu,
}

fn any_world() -> impl Strategy<Value = World> {
    let there = prop::collection::vec((any_place(), 0..9_u8), 0..6);
    let wanted = prop::collection::vec((any_place(), 0..5_u8), 0..5);
    let mode = (
        prop::sample::select(vec![DesiredMig::Enabled, DesiredMig::Disabled, DesiredMig::Keep]),
        any::<bool>(),
    );
    (there, wanted, mode, any::<bool>(), any::<bool>()).prop_map(
        |(there, wanted, (mig, allow_reset), on, reset)| {
            let mut gpu = gpu();
            gpu.mig = ObservedMig { capable: true, enabled: on, pending: None, switch_needs_reset: reset };
            let mut held: Vec<(String, u32)> = Vec::new();
            for (place, kind) in there.into_iter().filter(|_| on) {
                if gpu.instances.iter().any(|other| other.placement.overlaps(&place.placement)) {
                    continue;
                }
                let plain = instance(&place.profile, place.placement.start);
                gpu.instances.push(match kind {
                    0 => running(plain),
                    1 => foreign(plain),
                    2 => half(plain),
                    3 | 4 => {
                        held.push((place.profile.clone(), place.placement.start));
                        if kind == 3 { plain } else { failed(plain) }
                    }
                    5 => failed(plain),
                    6 => carrying(plain),
                    7 => carrying(failed(plain)),
                    _ => plain,
                });
            }
            let held: Vec<(&str, u32)> =
                held.iter().map(|(profile, start)| (profile.as_str(), *start)).collect();
            let partitions = wanted
                .into_iter()
                .map(|(place, kind)| {
                    let (profile, start) = (place.profile.as_str(), place.placement.start);
                    match kind {
                        0 => warm(profile, start),
                        1 => of_policy(profile, start, PolicyInstance::Static),
                        2 => hole(profile, start),
                        _ => claim(profile, start),
                    }
                })
                .collect();
            World {
                prepared: prepared(&held),
                gpu,
                partitions,
                entry: DesiredGpu { mig, allow_reset, ..entry() },
            }
        },
    )
}

impl World {
    fn next(&self) -> Step {
        step_on(&self.gpu, &self.entry, &self.partitions, &self.prepared)
    }

    fn in_use(&self, instance: &Instance) -> bool {
        let key = DeviceKey::instance("GPU-1", instance.placement);
        !instance.processes.is_empty() || instance.mps.there || !holders(&self.prepared, &key).is_empty()
    }

    fn claimed(&self, instance: &Instance) -> bool {
        self.wanted_by(instance, |owner| matches!(owner, Owner::Claim(_)))
    }

    /// Wanted by somebody who does not give way to a claim.
    fn firmly_wanted(&self, instance: &Instance) -> bool {
        let fixed =
            |owner: &Owner| matches!(owner, Owner::Policy(owner) if owner.kind == PolicyInstance::Static);
        self.claimed(instance) || self.wanted_by(instance, fixed)
    }

    fn wanted_by(&self, instance: &Instance, whose: impl Fn(&Owner) -> bool) -> bool {
        self.partitions.iter().any(|partition| {
            let place = partition.instance.as_ref().unwrap();
            whose(&partition.owner)
                && place.profile == instance.profile
                && place.placement == instance.placement
        })
    }

    /// Checks a step against the invariants and carries it out as hardware would.
    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Nothing | Step::Blocked(_) => {}
            Step::EnableMig | Step::DisableMig => {
                prop_assert!(self.gpu.instances.is_empty() && self.prepared.is_empty());
                prop_assert!(!self.gpu.mig.switch_needs_reset || self.entry.allow_reset);
                self.gpu.mig.enabled = matches!(step, Step::EnableMig);
            }
            Step::DestroyComputeInstance { instance, .. } | Step::DestroyGpuInstance { instance } => {
                let found = self.gpu.instances.iter_mut().position(|i| target(i) == *instance);
                let position = found.expect("destroys what is there");
                let hit = self.gpu.instances[position].clone();
                prop_assert!(!hit.foreign, "destroys a foreign instance");
                prop_assert!(!self.in_use(&hit), "destroys an instance in use");
                prop_assert!(
                    hit.unhealthy.is_some() || !self.firmly_wanted(&hit),
                    "destroys a wanted instance"
                );
                if matches!(step, Step::DestroyGpuInstance { .. }) {
                    prop_assert!(hit.compute_instances.is_empty());
                    self.gpu.instances.remove(position);
                } else {
                    self.gpu.instances[position].compute_instances.clear();
                }
            }
            Step::CreateGpuInstance { profile, profile_id, placement } => {
                let overlaps = |other: &Instance| other.placement.overlaps(placement);
                prop_assert!(!self.gpu.instances.iter().any(overlaps), "creates over what exists");
                let known = geometry().profile(profile).cloned().unwrap();
                prop_assert!(known.id == *profile_id && known.size == placement.size);
                let wanted = self.partitions.iter().filter_map(|p| p.instance.as_ref());
                let mut wanted = wanted.filter(|w| w.profile == *profile && w.placement == *placement);
                prop_assert!(wanted.next().is_some(), "creates what nobody wants");
                self.gpu.instances.push(half(instance(profile, placement.start)));
                let all = self.gpu.instances.iter().map(|i| geometry().profile(&i.profile).unwrap().engines);
                let sum = all.fold(Engines::default(), add);
                // What is imagined to be there at first may be more than the GPU has; no creation adds to that.
                let new = known.engines;
                let budget = geometry().engines;
                prop_assert!(new.ofa == 0 || sum.ofa <= budget.ofa);
                prop_assert!(new.decoder == 0 || sum.decoder <= budget.decoder);
            }
            Step::CreateComputeInstance { instance } => {
                let found = self.gpu.instances.iter_mut().find(|i| target(i) == *instance).unwrap();
                prop_assert!(found.compute_instances.is_empty() && !found.foreign);
                found.compute_instances.push(ComputeInstance {
                    id: 0,
                    full_width: true,
                    uuid: "MIG-2".into(),
                });
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Invariants hold on the way, the way ends, and at its end nothing is left to do.
    #[test]
    fn steps_disturb_nobody_and_end(world in any_world()) {
        let mut world = world;
        let mut steps = 0;
        loop {
            let step = world.next();
            prop_assert_eq!(&step, &world.next(), "the same world, the same step");
            if step.kind().is_none() {
                break;
            }
            world.take(&step)?;
            steps += 1;
            prop_assert!(steps <= 64, "no end: {:?}", world);
        }
        prop_assert!(world.next().kind().is_none());
        if world.gpu.mig.enabled && world.entry.mig != DesiredMig::Disabled {
            for left in world.gpu.instances.iter().filter(|left| left.unhealthy.is_some()) {
                prop_assert!(world.in_use(left), "a failed instance keeps its slices");
            }
        }
    }

    /// With nothing in use and nothing foreign, everything that can exist together does in the end.
    #[test]
    fn what_can_be_made_is_made(world in any_world()) {
        let mut world = world;
        world.prepared.clear();
        world.entry.mig = DesiredMig::Enabled;
        world.entry.allow_reset = true;
        for instance in &mut world.gpu.instances {
            instance.foreign = false;
            instance.processes.clear();
            instance.mps = Default::default();
        }
        // Make the wishes compatible: claims only, without overlap, within the engines.
        let mut kept: Vec<Partition> = Vec::new();
        let mut sum = Engines::default();
        for partition in std::mem::take(&mut world.partitions) {
            let place = partition.instance.clone().unwrap();
            let engines = geometry().profile(&place.profile).unwrap().engines;
            let with = add(sum, engines);
            let fits = with.ofa <= 1 && with.decoder <= 5;
            let free = kept.iter().all(|k| !k.instance.as_ref().unwrap().placement.overlaps(&place.placement));
            if fits && free {
                sum = with;
                kept.push(claim(&place.profile, place.placement.start));
            }
        }
        world.partitions = kept;
        for _ in 0..64 {
            let step = world.next();
            world.take(&step)?;
        }
        prop_assert_eq!(world.next(), Step::Nothing);
        for partition in &world.partitions {
            let place = partition.instance.as_ref().unwrap();
            let made = world.gpu.instances.iter().find(|i| i.placement == place.placement && i.profile == place.profile);
            prop_assert!(made.is_some_and(|made| made.device().is_some()), "{:?} is missing", place);
        }
    }
}
