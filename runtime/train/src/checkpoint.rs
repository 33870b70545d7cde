//! Checkpoints: everything that a run needs to resume exactly where it stopped, in one GGUF file.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::parameters::{Stored, buffer};
use crate::trainer::Trainer;
use samite_core::{DType, StoredTensor};
use samite_gguf::{GgufFile, KEY_ARCHITECTURE, LoadMode, Metadata, TensorSpec, Writer};
use std::path::Path;
use std::sync::Arc;

const ARCHITECTURE: &str = "samite-checkpoint";
const STEP: &str = "samite.checkpoint.step";
const CONFIG: &str = "samite.checkpoint.config";
const BASE: &str = "samite.checkpoint.base";
const DATA: &str = "samite.checkpoint.data";
const CHECKSUM: &str = "samite.checkpoint.checksum";

/// The file of a checkpoint.
#[derive(Debug)]
pub struct Checkpoint;

/// Returns the tensors of a parameter that persist after a step, with their names in the file.
fn tensors(parameter: &Stored) -> [(String, &Arc<StoredTensor>); 3] {
    let [mean, square] = &parameter.means;
    let name = &parameter.spec.name;
    [
        (name.clone(), &parameter.weights),
        (format!("{name}.mean"), mean),
        (format!("{name}.square"), square),
    ]
}

/// Returns the part of a configuration that must be the same to resume a run. Paths, the intervals
/// of measurements and checkpoints, and recomputation may change.
fn identity(config: &Config) -> Config {
    let mut config = config.clone();
    config.data.train = "".into();
    config.data.held_out = "".into();
    if let Some(lora) = &mut config.lora {
        lora.base = "".into();
    }
    config.training.recompute = false;
    config.training.checkpoint_every = 1;
    config.training.evaluate_every = 1;
    config.training.evaluate_batches = 1;
    config
}

/// CRC-32 of the contents of a checkpoint.
struct Checksum(crc32fast::Hasher);

impl Checksum {
    /// Starts with the contents that are not tensors.
    fn new(metadata: &Metadata) -> Result<Self> {
        let mut sum = Checksum(crc32fast::Hasher::new());
        sum.add(metadata.require::<&str>(CONFIG)?.as_bytes());
        for key in [STEP, DATA] {
            sum.add(&metadata.require::<u64>(key)?.to_le_bytes());
        }
        if let Some(base) = metadata.get::<u64>(BASE)? {
            sum.add(&base.to_le_bytes());
        }
        Ok(sum)
    }

    fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(self) -> u32 {
        self.0.finalize()
    }
}

impl Checkpoint {
    /// Writes the state of `trainer` to `path`. The file appears complete or not at all. `data` is
    /// the [fingerprint](crate::Dataset::fingerprint) of the training data.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The previous file still exists then.
    pub fn save(path: impl AsRef<Path>, trainer: &mut Trainer, data: u64) -> Result<()> {
        trainer.scheduler_mut().synchronize()?;
        let config = serde_json::to_string(&identity(trainer.config()))
            .map_err(|error| Error::config(error.to_string()))?;
        let mut metadata = Metadata::new();
        metadata.set(KEY_ARCHITECTURE, ARCHITECTURE)?;
        metadata.set(STEP, trainer.steps())?;
        metadata.set(CONFIG, config.as_str())?;
        metadata.set(DATA, data)?;
        if let Some(base) = trainer.base() {
            metadata.set(BASE, base.fingerprint()?)?;
        }
        // Every tensor is read twice, because the checksum comes first in the file.
        let read = |tensor: &StoredTensor| -> Result<Vec<u8>> {
            let place = tensor.tensor();
            let mut bytes = buffer(place.layout().bytes())?;
            place.read(0, &mut bytes)?;
            Ok(bytes)
        };
        let mut sum = Checksum::new(&metadata)?;
        for parameter in trainer.parameters() {
            for (_, tensor) in tensors(parameter) {
                sum.add(&read(tensor)?);
            }
        }
        metadata.set(CHECKSUM, sum.finish())?;
        let mut specs = Vec::new();
        for parameter in trainer.parameters() {
            for (name, tensor) in tensors(parameter) {
                specs.push(TensorSpec::new(
                    &name,
                    DType::F32,
                    &tensor.layout().shape()[..2],
                )?);
            }
        }
        let mut writer = Writer::create(path, &metadata, specs)?;
        for parameter in trainer.parameters() {
            for (_, tensor) in tensors(parameter) {
                writer.append(&read(tensor)?)?;
            }
        }
        Ok(writer.commit()?)
    }

    /// Restores the state of `trainer` from the file at `path`.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] if the file is not a checkpoint, or has another configuration
    /// or other data. Also fails if it cannot be read.
    pub fn load(path: impl AsRef<Path>, trainer: &mut Trainer, data: u64) -> Result<()> {
        let path = path.as_ref();
        let wrong = |problem: String| Error::Checkpoint {
            path: path.to_owned(),
            problem,
        };
        let file = GgufFile::open(path, LoadMode::Read)?;
        let metadata = file.metadata();
        if metadata.get::<&str>(KEY_ARCHITECTURE)? != Some(ARCHITECTURE) {
            return Err(wrong("this is no checkpoint of a training run".into()));
        }
        let checksum = metadata.get::<u32>(CHECKSUM)?.ok_or_else(|| {
            wrong("it has no checksum, so that nobody can tell whether it is whole: start anew in another folder".into())
        })?;
        let mut sum = Checksum::new(metadata)?;
        let known: Config = serde_json::from_str(metadata.require::<&str>(CONFIG)?)
            .map_err(|error| wrong(format!("its configuration cannot be read: {error}")))?;
        let wanted = identity(trainer.config());
        if known != wanted {
            return Err(wrong(format!(
                "it is of another run: {}; go on with that configuration, or start anew in another folder",
                difference(&known, &wanted)
            )));
        }
        if metadata.require::<u64>(DATA)? != data {
            return Err(wrong(
                "it learnt from other data: go on with that, or start anew in another folder"
                    .into(),
            ));
        }
        let base = trainer.base().map(|base| base.fingerprint()).transpose()?;
        if metadata.get::<u64>(BASE)? != base {
            return Err(wrong(
                "it is of an adapter of another model: go on with that model, or start anew in another folder"
                    .into(),
            ));
        }
        let step = metadata.require::<u64>(STEP)?;
        // Check everything before changing anything.
        for parameter in trainer.parameters() {
            for (name, tensor) in tensors(parameter) {
                let info = file.require_tensor(&name)?;
                if info.dtype != DType::F32 || info.shape != tensor.layout().shape() {
                    return Err(wrong(format!(
                        "tensor '{name}' is {} {:?}, not {}",
                        info.dtype,
                        info.shape,
                        tensor.layout()
                    )));
                }
                let mut bytes = buffer(info.size)?;
                file.read_tensor_into(info, &mut bytes)?;
                sum.add(&bytes);
            }
        }
        if sum.finish() != checksum {
            return Err(wrong(
                "it is damaged: its checksum is not that of its content; start anew, or restore the file".into(),
            ));
        }
        trainer.scheduler_mut().synchronize()?;
        for parameter in trainer.parameters() {
            for (name, tensor) in tensors(parameter) {
                let mut bytes = buffer(tensor.layout().bytes())?;
                file.read_tensor_into(file.require_tensor(&name)?, &mut bytes)?;
                tensor.tensor().write(0, &bytes)?;
            }
        }
        trainer.set_steps(step);
        Ok(())
    }
}

/// Returns the first field in which two configurations differ.
fn difference(a: &Config, b: &Config) -> String {
    fn first(path: &str, a: &serde_json::Value, b: &serde_json::Value) -> Option<String> {
        if a == b {
            return None;
        }
        if let (Some(x), Some(y)) = (a.as_object(), b.as_object()) {
            let inner = x.keys().chain(y.keys()).find_map(|key| {
                let none = serde_json::Value::Null;
                let path = format!("{path}{}{key}", if path.is_empty() { "" } else { "." });
                first(
                    &path,
                    x.get(key).unwrap_or(&none),
                    y.get(key).unwrap_or(&none),
                )
            });
            return inner.or_else(|| Some(path.to_owned()));
        }
        Some(format!("{path} was {a} there and is {b} here"))
    }
    let value = |config: &Config| serde_json::to_value(config).unwrap_or_default();
    first("", &value(a), &value(b)).unwrap_or_default()
}
