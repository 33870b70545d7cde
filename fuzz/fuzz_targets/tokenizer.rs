//! No vocabulary and no text may make a tokenizer of any kind panic or hang, and token ids must be
//! in the vocabulary.
#![no_main]

use libfuzzer_sys::fuzz_target;
use samite_text::{PreTokenizer, Tokenizer, TokenizerModel, VocabData};

/// Separator of the parts of the input; valid texts never contain it.
const END: u8 = 0xFF;

/// Maximum number of bytes used for tokens and merges.
const MOST: usize = 256;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[kind, pre, flags, with_bytes], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let mut parts = rest.split(|&byte| byte == END);
    let text = String::from_utf8_lossy(parts.next().unwrap_or_default());
    let charsmap = parts.next().unwrap_or_default();
    let model = TokenizerModel::ALL[usize::from(kind) % TokenizerModel::ALL.len()];
    let names: Vec<_> = PreTokenizer::names().collect();
    let mut tokens: Vec<Vec<u8>> = Vec::new();
    let mut types = Vec::new();
    let mut merges = Vec::new();
    for part in parts.take(MOST) {
        match part.split_first() {
            Some((&b' ', merge)) => merges.push(merge.to_vec()),
            Some((&kind, token)) if !tokens.iter().any(|other| other == token) => {
                tokens.push(token.to_vec());
                types.push(i32::from(kind % 7));
            }
            _ => {}
        }
    }
    if with_bytes & 1 != 0 {
        for byte in 0..=255 {
            let token = format!("<0x{byte:02X}>").into_bytes();
            if !tokens.contains(&token) {
                tokens.push(token);
                types.push(6);
            }
        }
    }
    let flag = |bit: u8| Some(flags & (1 << bit) != 0);
    let data = VocabData {
        pre: Some(names[usize::from(pre) % names.len()].to_owned()),
        scores: Some(
            (0..tokens.len())
                .map(|id| -((id * 7919 % 31) as f32))
                .collect(),
        ),
        token_types: Some(types),
        merges: (flags & 1 == 0).then_some(merges),
        unk_id: (flags & 2 == 0).then_some(0),
        add_space_prefix: flag(2),
        remove_extra_whitespaces: flag(3),
        treat_whitespace_as_suffix: flag(4),
        lowercase: flag(5),
        strip_accents: flag(6),
        precompiled_charsmap: flag(7).and_then(|is| is.then(|| charsmap.to_vec())),
        ..VocabData::new(model, tokens)
    };
    let tokenizer = match Tokenizer::new(data) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            assert!(!error.to_string().contains('\n'), "an error is one line");
            return;
        }
    };
    for special in [false, true] {
        let ids = tokenizer
            .tokenize(&text, special, special)
            .expect("a short text");
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        tokenizer.detokenize(&ids).expect("ids of the vocabulary");
    }
});
