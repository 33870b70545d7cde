//! Download cache, shared with other Hugging Face clients.
//!
//! `models--owner--name` contains `blobs`, the contents of files; `refs/main`, a commit; and
//! `snapshots/COMMIT/PATH`, links to blobs. Files that other programs downloaded are therefore
//! found here, and vice versa.

use crate::error::{Error, Result};
use crate::listing::{Listing, RemoteFile, is_model};
use crate::reference::Reference;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// A folder of downloaded models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    folder: PathBuf,
}

/// A model in a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cached {
    /// `owner/name`.
    pub repository: String,
    /// Path in the repository; for a split model, of the first part.
    pub file: String,
    /// Shortest name, such as `owner/name:Q8_0`.
    pub name: String,
    /// Path in the file system.
    pub path: PathBuf,
    /// Size in bytes, of all parts.
    pub size: u64,
}

/// Maximum folder depth searched in a repository.
const DEEPEST: usize = 8;

impl Cached {
    /// Returns false for projectors and importance matrices, which are not models of their own.
    pub fn is_model(&self) -> bool {
        is_model(&self.file)
    }
}

impl Cache {
    /// Creates a cache in `folder`, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Cache {
            folder: folder.into(),
        }
    }

    /// Returns this user's cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else `huggingface/hub`
    /// in the user's cache folder. Returns `None` if the environment names none of them.
    pub fn of_user() -> Option<Self> {
        match std::env::var_os("HF_HUB_CACHE").filter(|folder| !folder.is_empty()) {
            Some(folder) => Some(Cache::new(folder)),
            None => Some(Cache::new(Self::home()?.join("hub"))),
        }
    }

    /// Returns the folder for all Hugging Face data.
    pub(crate) fn home() -> Option<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(home) = variable("HF_HOME") {
            return Some(home.into());
        }
        let caches = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| {
            let home = variable("HOME").or_else(|| variable("USERPROFILE"))?;
            Some(PathBuf::from(home).join(".cache"))
        });
        Some(caches?.join("huggingface"))
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn repository(&self, repository: &str) -> PathBuf {
        self.folder.join(name_of(repository))
    }

    pub(crate) fn blob(&self, repository: &str, blob: &str) -> PathBuf {
        self.repository(repository).join("blobs").join(blob)
    }

    pub(crate) fn lock(&self, repository: &str, blob: &str) -> PathBuf {
        let locks = self.folder.join(".locks").join(name_of(repository));
        locks.join(format!("{blob}.lock"))
    }

    fn snapshot(&self, repository: &str, commit: &str) -> PathBuf {
        self.repository(repository).join("snapshots").join(commit)
    }

    /// Links a file name to its blob.
    pub(crate) fn link(&self, listing: &Listing, file: &RemoteFile) -> Result<PathBuf> {
        let snapshot = self.snapshot(&listing.repository, &listing.commit);
        let path = snapshot.join(&file.path);
        let folder = path.parent().unwrap_or(&snapshot);
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let blob = self.blob(&listing.repository, &file.blob);
        let is_there = path
            .canonicalize()
            .is_ok_and(|known| blob.canonicalize().is_ok_and(|blob| blob == known));
        if !is_there {
            if path.symlink_metadata().is_ok() {
                fs::remove_file(&path).map_err(Error::io(&path))?;
            }
            let up = "../".repeat(2 + file.path.matches('/').count());
            let relative = format!("{up}blobs/{}", file.blob);
            make_link(Path::new(&relative), &blob, &path).map_err(Error::io(&path))?;
        }
        let reference = self
            .repository(&listing.repository)
            .join("refs")
            .join(&listing.revision);
        if let Some(folder) = reference.parent() {
            fs::create_dir_all(folder).map_err(Error::io(folder))?;
        }
        fs::write(&reference, &listing.commit).map_err(Error::io(&reference))?;
        Ok(path)
    }

    /// Returns the cached files of a repository, at the commit that `revision` named when it was
    /// last downloaded.
    pub fn listing(&self, reference: &Reference, revision: &str) -> Option<Listing> {
        let repository = &reference.repository;
        let named = self.repository(repository).join("refs").join(revision);
        let commit = fs::read_to_string(named).ok()?.trim().to_owned();
        if commit.is_empty() || !commit.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return None;
        }
        let snapshot = self.snapshot(repository, &commit);
        let mut files = Vec::new();
        models_in(&snapshot, &snapshot, DEEPEST, &mut files);
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Some(Listing {
            repository: repository.clone(),
            revision: revision.to_owned(),
            commit,
            files,
        })
    }

    /// Returns the path of a model if all of it is cached; for a split model, of the first part.
    pub fn find(&self, reference: &Reference, revision: &str) -> Option<PathBuf> {
        let listing = self.listing(reference, revision)?;
        let files = listing.choose(reference).ok()?;
        Some(self.path_of(&listing, files.first()?))
    }

    fn path_of(&self, listing: &Listing, file: &RemoteFile) -> PathBuf {
        self.snapshot(&listing.repository, &listing.commit)
            .join(&file.path)
    }

    /// Returns all models, by repository and file.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be read. A missing folder counts as empty.
    pub fn models(&self) -> Result<Vec<Cached>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(Error::io(&self.folder))?,
        };
        let mut models = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let repository = name.to_str().and_then(repository_of);
            let Some(Ok(reference)) = repository.map(|name| name.parse::<Reference>()) else {
                continue;
            };
            let Some(listing) = self.listing(&reference, "main") else {
                continue;
            };
            for first in &listing.files {
                let wanted = Reference {
                    wanted: Some(first.path.clone()),
                    ..reference.clone()
                };
                // A complete split model is listed once, as its first part.
                let is_later = listing.is_later_part(&first.path);
                if let (false, Ok(parts)) = (is_later, listing.choose(&wanted)) {
                    models.push(Cached {
                        repository: reference.repository.clone(),
                        file: first.path.clone(),
                        name: listing.reference(&first.path).to_string(),
                        path: self.path_of(&listing, first),
                        size: parts.iter().map(|part| part.size).sum(),
                    });
                }
            }
        }
        models.sort_by(|a, b| (&a.repository, &a.file).cmp(&(&b.repository, &b.file)));
        Ok(models)
    }

    /// Deletes the requested model, or the whole repository, including incomplete downloads.
    /// Returns the number of bytes freed.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it is not cached; [`Error::Io`].
    pub fn remove(&self, reference: &Reference) -> Result<u64> {
        let folder = self.repository(&reference.repository);
        let missing =
            || Error::NotFound(format!("{reference} is not in {}", self.folder.display()));
        if !folder.is_dir() {
            return Err(missing());
        }
        if reference.wanted.is_none() {
            let freed = size_of(&folder.join("blobs"));
            fs::remove_dir_all(&folder).map_err(Error::io(&folder))?;
            return Ok(freed);
        }
        let listing = self.listing(reference, "main").ok_or_else(missing)?;
        let files = listing.choose(reference)?;
        let mut freed = 0;
        for file in files {
            let path = self.path_of(&listing, file);
            let content = path.canonicalize().map_err(Error::io(&path))?;
            fs::remove_file(&path).map_err(Error::io(&path))?;
            // Another snapshot may share the content, and a link that the user created may lead out
            // of the cache.
            let snapshots = folder.join("snapshots");
            let blobs = folder.join("blobs").canonicalize();
            let is_blob = blobs.is_ok_and(|blobs| content.starts_with(blobs));
            if is_blob && !is_linked(&snapshots, &content, DEEPEST) {
                fs::remove_file(&content).map_err(Error::io(&content))?;
                freed += file.size;
            }
        }
        Ok(freed)
    }
}

fn name_of(repository: &str) -> String {
    format!("models--{}", repository.replace('/', "--"))
}

fn repository_of(folder: &str) -> Option<String> {
    let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
    Some(format!("{owner}/{name}"))
}

/// Adds the models below `folder`.
fn models_in(root: &Path, folder: &Path, depth: usize, files: &mut Vec<RemoteFile>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        // Follows links; a link whose content is gone is not a model.
        let Ok(known) = path.metadata() else { continue };
        if known.is_dir() && depth > 0 {
            models_in(root, &path, depth - 1, files);
        }
        let inner = path.strip_prefix(root).ok().and_then(Path::to_str);
        let Some(inner) = inner.filter(|_| known.is_file()) else {
            continue;
        };
        let inner = inner.replace('\\', "/");
        if inner.to_ascii_lowercase().ends_with(".gguf") {
            files.push(RemoteFile {
                path: inner,
                size: known.len(),
                blob: String::new(),
                sha256: None,
            });
        }
    }
}

/// Returns the total size in bytes of the files in a folder.
fn size_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.metadata().ok());
    files
        .filter(fs::Metadata::is_file)
        .map(|file| file.len())
        .sum()
}

/// Returns whether a link below `folder` leads to `content`.
fn is_linked(folder: &Path, content: &Path, depth: usize) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| {
        if path.is_dir() {
            depth > 0 && is_linked(&path, content, depth - 1)
        } else {
            path.canonicalize().is_ok_and(|known| known == content)
        }
    })
}

/// Creates a symbolic link to `relative` at `path`, or a hard link to `blob` where symbolic links
/// are unavailable.
fn make_link(relative: &Path, blob: &Path, path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        let _ = blob;
        std::os::unix::fs::symlink(relative, path)
    }
    #[cfg(not(unix))]
    {
        let _ = relative;
        fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(drop))
    }
}
