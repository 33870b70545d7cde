//! Rules for dividing operations: for each operation, the states that its sources must have and the
//! state of its result.
//!
//! A rule depends on states and shapes only. If no rule applies, every source becomes
//! [`Mirrored`](SplitState::Mirrored) and every member computes the whole node. That is always
//! correct, so every graph works.

mod attention;
mod elementwise;
mod product;
mod rows;
mod shape;
mod training;

use crate::state::{AxisRuns, SplitState};
use crate::window::ViewWindow;
use samite_core::{DType, Layout, Op, OpKind};

/// A source of a node, and its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitOperand<'a> {
    pub layout: &'a Layout,
    pub state: &'a SplitState,
}

/// Input of a rule: a node with its sources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case<'a> {
    pub op: &'a Op,
    pub sources: &'a [Option<SplitOperand<'a>>],
    pub result: &'a Layout,
}

/// Decision for one node.
#[derive(Clone, Debug)]
pub(crate) struct Decision {
    /// State that each source must have.
    pub want: Vec<SplitState>,
    /// State of the result.
    pub result: SplitState,
    pub mode: Mode,
}

/// Members that compute.
#[derive(Clone, Debug)]
pub(crate) enum Mode {
    /// Each member, on its own data.
    Each,
    /// The first member. For the others, the result is their data of this source.
    First {
        /// Index of the source.
        pass: usize,
    },
    /// Each member takes a view of its part.
    View(Box<ViewWindow>),
}

impl Decision {
    /// Returns the decision that each member computes on its own data.
    fn each(want: Vec<SplitState>, result: SplitState) -> Option<Self> {
        Some(Decision {
            want,
            result,
            mode: Mode::Each,
        })
    }
}

impl<'a> Case<'a> {
    /// Returns source number `index`, if it exists.
    fn source(&self, index: usize) -> Option<SplitOperand<'a>> {
        self.sources.get(index).copied().flatten()
    }

    fn extent(&self, index: usize, axis: usize) -> Option<usize> {
        Some(self.source(index)?.layout.shape()[axis])
    }

    fn is_partial(&self, index: usize) -> bool {
        matches!(self.source(index), Some(source) if *source.state == SplitState::Partial)
    }

    fn is_mirrored(&self, index: usize) -> bool {
        self.source(index)
            .is_none_or(|source| *source.state == SplitState::Mirrored)
    }

    /// Returns the axis and runs of a split source.
    fn split(&self, index: usize) -> Option<(usize, &'a AxisRuns)> {
        self.source(index)?.state.as_split()
    }

    /// Returns the runs of a source that is split along `axis`.
    fn split_on(&self, index: usize, axis: usize) -> Option<&'a AxisRuns> {
        self.split(index)
            .filter(|split| split.0 == axis)
            .map(|split| split.1)
    }

    /// Returns [`SplitState::Mirrored`] for every source.
    fn mirrored(&self) -> Vec<SplitState> {
        vec![SplitState::Mirrored; self.sources.len()]
    }

    /// Returns the given states for some sources, and `Mirrored` for the others.
    fn want<const N: usize>(&self, said: [(usize, SplitState); N]) -> Vec<SplitState> {
        let mut want = self.mirrored();
        for (index, state) in said {
            if let Some(place) = want.get_mut(index) {
                *place = state;
            }
        }
        want
    }

    /// Decides for a partial source `index` and mirrored others: the result is partial, because the
    /// operation is linear in that source.
    fn linear_in(&self, index: usize) -> Option<Decision> {
        if !self.is_partial(index) || self.result.dtype() != DType::F32 {
            return None;
        }
        Decision::each(
            self.want([(index, SplitState::Partial)]),
            SplitState::Partial,
        )
    }

    /// Returns the decision that all members compute the whole node.
    pub fn gathered(&self) -> Decision {
        Decision {
            want: self.mirrored(),
            result: SplitState::Mirrored,
            mode: Mode::Each,
        }
    }
}

/// Rule for one kind of operation. `None` means that all sources are mirrored.
type ShardingRule = fn(&Case<'_>) -> Option<Decision>;

/// Returns the rule of each kind. A kind without one would be computed as a whole; a test checks
/// that every kind has a rule.
fn rule(kind: OpKind) -> Option<ShardingRule> {
    Some(match kind {
        OpKind::Leaf | OpKind::Arange => |_| None,

        OpKind::Dup
        | OpKind::Cont
        | OpKind::Cast
        | OpKind::Scale
        | OpKind::Sqr
        | OpKind::Sqrt
        | OpKind::Log
        | OpKind::Clamp
        | OpKind::Unary
        | OpKind::Fill => elementwise::each,
        OpKind::Add | OpKind::Sub | OpKind::Mul | OpKind::Div => elementwise::binary,
        OpKind::AddId => elementwise::add_id,
        OpKind::Glu => elementwise::glu,
        OpKind::DiagMaskInf | OpKind::DiagMaskZero => elementwise::diag_mask,

        OpKind::Norm | OpKind::RmsNorm | OpKind::L2Norm | OpKind::ArgSort | OpKind::TopK => {
            rows::whole
        }
        OpKind::CumSum => rows::whole_or_linear,
        OpKind::SumRows => rows::sum_rows,
        OpKind::Mean => rows::whole_or_linear,
        OpKind::Sum => rows::sum,
        OpKind::ArgMax => rows::argmax,
        OpKind::GetRows => rows::get_rows,
        OpKind::SetRows => rows::set_rows,

        OpKind::Repeat => shape::repeat,
        OpKind::Concat => shape::concat,
        OpKind::Pad => shape::pad,
        OpKind::Reshape => shape::reshape,
        OpKind::View => shape::view,
        OpKind::Permute | OpKind::Transpose => shape::permute,
        OpKind::Cpy => shape::cpy,

        OpKind::MulMat => product::mul_mat,
        OpKind::MulMatId => product::mul_mat_id,
        OpKind::OutProd => product::out_prod,

        OpKind::SoftMax => attention::soft_max,
        OpKind::Rope | OpKind::RopeBack => attention::rope,
        OpKind::FlashAttn => attention::flash_attn,
        // The result holds the gradients of three tensors in sequence.
        OpKind::FlashAttnBack => |_| None,

        OpKind::SsmConv => rows::conv,
        // The final rows of the result hold parts of every head's matrix.
        OpKind::GatedDeltaNet | OpKind::SsmScan => |_| None,

        OpKind::RepeatBack => training::repeat_back,
        OpKind::SiluBack => training::silu_back,
        OpKind::RmsNormBack | OpKind::SoftMaxBack => training::back_of_rows,
        OpKind::GetRowsBack => training::get_rows_back,
        // Both divide by the number of rows, which members do not know.
        OpKind::CrossEntropyLoss | OpKind::CrossEntropyLossBack => |_| None,
        OpKind::OptStepAdamW | OpKind::OptStepSgd => training::step,
        // Convolutions and the like do not occur in models that are divided.
        kind if samite_core::formula::is_formula(kind) => |_| None,
        _ => return None,
    })
}

/// Returns the decision for a node.
pub(crate) fn decide(case: &Case<'_>) -> Decision {
    rule(case.op.kind())
        .and_then(|rule| rule(case))
        .unwrap_or_else(|| case.gathered())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_a_rule() {
        for kind in OpKind::ALL {
            assert!(rule(kind).is_some(), "{kind:?}");
        }
    }
}
