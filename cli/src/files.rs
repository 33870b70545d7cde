//! Text that comes in, and files that go out.

use crate::failure::{Failure, Outcome};
use samite::gguf::AtomicFile;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;

/// The text in a file.
pub fn read_text(path: &Path) -> Outcome<String> {
    let name = path.display();
    let bytes = std::fs::read(path)
        .map_err(|error| Failure::error(format_args!("{name}: cannot read the file: {error}")))?;
    text(bytes, &name.to_string())
}

/// All of standard input.
pub fn read_stdin() -> Outcome<String> {
    let mut input = std::io::stdin().lock();
    if input.is_terminal() {
        eprintln!("reading the text from the terminal; end it with Ctrl-D");
    }
    let mut bytes = Vec::new();
    input
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::error(format_args!("cannot read standard input: {error}")))?;
    text(bytes, "standard input")
}

fn text(bytes: Vec<u8>, name: &str) -> Outcome<String> {
    String::from_utf8(bytes).map_err(|error| {
        Failure::error(format_args!(
            "{name}: is not UTF-8 text (byte {}): convert it",
            error.utf8_error().valid_up_to()
        ))
    })
}

/// Prepares a file that a flag asks for, before the work whose result it takes: a name that cannot be written is found
/// early, and what fails later leaves nothing behind.
pub fn create(path: &Option<impl AsRef<Path>>) -> Outcome<Option<AtomicFile>> {
    Ok(path.as_ref().map(AtomicFile::create).transpose()?)
}

/// Writes all of a file that was prepared.
pub fn finish(mut file: AtomicFile, content: &str) -> Outcome {
    file.write_all(content.as_bytes())
        .map_err(|error| Failure::error(format_args!("{}: {error}", file.target().display())))?;
    Ok(file.commit()?)
}

/// Refuses to write a file over the one that it is made from.
pub fn refuse_same(input: &Path, output: &Path) -> Outcome {
    let same = |input| output.canonicalize().is_ok_and(|output| input == output);
    if input.canonicalize().is_ok_and(same) {
        return Err(Failure::usage(
            "input and output are the same file: name another output",
        ));
    }
    Ok(())
}
