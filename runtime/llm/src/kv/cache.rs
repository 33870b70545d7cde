//! The memory of the KV cache, and the graph that rotates keys whose positions moved.

use crate::arch::LayerCache;
use crate::error::{Error, Result};
use crate::hparams::Hyperparameters;
use crate::kv::cells::Cells;
use crate::model::Model;
use samite_core::{
    BufferType, DType, Graph, Layout, TensorGroup, TensorId, Usage, same_buffer_type,
};
use std::sync::Arc;

/// Cells and their memory: for each layer, a row of keys and one of values for each cell.
#[derive(Debug)]
pub(crate) struct KvCache {
    pub cells: Cells,
    pub layers: Vec<LayerCache>,
    groups: Vec<(Arc<dyn BufferType>, TensorGroup)>,
}

/// A tensor to allocate.
type Named = (String, Layout);

/// A graph that rotates the keys of some cells.
#[derive(Debug)]
pub(crate) struct ShiftStep {
    pub graph: Graph,
    /// Cells to read: i32.
    pub read: TensorId,
    /// The same cells, to write: i64.
    pub write: TensorId,
    /// Distances: i32.
    pub distances: TensorId,
}

impl KvCache {
    /// Allocates the memory of `n_cells` cells, each layer's on its device.
    pub fn new(
        model: &Model,
        n_cells: usize,
        n_sequences: usize,
        types: [DType; 2],
    ) -> Result<Self> {
        let hparams = model.hparams();
        check_type("K", types[0], hparams.head_dim_k)?;
        check_type("V", types[1], hparams.head_dim_v)?;
        let mut wanted: Vec<(Arc<dyn BufferType>, usize, Vec<Named>)> = Vec::new();
        for (il, choice) in model.kv().iter().enumerate() {
            let memory = model.devices().get(choice.device).buffer_type();
            let at = wanted
                .iter()
                .position(|(known, ..)| same_buffer_type(known, &memory));
            let at = at.unwrap_or_else(|| {
                wanted.push((memory, choice.device, Vec::new()));
                wanted.len() - 1
            });
            let widths = [hparams.n_embd_k(il), hparams.n_embd_v(il)];
            for ((name, width), dtype) in ["k", "v"].iter().zip(widths).zip(types) {
                let layout = Layout::contiguous(dtype, [width, n_cells, 1, 1])?;
                wanted[at].2.push((format!("cache_{name}_l{il}"), layout));
            }
        }
        let mut groups = Vec::new();
        for (memory, device, tensors) in wanted {
            let bytes = tensors.iter().fold(0usize, |sum, (_, layout)| {
                sum.saturating_add(layout.bytes())
            });
            let what = format!("the KV cache of {n_cells} cells (a smaller context needs less)");
            model.devices().get(device).check_free(bytes, &what)?;
            let tensors: Vec<_> = tensors
                .iter()
                .map(|(name, layout)| (name.as_str(), *layout))
                .collect();
            let group = TensorGroup::allocate(&memory, Usage::Any, &tensors)?;
            groups.push((memory, group));
        }
        let find = |name: String| {
            let mut tensors = groups.iter().flat_map(|(_, group)| &group.tensors);
            let tensor = tensors.find(|tensor| tensor.name() == name).cloned();
            tensor.ok_or_else(|| Error::invalid(format!("{name} has no memory")))
        };
        let layers = (0..hparams.n_layer())
            .map(|il| {
                Ok(LayerCache {
                    k: find(format!("cache_k_l{il}"))?,
                    v: find(format!("cache_v_l{il}"))?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(KvCache {
            cells: Cells::new(n_cells, n_sequences)?,
            layers,
            groups,
        })
    }

    /// Bytes by name of the memory.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.groups
            .iter()
            .map(|(memory, group)| (memory.name(), group.size()))
    }

    /// Frees all cells and forgets their contents, so that not even a NaN in them remains.
    pub fn clear(&mut self) -> Result<()> {
        self.cells.clear();
        // Fresh memory is zero, and of a large cache most is never touched.
        if self.cells.were_used {
            self.groups
                .iter()
                .try_for_each(|(_, group)| group.clear(0))?;
            self.cells.were_used = false;
        }
        Ok(())
    }

    /// The graph that rotates the keys of `count` cells in all layers: gathered, rotated and scattered again, so that
    /// its memory does not depend on the size of the cache.
    pub fn shift_step(
        &self,
        hparams: &Hyperparameters,
        divisors: Option<&Arc<samite_core::StoredTensor>>,
        count: usize,
    ) -> Result<ShiftStep> {
        let mut graph = Graph::new();
        let each = [count, 1, 1, 1];
        let read = graph.input("shift_read", DType::I32, each)?;
        let write = graph.input("shift_write", DType::I64, each)?;
        let distances = graph.input("shift_distances", DType::I32, each)?;
        let divisors = divisors.map(|tensor| graph.stored(tensor)).transpose()?;
        for (il, layer) in self.layers.iter().enumerate() {
            let cache = graph.stored(&layer.k)?;
            let rows = graph.get_rows(cache, read)?;
            let width = hparams.n_embd_k(il);
            let heads = [hparams.head_dim_k, hparams.layers[il].n_head_kv, count, 1];
            let keys = graph.reshape(rows, heads)?;
            let keys = graph.rope(keys, distances, divisors, hparams.rope_shift())?;
            graph.set_name(keys, format!("K_shifted-{il}"));
            let rows = graph.reshape(keys, [width, count, 1, 1])?;
            graph.set_rows(rows, write, cache)?;
        }
        Ok(ShiftStep {
            graph,
            read,
            write,
            distances,
        })
    }
}

/// Every head must be whole blocks, because attention looks at single heads.
fn check_type(which: &str, dtype: DType, head: usize) -> Result<()> {
    if dtype.is_integer() || dtype == DType::F64 {
        return Err(Error::invalid(format!(
            "{which} cache of type {dtype}: choose f32, f16, bf16 or a quantized type"
        )));
    }
    if !head.is_multiple_of(dtype.block_len()) {
        return Err(Error::invalid(format!(
            "{which} cache of type {dtype}: heads of {head} elements are not whole blocks of {}; choose f16",
            dtype.block_len()
        )));
    }
    Ok(())
}
