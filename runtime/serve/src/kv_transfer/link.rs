//! The connection over which one server fetches a KV cache from another.
//!
//! The fetching server sends a hello: [`MAGIC`], the ID of the cache, a random number, and a keyed
//! hash of all three. The other server answers with frames: a length of four bytes, and as many
//! bytes encrypted with AES-256-GCM. The first frame is the total length of the cache in eight
//! bytes. The key of the frames depends on the secret, the ID and the random number, and their
//! nonces are consecutive, so frames cannot be changed, repeated or left out.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// First bytes of a hello, with the version of the protocol.
const MAGIC: [u8; 8] = *b"samitek1";

/// Bytes of the cache in a frame.
const CHUNK: usize = 256 << 10;

/// Bytes of a hash.
const HASH: usize = blake3::OUT_LEN;

/// Maximum time until a peer has sent or taken the next part.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum time until a peer has shown that it knows the secret.
const HELLO_TIME: Duration = Duration::from_secs(2);

/// Minimum bytes of a secret.
const MIN_SECRET: usize = 32;

/// A secret that all servers of a fleet know.
#[derive(Clone, PartialEq, Eq)]
pub struct TransferSecret([u8; HASH]);

impl fmt::Debug for TransferSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TransferSecret")
    }
}

impl TransferSecret {
    /// Derives a secret from the content of a file, without white space around it. Returns `None`
    /// if it is shorter than 32 bytes.
    pub fn new(content: &[u8]) -> Option<Self> {
        let content = content.trim_ascii();
        let context = "samite 2026-11-30 transfer of KV caches";
        (content.len() >= MIN_SECRET).then(|| Self(blake3::derive_key(context, content)))
    }

    /// Returns a keyed hash of parts, which cannot be confused with other parts.
    pub(super) fn hash(&self, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }
}

/// Identifies a cache that waits to be fetched.
pub(super) type TransferId = [u8; 16];

/// Returns random bytes.
pub(super) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Error::other("the system has no random numbers"))?;
    Ok(bytes)
}

/// Encrypts or decrypts the frames of one connection.
struct FrameCipher {
    key: LessSafeKey,
    next: u64,
}

impl FrameCipher {
    fn new(secret: &TransferSecret, id: &TransferId, random: &[u8; 16]) -> Result<Self> {
        let key = secret.hash(&[b"frames", id, random]);
        let key = UnboundKey::new(&AES_256_GCM, key.as_bytes());
        let key = key.map_err(|_| Error::other("the key has a wrong length"))?;
        Ok(FrameCipher {
            key: LessSafeKey::new(key),
            next: 0,
        })
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.next.to_be_bytes());
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Sends a frame.
    async fn send(&mut self, stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<()> {
        let length = bytes.len() + AES_256_GCM.tag_len();
        let mut frame = Vec::with_capacity(size_of::<u32>() + length);
        frame.extend_from_slice(&(length as u32).to_be_bytes());
        frame.extend_from_slice(bytes);
        let nonce = self.nonce();
        let sealed = &mut frame[size_of::<u32>()..];
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::empty(), sealed)
            .map_err(|_| Error::other("a frame cannot be encrypted"))?;
        frame.extend_from_slice(tag.as_ref());
        within_patience(stream.write_all(&frame)).await
    }

    /// Receives a frame of at most `most` bytes.
    async fn receive<'b>(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        most: usize,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8]> {
        let mut length = [0; 4];
        within_patience(stream.read_exact(&mut length)).await?;
        let length = u32::from_be_bytes(length) as usize;
        if length > most + AES_256_GCM.tag_len() {
            return Err(damaged());
        }
        buffer.resize(length, 0);
        within_patience(stream.read_exact(buffer)).await?;
        let nonce = self.nonce();
        let opened = self.key.open_in_place(nonce, Aad::empty(), buffer);
        Ok(opened.map_err(|_| damaged())?)
    }
}

fn damaged() -> Error {
    Error::new(
        ErrorKind::InvalidData,
        "a frame of the cache was changed on its way",
    )
}

async fn within_patience<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(PATIENCE, work).await.map_err(Error::from)?
}

/// Fetches a cache from a server. `reserve` gets its length before memory is allocated.
///
/// # Errors
/// Returns an error if the connection fails, if the server does not have the cache or another
/// secret, or if `reserve` refuses.
pub(super) async fn fetch(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    secret: &TransferSecret,
    id: &TransferId,
    reserve: impl FnOnce(usize) -> Result<()>,
) -> Result<Vec<u8>> {
    let random = random()?;
    let hash = secret.hash(&[&MAGIC, id, &random]);
    let hello = [&MAGIC[..], id, &random, hash.as_bytes()].concat();
    within_patience(stream.write_all(&hello)).await?;
    let mut cipher = FrameCipher::new(secret, id, &random)?;
    let mut buffer = Vec::new();
    let length = cipher.receive(&mut stream, size_of::<u64>(), &mut buffer);
    let length = length.await.map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => Error::new(
            ErrorKind::NotFound,
            "the server has no such cache, or another secret (--kv-transfer-key)",
        ),
        _ => error,
    })?;
    let length = <[u8; 8]>::try_from(length).map_err(|_| damaged())?;
    let length = usize::try_from(u64::from_be_bytes(length)).map_err(|_| damaged())?;
    reserve(length)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(Error::other)?;
    while bytes.len() < length {
        let rest = (length - bytes.len()).min(CHUNK);
        let chunk = cipher.receive(&mut stream, rest, &mut buffer).await?;
        if chunk.len() != rest {
            return Err(damaged());
        }
        bytes.extend_from_slice(chunk);
    }
    Ok(bytes)
}

/// A connection whose peer knows the secret.
pub(super) struct Greeted<S> {
    stream: S,
    id: TransferId,
    random: [u8; 16],
}

/// Reads a peer's hello.
///
/// # Errors
/// Returns an error if the peer does not know the secret or is too slow. Sends nothing to it.
pub(super) async fn greet<S: AsyncRead + Unpin>(
    mut stream: S,
    secret: &TransferSecret,
) -> Result<Greeted<S>> {
    let mut hello = [0; MAGIC.len() + 16 + 16 + HASH];
    timeout(HELLO_TIME, stream.read_exact(&mut hello)).await??;
    let (magic, rest) = hello.split_at(MAGIC.len());
    let (id, rest) = rest.split_at(16);
    let (random, hash) = rest.split_at(16);
    let mut expected = [0; HASH];
    expected.copy_from_slice(hash);
    // Hashes are compared in constant time.
    if magic != MAGIC || secret.hash(&[magic, id, random]) != expected {
        return Err(Error::new(
            ErrorKind::PermissionDenied,
            "the peer does not know the secret",
        ));
    }
    Ok(Greeted {
        id: id.try_into().map_err(Error::other)?,
        random: random.try_into().map_err(Error::other)?,
        stream,
    })
}

impl<S: AsyncWrite + Unpin> Greeted<S> {
    /// Sends the cache that the peer asks for. `find` takes it by its ID.
    ///
    /// # Errors
    /// Returns an error if there is no cache with this ID, or if the peer is too slow.
    pub async fn answer<B: AsRef<[u8]>>(
        mut self,
        secret: &TransferSecret,
        find: impl FnOnce(&TransferId) -> Option<B>,
    ) -> Result<()> {
        let missing = || Error::new(ErrorKind::NotFound, "no such cache");
        let found = find(&self.id).ok_or_else(missing)?;
        let bytes = found.as_ref();
        let mut cipher = FrameCipher::new(secret, &self.id, &self.random)?;
        let length = bytes.len() as u64;
        cipher.send(&mut self.stream, &length.to_be_bytes()).await?;
        for chunk in bytes.chunks(CHUNK) {
            cipher.send(&mut self.stream, chunk).await?;
        }
        within_patience(self.stream.flush()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    const ID: TransferId = [7; 16];

    fn secret(byte: u8) -> TransferSecret {
        TransferSecret::new(&[byte; 32]).unwrap()
    }

    /// Fetches `bytes` over a connection whose bytes from the server go through `change`.
    fn transferred(
        bytes: Vec<u8>,
        secrets: [TransferSecret; 2],
        change: impl Fn(&mut Vec<u8>) + Send + 'static,
    ) -> Result<Vec<u8>> {
        let [own, other] = secrets;
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(async move {
            let (client, mut near) = duplex(1 << 16);
            let (mut far, server) = duplex(1 << 16);
            tokio::spawn(async move {
                let find = |id: &TransferId| (*id == ID).then_some(bytes);
                if let Ok(greeted) = greet(server, &other).await {
                    let _ = greeted.answer(&other, find).await;
                }
            });
            tokio::spawn(async move {
                let mut hello = [0; 72];
                near.read_exact(&mut hello).await.unwrap();
                far.write_all(&hello).await.unwrap();
                let mut all = Vec::new();
                far.read_to_end(&mut all).await.unwrap();
                change(&mut all);
                let _ = near.write_all(&all).await;
            });
            fetch(client, &own, &ID, |_| Ok(())).await
        })
    }

    #[test]
    fn a_cache_arrives_whole() {
        for length in [0, 1, CHUNK, 2 * CHUNK + 5] {
            let bytes: Vec<u8> = (0..length).map(|at| (at * 31 % 251) as u8).collect();
            let there = transferred(bytes.clone(), [secret(1), secret(1)], |_| ());
            assert!(there.unwrap() == bytes, "{length}");
        }
    }

    #[test]
    fn a_peer_with_another_secret_gets_nothing() {
        let error = transferred(vec![1; 100], [secret(1), secret(2)], |all| {
            assert!(all.is_empty());
        });
        assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(
            TransferSecret::new(b" 31 bytes are too short a secret "),
            None
        );
    }

    #[test]
    fn changed_repeated_and_missing_frames_are_noticed() {
        let bytes = vec![5; 3 * CHUNK];
        let frame = CHUNK + 16 + 4;
        let first = 4 + 8 + 16;
        type Change = fn(&mut Vec<u8>, usize, usize);
        let changes: [(Change, ErrorKind); 6] = [
            (|all, _, _| all[10] ^= 1, ErrorKind::InvalidData),
            (
                |all, first, _| all[first + 100] ^= 1,
                ErrorKind::InvalidData,
            ),
            (
                |all, first, frame| drop(all.drain(first..first + frame)),
                ErrorKind::InvalidData,
            ),
            (
                |all, first, frame| {
                    let again = all[first..first + frame].to_vec();
                    all.splice(first..first, again);
                },
                ErrorKind::InvalidData,
            ),
            (
                |all, _, frame| all.truncate(all.len() - frame),
                ErrorKind::UnexpectedEof,
            ),
            (
                |all, first, _| all[first..first + 4].fill(0xff),
                ErrorKind::InvalidData,
            ),
        ];
        for (number, (change, kind)) in changes.into_iter().enumerate() {
            let change = move |all: &mut Vec<u8>| change(all, first, frame);
            let error = transferred(bytes.clone(), [secret(1), secret(1)], change);
            assert_eq!(error.unwrap_err().kind(), kind, "{number}");
        }
    }

    #[test]
    fn the_length_is_known_before_memory_is_taken() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        let error = runtime.block_on(async {
            let (client, server) = duplex(1 << 16);
            tokio::spawn(async move {
                let greeted = greet(server, &secret(1)).await.unwrap();
                let _ = greeted.answer(&secret(1), |_| Some(vec![0; 1000])).await;
            });
            let reserve = |length| {
                assert_eq!(length, 1000);
                Err(Error::other("full"))
            };
            fetch(client, &secret(1), &ID, reserve).await
        });
        assert_eq!(error.unwrap_err().to_string(), "full");
    }
}
