//! Differences between protocol versions.
//!
//! The client sends no version. It requires the server's major number to equal its own, and the
//! server's minor number not to exceed its own. A server therefore announces the lowest version
//! that includes everything it offers.

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
    /// Incremented for corrections.
    pub patch: u8,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Messages of a major version. Another version is another entry in [`KNOWN`], and differences in
/// bytes are additional fields here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Version that samite's server announces.
    pub version: Version,
    /// Numbers of operations and element types.
    pub numbers: &'static Release,
    /// Bytes of the greeting for the network capabilities of the peer.
    pub capabilities: usize,
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
};

/// Known protocols.
pub const KNOWN: &[Protocol] = &[V7];

impl Protocol {
    /// Returns the protocol of a server that announces `version`.
    ///
    /// # Errors
    /// If the version is unknown. The error lists the known ones.
    pub fn for_version(version: Version) -> Result<&'static Protocol, UnsupportedConversion> {
        let is_match = |known: &&Protocol| {
            known.version.major == version.major && version.minor <= known.version.minor
        };
        KNOWN.iter().find(is_match).ok_or_else(|| {
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
    fn only_known_protocol_versions_are_accepted() {
        let version = |major, minor, patch| Version {
            major,
            minor,
            patch,
        };
        assert_eq!(Protocol::for_version(version(7, 0, 0)), Ok(&V7));
        assert_eq!(Protocol::for_version(version(7, 0, 9)), Ok(&V7));
        for other in [version(6, 0, 0), version(7, 1, 0), version(8, 0, 0)] {
            let error = Protocol::for_version(other).unwrap_err();
            assert!(error.contains(&other.to_string()) && error.contains("7.0.0"));
        }
    }
}
