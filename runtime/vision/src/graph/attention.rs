//! Attention of the layers.

use super::VitBuilder;
use crate::projector::Projector;
use samite_core::{Error, Result, Rope, RopeMode, TensorId};

/// Base of the frequencies of rotations.
const FREQ_BASE: f32 = 10_000.0;

/// Base of the frequencies of Gemma 4's rotations.
const GEMMA4_FREQ_BASE: f32 = 100.0;

/// Epsilon of the norms of queries and keys, whatever that of other norms is.
const QK_NORM_EPS: f32 = 1e-6;

impl VitBuilder<'_> {
    /// Applies the norm of queries or keys called `name`, if there is one: over each head, or over
    /// all heads together.
    fn qk_norm(&mut self, x: TensorId, name: &str) -> Result<TensorId> {
        let Some(scale) = self.weights.get(&format!("{name}.weight")) else {
            return Ok(x);
        };
        let (width, head) = (self.spec.n_embd, self.spec.n_embd / self.spec.n_head);
        let is_per_head = scale.layout().shape()[0] == head && head < width;
        let row = if is_per_head { head } else { width };
        let rows = self
            .graph
            .reshape(x, [row, width / row * self.rows, 1, 1])?;
        let normal = self.graph.rms_norm(rows, QK_NORM_EPS)?;
        let normal = self.scaled(normal, name)?;
        self.graph.reshape(normal, [width, self.rows, 1, 1])
    }

    pub fn attention(
        &mut self,
        x: TensorId,
        layer: usize,
        positions: Option<TensorId>,
    ) -> Result<TensorId> {
        let prefix = format!("v.blk.{layer}");
        let width = self.spec.n_embd;
        let [q, k, v] = if self
            .weights
            .get(&format!("{prefix}.attn_qkv.weight"))
            .is_some()
        {
            let all = self.linear(x, &format!("{prefix}.attn_qkv"))?;
            self.check_width(all, 3 * width, &format!("{prefix}.attn_qkv.weight"))?;
            let row = self.graph.tensor(all).layout.strides()[1];
            let mut part = |index: usize| {
                let shape = [width, self.rows, 1, 1];
                let bytes = index * width * size_of::<f32>();
                let part = self.graph.view(all, shape, [row; 3], bytes)?;
                self.graph.cont(part)
            };
            [part(0)?, part(1)?, part(2)?]
        } else {
            [
                self.linear(x, &format!("{prefix}.attn_q"))?,
                self.linear(x, &format!("{prefix}.attn_k"))?,
                self.linear(x, &format!("{prefix}.attn_v"))?,
            ]
        };
        let q = self.qk_norm(q, &format!("{prefix}.attn_q_norm"))?;
        let k = self.qk_norm(k, &format!("{prefix}.attn_k_norm"))?;
        let heads = self.spec.n_head;
        let head = width / heads;
        let shape = [head, heads, self.rows, 1];
        let mut parts = [q, k, v];
        for (index, part) in parts.iter_mut().enumerate() {
            *part = self.graph.reshape(*part, shape)?;
            if index == 2 && self.spec.projector == Projector::Gemma4V {
                *part = self.graph.rms_norm(*part, QK_NORM_EPS)?;
            }
            if let Some(positions) = positions.filter(|_| index < 2) {
                *part = self.rotated(*part, positions)?;
            }
        }
        let is_full = |every: usize| (layer + 1).is_multiple_of(every);
        let windows = self.spec.windows;
        let windows = windows.filter(|windows| !is_full(windows.full_every));
        let attended = match windows {
            None => self.attend(parts, 0, self.rows, 1)?,
            Some(_) => {
                let mut all = None;
                for run in &self.order.windows {
                    let one = self.attend(parts, run.first, run.patches, run.windows)?;
                    all = Some(match all {
                        Some(all) => self.graph.concat(all, one, 1)?,
                        None => one,
                    });
                }
                all.ok_or_else(|| Error::invalid("an image has no windows"))?
            }
        };
        self.linear(attended, &format!("{prefix}.attn_out"))
    }

    /// Rotates queries or keys by the rows and columns of their patches.
    fn rotated(&mut self, x: TensorId, positions: TensorId) -> Result<TensorId> {
        let head = self.graph.tensor(x).layout.shape()[0];
        if self.spec.projector.reads_frames() {
            let sections = [head as u32 / 4; 4];
            let rope = Rope::new(head / 2, RopeMode::Vision { sections }, FREQ_BASE);
            return self.graph.rope(x, positions, None, rope);
        }
        let n = self.rows;
        let bytes = n * size_of::<i32>();
        let rows = self.graph.view(positions, [n, 1, 1, 1], [bytes; 3], 0)?;
        let columns = self
            .graph
            .view(positions, [n, 1, 1, 1], [bytes; 3], bytes)?;
        let (axes, rope, freq_scale) = if self.spec.projector == Projector::Gemma4V {
            let rope = Rope::new(head / 2, RopeMode::Neox, GEMMA4_FREQ_BASE);
            ([columns, rows], rope, 1.0)
        } else {
            // Rows rotate by every second frequency, from the first one, and columns by the others.
            let rope = Rope::new(head / 2, RopeMode::Normal, FREQ_BASE);
            let freq_scale = FREQ_BASE.powf(-2.0 / head as f32);
            ([rows, columns], rope, freq_scale)
        };
        // The axes turn one half of a head each.
        let second = Rope {
            offset: head / 2,
            freq_scale,
            ..rope
        };
        let x = self.graph.rope(x, axes[0], None, rope)?;
        self.graph.rope(x, axes[1], None, second)
    }

    /// Returns the attention of `windows` windows of `patches` patches each, from patch `first` on:
    /// `[width, patches · windows]`.
    fn attend(
        &mut self,
        parts: [TensorId; 3],
        first: usize,
        patches: usize,
        windows: usize,
    ) -> Result<TensorId> {
        let [head, heads, ..] = self.graph.tensor(parts[0]).layout.shape();
        let mut viewed = parts;
        for part in &mut viewed {
            let strides = self.graph.tensor(*part).layout.strides();
            let patch = strides[2];
            let shape = [head, patches, heads, windows];
            let strides = [patch, strides[1], patch * patches];
            *part = self.graph.view(*part, shape, strides, first * patch)?;
        }
        let scale = match self.spec.projector {
            Projector::Gemma4V => 1.0,
            _ => 1.0 / (head as f32).sqrt(),
        };
        let attended = self.graph.flash_attn(viewed, None, None, scale)?;
        self.graph
            .reshape(attended, [head * heads, patches * windows, 1, 1])
    }
}
