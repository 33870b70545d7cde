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
mod tests {
    use super::*;
    use crate::layout::shape;
    use crate::op::{Precision, Rope, RopeMode, Unary};

    fn t(dtype: DType, extents: &[usize]) -> Layout {
        Layout::contiguous(dtype, shape(extents).unwrap()).unwrap()
    }

    fn f(extents: &[usize]) -> Layout {
        t(DType::F32, extents)
    }

    fn ok(op: Op, sources: &[&Layout]) -> Layout {
        infer(&op, &sources.iter().map(|&l| Some(l)).collect::<Vec<_>>()).unwrap()
    }

    fn err(op: Op, sources: &[&Layout]) -> String {
        infer(&op, &sources.iter().map(|&l| Some(l)).collect::<Vec<_>>())
            .unwrap_err()
            .to_string()
    }

    const MUL_MAT: Op = Op::MulMat {
        precision: Precision::Default,
    };

    #[test]
    fn mul_mat_shapes() {
        let w = t(DType::Q4_0, &[64, 10, 2]);
        assert_eq!(ok(MUL_MAT, &[&w, &f(&[64, 3, 4, 5])]), f(&[10, 3, 4, 5]));
        assert_eq!(
            err(MUL_MAT, &[&w, &f(&[32, 3, 4])]),
            "mul_mat: rows differ in length: 64 and 32 (operands: q4_0 [64, 10, 2], f32 [32, 3, 4])"
        );
        assert!(err(MUL_MAT, &[&w, &f(&[64, 3, 3])]).contains("batches"));
        assert!(err(MUL_MAT, &[&w]).contains("source 1 is missing"));
        assert!(
            err(
                MUL_MAT,
                &[&f(&[4, 4]).permuted([1, 0, 2, 3]).unwrap(), &f(&[4, 4])]
            )
            .contains("transposed")
        );
        assert!(err(MUL_MAT, &[&f(&[4, 4]), &f(&[4, 4]), &f(&[1])]).contains("at most 2"));
    }

    #[test]
    fn attention_shapes() {
        let (q, kv) = (f(&[64, 5, 8, 1]), t(DType::F16, &[64, 32, 2, 1]));
        let op = Op::FlashAttn {
            scale: 1.0,
            max_bias: 0.0,
            softcap: 0.0,
            precision: Precision::F32,
        };
        assert_eq!(ok(op, &[&q, &kv, &kv]), f(&[64, 8, 5]));
        assert!(err(op, &[&q, &kv, &kv, &t(DType::F16, &[32, 4])]).contains("mask is smaller"));
        assert!(err(op, &[&q, &kv, &kv, &f(&[32, 5])]).contains("mask cannot be f32"));
        let alibi = Op::FlashAttn {
            scale: 1.0,
            max_bias: 8.0,
            softcap: 0.0,
            precision: Precision::F32,
        };
        assert!(err(alibi, &[&q, &kv, &kv]).contains("ALiBi"));
    }

    #[test]
    fn rows_in_and_out() {
        let table = t(DType::Q6_K, &[256, 100]);
        assert_eq!(
            ok(Op::GetRows, &[&table, &t(DType::I32, &[7])]),
            f(&[256, 7])
        );
        assert!(err(Op::GetRows, &[&table, &t(DType::I64, &[7])]).contains("i64"));
        let cache = t(DType::F16, &[64, 512]);
        assert_eq!(
            ok(Op::SetRows, &[&f(&[64, 3]), &t(DType::I64, &[3]), &cache]),
            cache
        );
        assert!(
            err(Op::SetRows, &[&f(&[64, 3]), &t(DType::I64, &[4]), &cache]).contains("row number")
        );
    }

    #[test]
    fn rope_checks_pairs_and_positions() {
        let x = f(&[64, 8, 3]);
        let rope = Rope::new(64, RopeMode::Neox, 10000.0);
        assert_eq!(ok(Op::Rope(rope), &[&x, &t(DType::I32, &[3])]), x);
        assert!(err(Op::Rope(rope), &[&x, &t(DType::I32, &[4])]).contains("position"));
        assert!(
            err(
                Op::Rope(Rope { dims: 66, ..rope }),
                &[&x, &t(DType::I32, &[3])]
            )
            .contains("larger than a head")
        );
        assert!(
            err(
                Op::Rope(Rope {
                    dims: usize::MAX - 1,
                    offset: 2,
                    ..rope
                }),
                &[&x, &t(DType::I32, &[3])]
            )
            .contains("larger")
        );
    }

    #[test]
    fn glu_with_one_and_two_sources() {
        let op = Op::Glu {
            kind: Glu::Swiglu,
            swapped: false,
        };
        assert_eq!(ok(op, &[&f(&[8, 3])]), f(&[4, 3]));
        assert_eq!(ok(op, &[&f(&[8, 3]), &f(&[8, 3])]), f(&[8, 3]));
        assert!(err(op, &[&f(&[7, 3])]).contains("halves"));
    }

    /// Operands as the graphs of real models have them, which must not be refused.
    #[test]
    fn what_models_need_is_accepted() {
        use DType::*;
        let rope = Op::Rope(Rope::new(64, RopeMode::Neox, 10000.0));
        // Queries inside of rows that hold keys and values, too: gaps between tokens.
        let fused = Layout::strided(F32, [64, 16, 5, 1], [4, 256, 24 * 256, 5 * 24 * 256]).unwrap();
        ok(rope, &[&fused, &t(I32, &[5])]);
        ok(rope, &[&fused, &t(I32, &[5]), &f(&[32])]);
        for (a, b) in [(F32, F16), (F16, F32), (F16, F16), (BF16, F32), (F32, BF16)] {
            assert_eq!(ok(Op::Add, &[&t(a, &[8, 3]), &t(b, &[8])]).dtype(), a);
        }
        ok(
            Op::Concat { dim: 1 },
            &[&t(Q8_0, &[64, 2]), &t(Q8_0, &[64, 3])],
        );
        ok(
            Op::Concat { dim: 0 },
            &[&t(Q8_0, &[64, 2]), &t(Q8_0, &[32, 2])],
        );
        let table = t(Q4_0, &[64, 10, 3, 2]);
        assert_eq!(
            ok(Op::GetRows, &[&table, &t(I32, &[5, 3, 2])]),
            f(&[64, 5, 3, 2])
        );
        assert_eq!(
            ok(Op::GetRows, &[&t(I32, &[1, 8]), &t(I32, &[2])]).dtype(),
            I32
        );
        for (rows, index) in [(F32, I64), (F32, I32), (F16, I64)] {
            let cache = t(Q8_0, &[64, 512, 4]);
            ok(
                Op::SetRows,
                &[&t(rows, &[64, 3, 4]), &t(index, &[3, 2]), &cache],
            );
        }
        // A value cache that is written transposed, element by element.
        ok(
            Op::SetRows,
            &[&f(&[1, 96]), &t(I64, &[96]), &t(F16, &[1, 4096])],
        );
        let cache = Layout::strided(F16, [64, 32, 8, 1], [2, 1024, 128, 32768]).unwrap();
        ok(MUL_MAT, &[&cache, &f(&[64, 5, 32])]);
        ok(MUL_MAT, &[&t(F16, &[64, 7]), &t(F16, &[64, 5])]);
        let attention = Op::FlashAttn {
            scale: 0.125,
            max_bias: 0.0,
            softcap: 30.0,
            precision: Precision::F32,
        };
        let q = f(&[64, 16, 5]).permuted([0, 2, 1, 3]).unwrap();
        let mask = t(F16, &[32, 8]);
        let quantized = Layout::strided(Q8_0, [64, 32, 8, 1], [34, 544, 68, 17408]).unwrap();
        for kv in [&cache, &quantized] {
            let sinks = f(&[16]);
            assert_eq!(ok(attention, &[&q, kv, kv, &mask, &sinks]), f(&[64, 16, 5]));
        }
        let op = Op::SoftMax {
            scale: 1.0,
            max_bias: 8.0,
        };
        ok(op, &[&f(&[32, 5, 16]), &mask, &f(&[16])]);
        let turned = f(&[5, 8]).permuted([1, 0, 2, 3]).unwrap();
        let pad = Op::Pad {
            before: [0; 4],
            after: [0, 3, 0, 0],
        };
        ok(pad, &[&turned]);
        ok(Op::Unary(Unary::Tanh), &[&turned]);
        ok(
            Op::Repeat {
                shape: [4, 6, 1, 1],
            },
            &[&t(I32, &[4, 3])],
        );
        let halves = Layout::strided(F32, [32, 5, 1, 1], [4, 256, 1280, 1280]).unwrap();
        let swiglu = Op::Glu {
            kind: Glu::Swiglu,
            swapped: false,
        };
        ok(swiglu, &[&halves, &halves]);
        ok(Op::Cpy, &[&turned, &t(F16, &[40])]);
        ok(Op::Cast { dtype: F16 }, &[&turned]);
        // Chosen experts: a window into a sorted row.
        let chosen = Layout::strided(I32, [2, 5, 1, 1], [4, 32, 160, 160]).unwrap();
        let expert = Op::MulMatId {
            precision: Precision::Default,
        };
        for rows in [1, 2] {
            ok(
                expert,
                &[&t(Q4_0, &[64, 16, 8]), &f(&[64, rows, 5]), &chosen],
            );
        }
        ok(Op::AddId, &[&f(&[16, 2, 5]), &f(&[16, 8]), &chosen]);
        // Empty batches are tensors, too.
        ok(Op::RmsNorm { eps: 1e-6 }, &[&f(&[64, 0])]);
        ok(MUL_MAT, &[&t(Q4_0, &[64, 7]), &f(&[64, 0])]);
        ok(
            Op::Reshape {
                shape: [8, 8, 0, 1],
            },
            &[&f(&[64, 0])],
        );
    }

    #[test]
    fn destinations_do_not_overlap_themselves() {
        let same = Layout::strided(DType::F32, [4, 3, 1, 1], [4, 0, 0, 0]).unwrap();
        assert!(err(Op::Cpy, &[&f(&[4, 3]), &same]).contains("share memory"));
        assert!(
            err(Op::SetRows, &[&f(&[4, 1]), &t(DType::I32, &[1]), &same]).contains("share memory")
        );
        let mask = Op::DiagMaskInf { past: usize::MAX };
        assert!(err(mask, &[&f(&[4, 3])]).contains("past"));
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let huge = usize::MAX / 8;
        assert!(
            err(
                Op::Pad {
                    before: [huge, 0, 0, 0],
                    after: [usize::MAX, 0, 0, 0]
                },
                &[&f(&[2])]
            )
            .contains("overflow")
        );
        assert!(
            err(
                Op::Repeat {
                    shape: [huge, 2, 1, 1]
                },
                &[&f(&[1])]
            )
            .contains("overflow")
        );
        assert!(
            err(
                Op::Arange {
                    start: 0.0,
                    stop: f32::INFINITY,
                    step: 1.0
                },
                &[]
            )
            .contains("range")
        );
        assert!(
            err(
                Op::Arange {
                    start: f32::NAN,
                    stop: 1.0,
                    step: 1.0
                },
                &[]
            )
            .contains("range")
        );
    }

    #[test]
    fn gradients_have_the_shape_of_operands() {
        let (x, g) = (f(&[8, 3, 2]), f(&[4, 3, 2]));
        assert_eq!(ok(Op::OutProd, &[&x, &g]), f(&[8, 4, 2]));
        assert!(err(Op::OutProd, &[&x, &f(&[4, 5, 2])]).contains("3 and 5"));
        let turned = x.permuted([1, 0, 2, 3]).unwrap();
        assert!(err(Op::OutProd, &[&turned, &f(&[4, 8, 2])]).contains("transposed"));
        let back = Op::RepeatBack {
            shape: [4, 1, 2, 1],
        };
        assert_eq!(ok(back, &[&x]), f(&[4, 1, 2]));
        assert!(err(back, &[&f(&[6, 1, 2])]).contains("repeat"));
        let none = Op::RepeatBack {
            shape: [0, 1, 1, 1],
        };
        assert!(err(none, &[&f(&[0])]).contains("repeat"));
        assert_eq!(ok(Op::SiluBack, &[&x, &x]), x);
        assert!(err(Op::RmsNormBack { eps: -1.0 }, &[&x, &x]).contains("eps"));
        assert!(err(Op::SoftMaxBack { scale: 1.0 }, &[&x, &g]).contains("shape"));
        let rows = Op::GetRowsBack { rows: 9 };
        let ids = t(DType::I32, &[3]);
        assert_eq!(ok(rows, &[&f(&[8, 3]), &ids]), f(&[8, 9]));
        assert!(err(rows, &[&f(&[8, 4]), &ids]).contains("row number"));
        assert_eq!(ok(Op::CrossEntropyLoss, &[&x, &x]), f(&[1]));
        assert_eq!(ok(Op::CrossEntropyLossBack, &[&f(&[1]), &x, &x]), x);
        assert!(err(Op::CrossEntropyLossBack, &[&x, &x, &x]).contains("one element"));
    }

    #[test]
    fn steps_need_one_shape_and_all_parameters() {
        let (w, seven) = (f(&[8, 3]), f(&[7]));
        assert_eq!(ok(Op::OptStepAdamW, &[&w, &w, &w, &w, &seven]), w);
        assert!(err(Op::OptStepAdamW, &[&w, &w, &f(&[8]), &w, &seven]).contains("source 2"));
        assert!(err(Op::OptStepAdamW, &[&w, &w, &w, &w, &f(&[6])]).contains("7 parameters"));
        assert_eq!(ok(Op::OptStepSgd, &[&w, &w, &f(&[2])]), w);
        let half = t(DType::F16, &[8, 3]);
        assert!(err(Op::OptStepSgd, &[&half, &w, &f(&[2])]).contains("f16"));
    }

    #[test]
    fn elementwise_types() {
        assert!(err(Op::Unary(Unary::Silu), &[&t(DType::Q4_0, &[32])]).contains("q4_0"));
        assert_eq!(
            ok(Op::Unary(Unary::Silu), &[&t(DType::F16, &[32])]),
            t(DType::F16, &[32])
        );
        assert!(err(Op::Add, &[&f(&[4]), &f(&[3])]).contains("repeat"));
        assert_eq!(ok(Op::Add, &[&f(&[4, 6]), &f(&[2, 3])]), f(&[4, 6]));
    }
}
