//! Sequences, positions and failures: the guarantees of a context about its cache.

use crate::common::*;
use samite_core::{DType, Device};
use samite_llm::{Batch, Context, ContextOptions, Error, Model, SyntheticModel};
use samite_reference::{FaultPlan, ReferenceDevice, ReferenceOptions};
use std::sync::Arc;

fn model(architecture: &'static str) -> Arc<Model> {
    TestModel::tiny(architecture).load(vec![cpu()], "")
}

fn fresh(model: &Arc<Model>, tokens: &[u32]) -> Vec<Vec<f32>> {
    decode(&mut context(model, precise()), tokens, 0, 0)
}

#[test]
fn a_batch_matches_token_by_token_decoding() {
    for architecture in ARCHITECTURES {
        let model = model(architecture);
        let tokens = tokens(40);
        let whole = fresh(&model, &tokens);
        for (n_ubatch, n_logits, step) in [(512, None, 1), (7, None, 40), (16, Some(3), 13)] {
            let mut context = context(
                &model,
                ContextOptions {
                    n_ubatch,
                    n_logits,
                    ..precise()
                },
            );
            let mut logits = Vec::new();
            for (i, part) in tokens.chunks(step).enumerate() {
                logits.extend(decode(&mut context, part, (i * step) as i32, 0));
            }
            let error = nmse(&logits, &whole);
            assert!(error < 1e-9, "{architecture} {n_ubatch} {step}: {error}");
        }
    }
}

#[test]
fn only_requested_logits_are_returned() {
    let model = model("llama");
    let tokens = tokens(10);
    let all = fresh(&model, &tokens);
    let mut context = context(
        &model,
        ContextOptions {
            n_ubatch: 4,
            ..precise()
        },
    );
    let mut batch = Batch::new();
    for (i, &token) in tokens.iter().enumerate() {
        batch.add(token, i as i32, &[0], i == 5 || i == 9);
    }
    context.decode(&batch).unwrap();
    for i in 0..10 {
        match context.logits(i) {
            Some(logits) => assert!(nmse(&[logits.to_vec()], &all[i..=i]) < 1e-9),
            None => assert!(i != 5 && i != 9),
        }
    }
    assert!(context.logits(10).is_none());
    // A batch without requested logits only fills the cache.
    let mut batch = Batch::new();
    batch.add(tokens[0], 10, &[0], false);
    context.decode(&batch).unwrap();
    assert!(context.logits(0).is_none());
    assert_eq!(context.kv_cache().cells().used(), 11);
}

#[test]
fn sequences_are_independent() {
    let model = model("qwen2");
    let (a, b) = (tokens(12), tokens(20)[8..].to_vec());
    let mut context = context(
        &model,
        ContextOptions {
            n_seq: 3,
            ..precise()
        },
    );
    let mut batch = Batch::new();
    for i in 0..12 {
        batch.add(a[i], i as i32, &[2], true);
        batch.add(b[i], i as i32, &[0], true);
    }
    context.decode(&batch).unwrap();
    let of = |offset: usize| -> Vec<_> {
        (0..12)
            .map(|i| context.logits(2 * i + offset).unwrap().to_vec())
            .collect()
    };
    assert!(nmse(&of(0), &fresh(&model, &a)) < 1e-9);
    assert!(nmse(&of(1), &fresh(&model, &b)) < 1e-9);
}

#[test]
fn a_shared_prefix_branches() {
    let model = model("llama");
    let prefix = tokens(8);
    let mut context = context(
        &model,
        ContextOptions {
            n_seq: 2,
            ..precise()
        },
    );
    decode(&mut context, &prefix, 0, 0);
    context.kv_cache_mut().copy(0, 1, ..).unwrap();
    assert_eq!(context.kv_cache().cells().used(), 8);
    let one = decode(&mut context, &[5, 6], 8, 0);
    let other = decode(&mut context, &[7, 8], 8, 1);
    let expect = |tail: &[u32]| fresh(&model, &[&prefix[..], tail].concat())[8..].to_vec();
    assert!(nmse(&one, &expect(&[5, 6])) < 1e-9);
    assert!(nmse(&other, &expect(&[7, 8])) < 1e-9);
    context.kv_cache_mut().keep(1).unwrap();
    assert_eq!(context.kv_cache().cells().used(), 10);
}

#[test]
fn removed_tokens_are_forgotten() {
    let model = model("qwen3");
    let mut context = context(&model, precise());
    decode(&mut context, &tokens(20), 0, 0);
    context.kv_cache_mut().remove(0, 6..).unwrap();
    let again = decode(&mut context, &[9, 10, 11], 6, 0);
    let expected = fresh(&model, &[&tokens(6)[..], &[9, 10, 11]].concat());
    assert!(nmse(&again, &expected[6..]) < 1e-9);
}

/// Keys of deeper layers depend on removed tokens, so only one layer can be compared with a
/// computation from scratch.
#[test]
fn shifted_keys_match_keys_computed_in_place() {
    let devices: [fn() -> Arc<dyn Device>; 2] = [|| reference("ref"), cpu];
    let yarn = SyntheticModel {
        extra: vec![
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", 4.0f32.into()),
            ("rope.scaling.attn_factor", 1.25f32.into()),
        ],
        ..SyntheticModel::tiny("llama")
    };
    let rope_factors = SyntheticModel {
        optional: vec!["rope_freqs.weight"],
        ..SyntheticModel::tiny("llama")
    };
    let exact = SyntheticModel {
        extra: yarn.extra.clone(),
        ..SyntheticModel::tiny("gpt-oss")
    };
    let mut models = vec![
        ("yarn", yarn),
        ("exact yarn", exact),
        ("divisors", rope_factors),
    ];
    models.extend(ARCHITECTURES.map(|name| (name, SyntheticModel::tiny(name))));
    for (device, (name, model)) in devices
        .iter()
        .flat_map(|d| models.iter().map(move |m| (d, m)))
    {
        for (kv_type, limit) in [(DType::F32, 1e-8), (DType::F16, 1e-4)] {
            let file = TestModel::write(&SyntheticModel {
                n_layer: 1,
                ..model.clone()
            });
            let model = file.load(vec![device()], "");
            let options = ContextOptions {
                kv_types: [kv_type; 2],
                n_ubatch: 8,
                ..precise()
            };
            let mut moved = context(&model, options.clone());
            decode(&mut moved, &tokens(24), 0, 0);
            moved.kv_cache_mut().remove(0, 2..7).unwrap();
            moved.kv_cache_mut().shift(0, 7.., -5).unwrap();
            let logits = decode(&mut moved, &[9], 19, 0);
            let rest = [&tokens(24)[..2], &tokens(24)[7..], &[9]].concat();
            let expected = decode(&mut context(&model, options), &rest, 0, 0);
            let error = nmse(&logits, &expected[19..]);
            assert!(error < limit, "{name} {kv_type}: {error}");
        }
    }
}

#[test]
fn invalid_batches_are_refused() {
    let model = model("llama");
    let mut context = context(
        &model,
        ContextOptions {
            n_batch: 4,
            n_seq: 2,
            ..precise()
        },
    );
    decode(&mut context, &tokens(3), 0, 0);
    let mut refused = |tokens: &[(u32, i32, &[u32])], expected: &str| {
        let mut batch = Batch::new();
        for (id, position, sequences) in tokens {
            batch.add(*id, *position, sequences, true);
        }
        let message = context.decode(&batch).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert_eq!(context.kv_cache().cells().used(), 3);
        assert!(context.logits(0).is_none());
    };
    refused(&[], "empty");
    refused(&[(1, 3, &[0][..]); 5], "n_batch is 4");
    refused(&[(320, 3, &[0])], "id 320, the vocabulary has 320");
    refused(&[(1, 3, &[])], "no sequence");
    refused(&[(1, 3, &[0, 2])], "sequence 2, the context has 2");
    refused(&[(1, 2, &[0])], "must be at least 3");
    refused(
        &[(1, 3, &[0]), (1, 3, &[0])],
        "token 1 of the batch: position 3",
    );
    refused(&[(1, -1, &[1])], "must be at least 0");
    let error = context
        .kv_cache_mut()
        .remove(2, ..)
        .unwrap_err()
        .to_string();
    assert!(error.contains("sequence 2"), "{error}");
}

#[test]
fn a_full_context_error_reports_the_usage() {
    let model = model("llama");
    let mut context = context(&model, precise());
    decode(&mut context, &tokens(60), 0, 0);
    let error = context
        .decode(&Batch::sequence(&tokens(5), 60, 0))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("5 tokens do not fit: the context of 64 has 4 free"),
        "{error}"
    );
    decode(&mut context, &tokens(4), 60, 0);
    context.clear().unwrap();
    assert!(
        nmse(
            &decode(&mut context, &tokens(9), 0, 0),
            &fresh(&model, &tokens(9))
        ) < 1e-9
    );
}

/// Masked values are multiplied by 0, and 0 times NaN is NaN.
#[test]
fn clear_removes_nan_from_the_cache() {
    const POISON: u32 = 300;
    let file = TestModel::tiny("llama");
    let gguf = samite_gguf::GgufFile::open(&file.path, samite_gguf::LoadMode::Read).unwrap();
    let table = gguf.require_tensor("token_embd.weight").unwrap();
    let mut values = vec![0; table.size];
    gguf.read_tensor_into(table, &mut values).unwrap();
    let mut bytes = std::fs::read(&file.path).unwrap();
    let row = values.len() / SyntheticModel::tiny("llama").n_vocab;
    let poisoned = &values[POISON as usize * row..][..row];
    let at = bytes
        .windows(row)
        .position(|part| part == poisoned)
        .unwrap();
    for value in bytes[at..at + row].chunks_mut(4) {
        value.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    drop(gguf);
    std::fs::write(&file.path, bytes).unwrap();

    for device in [cpu(), reference("reference")] {
        let model = file.load(vec![device], "");
        let mut context = context(&model, precise());
        let poisoned = decode(&mut context, &[POISON; 20], 0, 0);
        assert!(poisoned.iter().flatten().all(|logit| logit.is_nan()));
        context.clear().unwrap();
        assert_eq!(
            decode(&mut context, &tokens(9), 0, 0),
            fresh(&model, &tokens(9))
        );
    }
}

#[test]
fn invalid_options_are_refused() {
    let model = model("llama");
    let base = precise;
    for (options, expected) in [
        (
            ContextOptions {
                n_ctx: Some(0),
                ..base()
            },
            "n_ctx is 0",
        ),
        (
            ContextOptions {
                n_ubatch: 0,
                ..base()
            },
            "n_ubatch is 0",
        ),
        (ContextOptions { n_seq: 0, ..base() }, "n_seq is 0"),
        (
            ContextOptions {
                kv_types: [DType::I32, DType::F16],
                ..base()
            },
            "K cache of type i32",
        ),
        (
            ContextOptions {
                kv_types: [DType::F16, DType::Q4_K],
                ..base()
            },
            "not whole blocks of 256",
        ),
    ] {
        let message = Context::new(Arc::clone(&model), options)
            .unwrap_err()
            .to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_cancelled_decode_changes_nothing() {
    let model = model("llama");
    let options = precise();
    let cancel = options.cancel.clone();
    let mut context = context(&model, options);
    decode(&mut context, &tokens(8), 0, 0);
    cancel.cancel();
    let error = context.decode(&Batch::sequence(&[5, 6], 8, 0)).unwrap_err();
    assert!(error.is_cancelled(), "{error}");
    assert_eq!(context.kv_cache().cells().used(), 8);
    cancel.reset();
    let again = decode(&mut context, &[5, 6], 8, 0);
    let expected = fresh(&model, &[&tokens(8)[..], &[5, 6]].concat());
    assert!(nmse(&again, &expected[8..]) < 1e-9);
}

#[test]
fn a_device_error_changes_nothing() {
    let faults = FaultPlan::new();
    let device = ReferenceDevice::new(ReferenceOptions {
        faults: Some(Arc::clone(&faults)),
        ..ReferenceOptions::default()
    });
    let model = TestModel::tiny("llama").load(vec![device], "");
    let options = ContextOptions {
        n_ubatch: 4,
        ..precise()
    };
    let expected = decode(&mut context(&model, options.clone()), &tokens(12), 0, 0);
    let mut context = context(&model, options);
    decode(&mut context, &tokens(4), 0, 0);
    let batch = Batch::sequence(&tokens(12)[4..], 4, 0);
    context.decode(&batch).unwrap();
    context.kv_cache_mut().remove(0, 4..).unwrap();
    faults.reset();
    context.decode(&batch).unwrap();
    let calls = faults.calls();
    assert!(calls > 4);
    for call in 0..calls {
        context.kv_cache_mut().remove(0, 4..).unwrap();
        faults.reset();
        faults.fail_at(call);
        let error = context.decode(&batch).unwrap_err();
        assert!(matches!(error, Error::Core(_)), "{error}");
        assert_eq!(
            context.kv_cache().cells().used(),
            4,
            "after a failure of call {call}"
        );
        assert!(context.logits(7).is_none());
        faults.reset();
        context.decode(&batch).unwrap();
        let logits = context.logits(7).unwrap().to_vec();
        assert!(
            nmse(&[logits], &expected[11..]) < 1e-12,
            "after a failure of call {call}"
        );
    }
}

#[test]
fn keys_whose_shift_failed_are_never_used() {
    let faults = FaultPlan::new();
    let device = ReferenceDevice::new(ReferenceOptions {
        faults: Some(Arc::clone(&faults)),
        ..ReferenceOptions::default()
    });
    let model = TestModel::tiny("llama").load(vec![device], "");
    // Eight tokens; three are removed and the rest is shifted.
    let moved = || {
        faults.reset();
        let mut context = context(&model, precise());
        decode(&mut context, &tokens(8), 0, 0);
        context.kv_cache_mut().remove(0, 0..3).unwrap();
        context.kv_cache_mut().shift(0, 3.., -3).unwrap();
        faults.reset();
        context
    };
    let next = Batch::sequence(&[9], 5, 0);
    let mut whole = moved();
    whole.decode(&next).unwrap();
    let calls = faults.calls();
    let expected = whole.logits(0).unwrap().to_vec();
    let mut cleared = 0;
    for call in 0..calls {
        let mut context = moved();
        faults.fail_at(call);
        let error = context.decode(&next).unwrap_err();
        assert!(matches!(error, Error::Core(_)), "{error}");
        faults.reset();
        if context.kv_cache().cells().used() == 0 {
            // It is unknown which keys were shifted, so they are removed.
            cleared += 1;
            assert_eq!(context.kv_cache().cells().last_position(0), None);
            decode(&mut context, &tokens(8), 0, 0);
            continue;
        }
        // Or the failure came before or after the shift: nothing is lost, and nothing is shifted
        // twice.
        assert_eq!(context.kv_cache().cells().used(), 5, "call {call}");
        context.decode(&next).unwrap();
        let again = context.logits(0).unwrap().to_vec();
        assert_eq!(again, expected, "call {call}");
    }
    assert!(0 < cleared && cleared < calls, "{cleared} of {calls}");
}

/// Only runs of the same graph overlap.
#[test]
fn pipelined_micro_batches_share_a_graph_without_wasted_work() {
    let file = TestModel::tiny("llama");
    let model = file.load(vec![cpu()], "");
    let plans = |copies: usize, n_tokens: usize, wanted: usize| {
        let mut context = context(
            &model,
            ContextOptions {
                copies,
                n_ctx: Some(128),
                n_ubatch: 32,
                ..precise()
            },
        );
        let mut batch = Batch::new();
        for (i, &token) in tokens(n_tokens).iter().enumerate() {
            batch.add(token, i as i32, &[0], i == wanted);
        }
        let before = context.scheduler().counters();
        context.decode(&batch).unwrap();
        let after = context.scheduler().counters();
        assert_eq!(after.runs - before.runs, 3, "{copies} copies");
        after.plans - before.plans
    };
    // Three of 30, not two of 32 and a rest. The cells of the last one and its row of logits are
    // part of the graph from the first one on.
    assert_eq!(plans(2, 90, 89), 1);
    assert_eq!(plans(2, 90, 0), 1, "and of the first to the last");
    // Each reads its own cells, and only the last one has logits.
    assert_eq!(plans(1, 96, 95), 3);
}

/// The graph for one micro-batch has room for the logits of another one, and the requested ones
/// must still be found.
#[test]
fn pipelined_micro_batches_return_each_tokens_logits() {
    let file = TestModel::tiny("llama");
    let model = file.load(vec![cpu()], "");
    let logits = |copies: usize, n_ubatch: usize, wanted: u32| {
        let mut context = context(
            &model,
            ContextOptions {
                copies,
                n_ubatch,
                ..precise()
            },
        );
        let mut batch = Batch::new();
        for (i, &token) in tokens(6).iter().enumerate() {
            batch.add(token, i as i32, &[0], wanted >> i & 1 == 1);
        }
        context.decode(&batch).unwrap();
        let logits = (0..6).map(|i| context.logits(i).map(<[f32]>::to_vec));
        logits.collect::<Vec<_>>()
    };
    for wanted in 1..64 {
        for n_ubatch in [2, 3] {
            let same = logits(2, n_ubatch, wanted) == logits(1, n_ubatch, wanted);
            assert!(same, "wanted {wanted:06b} in micro-batches of {n_ubatch}");
        }
    }
}
