//! Cancellation of long work.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A switch that stops long work such as loading, prefill or decode. Clones share the switch.
///
/// ```
/// use samite_core::CancelToken;
///
/// let cancel = CancelToken::new();
/// let button = cancel.clone();
/// assert!(cancel.check().is_ok());
/// button.cancel();
/// assert!(cancel.check().is_err());
/// ```
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<Switch>);

#[derive(Default)]
struct Switch {
    is_on: AtomicBool,
    ask: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    /// Functions to call on cancellation.
    hooks: Mutex<Vec<Hook>>,
}

type Hook = Box<dyn Fn() + Send>;

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch")
            .field("is_on", &self.is_on)
            .field("asks", &self.ask.is_some())
            .finish()
    }
}

impl CancelToken {
    /// Creates a token that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a token that calls `ask` to find out whether it is cancelled, each time that work
    /// checks it: from any thread, between nodes and within long ones. After `ask` returns true, it
    /// is not called again until [`reset`](CancelToken::reset).
    pub fn asking(ask: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        CancelToken(Arc::new(Switch {
            is_on: AtomicBool::new(false),
            ask: Some(Box::new(ask)),
            hooks: Mutex::default(),
        }))
    }

    /// Requests that all work with this token stops soon.
    pub fn cancel(&self) {
        self.0.is_on.store(true, Ordering::Release);
        let hooks = self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner);
        hooks.iter().for_each(|hook| hook());
    }

    /// Calls `hook` each time that the token is cancelled, and at once if it already is. For code
    /// that waits without polling the token. A hook must not touch the token.
    pub fn on_cancel(&self, hook: impl Fn() + Send + 'static) {
        let mut hooks = self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner);
        if self.0.is_on.load(Ordering::Acquire) {
            hook();
        }
        hooks.push(Box::new(hook));
    }

    /// Makes the token usable again.
    pub fn reset(&self) {
        self.0.is_on.store(false, Ordering::Release);
    }

    /// Returns whether [`cancel`](CancelToken::cancel) was called or the `ask` function returned
    /// true.
    pub fn is_cancelled(&self) -> bool {
        if self.0.is_on.load(Ordering::Acquire) {
            return true;
        }
        let says_so = self.0.ask.as_ref().is_some_and(|ask| ask());
        if says_so {
            self.cancel();
        }
        says_so
    }

    /// Fails if the token is cancelled, for use in loops: `token.check()?`.
    ///
    /// # Errors
    /// [`Error::Cancelled`] after [`cancel`](CancelToken::cancel).
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn callback_cancels_work_until_the_token_is_reset() {
        let (asked, answer) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let token = CancelToken::asking({
            let (asked, answer) = (Arc::clone(&asked), Arc::clone(&answer));
            move || {
                asked.fetch_add(1, Ordering::Relaxed);
                answer.load(Ordering::Relaxed)
            }
        });
        assert!(token.check().is_ok());
        answer.store(true, Ordering::Relaxed);
        assert!(token.clone().is_cancelled() && token.is_cancelled());
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        answer.store(false, Ordering::Relaxed);
        assert!(matches!(token.check(), Err(Error::Cancelled)));
        token.reset();
        assert!(!token.is_cancelled());
    }
}
