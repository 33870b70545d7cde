//! IDs, random seeds, and the time of day.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns an unpredictable number that does not repeat.
pub fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let count = NEXT.fetch_add(1, Ordering::Relaxed);
    RandomState::new().hash_one((count, since_epoch().as_nanos()))
}

/// Returns a seed in llama.cpp's range.
pub fn seed() -> u64 {
    number() & 0x7fff_ffff
}

/// Returns an ID: 32 letters and digits after a prefix.
pub fn id(prefix: &str) -> String {
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut id = prefix.to_owned();
    for _ in 0..4 {
        let mut bits = number();
        for _ in 0..8 {
            id.push(char::from(LETTERS[(bits % 62) as usize]));
            bits /= 62;
        }
    }
    id
}

/// Returns the time since 1970.
pub fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Returns the whole seconds since 1970.
pub fn seconds() -> u64 {
    since_epoch().as_secs()
}
