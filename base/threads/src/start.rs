//! Threads of the standard library, where there is memory for them.

use std::io;
use std::thread::Builder;

/// What a thread takes before it runs: the standard library's stack, and twice as much again for what
/// others allocate meanwhile.
const ROOM: usize = 6 << 20;

/// Returns a builder of a thread, if there is memory for it. A thread allocates a stack for signals
/// when it starts, and the standard library ends the program where it gets none.
///
/// # Errors
/// [`io::ErrorKind::OutOfMemory`].
pub fn thread_builder() -> io::Result<Builder> {
    let mut room: Vec<u8> = Vec::new();
    let reserved = room.try_reserve_exact(ROOM);
    // Otherwise the compiler leaves out memory that nobody uses.
    std::hint::black_box(&room);
    match reserved {
        Ok(()) => Ok(Builder::new()),
        Err(_) => Err(io::ErrorKind::OutOfMemory.into()),
    }
}
