//! Threads of the standard library, where there is memory for them.

use std::io;
use std::thread::Builder;

/// Memory asked for before a thread starts, in bytes: the stack that the standard library gives it
/// (2 MiB), and twice as much for allocations of other threads meanwhile.
const ROOM: usize = 6 << 20;

/// Returns a builder of a thread, if there is memory for it. A thread allocates a stack for signals
/// when it starts, and the standard library ends the program where it gets none.
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

/// Whether so many bytes can be allocated at once.
pub fn has_memory(bytes: usize) -> bool {
    let mut tried: Vec<u8> = Vec::new();
    let reserved = tried.try_reserve_exact(bytes);
    // The compiler would remove an unused allocation, and report that there is always enough.
    std::hint::black_box(&tried);
    reserved.is_ok()
}
