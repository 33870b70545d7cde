//! A file that appears under its name when it is complete, or not at all.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file under a temporary name beside its target. [`commit`](Self::commit) gives it its name, replacing what had it;
/// dropping it without that deletes it.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    /// `None` once the file is committed.
    file: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Creates the temporary file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if `target` exists but is no regular file; [`crate::ErrorKind::Io`].
    pub fn create(target: impl AsRef<Path>) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let target = target.as_ref();
        let not_a_file = || {
            Error::invalid("", "is not a name for a regular file: name another target")
                .in_file(target)
        };
        if std::fs::metadata(target).is_ok_and(|about| !about.is_file()) {
            return Err(not_a_file());
        }
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name().ok_or_else(not_a_file)?);
        name.push(format!(
            ".{}-{}.tmp",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        let temporary = target.with_file_name(name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(|error| {
                let doing = match error.kind() {
                    std::io::ErrorKind::NotFound => "its folder does not exist",
                    _ => "cannot create a temporary file beside it",
                };
                Error::io(doing, &error).in_file(target)
            })?;
        Ok(AtomicFile {
            target: target.to_owned(),
            temporary,
            file: Some(BufWriter::with_capacity(1 << 20, file)),
        })
    }

    /// The path that the file will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where the next byte goes, with everything before it handed to the system.
    pub(crate) fn position(&mut self) -> Result<u64> {
        let position = self.flush().and_then(|()| match &mut self.file {
            Some(file) => file.get_mut().stream_position(),
            None => Err(io::ErrorKind::NotConnected.into()),
        });
        position.map_err(|error| Error::io("cannot write", &error))
    }

    /// Lets the next byte go to `position`.
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
            Some(file) => write_all_at(file.get_ref(), bytes, position),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        written.map_err(|error| Error::io("cannot write", &error).in_file(&self.target))
    }

    /// Makes the content durable and gives the file its name.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Io`]; then the target is as it was.
    pub fn commit(mut self) -> Result<()> {
        let commit = |file: &mut BufWriter<File>, temporary: &Path, target: &Path| {
            file.flush()?;
            file.get_ref().sync_all()?;
            std::fs::rename(temporary, target)
        };
        if let Some(file) = &mut self.file {
            commit(file, &self.temporary, &self.target).map_err(|error| {
                Error::io("cannot finish the file", &error).in_file(&self.target)
            })?;
        }
        self.file = None;
        Ok(())
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
        if let Some(file) = self.file.take() {
            // Closed first, without writing what is still buffered: some systems do not delete open files.
            drop(file.into_parts());
            if let Err(error) = std::fs::remove_file(&self.temporary) {
                tracing::warn!("cannot delete {}: {error}", self.temporary.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn appears_complete_or_not_at_all() {
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
