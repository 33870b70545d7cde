//! Several clients of a remote-mode server, each with a language model on the server's device, over
//! unreliable connections, alongside hostile clients.
//!
//! Tokens must be bit-identical to those of one plain reference device, and each run must execute
//! exactly once, whatever happens to connections. An error is allowed only if a device failed or
//! the server restarted. Then the client reconnects and must get the same tokens. No client may
//! hang, and no client may receive another client's bytes, including those left in memory or in the
//! server's store.
//!
//! Client identities are given: TLS, keys and proofs of tokens are not simulated.

mod counter;
mod hostile;
mod net;
mod tasks;

use crate::case::{CaseOutcome, SimCase};
use crate::clock::SimClock;
use crate::environment::SimFiles;
use crate::known::{KnownModel, known};
use crate::player::{Player, close};
use crate::served::{self, Logits, Text, Tokens};
use crate::world::World;
use counter::Counted;
use net::{Net, SessionEnders};
use samite_core::environment::Clock;
use samite_core::{Buffer, CancelToken, Device, Environment, Usage};
use samite_llm::Context;
use samite_remote::{RemoteOptions, RemoteServerOptions, bare};
use samite_testing::{Counter, Rng};
use std::sync::Arc;
use std::time::Duration;
use tasks::Side;

/// Number of client tokens.
const TOKENS: usize = 2;
/// Memory quotas in bytes: of all sessions of the server together, and of one session.
const MEMORY: (usize, usize) = (16 << 20, 2 << 20);
/// Time by which a side has noticed a lost connection and a restarted server accepts connections.
const SETTLED: Duration = Duration::from_secs(20);

type Result<T> = std::result::Result<T, String>;

/// A client's resources on the server.
struct RemoteClientResources {
    context: Context,
    device: Arc<dyn Device>,
    counter: Counted,
    /// Buffers that contain its secrets.
    secrets: Vec<Arc<dyn Buffer>>,
    /// Harm counters when its session began.
    harm: SessionEnders,
}

/// A client's call.
#[derive(Clone, Debug)]
enum Call {
    /// Decodes these tokens.
    Decode(Tokens),
    /// Submits this many runs, without waiting, that must execute exactly once.
    Count(usize),
    /// Allocates memory, stores a secret in it and reads it again.
    KeepAlive(Usage),
    /// Frees that memory.
    Free,
    /// Disconnects; the next call reconnects.
    Leave,
    /// Kills the client's process; the next call starts another one.
    Die,
}

impl Call {
    fn draw(rng: &mut Rng) -> Self {
        match rng.below(16) {
            0 => Call::Leave,
            1 => Call::Die,
            2 => Call::Free,
            3..6 => Call::KeepAlive(rng.pick(&[Usage::Any, Usage::Weights])),
            6..10 => Call::Count(rng.pick(&[1, 3, 3, 40])),
            _ => Call::Decode(served::tokens(rng)),
        }
    }
}

struct Client {
    number: usize,
    token: usize,
    net: Arc<Net>,
    text: Text,
    loaded: Option<RemoteClientResources>,
    /// Bytes that no other client has: one secret in memory, and one in weights.
    secrets: [[u8; 16]; 2],
}

/// Runs a case.
pub(crate) fn play(case: &SimCase, world: &Arc<World>, outcome: &mut CaseOutcome) -> Result<()> {
    let mut rng = Rng::new(case.seed_for(5));
    let known = known()?;
    let known = &known[rng.below(known.len())];
    world.with(|state| state.is_zeroed = true);
    let clock: Arc<dyn Clock> = Arc::new(SimClock::new(world));
    let (net, store) = network(case, world, &clock)?;
    let count = 1 + rng.below(3);
    let clients =
        (0..count).map(|number| Client::new(number, known, &net, world, &clock, &mut rng));
    let mut clients = clients.collect::<Result<Vec<_>>>()?;
    let steps = (2 + rng.below(8)).min(case.steps);
    for _ in 0..steps {
        let client = rng.below(clients.len());
        clients[client].step(world, &mut rng)?;
        outcome.steps += 1;
    }
    outcome.devices = 1 + clients.len();
    drop(clients);
    net.close();
    drop((net, store));
    close(world)
}

/// Creates the network with its server, and the folder of the server's store.
fn network(
    case: &SimCase,
    world: &Arc<World>,
    clock: &Arc<dyn Clock>,
) -> Result<(Arc<Net>, Option<tempfile::TempDir>)> {
    let mut rng = Rng::new(case.seed_for(3));
    let device = served::far(world, &mut rng, &Counter::OPS);
    let store = if rng.one_in(2) {
        Some(tempfile::tempdir().map_err(|error| error.to_string())?)
    } else {
        None
    };
    let options = RemoteServerOptions {
        store: store.as_ref().map(|folder| folder.path().to_owned()),
        memory: Some(MEMORY.0),
        memory_per_session: Some(MEMORY.1),
        waiting: rng.pick(&[(256, 64 << 20), (3, 1 << 10)]),
        sessions: 16,
        sessions_per_token: 6,
        ..RemoteServerOptions::new("key".into(), "tokens".into())
    };
    let clock = Arc::clone(clock);
    Ok((
        Net::new(case.seed_for(7), world, clock, device, options),
        store,
    ))
}

impl Client {
    fn new(
        number: usize,
        known: &KnownModel,
        net: &Arc<Net>,
        world: &Arc<World>,
        clock: &Arc<dyn Clock>,
        rng: &mut Rng,
    ) -> Result<Self> {
        let environment = Environment {
            clock: Arc::clone(clock),
            files: Arc::new(SimFiles::new(world, known.files.clone())),
            ..Environment::system()
        };
        let text = Text::new(known, environment, "remote0", rng)?;
        let token = rng.below(TOKENS);
        let secrets = [0; 2].map(|_: u8| std::array::from_fn(|_| rng.bits() as u8));
        net.keep_secret(number, None, secrets[0]);
        net.keep_secret(number, Some(token), secrets[1]);
        Ok(Client {
            number,
            token,
            net: Arc::clone(net),
            text,
            loaded: None,
            secrets,
        })
    }

    /// Makes a call: first with faults, then again without faults if it failed.
    fn step(&mut self, world: &Arc<World>, rng: &mut Rng) -> Result<()> {
        let call = Call::draw(rng);
        let cancel = CancelToken::new();
        let faults = rng.below(3);
        let number = self.number;
        world.with(|state| state.note(|_| format!("CLIENT {number}: {call:?}")));
        let player = Player::new(world, faults, &cancel);
        let before = self.net.harm();
        let mut tried = self.make(&call);
        let explained = player.stop();
        if let Err(error) = &tried {
            // A session ends with its server, when its client was away for too long, or when
            // another session of the same token needed the memory. A broken connection is no
            // excuse, except while connecting.
            let begun = self.loaded.as_ref().map(|loaded| loaded.harm);
            let is_over = error.contains("device lost") || error.starts_with(CONNECTING);
            let is_excused = explained(error)
                || is_over && begun.unwrap_or(before) != self.net.harm()
                || error.starts_with(CONNECTING) && self.net.is_harmed(number);
            if !is_excused {
                return Err(format!(
                    "client {number}: {call:?}: an error that nothing explains: {error}"
                ));
            }
            world.with(|state| state.note(|_| format!("client {number} again, after: {error}")));
            self.loaded = None;
            self.net.pass(SETTLED);
            tried = self.make(&call);
        }
        let values = tried.map_err(|error| {
            format!("client {number}: {call:?}: nothing fails any more, and still: {error}")
        })?;
        if let Call::Decode(tokens) = &call {
            let judged = self.text.go_on(tokens, &values);
            judged.map_err(|error| format!("client {number}: {call:?}: {error}"))?;
        }
        Ok(())
    }

    /// Makes the call. For a decode, returns the requested logits.
    fn make(&mut self, call: &Call) -> Result<Logits> {
        if matches!(call, Call::Die) {
            self.net.kill(self.number);
        }
        if matches!(call, Call::Die | Call::Leave) {
            self.loaded = None;
            return Ok(Vec::new());
        }
        if self.loaded.is_none() {
            self.loaded = Some(self.load()?);
        }
        let Some(loaded) = &mut self.loaded else {
            return Ok(Vec::new());
        };
        let text = |error: samite_core::Error| error.to_string();
        match call {
            Call::Decode(tokens) => return self.text.decode(&mut loaded.context, tokens),
            Call::Count(times) => loaded.counter.count(*times)?,
            Call::KeepAlive(usage) => {
                let secret = self.secrets[usize::from(*usage == Usage::Weights)];
                let kept = served::keep(&loaded.device, *usage, &secret)?;
                loaded.secrets.push(kept);
            }
            Call::Free => {
                loaded.secrets.clear();
                // A lost device reports an error here.
                loaded.counter.count(0)?;
            }
            Call::Leave | Call::Die => return Err(text(samite_core::Error::invalid("it left"))),
        }
        Ok(Vec::new())
    }

    /// Connects, loads the model and replays everything computed so far.
    fn load(&self) -> Result<RemoteClientResources> {
        let harm = self.net.harm();
        let others = Arc::downgrade(&self.net);
        let devices = bare::connect(
            self.net.wire(self.number, self.token),
            &RemoteOptions::default(),
            self.net.environment(Side::Client(self.number)),
            Box::new(move |most| {
                if let Some(net) = others.upgrade() {
                    net.meanwhile(most);
                }
            }),
        );
        let devices = devices.map_err(|why| format!("{CONNECTING}{why}"))?;
        let device = devices
            .into_iter()
            .next()
            .ok_or("a server without devices")?;
        Ok(RemoteClientResources {
            context: self.text.load(&device)?,
            counter: Counted::new(&device).map_err(|error| error.to_string())?,
            device,
            secrets: Vec::new(),
            harm,
        })
    }
}

/// Prefix of errors that occur before a session exists.
const CONNECTING: &str = "connecting: ";
