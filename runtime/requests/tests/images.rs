//! Requests with images: their texts equal those of a session, which decodes them alone.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{events, request, run, submit};
use samite_core::DType;
use samite_llm::{
    Context, ContextOptions, Error, FIRST_IMAGE_ID, GenerateOptions, ImageTokens, Model,
    ModelOptions, PlacedImage, Session, SyntheticModel,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_requests::{
    BlockEvent, Engine, EngineOptions, EngineWaker, Event, Failed, Finished, Reader, Refusal,
    Request, RequestRows, Started, Step, Token,
};
use samite_text::{Sampler, SamplerParams};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Architectures: with positions on several axes, with windows, and with a recurrent state and
/// positions on several axes.
const ARCHITECTURES: [&str; 3] = ["qwen2vl", "gemma3", "qwen35"];

const N_CTX: usize = 160;

fn model(architecture: &'static str) -> Arc<Model> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let synthetic = SyntheticModel {
        n_vocab: 264,
        ..SyntheticModel::tiny(architecture)
    };
    synthetic.write(&path).unwrap();
    let device = ReferenceDevice::new(ReferenceOptions::named("alone"));
    Model::load(&path, &ModelOptions::new(vec![device])).unwrap()
}

/// An image, and how many times it was encoded.
#[derive(Clone)]
struct Image {
    tokens: Arc<ImageTokens>,
    encoded: Arc<AtomicUsize>,
}

impl Image {
    fn encoded(&self) -> usize {
        self.encoded.load(Ordering::SeqCst)
    }
}

/// Creates image `number` of a grid of tokens, as the model's encoder would.
fn image(model: &Model, number: u8, grid: [usize; 2]) -> Image {
    let width = model.spec().input_width();
    let encoded = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&encoded);
    let length = grid[0] * grid[1] * width;
    let tokens = ImageTokens::new([number; 32], grid, move || {
        count.fetch_add(1, Ordering::SeqCst);
        let value = |at: usize| (at as f32 * 0.37 + f32::from(number)).sin() * 0.5;
        Ok((0..length).map(value).collect())
    });
    let tokens = if model.spec().has_axes() {
        tokens
    } else {
        tokens.on_one_axis().bidirectional()
    };
    Image {
        tokens: Arc::new(tokens),
        encoded,
    }
}

/// A prompt of texts and images.
#[derive(Clone, Default)]
struct Prompt {
    tokens: Vec<u32>,
    images: Vec<PlacedImage>,
}

impl Prompt {
    fn text(mut self, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.tokens.extend(tokens);
        self
    }

    fn image(mut self, image: &Image) -> Self {
        self.images.push(PlacedImage {
            start: self.tokens.len(),
            image: Arc::clone(&image.tokens),
        });
        self.text(image.tokens.ids().iter().copied())
    }

    fn request(&self, count: usize) -> Request {
        Request {
            images: self.images.clone(),
            ..request(self.tokens.iter().copied(), count)
        }
    }
}

fn context(model: &Arc<Model>, n_ctx: usize, n_seq: usize) -> Context {
    let options = ContextOptions {
        n_ctx: Some(n_ctx),
        n_batch: 40,
        n_ubatch: 16,
        n_seq,
        kv_types: [DType::F32; 2],
        images: true,
        ..ContextOptions::default()
    };
    Context::new(Arc::clone(model), options).unwrap()
}

fn options() -> EngineOptions {
    EngineOptions {
        slots: 3,
        context: Some(N_CTX),
        kept: 4,
        budget: 10,
        ..EngineOptions::default()
    }
}

fn engine_of(model: &Arc<Model>, options: EngineOptions, n_ctx: usize) -> Engine {
    Engine::new(context(model, n_ctx, options.n_seq()), options).unwrap()
}

fn engine(model: &Arc<Model>) -> Engine {
    engine_of(model, options(), 3 * N_CTX)
}

/// Returns the text after a prompt, by a session that is used for nothing else.
fn alone(model: &Arc<Model>, prompt: &Prompt, count: usize) -> Vec<u32> {
    let mut session = Session::new(context(model, N_CTX, 1)).unwrap();
    let options = GenerateOptions {
        max_tokens: Some(count),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let images = prompt.images.clone();
    let text = |_: &mut Context, _: &str| ControlFlow::Continue(());
    let generated =
        session.generate_with_images(&prompt.tokens, images, &mut sampler, &options, text);
    generated.unwrap().tokens
}

struct Answer {
    started: Started,
    tokens: Vec<u32>,
    end: Result<Finished, Failed>,
}

fn read(mut reader: Reader) -> Answer {
    let events = events(&mut reader);
    let started = events.iter().find_map(|event| match event {
        Event::Started(started) => Some(*started),
        _ => None,
    });
    let tokens = events.iter().filter_map(|event| match event {
        Event::Token(Token { id, .. }) => Some(*id),
        _ => None,
    });
    Answer {
        started: started.unwrap(),
        tokens: tokens.collect(),
        end: match events.last() {
            Some(Event::Finished(finished)) => Ok(finished.clone()),
            Some(Event::Failed(failed)) => Err(failed.clone()),
            other => panic!("{other:?}"),
        },
    }
}

fn answer(engine: &mut Engine, prompt: &Prompt, count: usize) -> Answer {
    let reader = submit(engine, prompt.request(count));
    run(engine);
    read(reader)
}

/// Prompts with an image in the middle, at the end, at the start, two, none, and with little text.
fn prompts(model: &Model) -> Vec<Prompt> {
    let [a, b, c] = [(1, [4, 4]), (2, [3, 5]), (3, [8, 2])].map(|(n, grid)| image(model, n, grid));
    let prompt = Prompt::default;
    vec![
        prompt().text(5..14).image(&a).text(20..33),
        prompt().text(30..41).image(&b),
        prompt().image(&c).text([7, 8, 9]),
        prompt()
            .text([1, 2])
            .image(&a)
            .text([3])
            .image(&b)
            .text(40..44),
        prompt().text(50..75),
        prompt()
            .text([1, 2])
            .image(&a)
            .text([3])
            .image(&c)
            .text(40..44),
    ]
}

#[test]
fn texts_equal_those_of_a_session() {
    for architecture in ARCHITECTURES {
        let model = model(architecture);
        let prompts = prompts(&model);
        let expected: Vec<Vec<u32>> = prompts.iter().map(|one| alone(&model, one, 12)).collect();
        // The texts depend on the images.
        assert_ne!(expected[3], expected[5], "{architecture}");
        for (draft, deterministic, n_ctx) in [
            (0, false, 3 * N_CTX),
            (4, false, 3 * N_CTX),
            (0, true, 3 * N_CTX),
            // Requests are preempted.
            (0, false, 96),
        ] {
            let options = EngineOptions {
                context: Some(n_ctx.min(N_CTX)),
                draft,
                deterministic,
                ..options()
            };
            let mut engine = engine_of(&model, options, n_ctx);
            let readers = prompts
                .iter()
                .map(|one| submit(&mut engine, one.request(12)));
            let readers: Vec<Reader> = readers.collect();
            run(&mut engine);
            for (index, (reader, expected)) in readers.into_iter().zip(&expected).enumerate() {
                let answer = read(reader);
                assert_eq!(answer.end.err(), None);
                assert_eq!(
                    &answer.tokens, expected,
                    "{architecture} {index}: {draft} {deterministic} {n_ctx}"
                );
            }
        }
    }
}

#[test]
fn a_second_question_computes_nothing_of_the_image() {
    for architecture in ARCHITECTURES {
        let model = model(architecture);
        let folder = tempfile::tempdir().unwrap();
        let before = || Prompt::default().text(0..60);
        let first = image(&model, 1, [4, 4]);
        let question = before().image(&first).text(5..35);
        let again = image(&model, 1, [4, 4]);
        let mut engine = engine(&model);
        engine.cache_on_disk(folder.path(), 1 << 30).unwrap();
        let asked = answer(&mut engine, &question, 3);
        assert_eq!((asked.started.cached, first.encoded()), (0, 1));
        // The client sends the same image and the answer, and goes on.
        let next = before().image(&again).text(5..35);
        let next = next.text(asked.tokens.iter().copied()).text([9, 8, 7]);
        let mut restarted = self::engine(&model);
        restarted.cache_on_disk(folder.path(), 1 << 30).unwrap();
        let found = [&mut engine, &mut restarted].map(|engine| answer(engine, &next, 5));
        assert_eq!(again.encoded(), 0, "{architecture}");
        for found in found {
            let cached = found.started.cached;
            assert!(cached >= 60 + 16, "{architecture}: {cached}");
            assert_eq!(found.tokens, alone(&model, &next, 5), "{architecture}");
        }
    }
}

#[test]
fn another_image_is_not_mistaken_for_the_cached_one() {
    for architecture in ARCHITECTURES {
        let model = model(architecture);
        let mut engine = engine(&model);
        let [one, other] = [1, 2].map(|number| image(&model, number, [4, 4]));
        // The hashes of these images are equal in their first tokens.
        let small = |value: f32| {
            let width = model.spec().input_width();
            let tokens = ImageTokens::new([9; 32], [3, 1], move || Ok(vec![value; 3 * width]));
            Image {
                tokens: Arc::new(tokens.on_one_axis()),
                encoded: Arc::default(),
            }
        };
        let [small, like] = [0.1, -0.4].map(small);
        assert_eq!(small.tokens.ids(), like.tokens.ids());
        for image in [&one, &other, &small, &like] {
            let prompt = Prompt::default().text(0..20).image(image).text(5..14);
            let found = answer(&mut engine, &prompt, 5);
            assert!(
                found.started.cached <= 20,
                "{architecture}: {}",
                found.started.cached
            );
            assert_eq!(found.tokens, alone(&model, &prompt, 5), "{architecture}");
        }
    }
}

/// A requested image.
type Requested = (Arc<ImageTokens>, EngineWaker);

/// Encodes images when the test says so.
#[derive(Clone, Default)]
struct Later(Arc<Mutex<Vec<Requested>>>);

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Later({})", self.0.lock().unwrap().len())
    }
}

impl RequestRows for Later {
    fn request_rows(&mut self, image: &Arc<ImageTokens>, wake_engine: EngineWaker) {
        self.0
            .lock()
            .unwrap()
            .push((Arc::clone(image), wake_engine));
    }
}

impl Later {
    fn encode_next(&self) {
        let (image, wake_engine) = self.0.lock().unwrap().remove(0);
        let _ = image.rows();
        wake_engine();
    }
}

#[test]
fn others_go_on_while_an_image_is_encoded() {
    for deterministic in [false, true] {
        let model = model("qwen2vl");
        let prompts = prompts(&model);
        let options = EngineOptions {
            deterministic,
            ..options()
        };
        let mut engine = engine_of(&model, options, 3 * N_CTX);
        let later = Later::default();
        engine.set_request_rows(later.clone());
        let woken = Arc::new(AtomicUsize::new(0));
        let wakes = Arc::clone(&woken);
        let wake_engine: EngineWaker = Arc::new(move || {
            wakes.fetch_add(1, Ordering::SeqCst);
        });
        let slow = prompts[3].request(6);
        let (_, mut slow) = engine.submit(slow, wake_engine).unwrap();
        run(&mut engine);
        // With deterministic results, no part of a prompt depends on when its images are there.
        assert_eq!(engine.view().totals.steps == 0, deterministic);
        if !deterministic {
            let other = answer(&mut engine, &prompts[4], 6);
            assert_eq!(other.tokens, alone(&model, &prompts[4], 6));
        }
        for encoded in 1..=2 {
            // Requests take turns image by image.
            assert_eq!(later.0.lock().unwrap().len(), 1);
            let before = events(&mut slow);
            assert!(!before.iter().any(|event| matches!(event, Event::Token(_))));
            later.encode_next();
            assert_eq!(woken.load(Ordering::SeqCst), encoded);
            run(&mut engine);
        }
        assert!(matches!(engine.step(), Step::Idle(_)));
        let tokens = events(&mut slow)
            .into_iter()
            .filter_map(|event| match event {
                Event::Token(token) => Some(token.id),
                _ => None,
            });
        assert_eq!(tokens.collect::<Vec<_>>(), alone(&model, &prompts[3], 6));
    }
}

#[test]
fn parts_of_prompts_do_not_depend_on_when_images_are_encoded() {
    for architecture in ARCHITECTURES {
        let steps = |is_late: bool| {
            let model = model(architecture);
            let mut engine = engine(&model);
            let later = Later::default();
            if is_late {
                engine.set_request_rows(later.clone());
            }
            let reader = submit(&mut engine, prompts(&model)[3].request(6));
            for _ in 0..3 {
                run(&mut engine);
                let is_waiting = !later.0.lock().unwrap().is_empty();
                is_waiting.then(|| later.encode_next());
            }
            assert!(read(reader).end.is_ok());
            engine.view().totals.steps
        };
        assert_eq!(steps(true), steps(false), "{architecture}");
    }
}

#[test]
fn a_request_yields_its_slot_while_its_image_is_encoded() {
    let model = model("qwen2vl");
    let prompts = prompts(&model);
    let options = EngineOptions {
        slots: 1,
        ..options()
    };
    let mut engine = engine_of(&model, options, N_CTX);
    let later = Later::default();
    engine.set_request_rows(later.clone());
    let slow = submit(&mut engine, prompts[3].request(6));
    run(&mut engine);
    let other = answer(&mut engine, &prompts[4], 6);
    assert_eq!(other.tokens, alone(&model, &prompts[4], 6));
    // Others do not take its turn again and again.
    let mut last = submit(&mut engine, prompts[4].request(6));
    later.encode_next();
    run(&mut engine);
    later.encode_next();
    run(&mut engine);
    let slow = read(slow);
    assert_eq!(slow.tokens, alone(&model, &prompts[3], 6));
    let ended = events(&mut last);
    assert!(matches!(ended.last(), Some(Event::Finished(_))));
    assert_eq!(slow.end.unwrap().counts.preempted, 2);
}

#[test]
fn an_image_that_is_not_cut_waits_for_room() {
    let model = model("gemma3");
    let [ready, unready] = [(); 2].map(|()| image(&model, 1, [4, 4]));
    let long = Prompt::default().text(30..38);
    let seeing = |image: &Image| Prompt::default().text([1, 2]).image(image).text([3]);
    let expected = [alone(&model, &long, 30), alone(&model, &seeing(&ready), 4)];
    let options = EngineOptions {
        slots: 2,
        context: Some(48),
        ..options()
    };
    let mut engine = engine_of(&model, options, 48);
    let later = Later::default();
    engine.set_request_rows(later.clone());
    let requests = [long.request(30), seeing(&unready).request(4)];
    let readers = requests.map(|request| submit(&mut engine, request));
    // The other text takes the cells that were free when the request got its slot.
    while engine.view().totals.generated_tokens < 26 {
        assert_eq!(engine.step(), Step::Worked);
    }
    let free = 48 - engine.view().used_cells;
    assert!(free < 16, "{free}");
    later.encode_next();
    run(&mut engine);
    for (reader, expected) in readers.into_iter().zip(expected) {
        let answer = read(reader);
        assert_eq!(answer.end.err(), None);
        assert_eq!(answer.tokens, expected);
    }
}

#[test]
fn an_image_without_room_does_not_keep_the_engine_busy() {
    let model = model("gemma3");
    let long = Prompt::default().text(30..38);
    let [ready, unready] = [(); 2].map(|()| image(&model, 1, [4, 4]));
    let seeing = |image: &Image| Prompt::default().text([1, 2]).image(image).text([3]);
    let expected = [alone(&model, &long, 30), alone(&model, &seeing(&ready), 4)];
    let options = EngineOptions {
        slots: 2,
        context: Some(48),
        ..options()
    };
    let mut engine = engine_of(&model, options, 48);
    let later = Later::default();
    engine.set_request_rows(later.clone());
    // Its reader does not read, so it is paused, and keeps its cells.
    let slow = Request {
        event_queue: 28,
        ..long.request(30)
    };
    let mut slow = submit(&mut engine, slow);
    let other = submit(&mut engine, seeing(&unready).request(4));
    run(&mut engine);
    later.encode_next();
    run(&mut engine);
    let mut tokens = Vec::new();
    for _ in 0..3 {
        tokens.extend(
            events(&mut slow)
                .into_iter()
                .filter_map(|event| match event {
                    Event::Token(token) => Some(token.id),
                    _ => None,
                }),
        );
        run(&mut engine);
    }
    assert_eq!(tokens, expected[0]);
    assert_eq!(read(other).tokens, expected[1]);
}

#[test]
fn a_failing_encoder_fails_only_its_request() {
    let model = model("qwen2vl");
    let width = model.spec().input_width();
    type Encode = fn(usize) -> samite_llm::Result<Vec<f32>>;
    let failing: [Encode; 3] = [
        |_| Err(Error::InvalidArgument("out of paint".into())),
        |width| Ok(vec![0.0; 8 * width - 1]),
        |_| panic!("a fault of the encoder"),
    ];
    for (encode, expected) in
        failing
            .into_iter()
            .zip(["out of paint", "must be 8 rows", "panicked"])
    {
        let mut engine = engine(&model);
        let image = Image {
            tokens: Arc::new(ImageTokens::new([5; 32], [4, 2], move || encode(width))),
            encoded: Arc::default(),
        };
        let bad = Prompt::default().text(1..6).image(&image).text([2]);
        let good = &prompts(&model)[0];
        let readers = [&bad, good].map(|one| submit(&mut engine, one.request(6)));
        run(&mut engine);
        let [bad, other] = readers.map(read);
        let failed = bad.end.unwrap_err();
        assert!(failed.message.contains(expected), "{}", failed.message);
        assert_eq!(other.tokens, alone(&model, good, 6));
        assert_eq!(engine.view().totals.failed, 1);
    }
}

#[test]
fn impossible_requests_are_rejected() {
    let plain = model("gemma3");
    let large = image(&plain, 1, [17, 1]);
    let fitting = image(&plain, 2, [4, 4]);
    let message = |engine: &mut Engine, request: Request| {
        let refused = engine.submit(request, Arc::new(|| {})).unwrap_err();
        assert!(matches!(refused, Refusal::Invalid { .. }));
        refused.to_string()
    };
    let prompt = Prompt::default().text([1]);
    let mut engine = engine(&plain);
    let refused = message(&mut engine, prompt.clone().image(&large).request(1));
    assert!(refused.contains("17 tokens, and 16"), "{refused}");
    let mut missing = prompt.clone().image(&fitting).request(1);
    missing.images.clear();
    assert!(message(&mut engine, missing).starts_with("images: token 1"));
    let mut logprobs = prompt.clone().image(&fitting).request(1);
    logprobs.prompt_logprobs = Some(1);
    assert!(message(&mut engine, logprobs).starts_with("prompt_logprobs"));
    let context = ContextOptions {
        n_ctx: Some(N_CTX),
        n_seq: 4,
        ..ContextOptions::default()
    };
    let options = EngineOptions {
        slots: 2,
        kept: 2,
        ..EngineOptions::default()
    };
    let context = Context::new(Arc::clone(&plain), context).unwrap();
    let mut without = Engine::new(context, options).unwrap();
    let refused = message(&mut without, prompt.image(&fitting).request(1));
    assert!(refused.contains("no room for images"), "{refused}");
}

#[test]
fn routers_get_no_tokens_of_images() {
    let model = model("qwen2vl");
    let mut engine = engine(&model);
    let reported = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&reported);
    engine.observe_blocks(
        4,
        Box::new(move |events| seen.lock().unwrap().extend(events)),
    );
    let prompt = Prompt::default()
        .text(0..9)
        .image(&image(&model, 1, [4, 4]))
        .text(5..14);
    answer(&mut engine, &prompt, 4);
    let events = std::mem::take(&mut *reported.lock().unwrap());
    let tokens = events.into_iter().flat_map(|event| match event {
        BlockEvent::Stored { tokens, .. } => tokens,
        _ => Vec::new(),
    });
    let tokens: Vec<u32> = tokens.collect();
    assert_eq!(tokens, (0..8).collect::<Vec<u32>>());
    assert!(tokens.iter().all(|&token| token < FIRST_IMAGE_ID));
}
