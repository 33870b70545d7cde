//! Tensors in buffers: reading, writing and copying them.

use crate::buffer::{Buffer, Slot};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::memory::Location;
use crate::rows::Rows;
use std::sync::Arc;

/// A tensor in a buffer.
#[derive(Clone, Debug)]
pub struct TensorRef {
    /// The buffer.
    pub buffer: Arc<dyn Buffer>,
    /// Place and layout in the buffer.
    pub slot: Slot,
}

impl TensorRef {
    /// Checks that `len` bytes from byte `offset` on are inside the tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are not.
    pub fn check_range(&self, offset: usize, len: usize) -> Result<()> {
        let bytes = self.slot.layout.bytes();
        if offset.checked_add(len).is_none_or(|end| end > bytes) {
            return Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor of {bytes} bytes ({})",
                self.slot.layout
            )));
        }
        Ok(())
    }

    /// Returns the type, shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.slot.layout
    }

    /// Returns the location of its first element.
    pub fn location(&self) -> Location {
        let Location { memory, offset } = self.buffer.location();
        Location {
            memory,
            offset: offset.saturating_add(self.slot.offset),
        }
    }

    /// Returns whether the byte ranges from the first to the last element of both tensors overlap,
    /// even in different buffers.
    pub fn overlaps(&self, other: &TensorRef) -> bool {
        let (mine, theirs) = (self.location(), other.location());
        let end = |start: Location, layout: &Layout| start.offset.saturating_add(layout.bytes());
        mine.memory == theirs.memory
            && mine.offset < end(theirs, other.layout())
            && theirs.offset < end(mine, self.layout())
    }

    /// Returns whether an element may share bytes with one of `other`. Exact for tensors with the
    /// same strides.
    pub fn may_share_elements(&self, other: &TensorRef) -> bool {
        let (mine, theirs) = (self.location(), other.location());
        mine.memory == theirs.memory
            && self
                .layout()
                .may_meet(mine.offset, other.layout(), theirs.offset)
    }

    /// Writes `data` at byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range is outside the tensor, the buffer is read-only, or the device fails.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check_range(offset, data.len())?;
        self.buffer.write(self.slot, offset, data)
    }

    /// Reads from byte `offset` of the tensor.
    ///
    /// # Errors
    /// If the range is outside the tensor or the device fails.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check_range(offset, out.len())?;
        self.buffer.read(self.slot, offset, out)
    }

    /// Writes pieces at equal distances.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a piece is outside the tensor or `data`. Otherwise as
    /// [`write`](TensorRef::write).
    pub fn write_rows(&self, rows: Rows, data: &[u8]) -> Result<()> {
        if rows.check(self.slot.layout.bytes(), data.len())? {
            self.buffer.write_rows(self.slot, rows, data)?;
        }
        Ok(())
    }

    /// Reads pieces at equal distances.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a piece is outside the tensor or `out`. Otherwise as
    /// [`read`](TensorRef::read).
    pub fn read_rows(&self, rows: Rows, out: &mut [u8]) -> Result<()> {
        if rows.check(self.slot.layout.bytes(), out.len())? {
            self.buffer.read_rows(self.slot, rows, out)?;
        }
        Ok(())
    }

    /// Copies from a tensor of equal layout, through the host if there is no direct way.
    ///
    /// # Errors
    /// [`Error::Shape`] if the layouts differ. Otherwise as [`read`](TensorRef::read) and
    /// [`write`](TensorRef::write).
    pub fn copy_from(&self, from: &TensorRef) -> Result<()> {
        self.copy_with(from, &mut BounceBuffer::default())
    }

    /// Does what [`copy_from`](TensorRef::copy_from) does, with a reusable buffer for copies
    /// through the host.
    ///
    /// # Errors
    /// As [`copy_from`](TensorRef::copy_from).
    pub fn copy_with(&self, from: &TensorRef, bounce: &mut BounceBuffer) -> Result<()> {
        if self.slot.layout != from.slot.layout {
            return Err(Error::shape(format!(
                "copy of {} to {}: the layouts differ",
                from.slot.layout, self.slot.layout
            )));
        }
        if self.buffer.copy_from(self.slot, from)? {
            return Ok(());
        }
        let len = self.slot.layout.bytes();
        match (from.buffer.host(), self.buffer.host()) {
            // Locks both ranges in one call: holding one while waiting for the other could
            // deadlock.
            (Some(source), Some(target)) => {
                source.copy_to(from.slot.offset, target, self.slot.offset, len)
            }
            // Read-only memory is never written to, so its lock may be held while waiting for
            // another one.
            (Some(source), None) if !source.is_writable() => {
                source.with_bytes(from.slot.offset, len, |bytes| {
                    self.buffer.write(self.slot, 0, bytes)
                })?
            }
            _ => {
                let piece = self.bounce_piece();
                bounce.reserve(piece.min(len))?;
                let mut at = 0;
                while at < len {
                    let bytes = &mut bounce.bytes[..piece.min(len - at)];
                    from.buffer.read(from.slot, at, bytes)?;
                    self.buffer.write(self.slot, at, bytes)?;
                    at += bytes.len();
                }
                Ok(())
            }
        }
    }

    /// Makes `bounce` large enough for a copy from `from`, so that the copy does not allocate.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn reserve_bounce(&self, from: &TensorRef, bounce: &mut BounceBuffer) -> Result<()> {
        let direct = match (from.buffer.host(), self.buffer.host()) {
            (Some(source), target) => target.is_some() || !source.is_writable(),
            (None, _) => false,
        };
        if direct {
            return Ok(());
        }
        bounce.reserve(self.bounce_piece().min(self.slot.layout.bytes()))
    }

    /// Returns the bytes of one piece of a copy through the host. Whole groups of rows, if the
    /// memory accepts pieces.
    fn bounce_piece(&self) -> usize {
        let layout = &self.slot.layout;
        let group = self.buffer.buffer_type().row_group();
        let [_, rows, ..] = layout.shape();
        match group {
            // Groups are counted from the first row of each matrix.
            Some(group)
                if layout.is_contiguous()
                    && (layout.rows() == rows || rows.is_multiple_of(group)) =>
            {
                let unit = layout.row_bytes().saturating_mul(group).max(1);
                unit.saturating_mul((BounceBuffer::PIECE / unit).max(1))
            }
            _ => usize::MAX,
        }
    }
}

/// Host buffer for copies between memories without a direct copy. It grows to the size of the
/// largest copy, or to a few MiB if the target accepts pieces.
#[derive(Debug, Default)]
pub struct BounceBuffer {
    bytes: Vec<u8>,
}

impl BounceBuffer {
    /// Maximum bytes of a piece of a copy.
    const PIECE: usize = 4 << 20;

    /// Grows it to at least `len` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn reserve(&mut self, len: usize) -> Result<()> {
        let more = len.saturating_sub(self.bytes.len());
        self.bytes
            .try_reserve_exact(more)
            .map_err(|_| Error::OutOfMemory {
                device: "host".into(),
                what: "copies between devices".into(),
                asked: len,
                free: None,
            })?;
        self.bytes.resize(len.max(self.bytes.len()), 0);
        Ok(())
    }

    /// Returns the first `len` bytes, which should be [reserved](BounceBuffer::reserve) already.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if they were not reserved and cannot be allocated.
    pub fn bytes(&mut self, len: usize) -> Result<&mut [u8]> {
        self.reserve(len)?;
        Ok(&mut self.bytes[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BufferType, DType, HostMemory, Usage, host_buffer_type};
    use std::any::Any;

    fn f32s(n: usize) -> Layout {
        Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
    }

    /// Host memory without `copy_from`.
    #[derive(Debug)]
    struct Plain(Arc<dyn Buffer>);

    impl Buffer for Plain {
        fn buffer_type(&self) -> &Arc<dyn BufferType> {
            self.0.buffer_type()
        }
        fn size(&self) -> usize {
            self.0.size()
        }
        fn usage(&self) -> Usage {
            self.0.usage()
        }
        fn location(&self) -> Location {
            self.0.location()
        }
        fn host(&self) -> Option<&Arc<HostMemory>> {
            self.0.host()
        }
        fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
            self.0.write(tensor, offset, data)
        }
        fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
            self.0.read(tensor, offset, out)
        }
        fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
            self.0.fill(tensor, offset, len, value)
        }
        fn clear(&self, value: u8) -> Result<()> {
            self.0.clear(value)
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn copies_within_one_memory_do_not_deadlock() {
        let buffer: Arc<dyn Buffer> =
            Arc::new(Plain(host_buffer_type().allocate(64, Usage::Any).unwrap()));
        let [a, b] = [0, 32].map(|offset| TensorRef {
            buffer: Arc::clone(&buffer),
            slot: Slot {
                offset,
                layout: f32s(8),
            },
        });
        a.write(0, &[5; 32]).unwrap();
        b.copy_from(&a).unwrap();
        let mut out = [0; 32];
        b.read(0, &mut out).unwrap();
        assert_eq!(out, [5; 32]);
    }
}
