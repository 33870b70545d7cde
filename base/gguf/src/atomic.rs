//! Atomic files: complete under their name, or not there at all.

use crate::error::{Error, Result};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::NamedTempFile;

/// Existing temporary files.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Deletes the temporary files of all [`AtomicFile`]s that are not committed, for a program that
/// exits without dropping them, for example in a signal handler. While the result is held, other
/// threads block when they create or commit a file, so that they leave no files after until the
/// program exits. Committing a deleted file fails afterwards.
#[must_use = "other threads go on to make files when this is dropped"]
pub fn remove_unfinished_files() -> UnfinishedFiles {
    let mut files = unfinished();
    for path in files.drain(..) {
        // A file that cannot be removed only takes space.
        let _ = std::fs::remove_file(path);
    }
    UnfinishedFiles { _files: files }
}

/// Blocks creating and committing files while held: see [`remove_unfinished_files`].
#[derive(Debug)]
pub struct UnfinishedFiles {
    _files: MutexGuard<'static, Vec<PathBuf>>,
}

/// A file under a temporary name next to its target. [`commit`](Self::commit) renames it, replacing
/// an existing target. Dropping it without that deletes it. [`remove_unfinished_files`] deletes all
/// of them if nothing is dropped.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    /// `None` after the commit.
    file: Option<BufWriter<NamedTempFile>>,
}

impl AtomicFile {
    /// Creates the temporary file. As for any new file, the process's umask decides about access by
    /// others.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if `target` exists but is not a regular file, or
    /// [`crate::ErrorKind::Io`].
    pub fn create(target: impl AsRef<Path>) -> Result<Self> {
        Self::with_mode(target.as_ref(), 0o666)
    }

    /// Creates the temporary file. On Unix, only the owner may read it and the target.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn private(target: impl AsRef<Path>) -> Result<Self> {
        Self::with_mode(target.as_ref(), 0o600)
    }

    fn with_mode(target: &Path, mode: u32) -> Result<Self> {
        let not_a_file = || {
            Error::invalid("", "is not a name for a regular file: name another target")
                .in_file(target)
        };
        if std::fs::metadata(target).is_ok_and(|about| !about.is_file()) {
            return Err(not_a_file());
        }
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(target.file_name().ok_or_else(not_a_file)?);
        prefix.push(".");
        let folder = match target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(".tmp");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
        #[cfg(not(unix))]
        let _ = mode;
        // Under the lock, so that no file is created while all are removed.
        let mut unfinished = unfinished();
        let file = builder.tempfile_in(folder).map_err(|error| {
            // Only the kind of the error matters: its text names the folder.
            let error = io::Error::from(error.kind());
            let doing = match error.kind() {
                io::ErrorKind::NotFound => "its folder does not exist",
                _ => "cannot create a temporary file beside it",
            };
            Error::io(doing, &error).in_file(target)
        })?;
        unfinished.push(file.path().to_owned());
        Ok(AtomicFile {
            target: target.to_owned(),
            file: Some(BufWriter::with_capacity(buffer_bytes(), file)),
        })
    }

    /// Returns the path that the file will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Returns the position of the next byte. Flushes everything before it to the system.
    pub(crate) fn position(&mut self) -> Result<u64> {
        let position = self.flush().and_then(|()| match &mut self.file {
            Some(file) => file.get_mut().as_file_mut().stream_position(),
            None => Err(io::ErrorKind::NotConnected.into()),
        });
        position.map_err(|error| Error::io("cannot write", &error))
    }

    /// Sets the position of the next byte.
    pub(crate) fn set_position(&mut self, position: u64) -> Result<()> {
        let moved = match &mut self.file {
            Some(file) => file.seek(SeekFrom::Start(position)),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        moved
            .map(|_| ())
            .map_err(|error| Error::io("cannot write", &error))
    }

    /// Writes `bytes` at `position`, from any thread.
    pub(crate) fn write_at(&self, bytes: &[u8], position: u64) -> Result<()> {
        let written = match &self.file {
            Some(file) => write_all_at(file.get_ref().as_file(), bytes, position),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        written.map_err(|error| Error::io("cannot write", &error).in_file(&self.target))
    }

    /// Makes the content durable and renames the file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Io`]. Then the target is unchanged.
    pub fn commit(mut self) -> Result<()> {
        let Some(mut file) = self.file.take() else {
            return Ok(());
        };
        let path = file.get_ref().path().to_owned();
        let flushed = file
            .flush()
            .and_then(|()| file.get_ref().as_file().sync_all());
        // The buffer is empty, or its content must not be written any more.
        let (file, _) = file.into_parts();
        let mut unfinished = unfinished();
        let committed = flushed.and_then(|()| {
            let persisted = file.persist(&self.target);
            persisted.map(|_| ()).map_err(|failed| failed.error)
        });
        unfinished.retain(|other| *other != path);
        drop(unfinished);
        committed.map_err(|error| Error::io("cannot finish the file", &error).in_file(&self.target))
    }
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], position: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, position)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, position) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                position += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the size of the write buffer, which is large if there is memory for it.
fn buffer_bytes() -> usize {
    const LARGE: usize = 1 << 20;
    const SMALL: usize = 8 << 10;
    match samite_core::ask_for_memory(LARGE, "what is to be written") {
        Ok(()) => LARGE,
        Err(_) => SMALL,
    }
}

#[cfg(not(any(unix, windows)))]
fn write_all_at(_file: &File, _bytes: &[u8], _position: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.file {
            Some(file) => file.write(bytes),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else {
            return;
        };
        // Does not write the buffered bytes.
        let (file, _) = file.into_parts();
        let path = file.path().to_owned();
        let mut unfinished = unfinished();
        if let Err(error) = file.close()
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot delete {}: {error}", path.display());
        }
        unfinished.retain(|other| *other != path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[cfg(unix)]
    #[test]
    fn private_files_are_readable_only_by_their_owner() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a");
        // It also replaces a file that everyone could read.
        std::fs::write(&target, "old").unwrap();
        let mut file = AtomicFile::private(&target).unwrap();
        file.write_all(b"new").unwrap();
        file.commit().unwrap();
        let mode = std::fs::metadata(&target).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn atomic_files_appear_complete_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model.gguf");
        std::fs::write(&target, b"old").unwrap();

        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);

        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"new").unwrap();
        file.commit().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn file_permissions_follow_the_umask() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let usual = dir.path().join("usual");
        std::fs::write(&usual, b"").unwrap();
        let target = dir.path().join("target");
        AtomicFile::create(&target).unwrap().commit().unwrap();
        let mode = |path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&target), mode(&usual));
    }

    #[test]
    fn only_regular_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for target in [dir.path(), Path::new("/dev/null"), Path::new("..")] {
            assert_eq!(
                AtomicFile::create(target).unwrap_err().kind(),
                ErrorKind::InvalidArgument
            );
        }
        let missing = AtomicFile::create(dir.path().join("no/such/dir.gguf")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Io(io::ErrorKind::NotFound));
    }
}
