//! An encoder without memory: predicts what the real one needs.

use crate::encoder::{EncoderOptions, complete, memory_use, reserved};
use crate::error::{Error, Result};
use crate::spec::VisionSpec;
use crate::weights::EncoderWeights;
use samite_gguf::GgufFile;
use samite_llm::{MemoryUse, Model};
use samite_sched::memory_plan::ReservedBytes;
use samite_sched::{Assignments, Options, Scheduler};
use std::path::Path;

/// The plan of an encoder, from the header of its file. It has the memory of an
/// [`Encoder`](crate::Encoder) that is loaded with the same options.
#[derive(Debug)]
pub struct EncoderPlan {
    name: Box<str>,
    spec: VisionSpec,
    memory: Vec<MemoryUse>,
}

impl EncoderPlan {
    /// Plans the image encoder of an mmproj file.
    ///
    /// # Errors
    /// Returns an error that names the file and the key or tensor that makes it unusable.
    pub fn new(path: impl AsRef<Path>, options: &EncoderOptions) -> Result<Self> {
        let file = GgufFile::open_header(path, options.load_mode)?;
        Self::from_gguf(&file, options).map_err(|error| error.in_file(file.path()))
    }

    fn from_gguf(file: &GgufFile, options: &EncoderOptions) -> Result<Self> {
        let mut spec = VisionSpec::from_metadata(file.metadata(), options.tokens)?;
        let Some(device) = options.devices.first() else {
            return Err(Error::model("no device is given"));
        };
        let weights = EncoderWeights::unallocated(file, &spec, device, options.repack)?;
        complete(&mut spec, &weights);
        let scheduler = Scheduler::new(options.devices.clone(), Options::default())?;
        let mut bytes = ReservedBytes::default();
        for built in reserved(&spec, &weights) {
            let plan = scheduler.plan(&built?.graph, Assignments::NONE)?;
            bytes.add(plan.memory());
        }
        let memories = scheduler.devices().memories().iter();
        let compute = memories.map(|memory| memory.name().to_owned());
        let memory = memory_use(weights.bytes(), compute.zip(bytes.by_memory()));
        Ok(EncoderPlan {
            name: file.path().display().to_string().into(),
            spec,
            memory,
        })
    }

    /// Returns the description of the encoder.
    pub fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    /// Checks that `model` can read the encoder's rows.
    ///
    /// # Errors
    /// Returns the errors of [`VisionSpec::check`].
    pub fn check(&self, model: &Model) -> Result<()> {
        self.spec.check(&self.name, model)
    }

    /// Returns the memory that the encoder uses, by kind of memory.
    pub fn memory(&self) -> &[MemoryUse] {
        &self.memory
    }

    /// Returns the bytes that it uses of all kinds of memory.
    pub fn bytes(&self) -> usize {
        let rows = self.memory.iter();
        rows.map(|row| row.weights.saturating_add(row.compute))
            .sum()
    }
}
