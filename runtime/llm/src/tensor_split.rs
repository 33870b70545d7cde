//! How the tensors of a model may be divided among devices that compute one graph together.
//!
//! What belongs together has as many units: the heads of queries, keys, values, their cache and the product that joins them; the elements between the
//! products of the feed-forward part. The first products are cut by rows, the last ones by columns, so that each device goes through a block with what
//! it has, and results are added once at its end. Everything else is needed by all.

use crate::arch::{TensorSpec, WeightUse};
use crate::hparams::Hyperparameters;
use crate::rules::Role;
use samite_core::{Cut, DType};

/// Units along what is between the products of a feed-forward part, the preferred ones first: the activations of whole groups of 256 get the same
/// scale wherever they are computed.
const UNITS: [usize; 9] = [256, 128, 64, 32, 16, 8, 4, 2, 1];

/// So many units are enough to give devices different shares.
const ENOUGH: usize = 8;

/// The unit of an extent whose parts must be whole blocks of `block` elements.
fn unit(extent: usize, block: usize) -> usize {
    let fits = |unit: &&usize| extent.is_multiple_of(**unit) && unit.is_multiple_of(block);
    let enough = UNITS
        .iter()
        .filter(fits)
        .find(|unit| extent / **unit >= ENOUGH);
    let smallest = UNITS.iter().rfind(fits);
    enough.or(smallest).copied().unwrap_or(extent)
}

/// The least number of kv heads whose queries' results are whole blocks of `block` elements; of quantized matrices, whole groups of 256, if enough
/// units remain: activations of such a group get the same scale wherever they are computed.
fn heads(hparams: &Hyperparameters, il: usize, block: usize) -> usize {
    let layer = &hparams.layers[il];
    let (all, group) = (layer.n_head_kv, layer.n_head / layer.n_head_kv.max(1));
    let least = |block: usize| {
        (1..=all)
            .filter(|heads| all.is_multiple_of(*heads))
            .find(|heads| (heads * group * hparams.head_dim_v).is_multiple_of(block))
    };
    let groups = match block {
        1 => None,
        _ => least(UNITS[0]).filter(|heads| all / heads >= ENOUGH),
    };
    groups.or(least(block)).unwrap_or(all)
}

/// The part of a block that a tensor belongs to, from its name in the file: `blk.3.attn_q.weight`.
fn part(spec: &TensorSpec) -> &str {
    spec.name.rsplit('.').nth(1).unwrap_or_default()
}

/// How each of a model's tensors may be divided, in their order. Tensors are given with their types in the file.
pub(crate) fn cuts(
    tensors: &[(&TensorSpec, DType)],
    hparams: &Hyperparameters,
) -> Vec<Option<Cut>> {
    let block_of = |role: Role, name: &str| {
        let mut tensors = tensors.iter();
        let found = tensors.find(|(spec, _)| {
            spec.role == role && part(spec) == name && spec.usage != WeightUse::Bias
        });
        found.map_or(1, |(_, dtype)| dtype.block_len())
    };
    tensors
        .iter()
        .map(|(spec, _)| {
            let turn = match spec.role {
                Role::Layer(il) => il,
                Role::Embedding | Role::Output => 0,
            };
            // Rows of a product are elements of its bias.
            let rows = usize::from(spec.usage != WeightUse::Bias);
            let is_product = matches!(spec.usage, WeightUse::Product | WeightUse::Experts);
            if !is_product && spec.usage != WeightUse::Bias {
                return None;
            }
            let by_rows = |unit| {
                Some(Cut {
                    axis: rows,
                    unit,
                    turn,
                })
            };
            let by_columns = |unit| {
                is_product.then_some(Cut {
                    axis: 0,
                    unit,
                    turn,
                })
            };
            let il = match spec.role {
                Role::Layer(il) => il,
                Role::Output if part(spec) == "output" => {
                    return by_rows(unit(spec.shape[rows], 1));
                }
                Role::Embedding | Role::Output => return None,
            };
            let layer = &hparams.layers[il];
            let heads = || heads(hparams, il, block_of(spec.role, "attn_output"));
            let group = layer.n_head / layer.n_head_kv.max(1);
            match part(spec) {
                "attn_q" => by_rows(heads() * group * hparams.head_dim_k),
                "attn_k" => by_rows(heads() * hparams.head_dim_k),
                "attn_v" => by_rows(heads() * hparams.head_dim_v),
                "attn_output" => by_columns(heads() * group * hparams.head_dim_v),
                "ffn_gate" | "ffn_up" => {
                    by_rows(unit(spec.shape[rows], block_of(spec.role, "ffn_down")))
                }
                "ffn_down" => by_columns(unit(spec.shape[0], block_of(spec.role, "ffn_down"))),
                "ffn_gate_exps" | "ffn_up_exps" => {
                    by_rows(unit(spec.shape[1], block_of(spec.role, "ffn_down_exps")))
                }
                "ffn_down_exps" => {
                    by_columns(unit(spec.shape[0], block_of(spec.role, "ffn_down_exps")))
                }
                // A router's results are compared with each other.
                _ => None,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_whole_blocks_and_enough_to_divide() {
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
