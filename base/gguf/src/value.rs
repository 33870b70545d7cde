//! Metadata values: the thirteen types of GGUF.

use crate::strings::StringArray;
use std::fmt;

/// Type of a metadata value. The discriminants are the format's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names say it all.
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = {
        use ValueType::*;
        [
            U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64,
        ]
    };

    /// Returns the type with the format's number `id`.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Returns the format's number of this type.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Returns the name of this type, as ggml's tools print it.
    pub fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            String => "str",
            Array => "arr",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // One variant a type, named like it.
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Should be UTF-8, but this is checked only when the value is read as `&str`.
    String(Box<[u8]>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of metadata values of one type. Arrays of arrays are not supported (nor are they by
/// ggml).
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // One variant a type, named like it.
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(StringArray),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Runs `$body` with `$items` bound to the vector of a numeric or boolean array, or `$strings` to
/// the strings.
macro_rules! with_array {
    ($array:expr, $items:ident => $body:expr, $strings:ident => $string_body:expr) => {
        match $array {
            Array::U8($items) => $body,
            Array::I8($items) => $body,
            Array::U16($items) => $body,
            Array::I16($items) => $body,
            Array::U32($items) => $body,
            Array::I32($items) => $body,
            Array::F32($items) => $body,
            Array::Bool($items) => $body,
            Array::U64($items) => $body,
            Array::I64($items) => $body,
            Array::F64($items) => $body,
            Array::String($strings) => $string_body,
        }
    };
}
pub(crate) use with_array;

impl Value {
    /// Returns the type of the value, [`ValueType::Array`] for every array.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// Returns the value of any integer type, without loss, or `None` for other types.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Returns a description for messages: the type, and for arrays also the length.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Array(array) => format!("arr of {} {}", array.len(), array.element_type()),
            _ => self.value_type().to_string(),
        }
    }
}

impl Array {
    /// Returns the type of the elements.
    pub fn element_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::F32(_) => ValueType::F32,
            Array::Bool(_) => ValueType::Bool,
            Array::String(_) => ValueType::String,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F64(_) => ValueType::F64,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        with_array!(self, items => items.len(), strings => strings.len())
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Writes numbers, quoted strings, and the start of long strings and arrays.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::String(bytes) => f.write_str(&crate::error::quoted(&lossy_start(bytes))),
            Value::Array(array) => array.fmt(f),
        }
    }
}

/// Writes the first elements and the total number.
impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let shown: Vec<String> = with_array!(
            self,
            items => items.iter().take(SHOWN).map(ToString::to_string).collect(),
            strings => strings
                .iter()
                .take(SHOWN)
                .map(|string| crate::error::quoted(&lossy_start(string)))
                .collect()
        );
        write!(f, "[{}", shown.join(", "))?;
        if self.len() > SHOWN {
            write!(f, ", ... {} in all", self.len())?;
        }
        f.write_str("]")
    }
}

/// Returns the start of a string that may be huge and may not be UTF-8, for display.
fn lossy_start(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(&bytes[..bytes.len().min(512)])
}

macro_rules! from_plain {
    ($($type:ty => $variant:ident),*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Value::$variant(value)
            }
        }
        impl From<Vec<$type>> for Value {
            fn from(values: Vec<$type>) -> Self {
                Value::Array(Array::$variant(values))
            }
        }
    )*};
}
from_plain!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32,
    bool => Bool,
    u64 => U64, i64 => I64, f64 => F64);

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::String(value.as_bytes().into())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Value::String(value.into_bytes().into())
    }
}

impl From<StringArray> for Value {
    fn from(strings: StringArray) -> Self {
        Value::Array(Array::String(strings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_numbers_invert() {
        for value_type in ValueType::ALL {
            assert_eq!(ValueType::from_id(value_type.id()), Some(value_type));
        }
        assert_eq!(ValueType::from_id(13), None);
        assert_eq!(ValueType::from_id(u32::MAX), None);
    }

    #[test]
    fn display_is_short() {
        assert_eq!(Value::from(vec![1u32, 2]).to_string(), "[1, 2]");
        assert_eq!(
            Value::from((0..10).collect::<Vec<i32>>()).to_string(),
            "[0, 1, 2, 3, 4, 5, 6, 7, ... 10 in all]"
        );
        assert_eq!(Value::from("a\n").to_string(), r#""a\n""#);
        assert!(Value::from("x".repeat(1 << 20)).to_string().len() < 100);
    }
}
