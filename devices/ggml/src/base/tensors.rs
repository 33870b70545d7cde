//! Properties of tensors, and parts of graphs.

use super::text::fail;
use super::types::{block_len, type_size};
use super::{Symbol, exports, names};
use crate::abi::{CGraph, MAX_DIMS, Tensor, flag, op, usage};
use std::ffi::{c_char, c_int, c_void};

pub fn symbols() -> Vec<Symbol> {
    exports![
        are_same_shape as ggml_are_same_shape,
        are_same_stride as ggml_are_same_stride,
        can_fuse_subgraph as ggml_can_fuse_subgraph_ext,
        can_repeat as ggml_can_repeat,
        data_f32 as ggml_get_data_f32,
        element_size as ggml_element_size,
        glu_name as ggml_glu_op_name,
        glu_op as ggml_get_glu_op,
        graph_node as ggml_graph_node,
        is_contiguous as ggml_is_contiguous,
        is_contiguous as ggml_is_contiguous_0,
        is_contiguous_1 as ggml_is_contiguous_1,
        is_contiguous_2 as ggml_is_contiguous_2,
        is_contiguous_channels as ggml_is_contiguous_channels,
        is_contiguous_rows as ggml_is_contiguous_rows,
        is_contiguous_to_3 as ggml_is_contiguous_to_3,
        is_contiguously_allocated as ggml_is_contiguously_allocated,
        is_empty as ggml_is_empty,
        is_matrix as ggml_is_matrix,
        is_permuted as ggml_is_permuted,
        is_scalar as ggml_is_scalar,
        is_transposed as ggml_is_transposed,
        is_view as ggml_is_view,
        n_dims as ggml_n_dims,
        name as ggml_get_name,
        nbytes as ggml_nbytes,
        nelements as ggml_nelements,
        nrows as ggml_nrows,
        op_desc as ggml_op_desc,
        op_name as ggml_op_name,
        rope_yarn_corr_dims as ggml_rope_yarn_corr_dims,
        unary_name as ggml_unary_op_name,
        unary_op as ggml_get_unary_op,
        unravel_index as ggml_unravel_index,
    ]
}

/// Defines functions of a tensor. Plugins pass valid tensors: the host made them, or the plugin
/// itself.
macro_rules! of_tensor {
    ($($(#[$doc:meta])* fn $name:ident($tensor:ident) -> $result:ty $body:block)*) => {
        $($(#[$doc])* pub unsafe extern "C" fn $name(tensor: *const Tensor) -> $result {
            // SAFETY: see the macro.
            let $tensor = unsafe { &*tensor };
            $body
        })*
    };
}

fn elements(t: &Tensor) -> i64 {
    t.ne.iter().product()
}

fn has_nothing(t: &Tensor) -> bool {
    t.ne.contains(&0)
}

fn bytes(t: &Tensor) -> usize {
    if t.ne.iter().any(|&extent| extent <= 0) {
        return 0;
    }
    let extent = |dim: usize| t.ne[dim] as usize;
    let row = match block_len(t.dtype) {
        1 => type_size(t.dtype) + (extent(0) - 1) * t.nb[0],
        block => extent(0) * t.nb[0] / block,
    };
    (1..MAX_DIMS).fold(row, |bytes, dim| bytes + (extent(dim) - 1) * t.nb[dim])
}

/// Returns whether there are no gaps between elements, rows and so on below dimension `to`. Gaps
/// are allowed up to dimension `free`.
fn contiguous(t: &Tensor, free: usize, to: usize) -> bool {
    let block = block_len(t.dtype) as i64;
    let size = type_size(t.dtype);
    if t.ne[0] != block && t.nb[0] != size {
        return false;
    }
    let mut next = size * (t.ne[0] / block) as usize;
    for dim in 1..to {
        if dim <= free {
            next = t.ne[dim] as usize * t.nb[dim];
        } else {
            if t.ne[dim] != 1 && t.nb[dim] != next {
                return false;
            }
            next *= t.ne[dim] as usize;
        }
    }
    true
}

of_tensor! {
    fn nelements(t) -> i64 { elements(t) }
    fn nrows(t) -> i64 { t.ne[1] * t.ne[2] * t.ne[3] }
    fn nbytes(t) -> usize { bytes(t) }
    fn element_size(t) -> usize { type_size(t.dtype) }
    fn is_empty(t) -> bool { has_nothing(t) }
    fn is_scalar(t) -> bool { t.ne == [1; MAX_DIMS] }
    fn is_matrix(t) -> bool { t.ne[2..] == [1, 1] }
    fn is_transposed(t) -> bool { t.nb[0] > t.nb[1] }
    fn is_view(t) -> bool { !t.view_src.is_null() }
    fn is_permuted(t) -> bool { !t.nb.is_sorted() }
    fn is_contiguous(t) -> bool { contiguous(t, 0, MAX_DIMS) }
    fn is_contiguous_1(t) -> bool { contiguous(t, 1, MAX_DIMS) }
    fn is_contiguous_2(t) -> bool { contiguous(t, 2, MAX_DIMS) }
    fn is_contiguous_to_3(t) -> bool { contiguous(t, 0, 3) }
    fn is_contiguous_rows(t) -> bool {
        t.ne[0] == block_len(t.dtype) as i64 || t.nb[0] == type_size(t.dtype)
    }
    /// Returns whether channels are adjacent, then columns, then rows.
    fn is_contiguous_channels(t) -> bool {
        t.nb[2] == type_size(t.dtype) && t.nb[0] > t.nb[2] && t.nb[1] > t.nb[0]
    }
    /// Returns whether memory has no gaps, in any order of dimensions.
    fn is_contiguously_allocated(t) -> bool {
        bytes(t) == elements(t) as usize * type_size(t.dtype) / block_len(t.dtype)
    }
    fn n_dims(t) -> c_int {
        t.ne.iter().rposition(|&extent| extent > 1).map_or(1, |last| last as c_int + 1)
    }
    fn unary_op(t) -> c_int { variant(t, op::UNARY) }
    fn glu_op(t) -> c_int { variant(t, op::GLU) }
    fn op_desc(t) -> *const c_char { names::of_tensor(t).as_ptr() }
    fn name(t) -> *const c_char { t.name.as_ptr() }
    fn data_f32(t) -> *mut c_void { t.data }
}

fn variant(t: &Tensor, expected: u32) -> c_int {
    if names::op_of(t.op) != expected {
        fail(&format!(
            "asked for the variant of {} in a tensor of {}",
            names::of_op(expected).to_string_lossy(),
            names::of_op(t.op).to_string_lossy()
        ));
    }
    t.op_params[0]
}

unsafe extern "C" fn op_name(number: u32) -> *const c_char {
    names::of_op(number).as_ptr()
}

unsafe extern "C" fn unary_name(number: u32) -> *const c_char {
    names::of_unary(number).as_ptr()
}

unsafe extern "C" fn glu_name(number: u32) -> *const c_char {
    names::of_glu(number).as_ptr()
}

unsafe extern "C" fn are_same_shape(a: *const Tensor, b: *const Tensor) -> bool {
    // SAFETY: plugins pass valid tensors.
    unsafe { (*a).ne == (*b).ne }
}

unsafe extern "C" fn are_same_stride(a: *const Tensor, b: *const Tensor) -> bool {
    // SAFETY: plugins pass two valid tensors. Only strides are read.
    unsafe { (*a).nb == (*b).nb }
}

/// Returns whether copies of `a` can fill `b`.
unsafe extern "C" fn can_repeat(a: *const Tensor, b: *const Tensor) -> bool {
    // SAFETY: plugins pass two valid tensors, which do not change during the call.
    let (a, b) = unsafe { (&*a, &*b) };
    if has_nothing(a) {
        has_nothing(b)
    } else {
        a.ne.iter().zip(&b.ne).all(|(a, b)| b % a == 0)
    }
}

/// Returns the indices of an element, which is counted in memory order. Does not write to null
/// pointers.
unsafe extern "C" fn unravel_index(
    tensor: *const Tensor,
    index: i64,
    i0: *mut i64,
    i1: *mut i64,
    i2: *mut i64,
    i3: *mut i64,
) {
    // SAFETY: plugins pass valid tensors, and valid or null pointers for the result.
    unsafe {
        let [n0, n1, n2, _] = (*tensor).ne;
        let position = [
            index % n0,
            index / n0 % n1,
            index / (n0 * n1) % n2,
            index / (n0 * n1 * n2),
        ];
        for (to, value) in [i0, i1, i2, i3].into_iter().zip(position) {
            if !to.is_null() {
                *to = value;
            }
        }
    }
}

/// Returns the dimensions between which YaRN changes from extrapolation to interpolation: those
/// that turn `beta_fast` and `beta_slow` times within the training context.
unsafe extern "C" fn rope_yarn_corr_dims(
    n_dims: c_int,
    trained: c_int,
    base: f32,
    beta_fast: f32,
    beta_slow: f32,
    dims: *mut f32,
) {
    let dim = |turns: f32| {
        let wavelength = trained as f32 / (turns * 2.0 * std::f32::consts::PI);
        n_dims as f32 * wavelength.ln() / (2.0 * base.ln())
    };
    // SAFETY: the plugin passes space for two numbers.
    unsafe {
        *dims = dim(beta_fast).floor().max(0.0);
        *dims.add(1) = dim(beta_slow).ceil().min((n_dims - 1) as f32);
    }
}

/// Returns whether some nodes of a graph with these operations can be fused. Only `outputs` are
/// used outside the fusion.
unsafe extern "C" fn can_fuse_subgraph(
    graph: *const CGraph,
    nodes: *const c_int,
    count: c_int,
    ops: *const u32,
    outputs: *const c_int,
    output_count: c_int,
) -> bool {
    let length = |count: c_int| usize::try_from(count).unwrap_or(0);
    // SAFETY: the plugin passes a graph of its host, and arrays of these lengths.
    unsafe {
        let graph = &*graph;
        let all = graph.nodes();
        let tensor = |index: c_int| usize::try_from(index).ok().and_then(|i| all.get(i));
        let ops = std::slice::from_raw_parts(ops, length(count));
        let indices = std::slice::from_raw_parts(nodes, length(count));
        let outputs = std::slice::from_raw_parts(outputs, length(output_count));
        let outputs: Vec<_> = outputs.iter().filter_map(|&index| tensor(index)).collect();
        let nodes: Vec<_> = indices.iter().filter_map(|&index| tensor(index)).collect();
        if nodes.len() < indices.len() {
            return false;
        }
        for (position, (&&node, &wanted)) in nodes.iter().zip(ops).enumerate() {
            let t = &*node;
            if t.op != wanted || t.flags & flag::COMPUTE == 0 {
                return false;
            }
            if outputs.contains(&&node) {
                continue;
            }
            let later = nodes[position + 1..]
                .iter()
                .flat_map(|&&later| (*later).src);
            let inside = later.filter(|&source| source == node).count();
            let everywhere = graph.uses(node).unwrap_or(0);
            if t.flags & flag::OUTPUT != 0 || everywhere != inside {
                return false;
            }
            // The viewed memory must be part of the fusion or constant.
            let mut source = t.view_src;
            for depth in 0.. {
                if source.is_null() {
                    break;
                }
                let is_inside = nodes.contains(&&source) || is_constant(&*source);
                if !is_inside || depth == MAX_VIEW_DEPTH {
                    return false;
                }
                source = (*source).view_src;
            }
        }
        true
    }
}

/// Returns a node by its index, or by its negative distance from the end.
unsafe extern "C" fn graph_node(graph: *mut CGraph, index: c_int) -> *mut Tensor {
    // SAFETY: the plugin passes a graph of its host.
    let nodes = unsafe { (*graph).nodes() };
    let index = if index < 0 {
        index + nodes.len() as c_int
    } else {
        index
    };
    let node = usize::try_from(index)
        .ok()
        .and_then(|index| nodes.get(index));
    *node.unwrap_or_else(|| fail("ggml_graph_node: there is no such node"))
}

/// Maximum length of a chain of views. ggml's own views refer to the tensor that owns the memory,
/// so a longer chain is broken, for example a cycle.
const MAX_VIEW_DEPTH: usize = 32;

/// Returns whether a tensor is a weight.
///
/// # Safety
/// Its buffer must be valid or null.
unsafe fn is_constant(t: &Tensor) -> bool {
    // SAFETY: the buffer was checked to be non-null, so it is valid. One field is read.
    !t.buffer.is_null()
        && unsafe { super::buffers::fields(t.buffer) }.usage == usage::WEIGHTS
        && t.flags & flag::PARAM == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::{DType, Layout};

    fn tensor(dtype: DType, ne: [i64; 4]) -> Tensor {
        let shape = ne.map(|extent| extent as usize);
        let mut tensor = Tensor::zeroed();
        tensor.dtype = dtype.id();
        tensor.ne = ne;
        tensor.nb = Layout::contiguous(dtype, shape).unwrap().strides();
        tensor
    }

    #[test]
    fn variants_are_those_of_the_plugins_release() {
        let numbers = crate::base::version().numbers();
        let mut t = tensor(DType::F32, [4, 1, 1, 1]);
        t.op_params[0] = 3;
        // SAFETY: a valid tensor.
        unsafe {
            t.op = numbers.number_of(op::UNARY).unwrap();
            assert_ne!(t.op, op::UNARY, "0.25 has another number");
            assert_eq!(unary_op(&t), 3);
            t.op = numbers.number_of(op::GLU).unwrap();
            assert_eq!(glu_op(&t), 3);
        }
    }

    #[test]
    fn sizes() {
        let plain = tensor(DType::F32, [5, 3, 2, 1]);
        let blocks = tensor(DType::Q4_0, [64, 3, 1, 1]);
        let empty = tensor(DType::F32, [5, 0, 2, 1]);
        // SAFETY: valid tensors.
        unsafe {
            assert_eq!(
                (nelements(&plain), nrows(&plain), nbytes(&plain)),
                (30, 6, 120)
            );
            assert_eq!((nelements(&blocks), nbytes(&blocks)), (192, 3 * 36));
            assert_eq!(element_size(&blocks), 18);
            assert_eq!((nbytes(&empty), is_empty(&empty)), (0, true));
            assert_eq!((n_dims(&plain), n_dims(&blocks)), (3, 2));
            assert_eq!(n_dims(&tensor(DType::F32, [1; 4])), 1);
            assert!(is_scalar(&tensor(DType::F32, [1; 4])) && !is_scalar(&plain));
            assert!(is_matrix(&tensor(DType::F32, [4, 3, 1, 1])) && !is_matrix(&plain));
        }
    }

    #[test]
    fn contiguity_and_permutation_are_detected() {
        let plain = tensor(DType::F32, [4, 3, 2, 2]);
        let mut columns = plain;
        columns.nb = [4, 32, 96, 192];
        let mut transposed = plain;
        transposed.ne.swap(0, 1);
        transposed.nb.swap(0, 1);
        let mut matrices = plain;
        matrices.nb = [4, 16, 64, 128];
        // SAFETY: valid tensors.
        unsafe {
            for (t, expected) in [
                (&plain, [true, true, true, true, true]),
                (&columns, [false, true, true, true, false]),
                (&transposed, [false, false, false, false, true]),
                (&matrices, [false, false, true, true, false]),
            ] {
                let found = [
                    is_contiguous(t),
                    is_contiguous_1(t),
                    is_contiguous_2(t),
                    is_contiguous_rows(t),
                    is_contiguously_allocated(t),
                ];
                assert_eq!(found, expected, "{t:?}");
            }
            assert!(is_contiguous_to_3(&plain) && !is_contiguous_to_3(&matrices));
            assert!(is_transposed(&transposed) && is_permuted(&transposed));
            assert!(!is_transposed(&columns) && !is_permuted(&columns));
            let mut channels = plain;
            channels.nb = [8, 32, 4, 96];
            assert!(is_contiguous_channels(&channels) && !is_contiguous_channels(&plain));
        }
    }

    #[test]
    fn repetition_and_index_unravelling() {
        let (small, large) = (
            tensor(DType::F32, [2, 1, 1, 1]),
            tensor(DType::F32, [4, 3, 2, 5]),
        );
        let empty = tensor(DType::F32, [0, 1, 1, 1]);
        // SAFETY: valid tensors; null is not written to.
        unsafe {
            assert!(can_repeat(&small, &large) && !can_repeat(&large, &small));
            assert!(can_repeat(&empty, &empty) && !can_repeat(&empty, &large));
            let mut found = [0; 4];
            for index in 0..nelements(&large) {
                let [a, b, c, d] = &mut found;
                unravel_index(&large, index, a, b, c, d);
                assert_eq!(
                    found[0] + 4 * (found[1] + 3 * (found[2] + 2 * found[3])),
                    index
                );
                assert!(
                    found
                        .iter()
                        .zip(large.ne)
                        .all(|(&i, n)| (0..n).contains(&i))
                );
            }
            unravel_index(
                &large,
                7,
                std::ptr::null_mut(),
                &mut found[1],
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            );
            assert_eq!(found[1], 1);
        }
    }

    #[test]
    fn cyclic_views_are_not_fused() {
        let mut view = tensor(DType::F32, [4, 1, 1, 1]);
        view.flags = flag::COMPUTE;
        let node = &raw mut view;
        let mut nodes = [node];
        let mut graph = CGraph::new(nodes.as_mut_ptr(), 1);
        let (first, none) = (0, op::NONE);
        // SAFETY: a single tensor that views itself. All arrays have one element.
        let fuses = unsafe {
            (*node).view_src = node;
            can_fuse_subgraph(&raw mut graph, &first, 1, &none, &first, 0)
        };
        assert!(!fuses);
    }

    #[test]
    fn yarn() {
        let mut dims = [0.0; 2];
        // SAFETY: room for two.
        unsafe { rope_yarn_corr_dims(128, 4096, 10000.0, 32.0, 1.0, dims.as_mut_ptr()) };
        // 128 ln(4096 / (64 π)) / (2 ln 10000) = 20.94, and with 1 instead of 32 turns 45.03.
        assert_eq!(dims, [20.0, 46.0]);
        // SAFETY: `dims` has room for the two numbers that are written.
        unsafe { rope_yarn_corr_dims(8, 64, 10000.0, 32.0, 1e-9, dims.as_mut_ptr()) };
        assert_eq!(dims, [0.0, 7.0], "within the dimensions that there are");
    }
}
