//! Shape inference: the one place that knows which operations fit which operands.
//!
//! Everything that makes nodes (the builder, imports from other programs, tests) goes through [`infer`], so a
//! node that exists is well-formed and kernels need no checks of shapes. Values, such as the indices of
//! `get_rows`, are checked by kernels.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{DIMS, Layout, Shape};
use crate::op::{Glu, Op};

/// The sources of one node while it is checked; errors name the operation and all operands.
struct Check<'a> {
    op: &'a Op,
    sources: &'a [Option<&'a Layout>],
}

impl<'a> Check<'a> {
    fn error(&self, problem: impl std::fmt::Display) -> Error {
        let operands: Vec<_> = self
            .sources
            .iter()
            .map(|s| s.map_or_else(|| "-".to_owned(), ToString::to_string))
            .collect();
        Error::shape(format!(
            "{}: {problem} (operands: {})",
            self.op,
            operands.join(", ")
        ))
    }

    fn ensure(&self, holds: bool, problem: impl std::fmt::Display) -> Result<()> {
        if holds {
            Ok(())
        } else {
            Err(self.error(problem))
        }
    }

    /// Whether the matrices of source 0, not transposed, repeat over those of source 1.
    fn repeats_over_batches(&self, a: &Layout, b: &Layout) -> Result<()> {
        let ([_, _, a2, a3], [_, _, b2, b3]) = (a.shape(), b.shape());
        self.ensure(
            a2 != 0 && a3 != 0 && b2 % a2 == 0 && b3 % a3 == 0,
            "source 0 does not repeat over source 1's batches",
        )?;
        self.ensure(
            !a.is_transposed(),
            "source 0 is transposed; make it contiguous first",
        )
    }

    fn optional(&self, index: usize) -> Option<&'a Layout> {
        self.sources.get(index).copied().flatten()
    }

    fn source(&self, index: usize) -> Result<&'a Layout> {
        self.optional(index)
            .ok_or_else(|| self.error(format_args!("source {index} is missing")))
    }

    fn count(&self, required: usize, optional: usize) -> Result<()> {
        for index in 0..required {
            self.source(index)?;
        }
        self.ensure(
            self.sources.len() <= required + optional,
            format_args!("takes at most {} sources", required + optional),
        )
    }

    fn is(&self, index: usize, what: &str, types: &[DType]) -> Result<()> {
        match self.optional(index) {
            Some(layout) if !types.contains(&layout.dtype()) => {
                Err(self.error(format_args!("{what} cannot be {}", layout.dtype())))
            }
            _ => Ok(()),
        }
    }

    /// A new, contiguous result.
    fn result(&self, dtype: DType, shape: Shape) -> Result<Layout> {
        Layout::contiguous(dtype, shape).map_err(|error| self.error(error))
    }

    fn like(&self, source: &Layout) -> Result<Layout> {
        self.result(source.dtype(), source.shape())
    }

    /// A gradient and one more operand of the same shape, f32; so is the result.
    fn gradient_of_rows(&self) -> Result<Layout> {
        self.count(2, 0)?;
        self.is(0, "the gradient", &[DType::F32])?;
        self.is(1, "source 1", &[DType::F32])?;
        let (gradient, other) = (self.source(0)?, self.source(1)?);
        self.ensure(
            gradient.shape() == other.shape(),
            "the sources differ in shape",
        )?;
        self.like(gradient)
    }

    /// Source `first` queries, and the next ones keys, values and, if there is one, the mask; the layout of the attention's result.
    fn attention(&self, first: usize) -> Result<Layout> {
        let (q, k, v) = (
            self.source(first)?,
            self.source(first + 1)?,
            self.source(first + 2)?,
        );
        let ([d, tokens, heads, batch], [kd, kv, k_heads, k_batch], [dv, v_kv, v_heads, v_batch]) =
            (q.shape(), k.shape(), v.shape());
        self.ensure(d == kd, "queries and keys differ in head size")?;
        self.ensure(
            kv == v_kv && k_heads == v_heads,
            "keys and values differ in extents",
        )?;
        self.ensure(
            k_heads != 0 && heads % k_heads == 0,
            "the heads of keys do not repeat over those of queries",
        )?;
        self.ensure(
            batch == k_batch && batch == v_batch,
            "queries, keys and values differ in extent 3",
        )?;
        self.ensure(
            [q, k, v].iter().all(|l| l.has_contiguous_rows()),
            "the rows of queries, keys or values have gaps",
        )?;
        self.is(first + 3, "the mask", &[DType::F16])?;
        if let Some(mask) = self.optional(first + 3) {
            let m = mask.shape();
            self.ensure(mask.is_contiguous(), "the mask is not contiguous")?;
            self.ensure(
                m[0] == kv && m[1] >= tokens,
                "the mask is smaller than keys times queries",
            )?;
            self.ensure(
                m[2] != 0 && m[3] != 0 && heads % m[2] == 0 && batch % m[3] == 0,
                "the mask does not repeat over heads and batch",
            )?;
        }
        self.result(DType::F32, [dv, heads, tokens, batch])
    }

    /// Source `first` logits and the next one labels; the layout of a gradient of the logits.
    fn logits_and_labels(&self, first: usize) -> Result<Layout> {
        self.is(first, "the logits", &[DType::F32])?;
        self.is(first + 1, "the labels", &[DType::F32])?;
        let (logits, labels) = (self.source(first)?, self.source(first + 1)?);
        self.ensure(
            logits.shape() == labels.shape(),
            "logits and labels differ in shape",
        )?;
        self.ensure(
            logits.is_contiguous() && labels.is_contiguous(),
            "logits or labels are not contiguous",
        )?;
        self.like(logits)
    }

    /// Weights and, up to source `parameters`, what belongs to them; there, `count` numbers. The layout of the weights.
    fn step(&self, parameters: usize, count: usize) -> Result<Layout> {
        let weights = self.source(0)?;
        for index in 0..parameters {
            self.is(index, "weights, gradients and means", &[DType::F32])?;
            let source = self.source(index)?;
            self.ensure(
                source.shape() == weights.shape() && source.is_contiguous(),
                format_args!("source {index} differs in shape from the weights or has gaps"),
            )?;
        }
        self.is(parameters, "the parameters", &[DType::F32])?;
        let numbers = self.source(parameters)?;
        self.ensure(
            numbers.shape() == [count, 1, 1, 1] && numbers.is_contiguous(),
            format_args!("there are not {count} parameters"),
        )?;
        Ok(*weights)
    }
}

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// The layout of the result of `op` on `sources`, or why they do not fit.
///
/// For operations whose result lies in a source's memory (views, `cpy`, `set_rows`) the layout holds the
/// strides in that memory.
///
/// # Errors
/// [`Error::Shape`] with the operation, the operands and the broken rule.
pub fn infer(op: &Op, sources: &[Option<&Layout>]) -> Result<Layout> {
    let c = Check { op, sources };
    match *op {
        Op::Leaf => Err(c.error("a leaf has a layout of its own")),
        Op::Dup | Op::Cont => {
            c.count(1, 0)?;
            c.like(c.source(0)?)
        }
        Op::Add | Op::Sub | Op::Mul | Op::Div => {
            c.count(2, 0)?;
            let (a, b) = (c.source(0)?, c.source(1)?);
            c.is(0, "source 0", FLOATS)?;
            c.is(1, "source 1", FLOATS)?;
            c.ensure(
                b.repeats_to(a.shape()),
                "source 1 does not repeat to the shape of source 0",
            )?;
            c.like(a)
        }
        Op::AddId => {
            c.count(3, 0)?;
            let (a, b, ids) = (
                c.source(0)?.shape(),
                c.source(1)?.shape(),
                c.source(2)?.shape(),
            );
            c.is(0, "source 0", &[DType::F32])?;
            c.is(1, "source 1", &[DType::F32])?;
            c.is(2, "the row numbers", &[DType::I32])?;
            c.ensure(a[0] == b[0], "rows differ in length")?;
            c.ensure(
                a[1] == ids[0] && a[2] == ids[1],
                "there is not one row number for each row",
            )?;
            c.ensure(
                a[3] == 1 && b[2] == 1 && b[3] == 1 && ids[2] == 1 && ids[3] == 1,
                "too many dimensions",
            )?;
            c.like(c.source(0)?)
        }
        Op::DiagMaskInf { past } | Op::DiagMaskZero { past } => {
            c.count(1, 0)?;
            c.is(0, "source 0", FLOATS)?;
            c.ensure(past <= i32::MAX as usize, "past is beyond 2^31 - 1")?;
            c.like(c.source(0)?)
        }
        Op::Scale { .. }
        | Op::Sqr
        | Op::Sqrt
        | Op::Log
        | Op::Clamp { .. }
        | Op::Unary(_)
        | Op::Fill { .. } => {
            c.count(1, 0)?;
            c.is(0, "source 0", FLOATS)?;
            c.like(c.source(0)?)
        }
        Op::Norm { eps } | Op::RmsNorm { eps } | Op::L2Norm { eps } => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            c.ensure(eps >= 0.0, "eps is negative or not a number")?;
            c.like(c.source(0)?)
        }
        Op::CumSum => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            c.like(c.source(0)?)
        }
        Op::Sum => {
            c.count(1, 0)?;
            c.is(0, "source 0", FLOATS)?;
            c.result(c.source(0)?.dtype(), [1; DIMS])
        }
        Op::SumRows | Op::Mean => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            let [_, n1, n2, n3] = c.source(0)?.shape();
            c.result(DType::F32, [1, n1, n2, n3])
        }
        Op::ArgMax => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            let [n0, n1, n2, n3] = c.source(0)?.shape();
            c.ensure(n2 == 1 && n3 == 1, "source 0 is not a matrix")?;
            c.ensure(
                n0 >= 1 && n0 <= i32::MAX as usize,
                "a row must have 1 to 2^31 - 1 elements",
            )?;
            c.result(DType::I32, [n1, 1, 1, 1])
        }
        Op::ArgSort { .. } => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            let shape = c.source(0)?.shape();
            c.ensure(
                shape[0] <= i32::MAX as usize,
                "a row has more than 2^31 - 1 elements",
            )?;
            c.result(DType::I32, shape)
        }
        Op::TopK { k } => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            let [n0, n1, n2, n3] = c.source(0)?.shape();
            c.ensure(
                k >= 1 && k <= n0,
                format_args!("k is not between 1 and the row length {n0}"),
            )?;
            c.ensure(
                n0 <= i32::MAX as usize,
                "a row has more than 2^31 - 1 elements",
            )?;
            c.result(DType::I32, [k, n1, n2, n3])
        }
        Op::Repeat { shape } => {
            c.count(1, 0)?;
            let a = c.source(0)?;
            c.ensure(
                !a.dtype().is_quantized(),
                "blocks of a quantized type cannot be repeated",
            )?;
            c.ensure(
                a.repeats_to(shape),
                format_args!("the source does not repeat to {shape:?}"),
            )?;
            c.result(a.dtype(), shape)
        }
        Op::Concat { dim } => {
            c.count(2, 0)?;
            let (a, b) = (c.source(0)?, c.source(1)?);
            c.ensure(dim < DIMS, "there are 4 dimensions")?;
            c.ensure(a.dtype() == b.dtype(), "the types differ")?;
            let mut shape = a.shape();
            for d in (0..DIMS).filter(|&d| d != dim) {
                c.ensure(
                    shape[d] == b.shape()[d],
                    format_args!("extents differ in dimension {d}"),
                )?;
            }
            shape[dim] = shape[dim]
                .checked_add(b.shape()[dim])
                .ok_or_else(|| c.error("the size overflows"))?;
            c.result(a.dtype(), shape)
        }
        Op::MulMat { .. } => {
            c.count(2, 0)?;
            let (a, b) = (c.source(0)?, c.source(1)?);
            c.is(1, "source 1", FLOATS)?;
            c.ensure(!a.dtype().is_integer(), "source 0 is an integer matrix")?;
            let ([k, m, ..], [bk, n, b2, b3]) = (a.shape(), b.shape());
            c.ensure(k == bk, format_args!("rows differ in length: {k} and {bk}"))?;
            c.repeats_over_batches(a, b)?;
            c.result(DType::F32, [m, n, b2, b3])
        }
        Op::OutProd => {
            c.count(2, 0)?;
            let (a, b) = (c.source(0)?, c.source(1)?);
            c.is(1, "source 1", &[DType::F32])?;
            c.ensure(!a.dtype().is_integer(), "source 0 is an integer matrix")?;
            let ([m, k, ..], [n, bk, b2, b3]) = (a.shape(), b.shape());
            c.ensure(
                k == bk,
                format_args!("the numbers of rows differ: {k} and {bk}"),
            )?;
            c.repeats_over_batches(a, b)?;
            c.result(DType::F32, [m, n, b2, b3])
        }
        Op::MulMatId { .. } => {
            c.count(3, 0)?;
            let (a, b, ids) = (c.source(0)?, c.source(1)?, c.source(2)?);
            c.is(1, "source 1", &[DType::F32])?;
            c.is(2, "the expert numbers", &[DType::I32])?;
            c.ensure(!a.dtype().is_integer(), "source 0 is an integer matrix")?;
            c.ensure(
                !a.is_transposed(),
                "source 0 is transposed; make it contiguous first",
            )?;
            let ([k, m, _, a3], [bk, b1, tokens, b3], [used, i1, i2, i3]) =
                (a.shape(), b.shape(), ids.shape());
            c.ensure(
                a3 == 1 && b3 == 1 && i2 == 1 && i3 == 1,
                "too many dimensions",
            )?;
            c.ensure(k == bk, format_args!("rows differ in length: {k} and {bk}"))?;
            c.ensure(
                i1 == tokens,
                "there is not one list of experts for each token",
            )?;
            c.ensure(
                b1 != 0 && used % b1 == 0,
                "source 1's rows do not repeat over the experts used",
            )?;
            c.result(DType::F32, [m, used, tokens, 1])
        }
        Op::Cpy => {
            c.count(2, 0)?;
            let (a, b) = (c.source(0)?, c.source(1)?);
            c.ensure(
                a.elements() == b.elements(),
                "the numbers of elements differ",
            )?;
            c.ensure(
                b.has_distinct_elements(),
                "elements of the destination share memory",
            )?;
            Ok(*b)
        }
        Op::Cast { dtype } => {
            c.count(1, 0)?;
            c.result(dtype, c.source(0)?.shape())
        }
        Op::Reshape { shape } => {
            c.count(1, 0)?;
            let a = c.source(0)?;
            c.ensure(a.is_contiguous(), "the source is not contiguous")?;
            let layout = c.result(a.dtype(), shape)?;
            c.ensure(
                layout.elements() == a.elements(),
                format_args!("{shape:?} has another number of elements"),
            )?;
            Ok(layout)
        }
        Op::View {
            shape,
            strides: [s1, s2, s3],
            ..
        } => {
            c.count(1, 0)?;
            let dtype = c.source(0)?.dtype();
            Layout::strided(dtype, shape, [dtype.block_bytes(), s1, s2, s3])
                .map_err(|error| c.error(error))
        }
        Op::Permute { axes } => {
            c.count(1, 0)?;
            c.source(0)?.permuted(axes).map_err(|error| c.error(error))
        }
        Op::Transpose => {
            c.count(1, 0)?;
            c.source(0)?
                .permuted([1, 0, 2, 3])
                .map_err(|error| c.error(error))
        }
        Op::GetRows => {
            c.count(2, 0)?;
            let (a, rows) = (c.source(0)?, c.source(1)?);
            c.is(1, "the row numbers", &[DType::I32])?;
            c.ensure(a.has_contiguous_rows(), "the rows of source 0 have gaps")?;
            let ([n0, _, n2, n3], [r0, r1, r2, r3]) = (a.shape(), rows.shape());
            c.ensure(
                n2 == r1 && n3 == r2 && r3 == 1,
                "there is not one list of rows for each matrix",
            )?;
            let dtype = if a.dtype() == DType::I32 {
                DType::I32
            } else {
                DType::F32
            };
            c.ensure(
                dtype == DType::I32 || !a.dtype().is_integer(),
                "source 0 has a type without conversion to f32",
            )?;
            c.result(dtype, [n0, r0, r1, r2])
        }
        Op::SetRows => {
            c.count(3, 0)?;
            let (rows, index, into) = (c.source(0)?, c.source(1)?, c.source(2)?);
            c.is(0, "the rows", &[DType::F32, DType::F16])?;
            c.is(1, "the row numbers", &[DType::I64, DType::I32])?;
            let (r, i, d) = (rows.shape(), index.shape(), into.shape());
            c.ensure(
                r[0] == d[0] && r[2] == d[2] && r[3] == d[3],
                "source 0 and the destination differ in extents 0, 2 or 3",
            )?;
            c.ensure(r[1] == i[0], "there is not one row number for each row")?;
            c.ensure(
                i[1] != 0 && i[2] != 0 && r[2] % i[1] == 0 && r[3] % i[2] == 0 && i[3] == 1,
                "the row numbers do not repeat over the batches",
            )?;
            c.ensure(
                rows.has_contiguous_rows() && into.has_contiguous_rows(),
                "rows have gaps",
            )?;
            c.ensure(
                into.has_distinct_elements(),
                "elements of the destination share memory",
            )?;
            Ok(*into)
        }
        Op::SoftMax { max_bias, .. } => {
            c.count(1, 2)?;
            c.is(0, "source 0", &[DType::F32])?;
            c.is(1, "the mask", &[DType::F32, DType::F16])?;
            c.is(2, "the sinks", &[DType::F32])?;
            let a = c.source(0)?;
            c.ensure(a.is_contiguous(), "source 0 is not contiguous")?;
            let n = a.shape();
            if let Some(mask) = c.optional(1) {
                let m = mask.shape();
                c.ensure(mask.is_contiguous(), "the mask is not contiguous")?;
                c.ensure(
                    m[0] == n[0] && m[1] >= n[1],
                    "the mask is smaller than source 0",
                )?;
                c.ensure(
                    m[2] != 0 && m[3] != 0 && n[2] % m[2] == 0 && n[3] % m[3] == 0,
                    "the mask does not repeat over source 0's batches",
                )?;
            }
            c.ensure(
                max_bias <= 0.0 || c.optional(1).is_some(),
                "ALiBi needs a mask",
            )?;
            if let Some(sinks) = c.optional(2) {
                c.ensure(
                    sinks.shape() == [n[2], 1, 1, 1] && sinks.is_contiguous(),
                    "there is not one sink for each head",
                )?;
            }
            c.like(a)
        }
        Op::Rope(rope) | Op::RopeBack(rope) => {
            c.count(2, 1)?;
            c.is(0, "source 0", FLOATS)?;
            c.is(1, "the positions", &[DType::I32])?;
            c.is(2, "the frequency divisors", &[DType::F32])?;
            let (a, positions) = (c.source(0)?, c.source(1)?);
            let [n0, _, tokens, _] = a.shape();
            c.ensure(
                positions.shape() == [tokens, 1, 1, 1] && positions.is_contiguous(),
                "there is not one position for each token",
            )?;
            c.ensure(a.has_contiguous_rows(), "the rows of source 0 have gaps")?;
            c.ensure(
                rope.dims % 2 == 0 && rope.offset % 2 == 0,
                "the rotated part is not a whole number of pairs",
            )?;
            c.ensure(
                rope.offset <= n0 && rope.dims <= n0 - rope.offset,
                "the rotated part is larger than a head",
            )?;
            if let Some(divisors) = c.optional(2) {
                c.ensure(
                    divisors.is_contiguous() && divisors.shape()[0] >= rope.dims / 2,
                    "there are fewer frequency divisors than pairs",
                )?;
            }
            c.like(a)
        }
        Op::Pad { before, after } => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            let mut shape = c.source(0)?.shape();
            for d in 0..DIMS {
                shape[d] = shape[d]
                    .checked_add(before[d])
                    .and_then(|n| n.checked_add(after[d]))
                    .ok_or_else(|| c.error("the size overflows"))?;
            }
            c.result(DType::F32, shape)
        }
        Op::Arange { start, stop, step } => {
            c.count(0, 0)?;
            let steps = ((stop - start) / step).ceil();
            c.ensure(
                stop > start && step > 0.0 && steps <= 1e9,
                "the range is empty, infinite or longer than 10^9",
            )?;
            c.result(DType::F32, [steps as usize, 1, 1, 1])
        }
        Op::FlashAttn { max_bias, .. } => {
            c.count(3, 2)?;
            c.is(0, "the queries", &[DType::F32])?;
            let result = c.attention(0)?;
            c.ensure(
                !c.source(1)?.dtype().is_integer() && !c.source(2)?.dtype().is_integer(),
                "keys and values cannot be integers",
            )?;
            c.ensure(
                max_bias <= 0.0 || c.optional(3).is_some(),
                "ALiBi needs a mask",
            )?;
            c.is(4, "the sinks", &[DType::F32])?;
            if let Some(sinks) = c.optional(4) {
                c.ensure(
                    sinks.shape() == [result.shape()[1], 1, 1, 1] && sinks.is_contiguous(),
                    "there is not one sink for each head",
                )?;
            }
            Ok(result)
        }
        Op::FlashAttnBack { .. } => {
            c.count(4, 1)?;
            for (index, what) in ["the gradient", "the queries", "the keys", "the values"]
                .into_iter()
                .enumerate()
            {
                c.is(index, what, &[DType::F32])?;
            }
            c.ensure(
                c.source(0)?.shape() == c.attention(1)?.shape(),
                "the gradient does not have the shape of the attention's result",
            )?;
            let elements = (1..4).try_fold(0usize, |sum, index| {
                sum.checked_add(c.source(index).ok()?.elements())
            });
            let elements = elements.ok_or_else(|| c.error("the size overflows"))?;
            c.result(DType::F32, [elements, 1, 1, 1])
        }
        Op::Glu { kind, swapped } => {
            c.count(1, 1)?;
            let types: &[DType] = match kind {
                Glu::SwigluOai { .. } => &[DType::F32],
                _ => FLOATS,
            };
            c.is(0, "source 0", types)?;
            let a = c.source(0)?;
            c.ensure(
                a.contiguous_from(1),
                "the rows of source 0 are not evenly spaced without gaps",
            )?;
            if let Some(b) = c.optional(1) {
                c.ensure(
                    a.shape() == b.shape() && a.dtype() == b.dtype(),
                    "the sources differ in shape or type",
                )?;
                c.ensure(
                    b.contiguous_from(1),
                    "the rows of source 1 are not evenly spaced without gaps",
                )?;
                c.ensure(!swapped, "only one source's halves can be swapped")?;
                return c.like(a);
            }
            let [n0, n1, n2, n3] = a.shape();
            c.ensure(n0 % 2 == 0, "rows have no two halves")?;
            c.result(a.dtype(), [n0 / 2, n1, n2, n3])
        }
        Op::RepeatBack { shape } => {
            c.count(1, 0)?;
            c.is(0, "source 0", &[DType::F32])?;
            let part = c.result(DType::F32, shape)?;
            c.ensure(
                !part.is_empty() && part.repeats_to(c.source(0)?.shape()),
                format_args!("{shape:?} does not repeat to the source's shape"),
            )?;
            Ok(part)
        }
        Op::SiluBack | Op::SoftMaxBack { .. } => c.gradient_of_rows(),
        Op::RmsNormBack { eps } => {
            c.ensure(eps >= 0.0, "eps is negative or not a number")?;
            c.gradient_of_rows()
        }
        Op::GetRowsBack { rows } => {
            c.count(2, 0)?;
            c.is(0, "the gradient", &[DType::F32])?;
            c.is(1, "the row numbers", &[DType::I32])?;
            let ([n0, r, n2, n3], numbers) = (c.source(0)?.shape(), c.source(1)?.shape());
            c.ensure(n2 == 1 && n3 == 1, "the gradient is not a matrix")?;
            c.ensure(
                numbers == [r, 1, 1, 1],
                "there is not one row number for each row",
            )?;
            c.result(DType::F32, [n0, rows, 1, 1])
        }
        Op::CrossEntropyLoss => {
            c.count(2, 0)?;
            c.logits_and_labels(0)?;
            c.result(DType::F32, [1; DIMS])
        }
        Op::CrossEntropyLossBack => {
            c.count(3, 0)?;
            c.is(0, "the gradient", &[DType::F32])?;
            c.ensure(
                c.source(0)?.shape() == [1; DIMS],
                "the gradient of the loss is not one element",
            )?;
            c.logits_and_labels(1)
        }
        Op::OptStepAdamW => {
            c.count(5, 0)?;
            c.step(4, 7)
        }
        Op::OptStepSgd => {
            c.count(3, 0)?;
            c.step(2, 2)
        }
    }
}

#[cfg(test)]
mod tests;
