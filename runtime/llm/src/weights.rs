//! The weights of a model, by name.

mod load;
mod plan;

pub use plan::PlannedTensor;
pub(crate) use plan::WeightPlan;

use samite_core::{LockRefused, LockedMemory, StoredTensor};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A weight with what is known about it.
#[derive(Debug)]
struct Weight {
    stored: Arc<StoredTensor>,
    /// Name of its data in the file.
    data: Box<str>,
    device: usize,
    /// Whether a rule put it there.
    explicit: bool,
}

/// The weights of a model by name.
#[derive(Debug, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Weight>,
    /// Bytes by name of the memory.
    bytes: BTreeMap<String, usize>,
    have_data: bool,
    locked: Option<LockedMemory>,
    lock_refused: Option<LockRefused>,
}

impl Weights {
    /// The weight called `name`, if the model has it.
    pub fn get(&self, name: &str) -> Option<&Arc<StoredTensor>> {
        self.tensors.get(name).map(|weight| &weight.stored)
    }

    /// The name in the file of the data of the weight called `name`: another one for an embedding that is the output, too.
    pub fn data_name(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|weight| &*weight.data)
    }

    /// The number of the device that the weight called `name` is for.
    pub fn device(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|weight| weight.device)
    }

    /// The device on which operations with the weight called `name` must run, by number, if a rule says so.
    pub fn assigned(&self, name: &str) -> Option<usize> {
        let weight = self.tensors.get(name)?;
        weight.explicit.then_some(weight.device)
    }

    /// Whether they were loaded; otherwise they are for plans only.
    pub fn have_data(&self) -> bool {
        self.have_data
    }

    /// Bytes that are locked in memory, in whole pages; see [`ModelOptions::lock`](crate::ModelOptions::lock).
    pub fn locked_bytes(&self) -> usize {
        self.locked.as_ref().map_or(0, LockedMemory::bytes)
    }

    /// Why nothing is locked, if that was asked for and the system refused.
    pub fn lock_refused(&self) -> Option<&LockRefused> {
        self.lock_refused.as_ref()
    }

    /// Bytes by name of the memory, mapped ones included.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.bytes
            .iter()
            .map(|(name, &bytes)| (name.as_str(), bytes))
    }
}
