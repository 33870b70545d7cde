//! Samplers of this library: sampler stages applied to a caller's candidates.

use super::chain::SamplerChain;
use super::grammar::GrammarStage;
use super::{free, items};
use crate::entry::{Failure, Outcome, array, export, run, text};
use crate::handles::Handles;
use crate::layout::{
    DEFAULT_SEED, Flag, LogitBias, Opaque, Sampler, SamplerI, TokenData, TokenDataArray,
};
use crate::model::model;
use samite_text::{
    AdaptiveP, Breakers, Candidate, Candidates, Dry, DryParams, Generator, Mirostat, Penalties,
    Rng, SamplerError, Tokenizer,
};
use std::ffi::{CStr, c_char};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A sampler of this library.
pub struct NativeSampler {
    name: &'static CStr,
    seed: Option<u32>,
    state: Mutex<SamplerStage>,
}

/// All samplers of this library.
pub static OWN: Handles<NativeSampler> = Handles::new("sampler");

/// Algorithm of a sampler.
#[derive(Clone)]
pub enum SamplerStage {
    /// No operation.
    Nothing,
    /// Selects the most probable token.
    Greedy,
    /// Samples by probability.
    Draw(Rng),
    TopK(i32),
    TopP(f32, usize),
    MinP(f32, usize),
    TypicalP(f32, usize),
    Temperature(f32, f32, f32),
    Xtc(f32, f32, usize, Rng),
    TopNSigma(f32),
    Mirostat(Mirostat, usize, Rng),
    Penalties(Penalties),
    Dry(Dry),
    AdaptiveP(AdaptiveP, Rng),
    LogitBias(Vec<(u32, f32)>),
    Infill(Arc<Tokenizer>),
    Grammar(GrammarStage),
    /// Other samplers in sequence, owned by this one.
    Chain(SamplerChain),
}

/// Candidates passed through stages.
#[derive(Default)]
pub struct CandidatePass {
    pub candidates: Candidates,
    /// Chosen token.
    pub chosen: Option<u32>,
}

impl CandidatePass {
    /// Copies a caller's candidates.
    pub fn new(items: &[TokenData], is_sorted: bool) -> Self {
        let candidate = |item: &TokenData| Candidate {
            id: item.id.cast_unsigned(),
            logit: item.logit,
            probability: item.p,
        };
        let mut candidates = Candidates::new();
        candidates.set(items.iter().map(candidate), is_sorted);
        CandidatePass {
            candidates,
            chosen: None,
        }
    }

    /// Copies them back to the caller; there are never more than before.
    pub fn give_back(&self, list: &mut TokenDataArray, items: &mut [TokenData]) {
        let kept = self.candidates.as_slice();
        for (to, from) in items.iter_mut().zip(kept) {
            *to = TokenData {
                id: from.id.cast_signed(),
                logit: from.logit,
                p: from.probability,
            };
        }
        list.size = kept.len().min(items.len());
        list.sorted = Flag::new(self.candidates.is_sorted());
        if let Some(chosen) = self.chosen {
            let place = kept.iter().position(|kept| kept.id == chosen);
            list.selected = place.map_or(-1, |place| place as i64);
        }
    }
}

impl SamplerStage {
    /// Runs the stage. On failure, the candidates are unchanged.
    pub fn run(&mut self, passing: &mut CandidatePass) -> Outcome<()> {
        let CandidatePass { candidates, chosen } = passing;
        match self {
            SamplerStage::Nothing | SamplerStage::Chain(_) => {}
            SamplerStage::Greedy => {
                let (place, _) = candidates.best().or_else(first(candidates))?;
                *chosen = candidates.as_slice().get(place).map(|kept| kept.id);
            }
            SamplerStage::Draw(rng) => {
                let place = candidates.draw_place(rng);
                let place = place.or_else(|error| first(candidates)(error).map(|best| best.0))?;
                *chosen = candidates.as_slice().get(place).map(|kept| kept.id);
            }
            SamplerStage::TopK(k) => candidates.top_k(usize::try_from(*k).unwrap_or(0)),
            SamplerStage::TopP(p, least) => candidates.top_p(*p, *least)?,
            SamplerStage::MinP(p, least) => candidates.min_p(*p, *least),
            SamplerStage::TypicalP(p, least) => candidates.typical_p(*p, *least)?,
            SamplerStage::Temperature(value, range, exponent) => {
                candidates.dynamic_temperature(*value, *range, *exponent)?;
            }
            SamplerStage::Xtc(buggify, threshold, least, rng) => {
                candidates.xtc(*buggify, *threshold, *least, rng)?;
            }
            SamplerStage::TopNSigma(n) => candidates.top_n_sigma(*n),
            SamplerStage::Mirostat(mirostat, count, rng) => {
                *chosen = Some(mirostat.draw(candidates, *count, rng)?);
            }
            SamplerStage::Penalties(penalties) => penalties.apply(candidates),
            SamplerStage::Dry(dry) => dry.apply(candidates),
            SamplerStage::AdaptiveP(adaptive, rng) => {
                *chosen = Some(adaptive.draw(candidates, rng)?)
            }
            SamplerStage::LogitBias(biases) => {
                for &(token, bias) in &*biases {
                    candidates.change_logit(token, |logit| logit + bias);
                }
            }
            SamplerStage::Infill(vocabulary) => candidates.infill(vocabulary)?,
            SamplerStage::Grammar(grammar) => grammar.apply(candidates)?,
        }
        Ok(())
    }

    /// Accepts a token.
    pub fn accept(&mut self, token: i32) -> Outcome<()> {
        let Ok(token) = u32::try_from(token) else {
            return Ok(());
        };
        match self {
            SamplerStage::Mirostat(mirostat, ..) => mirostat.accept(token),
            SamplerStage::Penalties(penalties) => penalties.accept(token),
            SamplerStage::Dry(dry) => dry.accept(token),
            SamplerStage::AdaptiveP(adaptive, _) => adaptive.accept(token),
            SamplerStage::Grammar(grammar) => grammar.accept(token)?,
            _ => {}
        }
        Ok(())
    }

    fn reset(&mut self, seed: Option<u32>) -> Outcome<()> {
        let begun = || Rng::with_generator(Generator::Mersenne, seed.unwrap_or(0).into());
        match self {
            SamplerStage::Draw(rng) | SamplerStage::Xtc(.., rng) => *rng = begun(),
            SamplerStage::Mirostat(mirostat, _, rng) => {
                mirostat.reset();
                *rng = begun();
            }
            SamplerStage::Penalties(penalties) => penalties.reset(),
            SamplerStage::Dry(dry) => dry.reset(),
            SamplerStage::AdaptiveP(adaptive, rng) => {
                adaptive.reset();
                *rng = begun();
            }
            SamplerStage::Grammar(grammar) => grammar.reset()?,
            _ => {}
        }
        Ok(())
    }
}

/// If no candidate can be chosen, falls back to the first one, if any.
fn first(candidates: &Candidates) -> impl FnOnce(SamplerError) -> Outcome<(usize, f32)> {
    let is_there = !candidates.as_slice().is_empty();
    move |error| {
        if is_there {
            Ok((0, f32::NEG_INFINITY))
        } else {
            Err(error.into())
        }
    }
}

impl NativeSampler {
    /// Creates a sampler with this stage.
    pub fn new(name: &'static CStr, seed: Option<u32>, stage: SamplerStage) -> Self {
        NativeSampler {
            name,
            seed,
            state: Mutex::new(stage),
        }
    }

    /// Returns its name.
    pub fn name(&self) -> &'static CStr {
        self.name
    }

    /// Locks its state.
    pub fn lock(&self) -> MutexGuard<'_, SamplerStage> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies it to a caller's candidates.
    ///
    /// # Errors
    /// If the stage fails; then the candidates are unchanged.
    ///
    /// # Safety
    /// The caller must uphold the header's contract.
    pub unsafe fn apply(&self, candidates: *mut TokenDataArray) -> Outcome<()> {
        let mut stage = self.lock();
        if let SamplerStage::Chain(link) = &mut *stage {
            // SAFETY: the caller upholds the header's contract.
            return unsafe { link.apply(candidates) };
        }
        // SAFETY: as above.
        let (list, items) = unsafe { items(candidates) }?;
        let mut passing = CandidatePass::new(items, list.sorted.is_on());
        stage.run(&mut passing)?;
        passing.give_back(list, items);
        Ok(())
    }

    /// Accepts a token.
    ///
    /// # Errors
    /// If a grammar does not allow it.
    pub fn accept(&self, token: i32) -> Outcome<()> {
        match &mut *self.lock() {
            SamplerStage::Chain(link) => link.accept(token),
            stage => stage.accept(token),
        }
    }

    /// Resets the sampler.
    ///
    /// # Errors
    /// If a grammar cannot be reset.
    pub fn reset(&self) -> Outcome<()> {
        match &mut *self.lock() {
            SamplerStage::Chain(link) => link.reset(),
            stage => stage.reset(self.seed),
        }
    }

    /// Returns a sampler with the same state.
    ///
    /// # Errors
    /// If a chain contains a caller's own sampler that cannot be cloned.
    pub fn duplicate(&self) -> Outcome<NativeSampler> {
        let stage = match &*self.lock() {
            SamplerStage::Chain(link) => SamplerStage::Chain(link.duplicate()?),
            stage => stage.clone(),
        };
        Ok(NativeSampler::new(self.name, self.seed, stage))
    }

    /// Copies the state of another sampler.
    ///
    /// # Errors
    /// If it is of another kind.
    pub fn copy_from(&self, from: &NativeSampler) -> Outcome<()> {
        if std::ptr::eq(self, from) {
            return Ok(());
        }
        if self.name != from.name {
            return Err(Failure::new("the samplers are of different kinds"));
        }
        let source = match &*from.lock() {
            SamplerStage::Chain(link) => Err(link.members()),
            stage => Ok(stage.clone()),
        };
        match source {
            Ok(stage) => *self.lock() = stage,
            Err(members) => {
                let own = match &*self.lock() {
                    SamplerStage::Chain(link) => link.members(),
                    _ => Vec::new(),
                };
                if own.len() != members.len() {
                    return Err(Failure::new("the chains have not as many samplers"));
                }
                for (from, to) in members.into_iter().zip(own) {
                    // SAFETY: every member of a chain is a sampler.
                    unsafe { super::llama_sampler_copy(from, to) };
                }
            }
        }
        Ok(())
    }

    /// Frees the samplers that it owns.
    pub fn free_parts(&self) {
        let stage = std::mem::replace(&mut *self.lock(), SamplerStage::Nothing);
        if let SamplerStage::Chain(link) = stage {
            for member in link.members() {
                // SAFETY: every member of a chain is a sampler that the chain owns.
                run("llama_sampler_free", (), || unsafe { free(member) });
            }
        }
    }

    /// Returns the seed.
    ///
    /// # Errors
    /// If a chain contains a freed sampler.
    pub fn seed(&self) -> Outcome<u32> {
        match &*self.lock() {
            SamplerStage::Chain(link) => link.seed(),
            _ => Ok(self.seed.unwrap_or(DEFAULT_SEED)),
        }
    }
}

/// Table of functions of this library's samplers, for callers that use it directly.
pub static TABLE: SamplerI = SamplerI {
    name: Some(super::llama_sampler_name),
    accept: Some(super::llama_sampler_accept),
    apply: Some(super::llama_sampler_apply),
    reset: Some(super::llama_sampler_reset),
    clone: Some(super::llama_sampler_clone),
    free: None,
    backend_init: None,
    backend_accept: None,
    backend_apply: None,
    backend_set_input: None,
    backend_reset: None,
    copy_state: Some(super::llama_sampler_copy),
};

/// Returns the seed, or a random one for the default.
pub fn random_seed(seed: u32) -> u32 {
    match seed {
        DEFAULT_SEED => RandomState::new().hash_one(crate::names::now_us()) as u32,
        seed => seed,
    }
}

fn plain(name: &'static CStr, is_on: bool, stage: SamplerStage) -> Outcome<*mut Sampler> {
    let stage = if is_on { stage } else { SamplerStage::Nothing };
    Ok(super::make(NativeSampler::new(name, None, stage)))
}

fn seeded(
    name: &'static CStr,
    seed: u32,
    stage: impl FnOnce(Rng) -> SamplerStage,
) -> Outcome<*mut Sampler> {
    let seed = random_seed(seed);
    Ok(super::make(NativeSampler::new(
        name,
        Some(seed),
        stage(Rng::with_generator(Generator::Mersenne, seed.into())),
    )))
}

fn number(name: &str, value: f32) -> Outcome<f32> {
    if value.is_finite() {
        Ok(value)
    } else {
        Err(Failure::new(format!("{name} is {value}, must be a number")))
    }
}

/// Returns the window of a penalty in tokens; negative numbers mean all.
fn last_n(count: i32) -> usize {
    usize::try_from(count).unwrap_or(1 << 20)
}

export! {
    /// Creates a greedy sampler.
    fn llama_sampler_init_greedy() -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"greedy", true, SamplerStage::Greedy)
    }

    /// Creates a sampler that draws by probability.
    fn llama_sampler_init_dist(seed: u32) -> *mut Sampler, or std::ptr::null_mut(); {
        seeded(c"dist", seed, SamplerStage::Draw)
    }

    /// Creates a top-k sampler.
    fn llama_sampler_init_top_k(k: i32) -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"top-k", k > 0, SamplerStage::TopK(k))
    }

    /// Creates a top-p sampler, which keeps the most probable tokens up to a total probability.
    fn llama_sampler_init_top_p(p: f32, least: usize) -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"top-p", number("p", p)? < 1.0, SamplerStage::TopP(p, least))
    }

    /// Creates a min-p sampler, which keeps tokens with a fraction of the best probability.
    fn llama_sampler_init_min_p(p: f32, least: usize) -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"min-p", number("p", p)? > 0.0, SamplerStage::MinP(p, least))
    }

    /// Creates a locally typical sampler, which keeps tokens whose surprise is near the entropy.
    fn llama_sampler_init_typical(p: f32, least: usize) -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"typical", number("p", p)? < 1.0, SamplerStage::TypicalP(p, least))
    }

    /// Creates a temperature sampler, which divides logits; 0 or less keeps the best token only.
    fn llama_sampler_init_temp(value: f32) -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"temp", number("t", value)? != 1.0, SamplerStage::Temperature(value, 0.0, 1.0))
    }

    /// Creates a dynamic temperature sampler: the temperature depends on the entropy.
    fn llama_sampler_init_temp_ext(value: f32, range: f32, exponent: f32) -> *mut Sampler,
        or std::ptr::null_mut(); {
        let stage = SamplerStage::Temperature(
            number("t", value)?,
            number("delta", range)?,
            number("exponent", exponent)?,
        );
        plain(c"temp-ext", value != 1.0 || range > 0.0, stage)
    }

    /// Creates an XTC sampler, which sometimes drops the most probable tokens.
    fn llama_sampler_init_xtc(buggify: f32, threshold: f32, least: usize,
        seed: u32) -> *mut Sampler, or std::ptr::null_mut(); {
        number("p", buggify)?;
        if number("t", threshold)? <= 0.5 && buggify > 0.0 {
            seeded(c"xtc", seed, |rng| SamplerStage::Xtc(buggify, threshold, least, rng))
        } else {
            plain(c"xtc", false, SamplerStage::Nothing)
        }
    }

    /// Creates a top-n-sigma sampler, which keeps logits within n standard deviations of the best.
    fn llama_sampler_init_top_n_sigma(n: f32) -> *mut Sampler, or std::ptr::null_mut(); {
        plain(c"top-n-sigma", number("n", n)? > 0.0, SamplerStage::TopNSigma(n))
    }

    /// Creates a Mirostat sampler, which targets a given surprise. The number of tokens for its
    /// estimate is fixed at 100.
    fn llama_sampler_init_mirostat(count: i32, seed: u32, tau: f32, eta: f32,
        _m: i32) -> *mut Sampler, or std::ptr::null_mut(); {
        let count = usize::try_from(count).unwrap_or(0).max(1);
        let mirostat = Mirostat::new(1, number("tau", tau)?, number("eta", eta)?);
        seeded(c"mirostat", seed, |rng| SamplerStage::Mirostat(mirostat, count, rng))
    }

    /// Creates a Mirostat 2.0 sampler.
    fn llama_sampler_init_mirostat_v2(seed: u32, tau: f32, eta: f32) -> *mut Sampler,
        or std::ptr::null_mut(); {
        let mirostat = Mirostat::new(2, number("tau", tau)?, number("eta", eta)?);
        seeded(c"mirostat-v2", seed, |rng| SamplerStage::Mirostat(mirostat, 1, rng))
    }

    /// Creates a sampler that penalizes recent tokens.
    fn llama_sampler_init_penalties(
        _count: i32, last: i32, repeat: f32, frequency: f32, presence: f32
    ) -> *mut Sampler, or std::ptr::null_mut(); {
        let (repeat, frequency, presence) = (
            number("penalty_repeat", repeat)?,
            number("penalty_freq", frequency)?,
            number("penalty_present", presence)?,
        );
        if repeat <= 0.0 {
            return Err(Failure::new(format!(
                "penalty_repeat is {repeat}, must be more than 0"
            )));
        }
        let is_on = last != 0 && (repeat != 1.0 || frequency != 0.0 || presence != 0.0);
        plain(
            c"penalties",
            is_on,
            SamplerStage::Penalties(Penalties::new(last_n(last), repeat, frequency, presence)),
        )
    }

    /// Creates a DRY sampler, which penalizes tokens that would continue a repetition.
    fn llama_sampler_init_dry(
        vocab: *const Opaque, multiplier: f32, base: f32, allowed: i32, last: i32,
            breakers: *const *const c_char, count: usize
    ) -> *mut Sampler, or std::ptr::null_mut(); {
        let is_on = number("dry_multiplier", multiplier)? != 0.0
            && number("dry_base", base)? >= 1.0
            && last != 0;
        if !is_on {
            return plain(c"dry", false, SamplerStage::Nothing);
        }
        let model = model(vocab)?;
        // SAFETY: the caller upholds the header's contract.
        let texts = unsafe { array("seq_breakers", breakers, count) }?;
        let texts = texts.iter().filter_map(|&breaker| {
            // SAFETY: as above.
            Some(unsafe { text(breaker) }?.to_string_lossy().into_owned())
        });
        let breakers = Breakers::new(&texts.collect::<Vec<_>>(), &model.vocabulary()?.tokenizer);
        let params = DryParams {
            multiplier,
            base,
            allowed_length: usize::try_from(allowed).unwrap_or(0),
            last_n: last_n(last),
        };
        plain(c"dry", true, SamplerStage::Dry(Dry::new(params, breakers)))
    }

    /// Creates an adaptive-p sampler, which draws near a target probability; a negative target
    /// disables it and draws by probability.
    fn llama_sampler_init_adaptive_p(target: f32, decay: f32, seed: u32) -> *mut Sampler,
        or std::ptr::null_mut(); {
        number("target", target)?;
        let decay = number("decay", decay)?.clamp(0.0, 0.99);
        seeded(c"adaptive-p", seed, |rng| {
            if target < 0.0 {
                SamplerStage::Draw(rng)
            } else {
                SamplerStage::AdaptiveP(AdaptiveP::new(target.min(1.0), decay), rng)
            }
        })
    }

    /// Creates a sampler that adds biases to logits.
    fn llama_sampler_init_logit_bias(_vocabulary: i32, count: i32,
        biases: *const LogitBias) -> *mut Sampler, or std::ptr::null_mut(); {
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the caller upholds the header's contract.
        let biases = unsafe { array("logit_bias", biases, count) }?;
        let biases = biases
            .iter()
            .filter_map(|bias| Some((u32::try_from(bias.token).ok()?, bias.bias)));
        plain(c"logit-bias", count > 0, SamplerStage::LogitBias(biases.collect()))
    }

    /// Creates an infill sampler, which keeps tokens suitable for filling a gap.
    fn llama_sampler_init_infill(vocab: *const Opaque) -> *mut Sampler, or std::ptr::null_mut(); {
        let model = model(vocab)?;
        plain(c"infill", true, SamplerStage::Infill(Arc::clone(&model.vocabulary()?.tokenizer)))
    }
}
