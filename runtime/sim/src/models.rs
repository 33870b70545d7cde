//! Language models on a simulated machine: sequences join, leave, are copied, moved and cancelled,
//! and adapters change.
//!
//! Every call is made on a context of the simulated machine, with faults, and on one of a plain
//! reference device. Logits must be bit-identical. A call that failed because of a fault must leave
//! the context unchanged: repeated without faults, it gives the same result as the other context.

use crate::case::{CaseOutcome, SimCase};
use crate::device::SimOptions;
use crate::known::{ADAPTER, MODEL, known};
use crate::machine::Machine;
use crate::player::{Player, close};
use crate::world::World;
use samite_core::{CancelToken, DType, Environment};
use samite_llm::{
    Adapter, Batch, Cells, Context, ContextOptions, Error, Model, ModelOptions, PlacementRule,
    Result, ScaledAdapter,
};
use samite_testing::Rng;
use std::collections::BTreeSet;
use std::sync::Arc;

const SEQUENCES: usize = 3;

/// An application's call.
#[derive(Clone, Debug)]
enum Call {
    /// Token, position, sequence, and a flag that requests logits.
    Decode(Vec<(u32, i32, u32, bool)>),
    Remove(usize, i32, i32),
    Copy(usize, usize),
    Keep(usize),
    Shift(usize, i32, i32),
    Clear,
    /// Sets the adapter's scale; `None` removes the adapter.
    Adapter(Option<f32>),
}

impl Call {
    fn draw(rng: &mut Rng, context: &Context) -> Self {
        let cells = context.kv_cache().cells();
        let sequence = rng.below(SEQUENCES);
        let last = cells.last_position(sequence).unwrap_or(-1);
        match rng.below(16) {
            0 => {
                let first = rng.below(last.max(0) as usize + 1) as i32;
                Call::Remove(sequence, first, first + 1 + rng.below(6) as i32)
            }
            1 => Call::Copy(sequence, rng.below(SEQUENCES)),
            2 if rng.one_in(3) => Call::Keep(sequence),
            3 | 4 => Call::Shift(
                sequence,
                rng.below(last.max(0) as usize + 1) as i32,
                rng.below(7) as i32 - 3,
            ),
            5 if rng.one_in(3) => Call::Clear,
            6 | 7 => Call::Adapter(rng.pick(&[None, Some(1.0), Some(0.5)])),
            _ => {
                let mut tokens = Vec::new();
                let first = rng.below(SEQUENCES);
                for offset in 0..1 + rng.below(SEQUENCES) {
                    let sequence = (first + offset) % SEQUENCES;
                    let next = cells.next_position(sequence);
                    for position in 0..1 + rng.below(4) as i32 {
                        let id = 3 + rng.below(256) as u32;
                        tokens.push((id, next + position, sequence as u32, rng.one_in(2)));
                    }
                }
                Call::Decode(tokens)
            }
        }
    }

    /// Makes the call. For a decode, returns the requested logits.
    fn make(&self, context: &mut Context, adapter: &Arc<Adapter>) -> Result<Vec<Vec<f32>>> {
        match self {
            Call::Decode(tokens) => {
                let mut batch = Batch::new();
                for &(id, position, sequence, wanted) in tokens {
                    batch.add(id, position, &[sequence], wanted);
                }
                context.decode(&batch)?;
                let logits = (0..tokens.len()).filter_map(|index| context.logits(index));
                return Ok(logits.map(<[f32]>::to_vec).collect());
            }
            &Call::Remove(sequence, first, end) => {
                context.kv_cache_mut().remove(sequence, first..end)?
            }
            &Call::Copy(from, to) => context.kv_cache_mut().copy(from, to, ..)?,
            &Call::Keep(sequence) => context.kv_cache_mut().keep(sequence)?,
            &Call::Shift(sequence, first, delta) => {
                context.kv_cache_mut().shift(sequence, first.., delta)?
            }
            Call::Clear => context.clear()?,
            Call::Adapter(share) => {
                let adapters = share.map(|share| ScaledAdapter {
                    adapter: Arc::clone(adapter),
                    share,
                });
                context.set_adapters(adapters.into_iter().collect())?;
            }
        }
        Ok(Vec::new())
    }
}

/// Model of the positions in each sequence, kept as simple as possible.
#[derive(Default)]
struct Positions([BTreeSet<i32>; SEQUENCES]);

impl Positions {
    /// Applies the effect of a successful call.
    fn follow(&mut self, call: &Call) {
        match call {
            Call::Decode(tokens) => {
                for &(_, position, sequence, _) in tokens {
                    self.0[sequence as usize].insert(position);
                }
            }
            Call::Remove(sequence, first, end) => {
                self.0[*sequence].retain(|position| !(first..end).contains(&position));
            }
            &Call::Copy(from, to) => self.0[to] = self.0[from].clone(),
            &Call::Keep(kept) => {
                let others = (0..SEQUENCES).filter(|&other| other != kept);
                others.for_each(|other| self.0[other].clear());
            }
            &Call::Shift(sequence, first, delta) => {
                let (stay, move_on): (BTreeSet<_>, BTreeSet<_>) =
                    self.0[sequence].iter().partition(|&&at| at < first);
                let moved = move_on.into_iter().map(|at| at + delta);
                self.0[sequence] = stay.into_iter().chain(moved).collect();
            }
            Call::Clear => *self = Positions::default(),
            Call::Adapter(_) => {}
        }
    }

    /// Returns a description of the first difference from `cells`.
    fn differ(&self, cells: &Cells) -> Option<String> {
        let mut sequences = self.0.iter().enumerate();
        sequences.find_map(|(sequence, positions)| {
            let expected = (positions.len(), positions.last().copied());
            let found = (
                cells.sequence_len(sequence),
                cells.last_position(sequence),
            );
            (found != expected).then(|| {
                format!("sequence {sequence} has {found:?} cells and last position, expected {expected:?}")
            })
        })
    }
}

/// Model context and adapter on the simulated machine.
struct LoadedModel {
    context: Context,
    adapter: Arc<Adapter>,
}

struct Application {
    machine: Machine,
    environment: Environment,
    rules: Vec<PlacementRule>,
    options: ContextOptions,
    loaded: Option<LoadedModel>,
    alone: Context,
    adapter_alone: Arc<Adapter>,
    /// Calls that succeeded on both contexts since they were last cleared.
    history: Vec<Call>,
    positions: Positions,
    rng: Rng,
}

/// Returns the machine of a case with language models.
pub(crate) fn machine(case: &SimCase, world: &Arc<World>) -> Machine {
    let change = |options: &mut SimOptions| {
        // Manual placement states where a layer fits and trusts the device.
        options.lies_about.clear();
        options.max_buffer_size = options.max_buffer_size.max(64 << 10);
    };
    Machine::draw(case.seed_for(3), case.devices, change, world)
}

/// Runs a case.
pub(crate) fn play(
    case: &SimCase,
    world: &Arc<World>,
    outcome: &mut CaseOutcome,
) -> std::result::Result<(), String> {
    let machine = machine(case, world);
    let mut rng = Rng::new(case.seed_for(5));
    let known = known()?;
    let known = &known[rng.below(known.len())];
    let cancel = CancelToken::new();
    let options = ContextOptions {
        n_ctx: Some(32),
        n_batch: 16,
        n_ubatch: rng.pick(&[2, 3, 8]),
        n_seq: SEQUENCES,
        kv_types: [rng.pick(&[DType::F32, DType::F16, DType::BF16]); 2],
        copies: rng.pick(&[1, 2, 4]),
        ..ContextOptions::default()
    };
    // One device's single pass must match the same work split into several micro-batches.
    let whole = ContextOptions {
        n_ubatch: options.n_batch,
        copies: 1,
        ..options.clone()
    };
    let alone = Context::new(Arc::clone(&known.alone), whole);
    let environment = machine.environment(known.files.clone());
    let options = ContextOptions {
        cancel: cancel.clone(),
        environment: environment.clone(),
        ..options
    };
    let mut rules = Vec::new();
    for layer in 0..3 {
        let device = &machine.devices[rng.below(machine.devices.len())]
            .options
            .name;
        let selector = match layer {
            2 => "output".to_owned(),
            layer => format!("layers={layer}"),
        };
        rules.push(format!("{selector}:{device}"));
    }
    let rules = rules.join(";");
    world.with(|state| {
        state.note(|_| {
            format!(
                "{} in micro-batches of {}, {} pipeline copies, rules {rules:?}",
                options.n_ctx.unwrap_or(0),
                options.n_ubatch,
                options.copies
            )
        });
    });
    let mut application = Application {
        machine,
        environment,
        rules: PlacementRule::parse_all(&rules).map_err(|error| error.to_string())?,
        options,
        loaded: None,
        alone: alone.map_err(|error| error.to_string())?,
        adapter_alone: Arc::clone(&known.adapter),
        history: Vec::new(),
        positions: Positions::default(),
        rng,
    };
    let steps = (2 + application.rng.below(8)).min(case.steps);
    for _ in 0..steps {
        if !application.step(outcome)? {
            break;
        }
        outcome.steps += 1;
    }
    drop(application);
    close(world)
}

impl Application {
    fn load(&mut self) -> Result<&mut LoadedModel> {
        let loaded = match self.loaded.take() {
            Some(loaded) => loaded,
            None => self.load_anew()?,
        };
        Ok(self.loaded.insert(loaded))
    }

    /// Loads the model on the remaining devices and replays all calls so far.
    fn load_anew(&self) -> Result<LoadedModel> {
        let lost = self.machine.world.with(|state| state.lost_devices());
        let mut devices = self.machine.devices();
        devices.retain(|device| lost.iter().all(|lost| lost != device.name()));
        let options = ModelOptions {
            // Rules may name lost devices.
            rules: if lost.is_empty() {
                self.rules.clone()
            } else {
                Vec::new()
            },
            fit: None,
            threads: Some(2),
            cancel: self.options.cancel.clone(),
            environment: self.environment.clone(),
            ..ModelOptions::new(devices)
        };
        let model = Model::load(MODEL, &options)?;
        let adapter = Adapter::load_in(&*self.environment.files, ADAPTER, &model)?;
        let mut context = Context::new(model, self.options.clone())?;
        for call in &self.history {
            call.make(&mut context, &adapter)?;
        }
        Ok(LoadedModel { context, adapter })
    }

    fn attempt(&mut self, call: &Call) -> Result<Vec<Vec<f32>>> {
        let LoadedModel { context, adapter } = self.load()?;
        let adapter = Arc::clone(adapter);
        call.make(context, &adapter)
    }

    /// Makes a call: first with faults, then again without faults if it failed. Returns false if
    /// the machine cannot hold the model.
    fn step(&mut self, outcome: &mut CaseOutcome) -> std::result::Result<bool, String> {
        let call = Call::draw(&mut self.rng, &self.alone);
        let world = Arc::clone(&self.machine.world);
        let cancel = self.options.cancel.clone();
        let faults = self.rng.below(3);
        let gives_up = self.rng.one_in(3);
        world.with(|state| state.note(|_| format!("CALL: {call:?}")));
        if self.rng.one_in(2) {
            // Load first, since loading would consume most of the faults. If it fails without a
            // fault, the call below loads again and reports the error.
            let _ = self.load();
        }
        let player = Player::new(&world, faults, &cancel);
        let tried = self.attempt(&call);
        let is_cancelled = cancel.is_cancelled();
        let explained = player.stop();
        cancel.reset();
        let had_cells = self.alone.kv_cache().cells().used() > 0;
        world.with(|state| state.check_idle("a call"))?;
        let mut tried = tried;
        if let Err(error) = &tried
            && (explained(&error.to_string()) || is_cancelled)
        {
            world.with(|state| state.note(|_| format!("again, after: {error}")));
            let is_cleared =
                |loaded: &LoadedModel| had_cells && loaded.context.kv_cache().cells().used() == 0;
            let is_lost = !world.with(|state| state.lost_devices()).is_empty();
            // If moving keys fails, which ones moved is unknown, and the cache is cleared.
            let was_moving = self
                .history
                .iter()
                .any(|call| matches!(call, Call::Shift(..)));
            if is_lost || was_moving && self.loaded.as_ref().is_some_and(is_cleared) {
                self.loaded = None;
            }
            if matches!(call, Call::Decode(_) | Call::Adapter(_)) {
                let changed = |what| format!("{call:?} failed, and changed something: {what}");
                self.check().map_err(changed)?;
                // Keys moved before the failure would take a different number of steps than on one
                // device.
                if gives_up && !was_moving {
                    return Ok(true);
                }
            }
            tried = self.attempt(&call);
        }
        let expected = call.make(&mut self.alone, &self.adapter_alone);
        let values = match tried {
            // A device rejected work that was placed on it by a rule.
            Err(Error::Core(samite_core::Error::Placement(_))) => return Ok(false),
            values => values,
        };
        if let Some(loaded) = &self.loaded {
            let plan = loaded.context.scheduler().current_plan();
            let splits = plan.map_or(0, |plan| plan.splits().len());
            outcome.devices = outcome.devices.max(splits.min(self.machine.devices.len()));
        }
        match (&values, &expected) {
            (Ok(values), Ok(expected)) if values != expected => {
                let at = values.iter().zip(expected).position(|(a, b)| a != b);
                return Err(match at {
                    Some(row) => {
                        let pairs = values[row].iter().zip(&expected[row]);
                        let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                        format!("{call:?}: row {row} of the logits is wrong, by {most:.1e}")
                    }
                    None => format!("{call:?}: {} rows of logits", values.len()),
                });
            }
            (Ok(_), Ok(_)) => {
                self.positions.follow(&call);
                self.history.push(call);
            }
            (Err(Error::InvalidArgument(_)), Err(Error::InvalidArgument(_)))
            | (Err(Error::ContextFull { .. }), Err(Error::ContextFull { .. })) => {}
            (Err(error), _) => {
                return Err(format!(
                    "{call:?}: an error that no fault explains: {error}"
                ));
            }
            (Ok(_), Err(error)) => return Err(format!("{call:?}: one device says: {error}")),
        }
        self.check()?;
        Ok(true)
    }

    /// Compares the state of both contexts with the calls made and with each other.
    fn check(&self) -> std::result::Result<(), String> {
        let simulated = self.loaded.as_ref().map(|loaded| &loaded.context);
        for context in simulated.into_iter().chain([&self.alone]) {
            if let Some(difference) = self.positions.differ(context.kv_cache().cells()) {
                return Err(difference);
            }
        }
        let state = |context: &Context| {
            let shares = context.options().adapters.iter();
            let shares: Vec<f32> = shares.map(|adapter| adapter.share).collect();
            (shares, context.kv_cache().cells().end())
        };
        let (mine, expected) = (simulated.map(state), state(&self.alone));
        match mine.filter(|mine| *mine != expected) {
            Some(mine) => Err(format!(
                "shares of adapters and the end of used cells are {mine:?}, on one device {expected:?}"
            )),
            None => Ok(()),
        }
    }
}
