//! Translates llama.cpp's flags into samite's.

use crate::failure::{CommandError, CommandResult};
use std::ffi::{OsStr, OsString};

/// Flags of several letters after a single dash, and their names here.
const SHORT_WORDS: &[(&str, &str)] = &[
    ("-ngl", "--ngl"),
    ("-ot", "--override-tensor"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ts", "--tensor-split"),
    ("-sm", "--split-mode"),
    ("-dev", "--device"),
    ("-ub", "--ubatch-size"),
    ("-fit", "--fit"),
    ("-fitt", "--fit-target"),
    ("-nr", "--no-repack"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-tb", "--threads-batch"),
    ("-jf", "--json-schema-file"),
    ("-Cr", "--cpu-range"),
    ("-Cb", "--cpu-mask-batch"),
    ("-Crb", "--cpu-range-batch"),
    #[cfg(feature = "hub")]
    ("-hf", "--hf-repo"),
    #[cfg(feature = "hub")]
    ("-hfr", "--hf-repo"),
    #[cfg(feature = "hub")]
    ("-hff", "--hf-file"),
    #[cfg(feature = "hub")]
    ("-hft", "--hf-token"),
    ("-sys", "--system"),
];

#[cfg(not(feature = "hub"))]
const NO_DOWNLOADS: &str =
    "this samite was built without downloads: get the GGUF file yourself and name it with -m";
const ADDRESSES: &str = "models are named by their repository, with -hf: or get the GGUF file yourself and name it with -m";
const CHAT: &str =
    "`samite chat` holds a conversation, and `samite run --chat` answers one message";
const NO_DRAFTS: &str =
    "only `samite serve` has draft models, on the devices of the model: leave this out";
const FLASH: &str = "flash attention is on unless --no-flash turns it off: leave this out";
const SPLITS: &str = "layers are divided over devices with --place or -ts: leave this out";

/// Unsupported flags, and the remedy. Without this table, those of several letters after one dash
/// would be parsed as other flags.
const UNKNOWN_WORDS: &[(&str, &str)] = &[
    #[cfg(not(feature = "hub"))]
    ("-hf", NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("-hfr", NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("-hff", NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("-hft", NO_DOWNLOADS),
    ("-mu", ADDRESSES),
    #[cfg(not(feature = "hub"))]
    ("--hf-repo", NO_DOWNLOADS),
    #[cfg(not(feature = "hub"))]
    ("--hf-file", NO_DOWNLOADS),
    ("--model-url", ADDRESSES),
    ("-cnv", CHAT),
    ("-sysf", CHAT),
    ("-st", CHAT),
    ("--conversation", CHAT),
    ("-md", NO_DRAFTS),
    ("-ngld", NO_DRAFTS),
    ("-devd", NO_DRAFTS),
    ("-fa", FLASH),
    ("--flash-attn", FLASH),
    ("-mg", SPLITS),
];

/// Flags that ask for samite's default.
const NEEDLESS_WORDS: &[&str] = &["-no-cnv", "--no-conversation"];

/// Flags whose value may be any text, so the next argument is not a flag.
const TEXT_FLAGS: &[&str] = &[
    "-p",
    "--prompt",
    "--stop",
    "--dry-sequence-breaker",
    "--grammar",
    "-j",
    "--json-schema",
    "-sys",
    "--system",
    "--system-prompt",
    "--chat-template",
];

/// Translates llama.cpp's spellings in the arguments before `--`.
pub fn translate(arguments: impl Iterator<Item = OsString>) -> CommandResult<Vec<OsString>> {
    let mut translated = Vec::new();
    let (mut flags, mut is_value) = (true, false);
    for argument in arguments {
        flags &= argument != "--" || is_value;
        let verbatim = !flags || is_value;
        is_value = flags && !is_value && is_one_of(TEXT_FLAGS, &argument);
        match argument.to_str().filter(|_| !verbatim) {
            None => translated.push(argument),
            Some(text) => translated.extend(one(text)?),
        }
    }
    Ok(translated)
}

fn is_one_of(words: &[&str], argument: &OsStr) -> bool {
    words.iter().any(|word| argument == *word)
}

/// Translates one argument. Returns `None` for one to drop.
fn one(text: &str) -> CommandResult<Option<OsString>> {
    let (word, value) = text
        .find('=')
        .map_or((text, ""), |equals| text.split_at(equals));
    if let Some((_, advice)) = UNKNOWN_WORDS.iter().find(|(known, _)| *known == word) {
        return Err(CommandError::usage(format_args!("{word}: {advice}")));
    }
    if NEEDLESS_WORDS.contains(&word) {
        return Ok(None);
    }
    let known = SHORT_WORDS.iter().find(|(short, _)| *short == word);
    Ok(Some(match known {
        Some((_, long)) => format!("{long}{value}").into(),
        None => text.into(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> String {
        let words = translate(line.split(' ').map(OsString::from)).unwrap();
        let words: Vec<_> = words
            .into_iter()
            .map(|word| word.into_string().unwrap())
            .collect();
        words.join(" ")
    }

    #[test]
    fn llama_cpp_short_flags_become_long_flags() {
        assert_eq!(translated("run -ngl 3 -n 4"), "run --ngl 3 -n 4");
        assert_eq!(
            translated("run -cmoe -ncmoe 2"),
            "run --cpu-moe --n-cpu-moe 2"
        );
        assert_eq!(translated("chat -sys -ngl"), "chat --system -ngl");
        assert_eq!(
            translated("-ngl=3 -ot=a=cpu"),
            "--ngl=3 --override-tensor=a=cpu"
        );
        assert_eq!(
            translated("-ts 1,2 -- -ts -hf"),
            "--tensor-split 1,2 -- -ts -hf"
        );
        assert_eq!(translated("-t 2 --ngl 1 -nglx"), "-t 2 --ngl 1 -nglx");
        assert_eq!(translated("-p -ngl -no-cnv -ngl 1"), "-p -ngl --ngl 1");
        assert_eq!(
            translated("-p -p -ngl 1 -p -- -ngl 2"),
            "-p -p --ngl 1 -p -- --ngl 2"
        );
    }

    #[test]
    fn unsupported_flags_are_explained() {
        for (line, part) in [
            ("run -cnv", "-cnv: `samite chat`"),
            (
                "run -md draft.gguf",
                "-md: only `samite serve` has draft models",
            ),
        ] {
            match translate(line.split(' ').map(OsString::from)) {
                Err(CommandError::Usage(message)) => {
                    assert!(message.starts_with(part), "{message}")
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
