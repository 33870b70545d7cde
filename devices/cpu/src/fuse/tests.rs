//! Tests of fusion.

use super::*;
use crate::harness::*;
use crate::packed_buffer_type::packed_buffer_type;
use crate::tune;
use samite_core::{
    Glu, Graph, Rope, RopeMode, Slot, TensorGroup, TensorRef, Usage, host_buffer_type, shape,
};
use std::sync::Arc;

const WIDTH: usize = 512;
const INNER: usize = 768;

/// Returns whether products on this processor need columns in another form, so that sharing is
/// possible.
fn packs_columns() -> bool {
    crate::unpacked::product(tune::detect(None), DType::Q8_0).is_some()
}

/// Returns separate memory for a tensor, unless it is stored.
fn own_place(graph: &Graph, id: TensorId) -> TensorRef {
    if let Some(stored) = &graph.tensor(id).stored {
        return stored.tensor().clone();
    }
    let layout = graph.tensor(id).layout;
    let buffer = host_buffer_type().allocate(layout.bytes(), Usage::Compute);
    TensorRef {
        buffer: buffer.unwrap(),
        slot: Slot { offset: 0, layout },
    }
}

/// Returns the fusion of all tensors of a graph whose nodes lie at `places`.
fn placed_fusions(
    graph: &Graph,
    nodes: &[TensorId],
    places: &[Option<TensorRef>],
    threads: usize,
) -> Vec<Fusion> {
    let work = PlacedGraph {
        graph,
        nodes,
        places,
        workspace: None,
        compiled: None,
    };
    fusions(&work, tune::detect(None), threads)
}

/// Returns the fusion of all computed nodes of a graph, each in memory of its own.
fn fusions_of(graph: &Graph, threads: usize) -> Vec<Fusion> {
    let nodes: Vec<_> = graph.ids().collect();
    let places: Vec<_> = nodes.iter().map(|&id| Some(own_place(graph, id))).collect();
    let fusions = placed_fusions(graph, &nodes, &places, threads);
    let computed = nodes.iter().filter(|&&id| graph.tensor(id).is_computed());
    computed.map(|id| fusions[id.index()]).collect()
}

/// Inputs, result and fusible nodes of a layer.
struct Layer {
    graph: Graph,
    inputs: Vec<(TensorId, usize)>,
    /// All computed nodes.
    nodes: Vec<TensorId>,
    result: TensorId,
}

impl Layer {
    /// Creates a layer for this number of columns.
    fn new(columns: usize) -> Self {
        let mut g = Graph::new();
        let mut inputs = vec![];
        let mut new = |g: &mut Graph, extents: &[usize]| {
            inputs.push((input(g, extents), extents.iter().product()));
            inputs[inputs.len() - 1].0
        };
        let x = new(&mut g, &[WIDTH, columns]);
        let scale = new(&mut g, &[WIDTH]);
        let [q, k, gate, up] = [WIDTH, 64, INNER, INNER].map(|rows| {
            let weights = new(&mut g, &[WIDTH, rows]);
            g.cast(weights, DType::Q8_0).unwrap()
        });
        let down = new(&mut g, &[INNER, WIDTH]);
        let down = g.cast(down, DType::Q4_0).unwrap();
        let positions = integers(&mut g, &[columns]);
        let normed = g.rms_norm(x, 1e-5).unwrap();
        let normed = g.mul(normed, scale).unwrap();
        let q = g.mul_mat(q, normed).unwrap();
        let k = g.mul_mat(k, normed).unwrap();
        let heads = |g: &mut Graph, x, count| g.reshape(x, [64, count, columns, 1]).unwrap();
        let k = heads(&mut g, k, 1);
        let k = g.rms_norm(k, 1e-5).unwrap();
        let small = new(&mut g, &[64]);
        let k = g.mul(k, small).unwrap();
        let k = g
            .rope(k, positions, None, Rope::new(64, RopeMode::Neox, 1e4))
            .unwrap();
        let q = heads(&mut g, q, WIDTH / 64);
        let q = g.add(q, k).unwrap();
        let q = g.reshape(q, [WIDTH, columns, 1, 1]).unwrap();
        let middle = g.add(q, x).unwrap();
        let normed = g.rms_norm(middle, 1e-5).unwrap();
        let normed = g.mul(normed, scale).unwrap();
        let [gate, up] = [gate, up].map(|weights| g.mul_mat(weights, normed).unwrap());
        let gated = g.glu_split(gate, up, Glu::Swiglu).unwrap();
        let out = g.mul_mat(down, gated).unwrap();
        let result = g.add(out, middle).unwrap();
        let nodes = g.ids().filter(|&id| g.tensor(id).is_computed()).collect();
        Layer {
            graph: g,
            inputs,
            nodes,
            result,
        }
    }

    fn fusions(&self) -> Vec<Fusion> {
        fusions_of(&self.graph, 1)
    }

    fn run(&self, threads: usize) -> Vec<f32> {
        let mut bench = Bench::new(&self.graph, &device(threads)).unwrap();
        for (seed, &(id, count)) in self.inputs.iter().enumerate() {
            bench.write(id, &numbers(seed as u32, count));
        }
        bench.run().unwrap();
        let first = bench.read(self.result);
        bench.run().unwrap();
        assert_eq!(first, bench.read::<f32>(self.result));
        first
    }
}

#[test]
fn layer_nodes_have_the_expected_fusions() {
    if !packs_columns() {
        return;
    }
    use Fusion::*;
    let mut layer = Layer::new(3);
    layer.graph.set_output(layer.result);
    let weights = [Alone; 5];
    let attention = [
        Absorbed,
        Absorbed,
        FusedPrologue,
        SharesActivations,
        Absorbed,
        ScaledNorm,
        Alone,
    ];
    let rest = [
        Alone,
        WrittenByPrologue,
        Absorbed,
        Absorbed,
        FusedPrologue,
        SharesActivations,
        Absorbed,
        FusedPrologue,
        Alone,
    ];
    let mut expected = [&weights[..], &attention, &rest].concat();
    assert_eq!(layer.fusions(), expected);
    expected
        .iter_mut()
        .filter(|fusion| **fusion == SharesActivations)
        .for_each(|fusion| *fusion = JoinsPhase);
    assert_eq!(fusions_of(&layer.graph, 2), expected);
}

/// Places a tensor at `bytes` after the start of another one.
fn lie_behind(places: &mut [Option<TensorRef>], id: TensorId, other: TensorId, bytes: usize) {
    let place = places[other.index()].clone().unwrap();
    let layout = places[id.index()].as_ref().unwrap().slot.layout;
    let offset = place.slot.offset + bytes;
    places[id.index()] = Some(TensorRef {
        buffer: place.buffer,
        slot: Slot { offset, layout },
    });
}

#[test]
fn overlapping_products_are_not_fused() {
    if !packs_columns() {
        return;
    }
    let mut g = Graph::new();
    let x = input(&mut g, &[WIDTH, 4]);
    let weights = [(); 3].map(|()| {
        let weights = input(&mut g, &[WIDTH, 64]);
        g.cast(weights, DType::Q8_0).unwrap()
    });
    let products = weights.map(|weights| g.mul_mat(weights, x).unwrap());
    let nodes: Vec<_> = g.ids().collect();
    let fusion = |change: &dyn Fn(&mut [Option<TensorRef>])| {
        let mut places: Vec<_> = nodes.iter().map(|&id| Some(own_place(&g, id))).collect();
        change(&mut places);
        let fusions = placed_fusions(&g, &nodes, &places, 2);
        [1, 2].map(|i| fusions[products[i].index()])
    };
    use Fusion::{JoinsPhase, SharesActivations};
    assert_eq!(fusion(&|_| {}), [JoinsPhase; 2]);
    let lies = |product: usize, other| {
        fusion(&|places: &mut [_]| lie_behind(places, products[product], other, 0))
    };
    // A later result lies where the weights of an earlier product are, which are not needed any
    // more.
    assert_eq!(lies(1, weights[0]), [SharesActivations, JoinsPhase]);
    assert_eq!(lies(2, weights[1]), [JoinsPhase, SharesActivations]);
    assert_eq!(lies(2, weights[0]), [JoinsPhase, SharesActivations]);
    // An earlier result lies where the weights of a later product are.
    assert_eq!(lies(0, weights[1]), [SharesActivations, JoinsPhase]);
    assert_eq!(lies(0, weights[2]), [JoinsPhase, SharesActivations]);
    // Two results lie in one place.
    assert_eq!(lies(2, products[0]), [JoinsPhase, SharesActivations]);
    // A result overlaps the columns.
    assert_eq!(lies(2, x), [JoinsPhase, SharesActivations]);
}

#[test]
fn writes_between_products_end_column_sharing() {
    if !packs_columns() {
        return;
    }
    use Fusion::{Alone, SharesActivations};
    let last = |between: &dyn Fn(&mut Graph, TensorId)| {
        let mut g = Graph::new();
        let x = input(&mut g, &[WIDTH, 4]);
        let [a, b] = [(); 2].map(|()| {
            let weights = input(&mut g, &[WIDTH, 64]);
            g.cast(weights, DType::Q8_0).unwrap()
        });
        g.mul_mat(a, x).unwrap();
        between(&mut g, x);
        g.mul_mat(b, x).unwrap();
        *fusions_of(&g, 1).last().unwrap()
    };
    assert_eq!(last(&|_, _| {}), SharesActivations);
    // Nodes that need no scratch memory and write only their result change nothing.
    let silu = |g: &mut Graph, x| {
        g.unary(x, samite_core::Unary::Silu).unwrap();
    };
    assert_eq!(last(&silu), SharesActivations);
    // Nodes that use the scratch memory themselves.
    let sort = |g: &mut Graph, x| {
        g.argsort(x, samite_core::SortOrder::Ascending).unwrap();
    };
    assert_eq!(last(&sort), Alone);
    let cpy = |g: &mut Graph, x| {
        let other = input(g, &[WIDTH, 4]);
        g.cpy(other, x).unwrap();
    };
    assert_eq!(last(&cpy), Alone);
    let set_rows = |g: &mut Graph, x| {
        let rows = input(g, &[WIDTH, 2]);
        let numbers = integers(g, &[2]);
        g.set_rows(rows, numbers, x).unwrap();
    };
    assert_eq!(last(&set_rows), Alone);
}

/// Returns the norm of `x` times a scale, with a reader: the scale, the norm, their product.
fn scaled_norm(g: &mut Graph, x: TensorId) -> (TensorId, TensorId, TensorId) {
    let scale = input(g, &[WIDTH]);
    let norm = g.rms_norm(x, 1e-5).unwrap();
    let scaled = g.mul(norm, scale).unwrap();
    let next = g.unary(scaled, samite_core::Unary::Silu).unwrap();
    g.set_output(next);
    (scale, norm, scaled)
}

#[test]
fn scaled_norms_fuse_only_if_no_input_row_is_lost() {
    use Fusion::{Absorbed, Alone, ScaledNorm};
    let mut g = Graph::new();
    let x = input(&mut g, &[WIDTH, 4]);
    let (scale, norm, scaled) = scaled_norm(&mut g, x);
    let nodes: Vec<_> = g.ids().collect();
    let parts = |other: Option<(TensorId, usize)>| {
        let mut places: Vec<_> = nodes.iter().map(|&id| Some(own_place(&g, id))).collect();
        // Memory that is larger than `x` alone.
        let layout = Layout::contiguous(DType::F32, [WIDTH, 8, 1, 1]).unwrap();
        let buffer = host_buffer_type().allocate(layout.bytes(), Usage::Compute);
        let buffer = buffer.unwrap();
        for (id, offset) in [(x, 0), (scale, 6 * WIDTH * 4)] {
            let layout = g.tensor(id).layout;
            places[id.index()] = Some(TensorRef {
                buffer: Arc::clone(&buffer),
                slot: Slot { offset, layout },
            });
        }
        if let Some((other, bytes)) = other {
            lie_behind(&mut places, scaled, other, bytes);
        }
        let fusions = placed_fusions(&g, &nodes, &places, 1);
        [norm, scaled].map(|id| fusions[id.index()])
    };
    assert_eq!(parts(None), [Absorbed, ScaledNorm]);
    // If the result lies exactly over `x`, each row is read before it is written.
    assert_eq!(parts(Some((x, 0))), [Absorbed, ScaledNorm]);
    // If the result overlaps `x` partly, rows are lost.
    assert_eq!(parts(Some((x, WIDTH * 4))), [Alone; 2]);
    // If the result lies over the scale, which every row needs, it is not fused.
    assert_eq!(parts(Some((x, 4 * WIDTH * 4))), [Alone; 2]);
    // Over an operand with gaps, the second row of the result is not where that of the operand is.
    let mut g = Graph::new();
    let base = input(&mut g, &[2 * WIDTH, 4]);
    let row = 2 * WIDTH * 4;
    let x = g.view(base, [WIDTH, 4, 1, 1], [row, 4 * row, 4 * row], 0);
    let x = x.unwrap();
    let (_, _, scaled) = scaled_norm(&mut g, x);
    let nodes: Vec<_> = g.ids().collect();
    for (is_over, expected) in [(false, ScaledNorm), (true, Alone)] {
        let mut places: Vec<_> = nodes.iter().map(|&id| Some(own_place(&g, id))).collect();
        lie_behind(&mut places, x, base, 0);
        if is_over {
            lie_behind(&mut places, scaled, x, 0);
        }
        let fusions = placed_fusions(&g, &nodes, &places, 1);
        assert_eq!(fusions[scaled.index()], expected);
    }
}

#[test]
fn results_read_elsewhere_are_not_absorbed() {
    if !packs_columns() {
        return;
    }
    // Without outputs, all results are needed.
    let mut layer = Layer::new(3);
    assert!(!layer.fusions().contains(&Fusion::Absorbed));
    layer.graph.set_output(layer.result);
    let number =
        |layer: &Layer, fusion: Fusion| layer.fusions().iter().filter(|&&p| p == fusion).count();
    assert_eq!(number(&layer, Fusion::Absorbed), 6);
    let whole = layer.graph.clone();
    for &id in &layer.nodes {
        layer.graph = whole.clone();
        layer.graph.set_output(id);
        let at = layer.nodes.iter().position(|&node| node == id).unwrap();
        assert_ne!(layer.fusions()[at], Fusion::Absorbed, "{id}");
        layer.graph = whole.clone();
        layer.graph.copy_of(id, "copy").unwrap();
        assert_ne!(layer.fusions()[at], Fusion::Absorbed, "{id}");
        layer.graph = whole.clone();
        layer.graph.cont(id).unwrap();
        assert_ne!(layer.fusions()[at], Fusion::Absorbed, "{id}");
    }
}

#[test]
fn fusion_does_not_change_results() {
    for columns in [1, 2, 40] {
        let mut layer = Layer::new(columns);
        let apart = layer.run(1);
        assert!(apart.iter().all(|x| x.is_finite()));
        layer.graph.set_output(layer.result);
        for threads in [1, 2, 3] {
            assert!(
                layer.run(threads) == apart,
                "{columns} columns, {threads} threads"
            );
        }
    }
}

#[test]
fn reshaped_gated_units_are_not_fused() {
    if !packs_columns() {
        return;
    }
    let fusion = |extents: [usize; 2]| {
        let mut g = Graph::new();
        let weights = input(&mut g, &[extents[0], 64]);
        let weights = g.cast(weights, DType::Q8_0).unwrap();
        let [a, b] = [WIDTH, WIDTH].map(|k| input(&mut g, &[k, 4]));
        let gated = g.glu_split(a, b, Glu::Swiglu).unwrap();
        let [k, rows] = extents;
        let strides = [k * 4, k * rows * 4, k * rows * 4];
        let rows = g.view(gated, [k, rows, 1, 1], strides, 0).unwrap();
        let out = g.mul_mat(weights, rows).unwrap();
        g.set_output(out);
        *fusions_of(&g, 1).last().unwrap()
    };
    assert_eq!(fusion([WIDTH, 4]), Fusion::FusedPrologue);
    for other in [[WIDTH, 3], [WIDTH / 2, 4], [WIDTH / 2, 8]] {
        assert_eq!(fusion(other), Fusion::Alone, "{other:?}");
    }
}

#[test]
fn expert_products_share_columns() {
    let mut g = Graph::new();
    let [gate, up, down] = [[WIDTH, 64, 4], [WIDTH, 64, 4], [64, WIDTH, 4]].map(|extents| {
        let weights = g.input("w", DType::F32, shape(&extents).unwrap()).unwrap();
        (
            weights,
            extents.iter().product::<usize>(),
            g.cast(weights, DType::Q8_0).unwrap(),
        )
    });
    let x = input(&mut g, &[WIDTH, 1, 5]);
    let chosen = integers(&mut g, &[2, 5]);
    let product = |g: &mut Graph, weights, x| g.mul_mat_id(weights, x, chosen).unwrap();
    let (a, b) = (product(&mut g, gate.2, x), product(&mut g, up.2, x));
    let gated = g.glu_split(a, b, Glu::Swiglu).unwrap();
    let out = product(&mut g, down.2, gated);
    let run = |g: &Graph| {
        let mut bench = Bench::new(g, &device(2)).unwrap();
        for (seed, (id, count, _)) in [gate, up, down].into_iter().enumerate() {
            bench.write(id, &numbers(seed as u32, count));
        }
        bench.write(x, &numbers(9, 5 * WIDTH));
        bench.write(chosen, &[0, 3, 1, 2, 2, 0, 3, 1, 0, 1]);
        bench.run().unwrap();
        bench.read::<f32>(out)
    };
    let apart = run(&g);
    g.set_output(out);
    assert!(run(&g) == apart);
    if packs_columns() {
        assert_eq!(
            fusions_of(&g, 1)[3..],
            [
                Fusion::Alone,
                Fusion::SharesActivations,
                Fusion::Absorbed,
                Fusion::FusedPrologue
            ]
        );
    }
}

#[test]
fn rope_angles_are_reused_while_parameters_match() {
    let mut g = Graph::new();
    let x = input(&mut g, &[64, 2, 3]);
    let [positions, others] = [(); 2].map(|()| integers(&mut g, &[3]));
    let plain = Rope::new(64, RopeMode::Neox, 1e4);
    let rope = |g: &mut Graph, rope| g.rope(x, positions, None, rope).unwrap();
    let first = rope(&mut g, plain);
    let same = rope(&mut g, plain);
    let slower = rope(&mut g, Rope::new(64, RopeMode::Neox, 1e6));
    let back = rope(&mut g, plain);
    let written = g.cpy(others, positions).unwrap();
    let moved = rope(&mut g, plain);
    use Fusion::*;
    let expected = [Alone, SharesAngles, Alone, Alone, Alone, Alone];
    assert_eq!(fusions_of(&g, 1), expected);

    let mut bench = Bench::new(&g, &device(2)).unwrap();
    bench.write(x, &numbers(3, 64 * 6));
    bench.write(positions, &[5, 6, 7]);
    bench.write(others, &[8, 9, 10]);
    bench.run().unwrap();
    assert_eq!(bench.read::<i32>(written), [8, 9, 10]);
    let [first, same, slower, back, moved] =
        [first, same, slower, back, moved].map(|id| bench.read::<f32>(id));
    assert!(first == same && first == back);
    assert!(first != slower && first != moved && slower != moved);
}

/// Returns packed weights of random numbers.
fn packed(g: &mut Graph, dtype: DType, [k, rows]: [usize; 2], seed: u32) -> TensorId {
    let layout = Layout::contiguous(dtype, [k, rows, 1, 1]).unwrap();
    let mut bytes = vec![0; layout.bytes()];
    samite_quant::encode_row(dtype, &numbers(seed, k * rows), &mut bytes).unwrap();
    let kind = packed_buffer_type();
    let group = TensorGroup::allocate(&kind, Usage::Weights, &[("w", layout)]).unwrap();
    group.tensors[0].tensor().write(0, &bytes).unwrap();
    g.stored(&group.tensors[0]).unwrap()
}

#[test]
fn gate_and_up_products_fuse_with_the_gated_unit() {
    let (k, columns) = (256, 521);
    for (dtype, rows) in [(DType::Q8_0, 1056), (DType::Q4_K, 1030), (DType::F16, 1024)] {
        for (norm, swapped, third) in [
            (false, false, true),
            (true, true, false),
            (true, false, false),
        ] {
            let mut g = Graph::new();
            let x = input(&mut g, &[k, columns]);
            let scale = input(&mut g, &[k]);
            let weights = [1, 2, 3].map(|seed| packed(&mut g, dtype, [k, rows], seed));
            let mut y = x;
            if norm {
                y = g.rms_norm(x, 1e-5).unwrap();
                y = g.mul(y, scale).unwrap();
            }
            let [a, b] = [0, 1].map(|i| g.mul_mat(weights[i], y).unwrap());
            let first = g.node(a);
            let product = Product::for_node(first, tune::detect(None)).unwrap();
            let (a, b) = if swapped { (b, a) } else { (a, b) };
            let gated = g.glu_split(a, b, Glu::Swiglu).unwrap();
            // Its columns may still be packed.
            let out = if third {
                g.mul_mat(weights[2], y).unwrap()
            } else {
                gated
            };
            let run = |g: &Graph, threads| {
                let mut bench = Bench::new(g, &device(threads)).unwrap();
                bench.write(x, &numbers(5, k * columns));
                bench.write(scale, &numbers(6, k));
                bench.run().unwrap();
                [gated, out].map(|id| bench.read::<f32>(id))
            };
            let apart = run(&g, 1);
            assert!(apart.iter().flatten().all(|x| x.is_finite()));
            [gated, out].into_iter().for_each(|id| g.set_output(id));
            for threads in [1, 2] {
                assert!(run(&g, threads) == apart, "{dtype}, {threads} threads");
            }
            let one = fusions_of(&g, 1).contains(&Fusion::GatedEpilogue);
            assert_eq!(one, product.goes_by_panels(), "{dtype}");
            g.set_output(b);
            assert!(!fusions_of(&g, 1).contains(&Fusion::GatedEpilogue));
        }
    }
}
