//! Whether there is memory for what is made of many small pieces.

use crate::error::{Error, Result};

/// Fails where so many bytes of host memory cannot be had at once. For what is made of many small pieces: a program ends where one of these is refused, so all are asked
/// for before the first is made. `what` says in the error what the memory was for.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn ask_for_memory(bytes: usize, what: &str) -> Result<()> {
    if samite_threads::has_memory(bytes) {
        return Ok(());
    }
    Err(Error::OutOfMemory {
        device: "host".into(),
        what: what.into(),
        asked: bytes,
        free: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_refused_by_name() {
        ask_for_memory(1 << 20, "a small thing").unwrap();
        let error = ask_for_memory(isize::MAX as usize, "a large thing").unwrap_err();
        assert!(error.to_string().contains("a large thing"), "{error}");
    }
}
