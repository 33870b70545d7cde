//! Progress bars on standard error, silent if that is no terminal.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::LazyLock;

/// All bars, so that several at a time and lines between them do not garble each other.
static BARS: LazyLock<MultiProgress> =
    LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10)));

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

/// Does something that writes to the terminal, without bars there.
pub fn pause(print: impl FnOnce()) {
    BARS.suspend(print);
}

fn bar(what: &'static str, template: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::hidden();
    bar.set_length(0);
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(what);
    BARS.add(bar)
}
