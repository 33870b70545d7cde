//! The scheduler: caches plans and memory, and runs graphs.

use crate::bound::Bound;
use crate::buffer_pool::BufferPool;
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

/// Counters of a scheduler's work, to check that it does nothing twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Plans created.
    pub plans: usize,
    /// Buffers allocated.
    pub buffers: usize,
    /// New compilations by devices.
    pub compiled: usize,
    /// Splits bound to memory.
    pub prepared: usize,
    /// Runs.
    pub runs: usize,
}

/// Runs graphs over several devices.
///
/// [`load`](Scheduler::load) a graph, [`write`](Scheduler::write) its inputs,
/// [`run`](Scheduler::run) it, [`read`](Scheduler::read) its outputs. Loading a graph of a known
/// topology neither plans nor allocates.
///
/// ```
/// use samite_core::{CancelToken, DType, Graph};
/// use samite_sched::Scheduler;
/// # let device = samite_reference::ReferenceDevice::new(Default::default());
///
/// let mut graph = Graph::new();
/// let x = graph.input("x", DType::F32, [1, 1, 1, 1])?;
/// let doubled = graph.scale(x, 2.0)?;
/// graph.set_output(doubled);
///
/// let mut scheduler = Scheduler::new(vec![device], Default::default())?;
/// scheduler.load(&graph)?;
/// scheduler.write(x, 0, &4.0f32.to_le_bytes())?;
/// scheduler.run(&CancelToken::new())?;
/// let mut bytes = [0; 4];
/// scheduler.read(doubled, 0, &mut bytes)?;
/// assert_eq!(f32::from_le_bytes(bytes), 8.0);
/// println!("{}", scheduler.current_plan()?);
/// # Ok::<_, samite_core::Error>(())
/// ```
pub struct Scheduler {
    // First, so that it is dropped first: it waits for work that uses the memory of the other
    // fields.
    executor: Executor,
    devices: DeviceSet,
    options: Options,
    buffer_pool: BufferPool,
    compiler: Compiler,
    loaded: Vec<CachedPlan>,
    /// Position in `loaded` of the current graph.
    current: Option<usize>,
    clock: usize,
    counters: Counters,
    /// Fallbacks that were reported: device, operation, reason.
    warned: BTreeSet<(usize, &'static str, String)>,
}

/// A cached plan.
struct CachedPlan {
    plan: Arc<Plan>,
    last_use: usize,
    /// The plan bound to memory, or `None` while the memory is too small.
    bound: Option<Bound>,
}

impl Scheduler {
    /// Creates a scheduler over `devices`, in order of preference. Inputs start on the last one,
    /// usually the CPU.
    ///
    /// # Errors
    /// If there are no devices, a name appears twice, or a device cannot open a stream.
    pub fn new(devices: Vec<Arc<dyn Device>>, options: Options) -> Result<Self> {
        let devices = DeviceSet::new(devices)?;
        Ok(Scheduler {
            executor: Executor::new(&devices)?,
            buffer_pool: BufferPool::new(devices.memories().len()),
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

    /// Returns the devices, in order of preference.
    pub fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// Returns the options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the counters so far.
    pub fn counters(&self) -> Counters {
        Counters {
            compiled: self.compiler.compiled,
            ..self.counters
        }
    }

    /// Plans `graph` without allocating, for sizes and explanations.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(&self, graph: &Graph, assignments: &Assignments) -> Result<Plan> {
        Plan::new(graph, &self.devices, assignments, &self.options)
    }

    /// Plans `graph` for execution.
    fn new_plan(&mut self, graph: &Graph, assignments: &Assignments) -> Result<Plan> {
        let plan = self.plan(graph, assignments)?;
        self.counters.plans += 1;
        tracing::debug!("plan {}:\n{}", self.counters.plans, plan.nodes());
        self.warn_of_fallbacks(&plan);
        Ok(plan)
    }

    /// Reports operations that run on a slower device, once per kind.
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

    /// Allocates the memory for `graph`, so that loading it or a smaller graph does not allocate.
    /// If memory had to grow, no graph is loaded afterwards.
    ///
    /// # Errors
    /// As [`load`](Scheduler::load).
    pub fn reserve(&mut self, graph: &Graph, assignments: &Assignments) -> Result<()> {
        let plan = self.new_plan(graph, assignments)?;
        self.grow(&plan)
    }

    /// Returns the allocated bytes by memory type: `(name, bytes)`.
    pub fn buffer_sizes(&self) -> Vec<(String, usize)> {
        let memories = self.devices.memories().iter();
        memories
            .map(|memory| memory.name().to_owned())
            .zip(self.buffer_pool.sizes())
            .collect()
    }

    /// Makes `graph` the current one: finds or creates its plan, allocates missing memory, lets
    /// devices compile the splits.
    ///
    /// # Errors
    /// If the graph cannot be placed, or a device has too little memory. Then the graph loaded
    /// before is no longer loaded.
    pub fn load(&mut self, graph: &Graph) -> Result<()> {
        self.load_with(graph, Assignments::NONE, &CancelToken::new())
    }

    /// Does what [`load`](Scheduler::load) does, with devices assigned to some tensors, and a token
    /// that cancels compilation.
    ///
    /// # Errors
    /// As [`load`](Scheduler::load), and [`Error::Cancelled`].
    pub fn load_with(
        &mut self,
        graph: &Graph,
        assignments: &Assignments,
        cancel: &CancelToken,
    ) -> Result<()> {
        let fits = |loaded: &CachedPlan| loaded.plan.fits(graph, assignments);
        let mut known = self.loaded.iter().position(fits);
        if known.is_none() || known != self.current {
            self.synchronize()?;
        }
        if let Some(index) = known
            && self.options.environment.buggify.fires("plan-again")
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
                self.loaded.push(CachedPlan {
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

    /// Removes a graph's plan from the cache, for callers that know which graphs are not used
    /// again.
    ///
    /// # Errors
    /// If work that was still in flight failed.
    pub fn unload(&mut self, graph: &Graph, assignments: &Assignments) -> Result<()> {
        let fits = |loaded: &CachedPlan| loaded.plan.fits(graph, assignments);
        let Some(index) = self.loaded.iter().position(fits) else {
            return Ok(());
        };
        let result = self.synchronize();
        self.forget(index);
        result
    }

    /// Drops an idle plan.
    fn forget(&mut self, index: usize) {
        self.loaded.swap_remove(index);
        let moved = self.loaded.len();
        self.current = match self.current {
            Some(current) if current == index => None,
            Some(current) if current == moved => Some(index),
            current => current,
        };
    }

    /// Evicts the least recently used plan if the cache is full.
    fn make_room(&mut self) {
        let buggify = Arc::clone(&self.options.environment.buggify);
        while self.loaded.len() >= self.options.cached_plans.max(1)
            || !self.loaded.is_empty() && buggify.fires("forget-plan")
        {
            let oldest = (0..self.loaded.len()).min_by_key(|&index| self.loaded[index].last_use);
            self.forget(oldest.unwrap_or(0));
        }
    }

    /// Grows every chunk to the size that `plan` needs.
    fn grow(&mut self, plan: &Plan) -> Result<()> {
        let missing = self.buffer_pool.missing(&plan.memory);
        if missing.is_empty() {
            return Ok(());
        }
        // First waits for all work in the old buffers and frees them.
        self.synchronize()?;
        self.current = None;
        self.loaded
            .iter_mut()
            .for_each(|loaded| loaded.bound = None);
        self.counters.buffers += missing.len();
        self.buffer_pool.allocate(missing, &self.devices)
    }

    fn bind(&mut self, index: usize, cancel: &CancelToken) -> Result<()> {
        let plan = Arc::clone(&self.loaded[index].plan);
        self.grow(&plan)?;
        let bound = Bound::new(
            &plan,
            &self.buffer_pool,
            &mut self.compiler,
            &mut self.executor,
            cancel,
        )?;
        self.counters.prepared += plan.copies * plan.lowered.splits.len();
        self.loaded[index].bound = Some(bound);
        Ok(())
    }

    /// Returns the current plan, with its memory and the executor.
    fn current(&mut self) -> Result<(&Arc<Plan>, &mut Bound, &mut Executor)> {
        let loaded = self
            .current
            .map(|index| &mut self.loaded[index])
            .and_then(|loaded| Some((&loaded.plan, loaded.bound.as_mut()?)));
        let (plan, bound) = loaded.ok_or_else(no_graph)?;
        Ok((plan, bound, &mut self.executor))
    }

    /// Returns the plan of the loaded graph.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no graph is loaded.
    pub fn current_plan(&self) -> Result<&Plan> {
        let index = self.current.ok_or_else(no_graph)?;
        Ok(&self.loaded[index].plan)
    }

    /// Writes bytes of an input of the loaded graph, for the next run. Inputs keep their values
    /// across runs only without pipeline copies. For stored tensors, call
    /// [`synchronize`](Scheduler::synchronize) and write to them
    /// [directly](samite_core::TensorRef::write).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `id` is not an input of the graph, or the range does not
    /// exist. Otherwise the failure of an earlier run. Then nothing is in flight.
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
        // The plan treats this as host work, so everything issued later sees it without a wait.
        place.write(offset, data)
    }

    /// Reads bytes of an output or input of the loaded graph, with the values after the last run.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `id` keeps no value, or the range does not exist. Otherwise
    /// the failure of the run. Then nothing is in flight.
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
            .try_for_each(|&device| {
                if lane == Lane::Device(device) {
                    Ok(())
                } else {
                    executor.stream(device).synchronize()
                }
            })
            .and_then(|()| match lane.device() {
                None => place.read(offset, out),
                Some(device) => executor.stream(device).read(place, offset, out),
            });
        if result.is_err() {
            // Other streams may have failed with this one. They would report it later, as if new
            // work had failed.
            executor.give_up(bound);
        }
        result.map_err(|error| self.say_what_was_lost(error))
    }

    /// Runs the loaded graph. On asynchronous devices, work may continue after the call.
    /// [`read`](Scheduler::read) and [`synchronize`](Scheduler::synchronize) wait for it.
    ///
    /// # Errors
    /// [`Error::Cancelled`], or the device's error. The scheduler stays usable. After
    /// [`Error::DeviceLost`], it does so once it continues [without that
    /// device](Scheduler::remove_device).
    pub fn run(&mut self, cancel: &CancelToken) -> Result<()> {
        let (plan, bound, executor) = self.current()?;
        let result = executor.run(plan, bound, cancel);
        self.counters.runs += 1;
        result.map_err(|error| self.say_what_was_lost(error))
    }

    /// Limits devices that compute on the host to this number of threads from the next run on.
    /// `None` removes the limit. Does not change results.
    pub fn set_threads(&mut self, threads: Option<usize>) {
        self.executor.set_threads(threads);
    }

    /// Runs the loaded graph node by node. Calls `see` with the value of each node that `wants`
    /// selects, right after its computation. `see` can stop the run. See
    /// [`watch`](Scheduler::watch).
    ///
    /// # Errors
    /// As [`run`](Scheduler::run). [`Error::Stopped`] if `see` stops the run.
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

    /// Starts a run of the loaded graph that stops at each node that `wants` selects. The nodes
    /// between them run together, if adjacent. `wants` is called before the run, for computed
    /// nodes, and for views of their results, which are shown right after them. Devices do not
    /// compile again if the run is watched like the previous one.
    ///
    /// # Errors
    /// If no graph is loaded, if a device cannot run a part of a split that it can run as a whole,
    /// or if an earlier run failed.
    pub fn watch<'s>(
        &'s mut self,
        cancel: &'s CancelToken,
        wants: impl FnMut(TensorId) -> bool,
    ) -> Result<WatchedRun<'s>> {
        // Actions run one after the other, without the waits of the plan.
        self.synchronize()?;
        let index = self.current.ok_or_else(no_graph)?;
        let CachedPlan {
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

    /// Continues a watched run.
    pub(crate) fn advance(
        &mut self,
        walk: &mut Walk,
        cancel: &CancelToken,
    ) -> Result<Option<(TensorId, TensorRef)>> {
        let was_over = walk.is_over;
        let (plan, bound, executor) = self.current()?;
        // A run that ends increments the run counter.
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

    /// Returns the names of the stored tensors of cached graphs in memory that only device number
    /// `device` can use.
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

    /// Adds to [`Error::DeviceLost`] the tensors that must be loaded again.
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

    /// Removes a device, which may be lost. Drops all plans and buffers. Returns the names of
    /// stored tensors that no other device can use in place. They must be loaded again before
    /// graphs that use them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the device does not exist or is the only one. Then nothing
    /// changes.
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
        self.buffer_pool = BufferPool::new(devices.memories().len());
        // The other streams stay open: another device may also be lost, and could not open new
        // ones.
        self.executor.remove_device(number);
        self.devices = devices;
        Ok(lost)
    }

    /// Starts recording a trace. Costs a little time per node.
    pub fn start_trace(&mut self) {
        self.executor.trace = Some(Trace::new(Arc::clone(&self.options.environment.clock)));
    }

    /// Returns the trace, if one was started.
    pub fn trace(&self) -> Option<&Trace> {
        self.executor.trace.as_ref()
    }

    /// Ends the trace and returns it, if one was started.
    pub fn finish_trace(&mut self) -> Option<Trace> {
        self.executor.trace.take()
    }
}

fn no_graph() -> Error {
    Error::invalid("no graph is loaded")
}
