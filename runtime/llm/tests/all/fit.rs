//! Layers are fitted to free memory, and the predicted needs equal the allocated memory.

use crate::common::*;
use samite_core::Device;
use samite_gguf::{GgufFile, LoadMode};
use samite_llm::arch::{Output, spec::Pooling};
use samite_llm::{
    Batch, Context, ContextOptions, ContextPlan, Fit, FitOptions, Model, ModelOptions,
    PlacementRule, SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::sync::Arc;

fn gpu(name: &str, memory_limit: usize) -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions {
        memory_limit: Some(memory_limit),
        ..ReferenceOptions::named(name)
    })
}

fn six_layers(architecture: &'static str) -> TestModel {
    TestModel::write(&SyntheticModel {
        n_layer: 6,
        ..SyntheticModel::tiny(architecture)
    })
}

fn options(devices: &[Arc<dyn Device>]) -> ModelOptions {
    ModelOptions {
        fit: Some(FitOptions {
            context: precise(),
            margin: 0,
        }),
        ..ModelOptions::new(devices.to_vec())
    }
}

fn used(device: &Arc<dyn Device>) -> usize {
    let memory = device.memory();
    memory.total.unwrap() - memory.free.unwrap()
}

/// Loads the model and creates the context that it was fitted for.
fn load(file: &TestModel, devices: &[Arc<dyn Device>]) -> (Fit, Context) {
    let model = Model::load(&file.path, &options(devices)).unwrap();
    let fit = model.fit().unwrap().clone();
    (fit, Context::new(model, precise()).unwrap())
}

#[test]
fn planned_memory_matches_allocated_memory() {
    for architecture in ARCHITECTURES {
        let file = six_layers(architecture);
        let devices = [gpu("a", 1 << 30), gpu("b", 1 << 29), cpu()];
        let (fit, mut context) = load(&file, &devices);
        // Two thirds and one third of seven, where the output counts as a layer.
        assert_eq!(fit.layers, [0, 0, 0, 0, 1, 1, 1], "{architecture}");
        for (device, need) in devices.iter().zip(&fit.needs).take(2) {
            assert_eq!(used(device), need.bytes(), "{architecture}: {need:?}");
            assert!(need.weights > 0 && need.kv > 0 && need.compute > 0);
        }
        let expected = {
            let model = file.load(vec![cpu()], "");
            decode(
                &mut samite_llm::Context::new(model, precise()).unwrap(),
                &tokens(20),
                0,
                0,
            )
        };
        let logits = decode(&mut context, &tokens(20), 0, 0);
        assert!(nmse(&logits, &expected) < 1e-6, "{architecture}");
        for (device, need) in devices.iter().zip(&fit.needs).take(2) {
            assert_eq!(used(device), need.bytes(), "running takes no more memory");
        }
    }
}

#[test]
fn encoders_are_fitted_for_embedding_output() {
    for architecture in ["bert", "gemma-embedding"] {
        let file = six_layers(architecture);
        let devices = [gpu("a", 1 << 30), gpu("b", 1 << 29), cpu()];
        let model = Model::load(&file.path, &options(&devices)).unwrap();
        let fit = model.fit().unwrap().clone();
        assert_eq!(fit.layers, [0, 0, 0, 0, 1, 1, 1], "{architecture}");
        let context = ContextOptions {
            output: Output::Embeddings(Pooling::None),
            ..precise()
        };
        let mut context = Context::new(model, context).unwrap();
        context.decode(&Batch::sequence(&tokens(20), 0, 0)).unwrap();
        for (device, need) in devices.iter().zip(&fit.needs).take(2) {
            assert_eq!(used(device), need.bytes(), "{architecture}: {need:?}");
            assert!(need.weights > 0 && need.kv == 0 && need.compute > 0);
        }
    }
}

#[test]
fn the_maximum_number_of_layers_is_placed() {
    let file = six_layers("llama");
    let everything = {
        let (fit, _) = load(&file, &[gpu("a", 1 << 30), cpu()]);
        fit.needs[0].bytes()
    };
    let mut before = 0;
    for percent in (0..=100).step_by(5) {
        let devices = [gpu("a", everything * percent / 100), cpu()];
        let (fit, context) = load(&file, &devices);
        let count = fit.needs[0].layers;
        assert!(
            count >= before,
            "{percent} %: {count} layers, {before} with less memory"
        );
        assert_eq!(fit.needs[0].layers + fit.needs[1].layers, 7);
        if count > 0 {
            assert!(fit.needs[0].bytes() <= everything * percent / 100);
        }
        drop(context);
        // One more layer would not fit: an attempt is rejected.
        if count < 7 {
            let rules = vec![PlacementRule::LastLayers(count + 1)];
            let options = ModelOptions {
                rules,
                ..options(&devices)
            };
            let model = Model::load(&file.path, &options);
            let context = model.map(|model| Context::new(model, precise()).map(drop));
            assert!(
                !matches!(context, Ok(Ok(()))),
                "{percent} %: {} layers would fit, too",
                count + 1
            );
        }
        before = count;
    }
    assert_eq!(before, 7);
}

#[test]
fn layers_of_a_full_device_move_to_others() {
    let file = six_layers("qwen2");
    // In proportion, b would get layers, but its needs besides layers do not fit.
    let devices = [gpu("a", 1 << 30), gpu("b", 1 << 12), cpu()];
    let (fit, _context) = load(&file, &devices);
    assert_eq!(fit.layers, [0; 7]);
}

#[test]
fn explicit_layer_rules_override_fitting() {
    let file = six_layers("llama");
    let devices = [gpu("a", 1 << 30), cpu()];
    for rules in [
        vec![PlacementRule::LastLayers(2)],
        PlacementRule::parse_all("layers=0-1:a").unwrap(),
    ] {
        let options = ModelOptions {
            rules,
            ..options(&devices)
        };
        assert!(Model::load(&file.path, &options).unwrap().fit().is_none());
    }
    // Only the CPU: there is nothing to fit.
    let model = Model::load(&file.path, &options(&[cpu()])).unwrap();
    assert!(model.fit().is_none());
    // Rules about single tensors are kept and taken into account.
    let rules = PlacementRule::parse_all("*ffn_up*:cpu").unwrap();
    let options = ModelOptions {
        rules,
        ..options(&devices)
    };
    let model = Model::load(&file.path, &options).unwrap();
    assert_eq!(model.fit().unwrap().layers, [0; 7]);
    let context = Context::new(Arc::clone(&model), precise()).unwrap();
    assert_eq!(used(&devices[0]), model.fit().unwrap().needs[0].bytes());
    drop(context);
}

/// A context's memory and behavior are known without it.
#[test]
fn a_context_is_planned_from_the_header() {
    for (architecture, rules) in [
        ("llama", ""),
        ("qwen2", "layers=1-3:a;output:b"),
        ("qwen3moe", "*_exps*:a"),
    ] {
        let file = six_layers(architecture);
        let whole = std::fs::read(&file.path).unwrap();
        let (devices, more) = ([reference("a"), reference("b"), cpu()], precise());
        let options = ModelOptions {
            rules: PlacementRule::parse_all(rules).unwrap(),
            ..ModelOptions::new(devices.to_vec())
        };
        let context_options = samite_llm::ContextOptions {
            n_ubatch: 16,
            copies: 2,
            ..more
        };
        let context = context(
            &Model::load(&file.path, &options).unwrap(),
            context_options.clone(),
        );

        // The data is truncated in the middle of a tensor, or missing completely.
        let header = whole.len()
            - GgufFile::open(&file.path, LoadMode::Read)
                .unwrap()
                .tensors()
                .total_bytes() as usize;
        for length in [whole.len() - 100, header] {
            std::fs::write(&file.path, &whole[..length]).unwrap();
            let error = Model::load(&file.path, &options).unwrap_err();
            assert!(error.to_string().contains("truncated"), "{error}");
            for mode in [LoadMode::Read, LoadMode::Mmap] {
                let header = GgufFile::open_header(&file.path, mode).unwrap();
                let model = Model::without_weights(&header, &options).unwrap();
                let plan = ContextPlan::new(Arc::clone(&model), context_options.clone()).unwrap();
                assert_eq!(plan.memory().unwrap(), context.memory(), "{architecture}");
                for n_tokens in [1, 16] {
                    let (ours, real) = (
                        plan.plan(n_tokens).unwrap(),
                        context.plan(n_tokens).unwrap(),
                    );
                    assert_eq!(ours.to_string(), real.to_string(), "{architecture}");
                }
                let error = Context::new(model, context_options.clone()).unwrap_err();
                assert!(error.to_string().contains("without its weights"), "{error}");
                let last = header.tensors().iter().last().unwrap();
                let error = header
                    .read_tensor_into(last, &mut vec![0; last.size])
                    .unwrap_err();
                assert!(error.to_string().contains("its data is missing"), "{error}");
            }
        }
    }
}

#[test]
fn the_longest_context_fits_into_free_memory() {
    const MARGIN: usize = 1 << 20;
    let file = TestModel::write(&SyntheticModel {
        n_ctx_train: 1 << 17,
        ..SyntheticModel::tiny("llama")
    });
    let longest = |memory: usize, load: bool| {
        let devices = [gpu("a", memory), cpu()];
        let options = ModelOptions {
            rules: PlacementRule::parse_all("layers=0-:a").unwrap(),
            fit: None,
            ..ModelOptions::new(devices.to_vec())
        };
        let model = if load {
            Model::load(&file.path, &options).unwrap()
        } else {
            let header = GgufFile::open_header(&file.path, LoadMode::Read).unwrap();
            Model::without_weights(&header, &options).unwrap()
        };
        let n_ctx = precise().longest_context(&model, MARGIN).unwrap();
        let n_ctx = n_ctx.unwrap();
        (n_ctx, model, devices)
    };
    // All of the trained length, or the minimum if even that does not fit.
    assert_eq!(longest(8 << 30, true).0, 1 << 17);
    assert_eq!(longest(2 << 20, false).0, 4096);

    let (n_ctx, model, devices) = longest(24 << 20, true);
    assert!((4097..1 << 17).contains(&n_ctx), "{n_ctx}");
    assert_eq!(n_ctx % 256, 0);
    assert_eq!(longest(24 << 20, false).0, n_ctx, "planned and loaded");
    let context = |n_ctx| ContextOptions {
        n_ctx: Some(n_ctx),
        ..precise()
    };
    let made = Context::new(Arc::clone(&model), context(n_ctx)).unwrap();
    assert!(devices[0].memory().free.unwrap() >= MARGIN);
    drop(made);
    // The unused part is at most a sixteenth, plus steps.
    let longer = ContextPlan::new(Arc::clone(&model), context(n_ctx + n_ctx / 8 + 512)).unwrap();
    let free = devices[0].memory().free.unwrap();
    let uses = longer.memory().unwrap();
    let own = uses.iter().find(|row| row.memory.starts_with('a')).unwrap();
    assert!(own.kv + own.compute > free - MARGIN, "{own:?}, {free} free");
    let fitting = ContextPlan::new(Arc::clone(&model), context(n_ctx)).unwrap();
    assert_eq!(fitting.shortages(&[]).unwrap(), []);
    let too_long = ContextPlan::new(model, context(1 << 17)).unwrap();
    let shortages = too_long.shortages(&[]).unwrap();
    assert_eq!(shortages.len(), 1);
    assert_eq!((&*shortages[0].device, shortages[0].free), ("a", free));
}
