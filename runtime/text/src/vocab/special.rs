//! Tokens that are recognized by their text. GGUF files often do not specify which tokens end a
//! generation, or mark control tokens as ordinary text. llama.cpp therefore uses names; these are
//! its lists and its exceptions.

use super::{TokenAttributes, Vocab, VocabData};

const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];
const END_OF_MESSAGE: &[&str] = &["<|eom_id|>"];
const FIM_PREFIX: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
];
const FIM_SUFFIX: &[&str] = &[
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
];
const FIM_MIDDLE: &[&str] = &[
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];
const FIM_PADDING: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];
const FIM_REPOSITORY: &[&str] = &[
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
];
const FIM_SEPARATOR: &[&str] = &["<|file_sep|>"];

const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];
/// Parts of a gpt-oss message, which are text to readers of the stream.
const ALWAYS_SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

impl Vocab {
    /// Completes the special ids by the tokens' texts, corrects attributes, and collects the
    /// end-of-generation tokens.
    pub(super) fn assign_roles(&mut self, data: &VocabData) {
        self.special.eot = self.special.eot.or_else(|| self.claim_control(END_OF_TURN));
        self.special.eom = self
            .special
            .eom
            .or_else(|| self.claim_control(END_OF_MESSAGE));
        let special = &self.special;
        let [prefix, suffix, middle] = [
            (special.fim_prefix, FIM_PREFIX),
            (special.fim_suffix, FIM_SUFFIX),
            (special.fim_middle, FIM_MIDDLE),
        ]
        .map(|(id, names)| id.or_else(|| self.claim_control(names)));
        self.special.fim_prefix = prefix;
        self.special.fim_suffix = suffix;
        self.special.fim_middle = middle;
        let fim_pad = data.fim_pad_id.or_else(|| self.claim_control(FIM_PADDING));
        let fim_rep = data
            .fim_rep_id
            .or_else(|| self.claim_control(FIM_REPOSITORY));
        let fim_sep = data
            .fim_sep_id
            .or_else(|| self.claim_control(FIM_SEPARATOR));

        for token in &mut self.tokens {
            if token.attributes.intersects(TokenAttributes::CONTROL)
                && contains(&token.text, b"unused")
            {
                token.attributes = token.attributes.union(TokenAttributes::UNUSED);
            }
        }

        let mut ends: Vec<u32> = [fim_pad, fim_rep, fim_sep].into_iter().flatten().collect();
        for id in self.find_all(END_OF_GENERATION) {
            self.mark_control(id);
            ends.push(id);
        }
        for id in self.find_all(ALWAYS_SHOWN) {
            self.tokens[id as usize].attributes = TokenAttributes::USER_DEFINED;
        }
        ends.extend(
            [self.special.eos, self.special.eot, self.special.eom]
                .into_iter()
                .flatten(),
        );
        ends.sort_unstable();
        ends.dedup();

        // If one of these ends a message, `<|end|>` only separates its parts.
        let ends_by = |vocab: &Self, name: &str| {
            vocab
                .find(name.as_bytes())
                .is_some_and(|id| ends.contains(&id))
        };
        let calls = ends_by(self, "<|call|>") || ends_by(self, "<|calls|>");
        let end_is_part = calls && (ends_by(self, "<|return|>") || ends_by(self, "<|flush|>"));
        // Some vocabularies have `</s>` as ordinary text.
        let eos_is_text = ends_by(self, "<|tool_response>") || ends_by(self, "<|plamo:eos|>");
        for (applies, name, attributes) in [
            (end_is_part, "<|end|>", TokenAttributes::USER_DEFINED),
            (eos_is_text, "</s>", TokenAttributes::NORMAL),
        ] {
            if let Some(id) = self
                .find(name.as_bytes())
                .filter(|id| applies && ends.contains(id))
            {
                ends.retain(|&end| end != id);
                self.tokens[id as usize].attributes = attributes;
            }
        }
        self.end_of_generation = ends;

        let name = data
            .model_name
            .as_deref()
            .unwrap_or_default()
            .to_lowercase();
        let pre = data.pre.as_deref().unwrap_or_default();
        let architecture = data.architecture.as_deref().unwrap_or_default();
        let names = |text: &str, all: &[&str]| all.iter().any(|part| text.contains(part));
        if names(pre, &["jina-v2-de", "jina-v2-es", "jina-v2-code"])
            || names(architecture, &["nomic-bert-moe", "jina-bert-v3"])
        {
            self.strip_before("<mask>");
        } else if names(&name, &["phi-3", "phi3"]) {
            self.strip_after_special_tokens();
        } else if names(&name, &["modern-bert"]) {
            self.strip_before("[MASK]");
        }
    }

    fn strip_before(&mut self, name: &str) {
        if let Some(id) = self.find(name.as_bytes()) {
            let attributes = &mut self.tokens[id as usize].attributes;
            *attributes = attributes.union(TokenAttributes::LEFT_STRIP);
        }
    }

    fn strip_after_special_tokens(&mut self) {
        const KEEP: [&[u8]; 3] = [b"<unk>", b"<s>", b"<|endoftext|>"];
        let special = TokenAttributes::CONTROL
            .union(TokenAttributes::USER_DEFINED)
            .union(TokenAttributes::UNKNOWN);
        for token in &mut self.tokens {
            let strips = token.attributes.intersects(special) || *token.text == *b"</s>";
            if strips && !KEEP.contains(&&*token.text) {
                token.attributes = token.attributes.union(TokenAttributes::RIGHT_STRIP);
            }
        }
    }

    fn find_all(&self, names: &[&str]) -> Vec<u32> {
        names
            .iter()
            .filter_map(|name| self.find(name.as_bytes()))
            .collect()
    }

    /// Returns the token with one of these names that has the lowest id, and marks it as a control
    /// token.
    fn claim_control(&mut self, names: &[&str]) -> Option<u32> {
        let id = self.find_all(names).into_iter().min()?;
        self.mark_control(id);
        Some(id)
    }

    fn mark_control(&mut self, id: u32) {
        let attributes = &mut self.tokens[id as usize].attributes;
        *attributes = attributes.union(TokenAttributes::CONTROL);
    }
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|window| window == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocab::TokenizerModel;

    fn vocab(tokens: &[&str], set: impl FnOnce(&mut VocabData)) -> Vocab {
        let tokens = tokens
            .iter()
            .map(|token| token.as_bytes().to_vec())
            .collect();
        let mut data = VocabData::new(TokenizerModel::Gpt2, tokens);
        set(&mut data);
        Vocab::new(&data).unwrap()
    }

    fn attributes(vocab: &Vocab, text: &str) -> TokenAttributes {
        vocab.tokens[vocab.find(text.as_bytes()).unwrap() as usize].attributes
    }

    #[test]
    fn end_tokens_are_found_by_id_and_name() {
        let vocab = vocab(
            &["a", "b", "<|im_end|>", "<|eom_id|>", "<|file_sep|>", "x"],
            |data| data.eos_id = Some(1),
        );
        assert_eq!(vocab.end_of_generation, [1, 2, 3, 4]);
        assert_eq!((vocab.special.eot, vocab.special.eom), (Some(2), Some(3)));
        assert!(attributes(&vocab, "<|im_end|>").intersects(TokenAttributes::CONTROL));
        assert!(!attributes(&vocab, "x").intersects(TokenAttributes::CONTROL));
    }

    #[test]
    fn an_explicit_id_has_priority_over_well_known_texts() {
        let vocab = vocab(&["<|end|>", "over"], |data| data.eot_id = Some(1));
        assert_eq!(vocab.special.eot, Some(1));
        assert_eq!(vocab.end_of_generation, [0, 1]);
    }

    #[test]
    fn the_harmony_end_token_does_not_end_generation() {
        let vocab = vocab(
            &["<|end|>", "<|return|>", "<|call|>", "<|channel|>"],
            |_| {},
        );
        assert_eq!(vocab.end_of_generation, [1, 2]);
        assert_eq!(attributes(&vocab, "<|end|>"), TokenAttributes::USER_DEFINED);
        assert_eq!(
            attributes(&vocab, "<|channel|>"),
            TokenAttributes::USER_DEFINED
        );
    }

    #[test]
    fn the_sentence_end_token_is_text_if_turns_end_otherwise() {
        let vocab = vocab(&["</s>", "<|tool_response>"], |_| {});
        assert_eq!(vocab.end_of_generation, [1]);
        assert_eq!(attributes(&vocab, "</s>"), TokenAttributes::NORMAL);
    }

    #[test]
    fn control_tokens_named_unused_are_unused() {
        let vocab = vocab(&["<unused7>", "unused"], |data| {
            data.token_types = Some(vec![3, 1])
        });
        assert!(attributes(&vocab, "<unused7>").intersects(TokenAttributes::UNUSED));
        assert!(!attributes(&vocab, "unused").intersects(TokenAttributes::UNUSED));
    }

    #[test]
    fn phi3_strips_after_special_tokens() {
        let vocab = vocab(&["<unk>", "</s>", "<|user|>", "a"], |data| {
            data.model_name = Some("Phi-3 mini".to_owned());
            data.token_types = Some(vec![2, 1, 3, 1]);
        });
        let strips = |text| attributes(&vocab, text).intersects(TokenAttributes::RIGHT_STRIP);
        assert!(strips("</s>") && strips("<|user|>"));
        assert!(!strips("<unk>") && !strips("a"));
    }
}
