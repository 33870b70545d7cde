//! BPE with DNA sequences between `<dna>` and `</dna>`, with six bases per token.

use crate::bpe::Bpe;
use crate::vocab::Vocab;

/// Suffix of base tokens' texts, which distinguishes them from tokens of ordinary text.
pub(crate) const MARKER: &str = "\u{E000}";

const BEGIN: &str = "<dna>";
const END: &str = "</dna>";
const UNKNOWN: &str = "<oov>";

/// Number of bases in a token.
const BASES: usize = 6;

/// A BPE tokenizer of this kind.
#[derive(Debug)]
pub(crate) struct HybridDna {
    pub(crate) bpe: Box<Bpe>,
    /// `<dna>`, `</dna>` and `<oov>`. A vocabulary without one of them supports only ordinary text.
    tags: Option<[u32; 3]>,
}

impl HybridDna {
    pub(crate) fn new(bpe: Box<Bpe>, vocab: &Vocab) -> Self {
        let tag = |text: &str| vocab.find(text.as_bytes());
        let tags = tag(BEGIN).zip(tag(END)).zip(tag(UNKNOWN));
        Self {
            bpe,
            tags: tags.map(|((begin, end), unknown)| [begin, end, unknown]),
        }
    }

    /// Tokenizes a section of text.
    pub(crate) fn tokenize(&self, vocab: &Vocab, text: &str, output: &mut Vec<u32>) {
        let Some([begin, end, unknown]) = self.tags else {
            return self.bpe.tokenize(text, output);
        };
        let mut rest = text;
        while let Some((before, inside)) = rest.split_once(BEGIN) {
            self.bpe.tokenize(before, output);
            output.push(begin);
            let closed = inside.split_once(END);
            let (bases, behind) = closed.unwrap_or((inside, ""));
            for group in bases.as_bytes().chunks(BASES) {
                let mut token = group.to_ascii_uppercase();
                token.resize(BASES, b'A');
                token.extend_from_slice(MARKER.as_bytes());
                output.push(vocab.find(&token).unwrap_or(unknown));
            }
            output.extend(closed.map(|_| end));
            rest = behind;
        }
        self.bpe.tokenize(rest, output);
    }
}
