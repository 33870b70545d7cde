//! Runs a job and sends its answer, whole or as a stream.

use crate::answer::{Choice, Update};
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::job::Job;
use crate::kv_transfer;
use crate::stream_sessions::StreamSession;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use samite_core::CancelToken;
use samite_requests::{Event, Reader};
use serde_json::Value;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// The response format of an API.
pub trait ResponseEncoder: Send + 'static {
    /// Writes the frames for an update.
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames);

    /// Writes the frames for the end of all choices.
    fn end(&mut self, choices: &[Choice], out: &mut Frames);

    /// Writes the frames for an error in the middle of a stream.
    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.object());
    }

    /// Returns the whole answer.
    fn whole(&mut self, choices: &[Choice]) -> Value;

    /// Returns whether the stream consists of lines of JSON instead of events.
    fn is_lines(&self) -> bool {
        false
    }
}

/// Frames to send next.
#[derive(Debug, Default)]
pub struct Frames(String);

impl Frames {
    /// Writes an event with JSON.
    pub fn data(&mut self, value: &Value) {
        self.0.push_str(&format!("data: {value}\n\n"));
    }

    /// Writes an event with a name.
    pub fn event(&mut self, name: &str, value: &Value) {
        self.0
            .push_str(&format!("event: {name}\ndata: {value}\n\n"));
    }

    /// Writes a line of JSON.
    pub fn line(&mut self, value: &Value) {
        self.0.push_str(&format!("{value}\n"));
    }

    /// Writes the end marker of OpenAI's streams.
    pub fn done(&mut self) {
        self.0.push_str("data: [DONE]\n\n");
    }

    fn take(&mut self) -> Option<Bytes> {
        let text = std::mem::take(&mut self.0);
        (!text.is_empty()).then(|| Bytes::from(text))
    }
}

/// The running answers of a job.
pub struct Running {
    readers: Vec<Option<Reader>>,
    pub choices: Vec<Choice>,
    next: usize,
    /// Stop the encoding of images.
    encodings: Vec<CancelToken>,
}

impl Running {
    /// Submits all requests of a job. If one is rejected, none runs.
    pub fn submit(context: &RequestContext, job: &mut Job) -> Result<Self> {
        let handle = context.handle()?;
        let mut running = Running {
            readers: Vec::with_capacity(job.requests.len()),
            choices: Vec::with_capacity(job.requests.len()),
            next: 0,
            encodings: job.encodings.clone(),
        };
        for (index, request) in std::mem::take(&mut job.requests).into_iter().enumerate() {
            let choice = Choice::new(index, request.prompt.clone(), job, context);
            running.readers.push(Some(handle.submit(request)?));
            running.choices.push(choice);
        }
        Ok(running)
    }

    /// Returns the next event of any choice, or `None` when all are complete. Cancel-safe.
    async fn next(&mut self) -> Option<(usize, Event)> {
        let Running {
            readers,
            choices,
            next,
            ..
        } = self;
        let event = poll_fn(|task| {
            let count = readers.len();
            let mut is_over = true;
            for step in 0..count {
                let at = (*next + step) % count;
                let Some(reader) = &mut readers[at] else {
                    continue;
                };
                match reader.poll_next(task) {
                    Poll::Ready(Some(event)) => {
                        *next = at + 1;
                        return Poll::Ready(Some((at, Some(event))));
                    }
                    Poll::Ready(None) => {
                        readers[at] = None;
                        if !choices[at].is_over() {
                            return Poll::Ready(Some((at, None)));
                        }
                    }
                    Poll::Pending => is_over = false,
                }
            }
            if is_over {
                Poll::Ready(None)
            } else {
                Poll::Pending
            }
        })
        .await?;
        Some(match event {
            (at, Some(event)) => (at, event),
            (at, None) => (at, gone()),
        })
    }

    /// Waits for all answers.
    ///
    /// # Errors
    /// Returns the error of the first one that failed.
    pub async fn all(mut self) -> Result<Vec<Choice>> {
        while let Some((at, event)) = self.next().await {
            self.choices[at].take(event);
            if let Some(error) = self.choices[at].error.clone() {
                return Err(error);
            }
        }
        Ok(std::mem::take(&mut self.choices))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let choices = self.choices.iter().filter(|choice| !choice.is_over());
        choices.for_each(Choice::log_cancelled);
        // A request can end, by its deadline for example, before its images are encoded.
        self.encodings.iter().for_each(CancelToken::cancel);
    }
}

/// Returns the event for an engine that has ended.
fn gone() -> Event {
    Event::Failed(samite_requests::Failed {
        kind: samite_requests::FailureKind::Closing,
        message: "the engine has ended".to_owned(),
        counts: samite_requests::Counts::default(),
    })
}

/// Runs a job and responds in the format of its API.
pub async fn answer(
    context: Arc<RequestContext>,
    mut job: Job,
    mut encoder: impl ResponseEncoder,
) -> Result<Response> {
    let is_stream = job.is_stream;
    if let Some(role) = &job.transfer {
        kv_transfer::fetch(&context, &job, role).await;
    }
    let prompt = kv_transfer::OfferedPrompt::from_job(&job);
    let submitting = Arc::clone(&context);
    let (running, job) = tokio::task::spawn_blocking(move || {
        let running = Running::submit(&submitting, &mut job)?;
        Ok::<_, ApiError>((running, job))
    })
    .await
    .map_err(|error| ApiError::new(500, error.to_string()))??;
    if !is_stream {
        let choices = running.all().await?;
        let mut whole = encoder.whole(&choices);
        if let (Some(prompt), Value::Object(members)) = (prompt, &mut whole) {
            let params = kv_transfer::offer(&context, prompt).await;
            members.insert("kv_transfer_params".to_owned(), params.into());
        }
        return Ok(json_response(200, &whole));
    }
    let conversation = context.conversation.as_ref();
    let session = conversation.and_then(|conversation| {
        let sessions = &conversation.sessions;
        sessions.create(context.caller.owner, &conversation.id)
    });
    streamed(context, running, job.ping_seconds, encoder, session).await
}

/// Where a stream goes.
enum StreamSink {
    Client(mpsc::Sender<Bytes>),
    /// Clients read from the session.
    Session(Arc<StreamSession>),
}

impl StreamSink {
    /// Sends a part. Returns whether the next one may be read.
    async fn send(&self, bytes: Bytes) -> bool {
        match self {
            StreamSink::Client(sender) => sender.send(bytes).await.is_ok(),
            StreamSink::Session(session) => {
                session.append(&bytes);
                true
            }
        }
    }

    /// Waits until the client disconnects, or until the session is cancelled.
    async fn abandoned(&self) {
        match self {
            StreamSink::Client(sender) => sender.closed().await,
            StreamSink::Session(session) => session.cancelled().await,
        }
    }
}

impl Drop for StreamSink {
    fn drop(&mut self) {
        if let StreamSink::Session(session) = self {
            session.end();
        }
    }
}

/// Sends the answer of a session from an offset on.
pub fn resumed(session: Arc<StreamSession>, offset: usize) -> Response {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move { session.follow(offset, sender).await });
    event_stream(receiver, false)
}

/// Sends events about models until the client disconnects or the server ends.
pub fn model_events(mut events: broadcast::Receiver<Arc<str>>, ping_seconds: u64) -> Response {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let ping = Duration::from_secs(ping_seconds.max(1));
        loop {
            let text = tokio::select! {
                event = events.recv() => match event {
                    Ok(event) => format!("data: {event}\n\n"),
                    Err(broadcast::error::RecvError::Lagged(_)) => continue,
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                () = sender.closed() => return,
                () = tokio::time::sleep(ping), if ping_seconds > 0 => ": ping\n\n".to_owned(),
            };
            if sender.send(text.into()).await.is_err() {
                return;
            }
        }
    });
    event_stream(receiver, false)
}

/// Sends lines of JSON.
pub fn json_lines(receiver: mpsc::Receiver<Bytes>) -> Response {
    event_stream(receiver, true)
}

/// Reports once whether a stream has begun.
struct StreamStart(Option<oneshot::Sender<Result<()>>>);

impl StreamStart {
    /// Reports the result. Returns false if it was reported before.
    fn report(&mut self, result: Result<()>) -> bool {
        let sender = self.0.take();
        // The receiver is gone if the client has disconnected.
        sender.map(|sender| sender.send(result)).is_some()
    }
}

/// Streams an answer. Its headers wait for the first token or ping: until then, an error has a
/// status, and a router can send the request to another server. A resumable stream sends its
/// headers at once.
async fn streamed(
    context: Arc<RequestContext>,
    mut running: Running,
    ping_seconds: u64,
    mut encoder: impl ResponseEncoder,
    session: Option<Arc<StreamSession>>,
) -> Result<Response> {
    let is_lines = encoder.is_lines();
    let (sender, receiver) = mpsc::channel::<Bytes>(16);
    let (begin, begun) = oneshot::channel();
    let mut start = StreamStart(Some(begin));
    let sink = match session {
        Some(session) => {
            start.report(Ok(()));
            let followed = Arc::clone(&session);
            tokio::spawn(async move { followed.follow(0, sender).await });
            StreamSink::Session(session)
        }
        None => StreamSink::Client(sender),
    };
    tokio::spawn(async move {
        // Keep the model loaded and the request's memory charged while the answer runs.
        let _context = context;
        let mut out = Frames::default();
        let ping = Duration::from_secs(if ping_seconds == 0 {
            3600
        } else {
            ping_seconds
        });
        loop {
            let event = tokio::select! {
                event = running.next() => event,
                // Cancels the requests.
                () = sink.abandoned() => return,
                () = tokio::time::sleep(ping), if ping_seconds > 0 && !is_lines => {
                    start.report(Ok(()));
                    if !sink.send(Bytes::from_static(b": ping\n\n")).await {
                        return;
                    }
                    continue;
                }
            };
            let Some((at, event)) = event else { break };
            let is_start = matches!(event, Event::Started(_));
            let updates = running.choices[at].take(event);
            for update in &updates {
                if let Update::Failed(error) = update {
                    if start.report(Err(error.clone())) {
                        return;
                    }
                    encoder.error(error, &mut out);
                    if let Some(bytes) = out.take() {
                        sink.send(bytes).await;
                    }
                    return;
                }
                encoder.update(&running.choices[at], update, &mut out);
            }
            // What announces an answer is sent with its first token.
            if is_start && start.0.is_some() {
                continue;
            }
            if let Some(bytes) = out.take() {
                start.report(Ok(()));
                if !sink.send(bytes).await {
                    return;
                }
            }
        }
        start.report(Ok(()));
        encoder.end(&running.choices, &mut out);
        if let Some(bytes) = out.take() {
            sink.send(bytes).await;
        }
    });
    // The task has panicked if it did not report.
    let gone = |_| ApiError::new(500, "the stream has ended");
    begun.await.map_err(gone)??;
    Ok(event_stream(receiver, is_lines))
}

/// Returns a response whose body arrives in parts: events, or lines of JSON.
fn event_stream(receiver: mpsc::Receiver<Bytes>, is_lines: bool) -> Response {
    let stream = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    let mut response = Body::from_stream(stream).into_response();
    let kind = if is_lines {
        "application/x-ndjson"
    } else {
        "text/event-stream"
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Without this header, a proxy may buffer the stream.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Returns a JSON response.
pub fn json_response(status: u16, value: &Value) -> Response {
    json_text(status, value.to_string().into())
}

/// Returns a response with this JSON.
pub fn json_text(status: u16, text: Bytes) -> Response {
    let mut response = Body::from(text).into_response();
    *response.status_mut() = axum::http::StatusCode::from_u16(status).unwrap_or_default();
    let kind = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_ended_answers_are_not_encoded() {
        let encoding = CancelToken::new();
        let running = Running {
            readers: Vec::new(),
            choices: Vec::new(),
            next: 0,
            encodings: vec![encoding.clone()],
        };
        assert!(!encoding.is_cancelled());
        drop(running);
        assert!(encoding.is_cancelled());
    }
}
