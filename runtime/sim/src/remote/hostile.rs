//! Hostile clients of a remote-mode server: they have a token and speak the protocol, but break its
//! rules.

use prost::Message;
use samite_remote::bare::messages::{self as proto, command::Command as Kind, support_query};
use samite_testing::Rng;

use std::collections::BTreeMap;

/// Maximum number of actions of all hostile clients in one case.
const MAX_ACTIONS: usize = 40;
/// Maximum number of other clients' requests that they remember.
const MAX_KNOWN: usize = 64;
/// A token that no regular client has.
pub(crate) const FOREIGN: usize = 9;

/// An action of a hostile client.
pub(crate) enum ClientAction {
    /// A new client connects with a token and sends this message.
    Come(usize, Vec<u8>),
    /// The client on this connection sends this message.
    Say(usize, Vec<u8>),
    Leave(usize),
    Cut(usize),
}

pub(crate) struct Hostile {
    rng: Rng,
    /// Act at one in so many opportunities; never for some seeds.
    seldom: Option<usize>,
    left: usize,
    /// Commands of other clients, without their data.
    known: Vec<Kind>,
    /// Session names of other clients.
    sessions: Vec<Vec<u8>>,
    /// Hashes of chunks that other clients uploaded.
    hashes: Vec<[u8; 32]>,
    /// Last request number of each connection.
    numbers: BTreeMap<usize, u64>,
}

impl Hostile {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        Hostile {
            seldom: rng.pick(&[None, Some(5), Some(20), Some(20), Some(100)]),
            rng,
            left: MAX_ACTIONS,
            known: Vec::new(),
            sessions: Vec::new(),
            hashes: Vec::new(),
            numbers: BTreeMap::new(),
        }
    }

    pub fn stop(&mut self) {
        self.left = 0;
    }

    /// Records the hash of a client's secret; hostile clients know only the hash.
    pub fn knows_of(&mut self, piece: &[u8]) {
        self.hashes.push(*blake3::hash(piece).as_bytes());
    }

    /// Records a client's requests, without the data that it uploads: a client that replays the
    /// data may legitimately see it.
    pub fn overhears(&mut self, message: &[u8]) {
        let Ok(request) = proto::Request::decode(message) else {
            return;
        };
        for command in request.commands {
            if self.known.len() >= MAX_KNOWN {
                break;
            }
            match command.command {
                Some(Kind::Write(_)) | None => {}
                Some(Kind::Chunk(mut chunk)) => {
                    chunk.data.clear();
                    self.known.push(Kind::Chunk(chunk));
                }
                Some(other) => self.known.push(other),
            }
        }
    }

    /// Records a reply to another client.
    pub fn overhears_reply(&mut self, message: &[u8]) {
        if let Ok(reply) = proto::Reply::decode(message)
            && let Some(welcome) = reply.welcome
        {
            self.sessions.push(welcome.session.to_vec());
        }
    }

    /// Registers a hostile client's new connection.
    pub fn came(&mut self, line: usize) {
        self.numbers.insert(line, 0);
    }

    /// Handles a reply to a hostile client.
    pub fn overhear(&mut self, line: usize, message: &[u8]) {
        if let Ok(reply) = proto::Reply::decode(message)
            && let Some(welcome) = reply.welcome
        {
            self.numbers.insert(line, welcome.received);
        }
    }

    /// Returns the next action, if any, of the clients on these connections.
    pub fn next(&mut self, there: &[usize]) -> Option<ClientAction> {
        let seldom = self.seldom?;
        if self.left == 0 || !self.rng.one_in(seldom) {
            return None;
        }
        self.left -= 1;
        if there.is_empty() || there.len() < 2 && self.rng.one_in(6) {
            let token = self.rng.pick(&[FOREIGN, FOREIGN, FOREIGN, 0, 1]);
            return Some(ClientAction::Come(token, self.hello(token)));
        }
        let line = there[self.rng.below(there.len())];
        Some(match self.rng.below(24) {
            0 => ClientAction::Leave(line),
            1 => ClientAction::Cut(line),
            2 => {
                let len = self.rng.below(64);
                ClientAction::Say(line, (0..len).map(|_| self.rng.bits() as u8).collect())
            }
            3..12 => ClientAction::Say(line, self.repeat(line)),
            _ => ClientAction::Say(line, self.ask(line)),
        })
    }

    /// Returns a greeting with a token, possibly with the session of another token.
    fn hello(&mut self, token: usize) -> Vec<u8> {
        let mut session = Vec::new();
        if token == FOREIGN && self.rng.one_in(3) && !self.sessions.is_empty() {
            session = self.sessions[self.rng.below(self.sessions.len())].clone();
        } else if self.rng.one_in(12) {
            session = vec![0; self.rng.pick(&[1, 16, 17])];
        }
        let request = proto::Request {
            seen: self.rng.pick(&[0, 0, 0, 1, u64::MAX]),
            hello: (!self.rng.one_in(16)).then(|| proto::Hello {
                version: if self.rng.one_in(16) { 7 } else { 1 },
                session: session.into(),
            }),
            ..proto::Request::default()
        };
        request.encode_to_vec()
    }

    /// Returns a request, usually with the next number.
    fn request(&mut self, line: usize, commands: Vec<Kind>) -> Vec<u8> {
        let number = self.numbers.entry(line).or_default();
        *number += 1;
        let number = *number;
        let commands = commands.into_iter().map(|command| proto::Command {
            command: Some(command),
        });
        let request = proto::Request {
            number: match self.rng.below(24) {
                0 => number + 1,
                1 => u64::MAX,
                2 => number.saturating_sub(1),
                _ => number,
            },
            seen: self.rng.pick(&[0, number, number, u64::MAX]),
            hello: None,
            cancel: self.rng.pick(&[0, 0, 0, 0, 0, 0, 0, 0, 0, u64::MAX]),
            commands: commands.collect(),
            confirm: self.rng.one_in(2),
            over: self.rng.one_in(60),
        };
        request.encode_to_vec()
    }

    /// Replays commands of other clients, some of them modified in one place.
    fn repeat(&mut self, line: usize) -> Vec<u8> {
        let mut commands = Vec::new();
        for _ in 0..1 + self.rng.below(8) {
            if !self.known.is_empty() {
                commands.push(self.known[self.rng.below(self.known.len())].clone());
            }
        }
        let mut request = self.request(line, commands);
        if self.rng.one_in(4) && !request.is_empty() {
            let at = self.rng.below(request.len());
            request[at] = self.rng.pick(&[0, 1, 2, 0x7f, 0x80, 0xff]);
        }
        request
    }

    /// Returns a location in a buffer that may be its own or not exist.
    fn place(&mut self) -> Option<proto::Place> {
        let n = self
            .rng
            .pick(&[1, 16, 256, 1024, 4096, 4096, 4096, 1 << 20, u64::MAX]);
        let (dtype, bytes) = self.rng.pick(&[
            ("i8", 1),
            ("i8", 1),
            ("i8", 1),
            ("f32", 4),
            ("q8_0", 1),
            ("x", 1),
        ]);
        let row = n.wrapping_mul(bytes);
        let mut shape = vec![n, 1, 1, 1];
        shape.truncate(self.rng.pick(&[4, 4, 4, 4, 4, 4, 4, 1]));
        let place = proto::Place {
            buffer: self.rng.pick(&[1, 1, 1, 2, 2, 3, 5, u64::MAX]),
            offset: self.rng.pick(&[0, 0, 0, 0, 64, 4096, u64::MAX - 63]),
            layout: Some(proto::Layout {
                dtype: dtype.to_owned(),
                shape,
                strides: vec![bytes, row, row, row],
            }),
        };
        Some(place).filter(|_| !self.rng.one_in(30))
    }

    /// Sends well-formed requests, sometimes with invalid numbers.
    fn ask(&mut self, line: usize) -> Vec<u8> {
        let mut commands = Vec::new();
        for _ in 0..1 + self.rng.below(6) {
            let place = self.place();
            let device = u32::from(self.rng.one_in(16));
            let memory = u32::from(self.rng.one_in(16));
            let size = self.rng.pick(&[4096, 4096, 4096, 64, 1, 1 << 50, u64::MAX]);
            let offset = self.rng.pick(&[0, 0, 0, 0, 0, 4, 1 << 40, u64::MAX - 3]);
            let buffer = self.rng.pick(&[1, 1, 2, 3, u64::MAX]);
            let graph = self.rng.below(8) as u64;
            let command = match self.rng.below(16) {
                0..3 => Kind::Allocate(proto::Allocate {
                    buffer,
                    device,
                    memory,
                    size: self.rng.pick(&[64, 4096, 4096, 4096, 1 << 20, 1 << 60]),
                    usage: self.rng.below(4) as i32,
                }),
                3 => Kind::Free(buffer),
                4 => Kind::Fill(proto::Fill {
                    place,
                    offset,
                    size,
                    value: self.rng.pick(&[9, 9, 256]),
                }),
                5 => Kind::Copy(proto::Copy {
                    from: place,
                    to: self.place(),
                }),
                6 => Kind::Forget(graph),
                7 => Kind::Run(proto::Run { graph, deadline: 0 }),
                8 => Kind::MemoryOf(device),
                9 => Kind::SupportQuery(proto::SupportQuery {
                    kind: support_query::Kind::Size.into(),
                    device,
                    memory,
                    layout: place.and_then(|place| place.layout),
                    ..proto::SupportQuery::default()
                }),
                10 => Kind::Init(proto::Init {
                    place,
                    name: "x".to_owned(),
                    role: "matrix".to_owned(),
                }),
                11..13 if !self.hashes.is_empty() => {
                    // Requests a chunk that another client uploaded: does the server reveal it to a
                    // client that knows only its hash?
                    let hash = self.hashes[self.rng.below(self.hashes.len())];
                    let chunk = proto::Chunk {
                        place: place.clone(),
                        offset: 0,
                        hash: hash.to_vec().into(),
                        size: 4096,
                        data: Vec::new().into(),
                        proof: vec![0; self.rng.pick(&[0, 0, 32, 5])].into(),
                    };
                    commands.push(Kind::Chunk(chunk));
                    Kind::Read(proto::Read {
                        place,
                        offset: 0,
                        size: 4096,
                    })
                }
                _ => Kind::Read(proto::Read {
                    place,
                    offset,
                    size,
                }),
            };
            commands.push(command);
        }
        self.request(line, commands)
    }
}
