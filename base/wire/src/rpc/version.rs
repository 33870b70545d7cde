//! Differences between protocol versions.
//!
//! The client sends no version. It demands the server's major number, and of the minor one that the
//! server's is not greater than its own. So a server says the least version that has everything it
//! offers.

use crate::Reason;
use crate::numbers::op;
use std::fmt;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Raised when old programs cannot talk to new ones, also where ggml's numbers of operations
    /// moved.
    pub major: u8,
    /// Raised for commands that old programs need not know.
    pub minor: u8,
    /// Raised for corrections.
    pub patch: u8,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The messages of a major version. Another one is one more entry in [`KNOWN`]; where its bytes
/// differ, it is one more field here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// What a server of ours says.
    pub version: Version,
    /// How many numbers of operations are in use.
    pub operations: u32,
    /// Bytes of the greeting, which say what the peer's network can do.
    pub capabilities: usize,
}

/// Protocol 7: ggml 0.25 and 0.26.
pub const V7: Protocol = Protocol {
    version: Version {
        major: 7,
        minor: 0,
        patch: 0,
    },
    operations: op::COUNT,
    capabilities: 24,
};

/// The protocols that are known.
pub const KNOWN: &[Protocol] = &[V7];

impl Protocol {
    /// Returns the protocol of a server that says `version`.
    ///
    /// # Errors
    /// If it is not known, with those that are.
    pub fn of(version: Version) -> Result<&'static Protocol, Reason> {
        let is_meant = |known: &&Protocol| {
            known.version.major == version.major && version.minor <= known.version.minor
        };
        KNOWN.iter().find(is_meant).ok_or_else(|| {
            let known: Vec<_> = KNOWN
                .iter()
                .map(|known| known.version.to_string())
                .collect();
            format!(
                "the server speaks version {version} of ggml's RPC protocol; known is {}",
                known.join(", ")
            )
            .into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_versions_are_spoken() {
        let version = |major, minor, patch| Version {
            major,
            minor,
            patch,
        };
        assert_eq!(Protocol::of(version(7, 0, 0)), Ok(&V7));
        assert_eq!(Protocol::of(version(7, 0, 9)), Ok(&V7));
        for other in [version(6, 0, 0), version(7, 1, 0), version(8, 0, 0)] {
            let error = Protocol::of(other).unwrap_err();
            assert!(error.contains(&other.to_string()) && error.contains("7.0.0"));
        }
    }
}
