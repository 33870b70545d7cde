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

    /// As [`open`](Self::open), but reading goes past the page cache of the system: for data that is read once, where the cache would only push
    /// out something else.
    ///
    /// # Errors
    /// As [`open`](Self::open); also where that is not possible.
    fn open_direct(&self, _path: &Path) -> Result<Arc<dyn File>> {
        Err(ErrorKind::Unsupported.into())
    }
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

    /// Says that it will be read from the beginning to the end soon, so that the system reads ahead. A hint.
    fn advise_in_order(&self) {}

    /// The file of the operating system, if it is one, to map it into memory. Without one, files are read.
    fn as_system_file(&self) -> Option<&std::fs::File> {
        None
    }
}

/// Returns true if the owner of a file is this user or root, so that no other user can have chosen
/// its content. Always true on systems without such owners.
pub fn is_own(about: &std::fs::Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        // SAFETY: the function takes nothing and cannot fail.
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

/// Refuses everything but regular files. To be asked before opening: opening a pipe would wait for its other end.
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

    // The standard library reads at an offset on Unix and Windows only.
    #[cfg(not(any(unix, windows)))]
    fn read_exact_at(&self, _buffer: &mut [u8], _offset: u64) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    fn advise_in_order(&self) {
        // Reading works without.
        let _ = advise_in_order(self);
    }

    fn as_system_file(&self) -> Option<&std::fs::File> {
        Some(self)
    }
}

#[cfg(target_os = "linux")]
fn advise_in_order(file: &std::fs::File) -> Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open as long as `file` is borrowed, and no memory is touched.
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
    fn the_system_takes_advice_about_files_and_not_about_pipes() {
        let program = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        advise_in_order(&program).unwrap();
        let (pipe, _other_end) = std::io::pipe().unwrap();
        let pipe = std::fs::File::from(std::os::fd::OwnedFd::from(pipe));
        assert!(advise_in_order(&pipe).is_err());
    }
}
