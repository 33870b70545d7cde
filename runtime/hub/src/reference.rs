//! Model references.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// A repository and optionally one of its models: `owner/name`, `owner/name:Q8_0`,
/// `owner/name:folder/file.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// `owner/name`.
    pub repository: String,
    /// A quantization, or a file path.
    pub wanted: Option<String>,
}

/// Returns whether `name` is valid as a part of a repository's name.
fn is_name(name: &str) -> bool {
    let is_usual = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=96).contains(&name.len())
        && name.chars().all(is_usual)
        && !name.starts_with(['-', '.'])
        && !name.contains("..")
        && !name.contains("--")
}

/// Returns whether `path` stays below the folder that it is relative to, on every system.
pub(crate) fn is_inner_path(path: &str) -> bool {
    let is_usual =
        |c: char| !c.is_control() && !matches!(c, '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|');
    let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.ends_with(['.', ' ']);
    path.len() <= 512 && path.chars().all(is_usual) && path.split('/').all(is_part)
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::Reference(text.escape_debug().to_string());
        let rest = text.strip_prefix("https://").unwrap_or(text);
        let rest = ["huggingface.co/", "hf.co/"]
            .iter()
            .find_map(|host| rest.strip_prefix(host))
            .unwrap_or(rest);
        // The URL of a file, as shown in a browser.
        let (repository, wanted) = match rest
            .split_once("/blob/main/")
            .or_else(|| rest.split_once("/resolve/main/"))
        {
            Some((repository, file)) => (repository, Some(file)),
            None => match rest.split_once(':') {
                Some((repository, wanted)) => (repository, Some(wanted)),
                None => (rest, None),
            },
        };
        let (owner, name) = repository.split_once('/').ok_or_else(wrong)?;
        if !is_name(owner) || !is_name(name) || wanted.is_some_and(|wanted| !is_inner_path(wanted))
        {
            return Err(wrong());
        }
        Ok(Reference {
            repository: repository.to_owned(),
            // Other programs use this tag for no preference.
            wanted: wanted
                .filter(|&wanted| wanted != "latest")
                .map(str::to_owned),
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        match &self.wanted {
            Some(wanted) => write!(f, ":{wanted}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_references_are_parsed() {
        for (text, repository, wanted) in [
            ("a/b", "a/b", None),
            (
                "unsloth/Qwen3-0.6B-GGUF:q8_0",
                "unsloth/Qwen3-0.6B-GGUF",
                Some("q8_0"),
            ),
            ("hf.co/a/b:latest", "a/b", None),
            ("https://huggingface.co/a/b.c", "a/b.c", None),
            (
                "https://huggingface.co/a/b/blob/main/x/y.gguf",
                "a/b",
                Some("x/y.gguf"),
            ),
            (
                "a/b:x/y-00001-of-00002.gguf",
                "a/b",
                Some("x/y-00001-of-00002.gguf"),
            ),
        ] {
            let read: Reference = text.parse().unwrap();
            assert_eq!(
                (read.repository.as_str(), read.wanted.as_deref()),
                (repository, wanted),
                "{text}"
            );
        }
        assert_eq!(
            "a/b:Q8_0".parse::<Reference>().unwrap().to_string(),
            "a/b:Q8_0"
        );
    }

    #[test]
    fn references_that_escape_the_cache_are_refused() {
        for text in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/b:",
            "a/b:../x",
            "a/b:/x",
            "a/b:x//y",
            "a/b:x/../y",
            "a\\b/c",
            "a/b:x\\y",
            "a--b/c",
            "a/b:c:d",
            "a/b c",
            "-a/b",
            "a/b:x\n",
            "a/b:con.",
            "http://a/b",
        ] {
            let error = text.parse::<Reference>();
            assert!(error.is_err(), "{text}: {error:?}");
        }
    }
}
