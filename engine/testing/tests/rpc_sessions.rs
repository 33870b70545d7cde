//! Records sessions of samite's own client and replays them to servers with changes that a
//! malicious client could make: frames dropped, repeated, reordered, or with another command, and
//! numbers replaced by extreme ones or by those of other places. The server must not panic, exceed
//! the quota, leak memory, or change another client's replies.
//!
//! `SAMITE_RPC_SESSIONS_SECONDS` sets the duration; the default is a fixed number of sessions. A
//! failure prints its seed, with which `SAMITE_RPC_SESSIONS_SEED` starts.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::environment::{Network, SystemNetwork};
use samite_core::{Backend, Device};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{ClientOptions, Protocol, RpcBackend, Server, ServerOptions};
use samite_testing::run_suite;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A request: its command, its claimed length, and its payload.
#[derive(Clone)]
struct Frame {
    command: u8,
    len: u64,
    payload: Vec<u8>,
}

fn device() -> Arc<dyn Device> {
    ReferenceDevice::new(ReferenceOptions {
        host_memory: true,
        ..ReferenceOptions::default()
    })
}

/// Memory quota in bytes of all clients together.
const QUOTA: usize = 4 << 20;
/// Maximum number of frames in a session, and of bytes in a frame.
const MAX_FRAMES: usize = 120;
const MAX_BYTES: usize = 32 << 10;
/// Default number of sessions.
const SESSIONS: u64 = 256;

fn server(protocol: &'static Protocol) -> Arc<Server> {
    let options = ServerOptions {
        protocol,
        memory: Some(QUOTA),
        patience: Duration::from_secs(1),
        ..ServerOptions::default()
    };
    Server::new(vec![device()], options)
}

/// Records the client's requests while it runs the cases of an operation.
fn record(protocol: &'static Protocol, operation: &str) -> Vec<Frame> {
    let listener = SystemNetwork.listen("127.0.0.1:0").unwrap();
    let address = listener.address().unwrap();
    let options = ServerOptions {
        protocol,
        ..ServerOptions::default()
    };
    let behind = Server::new(vec![device()], options);
    std::thread::spawn(move || behind.serve(&*listener));
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = relay.local_addr().unwrap().to_string();
    let said: Arc<Mutex<Vec<u8>>> = Arc::default();
    let heard = Arc::clone(&said);
    std::thread::spawn(move || {
        for client in relay.incoming() {
            let mut client = client.unwrap();
            let mut server = TcpStream::connect(&address).unwrap();
            // Send small messages at once.
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let (mut back, mut forth) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut back, &mut forth));
            let heard = Arc::clone(&heard);
            std::thread::spawn(move || {
                let mut bytes = [0; 1 << 16];
                while let Ok(len @ 1..) = client.read(&mut bytes) {
                    heard.lock().unwrap().extend(&bytes[..len]);
                    if server.write_all(&bytes[..len]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let backend = RpcBackend::connect(&[&*here], &ClientOptions::default());
    let report = run_suite(&backend.devices()[0], Some(operation), &mut |_| {});
    assert!(report.is_success(), "{report}");
    let bytes = said.lock().unwrap().clone();
    let (mut frames, mut rest) = (Vec::new(), &bytes[..]);
    while let [command, after @ ..] = rest
        && let Some((len, after)) = after.split_first_chunk::<8>()
        && frames.len() < MAX_FRAMES
    {
        let len = u64::from_le_bytes(*len);
        let Some((payload, after)) = after.split_at_checked(len as usize) else {
            break;
        };
        if payload.len() <= MAX_BYTES {
            frames.push(Frame {
                command: *command,
                len,
                payload: payload.to_vec(),
            });
        }
        rest = after;
    }
    assert!(frames.len() > 20, "{operation}: {} frames", frames.len());
    frames
}

/// Returns the server's replies to a session whose bytes arrive in pieces of this size.
fn play(server: &Arc<Server>, frames: &[Frame], piece: usize) -> Vec<u8> {
    let mut requests = Vec::new();
    for frame in frames {
        requests.push(frame.command);
        requests.extend(frame.len.to_le_bytes());
        requests.extend(&frame.payload);
    }
    let mut session = server.begin().unwrap();
    let mut replies = Vec::new();
    for piece in requests.chunks(piece) {
        let taken = session.take(piece, &mut |reply| {
            replies.extend(reply);
            Ok(())
        });
        if taken.is_err() {
            break;
        }
    }
    replies
}

struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % most.max(1) as u64) as usize
    }
}

const STRANGE: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0xff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    (1 << 40) + 4096,
    1 << 63,
    u64::MAX,
    u64::MAX - 3,
    (1 << 32) + 1,
];

/// Makes one random change.
fn change(frames: &mut Vec<Frame>, random: &mut Random) {
    let at = random.below(frames.len());
    let other = random.below(frames.len());
    match random.below(10) {
        0 => drop(frames.remove(at)),
        1 => {
            let again = frames[at].clone();
            frames.insert(other, again);
        }
        2 => frames.swap(at, other),
        3 => frames[at].command = random.below(25) as u8,
        4 => frames[at].len = STRANGE[random.below(STRANGE.len())],
        5 => {
            let payload = &mut frames[at].payload;
            match random.below(2) {
                0 => payload.truncate(random.below(payload.len() + 1)),
                _ => payload.extend(vec![0; random.below(300)]),
            }
            frames[at].len = frames[at].payload.len() as u64;
        }
        // Numbers start at multiples of four, or one byte later.
        kind => {
            let from = frames[other].payload.clone();
            let payload = &mut frames[at].payload;
            let place = random.below(payload.len() / 4 + 1) * 4 + random.below(8) / 7;
            let len = [4, 8][random.below(2)];
            let Some(target) = payload.get_mut(place..place + len) else {
                return;
            };
            let theirs = random.below(from.len() / 4 + 1) * 4;
            match from.get(theirs..theirs + len) {
                Some(theirs) if kind < 8 => target.copy_from_slice(theirs),
                _ => {
                    let number = STRANGE[random.below(STRANGE.len())].to_le_bytes();
                    target.copy_from_slice(&number[..len]);
                }
            }
        }
    }
    if frames.is_empty() {
        frames.push(Frame {
            command: 0,
            len: 0,
            payload: Vec::new(),
        });
    }
}

#[test]
fn mutated_client_sessions_are_harmless() {
    for major in [7, 8] {
        mutate(Protocol::for_major(major).unwrap());
    }
}

fn mutate(protocol: &'static Protocol) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    // A fixed number of sessions, unless the variable sets a time.
    let seconds = number("SAMITE_RPC_SESSIONS_SECONDS");
    let first = number("SAMITE_RPC_SESSIONS_SEED").unwrap_or(1);
    let sessions = [
        "mul_mat",
        "soft_max",
        "set_rows",
        "get_rows",
        "flash_attn_ext",
        "rope",
        "cpy",
    ]
    .map(|operation| record(protocol, operation));
    let server = server(protocol);
    let calm: Vec<Vec<u8>> = sessions
        .iter()
        .map(|frames| play(&server, frames, usize::MAX))
        .collect();
    assert!(calm.iter().all(|replies| replies.len() > 100));
    let start = Instant::now();
    let mut seed = first;
    while match seconds {
        Some(seconds) => start.elapsed() < Duration::from_secs(seconds),
        None => seed - first < SESSIONS,
    } {
        let mut random = Random(seed);
        let which = random.below(sessions.len());
        let mut frames = sessions[which].clone();
        for _ in 0..=random.below(4) {
            change(&mut frames, &mut random);
        }
        let piece = [1, 7, 300, 1 << 20][random.below(4)];
        let played = catch_unwind(AssertUnwindSafe(|| play(&server, &frames, piece)));
        assert!(played.is_ok(), "seed {seed}: the server panics");
        let kept = (server.clients(), server.memory_in_use());
        assert_eq!(kept, (0, 0), "seed {seed}: clients and bytes that stay");
        if seed % 64 == 0 {
            let which = random.below(sessions.len());
            let same = play(&server, &sessions[which], piece) == calm[which];
            assert!(same, "seed {seed}: another client is told something else");
        }
        seed += 1;
    }
    println!("{} sessions", seed - first);
}
