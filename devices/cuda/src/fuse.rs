//! Launches of fused nodes. The crate `samite-fusion` decides which nodes are fused.

use crate::buffer::CudaBuffer;
use crate::ops::{self, attention, elementwise, packed, rope, tensor_cores};
use crate::plan::{
    Card, LaunchOperand, LaunchOperands, MAX_GROUPS, OperandSource, PlannedLaunch, Unsupported,
};
use samite_core::{Node, Op, Rope, TensorRef};
use samite_fusion::{
    BeforeAttention, ColumnForm, ColumnReader, Fused, FusedRotation, Kernels, OperandFacts,
    ScaledNorm,
};
use samite_quant::PackedBuffer;

/// Returns one launch, if the device has it.
fn one(launch: Result<PlannedLaunch, Unsupported>) -> Fused<PlannedLaunch> {
    Some(vec![launch.ok()?])
}

impl Kernels for Card {
    type Launch = PlannedLaunch;

    fn is_packed(place: &TensorRef) -> bool {
        place.buffer.as_any().is::<PackedBuffer<CudaBuffer>>()
    }

    fn uses_scratch(launch: &PlannedLaunch) -> bool {
        let mut operands = launch.operands.iter();
        operands.any(|operand| operand.which == OperandSource::Workspace)
    }

    fn launches_of(
        &self,
        node: Node<'_>,
        facts: OperandFacts,
    ) -> Result<Vec<PlannedLaunch>, Unsupported> {
        ops::launches_of(node, self, facts)
    }

    fn column_form(&self, node: Node<'_>, packed: bool) -> Option<ColumnForm> {
        let weights = node.source_layout(0)?.dtype();
        if tensor_cores::can_multiply(node, self) {
            return match node.op() {
                Op::MulMat { .. } if tensor_cores::are_wide(weights) => Some(ColumnForm::BF16),
                Op::MulMat { .. } => Some(ColumnForm::F16),
                _ => None,
            };
        }
        (packed && packed::reads_int8(node)).then_some(ColumnForm::Int8)
    }

    fn convert(&self, product: Node<'_>, packed: bool) -> Fused<PlannedLaunch> {
        let b = product.operand(1).ok()?;
        if self.column_form(product, packed)? == ColumnForm::Int8 {
            return one(packed::quantize(b));
        }
        let weights = product.source_layout(0)?.dtype();
        one(tensor_cores::Halves::new(weights, &b, 0).convert(b))
    }

    fn may_join(&self, [a, b]: [Node<'_>; 2], form: ColumnForm) -> bool {
        let weights = |node: Node<'_>| Some(node.source_layout(0)?.dtype());
        let mut nodes = [a, b].into_iter();
        form == ColumnForm::Int8
            && weights(a) == weights(b)
            && nodes.all(|node| matches!(node.op(), Op::MulMat { .. }))
    }

    fn max_products(&self) -> usize {
        packed::MAX_PRODUCTS
    }

    fn products(&self, nodes: &[Node<'_>], packed: bool) -> Fused<PlannedLaunch> {
        let &first = nodes.first()?;
        if self.column_form(first, packed)? == ColumnForm::Int8 {
            return one(packed::products(nodes));
        }
        let weights = first.operand(0).ok()?;
        let (weights, kernels) = if packed {
            (weights.packed(), tensor_cores::PACKED)
        } else {
            (weights, tensor_cores::PLAIN)
        };
        tensor_cores::product(first, weights, kernels, self).ok()
    }

    fn scaled_norm(
        &self,
        norm: &ScaledNorm<'_>,
        reader: Option<ColumnReader<'_>>,
    ) -> Fused<PlannedLaunch> {
        let source = |node: Node<'_>, index: usize| Some(node.operand(index).ok()?.in_node(node));
        let y = norm.scaled.result().in_node(norm.scaled);
        let mut operands = vec![
            y,
            source(norm.norm, 0)?,
            source(norm.scaled, 1)?,
            LaunchOperand::missing(),
            LaunchOperand::missing(),
        ];
        if let Some(sum) = norm.sum {
            operands[1] = source(sum, 0)?;
            operands[3] = source(sum, 1)?;
            operands[4] = sum.result().in_node(sum);
        }
        ops::floats(&operands).ok()?;
        let mut scales = 0;
        operands.push(match reader.map(|reader| reader.form) {
            None => LaunchOperand::missing(),
            Some(ColumnForm::Int8) => {
                let columns = packed::Int8Columns::new(&y);
                scales = columns.codes;
                columns.scratch
            }
            Some(_) => return None,
        });
        let groups = y.rows().min(MAX_GROUPS);
        // A thread has four elements at a time.
        let threads = y.shape[0].div_ceil(4).next_multiple_of(32).clamp(64, 1024);
        let launch = PlannedLaunch::new("norm", "scaled_norm", operands, groups).ok()?;
        let launch = launch.ints([scales]).floats([norm.eps]);
        Some(vec![launch.threads(threads as u32)])
    }

    fn gated(&self, node: Node<'_>, reader: ColumnReader<'_>) -> Fused<PlannedLaunch> {
        match reader.form {
            ColumnForm::Int8 => one(elementwise::gated_int8(node)),
            _ => None,
        }
    }

    fn attention(
        &self,
        node: Node<'_>,
        _facts: OperandFacts,
        reader: ColumnReader<'_>,
    ) -> Fused<PlannedLaunch> {
        match reader.form {
            ColumnForm::Int8 => {
                let b = reader.product.operand(1).ok()?;
                attention::quantized(node, &b, self).ok()
            }
            _ => None,
        }
    }

    fn rotation(&self, rotation: &FusedRotation<'_>, rope: Rope) -> Fused<PlannedLaunch> {
        one(rope::fused(rotation, None, rope))
    }

    fn before_attention(&self, nodes: &BeforeAttention<'_>) -> Fused<PlannedLaunch> {
        one(rope::fused(&nodes.query, Some(nodes), nodes.rope))
    }
}
