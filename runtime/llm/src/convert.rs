//! Converts weights from one file to another on several threads: read, decode, change, encode,
//! write.

use samite_core::{CancelToken, DType};
use samite_gguf::{Error, ErrorKind, GgufFile, LoadOptions, TensorInfo, TensorSlot};
use samite_quant::{can_decode, decode_row, quantize_row};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Approximate number of elements that one thread converts at a time: enough to be worth a read and
/// a write, and few enough for its cache.
const ELEMENTS_PER_JOB: usize = 1 << 17;

/// Buffers of one thread: a decoded row, and the encoded rows of a job.
#[derive(Default)]
struct ConversionBuffers {
    values: Vec<f32>,
    output: Vec<u8>,
}

/// Converts tensors piece by piece: each thread reads some rows, converts them and writes them
/// while they are in its cache.
pub(crate) struct Converter<'a> {
    source: &'a GgufFile,
    threads: usize,
    cancel: &'a CancelToken,
    spare: Mutex<Vec<ConversionBuffers>>,
}

/// Change of the rows during conversion.
#[derive(Clone, Copy)]
pub(crate) enum Change<'a> {
    Nothing,
    /// Changes their decoded values. The function gets the index of the row.
    Values(&'a (dyn Fn(usize, &mut [f32]) + Sync)),
    /// Weights each column's quantization error by its importance, for each matrix of the tensor.
    Weigh(&'a [f32]),
}

impl<'a> Converter<'a> {
    pub fn new(source: &'a GgufFile, threads: usize, cancel: &'a CancelToken) -> Self {
        Converter {
            source,
            threads: threads.max(1),
            cancel,
            spare: Mutex::new(Vec::new()),
        }
    }

    /// Writes `tensor` with elements of type `to` to `slot`.
    pub fn convert(
        &self,
        tensor: &TensorInfo,
        to: DType,
        slot: &TensorSlot<'_>,
        change: Change<'_>,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), Error> {
        let columns = tensor.shape[0];
        let row_bytes = |dtype: DType| dtype.row_bytes(columns).map_err(|e| wrap(tensor, &e));
        let (row_in, row_out) = (row_bytes(tensor.dtype)?, row_bytes(to)?);
        let rows_per_job = (ELEMENTS_PER_JOB / columns).max(1);
        let options = LoadOptions {
            threads: self.threads,
            in_place: false,
            progress: &|bytes, _| progress(bytes / row_in as u64 * columns as u64),
            cancel: &|| self.cancel.is_cancelled(),
            ..LoadOptions::default()
        };
        let job_bytes = row_in.saturating_mul(rows_per_job);
        let list = std::iter::once(tensor);
        self.source.load_chunks(
            list,
            |_| job_bytes,
            &options,
            |_, offset, bytes| {
                let first = offset / row_in;
                let at = first * row_out;
                let copied = tensor.dtype == to && !matches!(change, Change::Values(_));
                // Integers are always finite.
                if copied && (tensor.dtype.is_integer() || !can_decode(tensor.dtype)) {
                    return slot.write_at(at, bytes);
                }
                let mut spare = self.lock().pop().unwrap_or_default();
                let ConversionBuffers { values, output } = &mut spare;
                resize(values, columns)?;
                resize(output, bytes.len() / row_in * row_out)?;
                let rows = bytes
                    .chunks_exact(row_in)
                    .zip(output.chunks_exact_mut(row_out));
                for (row, (from, into)) in (first..).zip(rows) {
                    decode_row(tensor.dtype, from, values).map_err(|e| wrap(tensor, &e))?;
                    // Check everything first: a search that stops early is slow.
                    if !values
                        .iter()
                        .fold(true, |all, value| all & value.is_finite())
                    {
                        let at = values.iter().position(|value| !value.is_finite());
                        let at = at.unwrap_or_default();
                        let message = format!(
                            "holds {} in row {row}, column {at}: the model is damaged",
                            values[at]
                        );
                        return Err(unsupported(tensor, message));
                    }
                    if copied {
                        continue;
                    }
                    let importance = match change {
                        Change::Nothing => None,
                        Change::Values(change) => {
                            change(row, values);
                            None
                        }
                        Change::Weigh(importance) => {
                            let matrix = row / tensor.shape[1].max(1) % tensor.shape[2].max(1);
                            importance.get(matrix * columns..(matrix + 1) * columns)
                        }
                    };
                    quantize_row(to, values, importance, into).map_err(|e| wrap(tensor, &e))?;
                }
                slot.write_at(at, if copied { bytes } else { output })?;
                self.lock().push(spare);
                Ok(())
            },
        )
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ConversionBuffers>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Resizes the buffer to `count` elements.
fn resize<T: Default + Clone>(buffer: &mut Vec<T>, count: usize) -> Result<(), Error> {
    let more = count.saturating_sub(buffer.len());
    buffer.try_reserve(more).map_err(|_| {
        let message = format!("there is no memory for {count} converted elements");
        Error::new(ErrorKind::OutOfMemory, "", message)
    })?;
    buffer.resize(count, T::default());
    Ok(())
}

fn unsupported(tensor: &TensorInfo, message: String) -> Error {
    let field = format!("tensor {:?}", tensor.name);
    Error::new(ErrorKind::Unsupported, field, message)
}

fn wrap(tensor: &TensorInfo, error: &samite_core::Error) -> Error {
    unsupported(tensor, error.to_string())
}

pub(crate) fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "", "cancelled".to_owned())
}
