//! Cost of a graph node.

use crate::machines::DeviceRates;
use samite_core::{DType, Layout, Node, Op, Result};

/// Amount of work of a graph node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// For products: type of the matrix, its bytes read, and multiply-adds.
    pub product: Option<(DType, f64, f64)>,
    /// For attention: type of the keys, bytes of keys and values read, and multiply-adds.
    pub attention: Option<(DType, f64, f64)>,
    /// Bytes of other operands and of the result.
    pub results: f64,
}

/// Returns the bytes of a tensor without gaps.
fn tightly(layout: &Layout) -> f64 {
    let dtype = layout.dtype();
    layout.elements() as f64 * dtype.block_bytes() as f64 / dtype.block_len() as f64
}

/// Returns the work of a node, or `None` for leaves and views. `seen` is the average number of
/// cached tokens that each token attends to, limited by the number of cells.
pub fn work(node: Node<'_>, seen: f64) -> Option<Work> {
    let op = node.op();
    if matches!(op, Op::Leaf) || op.is_view() {
        return None;
    }
    let bytes = |index: usize| {
        let layout = node.source_layout(index);
        layout.map_or(0.0, tightly)
    };
    let elements = |index: usize| {
        node.source_layout(index)
            .map_or(0, |layout| layout.elements()) as f64
    };
    let extent = |index: usize, axis: usize| {
        let layout = node.source_layout(index);
        layout.map_or(1, |layout| layout.shape()[axis]) as f64
    };
    let result = tightly(node.layout());
    let dtype = |index: usize| {
        node.source_layout(index)
            .map_or(DType::F32, |layout| layout.dtype())
    };
    Some(match op {
        Op::MulMat { .. } => Work {
            product: Some((
                dtype(0),
                bytes(0),
                node.layout().elements() as f64 * extent(0, 0),
            )),
            results: bytes(1) + result,
            ..Work::default()
        },
        Op::MulMatId { .. } => {
            let experts = extent(0, 2);
            let used = elements(2).min(experts) / experts;
            Work {
                product: Some((
                    dtype(0),
                    bytes(0) * used,
                    node.layout().elements() as f64 * extent(0, 0),
                )),
                results: bytes(1) + result,
                ..Work::default()
            }
        }
        Op::FlashAttn { .. } => {
            // Kernels skip masked keys.
            let visible = (seen / extent(1, 1).max(1.0)).min(1.0);
            // Scores, and weighted sums of values.
            let products =
                elements(0) * extent(1, 1) + node.layout().elements() as f64 * extent(2, 1);
            Work {
                attention: Some((
                    dtype(1),
                    (bytes(1) + bytes(2)) * visible,
                    products * visible,
                )),
                results: bytes(0) + result,
                ..Work::default()
            }
        }
        // Only the selected rows of the table.
        Op::GetRows => Work {
            results: 2.0 * result,
            ..Work::default()
        },
        // The result is the written tensor, but the node writes only a part of it.
        _ if node.tensor().written().next().is_some() => Work {
            results: 2.0 * bytes(0),
            ..Work::default()
        },
        _ => Work {
            results: node
                .tensor()
                .operands()
                .map(|(index, _)| bytes(index))
                .sum::<f64>()
                + result,
            ..Work::default()
        },
    })
}

impl Work {
    /// Returns the seconds that the work takes on a device.
    ///
    /// # Errors
    /// If the file does not contain the speed for a matrix type.
    pub fn seconds(&self, device: &DeviceRates) -> Result<f64> {
        let mut seconds = device.operation + self.results / device.results;
        if let Some((dtype, bytes, products)) = self.product {
            let rates = device.rates_for(dtype)?;
            seconds += (bytes / rates.read).max(products / rates.products);
        }
        if let Some((dtype, bytes, products)) = self.attention {
            let read = device.rates_for(dtype)?.read;
            seconds += (bytes / read).max(products / device.attention);
        }
        Ok(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::TypeRates;
    use samite_core::Graph;

    fn close(found: f64, expected: f64) {
        assert!(
            (found / expected - 1.0).abs() < 1e-9,
            "{found} for {expected}"
        );
    }

    #[test]
    fn product_cost_counts_reads_and_multiplications() {
        let mut g = Graph::new();
        let w = g.leaf("w", DType::Q4_0, [64, 32, 1, 1]).unwrap();
        let x = g.input("x", DType::F32, [64, 5, 1, 1]).unwrap();
        let y = g.mul_mat(w, x).unwrap();
        let found = work(g.node(y), 1.0).unwrap();
        // 18 bytes for 32 elements.
        assert_eq!(
            found.product,
            Some((DType::Q4_0, 1152.0, 64.0 * 32.0 * 5.0))
        );
        assert_eq!(found.results, 4.0 * (64.0 * 5.0 + 32.0 * 5.0));
        assert_eq!(work(g.node(w), 1.0), None);
        let view = g.reshape(y, [160, 1, 1, 1]).unwrap();
        assert_eq!(work(g.node(view), 1.0), None);

        let rates = |read, products| DeviceRates {
            name: "d".into(),
            memory: 1,
            results: 1920.0,
            attention: 1.0,
            operation: 0.5,
            types: [(DType::Q4_0, TypeRates { read, products })].into(),
        };
        // First reading is the limit, then multiplying.
        close(found.seconds(&rates(576.0, 1e9)).unwrap(), 0.5 + 1.0 + 2.0);
        close(
            found.seconds(&rates(1e9, 1024.0)).unwrap(),
            0.5 + 1.0 + 10.0,
        );
        let floats = g.leaf("f", DType::F16, [64, 32, 1, 1]).unwrap();
        let z = g.mul_mat(floats, x).unwrap();
        let error = work(g.node(z), 1.0)
            .unwrap()
            .seconds(&rates(1.0, 1.0))
            .unwrap_err();
        assert!(error.to_string().contains("type f16"), "{error}");
    }

    #[test]
    fn only_used_experts_are_read() {
        let mut g = Graph::new();
        let w = g.leaf("w", DType::F32, [8, 4, 16, 1]).unwrap();
        let x = g.input("x", DType::F32, [8, 1, 2, 1]).unwrap();
        let ids = g.input("ids", DType::I32, [3, 2, 1, 1]).unwrap();
        let y = g.mul_mat_id(w, x, ids).unwrap();
        let found = work(g.node(y), 1.0).unwrap();
        let all = 4.0 * 8.0 * 4.0 * 16.0;
        assert_eq!(
            found.product,
            Some((DType::F32, all * 6.0 / 16.0, 8.0 * 4.0 * 6.0))
        );
    }

    #[test]
    fn attention_cost_counts_visible_cells() {
        let mut g = Graph::new();
        let q = g.input("q", DType::F32, [16, 3, 4, 1]).unwrap();
        let k = g.input("k", DType::F16, [16, 100, 2, 1]).unwrap();
        let v = g.input("v", DType::F16, [16, 100, 2, 1]).unwrap();
        let y = g.flash_attn([q, k, v], None, None, 1.0).unwrap();
        let whole = work(g.node(y), 1000.0).unwrap().attention.unwrap();
        assert_eq!(
            whole,
            (
                DType::F16,
                2.0 * 2.0 * 3200.0,
                2.0 * 16.0 * 3.0 * 4.0 * 100.0
            )
        );
        let part = work(g.node(y), 25.0).unwrap().attention.unwrap();
        assert_eq!(part, (DType::F16, whole.1 / 4.0, whole.2 / 4.0));
    }

    #[test]
    fn write_targets_are_not_counted_as_reads() {
        let mut g = Graph::new();
        let cache = g.input("cache", DType::F16, [64, 1000, 1, 1]).unwrap();
        let rows = g.input("rows", DType::F32, [64, 2, 1, 1]).unwrap();
        let numbers = g.input("numbers", DType::I64, [2, 1, 1, 1]).unwrap();
        let y = g.set_rows(rows, numbers, cache).unwrap();
        assert_eq!(work(g.node(y), 1.0).unwrap().results, 2.0 * 512.0);
    }
}
