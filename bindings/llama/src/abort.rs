//! Abort callbacks, called during computation.

use crate::layout::AbortCallback;
use samite_core::CancelToken;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock};

/// A caller's abort callback.
pub struct Abort {
    asked: Arc<RwLock<(AbortCallback, usize)>>,
    token: CancelToken,
}

impl Abort {
    /// Uses `callback`, if there is one.
    pub fn new(callback: AbortCallback, data: *mut c_void) -> Self {
        let asked = Arc::new(RwLock::new((callback, data.expose_provenance())));
        let ask = Arc::clone(&asked);
        let token = CancelToken::asking(move || {
            let (callback, data) = *ask.read().unwrap_or_else(PoisonError::into_inner);
            let data = std::ptr::with_exposed_provenance_mut(data);
            // SAFETY: the caller that sets a callback guarantees that it can be called with its
            // data during computation.
            callback.is_some_and(|callback| unsafe { callback(data) })
        });
        Abort { asked, token }
    }

    /// Returns the token that stops the engine.
    pub fn token(&self) -> CancelToken {
        self.token.clone()
    }

    /// Replaces the callback.
    pub fn set(&self, callback: AbortCallback, data: *mut c_void) {
        let asked = (callback, data.expose_provenance());
        *self.asked.write().unwrap_or_else(PoisonError::into_inner) = asked;
    }

    /// Clears an earlier abort, so that computation can start again.
    pub fn begin(&self) {
        self.token.reset();
    }
}
