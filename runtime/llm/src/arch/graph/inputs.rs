//! The inputs of graphs.

use crate::arch::spec::{Span, Temperature, Yarn};
use samite_core::TensorId;

/// Contents of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Input {
    /// Token ids: i32 `[tokens]`.
    Tokens,
    /// Embeddings instead of tokens: f32 `[input width, tokens]`.
    Embeddings,
    /// Positions for a learned table: i32 `[tokens]`.
    Positions,
    /// Positions for rotations: i32 `[tokens]`.
    RopePositions,
    /// Positions for rotations with several axes: i32 `[4 · tokens]`, one axis after the other:
    /// time, row, column, and time again.
    Axes,
    /// Cell that each token's keys and values are written to: i64 `[tokens]`.
    Cells {
        /// True for the cells of layers with a window.
        windowed: bool,
    },
    /// Attention mask: minus infinity if a token does not see a cell, f16 `[kv, tokens]`. Otherwise
    /// 0, or the negative distance from the token's position to the cell's if `distances` is set.
    /// With bidirectional attention, tokens replace the cells: f16 `[tokens, tokens]`.
    Mask {
        /// Tokens that a token attends to.
        span: Span,
        /// True if attention is bidirectional.
        is_bidirectional: bool,
        /// True if tokens of an image attend to earlier ones only.
        are_images_causal: bool,
        /// True if the mask contains distances.
        distances: bool,
        /// True if the cells are those of layers with a window.
        windowed: bool,
    },
    /// Divisors of rotary frequencies: f32 `[pairs]`.
    RopeFactors(Yarn),
    /// Temperature of queries: f32 `[1, 1, tokens]`.
    Temperature(Temperature),
    /// Row of each sequence's initial state: i32 `[sequences]`.
    StateRead,
    /// Row that each sequence's state is written to: i64 `[sequences]`.
    StateWrite,
    /// Tokens whose logits or embeddings are requested: i32 `[outputs]`. Absent if all tokens are,
    /// or none.
    Outputs,
    /// Scale of an adapter for each token, times `factor`: f32 `[1, tokens]`.
    Shares {
        /// Index of the adapter among those that belong to sequences.
        adapter: usize,
        /// Factor of the scales.
        factor: f32,
    },
    /// Weight of each token in the mean of each sequence: f32 `[tokens, sequences]`.
    Means,
}

impl Input {
    /// Returns the name in graphs: llama.cpp's where it has one, because some of ggml's plugins
    /// know tensors by name.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Input::Tokens => "inp_tokens",
            Input::Embeddings => "inp_embd",
            Input::Positions => "inp_pos",
            Input::RopePositions | Input::Axes => "inp_pos",
            Input::Cells { windowed: false } => "attn_inp_k_idxs",
            Input::Cells { windowed: true } => "attn_inp_k_idxs_swa",
            Input::Mask {
                span: Span::Full, ..
            } => "self_kq_mask",
            Input::Mask { .. } => "self_kq_mask_swa",
            Input::RopeFactors(_) => "inp_rope_factors",
            Input::Temperature(_) => "inp_attn_scale",
            Input::StateRead => "rs_s_copy",
            Input::StateWrite => "inp_state_write",
            Input::Outputs => "inp_out_ids",
            Input::Shares { .. } => "inp_adapter_share",
            Input::Means => "inp_mean",
        }
    }
}

/// Inputs and results of a graph.
#[derive(Clone, Debug, Default)]
pub struct GraphInputs {
    /// Inputs, each once.
    pub list: Vec<(Input, TensorId)>,
    /// Result: logits, f32 `[vocabulary, outputs]`, or embeddings, f32 `[width, outputs or means]`.
    pub result: Option<TensorId>,
    /// Embeddings of the same tokens, in addition to logits: f32 `[width, outputs]`.
    pub embeddings: Option<TensorId>,
    /// Top-k tokens of each row of logits, i32 `[number, rows]`, and their logits, f32 `[1, number,
    /// rows]`. If k is 1, only the tokens: i32 `[rows]`.
    pub device_top_k: Option<(TensorId, Option<TensorId>)>,
}

impl GraphInputs {
    /// Returns the tensor of an input, if the graph has it.
    pub fn get(&self, input: &Input) -> Option<TensorId> {
        let mut inputs = self.list.iter();
        inputs.find_map(|(known, id)| (known == input).then_some(*id))
    }
}
