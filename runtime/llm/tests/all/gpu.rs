//! Whole models on a GPU device, alone and with others. A software adapter suffices; without any
//! adapter, the tests report that they are skipped.

use crate::common::*;
use samite_core::{Backend, DType, Device, Error};
use samite_llm::arch::ARCHITECTURES;
use samite_llm::{Context, ContextOptions, GenerateOptions, Model, Session, SyntheticModel};
use samite_text::{Sampler, SamplerParams};
use samite_wgpu::{WgpuBackend, WgpuDevice};
use std::ops::ControlFlow;
use std::sync::Arc;

const N_TOKENS: usize = 24;

/// Opens the first adapter with `parameters`.
fn gpu(parameters: &str) -> Option<Arc<dyn Device>> {
    let backend = WgpuBackend::default();
    let Some(device) = backend.devices().first() else {
        samite_testing::skipped("wgpu finds no adapter, not even a software one");
        return None;
    };
    let device = backend.configure(device, parameters.parse().unwrap());
    Some(device.unwrap())
}

fn options_for(model: &Model, flash: bool) -> ContextOptions {
    ContextOptions {
        n_ctx: Some(64),
        n_ubatch: if model.spec().is_bidirectional() {
            64
        } else {
            10
        },
        n_logits: Some(64),
        output: output_of(model),
        flash,
        ..precise()
    }
}

/// Returns the logits after each token, or its embedding: a prompt in pieces, then single tokens.
pub fn decode_all(
    devices: Vec<Arc<dyn Device>>,
    rules: &str,
    file: &TestModel,
    flash: bool,
) -> Vec<Vec<f32>> {
    let model = file.load(devices, rules);
    let mut context = Context::new(Arc::clone(&model), options_for(&model, flash)).unwrap();
    let tokens: Vec<u32> = (0..N_TOKENS as u32).map(|i| (i * 37 + 11) % 320).collect();
    if model.spec().is_bidirectional() {
        return decode(&mut context, &tokens, 0, 0);
    }
    let mut rows = decode(&mut context, &tokens[..20], 0, 0);
    for (i, token) in tokens.iter().enumerate().skip(20) {
        rows.extend(decode(&mut context, &[*token], i as i32, 0));
    }
    rows
}

#[test]
fn every_architecture_matches_the_cpu() {
    let Some(gpu) = gpu("") else { return };
    for arch in ARCHITECTURES {
        let name = arch.name;
        let file = TestModel::tiny(name);
        let expected = decode_all(vec![cpu()], "", &file, true);
        let near = |devices, rules: &str, flash| {
            let found = decode_all(devices, rules, &file, flash);
            let error = nmse(&found, &expected);
            assert!(
                error <= 1e-8,
                "{name}, '{rules}', flash {flash}: {error:.1e}"
            );
        };
        near(vec![Arc::clone(&gpu)], "", true);
        near(vec![Arc::clone(&gpu)], "", false);
        let all = || vec![Arc::clone(&gpu), reference("b"), cpu()];
        near(all(), "layers=0:wgpu0;layers=1:b;layers=2:cpu", true);
        near(all(), "layers=0:cpu;layers=1:wgpu0;layers=2:b", false);
    }
}

/// The device computes with weights whose blocks refer to grid points. The results match the
/// reference, and match the CPU, which rounds activations to 8 bits, as well as other types with
/// few bits do.
#[test]
fn iq_type_models_match_the_reference() {
    let Some(gpu) = gpu("") else { return };
    let errors = |architecture, dtype| {
        let file = TestModel::write(&SyntheticModel {
            n_embd: 256,
            n_ff: 256,
            head_dim: 64,
            dtype,
            ..SyntheticModel::tiny(architecture)
        });
        let found = decode_all(vec![Arc::clone(&gpu)], "", &file, true);
        [reference("b"), cpu()].map(|other| nmse(&found, &decode_all(vec![other], "", &file, true)))
    };
    let [_, usual] = errors("llama", DType::Q2_K);
    for dtype in samite_testing::DECODED {
        let [exact, rounded] = errors("llama", dtype);
        assert!(exact <= 1e-8, "{dtype}: {exact:.1e}");
        assert!(
            rounded <= 10.0 * usual,
            "{dtype}: {rounded:.1e}, Q2_K: {usual:.1e}"
        );
    }
    // 8-bit numbers may select other experts.
    let [exact, _] = errors("qwen3moe", DType::IQ2_XS);
    assert!(exact <= 1e-8, "experts: {exact:.1e}");
}

/// The QK-norm is fused into the launch that rotates heads and writes to the caches.
#[test]
fn qk_norms_need_no_extra_launch() {
    let Some(gpu) = gpu("") else { return };
    let own = gpu.as_any().downcast_ref::<WgpuDevice>().unwrap();
    let launches = |name: &'static str| {
        decode_all(vec![Arc::clone(&gpu)], "", &TestModel::tiny(name), true);
        own.prepared_launches()
    };
    let (without, with) = (launches("llama"), launches("qwen3"));
    assert!(without > 20, "{without}");
    assert_eq!(with, without);
}

/// Norms of values come before keys, so that rotations and writes are still one launch with them.
#[test]
fn value_norms_do_not_prevent_fusion() {
    let Some(gpu) = gpu("") else { return };
    let own = gpu.as_any().downcast_ref::<WgpuDevice>().unwrap();
    let launches = |n_layer| {
        let file = TestModel::write(&SyntheticModel {
            n_layer,
            ..SyntheticModel::tiny("gemma4")
        });
        decode_all(vec![Arc::clone(&gpu)], "", &file, true);
        own.prepared_launches()
    };
    // Three fewer in each layer than with a norm of values in between.
    assert_eq!(launches(5) - launches(3), 42);
}

/// Quantized caches are written by the launch that rotates keys, like others.
#[test]
fn quantized_cache_writes_need_no_extra_launch() {
    let Some(gpu) = gpu("") else { return };
    let own = gpu.as_any().downcast_ref::<WgpuDevice>().unwrap();
    for architecture in ["llama", "qwen3", "gemma4"] {
        let file = TestModel::write(&SyntheticModel {
            head_dim: 32,
            ..SyntheticModel::tiny(architecture)
        });
        let run = |device: Arc<dyn Device>, kv_type| {
            let model = file.load(vec![device], "");
            let options = ContextOptions {
                kv_types: [kv_type; 2],
                flash: true,
                ..options_for(&model, true)
            };
            let mut context = Context::new(model, options).unwrap();
            let mut rows = decode(&mut context, &tokens(9), 0, 0);
            rows.extend(decode(&mut context, &[5], 9, 0));
            rows
        };
        run(Arc::clone(&gpu), DType::F16);
        let expected = own.prepared_launches();
        for kv_type in [DType::Q8_0, DType::Q4_0] {
            let found = run(Arc::clone(&gpu), kv_type);
            assert_eq!(
                own.prepared_launches(),
                expected,
                "{architecture}, {kv_type}"
            );
            let error = nmse(&found, &run(reference("b"), kv_type));
            assert!(error <= 1e-4, "{architecture}, {kv_type}: {error:.1e}");
        }
    }
}

#[test]
fn pipelined_runs_and_small_limits_keep_results() {
    for parameters in ["", "subgroups=off,binding=64KiB", "overlaps=off"] {
        let Some(gpu) = gpu(parameters) else { return };
        let file = TestModel::tiny("llama");
        let tokens = tokens(40);
        let run = |devices, rules: &str, copies| {
            let model = file.load(devices, rules);
            let options = ContextOptions {
                n_ubatch: 8,
                n_logits: Some(40),
                copies,
                ..precise()
            };
            decode(&mut Context::new(model, options).unwrap(), &tokens, 0, 0)
        };
        let expected = run(vec![cpu()], "", 1);
        for copies in [1, 4] {
            for rules in ["", "layers=1-:cpu", "layers=0:cpu;output:cpu"] {
                let found = run(vec![Arc::clone(&gpu), cpu()], rules, copies);
                let error = nmse(&found, &expected);
                assert!(error <= 1e-8, "'{rules}', {copies} copies: {error:.1e}");
            }
        }
    }
}

/// A lost device is an error for the context that uses it, and for no others.
#[test]
fn a_lost_gpu_is_an_error_only_for_its_context() {
    let Some(gpu) = gpu("") else { return };
    let file = TestModel::tiny("llama");
    let mut context = context(&file.load(vec![Arc::clone(&gpu)], ""), precise());
    decode(&mut context, &tokens(4), 0, 0);
    let own = gpu.as_any().downcast_ref::<WgpuDevice>().unwrap();
    own.destroy().unwrap();
    let mut batch = samite_llm::Batch::new();
    batch.add(5, 4, &[0], true);
    for _ in 0..2 {
        let error = context.decode(&batch).unwrap_err();
        assert!(
            matches!(&error, samite_llm::Error::Core(Error::DeviceLost { .. })),
            "{error:?}"
        );
    }
    let mut other = crate::common::context(&file.load(vec![cpu()], ""), precise());
    decode(&mut other, &tokens(4), 0, 0);
    let Some(again) = self::gpu("") else { return };
    let mut again = crate::common::context(&file.load(vec![again], ""), precise());
    decode(&mut again, &tokens(4), 0, 0);
}

/// With several sequences, the top tokens of each match its own logits.
#[test]
fn each_sequence_gets_its_own_top_k_tokens() {
    let Some(gpu) = gpu("selection=on") else {
        return;
    };
    let file = TestModel::tiny("llama");
    let options = ContextOptions {
        n_ctx: Some(64),
        n_seq: 3,
        n_logits: Some(5),
        ..precise()
    };
    let model = file.load(vec![gpu], "");
    let mut context = Context::new(model, options).unwrap();
    for (count, wanted) in [(1, [true; 5]), (4, [false, true, true, false, true])] {
        context.set_device_top_k(Some(count)).unwrap();
        context.clear().unwrap();
        let mut batch = samite_llm::Batch::new();
        for (token, (sequence, position)) in
            [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)].iter().enumerate()
        {
            batch.add(7 * token as u32 + 3, *position, &[*sequence], wanted[token]);
        }
        context.decode(&batch).unwrap();
        assert_eq!(context.logits(1), None);
        let chosen: Vec<Vec<(u32, f32)>> = (0..5)
            .map(|index| context.device_top_k(index).unwrap_or_default().to_vec())
            .collect();
        for (index, chosen) in chosen.iter().enumerate() {
            assert_eq!(!chosen.is_empty(), wanted[index], "{index}");
            if chosen.is_empty() {
                continue;
            }
            let logits = context.read_logits(index).unwrap();
            let mut all: Vec<u32> = (0..logits.len() as u32).collect();
            all.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            let tokens: Vec<u32> = chosen.iter().map(|(token, _)| *token).collect();
            assert_eq!(tokens, all[..count], "{index}");
            for (token, logit) in chosen.iter().filter(|_| count > 1) {
                assert_eq!(*logit, logits[*token as usize], "{index}");
            }
        }
        assert_ne!(chosen[1], chosen[4]);
    }
}

/// Samplers choose the same tokens whether all logits are read or the device selects the top-k.
#[test]
fn top_k_on_the_device_does_not_change_sampling() {
    let Some(choosing) = gpu("selection=on") else {
        return;
    };
    let Some(reading) = gpu("selection=off") else {
        return;
    };
    let file = TestModel::tiny("llama");
    let few = SamplerParams {
        top_k: 7,
        temperature: 1.5,
        seed: 5,
        ..SamplerParams::default()
    };
    let penalized = SamplerParams {
        repeat_penalty: 1.3,
        ..few.clone()
    };
    let generate = |devices: Vec<Arc<dyn Device>>, rules: &str, params: &SamplerParams| {
        let model = file.load(devices, rules);
        let options = ContextOptions {
            n_ctx: Some(64),
            ..precise()
        };
        let mut session = Session::new(Context::new(model, options).unwrap()).unwrap();
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let options = GenerateOptions {
            max_tokens: Some(20),
            ignore_end: true,
            ..GenerateOptions::default()
        };
        let mut all = Vec::new();
        // The second time, most of the prompt is cached.
        for _ in 0..2 {
            let written = session.generate(&tokens(12), &mut sampler, &options, |_| {
                ControlFlow::Continue(())
            });
            all.extend(written.unwrap().tokens);
        }
        // After the only token of the last batch, which was a generated one.
        let chosen = session.context().device_top_k(0).map(<[_]>::len);
        // Later decodes by other code return logits.
        let context = session.context_mut();
        context.clear().unwrap();
        assert_eq!(decode(context, &tokens(3), 0, 0).len(), 3);
        (all, chosen)
    };
    for (params, count) in [
        (SamplerParams::greedy(), Some(1)),
        (few, Some(7)),
        (penalized, None),
    ] {
        let (expected, none) = generate(vec![Arc::clone(&reading)], "", &params);
        assert_eq!(none, None);
        let devices = || vec![Arc::clone(&choosing), cpu()];
        assert_eq!(
            generate(vec![Arc::clone(&choosing)], "", &params),
            (expected.clone(), count)
        );
        assert_eq!(generate(devices(), "", &params), (expected.clone(), count));
        // Logits on the host are read as usual.
        let (found, none) = generate(devices(), "output:cpu", &params);
        assert_eq!((found, none), (expected, None));
    }
}
