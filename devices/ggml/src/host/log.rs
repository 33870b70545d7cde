//! Converts log messages of plugins to events.

use super::library::string;
use std::ffi::{c_char, c_int, c_void};

/// `ggml_log_set`
pub type SetLogFn = unsafe extern "C" fn(
    Option<unsafe extern "C" fn(c_int, *const c_char, *mut c_void)>,
    *mut c_void,
);

/// Emits an event for a plugin's message with one of ggml's levels.
pub fn event(level: c_int, text: &str) {
    let text = text.trim_end();
    match level {
        _ if text.is_empty() || text == "." => {} // the end of a line, or a dot of a progress bar
        4 => tracing::error!(target: "ggml", "{text}"),
        3 => tracing::warn!(target: "ggml", "{text}"),
        1 => tracing::debug!(target: "ggml", "{text}"),
        _ => tracing::info!(target: "ggml", "{text}"),
    }
}

/// `ggml_log_callback`
pub unsafe extern "C" fn listener(level: c_int, text: *const c_char, _data: *mut c_void) {
    // SAFETY: ggml passes a string.
    if let Some(text) = unsafe { string(text) } {
        event(level, &text);
    }
}
