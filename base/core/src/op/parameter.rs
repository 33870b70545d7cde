//! Parameter types: how each is printed, and how it is serialised exactly.

use super::{Glu, Unary};
use crate::dtype::DType;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::Debug;

/// A type of parameters of operations.
pub(super) trait Parameter: Debug + PartialEq + Serialize + DeserializeOwned {
    /// Returns whether both are equal bit by bit.
    fn is_same(&self, other: &Self) -> bool {
        self == other
    }

    /// Adds the name and value to print, if any, to `list`.
    fn list(&self, name: &'static str, list: &mut Vec<(&'static str, String)>) {
        list.push((name, format!("{self:?}")));
    }

    /// Serialises like [`Serialize`], but exactly.
    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize(serializer)
    }

    /// Deserialises like [`Deserialize`], but exactly.
    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)
    }
}

impl Parameter for usize {}
impl<const COUNT: usize> Parameter for [usize; COUNT] where
    [usize; COUNT]: Serialize + DeserializeOwned
{
}
impl Parameter for DType {}
impl Parameter for SortOrder {}
impl Parameter for Interpolation {}
impl Parameter for Pool {}
impl Parameter for Triangle {}
impl Parameter for Window {}

impl Parameter for f32 {
    fn is_same(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits()
    }

    fn list(&self, name: &'static str, list: &mut Vec<(&'static str, String)>) {
        list.push((name, self.to_string())); // no exponents
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        crate::exact::serialize(self, serializer)
    }

    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::exact::deserialize(deserializer)
    }
}

impl Parameter for bool {
    fn list(&self, name: &'static str, list: &mut Vec<(&'static str, String)>) {
        if *self {
            list.push((name, "true".into()));
        }
    }
}

impl Parameter for Precision {
    fn list(&self, name: &'static str, list: &mut Vec<(&'static str, String)>) {
        if *self != Precision::Default {
            list.push((name, format!("{self:?}")));
        }
    }
}

impl Parameter for Rope {
    fn list(&self, _: &'static str, list: &mut Vec<(&'static str, String)>) {
        self.dims.list("dims", list);
        list.push(("mode", format!("{:?}", self.mode)));
        self.freq_base.list("base", list);
    }
}

/// The operation's name is the function's name.
impl Parameter for Unary {
    fn list(&self, _: &'static str, _: &mut Vec<(&'static str, String)>) {}
}

/// The operation's name is the function's name.
impl Parameter for Glu {
    fn list(&self, _: &'static str, _: &mut Vec<(&'static str, String)>) {}
}

/// A parameter that is compared bit by bit.
pub(super) struct Bits<'a, T>(pub &'a T);

impl<T: Parameter> PartialEq for Bits<'_, T> {
    fn eq(&self, other: &Self) -> bool {
        self.0.is_same(other.0)
    }
}

/// For `#[serde(with)]` in the table: parameters round-trip bit by bit, including NaN and -0.
pub(super) fn serialize<T: Parameter, S: Serializer>(
    x: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    x.write(serializer)
}

pub(super) fn deserialize<'de, T: Parameter, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    T::read(deserializer)
}

/// Minimum precision of the accumulation of a product. A device may always use a higher one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Precision {
    /// The device's choice.
    #[default]
    Default,
    F32,
    BF16,
    F16,
    Q8,
    Q4,
}

/// Parameters of rotary position embedding with YaRN scaling ([Peng et al.
/// 2023](https://arxiv.org/abs/2309.00071)).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Rope {
    /// Number of rotated elements of each head. With [`RopeMode::Vision`], half of that number.
    /// Even.
    pub dims: usize,
    /// Number of elements of each head before the rotated ones. Even.
    pub offset: usize,
    /// Assignment of elements to pairs.
    pub mode: RopeMode,
    /// Context length of the model's training, for YaRN's corrections.
    pub original_context: usize,
    /// Base of the geometric series of frequencies.
    #[serde(with = "crate::exact")]
    pub freq_base: f32,
    /// Factor of the positions: 1 / (linear scaling factor).
    #[serde(with = "crate::exact")]
    pub freq_scale: f32,
    /// Mix of interpolation and extrapolation. 0 without YaRN.
    #[serde(with = "crate::exact")]
    pub ext_factor: f32,
    /// Factor of the rotated vector's magnitude.
    #[serde(with = "crate::exact")]
    pub attn_factor: f32,
    /// Rotations above which a dimension extrapolates.
    #[serde(with = "crate::exact")]
    pub beta_fast: f32,
    /// Rotations below which a dimension interpolates.
    #[serde(with = "crate::exact")]
    pub beta_slow: f32,
}

impl Rope {
    /// Returns the number of positions of each token.
    pub fn axes(&self) -> usize {
        match self.mode.sections() {
            Some(sections) => sections.len(),
            None => 1,
        }
    }

    /// Returns the number of rotated pairs of each head.
    pub fn pairs(&self) -> usize {
        match self.mode {
            RopeMode::Vision { .. } => self.dims,
            _ => self.dims / 2,
        }
    }

    /// Returns the rotation of pair number `pair`.
    pub fn turn(&self, pair: usize) -> RopeAngle {
        let Some(sections) = self.mode.sections() else {
            return RopeAngle {
                axis: 0,
                step: pair,
            };
        };
        let [a, b, c, d] = sections.map(|n| n as usize);
        let starts = [0, a, a + b, a + b + c];
        let sector = pair % (a + b + c + d).max(1);
        let axis = match self.mode {
            RopeMode::Interleaved { .. } => {
                let axis = sector % 3;
                if sector < 3 * [a, b, c][axis] {
                    axis
                } else {
                    3
                }
            }
            _ => (1..4).filter(|&i| sector >= starts[i]).count(),
        };
        let start = starts[axis];
        // As in ggml, an axis that begins at the same pair as an earlier one does not restart the
        // frequencies.
        let begins_anew =
            matches!(self.mode, RopeMode::Vision { .. }) && !starts[..axis].contains(&start);
        let step = if begins_anew { sector - start } else { pair };
        RopeAngle { axis, step }
    }

    /// Returns plain rotary embedding of `dims` elements with base `freq_base`, without scaling.
    pub fn new(dims: usize, mode: RopeMode, freq_base: f32) -> Self {
        Rope {
            dims,
            offset: 0,
            mode,
            original_context: 0,
            freq_base,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        }
    }
}

/// Compares bit by bit, like all operations.
impl PartialEq for Rope {
    fn eq(&self, other: &Self) -> bool {
        let whole = |rope: &Rope| (rope.dims, rope.offset, rope.mode, rope.original_context);
        let floats = |rope: &Rope| {
            [
                rope.freq_base,
                rope.freq_scale,
                rope.ext_factor,
                rope.attn_factor,
                rope.beta_fast,
                rope.beta_slow,
            ]
            .map(f32::to_bits)
        };
        whole(self) == whole(other) && floats(self) == floats(other)
    }
}

impl Eq for Rope {}

/// Rotation angle of a pair: `positions[axis] * freq_base^(-2 step / dims)`, before scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeAngle {
    /// Index of the token's position.
    pub axis: usize,
    /// Steps down the series of frequencies.
    pub step: usize,
}

/// Pairs of elements that are rotated together, and the positions that rotate them.
///
/// With `sections`, a token has four positions, such as time, height and width, and a rarely used
/// one. Section `i` is the number of pairs that position `i` rotates, in order. After the last
/// section the first one starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RopeMode {
    /// Adjacent elements: `(0, 1), (2, 3), …`
    Normal,
    /// Halves: `(0, dims/2), (1, dims/2 + 1), …`
    Neox,
    /// Halves, as in Qwen2-VL.
    #[allow(missing_docs)]
    Multi { sections: [u32; 4] },
    /// Halves whose pairs alternate between the first three positions, as in Qwen3-VL. Each
    /// position gets its section's number of pairs. The fourth gets the rest.
    #[allow(missing_docs)]
    Interleaved { sections: [u32; 4] },
    /// Halves of the whole head, `dims` pairs. Frequencies restart with each section.
    #[allow(missing_docs)]
    Vision { sections: [u32; 4] },
}

impl RopeMode {
    /// Returns the number of pairs for each of a token's positions, if it has several.
    pub fn sections(self) -> Option<[u32; 4]> {
        match self {
            RopeMode::Normal | RopeMode::Neox => None,
            RopeMode::Multi { sections }
            | RopeMode::Interleaved { sections }
            | RopeMode::Vision { sections } => Some(sections),
        }
    }
}

/// Direction of a sort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SortOrder {
    /// Smallest first.
    Ascending,
    /// Largest first.
    Descending,
}

/// Movement of a convolution's kernel over its input, along width, height and depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Window {
    /// Distances between kernel positions.
    pub stride: [u32; 3],
    /// Zeros before the first element and after the last one.
    pub padding: [u32; 3],
    /// Input distances between adjacent kernel elements.
    pub dilation: [u32; 3],
}

impl Default for Window {
    fn default() -> Self {
        Window {
            stride: [1; 3],
            padding: [0; 3],
            dilation: [1; 3],
        }
    }
}

/// Reduction of a pooling window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Pool {
    Max,
    Mean,
}

/// Interpolation between elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Interpolation {
    Nearest,
    Bilinear,
    /// Bicubic, with the kernel of [Keys 1981](https://doi.org/10.1109/TASSP.1981.1163711) for `a =
    /// -0.75`.
    Bicubic,
}

/// Part of a square matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Triangle {
    /// Right of the diagonal, including the diagonal.
    UpperDiag,
    /// Right of the diagonal.
    Upper,
    /// Left of the diagonal, including the diagonal.
    LowerDiag,
    /// Left of the diagonal.
    Lower,
}
