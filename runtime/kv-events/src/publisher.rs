//! The sockets and the thread that serves them.

use crate::message::batch;
use crate::zmtp::{self, Received};
use samite_requests::{BlockEvent, BlockObserver};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{
    Receiver, Sender, UnboundedReceiver, UnboundedSender, channel, unbounded_channel,
};
use tokio::time::timeout;

/// Options of a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherOptions {
    /// Address for subscribers, such as `tcp://127.0.0.1:5557`. `*` means every address of this
    /// machine, and port 0 a free port.
    pub endpoint: String,
    /// Address for requests to replay missed messages; `None` to disable replay.
    pub replay: Option<String>,
    /// First part of each message. vLLM's router expects an empty one, llm-d `kv@POD@MODEL`.
    pub topic: String,
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Number of messages buffered for replay.
    pub kept: usize,
}

/// Reason why the publisher cannot start.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The socket cannot listen on an address.
    #[error("{endpoint}: {error}; an endpoint looks like tcp://127.0.0.1:5557")]
    Endpoint {
        /// Address of the socket.
        endpoint: String,
        /// Error of the system.
        error: io::Error,
    },
    /// The thread cannot be started.
    #[error("no thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Maximum number of connections of a socket. Further ones are closed.
const MAX_PEERS: usize = 256;
/// Maximum number of topics that one peer may subscribe to.
const MAX_TOPICS: usize = 64;
/// Maximum number of messages queued for a slow subscriber; it misses further ones.
const MAX_WAITING: usize = 1000;
/// Timeout for a peer's handshake, and for receiving a message.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for the last messages to be sent.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Delay after a connection could not be accepted for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// Most recent messages, with their numbers.
struct History {
    messages: VecDeque<(i64, Arc<[u8]>)>,
    kept: usize,
}

impl History {
    fn push(&mut self, number: i64, message: Arc<[u8]>) {
        if self.messages.len() >= self.kept {
            self.messages.pop_front();
        }
        if self.kept > 0 {
            self.messages.push_back((number, message));
        }
    }

    /// Returns the buffered messages from this number on.
    fn since(&self, first: i64) -> Vec<(i64, Arc<[u8]>)> {
        let messages = self.messages.iter();
        let asked = messages.filter(|(number, _)| *number >= first);
        asked.cloned().collect()
    }
}

/// A connected subscriber.
struct Subscriber {
    /// Topic prefixes that it subscribed to.
    topics: Mutex<Vec<Vec<u8>>>,
    messages: Sender<Arc<[u8]>>,
}

impl Subscriber {
    /// Handles a peer's message: a subscription or its cancellation.
    fn take(&self, message: &[u8]) {
        let mut topics = lock(&self.topics);
        match message.split_first() {
            Some((1, topic)) if topics.len() < MAX_TOPICS => topics.push(topic.to_vec()),
            Some((0, topic)) => {
                if let Some(at) = topics.iter().position(|known| known == topic) {
                    topics.swap_remove(at);
                }
            }
            _ => {}
        }
    }

    fn wants(&self, topic: &[u8]) -> bool {
        let topics = lock(&self.topics);
        topics.iter().any(|beginning| topic.starts_with(beginning))
    }
}

type Subscribers = Arc<Mutex<Vec<Arc<Subscriber>>>>;

/// Publishes cache events. When it and its observers are dropped, pending events are sent and the
/// sockets are closed.
#[derive(Debug)]
pub struct Publisher {
    /// `None` while it is being dropped.
    events: Option<UnboundedSender<Vec<BlockEvent>>>,
    thread: Option<JoinHandle<()>>,
    endpoint: String,
    replay: Option<String>,
    topic: String,
    block_size: usize,
}

impl Publisher {
    /// Opens the sockets.
    ///
    /// # Errors
    /// If a socket cannot listen on its address, or the thread cannot start.
    pub fn start(options: PublisherOptions) -> Result<Self, PublishError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (publisher, endpoint) = runtime.block_on(bind(&options.endpoint))?;
        let replayer = match &options.replay {
            None => None,
            Some(replay) => Some(runtime.block_on(bind(replay))?),
        };
        let (replayer, replay) = replayer.unzip();
        let (events, receiver) = unbounded_channel();
        let block_size = options.block_size.max(1);
        let topic = options.topic.clone();
        let thread = std::thread::Builder::new()
            .name("kv-events".to_owned())
            .spawn(move || {
                runtime.block_on(publish(publisher, replayer, receiver, &options));
                // A router that is slow to read does not delay shutdown.
                runtime.shutdown_background();
            })?;
        Ok(Publisher {
            events: Some(events),
            thread: Some(thread),
            endpoint,
            replay,
            topic,
            block_size,
        })
    }

    /// Returns the address for subscribers.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the address for replay requests.
    pub fn replay(&self) -> Option<&str> {
        self.replay.as_deref()
    }

    /// Returns the first part of each message.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// Returns the number of tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns an observer that publishes events. It keeps the publisher alive.
    pub fn observer(self: &Arc<Self>) -> BlockObserver {
        let publisher = Arc::clone(self);
        Box::new(move |events| {
            if let Some(sender) = &publisher.events {
                // This fails only if the thread has panicked.
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

/// Opens a socket and returns the address on which it listens.
async fn bind(endpoint: &str) -> Result<(TcpListener, String), PublishError> {
    let named = |error| PublishError::Endpoint {
        endpoint: endpoint.to_owned(),
        error,
    };
    let wrong = || {
        named(io::Error::new(
            io::ErrorKind::InvalidInput,
            "is no endpoint",
        ))
    };
    let place = endpoint.strip_prefix("tcp://").ok_or_else(wrong)?;
    let (host, port) = place.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let host = match host.trim_start_matches('[').trim_end_matches(']') {
        "*" => "0.0.0.0",
        host => host,
    };
    let listener = TcpListener::bind((host, port)).await.map_err(named)?;
    let address: SocketAddr = listener.local_addr().map_err(named)?;
    Ok((listener, format!("tcp://{address}")))
}

async fn publish(
    publisher: TcpListener,
    replayer: Option<TcpListener>,
    mut events: UnboundedReceiver<Vec<BlockEvent>>,
    options: &PublisherOptions,
) {
    let history = Arc::new(Mutex::new(History {
        messages: VecDeque::new(),
        kept: options.kept,
    }));
    let subscribers = Subscribers::default();
    let heard = Arc::clone(&subscribers);
    tokio::spawn(accept(publisher, move |stream| {
        subscription(stream, Arc::clone(&heard))
    }));
    if let Some(replayer) = replayer {
        let history = Arc::clone(&history);
        let topic: Arc<[u8]> = options.topic.as_bytes().into();
        tokio::spawn(accept(replayer, move |stream| {
            replay(stream, Arc::clone(&topic), Arc::clone(&history))
        }));
    }
    let topic = options.topic.as_bytes();
    let mut number = 0i64;
    while let Some(events) = events.recv().await {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let time = time.map_or(0.0, |time| time.as_secs_f64());
        let message: Arc<[u8]> = match batch(time, options.block_size.max(1), &events) {
            Ok(message) => message.into(),
            Err(error) => {
                tracing::error!(%error, "events of the cache cannot be written");
                continue;
            }
        };
        let sent: Arc<[u8]> = zmtp::message(&[topic, &number.to_be_bytes(), &message]).into();
        lock(&history).push(number, message);
        number += 1;
        for subscriber in &*lock(&subscribers) {
            if subscriber.wants(topic) {
                // A slow subscriber misses it.
                let _ = subscriber.messages.try_send(Arc::clone(&sent));
            }
        }
    }
    // Leave time for the last messages to reach subscribers.
    tokio::time::sleep(LAST_WORDS).await;
}

/// Serves the connections of a socket, [`MAX_PEERS`] at a time.
async fn accept<T>(listener: TcpListener, serve: impl Fn(TcpStream) -> T)
where
    T: Future<Output = io::Result<()>> + Send + 'static,
{
    let seats = Arc::new(Semaphore::new(MAX_PEERS));
    loop {
        let Ok((stream, address)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let Ok(seat) = Arc::clone(&seats).try_acquire_owned() else {
            tracing::debug!(%address, "too many connections for events of the cache");
            continue;
        };
        let served = serve(stream);
        tokio::spawn(async move {
            let _seat = seat;
            if let Err(error) = served.await {
                tracing::debug!(%address, %error, "a connection for events of the cache ends");
            }
        });
    }
}

async fn within_patience<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(PATIENCE, work).await.map_err(io::Error::from)?
}

/// Sends messages to a subscriber until it leaves.
async fn subscription(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    subscribers: Subscribers,
) -> io::Result<()> {
    within_patience(zmtp::handshake(&mut stream, "PUB", &["SUB", "XSUB"])).await?;
    let (messages, waiting) = channel(MAX_WAITING);
    let subscriber = Arc::new(Subscriber {
        topics: Mutex::default(),
        messages,
    });
    lock(&subscribers).push(Arc::clone(&subscriber));
    let (reading, writing) = tokio::io::split(stream);
    let ended = tokio::select! {
        ended = subscriptions(reading, &subscriber) => ended,
        ended = send(writing, waiting) => ended,
    };
    lock(&subscribers).retain(|other| !Arc::ptr_eq(other, &subscriber));
    ended
}

/// Serves a connection on which a peer sends these bytes and then disconnects.
pub async fn serve_bytes(bytes: &[u8], is_replay: bool) -> io::Result<()> {
    let stream = tokio::io::join(bytes, tokio::io::sink());
    if is_replay {
        let history = History {
            messages: VecDeque::from([(0, Arc::from([1, 2, 3]))]),
            kept: 1,
        };
        replay(stream, Arc::default(), Arc::new(Mutex::new(history))).await
    } else {
        subscription(stream, Subscribers::default()).await
    }
}

async fn subscriptions(
    mut stream: impl AsyncRead + Unpin,
    subscriber: &Subscriber,
) -> io::Result<()> {
    loop {
        if let Received::Message(parts) = zmtp::receive(&mut stream).await? {
            parts.iter().for_each(|part| subscriber.take(part));
        }
    }
}

async fn send(
    mut stream: impl AsyncWrite + Unpin,
    mut messages: Receiver<Arc<[u8]>>,
) -> io::Result<()> {
    while let Some(message) = messages.recv().await {
        within_patience(stream.write_all(&message)).await?;
    }
    Ok(())
}

fn lock<T>(of_all: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of_all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers a peer's replay requests, one after another: an empty part, then the parts of each
/// message. The last answer has an empty topic, the number -1 and no events.
async fn replay(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    topic: Arc<[u8]>,
    history: Arc<Mutex<History>>,
) -> io::Result<()> {
    let peers = ["REQ", "DEALER", "ROUTER"];
    within_patience(zmtp::handshake(&mut stream, "ROUTER", &peers)).await?;
    loop {
        let Received::Message(parts) = zmtp::receive(&mut stream).await? else {
            continue;
        };
        // An empty part, and a number.
        let [empty, first] = &parts[..] else {
            continue;
        };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]) else {
            tracing::debug!("a question for events of the cache is no number of 8 bytes");
            continue;
        };
        if !empty.is_empty() {
            continue;
        }
        let asked = lock(&history).since(i64::from_be_bytes(first));
        for (number, message) in &asked {
            let parts: [&[u8]; 4] = [b"", &topic, &number.to_be_bytes(), message];
            within_patience(stream.write_all(&zmtp::message(&parts))).await?;
        }
        let end: [&[u8]; 4] = [b"", b"", &(-1i64).to_be_bytes(), b""];
        within_patience(stream.write_all(&zmtp::message(&end))).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

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

    fn connected(endpoint: &str) -> TcpStream {
        let stream = TcpStream::connect(endpoint.strip_prefix("tcp://").unwrap()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(300)))
            .unwrap();
        stream
    }

    /// Connects a peer and completes the handshake.
    fn peer(endpoint: &str, socket_type: &str) -> TcpStream {
        let mut stream = connected(endpoint);
        stream.write_all(&zmtp::greeting()).unwrap();
        stream.write_all(&zmtp::ready(socket_type)).unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        let mut head = [0; 2];
        stream.read_exact(&mut head).unwrap();
        stream.read_exact(&mut vec![0; head[1].into()]).unwrap();
        stream
    }

    /// Returns the parts of the next message.
    fn heard(stream: &mut TcpStream) -> io::Result<Vec<Vec<u8>>> {
        let mut parts = Vec::new();
        loop {
            let mut head = [0; 2];
            stream.read_exact(&mut head)?;
            assert_eq!(head[0] & !1, 0, "a short frame of a message");
            let mut part = vec![0; head[1].into()];
            stream.read_exact(&mut part)?;
            parts.push(part);
            if head[0] == 0 {
                return Ok(parts);
            }
        }
    }

    #[test]
    fn events_are_received_and_missed_ones_replayed() {
        let publisher = Arc::new(Publisher::start(options()).unwrap());
        let mut observer = publisher.observer();
        (0..5).for_each(|hash| observer(stored(hash)));
        let mut asker = peer(publisher.replay().unwrap(), "DEALER");
        // Invalid requests are ignored.
        asker.write_all(&zmtp::message(&[b"x"])).unwrap();
        asker.write_all(&zmtp::message(&[b"", b"x"])).unwrap();
        asker.write_all(&zmtp::message(&[b"x", &[0; 8]])).unwrap();
        // The thread may not have published everything yet.
        while {
            asker
                .write_all(&zmtp::message(&[b"", &4i64.to_be_bytes()]))
                .unwrap();
            number_of(&heard(&mut asker).unwrap()[2]) != 4
        } {}
        assert_eq!(number_of(&heard(&mut asker).unwrap()[2]), -1);
        for (first, expected) in [(0i64, vec![2, 3, 4, -1]), (4, vec![4, -1]), (9, vec![-1])] {
            asker
                .write_all(&zmtp::message(&[b"", &first.to_be_bytes()]))
                .unwrap();
            let mut numbers = Vec::new();
            while numbers.last() != Some(&-1) {
                let parts = heard(&mut asker).unwrap();
                numbers.push(number_of(&parts[2]));
                assert_eq!(parts[0], b"");
                let is_end = numbers.last() == Some(&-1);
                assert_eq!(parts[1].is_empty(), is_end);
                assert!(is_end || parts[1] == b"kv@pod@model");
                assert_eq!(parts[3].is_empty(), is_end);
            }
            assert_eq!(numbers, expected);
        }
        let mut subscriber = peer(publisher.endpoint(), "SUB");
        // The last remaining subscription decides.
        for subscription in [&b"\x01other"[..], b"\x01kv@pod", b"\x01kv", b"\0kv"] {
            subscriber
                .write_all(&zmtp::message(&[subscription]))
                .unwrap();
        }
        subscriber
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        // A subscription takes a while to arrive.
        let parts = loop {
            observer(stored(100));
            let mut first = [0];
            if subscriber.peek(&mut first).is_ok() {
                subscriber.set_read_timeout(None).unwrap();
                break heard(&mut subscriber).unwrap();
            }
        };
        assert_eq!(parts[0], b"kv@pod@model");
        assert!(number_of(&parts[1]) >= 5);
        assert_eq!(parts[2][0], 0x93);
        // The subscriber sees the end of the stream, after all earlier events.
        drop(observer);
        drop(publisher);
        while heard(&mut subscriber).is_ok() {}
    }

    #[test]
    fn subscribers_receive_only_their_topics() {
        let (messages, _receiver) = channel(1);
        let subscriber = Subscriber {
            topics: Mutex::default(),
            messages,
        };
        assert!(!subscriber.wants(b"kv@a"));
        subscriber.take(b"\x01kv@");
        subscriber.take(b"\x01kv@");
        subscriber.take(b"\x02");
        subscriber.take(b"");
        assert!(subscriber.wants(b"kv@a") && !subscriber.wants(b"kv"));
        subscriber.take(b"\0kv@");
        assert!(subscriber.wants(b"kv@a"), "asked for twice");
        subscriber.take(b"\0kv@");
        assert!(!subscriber.wants(b"kv@a"));
        (0..=MAX_TOPICS).for_each(|number| subscriber.take(format!("\x01{number}").as_bytes()));
        assert_eq!(lock(&subscriber.topics).len(), MAX_TOPICS);
        subscriber.take(b"\x01");
        assert!(!subscriber.wants(b"x"), "there are too many topics");
    }

    /// Allocating the length that a peer claims would abort the process.
    #[test]
    fn a_huge_frame_length_closes_only_its_connection() {
        let publisher = Publisher::start(options()).unwrap();
        for endpoint in [publisher.endpoint(), publisher.replay().unwrap()] {
            for length in [1u64 << 40, i64::MAX as u64 - (1 << 20), u64::MAX] {
                let mut hostile = connected(endpoint);
                hostile.write_all(&zmtp::greeting()).unwrap();
                hostile.write_all(&[6]).unwrap();
                hostile.write_all(&length.to_be_bytes()).unwrap();
                let mut rest = Vec::new();
                // The connection may be reset, because the peer's data is not read completely.
                let _ = hostile.read_to_end(&mut rest);
                assert!(rest.len() <= 64 + 32, "{}", rest.len());
            }
            let kind = if endpoint == publisher.endpoint() {
                "SUB"
            } else {
                "REQ"
            };
            drop(peer(endpoint, kind));
        }
    }

    #[test]
    fn an_unusable_endpoint_is_named() {
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
        for endpoint in ["tcp://*:0", "tcp://localhost:0"] {
            let options = PublisherOptions {
                endpoint: endpoint.to_owned(),
                ..options()
            };
            let publisher = Publisher::start(options).unwrap();
            assert!(publisher.endpoint().starts_with("tcp://"));
        }
    }
}
