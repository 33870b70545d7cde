//! A simulated network with a ggml RPC server.
//!
//! Clients block on the host's thread, as with a system connection. The server's sessions are state
//! machines that consume bytes. While a client waits, the network delivers bytes, including those
//! of other clients, until the client's own have arrived. Data arrives in pieces, delayed but in
//! order. It may be late, or be lost together with everything after it; connections may be cut, and
//! the server may restart.

use crate::fault::{Fault, FaultOccurrence};
use crate::hostile::{ClientAction, Hostile};
use crate::served::FAR;
use crate::world::{Time, World};
use samite_core::environment::{Clock, Connection, Listener, Network};
use samite_rpc::{End, RpcSession, Server};
use samite_testing::Rng;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Delay of late data, shorter than any timeout.
const LATE: Time = 5_000_000_000;

/// Creates a server.
type NewServer = Box<dyn Fn() -> Arc<Server> + Send>;

/// An event on a connection.
enum Event {
    ToServer(Vec<u8>),
    ToClient(Vec<u8>),
    /// The client's side is closed.
    ClientLeft,
    /// The server's side is closed.
    ServerLeft,
    /// Deadline by which a message must be complete.
    Deadline,
}

/// A connection.
struct Line {
    /// Client number, or `None` for a hostile client.
    client: Option<usize>,
    session: Option<RpcSession>,
    /// Bytes that the client has not received yet.
    inbox: VecDeque<u8>,
    is_closed: bool,
    /// Set when the connection stops delivering data.
    is_silent: bool,
    /// Set after a fault on the connection that explains an error.
    is_harmed: bool,
    /// Arrival times of the last bytes, to the server and to the client.
    last: [Time; 2],
    /// Everything that the server sent and no check has examined yet.
    heard: Vec<u8>,
}

struct RpcNetState {
    rng: Rng,
    /// Events ordered by time, then by a random number, then by a counter, which makes keys unique.
    events: BTreeMap<(Time, u64, u64), (usize, Event)>,
    count: u64,
    lines: Vec<Line>,
    server: Arc<Server>,
    new_server: NewServer,
    hostile: Hostile,
    /// Bytes that only their owner may see, with the owner, if it is a client.
    secrets: Vec<(Option<usize>, Vec<u8>)>,
}

/// The network.
pub(crate) struct Net {
    world: Arc<World>,
    clock: Arc<dyn Clock>,
    state: Mutex<RpcNetState>,
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
        new_server: NewServer,
    ) -> Arc<Self> {
        let mut rng = Rng::new(seed);
        let hostile = Hostile::new(rng.bits());
        let state = RpcNetState {
            rng,
            events: BTreeMap::new(),
            count: 0,
            lines: Vec::new(),
            server: new_server(),
            new_server,
            hostile,
            secrets: Vec::new(),
        };
        Arc::new(Net {
            world: Arc::clone(world),
            clock,
            state: Mutex::new(state),
        })
    }

    fn lock(&self) -> MutexGuard<'_, RpcNetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the currently listening server.
    pub fn server(&self) -> Arc<Server> {
        Arc::clone(&self.lock().server)
    }

    /// Registers bytes that only `owner` may see, or no client at all.
    pub fn keep_secret(&self, owner: Option<usize>, bytes: &[u8]) {
        self.lock().secrets.push((owner, bytes.to_vec()));
    }

    /// Returns whether a network or server fault affected a client's last connection.
    pub fn is_harmed(&self, client: usize) -> bool {
        let state = self.lock();
        let mut lines = state.lines.iter().rev();
        let last = lines.find(|line| line.client == Some(client));
        last.is_some_and(|line| line.is_harmed)
    }

    fn note(&self, text: impl FnOnce() -> String) {
        self.world.with(|state| state.note(|_| text()));
    }

    /// Returns the number of clock jumps so far.
    fn jumps(&self) -> usize {
        let is_jump = |strike: &&FaultOccurrence| strike.fault == Fault::ClockJump;
        let jumps =
            |state: &mut crate::world::WorldState| state.struck().iter().filter(is_jump).count();
        self.world.with(jumps)
    }

    /// Opens a connection for a client, or for a hostile client.
    fn open(&self, client: Option<usize>) -> usize {
        let mut state = self.lock();
        // The server rejects connections above its limit.
        let session = state.server.begin();
        let is_closed = session.is_none();
        state.lines.push(Line {
            client,
            session,
            inbox: VecDeque::new(),
            is_closed,
            is_silent: false,
            is_harmed: false,
            last: [0; 2],
            heard: Vec::new(),
        });
        state.lines.len() - 1
    }

    /// Sends bytes to the server or to the client, whole or in pieces.
    fn put(&self, line: usize, to_client: bool, bytes: &[u8]) {
        let late = if self.world.strikes(Fault::Late) {
            LATE
        } else {
            0
        };
        let now = self.world.now();
        let mut state = self.lock();
        if state.lines[line].is_silent {
            return;
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = match state.rng.below(8) {
                0 => 1 + state.rng.below(rest.len().min(16)),
                1 => 1 + state.rng.below(rest.len()),
                _ => rest.len(),
            };
            let (piece, later) = rest.split_at(len.min(rest.len()));
            rest = later;
            let delay = state.rng.pick(&[10, 1_000, 50_000, 1_000_000]);
            let delay = state.rng.below(delay) as Time + late;
            let event = if to_client {
                Event::ToClient(piece.to_vec())
            } else {
                Event::ToServer(piece.to_vec())
            };
            state.plan(line, now + delay, usize::from(to_client), event);
        }
    }

    /// Breaks a connection: data in flight is lost.
    fn cut(&self, line: usize) {
        self.note(|| format!("line {line} is cut"));
        let mut state = self.lock();
        let session = state.cut(line);
        drop(state);
        drop(session);
    }

    /// Restarts the server: all connections break.
    fn restart(&self) {
        let mut state = self.lock();
        let lines = 0..state.lines.len();
        let sessions: Vec<_> = lines.map(|line| state.cut(line)).collect();
        drop(state);
        drop(sessions);
        let old = self.server();
        self.check_empty(&old);
        let mut state = self.lock();
        state.server = (state.new_server)();
    }

    fn check_empty(&self, server: &Server) {
        let kept = (server.clients(), server.memory_in_use());
        if kept != (0, 0) {
            let mistake = format!("a server without clients has {kept:?} clients and bytes");
            self.world.with(|state| state.violate(mistake));
        }
    }

    /// Processes the next event, if it is due by `until`. Returns false if none is.
    fn turn(&self, until: Option<Time>) -> bool {
        let mut state = self.lock();
        let Some((&(at, ..), _)) = state.events.first_key_value() else {
            return false;
        };
        if until.is_some_and(|until| at > until) {
            return false;
        }
        let Some((_, (line, event))) = state.events.pop_first() else {
            return false;
        };
        drop(state);
        let wait = at.saturating_sub(self.world.now());
        self.world.with(|state| state.advance(wait));
        match event {
            Event::ToServer(bytes) => self.serve(line, &bytes),
            Event::ToClient(bytes) => self.hear(line, &bytes),
            Event::ClientLeft => self.end_session(line, "the client left"),
            Event::ServerLeft => self.lock().lines[line].is_closed = true,
            Event::Deadline => {
                let state = self.lock();
                let session = state.lines[line].session.as_ref();
                let deadline = session.and_then(RpcSession::deadline);
                drop(state);
                if deadline.is_some_and(|deadline| self.clock.now() >= deadline) {
                    self.lock().lines[line].is_harmed = true;
                    self.end_session(line, "a message is too slow");
                }
            }
        }
        self.check_memory();
        self.play_hostile();
        true
    }

    fn end_session(&self, line: usize, why: &str) {
        self.note(|| format!("line {line}: {why}"));
        let now = self.world.now();
        let mut state = self.lock();
        let session = state.lines[line].session.take();
        if session.is_some() {
            state.plan(line, now, 1, Event::ServerLeft);
        }
        drop(state);
        drop(session);
    }

    /// Delivers bytes to the server.
    fn serve(&self, line: usize, bytes: &[u8]) {
        if self.world.strikes(Fault::Restart) {
            return self.restart();
        }
        let Some(mut session) = self.lock().lines[line].session.take() else {
            return;
        };
        let mut replies = Vec::new();
        let taken = session.take(bytes, &mut |reply| {
            replies.extend(reply);
            Ok(())
        });
        self.note(|| {
            format!(
                "line {line}: {} bytes, {} bytes of replies",
                bytes.len(),
                replies.len()
            )
        });
        self.put(line, true, &replies);
        match taken {
            Ok(()) => {
                let deadline = session.deadline();
                let wait = deadline.map(|end| end.saturating_duration_since(self.clock.now()));
                let now = self.world.now();
                let mut state = self.lock();
                state.lines[line].session = Some(session);
                if let Some(wait) = wait {
                    let at = now + wait.as_nanos() as Time;
                    state.plan(line, at, 2, Event::Deadline);
                }
            }
            Err(end) => {
                let why = match end {
                    End::Lost(error) => error.to_string(),
                    End::Refused(reason) => reason.into_owned(),
                };
                let mut state = self.lock();
                let is_explained = crate::player::is_injected(&why);
                state.lines[line].is_harmed |= is_explained;
                state.lines[line].session = Some(session);
                drop(state);
                self.end_session(line, &why);
            }
        }
    }

    /// Delivers bytes to a client.
    fn hear(&self, line: usize, bytes: &[u8]) {
        let mut state = self.lock();
        let state = &mut *state;
        let line = &mut state.lines[line];
        line.inbox.extend(bytes);
        let from = line.heard.len().saturating_sub(64);
        line.heard.drain(..from);
        line.heard.extend(bytes);
        let seen = state.secrets.iter().find(|(owner, secret)| {
            let is_foreign = match (owner, line.client) {
                (Some(owner), client) => client != Some(*owner),
                // Clients of the model may read the weights that they loaded.
                (None, client) => client.is_none(),
            };
            is_foreign
                && line
                    .heard
                    .windows(secret.len())
                    .any(|bytes| bytes == secret)
        });
        if let Some((owner, _)) = seen {
            let mistake = format!("client {:?} sees bytes of client {owner:?}", line.client);
            self.world.with(|state| state.violate(mistake));
        }
        if line.client.is_none() {
            line.inbox.clear();
        }
    }

    /// Checks that memory in use matches the server's accounting and that no session exceeds its
    /// quota.
    fn check_memory(&self) {
        let server = self.server();
        let counted = server.memory_in_use();
        self.world.with(|state| {
            let far = state.live().find(|(name, _)| *name == FAR);
            let there = far.map_or(0, |(_, live)| live.bytes);
            if there > counted || counted > MEMORY {
                state.violate(format!(
                    "clients have {there} bytes, the server counts {counted}, and the quota is {MEMORY}"
                ));
            }
        });
    }

    /// Lets hostile clients act occasionally.
    fn play_hostile(&self) {
        let mut state = self.lock();
        let open = state.lines.iter().enumerate();
        let open = open.filter(|(_, line)| line.client.is_none() && line.session.is_some());
        let open: Vec<usize> = open.map(|(number, _)| number).collect();
        let Some(deed) = state.hostile.next(open.len()) else {
            return;
        };
        drop(state);
        match deed {
            ClientAction::Come(bytes) => {
                let line = self.open(None);
                self.put(line, false, &bytes);
            }
            ClientAction::Say(which, bytes) => self.put(open[which], false, &bytes),
            ClientAction::Leave(which) => {
                let now = self.world.now();
                self.lock().plan(open[which], now, 0, Event::ClientLeft);
            }
            ClientAction::Cut(which) => self.cut(open[which]),
        }
    }

    /// Delivers everything in flight and disconnects hostile clients. Afterwards the server must
    /// hold no resources.
    pub fn close(&self) {
        let mut state = self.lock();
        state.hostile.stop();
        let now = self.world.now();
        for line in 0..state.lines.len() {
            if state.lines[line].client.is_none() {
                state.plan(line, now, 0, Event::ClientLeft);
            }
        }
        drop(state);
        while self.turn(None) {}
        self.check_empty(&self.server());
    }
}

/// Memory quota in bytes of all clients of the server together.
pub(crate) const MEMORY: usize = 16 << 20;

impl RpcNetState {
    /// Schedules an event at `at`, after earlier events in the same direction: to the server, to
    /// the client, or neither.
    fn plan(&mut self, line: usize, at: Time, way: usize, event: Event) {
        let at = match self.lines[line].last.get_mut(way) {
            Some(last) => {
                // One nanosecond apart, to preserve their order.
                *last = at.max(*last + 1);
                *last
            }
            None => at,
        };
        self.count += 1;
        let order = self.rng.bits();
        self.events.insert((at, order, self.count), (line, event));
    }

    fn cut(&mut self, line: usize) -> Option<RpcSession> {
        self.events.retain(|_, (other, _)| *other != line);
        let line = &mut self.lines[line];
        line.is_closed = true;
        line.is_harmed = true;
        line.session.take()
    }
}

/// A client's connection factory to the server.
#[derive(Debug)]
pub(crate) struct SimNetwork {
    pub net: Arc<Net>,
    pub client: usize,
}

impl Network for SimNetwork {
    fn connect(&self, _: &str, _: Duration) -> Result<Box<dyn Connection>> {
        Ok(Box::new(SimConnection {
            line: self.net.open(Some(self.client)),
            net: Arc::clone(&self.net),
            timeout: None,
        }))
    }

    fn listen(&self, _: &str) -> Result<Box<dyn Listener>> {
        Err(ErrorKind::Unsupported.into())
    }
}

#[derive(Debug)]
struct SimConnection {
    net: Arc<Net>,
    line: usize,
    timeout: Option<Time>,
}

impl Connection for SimConnection {
    fn send(&mut self, bytes: &[u8]) -> Result<usize> {
        let net = &self.net;
        net.lock().hostile.overhear(bytes);
        // Time passes, in which other clients are served.
        let until = net.world.now() + 1_000;
        while net.turn(Some(until)) {}
        if net.world.strikes(Fault::Cut) {
            net.cut(self.line);
        }
        if net.world.strikes(Fault::Silence) {
            let mut state = net.lock();
            let line = &mut state.lines[self.line];
            line.is_silent = true;
            line.is_harmed = true;
        }
        if net.lock().lines[self.line].is_closed {
            return Err(ErrorKind::BrokenPipe.into());
        }
        net.put(self.line, false, bytes);
        Ok(bytes.len())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let net = &self.net;
        let end = self.timeout.map(|timeout| net.world.now() + timeout);
        let jumps = net.jumps();
        loop {
            {
                let mut state = net.lock();
                let line = &mut state.lines[self.line];
                if !line.inbox.is_empty() {
                    let len = line.inbox.len().min(buffer.len());
                    for (to, from) in buffer.iter_mut().zip(line.inbox.drain(..len)) {
                        *to = from;
                    }
                    return Ok(len);
                }
                if line.is_closed {
                    return Ok(0);
                }
            }
            if net.turn(end) {
                continue;
            }
            let Some(end) = end else {
                let mistake = "a client waits for ever".to_owned();
                net.world.with(|state| state.violate(mistake));
                return Err(Error::other("a wait without an end"));
            };
            let left = end.saturating_sub(net.world.now());
            net.world.with(|state| state.advance(left));
            // A clock jump triggers every timeout, and the connection stays lost.
            if net.jumps() > jumps {
                net.lock().lines[self.line].is_harmed = true;
            }
            return Err(ErrorKind::TimedOut.into());
        }
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        self.timeout = timeout.map(|timeout| timeout.as_nanos() as Time);
        Ok(())
    }
}

impl Drop for SimConnection {
    fn drop(&mut self) {
        let now = self.net.world.now();
        let mut state = self.net.lock();
        state.plan(self.line, now, 0, Event::ClientLeft);
    }
}
