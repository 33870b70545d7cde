//! Keeping plans and memory, and running graphs.

use crate::bound::Bound;
use crate::chunks::Chunks;
use crate::compiler::Compiler;
use crate::devices::DeviceSet;
use crate::executor::Executor;
use crate::options::{Assignments, Fallback, Options};
use crate::order::Lane;
use crate::plan::Plan;
use crate::trace::Trace;
use crate::watch::{self, Walk, Watch, WatchedRun};
use samite_core::{CancelToken, Device, Error, Graph, Op, Result, TensorId, TensorRef};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Counts what a scheduler did, to see that nothing is done twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Plans made.
    pub plans: usize,
    /// Buffers allocated.
    pub buffers: usize,
    /// Times that a device compiled something new.
    pub compiled: usize,
    /// Splits bound to memory.
    pub prepared: usize,
    /// Runs.
    pub runs: usize,
}

/// Runs graphs over several devices.
///
/// [`load`](Scheduler::load) a graph, [`write`](Scheduler::write) its inputs, [`run`](Scheduler::run),
/// [`read`](Scheduler::read) its outputs. Loading a graph of a known topology plans and allocates nothing.
pub struct Scheduler {
    // First, so that it is dropped first: it waits for work in the memory that the others hold.
    executor: Executor,
    devices: DeviceSet,
    options: Options,
    chunks: Chunks,
    compiler: Compiler,
    loaded: Vec<Loaded>,
    /// Position in `loaded` of the graph that runs.
    current: Option<usize>,
    clock: usize,
    counters: Counters,
    /// Fallbacks that were warned of: device, operation, reason.
    warned: BTreeSet<(usize, &'static str, String)>,
}

/// A plan that is kept.
struct Loaded {
    plan: Arc<Plan>,
    last_use: usize,
    /// The plan in memory; `None` while that is too small.
    bound: Option<Bound>,
}

impl Scheduler {
    /// A scheduler over `devices`, most wanted first; inputs start on the last one, usually the CPU.
    ///
    /// # Errors
    /// If there is no device, a name appears twice, or a device cannot open a stream.
    pub fn new(devices: Vec<Arc<dyn Device>>, options: Options) -> Result<Self> {
        let devices = DeviceSet::new(devices)?;
        Ok(Scheduler {
            executor: Executor::new(&devices)?,
            chunks: Chunks::new(devices.memories().len()),
            devices,
            options,
            compiler: Compiler::default(),
            loaded: Vec::new(),
            current: None,
            clock: 0,
            counters: Counters::default(),
            warned: BTreeSet::new(),
        })
    }

    /// The devices, most wanted first.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        Counters {
            compiled: self.compiler.compiled,
            ..self.counters
        }
    }

    /// Plans `graph` without allocating anything: for sizes and explanations.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(&self, graph: &Graph, assignments: &Assignments) -> Result<Plan> {
        Plan::new(graph, &self.devices, assignments, &self.options)
    }

    /// A plan that is going to be used.
    fn new_plan(&mut self, graph: &Graph, assignments: &Assignments) -> Result<Plan> {
        let plan = self.plan(graph, assignments)?;
        self.counters.plans += 1;
        tracing::debug!("plan {}:\n{}", self.counters.plans, plan.nodes());
        self.warn_of_fallbacks(&plan);
        Ok(plan)
    }

    /// Tells of operations that land on a slower device, of each kind once.
    fn warn_of_fallbacks(&mut self, plan: &Plan) {
        if self.options.fallback != Fallback::Warn {
            return;
        }
        let mut new = plan.fallbacks().iter().filter(|refusal| {
            let operation = plan.graph.tensor(refusal.node).op.name();
            self.warned
                .insert((refusal.device, operation, refusal.reason.clone()))
        });
        if let Some(first) = new.next() {
            let kinds = 1 + new.count();
            let example = plan.placement.describe(first, &plan.graph, &plan.devices);
            tracing::warn!(
                count = plan.fallbacks().len(),
                kinds,
                "operations fall back to a slower device; first: {example}"
            );
        }
    }

    /// Allocates the memory that `graph` needs, so that loading it, or anything smaller, does not have to. If something
    /// had to grow, no graph is loaded afterwards.
    ///
    /// # Errors
    /// As [`load`](Scheduler::load).
    pub fn reserve(&mut self, graph: &Graph, assignments: &Assignments) -> Result<()> {
        let plan = self.new_plan(graph, assignments)?;
        self.grow(&plan)
    }

    /// Bytes allocated, by kind of memory: `(name, bytes)`.
    pub fn buffer_sizes(&self) -> Vec<(String, usize)> {
        let memories = self.devices.memories().iter();
        memories
            .map(|memory| memory.name().to_owned())
            .zip(self.chunks.sizes())
            .collect()
    }

    /// Makes `graph` the one that runs: finds its plan or makes one, allocates what is missing, lets devices compile the splits.
    ///
    /// # Errors
    /// If the graph cannot be placed, or a device has not enough memory. The graph loaded before is no longer loaded then.
    pub fn load(&mut self, graph: &Graph) -> Result<()> {
        self.load_with(graph, Assignments::NONE, &CancelToken::new())
    }

    /// [`load`](Scheduler::load) with devices chosen for some tensors, and a token that stops compilers.
    ///
    /// # Errors
    /// As [`load`](Scheduler::load); [`Error::Cancelled`].
    pub fn load_with(
        &mut self,
        graph: &Graph,
        assignments: &Assignments,
        cancel: &CancelToken,
    ) -> Result<()> {
        let fits = |loaded: &Loaded| loaded.plan.fits(graph, assignments);
        let mut known = self.loaded.iter().position(fits);
        if known.is_none() || known != self.current {
            self.synchronize()?;
        }
        if let Some(index) = known
            && self.options.environment.chance.takes("plan-again")
        {
            self.synchronize()?;
            self.forget(index);
            known = None;
        }
        self.current = None;
        let index = match known {
            Some(index) => index,
            None => {
                let plan = Arc::new(self.new_plan(graph, assignments)?);
                self.make_room();
                self.loaded.push(Loaded {
                    plan,
                    last_use: 0,
                    bound: None,
                });
                self.loaded.len() - 1
            }
        };
        self.clock += 1;
        self.loaded[index].last_use = self.clock;
        if self.loaded[index].bound.is_none()
            && let Err(error) = self.bind(index, cancel)
        {
            self.loaded.swap_remove(index);
            return Err(error);
        }
        self.current = Some(index);
        Ok(())
    }

    /// Forgets the plan of a graph, if it is known: for callers that know which graphs will not come back.
    ///
    /// # Errors
    /// If work that was still running failed.
    pub fn unload(&mut self, graph: &Graph, assignments: &Assignments) -> Result<()> {
        let fits = |loaded: &Loaded| loaded.plan.fits(graph, assignments);
        let Some(index) = self.loaded.iter().position(fits) else {
            return Ok(());
        };
        let result = self.synchronize();
        self.forget(index);
        result
    }

    /// Drops a plan of which nothing is running.
    fn forget(&mut self, index: usize) {
        self.loaded.swap_remove(index);
        let moved = self.loaded.len();
        self.current = match self.current {
            Some(current) if current == index => None,
            Some(current) if current == moved => Some(index),
            current => current,
        };
    }

    /// Forgets the least recently used plan if there are too many.
    fn make_room(&mut self) {
        let chance = Arc::clone(&self.options.environment.chance);
        while self.loaded.len() >= self.options.cached_plans.max(1)
            || !self.loaded.is_empty() && chance.takes("forget-plan")
        {
            let oldest = (0..self.loaded.len()).min_by_key(|&index| self.loaded[index].last_use);
            self.forget(oldest.unwrap_or(0));
        }
    }

    /// Makes every chunk at least as large as `plan` needs.
    fn grow(&mut self, plan: &Plan) -> Result<()> {
        let missing = self.chunks.missing(&plan.memory);
        if missing.is_empty() {
            return Ok(());
        }
        // Everything that uses old buffers is finished and let go first.
        self.synchronize()?;
        self.current = None;
        self.loaded
            .iter_mut()
            .for_each(|loaded| loaded.bound = None);
        self.counters.buffers += missing.len();
        self.chunks.allocate(missing, &self.devices)
    }

    fn bind(&mut self, index: usize, cancel: &CancelToken) -> Result<()> {
        let plan = Arc::clone(&self.loaded[index].plan);
        self.grow(&plan)?;
        let bound = Bound::new(
            &plan,
            &self.chunks,
            &mut self.compiler,
            &mut self.executor,
            cancel,
        )?;
        self.counters.prepared += plan.copies * plan.lowered.splits.len();
        self.loaded[index].bound = Some(bound);
        Ok(())
    }

    /// The graph that runs, with what it runs on.
    fn current(&mut self) -> Result<(&Arc<Plan>, &mut Bound, &mut Executor)> {
        let loaded = self
            .current
            .map(|index| &mut self.loaded[index])
            .and_then(|loaded| Some((&loaded.plan, loaded.bound.as_mut()?)));
        let (plan, bound) = loaded.ok_or_else(no_graph)?;
        Ok((plan, bound, &mut self.executor))
    }

    /// The plan of the loaded graph.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no graph is loaded.
    pub fn current_plan(&self) -> Result<&Plan> {
        let index = self.current.ok_or_else(no_graph)?;
        Ok(&self.loaded[index].plan)
    }

    /// Writes bytes of an input of the loaded graph, for the next run. Inputs keep their values from run to run only
    /// without pipeline copies. Stored tensors are written to [directly](samite_core::TensorRef::write), after
    /// [`synchronize`](Scheduler::synchronize).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `id` is not an input of the graph, or the range does not exist; or what failed in earlier runs, of which
    /// nothing is in flight then.
    pub fn write(&mut self, id: TensorId, offset: usize, data: &[u8]) -> Result<()> {
        let (plan, bound, executor) = self.current()?;
        let tensor = plan.graph.tensors().get(id.index());
        if !tensor.is_some_and(|tensor| tensor.flags.input) {
            return Err(Error::invalid(format!(
                "tensor {id} is not an input of the loaded graph"
            )));
        }
        if !plan.live[id.index()] {
            return Ok(()); // nothing depends on it
        }
        if !bound.inputs_free {
            let mut waits = plan.actions[0].waits.iter();
            let waited = waits.try_for_each(|&wait| executor.wait_on_host(plan, bound, wait));
            bound.inputs_free = true;
            if let Err(error) = waited {
                executor.give_up(bound);
                return Err(self.say_what_was_lost(error));
            }
        }
        let place = bound.places[bound.copy()][id.index()].as_ref();
        let place =
            place.ok_or_else(|| Error::invalid(format!("input {id} has no place in memory")))?;
        // The plan counts this as work of the host: whatever is issued later sees it without a wait.
        place.write(offset, data)
    }

    /// Reads bytes of an output or input of the loaded graph, as the last run left them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `id` keeps no value, or the range does not exist; or what failed in the run. Then nothing is in flight.
    pub fn read(&mut self, id: TensorId, offset: usize, out: &mut [u8]) -> Result<()> {
        let (plan, bound, executor) = self.current()?;
        let graph = &plan.graph;
        let keeps = |id: TensorId| {
            let tensor = graph.tensor(id);
            tensor.flags.output
                || tensor.flags.input
                || tensor.stored.is_some()
                || matches!(tensor.op, Op::Leaf)
        };
        if id.index() >= graph.len() || !(keeps(id) || keeps(graph.memory_of(id))) {
            return Err(Error::invalid(format!(
                "tensor {id} keeps no value after a run: declare it with set_output"
            )));
        }
        let copy = (bound.runs + plan.copies - 1) % plan.copies;
        let place = bound.places[copy][id.index()].as_ref();
        let place = place.ok_or_else(|| {
            Error::invalid(format!("tensor {id} was not computed: nothing needs it"))
        })?;
        place.check_range(offset, out.len())?;
        let lane = plan.lane(id);
        let mut others = plan.writers(id).iter();
        let result = others
            .try_for_each(|&device| match lane == Lane::Device(device) {
                true => Ok(()),
                false => executor.stream(device).synchronize(),
            })
            .and_then(|()| match lane.device() {
                None => place.read(offset, out),
                Some(device) => executor.stream(device).read(place, offset, out),
            });
        if result.is_err() {
            // Other streams may have failed with this one. They would say so later, as if new work had failed.
            executor.give_up(bound);
        }
        result.map_err(|error| self.say_what_was_lost(error))
    }

    /// Runs the loaded graph. On asynchronous devices, work may go on after the return;
    /// [`read`](Scheduler::read) and [`synchronize`](Scheduler::synchronize) wait for it.
    ///
    /// # Errors
    /// [`Error::Cancelled`], or what a device says. The scheduler stays usable; after [`Error::DeviceLost`], once it goes on
    /// [without that device](Scheduler::remove_device).
    pub fn run(&mut self, cancel: &CancelToken) -> Result<()> {
        let (plan, bound, executor) = self.current()?;
        let result = executor.run(plan, bound, cancel);
        self.counters.runs += 1;
        result.map_err(|error| self.say_what_was_lost(error))
    }

    /// Lets devices that compute on the host use so many threads from the next run on, or all that they have. Results stay the same.
    pub fn set_threads(&mut self, threads: Option<usize>) {
        self.executor.set_threads(threads);
    }

    /// Runs the loaded graph node by node. For each node that `wants` to be seen, `see` gets its value right after it
    /// was computed and can stop the run. See [`watch`](Scheduler::watch).
    ///
    /// # Errors
    /// As [`run`](Scheduler::run); [`Error::Stopped`] if `see` says stop.
    pub fn run_watched(
        &mut self,
        cancel: &CancelToken,
        wants: impl FnMut(TensorId) -> bool,
        mut see: impl FnMut(TensorId, &TensorRef) -> Result<Watch>,
    ) -> Result<()> {
        let mut run = self.watch(cancel, wants)?;
        while let Some((id, place)) = run.advance()? {
            match see(id, &place) {
                Ok(Watch::Continue) => {}
                Ok(Watch::Stop) => return run.fail(Error::Stopped),
                Err(error) => return run.fail(error),
            }
        }
        Ok(())
    }

    /// Begins a run of the loaded graph that goes on from one node that `wants` to be seen to the next. Other nodes run together, as far as they are
    /// neighbours. Everything is asked about before the run: computed nodes, and views of their results, which are seen right after
    /// them. Devices do not compile anew for a run that is watched as the one before.
    ///
    /// # Errors
    /// If no graph is loaded; if a device cannot do a part of what it can do as a whole; or what failed in earlier runs.
    pub fn watch<'s>(
        &'s mut self,
        cancel: &'s CancelToken,
        wants: impl FnMut(TensorId) -> bool,
    ) -> Result<WatchedRun<'s>> {
        // Actions are done one after the other, without the waits of the plan.
        self.synchronize()?;
        let index = self.current.ok_or_else(no_graph)?;
        let Loaded {
            plan,
            bound: Some(bound),
            ..
        } = &mut self.loaded[index]
        else {
            return Err(no_graph());
        };
        let cuts = watch::cuts(plan, wants);
        let (compiler, executor) = (&mut self.compiler, &mut self.executor);
        self.counters.prepared += bound.cut(plan, &cuts, compiler, executor, cancel)?;
        Ok(WatchedRun::new(self, cancel, cuts))
    }

    /// Goes on with a watched run.
    pub(crate) fn advance(
        &mut self,
        walk: &mut Walk,
        cancel: &CancelToken,
    ) -> Result<Option<(TensorId, TensorRef)>> {
        let was_over = walk.is_over;
        let (plan, bound, executor) = self.current()?;
        // The run that ends counts itself.
        let copy = bound.copy();
        let result = executor.advance(plan, bound, cancel, walk);
        let result = result.and_then(|seen| {
            let Some(id) = seen else { return Ok(None) };
            let place = bound.places[copy][id.index()].clone();
            let place = place
                .ok_or_else(|| Error::invalid(format!("tensor {id} has no place in memory")))?;
            Ok(Some((id, place)))
        });
        self.counters.runs += usize::from(walk.is_over && !was_over);
        result.map_err(|error| self.say_what_was_lost(error))
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// If some of it failed.
    pub fn synchronize(&mut self) -> Result<()> {
        let result = self.executor.synchronize();
        let current = self.current.map(|index| &mut self.loaded[index]);
        if let Some(bound) = current.and_then(|loaded| loaded.bound.as_mut()) {
            bound.in_flight = 0;
        }
        result.map_err(|error| self.say_what_was_lost(error))
    }

    /// Names of the stored tensors of known graphs that lie in memory which only device number `device` can use.
    fn stored_only_on(&self, device: usize) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for loaded in &self.loaded {
            let stored = loaded.plan.graph.tensors().iter();
            for tensor in stored.filter_map(|tensor| tensor.stored.as_ref()) {
                let can_use = |device| self.devices.can_use(device, tensor);
                let only_here = can_use(device)
                    && (0..self.devices.len()).all(|other| other == device || !can_use(other));
                if only_here && !names.iter().any(|name| name == tensor.name()) {
                    names.push(tensor.name().to_owned());
                }
            }
        }
        names
    }

    /// Adds to [`Error::DeviceLost`] what must be loaded again.
    fn say_what_was_lost(&self, error: Error) -> Error {
        let Error::DeviceLost { device, message } = &error else {
            return error;
        };
        let number = self.devices.position(device);
        let names = number.map_or_else(Vec::new, |number| self.stored_only_on(number));
        let Some((first, others)) = names.split_first() else {
            return error;
        };
        let others = match others.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        Error::DeviceLost {
            device: device.clone(),
            message: format!("{message}; what lay there must be loaded again: '{first}'{others}")
                .into(),
        }
    }

    /// Goes on without a device, which may be lost: all plans and buffers are given up. Returns the names of stored tensors that no other device can
    /// use where they are: they must be loaded again before graphs with them can be.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such device, or no other one. Then nothing changed.
    pub fn remove_device(&mut self, name: &str) -> Result<Vec<String>> {
        let number = self.devices.position(name).ok_or_else(|| {
            Error::invalid(format!(
                "there is no device '{name}'; there are {}",
                self.devices.names()
            ))
        })?;
        let others = self.devices.iter().filter(|device| device.name() != name);
        let devices = DeviceSet::new(others.cloned().collect())?;
        let lost = self.stored_only_on(number);
        self.executor.drain();
        self.loaded.clear();
        self.current = None;
        self.warned.clear();
        self.compiler.clear();
        self.chunks = Chunks::new(devices.memories().len());
        // The streams of the others stay: one of them may be lost as well, and could not open new ones.
        self.executor.remove_device(number);
        self.devices = devices;
        Ok(lost)
    }

    /// Starts to record what runs when. Costs a little per node.
    pub fn start_trace(&mut self) {
        self.executor.trace = Some(Trace::new(Arc::clone(&self.options.environment.clock)));
    }

    /// The recording, if one was started.
    pub fn trace(&self) -> Option<&Trace> {
        self.executor.trace.as_ref()
    }

    /// Ends the recording and returns it, if one was started.
    pub fn finish_trace(&mut self) -> Option<Trace> {
        self.executor.trace.take()
    }
}

fn no_graph() -> Error {
    Error::invalid("no graph is loaded")
}
