//! Tests of fusion with kernels that only have names.

use crate::{
    BeforeAttention, ColumnForm, ColumnReader, Fused, FusedRotation, Kernels, LaunchLists, Memory,
    OperandFacts, ScaledNorm, Unsupported, launch_list,
};
use samite_core::{
    DType, Glu, Graph, Node, Op, Precision, Rope, RopeMode, TensorGroup, TensorId, TensorRef,
    Usage, host_buffer_type,
};
use std::sync::Arc;

/// Kernels of a device that can fuse everything, or, with `can_fuse` unset, nothing.
#[derive(Clone, Copy, PartialEq)]
struct Named {
    can_fuse: bool,
}

const ALL: Named = Named { can_fuse: true };

impl Named {
    fn fused(self, name: String) -> Fused<String> {
        self.can_fuse.then(|| vec![name])
    }
}

fn suffix(reader: Option<ColumnReader<'_>>) -> String {
    reader.map_or(String::new(), |reader| format!(" to {:?}", reader.form))
}

impl Kernels for Named {
    type Launch = String;

    fn is_packed(_place: &TensorRef) -> bool {
        true
    }

    fn uses_scratch(launch: &String) -> bool {
        launch == "flash_attn_ext"
    }

    fn launches_of(&self, node: Node<'_>, _: OperandFacts) -> Result<Vec<String>, Unsupported> {
        let name = node.op().name();
        match node.op() {
            Op::ArgMax => Err("no such kernel".into()),
            op if op.is_view() => Ok(Vec::new()),
            _ => Ok(vec![name.to_owned()]),
        }
    }

    fn column_form(&self, node: Node<'_>, packed: bool) -> Option<ColumnForm> {
        let few = node.source_layout(1)?.shape()[1] <= 8;
        packed.then_some(if few {
            ColumnForm::Int8
        } else {
            ColumnForm::F16
        })
    }

    fn convert(&self, product: Node<'_>, packed: bool) -> Fused<String> {
        self.fused(format!("{:?}", self.column_form(product, packed)?))
    }

    fn may_join(&self, [a, b]: [Node<'_>; 2], _form: ColumnForm) -> bool {
        let dtype = |node: Node<'_>| node.source_layout(0).map(|layout| layout.dtype());
        dtype(a) == dtype(b)
    }

    fn max_products(&self) -> usize {
        3
    }

    fn products(&self, nodes: &[Node<'_>], _packed: bool) -> Fused<String> {
        self.fused(format!("{} products", nodes.len()))
    }

    fn scaled_norm(
        &self,
        norm: &ScaledNorm<'_>,
        reader: Option<ColumnReader<'_>>,
    ) -> Fused<String> {
        let name = norm.sum.map_or("norm", |_| "sum norm");
        self.fused(name.to_owned() + &suffix(reader))
    }

    fn gated(&self, _node: Node<'_>, reader: ColumnReader<'_>) -> Fused<String> {
        self.fused("gated".to_owned() + &suffix(Some(reader)))
    }

    fn attention(&self, _: Node<'_>, _: OperandFacts, reader: ColumnReader<'_>) -> Fused<String> {
        self.fused("attention".to_owned() + &suffix(Some(reader)))
    }

    fn rotation(&self, rotation: &FusedRotation<'_>, _rope: Rope) -> Fused<String> {
        let name = rotation.norm.map_or("rotation", |_| "norm rotation");
        self.fused(name.to_owned())
    }

    fn before_attention(&self, nodes: &BeforeAttention<'_>) -> Fused<String> {
        let name = nodes.query.norm.map_or("rotations", |_| "norm rotations");
        self.fused(format!("{name} store"))
    }
}

/// Returns the names of the launches of all nodes.
fn launches(graph: &Graph, memory: Memory<'_>) -> Vec<String> {
    let nodes: Vec<_> = graph.ids().collect();
    let list = launch_list(graph, &nodes, ALL, memory);
    let list = list.unwrap_or_else(|(_, reason)| panic!("{reason}"));
    list.launches.into_iter().map(|step| step.launch).collect()
}

struct Layer {
    graph: Graph,
    tokens: usize,
}

impl Layer {
    fn new(tokens: usize) -> Self {
        Layer {
            graph: Graph::new(),
            tokens,
        }
    }

    fn input(&mut self) -> TensorId {
        let shape = [64, self.tokens, 1, 1];
        self.graph.input("x", DType::F32, shape).unwrap()
    }

    fn product(&mut self, dtype: DType, x: TensorId) -> TensorId {
        let w = self.graph.leaf("w", dtype, [64, 64, 1, 1]).unwrap();
        self.graph.mul_mat(w, x).unwrap()
    }

    fn norm(&mut self, x: TensorId, length: usize) -> TensorId {
        let factor = self.graph.leaf("f", DType::F32, [length, 1, 1, 1]).unwrap();
        let normed = self.graph.rms_norm(x, 1e-5).unwrap();
        self.graph.mul(normed, factor).unwrap()
    }
}

#[test]
fn columns_are_converted_once() {
    let mut layer = Layer::new(1);
    let x = layer.input();
    for _ in 0..4 {
        layer.product(DType::Q8_0, x);
    }
    layer.product(DType::Q4_0, x);
    let z = layer.input();
    layer.product(DType::Q4_0, z);
    layer.product(DType::Q4_0, x);
    let expected = [
        "Int8",
        "3 products",
        "1 products",
        "1 products",
        "Int8",
        "1 products",
        "Int8",
        "1 products",
    ];
    assert_eq!(launches(&layer.graph, Memory::AllPacked), expected);
    // No weights are packed, so that no columns are converted.
    assert_eq!(launches(&layer.graph, Memory::Stored), ["mul_mat"; 7]);
}

#[test]
fn producers_convert_the_columns_of_products() {
    for (tokens, form) in [(1, "Int8"), (9, "F16")] {
        let mut layer = Layer::new(tokens);
        let (x, z) = (layer.input(), layer.input());
        let sum = layer.graph.add(x, z).unwrap();
        let normed = layer.norm(sum, 64);
        let [gate, up] = [0, 1].map(|_| layer.product(DType::Q8_0, normed));
        let gated = layer.graph.glu_split(gate, up, Glu::Swiglu).unwrap();
        let down = layer.product(DType::Q8_0, gated);
        let y = layer.graph.add(down, sum).unwrap();
        layer.graph.set_output(y);
        let expected = [
            &format!("sum norm to {form}"),
            "2 products",
            &format!("gated to {form}"),
            "1 products",
            "add",
        ];
        assert_eq!(launches(&layer.graph, Memory::AllPacked), expected);
        // A device without such kernels computes each node alone.
        let nodes: Vec<_> = layer.graph.ids().collect();
        let none = Named { can_fuse: false };
        let list = launch_list(&layer.graph, &nodes, none, Memory::AllPacked);
        let count = list.map_err(|(_, reason)| reason).unwrap().launches.len();
        assert_eq!(count, 8);
    }
}

#[test]
fn a_norm_that_others_read_is_not_fused() {
    let mut layer = Layer::new(1);
    let x = layer.input();
    let normed = layer.graph.rms_norm(x, 1e-5).unwrap();
    let factor = layer.graph.leaf("f", DType::F32, [64, 1, 1, 1]).unwrap();
    let scaled = layer.graph.mul(normed, factor).unwrap();
    let y = layer.graph.add(scaled, normed).unwrap();
    layer.graph.set_output(y);
    let expected = ["rms_norm", "mul", "add"];
    assert_eq!(launches(&layer.graph, Memory::AllPacked), expected);
}

#[test]
fn attention_converts_for_the_product_after_it() {
    for is_whole in [true, false] {
        let mut layer = Layer::new(2);
        let mut input = |shape| layer.graph.input("", DType::F32, shape).unwrap();
        let q = input([32, 2, 2, 1]);
        let [k, v] = [0, 1].map(|_| input([32, 9, 1, 1]));
        let op = Op::FlashAttn {
            scale: 0.125,
            max_bias: 0.0,
            softcap: 0.0,
            precision: Precision::F32,
        };
        let y = layer.graph.push(op, &[Some(q), Some(k), Some(v)]).unwrap();
        // Heads as columns are not those of the result as it lies in memory.
        let shape = if is_whole {
            [64, 2, 1, 1]
        } else {
            [32, 4, 1, 1]
        };
        let rows = layer.graph.reshape(y, shape).unwrap();
        let weights = [shape[0], 64, 1, 1];
        let w = layer.graph.leaf("w", DType::Q8_0, weights).unwrap();
        layer.graph.mul_mat(w, rows).unwrap();
        let expected: &[_] = if is_whole {
            &["attention to Int8", "1 products"]
        } else {
            &["flash_attn_ext", "Int8", "1 products"]
        };
        assert_eq!(launches(&layer.graph, Memory::AllPacked), expected);
    }
}

/// Builds the rotations and cache writes of a layer. `positions` and `cells` have the numbers of
/// the inputs that queries and keys, and keys and values, have.
fn before_attention(has_norms: [bool; 2], positions: [usize; 2], cells: [usize; 2]) -> Graph {
    let mut layer = Layer::new(3);
    let numbers = [0, 1].map(|_| {
        let mut input = |dtype| layer.graph.input("", dtype, [3, 1, 1, 1]).unwrap();
        (input(DType::I32), input(DType::I64))
    });
    let caches = [0, 1].map(|_| layer.graph.leaf("", DType::F16, [64, 9, 1, 1]).unwrap());
    let v = layer.input();
    let rope = Rope::new(32, RopeMode::Neox, 10_000.0);
    let mut rotated = |heads, has_norm, position: usize| {
        let shape = [32, heads, 3, 1];
        let mut x = layer.graph.input("", DType::F32, shape).unwrap();
        if has_norm {
            x = layer.norm(x, 32);
        }
        layer
            .graph
            .rope(x, numbers[position].0, None, rope)
            .unwrap()
    };
    let q = rotated(4, has_norms[0], positions[0]);
    let k = rotated(2, has_norms[1], positions[1]);
    layer.graph.set_output(q);
    let rows = layer.graph.reshape(k, [64, 3, 1, 1]).unwrap();
    for (source, cell, cache) in [(rows, cells[0], caches[0]), (v, cells[1], caches[1])] {
        layer
            .graph
            .set_rows(source, numbers[cell].1, cache)
            .unwrap();
    }
    layer.graph
}

#[test]
fn rotations_and_cache_writes_are_one_launch() {
    let apart = ["rope", "rope", "set_rows", "set_rows"];
    for (has_norms, positions, cells, expected) in [
        ([false; 2], [0; 2], [0; 2], &["rotations store"][..]),
        ([true; 2], [0; 2], [0; 2], &["norm rotations store"]),
        ([false; 2], [0, 1], [0; 2], &apart),
        ([false; 2], [0; 2], [0, 1], &apart),
        (
            [true, false],
            [0; 2],
            [0; 2],
            &["norm rotation", "rope", "set_rows", "set_rows"],
        ),
    ] {
        let graph = before_attention(has_norms, positions, cells);
        let case = format!("{has_norms:?} {positions:?} {cells:?}");
        assert_eq!(launches(&graph, Memory::AllPacked), expected, "{case}");
    }
}

/// Allocates memory for each tensor. `same` are tensors that lie in the same place.
fn places(graph: &Graph, same: &[(TensorId, TensorId)]) -> Vec<Option<TensorRef>> {
    let memory = host_buffer_type();
    let mut places: Vec<Option<TensorRef>> = Vec::new();
    for id in graph.ids() {
        let layout = graph.tensor(id).layout;
        let other = same.iter().find(|(a, _)| *a == id);
        let place = match other {
            Some((_, other)) => places[other.index()].clone().unwrap(),
            None => {
                let group = TensorGroup::allocate(&memory, Usage::Compute, &[("", layout)]);
                group.unwrap().tensors[0].tensor().clone()
            }
        };
        places.push(Some(place));
    }
    places
}

#[test]
fn columns_that_are_overwritten_are_converted_anew() {
    let mut layer = Layer::new(1);
    let x = layer.input();
    let product = layer.product(DType::Q8_0, x);
    let other = layer.graph.scale(product, 2.0).unwrap();
    layer.product(DType::Q8_0, x);
    for (is_overwritten, expected) in [
        (false, &["Int8", "1 products", "scale", "1 products"][..]),
        (true, &["Int8", "1 products", "scale", "Int8", "1 products"]),
    ] {
        let same = if is_overwritten {
            vec![(other, x)]
        } else {
            Vec::new()
        };
        let places = places(&layer.graph, &same);
        assert_eq!(launches(&layer.graph, Memory::Places(&places)), expected);
    }
}

#[test]
fn overlapping_memory_prevents_fusion() {
    let mut layer = Layer::new(1);
    let (x, z) = (layer.input(), layer.input());
    let sum = layer.graph.add(x, z).unwrap();
    let normed = layer.norm(sum, 64);
    layer.graph.set_output(normed);
    let factor = layer.graph.node(normed).source(1).unwrap().id();
    for (same, expected) in [
        (vec![], &["sum norm"][..]),
        // A row is read as a whole before it is written.
        (vec![(sum, x), (normed, z)], &["sum norm"]),
        (vec![(normed, factor)], &["add", "rms_norm", "mul"]),
    ] {
        let places = places(&layer.graph, &same);
        assert_eq!(launches(&layer.graph, Memory::Places(&places)), expected);
    }
}

#[test]
fn an_unsupported_node_is_reported() {
    let mut layer = Layer::new(1);
    let x = layer.input();
    let index = layer.graph.argmax(x).unwrap();
    let nodes: Vec<_> = layer.graph.ids().collect();
    let (id, reason) = launch_list(&layer.graph, &nodes, ALL, Memory::Stored)
        .err()
        .unwrap();
    assert_eq!((id, &*reason), (index, "no such kernel"));
}

#[test]
fn a_list_is_built_once_for_a_graph() {
    let mut lists = LaunchLists::default();
    let mut list = |graph: &Graph, memory| {
        let nodes: Vec<_> = graph.ids().collect();
        let list = lists.get(graph, &nodes, ALL, memory);
        list.unwrap_or_else(|(_, reason)| panic!("{reason}"))
    };
    let product = |dtype, columns| {
        let mut layer = Layer::new(columns);
        let x = layer.input();
        layer.product(dtype, x);
        layer.graph
    };
    let (halves, packable) = (product(DType::F16, 1), product(DType::Q4_0, 1));
    let first = list(&halves, Memory::Stored);
    assert!(Arc::ptr_eq(
        &first,
        &list(&halves.clone(), Memory::AllPacked)
    ));
    let plain = list(&packable, Memory::Stored);
    let packed = list(&packable, Memory::AllPacked);
    assert_eq!([plain.launches.len(), packed.launches.len()], [1, 2]);
    assert!(Arc::ptr_eq(&plain, &list(&packable, Memory::Stored)));
    assert!(Arc::ptr_eq(&packed, &list(&packable, Memory::AllPacked)));
    // Without places, nothing is packed or known to be apart.
    let placed = list(&packable, Memory::Places(&[]));
    assert!(!Arc::ptr_eq(&packed, &placed) && placed.launches.len() == 1);
    let wider = list(&product(DType::Q4_0, 2), Memory::Stored);
    assert!(!Arc::ptr_eq(&plain, &wider));
}
