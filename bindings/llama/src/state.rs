//! Saved states of contexts, as bytes or in files.
//!
//! The bytes of a sequence are those of the engine's file format. The bytes of a context are a
//! magic number, a list of sequences, and the bytes of each. Files have llama.cpp's outer format: a
//! magic number, a version and the tokens. The rest is samite's own, so states of llama.cpp are
//! rejected.

use crate::context::{ContextState, context};
use crate::entry::{Failure, Outcome, alias, array, array_mut, export, required_text};
use crate::layout::Opaque;
use crate::memory::sequence;
use samite_llm::SavedSequence;
use std::ffi::c_char;
use std::io::Write;

/// "smtc", for states of contexts.
const MAGIC_CONTEXT: u32 = 0x6374_6d73;
/// "smtS" and "smtQ", for files of contexts and of sequences.
const MAGIC_FILES: [u32; 2] = [0x5374_6d73, 0x5174_6d73];
const VERSION: u32 = 1;

/// Returns the state of a sequence, or of all; cached until something changes.
fn bytes(state: &mut ContextState, id: Option<i32>) -> Outcome<&[u8]> {
    if state.saved.as_ref().is_none_or(|saved| saved.0 != id) {
        let engine = state.engine()?;
        let of_sequence = |engine: &mut samite_llm::Context, number: usize| -> Outcome<Vec<u8>> {
            Ok(engine.save(number)?.to_bytes()?)
        };
        let bytes = match id {
            Some(id) => of_sequence(engine, sequence(engine, id)?)?,
            None => {
                let used = (0..engine.kv_cache().cells().n_sequences())
                    .filter(|&id| engine.kv_cache().cells().last_position(id).is_some());
                let used: Vec<usize> = used.collect();
                let mut all = Vec::new();
                for word in [MAGIC_CONTEXT, VERSION, used.len() as u32] {
                    all.extend(word.to_le_bytes());
                }
                for id in used {
                    let bytes = of_sequence(engine, id)?;
                    all.extend((id as u64).to_le_bytes());
                    all.extend((bytes.len() as u64).to_le_bytes());
                    all.extend(bytes);
                }
                all
            }
        };
        state.saved = Some((id, bytes));
    }
    Ok(state.saved.as_ref().map_or(&[], |saved| &saved.1))
}

/// Reader of the parts of a state.
struct StateReader<'a>(&'a [u8]);

impl<'a> StateReader<'a> {
    fn take(&mut self, count: usize) -> Outcome<&'a [u8]> {
        let split = self.0.split_at_checked(count);
        let (part, rest) = split.ok_or_else(|| Failure::new("the state is cut off"))?;
        self.0 = rest;
        Ok(part)
    }

    fn u32(&mut self) -> Outcome<u32> {
        let bytes = self.take(4)?.try_into();
        bytes.map(u32::from_le_bytes).map_err(|_| Failure::silent())
    }

    fn length(&mut self) -> Outcome<usize> {
        let bytes = self.take(8)?.try_into().map(u64::from_le_bytes);
        let length = bytes.map_err(|_| Failure::silent())?;
        usize::try_from(length).map_err(|_| Failure::new("the state is cut off"))
    }

    fn sequence(&mut self, length: usize) -> Outcome<SavedSequence> {
        Ok(SavedSequence::from_bytes(self.take(length)?.to_vec())?)
    }
}

/// Restores a sequence. Returns the number of bytes read.
fn restore(state: &mut ContextState, id: i32, bytes: &[u8]) -> Outcome<usize> {
    let saved = SavedSequence::from_bytes(bytes.to_vec())?;
    state.saved = None;
    let engine = state.engine()?;
    let id = sequence(engine, id)?;
    engine.restore(id, &saved)?;
    Ok(bytes.len())
}

/// Restores a context. Returns the number of bytes read.
fn restore_all(state: &mut ContextState, bytes: &[u8]) -> Outcome<usize> {
    let mut parts = StateReader(bytes);
    if [parts.u32()?, parts.u32()?] != [MAGIC_CONTEXT, VERSION] {
        return Err(Failure::new("this is no state of this library"));
    }
    let count = parts.u32()?;
    let mut sequences = Vec::new();
    for _ in 0..count {
        let id = parts.length()?;
        let length = parts.length()?;
        sequences.push((id, parts.sequence(length)?));
    }
    state.saved = None;
    state.results.clear();
    let engine = state.engine()?;
    let room = engine.kv_cache().cells().n_sequences();
    if let Some((id, _)) = sequences.iter().find(|(id, _)| *id >= room) {
        return Err(Failure::new(format!(
            "the state has a sequence {id}, the context {room} (n_seq_max)"
        )));
    }
    engine.clear()?;
    for (id, saved) in sequences {
        engine.restore(id, &saved)?;
    }
    Ok(bytes.len() - parts.0.len())
}

/// Copies a state to a caller's buffer.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn copy(handle: *mut Opaque, id: Option<i32>, to: *mut u8, size: usize) -> Outcome<usize> {
    let context = context(handle)?;
    let mut state = context.lock();
    let bytes = bytes(&mut state, id)?;
    if size < bytes.len() {
        return Err(Failure::new(format!(
            "the state has {} bytes, there is room for {size}",
            bytes.len()
        )));
    }
    // SAFETY: the caller guarantees the length.
    unsafe { array_mut("dst", to, bytes.len()) }?.copy_from_slice(bytes);
    Ok(bytes.len())
}

fn size(handle: *mut Opaque, id: Option<i32>) -> Outcome<usize> {
    let context = context(handle)?;
    let mut state = context.lock();
    Ok(bytes(&mut state, id)?.len())
}

/// Writes a file.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn save(
    handle: *mut Opaque,
    id: Option<i32>,
    path: *const c_char,
    tokens: *const i32,
    count: usize,
) -> Outcome<usize> {
    let context = context(handle)?;
    // SAFETY: the caller upholds the header's contract.
    let (path, tokens) = unsafe {
        (
            required_text("path", path)?,
            array("tokens", tokens, count)?,
        )
    };
    let mut state = context.lock();
    let bytes = bytes(&mut state, id)?;
    let mut head = Vec::new();
    for word in [
        MAGIC_FILES[usize::from(id.is_some())],
        VERSION,
        tokens.len() as u32,
    ] {
        head.extend(word.to_le_bytes());
    }
    head.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    let mut options = std::fs::File::options();
    options.write(true).create(true).truncate(true);
    // The file contains users' texts.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    #[cfg(unix)]
    {
        // An existing file would otherwise keep its mode.
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    }
    file.write_all(&head)?;
    file.write_all(bytes)?;
    Ok(head.len() + bytes.len())
}

/// Reads a file; a null `tokens` only requests their number.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn load(
    handle: *mut Opaque,
    id: Option<i32>,
    path: *const c_char,
    tokens: *mut i32,
    room: usize,
    count: *mut usize,
) -> Outcome<usize> {
    let context = context(handle)?;
    // SAFETY: the caller upholds the header's contract.
    let path = unsafe { required_text("path", path) }?;
    let bytes = std::fs::read(path)?;
    let mut parts = StateReader(&bytes);
    if [parts.u32()?, parts.u32()?] != [MAGIC_FILES[usize::from(id.is_some())], VERSION] {
        return Err(Failure::new(format!(
            "{path}: this is no such state of this library"
        )));
    }
    let n_tokens = parts.u32()? as usize;
    let listed = parts.take(
        n_tokens
            .checked_mul(4)
            .ok_or_else(|| Failure::new("the state is cut off"))?,
    )?;
    // SAFETY: as above.
    let count = unsafe { array_mut("n_token_count_out", count, 1) };
    if tokens.is_null() && id.is_some() {
        count?[0] = n_tokens;
        return Ok(bytes.len() - parts.0.len());
    }
    if n_tokens > room {
        return Err(Failure::new(format!(
            "{path}: {n_tokens} tokens, there is room for {room}"
        )));
    }
    let mut state = context.lock();
    match id {
        Some(id) => restore(&mut state, id, parts.0)?,
        None => restore_all(&mut state, parts.0)?,
    };
    // SAFETY: as above.
    let out = unsafe { array_mut("tokens_out", tokens, n_tokens) }?;
    let (words, _) = listed.as_chunks::<4>();
    for (to, word) in out.iter_mut().zip(words) {
        *to = i32::from_le_bytes(*word);
    }
    if let Ok(count) = count {
        count[0] = n_tokens;
    }
    Ok(bytes.len())
}

export! {
    /// Returns the size of a context's state in bytes.
    fn llama_state_get_size(handle: *mut Opaque) -> usize, or 0; {
        size(handle, None)
    }

    /// Copies a context's state.
    fn llama_state_get_data(handle: *mut Opaque, to: *mut u8, room: usize) -> usize, or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { copy(handle, None, to, room) }
    }

    /// Restores a context from its saved state.
    fn llama_state_set_data(handle: *mut Opaque, from: *const u8, length: usize) -> usize, or 0; {
        let context = context(handle)?;
        // SAFETY: the caller upholds the header's contract.
        let bytes = unsafe { array("src", from, length) }?;
        let mut state = context.lock();
        restore_all(&mut state, bytes)
    }

    /// Restores a context from a file.
    fn llama_state_load_file(handle: *mut Opaque, path: *const c_char, tokens: *mut i32,
        room: usize, count: *mut usize) -> bool, or false; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { load(handle, None, path, tokens, room, count) }.map(|_| true)
    }

    /// Saves a context to a file.
    fn llama_state_save_file(handle: *mut Opaque, path: *const c_char, tokens: *const i32,
        count: usize) -> bool, or false; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { save(handle, None, path, tokens, count) }.map(|_| true)
    }

    /// Returns the size of a sequence's state in bytes.
    fn llama_state_seq_get_size(handle: *mut Opaque, id: i32) -> usize, or 0; {
        size(handle, Some(id))
    }

    /// Copies a sequence's state.
    fn llama_state_seq_get_data(handle: *mut Opaque, to: *mut u8, room: usize, id: i32) -> usize,
        or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { copy(handle, Some(id), to, room) }
    }

    /// Restores a sequence from its saved state.
    fn llama_state_seq_set_data(handle: *mut Opaque, from: *const u8, length: usize,
        id: i32) -> usize, or 0; {
        let context = context(handle)?;
        // SAFETY: the caller upholds the header's contract.
        let bytes = unsafe { array("src", from, length) }?;
        let mut state = context.lock();
        restore(&mut state, id, bytes)
    }

    /// Saves a sequence to a file.
    fn llama_state_seq_save_file(handle: *mut Opaque, path: *const c_char, id: i32,
        tokens: *const i32, count: usize) -> usize, or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { save(handle, Some(id), path, tokens, count) }
    }

    /// Restores a sequence from a file.
    fn llama_state_seq_load_file(handle: *mut Opaque, path: *const c_char, id: i32,
        tokens: *mut i32, room: usize, count: *mut usize) -> usize, or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { load(handle, Some(id), path, tokens, room, count) }
    }

    /// Returns the size of a sequence's state in bytes. States are always complete, regardless of
    /// `flags`.
    fn llama_state_seq_get_size_ext(handle: *mut Opaque, id: i32, _flags: u32) -> usize, or 0; {
        size(handle, Some(id))
    }

    /// Copies a sequence's state.
    fn llama_state_seq_get_data_ext(handle: *mut Opaque, to: *mut u8, room: usize, id: i32,
        _flags: u32) -> usize, or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { copy(handle, Some(id), to, room) }
    }

    /// Restores a sequence from its saved state.
    fn llama_state_seq_set_data_ext(handle: *mut Opaque, from: *const u8, length: usize, id: i32,
        _flags: u32) -> usize, or 0; {
        let context = context(handle)?;
        // SAFETY: the caller upholds the header's contract.
        let bytes = unsafe { array("src", from, length) }?;
        let mut state = context.lock();
        restore(&mut state, id, bytes)
    }

    /// Deprecated name without a size: the buffer must have the size from [`llama_state_get_size`].
    fn llama_copy_state_data(handle: *mut Opaque, to: *mut u8) -> usize, or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { copy(handle, None, to, usize::MAX) }
    }

    /// Deprecated name without a size, so that the state cannot be validated: not supported.
    fn llama_set_state_data(handle: *mut Opaque, _from: *const u8) -> usize, or 0; {
        context(handle)?;
        Err(Failure::unsupported("a state of unknown size; use llama_state_set_data"))
    }
}

alias! {
    fn llama_get_state_size(handle: *mut Opaque) -> usize = llama_state_get_size;
    fn llama_load_session_file(handle: *mut Opaque, path: *const c_char, tokens: *mut i32,
        room: usize, count: *mut usize) -> bool = llama_state_load_file;
    fn llama_save_session_file(handle: *mut Opaque, path: *const c_char, tokens: *const i32,
        count: usize) -> bool = llama_state_save_file;
}
