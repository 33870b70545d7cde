//! Host memory that several devices and threads may share: allocated or borrowed, and guarded.
//!
//! Buffers are shared by reference and kernels work on raw pointers, so something has to keep a write from
//! one thread away from a read in another. Each piece of memory has a *gate*: of each byte, any number of readers or one
//! writer at a time. The safe methods pass the gate by themselves, for the bytes that they touch; a device passes it
//! with a [`MemorySet`] of all memory that a prepared graph touches, then uses [`base`](HostMemory::base). Uncontended,
//! that costs some nanoseconds per buffer and run.

use crate::error::{Error, Result};
use crate::gate::{Access, Gate};
use memmap2::MmapMut;
use std::alloc::{Layout as AllocLayout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Alignment of host memory: a cache line, and enough for any vector register.
pub const HOST_ALIGNMENT: usize = 64;

/// Size in bytes from which on memory gets pages of its own.
const LARGE: usize = 4 << 20;

/// One memory: the host's, or a piece of a device's that nothing else overlaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryId(u64);

impl MemoryId {
    /// The address space of this process.
    pub const HOST: MemoryId = MemoryId(0);

    /// A memory that no other value names: for a piece that a device allocated.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        MemoryId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Where a buffer begins: in which memory, and at which byte of it. It is a matter of the bytes, not of who looks at them: two buffers
/// over the same bytes, such as host memory and a device's import of it, have the same location, so that accesses through
/// one are kept apart from those through the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// The memory.
    pub memory: MemoryId,
    /// The byte: in host memory, its address.
    pub offset: usize,
}

enum Owner {
    Allocated(AllocLayout),
    Borrowed {
        _keep_alive: Box<dyn Any + Send + Sync>,
        writable: bool,
    },
}

/// A piece of host memory behind a gate.
pub struct HostMemory {
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
    gate: Gate,
}

// SAFETY: the memory is plain bytes owned (or kept alive) by this value, and belongs to no thread: it may be used and freed by any. A borrowed owner is `Send`.
unsafe impl Send for HostMemory {}
// SAFETY: the methods that take `&self` touch the bytes inside of the gate only, which admits either readers or one writer of each byte; the other fields
// never change. `base` only returns the address: who uses it promises to be inside of the gate.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory of `len` bytes, aligned to [`HOST_ALIGNMENT`].
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
            // Fewer, larger pages make streaming through weights faster. Where there are none, nothing is lost.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            let base = NonNull::new(map.as_mut_ptr()).ok_or_else(out_of_memory)?;
            // SAFETY: the mapping has `len` zeroed bytes at pages of its own, and moves to the owner, which does not
            // touch them.
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
            gate: Gate::default(),
        }))
    }

    /// Memory that somebody else allocated, such as a mapped file. `owner` is dropped with the last reference.
    ///
    /// # Safety
    /// As long as `owner` lives:
    ///
    /// - `base` points to `len` initialised bytes, valid for reads, and for writes if `writable`.
    /// - Nobody writes to them except through this value. If `writable`, nobody reads them otherwise either.
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
            gate: Gate::default(),
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the size is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the memory may be written to.
    pub fn is_writable(&self) -> bool {
        matches!(
            self.owner,
            Owner::Allocated(_) | Owner::Borrowed { writable: true, .. }
        )
    }

    /// The first byte. Reading or writing through the pointer is allowed only inside of [`MemorySet::with`], with this
    /// memory in the set and the right access; a set does not take read-only memory for writing.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Where it begins.
    pub fn location(&self) -> Location {
        Location {
            memory: MemoryId::HOST,
            offset: self.base.as_ptr().addr(),
        }
    }

    /// Enters the gate for `len` bytes at `offset` until what is returned is dropped: for work that goes on after the call that started it,
    /// such as a copy by a device. Meanwhile accesses that conflict wait; one by the thread that would drop it waits forever.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not so many bytes, or for writing to read-only memory.
    pub fn hold(self: &Arc<Self>, offset: usize, len: usize, access: Access) -> Result<HeldGate> {
        match access {
            Access::Read => self.range(offset, len)?,
            Access::Write => self.writable_range(offset, len)?,
        };
        let bytes = span(offset, len);
        self.gate.enter(bytes.clone(), access);
        Ok(HeldGate {
            memory: Arc::clone(self),
            bytes,
            access,
        })
    }

    /// Where gates of several pieces are entered in one order, so that nobody waits in a circle. Two pieces may start
    /// at one address (read-only ones, or empty ones), but are different values.
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
        // SAFETY: `offset` was just checked to be at most `self.len`, so the result is inside of the allocation or at its end.
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
    /// [`Error::InvalidArgument`] if there are not so many bytes.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.with_bytes(offset, out.len(), |bytes| out.copy_from_slice(bytes))
    }

    /// Sets `len` bytes at `offset` to `value`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not so many bytes or the memory is read-only.
    pub fn fill(&self, offset: usize, len: usize, value: u8) -> Result<()> {
        self.with_bytes_mut(offset, len, |bytes| bytes.fill(value))
    }

    /// Calls `f` with `len` bytes at `offset`; meanwhile nobody can write to them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not so many bytes.
    pub fn with_bytes<R>(
        &self,
        offset: usize,
        len: usize,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        let at = self.range(offset, len)?;
        Ok(self.gate.with(span(offset, len), Access::Read, || {
            // SAFETY: `range` checked the bytes; they are initialised (zeroed or borrowed as such), and not written to while the gate is held.
            f(unsafe { std::slice::from_raw_parts(at.as_ptr(), len) })
        }))
    }

    /// Calls `f` with `len` bytes at `offset` to change; meanwhile nobody else can touch them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not so many bytes or the memory is read-only.
    pub fn with_bytes_mut<R>(
        &self,
        offset: usize,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R> {
        let at = self.writable_range(offset, len)?;
        Ok(self.gate.with(span(offset, len), Access::Write, || {
            // SAFETY: `writable_range` checked the bytes; they are initialised, may be written to, and are nobody else's while the gate is held.
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
        // SAFETY: both ranges were checked, and `copy` is only called inside of the gates entered below, so that nobody writes to `from` or touches
        // `into` meanwhile; ranges may overlap in `copy_to`.
        let copy = || unsafe { from.copy_to(into, len) };
        let (read, written) = (span(offset, len), span(to_offset, len));
        if std::ptr::eq(self, to) {
            // All at once: who enters twice could wait for another one that does.
            let both = read.start.min(written.start)..read.end.max(written.end);
            self.gate.with(both, Access::Write, copy);
        } else if self.rank() < to.rank() {
            self.gate.with(read, Access::Read, || {
                to.gate.with(written, Access::Write, copy)
            });
        } else {
            to.gate.with(written, Access::Write, || {
                self.gate.with(read, Access::Read, copy)
            });
        }
        Ok(())
    }
}

/// A gate that was entered and is left when this is dropped.
#[derive(Debug)]
#[must_use = "the gate is left at once if this is dropped"]
pub struct HeldGate {
    memory: Arc<HostMemory>,
    bytes: Range<usize>,
    access: Access,
}

impl HeldGate {
    /// The first of the bytes. Until the gate is left, they may be read through the pointer, and written to with [`Access::Write`].
    pub fn base(&self) -> NonNull<u8> {
        // SAFETY: `hold`, which alone makes this value, checked the range, and `memory` keeps the allocation alive.
        unsafe { self.memory.base.add(self.bytes.start) }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// A copy that has begun and was not made yet. It holds the gates of the bytes that it reads and writes, from [`begin`](HeldCopy::begin) until it is made by
/// [`end`](HeldCopy::end), or given up by dropping it. For devices that copy from and to host memory on their own time.
#[derive(Debug)]
pub struct HeldCopy {
    from: HeldGate,
    to: HeldGate,
}

impl HeldCopy {
    /// Enters the gates for a copy of `len` bytes, each place a piece of memory and an offset in it. Waits for who is inside.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a range does not exist, both have bytes in common, or `to` is read-only.
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
        let (from, to) = match from.0.rank() < to.0.rank() {
            true => {
                let from = read()?;
                (from, write()?)
            }
            false => {
                let to = write()?;
                (read()?, to)
            }
        };
        Ok(HeldCopy { from, to })
    }

    /// Makes the copy.
    pub fn end(self) {
        let (from, to) = (self.from.base(), self.to.base());
        // SAFETY: `begin` checked that both have as many bytes and none in common; both gates are still held, one for reading, one for writing.
        unsafe { from.copy_to_nonoverlapping(to, self.from.len()) }
    }
}

impl Drop for HeldGate {
    fn drop(&mut self) {
        self.memory.gate.leave(self.bytes.clone(), self.access);
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Owner::Allocated(layout) = self.owner {
            // SAFETY: `allocate` got `base` from the same allocator with this layout; this is the last use of the value, so the memory is freed once.
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

/// Several pieces of memory that are entered and left together, in an order that cannot deadlock.
#[derive(Debug, Default)]
pub struct MemorySet {
    pieces: Vec<(Arc<HostMemory>, Access)>,
}

impl MemorySet {
    /// Adds a piece; [`Access::Write`] wins over [`Access::Read`] for a piece that is there already.
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

    /// Calls `f` while all pieces are entered. Allocates nothing from the second time on. `f` uses the pieces through their
    /// [`base`](HostMemory::base) only: the safe methods would wait for `f` to end.
    pub fn with<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Leave<'a>(&'a [(Arc<HostMemory>, Access)]);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0
                    .iter()
                    .for_each(|(memory, access)| memory.gate.leave(0..memory.len, *access));
            }
        }
        self.pieces
            .iter()
            .for_each(|(memory, access)| memory.gate.enter(0..memory.len, *access));
        let _leave = Leave(&self.pieces);
        f()
    }
}

/// `len` bytes at `offset`, which were checked to exist.
fn span(offset: usize, len: usize) -> Range<usize> {
    offset..offset + len
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// How often threads meet. Miri is slow, and changes threads more often.
    const MEETINGS: usize = if cfg!(miri) { 10 } else { 500 };

    #[test]
    fn copies_are_checked() {
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
    fn pieces_at_one_address_are_all_entered() {
        let owner = Arc::new(vec![7u8; 16]);
        let base = NonNull::from(owner.as_slice()).cast();
        let [part, whole] = [0, 16].map(|len| {
            // SAFETY: the vector is never written to, and each piece keeps it alive by a reference of its own.
            unsafe { HostMemory::borrow(base, len, false, Box::new(Arc::clone(&owner))) }
        });
        let mut set = MemorySet::default();
        set.add(&part, Access::Read).unwrap();
        set.add(&whole, Access::Read).unwrap();
        set.with(|| {
            for piece in [&part, &whole] {
                assert_eq!(piece.gate.inside(), 1);
            }
        });
    }

    #[test]
    fn too_much_is_an_error() {
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
    fn a_writer_is_alone() {
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
    fn writers_of_different_bytes_do_not_wait_for_each_other() {
        let memory = HostMemory::allocate(100, "test", "a").unwrap();
        // Each half is held until the other is.
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
    fn a_held_gate_keeps_others_out_until_it_is_dropped() {
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
            while memory.gate.waiting() == 0 && !reader.is_finished() {
                std::thread::yield_now();
            }
            left.store(1, Ordering::SeqCst);
            drop(held);
        });
        let readers = [0, 0].map(|at| memory.hold(at, 8, Access::Read).unwrap());
        assert!(memory.hold(5, 4, Access::Read).is_err());
        drop(readers);
        assert!(memory.gate.inside() == 0);
    }

    #[test]
    fn a_copy_holds_its_bytes_until_it_is_made() {
        let [a, b] = [0, 1].map(|_| HostMemory::allocate(8, "test", "a").unwrap());
        a.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        for (from, to) in [((&a, 1), (&b, 4)), ((&b, 4), (&a, 5)), ((&a, 0), (&a, 4))] {
            let copy = HeldCopy::begin(from, to, 3).unwrap();
            let mut expected = [0; 3];
            // Others may read what is read, and touch what lies beside it.
            from.0.read(from.1, &mut expected).unwrap();
            to.0.fill(to.1 + 3, 8 - to.1 - 3, 9).unwrap();
            let made = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    from.0.write(from.1, &[0]).unwrap();
                    assert_eq!(made.load(Ordering::SeqCst), 1, "written before it was read");
                });
                while from.0.gate.waiting() == 0 && !writer.is_finished() {
                    std::thread::yield_now();
                }
                made.store(1, Ordering::SeqCst);
                copy.end();
            });
            let mut copied = [0; 3];
            to.0.read(to.1, &mut copied).unwrap();
            assert_eq!(copied, expected);
            assert_eq!(a.gate.inside() + b.gate.inside(), 0);
        }
        for (from, to) in [((&a, 0), (&a, 2)), ((&a, 6), (&b, 0)), ((&a, 0), (&b, 6))] {
            assert!(HeldCopy::begin(from, to, 3).is_err());
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
    fn who_touches_some_of_the_bytes_of_a_writer_waits() {
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

    /// Two pieces of eight bytes of one allocation, so that their order is the same in each order of threads: the first is full of ones, the second of twos.
    fn pieces() -> [Arc<HostMemory>; 2] {
        let owner = HostMemory::allocate(16, "test", "both").unwrap();
        [0, 8].map(|offset| {
            owner.fill(offset, 8, 1 + (offset / 8) as u8).unwrap();
            // SAFETY: the bytes are inside of the allocation, which is kept alive and touched through this piece only from now on.
            unsafe {
                let start = owner.base().add(offset);
                HostMemory::borrow(start, 8, true, Box::new(Arc::clone(&owner)))
            }
        })
    }

    /// Lets two threads copy between the same pieces in opposite directions, in all orders with up to three preemptions.
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
            // Whoever was first, the second copied back what the first had copied.
            let bytes = |piece: &HostMemory| piece.with_bytes(0, 8, <[u8]>::to_vec).unwrap();
            assert!(
                bytes(&a) == bytes(&b)
                    && [[1; 8], [2; 8]].contains(&bytes(&a)[..].try_into().unwrap())
            );
            assert_eq!(a.gate.inside() + b.gate.inside(), 0);
        });
    }

    fn at_once(from: &Arc<HostMemory>, to: &Arc<HostMemory>) {
        from.copy_to(0, to, 0, 8).unwrap();
    }

    fn held(from: &Arc<HostMemory>, to: &Arc<HostMemory>) {
        HeldCopy::begin((from, 0), (to, 0), 8).unwrap().end();
    }

    fn in_a_set(from: &Arc<HostMemory>, to: &Arc<HostMemory>) {
        let mut set = MemorySet::default();
        set.add(to, Access::Write).unwrap();
        set.add(from, Access::Read).unwrap();
        // SAFETY: both gates are entered, and the pieces have eight bytes each, none in common.
        set.with(|| unsafe { from.base().copy_to_nonoverlapping(to.base(), 8) });
    }

    #[test]
    fn copies_in_opposite_directions_do_not_wait_in_a_circle() {
        for mine in [at_once, held, in_a_set] {
            for theirs in [at_once, held, in_a_set] {
                all_orders(mine, theirs);
            }
        }
    }
}
