//! Messages of tests that skip something because an optional part is missing.

use std::fmt::Display;
use std::io::Write;

/// Name of the environment variable with a file to which every skipped test adds a line, so that
/// they can be listed after many test programs.
const LIST_VARIABLE: &str = "SAMITE_TEST_SKIPPED";

/// Reports that the test of this thread skips something, and why. Unlike output of tests, the line
/// is shown even if the test passes. It is also added to the file that `SAMITE_TEST_SKIPPED` names.
pub fn skipped(reason: impl Display) {
    let thread = std::thread::current();
    let line = line(thread.name(), &reason);
    // The test harness captures only `println!` and similar macros. A closed stream is no reason to
    // fail.
    let _ = std::io::stderr().write_all(line.as_bytes());
    let Some(path) = std::env::var_os(LIST_VARIABLE) else {
        return;
    };
    let file = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path);
    // One write, so that lines of several processes do not mix.
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

fn line(test: Option<&str>, reason: &dyn Display) -> String {
    format!("skipped: {}: {reason}\n", test.unwrap_or("a test"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skip_lines_name_test_and_reason() {
        let found = line(std::thread::current().name(), &"no library");
        assert_eq!(
            found,
            "skipped: skip::tests::skip_lines_name_test_and_reason: no library\n"
        );
    }
}
