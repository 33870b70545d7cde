//! Disk cache of facts about an adapter and its driver.

use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::path::PathBuf;

/// A file in the user's cache folder. Without such a folder, or if it cannot be written, the
/// content is computed again in each run.
pub struct DiskCache {
    file: PathBuf,
    /// The file's first line. It identifies the adapter, its driver and the version of samite.
    subject: String,
}

impl DiskCache {
    /// Returns the cache file called `what`.
    pub fn for_adapter(info: &wgpu::AdapterInfo, what: &str) -> Option<Self> {
        Some(Self::in_folder(samite_core::cache_folder()?, info, what))
    }

    /// Returns the cache file called `what` in `folder`.
    pub fn in_folder(folder: PathBuf, info: &wgpu::AdapterInfo, what: &str) -> Self {
        let subject = format!(
            "samite {} {what} {} {:x} {:x} {} {} {}",
            env!("CARGO_PKG_VERSION"),
            info.name,
            info.vendor,
            info.device,
            info.backend,
            info.driver,
            info.driver_info,
        )
        .replace('\n', " ");
        let mut hasher = DefaultHasher::new();
        subject.hash(&mut hasher);
        DiskCache {
            file: folder.join(format!("wgpu-{what}-{:016x}", hasher.finish())),
            subject,
        }
    }

    /// Returns the content if it belongs to this adapter and driver.
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes = std::fs::read(&self.file).ok()?;
        let rest = bytes.strip_prefix(self.subject.as_bytes())?;
        rest.strip_prefix(b"\n").map(<[u8]>::to_vec)
    }

    /// Returns the result of [`read`](DiskCache::read) as text.
    pub fn text(&self) -> Option<String> {
        String::from_utf8(self.read()?).ok()
    }

    /// Stores `bytes`.
    pub fn write(&self, bytes: &[u8]) {
        let whole = [self.subject.as_bytes(), b"\n", bytes].concat();
        if let Some(folder) = self.file.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        // Two processes may write at once; a reader sees one version or the other.
        let unfinished = self.file.with_extension(std::process::id().to_string());
        let done = write_private(&unfinished, &whole)
            .and_then(|()| std::fs::rename(&unfinished, &self.file));
        if let Err(error) = done {
            tracing::debug!("{} is not kept: {error}", self.file.display());
            let _ = std::fs::remove_file(&unfinished);
        }
    }

    /// Returns what [`write_trusted`](DiskCache::write_trusted) stored. The content must be
    /// complete and belong to this adapter and driver, and only this user may be able to write the
    /// file. On systems other than Unix, the user's folder is assumed to be private.
    pub fn read_trusted(&self) -> Option<Vec<u8>> {
        let refused = |why: &str| {
            tracing::warn!("{} is not used: {why}", self.file.display());
            None
        };
        let mut file = File::open(&self.file).ok()?;
        let about = file.metadata().ok()?;
        if !about.is_file() || !is_private(&about) {
            return refused("others than its owner may write it, or it is another user's");
        }
        if about.len() > MAX_TRUSTED as u64 {
            return refused("it is too large");
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let rest = bytes.strip_prefix(self.subject.as_bytes())?;
        let (sum, data) = rest.strip_prefix(b"\n")?.split_first_chunk::<8>()?;
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
fn write_private(path: &PathBuf, bytes: &[u8]) -> std::io::Result<()> {
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
fn is_private(about: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn is_private(_: &std::fs::Metadata) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(driver: &str) -> wgpu::AdapterInfo {
        let mut info = wgpu::AdapterInfo::new(wgpu::DeviceType::Cpu, wgpu::Backend::Vulkan);
        info.driver_info = driver.to_owned();
        info
    }

    #[test]
    fn only_intact_own_cache_files_of_this_driver_are_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let kept =
            |driver| DiskCache::in_folder(folder.path().to_owned(), &info(driver), "pipelines");
        let (mine, newer) = (kept("1.0"), kept("1.1"));
        assert_eq!(mine.read_trusted(), None);
        mine.write_trusted(b"machine code");
        assert_eq!(mine.read_trusted().unwrap(), b"machine code");
        assert_eq!(newer.read_trusted(), None);
        // The file of another driver under this driver's name.
        std::fs::copy(&mine.file, &newer.file).unwrap();
        assert_eq!(newer.read_trusted(), None);
        // A flipped bit or a truncated file must be detected.
        let whole = std::fs::read(&mine.file).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            std::fs::write(&mine.file, damaged).unwrap();
            assert_eq!(mine.read_trusted(), None, "byte {at}");
            std::fs::write(&mine.file, &whole[..at]).unwrap();
            assert_eq!(mine.read_trusted(), None, "{at} bytes");
        }
        std::fs::write(&mine.file, &whole).unwrap();
        assert!(mine.read_trusted().is_some());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |mode| {
                let mode = std::fs::Permissions::from_mode(mode);
                std::fs::set_permissions(&mine.file, mode).unwrap();
            };
            for wrong in [0o620, 0o602, 0o666] {
                mode(wrong);
                assert_eq!(mine.read_trusted(), None, "{wrong:o}");
            }
            mode(0o644);
            assert!(mine.read_trusted().is_some());
            mine.write_trusted(b"again");
            let mode = std::fs::metadata(&mine.file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }
}
