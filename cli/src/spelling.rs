//! Translates llama.cpp's programs and flags, and llama-server's variables, into samite's.

mod table;
mod variables;

use crate::failure::{CommandError, CommandResult};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use table::SPELLINGS;

/// Commands that a spelling applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Commands {
    /// All commands.
    All,
    /// `samite serve`, which takes llama-server's flags.
    Serve,
    /// All but `samite serve`.
    Others,
}

impl Commands {
    fn include(self, is_serve: bool) -> bool {
        match self {
            Commands::All => true,
            Commands::Serve => is_serve,
            Commands::Others => !is_serve,
        }
    }
}

/// Meaning of a spelling.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// Another name of this flag.
    Flag(&'static str),
    /// Requests the default, or does not apply.
    Ignored,
    /// Like `Ignored`, with a value.
    IgnoredValue,
    /// Unsupported, with the remedy.
    Unsupported(&'static str),
    /// Switches flash attention on or off.
    FlashAttention,
    /// Level of the log, as a number.
    Verbosity,
    /// Use no network. Only a model that is named by its repository is ever downloaded, so samite
    /// has the flag only with one.
    Offline,
}

/// llama.cpp's programs, and the commands that samite runs when it is started under their names.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("llama-server", &["serve"]),
    ("llama-quantize", &["quantize", "--fill-output"]),
];

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

/// Translates the arguments of the program, which start with its name, into samite's spelling. For
/// `samite serve`, inserts llama-server's variables before the flags, so that flags override them.
pub fn translate(arguments: impl Iterator<Item = OsString>) -> CommandResult<Vec<OsString>> {
    let mut arguments: Vec<_> = arguments.collect();
    insert_command(&mut arguments);
    let Some(rest) = serve_arguments(&mut arguments) else {
        return flags(arguments.into_iter(), false);
    };
    let variables = variables::flags(|name| std::env::var(name).ok());
    let rest = variables.into_iter().chain(several_models(rest));
    flags(arguments.into_iter().chain(rest), true)
}

/// Inserts the command if the program has the name of one of llama.cpp's.
fn insert_command(arguments: &mut Vec<OsString>) {
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    let name = name.map(|name| name.to_string_lossy());
    let name = name
        .as_deref()
        .map(|name| name.strip_suffix(".exe").unwrap_or(name));
    let mut programs = PROGRAMS.iter();
    let found = programs.find(|(program, _)| name.is_some_and(|name| name == *program));
    let Some((_, words)) = found else { return };
    // To probe a plugin, the program starts itself, under any name.
    let has_command = |word: &OsString| word == "probe-plugin" || word == words[0];
    if !arguments.get(1).is_some_and(has_command) {
        arguments.splice(1..1, words.iter().map(OsString::from));
    }
}

/// Splits off the arguments after `serve`. Returns `None` for other commands.
fn serve_arguments(arguments: &mut Vec<OsString>) -> Option<Vec<OsString>> {
    let at = arguments.iter().skip(1).position(|word| word == "serve")?;
    // The command comes first, except for logging flags.
    let is_flag = |word: &OsString| word.to_string_lossy().starts_with('-');
    let is_command = arguments[1..=at].iter().all(is_flag);
    is_command.then(|| arguments.split_off(at + 2))
}

/// Turns repeated models into additional ones to serve.
fn several_models(mut rest: Vec<OsString>) -> Vec<OsString> {
    let mut count = 0;
    for word in &mut rest {
        let text = word.to_string_lossy();
        let value = ["--model=", "-m="]
            .iter()
            .find_map(|flag| text.strip_prefix(flag));
        if !["-m", "--model"].contains(&&*text) && value.is_none() {
            continue;
        }
        count += 1;
        if count > 1 {
            *word = match value {
                Some(value) => format!("--also-model={value}").into(),
                None => "--also-model".into(),
            };
        }
    }
    rest
}

/// Translates the spellings of [`SPELLINGS`] in the arguments before `--`.
fn flags(
    mut arguments: impl Iterator<Item = OsString>,
    is_serve: bool,
) -> CommandResult<Vec<OsString>> {
    let mut flags: Vec<OsString> = Vec::new();
    let (mut is_offline, mut names_repository) = (false, false);
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            flags.push(argument);
            flags.extend(arguments);
            break;
        }
        let Some(text) = argument.to_str().map(str::to_owned) else {
            flags.push(argument);
            continue;
        };
        let (word, own_value) = match text.split_once('=') {
            Some((word, value)) => (word, Some(value)),
            None => (&*text, None),
        };
        let mut value = || match own_value {
            Some(value) => Ok(value.into()),
            None => arguments
                .next()
                .ok_or_else(|| CommandError::usage(format_args!("{word}: a value is missing"))),
        };
        let mut flag = word;
        match meaning(word, is_serve) {
            None => flags.push(argument),
            Some(Meaning::Flag(name)) => {
                flag = name;
                flags.push(match own_value {
                    Some(value) => format!("{name}={value}").into(),
                    None => name.into(),
                });
            }
            Some(Meaning::Ignored) => {}
            Some(Meaning::IgnoredValue) => drop(value()?),
            Some(Meaning::Unsupported(remedy)) => {
                return Err(CommandError::usage(format_args!("{word}: {remedy}")));
            }
            Some(Meaning::FlashAttention) => flags.extend(flash_attention(word, &value()?)?),
            Some(Meaning::Verbosity) => flags.extend(log_filter(word, &value()?)?),
            Some(Meaning::Offline) => is_offline = true,
        }
        names_repository |= flag == "--hf-repo";
        if TEXT_FLAGS.contains(&&*text) {
            flags.extend(arguments.next());
        }
    }
    if is_offline && names_repository {
        flags.push("--offline".into());
    }
    Ok(flags)
}

/// Returns the meaning of a word that is not samite's own spelling.
fn meaning(word: &str, is_serve: bool) -> Option<Meaning> {
    let mut rows = SPELLINGS.iter();
    let row = rows.find(|(spelling, commands, _)| *spelling == word && commands.include(is_serve));
    row.map(|(_, _, meaning)| *meaning)
}

/// Returns the flag for a value of llama-server's `--flash-attn`, unless it is the default.
fn flash_attention(word: &str, value: &OsStr) -> CommandResult<Option<OsString>> {
    match value.to_string_lossy().as_ref() {
        "off" | "0" | "false" | "disabled" => Ok(Some("--no-flash".into())),
        "on" | "1" | "true" | "enabled" | "auto" | "-1" => Ok(None),
        other => Err(CommandError::usage(format_args!(
            "{word}: must be on, off or auto, and is '{other}'"
        ))),
    }
}

/// Returns the flag for a level of llama-server's log, unless it shows no more than the default.
fn log_filter(word: &str, value: &OsStr) -> CommandResult<Option<OsString>> {
    let value = value.to_string_lossy();
    match value.parse::<i32>() {
        Ok(..4) => Ok(None),
        Ok(4) => Ok(Some("--log=info".into())),
        Ok(_) => Ok(Some("--log=debug".into())),
        Err(_) => Err(CommandError::usage(format_args!(
            "{word}: must be a number, and is '{value}'"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> impl Iterator<Item = OsString> {
        line.split(' ').map(OsString::from)
    }

    fn joined(words: Vec<OsString>) -> String {
        let words = words.into_iter().map(|word| word.into_string().unwrap());
        words.collect::<Vec<_>>().join(" ")
    }

    fn translated(line: &str) -> String {
        joined(flags(words(line), false).unwrap())
    }

    fn served(line: &str) -> String {
        joined(flags(words(line), true).unwrap())
    }

    #[test]
    fn no_spelling_has_two_meanings() {
        for (i, (word, commands, _)) in SPELLINGS.iter().enumerate() {
            assert!(word.starts_with('-'), "{word}");
            for (other, others, _) in &SPELLINGS[..i] {
                let both = [true, false].into_iter().any(|is_serve| {
                    commands.include(is_serve) && others.include(is_serve) && word == other
                });
                assert!(!both, "{word}");
            }
        }
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
    fn unsupported_flags_fail_with_a_remedy() {
        for (line, part) in [
            ("run -cnv", "-cnv: `samite chat`"),
            (
                "run -md draft.gguf",
                "-md: only `samite serve` has draft models",
            ),
        ] {
            match flags(words(line), false) {
                Err(CommandError::Usage(message)) => {
                    assert!(message.starts_with(part), "{message}")
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn serve_takes_flags_of_llama_server() {
        assert_eq!(
            served("-m x.gguf -np 2 -fa on --cont-batching --offline"),
            "-m x.gguf --parallel 2"
        );
        assert_eq!(served("-fa off -to 30 --keep=3"), "--no-flash --keep=3");
        assert_eq!(
            served("--gpu-layers 9 -mg 1 --repack --spec-type none -lm mmap"),
            "--ngl 9 --main-gpu 1 --load-mode mmap"
        );
        #[cfg(feature = "hub")]
        assert_eq!(served("--hf-repo a/b --offline"), "--hf-repo a/b --offline");
        assert_eq!(
            served("-md d.gguf --draft-min 2 --draft-n 8"),
            "--model-draft d.gguf --draft 8"
        );
        assert_eq!(
            served("--chat-template -cb -cb --webui"),
            "--chat-template -cb"
        );
        assert_eq!(
            served("-mm=v.gguf --mmproj-offload -lv 3 -c 9"),
            "--mmproj=v.gguf -c 9"
        );
        assert_eq!(
            served("--log-verbosity 4 -lv=5 -lv -1"),
            "--log=info --log=debug"
        );
        assert!(flags(words("-lv loud"), true).is_err());
        assert!(flags(words("-fa maybe"), true).is_err());
        assert!(flags(words("--timeout"), true).is_err());
    }

    #[test]
    fn repeated_models_are_also_served() {
        let line = words("-m a.gguf -c 64 --model=b.gguf -m c.gguf").collect();
        assert_eq!(
            joined(several_models(line)),
            "-m a.gguf -c 64 --also-model=b.gguf --also-model c.gguf"
        );
    }

    #[test]
    fn other_commands_have_no_flags_of_llama_server() {
        let translated = |line| joined(translate(words(line)).unwrap());
        let run = "samite run serve -np 2";
        assert_eq!(translated(run), run);
        assert!(translated("samite -v serve -np 2").ends_with("--parallel 2"));
    }

    #[test]
    fn names_of_llama_cpp_programs_select_commands() {
        let translated = |line: &str| joined(translate(words(line)).unwrap());
        for name in [
            "llama-server",
            "/lib/ollama/llama-server",
            "llama-server.exe",
        ] {
            let started = translated(&format!("{name} -np 2"));
            assert!(started.starts_with(&format!("{name} serve ")), "{started}");
            assert!(started.ends_with(" --parallel 2"), "{started}");
        }
        assert_eq!(
            translated("./llama-quantize a.gguf b.gguf Q8_0"),
            "./llama-quantize quantize --fill-output a.gguf b.gguf Q8_0"
        );
        for unchanged in [
            "llama-server probe-plugin libggml-vulkan.so",
            "my-llama-server devices",
            "llama-server.old devices",
            "llama-server serve",
        ] {
            assert_eq!(translated(unchanged), unchanged);
        }
    }
}
