//! Faults of kernels.

use std::fmt;

pub use crate::ptx::instruction::Space;

/// Kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Load.
    Read,
    /// Store.
    Write,
    /// Atomic read and write.
    Atomic,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "reads",
            Self::Write => "writes",
            Self::Atomic => "updates",
        })
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Generic => "generic",
            Self::Global => "global",
            Self::Const => "constant",
            Self::Shared => "shared",
            Self::Local => "local",
            Self::Param => "parameter",
        })
    }
}

/// Reason of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// An access outside of every allocation, or of the block's or thread's memory.
    OutOfBounds {
        /// Space of the access.
        space: Space,
        /// Kind of the access.
        access: AccessKind,
        /// First address.
        address: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// An address that is no multiple of the access's size.
    Misaligned {
        /// Space of the access.
        space: Space,
        /// Kind of the access.
        access: AccessKind,
        /// First address.
        address: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// A store to constants.
    ReadOnly {
        /// First address.
        address: u64,
    },
    /// Two accesses of the same bytes, one of them a write, without order between them.
    Race {
        /// Space of the accesses.
        space: Space,
        /// Kind of the second access.
        access: AccessKind,
        /// First address.
        address: u64,
        /// Line of the first access.
        other_line: usize,
        /// Text of the first access.
        other_instruction: String,
        /// Block of the first access, if it is known.
        other_block: Option<[u32; 3]>,
        /// Warp of the first access within its block.
        other_warp: u32,
    },
    /// A barrier that not all running threads of a warp reach together.
    DivergentBarrier {
        /// Lanes that did not reach it.
        missing: u32,
    },
    /// A barrier that the wrong number of threads reaches.
    BadBarrier(String),
    /// An exchange between lanes that includes a lane which does not take part.
    MissingLanes {
        /// Mask of these lanes.
        missing: u32,
    },
    /// A read of shared memory that was never written.
    Uninitialized {
        /// First address.
        address: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// An access of shared memory while an asynchronous copy writes it.
    PendingCopy {
        /// First address.
        address: u64,
    },
    /// An access, before the kernel waits for earlier ones, of memory that one of them may use.
    TooEarly {
        /// Kind of the access.
        access: AccessKind,
    },
    /// The kernel executed `trap`.
    Trap,
    /// The launch executed more instructions than it may.
    Budget,
    /// All threads wait for each other.
    Deadlock,
    /// The caller stopped the launch.
    Stopped,
    /// An operation whose effect is not defined or not implemented.
    Unsupported(String),
    /// A launch with wrong parameters.
    Launch(String),
}

/// A fault, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFault {
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the PTX text, or 0.
    pub line: usize,
    /// Text of the instruction.
    pub instruction: String,
    /// Block of the thread.
    pub block: [u32; 3],
    /// Thread within the block.
    pub thread: [u32; 3],
    /// Reason.
    pub kind: FaultKind,
}

/// Formats an index, without dimensions that are not used.
fn index([x, y, z]: [u32; 3]) -> String {
    if y == 0 && z == 0 {
        x.to_string()
    } else {
        format!("({x}, {y}, {z})")
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds {
                space: Space::Global,
                access,
                address,
                bytes,
            }
            | Self::OutOfBounds {
                space: Space::Generic,
                access,
                address,
                bytes,
            } => {
                write!(
                    f,
                    "{access} {bytes} bytes at {address:#x} outside every allocation"
                )
            }
            Self::OutOfBounds {
                space,
                access,
                address,
                bytes,
            } => {
                write!(
                    f,
                    "{access} {bytes} bytes at {address:#x} outside {space} memory"
                )
            }
            Self::Misaligned {
                space,
                access,
                address,
                bytes,
            } => {
                write!(
                    f,
                    "{access} {bytes} bytes of {space} memory at {address:#x}, misaligned"
                )
            }
            Self::ReadOnly { address } => write!(f, "writes constant memory at {address:#x}"),
            Self::Race {
                space,
                access,
                address,
                other_line,
                other_instruction,
                other_block,
                other_warp,
            } => {
                let block = match other_block {
                    Some(block) => format!("block {}, warp {other_warp}", index(*block)),
                    None => "other blocks".into(),
                };
                write!(
                    f,
                    "{access} {space} memory at {address:#x} in a race with line {other_line} \
                     `{other_instruction}` of {block}"
                )
            }
            Self::DivergentBarrier { missing } => {
                write!(f, "lanes {missing:#x} of the warp are not at this barrier")
            }
            Self::BadBarrier(reason) => f.write_str(reason),
            Self::MissingLanes { missing } => {
                write!(f, "lanes {missing:#x} of the warp do not take part")
            }
            Self::Uninitialized { address, bytes } => {
                write!(
                    f,
                    "reads {bytes} bytes of shared memory at {address:#x} never written"
                )
            }
            Self::TooEarly { access } => write!(
                f,
                "{access} memory of earlier kernels before it waits for them"
            ),
            Self::PendingCopy { address } => write!(
                f,
                "accesses shared memory at {address:#x} before the wait for its asynchronous copy"
            ),
            Self::Trap => f.write_str("trap"),
            Self::Budget => f.write_str("the launch executed too many instructions"),
            Self::Deadlock => f.write_str("all threads wait for each other"),
            Self::Stopped => f.write_str("the launch was stopped"),
            Self::Unsupported(reason) | Self::Launch(reason) => f.write_str(reason),
        }
    }
}

impl fmt::Display for KernelFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kernel,
            line,
            instruction,
            block,
            thread,
            kind,
        } = self;
        if *line == 0 {
            return write!(f, "{kernel}: {kind}");
        }
        let (block, thread) = (index(*block), index(*thread));
        write!(
            f,
            "{kernel}: line {line} `{instruction}`: block {block}, thread {thread}: {kind}"
        )
    }
}

impl std::error::Error for KernelFault {}

/// A fault before its place is known: the lane and the reason.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub(crate) lane: usize,
    pub(crate) kind: FaultKind,
}

impl Trouble {
    /// Boxes a fault, so that results stay small.
    pub(crate) fn new(lane: usize, kind: FaultKind) -> Box<Self> {
        Box::new(Self { lane, kind })
    }
}

/// Result of an instruction.
pub(crate) type MachineResult<T = ()> = Result<T, Box<Trouble>>;
