//! Batches of both interfaces, and decoding.

use crate::context::{Context, ContextState, context};
use crate::entry::{Failure, Outcome, array, export};
use crate::handles::Handles;
use crate::layout::{Batch, Embd, Flag, Opaque};
use crate::log::{self, Level};
use crate::names::now_us;
use samite_llm::Error;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of sequences of one token.
const MAX_SEQUENCES: i32 = 256;
/// Maximum number of tokens in a batch that this library allocates.
const MAX_TOKENS: i32 = 1 << 24;
/// Number of position axes of an embedding.
const POSITION_AXES: usize = 4;
/// Maximum number of elements in its embeddings or its lists of sequences.
const MAX_ELEMENTS: i64 = 1 << 31;

/// An item of a batch.
#[derive(Clone, Debug)]
struct BatchEntry {
    id: Option<u32>,
    /// Embedding that replaces the token.
    embedding: Option<Vec<f32>>,
    /// Position; `None` for the next one of its sequence.
    position: Option<i32>,
    sequences: Vec<u32>,
    /// Output flag; `None` for the default.
    wants: Option<bool>,
}

/// A batch of the extended interface.
struct Extended {
    context: usize,
    most: usize,
    /// Elements of an embedding.
    width: usize,
    entries: Mutex<Vec<BatchEntry>>,
}

static EXTENDED: Handles<Extended> = Handles::new("batch");

impl Extended {
    fn lock(&self) -> MutexGuard<'_, Vec<BatchEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn extended(handle: *const Opaque) -> Outcome<Arc<Extended>> {
    EXTENDED.get(handle)
}

/// Returns the position of embedding number `index` out of `count` with several axes, stored one
/// axis after the other. Fails unless all axes agree, as they do for text.
fn on_all_axes(positions: &[i32], count: usize, index: usize) -> Outcome<i32> {
    let mut axes = positions.chunks_exact(count).take(POSITION_AXES - 1);
    let first = positions[index];
    if axes.all(|axis| axis[index] == first) {
        Ok(first)
    } else {
        Err(Failure::unsupported(
            "an embedding at different positions on its axes",
        ))
    }
}

/// Returns the product, or fails if it is too large.
fn elements(count: usize, each: usize) -> Outcome<usize> {
    count
        .checked_mul(each)
        .filter(|&all| all as u64 <= MAX_ELEMENTS as u64)
        .ok_or_else(|| Failure::new(format!("a batch of {count} rows of {each} elements")))
}

/// Returns the items of a caller's batch.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn entries(context: &Context, batch: &Batch) -> Outcome<Vec<BatchEntry>> {
    let count = usize::try_from(batch.n_tokens).unwrap_or(0);
    if count == 0 {
        return Err(Failure::new("the batch is empty"));
    }
    if batch.token.is_null() && batch.embd.is_null() {
        return Err(Failure::new("the batch has neither tokens nor embeddings"));
    }
    let width = context.width();
    let has_axes = batch.token.is_null() && context.model.has_position_axes();
    // SAFETY: the caller guarantees arrays of this length, or null.
    let (tokens, embeddings, positions, counts, lists, wants) = unsafe {
        let optional = |pointer: *mut i32, what: &str| {
            if pointer.is_null() {
                Ok(None)
            } else {
                array(what, pointer, count).map(Some)
            }
        };
        let lists = if batch.seq_id.is_null() {
            None
        } else {
            Some(array("seq_id", batch.seq_id, count)?)
        };
        let wants = if batch.logits.is_null() {
            None
        } else {
            Some(array("logits", batch.logits, count)?)
        };
        let tokens = optional(batch.token, "token")?;
        let embeddings = if batch.embd.is_null() || tokens.is_some() {
            None
        } else {
            Some(array("embd", batch.embd, elements(count, width)?)?)
        };
        let n_positions = elements(count, if has_axes { POSITION_AXES } else { 1 })?;
        let positions = if batch.pos.is_null() {
            None
        } else {
            Some(array("pos", batch.pos, n_positions)?)
        };
        (
            tokens,
            embeddings,
            positions,
            optional(batch.n_seq_id, "n_seq_id")?,
            lists,
            wants,
        )
    };
    let entry = |index: usize| {
        let wrong = |what: String| Failure::new(format!("token {index} of the batch: {what}"));
        let mut sequences = vec![0];
        if let (Some(counts), Some(lists)) = (counts, lists) {
            let n = counts[index];
            if !(1..=MAX_SEQUENCES).contains(&n) {
                return Err(wrong(format!("belongs to {n} sequences")));
            }
            // SAFETY: the caller guarantees the length.
            let list = unsafe { array("seq_id", lists[index].cast_const(), n as usize) }?;
            let ids = list.iter().map(|&sequence| {
                u32::try_from(sequence).map_err(|_| wrong(format!("sequence {sequence}")))
            });
            sequences = ids.collect::<Outcome<_>>()?;
        }
        let id = tokens.map(|tokens| tokens[index]);
        let id = id.map(|id| u32::try_from(id).map_err(|_| wrong(format!("id {id}"))));
        let row = |rows: &[f32]| rows[index * width..(index + 1) * width].to_vec();
        let position = positions.map(|positions| {
            if has_axes {
                on_all_axes(positions, count, index)
            } else {
                Ok(positions[index])
            }
        });
        Ok(BatchEntry {
            id: id.transpose()?,
            embedding: embeddings.map(row),
            position: position.transpose()?,
            sequences,
            wants: wants.map(|wants| wants[index] != 0),
        })
    };
    (0..count).map(entry).collect()
}

/// Converts items to a batch of the engine.
fn batch_of(state: &mut ContextState, entries: &[BatchEntry]) -> Outcome<samite_llm::Batch> {
    let embeddings = state.embeddings;
    let engine = state.engine()?;
    let mut batch = samite_llm::Batch::new();
    let mut next = std::collections::BTreeMap::new();
    let last = entries.len() - 1;
    for (index, entry) in entries.iter().enumerate() {
        let first = entry.sequences.first().copied().unwrap_or(0);
        let position = match entry.position {
            Some(position) => position,
            None => *next.entry(first).or_insert_with(|| {
                let cells = engine.kv_cache().cells();
                cells.next_position(first as usize)
            }),
        };
        for &sequence in &entry.sequences {
            next.insert(sequence, position.saturating_add(1));
        }
        let wants = embeddings || entry.wants.unwrap_or(index == last);
        match (entry.id, &entry.embedding) {
            (Some(id), None) => batch.add(id, position, &entry.sequences, wants),
            (None, Some(row)) => batch.add_embedding(row, position, &entry.sequences, wants),
            (None, None) => {
                let text = format!("token {index} of the batch has neither id nor embedding");
                return Err(Failure::new(text));
            }
            (Some(_), Some(_)) => {
                return Err(Failure::unsupported("a token beside an embedding"));
            }
        }
    }
    Ok(batch)
}

/// Returns whether a sequence would exceed its maximum number of tokens.
fn is_too_long(
    context: &Context,
    state: &mut ContextState,
    batch: &samite_llm::Batch,
) -> Outcome<bool> {
    if context.n_ctx_seq == context.n_ctx {
        return Ok(false);
    }
    let engine = state.engine()?;
    let most = context.n_ctx_seq as usize;
    // Sequences whose positions are below the limit cannot exceed it.
    let is_near = |token: &samite_llm::BatchToken| token.position as usize >= most;
    if !batch.tokens().iter().any(is_near) {
        return Ok(false);
    }
    let mut counts = std::collections::BTreeMap::new();
    for token in batch.tokens() {
        // The engine rejects sequences that do not exist.
        let n_seq = engine.options().n_seq;
        let sequences = batch.sequences(token).iter();
        for &sequence in sequences.filter(|&&sequence| (sequence as usize) < n_seq) {
            let cells = engine.kv_cache().cells();
            let count = counts
                .entry(sequence)
                .or_insert_with(|| cells.sequence_len(sequence as usize));
            *count += 1;
            if *count > most {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Decodes tokens and returns the header's status code.
fn decode(context: &Context, entries: &[BatchEntry]) -> Outcome<c_int> {
    let mut state = context.lock();
    let state = &mut *state;
    let start = now_us();
    state.saved = None;
    state.results.clear();
    let batch = batch_of(state, entries)?;
    if batch.len() > context.n_batch as usize {
        return Err(Failure::new(format!(
            "the batch has {} tokens, n_batch is {}",
            batch.len(),
            context.n_batch
        )));
    }
    if is_too_long(context, state, &batch)? {
        return Ok(1);
    }
    let output = context.output(state.embeddings);
    let engine = state.engine()?;
    // Logit rows of all tokens need much memory, so only requested ones are computed.
    let wanted = batch
        .tokens()
        .iter()
        .filter(|token| token.wants_logits)
        .count();
    let mut rows = engine.options().n_logits;
    if wanted > engine.options().n_seq.max(16) {
        rows = Some(engine.options().n_ubatch);
    }
    engine.set_output(output, rows)?;
    context.begin();
    let decoded = engine.decode(&batch);
    let number = match decoded {
        Ok(()) => 0,
        Err(error) => {
            let number = match &error {
                Error::ContextFull { .. } => 1,
                error if error.is_cancelled() || error.is_stopped() => 2,
                Error::InvalidArgument(_) | Error::Tokenize(_) => -1,
                _ => -3,
            };
            let level = if number == 1 {
                Level::Debug
            } else {
                Level::Error
            };
            log::line(level, &format!("llama_decode: {error}"));
            number
        }
    };
    if number == 0 {
        let ContextState { results, .. } = state;
        let mut results = std::mem::take(results);
        let taken = state
            .engine()
            .and_then(|engine| results.take(engine, &batch));
        state.results = results;
        taken?;
        state.times.add(entries.len() as i32, now_us() - start);
    }
    Ok(number)
}

/// Changes an item of a batch, by its index.
fn change(handle: *mut Opaque, index: i32, change: impl FnOnce(&mut BatchEntry)) -> Outcome<bool> {
    let batch = extended(handle)?;
    let mut entries = batch.lock();
    let entry = usize::try_from(index)
        .ok()
        .and_then(|index| entries.get_mut(index));
    let entry = entry.ok_or_else(|| Failure::new(format!("the batch has no token {index}")))?;
    change(entry);
    Ok(true)
}

/// Appends a token, an embedding, or neither, to a batch of the extended interface.
fn add(
    handle: *mut Opaque,
    sequence: i32,
    id: Option<u32>,
    embedding: Option<Vec<f32>>,
) -> Outcome<i32> {
    let batch = extended(handle)?;
    let Ok(sequence @ 0..256) = u32::try_from(sequence) else {
        return Ok(-3);
    };
    let mut entries = batch.lock();
    if entries.len() >= batch.most {
        return Ok(-1);
    }
    entries.push(BatchEntry {
        id,
        embedding,
        position: None,
        sequences: vec![sequence],
        wants: Some(false),
    });
    Ok(entries.len() as i32 - 1)
}

/// Returns a caller's embedding: a single row with the width of the batch's model.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn row_of(handle: *mut Opaque, embedding: &Embd) -> Outcome<Vec<f32>> {
    let width = extended(handle)?.width;
    if embedding.n_rows != 1 || embedding.n_embd != width {
        return Err(Failure::new(format!(
            "an embedding of {} rows of {} elements, must be one of {width}",
            embedding.n_rows, embedding.n_embd
        )));
    }
    // SAFETY: the caller guarantees the length.
    Ok(unsafe { array("data", embedding.data, width) }?.to_vec())
}

/// Allocates C memory for `count` elements.
fn memory<T>(count: usize) -> *mut T {
    // SAFETY: `calloc` checks the size for overflow.
    unsafe { libc::calloc(count.max(1), size_of::<T>()) }.cast()
}

/// An empty batch.
const NO_BATCH: Batch = Batch {
    n_tokens: 0,
    token: std::ptr::null_mut(),
    embd: std::ptr::null_mut(),
    pos: std::ptr::null_mut(),
    n_seq_id: std::ptr::null_mut(),
    seq_id: std::ptr::null_mut(),
    logits: std::ptr::null_mut(),
};

export! {
    /// Returns a batch of tokens that continue sequence 0.
    fn llama_batch_get_one(tokens: *mut i32, count: i32) -> Batch, or NO_BATCH; {
        Ok(Batch { n_tokens: count, token: tokens, ..NO_BATCH })
    }

    /// Allocates a batch.
    fn llama_batch_init(n_tokens: i32, embd: i32, n_seq_max: i32) -> Batch, or NO_BATCH; {
        let fits = |each: i32| i64::from(n_tokens) * i64::from(each) <= MAX_ELEMENTS;
        let numbers = [n_tokens, embd, n_seq_max];
        if numbers
            .iter()
            .any(|number| !(0..=MAX_TOKENS).contains(number))
            || !fits(embd)
            || !fits(n_seq_max)
        {
            return Err(Failure::new(format!(
                "a batch of {n_tokens} tokens in {n_seq_max} sequences, or embeddings of {embd} elements"
            )));
        }
        let count = n_tokens as usize;
        let mut batch = Batch {
            n_tokens: 0,
            pos: memory(count),
            n_seq_id: memory(count),
            // The list ends with null.
            seq_id: memory(count + 1),
            logits: memory(count),
            ..NO_BATCH
        };
        match embd {
            0 => batch.token = memory(count),
            _ => batch.embd = memory(count.saturating_mul(embd as usize)),
        }
        let lists = [
            batch.pos.cast(),
            batch.n_seq_id.cast(),
            batch.seq_id.cast(),
            batch.logits.cast::<u8>(),
        ];
        let has_values = !batch.token.is_null() || !batch.embd.is_null();
        let mut is_whole = has_values && lists.iter().all(|list| !list.is_null());
        for index in 0..count {
            if !is_whole {
                break;
            }
            let list: *mut i32 = memory(n_seq_max as usize);
            is_whole = !list.is_null();
            // SAFETY: there is room for one more than `count`.
            unsafe { batch.seq_id.add(index).write(list) };
        }
        if !is_whole {
            // SAFETY: every pointer was allocated by this function, or is null.
            unsafe { llama_batch_free(batch) };
            return Err(Failure::new("there is no memory for the batch"));
        }
        Ok(batch)
    }

    /// Frees a batch from `llama_batch_init`.
    fn llama_batch_free(batch: Batch), or (); {
        // SAFETY: the batch comes from `llama_batch_init`, whose lists end with null.
        unsafe {
            let mut next = batch.seq_id;
            while !next.is_null() && !(*next).is_null() {
                libc::free((*next).cast());
                next = next.add(1);
            }
            for memory in [
                batch.token.cast(),
                batch.embd.cast(),
                batch.pos.cast(),
                batch.n_seq_id.cast(),
                batch.seq_id.cast(),
                batch.logits.cast(),
            ] {
                libc::free(memory);
            }
        }
        Ok(())
    }

    /// Decodes without caching: for models with bidirectional attention.
    fn llama_encode(handle: *mut Opaque, batch: Batch) -> i32, or -1; {
        let context = context(handle)?;
        // SAFETY: the caller upholds the header's contract.
        decode(&context, &unsafe { entries(&context, &batch) }?)
    }

    /// Decodes a batch.
    fn llama_decode(handle: *mut Opaque, batch: Batch) -> i32, or -1; {
        let context = context(handle)?;
        // SAFETY: the caller upholds the header's contract.
        decode(&context, &unsafe { entries(&context, &batch) }?)
    }

    /// Creates a batch of the extended interface.
    fn llama_batch_ext_init(handle: *mut Opaque) -> *mut Opaque, or std::ptr::null_mut(); {
        let context = context(handle)?;
        Ok(EXTENDED.add(Extended {
            context: handle.addr(),
            most: context.n_batch as usize,
            width: context.width(),
            entries: Mutex::default(),
        }))
    }

    /// Frees a batch of the extended interface.
    fn llama_batch_ext_free(batch: *mut Opaque), or (); {
        EXTENDED.remove(batch).map(drop)
    }

    /// Clears the batch.
    fn llama_batch_ext_clear(batch: *mut Opaque), or (); {
        extended(batch)?.lock().clear();
        Ok(())
    }

    /// Adds an empty item, whose embedding is set later.
    fn llama_batch_ext_add(batch: *mut Opaque, sequence: i32) -> i32, or -2; {
        add(batch, sequence, None, None)
    }

    /// Adds a token.
    fn llama_batch_ext_add_token(batch: *mut Opaque, sequence: i32, token: i32) -> i32, or -2; {
        extended(batch)?;
        match u32::try_from(token) {
            Ok(id) => add(batch, sequence, Some(id), None),
            Err(_) => Ok(-2),
        }
    }

    /// Adds an embedding.
    fn llama_batch_ext_add_embd(batch: *mut Opaque, sequence: i32, embedding: Embd) -> i32, or -2; {
        // SAFETY: the caller upholds the header's contract.
        let row = unsafe { row_of(batch, &embedding) }?;
        add(batch, sequence, None, Some(row))
    }

    /// Adds an item to another sequence.
    fn llama_batch_ext_add_seq(batch: *mut Opaque, index: i32, sequence: i32) -> bool, or false; {
        let Ok(sequence @ 0..256) = u32::try_from(sequence) else {
            return Err(Failure::new(format!("sequence {sequence}: there are 0 to 255")));
        };
        change(batch, index, |entry| {
            if !entry.sequences.contains(&sequence) {
                entry.sequences.push(sequence);
            }
        })
    }

    /// Sets an item's embedding.
    fn llama_batch_ext_set_embd_token(batch: *mut Opaque, index: i32, embedding: Embd) -> bool,
        or false; {
        // SAFETY: the caller upholds the header's contract.
        let row = unsafe { row_of(batch, &embedding) }?;
        change(batch, index, |entry| entry.embedding = Some(row))
    }

    /// Sets a state of another model: not supported.
    fn llama_batch_ext_set_embd_state(batch: *mut Opaque, _index: i32, _embedding: Embd) -> bool,
        or false; {
        extended(batch)?;
        Err(Failure::unsupported("states of another model"))
    }

    /// Requests the results of an item.
    fn llama_batch_ext_set_output_embd(batch: *mut Opaque, index: i32, value: Flag) -> bool,
        or false; {
        change(batch, index, |entry| entry.wants = Some(value.is_on()))
    }

    /// See the previous function.
    fn llama_batch_ext_set_output_logits(batch: *mut Opaque, index: i32, value: Flag) -> bool,
        or false; {
        change(batch, index, |entry| entry.wants = Some(value.is_on()))
    }

    /// Sets the position of an item.
    fn llama_batch_ext_set_pos(batch: *mut Opaque, index: i32, position: *const i32) -> bool,
        or false; {
        if position.is_null() {
            return Err(Failure::new("the position is null"));
        }
        // SAFETY: the caller upholds the header's contract.
        let position = unsafe { position.read() };
        change(batch, index, |entry| entry.position = Some(position))
    }

    /// Decodes a batch of the extended interface.
    fn llama_process(handle: *mut Opaque, _kind: c_int, batch: *mut Opaque) -> i32, or -1; {
        let context = context(handle)?;
        let batch = extended(batch)?;
        let entries = batch.lock().clone();
        if batch.context != handle.addr() {
            log::line(Level::Debug, "llama_process: the batch was made for another context");
        }
        if entries.is_empty() {
            Err(Failure::new("the batch is empty"))
        } else {
            decode(&context, &entries)
        }
    }
}
