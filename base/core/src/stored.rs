//! Named tensors that live in buffers, such as weights and caches.

use crate::buffer::{Buffer, BufferType, Cut, Role, Slot, TensorInfo, Usage, align_up};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::tensor_ref::TensorRef;
use std::sync::Arc;

/// A named tensor in a buffer, such as a weight or a cache. Graphs refer to it as a leaf.
#[derive(Debug)]
pub struct StoredTensor {
    name: Arc<str>,
    role: Role,
    cut: Option<Cut>,
    tensor: TensorRef,
}

impl StoredTensor {
    /// Declares that `layout` lies at `offset` of `buffer`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it does not fit, or an error of the buffer. A tensor in a
    /// mapped file has the file's alignment, not the buffer type's. A device refuses a tensor that
    /// it cannot use.
    pub fn new(
        name: impl Into<Arc<str>>,
        buffer: Arc<dyn Buffer>,
        offset: usize,
        layout: Layout,
    ) -> Result<Arc<Self>> {
        let name = name.into();
        let info = TensorInfo::new(&name, layout, buffer.usage());
        Self::described(&info, buffer, offset)
    }

    /// Does what [`new`](StoredTensor::new) does, with more information about the tensor.
    ///
    /// # Errors
    /// As [`new`](StoredTensor::new).
    pub fn described(
        info: &TensorInfo<'_>,
        buffer: Arc<dyn Buffer>,
        offset: usize,
    ) -> Result<Arc<Self>> {
        let &TensorInfo {
            name,
            layout,
            role,
            cut,
            ..
        } = info;
        let info = TensorInfo {
            usage: buffer.usage(),
            ..*info
        };
        let size = buffer.buffer_type().alloc_size(&info)?;
        if offset
            .checked_add(size)
            .is_none_or(|end| end > buffer.size())
        {
            return Err(Error::invalid(format!(
                "tensor '{name}': {size} bytes at {offset} do not fit into a buffer of {} bytes",
                buffer.size()
            )));
        }
        buffer.init_tensor(offset, &info)?;
        let slot = Slot { offset, layout };
        Ok(Arc::new(StoredTensor {
            name: name.into(),
            role,
            cut,
            tensor: TensorRef { buffer, slot },
        }))
    }

    /// Returns its role in the model.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns how it may be split.
    pub fn cut(&self) -> Option<Cut> {
        self.cut
    }

    /// Returns the description that its memory got.
    pub fn info(&self) -> TensorInfo<'_> {
        TensorInfo {
            role: self.role,
            cut: self.cut,
            ..TensorInfo::new(&self.name, *self.layout(), self.tensor.buffer.usage())
        }
    }

    /// Returns the name to show to users.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type, shape and strides.
    pub fn layout(&self) -> &Layout {
        self.tensor.layout()
    }

    /// Returns the tensor in its buffer.
    pub fn tensor(&self) -> &TensorRef {
        &self.tensor
    }
}

/// Tensors allocated together, in as few buffers of one type as its size limit allows.
#[derive(Debug, Default)]
pub struct TensorGroup {
    /// The tensors, in the requested order.
    pub tensors: Vec<Arc<StoredTensor>>,
    /// Their buffers.
    pub buffers: Vec<Arc<dyn Buffer>>,
}

impl TensorGroup {
    /// Allocates memory for named layouts.
    ///
    /// # Errors
    /// As [`allocate_described`](TensorGroup::allocate_described).
    pub fn allocate(
        buffer_type: &Arc<dyn BufferType>,
        usage: Usage,
        tensors: &[(&str, Layout)],
    ) -> Result<Self> {
        let described = |&(name, layout): &(_, Layout)| TensorInfo::new(name, layout, usage);
        let described: Vec<_> = tensors.iter().map(described).collect();
        Self::allocate_described(buffer_type, usage, &described)
    }

    /// Allocates memory for tensors.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]. [`Error::Unsupported`] if a tensor exceeds the maximum buffer size.
    pub fn allocate_described(
        buffer_type: &Arc<dyn BufferType>,
        usage: Usage,
        tensors: &[TensorInfo<'_>],
    ) -> Result<Self> {
        let mut group = TensorGroup::default();
        let mut rest = tensors;
        for BufferPlan { offsets, size } in pieces(buffer_type, tensors)? {
            let buffer = buffer_type.allocate(size, usage)?;
            let members;
            (members, rest) = rest.split_at(offsets.len());
            for (tensor, offset) in members.iter().zip(offsets) {
                let buffer = Arc::clone(&buffer);
                group
                    .tensors
                    .push(StoredTensor::described(tensor, buffer, offset)?);
            }
            group.buffers.push(buffer);
        }
        Ok(group)
    }

    /// Returns the bytes that [`allocate_described`](TensorGroup::allocate_described) would
    /// allocate.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a tensor exceeds the maximum buffer size.
    pub fn planned_size(
        buffer_type: &Arc<dyn BufferType>,
        tensors: &[TensorInfo<'_>],
    ) -> Result<usize> {
        let pieces = pieces(buffer_type, tensors)?;
        let total = pieces
            .iter()
            .try_fold(0usize, |sum, piece| sum.checked_add(piece.size));
        total.ok_or_else(|| Error::invalid("the sizes of all tensors together overflow"))
    }

    /// Returns the [`planned_size`](TensorGroup::planned_size) by memory name. Memory that is split
    /// has one entry per member.
    ///
    /// # Errors
    /// As [`planned_size`](TensorGroup::planned_size).
    pub fn planned_by_memory(
        buffer_type: &Arc<dyn BufferType>,
        tensors: &[TensorInfo<'_>],
    ) -> Result<Vec<(String, usize)>> {
        let mut sizes: Vec<(String, usize)> = Vec::new();
        for tensor in tensors {
            for (name, size) in buffer_type.member_sizes(tensor)? {
                match sizes.iter_mut().find(|known| known.0 == name) {
                    Some(known) => known.1 = known.1.saturating_add(size),
                    None => sizes.push((name, size)),
                }
            }
        }
        if sizes.is_empty() {
            let size = TensorGroup::planned_size(buffer_type, tensors)?;
            sizes.push((buffer_type.name().to_owned(), size));
        }
        Ok(sizes)
    }

    /// Returns the bytes of all buffers.
    pub fn size(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.size()).sum()
    }

    /// Sets every byte of all buffers.
    ///
    /// # Errors
    /// If a device fails.
    pub fn clear(&self, value: u8) -> Result<()> {
        self.buffers
            .iter()
            .try_for_each(|buffer| buffer.clear(value))
    }
}

/// One buffer of a group, with the offsets of consecutive tensors.
struct BufferPlan {
    offsets: Vec<usize>,
    size: usize,
}

/// Distributes tensors over as few buffers as the type's size limit allows.
fn pieces(
    buffer_type: &Arc<dyn BufferType>,
    tensors: &[TensorInfo<'_>],
) -> Result<Vec<BufferPlan>> {
    let sizes = buffer_type.alloc_sizes(tensors)?;
    let (alignment, max_size) = (buffer_type.alignment(), buffer_type.max_size());
    let mut pieces: Vec<BufferPlan> = Vec::new();
    for (tensor, size) in tensors.iter().zip(sizes) {
        if size > max_size {
            return Err(Error::unsupported(
                buffer_type.name(),
                format!("tensor '{}' of {size} bytes", tensor.name),
                format!("a buffer has at most {max_size} bytes"),
            ));
        }
        let behind = pieces.last().and_then(|piece| {
            let at = align_up(piece.size, alignment)?;
            Some((at, at.checked_add(size).filter(|&end| end <= max_size)?))
        });
        match (behind, pieces.last_mut()) {
            (Some((at, end)), Some(piece)) => {
                piece.offsets.push(at);
                piece.size = end;
            }
            _ => pieces.push(BufferPlan {
                offsets: vec![0],
                size,
            }),
        }
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, host_buffer_type};

    #[derive(Debug)]
    struct Small;

    impl BufferType for Small {
        fn name(&self) -> &str {
            "small"
        }
        fn alignment(&self) -> usize {
            32
        }
        fn max_size(&self) -> usize {
            100
        }
        fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn Buffer>> {
            assert!(size <= 100);
            host_buffer_type().allocate(size, usage)
        }
    }

    fn f32s(n: usize) -> Layout {
        Layout::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
    }

    #[test]
    fn groups_respect_alignment_and_size_limits() {
        let small: Arc<dyn BufferType> = Arc::new(Small);
        let layouts = [
            ("a", f32s(5)),
            ("b", f32s(10)),
            ("c", f32s(20)),
            ("d", f32s(25)),
        ];
        let group = TensorGroup::allocate(&small, Usage::Weights, &layouts).unwrap();
        let offsets: Vec<_> = group
            .tensors
            .iter()
            .map(|t| t.tensor().slot.offset)
            .collect();
        assert_eq!(offsets, [0, 32, 0, 0]);
        assert_eq!(
            group.buffers.iter().map(|b| b.size()).collect::<Vec<_>>(),
            [72, 80, 100]
        );
        let error =
            TensorGroup::allocate(&small, Usage::Weights, &[("big", f32s(26))]).unwrap_err();
        assert!(error.to_string().contains("'big'"), "{error}");
    }

    #[test]
    fn tensors_are_checked_against_their_buffer() {
        let buffer = host_buffer_type().allocate(64, Usage::Any).unwrap();
        assert!(StoredTensor::new("x", Arc::clone(&buffer), 8, f32s(15)).is_err());
        let x = StoredTensor::new("x", Arc::clone(&buffer), 0, f32s(4)).unwrap();
        assert!(
            x.tensor()
                .write(13, &[0; 4])
                .unwrap_err()
                .to_string()
                .contains("16 bytes")
        );
        let y = StoredTensor::new("y", buffer, 32, f32s(4)).unwrap();
        x.tensor().write(0, &[7; 16]).unwrap();
        y.tensor().copy_from(x.tensor()).unwrap();
        let mut out = [0; 16];
        y.tensor().read(0, &mut out).unwrap();
        assert_eq!(out, [7; 16]);
    }
}
