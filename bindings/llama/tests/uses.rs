//! Typical uses of the library: generation, states, embeddings, custom samplers, aborts, and
//! misuse.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;

use common::*;
use llama::layout::*;
use samite_llm::{
    Context as Engine, ContextOptions, GenerateOptions, Model, ModelOptions, Session,
};
use samite_text::{Sampler as EngineSampler, SamplerParams};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

const PROMPT: &str = "Once upon a time";

/// Returns the tokens that the engine generates by itself.
fn expected(count: usize) -> Vec<i32> {
    let file = samite_gguf::GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
    let devices = samite_registry::Registry::built_in(Default::default()).automatic();
    let model = Model::from_gguf(&file, &ModelOptions::new(devices)).unwrap();
    let prompt = model
        .tokenizer()
        .unwrap()
        .tokenize(PROMPT, true, false)
        .unwrap();
    let options = ContextOptions {
        n_ctx: Some(512),
        ..ContextOptions::default()
    };
    let mut session = Session::new(Engine::new(model, options).unwrap()).unwrap();
    let mut sampler = EngineSampler::new(SamplerParams::greedy()).unwrap();
    let options = GenerateOptions {
        max_tokens: Some(count),
        ..GenerateOptions::default()
    };
    let generation = session
        .generate(&prompt, &mut sampler, &options, |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    generation
        .tokens
        .iter()
        .map(|&token| token as i32)
        .collect()
}

#[test]
fn generated_text_matches_the_engine() {
    let model = load();
    let context = context(model, |_| {});
    let prompt = tokenize(model, PROMPT);
    assert_eq!(greedy(context, &prompt, 24), expected(24));
    // Continue from a state, as bytes and in a file, also in another context.
    call!(llama_memory_clear(context => *mut Opaque, true => bool));
    let mut tokens = prompt.clone();
    assert_eq!(decode(context, &mut tokens), 0);
    let size = call!(llama_state_seq_get_size(context => *mut Opaque, 0 => i32) -> usize);
    let mut bytes = vec![0u8; size];
    let written = call!(llama_state_seq_get_data(context => *mut Opaque,
        bytes.as_mut_ptr() => *mut u8, size => usize, 0 => i32) -> usize);
    assert_eq!((written, size > 1000), (size, true));
    let folder = tempfile::tempdir().unwrap();
    let path = std::ffi::CString::new(folder.path().join("state").to_str().unwrap()).unwrap();
    let saved = call!(llama_state_save_file(
        context => *mut Opaque, path.as_ptr() => *const c_char, prompt.as_ptr() => *const i32,
            prompt.len() => usize
    ) -> bool);
    assert!(saved);
    let first = expected(1)[0];
    let of_bytes = common::context(model, |params| params.n_seq_max = 2);
    let read = call!(llama_state_seq_set_data(of_bytes => *mut Opaque, bytes.as_ptr() => *const u8,
        size => usize, 0 => i32) -> usize);
    assert_eq!(read, size);
    assert_eq!(greedy(of_bytes, &[first], 8), expected(9)[1..]);
    let of_file = common::context(model, |_| {});
    let (mut tokens, mut count) = (vec![0; 64], 0usize);
    let loaded = call!(llama_state_load_file(
        of_file => *mut Opaque, path.as_ptr() => *const c_char, tokens.as_mut_ptr() => *mut i32,
            64 => usize, &raw mut count => *mut usize
    ) -> bool);
    assert!(loaded && tokens[..count] == prompt);
    assert_eq!(greedy(of_file, &[first], 8), expected(9)[1..]);
    // A state with any byte damaged changes nothing.
    for at in (0..size).step_by(size / 50) {
        bytes[at] ^= 0x40;
        let read = call!(llama_state_seq_set_data(of_file => *mut Opaque,
            bytes.as_ptr() => *const u8, size => usize, 0 => i32) -> usize);
        assert_eq!(read, 0, "byte {at}");
        bytes[at] ^= 0x40;
    }
    let last = call!(llama_memory_seq_pos_max(of_file => *mut Opaque, 0 => i32) -> i32);
    assert_eq!(last, prompt.len() as i32 + 7);
    for gone in [context, of_bytes, of_file] {
        call!(llama_free(gone => *mut Opaque));
    }
    call!(llama_model_free(model => *mut Opaque));
}

#[test]
fn requested_logits_rows_have_stable_addresses() {
    let model = load();
    let context = context(model, |params| params.embeddings = Flag::new(false));
    let n_vocab = call!(llama_vocab_n_tokens(model => *const Opaque) -> i32) as usize;
    let mut tokens = tokenize(model, PROMPT);
    let count = tokens.len() as i32;
    let batch = call!(llama_batch_init(count => i32, 0 => i32, 1 => i32) -> Batch);
    let filled = Batch {
        n_tokens: count,
        ..batch
    };
    for (index, &token) in tokens.iter().enumerate() {
        // SAFETY: the buffer has room for all elements.
        unsafe {
            *batch.token.add(index) = token;
            *batch.pos.add(index) = index as i32;
            *batch.n_seq_id.add(index) = 1;
            **batch.seq_id.add(index) = 0;
            *batch.logits.add(index) = i8::from(index % 2 == 1);
        }
    }
    assert_eq!(
        call!(llama_decode(context => *mut Opaque, filled => Batch) -> i32),
        0
    );
    let row =
        |index: i32| call!(llama_get_logits_ith(context => *mut Opaque, index => i32) -> *mut f32);
    let all = call!(llama_get_logits(context => *mut Opaque) -> *mut f32);
    assert!(row(0).is_null() && row(1) == all && row(3) == all.wrapping_add(n_vocab));
    let last = count / 2 - 1;
    assert!(
        row(-1) == all.wrapping_add(n_vocab * last as usize)
            && row(-last - 2).is_null()
            && row(count).is_null()
    );
    // SAFETY: the row exists.
    let before: Vec<f32> = unsafe { std::slice::from_raw_parts(all, n_vocab) }.to_vec();
    // A larger result is stored elsewhere; the earlier one remains readable.
    call!(llama_memory_clear(context => *mut Opaque, true => bool));
    for index in 0..count as usize {
        // SAFETY: as above.
        unsafe { *batch.logits.add(index) = 1 };
    }
    assert_eq!(
        call!(llama_decode(context => *mut Opaque, filled => Batch) -> i32),
        0
    );
    // SAFETY: results stay valid until the context is freed.
    let stayed = unsafe { std::slice::from_raw_parts(all, n_vocab) };
    let now = row(1);
    assert!(now != all && stayed == before, "results moved");
    // SAFETY: the row exists.
    let again = unsafe { std::slice::from_raw_parts(now, n_vocab) };
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
    assert!(near(again, &before));
    call!(llama_batch_free(batch => Batch));
    // Embeddings together with logits, and then pooled embeddings.
    call!(llama_memory_clear(context => *mut Opaque, true => bool));
    call!(llama_set_embeddings(context => *mut Opaque, true => bool));
    assert_eq!(decode(context, &mut tokens), 0);
    let embedding = call!(llama_get_embeddings_ith(context => *mut Opaque, 0 => i32) -> *mut f32);
    assert!(!embedding.is_null() && !row(0).is_null());
    let texts = common::context(model, |params| {
        params.embeddings = Flag::new(true);
        params.pooling_type = 3;
    });
    assert_eq!(decode(texts, &mut tokens), 0);
    let n_embd = call!(llama_model_n_embd(model => *const Opaque) -> i32) as usize;
    let of_text = call!(llama_get_embeddings_seq(texts => *mut Opaque, 0 => i32) -> *mut f32);
    let of_token = call!(llama_get_embeddings_ith(context => *mut Opaque, -1 => i32) -> *mut f32);
    // SAFETY: both have this length.
    unsafe {
        assert!(near(
            std::slice::from_raw_parts(of_text, n_embd),
            std::slice::from_raw_parts(of_token, n_embd)
        ));
    }
    assert!(call!(llama_get_embeddings_ith(texts => *mut Opaque, 0 => i32) -> *mut f32).is_null());
}

/// A caller's sampler, which always selects token 7 and counts accepted tokens.
static ACCEPTED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn name(_sampler: *const Sampler) -> *const c_char {
    c"seven".as_ptr()
}

unsafe extern "C" fn accept(_sampler: *mut Sampler, token: i32) {
    ACCEPTED.fetch_add(token as usize, Ordering::Relaxed);
}

unsafe extern "C" fn apply(_sampler: *mut Sampler, candidates: *mut TokenDataArray) {
    // SAFETY: the library passes a complete list.
    unsafe {
        let list = &mut *candidates;
        let items = std::slice::from_raw_parts(list.data, list.size);
        list.selected = items
            .iter()
            .position(|item| item.id == 7)
            .map_or(-1, |at| at as i64);
    }
}

#[test]
fn sampler_chain_nesting_is_limited() {
    listen_to_all();
    let new = || call!(llama_sampler_chain_init(false => bool) -> *mut Sampler);
    let count = |chain: *mut Sampler| call!(llama_sampler_chain_n(chain => *const Sampler) -> i32);
    let add = |chain: *mut Sampler, sampler: *mut Sampler| {
        call!(llama_sampler_chain_add(chain => *mut Sampler, sampler => *mut Sampler));
        count(chain) == 1
    };
    // Nest from inner to outer chains, and in reverse.
    for is_outwards in [true, false] {
        let mut ends = [new(), std::ptr::null_mut()];
        ends[1] = ends[0];
        let mut depth = 1;
        let spare = loop {
            let next = new();
            let is_added = if is_outwards {
                add(next, ends[0])
            } else {
                add(ends[1], next)
            };
            if !is_added {
                break next;
            }
            ends[usize::from(!is_outwards)] = next;
            depth += 1;
            assert!(depth < 1000, "chains nest without a limit");
        };
        assert_eq!(depth, 32);
        assert!(was_logged("in each other"));
        // A removed chain can be nested like a new one.
        let inner =
            call!(llama_sampler_chain_remove(ends[0] => *mut Sampler, 0 => i32) -> *mut Sampler);
        assert!(add(spare, inner));
        let clone = call!(llama_sampler_clone(spare => *const Sampler) -> *mut Sampler);
        assert_eq!(count(clone), 1);
        for chain in [ends[0], spare, clone] {
            call!(llama_sampler_free(chain => *mut Sampler));
        }
    }
}

#[test]
fn library_and_caller_samplers_work_in_one_chain() {
    listen_to_all();
    let model = load();
    let context = context(model, |_| {});
    let mut tokens = tokenize(model, PROMPT);
    assert_eq!(decode(context, &mut tokens), 0);
    let chain = call!(llama_sampler_chain_init(false => bool) -> *mut Sampler);
    let add = |sampler: *mut Sampler| {
        call!(llama_sampler_chain_add(chain => *mut Sampler,
        sampler => *mut Sampler))
    };
    let bias = [LogitBias {
        token: 7,
        bias: 1e6,
    }];
    add(call!(llama_sampler_init_logit_bias(100 => i32, 1 => i32,
            bias.as_ptr() => *const LogitBias) -> *mut Sampler));
    add(call!(llama_sampler_init_top_k(5 => i32) -> *mut Sampler));
    let mut table = SamplerI {
        name: Some(name),
        accept: Some(accept),
        apply: Some(apply),
        reset: None,
        clone: None,
        free: None,
        backend_init: None,
        backend_accept: None,
        backend_apply: None,
        backend_set_input: None,
        backend_reset: None,
        copy_state: None,
    };
    add(call!(llama_sampler_init(&raw mut table => *mut SamplerI,
            std::ptr::null_mut() => *mut c_void) -> *mut Sampler));
    let sample = |sampler: *mut Sampler| {
        call!(llama_sampler_sample(sampler => *mut Sampler,
        context => *mut Opaque, -1 => i32) -> i32)
    };
    assert_eq!((sample(chain), ACCEPTED.load(Ordering::Relaxed)), (7, 7));
    let own = call!(llama_sampler_chain_get(chain => *mut Sampler, 2 => i32) -> *mut Sampler);
    let named = call!(llama_sampler_name(own => *const Sampler) -> *const c_char);
    // SAFETY: names are C strings.
    assert_eq!(unsafe { CStr::from_ptr(named) }, c"seven");
    // A clone is independent, and chains cannot contain themselves.
    let clone = call!(llama_sampler_clone(chain => *const Sampler) -> *mut Sampler);
    assert_eq!(
        call!(llama_sampler_chain_n(clone => *const Sampler) -> i32),
        3
    );
    call!(llama_sampler_chain_add(clone => *mut Sampler, chain => *mut Sampler));
    call!(llama_sampler_chain_add(chain => *mut Sampler, clone => *mut Sampler));
    assert_eq!(
        call!(llama_sampler_chain_n(chain => *const Sampler) -> i32),
        3
    );
    assert!(was_logged("cannot be in itself"));
    let taken = call!(llama_sampler_chain_remove(clone => *mut Sampler, 3 => i32) -> *mut Sampler);
    assert_eq!(taken, chain);
    call!(llama_sampler_free(clone => *mut Sampler));
    assert_eq!(sample(chain), 7);
    call!(llama_sampler_free(chain => *mut Sampler));
    // A freed sampler does nothing.
    call!(llama_sampler_free(chain => *mut Sampler));
    assert_eq!(sample(chain), -1);
    // A grammar is enforced; an invalid one returns null.
    let grammar = |text: &CStr| {
        call!(llama_sampler_init_grammar(
            model => *const Opaque, text.as_ptr() => *const c_char,
                c"root".as_ptr() => *const c_char
        ) -> *mut Sampler)
    };
    assert!(grammar(c"root ::= (").is_null());
    let chain = call!(llama_sampler_chain_init(true => bool) -> *mut Sampler);
    let add = |sampler: *mut Sampler| {
        call!(llama_sampler_chain_add(chain => *mut Sampler,
        sampler => *mut Sampler))
    };
    add(grammar(c"root ::= \"xyz\""));
    add(call!(llama_sampler_init_greedy() -> *mut Sampler));
    let mut text = Vec::new();
    loop {
        let token = sample(chain);
        if call!(llama_vocab_is_eog(model => *const Opaque, token => i32) -> bool) {
            break;
        }
        let mut piece = [0u8; 16];
        let length = call!(llama_token_to_piece(
            model => *const Opaque, token => i32, piece.as_mut_ptr().cast() => *mut c_char,
                16 => i32, 0 => i32, false => bool
        ) -> i32);
        text.extend_from_slice(&piece[..length as usize]);
        assert!(text.len() <= 3, "{text:?}");
    }
    assert_eq!(text, b"xyz");
    // Seeds use C++'s generator: the first number of seed 1234 is 0.4977.
    let drawn = |seed: u32, shares: [f32; 2]| {
        let mut items = [0, 1].map(|id| TokenData {
            id,
            logit: shares[id as usize].ln(),
            p: 0.0,
        });
        let mut list = TokenDataArray {
            data: items.as_mut_ptr(),
            size: 2,
            selected: -1,
            sorted: Flag::new(false),
        };
        let sampler = call!(llama_sampler_init_dist(seed => u32) -> *mut Sampler);
        call!(llama_sampler_apply(sampler => *mut Sampler, &raw mut list => *mut TokenDataArray));
        list.selected
    };
    assert_eq!(
        [drawn(1234, [0.49, 0.51]), drawn(1234, [0.51, 0.49])],
        [1, 0]
    );
}

static ASKED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn stop(_data: *mut c_void) -> bool {
    ASKED.fetch_add(1, Ordering::Relaxed);
    true
}

unsafe extern "C" fn refuse(_share: f32, data: *mut c_void) -> bool {
    // SAFETY: the test passes a number.
    unsafe { *data.cast::<c_int>() += 1 };
    false
}

#[test]
fn callbacks_abort_decoding_and_loading() {
    let model = load();
    let context = context(model, |params| params.abort_callback = Some(stop));
    let mut tokens = tokenize(model, PROMPT);
    assert_eq!(decode(context, &mut tokens), 2);
    assert!(ASKED.load(Ordering::Relaxed) > 0);
    assert_eq!(
        call!(llama_memory_seq_pos_max(context => *mut Opaque, 0 => i32) -> i32),
        -1
    );
    call!(llama_set_abort_callback(context => *mut Opaque, None => AbortCallback,
        std::ptr::null_mut() => *mut c_void));
    assert_eq!(decode(context, &mut tokens), 0);
    let mut told: c_int = 0;
    let params = ModelParams {
        progress_callback: Some(refuse),
        progress_callback_user_data: (&raw mut told).cast(),
        ..ModelParams::DEFAULT
    };
    let path = path();
    let stopped = call!(llama_model_load_from_file(path.as_ptr() => *const c_char,
        params => ModelParams) -> *mut Opaque);
    assert!(stopped.is_null() && told > 0);
}

#[test]
fn invalid_calls_return_errors() {
    listen_to_all();
    let model = load();
    let context = context(model, |_| {});
    // Tokens that do not exist.
    let mut buffer = [0u8; 16];
    let bad = [1_000_000];
    let length = call!(llama_detokenize(
        model => *const Opaque, bad.as_ptr() => *const i32, 1 => i32,
            buffer.as_mut_ptr().cast() => *mut c_char, 16 => i32, false => bool, false => bool
    ) -> i32);
    assert_eq!(length, 0);
    assert!(was_logged("token 1000000"));
    assert_eq!(decode(context, &mut [1_000_000]), -1);
    assert_eq!(decode(context, &mut [-1]), -1);
    // A full context, and a batch that is too large.
    let mut many = vec![5; 600];
    assert_eq!(decode(context, &mut many), -1);
    let mut some = vec![5; 500];
    assert_eq!(decode(context, &mut some), 0);
    assert_eq!(decode(context, &mut vec![5; 100]), 1);
    assert_eq!(
        call!(llama_memory_seq_pos_max(context => *mut Opaque, 0 => i32) -> i32),
        499
    );
    // A buffer that is too small yields the required size as a negative number.
    let text = "Once upon a time";
    let needed = call!(llama_tokenize(
        model => *const Opaque, text.as_ptr().cast() => *const c_char, 16 => i32,
            std::ptr::null_mut() => *mut i32, 0 => i32, true => bool, false => bool
    ) -> i32);
    assert_eq!(-needed, tokenize(model, text).len() as i32);
    // Stale handles, and handles of another kind.
    assert_eq!(call!(llama_n_ctx(model => *const Opaque) -> u32), 0);
    call!(llama_free(context => *mut Opaque));
    call!(llama_free(context => *mut Opaque));
    assert_eq!(decode(context, &mut [5]), -1);
    assert!(was_logged("llama_free") && was_logged("llama_decode"));
    call!(llama_model_free(model => *mut Opaque));
    assert_eq!(call!(llama_vocab_bos(model => *const Opaque) -> i32), -1);
    // An invalid model file, and a missing one.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no.gguf");
    std::fs::write(&path, b"GGUF").unwrap();
    for path in [path, folder.path().join("none.gguf")] {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let model = call!(llama_model_load_from_file(path.as_ptr() => *const c_char,
            ModelParams::DEFAULT => ModelParams) -> *mut Opaque);
        assert!(model.is_null());
    }
}

#[test]
fn threads_can_share_a_context() {
    let model = load();
    let context = context(model, |params| params.n_seq_max = 6);
    let prompt = tokenize(model, PROMPT);
    let first = expected(1)[0];
    let (context, prompt) = (context.addr(), &prompt);
    std::thread::scope(|scope| {
        for sequence in 0..6 {
            scope.spawn(move || {
                let context: *mut Opaque = std::ptr::without_provenance_mut(context);
                for _ in 0..20 {
                    call!(llama_memory_seq_rm(context => *mut Opaque, sequence => i32, -1 => i32,
                        -1 => i32) -> bool);
                    let batch = call!(llama_batch_ext_init(context => *mut Opaque) -> *mut Opaque);
                    for (position, &token) in (0i32..).zip(prompt) {
                        let index = call!(llama_batch_ext_add_token(batch => *mut Opaque,
                            sequence => i32, token => i32) -> i32);
                        call!(llama_batch_ext_set_pos(batch => *mut Opaque, index => i32,
                            &raw const position => *const i32) -> bool);
                        call!(llama_batch_ext_set_output_logits(batch => *mut Opaque,
                            index => i32, true => bool) -> bool);
                    }
                    assert_eq!(
                        call!(llama_process(context => *mut Opaque, 1 => c_int,
                        batch => *mut Opaque) -> i32),
                        0
                    );
                    // The last batch may be any thread's: all have the same text.
                    let sampler = call!(llama_sampler_init_greedy() -> *mut Sampler);
                    let token = call!(llama_sampler_sample(sampler => *mut Sampler,
                        context => *mut Opaque, -1 => i32) -> i32);
                    assert_eq!(token, first);
                    call!(llama_batch_ext_free(batch => *mut Opaque));
                    call!(llama_sampler_free(sampler => *mut Sampler));
                }
            });
        }
    });
}

#[test]
fn quantized_files_match_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("ours.gguf");
    let to = std::ffi::CString::new(to.to_str().unwrap()).unwrap();
    let from = path();
    let params = QuantizeParams {
        ftype: 2,
        ..QuantizeParams::DEFAULT
    };
    let quantize = |params: &QuantizeParams| {
        call!(llama_model_quantize(
            from.as_ptr() => *const c_char, to.as_ptr() => *const c_char,
                std::ptr::from_ref(params) => *const QuantizeParams
        ) -> u32)
    };
    assert_eq!(
        quantize(&QuantizeParams {
            ftype: 999,
            ..params
        }),
        1
    );
    assert_eq!(
        quantize(&QuantizeParams {
            only_copy: Flag::new(true),
            ..params
        }),
        1
    );
    let allowed = QuantizeParams {
        allow_requantize: Flag::new(true),
        ..params
    };
    assert_eq!(quantize(&allowed), 0);
    let source = samite_gguf::GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
    let expected = folder.path().join("expected.gguf");
    let options = samite_llm::quantize::QuantizeOptions {
        mixture: "Q4_0".parse().unwrap(),
        types: Default::default(),
        importance: None,
        threads: 1,
        allow_requantize: true,
        pure: false,
        progress: &|_, _| {},
        cancel: &samite_core::CancelToken::new(),
    };
    samite_llm::quantize::quantize(&source, &expected, &options).unwrap();
    let ours = std::fs::read(to.to_str().unwrap()).unwrap();
    assert!(ours == std::fs::read(expected).unwrap());
}

#[test]
fn quantization_uses_importance_and_type_overrides() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("ours.gguf");
    let c = |text: &str| std::ffi::CString::new(text).unwrap();
    let target = c(to.to_str().unwrap());
    let from = path();
    let quantize = |params: &QuantizeParams| {
        call!(llama_model_quantize(
            from.as_ptr() => *const c_char, target.as_ptr() => *const c_char,
                std::ptr::from_ref(params) => *const QuantizeParams
        ) -> u32)
    };
    let [name, pattern, unclosed] = ["blk.0.ffn_up.weight", "attn_[kv]", "("].map(c);
    let columns: Vec<f32> = (0..128).map(|i| (i % 7) as f32).collect();
    let of_weight = |size| ImportanceData {
        name: name.as_ptr(),
        data: columns.as_ptr(),
        size,
    };
    let end = ImportanceData {
        name: std::ptr::null(),
        data: std::ptr::null(),
        size: 0,
    };
    let of_tensors = |pattern: &CStr, dtype| TypeOverride {
        pattern: pattern.as_ptr(),
        dtype,
    };
    let end_of_types = TypeOverride {
        pattern: std::ptr::null(),
        dtype: TYPE_COUNT,
    };
    let importance = [of_weight(columns.len()), end];
    // 8 is Q8_0, and 1 is F16.
    let types = [of_tensors(&pattern, 8), end_of_types];
    let mut overrides = [0; 2].map(|_| KvOverride {
        tag: 3,
        key: [0; 128],
        value: OverrideValue { text: [0; 128] },
    });
    for (to, from) in overrides[0].key.iter_mut().zip(b"general.name") {
        *to = *from as c_char;
    }
    let params = QuantizeParams {
        ftype: 2,
        allow_requantize: Flag::new(true),
        token_embedding_type: 1,
        imatrix: importance.as_ptr(),
        tt_overrides: types.as_ptr(),
        kv_overrides: overrides.as_ptr(),
        ..QuantizeParams::DEFAULT
    };
    assert_eq!(quantize(&params), 0);
    let made = samite_gguf::GgufFile::open(&to, samite_gguf::LoadMode::Read).unwrap();
    let dtype = |name: &str| made.require_tensor(name).unwrap().dtype.name();
    assert_eq!(dtype("blk.1.attn_v.weight"), "q8_0");
    assert_eq!(dtype("token_embd.weight"), "f16");
    assert_eq!(dtype("blk.0.ffn_up.weight"), "q4_0");
    assert_eq!(
        made.metadata().require::<String>("general.name").unwrap(),
        ""
    );
    let bytes = |file: &samite_gguf::GgufFile, name: &str| {
        let info = file.require_tensor(name).unwrap();
        let mut bytes = vec![0; info.size];
        file.read_tensor_into(info, &mut bytes).unwrap();
        bytes
    };
    let weighed = ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"].map(|name| bytes(&made, name));
    drop(made);
    let params = QuantizeParams {
        imatrix: std::ptr::null(),
        ..params
    };
    assert_eq!(quantize(&params), 0);
    let made = samite_gguf::GgufFile::open(&to, samite_gguf::LoadMode::Read).unwrap();
    assert_ne!(bytes(&made, "blk.0.ffn_up.weight"), weighed[0]);
    assert_eq!(bytes(&made, "blk.1.ffn_up.weight"), weighed[1]);
    drop(made);

    let short = [of_weight(5), end];
    let nonsense = [of_tensors(&unclosed, 8), end_of_types];
    let unknown = [of_tensors(&pattern, 999), end_of_types];
    for wrong in [
        QuantizeParams {
            imatrix: short.as_ptr(),
            ..params
        },
        QuantizeParams {
            tt_overrides: nonsense.as_ptr(),
            ..params
        },
        QuantizeParams {
            tt_overrides: unknown.as_ptr(),
            ..params
        },
        QuantizeParams {
            output_tensor_type: -3,
            ..params
        },
    ] {
        assert_eq!(quantize(&wrong), 1);
    }
}

#[test]
fn a_vocabulary_only_model_tokenizes() {
    let path = path();
    let params = ModelParams {
        vocab_only: Flag::new(true),
        ..ModelParams::DEFAULT
    };
    let model = call!(llama_model_load_from_file(path.as_ptr() => *const c_char,
        params => ModelParams) -> *mut Opaque);
    let whole = load();
    assert_eq!(tokenize(model, PROMPT), tokenize(whole, PROMPT));
    for handle in [model, whole] {
        assert_eq!(
            call!(llama_model_n_layer(handle => *const Opaque) -> i32),
            call!(llama_model_n_layer(whole => *const Opaque) -> i32)
        );
    }
    // A context can be created, but computes nothing.
    let context = context(model, |_| {});
    assert_eq!(decode(context, &mut [5]), -1);
}

#[test]
fn a_template_formats_conversations_as_prompts() {
    let chat = [
        ChatMessage {
            role: c"system".as_ptr(),
            content: c"Be kind.".as_ptr(),
        },
        ChatMessage {
            role: c"user".as_ptr(),
            content: c"Hello!".as_ptr(),
        },
    ];
    let apply = |template: *const c_char, buffer: &mut [u8]| {
        call!(llama_chat_apply_template(
            template => *const c_char, chat.as_ptr() => *const ChatMessage,
            2 => usize, true => bool, buffer.as_mut_ptr().cast() => *mut c_char,
            buffer.len() as i32 => i32
        ) -> i32)
    };
    let expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n";
    // Exact length, too short, and with room for the terminator.
    let mut exact = vec![1u8; expected.len()];
    assert_eq!(apply(std::ptr::null(), &mut exact), expected.len() as i32);
    assert_eq!(exact, expected.as_bytes());
    let mut long = vec![1u8; expected.len() + 2];
    assert_eq!(apply(c"chatml".as_ptr(), &mut long), expected.len() as i32);
    assert_eq!(long[expected.len()], 0);
    assert_eq!(
        apply(c"chatml".as_ptr(), &mut [0; 4]),
        expected.len() as i32
    );
    assert_eq!(apply(c"{% for".as_ptr(), &mut long), -1);
}
