//! Flags that constrain the generated text.

use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use clap::Args;
use samite::grammar::{Grammar, GrammarError, GrammarVocabulary};
use samite::text::{Constraint, Tokenizer};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Flags for grammars.
#[derive(Debug, Args)]
#[command(next_help_heading = "Grammar")]
pub struct GrammarArgs {
    /// Constrain the text to this GBNF grammar: `root ::= "yes" | "no"`
    #[arg(
        long,
        value_name = "GRAMMAR",
        allow_hyphen_values = true,
        group = "keeps_to"
    )]
    grammar: Option<String>,

    /// File with the GBNF grammar
    #[arg(long, value_name = "FILE", group = "keeps_to")]
    grammar_file: Option<PathBuf>,

    /// Constrain the text to JSON that matches this schema; `{}` for any JSON
    #[arg(short, long, value_name = "SCHEMA", group = "keeps_to")]
    json_schema: Option<String>,

    /// File with the JSON schema [also: -jf]
    #[arg(long, value_name = "FILE", group = "keeps_to")]
    json_schema_file: Option<PathBuf>,
}

/// A grammar, and its name in messages.
pub struct Named {
    grammar: Grammar,
    name: String,
}

impl GrammarArgs {
    /// Reads the grammar that the flags specify.
    pub fn read(&self) -> CommandResult<Option<Named>> {
        type Form = fn(&str) -> Result<Grammar, GrammarError>;
        let text =
            |flag: &str, text: &Option<String>| text.clone().map(|text| (flag.to_owned(), text));
        let file = |path: &Option<PathBuf>| path.as_deref().map(read_file).transpose();
        let all: [(Form, _); 4] = [
            (Grammar::gbnf, text("--grammar", &self.grammar)),
            (Grammar::gbnf, file(&self.grammar_file)?),
            (
                Grammar::json_schema,
                text("--json-schema", &self.json_schema),
            ),
            (Grammar::json_schema, file(&self.json_schema_file)?),
        ];
        let given = all.into_iter().find_map(|(form, text)| Some((form, text?)));
        given
            .map(|(form, (name, text))| match form(&text).and_then(checked) {
                Ok(grammar) => Ok(Named { grammar, name }),
                Err(error) => Err(CommandError::usage(format_args!("{name}: {error}"))),
            })
            .transpose()
    }
}

impl Named {
    /// Returns the grammar alone.
    pub fn into_grammar(self) -> Grammar {
        self.grammar
    }

    /// Returns the constraint for the sampler.
    pub fn constraint(&self, tokenizer: &Arc<Tokenizer>) -> CommandResult<Box<dyn Constraint>> {
        let vocabulary = GrammarVocabulary::new(tokenizer).map_err(CommandError::error)?;
        match self.grammar.constraint(&vocabulary) {
            Ok(constraint) => Ok(Box::new(constraint)),
            Err(error) => Err(CommandError::error(format_args!("{}: {error}", self.name))),
        }
    }
}

/// Checks a grammar now rather than after loading a large file.
fn checked(grammar: Grammar) -> Result<Grammar, GrammarError> {
    grammar.check()?;
    Ok(grammar)
}

/// Returns the name of a file, and its text.
fn read_file(path: &Path) -> CommandResult<(String, String)> {
    // Larger than any supported grammar or schema.
    const MAX_BYTES: u64 = 2 << 20;
    let source = TextSource::file(path)?;
    let name = source.name().to_owned();
    Ok((name, source.read_all(MAX_BYTES)?))
}
