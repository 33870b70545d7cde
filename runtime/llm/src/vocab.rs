//! Reads the vocabulary from a file's metadata into the format of the tokenizer.

use crate::error::Result;
use samite_chat::Sources;
use samite_core::ask_for_memory;
use samite_gguf::{Array, Metadata, StringArray, Value};
use samite_text::{Tokenizer, TokenizerModel, VocabData};

const MODEL: &str = "tokenizer.ggml.model";

/// Reads the vocabulary. Returns `None` if the file has none (`tokenizer.ggml.model` is missing or
/// `no_vocab`).
///
/// This checks only the format; [`samite_text::Tokenizer::new`] checks the contents.
///
/// # Errors
/// Returns an error that names the key if a value has another type, or if the kind of tokenizer is
/// not supported. Also fails if there is not enough memory for the vocabulary and its tokenizer.
pub fn vocab_data(metadata: &Metadata) -> Result<Option<VocabData>> {
    let model = match metadata.get::<&str>(MODEL)? {
        // llama.cpp's own test models use "test".
        None | Some("no_vocab" | "none" | "test") => return Ok(None),
        Some(name) => TokenizerModel::from_name(name)?,
    };
    let bytes = |strings: &StringArray| strings.iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
    let id = |name: &str| metadata.get::<u32>(&format!("tokenizer.ggml.{name}_token_id"));
    // Old files use other names for three of these tokens.
    let fim = |name: &str, old: &str| {
        id(name).and_then(|found| found.map_or_else(|| id(old), |id| Ok(Some(id))))
    };
    let flag = |name: &str| metadata.get::<bool>(&format!("tokenizer.ggml.{name}"));
    let tokens = metadata.require::<&StringArray>("tokenizer.ggml.tokens")?;
    let merges = metadata.get::<&StringArray>("tokenizer.ggml.merges")?;
    let (pairs, pair_bytes) = merges.map_or((0, 0), |merges| (merges.len(), merges.total_bytes()));
    let bytes_in_all = tokens.total_bytes() + pair_bytes;
    let needed = VocabData::memory_needed(model, tokens.len(), pairs, bytes_in_all);
    ask_for_memory(needed, "the vocabulary and its tokenizer")?;
    Ok(Some(VocabData {
        pre: metadata.get("tokenizer.ggml.pre")?,
        // Only known names matter, so an invalid one is treated like a missing one.
        model_name: metadata.get("general.name").unwrap_or_default(),
        architecture: metadata.get("general.architecture").unwrap_or_default(),
        scores: scores(metadata)?,
        token_types: metadata.get("tokenizer.ggml.token_type")?,
        merges: merges.map(bytes),
        bos_id: id("bos")?,
        eos_id: id("eos")?,
        eot_id: id("eot")?,
        eom_id: id("eom")?,
        unk_id: id("unknown")?,
        // The format has this spelling.
        sep_id: id("seperator")?,
        pad_id: id("padding")?,
        mask_id: id("mask")?,
        fim_prefix_id: fim("fim_pre", "prefix")?,
        fim_suffix_id: fim("fim_suf", "suffix")?,
        fim_middle_id: fim("fim_mid", "middle")?,
        fim_pad_id: id("fim_pad")?,
        fim_rep_id: id("fim_rep")?,
        fim_sep_id: id("fim_sep")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_sep: flag("add_sep_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
        precompiled_charsmap: charsmap(metadata)?,
        lowercase: flag("normalizer.lowercase")?,
        strip_accents: flag("normalizer.strip_accents")?,
        suppress_tokens: metadata
            .get("tokenizer.ggml.suppress_tokens")?
            .unwrap_or_default(),
        ..VocabData::new(model, bytes(tokens))
    }))
}

/// Returns the chat templates of a file, and the texts of the BOS and EOS tokens.
pub(crate) fn chat_sources(metadata: &Metadata, tokenizer: Option<&Tokenizer>) -> Sources {
    const TEMPLATE: &str = "tokenizer.chat_template";
    let named = metadata.iter().filter_map(|(key, _)| {
        let name = key.strip_prefix(TEMPLATE)?.strip_prefix('.')?;
        let source = metadata.get::<&str>(key).ok().flatten()?;
        Some((name.to_owned(), source.to_owned()))
    });
    let text = |id: Option<u32>| {
        let piece = tokenizer?.token_to_piece(id?, true).ok()?;
        Some(String::from_utf8_lossy(piece).into_owned())
    };
    Sources {
        default: metadata.get(TEMPLATE).ok().flatten(),
        named: named.collect(),
        bos: text(tokenizer.and_then(Tokenizer::bos)).unwrap_or_default(),
        eos: text(tokenizer.and_then(Tokenizer::eos)).unwrap_or_default(),
    }
}

/// Reads bytes, which some converters store as signed numbers.
fn charsmap(metadata: &Metadata) -> Result<Option<Vec<u8>>> {
    const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";
    Ok(match metadata.value(CHARSMAP) {
        Some(Value::Array(Array::I8(bytes))) => {
            Some(bytes.iter().map(|byte| byte.cast_unsigned()).collect())
        }
        _ => metadata.get(CHARSMAP)?,
    })
}

/// Reads scores, which are floats but which some converters store as integers.
fn scores(metadata: &Metadata) -> Result<Option<Vec<f32>>> {
    const SCORES: &str = "tokenizer.ggml.scores";
    Ok(match metadata.value(SCORES) {
        Some(Value::Array(Array::F32(_) | Array::F64(_))) | None => metadata.get(SCORES)?,
        Some(_) => metadata
            .get::<Vec<i64>>(SCORES)?
            .map(|scores| scores.into_iter().map(|score| score as f32).collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let mut metadata = Metadata::new();
        let tokens: StringArray = ["<unk>", "<s>", "</s>", "a"].into_iter().collect();
        metadata.set(MODEL, "llama").unwrap();
        metadata.set("tokenizer.ggml.tokens", tokens).unwrap();
        metadata
            .set("tokenizer.ggml.scores", vec![0i32, 0, 0, -1])
            .unwrap();
        for (key, id) in [
            ("seperator_token_id", 3u32),
            ("fim_pre_token_id", 1),
            // The new name takes precedence; the old one applies if the new one is missing.
            ("prefix_token_id", 0),
            ("suffix_token_id", 2),
        ] {
            metadata.set(&format!("tokenizer.ggml.{key}"), id).unwrap();
        }
        let lowercase = "tokenizer.ggml.normalizer.lowercase";
        metadata.set(lowercase, false).unwrap();
        let charsmap = "tokenizer.ggml.precompiled_charsmap";
        metadata.set(charsmap, vec![-1i8, 1]).unwrap();
        metadata
            .set("tokenizer.ggml.suppress_tokens", vec![3i32])
            .unwrap();
        metadata
    }

    #[test]
    fn metadata_keys_become_vocabulary_fields() {
        let data = vocab_data(&metadata()).unwrap().unwrap();
        assert_eq!(data.tokens[3], b"a");
        assert_eq!(data.scores, Some(vec![0.0, 0.0, 0.0, -1.0]));
        assert_eq!((data.sep_id, data.bos_id), (Some(3), None));
        assert_eq!((data.fim_prefix_id, data.fim_suffix_id), (Some(1), Some(2)));
        assert_eq!((data.lowercase, data.strip_accents), (Some(false), None));
        assert_eq!(data.precompiled_charsmap, Some(vec![255, 1]));
        assert_eq!(data.suppress_tokens, [3]);
        assert!(samite_text::Tokenizer::new(data).is_ok());
    }

    #[test]
    fn chat_templates_are_found_by_name() {
        let mut metadata = metadata();
        let tokenizer = Tokenizer::new(vocab_data(&metadata).unwrap().unwrap()).unwrap();
        assert_eq!(chat_sources(&metadata, None), Sources::default());
        for (key, text) in [
            ("", "one"),
            (".tool_use", "two"),
            ("s", "no"),
            (".rag", "three"),
        ] {
            metadata
                .set(&format!("tokenizer.chat_template{key}"), text)
                .unwrap();
        }
        let sources = chat_sources(&metadata, Some(&tokenizer));
        assert_eq!(sources.default.as_deref(), Some("one"));
        let named = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(
            sources.named,
            [named("tool_use", "two"), named("rag", "three")]
        );
        assert_eq!(
            (sources.bos.as_str(), sources.eos.as_str()),
            ("<s>", "</s>")
        );
    }

    #[test]
    fn a_file_without_vocabulary_has_none() {
        let mut metadata = metadata();
        metadata.set(MODEL, "no_vocab").unwrap();
        assert!(vocab_data(&metadata).unwrap().is_none());
        metadata.remove(MODEL);
        assert!(vocab_data(&metadata).unwrap().is_none());
    }

    #[test]
    fn errors_name_the_key() {
        for (key, value) in [
            ("tokenizer.ggml.tokens", Value::U32(1)),
            ("tokenizer.ggml.scores", "high".into()),
            ("tokenizer.ggml.token_type", vec![1.0f32].into()),
            ("tokenizer.ggml.bos_token_id", (-1i32).into()),
            ("tokenizer.ggml.add_bos_token", 1u32.into()),
            (MODEL, "abacus".into()),
        ] {
            let mut metadata = metadata();
            metadata.set(key, value).unwrap();
            let message = vocab_data(&metadata).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
    }
}
