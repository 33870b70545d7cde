//! Requests on a simulated machine: they arrive, share prefixes, are cancelled, read slowly, run
//! out of cache, shift their context, and use drafts and adapters.
//!
//! Whatever else runs or fails, a completed request must have the tokens that it gets alone on a
//! plain reference device. An incomplete one must have a prefix of them and a reason: it was
//! cancelled, or a fault struck. In the end, nothing may be left in the context.

use crate::case::{CaseOutcome, SimCase};
use crate::known::{KnownForRequests, MODEL, known_for_requests};
use crate::machine::Machine;
use crate::models::machine;
use crate::player::{Player, close};
use crate::world::World;
use samite_core::{CancelToken, DType, Environment};
use samite_llm::{
    Adapter, Context, ContextOptions, Error, Model, ModelOptions, PlacementRule, ScaledAdapter,
};
use samite_requests::{
    CacheOptions, Drafter, Engine, EngineOptions, Event, Finish, Reader, Request, Shift,
};
use samite_testing::Rng;
use samite_text::SamplerParams;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Context length of one request in tokens.
const CONTEXT: usize = 96;
/// Step limit; an engine that exceeds it is considered stuck.
const MAX_STEPS: usize = 20_000;

/// A request with its adapters: their indices and scales.
#[derive(Clone, Debug)]
struct SimRequest {
    request: Request,
    adapters: Option<Vec<(usize, f32)>>,
}

impl SimRequest {
    fn draw(rng: &mut Rng) -> Self {
        let base = rng.below(3) as u32;
        let shared = rng.below(75);
        let own = 1 + rng.below(20);
        let mut prompt: Vec<u32> = (0..shared as u32)
            .map(|i| 3 + (i * 31 + base * 7) % 256)
            .collect();
        prompt.extend((0..own).map(|_| 3 + rng.below(256) as u32));
        let adapters = match rng.below(8) {
            0 => Some(Vec::new()),
            number @ 1..4 => {
                let used = (0..2).filter(|place| number >> place & 1 == 1);
                Some(used.map(|place| (place, rng.pick(&[1.0, -0.5]))).collect())
            }
            _ => None,
        };
        let request = Request {
            max_tokens: match rng.below(6) {
                0 => None,
                1 => Some(0),
                _ => Some(1 + rng.below(24)),
            },
            sampling: SamplerParams {
                seed: rng.below(4) as u64,
                temperature: if rng.one_in(2) { 0.0 } else { 1.0 },
                repeat_penalty: if rng.one_in(4) { 1.3 } else { 1.0 },
                ..SamplerParams::default()
            },
            ignore_end: rng.one_in(2),
            cache: CacheOptions {
                reuse: !rng.one_in(6),
                keep: !rng.one_in(6),
                hold: prompt.len() % 8 == 3,
                salt: if rng.one_in(8) { 7 } else { 0 },
            },
            priority: i32::from(rng.one_in(6)),
            event_queue: 1 + rng.below(6),
            owner: prompt.len() as u64 % 3,
            ..Request::new(prompt)
        };
        SimRequest { request, adapters }
    }

    /// Enables context shift for some requests: a full context discards a part of its text and
    /// moves the rest.
    fn draw_shift(&mut self, rng: &mut Rng) {
        if rng.one_in(4) {
            let request = &mut self.request;
            request.when_full = Some(Shift {
                keep: rng.below(8),
                discard: rng.pick(&[None, Some(10)]),
            });
            request.max_tokens = Some(1 + rng.below(2 * CONTEXT));
            request.ignore_end = true;
        }
    }

    /// Returns how many of the first tokens must equal those of the request alone. Tokens computed
    /// again after a shift do not attend to the discarded part.
    fn sure(&self) -> usize {
        match self.request.when_full {
            Some(_) => CONTEXT - self.request.prompt.len(),
            None => usize::MAX,
        }
    }

    fn with(&self, adapters: &[Arc<Adapter>]) -> Request {
        let scaled = |&(number, share): &(usize, f32)| ScaledAdapter {
            adapter: Arc::clone(&adapters[number]),
            share,
        };
        let named = self.adapters.as_ref();
        Request {
            adapters: named.map(|named| named.iter().map(scaled).collect()),
            ..self.request.clone()
        }
    }

    /// Returns a key of everything that determines the tokens.
    fn name(&self) -> String {
        let request = &self.request;
        format!(
            "{:?}",
            (
                &request.prompt,
                &request.sampling,
                request.max_tokens,
                request.ignore_end,
                request.when_full,
                &self.adapters
            )
        )
    }
}

/// Outcome of a request.
struct TrackedRequest {
    id: u64,
    wish: SimRequest,
    reader: Option<Reader>,
    tokens: Vec<u32>,
    end: Option<Result<Finish, String>>,
    /// True if the request may fail.
    is_excused: bool,
}

impl TrackedRequest {
    fn is_over(&self) -> bool {
        self.end.is_some() || self.reader.is_none()
    }

    fn read(&mut self, most: usize) -> Result<(), String> {
        for _ in 0..most {
            let Some(event) = self.reader.as_mut().and_then(Reader::try_next) else {
                return Ok(());
            };
            if self.end.is_some() {
                return Err(format!(
                    "request {}: {event:?} comes after its end",
                    self.id
                ));
            }
            match event {
                Event::Started(_) | Event::Progress(_) | Event::PromptLogprobs(_) => {}
                Event::Token(token) => self.tokens.push(token.id),
                Event::Finished(finished) => self.end = Some(Ok(finished.reason)),
                Event::Failed(failed) => {
                    self.end = Some(Err(format!("{:?}: {}", failed.kind, failed.message)));
                }
            }
        }
        Ok(())
    }
}

/// Returns a request's result alone on one plain device.
fn alone(known: &KnownForRequests, wish: &SimRequest) -> Result<(Vec<u32>, Finish), String> {
    let text = |error: Error| error.to_string();
    let options = EngineOptions {
        slots: 1,
        kept: 1,
        context: Some(CONTEXT),
        ..EngineOptions::default()
    };
    let context = ContextOptions {
        n_ctx: Some(CONTEXT),
        n_batch: 32,
        n_seq: options.n_seq(),
        kv_types: [DType::F32; 2],
        ..ContextOptions::default()
    };
    let context = Context::new(Arc::clone(&known.alone), context).map_err(text)?;
    let mut engine = Engine::new(context, options).map_err(text)?;
    let submitted = engine.submit(wish.with(&known.adapters), Arc::new(|| {}));
    let (id, reader) = submitted.map_err(|refusal| refusal.to_string())?;
    let mut answer = TrackedRequest {
        id,
        wish: wish.clone(),
        reader: Some(reader),
        tokens: Vec::new(),
        end: None,
        is_excused: false,
    };
    while answer.end.is_none() {
        engine.step();
        answer.read(usize::MAX)?;
    }
    match answer.end {
        Some(Ok(reason)) => Ok((answer.tokens, reason)),
        other => Err(format!("alone, a request ends with {other:?}")),
    }
}

/// An engine on the simulated machine, with its model's adapters.
struct Served {
    engine: Engine,
    adapters: Vec<Arc<Adapter>>,
}

/// Settings drawn before the first request arrives.
struct Setting {
    known: &'static KnownForRequests,
    n_ctx: usize,
    options: EngineOptions,
    context: ContextOptions,
    rules: String,
    /// Draft model (true for the model itself, false for another one) and minimum probability.
    draft: Option<(bool, f32)>,
}

impl Setting {
    fn draw(rng: &mut Rng, machine: &Machine) -> Result<Self, String> {
        let all = known_for_requests()?;
        let known = &all[rng.below(all.len())];
        let options = EngineOptions {
            slots: 1 + rng.below(4),
            context: Some(CONTEXT),
            kept: 1 + rng.below(5),
            queue: 64,
            budget: 1 + rng.below(32),
            swap_bytes: rng.pick(&[0, 20_000, usize::MAX]),
            draft: rng.pick(&[0, 3, 16]),
            deterministic: false,
        };
        let context = ContextOptions {
            n_batch: 32,
            n_ubatch: rng.pick(&[3, 8, 16]),
            n_seq: options.n_seq(),
            n_logits: Some(8),
            kv_types: [DType::F32; 2],
            copies: rng.pick(&[1, 1, 2]),
            ..ContextOptions::default()
        };
        let rules: Vec<String> = (0..3)
            .map(|layer| {
                let device = &machine.devices[rng.below(machine.devices.len())];
                let name = &device.options.name;
                match layer {
                    2 => format!("output:{name}"),
                    layer => format!("layers={layer}:{name}"),
                }
            })
            .collect();
        Ok(Setting {
            known,
            // From room for a single request to plenty.
            n_ctx: CONTEXT + rng.below(4) * 64,
            draft: (known.takes_drafts && options.draft > 0 && !rng.one_in(3))
                .then(|| (rng.one_in(2), rng.pick(&[0.0, 0.5]))),
            options,
            context,
            rules: rules.join(";"),
        })
    }

    fn serve(&self, machine: &Machine, environment: &Environment) -> Result<Served, Error> {
        let options = ModelOptions {
            rules: PlacementRule::parse_all(&self.rules)?,
            fit: None,
            threads: Some(2),
            environment: environment.clone(),
            ..ModelOptions::new(machine.devices())
        };
        let model = Model::load(MODEL, &options)?;
        let adapters = self.known.adapter_names.iter();
        let adapters: Vec<_> = adapters
            .map(|name| Adapter::load_in(&*environment.files, name, &model))
            .collect::<Result<_, _>>()?;
        let context = ContextOptions {
            n_ctx: Some(self.n_ctx),
            ..self.context.clone()
        };
        let drafter = match self.draft {
            Some((is_itself, least)) => {
                let draft = if is_itself {
                    Arc::clone(&model)
                } else {
                    Arc::clone(&self.known.draft)
                };
                let context = ContextOptions {
                    n_ctx: Some(self.n_ctx + 64),
                    n_logits: None,
                    ..context.clone()
                };
                Some(Drafter::new(Context::new(draft, context)?, &model, least)?)
            }
            None => None,
        };
        let context = Context::new(model, context)?;
        let mut engine = Engine::new(context, self.options.clone())?;
        if let Some(drafter) = drafter {
            engine.set_drafter(drafter)?;
        }
        Ok(Served { engine, adapters })
    }
}

/// Runs a case.
pub(crate) fn play(
    case: &SimCase,
    world: &Arc<World>,
    outcome: &mut CaseOutcome,
) -> std::result::Result<(), String> {
    let machine = machine(case, world);
    let mut rng = Rng::new(case.seed_for(5));
    let mut setting = Setting::draw(&mut rng, &machine)?;
    let environment = machine.environment(setting.known.files.clone());
    let cancel = CancelToken::new();
    setting.context.cancel = cancel.clone();
    setting.context.environment = environment.clone();
    world.with(|state| {
        state.note(|_| {
            let Setting {
                n_ctx,
                options,
                rules,
                draft,
                ..
            } = &setting;
            format!("{n_ctx} cells, {options:?}, drafts {draft:?}, rules {rules:?}")
        });
    });
    let served = match setting.serve(&machine, &environment) {
        // A device rejected work that was placed on it by a rule.
        Err(Error::Core(samite_core::Error::Placement(_))) => return close(world),
        served => served.map_err(|error| error.to_string())?,
    };
    let Served {
        mut engine,
        adapters,
    } = served;
    let count = (3 + rng.below(6)).min(case.steps);
    let mut waiting: Vec<SimRequest> = (0..count).map(|_| SimRequest::draw(&mut rng)).collect();
    let mut shifts = Rng::new(case.seed_for(6));
    for wish in &mut waiting {
        wish.draw_shift(&mut shifts);
    }
    outcome.steps = count;
    let mut serve = Serve {
        engine: &mut engine,
        adapters: &adapters,
        world,
        cancel: &cancel,
    };
    let mut answers = serve.all(&mut waiting, &mut rng, true)?;
    // Repeating the requests reveals state that a failure left behind.
    if answers
        .iter()
        .any(|answer| matches!(answer.end, Some(Err(_))))
    {
        let mut again: Vec<SimRequest> = answers.iter().map(|answer| answer.wish.clone()).collect();
        for wish in &mut again {
            wish.request.cache.reuse = true;
        }
        answers.extend(serve.all(&mut again, &mut rng, false)?);
    }
    let plan = engine.context().scheduler().current_plan();
    let splits = plan.map_or(0, |plan| plan.splits().len());
    outcome.devices = splits.min(machine.devices.len());
    compare(setting.known, &answers)?;
    is_empty(&mut engine, &setting.options)?;
    drop(engine);
    drop(adapters);
    drop(setting);
    drop(machine);
    close(world)
}

/// An engine, with what its requests need.
struct Serve<'s> {
    engine: &'s mut Engine,
    adapters: &'s [Arc<Adapter>],
    world: &'s Arc<World>,
    cancel: &'s CancelToken,
}

impl Serve<'_> {
    /// Submits requests at random times until all are complete. Some steps meet faults, if enabled,
    /// and some requests are cancelled.
    fn all(
        &mut self,
        waiting: &mut Vec<SimRequest>,
        rng: &mut Rng,
        with_faults: bool,
    ) -> Result<Vec<TrackedRequest>, String> {
        let Serve {
            engine,
            adapters,
            world,
            cancel,
        } = self;
        let mut answers: Vec<TrackedRequest> = Vec::new();
        for _ in 0..MAX_STEPS {
            if !waiting.is_empty() && rng.one_in(3) {
                let wish = waiting.remove(0);
                let submitted = engine.submit(wish.with(adapters), Arc::new(|| {}));
                let (id, reader) = submitted.map_err(|refusal| refusal.to_string())?;
                world.with(|state| state.note(|_| format!("REQUEST {id}: {}", wish.name())));
                answers.push(TrackedRequest {
                    id,
                    wish,
                    reader: Some(reader),
                    tokens: Vec::new(),
                    end: None,
                    is_excused: false,
                });
            }
            let faults = usize::from(rng.one_in(12) && with_faults);
            let before = world.with(|state| state.struck().len());
            let player = Player::new(world, faults, cancel);
            engine.step();
            let _ = player.stop();
            cancel.reset();
            world.with(|state| state.check_idle("a step"))?;
            let is_struck = world.with(|state| {
                let struck = &state.struck()[before..];
                let is_felt = struck.iter().any(|strike| !strike.fault.is_harmless());
                is_felt || !state.lost_devices().is_empty()
            });
            for answer in &mut answers {
                answer.is_excused |= is_struck && answer.end.is_none();
                if answer.end.is_none() && rng.one_in(60) && with_faults {
                    answer.is_excused = true;
                    world.with(|state| {
                        state.note(|_| format!("request {} is cancelled", answer.id))
                    });
                    if rng.one_in(2) {
                        engine.cancel(answer.id)
                    } else {
                        answer.reader = None
                    }
                }
                // Some clients read slowly.
                if rng.one_in(2) {
                    answer.read(1 + rng.below(8))?;
                }
            }
            if waiting.is_empty()
                && answers.iter().all(TrackedRequest::is_over)
                && engine.is_quiet()
            {
                return Ok(answers);
            }
        }
        Err(format!(
            "after {MAX_STEPS} steps, not all requests are over"
        ))
    }
}

/// Compares all answers with those of the same requests alone.
fn compare(known: &KnownForRequests, answers: &[TrackedRequest]) -> Result<(), String> {
    let mut expected: BTreeMap<String, (Vec<u32>, Finish)> = BTreeMap::new();
    for answer in answers {
        let name = answer.wish.name();
        if !expected.contains_key(&name) {
            expected.insert(name.clone(), alone(known, &answer.wish)?);
        }
        let Some((tokens, reason)) = expected.get(&name) else {
            continue;
        };
        let id = answer.id;
        let sure = |tokens: &[u32]| tokens[..tokens.len().min(answer.wish.sure())].to_vec();
        let is_right = match &answer.end {
            Some(Ok(found)) => {
                (sure(&answer.tokens), answer.tokens.len(), found)
                    == (sure(tokens), tokens.len(), reason)
            }
            _ => sure(tokens).starts_with(&sure(&answer.tokens)),
        };
        if !is_right {
            return Err(format!(
                "request {id}: the tokens {:?} ({:?}), and {tokens:?} ({reason:?}) alone",
                answer.tokens, answer.end
            ));
        }
        if !answer.is_excused && !matches!(answer.end, Some(Ok(_))) {
            return Err(format!(
                "request {id} ends with {:?}, which nothing explains",
                answer.end
            ));
        }
    }
    Ok(())
}

/// Checks that nothing is left of the requests.
fn is_empty(engine: &mut Engine, options: &EngineOptions) -> Result<(), String> {
    let view = engine.view();
    if view.slots.iter().any(|slot| slot.request.is_some()) {
        return Err("a slot is taken although all requests are over".to_owned());
    }
    if view.kept > options.kept {
        return Err(format!("{} texts are kept, of {}", view.kept, options.kept));
    }
    engine.clear_prefix_cache();
    let contexts = [
        Some(engine.context()),
        engine.drafter().map(Drafter::context),
    ];
    for context in contexts.into_iter().flatten() {
        let cells = context.kv_cache().cells();
        let left = (0..options.n_seq()).find(|&sequence| cells.last_position(sequence).is_some());
        if cells.used() > 0 || left.is_some() {
            return Err(format!(
                "{} cells are left, and sequence {left:?}",
                cells.used()
            ));
        }
        if let Some(sequence) = (0..options.n_seq()).find(|&s| !context.adapters_of(s).is_empty()) {
            return Err(format!("sequence {sequence} still has adapters"));
        }
    }
    Ok(())
}
