//! How callers come in: no call unwinds or ends the process; one that fails gives what the header says, and a line in the caller's log.

use crate::log::{self, Level};
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call failed.
#[derive(Debug)]
pub struct Failure {
    level: Level,
    message: String,
}

/// What a call came to.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// With this message.
    pub fn new(message: impl Into<String>) -> Self {
        Failure {
            level: Level::Error,
            message: message.into(),
        }
    }

    /// For what is not there, and why.
    pub fn unsupported(why: &str) -> Self {
        Failure {
            level: Level::Warn,
            message: format!("not supported: {why}"),
        }
    }

    /// For what is no failure, but has no answer.
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

/// Runs a call. `failed` is what it gives when it fails or panics.
pub fn run<T>(name: &str, failed: T, call: impl FnOnce() -> Outcome<T>) -> T {
    // What a panic leaves behind is behind locks, which take it as it is, and each part is whole.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => {
            // The caller's log may do what it likes, but for unwinding.
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

/// Exports functions of the header. Each says what it gives when it fails, behind `or`.
macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? , or $failed:expr; $body:block)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        /// As in the header: pointers are null, or point to what it says.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, clippy::unused_unit)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            $crate::entry::run(stringify!($name), $failed, || $body)
        }
    )*};
}
pub(crate) use export;

/// Exports old names of functions.
macro_rules! alias {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $path:path;)*) => {$(
        /// An old name.
        ///
        /// # Safety
        /// As in the header.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller keeps to what the header says.
            unsafe { $path($($argument),*) }
        }
    )*};
}
pub(crate) use alias;

/// A caller's text; `None` for null.
///
/// # Safety
/// Null, or a text that ends with 0 and stays as it is.
pub unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: it is not null, and the caller promises the rest.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

/// A caller's text, which must be there.
///
/// # Errors
/// For null, and for what is no UTF-8.
///
/// # Safety
/// As [`text`].
pub unsafe fn required_text<'a>(what: &str, pointer: *const c_char) -> Outcome<&'a str> {
    // SAFETY: the caller promises it.
    let found = unsafe { text(pointer) };
    let found = found.ok_or_else(|| Failure::new(format!("the {what} is null")))?;
    found
        .to_str()
        .map_err(|_| Failure::new(format!("the {what} is no text in UTF-8")))
}

/// A caller's array.
///
/// # Errors
/// For null where there are elements, and for more than there can be.
///
/// # Safety
/// Null, or so many elements that stay as they are.
pub unsafe fn array<'a, T>(what: &str, pointer: *const T, count: usize) -> Outcome<&'a [T]> {
    check_array(what, pointer, count)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: it is neither null, unaligned nor too long, and the caller promises the rest.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// A caller's array to write to.
///
/// # Errors
/// As [`array`].
///
/// # Safety
/// Null, or so many elements that nobody else looks at.
pub unsafe fn array_mut<'a, T>(what: &str, pointer: *mut T, count: usize) -> Outcome<&'a mut [T]> {
    check_array(what, pointer, count)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: it is neither null, unaligned nor too long, and the caller promises the rest.
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

/// Writes a text as `snprintf` does: cut to the room there is, with a 0 behind it. Gives its whole length.
///
/// # Safety
/// `buffer` is null or has `size` bytes.
pub unsafe fn print(text: &[u8], buffer: *mut c_char, size: usize) -> i32 {
    let length = i32::try_from(text.len()).unwrap_or(i32::MAX);
    if buffer.is_null() || size == 0 {
        return length;
    }
    let count = text.len().min(size - 1);
    // SAFETY: there are `size` bytes, more than `count`.
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
    fn a_call_that_panics_or_fails_gives_what_the_header_says() {
        assert_eq!(run("f", 7, || Ok(1)), 1);
        assert_eq!(run("f", 7, || Err(Failure::new("no"))), 7);
        assert_eq!(run("f", 7, || panic!("this is the test's")), 7);
    }

    #[test]
    fn texts_are_cut_to_the_room_and_arrays_are_checked() {
        let mut buffer = [1u8; 4];
        // SAFETY: there are so many bytes.
        let length = unsafe { print(b"abcd", buffer.as_mut_ptr().cast(), 3) };
        assert_eq!((length, buffer), (4, [b'a', b'b', 0, 1]));
        // SAFETY: nothing is read where something is wrong.
        unsafe {
            assert_eq!(print(b"abcd", std::ptr::null_mut(), 9), 4);
            assert!(array::<u32>("x", std::ptr::null(), 1).is_err());
            assert_eq!(array::<u32>("x", std::ptr::null(), 0).ok(), Some(&[][..]));
            assert!(array::<u32>("x", std::ptr::without_provenance(5), 1).is_err());
            assert!(array::<u32>("x", std::ptr::without_provenance(8), usize::MAX).is_err());
        }
    }
}
