//! A request's view of its model.

use crate::access::Caller;
use crate::account::Account;
use crate::app::App;
use crate::error::Result;
use crate::turns::Turns;
use samite_core::CancelToken;
use std::ops::Deref;
use std::sync::Arc;

/// A model as one request sees it, with the caller and the memory that the request holds.
#[derive(Debug)]
pub struct RequestContext {
    app: Arc<App>,
    /// The caller.
    pub caller: Caller,
    /// The memory that the request holds.
    pub account: Arc<Account>,
    /// Turns of requests with large bodies, until they are submitted.
    pub large: Arc<Turns>,
    /// Cancelled when the client leaves.
    pub cancel: CancelToken,
}

impl RequestContext {
    /// Bytes that a tokenizer takes for each byte of a text while it splits it, at most.
    const BYTES_PER_BYTE: usize = 64;

    pub fn new(app: Arc<App>, caller: Caller, account: Arc<Account>, large: Arc<Turns>) -> Self {
        RequestContext {
            app,
            caller,
            account,
            large,
            cancel: CancelToken::new(),
        }
    }

    /// Cancels the request when the guard is dropped, as it is when the client leaves.
    pub fn cancelled_when_dropped(&self) -> CancelGuard<'_> {
        CancelGuard(&self.cancel)
    }

    /// Charges the memory of turning a text into tokens, and that of the tokens.
    pub fn tokenize(
        &self,
        field: &str,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>> {
        self.tokens(field, text.len(), || {
            Ok(self.tokenizer.tokenize(text, add_special, parse_special)?)
        })
    }

    /// Charges the memory of `tokenize`, which turns `length` bytes of text into tokens, and of the
    /// tokens.
    pub fn tokens(
        &self,
        field: &str,
        length: usize,
        tokenize: impl FnOnce() -> Result<Vec<u32>>,
    ) -> Result<Vec<u32>> {
        let hold = self
            .account
            .hold(field, length.saturating_mul(Self::BYTES_PER_BYTE))?;
        let tokens = tokenize()?;
        drop(hold);
        self.account.charge(field, size_of_val(tokens.as_slice()))?;
        Ok(tokens)
    }

    /// Returns the number that requests must have in common to share what is in the cache.
    pub fn salt(&self) -> u64 {
        if self.options.shares_prefixes {
            0
        } else {
            self.caller.owner
        }
    }
}

/// Cancels a request when it is dropped.
#[must_use]
pub struct CancelGuard<'c>(&'c CancelToken);

impl Drop for CancelGuard<'_> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Deref for RequestContext {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}
