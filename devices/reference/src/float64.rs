//! Memory that keeps F32 tensors in float64, for measurements that rounding would blur, such as
//! finite differences.

use crate::value::{gathered, zeros};
use samite_core::{HostMemory, Result};
use std::sync::{Mutex, PoisonError};

/// For each four bytes of a buffer, the unrounded number of an F32 tensor at that place.
#[derive(Debug)]
pub(crate) struct Float64(Mutex<Vec<f64>>);

impl Float64 {
    /// Creates the numbers of a buffer of `bytes` zero bytes.
    pub fn new(bytes: usize) -> Result<Self> {
        Ok(Float64(Mutex::new(zeros(bytes / 4)?)))
    }

    fn with<R>(&self, f: impl FnOnce(&mut Vec<f64>) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads `len` bytes from `offset` that were written to `memory` from outside.
    pub fn refresh(&self, memory: &HostMemory, offset: usize, len: usize) -> Result<()> {
        let first = offset / 4;
        self.with(|numbers| {
            let end = offset.saturating_add(len).div_ceil(4).min(numbers.len());
            let Some(numbers) = numbers.get_mut(first..end) else {
                return Ok(());
            };
            memory.with_bytes(4 * first, 4 * numbers.len(), |bytes| {
                for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks().0) {
                    *number = f32::from_le_bytes(*bytes).into();
                }
            })
        })
    }

    /// Copies `len` bytes' worth of numbers from another buffer.
    pub fn copy_from(&self, to: usize, other: &Float64, from: usize, len: usize) -> Result<()> {
        let count = len / 4;
        let copied = other.with(|numbers| {
            let range = numbers.get(from / 4..from / 4 + count).unwrap_or_default();
            gathered(range.len(), range.iter().copied())
        })?;
        self.with(|numbers| {
            let places = numbers.iter_mut().skip(to / 4);
            places.zip(copied).for_each(|(place, x)| *place = x);
        });
        Ok(())
    }

    /// Returns the numbers at `count` byte offsets, as bytes.
    pub fn read(&self, count: usize, offsets: impl Iterator<Item = usize>) -> Result<Vec<u8>> {
        self.with(|numbers| {
            let number = |at: usize| numbers.get(at / 4).copied().unwrap_or(f64::NAN);
            gathered(
                count.saturating_mul(size_of::<f64>()),
                offsets.flat_map(|at| number(at).to_le_bytes()),
            )
        })
    }

    /// Writes numbers, given as bytes, to some byte offsets.
    pub fn write(&self, offsets: impl Iterator<Item = usize>, bytes: &[u8]) {
        self.with(|numbers| {
            for (at, bytes) in offsets.zip(bytes.as_chunks().0) {
                if let Some(place) = numbers.get_mut(at / 4) {
                    *place = f64::from_le_bytes(*bytes);
                }
            }
        });
    }
}
