//! Requests and replies other than graphs. For a request with data, this is the part before the
//! data.

use super::Fields;
use super::frame::Command;
use super::graph::MAX_SOURCES;
use super::record::{RECORD, Record};
use super::version::{Protocol, Version};
use crate::UnsupportedConversion;

/// Byte after the version in a server's greeting, if the server answers whether it can compute a
/// node. Upstream's programs ignore the byte.
pub const ANSWERS_SUPPORT: u8 = b's';

/// Bit of the device number in [`Request::GetAllocSize`] that makes the request a query whether the
/// device can compute the node (1) or not (0), instead of how much memory it takes.
pub const ASKS_SUPPORT: u32 = 1 << 31;

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
    },
    MemsetTensor {
        tensor: Record,
        offset: u64,
        size: u64,
        value: u8,
    },
}

impl Request {
    /// Bytes of a write before its data.
    pub const SET_TENSOR: usize = RECORD + 9;

    /// Parses the payload of `command`, whose length was [checked](Command::check). For a write,
    /// parses its first [`SET_TENSOR`](Request::SET_TENSOR) bytes.
    ///
    /// # Errors
    /// If it is too short or too long, or belongs to a graph.
    pub fn read(command: Command, payload: &[u8]) -> Result<Self, UnsupportedConversion> {
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
            Command::GraphRecompute => Request::GraphRecompute { device: f.u32()? },
            Command::MemsetTensor => Request::MemsetTensor {
                tensor: Record::read(f)?,
                offset: f.u64()?,
                size: f.u64()?,
                value: f.u8()?,
            },
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
            | Request::GraphRecompute { device } => out.extend(device.to_le_bytes()),
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
    use crate::rpc::version::V7;

    #[test]
    fn requests_round_trip() {
        let tensor = Record {
            id: 5,
            ..Record::NONE
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
            Request::GraphRecompute { device: 16 },
            Request::MemsetTensor {
                tensor,
                offset: 17,
                size: 18,
                value: 19,
            },
        ];
        // All except graphs.
        assert_eq!(requests.len(), Command::ALL.len() - 1);
        for request in requests {
            let (command, payload) = (request.command(), request.payload(&V7));
            assert!(command.check(&V7, payload.len() as u64).is_ok());
            assert_eq!(Request::read(command, &payload).unwrap(), request);
            if !payload.is_empty() && command != Command::Hello {
                assert!(Request::read(command, &payload[1..]).is_err());
            }
        }
    }

    #[test]
    fn greetings_round_trip() {
        let greeting = Greeting {
            version: V7.version,
            answers_support: true,
        };
        let payload = greeting.payload(&V7);
        assert_eq!(payload.len(), 28);
        assert_eq!(&payload[..3], [7, 0, 0]);
        assert!(payload[4..].iter().all(|&byte| byte == 0));
        assert_eq!(Greeting::read(&payload).unwrap(), greeting);
        assert!(Greeting::read(&[7, 0]).is_err());
    }
}
