//! Places of ggml's operation parameters: words of the tensor, or properties of the result.

use crate::numbers::{MAX_OP_PARAMS, glu, precision, rope_mode};
use crate::{Description, UnsupportedConversion};
use samite_core::op::{
    Glu, Interpolation, Pool, Precision, Rope, RopeMode, SortOrder, Triangle, Unary, Window,
};
use samite_core::{DType, Shape};

/// Parameter words.
pub type Words = [i32; MAX_OP_PARAMS];

/// Place of a parameter of type `T`.
pub trait Field<T> {
    /// Writes the parameter to the words. Parameters that the result shows need no word.
    fn write(&self, value: T, words: &mut Words) -> Result<(), UnsupportedConversion>;

    /// Reads it from a tensor.
    fn read(&self, tensor: &Description) -> Result<T, UnsupportedConversion>;
}

/// A float in a word.
pub struct Float(pub usize);

impl Field<f32> for Float {
    fn write(&self, value: f32, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[self.0] = value.to_bits().cast_signed();
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<f32, UnsupportedConversion> {
        Ok(f32::from_bits(tensor.op_params[self.0].cast_unsigned()))
    }
}

/// A non-negative number in a word.
pub struct Size(pub usize);

impl Field<usize> for Size {
    fn write(&self, value: usize, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[self.0] = i32::try_from(value)
            .map_err(|_| format!("parameter {value} does not fit into 32 bits"))?;
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<usize, UnsupportedConversion> {
        let word = tensor.op_params[self.0];
        usize::try_from(word)
            .map_err(|_| format!("parameter {} is negative: {word}", self.0).into())
    }
}

/// Non-negative numbers in these words.
pub struct Sizes<const N: usize>(pub [usize; N]);

impl<const N: usize> Field<[usize; N]> for Sizes<N> {
    fn write(&self, value: [usize; N], words: &mut Words) -> Result<(), UnsupportedConversion> {
        let mut pairs = self.0.into_iter().zip(value);
        pairs.try_for_each(|(at, size)| Size(at).write(size, words))
    }

    fn read(&self, tensor: &Description) -> Result<[usize; N], UnsupportedConversion> {
        let mut sizes = [0; N];
        for (size, at) in sizes.iter_mut().zip(self.0) {
            *size = Size(at).read(tensor)?;
        }
        Ok(sizes)
    }
}

/// Strides, paddings and dilations of a convolution kernel with this number of dimensions, from
/// word 0 on.
pub struct Windows(pub usize);

impl Field<Window> for Windows {
    fn write(&self, window: Window, words: &mut Words) -> Result<(), UnsupportedConversion> {
        for d in 0..self.0 {
            let parts = [window.stride[d], window.padding[d], window.dilation[d]];
            for (part, number) in parts.into_iter().enumerate() {
                Size(part * self.0 + d).write(number as usize, words)?;
            }
        }
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<Window, UnsupportedConversion> {
        let mut window = Window::default();
        for d in 0..self.0 {
            let number = |part: usize| Size(part * self.0 + d).read(tensor).map(|n| n as u32);
            window.stride[d] = number(0)?;
            window.padding[d] = number(1)?;
            window.dilation[d] = number(2)?;
        }
        Ok(window)
    }
}

/// Padding after the elements, of circular padding, which a word marks.
pub struct CircularPadding;

impl Field<Shape> for CircularPadding {
    fn write(&self, after: Shape, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[8] = 1;
        Sizes([1, 3, 5, 7]).write(after, words)
    }

    fn read(&self, tensor: &Description) -> Result<Shape, UnsupportedConversion> {
        Sizes([1, 3, 5, 7]).read(tensor)
    }
}

/// Distances by which elements are shifted, in words 0 to 3. ggml's may be negative.
pub struct Shifts;

impl Field<Shape> for Shifts {
    fn write(&self, shift: Shape, words: &mut Words) -> Result<(), UnsupportedConversion> {
        Sizes([0, 1, 2, 3]).write(shift, words)
    }

    fn read(&self, tensor: &Description) -> Result<Shape, UnsupportedConversion> {
        let extents = shape(tensor)?;
        Ok(std::array::from_fn(|d| {
            let word = i64::from(tensor.op_params[d]);
            // Both are less than 2^63.
            word.rem_euclid(extents[d].max(1) as i64) as usize
        }))
    }
}

/// A bit of a word.
pub struct Bit(pub usize, pub u32);

impl Field<bool> for Bit {
    fn write(&self, value: bool, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[self.0] |= i32::from(value) << self.1;
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<bool, UnsupportedConversion> {
        Ok(tensor.op_params[self.0] >> self.1 & 1 != 0)
    }
}

/// Interpolation of an image: the lowest 8 bits of word 0.
pub struct Scaling;

impl Field<Interpolation> for Scaling {
    fn write(&self, value: Interpolation, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[0] |= match value {
            Interpolation::Nearest => 0,
            Interpolation::Bilinear => 1,
            Interpolation::Bicubic => 2,
        };
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<Interpolation, UnsupportedConversion> {
        match tensor.op_params[0] & !(3 << 8) {
            0 => Ok(Interpolation::Nearest),
            1 => Ok(Interpolation::Bilinear),
            2 => Ok(Interpolation::Bicubic),
            other => Err(format!("interpolation {other} is not known").into()),
        }
    }
}

/// A 64-bit number in this word and the next.
pub struct WideField(pub usize);

impl Field<usize> for WideField {
    fn write(&self, value: usize, words: &mut Words) -> Result<(), UnsupportedConversion> {
        let [a, b, c, d, e, f, g, h] = (value as u64).to_ne_bytes();
        words[self.0] = i32::from_ne_bytes([a, b, c, d]);
        words[self.0 + 1] = i32::from_ne_bytes([e, f, g, h]);
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<usize, UnsupportedConversion> {
        let words = [self.0, self.0 + 1].map(|at| tensor.op_params[at].to_ne_bytes());
        let [[a, b, c, d], [e, f, g, h]] = words;
        usize::try_from(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
            .map_err(|_| format!("parameter {} does not fit into memory", self.0).into())
    }
}

/// A boolean in a word.
pub struct Flag(pub usize);

impl Field<bool> for Flag {
    fn write(&self, value: bool, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[self.0] = i32::from(value);
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<bool, UnsupportedConversion> {
        Ok(tensor.op_params[self.0] != 0)
    }
}

/// One of several values, each represented by a number in a word.
pub struct OneOf<T: 'static> {
    /// Index of the word.
    at: usize,
    what: &'static str,
    numbers: &'static [(T, i32)],
}

impl<T: Copy + PartialEq + std::fmt::Debug> Field<T> for OneOf<T> {
    fn write(&self, value: T, words: &mut Words) -> Result<(), UnsupportedConversion> {
        let known = self.numbers.iter().find(|(known, _)| *known == value);
        let (_, number) =
            known.ok_or_else(|| format!("{} {value:?} has no form in ggml", self.what))?;
        words[self.at] = *number;
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<T, UnsupportedConversion> {
        let word = tensor.op_params[self.at];
        let known = self.numbers.iter().find(|(_, number)| *number == word);
        let known = known.ok_or_else(|| format!("{} {word} is not known", self.what))?;
        Ok(known.0)
    }
}

/// Returns a precision in word `at`.
pub const fn precision_at(at: usize) -> OneOf<Precision> {
    OneOf {
        at,
        what: "precision",
        numbers: &[
            (Precision::Default, precision::DEFAULT),
            (Precision::F32, precision::F32),
            (Precision::BF16, precision::BF16),
            (Precision::F16, precision::F16),
            (Precision::Q8, precision::Q8),
            (Precision::Q4, precision::Q4),
        ],
    }
}

/// Returns a reduction of pooling in word `at`.
pub const fn pool_at(at: usize) -> OneOf<Pool> {
    OneOf {
        at,
        what: "pooling",
        numbers: &[(Pool::Max, 0), (Pool::Mean, 1)],
    }
}

/// Returns a part of a matrix in word `at`.
pub const fn triangle_at(at: usize) -> OneOf<Triangle> {
    OneOf {
        at,
        what: "triangle",
        numbers: &[
            (Triangle::UpperDiag, 0),
            (Triangle::Upper, 1),
            (Triangle::LowerDiag, 2),
            (Triangle::Lower, 3),
        ],
    }
}

/// Returns the direction of a sort in word `at`.
pub const fn order_at(at: usize) -> OneOf<SortOrder> {
    OneOf {
        at,
        what: "sort order",
        numbers: &[(SortOrder::Ascending, 0), (SortOrder::Descending, 1)],
    }
}

/// Pairs of elements for rotary positions: in word 2, with sections from word 11 on.
struct RopeFieldPairs;

impl Field<RopeMode> for RopeFieldPairs {
    fn write(&self, mode: RopeMode, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[2] = match mode {
            RopeMode::Normal => rope_mode::NORMAL,
            RopeMode::Neox => rope_mode::NEOX,
            RopeMode::Multi { .. } => rope_mode::MULTI,
            RopeMode::Interleaved { .. } => rope_mode::INTERLEAVED,
            RopeMode::Vision { .. } => rope_mode::VISION,
        };
        let sections = mode.sections().unwrap_or_default();
        SECTIONS.write(sections.map(|n| n as usize), words)
    }

    fn read(&self, tensor: &Description) -> Result<RopeMode, UnsupportedConversion> {
        // Words hold 31 bits.
        let sections = || Ok::<_, UnsupportedConversion>(SECTIONS.read(tensor)?.map(|n| n as u32));
        Ok(match tensor.op_params[2] {
            rope_mode::NORMAL => RopeMode::Normal,
            rope_mode::NEOX => RopeMode::Neox,
            rope_mode::MULTI => RopeMode::Multi {
                sections: sections()?,
            },
            rope_mode::INTERLEAVED => RopeMode::Interleaved {
                sections: sections()?,
            },
            rope_mode::VISION => RopeMode::Vision {
                sections: sections()?,
            },
            other => return Err(format!("rope mode {other} is not known").into()),
        })
    }
}

const SECTIONS: Sizes<4> = Sizes([11, 12, 13, 14]);

/// Shape of the result.
pub struct ResultShape;

impl Field<Shape> for ResultShape {
    fn write(&self, _: Shape, _: &mut Words) -> Result<(), UnsupportedConversion> {
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<Shape, UnsupportedConversion> {
        shape(tensor)
    }
}

/// Extent 0 of the result.
pub struct ResultRow;

impl Field<usize> for ResultRow {
    fn write(&self, _: usize, _: &mut Words) -> Result<(), UnsupportedConversion> {
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<usize, UnsupportedConversion> {
        Ok(shape(tensor)?[0])
    }
}

/// Extent 1 of the result.
pub struct ResultRows;

impl Field<usize> for ResultRows {
    fn write(&self, _: usize, _: &mut Words) -> Result<(), UnsupportedConversion> {
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<usize, UnsupportedConversion> {
        Ok(shape(tensor)?[1])
    }
}

/// Strides of the result, except for dimension 0.
pub struct ResultStrides;

impl Field<[usize; 3]> for ResultStrides {
    fn write(&self, _: [usize; 3], _: &mut Words) -> Result<(), UnsupportedConversion> {
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<[usize; 3], UnsupportedConversion> {
        let [_, strides @ ..] = tensor.nb;
        Ok(strides)
    }
}

/// Type of the result.
pub struct ResultType;

impl Field<DType> for ResultType {
    fn write(&self, _: DType, _: &mut Words) -> Result<(), UnsupportedConversion> {
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<DType, UnsupportedConversion> {
        dtype(tensor)
    }
}

/// All parameters of rotary positions.
pub struct RopeFields;

impl Field<Rope> for RopeFields {
    fn write(&self, rope: Rope, words: &mut Words) -> Result<(), UnsupportedConversion> {
        Size(1).write(rope.dims, words)?;
        RopeFieldPairs.write(rope.mode, words)?;
        Size(4).write(rope.original_context, words)?;
        Float(5).write(rope.freq_base, words)?;
        Float(6).write(rope.freq_scale, words)?;
        Float(7).write(rope.ext_factor, words)?;
        Float(8).write(rope.attn_factor, words)?;
        Float(9).write(rope.beta_fast, words)?;
        Float(10).write(rope.beta_slow, words)?;
        Size(15).write(rope.offset, words)
    }

    fn read(&self, tensor: &Description) -> Result<Rope, UnsupportedConversion> {
        Ok(Rope {
            dims: Size(1).read(tensor)?,
            mode: RopeFieldPairs.read(tensor)?,
            original_context: Size(4).read(tensor)?,
            freq_base: Float(5).read(tensor)?,
            freq_scale: Float(6).read(tensor)?,
            ext_factor: Float(7).read(tensor)?,
            attn_factor: Float(8).read(tensor)?,
            beta_fast: Float(9).read(tensor)?,
            beta_slow: Float(10).read(tensor)?,
            offset: Size(15).read(tensor)?,
        })
    }
}

/// Element-wise function: its place in [`Unary::ALL`] in word 0, followed by its parameters.
pub struct Function;

impl Field<Unary> for Function {
    fn write(&self, function: Unary, words: &mut Words) -> Result<(), UnsupportedConversion> {
        let place = Unary::ALL
            .iter()
            .position(|known| known.name() == function.name());
        Size(0).write(place.unwrap_or(usize::MAX), words)?;
        if let Unary::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } = function
        {
            for (at, value) in [alpha_n, alpha_p, beta, eps].into_iter().enumerate() {
                Float(1 + at).write(value, words)?;
            }
        }
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<Unary, UnsupportedConversion> {
        let number = tensor.op_params[0];
        let place = usize::try_from(number).ok();
        match place.and_then(|place| Unary::ALL.get(place)) {
            Some(Unary::Xielu { .. }) => Ok(Unary::Xielu {
                alpha_n: Float(1).read(tensor)?,
                alpha_p: Float(2).read(tensor)?,
                beta: Float(3).read(tensor)?,
                eps: Float(4).read(tensor)?,
            }),
            Some(function) => Ok(*function),
            None => Err(format!("function {number} is not known").into()),
        }
    }
}

/// Gated unit: its number in word 0, its parameters in words 2 and 3.
pub struct GluField;

impl Field<Glu> for GluField {
    fn write(&self, unit: Glu, words: &mut Words) -> Result<(), UnsupportedConversion> {
        words[0] = match unit {
            Glu::Reglu => glu::REGLU,
            Glu::Geglu => glu::GEGLU,
            Glu::Swiglu => glu::SWIGLU,
            Glu::SwigluOai { alpha, limit } => {
                Float(2).write(alpha, words)?;
                Float(3).write(limit, words)?;
                glu::SWIGLU_OAI
            }
            Glu::GegluErf => glu::GEGLU_ERF,
            Glu::GegluQuick => glu::GEGLU_QUICK,
            Glu::SwigluClamp { limit } => {
                Float(3).write(limit, words)?;
                glu::SWIGLU_CLAMP
            }
        };
        Ok(())
    }

    fn read(&self, tensor: &Description) -> Result<Glu, UnsupportedConversion> {
        Ok(match tensor.op_params[0] {
            glu::REGLU => Glu::Reglu,
            glu::GEGLU => Glu::Geglu,
            glu::SWIGLU => Glu::Swiglu,
            glu::SWIGLU_OAI => Glu::SwigluOai {
                alpha: Float(2).read(tensor)?,
                limit: Float(3).read(tensor)?,
            },
            glu::GEGLU_ERF => Glu::GegluErf,
            glu::GEGLU_QUICK => Glu::GegluQuick,
            glu::SWIGLU_CLAMP => Glu::SwigluClamp {
                limit: Float(3).read(tensor)?,
            },
            other => return Err(format!("gated unit {other} is not known").into()),
        })
    }
}

/// Returns the element type of a tensor.
///
/// # Errors
/// If samite does not know ggml's number.
pub fn dtype(tensor: &Description) -> Result<DType, UnsupportedConversion> {
    DType::from_id(tensor.dtype)
        .ok_or_else(|| format!("element type {} is not known", tensor.dtype).into())
}

/// Returns the extents of a tensor.
///
/// # Errors
/// If one is negative.
pub fn shape(tensor: &Description) -> Result<Shape, UnsupportedConversion> {
    let mut shape = [0; 4];
    for (to, from) in shape.iter_mut().zip(tensor.ne) {
        *to = usize::try_from(from).map_err(|_| format!("extent {from} is negative"))?;
    }
    Ok(shape)
}
