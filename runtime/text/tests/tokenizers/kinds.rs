//! Tokenizer kinds other than byte-level BPE and SentencePiece's BPE.

use std::time::Instant;

use proptest::prelude::*;
use samite_text::{Tokenizer, TokenizerModel, VocabData};

use crate::LINEAR;
use crate::fixture::load;

#[test]
fn tokens_match_the_reference_tools() {
    for name in ["bert", "bert-cased", "gemma", "t5", "whitespace"] {
        let vocab = load(name);
        assert!(vocab.texts.len() > 40, "{name}");
        for case in &vocab.texts {
            let ids = vocab.tokenizer.tokenize(&case.text, false, false).unwrap();
            assert_eq!(ids, case.ids, "{name}: {:?}", case.text);
        }
    }
}

fn data(model: TokenizerModel, tokens: &[(&str, f32, i32)]) -> VocabData {
    let texts = tokens.iter().map(|token| token.0.as_bytes().to_vec());
    let mut data = VocabData::new(model, texts.collect());
    data.scores = Some(tokens.iter().map(|token| token.1).collect());
    data.token_types = Some(tokens.iter().map(|token| token.2).collect());
    data
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.tokenize(text, false, false).unwrap()
}

#[test]
fn special_tokens_are_added_per_kind() {
    let bert = load("bert").tokenizer;
    let tokens = bert.tokenize("", true, false).unwrap();
    assert_eq!(tokens, [2, 3]);
    assert!(bert.adds_bos() && bert.adds_sep() && !bert.adds_eos());
    assert_eq!(bert.tokenize("[MASK]", false, true).unwrap(), [4]);
    let t5 = load("t5").tokenizer;
    assert_eq!(t5.tokenize("", true, false).unwrap(), [1]);
    assert!(t5.adds_eos() && !t5.adds_bos() && !t5.adds_sep());

    // Gemma 4 always adds a begin-of-text token, whatever its file says.
    let mut gemma = data(TokenizerModel::Gemma4, &[("<bos>", 0.0, 3), ("a", 0.0, 1)]);
    gemma.merges = Some(Vec::new());
    gemma.bos_id = Some(0);
    gemma.add_bos = Some(false);
    let gemma = Tokenizer::new(gemma).unwrap();
    assert_eq!(gemma.tokenize("a", true, false).unwrap(), [0, 1]);
}

#[test]
fn bert_detokenizes_with_spaces_between_words() {
    let bert = load("bert").tokenizer;
    let tokens = ids(&bert, "Hello,  WÖRLD");
    assert_eq!(bert.detokenize(&tokens).unwrap(), b"hello , world");
    // A word is unknown as a whole if any part has no token; so is a long one.
    assert_eq!(
        ids(&bert, "weave\u{1F9F5}r a"),
        [1, *ids(&bert, "a").first().unwrap()]
    );
    assert_eq!(ids(&bert, &"a".repeat(101)), [1]);
    assert!(ids(&bert, &"a".repeat(100)).len() > 1);
}

#[test]
fn t5_can_leave_a_character_unknown_for_a_better_score() {
    let tokens = [
        ("<pad>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("<unk>", 0.0, 2),
        ("ab", -100.0, 1),
        ("bx", -1.0, 1),
    ];
    let t5 = Tokenizer::new(data(TokenizerModel::T5, &tokens)).unwrap();
    assert_eq!(ids(&t5, "abx"), [2, 4]);
    assert_eq!(ids(&t5, "ab"), [3]);
}

#[test]
fn rwkv_takes_the_longest_token() {
    let tokens = [
        ("<s>", 0.0, 3),
        ("a", 0.0, 1),
        ("ab", 0.0, 1),
        ("abcd", 0.0, 1),
        (r"\n", 0.0, 1),
        (r"\xc3", 0.0, 1),
        ("\\'\\\\", 0.0, 1),
        ("c", 0.0, 1),
        ("b", 0.0, 1),
    ];
    let mut data = data(TokenizerModel::Rwkv, &tokens);
    data.unk_id = Some(0);
    let rwkv = Tokenizer::new(data).unwrap();
    assert_eq!(ids(&rwkv, "abcabcd\n"), [2, 7, 3, 4]);
    // A byte without a token is unknown by itself.
    assert_eq!(ids(&rwkv, "é'\\"), [5, 0, 6]);
    assert_eq!(rwkv.detokenize(&[3, 4, 6, 5]).unwrap(), b"abcd\n'\\\xC3");
    assert_eq!(rwkv.newline(), Some(4));
}

fn bytes() -> Vec<(String, f32, i32)> {
    (0..=255)
        .map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6))
        .collect()
}

fn plamo2(tokens: &[(&str, f32)]) -> Tokenizer {
    let mut all = bytes();
    all.extend(
        tokens
            .iter()
            .map(|&(text, score)| (text.to_owned(), score, 1)),
    );
    let all: Vec<(&str, f32, i32)> = all
        .iter()
        .map(|token| (&*token.0, token.1, token.2))
        .collect();
    Tokenizer::new(data(TokenizerModel::Plamo2, &all)).unwrap()
}

#[test]
fn plamo2_minimizes_the_total_cost() {
    let plamo = plamo2(&[
        ("a", -3.0),
        ("b", -3.0),
        ("ab", -7.0),
        ("abb", -8.9),
        ("漢字", -5.0),
    ]);
    assert_eq!(ids(&plamo, "ab"), [256, 257]);
    assert_eq!(ids(&plamo, "abb"), [259]);
    // Among equal costs, the longest token.
    let equal = plamo2(&[("a", -3.0), ("b", -4.0), ("ab", -7.0)]);
    assert_eq!(ids(&equal, "ab"), [258]);
    // Falls back to bytes where no token matches; drops a byte order mark at the start.
    assert_eq!(
        ids(&plamo, "\u{FEFF}é漢字\u{FEFF}"),
        [0xC3, 0xA9, 260, 0xEF, 0xBB, 0xBF]
    );
    assert_eq!(
        plamo.detokenize(&ids(&plamo, "é漢字")).unwrap(),
        "é漢字".as_bytes()
    );
    let error = Tokenizer::new(data(TokenizerModel::Plamo2, &[("a", 0.0, 1)])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokenizer.ggml.tokens: no token <0x00>; the 'plamo2' tokenizer needs one for each byte"
    );
}

#[test]
fn dna_is_tokenized_in_groups_of_six() {
    let tokens = [
        ("<dna>", 0.0, 1),
        ("</dna>", 0.0, 1),
        ("<oov>", 0.0, 1),
        ("ACGTAC\u{E000}", 0.0, 1),
        ("GTAAAA\u{E000}", 0.0, 1),
        ("A", 0.0, 1),
        ("C", 0.0, 1),
        ("AC", 0.0, 1),
        ("x", 0.0, 1),
    ];
    let mut data = data(TokenizerModel::HybridDna, &tokens);
    data.merges = Some(vec![b"A C".to_vec()]);
    data.pre = Some("gpt-2".to_owned());
    let dna = Tokenizer::new(data.clone()).unwrap();
    // The rest is padded with A; case does not matter; other letters are unknown.
    assert_eq!(ids(&dna, "AC<dna>acgtacgt</dna>x"), [7, 0, 3, 4, 1, 8]);
    assert_eq!(ids(&dna, "<dna>ACGNAC<dna>"), [0, 2, 2]);
    assert_eq!(ids(&dna, "x<dna>é"), [8, 0, 2]);
    assert_eq!(dna.detokenize(&[0, 3, 1]).unwrap(), b"<dna>ACGTAC</dna>");
    // Without one of the tags it is ordinary text.
    data.tokens[2] = b"oov".to_vec();
    assert_eq!(ids(&Tokenizer::new(data).unwrap(), "<dna>AC"), [7]);
}

#[test]
fn tiktoken_vocabularies_need_no_merges() {
    let tokens = ["a", "b", "c", "ab", "bc", "abc", "d"].map(|text| (text, 0.0, 1));
    let mut data = data(TokenizerModel::Gpt2, &tokens);
    data.pre = Some("gpt-2".to_owned());
    assert!(
        Tokenizer::new(data.clone())
            .unwrap_err()
            .to_string()
            .starts_with("tokenizer.ggml.merges")
    );
    data.pre = Some("kimi-k2".to_owned());
    let kimi = Tokenizer::new(data).unwrap();
    assert_eq!(ids(&kimi, "abcbcabd"), [5, 4, 3, 6]);
}

#[test]
fn white_space_before_a_mask_depends_on_the_pre_tokenizer() {
    let tokens = [("<mask>", 0.0, 3), ("a", 0.0, 1), ("\u{120}", 0.0, 1)];
    let mut data = data(TokenizerModel::Gpt2, &tokens);
    data.merges = Some(Vec::new());
    data.pre = Some("jina-v2-code".to_owned());
    let jina = Tokenizer::new(data.clone()).unwrap();
    assert_eq!(
        jina.tokenize("a  <mask> a", false, true).unwrap(),
        [1, 0, 2, 1]
    );
    assert!(jina.adds_sep());
    data.pre = Some("gpt-2".to_owned());
    let plain = Tokenizer::new(data).unwrap();
    assert_eq!(
        plain.tokenize("a  <mask> a", false, true).unwrap(),
        [1, 2, 2, 0, 2, 1]
    );
    assert!(!plain.adds_sep());
}

#[test]
fn suppressed_and_fill_in_tokens_are_listed() {
    let mut data = data(
        TokenizerModel::Llama,
        &[
            ("<unk>", 0.0, 2),
            ("<fim_suffix>", 0.0, 1),
            ("a", 0.0, 1),
            ("<PRE>", 0.0, 1),
        ],
    );
    data.suppress_tokens = vec![2, -1, 70, 0, 2];
    data.fim_middle_id = Some(2);
    let tokenizer = Tokenizer::new(data.clone()).unwrap();
    assert_eq!(tokenizer.suppressed(), [0, 2]);
    assert_eq!(tokenizer.fill_in(), [Some(3), Some(1), Some(2)]);
    data.fim_suffix_id = Some(4);
    let error = Tokenizer::new(data).unwrap_err().to_string();
    assert!(
        error.starts_with("tokenizer.ggml.fim_suf_token_id: token id 4"),
        "{error}"
    );
}

/// Returns the minimum cost of a text over all segmentations.
fn cheapest(text: &[char], costs: &[(&str, i64)]) -> i64 {
    let mut best = vec![i64::MAX; text.len() + 1];
    best[text.len()] = 0;
    for start in (0..text.len()).rev() {
        best[start] = 10_000_000 + best[start + 1];
        for &(token, cost) in costs {
            let token: Vec<char> = token.chars().collect();
            if text[start..].starts_with(&token) {
                best[start] = best[start].min(cost + best[start + token.len()]);
            }
        }
    }
    best[0]
}

proptest! {
    #[test]
    fn plamo2_finds_the_cheapest_segmentation(
        tokens in prop::collection::btree_map("[abé]{1,4}", -90i64..0, 1..12),
        text in "[abcé]{0,24}",
    ) {
        let scores: Vec<(&str, f32)> = tokens
            .iter()
            .map(|(text, &score)| (&**text, score as f32 / 10.0))
            .collect();
        let costs: Vec<(&str, i64)> = tokens
            .iter()
            .map(|(text, &score)| (&**text, -score * 1000))
            .collect();
        let plamo = plamo2(&scores);
        let found = ids(&plamo, &text);
        prop_assert_eq!(plamo.detokenize(&found).unwrap(), text.as_bytes());
        let mut cost = 0;
        let mut unknown = Vec::new();
        for id in found {
            match (id as usize).checked_sub(256) {
                Some(index) => cost += costs[index].1,
                None => unknown.push(id as u8),
            }
        }
        cost += 10_000_000 * String::from_utf8(unknown).unwrap().chars().count() as i64;
        prop_assert_eq!(cost, cheapest(&text.chars().collect::<Vec<_>>(), &costs));
    }

    #[test]
    fn text_never_panics(
        text in any::<String>(),
        marks in "[\\p{M}▁ a\0\u{1F9F5}漢<>\n]{0,20}",
    ) {
        for name in ["bert", "bert-cased", "gemma", "t5", "whitespace"] {
            let tokenizer = load_once(name);
            for text in [&text, &marks] {
                let found = tokenizer.tokenize(text, true, true).unwrap();
                tokenizer.detokenize(&found).unwrap();
            }
        }
    }
}

fn load_once(name: &str) -> &'static Tokenizer {
    static ALL: std::sync::LazyLock<Vec<(&str, Tokenizer)>> = std::sync::LazyLock::new(|| {
        ["bert", "bert-cased", "gemma", "t5", "whitespace"]
            .map(|name| (name, load(name).tokenizer))
            .into()
    });
    &ALL.iter().find(|entry| entry.0 == name).unwrap().1
}

/// A megabyte of text that makes naive implementations slow.
#[test]
fn hostile_texts_take_linear_time() {
    let rwkv = data(
        TokenizerModel::Rwkv,
        &[("a", 0.0, 1), ("aaaaaaaaaaaaaaaab", 0.0, 1)],
    );
    let mut kinds = vec![
        ("rwkv", Tokenizer::new(rwkv).unwrap()),
        ("plamo2", plamo2(&[("a", -1.0), ("aaaaaaaaaaaaaaaa", -2.0)])),
    ];
    kinds.extend(
        ["bert", "bert-cased", "gemma", "t5", "whitespace"]
            .map(|name| (name, load(name).tokenizer)),
    );
    for (name, tokenizer) in &kinds {
        for unit in [
            "a",
            " ",
            "\n",
            "漢",
            "\u{301}",
            "\u{301}\u{323}",
            "\0",
            "<0x41>",
            "▁",
            "a ",
            "İ",
            "<dna>",
            "e\u{301}",
        ] {
            let text = unit.repeat((1 << 20) / unit.len());
            let started = Instant::now();
            tokenizer.tokenize(&text, true, true).unwrap();
            let elapsed = started.elapsed();
            assert!(elapsed < LINEAR, "{name}: {unit:?} took {elapsed:?}");
        }
    }
}
