//! The header of a file: everything before the tensor data.

use crate::cursor::{Cursor, Field, Stop};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::{KEY_ALIGNMENT, Metadata, check_key};
use crate::sniff::not_gguf;
use crate::strings::StringArray;
use crate::tensor::{MAX_DIMS, TensorInfo, Tensors, tensor_bytes};
use crate::value::{Array, Value, ValueType};
use samite_core::DType;

/// The first four bytes of every file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Version that is written. Version 2 can also be read.
pub const VERSION: u32 = 3;
/// Alignment of tensor data in bytes without the key `general.alignment`.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Maximum accepted alignment.
pub const MAX_ALIGNMENT: u64 = 1 << 24;
/// Maximum accepted number of keys. Models have tens of them.
pub const MAX_KEYS: u64 = 1 << 16;
/// Maximum accepted number of tensors in one file. The largest models have tens of thousands.
pub const MAX_TENSORS: u64 = 1 << 18;
/// Maximum length of a tensor name that is read, in bytes. ggml's default is 63, but some users
/// compile it with more.
pub const MAX_NAME_BYTES: usize = 1024;

/// Contents of a file before its tensor data.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The version of the format: 2 or 3.
    pub version: u32,
    /// The alignment of tensor data in bytes: a power of two.
    pub alignment: u64,
    /// Start of the data section, in bytes from the start of the file.
    pub data_offset: u64,
    /// The keys and values.
    pub metadata: Metadata,
    /// The tensors. Their data is inside the file.
    pub tensors: Tensors,
}

impl Header {
    /// Reads the header of a file that is completely in memory. Nothing in `bytes` is trusted, and
    /// allocations never exceed their number plus a constant.
    ///
    /// # Errors
    /// [`ErrorKind::NotGguf`], [`ErrorKind::Unsupported`], [`ErrorKind::Truncated`] or
    /// [`ErrorKind::Corrupt`], with field and offset.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::whole(bytes, Data::Complete)
    }

    /// Does what [`from_bytes`](Self::from_bytes) does, also if tensor data is missing.
    pub(crate) fn whole(bytes: &[u8], data: Data) -> Result<Self> {
        Self::parse(bytes, bytes.len() as u64, data).map_err(|stop| match stop {
            Stop::Failed(error) => error,
            Stop::NeedMore(needed) => Error::new(
                ErrorKind::Truncated,
                "header",
                format!("needs {needed} bytes"),
            ),
        })
    }

    /// Reads the header from `bytes`, the first bytes of a file of `file_len` bytes.
    pub(crate) fn parse(bytes: &[u8], file_len: u64, data: Data) -> Result<Self, Stop> {
        let mut cursor = Cursor::new(bytes, file_len);
        let cursor = &mut cursor;
        let version = preamble(cursor, bytes)?;
        let n_tensors = limited_count(cursor, MIN_TENSOR_BYTES, MAX_TENSORS, "number of tensors")?;
        let n_keys = limited_count(cursor, MIN_KEY_BYTES, MAX_KEYS, "number of keys")?;
        let (metadata, alignment) = metadata(cursor, n_keys)?;
        let infos = (0..n_tensors).map(|number| tensor(cursor, number));
        let infos = collect_exactly(n_tensors, Field::Header("tensors"), infos)?;
        let data_offset = match n_tensors {
            0 => cursor.position(),
            // Cannot overflow: neither memory nor files are that large.
            _ => cursor.position().next_multiple_of(alignment),
        };
        let data_end = match data {
            Data::Complete => file_len,
            Data::MayBeMissing => u64::MAX,
        };
        let tensors = place(infos, data_offset, alignment, data_end)?;
        Ok(Header {
            version,
            alignment,
            data_offset,
            metadata,
            tensors,
        })
    }
}

/// Amount of tensor data that a file must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// All of it.
    Complete,
    /// None: only the header is needed.
    MayBeMissing,
}

/// Checks `alignment`, and describes the problem if it is invalid.
pub(crate) fn check_alignment(alignment: u64) -> Result<(), String> {
    if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT {
        Ok(())
    } else {
        Err(format!(
            "is {alignment}; it must be a power of two, at most {MAX_ALIGNMENT}"
        ))
    }
}

/// A key of one letter with a value of one byte.
const MIN_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// A tensor with an empty name and one dimension.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

fn corrupt(field: Field<'_>, offset: u64, message: impl Into<String>) -> Stop {
    Error::new(ErrorKind::Corrupt, field, message)
        .at(offset)
        .into()
}

/// Returns a vector with room for exactly `count` items. The caller has checked `count` against the
/// bytes left, but there may still be too little memory.
fn room_for<T>(count: usize, field: Field<'_>) -> Result<Vec<T>, Stop> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| {
        let bytes = count.saturating_mul(size_of::<T>());
        let message = format!("there is no memory for its {bytes} bytes");
        Error::new(ErrorKind::OutOfMemory, field, message)
    })?;
    Ok(all)
}

/// Returns a vector of exactly `count` items, with a single allocation.
fn collect_exactly<T>(
    count: u64,
    field: Field<'_>,
    items: impl Iterator<Item = Result<T, Stop>>,
) -> Result<Vec<T>, Stop> {
    let mut all = room_for(count as usize, field)?;
    for item in items {
        all.push(item?);
    }
    Ok(all)
}

/// Reads magic and version.
fn preamble(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Result<u32, Stop> {
    let start = &bytes[..bytes.len().min(64)];
    if cursor.left() == 0 {
        return Err(Error::new(
            ErrorKind::Truncated,
            "",
            "the file is empty: download it again",
        )
        .into());
    }
    if !start.starts_with(&MAGIC) && !MAGIC.starts_with(start) {
        let message = format!("not a GGUF file; it looks like {}", not_gguf(start));
        return Err(Error::new(ErrorKind::NotGguf, "magic", message)
            .at(0)
            .into());
    }
    cursor.take(MAGIC.len() as u64, Field::Header("magic"))?;
    let offset = cursor.position();
    let version = cursor.u32(Field::Header("version"))?;
    let unsupported = |message: String| {
        Err(Error::new(ErrorKind::Unsupported, "version", message)
            .at(offset)
            .into())
    };
    match version {
        2..=VERSION => Ok(version),
        0 => Err(corrupt(
            Field::Header("version"),
            offset,
            "is 0, which never was: download the file again",
        )),
        1 => {
            unsupported("is 1, which is no longer in use: convert the original model again".into())
        }
        // A small number in the wrong byte order.
        _ if version & 0xffff == 0 => unsupported(format!(
            "is {} with swapped bytes: this is a big-endian file, get the little-endian one",
            version.swap_bytes()
        )),
        _ => unsupported(format!(
            "is {version}, but only versions 2 and {VERSION} are known: update samite, or get another file"
        )),
    }
}

fn limited_count(cursor: &mut Cursor<'_>, least: u64, limit: u64, what: &str) -> Result<u64, Stop> {
    let offset = cursor.position();
    let count = cursor.count(least, Field::Header(what))?;
    if count > limit {
        let message =
            format!("is {count}, more than the {limit} that are believed: download the file again");
        return Err(corrupt(Field::Header(what), offset, message));
    }
    Ok(count)
}

/// Returns the text of a name that was read; `start` is the offset of its length.
fn name_text<'a>(bytes: &'a [u8], field: Field<'_>, start: u64) -> Result<&'a str, Stop> {
    std::str::from_utf8(bytes)
        .map_err(|error| corrupt(field, start, format!("is not UTF-8 ({error})")))
}

/// Reads all keys and values. Returns them with the alignment that they set.
fn metadata(cursor: &mut Cursor<'_>, n_keys: u64) -> Result<(Metadata, u64), Stop> {
    let mut offsets = room_for(n_keys as usize, Field::Header("keys"))?;
    let mut alignment = DEFAULT_ALIGNMENT;
    let entries = (0..n_keys).map(|number| {
        let (field, start) = (Field::Key(number), cursor.position());
        offsets.push(start);
        let key = name_text(cursor.string(field)?, field, start)?;
        check_key(key).map_err(|message| corrupt(field, start, message))?;
        let start = cursor.position();
        let value = value(cursor, key)?;
        if key == KEY_ALIGNMENT {
            let field = Field::Value(key, "value");
            let Value::U32(asked) = value else {
                return Err(corrupt(
                    field,
                    start,
                    format!("wanted u32, found {}", value.describe()),
                ));
            };
            alignment = asked.into();
            check_alignment(alignment).map_err(|message| corrupt(field, start, message))?;
        }
        Ok((Box::from(key), value))
    });
    let entries = collect_exactly(n_keys, Field::Header("keys"), entries)?;
    let metadata = Metadata::from_entries(entries).map_err(|(repeated, key)| {
        corrupt(
            Field::Value(&key, "name"),
            offsets[repeated],
            "occurs twice: the file is damaged",
        )
    })?;
    Ok((metadata, alignment))
}

fn value_type(cursor: &mut Cursor<'_>, field: Field<'_>) -> Result<ValueType, Stop> {
    let start = cursor.position();
    let id = cursor.u32(field)?;
    ValueType::from_id(id).ok_or_else(|| {
        corrupt(
            field,
            start,
            format!("is {id}, which no value type has: the file is damaged or from the future"),
        )
    })
}

/// Reads the type and the value of `key`.
fn value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, Stop> {
    let field = Field::Value(key, "value");
    Ok(match value_type(cursor, Field::Value(key, "type"))? {
        ValueType::U8 => Value::U8(number(cursor, field)?),
        ValueType::I8 => Value::I8(number(cursor, field)?),
        ValueType::U16 => Value::U16(number(cursor, field)?),
        ValueType::I16 => Value::I16(number(cursor, field)?),
        ValueType::U32 => Value::U32(number(cursor, field)?),
        ValueType::I32 => Value::I32(number(cursor, field)?),
        ValueType::F32 => Value::F32(number(cursor, field)?),
        ValueType::Bool => Value::Bool(number(cursor, field)?),
        ValueType::U64 => Value::U64(number(cursor, field)?),
        ValueType::I64 => Value::I64(number(cursor, field)?),
        ValueType::F64 => Value::F64(number(cursor, field)?),
        ValueType::String => Value::String(cursor.string(field)?.into()),
        ValueType::Array => Value::Array(array(cursor, key)?),
    })
}

fn array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array, Stop> {
    let start = cursor.position();
    Ok(
        match value_type(cursor, Field::Value(key, "element type"))? {
            ValueType::U8 => Array::U8(numbers(cursor, key)?),
            ValueType::I8 => Array::I8(numbers(cursor, key)?),
            ValueType::U16 => Array::U16(numbers(cursor, key)?),
            ValueType::I16 => Array::I16(numbers(cursor, key)?),
            ValueType::U32 => Array::U32(numbers(cursor, key)?),
            ValueType::I32 => Array::I32(numbers(cursor, key)?),
            ValueType::F32 => Array::F32(numbers(cursor, key)?),
            ValueType::Bool => Array::Bool(numbers(cursor, key)?),
            ValueType::U64 => Array::U64(numbers(cursor, key)?),
            ValueType::I64 => Array::I64(numbers(cursor, key)?),
            ValueType::F64 => Array::F64(numbers(cursor, key)?),
            ValueType::String => Array::String(strings(cursor, key)?),
            ValueType::Array => {
                let message = "is an array: arrays of arrays are not supported (nor does any model need them)";
                return Err(corrupt(Field::Value(key, "element type"), start, message));
            }
        },
    )
}

fn number<T: Number>(cursor: &mut Cursor<'_>, field: Field<'_>) -> Result<T, Stop> {
    cursor.take(T::BYTES, field).map(T::from_le)
}

fn numbers<T: Number>(cursor: &mut Cursor<'_>, key: &str) -> Result<Vec<T>, Stop> {
    let count = cursor.count(T::BYTES, Field::Value(key, "array length"))?;
    // Cannot overflow: `count` checked it.
    let bytes = cursor.take(count * T::BYTES, Field::Value(key, "elements"))?;
    let mut numbers = room_for(count as usize, Field::Value(key, "elements"))?;
    numbers.extend(bytes.chunks_exact(T::BYTES as usize).map(T::from_le));
    Ok(numbers)
}

fn strings(cursor: &mut Cursor<'_>, key: &str) -> Result<StringArray, Stop> {
    let count = cursor.count(8, Field::Value(key, "array length"))?;
    // The first pass computes the size, the second one fills the memory.
    let mut ahead = cursor.clone();
    let mut total = 0;
    for index in 0..count {
        total += ahead.string(Field::Element(key, index))?.len();
    }
    let field = Field::Value(key, "elements");
    let mut strings =
        StringArray::within(room_for(total, field)?, room_for(count as usize, field)?);
    for index in 0..count {
        strings.push(cursor.string(Field::Element(key, index))?);
    }
    Ok(strings)
}

/// Fixed-size values, read as little-endian bytes.
trait Number: Sized {
    const BYTES: u64;
    /// Converts `bytes`, which are exactly [`Self::BYTES`].
    fn from_le(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            const BYTES: u64 = size_of::<$type>() as u64;

            fn from_le(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$type>()];
                array.copy_from_slice(bytes);
                <$type>::from_le_bytes(array)
            }
        }
    )*};
}
numbers!(u8, i8, u16, i16, u32, i32, f32, u64, i64, f64);

impl Number for bool {
    const BYTES: u64 = 1;

    /// Returns true for everything except 0, like ggml.
    fn from_le(bytes: &[u8]) -> Self {
        bytes != [0]
    }
}

/// A tensor's description, before its data is located in the file.
struct Described {
    /// Complete except for `offset`, which still counts from the start of the data section.
    info: TensorInfo,
    /// Positions of the name and the offset in the file.
    name_at: u64,
    offset_at: u64,
}

fn tensor(cursor: &mut Cursor<'_>, number: u64) -> Result<Described, Stop> {
    let (field, name_at) = (Field::TensorName(number), cursor.position());
    let name = name_text(cursor.string(field)?, field, name_at)?;
    if name.len() > MAX_NAME_BYTES {
        let message = format!(
            "is {} bytes long; {MAX_NAME_BYTES} are believed",
            name.len()
        );
        return Err(corrupt(field, name_at, message));
    }
    if name.contains('\0') {
        return Err(corrupt(field, name_at, "contains a NUL character"));
    }

    let (field, start) = (
        Field::Tensor(name, "number of dimensions"),
        cursor.position(),
    );
    let n_dims = cursor.u32(field)? as usize;
    if !(1..=MAX_DIMS).contains(&n_dims) {
        return Err(corrupt(
            field,
            start,
            format!("is {n_dims}; 1 to {MAX_DIMS} are possible"),
        ));
    }
    let dims_at = cursor.position();
    let mut dims = [1; MAX_DIMS];
    for (dimension, extent) in dims[..n_dims].iter_mut().enumerate() {
        *extent = cursor.u64(Field::Dimension(name, dimension))?;
    }

    let (field, start) = (Field::Tensor(name, "type"), cursor.position());
    let id = cursor.u32(field)?;
    let dtype = DType::from_id(id).ok_or_else(|| corrupt(field, start, unknown_dtype(id)))?;
    let size =
        tensor_bytes(dtype, &dims[..n_dims]).map_err(|(dimension, message)| match dimension {
            Some(dimension) => corrupt(
                Field::Dimension(name, dimension),
                dims_at + 8 * dimension as u64,
                message,
            ),
            None => corrupt(Field::Tensor(name, "shape"), dims_at, message),
        })?;

    let offset_at = cursor.position();
    let offset = cursor.u64(Field::Tensor(name, "offset"))?;
    let info = TensorInfo {
        name: name.into(),
        dtype,
        // The conversion is lossless: the product of the extents fits usize, and none is 0.
        shape: dims.map(|extent| extent as usize),
        n_dims,
        offset,
        size,
        file: 0,
    };
    Ok(Described {
        info,
        name_at,
        offset_at,
    })
}

fn unknown_dtype(id: u32) -> String {
    match id {
        4 | 5 | 31..=33 | 36..=38 => {
            format!(
                "is {id}, a type that was removed from the format: get a newer file, or quantize the model again"
            )
        }
        _ => format!("is {id}, which no type here has: the file is damaged or from the future"),
    }
}

/// Checks that the tensors' data is contiguous, padded and inside the file. Makes offsets count
/// from the start of the file.
fn place(
    described: Vec<Described>,
    data_offset: u64,
    alignment: u64,
    file_len: u64,
) -> Result<Tensors, Stop> {
    let mut expected = 0;
    let mut end = data_offset;
    for Described {
        info, offset_at, ..
    } in &described
    {
        let field = Field::Tensor(&info.name, "offset");
        let offset = info.offset;
        if offset != expected {
            let message = if !offset.is_multiple_of(alignment) {
                format!(
                    "is {offset}, not a multiple of the alignment {alignment}: the file is damaged"
                )
            } else if offset < expected {
                format!(
                    "is {offset}, but the data before it reaches to {expected}: tensors overlap or are not in order"
                )
            } else {
                format!(
                    "is {offset}, but the data before it ends at {expected}: there may be no gaps"
                )
            };
            return Err(corrupt(field, *offset_at, message));
        }
        let ends = || {
            let unpadded = expected.checked_add(info.size as u64)?;
            Some((
                data_offset.checked_add(unpadded)?,
                unpadded.checked_next_multiple_of(alignment)?,
            ))
        };
        (end, expected) =
            ends().ok_or_else(|| corrupt(field, *offset_at, "the end of the data overflows"))?;
    }

    // The first tensor that is incomplete. `end` is the end of the last one.
    let is_cut = |d: &&Described| data_offset + d.info.offset + d.info.size as u64 > file_len;
    if let Some(Described {
        info, offset_at, ..
    }) = described.iter().find(is_cut)
    {
        let missing = end.saturating_sub(file_len);
        let message = format!("the file is truncated: {missing} bytes missing; download it again");
        let field = Field::Tensor(&info.name, "data");
        return Err(Error::new(ErrorKind::Truncated, field, message)
            .at(*offset_at)
            .into());
    }

    let mut names_at = room_for(described.len(), Field::Header("tensors"))?;
    let mut infos = room_for(described.len(), Field::Header("tensors"))?;
    for Described {
        mut info, name_at, ..
    } in described
    {
        info.offset += data_offset;
        names_at.push(name_at);
        infos.push(info);
    }
    Tensors::new(infos).map_err(|(repeated, name)| {
        corrupt(
            Field::Tensor(&name, "name"),
            names_at[repeated],
            "occurs twice: the file is damaged",
        )
    })
}
