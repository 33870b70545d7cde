//! Files that are read without the system's page cache.

use super::files::{File, regular_file};
use memmap2::MmapMut;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of offsets, lengths and addresses. They must be multiples of the disk's block size,
/// which is at most this.
const BLOCK: usize = 4096;

/// Bytes of one read, and one extra block at either end.
const BUFFER: usize = (1 << 20) + 2 * BLOCK;

/// A file opened with `O_DIRECT`.
#[derive(Debug)]
struct DirectFile {
    file: std::fs::File,
    /// Aligned buffers, at most one for each concurrent read so far.
    buffers: Mutex<Vec<MmapMut>>,
}

/// Opens a file, and tries to read it.
pub(super) fn open(path: &Path) -> Result<Arc<dyn File>> {
    regular_file(path)?;
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let file = DirectFile {
        file,
        buffers: Mutex::default(),
    };
    // Some file systems refuse only the first read.
    if file.size()? > 0 {
        file.read_exact_at(&mut [0], 0)?;
    }
    Ok(Arc::new(file))
}

impl File for DirectFile {
    fn size(&self) -> Result<u64> {
        self.file.size()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let buffers = || self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = buffers().pop();
        // Its pages are aligned, and at least as large as blocks.
        let mut aligned = kept.map_or_else(|| MmapMut::map_anon(BUFFER), Ok)?;
        let result = self.read(&mut aligned, buffer, offset);
        buffers().push(aligned);
        result
    }
}

impl DirectFile {
    fn read(&self, aligned: &mut [u8], mut buffer: &mut [u8], mut offset: u64) -> Result<()> {
        while !buffer.is_empty() {
            let skipped = (offset % BLOCK as u64) as usize;
            let wanted = aligned
                .len()
                .min(buffer.len().saturating_add(skipped).div_ceil(BLOCK) * BLOCK);
            let start = offset - skipped as u64;
            let count = match self.file.read_at(&mut aligned[..wanted], start) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                count => count?,
            };
            // After a partial block, the last one of the file, this reads the same part again.
            let Some(read) = aligned[..count]
                .get(skipped..)
                .filter(|read| !read.is_empty())
            else {
                return Err(ErrorKind::UnexpectedEof.into());
            };
            let count = read.len().min(buffer.len());
            let (filled, rest) = buffer.split_at_mut(count);
            filled.copy_from_slice(&read[..count]);
            buffer = rest;
            offset += count as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_reads_return_any_range_unchanged() {
        let path = std::env::temp_dir().join(format!("samite-direct-{}", std::process::id()));
        let content: Vec<u8> = (0..(BUFFER + 3 * BLOCK + 77) as u32)
            .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8)
            .collect();
        std::fs::write(&path, &content).unwrap();
        let file = open(&path);
        std::fs::remove_file(&path).unwrap();
        let file = match file {
            Ok(file) => file,
            Err(error) => {
                return println!("skipped: temporary files lie where O_DIRECT is refused: {error}");
            }
        };
        assert_eq!(file.size().unwrap(), content.len() as u64);
        let end = content.len();
        for range in [
            0..1,
            0..end,
            1..end,
            4095..4097,
            8192..12_288,
            77..BUFFER,
            end - 1..end,
            end - 5000..end,
            end..end,
        ] {
            let mut bytes = vec![0; range.len()];
            file.read_exact_at(&mut bytes, range.start as u64).unwrap();
            assert!(bytes == content[range.clone()], "{range:?}");
        }
        for range in [0..end + 1, end..end + 1, end + BLOCK..end + BLOCK + 1] {
            let mut bytes = vec![0; range.len()];
            let error = file
                .read_exact_at(&mut bytes, range.start as u64)
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{range:?}");
        }
    }

    #[test]
    fn files_without_disk_blocks_are_refused() {
        // It looks like a regular file, but its file system has no blocks.
        assert!(open(Path::new("/proc/self/status")).is_err());
        let error = open(Path::new("/proc")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::IsADirectory);
    }
}
