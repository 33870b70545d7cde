//! Operations that are defined by a [formula](samite_core::formula).

use crate::call::Call;
use crate::value::{Grid, encode, kept_as, zeros};
use samite_core::formula::{Elements, MAX_SOURCES, Shapes, units};
use samite_core::{DIMS, DType, Result};

/// Sources in float64, and the partial result.
struct Numbers {
    sources: Vec<Option<Grid<f64>>>,
    result: Grid<f64>,
    dtype: DType,
}

fn index(shape: [usize; DIMS], [i0, i1, i2, i3]: [usize; DIMS]) -> usize {
    i0 + shape[0] * (i1 + shape[1] * (i2 + shape[2] * i3))
}

impl Elements for Numbers {
    fn get(&self, source: usize, position: [usize; DIMS]) -> f64 {
        let grid = self.sources.get(source).and_then(Option::as_ref);
        let value = grid.and_then(|grid| grid.values.get(index(grid.shape, position)));
        value.copied().unwrap_or(f64::NAN)
    }

    fn put(&mut self, position: [usize; DIMS], value: f64) {
        let at = index(self.result.shape, position);
        // Values that are read again have been rounded.
        let value = match self.dtype {
            DType::F32 => f64::from(value as f32),
            _ => value,
        };
        if let Some(place) = self.result.values.get_mut(at) {
            *place = value;
        }
    }

    fn written(&self, position: [usize; DIMS]) -> f64 {
        let at = index(self.result.shape, position);
        self.result.values.get(at).copied().unwrap_or(f64::NAN)
    }
}

/// Computes all units, one after the other.
pub fn compute(call: &Call) -> Result<()> {
    let layout = call.result.tensor.layout();
    let mut sources = Vec::with_capacity(MAX_SOURCES);
    for index in 0..call.sources.len().min(MAX_SOURCES) {
        sources.push(call.optional_numbers(index)?);
    }
    let layouts = call.sources.iter().map(|source| {
        let source = source.as_ref()?;
        Some(source.tensor.layout())
    });
    let shapes = Shapes::new(layout, layouts);
    let mut numbers = Numbers {
        sources,
        result: Grid {
            shape: layout.shape(),
            values: zeros(layout.elements())?,
        },
        dtype: kept_as(&call.result.tensor),
    };
    for unit in 0..units(&call.op, &shapes) {
        samite_core::formula::compute(&call.op, &shapes, unit, &mut numbers);
    }
    call.store_bytes(&encode(
        numbers.dtype,
        layout.shape()[0],
        &numbers.result.values,
    )?)
}
