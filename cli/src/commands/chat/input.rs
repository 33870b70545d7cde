//! Messages from the terminal or a pipe.

use crate::failure::{CommandError, CommandResult};
use crate::interrupt;
use crate::shown::say;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{BufRead, ErrorKind};
use std::path::PathBuf;

/// Source of messages.
pub(super) enum MessageInput {
    Terminal {
        editor: Box<DefaultEditor>,
        history: Option<PathBuf>,
    },
    Pipe(std::io::Lines<std::io::StdinLock<'static>>),
}

impl MessageInput {
    pub fn new(is_terminal: bool) -> CommandResult<Self> {
        if !is_terminal {
            return Ok(Self::Pipe(std::io::stdin().lock().lines()));
        }
        interrupt::keep_terminal();
        let mut editor = DefaultEditor::new().map_err(CommandError::error)?;
        let history = samite::cache_folder().map(|folder| folder.join("chat-history.txt"));
        if let Some(history) = &history {
            // The history file may not exist yet.
            let _ = editor.load_history(history);
        }
        Ok(Self::Terminal {
            editor: Box::new(editor),
            history,
        })
    }

    /// Returns the next message, or `None` at the end. A message may span several lines.
    pub fn next(&mut self) -> CommandResult<Option<String>> {
        let text = loop {
            match self.message()? {
                Line::Text(text) => break text,
                Line::Cancelled => {}
                Line::End => return Ok(None),
            }
        };
        if let Self::Terminal { editor, history } = self {
            let _ = editor.add_history_entry(&text);
            if let Some(history) = history {
                // Failing to save the history is not an error.
                let _ = history.parent().map(std::fs::create_dir_all);
                let _ = editor.save_history(history);
            }
        }
        Ok(Some(text))
    }

    fn message(&mut self) -> CommandResult<Line> {
        let mut text = match self.line("> ")? {
            Line::Text(text) => text,
            other => return Ok(other),
        };
        let is_quoted = text.starts_with("\"\"\"");
        if is_quoted {
            text.drain(..3);
        }
        // Accept a quoted text without its end mark at the end of the input.
        while if is_quoted {
            !text.ends_with("\"\"\"")
        } else {
            text.ends_with('\\')
        } {
            match self.line("… ")? {
                Line::Text(line) => {
                    if !is_quoted {
                        text.pop();
                    }
                    text = text + "\n" + &line;
                }
                Line::Cancelled => return Ok(Line::Cancelled),
                Line::End => break,
            }
        }
        if is_quoted {
            text = text
                .trim_end_matches("\"\"\"")
                .trim_matches('\n')
                .to_owned();
        }
        Ok(Line::Text(text))
    }

    fn line(&mut self, prompt: &str) -> CommandResult<Line> {
        interrupt::at_once(|| match self {
            Self::Pipe(lines) => match lines.next().transpose() {
                Ok(line) => Ok(line.map_or(Line::End, Line::Text)),
                Err(error) => Err(CommandError::error(format_args!("standard input: {error}"))),
            },
            Self::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Line::Cancelled),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    say("that was not UTF-8 text, and is forgotten");
                    Ok(Line::Cancelled)
                }
                Err(error) => Err(CommandError::error(error)),
            },
        })
    }
}

/// Result of reading a line.
enum Line {
    Text(String),
    /// Ctrl-C: discards the text so far.
    Cancelled,
    End,
}
