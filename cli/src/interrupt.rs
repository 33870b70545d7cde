//! Handles Ctrl-C, SIGTERM and SIGHUP.

use crate::progress;
use crate::shown::say;
use samite::CancelToken;
use samite::gguf::remove_unfinished_files;
use std::io::Write;
use std::sync::LazyLock;
#[cfg(unix)]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// What programs exit with after Ctrl-C.
pub const INTERRUPTED: i32 = 130;

/// What the program exits with: after SIGTERM and SIGHUP, it is another number.
static EXIT_CODE: AtomicI32 = AtomicI32::new(INTERRUPTED);

/// What is cancelled.
static TOKEN: LazyLock<CancelToken> = LazyLock::new(CancelToken::new);

/// Whether somebody looks at the token, so that the program comes to an end by itself.
static IS_LOOKED_AT: AtomicBool = AtomicBool::new(false);

/// How the terminal was before lines were edited on it.
#[cfg(unix)]
static TERMINAL: OnceLock<rustix::termios::Termios> = OnceLock::new();

/// Takes note of how the terminal is, so that it is so again when the program ends while a line is edited on it.
pub fn keep_terminal() {
    #[cfg(unix)]
    if let Ok(terminal) = rustix::termios::tcgetattr(std::io::stdin()) {
        let _ = TERMINAL.set(terminal);
    }
}

/// From now on, a signal ends the program: at once, or, once the [token](token) is looked at, by cancelling it; a second
/// signal then ends it at once. Files that are not finished are removed.
pub fn handle() {
    LazyLock::force(&TOKEN);
    // Without a handler, signals do what they always do.
    let _ = install(|exit_code| {
        EXIT_CODE.store(exit_code, Ordering::SeqCst);
        if IS_LOOKED_AT.load(Ordering::SeqCst) && !TOKEN.is_cancelled() {
            TOKEN.cancel();
            return;
        }
        // Until the end, nobody makes another one.
        let _no_more = remove_unfinished_files();
        progress::clear();
        say("interrupted");
        end(exit_code)
    });
}

/// What the program exits with after the signal that came.
pub fn exit_code() -> i32 {
    EXIT_CODE.load(Ordering::SeqCst)
}

/// Ends the program when its work is done.
pub fn leave(exit_code: i32) -> ! {
    // Whoever wrote something has heard of failures.
    let _ = std::io::stdout().flush();
    end(exit_code)
}

/// Ends the program at once. Libraries that devices loaded are not asked to clean up: some wait for threads of theirs that never end.
/// Standard output is left alone: another thread may be waiting for its reader.
fn end(exit_code: i32) -> ! {
    #[cfg(unix)]
    if let Some(terminal) = TERMINAL.get() {
        let now = rustix::termios::OptionalActions::Now;
        let _ = rustix::termios::tcsetattr(std::io::stdin(), now, terminal);
    }
    #[cfg(unix)]
    signal_hook::low_level::exit(exit_code);
    #[cfg(not(unix))]
    std::process::exit(exit_code)
}

/// A token that signals cancel. Who asks for it looks at it every now and then.
pub fn token() -> CancelToken {
    IS_LOOKED_AT.store(true, Ordering::SeqCst);
    TOKEN.clone()
}

/// Does something that may wait for long without looking at the token: a signal ends the program at once.
pub fn at_once<T>(wait: impl FnOnce() -> T) -> T {
    let before = IS_LOOKED_AT.swap(false, Ordering::SeqCst);
    let result = wait();
    IS_LOOKED_AT.store(before, Ordering::SeqCst);
    result
}

/// Has a thread call `act` with the exit code for each signal.
#[cfg(unix)]
fn install(act: impl Fn(i32) + Send + 'static) -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let ignored = ignored();
    let wanted = [SIGINT, SIGTERM, SIGHUP];
    let wanted = wanted
        .into_iter()
        .filter(|signal| !ignored.contains(signal));
    let mut signals = signal_hook::iterator::Signals::new(wanted)?;
    samite::thread_builder()?
        .name("signals".to_owned())
        .spawn(move || signals.forever().for_each(|signal| act(128 + signal)))?;
    Ok(())
}

/// Signals that whoever started the program had it ignore, as `nohup` does, where the system says.
#[cfg(unix)]
fn ignored() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mask = mask.unwrap_or(0);
    // Signal number 1 is bit 0.
    (1..=64)
        .filter(|signal| mask >> (signal - 1) & 1 == 1)
        .collect()
}

/// Has a thread call `act` with the exit code for each signal.
#[cfg(not(unix))]
fn install(act: impl Fn(i32) + Send + 'static) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || act(INTERRUPTED))
}
