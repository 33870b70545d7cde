//! Reads the body of a request as JSON, within limits.

use crate::account::{Accounts, RequestAccount};
use crate::connections::{Connection, Receiving, Room};
use crate::error::{ApiError, Result};
use crate::fields::Extent;
use crate::turns::Turns;
use axum::body::Body;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::StreamExt;

/// Maximum nesting depth.
const DEEPEST: usize = 64;
/// Maximum number of values.
const MAX_VALUES: usize = 1 << 21;
/// Maximum number of objects.
const MAX_OBJECTS: usize = 1 << 17;
/// Bytes of memory that a parsed value takes, and an object besides its values.
const VALUE: usize = 72;
const OBJECT: usize = 100;
/// Copies of a body in memory: its bytes, its JSON, and messages for a template.
const COPIES: usize = 3;
/// Time limit for receiving a body.
const TIME: Duration = Duration::from_secs(60);
/// Longest time that a body waits for another to make room.
const ROOM_TIME: Duration = Duration::from_secs(1);
/// Time without progress after which a body makes room for another. Busy clients pause for less.
const LATE: Duration = Duration::from_millis(400);
/// Body size above which requests take turns.
pub const LARGE: usize = 1 << 20;

/// Reads bodies.
#[derive(Debug)]
pub struct Bodies {
    /// Maximum bytes of a body.
    limit: usize,
    /// Bytes of incomplete bodies. Requests with complete bodies use other accounts, so bodies that
    /// never end block no request.
    coming: Arc<Accounts>,
    /// Held while a body waits for another to make room.
    making_room: tokio::sync::Mutex<()>,
    /// Turns of large bodies.
    large: Arc<Turns>,
}

impl Bodies {
    /// Creates a reader for bodies of at most `limit` bytes, which together hold at most `memory`.
    /// Large ones take turns.
    pub fn new(limit: usize, memory: usize, large: Arc<Turns>) -> Self {
        Bodies {
            limit,
            coming: Arc::new(Accounts::new(memory)),
            making_room: tokio::sync::Mutex::default(),
            large,
        }
    }

    /// Reads the bytes of a body. If there is no room for them, the body that made no progress for
    /// the longest time is dropped.
    async fn bytes(
        &self,
        body: Body,
        length: Option<u64>,
        account: &RequestAccount,
        peer: &Connection,
    ) -> Result<Vec<u8>> {
        let receiving = Receiving::new(peer);
        // All of a known length at once: bodies that wait for memory with a part of theirs would
        // wait for each other.
        let mut charged = length.map_or(0, |length| length as usize);
        match self.charge(charged, account, &receiving).await {
            // Most of it is read first: a client that still sends does not read the answer.
            Err(error) if error.status == 413 => charged = 0,
            reserved => reserved?,
        }
        let mut stream = body.into_data_stream();
        let mut bytes = Vec::new();
        while let Some(part) = stream.next().await {
            let part = part
                .map_err(|error| ApiError::invalid(format!("the body cannot be read: {error}")))?;
            receiving.has_come();
            let sum = bytes.len() + part.len();
            if sum > self.limit {
                return Err(self.too_large());
            }
            let more = sum.saturating_sub(charged);
            self.charge(more, account, &receiving).await?;
            charged += more;
            bytes.extend_from_slice(&part);
        }
        Ok(bytes)
    }

    /// Charges `bytes`. If there is no room, drops other bodies first.
    async fn charge(
        &self,
        bytes: usize,
        account: &RequestAccount,
        receiving: &Receiving<'_>,
    ) -> Result<()> {
        match account.charge("body", bytes) {
            // Bodies of other owners do not hold what the owner's share lacks.
            Err(error) if error.status == 503 && !account.is_share_full(bytes) => {}
            charged => return charged,
        }
        receiving.pause();
        let charged = self.make_room(bytes, account, receiving).await;
        receiving.has_come();
        charged
    }

    /// Drops bodies that are late until `bytes` can be charged.
    async fn make_room(
        &self,
        bytes: usize,
        account: &RequestAccount,
        receiving: &Receiving<'_>,
    ) -> Result<()> {
        // One after the other: together they would drop more than they need.
        let _turn = self.making_room.lock().await;
        loop {
            let released = account.released();
            match account.charge("body", bytes) {
                Err(error) if error.status == 503 => {
                    let time = match receiving.make_room(LATE) {
                        Room::Made => ROOM_TIME,
                        Room::Later => LATE / 4,
                        Room::None => return Err(error),
                    };
                    let _ = tokio::time::timeout(time, released).await;
                }
                charged => return charged,
            }
        }
    }

    fn too_large(&self) -> ApiError {
        ApiError::new(413, format!("the body has more than {} bytes", self.limit))
    }

    /// Reads the body of a request as JSON and charges its account. Returns an empty object if
    /// there is no body.
    pub async fn json(
        &self,
        body: Body,
        length: Option<u64>,
        account: &Arc<RequestAccount>,
        peer: &Connection,
    ) -> Result<Value> {
        if length.is_some_and(|length| length > self.limit as u64) {
            return Err(self.too_large());
        }
        let coming = RequestAccount::new(&self.coming, account.owner());
        let bytes = tokio::time::timeout(TIME, self.bytes(body, length, &coming, peer))
            .await
            .map_err(|_| ApiError::new(408, "the body did not come in time"))??;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(json!({}));
        }
        let turn = if bytes.len() > LARGE {
            Some(self.large.begin(account.owner()).await?)
        } else {
            None
        };
        let account = Arc::clone(account);
        // Parsing a large body takes a while and must not block other connections.
        tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let _coming = coming;
            parse(&bytes, &account)
        })
        .await
        .map_err(|error| {
            // Blocking work that has not begun is cancelled at shutdown.
            if error.is_cancelled() {
                ApiError::ending()
            } else {
                ApiError::new(500, error.to_string())
            }
        })?
    }
}

/// Parses a body, checks its limits besides the length, and charges its memory.
pub fn parse(bytes: &[u8], account: &RequestAccount) -> Result<Value> {
    let extent = Extent::measure(bytes);
    let limits = [
        (extent.values > MAX_VALUES, MAX_VALUES, "values"),
        (extent.objects > MAX_OBJECTS, MAX_OBJECTS, "objects"),
    ];
    if extent.depth > DEEPEST {
        let message = format!("the body is nested more than {DEEPEST} deep");
        return Err(ApiError::invalid(message));
    }
    for (is_over, most, what) in limits {
        if is_over {
            let message = format!("the body has more than {most} {what}");
            return Err(ApiError::new(413, message));
        }
    }
    let size = bytes.len() * COPIES + extent.values * VALUE + extent.objects * OBJECT;
    account.charge("body", size)?;
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_with_too_many_values_are_refused_before_parsing() {
        let many =
            |part: &str, count: usize| format!("[{}{part}]", format!("{part},").repeat(count - 1));
        let account = RequestAccount::new(&Arc::new(Accounts::new(1 << 30)), 0);
        let status = |text: String| {
            parse(text.as_bytes(), &account)
                .map(|_| 200)
                .unwrap_or_else(|e| e.status)
        };
        assert_eq!(status(many("1", 1 << 20)), 200);
        assert_eq!(status(many("1", MAX_VALUES)), 413);
        assert_eq!(status(many("{}", MAX_OBJECTS)), 200);
        assert_eq!(status(many("{}", MAX_OBJECTS + 1)), 413);
        assert_eq!(status("[".repeat(DEEPEST + 1)), 400);
    }
}
