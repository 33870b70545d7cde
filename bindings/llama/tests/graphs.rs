//! Embeddings as inputs, and evaluation callbacks.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;

use common::*;
use llama::layout::*;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::sync::Mutex;

const PROMPT: &str = "Once upon a time there was a dog";

/// Returns a matrix of the model in row order, and the row length.
fn matrix(name: &str) -> (Vec<f32>, usize) {
    let file = samite_gguf::GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
    // With tied embeddings, both names refer to the same tensor.
    let tied = "token_embd.weight";
    let info = file.tensor(name).or_else(|| file.tensor(tied)).unwrap();
    let mut bytes = vec![0; info.size];
    file.read_tensor_into(info, &mut bytes).unwrap();
    let width = info.shape[0];
    let mut values = vec![0.0; info.shape.iter().product()];
    samite_quant::decode_row(info.dtype, &bytes, &mut values).unwrap();
    (values, width)
}

fn logits(context: *mut Opaque, model: *mut Opaque) -> Vec<f32> {
    let count = call!(llama_vocab_n_tokens(model => *const Opaque) -> i32) as usize;
    let row = call!(llama_get_logits_ith(context => *mut Opaque, -1 => i32) -> *const f32);
    assert!(!row.is_null());
    // SAFETY: a row has this length.
    unsafe { std::slice::from_raw_parts(row, count) }.to_vec()
}

#[test]
fn embedding_inputs_match_token_inputs() {
    let model = load();
    let mut tokens = tokenize(model, PROMPT);
    let (table, width) = matrix("token_embd.weight");
    let row = |token: i32| &table[token as usize * width..][..width];
    let by_tokens = context(model, |_| {});
    assert_eq!(decode(by_tokens, &mut tokens), 0);
    let expected = logits(by_tokens, model);

    // A caller's plain batch.
    let by_rows = context(model, |_| {});
    let (n, w) = (tokens.len() as i32, width as i32);
    let mut batch = call!(llama_batch_init(n => i32, w => i32, 1 => i32) -> Batch);
    batch.n_tokens = n;
    for (index, &token) in tokens.iter().enumerate() {
        // SAFETY: the batch has room for `n` of each, and for `width` elements of each embedding.
        unsafe {
            batch
                .embd
                .add(index * width)
                .copy_from(row(token).as_ptr(), width);
            batch.pos.add(index).write(index as i32);
            batch.n_seq_id.add(index).write(1);
            (*batch.seq_id.add(index)).write(0);
            batch
                .logits
                .add(index)
                .write(i8::from(index + 1 == tokens.len()));
        }
    }
    assert_eq!(
        call!(llama_decode(by_rows => *mut Opaque, batch => Batch) -> i32),
        0
    );
    assert_eq!(logits(by_rows, model), expected);

    // The extended interface; a token may follow in a separate batch.
    let extended = context(model, |_| {});
    let list = call!(llama_batch_ext_init(extended => *mut Opaque) -> *mut Opaque);
    let embedding = |token: i32| Embd {
        data: row(token).as_ptr(),
        n_rows: 1,
        n_embd: width,
    };
    let (last, first) = tokens.split_last().unwrap();
    for (index, &token) in first.iter().enumerate() {
        let place = match index {
            0 => {
                let place = call!(llama_batch_ext_add(list => *mut Opaque, 0 => i32) -> i32);
                assert!(
                    call!(llama_batch_ext_set_embd_token(list => *mut Opaque, place => i32,
                        embedding(token) => Embd) -> bool)
                );
                place
            }
            _ => {
                call!(llama_batch_ext_add_embd(list => *mut Opaque, 0 => i32,
                    embedding(token) => Embd) -> i32)
            }
        };
        assert_eq!(place, index as i32);
    }
    let wrong = Embd {
        n_embd: width + 1,
        ..embedding(1)
    };
    assert_eq!(
        call!(llama_batch_ext_add_embd(list => *mut Opaque, 0 => i32, wrong => Embd) -> i32),
        -2
    );
    assert_eq!(
        call!(llama_process(extended => *mut Opaque, 0 => i32, list => *mut Opaque) -> i32),
        0
    );
    assert_eq!(decode(extended, &mut [*last]), 0);
    let found = logits(extended, model);
    let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
    assert!(found.iter().zip(&expected).all(near));

    // An empty item is refused; both kinds can be in one batch.
    call!(llama_batch_ext_clear(list => *mut Opaque));
    call!(llama_batch_ext_add(list => *mut Opaque, 0 => i32) -> i32);
    assert_eq!(
        call!(llama_process(extended => *mut Opaque, 0 => i32, list => *mut Opaque) -> i32),
        -1
    );
    call!(llama_batch_ext_clear(list => *mut Opaque));
    call!(llama_batch_ext_add_embd(list => *mut Opaque, 0 => i32, embedding(1) => Embd) -> i32);
    call!(llama_batch_ext_add_token(list => *mut Opaque, 0 => i32, 1 => i32) -> i32);
    assert_eq!(
        call!(llama_process(extended => *mut Opaque, 0 => i32, list => *mut Opaque) -> i32),
        0
    );
    call!(llama_batch_ext_free(list => *mut Opaque));
    call!(llama_batch_free(batch => Batch));
    for gone in [by_tokens, by_rows, extended] {
        call!(llama_free(gone => *mut Opaque));
    }
    call!(llama_model_free(model => *mut Opaque));
}

/// Nodes that a caller saw.
#[derive(Default)]
struct Saw {
    /// Queried nodes, in order.
    asked: Vec<String>,
    /// Values by name; for products, the activations.
    values: BTreeMap<String, Vec<f32>>,
    operands: BTreeMap<String, Vec<f32>>,
    /// Weights of products.
    weights: BTreeMap<String, String>,
    /// Node at which the callback stops.
    stops_at: Option<&'static str>,
}

fn name(tensor: &GgmlTensor) -> String {
    // SAFETY: names are C strings.
    let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) };
    name.to_str().unwrap().to_owned()
}

fn floats(tensor: &GgmlTensor) -> Vec<f32> {
    assert_eq!((tensor.dtype, tensor.nb[0]), (0, 4));
    let count = tensor.ne.iter().product::<i64>() as usize;
    assert_eq!(tensor.nb[3] * tensor.ne[3] as usize, 4 * count);
    // SAFETY: the tensor is contiguous, as its strides show.
    unsafe { std::slice::from_raw_parts(tensor.data.cast::<f32>(), count) }.to_vec()
}

unsafe extern "C" fn look(tensor: *mut c_void, is_query: bool, data: *mut c_void) -> bool {
    // SAFETY: the test passes this data, and the library passes a tensor.
    let (saw, tensor) = unsafe { (&*data.cast::<Mutex<Saw>>(), &*tensor.cast::<GgmlTensor>()) };
    let mut saw = saw.lock().unwrap();
    let (name, is_product) = (name(tensor), tensor.op == 29);
    if is_query {
        assert!(tensor.data.is_null());
        saw.asked.push(name.clone());
        // Products, and the norms before them.
        return is_product || name.contains("norm");
    }
    if tensor.dtype == 0 && !is_product {
        saw.values.insert(name.clone(), floats(tensor));
    }
    if is_product {
        // SAFETY: a product has two operands.
        let (weight, x) = unsafe { (&*tensor.src[0], &*tensor.src[1]) };
        assert_eq!(weight.ne[0], x.ne[0], "{name}");
        saw.weights.insert(name.clone(), self::name(weight));
        if !x.data.is_null()
            && x.nb[0] == 4
            && x.nb[3] == x.nb[0] * (x.ne[0] * x.ne[1] * x.ne[2]) as usize
        {
            saw.operands.insert(name.clone(), floats(x));
            saw.values.insert(name.clone(), floats(tensor));
        }
    }
    saw.stops_at.is_none_or(|stop| name != stop)
}

#[test]
fn eval_callbacks_see_nodes_and_their_operands() {
    let model = load();
    let mut tokens = tokenize(model, PROMPT);
    let plain = context(model, |_| {});
    assert_eq!(decode(plain, &mut tokens), 0);
    let saw = Mutex::new(Saw::default());
    let watched = context(model, |params| {
        params.cb_eval = Some(look);
        params.cb_eval_user_data = (&raw const saw).cast_mut().cast();
    });
    assert_eq!(decode(watched, &mut tokens), 0);
    let (expected, found) = (logits(plain, model), logits(watched, model));
    let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
    assert!(found.iter().zip(&expected).all(near));
    {
        let saw = saw.lock().unwrap();
        let times = |wanted: &str| saw.asked.iter().filter(|name| *name == wanted).count();
        assert_eq!([times("result_output"), times("result_norm")], [1, 1]);
        assert_eq!(saw.values["result_output"], found);
        assert!(
            saw.values.contains_key("result_norm"),
            "{:?}",
            saw.values.keys()
        );
        assert!(!saw.values.contains_key("l_out-0"), "nobody wanted it");
        // Every product of a layer is shown with its weights' name and its activations, and has the
        // correct value.
        let mut products = 0;
        for (name, x) in &saw.operands {
            if !saw.weights[name].ends_with(".weight") {
                continue;
            }
            let (weights, width) = matrix(&saw.weights[name]);
            let row = weights.chunks_exact(width);
            let y: Vec<f64> = row
                .map(|row| row.iter().zip(x).map(|(a, b)| f64::from(a * b)).sum())
                .collect();
            let first = &saw.values[name][..y.len()];
            // The device quantizes activations to eight bits.
            let largest = y.iter().fold(0.0, |most: f64, y| most.max(y.abs()));
            let is_near = |(a, b): (&f64, &f32)| (a - f64::from(*b)).abs() < 0.05 * largest;
            assert!(y.iter().zip(first).all(is_near), "{name}: {y:?} {first:?}");
            products += 1;
        }
        assert!(products >= 5 * 7, "{products}: {:?}", saw.operands.keys());
    }
    // A caller stops, and nothing of the batch remains in the cache.
    saw.lock().unwrap().stops_at = Some("result_norm");
    let before = call!(llama_memory_seq_pos_max(watched => *mut Opaque, 0 => i32) -> i32);
    assert_eq!(decode(watched, &mut [1]), 2);
    assert_eq!(
        call!(llama_memory_seq_pos_max(watched => *mut Opaque, 0 => i32) -> i32),
        before
    );
    saw.lock().unwrap().stops_at = None;
    assert_eq!(decode(watched, &mut [1]), 0);
    for gone in [plain, watched] {
        call!(llama_free(gone => *mut Opaque));
    }
    call!(llama_model_free(model => *mut Opaque));
}
