//! llama.cpp's `test-tokenizer-1-bpe` and `-spm`: every token and every code point, with small
//! vocabularies of nine families. The ids are also compared with those of the reference tools.
//! `runtime/llm` tests whole vocabularies.

use samite_text::{TokenAttributes, Tokenizer};

use crate::fixture::{Loaded, load};

/// Number of texts that share a checksum of their ids.
const TOKENS_TOGETHER: usize = 64;
const CODE_POINTS_TOGETHER: usize = 4096;

/// Returns the code points of llama.cpp's tests: no surrogates, no planes without characters.
fn code_points() -> impl Iterator<Item = char> {
    ('\0'..=char::MAX).filter(|c| !('\u{40001}'..='\u{E0000}').contains(c))
}

/// Returns a text's ids after checking that they decode to the text.
fn round_trip(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let ids = tokenizer.tokenize(text, false, true).unwrap();
    let back = tokenizer.detokenize(&ids).unwrap();
    assert_eq!(String::from_utf8_lossy(&back), text, "{ids:?}");
    ids
}

/// Compares checksums of ids with the reference tools', for groups of texts. Texts without ids were
/// not compared.
fn check(what: &str, ids: impl Iterator<Item = Vec<u32>>, together: usize, expected: &[u32]) {
    let mut sums = vec![0; expected.len()];
    let mut bytes = Vec::new();
    for (index, ids) in ids.enumerate() {
        bytes.clear();
        bytes.extend(
            ids.iter()
                .chain(&[u32::MAX])
                .flat_map(|id| id.to_le_bytes()),
        );
        let sum = &mut sums[index / together];
        let mut hasher = crc32fast::Hasher::new_with_initial(*sum);
        hasher.update(&bytes);
        *sum = hasher.finalize();
    }
    for (index, (sum, expected)) in sums.iter().zip(expected).enumerate() {
        assert_eq!(
            sum,
            expected,
            "one of the {together} {what} from number {}",
            index * together
        );
    }
}

fn every_text(name: &'static str) {
    let Loaded {
        tokenizer,
        texts,
        special_texts,
        every_token,
        every_code_point,
        ..
    } = load(name);
    for (cases, parse_special) in [(&texts, false), (&special_texts, true)] {
        for case in cases {
            let ids = tokenizer.tokenize(&case.text, false, parse_special);
            assert_eq!(ids.unwrap(), case.ids, "{:?}", case.text);
        }
    }
    // SentencePiece treats U+2581 as a space, and drops NUL.
    let left_out: &[_] = match name {
        "baichuan" | "llama" => &["\u{2581}", "\0"],
        _ => &[],
    };

    assert_eq!(
        every_token.len(),
        tokenizer.vocab_size().div_ceil(TOKENS_TOGETHER)
    );
    let tokens = (0..tokenizer.vocab_size() as u32).map(|id| {
        let control = TokenAttributes::CONTROL.union(TokenAttributes::UNKNOWN);
        if tokenizer.attributes(id).unwrap().intersects(control) {
            let name = str::from_utf8(tokenizer.token_to_piece(id, true).unwrap()).unwrap();
            assert_eq!(
                tokenizer.tokenize(name, false, true).unwrap(),
                [id],
                "{name}"
            );
            return Vec::new();
        }
        match String::from_utf8(tokenizer.detokenize(&[id]).unwrap()) {
            Ok(text) if left_out.contains(&&*text) => Vec::new(),
            Ok(text) => round_trip(&tokenizer, &text),
            // An incomplete character.
            Err(_) => Vec::new(),
        }
    });
    check("tokens", tokens, TOKENS_TOGETHER, &every_token);

    let ids = code_points().map(|c| {
        let text = String::from(c);
        if left_out.contains(&&*text) {
            return Vec::new();
        }
        let mut ids = round_trip(&tokenizer, &text);
        // Beyond the first two planes, only Chinese and private-use characters are assigned.
        if c < '\u{20000}' {
            ids.extend(round_trip(&tokenizer, &format!("a{c}1{c}{c} {c}'s")));
        }
        ids
    });
    check("code points", ids, CODE_POINTS_TOGETHER, &every_code_point);
}

macro_rules! families {
    ($($test:ident: $name:literal),* $(,)?) => {
        $(#[test]
        fn $test() {
            every_text($name);
        })*
    };
}

families! {
    aquila: "aquila",
    baichuan: "baichuan",
    falcon: "falcon",
    gpt_neox: "gpt-neox",
    llama: "llama",
    mpt: "mpt",
    refact: "refact",
    stablelm: "stablelm",
    starcoder: "starcoder",
}
