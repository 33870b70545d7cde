//! Prepares the texts of templates for compilation.

use super::concat;
use crate::error::TemplateError;

/// Maximum number of names, numbers, strings and signs in a tag. Known models have less than a
/// hundred.
const MAX_PARTS: usize = 2000;
/// Maximum number of `elif` conditions.
const MAX_CONDITIONS: usize = 500;

/// Name of the function that checks every value that a template stores.
pub(super) const KEEP: &str = "_samite_keep";
/// Name of the function that checks every value that a template stores in a namespace.
pub(super) const KEEP_INSIDE: &str = "_samite_keep_inside";

/// Rewrites a template:
///
/// - The tags `generation` and `endgeneration`, which only mark training data, become a condition
///   that is always true.
/// - Values that `set` stores pass through a function, so that no value contains itself or nests
///   without limit.
/// - Operands of `~` pass through another function.
///
/// # Errors
/// Returns an error if a tag has too many parts, or if the template has too many conditions:
/// compiling them could overflow the stack.
pub(super) fn prepare(source: &str) -> Result<String, TemplateError> {
    if source.matches("elif").count() > MAX_CONDITIONS {
        return Err(TemplateError::Limit(format!(
            "it has more than {MAX_CONDITIONS} times \"elif\""
        )));
    }
    let mut result = String::with_capacity(source.len() + source.len() / 4);
    let mut rest = source;
    let mut is_raw = false;
    while let Some(start) = rest
        .find("{%")
        .into_iter()
        .chain(rest.find("{#"))
        .chain(rest.find("{{"))
        .min()
    {
        let (before, tag) = rest.split_at(start);
        result.push_str(before);
        let is_block = tag.starts_with("{%");
        let length = if is_raw && !is_block {
            2
        } else if tag.starts_with("{#") {
            tag.find("#}").map_or(tag.len(), |end| end + 2)
        } else {
            let (length, parts) = expression(tag);
            if parts > MAX_PARTS {
                return Err(TemplateError::Limit(format!(
                    "a tag of it has more than {MAX_PARTS} parts"
                )));
            }
            length
        };
        let (tag, after) = tag.split_at(length);
        let is_code = !is_raw && !tag.starts_with("{#");
        let wrapped = if is_code { concat::wrap(tag) } else { None };
        let tag = wrapped.as_deref().unwrap_or(tag);
        let name = tag.trim_start_matches(['{', '%', '-', '+', ' ', '\t', '\r', '\n']);
        let word = name
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .map_or(name, |end| &name[..end]);
        match word {
            "raw" | "endraw" if is_block => {
                is_raw = word == "raw";
                result.push_str(tag);
            }
            "generation" if is_block && !is_raw => {
                result.push_str(&tag.replacen("generation", "if true", 1));
            }
            "endgeneration" if is_block && !is_raw => {
                result.push_str(&tag.replacen("endgeneration", "endif", 1));
            }
            "set" if is_block && !is_raw => match assigned(tag) {
                Some((start, end)) => {
                    let (target, value, end) = (&tag[..start], &tag[start..end], &tag[end..]);
                    let keep = if target.contains('.') {
                        KEEP_INSIDE
                    } else {
                        KEEP
                    };
                    result.extend([target, " ", keep, "((", value, "))", end]);
                }
                None => result.push_str(tag),
            },
            _ => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    Ok(result)
}

/// Returns the range of the value in a `set` tag, if it has one.
fn assigned(tag: &str) -> Option<(usize, usize)> {
    let end = tag.strip_suffix("%}")?.trim_end_matches(['-', '+']).len();
    let start = tag.find('=')? + 1;
    // A block `set` may have filters, whose arguments may have names.
    let target = &tag[..start];
    let is_plain = start < end && !target.contains(['|', '"', '\'', '[']);
    is_plain.then_some((start, end))
}

/// Returns the length of the tag or expression at the start, and its number of parts. An end mark
/// in a string or bracket does not count.
fn expression(text: &str) -> (usize, usize) {
    let bytes = text.as_bytes();
    let end: &[u8] = if text.starts_with("{{") { b"}}" } else { b"%}" };
    let (mut quote, mut brackets, mut parts) = (None, 0i32, 0);
    let mut at = 2;
    while at < bytes.len() {
        let byte = bytes[at];
        match (quote, byte) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, _) if brackets == 0 && bytes[at..].starts_with(end) => return (at + 2, parts),
            (None, b'"' | b'\'') => {
                quote = Some(byte);
                parts += 1;
            }
            (None, b'(' | b'[' | b'{') => {
                brackets += 1;
                parts += 1;
            }
            (None, b')' | b']' | b'}') => brackets -= 1,
            (None, _) if is_word(byte) => parts += usize::from(!is_word(bytes[at - 1])),
            (None, _) => parts += usize::from(!byte.is_ascii_whitespace()),
        }
        at += 1;
    }
    (bytes.len(), parts)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_generation_tags_are_replaced() {
        let source = "{% if x %}{%- generation -%}a{{ '{% generation %}' }}{# {% generation %} #}{% raw %}{% generation %}{{{% endraw %}{%+ endgeneration %}b";
        let expected = "{% if x %}{%- if true -%}a{{ '{% generation %}' }}{# {% generation %} #}{% raw %}{% generation %}{{{% endraw %}{%+ endif %}b";
        assert_eq!(prepare(source).unwrap(), expected);
        for broken in [
            "{% endgeneration",
            "{{ 'endgeneration",
            "{# endgeneration",
            "{%endgeneration'\\",
            "{% set",
            "{% set =%}",
            "{% set x -",
        ] {
            prepare(broken).unwrap();
        }
    }

    #[test]
    fn expressions_end_at_their_closing_tag() {
        for (source, expected) in [
            ("{{ foo_1 + 'a b' }} x", (19, 3)),
            ("{{ größe[0]|f(b) }}", (21, 7)),
            ("{% if a and \"%}\" %}", (19, 4)),
        ] {
            assert_eq!(expression(source), expected, "{source}");
        }
    }

    #[test]
    fn assigned_values_are_wrapped_for_accounting() {
        for (source, expected) in [
            ("{% set x = 1 -%}", "{% set x = _samite_keep(( 1 ))-%}"),
            (
                "{%- set a.b='=%}' %}",
                "{%- set a.b= _samite_keep_inside(('=%}' ))%}",
            ),
            ("{% set x %}=", "{% set x %}="),
            (
                "{% set x = {'a': {'b': 1 %}2} %}",
                "{% set x = _samite_keep(( {'a': {'b': 1 %}2} ))%}",
            ),
            (
                "{% set x | replace(a='b') %}",
                "{% set x | replace(a='b') %}",
            ),
        ] {
            assert_eq!(prepare(source).unwrap(), expected);
        }
    }
}
