//! Saved sequences: the cache of a sequence, in memory or in a GGUF file.
//!
//! The file's architecture is `samite-sequence`. Its metadata contain the identity of the model,
//! positions and tokens, and a CRC-32 of everything. Its tensors are the rows of each layer, in the
//! order of positions.

use crate::adapter::ScaledAdapter;
use crate::context::Context;
use crate::error::{Error, Result, try_filled};
use crate::finite::are_finite;
use crate::kv::{KvCache, Window};
use crate::model::Model;
use samite_core::{DType, StoredTensor};
use samite_gguf::{
    GgufFile, Header, KEY_ARCHITECTURE, LoadMode, Metadata, TensorInfo, TensorSpec, Writer,
};
use samite_text::SamplerState;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

const ARCHITECTURE: &str = "samite-sequence";
const NAME: &str = "general.name";
const MODEL: &str = "samite.sequence.model";
const ADAPTERS: &str = "samite.sequence.adapters";
const TOKENS: &str = "samite.sequence.tokens";
const POSITIONS: &str = "samite.sequence.positions";
const WINDOW: &str = "samite.sequence.window";
const LAST: &str = "samite.sequence.last";
const GENERATED: &str = "samite.sequence.generated";
const SAMPLER: &str = "samite.sequence.sampler";
const DRAW: &str = "samite.sequence.draw";
const APPLICATION: &str = "samite.sequence.application";
const CHECKSUM: &str = "samite.sequence.checksum";

/// A saved sequence: the cached rows of all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedSequence {
    /// Name of the model.
    pub model: String,
    /// Tokens, if the caller that saved the sequence knew them.
    pub tokens: Vec<u32>,
    /// Text of the application.
    pub application: String,
    /// State of the generation when it stopped.
    pub(crate) stopped: Option<Stopped>,
    fingerprint: u64,
    adapters: u64,
    positions: Vec<i32>,
    /// Positions that layers with a window still have.
    window: Vec<i32>,
    tensors: Vec<CacheRows>,
}

/// State of a generation when it stopped.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stopped {
    pub sampler: SamplerState,
    /// Token that was sampled last, if it is not in the cache.
    pub last: Option<u32>,
    /// Number of tokens after the prompt, including that one.
    pub generated: usize,
}

/// Rows of one tensor of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CacheRows {
    name: String,
    dtype: DType,
    width: usize,
    count: usize,
    bytes: RowBytes,
}

/// Bytes of rows: within those of a whole file that is in memory, or on their own.
#[derive(Clone, Debug)]
struct RowBytes {
    file: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl From<Vec<u8>> for RowBytes {
    fn from(bytes: Vec<u8>) -> Self {
        RowBytes {
            range: 0..bytes.len(),
            file: Arc::new(bytes),
        }
    }
}

impl Deref for RowBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.file.get(self.range.clone()).unwrap_or_default()
    }
}

impl PartialEq for RowBytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for RowBytes {}

/// FNV-1a hash.
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub fn new() -> Self {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Adds the name, type, shape and first bytes of a tensor.
    pub fn add_tensor(&mut self, name: &str, tensor: &StoredTensor) -> Result<()> {
        const FIRST: usize = 1024;
        let layout = tensor.layout();
        self.add(name.as_bytes());
        self.add(layout.to_string().as_bytes());
        let mut first = vec![0; layout.bytes().min(FIRST)];
        tensor.tensor().read(0, &mut first)?;
        self.add(&first);
        Ok(())
    }

    pub fn finish(self) -> u64 {
        self.0
    }
}

fn fingerprint_of_adapters(adapters: &[ScaledAdapter]) -> Result<u64> {
    let mut fingerprint = Fingerprint::new();
    for scaled in adapters {
        fingerprint.add(&scaled.share.to_le_bytes());
        for name in scaled.adapter.targets() {
            if let Some(pair) = scaled.adapter.pair(name).filter(|_| scaled.share != 0.0) {
                fingerprint.add_tensor(name, &pair.a)?;
                fingerprint.add_tensor(name, &pair.b)?;
            }
        }
        for (layer, direction) in scaled.adapter.directions() {
            fingerprint.add(&layer.to_le_bytes());
            fingerprint.add_tensor(direction.name(), direction)?;
        }
    }
    Ok(fingerprint.finish())
}

/// Returns the tensors of a cache with their rows for a sequence: those of all its tokens, those of
/// layers with a window, or its state.
pub(crate) fn places<'a>(
    cache: &'a KvCache,
    [all, window, state]: [&'a [usize]; 3],
) -> impl Iterator<Item = (&'a Arc<StoredTensor>, &'a [usize])> {
    cache.layers.iter().flat_map(move |layer| {
        let kept = if layer.windowed { window } else { all };
        let keys_values = [&layer.k, &layer.v].map(|tensor| (tensor, kept));
        let states = [&layer.conv, &layer.state].map(|tensor| (tensor, state));
        let all = keys_values.into_iter().chain(states);
        all.filter_map(|(tensor, rows)| Some((tensor.as_ref()?, rows)))
    })
}

/// Splits rows into runs of adjacent ones, each with the index of its first row in `rows`.
pub(crate) fn runs(rows: &[usize]) -> impl Iterator<Item = (usize, &[usize])> {
    let mut before = 0;
    rows.chunk_by(|a, b| a + 1 == *b).map(move |run| {
        let at = before;
        before += run.len();
        (at, run)
    })
}

impl CacheRows {
    fn new(info: &TensorInfo, bytes: RowBytes) -> Self {
        let [width, count, ..] = info.shape;
        CacheRows {
            name: info.name.to_string(),
            dtype: info.dtype,
            width,
            count,
            bytes,
        }
    }

    fn read(tensor: &StoredTensor, rows: &[usize]) -> Result<Self> {
        let layout = tensor.layout();
        let row = layout.row_bytes();
        let mut bytes = try_filled(0, row.checked_mul(rows.len()), "a saved sequence")?;
        for (at, run) in runs(rows) {
            let into = &mut bytes[at * row..(at + run.len()) * row];
            tensor.tensor().read(run[0] * row, into)?;
        }
        Ok(CacheRows {
            name: tensor.name().to_owned(),
            dtype: layout.dtype(),
            width: layout.shape()[0],
            count: rows.len(),
            bytes: bytes.into(),
        })
    }

    /// Writes the last rows, as many as `rows` contains.
    fn write(&self, tensor: &StoredTensor, rows: &[usize]) -> Result<()> {
        let row = tensor.layout().row_bytes();
        let skipped = self.count - rows.len();
        for (at, run) in runs(rows) {
            let from = (skipped + at) * row..(skipped + at + run.len()) * row;
            tensor.tensor().write(run[0] * row, &self.bytes[from])?;
        }
        Ok(())
    }

    /// Returns an error if the rows do not match `tensor`.
    fn check(&self, tensor: &StoredTensor) -> Result<()> {
        let layout = tensor.layout();
        if (self.dtype, self.width) == (layout.dtype(), layout.shape()[0]) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the saved sequence has rows of {} {} for '{}', the context {} of {}: use the type of KV cache (--kv) that it was saved with",
            self.width,
            self.dtype,
            self.name,
            layout.shape()[0],
            layout.dtype()
        )))
    }
}

/// Header of a saved sequence's file, without the rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedHeader {
    /// Identity of model and adapters: see [`Context::saved_identity`].
    pub identity: [u64; 2],
    /// Tokens, if the caller that saved the sequence knew them.
    pub tokens: Vec<u32>,
}

impl SavedHeader {
    /// Reads the header. This does not check that the file is complete.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the file is not a saved sequence. Also fails if it
    /// cannot be read.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = GgufFile::open_header(path, LoadMode::Read)?;
        let metadata = file.metadata();
        if metadata.get::<&str>(KEY_ARCHITECTURE)? != Some(ARCHITECTURE) {
            let message = format!("{}: this is no saved sequence", path.display());
            return Err(Error::invalid(message));
        }
        Ok(SavedHeader {
            identity: [metadata.require(MODEL)?, metadata.require(ADAPTERS)?],
            tokens: metadata.require(TOKENS)?,
        })
    }
}

impl SavedSequence {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Returns whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Returns whether the positions are consecutive and start at 0.
    pub fn has_no_gaps(&self) -> bool {
        (0..)
            .zip(&self.positions)
            .all(|(i, &position)| i == position)
    }

    /// Returns the identity of model and adapters, like [`Context::identity_with`].
    pub fn identity(&self) -> [u64; 2] {
        [self.fingerprint, self.adapters]
    }

    /// Returns the bytes of the cached rows.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|rows| rows.bytes.len()).sum()
    }

    /// Returns the rows that are written; tensors without rows are omitted.
    fn kept(&self) -> impl Iterator<Item = &CacheRows> {
        self.tensors.iter().filter(|rows| rows.count > 0)
    }

    fn checksum(&self) -> u32 {
        let mut sum = crc32fast::Hasher::new();
        sum.update(self.model.as_bytes());
        sum.update(&self.fingerprint.to_le_bytes());
        sum.update(&self.adapters.to_le_bytes());
        sum.update(bytemuck::cast_slice(&self.tokens));
        sum.update(self.application.as_bytes());
        if let Some(stopped) = &self.stopped {
            let Stopped {
                sampler,
                last,
                generated,
            } = stopped;
            let numbers = [sampler.seed, sampler.drawn, *generated as u64];
            sum.update(bytemuck::cast_slice(&numbers));
            sum.update(bytemuck::cast_slice(&sampler.draw));
            sum.update(&last.map_or(u64::MAX, u64::from).to_le_bytes());
        }
        for positions in [&self.positions, &self.window] {
            sum.update(&positions.len().to_le_bytes());
            sum.update(bytemuck::cast_slice(positions));
        }
        for rows in self.kept() {
            sum.update(rows.name.as_bytes());
            sum.update(&rows.bytes);
        }
        sum.finalize()
    }

    /// Returns the name of the first tensor with numbers that are not finite.
    fn not_finite(&self) -> Result<Option<&str>> {
        for rows in self.kept() {
            if !are_finite(rows.dtype, rows.width, &rows.bytes)? {
                return Ok(Some(&rows.name));
            }
        }
        Ok(None)
    }

    /// Returns an error if a number is not finite: a text that continues from it would be NaN.
    fn check_finite(&self) -> Result<()> {
        match self.not_finite()? {
            None => Ok(()),
            Some(name) => Err(Error::invalid(format!(
                "the sequence is not saved: '{name}' has numbers that are not finite; \
                 compute it again"
            ))),
        }
    }

    /// Writes the sequence to a file, which appears complete or not at all. Only its owner may read
    /// it, because it contains texts of users.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a number is not finite. Also fails if the file cannot
    /// be written. After an error, the previous file still exists.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        self.check_finite()?;
        let (metadata, specs) = self.header()?;
        let mut writer = Writer::create_private(path, &metadata, specs)?;
        self.append_to(&mut writer)?;
        Ok(writer.commit()?)
    }

    /// Returns the bytes of such a file.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a number is not finite. Also fails if there is not
    /// enough memory.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check_finite()?;
        let (metadata, specs) = self.header()?;
        // Everything except the rows: tokens, positions, names.
        let besides = 4096 + 512 * specs.len() + 16 * (self.positions.len() + self.tokens.len());
        let mut bytes = try_filled(0, self.bytes().checked_add(besides), "a saved sequence")?;
        bytes.clear();
        let mut writer = Writer::new(bytes, &metadata, specs)?;
        self.append_to(&mut writer)?;
        Ok(writer.finish()?)
    }

    /// Returns the metadata and the tensors of the file.
    fn header(&self) -> Result<(Metadata, Vec<TensorSpec>)> {
        let mut metadata = Metadata::new();
        metadata.set(KEY_ARCHITECTURE, ARCHITECTURE)?;
        metadata.set(NAME, self.model.as_str())?;
        metadata.set(MODEL, self.fingerprint)?;
        metadata.set(ADAPTERS, self.adapters)?;
        metadata.set(TOKENS, self.tokens.clone())?;
        metadata.set(POSITIONS, self.positions.clone())?;
        metadata.set(WINDOW, self.window.clone())?;
        metadata.set(APPLICATION, self.application.as_str())?;
        if let Some(stopped) = &self.stopped {
            let SamplerState { seed, drawn, draw } = &stopped.sampler;
            metadata.set(SAMPLER, vec![*seed, *drawn])?;
            metadata.set(DRAW, draw.clone())?;
            metadata.set(GENERATED, stopped.generated as u64)?;
            if let Some(last) = stopped.last {
                metadata.set(LAST, last)?;
            }
        }
        metadata.set(CHECKSUM, self.checksum())?;
        let specs = self
            .kept()
            .map(|rows| TensorSpec::new(&rows.name, rows.dtype, &[rows.width, rows.count]))
            .collect::<Result<Vec<_>, _>>()?;
        Ok((metadata, specs))
    }

    fn append_to<W: std::io::Write>(&self, writer: &mut Writer<W>) -> Result<()> {
        Ok(self
            .kept()
            .try_for_each(|rows| writer.append(&rows.bytes))?)
    }

    /// Reads a sequence from a file, and checks that it is complete.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the file is not a saved sequence, is damaged, or has
    /// numbers that are not finite. Also fails if it cannot be read.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_file(&GgufFile::open(path, LoadMode::Read)?)
    }

    /// Reads a sequence from the bytes of such a file, which are not copied.
    ///
    /// # Errors
    /// Fails like [`read`](Self::read).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        let header = Header::from_bytes(&bytes)?;
        let bytes = Arc::new(bytes);
        let rows = header.tensors.iter().map(|info| {
            let start = usize::try_from(info.offset).unwrap_or(usize::MAX);
            let bytes = RowBytes {
                file: Arc::clone(&bytes),
                range: start..start.saturating_add(info.size),
            };
            CacheRows::new(info, bytes)
        });
        Self::from_parts("a saved sequence", &header.metadata, rows.collect())
    }

    fn from_file(file: &GgufFile) -> Result<Self> {
        let rows = file.tensors().iter().map(|info| {
            let mut bytes = try_filled(0, Some(info.size), "a saved sequence")?;
            file.read_tensor_into(info, &mut bytes)?;
            Ok(CacheRows::new(info, bytes.into()))
        });
        let rows = rows.collect::<Result<_>>()?;
        Self::from_parts(&file.path().display().to_string(), file.metadata(), rows)
    }

    /// Returns the sequence in a file that is called `name` in errors.
    fn from_parts(name: &str, metadata: &Metadata, tensors: Vec<CacheRows>) -> Result<Self> {
        let wrong = |what: &str| Error::invalid(format!("{name}: {what}"));
        if metadata.get::<&str>(KEY_ARCHITECTURE)? != Some(ARCHITECTURE) {
            return Err(wrong("this is no saved sequence"));
        }
        let stopped = match metadata.get::<Vec<u64>>(SAMPLER)?.as_deref() {
            None => None,
            Some(&[seed, drawn]) => Some(Stopped {
                sampler: SamplerState {
                    seed,
                    drawn,
                    draw: metadata.require(DRAW)?,
                },
                last: metadata.get(LAST)?,
                generated: metadata
                    .require::<u64>(GENERATED)?
                    .try_into()
                    .unwrap_or(usize::MAX),
            }),
            Some(_) => return Err(wrong("the state of its sampler is not two numbers")),
        };
        let saved = SavedSequence {
            application: metadata.require::<&str>(APPLICATION)?.to_owned(),
            stopped,
            model: metadata.require::<&str>(NAME)?.to_owned(),
            fingerprint: metadata.require(MODEL)?,
            adapters: metadata.require(ADAPTERS)?,
            tokens: metadata.require(TOKENS)?,
            positions: metadata.require(POSITIONS)?,
            window: metadata.require(WINDOW)?,
            tensors,
        };
        if metadata.require::<u32>(CHECKSUM)? != saved.checksum() {
            return Err(wrong(
                "it is damaged: its checksum is not that of its content",
            ));
        }
        if let Some(name) = saved.not_finite()? {
            return Err(wrong(&format!(
                "'{name}' has numbers that are not finite: delete the file, and compute it again"
            )));
        }
        Ok(saved)
    }

    fn rows_of(&self, tensor: &StoredTensor) -> Option<&CacheRows> {
        self.tensors.iter().find(|rows| rows.name == tensor.name())
    }
}

impl Model {
    /// Returns a hash that differs between models. It covers the metadata of the architecture, such
    /// as RoPE's base, and the name, type, shape and first bytes of each weight.
    ///
    /// # Errors
    /// Returns an error if a device cannot be read.
    pub fn fingerprint(&self) -> Result<u64> {
        let mut fingerprint = Fingerprint::new();
        let prefix = format!("{}.", self.architecture().name);
        for (key, value) in self.metadata().iter() {
            if key.starts_with(&prefix) {
                fingerprint.add(format!("{key}: {value:?}\n").as_bytes());
            }
        }
        for spec in self.spec().tensors() {
            if let Some(stored) = self.weights().get(&spec.name) {
                fingerprint.add_tensor(&spec.name, stored)?;
            }
        }
        Ok(fingerprint.finish())
    }
}

impl Context {
    /// Returns the identity of sequences: a hash of the model and one of the adapters. A saved
    /// sequence with another identity cannot be restored.
    ///
    /// # Errors
    /// Returns an error if a device cannot be read.
    pub fn saved_identity(&self) -> Result<[u64; 2]> {
        self.identity_with(&self.options().adapters)
    }

    /// Returns the identity of sequences that use these adapters.
    ///
    /// # Errors
    /// Returns an error if a device cannot be read.
    pub fn identity_with(&self, adapters: &[ScaledAdapter]) -> Result<[u64; 2]> {
        let adapters = fingerprint_of_adapters(adapters)?;
        Ok([self.model().fingerprint()?, adapters])
    }

    /// Returns the bytes of the rows that [`save`](Self::save) would copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub fn saved_bytes(&self, sequence: usize) -> Result<usize> {
        let cache = self.kv_cache();
        let count = |cells: &crate::kv::Cells| -> Result<usize> {
            cells.check(sequence)?;
            Ok(cells.count(sequence, 0..i32::MAX))
        };
        let all = count(&cache.cells)?;
        let windowed = match &cache.window {
            Some(window) => count(&window.cells)?,
            None => all,
        };
        let states = cache.states.as_ref().map(|states| states.row(sequence));
        let has_state = states.is_some_and(|row| row > 0);
        let [all, windowed, state] = [all, windowed, has_state.into()].map(|rows| vec![0; rows]);
        let sizes = places(cache, [&all, &windowed, &state])
            .map(|(tensor, rows)| tensor.layout().row_bytes().saturating_mul(rows.len()));
        Ok(sizes.fold(0, usize::saturating_add))
    }

    /// Saves the cache of `sequence`. The context does not know its tokens.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist. Also fails if there is
    /// not enough memory, or if a device fails.
    pub fn save(&mut self, sequence: usize) -> Result<SavedSequence> {
        self.settle()?;
        let cache = self.kv_cache();
        let sorted = |cells: &crate::kv::Cells| -> Result<(Vec<i32>, Vec<usize>)> {
            Ok(cells.sorted(sequence)?.into_iter().unzip())
        };
        let (positions, cells) = sorted(&cache.cells)?;
        let (window, windowed) = match &cache.window {
            Some(window) => sorted(&window.cells)?,
            None => (positions.clone(), cells.clone()),
        };
        let state = cache.states.as_ref().map(|states| states.row(sequence));
        let state: Vec<usize> = state.into_iter().filter(|&row| row > 0).collect();
        let tensors = places(cache, [&cells, &windowed, &state])
            .map(|(tensor, rows)| CacheRows::read(tensor, rows))
            .collect::<Result<_>>()?;
        Ok(SavedSequence {
            model: self.model().name().to_owned(),
            tokens: Vec::new(),
            application: String::new(),
            stopped: None,
            fingerprint: self.model().fingerprint()?,
            adapters: fingerprint_of_adapters(self.adapters_of(sequence))?,
            positions,
            window,
            tensors,
        })
    }

    /// Replaces `sequence` by a saved sequence. Checks everything before it changes anything.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the saved sequence has another model, other adapters
    /// or another type of cache, or is contradictory. Returns [`Error::ContextFull`] if the cache
    /// has no room. Nothing is changed then. If a device fails, the sequence is empty.
    pub fn restore(&mut self, sequence: usize, saved: &SavedSequence) -> Result<()> {
        self.settle()?;
        self.check_saved(sequence, saved)?;
        self.kv_cache_mut().remove(sequence, ..)?;
        let result = self.put(sequence, saved);
        match &result {
            Ok(()) => self.kv_cache_mut().commit(),
            Err(_) => self.kv_cache_mut().rollback(),
        }
        result
    }

    fn check_saved(&self, sequence: usize, saved: &SavedSequence) -> Result<()> {
        self.check_restorable(saved, self.adapters_of(sequence))?;
        let cache = self.kv_cache();
        cache.cells.check(sequence)?;
        let free = cache.cells.free() + cache.cells.count(sequence, 0..i32::MAX);
        if saved.len() > free {
            return Err(Error::ContextFull {
                tokens: saved.len(),
                size: self.n_ctx(),
                free,
            });
        }
        Ok(())
    }

    /// Checks that a saved sequence fits an empty context, for a sequence with these adapters.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it has another model, other adapters or another type
    /// of cache, or is contradictory. Returns [`Error::ContextFull`] if it is too long.
    pub fn check_restorable(
        &self,
        saved: &SavedSequence,
        adapters: &[ScaledAdapter],
    ) -> Result<()> {
        let wrong = |what: String| Err(Error::invalid(what));
        if saved.fingerprint != self.model().fingerprint()? {
            return wrong(format!(
                "the saved sequence is of another model, '{}'; this one is '{}'",
                saved.model.escape_debug(),
                self.model().name()
            ));
        }
        if saved.adapters != fingerprint_of_adapters(adapters)? {
            return wrong(
                "the saved sequence was computed with other adapters or control vectors (--lora, --control-vector)"
                    .to_owned(),
            );
        }
        for positions in [&saved.positions, &saved.window] {
            let is_sorted = positions.is_sorted_by(|a, b| a < b);
            if !is_sorted || positions.first().is_some_and(|&first| first < 0) {
                return wrong("the saved sequence has positions out of order".to_owned());
            }
        }
        let is_part = saved.positions.ends_with(&saved.window);
        if !is_part || !saved.tokens.is_empty() && saved.tokens.len() != saved.len() {
            return wrong("the saved sequence contradicts itself".to_owned());
        }
        let cache = self.kv_cache();
        if saved.len() > self.n_ctx() {
            return Err(Error::ContextFull {
                tokens: saved.len(),
                size: self.n_ctx(),
                free: self.n_ctx(),
            });
        }
        if self.needed(saved) > saved.window.len() {
            return wrong(
                "the saved sequence lacks tokens that layers with a window keep here: restore it without --swa-full"
                    .to_owned(),
            );
        }
        let count = |tensor: &StoredTensor, rows: &[usize]| match saved.rows_of(tensor) {
            // A sequence without tokens has no rows.
            None if rows.is_empty() || saved.is_empty() => Ok(()),
            None => wrong(format!("the saved sequence lacks '{}'", tensor.name())),
            Some(found) => {
                found.check(tensor)?;
                if found.count == rows.len() {
                    Ok(())
                } else {
                    wrong("the saved sequence contradicts itself".to_owned())
                }
            }
        };
        let (all, window) = (vec![0; saved.len()], vec![0; saved.window.len()]);
        let mut rows = places(cache, [&all, &window, &[0]]);
        rows.try_for_each(|(tensor, rows)| count(tensor, rows))
    }

    /// Returns the number of last tokens that layers with a window need.
    fn needed(&self, saved: &SavedSequence) -> usize {
        let window = self.kv_cache().window.as_ref();
        match (window, saved.positions.last()) {
            (Some(window), Some(&last)) => {
                let first = window.first_seen(last.saturating_add(1));
                saved.positions.iter().filter(|&&p| p >= first).count()
            }
            _ => saved.len(),
        }
    }

    /// Allocates cells and rows for the saved sequence, and writes it to them.
    fn put(&mut self, sequence: usize, saved: &SavedSequence) -> Result<()> {
        let needed = self.needed(saved);
        let sequences = [u32::try_from(sequence).unwrap_or(u32::MAX)];
        let cache = self.kv_cache_mut();
        if let Some(window) = &mut cache.window {
            window.make_room(needed);
        }
        let full = || Error::ContextFull {
            tokens: saved.len(),
            size: 0,
            free: 0,
        };
        let take = |cells: &mut crate::kv::Cells, positions: &[i32]| -> Result<Vec<usize>> {
            let taken = positions.iter().map(|&p| cells.take(p, &sequences));
            taken.collect::<Option<_>>().ok_or_else(full)
        };
        let all = take(&mut cache.cells, &saved.positions)?;
        let windowed = match &mut cache.window {
            Some(Window { cells, .. }) => take(cells, &saved.positions[saved.len() - needed..])?,
            None => all.clone(),
        };
        let states = cache.states.as_mut().filter(|_| !saved.is_empty());
        let state = states.map(|states| states.advance(&sequences).1);
        let state: Vec<usize> = state.into_iter().collect();
        places(cache, [&all, &windowed, &state]).try_for_each(|(tensor, rows)| {
            match saved.rows_of(tensor) {
                Some(saved) => saved.write(tensor, rows),
                None => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> SavedSequence {
        SavedSequence {
            model: "m".to_owned(),
            tokens: vec![1],
            application: "a".to_owned(),
            stopped: Some(Stopped {
                sampler: SamplerState {
                    seed: 1,
                    drawn: 2,
                    draw: vec![0.5],
                },
                last: None,
                generated: 1,
            }),
            fingerprint: 1,
            adapters: 2,
            positions: vec![0],
            window: vec![0],
            tensors: Vec::new(),
        }
    }

    #[test]
    fn non_finite_values_are_neither_written_nor_read() {
        let rows = |dtype, bytes: &[u8]| CacheRows {
            name: "cache_k_l0".to_owned(),
            dtype,
            width: 1,
            count: 1,
            bytes: bytes.to_vec().into(),
        };
        for (dtype, number, spoilt) in [
            (DType::F32, &[0, 0, 0x7f, 0x7f][..], &[0, 0, 0xc0, 0x7f][..]),
            (DType::F16, &[0xff, 0x7b], &[0, 0xfc]),
            (DType::BF16, &[0x7f, 0x7f], &[0x80, 0x7f]),
        ] {
            let mut saved = saved();
            saved.tensors = vec![rows(dtype, number)];
            let bytes = saved.to_bytes().unwrap();
            SavedSequence::from_bytes(bytes).unwrap();

            saved.tensors = vec![rows(dtype, spoilt)];
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("sequence");
            for error in [saved.write(&path), saved.to_bytes().map(drop)] {
                let error = error.unwrap_err().to_string();
                assert!(error.contains("'cache_k_l0' has numbers"), "{error}");
            }
            assert!(!path.exists());
            // A file of an earlier version may contain such numbers.
            let (metadata, specs) = saved.header().unwrap();
            let mut writer = Writer::new(Vec::new(), &metadata, specs).unwrap();
            saved.append_to(&mut writer).unwrap();
            let bytes = writer.finish().unwrap();
            let error = SavedSequence::from_bytes(bytes).unwrap_err();
            assert!(error.to_string().contains("delete the file"), "{error}");
        }
    }

    #[test]
    fn the_checksum_covers_the_whole_file() {
        let saved = saved();
        let changes: [fn(&mut SavedSequence); 11] = [
            |saved| saved.model.push('x'),
            |saved| saved.tokens[0] = 2,
            |saved| saved.application.push('x'),
            |saved| saved.stopped = None,
            |saved| saved.stopped.as_mut().unwrap().last = Some(0),
            |saved| saved.stopped.as_mut().unwrap().generated = 0,
            |saved| saved.stopped.as_mut().unwrap().sampler.drawn = 3,
            |saved| saved.fingerprint = 3,
            |saved| saved.adapters = 3,
            |saved| saved.positions[0] = 1,
            |saved| saved.window.clear(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut other = saved.clone();
            change(&mut other);
            assert_ne!(other.checksum(), saved.checksum(), "{number}");
        }
        let mut other = saved.clone();
        other.tensors.push(CacheRows {
            name: "k".to_owned(),
            dtype: DType::F32,
            width: 1,
            count: 0,
            bytes: Vec::new().into(),
        });
        assert_eq!(other.checksum(), saved.checksum());
    }
}
