//! Random schedules of requests: regardless of other requests, each request gets the tokens that it
//! gets alone, and nothing remains at the end.
//!
//! `SAMITE_SCHEDULES` is the number of seeds, and `SAMITE_SCHEDULE` selects a single one. A failure
//! names its seed.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use samite_core::{DType, Environment};
use samite_llm::{
    Adapter, Context, ContextOptions, Model, ModelOptions, ScaledAdapter, SyntheticAdapter,
    SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_requests::{
    CacheOptions, Drafter, Engine, EngineOptions, Event, FailureKind, Finish, Reader, Request,
    Totals,
};
use samite_testing::{Rng, ticking};
use samite_text::SamplerParams;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Attention alone, layers with a window, and states combined with attention.
const ARCHITECTURES: [&str; 3] = ["llama", "gemma3", "lfm2"];

/// A model and two adapters for it.
type Loaded = (Arc<Model>, [Arc<Adapter>; 2]);

fn loaded(architecture: usize) -> &'static Loaded {
    static MODELS: [OnceLock<Loaded>; 3] = [const { OnceLock::new() }; 3];
    MODELS[architecture].get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        SyntheticModel {
            n_layer: 2,
            n_embd: 32,
            n_head: 2,
            n_head_kv: 1,
            head_dim: 16,
            n_ff: 32,
            n_vocab: 264,
            ..SyntheticModel::tiny(ARCHITECTURES[architecture])
        }
        .write(&path)
        .unwrap();
        let device = ReferenceDevice::new(ReferenceOptions::named("alone"));
        let model = Model::load(&path, &ModelOptions::new(vec![device])).unwrap();
        let adapters = [2, 3].map(|rank| {
            let adapter_path = folder.path().join(format!("{rank}.gguf"));
            let synthetic = SyntheticAdapter { rank, alpha: 4.0 };
            let mut rng = Rng::new(rank as u64);
            let next = || rng.below(1000) as f32 / 1000.0 - 0.5;
            synthetic
                .write(&path, &adapter_path, |_| true, next)
                .unwrap();
            Adapter::load(&adapter_path, &model).unwrap()
        });
        (model, adapters)
    })
}

/// Returns a model that drafts for the first one: itself, or another one whose guesses are mostly
/// wrong.
fn draft_model(number: usize) -> Arc<Model> {
    static OTHER: OnceLock<Arc<Model>> = OnceLock::new();
    let other = || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("draft.gguf");
        SyntheticModel {
            n_layer: 1,
            n_embd: 16,
            n_head: 1,
            n_head_kv: 1,
            head_dim: 16,
            n_ff: 16,
            n_vocab: 264,
            ..SyntheticModel::tiny("llama")
        }
        .write(&path)
        .unwrap();
        let device = ReferenceDevice::new(ReferenceOptions::named("draft"));
        Model::load(&path, &ModelOptions::new(vec![device])).unwrap()
    };
    match number {
        0 => Arc::clone(&loaded(0).0),
        _ => Arc::clone(OTHER.get_or_init(other)),
    }
}

fn engine(model: &Arc<Model>, n_ctx: usize, options: EngineOptions) -> Engine {
    let context = ContextOptions {
        n_ctx: Some(n_ctx),
        n_batch: 32,
        n_ubatch: 16,
        n_seq: options.n_seq(),
        n_logits: Some(8),
        kv_types: [DType::F32; 2],
        environment: Environment {
            clock: ticking(Duration::from_millis(1)),
            ..Environment::system()
        },
        ..ContextOptions::default()
    };
    Engine::new(Context::new(Arc::clone(model), context).unwrap(), options).unwrap()
}

/// Returns a folder for the texts of an architecture's model.
fn folder(architecture: usize) -> &'static Path {
    static FOLDERS: [OnceLock<tempfile::TempDir>; 3] = [const { OnceLock::new() }; 3];
    FOLDERS[architecture]
        .get_or_init(|| tempfile::tempdir().unwrap())
        .path()
}

const CONTEXT: usize = 96;

/// Returns the result of a request without other requests and with an empty cache.
fn alone(model: &Arc<Model>, request: &Request) -> (Vec<u32>, Finish) {
    let options = EngineOptions {
        slots: 1,
        kept: 1,
        context: Some(CONTEXT),
        ..EngineOptions::default()
    };
    let mut engine = engine(model, CONTEXT, options);
    let (_, reader) = engine.submit(request.clone(), Arc::new(|| {})).unwrap();
    let mut answer = Answer::new(reader);
    while answer.end.is_none() {
        engine.step();
        answer.read(usize::MAX);
    }
    match answer.end {
        Some(Ok(reason)) => (answer.tokens, reason),
        other => panic!("{other:?}"),
    }
}

struct Answer {
    reader: Option<Reader>,
    tokens: Vec<u32>,
    cached: usize,
    end: Option<Result<Finish, FailureKind>>,
}

impl Answer {
    fn new(reader: Reader) -> Self {
        Answer {
            reader: Some(reader),
            tokens: Vec::new(),
            cached: 0,
            end: None,
        }
    }

    fn read(&mut self, most: usize) {
        for _ in 0..most {
            let Some(event) = self.reader.as_mut().and_then(Reader::try_next) else {
                return;
            };
            assert!(self.end.is_none(), "{event:?} after the end");
            match event {
                Event::Started(started) => self.cached = started.cached,
                Event::Progress(_) | Event::PromptLogprobs(_) => {}
                Event::Token(token) => self.tokens.push(token.id),
                Event::Finished(finished) => {
                    assert_eq!(finished.counts.generated, self.tokens.len());
                    self.end = Some(Ok(finished.reason));
                }
                Event::Failed(failed) => self.end = Some(Err(failed.kind)),
            }
        }
    }
}

/// Creates prompts with common prefixes.
fn prompt(rng: &mut Rng) -> Vec<u32> {
    let base = rng.below(3) as u32;
    let shared = rng.below(75);
    let own = 1 + rng.below(20);
    let mut tokens: Vec<u32> = (0..shared as u32)
        .map(|i| 3 + (i * 31 + base * 7) % 256)
        .collect();
    tokens.extend((0..own).map(|_| 3 + rng.below(256) as u32));
    tokens
}

fn request(rng: &mut Rng, adapters: &[Arc<Adapter>; 2]) -> Request {
    Request {
        adapters: match rng.below(8) {
            0 => Some(Vec::new()),
            number @ 1..4 => {
                let used = (0..2).filter(|place| number >> place & 1 == 1);
                let used = used.map(|place| ScaledAdapter {
                    adapter: Arc::clone(&adapters[place]),
                    share: rng.pick(&[1.0, -0.5]),
                });
                Some(used.collect())
            }
            _ => None,
        },
        max_tokens: match rng.below(5) {
            0 => None,
            1 => Some(0),
            _ => Some(1 + rng.below(24)),
        },
        sampling: SamplerParams {
            seed: rng.below(4) as u64,
            temperature: if rng.one_in(2) { 0.0 } else { 1.0 },
            repeat_penalty: if rng.one_in(4) { 1.3 } else { 1.0 },
            ..SamplerParams::default()
        },
        ignore_end: rng.one_in(2),
        stop: if rng.one_in(4) {
            vec!["e".to_owned()]
        } else {
            Vec::new()
        },
        cache: CacheOptions {
            reuse: !rng.one_in(6),
            keep: !rng.one_in(6),
            hold: false,
            salt: u64::from(rng.one_in(8)) * 7,
        },
        priority: rng.below(6) as i32 / 5,
        event_queue: 1 + rng.below(6),
        owner: rng.below(3) as u64,
        ..Request::new(prompt(rng))
    }
}

/// Returns the adapters of a request, by the ranks of their files, with their scales.
fn shares(request: &Request) -> Option<Vec<(String, f32)>> {
    let named =
        |scaled: &ScaledAdapter| (scaled.adapter.path().display().to_string(), scaled.share);
    request
        .adapters
        .as_ref()
        .map(|adapters| adapters.iter().map(named).collect())
}

/// Runs one schedule. Returns the number of tokens from the cache, the number of tokens from a
/// draft model, and the engine's totals.
fn schedule(seed: u64) -> (usize, u64, Totals, usize) {
    let mut rng = Rng::new(seed);
    let (model, adapters) = loaded((seed % 3) as usize);
    let options = EngineOptions {
        slots: 1 + rng.below(4),
        context: Some(CONTEXT),
        kept: 1 + rng.below(5),
        queue: 64,
        budget: 1 + rng.below(32),
        swap_bytes: [0, 20_000, usize::MAX][rng.below(3)],
        draft: [0, 3, 16][rng.below(3)],
        deterministic: false,
    };
    // From room for a single text to plenty.
    let n_ctx = CONTEXT + rng.below(4) * 64;
    let mut engine = engine(model, n_ctx, options.clone());
    if seed.is_multiple_of(3) && options.draft > 0 && !rng.one_in(3) {
        let draft = draft_model(rng.below(2));
        let context = ContextOptions {
            n_ctx: Some(n_ctx + 64),
            n_batch: 32,
            n_seq: options.n_seq(),
            kv_types: [DType::F32; 2],
            environment: Environment {
                clock: ticking(Duration::from_micros(1)),
                ..Environment::system()
            },
            ..ContextOptions::default()
        };
        let context = Context::new(draft, context).unwrap();
        let least = rng.pick(&[0.0, 0.5]);
        let drafter = Drafter::new(context, model, least).unwrap();
        engine.set_drafter(drafter).unwrap();
    }
    // Some schedules use a folder with the texts of earlier schedules.
    if rng.one_in(2) {
        let bytes = [60_000, u64::MAX][rng.below(2)];
        engine
            .cache_on_disk(folder((seed % 3) as usize), bytes)
            .unwrap();
    }
    let mut waiting: Vec<Request> = (0..3 + rng.below(8))
        .map(|_| request(&mut rng, adapters))
        .collect();
    let mut answers: Vec<(u64, Request, Answer, bool)> = Vec::new();
    let (mut steps, mut swapped) = (0, 0);
    loop {
        if !waiting.is_empty() && rng.one_in(3) {
            let request = waiting.remove(0);
            let (id, reader) = engine.submit(request.clone(), Arc::new(|| {})).unwrap();
            answers.push((id, request, Answer::new(reader), false));
        }
        engine.step();
        let bytes = engine.view().swapped_bytes;
        assert!(bytes <= options.swap_bytes, "seed {seed}");
        swapped = swapped.max(bytes);
        for (id, _, answer, is_cancelled) in &mut answers {
            if answer.end.is_none() && rng.one_in(60) {
                *is_cancelled = true;
                if rng.one_in(2) {
                    engine.cancel(*id)
                } else {
                    answer.reader = None
                }
            }
            // Some readers are slow.
            if rng.one_in(2) {
                answer.read(1 + rng.below(8));
            }
        }
        let is_over = |answer: &Answer| answer.end.is_some() || answer.reader.is_none();
        let all_over = answers.iter().all(|(_, _, answer, _)| is_over(answer));
        if waiting.is_empty() && all_over && engine.is_quiet() {
            break;
        }
        steps += 1;
        assert!(steps < 20_000, "seed {seed}: it never ends");
    }
    let mut known: BTreeMap<String, (Vec<u32>, Finish)> = BTreeMap::new();
    let mut cached = 0;
    for (id, request, answer, is_cancelled) in &answers {
        let name = format!(
            "{:?}",
            (
                &request.prompt,
                &request.sampling,
                request.max_tokens,
                &request.stop,
                request.ignore_end,
                shares(request),
            )
        );
        let (tokens, reason) = known.entry(name).or_insert_with(|| alone(model, request));
        cached += answer.cached;
        match answer.end {
            Some(Ok(found)) => {
                assert_eq!(
                    (&answer.tokens, found),
                    (&*tokens, *reason),
                    "seed {seed}, request {id}"
                );
            }
            _ => {
                assert!(is_cancelled, "seed {seed}, request {id}: {:?}", answer.end);
                assert!(
                    tokens.starts_with(&answer.tokens),
                    "seed {seed}, request {id}"
                );
            }
        }
    }
    let view = engine.view();
    assert!(
        view.slots.iter().all(|slot| slot.request.is_none()),
        "seed {seed}"
    );
    assert!(view.kept <= options.kept, "seed {seed}");
    assert_eq!(view.swapped_bytes, 0, "seed {seed}");
    engine.clear_prefix_cache();
    assert_eq!(engine.view().used_cells, 0, "seed {seed}: cells are left");
    for sequence in 0..options.n_seq() {
        assert_eq!(
            engine.context().kv_cache().cells().last_position(sequence),
            None,
            "seed {seed}"
        );
    }
    let by_model = engine.drafter().map_or(0, Drafter::drafted);
    (cached, by_model, view.totals, swapped)
}

#[test]
fn tokens_do_not_depend_on_other_requests() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    if let Some(seed) = number("SAMITE_SCHEDULE") {
        schedule(seed);
        return;
    }
    let seeds = number("SAMITE_SCHEDULES").unwrap_or(90);
    let (mut cached, mut by_models, mut preempted) = ([0; 3], 0, 0);
    let (mut stood, mut fell, mut most_swapped) = (0, 0, 0);
    for seed in 0..seeds {
        let (found, by_model, totals, swapped) = schedule(seed);
        most_swapped = most_swapped.max(swapped);
        by_models += by_model;
        cached[(seed % 3) as usize] += found;
        preempted += totals.preempted;
        stood += totals.accepted_tokens;
        fell += totals.drafted_tokens - totals.accepted_tokens;
    }
    // Check that the schedules exercise what they are meant to.
    assert!(cached.iter().all(|&count| count > 100), "{cached:?}");
    assert!(preempted > 5, "{preempted}");
    assert!(most_swapped > 20_000, "{most_swapped}");
    assert!(by_models > 100, "{by_models}");
    assert!(
        stood > 20 && fell > 20,
        "drafted tokens: {stood} stood, {fell} fell"
    );
}
