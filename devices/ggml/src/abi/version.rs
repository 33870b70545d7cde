//! The ggml releases to which these structures apply.

use samite_wire::numbers::{self, Release};
use std::fmt;

/// A release of ggml, with all its patches. Each differs from the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// ggml 0.25: interface version 2.
    V25,
    /// ggml 0.26: interface version 3. Buffer types can report the memory that several tensors need
    /// together.
    V26,
    /// ggml 0.27: another operation, so that the numbers of later ones moved.
    V27,
    /// ggml 0.28: buffers have functions for several tensors at once; another element type.
    V28,
}

/// A version against which these structures were not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVersion(String);

impl fmt::Display for UnknownVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let releases = Version::ALL.map(|known| known.to_string()).join(", ");
        let UnknownVersion(found) = self;
        write!(
            f,
            "ggml {found}: the plugin interface of this version is not known; known are {releases}"
        )
    }
}

/// Interfaces against which these structures were checked.
///
/// # A new release
/// Compare its `ggml-backend-impl.h`, `ggml-impl.h` (`ggml_cgraph`) and `ggml.h` (`ggml_tensor` and
/// the enumerations) with those of the release before.
/// 1. Add a [`Version`] and a line here. The compiler reports the code that depends on versions.
/// 2. If the numbers of operations or types moved, add them to [`samite_wire::numbers`].
/// 3. If a table of functions grew, give it a new structure in `buffer.rs`. Functions that were
///    added at the end of a table need nothing else.
/// 4. Load an upstream plugin of the release, and load `libggml_samite.so` in its programs.
const KNOWN: [InterfaceRelease; 4] = [
    InterfaceRelease {
        version: Version::V25,
        release: 25,
        api: 2,
        numbers: &numbers::V25,
    },
    InterfaceRelease {
        version: Version::V26,
        release: 26,
        api: 3,
        numbers: &numbers::V25,
    },
    InterfaceRelease {
        version: Version::V27,
        release: 27,
        api: 3,
        numbers: &numbers::V27,
    },
    InterfaceRelease {
        version: Version::V28,
        release: 28,
        api: 3,
        numbers: &numbers::V28,
    },
];

/// A known interface.
struct InterfaceRelease {
    version: Version,
    /// Release 0.x with all its patches.
    release: u32,
    /// Value of `api_version` of a [`Reg`](super::Reg). It does not identify the interface.
    api: i32,
    /// Numbers of operations and types.
    numbers: &'static Release,
}

impl Version {
    /// All known versions, the newest last.
    pub const ALL: [Version; 4] = [Version::V25, Version::V26, Version::V27, Version::V28];

    /// Returns the interface of the release `text`, such as `0.25.3`.
    ///
    /// # Errors
    /// Returns [`UnknownVersion`] for releases that are not in the table: the structures changed
    /// often, not always together with the interface version.
    pub fn of_release(text: &str) -> Result<Self, UnknownVersion> {
        let mut parts = text.split(['.', '-', '+']);
        let release = match (parts.next(), parts.next()) {
            (Some("0"), Some(release)) => release.parse().ok(),
            _ => None,
        };
        let mut known = KNOWN.iter();
        match known.find(|known| release == Some(known.release)) {
            Some(known) => Ok(known.version),
            None => Err(UnknownVersion(text.to_owned())),
        }
    }

    fn interface(self) -> &'static InterfaceRelease {
        &KNOWN[self as usize]
    }

    /// Returns the value of `api_version` of a [`Reg`](super::Reg).
    pub fn api(self) -> i32 {
        self.interface().api
    }

    /// Returns the numbers of operations and element types.
    pub fn numbers(self) -> &'static Release {
        self.interface().numbers
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0.{}", self.interface().release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_releases_have_an_interface() {
        assert_eq!(Version::of_release("0.25.3"), Ok(Version::V25));
        assert_eq!(Version::of_release("0.25.1-dirty"), Ok(Version::V25));
        for (version, text, api) in [
            (Version::V25, "0.25.0", 2),
            (Version::V26, "0.26.0", 3),
            (Version::V27, "0.27.0", 3),
            (Version::V28, "0.28.1", 3),
        ] {
            assert_eq!(Version::of_release(text), Ok(version));
            assert_eq!((version.api(), version.interface().version), (api, version));
        }
        for text in ["0.24.9", "0.29.0", "1.25.0", "0.250.1", "", "0.25x"] {
            let error = Version::of_release(text).unwrap_err().to_string();
            assert!(
                error.contains("known are 0.25, 0.26, 0.27, 0.28"),
                "{error}"
            );
        }
    }
}
