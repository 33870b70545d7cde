//! Keys and values of files, as texts.

use crate::entry::{Failure, Outcome, print, text};
use samite_gguf::{Metadata, Value};
use std::ffi::c_char;

/// All values that are no lists, in the order of the file.
pub struct Readable(Vec<(String, Vec<u8>)>);

impl Readable {
    /// Those of a file.
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
                // Six digits, as C writes them.
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

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, index: i32) -> Option<&(String, Vec<u8>)> {
        self.0.get(usize::try_from(index).ok()?)
    }

    /// Writes a key by its number.
    ///
    /// # Errors
    /// If there is none; the buffer is empty then.
    ///
    /// # Safety
    /// `buffer` is null or has `size` bytes.
    pub unsafe fn print_key(&self, index: i32, buffer: *mut c_char, size: usize) -> Outcome<i32> {
        let key = self.at(index).map(|entry| entry.0.as_bytes());
        // SAFETY: the caller promises it.
        unsafe { found(key, buffer, size) }
    }

    /// Writes a value by its number.
    ///
    /// # Errors
    /// As [`print_key`](Self::print_key).
    ///
    /// # Safety
    /// As [`print_key`](Self::print_key).
    pub unsafe fn print_value(&self, index: i32, buffer: *mut c_char, size: usize) -> Outcome<i32> {
        let value = self.at(index).map(|entry| &*entry.1);
        // SAFETY: the caller promises it.
        unsafe { found(value, buffer, size) }
    }

    /// Writes a value by its key.
    ///
    /// # Errors
    /// As [`print_key`](Self::print_key).
    ///
    /// # Safety
    /// As [`print_key`](Self::print_key); `key` is null or a text.
    pub unsafe fn print_value_of(
        &self,
        key: *const c_char,
        buffer: *mut c_char,
        size: usize,
    ) -> Outcome<i32> {
        // SAFETY: the caller promises it.
        let key = unsafe { text(key) };
        let value = key.and_then(|key| {
            let mut entries = self.0.iter();
            entries.find(|entry| entry.0.as_bytes() == key.to_bytes())
        });
        // SAFETY: the caller promises it.
        unsafe { found(value.map(|entry| &*entry.1), buffer, size) }
    }
}

/// # Safety
/// `buffer` is null or has `size` bytes.
unsafe fn found(text: Option<&[u8]>, buffer: *mut c_char, size: usize) -> Outcome<i32> {
    match text {
        // SAFETY: the caller promises it.
        Some(text) => Ok(unsafe { print(text, buffer, size) }),
        None => {
            // SAFETY: the caller promises it.
            unsafe { print(b"", buffer, size) };
            // To ask for a key is no fault.
            Err(Failure::silent())
        }
    }
}
