//! Launches of fused nodes. The crate `samite-fusion` decides which nodes are fused.

use crate::buffer::WgpuBuffer;
use crate::ops::{self, attention, elementwise, matmul, reductions, rope};
use crate::plan::{Capacity, Launch, OperandSource, Operands, UnsupportedLaunch};
use samite_core::{Layout, Node, Op, Rope, TensorRef};
use samite_fusion::{
    BeforeAttention, ColumnForm, ColumnReader, Fused, FusedRotation, Kernels, OperandFacts,
    ScaledNorm,
};
use samite_quant::PackedBuffer;

impl Capacity {
    /// Returns launches that the adapter allows, otherwise `None`.
    fn allowed(&self, launches: Result<Vec<Launch>, UnsupportedLaunch>) -> Fused<Launch> {
        launches.ok().filter(|launches| {
            let mut launches = launches.iter();
            launches.all(|launch| launch.fits(self) && launch.has_bindings(self))
        })
    }

    /// Does the same as [`allowed`](Capacity::allowed) for one launch.
    fn one(&self, launch: Result<Launch, UnsupportedLaunch>) -> Fused<Launch> {
        self.allowed(launch.map(|launch| vec![launch]))
    }
}

impl Kernels for Capacity {
    type Launch = Launch;

    fn is_packed(place: &TensorRef) -> bool {
        place.buffer.as_any().is::<PackedBuffer<WgpuBuffer>>()
    }

    fn uses_scratch(launch: &Launch) -> bool {
        let mut operands = launch.operands.iter();
        operands.any(|operand| operand.which == OperandSource::Workspace)
    }

    fn launches_of(
        &self,
        node: Node<'_>,
        facts: OperandFacts,
    ) -> Result<Vec<Launch>, UnsupportedLaunch> {
        ops::launches_of(node, self, facts)
    }

    fn column_form(&self, node: Node<'_>, packed: bool) -> Option<ColumnForm> {
        let (a, b) = (node.source_layout(0)?, node.source_layout(1)?);
        let is_one = |layout: &Layout| layout.shape()[2..] == [1, 1];
        let fits = packed
            && matches!(node.op(), Op::MulMat { .. })
            && b.shape()[1] <= matmul::MAX_COLUMNS
            && [a, b].into_iter().all(is_one)
            && !b.dtype().is_quantized()
            && !b.dtype().is_integer();
        fits.then_some(ColumnForm::Int8)
    }

    fn convert(&self, product: Node<'_>, _packed: bool) -> Fused<Launch> {
        self.one(matmul::quantize(product))
    }

    fn may_join(&self, _products: [Node<'_>; 2], _form: ColumnForm) -> bool {
        true
    }

    fn max_products(&self) -> usize {
        matmul::MAX_MATRICES
    }

    fn products(&self, nodes: &[Node<'_>], _packed: bool) -> Fused<Launch> {
        self.one(matmul::packed_products(nodes, self))
    }

    fn scaled_norm(
        &self,
        norm: &ScaledNorm<'_>,
        reader: Option<ColumnReader<'_>>,
    ) -> Fused<Launch> {
        let mut rows = vec![norm.norm.source(0)?, norm.scaled, norm.scaled.source(1)?];
        if let Some(sum) = norm.sum {
            rows.extend([sum.source(0)?, sum.source(1)?]);
        }
        let fits = norm.norm.layout().shape()[0].is_multiple_of(4)
            && rows.iter().all(|node| node.layout().is_contiguous());
        if !fits {
            return None;
        }
        self.one(reductions::scaled_norm(norm, reader.is_some(), self))
    }

    fn gated(&self, node: Node<'_>, _reader: ColumnReader<'_>) -> Fused<Launch> {
        let &Op::Glu { kind, swapped } = node.op() else {
            return None;
        };
        let sources = [node.source(0)?, node.source(1)?];
        if !sources.iter().all(|source| source.layout().is_contiguous()) {
            return None;
        }
        self.one(elementwise::gated_columns(node, kind, swapped))
    }

    fn attention(
        &self,
        node: Node<'_>,
        facts: OperandFacts,
        reader: ColumnReader<'_>,
    ) -> Fused<Launch> {
        let &Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            ..
        } = node.op()
        else {
            return None;
        };
        if !attention::can_be_quantized(node.layout().shape()[0]) {
            return None;
        }
        let columns = reader.product.source_operand(1).ok()?;
        let numbers = [scale, max_bias, softcap];
        let launches = attention::flash(node, numbers, self, facts.aligned, Some(&columns));
        self.allowed(launches)
    }

    fn rotation(&self, rotation: &FusedRotation<'_>, rope: Rope) -> Fused<Launch> {
        self.one(rope::norm_rope(*rotation, rope, self))
    }

    fn before_attention(&self, nodes: &BeforeAttention<'_>) -> Fused<Launch> {
        self.one(rope::rope_store(nodes, self))
    }
}
