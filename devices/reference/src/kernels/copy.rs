//! Moving elements: copies, conversions, repetition, concatenation, padding.

use crate::call::Call;
use crate::value::{block_shape, kept_as, positions, room};
use samite_core::{DIMS, Result, Shape};

/// Copies the elements of source 0 in logical order, whatever the shapes. Between equal types,
/// bytes are copied unchanged.
pub fn convert(call: &Call) -> Result<()> {
    let from = kept_as(&call.source(0)?.tensor);
    let to = kept_as(&call.result.tensor);
    if from == to {
        call.store_bytes(&call.blocks(0)?.bytes)
    } else if from.is_integer() && to.is_integer() {
        call.store_integers(call.integers(0)?.values)
    } else {
        call.store(&call.numbers(0)?.values)
    }
}

/// Copies to element `i` of each dimension the source's element `i` modulo its extent.
pub fn repeat(call: &Call) -> Result<()> {
    let source = call.blocks(0)?;
    let mut bytes = room(call.result_bytes())?;
    for position in positions(call.result.tensor.layout().shape()) {
        let wrapped = std::array::from_fn(|d| position[d] % source.shape[d]);
        bytes.extend_from_slice(source.at(wrapped));
    }
    call.store_bytes(&bytes)
}

/// Writes source 0, then source 1, along `dim`.
pub fn concat(call: &Call, dim: usize) -> Result<()> {
    let (first, second) = (call.blocks(0)?, call.blocks(1)?);
    let mut bytes = room(call.result_bytes())?;
    for mut position in positions(block_shape(call.result.tensor.layout())) {
        match position[dim].checked_sub(first.shape[dim]) {
            None => bytes.extend_from_slice(first.at(position)),
            Some(behind) => {
                position[dim] = behind;
                bytes.extend_from_slice(second.at(position));
            }
        }
    }
    call.store_bytes(&bytes)
}

/// Writes source 0 at `before`, and zeros around it.
pub fn pad(call: &Call, before: Shape) -> Result<()> {
    let source = call.numbers(0)?;
    let value = |position: [usize; DIMS]| {
        let mut inner = [0; DIMS];
        for d in 0..DIMS {
            inner[d] = position[d]
                .checked_sub(before[d])
                .filter(|&i| i < source.shape[d])?;
        }
        Some(source.at(inner))
    };
    let positions = positions(call.result.tensor.layout().shape());
    call.store_all(positions.map(|position| value(position).unwrap_or(0.0)))
}
