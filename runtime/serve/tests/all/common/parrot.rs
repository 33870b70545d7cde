//! A model that generates a chosen text.

use super::cpu;
use samite_core::DType;
use samite_gguf::{GgufFile, KEY_ARCHITECTURE, Metadata, StringArray, TensorSpec, Value, Writer};
use samite_llm::{Model, ModelOptions};
use std::sync::Arc;

/// Special tokens; byte tokens follow, then the pieces of the text.
const SPECIAL: [&str; 3] = ["<unk>", "<s>", "</s>"];
const END: usize = 2;
const PIECES: usize = SPECIAL.len() + 256;

/// Splits a text into distinct pieces of at least three characters. The tokenizer could merge
/// shorter ones from the characters of a prompt.
fn pieces(text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut piece = String::new();
    for character in text.chars() {
        piece.push(character);
        if piece.chars().count() >= 3 && !pieces.contains(&piece) {
            pieces.push(std::mem::take(&mut piece));
        }
    }
    match pieces.last_mut() {
        Some(last) => *last += &piece,
        None => pieces.push(piece),
    }
    pieces
}

/// Creates a model that generates `text` after any prompt, and then ends. The next token depends on
/// the last one only. A layer without effect connects the embedding of each piece, a unit vector,
/// with the output, whose rows are the unit vectors of the preceding pieces.
pub fn parrot(text: &str) -> (Arc<Model>, usize) {
    let pieces = pieces(text);
    let n_vocab = PIECES + pieces.len();
    // Dimension 0 represents every token that is not a piece.
    let n_embd = (pieces.len() + 1).next_multiple_of(32);
    let mut metadata = Metadata::new();
    let mut set = |key: &str, value: Value| metadata.set(key, value).unwrap();
    set(KEY_ARCHITECTURE, "llama".into());
    for (key, value) in [
        ("llama.context_length", super::CONTEXT),
        ("llama.block_count", 1),
        ("llama.embedding_length", n_embd),
        ("llama.feed_forward_length", 32),
        ("llama.attention.head_count", 1),
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", END),
        ("tokenizer.ggml.unknown_token_id", 0),
    ] {
        set(key, (value as u32).into());
    }
    set("llama.attention.layer_norm_rms_epsilon", 1e-5f32.into());
    set("tokenizer.ggml.model", "llama".into());
    set("tokenizer.ggml.add_space_prefix", false.into());
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let texts = SPECIAL.map(str::to_owned).into_iter().chain(bytes);
    let texts = texts.chain(pieces.iter().map(|piece| piece.replace(' ', "▁")));
    set(
        "tokenizer.ggml.tokens",
        texts.collect::<StringArray>().into(),
    );
    set("tokenizer.ggml.scores", vec![0.0f32; n_vocab].into());
    let kinds = [2i32, 3, 3].into_iter().chain([6; 256]);
    let kinds = kinds.chain(std::iter::repeat_n(1, pieces.len()));
    set(
        "tokenizer.ggml.token_type",
        kinds.collect::<Vec<_>>().into(),
    );

    let mut embedding = vec![0.0f32; n_vocab * n_embd];
    let mut output = vec![0.0f32; n_vocab * n_embd];
    for token in 0..n_vocab {
        let dimension = (token + 1).saturating_sub(PIECES);
        embedding[token * n_embd + dimension] = 1.0;
        if let Some(before) = token.checked_sub(PIECES) {
            output[token * n_embd + before] = 100.0;
        }
    }
    output[END * n_embd + pieces.len()] = 100.0;
    let square = || vec![0.0; n_embd * n_embd];
    let wide = || vec![0.0; n_embd * 32];
    let tensors = [
        ("token_embd.weight", vec![n_embd, n_vocab], embedding),
        ("output_norm.weight", vec![n_embd], vec![1.0; n_embd]),
        ("output.weight", vec![n_embd, n_vocab], output),
        ("blk.0.attn_norm.weight", vec![n_embd], vec![1.0; n_embd]),
        ("blk.0.attn_q.weight", vec![n_embd, n_embd], square()),
        ("blk.0.attn_k.weight", vec![n_embd, n_embd], square()),
        ("blk.0.attn_v.weight", vec![n_embd, n_embd], square()),
        ("blk.0.attn_output.weight", vec![n_embd, n_embd], square()),
        ("blk.0.ffn_norm.weight", vec![n_embd], vec![1.0; n_embd]),
        ("blk.0.ffn_gate.weight", vec![n_embd, 32], wide()),
        ("blk.0.ffn_up.weight", vec![n_embd, 32], wide()),
        ("blk.0.ffn_down.weight", vec![32, n_embd], wide()),
    ];
    let specs = tensors
        .iter()
        .map(|(name, dims, _)| TensorSpec::new(name, DType::F32, dims));
    let specs = specs.map(Result::unwrap).collect();
    let mut writer = Writer::new(Vec::new(), &metadata, specs).unwrap();
    for (_, _, values) in &tensors {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value: &f32| value.to_le_bytes())
            .collect();
        writer.append(&bytes).unwrap();
    }
    let file = GgufFile::from_bytes("parrot", writer.finish().unwrap().into()).unwrap();
    let model = Model::from_gguf(&file, &ModelOptions::new(vec![cpu()])).unwrap();
    (model, pieces.len())
}
