//! Commands and the lengths of their messages.

use super::graph::MAX_SOURCES;
use super::record::RECORD;
use super::version::Protocol;
use crate::UnsupportedConversion;

/// Bytes before the payload of a request: command and length.
pub const HEADER: usize = 9;

/// Defines the enumeration of commands and the conversion from numbers.
macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// Command of a client.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Command {
            $($(#[$doc])* $name = $number,)*
        }

        impl Command {
            /// All commands.
            pub const ALL: &[Command] = &[$(Command::$name),*];
        }
    };
}

commands! {
    /// Allocates memory.
    AllocBuffer = 0,
    /// Returns the alignment of tensors.
    GetAlignment = 1,
    /// Returns the maximum buffer size.
    GetMaxSize = 2,
    /// Returns the base address of a buffer.
    BufferGetBase = 3,
    /// Frees a buffer.
    FreeBuffer = 4,
    /// Sets every byte of a buffer.
    BufferClear = 5,
    /// Writes to a tensor.
    SetTensor = 6,
    /// Writes data that the server already has, by its hash.
    SetTensorHash = 7,
    /// Reads a tensor.
    GetTensor = 8,
    /// Copies between two buffers of the server.
    CopyTensor = 9,
    /// Computes a graph.
    GraphCompute = 10,
    /// Returns the memory of a device.
    GetDeviceMemory = 11,
    /// Initialises a tensor after its placement.
    InitTensor = 12,
    /// Returns the bytes that a tensor takes.
    GetAllocSize = 13,
    /// Greets the server.
    Hello = 14,
    /// Returns the number of devices.
    DeviceCount = 15,
    /// Computes the last graph again.
    GraphRecompute = 16,
    /// Sets bytes of a tensor.
    MemsetTensor = 17,
}

impl Command {
    /// Returns the command with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Returns the minimum length of the payload, and the maximum unless it depends on the content.
    pub fn payload(self, protocol: &Protocol) -> (u64, Option<u64>) {
        let exactly = |len: usize| (len as u64, Some(len as u64));
        match self {
            Command::AllocBuffer => exactly(12),
            Command::GetAlignment
            | Command::GetMaxSize
            | Command::GetDeviceMemory
            | Command::GraphRecompute => exactly(4),
            Command::BufferGetBase | Command::FreeBuffer => exactly(8),
            Command::BufferClear => exactly(9),
            Command::SetTensor => (RECORD as u64 + 9, None),
            Command::SetTensorHash | Command::GetTensor => exactly(RECORD + 16),
            Command::CopyTensor => exactly(2 * RECORD),
            Command::GraphCompute => (12, None),
            Command::InitTensor => exactly(RECORD),
            Command::GetAllocSize => exactly(4 + RECORD * (1 + MAX_SOURCES)),
            Command::Hello => exactly(protocol.capabilities),
            Command::DeviceCount => exactly(0),
            Command::MemsetTensor => exactly(RECORD + 17),
        }
    }

    /// Checks the length in a request.
    ///
    /// # Errors
    /// If no such request has this length.
    pub fn check(self, protocol: &Protocol, len: u64) -> Result<(), UnsupportedConversion> {
        let (least, most) = self.payload(protocol);
        if len < least || most.is_some_and(|most| len > most) {
            return Err(format!("a message {self:?} of {len} bytes").into());
        }
        Ok(())
    }

    /// Returns the header of a request.
    pub fn header(self, len: u64) -> [u8; HEADER] {
        let mut header = [self as u8; HEADER];
        header[1..].copy_from_slice(&len.to_le_bytes());
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::version::V7;

    /// Compares with numbers from the table of protocol 7.0.0.
    #[test]
    fn command_numbers_and_lengths_match_upstream() {
        for (number, &command) in Command::ALL.iter().enumerate() {
            assert_eq!(command as usize, number);
            assert_eq!(Command::from_number(number as u8), Some(command));
        }
        assert_eq!((Command::ALL.len(), Command::from_number(18)), (18, None));
        let exact = [
            (Command::AllocBuffer, 12),
            (Command::SetTensorHash, 312),
            (Command::GetTensor, 312),
            (Command::CopyTensor, 592),
            (Command::GetAllocSize, 3260),
            (Command::Hello, 24),
            (Command::MemsetTensor, 313),
            (Command::InitTensor, 296),
        ];
        for (command, len) in exact {
            assert!(command.check(&V7, len).is_ok(), "{command:?}");
            assert!(command.check(&V7, len + 1).is_err(), "{command:?}");
            assert!(command.check(&V7, len - 1).is_err(), "{command:?}");
        }
        assert!(Command::SetTensor.check(&V7, 304).is_err());
        assert!(Command::SetTensor.check(&V7, 305 + (1 << 40)).is_ok());
        assert_eq!(
            Command::FreeBuffer.header(8),
            [4, 8, 0, 0, 0, 0, 0, 0, 0],
            "command and length"
        );
    }
}
