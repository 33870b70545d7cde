//! With [`EngineOptions::deterministic`], a request gets the same numbers regardless of other
//! requests, on a device whose sums depend on the contents of a batch.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use samite_core::{DType, Environment};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{Context, ContextOptions, Model, ModelOptions, SyntheticModel};
use samite_requests::{Engine, EngineOptions, Event, ProbabilityKind, Reader, Request};
use samite_testing::{Rng, ticking};
use samite_text::SamplerParams;
use std::sync::Arc;
use std::time::Duration;

fn model(architecture: &'static str) -> Arc<Model> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    SyntheticModel {
        n_layer: 2,
        n_embd: 64,
        n_head: 2,
        n_head_kv: 1,
        head_dim: 32,
        n_ff: 96,
        n_vocab: 264,
        dtype: DType::F16,
        ..SyntheticModel::tiny(architecture)
    }
    .write(&path)
    .unwrap();
    let device = CpuDevice::new(CpuOptions::default().with_threads(2));
    Model::load(&path, &ModelOptions::new(vec![device])).unwrap()
}

fn engine(model: &Arc<Model>, deterministic: bool) -> Engine {
    let options = EngineOptions {
        slots: 4,
        budget: 48,
        deterministic,
        ..EngineOptions::default()
    };
    let context = ContextOptions {
        n_ctx: Some(1024),
        n_batch: 48,
        n_ubatch: 48,
        n_seq: options.n_seq(),
        n_logits: Some(8),
        environment: Environment {
            // Slow readers soon yield their slot.
            clock: ticking(Duration::from_millis(100)),
            ..Environment::system()
        },
        ..ContextOptions::default()
    };
    Engine::new(Context::new(Arc::clone(model), context).unwrap(), options).unwrap()
}

/// Creates a prompt with a prefix in common with others.
fn request(rng: &mut Rng) -> Request {
    let shared = (0..40 + rng.below(40) as u32).map(|i| 3 + i * 31 % 256);
    let mut prompt: Vec<u32> = shared.collect();
    prompt.extend((0..1 + rng.below(40)).map(|_| 3 + rng.below(256) as u32));
    Request {
        max_tokens: Some(12 + rng.below(12)),
        sampling: SamplerParams {
            seed: rng.below(1000) as u64,
            temperature: 1.0,
            ..SamplerParams::default()
        },
        ignore_end: true,
        probabilities: Some(ProbabilityKind::Model(2)),
        event_queue: 2,
        ..Request::new(prompt)
    }
}

/// Tokens, and all bits of their probabilities.
type Bits = Vec<(u32, u32, Vec<u32>)>;

/// Reads the available events, and returns whether the request has ended.
fn read(reader: &mut Reader, bits: &mut Bits) -> bool {
    loop {
        match reader.try_next() {
            None => return false,
            Some(Event::Token(token)) => {
                let told = token.probabilities.unwrap();
                let top = told.top.iter().map(|(_, p)| p.to_bits());
                bits.push((token.id, told.token.to_bits(), top.collect()));
            }
            Some(Event::Finished(_)) => return true,
            Some(Event::Failed(failed)) => panic!("{failed:?}"),
            Some(_) => {}
        }
    }
}

/// Returns the results of requests that arrive at random times, with some slow readers, and the
/// number of preemptions.
fn together(engine: &mut Engine, requests: &[Request], rng: &mut Rng) -> (Vec<Bits>, u64) {
    let mut readers = Vec::new();
    let mut answers = vec![Bits::new(); requests.len()];
    let mut over = vec![false; requests.len()];
    for _ in 0..20_000 {
        if let Some(request) = requests.get(readers.len())
            && rng.one_in(4)
        {
            let (_, reader) = engine.submit(request.clone(), Arc::new(|| {})).unwrap();
            readers.push(reader);
        }
        engine.step();
        for (i, reader) in readers.iter_mut().enumerate() {
            // Every third reader reads seldom.
            if !over[i] && rng.one_in(if i % 3 == 0 { 30 } else { 2 }) {
                over[i] = read(reader, &mut answers[i]);
            }
        }
        if over.iter().all(|&is_over| is_over) {
            return (answers, engine.view().totals.preempted);
        }
    }
    panic!("it never ends");
}

#[test]
fn logits_do_not_depend_on_other_requests() {
    for (seed, architecture) in ["llama", "gemma3", "lfm2"].into_iter().enumerate() {
        let model = model(architecture);
        let mut rng = Rng::new(seed as u64);
        let requests: Vec<Request> = (0..8).map(|_| request(&mut rng)).collect();
        let alone: Vec<Bits> = requests
            .iter()
            .map(|request| {
                let mut engine = engine(&model, true);
                let (answers, _) = together(&mut engine, std::slice::from_ref(request), &mut rng);
                answers.concat()
            })
            .collect();
        for _ in 0..2 {
            let mut engine = engine(&model, true);
            let (answers, preempted) = together(&mut engine, &requests, &mut rng);
            assert!(preempted > 0, "{architecture}: nobody made room");
            for (i, (answer, alone)) in answers.iter().zip(&alone).enumerate() {
                assert_eq!(answer, alone, "{architecture}, request {i}");
            }
        }
        // Without the option, numbers differ, so the test would notice a failure.
        let mut engine = engine(&model, false);
        let (answers, _) = together(&mut engine, &requests, &mut rng);
        assert_ne!(answers, alone, "{architecture}");
    }
}
