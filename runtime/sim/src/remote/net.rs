//! A simulated network with a remote-mode server.
//!
//! Clients block on the host's thread. While they wait, the next events happen: a message arrives,
//! a timer fires, a session executes a request. Connections preserve message order, as TLS does.
//! Each side notices a broken connection at its own time, perhaps after a new one was made.
//! Messages in flight may still arrive until then.

use super::hostile::{ClientAction, Hostile};
use super::tasks::{Side, Tasks};
use crate::device::SimDevice;
use crate::fault::{Fault, FaultOccurrence};
use crate::served::{FAR, SECRET};
use crate::world::{Time, World};
use samite_core::Device;
use samite_core::environment::Clock;
use samite_remote::RemoteServerOptions;
use samite_remote::bare::{
    BareServer, BoxedTask, Connecting, GrpcStatus, Messages, SessionEnvironment, Unreachable, Wire,
    Worker,
};
use samite_testing::Rng;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// Delay of late messages: two of them together are shorter than any timeout.
const LATE: Time = 2_000_000_000;

/// Maximum time until a side notices a silent connection.
const LIFE_SIGNS: Time = 12_000_000_000;

/// Maximum number of events while a client waits.
const MAX_EVENTS: usize = 1_000_000;

/// gRPC status code for lost connections.
const UNAVAILABLE: i32 = 14;

type Sender = mpsc::UnboundedSender<Result<Vec<u8>, GrpcStatus>>;

enum Event {
    /// A message arrives at the server or at the client.
    Arrives(usize, Way, Result<Vec<u8>, GrpcStatus>),
    /// End of the message stream.
    Ends(usize, Way),
    /// A connection reaches the server.
    Comes(usize),
    /// A timer fires.
    Rings(oneshot::Sender<()>),
    /// A session executes a request.
    Works(u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// A connection.
struct Line {
    /// Client number, or `None` for a hostile client.
    client: Option<usize>,
    token: usize,
    /// Delivery channel of each side; `None` once that side has noticed the end.
    ends: [Option<Sender>; 2],
    /// Messages for the server, until it accepts the connection.
    messages: Option<Messages>,
    /// Set when the connection no longer delivers messages.
    is_broken: bool,
    /// Set after a fault on the connection.
    is_harmed: bool,
    /// Arrival time of the last message in each direction.
    last: [Time; 2],
}

/// Bytes that no other client may see.
struct Secret {
    client: usize,
    /// Clients with this token may see them as well.
    token: Option<usize>,
    bytes: [u8; 16],
}

struct RemoteNetState {
    rng: Rng,
    /// Events ordered by time, then by a random number, then by a counter, which makes keys unique.
    events: BTreeMap<(Time, u64, u64), Event>,
    count: u64,
    lines: Vec<Line>,
    server: Option<BareServer>,
    workers: BTreeMap<u64, Worker>,
    /// Sessions with a scheduled work event.
    busy: Vec<u64>,
    /// Time at which the server is up again.
    up: Time,
    restarts: u64,
    made_room: u64,
    hostile: Hostile,
    secrets: Vec<Secret>,
    /// Number of events while a client waited, limited by `MAX_EVENTS`.
    waited: usize,
}

/// Counters of the events that end sessions. While they are unchanged, a session still exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionEnders {
    restarts: u64,
    made_room: u64,
    jumps: usize,
}

pub(crate) struct Net {
    this: Weak<Net>,
    world: Arc<World>,
    clock: Arc<dyn Clock>,
    device: Arc<SimDevice>,
    options: RemoteServerOptions,
    tasks: Tasks,
    state: Mutex<RemoteNetState>,
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Net({:?})", self.world)
    }
}

impl Net {
    pub fn new(
        seed: u64,
        world: &Arc<World>,
        clock: Arc<dyn Clock>,
        device: Arc<SimDevice>,
        options: RemoteServerOptions,
    ) -> Arc<Self> {
        let mut rng = Rng::new(seed);
        let hostile = Hostile::new(rng.bits());
        let tasks = Tasks::new(rng.bits());
        let state = RemoteNetState {
            rng,
            events: BTreeMap::new(),
            count: 0,
            lines: Vec::new(),
            server: None,
            workers: BTreeMap::new(),
            busy: Vec::new(),
            up: 0,
            restarts: 0,
            made_room: 0,
            hostile,
            secrets: Vec::new(),
            waited: 0,
        };
        Arc::new_cyclic(|this| Net {
            this: Weak::clone(this),
            world: Arc::clone(world),
            clock,
            device,
            options,
            tasks,
            state: Mutex::new(state),
        })
    }

    fn lock(&self) -> MutexGuard<'_, RemoteNetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the environment of a side.
    pub fn environment(&self, side: Side) -> Arc<dyn SessionEnvironment> {
        Arc::new(SimSessionEnvironment {
            net: Weak::clone(&self.this),
            clock: Arc::clone(&self.clock),
            side,
        })
    }

    /// Returns a client's connection factory, with its token.
    pub fn wire(&self, client: usize, token: usize) -> Box<dyn Wire> {
        Box::new(SimWire {
            net: Weak::clone(&self.this),
            client,
            token,
        })
    }

    /// Registers bytes that only this client may see or, if a token is given, only clients with
    /// that token.
    pub fn keep_secret(&self, client: usize, token: Option<usize>, bytes: [u8; 16]) {
        let mut state = self.lock();
        state.hostile.knows_of(&bytes.repeat(SECRET / bytes.len()));
        state.secrets.push(Secret {
            client,
            token,
            bytes,
        });
    }

    pub fn harm(&self) -> SessionEnders {
        let state = self.lock();
        let made_room = state.server.as_ref().map_or(0, BareServer::made_room);
        let is_jump = |strike: &&FaultOccurrence| strike.fault == Fault::ClockJump;
        SessionEnders {
            restarts: state.restarts,
            made_room: state.made_room + made_room,
            jumps: self
                .world
                .with(|world| world.struck().iter().filter(is_jump).count()),
        }
    }

    /// Returns whether a fault affected a client's last connection, or the client has none.
    pub fn is_harmed(&self, client: usize) -> bool {
        let state = self.lock();
        let mut lines = state.lines.iter().rev();
        let last = lines.find(|line| line.client == Some(client));
        last.is_none_or(|line| line.is_harmed)
    }

    fn note(&self, text: impl FnOnce() -> String) {
        self.world.with(|state| state.note(|_| text()));
    }

    /// Opens a connection. Returns its number and the stream of server messages.
    fn open(&self, client: Option<usize>, token: usize) -> (usize, Messages) {
        let (to_server, at_server) = mpsc::unbounded_channel();
        let (to_client, at_client) = mpsc::unbounded_channel();
        let now = self.world.now();
        let mut state = self.lock();
        let number = state.lines.len();
        state.lines.push(Line {
            client,
            token,
            ends: [Some(to_server), Some(to_client)],
            messages: Some(Box::pin(UnboundedReceiverStream::new(at_server))),
            is_broken: false,
            is_harmed: false,
            last: [now; 2],
        });
        let delay = state.delay();
        state.plan(now + delay, Event::Comes(number));
        (number, Box::pin(UnboundedReceiverStream::new(at_client)))
    }

    /// Sends a message.
    fn put(&self, line: usize, way: Way, message: Result<Vec<u8>, GrpcStatus>) {
        if self.lock().lines[line].is_broken {
            return;
        }
        let late = if self.world.strikes(Fault::Late) {
            LATE
        } else {
            0
        };
        let is_cut = self.world.strikes(Fault::Cut);
        let is_silent = self.world.strikes(Fault::Silence);
        let now = self.world.now();
        let mut state = self.lock();
        state.lines[line].is_harmed |= late > 0;
        if !is_silent {
            let delay = state.delay() + late;
            state.send(line, now + delay, way, |line| {
                Event::Arrives(line, way, message)
            });
        }
        if is_cut || is_silent {
            state.break_line(line, now, if is_silent { LIFE_SIGNS } else { 1_000_000 });
        }
    }

    /// Ends one direction of a connection.
    fn end(&self, line: usize, way: Way) {
        let now = self.world.now();
        let mut state = self.lock();
        if !state.lines[line].is_broken {
            let delay = state.delay();
            state.send(line, now + delay, way, |line| Event::Ends(line, way));
        }
    }

    /// Breaks a connection.
    fn cut(&self, line: usize) {
        let now = self.world.now();
        self.lock().break_line(line, now, LIFE_SIGNS);
    }

    /// Kills a client's process.
    pub fn kill(&self, client: usize) {
        self.note(|| format!("client {client} is killed"));
        let mut state = self.lock();
        let now = self.world.now();
        for number in 0..state.lines.len() {
            if state.lines[number].client == Some(client) {
                state.break_line(number, now, LIFE_SIGNS);
                state.lines[number].ends[1] = None;
            }
        }
        drop(state);
        self.tasks.end(Side::Client(client));
    }

    /// Kills the server's process; another one starts after a while.
    fn restart(&self) {
        self.tasks.end(Side::Server);
        let now = self.world.now();
        let mut state = self.lock();
        let server = state.server.take();
        let workers = std::mem::take(&mut state.workers);
        state.busy.clear();
        state.made_room += server.as_ref().map_or(0, BareServer::made_room);
        state.restarts += 1;
        for number in 0..state.lines.len() {
            state.break_line(number, now, 1_000_000);
            let line = &mut state.lines[number];
            line.ends[0] = None;
            line.messages = None;
        }
        state.up = now + state.rng.pick(&[0, 1_000_000_000, 5_000_000_000]);
        drop(state);
        drop(workers);
        drop(server);
        let far = self.live();
        if far > 0 {
            self.violate(format!("a server that is gone leaves {far} bytes"));
        }
    }

    fn violate(&self, mistake: String) {
        self.world.with(|state| state.violate(mistake));
    }

    /// Returns the bytes in use on the server's device.
    fn live(&self) -> usize {
        self.world.with(|state| {
            let far = state.live().find(|(name, _)| *name == FAR);
            far.map_or(0, |(_, live)| live.bytes)
        })
    }

    /// Processes the next event, if it is due by `until`. Returns false if none is.
    fn turn(&self, until: Option<Time>) -> bool {
        self.settle();
        let event = {
            let mut state = self.lock();
            loop {
                let Some((&(at, ..), event)) = state.events.first_key_value() else {
                    return false;
                };
                // The timer's waiter is gone.
                if matches!(event, Event::Rings(bell) if bell.is_closed()) {
                    state.events.pop_first();
                    continue;
                }
                if until.is_some_and(|until| at > until) {
                    return false;
                }
                let Some((_, event)) = state.events.pop_first() else {
                    return false;
                };
                drop(state);
                let wait = at.saturating_sub(self.world.now());
                self.world.with(|state| state.advance(wait));
                break event;
            }
        };
        match event {
            Event::Arrives(line, Way::ToServer, message) => {
                if self.world.strikes(Fault::Restart) {
                    self.note(|| "the server starts again".to_owned());
                    self.restart();
                } else {
                    self.give(line, Way::ToServer, message);
                }
            }
            Event::Arrives(line, Way::ToClient, message) => {
                self.overhear(line, &message);
                self.give(line, Way::ToClient, message);
            }
            Event::Ends(line, way) => self.lock().lines[line].ends[way as usize] = None,
            Event::Comes(line) => self.serve(line),
            Event::Rings(bell) => drop(bell.send(())),
            Event::Works(number) => self.work(number),
        }
        self.settle();
        self.check_memory();
        self.play_hostile();
        true
    }

    /// Runs all tasks that are ready, without advancing time.
    fn settle(&self) {
        self.tasks.go_on();
        let now = self.world.now();
        let mut state = self.lock();
        let (over, there) = std::mem::take(&mut state.workers)
            .into_iter()
            .partition(|(_, worker)| worker.is_over());
        state.workers = there;
        let over: BTreeMap<u64, Worker> = over;
        let wanted = state
            .workers
            .iter()
            .filter(|(_, worker)| worker.is_in_use());
        let wanted = wanted.map(|(&number, _)| number);
        let wanted: Vec<u64> = wanted.filter(|n| !state.busy.contains(n)).collect();
        for number in wanted {
            state.busy.push(number);
            let delay = state.delay();
            state.plan(now + delay, Event::Works(number));
        }
        drop(state);
        // Drop the workers, which frees memory, only after releasing the lock.
        drop(over);
    }

    /// Delivers a message to a side.
    fn give(&self, line: usize, way: Way, message: Result<Vec<u8>, GrpcStatus>) {
        let mut state = self.lock();
        let end = &mut state.lines[line].ends[way as usize];
        let is_end = message.is_err();
        if let Some(sender) = end {
            let _ = sender.send(message);
        }
        if is_end {
            *end = None;
        }
    }

    /// Inspects a message to a client.
    fn overhear(&self, line: usize, message: &Result<Vec<u8>, GrpcStatus>) {
        let mut state = self.lock();
        let state = &mut *state;
        let to = &state.lines[line];
        match message {
            Ok(bytes) => {
                let is_foreign = |secret: &&Secret| match secret.token {
                    Some(token) => token != to.token,
                    None => to.client != Some(secret.client),
                };
                let is_in = |secret: &&Secret| bytes.windows(16).any(|part| part == secret.bytes);
                let seen = state.secrets.iter().filter(is_foreign).find(is_in);
                if let Some(secret) = seen {
                    let mistake = format!(
                        "client {:?} with token {} sees bytes of client {}",
                        to.client, to.token, secret.client
                    );
                    self.violate(mistake);
                }
                if to.client.is_none() {
                    state.hostile.overhear(line, bytes);
                } else {
                    state.hostile.overhears_reply(bytes);
                }
            }
            Err(refusal) => self.note(|| format!("line {line}: {refusal:?}")),
        }
    }

    /// Accepts a connection on the server.
    fn serve(&self, number: usize) {
        let environment = self.environment(Side::Server);
        let mut state = self.lock();
        let line = &mut state.lines[number];
        let Some(messages) = line.messages.take() else {
            return;
        };
        let owner = format!("token {}", line.token);
        if state.server.is_none() {
            let device: Arc<dyn Device> = Arc::clone(&self.device) as _;
            match BareServer::new(&[device], self.options.clone(), environment) {
                Ok(server) => state.server = Some(server),
                Err(error) => return self.violate(format!("no server: {error}")),
            }
        }
        let Some(server) = &state.server else { return };
        let serving = server.serve(&owner, messages);
        drop(state);
        let net = Weak::clone(&self.this);
        let say = move |message| {
            if let Some(net) = net.upgrade() {
                match message {
                    Some(message) => net.put(number, Way::ToClient, message),
                    None => net.end(number, Way::ToClient),
                }
            }
        };
        self.tasks.spawn(
            Side::Server,
            Box::pin(async move {
                match serving.await {
                    Ok(mut replies) => {
                        while let Some(reply) = replies.next().await {
                            say(Some(reply));
                        }
                        say(None);
                    }
                    Err(refusal) => say(Some(Err(refusal))),
                }
            }),
        );
    }

    /// Executes a session's request.
    fn work(&self, number: u64) {
        let mut state = self.lock();
        state.busy.retain(|busy| *busy != number);
        let worker = state.workers.remove(&number);
        drop(state);
        if let Some(mut worker) = worker {
            worker.step();
            self.lock().workers.insert(number, worker);
        }
    }

    /// Returns the session whose work is due.
    fn due_work(&self) -> Option<u64> {
        let now = self.world.now();
        let mut state = self.lock();
        let mut due = state.events.iter().take_while(|((at, ..), _)| *at <= now);
        let (key, number) = due.find_map(|(key, event)| match event {
            Event::Works(number) => Some((*key, *number)),
            _ => None,
        })?;
        state.events.remove(&key);
        Some(number)
    }

    /// Checks that memory in use matches the server's accounting and that no session exceeds its
    /// quota.
    fn check_memory(&self) {
        let state = self.lock();
        let counted = state.server.as_ref().map_or(0, BareServer::memory_in_use);
        drop(state);
        let there = self.live();
        let quota = self.options.memory.unwrap_or(usize::MAX);
        if there > counted || counted > quota {
            self.violate(format!(
                "clients have {there} bytes, the server counts {counted}, and the quota is {quota}"
            ));
        }
    }

    /// Lets hostile clients act occasionally.
    fn play_hostile(&self) {
        let mut state = self.lock();
        let open = state.lines.iter().enumerate();
        let open = open.filter(|(_, line)| line.client.is_none() && line.ends[1].is_some());
        let open: Vec<usize> = open.map(|(number, _)| number).collect();
        let Some(deed) = state.hostile.next(&open) else {
            return;
        };
        let is_up = state.up <= self.world.now();
        drop(state);
        match deed {
            ClientAction::Come(token, message) if is_up => {
                let (line, replies) = self.open(None, token);
                // Replies are inspected in transit; hostile clients do not read them.
                drop(replies);
                self.lock().hostile.came(line);
                self.put(line, Way::ToServer, Ok(message));
            }
            ClientAction::Come(..) => {}
            ClientAction::Say(line, message) => self.put(line, Way::ToServer, Ok(message)),
            ClientAction::Leave(line) => {
                self.end(line, Way::ToServer);
                self.lock().lines[line].ends[1] = None;
            }
            ClientAction::Cut(line) => {
                self.cut(line);
                self.lock().lines[line].ends[1] = None;
            }
        }
    }

    /// Processes events for a period of time.
    pub fn pass(&self, time: Duration) {
        let until = self.world.now() + time.as_nanos() as Time;
        while self.turn(Some(until)) {}
        let left = until.saturating_sub(self.world.now());
        self.world.with(|state| state.advance(left));
    }

    /// Lets other tasks proceed while a client waits.
    pub fn meanwhile(&self, most: Option<Duration>) {
        let until = most.map(|most| self.world.now() + most.as_nanos() as Time);
        if !self.turn(until) {
            match until {
                Some(until) => {
                    let left = until.saturating_sub(self.world.now());
                    self.world.with(|state| state.advance(left));
                }
                None => panic!("a client waits for ever"),
            }
        }
        let mut state = self.lock();
        state.waited += 1;
        assert!(state.waited < MAX_EVENTS, "a client waits for too long");
    }

    /// Delivers everything in flight and disconnects hostile clients. Afterwards the server must
    /// hold no resources.
    pub fn close(&self) {
        let mut state = self.lock();
        state.hostile.stop();
        let lines = 0..state.lines.len();
        let hostile: Vec<_> = lines.filter(|&n| state.lines[n].client.is_none()).collect();
        drop(state);
        hostile
            .into_iter()
            .for_each(|line| self.end(line, Way::ToServer));
        while self.turn(None) {}
        let server = self.lock().server.take();
        if let Some(server) = &server {
            let kept = (server.sessions(), server.memory_in_use(), self.live());
            if kept != (0, 0, 0) {
                self.violate(format!(
                    "without clients, there are still {kept:?} sessions, bytes that count, and bytes of the device"
                ));
            }
        }
        drop(server);
        self.tasks.end(Side::Server);
    }
}

impl RemoteNetState {
    fn plan(&mut self, at: Time, event: Event) {
        self.count += 1;
        let order = self.rng.bits();
        self.events.insert((at, order, self.count), event);
    }

    /// Draws a message's delay.
    fn delay(&mut self) -> Time {
        let most = self.rng.pick(&[10, 1_000, 50_000, 1_000_000]);
        self.rng.below(most) as Time
    }

    /// Schedules an arrival at `at`, after earlier messages in the same direction.
    fn send(&mut self, line: usize, at: Time, way: Way, event: impl FnOnce(usize) -> Event) {
        let last = &mut self.lines[line].last[way as usize];
        // One nanosecond apart, to preserve their order.
        *last = at.max(*last + 1);
        let at = *last;
        self.plan(at, event(line));
    }

    /// Stops delivery on a connection. Each side notices within `most`; messages in flight may
    /// arrive until then.
    fn break_line(&mut self, number: usize, now: Time, most: Time) {
        if std::mem::replace(&mut self.lines[number].is_broken, true) {
            return;
        }
        self.lines[number].is_harmed = true;
        for way in [Way::ToServer, Way::ToClient] {
            if self.rng.one_in(2) {
                self.events.retain(|_, event| {
                    !matches!(event, Event::Arrives(line, other, _) | Event::Ends(line, other)
                        if (*line, *other) == (number, way))
                });
            }
            let lost = GrpcStatus {
                code: UNAVAILABLE,
                text: "the connection is lost".to_owned(),
            };
            let at = now + 1 + self.rng.below(most as usize) as Time;
            self.send(number, at, way, |line| Event::Arrives(line, way, Err(lost)));
        }
    }
}

/// The environment of a side.
#[derive(Debug)]
struct SimSessionEnvironment {
    net: Weak<Net>,
    clock: Arc<dyn Clock>,
    side: Side,
}

impl SessionEnvironment for SimSessionEnvironment {
    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn sleep(&self, time: Duration) -> BoxedTask {
        let (bell, rings) = oneshot::channel();
        if let Some(net) = self.net.upgrade() {
            let at = net.world.now() + time.as_nanos() as Time;
            net.lock().plan(at, Event::Rings(bell));
        }
        Box::pin(async move {
            if rings.await.is_err() {
                // The simulation has ended.
                std::future::pending().await
            }
        })
    }

    fn pause(&self, time: Duration) {
        let Some(net) = self.net.upgrade() else {
            return;
        };
        net.settle();
        net.world
            .with(|state| state.advance(time.as_nanos() as Time));
        // Other sessions proceed meanwhile: each has its own thread.
        while let Some(number) = net.due_work() {
            net.work(number);
            net.settle();
        }
    }

    fn random(&self, bytes: &mut [u8]) -> io::Result<()> {
        let net = self.net.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let mut state = net.lock();
        bytes
            .iter_mut()
            .for_each(|byte| *byte = state.rng.bits() as u8);
        Ok(())
    }

    fn spawn(&self, task: BoxedTask) {
        if let Some(net) = self.net.upgrade() {
            net.tasks.spawn(self.side, task);
        }
    }

    fn work(&self, worker: Worker) -> io::Result<()> {
        let net = self.net.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let mut state = net.lock();
        state.count += 1;
        let number = state.count;
        state.workers.insert(number, worker);
        Ok(())
    }
}

struct SimWire {
    net: Weak<Net>,
    client: usize,
    token: usize,
}

impl Wire for SimWire {
    fn connect(&self, mut messages: Messages) -> Connecting {
        let (net, client, token) = (Weak::clone(&self.net), self.client, self.token);
        Box::pin(async move {
            let there = net.upgrade().ok_or(Unreachable::Lost)?;
            if there.lock().up > there.world.now() {
                return Err(Unreachable::Nobody);
            }
            let (line, replies) = there.open(Some(client), token);
            let carry = async move {
                while let Some(message) = messages.next().await {
                    let Some(net) = net.upgrade() else { return };
                    if let Ok(message) = &message {
                        net.lock().hostile.overhears(message);
                    }
                    net.put(line, Way::ToServer, message);
                }
                if let Some(net) = net.upgrade() {
                    net.end(line, Way::ToServer);
                }
            };
            there.tasks.spawn(Side::Client(client), Box::pin(carry));
            Ok(replies)
        })
    }
}
