//! Hostile clients that speak the server's protocol but break its rules.

use samite_testing::Rng;
use samite_wire::numbers::{flag, op};
use samite_wire::rpc::frame::{Command, HEADER};
use samite_wire::rpc::graph::{GraphMessage, LAST};
use samite_wire::rpc::message::Request;
use samite_wire::rpc::record::Record;
use samite_wire::rpc::version::V8;

/// Maximum number of actions of all hostile clients in one case.
const MAX_ACTIONS: usize = 32;
/// Maximum number of other clients' messages that they remember.
const MAX_KNOWN: usize = 48;
/// Distance in bytes between the base addresses of buffers.
const DISTANCE: u64 = 1 << 40;

/// An action of a hostile client.
pub(crate) enum ClientAction {
    /// A new client connects and sends these bytes.
    Come(Vec<u8>),
    /// The hostile client with this index sends these bytes.
    Say(usize, Vec<u8>),
    Leave(usize),
    Cut(usize),
}

pub(crate) struct Hostile {
    rng: Rng,
    /// Act at one in so many opportunities; never for some seeds.
    seldom: Option<usize>,
    left: usize,
    /// Messages of other clients.
    known: Vec<Vec<u8>>,
}

impl Hostile {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        Hostile {
            seldom: rng.pick(&[None, Some(10), Some(40), Some(40), Some(200)]),
            rng,
            left: MAX_ACTIONS,
            known: Vec::new(),
        }
    }

    pub fn stop(&mut self) {
        self.left = 0;
    }

    /// Records another client's message for replay. Writes are excluded: a client that replays one
    /// may legitimately see its data.
    pub fn overhear(&mut self, bytes: &[u8]) {
        let is_whole = bytes.split_at_checked(HEADER).is_some_and(|(head, rest)| {
            let len = u64::from_le_bytes(std::array::from_fn(|i| head[1 + i]));
            let excluded = [Command::SetTensor, Command::SetTensor2d, Command::Hello];
            excluded.iter().all(|&command| command as u8 != head[0]) && len == rest.len() as u64
        });
        if is_whole && self.known.len() < MAX_KNOWN {
            self.known.push(bytes.to_vec());
        }
    }

    /// Returns the next action, if any, of `there` connected clients.
    pub fn next(&mut self, there: usize) -> Option<ClientAction> {
        let seldom = self.seldom?;
        if self.left == 0 || !self.rng.one_in(seldom) {
            return None;
        }
        self.left -= 1;
        if there == 0 || there < 2 && self.rng.one_in(6) {
            return Some(ClientAction::Come(self.look_around()));
        }
        let which = self.rng.below(there);
        Some(match self.rng.below(24) {
            0 => ClientAction::Leave(which),
            1 => ClientAction::Cut(which),
            2 => {
                let len = self.rng.below(64);
                ClientAction::Say(which, (0..len).map(|_| self.rng.bits() as u8).collect())
            }
            3..9 => ClientAction::Say(which, self.repeat()),
            _ => ClientAction::Say(which, self.ask()),
        })
    }

    /// Allocates memory that others may have used and reads its contents; sometimes reads a buffer
    /// that no client owns.
    fn look_around(&mut self) -> Vec<u8> {
        let mut all = message(&Request::Hello);
        if self.rng.one_in(4) {
            all.extend(self.repeat());
            return all;
        }
        for buffer in 1..2 + self.rng.below(3) as u64 {
            let size = self.rng.pick(&[64, 4096, 4096, 4096]);
            all.extend(message(&Request::AllocBuffer { device: 0, size }));
            let n = (size / 4) as u32;
            let tensor = Record {
                buffer,
                ne: [n, 1, 1, 1],
                nb: [4, n * 4, n * 4, n * 4],
                data: buffer * DISTANCE,
                ..Record::NONE
            };
            let offset = 0;
            all.extend(message(&Request::GetTensor {
                tensor,
                offset,
                size,
            }));
        }
        // The next buffer reuses the address of the freed one.
        if self.rng.one_in(4) {
            all.extend(message(&Request::FreeBuffer { buffer: 1 }));
        }
        all
    }

    /// Replays messages of other clients, some of them modified in one place.
    fn repeat(&mut self) -> Vec<u8> {
        let mut all = self.greet();
        for _ in 0..1 + self.rng.below(6) {
            if self.known.is_empty() {
                break;
            }
            let mut message = self.known[self.rng.below(self.known.len())].clone();
            if self.rng.one_in(3) {
                let at = self.rng.below(message.len());
                message[at] = self.rng.pick(&[0, 1, 2, 0x7f, 0x80, 0xff]);
            }
            all.extend(message);
        }
        all
    }

    /// Usually returns nothing: a second greeting ends a session.
    fn greet(&mut self) -> Vec<u8> {
        if self.rng.one_in(16) {
            message(&Request::Hello)
        } else {
            Vec::new()
        }
    }

    /// Returns a tensor in a buffer that may be its own, another client's, or not exist.
    fn place(&mut self) -> Record {
        let buffer = self.rng.pick(&[1, 1, 1, 1, 1, 2, 2, 2, 3, 9, u64::MAX]);
        let n = self
            .rng
            .pick(&[1, 16, 16, 16, 256, 1024, 1024, 1 << 20, u32::MAX]);
        let offset = self
            .rng
            .pick(&[0, 0, 0, 64, 4096, DISTANCE - 64, u64::MAX / 2]);
        let slot = if self.rng.one_in(16) {
            self.rng.below(6) as u64
        } else {
            buffer
        };
        let mut record = Record {
            id: 1 + self.rng.below(4) as u64,
            buffer,
            ne: [n, 1, 1, 1],
            nb: [4, n.wrapping_mul(4), n.wrapping_mul(4), n.wrapping_mul(4)],
            data: slot.wrapping_mul(DISTANCE).wrapping_add(offset),
            ..Record::NONE
        };
        if self.rng.one_in(10) {
            record.dtype = self.rng.below(50) as u32;
        }
        record
    }

    /// Sends well-formed requests, sometimes with invalid numbers.
    fn ask(&mut self) -> Vec<u8> {
        let mut all = self.greet();
        for _ in 0..1 + self.rng.below(5) {
            let tensor = self.place();
            let size = u64::from(tensor.ne[0]) * 4;
            let size = self
                .rng
                .pick(&[size, size, size, size, size, 64, 1 << 50, u64::MAX]);
            let offset = self
                .rng
                .pick(&[0, 0, 0, 0, 0, 0, 0, 4, 1 << 40, u64::MAX - 3]);
            let buffer = tensor.buffer;
            let device = u32::from(self.rng.one_in(12));
            let request = match self.rng.below(12) {
                0 | 1 => Request::AllocBuffer {
                    device,
                    size: self.rng.pick(&[64, 4096, 4096, 4096, 1 << 20, 1 << 60]),
                },
                2 => Request::FreeBuffer { buffer },
                3 => Request::BufferClear { buffer, value: 7 },
                4 => Request::MemsetTensor {
                    tensor,
                    offset,
                    size,
                    value: 9,
                },
                5 => Request::CopyTensor {
                    from: tensor,
                    to: self.place(),
                },
                6 => Request::GraphRecompute { device, uid: LAST },
                7 => {
                    let payload = self.graph();
                    all.extend(Command::GraphCompute.header(payload.len() as u64));
                    all.extend(payload);
                    continue;
                }
                8 => {
                    let request = Request::SetTensor {
                        tensor,
                        cache: false,
                        offset,
                    };
                    let mut payload = request.payload(&V8);
                    payload.extend(vec![0x5a; size.min(2048) as usize]);
                    all.extend(Command::SetTensor.header(payload.len() as u64));
                    all.extend(payload);
                    continue;
                }
                _ => Request::GetTensor {
                    tensor,
                    offset,
                    size,
                },
            };
            all.extend(message(&request));
        }
        if self.rng.one_in(8) {
            // The rest never arrives.
            all.truncate(self.rng.below(all.len()));
        }
        all
    }

    fn graph(&mut self) -> Vec<u8> {
        let leaf = Record {
            id: 1,
            op: op::NONE,
            ..self.place()
        };
        let node = Record {
            id: 2,
            op: self
                .rng
                .pick(&[op::SQR, op::SQR, op::SCALE, op::MUL_MAT, 200]),
            flags: flag::COMPUTE,
            src: std::array::from_fn(|i| u64::from(i == 0)),
            ..self.place()
        };
        GraphMessage::write(&V8, 0, LAST, &[2], &[leaf, node])
    }
}

fn message(request: &Request) -> Vec<u8> {
    let payload = request.payload(&V8);
    let mut message = request.command().header(payload.len() as u64).to_vec();
    message.extend(payload);
    message
}
