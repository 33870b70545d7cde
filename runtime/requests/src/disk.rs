//! Disk cache: a second level below the prefix cache in the context. It survives the end of the
//! process.
//!
//! Each text is a separate file, a [`SavedSequence`], which is read completely and checked before
//! any of it is used. Files of other models, other adapters or older versions stay until their
//! space is needed.

use crate::event::{CacheMiss, MissCause};
use crate::prefix_cache::common;
use samite_llm::{SavedHeader, SavedSequence};
use std::path::{Path, PathBuf};

const EXTENSION: &str = "samite-text";

/// A file of the cache.
#[derive(Debug)]
struct CacheFile {
    path: PathBuf,
    /// Identity of the adapters that it was computed with.
    adapters: u64,
    /// Tokens of the text; empty for a file that cannot be used here.
    tokens: Vec<u32>,
    bytes: u64,
}

/// A folder with cached texts.
#[derive(Debug)]
pub(crate) struct DiskTexts {
    folder: PathBuf,
    /// Identity of the model.
    model: u64,
    most_bytes: u64,
    /// Files from least to most recently used.
    entries: Vec<CacheFile>,
}

impl DiskTexts {
    /// Minimum number of tokens for which a file is worthwhile.
    pub const LEAST: usize = 64;

    /// Opens the cache in `folder`, which is created if necessary. Only texts of this model can be
    /// used. Deletes files beyond `most_bytes`, the oldest first.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created or read.
    pub fn open(folder: &Path, model: u64, most_bytes: u64) -> std::io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut found = Vec::new();
        for file in std::fs::read_dir(folder)? {
            let (path, metadata) = match file.and_then(|file| Ok((file.path(), file.metadata()?))) {
                Ok(found) => found,
                // Another process deleted it in the meantime.
                Err(_) => continue,
            };
            if path.extension().is_none_or(|found| found != EXTENSION) {
                continue;
            }
            let (adapters, tokens) = match SavedHeader::read(&path) {
                Ok(header) if header.identity[0] == model => (header.identity[1], header.tokens),
                _ => (0, Vec::new()),
            };
            let modified = metadata.modified().ok();
            let bytes = metadata.len();
            found.push((
                modified,
                CacheFile {
                    path,
                    adapters,
                    tokens,
                    bytes,
                },
            ));
        }
        found.sort_by(|a, b| (a.0, &a.1.path).cmp(&(b.0, &b.1.path)));
        let mut texts = DiskTexts {
            folder: folder.to_owned(),
            model,
            most_bytes,
            entries: found.into_iter().map(|(_, entry)| entry).collect(),
        };
        texts.make_room(0);
        Ok(texts)
    }

    /// Returns the text with these adapters that has the longest usable common prefix with
    /// `prompt`: its index and the length of the prefix. If texts cannot be cut, a text is usable
    /// only if `prompt` continues all of it.
    pub fn longest(&self, prompt: &[u32], adapters: u64, can_cut: bool) -> Option<(usize, usize)> {
        let entries = self.entries.iter().enumerate();
        let entries = entries.filter(|(_, entry)| entry.adapters == adapters);
        let alike = entries.map(|(number, entry)| {
            let same = common(&entry.tokens, prompt);
            let is_usable = can_cut || same == entry.tokens.len();
            (number, if is_usable { same } else { 0 })
        });
        alike
            .filter(|(_, same)| *same > 0)
            .max_by_key(|(_, same)| *same)
    }

    /// Returns the end of the longest prefix of `prompt` in a text with these adapters, usable or
    /// not, and the cause of the end. `cannot` is the reason why texts cannot be cut.
    pub fn miss(&self, prompt: &[u32], adapters: u64, cannot: Option<MissCause>) -> CacheMiss {
        let entries = self.entries.iter();
        let alike = entries
            .filter(|entry| entry.adapters == adapters)
            .map(|entry| {
                let same = common(&entry.tokens, prompt);
                let cause = match (same < entry.tokens.len(), cannot) {
                    (true, Some(cannot)) => cannot,
                    (true, None) => MissCause::Differs,
                    (false, _) => MissCause::Ends,
                };
                (same, cause)
            });
        let (at_token, cause) = alike
            .max_by_key(|(same, _)| *same)
            .unwrap_or((0, MissCause::Ends));
        CacheMiss { at_token, cause }
    }

    /// Reads a text. Deletes it if it is damaged.
    pub fn read(&mut self, number: usize) -> Option<SavedSequence> {
        let entry = self.entries.remove(number);
        match SavedSequence::read(&entry.path) {
            Ok(saved)
                if saved.tokens == entry.tokens
                    && saved.len() == entry.tokens.len()
                    && saved.identity() == [self.model, entry.adapters] =>
            {
                self.entries.push(entry);
                Some(saved)
            }
            outcome => {
                let why = outcome.err().map(|error| error.to_string());
                tracing::warn!(path = %entry.path.display(), ?why,
                    "a text on disk is damaged, and deleted");
                let _ = std::fs::remove_file(&entry.path);
                None
            }
        }
    }

    /// Excludes a text from further use: it could be read, but does not match this context.
    pub fn forget(&mut self, tokens: &[u32]) {
        for entry in self
            .entries
            .iter_mut()
            .filter(|entry| entry.tokens == tokens)
        {
            entry.tokens.clear();
        }
    }

    /// Returns whether a text is worth a file: much of it is not a usable prefix in another file.
    pub fn wants(&self, tokens: &[u32], adapters: u64, can_cut: bool) -> bool {
        let known = self.longest(tokens, adapters, can_cut);
        let known = known.map_or(0, |(_, same)| same);
        tokens.len() >= known + Self::LEAST
    }

    /// Writes a text. Deletes files with prefixes of the text, if it can replace them.
    pub fn write(&mut self, saved: &SavedSequence, can_cut: bool) {
        let bytes = saved.bytes() as u64;
        if bytes > self.most_bytes {
            return;
        }
        self.make_room(bytes);
        let [_, adapters] = saved.identity();
        let path = self.folder.join(self.name(&saved.tokens, adapters));
        if let Err(error) = saved.write(&path) {
            tracing::warn!(path = %path.display(), %error, "a text cannot be kept on disk");
            return;
        }
        let bytes = std::fs::metadata(&path).map_or(bytes, |metadata| metadata.len());
        let tokens = saved.tokens.clone();
        let is_covered = |entry: &CacheFile| {
            let is_beginning = can_cut
                && entry.adapters == adapters
                && !entry.tokens.is_empty()
                && tokens.starts_with(&entry.tokens);
            entry.path == path || is_beginning
        };
        let (covered, others) = std::mem::take(&mut self.entries)
            .into_iter()
            .partition(is_covered);
        self.entries = others;
        let covered: Vec<CacheFile> = covered;
        for entry in covered.iter().filter(|entry| entry.path != path) {
            let _ = std::fs::remove_file(&entry.path);
        }
        self.entries.push(CacheFile {
            path,
            adapters,
            tokens,
            bytes,
        });
    }

    /// Deletes the oldest files until there is room for `bytes` bytes.
    fn make_room(&mut self, bytes: u64) {
        let used = |entries: &[CacheFile]| entries.iter().map(|entry| entry.bytes).sum::<u64>();
        while !self.entries.is_empty()
            && used(&self.entries).saturating_add(bytes) > self.most_bytes
        {
            let entry = self.entries.remove(0);
            let _ = std::fs::remove_file(&entry.path);
        }
    }

    /// Returns a file name that derives from the model and the tokens by FNV-1a.
    fn name(&self, tokens: &[u32], adapters: u64) -> String {
        let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let model = self.model;
        format!(
            "{:016x}-{hash:016x}-{}.{EXTENSION}",
            model ^ adapters.rotate_left(32),
            tokens.len()
        )
    }
}
