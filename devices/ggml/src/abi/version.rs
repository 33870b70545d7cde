//! The ggml releases to which these structures apply.

use std::ffi::CStr;
use std::fmt;

/// Interface of a range of ggml releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// Interface version 2, as in ggml 0.25.
    V2,
    /// Interface version 3, as in ggml 0.26: buffer types can report the memory that several
    /// tensors need together.
    V3,
}

/// A version against which these structures were not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVersion(String);

impl fmt::Display for UnknownVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let releases = KNOWN
            .map(|known| format!("0.{}", known.release))
            .join(" and ");
        let UnknownVersion(found) = self;
        write!(
            f,
            "ggml {found}: the plugin interface of this version is not known; known are {releases}"
        )
    }
}

/// A known interface and its release.
struct InterfaceRelease {
    /// Release 0.x with all its patches.
    release: u32,
    /// Value of `api_version` of a [`Reg`](super::Reg).
    api: i32,
    version: Version,
}

/// Interfaces against which these structures were checked. A new release is another line. If its
/// structures differ, it is also another [`Version`], and the compiler reports the code that
/// depends on versions.
const KNOWN: [InterfaceRelease; 2] = [
    InterfaceRelease {
        release: 25,
        api: 2,
        version: Version::V2,
    },
    InterfaceRelease {
        release: 26,
        api: 3,
        version: Version::V3,
    },
];

impl Version {
    /// Returns the interface of the release `text`, such as `0.25.3`.
    ///
    /// # Errors
    /// Returns [`UnknownVersion`] for releases that are not in the table: the structures changed
    /// often, not always together with the interface version.
    pub fn of_release(text: &CStr) -> Result<Self, UnknownVersion> {
        let text = text.to_string_lossy();
        let mut parts = text.split(['.', '-', '+']);
        let release = match (parts.next(), parts.next()) {
            (Some("0"), Some(release)) => release.parse().ok(),
            _ => None,
        };
        let mut known = KNOWN.iter();
        match known.find(|known| release == Some(known.release)) {
            Some(known) => Ok(known.version),
            None => Err(UnknownVersion(text.into_owned())),
        }
    }

    /// Returns the interface with this version number, for a plugin that does not report its
    /// release.
    pub fn of_api(api: i32) -> Option<Self> {
        let mut known = KNOWN.iter();
        Some(known.find(|known| known.api == api)?.version)
    }

    /// Returns the numbers of all known interfaces, for messages.
    pub fn known_apis() -> String {
        KNOWN.map(|known| known.api.to_string()).join(" and ")
    }

    /// Returns the value of `api_version` of a [`Reg`](super::Reg).
    pub fn api(self) -> i32 {
        let mut known = KNOWN.iter();
        let known = known.find(|known| known.version == self);
        known.map_or(0, |known| known.api)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_releases_have_an_interface() {
        assert_eq!(Version::of_release(c"0.25.3"), Ok(Version::V2));
        assert_eq!(Version::of_release(c"0.25.1-dirty"), Ok(Version::V2));
        assert_eq!(Version::of_release(c"0.26.0").unwrap().api(), 3);
        for known in KNOWN {
            assert_eq!(known.version.api(), known.api);
            assert_eq!(Version::of_api(known.api), Some(known.version));
        }
        assert_eq!((Version::of_api(1), Version::of_api(4)), (None, None));
        for text in [c"0.24.9", c"0.27.0", c"1.25.0", c"0.250.1", c"", c"0.25x"] {
            let error = Version::of_release(text).unwrap_err().to_string();
            assert!(error.contains("known are 0.25 and 0.26"), "{error}");
        }
    }
}
