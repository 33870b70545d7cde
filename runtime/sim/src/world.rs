//! The simulated machine: time, asynchronous streams, checked memory, faults, and a trace of all
//! events.
//!
//! Everything runs on one thread. The host runs the real code; a call of a device advances time
//! slightly, and a wait advances it until its condition holds. The next event is always the one
//! with the smallest time. Times are drawn from the seed, so the same seed gives the same run, and
//! another seed gives another order of events that hardware could also produce.

use crate::fault::{Fault, FaultOccurrence, Faults};
use crate::shadow::{MemoryAccess, Shadow};
use crate::time::{HOST, VectorClock, WorkId};
use crate::trace::Trace;
use samite_core::{CancelToken, Error, Location, Result};
use samite_testing::Rng;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Simulated nanoseconds.
pub(crate) type Time = u64;

/// Time after which work that never ends makes the device count as lost, like a driver's watchdog.
const WATCHDOG: Time = 10_000_000_000;

/// Size of a clock jump.
const JUMP: Time = 3_600_000_000_000;

/// Effect of a step.
pub(crate) type Effect = Box<dyn FnMut() -> Result<()> + Send>;

/// A part of a job whose effect happens at one moment.
pub(crate) struct StreamStep {
    /// Description for messages.
    pub what: Arc<str>,
    pub accesses: Vec<MemoryAccess>,
    pub does: Does,
}

/// Action of a step.
pub(crate) enum Does {
    /// Takes about this long and has an effect.
    Work(Time, Effect),
    /// Takes part of a copy.
    Copy(Time, Effect),
    /// Waits for another stream.
    Wait(StreamPoint),
}

/// A point in a stream's queue, after this many jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamPoint {
    pub stream: usize,
    pub jobs: u64,
}

/// Steps submitted to a stream in one call, with the host's clock at that time.
struct StreamJob {
    steps: VecDeque<StreamStep>,
    seen: VectorClock,
}

struct StreamQueue {
    device: usize,
    name: Arc<str>,
    clock: VectorClock,
    queue: VecDeque<StreamJob>,
    /// Job in progress.
    current: Option<StreamJob>,
    /// True if the effect of the current step already happened when the step began.
    felt: bool,
    /// True if the current step never ends.
    stalled: bool,
    /// Point that the stream waits for.
    blocked: Option<StreamPoint>,
    /// Duration of work, in tenths of the prediction.
    slowness: u64,
    submitted: u64,
    done: u64,
    /// For each finished job: the stream's clock at its end, or why it did not run. A reported
    /// failure remains the result of those jobs.
    history: Vec<Result<VectorClock>>,
    /// First failure that was not reported yet. Later jobs are skipped.
    failed: Option<Error>,
}

struct DeviceState {
    name: Arc<str>,
    /// False for the host's processor.
    can_be_lost: bool,
    is_lost: bool,
}

/// Existing buffers of a memory, identified by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LiveBuffers {
    pub buffers: usize,
    pub bytes: usize,
    /// Bytes of buffers for intermediate results.
    pub compute: usize,
}

/// State shared by simulated devices.
pub(crate) struct World {
    /// Outside the state, so that a clock can be read while the state is locked.
    now: AtomicU64,
    state: Mutex<WorldState>,
}

pub(crate) struct WorldState {
    rng: Rng,
    now: Time,
    /// Upper limit of the duration of a host call.
    call_time: usize,
    /// Probability that an effect happens when its step begins: one in so many, or never.
    early: Option<usize>,
    /// Events ordered by time, then by a random number: the stream proceeds.
    events: BinaryHeap<Reverse<(Time, u64, usize)>>,
    streams: Vec<StreamQueue>,
    devices: Vec<DeviceState>,
    host: VectorClock,
    shadow: Shadow,
    /// True if reading unwritten bytes yields zeros instead of being a bug. A server still executes
    /// commands that follow a failed one, although no client uses their results.
    pub is_zeroed: bool,
    live: BTreeMap<String, LiveBuffers>,
    pub faults: Faults,
    pub trace: Trace,
    violations: Vec<String>,
    cancel: Option<CancelToken>,
    /// Number of stream copies, and their bytes.
    pub copies: (usize, usize),
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World({} ns)", self.now.load(Ordering::SeqCst))
    }
}

impl World {
    /// Creates a world without devices; `seed` determines the order of events.
    pub fn new(seed: u64, faults: Faults, trace: Trace) -> Arc<Self> {
        let mut rng = Rng::new(seed);
        let state = WorldState {
            // From a host far ahead of all devices to one far behind them.
            call_time: rng.pick(&[1, 1_000, 10_000, 100_000]),
            early: rng.pick(&[None, Some(1), Some(2), Some(8)]),
            rng,
            now: 0,
            events: BinaryHeap::new(),
            streams: Vec::new(),
            devices: Vec::new(),
            host: VectorClock::default(),
            shadow: Shadow::default(),
            is_zeroed: false,
            live: BTreeMap::new(),
            faults,
            trace,
            violations: Vec::new(),
            cancel: None,
            copies: (0, 0),
        };
        Arc::new(World {
            now: AtomicU64::new(0),
            state: Mutex::new(state),
        })
    }

    fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accesses the state without advancing time.
    pub fn with<R>(&self, f: impl FnOnce(&mut WorldState) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.now.store(state.now, Ordering::SeqCst);
        result
    }

    /// Returns whether a fault strikes at this opportunity.
    pub fn strikes(&self, fault: Fault) -> bool {
        self.with(|state| {
            let strikes = state.faults.strikes(fault);
            if strikes {
                state.note(|_| format!("FAULT: {fault}"));
            }
            strikes
        })
    }

    /// Returns the time in nanoseconds.
    pub fn now(&self) -> Time {
        self.now.load(Ordering::SeqCst)
    }

    /// Simulates a host call into device number `device`: some time passes, then the call may fail
    /// because of `fault` or because the device is lost.
    pub fn call(&self, device: usize, what: &str, fault: Option<Fault>) -> Result<()> {
        self.with(|state| {
            state.pass_time();
            state.note(|state| format!("host: {what} on {}", state.devices[device].name));
            state.check(device, what, fault)
        })
    }
}

impl WorldState {
    /// Writes to the trace.
    pub fn note(&mut self, text: impl FnOnce(&WorldState) -> String) {
        let text = text(self);
        self.trace.note(self.now, &text);
    }

    /// Records a detected bug.
    pub fn violate(&mut self, mistake: String) {
        self.trace.note(self.now, &format!("MISTAKE: {mistake}"));
        self.violations.push(mistake);
    }

    /// Returns the bugs detected so far.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Adds a device and returns its number.
    pub fn add_device(&mut self, name: &str, can_be_lost: bool) -> usize {
        self.devices.push(DeviceState {
            name: name.into(),
            can_be_lost,
            is_lost: false,
        });
        self.devices.len() - 1
    }

    /// Adds a stream to a device and returns its number.
    pub fn add_stream(&mut self, device: usize) -> usize {
        let number = self.streams.len();
        let slowness = self.rng.pick(&[1, 5, 10, 10, 20, 100]);
        self.streams.push(StreamQueue {
            device,
            name: format!("{}#{number}", self.devices[device].name).into(),
            clock: VectorClock::default(),
            queue: VecDeque::new(),
            current: None,
            felt: false,
            stalled: false,
            blocked: None,
            slowness,
            submitted: 0,
            done: 0,
            history: Vec::new(),
            failed: None,
        });
        number
    }

    /// Fails if the device is lost, or if `fault` strikes.
    fn check(&mut self, device: usize, what: &str, fault: Option<Fault>) -> Result<()> {
        if self.devices[device].is_lost {
            return Err(self.lost(device));
        }
        match fault {
            Some(fault) if self.faults.strikes(fault) => Err(self.injected(device, what, fault)),
            _ => Ok(()),
        }
    }

    fn injected(&mut self, device: usize, what: &str, fault: Fault) -> Error {
        self.note(|_| format!("FAULT: {fault} in {what}"));
        let name = &self.devices[device].name;
        if fault == Fault::Allocate {
            return Error::OutOfMemory {
                device: (**name).into(),
                what: "a buffer (injected fault)".into(),
                asked: 0,
                free: None,
            };
        }
        Error::device(name, format!("injected fault: {fault} in {what}"))
    }

    fn lost(&self, device: usize) -> Error {
        Error::DeviceLost {
            device: (*self.devices[device].name).into(),
            message: "injected".into(),
        }
    }

    /// Returns the numbers below `count` in random order.
    pub fn order_of(&mut self, count: usize) -> Vec<usize> {
        self.rng.permutation(count)
    }

    /// Returns the names of lost devices.
    pub fn lost_devices(&self) -> Vec<String> {
        let lost = self.devices.iter().filter(|device| device.is_lost);
        lost.map(|device| device.name.to_string()).collect()
    }

    /// Sets the token that the `cancel` fault may cancel from now on.
    pub fn offer_cancel(&mut self, token: Option<CancelToken>) {
        self.cancel = token;
    }

    fn pass_time(&mut self) {
        if let Some(token) = self.cancel.clone()
            && self.faults.strikes(Fault::Cancel)
        {
            self.note(|_| "FAULT: cancel".to_owned());
            token.cancel();
        }
        let mut time = self.rng.below(self.call_time) as Time;
        if self.faults.strikes(Fault::ClockJump) {
            self.note(|_| "FAULT: clock-jump".to_owned());
            time += JUMP;
        }
        self.advance(time);
    }

    /// Advances time and processes the events that occur meanwhile.
    pub fn advance(&mut self, time: Time) {
        let end = self.now + time;
        while let Some(&Reverse((at, _, _))) = self.events.peek()
            && at <= end
        {
            self.happen();
        }
        self.now = self.now.max(end);
    }

    /// Processes the next event. Returns false if there is none.
    fn happen(&mut self) -> bool {
        let Some(Reverse((at, _, stream))) = self.events.pop() else {
            return false;
        };
        self.now = self.now.max(at);
        if self.streams[stream].blocked.take().is_none() {
            self.end_step(stream);
        }
        self.go_on(stream);
        true
    }

    fn schedule(&mut self, stream: usize, time: Time) {
        let order = self.rng.bits();
        self.events.push(Reverse((self.now + time, order, stream)));
    }

    /// Submits a job to a stream.
    pub fn submit(&mut self, stream: usize, steps: Vec<StreamStep>) {
        let seen = self.host.clone();
        let s = &mut self.streams[stream];
        s.submitted += 1;
        let was_idle = s.current.is_none() && s.queue.is_empty();
        s.queue.push_back(StreamJob {
            steps: steps.into(),
            seen,
        });
        if was_idle {
            self.go_on(stream);
        }
    }

    /// Returns the point after everything submitted to a stream.
    pub fn end_of(&self, stream: usize) -> StreamPoint {
        StreamPoint {
            stream,
            jobs: self.streams[stream].submitted,
        }
    }

    fn is_reached(&self, point: StreamPoint) -> bool {
        self.streams[point.stream].done >= point.jobs
    }

    /// Returns a stream's clock at a point already reached, or the failure of earlier work.
    fn known_at(&self, point: StreamPoint) -> Result<VectorClock> {
        match point.jobs {
            0 => Ok(VectorClock::default()),
            jobs => self.streams[point.stream].history[jobs as usize - 1].clone(),
        }
    }

    /// Ends a stream's current step.
    fn end_step(&mut self, stream: usize) {
        if std::mem::take(&mut self.streams[stream].stalled) {
            self.note(|state| format!("{}: watchdog", state.streams[stream].name));
            return self.lose(self.streams[stream].device);
        }
        if std::mem::take(&mut self.streams[stream].felt) {
            return;
        }
        let job = self.streams[stream].current.as_mut();
        let Some(step) = job.and_then(|job| job.steps.pop_front()) else {
            return; // the device was lost meanwhile
        };
        if let Err(error) = self.feel(stream, step) {
            self.fail(stream, error);
        }
    }

    /// Applies the effect of a stream's step.
    fn feel(&mut self, stream: usize, mut step: StreamStep) -> Result<()> {
        let lane = stream + 1;
        let by = self.streams[stream].clock.tick(lane);
        let who: Arc<str> = format!("{} in {}", self.streams[stream].name, step.what).into();
        let clock = self.streams[stream].clock.clone();
        self.touch(&step.accesses, by, &who, &clock);
        self.note(|_| who.to_string());
        let (fault, effect) = match &mut step.does {
            Does::Work(_, effect) => (Fault::Compute, effect),
            Does::Copy(_, effect) => (Fault::Copy, effect),
            Does::Wait(_) => return Ok(()),
        };
        self.check(self.streams[stream].device, &step.what, Some(fault))?;
        effect()
    }

    fn touch(
        &mut self,
        accesses: &[MemoryAccess],
        by: WorkId,
        who: &Arc<str>,
        clock: &VectorClock,
    ) {
        for access in accesses {
            if let Err(mistake) = self.shadow.touch(access, by, who, clock) {
                self.violate(mistake);
            }
        }
    }

    /// Fails the current job; later jobs will be skipped.
    fn fail(&mut self, stream: usize, error: Error) {
        self.note(|state| format!("{}: fails: {error}", state.streams[stream].name));
        let s = &mut self.streams[stream];
        if s.failed.is_none() {
            s.failed = Some(error);
        }
        self.end_job(stream);
    }

    /// Ends the current job, whether it succeeded or failed.
    fn end_job(&mut self, stream: usize) {
        let s = &mut self.streams[stream];
        s.current = None;
        s.done += 1;
        s.history.push(match &s.failed {
            Some(error) => Err(error.clone()),
            None => Ok(s.clock.clone()),
        });
        for other in 0..self.streams.len() {
            let waits = self.streams[other].blocked;
            if waits.is_some_and(|point| point.stream == stream && self.is_reached(point)) {
                self.schedule(other, 0);
            }
        }
    }

    /// Starts the next step of an idle stream.
    fn go_on(&mut self, stream: usize) {
        loop {
            let s = &mut self.streams[stream];
            if s.current.is_none() {
                let Some(job) = s.queue.pop_front() else {
                    return;
                };
                s.clock.join(&job.seen);
                s.current = Some(job);
            }
            let device = s.device;
            if s.failed.is_some() {
                self.end_job(stream);
                continue;
            }
            if self.devices[device].is_lost {
                self.fail(stream, self.lost(device));
                continue;
            }
            let step = s.current.as_ref().and_then(|job| job.steps.front());
            let (time, is_copy) = match step.map(|step| &step.does) {
                None => {
                    self.end_job(stream);
                    continue;
                }
                Some(&Does::Wait(point)) => {
                    if !self.is_reached(point) {
                        self.streams[stream].blocked = Some(point);
                        return;
                    }
                    match self.known_at(point) {
                        Ok(known) => {
                            let s = &mut self.streams[stream];
                            s.clock.join(&known);
                            if let Some(job) = &mut s.current {
                                job.steps.pop_front();
                            }
                        }
                        Err(error) => self.fail(stream, error),
                    }
                    continue;
                }
                Some(Does::Work(time, _)) => (*time, false),
                Some(Does::Copy(time, _)) => (*time, true),
            };
            return self.begin_step(stream, time, is_copy);
        }
    }

    fn begin_step(&mut self, stream: usize, time: Time, is_copy: bool) {
        let device = self.streams[stream].device;
        let lose = if is_copy {
            Fault::LoseInCopy
        } else {
            Fault::Lose
        };
        if self.may_lose(device, lose) {
            return self.go_on(stream);
        }
        if self.devices[device].can_be_lost && self.faults.strikes(Fault::Stall) {
            self.note(|state| format!("FAULT: stall of {}", state.streams[stream].name));
            self.streams[stream].stalled = true;
            return self.schedule(stream, WATCHDOG);
        }
        let slowness = self.streams[stream].slowness;
        let time = 1 + time * slowness / 10 + self.rng.below(1 + time as usize / 4) as Time;
        if self.early.is_some_and(|n| self.rng.one_in(n)) {
            // The effect happens immediately.
            let job = self.streams[stream].current.as_mut();
            if let Some(step) = job.and_then(|job| job.steps.pop_front()) {
                if let Err(error) = self.feel(stream, step) {
                    self.fail(stream, error);
                    return self.go_on(stream);
                }
                self.streams[stream].felt = true;
            }
        }
        self.schedule(stream, time);
    }

    /// Loses a device if `fault` strikes; returns whether it did.
    fn may_lose(&mut self, device: usize, fault: Fault) -> bool {
        let strikes = self.devices[device].can_be_lost && self.faults.strikes(fault);
        if strikes {
            self.note(|state| format!("FAULT: {fault}: {}", state.devices[device].name));
            self.lose(device);
        }
        strikes
    }

    /// Marks a device as lost: its current and all later work fails.
    fn lose(&mut self, device: usize) {
        self.devices[device].is_lost = true;
        for stream in 0..self.streams.len() {
            if self.streams[stream].device == device && self.streams[stream].blocked.is_some() {
                self.schedule(stream, 0);
            }
        }
    }

    /// Advances time until `is_so` holds.
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&WorldState) -> bool) -> Result<()> {
        while !is_so(self) {
            if !self.happen() {
                self.violate(format!("the host waits for ever: {what}"));
                return Err(Error::invalid("a wait without an end"));
            }
        }
        Ok(())
    }

    /// Waits until a stream has finished, and reports a failure once.
    pub fn synchronize(&mut self, stream: usize) -> Result<()> {
        let end = self.end_of(stream);
        let name = Arc::clone(&self.streams[stream].name);
        self.wait_until(&name, |state| state.is_reached(end))?;
        let s = &mut self.streams[stream];
        self.host.join(&s.clock);
        match s.failed.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Makes the host wait for a point of a stream.
    pub fn wait_for(&mut self, point: StreamPoint) -> Result<()> {
        let name = Arc::clone(&self.streams[point.stream].name);
        self.wait_until(&name, |state| state.is_reached(point))?;
        let known = self.known_at(point)?;
        self.host.join(&known);
        Ok(())
    }

    /// Executes a step of a synchronous device on the host, while other streams proceed.
    pub fn on_host(&mut self, device: usize, mut step: StreamStep) -> Result<()> {
        self.touch_by_host(&step.what, &step.accesses);
        let (time, fault, lose, effect) = match &mut step.does {
            Does::Work(time, effect) => (*time, Fault::Compute, Fault::Lose, effect),
            Does::Copy(time, effect) => (*time, Fault::Copy, Fault::LoseInCopy, effect),
            Does::Wait(point) => return self.wait_for(*point),
        };
        self.may_lose(device, lose);
        self.check(device, &step.what, Some(fault))?;
        let result = effect();
        self.advance(time);
        result
    }

    /// Records a new buffer of the memory called `name`.
    pub fn allocated(&mut self, name: &str, bytes: usize, is_compute: bool) {
        let live = self.live.entry(name.to_owned()).or_default();
        live.buffers += 1;
        live.bytes += bytes;
        live.compute += if is_compute { bytes } else { 0 };
    }

    /// Marks bytes whose reading before a write is a bug.
    pub fn begin_undefined(&mut self, at: Location, bytes: usize) {
        let range = at.offset..at.offset + bytes;
        if !self.is_zeroed {
            self.shadow.begin_undefined(at.memory, range);
        }
    }

    /// Records that a buffer was freed: no work may be using it.
    pub fn freed(&mut self, name: &str, at: Location, bytes: usize, is_compute: bool) {
        let live = self.live.entry(name.to_owned()).or_default();
        live.buffers -= 1;
        live.bytes -= bytes;
        live.compute -= if is_compute { bytes } else { 0 };
        self.let_go(name, at, bytes);
        self.shadow
            .forget(at.memory, &(at.offset..at.offset + bytes));
    }

    /// Checks that no work uses a buffer that is being freed.
    pub fn let_go(&mut self, name: &str, at: Location, bytes: usize) {
        let (start, end) = (at.offset, at.offset + bytes);
        let uses = |access: &MemoryAccess| {
            access.memory == at.memory && access.bytes.start < end && start < access.bytes.end
        };
        let user = self.streams.iter().find(|stream| {
            let jobs = stream.current.iter().chain(&stream.queue);
            let mut steps = jobs.flat_map(|job| &job.steps);
            stream.failed.is_none() && steps.any(|step| step.accesses.iter().any(uses))
        });
        if let Some(user) = user {
            let mistake = format!("memory of {name} is freed while {} uses it", user.name);
            self.violate(mistake);
        }
    }

    /// Records an access by the host.
    pub fn touch_by_host(&mut self, what: &str, accesses: &[MemoryAccess]) {
        let by = self.host.tick(HOST);
        let who: Arc<str> = format!("the host in {what}").into();
        let clock = self.host.clone();
        self.touch(accesses, by, &who, &clock);
        self.note(|_| who.to_string());
    }

    /// Returns the existing buffers, by name of their memory.
    pub fn live(&self) -> impl Iterator<Item = (&str, LiveBuffers)> {
        let live = self.live.iter().filter(|(_, live)| live.buffers > 0);
        live.map(|(name, live)| (name.as_str(), *live))
    }

    /// Returns an error if a stream has unfinished work after `what`.
    pub fn check_idle(&self, what: &str) -> Result<(), String> {
        let busy = self.streams.iter().filter(|s| s.done < s.submitted);
        let busy: Vec<_> = busy.map(|s| &*s.name).collect();
        if busy.is_empty() {
            Ok(())
        } else {
            Err(format!("{what} left work in {}", busy.join(", ")))
        }
    }

    /// Returns the faults that struck so far.
    pub fn struck(&self) -> &[FaultOccurrence] {
        self.faults.struck()
    }
}
