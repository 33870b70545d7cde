//! Checks that both libraries return the same tokens: 10,000 random and hostile texts for each
//! vocabulary.

use samite_tokenizers_bench::{EXPRESSIONS, Pair, bert, bpe, gemma, unigram};
use std::path::Path;

const TEXTS: usize = 10_000;

/// Unicode blocks whose characters are older than the tables of both libraries, which implement
/// different Unicode versions.
const BLOCKS: [(u32, u32); 16] = [
    (0x1, 0x1F),
    (0x5D0, 0x5EA),
    (0x620, 0x64A),
    (0x904, 0x94D),
    (0xE01, 0xE3A),
    (0x10A0, 0x10C5),
    (0x1E00, 0x1EFF),
    (0x2000, 0x2027),
    (0x2100, 0x2184),
    (0x2190, 0x22FF),
    (0x3041, 0x3096),
    (0xAC00, 0xD7A3),
    (0xE000, 0xF8FF),
    (0xFF01, 0xFF5E),
    (0x1F600, 0x1F64F),
    (0x20000, 0x2A6D6),
];

/// A xorshift generator, which gives the same texts in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }

    fn character(&mut self, first: u32, last: u32) -> char {
        char::from_u32(first + self.below((last - first + 1) as usize) as u32).unwrap_or('\u{FFFD}')
    }

    fn piece(&mut self, words: &[&str], text: &mut String) {
        match self.below(16) {
            0..6 => {
                text.push_str(words[self.below(words.len())]);
                text.push(' ');
            }
            6 => (0..self.below(8)).for_each(|_| text.push(self.character(0x20, 0x7E))),
            7 => (0..self.below(8))
                .for_each(|_| text.push(self.character(u32::from('0'), u32::from('9')))),
            8 => text.push_str(
                [
                    " ", "  ", "\n", "\r\n", "\n\n ", "\t", "    \n", "\u{a0}", "\u{3000}",
                    "\u{2028}",
                ][self.below(10)],
            ),
            9 => (0..self.below(6)).for_each(|_| text.push(self.character(0x4E00, 0x9FFF))),
            10 => (0..self.below(6)).for_each(|_| text.push(self.character(0xA1, 0x24F))),
            11 => (0..self.below(6)).for_each(|_| text.push(self.character(0x370, 0x52F))),
            12 => (0..self.below(3)).for_each(|_| text.push(self.character(0x300, 0x36F))),
            13 => text.push_str(
                [
                    "'s", "'RE", "’ll", "'ſ", "can't", "I'M", "IT'D", "½", "²", "Ⅷ", "々", "ﬁ",
                    "İ", "ß",
                ][self.below(14)],
            ),
            _ => {
                let (first, last) = BLOCKS[self.below(BLOCKS.len())];
                (0..self.below(4)).for_each(|_| text.push(self.character(first, last)));
            }
        }
    }
}

/// Returns the training texts: file contents and other samples.
fn corpus() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = vec!["从前有一座山，山里有一座庙。庙里有一个老和尚。むかしむかし、あるところに。안녕하세요 नमस्ते دنيا\n".repeat(20)];
    for folder in ["docs", "runtime/text/src"] {
        let mut files: Vec<_> = root
            .join(folder)
            .read_dir()
            .expect("a folder")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        files.sort();
        texts.extend(
            files
                .iter()
                .filter_map(|file| std::fs::read_to_string(file).ok()),
        );
    }
    texts
}

fn compare(pair: &Pair, words: &[&str], adapt: impl Fn(String) -> String) {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let hostile = [
        "", "a", "A", " ", "\n", "漢", "\u{301}", "9", "'", "!", "▁", "e\u{301}", "\0", "aA", " a",
    ];
    let mut texts: Vec<String> = hostile
        .iter()
        .flat_map(|unit| [1, 2, 3, 120, 2000].map(|count| unit.repeat(count)))
        .collect();
    while texts.len() < TEXTS {
        let mut text = String::new();
        for _ in 0..random.below(12) {
            random.piece(words, &mut text);
        }
        texts.push(text);
    }
    for text in texts {
        let text = adapt(text);
        let theirs = pair.theirs.encode(text.as_str(), false).expect("tokens");
        let ours = pair.ours.tokenize(&text, false, false).expect("tokens");
        assert_eq!(ours, theirs.get_ids(), "{}: {text:?}", pair.name);
    }
}

fn all(make: impl Fn(&[&str]) -> Vec<Pair>, adapt: impl Fn(String) -> String) {
    let corpus = corpus();
    let texts: Vec<&str> = corpus.iter().map(String::as_str).collect();
    let words: Vec<&str> = texts
        .iter()
        .flat_map(|text| text.split_whitespace())
        .filter(|word| !word.contains('<'))
        .step_by(7)
        .collect();
    for pair in make(&texts) {
        compare(&pair, &words, &adapt);
    }
}

#[test]
fn byte_level_bpe() {
    all(
        |texts| {
            EXPRESSIONS
                .iter()
                .map(|&(name, ..)| bpe(name, texts, 2000, true))
                .collect()
        },
        |text| text,
    );
}

#[test]
fn bpe_on_raw_text() {
    all(
        |texts| {
            vec![
                gemma("words", texts, 3000, false),
                gemma("lines", &texts[..4], 1500, true),
            ]
        },
        |text| text,
    );
}

#[test]
fn word_piece() {
    all(
        |texts| {
            vec![
                bert("uncased", texts, 2000, true),
                bert("cased", texts, 2000, false),
            ]
        },
        |text| text,
    );
}

#[test]
fn unigrams() {
    // A character map would decide which characters count as spaces, but this vocabulary lacks one.
    let spaces = |text: String| {
        text.chars()
            .map(|c| {
                if c.is_whitespace() || c == '▁' {
                    ' '
                } else {
                    c
                }
            })
            .collect()
    };
    all(|texts| vec![unigram("unigram", texts, 2000)], spaces);
}
