//! Child processes whose behaviour does not depend on how the tests were started.
//!
//! A child inherits signal dispositions, resource limits and the environment from the test program:
//! `nohup` and background jobs of scripts ignore signals, users export variables. The commands of
//! this module set all of these. They also kill every child that hangs.

use samite_testing::HANG_GUARD;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

/// Prefixes of variables that change the behaviour of the program, its libraries or its launchers.
const CLEARED: [&str; 21] = [
    "AIP_", "CLICOLOR", "COLUMNS", "GGML_", "HF_", "HOSTNAME", "LANG", "LC_", "LINES", "LLAMA_",
    "MALLOC_", "NO_COLOR", "OMPI_", "PMI", "RUST_", "SAMITE_", "SLURM_", "TERM", "TZ", "XDG_",
    "no_proxy",
];

/// Variables that select the coverage of a test run.
const KEPT: [&str; 3] = ["SAMITE_BLAS_PATH", "SAMITE_CPU_ISA", "SAMITE_TEST_"];

/// Returns the samite program with these arguments and nothing on standard input.
pub fn command(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = child(env!("CARGO_BIN_EXE_samite"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Returns a command that starts samite, such as a shell or a launcher.
pub fn child(program: impl AsRef<OsStr>) -> Command {
    child_within(HANG_GUARD, program)
}

/// Returns a command whose process SIGALRM kills after `guard`, in whole seconds.
fn child_within(guard: Duration, program: impl AsRef<OsStr>) -> Command {
    // Caches and settings belong to the tests, not to the user.
    static HOME: LazyLock<&Path> = LazyLock::new(|| {
        let home = Path::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/home"));
        std::fs::create_dir_all(home).unwrap();
        home
    });
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let begins = |list: &[&str]| list.iter().any(|start| text.starts_with(start));
        let is_proxy = text.to_ascii_lowercase().ends_with("_proxy");
        if (begins(&CLEARED) || is_proxy) && !begins(&KEPT) {
            command.env_remove(&name);
        }
    }
    for name in ["HOME", "LOCALAPPDATA", "APPDATA"] {
        command.env(name, *HOME);
    }
    #[cfg(unix)]
    set_process_state(&mut command, guard.as_secs() as u32);
    #[cfg(not(unix))]
    let _ = guard;
    command
}

/// Makes the child start with default signal dispositions, no blocked signals, usual limits and
/// an alarm. `exec` keeps all of them.
#[cfg(unix)]
fn set_process_state(command: &mut Command, alarm: u32) {
    use std::mem::MaybeUninit;
    use std::os::unix::process::CommandExt;
    let set = move || {
        // SAFETY: the pointers refer to local variables of the right types, and every variable is
        // written before it is read. No signal handler is installed.
        unsafe {
            // SIGKILL and SIGSTOP cannot be changed, which is fine.
            for signal in 1..32 {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut signals = MaybeUninit::uninit();
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigprocmask(libc::SIG_SETMASK, signals.as_ptr(), std::ptr::null_mut());
            // Keep the hard limit: only a superuser may raise it.
            for (resource, soft) in [
                (libc::RLIMIT_AS, libc::RLIM_INFINITY),
                (libc::RLIMIT_CORE, 0),
                (libc::RLIMIT_CPU, libc::RLIM_INFINITY),
                (libc::RLIMIT_DATA, libc::RLIM_INFINITY),
                (libc::RLIMIT_FSIZE, libc::RLIM_INFINITY),
                (libc::RLIMIT_NOFILE, 1024),
                (libc::RLIMIT_STACK, 8 << 20),
            ] {
                let mut limit = MaybeUninit::<libc::rlimit>::uninit();
                if libc::getrlimit(resource, limit.as_mut_ptr()) == 0 {
                    let mut limit = limit.assume_init();
                    limit.rlim_cur = soft.min(limit.rlim_max);
                    libc::setrlimit(resource, &limit);
                }
            }
            libc::alarm(alarm);
        }
        Ok(())
    };
    // SAFETY: between fork and exec, the closure calls async-signal-safe functions and
    // `getrlimit` and `setrlimit`, which are bare system calls. It neither allocates nor locks.
    unsafe { command.pre_exec(set) };
}

/// Sends a signal, such as `INT`, to a process that has not been waited for.
#[cfg(unix)]
pub fn send(signal: &str, process: impl std::fmt::Display) {
    let mut kill = Command::new("kill");
    kill.args([format!("-{signal}"), process.to_string()]);
    assert!(kill.status().unwrap().success());
}

/// Returns true if a process handles a signal, given by its number.
#[cfg(target_os = "linux")]
pub fn handles(process: u32, signal: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal number 1 is bit 0.
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(target_os = "linux")]
#[test]
fn a_child_does_not_inherit_signals_limits_or_variables() {
    let script = "trap '' INT HUP; ulimit -Sn 64; ulimit -Sf 1; exec \"$@\"";
    let name = "child::inner_test_run_with_other_signals_limits_and_variables";
    let output = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("LANG", "tlh")
        .env("SAMITE_DISABLE", "cpu")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("1 passed"), "{text}{errors}");
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "the test before this one starts it"]
fn inner_test_run_with_other_signals_limits_and_variables() {
    let seen = |command: &mut Command| {
        let script = "grep -E '^Sig(Ign|Blk)' /proc/self/status; ulimit -Sn; echo $LANG.";
        let output = command.args(["-c", script]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        // Signals from 32 on belong to the C library.
        let mask = |text: &str| u64::from_str_radix(text, 16).unwrap() & 0x7fff_ffff;
        let masks = [mask(&words[1]), mask(&words[3])];
        (masks, words[4].clone(), words[5].clone())
    };
    let expected = ([0, 0], "1024".to_owned(), ".".to_owned());
    assert_eq!(seen(&mut child("sh")), expected);
    // A plain `Command` inherits the settings of the outer test, and those that the outer test
    // inherited.
    let ([_, ignored], files, language) = seen(&mut Command::new("sh"));
    assert_eq!(ignored & 0b11, 0b11);
    assert_eq!([files, language], ["64", "tlh."]);
}

#[cfg(unix)]
#[test]
fn the_hang_guard_outlives_exec_and_kills() {
    use std::os::unix::process::ExitStatusExt;
    let mut sleeping = child_within(Duration::from_secs(1), "sh");
    let status = sleeping.args(["-c", "exec sleep 3600"]).status().unwrap();
    // SIGALRM
    assert_eq!(status.signal(), Some(14));
}
