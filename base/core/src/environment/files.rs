//! Files for reading.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;

/// Finds files by path.
pub trait Files: Send + Sync + Debug {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`ErrorKind::IsADirectory`] for a directory, [`ErrorKind::NotSeekable`] for anything else
    /// that is not a regular file, such as a pipe. Otherwise the system's error.
    fn open(&self, path: &Path) -> Result<Arc<dyn File>>;

    /// Does what [`open`](Self::open) does, but bypasses the system's page cache. For data that is
    /// read once, which would only evict other data from the cache.
    ///
    /// # Errors
    /// As [`open`](Self::open), and if direct reading is not possible.
    fn open_direct(&self, _path: &Path) -> Result<Arc<dyn File>> {
        Err(ErrorKind::Unsupported.into())
    }
}

/// An open file. It may change or get shorter while it is open.
pub trait File: Send + Sync + Debug {
    /// Returns its current size in bytes.
    ///
    /// # Errors
    /// The system's error.
    fn size(&self) -> Result<u64>;

    /// Fills `buffer` from byte `offset` on. The file has no position, so threads can read
    /// concurrently.
    ///
    /// # Errors
    /// [`ErrorKind::UnexpectedEof`] if the file ends too early. Otherwise the system's error.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;

    /// Hints that the file will soon be read from start to end, so that the system reads ahead.
    fn advise_in_order(&self) {}

    /// Returns the operating system's file, if it is one, so that it can be mapped into memory.
    /// Other files are read.
    fn as_system_file(&self) -> Option<&std::fs::File> {
        None
    }
}

/// Returns whether this user or root owns the file, so that no other user can have chosen its
/// content. Always true on systems without owners.
pub fn is_own(about: &std::fs::Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        // SAFETY: the function has no parameters and cannot fail.
        let user = unsafe { libc::geteuid() };
        [0, user].contains(&about.uid())
    }
    #[cfg(not(unix))]
    {
        let _ = about;
        true
    }
}

/// The files of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFiles;

impl Files for SystemFiles {
    fn open(&self, path: &Path) -> Result<Arc<dyn File>> {
        regular_file(path)?;
        Ok(Arc::new(std::fs::File::open(path)?))
    }

    #[cfg(target_os = "linux")]
    fn open_direct(&self, path: &Path) -> Result<Arc<dyn File>> {
        super::direct::open(path)
    }
}

/// Refuses everything but regular files. Must be called before opening, because opening a pipe
/// would wait for its other end.
pub(super) fn regular_file(path: &Path) -> Result<()> {
    let about = std::fs::metadata(path)?;
    if about.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !about.is_file() {
        return Err(ErrorKind::NotSeekable.into());
    }
    Ok(())
}

impl File for std::fs::File {
    fn size(&self) -> Result<u64> {
        Ok(self.metadata()?.len())
    }

    #[cfg(unix)]
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buffer, offset)
    }

    #[cfg(windows)]
    fn read_exact_at(&self, mut buffer: &mut [u8], mut offset: u64) -> Result<()> {
        while !buffer.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(self, buffer, offset) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    buffer = &mut buffer[count..];
                    offset += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    // The standard library reads at an offset only on Unix and Windows.
    #[cfg(not(any(unix, windows)))]
    fn read_exact_at(&self, _buffer: &mut [u8], _offset: u64) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    fn advise_in_order(&self) {
        // It is only a hint.
        let _ = advise_in_order(self);
    }

    fn as_system_file(&self) -> Option<&std::fs::File> {
        Some(self)
    }
}

#[cfg(target_os = "linux")]
fn advise_in_order(file: &std::fs::File) -> Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open while `file` is borrowed, and the call does not touch memory.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_SEQUENTIAL) } {
        0 => Ok(()),
        number => Err(Error::from_raw_os_error(number)),
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_in_order(_: &std::fs::File) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// A file that is part of the program.
impl File for &'static [u8] {
    fn size(&self) -> Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        read_part(self, buffer, offset)
    }
}

impl File for Arc<[u8]> {
    fn size(&self) -> Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        read_part(self, buffer, offset)
    }
}

fn read_part(bytes: &[u8], buffer: &mut [u8], offset: u64) -> Result<()> {
    let rest = usize::try_from(offset).ok().and_then(|at| bytes.get(at..));
    match rest.and_then(|rest| rest.get(..buffer.len())) {
        Some(part) => {
            buffer.copy_from_slice(part);
            Ok(())
        }
        None => Err(Error::from(ErrorKind::UnexpectedEof)),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn read_advice_works_for_files_but_not_for_pipes() {
        let program = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        advise_in_order(&program).unwrap();
        let (pipe, _other_end) = std::io::pipe().unwrap();
        let pipe = std::fs::File::from(std::os::fd::OwnedFd::from(pipe));
        assert!(advise_in_order(&pipe).is_err());
    }
}
