//! Messages of plugins: log lines, and the message before an abort.
//!
//! These functions are C variadics. Rust can call variadic functions but not define them. So
//! entries in assembly language store the argument registers where the platform's `va_list` expects
//! them, and the C library formats the message.

use super::{Symbol, exports};
use std::ffi::{CStr, c_char, c_int, c_void};

unsafe extern "C" {
    /// The C library's function. On the architectures of this module, a `va_list` is passed by
    /// reference.
    fn vsnprintf(
        to: *mut c_char,
        size: usize,
        format: *const c_char,
        arguments: *mut c_void,
    ) -> c_int;
}

/// Maximum bytes of a message. Longer ones are truncated.
const LONGEST: usize = 4096;

pub fn symbols() -> Vec<Symbol> {
    exports![abort_entry as ggml_abort, log_entry as ggml_log_internal]
}

/// Defines an entry point of a variadic function with some named arguments. It calls the target
/// with a pointer to a `va_list` of the remaining arguments.
macro_rules! variadic {
    ($entry:ident, $target:ident, $named:literal, $x86_64:literal, $aarch64:literal) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $entry() {
            std::arch::naked_asm!(
                "sub rsp, 216",
                // The register save area starts at byte 32: six integers, then eight vectors.
                "mov [rsp + 32], rdi",
                "mov [rsp + 40], rsi",
                "mov [rsp + 48], rdx",
                "mov [rsp + 56], rcx",
                "mov [rsp + 64], r8",
                "mov [rsp + 72], r9",
                "test al, al",
                "je 2f",
                "movaps [rsp + 80], xmm0",
                "movaps [rsp + 96], xmm1",
                "movaps [rsp + 112], xmm2",
                "movaps [rsp + 128], xmm3",
                "movaps [rsp + 144], xmm4",
                "movaps [rsp + 160], xmm5",
                "movaps [rsp + 176], xmm6",
                "movaps [rsp + 192], xmm7",
                "2:",
                // The `va_list`: offsets of the next integer and vector, the arguments in memory,
                // the save area.
                concat!("mov dword ptr [rsp], 8 * ", $named),
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 32]",
                "mov [rsp + 16], rax",
                concat!("mov ", $x86_64, ", rsp"),
                "call {target}",
                "add rsp, 216",
                "ret",
                target = sym $target,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $entry() {
            std::arch::naked_asm!(
                "sub sp, sp, #240",
                "stp x29, x30, [sp]",
                // Eight integers from byte 48 on, then eight vectors.
                "stp x0, x1, [sp, #48]",
                "stp x2, x3, [sp, #64]",
                "stp x4, x5, [sp, #80]",
                "stp x6, x7, [sp, #96]",
                "stp q0, q1, [sp, #112]",
                "stp q2, q3, [sp, #144]",
                "stp q4, q5, [sp, #176]",
                "stp q6, q7, [sp, #208]",
                // The `va_list`: the arguments in memory, the ends of both save areas, and the
                // negative offsets of the next arguments.
                "add x9, sp, #240",
                "str x9, [sp, #16]",
                "add x10, sp, #112",
                "str x10, [sp, #24]",
                "str x9, [sp, #32]",
                concat!("mov w9, #-8 * (8 - ", $named, ")"),
                "str w9, [sp, #40]",
                "mov w9, #-128",
                "str w9, [sp, #44]",
                concat!("add ", $aarch64, ", sp, #16"),
                "bl {target}",
                "ldp x29, x30, [sp]",
                "add sp, sp, #240",
                "ret",
                target = sym $target,
            )
        }
    };
}

variadic!(log_entry, log, 2, "rdx", "x2");
variadic!(abort_entry, abort, 3, "rcx", "x3");

/// Formats a message.
///
/// # Safety
/// The arguments must match the format. The list cannot be used again.
unsafe fn format(format: *const c_char, arguments: *mut c_void) -> String {
    if format.is_null() {
        return String::new();
    }
    let mut text = vec![0u8; LONGEST];
    // SAFETY: the arguments match the format and are used once. At most `text.len()` bytes are
    // written: a longer text is truncated, and a zero terminates it.
    unsafe { vsnprintf(text.as_mut_ptr().cast(), text.len(), format, arguments) };
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    text.to_string_lossy().trim_end().to_owned()
}

/// `ggml_log_internal`: logs an event instead of printing a line.
unsafe extern "C" fn log(level: c_int, text: *const c_char, arguments: *mut c_void) {
    // SAFETY: the plugin's arguments match its format.
    crate::host::event(level, &unsafe { format(text, arguments) });
}

/// `ggml_abort`: the plugin cannot continue and does not expect the call to return.
unsafe extern "C" fn abort(
    file: *const c_char,
    line: c_int,
    text: *const c_char,
    arguments: *mut c_void,
) -> ! {
    // SAFETY: the plugin's arguments match its format.
    let text = unsafe { format(text, arguments) };
    let file = match file.is_null() {
        true => "?".into(),
        // SAFETY: the plugin passes a string.
        false => unsafe { CStr::from_ptr(file) }.to_string_lossy(),
    };
    fail(&format!("{file}:{line}: {text}"))
}

/// Ends the process with a message. The interface leaves no other way: the plugin's threads may
/// wait for each other, and its frames cannot be unwound.
pub fn fail(message: &str) -> ! {
    tracing::error!(target: "ggml", "a plugin gave up: {message}");
    // There may be no subscriber of events, and this is the last message.
    let _ = std::io::Write::write_fmt(
        &mut std::io::stderr(),
        format_args!("a plugin of ggml gave up: {message}\n"),
    );
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static HEARD: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

    unsafe extern "C" fn hear(level: c_int, text: *const c_char, arguments: *mut c_void) {
        // SAFETY: the arguments of `hear_entry` match its format.
        let text = unsafe { format(text, arguments) };
        HEARD.lock().unwrap().push((level, text));
    }

    variadic!(hear_entry, hear, 2, "rdx", "x2");

    #[test]
    fn variadic_messages_format_all_argument_kinds() {
        type Variadic = unsafe extern "C" fn(c_int, *const c_char, ...);
        // SAFETY: the ABI of such a function.
        let say = unsafe {
            std::mem::transmute::<unsafe extern "C" fn(), Variadic>(
                hear_entry as unsafe extern "C" fn(),
            )
        };
        // SAFETY: formats and arguments match.
        unsafe {
            say(1, c"no arguments\n".as_ptr());
            say(
                2,
                c"%s %d %5.2f|%c".as_ptr(),
                c"text".as_ptr(),
                -7,
                2.5f64,
                'x' as c_int,
            );
            // More than the number of registers of either kind.
            say(
                3,
                c"%d %d %d %d %d %d %d %d %d %g %g %g %g %g %g %g %g %g %g %zu".as_ptr(),
                1,
                2,
                3,
                4,
                5,
                6,
                7,
                8,
                9,
                1.5f64,
                2.5f64,
                3.5f64,
                4.5f64,
                5.5f64,
                6.5f64,
                7.5f64,
                8.5f64,
                9.5f64,
                10.5f64,
                usize::MAX,
            );
            say(4, c"%s".as_ptr(), c"ä".as_ptr());
            say(5, std::ptr::null());
        }
        let heard = std::mem::take(&mut *HEARD.lock().unwrap());
        let many = format!(
            "1 2 3 4 5 6 7 8 9 1.5 2.5 3.5 4.5 5.5 6.5 7.5 8.5 9.5 10.5 {}",
            usize::MAX
        );
        let expected = [
            (1, "no arguments"),
            (2, "text -7  2.50|x"),
            (3, many.as_str()),
            (4, "ä"),
            (5, ""),
        ];
        assert_eq!(
            heard,
            expected.map(|(level, text)| (level, text.to_owned()))
        );
    }

    #[test]
    fn long_messages_are_truncated() {
        type Variadic = unsafe extern "C" fn(c_int, *const c_char, ...);
        // SAFETY: `variadic!` defines `log_entry` with the ABI of such a function, for which Rust
        // has no definition syntax.
        let say = unsafe {
            std::mem::transmute::<unsafe extern "C" fn(), Variadic>(
                log_entry as unsafe extern "C" fn(),
            )
        };
        let long = std::ffi::CString::new("x".repeat(3 * LONGEST)).unwrap();
        // SAFETY: formats and arguments match.
        unsafe { say(2, c"%s".as_ptr(), long.as_ptr()) };
    }
}
