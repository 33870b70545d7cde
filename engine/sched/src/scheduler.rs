//! Running plans: buffers, streams, events, and the loop over actions.

use crate::devices::DeviceSet;
use crate::options::{Assignments, Options};
use crate::order::{Lane, Wait, Work};
use crate::plan::Plan;
use crate::split::Copy;
use crate::trace::Trace;
use samite_core::{
    Bounce, Buffer, CancelToken, Device, Error, Event, Graph, Layout, Placed, Prepared, Result,
    RunControl, RunObserver, Slot, Stream, TensorId, TensorRef, Usage,
};
use std::sync::Arc;
use std::time::Instant;

/// Counts what a scheduler did, to see that nothing is done twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Plans made.
    pub plans: usize,
    /// Buffers allocated.
    pub buffers: usize,
    /// Splits compiled by devices.
    pub prepared: usize,
    /// Runs.
    pub runs: usize,
}

/// What a watcher of nodes wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Go on.
    Continue,
    /// Stop the run with [`Error::Cancelled`].
    Stop,
}

/// Runs graphs over several devices.
///
/// [`load`](Scheduler::load) a graph, [`write`](Scheduler::write) its inputs, [`run`](Scheduler::run),
/// [`read`](Scheduler::read) its outputs. Loading a graph of a known topology plans and allocates nothing.
pub struct Scheduler {
    devices: DeviceSet,
    options: Options,
    streams: Vec<Box<dyn Stream>>,
    /// Memory by kind and chunk; `None` for chunks that a failed allocation left without memory.
    buffers: Vec<Vec<Option<Arc<dyn Buffer>>>>,
    /// Counts changes of `buffers`, so that plans notice.
    generation: usize,
    loaded: Vec<Loaded>,
    /// Position in `loaded` of the graph that runs.
    current: Option<usize>,
    clock: usize,
    counters: Counters,
    detour: Detour,
    trace: Option<Trace>,
}

/// Copies that no device makes, by way of the host. Its memory is as large as any of the loaded plans needs.
#[derive(Default)]
struct Detour {
    bounce: Bounce,
    /// Which experts are in use.
    used: Vec<bool>,
}

/// A plan with everything that is needed to run it.
struct Loaded {
    plan: Plan,
    last_use: usize,
    /// Generation of the buffers that the places refer to.
    generation: Option<usize>,
    /// By pipeline copy, then tensor of the lowered graph.
    places: Vec<Vec<Option<TensorRef>>>,
    /// Scratch memory by split.
    workspaces: Vec<Option<TensorRef>>,
    /// By pipeline copy, then split.
    prepared: Vec<Vec<Option<Box<dyn Prepared>>>>,
    /// By action, then pipeline copy; only where somebody waits and the device has events.
    events: Vec<Vec<Option<Arc<dyn Event>>>>,
    /// Runs so far.
    runs: usize,
    /// Whether the inputs of the next run may be written.
    inputs_free: bool,
}

impl Loaded {
    fn copy(&self) -> usize {
        self.runs % self.plan.copies
    }
}

impl Scheduler {
    /// A scheduler over `devices`, most wanted first; inputs start on the last one, usually the CPU.
    ///
    /// # Errors
    /// If there is no device, a name appears twice, or a device cannot open a stream.
    pub fn new(devices: Vec<Arc<dyn Device>>, options: Options) -> Result<Self> {
        let devices = DeviceSet::new(devices)?;
        let streams = devices
            .iter()
            .map(|device| Arc::clone(device).open_stream())
            .collect::<Result<_>>()?;
        Ok(Scheduler {
            buffers: vec![Vec::new(); devices.memories().len()],
            devices,
            options,
            streams,
            generation: 0,
            loaded: Vec::new(),
            current: None,
            clock: 0,
            counters: Counters::default(),
            detour: Detour::default(),
            trace: None,
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
        self.counters
    }

    /// Plans `graph` without allocating anything: for sizes and explanations.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(&self, graph: &Graph, assignments: &Assignments) -> Result<Plan> {
        Plan::new(graph, &self.devices, assignments, &self.options)
    }

    /// Allocates the memory that `graph` needs, so that loading it, or anything smaller, does not have to. If something
    /// had to grow, no graph is loaded afterwards.
    ///
    /// # Errors
    /// As [`load`](Scheduler::load).
    pub fn reserve(&mut self, graph: &Graph, assignments: &Assignments) -> Result<()> {
        let plan = self.plan(graph, assignments)?;
        self.counters.plans += 1;
        self.grow(&plan)
    }

    /// Bytes allocated, by kind of memory: `(name, bytes)`.
    pub fn buffer_sizes(&self) -> Vec<(String, usize)> {
        let size = |chunks: &Vec<Option<Arc<dyn Buffer>>>| {
            chunks.iter().flatten().map(|buffer| buffer.size()).sum()
        };
        let names = self
            .devices
            .memories()
            .iter()
            .map(|memory| memory.name().to_owned());
        names.zip(self.buffers.iter().map(size)).collect()
    }

    /// Makes `graph` the one that runs: finds its plan or makes one, allocates what is missing, compiles the splits.
    ///
    /// # Errors
    /// If the graph cannot be placed, or a device has not enough memory. The graph loaded before is no longer loaded then.
    pub fn load(&mut self, graph: &Graph) -> Result<()> {
        self.load_with(graph, Assignments::NONE)
    }

    /// [`load`](Scheduler::load) with devices chosen for some tensors.
    ///
    /// # Errors
    /// As [`load`](Scheduler::load).
    pub fn load_with(&mut self, graph: &Graph, assignments: &Assignments) -> Result<()> {
        let known = self
            .loaded
            .iter()
            .position(|loaded| loaded.plan.fits(graph, assignments));
        if known.is_none() || known != self.current {
            self.synchronize()?;
        }
        self.current = None;
        let index = match known {
            Some(index) => index,
            None => {
                let plan = self.plan(graph, assignments)?;
                self.counters.plans += 1;
                self.make_room();
                self.loaded.push(Loaded {
                    plan,
                    last_use: 0,
                    generation: None,
                    places: Vec::new(),
                    workspaces: Vec::new(),
                    prepared: Vec::new(),
                    events: Vec::new(),
                    runs: 0,
                    inputs_free: true,
                });
                self.loaded.len() - 1
            }
        };
        self.clock += 1;
        self.loaded[index].last_use = self.clock;
        if self.loaded[index].generation != Some(self.generation)
            && let Err(error) = self.make_ready(index)
        {
            self.loaded.swap_remove(index);
            return Err(error);
        }
        self.current = Some(index);
        Ok(())
    }

    /// Forgets the oldest plan if there are too many.
    fn make_room(&mut self) {
        while self.loaded.len() >= self.options.cached_plans.max(1) {
            let oldest = self
                .loaded
                .iter()
                .enumerate()
                .min_by_key(|(_, loaded)| loaded.last_use)
                .map(|(i, _)| i);
            self.loaded.swap_remove(oldest.unwrap_or(0));
        }
    }

    /// Makes every buffer at least as large as `plan` needs.
    fn grow(&mut self, plan: &Plan) -> Result<()> {
        for (memory, sizes) in plan.memory.chunks.iter().enumerate() {
            for (chunk, &size) in sizes.iter().enumerate() {
                if self.buffers[memory].len() <= chunk {
                    self.buffers[memory].resize_with(chunk + 1, || None);
                }
                if self.buffers[memory][chunk]
                    .as_ref()
                    .is_some_and(|buffer| buffer.size() >= size)
                {
                    continue;
                }
                // Everything that uses the old buffer is finished and let go first, so that both need not fit.
                self.synchronize()?;
                self.generation += 1;
                self.current = None;
                for loaded in &mut self.loaded {
                    loaded.places.clear();
                    loaded.workspaces.clear();
                    loaded.prepared.clear();
                    loaded.generation = None;
                }
                self.buffers[memory][chunk] = None;
                let owner = (0..self.devices.len())
                    .find(|&device| self.devices.memory_of(device) == memory);
                if let Some(owner) = owner {
                    self.devices
                        .get(owner)
                        .check_free(size, "intermediate results")?;
                }
                let buffer = self.devices.memories()[memory].allocate(size, Usage::Compute)?;
                self.counters.buffers += 1;
                self.buffers[memory][chunk] = Some(buffer);
            }
        }
        Ok(())
    }

    fn make_ready(&mut self, index: usize) -> Result<()> {
        // `grow` needs the plan while it changes everything else.
        let mut loaded = self.loaded.swap_remove(index);
        let result = self
            .grow(&loaded.plan)
            .and_then(|()| self.bind(&mut loaded));
        self.loaded.push(loaded);
        let last = self.loaded.len() - 1;
        self.loaded.swap(index, last);
        result
    }

    /// Gives every tensor of a plan its place, compiles the splits and creates the events.
    fn bind(&mut self, loaded: &mut Loaded) -> Result<()> {
        let plan = &loaded.plan;
        let graph = &plan.lowered.graph;
        loaded.places = (0..plan.copies)
            .map(|copy| {
                graph
                    .ids()
                    .map(|id| self.place(plan, id, copy))
                    .collect::<Result<Vec<_>>>()
            })
            .collect::<Result<_>>()?;
        for action in &plan.actions {
            if let (Work::Copy(number), None) = (action.work, action.copier) {
                let copy = &plan.lowered.copies[number];
                self.detour.reserve(copy, graph, &loaded.places[0])?;
            }
        }
        loaded.workspaces = (0..plan.lowered.splits.len())
            .map(|split| self.workspace(plan, split))
            .collect::<Result<_>>()?;
        loaded.prepared = Vec::with_capacity(plan.copies);
        for places in &loaded.places {
            let mut prepared = Vec::with_capacity(plan.lowered.splits.len());
            for (number, split) in plan.lowered.splits.iter().enumerate() {
                let work = Placed {
                    graph,
                    nodes: &split.nodes,
                    places,
                    workspace: loaded.workspaces[number].as_ref(),
                };
                prepared.push(Some(self.streams[split.device].prepare(work)?));
                self.counters.prepared += 1;
            }
            loaded.prepared.push(prepared);
        }
        loaded.events = plan
            .actions
            .iter()
            .map(|action| {
                (0..plan.copies)
                    .map(|_| match action.lane {
                        Lane::Device(device) if action.is_awaited => {
                            let device = self.devices.get(device);
                            device
                                .capabilities()
                                .events
                                .then(|| device.create_event())
                                .transpose()
                        }
                        _ => Ok(None),
                    })
                    .collect::<Result<_>>()
            })
            .collect::<Result<_>>()?;
        loaded.generation = Some(self.generation);
        loaded.runs = 0;
        loaded.inputs_free = true;
        Ok(())
    }

    fn block(
        &self,
        blocks: &crate::layout::Blocks,
        copy: usize,
        layout: Layout,
    ) -> Result<TensorRef> {
        let block = blocks.get(copy);
        let buffer = self.buffers[blocks.memory]
            .get(block.chunk)
            .and_then(Option::as_ref)
            .ok_or_else(|| Error::invalid("a planned buffer is missing"))?;
        let slot = Slot {
            offset: block.offset,
            layout,
        };
        buffer.init_tensor(slot)?;
        Ok(TensorRef {
            buffer: Arc::clone(buffer),
            slot,
        })
    }

    fn place(&self, plan: &Plan, id: TensorId, copy: usize) -> Result<Option<TensorRef>> {
        let graph = &plan.lowered.graph;
        let tensor = graph.tensor(id);
        let base = graph.memory_of(id);
        let owner = match (
            &graph.tensor(base).stored,
            plan.memory.tensors[base.index()].as_ref(),
        ) {
            (Some(stored), _) => stored.tensor().clone(),
            (None, Some(blocks)) => self.block(blocks, copy, graph.tensor(base).layout)?,
            (None, None) => return Ok(None),
        };
        let offset = owner.slot.offset + tensor.view.map_or(0, |view| view.offset);
        Ok(Some(TensorRef {
            buffer: owner.buffer,
            slot: Slot {
                offset,
                layout: tensor.layout,
            },
        }))
    }

    fn workspace(&self, plan: &Plan, split: usize) -> Result<Option<TensorRef>> {
        let Some(blocks) = &plan.memory.workspaces[split] else {
            return Ok(None);
        };
        let bytes = Layout::contiguous(samite_core::DType::I8, [blocks.get(0).size, 1, 1, 1])?;
        self.block(blocks, 0, bytes).map(Some)
    }

    /// The position of the loaded graph.
    fn current_index(&self) -> Result<usize> {
        self.current
            .ok_or_else(|| Error::invalid("no graph is loaded"))
    }

    /// The plan of the loaded graph.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no graph is loaded.
    pub fn current_plan(&self) -> Result<&Plan> {
        Ok(&self.loaded[self.current_index()?].plan)
    }

    /// Writes bytes of an input of the loaded graph, for the next run. Inputs keep their values from run to run only
    /// without pipeline copies. Stored tensors are written to [directly](samite_core::TensorRef::write), after
    /// [`synchronize`](Scheduler::synchronize).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `id` is not an input of the graph, or the range does not exist.
    pub fn write(&mut self, id: TensorId, offset: usize, data: &[u8]) -> Result<()> {
        let index = self.current_index()?;
        let loaded = &mut self.loaded[index];
        let tensor = loaded.plan.graph.tensors().get(id.index());
        if !tensor.is_some_and(|tensor| tensor.flags.input) {
            return Err(Error::invalid(format!(
                "tensor {id} is not an input of the loaded graph"
            )));
        }
        if !loaded.live(id) {
            return Ok(()); // nothing depends on it
        }
        if !loaded.inputs_free {
            for wait in loaded.plan.actions[0].waits.iter() {
                wait_on_host(loaded, &mut self.streams, *wait)?;
            }
            loaded.inputs_free = true;
        }
        let place = loaded.places[loaded.copy()][id.index()].as_ref();
        let place =
            place.ok_or_else(|| Error::invalid(format!("input {id} has no place in memory")))?;
        // The plan counts this as work of the host: whatever is issued later sees it without a wait.
        place.write(offset, data)
    }

    /// Reads bytes of an output or input of the loaded graph, as the last run left them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `id` keeps no value, or the range does not exist; or what failed in the run.
    pub fn read(&mut self, id: TensorId, offset: usize, out: &mut [u8]) -> Result<()> {
        let index = self.current_index()?;
        let loaded = &self.loaded[index];
        let graph = &loaded.plan.graph;
        let keeps = |id: TensorId| {
            let tensor = graph.tensor(id);
            tensor.flags.output
                || tensor.flags.input
                || tensor.stored.is_some()
                || matches!(tensor.op, samite_core::Op::Leaf)
        };
        if id.index() >= graph.len() || !(keeps(id) || keeps(graph.memory_of(id))) {
            return Err(Error::invalid(format!(
                "tensor {id} keeps no value after a run: declare it with set_output"
            )));
        }
        let copy = (loaded.runs + loaded.plan.copies - 1) % loaded.plan.copies;
        let place = loaded.places[copy][id.index()].as_ref();
        let place = place.ok_or_else(|| {
            Error::invalid(format!("tensor {id} was not computed: nothing needs it"))
        })?;
        let lane = loaded.plan.lane(id);
        for &device in loaded.plan.writers(id) {
            if lane != Lane::Device(device) {
                self.streams[device].synchronize()?;
            }
        }
        match lane {
            Lane::Host => place.read(offset, out),
            Lane::Device(device) => self.streams[device].read(place, offset, out),
        }
    }

    /// Runs the loaded graph. On asynchronous devices, work may go on after the return;
    /// [`read`](Scheduler::read) and [`synchronize`](Scheduler::synchronize) wait for it.
    ///
    /// # Errors
    /// [`Error::Cancelled`], or what a device says. The scheduler stays usable, except after
    /// [`Error::DeviceLost`].
    pub fn run(&mut self, cancel: &CancelToken) -> Result<()> {
        let result = self.issue(cancel);
        if result.is_err() {
            // Nothing is left in flight that could hurt the next run; the first error is the one to report.
            self.drain();
        }
        result
    }

    fn issue(&mut self, cancel: &CancelToken) -> Result<()> {
        let index = self.current_index()?;
        let loaded = &mut self.loaded[index];
        self.counters.runs += 1;
        let copy = loaded.copy();
        for number in 0..loaded.plan.actions.len() {
            cancel.check()?;
            let (work, lane, copier) = {
                let action = &loaded.plan.actions[number];
                (action.work, action.lane, action.copier)
            };
            for at in 0..loaded.plan.actions[number].waits.len() {
                let wait = loaded.plan.actions[number].waits[at];
                let start = self.trace.is_some().then(Instant::now);
                match lane {
                    Lane::Host => wait_on_host(loaded, &mut self.streams, wait)?,
                    Lane::Device(device) => match loaded.event(wait) {
                        Some(event) => self.streams[device].wait(&**event)?,
                        None => wait_on_host(loaded, &mut self.streams, wait)?,
                    },
                }
                if let (Some(trace), Some(start)) = (&self.trace, start) {
                    trace.wait(lane, wait, start);
                }
            }
            let start = self.trace.is_some().then(Instant::now);
            match work {
                Work::Inputs => {}
                Work::Copy(number) => {
                    let c = &loaded.plan.lowered.copies[number];
                    let places = &loaded.places[copy];
                    let (Some(from), Some(to)) = (&places[c.from.index()], &places[c.to.index()])
                    else {
                        return Err(Error::invalid(format!(
                            "copy of {} has no place in memory",
                            c.from
                        )));
                    };
                    match copier {
                        Some(device) => self.streams[device].copy(from, to)?,
                        None => match c.experts.and_then(|ids| places[ids.index()].as_ref()) {
                            Some(ids) => self.detour.copy_experts(from, to, ids)?,
                            None => to.copy_with(from, &mut self.detour.bounce)?,
                        },
                    }
                    if let (Some(trace), Some(start)) = (&self.trace, start) {
                        trace.copy(&loaded.plan, c, lane, start);
                    }
                }
                Work::Split(number) => {
                    let device = loaded.plan.lowered.splits[number].device;
                    let prepared = loaded.prepared[copy][number].as_mut();
                    let prepared =
                        prepared.ok_or_else(|| Error::invalid("a split is not compiled"))?;
                    let observer = self
                        .trace
                        .as_ref()
                        .map(|trace| trace.observer(&loaded.plan, device));
                    let observer = observer
                        .as_ref()
                        .map(|observer| observer as &dyn RunObserver);
                    self.streams[device].run(&mut **prepared, RunControl { cancel, observer })?;
                    if let (Some(trace), Some(start)) = (&self.trace, start) {
                        trace.split(&loaded.plan, number, start);
                    }
                }
            }
            if let (Lane::Device(device), Some(event)) = (lane, &loaded.events[number][copy]) {
                self.streams[device].record(&**event)?;
            }
        }
        loaded.runs += 1;
        loaded.inputs_free = false;
        Ok(())
    }

    /// Runs the loaded graph node by node. For each node that `wants` to be seen, `see` gets its value right after it
    /// was computed and can stop the run.
    ///
    /// # Errors
    /// As [`run`](Scheduler::run); [`Error::Cancelled`] if `see` says stop.
    pub fn run_watched(
        &mut self,
        cancel: &CancelToken,
        mut wants: impl FnMut(TensorId) -> bool,
        mut see: impl FnMut(TensorId, &TensorRef) -> Result<Watch>,
    ) -> Result<()> {
        self.synchronize()?;
        let index = self.current_index()?;
        let loaded = &mut self.loaded[index];
        self.counters.runs += 1;
        let copy = loaded.copy();
        let places = &loaded.places[copy];
        let plan = &loaded.plan;
        let graph = &plan.lowered.graph;
        for (number, split) in plan.lowered.splits.iter().enumerate() {
            for &c in &split.copies {
                let c = &plan.lowered.copies[c];
                if let (Some(from), Some(to)) = (&places[c.from.index()], &places[c.to.index()]) {
                    to.copy_from(from)?;
                }
            }
            let workspace = loaded.workspaces[number].as_ref();
            // Nodes up to the next one that is wanted run together.
            let mut rest = &split.nodes[..];
            while !rest.is_empty() {
                let wanted = rest.iter().position(|&id| wants(id));
                let (now, later) = rest.split_at(wanted.map_or(rest.len(), |at| at + 1));
                rest = later;
                let work = Placed {
                    graph,
                    nodes: now,
                    places,
                    workspace,
                };
                let stream = &mut self.streams[split.device];
                let mut prepared = stream.prepare(work)?;
                stream.run(
                    &mut *prepared,
                    RunControl {
                        cancel,
                        observer: None,
                    },
                )?;
                stream.synchronize()?;
                if let (Some(_), Some(&id)) = (wanted, now.last()) {
                    let place = places[id.index()].as_ref();
                    let place = place.ok_or_else(|| {
                        Error::invalid(format!("tensor {id} has no place in memory"))
                    })?;
                    if see(id, place)? == Watch::Stop {
                        return Err(Error::Cancelled);
                    }
                }
            }
        }
        loaded.runs += 1;
        loaded.inputs_free = true;
        Ok(())
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// If some of it failed.
    pub fn synchronize(&mut self) -> Result<()> {
        let mut first = Ok(());
        for stream in &mut self.streams {
            first = first.and(stream.synchronize());
        }
        first
    }

    fn drain(&mut self) {
        for stream in &mut self.streams {
            if let Err(error) = stream.synchronize() {
                tracing::debug!(%error, "while draining after a failed run");
            }
        }
    }

    /// Forgets all plans. Buffers are kept.
    ///
    /// # Errors
    /// If work that was still running failed.
    pub fn reset(&mut self) -> Result<()> {
        let result = self.synchronize();
        self.loaded.clear();
        self.current = None;
        result
    }

    /// Starts to record what runs when. Costs a little per node.
    pub fn start_trace(&mut self) {
        self.trace = Some(Trace::new());
    }

    /// Ends the recording and returns it, if one was started.
    pub fn finish_trace(&mut self) -> Option<Trace> {
        self.trace.take()
    }
}

impl Drop for Scheduler {
    /// Nothing may be running in memory that is given back.
    fn drop(&mut self) {
        self.drain();
    }
}

impl Loaded {
    fn live(&self, id: TensorId) -> bool {
        self.plan.live[id.index()]
    }

    fn event(&self, wait: Wait) -> Option<&Arc<dyn Event>> {
        let copies = self.plan.copies;
        let slot = (self.runs + copies * (wait.runs_ago / copies + 1) - wait.runs_ago) % copies;
        self.events[wait.action][slot].as_ref()
    }
}

/// Blocks until the awaited action is done: by its event, or by waiting for its whole lane.
fn wait_on_host(loaded: &Loaded, streams: &mut [Box<dyn Stream>], wait: Wait) -> Result<()> {
    match (loaded.event(wait), loaded.plan.actions[wait.action].lane) {
        (Some(event), _) => event.synchronize(),
        (None, Lane::Device(device)) => streams[device].synchronize(),
        (None, Lane::Host) => Ok(()),
    }
}

impl Detour {
    /// Makes room for `copy`, so that making it allocates nothing.
    fn reserve(&mut self, copy: &Copy, graph: &Graph, places: &[Option<TensorRef>]) -> Result<()> {
        let (Some(from), Some(to)) = (&places[copy.from.index()], &places[copy.to.index()]) else {
            return Ok(()); // running the copy says it
        };
        let Some(ids) = copy.experts else {
            return to.reserve_bounce(from, &mut self.bounce);
        };
        let experts = from.layout().shape()[2];
        let slice = from.layout().bytes() / experts.max(1);
        let row = graph.tensor(ids).layout.row_bytes();
        self.bounce.reserve(slice.max(row))?;
        let more = experts.saturating_sub(self.used.len());
        self.used
            .try_reserve_exact(more)
            .map_err(|_| Error::OutOfMemory {
                device: "host".into(),
                what: "copies of experts".into(),
                asked: experts,
                free: None,
            })?;
        self.used.resize(experts.max(self.used.len()), false);
        Ok(())
    }

    /// Copies only those experts (slices of dimension 2) of a tensor in host memory that `ids` names, neighbours
    /// together.
    fn copy_experts(&mut self, from: &TensorRef, to: &TensorRef, ids: &TensorRef) -> Result<()> {
        let experts = from.layout().shape()[2];
        let slice = from.layout().bytes() / experts.max(1);
        let used = &mut self.used[..experts];
        used.fill(false);
        let layout = *ids.layout();
        let row = self.bounce.bytes(layout.row_bytes())?;
        for r in 0..layout.rows() {
            let [i1, i2, i3] = layout.row_index(r);
            ids.read(layout.row_offset(i1, i2, i3), row)?;
            for id in row.as_chunks::<4>().0 {
                let id = i32::from_le_bytes(*id);
                // Numbers out of range are reported by the kernel, which names the node.
                if let Some(flag) = usize::try_from(id).ok().and_then(|id| used.get_mut(id)) {
                    *flag = true;
                }
            }
        }
        let memory = from
            .buffer
            .host()
            .ok_or_else(|| Error::invalid("expert weights outside of host memory"))?;
        let mut expert = 0;
        for run in used.chunk_by(|a, b| a == b) {
            let range = expert..expert + run.len();
            expert = range.end;
            if !run[0] {
                continue;
            }
            let (start, len) = (range.start * slice, run.len() * slice);
            let at = from.slot.offset + start;
            match to.buffer.host() {
                Some(target) => memory.copy_to(at, target, to.slot.offset + start, len)?,
                // As in other copies: the gate of memory that may be written to is not held while another one is waited for.
                None if !memory.is_writable() => {
                    memory.with_bytes(at, len, |data| to.write(start, data))??;
                }
                None => {
                    let bytes = self.bounce.bytes(slice)?;
                    for start in range.map(|expert| expert * slice) {
                        memory.read(from.slot.offset + start, bytes)?;
                        to.write(start, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Pieces of [`Copy`] that traces need.
pub(crate) fn copy_name(plan: &Plan, copy: &Copy) -> String {
    let tensor = plan.graph.tensor(copy.from);
    match &*tensor.name {
        "" => format!("copy {}", copy.from),
        name => format!("copy {} '{name}'", copy.from),
    }
}
