//! Arguments of a kernel: operands to read and a result to write.

use crate::value::{
    Grid, TensorBlocks, decode, decode_integers, encode, encode_integers, gathered, kept_as,
    read_blocks, room, write_blocks,
};
use samite_core::{Error, Op, Result, TensorId, TensorRef};
use std::sync::Arc;

/// A tensor with its name, for errors.
pub(crate) struct NamedTensor {
    pub name: String,
    pub tensor: TensorRef,
}

/// A node with memory for all its tensors.
pub(crate) struct Call {
    pub device: Arc<str>,
    pub op: Op,
    pub id: TensorId,
    pub sources: Vec<Option<NamedTensor>>,
    pub result: NamedTensor,
}

impl Call {
    /// Returns operand number `index`. Shape inference guarantees that required ones are present.
    pub fn source(&self, index: usize) -> Result<&NamedTensor> {
        self.optional(index).ok_or_else(|| {
            Error::invalid(format!(
                "{} '{}': source {index} is missing",
                self.op.name(),
                self.result.name
            ))
        })
    }

    fn optional(&self, index: usize) -> Option<&NamedTensor> {
        self.sources.get(index).and_then(Option::as_ref)
    }

    /// Returns the numbers of an operand.
    pub fn numbers(&self, index: usize) -> Result<Grid<f64>> {
        let tensor = &self.source(index)?.tensor;
        let layout = tensor.layout();
        Ok(Grid {
            shape: layout.shape(),
            values: decode(
                kept_as(tensor),
                layout.shape()[0],
                &read_blocks(tensor)?.bytes,
            )?,
        })
    }

    /// Returns the numbers of an operand that may be absent.
    pub fn optional_numbers(&self, index: usize) -> Result<Option<Grid<f64>>> {
        self.optional(index)
            .map(|_| self.numbers(index))
            .transpose()
    }

    /// Returns the integers of an operand.
    pub fn integers(&self, index: usize) -> Result<Grid<i64>> {
        let tensor = &self.source(index)?.tensor;
        Ok(Grid {
            shape: tensor.layout().shape(),
            values: decode_integers(tensor.layout().dtype(), &read_blocks(tensor)?.bytes)?,
        })
    }

    /// Returns the blocks of an operand, without decoding.
    pub fn blocks(&self, index: usize) -> Result<TensorBlocks> {
        read_blocks(&self.source(index)?.tensor)
    }

    /// Returns an empty list with memory for the elements of the result.
    pub fn room<T>(&self) -> Result<Vec<T>> {
        room(self.result.tensor.layout().elements())
    }

    /// Computes and writes the elements of the result, in logical order.
    pub fn store_all(&self, values: impl Iterator<Item = f64>) -> Result<()> {
        let count = self.result.tensor.layout().elements();
        self.store(&gathered(count, values)?)
    }

    /// Rounds `values` to the type of operand number `index` and writes them there, for operations
    /// that change operands.
    pub fn store_source(&self, index: usize, values: &[f64]) -> Result<()> {
        let tensor = &self.source(index)?.tensor;
        let layout = tensor.layout();
        write_blocks(tensor, &encode(kept_as(tensor), layout.shape()[0], values)?)
    }

    /// Returns the number of bytes that [`store_bytes`](Self::store_bytes) needs.
    pub fn result_bytes(&self) -> usize {
        let tensor = &self.result.tensor;
        let kept = kept_as(tensor);
        tensor.layout().elements() / kept.block_len() * kept.block_bytes()
    }

    /// Rounds `values` to the type of the result and writes them.
    pub fn store(&self, values: &[f64]) -> Result<()> {
        let tensor = &self.result.tensor;
        self.store_bytes(&encode(
            kept_as(tensor),
            tensor.layout().shape()[0],
            values,
        )?)
    }

    /// Writes integers.
    pub fn store_integers(&self, values: impl IntoIterator<Item = i64>) -> Result<()> {
        let layout = self.result.tensor.layout();
        let (dtype, count) = (layout.dtype(), layout.elements());
        self.store_bytes(&encode_integers(dtype, count, values.into_iter())?)
    }

    /// Writes blocks, in logical order.
    pub fn store_bytes(&self, bytes: &[u8]) -> Result<()> {
        write_blocks(&self.result.tensor, bytes)
    }

    /// Returns an error with the context of this call. If memory was refused, adds its purpose.
    pub fn failed(&self, error: Error) -> Error {
        match error {
            Error::OutOfMemory { asked, free, .. } => Error::OutOfMemory {
                device: (&*self.device).into(),
                what: format!("{} '{}' in float64", self.op.name(), self.result.name).into(),
                asked,
                free,
            },
            error => error,
        }
    }

    /// Returns an expert that was read from operand `from`, checked to be less than `limit`.
    /// Returns `None` for -1.
    pub fn expert(&self, value: i64, limit: usize, from: usize) -> Result<Option<usize>> {
        if value == -1 {
            return Ok(None);
        }
        self.index(value, limit, from).map(Some)
    }

    /// Returns an index that was read from operand `from`, checked to be less than `limit`.
    pub fn index(&self, value: i64, limit: usize, from: usize) -> Result<usize> {
        match usize::try_from(value) {
            Ok(index) if index < limit => Ok(index),
            _ => Err(Error::device(
                &self.device,
                format!(
                    "{} '{}': index {value} in '{}' is not in 0..{limit}",
                    self.op.name(),
                    self.result.name,
                    self.source(from)?.name
                ),
            )),
        }
    }
}
