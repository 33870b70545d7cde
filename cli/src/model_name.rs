//! Models named by a positional argument: `samite chat model.gguf`, `samite serve owner/name`.

use crate::args::ModelArgs;
use crate::failure::{CommandError, CommandResult};
use clap::Args;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Flag group for a model as the only positional argument of a command.
#[derive(Clone, Debug, Args)]
pub struct ModelName {
    /// Model: a GGUF file (as -m) or OWNER/NAME of a repository (as -hf)
    #[arg(value_name = "MODEL")]
    model_name: Option<String>,
}

impl ModelName {
    /// Adds the model to the flags, if there is one.
    pub fn apply(&self, model: &mut ModelArgs) -> CommandResult {
        match &self.model_name {
            Some(name) => set_model(model, name),
            None => Ok(()),
        }
    }
}

/// Uses the model that a positional argument names.
///
/// # Errors
/// Returns an error if flags name another model.
pub fn set_model(args: &mut ModelArgs, name: &str) -> CommandResult {
    #[cfg(feature = "hub")]
    let is_on_hub = args.hub.hf_repo.is_some();
    #[cfg(not(feature = "hub"))]
    let is_on_hub = false;
    if args.model.is_some() || is_on_hub {
        return Err(CommandError::usage(format_args!(
            "'{}' names a model, and so do the flags: leave out one of them",
            name.escape_debug()
        )));
    }
    match PositionalArg::new(name) {
        #[cfg(feature = "hub")]
        PositionalArg::Repository(reference) => args.hub.hf_repo = Some(reference),
        PositionalArg::File | PositionalArg::Other => args.model = Some(name.into()),
    }
    Ok(())
}

/// Meaning of a positional argument.
pub enum PositionalArg {
    /// A file, or a text that can only be meant as one.
    File,
    /// A repository on the hub.
    #[cfg(feature = "hub")]
    Repository(samite::hub::Reference),
    /// Anything else: a text, or a file that does not exist.
    Other,
}

impl PositionalArg {
    /// Determines the meaning of `text`.
    pub fn new(text: &str) -> Self {
        let path = Path::new(text);
        let has_ending = path
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        // A text of several words may end with the name of a file.
        let is_word = !text.contains(char::is_whitespace);
        if has_ending && (is_word || path.is_file()) || is_gguf(path) {
            return PositionalArg::File;
        }
        #[cfg(feature = "hub")]
        if let Ok(reference) = text.parse() {
            return PositionalArg::Repository(reference);
        }
        PositionalArg::Other
    }
}

/// Returns whether a file starts like a GGUF file, whatever its name.
fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let mut read = || File::open(path)?.read_exact(&mut magic);
    // Opening a pipe would wait for its writer.
    path.is_file() && read().is_ok() && &magic == b"GGUF"
}

/// Splits the positional arguments of `samite run` into a model and a text. A single one is a model
/// if it looks like one.
///
/// # Errors
/// Returns an error if there are two and the first one is not a model.
pub fn model_and_text(
    first: Option<String>,
    second: Option<String>,
) -> CommandResult<(Option<String>, Option<String>)> {
    let Some(first) = first else {
        return Ok((None, second));
    };
    match (PositionalArg::new(&first), second) {
        (PositionalArg::Other, None) => Ok((None, Some(first))),
        (PositionalArg::Other, Some(_)) => Err(CommandError::usage(format_args!(
            "'{}' is not a model: quote a text of several words, or give it with -p",
            first.escape_debug()
        ))),
        (_, text) => Ok((Some(first), text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(first: &str, second: Option<&str>) -> (Option<String>, Option<String>) {
        model_and_text(Some(first.into()), second.map(str::to_owned)).unwrap()
    }

    #[test]
    fn models_are_distinguished_from_prompts() {
        for text in [
            "Once upon a time",
            "Hello",
            "1/2 of a cake",
            "Explain model.gguf",
            "Cargo.toml",
            "",
            "a.gguf\nb.gguf",
        ] {
            assert_eq!(divided(text, None), (None, Some(text.to_owned())), "{text}");
        }
        for model in ["missing.gguf", "./folder/Model.GGUF"] {
            assert_eq!(
                divided(model, None),
                (Some(model.to_owned()), None),
                "{model}"
            );
        }
        assert_eq!(
            divided("m.gguf", Some("and/or")),
            (Some("m.gguf".to_owned()), Some("and/or".to_owned()))
        );
        assert!(model_and_text(Some("Once".into()), Some("upon".into())).is_err());
    }

    #[cfg(feature = "hub")]
    #[test]
    fn repository_names_are_models() {
        for model in ["owner/name", "owner/name-GGUF:Q4_K_M", "hf.co/owner/name"] {
            assert_eq!(
                divided(model, None),
                (Some(model.to_owned()), None),
                "{model}"
            );
        }
    }
}
