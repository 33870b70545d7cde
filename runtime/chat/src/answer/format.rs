//! How models write thoughts and calls, as data.

mod table;

pub use table::{FORMATS, HERMES, PLAIN};

use super::json::CallKeys;
use super::literal::Style;
use samite_text::{TokenAttributes, Tokenizer};

/// How a model writes what is not plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// A name for people.
    pub name: &'static str,
    /// What begins and ends thoughts.
    pub thoughts: &'static [(&'static str, &'static str)],
    /// Marks that mean nothing to a reader, and are left out.
    pub hidden: &'static [&'static str],
    /// How tools are called.
    pub calls: Calls,
    /// Where the ids of calls come from.
    pub ids: Ids,
}

/// Where the ids of calls come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// What the model wrote, and made where it wrote none.
    Made,
    /// The same; made ones have nine letters and digits, as Mistral's templates demand.
    Nine,
    /// What the model writes in place of a name, such as `functions.get_weather:0`, which has the name in it.
    Text,
}

/// The shape of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// No calls.
    None,
    /// An object of JSON, or a list of them, between marks.
    Json(JsonCalls),
    /// A name, then arguments in JSON.
    Named(NamedCalls),
    /// A name, then arguments one by one, each between marks.
    Tagged(TaggedCalls),
    /// A name, then arguments as literals of another language.
    Literal(LiteralCalls),
    /// Messages with headers that say to whom they are.
    Channels(Channels),
}

/// Objects between marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonCalls {
    /// What comes before: one of these.
    pub open: &'static [&'static str],
    /// What comes behind; it may be missing at the end of the answer.
    pub close: &'static [&'static str],
    /// Between calls, without a list.
    pub separator: &'static str,
    /// An answer that begins with an object is a call, too.
    pub is_bare: bool,
    /// Names of the members.
    pub keys: CallKeys,
}

/// Names, each with JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedCalls {
    /// Around all calls: what may come first, and what may come last.
    pub section: Option<(&'static str, &'static str)>,
    /// What comes before a name.
    pub open: &'static str,
    /// An id comes before the name and ends so.
    pub id_end: Option<&'static str>,
    /// An id may come behind the name, and begins so.
    pub id_open: Option<&'static str>,
    /// What comes between name and arguments.
    pub middle: &'static str,
    /// What may come behind that, before the arguments.
    pub fence: &'static str,
    /// What comes behind the arguments; missing ones do no harm.
    pub close: &'static [&'static str],
    /// What has this name is no call but text.
    pub text_name: Option<&'static str>,
}

/// Arguments one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedCalls {
    /// Around one or all calls.
    pub section: Option<(&'static str, &'static str)>,
    /// What comes before a name; empty if the section's mark does.
    pub open: &'static str,
    /// What ends a name; empty if what comes next does.
    pub name_end: &'static str,
    /// What ends the head with the name, if that is not what ends the name.
    pub head_end: &'static str,
    /// What comes before the name of an argument.
    pub key_open: &'static str,
    /// What ends it.
    pub key_end: &'static str,
    /// What ends its head. Between them may stand what kind the value is of.
    pub key_head_end: &'static str,
    /// What comes before a value.
    pub value_open: &'static str,
    /// What ends it.
    pub value_close: &'static str,
    /// What ends a call; empty if the section's mark does.
    pub close: &'static str,
    /// In the head of an argument, this says that its value is a text; where it is missing, it is JSON.
    pub is_text: Option<&'static str>,
    /// Values may stand between `<![CDATA[` and `]]>`.
    pub has_cdata: bool,
}

/// Arguments in another language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiteralCalls {
    /// What comes before the first call, or each.
    pub open: &'static str,
    /// What comes between that and a name.
    pub name_open: &'static str,
    /// What comes behind the arguments.
    pub close: &'static str,
    /// Whose literals.
    pub style: Style,
    /// Several calls may stand in a list.
    pub is_list: bool,
}

/// Messages with headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    /// What begins a header.
    pub starts: &'static [&'static str],
    /// What ends it.
    pub message: &'static str,
    /// The end of the header of what is said to the user.
    pub to_user: &'static str,
    /// What ends a message.
    pub ends: &'static [&'static str],
    /// Words in headers of thoughts.
    pub thoughts: &'static [&'static str],
    /// Marks in headers that mean no more than white space.
    pub marks: &'static [&'static str],
    /// Words in headers that are known, and whom messages are to that are no calls. A message to somebody else has arguments.
    pub words: &'static [&'static str],
    /// How messages call tools otherwise.
    pub inner: Option<&'static Format>,
}

impl Format {
    /// The format of the models that have this chat template.
    pub fn of_template(source: &str) -> &'static Format {
        let fits = |marks: &[&str]| marks.iter().all(|mark| source.contains(mark));
        FORMATS
            .iter()
            .find(|(_, marks)| fits(marks))
            .map_or(&PLAIN, |(format, _)| format)
    }

    /// The format of this name.
    pub fn named(name: &str) -> Option<&'static Format> {
        FORMATS
            .iter()
            .map(|(format, _)| *format)
            .chain([&PLAIN])
            .find(|format| format.name == name)
    }

    /// The control tokens that marks consist of: their names must be part of the text that is parsed.
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

    /// All marks: where tokens stand for them, their text must be part of what is parsed.
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
