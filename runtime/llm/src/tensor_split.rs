//! Tensor parallelism: how to divide the tensors of a model among devices that compute one graph
//! together.
//!
//! Tensors that belong together have the same number of units: the heads of queries, keys, values,
//! their cache and the output matrix, or the elements between the matrices of a feed-forward
//! network. In a fused matrix, queries, keys and values are segments, as are gate and value. The
//! first matrices are cut by rows and the last ones by columns. Each device then computes a
//! sub-layer with its own parts, and the results are added once at the end. All devices need the
//! remaining tensors as a whole.

use crate::arch::spec::{Attention, Gate, Latent, LatentUp, Layer, Linear, Mixer, Mlp, Projection};
use crate::arch::{Spec, TensorSpec};
use crate::weights::Weights;
use samite_core::{Cut, DType};
use std::collections::BTreeMap;

/// Sizes of units between the matrices of a feed-forward network, in order of preference. The
/// activations of a group of 256 get the same scale on any device if the group is not divided.
const UNITS: [usize; 9] = [256, 128, 64, 32, 16, 8, 4, 2, 1];

/// Number of units that suffices to give devices different shares.
const ENOUGH: usize = 8;

/// Returns the unit of an extent whose parts must be whole blocks of `block` elements.
fn unit(extent: usize, block: usize) -> usize {
    let fits = |unit: &&usize| extent.is_multiple_of(**unit) && unit.is_multiple_of(block);
    let enough = UNITS
        .iter()
        .filter(fits)
        .find(|unit| extent / **unit >= ENOUGH);
    let smallest = UNITS.iter().rfind(fits);
    enough.or(smallest).copied().unwrap_or(extent)
}

/// Returns the smallest number of `all` KV heads whose results, of `row` elements each, are whole
/// blocks of `block` elements. For quantized matrices, it prefers whole groups of 256 if enough
/// units remain: activations of such a group get the same scale on any device.
fn heads(all: usize, row: usize, block: usize) -> usize {
    let least = |block: usize| {
        (1..=all)
            .filter(|&heads: &usize| all.is_multiple_of(heads))
            .find(|heads| (heads * row).is_multiple_of(block))
    };
    let groups = match block {
        1 => None,
        _ => least(UNITS[0]).filter(|heads| all / heads >= ENOUGH),
    };
    groups.or(least(block)).unwrap_or(all)
}

/// Returns how each of a model's tensors may be divided, in order. Tensors come with their types in
/// the file.
pub(crate) fn cuts(spec: &Spec, tensors: &[(&TensorSpec, DType)]) -> Vec<Option<Cut>> {
    let types = tensors
        .iter()
        .map(|(spec, dtype)| (spec.name.as_str(), *dtype))
        .collect();
    let mut cuts = Cuts {
        types,
        prefix: String::new(),
        turn: 0,
        by_name: BTreeMap::new(),
    };
    if let Some(output) = &spec.head.output {
        cuts.rows(output, unit(output.to, 1));
    }
    for (il, layer) in spec.layers.iter().enumerate() {
        cuts.prefix = format!("blk.{}.", layer.block);
        for branch in layer.branches() {
            cuts.turn = il;
            match &branch.mixer {
                Mixer::Attention(attention) => cuts.attention(attention),
                Mixer::Mlp(mlp) => cuts.mlp(mlp),
                Mixer::Experts(mixture) => {
                    cuts.mlp(&mixture.experts);
                    mixture.shared.iter().for_each(|(mlp, _)| cuts.mlp(mlp));
                }
                // All devices need these as a whole.
                Mixer::Identity
                | Mixer::DeltaNet(_)
                | Mixer::ShortConv(_)
                | Mixer::StateSpace(_)
                | Mixer::Linear(_)
                | Mixer::LowRank(..)
                | Mixer::PerLayer(..) => {}
            }
        }
    }
    let cut_of = |(spec, _): &(&TensorSpec, _)| cuts.by_name.get(&spec.name).copied();
    tensors.iter().map(cut_of).collect()
}

/// Returns how the cached keys and values of `layer` may be divided: like the rows of their
/// matrices.
pub(crate) fn cuts_of_cache(layer: &Layer, weights: &Weights) -> [Option<Cut>; 2] {
    let Some(attention) = layer.attention() else {
        return [None; 2];
    };
    // The matrix with the keys and the one with the values, and their segments.
    let segments = match &attention.projection {
        Projection::Separate {
            kv: Some((k, v)), ..
        } => [(k, 0), (v.as_ref().unwrap_or(k), 0)],
        Projection::Fused(all) => [(all, 1), (all, 2)],
        Projection::Latent(latent) => return cuts_of_expanded(latent, layer, weights),
        Projection::Separate { kv: None, .. } => return [None; 2],
    };
    segments.map(|(linear, segment)| {
        let matrix = weights.get(&format!("blk.{}.{}.weight", layer.block, linear.name))?;
        let Cut { units, turn, .. } = matrix.cut()?;
        Some(Cut::new(0, units[segment], turn))
    })
}

/// Returns how the cached keys and values of latent attention may be divided: by heads. If the
/// short rows are cached, all devices need them as a whole.
fn cuts_of_expanded(latent: &Latent, layer: &Layer, weights: &Weights) -> [Option<Cut>; 2] {
    let LatentUp::Joint(up) = &latent.up else {
        return [None; 2];
    };
    let matrix = weights.get(&format!("blk.{}.{}.weight", layer.block, up.name));
    let cut = matrix.and_then(|matrix| matrix.cut());
    [latent.plain + latent.rotated, latent.head_v].map(|size| {
        let Cut { units, turn, .. } = cut?;
        let heads = units[0] / (latent.plain + latent.head_v);
        Some(Cut::new(0, heads * size, turn))
    })
}

/// Collects how tensors may be divided.
struct Cuts<'a> {
    /// Types in the file by name.
    types: BTreeMap<&'a str, DType>,
    /// Prefix of the names.
    prefix: String,
    /// Number that tensors of the same group share.
    turn: usize,
    by_name: BTreeMap<String, Cut>,
}

impl Cuts<'_> {
    fn add(&mut self, linear: &Linear, suffix: &str, axis: usize, units: [usize; 3]) {
        let turn = self.turn;
        let cut = Cut { axis, units, turn };
        let name = format!("{}{}{suffix}", self.prefix, linear.name);
        self.by_name.entry(name).or_insert(cut);
    }

    /// Cuts a product by rows, and its bias accordingly.
    fn rows(&mut self, linear: &Linear, unit: usize) {
        self.segments(linear, [unit, 0, 0]);
    }

    /// Cuts a product by rows of each segment, and its bias accordingly.
    fn segments(&mut self, linear: &Linear, units: [usize; 3]) {
        self.add(linear, ".weight", 1, units);
        self.add(linear, ".bias", 0, units);
    }

    fn columns(&mut self, linear: &Linear, unit: usize) {
        self.add(linear, ".weight", 0, [unit, 0, 0]);
    }

    /// Returns the number of elements in a block of the matrix.
    fn block_of(&self, linear: &Linear) -> usize {
        let name = format!("{}{}.weight", self.prefix, linear.name);
        let dtype = self.types.get(name.as_str());
        dtype.map_or(1, |dtype| dtype.block_len())
    }

    /// Divides attention by heads. The slopes of ALiBi depend on the number of a head, which
    /// devices with some of the heads do not know.
    fn attention(&mut self, attention: &Attention) {
        let (n_head, n_head_kv) = (attention.n_head, attention.n_head_kv);
        if attention.max_bias > 0.0 {
            return;
        }
        if let Projection::Latent(latent) = &attention.projection {
            return self.latent(latent, attention);
        }
        if n_head_kv == 0 || attention.output.from != n_head * attention.head_v {
            return;
        }
        // Queries must be on the same device as the keys that they use.
        self.turn = attention.keys_of.unwrap_or(self.turn);
        let row = n_head / n_head_kv * attention.head_v;
        let kv_heads = heads(n_head_kv, row, self.block_of(&attention.output));
        let q_heads = kv_heads * (n_head / n_head_kv);
        match &attention.projection {
            Projection::Separate { q, kv } => {
                self.rows(q, q_heads * (q.to / n_head));
                let kv = kv.iter().flat_map(|(k, v)| [k].into_iter().chain(v));
                for linear in kv {
                    self.rows(linear, kv_heads * (linear.to / n_head_kv));
                }
            }
            Projection::Fused(all) => {
                let sizes = [attention.head_k, attention.head_k, attention.head_v];
                let heads = [q_heads, kv_heads, kv_heads];
                self.segments(all, [0, 1, 2].map(|i| heads[i] * sizes[i]));
            }
            Projection::Latent(_) => {}
        }
        if let Some(Gate::Linear(linear, _)) = &attention.gate {
            self.rows(linear, q_heads * (linear.to / n_head));
        }
        self.columns(&attention.output, q_heads * attention.head_v);
    }

    /// Divides latent attention by heads. The short rows are needed as a whole.
    fn latent(&mut self, latent: &Latent, attention: &Attention) {
        let (n_head, output) = (attention.n_head, &attention.output);
        if output.from != n_head * latent.head_v {
            return;
        }
        let heads = heads(n_head, latent.head_v, self.block_of(output));
        self.rows(&latent.q.1, heads * (latent.plain + latent.rotated));
        match &latent.up {
            LatentUp::Joint(up) => self.rows(up, heads * (latent.plain + latent.head_v)),
            LatentUp::Absorbed(names) => {
                for name in names {
                    let cut = Cut::new(2, heads, self.turn);
                    self.by_name.insert(format!("{}{name}", self.prefix), cut);
                }
            }
        }
        self.columns(output, heads * latent.head_v);
    }

    /// Divides a feed-forward network by the elements before the last matrix.
    fn mlp(&mut self, mlp: &Mlp) {
        let between = mlp.down.from;
        let unit = unit(between, self.block_of(&mlp.down));
        if mlp.up.to == between {
            self.rows(&mlp.up, unit);
        } else if mlp.up.to == 2 * between {
            self.segments(&mlp.up, [unit, unit, 0]);
        } else {
            return;
        }
        mlp.gate.iter().for_each(|gate| self.rows(gate, unit));
        self.columns(&mlp.down, unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Keys, find};
    use crate::synthetic::SyntheticModel;

    #[test]
    fn query_heads_stay_with_the_key_head_that_they_use() {
        // Eight heads of eight elements. Four each use the same keys.
        let model = SyntheticModel {
            n_embd: 64,
            n_head: 8,
            n_head_kv: 2,
            head_dim: 8,
            ..SyntheticModel::tiny("llama")
        };
        let metadata = model.metadata().unwrap();
        let read = find("llama").unwrap().spec;
        let spec = read(&Keys::new(&metadata, "llama", 40, &|_| false)).unwrap();
        let tensors = spec.tensors();
        let typed: Vec<_> = tensors.iter().map(|spec| (spec, DType::F32)).collect();
        let cuts = cuts(&spec, &typed);
        for (name, axis, unit) in [
            ("attn_q", 1, 32),
            ("attn_k", 1, 8),
            ("attn_v", 1, 8),
            ("attn_output", 0, 32),
        ] {
            let name = format!("blk.1.{name}.weight");
            let at = tensors.iter().position(|spec| spec.name == name).unwrap();
            assert_eq!(cuts[at], Some(Cut::new(axis, unit, 1)), "{name}");
        }
        let norm = tensors.iter().position(|spec| spec.name.contains("norm"));
        assert_eq!(cuts[norm.unwrap()], None);
    }

    /// The rest is routers, matrices of latent rows, and position embeddings.
    #[test]
    fn most_weights_of_an_architecture_are_divided() {
        let mut undivided = Vec::new();
        for architecture in crate::arch::ARCHITECTURES {
            let name = architecture.name;
            let tiny = SyntheticModel::tiny(name);
            let model = SyntheticModel {
                n_embd: 1024,
                n_head: 16,
                n_head_kv: tiny.n_head_kv * 4,
                head_dim: 64,
                n_ff: 4096,
                ..tiny
            };
            let metadata = model.metadata().unwrap();
            let read = find(name).unwrap().spec;
            // Queries, keys and values are in one matrix where the architecture allows it.
            let fused = |name: &str| name.contains("attn_qkv");
            let spec = read(&Keys::new(&metadata, name, model.n_vocab, &fused)).unwrap();
            let tensors = spec.tensors();
            let typed: Vec<_> = tensors.iter().map(|spec| (spec, DType::F32)).collect();
            let (mut divided, mut all) = (0, 0);
            for (tensor, cut) in tensors.iter().zip(cuts(&spec, &typed)) {
                let elements: usize = tensor.shape.iter().product();
                if !tensor.name.starts_with("token_embd") {
                    all += elements;
                    divided += if cut.is_some() { elements } else { 0 };
                }
            }
            if divided * 100 < all * 95 {
                undivided.push(name);
            }
        }
        undivided.sort_unstable();
        let alibi = ["bloom", "jais", "jina-bert-v2", "mpt", "refact"];
        let recurrent = [
            "falcon-h1",
            "granitehybrid",
            "jamba",
            "lfm2",
            "mamba",
            "mamba2",
            "nemotron_h",
            "nemotron_h_moe",
            "qwen35",
        ];
        let mut expected = [&alibi[..], &recurrent, &["gemma3n"]].concat();
        expected.sort_unstable();
        assert_eq!(undivided, expected);
    }

    #[test]
    fn split_units_are_whole_blocks_and_numerous() {
        assert_eq!(unit(5632, 32), 256);
        assert_eq!(
            unit(768, 256),
            256,
            "three experts' units are all that there are"
        );
        assert_eq!(unit(768, 32), 64);
        assert_eq!(unit(96, 32), 32);
        assert_eq!(unit(12, 1), 1);
        assert_eq!(unit(100, 32), 100, "no whole blocks: one unit");
    }
}
