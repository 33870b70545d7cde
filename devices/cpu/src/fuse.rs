//! Which nodes are computed together.
//!
//! - Products of the same columns, one after the other, share their packed form. Threads do not wait for each other between them.
//! - What makes columns row by row, a scaled norm or a gated unit, is computed while columns are packed, if nothing else
//!   reads it: it is never written to memory. A sum that such a norm is of is written then, too.
//! - Two products of the same columns and the gated unit of their results are one step where these results are too large for the
//!   caches: they never get to memory.
//! - Other scaled norms take one pass.
//! - Angles of positions are computed once for all that are rotated by them.
//!
//! No result changes by that: every number is computed by the same operations in the same order.

use crate::activations::ActivationForm;
use crate::detect::Isa;
use crate::kernels::columns::is_usable;
use crate::kernels::matmul::{Product, are_worth_gating};
use crate::kernels::rope::Angles;
use crate::operand::whole;
use crate::table::kernel_for;
use samite_core::{DType, Graph, Layout, Node, Op, Placed, TensorId};

/// What becomes of a computed node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fusion {
    /// It is computed on its own.
    Alone,
    /// Computed by what comes behind; never in memory.
    Absorbed,
    /// A sum that the product behind writes.
    WrittenByPrologue,
    /// A product whose columns the one before has packed.
    SharesActivations,
    /// The same, at the same time as the product before.
    JoinsPhase,
    /// A rotation whose angles the one before has computed.
    SharesAngles,
    /// A product that makes its columns: source 1 is a scaled norm or a gated unit.
    FusedPrologue,
    /// A product of a gated unit: only its columns are packed here, `fused` as those of `FusedPrologue`.
    PreparesActivations { fused: bool },
    /// A gated unit and the two products before it, whose columns are packed.
    GatedEpilogue,
    /// A scaled norm: the factor, with the norm before it.
    ScaledNorm,
}

/// Columns in a product's form: the memory that they come from, their type, how long they are and how many.
#[derive(PartialEq)]
struct ActivationKey {
    memory: (TensorId, usize),
    dtype: DType,
    shape: [usize; 2],
    form: ActivationForm,
}

/// The parts of all computed nodes, by position in the graph.
pub(crate) fn fusions(work: &Placed<'_>, isa: Isa, threads: usize) -> Vec<Fusion> {
    let nodes: Vec<_> = work.computed().collect();
    let mut fusions = vec![Fusion::Alone; work.graph.len()];
    let readers = Readers::new(work.graph);
    // The product that packed what lies in the scratch memory; and how many products use what each one packed.
    let mut packer: Option<(usize, ActivationKey)> = None;
    let mut uses = vec![0; nodes.len()];
    // The angles that lie in the workspace.
    let mut angles: Option<Angles> = None;
    for (i, &node) in nodes.iter().enumerate() {
        if matches!(node.op(), Op::Rope(_) | Op::RopeBack(_)) && !node.layout().is_empty() {
            let needed = Angles::of(node);
            if needed.is_some() && needed == angles {
                fusions[node.id().index()] = Fusion::SharesAngles;
            }
            angles = needed;
        }
        angles = angles.filter(|angles| !angles.change_with(node, work.graph));
        match columns(node, isa) {
            Some(key) => {
                let first = match &packer {
                    Some((first, held)) if *held == key => {
                        fusions[node.id().index()] = Fusion::SharesActivations;
                        *first
                    }
                    _ => {
                        packer = Some((i, key));
                        i
                    }
                };
                uses[first] += 1;
            }
            None if leaves_scratch(node, isa, threads) => {}
            None => packer = None,
        }
    }
    for i in 1..nodes.len() {
        let (before, node) = (nodes[i - 1], nodes[i]);
        let back = |steps: usize| i.checked_sub(steps).map(|i| nodes[i]);
        if let Some(first) = back(2)
            && fusions[before.id().index()] == Fusion::SharesActivations
            && are_gated_products([first, before], node, isa, &readers)
        {
            let fusion = &mut fusions[first.id().index()];
            *fusion = match *fusion {
                Fusion::SharesActivations => Fusion::Absorbed,
                fusion => Fusion::PreparesActivations {
                    fused: fusion == Fusion::FusedPrologue,
                },
            };
            fusions[before.id().index()] = Fusion::Absorbed;
            fusions[node.id().index()] = Fusion::GatedEpilogue;
            continue;
        }
        let is_written = fusions[before.id().index()] == Fusion::GatedEpilogue;
        let mut set = |node: Node<'_>, fusion| fusions[node.id().index()] = fusion;
        let is_columns = uses[i] > 0
            && node.source(1).is_some_and(|x| has_rows_of(x, before))
            && readers.only(before.id(), uses[i]);
        // Operands may be read as late as that: nothing is written between the first of these nodes and the product, which writes
        // its result after all columns are packed.
        let norm = back(2).filter(|&norm| is_scaled_norm(norm, before, &readers));
        if is_columns && (norm.is_some() || is_gated(before) && !is_written) {
            let sum = back(3).filter(|&sum| norm.is_some_and(|norm| is_sum_of(sum, norm)));
            sum.into_iter()
                .for_each(|sum| set(sum, Fusion::WrittenByPrologue));
            norm.into_iter()
                .for_each(|norm| set(norm, Fusion::Absorbed));
            set(before, Fusion::Absorbed);
            set(node, Fusion::FusedPrologue);
        } else if let Some(norm) = norm.filter(|&norm| may_be_written(work, norm, before)) {
            set(norm, Fusion::Absorbed);
            set(before, Fusion::ScaledNorm);
        }
    }
    // The product that others join. A thread alone would gain nothing by it.
    let mut first = 0;
    for i in (1..nodes.len()).filter(|_| threads > 1) {
        let fusion = |i: usize| fusions[nodes[i].id().index()];
        if fusion(i) != Fusion::SharesActivations {
            continue;
        }
        if fusion(i - 1) != Fusion::JoinsPhase {
            first = i - 1;
        }
        if are_independent(work, &nodes[first..=i], isa, threads) {
            fusions[nodes[i].id().index()] = Fusion::JoinsPhase;
        }
    }
    fusions
}

/// Whether the last of these products of the same columns touches nothing that the others do, so that it does not matter which is first.
fn are_independent(work: &Placed<'_>, products: &[Node<'_>], isa: Isa, threads: usize) -> bool {
    let [others @ .., last] = products else {
        return false;
    };
    let scratch = |node: Node<'_>| match kernel_for(node) {
        Ok(kernel) if matches!(node.op(), Op::MulMat { .. }) => {
            (kernel.scratch)(node, isa, threads)
        }
        _ => None,
    };
    let sources = |node: Node<'_>| [0, 1].map(|i| node.source(i).map(|source| source.id()));
    let overlap = |a: TensorId, b: Option<TensorId>| {
        let place = |id| work.place(id).ok();
        match (place(a), b.map(place)) {
            (Some(a), Some(Some(b))) => a.overlaps(b),
            _ => true,
        }
    };
    let writes_to = |a: Node<'_>, b: Node<'_>| {
        overlap(a.id(), Some(b.id()))
            || sources(b).into_iter().any(|source| overlap(a.id(), source))
    };
    // Workers' parts of the scratch memory lie behind the columns: where it is of the same size, they are the same.
    scratch(*last).is_some()
        && others.iter().all(|&other| {
            scratch(other) == scratch(*last) && !writes_to(*last, other) && !writes_to(other, *last)
        })
}

/// The columns that a product packs.
fn columns(node: Node<'_>, isa: Isa) -> Option<ActivationKey> {
    let is_product = matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. });
    if !is_product || node.layout().is_empty() {
        return None;
    }
    let form = Product::of(node, isa)?.form;
    let source = node.source(1)?;
    let layout = source.layout();
    if form == ActivationForm::F32 && is_usable(layout) {
        return None;
    }
    Some(ActivationKey {
        memory: whole(source)?,
        dtype: source.dtype(),
        shape: [layout.shape()[0], layout.rows()],
        form,
    })
}

/// Whether `view` is nothing but all rows of `node`.
fn has_rows_of(view: Node<'_>, node: Node<'_>) -> bool {
    let rows = |layout: &Layout| (layout.shape()[0], layout.rows());
    whole(view) == Some((node.id(), 0)) && rows(view.layout()) == rows(node.layout())
}

/// Whether scratch memory and all operands stay what they are.
fn leaves_scratch(node: Node<'_>, isa: Isa, threads: usize) -> bool {
    let scratch = kernel_for(node).map(|kernel| (kernel.scratch)(node, isa, threads));
    scratch.is_ok_and(|bytes| bytes == Some(0)) && node.tensor().written().next().is_none()
}

/// Whether `scaled` is nothing but `norm`, an RMS norm, times one row.
fn is_scaled_norm(norm: Node<'_>, scaled: Node<'_>, readers: &Readers) -> bool {
    let (Op::RmsNorm { .. }, Op::Mul) = (norm.op(), scaled.op()) else {
        return false;
    };
    let [Some(x), Some(product), Some(scale)] =
        [norm.source(0), scaled.source(0), scaled.source(1)]
    else {
        return false;
    };
    product.id() == norm.id()
        && readers.only(norm.id(), 1)
        && [x, scale, scaled]
            .iter()
            .all(|node| is_usable(node.layout()))
        && scale.layout().rows() == 1
        && scale.layout().shape()[0] == x.layout().shape()[0]
}

/// Whether `sum` is a sum of two tensors of equal shape, and what `norm` is a norm of.
fn is_sum_of(sum: Node<'_>, norm: Node<'_>) -> bool {
    let operands = [sum.source_layout(0), sum.source_layout(1)];
    matches!(sum.op(), Op::Add)
        && norm.source(0).is_some_and(|x| x.id() == sum.id())
        && operands
            .iter()
            .flatten()
            .all(|operand| is_usable(operand) && operand.shape() == sum.layout().shape())
}

/// Whether `node` is a gated unit of two tensors.
fn is_gated(node: Node<'_>) -> bool {
    matches!(node.op(), Op::Glu { .. })
        && [0, 1]
            .iter()
            .all(|&i| node.source_layout(i).is_some_and(is_usable))
}

/// Whether two products are computed with `gated`, the unit of their results.
fn are_gated_products(
    products: [Node<'_>; 2],
    gated: Node<'_>,
    isa: Isa,
    readers: &Readers,
) -> bool {
    let ids = products.map(|product| product.id());
    let operands = [0, 1].map(|i| gated.source(i).map(|source| source.id()));
    is_gated(gated)
        && is_usable(gated.layout())
        && (operands == ids.map(Some) || operands == [ids[1], ids[0]].map(Some))
        && ids.into_iter().all(|id| readers.only(id, 1))
        && are_worth_gating(products, isa)
}

/// Whether the memory of a scaled norm's result is exactly that of the norm's operand, or touches none of the operands.
fn may_be_written(work: &Placed<'_>, norm: Node<'_>, scaled: Node<'_>) -> bool {
    let place = |node: Option<Node<'_>>| node.and_then(|node| work.place(node.id()).ok());
    let (Some(x), Some(scale), Some(result)) = (
        place(norm.source(0)),
        place(scaled.source(1)),
        place(Some(scaled)),
    ) else {
        return false;
    };
    let in_place = x.location() == result.location() && x.layout() == result.layout();
    !scale.overlaps(result) && (in_place || !x.overlaps(result))
}

/// How many operands of computed nodes lie in a tensor's memory.
struct Readers(Vec<usize>);

impl Readers {
    fn new(graph: &Graph) -> Self {
        let mut readers = vec![0; graph.len()];
        // A graph that neither has outputs nor writes anything is for all its results.
        let has_purpose = graph
            .tensors()
            .iter()
            .any(|tensor| tensor.flags.output || tensor.written().next().is_some());
        for id in graph.ids() {
            let tensor = graph.tensor(id);
            if tensor.flags.output || tensor.flags.copied || !has_purpose {
                readers[graph.memory_of(id).index()] = usize::MAX;
            }
            for (_, operand) in tensor.operands().filter(|_| tensor.is_computed()) {
                let count = &mut readers[graph.memory_of(operand).index()];
                *count = count.saturating_add(1);
            }
        }
        Readers(readers)
    }

    /// Whether so many operands, and nobody else, read what is computed for a tensor.
    fn only(&self, id: TensorId, count: usize) -> bool {
        self.0[id.index()] == count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::*;
    use crate::packed_buffer_type::packed_buffer_type;
    use crate::tune;
    use samite_core::{
        Glu, Rope, RopeMode, Slot, TensorGroup, TensorRef, Usage, host_buffer_type, shape,
    };
    use std::sync::Arc;

    const WIDTH: usize = 512;
    const INNER: usize = 768;

    /// Whether products on this processor need columns in another form, so that there is something to do together.
    fn packs_columns() -> bool {
        crate::unpacked::product(tune::detect(None), DType::Q8_0).is_some()
    }

    /// A place in memory of its own, unless the tensor is stored.
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

    /// The parts of all computed nodes of a graph, each in memory of its own.
    fn fusions_of(graph: &Graph, threads: usize) -> Vec<Fusion> {
        let nodes: Vec<_> = graph.ids().collect();
        let places: Vec<_> = nodes.iter().map(|&id| Some(own_place(graph, id))).collect();
        let work = Placed {
            graph,
            nodes: &nodes,
            places: &places,
            workspace: None,
            compiled: None,
        };
        let fusions = fusions(&work, tune::detect(None), threads);
        work.computed()
            .map(|node| fusions[node.id().index()])
            .collect()
    }

    /// A layer's worth of nodes that can be computed together: its inputs and the result.
    struct Layer {
        graph: Graph,
        inputs: Vec<(TensorId, usize)>,
        /// Everything that is computed.
        nodes: Vec<TensorId>,
        result: TensorId,
    }

    impl Layer {
        /// For so many columns.
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
    fn parts_of_a_layer() {
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

    #[test]
    fn products_that_touch_each_other_are_apart() {
        if !packs_columns() {
            return;
        }
        let mut g = Graph::new();
        let x = input(&mut g, &[WIDTH, 4]);
        let [a, b] = [64, 64].map(|rows| {
            let weights = input(&mut g, &[WIDTH, rows]);
            g.cast(weights, DType::Q8_0).unwrap()
        });
        let products = [a, b].map(|weights| g.mul_mat(weights, x).unwrap());
        let nodes: Vec<_> = g.ids().collect();
        let mut places: Vec<_> = nodes.iter().map(|&id| Some(own_place(&g, id))).collect();
        let fusion = |places: &[Option<TensorRef>]| {
            let work = Placed {
                graph: &g,
                nodes: &nodes,
                places,
                workspace: None,
                compiled: None,
            };
            fusions(&work, tune::detect(None), 2)[products[1].index()]
        };
        assert_eq!(fusion(&places), Fusion::JoinsPhase);
        // The second result where the first one's weights are, which nobody needs any more.
        let layout = g.tensor(products[1]).layout;
        let buffer = places[a.index()]
            .as_ref()
            .map(|place| Arc::clone(&place.buffer));
        places[products[1].index()] = buffer.map(|buffer| TensorRef {
            buffer,
            slot: Slot { offset: 0, layout },
        });
        assert_eq!(fusion(&places), Fusion::SharesActivations);
    }

    #[test]
    fn nothing_is_left_out_that_is_read_elsewhere() {
        if !packs_columns() {
            return;
        }
        // Without outputs, all results are wanted.
        let mut layer = Layer::new(3);
        assert!(!layer.fusions().contains(&Fusion::Absorbed));
        layer.graph.set_output(layer.result);
        let number = |layer: &Layer, fusion: Fusion| {
            layer.fusions().iter().filter(|&&p| p == fusion).count()
        };
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
    fn results_are_the_same() {
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
    fn other_rows_are_not_made() {
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
    fn columns_of_experts_are_shared() {
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
    fn angles_are_computed_again_only_where_others_are_needed() {
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

    /// Packed weights of random numbers.
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
    fn products_and_the_gated_unit_of_them_are_one_step() {
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
                let product = Product::of(first, tune::detect(None)).unwrap();
                let (a, b) = if swapped { (b, a) } else { (a, b) };
                let gated = g.glu_split(a, b, Glu::Swiglu).unwrap();
                // Its columns may still be there.
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
}
