//! Threads of the standard library, started only if there is memory for them.

use std::io;
use std::thread::Builder;

/// Bytes that must be available before a thread starts: the standard library's stack (2 MiB), and
/// twice as much for concurrent allocations of other threads.
const ROOM: usize = 6 << 20;

/// Returns a thread builder if there is memory for the thread. A thread allocates a signal stack
/// when it starts, and the standard library aborts if that fails.
///
/// # Errors
/// [`io::ErrorKind::OutOfMemory`].
pub fn thread_builder() -> io::Result<Builder> {
    if has_memory(ROOM) {
        Ok(Builder::new())
    } else {
        Err(io::ErrorKind::OutOfMemory.into())
    }
}

/// Returns whether `bytes` bytes can be allocated at once.
pub fn has_memory(bytes: usize) -> bool {
    let mut tried: Vec<u8> = Vec::new();
    let reserved = tried.try_reserve_exact(bytes);
    // The compiler would remove an unused allocation, and report success.
    std::hint::black_box(&tried);
    reserved.is_ok()
}
