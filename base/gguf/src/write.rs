//! Writing of files: the header first, then the tensor data in order.

use crate::atomic::AtomicFile;
use crate::error::{Error, ErrorKind, Result, quoted};
use crate::file::GgufFile;
use crate::header::{DEFAULT_ALIGNMENT, MAGIC, VERSION, check_alignment};
use crate::load::LoadOptions;
use crate::metadata::{KEY_ALIGNMENT, Metadata};
use crate::split::{KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS_COUNT};
use crate::tensor::{MAX_DIMS, TensorInfo, tensor_bytes};
use crate::value::{Array, Value, with_array};
use samite_core::DType;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum length of a tensor name that is written, in bytes. ggml reads no longer ones.
pub const MAX_WRITTEN_NAME_BYTES: usize = 63;

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    name: Box<str>,
    dtype: DType,
    dims: Vec<u64>,
    size: usize,
}

impl TensorSpec {
    /// Returns a tensor with `dims` as its extents, innermost first.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if the name is longer than [`MAX_WRITTEN_NAME_BYTES`]
    /// or contains NUL, if there are not 1 to 4 dimensions, if one is 0, if rows are not whole
    /// blocks, or if the size overflows.
    pub fn new(name: &str, dtype: DType, dims: &[usize]) -> Result<Self> {
        let invalid = |message: String| Error::invalid(format!("tensor {}", quoted(name)), message);
        if name.len() > MAX_WRITTEN_NAME_BYTES || name.contains('\0') {
            let message = format!(
                "the name must be at most {MAX_WRITTEN_NAME_BYTES} bytes long and without NUL"
            );
            return Err(invalid(message));
        }
        if !(1..=MAX_DIMS).contains(&dims.len()) {
            return Err(invalid(format!(
                "has {} dimensions; 1 to {MAX_DIMS} are possible",
                dims.len()
            )));
        }
        let dims: Vec<u64> = dims.iter().map(|&extent| extent as u64).collect();
        let size = tensor_bytes(dtype, &dims).map_err(|(dimension, message)| match dimension {
            Some(dimension) => invalid(format!("dimension {dimension} {message}")),
            None => invalid(message),
        })?;
        Ok(TensorSpec {
            name: name.into(),
            dtype,
            dims,
            size,
        })
    }

    /// Returns the tensor of `info` with another type.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_info(info: &TensorInfo, dtype: DType) -> Result<Self> {
        Self::new(&info.name, dtype, &info.shape[..info.n_dims.min(MAX_DIMS)])
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the size of the data in bytes.
    pub fn size(&self) -> usize {
        self.size
    }
}

/// Returns the bytes of a file up to its data section, and the alignment of that.
fn encode_header(metadata: &Metadata, tensors: &[TensorSpec]) -> Result<(Vec<u8>, u64)> {
    let alignment = match metadata.value(KEY_ALIGNMENT) {
        None => DEFAULT_ALIGNMENT,
        Some(&Value::U32(alignment)) => alignment.into(),
        Some(other) => {
            let message = format!("must be u32, but is {}", other.describe());
            return Err(Error::invalid(format!("key {KEY_ALIGNMENT:?}"), message));
        }
    };
    check_alignment(alignment)
        .map_err(|message| Error::invalid(format!("key {KEY_ALIGNMENT:?}"), message))?;
    if let Err(repeated) = crate::index::sorted_index(tensors, |spec| &spec.name) {
        let field = format!("tensor {}", quoted(&tensors[repeated].name));
        return Err(Error::invalid(
            field,
            "occurs twice: tensors need unique names",
        ));
    }

    let mut out = Vec::new();
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        put_string(&mut out, key.as_bytes());
        put_value(&mut out, value);
    }
    let mut offset = 0u64;
    for spec in tensors {
        put_string(&mut out, spec.name.as_bytes());
        out.extend((spec.dims.len() as u32).to_le_bytes());
        spec.dims
            .iter()
            .for_each(|extent| out.extend(extent.to_le_bytes()));
        out.extend(spec.dtype.id().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = offset
            .checked_add(spec.size as u64)
            .and_then(|end| end.checked_next_multiple_of(alignment))
            .ok_or_else(|| Error::invalid("tensors", "their sizes overflow together"))?;
    }
    if !tensors.is_empty() {
        out.resize(out.len().next_multiple_of(alignment as usize), 0);
    }
    Ok((out, alignment))
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    out.extend(value.value_type().id().to_le_bytes());
    match value {
        Value::U8(v) => v.put(out),
        Value::I8(v) => v.put(out),
        Value::U16(v) => v.put(out),
        Value::I16(v) => v.put(out),
        Value::U32(v) => v.put(out),
        Value::I32(v) => v.put(out),
        Value::F32(v) => v.put(out),
        Value::Bool(v) => v.put(out),
        Value::U64(v) => v.put(out),
        Value::I64(v) => v.put(out),
        Value::F64(v) => v.put(out),
        Value::String(bytes) => put_string(out, bytes),
        Value::Array(array) => {
            out.extend(array.element_type().id().to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            with_array!(
                array,
                items => items.iter().for_each(|item| item.put(out)),
                strings => strings.iter().for_each(|string| put_string(out, string))
            );
        }
    }
}

/// Fixed-size values, written as little-endian bytes.
trait Put {
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! put {
    ($($type:ty),*) => {$(
        impl Put for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}
put!(u8, i8, u16, i16, u32, i32, f32, u64, i64, f64);

impl Put for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push((*self).into());
    }
}

/// Callback for the bytes of tensor data written so far, and the total.
type ProgressFn = Box<dyn FnMut(u64, u64) + Send>;

/// Writer of a file: first the header, then the data of the tensors one after the other, in pieces
/// of any size.
///
/// Nothing needs to be completely in memory, because types and shapes determine every offset in
/// advance.
pub struct Writer<W: Write> {
    out: W,
    path: Option<Box<Path>>,
    tensors: Vec<TensorSpec>,
    alignment: usize,
    /// The current tensor, and the number of its bytes written so far.
    current: usize,
    in_current: usize,
    done: u64,
    total: u64,
    progress: Option<ProgressFn>,
}

impl Writer<AtomicFile> {
    /// Starts a file that appears at `path` when it is complete ([`commit`](Self::commit)),
    /// replacing an existing one, or not at all. Without commit, because of an error or a dropped
    /// writer, nothing is left after.
    ///
    /// # Errors
    /// As [`Writer::new`], or if the file cannot be created.
    pub fn create(
        path: impl AsRef<Path>,
        metadata: &Metadata,
        tensors: Vec<TensorSpec>,
    ) -> Result<Self> {
        Self::create_by(path.as_ref(), metadata, tensors, |path| {
            AtomicFile::create(path)
        })
    }

    /// Starts a [private](AtomicFile::private) file, otherwise like [`create`](Self::create).
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_private(
        path: impl AsRef<Path>,
        metadata: &Metadata,
        tensors: Vec<TensorSpec>,
    ) -> Result<Self> {
        Self::create_by(path.as_ref(), metadata, tensors, |path| {
            AtomicFile::private(path)
        })
    }

    fn create_by(
        path: &Path,
        metadata: &Metadata,
        tensors: Vec<TensorSpec>,
        create: impl FnOnce(&Path) -> Result<AtomicFile>,
    ) -> Result<Self> {
        // The header is encoded before the file is created: invalid input touches no disk.
        let encoded = encode_header(metadata, &tensors).map_err(|error| error.in_file(path))?;
        Self::with_header(create(path)?, Some(path.into()), encoded, tensors)
    }

    /// Lets `fill` write the data of the next tensor, in pieces in any order, from any number of
    /// threads.
    ///
    /// # Errors
    /// The error of `fill`. [`crate::ErrorKind::InvalidArgument`] if all tensors or some data of
    /// this one are already written, or if the pieces do not add up to its size.
    /// [`crate::ErrorKind::Io`].
    pub fn fill_tensor<E: From<Error>>(
        &mut self,
        fill: impl FnOnce(&TensorSlot<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(spec) = self
            .tensors
            .get(self.current)
            .filter(|_| self.in_current == 0)
        else {
            let message = "is written already, or some of it is".to_owned();
            return Err(self.invalid("data", message).into());
        };
        let size = spec.size;
        let start = self.out.position().map_err(|error| self.named(error))?;
        let slot = TensorSlot {
            file: &self.out,
            spec,
            start,
            written: AtomicUsize::new(0),
        };
        fill(&slot)?;
        let written = slot.written.into_inner();
        if written != size {
            let field = format!("tensor {}", quoted(spec.name()));
            let message = format!("takes {size} bytes, but {written} were written");
            return Err(self.invalid(field, message).into());
        }
        let end = self.out.set_position(start + size as u64);
        end.map_err(|error| self.named(error))?;
        Ok(self.advance(size)?)
    }

    /// Completes the file and renames it.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if data is missing; [`crate::ErrorKind::Io`].
    pub fn commit(self) -> Result<()> {
        self.finish()?.commit()
    }
}

/// Place of one tensor's data in a file that is being written.
pub struct TensorSlot<'a> {
    file: &'a AtomicFile,
    spec: &'a TensorSpec,
    start: u64,
    written: AtomicUsize,
}

impl TensorSlot<'_> {
    /// Writes a piece of the tensor's data, `offset` bytes from its start.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if it is not within the tensor.
    /// [`crate::ErrorKind::Io`].
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len());
        if end.is_none_or(|end| end > self.spec.size) {
            let field = format!("tensor {}", quoted(self.spec.name()));
            let message = format!(
                "takes {} bytes: {} bytes at {offset} are not within it",
                self.spec.size,
                bytes.len()
            );
            return Err(Error::invalid(field, message).in_file(self.file.target()));
        }
        self.file.write_at(bytes, self.start + offset as u64)?;
        self.written.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok(())
    }
}

impl<W: Write> Writer<W> {
    /// Starts a file in `out`, with the alignment in `metadata`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for a bad alignment or tensors with the same name;
    /// [`crate::ErrorKind::Io`].
    pub fn new(out: W, metadata: &Metadata, tensors: Vec<TensorSpec>) -> Result<Self> {
        let encoded = encode_header(metadata, &tensors)?;
        Self::with_header(out, None, encoded, tensors)
    }

    fn with_header(
        out: W,
        path: Option<Box<Path>>,
        (header, alignment): (Vec<u8>, u64),
        tensors: Vec<TensorSpec>,
    ) -> Result<Self> {
        let mut writer = Writer {
            out,
            path,
            alignment: alignment as usize,
            current: 0,
            in_current: 0,
            done: 0,
            total: tensors.iter().map(|spec| spec.size as u64).sum(),
            tensors,
            progress: None,
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Calls `progress` after every piece with the bytes of tensor data written so far and the
    /// total.
    pub fn on_progress(mut self, progress: impl FnMut(u64, u64) + Send + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Returns the tensor whose data comes next, or `None` when all data is written.
    pub fn next_tensor(&self) -> Option<&TensorSpec> {
        self.tensors.get(self.current)
    }

    /// Appends `bytes` to the data of the current tensor. After its last byte, the next tensor
    /// follows.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if `bytes` are more than the tensor needs.
    /// [`crate::ErrorKind::Io`].
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(spec) = self.tensors.get(self.current) else {
            return Err(self.invalid("data", "all tensors are written already".into()));
        };
        let lacking = spec.size - self.in_current;
        if bytes.len() > lacking {
            let message = format!("{} bytes are too many: {lacking} are lacking", bytes.len());
            return Err(self.invalid(format!("tensor {}", quoted(spec.name())), message));
        }
        self.put(bytes)?;
        self.advance(bytes.len())
    }

    /// Counts bytes of the current tensor as written.
    fn advance(&mut self, bytes: usize) -> Result<()> {
        let size = self.tensors.get(self.current).map_or(0, |spec| spec.size);
        self.in_current += bytes;
        self.done += bytes as u64;
        if self.in_current == size {
            self.pad(size.next_multiple_of(self.alignment) - size)?;
            self.current += 1;
            self.in_current = 0;
        }
        if let Some(progress) = &mut self.progress {
            progress(self.done, self.total);
        }
        Ok(())
    }

    /// Writes the data of a whole tensor, which must be the next one.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if it is not, or if the size of `bytes` is wrong.
    /// [`crate::ErrorKind::Io`].
    pub fn write_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let next = self.next_tensor();
        let message = match next {
            Some(spec) if spec.name() != name || self.in_current > 0 => {
                format!("is not the one that comes next, {}", quoted(spec.name()))
            }
            Some(spec) if spec.size != bytes.len() => {
                format!("takes {} bytes, not {}", spec.size, bytes.len())
            }
            Some(_) => return self.append(bytes),
            None => "all tensors are written already".into(),
        };
        Err(self.invalid(format!("tensor {}", quoted(name)), message))
    }

    /// Completes the data and returns the output.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if data is missing; [`crate::ErrorKind::Io`].
    pub fn finish(mut self) -> Result<W> {
        if let Some(spec) = self.next_tensor() {
            let message = format!(
                "lacks {} of its {} bytes",
                spec.size - self.in_current,
                spec.size
            );
            return Err(self.invalid(format!("tensor {}", quoted(spec.name())), message));
        }
        let flushed = self.out.flush();
        flushed.map_err(|error| self.named(Error::io("cannot write", &error)))?;
        Ok(self.out)
    }

    fn pad(&mut self, mut count: usize) -> Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while count > 0 {
            let piece = count.min(ZEROS.len());
            self.put(&ZEROS[..piece])?;
            count -= piece;
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.out.write_all(bytes);
        written.map_err(|error| self.named(Error::io("cannot write", &error)))
    }

    fn invalid(&self, field: impl std::fmt::Display, message: String) -> Error {
        self.named(Error::invalid(field, message))
    }

    fn named(&self, error: Error) -> Error {
        match &self.path {
            Some(path) => error.in_file(path),
            None => error,
        }
    }
}

/// Writes the tensors of `source` to `target` with other metadata, to edit metadata or to join a
/// split model. (The keys that describe the split are left out.) `target` may be the file of
/// `source` itself.
///
/// `options` provide progress and cancellation. The calling thread does the work.
///
/// # Errors
/// As [`Writer::create`] and reading. [`crate::ErrorKind::Cancelled`]. Then `target` is unchanged.
pub fn rewrite(
    source: &GgufFile,
    target: impl AsRef<Path>,
    metadata: &Metadata,
    options: &LoadOptions<'_>,
) -> Result<()> {
    const PIECE: usize = 1 << 20;
    let mut metadata = metadata.clone();
    for key in [KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS_COUNT] {
        metadata.remove(key);
    }
    let specs = source
        .tensors()
        .iter()
        .map(|info| TensorSpec::from_info(info, info.dtype));
    let mut writer = Writer::create(target, &metadata, specs.collect::<Result<_>>()?)?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(PIECE).map_err(|_| {
        let message = format!("there is no memory for a buffer of {PIECE} bytes");
        Error::new(ErrorKind::OutOfMemory, "", message)
    })?;
    buffer.resize(PIECE, 0);
    for info in source.tensors() {
        let part = source.part_of(info)?;
        for start in (0..info.size).step_by(PIECE) {
            if (options.cancel)() {
                return Err(Error::cancelled());
            }
            let piece = &mut buffer[..PIECE.min(info.size - start)];
            part.read_at(piece, info.offset + start as u64)?;
            writer.append(piece)?;
            (options.progress)(writer.done, writer.total);
        }
    }
    writer.commit()
}
