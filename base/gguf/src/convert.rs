//! Conversion of metadata values to Rust types. A mismatch gives an error with the reason.

use crate::strings::StringArray;
use crate::value::{Array, Value};

/// A Rust type that metadata values can be converted to.
///
/// Integers convert from every integer type if the value fits, floats from both float types. Arrays
/// convert to [`Vec`] with the same rules for each element, or without a copy to a slice of exactly
/// the stored type.
pub trait FromValue<'a>: Sized {
    /// Returns the name of the wanted type, for messages.
    fn wanted() -> String;

    /// Reads the value.
    ///
    /// # Errors
    /// A description of the value found, such as `str` or `i32 -1, which does not fit`.
    fn from_value(value: &'a Value) -> Result<Self, String>;
}

macro_rules! integers {
    ($($type:ident),*) => {$(
        impl FromValue<'_> for $type {
            fn wanted() -> String {
                stringify!($type).into()
            }

            fn from_value(value: &Value) -> Result<Self, String> {
                let integer = value.as_integer().ok_or_else(|| value.describe())?;
                integer.try_into().map_err(|_| does_not_fit(value.describe(), integer))
            }
        }

        impl FromValue<'_> for Vec<$type> {
            fn wanted() -> String {
                concat!("arr of ", stringify!($type)).into()
            }

            fn from_value(value: &Value) -> Result<Self, String> {
                fn all<S, T>(items: &[S], describe: impl Fn() -> String) -> Result<Vec<T>, String>
                where
                    S: Copy + Into<i128>,
                    T: TryFrom<S>,
                {
                    let convert = |(index, &item): (usize, &S)| {
                        T::try_from(item).map_err(|_| {
                            does_not_fit(format!("{}: element {index} is", describe()), item.into())
                        })
                    };
                    items.iter().enumerate().map(convert).collect()
                }
                let describe = || value.describe();
                match value {
                    Value::Array(Array::U8(items)) => all(items, describe),
                    Value::Array(Array::I8(items)) => all(items, describe),
                    Value::Array(Array::U16(items)) => all(items, describe),
                    Value::Array(Array::I16(items)) => all(items, describe),
                    Value::Array(Array::U32(items)) => all(items, describe),
                    Value::Array(Array::I32(items)) => all(items, describe),
                    Value::Array(Array::U64(items)) => all(items, describe),
                    Value::Array(Array::I64(items)) => all(items, describe),
                    _ => Err(value.describe()),
                }
            }
        }
    )*};
}
integers!(u8, i8, u16, i16, u32, i32, u64, i64, usize);

fn does_not_fit(found: String, value: i128) -> String {
    format!("{found} {value}, which does not fit")
}

impl FromValue<'_> for f32 {
    fn wanted() -> String {
        "f32".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        match *value {
            Value::F32(float) => Ok(float),
            Value::F64(float) => Ok(float as f32),
            _ => Err(value.describe()),
        }
    }
}

impl FromValue<'_> for f64 {
    fn wanted() -> String {
        "f64".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        match *value {
            Value::F32(float) => Ok(float.into()),
            Value::F64(float) => Ok(float),
            _ => Err(value.describe()),
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    fn wanted() -> String {
        "arr of f32".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        match value {
            Value::Array(Array::F32(floats)) => Ok(floats.clone()),
            Value::Array(Array::F64(floats)) => {
                Ok(floats.iter().map(|&float| float as f32).collect())
            }
            _ => Err(value.describe()),
        }
    }
}

impl FromValue<'_> for Vec<f64> {
    fn wanted() -> String {
        "arr of f64".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        match value {
            Value::Array(Array::F32(floats)) => Ok(floats.iter().copied().map(f64::from).collect()),
            Value::Array(Array::F64(floats)) => Ok(floats.clone()),
            _ => Err(value.describe()),
        }
    }
}

impl FromValue<'_> for bool {
    fn wanted() -> String {
        "bool".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        match *value {
            Value::Bool(boolean) => Ok(boolean),
            _ => Err(value.describe()),
        }
    }
}

impl FromValue<'_> for Vec<bool> {
    fn wanted() -> String {
        "arr of bool".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        <&[bool]>::from_value(value).map(<[bool]>::to_vec)
    }
}

impl<'a> FromValue<'a> for &'a str {
    fn wanted() -> String {
        "str".into()
    }

    fn from_value(value: &'a Value) -> Result<Self, String> {
        match value {
            Value::String(bytes) => {
                std::str::from_utf8(bytes).map_err(|e| format!("str that is not UTF-8 ({e})"))
            }
            _ => Err(value.describe()),
        }
    }
}

impl FromValue<'_> for String {
    fn wanted() -> String {
        "str".into()
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        <&str>::from_value(value).map(str::to_owned)
    }
}

impl<'a> FromValue<'a> for &'a StringArray {
    fn wanted() -> String {
        "arr of str".into()
    }

    fn from_value(value: &'a Value) -> Result<Self, String> {
        match value {
            Value::Array(Array::String(strings)) => Ok(strings),
            _ => Err(value.describe()),
        }
    }
}

impl<'a> FromValue<'a> for Vec<&'a str> {
    fn wanted() -> String {
        "arr of str".into()
    }

    fn from_value(value: &'a Value) -> Result<Self, String> {
        let text = |(index, bytes)| {
            std::str::from_utf8(bytes)
                .map_err(|e| format!("{}: element {index} is not UTF-8 ({e})", value.describe()))
        };
        <&StringArray>::from_value(value)?
            .iter()
            .enumerate()
            .map(text)
            .collect()
    }
}

impl<'a> FromValue<'a> for &'a Array {
    fn wanted() -> String {
        "arr".into()
    }

    fn from_value(value: &'a Value) -> Result<Self, String> {
        match value {
            Value::Array(array) => Ok(array),
            _ => Err(value.describe()),
        }
    }
}

macro_rules! slices {
    ($($type:ident => $variant:ident),*) => {$(
        impl<'a> FromValue<'a> for &'a [$type] {
            fn wanted() -> String {
                concat!("arr of ", stringify!($type)).into()
            }

            fn from_value(value: &'a Value) -> Result<Self, String> {
                match value {
                    Value::Array(Array::$variant(items)) => Ok(items),
                    _ => Err(value.describe()),
                }
            }
        }
    )*};
}
slices!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32,
    bool => Bool, u64 => U64,
    i64 => I64, f64 => F64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_type_are_accepted_if_they_fit() {
        for value in [
            Value::U8(7),
            Value::I8(7),
            Value::U16(7),
            Value::I16(7),
            Value::U32(7),
            Value::I32(7),
        ] {
            assert_eq!(u32::from_value(&value), Ok(7));
            assert_eq!(i64::from_value(&value), Ok(7));
            assert_eq!(usize::from_value(&value), Ok(7));
        }
        assert_eq!(u64::from_value(&Value::U64(u64::MAX)), Ok(u64::MAX));
        assert_eq!(
            u32::from_value(&Value::I32(-1)),
            Err("i32 -1, which does not fit".into())
        );
        assert_eq!(
            u8::from_value(&Value::U64(256)),
            Err("u64 256, which does not fit".into())
        );
        assert_eq!(u32::from_value(&Value::F32(1.0)), Err("f32".into()));
        assert_eq!(u32::from_value(&Value::Bool(true)), Err("bool".into()));
    }

    #[test]
    fn arrays_convert_element_by_element() {
        let value = Value::from(vec![1i32, -2]);
        assert_eq!(<Vec<i64>>::from_value(&value), Ok(vec![1, -2]));
        assert_eq!(
            <Vec<u32>>::from_value(&value),
            Err("arr of 2 i32: element 1 is -2, which does not fit".into())
        );
        assert_eq!(<&[i32]>::from_value(&value), Ok(&[1, -2][..]));
        assert_eq!(<&[u32]>::from_value(&value), Err("arr of 2 i32".into()));
        assert_eq!(
            <Vec<f32>>::from_value(&Value::from(vec![0.5f64])),
            Ok(vec![0.5])
        );
        assert_eq!(
            <Vec<f64>>::from_value(&Value::from(vec![0.5f32])),
            Ok(vec![0.5])
        );
        assert_eq!(
            <Vec<bool>>::from_value(&Value::from(vec![true, false])),
            Ok(vec![true, false])
        );
        assert_eq!(<Vec<i32>>::from_value(&Value::U8(1)), Err("u8".into()));
    }

    #[test]
    fn strings_are_checked_for_utf8_on_conversion() {
        let bad = Value::String(Box::from(&b"\xff"[..]));
        assert!(
            <&str>::from_value(&bad)
                .unwrap_err()
                .starts_with("str that is not UTF-8")
        );
        let array = Value::from(
            ["a".as_bytes(), b"\xff"]
                .into_iter()
                .collect::<StringArray>(),
        );
        assert!(
            <Vec<&str>>::from_value(&array)
                .unwrap_err()
                .contains("element 1")
        );
        assert_eq!(
            <&StringArray>::from_value(&array).map(StringArray::len),
            Ok(2)
        );
        assert_eq!(<&str>::from_value(&Value::from("ok")), Ok("ok"));
    }
}
