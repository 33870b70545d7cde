//! Texts on disk: a second level behind those that are kept in the context. They survive the end of the program.
//!
//! Each text is a file of its own, a [`SavedSequence`], which is read whole and checked before anything of it is used. Files of other models, other adapters
//! or older versions are left alone until room is needed.

use crate::event::{CacheMiss, MissCause};
use crate::kept::common;
use samite_llm::{SavedHeader, SavedSequence};
use std::path::{Path, PathBuf};

const EXTENSION: &str = "samite-text";

/// A file.
#[derive(Debug)]
struct Entry {
    path: PathBuf,
    /// The adapters that it was computed with.
    adapters: u64,
    /// Its tokens; none for a file that is of no use here.
    tokens: Vec<u32>,
    bytes: u64,
}

/// A folder of texts.
#[derive(Debug)]
pub(crate) struct DiskTexts {
    folder: PathBuf,
    /// The model.
    model: u64,
    most_bytes: u64,
    /// Those used last come last.
    entries: Vec<Entry>,
}

impl DiskTexts {
    /// Fewer tokens are not worth a file.
    pub const LEAST: usize = 64;

    /// The texts in `folder`, which is made if it is not there. Those of this model can be used. Files beyond `most_bytes` are deleted, the oldest first.
    ///
    /// # Errors
    /// If the folder cannot be made or read.
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
                Entry {
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

    /// The text with these adapters that begins most like `prompt`, as far as it can be gone on from: its number, and how many tokens of it. Where texts
    /// cannot be cut, that is the longest one that `prompt` goes on with.
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

    /// The longest beginning of `prompt` that a text with these adapters has, whether it can be gone on from or not, and what ends it; `cannot` says why a
    /// text cannot be cut.
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

    /// Reads a text. One that is damaged is deleted.
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
                tracing::warn!(path = %entry.path.display(), ?why, "a text on disk is damaged, and deleted");
                let _ = std::fs::remove_file(&entry.path);
                None
            }
        }
    }

    /// A text that could be read and is not of this context after all: it is not used again.
    pub fn forget(&mut self, tokens: &[u32]) {
        for entry in self
            .entries
            .iter_mut()
            .filter(|entry| entry.tokens == tokens)
        {
            entry.tokens.clear();
        }
    }

    /// Whether a text is worth a file: much of it is in none that can be gone on from.
    pub fn wants(&self, tokens: &[u32], adapters: u64, can_cut: bool) -> bool {
        let known = self.longest(tokens, adapters, can_cut);
        let known = known.map_or(0, |(_, same)| same);
        tokens.len() >= known + Self::LEAST
    }

    /// Writes a text. Files that are a beginning of it, and that it can stand for, are deleted.
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
        let is_covered = |entry: &Entry| {
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
        let covered: Vec<Entry> = covered;
        for entry in covered.iter().filter(|entry| entry.path != path) {
            let _ = std::fs::remove_file(&entry.path);
        }
        self.entries.push(Entry {
            path,
            adapters,
            tokens,
            bytes,
        });
    }

    /// Deletes the oldest files until so many bytes have room.
    fn make_room(&mut self, bytes: u64) {
        let used = |entries: &[Entry]| entries.iter().map(|entry| entry.bytes).sum::<u64>();
        while !self.entries.is_empty()
            && used(&self.entries).saturating_add(bytes) > self.most_bytes
        {
            let entry = self.entries.remove(0);
            let _ = std::fs::remove_file(&entry.path);
        }
    }

    /// A name that follows from the model and the tokens, by FNV-1a.
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
