//! The simulated machine: time, streams that work at their own pace, memory that is watched, faults, and a trace of everything.
//!
//! One thread does everything. The host runs the real code; when it calls a device, a little time passes, and when it waits, time goes on until
//! what it waits for has happened. What happens next is the event with the smallest time. Times are drawn from the seed, so the same seed gives the
//! same run, and another one gives another order of events that hardware could show too.

use crate::fault::{Fault, Faults, Strike};
use crate::shadow::{Access, Shadow};
use crate::time::{HOST, Stamp, VectorClock};
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

/// How long work that never ends may take before the device counts as lost, as drivers do it.
const WATCHDOG: Time = 10_000_000_000;

/// How far the clock jumps.
const JUMP: Time = 3_600_000_000_000;

/// What a step does when it happens.
pub(crate) type Effect = Box<dyn FnMut() -> Result<()> + Send>;

/// A part of a job that happens at one moment.
pub(crate) struct Step {
    /// For people.
    pub what: Arc<str>,
    pub accesses: Vec<Access>,
    pub does: Does,
}

/// What a step does.
pub(crate) enum Does {
    /// Takes about so long, and has an effect.
    Work(Time, Effect),
    /// Takes part of a copy.
    Copy(Time, Effect),
    /// Waits for another stream.
    Wait(Point),
}

/// A point in a stream's queue: behind so many jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub stream: usize,
    pub jobs: u64,
}

/// Steps that a stream was given in one call, with what the host knew then.
struct Job {
    steps: VecDeque<Step>,
    seen: VectorClock,
}

struct Stream {
    device: usize,
    name: Arc<str>,
    clock: VectorClock,
    queue: VecDeque<Job>,
    /// The job at work.
    current: Option<Job>,
    /// Whether the effect of the step at work was felt already when the step began.
    felt: bool,
    /// The step at work never ends.
    stalled: bool,
    /// What the stream waits for.
    blocked: Option<Point>,
    /// Work takes so many tenths of what is predicted.
    slowness: u64,
    submitted: u64,
    done: u64,
    /// By job that is done: what the stream knew then, or why the job was not done. A failure that was reported stays the failure of those jobs.
    history: Vec<Result<VectorClock>>,
    /// The first failure that was not reported yet. Jobs behind it are skipped.
    failed: Option<Error>,
}

struct DeviceState {
    name: Arc<str>,
    /// The host's processors cannot.
    can_be_lost: bool,
    is_lost: bool,
}

/// Buffers that exist, by name of their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Live {
    pub buffers: usize,
    pub bytes: usize,
    /// Bytes of buffers for intermediate results.
    pub compute: usize,
}

/// What simulated devices have in common.
pub(crate) struct World {
    /// Beside the state, so that a clock can be read while that is locked.
    now: AtomicU64,
    state: Mutex<State>,
}

pub(crate) struct State {
    rng: Rng,
    now: Time,
    /// A call of the host takes less than this.
    call_time: usize,
    /// Effects are felt when a step begins this often: one time in so many, or never.
    early: Option<usize>,
    /// Events by time, then by a random number: the stream goes on.
    events: BinaryHeap<Reverse<(Time, u64, usize)>>,
    streams: Vec<Stream>,
    devices: Vec<DeviceState>,
    host: VectorClock,
    shadow: Shadow,
    /// Whoever reads what nobody wrote reads zeros: what clients sent behind a failure is done, too, and its results are nobody's.
    pub is_zeroed: bool,
    live: BTreeMap<String, Live>,
    pub faults: Faults,
    pub trace: Trace,
    violations: Vec<String>,
    cancel: Option<CancelToken>,
    /// Copies that streams made, and their bytes.
    pub copies: (usize, usize),
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World({} ns)", self.now.load(Ordering::SeqCst))
    }
}

impl World {
    /// A world without devices whose order of events is drawn from `seed`.
    pub fn new(seed: u64, faults: Faults, trace: Trace) -> Arc<Self> {
        let mut rng = Rng::new(seed);
        let state = State {
            // From a host that is far ahead of all devices to one that is far behind them.
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state, or changes it, without any time passing.
    pub fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.now.store(state.now, Ordering::SeqCst);
        result
    }

    /// Whether a fault strikes at this occasion.
    pub fn strikes(&self, fault: Fault) -> bool {
        self.with(|state| {
            let strikes = state.faults.strikes(fault);
            if strikes {
                state.note(|_| format!("FAULT: {fault}"));
            }
            strikes
        })
    }

    /// The time, in nanoseconds.
    pub fn now(&self) -> Time {
        self.now.load(Ordering::SeqCst)
    }

    /// A call of the host into device number `device`: some time passes; then it may fail, as `fault` does or because the device is lost.
    pub fn call(&self, device: usize, what: &str, fault: Option<Fault>) -> Result<()> {
        self.with(|state| {
            state.pass_time();
            state.note(|state| format!("host: {what} on {}", state.devices[device].name));
            state.check(device, what, fault)
        })
    }
}

impl State {
    /// Writes into the trace.
    pub fn note(&mut self, text: impl FnOnce(&State) -> String) {
        let text = text(self);
        self.trace.note(self.now, &text);
    }

    /// Adds a mistake that somebody made.
    pub fn violate(&mut self, mistake: String) {
        self.trace.note(self.now, &format!("MISTAKE: {mistake}"));
        self.violations.push(mistake);
    }

    /// The mistakes so far.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// A new device, by number.
    pub fn add_device(&mut self, name: &str, can_be_lost: bool) -> usize {
        self.devices.push(DeviceState {
            name: name.into(),
            can_be_lost,
            is_lost: false,
        });
        self.devices.len() - 1
    }

    /// A new stream of a device, by number.
    pub fn add_stream(&mut self, device: usize) -> usize {
        let number = self.streams.len();
        let slowness = self.rng.pick(&[1, 5, 10, 10, 20, 100]);
        self.streams.push(Stream {
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

    /// The numbers below `count` in a drawn order.
    pub fn order_of(&mut self, count: usize) -> Vec<usize> {
        self.rng.permutation(count)
    }

    /// Names of the devices that are lost.
    pub fn lost_devices(&self) -> Vec<String> {
        let lost = self.devices.iter().filter(|device| device.is_lost);
        lost.map(|device| device.name.to_string()).collect()
    }

    /// Lets work look at `token`, which may be cancelled from now on.
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

    /// Lets time pass, and everything happen that happens meanwhile.
    pub fn advance(&mut self, time: Time) {
        let end = self.now + time;
        while let Some(&Reverse((at, _, _))) = self.events.peek()
            && at <= end
        {
            self.happen();
        }
        self.now = self.now.max(end);
    }

    /// Lets the next event happen; false if there is none.
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

    /// Gives a stream a job.
    pub fn submit(&mut self, stream: usize, steps: Vec<Step>) {
        let seen = self.host.clone();
        let s = &mut self.streams[stream];
        s.submitted += 1;
        let was_idle = s.current.is_none() && s.queue.is_empty();
        s.queue.push_back(Job {
            steps: steps.into(),
            seen,
        });
        if was_idle {
            self.go_on(stream);
        }
    }

    /// The point behind everything that a stream was given.
    pub fn end_of(&self, stream: usize) -> Point {
        Point {
            stream,
            jobs: self.streams[stream].submitted,
        }
    }

    fn is_reached(&self, point: Point) -> bool {
        self.streams[point.stream].done >= point.jobs
    }

    /// What a stream knew at a point that is reached, or the failure of work before it.
    fn known_at(&self, point: Point) -> Result<VectorClock> {
        match point.jobs {
            0 => Ok(VectorClock::default()),
            jobs => self.streams[point.stream].history[jobs as usize - 1].clone(),
        }
    }

    /// The end of the step that a stream works on.
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

    /// Performs a step of a stream.
    fn feel(&mut self, stream: usize, mut step: Step) -> Result<()> {
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

    fn touch(&mut self, accesses: &[Access], by: Stamp, who: &Arc<str>, clock: &VectorClock) {
        for access in accesses {
            if let Err(mistake) = self.shadow.touch(access, by, who, clock) {
                self.violate(mistake);
            }
        }
    }

    /// The job at work failed: it is over, and those behind it will be skipped.
    fn fail(&mut self, stream: usize, error: Error) {
        self.note(|state| format!("{}: fails: {error}", state.streams[stream].name));
        let s = &mut self.streams[stream];
        if s.failed.is_none() {
            s.failed = Some(error);
        }
        self.end_job(stream);
    }

    /// The job at work is over, one way or the other.
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

    /// Lets a stream that has nothing at work begin what comes next.
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
            // The effect is there at once.
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

    /// Loses a device if `fault` strikes, and says whether it did.
    fn may_lose(&mut self, device: usize, fault: Fault) -> bool {
        let strikes = self.devices[device].can_be_lost && self.faults.strikes(fault);
        if strikes {
            self.note(|state| format!("FAULT: {fault}: {}", state.devices[device].name));
            self.lose(device);
        }
        strikes
    }

    /// A device is gone: what it works on fails, and so does everything later.
    fn lose(&mut self, device: usize) {
        self.devices[device].is_lost = true;
        for stream in 0..self.streams.len() {
            if self.streams[stream].device == device && self.streams[stream].blocked.is_some() {
                self.schedule(stream, 0);
            }
        }
    }

    /// Lets time pass until `is_so`.
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&State) -> bool) -> Result<()> {
        while !is_so(self) {
            if !self.happen() {
                self.violate(format!("the host waits for ever: {what}"));
                return Err(Error::invalid("a wait without an end"));
            }
        }
        Ok(())
    }

    /// Waits until a stream has done everything, and reports a failure, once.
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

    /// Lets the host wait for a point of a stream.
    pub fn wait_for(&mut self, point: Point) -> Result<()> {
        let name = Arc::clone(&self.streams[point.stream].name);
        self.wait_until(&name, |state| state.is_reached(point))?;
        let known = self.known_at(point)?;
        self.host.join(&known);
        Ok(())
    }

    /// The host does a step of a synchronous device itself, while others go on.
    pub fn on_host(&mut self, device: usize, mut step: Step) -> Result<()> {
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

    /// Notes a new buffer of a memory called `name`.
    pub fn allocated(&mut self, name: &str, bytes: usize, is_compute: bool) {
        let live = self.live.entry(name.to_owned()).or_default();
        live.buffers += 1;
        live.bytes += bytes;
        live.compute += if is_compute { bytes } else { 0 };
    }

    /// Reading bytes before they are written is a mistake.
    pub fn begin_undefined(&mut self, at: Location, bytes: usize) {
        let range = at.offset..at.offset + bytes;
        if !self.is_zeroed {
            self.shadow.begin_undefined(at.memory, range);
        }
    }

    /// Notes that a buffer is given back: nothing may be at work in it.
    pub fn freed(&mut self, name: &str, at: Location, bytes: usize, is_compute: bool) {
        let live = self.live.entry(name.to_owned()).or_default();
        live.buffers -= 1;
        live.bytes -= bytes;
        live.compute -= if is_compute { bytes } else { 0 };
        self.let_go(name, at, bytes);
        self.shadow
            .forget(at.memory, &(at.offset..at.offset + bytes));
    }

    /// Notes that a buffer goes: nothing may be at work in it.
    pub fn let_go(&mut self, name: &str, at: Location, bytes: usize) {
        let (start, end) = (at.offset, at.offset + bytes);
        let uses = |access: &Access| {
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

    /// The host touches memory.
    pub fn touch_by_host(&mut self, what: &str, accesses: &[Access]) {
        let by = self.host.tick(HOST);
        let who: Arc<str> = format!("the host in {what}").into();
        let clock = self.host.clone();
        self.touch(accesses, by, &who, &clock);
        self.note(|_| who.to_string());
    }

    /// Buffers that exist, by name of their memory.
    pub fn live(&self) -> impl Iterator<Item = (&str, Live)> {
        let live = self.live.iter().filter(|(_, live)| live.buffers > 0);
        live.map(|(name, live)| (name.as_str(), *live))
    }

    /// Fails if a stream has not done everything that it was given, after `what`.
    pub fn check_idle(&self, what: &str) -> Result<(), String> {
        let busy = self.streams.iter().filter(|s| s.done < s.submitted);
        let busy: Vec<_> = busy.map(|s| &*s.name).collect();
        match busy.is_empty() {
            true => Ok(()),
            false => Err(format!("{what} left work in {}", busy.join(", "))),
        }
    }

    /// What struck so far.
    pub fn struck(&self) -> &[Strike] {
        self.faults.struck()
    }
}
