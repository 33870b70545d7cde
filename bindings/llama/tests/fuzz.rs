//! Calls every function of the header with null, stale and live handles, and invalid numbers, from
//! eight threads: nothing may abort the process, and the library must keep working.
//!
//! The signatures are parsed from the library's sources. Pointers to a caller's data are always
//! null, since the library trusts other pointers.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;

use common::*;
use llama::layout::*;
use std::ffi::c_void;
use std::sync::Mutex;

const SOURCES: [&str; 16] = [
    include_str!("../src/adapters.rs"),
    include_str!("../src/batch.rs"),
    include_str!("../src/chat.rs"),
    include_str!("../src/context.rs"),
    include_str!("../src/load.rs"),
    include_str!("../src/log.rs"),
    include_str!("../src/memory.rs"),
    include_str!("../src/model.rs"),
    include_str!("../src/names.rs"),
    include_str!("../src/perf.rs"),
    include_str!("../src/quantize.rs"),
    include_str!("../src/results.rs"),
    include_str!("../src/sampler.rs"),
    include_str!("../src/sampler/chain.rs"),
    include_str!("../src/sampler/grammar.rs"),
    include_str!("../src/sampler/own.rs"),
];
const MORE: [&str; 3] = [
    include_str!("../src/state.rs"),
    include_str!("../src/training.rs"),
    include_str!("../src/vocabulary.rs"),
];

/// Kind of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Handle from the library.
    Handle,
    Sampler,
    /// Pointer to a caller's data.
    Pointer,
    Number,
    Real,
    Batch,
    Model,
    Context,
    Embd,
    Train,
}

fn kind(name: &str) -> Kind {
    match name {
        "*mut Opaque" | "*const Opaque" => Kind::Handle,
        "*mut Sampler" | "*const Sampler" => Kind::Sampler,
        "f32" => Kind::Real,
        "Batch" => Kind::Batch,
        "ModelParams" => Kind::Model,
        "ContextParams" => Kind::Context,
        "Embd" => Kind::Embd,
        "OptParams" => Kind::Train,
        "SamplerChainParams"
        | "i32"
        | "u32"
        | "i64"
        | "usize"
        | "c_int"
        | "Flag"
        | "crate::layout::Flag"
        | "bool" => Kind::Number,
        "LogCallback" | "AbortCallback" => Kind::Pointer,
        name if name.starts_with('*') => Kind::Pointer,
        name => panic!("{name}: what is it?"),
    }
}

/// Returns the name, parameters and result of each function.
fn functions() -> Vec<(String, Vec<Kind>, String)> {
    let mut all = Vec::new();
    for source in SOURCES.iter().chain(&MORE) {
        let flat = source.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut rest = flat.as_str();
        while let Some(at) = rest.find("fn llama_") {
            rest = &rest[at + 3..];
            let (name, behind) = rest.split_once('(').unwrap();
            let (parameters, behind) = behind.split_once(')').unwrap();
            if name.contains(' ') || !llama::table::TABLE.iter().any(|row| row.0 == name) {
                continue;
            }
            let parameters = parameters
                .split(", ")
                .filter(|text| !text.trim().is_empty());
            let kinds = parameters.map(|text| kind(text.split_once(':').unwrap().1.trim()));
            let kinds = kinds.collect();
            let result = behind.strip_prefix(" -> ").unwrap_or("()");
            let end = result.find([',', ';', '=', '{']).unwrap_or(result.len());
            all.push((name.to_owned(), kinds, result[..end].trim().to_owned()));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all.dedup_by(|a, b| a.0 == b.0);
    all
}

/// Random arguments.
struct Chance(samite_text::Rng);

impl Chance {
    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.0.below(of.len())]
    }

    fn number(&mut self) -> usize {
        let small = self.0.below(70) as i64 - 4;
        self.one(&[
            0,
            1,
            -1,
            small,
            small,
            i32::MAX.into(),
            i32::MIN.into(),
            i64::MAX,
            1 << 20,
            65,
        ]) as usize
    }

    fn real(&mut self) -> f32 {
        self.one(&[
            0.0,
            1.0,
            -1.0,
            0.5,
            1e9,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
        ])
    }
}

/// Objects that threads share; some were freed.
#[derive(Default)]
struct Objects {
    handles: Vec<usize>,
    samplers: Vec<usize>,
}

type Plain = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    f32,
    f32,
    f32,
    f32,
) -> usize;
type With<S> =
    unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, f32, f32, f32, f32, S) -> usize;

fn call_any(
    function: *mut c_void,
    kinds: &[Kind],
    buggify: &mut Chance,
    objects: &Mutex<Objects>,
) -> usize {
    let (mut words, mut reals) = ([0usize; 8], [0f32; 4]);
    let (mut n_words, mut n_reals) = (0, 0);
    for kind in kinds {
        let word = match kind {
            Kind::Handle => {
                let objects = objects.lock().unwrap();
                let known = buggify.one(&objects.handles);
                buggify.one(&[
                    0,
                    known,
                    known,
                    known,
                    known,
                    known + 8,
                    1,
                    usize::MAX,
                    0x5000,
                ])
            }
            Kind::Sampler => {
                let objects = objects.lock().unwrap();
                let known = buggify.one(&objects.samplers);
                buggify.one(&[0, known, known, known])
            }
            Kind::Pointer => 0,
            Kind::Number => buggify.number(),
            Kind::Real => {
                reals[n_reals] = buggify.real();
                n_reals += 1;
                continue;
            }
            _ => continue,
        };
        words[n_words] = word;
        n_words += 1;
    }
    let [a, b, c, d, e, f, g, h] = words;
    let [w, x, y, z] = reals;
    macro_rules! with {
        ($type:ty, $value:expr) => {
            // SAFETY: integers, floats and large structures are passed in separate register classes
            // or on the stack, each in order, regardless of what lies between them.
            unsafe {
                std::mem::transmute::<*mut c_void, With<$type>>(function)(
                    a, b, c, d, e, f, w, x, y, z, $value,
                )
            }
        };
    }
    let large = kinds.iter().find(|kind| {
        !matches!(
            kind,
            Kind::Handle | Kind::Sampler | Kind::Pointer | Kind::Number | Kind::Real
        )
    });
    match large {
        // SAFETY: as above.
        None => unsafe {
            std::mem::transmute::<*mut c_void, Plain>(function)(a, b, c, d, e, f, g, h, w, x, y, z)
        },
        Some(Kind::Batch) => {
            let batch = Batch {
                n_tokens: buggify.one(&[0, 0, -1, i32::MIN]),
                token: std::ptr::null_mut(),
                embd: std::ptr::null_mut(),
                pos: std::ptr::null_mut(),
                n_seq_id: std::ptr::null_mut(),
                seq_id: std::ptr::null_mut(),
                logits: std::ptr::null_mut(),
            };
            with!(Batch, batch)
        }
        Some(Kind::Model) => with!(ModelParams, ModelParams::DEFAULT),
        Some(Kind::Context) => {
            let params = ContextParams {
                n_ctx: buggify.one(&[0, 1, 256, 512, u32::MAX]),
                n_batch: buggify.one(&[0, 1, 32, 512, u32::MAX]),
                n_ubatch: buggify.one(&[0, 1, 32, u32::MAX]),
                n_seq_max: buggify.one(&[0, 1, 2, 300, u32::MAX]),
                n_threads: buggify.one(&[1, 0, -1, i32::MAX]),
                pooling_type: buggify.one(&[-1, 0, 1, 4, 9, i32::MIN]),
                type_k: buggify.one(&[1, 0, 8, 99, -1]),
                embeddings: buggify.one(&[Flag::new(false), Flag::new(true)]),
                ..ContextParams::DEFAULT
            };
            with!(ContextParams, params)
        }
        Some(Kind::Embd) => with!(
            Embd,
            Embd {
                data: std::ptr::null(),
                n_rows: buggify.number(),
                n_embd: buggify.number()
            }
        ),
        Some(_) => {
            // SAFETY: all of its bytes may be zero.
            let params: OptParams = unsafe { std::mem::zeroed() };
            with!(OptParams, params)
        }
    }
}

#[test]
fn no_call_aborts_the_process() {
    let functions = functions();
    assert_eq!(
        functions.len(),
        llama::table::TABLE.len(),
        "each function of the header is called"
    );
    listen_to_all();
    let model = load();
    let objects = Mutex::new(Objects::default());
    {
        let mut objects = objects.lock().unwrap();
        for number in 0..6 {
            objects.handles.push(model.addr());
            objects
                .handles
                .push(context(model, |params| params.n_seq_max = 1 + number % 3).addr());
            let gone = context(model, |_| {});
            call!(llama_free(gone => *mut Opaque));
            objects.handles.push(gone.addr());
            objects
                .samplers
                .push(call!(llama_sampler_chain_init(1u8 => u8) -> *mut Sampler).addr());
            objects
                .samplers
                .push(call!(llama_sampler_init_dist(7 => u32) -> *mut Sampler).addr());
            objects
                .samplers
                .push(call!(llama_sampler_init_top_k(7 => i32) -> *mut Sampler).addr());
        }
    }
    // Structure results are returned through memory that the caller provides.
    const STRUCTURES: [&str; 5] = [
        "ModelParams",
        "ContextParams",
        "QuantizeParams",
        "Batch",
        "PerfContext",
    ];
    // Files come from the C library; a changed log callback would hide messages from the test.
    const LEFT: [&str; 2] = ["llama_log_set", "llama_log_get"];
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (functions, objects) = (&functions, &objects);
            scope.spawn(move || {
                let mut buggify = Chance(samite_text::Rng::new(thread));
                for _ in 0..6000 {
                    let (name, kinds, result) = &functions[buggify.0.below(functions.len())];
                    if LEFT.contains(&&**name) {
                        continue;
                    }
                    if STRUCTURES.contains(&&**result) {
                        let known = buggify.one(&objects.lock().unwrap().handles);
                        match &**name {
                            "llama_perf_context" => {
                                let handle = std::ptr::without_provenance(known);
                                call!(llama_perf_context(handle => *const Opaque) -> PerfContext);
                            }
                            "llama_batch_init" => {
                                let [a, b, c] = [(); 3].map(|()| buggify.number() as i32);
                                let batch =
                                    call!(llama_batch_init(a => i32, b => i32, c => i32) -> Batch);
                                call!(llama_batch_free(batch => Batch));
                            }
                            _ => {}
                        }
                        continue;
                    }
                    let given = call_any(symbol(name), kinds, &mut buggify, objects);
                    let mut objects = objects.lock().unwrap();
                    if given != 0 && result == "*mut Sampler" && !name.ends_with("chain_get") {
                        let at = buggify.0.below(64);
                        match objects.samplers.get_mut(at) {
                            Some(place) => *place = given,
                            None => objects.samplers.push(given),
                        }
                    }
                    if given != 0 && result == "*mut Opaque" {
                        let at = buggify.0.below(32);
                        match objects.handles.get_mut(at) {
                            Some(place) => *place = given,
                            None => objects.handles.push(given),
                        }
                    }
                }
            });
        }
    });
    // The library still works.
    let model = load();
    let context = context(model, |_| {});
    let written = greedy(context, &tokenize(model, "Once upon a time"), 4);
    assert_eq!(written.len(), 4);
    call!(llama_free(context => *mut Opaque));
    call!(llama_model_free(model => *mut Opaque));
    assert!(was_logged("was freed already") && was_logged("is null"));
    assert!(
        !was_logged("it panicked"),
        "{:?}",
        SAID.lock()
            .unwrap()
            .iter()
            .find(|said| said.1.contains("it panicked"))
    );
}
