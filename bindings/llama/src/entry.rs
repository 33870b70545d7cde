//! Entry points: calls never unwind or abort the process. A failing call returns the header's error
//! value and logs a line.

use crate::log::{self, Level};
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Reason why a call failed.
#[derive(Debug)]
pub struct Failure {
    level: Level,
    message: String,
}

/// Result of a call.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// Creates a failure with this message.
    pub fn new(message: impl Into<String>) -> Self {
        Failure {
            level: Level::Error,
            message: message.into(),
        }
    }

    /// Creates a failure for an unsupported feature.
    pub fn unsupported(why: &str) -> Self {
        Failure {
            level: Level::Warn,
            message: format!("not supported: {why}"),
        }
    }

    /// Creates a failure without a log line, for a lookup without a result.
    pub fn silent() -> Self {
        Failure {
            level: Level::None,
            message: String::new(),
        }
    }

    fn tell(&self, name: &str) {
        if self.level != Level::None {
            log::line(self.level, &format!("{name}: {}", self.message));
        }
    }
}

macro_rules! failures {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::new(error.to_string())
            }
        }
    )*};
}
failures!(
    samite_llm::Error,
    samite_core::Error,
    samite_gguf::Error,
    samite_text::SamplerError,
    samite_text::TokenizeError,
    samite_text::VocabError,
    samite_text::ConstraintError,
    samite_grammar::GrammarError,
    samite_chat::TemplateError,
    std::io::Error
);

/// Runs a call. Returns `failed` if it fails or panics.
pub fn run<T>(name: &str, failed: T, call: impl FnOnce() -> Outcome<T>) -> T {
    // State is behind locks that ignore poisoning, and is consistent after a panic.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => {
            // The caller's log callback must not unwind into this library.
            failure.tell(name);
            failed
        }
        Err(_) => {
            log::line(
                Level::Error,
                &format!("{name}: this is a fault of samite: it panicked"),
            );
            failed
        }
    }
}

/// Exports functions of the header. Each has the value returned on failure after `or`.
macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? , or $failed:expr; $body:block)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        /// Pointers must be null or valid as the header requires.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, clippy::unused_unit)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            $crate::entry::run(stringify!($name), $failed, || $body)
        }
    )*};
}
pub(crate) use export;

/// Exports deprecated function names.
macro_rules! alias {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $path:path;)*) => {$(
        /// Deprecated name.
        ///
        /// # Safety
        /// The caller must uphold the header's contract.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller upholds the header's contract.
            unsafe { $path($($argument),*) }
        }
    )*};
}
pub(crate) use alias;

/// Returns a caller's C string; `None` for null.
///
/// # Safety
/// Null, or a C string that is not modified meanwhile.
pub unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the pointer is not null, and the caller guarantees the rest.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

/// Returns a caller's C string, which must not be null.
///
/// # Errors
/// If it is null or not UTF-8.
///
/// # Safety
/// See [`text`].
pub unsafe fn required_text<'a>(what: &str, pointer: *const c_char) -> Outcome<&'a str> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { text(pointer) };
    let found = found.ok_or_else(|| Failure::new(format!("the {what} is null")))?;
    found
        .to_str()
        .map_err(|_| Failure::new(format!("the {what} is no text in UTF-8")))
}

/// Returns a caller's array as a slice.
///
/// # Errors
/// If it is null with a nonzero count, unaligned, or too long.
///
/// # Safety
/// Null, or `count` elements that are not modified meanwhile.
pub unsafe fn array<'a, T>(what: &str, pointer: *const T, count: usize) -> Outcome<&'a [T]> {
    check_array(what, pointer, count)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: it is neither null, unaligned nor too long, and the caller guarantees the rest.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// Returns a caller's array as a mutable slice.
///
/// # Errors
/// See [`array`].
///
/// # Safety
/// Null, or `count` elements that are not accessed otherwise meanwhile.
pub unsafe fn array_mut<'a, T>(what: &str, pointer: *mut T, count: usize) -> Outcome<&'a mut [T]> {
    check_array(what, pointer, count)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: it is neither null, unaligned nor too long, and the caller guarantees the rest.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(pointer, count) }),
    }
}

fn check_array<T>(what: &str, pointer: *const T, count: usize) -> Outcome<()> {
    let most = isize::MAX as usize / size_of::<T>().max(1);
    if count == 0 {
        Ok(())
    } else if pointer.is_null() {
        Err(Failure::new(format!("{what}: {count} elements at null")))
    } else if !pointer.is_aligned() {
        Err(Failure::new(format!("{what}: {pointer:p} is not aligned")))
    } else if count > most {
        Err(Failure::new(format!("{what}: {count} elements cannot be")))
    } else {
        Ok(())
    }
}

/// Writes a text like `snprintf`, truncated to `size` and 0-terminated. Returns its full length.
///
/// # Safety
/// `buffer` is null or has `size` bytes.
pub unsafe fn print(text: &[u8], buffer: *mut c_char, size: usize) -> i32 {
    let length = i32::try_from(text.len()).unwrap_or(i32::MAX);
    if buffer.is_null() || size == 0 {
        return length;
    }
    let count = text.len().min(size - 1);
    // SAFETY: the buffer has `size` bytes, more than `count`.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), count);
        buffer.add(count).write(0);
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_calls_return_the_documented_error_value() {
        assert_eq!(run("f", 7, || Ok(1)), 1);
        assert_eq!(run("f", 7, || Err(Failure::new("no"))), 7);
        assert_eq!(run("f", 7, || panic!("this is the test's")), 7);
    }

    #[test]
    fn strings_are_truncated_and_arrays_are_checked() {
        let mut buffer = [1u8; 4];
        // SAFETY: the buffer has at least this size.
        let length = unsafe { print(b"abcd", buffer.as_mut_ptr().cast(), 3) };
        assert_eq!((length, buffer), (4, [b'a', b'b', 0, 1]));
        // SAFETY: invalid arguments are rejected before any access.
        unsafe {
            assert_eq!(print(b"abcd", std::ptr::null_mut(), 9), 4);
            assert!(array::<u32>("x", std::ptr::null(), 1).is_err());
            assert_eq!(array::<u32>("x", std::ptr::null(), 0).ok(), Some(&[][..]));
            assert!(array::<u32>("x", std::ptr::without_provenance(5), 1).is_err());
            assert!(array::<u32>("x", std::ptr::without_provenance(8), usize::MAX).is_err());
        }
    }
}
