//! Progress bars on standard error. Silent if that is not a terminal.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::ops::Deref;
use std::sync::LazyLock;
#[cfg(feature = "hub")]
use std::time::Duration;

/// All bars. They are managed together, so that several bars and the lines between them do not
/// garble each other.
static BARS: LazyLock<MultiProgress> =
    LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10)));

/// A bar that disappears when it is dropped, so that an error has the line for itself.
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

/// Creates a bar for `what` that counts bytes.
pub fn bytes(what: &'static str) -> Bar {
    bar(
        what,
        "{msg} [{wide_bar}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
    )
}

/// Creates a bar for `what` that counts `things`.
pub fn count(what: &'static str, things: &str) -> Bar {
    bar(
        what,
        &format!("{{msg}} [{{wide_bar}}] {{human_pos}}/{{human_len}} {things} {{eta}}"),
    )
}

/// Returns a callback that takes the number of decoded tokens of a prompt and their total. It draws
/// a bar until prefill is done.
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

/// Creates a spinner for work of unknown length.
#[cfg(feature = "hub")]
pub fn waiting(what: &'static str) -> Bar {
    let bar = bar(what, "{spinner} {msg}");
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Hides the bars while `print` writes to the terminal.
pub fn pause(print: impl FnOnce()) {
    BARS.suspend(print);
}

/// Removes all bars from the terminal.
pub fn clear() {
    // If this fails, the terminal is gone.
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
