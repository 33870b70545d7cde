//! The caller's log: all messages go to one callback, by default to standard error.

use crate::entry::{export, run};
use crate::layout::LogCallback;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::sync::{Once, PoisonError, RwLock};
use tracing_subscriber::fmt::MakeWriter;

/// ggml's log levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// No message.
    None = 0,
    /// Debugging.
    Debug = 1,
    /// Information.
    Info = 2,
    /// Possible problem.
    Warn = 3,
    /// Error.
    Error = 4,
}

/// Callback and its data.
#[derive(Clone, Copy)]
struct LogSink {
    function: unsafe extern "C" fn(c_int, *const c_char, *mut c_void),
    data: usize,
}

static SINK: RwLock<LogSink> = RwLock::new(LogSink {
    function: standard_error,
    data: 0,
});

/// # Safety
/// `text` is null or a C string.
unsafe extern "C" fn standard_error(_level: c_int, text: *const c_char, _data: *mut c_void) {
    if !text.is_null() {
        // SAFETY: guaranteed by the caller.
        let text = unsafe { CStr::from_ptr(text) };
        // A failure of standard error cannot be reported.
        let _ = std::io::stderr().write_all(text.to_bytes());
    }
}

/// Logs a line.
pub fn line(level: Level, text: &str) {
    let sink = *SINK.read().unwrap_or_else(PoisonError::into_inner);
    let mut bytes: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    bytes.push(b'\n');
    if let Ok(text) = CString::new(bytes) {
        let data = std::ptr::with_exposed_provenance_mut(sink.data);
        // SAFETY: the caller that set the callback guarantees that it can be called with its data
        // from any thread.
        unsafe { (sink.function)(level as c_int, text.as_ptr(), data) };
    }
}

/// Forwards the engine's log messages from now on.
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let listener = tracing_subscriber::fmt()
            .with_ansi(false)
            .without_time()
            .with_target(false)
            .with_level(false)
            .with_max_level(tracing::Level::INFO)
            .with_writer(Lines)
            .finish();
        // This library has its own copy of `tracing`, so the subscriber cannot have been set
        // before.
        let _ = tracing::subscriber::set_global_default(listener);
    });
}

/// Creates a writer for each event.
struct Lines;

/// Text of one event.
struct EventWriter {
    level: Level,
    text: Vec<u8>,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = EventWriter;

    fn make_writer(&'a self) -> EventWriter {
        EventWriter {
            level: Level::Info,
            text: Vec::new(),
        }
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> EventWriter {
        let level = match *meta.level() {
            tracing::Level::ERROR => Level::Error,
            tracing::Level::WARN => Level::Warn,
            tracing::Level::INFO => Level::Info,
            _ => Level::Debug,
        };
        EventWriter {
            level,
            text: Vec::new(),
        }
    }
}

impl Write for EventWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for EventWriter {
    fn drop(&mut self) {
        let text = String::from_utf8_lossy(&self.text);
        if !text.trim().is_empty() {
            run("the log", (), || {
                line(self.level, &format!("samite: {}", text.trim()));
                Ok(())
            });
        }
    }
}

export! {
    /// Sends the log to `callback`, or to standard error if it is null.
    fn llama_log_set(callback: LogCallback, user_data: *mut c_void), or (); {
        let sink = match callback {
            Some(function) => LogSink { function, data: user_data.expose_provenance() },
            None => LogSink { function: standard_error, data: 0 },
        };
        *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
        Ok(())
    }

    /// Returns the callback and its data.
    fn llama_log_get(callback: *mut LogCallback, user_data: *mut *mut c_void), or (); {
        let sink = *SINK.read().unwrap_or_else(PoisonError::into_inner);
        if !callback.is_null() {
            // SAFETY: it is not null, and the caller guarantees the rest.
            unsafe { callback.write(Some(sink.function)) };
        }
        if !user_data.is_null() {
            // SAFETY: as above.
            unsafe { user_data.write(std::ptr::with_exposed_provenance_mut(sink.data)) };
        }
        Ok(())
    }
}
