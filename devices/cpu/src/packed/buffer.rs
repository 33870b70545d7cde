//! Buffers of packed weights. Writing packs, reading unpacks.

use super::layout::PackedLayout;
use samite_core::{
    Buffer, BufferType, Error, HostMemory, Layout, Location, Result, Slot, TensorInfo, Usage,
};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Name of the buffer type.
pub(crate) const NAME: &str = "cpu-packed";

/// Name of the buffer type in high-bandwidth memory.
pub(crate) const HIGH_BANDWIDTH_NAME: &str = "hbm-packed";

/// Returns whether the contents of a buffer are packed, or will be if it is only planned.
pub(crate) fn is_packed(buffer: &dyn Buffer) -> bool {
    let name = buffer.buffer_type().name();
    buffer.as_any().is::<PackedBuffer>() || [NAME, HIGH_BANDWIDTH_NAME].contains(&name)
}

/// Returns the layout of a tensor in packed memory.
pub(crate) fn layout_of(layout: &Layout) -> Result<PackedLayout> {
    PackedLayout::new(layout).ok_or_else(|| {
        let what = format!("a tensor of {layout}");
        Error::unsupported(NAME, what, "it cannot be packed")
    })
}

/// Packed tensors in host memory.
#[derive(Debug)]
pub(crate) struct PackedBuffer {
    buffer_type: Arc<dyn BufferType>,
    memory: Arc<HostMemory>,
    usage: Usage,
}

/// Intersection of a range of a tensor's bytes with one panel.
struct PanelPart {
    /// Offset of the panel in the buffer.
    at: usize,
    /// Bytes of the panel's unpacked rows.
    len: usize,
    /// The intersection, within the unpacked rows.
    in_rows: Range<usize>,
    /// The intersection, within the range.
    in_range: Range<usize>,
}

impl PackedBuffer {
    pub fn new(buffer_type: Arc<dyn BufferType>, memory: Arc<HostMemory>, usage: Usage) -> Self {
        PackedBuffer {
            buffer_type,
            memory,
            usage,
        }
    }

    /// Returns the memory, which holds panels.
    pub fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// Returns the layout of a tensor in this buffer.
    fn layout(&self, tensor: Slot) -> Result<PackedLayout> {
        let layout = layout_of(&tensor.layout)?;
        if tensor
            .offset
            .checked_add(layout.bytes())
            .is_none_or(|end| end > self.memory.len())
        {
            return Err(Error::invalid(format!(
                "{} at byte {} do not fit into a buffer of {} bytes",
                tensor.layout,
                tensor.offset,
                self.memory.len()
            )));
        }
        Ok(layout)
    }

    /// Calls `f` for each panel that overlaps `len` bytes from byte `offset` of the tensor.
    fn each_panel(
        &self,
        tensor: Slot,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&PackedLayout, PanelPart) -> Result<()>,
    ) -> Result<()> {
        let layout = self.layout(tensor)?;
        let bytes = tensor.layout.bytes();
        let end = offset
            .checked_add(len)
            .filter(|&end| end <= bytes)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "bytes {offset}..+{len} of a tensor of {bytes} bytes"
                ))
            })?;
        let mut at = offset;
        while at < end {
            let row = at / layout.row_bytes;
            let (matrix, row) = (row / layout.rows, row % layout.rows);
            let first = row / super::PANEL * super::PANEL;
            let rows = super::PANEL.min(layout.rows - first);
            let start = (matrix * layout.rows + first) * layout.row_bytes;
            let len = rows * layout.row_bytes;
            let stop = end.min(start + len);
            let part = PanelPart {
                at: tensor.offset + layout.panel_of(matrix, row),
                len,
                in_rows: at - start..stop - start,
                in_range: at - offset..stop - offset,
            };
            f(&layout, part)?;
            at = stop;
        }
        Ok(())
    }

    /// Changes a part of a panel. `change` gets the bytes of the part's rows.
    fn change_part(
        &self,
        layout: &PackedLayout,
        part: PanelPart,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut rows = vec![0; part.len];
        // In one locked access: between two, a write by another thread to the panel would be lost.
        self.memory
            .with_bytes_mut(part.at, layout.panel_bytes, |panel| {
                layout.unpack(panel, &mut rows);
                change(&mut rows[part.in_rows]);
                layout.pack(&rows, panel);
            })
    }
}

impl Buffer for PackedBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.buffer_type
    }

    fn size(&self) -> usize {
        self.memory.len()
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        self.memory.location()
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let layout = tensor.layout;
        self.layout(Slot { offset, layout }).map(|_| ())
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        self.each_panel(tensor, offset, data.len(), |layout, part| {
            let data = &data[part.in_range.clone()];
            if data.len() == part.len {
                self.memory
                    .with_bytes_mut(part.at, layout.panel_bytes, |panel| {
                        layout.pack(data, panel)
                    })
            } else {
                self.change_part(layout, part, |rows| rows.copy_from_slice(data))
            }
        })
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        let mut rows = Vec::new();
        self.each_panel(tensor, offset, out.len(), |layout, part| {
            rows.resize(part.len, 0);
            self.memory
                .with_bytes(part.at, layout.panel_bytes, |panel| {
                    layout.unpack(panel, &mut rows)
                })?;
            out[part.in_range].copy_from_slice(&rows[part.in_rows]);
            Ok(())
        })
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        self.each_panel(tensor, offset, len, |layout, part| {
            self.change_part(layout, part, |rows| rows.fill(value))
        })
    }

    fn clear(&self, value: u8) -> Result<()> {
        self.memory.fill(0, self.memory.len(), value)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
