//! An open model: one file, or all parts of a split one.

use crate::cursor::Stop;
use crate::error::{Error, ErrorKind, Result, quoted};
use crate::header::{Data, Header};
use crate::mapping::Mapping;
use crate::metadata::{KEY_ARCHITECTURE, Metadata};
use crate::split::{KEY_SPLIT_COUNT, KEY_SPLIT_TENSORS_COUNT, Split, part_paths};
use crate::tensor::{TensorInfo, Tensors};
use samite_core::environment::{File, Files, SystemFiles};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Access to tensor data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Data is read into the caller's memory. A file that changes causes at most an error.
    #[default]
    Read,
    /// Files are mapped. Pages are read on access, shared between processes, and dropped under
    /// memory pressure. If the file is truncated meanwhile, the system kills this process: see
    /// [`Mapping`].
    Mmap,
    /// Like `Read`, but bypasses the system's page cache. The model evicts nothing from it, but has
    /// to be read from the disk each time. If that is not possible, this is like `Read`, with a
    /// warning; see [`Part::direct_refused`].
    Direct,
}

/// One file of a model.
#[derive(Debug)]
pub struct Part {
    path: PathBuf,
    len: u64,
    version: u32,
    alignment: u64,
    file: Arc<dyn File>,
    mapping: Option<Arc<Mapping>>,
    direct_refused: Option<Error>,
}

impl Part {
    /// Returns the path under which the file was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.len
    }

    /// Returns the version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the alignment of tensor data in the file.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Returns the whole file in memory, for devices that import host memory. `None` unless it is
    /// [`LoadMode::Mmap`]. A tensor starts at its [`TensorInfo::offset`].
    pub fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.mapping.as_ref()
    }

    /// Returns the reason why the file is read through the page cache although it was opened in
    /// [`LoadMode::Direct`].
    pub fn direct_refused(&self) -> Option<&Error> {
        self.direct_refused.as_ref()
    }

    /// Hints that the file will be read from start to end.
    pub(crate) fn advise_in_order(&self) {
        self.file.advise_in_order();
    }

    /// Fills `buffer` from `offset` of the file.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let read = self.file.read_exact_at(buffer, offset);
        read.map_err(|error| {
            let doing = format!("cannot read {} bytes at byte {offset}", buffer.len());
            let error = match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    let message = format!("{doing}: the file became shorter after it was opened");
                    Error::new(ErrorKind::Truncated, "", message)
                }
                _ => Error::io(&doing, &error),
            };
            error.in_file(&self.path)
        })
    }
}

/// An open model with its metadata, its tensors, and access to their data.
///
/// For a split model, the path may be that of any part. All parts are opened. The metadata is that
/// of the first part, the tensors are those of all parts.
///
/// ```no_run
/// use samite_gguf::{GgufFile, LoadMode};
///
/// let file = GgufFile::open("model.gguf", LoadMode::Mmap)?;
/// let architecture: &str = file.metadata().require("general.architecture")?;
/// println!("{architecture}: {} tensors", file.tensors().iter().len());
/// let info = file.require_tensor("output_norm.weight")?;
/// println!("{}: {:?}, {} bytes", info.name, info.dtype, file.tensor_bytes(info)?.len());
/// # Ok::<_, samite_gguf::Error>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    parts: Vec<Part>,
    metadata: Metadata,
    tensors: Tensors,
}

impl GgufFile {
    /// Opens a model and reads everything but its tensor data.
    ///
    /// # Errors
    /// If the path or the content of any part is invalid. See [`ErrorKind`].
    pub fn open(path: impl AsRef<Path>, mode: LoadMode) -> Result<Self> {
        Self::open_in(&SystemFiles, path, mode)
    }

    /// Does what [`open`](Self::open) does, with other files than the operating system's.
    ///
    /// # Errors
    /// As [`open`](Self::open). [`ErrorKind::InvalidArgument`] for mapping a file that is not the
    /// operating system's.
    pub fn open_in(files: &dyn Files, path: impl AsRef<Path>, mode: LoadMode) -> Result<Self> {
        Self::open_with(files, path.as_ref(), mode, Data::Complete)
    }

    /// Opens a model only for its headers. Tensor data may be missing at the end of its files, as
    /// in an incomplete download. Reading an incomplete tensor is an error.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_header(path: impl AsRef<Path>, mode: LoadMode) -> Result<Self> {
        // Little is read, so the page cache is not affected much.
        let mode = match mode {
            LoadMode::Direct => LoadMode::Read,
            mode => mode,
        };
        Self::open_with(&SystemFiles, path.as_ref(), mode, Data::MayBeMissing)
    }

    fn open_with(files: &dyn Files, path: &Path, mode: LoadMode, data: Data) -> Result<Self> {
        let (part, header) = open_part(files, path, mode, data)?;
        let split = Split::from_metadata(&header.metadata).map_err(|error| error.in_file(path))?;
        let file = match split {
            None => GgufFile {
                parts: vec![part],
                metadata: header.metadata,
                tensors: header.tensors,
            },
            Some(split) => open_parts(files, path, split, mode, data)?,
        };
        Ok(file)
    }

    /// Returns a model that is part of the program, in one piece. Does what [`open`](Self::open)
    /// does in [`LoadMode::Read`], without a file. `name` is used as its path, in errors and
    /// elsewhere.
    ///
    /// # Errors
    /// If the content is invalid. See [`ErrorKind`].
    pub fn from_static(name: impl AsRef<Path>, bytes: &'static [u8]) -> Result<Self> {
        Self::in_memory(name.as_ref(), bytes, Arc::new(bytes))
    }

    /// Returns a model from memory, like [`from_static`](Self::from_static).
    ///
    /// # Errors
    /// If the content is invalid. See [`ErrorKind`].
    pub fn from_bytes(name: impl AsRef<Path>, bytes: Arc<[u8]>) -> Result<Self> {
        Self::in_memory(name.as_ref(), &bytes, Arc::new(Arc::clone(&bytes)))
    }

    fn in_memory(path: &Path, bytes: &[u8], file: Arc<dyn File>) -> Result<Self> {
        let read = || {
            let mut header = Header::from_bytes(bytes)?;
            if Split::from_metadata(&header.metadata)?.is_some() {
                return Err(Error::new(
                    ErrorKind::Split,
                    "",
                    "is one part of a split model: only whole models can be in memory",
                ));
            }
            header.metadata.set_origin(path);
            let part = Part {
                path: path.to_owned(),
                len: bytes.len() as u64,
                version: header.version,
                alignment: header.alignment,
                file,
                mapping: None,
                direct_refused: None,
            };
            Ok(GgufFile {
                parts: vec![part],
                metadata: header.metadata,
                tensors: header.tensors,
            })
        };
        read().map_err(|error| error.in_file(path))
    }

    /// Returns the metadata. For a split model, returns that of the first part.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the metadata for changes in memory.
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Returns the tensors, in file order, with lookup by name.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Returns the tensor called `name`, if it exists.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Returns the tensor called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::MissingTensor`] if it does not exist.
    pub fn require_tensor(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors
            .require(name)
            .map_err(|error| error.in_file(self.path()))
    }

    /// Returns the files: one, or all parts in order. [`TensorInfo::file`] indexes them.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the path of the file, or of the first part.
    pub fn path(&self) -> &Path {
        self.parts.first().map_or(Path::new(""), |part| &part.path)
    }

    /// Returns the size of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Returns the file of a tensor, after checking that `info` describes data inside it, because
    /// anyone can create a [`TensorInfo`].
    pub(crate) fn part_of(&self, info: &TensorInfo) -> Result<&Part> {
        self.parts
            .get(info.file)
            .filter(|part| info.end().is_some_and(|end| end <= part.len))
            .ok_or_else(|| {
                let message = "is not a tensor of this model, or its data is missing";
                Error::invalid(tensor_field(info), message).in_file(self.path())
            })
    }

    /// Returns the mapping of a tensor's file, and the tensor's place in it.
    fn mapped(&self, info: &TensorInfo) -> Result<Option<(&Mapping, Range<usize>)>> {
        let Some(mapping) = &self.part_of(info)?.mapping else {
            return Ok(None);
        };
        // Mapped offsets fit `usize`.
        let start = info.offset as usize;
        Ok(Some((mapping, start..start + info.size)))
    }

    /// Returns the data of a tensor, in place.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] unless it is [`LoadMode::Mmap`], or for a tensor of another
    /// model.
    pub fn tensor_bytes(&self, info: &TensorInfo) -> Result<&[u8]> {
        let bytes = self
            .mapped(info)?
            .and_then(|(mapping, range)| mapping.get(range));
        bytes.ok_or_else(|| {
            let message = "the file is not mapped: open it with LoadMode::Mmap, or read the tensor";
            Error::invalid(tensor_field(info), message).in_file(self.path())
        })
    }

    /// Reads the data of a tensor, from any thread. Works in every mode.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the size of `buffer` is not exactly the tensor's, or for a
    /// tensor of another model. [`ErrorKind::Io`].
    pub fn read_tensor_into(&self, info: &TensorInfo, buffer: &mut [u8]) -> Result<()> {
        let part = self.part_of(info)?;
        if buffer.len() != info.size {
            let message = format!("has {} bytes, but the buffer {}", info.size, buffer.len());
            return Err(Error::invalid(tensor_field(info), message).in_file(&part.path));
        }
        part.read_at(buffer, info.offset)
    }

    /// Hints that a tensor's data will be needed soon. Does nothing unless it is mapped.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a tensor of another model.
    pub fn prefetch(&self, info: &TensorInfo) -> Result<()> {
        if let Some((mapping, range)) = self.mapped(info)? {
            mapping.will_need(range);
        }
        Ok(())
    }

    /// Returns the memory of a tensor's data to the system, after it was copied elsewhere. The data
    /// stays readable, because it is read from the file again. A hint that does nothing unless it
    /// is mapped.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a tensor of another model.
    pub fn release(&self, info: &TensorInfo) -> Result<()> {
        if let Some((mapping, range)) = self.mapped(info)? {
            mapping.release(range);
        }
        Ok(())
    }
}

pub(crate) fn tensor_field(info: &TensorInfo) -> String {
    format!("tensor {}", quoted(&info.name))
}

fn open_part(files: &dyn Files, path: &Path, mode: LoadMode, data: Data) -> Result<(Part, Header)> {
    let open = || -> Result<_> {
        let cannot_open = |error: io::Error| match error.kind() {
            io::ErrorKind::IsADirectory => {
                Error::invalid("", "is a directory: name the .gguf file in it")
            }
            io::ErrorKind::NotSeekable => {
                Error::invalid("", "is not a regular file: copy the model to one")
            }
            _ => Error::io("cannot open the file", &error),
        };
        let direct = (mode == LoadMode::Direct).then(|| files.open_direct(path));
        let (file, direct_refused) = match direct {
            Some(Ok(file)) => (file, None),
            Some(Err(error)) => {
                let file = files.open(path).map_err(cannot_open)?;
                let doing = "is read through the page cache, because the system refuses to read past it (O_DIRECT)";
                let refused = Error::io(doing, &error).in_file(path);
                tracing::warn!("{refused}");
                (file, Some(refused))
            }
            None => (files.open(path).map_err(cannot_open)?, None),
        };
        let len = file
            .size()
            .map_err(|error| Error::io("cannot ask for the size of the file", &error))?;
        let mapping = match mode {
            LoadMode::Mmap if len > 0 => {
                let file = file.as_system_file().ok_or_else(|| {
                    Error::invalid("", "cannot be mapped: open it with LoadMode::Read")
                })?;
                Some(Mapping::new(file)?)
            }
            _ => None,
        };
        let mut header = match &mapping {
            Some(mapping) => Header::whole(mapping, data)?,
            None => read_header(&*file, len, data)?,
        };
        header.metadata.set_origin(path);
        let part = Part {
            path: path.to_owned(),
            len: mapping.as_ref().map_or(len, |mapping| mapping.len() as u64),
            version: header.version,
            alignment: header.alignment,
            file,
            mapping: mapping.map(Arc::new),
            direct_refused,
        };
        Ok((part, header))
    };
    open().map_err(|error| error.in_file(path))
}

/// Reads the header of a file without knowing its size: parses the first bytes, and more of them if
/// they do not suffice.
fn read_header(file: &dyn File, len: u64, data: Data) -> Result<Header> {
    let mut bytes = Vec::new();
    let mut wanted = 4 << 20;
    loop {
        let count = usize::try_from(wanted.min(len)).unwrap_or(usize::MAX);
        let had = bytes.len();
        bytes.try_reserve_exact(count - had).map_err(|_| {
            let message = format!("there is no memory for a header of {count} bytes");
            Error::new(ErrorKind::OutOfMemory, "header", message)
        })?;
        bytes.resize(count, 0);
        file.read_exact_at(&mut bytes[had..], had as u64)
            .map_err(|error| Error::io("cannot read the header", &error))?;
        match Header::parse(&bytes, len, data) {
            Ok(header) => return Ok(header),
            Err(Stop::Failed(error)) => return Err(error),
            Err(Stop::NeedMore(needed)) => wanted = needed.max(wanted.saturating_mul(4)),
        }
    }
}

/// Opens all parts of a split model, given the path of one of them, and checks that they belong
/// together.
fn open_parts(
    files: &dyn Files,
    path: &Path,
    split: Split,
    mode: LoadMode,
    data: Data,
) -> Result<GgufFile> {
    let paths = part_paths(path, split)?;
    let mut parts = Vec::new();
    let mut infos: Vec<TensorInfo> = Vec::new();
    let mut first: Option<(Metadata, Split)> = None;
    for (no, path) in paths.iter().enumerate() {
        let wrong = |field: &str, message: String| {
            Error::new(ErrorKind::Split, field, message).in_file(path)
        };
        let (part, header) =
            open_part(files, path, mode, data).map_err(|error| match error.kind() {
                ErrorKind::Io(io::ErrorKind::NotFound) => wrong(
                    "",
                    format!(
                        "part {} of {} of the model is missing: put all parts into one folder",
                        no + 1,
                        split.count
                    ),
                ),
                _ => error,
            })?;
        let own = Split::from_metadata(&header.metadata).map_err(|error| error.in_file(path))?;
        let Some(own) = own.filter(|own| own.count == split.count) else {
            let message = format!(
                "does not say {}, as the parts beside it do: it belongs to another model",
                split.count
            );
            return Err(wrong(&format!("key \"{KEY_SPLIT_COUNT}\""), message));
        };
        if usize::from(own.no) != no {
            let message = format!(
                "is called part {}, but says that it is part {}",
                no + 1,
                u32::from(own.no) + 1
            );
            return Err(wrong("", message));
        }
        if let Some((metadata, first)) = &first {
            let (ours, theirs) = (
                header.metadata.get::<&str>(KEY_ARCHITECTURE)?,
                metadata.get(KEY_ARCHITECTURE)?,
            );
            if let (Some(ours), theirs) = (ours, theirs.unwrap_or_default())
                && ours != theirs
            {
                let message = format!(
                    "is {}, but {} in the first part",
                    quoted(ours),
                    quoted(theirs)
                );
                return Err(wrong(&format!("key \"{KEY_ARCHITECTURE}\""), message));
            }
            if let (Some(ours), Some(theirs)) = (own.tensors, first.tensors)
                && ours != theirs
            {
                let message = format!("is {ours}, but {theirs} in the first part");
                return Err(wrong(
                    &format!("key \"{KEY_SPLIT_TENSORS_COUNT}\""),
                    message,
                ));
            }
        }
        infos.extend(
            header
                .tensors
                .into_list()
                .into_iter()
                .map(|info| TensorInfo { file: no, ..info }),
        );
        first.get_or_insert((header.metadata, own));
        parts.push(part);
    }
    let (metadata, first) = first.unwrap_or((Metadata::new(), split));
    if let Some(expected) = first
        .tensors
        .filter(|&expected| expected != infos.len() as u64)
    {
        let message = format!(
            "is {expected}, but the parts have {} tensors together",
            infos.len()
        );
        return Err(Error::new(
            ErrorKind::Split,
            format!("key \"{KEY_SPLIT_TENSORS_COUNT}\""),
            message,
        )
        .in_file(path));
    }
    let tensors = Tensors::new(infos).map_err(|(_, name)| {
        let message = "occurs in more than one part: the parts belong to different models";
        Error::new(
            ErrorKind::Split,
            format!("tensor {}", quoted(&name)),
            message,
        )
        .in_file(path)
    })?;
    Ok(GgufFile {
        parts,
        metadata,
        tensors,
    })
}
