//! Importance matrices: how much each column of a model's matrices matters, so that quantization keeps best what matters most.
//!
//! A column matters as much as what is multiplied with it is large: the matrix holds, for each weight, the mean square of its input in each column
//! while the model reads sample texts. Weights that are matrices of experts have such a row for each expert.
//!
//! Files are those of `llama-imatrix`: GGUF with sums and counts, and the older `.dat`, which is only read.

use crate::context::{Context, Seen, Watcher};
use crate::error::{Error as ModelError, Result as ModelResult};
use crate::perplexity::{self, Perplexity};
use samite_core::{Graph, Op, TensorId, TensorRef};
use samite_gguf::{
    Error, ErrorKind, GgufFile, LoadMode, Metadata, StringArray, TensorSpec, Value, Writer,
};
use samite_quant::RowReader;
use samite_sched::Watch;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const KEY_DATASETS: &str = "imatrix.datasets";
const KEY_CHUNKS: &str = "imatrix.chunk_count";
const KEY_CHUNK_SIZE: &str = "imatrix.chunk_size";

/// Products of fewer rows are not looked at, as in llama.cpp: such inputs are not those of a text.
const LEAST_ROWS: usize = 16;

/// What was seen of one weight's input.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Entry {
    /// Sums of squares by column; those of all columns for one matrix after the other, where there are several.
    sums: Vec<f64>,
    /// Rows that were summed, by matrix, or one number for all.
    counts: Vec<u64>,
}

impl Entry {
    /// Makes it one of so many numbers, if there was nothing seen yet.
    fn of_size(&mut self, weight: &str, sums: usize, counts: usize) -> Result<(), String> {
        if self.counts.is_empty() {
            (self.sums, self.counts) = (vec![0.0; sums], vec![0; counts]);
        }
        // Older files have one count for all experts.
        if let [count] = *self.counts {
            self.counts = vec![count; counts];
        }
        if self.sums.len() != sums || self.counts.len() != counts {
            return Err(format!(
                "'{weight}' has {sums} columns in {counts} parts here, and {} in {} there: the importance matrix is of another model",
                self.sums.len(),
                self.counts.len()
            ));
        }
        Ok(())
    }

    fn add(&mut self, columns: usize, part: usize, squares: &[f64]) {
        for (sum, square) in self.sums[part * columns..].iter_mut().zip(squares) {
            *sum += square;
        }
    }

    /// Experts without any row, and all.
    fn unseen(&self) -> (usize, usize) {
        (
            self.counts.iter().filter(|&&count| count == 0).count(),
            self.counts.len(),
        )
    }

    /// How much the columns matter: 1 for all of an expert that never had a row.
    fn importance(&self) -> Vec<f32> {
        let columns = self.sums.len() / self.counts.len().max(1);
        let of_part = |(sums, &count): (&[f64], &u64)| -> Vec<f32> {
            // In single precision as llama.cpp does it, so that files become the same.
            let mean = |sum: &f64| {
                if count == 0 {
                    1.0
                } else {
                    *sum as f32 / count as f32
                }
            };
            sums.iter().map(mean).collect()
        };
        let parts = self.sums.chunks(columns.max(1)).zip(&self.counts);
        parts.flat_map(of_part).collect()
    }
}

/// How much the columns of a model's weights matter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    entries: BTreeMap<String, Entry>,
    datasets: Vec<String>,
    chunks: u64,
    /// Tokens of a chunk; 0 in older files, which do not say so and count chunks.
    chunk_size: u32,
    /// The file that it was read from.
    file: Option<String>,
}

impl ImportanceMatrix {
    /// A matrix that has seen nothing yet, for texts in chunks of so many tokens.
    pub fn new(chunk_size: u32) -> Self {
        ImportanceMatrix {
            chunk_size,
            ..Self::default()
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is neither of the two formats, or has numbers that cannot be.
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
        let mut matrix = ImportanceMatrix {
            chunks: metadata.require::<u32>(KEY_CHUNKS)?.into(),
            chunk_size: metadata.require(KEY_CHUNK_SIZE)?,
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
            let entry = Entry {
                sums: numbers(file, sums)?,
                // Whole numbers, written as others.
                counts: counts
                    .into_iter()
                    .map(|count| count.round() as u64)
                    .collect(),
            };
            matrix.entries.insert(weight.to_owned(), entry);
        }
        Ok(matrix)
    }

    /// The older format: a number of entries, and for each its name, how many chunks it saw, and sums; then the number of chunks and the name of the text.
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
            let entry = Entry {
                sums: sums.collect(),
                counts: vec![calls.max(1) as u64],
            };
            matrix.entries.insert(weight, entry);
        }
        if !file.rest.is_empty() {
            matrix.chunks = file.number("the number of chunks")? as u64;
            let text = file.text("the name of the text")?;
            matrix.datasets.extend((!text.is_empty()).then_some(text));
        }
        Ok(matrix)
    }

    fn checked(self) -> Result<Self, Error> {
        if self.entries.is_empty() {
            return Err(corrupt("", "has no importance of any weight"));
        }
        for (weight, entry) in &self.entries {
            let field = || format!("importance of \"{}\"", weight.escape_debug());
            let parts = entry.counts.len();
            if parts == 0 || entry.sums.is_empty() || !entry.sums.len().is_multiple_of(parts) {
                let message = format!("has {} columns in {parts} parts", entry.sums.len());
                return Err(corrupt(field(), &message));
            }
            if let Some(sum) = entry
                .sums
                .iter()
                .find(|sum| !(sum.is_finite() && **sum >= 0.0))
            {
                return Err(corrupt(field(), &format!("has the sum {sum}")));
            }
        }
        Ok(self)
    }

    /// Writes a GGUF file. It appears complete or not at all.
    ///
    /// # Errors
    /// If the disk refuses, or nothing was seen.
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
        metadata.set(KEY_CHUNK_SIZE, self.chunk_size)?;
        let mut specs = Vec::new();
        for (weight, entry) in &self.entries {
            let (columns, parts) = (
                entry.sums.len() / entry.counts.len().max(1),
                entry.counts.len(),
            );
            let f32 = samite_core::DType::F32;
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

    /// One that says how much columns matter, as [`importance`](Self::importance) does.
    pub fn of_importance(
        weights: impl IntoIterator<Item = (String, Vec<f32>)>,
    ) -> Result<Self, Error> {
        let entries = weights.into_iter().map(|(weight, importance)| {
            let sums = importance.into_iter().map(f64::from).collect();
            (
                weight,
                Entry {
                    sums,
                    counts: vec![1],
                },
            )
        });
        let matrix = ImportanceMatrix {
            entries: entries.collect(),
            ..Self::default()
        };
        matrix.checked()
    }

    /// Notes in a model's file what it was quantized with, under llama.cpp's keys.
    pub(crate) fn describe(&self, metadata: &mut Metadata) -> Result<(), Error> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        metadata.set("quantize.imatrix.file", file.as_str())?;
        if let Some(name) = self.datasets.first() {
            metadata.set("quantize.imatrix.dataset", name.as_str())?;
        }
        let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        metadata.set(
            "quantize.imatrix.entries_count",
            number(self.entries.len() as u64),
        )?;
        if self.chunks > 0 {
            metadata.set("quantize.imatrix.chunks_count", number(self.chunks))?;
        }
        Ok(())
    }

    /// Adds what another matrix of the same model has seen.
    ///
    /// # Errors
    /// If its weights have other sizes.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        // Older files have means times the number of chunks.
        let scale = if other.chunk_size == 0 {
            u64::from(self.chunk_size)
        } else {
            1
        };
        for (weight, seen) in &other.entries {
            let entry = self.entries.entry(weight.clone()).or_default();
            // One count for all experts, or one for each of them.
            let counts = seen.counts.len().max(entry.counts.len());
            let mut seen = seen.clone();
            let size = seen.sums.len();
            for entry in [&mut seen, &mut *entry] {
                let sized = entry.of_size(weight, size, counts);
                sized.map_err(|message| Error::new(ErrorKind::InvalidArgument, "", message))?;
            }
            for (sum, seen) in entry.sums.iter_mut().zip(&seen.sums) {
                *sum += seen * scale as f64;
            }
            for (count, seen) in entry.counts.iter_mut().zip(&seen.counts) {
                *count += seen * scale;
            }
        }
        self.datasets.extend_from_slice(&other.datasets);
        self.chunks += other.chunks;
        Ok(())
    }

    /// Notes the name of a text that is read.
    pub fn add_dataset(&mut self, name: impl Into<String>) {
        self.datasets.push(name.into());
    }

    /// Names of the texts.
    pub fn datasets(&self) -> &[String] {
        &self.datasets
    }

    /// Chunks of text that were read.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Names of the weights.
    pub fn weights(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Keeps only the weights that `keeps` says.
    pub fn retain(&mut self, mut keeps: impl FnMut(&str) -> bool) {
        self.entries.retain(|weight, _| keeps(weight));
    }

    /// Weights of which some experts never had a row: name, so many experts, of so many.
    pub fn unseen_experts(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let unseen = self
            .entries
            .iter()
            .map(|(weight, entry)| (&**weight, entry.unseen()));
        unseen
            .filter(|(_, (none, _))| *none > 0)
            .map(|(weight, (none, all))| (weight, none, all))
    }

    /// How much the columns of a weight matter: of one matrix after the other. `None` if nothing is known.
    pub fn importance(&self, weight: &str) -> Option<Vec<f32>> {
        self.entries.get(weight).map(Entry::importance)
    }
}

fn corrupt(field: impl std::fmt::Display, message: &str) -> Error {
    Error::new(ErrorKind::Corrupt, field, message)
}

fn numbers(file: &GgufFile, tensor: &samite_gguf::TensorInfo) -> Result<Vec<f64>, Error> {
    if tensor.dtype != samite_core::DType::F32 {
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

/// Makes room for `size` bytes.
fn reserve(bytes: &mut Vec<u8>, size: usize) -> Result<(), Error> {
    bytes.try_reserve_exact(size).map_err(|_| {
        let message = format!("there is no memory for {size} bytes");
        Error::new(ErrorKind::OutOfMemory, "", message)
    })?;
    bytes.resize(size, 0);
    Ok(())
}

/// A file of the older format, as far as it is not read yet.
struct Dat {
    all: Vec<u8>,
    rest: std::ops::Range<usize>,
}

impl Dat {
    fn open(path: &Path) -> Result<Self, Error> {
        let read = |error: std::io::Error| {
            Error::new(ErrorKind::Io(error.kind()), "", format!("reading: {error}"))
        };
        let mut file = std::fs::File::open(path).map_err(read)?;
        let size = file.metadata().map_err(read)?.len();
        let mut all = Vec::new();
        reserve(&mut all, usize::try_from(size).unwrap_or(usize::MAX))?;
        file.read_exact(&mut all).map_err(read)?;
        Ok(Dat {
            rest: 0..all.len(),
            all,
        })
    }

    /// The next `count` things of `size` bytes each.
    fn bytes(&mut self, about: &str, count: usize, size: usize) -> Result<&[u8], Error> {
        let bytes = count.saturating_mul(size);
        if bytes > self.rest.len() {
            let message = format!(
                "is neither GGUF nor a whole importance matrix of the older format: {about} is cut off"
            );
            return Err(Error::new(ErrorKind::Truncated, "", message));
        }
        let start = self.rest.start;
        self.rest.start += bytes;
        Ok(&self.all[start..start + bytes])
    }

    fn number(&mut self, about: &str) -> Result<usize, Error> {
        let bytes = self.bytes(about, 1, 4)?;
        let number = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        usize::try_from(number).map_err(|_| {
            let message = format!("is neither GGUF nor an importance matrix of the older format: {about} has the number {number}");
            corrupt("", &message)
        })
    }

    fn text(&mut self, about: &str) -> Result<String, Error> {
        let length = self.number(about)?;
        let bytes = self.bytes(about, length, 1)?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }
}

/// Has `context`'s model read `tokens` in chunks of `chunk`, each on its own, and adds to `matrix` what it sees. It begins each chunk as [`perplexity`](crate::perplexity()) does, and
/// measures it, too. `on_chunk` is told so after each chunk, and can save the matrix.
///
/// The output matrix is looked at only if `with_output`: it is large, and llama.cpp's tool leaves it out.
///
/// # Errors
/// As [`perplexity`](crate::perplexity()); those of `on_chunk`; [`ModelError::Model`] if a weight's input is not finite.
pub fn collect(
    context: &mut Context,
    tokens: &[u32],
    chunk: usize,
    matrix: ImportanceMatrix,
    with_output: bool,
    mut on_chunk: impl FnMut(&Perplexity, &ImportanceMatrix) -> ModelResult<()>,
) -> ModelResult<ImportanceMatrix> {
    let shared = Arc::new(Mutex::new(Collector {
        matrix,
        with_output,
        ..Collector::default()
    }));
    let before = context.watch(Some(Collector::watcher(&shared)));
    let measured = perplexity::measure(context, tokens, chunk, true, |so_far| {
        let collector = &mut *lock(&shared);
        collector.matrix.chunks += 1;
        on_chunk(so_far, &collector.matrix)
    });
    context.watch(before);
    let collector = std::mem::take(&mut *lock(&shared));
    match (collector.trouble, measured) {
        (Some(message), _) => Err(ModelError::model(message)),
        (None, measured) => measured.map(|_| collector.matrix),
    }
}

fn lock(shared: &Mutex<Collector>) -> MutexGuard<'_, Collector> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A product whose input is to be seen, with these matrices: extents 2 and 3 of the weight.
struct Dense {
    weight: String,
    parts: [usize; 2],
}

/// A product with chosen experts, whose input and whose numbers of experts are to be seen.
struct Routed {
    weight: String,
    experts: usize,
    input: TensorId,
    numbers: TensorId,
}

impl Routed {
    fn has(&self, operand: TensorId) -> bool {
        self.input == operand || self.numbers == operand
    }
}

/// Sees the inputs of products, and sums their squares.
#[derive(Default)]
struct Collector {
    matrix: ImportanceMatrix,
    with_output: bool,
    /// By input.
    dense: HashMap<TensorId, Vec<Dense>>,
    /// Those of this run that are still to come.
    routed: Vec<Routed>,
    /// Their operands that are there already.
    held: HashMap<TensorId, (TensorRef, Vec<u8>)>,
    reader: RowReader,
    trouble: Option<String>,
}

impl Collector {
    fn watcher(shared: &Arc<Mutex<Self>>) -> Watcher {
        let [begins, wants, sees] = [0; 3].map(|_| Arc::clone(shared));
        let watcher = Watcher::new(
            move |node| lock(&wants).wants(node.id()),
            move |seen| {
                let collector = &mut *lock(&sees);
                match collector.see(seen) {
                    Ok(()) => Ok(Watch::Continue),
                    Err(Trouble::Core(error)) => Err(error),
                    Err(Trouble::Here(message)) => {
                        collector.trouble = Some(message);
                        Ok(Watch::Stop)
                    }
                }
            },
        );
        watcher.beginning_with(move |graph| lock(&begins).begin(graph))
    }

    /// Finds the products whose inputs are to be seen.
    fn begin(&mut self, graph: &Graph) {
        self.dense.clear();
        self.routed.clear();
        self.held.clear();
        for id in graph.ids() {
            let node = graph.node(id);
            let [Some(weight), Some(input)] = [node.source(0), node.source(1)] else {
                continue;
            };
            if weight.tensor().is_computed() || !graph.tensor(id).is_computed() {
                continue;
            }
            let name = weight.tensor().name.to_string();
            let [_, _, parts @ ..] = weight.tensor().layout.shape();
            let input_rows = input.tensor().layout.shape()[1];
            match (node.op(), node.source(2)) {
                (Op::MulMat { .. }, _) if self.concerns(&name) && input_rows >= LEAST_ROWS => {
                    let dense = self.dense.entry(input.id()).or_default();
                    dense.push(Dense {
                        weight: name,
                        parts,
                    });
                }
                (Op::MulMatId { .. }, Some(numbers)) => self.routed.push(Routed {
                    weight: name,
                    experts: parts[0],
                    input: input.id(),
                    numbers: numbers.id(),
                }),
                _ => {}
            }
        }
    }

    fn concerns(&self, weight: &str) -> bool {
        weight.starts_with("blk.") || self.with_output && weight == "output.weight"
    }

    fn wants(&self, id: TensorId) -> bool {
        self.dense.contains_key(&id) || self.routed.iter().any(|product| product.has(id))
    }

    fn see(&mut self, seen: &Seen<'_>) -> Result<(), Trouble> {
        let id = seen.node.id();
        let mut bytes = vec![0; seen.value.layout().bytes()];
        seen.value.read(0, &mut bytes)?;
        for Dense { weight, parts } in self.dense.remove(&id).unwrap_or_default() {
            self.add_input(&weight, parts, seen.value, &bytes)?;
        }
        if self.routed.iter().any(|product| product.has(id)) {
            self.held.insert(id, (seen.value.clone(), bytes));
            let routed = std::mem::take(&mut self.routed);
            for product in routed {
                if !self.add_routed(&product)? {
                    self.routed.push(product);
                }
            }
            let waiting = &self.routed;
            self.held
                .retain(|&id, _| waiting.iter().any(|product| product.has(id)));
        }
        Ok(())
    }

    fn add_input(
        &mut self,
        weight: &str,
        parts: [usize; 2],
        value: &TensorRef,
        bytes: &[u8],
    ) -> Result<(), Trouble> {
        let layout = value.layout();
        let columns = layout.shape()[0];
        let matrices = parts[0] * parts[1];
        let entry = self.matrix.entries.entry(weight.to_owned()).or_default();
        let counts = entry.counts.len().max(1);
        entry
            .of_size(weight, columns * matrices, counts)
            .map_err(Trouble::Here)?;
        let mut squares = vec![0.0; columns * matrices];
        for row in 0..layout.rows() {
            let [_, i2, i3] = layout.row_index(row);
            let part = i3 % parts[1] * parts[0] + i2 % parts[0];
            let values = self.reader.read(layout, bytes, row)?;
            let squares = &mut squares[part * columns..][..columns];
            for (square, value) in squares.iter_mut().zip(values) {
                *square += value * value;
            }
        }
        check(weight, &squares)?;
        entry.add(columns, 0, &squares);
        let rows = (layout.rows() / matrices) as u64;
        entry.counts.iter_mut().for_each(|count| *count += rows);
        Ok(())
    }

    /// Adds the input of a product with experts, if both operands are there. Returns whether they are.
    fn add_routed(&mut self, product: &Routed) -> Result<bool, Trouble> {
        let Routed {
            weight,
            experts,
            input,
            numbers,
        } = product;
        let [Some((value, bytes)), Some((chosen, chosen_bytes))] =
            [input, numbers].map(|id| self.held.get(id))
        else {
            return Ok(false);
        };
        let (layout, chosen) = (value.layout(), chosen.layout());
        let columns = layout.shape()[0];
        let entry = self.matrix.entries.entry(weight.to_owned()).or_default();
        entry
            .of_size(weight, columns * experts, *experts)
            .map_err(Trouble::Here)?;
        for token in 0..chosen.shape()[1] {
            let of_token = self.reader.read(chosen, chosen_bytes, token)?.to_vec();
            for (place, expert) in of_token.into_iter().enumerate() {
                let expert = expert as usize;
                let Some(count) = entry.counts.get_mut(expert) else {
                    return Err(Trouble::Here(format!(
                        "'{weight}' has {experts} experts, and number {expert} is asked for"
                    )));
                };
                *count += 1;
                let row = place % layout.shape()[1] + token * layout.shape()[1];
                let values = self.reader.read(layout, bytes, row)?;
                let sums = &mut entry.sums[expert * columns..][..columns];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += value * value;
                }
            }
        }
        check(weight, &entry.sums)?;
        Ok(true)
    }
}

/// Refuses sums that would make any matrix of use to nobody.
fn check(weight: &str, sums: &[f64]) -> Result<(), Trouble> {
    match sums.iter().all(|sum| sum.is_finite()) {
        true => Ok(()),
        false => Err(Trouble::Here(format!(
            "the input of '{weight}' is not finite: the model computes nonsense of this text; is it damaged?"
        ))),
    }
}

/// Why a run is stopped.
enum Trouble {
    Core(samite_core::Error),
    Here(String),
}

impl From<samite_core::Error> for Trouble {
    fn from(error: samite_core::Error) -> Self {
        Trouble::Core(error)
    }
}
