//! Requests whose numbers are not finite fail alone: other requests, during and after them, get the
//! same tokens as in a separate engine.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{events, request, run, submit};
use samite_core::{DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{
    Adapter, Batch, Context, ContextOptions, Error, Model, ModelOptions, ScaledAdapter,
    SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_requests::{Engine, EngineOptions, Event, FailureKind, Reader, Request};
use samite_text::SamplerParams;
use std::sync::Arc;

/// A model on a device, and the configuration of its cache.
struct Setup {
    model: Arc<Model>,
    flash: bool,
    kv_types: [DType; 2],
}

impl Setup {
    fn new(architecture: &'static str, device: Arc<dyn Device>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let tiny = SyntheticModel::tiny(architecture);
        let model = SyntheticModel {
            n_layer: tiny.n_layer.max(3),
            ..tiny
        };
        model.write(&path).unwrap();
        Setup {
            model: Model::load(&path, &ModelOptions::new(vec![device])).unwrap(),
            flash: true,
            kv_types: [DType::F16; 2],
        }
    }

    fn engine(&self) -> Engine {
        self.engine_with_slots(4)
    }

    fn engine_with_slots(&self, slots: usize) -> Engine {
        let options = EngineOptions {
            slots,
            context: Some(256),
            kept: 6,
            budget: 96,
            ..EngineOptions::default()
        };
        let context = ContextOptions {
            n_ctx: Some(2048),
            n_batch: 96,
            n_seq: options.n_seq(),
            flash: self.flash,
            kv_types: self.kv_types,
            ..ContextOptions::default()
        };
        let context = Context::new(Arc::clone(&self.model), context).unwrap();
        Engine::new(context, options).unwrap()
    }

    /// Makes a request fail by a control vector of NaN or of the largest numbers.
    fn failing(&self, request: Request, number: f32) -> Request {
        let direction = vec![number; self.model.spec().n_embd];
        let adapter = Adapter::control_vector(&self.model, [(1, &direction[..])]).unwrap();
        Request {
            adapters: Some(vec![ScaledAdapter {
                adapter,
                share: 1.0,
            }]),
            ..request
        }
    }

    /// Returns the tokens of a request in a separate engine.
    fn alone(&self, request: Request) -> Vec<u32> {
        let mut engine = self.engine();
        let mut reader = submit(&mut engine, request);
        run(&mut engine);
        ids(&mut reader)
    }
}

fn cpu() -> Arc<dyn Device> {
    CpuDevice::new(CpuOptions::default().with_threads(1))
}

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions::named("alone"))
}

/// Returns the tokens of a request, which must have been answered.
fn ids(reader: &mut Reader) -> Vec<u32> {
    let events = events(reader);
    assert!(
        matches!(events.last(), Some(Event::Finished(_))),
        "{:?}",
        events.last()
    );
    let ids = events.iter().filter_map(|event| match event {
        Event::Token(token) => Some(token.id),
        _ => None,
    });
    ids.collect()
}

fn assert_failed(reader: &mut Reader) {
    let events = events(reader);
    let kind = match events.last() {
        Some(Event::Failed(failed)) => Some(failed.kind),
        _ => None,
    };
    assert_eq!(kind, Some(FailureKind::Sampling), "{events:?}");
}

/// Prompts of different lengths: short ones share a batch with the failing request.
fn neighbours() -> [Request; 3] {
    [
        request(5..15, 12),
        request(30..75, 12),
        request(50..190, 12),
    ]
}

/// Submits a failing request between others, and others after it.
fn fails_alone(setup: &Setup, number: f32) {
    let expected = neighbours().map(|request| setup.alone(request));
    for failing_prompt in [20..24, 20..60, 20..180] {
        let mut engine = setup.engine();
        // One of them is already decoding.
        let [first, second, third] = neighbours();
        let mut readers = vec![submit(&mut engine, first)];
        engine.step();
        engine.step();
        let failing = setup.failing(request(failing_prompt.clone(), 9), number);
        let mut failed = submit(&mut engine, failing.clone());
        readers.push(submit(&mut engine, second));
        readers.push(submit(&mut engine, third));
        run(&mut engine);
        assert_failed(&mut failed);
        for (reader, expected) in readers.iter_mut().zip(&expected) {
            assert_eq!(&ids(reader), expected, "beside {failing_prompt:?}");
        }
        // Nothing of the failing request is cached: it computes everything again, and fails again.
        let mut failed = submit(&mut engine, failing);
        run(&mut engine);
        let events = events(&mut failed);
        assert!(
            matches!(events[0], Event::Started(started) if started.cached == 0),
            "{events:?}"
        );
        assert!(matches!(events.last(), Some(Event::Failed(_))));
        // Later requests are computed in its cells.
        engine.clear_prefix_cache();
        for (request, expected) in neighbours().into_iter().zip(&expected) {
            let mut reader = submit(&mut engine, request);
            run(&mut engine);
            assert_eq!(&ids(&mut reader), expected, "after {failing_prompt:?}");
        }
        engine.clear_prefix_cache();
        assert_eq!(engine.view().used_cells, 0);
    }
}

#[test]
fn a_failing_request_fails_alone_with_every_type_of_cache() {
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
    ] {
        let setup = Setup {
            kv_types: [dtype; 2],
            ..Setup::new("llama", cpu())
        };
        fails_alone(&setup, f32::NAN);
    }
}

#[test]
fn a_failing_request_fails_alone_on_the_reference() {
    fails_alone(&Setup::new("llama", reference()), f32::NAN);
}

#[test]
fn a_failing_request_fails_alone_if_its_numbers_overflow() {
    fails_alone(&Setup::new("llama", cpu()), f32::INFINITY);
}

#[test]
fn a_failing_request_fails_alone_without_flash_attention() {
    for device in [cpu(), reference()] {
        let setup = Setup {
            flash: false,
            ..Setup::new("llama", device)
        };
        fails_alone(&setup, f32::NAN);
    }
}

/// Gated delta nets, convolutions and windows with attention, experts, and states alone.
#[test]
fn a_failing_request_fails_alone_in_other_architectures() {
    for architecture in ["qwen3next", "lfm2", "gemma3", "qwen3moe", "mamba"] {
        for flash in [true, false] {
            println!("{architecture}, flash: {flash}");
            let setup = Setup {
                flash,
                ..Setup::new(architecture, cpu())
            };
            fails_alone(&setup, f32::NAN);
        }
    }
}

/// A request for 0 tokens ends before the engine reads logits.
#[test]
fn a_failed_prefill_only_request_does_not_corrupt_later_ones() {
    for flash in [true, false] {
        let setup = Setup {
            flash,
            ..Setup::new("llama", cpu())
        };
        let expected = setup.alone(request(30..75, 12));
        let mut engine = setup.engine();
        let failing = setup.failing(request(20..100, 0), f32::NAN);
        let _failing = submit(&mut engine, failing);
        run(&mut engine);
        let mut reader = submit(&mut engine, request(30..75, 12));
        run(&mut engine);
        assert_eq!(ids(&mut reader), expected, "flash: {flash}");
    }
}

/// Without flash attention, data that a failed sequence leaves in free cells corrupts all others.
#[test]
fn non_finite_cells_are_detected_and_cleared() {
    let setup = Setup::new("llama", cpu());
    let options = ContextOptions {
        n_ctx: Some(64),
        n_seq: 2,
        flash: false,
        ..ContextOptions::default()
    };
    let mut context = Context::new(Arc::clone(&setup.model), options).unwrap();
    let failing = setup.failing(request(0..1, 1), f32::NAN).adapters;
    context.set_sequence_adapters(0, failing).unwrap();
    // The second sequence is shorter: it does not overwrite everything that the first one left.
    let batch = |sequence: u32| {
        let mut batch = Batch::new();
        let count = [10, 4][sequence as usize];
        (0..count).for_each(|i| batch.add(20 + i as u32, i, &[sequence], i + 1 == count));
        batch
    };
    let spoil = |context: &mut Context| {
        context.decode(&batch(0)).unwrap();
        assert!(!context.is_finite(0).unwrap());
    };
    spoil(&mut context);
    context.kv_cache_mut().remove(0, ..).unwrap();
    let error = context.decode_finite(&batch(1)).unwrap_err();
    assert!(matches!(error, Error::NotFinite { token: 3 }), "{error}");
    assert_eq!(context.kv_cache().cells().used(), 0);
    context.scrub_free_cells().unwrap();
    context.decode_finite(&batch(1)).unwrap();
    assert!(context.is_finite(1).unwrap());

    context.kv_cache_mut().remove(1, ..).unwrap();
    spoil(&mut context);
    context.scrub(0).unwrap();
    context.decode_finite(&batch(1)).unwrap();
}

#[test]
fn non_finite_texts_are_not_written_to_disk() {
    let setup = Setup::new("llama", cpu());
    let folder = tempfile::tempdir().unwrap();
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    let mut engine = setup.engine();
    engine.cache_on_disk(folder.path(), u64::MAX).unwrap();
    for count in [0, 9] {
        let failing = setup.failing(request(20..180, count), f32::NAN);
        let _failing = submit(&mut engine, failing);
        run(&mut engine);
        assert_eq!(files(), 0, "{count}");
    }
    let _reader = submit(&mut engine, request(20..180, 9));
    run(&mut engine);
    assert_eq!(files(), 1);
}

/// Uses the largest numbers that a request may have for its sampler.
#[test]
fn extreme_sampler_parameters_do_not_affect_other_requests() {
    let greedy = SamplerParams::greedy;
    let extremes = [
        SamplerParams {
            logit_bias: vec![(7, 1e38), (8, f32::MAX), (9, -1e38)],
            ..greedy()
        },
        SamplerParams {
            temperature: f32::MIN_POSITIVE,
            ..SamplerParams::default()
        },
        SamplerParams {
            temperature: f32::MAX,
            ..SamplerParams::default()
        },
        SamplerParams {
            repeat_penalty: f32::MAX,
            ..greedy()
        },
        SamplerParams {
            frequency_penalty: f32::MAX,
            presence_penalty: f32::MIN,
            ..greedy()
        },
        SamplerParams {
            dry_multiplier: f32::MAX,
            dry_base: f32::MAX,
            dry_allowed_length: 1,
            ..greedy()
        },
    ];
    let setup = Setup::new("llama", cpu());
    let expected = neighbours().map(|request| setup.alone(request));
    for sampling in extremes {
        println!("{sampling:?}");
        let mut engine = setup.engine();
        let extreme = Request {
            sampling,
            ..request([20, 21, 20, 21, 20, 21], 9)
        };
        let _extreme = submit(&mut engine, extreme);
        let mut readers = neighbours().map(|request| submit(&mut engine, request));
        run(&mut engine);
        for (reader, expected) in readers.iter_mut().zip(&expected) {
            assert_eq!(&ids(reader), expected);
        }
    }
}
