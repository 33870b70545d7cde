//! Progress bars on standard error, silent if that is no terminal.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::ops::Deref;
use std::sync::LazyLock;
#[cfg(feature = "hub")]
use std::time::Duration;

/// All bars, so that several at a time and lines between them do not garble each other.
static BARS: LazyLock<MultiProgress> =
    LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10)));

/// A bar that is gone when it is dropped: an error then has the line for itself.
pub struct Bar(ProgressBar);

impl Deref for Bar {
    type Target = ProgressBar;

    fn deref(&self) -> &ProgressBar {
        &self.0
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        BARS.remove(&self.0);
    }
}

/// A bar for `what`, counting bytes.
pub fn bytes(what: &'static str) -> Bar {
    bar(
        what,
        "{msg} [{wide_bar}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
    )
}

/// A bar for `what`, counting `things`.
pub fn count(what: &'static str, things: &str) -> Bar {
    bar(
        what,
        &format!("{{msg}} [{{wide_bar}}] {{human_pos}}/{{human_len}} {things} {{eta}}"),
    )
}

/// Returns a callback that takes the decoded tokens of a prompt and all of them. It draws a bar
/// until prefill is done.
pub fn prefill() -> impl FnMut(usize, usize) + Send + 'static {
    let mut shown: Option<Bar> = None;
    move |done, all| {
        if done == all {
            shown = None;
            return;
        }
        let bar = shown.get_or_insert_with(|| count("prefill", "tokens"));
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    }
}

/// A spinner for work of unknown length.
#[cfg(feature = "hub")]
pub fn waiting(what: &'static str) -> Bar {
    let bar = bar(what, "{spinner} {msg}");
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Does something that writes to the terminal, without bars there.
pub fn pause(print: impl FnOnce()) {
    BARS.suspend(print);
}

/// Takes all bars off the terminal.
pub fn clear() {
    // If it fails, there is no terminal any more.
    let _ = BARS.clear();
}

fn bar(what: &'static str, template: &str) -> Bar {
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::hidden();
    bar.set_length(0);
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(what);
    Bar(BARS.add(bar))
}
