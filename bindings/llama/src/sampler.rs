//! Samplers: a caller's own structure with a table of functions, or one of this library.
//!
//! Structures are the header's, because callers write such themselves and look into all. What one of this library has in it is a handle, so that a
//! sampler that was freed is known; its structure is used again only after many others.

mod chain;
pub mod grammar;
mod own;

use crate::entry::{Failure, Outcome, array_mut, export};
use crate::layout::{DEFAULT_SEED, Sampler, SamplerI, TOKEN_NULL, TokenData, TokenDataArray};
use own::{OWN, Own};
use std::collections::{BTreeSet, VecDeque};
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};

/// Structures of samplers that were made here and not freed.
static LIVE: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
/// Structures of samplers that were freed. Their table does nothing.
static GONE: Mutex<VecDeque<usize>> = Mutex::new(VecDeque::new());
/// How many of them there are before the first one is used again.
const MOST_GONE: usize = 1 << 16;

/// A structure of a sampler, kept by the caller.
fn structure(iface: *const SamplerI, ctx: *mut c_void) -> *mut Sampler {
    let sampler = Sampler { iface, ctx };
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
    if gone.len() > MOST_GONE
        && let Some(address) = gone.pop_front()
    {
        live.insert(address);
        let again: *mut Sampler = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: it is one of this function's, and nobody has it.
        unsafe { again.write(sampler) };
        return again;
    }
    let new = Box::into_raw(Box::new(sampler));
    live.insert(new.expose_provenance());
    new
}

/// A sampler of this library.
fn make(own: Own) -> *mut Sampler {
    structure(&own::TABLE, OWN.add(own))
}

/// What a caller's pointer points to.
///
/// # Errors
/// For null, or an odd place.
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
    // SAFETY: the caller promises it.
    Ok(unsafe { *sampler })
}

/// The table of a sampler.
///
/// # Errors
/// If there is none.
///
/// # Safety
/// As [`read`].
unsafe fn table(sampler: *const Sampler) -> Outcome<SamplerI> {
    // SAFETY: the caller promises it.
    let iface = unsafe { read(sampler) }?.iface;
    match iface.is_null() {
        true => Err(Failure::new("the sampler has no table of functions")),
        // SAFETY: as above.
        false => Ok(unsafe { *iface }),
    }
}

/// A sampler of this library; `None` for a caller's own.
///
/// # Errors
/// For null, and for one that was freed.
///
/// # Safety
/// As [`read`].
unsafe fn own(sampler: *const Sampler) -> Outcome<Option<std::sync::Arc<Own>>> {
    // SAFETY: the caller promises it.
    let Sampler { iface, ctx } = unsafe { read(sampler) }?;
    match std::ptr::eq(iface, &own::TABLE) {
        true => OWN.get(ctx.cast_const()).map(Some),
        false => Ok(None),
    }
}

/// Has a sampler change the candidates.
///
/// # Safety
/// As in the header.
unsafe fn apply(sampler: *mut Sampler, candidates: *mut TokenDataArray) -> Outcome<()> {
    // SAFETY: the caller keeps to the header.
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

/// Has a sampler take note of a token.
///
/// # Safety
/// As in the header.
unsafe fn accept(sampler: *mut Sampler, token: i32) -> Outcome<()> {
    // SAFETY: the caller keeps to the header.
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

/// Has a sampler begin anew.
///
/// # Safety
/// As in the header.
unsafe fn reset(sampler: *mut Sampler) -> Outcome<()> {
    // SAFETY: the caller keeps to the header.
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

/// Another sampler in the same state.
///
/// # Safety
/// As in the header.
unsafe fn duplicate(sampler: *const Sampler) -> Outcome<*mut Sampler> {
    // SAFETY: the caller keeps to the header.
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

/// Gives a sampler up.
///
/// # Safety
/// As in the header.
unsafe fn free(sampler: *mut Sampler) -> Outcome<()> {
    if sampler.is_null() {
        return Ok(());
    }
    // SAFETY: the caller keeps to the header.
    unsafe {
        let Sampler { iface, ctx } = read(sampler)?;
        if std::ptr::eq(iface, &own::TABLE) {
            if ctx.is_null() {
                return Err(Failure::new("the sampler was freed before"));
            }
            // Whoever else works with it has it until then.
            let gone = OWN.remove(ctx)?;
            if let Some(gone) = gone {
                gone.free_parts();
            }
        } else if let Some(free) = table(sampler)?.free {
            free(sampler);
        }
        // One that is not of `structure` stays where its maker put it, as far as that is known.
        (*sampler).iface = &own::TABLE;
        (*sampler).ctx = std::ptr::null_mut();
    }
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    // Memory of a caller's own is not ours to use again.
    if live.remove(&sampler.addr()) {
        let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
        gone.push_back(sampler.addr());
    }
    Ok(())
}

/// The candidates of a caller.
///
/// # Safety
/// As in the header.
unsafe fn items<'a>(
    candidates: *mut TokenDataArray,
) -> Outcome<(&'a mut TokenDataArray, &'a mut [TokenData])> {
    // SAFETY: the caller keeps to the header.
    unsafe {
        let list = &mut array_mut("candidates", candidates, 1)?[0];
        let items = array_mut("candidates", list.data, list.size)?;
        Ok((list, items))
    }
}

export! {
    /// A sampler of a caller's own functions.
    fn llama_sampler_init(iface: *mut SamplerI, ctx: *mut c_void) -> *mut Sampler, or std::ptr::null_mut(); {
        match iface.is_null() {
            true => Err(Failure::new("the table of functions is null")),
            false => Ok(structure(iface, ctx)),
        }
    }

    /// The name of a sampler.
    fn llama_sampler_name(sampler: *const Sampler) -> *const c_char, or c"(null)".as_ptr(); {
        // SAFETY: the caller keeps to the header.
        unsafe {
            if let Some(own) = own(sampler)? {
                return Ok(own.name().as_ptr());
            }
            Ok(table(sampler)?.name.map_or(c"(null)".as_ptr(), |name| name(sampler)))
        }
    }

    /// Has a sampler take note of a token.
    fn llama_sampler_accept(sampler: *mut Sampler, token: i32), or (); {
        // SAFETY: the caller keeps to the header.
        unsafe { accept(sampler, token) }
    }

    /// Has a sampler change the candidates.
    fn llama_sampler_apply(sampler: *mut Sampler, candidates: *mut TokenDataArray), or (); {
        // SAFETY: the caller keeps to the header.
        unsafe { apply(sampler, candidates) }
    }

    /// Has a sampler begin anew.
    fn llama_sampler_reset(sampler: *mut Sampler), or (); {
        // SAFETY: the caller keeps to the header.
        unsafe { reset(sampler) }
    }

    /// Another sampler in the same state.
    fn llama_sampler_clone(sampler: *const Sampler) -> *mut Sampler, or std::ptr::null_mut(); {
        // SAFETY: the caller keeps to the header.
        unsafe { duplicate(sampler) }
    }

    /// Has `to` know what `from` knows.
    fn llama_sampler_copy(from: *const Sampler, to: *mut Sampler), or (); {
        // SAFETY: the caller keeps to the header.
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

    /// Gives a sampler up. One in a chain is the chain's.
    fn llama_sampler_free(sampler: *mut Sampler), or (); {
        // SAFETY: the caller keeps to the header.
        unsafe { free(sampler) }
    }

    /// The seed of a sampler, or of the last one in a chain that has one.
    fn llama_sampler_get_seed(sampler: *const Sampler) -> u32, or DEFAULT_SEED; {
        // SAFETY: the caller keeps to the header.
        let own = unsafe { own(sampler) }?;
        own.map_or(Ok(DEFAULT_SEED), |own| own.seed())
    }

    /// Chooses a token by the logits of one of the last batch's, and takes note of it.
    fn llama_sampler_sample(sampler: *mut Sampler, handle: *mut crate::layout::Opaque, index: i32) -> i32, or TOKEN_NULL; {
        let context = crate::context::context(handle)?;
        let mut items = {
            let mut state = context.lock();
            let (logits, count) = state.results.logits_of(index)?;
            // SAFETY: there are so many, as long as the context is locked.
            let logits = unsafe { crate::entry::array("logits", logits.cast_const(), count) }?;
            (0..).zip(logits).map(|(id, &logit)| TokenData { id, logit, p: 0.0 }).collect::<Vec<_>>()
        };
        let mut list = TokenDataArray {
            data: items.as_mut_ptr(),
            size: items.len(),
            selected: -1,
            sorted: crate::layout::Flag::new(false),
        };
        // SAFETY: the list is whole; the caller keeps to the header.
        unsafe { apply(sampler, &raw mut list) }?;
        let chosen = usize::try_from(list.selected).ok().filter(|&chosen| chosen < list.size && chosen < items.len());
        let chosen = chosen.ok_or_else(|| Failure::new("the sampler chose no token: a chain ends with one that does"))?;
        // SAFETY: whoever changed the list promises that its data are there.
        let token = unsafe { (*list.data.add(chosen)).id };
        // SAFETY: as above.
        unsafe { accept(sampler, token) }?;
        Ok(token)
    }
}
