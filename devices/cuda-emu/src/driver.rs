//! The emulated driver: cards, streams, events and graphs around the interpreter.
//!
//! Streams run as late as they may: a command runs when something waits for it, so that a missing
//! wait shows as a wrong result. Cards with a seed other than 0 also run commands of other streams
//! early, at random. A fault of a kernel makes the card unusable, as on hardware.

use crate::machine::{self, Grid, Schedule};
use crate::memory::DeviceMemory;
use crate::ptx::{LoadedModule, Module};
use samite_cuda::driver::{
    Address, CardInfo, Driver, DriverContext, DriverError, DriverErrorKind, DriverResult,
    EventHandle, FunctionHandle, GraphHandle, KernelLaunch, ModuleHandle, StreamHandle,
};
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory of a card.
const CAPACITY: usize = 8 << 30;

/// Maximum shared memory that a kernel may declare. An assembler refuses more.
const MAX_STATIC_SHARED: usize = 48 << 10;

/// Compute capability and seed of each card. Cards with equal capabilities compute the same bits.
const CARDS: [(u32, u64); 4] = [(90, 0), (90, 1), (90, 2), (75, 3)];

/// A driver with emulated cards.
#[derive(Debug)]
pub struct EmulatedDriver {
    infos: Vec<CardInfo>,
    contexts: Vec<Arc<EmulatedContext>>,
}

impl Default for EmulatedDriver {
    fn default() -> Self {
        EmulatedDriver::new(CAPACITY)
    }
}

impl EmulatedDriver {
    /// Creates cards with `capacity` bytes of memory each.
    pub fn new(capacity: usize) -> Self {
        let info = |(index, &(capability, seed)): (usize, &(u32, u64))| CardInfo {
            name: format!("emulated card, seed {seed}"),
            bus_address: format!("emulated:{index}"),
            capability,
            processors: 4,
            memory: capacity,
            is_integrated: false,
        };
        let context = |&(_, seed): &(u32, u64)| Arc::new(EmulatedContext::new(capacity, seed));
        EmulatedDriver {
            infos: CARDS.iter().enumerate().map(info).collect(),
            contexts: CARDS.iter().map(context).collect(),
        }
    }

    /// Replaces a piece of text in all kernels loaded from now on, as a planted bug.
    pub fn replace(&mut self, text: &'static str, by: &'static str) {
        for context in &self.contexts {
            context.state().replaced = Some([text, by]);
        }
    }

    /// Returns a card, to inject faults into it.
    pub fn card(&self, index: usize) -> Option<&Arc<EmulatedContext>> {
        self.contexts.get(index)
    }
}

impl Driver for EmulatedDriver {
    fn description(&self) -> String {
        "emulated driver".into()
    }

    fn cards(&self) -> &[CardInfo] {
        &self.infos
    }

    fn open(&self, card: usize) -> DriverResult<Arc<dyn DriverContext>> {
        match self.contexts.get(card) {
            Some(context) => Ok(Arc::clone(context) as _),
            None => Err(other(format!("there is no card {card}"))),
        }
    }
}

/// An emulated card.
pub struct EmulatedContext {
    card: Mutex<CardState>,
}

/// Queued work.
enum Command {
    Write {
        to: Address,
        data: Vec<u8>,
    },
    Fill {
        to: Address,
        len: usize,
        value: u8,
    },
    Copy {
        to: Address,
        from: Address,
        len: usize,
    },
    Launch(KernelLaunch),
    /// Reaches the point of an event.
    Reach(Point),
    /// Waits for the point of an event.
    Wait(Point),
}

/// Number of a recorded point.
type Point = u64;

struct CardState {
    memory: DeviceMemory,
    seed: u64,
    /// State of the generator that runs commands early.
    random: u64,
    modules: Vec<LoadedModule>,
    functions: Vec<(usize, String)>,
    streams: BTreeMap<u64, VecDeque<Command>>,
    /// The point that was recorded last, by event.
    events: BTreeMap<u64, Option<Point>>,
    /// Points that are not reached, with their streams.
    pending: BTreeMap<Point, u64>,
    graphs: BTreeMap<u64, Vec<KernelLaunch>>,
    next: u64,
    /// Message of the error that made the card unusable.
    lost: Option<String>,
    /// A text to replace in kernels, and its replacement.
    replaced: Option<[&'static str; 2]>,
    /// Calls until one fails, and how.
    fault: Option<(u64, DriverErrorKind)>,
    failed_call: Option<String>,
    calls: u64,
    instructions: u64,
}

fn other(message: impl Into<String>) -> DriverError {
    DriverError {
        kind: DriverErrorKind::Other,
        message: message.into(),
    }
}

impl fmt::Debug for EmulatedContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EmulatedContext")
    }
}

impl EmulatedContext {
    fn new(capacity: usize, seed: u64) -> Self {
        EmulatedContext {
            card: Mutex::new(CardState {
                memory: DeviceMemory::new(capacity),
                seed,
                random: seed,
                modules: Vec::new(),
                functions: Vec::new(),
                streams: BTreeMap::new(),
                events: BTreeMap::new(),
                pending: BTreeMap::new(),
                graphs: BTreeMap::new(),
                next: 1,
                lost: None,
                replaced: None,
                fault: None,
                failed_call: None,
                calls: 0,
                instructions: 0,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, CardState> {
        self.card.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a driver call.
    fn call(&self, name: &str) -> DriverResult<MutexGuard<'_, CardState>> {
        let mut state = self.state();
        state.begin(name)?;
        Ok(state)
    }

    /// Makes the `number`th call from now on fail, counted from 1.
    pub fn fail_call(&self, number: u64, kind: DriverErrorKind) {
        self.state().fault = (number > 0).then_some((number, kind));
    }

    /// Returns the name of the driver's function that failed last by an injected fault.
    pub fn failed_call(&self) -> Option<String> {
        self.state().failed_call.clone()
    }

    /// Returns the number of calls so far.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Returns the number of warp instructions that ran so far.
    pub fn instructions(&self) -> u64 {
        self.state().instructions
    }

    /// Returns the number of allocated bytes.
    pub fn allocated(&self) -> usize {
        let memory = &self.state().memory;
        memory.total_bytes() - memory.free_bytes()
    }
}

impl CardState {
    fn begin(&mut self, name: &str) -> DriverResult<()> {
        self.calls += 1;
        if let Some((left, kind)) = self.fault.take() {
            if left == 1 {
                self.failed_call = Some(name.to_owned());
                let message = format!("{name}: injected fault");
                if kind == DriverErrorKind::Lost {
                    self.lost = Some(message.clone());
                }
                return Err(DriverError { kind, message });
            }
            self.fault = Some((left - 1, kind));
        }
        self.alive()
    }

    fn alive(&self) -> DriverResult<()> {
        match &self.lost {
            None => Ok(()),
            Some(message) => Err(DriverError {
                kind: DriverErrorKind::Lost,
                message: message.clone(),
            }),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn stream(&mut self, stream: StreamHandle) -> DriverResult<&mut VecDeque<Command>> {
        let queue = self.streams.get_mut(&stream.0);
        queue.ok_or_else(|| other("there is no such stream"))
    }

    /// Queues a command. Then, with a seed, runs up to three commands of any streams.
    fn push(&mut self, stream: StreamHandle, command: Command) -> DriverResult<()> {
        self.stream(stream)?.push_back(command);
        if self.seed > 0 {
            for _ in 0..self.draw(4) {
                let streams = self.streams.len() as u64;
                let index = self.draw(streams) as usize;
                if let Some(stream) = self.streams.keys().nth(index).copied() {
                    self.step(stream)?;
                }
            }
        }
        Ok(())
    }

    /// Returns a random number below `limit`, by a linear congruential generator.
    fn draw(&mut self, limit: u64) -> u64 {
        let next = self.random.wrapping_mul(6_364_136_223_846_793_005);
        self.random = next.wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % limit.max(1)
    }

    /// Runs the first command of a stream, if there is one.
    fn step(&mut self, stream: u64) -> DriverResult<()> {
        let queue = self.streams.get_mut(&stream);
        let Some(command) = queue.and_then(VecDeque::pop_front) else {
            return Ok(());
        };
        let done = match command {
            Command::Write { to, data } => self.memory.write(to, &data).map_err(|e| e.to_string()),
            Command::Fill { to, len, value } => {
                self.memory.fill(to, len, value).map_err(|e| e.to_string())
            }
            Command::Copy { to, from, len } => {
                self.memory.copy(to, from, len).map_err(|e| e.to_string())
            }
            Command::Launch(launch) => self.launch(&launch),
            Command::Reach(point) => {
                self.pending.remove(&point);
                Ok(())
            }
            Command::Wait(point) => return self.reach(point),
        };
        done.map_err(|message| {
            self.lost = Some(message.clone());
            DriverError {
                kind: DriverErrorKind::Lost,
                message,
            }
        })
    }

    /// Runs commands until a point is reached.
    fn reach(&mut self, point: Point) -> DriverResult<()> {
        while let Some(&stream) = self.pending.get(&point) {
            self.step(stream)?;
        }
        Ok(())
    }

    /// Runs all commands of a stream.
    fn drain(&mut self, stream: u64) -> DriverResult<()> {
        while self
            .streams
            .get(&stream)
            .is_some_and(|queue| !queue.is_empty())
        {
            self.step(stream)?;
        }
        self.alive()
    }

    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), String> {
        let function = self.functions.get(launch.function.0 as usize);
        let (module, name) = function.ok_or("there is no such kernel")?;
        let module = &self.modules[*module];
        let kernel = module.kernel(name).ok_or("there is no such kernel")?;
        let grid = Grid {
            blocks: [launch.groups, 1, 1],
            threads: [launch.threads, 1, 1],
            dynamic_shared: 0,
        };
        let schedule = Schedule {
            seed: self.seed,
            is_early: launch.is_early,
            ..Schedule::default()
        };
        let ran = machine::run(
            kernel,
            grid,
            &launch.arguments,
            &mut self.memory,
            schedule,
            &|| false,
        );
        let statistics = ran.map_err(|fault| fault.to_string())?;
        self.instructions += statistics.instructions;
        Ok(())
    }

    /// Checks what a driver checks before it queues a launch.
    fn check_launch(&self, launch: &KernelLaunch) -> DriverResult<()> {
        let function = self.functions.get(launch.function.0 as usize);
        let Some((module, name)) = function else {
            return Err(other("cuLaunchKernel: there is no such kernel"));
        };
        let kernel = self.modules[*module].kernel(name);
        let bytes = kernel.map_or(0, |kernel| kernel.parameter_bytes());
        if bytes != launch.arguments.len() {
            return Err(other(format!(
                "cuLaunchKernel: {name} has {bytes} bytes of parameters, not {}",
                launch.arguments.len()
            )));
        }
        if launch.groups == 0 || launch.threads == 0 || launch.threads > 1024 {
            return Err(other(format!(
                "cuLaunchKernel: {name}: {} groups of {} threads",
                launch.groups, launch.threads
            )));
        }
        Ok(())
    }
}

impl DriverContext for EmulatedContext {
    fn memory(&self) -> DriverResult<(usize, usize)> {
        let state = self.call("cuMemGetInfo")?;
        Ok((state.memory.free_bytes(), state.memory.total_bytes()))
    }

    fn alloc(&self, bytes: usize) -> DriverResult<Address> {
        let mut state = self.call("cuMemAlloc")?;
        state.memory.alloc(bytes).map_err(|error| DriverError {
            kind: DriverErrorKind::OutOfMemory,
            message: format!("cuMemAlloc: {error}"),
        })
    }

    fn free(&self, address: Address) {
        let mut state = self.state();
        let streams: Vec<u64> = state.streams.keys().copied().collect();
        for stream in streams {
            // A failure is reported by the next call.
            if state.drain(stream).is_err() {
                break;
            }
        }
        state.memory.free(address);
    }

    fn load(&self, ptx: &str) -> DriverResult<ModuleHandle> {
        let mut state = self.call("cuModuleLoadDataEx")?;
        let text = match state.replaced {
            Some([text, by]) => Cow::Owned(ptx.replace(text, by)),
            None => Cow::Borrowed(ptx),
        };
        let module = Module::parse(&text).map_err(|error| other(error.to_string()))?;
        let loaded = module.load(&mut state.memory);
        let loaded = loaded.map_err(|error| other(error.to_string()))?;
        state.modules.push(loaded);
        Ok(ModuleHandle(state.modules.len() as u64 - 1))
    }

    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        let mut state = self.call("cuModuleGetFunction")?;
        let index = module.0 as usize;
        let module = state.modules.get(index);
        let Some(kernel) = module.and_then(|module| module.kernel(name)) else {
            return Err(other(format!(
                "cuModuleGetFunction: there is no kernel {name}"
            )));
        };
        let shared = kernel.static_shared_bytes();
        if shared > MAX_STATIC_SHARED {
            return Err(other(format!(
                "{name} declares {shared} bytes of shared memory; {MAX_STATIC_SHARED} are allowed"
            )));
        }
        state.functions.push((index, name.to_owned()));
        Ok(FunctionHandle(state.functions.len() as u64 - 1))
    }

    fn create_stream(&self) -> DriverResult<StreamHandle> {
        let mut state = self.call("cuStreamCreate")?;
        let number = state.number();
        state.streams.insert(number, VecDeque::new());
        Ok(StreamHandle(number))
    }

    fn destroy_stream(&self, stream: StreamHandle) {
        self.state().streams.remove(&stream.0);
    }

    fn synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        self.call("cuStreamSynchronize")?.drain(stream.0)
    }

    fn write(&self, stream: StreamHandle, to: Address, data: &[u8]) -> DriverResult<()> {
        let data = data.to_vec();
        self.call("cuMemcpyHtoDAsync")?
            .push(stream, Command::Write { to, data })
    }

    fn read(&self, stream: StreamHandle, from: Address, out: &mut [u8]) -> DriverResult<()> {
        let mut state = self.call("cuMemcpyDtoHAsync")?;
        state.drain(stream.0)?;
        let read = state.memory.read(from, out);
        read.map_err(|error| other(error.to_string()))
    }

    fn fill(&self, stream: StreamHandle, to: Address, len: usize, value: u8) -> DriverResult<()> {
        self.call("cuMemsetD8Async")?
            .push(stream, Command::Fill { to, len, value })
    }

    fn copy(
        &self,
        stream: StreamHandle,
        to: Address,
        from: Address,
        len: usize,
    ) -> DriverResult<()> {
        self.call("cuMemcpyDtoDAsync")?
            .push(stream, Command::Copy { to, from, len })
    }

    fn launch(&self, stream: StreamHandle, launch: &KernelLaunch) -> DriverResult<()> {
        let mut state = self.call("cuLaunchKernel")?;
        state.check_launch(launch)?;
        state.push(stream, Command::Launch(launch.clone()))
    }

    fn create_graph(&self, launches: &[KernelLaunch]) -> DriverResult<GraphHandle> {
        let mut state = self.call("cuGraphInstantiateWithFlags")?;
        for launch in launches {
            state.check_launch(launch)?;
        }
        let number = state.number();
        state.graphs.insert(number, launches.to_vec());
        Ok(GraphHandle(number))
    }

    fn launch_graph(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()> {
        let mut state = self.call("cuGraphLaunch")?;
        let launches = state.graphs.get(&graph.0).cloned();
        for launch in launches.ok_or_else(|| other("cuGraphLaunch: there is no such graph"))? {
            state.push(stream, Command::Launch(launch))?;
        }
        Ok(())
    }

    fn destroy_graph(&self, graph: GraphHandle) {
        self.state().graphs.remove(&graph.0);
    }

    fn create_event(&self) -> DriverResult<EventHandle> {
        let mut state = self.call("cuEventCreate")?;
        let number = state.number();
        state.events.insert(number, None);
        Ok(EventHandle(number))
    }

    fn destroy_event(&self, event: EventHandle) {
        self.state().events.remove(&event.0);
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.call("cuEventRecord")?;
        let point = state.number();
        state.pending.insert(point, stream.0);
        state.events.insert(event.0, Some(point));
        state.push(stream, Command::Reach(point))
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let mut state = self.call("cuStreamWaitEvent")?;
        match state.events.get(&event.0).copied().flatten() {
            Some(point) => state.push(stream, Command::Wait(point)),
            None => Ok(()),
        }
    }

    fn synchronize_event(&self, event: EventHandle) -> DriverResult<()> {
        let mut state = self.call("cuEventSynchronize")?;
        match state.events.get(&event.0).copied().flatten() {
            Some(point) => state.reach(point),
            None => Ok(()),
        }
    }
}
