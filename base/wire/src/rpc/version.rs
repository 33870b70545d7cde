//! Differences between protocol versions.
//!
//! The client sends no version, and upstream's greets with the same bytes in every version. It
//! requires the server's major number to equal its own, and the server's minor number not to exceed
//! its own. A server therefore speaks one protocol, which its user chooses.

use super::frame::Command;
use crate::UnsupportedConversion;
use crate::numbers::{self, Release};
use std::fmt;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Incremented when old programs cannot talk to new ones, including when ggml's operation
    /// numbers move.
    pub major: u8,
    /// Incremented for commands that old programs need not know.
    pub minor: u8,
    /// Incremented for corrections and for new operations, which may move operation numbers.
    pub patch: u8,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Messages of a version. Another version is another entry in [`KNOWN`], and differences in bytes
/// are additional fields here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Version that the server announces.
    pub version: Version,
    /// Numbers of operations and element types.
    pub numbers: &'static Release,
    /// Bytes of the greeting for the network capabilities of the peer.
    pub capabilities: usize,
    /// Number of commands.
    pub commands: u8,
    /// Number of graphs that a server caches per device. If there are several, messages identify
    /// them by a uid.
    pub cached_graphs: usize,
}

/// Protocol 7: ggml 0.25 and 0.26.
pub const V7: Protocol = Protocol {
    version: Version {
        major: 7,
        minor: 0,
        patch: 0,
    },
    numbers: &numbers::V25,
    capabilities: 24,
    commands: 18,
    cached_graphs: 1,
};

/// Protocol 8.0.0: builds between ggml 0.26 and 0.27, with the operations of 0.26.
pub const V8_0_0: Protocol = Protocol {
    version: Version {
        major: 8,
        minor: 0,
        patch: 0,
    },
    commands: 23,
    cached_graphs: 1024,
    ..V7
};

/// Protocol 8.0.1: ggml 0.27 and 0.28. It has the numbers of 0.27, because servers of both announce
/// the same version, and one of 0.27 closes the connection on an element type that 0.28 added.
pub const V8: Protocol = Protocol {
    version: Version {
        major: 8,
        minor: 0,
        patch: 1,
    },
    numbers: &numbers::V27,
    ..V8_0_0
};

/// Known protocols.
pub const KNOWN: &[Protocol] = &[V7, V8_0_0, V8];

impl Protocol {
    /// Returns the protocol of a server that announces `version`. Another patch number is another
    /// protocol: with wrong operation numbers, a server would compute something else.
    ///
    /// # Errors
    /// If the version is unknown. The error lists the known ones.
    pub fn for_version(version: Version) -> Result<&'static Protocol, UnsupportedConversion> {
        let mut known = KNOWN.iter();
        known.find(|known| known.version == version).ok_or_else(|| {
            let known: Vec<_> = KNOWN
                .iter()
                .map(|known| known.version.to_string())
                .collect();
            format!(
                "the server speaks version {version} of ggml's RPC protocol; known are {}",
                known.join(", ")
            )
            .into()
        })
    }

    /// Returns the newest protocol with this major number.
    pub fn for_major(major: u8) -> Option<&'static Protocol> {
        let mut newest_first = KNOWN.iter().rev();
        newest_first.find(|known| known.version.major == major)
    }

    /// Returns whether messages may have this command.
    pub fn has(&self, command: Command) -> bool {
        (command as u8) < self.commands
    }

    /// Returns whether messages identify graphs by a uid.
    pub fn has_uids(&self) -> bool {
        self.cached_graphs > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::op;

    #[test]
    fn only_known_protocol_versions_are_accepted() {
        let version = |major, minor, patch| Version {
            major,
            minor,
            patch,
        };
        for known in [V7, V8_0_0, V8] {
            assert_eq!(Protocol::for_version(known.version), Ok(&known));
        }
        let majors = [6, 7, 8, 9].map(Protocol::for_major);
        assert_eq!(majors, [None, Some(&V7), Some(&V8), None]);
        for other in [version(6, 0, 0), version(7, 1, 0), version(8, 0, 2)] {
            let error = Protocol::for_version(other).unwrap_err();
            assert!(error.contains(&other.to_string()) && error.contains("7.0.0, 8.0.0, 8.0.1"));
        }
    }

    /// Compares with upstream's headers of 0.26 and 0.27.
    #[test]
    fn protocols_number_operations_as_their_releases() {
        let of = |op| [V7, V8_0_0, V8].map(|protocol| protocol.numbers.number_of(op));
        assert_eq!(of(op::TOP_K_MASK), [None, None, Some(91)]);
        assert_eq!(of(op::UNARY), [Some(91), Some(91), Some(92)]);
        assert_eq!(of(op::GLU), [Some(100), Some(100), Some(101)]);
        assert_eq!([V7, V8_0_0, V8].map(|p| p.numbers.types), [43; 3]);
    }
}
