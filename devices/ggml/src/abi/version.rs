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
        write!(
            f,
            "ggml {}: the plugin interface of this version is not known; known are 0.25 and 0.26",
            self.0
        )
    }
}

impl Version {
    /// The interface of the release `text`, such as `0.25.3`.
    ///
    /// # Errors
    /// [`UnknownVersion`] for all releases but 0.25 and 0.26: the structures changed often, and not always with the
    /// number of the interface.
    pub fn of_release(text: &CStr) -> Result<Self, UnknownVersion> {
        let text = text.to_string_lossy();
        let mut parts = text.split(['.', '-', '+']);
        match (parts.next(), parts.next()) {
            (Some("0"), Some("25")) => Ok(Version::V2),
            (Some("0"), Some("26")) => Ok(Version::V3),
            _ => Err(UnknownVersion(text.into_owned())),
        }
    }

    /// What `api_version` of a [`Reg`](super::Reg) is.
    pub fn api(self) -> i32 {
        match self {
            Version::V2 => 2,
            Version::V3 => 3,
        }
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
        for text in [c"0.24.9", c"0.27.0", c"1.25.0", c"0.250.1", c"", c"0.25x"] {
            let error = Version::of_release(text).unwrap_err().to_string();
            assert!(error.contains("known are 0.25 and 0.26"), "{error}");
        }
    }
}
