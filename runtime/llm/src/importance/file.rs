//! Files of importance matrices.

use super::{ImportanceMatrix, InputStatistics, corrupt, field};
use samite_core::DType;
use samite_gguf::{
    Error, ErrorKind, GgufFile, LoadMode, Metadata, StringArray, TensorInfo, TensorSpec, Value,
    Writer,
};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const KEY_DATASETS: &str = "imatrix.datasets";
const KEY_CHUNKS: &str = "imatrix.chunk_count";
const KEY_CHUNK_SIZE: &str = "imatrix.chunk_size";

impl ImportanceMatrix {
    /// Reads a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, has neither of the two formats, or has invalid
    /// numbers.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let matrix = match GgufFile::open(path, LoadMode::Read) {
            Ok(file) => Self::of_gguf(&file),
            Err(error) if error.kind() == ErrorKind::NotGguf => Self::of_dat(path),
            Err(error) => Err(error),
        };
        let matrix = matrix.and_then(Self::checked);
        let mut matrix = matrix.map_err(|error| error.in_file(path))?;
        matrix.file = Some(path.display().to_string());
        Ok(matrix)
    }

    fn of_gguf(file: &GgufFile) -> Result<Self, Error> {
        let metadata = file.metadata();
        if !metadata.contains(KEY_CHUNKS) {
            let message = "is missing: this is no importance matrix, which 'samite imatrix' makes";
            return Err(Error::new(
                ErrorKind::MissingKey,
                format!("key {KEY_CHUNKS:?}"),
                message,
            ));
        }
        let mut matrix = ImportanceMatrix {
            chunks: metadata.require::<u32>(KEY_CHUNKS)?.into(),
            chunk_size: Some(metadata.require(KEY_CHUNK_SIZE)?),
            ..Self::default()
        };
        let datasets: Option<&StringArray> = metadata.get(KEY_DATASETS)?;
        let texts = datasets.into_iter().flat_map(StringArray::iter);
        matrix.datasets = texts
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect();
        for sums in file.tensors().iter() {
            let Some(weight) = sums.name.strip_suffix(SUMS) else {
                continue;
            };
            let counts = file.require_tensor(&format!("{weight}{COUNTS}"))?;
            let counts = numbers(file, counts)?;
            let entry = InputStatistics {
                sums: numbers(file, sums)?,
                counts: counts
                    .into_iter()
                    .map(|count| count_of(weight, count))
                    .collect::<Result<_, _>>()?,
            };
            matrix.entries.insert(weight.to_owned(), entry);
        }
        Ok(matrix)
    }

    /// Reads the older format: the number of entries, then for each its name, the number of chunks,
    /// and sums; then the number of chunks and the name of the text.
    fn of_dat(path: &Path) -> Result<Self, Error> {
        let mut file = Dat::open(path)?;
        let mut matrix = Self::default();
        let entries = file.number("the number of entries")?;
        for index in 0..entries {
            let about = format!("entry {index}");
            let weight = file.text(&about)?;
            let calls = file.number(&about)?;
            let length = file.number(&about)?;
            let sums = file.bytes(&about, length, 4)?;
            let sums = sums
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes).into());
            let entry = InputStatistics {
                sums: sums.collect(),
                // Entries without counts are not divided.
                counts: vec![calls.max(1) as u64],
            };
            matrix.entries.insert(weight, entry);
        }
        if file.left > 0 {
            matrix.chunks = file.number("the number of chunks")? as u64;
            let text = file.text("the name of the text")?;
            matrix.datasets.extend((!text.is_empty()).then_some(text));
        }
        Ok(matrix)
    }

    /// Writes a GGUF file. It appears complete or not at all.
    ///
    /// # Errors
    /// Returns an error if writing fails, or if the matrix is empty.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        if self.entries.is_empty() {
            let message = "nothing was seen of any weight: no importance matrix is written";
            return Err(Error::new(ErrorKind::InvalidArgument, "", message));
        }
        let mut metadata = Metadata::new();
        metadata.set("general.type", "imatrix")?;
        let mut datasets = StringArray::default();
        self.datasets.iter().for_each(|name| datasets.push(name));
        metadata.set(KEY_DATASETS, Value::from(datasets))?;
        metadata.set(KEY_CHUNKS, u32::try_from(self.chunks).unwrap_or(u32::MAX))?;
        metadata.set(KEY_CHUNK_SIZE, self.chunk_size.unwrap_or(1))?;
        let mut specs = Vec::new();
        for (weight, entry) in &self.entries {
            let largest = entry.sums.iter().copied().fold(0.0, f64::max);
            if largest > f64::from(f32::MAX) {
                let message = format!("has the sum {largest}, which is too large for a file");
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    field(weight),
                    message,
                ));
            }
            let (columns, parts) = (
                entry.sums.len() / entry.counts.len().max(1),
                entry.counts.len(),
            );
            let f32 = DType::F32;
            specs.push(TensorSpec::new(
                &format!("{weight}{SUMS}"),
                f32,
                &[columns, parts],
            )?);
            specs.push(TensorSpec::new(
                &format!("{weight}{COUNTS}"),
                f32,
                &[1, parts],
            )?);
        }
        let mut writer = Writer::create(path, &metadata, specs)?;
        let mut bytes = Vec::new();
        for entry in self.entries.values() {
            bytes.clear();
            bytes.extend(
                entry
                    .sums
                    .iter()
                    .flat_map(|&sum| (sum as f32).to_le_bytes()),
            );
            writer.append(&bytes)?;
            bytes.clear();
            bytes.extend(
                entry
                    .counts
                    .iter()
                    .flat_map(|&count| (count as f32).to_le_bytes()),
            );
            writer.append(&bytes)?;
        }
        writer.commit()
    }
}

/// Converts a count of rows, which files store as F32.
fn count_of(weight: &str, count: f64) -> Result<u64, Error> {
    let is_count = count >= 0.0 && count <= (1u64 << 53) as f64;
    if is_count {
        Ok(count.round() as u64)
    } else {
        Err(corrupt(field(weight), &format!("has {count} rows")))
    }
}

fn numbers(file: &GgufFile, tensor: &TensorInfo) -> Result<Vec<f64>, Error> {
    if tensor.dtype != DType::F32 {
        let field = format!("tensor \"{}\"", tensor.name.escape_debug());
        return Err(corrupt(
            field,
            &format!("is {}, and should be f32", tensor.dtype),
        ));
    }
    let mut bytes = Vec::new();
    reserve(&mut bytes, tensor.size)?;
    file.read_tensor_into(tensor, &mut bytes)?;
    let values = bytes.as_chunks().0.iter();
    Ok(values
        .map(|bytes| f32::from_le_bytes(*bytes).into())
        .collect())
}

/// Allocates `size` bytes.
fn reserve(bytes: &mut Vec<u8>, size: usize) -> Result<(), Error> {
    bytes.try_reserve_exact(size).map_err(|_| {
        let message = format!("there is no memory for {size} bytes");
        Error::new(ErrorKind::OutOfMemory, "", message)
    })?;
    bytes.resize(size, 0);
    Ok(())
}

/// The unread rest of a file of the older format.
struct Dat {
    file: BufReader<File>,
    left: u64,
}

/// Maximum length of names. Names of weights are shorter, and those of texts are paths.
const MAX_NAME_LEN: usize = 4096;

impl Dat {
    fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|error| unreadable(&error))?;
        let left = file.metadata().map_err(|error| unreadable(&error))?.len();
        let file = BufReader::new(file);
        Ok(Dat { file, left })
    }

    /// Reads the next `count` elements of `size` bytes each.
    fn bytes(&mut self, about: &str, count: usize, size: usize) -> Result<Vec<u8>, Error> {
        let wanted = count.saturating_mul(size);
        if wanted as u64 > self.left {
            let message = format!(
                "is neither GGUF nor a whole importance matrix of the older format: {about} is cut off"
            );
            return Err(Error::new(ErrorKind::Truncated, "", message));
        }
        let mut bytes = Vec::new();
        reserve(&mut bytes, wanted)?;
        self.file
            .read_exact(&mut bytes)
            .map_err(|error| unreadable(&error))?;
        self.left -= wanted as u64;
        Ok(bytes)
    }

    fn number(&mut self, about: &str) -> Result<usize, Error> {
        let bytes = self.bytes(about, 1, 4)?;
        let number = bytes
            .first_chunk()
            .map_or(-1, |bytes| i32::from_le_bytes(*bytes));
        usize::try_from(number).map_err(|_| self.wrong(about, number as i64))
    }

    fn text(&mut self, about: &str) -> Result<String, Error> {
        let length = self.number(about)?;
        if length > MAX_NAME_LEN {
            return Err(self.wrong(about, length as i64));
        }
        let bytes = self.bytes(about, length, 1)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn wrong(&self, about: &str, number: i64) -> Error {
        let message = format!(
            "is neither GGUF nor an importance matrix of the older format: {about} has the number {number}"
        );
        corrupt("", &message)
    }
}

fn unreadable(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Io(error.kind()), "", format!("reading: {error}"))
}
