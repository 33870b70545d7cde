//! The scheduler with random graphs on a simulated machine.
//!
//! Every operation runs twice: on the simulated machine, with faults, and on one plain reference
//! device. Results must be bit-identical. A failure on the simulated machine must state its reason,
//! and the operation must succeed when repeated without faults.

use crate::case::{CaseOutcome, SimCase};
use crate::economy::{Spent, check_memory};
use crate::machine::Machine;
use crate::player::{Player, close, is_injected};
use crate::world::World;
use samite_core::{
    Buffer, BufferType, CancelToken, DType, Device, Error, HostMemory, Result, StoredTensor,
    TensorId, Usage, host_buffer_type,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::{Assignments, Fallback, Options, Scheduler, Watch};
use samite_testing::{RandomGraph, Rng, random_graph_up_to};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A graph on the simulated machine and on one device, with its stored tensors on both.
struct GraphPair {
    seed: u64,
    nodes: usize,
    simulated: RandomGraph,
    alone: RandomGraph,
    /// Simulated tensors first; both in the same order.
    stored: [Vec<Arc<StoredTensor>>; 2],
}

type StoredTensors = Vec<Arc<StoredTensor>>;

/// Builds a graph whose stored tensors lie in a buffer from `allocate`, which receives its size.
fn graph_in(
    seed: u64,
    nodes: usize,
    mut allocate: impl FnMut(usize, Usage) -> Result<Arc<dyn Buffer>>,
) -> Result<(RandomGraph, StoredTensors)> {
    let mut stored = Vec::new();
    let graph = random_graph_up_to(seed, nodes, &mut |name, layout, usage, bytes| {
        let buffer = allocate(layout.bytes(), usage)?;
        let tensor = StoredTensor::new(name, buffer, 0, layout)?;
        tensor.tensor().write(0, bytes)?;
        stored.push(Arc::clone(&tensor));
        Ok(tensor)
    })?;
    Ok((graph, stored))
}

/// Allocates memory of some device: its own memory, imported host memory, or host memory that
/// several devices may use.
fn memory_of(
    machine: &Machine,
    rng: &mut Rng,
    size: usize,
    usage: Usage,
) -> Result<Arc<dyn Buffer>> {
    let Some(device) = machine.devices.get(rng.below(machine.devices.len() + 1)) else {
        return host_buffer_type().allocate(size, usage);
    };
    if device.options.import_host && rng.one_in(2) {
        let memory = HostMemory::allocate(size, "the host", "a tensor")?;
        machine.world.with(|state| state.faults.armed = true);
        let imported = device.import_host(memory, usage);
        machine.world.with(|state| state.faults.armed = false);
        // Import is optional: fall back to the device's memory.
        if let Ok(buffer) = imported {
            return Ok(buffer);
        }
    }
    device.buffer_type().allocate(size, usage)
}

impl GraphPair {
    fn new(
        seed: u64,
        nodes: usize,
        alone: &Arc<dyn BufferType>,
        allocate: impl FnMut(usize, Usage) -> Result<Arc<dyn Buffer>>,
    ) -> Result<Self> {
        let (simulated, stored) = graph_in(seed, nodes, allocate)?;
        let allocate = |size, usage| alone.allocate(size, usage);
        let (alone, stored_alone) = graph_in(seed, nodes, allocate)?;
        Ok(GraphPair {
            seed,
            nodes,
            simulated,
            alone,
            stored: [stored, stored_alone],
        })
    }

    /// Moves the simulated graph's tensors to other memory, with the twin's current values.
    fn move_to(&mut self, memory: &Arc<dyn BufferType>) -> Result<()> {
        let allocate = |size, usage| memory.allocate(size, usage);
        (self.simulated, self.stored[0]) = graph_in(self.seed, self.nodes, allocate)?;
        self.restore()
    }

    /// Copies the twin's values to the simulated graph's stored tensors: a failure leaves them
    /// undefined.
    fn restore(&self) -> Result<()> {
        for (simulated, alone) in self.stored[0].iter().zip(&self.stored[1]) {
            let mut bytes = vec![0; alone.layout().bytes()];
            alone.tensor().read(0, &mut bytes)?;
            simulated.tensor().write(0, &bytes)?;
        }
        Ok(())
    }

    /// Returns tensors that can be read after a run: outputs, and stored tensors, which runs may
    /// modify.
    fn outputs(&self) -> Vec<TensorId> {
        let graph = &self.alone.graph;
        let keeps = |id: &TensorId| {
            let tensor = graph.tensor(*id);
            tensor.flags.output || tensor.stored.is_some()
        };
        graph.ids().filter(keeps).collect()
    }
}

/// Input values of one run.
type Inputs = Vec<(TensorId, Vec<u8>)>;

fn inputs(graph: &RandomGraph, rng: &mut Rng) -> Inputs {
    let mut inputs = graph.inputs.clone();
    for (id, bytes) in &mut inputs {
        // Row numbers and positions keep their values.
        if graph.graph.tensor(*id).layout.dtype() == DType::F32 {
            for number in bytes.as_chunks_mut::<4>().0 {
                *number = rng.uniform(-1.0, 1.0).to_le_bytes();
            }
        }
    }
    inputs
}

/// Writes the inputs and calls `run`. If `run` fails, `is_running` remains set.
fn run_one(
    scheduler: &mut Scheduler,
    inputs: &Inputs,
    is_running: &mut bool,
    run: impl FnOnce(&mut Scheduler) -> Result<()>,
) -> Result<()> {
    for (id, bytes) in inputs {
        scheduler.write(*id, 0, bytes)?;
    }
    *is_running = true;
    run(scheduler)?;
    *is_running = false;
    Ok(())
}

fn read_all(
    scheduler: &mut Scheduler,
    outputs: &[TensorId],
    graph: &RandomGraph,
) -> Result<Vec<Vec<u8>>> {
    let values = outputs.iter().map(|&id| {
        let mut bytes = vec![0; graph.graph.tensor(id).layout.bytes()];
        scheduler.read(id, 0, &mut bytes)?;
        Ok(bytes)
    });
    values.collect()
}

/// Returns the values of the nodes that `wants` selects.
fn watch(
    scheduler: &mut Scheduler,
    inputs: &Inputs,
    wants: impl FnMut(TensorId) -> bool,
    cancel: &CancelToken,
    is_running: &mut bool,
) -> Result<Vec<Vec<u8>>> {
    let mut seen = Vec::new();
    run_one(scheduler, inputs, is_running, |scheduler| {
        scheduler.run_watched(cancel, wants, |id, place| {
            let mut bytes = id.index().to_le_bytes().to_vec();
            bytes.resize(8 + place.layout().bytes(), 0);
            place.read(0, &mut bytes[8..])?;
            seen.push(bytes);
            Ok(Watch::Continue)
        })
    })?;
    seen.sort();
    Ok(seen)
}

/// An application's action.
enum ApplicationAction {
    Run {
        /// Consecutive runs before results are read.
        runs: Vec<Inputs>,
        /// A further run that is not awaited: it is still in flight when the next action starts.
        last: Option<Inputs>,
    },
    Watch(Inputs, u64),
}

/// Extra operations around an action.
#[derive(Clone, Copy, Debug, Default)]
struct Extras {
    /// Evicts the graph's plan first.
    forgets: bool,
    /// Reserves memory first.
    reserves: bool,
    /// Traces the action.
    traces: bool,
}

impl ApplicationAction {
    fn draw(rng: &mut Rng, graph: &RandomGraph) -> Self {
        if rng.one_in(4) {
            return ApplicationAction::Watch(inputs(graph, rng), rng.bits());
        }
        let count = 1 + rng.below(4);
        let runs = (0..count).map(|_| inputs(graph, rng)).collect();
        let is_left = rng.one_in(3);
        let last = is_left.then(|| inputs(graph, rng));
        ApplicationAction::Run { runs, last }
    }

    fn perform(
        &self,
        scheduler: &mut Scheduler,
        graph: &RandomGraph,
        outputs: &[TensorId],
        cancel: &CancelToken,
        is_running: &mut bool,
    ) -> Result<Vec<Vec<u8>>> {
        match self {
            ApplicationAction::Run { runs, last } => {
                for inputs in runs {
                    run_one(scheduler, inputs, is_running, |all| all.run(cancel))?;
                }
                let values = read_all(scheduler, outputs, graph)?;
                if let Some(inputs) = last {
                    run_one(scheduler, inputs, is_running, |all| all.run(cancel))?;
                }
                Ok(values)
            }
            ApplicationAction::Watch(inputs, seed) => {
                let wants = |id: TensorId| Rng::new(seed ^ id.index() as u64).one_in(3);
                // Copies between devices have no counterpart in the twin.
                let wants = |id: TensorId| id.index() < graph.graph.len() && wants(id);
                watch(scheduler, inputs, wants, cancel, is_running)
            }
        }
    }
}

/// A simulated application.
struct Application<'a> {
    machine: Machine,
    options: Options,
    scheduler: Option<Scheduler>,
    alone: Scheduler,
    twins: Vec<GraphPair>,
    /// True if the last attempt failed within a run.
    failed_in_run: bool,
    rng: Rng,
    outcome: &'a mut CaseOutcome,
}

/// Runs a case.
pub(crate) fn play(
    case: &SimCase,
    world: &Arc<World>,
    outcome: &mut CaseOutcome,
) -> Result<(), String> {
    let machine = Machine::draw(case.seed_for(3), case.devices, |_| {}, world);
    let mut rng = Rng::new(case.seed_for(4));
    let device = ReferenceDevice::new(ReferenceOptions::named("alone")) as Arc<dyn Device>;
    let memory = device.buffer_type();
    let broken = |error: Error| format!("without faults: {error}");
    let alone = Scheduler::new(vec![device], Options::default()).map_err(broken)?;
    let twins = (0..1 + rng.below(2))
        .map(|_| {
            let mut places = Rng::new(rng.bits());
            let any = |size, usage| memory_of(&machine, &mut places, size, usage);
            GraphPair::new(rng.bits(), case.nodes, &memory, any)
        })
        .collect::<Result<Vec<_>>>()
        .map_err(broken)?;
    let options = Options {
        copies: rng.pick(&[1, 1, 2, 4]),
        offload: rng.one_in(2),
        fallback: Fallback::Allow,
        cached_plans: rng.pick(&[1, 8]),
        environment: machine.environment(BTreeMap::new()),
    };
    let mut application = Application {
        machine,
        options,
        scheduler: None,
        alone,
        twins,
        failed_in_run: false,
        rng,
        outcome,
    };
    let played = application.play(case.steps);
    drop(application);
    played?;
    close(world)
}

impl Application<'_> {
    fn play(&mut self, most: usize) -> Result<(), String> {
        for _ in 0..(1 + self.rng.below(8)).min(most) {
            let twin = self.rng.below(self.twins.len());
            if !self.step(twin)? {
                return Ok(()); // no placement exists
            }
            self.outcome.steps += 1;
        }
        Ok(())
    }

    /// Performs an action on a graph: first with faults, then again without faults if it failed.
    /// Returns false if the machine cannot run the graph.
    fn step(&mut self, twin: usize) -> Result<bool, String> {
        let deed = ApplicationAction::draw(&mut self.rng, &self.twins[twin].alone);
        let [forgets, reserves, traces] = [4, 4, 4].map(|n| self.rng.one_in(n));
        let extras = Extras {
            forgets,
            reserves,
            traces,
        };
        let faults = self.rng.below(3);
        let cancel = CancelToken::new();
        let player = Player::new(&self.machine.world, faults, &cancel);
        let mut tried = self.attempt(twin, &deed, extras, &cancel);
        let explained = player.stop();
        let outputs = self.twins[twin].outputs();
        let mut is_first = true;
        let values = loop {
            let error = match tried {
                Ok(values) => break values,
                Err(Error::Placement(_)) => return Ok(false),
                Err(error) => error,
            };
            let text = error.to_string();
            let is_lie = matches!(error, Error::Unsupported { .. }) && is_injected(&text);
            let is_explained = if is_first {
                explained(&text) || cancel.is_cancelled()
            } else {
                is_lie
            };
            if !is_explained {
                let when = if is_first { "first" } else { "again" };
                return Err(format!("{when}: an error that no fault explains: {text}"));
            }
            self.recover(error)?;
            // The failed work may include a run of another graph, still in flight from the previous
            // step.
            for twin in &self.twins {
                let restored = twin.restore();
                restored.map_err(|error| format!("after a failure: {error}"))?;
            }
            tried = self.attempt(twin, &deed, Extras::default(), &CancelToken::new());
            is_first = false;
        };
        let expected = self.expect(twin, &deed, &outputs)?;
        self.compare(&values, &expected)?;
        Ok(true)
    }

    fn attempt(
        &mut self,
        twin: usize,
        deed: &ApplicationAction,
        extras: Extras,
        cancel: &CancelToken,
    ) -> Result<Vec<Vec<u8>>> {
        self.failed_in_run = false;
        let graph = &self.twins[twin].simulated;
        let outputs = self.twins[twin].outputs();
        let scheduler = match &mut self.scheduler {
            Some(scheduler) => scheduler,
            none => none.insert(Scheduler::new(
                self.machine.devices(),
                self.options.clone(),
            )?),
        };
        if extras.forgets {
            scheduler.unload(&graph.graph, Assignments::NONE)?;
        }
        if extras.reserves {
            scheduler.reserve(&graph.graph, Assignments::NONE)?;
        }
        scheduler.load_with(&graph.graph, Assignments::NONE, cancel)?;
        if extras.traces {
            scheduler.start_trace();
        }
        let spent = Spent::so_far(scheduler, &self.machine.world);
        let is_running = &mut self.failed_in_run;
        let values = deed.perform(scheduler, graph, &outputs, cancel, is_running)?;
        scheduler.finish_trace();
        // A run that is not awaited would report its cancellation later.
        if !matches!(deed, ApplicationAction::Run { last: Some(_), .. }) || cancel.is_cancelled() {
            scheduler.synchronize()?;
        }
        let plan = scheduler.current_plan()?;
        if let ApplicationAction::Run { runs, last } = deed {
            let runs = runs.len() + usize::from(last.is_some());
            spent.check(runs, scheduler, plan, &self.machine.world);
        }
        check_memory(scheduler, &self.machine.world);
        let used: BTreeSet<_> = plan.splits().iter().map(|split| split.device).collect();
        self.outcome.devices = self.outcome.devices.max(used.len());
        Ok(values)
    }

    /// Returns the twin's results; its stored tensors change like those of the simulated graph.
    fn expect(
        &mut self,
        twin: usize,
        deed: &ApplicationAction,
        outputs: &[TensorId],
    ) -> Result<Vec<Vec<u8>>, String> {
        let graph = &self.twins[twin].alone;
        let cancel = CancelToken::new();
        let loaded = self.alone.load(&graph.graph);
        let values = loaded
            .and_then(|()| deed.perform(&mut self.alone, graph, outputs, &cancel, &mut false));
        values.map_err(|error| format!("on one device: {error}"))
    }

    fn compare(&self, values: &[Vec<u8>], expected: &[Vec<u8>]) -> Result<(), String> {
        if values.len() != expected.len() {
            return Err(format!(
                "{} results instead of {}",
                values.len(),
                expected.len()
            ));
        }
        match values.iter().zip(expected).position(|(a, b)| a != b) {
            Some(number) => Err(format!("result {number} is not what one device computes")),
            None => Ok(()),
        }
    }

    /// Removes devices that are lost or misreport their support, and moves tensors off lost
    /// devices.
    fn recover(&mut self, error: Error) -> Result<(), String> {
        let Some(scheduler) = &mut self.scheduler else {
            return Ok(());
        };
        // A failed run leaves nothing in flight. Otherwise earlier runs may be in flight, and one
        // of them may have failed as well.
        if !self.failed_in_run
            && let Err(error) = scheduler.synchronize()
            && !is_injected(&error.to_string())
            && !matches!(error, Error::Cancelled)
        {
            return Err(format!("after a failure: {error}"));
        }
        let world = &self.machine.world;
        world.with(|state| state.check_idle("a run that failed"))?;
        let mut gone = self.machine.world.with(|state| state.lost_devices());
        if let Error::Unsupported { device, .. } = &error {
            gone.push(device.to_string());
        }
        gone.retain(|name| scheduler.devices().position(name).is_some());
        for name in &gone {
            scheduler
                .remove_device(name)
                .map_err(|error| format!("going on without {name}: {error}"))?;
        }
        if !self.failed_in_run {
            let done = scheduler.synchronize();
            done.map_err(|error| format!("after a failure was reported: {error}"))?;
        }
        if !gone.is_empty() {
            let last = self.machine.memories().pop();
            let last = last.ok_or("every device is lost")?;
            for twin in &mut self.twins {
                twin.move_to(&last)
                    .map_err(|error| format!("loading again: {error}"))?;
            }
        }
        Ok(())
    }
}
