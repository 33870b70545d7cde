//! Which releases of ggml these structures are those of.

use std::ffi::CStr;
use std::fmt;

/// The interface of a range of ggml's releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// Interface version 2, as in ggml 0.25.
    V2,
    /// Interface version 3, as in ggml 0.26: buffer types can say what several tensors need together.
    V3,
}

/// A version that these structures were not checked against.
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

/// An interface, and where it is used.
struct Known {
    /// The release 0.x with all its patches.
    release: u32,
    /// What `api_version` of a [`Reg`](super::Reg) is.
    api: i32,
    version: Version,
}

/// The interfaces that these structures were checked against. Another release is one more line; if its structures differ, it is one more
/// [`Version`], and the compiler names the places that tell versions apart.
const KNOWN: [Known; 2] = [
    Known {
        release: 25,
        api: 2,
        version: Version::V2,
    },
    Known {
        release: 26,
        api: 3,
        version: Version::V3,
    },
];

impl Version {
    /// The interface of the release `text`, such as `0.25.3`.
    ///
    /// # Errors
    /// [`UnknownVersion`] for releases that are not in the table: the structures changed often, and not always with the
    /// number of the interface.
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

    /// The interface with this number, as a plugin says it that comes without its release.
    pub fn of_api(api: i32) -> Option<Self> {
        let mut known = KNOWN.iter();
        Some(known.find(|known| known.api == api)?.version)
    }

    /// The numbers of all known interfaces, for messages.
    pub fn known_apis() -> String {
        KNOWN.map(|known| known.api.to_string()).join(" and ")
    }

    /// What `api_version` of a [`Reg`](super::Reg) is.
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
