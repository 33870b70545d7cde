//! The inputs of graphs.

use crate::arch::spec::{Span, Temperature, Yarn};
use samite_core::TensorId;

/// What an input holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Input {
    /// Token ids: i32 `[tokens]`.
    Tokens,
    /// Embeddings in the place of tokens: f32 `[width, tokens]`.
    Embeddings,
    /// Positions: i32 `[tokens]`.
    Positions,
    /// The cell that each token's keys and values are written to: i64 `[tokens]`.
    Cells {
        /// Of the cells for layers that look through a window.
        windowed: bool,
    },
    /// Minus infinity where a token does not see a cell: f16 `[kv, tokens]`. Elsewhere 0, or with `distances`, how far the cell's position is
    /// from the token's, negative. Where tokens look at later ones, too, there are tokens in the place of cells: f16 `[tokens, tokens]`.
    Mask {
        /// Whom tokens look at.
        span: Span,
        /// They look at later ones, too.
        sees_later: bool,
        /// Whether there are distances.
        distances: bool,
        /// Whether the cells are those for layers that look through a window.
        windowed: bool,
    },
    /// What rotary frequencies are divided by: f32 `[pairs]`.
    Divisors(Yarn),
    /// What queries are scaled with: f32 `[1, 1, tokens]`.
    Temperature(Temperature),
    /// The row of the state that each sequence begins with: i32 `[sequences]`.
    StateRead,
    /// The row that its state is written to: i64 `[sequences]`.
    StateWrite,
    /// Which tokens' logits or embeddings are wanted: i32 `[outputs]`. Absent if all are, or none.
    Outputs,
    /// The share in which an adapter counts for each token, times a factor: f32 `[1, tokens]`.
    Shares {
        /// The adapter's place among those that sequences have for themselves.
        adapter: usize,
        /// What shares are multiplied with.
        factor: f32,
    },
    /// The share of each token in the mean over each sequence: f32 `[tokens, sequences]`.
    Means,
}

impl Input {
    /// The name in graphs.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Input::Tokens => "inp_tokens",
            Input::Embeddings => "inp_embd",
            Input::Positions => "inp_pos",
            Input::Cells { windowed: false } => "inp_cells",
            Input::Cells { windowed: true } => "inp_cells_swa",
            Input::Mask {
                span: Span::Full, ..
            } => "inp_mask",
            Input::Mask { .. } => "inp_mask_swa",
            Input::Divisors(_) => "inp_rope_divisors",
            Input::Temperature(_) => "inp_attn_scale",
            Input::StateRead => "inp_state_read",
            Input::StateWrite => "inp_state_write",
            Input::Outputs => "inp_out_ids",
            Input::Shares { .. } => "inp_adapter_share",
            Input::Means => "inp_mean",
        }
    }
}

/// The inputs of a graph, and its results.
#[derive(Clone, Debug, Default)]
pub struct GraphInputs {
    /// The inputs, each once.
    pub list: Vec<(Input, TensorId)>,
    /// Result: logits, f32 `[vocabulary, outputs]`, or embeddings, f32 `[width, outputs or means]`.
    pub result: Option<TensorId>,
    /// The embeddings of the same tokens, beside logits: f32 `[width, outputs]`.
    pub embeddings: Option<TensorId>,
    /// The likeliest tokens of each row of logits, i32 `[number, rows]`, and their logits, f32 `[1, number, rows]`; i32 `[rows]` if there is one of each.
    pub likeliest: Option<(TensorId, Option<TensorId>)>,
}

impl GraphInputs {
    /// The tensor of an input, if the graph has it.
    pub fn get(&self, input: &Input) -> Option<TensorId> {
        let mut inputs = self.list.iter();
        inputs.find_map(|(known, id)| (known == input).then_some(*id))
    }
}
