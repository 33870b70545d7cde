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
    /// Computes a cached graph again.
    GraphRecompute = 16,
    /// Sets bytes of a tensor.
    MemsetTensor = 17,
    /// Writes pieces at equal distances to a tensor.
    SetTensor2d = 18,
    /// Reads pieces at equal distances from a tensor.
    GetTensor2d = 19,
    /// Connects a device with one of another server.
    CommInit = 20,
    /// Adds the tensors of connected devices.
    CommAllReduce = 21,
    /// Ends the connection of a device.
    CommFree = 22,
}

impl Command {
    /// Returns the command with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Returns the minimum length of the payload, and the maximum unless it depends on the content.
    pub fn payload(self, protocol: &Protocol) -> (u64, Option<u64>) {
        let exactly = |len: usize| (len as u64, Some(len as u64));
        let uid = if protocol.has_uids() { 8 } else { 0 };
        match self {
            Command::AllocBuffer => exactly(12),
            Command::GetAlignment
            | Command::GetMaxSize
            | Command::GetDeviceMemory
            | Command::CommFree => exactly(4),
            Command::GraphRecompute => exactly(4 + uid),
            Command::BufferGetBase | Command::FreeBuffer => exactly(8),
            Command::BufferClear => exactly(9),
            Command::SetTensor => (RECORD as u64 + 9, None),
            Command::SetTensorHash | Command::GetTensor => exactly(RECORD + 16),
            Command::CopyTensor => exactly(2 * RECORD),
            Command::GraphCompute => (12 + uid as u64, None),
            Command::InitTensor => exactly(RECORD),
            Command::GetAllocSize => exactly(4 + RECORD * (1 + MAX_SOURCES)),
            Command::Hello => exactly(protocol.capabilities),
            Command::DeviceCount => exactly(0),
            Command::MemsetTensor => exactly(RECORD + 17),
            Command::SetTensor2d => (RECORD as u64 + 32, None),
            Command::GetTensor2d => exactly(RECORD + 32),
            Command::CommInit => exactly(80),
            Command::CommAllReduce => exactly(4 + RECORD),
        }
    }

    /// Checks the header of a request.
    ///
    /// # Errors
    /// If the protocol lacks the command, or no such request has this length.
    pub fn check(self, protocol: &Protocol, len: u64) -> Result<(), UnsupportedConversion> {
        if !protocol.has(self) {
            return Err(format!("protocol {} has no {self:?}", protocol.version).into());
        }
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
    use crate::rpc::version::{KNOWN, V7, V8, V8_0_0};

    /// Compares with upstream's source of 0.26, 0.27 and 0.28.
    #[test]
    fn command_numbers_and_lengths_match_upstream() {
        for (number, &command) in Command::ALL.iter().enumerate() {
            assert_eq!(command as usize, number);
            assert_eq!(Command::from_number(number as u8), Some(command));
        }
        assert_eq!((Command::ALL.len(), Command::from_number(23)), (23, None));
        assert_eq!(KNOWN.len(), 3);
        let exact = [
            (Command::AllocBuffer, Some(12), 12),
            (Command::SetTensorHash, Some(312), 312),
            (Command::GetTensor, Some(312), 312),
            (Command::CopyTensor, Some(592), 592),
            (Command::GetAllocSize, Some(3260), 3260),
            (Command::Hello, Some(24), 24),
            (Command::MemsetTensor, Some(313), 313),
            (Command::InitTensor, Some(296), 296),
            (Command::GraphRecompute, Some(4), 12),
            (Command::GetTensor2d, None, 328),
            (Command::CommInit, None, 80),
            (Command::CommAllReduce, None, 300),
            (Command::CommFree, None, 4),
        ];
        for (command, old, new) in exact {
            for (protocol, len) in [(V7, old), (V8_0_0, Some(new)), (V8, Some(new))] {
                let is_allowed = |len| command.check(&protocol, len).is_ok();
                let len = len.unwrap_or(u64::MAX);
                let found = [len - 1, len, len.saturating_add(1)].map(is_allowed);
                let wanted = [false, len < u64::MAX, false];
                assert_eq!(found, wanted, "{command:?} of {}", protocol.version);
            }
        }
        for (command, old, new) in [
            (Command::SetTensor, Some(305), 305),
            (Command::GraphCompute, Some(12), 20),
            (Command::SetTensor2d, None, 328),
        ] {
            for (protocol, least) in [(V7, old), (V8, Some(new))] {
                let least = least.unwrap_or(u64::MAX);
                assert!(command.check(&protocol, least - 1).is_err(), "{command:?}");
                let more = least.saturating_add(1 << 40);
                let is_there = least < u64::MAX;
                assert_eq!(command.check(&protocol, more).is_ok(), is_there);
            }
        }
        assert_eq!(
            Command::SetTensor2d.check(&V7, 400).unwrap_err(),
            "protocol 7.0.0 has no SetTensor2d"
        );
        assert_eq!(
            Command::FreeBuffer.header(8),
            [4, 8, 0, 0, 0, 0, 0, 0, 0],
            "command and length"
        );
    }
}
