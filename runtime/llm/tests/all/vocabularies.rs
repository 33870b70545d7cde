//! llama.cpp's tests of tokenizers with its own files of complete vocabularies: the texts with
//! known ids (`test-tokenizer-0`), and every token and every code point (`test-tokenizer-1-bpe` and
//! `-spm`). `runtime/text` has small vocabularies of the same families.

use samite_gguf::{GgufFile, LoadMode};
use samite_text::{TokenAttributes, Tokenizer};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const FAMILIES: [&str; 19] = [
    "aquila",
    "baichuan",
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "gpt-neox",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "nomic-bert-moe",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];

/// Separator between two texts of a file.
const SEPARATOR: &str = "\n__ggml_vocab_test__\n";

/// Tests the texts with known ids that come with some vocabularies. Returns their number.
fn known_texts(tokenizer: &Tokenizer, vocabulary: &Path) -> usize {
    let beside = |end: &str| std::fs::read_to_string(vocabulary.with_extension(end)).ok();
    let (Some(texts), Some(ids)) = (beside("gguf.inp"), beside("gguf.out")) else {
        return 0;
    };
    let texts: Vec<_> = texts.split_terminator(SEPARATOR).collect();
    let ids: Vec<Vec<u32>> = ids
        .lines()
        .map(|line| line.split_whitespace().map(|id| id.parse().unwrap()))
        .map(Iterator::collect)
        .collect();
    assert!(texts.len() > 40);
    assert_eq!(ids.len(), texts.len());
    for (text, ids) in texts.iter().zip(ids) {
        assert_eq!(
            tokenizer.tokenize(text, false, false).unwrap(),
            ids,
            "{text:?}"
        );
    }
    texts.len()
}

fn round_trip(tokenizer: &Tokenizer, text: &str) {
    let ids = tokenizer.tokenize(text, false, true).unwrap();
    let back = tokenizer.detokenize(&ids).unwrap();
    assert_eq!(String::from_utf8_lossy(&back), text, "{ids:?}");
}

fn every_token(tokenizer: &Tokenizer) {
    for id in 0..tokenizer.vocab_size() as u32 {
        let control = TokenAttributes::CONTROL.union(TokenAttributes::UNKNOWN);
        if tokenizer.attributes(id).unwrap().intersects(control) {
            let name = str::from_utf8(tokenizer.token_to_piece(id, true).unwrap()).unwrap();
            assert_eq!(
                tokenizer.tokenize(name, false, true).unwrap(),
                [id],
                "{name}"
            );
        } else if let Ok(text) = String::from_utf8(tokenizer.detokenize(&[id]).unwrap()) {
            round_trip(tokenizer, &text);
        }
    }
}

/// Tests every code point. Like upstream, this omits surrogates, planes without characters, and the
/// replacement for a space in SentencePiece vocabularies. It also omits characters with a byte that
/// has no token.
fn every_code_point(tokenizer: &Tokenizer, without_token: &[u8]) {
    let left_out = |c: char| c == '\u{2581}' || ('\u{40001}'..='\u{E0000}').contains(&c);
    for c in ('\0'..=char::MAX).filter(|&c| !left_out(c)) {
        let text = String::from(c);
        if !text.bytes().any(|byte| without_token.contains(&byte)) {
            round_trip(tokenizer, &text);
        }
    }
}

/// Returns the bytes of UTF-8 without a token.
fn bytes_without_token(tokenizer: &Tokenizer) -> Vec<u8> {
    let mut with = [false; 256];
    for id in 0..tokenizer.vocab_size() as u32 {
        if let [byte] = tokenizer.token_to_piece(id, false).unwrap() {
            with[usize::from(*byte)] = true;
        }
    }
    let in_utf8 = |byte: &u8| !matches!(byte, 0xC0 | 0xC1 | 0xF5..);
    (0..=255)
        .filter(in_utf8)
        .filter(|&byte| !with[usize::from(byte)])
        .collect()
}

/// Returns whether this kind normalizes text first.
fn is_lossy(name: &str) -> bool {
    matches!(name, "bert-bge" | "nomic-bert-moe")
}

/// Returns the bytes without a token in llama.cpp's files: control characters, and the first byte
/// of planes with hardly any characters.
fn known_gaps(name: &str) -> &'static [u8] {
    match name {
        "falcon" => &[3, 4, 5, 11, 17, 19, 20, 21, 22, 23, 25, 28, 29, 30, 0xF2],
        "refact" | "starcoder" => &[0xF1],
        _ => &[],
    }
}

#[test]
fn complete_vocabularies_pass_the_upstream_tests() {
    let Some(folder) = std::env::var_os("SAMITE_TEST_VOCABULARIES") else {
        samite_testing::skipped(
            "SAMITE_TEST_VOCABULARIES does not name a folder with ggml-vocab-*.gguf",
        );
        return;
    };
    let known = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for half in FAMILIES.chunks(FAMILIES.len().div_ceil(2)) {
            let known = &known;
            let folder = Path::new(&folder);
            scope.spawn(move || {
                for name in half {
                    let path = folder.join(format!("ggml-vocab-{name}.gguf"));
                    // Shown if the test fails.
                    println!("{name}");
                    let file = GgufFile::open(&path, LoadMode::Read).unwrap();
                    let data = samite_llm::vocab_data(file.metadata()).unwrap().unwrap();
                    let tokenizer = Tokenizer::new(data).unwrap();
                    known.fetch_add(known_texts(&tokenizer, &path), Ordering::Relaxed);
                    if is_lossy(name) {
                        continue;
                    }
                    every_token(&tokenizer);
                    let without_token = bytes_without_token(&tokenizer);
                    assert_eq!(without_token, known_gaps(name), "{name}");
                    every_code_point(&tokenizer, &without_token);
                }
            });
        }
    });
    assert_eq!(known.into_inner(), 694);
}
