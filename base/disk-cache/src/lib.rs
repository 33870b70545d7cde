//! Files of facts about the machine, its devices and libraries, in the user's cache folder.
//!
//! Without such a folder, or if it cannot be written, each run finds the facts out again.
#![forbid(unsafe_code)]

use std::fs::{File, Metadata, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Result, Write};
use std::path::{Path, PathBuf};

/// Returns the user's folder for data that can be found out again: `samite` in the system's cache
/// folder. `None` if the environment does not name one.
pub fn cache_folder() -> Option<PathBuf> {
    let path = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let folder = if cfg!(windows) {
        path("LOCALAPPDATA")?
    } else if cfg!(target_os = "macos") {
        path("HOME")?.join("Library/Caches")
    } else {
        path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?
    };
    Some(folder.join("samite"))
}

/// A file of facts about one subject.
#[derive(Debug)]
pub struct CacheFile {
    path: PathBuf,
    /// The first line. It has the version of samite and all that the facts depend on.
    subject: String,
}

impl CacheFile {
    /// Returns the file in `folder` for `subject`. Each `name` and `key` has one: a new subject
    /// replaces the facts about the old one.
    pub fn new(folder: &Path, name: &str, key: impl Hash, subject: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let subject = format!("samite {} {name} {subject}", env!("CARGO_PKG_VERSION"));
        CacheFile {
            path: folder.join(format!("{name}-{:016x}", hasher.finish())),
            subject: subject.replace('\n', " "),
        }
    }

    /// Returns the content if it is about this subject.
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes = std::fs::read(&self.path).ok()?;
        self.without_subject(&bytes).map(<[u8]>::to_vec)
    }

    /// Returns the result of [`read`](CacheFile::read) as text.
    pub fn text(&self) -> Option<String> {
        String::from_utf8(self.read()?).ok()
    }

    fn without_subject<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let rest = bytes.strip_prefix(self.subject.as_bytes())?;
        rest.strip_prefix(b"\n")
    }

    /// Stores `bytes` if that is possible.
    pub fn write(&self, bytes: &[u8]) {
        let whole = [self.subject.as_bytes(), b"\n", bytes].concat();
        if let Some(folder) = self.path.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        // Two processes may write at once; a reader sees one version or the other.
        let unfinished = self.path.with_extension(std::process::id().to_string());
        let done = write_private(&unfinished, &whole)
            .and_then(|()| std::fs::rename(&unfinished, &self.path));
        if let Err(error) = done {
            tracing::debug!("{} is not kept: {error}", self.path.display());
            let _ = std::fs::remove_file(&unfinished);
        }
    }

    /// Returns what [`write_trusted`](CacheFile::write_trusted) stored. The content must be
    /// complete and about this subject, and only this user may be able to write the file. On
    /// systems other than Unix, the user's folder is assumed to be private.
    pub fn read_trusted(&self) -> Option<Vec<u8>> {
        let refused = |why: &str| {
            tracing::warn!("{} is not used: {why}", self.path.display());
            None
        };
        let mut file = File::open(&self.path).ok()?;
        let about = file.metadata().ok()?;
        if !about.is_file() || !is_private(&about) {
            return refused("others than its owner may write it, or it is another user's");
        }
        if about.len() > MAX_TRUSTED as u64 {
            return refused("it is too large");
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let (sum, data) = self.without_subject(&bytes)?.split_first_chunk::<8>()?;
        if *sum != self.sum(data) {
            return refused("it is damaged");
        }
        Some(data.to_vec())
    }

    /// Stores `bytes` that a later run will trust, with a checksum and in a file that only this
    /// user can write. Does nothing if the file would be too large.
    pub fn write_trusted(&self, bytes: &[u8]) {
        if bytes.len() + self.subject.len() + 16 <= MAX_TRUSTED {
            self.write(&[&self.sum(bytes), bytes].concat());
        }
    }

    fn sum(&self, bytes: &[u8]) -> [u8; 8] {
        let mut hasher = DefaultHasher::new();
        (&self.subject, bytes).hash(&mut hasher);
        hasher.finish().to_le_bytes()
    }
}

/// Maximum size in bytes of a trusted file.
const MAX_TRUSTED: usize = 64 << 20;

/// Writes a file that only this user can read and write.
fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = OpenOptions::new();
    // A file left by another user must not be reused.
    let _ = std::fs::remove_file(path);
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)?.write_all(bytes)
}

/// Returns whether this user owns the file and no other user can write it.
#[cfg(unix)]
fn is_private(about: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn is_private(_: &Metadata) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_facts_about_one_subject() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("new");
        let file = |key, subject| CacheFile::new(&inner, "speed", key, subject);
        assert_eq!(file(1, "a card").text(), None);
        file(1, "a card").write(b"3");
        file(2, "a card").write(b"4");
        assert_eq!(file(1, "a card").text().unwrap(), "3");
        assert_eq!(file(2, "a card").text().unwrap(), "4");
        assert_eq!(file(1, "a card with a new\ndriver").text(), None);
        file(1, "a card with a new\ndriver").write(b"5");
        assert_eq!(file(1, "a card with a new\ndriver").text().unwrap(), "5");
        assert_eq!(file(1, "a card").text(), None);
        assert_eq!(std::fs::read_dir(&inner).unwrap().count(), 2);
    }

    #[test]
    fn only_intact_own_files_about_the_subject_are_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let file = |subject| CacheFile::new(folder.path(), "pipelines", 1, subject);
        let (mine, newer) = (file("driver 1.0"), file("driver 1.1"));
        assert_eq!(mine.read_trusted(), None);
        mine.write_trusted(b"machine code");
        assert_eq!(mine.read_trusted().unwrap(), b"machine code");
        assert_eq!(newer.read_trusted(), None);
        // A flipped bit or a truncated file must be detected.
        let whole = std::fs::read(&mine.path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            std::fs::write(&mine.path, damaged).unwrap();
            assert_eq!(mine.read_trusted(), None, "byte {at}");
            std::fs::write(&mine.path, &whole[..at]).unwrap();
            assert_eq!(mine.read_trusted(), None, "{at} bytes");
        }
        std::fs::write(&mine.path, &whole).unwrap();
        assert!(mine.read_trusted().is_some());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |mode| {
                let mode = std::fs::Permissions::from_mode(mode);
                std::fs::set_permissions(&mine.path, mode).unwrap();
            };
            for wrong in [0o620, 0o602, 0o666] {
                mode(wrong);
                assert_eq!(mine.read_trusted(), None, "{wrong:o}");
            }
            mode(0o644);
            assert!(mine.read_trusted().is_some());
            mine.write_trusted(b"again");
            let mode = std::fs::metadata(&mine.path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }
}
