//! Progress bars on standard error, silent if that is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar for `what`, counting bytes.
pub fn bytes(what: &'static str) -> ProgressBar {
    bar(
        what,
        "{msg} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
    )
}

/// A bar for `what`, counting things.
pub fn count(what: &'static str) -> ProgressBar {
    bar(what, "{msg} [{bar:30}] {pos}/{len} {eta}")
}

fn bar(what: &'static str, template: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(what);
    bar
}
