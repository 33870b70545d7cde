//! Formats: how models write reasoning and calls, as data.

mod table;

pub use table::{FORMATS, HERMES, PLAIN};

use super::json::CallKeys;
use super::literal::Style;
use samite_text::{TokenAttributes, Tokenizer};

/// The format of a model's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Name for users.
    pub name: &'static str,
    /// Marks that start and end reasoning.
    pub thoughts: &'static [(&'static str, &'static str)],
    /// Marks to drop.
    pub hidden: &'static [&'static str],
    /// Format of tool calls.
    pub calls: Calls,
    /// Source of the IDs of calls.
    pub ids: Ids,
}

/// Source of the IDs of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// The model's ID, or a generated one if there is none.
    Made,
    /// Like `Made`, but generated IDs have nine letters and digits, as Mistral's templates require.
    Nine,
    /// Text in place of a name, such as `functions.get_weather:0`, which contains the name.
    Text,
}

/// Format of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// No calls.
    None,
    /// A JSON object or a list of them, between marks.
    Json(JsonCalls),
    /// A name, then arguments in JSON.
    Named(NamedCalls),
    /// A name, then arguments one by one, each between marks.
    Tagged(TaggedCalls),
    /// A name, then arguments as literals of another language.
    Literal(LiteralCalls),
    /// Messages with headers that name the recipient.
    Channels(Channels),
}

/// Objects between marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonCalls {
    /// Opening marks; a call starts with one of them.
    pub open: &'static [&'static str],
    /// Closing marks; they may be missing at the end of the answer.
    pub close: &'static [&'static str],
    /// Separator of calls that are not in a list.
    pub separator: &'static str,
    /// True if an answer that starts with an object is also a call.
    pub is_bare: bool,
    /// Names of the members.
    pub keys: CallKeys,
}

/// Names, each with JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedCalls {
    /// Optional marks around all calls.
    pub section: Option<(&'static str, &'static str)>,
    /// Mark before a name.
    pub open: &'static str,
    /// Mark after an ID that precedes the name.
    pub id_end: Option<&'static str>,
    /// Mark before an optional ID that follows the name.
    pub id_open: Option<&'static str>,
    /// Mark between name and arguments.
    pub middle: &'static str,
    /// Optional text after that mark, before the arguments.
    pub fence: &'static str,
    /// Marks after the arguments; they may be missing.
    pub close: &'static [&'static str],
    /// Name that marks content instead of a call.
    pub text_name: Option<&'static str>,
}

/// Arguments one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedCalls {
    /// Marks around one or all calls.
    pub section: Option<(&'static str, &'static str)>,
    /// Mark before a name; empty if the section's mark precedes it.
    pub open: &'static str,
    /// Mark after a name; empty if the next mark ends it.
    pub name_end: &'static str,
    /// Mark after the head that contains the name, if it differs from `name_end`.
    pub head_end: &'static str,
    /// Mark before the name of an argument.
    pub key_open: &'static str,
    /// Mark after it.
    pub key_end: &'static str,
    /// Mark after the argument's head. The type of the value may stand between the two.
    pub key_head_end: &'static str,
    /// Mark before a value.
    pub value_open: &'static str,
    /// Mark after it.
    pub value_close: &'static str,
    /// Mark after a call; empty if the section's mark ends it.
    pub close: &'static str,
    /// Text in the head of an argument whose value is a text. Without it, the value is JSON.
    pub is_text: Option<&'static str>,
    /// True if values may be between `<![CDATA[` and `]]>`.
    pub has_cdata: bool,
}

/// Arguments in another language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiteralCalls {
    /// Mark before the first call, or before each.
    pub open: &'static str,
    /// Text between that mark and a name.
    pub name_open: &'static str,
    /// Mark after the arguments.
    pub close: &'static str,
    /// Language of the literals.
    pub style: Style,
    /// True if several calls may be in a list.
    pub is_list: bool,
}

/// Messages with headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    /// Marks that start a header.
    pub starts: &'static [&'static str],
    /// Mark that ends it.
    pub message: &'static str,
    /// End of the header of content for the user.
    pub to_user: &'static str,
    /// Marks that end a message.
    pub ends: &'static [&'static str],
    /// Words in headers of reasoning.
    pub thoughts: &'static [&'static str],
    /// Marks in headers that count as white space.
    pub marks: &'static [&'static str],
    /// Known words in headers, and recipients that are not tools. A message to any other recipient
    /// has arguments.
    pub words: &'static [&'static str],
    /// Format of other calls inside messages.
    pub inner: Option<&'static Format>,
    /// Texts around the name in a header, and after the arguments, that make a call of the inner
    /// format of them. Without, such a call names its tool itself.
    pub wrapper: Option<[&'static str; 3]>,
    /// True if a space after the mark of a message is not part of its text.
    pub is_spaced: bool,
}

impl Format {
    /// Returns the format of models with this chat template.
    pub fn of_template(source: &str) -> &'static Format {
        let fits = |marks: &[&str]| marks.iter().all(|mark| source.contains(mark));
        FORMATS
            .iter()
            .find(|(_, marks)| fits(marks))
            .map_or(&PLAIN, |(format, _)| format)
    }

    /// Returns the format with this name.
    pub fn named(name: &str) -> Option<&'static Format> {
        FORMATS
            .iter()
            .map(|(format, _)| *format)
            .chain([&PLAIN])
            .find(|format| format.name == name)
    }

    /// Returns the control tokens that marks consist of. Their names must be part of the text to
    /// parse.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let marks = self.marks();
        let is_part = |id: &u32| {
            let is_control = tokenizer
                .attributes(*id)
                .is_ok_and(|attributes| attributes.intersects(TokenAttributes::CONTROL));
            let name = tokenizer.token_to_piece(*id, true).unwrap_or_default();
            let name = std::str::from_utf8(name).unwrap_or_default();
            is_control && !name.is_empty() && marks.iter().any(|mark| mark.contains(name))
        };
        (0..tokenizer.vocab_size() as u32).filter(is_part).collect()
    }

    /// Returns all marks. If tokens stand for them, their text must be part of the text to parse.
    pub fn marks(&self) -> Vec<&'static str> {
        let mut marks: Vec<&str> = self
            .thoughts
            .iter()
            .flat_map(|(open, close)| [*open, *close])
            .collect();
        marks.extend(self.hidden);
        let section = |section: Option<(&'static str, &'static str)>| {
            section.into_iter().flat_map(|(open, close)| [open, close])
        };
        match &self.calls {
            Calls::None => {}
            Calls::Json(calls) => marks.extend(calls.open.iter().chain(calls.close)),
            Calls::Named(calls) => {
                marks.extend(section(calls.section));
                marks.extend([calls.open, calls.middle]);
                marks.extend(
                    calls
                        .id_end
                        .into_iter()
                        .chain(calls.id_open)
                        .chain(calls.close.iter().copied()),
                );
            }
            Calls::Tagged(calls) => {
                marks.extend(section(calls.section));
                marks.extend([
                    calls.open,
                    calls.name_end,
                    calls.head_end,
                    calls.key_open,
                    calls.key_end,
                    calls.key_head_end,
                ]);
                marks.extend([calls.value_open, calls.value_close, calls.close]);
            }
            Calls::Literal(calls) => marks.extend([calls.open, calls.close, "<|\"|>"]),
            Calls::Channels(calls) => {
                marks.extend(calls.starts.iter().chain(calls.ends));
                marks.extend([calls.message].iter().chain(calls.marks));
                marks.extend(calls.inner.map(Format::marks).unwrap_or_default());
            }
        }
        marks.retain(|mark| !mark.trim().is_empty());
        marks.sort_unstable();
        marks.dedup();
        marks
    }
}
