//! Every pre-tokenizer by its name.

use super::Pass::{self, Cut, Group};
use super::Thousands;
use crate::bpe::Encoding;
use crate::error::VocabError;

/// Settings that derive from a pre-tokenizer's name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(super) passes: &'static [Pass],
    /// True if a word that is a token is used as a whole, without merging.
    pub ignore_merges: bool,
    /// True to add BOS if the file does not specify it.
    pub add_bos: bool,
    /// True if a separator is expected after the text and the file does not specify it.
    pub add_sep: bool,
    /// True to add BOS regardless of the file.
    pub always_bos: bool,
    /// True if tokens merge by their ranks in a file without merges.
    pub merges_optional: bool,
    pub encoding: Encoding,
}

const PLAIN: Settings = Settings {
    passes: &[],
    ignore_merges: false,
    add_bos: false,
    add_sep: false,
    always_bos: false,
    merges_optional: false,
    encoding: Encoding::Bytes,
};

const WHOLE_WORDS: Settings = Settings {
    ignore_merges: true,
    ..PLAIN
};

// Common parts of expressions.
#[rustfmt::skip]
macro_rules! contraction { () => { "(?i:'s|'t|'re|'ve|'m|'ll|'d)" }; }
#[rustfmt::skip]
macro_rules! before_word { () => { r"[^\r\n\p{L}\p{N}]?" }; }
#[rustfmt::skip]
macro_rules! other { () => { r" ?[^\s\p{L}\p{N}]+" }; }
#[rustfmt::skip]
macro_rules! space { () => { r"\s*[\r\n]+|\s+(?!\S)|\s+" }; }
#[rustfmt::skip]
macro_rules! upper { () => { r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]" }; }
#[rustfmt::skip]
macro_rules! lower { () => { r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]" }; }

/// `$digits` matches numbers.
macro_rules! llama3 {
    ($digits:literal, $space:expr) => {
        concat!(
            contraction!(),
            "|",
            before_word!(),
            r"\p{L}+|",
            $digits,
            "|",
            other!(),
            r"[\r\n]*|",
            $space
        )
    };
    ($digits:literal) => {
        llama3!($digits, space!())
    };
}

/// Words end before a capital letter; `$behind` may end them.
macro_rules! cased {
    ($upper:expr, $lower:expr, $behind:expr, $digits:literal, $after_other:literal) => {
        concat!(
            before_word!(),
            $upper,
            "*",
            $lower,
            "+",
            $behind,
            "|",
            before_word!(),
            $upper,
            "+",
            $lower,
            "*",
            $behind,
            "|",
            $digits,
            "|",
            other!(),
            $after_other,
            "|",
            space!()
        )
    };
}

macro_rules! gpt4o {
    ($digits:literal) => {
        cased!(
            upper!(),
            lower!(),
            concat!(contraction!(), "?"),
            $digits,
            r"[\r\n/]*"
        )
    };
}

const GPT2: &str = concat!(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|",
    other!(),
    r"|\s+(?!\S)|\s+"
);
const LLAMA3: &str = llama3!(r"\p{N}{1,3}");
const QWEN2: &str = llama3!(r"\p{N}");
const GPT4O: &str = gpt4o!(r"\p{N}{1,3}");
/// Words of DeepSeek V3, in which marks are letters and punctuation may start a word of Latin
/// letters.
const DEEPSEEK_WORDS: &str = concat!(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|",
    space!()
);
/// Letters with case in Unicode 10, as listed in DeepSeek's first models.
const CASED_LETTERS: &str = concat!(
    r"\s?[",
    "A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}\u{370}-\u{373}\u{376}",
    "\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}",
    "\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}",
    "\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}",
    "\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}",
    "\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}",
    "\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}",
    "\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}",
    "\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}",
    "\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}",
    "\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}",
    "]+"
);
const CHINESE_AND_KANA: &str = "[一-龥぀-ゟ゠-ヿ]+";
const CHINESE_TO_KOREAN: &str = "[一-龥ࠀ-一가-퟿]+";
const BLOOM_WORDS: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
const LINES: &str = r"[^\n]+|[\n]+";

/// Names that share settings.
const FAMILIES: &[(&[&str], Settings)] = &[
    (
        // Files without a name.
        &["default"],
        Settings {
            passes: &[
                Cut(r"[\p{P}$+<=>^~|]+"),
                Cut(GPT2),
                Cut(r"\p{N}+"),
                Cut(THREE_DIGITS),
            ],
            ..PLAIN
        },
    ),
    (
        &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        Settings {
            passes: &[Cut(LLAMA3)],
            add_bos: true,
            ..WHOLE_WORDS
        },
    ),
    (
        &["dbrx", "smaug-bpe", "chatglm-bpe"],
        Settings {
            passes: &[Cut(LLAMA3)],
            ..PLAIN
        },
    ),
    (
        &["glm4", "glm5"],
        Settings {
            passes: &[Cut(LLAMA3)],
            ..WHOLE_WORDS
        },
    ),
    (
        &["jais-2"],
        Settings {
            passes: &[Cut(llama3!(
                r"\p{N}{1,3}",
                concat!(
                    r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)",
                    r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s"
                )
            ))],
            ..PLAIN
        },
    ),
    (
        &["minicpm5"],
        Settings {
            passes: &[Cut(r"\p{N}{1,3}"), Cut(llama3!(r"\p{N}+"))],
            ..WHOLE_WORDS
        },
    ),
    (
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        Settings {
            passes: &[Cut(QWEN2)],
            ..PLAIN
        },
    ),
    (
        &["qwen35"],
        Settings {
            passes: &[Cut(concat!(
                contraction!(),
                "|",
                before_word!(),
                r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
                space!()
            ))],
            ..PLAIN
        },
    ),
    (
        // Suffixes after an apostrophe stay together, as in Turkish.
        &["ufakzeka"],
        Settings {
            passes: &[Cut(concat!(
                before_word!(),
                r"\p{L}+|\p{N}|",
                other!(),
                r"[\r\n]*|",
                space!()
            ))],
            ..PLAIN
        },
    ),
    (
        &["laguna"],
        Settings {
            passes: &[Cut(LINES), Cut(QWEN2)],
            ..PLAIN
        },
    ),
    (
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        Settings {
            passes: &[Cut(concat!(
                "'(?i:[sdmt]|ll|ve|re)|",
                before_word!(),
                r"\p{L}+|\p{N}|",
                other!(),
                r"[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
            ))],
            ..PLAIN
        },
    ),
    (
        &["seed-coder"],
        Settings {
            passes: &[Cut(concat!(
                contraction!(),
                "|",
                before_word!(),
                r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|",
                space!()
            ))],
            ..PLAIN
        },
    ),
    (
        // Words of letters that are separated by one space form a single word.
        &["exaone-moe"],
        Settings {
            passes: &[Cut(concat!(
                contraction!(),
                "|",
                before_word!(),
                r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|",
                other!(),
                r"[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
            ))],
            ..PLAIN
        },
    ),
    (
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "modern-bert",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        Settings {
            passes: &[Cut(GPT2)],
            ..PLAIN
        },
    ),
    (
        &["jina-v1-en", "jina-v2-code", "roberta-bpe"],
        Settings {
            passes: &[Cut(GPT2)],
            add_sep: true,
            ..PLAIN
        },
    ),
    (
        &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        Settings {
            passes: &[Cut(r"\p{N}"), Cut(GPT2)],
            ..PLAIN
        },
    ),
    (
        &["falcon"],
        Settings {
            passes: &[Cut(r"[\p{P}$+<=>^~|`]+"), Cut(GPT2), Cut(THREE_DIGITS)],
            ..PLAIN
        },
    ),
    (
        &["deepseek-llm"],
        Settings {
            passes: &[
                Cut(r"[\r\n]"),
                Cut(CASED_LETTERS),
                Cut(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
                Cut(r"\s+$"),
                Cut(CHINESE_TO_KOREAN),
                Cut(r"\p{N}+"),
            ],
            ..PLAIN
        },
    ),
    (
        &["deepseek-coder"],
        Settings {
            passes: &[
                Cut(r"[\r\n]"),
                Cut(r"\s?\p{L}+"),
                Cut(r"\s?\p{P}+"),
                Cut(CHINESE_TO_KOREAN),
                Cut(r"\p{N}"),
            ],
            ..PLAIN
        },
    ),
    (
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        Settings {
            passes: &[
                Cut(r"\p{N}{1,3}"),
                Cut(CHINESE_AND_KANA),
                Cut(DEEPSEEK_WORDS),
            ],
            ..PLAIN
        },
    ),
    (
        &["spark2_5"],
        Settings {
            passes: &[
                Cut(r"\p{N}{1,3}"),
                Cut(CHINESE_AND_KANA),
                Cut(
                    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
                ),
                Cut(r"\p{N}"),
            ],
            ..PLAIN
        },
    ),
    (
        &["afmoe"],
        Settings {
            passes: &[
                Group(Thousands::All),
                Cut("[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"),
                Cut(DEEPSEEK_WORDS),
            ],
            ..PLAIN
        },
    ),
    (
        &["tekken"],
        Settings {
            passes: &[Cut(cased!(upper!(), lower!(), "", r"\p{N}", r"[\r\n/]*"))],
            add_bos: true,
            ..WHOLE_WORDS
        },
    ),
    (
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        Settings {
            passes: &[Cut(GPT4O)],
            ..PLAIN
        },
    ),
    (
        &["granite-embed-multi-97m"],
        Settings {
            passes: &[Cut(GPT4O)],
            ..WHOLE_WORDS
        },
    ),
    (
        &["tiny_aya", "cohere2moe"],
        Settings {
            passes: &[Group(Thousands::AtWordEnds), Cut(GPT4O)],
            ..PLAIN
        },
    ),
    (
        &["youtu"],
        Settings {
            passes: &[
                Cut("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"),
                Cut(gpt4o!(r"\p{N}")),
            ],
            ..WHOLE_WORDS
        },
    ),
    (
        &["kimi-k2"],
        Settings {
            passes: &[Cut(concat!(
                r"\p{Han}+|",
                cased!(
                    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
                    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
                    concat!(contraction!(), "?"),
                    r"\p{N}{1,3}",
                    r"[\r\n]*"
                )
            ))],
            merges_optional: true,
            ..PLAIN
        },
    ),
    (
        &["superbpe"],
        Settings {
            passes: &[Cut(r"\p{N}+"), Group(Thousands::Inside)],
            ..PLAIN
        },
    ),
    (
        &["poro-chat", "bloom", "gpt3-finnish"],
        Settings {
            passes: &[Cut(BLOOM_WORDS)],
            ..PLAIN
        },
    ),
    (
        &["viking"],
        Settings {
            passes: &[Cut(BLOOM_WORDS), Cut(r"\p{N}")],
            ..PLAIN
        },
    ),
    (
        &["chameleon"],
        Settings {
            passes: &[
                Cut("<sentinel:[0-9]+>"),
                Cut("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
                Cut(r"([\t\n]|    |  )"),
                Cut(r"\p{N}"),
                Cut(r"[\p{P}!-/:-@\[-`{-~]"),
                Cut(GPT2),
            ],
            add_bos: true,
            ..PLAIN
        },
    ),
    (
        &["gemma4", "granite-embed-multi-311m"],
        Settings {
            passes: &[Cut(LINES)],
            add_bos: true,
            always_bos: true,
            encoding: Encoding::Escaped,
            ..PLAIN
        },
    ),
    (
        &["sarvam-moe"],
        Settings {
            passes: &[Cut(LINES)],
            encoding: Encoding::Escaped,
            ..PLAIN
        },
    ),
    (
        &["whitespace"],
        Settings {
            passes: &[Cut(r"\S+")],
            encoding: Encoding::Plain,
            ..PLAIN
        },
    ),
];

pub(super) fn all() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.0).copied()
}

/// Returns the settings of every family.
#[cfg(test)]
pub(super) fn families() -> impl Iterator<Item = Settings> {
    FAMILIES.iter().map(|family| family.1)
}

/// Returns the settings for `tokenizer.ggml.pre`.
pub(crate) fn settings(name: Option<&str>) -> Result<Settings, VocabError> {
    let name = name.filter(|name| !name.is_empty()).unwrap_or("default");
    let family = FAMILIES.iter().find(|family| family.0.contains(&name));
    family
        .map(|family| family.1)
        .ok_or_else(|| VocabError::UnknownPreTokenizer {
            name: name.to_owned(),
            supported: all().collect::<Vec<_>>().join(", "),
        })
}
