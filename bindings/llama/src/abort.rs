//! Stopping: the caller is asked while something is computed.

use crate::layout::AbortCallback;
use samite_core::CancelToken;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock};

/// Who is asked.
pub struct Abort {
    asked: Arc<RwLock<(AbortCallback, usize)>>,
    token: CancelToken,
}

impl Abort {
    /// Asks `callback`, if there is one.
    pub fn new(callback: AbortCallback, data: *mut c_void) -> Self {
        let asked = Arc::new(RwLock::new((callback, data.expose_provenance())));
        let ask = Arc::clone(&asked);
        let token = CancelToken::asking(move || {
            let (callback, data) = *ask.read().unwrap_or_else(PoisonError::into_inner);
            let data = std::ptr::with_exposed_provenance_mut(data);
            // SAFETY: who sets a function promises that it can be called with its data while something is computed.
            callback.is_some_and(|callback| unsafe { callback(data) })
        });
        Abort { asked, token }
    }

    /// What stops the engine.
    pub fn token(&self) -> CancelToken {
        self.token.clone()
    }

    /// Asks somebody else.
    pub fn set(&self, callback: AbortCallback, data: *mut c_void) {
        let asked = (callback, data.expose_provenance());
        *self.asked.write().unwrap_or_else(PoisonError::into_inner) = asked;
    }

    /// What was stopped can begin again.
    pub fn begin(&self) {
        self.token.reset();
    }
}
