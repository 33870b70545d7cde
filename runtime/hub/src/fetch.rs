//! Downloads.

use crate::cache::Cache;
use crate::client::{Failed, Hub};
use crate::error::{Error, Result};
use crate::listing::{Listing, RemoteFile};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use samite_core::CancelToken;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::http::{StatusCode, header};

/// Progress of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownloadProgress {
    /// This many bytes of the file have been received.
    Received(u64),
    /// This many bytes of the file have been hashed.
    Checked(u64),
}

/// Read size in bytes.
const PIECE: usize = 256 << 10;
/// Polling interval while another process downloads the same file.
const LOOK: Duration = Duration::from_millis(100);

/// A partially downloaded file.
struct Unfinished<'a> {
    file: File,
    path: PathBuf,
    length: u64,
    wanted: &'a RemoteFile,
}

impl Hub {
    /// Downloads a file into `cache`, unless it is cached already, and returns its path. Reports to
    /// `progress`.
    ///
    /// # Errors
    /// [`Error::Connection`] after several attempts without progress; [`Error::Damaged`],
    /// [`Error::Answer`], [`Error::Refused`], [`Error::NotFound`], [`Error::Io`];
    /// [`Error::Cancelled`].
    pub fn fetch(
        &self,
        cache: &Cache,
        listing: &Listing,
        wanted: &RemoteFile,
        progress: &mut dyn FnMut(DownloadProgress),
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let check = || cancel.check().map_err(|_| Error::Cancelled);
        let blob = cache.blob(&listing.repository, &wanted.blob);
        let lock_path = cache.lock(&listing.repository, &wanted.blob);
        for path in [&blob, &lock_path] {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
            }
        }
        let lock = File::create(&lock_path).map_err(Error::io(&lock_path))?;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    check()?;
                    self.options.clock.sleep(LOOK);
                }
                Err(TryLockError::Error(error)) => return Err(Error::io(&lock_path)(error)),
            }
        }
        if !blob
            .metadata()
            .is_ok_and(|known| known.len() == wanted.size)
        {
            let mut unfinished = Unfinished::open(&blob, wanted)?;
            self.complete(&mut unfinished, listing, progress, cancel)?;
            unfinished.verify(progress, &check)?;
            std::fs::rename(&unfinished.path, &blob).map_err(Error::io(&blob))?;
        }
        cache.link(listing, wanted)
    }

    /// Downloads the missing bytes.
    fn complete(
        &self,
        unfinished: &mut Unfinished<'_>,
        listing: &Listing,
        progress: &mut dyn FnMut(DownloadProgress),
        cancel: &CancelToken,
    ) -> Result<()> {
        let url = self.address(listing, &unfinished.wanted.path);
        let mut attempt = 0;
        let mut reached = unfinished.length;
        progress(DownloadProgress::Received(unfinished.length));
        while unfinished.length < unfinished.wanted.size {
            let Err(failed) = self.receive(&url, unfinished, progress, cancel) else {
                continue;
            };
            if !failed.again {
                return Err(failed.error);
            }
            attempt = if unfinished.length > reached {
                0
            } else {
                attempt + 1
            };
            reached = reached.max(unfinished.length);
            if attempt >= self.options.attempts {
                return Err(failed.error);
            }
            self.wait(&failed.error, attempt);
        }
        Ok(())
    }

    /// Sends one request for the missing bytes.
    fn receive(
        &self,
        url: &str,
        unfinished: &mut Unfinished<'_>,
        progress: &mut dyn FnMut(DownloadProgress),
        cancel: &CancelToken,
    ) -> Result<(), Failed> {
        let size = unfinished.wanted.size;
        let wrong = |problem: String| Error::Answer {
            url: url.to_owned(),
            problem,
        };
        let first = unfinished.length;
        let mut response = self.get(url, (first > 0).then_some(first))?;
        let text = |name| {
            let value = response.headers().get(name)?;
            value.to_str().ok()
        };
        if response.status() == StatusCode::PARTIAL_CONTENT {
            let expected = format!("bytes {first}-{}/{size}", size - 1);
            let range = text(header::CONTENT_RANGE).unwrap_or_default();
            if range != expected {
                return Err(wrong(format!(
                    "the server sends '{}', expected was '{expected}'",
                    range.escape_debug()
                ))
                .into());
            }
        } else {
            // A server without range support sends the whole file.
            unfinished.restart()?;
            let told = text(header::CONTENT_LENGTH).and_then(|told| told.parse::<u64>().ok());
            if let Some(told) = told.filter(|&told| told != size) {
                return Err(wrong(format!(
                    "the server sends {told} bytes, the hub says {size}"
                ))
                .into());
            }
        }
        let mut reader = response.body_mut().with_config().limit(u64::MAX).reader();
        let mut piece = vec![0; PIECE];
        loop {
            cancel.check().map_err(|_| Error::Cancelled)?;
            let count = reader.read(&mut piece).map_err(|error| Failed {
                error: Error::Connection {
                    url: url.to_owned(),
                    problem: format!("the connection broke off: {error}"),
                },
                again: true,
            })?;
            if count == 0 {
                break;
            }
            if count as u64 > size - unfinished.length {
                return Err(wrong(format!(
                    "the server sends more than the {size} bytes that the hub says"
                ))
                .into());
            }
            unfinished.append(&piece[..count])?;
            progress(DownloadProgress::Received(unfinished.length));
        }
        if unfinished.length < size {
            return Err(Failed {
                error: Error::Connection {
                    url: url.to_owned(),
                    problem: format!(
                        "the connection ended after {} of {size} bytes",
                        unfinished.length
                    ),
                },
                again: true,
            });
        }
        Ok(())
    }
}

impl<'a> Unfinished<'a> {
    fn open(blob: &Path, wanted: &'a RemoteFile) -> Result<Self> {
        let mut path = blob.as_os_str().to_owned();
        path.push(".incomplete");
        let path = PathBuf::from(path);
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(&path);
        let file = file.map_err(Error::io(&path))?;
        let length = file.metadata().map_err(Error::io(&path))?.len();
        let mut unfinished = Unfinished {
            file,
            path,
            length,
            wanted,
        };
        if length > wanted.size {
            unfinished.restart()?;
        }
        Ok(unfinished)
    }

    fn restart(&mut self) -> Result<()> {
        self.length = 0;
        self.file.set_len(0).map_err(Error::io(&self.path))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.path))?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Verifies the content against the hub's hash and deletes the file on a mismatch: SHA-256 for
    /// large files, git's hash for others.
    fn verify(
        &mut self,
        progress: &mut dyn FnMut(DownloadProgress),
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let io = || Error::io(&self.path);
        self.file.sync_all().map_err(io())?;
        self.file.seek(SeekFrom::Start(0)).map_err(io())?;
        let (kind, expected, mut hash) = match &self.wanted.sha256 {
            Some(expected) => ("SHA-256", expected, Context::new(&SHA256)),
            None => {
                // Git's blob hash includes a header.
                let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                hash.update(format!("blob {}\0", self.wanted.size).as_bytes());
                ("git hash", &self.wanted.blob, hash)
            }
        };
        let mut piece = vec![0; PIECE];
        let mut done = 0;
        loop {
            check()?;
            let count = self.file.read(&mut piece).map_err(io())?;
            if count == 0 {
                break;
            }
            hash.update(&piece[..count]);
            done += count as u64;
            progress(DownloadProgress::Checked(done));
        }
        let bytes = hash.finish();
        let found: String = bytes
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        if &found == expected {
            return Ok(());
        }
        std::fs::remove_file(&self.path).map_err(io())?;
        Err(Error::Damaged {
            name: self.wanted.path.clone(),
            problem: format!("its {kind} is {found}, the hub says {expected}"),
        })
    }
}
