//! Chunks of weights on the server's disk, by hash, so that a model is sent only once.
//!
//! A chunk is a file, named by the BLAKE3 hash of its bytes. An empty file next to it names each
//! token that has sent the chunk or proved to have it. Bytes are verified on every read, because
//! disks are not trusted. The least recently used chunk is removed if space runs out.

use blake3::Hash;
use std::collections::{BTreeMap, HashMap};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Maximum bytes of a chunk.
pub(crate) const LONGEST: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    /// Maximum bytes of all chunks together.
    limit: u64,
    pieces: Mutex<ChunkIndex>,
}

#[derive(Debug, Default)]
struct ChunkIndex {
    known: HashMap<Hash, ChunkRecord>,
    /// Chunks by time of use, oldest first.
    order: BTreeMap<u64, Hash>,
    now: u64,
    bytes: u64,
}

#[derive(Debug)]
struct ChunkRecord {
    size: u64,
    used: u64,
    owners: Vec<Box<str>>,
}

/// Result of looking for a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChunkLookup {
    Nothing,
    /// Bytes that this token has sent before.
    Own(Vec<u8>),
    /// Bytes that other tokens have sent.
    Foreign(Vec<u8>),
}

impl ChunkIndex {
    fn touch(&mut self, hash: Hash) {
        self.now += 1;
        if let Some(piece) = self.known.get_mut(&hash) {
            self.order.remove(&piece.used);
            piece.used = self.now;
            self.order.insert(self.now, hash);
        }
    }

    fn remove(&mut self, hash: &Hash) -> Option<ChunkRecord> {
        let piece = self.known.remove(hash)?;
        self.order.remove(&piece.used);
        self.bytes -= piece.size;
        Some(piece)
    }
}

impl Store {
    /// Opens the store in `folder`, which is created if it does not exist.
    pub fn open(folder: &Path, limit: u64) -> Result<Self> {
        let named =
            |error: Error| Error::new(error.kind(), format!("{}: {error}", folder.display()));
        std::fs::create_dir_all(folder).map_err(named)?;
        let mut found: Vec<(SystemTime, Hash, u64)> = Vec::new();
        let mut owners: HashMap<Hash, Vec<Box<str>>> = HashMap::new();
        for entry in std::fs::read_dir(folder).map_err(named)? {
            let entry = entry.map_err(named)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let (name, owner) = match name.split_once('.') {
                Some((name, owner)) => (name, Some(owner)),
                None => (name, None),
            };
            let Ok(hash) = Hash::from_hex(name) else {
                continue;
            };
            let about = entry.metadata().map_err(named)?;
            match owner {
                // Left over from a server that was killed while it wrote.
                Some("new") => drop(std::fs::remove_file(entry.path())),
                Some(owner) => owners.entry(hash).or_default().push(owner.into()),
                None => {
                    let used = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    found.push((used, hash, about.len()));
                }
            }
        }
        found.sort_by_key(|(used, ..)| *used);
        let store = Store {
            folder: folder.to_owned(),
            limit,
            pieces: Mutex::default(),
        };
        let mut pieces = store.lock();
        for (_, hash, size) in found {
            let owners = owners.remove(&hash).unwrap_or_default();
            pieces.bytes += size;
            let piece = ChunkRecord {
                size,
                used: 0,
                owners,
            };
            pieces.known.insert(hash, piece);
            pieces.touch(hash);
        }
        store.make_room(&mut pieces, 0);
        drop(pieces);
        Ok(store)
    }

    fn lock(&self) -> MutexGuard<'_, ChunkIndex> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, hash: &Hash) -> PathBuf {
        self.folder.join(hash.to_hex().as_str())
    }

    fn owner_path(&self, hash: &Hash, owner: &str) -> PathBuf {
        self.folder.join(format!("{}.{owner}", hash.to_hex()))
    }

    fn forget(&self, pieces: &mut ChunkIndex, hash: &Hash) {
        if let Some(piece) = pieces.remove(hash) {
            for owner in piece.owners {
                let _ = std::fs::remove_file(self.owner_path(hash, &owner));
            }
        }
        let _ = std::fs::remove_file(self.path(hash));
    }

    fn make_room(&self, pieces: &mut ChunkIndex, bytes: u64) {
        while pieces.bytes.saturating_add(bytes) > self.limit
            && let Some((_, &oldest)) = pieces.order.iter().next()
        {
            self.forget(pieces, &oldest);
        }
    }

    /// Looks for a chunk of `size` bytes.
    pub fn find(&self, hash: &Hash, size: usize, owner: &str) -> ChunkLookup {
        let is_own = {
            let mut pieces = self.lock();
            let Some(piece) = pieces.known.get(hash) else {
                return ChunkLookup::Nothing;
            };
            if piece.size != size as u64 {
                return ChunkLookup::Nothing;
            }
            let is_own = piece.owners.iter().any(|known| **known == *owner);
            pieces.touch(*hash);
            is_own
        };
        match std::fs::read(self.path(hash)) {
            Ok(bytes) if blake3::hash(&bytes) == *hash => {
                // Preserves the order over a restart. Failure does no harm.
                let _ = std::fs::File::open(self.path(hash))
                    .and_then(|file| file.set_modified(SystemTime::now()));
                if is_own {
                    ChunkLookup::Own(bytes)
                } else {
                    ChunkLookup::Foreign(bytes)
                }
            }
            _ => {
                tracing::warn!("a stored piece of weights is damaged, and is forgotten: {hash}");
                self.forget(&mut self.lock(), hash);
                ChunkLookup::Nothing
            }
        }
    }

    /// Stores a chunk, or records that a token has it. Failure does no harm.
    pub fn keep(&self, hash: &Hash, bytes: &[u8], owner: &str) {
        if bytes.len() as u64 > self.limit {
            return;
        }
        let mut pieces = self.lock();
        let kept = if pieces.known.contains_key(hash) {
            Ok(())
        } else {
            self.make_room(&mut pieces, bytes.len() as u64);
            let new = self.owner_path(hash, "new");
            std::fs::write(&new, bytes)
                .and_then(|()| std::fs::rename(&new, self.path(hash)))
                .map(|()| {
                    pieces.bytes += bytes.len() as u64;
                    let piece = ChunkRecord {
                        size: bytes.len() as u64,
                        used: 0,
                        owners: Vec::new(),
                    };
                    pieces.known.insert(*hash, piece);
                })
        };
        pieces.touch(*hash);
        let kept = kept.and_then(|()| {
            let Some(piece) = pieces.known.get_mut(hash) else {
                return Err(ErrorKind::NotFound.into());
            };
            if piece.owners.iter().all(|known| **known != *owner) {
                std::fs::write(self.owner_path(hash, owner), [])?;
                piece.owners.push(owner.into());
            }
            Ok(())
        });
        if let Err(error) = kept {
            tracing::warn!(
                "a piece of weights is not kept in {}: {error}",
                self.folder.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(value: u8, len: usize) -> (Hash, Vec<u8>) {
        let bytes = vec![value; len];
        (blake3::hash(&bytes), bytes)
    }

    #[test]
    fn stored_chunks_survive_restarts_for_their_owners() {
        let folder = tempfile::tempdir().unwrap();
        let (hash, bytes) = piece(1, 100);
        let store = Store::open(folder.path(), 1000).unwrap();
        assert_eq!(store.find(&hash, 100, "a"), ChunkLookup::Nothing);
        store.keep(&hash, &bytes, "a");
        for store in [store, Store::open(folder.path(), 1000).unwrap()] {
            assert_eq!(store.find(&hash, 100, "a"), ChunkLookup::Own(bytes.clone()));
            assert_eq!(
                store.find(&hash, 100, "b"),
                ChunkLookup::Foreign(bytes.clone())
            );
            assert_eq!(store.find(&hash, 99, "a"), ChunkLookup::Nothing);
        }
        let store = Store::open(folder.path(), 1000).unwrap();
        store.keep(&hash, &bytes, "b");
        assert_eq!(store.find(&hash, 100, "b"), ChunkLookup::Own(bytes));
        // Corrupted on disk.
        std::fs::write(store.path(&hash), vec![2; 100]).unwrap();
        assert_eq!(store.find(&hash, 100, "a"), ChunkLookup::Nothing);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_least_recently_used_chunk_is_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), 250).unwrap();
        let [a, b, c] = [1, 2, 3].map(|value| piece(value, 100));
        store.keep(&a.0, &a.1, "x");
        store.keep(&b.0, &b.1, "x");
        assert!(matches!(store.find(&a.0, 100, "x"), ChunkLookup::Own(_)));
        store.keep(&c.0, &c.1, "x");
        assert_eq!(store.find(&b.0, 100, "x"), ChunkLookup::Nothing);
        assert!(matches!(store.find(&a.0, 100, "x"), ChunkLookup::Own(_)));
        let big = piece(4, 300);
        store.keep(&big.0, &big.1, "x");
        assert_eq!(store.find(&big.0, 300, "x"), ChunkLookup::Nothing);
        // A smaller store.
        drop(store);
        let store = Store::open(folder.path(), 100).unwrap();
        let files = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, 2, "a piece and its owner");
        drop(store);
    }
}
