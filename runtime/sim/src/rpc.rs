//! Several clients of one ggml RPC server, each with a language model on the server's device, over
//! an unreliable network, alongside hostile clients.
//!
//! Tokens must be bit-identical to those of one plain reference device; an error must be explained
//! by a fault. A client that lost its connection reconnects and must get the same tokens. No client
//! may hang, and no client may receive another client's bytes, including those left in memory.

use crate::case::{CaseOutcome, SimCase};
use crate::clock::SimClock;
use crate::environment::SimFiles;
use crate::fault::Fault;
use crate::known::{KnownModel, known};
use crate::net::{MEMORY, Net, SimNetwork};
use crate::player::{Player, close};
use crate::served::{self, Logits, SECRET, Text, Tokens};
use crate::world::World;
use samite_core::environment::Clock;
use samite_core::{Backend, Buffer, CancelToken, Device, Environment, Usage};
use samite_llm::Context;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{ClientOptions, RpcBackend, Server, ServerOptions};
use samite_testing::Rng;
use std::sync::Arc;

/// Maximum number of simultaneous clients, including hostile ones.
const CLIENTS: usize = 8;

type Result<T> = std::result::Result<T, String>;

/// A client's resources on the server.
struct RpcClientResources {
    context: Context,
    device: Arc<dyn Device>,
    /// Buffer that contains its secret.
    secret: Option<Arc<dyn Buffer>>,
}

/// A client's call.
#[derive(Clone, Debug)]
enum Call {
    /// Decodes these tokens.
    Decode(Tokens),
    /// Allocates memory, stores a secret in it and reads it again.
    Store,
    /// Frees that memory.
    Free,
    /// Disconnects; the next call reconnects.
    Leave,
}

impl Call {
    fn draw(rng: &mut Rng) -> Self {
        match rng.below(12) {
            0 => Call::Leave,
            1 | 2 => Call::Free,
            3..6 => Call::Store,
            _ => Call::Decode(served::tokens(rng)),
        }
    }
}

struct Client {
    number: usize,
    net: Arc<Net>,
    environment: Environment,
    text: Text,
    loaded: Option<RpcClientResources>,
    /// Bytes that no other client has.
    secret: [u8; 16],
}

/// Runs a case.
pub(crate) fn play(case: &SimCase, world: &Arc<World>, outcome: &mut CaseOutcome) -> Result<()> {
    let mut rng = Rng::new(case.seed_for(5));
    let known = known()?;
    let known = &known[rng.below(known.len())];
    let clock: Arc<dyn Clock> = Arc::new(SimClock::new(world));
    let net = network(case, world, &clock);
    let content = known.files.values().next();
    if let Some(end) = content.and_then(|content| content.last_chunk::<16>()) {
        net.keep_secret(None, end);
    }
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
    drop(net);
    close(world)
}

/// Creates the network and the server's device.
fn network(case: &SimCase, world: &Arc<World>, clock: &Arc<dyn Clock>) -> Arc<Net> {
    let mut rng = Rng::new(case.seed_for(3));
    let device: Arc<dyn Device> = served::far(world, &mut rng, &[]);
    let fallback = rng
        .one_in(2)
        .then(|| ReferenceDevice::new(ReferenceOptions::named("fallback")) as Arc<dyn Device>);
    let fallbacks: Vec<_> = fallback.into_iter().collect();
    let environment = Environment {
        clock: Arc::clone(clock),
        ..Environment::system()
    };
    let new_server = move || {
        let options = ServerOptions {
            memory: Some(MEMORY),
            memory_per_client: Some(MEMORY / CLIENTS),
            clients: CLIENTS,
            fallbacks: fallbacks.clone(),
            environment: environment.clone(),
            ..ServerOptions::default()
        };
        Server::new(vec![Arc::clone(&device)], options)
    };
    Net::new(
        case.seed_for(7),
        world,
        Arc::clone(clock),
        Box::new(new_server),
    )
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
            network: Arc::new(SimNetwork {
                net: Arc::clone(net),
                client: number,
            }),
            ..Environment::system()
        };
        let text = Text::new(known, environment.clone(), "RPC0", rng)?;
        let secret: [u8; 16] = std::array::from_fn(|_| rng.bits() as u8);
        net.keep_secret(Some(number), &secret);
        Ok(Client {
            number,
            net: Arc::clone(net),
            environment,
            text,
            loaded: None,
            secret,
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
        let struck = world.with(|state| state.struck().len());
        let mut tried = self.make(&call);
        let explained = player.stop();
        if let Err(error) = &tried {
            // A clock jump triggers every client's timeout.
            let strikes = world.with(|state| state.struck()[struck..].to_vec());
            let has = |fault| strikes.iter().any(|strike| strike.fault == fault);
            let is_excused = !error.contains("memory was freed")
                && !error.contains("is not empty")
                && !error.contains("was not written")
                && (explained(error)
                    || self.net.is_harmed(number)
                    || has(Fault::ClockJump)
                    || has(Fault::Allocate));
            if !is_excused {
                return Err(format!(
                    "client {number}: {call:?}: an error that nothing explains: {error}"
                ));
            }
            world.with(|state| state.note(|_| format!("client {number} again, after: {error}")));
            self.loaded = None;
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
        if matches!(call, Call::Leave) {
            self.loaded = None;
            return Ok(Vec::new());
        }
        if self.loaded.is_none() {
            self.loaded = Some(self.load()?);
        }
        let Some(loaded) = &mut self.loaded else {
            return Ok(Vec::new());
        };
        match call {
            Call::Decode(tokens) => return self.text.decode(&mut loaded.context, tokens),
            Call::Store => {
                loaded.secret = Some(served::keep(&loaded.device, Usage::Any, &self.secret)?);
            }
            Call::Free | Call::Leave => loaded.free()?,
        }
        Ok(Vec::new())
    }

    /// Connects, loads the model and replays everything computed so far.
    fn load(&self) -> Result<RpcClientResources> {
        let options = ClientOptions {
            environment: self.environment.clone(),
            ..ClientOptions::default()
        };
        let backend = RpcBackend::connect(&["server:1"], &options);
        let Some(device) = backend.devices().first().map(Arc::clone) else {
            let rejected = backend.rejected();
            return Err(rejected
                .first()
                .map_or_else(String::new, |no| no.why.clone()));
        };
        Ok(RpcClientResources {
            context: self.text.load(&device)?,
            device,
            secret: None,
        })
    }
}

impl RpcClientResources {
    /// Frees the memory with the secret, which must then be available to others.
    fn free(&mut self) -> Result<()> {
        if let Some(secret) = self.secret.take() {
            let before = self.device.memory().free;
            drop(secret);
            let after = self.device.memory().free;
            if let (Some(before), Some(after)) = (before, after)
                && after < before.saturating_add(SECRET)
            {
                return Err(format!(
                    "memory was freed, and {before} bytes became {after}"
                ));
            }
        }
        Ok(())
    }
}
