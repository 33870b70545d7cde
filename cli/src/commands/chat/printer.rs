//! Answers on a terminal.

use crate::shown::escaped;
use samite::chat::Event;
use std::io::Write;

/// Writes an answer as it comes: thoughts dimmed on a terminal, and nowhere else.
pub(super) struct Printer {
    is_terminal: bool,
    is_dim: bool,
    is_begun: bool,
}

impl Printer {
    pub fn new(is_terminal: bool) -> Self {
        Printer {
            is_terminal,
            is_dim: false,
            is_begun: false,
        }
    }

    pub fn print(&mut self, event: &Event, out: &mut impl Write) -> std::io::Result<()> {
        match event {
            Event::Reasoning(text) if self.is_terminal => {
                if !std::mem::replace(&mut self.is_dim, true) {
                    write!(out, "\x1b[2m")?;
                }
                write!(out, "{}", on_terminal(text))?;
            }
            Event::Content(text) => {
                if std::mem::take(&mut self.is_dim) {
                    write!(out, "\x1b[0m\n\n")?;
                }
                if self.is_terminal {
                    write!(out, "{}", on_terminal(text))?;
                } else {
                    write!(out, "{text}")?;
                }
            }
            _ => return Ok(()),
        }
        self.is_begun = true;
        out.flush()
    }

    /// Ends the line, if there is one or `is_answered`.
    pub fn end(&mut self, out: &mut impl Write, is_answered: bool) -> std::io::Result<()> {
        if std::mem::take(&mut self.is_dim) {
            write!(out, "\x1b[0m")?;
        }
        if self.is_begun || is_answered {
            writeln!(out)?;
        }
        out.flush()
    }
}

/// A text that does nothing to the terminal but move on in it.
fn on_terminal(text: &str) -> String {
    let parts =
        text.split_inclusive(['\n', '\t'])
            .map(|part| match part.strip_suffix(['\n', '\t']) {
                Some(begin) => format!("{}{}", escaped(begin), &part[begin.len()..]),
                None => escaped(part).into_owned(),
            });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_dimmed_on_a_terminal_and_nowhere_else() {
        let shown = |is_terminal| {
            let mut printer = Printer::new(is_terminal);
            let mut out = Vec::new();
            for event in [
                Event::Reasoning("a".into()),
                Event::Reasoning("b".into()),
                Event::Content("c".into()),
            ] {
                printer.print(&event, &mut out).unwrap();
            }
            printer.end(&mut out, true).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(true), "\x1b[2mab\x1b[0m\n\nc\n");
        assert_eq!(shown(false), "c\n");
    }

    #[test]
    fn answers_do_nothing_to_the_terminal() {
        assert_eq!(on_terminal("a\tb\n\nc"), "a\tb\n\nc");
        assert_eq!(on_terminal("\x1b[2Ja\n\r"), "\\u{1b}[2Ja\n\\r");
    }
}
