//! Memory checks before many small allocations.

use crate::error::{Error, Result};

/// Fails if the host cannot allocate `bytes` bytes at once. For data that consists of many small
/// allocations: a failure of one of them ends the program, so all are checked before the first is
/// made. `what` is the purpose of the memory, for the error.
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
    fn unavailable_memory_is_an_error_that_names_its_use() {
        ask_for_memory(1 << 20, "a small thing").unwrap();
        let error = ask_for_memory(isize::MAX as usize, "a large thing").unwrap_err();
        assert!(error.to_string().contains("a large thing"), "{error}");
    }
}
