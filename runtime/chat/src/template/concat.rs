//! Wraps operands of `~`, which the engine converts to text before it charges for them.
//!
//! `'' ~ [text] * 1000` would create the text of a list of any size at once. So each operand passes
//! through a function that converts lists and maps itself and charges meanwhile.

/// Name of that function.
pub(super) const TEXT: &str = "_samite_text";

/// Words that end an operand of `~`: operators that bind less tightly, and parts of statements.
const BOUNDARIES: [&str; 7] = ["and", "or", "not", "in", "if", "else", "recursive"];

/// Code between two brackets.
#[derive(Default)]
struct BracketLevel {
    done: String,
    /// Operand that is being read.
    operand: String,
    /// True if `~` precedes the operand.
    is_concat: bool,
}

impl BracketLevel {
    fn end_operand(&mut self, is_concat: bool) {
        let operand = self.operand.trim();
        if is_concat && !operand.is_empty() {
            let start = self.operand.len() - self.operand.trim_start().len();
            let (space, rest) = self.operand.split_at(start);
            let space_after = &rest[operand.len()..];
            self.done
                .extend([space, TEXT, "((", operand, "))", space_after]);
        } else {
            self.done += &self.operand;
        }
        self.operand.clear();
    }

    fn concat(&mut self) {
        self.end_operand(true);
        self.done.push('~');
        self.is_concat = true;
    }

    fn boundary(&mut self, token: &str) {
        self.end_operand(self.is_concat);
        self.done += token;
        self.is_concat = false;
    }

    /// Returns whether this word ends the operand before it.
    fn is_boundary(&self, word: &str) -> bool {
        let before = self.operand.trim_end();
        // The name of a test follows `is`: `is not none`, `is in list`.
        let before_not = before.strip_suffix("not").map_or(before, str::trim_end);
        let is_test = ends_with_word(before, "is") || ends_with_word(before_not, "is");
        BOUNDARIES.contains(&word) && !is_test && !before.ends_with(['.', '|'])
    }

    /// Returns whether a minus at this point is a sign rather than an operator.
    fn expects_value(&self) -> bool {
        let before = self.operand.trim_end();
        before.is_empty() || before.ends_with(['*', '/', '%'])
    }
}

fn ends_with_word(text: &str, word: &str) -> bool {
    let rest = text.strip_suffix(word);
    rest.is_some_and(|rest| !rest.ends_with(|c: char| is_word(c) || c == '.'))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Wraps the operands of `~` in a tag or expression. Returns `None` for a malformed tag, which
/// stays unchanged.
pub(super) fn wrap(tag: &str) -> Option<String> {
    if !tag.contains('~') {
        return None;
    }
    let (inside, end) = match tag.strip_suffix("}}") {
        Some(inside) => (inside, "}}"),
        None => (tag.strip_suffix("%}")?, "%}"),
    };
    let body = inside.get(2..)?;
    let trimmed = body.trim_end_matches(['-', '+']);
    let control = body.len() - body.trim_start_matches(['-', '+']).len();
    let mut levels = vec![BracketLevel::default()];
    let mut brackets = Vec::new();
    // The first word of a statement is not an operand.
    let mut is_first = end == "%}";
    let mut rest = trimmed.get(control..)?;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '"' | '\'' => string(rest)?,
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        rest = after;
        let level = levels.last_mut()?;
        match c {
            '(' | '[' | '{' => {
                brackets.push(c);
                levels.push(BracketLevel::default());
            }
            ')' | ']' | '}' => {
                let mut inner = levels.pop()?;
                inner.end_operand(inner.is_concat);
                let outer = levels.last_mut()?;
                outer.operand.push(brackets.pop()?);
                outer.operand += &inner.done;
                outer.operand.push(c);
            }
            '~' => level.concat(),
            ',' | ':' | '=' | '!' | '<' | '>' | '+' => level.boundary(token),
            '-' if !level.expects_value() => level.boundary(token),
            c if is_word(c) && (is_first || level.is_boundary(token)) => level.boundary(token),
            _ => level.operand += token,
        }
        is_first &= c.is_whitespace();
    }
    let mut level = levels.pop().filter(|_| levels.is_empty())?;
    level.end_operand(level.is_concat);
    let (head, tail) = (&tag[..2 + control], &body[trimmed.len()..]);
    Some([head, &level.done, tail, end].concat())
}

/// Returns the length of the string literal at the start of the text, if it is complete.
fn string(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, c)| {
        let is_end = c == quote && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    });
    end.map(|(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concat_operands_are_wrapped_with_tighter_operators() {
        for (source, expected) in [
            ("{{ a }}", "{{ a }}"),
            ("{{ a~'~' }}", "{{ T((a))~T(('~')) }}"),
            (
                "{{- a ~ b.c[0] | d('~') -}}",
                "{{- T((a)) ~ T((b.c[0] | d('~'))) -}}",
            ),
            (
                "{{ a + b * -2 ~ c - d }}",
                "{{ a + T((b * -2)) ~ T((c)) - d }}",
            ),
            ("{{ -a ~ b ~ c }}", "{{ T((-a)) ~ T((b)) ~ T((c)) }}"),
            (
                "{% set x = a ~ b if c ~ d else e %}",
                "{% set x = T((a)) ~ T((b)) if T((c)) ~ T((d)) else e %}",
            ),
            (
                "{%- if not a ~ b in c -%}",
                "{%- if not T((a)) ~ T((b)) in c -%}",
            ),
            (
                "{{ a ~ b is not none ~ c is in d }}",
                "{{ T((a)) ~ T((b is not none)) ~ T((c is in d)) }}",
            ),
            (
                "{{ [a ~ b, {'k': c ~ d}] ~ f(x=e ~ 1.5) }}",
                "{{ T(([T((a)) ~ T((b)), {'k': T((c)) ~ T((d))}])) ~ T((f(x=T((e)) ~ T((1.5))))) }}",
            ),
            (
                "{{ 'it\\'s' ~ \"\\\\\" }}",
                "{{ T(('it\\'s')) ~ T((\"\\\\\")) }}",
            ),
            (
                "{% for x in a ~ b if x.in ~ y %}",
                "{% for x in T((a)) ~ T((b)) if T((x.in)) ~ T((y)) %}",
            ),
            // Malformed tags stay unchanged.
            ("{{ a ~ }}", "{{ T((a)) ~ }}"),
            ("{{ (a ~ b }}", "{{ (a ~ b }}"),
            ("{{ a ~ b) }}", "{{ a ~ b) }}"),
            ("{{ a ~ 'b }}", "{{ a ~ 'b }}"),
            ("{{ a ~ b", "{{ a ~ b"),
            ("{{-~}}", "{{-~}}"),
        ] {
            let wrapped = wrap(source).unwrap_or_else(|| source.to_owned());
            assert_eq!(wrapped.replace(TEXT, "T"), expected);
        }
    }
}
