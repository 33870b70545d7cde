//! Samplers: a caller's own, with its table of functions, or one of this library.
//!
//! Structures have the header's layout, because callers also create and inspect them. A sampler of
//! this library contains a handle, so that use after free is detected; its structure is reused only
//! after many others.

mod chain;
pub mod grammar;
mod own;

use crate::entry::{Failure, Outcome, array_mut, export};
use crate::layout::{DEFAULT_SEED, Sampler, SamplerI, TOKEN_NULL, TokenData, TokenDataArray};
use own::{NativeSampler, OWN};
use std::collections::{BTreeSet, VecDeque};
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};

/// Structures of samplers that were created here and not freed.
static LIVE: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
/// Structures of freed samplers. Their table does nothing.
static GONE: Mutex<VecDeque<usize>> = Mutex::new(VecDeque::new());
/// Number of freed structures to keep before the first one is reused.
const MAX_GONE: usize = 1 << 16;

/// Allocates a sampler structure for the caller.
fn structure(iface: *const SamplerI, ctx: *mut c_void) -> *mut Sampler {
    let sampler = Sampler { iface, ctx };
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
    if gone.len() > MAX_GONE
        && let Some(address) = gone.pop_front()
    {
        live.insert(address);
        let again: *mut Sampler = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: this function allocated it, and it was freed by its owner.
        unsafe { again.write(sampler) };
        return again;
    }
    let new = Box::into_raw(Box::new(sampler));
    live.insert(new.expose_provenance());
    new
}

/// Creates a sampler of this library.
fn make(own: NativeSampler) -> *mut Sampler {
    structure(&own::TABLE, OWN.add(own))
}

/// Reads a caller's structure.
///
/// # Errors
/// If the pointer is null or unaligned.
///
/// # Safety
/// Null, or a sampler.
unsafe fn read(sampler: *const Sampler) -> Outcome<Sampler> {
    if sampler.is_null() {
        return Err(Failure::new("the sampler is null"));
    }
    if !sampler.is_aligned() {
        return Err(Failure::new(format!("{sampler:p} is no sampler")));
    }
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { *sampler })
}

/// Returns a sampler's table of functions.
///
/// # Errors
/// If it has none.
///
/// # Safety
/// See [`read`].
unsafe fn table(sampler: *const Sampler) -> Outcome<SamplerI> {
    // SAFETY: guaranteed by the caller.
    let iface = unsafe { read(sampler) }?.iface;
    match iface.is_null() {
        true => Err(Failure::new("the sampler has no table of functions")),
        // SAFETY: as above.
        false => Ok(unsafe { *iface }),
    }
}

/// Returns a sampler of this library, or `None` for a caller's own.
///
/// # Errors
/// If it is null or was freed.
///
/// # Safety
/// See [`read`].
unsafe fn own(sampler: *const Sampler) -> Outcome<Option<std::sync::Arc<NativeSampler>>> {
    // SAFETY: guaranteed by the caller.
    let Sampler { iface, ctx } = unsafe { read(sampler) }?;
    if std::ptr::eq(iface, &own::TABLE) {
        OWN.get(ctx.cast_const()).map(Some)
    } else {
        Ok(None)
    }
}

/// Applies a sampler to the candidates.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn apply(sampler: *mut Sampler, candidates: *mut TokenDataArray) -> Outcome<()> {
    // SAFETY: the caller upholds the header's contract.
    unsafe {
        if let Some(own) = own(sampler)? {
            return own.apply(candidates);
        }
        let apply = table(sampler)?.apply;
        let apply = apply.ok_or_else(|| Failure::new("the sampler cannot be applied"))?;
        apply(sampler, candidates);
    }
    Ok(())
}

/// Makes a sampler accept a token.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn accept(sampler: *mut Sampler, token: i32) -> Outcome<()> {
    // SAFETY: the caller upholds the header's contract.
    unsafe {
        if let Some(own) = own(sampler)? {
            return own.accept(token);
        }
        if let Some(accept) = table(sampler)?.accept {
            accept(sampler, token);
        }
    }
    Ok(())
}

/// Resets a sampler.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn reset(sampler: *mut Sampler) -> Outcome<()> {
    // SAFETY: the caller upholds the header's contract.
    unsafe {
        if let Some(own) = own(sampler)? {
            return own.reset();
        }
        if let Some(reset) = table(sampler)?.reset {
            reset(sampler);
        }
    }
    Ok(())
}

/// Returns a copy of a sampler with the same state.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn duplicate(sampler: *const Sampler) -> Outcome<*mut Sampler> {
    // SAFETY: the caller upholds the header's contract.
    unsafe {
        if let Some(own) = own(sampler)? {
            return Ok(make(own.duplicate()?));
        }
        let Sampler { iface, ctx } = read(sampler)?;
        match table(sampler)?.clone {
            Some(clone) => Ok(clone(sampler)),
            None if ctx.is_null() => Ok(structure(iface, ctx)),
            None => Err(Failure::new(
                "the sampler cannot be cloned: it has data, and no function for it",
            )),
        }
    }
}

/// Frees a sampler.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn free(sampler: *mut Sampler) -> Outcome<()> {
    if sampler.is_null() {
        return Ok(());
    }
    // SAFETY: the caller upholds the header's contract.
    unsafe {
        let Sampler { iface, ctx } = read(sampler)?;
        if std::ptr::eq(iface, &own::TABLE) {
            if ctx.is_null() {
                return Err(Failure::new("the sampler was freed before"));
            }
            // Calls in progress keep it alive.
            let gone = OWN.remove(ctx)?;
            if let Some(gone) = gone {
                gone.free_parts();
            }
        } else if let Some(free) = table(sampler)?.free {
            free(sampler);
        }
        // A structure that `structure` did not allocate stays where its creator put it.
        (*sampler).iface = &own::TABLE;
        (*sampler).ctx = std::ptr::null_mut();
    }
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    // The caller's own memory must not be reused here.
    if live.remove(&sampler.addr()) {
        let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
        gone.push_back(sampler.addr());
    }
    Ok(())
}

/// Returns a caller's candidates.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn items<'a>(
    candidates: *mut TokenDataArray,
) -> Outcome<(&'a mut TokenDataArray, &'a mut [TokenData])> {
    // SAFETY: the caller upholds the header's contract.
    unsafe {
        let list = &mut array_mut("candidates", candidates, 1)?[0];
        let items = array_mut("candidates", list.data, list.size)?;
        Ok((list, items))
    }
}

export! {
    /// Creates a sampler with the caller's functions.
    fn llama_sampler_init(iface: *mut SamplerI, ctx: *mut c_void) -> *mut Sampler,
        or std::ptr::null_mut(); {
        if iface.is_null() {
            Err(Failure::new("the table of functions is null"))
        } else {
            Ok(structure(iface, ctx))
        }
    }

    /// Returns a sampler's name.
    fn llama_sampler_name(sampler: *const Sampler) -> *const c_char, or c"(null)".as_ptr(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            if let Some(own) = own(sampler)? {
                return Ok(own.name().as_ptr());
            }
            Ok(table(sampler)?.name.map_or(c"(null)".as_ptr(), |name| name(sampler)))
        }
    }

    /// Makes a sampler accept a token.
    fn llama_sampler_accept(sampler: *mut Sampler, token: i32), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { accept(sampler, token) }
    }

    /// Applies a sampler to the candidates.
    fn llama_sampler_apply(sampler: *mut Sampler, candidates: *mut TokenDataArray), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { apply(sampler, candidates) }
    }

    /// Resets a sampler.
    fn llama_sampler_reset(sampler: *mut Sampler), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { reset(sampler) }
    }

    /// Returns a copy of a sampler with the same state.
    fn llama_sampler_clone(sampler: *const Sampler) -> *mut Sampler, or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { duplicate(sampler) }
    }

    /// Copies the state of `from` to `to`.
    fn llama_sampler_copy(from: *const Sampler, to: *mut Sampler), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            match (own(from)?, own(to)?) {
                (Some(from), Some(to)) => to.copy_from(&from),
                (None, None) => match table(from)?.copy_state {
                    Some(copy) => {
                        copy(from, to);
                        Ok(())
                    }
                    None => Err(Failure::new("the sampler has no function that copies its state")),
                },
                _ => Err(Failure::new("the samplers are of different kinds")),
            }
        }
    }

    /// Frees a sampler. A sampler in a chain belongs to the chain.
    fn llama_sampler_free(sampler: *mut Sampler), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe { free(sampler) }
    }

    /// Returns a sampler's seed; for a chain, that of its last member with a seed.
    fn llama_sampler_get_seed(sampler: *const Sampler) -> u32, or DEFAULT_SEED; {
        // SAFETY: the caller upholds the header's contract.
        let own = unsafe { own(sampler) }?;
        own.map_or(Ok(DEFAULT_SEED), |own| own.seed())
    }

    /// Samples a token from a row of logits of the last batch, and accepts it.
    fn llama_sampler_sample(sampler: *mut Sampler, handle: *mut crate::layout::Opaque,
        index: i32) -> i32, or TOKEN_NULL; {
        let context = crate::context::context(handle)?;
        let mut items = {
            let mut state = context.lock();
            let (logits, count) = state.results.logits_of(index)?;
            // SAFETY: the row has this length while the context is locked.
            let logits = unsafe { crate::entry::array("logits", logits.cast_const(), count) }?;
            (0..)
                .zip(logits)
                .map(|(id, &logit)| TokenData { id, logit, p: 0.0 })
                .collect::<Vec<_>>()
        };
        let mut list = TokenDataArray {
            data: items.as_mut_ptr(),
            size: items.len(),
            selected: -1,
            sorted: crate::layout::Flag::new(false),
        };
        // SAFETY: the list is complete; the caller upholds the header's contract.
        unsafe { apply(sampler, &raw mut list) }?;
        let chosen = usize::try_from(list.selected)
            .ok()
            .filter(|&chosen| chosen < list.size && chosen < items.len());
        let chosen = chosen.ok_or_else(|| {
            Failure::new("the sampler chose no token: a chain ends with one that does")
        })?;
        // SAFETY: a sampler that changes the list guarantees that its data is valid.
        let token = unsafe { (*list.data.add(chosen)).id };
        // SAFETY: as above.
        unsafe { accept(sampler, token) }?;
        Ok(token)
    }
}
