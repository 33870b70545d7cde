//! Expands templates of WGSL. All tags are in double braces:
//!
//! | tag | text |
//! |---|---|
//! | `{{name}}` | a value |
//! | `{{>piece}}` | a named piece of WGSL |
//! | `{{>piece name=value; other=value}}` | a piece with values of its own, without tags |
//! | `{{#i count}} … {{/i}}` | the text for each `{{i}}` from 0 on; `count` is a number or a name |
//!
//! Values and pieces may contain tags. The order of the values does not matter.
//!
//! Repeated text does not depend on compilers to unroll loops, and an array index that is a
//! constant needs no bounds check.

use samite_core::{Error, Result};
use std::collections::BTreeMap;

/// Values by name.
pub type Values = BTreeMap<&'static str, String>;

/// Maximum depth of values and pieces within each other. Deeper ones contain themselves.
const MAX_DEPTH: usize = 16;

/// Returns the tag that includes `piece` with values of its own.
pub fn include<const N: usize>(piece: &str, values: [(&str, String); N]) -> String {
    let values = values.map(|(name, value)| format!("{name}={value}"));
    format!("{{{{>{piece} {}}}}}", values.join("; "))
}

/// Expands `text`, the template of `kernel`. `pieces` returns pieces by name.
///
/// # Errors
/// Returns an error if a name has no value, a value has no place, or a tag is malformed.
pub fn expand(
    kernel: &str,
    text: &str,
    values: &Values,
    pieces: fn(&str) -> Option<&'static str>,
) -> Result<String> {
    let mut expansion = Expansion {
        kernel,
        pieces,
        scope: Vec::new(),
        output: String::new(),
    };
    let values = values.iter().map(|(name, value)| (*name, value.as_str()));
    expansion.with(values, text, 0)?;
    Ok(expansion.output)
}

/// A text that is being expanded.
struct Expansion<'a> {
    kernel: &'a str,
    pieces: fn(&str) -> Option<&'static str>,
    /// Values in scope, innermost last.
    scope: Vec<ScopedValue>,
    output: String,
}

struct ScopedValue {
    name: String,
    value: String,
    is_used: bool,
}

impl Expansion<'_> {
    fn error(&self, what: &str, reason: &str) -> Error {
        Error::invalid(format!("kernel '{}': '{what}' {reason}", self.kernel))
    }

    /// Adds `text`, expanded with `values` in addition to those in scope.
    fn with<'v>(
        &mut self,
        values: impl Iterator<Item = (&'v str, &'v str)>,
        text: &str,
        depth: usize,
    ) -> Result<()> {
        let outer = self.scope.len();
        self.scope.extend(values.map(|(name, value)| ScopedValue {
            name: name.to_owned(),
            value: value.to_owned(),
            is_used: false,
        }));
        self.add(text, depth)?;
        let values = self.scope.split_off(outer);
        match values.iter().find(|value| !value.is_used) {
            Some(unused) => Err(self.error(&unused.name, "is not in its text; do not pass it")),
            None => Ok(()),
        }
    }

    /// Adds `text`, expanded.
    fn add(&mut self, text: &str, depth: usize) -> Result<()> {
        let mut rest = text;
        while let Some((before, tagged)) = rest.split_once("{{") {
            self.output.push_str(before);
            let tag = tagged.split_once("}}");
            let (tag, after) = tag.ok_or_else(|| self.error(tagged, "has no end; close it"))?;
            if depth > MAX_DEPTH {
                return Err(self.error(tag, "contains itself; remove the circle"));
            }
            rest = after;
            if let Some(piece) = tag.strip_prefix('>') {
                let (piece, values) = piece.split_once(' ').unwrap_or((piece, ""));
                let text = (self.pieces)(piece)
                    .ok_or_else(|| self.error(piece, "is no piece of WGSL; add it"))?;
                let values = values.split("; ").filter_map(|value| value.split_once('='));
                self.with(values, text, depth + 1)?;
            } else if let Some(head) = tag.strip_prefix('#') {
                rest = self.repeat(head, rest, depth + 1)?;
            } else {
                let value = self.value(tag)?;
                self.add(&value, depth + 1)?;
            }
        }
        self.output.push_str(rest);
        Ok(())
    }

    /// Adds the text up to the end of the repetition with this `head`, once for each number.
    /// Returns the rest.
    fn repeat<'t>(&mut self, head: &str, text: &'t str, depth: usize) -> Result<&'t str> {
        let parts = head.split_once(' ').and_then(|(index, count)| {
            let (body, rest) = text.split_once(&format!("{{{{/{index}}}}}"))?;
            Some((index, count, body, rest))
        });
        let (index, count, body, rest) =
            parts.ok_or_else(|| self.error(head, "has no end; write '{{#i count}} … {{/i}}'"))?;
        let count = match count.parse() {
            Ok(count) => Ok(count),
            Err(_) => self.value(count)?.parse(),
        };
        let count: usize =
            count.map_err(|_| self.error(head, "repeats a text by no number; pass a number"))?;
        for number in 0..count {
            let number = number.to_string();
            self.with([(index, &*number)].into_iter(), body, depth)?;
        }
        Ok(rest)
    }

    /// Returns the innermost value of `name`.
    fn value(&mut self, name: &str) -> Result<String> {
        match self.scope.iter_mut().rev().find(|value| value.name == name) {
            Some(value) => {
                value.is_used = true;
                Ok(value.value.clone())
            }
            None => Err(self.error(name, "has no value; pass one")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded<const N: usize>(text: &str, values: [(&'static str, &str); N]) -> Result<String> {
        let values = values.map(|(name, value)| (name, value.to_owned()));
        expand("k", text, &values.into(), |name| match name {
            "sum" => Some("{{x}} + {{y}}"),
            "circle" => Some("{{>circle}}"),
            _ => None,
        })
    }

    #[test]
    fn tags_are_expanded() {
        let text = "{{a}} {{>sum x=1; y=2}} {{#i 2}}x{{i}}{{#j n}}[{{i}}{{j}}]{{/j}} {{/i}}";
        let text = expanded(text, [("a", "{{b}}u"), ("b", "7"), ("n", "3")]);
        assert_eq!(text.unwrap(), "7u 1 + 2 x0[00][01][02] x1[10][11][12] ");
        assert_eq!(expanded("a{{#i 0}}{{i}}{{/i}}", []).unwrap(), "a");
        let values = [("x", "1".to_owned()), ("y", "b".to_owned())];
        assert_eq!(include("sum", values), "{{>sum x=1; y=b}}");
    }

    #[test]
    fn errors_name_the_kernel_and_the_tag() {
        for (text, error) in [
            ("{{a}}{{b}}", "'b' has no value"),
            ("a", "'a' is not in its text"),
            ("{{a}}{{>sum x=1; y=2; z=3}}", "'z' is not in its text"),
            ("{{a}}{{>other}}", "'other' is no piece"),
            ("{{a}}{{>circle}}", "'>circle' contains itself"),
            ("{{a}}{{b", "'b' has no end"),
            ("{{a}}{{#i 2}}", "'i 2' has no end"),
            ("{{#i a}}{{/i}}", "'i a' repeats a text by no number"),
            ("{{a}}{{/i}}", "'/i' has no value"),
        ] {
            let found = expanded(text, [("a", "x")]).unwrap_err().to_string();
            assert!(found.contains(&format!("kernel 'k': {error}")), "{found}");
        }
    }
}
