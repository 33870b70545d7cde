//! Streams that a client resumes after its connection was lost, as with llama-server.
//!
//! A request names its conversation (`X-Conversation-Id`). Its answer then continues without the
//! client: `GET /v1/stream` replays it from an offset in bytes, and `DELETE` stops it.

use crate::app::lock;
use crate::ids;
use axum::body::Bytes;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Owner and conversation of a stream.
type StreamKey = (u64, String);

/// The sessions of a server, by owner and conversation.
#[derive(Debug, Default)]
pub struct StreamSessions {
    sessions: Mutex<BTreeMap<StreamKey, Arc<StreamSession>>>,
    /// Streams that wait for their model, and how many requests of each do.
    parked: Mutex<BTreeMap<StreamKey, ParkedRequests>>,
}

/// Requests of a stream that wait for its model.
#[derive(Clone, Debug, Default)]
struct ParkedRequests {
    count: usize,
    /// True once the stream is stopped.
    stop: Arc<watch::Sender<bool>>,
}

/// A stream that waits for its model, until it is dropped.
#[derive(Debug)]
pub struct ParkedStream<'s> {
    sessions: &'s StreamSessions,
    key: StreamKey,
    stop: Arc<watch::Sender<bool>>,
}

impl ParkedStream<'_> {
    /// Waits until the stream is stopped.
    pub async fn stopped(&self) {
        // The sender is part of this stream, so it is not dropped.
        let _ = self.stop.subscribe().wait_for(|stopped| *stopped).await;
    }
}

impl Drop for ParkedStream<'_> {
    fn drop(&mut self) {
        let mut parked = lock(&self.sessions.parked);
        let requests = parked.get_mut(&self.key);
        // After a stop, others may wait under this key.
        if let Some(requests) = requests.filter(|known| Arc::ptr_eq(&known.stop, &self.stop)) {
            requests.count -= 1;
            if requests.count == 0 {
                parked.remove(&self.key);
            }
        }
    }
}

/// An answer that clients can read from any offset.
#[derive(Debug)]
pub struct StreamSession {
    ring: Mutex<Ring>,
    progress: watch::Sender<StreamProgress>,
    /// Seconds since 1970.
    started: u64,
}

/// Last bytes of an answer.
#[derive(Debug, Default)]
struct Ring {
    bytes: VecDeque<u8>,
    /// Number of bytes before them.
    dropped: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct StreamProgress {
    /// Number of bytes so far.
    total: usize,
    /// Time of the end: of this process, and in seconds since 1970.
    ended: Option<(Instant, u64)>,
    is_cancelled: bool,
}

/// A conversation whose answer is to be resumable.
#[derive(Debug)]
pub struct ResumableConversation {
    pub sessions: Arc<StreamSessions>,
    pub id: String,
}

impl StreamSessions {
    /// Maximum number of sessions of a server.
    const MAX_SESSIONS: usize = 32;

    /// Time for which an ended answer can be read.
    const RETENTION: Duration = Duration::from_secs(300);

    /// Adds a stream that waits for its model.
    pub fn park(&self, owner: u64, id: &str) -> ParkedStream<'_> {
        let key = (owner, id.to_owned());
        let mut parked = lock(&self.parked);
        let requests = parked.entry(key.clone()).or_default();
        requests.count += 1;
        ParkedStream {
            sessions: self,
            key,
            stop: Arc::clone(&requests.stop),
        }
    }

    /// Returns whether a stream waits for its model.
    pub fn is_parked(&self, owner: u64, id: &str) -> bool {
        lock(&self.parked).contains_key(&(owner, id.to_owned()))
    }

    /// Creates a session, and cancels an earlier one of the conversation. Returns `None` if too
    /// many other answers are running.
    pub fn create(&self, owner: u64, id: &str) -> Option<Arc<StreamSession>> {
        let mut sessions = lock(&self.sessions);
        let key = (owner, id.to_owned());
        if let Some(earlier) = sessions.remove(&key) {
            earlier.cancel();
        }
        Self::expire(&mut sessions);
        if sessions.len() >= Self::MAX_SESSIONS {
            let ended = sessions
                .iter()
                .filter_map(|(key, one)| Some((one.progress().ended?, key)));
            let oldest = ended
                .min_by_key(|((time, _), _)| *time)
                .map(|(_, key)| key.clone());
            sessions.remove(&oldest?);
        }
        let session = Arc::new(StreamSession {
            ring: Mutex::default(),
            progress: watch::Sender::default(),
            started: ids::seconds(),
        });
        sessions.insert(key, Arc::clone(&session));
        Some(session)
    }

    fn expire(sessions: &mut BTreeMap<StreamKey, Arc<StreamSession>>) {
        sessions.retain(|_, one| {
            let ended = one.progress().ended;
            ended.is_none_or(|(time, _)| time.elapsed() < Self::RETENTION)
        });
    }

    pub fn find(&self, owner: u64, id: &str) -> Option<Arc<StreamSession>> {
        let mut sessions = lock(&self.sessions);
        Self::expire(&mut sessions);
        sessions.get(&(owner, id.to_owned())).cloned()
    }

    /// Stops the answer of a conversation, and forgets it.
    pub fn cancel(&self, owner: u64, id: &str) {
        let key = (owner, id.to_owned());
        if let Some(requests) = lock(&self.parked).remove(&key) {
            requests.stop.send_replace(true);
        }
        if let Some(session) = lock(&self.sessions).remove(&key) {
            session.cancel();
        }
    }

    /// Returns the sessions of these conversations, in llama-server's format. An identifier also
    /// names those that continue with `::` and a model.
    pub fn lookup(&self, owner: u64, ids: &[String]) -> Value {
        let mut sessions = lock(&self.sessions);
        Self::expire(&mut sessions);
        let own = sessions.iter().filter(|((other, _), _)| *other == owner);
        let named = own.filter(|((_, id), _)| {
            let is_it = |wanted: &String| {
                let rest = id.strip_prefix(wanted.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            ids.iter().any(is_it)
        });
        let sessions = named.map(|((_, id), session)| {
            let progress = session.progress();
            json!({
                "conversation_id": id,
                "is_done": progress.ended.is_some(),
                "total_bytes": progress.total,
                "started_at": session.started,
                "completed_at": progress.ended.map_or(0, |(_, seconds)| seconds),
            })
        });
        sessions.collect()
    }
}

impl StreamSession {
    /// Maximum number of bytes that can be replayed; the first ones are dropped.
    const MAX_BYTES: usize = 4 << 20;

    fn progress(&self) -> StreamProgress {
        *self.progress.borrow()
    }

    /// Adds bytes to the answer.
    pub fn append(&self, bytes: &[u8]) {
        let mut ring = lock(&self.ring);
        ring.bytes.extend(bytes);
        let surplus = ring.bytes.len().saturating_sub(Self::MAX_BYTES);
        ring.bytes.drain(..surplus);
        ring.dropped += surplus;
        drop(ring);
        self.progress
            .send_modify(|progress| progress.total += bytes.len());
    }

    /// Ends the answer.
    pub fn end(&self) {
        self.progress.send_modify(|progress| {
            progress.ended = Some((Instant::now(), ids::seconds()));
        });
    }

    fn cancel(&self) {
        self.progress
            .send_modify(|progress| progress.is_cancelled = true);
    }

    /// Waits until the answer is cancelled.
    pub async fn cancelled(&self) {
        let mut progress = self.progress.subscribe();
        // The sender is part of this session, so it is not dropped.
        let _ = progress.wait_for(|progress| progress.is_cancelled).await;
    }

    /// Returns whether the answer can be read from this offset.
    pub fn has(&self, offset: usize) -> bool {
        offset >= lock(&self.ring).dropped
    }

    /// Returns the bytes from `offset` on, or `None` if some of them were dropped.
    fn read(&self, offset: usize) -> Option<Bytes> {
        let ring = lock(&self.ring);
        let first = offset.checked_sub(ring.dropped)?;
        let bytes = ring.bytes.range(first.min(ring.bytes.len())..);
        Some(bytes.copied().collect())
    }

    /// Sends the answer from `offset` on until it ends, or until the receiver is dropped.
    pub async fn follow(&self, mut offset: usize, sender: mpsc::Sender<Bytes>) {
        let mut changes = self.progress.subscribe();
        loop {
            let progress = *changes.borrow_and_update();
            let Some(bytes) = self.read(offset) else {
                return;
            };
            if !bytes.is_empty() {
                offset += bytes.len();
                if sender.send(bytes).await.is_err() {
                    return;
                }
            } else if progress.ended.is_some() || progress.is_cancelled {
                return;
            } else {
                tokio::select! {
                    changed = changes.changed() => {
                        if changed.is_err() {
                            return;
                        }
                    }
                    () = sender.closed() => return,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_bytes_and_sessions_make_room() {
        let sessions = StreamSessions::default();
        let session = sessions.create(1, "a").unwrap();
        let block = vec![7; 1 << 20];
        (0..5).for_each(|_| session.append(&block));
        assert!(!session.has((1 << 20) - 1) && session.has(1 << 20));
        assert_eq!(session.read(0), None);
        assert_eq!(
            session.read(1 << 20).unwrap().len(),
            StreamSession::MAX_BYTES
        );
        assert_eq!(session.read(usize::MAX).unwrap().len(), 0);
        assert_eq!(session.progress().total, 5 << 20);

        // Another owner sees none of it.
        assert!(sessions.find(2, "a").is_none());
        assert_eq!(sessions.lookup(2, &["a".to_owned()]), json!([]));
        // The answer of an earlier request is cancelled.
        let next = sessions.create(1, "a").unwrap();
        assert!(session.progress().is_cancelled && !next.progress().is_cancelled);
        for number in 1..StreamSessions::MAX_SESSIONS {
            sessions.create(1, &number.to_string()).unwrap();
        }
        // Running ones stay; the oldest ended one goes.
        assert!(sessions.create(1, "more").is_none());
        next.end();
        sessions.find(1, "5").unwrap().end();
        assert!(sessions.create(1, "more").is_some());
        assert!(sessions.find(1, "a").is_none() && sessions.find(1, "5").is_some());
        sessions.cancel(1, "5");
        assert!(sessions.find(1, "5").is_none());
        sessions.create(1, "more::model").unwrap();
        let found = sessions.lookup(1, &["more".to_owned(), "mor".to_owned()]);
        assert_eq!(found.as_array().unwrap().len(), 2, "{found}");
        assert_eq!(found[0]["is_done"], false);
    }
}
