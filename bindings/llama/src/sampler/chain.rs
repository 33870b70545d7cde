//! Sampler chains.

use super::own::{CandidatePass, NativeSampler, SamplerStage};
use super::{accept, apply, duplicate, free, items, make, own, read, reset};
use crate::entry::{Failure, Outcome, export, run};
use crate::layout::{DEFAULT_SEED, Flag, PerfSampler, Sampler, SamplerChainParams, TokenDataArray};
use crate::log::{self, Level};
use crate::names::now_us;
use std::sync::{Mutex, PoisonError};

/// Samplers of a chain, by address.
pub struct SamplerChain {
    members: Vec<usize>,
    /// Number of chains that enclose this one.
    level: usize,
    no_perf: bool,
    took_us: i64,
    sampled: i32,
}

impl Clone for SamplerChain {
    /// Needed for the enum. Members belong to a single chain, so a clone has none;
    /// [`duplicate`](Self::duplicate) clones them.
    fn clone(&self) -> Self {
        SamplerChain {
            members: Vec::new(),
            ..*self
        }
    }
}

impl SamplerChain {
    /// Returns the samplers.
    pub fn members(&self) -> Vec<*mut Sampler> {
        let members = self.members.iter();
        members
            .map(|&member| std::ptr::with_exposed_provenance_mut(member))
            .collect()
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        if self.no_perf {
            return work(self);
        }
        let start = now_us();
        let done = work(self);
        self.took_us += now_us() - start;
        done
    }

    /// Applies all members to a caller's candidates. Samplers of this library pass candidates on
    /// without copying them to the caller's list.
    ///
    /// # Errors
    /// If the candidates cannot be read. Failing members are logged and skipped.
    ///
    /// # Safety
    /// The caller must uphold the header's contract.
    pub unsafe fn apply(&mut self, candidates: *mut TokenDataArray) -> Outcome<()> {
        self.timed(|link| {
            let mut passing: Option<CandidatePass> = None;
            let flush = |passing: Option<CandidatePass>| -> Outcome<()> {
                if let Some(passing) = passing {
                    // SAFETY: the caller upholds the header's contract.
                    let (list, items) = unsafe { items(candidates) }?;
                    passing.give_back(list, items);
                }
                Ok(())
            };
            for member in link.members() {
                // SAFETY: every member of a chain is a sampler.
                let of_library = run("llama_sampler_apply", None, || unsafe { own(member) });
                let mut stage = of_library.as_ref().map(|own| own.lock());
                match stage.as_deref_mut() {
                    Some(SamplerStage::Nothing) => {}
                    Some(stage) if !matches!(stage, SamplerStage::Chain(_)) => {
                        let passing = match &mut passing {
                            Some(passing) => passing,
                            none => {
                                // SAFETY: the caller upholds the header's contract.
                                let (list, items) = unsafe { items(candidates) }?;
                                none.insert(CandidatePass::new(items, list.sorted.is_on()))
                            }
                        };
                        run("llama_sampler_apply", (), || stage.run(passing));
                    }
                    _ => {
                        drop(stage);
                        flush(passing.take())?;
                        // SAFETY: the caller upholds the header's contract.
                        run("llama_sampler_apply", (), || unsafe {
                            apply(member, candidates)
                        });
                    }
                }
            }
            flush(passing)
        })
    }

    /// Makes all members accept a token.
    ///
    /// # Errors
    /// Never; failing members are logged.
    pub fn accept(&mut self, token: i32) -> Outcome<()> {
        self.timed(|link| {
            for member in link.members() {
                // SAFETY: every member of a chain is a sampler.
                run("llama_sampler_accept", (), || unsafe {
                    accept(member, token)
                });
            }
        });
        self.sampled = self.sampled.saturating_add(1);
        Ok(())
    }

    /// Resets all members.
    ///
    /// # Errors
    /// Never; failing members are logged.
    pub fn reset(&mut self) -> Outcome<()> {
        for member in self.members() {
            // SAFETY: every member of a chain is a sampler.
            run("llama_sampler_reset", (), || unsafe { reset(member) });
        }
        Ok(())
    }

    /// Returns a chain with clones of all members.
    ///
    /// # Errors
    /// If a member cannot be cloned; the other clones are freed.
    pub fn duplicate(&self) -> Outcome<Self> {
        let mut members = Vec::new();
        for member in self.members() {
            // SAFETY: every member of a chain is a sampler.
            match unsafe { duplicate(member) } {
                Ok(clone) => members.push(clone.expose_provenance()),
                Err(failure) => {
                    let half = SamplerChain {
                        members,
                        ..self.clone()
                    };
                    for member in half.members() {
                        // SAFETY: as above.
                        run("llama_sampler_free", (), || unsafe { free(member) });
                    }
                    return Err(failure);
                }
            }
        }
        for &member in &members {
            let member = std::ptr::with_exposed_provenance_mut(member);
            // SAFETY: the clones are samplers that are in no other chain.
            unsafe { set_level(member, 1) }?;
        }
        Ok(SamplerChain {
            members,
            level: 0,
            took_us: 0,
            sampled: 0,
            no_perf: self.no_perf,
        })
    }

    /// Returns the seed of the last member that has one.
    ///
    /// # Errors
    /// If a member was freed.
    pub fn seed(&self) -> Outcome<u32> {
        for member in self.members().into_iter().rev() {
            // SAFETY: every member of a chain is a sampler.
            if let Some(own) = unsafe { own(member) }? {
                match own.seed()? {
                    DEFAULT_SEED => {}
                    seed => return Ok(seed),
                }
            }
        }
        Ok(DEFAULT_SEED)
    }
}

/// Held while members are added, so that a chain cannot contain itself.
static GROWING: Mutex<()> = Mutex::new(());

/// Maximum nesting depth of chains. Calls recurse through them.
const MAX_NESTING: usize = 32;

/// Returns the level and the samplers of a chain, or `None` for other samplers.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn link_of(sampler: *mut Sampler) -> Outcome<Option<(usize, Vec<*mut Sampler>)>> {
    // SAFETY: guaranteed by the caller.
    let own = unsafe { own(sampler) }?;
    Ok(own.and_then(|own| match &*own.lock() {
        SamplerStage::Chain(link) => Some((link.level, link.members())),
        _ => None,
    }))
}

/// Returns the nesting depth of chains below `sampler`, which must not contain `chain`.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn height(sampler: *mut Sampler, chain: *mut Sampler) -> Outcome<usize> {
    if std::ptr::eq(sampler, chain) {
        return Err(Failure::new("a chain cannot be in itself"));
    }
    let mut height = 0;
    // SAFETY: every member of a chain is a sampler; chains have no cycles and limited depth.
    if let Some((_, members)) = unsafe { link_of(sampler) }? {
        height = 1;
        for member in members {
            // SAFETY: as above.
            height = height.max(1 + unsafe { self::height(member, chain) }?);
        }
    }
    Ok(height)
}

/// Sets the level of a chain and of chains within it. Ignores other samplers.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn set_level(sampler: *mut Sampler, level: usize) -> Outcome<()> {
    // SAFETY: guaranteed by the caller.
    let Some(own) = unsafe { own(sampler) }? else {
        return Ok(());
    };
    let members = match &mut *own.lock() {
        SamplerStage::Chain(link) => {
            link.level = level;
            link.members()
        }
        _ => return Ok(()),
    };
    for member in members {
        // SAFETY: every member of a chain is a sampler; chains have no cycles and limited depth.
        unsafe { set_level(member, level + 1) }?;
    }
    Ok(())
}

/// Calls `ask` for a chain.
///
/// # Safety
/// The caller must uphold the header's contract.
unsafe fn of_chain<T>(
    chain: *const Sampler,
    ask: impl FnOnce(&mut SamplerChain) -> Outcome<T>,
) -> Outcome<T> {
    // SAFETY: the caller upholds the header's contract.
    let own = unsafe { own(chain) }?;
    match own.as_ref().map(|own| own.lock()).as_deref_mut() {
        Some(SamplerStage::Chain(link)) => ask(link),
        _ => Err(Failure::new("the sampler is no chain")),
    }
}

export! {
    /// Returns the default parameters.
    fn llama_sampler_chain_default_params() -> SamplerChainParams,
        or SamplerChainParams { no_perf: Flag::new(true) }; {
        Ok(SamplerChainParams { no_perf: Flag::new(true) })
    }

    /// Creates a chain without samplers.
    fn llama_sampler_chain_init(params: SamplerChainParams) -> *mut Sampler,
        or std::ptr::null_mut(); {
        let link = SamplerChain {
            members: Vec::new(),
            level: 0,
            no_perf: params.no_perf.is_on(),
            took_us: 0,
            sampled: 0,
        };
        Ok(make(NativeSampler::new(c"chain", None, SamplerStage::Chain(link))))
    }

    /// Adds a sampler and transfers its ownership to the chain.
    fn llama_sampler_chain_add(chain: *mut Sampler, sampler: *mut Sampler), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            read(sampler)?;
            let _growing = GROWING.lock().unwrap_or_else(PoisonError::into_inner);
            let level = of_chain(chain, |link| Ok(link.level + 1))?;
            if level + height(sampler, chain)? > MAX_NESTING {
                let text = format!("more than {MAX_NESTING} chains would be in each other");
                return Err(Failure::new(text));
            }
            of_chain(chain, |link| {
                let address = sampler.expose_provenance();
                if link.members.contains(&address) {
                    return Err(Failure::new("the sampler is in the chain already"));
                }
                link.members.push(address);
                Ok(())
            })?;
            set_level(sampler, level)
        }
    }

    /// Returns a sampler of a chain, or the chain itself for -1. Returns null if `chain` is not a
    /// chain or has fewer samplers.
    fn llama_sampler_chain_get(chain: *mut Sampler, index: i32) -> *mut Sampler,
        or std::ptr::null_mut(); {
        if chain.is_null() {
            return Ok(std::ptr::null_mut());
        }
        // SAFETY: the caller upholds the header's contract.
        let found = unsafe {
            of_chain(chain, |link| {
                Ok(match index {
                    -1 => chain,
                    index => {
                        let members = link.members();
                        let index = usize::try_from(index).ok();
                        index
                            .and_then(|index| members.get(index).copied())
                            .unwrap_or(std::ptr::null_mut())
                    }
                })
            })
        };
        // Callers use this to test whether a sampler is a chain, so it is not an error.
        Ok(found.unwrap_or(std::ptr::null_mut()))
    }

    /// Returns the number of samplers in a chain.
    fn llama_sampler_chain_n(chain: *const Sampler) -> i32, or 0; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { of_chain(chain, |link| Ok(link.members.len() as i32)) }
    }

    /// Removes a sampler and transfers its ownership to the caller.
    fn llama_sampler_chain_remove(chain: *mut Sampler, index: i32) -> *mut Sampler,
        or std::ptr::null_mut(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            let _growing = GROWING.lock().unwrap_or_else(PoisonError::into_inner);
            let removed: *mut Sampler = of_chain(chain, |link| {
                let index = usize::try_from(index)
                    .ok()
                    .filter(|&index| index < link.members.len());
                Ok(index.map_or(std::ptr::null_mut(), |index| {
                    std::ptr::with_exposed_provenance_mut(link.members.remove(index))
                }))
            })?;
            if !removed.is_null() {
                // The removal succeeds even if something in it was freed.
                let _ = set_level(removed, 0);
            }
            Ok(removed)
        }
    }

    /// Returns the sampling time.
    fn llama_perf_sampler(chain: *const Sampler) -> PerfSampler, or PerfSampler::default(); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            of_chain(chain, |link| {
                Ok(PerfSampler {
                    t_sample_ms: link.took_us as f64 * 1e-3,
                    n_sample: link.sampled,
                })
            })
        }
    }

    /// Logs the sampling time.
    fn llama_perf_sampler_print(chain: *const Sampler), or (); {
        // SAFETY: the caller upholds the header's contract.
        let data =
            unsafe { of_chain(chain, |link| Ok((link.took_us as f64 * 1e-3, link.sampled))) }?;
        log::line(
            Level::Info,
            &format!(
                "llama_perf_sampler_print:    sampling time = {:10.2} ms / {:5} runs",
                data.0, data.1
            ),
        );
        Ok(())
    }

    /// Resets the sampling time.
    fn llama_perf_sampler_reset(chain: *mut Sampler), or (); {
        // SAFETY: the caller upholds the header's contract.
        unsafe {
            of_chain(chain, |link| {
                (link.took_us, link.sampled) = (0, 0);
                Ok(())
            })
        }
    }
}
