//! Several clients of one server of ggml's RPC protocol, each with a language model on the server's device, over a network that loses what it can, beside
//! clients that keep no rule.
//!
//! Tokens are those that one plain reference device computes, bit by bit, or there is an error, which something that went wrong explains. A client that lost
//! its connection makes another one and gets the same tokens. Nobody waits for ever, and no client is told bytes of another one, nor those that another one left in memory.

use crate::case::{Case, Outcome};
use crate::clock::SimClock;
use crate::device::{SimDevice, SimOptions};
use crate::environment::SimFiles;
use crate::fault::Fault;
use crate::known::{Known, MODEL, known};
use crate::net::{FAR, MEMORY, Net, SimNetwork};
use crate::player::{Player, close};
use crate::world::World;
use samite_core::environment::Clock;
use samite_core::{
    Backend, Buffer, CancelToken, DType, Device, DeviceKind, Environment, Layout, Slot, TensorRef,
    Usage,
};
use samite_llm::{Batch, Context, ContextOptions, Model, ModelOptions, PlacementRule};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_rpc::{ClientOptions, RpcBackend, Server, ServerOptions};
use samite_testing::{RANDOM_GRAPH_OPS, Rng};
use std::sync::Arc;

/// Clients that may be there at the same time, those without rules among them.
const CLIENTS: usize = 8;
/// Tokens of one text.
const CONTEXT: usize = 32;
/// Bytes in which a client keeps what nobody else may see.
const SECRET: usize = 4096;

type Result<T> = std::result::Result<T, String>;

/// What one client has on the server.
struct Loaded {
    context: Context,
    device: Arc<dyn Device>,
    /// Memory with its secret.
    secret: Option<Arc<dyn Buffer>>,
}

/// What a client does.
#[derive(Clone, Debug)]
enum Call {
    /// Tokens that follow, and whether their logits are wanted.
    Decode(Vec<(u32, bool)>),
    /// Takes memory, keeps a secret in it and reads it again.
    Keep,
    /// Frees that memory.
    Free,
    /// Leaves the server, and comes back with the next call.
    Leave,
}

impl Call {
    fn draw(rng: &mut Rng) -> Self {
        match rng.below(12) {
            0 => Call::Leave,
            1 | 2 => Call::Free,
            3..6 => Call::Keep,
            _ => {
                let count = 1 + rng.below(3);
                let token = |_| (3 + rng.below(256) as u32, rng.one_in(2));
                Call::Decode((0..count).map(token).collect())
            }
        }
    }
}

struct Client {
    number: usize,
    net: Arc<Net>,
    environment: Environment,
    rules: Vec<PlacementRule>,
    options: ContextOptions,
    loaded: Option<Loaded>,
    alone: Context,
    history: Vec<(u32, bool)>,
    /// Bytes that nobody else has.
    secret: [u8; 16],
}

/// Plays a case.
pub(crate) fn play(case: &Case, world: &Arc<World>, outcome: &mut Outcome) -> Result<()> {
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

/// The network, and the server's device.
fn network(case: &Case, world: &Arc<World>, clock: &Arc<dyn Clock>) -> Arc<Net> {
    let mut rng = Rng::new(case.seed_for(3));
    let asynchronous = rng.one_in(2);
    let lacks = RANDOM_GRAPH_OPS.iter().filter(|_| rng.one_in(16));
    let options = SimOptions {
        // A device that is lost stays lost, and with it all that its server is for.
        kind: DeviceKind::Cpu,
        asynchronous,
        events: asynchronous,
        without_ops: lacks.map(|&name| name.to_owned()).collect(),
        alignment: rng.pick(&[1, 32, 256]),
        workspace: rng.pick(&[0, 0, 512]),
        ..SimOptions::named(FAR)
    };
    let fallback = rng
        .one_in(2)
        .then(|| ReferenceDevice::new(ReferenceOptions::named("fallback")) as Arc<dyn Device>);
    let fallbacks: Vec<_> = fallback.into_iter().collect();
    world.with(|state| state.note(|_| format!("{options:?}")));
    let device: Arc<dyn Device> = SimDevice::new(world, options);
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
        known: &Known,
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
        let options = ContextOptions {
            n_ctx: Some(CONTEXT),
            n_batch: 8,
            n_ubatch: rng.pick(&[2, 8]),
            n_seq: 1,
            kv_types: [rng.pick(&[DType::F32, DType::F16]); 2],
            ..ContextOptions::default()
        };
        let alone = Context::new(Arc::clone(&known.alone), options.clone());
        let mut rules = Vec::new();
        for layer in ["layers=0", "layers=1", "output"] {
            let device = rng.pick(&["RPC0", "RPC0", "RPC0", "here"]);
            rules.push(format!("{layer}:{device}"));
        }
        let secret: [u8; 16] = std::array::from_fn(|_| rng.bits() as u8);
        net.keep_secret(Some(number), &secret);
        Ok(Client {
            number,
            net: Arc::clone(net),
            rules: PlacementRule::parse_all(&rules.join(";")).map_err(|e| e.to_string())?,
            options: ContextOptions {
                environment: environment.clone(),
                ..options
            },
            environment,
            loaded: None,
            alone: alone.map_err(|error| error.to_string())?,
            history: Vec::new(),
            secret,
        })
    }

    /// Makes a call: first while faults strike, then again without if it failed.
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
            // A clock that jumps lets everybody run out of patience.
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
            if self.history.len() + tokens.len() > CONTEXT {
                return Ok(());
            }
            let expected = decode(&mut self.alone, self.history.len(), tokens)?;
            if values != expected {
                return Err(format!("client {number}: {call:?}: wrong logits"));
            }
            self.history.extend(tokens);
        }
        Ok(())
    }

    /// The logits that were wanted, if it is a decode.
    fn make(&mut self, call: &Call) -> Result<Vec<Vec<f32>>> {
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
            Call::Decode(tokens) if self.history.len() + tokens.len() > CONTEXT => {}
            Call::Decode(tokens) => return decode(&mut loaded.context, self.history.len(), tokens),
            Call::Keep => loaded
                .keep(&self.secret)
                .map_err(|error| error.to_string())?,
            Call::Free | Call::Leave => loaded.free()?,
        }
        Ok(Vec::new())
    }

    /// Connects, loads the model and computes everything so far.
    fn load(&self) -> Result<Loaded> {
        let text = |error: samite_llm::Error| error.to_string();
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
        let here = ReferenceDevice::new(ReferenceOptions::named("here"));
        let options = ModelOptions {
            rules: self.rules.clone(),
            fit: None,
            threads: Some(1),
            environment: self.environment.clone(),
            ..ModelOptions::new(vec![Arc::clone(&device), here])
        };
        let model = Model::load(MODEL, &options).map_err(text)?;
        let mut context = Context::new(model, self.options.clone()).map_err(text)?;
        if !self.history.is_empty() {
            for (at, tokens) in self.history.chunks(8).enumerate() {
                decode(&mut context, at * 8, tokens)?;
            }
        }
        Ok(Loaded {
            context,
            device,
            secret: None,
        })
    }
}

impl Loaded {
    /// Frees the memory with the secret, which must be there for others then.
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

    /// Takes new memory, which has nothing in it, and keeps the secret there.
    fn keep(&mut self, secret: &[u8; 16]) -> samite_core::Result<()> {
        let memory = self.device.buffer_type();
        let buffer = memory.allocate(SECRET, Usage::Any)?;
        let layout = Layout::contiguous(DType::I8, [SECRET, 1, 1, 1])?;
        let slot = Slot { offset: 0, layout };
        let place = TensorRef { buffer, slot };
        let mut bytes = vec![1; SECRET];
        place.read(0, &mut bytes)?;
        if bytes.iter().any(|&byte| byte != 0) {
            return Err(samite_core::Error::invalid("new memory is not empty"));
        }
        let written = secret.repeat(SECRET / secret.len());
        place.write(0, &written)?;
        place.read(0, &mut bytes)?;
        if bytes != written {
            return Err(samite_core::Error::invalid("what is read was not written"));
        }
        self.secret = Some(place.buffer);
        Ok(())
    }
}

pub(crate) fn decode(
    context: &mut Context,
    at: usize,
    tokens: &[(u32, bool)],
) -> Result<Vec<Vec<f32>>> {
    let mut batch = Batch::new();
    for (offset, &(token, wanted)) in tokens.iter().enumerate() {
        batch.add(token, (at + offset) as i32, &[0], wanted);
    }
    context.decode(&batch).map_err(|error| error.to_string())?;
    let logits = (0..tokens.len()).filter_map(|index| context.logits(index));
    Ok(logits.map(<[f32]>::to_vec).collect())
}
