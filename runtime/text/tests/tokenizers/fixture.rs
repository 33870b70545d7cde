//! Vocabularies with the reference tools' results for texts, written by
//! `fixtures/make_fixtures.py`.

use std::path::Path;

use samite_text::{Tokenizer, TokenizerModel, VocabData};
use serde::Deserialize;

#[derive(Deserialize)]
struct Fixture {
    model: String,
    pre: Option<String>,
    tokens: Vec<String>,
    scores: Option<Vec<f32>>,
    token_types: Vec<i32>,
    merges: Option<Vec<String>>,
    #[serde(default)]
    special_ids: SpecialIds,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    add_space_prefix: Option<bool>,
    remove_extra_whitespaces: Option<bool>,
    lowercase: Option<bool>,
    /// Hexadecimal.
    charsmap: Option<String>,
    texts: Vec<Case>,
    special_texts: Vec<Case>,
    #[serde(default)]
    every_token: Vec<u32>,
    #[serde(default)]
    every_code_point: Vec<u32>,
}

#[derive(Default, Deserialize)]
struct SpecialIds {
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    unk_id: Option<u32>,
    pad_id: Option<u32>,
    sep_id: Option<u32>,
    mask_id: Option<u32>,
}

#[derive(Deserialize)]
pub struct Case {
    pub text: String,
    pub ids: Vec<u32>,
}

pub struct Loaded {
    pub name: &'static str,
    pub tokenizer: Tokenizer,
    pub texts: Vec<Case>,
    pub special_texts: Vec<Case>,
    /// Checksums of the ids of every token's text and of every code point, each for a group.
    pub every_token: Vec<u32>,
    pub every_code_point: Vec<u32>,
}

fn bytes(texts: Vec<String>) -> Vec<Vec<u8>> {
    texts.into_iter().map(String::into_bytes).collect()
}

fn from_hexadecimal(digits: &str) -> Vec<u8> {
    let (pairs, _) = digits.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.iter().map(byte).collect()
}

pub fn load(name: &'static str) -> Loaded {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/tokenizers/fixtures")
        .join(name)
        .with_extension("json");
    let fixture: Fixture =
        serde_json::from_str(&std::fs::read_to_string(path).expect("a fixture beside this file"))
            .expect("valid JSON");
    let data = VocabData {
        pre: fixture.pre,
        scores: fixture.scores,
        token_types: Some(fixture.token_types),
        merges: fixture.merges.map(bytes),
        bos_id: fixture.special_ids.bos_id,
        eos_id: fixture.special_ids.eos_id,
        unk_id: fixture.special_ids.unk_id,
        pad_id: fixture.special_ids.pad_id,
        sep_id: fixture.special_ids.sep_id,
        mask_id: fixture.special_ids.mask_id,
        add_space_prefix: fixture.add_space_prefix,
        remove_extra_whitespaces: fixture.remove_extra_whitespaces,
        lowercase: fixture.lowercase,
        precompiled_charsmap: fixture.charsmap.map(|digits| from_hexadecimal(&digits)),
        add_bos: fixture.add_bos,
        add_eos: fixture.add_eos,
        ..VocabData::new(
            TokenizerModel::from_name(&fixture.model).expect("a known model"),
            bytes(fixture.tokens),
        )
    };
    Loaded {
        name,
        tokenizer: Tokenizer::new(data).expect("a sound vocabulary"),
        texts: fixture.texts,
        special_texts: fixture.special_texts,
        every_token: fixture.every_token,
        every_code_point: fixture.every_code_point,
    }
}
