//! The rules of differentiation: from the gradient of a node's result to that of one of its
//! operands.

use crate::error::{Error, Result};
use samite_core::{DIMS, DType, Glu, Graph, Op, Shape, TensorId, Unary};
use std::f32::consts::PI;

/// Returns whether the result of `op` depends on the values of its operand `number`, as far as it
/// is differentiable.
pub(crate) fn depends_on(op: &Op, number: usize) -> bool {
    match op {
        // The destination is overwritten completely.
        Op::Cpy => number == 0,
        Op::Fill { .. } | Op::ArgMax | Op::ArgSort { .. } | Op::TopK { .. } => false,
        // Constant between the points where they jump.
        Op::Unary(
            Unary::Sgn | Unary::Step | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc,
        ) => false,
        _ => true,
    }
}

/// A node with the gradient of its result.
struct Rule<'g> {
    graph: &'g mut Graph,
    /// Node.
    y: TensorId,
    /// Gradient of its result.
    g: TensorId,
}

/// Appends the gradient of operand `number` of node `y`, where `g` is the gradient of its result.
/// The result must [depend on](depends_on) that operand.
pub(crate) fn apply(
    graph: &mut Graph,
    y: TensorId,
    g: TensorId,
    number: usize,
) -> Result<TensorId> {
    let op = graph.tensor(y).op;
    let mut rule = Rule { graph, y, g };
    match (op, number) {
        (Op::Dup | Op::Cont, 0) => Ok(g),
        (Op::Cast { .. }, 0) => Ok(g),
        (Op::Add, 0) | (Op::Sub, 0) => Ok(g),
        (Op::Add, 1) => rule.summed(g, 1),
        (Op::Sub, 1) => {
            let negative = rule.graph.unary(g, Unary::Neg)?;
            rule.summed(negative, 1)
        }
        (Op::Mul, _) => rule.mul(number),
        (Op::Div, _) => rule.div(number),
        (Op::Scale { scale, .. }, 0) => rule.scaled(g, scale),
        (Op::Sqr, 0) => {
            let x = rule.source(0)?;
            let product = rule.graph.mul(g, x)?;
            rule.scaled(product, 2.0)
        }
        (Op::Sqrt, 0) => {
            let quotient = rule.graph.div(g, y)?;
            rule.scaled(quotient, 0.5)
        }
        (Op::Log, 0) => {
            let x = rule.source(0)?;
            Ok(rule.graph.div(g, x)?)
        }
        (Op::Sum | Op::SumRows | Op::RepeatBack { .. }, 0) => {
            let shape = rule.shape(0)?;
            Ok(rule.graph.repeat(g, shape)?)
        }
        (Op::Mean, 0) => {
            let shape = rule.shape(0)?;
            let each = rule.graph.scale(g, 1.0 / shape[0] as f32)?;
            Ok(rule.graph.repeat(each, shape)?)
        }
        (Op::CumSum, 0) => {
            // All later elements depend on an element: the total minus the earlier ones.
            let total = rule.graph.sum_rows(g)?;
            let running = rule.graph.cumsum(g)?;
            let rest = rule.graph.sub(g, running)?;
            Ok(rule.graph.add(rest, total)?)
        }
        (Op::Repeat { .. }, 0) => rule.summed(g, 0),
        (Op::Concat { dim }, _) => rule.part_of_concat(dim, number),
        (Op::Pad { before, .. }, 0) => rule.window(before, 0),
        (Op::Norm { eps }, 0) => rule.norm(eps),
        (Op::RmsNorm { eps }, 0) => {
            let x = rule.source(0)?;
            Ok(rule.graph.rms_norm_back(g, x, eps)?)
        }
        (Op::L2Norm { eps }, 0) => rule.l2_norm(eps),
        (Op::MulMat { .. }, _) => rule.mul_mat(number),
        (Op::OutProd, _) => rule.out_prod(number),
        (Op::GetRows, 0) => {
            let (shape, numbers) = (rule.shape(0)?, rule.source(1)?);
            if shape[2] != 1 || shape[3] != 1 {
                return rule.unsupported("of more than a matrix");
            }
            let g = rule.contiguous(g)?;
            Ok(rule.graph.get_rows_back(g, numbers, shape[1])?)
        }
        (Op::SetRows, 0) => {
            let numbers = rule.source(1)?;
            if rule.graph.tensor(numbers).layout.dtype() != DType::I32 {
                return rule.unsupported("with row numbers other than i32");
            }
            let g = rule.contiguous(g)?;
            Ok(rule.graph.get_rows(g, numbers)?)
        }
        (Op::SetRows, 2) => {
            // Overwritten rows have no influence.
            let (rows, numbers) = (rule.source(0)?, rule.source(1)?);
            let zeros = rule.graph.fill(rows, 0.0)?;
            let copy = rule.graph.dup(g)?;
            Ok(rule.graph.set_rows(zeros, numbers, copy)?)
        }
        (Op::Cpy, 0) | (Op::Reshape { .. }, 0) => {
            let shape = rule.shape(0)?;
            rule.reshaped(g, shape)
        }
        (
            Op::View {
                shape,
                strides,
                offset,
            },
            0,
        ) => rule.view(shape, strides, offset),
        (Op::Permute { axes }, 0) => {
            let mut back = [0; DIMS];
            for (from, to) in axes.into_iter().enumerate() {
                back[to] = from;
            }
            Ok(rule.graph.permute(g, back)?)
        }
        (Op::Transpose, 0) => Ok(rule.graph.transpose(g)?),
        (Op::DiagMaskInf { past } | Op::DiagMaskZero { past }, 0) => {
            Ok(rule.graph.diag_mask_zero(g, past)?)
        }
        (Op::SoftMax { scale, .. }, 0) => {
            if rule.graph.tensor(y).sources.len() > 2 {
                return rule.unsupported("with sinks");
            }
            Ok(rule.graph.soft_max_back(g, y, scale)?)
        }
        (Op::FlashAttn { .. }, 0..3) => rule.flash_attn(op, number),
        (Op::Rope(parameters), 0) => {
            let (positions, rope_factors) = (rule.source(1)?, rule.optional(2));
            let g = rule.dense_rows(g)?;
            Ok(rule
                .graph
                .rope_back(g, positions, rope_factors, parameters)?)
        }
        (Op::RopeBack(parameters), 0) => {
            let (positions, rope_factors) = (rule.source(1)?, rule.optional(2));
            let g = rule.dense_rows(g)?;
            Ok(rule.graph.rope(g, positions, rope_factors, parameters)?)
        }
        (Op::Clamp { min, max }, 0) => {
            let x = rule.source(0)?;
            let above = rule.graph.scale_bias(x, 1.0, -min)?;
            let above = rule.graph.unary(above, Unary::Step)?;
            let below = rule.graph.scale_bias(x, -1.0, max)?;
            let below = rule.graph.unary(below, Unary::Step)?;
            let g = rule.graph.mul(g, above)?;
            Ok(rule.graph.mul(g, below)?)
        }
        (Op::Unary(function), 0) => {
            let x = rule.source(0)?;
            rule.unary(function, x, Some(y), g)
        }
        (Op::Glu { kind, swapped }, _) => rule.glu(kind, swapped, number),
        (Op::CrossEntropyLoss, 0) => {
            let (logits, labels) = (rule.source(0)?, rule.source(1)?);
            Ok(rule.graph.cross_entropy_loss_back(g, logits, labels)?)
        }
        _ => rule.unsupported(""),
    }
}

impl Rule<'_> {
    fn unsupported<T>(&self, how: &str) -> Result<T> {
        let tensor = self.graph.tensor(self.y);
        Err(Error::gradient(format!(
            "there is no gradient of {} {how}('{}', {}): build the graph of operations that have \
             one, or leave the parameters before it out",
            tensor.op, tensor.name, self.y
        )))
    }

    fn optional(&self, number: usize) -> Option<TensorId> {
        self.graph
            .tensor(self.y)
            .sources
            .get(number)
            .copied()
            .flatten()
    }

    fn source(&self, number: usize) -> Result<TensorId> {
        match self.optional(number) {
            Some(id) => Ok(id),
            None => self.unsupported("without all sources "),
        }
    }

    fn shape(&self, number: usize) -> Result<Shape> {
        let source = self.source(number)?;
        Ok(self.shape_of(source))
    }

    fn shape_of(&self, id: TensorId) -> Shape {
        self.graph.tensor(id).layout.shape()
    }

    fn contiguous(&mut self, id: TensorId) -> Result<TensorId> {
        if self.graph.tensor(id).layout.is_contiguous() {
            return Ok(id);
        }
        Ok(self.graph.cont(id)?)
    }

    fn dense_rows(&mut self, id: TensorId) -> Result<TensorId> {
        if self.graph.tensor(id).layout.has_contiguous_rows() {
            return Ok(id);
        }
        Ok(self.graph.cont(id)?)
    }

    fn reshaped(&mut self, id: TensorId, shape: Shape) -> Result<TensorId> {
        let id = self.contiguous(id)?;
        Ok(self.graph.reshape(id, shape)?)
    }

    fn scaled(&mut self, id: TensorId, scale: f32) -> Result<TensorId> {
        Ok(self.graph.scale(id, scale)?)
    }

    /// Sums `id` to the shape of source `number`, which was repeated.
    fn summed(&mut self, id: TensorId, number: usize) -> Result<TensorId> {
        let shape = self.shape(number)?;
        if self.shape_of(id) == shape {
            return Ok(id);
        }
        Ok(self.graph.repeat_back(id, shape)?)
    }

    fn mul(&mut self, number: usize) -> Result<TensorId> {
        let (a, b) = (self.source(0)?, self.source(1)?);
        if number == 0 {
            return Ok(self.graph.mul(self.g, b)?);
        }
        let product = self.graph.mul(self.g, a)?;
        self.summed(product, 1)
    }

    fn div(&mut self, number: usize) -> Result<TensorId> {
        let b = self.source(1)?;
        let quotient = self.graph.div(self.g, b)?;
        if number == 0 {
            return Ok(quotient);
        }
        let product = self.graph.mul(quotient, self.y)?;
        let negative = self.graph.unary(product, Unary::Neg)?;
        self.summed(negative, 1)
    }

    /// Returns the part of the gradient that belongs to source `number`, starting at `start`,
    /// without gaps.
    fn window(&mut self, start: Shape, number: usize) -> Result<TensorId> {
        let shape = self.shape(number)?;
        let g = self.contiguous(self.g)?;
        let strides = self.graph.tensor(g).layout.strides();
        let offset = start.iter().zip(strides).map(|(i, s)| i * s).sum();
        let [_, s1, s2, s3] = strides;
        let view = self.graph.view(g, shape, [s1, s2, s3], offset)?;
        self.contiguous(view)
    }

    fn part_of_concat(&mut self, dim: usize, number: usize) -> Result<TensorId> {
        let mut start = [0; DIMS];
        if number == 1 {
            start[dim] = self.shape(0)?[dim];
        }
        self.window(start, number)
    }

    /// Returns zeros in the source's shape, with the gradient in the window.
    fn view(
        &mut self,
        shape: Shape,
        strides: [usize; DIMS - 1],
        offset: usize,
    ) -> Result<TensorId> {
        let x = self.source(0)?;
        let layout = self.graph.tensor(x).layout;
        if !layout.is_contiguous() || !self.graph.tensor(self.y).layout.has_distinct_elements() {
            return self.unsupported("of a tensor with gaps, or with overlapping elements ");
        }
        let zeros = self.graph.fill(x, 0.0)?;
        let window = self.graph.view(zeros, shape, strides, offset)?;
        self.graph.cpy(self.g, window)?;
        Ok(zeros)
    }

    /// Computes `(g - mean(g) - y mean(g y)) / s` with `s = sqrt(variance + eps)`.
    fn norm(&mut self, eps: f32) -> Result<TensorId> {
        let (x, y, g) = (self.source(0)?, self.y, self.g);
        let graph = &mut *self.graph;
        let mean = graph.mean(x)?;
        let centred = graph.sub(x, mean)?;
        let squares = graph.sqr(centred)?;
        let variance = graph.mean(squares)?;
        let variance = graph.scale_bias(variance, 1.0, eps)?;
        let deviation = graph.sqrt(variance)?;
        let mean = graph.mean(g)?;
        let product = graph.mul(g, y)?;
        let pull = graph.mean(product)?;
        let pull = graph.mul(y, pull)?;
        let rest = graph.sub(g, mean)?;
        let rest = graph.sub(rest, pull)?;
        Ok(graph.div(rest, deviation)?)
    }

    /// Computes `(g - y sum(g y)) / length`. The second term is zero if the length is the minimum.
    fn l2_norm(&mut self, eps: f32) -> Result<TensorId> {
        let (x, y, g) = (self.source(0)?, self.y, self.g);
        let graph = &mut *self.graph;
        let squares = graph.sqr(x)?;
        let squares = graph.sum_rows(squares)?;
        let length = graph.sqrt(squares)?;
        let longer = graph.scale_bias(length, 1.0, -eps)?;
        let longer = graph.unary(longer, Unary::Step)?;
        let length = graph.clamp(length, eps, f32::INFINITY)?;
        let product = graph.mul(g, y)?;
        let pull = graph.sum_rows(product)?;
        let pull = graph.mul(pull, longer)?;
        let pull = graph.mul(y, pull)?;
        let rest = graph.sub(g, pull)?;
        Ok(graph.div(rest, length)?)
    }

    /// Computes `dw = out_prod(x, g)` and `dx = out_prod(w, gᵀ)` for `y = mul_mat(w, x)`. The
    /// blocks of quantized weights are along the rows, which is the wrong direction for these sums,
    /// so the weights are decoded first.
    fn mul_mat(&mut self, number: usize) -> Result<TensorId> {
        if number == 0 {
            let x = self.source(1)?;
            let x = self.dense_rows(x)?;
            let whole = self.graph.out_prod(x, self.g)?;
            return self.summed_batches(whole);
        }
        let mut w = self.source(0)?;
        if self.graph.tensor(w).layout.dtype().is_quantized() {
            w = self.graph.cast(w, DType::F32)?;
        }
        let turned = self.graph.transpose(self.g)?;
        Ok(self.graph.out_prod(w, turned)?)
    }

    /// Computes `da = out_prod(g, bᵀ)` for `y = out_prod(a, b)`, and `dbᵀ` as the product of `a`
    /// and `g`.
    fn out_prod(&mut self, number: usize) -> Result<TensorId> {
        if number == 0 {
            let b = self.source(1)?;
            let (g, turned) = (self.dense_rows(self.g)?, self.graph.transpose(b)?);
            let whole = self.graph.out_prod(g, turned)?;
            return self.summed_batches(whole);
        }
        let a = self.source(0)?;
        let product = self.graph.mul_mat(a, self.g)?;
        Ok(self.graph.transpose(product)?)
    }

    /// Returns the gradient of queries, keys or values, which one node computes together.
    fn flash_attn(&mut self, op: Op, number: usize) -> Result<TensorId> {
        let Op::FlashAttn {
            scale,
            max_bias: 0.0,
            softcap: 0.0,
            ..
        } = op
        else {
            return self.unsupported("with ALiBi or softcap ");
        };
        if self.optional(4).is_some() {
            return self.unsupported("with sinks ");
        }
        let operands = [self.source(0)?, self.source(1)?, self.source(2)?];
        let mask = self.optional(3);
        let mut sources = vec![Some(self.g)];
        sources.extend(operands.into_iter().chain(mask).map(Some));
        let known = self.graph.ids().rev().find(|id| {
            let tensor = self.graph.tensor(*id);
            matches!(tensor.op, Op::FlashAttnBack { .. }) && tensor.sources[..] == sources
        });
        let all = match known {
            Some(all) => all,
            None => self.graph.flash_attn_back(self.g, operands, mask, scale)?,
        };
        let shape = self.shape(number)?;
        let [size, rows, heads, _] = shape;
        let before = operands[..number].iter();
        let before = before.map(|id| self.graph.tensor(*id).layout.elements());
        let offset = before.sum::<usize>();
        let strides = [size * heads, size, size * heads * rows].map(|stride| 4 * stride);
        Ok(self.graph.view(all, shape, strides, 4 * offset)?)
    }

    /// Sums the gradient of a matrix (source 0) over the consecutive batches that share it.
    fn summed_batches(&mut self, whole: TensorId) -> Result<TensorId> {
        let [n0, n1, a2, a3] = self.shape(0)?;
        let [_, _, b2, b3] = self.shape_of(whole);
        let mut sum = whole;
        if a2 != b2 {
            let groups = self.graph.reshape(sum, [n0 * n1, b2 / a2, a2, b3])?;
            sum = self.graph.repeat_back(groups, [n0 * n1, 1, a2, b3])?;
        }
        if a3 != b3 {
            let sum_of_2 = self.graph.reshape(sum, [n0 * n1 * a2, b3 / a3, a3, 1])?;
            sum = self.graph.repeat_back(sum_of_2, [n0 * n1 * a2, 1, a3, 1])?;
        }
        if sum == whole {
            return Ok(whole);
        }
        Ok(self.graph.reshape(sum, [n0, n1, a2, a3])?)
    }

    /// Returns the gradient of a function of one element at `x`; `y` is its value there, if it is
    /// known, and `h` is the gradient of the value.
    fn unary(
        &mut self,
        function: Unary,
        x: TensorId,
        y: Option<TensorId>,
        h: TensorId,
    ) -> Result<TensorId> {
        let graph = &mut *self.graph;
        let y = match y {
            Some(y) => y,
            None => graph.unary(x, function)?,
        };
        let slope = match function {
            Unary::Neg => return Ok(graph.unary(h, Unary::Neg)?),
            Unary::Silu => return Ok(graph.silu_back(h, x)?),
            Unary::Abs => graph.unary(x, Unary::Sgn)?,
            Unary::Relu => graph.unary(x, Unary::Step)?,
            Unary::Exp => y,
            Unary::ExpM1 => graph.scale_bias(y, 1.0, 1.0)?,
            Unary::SoftPlus => graph.unary(x, Unary::Sigmoid)?,
            Unary::Tanh => {
                let square = graph.sqr(y)?;
                graph.scale_bias(square, -1.0, 1.0)?
            }
            Unary::Sigmoid => {
                let rest = graph.scale_bias(y, -1.0, 1.0)?;
                graph.mul(y, rest)?
            }
            // exp(min(x, 0))
            Unary::Elu => {
                let negative = graph.clamp(x, f32::NEG_INFINITY, 0.0)?;
                graph.unary(negative, Unary::Exp)?
            }
            // x sigmoid(c x)
            Unary::GeluQuick => {
                const C: f32 = 1.702;
                let inner = graph.scale(x, C)?;
                logistic_slope(graph, x, inner, |graph| Ok(graph.fill(x, C)?))?
            }
            // x sigmoid(c (x + 0.044715 x³))
            Unary::Gelu => {
                let c = (8.0 / PI).sqrt();
                let square = graph.sqr(x)?;
                let inner = graph.scale_bias(square, c * 0.044_715, c)?;
                let inner = graph.mul(inner, x)?;
                logistic_slope(graph, x, inner, |graph| {
                    Ok(graph.scale_bias(square, 3.0 * c * 0.044_715, c)?)
                })?
            }
            Unary::GeluErf => gelu_erf_slope(graph, x)?,
            _ => return self.unsupported(""),
        };
        Ok(graph.mul(h, slope)?)
    }

    /// Computes the gradients of `y = f(x) gate`: `f'(x) gate g` and `f(x) g`.
    fn glu(&mut self, kind: Glu, swapped: bool, number: usize) -> Result<TensorId> {
        let whole = self.source(0)?;
        let Some(gate) = self.optional(1) else {
            let layout = self.graph.tensor(whole).layout;
            let ([n0, n1, n2, n3], [s0, s1, s2, s3]) = (layout.shape(), layout.strides());
            let (half, strides) = ([n0 / 2, n1, n2, n3], [s1, s2, s3]);
            let first = self.graph.view(whole, half, strides, 0)?;
            let second = self.graph.view(whole, half, strides, n0 / 2 * s0)?;
            let (x, gate) = if swapped {
                (second, first)
            } else {
                (first, second)
            };
            let dx = self.glu_x(kind, x, gate)?;
            let dgate = self.glu_gate(kind, x, gate)?;
            let (first, second) = if swapped { (dgate, dx) } else { (dx, dgate) };
            return Ok(self.graph.concat(first, second, 0)?);
        };
        if number == 0 {
            self.glu_x(kind, whole, gate)
        } else {
            self.glu_gate(kind, whole, gate)
        }
    }

    fn glu_x(&mut self, kind: Glu, x: TensorId, gate: TensorId) -> Result<TensorId> {
        match Gated::from_kind(kind) {
            Gated::Unary(function) => {
                let h = self.graph.mul(self.g, gate)?;
                self.unary(function, x, None, h)
            }
            Gated::Limited { alpha, limit, bias } => {
                let graph = &mut *self.graph;
                let inside = graph.clamp(x, f32::NEG_INFINITY, limit)?;
                let gate = graph.clamp(gate, -limit, limit)?;
                let gate = graph.scale_bias(gate, 1.0, bias)?;
                let h = graph.mul(self.g, gate)?;
                let inner = graph.scale(inside, alpha)?;
                let slope = |graph: &mut Graph| Ok(graph.fill(inside, alpha)?);
                let slope = logistic_slope(graph, inside, inner, slope)?;
                let part = graph.mul(h, slope)?;
                let below = graph.scale_bias(x, -1.0, limit)?;
                let below = graph.unary(below, Unary::Step)?;
                Ok(graph.mul(part, below)?)
            }
        }
    }

    fn glu_gate(&mut self, kind: Glu, x: TensorId, gate: TensorId) -> Result<TensorId> {
        match Gated::from_kind(kind) {
            Gated::Unary(function) => {
                let value = self.graph.unary(x, function)?;
                Ok(self.graph.mul(value, self.g)?)
            }
            Gated::Limited { alpha, limit, .. } => {
                let graph = &mut *self.graph;
                let inside = graph.clamp(x, f32::NEG_INFINITY, limit)?;
                let share = graph.scale(inside, alpha)?;
                let share = graph.unary(share, Unary::Sigmoid)?;
                let value = graph.mul(inside, share)?;
                let part = graph.mul(value, self.g)?;
                let size = graph.unary(gate, Unary::Abs)?;
                let below = graph.scale_bias(size, -1.0, limit)?;
                let below = graph.unary(below, Unary::Step)?;
                Ok(graph.mul(part, below)?)
            }
        }
    }
}

/// Function of a gated unit.
enum Gated {
    /// `f(x) gate`.
    Unary(Unary),
    /// `x sigmoid(alpha x) (gate + bias)`, where a limit applies to `x` and to the magnitude of
    /// `gate`.
    Limited { alpha: f32, limit: f32, bias: f32 },
}

impl Gated {
    fn from_kind(kind: Glu) -> Self {
        Gated::Unary(match kind {
            Glu::Reglu => Unary::Relu,
            Glu::Geglu => Unary::Gelu,
            Glu::Swiglu => Unary::Silu,
            Glu::GegluErf => Unary::GeluErf,
            Glu::GegluQuick => Unary::GeluQuick,
            Glu::SwigluOai { alpha, limit } => {
                let bias = 1.0;
                return Gated::Limited { alpha, limit, bias };
            }
            Glu::SwigluClamp { limit } => {
                let (alpha, bias) = (1.0, 0.0);
                return Gated::Limited { alpha, limit, bias };
            }
        })
    }
}

/// Returns the slope of `x sigmoid(u)`, where `u` depends on `x` with slope `slope`: `s + x s (1 -
/// s) u'`.
fn logistic_slope(
    graph: &mut Graph,
    x: TensorId,
    u: TensorId,
    slope: impl FnOnce(&mut Graph) -> Result<TensorId>,
) -> Result<TensorId> {
    let s = graph.unary(u, Unary::Sigmoid)?;
    let rest = graph.scale_bias(s, -1.0, 1.0)?;
    let bend = graph.mul(s, rest)?;
    let slope = slope(graph)?;
    let bend = graph.mul(bend, slope)?;
    let bend = graph.mul(bend, x)?;
    Ok(graph.add(s, bend)?)
}

/// Returns the slope of `x Φ(x)`, where Φ is the normal distribution: `Φ(x) + x exp(-x²/2) /
/// sqrt(2π)`.
fn gelu_erf_slope(graph: &mut Graph, x: TensorId) -> Result<TensorId> {
    // Φ(|x|) is the function divided by |x|, which is limited to avoid a division by 0.
    let size = graph.unary(x, Unary::Abs)?;
    let size = graph.clamp(size, 1e-30, f32::INFINITY)?;
    let value = graph.unary(size, Unary::GeluErf)?;
    let share = graph.div(value, size)?;
    let share = graph.scale_bias(share, 1.0, -0.5)?;
    let sign = graph.unary(x, Unary::Sgn)?;
    let share = graph.mul(share, sign)?;
    let share = graph.scale_bias(share, 1.0, 0.5)?;
    let square = graph.sqr(x)?;
    let square = graph.scale(square, -0.5)?;
    let density = graph.unary(square, Unary::Exp)?;
    let density = graph.scale(density, 1.0 / (2.0 * PI).sqrt())?;
    let bend = graph.mul(density, x)?;
    Ok(graph.add(share, bend)?)
}
