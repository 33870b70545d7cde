//! Memory of a context: removing, copying and moving sequences.

use crate::context::{ContextState, context};
use crate::entry::{Failure, Outcome, export};
use crate::layout::{Flag, Opaque};
use samite_llm::Context as Engine;
use std::ffi::c_int;
use std::ops::Range;

/// Converts a caller's range of positions, where a negative start means 0 and a negative end means
/// no limit.
fn range(first: i32, end: i32) -> Range<i32> {
    first.max(0)..if end < 0 { i32::MAX } else { end }
}

pub fn sequence(engine: &Engine, number: i32) -> Outcome<usize> {
    let count = engine.kv_cache().cells().n_sequences();
    let known = usize::try_from(number)
        .ok()
        .filter(|&number| number < count);
    known.ok_or_else(|| {
        Failure::new(format!(
            "there is no sequence {number}: there are 0 to {}",
            count - 1
        ))
    })
}

/// Changes the memory and discards a saved state.
fn change<T>(handle: *mut Opaque, change: impl FnOnce(&mut Engine) -> Outcome<T>) -> Outcome<T> {
    let context = context(handle)?;
    let mut state = context.lock();
    state.saved = None;
    change(state.engine()?)
}

fn ask<T>(handle: *mut Opaque, ask: impl FnOnce(&mut Engine) -> Outcome<T>) -> Outcome<T> {
    let context = context(handle)?;
    let mut state = context.lock();
    let state: &mut ContextState = &mut state;
    ask(state.engine()?)
}

/// Turns an engine error into a silent failure: the header reports it by the return value alone.
fn quiet<T>(result: Result<T, samite_llm::Error>) -> Outcome<T> {
    result.map_err(|error| {
        tracing::debug!(%error, "memory");
        Failure::silent()
    })
}

export! {
    /// Clears all sequences.
    fn llama_memory_clear(handle: *mut Opaque, _data: Flag), or (); {
        // A context without weights has an empty memory.
        let of = context(handle)?;
        if of.model.engine.as_ref().is_none_or(|engine| !engine.weights().have_data()) {
            return Ok(());
        }
        change(handle, |engine| Ok(engine.clear()?))
    }

    /// Removes positions of one sequence or of all. Returns false if only a part would be removed
    /// and the model does not support that.
    fn llama_memory_seq_rm(handle: *mut Opaque, id: i32, first: i32, end: i32) -> bool, or false; {
        change(handle, |engine| {
            let range = range(first, end);
            if id >= 0 {
                let id = sequence(engine, id)?;
                return quiet(engine.kv_cache_mut().remove(id, range)).map(|()| true);
            }
            let all = 0..engine.kv_cache().cells().n_sequences();
            for id in all {
                quiet(engine.kv_cache_mut().remove(id, range.clone()))?;
            }
            Ok(true)
        })
    }

    /// Copies positions of a sequence to another one, which shares their cells.
    fn llama_memory_seq_cp(handle: *mut Opaque, from: i32, to: i32, first: i32, end: i32), or (); {
        change(handle, |engine| {
            let (from, to) = (sequence(engine, from)?, sequence(engine, to)?);
            Ok(engine.kv_cache_mut().copy(from, to, range(first, end))?)
        })
    }

    /// Removes all sequences except one.
    fn llama_memory_seq_keep(handle: *mut Opaque, id: i32), or (); {
        change(handle, |engine| {
            let id = sequence(engine, id)?;
            Ok(engine.kv_cache_mut().keep(id)?)
        })
    }

    /// Shifts positions.
    fn llama_memory_seq_add(handle: *mut Opaque, id: i32, first: i32, end: i32, delta: i32), or ();
        {
        change(handle, |engine| {
            let id = sequence(engine, id)?;
            let range = range(first, end);
            match delta {
                0 => Ok(()),
                delta => Ok(engine.kv_cache_mut().shift(id, range, delta)?),
            }
        })
    }

    /// Divides positions: not supported.
    fn llama_memory_seq_div(handle: *mut Opaque, id: i32, _first: i32, _end: i32, divisor: c_int),
        or (); {
        ask(handle, |engine| {
            sequence(engine, id)?;
            match divisor {
                1 => Ok(()),
                _ => Err(Failure::unsupported("division of positions")),
            }
        })
    }

    /// Returns the smallest position, or -1 for an empty sequence.
    fn llama_memory_seq_pos_min(handle: *mut Opaque, id: i32) -> i32, or -1; {
        ask(handle, |engine| {
            let id = sequence(engine, id)?;
            Ok(engine.kv_cache().positions(id).map_or(-1, |positions| *positions.start()))
        })
    }

    /// Returns the largest position, or -1 for an empty sequence.
    fn llama_memory_seq_pos_max(handle: *mut Opaque, id: i32) -> i32, or -1; {
        ask(handle, |engine| {
            let id = sequence(engine, id)?;
            Ok(engine.kv_cache().positions(id).map_or(-1, |positions| *positions.end()))
        })
    }

    /// Returns whether positions can be shifted.
    fn llama_memory_can_shift(handle: *mut Opaque) -> bool, or false; {
        ask(handle, |engine| Ok(engine.kv_cache().can_shift()))
    }
}
