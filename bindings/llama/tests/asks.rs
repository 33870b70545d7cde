//! Queries of programs about models, and their use of memory and adapters.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;

use common::*;
use llama::layout::*;
use samite_llm::{SyntheticAdapter, SyntheticModel};
use std::ffi::{CStr, CString, c_char};

/// Returns the result of a call, and the text that it writes to a buffer of `size` bytes.
fn written(size: usize, call: impl Fn(*mut c_char, usize) -> i32) -> (i32, String) {
    let mut buffer = vec![7u8; size + 1];
    let given = call(buffer.as_mut_ptr().cast(), size);
    assert_eq!(buffer[size], 7, "beyond the buffer");
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(size);
    (given, String::from_utf8(buffer[..end].to_vec()).unwrap())
}

#[test]
fn metadata_values_are_returned_as_strings() {
    let model = load();
    let value = |key: &CStr, size| {
        written(size, |buffer, size| {
            call!(llama_model_meta_val_str(model => *const Opaque,
                key.as_ptr() => *const c_char, buffer => *mut c_char, size => usize) -> i32)
        })
    };
    assert_eq!(value(c"general.architecture", 32), (5, "llama".to_owned()));
    // Truncated like `snprintf`, with the full length.
    assert_eq!(value(c"general.architecture", 4), (5, "lla".to_owned()));
    assert_eq!(value(c"no.such.key", 8), (-1, String::new()));
    // Lists are left out; all other values are also available by index.
    assert_eq!(value(c"tokenizer.ggml.tokens", 8), (-1, String::new()));
    let count = call!(llama_model_meta_count(model => *const Opaque) -> i32);
    assert!(count > 10);
    for index in 0..count {
        let (_, key) = written(100, |buffer, size| {
            call!(llama_model_meta_key_by_index(model => *const Opaque,
                index => i32, buffer => *mut c_char, size => usize) -> i32)
        });
        let by_number = written(4000, |buffer, size| {
            call!(llama_model_meta_val_str_by_index(model => *const Opaque,
                index => i32, buffer => *mut c_char, size => usize) -> i32)
        });
        assert_eq!(value(&CString::new(key).unwrap(), 4000), by_number);
    }
    let beyond = written(8, |buffer, size| {
        call!(llama_model_meta_key_by_index(model => *const Opaque, count => i32,
            buffer => *mut c_char, size => usize) -> i32)
    });
    assert_eq!(beyond, (-1, String::new()));
    let epsilon = value(c"llama.attention.layer_norm_rms_epsilon", 32).1;
    assert_eq!(epsilon, "0.000010", "six digits");
}

#[test]
fn model_parameters_match_the_file() {
    let model = load();
    let file = samite_gguf::GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
    let of_file = |key: &str| {
        file.metadata()
            .get::<i32>(&format!("llama.{key}"))
            .unwrap()
            .unwrap()
    };
    assert_eq!(
        call!(llama_model_n_embd(model => *const Opaque) -> i32),
        of_file("embedding_length")
    );
    assert_eq!(
        call!(llama_model_n_layer(model => *const Opaque) -> i32),
        of_file("block_count")
    );
    assert_eq!(
        call!(llama_model_n_head(model => *const Opaque) -> i32),
        of_file("attention.head_count")
    );
    assert_eq!(
        call!(llama_model_n_head_kv(model => *const Opaque) -> i32),
        of_file("attention.head_count_kv")
    );
    assert_eq!(
        call!(llama_model_n_ctx_train(model => *const Opaque) -> i32),
        of_file("context_length")
    );
    assert_eq!(
        call!(llama_model_n_params(model => *const Opaque) -> u64),
        file.tensors().total_elements()
    );
    let bytes: u64 = file.tensors().iter().map(|tensor| tensor.size as u64).sum();
    assert_eq!(
        call!(llama_model_size(model => *const Opaque) -> u64),
        bytes
    );
    assert_eq!(
        call!(llama_model_rope_type(model => *const Opaque) -> i32),
        0
    );
    assert!(!call!(llama_model_is_recurrent(model => *const Opaque) -> bool));
    assert!(!call!(llama_model_is_hybrid(model => *const Opaque) -> bool));
    // SAFETY: names are C strings that stay valid.
    let text = |pointer: *const c_char| unsafe { CStr::from_ptr(pointer) }.to_str().unwrap();
    assert_eq!(
        text(call!(llama_ftype_name(15 => i32) -> *const c_char)),
        "Q4_K - Medium"
    );
    assert_eq!(
        text(call!(llama_ftype_name(1024 + 7 => i32) -> *const c_char)),
        "(guessed) Q8_0"
    );
    assert_eq!(
        text(call!(llama_ftype_name(999 => i32) -> *const c_char)),
        "unknown, may not work"
    );
    assert_eq!(
        call!(llama_load_mode_from_str(c"mmap".as_ptr() => *const c_char) -> i32),
        1
    );
    assert_eq!(
        call!(llama_load_mode_from_str(c"fast".as_ptr() => *const c_char) -> i32),
        -1
    );
    let path = written(64, |buffer, size| {
        call!(llama_split_path(buffer => *mut c_char, size => usize,
            c"/m/a".as_ptr() => *const c_char, 1 => i32, 4 => i32) -> i32)
    });
    assert_eq!(path, (24, "/m/a-00002-of-00004.gguf".to_owned()));
    let path = CString::new(path.1).unwrap();
    let prefix = |number: i32| {
        written(64, |buffer, size| {
            call!(llama_split_prefix(buffer => *mut c_char, size => usize,
                path.as_ptr() => *const c_char, number => i32, 4 => i32) -> i32)
        })
    };
    assert_eq!(prefix(1), (4, "/m/a".to_owned()));
    assert_eq!(prefix(2).0, 0);
}

#[test]
fn models_report_recurrent_and_hybrid_memory() {
    let folder = tempfile::tempdir().unwrap();
    for (name, recurrent, hybrid) in [
        ("mamba", true, false),
        ("falcon-h1", false, true),
        ("llama", false, false),
    ] {
        let path = folder.path().join(name);
        SyntheticModel::tiny(name).write(&path).unwrap();
        let path = CString::new(path.to_str().unwrap()).unwrap();
        let model = call!(llama_model_load_from_file(path.as_ptr() => *const c_char,
            ModelParams::DEFAULT => ModelParams) -> *mut Opaque);
        assert_eq!(
            call!(llama_model_is_recurrent(model => *const Opaque) -> bool),
            recurrent,
            "{name}"
        );
        assert_eq!(
            call!(llama_model_is_hybrid(model => *const Opaque) -> bool),
            hybrid,
            "{name}"
        );
        let context = context(model, |_| {});
        assert_eq!(
            call!(llama_memory_can_shift(context => *mut Opaque) -> bool),
            !recurrent && !hybrid
        );
        assert_eq!(decode(context, &mut [5, 6, 7, 8]), 0);
        // In a KV cache, a part can be removed; in all kinds of memory, everything.
        let remove = |first: i32| {
            call!(llama_memory_seq_rm(context => *mut Opaque, 0 => i32,
            first => i32, -1 => i32) -> bool)
        };
        assert_eq!(remove(2), !recurrent && !hybrid, "{name}");
        assert!(remove(-1));
        assert_eq!(
            call!(llama_memory_seq_pos_max(context => *mut Opaque, 0 => i32) -> i32),
            -1
        );
    }
}

#[test]
fn sequences_can_be_copied_shifted_and_retained() {
    let model = load();
    let context = context(model, |params| params.n_seq_max = 3);
    let ends = |sequence: i32| {
        [
            call!(llama_memory_seq_pos_min(context => *mut Opaque, sequence => i32) -> i32),
            call!(llama_memory_seq_pos_max(context => *mut Opaque, sequence => i32) -> i32),
        ]
    };
    assert_eq!(decode(context, &mut [5, 6, 7, 8, 9, 10]), 0);
    assert_eq!((ends(0), ends(1)), ([0, 5], [-1, -1]));
    call!(llama_memory_seq_cp(context => *mut Opaque, 0 => i32, 1 => i32, -1 => i32, 4 => i32));
    assert_eq!(ends(1), [0, 3]);
    assert!(
        call!(llama_memory_seq_rm(context => *mut Opaque, 0 => i32, 0 => i32, 4 => i32) -> bool)
    );
    assert_eq!((ends(0), ends(1)), ([4, 5], [0, 3]));
    // An empty range contains nothing.
    assert!(
        call!(llama_memory_seq_rm(context => *mut Opaque, 1 => i32, 0 => i32, 0 => i32) -> bool)
    );
    assert_eq!(ends(1), [0, 3]);
    call!(llama_memory_seq_add(context => *mut Opaque, 0 => i32, 4 => i32, -1 => i32, -4 => i32));
    assert_eq!(ends(0), [0, 1]);
    call!(llama_memory_seq_keep(context => *mut Opaque, 1 => i32));
    assert_eq!((ends(0), ends(1)), ([-1, -1], [0, 3]));
    // All sequences at once, and sequences that do not exist.
    assert!(
        call!(llama_memory_seq_rm(context => *mut Opaque, -1 => i32, 2 => i32, -1 => i32) -> bool)
    );
    assert_eq!(ends(1), [0, 1]);
    assert!(
        !call!(llama_memory_seq_rm(context => *mut Opaque, 3 => i32, -1 => i32, -1 => i32) -> bool)
    );
    assert_eq!(ends(7), [-1, -1]);
}

fn logits(context: *mut Opaque) -> Vec<f32> {
    call!(llama_memory_clear(context => *mut Opaque, true => bool));
    assert_eq!(decode(context, &mut [5, 6, 7, 8]), 0);
    let row = call!(llama_get_logits_ith(context => *mut Opaque, -1 => i32) -> *mut f32);
    // SAFETY: the row has more elements.
    unsafe { std::slice::from_raw_parts(row, 32) }.to_vec()
}

#[test]
fn adapters_and_control_vectors_apply_and_can_be_removed() {
    let folder = tempfile::tempdir().unwrap();
    let synthetic = SyntheticModel::tiny("llama");
    let [path, lora] = ["model", "lora"].map(|name| folder.path().join(name));
    synthetic.write(&path).unwrap();
    let mut state = 1u32;
    let next = || {
        state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
        (state >> 16) as f32 / 65536.0 - 0.5
    };
    let adapter = SyntheticAdapter {
        rank: 4,
        alpha: 8.0,
    };
    adapter
        .write(&path, &lora, |name| name.contains("attn_q"), next)
        .unwrap();
    let [path, lora] = [path, lora].map(|path| CString::new(path.to_str().unwrap()).unwrap());
    let model = call!(llama_model_load_from_file(path.as_ptr() => *const c_char,
        ModelParams::DEFAULT => ModelParams) -> *mut Opaque);
    let context = context(model, |_| {});
    let plain = logits(context);
    let adapter = call!(llama_adapter_lora_init(model => *mut Opaque,
        lora.as_ptr() => *const c_char) -> *mut Opaque);
    assert!(!adapter.is_null());
    let set = |count: usize, share: f32| {
        let (mut adapters, mut shares) = ([adapter], [share]);
        call!(llama_set_adapters_lora(
            context => *mut Opaque, adapters.as_mut_ptr() => *mut *mut Opaque, count => usize,
                shares.as_mut_ptr() => *mut f32
        ) -> i32)
    };
    assert_eq!(set(1, 1.0), 0);
    let changed = logits(context);
    assert_ne!(changed, plain);
    assert_eq!(set(1, f32::NAN), -1);
    assert_eq!(logits(context), changed);
    assert_eq!(set(0, 0.0), 0);
    assert_eq!(logits(context), plain);
    let n_embd = call!(llama_model_n_embd(model => *const Opaque) -> i32);
    let n_layer = call!(llama_model_n_layer(model => *const Opaque) -> i32);
    let directions = vec![0.5f32; (n_embd * (n_layer - 1)) as usize];
    let steer = |data: *const f32, width: i32| {
        call!(llama_set_adapter_cvec(
            context => *mut Opaque, data => *const f32, directions.len() => usize, width => i32,
                1 => i32, n_layer => i32
        ) -> i32)
    };
    assert_eq!(steer(directions.as_ptr(), n_embd), 0);
    assert_ne!(logits(context), plain);
    assert_eq!(steer(directions.as_ptr(), n_embd + 1), -1);
    assert_eq!(steer(std::ptr::null(), 0), 0);
    assert_eq!(logits(context), plain);
    // An adapter is freed with its model.
    call!(llama_model_free(model => *mut Opaque));
    assert_eq!(
        call!(llama_adapter_meta_count(adapter => *const Opaque) -> i32),
        0
    );
    assert_eq!(logits(context), plain, "the context keeps what it needs");
}

#[test]
fn token_pieces_strip_the_requested_spaces() {
    let model = load();
    let tokens = tokenize(model, "a time");
    let piece = |token: i32, room: i32, strip: i32, special: bool| {
        let mut buffer = [7u8; 32];
        let length = call!(llama_token_to_piece(
            model => *const Opaque, token => i32, buffer.as_mut_ptr().cast() => *mut c_char,
                room => i32, strip => i32, special => bool
        ) -> i32);
        (length, buffer[..length.max(0) as usize].to_vec())
    };
    let last = *tokens.last().unwrap();
    let (length, whole) = piece(last, 32, 0, false);
    assert_eq!(piece(last, length - 1, 0, false).0, -length);
    if whole.starts_with(b" ") {
        assert_eq!(piece(last, 32, 1, false).1, whole[1..]);
    }
    let space = tokens
        .iter()
        .find(|&&token| piece(token, 32, 0, false).1.starts_with(b" "))
        .unwrap();
    assert_eq!(
        piece(*space, 32, 5, false).0,
        piece(*space, 32, 0, false).0 - 1
    );
    // Control tokens have text only if the caller asks for it.
    let bos = call!(llama_vocab_bos(model => *const Opaque) -> i32);
    assert_eq!(piece(bos, 32, 0, false).0, 0);
    assert!(
        piece(bos, 32, 0, true).0 > 0
            && call!(llama_vocab_is_control(model => *const Opaque, bos => i32) -> bool)
    );
    assert_eq!(
        call!(llama_vocab_get_attr(model => *const Opaque, bos => i32) -> i32),
        1 << 3
    );
}

#[test]
fn without_a_sampler_all_tokens_are_candidates() {
    let model = load();
    let context = context(model, |_| {});
    let vocabulary = call!(llama_model_get_vocab(model => *const Opaque) -> *const Opaque);
    let count = call!(llama_vocab_n_tokens(vocabulary => *const Opaque) -> i32);
    let logits = call!(llama_get_sampled_logits_count_ith(context => *mut Opaque, 0 => i32) -> u32);
    assert_eq!(logits, count as u32);
    let candidates =
        call!(llama_get_sampled_candidates_ith(context => *mut Opaque, 0 => i32) -> *mut i32);
    // SAFETY: the library has an entry for each token.
    let candidates = unsafe { std::slice::from_raw_parts(candidates, count as usize) };
    assert!(candidates.iter().copied().eq(0..count));
}

#[test]
fn ignored_parameters_are_reported() {
    listen_to_all();
    let model = load();
    context(model, |_| {});
    let rotations = "other rotations than the model's";
    assert!(!was_logged(rotations));
    context(model, |params| params.yarn_ext_factor = 0.5);
    assert!(was_logged(rotations));
}
