//! Key scores for sparse attention: sums over heads of the positive products.

use super::reduce::dot_of;
use crate::detect::{Isa, vectorized};
use crate::kernel::{Kernel, KernelContext, Phase, UnsupportedKernel, decodable};
use half::f16;
use samite_core::{Error, Node, Result};

/// Number of keys of a task. Each query is read once for all of them.
const KEYS: usize = 8;

pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    decodable(node.source_layout(1).ok_or("there are no keys")?.dtype())?;
    Ok(Kernel::with_scratch(scratch, build))
}

/// Returns the bytes of a worker's keys and query of `size` elements each.
fn worker_bytes(size: usize) -> Option<usize> {
    let floats = size.checked_mul(KEYS + 1)?;
    floats.checked_mul(4)?.checked_next_multiple_of(64)
}

fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
    worker_bytes(node.source_layout(1)?.shape()[0])?.checked_mul(threads)
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (result, isa) = (context.result(), context.isa);
    let (queries, keys) = (context.source(0)?, context.source(1)?);
    let (weights, mask) = (context.source(2)?, context.source(3)?);
    let [size, heads, tokens, _] = queries.shape();
    let [kv, .., batches] = result.shape();
    let masks = mask.shape()[3].max(1);
    let bytes = worker_bytes(size)
        .ok_or_else(|| Error::shape("lightning_indexer: the size of its workspace overflows"))?;
    let scratch = context.scratch(bytes * context.threads)?;
    let parts = kv.div_ceil(KEYS);
    let cost = result.elements() as f64 * heads as f64 * (size as f64 * 0.04 + 2.0);
    Ok(vec![Phase::new(
        parts * batches,
        cost,
        move |tasks, worker| {
            let own = scratch.at(worker * bytes).cast::<f32>();
            // SAFETY: each worker has its own `worker_bytes` of memory, and the parts do not
            // overlap.
            let (loaded, query) = unsafe {
                (
                    std::slice::from_raw_parts_mut(own, KEYS * size),
                    std::slice::from_raw_parts_mut(own.add(KEYS * size), size),
                )
            };
            for task in tasks {
                let (first, batch) = (task % parts * KEYS, task / parts);
                let count = (kv - first).min(KEYS);
                for key in 0..count {
                    let to = &mut loaded[key * size..][..size];
                    // SAFETY: the key is inside the shape, and `kernel` checked that its type is
                    // decodable.
                    unsafe { keys.load([0, first + key, batch], 0, to) };
                }
                for token in 0..tokens {
                    let mut scores = [0.0; KEYS];
                    for head in 0..heads {
                        // SAFETY: inference checked that each head and token has a query and a
                        // weight.
                        let weight = unsafe {
                            queries.load([head, token, batch], 0, query);
                            let row = weights.at([token, 0, batch]);
                            *row.add(head * weights.strides()[0]).cast::<f32>()
                        };
                        let loaded = &loaded[..count * size];
                        add_products(isa, &mut scores, loaded, query, weight);
                    }
                    let masked = mask.at([token, 0, batch % masks]);
                    let out = result.at([token, 0, batch]);
                    for (key, score) in (first..).zip(&scores[..count]) {
                        // SAFETY: inference checked that the mask has an element for each key and
                        // token, as the result has. Tasks write different keys.
                        unsafe {
                            let mask = *masked.add(key * mask.strides()[0]).cast::<f16>();
                            *out.add(key * result.strides()[0]).cast::<f32>() =
                                score + mask.to_f32();
                        }
                    }
                }
            }
            Ok(())
        },
    )])
}

vectorized! {
    /// Adds `weight * max(0, key · query)` for each key.
    fn add_products(scores: &mut [f32; KEYS], keys: &[f32], query: &[f32], weight: f32) {
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len().max(1))) {
            *score += dot_of(key, query).max(0.0) * weight;
        }
    }
}
