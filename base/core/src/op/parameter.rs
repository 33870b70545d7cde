//! The types of parameters: how each is printed, and how it is written so that it comes back exactly.

use super::{Glu, Unary};
use crate::dtype::DType;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::Debug;

/// A type of parameters of operations.
pub(super) trait Parameter: Debug + PartialEq + Serialize + DeserializeOwned {
    /// Whether both are the same bit by bit.
    fn is_same(&self, other: &Self) -> bool {
        self == other
    }

    /// Adds what is to be printed, if anything, to `list`: a name and a value.
    fn list(&self, name: &'static str, list: &mut Vec<(&'static str, String)>) {
        list.push((name, format!("{self:?}")));
    }

    /// As [`Serialize`], but exact.
    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize(serializer)
    }

    /// As [`Deserialize`], but exact.
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

/// The name of the operation is that of the function.
impl Parameter for Unary {
    fn list(&self, _: &'static str, _: &mut Vec<(&'static str, String)>) {}
}

/// The name of the operation is that of the function.
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

/// For `#[serde(with)]` in the table: parameters come back bit by bit, NaN and -0 included.
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

/// Least precision that a product must be accumulated in. A device may always do better.
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

/// Parameters of rotary position embedding with YaRN scaling ([Peng et al. 2023](https://arxiv.org/abs/2309.00071)).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Rope {
    /// How many elements of each head are rotated. Even.
    pub dims: usize,
    /// Elements of each head before the rotated ones. Even.
    pub offset: usize,
    /// Which elements form a pair.
    pub mode: RopeMode,
    /// Context length that the model was trained with; used by YaRN's corrections.
    pub original_context: usize,
    /// Base of the geometric series of frequencies.
    #[serde(with = "crate::exact")]
    pub freq_base: f32,
    /// Factor of the positions: 1 / (linear scaling factor).
    #[serde(with = "crate::exact")]
    pub freq_scale: f32,
    /// Mix of interpolation and extrapolation; 0 for no YaRN.
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
    /// Plain rotary embedding of `dims` elements with base `freq_base`, without scaling.
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

/// Bit by bit, as operations are compared.
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

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RopeMode {
    /// Neighbours: `(0, 1), (2, 3), …`
    Normal,
    /// Halves: `(0, dims/2), (1, dims/2 + 1), …`
    Neox,
}

/// Direction of a sort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SortOrder {
    /// Smallest first.
    Ascending,
    /// Largest first.
    Descending,
}

/// How the kernel of a convolution moves over what it is applied to: along width, height and depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Window {
    /// Distances between its places.
    pub stride: [u32; 3],
    /// How far its first place begins before the first element; as far its last one may end behind the last element. There are zeros.
    pub padding: [u32; 3],
    /// Distances between elements that neighbours of the kernel are applied to.
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

/// What pooling takes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Pool {
    Max,
    Mean,
}

/// How elements between others come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Interpolation {
    Nearest,
    Bilinear,
    /// With the kernel of [Keys 1981](https://doi.org/10.1109/TASSP.1981.1163711) for `a = -0.75`.
    Bicubic,
}

/// What of a square matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Triangle {
    /// Right of the diagonal, and the diagonal.
    UpperDiag,
    /// Right of the diagonal.
    Upper,
    /// Left of the diagonal, and the diagonal.
    LowerDiag,
    /// Left of the diagonal.
    Lower,
}
