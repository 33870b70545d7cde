//! Sequences that are saved and restored continue as if nothing had happened.

use crate::common::*;
use samite_core::DType;
use samite_gguf::Value;
use samite_llm::arch::ARCHITECTURES;
use samite_llm::{Context, ContextOptions, SavedSequence, SyntheticModel};

/// Bound on the error with a cache in F16. A restored sequence has its cells in another order, so
/// attention sums in another order, and keys and values of later tokens may round differently: a
/// relative error of the unit roundoff of F16, 2^-11, squared.
const F16_CACHE: f64 = 1.0 / (1 << 22) as f64;

fn options(kv: DType, full_windows: bool) -> ContextOptions {
    ContextOptions {
        n_ctx: Some(768),
        n_batch: 32,
        n_ubatch: 16,
        n_seq: 2,
        kv_types: [kv; 2],
        full_windows,
        ..ContextOptions::default()
    }
}

fn fill(context: &mut Context, sequence: u32, from: usize, to: usize) {
    let all = tokens(to);
    for start in (from..to).step_by(32) {
        let part = &all[start..to.min(start + 32)];
        decode(context, part, start as i32, sequence);
    }
}

#[test]
fn every_architecture_continues_from_a_saved_sequence() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in ARCHITECTURES {
        let model = TestModel::tiny(architecture.name).load(vec![cpu()], "");
        if model.spec().is_bidirectional() {
            continue;
        }
        // Learned positions are limited.
        let learned = model.spec().embedding.positions;
        let count = learned.map_or(300, |count| count.min(300) - 8);
        let at = count as i32;
        let mut before = context(&model, options(DType::F16, false));
        // The second sequence occupies cells, and windows drop tokens.
        fill(&mut before, 1, 0, 20);
        fill(&mut before, 0, 0, count);
        let path = folder.path().join(architecture.name);
        let saved = before.save(0).unwrap();
        saved.write(&path).unwrap();
        assert_eq!(saved.len(), count);
        let expected = decode(&mut before, &[5, 6], at, 0);

        let read = SavedSequence::read(&path).unwrap();
        assert_eq!(read, saved, "{}", architecture.name);
        let bytes = saved.to_bytes().unwrap();
        assert!(
            bytes == std::fs::read(&path).unwrap(),
            "{}",
            architecture.name
        );
        assert_eq!(SavedSequence::from_bytes(bytes).unwrap(), saved);
        let mut after = context(&model, options(DType::F16, false));
        fill(&mut after, 0, 0, 40);
        fill(&mut after, 1, 0, 20);
        after.restore(0, &read).unwrap();
        let went_on = decode(&mut after, &[5, 6], at, 0);
        assert!(
            nmse(&went_on, &expected) < F16_CACHE,
            "{}: {}",
            architecture.name,
            nmse(&went_on, &expected)
        );
        // The other sequence is unchanged, and the same data can be restored there.
        after.restore(1, &read).unwrap();
        let other = decode(&mut after, &[5, 6], at, 1);
        assert!(nmse(&other, &expected) < F16_CACHE, "{}", architecture.name);
    }
}

#[test]
fn invalid_inputs_are_refused_without_side_effects() {
    let file = TestModel::tiny("gemma3");
    let model = file.load(vec![cpu()], "");
    let other = TestModel::write(&SyntheticModel {
        seed: 2,
        ..SyntheticModel::tiny("gemma3")
    });
    let other = other.load(vec![cpu()], "");
    let rotated = TestModel::write(&SyntheticModel {
        extra: vec![("rope.freq_base", Value::F32(1234.0))],
        ..SyntheticModel::tiny("gemma3")
    });
    let rotated = rotated.load(vec![cpu()], "");
    let mut full = context(&model, options(DType::F16, true));
    let mut apart = context(&model, options(DType::F16, false));
    for context in [&mut full, &mut apart] {
        fill(context, 0, 0, 400);
    }
    let [whole, part] = [full.save(0).unwrap(), apart.save(0).unwrap()];
    assert!(part.bytes() < whole.bytes());
    let expected = decode(&mut full, &[7], 400, 0);

    let mut cases = [
        (
            context(&other, options(DType::F16, true)),
            &whole,
            "another model",
        ),
        (
            context(&rotated, options(DType::F16, true)),
            &whole,
            "another model",
        ),
        (context(&model, options(DType::F32, true)), &whole, "--kv"),
        (
            context(&model, options(DType::F16, true)),
            &part,
            "--swa-full",
        ),
        (
            context(
                &model,
                ContextOptions {
                    n_ctx: Some(256),
                    ..options(DType::F16, true)
                },
            ),
            &whole,
            "do not fit",
        ),
    ];
    for (context, saved, expected) in &mut cases {
        fill(context, 1, 0, 10);
        let error = context.restore(1, saved).unwrap_err().to_string();
        assert!(error.contains(*expected), "{error}");
        assert_eq!(context.kv_cache().cells().sequence_len(1), 10);
        let error = context.restore(9, saved).unwrap_err().to_string();
        assert!(!error.is_empty());
    }
    // A complete one suffices for smaller cells, and a partial one for partial cells.
    for saved in [&whole, &part] {
        let mut less = context(&model, options(DType::F16, false));
        less.restore(1, saved).unwrap();
        let went_on = decode(&mut less, &[7], 400, 1);
        assert!(nmse(&went_on, &expected) < F16_CACHE);
    }
    // An empty sequence stays empty.
    let nothing = apart.save(1).unwrap();
    assert!(nothing.is_empty());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nothing");
    nothing.write(&path).unwrap();
    let nothing = SavedSequence::read(&path).unwrap();
    apart.restore(0, &nothing).unwrap();
    assert_eq!(apart.kv_cache().cells().sequence_len(0), 0);
}

#[test]
fn damaged_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let model = TestModel::tiny("qwen3").load(vec![cpu()], "");
    let mut context = context(&model, options(DType::F16, false));
    fill(&mut context, 0, 0, 7);
    context.save(0).unwrap().write(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let mut refused = 0;
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bytes).unwrap();
        // A changed padding bit has no effect.
        match SavedSequence::read(&path) {
            Ok(saved) => context.restore(0, &saved).unwrap_or_default(),
            Err(_) => refused += 1,
        }
    }
    assert!(
        refused * 100 > whole.len() * 95,
        "{refused} of {}",
        whole.len()
    );
    for length in (0..whole.len()).step_by(97) {
        std::fs::write(&path, &whole[..length]).unwrap();
        SavedSequence::read(&path).unwrap_err();
    }
    let model = TestModel::tiny("qwen3");
    let error = SavedSequence::read(&model.path).unwrap_err().to_string();
    assert!(error.contains("no saved sequence"), "{error}");
}

#[test]
fn shifted_keys_are_saved_at_their_positions() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let mut before = context(&model, options(DType::F32, false));
    fill(&mut before, 0, 0, 60);
    before.kv_cache_mut().cut_out(0, 10..20).unwrap();
    let saved = before.save(0).unwrap();
    let expected = decode(&mut before, &[5], 50, 0);
    let mut after = context(&model, options(DType::F32, false));
    after.restore(0, &saved).unwrap();
    assert!(nmse(&decode(&mut after, &[5], 50, 0), &expected) < 1e-10);
}
