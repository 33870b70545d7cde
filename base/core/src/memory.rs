//! Host memory that several devices and threads may share, allocated or borrowed, with a range
//! lock.
//!
//! Buffers are shared by reference and kernels work on raw pointers, so something must keep a write
//! in one thread away from a read in another. Each piece of memory has a *range lock*
//! (`RangeLock`): each byte has any number of readers or one writer at a time. The safe methods
//! lock the bytes that they touch. A device locks a [`MemorySet`] of all memory that a prepared
//! graph touches, then uses [`base`](HostMemory::base). Uncontended, this costs a few nanoseconds
//! per buffer and run.

use crate::error::{Error, Result};
use crate::range_lock::{Access, RangeLock};
use memmap2::MmapMut;
use std::alloc::{Layout as AllocLayout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Alignment of host memory: one cache line, which suffices for every vector register.
pub const HOST_ALIGNMENT: usize = 64;

/// Minimum size in bytes of memory with pages of its own.
const LARGE: usize = 4 << 20;

/// Identity of a memory: the host's address space, or a piece of device memory that does not
/// overlap any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryId(u64);

impl MemoryId {
    /// The address space of this process.
    pub const HOST: MemoryId = MemoryId(0);

    /// Creates the identity of a piece of device memory, different from all others.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        MemoryId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Start of a buffer: its memory and a byte in it. A location identifies bytes, not buffers. Two
/// buffers over the same bytes, such as host memory and a device's import of it, have the same
/// location, so accesses through one are ordered with accesses through the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// The memory.
    pub memory: MemoryId,
    /// The byte offset. In host memory, the address.
    pub offset: usize,
}

enum Owner {
    Allocated(AllocLayout),
    Borrowed {
        _keep_alive: Box<dyn Any + Send + Sync>,
        writable: bool,
    },
}

/// A piece of host memory with a range lock.
pub struct HostMemory {
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
    range_lock: RangeLock,
}

// SAFETY: the memory is plain bytes that this value owns or keeps alive. It belongs to no thread,
// so any thread may use and free it. A borrowed owner is `Send`.
unsafe impl Send for HostMemory {}
// SAFETY: the methods that take `&self` touch bytes only under the range lock, which admits either
// readers or one writer of each byte. The other fields never change. `base` only returns the
// address, and its callers promise to hold the lock.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `len` zeroed bytes, aligned to [`HOST_ALIGNMENT`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], naming `device` and `what`.
    pub fn allocate(len: usize, device: &str, what: &str) -> Result<Arc<Self>> {
        let out_of_memory = || Error::OutOfMemory {
            device: device.into(),
            what: what.into(),
            asked: len,
            free: None,
        };
        if len >= LARGE {
            let mut map = MmapMut::map_anon(len).map_err(|_| out_of_memory())?;
            // Fewer, larger pages make streaming through weights faster. Failure is harmless.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            let base = NonNull::new(map.as_mut_ptr()).ok_or_else(out_of_memory)?;
            // SAFETY: the mapping has `len` zeroed bytes in pages of its own. It moves to the
            // owner, which does not touch them.
            return Ok(unsafe { Self::borrow(base, len, true, Box::new(map)) });
        }
        let layout = AllocLayout::from_size_align(len.max(1), HOST_ALIGNMENT)
            .map_err(|_| out_of_memory())?;
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        Ok(Arc::new(HostMemory {
            base,
            len,
            owner: Owner::Allocated(layout),
            range_lock: RangeLock::default(),
        }))
    }

    /// Wraps memory that other code allocated, such as a mapped file. `owner` is dropped with the
    /// last reference.
    ///
    /// # Safety
    /// As long as `owner` lives:
    ///
    /// - `base` points to `len` initialised bytes, valid for reads, and for writes if `writable`.
    /// - They are written to only through this value. If `writable`, they are also read only
    ///   through this value.
    pub unsafe fn borrow(
        base: NonNull<u8>,
        len: usize,
        writable: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(HostMemory {
            base,
            len,
            owner: Owner::Borrowed {
                _keep_alive: owner,
                writable,
            },
            range_lock: RangeLock::default(),
        })
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the size is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the memory may be written to.
    pub fn is_writable(&self) -> bool {
        matches!(
            self.owner,
            Owner::Allocated(_) | Owner::Borrowed { writable: true, .. }
        )
    }

    /// Returns the address of the first byte. Accessing memory through the pointer is allowed only
    /// inside [`MemorySet::with`], with this memory in the set and the right access. A set does not
    /// accept read-only memory for writing.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the location of the first byte.
    pub fn location(&self) -> Location {
        Location {
            memory: MemoryId::HOST,
            offset: self.base.as_ptr().addr(),
        }
    }

    /// Locks `len` bytes at `offset` until the returned guard is dropped. For work that outlives
    /// the call that started it, such as a copy by a device. Conflicting accesses wait meanwhile.
    /// An access by the thread that would drop the guard deadlocks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range does not exist, or for writing to read-only memory.
    pub fn hold(self: &Arc<Self>, offset: usize, len: usize, access: Access) -> Result<RangeGuard> {
        match access {
            Access::Read => self.range(offset, len)?,
            Access::Write => self.writable_range(offset, len)?,
        };
        let bytes = span(offset, len);
        self.range_lock.acquire(bytes.clone(), access);
        Ok(RangeGuard {
            memory: Arc::clone(self),
            bytes,
            access,
        })
    }

    /// Returns a key that orders the locking of several pieces, to prevent deadlocks. Two read-only
    /// or empty pieces may start at one address, but they are different values.
    fn rank(&self) -> (NonNull<u8>, *const Self) {
        (self.base, self)
    }

    fn range(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a buffer of {} bytes",
                self.len
            )));
        }
        // SAFETY: `offset` was just checked to be at most `self.len`, so the result is inside the
        // allocation or at its end.
        Ok(unsafe { self.base.add(offset) })
    }

    fn check_writable(&self) -> Result<()> {
        if self.is_writable() {
            Ok(())
        } else {
            Err(Error::invalid(
                "the memory is read-only, such as a mapped model file",
            ))
        }
    }

    fn writable_range(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        self.check_writable()?;
        self.range(offset, len)
    }

    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it does not fit or the memory is read-only.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.with_bytes_mut(offset, data.len(), |bytes| bytes.copy_from_slice(data))
    }

    /// Copies from `offset` to `out`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range does not exist.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.with_bytes(offset, out.len(), |bytes| out.copy_from_slice(bytes))
    }

    /// Sets `len` bytes at `offset` to `value`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range does not exist or the memory is read-only.
    pub fn fill(&self, offset: usize, len: usize, value: u8) -> Result<()> {
        self.with_bytes_mut(offset, len, |bytes| bytes.fill(value))
    }

    /// Calls `f` with `len` bytes at `offset`, locked for reading.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range does not exist.
    pub fn with_bytes<R>(
        &self,
        offset: usize,
        len: usize,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        let at = self.range(offset, len)?;
        Ok(self.range_lock.with(span(offset, len), Access::Read, || {
            // SAFETY: `range` checked the bytes. They are initialised (zeroed or borrowed as such),
            // and not written to while the lock is held.
            f(unsafe { std::slice::from_raw_parts(at.as_ptr(), len) })
        }))
    }

    /// Calls `f` with `len` mutable bytes at `offset`, locked for writing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range does not exist or the memory is read-only.
    pub fn with_bytes_mut<R>(
        &self,
        offset: usize,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R> {
        let at = self.writable_range(offset, len)?;
        Ok(self.range_lock.with(span(offset, len), Access::Write, || {
            // SAFETY: `writable_range` checked the bytes. They are initialised and writable, and
            // the lock excludes all other accesses.
            f(unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) })
        }))
    }

    /// Copies `len` bytes from `offset` of `self` to `to_offset` of `to`, which may be `self`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a range does not exist or `to` is read-only.
    pub fn copy_to(
        &self,
        offset: usize,
        to: &HostMemory,
        to_offset: usize,
        len: usize,
    ) -> Result<()> {
        let (from, into) = (self.range(offset, len)?, to.writable_range(to_offset, len)?);
        // SAFETY: both ranges were checked, and `copy` is called only under the locks taken below,
        // so `from` is not written to and `into` is not accessed meanwhile. Ranges may overlap in
        // `copy_to`.
        let copy = || unsafe { from.copy_to(into, len) };
        let (read, written) = (span(offset, len), span(to_offset, len));
        if std::ptr::eq(self, to) {
            // One lock for both ranges: a thread that locks twice could deadlock with another one
            // that does.
            let both = read.start.min(written.start)..read.end.max(written.end);
            self.range_lock.with(both, Access::Write, copy);
        } else if self.rank() < to.rank() {
            self.range_lock.with(read, Access::Read, || {
                to.range_lock.with(written, Access::Write, copy)
            });
        } else {
            to.range_lock.with(written, Access::Write, || {
                self.range_lock.with(read, Access::Read, copy)
            });
        }
        Ok(())
    }
}

/// Guard of a locked byte range. Dropping it unlocks the range.
#[derive(Debug)]
#[must_use = "the gate is left at once if this is dropped"]
pub struct RangeGuard {
    memory: Arc<HostMemory>,
    bytes: Range<usize>,
    access: Access,
}

impl RangeGuard {
    /// Returns the address of the first byte. Until the guard is dropped, the bytes may be read
    /// through the pointer, and written to with [`Access::Write`].
    pub fn base(&self) -> NonNull<u8> {
        // SAFETY: only `hold` creates this value. It checked the range, and `memory` keeps the
        // allocation alive.
        unsafe { self.memory.base.add(self.bytes.start) }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// A copy in progress. It locks the bytes that it reads and writes from
/// [`begin`](GuardedCopy::begin) until [`end`](GuardedCopy::end) makes the copy or the value is
/// dropped. For devices that copy from and to host memory asynchronously.
#[derive(Debug)]
pub struct GuardedCopy {
    from: RangeGuard,
    to: RangeGuard,
}

impl GuardedCopy {
    /// Locks both ranges for a copy of `len` bytes. Each range is a piece of memory and an offset
    /// in it. Waits for conflicting accesses.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a range does not exist, both have bytes in common, or `to` is
    /// read-only.
    pub fn begin(
        from: (&Arc<HostMemory>, usize),
        to: (&Arc<HostMemory>, usize),
        len: usize,
    ) -> Result<Self> {
        let start = |(memory, offset): (&Arc<HostMemory>, usize)| {
            memory.range(offset, len).map(|at| at.as_ptr().addr())
        };
        if start(from)?.abs_diff(start(to)?) < len {
            return Err(Error::invalid("a copy to bytes that it reads"));
        }
        let read = || from.0.hold(from.1, len, Access::Read);
        let write = || to.0.hold(to.1, len, Access::Write);
        let (from, to) = if from.0.rank() < to.0.rank() {
            let from = read()?;
            (from, write()?)
        } else {
            let to = write()?;
            (read()?, to)
        };
        Ok(GuardedCopy { from, to })
    }

    /// Makes the copy.
    pub fn end(self) {
        let (from, to) = (self.from.base(), self.to.base());
        // SAFETY: `begin` checked that both ranges have `len` bytes and do not overlap. Both are
        // still locked, one for reading, one for writing.
        unsafe { from.copy_to_nonoverlapping(to, self.from.len()) }
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        self.memory
            .range_lock
            .release(self.bytes.clone(), self.access);
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Owner::Allocated(layout) = self.owner {
            // SAFETY: `allocate` got `base` from the same allocator with this layout. This is the
            // last use of the value, so the memory is freed once.
            unsafe { dealloc(self.base.as_ptr(), layout) }
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("len", &self.len)
            .field("writable", &self.is_writable())
            .finish()
    }
}

/// Several pieces of memory that are locked and unlocked together, in an order that cannot
/// deadlock.
#[derive(Debug, Default)]
pub struct MemorySet {
    pieces: Vec<(Arc<HostMemory>, Access)>,
}

impl MemorySet {
    /// Adds a piece. [`Access::Write`] wins over [`Access::Read`] for a piece that is already in
    /// the set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for writing to read-only memory.
    pub fn add(&mut self, memory: &Arc<HostMemory>, access: Access) -> Result<()> {
        if access == Access::Write {
            memory.check_writable()?;
        }
        match self
            .pieces
            .binary_search_by_key(&memory.rank(), |(m, _)| m.rank())
        {
            Ok(at) if access == Access::Write => self.pieces[at].1 = Access::Write,
            Ok(_) => {}
            Err(at) => self.pieces.insert(at, (Arc::clone(memory), access)),
        }
        Ok(())
    }

    /// Calls `f` while all pieces are locked. Allocates only on the first call. `f` uses the pieces
    /// only through [`base`](HostMemory::base): the safe methods would deadlock.
    pub fn with<R>(&self, f: impl FnOnce() -> R) -> R {
        struct PiecesGuard<'a>(&'a [(Arc<HostMemory>, Access)]);
        impl Drop for PiecesGuard<'_> {
            fn drop(&mut self) {
                self.0
                    .iter()
                    .for_each(|(memory, access)| memory.range_lock.release(0..memory.len, *access));
            }
        }
        self.pieces
            .iter()
            .for_each(|(memory, access)| memory.range_lock.acquire(0..memory.len, *access));
        let _guard = PiecesGuard(&self.pieces);
        f()
    }
}

/// Returns the range of `len` bytes at `offset`, which the caller has checked.
fn span(offset: usize, len: usize) -> Range<usize> {
    offset..offset + len
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Number of iterations. Miri is slow, and switches threads more often.
    const MEETINGS: usize = if cfg!(miri) { 10 } else { 500 };

    #[test]
    fn reads_writes_and_fills_are_bounds_checked() {
        let a = HostMemory::allocate(8, "test", "a").unwrap();
        a.write(2, &[1, 2, 3]).unwrap();
        let mut out = [9; 4];
        a.read(1, &mut out).unwrap();
        assert_eq!(out, [0, 1, 2, 3]);
        assert!(a.write(6, &[0; 3]).is_err());
        assert!(a.read(usize::MAX, &mut out).is_err());
        assert!(a.fill(0, 9, 1).is_err());
        a.copy_to(2, &a, 3, 3).unwrap();
        assert_eq!(
            a.with_bytes(0, 8, <[u8]>::to_vec).unwrap(),
            [0, 0, 1, 1, 2, 3, 0, 0]
        );
    }

    #[test]
    fn borrowed_memory_is_read_only_and_keeps_its_owner() {
        let owner = Arc::new(vec![7u8; 16]);
        let base = NonNull::from(owner.as_slice()).cast();
        // SAFETY: the vector is never written to and is kept alive by the second reference.
        let memory = unsafe { HostMemory::borrow(base, 16, false, Box::new(Arc::clone(&owner))) };
        assert!(
            memory
                .write(0, &[1])
                .unwrap_err()
                .to_string()
                .contains("read-only")
        );
        let mut set = MemorySet::default();
        assert!(set.add(&memory, Access::Write).is_err());
        set.add(&memory, Access::Read).unwrap();
        drop(set);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(memory);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn regions_with_the_same_address_are_all_locked() {
        let owner = Arc::new(vec![7u8; 16]);
        let base = NonNull::from(owner.as_slice()).cast();
        let [part, whole] = [0, 16].map(|len| {
            // SAFETY: the vector is never written to, and each piece keeps it alive by a reference
            // of its own.
            unsafe { HostMemory::borrow(base, len, false, Box::new(Arc::clone(&owner))) }
        });
        let mut set = MemorySet::default();
        set.add(&part, Access::Read).unwrap();
        set.add(&whole, Access::Read).unwrap();
        set.with(|| {
            for piece in [&part, &whole] {
                assert_eq!(piece.range_lock.inside(), 1);
            }
        });
    }

    #[test]
    fn oversized_allocations_are_an_error() {
        assert!(matches!(
            HostMemory::allocate(usize::MAX / 2, "test", "x"),
            Err(Error::OutOfMemory { .. })
        ));
        assert!(matches!(
            HostMemory::allocate(usize::MAX, "test", "x"),
            Err(Error::OutOfMemory { .. })
        ));
    }

    #[test]
    fn writers_are_exclusive() {
        let a = HostMemory::allocate(1, "test", "a").unwrap();
        let b = HostMemory::allocate(1, "test", "b").unwrap();
        let mut set = MemorySet::default();
        set.add(&b, Access::Read).unwrap();
        set.add(&a, Access::Read).unwrap();
        set.add(&a, Access::Write).unwrap();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..MEETINGS {
                        set.with(|| {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn writers_of_different_bytes_run_concurrently() {
        let memory = HostMemory::allocate(100, "test", "a").unwrap();
        // Each half is locked until the other one is.
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for half in 0..2 {
                let (memory, both) = (&memory, &both);
                scope.spawn(move || {
                    let write = |bytes: &mut [u8]| {
                        both.wait();
                        bytes.fill(1 + half as u8);
                    };
                    memory.with_bytes_mut(50 * half, 50, write).unwrap();
                });
            }
        });
        let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
        assert_eq!(memory.with_bytes(0, 100, sum).unwrap(), 150);
        assert!(memory.with_bytes_mut(99, 2, |_| ()).is_err());
    }

    #[test]
    fn a_range_lock_excludes_others_until_it_is_dropped() {
        let memory = HostMemory::allocate(8, "test", "a").unwrap();
        let held = memory.hold(2, 4, Access::Write).unwrap();
        assert_eq!(held.base(), memory.range(2, 4).unwrap());
        memory.write(0, &[1; 2]).unwrap();
        memory.write(6, &[1; 2]).unwrap();
        let left = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                memory.read(5, &mut [0]).unwrap();
                assert_eq!(
                    left.load(Ordering::SeqCst),
                    1,
                    "read before the gate was left"
                );
            });
            while memory.range_lock.waiting() == 0 && !reader.is_finished() {
                std::thread::yield_now();
            }
            left.store(1, Ordering::SeqCst);
            drop(held);
        });
        let readers = [0, 0].map(|at| memory.hold(at, 8, Access::Read).unwrap());
        assert!(memory.hold(5, 4, Access::Read).is_err());
        drop(readers);
        assert!(memory.range_lock.inside() == 0);
    }

    #[test]
    fn a_copy_locks_its_bytes_until_it_is_done() {
        let [a, b] = [0, 1].map(|_| HostMemory::allocate(8, "test", "a").unwrap());
        a.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        for (from, to) in [((&a, 1), (&b, 4)), ((&b, 4), (&a, 5)), ((&a, 0), (&a, 4))] {
            let copy = GuardedCopy::begin(from, to, 3).unwrap();
            let mut expected = [0; 3];
            // Others may read what is read, and touch the bytes next to the locked ones.
            from.0.read(from.1, &mut expected).unwrap();
            to.0.fill(to.1 + 3, 8 - to.1 - 3, 9).unwrap();
            let made = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    from.0.write(from.1, &[0]).unwrap();
                    assert_eq!(made.load(Ordering::SeqCst), 1, "written before it was read");
                });
                while from.0.range_lock.waiting() == 0 && !writer.is_finished() {
                    std::thread::yield_now();
                }
                made.store(1, Ordering::SeqCst);
                copy.end();
            });
            let mut copied = [0; 3];
            to.0.read(to.1, &mut copied).unwrap();
            assert_eq!(copied, expected);
            assert_eq!(a.range_lock.inside() + b.range_lock.inside(), 0);
        }
        for (from, to) in [((&a, 0), (&a, 2)), ((&a, 6), (&b, 0)), ((&a, 0), (&b, 6))] {
            assert!(GuardedCopy::begin(from, to, 3).is_err());
        }
    }

    #[test]
    fn views_of_the_same_bytes_have_the_same_location() {
        let memory = HostMemory::allocate(64, "test", "a").unwrap();
        // SAFETY: the part is only looked at, and its owner is kept alive.
        let part = unsafe {
            let start = memory.base().add(16);
            HostMemory::borrow(start, 8, true, Box::new(Arc::clone(&memory)))
        };
        let (whole, part) = (memory.location(), part.location());
        assert_eq!(part.memory, whole.memory);
        assert_eq!(part.offset, whole.offset + 16);
        assert_ne!(MemoryId::unique(), MemoryId::unique());
    }

    #[test]
    fn accesses_to_overlapping_bytes_wait_for_the_writer() {
        let memory = HostMemory::allocate(8, "test", "a").unwrap();
        std::thread::scope(|scope| {
            for first in 0..4 {
                let memory = &memory;
                scope.spawn(move || {
                    for _ in 0..MEETINGS {
                        let add = |bytes: &mut [u8]| {
                            let all_equal = bytes[1..4].iter().all(|byte| *byte == bytes[1]);
                            bytes[1..4]
                                .iter_mut()
                                .for_each(|byte| *byte = byte.wrapping_add(1));
                            all_equal
                        };
                        assert!(memory.with_bytes_mut(0, 4 + first, add).unwrap());
                        let all_equal = |bytes: &[u8]| bytes[0] == bytes[2];
                        assert!(memory.with_bytes(1, 3, all_equal).unwrap());
                    }
                });
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    /// Returns two pieces of eight bytes of one allocation, so that their lock order does not
    /// depend on the interleaving. The first contains ones, the second twos.
    fn pieces() -> [Arc<HostMemory>; 2] {
        let owner = HostMemory::allocate(16, "test", "both").unwrap();
        [0, 8].map(|offset| {
            owner.fill(offset, 8, 1 + (offset / 8) as u8).unwrap();
            // SAFETY: the bytes are inside the allocation, which is kept alive and from now on
            // accessed only through this piece.
            unsafe {
                let start = owner.base().add(offset);
                HostMemory::borrow(start, 8, true, Box::new(Arc::clone(&owner)))
            }
        })
    }

    /// Copies between the same pieces in opposite directions on two threads, in every interleaving
    /// with up to three preemptions.
    fn all_orders(
        mine: fn(&Arc<HostMemory>, &Arc<HostMemory>),
        theirs: fn(&Arc<HostMemory>, &Arc<HostMemory>),
    ) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let [a, b] = pieces();
            let other = {
                let (a, b) = (Arc::clone(&a), Arc::clone(&b));
                loom::thread::spawn(move || theirs(&b, &a))
            };
            mine(&a, &b);
            other.join().unwrap();
            // Whichever copy came first, the second one copied its result back.
            let bytes = |piece: &HostMemory| piece.with_bytes(0, 8, <[u8]>::to_vec).unwrap();
            assert!(
                bytes(&a) == bytes(&b)
                    && [[1; 8], [2; 8]].contains(&bytes(&a)[..].try_into().unwrap())
            );
            assert_eq!(a.range_lock.inside() + b.range_lock.inside(), 0);
        });
    }

    fn at_once(from: &Arc<HostMemory>, to: &Arc<HostMemory>) {
        from.copy_to(0, to, 0, 8).unwrap();
    }

    fn held(from: &Arc<HostMemory>, to: &Arc<HostMemory>) {
        GuardedCopy::begin((from, 0), (to, 0), 8).unwrap().end();
    }

    fn in_a_set(from: &Arc<HostMemory>, to: &Arc<HostMemory>) {
        let mut set = MemorySet::default();
        set.add(to, Access::Write).unwrap();
        set.add(from, Access::Read).unwrap();
        // SAFETY: both locks are held, and the pieces have eight bytes each and do not overlap.
        set.with(|| unsafe { from.base().copy_to_nonoverlapping(to.base(), 8) });
    }

    #[test]
    fn copies_in_opposite_directions_do_not_deadlock() {
        for mine in [at_once, held, in_a_set] {
            for theirs in [at_once, held, in_a_set] {
                all_orders(mine, theirs);
            }
        }
    }
}
