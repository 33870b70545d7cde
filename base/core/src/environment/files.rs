//! Files that are read.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;

/// Finds files by path.
pub trait Files: Send + Sync + Debug {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`ErrorKind::IsADirectory`] for a directory, [`ErrorKind::NotSeekable`] for anything else that is no regular file, such as a pipe; or what
    /// the system says.
    fn open(&self, path: &Path) -> Result<Arc<dyn File>>;
}

/// An open file. It may change, or become shorter, while it is open.
pub trait File: Send + Sync + Debug {
    /// Its size in bytes, now.
    ///
    /// # Errors
    /// What the system says.
    fn size(&self) -> Result<u64>;

    /// Fills `buffer` from byte `offset` on. There is no position in the file, so that threads can read at the same time.
    ///
    /// # Errors
    /// [`ErrorKind::UnexpectedEof`] if the file ends before; or what the system says.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;

    /// The file of the operating system, if it is one, to map it into memory. Without one, files are read.
    fn as_system_file(&self) -> Option<&std::fs::File> {
        None
    }
}

/// The files of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFiles;

impl Files for SystemFiles {
    fn open(&self, path: &Path) -> Result<Arc<dyn File>> {
        // Asked before opening: opening a pipe would wait for its other end.
        let about = std::fs::metadata(path)?;
        if about.is_dir() {
            return Err(ErrorKind::IsADirectory.into());
        }
        if !about.is_file() {
            return Err(ErrorKind::NotSeekable.into());
        }
        Ok(Arc::new(std::fs::File::open(path)?))
    }
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

    // The standard library reads at an offset on Unix and Windows only.
    #[cfg(not(any(unix, windows)))]
    fn read_exact_at(&self, _buffer: &mut [u8], _offset: u64) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    fn as_system_file(&self) -> Option<&std::fs::File> {
        Some(self)
    }
}

/// A file that is part of the program.
impl File for &'static [u8] {
    fn size(&self) -> Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.get(at..));
        match rest.and_then(|rest| rest.get(..buffer.len())) {
            Some(part) => {
                buffer.copy_from_slice(part);
                Ok(())
            }
            None => Err(Error::from(ErrorKind::UnexpectedEof)),
        }
    }
}
