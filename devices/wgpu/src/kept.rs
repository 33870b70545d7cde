//! What is kept about an adapter and its driver, from one run of the program to the next.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// A file in the user's folder for what can be found out again. Where there is no such folder, or it cannot be written, things are found out anew.
pub struct Kept {
    file: PathBuf,
    /// What it is true of: the file's first line.
    subject: String,
}

impl Kept {
    /// What is kept under the name `what`.
    pub fn of(info: &wgpu::AdapterInfo, what: &str) -> Option<Self> {
        Some(Self::in_folder(samite_core::cache_folder()?, info, what))
    }

    fn in_folder(folder: PathBuf, info: &wgpu::AdapterInfo, what: &str) -> Self {
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
        Kept {
            file: folder.join(format!("wgpu-{what}-{:016x}", hasher.finish())),
            subject,
        }
    }

    /// What is kept, if it is about this adapter and driver.
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes = std::fs::read(&self.file).ok()?;
        let rest = bytes.strip_prefix(self.subject.as_bytes())?;
        rest.strip_prefix(b"\n").map(<[u8]>::to_vec)
    }

    /// [`read`](Kept::read), as text.
    pub fn text(&self) -> Option<String> {
        String::from_utf8(self.read()?).ok()
    }

    /// Keeps `bytes`.
    pub fn write(&self, bytes: &[u8]) {
        let whole = [self.subject.as_bytes(), b"\n", bytes].concat();
        if let Some(folder) = self.file.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        // Two programs may do this at once; a reader sees one or the other.
        let unfinished = self.file.with_extension(std::process::id().to_string());
        let done = std::fs::write(&unfinished, whole)
            .and_then(|()| std::fs::rename(&unfinished, &self.file));
        if let Err(error) = done {
            tracing::debug!("{} is not kept: {error}", self.file.display());
            let _ = std::fs::remove_file(&unfinished);
        }
    }
}
