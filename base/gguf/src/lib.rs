//! The GGUF file format: a hardened reader, a writer, and loading of tensor data.
//!
//! A GGUF file holds a machine learning model: *metadata* (keys with typed values: architecture,
//! sizes, vocabulary) and *tensors* (types of ggml, with names and shapes). All numbers are
//! little-endian:
//!
//! | field | type |
//! |---|---|
//! | magic | the bytes `GGUF` |
//! | version | `u32`: 2 or 3, which have the same layout |
//! | number of tensors, number of keys | `u64` each |
//! | for each key: key, type, value | string, `u32`, by type |
//! | for each tensor: name, number of dimensions, dimensions, type, offset | string, `u32`, `u64` each, `u32`, `u64` |
//! | padding | to a multiple of the alignment: the key `general.alignment`, or 32 |
//! | data of each tensor | where its offset says, counted from here, padded |
//!
//! A string is a `u64` length and bytes. An array is the type of its elements (`u32`), their number
//! (`u64`) and the elements. The format is specified in `docs/gguf.md` of the ggml project. If that
//! leaves a choice, this crate follows ggml's own reader, so that both accept the same files. There
//! are two exceptions. This crate refuses what no real file contains: tensors without elements or
//! dimensions, more keys than [`MAX_KEYS`], more tensors than [`MAX_TENSORS`]. And it accepts
//! tensor names of up to [`MAX_NAME_BYTES`].
//!
//! # Contract
//! - [`GgufFile::open`] opens a model, whole or split into parts. [`Header::from_bytes`] reads one
//!   that is in memory.
//! - Files are not trusted. Every count and size is checked against the remaining bytes before an
//!   allocation, and every sum and product for overflow. After opening, each tensor's data is
//!   inside its file, contiguous and aligned, and names are unique. No input makes a function
//!   panic.
//! - [`Metadata`] is read with types. [`Metadata::get`] and [`Metadata::require`] return an error
//!   with the key, the wanted and the found type. Strings in values need not be UTF-8 until they
//!   are read as text.
//! - Data is accessed in place ([`GgufFile::tensor_bytes`], [`Part::mapping`]), read piece by piece
//!   ([`GgufFile::read_tensor_into`]), or streamed by several threads ([`GgufFile::load`],
//!   [`GgufFile::load_chunks`]) with progress and cancellation.
//! - [`Writer`] streams a file out. It appears on disk complete or not at all. [`rewrite`] edits
//!   metadata. Unknown keys are preserved, in order.
//! - [`Error`] is one line that names file, field and byte offset, and what to do.
//!
//! # Example
//! ```
//! use samite_core::DType;
//! use samite_gguf::{GgufFile, LoadMode, Metadata, TensorSpec, Writer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("tiny.gguf");
//! let mut metadata = Metadata::new();
//! metadata.set("general.architecture", "llama")?;
//! metadata.set("llama.block_count", 2u32)?;
//! let tensors = vec![TensorSpec::new("token_embd.weight", DType::F32, &[2, 1])?];
//! let mut writer = Writer::create(&path, &metadata, tensors)?;
//! writer.append(&1.0f32.to_le_bytes())?;
//! writer.append(&2.0f32.to_le_bytes())?;
//! writer.commit()?;
//!
//! let file = GgufFile::open(&path, LoadMode::Mmap)?;
//! let blocks: usize = file.metadata().require("llama.block_count")?;
//! let embedding = file.require_tensor("token_embd.weight")?;
//! assert_eq!((blocks, embedding.shape), (2, [2, 1, 1, 1]));
//! assert_eq!(file.tensor_bytes(embedding)?[..4], 1.0f32.to_le_bytes());
//! # Ok(())
//! # }
//! ```
//!
//! The only `unsafe` code is in the module that maps files. [`Mapping`] documents what the user
//! must guarantee: a file does not change while it is mapped.

mod atomic;
mod convert;
mod cursor;
mod error;
mod file;
mod header;
mod index;
mod load;
mod mapping;
mod metadata;
mod sniff;
mod split;
mod strings;
mod tensor;
mod value;
mod write;

pub use atomic::{AtomicFile, UnfinishedFiles, remove_unfinished_files};
pub use convert::FromValue;
pub use error::{Error, ErrorKind, Result};
pub use file::{GgufFile, LoadMode, Part};
pub use header::{
    DEFAULT_ALIGNMENT, Header, MAGIC, MAX_ALIGNMENT, MAX_KEYS, MAX_NAME_BYTES, MAX_TENSORS, VERSION,
};
pub use load::LoadOptions;
pub use mapping::Mapping;
pub use metadata::{KEY_ALIGNMENT, KEY_ARCHITECTURE, MAX_KEY_BYTES, Metadata};
pub use split::{KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS_COUNT, split_file_name};
pub use strings::StringArray;
pub use tensor::{MAX_DIMS, TensorInfo, Tensors};
pub use value::{Array, Value, ValueType};
pub use write::{MAX_WRITTEN_NAME_BYTES, TensorSlot, TensorSpec, Writer, rewrite};
