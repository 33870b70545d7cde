//! Ctrl-C.

use crate::failure::{Failure, Outcome};
use samite::CancelToken;

/// What programs exit with after Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// A token that Ctrl-C and SIGTERM cancel. A second Ctrl-C ends the program at once.
pub fn token() -> Outcome<CancelToken> {
    let token = CancelToken::new();
    let shared = token.clone();
    ctrlc::set_handler(move || {
        if shared.is_cancelled() {
            std::process::exit(INTERRUPTED.into());
        }
        shared.cancel();
    })
    .map_err(|error| Failure::error(format_args!("cannot handle Ctrl-C: {error}")))?;
    Ok(token)
}
