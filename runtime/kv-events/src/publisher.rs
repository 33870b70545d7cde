//! The sockets, and the thread that has them.

use crate::message::batch;
use samite_requests::{BlockEvent, BlockObserver};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use zeromq::{
    PubSocket, RouterRecvHalf, RouterSendHalf, RouterSocket, Socket, SocketRecv, SocketSend,
    ZmqError, ZmqMessage,
};

/// Where events are told, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherOptions {
    /// Where subscribers connect, such as `tcp://127.0.0.1:5557`. `*` is every address of this machine, and port 0 one that is free.
    pub endpoint: String,
    /// Where messages that were missed are asked for; `None` for nowhere.
    pub replay: Option<String>,
    /// The first part of each message. llm-d expects `kv@POD@MODEL`.
    pub topic: String,
    /// Tokens of a block.
    pub block_size: usize,
    /// Messages that are kept for those who missed them.
    pub kept: usize,
}

/// Why nothing can be told.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// An address cannot be listened at.
    #[error("{endpoint}: {error}; an endpoint looks like tcp://127.0.0.1:5557")]
    Endpoint {
        /// The address.
        endpoint: String,
        /// What is wrong with it.
        error: ZmqError,
    },
    /// The system gives no thread.
    #[error("no thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Messages that were sent last, with their numbers.
struct History {
    messages: VecDeque<(i64, Vec<u8>)>,
    kept: usize,
}

impl History {
    fn push(&mut self, number: i64, message: Vec<u8>) {
        if self.messages.len() >= self.kept {
            self.messages.pop_front();
        }
        if self.kept > 0 {
            self.messages.push_back((number, message));
        }
    }

    /// Those that are kept, from this number on.
    fn since(&self, first: i64) -> Vec<(i64, Vec<u8>)> {
        let messages = self.messages.iter();
        let asked = messages.filter(|(number, _)| *number >= first);
        asked.cloned().collect()
    }
}

/// Tells what changes in a cache. When it and its observers are dropped, what was told until then is sent, and the sockets are closed.
#[derive(Debug)]
pub struct Publisher {
    /// Gone once it is being dropped.
    events: Option<UnboundedSender<Vec<BlockEvent>>>,
    thread: Option<JoinHandle<()>>,
    endpoint: String,
    replay: Option<String>,
    block_size: usize,
}

impl Publisher {
    /// Opens the sockets.
    ///
    /// # Errors
    /// If an address cannot be listened at.
    pub fn start(options: PublisherOptions) -> Result<Self, PublishError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (publisher, endpoint) = runtime.block_on(bind::<PubSocket>(&options.endpoint))?;
        let replayer = match &options.replay {
            None => None,
            Some(replay) => Some(runtime.block_on(bind::<RouterSocket>(replay))?),
        };
        let (replayer, replay) = replayer.unzip();
        let (events, receiver) = unbounded_channel();
        let block_size = options.block_size.max(1);
        let thread = std::thread::Builder::new()
            .name("kv-events".to_owned())
            .spawn(move || {
                runtime.block_on(publish(publisher, replayer, receiver, &options));
                // A router that is slow to read does not hold up the end of the program for longer.
                runtime.shutdown_timeout(Duration::from_millis(200));
            })?;
        Ok(Publisher {
            events: Some(events),
            thread: Some(thread),
            endpoint,
            replay,
            block_size,
        })
    }

    /// Where subscribers connect.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where messages that were missed are asked for.
    pub fn replay(&self) -> Option<&str> {
        self.replay.as_deref()
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// What tells events. It keeps the publisher.
    pub fn observer(self: &Arc<Self>) -> BlockObserver {
        let publisher = Arc::clone(self);
        Box::new(move |events| {
            if let Some(sender) = &publisher.events {
                // It fails only if the thread has panicked.
                let _ = sender.send(events);
            }
        })
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.events = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens a socket, and says where it listens.
async fn bind<S: Socket>(endpoint: &str) -> Result<(S, String), PublishError> {
    let mut socket = S::new();
    let address = endpoint.replace("://*:", "://0.0.0.0:");
    let bound = socket.bind(&address).await;
    let bound = bound.map_err(|error| PublishError::Endpoint {
        endpoint: endpoint.to_owned(),
        error,
    })?;
    Ok((socket, bound.to_string()))
}

async fn publish(
    mut publisher: PubSocket,
    replayer: Option<RouterSocket>,
    mut events: UnboundedReceiver<Vec<BlockEvent>>,
    options: &PublisherOptions,
) {
    let history = Arc::new(Mutex::new(History {
        messages: VecDeque::new(),
        kept: options.kept,
    }));
    if let Some(replayer) = replayer {
        tokio::spawn(replay(replayer, Arc::clone(&history)));
    }
    let mut number = 0i64;
    while let Some(events) = events.recv().await {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let time = time.map_or(0.0, |time| time.as_secs_f64());
        let message = match batch(time, options.block_size.max(1), &events) {
            Ok(message) => message,
            Err(error) => {
                tracing::error!(%error, "events of the cache cannot be written");
                continue;
            }
        };
        let parts = [
            options.topic.clone().into_bytes(),
            number.to_be_bytes().to_vec(),
            message.clone(),
        ];
        lock(&history).push(number, message);
        number += 1;
        if let Err(error) = publisher.send(parts_of(parts)).await {
            tracing::warn!(%error, "events of the cache cannot be told");
        }
    }
    // What was sent last is on its way to subscribers.
    tokio::time::sleep(LAST_WORDS).await;
}

/// How long the last messages may take to leave.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How long one who asks may take to read a message.
const PATIENCE: Duration = Duration::from_secs(5);

fn lock(history: &Mutex<History>) -> std::sync::MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

fn parts_of(parts: impl IntoIterator<Item = Vec<u8>>) -> ZmqMessage {
    let mut parts = parts.into_iter();
    let mut message = ZmqMessage::from(parts.next().unwrap_or_default());
    parts.for_each(|part| message.push_back(part.into()));
    message
}

/// Answers those who missed messages, one after the other.
async fn replay(socket: RouterSocket, history: Arc<Mutex<History>>) {
    let (mut answers, mut questions): (RouterSendHalf, RouterRecvHalf) = socket.split();
    while let Ok(question) = questions.recv().await {
        let parts = question.into_vec();
        // Who asks, an empty part, and a number.
        let [asker, empty, first] = &parts[..] else {
            continue;
        };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]) else {
            tracing::debug!("who asks for events of the cache sends 8 bytes of a number");
            continue;
        };
        let first = i64::from_be_bytes(first);
        if !empty.is_empty() {
            continue;
        }
        let asked = lock(&history).since(first);
        for (number, message) in asked.into_iter().chain([(-1, Vec::new())]) {
            let parts = [
                asker.to_vec(),
                Vec::new(),
                number.to_be_bytes().to_vec(),
                message,
            ];
            let sent = tokio::time::timeout(PATIENCE, answers.send(parts_of(parts))).await;
            if !matches!(sent, Ok(Ok(()))) {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeromq::{DealerSocket, SubSocket};

    fn options() -> PublisherOptions {
        PublisherOptions {
            endpoint: "tcp://127.0.0.1:0".to_owned(),
            replay: Some("tcp://127.0.0.1:0".to_owned()),
            topic: "kv@pod@model".to_owned(),
            block_size: 2,
            kept: 3,
        }
    }

    fn stored(hash: u64) -> Vec<BlockEvent> {
        vec![BlockEvent::Stored {
            parent: None,
            hashes: vec![hash],
            tokens: vec![1, 2],
        }]
    }

    fn number_of(part: &[u8]) -> i64 {
        i64::from_be_bytes(part.try_into().unwrap())
    }

    #[test]
    fn what_is_told_is_heard_and_what_was_missed_is_told_again() {
        let publisher = Arc::new(Publisher::start(options()).unwrap());
        let mut observer = publisher.observer();
        (0..5).for_each(|hash| observer(stored(hash)));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut asker = DealerSocket::new();
            asker.connect(publisher.replay().unwrap()).await.unwrap();
            // Nonsense is passed over.
            asker.send(parts_of([b"x".to_vec()])).await.unwrap();
            asker
                .send(parts_of([Vec::new(), b"x".to_vec()]))
                .await
                .unwrap();
            for (first, expected) in [(0i64, vec![2, 3, 4, -1]), (4, vec![4, -1]), (9, vec![-1])] {
                let question = [Vec::new(), first.to_be_bytes().to_vec()];
                asker.send(parts_of(question)).await.unwrap();
                let mut numbers = Vec::new();
                while numbers.last() != Some(&-1) {
                    let parts = asker.recv().await.unwrap().into_vec();
                    numbers.push(number_of(&parts[1]));
                    assert_eq!(parts[2].is_empty(), numbers.last() == Some(&-1));
                }
                assert_eq!(numbers, expected);
            }
            let mut subscriber = SubSocket::new();
            subscriber.connect(publisher.endpoint()).await.unwrap();
            subscriber.subscribe("kv@pod").await.unwrap();
            let mut tries = 0;
            // A subscription takes a while to arrive.
            let parts = loop {
                observer(stored(100));
                tries += 1;
                let heard = tokio::time::timeout(Duration::from_millis(20), subscriber.recv());
                if let Ok(heard) = heard.await {
                    break heard.unwrap().into_vec();
                }
                assert!(tries < 30_000, "nothing is heard");
            };
            assert_eq!(&parts[0][..], b"kv@pod@model");
            assert!(number_of(&parts[1]) >= 5);
            assert_eq!(parts[2][0], 0x93);
        });
    }

    #[test]
    fn an_address_that_cannot_be_used_is_named() {
        for endpoint in [
            "127.0.0.1:5557",
            "tcp://127.0.0.1",
            "tcp://127.0.0.1:99999",
            "udp://a:1",
        ] {
            let options = PublisherOptions {
                endpoint: endpoint.to_owned(),
                ..options()
            };
            let error = Publisher::start(options).unwrap_err().to_string();
            assert!(error.starts_with(endpoint), "{error}");
        }
    }
}
