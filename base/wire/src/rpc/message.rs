//! Requests and replies other than graphs. For a request with data, this is the part before the
//! data.

use super::Fields;
use super::frame::Command;
use super::graph::{MAX_SOURCES, read_uid, write_uid};
use super::record::{RECORD, Record};
use super::version::{Protocol, Version};
use crate::UnsupportedConversion;

/// Byte after the version in a server's greeting, if the server answers whether it can compute a
/// node. Upstream's programs ignore the byte.
pub const ANSWERS_SUPPORT: u8 = b's';

/// Bit of the device number in [`Request::GetAllocSize`] that makes the request a query whether the
/// device can compute the node (1) or not (0), instead of how much memory it takes.
pub const ASKS_SUPPORT: u32 = 1 << 31;

/// Pieces of a tensor at equal distances, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPieces {
    /// Offset of the first piece.
    pub offset: u64,
    /// Length of each piece.
    pub len: u64,
    /// Number of pieces.
    pub count: u64,
    /// Distance from one piece to the next.
    pub stride: u64,
}

impl TensorPieces {
    fn read(fields: &mut Fields<'_>) -> Result<Self, UnsupportedConversion> {
        Ok(TensorPieces {
            offset: fields.u64()?,
            len: fields.u64()?,
            count: fields.u64()?,
            stride: fields.u64()?,
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        for number in [self.offset, self.len, self.count, self.stride] {
            out.extend(number.to_le_bytes());
        }
    }
}

/// A request, except for graphs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are those of upstream
#[allow(clippy::large_enum_variant)] // there is one at a time
pub enum Request {
    AllocBuffer {
        device: u32,
        size: u64,
    },
    GetAlignment {
        device: u32,
    },
    GetMaxSize {
        device: u32,
    },
    BufferGetBase {
        buffer: u64,
    },
    FreeBuffer {
        buffer: u64,
    },
    BufferClear {
        buffer: u64,
        value: u8,
    },
    /// The data follows the request.
    SetTensor {
        tensor: Record,
        cache: bool,
        offset: u64,
    },
    SetTensorHash {
        tensor: Record,
        offset: u64,
        hash: u64,
    },
    GetTensor {
        tensor: Record,
        offset: u64,
        size: u64,
    },
    CopyTensor {
        from: Record,
        to: Record,
    },
    GetDeviceMemory {
        device: u32,
    },
    InitTensor {
        tensor: Record,
    },
    GetAllocSize {
        device: u32,
        tensor: Record,
        sources: Box<[Record; MAX_SOURCES]>,
    },
    Hello,
    DeviceCount,
    GraphRecompute {
        device: u32,
        uid: u64,
    },
    MemsetTensor {
        tensor: Record,
        offset: u64,
        size: u64,
        value: u8,
    },
    /// The data follows the request, one piece after the other.
    SetTensor2d {
        tensor: Record,
        pieces: TensorPieces,
    },
    GetTensor2d {
        tensor: Record,
        pieces: TensorPieces,
    },
    CommInit {
        device: u32,
        rank: u32,
        world: u32,
        port: u32,
        host: [u8; 64],
    },
    CommAllReduce {
        device: u32,
        tensor: Record,
    },
    CommFree {
        device: u32,
    },
}

impl Request {
    /// Bytes of a write before its data.
    pub const SET_TENSOR: usize = RECORD + 9;
    /// Bytes of a write of pieces before its data.
    pub const SET_TENSOR_2D: usize = RECORD + 32;

    /// Parses the payload of `command`, whose length was [checked](Command::check). For a write,
    /// parses the bytes before its data.
    ///
    /// # Errors
    /// If it is too short or too long, or belongs to a graph.
    pub fn read(
        command: Command,
        payload: &[u8],
        protocol: &Protocol,
    ) -> Result<Self, UnsupportedConversion> {
        let f = &mut Fields::new(payload);
        let request = match command {
            Command::AllocBuffer => Request::AllocBuffer {
                device: f.u32()?,
                size: f.u64()?,
            },
            Command::GetAlignment => Request::GetAlignment { device: f.u32()? },
            Command::GetMaxSize => Request::GetMaxSize { device: f.u32()? },
            Command::BufferGetBase => Request::BufferGetBase { buffer: f.u64()? },
            Command::FreeBuffer => Request::FreeBuffer { buffer: f.u64()? },
            Command::BufferClear => Request::BufferClear {
                buffer: f.u64()?,
                value: f.u8()?,
            },
            Command::SetTensor => Request::SetTensor {
                tensor: Record::read(f)?,
                cache: f.u8()? != 0,
                offset: f.u64()?,
            },
            Command::SetTensorHash => Request::SetTensorHash {
                tensor: Record::read(f)?,
                offset: f.u64()?,
                hash: f.u64()?,
            },
            Command::GetTensor => Request::GetTensor {
                tensor: Record::read(f)?,
                offset: f.u64()?,
                size: f.u64()?,
            },
            Command::CopyTensor => Request::CopyTensor {
                from: Record::read(f)?,
                to: Record::read(f)?,
            },
            Command::GetDeviceMemory => Request::GetDeviceMemory { device: f.u32()? },
            Command::InitTensor => Request::InitTensor {
                tensor: Record::read(f)?,
            },
            Command::GetAllocSize => {
                let (device, tensor) = (f.u32()?, Record::read(f)?);
                let mut sources = Box::new([Record::NONE; MAX_SOURCES]);
                for source in sources.iter_mut() {
                    *source = Record::read(f)?;
                }
                Request::GetAllocSize {
                    device,
                    tensor,
                    sources,
                }
            }
            Command::Hello => return Ok(Request::Hello),
            Command::DeviceCount => Request::DeviceCount,
            Command::GraphRecompute => Request::GraphRecompute {
                device: f.u32()?,
                uid: read_uid(f, protocol)?,
            },
            Command::MemsetTensor => Request::MemsetTensor {
                tensor: Record::read(f)?,
                offset: f.u64()?,
                size: f.u64()?,
                value: f.u8()?,
            },
            Command::SetTensor2d => Request::SetTensor2d {
                tensor: Record::read(f)?,
                pieces: TensorPieces::read(f)?,
            },
            Command::GetTensor2d => Request::GetTensor2d {
                tensor: Record::read(f)?,
                pieces: TensorPieces::read(f)?,
            },
            Command::CommInit => Request::CommInit {
                device: f.u32()?,
                rank: f.u32()?,
                world: f.u32()?,
                port: f.u32()?,
                host: f.bytes()?,
            },
            Command::CommAllReduce => Request::CommAllReduce {
                device: f.u32()?,
                tensor: Record::read(f)?,
            },
            Command::CommFree => Request::CommFree { device: f.u32()? },
            Command::GraphCompute => return Err("a graph is no other request".into()),
        };
        f.end()?;
        Ok(request)
    }

    /// Returns its command.
    pub fn command(&self) -> Command {
        match self {
            Request::AllocBuffer { .. } => Command::AllocBuffer,
            Request::GetAlignment { .. } => Command::GetAlignment,
            Request::GetMaxSize { .. } => Command::GetMaxSize,
            Request::BufferGetBase { .. } => Command::BufferGetBase,
            Request::FreeBuffer { .. } => Command::FreeBuffer,
            Request::BufferClear { .. } => Command::BufferClear,
            Request::SetTensor { .. } => Command::SetTensor,
            Request::SetTensorHash { .. } => Command::SetTensorHash,
            Request::GetTensor { .. } => Command::GetTensor,
            Request::CopyTensor { .. } => Command::CopyTensor,
            Request::GetDeviceMemory { .. } => Command::GetDeviceMemory,
            Request::InitTensor { .. } => Command::InitTensor,
            Request::GetAllocSize { .. } => Command::GetAllocSize,
            Request::Hello => Command::Hello,
            Request::DeviceCount => Command::DeviceCount,
            Request::GraphRecompute { .. } => Command::GraphRecompute,
            Request::MemsetTensor { .. } => Command::MemsetTensor,
            Request::SetTensor2d { .. } => Command::SetTensor2d,
            Request::GetTensor2d { .. } => Command::GetTensor2d,
            Request::CommInit { .. } => Command::CommInit,
            Request::CommAllReduce { .. } => Command::CommAllReduce,
            Request::CommFree { .. } => Command::CommFree,
        }
    }

    /// Returns the payload. For a write, returns the part before the data.
    pub fn payload(&self, protocol: &Protocol) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Request::AllocBuffer { device, size } => {
                out.extend(device.to_le_bytes());
                out.extend(size.to_le_bytes());
            }
            Request::GetAlignment { device }
            | Request::GetMaxSize { device }
            | Request::GetDeviceMemory { device }
            | Request::CommFree { device } => out.extend(device.to_le_bytes()),
            Request::GraphRecompute { device, uid } => {
                out.extend(device.to_le_bytes());
                write_uid(&mut out, protocol, *uid);
            }
            Request::BufferGetBase { buffer } | Request::FreeBuffer { buffer } => {
                out.extend(buffer.to_le_bytes());
            }
            Request::BufferClear { buffer, value } => {
                out.extend(buffer.to_le_bytes());
                out.push(*value);
            }
            Request::SetTensor {
                tensor,
                cache,
                offset,
            } => {
                tensor.write(&mut out);
                out.push(u8::from(*cache));
                out.extend(offset.to_le_bytes());
            }
            Request::SetTensorHash {
                tensor,
                offset,
                hash: number,
            }
            | Request::GetTensor {
                tensor,
                offset,
                size: number,
            } => {
                tensor.write(&mut out);
                out.extend(offset.to_le_bytes());
                out.extend(number.to_le_bytes());
            }
            Request::CopyTensor { from, to } => {
                from.write(&mut out);
                to.write(&mut out);
            }
            Request::InitTensor { tensor } => tensor.write(&mut out),
            Request::GetAllocSize {
                device,
                tensor,
                sources,
            } => {
                out.extend(device.to_le_bytes());
                tensor.write(&mut out);
                sources.iter().for_each(|source| source.write(&mut out));
            }
            Request::Hello => out.resize(protocol.capabilities, 0),
            Request::DeviceCount => {}
            Request::MemsetTensor {
                tensor,
                offset,
                size,
                value,
            } => {
                tensor.write(&mut out);
                out.extend(offset.to_le_bytes());
                out.extend(size.to_le_bytes());
                out.push(*value);
            }
            Request::SetTensor2d { tensor, pieces } | Request::GetTensor2d { tensor, pieces } => {
                tensor.write(&mut out);
                pieces.write(&mut out);
            }
            Request::CommInit {
                device,
                rank,
                world,
                port,
                host,
            } => {
                for number in [device, rank, world, port] {
                    out.extend(number.to_le_bytes());
                }
                out.extend(host);
            }
            Request::CommAllReduce { device, tensor } => {
                out.extend(device.to_le_bytes());
                tensor.write(&mut out);
            }
        }
        out
    }
}

/// The reply to a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The server's version.
    pub version: Version,
    /// True if it answers [support queries](ASKS_SUPPORT).
    pub answers_support: bool,
}

impl Greeting {
    /// Bytes before the network capabilities.
    const NUMBERS: usize = 4;

    /// Returns the length of the greeting.
    pub fn len(protocol: &Protocol) -> usize {
        Self::NUMBERS + protocol.capabilities
    }

    /// Returns the payload. All network capabilities are zero, because upstream's programs would
    /// wait for whatever else is announced there.
    pub fn payload(&self, protocol: &Protocol) -> Vec<u8> {
        let Version {
            major,
            minor,
            patch,
        } = self.version;
        let answers = if self.answers_support {
            ANSWERS_SUPPORT
        } else {
            0
        };
        let mut out = vec![major, minor, patch, answers];
        out.resize(Self::len(protocol), 0);
        out
    }

    /// Parses the reply.
    ///
    /// # Errors
    /// If it is too short.
    pub fn read(payload: &[u8]) -> Result<Self, UnsupportedConversion> {
        let [major, minor, patch, answers] = Fields::new(payload).bytes()?;
        Ok(Greeting {
            version: Version {
                major,
                minor,
                patch,
            },
            answers_support: answers == ANSWERS_SUPPORT,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::graph::LAST;
    use crate::rpc::version::{V7, V8};

    #[test]
    fn requests_round_trip() {
        let tensor = Record {
            id: 5,
            ..Record::NONE
        };
        let pieces = TensorPieces {
            offset: 20,
            len: 21,
            count: 22,
            stride: 23,
        };
        let requests = [
            Request::AllocBuffer { device: 1, size: 2 },
            Request::GetAlignment { device: 3 },
            Request::GetMaxSize { device: 4 },
            Request::BufferGetBase { buffer: 5 },
            Request::FreeBuffer { buffer: 6 },
            Request::BufferClear {
                buffer: 7,
                value: 8,
            },
            Request::SetTensor {
                tensor,
                cache: true,
                offset: 9,
            },
            Request::SetTensorHash {
                tensor,
                offset: 10,
                hash: 11,
            },
            Request::GetTensor {
                tensor,
                offset: 12,
                size: 13,
            },
            Request::CopyTensor {
                from: tensor,
                to: Record::NONE,
            },
            Request::GetDeviceMemory { device: 14 },
            Request::InitTensor { tensor },
            Request::GetAllocSize {
                device: 15,
                tensor,
                sources: Box::new([tensor; MAX_SOURCES]),
            },
            Request::Hello,
            Request::DeviceCount,
            Request::GraphRecompute {
                device: 16,
                uid: 24,
            },
            Request::MemsetTensor {
                tensor,
                offset: 17,
                size: 18,
                value: 19,
            },
            Request::SetTensor2d { tensor, pieces },
            Request::GetTensor2d { tensor, pieces },
            Request::CommInit {
                device: 25,
                rank: 26,
                world: 27,
                port: 28,
                host: [29; 64],
            },
            Request::CommAllReduce { device: 30, tensor },
            Request::CommFree { device: 31 },
        ];
        // All except graphs.
        assert_eq!(requests.len(), Command::ALL.len() - 1);
        for request in requests {
            for protocol in [V7, V8] {
                let (command, payload) = (request.command(), request.payload(&protocol));
                if !protocol.has(command) {
                    continue;
                }
                assert!(command.check(&protocol, payload.len() as u64).is_ok());
                let read = |payload| Request::read(command, payload, &protocol);
                let mut wanted = request.clone();
                if let (Request::GraphRecompute { uid, .. }, 7) =
                    (&mut wanted, protocol.version.major)
                {
                    *uid = LAST;
                }
                assert_eq!(read(&payload).unwrap(), wanted);
                if !payload.is_empty() && command != Command::Hello {
                    assert!(read(&payload[1..]).is_err());
                }
            }
        }
    }

    #[test]
    fn pieces_lie_in_the_order_of_upstream() {
        let request = Request::GetTensor2d {
            tensor: Record::NONE,
            pieces: TensorPieces {
                offset: 1,
                len: 2,
                count: 3,
                stride: 4,
            },
        };
        let payload = request.payload(&V8);
        let numbers: Vec<_> = (0..4).map(|i| payload[RECORD + 8 * i]).collect();
        assert_eq!(numbers, [1, 2, 3, 4]);
    }

    #[test]
    fn greetings_round_trip() {
        let greeting = Greeting {
            version: V8.version,
            answers_support: true,
        };
        let payload = greeting.payload(&V8);
        assert_eq!(payload.len(), 28);
        assert_eq!(&payload[..3], [8, 0, 1]);
        assert!(payload[4..].iter().all(|&byte| byte == 0));
        assert_eq!(Greeting::read(&payload).unwrap(), greeting);
        assert!(Greeting::read(&[7, 0]).is_err());
    }
}
