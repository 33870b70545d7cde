//! Synchronisation primitives. With `--cfg loom` these are loom's, so that tests try every
//! interleaving of threads.

#[cfg(loom)]
pub use loom::{
    cell::UnsafeCell,
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Arc, Condvar, Mutex},
    thread::JoinHandle,
};
#[cfg(loom)]
pub fn thread_builder() -> std::io::Result<loom::thread::Builder> {
    Ok(loom::thread::Builder::new())
}
#[cfg(not(loom))]
pub use crate::start::thread_builder;
#[cfg(not(loom))]
pub use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    sync::{Arc, Condvar, Mutex},
    thread::JoinHandle,
};

/// A cell that loom checks for concurrent accesses.
#[cfg(not(loom))]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Calls `read` with the cell's address.
    pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Calls `write` with the cell's address.
    pub fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}
