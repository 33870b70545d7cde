//! Prints answers to a terminal.

use crate::shown::on_terminal;
use samite::chat::AnswerEvent;
use std::io::Write;

/// Writes an answer as it arrives. On a terminal, reasoning is dimmed and lines break between
/// words.
pub(super) struct Printer {
    /// `None` if the output is not a terminal.
    wrap: Option<Wrap>,
    is_dim: bool,
    has_started: bool,
}

impl Printer {
    /// Creates a printer for a terminal of `columns` columns, or for other output.
    pub fn new(columns: Option<usize>) -> Self {
        Printer {
            wrap: columns.map(Wrap::new),
            is_dim: false,
            has_started: false,
        }
    }

    pub fn print(&mut self, event: &AnswerEvent, out: &mut impl Write) -> std::io::Result<()> {
        match (event, &mut self.wrap) {
            (AnswerEvent::Reasoning(text), Some(wrap)) => {
                if !std::mem::replace(&mut self.is_dim, true) {
                    write!(out, "\x1b[2m")?;
                }
                write!(out, "{}", wrap.wrapped(&on_terminal(text)))?;
            }
            (AnswerEvent::Content(text), None) => write!(out, "{text}")?,
            (AnswerEvent::Content(text), Some(wrap)) => {
                if std::mem::take(&mut self.is_dim) {
                    write!(out, "\x1b[0m{}", wrap.wrapped("\n\n"))?;
                }
                write!(out, "{}", wrap.wrapped(&on_terminal(text)))?;
            }
            _ => return Ok(()),
        }
        self.has_started = true;
        out.flush()
    }

    /// Ends the line, if one was started or `is_answered` is set.
    pub fn end(&mut self, out: &mut impl Write, is_answered: bool) -> std::io::Result<()> {
        if std::mem::take(&mut self.is_dim) {
            write!(out, "\x1b[0m")?;
        }
        if self.has_started || is_answered {
            writeln!(out)?;
        }
        out.flush()
    }
}

/// Breaks lines between words of a text that arrives in pieces. A word that reaches the edge is
/// erased and moved to the next line.
struct Wrap {
    columns: usize,
    column: usize,
    /// True if a line break replaced the last space.
    is_broken: bool,
    /// Current word, at the end of the line.
    word: String,
}

impl Wrap {
    fn new(columns: usize) -> Self {
        Wrap {
            // Terminals differ in the cursor position after a character in the last column.
            columns: columns.saturating_sub(1).max(2),
            column: 0,
            is_broken: false,
            word: String::new(),
        }
    }

    /// Returns the output for the next piece of the text.
    fn wrapped(&mut self, piece: &str) -> String {
        const TAB: usize = 8;
        let mut shown = String::with_capacity(piece.len());
        for character in piece.chars() {
            let width = match character {
                '\n' => 0,
                '\t' => TAB - self.column % TAB,
                _ => console::measure_text_width(character.encode_utf8(&mut [0; 4])),
            };
            let is_space = matches!(character, ' ' | '\n' | '\t');
            if self.is_broken && is_space {
                // The line was already broken where the text has a newline.
                self.is_broken = character != '\n';
                continue;
            }
            self.is_broken = false;
            // Scripts with wide characters have no spaces between words.
            let ends_word = is_space || width > 1;
            if ends_word {
                self.word.clear();
            }
            if self.column + width > self.columns {
                self.begin_line(&mut shown);
                if is_space {
                    self.is_broken = true;
                    continue;
                }
            }
            shown.push(character);
            self.column += width;
            if character == '\n' {
                self.column = 0;
            }
            if !ends_word {
                self.word.push(character);
            }
        }
        shown
    }

    /// Starts a line, with the current word if it fits.
    fn begin_line(&mut self, shown: &mut String) {
        let width = console::measure_text_width(&self.word);
        if width == 0 || width == self.column {
            self.word.clear();
            shown.push('\n');
            self.column = 0;
        } else {
            *shown += &format!("\x1b[{width}D\x1b[K\n{}", self.word);
            self.column = width;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_dimmed_only_on_a_terminal() {
        let shown = |columns| {
            let mut printer = Printer::new(columns);
            let mut out = Vec::new();
            for event in [
                AnswerEvent::Reasoning("a".into()),
                AnswerEvent::Reasoning("b".into()),
                AnswerEvent::Content("c".into()),
            ] {
                printer.print(&event, &mut out).unwrap();
            }
            printer.end(&mut out, true).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(Some(80)), "\x1b[2mab\x1b[0m\n\nc\n");
        assert_eq!(shown(None), "c\n");
    }

    /// Returns the lines on a terminal of `columns` columns after `pieces`.
    fn screen(columns: usize, pieces: &[&str]) -> String {
        let mut wrap = Wrap::new(columns);
        let sent: String = pieces.iter().map(|piece| wrap.wrapped(piece)).collect();
        let mut lines = vec![String::new()];
        let mut rest = &*sent;
        while let Some(character) = rest.chars().next() {
            let last = lines.last_mut().unwrap();
            if let Some(back) = rest.strip_prefix("\x1b[") {
                let (count, behind) = back.split_once("D\x1b[K").unwrap();
                let kept = last.chars().count() - count.parse::<usize>().unwrap();
                *last = last.chars().take(kept).collect();
                rest = behind;
                continue;
            }
            match character {
                '\n' => lines.push(String::new()),
                _ => last.push(character),
            }
            assert!(console::measure_text_width(lines.last().unwrap()) < columns.max(3));
            rest = &rest[character.len_utf8()..];
        }
        lines.join("|")
    }

    #[test]
    fn lines_break_between_words() {
        let pieces = ["The quick", " bro", "wn fox", " jumps over"];
        assert_eq!(screen(12, &pieces), "The quick |brown fox |jumps over");
        assert_eq!(screen(11, &["0123456789 a\nb c"]), "0123456789|a|b c");
        assert_eq!(screen(11, &["0123456789   a"]), "0123456789|a");
        assert_eq!(screen(11, &["0123456789 ", "\nb"]), "0123456789|b");
        assert_eq!(screen(11, &["0123456789 \n\nb"]), "0123456789||b");
        // A word longer than a line breaks at the end of the line.
        assert_eq!(screen(6, &["ab abcdefghijkl"]), "ab |abcde|fghij|kl");
        assert_eq!(screen(6, &["漢字漢字"]), "漢字|漢字");
        assert_eq!(screen(1, &["abc"]), "ab|c");
        assert_eq!(screen(80, &["a\n\n", "\tb"]), "a||\tb");
    }

    #[test]
    fn terminal_escapes_in_answers_are_escaped() {
        let mut printer = Printer::new(Some(80));
        let mut out = Vec::new();
        let event = AnswerEvent::Content("\x1b[2Ja".into());
        printer.print(&event, &mut out).unwrap();
        assert_eq!(out, b"\\u{1b}[2Ja");
    }
}
