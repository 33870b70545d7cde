//! Compares small vocabularies with the results of well-known tools; `fixtures/make_fixtures.py`
//! and `fixtures/make_kinds.py` generated them.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use samite_text::Utf8Stream;

mod fixture;
mod kinds;
mod round_trips;

use fixture::{Loaded, load};

/// Linear time takes well under a second for a megabyte; quadratic time would take hours.
const LINEAR: Duration = Duration::from_secs(100);

static ALL: LazyLock<Vec<Loaded>> = LazyLock::new(|| {
    ["gpt-2", "llama-bpe", "qwen2", "spm", "gemma"]
        .into_iter()
        .map(load)
        .collect()
});

#[test]
fn tokens_match_the_reference_tools() {
    for vocab in ALL.iter() {
        assert!(vocab.texts.len() > 40, "{}", vocab.name);
        for case in &vocab.texts {
            let ids = vocab.tokenizer.tokenize(&case.text, false, false).unwrap();
            assert_eq!(ids, case.ids, "{}: {:?}", vocab.name, case.text);
        }
        for case in &vocab.special_texts {
            let ids = vocab.tokenizer.tokenize(&case.text, false, true).unwrap();
            assert_eq!(ids, case.ids, "{}: {:?}", vocab.name, case.text);
        }
    }
}

#[test]
fn control_tokens_in_user_text_are_text() {
    for vocab in &ALL[..3] {
        let begin = vocab.tokenizer.find("<|begin|>").unwrap();
        let ids = vocab.tokenizer.tokenize("<|begin|>", false, false).unwrap();
        assert!(
            !ids.contains(&begin) && ids.len() > 1,
            "{}: {ids:?}",
            vocab.name
        );
        assert_eq!(vocab.tokenizer.detokenize(&ids).unwrap(), b"<|begin|>");
        assert_eq!(vocab.tokenizer.detokenize(&[begin]).unwrap(), b"");
    }
}

/// A quarter of a megabyte of text that makes naive implementations slow: quadratic time would take
/// minutes.
#[test]
fn hostile_texts_take_linear_time() {
    let units = [
        "a",
        " ",
        "\n",
        "\r\n",
        " \n",
        "漢",
        "\u{301}",
        "9",
        "'",
        "' ",
        "'l",
        "!",
        "<",
        "<|begin",
        "<|begin|>",
        "▁",
        "\u{a0}",
        "é",
        "🦀",
    ];
    for vocab in ALL.iter() {
        for unit in units {
            let text = unit.repeat((256 << 10) / unit.len());
            let started = Instant::now();
            let ids = vocab.tokenizer.tokenize(&text, true, false).unwrap();
            let elapsed = started.elapsed();
            assert!(
                elapsed < LINEAR,
                "{}: {unit:?} took {elapsed:?}",
                vocab.name
            );
            if unit != "▁" {
                assert_eq!(
                    vocab.tokenizer.detokenize(&ids).unwrap(),
                    text.as_bytes(),
                    "{}: {unit:?}",
                    vocab.name
                );
            }
        }
        let started = Instant::now();
        vocab
            .tokenizer
            .tokenize(&"<|begin|>".repeat(25_000), true, true)
            .unwrap();
        assert!(started.elapsed() < LINEAR);
    }
}

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z]{1,8}",
        "[ \t\r\n]{1,4}",
        "[0-9]{1,5}",
        "'(s|t|re|ve|m|ll|d|S|RE)",
        "\\PC{1,3}",
        "\\p{M}{1,2}",
        any::<String>(),
    ];
    // SentencePiece writes a space as U+2581, so it decodes to a space.
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat().replace('\u{2581}', ""))
}

proptest! {
    #[test]
    fn any_text_round_trips(text in text(), add_special: bool) {
        for vocab in ALL.iter() {
            let ids = vocab.tokenizer.tokenize(&text, add_special, false).unwrap();
            prop_assert_eq!(
                &vocab.tokenizer.detokenize(&ids).unwrap(),
                text.as_bytes(),
                "{}: {:?}",
                vocab.name,
                &ids
            );
        }
    }

    #[test]
    fn any_tokens_stream_as_valid_text(ids in prop::collection::vec(0..640u32, 0..20)) {
        for vocab in ALL.iter() {
            let mut stream = Utf8Stream::new();
            let mut text = String::new();
            let mut bytes = Vec::new();
            for &id in &ids {
                let piece = vocab.tokenizer.token_to_piece(id, true).unwrap();
                bytes.extend_from_slice(piece);
                text += &stream.push(piece);
            }
            text += stream.flush();
            prop_assert_eq!(&*text, String::from_utf8_lossy(&bytes));
        }
    }
}
