//! The engine against what hardware was seen to do: creation sequences captured from `nvidia-smi mig -cgi`.

use kerf_sim::{GpuSpec, Model, NodeSpec, NvmlError, geometry};
use serde::Deserialize;

#[derive(Deserialize)]
struct Sequence {
    models: Vec<String>,
    half_swapped: bool,
    /// Profile ids in the order of creation, without placement.
    profiles: Vec<u32>,
    /// GPU-instance ids, or the name of an error.
    ids: Vec<serde_json::Value>,
    starts: Option<Vec<u32>>,
    source: String,
}

#[test]
fn captured_creation_sequences_replay() {
    let sequences: Vec<Sequence> = serde_json::from_str(include_str!("captured-sequences.json")).unwrap();
    assert_eq!(sequences.len(), 18);
    for sequence in sequences {
        for model in &sequence.models {
            let board = GpuSpec { half_swapped: sequence.half_swapped, ..GpuSpec::new(model).in_mig_mode() };
            let (mut state, models) = NodeSpec::new("n", vec![board]).state().unwrap();
            for (step, (profile, id)) in sequence.profiles.iter().zip(&sequence.ids).enumerate() {
                let got = state.create_gpu_instance(&models[model], 0, *profile, None, 1);
                let wanted = match id.as_str() {
                    Some(name) => Err(NvmlError::from_name(name).unwrap()),
                    None => Ok(u32::try_from(id.as_u64().unwrap()).unwrap()),
                };
                assert_eq!(
                    got,
                    wanted,
                    "{model}, step {step} of {} ({})",
                    sequence.profiles.len(),
                    sequence.source
                );
                if let (Some(starts), Ok(id)) = (&sequence.starts, got) {
                    let start = state.gpus[0].instance(id).unwrap().start;
                    assert_eq!(start, starts[step], "{model}, step {step} ({})", sequence.source);
                }
            }
        }
    }
}

#[test]
fn every_profile_reaches_its_maximum_and_no_more() {
    for id in Model::ids() {
        let Some(mig) = Model::named(id).unwrap().mig else { continue };
        for profile in &mig.profiles {
            let (mut state, models) =
                NodeSpec::new("n", vec![GpuSpec::new(id).in_mig_mode()]).state().unwrap();
            for _ in 0..profile.max {
                state
                    .create_gpu_instance(&models[id], 0, profile.id, None, 1)
                    .unwrap_or_else(|e| panic!("{id} {}: {e}", profile.name));
            }
            let one_more = state.create_gpu_instance(&models[id], 0, profile.id, None, 1);
            assert_eq!(one_more, Err(NvmlError::InsufficientResources), "{id} {}", profile.name);
        }
    }
}

#[test]
fn an_engine_that_is_used_up_refuses_an_instance_with_room_for_it() {
    // Captured on RTX PRO 6000: after +me.all only -me fits, for all engines are taken.
    let model = "rtxpro6000-server";
    let (mut state, models) = NodeSpec::new("n", vec![GpuSpec::new(model).in_mig_mode()]).state().unwrap();
    let create = |state: &mut kerf_sim::State, name: &str| {
        let profile = models[model].mig.as_ref().unwrap().by_name(name).unwrap().id;
        state.create_gpu_instance(&models[model], 0, profile, None, 1)
    };
    create(&mut state, "1g.24gb+me.all").unwrap();
    assert_eq!(create(&mut state, "1g.24gb"), Err(NvmlError::InsufficientResources));
    create(&mut state, "1g.24gb-me").unwrap();
}

#[test]
fn a_full_compute_instance_fits_every_profile_once() {
    for id in Model::ids() {
        let Some(mig) = Model::named(id).unwrap().mig else { continue };
        for profile in &mig.profiles {
            let (mut state, models) =
                NodeSpec::new("n", vec![GpuSpec::new(id).in_mig_mode()]).state().unwrap();
            let gi = state.create_gpu_instance(&models[id], 0, profile.id, None, 1).unwrap();
            let default = profile.compute.default_id;
            assert_eq!(
                state.create_compute_instance(&models[id], 0, gi, default, None),
                Ok(0),
                "{id} {}",
                profile.name
            );
            let again = state.create_compute_instance(&models[id], 0, gi, default, None);
            assert_eq!(again, Err(NvmlError::InsufficientResources), "{id} {}", profile.name);
        }
    }
}

#[test]
fn compute_instances_share_the_slices_of_their_gpu_instance() {
    // Counts of an empty 3g as captured on A100 (`nvidia-smi mig -lcip`): 1c three times, 2c once, 3c once.
    let (mut state, models) =
        NodeSpec::new("n", vec![GpuSpec::new("a100-40").in_mig_mode()]).state().unwrap();
    let model = &models["a100-40"];
    let profile = model.mig.as_ref().unwrap().by_name("3g.20gb").unwrap();
    let gi = state.create_gpu_instance(model, 0, profile.id, None, 1).unwrap();
    let remaining = |state: &kerf_sim::State| -> Vec<u32> {
        let instance = state.gpus[0].instance(gi).unwrap();
        let profiles = profile.compute.profiles.iter();
        profiles.map(|compute| geometry::compute_remaining(instance, profile, compute)).collect()
    };
    assert_eq!(remaining(&state), [3, 1, 1]);
    assert_eq!(state.create_compute_instance(model, 0, gi, 0, None), Ok(0));
    assert_eq!(remaining(&state), [2, 1, 0]);
    assert_eq!(state.create_compute_instance(model, 0, gi, 1, None), Ok(1));
    assert_eq!(remaining(&state), [0, 0, 0]);
    let more = state.create_compute_instance(model, 0, gi, 0, None);
    assert_eq!(more, Err(NvmlError::InsufficientResources));
}
