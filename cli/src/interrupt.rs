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

/// Exit code after Ctrl-C.
pub const INTERRUPTED: i32 = 130;

/// Exit code of the program. SIGTERM and SIGHUP change it.
static EXIT_CODE: AtomicI32 = AtomicI32::new(INTERRUPTED);

/// Token that signals cancel.
static TOKEN: LazyLock<CancelToken> = LazyLock::new(CancelToken::new);

/// Set if some code polls the token, so that the program can end in an orderly way.
static IS_LOOKED_AT: AtomicBool = AtomicBool::new(false);

/// Settings of the terminal before line editing.
#[cfg(unix)]
static TERMINAL: OnceLock<rustix::termios::Termios> = OnceLock::new();

/// Records the settings of the terminal, to restore them if the program ends during line editing.
pub fn keep_terminal() {
    #[cfg(unix)]
    if let Ok(terminal) = rustix::termios::tcgetattr(std::io::stdin()) {
        let _ = TERMINAL.set(terminal);
    }
}

/// Installs the signal handler. A signal ends the program at once. If some code polls the
/// [token](token), the first signal cancels it, and a Ctrl-C after that ends the program. Further
/// signals of other kinds do nothing: managers of jobs send some of them twice. Unfinished files
/// are removed.
pub fn handle() {
    LazyLock::force(&TOKEN);
    // Without a handler, signals have their default effect.
    let _ = install(|exit_code| {
        let is_looked_at = IS_LOOKED_AT.load(Ordering::SeqCst);
        if is_looked_at && TOKEN.is_cancelled() && exit_code != INTERRUPTED {
            return;
        }
        EXIT_CODE.store(exit_code, Ordering::SeqCst);
        if is_looked_at && !TOKEN.is_cancelled() {
            TOKEN.cancel();
            return;
        }
        // Prevent other threads from creating more until the end.
        let _no_more = remove_unfinished_files();
        progress::clear();
        say("interrupted");
        end(exit_code)
    });
}

/// Returns the exit code for the signal that arrived.
pub fn exit_code() -> i32 {
    EXIT_CODE.load(Ordering::SeqCst)
}

/// Ends the program after its work is done.
pub fn leave(exit_code: i32) -> ! {
    // The code that wrote to it has reported any failure.
    let _ = std::io::stdout().flush();
    end(exit_code)
}

/// Ends the program at once. Libraries that devices loaded do not run their exit handlers, because
/// some wait for threads that never end. Does not flush standard output: another thread may be
/// blocked on it.
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

/// Returns a token that signals cancel. The caller must poll it regularly.
pub fn token() -> CancelToken {
    IS_LOOKED_AT.store(true, Ordering::SeqCst);
    TOKEN.clone()
}

/// Runs `wait`, which may block for a long time and does not poll the token. Meanwhile, a signal
/// ends the program at once.
pub fn at_once<T>(wait: impl FnOnce() -> T) -> T {
    let before = IS_LOOKED_AT.swap(false, Ordering::SeqCst);
    let result = wait();
    IS_LOOKED_AT.store(before, Ordering::SeqCst);
    result
}

/// Starts a thread that calls `act` with the exit code for each signal.
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

/// Returns the signals that the parent process set to be ignored, as `nohup` does, if the system
/// reports them.
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

/// Starts a thread that calls `act` with the exit code for each signal.
#[cfg(not(unix))]
fn install(act: impl Fn(i32) + Send + 'static) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || act(INTERRUPTED))
}
