//! Reads text from files and standard input, and prepares output files.

use crate::failure::{CommandError, CommandResult};
use crate::interrupt;
use crate::shown::say;
use samite::gguf::AtomicFile;
use samite::text::Tokenizer;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::Path;

/// Bytes per read.
const PIECE: usize = 64 << 10;

/// Source of a text. It is opened before a model is loaded, so that errors show early, and read
/// later, once the required length is known.
pub struct TextSource {
    name: String,
    from: From,
}

enum From {
    Text(String),
    File(File),
    Stdin,
}

impl TextSource {
    /// Creates a source from a text.
    pub fn text(text: String) -> Self {
        TextSource {
            name: "the text".to_owned(),
            from: From::Text(text),
        }
    }

    /// Creates a source for standard input.
    pub fn stdin() -> Self {
        TextSource {
            name: "standard input".to_owned(),
            from: From::Stdin,
        }
    }

    /// Opens a file as a source.
    pub fn file(path: &Path) -> CommandResult<Self> {
        let name = path.display().to_string();
        // Opening a pipe waits for its other end.
        let file =
            interrupt::at_once(|| File::open(path)).map_err(|error| cannot_read(&name, &error))?;
        Ok(TextSource {
            name,
            from: From::File(file),
        })
    }

    /// Returns the name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads the text to its end, or until `each` stops it. Meanwhile, a signal ends the program at
    /// once.
    pub fn read(
        self,
        mut each: impl FnMut(&str) -> CommandResult<ControlFlow<()>>,
    ) -> CommandResult {
        let TextSource { name, from } = self;
        interrupt::at_once(|| match from {
            From::Text(text) => each(&text).map(|_| ()),
            From::File(file) => pieces(file, &name, each),
            From::Stdin => {
                let input = std::io::stdin().lock();
                if input.is_terminal() {
                    say("reading the text from the terminal; end it with Ctrl-D");
                }
                pieces(input, &name, each)
            }
        })
    }

    /// Reads the whole text of at most `most` bytes. Fails for a device, which has no end.
    pub fn read_all(self, most: u64) -> CommandResult<String> {
        let (name, mut all) = (self.name.clone(), String::new());
        if let From::File(file) = &self.from
            && file.metadata().is_ok_and(|about| is_device(&about))
        {
            return Err(CommandError::error(format_args!(
                "{name}: is a device: name a file"
            )));
        }
        self.read(|piece| {
            if (all.len() + piece.len()) as u64 > most {
                return Err(CommandError::error(format_args!(
                    "{name}: is longer than {most} bytes, more than this can be used with: take a part of it"
                )));
            }
            all.try_reserve(piece.len())
                .map_err(|_| no_memory(&name, all.len() + piece.len()))?;
            all.push_str(piece);
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(all)
    }

    /// Returns the tokens of the text, or slightly more than `most` tokens if it is longer. Passes
    /// the text to `each` as it is read.
    pub fn tokens(
        self,
        tokenizer: &Tokenizer,
        parse_special: bool,
        most: usize,
        mut each: impl FnMut(&str),
    ) -> CommandResult<Vec<u32>> {
        let name = self.name.clone();
        // No token is longer than the longest, so a text of more bytes than this has too many
        // tokens.
        let longest = (0..tokenizer.vocab_size() as u32)
            .filter_map(|id| Some(tokenizer.token_to_piece(id, true).ok()?.len()))
            .max();
        let most_bytes = most.saturating_mul(longest.unwrap_or(1).max(1));
        let (mut tokens, mut bytes) = (Vec::new(), 0usize);
        let mut stream = tokenizer.stream(true, parse_special);
        self.read(|piece| {
            each(piece);
            bytes = bytes.saturating_add(piece.len());
            tokens
                .try_reserve(piece.len())
                .map_err(|_| no_memory(&name, bytes))?;
            stream
                .push(piece, &mut tokens)
                .map_err(|error| CommandError::error(format_args!("{name}: {error}")))?;
            Ok(if tokens.len() > most || bytes > most_bytes {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            })
        })?;
        stream.finish(&mut tokens).map_err(CommandError::error)?;
        Ok(tokens)
    }
}

#[cfg(unix)]
fn is_device(about: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    about.file_type().is_char_device() || about.file_type().is_block_device()
}

#[cfg(not(unix))]
fn is_device(_: &std::fs::Metadata) -> bool {
    false
}

fn no_memory(name: &str, bytes: usize) -> CommandError {
    CommandError::error(format_args!(
        "{name}: there is no memory for {bytes} bytes of text"
    ))
}

/// Reads the text of a file that a flag names. It may be a pipe, which can be read only once.
pub fn read_flag(path: &Path, flag: &str) -> CommandResult<String> {
    // Longer than any template or list of keys.
    const MAX_BYTES: u64 = 1 << 20;
    let text = TextSource::file(path).and_then(|source| source.read_all(MAX_BYTES));
    text.map_err(|failure| match failure {
        CommandError::Error(message) => CommandError::usage(format_args!("{flag}: {message}")),
        other => other,
    })
}

fn cannot_read(name: &str, error: &std::io::Error) -> CommandError {
    CommandError::error(format_args!("{name}: cannot read the file: {error}"))
}

/// Reads text in pieces that do not split characters.
fn pieces(
    mut input: impl Read,
    name: &str,
    mut each: impl FnMut(&str) -> CommandResult<ControlFlow<()>>,
) -> CommandResult {
    let mut buffer = vec![0; PIECE];
    // `kept` bytes at the start of the buffer begin a character; `before` counts the bytes of text
    // before the buffer.
    let (mut kept, mut before) = (0, 0u64);
    loop {
        let read = match input.read(&mut buffer[kept..]) {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(cannot_read(name, &error)),
        };
        let bytes = &buffer[..kept + read];
        let whole = match std::str::from_utf8(bytes) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                return Err(CommandError::error(format_args!(
                    "{name}: is not UTF-8 text (byte {}): convert it",
                    before + error.valid_up_to() as u64
                )));
            }
        };
        // The loop has just checked this text.
        let text = std::str::from_utf8(&bytes[..whole]).unwrap_or_default();
        if !text.is_empty() && each(text)?.is_break() {
            return Ok(());
        }
        if read == 0 {
            return Ok(());
        }
        let end = bytes.len();
        buffer.copy_within(whole..end, 0);
        kept = end - whole;
        before += whole as u64;
    }
}

/// Opens a regular file and returns its length. Pipes and devices have none.
pub fn open_regular(path: &Path) -> CommandResult<(File, u64)> {
    let name = path.display().to_string();
    let cannot_read = |error| cannot_read(&name, &error);
    // Opening a pipe would wait for its other end.
    if !std::fs::metadata(path).map_err(cannot_read)?.is_file() {
        return Err(CommandError::error(format_args!(
            "{name}: is not a regular file: name a file"
        )));
    }
    let file = File::open(path).map_err(cannot_read)?;
    let length = file.metadata().map_err(cannot_read)?.len();
    Ok((file, length))
}

/// Prepares an output file before the work. A path that cannot be written fails early, and a later
/// failure leaves no file.
pub fn create(path: &Option<impl AsRef<Path>>) -> CommandResult<Option<AtomicFile>> {
    Ok(path.as_ref().map(AtomicFile::create).transpose()?)
}

/// Writes the whole content of a prepared file.
pub fn finish(mut file: AtomicFile, content: &str) -> CommandResult {
    file.write_all(content.as_bytes())
        .map_err(|error| cannot_write(&file, &error))?;
    Ok(file.commit()?)
}

/// Returns the error for a file that cannot be written.
pub fn cannot_write(file: &AtomicFile, error: &std::io::Error) -> CommandError {
    CommandError::error(format_args!("{}: {error}", file.target().display()))
}

/// Fails if the output file is the input file.
pub fn refuse_same(input: &Path, output: &Path) -> CommandResult {
    let same = |input| output.canonicalize().is_ok_and(|output| input == output);
    if input.canonicalize().is_ok_and(same) {
        return Err(CommandError::usage(format_args!(
            "input and output are the same file, {}: name another output",
            output.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that returns a few bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let count = self.1.min(self.0.len()).min(out.len());
            let (now, rest) = self.0.split_at(count);
            out[..count].copy_from_slice(now);
            self.0 = rest;
            Ok(count)
        }
    }

    #[test]
    fn chunked_reads_do_not_split_characters() {
        let text = "Zoë 日本 🦓".repeat(20_000);
        for step in [1, 3, 70_001] {
            let mut found = String::new();
            pieces(Slow(text.as_bytes(), step), "x", |piece| {
                found.push_str(piece);
                Ok(ControlFlow::Continue(()))
            })
            .unwrap();
            assert!(found == text, "{step}");
        }
        for (bytes, at) in [(&b"ab\xff"[..], 2), (b"a\xe6\x97", 1)] {
            let error = pieces(Slow(bytes, 1), "x", |_| Ok(ControlFlow::Continue(())));
            match error {
                Err(CommandError::Error(message)) => {
                    assert!(message.contains(&format!("(byte {at})")), "{message}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
