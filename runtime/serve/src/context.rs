//! A request's view of its model.

use crate::access::Caller;
use crate::account::RequestAccount;
use crate::app::App;
use crate::error::Result;
use crate::kv_transfer::KvTransfers;
use crate::stream_sessions::ResumableConversation;
use crate::turns::Turns;
use samite_core::CancelToken;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

/// A model as seen by one request, with its caller and memory account.
#[derive(Debug)]
pub struct RequestContext {
    app: Arc<App>,
    /// Caller of the request.
    pub caller: Caller,
    /// Memory account of the request.
    pub account: Arc<RequestAccount>,
    /// Turns of requests with large bodies, until they are submitted.
    pub large: Arc<Turns>,
    /// Cancelled when the client disconnects.
    pub cancel: CancelToken,
    /// Conversation whose streamed answer is to be resumable.
    pub conversation: Option<ResumableConversation>,
    /// Transfers of KV caches, if they are enabled.
    pub transfers: Option<Arc<KvTransfers>>,
    /// Address of this machine on which the request arrived.
    pub local_address: Option<IpAddr>,
}

impl RequestContext {
    /// Maximum bytes that a tokenizer takes per byte of a text while it splits the text.
    const BYTES_PER_BYTE: usize = 64;

    pub fn new(
        app: Arc<App>,
        caller: Caller,
        account: Arc<RequestAccount>,
        large: Arc<Turns>,
    ) -> Self {
        RequestContext {
            app,
            caller,
            account,
            large,
            cancel: CancelToken::new(),
            conversation: None,
            transfers: None,
            local_address: None,
        }
    }

    /// Returns a guard that cancels the request when it is dropped, which happens if the client
    /// disconnects.
    pub fn cancelled_when_dropped(&self) -> CancelGuard<'_> {
        CancelGuard(&self.cancel)
    }

    /// Tokenizes a text, and charges the memory of doing so and of the tokens.
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

    /// Charges the memory of `tokenize`, which tokenizes `length` bytes of text, and of the tokens.
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

    /// Returns the salt of the prefix cache. Only requests with the same salt share cached
    /// prefixes.
    pub fn salt(&self) -> u64 {
        if self.options.shares_prefixes {
            0
        } else {
            self.caller.owner
        }
    }
}

/// A guard that cancels a request when it is dropped.
#[must_use]
pub struct CancelGuard<'c>(&'c CancelToken);

impl CancelGuard<'_> {
    /// Drops the guard without cancelling.
    pub fn disarm(self) {
        std::mem::forget(self);
    }
}

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
