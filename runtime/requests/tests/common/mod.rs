//! Requests for engines that a test drives step by step.

// Test programs use some of the helpers each.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, missing_docs)]

use samite_requests::{Engine, Event, Reader, Request, Step};
use samite_text::SamplerParams;
use std::sync::Arc;

/// Creates a request that generates `count` tokens, and that no token ends.
pub fn request(prompt: impl IntoIterator<Item = u32>, count: usize) -> Request {
    Request {
        max_tokens: Some(count),
        ignore_end: true,
        sampling: SamplerParams::greedy(),
        ..Request::new(prompt.into_iter().collect())
    }
}

pub fn submit(engine: &mut Engine, request: Request) -> Reader {
    engine.submit(request, Arc::new(|| {})).unwrap().1
}

pub fn run(engine: &mut Engine) {
    for _ in 0..1000 {
        if let Step::Idle(_) = engine.step() {
            return;
        }
    }
    panic!("it never ends");
}

pub fn events(reader: &mut Reader) -> Vec<Event> {
    std::iter::from_fn(|| reader.try_next()).collect()
}
