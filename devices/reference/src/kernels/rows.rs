//! Rows by number.

use crate::call::Call;
use crate::value::{read_row, room, rows, write_row};
use samite_core::Result;

/// Copies the rows of source 0 that source 1 selects.
pub fn get(call: &Call) -> Result<()> {
    let (table, numbers) = (call.source(0)?, call.integers(1)?);
    let count = table.tensor.layout().shape()[1];
    let [n0, n1, n2, _] = numbers.shape;
    let mut values = call.room()?;
    for [row, i2, i3] in rows([1, n0, n1, n2]) {
        let number = call.index(numbers.at([row, i2, i3, 0]), count, 1)?;
        values.extend(read_row(&table.tensor, [number, i2, i3])?);
    }
    call.store(&values)
}

/// Writes the rows of source 0 to the rows that source 1 selects. All numbers are checked first.
pub fn set(call: &Call) -> Result<()> {
    let (source, numbers) = (call.numbers(0)?, call.integers(1)?);
    let count = call.result.tensor.layout().shape()[1];
    let mut places = room(source.shape[1..].iter().product())?;
    for [i1, i2, i3] in rows(source.shape) {
        let number = numbers.at([i1, i2 % numbers.shape[1], i3 % numbers.shape[2], 0]);
        places.push([call.index(number, count, 1)?, i2, i3]);
    }
    places
        .into_iter()
        .zip(source.rows())
        .try_for_each(|(place, row)| write_row(&call.result.tensor, place, row))
}

#[cfg(test)]
mod tests {
    use crate::{ReferenceDevice, ReferenceOptions};
    use samite_core::{DType, Device, Graph};

    #[test]
    fn codebook_types_are_decoded_but_not_encoded() {
        let device = ReferenceDevice::new(ReferenceOptions::default());
        let mut g = Graph::new();
        let table = g.leaf("table", DType::IQ2_XXS, [256, 4, 1, 1]).unwrap();
        let ids = g.input("ids", DType::I32, [2, 1, 1, 1]).unwrap();
        let rows = g.get_rows(table, ids).unwrap();
        let copy = g.cont(table).unwrap();
        let back = g.set_rows(rows, ids, table).unwrap();
        assert!(device.supports(g.node(rows)).is_yes());
        assert!(device.supports(g.node(copy)).is_yes());
        assert!(!device.supports(g.node(back)).is_yes());
    }
}
