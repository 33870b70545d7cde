//! Vocabularies for both libraries: trained by the crate `tokenizers` on some text, and passed to
//! samite as from a GGUF file.

use samite_text::{TokenizerModel, VocabData};
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, Tokenizer};

/// A vocabulary, in both libraries.
pub struct Pair {
    pub name: &'static str,
    pub theirs: Tokenizer,
    pub ours: samite_text::Tokenizer,
}

/// Pre-tokenizer expressions as in the models' `tokenizer.json`, pass by pass, and a flag that
/// whole words ignore merges.
pub const EXPRESSIONS: &[(&str, &[&str], bool)] = &[
    ("gpt-2", &[GPT2], false),
    ("llama-bpe", &[LLAMA3], true),
    ("glm4", &[LLAMA3], true),
    ("qwen2", &[QWEN2], false),
    (
        "qwen35",
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        false,
    ),
    ("gpt-4o", &[GPT4O], false),
    (
        "tekken",
        &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        true,
    ),
    (
        "kimi-k2",
        &[
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        false,
    ),
    (
        "deepseek-v3",
        &[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK],
        false,
    ),
    (
        "bailingmoe",
        &[
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
        false,
    ),
    ("tiny_aya", &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O], false),
    ("superbpe", &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"], false),
    ("starcoder", &[r"\p{N}", GPT2], false),
    ("bloom", &[r" ?[^(\s|[.,!?…。，、।۔،])]+"], false),
    (
        "deepseek-coder",
        &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        ],
        false,
    ),
];

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false})
}

fn isolated(expression: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated",
        "invert": false})
}

/// Creates a tokenizer of the crate `tokenizers`, as from `tokenizer.json`.
fn theirs(model: &Value, normalizer: Value, pre_tokenizer: Value) -> Tokenizer {
    let whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model,
    });
    whole.to_string().parse().expect("a tokenizer")
}

/// Trains a model and returns its part of `tokenizer.json`.
fn train(
    model: impl Into<ModelWrapper>,
    trainer: impl Into<TrainerWrapper>,
    normalizer: Value,
    pre_tokenizer: Value,
    texts: &[&str],
) -> Value {
    let config = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    });
    let mut tokenizer: Tokenizer = config.to_string().parse().expect("a tokenizer");
    tokenizer.with_model(model);
    let lines = texts
        .iter()
        .flat_map(|text| text.split_inclusive('\n'))
        .map(str::to_owned);
    tokenizer
        .train(&mut trainer.into(), lines)
        .expect("training");
    let json = tokenizer.to_string(false).expect("JSON");
    serde_json::from_str::<Value>(&json).expect("JSON")["model"].take()
}

/// Returns the tokens in the order of their ids.
fn tokens(vocab: &Value) -> Vec<String> {
    let mut tokens: Vec<(u64, String)> = vocab
        .as_object()
        .expect("a vocabulary")
        .iter()
        .map(|(text, id)| (id.as_u64().expect("an id"), text.clone()))
        .collect();
    tokens.sort();
    tokens.into_iter().map(|(_, text)| text).collect()
}

fn merges(model: &Value) -> Vec<Vec<u8>> {
    let merges = model["merges"].as_array().expect("merges").iter();
    merges
        .map(|pair| {
            let half = |index: usize| pair[index].as_str().expect("a pair");
            format!("{} {}", half(0), half(1)).into_bytes()
        })
        .collect()
}

fn ours(
    model: TokenizerModel,
    tokens: &[String],
    set: impl FnOnce(&mut VocabData),
) -> samite_text::Tokenizer {
    let texts = tokens
        .iter()
        .map(|text| text.clone().into_bytes())
        .collect();
    let mut data = VocabData::new(model, texts);
    set(&mut data);
    samite_text::Tokenizer::new(data).expect("a vocabulary")
}

/// Trains byte-level BPE. `across` trains without a pre-tokenizer, so that merges cross its
/// boundaries and a wrong split becomes visible.
pub fn bpe(name: &'static str, texts: &[&str], size: usize, across: bool) -> Pair {
    let &(_, expressions, ignore_merges) = EXPRESSIONS
        .iter()
        .find(|entry| entry.0 == name)
        .expect("a known name");
    let mut passes: Vec<Value> = expressions.iter().copied().map(isolated).collect();
    passes.push(byte_level());
    let splitter = json!({"type": "Sequence", "pretokenizers": passes});
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(size)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let over = if across {
        byte_level()
    } else {
        splitter.clone()
    };
    let mut model = train(BPE::default(), trainer, Value::Null, over, texts);
    model["ignore_merges"] = ignore_merges.into();
    let ours = ours(TokenizerModel::Gpt2, &tokens(&model["vocab"]), |data| {
        data.pre = Some(name.to_owned());
        data.merges = Some(merges(&model));
        data.add_bos = Some(false);
    });
    Pair {
        name,
        theirs: theirs(&model, Value::Null, splitter),
        ours,
    }
}

/// Trains BPE on raw text. `across` lets merges cross spaces.
pub fn gemma(name: &'static str, texts: &[&str], size: usize, across: bool) -> Pair {
    let escape = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let splitter = json!({"type": "Split", "pattern": {"Regex": "[^\n]+|[\n]+"},
        "behavior": "Isolated", "invert": false});
    let words = json!({"type": "Sequence", "pretokenizers": [splitter.clone(), {
        "type": "Split", "pattern": {"String": "▁"}, "behavior": "MergedWithNext", "invert": false,
    }]});
    let bytes: Vec<AddedToken> = (0..=255)
        .map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), true))
        .collect();
    let special = [AddedToken::from("<unk>", true)]
        .into_iter()
        .chain(bytes)
        .collect();
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(size)
        .show_progress(false)
        .special_tokens(special)
        .limit_alphabet(300)
        .build();
    let over = if across { splitter.clone() } else { words };
    let mut model = train(BPE::default(), trainer, escape.clone(), over, texts);
    model["byte_fallback"] = true.into();
    model["fuse_unk"] = true.into();
    model["unk_token"] = "<unk>".into();
    let tokens = tokens(&model["vocab"]);
    let ours = ours(TokenizerModel::Gemma4, &tokens, |data| {
        data.merges = Some(merges(&model));
        data.unk_id = Some(0);
        data.token_types = Some(
            (0..tokens.len())
                .map(|id| [2, 6, 1][id.min(1) + usize::from(id > 256)])
                .collect(),
        );
    });
    Pair {
        name,
        theirs: theirs(&model, escape, splitter),
        ours,
    }
}

/// Trains WordPiece with BERT's normalizer.
pub fn bert(name: &'static str, texts: &[&str], size: usize, lowercase: bool) -> Pair {
    let normalizer = json!({
        "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": lowercase,
    });
    let splitter = json!({"type": "BertPreTokenizer"});
    let special: Vec<AddedToken> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        .map(|text| AddedToken::from(text, true))
        .into();
    let trainer = WordPieceTrainerBuilder::new()
        .vocab_size(size)
        .show_progress(false)
        .special_tokens(special)
        .build();
    let mut model = train(
        WordPiece::default(),
        trainer,
        normalizer.clone(),
        splitter.clone(),
        texts,
    );
    model["unk_token"] = "[UNK]".into();
    let tokens = tokens(&model["vocab"]);
    let written: Vec<String> = (0..)
        .zip(&tokens)
        .map(|(id, text)| match text.strip_prefix("##") {
            Some(rest) => rest.to_owned(),
            None if id < 5 => text.clone(),
            None => format!("▁{text}"),
        })
        .collect();
    let ours = ours(TokenizerModel::Bert, &written, |data| {
        (
            data.unk_id,
            data.bos_id,
            data.sep_id,
            data.pad_id,
            data.mask_id,
        ) = (Some(1), Some(2), Some(3), Some(0), Some(4));
        data.token_types = Some(
            (0..tokens.len())
                .map(|id| if id < 5 { 3 } else { 1 })
                .collect(),
        );
        data.lowercase = Some(lowercase);
    });
    Pair {
        name,
        theirs: theirs(&model, normalizer, splitter),
        ours,
    }
}

/// Trains a unigram model over words that begin with a space.
pub fn unigram(name: &'static str, texts: &[&str], size: u32) -> Pair {
    // Other white space is the task of a character map, which this vocabulary lacks.
    let splitter = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": " +"}, "behavior": "Removed", "invert": false},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false},
    ]});
    let special = vec![
        AddedToken::from("<pad>", true),
        AddedToken::from("</s>", true),
        AddedToken::from("<unk>", true),
    ];
    let trainer = UnigramTrainer::builder()
        .vocab_size(size)
        .show_progress(false)
        .special_tokens(special)
        .unk_token(Some("<unk>".to_owned()))
        .build()
        .expect("a trainer");
    let mut model = train(
        Unigram::default(),
        trainer,
        Value::Null,
        splitter.clone(),
        texts,
    );
    let (mut written, mut scores) = (Vec::new(), Vec::new());
    for entry in model["vocab"].as_array_mut().expect("a vocabulary") {
        let score = entry[1].as_f64().expect("a score") as f32;
        written.push(entry[0].as_str().expect("a text").to_owned());
        scores.push(score);
        entry[1] = f64::from(score).into();
    }
    let unknown = written
        .iter()
        .position(|text| text == "<unk>")
        .expect("an unknown token");
    model["unk_id"] = unknown.into();
    let ours = ours(TokenizerModel::T5, &written, |data| {
        data.token_types = Some(
            (0..scores.len())
                .map(|id| {
                    if id == unknown {
                        2
                    } else if id < 3 {
                        3
                    } else {
                        1
                    }
                })
                .collect(),
        );
        data.scores = Some(scores);
        data.unk_id = Some(unknown as u32);
        data.add_space_prefix = Some(true);
        data.remove_extra_whitespaces = Some(true);
    });
    Pair {
        name,
        theirs: theirs(&model, Value::Null, splitter),
        ours,
    }
}
