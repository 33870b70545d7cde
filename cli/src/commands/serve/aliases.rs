//! Translates llama-server's flags and variables to those of `samite serve`.

use crate::failure::{CommandError, CommandResult};
use std::ffi::OsString;

/// Flags with other names here.
const NAMES: &[(&str, &str)] = &[
    ("-np", "--parallel"),
    ("-kvu", "--kv-unified"),
    ("-no-kvu", "--no-kv-unified"),
    ("-cram", "--cache-ram"),
    ("-rea", "--reasoning"),
    ("--webui", "--ui"),
    ("--embd-normalize", "--embd-normalize"),
    ("--gpu-layers", "--ngl"),
    ("-lm", "--load-mode"),
    ("--n-parallel", "--parallel"),
    ("-md", "--model-draft"),
    ("--spec-draft-model", "--model-draft"),
    ("--draft-n", "--draft"),
    ("--spec-draft-n-max", "--draft"),
    ("--spec-draft-p-min", "--draft-p-min"),
];

/// Flags that are accepted and ignored: they ask for the default, or do not apply.
const NEEDLESS: &[&str] = &[
    "--ui",
    "-cb",
    "--cont-batching",
    "--warmup",
    "--no-warmup",
    "--jinja",
    "--no-jinja",
    "--log-disable",
    "--log-prefix",
    "--no-log-prefix",
    "--log-timestamps",
    "--no-log-timestamps",
    "--perf",
    "--no-perf",
    "--repack",
    "--kv-offload",
    "-kvo",
    "--op-offload",
    // Images are not supported.
    "--mmproj-offload",
    "--no-mmproj-offload",
    "--spec-draft-backend-sampling",
    "--no-spec-draft-backend-sampling",
    "--escape",
    "--no-escape",
    "-e",
    "--backend_sampling",
    "--backend-sampling",
    "-bs",
    "--cache-idle-slots",
    "--no-cache-idle-slots",
    "--no-mmproj",
    "--no-mmproj-auto",
    "--mmproj-auto",
    "--skip-chat-parsing",
    "--no-skip-chat-parsing",
];

/// Ignored flags with a value.
const NEEDLESS_VALUES: &[&str] = &[
    "--threads-http",
    "--cache-reuse",
    "--timeout",
    "-to",
    "-lv",
    "--verbosity",
    "--log-verbosity",
    "--log-colors",
    "--ctx-checkpoints",
    "-ctxcp",
    "--swa-checkpoints",
    "--checkpoint-every-n-tokens",
    "--slot-prompt-similarity",
    "-sps",
    // The draft length is tuned by measurement, and a draft model has the model's context size.
    "--draft-min",
    "--draft-n-min",
    "--spec-draft-n-min",
    "--draft-p-split",
    "--spec-draft-p-split",
    "--ctx-size-draft",
    "-cd",
    "--spec-type",
    "--spec-draft-sampling",
    "-cms",
    "--checkpoint-min-step",
    // The first device gets everything that is not placed elsewhere.
    "-mg",
    "--main-gpu",
    "--image-min-tokens",
    "--image-max-tokens",
    "--mtmd-batch-max-tokens",
    "--defrag-thold",
    "-dt",
];

/// Flag of each variable, without its prefix `LLAMA_ARG_`, and whether the flag has a value.
const VARIABLES: &[(&str, &str, bool)] = &[
    ("MODEL", "--model", true),
    ("HF_REPO", "--hf-repo", true),
    ("HF_FILE", "--hf-file", true),
    ("CTX_SIZE", "--ctx-size", true),
    ("N_PARALLEL", "--parallel", true),
    ("BATCH", "--batch-size", true),
    ("UBATCH", "--ubatch-size", true),
    ("THREADS", "--threads", true),
    ("THREADS_BATCH", "--threads-batch", true),
    ("N_GPU_LAYERS", "--ngl", true),
    ("DEVICE", "--device", true),
    ("SPLIT_MODE", "--split-mode", true),
    ("TENSOR_SPLIT", "--tensor-split", true),
    ("HOST", "--host", true),
    ("PORT", "--port", true),
    ("ALIAS", "--alias", true),
    ("TAGS", "--tags", true),
    ("API_PREFIX", "--api-prefix", true),
    ("N_PREDICT", "--n-predict", true),
    ("FLASH_ATTN", "--flash-attn", true),
    ("CACHE_TYPE_K", "--cache-type-k", true),
    ("CACHE_TYPE_V", "--cache-type-v", true),
    ("CACHE_RAM", "--cache-ram", true),
    ("KV_UNIFIED", "--kv-unified", false),
    ("EMBEDDINGS", "--embeddings", false),
    ("RERANKING", "--reranking", false),
    ("POOLING", "--pooling", true),
    ("ENDPOINT_METRICS", "--metrics", false),
    ("ENDPOINT_PROPS", "--props", false),
    ("NO_ENDPOINT_SLOTS", "--no-slots", false),
    ("NO_UI", "--no-ui", false),
    ("NO_WEBUI", "--no-ui", false),
    ("CHAT_TEMPLATE", "--chat-template", true),
    ("CHAT_TEMPLATE_FILE", "--chat-template-file", true),
    ("CHAT_TEMPLATE_KWARGS", "--chat-template-kwargs", true),
    ("THINK", "--reasoning-format", true),
    ("REASONING", "--reasoning", true),
    ("THINK_BUDGET", "--reasoning-budget", true),
    ("CONTEXT_SHIFT", "--context-shift", false),
    ("SLOT_SAVE_PATH", "--slot-save-path", true),
    ("MLOCK", "--mlock", false),
    ("SWA_FULL", "--swa-full", false),
    ("MODEL_DRAFT", "--model-draft", true),
    ("DRAFT_MAX", "--draft", true),
    ("SPEC_DRAFT_MODEL", "--model-draft", true),
    ("SPEC_DRAFT_N_MAX", "--draft", true),
    ("SPEC_DRAFT_P_MIN", "--draft-p-min", true),
    ("API_KEY", "--api-key", true),
    ("API_KEY_FILE", "--api-key-file", true),
    ("SSL_KEY_FILE", "--ssl-key-file", true),
    ("SSL_CERT_FILE", "--ssl-cert-file", true),
    ("MODELS_DIR", "--models-dir", true),
    ("MODELS_MAX", "--models-max", true),
];

/// Translates llama-server's spellings in arguments of `samite serve`. Inserts its variables before
/// the arguments, so that flags override them. Other arguments stay unchanged.
pub fn translate(arguments: impl Iterator<Item = OsString>) -> CommandResult<Vec<OsString>> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let Some(at) = arguments.iter().skip(1).position(|word| word == "serve") else {
        return Ok(arguments);
    };
    // The command comes first, except for logging flags.
    let before = &arguments[1..=at];
    if !before
        .iter()
        .all(|word| word.to_string_lossy().starts_with('-'))
    {
        return Ok(arguments);
    }
    let rest = arguments.split_off(at + 2);
    if rest.iter().any(|word| word == "--list-devices") {
        arguments[at + 1] = "devices".into();
        return Ok(arguments);
    }
    let variables = variables(|name| std::env::var(name).ok());
    let rest = several_models(rest);
    arguments.extend(flags(variables.into_iter().chain(rest))?);
    Ok(arguments)
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

/// Returns the variables as flags.
fn variables(get: impl Fn(&str) -> Option<String>) -> Vec<OsString> {
    let mut flags: Vec<OsString> = Vec::new();
    let key = ("API_KEY", "LLAMA_API_KEY");
    for (name, flag, has_value) in VARIABLES {
        let value = get(&format!("LLAMA_ARG_{name}"));
        let value = value.or_else(|| if *name == key.0 { get(key.1) } else { None });
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            continue;
        };
        if *has_value {
            flags.extend([OsString::from(*flag), value.into()]);
        } else if ["1", "on", "true", "enabled"].contains(&value.to_lowercase().as_str()) {
            flags.push((*flag).into());
        }
    }
    flags
}

fn flags(arguments: impl Iterator<Item = OsString>) -> CommandResult<Vec<OsString>> {
    let mut arguments = arguments.peekable();
    let mut flags = Vec::new();
    let mut names_repository = false;
    let mut is_offline = false;
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy().into_owned();
        let (word, own) = match text.split_once('=').filter(|_| text.starts_with('-')) {
            Some((word, value)) => (word.to_owned(), Some(value.to_owned())),
            None => (text, None),
        };
        let mut value = |needed: &str| match &own {
            Some(value) => Ok(value.clone()),
            None => arguments
                .next()
                .map(|value| value.to_string_lossy().into_owned())
                .ok_or_else(|| CommandError::usage(format_args!("{needed}: a value is missing"))),
        };
        match word.as_str() {
            "-fa" | "--flash-attn" => match value(&word)?.as_str() {
                "off" | "0" | "false" | "disabled" => flags.push("--no-flash".into()),
                "on" | "1" | "true" | "enabled" | "auto" | "-1" => {}
                other => {
                    return Err(CommandError::usage(format_args!(
                        "{word}: must be on, off or auto, and is '{other}'"
                    )));
                }
            },
            "--offline" => is_offline = true,
            known if NEEDLESS.contains(&known) => {}
            known if NEEDLESS_VALUES.contains(&known) => {
                value(known)?;
            }
            "-hf" | "-hfr" | "--hf-repo" => {
                names_repository = true;
                flags.push(argument);
            }
            known => match NAMES.iter().find(|(short, _)| *short == known) {
                Some((_, long)) if NEEDLESS.contains(long) => {}
                Some((_, long)) => flags.push(match &own {
                    Some(value) => format!("{long}={value}").into(),
                    None => (*long).into(),
                }),
                None => flags.push(argument),
            },
        }
    }
    // A model given as a file is never downloaded.
    if is_offline && names_repository {
        flags.push("--offline".into());
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &[OsString]) -> String {
        let words = list.iter().map(|word| word.to_string_lossy().into_owned());
        words.collect::<Vec<_>>().join(" ")
    }

    fn line(line: &str) -> String {
        words(&flags(line.split(' ').map(OsString::from)).unwrap())
    }

    #[test]
    fn llama_server_flags_are_translated() {
        assert_eq!(
            line("-m x.gguf -np 2 -fa on --cont-batching --offline"),
            "-m x.gguf --parallel 2"
        );
        assert_eq!(line("-fa off -to 30 --keep=3"), "--no-flash --keep=3");
        assert_eq!(
            line("--gpu-layers 9 --main-gpu 0 --repack --spec-type none -lm mmap"),
            "--ngl 9 --load-mode mmap"
        );
        assert_eq!(line("--hf-repo a/b --offline"), "--hf-repo a/b --offline");
        assert_eq!(
            line("-md d.gguf --draft-min 2 --draft-n 8"),
            "--model-draft d.gguf --draft 8"
        );
        assert!(flags(["-fa", "maybe"].map(OsString::from).into_iter()).is_err());
        assert!(flags(["--timeout"].map(OsString::from).into_iter()).is_err());
    }

    #[test]
    fn repeated_model_flags_add_models() {
        let line = "-m a.gguf -c 64 --model=b.gguf -m c.gguf";
        let line = line.split(' ').map(OsString::from).collect();
        assert_eq!(
            words(&several_models(line)),
            "-m a.gguf -c 64 --also-model=b.gguf --also-model c.gguf"
        );
    }

    #[test]
    fn llama_server_variables_become_flags() {
        let get = |name: &str| match name {
            "LLAMA_ARG_HOST" => Some("::1".to_owned()),
            "LLAMA_ARG_ENDPOINT_METRICS" => Some("1".to_owned()),
            "LLAMA_ARG_KV_UNIFIED" => Some("0".to_owned()),
            "LLAMA_API_KEY" => Some("k".to_owned()),
            _ => None,
        };
        assert_eq!(words(&variables(get)), "--host ::1 --metrics --api-key k");
    }

    #[test]
    fn other_commands_are_not_translated() {
        let line = ["samite", "run", "serve", "-np", "2"].map(OsString::from);
        assert_eq!(translate(line.clone().into_iter()).unwrap(), line);
        let line = ["samite", "-v", "serve", "-np", "2"].map(OsString::from);
        let translated = translate(line.into_iter()).unwrap();
        assert!(words(&translated).ends_with("--parallel 2"));
        let line = ["samite", "serve", "-m", "x.gguf", "--list-devices"].map(OsString::from);
        assert_eq!(
            words(&translate(line.into_iter()).unwrap()),
            "samite devices"
        );
    }
}
