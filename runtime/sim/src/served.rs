//! Parts shared by clients of simulated servers, independent of the protocol: the server's device,
//! a text that a model generates there, and a secret in its memory.

use crate::device::{SimDevice, SimOptions};
use crate::known::{KnownModel, MODEL};
use crate::world::World;
use samite_core::{Buffer, DType, Device, DeviceKind, Environment, Layout, Slot, TensorRef, Usage};
use samite_llm::{Batch, Context, ContextOptions, Model, ModelOptions, PlacementRule};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{RANDOM_GRAPH_OPS, Rng};
use std::sync::Arc;

/// Name of the server's device.
pub(crate) const FAR: &str = "far";
/// Size of a client's secret in bytes. The remote mode sends weights of this size by hash.
pub(crate) const SECRET: usize = 4096;
/// Context length in tokens.
const CONTEXT: usize = 32;

type Result<T> = std::result::Result<T, String>;

/// Tokens, each with a flag that requests its logits.
pub(crate) type Tokens = Vec<(u32, bool)>;
/// Requested logits.
pub(crate) type Logits = Vec<Vec<f32>>;

/// Creates the server's device, which supports at least the `needed` operations.
pub(crate) fn far(world: &Arc<World>, rng: &mut Rng, needed: &[&str]) -> Arc<SimDevice> {
    let asynchronous = rng.one_in(2);
    let lacks = RANDOM_GRAPH_OPS.iter().filter(|_| rng.one_in(16));
    let options = SimOptions {
        // A lost device stays lost and would make its server useless.
        kind: DeviceKind::Cpu,
        asynchronous,
        events: asynchronous,
        without_ops: lacks
            .filter(|name| !needed.contains(name))
            .map(|&name| name.to_owned())
            .collect(),
        alignment: rng.pick(&[1, 32, 256]),
        workspace: rng.pick(&[0, 0, 512]),
        ..SimOptions::named(FAR)
    };
    world.with(|state| state.note(|_| format!("{options:?}")));
    SimDevice::new(world, options)
}

/// Draws some tokens.
pub(crate) fn tokens(rng: &mut Rng) -> Tokens {
    let count = 1 + rng.below(3);
    let token = |_| (3 + rng.below(256) as u32, rng.one_in(2));
    (0..count).map(token).collect()
}

/// A text, with the results of one plain device.
pub(crate) struct Text {
    environment: Environment,
    rules: Vec<PlacementRule>,
    options: ContextOptions,
    alone: Context,
    history: Tokens,
}

impl Text {
    /// Creates an empty text of a model whose layers are on the server's device, which the client
    /// calls `far`, and on a local one.
    pub fn new(
        known: &KnownModel,
        environment: Environment,
        far: &str,
        rng: &mut Rng,
    ) -> Result<Self> {
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
            let device = rng.pick(&[far, far, far, "here"]);
            rules.push(format!("{layer}:{device}"));
        }
        Ok(Text {
            rules: PlacementRule::parse_all(&rules.join(";")).map_err(|e| e.to_string())?,
            options: ContextOptions {
                environment: environment.clone(),
                ..options
            },
            environment,
            alone: alone.map_err(|error| error.to_string())?,
            history: Vec::new(),
        })
    }

    /// Loads the model and replays everything computed so far.
    pub fn load(&self, device: &Arc<dyn Device>) -> Result<Context> {
        let text = |error: samite_llm::Error| error.to_string();
        let here = ReferenceDevice::new(ReferenceOptions::named("here"));
        let options = ModelOptions {
            rules: self.rules.clone(),
            fit: None,
            threads: Some(1),
            environment: self.environment.clone(),
            ..ModelOptions::new(vec![Arc::clone(device), here])
        };
        let model = Model::load(MODEL, &options).map_err(text)?;
        let mut context = Context::new(model, self.options.clone()).map_err(text)?;
        for (at, tokens) in self.history.chunks(8).enumerate() {
            decode(&mut context, at * 8, tokens)?;
        }
        Ok(context)
    }

    /// Decodes further tokens. Returns no logits if they do not fit.
    pub fn decode(&self, context: &mut Context, tokens: &Tokens) -> Result<Logits> {
        if self.has_room(tokens) {
            decode(context, self.history.len(), tokens)
        } else {
            Ok(Vec::new())
        }
    }

    /// Appends tokens after checking that `said` are the correct logits.
    pub fn go_on(&mut self, tokens: &Tokens, said: &Logits) -> Result<()> {
        if !self.has_room(tokens) {
            return Ok(());
        }
        if *said != decode(&mut self.alone, self.history.len(), tokens)? {
            return Err("wrong logits".to_owned());
        }
        self.history.extend(tokens);
        Ok(())
    }

    fn has_room(&self, tokens: &Tokens) -> bool {
        self.history.len() + tokens.len() <= CONTEXT
    }
}

fn decode(context: &mut Context, at: usize, tokens: &[(u32, bool)]) -> Result<Logits> {
    let mut batch = Batch::new();
    for (offset, &(token, wanted)) in tokens.iter().enumerate() {
        batch.add(token, (at + offset) as i32, &[0], wanted);
    }
    context.decode(&batch).map_err(|error| error.to_string())?;
    let logits = (0..tokens.len()).filter_map(|index| context.logits(index));
    Ok(logits.map(<[f32]>::to_vec).collect())
}

/// Allocates new memory, checks that it is empty, and stores a secret there.
pub(crate) fn keep(
    device: &Arc<dyn Device>,
    usage: Usage,
    secret: &[u8; 16],
) -> Result<Arc<dyn Buffer>> {
    let written = secret.repeat(SECRET / secret.len());
    let kept = || -> samite_core::Result<_> {
        let buffer = device.buffer_type().allocate(SECRET, usage)?;
        let layout = Layout::contiguous(DType::I8, [SECRET, 1, 1, 1])?;
        let slot = Slot { offset: 0, layout };
        let place = TensorRef { buffer, slot };
        let (mut before, mut after) = (vec![1; SECRET], vec![1; SECRET]);
        place.read(0, &mut before)?;
        place.write(0, &written)?;
        place.read(0, &mut after)?;
        Ok((place.buffer, before, after))
    };
    let (buffer, before, after) = kept().map_err(|error| error.to_string())?;
    if before.iter().any(|&byte| byte != 0) {
        return Err("new memory is not empty".to_owned());
    }
    if after != written {
        return Err("what is read was not written".to_owned());
    }
    Ok(buffer)
}
