//! The guarantees of an engine, one per test.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{events, request, run, submit};
use samite_core::environment::Clock;
use samite_core::{DType, Device, DeviceWrapper, Environment, Selection, WrappedDevice};
use samite_llm::{
    Adapter, Batch, Context, ContextOptions, Model, ModelOptions, ScaledAdapter, SyntheticAdapter,
    SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_requests::{
    BlockEvent, CacheMiss, CacheOptions, Drafter, Engine, EngineOptions, Event, FailureKind,
    Finish, Finished, MissCause, Probabilities, ProbabilityKind, Reader, Refusal, Request, Shift,
    Started, Step, drive, drive_sleeping,
};
use samite_testing::wait_until;
use samite_text::{LogProbabilities, SamplerParams};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

fn synthetic() -> SyntheticModel {
    SyntheticModel {
        n_layer: 1,
        n_embd: 32,
        n_head: 2,
        n_head_kv: 1,
        head_dim: 16,
        n_ff: 32,
        n_vocab: 264,
        ..SyntheticModel::tiny("llama")
    }
}

fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        synthetic().write(&path).unwrap();
        let device = ReferenceDevice::new(ReferenceOptions::named("alone"));
        Model::load(&path, &ModelOptions::new(vec![device])).unwrap()
    })
}

/// A clock that the test advances.
#[derive(Debug)]
struct Hand(Mutex<Instant>);

impl Hand {
    fn new() -> Arc<Self> {
        Arc::new(Hand(Mutex::new(Instant::now())))
    }
}

impl Clock for Hand {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }

    fn sleep(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

fn options(slots: usize) -> EngineOptions {
    EngineOptions {
        slots,
        context: Some(64),
        kept: 3,
        queue: 8,
        budget: 16,
        swap_bytes: usize::MAX,
        draft: 0,
        deterministic: false,
    }
}

fn engine_with(options: EngineOptions, clock: Arc<dyn Clock>) -> Engine {
    engine_of(model(), options, clock)
}

fn engine_of(model: &Arc<Model>, options: EngineOptions, clock: Arc<dyn Clock>) -> Engine {
    let context = ContextOptions {
        n_ctx: Some(64 * options.slots),
        n_batch: 16,
        n_seq: options.n_seq(),
        kv_types: [DType::F32; 2],
        environment: Environment {
            clock,
            ..Environment::system()
        },
        ..ContextOptions::default()
    };
    Engine::new(Context::new(Arc::clone(model), context).unwrap(), options).unwrap()
}

fn engine(slots: usize) -> Engine {
    engine_with(options(slots), Hand::new())
}

/// Answers a request. Returns the result of the cache search and the end of the text.
fn answer(engine: &mut Engine, request: Request) -> (Started, Finished) {
    let mut reader = submit(engine, request);
    run(engine);
    let events = events(&mut reader);
    match (events.first(), events.last()) {
        (Some(Event::Started(started)), Some(Event::Finished(finished))) => {
            (*started, finished.clone())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn cache_hits_and_miss_causes_are_reported() {
    let mut engine = engine(2);
    let miss = |at_token, cause| Some(CacheMiss { at_token, cause });
    let (started, _) = answer(&mut engine, request(10..30, 4));
    assert_eq!(
        (started.cached, started.miss),
        (0, miss(0, MissCause::Ends))
    );
    // The last token is computed again, because its logits are needed.
    let (started, finished) = answer(&mut engine, request(10..30, 4));
    assert_eq!((started.cached, started.miss), (19, None));
    assert_eq!((finished.counts.cached, finished.counts.prompt), (19, 20));
    let (started, _) = answer(&mut engine, request((10..25).chain(100..110), 4));
    assert_eq!(
        (started.cached, started.miss),
        (15, miss(15, MissCause::Differs))
    );
    let off = CacheOptions {
        reuse: false,
        ..CacheOptions::default()
    };
    let without = Request {
        cache: off,
        ..request(10..30, 4)
    };
    let (started, _) = answer(&mut engine, without);
    assert_eq!((started.cached, started.miss), (0, miss(0, MissCause::Off)));
    let salted = Request {
        cache: CacheOptions {
            salt: 1,
            ..CacheOptions::default()
        },
        ..request(10..30, 4)
    };
    assert_eq!(answer(&mut engine, salted).0.cached, 0);
    // Other texts evict it.
    for first in [40, 80, 120, 160] {
        answer(&mut engine, request(first..first + 20, 4));
    }
    let (started, _) = answer(&mut engine, request(10..30, 4));
    assert_eq!(
        (started.cached, started.miss),
        (0, miss(0, MissCause::Evicted))
    );
}

/// A device that selects the top-k instead of returning all logits.
struct Choosing(Arc<dyn Device>);

impl DeviceWrapper for Choosing {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }

    fn selection(&self) -> Selection {
        Selection::Wanted
    }
}

#[test]
fn selection_on_the_device_does_not_change_texts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    synthetic().write(&path).unwrap();
    let device = ReferenceDevice::new(ReferenceOptions::named("choosing"));
    let device = WrappedDevice::device(Choosing(device));
    let choosing = Model::load(&path, &ModelOptions::new(vec![device])).unwrap();
    let few = SamplerParams {
        top_k: 5,
        temperature: 1.5,
        seed: 3,
        ..SamplerParams::default()
    };
    let penalized = SamplerParams {
        repeat_penalty: 1.4,
        ..few.clone()
    };
    let sampled = |sampling: &SamplerParams, first: u32, count| Request {
        sampling: sampling.clone(),
        ..request(first..first + 9, count)
    };
    // The texts, and the numbers of steps in which the device did and did not select.
    let texts = |model: &Arc<Model>, draft: usize| {
        let options = EngineOptions {
            draft,
            ..options(3)
        };
        let mut engine = engine_of(model, options, Hand::new());
        let mut readers = [
            submit(&mut engine, request((10..19).chain(10..16), 20)),
            submit(&mut engine, sampled(&few, 30, 25)),
            submit(&mut engine, sampled(&penalized, 50, 6)),
        ];
        let (mut chosen, mut read) = (0, 0);
        for _ in 0..200 {
            if let Step::Idle(_) = engine.step() {
                break;
            }
            let context = engine.context();
            chosen += usize::from((0..16).any(|index| context.device_top_k(index).is_some()));
            read += usize::from((0..16).any(|index| context.logits(index).is_some()));
        }
        let tokens = readers.each_mut().map(|reader| -> Vec<u32> {
            let events = events(reader).into_iter();
            let tokens = events.filter_map(|event| match event {
                Event::Token(token) => Some(token.id),
                _ => None,
            });
            tokens.collect()
        });
        (tokens, chosen, read)
    };
    let (expected, chosen, read) = texts(model(), 0);
    assert_eq!(expected.each_ref().map(Vec::len), [20, 25, 6]);
    assert!(chosen == 0 && read >= 25, "{chosen} {read}");
    for draft in [0, 4] {
        let (found, chosen, read) = texts(&choosing, draft);
        assert_eq!(found, expected, "draft {draft}");
        // All logits are read while one request needs them.
        assert!(chosen >= 10 && (1..=9).contains(&read), "{chosen} {read}");
    }
}

/// Returns the log-probabilities of a prompt's tokens from the second one on, and of generated
/// tokens.
fn scores(events: &[Event]) -> Vec<Probabilities> {
    let scores = events.iter().flat_map(|event| match event {
        Event::PromptLogprobs(scores) => scores.clone(),
        Event::Token(token) => token.probabilities.iter().cloned().collect(),
        _ => Vec::new(),
    });
    scores.collect()
}

/// The expected log-probabilities come from contexts that compute a single text.
#[test]
fn prompt_probabilities_are_those_of_the_model() {
    let scored = |prompt: &[u32], count| Request {
        prompt_logprobs: Some(2),
        probabilities: Some(ProbabilityKind::Model(2)),
        ..request(prompt.iter().copied(), count)
    };
    let check = |prompt: &[u32], events: &[Event], count: usize| {
        let text: Vec<u32> = prompt.iter().copied().chain(ids(events)).collect();
        let found = scores(events);
        assert_eq!(text.len(), prompt.len() + count);
        assert_eq!(found.len(), text.len() - 1);
        let context = ContextOptions {
            n_ctx: Some(64),
            kv_types: [DType::F32; 2],
            ..ContextOptions::default()
        };
        let mut context = Context::new(Arc::clone(model()), context).unwrap();
        for (place, found) in found.iter().enumerate() {
            context
                .decode(&Batch::sequence(&text[place..=place], place as i32, 0))
                .unwrap();
            let logits = context.logits(0).unwrap();
            let wanted = LogProbabilities::new(logits, text[place + 1], 2).unwrap();
            assert!((found.token - wanted.token).abs() < 1e-4, "{place}");
            let ids = |top: &[(u32, f32)]| top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(ids(&found.top), ids(&wanted.top), "{place}");
        }
    };
    let mut engine = engine(3);
    let long: Vec<u32> = (0..40).map(|i| 3 + (i * 37) % 250).collect();
    // What is in the cache has no logits.
    let prompts = [&long[..], &long[..], &long[..20], &long[..1]];
    let _ = answer(&mut engine, request(long.iter().copied(), 1));
    let mut readers = prompts.map(|prompt| submit(&mut engine, scored(prompt, 3)));
    run(&mut engine);
    for (prompt, reader) in prompts.iter().zip(&mut readers) {
        check(prompt, &events(reader), 3);
    }
    // Also without a generated token.
    let mut reader = submit(&mut engine, scored(&long, 0));
    run(&mut engine);
    check(&long, &events(&mut reader), 0);

    // A request that is preempted and computed again sends each once.
    let own = |owner, request| Request { owner, ..request };
    let mut engine = engine_with(
        EngineOptions {
            swap_bytes: 0,
            ..options(2)
        },
        Hand::new(),
    );
    let mut readers = [0, 1].map(|_| submit(&mut engine, own(1, scored(&long, 3))));
    engine.step();
    let mut other = submit(&mut engine, own(2, scored(&long[..20], 3)));
    run(&mut engine);
    let mut preempted = 0;
    for reader in &mut readers {
        let events = events(reader);
        if let Some(Event::Finished(finished)) = events.last() {
            preempted += finished.counts.preempted;
        }
        check(&long, &events, 3);
    }
    assert_eq!(preempted, 1);
    check(&long[..20], &events(&mut other), 3);
}

#[test]
fn common_prompt_prefixes_are_computed_once() {
    let mut engine = engine(3);
    let prompt = || (10..50).chain([7]);
    let mut readers: Vec<Reader> = (0..3)
        .map(|_| submit(&mut engine, request(prompt(), 3)))
        .collect();
    run(&mut engine);
    let all: Vec<Vec<Event>> = readers.iter_mut().map(events).collect();
    let tokens = |events: &Vec<Event>| -> Vec<u32> {
        let tokens = events.iter().filter_map(|event| match event {
            Event::Token(token) => Some(token.id),
            _ => None,
        });
        tokens.collect()
    };
    assert_eq!(tokens(&all[0]).len(), 3);
    assert!(all.iter().all(|events| tokens(events) == tokens(&all[0])));
    // The whole prompt once, and its last token for each of the other requests.
    assert_eq!(engine.view().totals.prompt_tokens, 41 + 2);
}

#[test]
fn a_long_prefill_does_not_block_decoding_requests() {
    let mut engine = engine(2);
    let mut first = submit(&mut engine, request(10..12, 30));
    engine.step();
    let _second = submit(&mut engine, request((0..60).map(|i| 20 + i), 1));
    for _ in 0..4 {
        events(&mut first);
        engine.step();
        let tokens = events(&mut first).into_iter();
        assert_eq!(
            tokens
                .filter(|event| matches!(event, Event::Token(_)))
                .count(),
            1
        );
    }
}

#[test]
fn slow_readers_are_paused_alone_and_lose_their_slot() {
    let clock = Hand::new();
    let mut engine = engine_with(options(1), clock.clone());
    let slow = Request {
        event_queue: 4,
        ..request(10..20, 20)
    };
    let alone = {
        let mut other = engine_with(options(1), Hand::new());
        let mut reader = submit(&mut other, request(10..20, 20));
        run(&mut other);
        events(&mut reader)
    };
    let mut slow = submit(&mut engine, slow);
    run(&mut engine);
    assert!(engine.view().slots[0].is_paused);
    let mut quick = submit(&mut engine, request(30..40, 2));
    assert!(matches!(engine.step(), Step::Idle(Some(_))));
    assert_eq!(events(&mut quick), []);
    clock.sleep(Duration::from_secs(2));
    run(&mut engine);
    assert!(events(&mut quick).last().unwrap().is_end());
    assert_eq!(engine.view().totals.preempted, 1);
    // It continues where it was, as if nothing had happened.
    let mut all = Vec::new();
    for _ in 0..100 {
        all.extend(events(&mut slow));
        engine.step();
    }
    let tokens = |events: &[Event]| {
        events
            .iter()
            .filter(|e| matches!(e, Event::Token(_)))
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!(tokens(&all), tokens(&alone));
}

#[test]
fn cached_prefixes_are_evicted_to_free_whole_blocks() {
    // Four blocks of 64 cells, and room for more texts than that.
    let options = EngineOptions {
        kept: 8,
        ..options(4)
    };
    let mut engine = engine_with(options, Hand::new());
    for text in 0..4 {
        answer(&mut engine, request((0..40).map(|i| 5 * i + text), 1));
    }
    assert_eq!((engine.view().kept, engine.view().used_cells), (4, 160));
    // A text continues in its own block.
    answer(&mut engine, request((0..45).map(|i| 5 * i + 3), 1));
    assert_eq!((engine.view().kept, engine.view().used_cells), (4, 165));
    // Two requests start together. There are 91 free cells but no free block: the most recently
    // used texts stay.
    let mut readers =
        [4, 5].map(|text| submit(&mut engine, request((0..20).map(|i| 5 * i + text), 1)));
    run(&mut engine);
    readers
        .iter_mut()
        .for_each(|reader| assert!(events(reader).len() > 1));
    assert_eq!(engine.view().totals.evicted, 2);
    assert_eq!(
        (engine.view().kept, engine.view().used_cells),
        (4, 40 + 45 + 20 + 20)
    );
    let (started, _) = answer(&mut engine, request((0..45).map(|i| 5 * i + 3), 1));
    assert_eq!(started.cached, 44);
}

#[test]
fn slow_readers_lose_memory_that_others_need() {
    let clock = Hand::new();
    let mut engine = {
        let options = options(2);
        let context = ContextOptions {
            n_ctx: Some(64),
            n_batch: 16,
            n_seq: options.n_seq(),
            environment: Environment {
                clock: Arc::clone(&clock) as Arc<dyn Clock>,
                ..Environment::system()
            },
            ..ContextOptions::default()
        };
        Engine::new(Context::new(Arc::clone(model()), context).unwrap(), options).unwrap()
    };
    let stalled = Request {
        event_queue: 2,
        ..request(10..50, 20)
    };
    let _stalled = submit(&mut engine, stalled);
    run(&mut engine);
    // A slot is free, but not enough cells are.
    let mut readers = [100, 150].map(|first| submit(&mut engine, request(first..first + 40, 2)));
    run(&mut engine);
    assert!(readers.iter_mut().all(|reader| reader.try_next().is_none()));
    clock.sleep(Duration::from_secs(2));
    run(&mut engine);
    assert!(
        readers
            .iter_mut()
            .all(|reader| events(reader).last().unwrap().is_end())
    );
}

#[test]
fn deadlines_end_requests_in_any_state() {
    let clock = Hand::new();
    let mut engine = engine_with(options(1), clock.clone());
    let timed = |request| Request {
        deadline: Some(Duration::from_secs(5)),
        ..request
    };
    let mut generated = submit(&mut engine, timed(request(10..12, 50)));
    let mut waiting = submit(&mut engine, timed(request(10..12, 50)));
    for _ in 0..3 {
        engine.step();
    }
    clock.sleep(Duration::from_secs(5));
    engine.step();
    for reader in [&mut generated, &mut waiting] {
        match events(reader).last() {
            Some(Event::Finished(finished)) => assert_eq!(finished.reason, Finish::Deadline),
            other => panic!("{other:?}"),
        }
    }
    assert!(engine.is_quiet());
}

#[test]
fn a_full_context_ends_or_shifts_the_request() {
    let mut engine = engine(1);
    let endless = Request {
        max_tokens: None,
        ..request(10..30, 0)
    };
    let (_, finished) = answer(&mut engine, endless.clone());
    assert_eq!(finished.reason, Finish::ContextFull);
    assert_eq!(finished.counts.generated, 64 - 20);
    let shifted = Request {
        max_tokens: Some(100),
        when_full: Some(Shift {
            keep: 4,
            discard: None,
        }),
        ..endless
    };
    let (_, finished) = answer(&mut engine, shifted);
    assert_eq!(finished.reason, Finish::MaxTokens);
    assert!(finished.counts.truncated && finished.counts.generated == 100);
}

#[test]
fn shifting_a_shared_text_does_not_change_its_result() {
    let shifted = Request {
        when_full: Some(Shift {
            keep: 4,
            discard: Some(5),
        }),
        ..request(10..50, 60)
    };
    let text = |engine: &mut Engine, others: usize| {
        let mut others: Vec<Reader> = (0..others)
            .map(|_| submit(engine, request(10..50, 24)))
            .collect();
        let mut reader = submit(engine, shifted.clone());
        run(engine);
        for other in &mut others {
            assert_eq!(ids(&events(other)).len(), 24);
        }
        ids(&events(&mut reader))
    };
    let alone = text(&mut engine(1), 0);
    assert_eq!(alone.len(), 60);
    let mut engine = engine(4);
    // With other active requests, and then with the texts that they left.
    assert_eq!(text(&mut engine, 2), alone);
    assert_eq!(text(&mut engine, 0), alone);
    assert!(engine.view().kept > 0);
}

#[test]
fn penalties_count_prompt_and_generated_tokens() {
    let mut engine = engine(1);
    let mut fresh = request(10..20, 30);
    fresh.sampling.presence_penalty = 1e6;
    fresh.sampling.last_n = 1000;
    let mut reader = submit(&mut engine, fresh);
    run(&mut engine);
    let mut seen: Vec<u32> = (10..20).collect();
    for event in events(&mut reader) {
        if let Event::Token(token) = event {
            assert!(!seen.contains(&token.id), "{} came again", token.id);
            seen.push(token.id);
        }
    }
    assert_eq!(seen.len(), 40);
}

#[test]
fn invalid_requests_are_refused_immediately() {
    let mut engine = engine(1);
    let mut refused = |request| engine.submit(request, Arc::new(|| {})).unwrap_err();
    let invalid = |refusal: Refusal, wanted: &str| match refusal {
        Refusal::Invalid { field, .. } => assert_eq!(field, wanted),
        other => panic!("{other:?}"),
    };
    invalid(refused(request([], 1)), "prompt");
    invalid(refused(request([1, 9999], 1)), "prompt");
    let mut hot = request([1], 1);
    hot.sampling.temperature = f32::NAN;
    invalid(refused(hot), "sampling");
    let mut biased = request([1], 1);
    biased.sampling.logit_bias.push((9999, 1.0));
    invalid(refused(biased), "logit_bias");
    let slotted = Request {
        slot: Some(1),
        ..request([1], 1)
    };
    invalid(refused(slotted), "slot");
    let long = refused(request((0..64).map(|i| i + 3), 1));
    assert_eq!(
        long,
        Refusal::TooLong {
            prompt: 64,
            context: 64
        }
    );
    let readers: Vec<_> = (0..8)
        .map(|_| submit(&mut engine, request([5], 1)))
        .collect();
    let full = engine.submit(request([5], 1), Arc::new(|| {}));
    assert_eq!(full.unwrap_err(), Refusal::QueueFull(8));
    drop(readers);
    run(&mut engine);
    engine.close();
    assert_eq!(
        engine.submit(request([5], 1), Arc::new(|| {})).unwrap_err(),
        Refusal::Closing
    );
}

/// Creates a request of an owner.
fn owned(owner: u64) -> Request {
    Request {
        owner,
        ..request([5, 6, 7], 2)
    }
}

#[test]
fn a_full_queue_of_one_owner_does_not_block_others() {
    let mut engine = engine(2);
    let mut readers = Vec::new();
    for _ in 0..8 {
        readers.push(submit(&mut engine, owned(1)));
    }
    let full = engine.submit(owned(1), Arc::new(|| {})).unwrap_err();
    assert_eq!(full, Refusal::QueueFull(8));
    readers.push(submit(&mut engine, owned(2)));
    assert_eq!(engine.view().queued, BTreeMap::from([(1, 8), (2, 1)]));
    run(&mut engine);
    for reader in &mut readers {
        assert!(matches!(events(reader).last(), Some(Event::Finished(_))));
    }
}

#[test]
fn owners_take_turns_with_slots() {
    let mut engine = engine(2);
    let mut order = Vec::new();
    let mut readers: Vec<_> = [1, 1, 1, 1, 1, 2, 3]
        .map(|owner| (owner, submit(&mut engine, owned(owner))))
        .into();
    // A request with a higher priority comes before all others.
    let urgent = Request {
        priority: 1,
        ..owned(1)
    };
    readers.push((10, submit(&mut engine, urgent)));
    while !readers.is_empty() {
        engine.step();
        readers.retain_mut(|(owner, reader)| {
            let has_started = matches!(reader.try_next(), Some(Event::Started(_)));
            if has_started {
                order.push(*owner);
            }
            !has_started
        });
    }
    // The first two start together: while the urgent request is active, its owner already has a
    // slot.
    assert_eq!(order, [2, 10, 1, 3, 1, 1, 1, 1]);
}

#[test]
fn an_owner_with_all_slots_is_preempted_for_another() {
    let mut engine = engine(4);
    let long = |first: u32| Request {
        owner: 1,
        ..request(first..first + 8, 40)
    };
    let alone: Vec<_> = (0..4)
        .map(|i| answer(&mut engine, long(10 + i)).1)
        .collect();
    let mut readers: Vec<_> = (0..4).map(|i| submit(&mut engine, long(10 + i))).collect();
    for _ in 0..4 {
        engine.step();
    }
    let owners = |engine: &Engine| {
        let slots = engine.view().slots;
        let mut owners: Vec<u64> = slots.iter().map(|slot| slot.owner).collect();
        owners.sort_unstable();
        owners
    };
    assert_eq!(owners(&engine), [1, 1, 1, 1]);
    let mut others: Vec<_> = (0..3).map(|_| submit(&mut engine, owned(2))).collect();
    engine.step();
    assert_eq!(owners(&engine), [1, 1, 2, 2]);
    assert_eq!(engine.view().totals.preempted, 2);
    run(&mut engine);
    for reader in &mut others {
        assert!(matches!(events(reader).last(), Some(Event::Finished(_))));
    }
    for (reader, alone) in readers.iter_mut().zip(alone) {
        match events(reader).last() {
            Some(Event::Finished(finished)) => {
                assert_eq!(finished.counts.generated, alone.counts.generated);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn slots_with_other_salts_are_invisible() {
    let mut engine = engine(2);
    let salted = |salt, prompt: std::ops::Range<u32>| Request {
        cache: CacheOptions {
            salt,
            ..CacheOptions::default()
        },
        ..request(prompt, 2)
    };
    // Another salt has the same text in the second slot.
    let pinned = Request {
        slot: Some(1),
        ..salted(1, 10..30)
    };
    answer(&mut engine, pinned);
    let (started, _) = answer(&mut engine, salted(2, 10..30));
    assert_eq!((started.slot, started.cached), (0, 0));
    let (started, _) = answer(&mut engine, salted(1, 10..30));
    assert_eq!((started.slot, started.cached), (1, 19));
    assert!(engine.save_slot(1, 2).unwrap().is_none());
    assert_eq!(engine.erase_slot(1, 2), 0);
    let saved = engine.save_slot(1, 1).unwrap().unwrap();
    assert_eq!(engine.restore_slot(1, 2, &saved).unwrap(), saved.len());
    assert_eq!(engine.erase_slot(1, 2), saved.len());
}

#[test]
fn slots_are_saved_and_restored() {
    let mut engine = engine(2);
    assert!(engine.save_slot(1, 0).unwrap().is_none());
    let slotted = |slot| Request {
        slot: Some(slot),
        ..request(10..30, 4)
    };
    answer(&mut engine, slotted(1));
    let saved = engine.save_slot(1, 0).unwrap().unwrap();
    assert_eq!(saved.tokens.len(), 23);
    assert_eq!(engine.erase_slot(1, 0), 23);
    assert_eq!(answer(&mut engine, slotted(1)).0.cached, 0);
    // A text that was left in another slot does not count.
    assert_eq!(answer(&mut engine, slotted(0)).0.cached, 0);
    engine.clear_prefix_cache();
    assert_eq!(engine.restore_slot(0, 0, &saved).unwrap(), 23);
    assert_eq!(answer(&mut engine, slotted(0)).0.cached, 19);
}

/// Checks that a prompt that one engine has computed is generated from on another one as on the
/// first, without being computed again.
fn check_moved_prefix(
    mut engines: [Engine; 2],
    prompt: std::ops::Range<u32>,
    adapters: &[(usize, f32)],
) {
    let asked = |prompt: std::ops::Range<u32>, most| {
        let request = Request {
            cache: CacheOptions {
                salt: 3,
                ..CacheOptions::default()
            },
            ..request(prompt, most)
        };
        if adapters.is_empty() {
            request
        } else {
            with_adapters(adapters, request)
        }
    };
    let text = |engine: &mut Engine, request| {
        let mut reader = submit(engine, request);
        run(engine);
        let events = events(&mut reader);
        let Event::Started(started) = &events[0] else {
            panic!("{events:?}");
        };
        (started.cached, ids(&events))
    };
    let [first, second] = &mut engines;
    let (_, own) = text(first, asked(prompt.clone(), 1));
    let tokens: Vec<u32> = prompt.clone().collect();
    let used = asked(prompt.clone(), 1).adapters;
    let save = |engine: &mut Engine, salt| {
        let saved = engine.save_prefix(&tokens, used.as_deref(), salt, |_| true);
        saved.unwrap()
    };
    assert_eq!(save(first, 4), None, "another owner");
    assert_eq!(save(second, 3), None, "nothing was computed");
    let mut size = 0;
    let refused = first.save_prefix(&tokens, used.as_deref(), 3, |bytes| {
        size = bytes;
        false
    });
    assert_eq!(refused.unwrap(), None);
    let saved = save(first, 3).unwrap();
    assert_eq!(size, saved.bytes());
    assert!(saved.len() < tokens.len() && saved.tokens == tokens[..saved.len()]);
    let restored = second.restore_prefix(used.as_deref(), 3, &saved);
    assert_eq!(restored.unwrap(), saved.len());
    let (cached, moved) = text(second, asked(prompt.clone(), 20));
    assert_eq!(cached, saved.len());
    assert_eq!(moved[0], own[0]);
    let (cached, expected) = text(first, asked(prompt, 20));
    assert_eq!(cached, saved.len());
    assert_eq!(moved, expected);
}

#[test]
fn prefixes_move_to_another_engine() {
    check_moved_prefix([engine(2), engine(2)], 10..40, &[]);
    check_moved_prefix([engine(2), engine(2)], 10..40, &[(0, 0.5), (1, 1.0)]);
    for architecture in ["mamba2", "qwen35", "gemma3"] {
        let engines = [(); 2].map(|()| of_architecture(architecture));
        check_moved_prefix(engines, 10..160, &[]);
    }
}

#[test]
fn the_engine_thread_answers_drains_and_ends() {
    let (handle, thread) = drive(engine(2)).unwrap();
    let mut readers: Vec<Reader> = (0..6)
        .map(|i| handle.submit(request(10..20 + i, 8)).unwrap())
        .collect();
    let cancelled = handle.submit(request(10..20, 40)).unwrap();
    drop(cancelled);
    handle.close();
    assert_eq!(
        handle.submit(request([5], 1)).unwrap_err(),
        Refusal::Closing
    );
    for reader in &mut readers {
        let last = std::iter::from_fn(|| reader.wait()).last().unwrap();
        assert!(matches!(last, Event::Finished(_)), "{last:?}");
    }
    thread.join().unwrap();
    assert!(handle.is_over());
    let (handle, thread) = drive(engine(1)).unwrap();
    let mut reader = handle.submit(request(10..20, 50)).unwrap();
    handle.end();
    let last = std::iter::from_fn(|| reader.wait()).last();
    let is_closing = |event| match event {
        Event::Failed(failed) => failed.kind == FailureKind::Closing,
        _ => false,
    };
    assert!(last.is_none_or(is_closing));
    thread.join().unwrap();
}

/// A client that has its answer reads counts that include it.
#[test]
fn finished_requests_are_counted_before_the_reader_sees_them() {
    let (handle, thread) = drive(engine(1)).unwrap();
    for i in 1..=200 {
        let mut reader = handle.submit(request([5, 6, 7], 1)).unwrap();
        let last = std::iter::from_fn(|| reader.wait()).last();
        let view = handle.view();
        assert!(matches!(last, Some(Event::Finished(_))), "{last:?}");
        assert_eq!(view.totals.finished, i);
        assert!(view.slots.iter().all(|slot| slot.request.is_none()));
    }
    handle.close();
    thread.join().unwrap();
}

#[test]
fn an_idle_engine_is_dropped_and_recreated() {
    // Long enough to see that it is awake in the end.
    let quiet = Duration::from_millis(500);
    let system = |slots| {
        let options = options(slots);
        let context = ContextOptions {
            n_ctx: Some(64),
            n_batch: 16,
            n_seq: options.n_seq(),
            ..ContextOptions::default()
        };
        Engine::new(Context::new(Arc::clone(model()), context).unwrap(), options)
    };
    let (handle, thread) = drive_sleeping(system(1).unwrap(), quiet, move || system(1)).unwrap();
    for round in 1..3 {
        let mut reader = handle.submit(request(10..20, 3)).unwrap();
        let last = std::iter::from_fn(|| reader.wait()).last().unwrap();
        assert!(matches!(last, Event::Finished(_)), "{last:?}");
        wait_until("the engine is dropped", || handle.view().is_sleeping);
        assert_eq!(handle.view().totals.finished, round);
    }
    handle.wake();
    assert!(!handle.view().is_sleeping);
    handle.end();
    thread.join().unwrap();
}

#[test]
fn unlimited_adapter_sets_stay_separate_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter.gguf");
    let model_path = folder.path().join("model.gguf");
    synthetic().write(&model_path).unwrap();
    let synthetic = SyntheticAdapter {
        rank: 2,
        alpha: 0.0,
    };
    let mut number = 0.0f32;
    let next = || {
        number += 1.0;
        number.sin()
    };
    let changes = |name: &str| name.contains("ffn");
    synthetic.write(&model_path, &path, changes, next).unwrap();
    let adapter = Adapter::load(&path, model()).unwrap();
    let mut engine = engine(1);
    let asked = |number: usize| Request {
        adapters: Some(vec![ScaledAdapter {
            adapter: Arc::clone(&adapter),
            share: number as f32 / 10.0,
        }]),
        ..request(5..20, 8)
    };
    let mut texts = Vec::new();
    for number in 0..120 {
        let (started, _) = answer(&mut engine, asked(number));
        // Nothing is shared with another set.
        assert_eq!(started.cached, 0, "{number}");
        let (started, _) = answer(&mut engine, asked(number));
        assert_eq!(started.cached, 14, "{number}");
        let mut reader = submit(&mut engine, asked(number));
        run(&mut engine);
        let tokens = events(&mut reader)
            .into_iter()
            .filter_map(|event| match event {
                Event::Token(token) => Some(token.id),
                _ => None,
            });
        texts.push(tokens.collect::<Vec<u32>>());
        assert!(engine.n_adapter_sets() <= 40, "{number}");
    }
    let mut fresh = engine_with(options(1), Hand::new());
    let mut reader = submit(&mut fresh, asked(119));
    run(&mut fresh);
    let tokens = events(&mut reader)
        .into_iter()
        .filter_map(|event| match event {
            Event::Token(token) => Some(token.id),
            _ => None,
        });
    assert_eq!(tokens.collect::<Vec<u32>>(), texts[119]);
    assert_ne!(texts[0], texts[119]);
}

/// Creates an engine with a disk cache, whose texts are long enough for a file.
fn on_disk(folder: &std::path::Path, most_bytes: u64) -> Engine {
    let options = EngineOptions {
        context: Some(256),
        budget: 64,
        ..options(4)
    };
    let mut engine = engine_with(options, Hand::new());
    engine.cache_on_disk(folder, most_bytes).unwrap();
    engine
}

#[test]
fn prefixes_on_disk_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("texts");
    let long = || request(5..155, 6);
    let files = || {
        std::fs::read_dir(&path)
            .unwrap()
            .map(|file| file.unwrap().path())
    };
    let mut engine = on_disk(&path, u64::MAX);
    let (started, _) = answer(&mut engine, long());
    assert_eq!((started.cached, files().count()), (0, 1));
    let mut reader = submit(&mut engine, long());
    run(&mut engine);
    let expected = events(&mut reader);
    // Much of it is already in a file.
    assert_eq!(files().count(), 1);
    // Short texts have no file, and texts with a salt have none either.
    answer(&mut engine, request(200..230, 4));
    let salted = |request: Request| Request {
        cache: CacheOptions {
            salt: 7,
            ..CacheOptions::default()
        },
        ..request
    };
    answer(&mut engine, salted(request(100..200, 4)));
    assert_eq!(files().count(), 1);
    drop(engine);

    let mut engine = on_disk(&path, u64::MAX);
    let (started, _) = answer(&mut engine, salted(long()));
    assert_eq!(started.cached, 0);
    let mut reader = submit(&mut engine, long());
    run(&mut engine);
    let found = events(&mut reader);
    let tokens = |events: &[Event]| {
        let ids = events.iter().filter_map(|event| match event {
            Event::Token(token) => Some(token.id),
            _ => None,
        });
        ids.collect::<Vec<u32>>()
    };
    let Some(Event::Started(started)) = found.first() else {
        panic!("{found:?}");
    };
    assert_eq!((started.cached, started.miss), (149, None));
    assert_eq!(tokens(&found), tokens(&expected));
    // A text that differs after a while uses the common prefix.
    let mut engine = on_disk(&path, u64::MAX);
    let other = request((5..105).chain([7, 7, 7]), 4);
    let (started, _) = answer(&mut engine, other);
    let miss = CacheMiss {
        at_token: 100,
        cause: MissCause::Differs,
    };
    assert_eq!((started.cached, started.miss), (100, Some(miss)));

    // A damaged file is not used, and deleted; an unrelated file is left alone.
    let damaged = files().next().unwrap();
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() - 100;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    std::fs::write(path.join("notes.txt"), "mine").unwrap();
    std::fs::write(path.join("no.samite-text"), "no text").unwrap();
    let mut engine = on_disk(&path, u64::MAX);
    let (started, _) = answer(&mut engine, long());
    assert_eq!(started.cached, 0);
    assert!(path.join("notes.txt").exists());

    // Beyond the limit, the oldest files are deleted.
    let mut engine = on_disk(&path, 1);
    assert_eq!(files().count(), 1);
    let (started, _) = answer(&mut engine, long());
    assert_eq!((started.cached, files().count()), (0, 1));
}

/// Returns two adapters of a model in a file, which is that of `model()`.
fn adapters() -> &'static [Arc<Adapter>; 2] {
    static ADAPTERS: OnceLock<[Arc<Adapter>; 2]> = OnceLock::new();
    ADAPTERS.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let model_path = folder.path().join("model.gguf");
        synthetic().write(&model_path).unwrap();
        [2, 5].map(|rank| {
            let path = folder.path().join(format!("{rank}.gguf"));
            let mut number = rank as f32;
            let next = || {
                number += 1.0;
                number.sin()
            };
            let synthetic = SyntheticAdapter { rank, alpha: 0.0 };
            synthetic.write(&model_path, &path, |_| true, next).unwrap();
            Adapter::load(&path, model()).unwrap()
        })
    })
}

fn with_adapters(shares: &[(usize, f32)], request: Request) -> Request {
    let adapters = shares.iter().map(|&(number, share)| ScaledAdapter {
        adapter: Arc::clone(&adapters()[number]),
        share,
    });
    Request {
        adapters: Some(adapters.collect()),
        ..request
    }
}

fn ids(events: &[Event]) -> Vec<u32> {
    let ids = events.iter().filter_map(|event| match event {
        Event::Token(token) => Some(token.id),
        _ => None,
    });
    ids.collect()
}

#[test]
fn requests_with_different_adapters_batch_independently() {
    let sets: [&[(usize, f32)]; 5] = [
        &[],
        &[(0, 1.0)],
        &[(1, 1.0)],
        &[(0, 0.5), (1, -1.0)],
        &[(0, -1.0)],
    ];
    let asked = |number: usize| with_adapters(sets[number], request(5..20, 12));
    let alone: Vec<Vec<u32>> = (0..sets.len())
        .map(|number| {
            let mut engine = engine(1);
            let mut reader = submit(&mut engine, asked(number));
            run(&mut engine);
            ids(&events(&mut reader))
        })
        .collect();
    for (number, text) in alone.iter().enumerate() {
        assert_eq!(text.len(), 12);
        assert!(!alone[..number].contains(text), "{number}: {alone:?}");
    }
    let mut engine = engine(sets.len());
    let mut readers: Vec<Reader> = (0..sets.len())
        .map(|number| submit(&mut engine, asked(number)))
        .collect();
    // All requests are active at once, and share nothing of their common prompt.
    for _ in 0..8 {
        engine.step();
    }
    let busy = engine
        .view()
        .slots
        .iter()
        .filter(|s| s.request.is_some())
        .count();
    assert_eq!(busy, sets.len());
    run(&mut engine);
    for (reader, expected) in readers.iter_mut().zip(&alone) {
        let events = events(reader);
        assert!(matches!(events[0], Event::Started(started) if started.cached == 0));
        assert_eq!(&ids(&events), expected);
    }
    // In sequence: a set finds what it computed before.
    for (number, expected) in alone.iter().enumerate() {
        let mut reader = submit(&mut engine, asked(number));
        run(&mut engine);
        let events = events(&mut reader);
        assert_eq!(&ids(&events), expected);
    }
}

#[test]
fn saved_slots_and_disk_prefixes_belong_to_their_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let asked = |shares: &[(usize, f32)]| with_adapters(shares, request(5..155, 6));
    let mut engine = on_disk(folder.path(), u64::MAX);
    let mut reader = submit(&mut engine, asked(&[(0, 1.0)]));
    run(&mut engine);
    let expected = ids(&events(&mut reader));
    let saved = engine.save_slot(0, 0).unwrap().unwrap();
    drop(engine);
    let mut engine = on_disk(folder.path(), u64::MAX);
    for other in [&[][..], &[(0, 0.5)], &[(1, 1.0)]] {
        assert_eq!(answer(&mut engine, asked(other)).0.cached, 0, "{other:?}");
    }
    let mut reader = submit(&mut engine, asked(&[(0, 1.0)]));
    run(&mut engine);
    let found = events(&mut reader);
    assert!(matches!(found[0], Event::Started(started) if started.cached == 149));
    assert_eq!(ids(&found), expected);
    // A saved slot is restored with its adapters, and only requests with these adapters can use it.
    engine.clear_prefix_cache();
    assert_eq!(engine.restore_slot(2, 0, &saved).unwrap(), 155);
    let slotted = |shares| Request {
        slot: Some(2),
        ..asked(shares)
    };
    assert_eq!(answer(&mut engine, slotted(&[(0, 1.0)])).0.cached, 149);
    assert_eq!(answer(&mut engine, slotted(&[(1, 1.0)])).0.cached, 0);
    // It cannot be restored if no request has used its adapters yet.
    let mut engine = on_disk(&folder.path().join("other"), 0);
    let error = engine.restore_slot(2, 0, &saved).unwrap_err().to_string();
    assert!(error.contains("other adapters"), "{error}");
}

/// Creates an engine with a small model of an architecture whose texts cannot be cut anywhere.
fn of_architecture(architecture: &'static str) -> Engine {
    with_kept(architecture, 12)
}

fn with_kept(architecture: &'static str, kept: usize) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let tiny = SyntheticModel::tiny(architecture);
    tiny.write(&path).unwrap();
    let device = ReferenceDevice::new(ReferenceOptions::named("alone"));
    let model = Model::load(&path, &ModelOptions::new(vec![device])).unwrap();
    let options = EngineOptions {
        context: Some(256),
        budget: 64,
        kept,
        ..options(2)
    };
    let context = ContextOptions {
        n_ctx: Some(4096),
        n_batch: 64,
        n_seq: options.n_seq(),
        kv_types: [DType::F32; 2],
        ..ContextOptions::default()
    };
    let context = Context::new(model, context).unwrap();
    assert!(!context.kv_cache().can_truncate(), "{architecture}");
    Engine::new(context, options).unwrap()
}

#[test]
fn short_requests_between_turns_leave_a_long_text_cached() {
    for architecture in ["qwen3next", "gemma3"] {
        let mut engine = with_kept(architecture, 2);
        let turn = |length: u32| request((0..length).map(|at| at % 250), 3);
        answer(&mut engine, turn(120));
        for (number, length) in (1..5).zip([150, 180, 210, 240]) {
            // Also without titles in between.
            for title in 0..number % 3 {
                let title = (0..30).map(|at| (at + 40 * number + title) % 250);
                answer(&mut engine, request(title, 3));
            }
            let (started, _) = answer(&mut engine, turn(length));
            // A state from before the end of the prompt of the last turn, or a window that is
            // longer.
            assert!(
                started.cached + 30 + 24 >= length as usize,
                "{architecture}: {started:?}"
            );
        }
    }
}

/// Gated delta nets, convolutions, and windows, each combined with full attention.
#[test]
fn long_prefixes_are_reused_for_models_that_cannot_cut_text() {
    for architecture in ["qwen3next", "lfm2", "gemma3"] {
        let folder = tempfile::tempdir().unwrap();
        let prompt = |end: u32| {
            request(
                (0..140)
                    .map(|i| 3 + (i * 7 + i * i) % 250)
                    .chain(end..end + 10),
                60,
            )
        };
        let mut cold = of_architecture(architecture);
        let mut expected = Vec::new();
        for end in [20, 90] {
            let mut reader = submit(
                &mut cold,
                Request {
                    cache: CacheOptions {
                        reuse: false,
                        keep: false,
                        hold: false,
                        salt: 0,
                    },
                    ..prompt(end)
                },
            );
            run(&mut cold);
            expected.push(ids(&events(&mut reader)));
        }
        let check = |engine: &mut Engine, end: u32, expected: &[u32], cached: usize, cause| {
            // Other texts push the window's tokens out.
            for first in [200, 100] {
                answer(engine, request((0..150).map(|i| 3 + (i + first) % 250), 90));
            }
            let mut reader = submit(engine, prompt(end));
            run(engine);
            let events = events(&mut reader);
            let Event::Started(started) = events[0] else {
                panic!("{events:?}");
            };
            assert_eq!(ids(&events), expected, "{architecture}, {end}");
            let miss = CacheMiss {
                at_token: cached,
                cause,
            };
            assert_eq!(
                (started.cached, started.miss),
                (cached, Some(miss)),
                "{architecture}, {end}"
            );
        };
        let mut engine = of_architecture(architecture);
        engine.cache_on_disk(folder.path(), u64::MAX).unwrap();
        check(&mut engine, 20, &expected[0], 0, MissCause::Ends);
        let cause = match architecture {
            "gemma3" => MissCause::Window,
            _ => MissCause::NoState,
        };
        // Repeatedly, and with another end.
        for _ in 0..3 {
            check(&mut engine, 20, &expected[0], 126, cause);
        }
        check(&mut engine, 90, &expected[1], 126, cause);
        drop(engine);
        let mut engine = of_architecture(architecture);
        engine.cache_on_disk(folder.path(), u64::MAX).unwrap();
        check(&mut engine, 90, &expected[1], 126, cause);
        check(&mut engine, 90, &expected[1], 126, cause);
        check(&mut engine, 20, &expected[0], 126, cause);
    }
}

/// Creates a draft model for `model()`: the model itself, or one with another vocabulary or
/// architecture.
fn drafter(synthetic: &SyntheticModel, least: f32) -> samite_llm::Result<Drafter> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("draft.gguf");
    synthetic.write(&path).unwrap();
    let device = ReferenceDevice::new(ReferenceOptions::named("draft"));
    let draft = Model::load(&path, &ModelOptions::new(vec![device])).unwrap();
    let context = ContextOptions {
        n_ctx: Some(256),
        n_seq: options(2).n_seq(),
        kv_types: [DType::F32; 2],
        environment: Environment {
            clock: Arc::new(Ticking(Hand::new(), Duration::from_micros(1))),
            ..Environment::system()
        },
        ..ContextOptions::default()
    };
    Drafter::new(Context::new(draft, context).unwrap(), model(), least)
}

#[test]
fn incompatible_draft_models_are_refused() {
    let refused = |synthetic: &SyntheticModel| drafter(synthetic, 0.0).unwrap_err().to_string();
    let error = refused(&SyntheticModel {
        n_vocab: 600,
        ..synthetic()
    });
    assert!(error.contains("its vocabulary has 600 tokens"), "{error}");
    for architecture in ["lfm2", "mamba"] {
        let error = refused(&SyntheticModel {
            n_vocab: 264,
            ..SyntheticModel::tiny(architecture)
        });
        assert!(error.contains("cannot be taken back"), "{error}");
    }
    let error = of_architecture("qwen3next")
        .set_drafter(drafter(&synthetic(), 0.0).unwrap())
        .unwrap_err();
    assert!(
        error.to_string().contains("takes no draft model"),
        "{error}"
    );

    // Each read of the engine's clock takes a while, and each read of the draft model's clock
    // little: drafts pay off.
    let long = || request([3, 70, 9, 120], 56);
    let expected = {
        let mut engine = engine(1);
        let mut reader = submit(&mut engine, long());
        run(&mut engine);
        ids(&events(&mut reader))
    };
    let engine_options = EngineOptions {
        draft: 8,
        ..options(2)
    };
    let mut engine = engine_with(
        engine_options,
        Arc::new(Ticking(Hand::new(), Duration::from_millis(1))),
    );
    engine
        .set_drafter(drafter(&synthetic(), 0.0).unwrap())
        .unwrap();
    let mut reader = submit(&mut engine, long());
    run(&mut engine);
    assert_eq!(ids(&events(&mut reader)), expected);
    let totals = engine.view().totals;
    let drafted = engine.drafter().unwrap().drafted();
    assert!(drafted > 10 && totals.steps < 40, "{drafted}, {totals:?}");
    // The model drafts for itself: its drafts are accepted, unless the text ends.
    assert!(
        totals.accepted_tokens + 8 >= totals.drafted_tokens,
        "{totals:?}"
    );
}

/// A clock that advances whenever it is read.
#[derive(Debug)]
struct Ticking(Arc<Hand>, Duration);

impl Clock for Ticking {
    fn now(&self) -> Instant {
        self.0.sleep(self.1);
        self.0.now()
    }

    fn sleep(&self, time: Duration) {
        self.0.sleep(time);
    }
}

/// Returns the texts up to the ends of blocks, as an observer of the events knows them.
fn known_blocks(told: &Mutex<Vec<BlockEvent>>) -> Vec<Vec<u32>> {
    let mut known: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for event in told.lock().unwrap().iter() {
        match event {
            BlockEvent::Cleared => known.clear(),
            BlockEvent::Removed { hashes } => known.retain(|hash, _| !hashes.contains(hash)),
            BlockEvent::Stored {
                parent,
                hashes,
                tokens,
            } => {
                let mut text: Vec<u32> = parent.map_or(Vec::new(), |parent| known[&parent].clone());
                for (hash, block) in hashes.iter().zip(tokens.chunks(4)) {
                    text.extend(block);
                    known.insert(*hash, text.clone());
                }
            }
        }
    }
    known.into_values().collect()
}

#[test]
fn reported_blocks_match_the_next_prompt_hits() {
    let mut engine = engine(2);
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&told);
    engine.observe_blocks(
        4,
        Box::new(move |events| heard.lock().unwrap().extend(events)),
    );
    let expected = |prompt: &[u32]| {
        let known = known_blocks(&told);
        let known = known.iter().filter(|text| prompt.starts_with(text));
        known.map(Vec::len).max().unwrap_or(0)
    };
    // More texts than are cached, with common prefixes, are repeated and evict each other.
    let mut hits = 0;
    for (first, length) in [
        (10, 20),
        (10, 30),
        (60, 21),
        (100, 17),
        (140, 33),
        (60, 21),
        (10, 9),
    ] {
        let prompt: Vec<u32> = (first..first + length).collect();
        let known = expected(&prompt);
        let (started, _) = answer(&mut engine, request(prompt.iter().copied(), 3));
        assert!(
            started.cached >= known.min(prompt.len() - 1),
            "{started:?}, {known}"
        );
        assert!(started.cached < known + 4, "{started:?}, {known}");
        assert_eq!(expected(&prompt), prompt.len() / 4 * 4);
        hits += known;
    }
    assert!(hits >= 20, "{hits}");
    // Texts that only requests with the same salt can find are not reported.
    let salted = Request {
        cache: CacheOptions {
            salt: 7,
            ..CacheOptions::default()
        },
        ..request(200..230, 3)
    };
    answer(&mut engine, salted);
    assert_eq!(expected(&Vec::from_iter(200..230)), 0);
    engine.clear_prefix_cache();
    engine.step();
    assert_eq!(known_blocks(&told), Vec::<Vec<u32>>::new());
    answer(&mut engine, request(10..30, 4));
    assert!(!known_blocks(&told).is_empty());
    drop(engine);
    assert_eq!(told.lock().unwrap().last(), Some(&BlockEvent::Cleared));
}
