//! Nodes on which ggml's CPU kernels abort or compute wrong results, although the plugin claims to
//! support them.
//!
//! `supports_op` of ggml's CPU backend checks few operations. For the others, ggml's programs only
//! build what its kernels support. samite's graphs do not have these limits, so they are listed
//! here, as found in ggml 0.25.

use samite_core::formula::is_formula;
use samite_core::op::Unary;
use samite_core::{DType, Layout, Node, Op, Support};

/// Refuses nodes on which ggml's CPU backend would abort or compute wrong results.
pub fn check(node: Node<'_>) -> Support {
    let dtype = |index: usize| node.source_layout(index).map(|layout| layout.dtype());
    let refuse = || {
        let types: Vec<_> = (0..node.tensor().sources.len())
            .filter_map(|index| dtype(index).map(DType::name))
            .collect();
        Support::no(format!(
            "ggml's CPU kernel has no code for {}",
            types.join(", ")
        ))
    };
    let Some(first) = dtype(0) else {
        return Support::Yes;
    };
    let types = match node.op() {
        Op::Add | Op::Sub | Op::Mul | Op::Div => {
            dtype(1) == Some(first)
                || (matches!(first, DType::F16 | DType::BF16) && dtype(1) == Some(DType::F32))
        }
        Op::Scale { .. } => first == DType::F32,
        Op::Unary(Unary::Gelu | Unary::GeluQuick | Unary::GeluErf | Unary::Silu) => {
            matches!(first, DType::F32 | DType::F16)
        }
        Op::Clamp { .. } | Op::Fill { .. } | Op::Rope(_) | Op::Glu { .. } => {
            matches!(first, DType::F32 | DType::F16)
        }
        Op::DiagMaskInf { .. } | Op::DiagMaskZero { .. } | Op::RepeatBack { .. } => {
            first == DType::F32
        }
        Op::RopeBack(_) => matches!(first, DType::F32 | DType::F16),
        // Weights other than F32 do not repeat.
        Op::OutProd => {
            let whole = |index: usize| node.source_layout(index).map(|layout| layout.shape());
            first == DType::F32
                || first.is_quantized()
                    && multiplies(first)
                    && whole(0).map(|[.., a, b]| [a, b]) == whole(1).map(|[.., a, b]| [a, b])
        }
        Op::Repeat { .. } => matches!(
            first,
            DType::F32 | DType::F16 | DType::BF16 | DType::I16 | DType::I32
        ),
        Op::Dup | Op::Cont | Op::Cast { .. } | Op::Cpy => converts(first, node.dtype()),
        Op::MulMat { .. } | Op::MulMatId { .. } => multiplies(first),
        Op::FlashAttn { .. } => [1, 2].into_iter().all(|i| dtype(i).is_some_and(multiplies)),
        _ => true,
    };
    if !types {
        return refuse();
    }
    if is_formula(node.op().kind()) {
        return formula(node);
    }
    // States from before the first token are not written.
    let states = match *node.op() {
        Op::SsmScan { snapshots } => node.source_layout(1).map(|x| (snapshots, x.shape()[2])),
        Op::GatedDeltaNet { snapshots } => node.source_layout(2).map(|x| (snapshots, x.shape()[2])),
        _ => None,
    };
    if states.is_some_and(|(snapshots, tokens)| snapshots > tokens) {
        return Support::no("ggml's CPU kernels write no states from before the first token");
    }
    if copies(node.op()) {
        // Blocks are converted row by row only if rows have no gaps.
        let blocks = first.is_quantized() || node.dtype().is_quantized();
        let dense = [Some(node.layout()), node.source_layout(0)]
            .into_iter()
            .flatten()
            .all(|layout| layout.is_contiguous());
        return Support::when(
            !blocks || dense,
            "ggml's CPU kernels convert blocks only without gaps",
        );
    }
    let contiguous = node.source_layout(0).is_none_or(|layout| match node.op() {
        Op::Scale { .. } | Op::DiagMaskInf { .. } | Op::DiagMaskZero { .. } | Op::Fill { .. } => {
            layout.is_contiguous()
        }
        // These ignore the strides and read other rows.
        Op::Clamp { .. } | Op::ArgSort { .. } | Op::TopK { .. } => layout.is_contiguous(),
        Op::Unary(_) => layout.contiguous_from(1),
        // The process aborts if rows have gaps.
        Op::SsmConv => layout.strides()[1] == layout.strides()[0] * layout.shape()[0],
        _ => true,
    });
    let sources = || (0..node.tensor().sources.len()).filter_map(|index| node.source_layout(index));
    let contiguous = contiguous
        && match node.op() {
            // These assume that rows are contiguous.
            Op::SiluBack | Op::SoftMaxBack { .. } => sources().all(Layout::is_contiguous),
            // These assume that heads are contiguous. With several states, each head may have only
            // one decay.
            Op::SsmScan { snapshots } => {
                let heads = |index: usize| {
                    node.source_layout(index).is_some_and(|layout| {
                        layout.strides()[1] == layout.strides()[0] * layout.shape()[0]
                    })
                };
                let whole = |index| node.source_layout(index).is_some_and(Layout::is_contiguous);
                let rates = node.source_layout(3).map_or(0, |layout| layout.shape()[0]);
                [1, 4, 5].into_iter().all(heads)
                    && [0, 3].into_iter().all(whole)
                    && (*snapshots == 1 || rates == 1)
            }
            _ => true,
        };
    let dense = sources()
        .chain([node.layout()])
        .all(|layout| layout.strides()[0] == layout.dtype().block_bytes());
    let may_have_gaps = matches!(node.op(), Op::Pad { .. });
    Support::when(
        contiguous && (dense || may_have_gaps),
        "ggml's CPU kernels want elements without gaps",
    )
}

/// Refuses convolutions and similar operations, unless they have no gaps and supported types.
fn formula(node: Node<'_>) -> Support {
    let sources = || (0..node.tensor().sources.len()).filter_map(|index| node.source_layout(index));
    let dense = sources().chain([node.layout()]).all(Layout::is_contiguous);
    let is_plain = |layout: &Layout| matches!(layout.dtype(), DType::F32 | DType::F16);
    let types = match node.op() {
        Op::Sin | Op::Cos | Op::LeakyRelu { .. } | Op::Col2Im1d { .. } => sources().all(is_plain),
        Op::Im2Col { .. } | Op::Im2Col3d { .. } => {
            is_plain(node.layout())
                && node.source_layout(1).map(|layout| layout.dtype()) == Some(DType::F32)
        }
        // ggml handles an uneven number of channels per group differently.
        Op::GroupNorm { groups, .. } => node.layout().shape()[2].is_multiple_of(*groups),
        // ggml compares other rows, some of them past the end.
        Op::CountEqual => node.source_layout(0).map(|x| x.shape()[2..] == [1, 1]) == Some(true),
        // ggml reads and writes heads in steps of up to 64 elements, even past their end.
        Op::RwkvWkv7 => node.source_layout(0).map(|x| x.shape()[0] % 64 == 0) == Some(true),
        _ => true,
    };
    Support::when(
        dense && types,
        "ggml's CPU kernels want no gaps, and have no code for every type and shape",
    )
}

fn copies(op: &Op) -> bool {
    matches!(op, Op::Dup | Op::Cont | Op::Cast { .. } | Op::Cpy)
}

/// Returns whether ggml has this conversion.
fn converts(from: DType, to: DType) -> bool {
    let small = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    from == to
        || (small(from) && to == DType::F8_E4M3 || from == DType::F8_E4M3 && small(to))
        || (small(from) && (small(to) || to.is_quantized()))
        || (from == DType::F32 && to == DType::I32)
        || (to == DType::F32 && (from == DType::I32 || from.is_quantized()))
}

/// Returns whether products support this type of weights and caches.
fn multiplies(dtype: DType) -> bool {
    !dtype.is_integer() && !matches!(dtype, DType::F64 | DType::Q8_1 | DType::Q8_K)
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::Graph;

    #[test]
    fn only_known_gaps_are_refused() {
        let mut g = Graph::new();
        let mut of = |dtype| g.input("x", dtype, [64, 4, 1, 1]).unwrap();
        let (f32s, f16s, bf16s) = (of(DType::F32), of(DType::F16), of(DType::BF16));
        let scale = Op::Scale {
            scale: 2.0,
            bias: 0.0,
        };
        let silu = Op::Unary(Unary::Silu);
        let to_q = Op::Cast { dtype: DType::Q8_0 };
        let mut ask = |op: Op, sources: &[_]| {
            let sources: Vec<_> = sources.iter().map(|&id| Some(id)).collect();
            let id = g.push(op, &sources).unwrap();
            check(g.node(id)).is_yes()
        };
        assert!(ask(Op::Add, &[f32s, f32s]) && ask(Op::Add, &[f16s, f32s]));
        assert!(!ask(Op::Add, &[f32s, f16s]) && !ask(Op::Mul, &[f16s, bf16s]));
        assert!(ask(scale, &[f32s]) && !ask(scale, &[f16s]) && !ask(scale, &[bf16s]));
        assert!(ask(silu, &[f16s]) && !ask(silu, &[bf16s]));
        assert!(ask(to_q, &[bf16s]) && ask(Op::Dup, &[f16s]));
        assert!(converts(DType::Q4_K, DType::F32) && !converts(DType::Q4_K, DType::F16));
        assert!(!multiplies(DType::Q8_K) && multiplies(DType::Q4_K));
        let mut recurrence = |size: usize| {
            let x = g.input("x", DType::F32, [size, 2, 3, 1]).unwrap();
            let state = g.input("state", DType::F32, [2 * size * size, 1, 1, 1]);
            let mut sources = [Some(x); 7];
            sources[6] = state.ok();
            let id = g.push(Op::RwkvWkv7, &sources).unwrap();
            check(g.node(id)).is_yes()
        };
        assert!(recurrence(64) && recurrence(128) && !recurrence(32));
        let mut count = |shape| {
            let x = g.input("x", DType::I32, shape).unwrap();
            let id = g.push(Op::CountEqual, &[Some(x), Some(x)]).unwrap();
            check(g.node(id)).is_yes()
        };
        assert!(count([5, 9, 1, 1]) && !count([5, 3, 2, 1]) && !count([5, 3, 1, 2]));
        let turned = g.push(Op::Transpose, &[Some(f32s)]).unwrap();
        for (op, fine) in [
            (Op::Cont, true),
            (Op::Sqr, false),
            (scale, false),
            (to_q, false),
        ] {
            let Ok(id) = g.push(op, &[Some(turned)]) else {
                continue;
            };
            assert_eq!(check(g.node(id)).is_yes(), fine, "{op}");
        }
    }
}
