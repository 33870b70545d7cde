//! Reads the body of a request as JSON, within limits.

use crate::error::{ApiError, Result};
use crate::fields::Extent;
use axum::body::Body;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_stream::StreamExt;

/// Deepest nesting.
const DEEPEST: usize = 64;
/// Most values, each of which takes some 72 bytes once it is read.
const MOST_VALUES: usize = 1 << 21;
/// Most objects, each of which takes some hundred bytes more.
const MOST_OBJECTS: usize = 1 << 17;
/// How long a body may take to come.
const TIME: Duration = Duration::from_secs(60);
/// Of each body, so many bytes come whatever others send.
const SMALL: usize = 1 << 20;

/// How bodies are read.
#[derive(Debug)]
pub struct Bodies {
    /// Most bytes of one.
    limit: usize,
    /// MiB that all may have that are coming, beside what is small.
    room: Semaphore,
    /// So many large ones are parsed at a time.
    parsing: Semaphore,
}

impl Bodies {
    pub fn new(limit: usize) -> Self {
        Bodies {
            limit,
            room: Semaphore::new((limit / SMALL + 1) * 4),
            parsing: Semaphore::new(2),
        }
    }

    /// The bytes of a body. What is sent slowly takes no room before it is there.
    async fn bytes<'s>(
        &'s self,
        body: Body,
        room: &mut Vec<SemaphorePermit<'s>>,
    ) -> Result<Vec<u8>> {
        let mut stream = body.into_data_stream();
        let mut bytes = Vec::new();
        while let Some(part) = stream.next().await {
            let part = part
                .map_err(|error| ApiError::invalid(format!("the body cannot be read: {error}")))?;
            if bytes.len() + part.len() > self.limit {
                return Err(self.too_large());
            }
            bytes.extend_from_slice(&part);
            while bytes.len() > SMALL * (room.len() + 1) {
                let gone = |_| ApiError::new(503, "the server is about to end");
                room.push(self.room.acquire().await.map_err(gone)?);
            }
        }
        Ok(bytes)
    }

    fn too_large(&self) -> ApiError {
        ApiError::new(413, format!("the body has more than {} bytes", self.limit))
    }

    /// The body as JSON; without one, an empty object.
    pub async fn json(&self, body: Body, length: Option<u64>) -> Result<Value> {
        if length.is_some_and(|length| length > self.limit as u64) {
            return Err(self.too_large());
        }
        let mut room = Vec::new();
        let bytes = tokio::time::timeout(TIME, self.bytes(body, &mut room))
            .await
            .map_err(|_| ApiError::new(408, "the body did not come in time"))??;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(json!({}));
        }
        let _turn = match room.is_empty() {
            true => None,
            false => self.parsing.acquire().await.ok(),
        };
        // A large one takes a while, and other connections go on.
        tokio::task::spawn_blocking(move || parse(&bytes))
            .await
            .map_err(|error| ApiError::new(500, error.to_string()))?
    }
}

fn parse(bytes: &[u8]) -> Result<Value> {
    let extent = Extent::of(bytes);
    let limits = [
        (extent.values > MOST_VALUES, MOST_VALUES, "values"),
        (extent.objects > MOST_OBJECTS, MOST_OBJECTS, "objects"),
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
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_small_things_are_refused_before_they_are_read() {
        let many =
            |part: &str, count: usize| format!("[{}{part}]", format!("{part},").repeat(count - 1));
        let status = |text: String| {
            parse(text.as_bytes())
                .map(|_| 200)
                .unwrap_or_else(|e| e.status)
        };
        assert_eq!(status(many("1", 1 << 20)), 200);
        assert_eq!(status(many("1", MOST_VALUES)), 413);
        assert_eq!(status(many("{}", MOST_OBJECTS)), 200);
        assert_eq!(status(many("{}", MOST_OBJECTS + 1)), 413);
        assert_eq!(status("[".repeat(DEEPEST + 1)), 400);
    }
}
