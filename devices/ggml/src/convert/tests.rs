//! Converts graphs to ggml's structures and back.

use super::export::{Exported, TensorLocation};
use super::import::{Importer, TensorMemory};
use super::*;
use crate::abi::{Tensor, Version};
use samite_core::op::{Rope, RopeMode, Unary};
use samite_core::{
    DType, Graph, HostMemory, Layout, Op, Slot, TensorId, TensorRef, Usage, host_buffer,
};
use std::ptr::null_mut;

/// A single piece of memory for all tensors.
struct Arena(TensorRef);

impl TensorMemory for Arena {
    fn place(
        &mut self,
        tensor: &Tensor,
        layout: Layout,
    ) -> Result<TensorRef, UnsupportedConversion> {
        let base = self.0.buffer.host().unwrap().base().as_ptr() as usize;
        Ok(TensorRef {
            buffer: self.0.buffer.clone(),
            slot: Slot {
                offset: (tensor.data as usize).checked_sub(base).unwrap(),
                layout,
            },
        })
    }

    fn temporary(&mut self, layout: Layout) -> Result<TensorRef, UnsupportedConversion> {
        super::import::temporary(layout)
    }
}

/// Exports all nodes of `graph` to consecutive memory, and imports the result.
fn there_and_back(graph: &Graph, version: Version) -> super::import::Imported {
    let memory = HostMemory::allocate(1 << 20, "test", "an arena").unwrap();
    let base = memory.base().as_ptr();
    let arena = TensorRef {
        buffer: host_buffer(memory, Usage::Any),
        slot: Slot {
            offset: 0,
            layout: Layout::contiguous(DType::I8, [1 << 20, 1, 1, 1]).unwrap(),
        },
    };
    let mut at = 0;
    let mut offsets = vec![0; graph.len()];
    for id in graph.ids() {
        offsets[id.index()] = match graph.tensor(id).view {
            Some(view) => offsets[view.base.index()] + view.offset,
            None => {
                let start = at;
                at += graph.tensor(id).layout.bytes().next_multiple_of(64);
                start
            }
        };
    }
    assert!(at < 1 << 20);
    let nodes: Vec<_> = graph
        .ids()
        .filter(|&id| !matches!(graph.tensor(id).op, Op::Leaf))
        .collect();
    let place = |id: TensorId| -> Result<TensorLocation, UnsupportedConversion> {
        Ok(TensorLocation::At(
            std::ptr::without_provenance_mut(8),
            base.wrapping_add(offsets[id.index()]),
        ))
    };
    let mut exported = Exported::new(version, graph, &nodes, place).unwrap();
    exported.count_uses(graph);
    let cgraph = exported.graph();
    // SAFETY: the graph was made above and lives as long as `exported`.
    unsafe {
        for &node in cgraph.nodes() {
            assert!(cgraph.uses(node).is_some());
        }
        Importer::new(Arena(arena), version).graph(&cgraph).unwrap()
    }
}

/// Returns the computed nodes with their layouts and operations, and their output flags.
fn computed(graph: &Graph) -> Vec<(Op, Layout, bool)> {
    let tensors = graph.tensors().iter().filter(|t| t.is_computed());
    tensors.map(|t| (t.op, t.layout, t.flags.output)).collect()
}

#[test]
fn a_graph_with_views_and_writes_round_trips() {
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [64, 5, 1, 1]).unwrap();
    let w = g.leaf("w", DType::Q8_0, [64, 96, 1, 1]).unwrap();
    let cache = g.leaf("cache", DType::F16, [64, 32, 1, 1]).unwrap();
    let positions = g.input("positions", DType::I32, [5, 1, 1, 1]).unwrap();
    let index = g.input("index", DType::I64, [5, 1, 1, 1]).unwrap();
    let normed = g.rms_norm(x, 1e-5).unwrap();
    let qkv = g.mul_mat(w, normed).unwrap();
    let q = g.view(qkv, [16, 4, 5, 1], [64, 384, 1920], 0).unwrap();
    let rope = Op::Rope(Rope::new(16, RopeMode::Neox, 1e4));
    let q = g.push(rope, &[Some(q), Some(positions)]).unwrap();
    let turned = g
        .push(Op::Permute { axes: [0, 2, 1, 3] }, &[Some(q)])
        .unwrap();
    let flat = g.cont(turned).unwrap();
    let rows = g
        .push(
            Op::Reshape {
                shape: [64, 5, 1, 1],
            },
            &[Some(flat)],
        )
        .unwrap();
    let set = g
        .push(Op::SetRows, &[Some(rows), Some(index), Some(cache)])
        .unwrap();
    let half = g
        .push(Op::Cast { dtype: DType::F16 }, &[Some(rows)])
        .unwrap();
    let silu = g.push(Op::Unary(Unary::Silu), &[Some(half)]).unwrap();
    let copied = g.cpy(silu, cache);
    assert!(copied.is_err(), "the shapes differ");
    let window = g.view(cache, [64, 5, 1, 1], [128, 0, 0], 128).unwrap();
    let copied = g.cpy(silu, window).unwrap();
    for id in [set, copied] {
        g.set_output(id);
    }
    for version in Version::ALL {
        let back = there_and_back(&g, version);
        assert_eq!(computed(&back.graph), computed(&g));
        assert!(back.places.iter().all(Option::is_some));
        // Views remain views, so that the sources of each node stay visible.
        let views = |g: &Graph| g.tensors().iter().filter(|t| t.op.is_view()).count();
        assert_eq!(views(&back.graph), views(&g));
    }
}

#[test]
fn views_are_inserted_where_ggml_lists_them() {
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [8, 2, 1, 1]).unwrap();
    let a = g.sqr(x).unwrap();
    let b = g.sqr(x).unwrap();
    let rows = g.view(a, [8, 1, 1, 1], [32, 32, 32], 32).unwrap();
    let part = g.view(rows, [4, 1, 1, 1], [16, 16, 16], 0).unwrap();
    let of_x = g.view(x, [4, 1, 1, 1], [16, 16, 16], 0).unwrap();
    let empty = g.view(x, [0, 1, 1, 1], [16, 16, 16], 0).unwrap();
    let unused = g.view(b, [4, 1, 1, 1], [16, 16, 16], 0).unwrap();
    let c = g.add(part, of_x).unwrap();
    let d = g.add(b, rows).unwrap();
    let nothing = g.sqr(empty).unwrap();
    let expected = [a, rows, part, b, of_x, c, d];
    let with_views = |nodes: &[TensorId]| super::export::with_views(&g, nodes);
    assert_eq!(with_views(&[a, b, c, d, nothing]), expected);
    // Views among the nodes do not matter.
    let all: Vec<_> = g.ids().collect();
    assert!(all.contains(&unused));
    assert_eq!(with_views(&all), expected);
    // A tensor that another device computed exists before.
    assert_eq!(with_views(&[d, c]), [rows, d, part, of_x, c]);
}

fn tensor(dtype: DType, shape: [usize; 4], data: usize) -> Tensor {
    let layout = Layout::contiguous(dtype, shape).unwrap();
    let mut tensor = super::export::bare(&layout, Version::V28).unwrap();
    tensor.data = std::ptr::without_provenance_mut(data);
    tensor
}

/// Imports one node over an arena of zeros that starts at the returned address.
fn import(
    make: impl FnOnce(usize) -> Vec<Tensor>,
) -> Result<super::import::Imported, UnsupportedConversion> {
    let memory = HostMemory::allocate(1 << 16, "test", "an arena").unwrap();
    let base = memory.base().as_ptr() as usize;
    let arena = TensorRef {
        buffer: host_buffer(memory, Usage::Any),
        slot: Slot {
            offset: 0,
            layout: Layout::contiguous(DType::I8, [1 << 16, 1, 1, 1]).unwrap(),
        },
    };
    let mut tensors = make(base);
    let start = tensors.as_mut_ptr();
    let last = tensors.len() - 1;
    for i in 0..last {
        tensors[last].src[i] = start.wrapping_add(i);
    }
    let mut importer = Importer::new(Arena(arena), Version::V28);
    // SAFETY: all tensors are in `tensors`.
    unsafe { importer.node(&raw const tensors[last]) }?;
    Ok(importer.finish())
}

#[test]
fn results_that_overlap_a_live_operand_use_a_copy() {
    let make = |op, at: usize| {
        move |base| {
            let mut node = tensor(DType::F32, [8, 8, 1, 1], base + at);
            node.op = op;
            vec![
                tensor(DType::F32, [8, 8, 1, 1], base),
                tensor(DType::F32, [8, 8, 1, 1], base + 1024),
                node,
            ]
        }
    };
    let ops = |imported: super::import::Imported| {
        let nodes = imported.nodes.iter();
        nodes
            .map(|&id| imported.graph.tensor(id).op.name())
            .collect::<Vec<_>>()
    };
    use crate::abi::op::{ADD, MUL_MAT};
    assert_eq!(ops(import(make(ADD, 0)).unwrap()), ["add"]);
    assert_eq!(ops(import(make(ADD, 1024)).unwrap()), ["add"]);
    assert_eq!(ops(import(make(ADD, 4096)).unwrap()), ["add"]);
    assert_eq!(ops(import(make(ADD, 64)).unwrap()), ["cont", "add"]);
    assert_eq!(
        ops(import(make(MUL_MAT, 1024)).unwrap()),
        ["cont", "mul_mat"]
    );
}

#[test]
fn strided_and_reshaped_results_take_extra_nodes() {
    use crate::abi::op::{CONT, SQR};
    let imported = import(|base| {
        let mut x = tensor(DType::F32, [4, 3, 1, 1], base);
        x.nb = [4, 64, 192, 192];
        let mut node = x;
        node.op = SQR;
        vec![x, node]
    })
    .unwrap();
    let names: Vec<_> = imported
        .graph
        .tensors()
        .iter()
        .map(|t| t.op.name())
        .collect();
    assert_eq!(names, ["none", "sqr", "none", "cpy"]);

    let imported = import(|base| {
        let mut node = tensor(DType::F32, [2, 6, 1, 1], base + 1024);
        node.op = CONT;
        vec![tensor(DType::F32, [4, 3, 1, 1], base), node]
    })
    .unwrap();
    let names: Vec<_> = imported
        .graph
        .tensors()
        .iter()
        .map(|t| t.op.name())
        .collect();
    assert_eq!(names, ["none", "cont", "reshape"]);
}

#[test]
fn invalid_graphs_are_refused_with_a_reason() {
    use crate::abi::op::{ADD, SQR};
    let reason = |make: fn(usize) -> Vec<Tensor>| import(make).err().unwrap().into_owned();
    let refused = reason(|base| {
        let mut node = tensor(DType::F32, [9, 1, 1, 1], base + 4096);
        node.op = SQR;
        vec![tensor(DType::F32, [8, 1, 1, 1], base), node]
    });
    assert!(refused.contains("the result would be f32 [8]"), "{refused}");
    let refused = reason(|base| {
        let mut node = tensor(DType::F32, [8, 1, 1, 1], base);
        node.op = ADD;
        vec![tensor(DType::F32, [8, 1, 1, 1], base), node]
    });
    assert!(refused.contains("source 1 is missing"), "{refused}");
    let refused = reason(|base| {
        let mut x = tensor(DType::F32, [8, 1, 1, 1], base);
        x.ne[0] = i64::MAX;
        let mut node = x;
        node.op = SQR;
        vec![x, node]
    });
    assert!(refused.contains("overflows"), "{refused}");
    let refused = reason(|base| {
        let mut node = tensor(DType::F32, [8, 1, 1, 1], base);
        node.op = SQR;
        node.src = [null_mut(); 10];
        vec![
            tensor(DType::F32, [8, 1, 1, 1], base + (1 << 16) - 16),
            node,
        ]
    });
    assert!(refused.contains("do not fit into a buffer"), "{refused}");
}
