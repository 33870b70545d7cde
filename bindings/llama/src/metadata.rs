//! Keys and values of files as text.

use crate::entry::{Failure, Outcome, print, text};
use samite_gguf::{Metadata, Value};
use std::ffi::c_char;

/// All values that are not lists, in file order.
pub struct Readable(Vec<(String, Vec<u8>)>);

impl Readable {
    /// Reads the values of a file.
    pub fn new(metadata: &Metadata) -> Self {
        let texts = metadata.iter().filter_map(|(key, value)| {
            let text = match value {
                Value::U8(v) => v.to_string(),
                Value::I8(v) => v.to_string(),
                Value::U16(v) => v.to_string(),
                Value::I16(v) => v.to_string(),
                Value::U32(v) => v.to_string(),
                Value::I32(v) => v.to_string(),
                Value::U64(v) => v.to_string(),
                Value::I64(v) => v.to_string(),
                // Six digits, as in C.
                Value::F32(v) => format!("{v:.6}"),
                Value::F64(v) => format!("{v:.6}"),
                Value::Bool(v) => v.to_string(),
                Value::String(bytes) => return Some((key.to_owned(), bytes.to_vec())),
                Value::Array(_) => return None,
            };
            Some((key.to_owned(), text.into_bytes()))
        });
        Readable(texts.collect())
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, index: i32) -> Option<&(String, Vec<u8>)> {
        self.0.get(usize::try_from(index).ok()?)
    }

    /// Writes the key with this index.
    ///
    /// # Errors
    /// Returns an error if it does not exist; the buffer is then empty.
    ///
    /// # Safety
    /// `buffer` must be null or have `size` bytes.
    pub unsafe fn print_key(&self, index: i32, buffer: *mut c_char, size: usize) -> Outcome<i32> {
        let key = self.at(index).map(|entry| entry.0.as_bytes());
        // SAFETY: guaranteed by the caller.
        unsafe { found(key, buffer, size) }
    }

    /// Writes the value with this index.
    ///
    /// # Errors
    /// Returns the errors of [`print_key`](Self::print_key).
    ///
    /// # Safety
    /// The conditions of [`print_key`](Self::print_key) apply.
    pub unsafe fn print_value(&self, index: i32, buffer: *mut c_char, size: usize) -> Outcome<i32> {
        let value = self.at(index).map(|entry| &*entry.1);
        // SAFETY: guaranteed by the caller.
        unsafe { found(value, buffer, size) }
    }

    /// Writes the value of a key.
    ///
    /// # Errors
    /// Returns the errors of [`print_key`](Self::print_key).
    ///
    /// # Safety
    /// The conditions of [`print_key`](Self::print_key) apply, and `key` must be null or a C
    /// string.
    pub unsafe fn print_value_of(
        &self,
        key: *const c_char,
        buffer: *mut c_char,
        size: usize,
    ) -> Outcome<i32> {
        // SAFETY: guaranteed by the caller.
        let key = unsafe { text(key) };
        let value = key.and_then(|key| {
            let mut entries = self.0.iter();
            entries.find(|entry| entry.0.as_bytes() == key.to_bytes())
        });
        // SAFETY: guaranteed by the caller.
        unsafe { found(value.map(|entry| &*entry.1), buffer, size) }
    }
}

/// Writes a text, or an empty one if it is missing.
///
/// # Safety
/// `buffer` must be null or have `size` bytes.
unsafe fn found(text: Option<&[u8]>, buffer: *mut c_char, size: usize) -> Outcome<i32> {
    match text {
        // SAFETY: guaranteed by the caller.
        Some(text) => Ok(unsafe { print(text, buffer, size) }),
        None => {
            // SAFETY: guaranteed by the caller.
            unsafe { print(b"", buffer, size) };
            // Asking for a missing key is not an error.
            Err(Failure::silent())
        }
    }
}
