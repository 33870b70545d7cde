//! Cutting text into words before byte-level BPE.
//!
//! A pre-tokenizer is a list of passes, each over the pieces that the one before left ([`names`] has them all). A pass cuts out what an
//! expression matches and leaves what lies between; expressions are those of the models' own tokenizers and are matched in linear time
//! ([`crate::pattern`]). Grouping digits from the right, for which expressions look ahead over all of them, is a pass of its own.

use crate::error::VocabError;
use crate::pattern::Pattern;

mod names;
mod thousands;

pub(crate) use names::{Settings, settings};
use thousands::Thousands;

/// One way over the text.
#[derive(Debug, Clone, Copy)]
enum Pass {
    /// What the expression matches is cut out.
    Cut(&'static str),
    /// Digits are grouped from the right.
    Group(Thousands),
}

/// A pass that is ready.
#[derive(Debug)]
enum Stage {
    Cut(Pattern),
    Group(Thousands),
}

/// How text is cut into words (`tokenizer.ggml.pre`).
#[derive(Debug)]
pub struct PreTokenizer {
    stages: Vec<Stage>,
}

impl PreTokenizer {
    /// The pre-tokenizer of this name. A file without the key, or with an empty one, gets `"default"`.
    ///
    /// # Errors
    /// [`VocabError::UnknownPreTokenizer`] lists the names that are known.
    pub fn named(name: Option<&str>) -> Result<Self, VocabError> {
        settings(name).map(Self::new)
    }

    /// All names, in the order of their families.
    pub fn names() -> impl Iterator<Item = &'static str> {
        names::all()
    }

    pub(crate) fn new(settings: Settings) -> Self {
        let stages = settings.passes.iter().map(|pass| match *pass {
            Pass::Cut(expression) => Stage::Cut(Pattern::new(expression)),
            Pass::Group(thousands) => Stage::Group(thousands),
        });
        Self {
            stages: stages.collect(),
        }
    }

    /// Calls `emit` for each word of `text`, in order; joined, the words are the text again.
    pub fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        split(&self.stages, text, emit);
    }

    /// Whether a text is always cut before the byte number `at` of `example`, for all that is like it there.
    pub(crate) fn cuts(&self, example: &str, at: usize) -> bool {
        let (mut end, mut found) = (0, false);
        self.split(example, &mut |word| {
            end += word.len();
            found |= end == at;
        });
        found
    }
}

fn split<'t>(stages: &[Stage], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let Some((stage, rest)) = stages.split_first() else {
        return emit(text);
    };
    let mut next = |piece: &'t str| split(rest, piece, emit);
    let emit: &mut dyn FnMut(&'t str) = &mut next;
    match stage {
        Stage::Cut(pattern) => pattern.split(text, emit),
        Stage::Group(thousands) => thousands.split(text, emit),
    }
}
